/* json_file.c - see json_file.h. */
#include "base/json_file.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"

/* A container takes the parser some 140 bytes, another value some 60, beside the text of strings.
   Tokenizers of 260,000 tokens have 0.5 million pairs to join, and 33 MB. */
const json_limit json_of_settings = {1 << 20, 1 << 16, 1 << 17};
const json_limit json_of_tensors = {100000000, 1 << 19, 1 << 21};
const json_limit json_of_tokens = {1 << 26, 3 << 19, 1 << 22};
const json_limit json_of_document = {1 << 28, 1 << 17, 1 << 20};

/* Values are counted by their openings and commas: never fewer than there are. */
static bool fits(const char *name, const char *text, size_t bytes, const json_limit *l, fault *f) {
    size_t containers = 0, values = 1;
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < bytes; i++) {
        char c = text[i];
        if (in_string) {
            i += c == '\\';
            in_string = c != '"';
            continue;
        }
        bool opens = c == '[' || c == '{';
        in_string = c == '"';
        depth += opens ? 1 : c == ']' || c == '}' ? -1 : 0;
        containers += opens;
        values += opens || c == ',';
        if (depth > JSON_DEPTH)
            return fault_set(f, "%.400sJSON nested more than %d deep", name, JSON_DEPTH);
    }
    if (bytes <= l->bytes && containers <= l->containers && values <= l->values) return true;
    return fault_set(f,
                     "%.400sJSON of %zu bytes, %zu objects and arrays and %zu values; allowed "
                     "are %zu, %zu and %zu",
                     name, bytes, containers, values, l->bytes, l->containers, l->values);
}

json_t *json_file_parse(const char *name, const char *text, size_t bytes, const json_limit *limit,
                        size_t flags, fault *f) {
    json_error_t e;
    char place[420] = "";
    if (name) snprintf(place, sizeof place, "%.400s: ", name);
    if (!fits(place, text, bytes, limit, f)) return NULL;
    json_t *root = json_loadb(text, bytes, flags, &e);
    if (!root && name)
        fault_set(f, "%.400s:%d: not JSON: %s", name, e.line, e.text);
    else if (!root)
        fault_set(f, "not JSON: %s", e.text);
    return root;
}

json_t *json_file_read(const char *path, const json_limit *limit, fault *f) {
    size_t bytes;
    char *text = files_read(path, limit->bytes, &bytes, f);
    if (!text) return NULL;
    json_t *root = NULL;
    if (files_check_fetched(path, text, bytes, f))
        root = json_file_parse(path, text, bytes, limit, JSON_REJECT_DUPLICATES, f);
    free(text);
    return root;
}
