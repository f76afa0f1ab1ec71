/* bpe_pattern.c - whether a pattern that splits text means the same here as where it comes from.
   Twin: bpe_vocab.h. It compiles nothing.

   The package tokenizers reads patterns with Oniguruma, this program with PCRE2. What the two read
   alike is a list: all else is refused, for a split that is a little different is a model that is a
   little wrong. Elsewhere \h is a hexadecimal digit, (?m) lets a dot be a newline, \w takes marks,
   && intersects sets, and {,2} is a count; (?i) in the middle takes the alternatives behind it into
   its group, lets one character stand for two, as U+00DF for ss, and a set of a property take the
   other case. {1,3}+ repeats what is counted, and {2}? is none or two. \s takes U+180E here alone,
   \p{Han} what the script shares with others; both are written out. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <limits.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "data/bpe_vocab.h"

static const char escapes[] = "sSdDrntfAzZ", groups[] = ":=!>";

/* Behind a backslash: its bytes, or 0 where it is none of those that are read alike. */
static size_t escape_bytes(const char *at) {
    const char *close = strchr(at, '}');
    bool braced = at[0] && at[1] == '{' && close;
    if ((at[0] == 'p' || at[0] == 'P' || at[0] == 'x') && braced) return (size_t)(close - at) + 1;
    bool letter = (at[0] >= 'a' && at[0] <= 'z') || (at[0] >= 'A' && at[0] <= 'Z');
    bool digit = at[0] >= '0' && at[0] <= '9';
    if (!at[0] || digit || (letter && !strchr(escapes, at[0]))) return 0;
    return 1;
}

/* Behind "(", the first of the pattern or not: what opens a group, or -1. */
static int group_bytes(const char *at, bool first) {
    if (at[0] == '*') return -1;
    if (at[0] != '?') return 0;
    if (at[1] && strchr(groups, at[1])) return 2;
    if (at[1] == '<' && (at[2] == '=' || at[2] == '!')) return 3;
    size_t flags = strspn(at + 1, "i-");
    char end = at[1 + flags];
    return flags && (end == ':' || (end == ')' && first)) ? (int)flags + 1 : -1;
}

/* From behind "[" to behind its "]"; NULL: what is in it is not read alike. */
static const char *set_end(const char *at) {
    at += *at == '^';
    if (*at == ']') return NULL; /* the first of a set, or its end */
    while (*at && *at != ']') {
        size_t escaped = *at == '\\' ? escape_bytes(at + 1) : 0;
        bool other = *at == '[' || !strncmp(at, "&&", 2) || !strncmp(at, "\\S", 2);
        if (other || (*at == '\\' && !escaped)) return NULL;
        at += 1 + escaped;
    }
    return *at ? at + 1 : NULL;
}

/* Where case does not count: what folds to several characters, or is folded to. */
static const char *folded_otherwise(const char *pattern) {
    static const char *const pairs[] = {"ss", "st", "ff", "fi", "fl"};
    if (!strstr(pattern, "(?i") && !strstr(pattern, "(?-i")) return NULL;
    for (const char *at = pattern; *at; at++) {
        if ((unsigned char)*at >= 0x80) return at;
        for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
            if (!strncasecmp(at, pairs[i], 2)) return at;
    }
    return NULL;
}

/* Whether this is a count, and read otherwise: {,2} is another there, and so is what + or ? makes
   of one. */
static bool is_odd_count(const char *at) {
    size_t bytes = strspn(at + 1, "0123456789,");
    const char *end = at + 1 + bytes;
    bool made = *end == '}' && (end[1] == '+' || (end[1] == '?' && !memchr(at, ',', bytes + 1)));
    return *at == '{' && (at[1] == ',' || made);
}

static bool has_property(const char *at, const char *end) {
    while (at + 1 < end && (*at != '\\' || (at[1] != 'p' && at[1] != 'P'))) at++;
    return at + 1 < end;
}

bool bpe_pattern_is_known(const char *pattern, const char **where) {
    int depth = 0, folded = INT_MAX; /* of the group in which case does not count */
    *where = folded_otherwise(pattern);
    if (*where) return false;
    for (const char *at = pattern; *at;) {
        size_t escaped = *at == '\\' ? escape_bytes(at + 1) : 0;
        int group = *at == '(' ? group_bytes(at + 1, at == pattern) : 0;
        const char *end = *at == '[' ? set_end(at + 1) : at + 1 + escaped + (group > 0 ? group : 0);
        bool known = end && group >= 0 && (*at != '\\' || escaped) && !is_odd_count(at);
        *where = at;
        if (!known || (*at == '[' && depth >= folded && has_property(at, end))) return false;
        if (*at == ')' && depth-- == folded) folded = INT_MAX;
        if (*at == '(') depth++;
        if (group && at[2] == 'i' && folded == INT_MAX) folded = *end == ')' ? 0 : depth;
        at = end;
    }
    return true;
}

/* \p{Han} and such; a general category has two letters at most. */
static bool is_script(const char *at) {
    bool property = !strncmp(at, "\\p{", 3) || !strncmp(at, "\\P{", 3);
    return property && strcspn(at + 3 + (at[3] == '^'), "}") > 2;
}

char *bpe_pattern_written_out(const char *pattern) {
    static const char space[] = "\\p{Z}\\t-\\r\\x{85}";
    const char *script = PCRE2_MAJOR * 100 + PCRE2_MINOR < 1040 ? "" : "sc:"; /* as it was before */
    char *out = malloc(strlen(pattern) * sizeof space * 2 + 1), *to = out;
    bool in_set = false;
    for (const char *at = pattern; out && *at; at++) {
        bool escape = *at == '\\', is_space = escape && (at[1] == 's' || at[1] == 'S');
        if (!escape) in_set = *at == '[' || (in_set && *at != ']');
        if (is_script(at)) {
            size_t head = at[3] == '^' ? 4 : 3;
            to = stpcpy((char *)memcpy(to, at, head) + head, script);
            at += head - 1;
            continue;
        }
        if (is_space && in_set)
            to = stpcpy(to, space);
        else if (is_space)
            to = stpcpy(stpcpy(stpcpy(to, at[1] == 's' ? "[" : "[^"), space), "]");
        else
            *to++ = *at;
        if (escape && !is_space) *to++ = at[1];
        at += escape;
    }
    if (out) *to = 0;
    return out;
}
