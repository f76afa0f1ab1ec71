/* config_print.c - the settings for people (--check) and for checkpoints (JSON), all from the
   table. Twin: config.h. */
#include "config/config_table.h"

#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#include "base/text.h"

void config_print(const config *c, FILE *out) {
    char value[CONFIG_PATH_BYTES], place[CONFIG_PATH_BYTES + 32];
    for (size_t i = 0; i < config_entry_count; i++) {
        const option *e = &config_entries[i];
        if (e->traits & OPTION_NOT_IN_FILE && !strchr(e->key, '.')) continue;
        option_value(c, e, value, sizeof value);
        config_place(c, e, place, sizeof place);
        text_print_line(out, "%-32s %-24s %s", e->key, value[0] ? value : "\"\"", place);
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

static json_t *entry_to_json(const config *c, const option *e) {
    char text[CONFIG_PATH_BYTES];
    const void *at = (const char *)c + e->offset;
    int64_t integer;
    double number;
    switch (e->kind) {
    case OPTION_INTEGER:
        memcpy(&integer, at, sizeof integer);
        return json_integer(integer);
    case OPTION_SWITCH:
        memcpy(&integer, at, sizeof integer);
        return json_boolean(integer != 0);
    case OPTION_NUMBER:
        memcpy(&number, at, sizeof number);
        return json_real(number);
    case OPTION_LAYERS:
    case OPTION_WORD:
    case OPTION_PATTERN:
    case OPTION_STRING:
    case OPTION_TEXT:
    case OPTION_LIST:
        break;
    }
    option_value(c, e, text, sizeof text);
    return text_to_json(text);
}

json_t *config_to_json(const config *c) {
    json_t *object = json_object();
    for (size_t i = 0; object && i < config_entry_count; i++) {
        const option *e = &config_entries[i];
        if (e->traits & CONFIG_NOT_SAVED) continue;
        if (!json_object_set_new(object, e->key, entry_to_json(c, e))) continue;
        json_decref(object);
        return NULL;
    }
    return object;
}

/* The text that option_set reads, of a JSON value of the entry's kind. */
static bool json_text(const option *e, const json_t *v, char *text, size_t bytes) {
    bool ok = false;
    switch (e->kind) {
    case OPTION_INTEGER:
        ok = json_is_integer(v);
        snprintf(text, bytes, "%" JSON_INTEGER_FORMAT, json_integer_value(v));
        break;
    case OPTION_NUMBER:
        ok = json_is_number(v);
        snprintf(text, bytes, "%.17g", json_number_value(v));
        break;
    case OPTION_SWITCH:
        ok = json_is_boolean(v);
        snprintf(text, bytes, "%s", json_is_true(v) ? "true" : "false");
        break;
    case OPTION_LAYERS:
    case OPTION_WORD:
    case OPTION_PATTERN:
    case OPTION_STRING:
    case OPTION_TEXT:
    case OPTION_LIST:
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
    option_defaults(config_entries, config_entry_count, c);
    if (!json_is_object(json)) return fault_set(f, "\"config\" must be an object of settings");
    json_object_foreach((json_t *)(uintptr_t)json, key, value) {
        const option *e = config_find(key);
        if (!e || e->traits & CONFIG_NOT_SAVED)
            return fault_set(f, "\"config\": unknown setting %.100s", key);
        c->origin[e - config_entries].layer = CONFIG_FROM_CHECKPOINT;
        if (json_text(e, value, text, sizeof text) && option_set(c, e, text, &unused)) continue;
        option_allowed(e, allowed, sizeof allowed);
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
        const option *e = &config_entries[i];
        if (strncmp(e->key, "model.", 6) && strncmp(e->key, "nsa.", 4)) continue;
        if (!strcmp(e->key, "nsa.n_sel")) continue; /* no weight depends on how many are read */
        if (attends && !strcmp(e->key, "model.attention")) continue;
        option_value(a, e, values[0], sizeof values[0]);
        option_value(b, e, values[1], sizeof values[1]);
        if (strcmp(values[0], values[1]))
            return fault_set(f, "%s is %.100s here and %.100s in the checkpoint", e->key, values[0],
                             values[1]);
    }
    return true;
}

bool config_recalled(const config *c, const config *kept, fault *f) {
    char values[2][CONFIG_PATH_BYTES];
    bool any = false;
    for (size_t i = 0; i < config_entry_count; i++) {
        const option *e = &config_entries[i];
        if (c->origin[i].layer != CONFIG_FROM_CHECKPOINT) continue;
        any = true;
        option_value(c, e, values[0], sizeof values[0]);
        option_value(kept, e, values[1], sizeof values[1]);
        if (strcmp(values[0], values[1]))
            return fault_set(f, "%s was %.100s in the newest checkpoint and is %.100s", e->key,
                             values[0], values[1]);
    }
    return any || fault_set(f, "there was no checkpoint");
}
