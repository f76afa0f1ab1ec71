/* option.c - reads, checks, writes and explains the options of a table. Twin: option.h. */
#include "base/option.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nsa.h"

#define EXACT 9007199254740992.0 /* 2^53: every integer up to it is a double */

/* ---- Values -------------------------------------------------------------------------------- */

static bool in_range(const option *o, double x) {
    return x <= o->max && (o->traits & OPTION_ABOVE_MIN ? x > o->min : x >= o->min);
}

static bool parse_integer(const option *o, const char *text, int64_t *value) {
    char *end;
    errno = 0;
    long long x = strtoll(text, &end, 10);
    const char *digits = text + (*text == '-');
    *value = x;
    if (*digits < '0' || *digits > '9') return false;
    if (*digits == '0' && digits[1]) return false; /* 010 is 8 to some readers of YAML */
    return end != text && !*end && !errno && in_range(o, (double)x);
}

/* strtod also takes "inf", "nan" and hexadecimal, which no config means. */
static bool parse_number(const option *o, const char *text, double *value) {
    char *end;
    if (!*text || strspn(text, "+-.0123456789eE") != strlen(text)) return false;
    *value = strtod(text, &end);
    return !*end && end != text && isfinite(*value) && in_range(o, *value);
}

static bool parse_switch(const char *text, int64_t *value) {
    static const char *const words[] = {"false", "true", "no", "yes", "off", "on", "0", "1"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strcasecmp(text, words[i])) continue; /* YAML has True and TRUE, as Python does */
        *value = (int64_t)(i % 2);
        return true;
    }
    return false;
}

/* Layers first .. last are one number above the other kinds. */
enum { LAYERS_MAX = 1024 };

option_layers option_layers_of(int64_t value) {
    int64_t range = value - OPTION_LAYERS_RANGE;
    option_layers g = {.kind = (int)(range < 0 ? value : OPTION_LAYERS_RANGE)};
    if (range >= 0) {
        g.first = (int)(range / LAYERS_MAX);
        g.last = (int)(range % LAYERS_MAX);
    }
    return g;
}

/* "true", "selective", "2..8" */
static bool parse_layers(const char *text, int64_t *value) {
    int first, last, used = 0;
    if (parse_switch(text, value)) return true;
    *value = OPTION_LAYERS_SELECTIVE;
    if (!strcmp(text, "selective")) return true;
    if (sscanf(text, "%4d..%4d%n", &first, &last, &used) != 2 || text[used]) return false;
    *value = OPTION_LAYERS_RANGE + (int64_t)first * LAYERS_MAX + last;
    return first >= 0 && first <= last && last < LAYERS_MAX;
}

static bool parse_word(const char *words, const char *text, int64_t *value) {
    size_t length = strlen(text);
    for (*value = 0; words; ++*value) {
        const char *bar = strchr(words, '|');
        size_t word = bar ? (size_t)(bar - words) : strlen(words);
        if (word == length && !strncmp(words, text, word)) return true;
        words = bar ? bar + 1 : NULL;
    }
    return false;
}

/* The shortest list that says the same when it is repeated: "nsa,nsa" is "nsa". */
static void shorten(char *text) {
    size_t length = strlen(text);
    text[length] = ',';
    for (size_t n = 1; n <= length; n++) {
        if (text[n] != ',' || (length + 1) % (n + 1)) continue;
        if (memcmp(text, text + n + 1, length - n)) continue;
        text[n] = 0;
        return;
    }
}

/* "window, nsa": words with commas between them, and spaces where anyone likes. */
static bool parse_pattern(const char *words, const char *text, char *pattern) {
    size_t used = 0;
    int64_t unused;
    for (;; text++) {
        char *word = pattern + used;
        size_t length;
        text += strspn(text, " ");
        length = strcspn(text, ", ");
        if (used + length + 2 > OPTION_BYTES) return false;
        memcpy(word, text, length);
        word[length] = 0;
        if (!parse_word(words, word, &unused)) return false;
        used += length;
        text += length + strspn(text + length, " ");
        if (!*text) break;
        if (*text != ',') return false;
        pattern[used++] = ',';
    }
    shorten(pattern);
    return true;
}

static bool add_text(option_list *list, const char *text) {
    if (list->count == OPTION_LIST_MOST) return false;
    list->at[list->count++] = text;
    return true;
}

static bool store(void *values, const option *o, const char *text) {
    char pattern[OPTION_BYTES], *at = (char *)values + o->offset;
    int64_t integer = 0;
    double number = 0;
    bool ok = true;
    switch (o->kind) {
    case OPTION_INTEGER:
        ok = parse_integer(o, text, &integer);
        break;
    case OPTION_SWITCH:
        ok = parse_switch(text, &integer);
        break;
    case OPTION_LAYERS:
        ok = parse_layers(text, &integer);
        break;
    case OPTION_WORD:
        ok = parse_word(o->words, text, &integer);
        break;
    case OPTION_NUMBER:
        if (!parse_number(o, text, &number)) return false;
        memcpy(at, &number, sizeof number);
        return true;
    case OPTION_PATTERN:
        if (!parse_pattern(o->words, text, pattern)) return false;
        memcpy(at, pattern, strlen(pattern) + 1);
        return true;
    case OPTION_STRING:
        if (strlen(text) >= OPTION_BYTES) return false;
        memcpy(at, text, strlen(text) + 1);
        return true;
    case OPTION_TEXT:
        memcpy(at, &text, sizeof text);
        return true;
    case OPTION_LIST:
        return add_text((option_list *)(void *)at, text);
    }
    if (ok) memcpy(at, &integer, sizeof integer);
    return ok;
}

bool option_set(void *values, const option *o, const char *text, fault *f) {
    char allowed[256];
    if (store(values, o, text)) return true;
    option_allowed(o, allowed, sizeof allowed);
    return fault_set(f, "%s", allowed);
}

void option_defaults(const option *rows, size_t count, void *values) {
    fault unused;
    for (size_t i = 0; i < count; i++)
        if (rows[i].initial) option_set(values, &rows[i], rows[i].initial, &unused);
}

bool option_integer(const char *what, const char *text, int64_t min, int64_t max, int64_t *to,
                    fault *f) {
    option o = {.kind = OPTION_INTEGER, .min = (double)min, .max = (double)max};
    fault reason;
    return option_set(to, &o, text, &reason) ||
           fault_set(f, "%s %.100s: %s", what, text, reason.text);
}

static void write_layers(char *text, size_t bytes, option_layers g) {
    static const char *const words[] = {"false", "true", "selective"};
    if (g.kind == OPTION_LAYERS_RANGE)
        snprintf(text, bytes, "%d..%d", g.first, g.last);
    else
        snprintf(text, bytes, "%s", words[g.kind]);
}

/* Numbers as people write them: no exponent for whole ones, and no digit more than needed. */
static void write_number(char *text, size_t bytes, double x) {
    if (x == floor(x) && fabs(x) <= EXACT) {
        snprintf(text, bytes, "%.0f", x);
        return;
    }
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, bytes, "%.*g", digits, x);
        if (strtod(text, NULL) == x) return;
    }
}

/* "cosine|constant" to "cosine, constant" */
static void write_words(char *text, size_t bytes, const char *words) {
    size_t n = 0;
    for (; *words && n + 3 < bytes; words++) {
        if (*words != '|') {
            text[n++] = *words;
            continue;
        }
        text[n++] = ',';
        text[n++] = ' ';
    }
    text[n] = 0;
}

void option_allowed(const option *o, char *text, size_t bytes) {
    char min[32], max[32], words[192];
    write_number(min, sizeof min, o->min);
    write_number(max, sizeof max, o->max);
    switch (o->kind) {
    case OPTION_INTEGER:
        snprintf(text, bytes, "must be an integer in %s .. %s", min, max);
        break;
    case OPTION_NUMBER:
        if (o->traits & OPTION_ABOVE_MIN)
            snprintf(text, bytes, "must be a number above %s, at most %s", min, max);
        else
            snprintf(text, bytes, "must be a number in %s .. %s", min, max);
        break;
    case OPTION_SWITCH:
        snprintf(text, bytes, "must be true or false");
        break;
    case OPTION_LAYERS:
        snprintf(text, bytes, "must be true or false, selective, or layers from 0 as 2..8");
        break;
    case OPTION_WORD:
        write_words(words, sizeof words, o->words);
        snprintf(text, bytes, "must be one of: %s", words);
        break;
    case OPTION_PATTERN:
        write_words(words, sizeof words, o->words);
        snprintf(text, bytes, "must be one of, or a list of: %s", words);
        break;
    case OPTION_STRING:
        snprintf(text, bytes, "must be text of at most %d bytes", OPTION_BYTES - 1);
        break;
    case OPTION_TEXT:
        snprintf(text, bytes, "must be text");
        break;
    case OPTION_LIST:
        snprintf(text, bytes, "must be text, at most %d times", OPTION_LIST_MOST);
        break;
    }
}

static int64_t integer_at(const void *at) {
    int64_t x;
    memcpy(&x, at, sizeof x);
    return x;
}

static double number_at(const void *at) {
    double x;
    memcpy(&x, at, sizeof x);
    return x;
}

void option_value(const void *values, const option *o, char *text, size_t bytes) {
    const char *at = (const char *)values + o->offset, *word = o->words;
    const option_list *list = (const option_list *)(const void *)at;
    switch (o->kind) {
    case OPTION_INTEGER:
        snprintf(text, bytes, "%" PRId64, integer_at(at));
        break;
    case OPTION_NUMBER:
        write_number(text, bytes, number_at(at));
        break;
    case OPTION_SWITCH:
        snprintf(text, bytes, "%s", integer_at(at) ? "true" : "false");
        break;
    case OPTION_LAYERS:
        write_layers(text, bytes, option_layers_of(integer_at(at)));
        break;
    case OPTION_WORD:
        for (int64_t i = integer_at(at); i > 0; i--) word = strchr(word, '|') + 1;
        snprintf(text, bytes, "%.*s", (int)strcspn(word, "|"), word);
        break;
    case OPTION_PATTERN:
    case OPTION_STRING:
        snprintf(text, bytes, "%s", at);
        break;
    case OPTION_TEXT:
        memcpy(&word, at, sizeof word);
        snprintf(text, bytes, "%s", word ? word : "");
        break;
    case OPTION_LIST:
        snprintf(text, bytes, "%s", list->count ? list->at[list->count - 1] : "");
        break;
    }
}

/* ---- Names --------------------------------------------------------------------------------- */

/* Levenshtein's distance; names longer than the row are far from everything. */
static size_t distance(const char *a, const char *b) {
    enum { LONGEST = 64 };
    size_t row[LONGEST + 1], length = strlen(b);
    if (length > LONGEST) return SIZE_MAX;
    for (size_t j = 0; j <= length; j++) row[j] = j;
    for (size_t i = 0; a[i]; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < length; j++) {
            size_t best = diagonal + (a[i] != b[j]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j + 1] + 1 < best) best = row[j + 1] + 1;
            diagonal = row[j + 1];
            row[j + 1] = best;
        }
    }
    return row[length];
}

const option *option_nearest(const option *rows, size_t count, const char *name,
                             option_name *name_of) {
    const option *nearest = NULL;
    size_t best = strlen(name + (strncmp(name, "--", 2) ? 0 : 2)) / 3 + 1;
    for (size_t i = 0; i < count; i++) {
        const char *candidate = name_of(&rows[i]);
        size_t far = candidate ? distance(name, candidate) : SIZE_MAX;
        if (candidate && !strncmp(candidate, name, strlen(name))) far = 1; /* a name cut short */
        if (far > best) continue;
        if (far < best || !nearest) nearest = &rows[i];
        best = far;
    }
    return nearest;
}

static const char *flag_of(const option *o) {
    return o->flag;
}

/* Takes a value only behind "=". */
static bool is_switch(const option *o) {
    return o->kind == OPTION_SWITCH || o->kind == OPTION_LAYERS;
}

static const option *find_flag(const option_command *c, const char *name, size_t length) {
    const char *alias = c->alias[0];
    if (alias && strlen(alias) == length && !strncmp(alias, name, length)) {
        name = c->alias[1];
        length = strlen(name);
    }
    for (size_t i = 0; i < c->count; i++) {
        const char *flag = c->rows[i].flag;
        if (flag && strlen(flag) == length && !strncmp(flag, name, length)) return &c->rows[i];
    }
    return NULL;
}

const option *option_find(const option_command *c, const char *flag) {
    return find_flag(c, flag, strcspn(flag, "="));
}

static const option *find_negated(const option_command *c, const char *name, size_t length) {
    char flag[64] = "--";
    if (length < 6 || length >= sizeof flag || strncmp(name, "--no-", 5)) return NULL;
    memcpy(flag + 2, name + 5, length - 5);
    const option *o = find_flag(c, flag, length - 3);
    return o && is_switch(o) ? o : NULL;
}

/* ---- --help -------------------------------------------------------------------------------- */

enum { HELP_COLUMN = 29 };

/* Two lines that all tables end with. */
static const option always[] = {
    {.kind = OPTION_SWITCH, .flag = "--help", .help = "this text"},
    {.kind = OPTION_SWITCH, .flag = "--version", .help = "the version"},
};

/* What to type: "--seq-len N", or the environment's name where there is no flag, or the key. */
static void handle_text(const option *o, char *text, size_t bytes) {
    static const char *const nouns[] = {" N",    " X",    "",      "",     " WORD",
                                        " LIST", " TEXT", " TEXT", " TEXT"};
    bool named = o->kind >= OPTION_STRING && o->words;
    if (!o->flag)
        snprintf(text, bytes, "%s", o->environment ? o->environment : o->key);
    else if (o->traits & OPTION_OPTIONAL_VALUE)
        snprintf(text, bytes, "%s [TEXT]", o->flag);
    else if (is_switch(o) && o->key && !(o->traits & OPTION_NOT_IN_FILE))
        snprintf(text, bytes, "--[no-]%s", o->flag + 2);
    else
        snprintf(text, bytes, "%s%s%s", o->flag, named ? " " : nouns[o->kind],
                 named ? o->words : "");
}

/* "nsa.w, an integer in 1 .. 65536, default 64, environment NSA_W"; whether there is anything. */
static bool facts_of(const option *o, char *text, size_t bytes) {
    char allowed[256];
    bool ranged = o->kind < OPTION_STRING && o->kind != OPTION_SWITCH;
    const char *key = o->traits & OPTION_NOT_IN_FILE ? "of one launch" : o->key ? o->key : "";
    option_allowed(o, allowed, sizeof allowed);
    int n = snprintf(text, bytes, "%s%s%s", key, key[0] && ranged ? ", " : "",
                     ranged ? allowed + strlen("must be ") : "");
    if (o->initial)
        n += snprintf(text + n, bytes - (size_t)n, "%sdefault %s", n ? ", " : "",
                      o->initial[0] ? o->initial : "none");
    if (o->environment && o->flag)
        n += snprintf(text + n, bytes - (size_t)n, "%senvironment %s", n ? ", " : "",
                      o->environment);
    return n > 0;
}

static void print_row(const option *o) {
    char handle[64], facts[512];
    handle_text(o, handle, sizeof handle);
    printf("  %-*s", HELP_COLUMN - 3, handle);
    for (const char *line = o->help; *line;) {
        size_t length = strcspn(line, "\n");
        printf(" %.*s\n", (int)length, line);
        line += length + (line[length] == '\n');
        if (*line) printf("%*s", HELP_COLUMN - 1, "");
    }
    if (facts_of(o, facts, sizeof facts)) printf("%*s%s\n", HELP_COLUMN, "", facts);
}

static const char *options_text(const option_command *c) {
    return c->count ? " [OPTION]..." : "";
}

static void print_help(const option_command *c) {
    printf("%s: %s\n\nusage: %s%s%s%s\n\nAn option takes its value as the next word or "
           "behind =; given twice, the last one counts. Words\nbehind -- are no options.\n%s",
           c->name, c->summary, c->name, c->words[0] ? " " : "", c->words, options_text(c),
           c->notes ? c->notes : "");
    const char *section = "";
    size_t length = 0; /* of its name; 0: rows without one */
    printf("\n");
    for (size_t i = 0; i < c->count; i++) {
        const char *key = c->rows[i].key && strchr(c->rows[i].key, '.') ? c->rows[i].key : "";
        if (strncmp(section, key, strcspn(key, ".") + 1)) {
            length = strcspn(key, ".");
            printf("%s%.*s%s", i ? "\n" : "", (int)length, key, length ? "\n" : "");
            section = key;
        }
        print_row(&c->rows[i]);
    }
    for (size_t i = 0; i < sizeof always / sizeof *always; i++) print_row(&always[i]);
}

/* ---- The command line ---------------------------------------------------------------------- */

/* "; did you mean --no-gc?", or nothing. */
static void suggest(const option_command *c, const char *name, char *text, size_t bytes) {
    char plain[96] = "--";
    const option *near = NULL;
    text[0] = 0;
    if (!strncmp(name, "--no-", 5)) {
        snprintf(plain + 2, sizeof plain - 2, "%s", name + 5);
        near = option_nearest(c->rows, c->count, plain, flag_of);
        if (near && is_switch(near)) {
            snprintf(text, bytes, "; did you mean --no-%s?", near->flag + 2);
            return;
        }
    }
    const option *other = option_nearest(always, sizeof always / sizeof *always, name, flag_of);
    near = option_nearest(c->rows, c->count, name, flag_of);
    bool cut_short = near && !strncmp(near->flag, name, strlen(name)); /* --temp is --temperature */
    if (other && !cut_short && (!near || distance(name, other->flag) <= distance(name, near->flag)))
        near = other;
    if (near) snprintf(text, bytes, "; did you mean %s?", near->flag);
}

static bool unknown_fault(const option_command *c, const char *text, size_t length, fault *f) {
    char name[96], meant[128];
    snprintf(name, sizeof name, "%.*s", (int)(length < 95 ? length : 95), text);
    if (!strcmp(name, "--help") || !strcmp(name, "--version"))
        return fault_set(f, "%.100s: takes no value", text);
    suggest(c, name, meant, sizeof meant);
    return fault_set(f, "%s: unknown option%s (--help lists all)", name, meant);
}

/* "; did you mean --gc=selective?" of a word behind a switch, or nothing. */
static bool suggest_value(const option_command *c, const char *before, const char *word, char *text,
                          size_t bytes) {
    const option *o = option_find(c, before);
    text[0] = 0;
    if (!o || !is_switch(o) || strchr(before, '=')) return false;
    snprintf(text, bytes, "; did you mean %s=%.200s?", o->flag, word);
    return true;
}

/* A word where options alone are taken, behind the word `before`: steps=5, or a file whose option
   was left out. */
static bool stray_fault(const option_command *c, const char *before, const char *word, fault *f) {
    char flag[96], meant[300];
    const char *owner = c->meant ? c->meant(word) : NULL;
    snprintf(flag, sizeof flag, "--%.64s", word);
    bool known = suggest_value(c, before, word, meant, sizeof meant);
    if (!known && option_find(c, flag))
        snprintf(meant, sizeof meant, "; did you mean --%.200s?", word);
    else if (!known && owner)
        snprintf(meant, sizeof meant, "; did you mean %s %.200s?", owner, word);
    return fault_set(f, "%.200s: belongs to no option%s (--help lists all)",
                     word[0] ? word : "\"\"", meant);
}

static bool surplus_fault(const option_command *c, const char *before, const char *word,
                          const char *last, fault *f) {
    char meant[300];
    (void)suggest_value(c, before, word, meant, sizeof meant);
    return fault_set(f, "%.200s: one too many, after %.200s%s; usage: %s %s%s", word, last, meant,
                     c->name, c->words, options_text(c));
}

static bool missing_fault(const option *o, const char *flag, const char *next, fault *f) {
    char allowed[256], hint[320] = "";
    option_allowed(o, allowed, sizeof allowed);
    if (next && next[2])
        snprintf(hint, sizeof hint, "; one that begins with -- is given as %s=%.200s", flag, next);
    return fault_set(f, "%s: its value is missing; it %s%s", flag, allowed, hint);
}

/* Of two lines of a script, or a script and who calls it, the earlier would go in silence. */
static void note_twice(const option_command *c, char **argv, int at, const option *o,
                       const char *value) {
    if (o->kind == OPTION_LIST) return;
    for (int i = 1; i < at; i++) {
        size_t length = strcspn(argv[i], "=");
        if (find_flag(c, argv[i], length) != o && find_negated(c, argv[i], length) != o) continue;
        bool apart = !argv[i][length] && !is_switch(o) && strncmp(argv[i + 1], "--", 2);
        listener_say(c->hears,
                     "warning: %.*s: given twice, first as %.200s%s%.200s; the last one counts, "
                     "%.200s",
                     (int)strcspn(argv[at], "="), argv[at], argv[i], apart ? " " : "",
                     apart ? argv[i + 1] : "", value[0] ? value : "\"\"");
        return;
    }
}

/* Takes one option, with its value, off the arguments; *i ends on its last word. */
static bool take_option(const option_command *c, int argc, char **argv, int *i, option_take *take,
                        void *to, fault *f) {
    const char *text = argv[*i], *next = *i + 1 < argc ? argv[*i + 1] : NULL;
    size_t length = strcspn(text, "=");
    const option *o = find_flag(c, text, length);
    bool negated = !o;
    int at = *i;
    const char *value = text[length] ? text + length + 1 : NULL;
    char shown[64];
    fault reason;
    if (!o) o = find_negated(c, text, length);
    if (!o) return unknown_fault(c, text, length, f);
    snprintf(shown, sizeof shown, "%.*s", (int)length, text);
    if (negated && value) return fault_set(f, "%.100s: takes no value", text);
    if (!value && is_switch(o)) value = negated ? "false" : "true";
    if (!value && next && strncmp(next, "--", 2)) value = argv[++*i];
    if (!value && o->traits & OPTION_OPTIONAL_VALUE) value = o->words;
    if (!value) return missing_fault(o, shown, next, f);
    bool is_name = (o->kind == OPTION_STRING || o->kind == OPTION_TEXT) && o->words;
    if (is_name && !value[0]) /* of a variable of the shell that is not set */
        return fault_set(f, "%s \"\": must be a name; without one leave the option out", shown);
    if (!take(to, o, text, value, &reason))
        return fault_set(f, "%s %.200s: %.512s", shown, value[0] ? value : "\"\"", reason.text);
    note_twice(c, argv, at, o, value);
    return true;
}

/* How many words are named before options, and whether the last one may be several. */
static int words_named(const char *words, bool *several) {
    int count = words[0] != 0;
    for (const char *c = words; *c; c++) count += *c == ' ';
    *several = strlen(words) > 3 && !strcmp(words + strlen(words) - 3, "...");
    return count;
}

static bool missing_word(const option_command *c, int have, fault *f) {
    const char *name = c->words;
    while (have--) name = strchr(name, ' ') + 1;
    size_t length = strcspn(name, " ");
    if (length > 3 && !strncmp(name + length - 3, "...", 3)) length -= 3;
    return fault_set(f, "%.*s: none was given; usage: %s %s%s (--help says more)", (int)length,
                     name, c->name, c->words, options_text(c));
}

static bool read_words(const option_command *c, int argc, char **argv, option_take *take, void *to,
                       const char **words, fault *f) {
    bool several, ended = false;
    int most = words_named(c->words, &several), count = 0;
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (!ended && !strcmp(word, "--")) {
            ended = true;
        } else if (!ended && word[0] == '-' && word[1]) {
            if (!take_option(c, argc, argv, &i, take, to, f)) return false;
        } else if (!most) {
            return stray_fault(c, argv[i - 1], word, f);
        } else if (!word[0]) { /* of a variable of the shell that is not set */
            return fault_set(f, "\"\": an empty word; %s: must be a name", c->words);
        } else if (count == most && !several) {
            return surplus_fault(c, argv[i - 1], word, words[count - 1], f);
        } else {
            words[count++] = word;
        }
    }
    if (words) words[count] = NULL;
    return count >= most || missing_word(c, count, f);
}

option_outcome option_parse(const option_command *c, int argc, char **argv, option_take *take,
                            void *to, const char **words, fault *f) {
    for (int i = 1; i < argc && strcmp(argv[i], "--"); i++) {
        bool version = !strcmp(argv[i], "--version");
        if (!version && strcmp(argv[i], "--help") && strcmp(argv[i], "-h")) continue;
        if (version)
            printf("%s %d.%d.%d\n", c->name, NSA_VERSION_MAJOR, NSA_VERSION_MINOR,
                   NSA_VERSION_PATCH);
        else
            print_help(c);
        if (!fflush(stdout) && !ferror(stdout)) return OPTION_HELP;
        fault_errno(f, "cannot write to the standard output");
        return OPTION_ERROR;
    }
    return read_words(c, argc, argv, take, to, words, f) ? OPTION_OK : OPTION_ERROR;
}

static bool take_own(void *values, const option *o, const char *flag, const char *value, fault *f) {
    (void)flag;
    return option_set(values, o, value, f);
}

option_outcome option_read(const option_command *c, int argc, char **argv, void *values,
                           const char **words, fault *f) {
    option_command heard = *c;
    listener notes = listener_stderr();
    heard.hears = &notes;
    option_defaults(c->rows, c->count, values);
    return option_parse(&heard, argc, argv, take_own, values, words, f);
}
