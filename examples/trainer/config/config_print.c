/* config_print.c - the settings for people (--help, --check) and for checkpoints (JSON), all from
   the table. Twin: config.h. */
#include "config/config_table.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

/* What to type: "--seq-len N", or the environment's name where there is no flag, or the key. */
static void handle_text(const config_entry *e, char *text, size_t bytes) {
    static const char *const values[] = {" N", " X", "", "", " WORD", " LIST", " TEXT"};
    bool is_switch = e->kind == CONFIG_SWITCH || e->kind == CONFIG_LAYERS;
    const char *value = e->traits & CONFIG_OPTIONAL_ARGUMENT ? " [PATH]" : values[e->kind];
    if (!e->flag)
        snprintf(text, bytes, "%s", e->environment ? e->environment : e->key);
    else if (is_switch && !(e->traits & CONFIG_NOT_IN_FILE))
        snprintf(text, bytes, "--[no-]%s", e->flag + 2);
    else
        snprintf(text, bytes, "%s%s", e->flag, value);
}

enum { HELP_COLUMN = 29 };

static void print_entry_help(const config_entry *e) {
    char handle[64], allowed[256];
    handle_text(e, handle, sizeof handle);
    config_allowed(e, allowed, sizeof allowed);
    printf("  %-*s", HELP_COLUMN - 3, handle);
    for (const char *line = e->help; *line;) {
        size_t length = strcspn(line, "\n");
        printf(" %.*s\n%*s", (int)length, line, HELP_COLUMN - 1, "");
        line += length + (line[length] == '\n');
    }
    printf(" %s", e->traits & CONFIG_NOT_IN_FILE ? "of one launch" : e->key);
    if (e->kind != CONFIG_STRING && e->kind != CONFIG_SWITCH)
        printf(", %s", allowed + strlen("must be "));
    printf(", default %s", e->initial[0] ? e->initial : "none");
    if (e->environment && e->flag) printf(", environment %s", e->environment);
    printf("\n");
}

void config_print_help(const config_program *program) {
    printf("%s: %s\n\nusage: %s [OPTION]...\n\n", program->name, program->summary, program->name);
    printf("A value comes from the command line, else from the environment, else from the file of\n"
           "--config, else it is the default. Options take their value as the next word or after "
           "=.\nExit codes: 0 done, 1 failed, 2 wrong settings, 3 halted by the watchdog, 128 + n "
           "ended "
           "by signal n.\n");
    const char *section = "";
    for (size_t i = 0; i < config_entry_count; i++) {
        const config_entry *e = &config_entries[i];
        size_t length = strcspn(e->key, ".");
        if (e->key[length] && strncmp(section, e->key, length + 1))
            printf("\n%.*s\n", (int)length, e->key);
        else if (!e->key[length] && strchr(section, '.'))
            printf("\nrun\n");
        section = e->key;
        print_entry_help(e);
    }
    printf("  %-*s this text\n", HELP_COLUMN - 3, "--help");
}

void config_print(const config *c, FILE *out) {
    char value[CONFIG_PATH_BYTES], place[CONFIG_PATH_BYTES + 32];
    for (size_t i = 0; i < config_entry_count; i++) {
        const config_entry *e = &config_entries[i];
        if (e->traits & CONFIG_NOT_IN_FILE && !strchr(e->key, '.')) continue;
        config_value(c, e, value, sizeof value);
        config_place(c, e, place, sizeof place);
        fprintf(out, "%-32s %-24s %s\n", e->key, value[0] ? value : "\"\"", place);
    }
}

/* ---- Checkpoints ---- */

/* Text, or {"hex": "..."} where it is not UTF-8, for which JSON has no string. */
static json_t *text_to_json(const char *text) {
    static const char digits[] = "0123456789abcdef";
    char hex[2 * CONFIG_PATH_BYTES] = "";
    json_t *plain = json_string(text);
    if (plain) return plain;
    for (size_t i = 0; text[i] && 2 * i + 2 < sizeof hex; i++) {
        unsigned char byte = (unsigned char)text[i];
        hex[2 * i] = digits[byte >> 4];
        hex[2 * i + 1] = digits[byte & 15];
        hex[2 * i + 2] = 0;
    }
    return json_pack("{s:s}", "hex", hex);
}

static int digit_of(char c) {
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool json_to_text(const json_t *v, char *text, size_t bytes) {
    const char *hex = json_string_value(json_object_get(v, "hex"));
    size_t n = hex ? strlen(hex) : 0;
    if (!hex || n % 2 || n / 2 >= bytes) return false;
    for (size_t i = 0; i < n / 2; i++) {
        int high = digit_of(hex[2 * i]), low = digit_of(hex[2 * i + 1]);
        if (high < 0 || low < 0 || high + low == 0) return false;
        text[i] = (char)(16 * high + low);
    }
    text[n / 2] = 0;
    return true;
}

static json_t *entry_to_json(const config *c, const config_entry *e) {
    char text[CONFIG_PATH_BYTES];
    const void *at = (const char *)c + e->offset;
    int64_t integer;
    double number;
    switch (e->kind) {
    case CONFIG_INTEGER:
        memcpy(&integer, at, sizeof integer);
        return json_integer(integer);
    case CONFIG_SWITCH:
        memcpy(&integer, at, sizeof integer);
        return json_boolean(integer != 0);
    case CONFIG_NUMBER:
        memcpy(&number, at, sizeof number);
        return json_real(number);
    case CONFIG_LAYERS:
    case CONFIG_WORD:
    case CONFIG_PATTERN:
    case CONFIG_STRING:
        break;
    }
    config_value(c, e, text, sizeof text);
    return text_to_json(text);
}

json_t *config_to_json(const config *c) {
    json_t *object = json_object();
    for (size_t i = 0; object && i < config_entry_count; i++) {
        const config_entry *e = &config_entries[i];
        if (e->traits & CONFIG_NOT_SAVED) continue;
        if (!json_object_set_new(object, e->key, entry_to_json(c, e))) continue;
        json_decref(object);
        return NULL;
    }
    return object;
}

/* The text that config_set reads, of a JSON value of the entry's kind. */
static bool json_text(const config_entry *e, const json_t *v, char *text, size_t bytes) {
    bool ok = false;
    switch (e->kind) {
    case CONFIG_INTEGER:
        ok = json_is_integer(v);
        snprintf(text, bytes, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        break;
    case CONFIG_NUMBER:
        ok = json_is_number(v);
        snprintf(text, bytes, "%.17g", json_number_value(v));
        break;
    case CONFIG_SWITCH:
        ok = json_is_boolean(v);
        snprintf(text, bytes, "%s", json_is_true(v) ? "true" : "false");
        break;
    case CONFIG_LAYERS:
    case CONFIG_WORD:
    case CONFIG_PATTERN:
    case CONFIG_STRING:
        if (json_is_object(v)) return json_to_text(v, text, bytes);
        ok = json_is_string(v) && json_string_length(v) < bytes;
        snprintf(text, bytes, "%s", ok ? json_string_value(v) : "");
        break;
    }
    return ok;
}

bool config_from_json(config *c, const json_t *json, fault *f) {
    char text[CONFIG_PATH_BYTES], allowed[256];
    const char *key;
    json_t *value;
    fault unused;
    memset(c, 0, sizeof *c);
    for (size_t i = 0; i < config_entry_count; i++)
        config_set(c, &config_entries[i], config_entries[i].initial, &unused);
    if (!json_is_object(json)) return fault_set(f, "\"config\" must be an object of settings");
    json_object_foreach((json_t *)(uintptr_t)json, key, value) {
        const config_entry *e = config_find(key);
        if (!e || e->traits & CONFIG_NOT_SAVED)
            return fault_set(f, "\"config\": unknown setting %.100s", key);
        c->origin[e - config_entries].layer = CONFIG_FROM_CHECKPOINT;
        if (json_text(e, value, text, sizeof text) && config_set(c, e, text, &unused)) continue;
        config_allowed(e, allowed, sizeof allowed);
        return fault_set(f, "\"config\": %s %s", key, allowed);
    }
    return config_check_model(c, f);
}

json_t *config_changes(const config *a, const config *b) {
    json_t *from = config_to_json(a), *to = config_to_json(b), *changes = json_object(), *value;
    const char *key;
    json_object_foreach(to, key, value) {
        json_t *old = json_object_get(from, key);
        if (!json_equal(old, value))
            json_object_set_new(changes, key, json_pack("[O?, O]", old, value));
    }
    json_decref(from);
    json_decref(to);
    return changes;
}

/* "window,nsa" and "window,nsa,window" are one model of three layers. */
bool config_same_attention(const config_model *a, const config_model *b) {
    bool same = a->n_layers == b->n_layers;
    for (int64_t i = 0; same && i < a->n_layers; i++)
        same = config_attention(a, i) == config_attention(b, i);
    return same;
}

bool config_same_model(const config *a, const config *b, fault *f) {
    char values[2][CONFIG_PATH_BYTES];
    bool attends = config_same_attention(&a->model, &b->model) ||
                   config_from(a, "model.attention") == CONFIG_FROM_COMMAND_LINE;
    for (size_t i = 0; i < config_entry_count; i++) {
        const config_entry *e = &config_entries[i];
        if (strncmp(e->key, "model.", 6) && strncmp(e->key, "nsa.", 4)) continue;
        if (!strcmp(e->key, "nsa.n_sel")) continue; /* no weight depends on how many are read */
        if (attends && !strcmp(e->key, "model.attention")) continue;
        config_value(a, e, values[0], sizeof values[0]);
        config_value(b, e, values[1], sizeof values[1]);
        if (strcmp(values[0], values[1]))
            return fault_set(f, "%s is %.100s here and %.100s in the checkpoint", e->key, values[0],
                             values[1]);
    }
    return true;
}
