/* config_yaml.c - reads a config file: sections of scalar settings, each error with file, line and
   key. Twin: config_table.h. Not a general YAML reader: deeper levels are
   refused, and so are lists but where a setting takes one (model.attention). */
#include "config/config_table.h"

#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "base/files.h"

/* The parser's time grows with the square of nested brackets: 400 KB of them take minutes. */
enum { MOST_BYTES = 16384 };

typedef struct reader {
    config *config;
    const char *path;
    const listener *notes;
    yaml_document_t document;
    fault *fault;
} reader;

static int line_of(const yaml_node_t *node) {
    return (int)node->start_mark.line + 1;
}

static const char *text_of(const yaml_node_t *node) {
    return (const char *)node->data.scalar.value;
}

static bool is_plain_text(const yaml_node_t *node) {
    return node->type == YAML_SCALAR_NODE && strlen(text_of(node)) == node->data.scalar.length;
}

static bool is_null(const yaml_node_t *node) {
    const char *text = text_of(node);
    return node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (!*text || !strcmp(text, "~") || !strcmp(text, "null"));
}

static const char *key_of(const option *e) {
    return e->traits & OPTION_NOT_IN_FILE ? NULL : e->key;
}

static bool key_fault(reader *r, int line, const char *key) {
    const option *near = option_nearest(config_entries, config_entry_count, key, key_of);
    if (near)
        return fault_set(r->fault, "%s:%d: %s: unknown key; did you mean %s? (--help lists all)",
                         r->path, line, key, near->key);
    return fault_set(r->fault, "%s:%d: %s: unknown key (--help lists all)", r->path, line, key);
}

/* The words of a list with commas between them; false: no list of words. */
static bool join(reader *r, const yaml_node_t *list, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (yaml_node_item_t *i = list->data.sequence.items.start; i < list->data.sequence.items.top;
         i++) {
        const yaml_node_t *item = yaml_document_get_node(&r->document, *i);
        if (!is_plain_text(item)) return false;
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", used ? "," : "", text_of(item));
        if (used >= bytes) return false;
    }
    return true;
}

/* Why a node cannot be the value of e, or NULL. Quotes make text of a number, as YAML has it. */
static const char *refusal(const option *e, const yaml_node_t *node) {
    if (strncmp((const char *)node->tag, "tag:yaml.org,2002:", 18)) return "has a tag, as !env";
    if (e->kind == OPTION_PATTERN && node->type == YAML_SEQUENCE_NODE) return NULL;
    if (node->type != YAML_SCALAR_NODE) return "is a list or a section";
    if (!is_plain_text(node)) return "contains a zero byte";
    if (e->kind == OPTION_STRING) return NULL;
    if (is_null(node)) return "is empty";
    if (e->kind != OPTION_WORD && e->kind != OPTION_PATTERN &&
        node->data.scalar.style != YAML_PLAIN_SCALAR_STYLE)
        return "is quoted text";
    return NULL;
}

static bool read_setting(reader *r, const char *key, const yaml_node_t *at, yaml_node_t *node) {
    const option *e = config_find(key);
    const char *instead;
    char allowed[256];
    if (!e && config_other_key(key, &instead)) {
        listener_say(r->notes, "%s (%.250s:%d): accepted, %s%s", key, r->path, line_of(at),
                     instead ? "read as " : "has no effect", instead ? instead : "");
        if (!instead) return true;
        e = config_find(instead);
    }
    if (!e || e->traits & OPTION_NOT_IN_FILE) return key_fault(r, line_of(at), key);
    config_origin *origin = &r->config->origin[e - config_entries];
    if (origin->layer == CONFIG_FROM_FILE)
        return fault_set(r->fault, "%s:%d: %s: given twice, first in line %d", r->path, line_of(at),
                         key, origin->line);
    const char *why = refusal(e, node);
    if (why) {
        option_allowed(e, allowed, sizeof allowed);
        return fault_set(r->fault, "%s:%d: %s %s: %s", r->path, line_of(node), key, why, allowed);
    }
    char list[CONFIG_PATH_BYTES];
    const char *text = list;
    if (node->type != YAML_SEQUENCE_NODE)
        text = e->kind == OPTION_STRING && is_null(node) ? "" : text_of(node);
    else if (!join(r, node, list, sizeof list))
        list[0] = 0; /* which option_set refuses */
    fault reason;
    if (!option_set(r->config, e, text, &reason))
        return fault_set(r->fault, "%s:%d: %s = %.200s: %.256s", r->path, line_of(node), key, text,
                         reason.text);
    origin->layer = CONFIG_FROM_FILE;
    origin->line = line_of(at);
    return true;
}

static bool read_section(reader *r, const char *section, const yaml_node_t *node) {
    char key[128];
    for (yaml_node_pair_t *p = node->data.mapping.pairs.start; p < node->data.mapping.pairs.top;
         p++) {
        yaml_node_t *name = yaml_document_get_node(&r->document, p->key);
        yaml_node_t *value = yaml_document_get_node(&r->document, p->value);
        if (!is_plain_text(name))
            return fault_set(r->fault, "%s:%d: a key in %s is not a word", r->path, line_of(name),
                             section);
        snprintf(key, sizeof key, "%.40s.%.80s", section, text_of(name));
        if (!read_setting(r, key, name, value)) return false;
    }
    return true;
}

static bool is_section(const char *name) {
    size_t length = strlen(name);
    for (size_t i = 0; i < config_entry_count; i++) {
        const option *e = &config_entries[i];
        if (key_of(e) && !strncmp(e->key, name, length) && e->key[length] == '.') return true;
    }
    return false;
}

/* Sections of one name would be merged, and what stands further down would be overlooked. */
static bool check_again(reader *r, const yaml_node_pair_t *first, const yaml_node_pair_t *p,
                        const yaml_node_t *name) {
    for (const yaml_node_pair_t *before = first; before < p; before++) {
        yaml_node_t *other = yaml_document_get_node(&r->document, before->key);
        if (!strcmp(text_of(other), text_of(name)))
            return fault_set(r->fault, "%s:%d: %s: given twice, first in line %d", r->path,
                             line_of(name), text_of(name), line_of(other));
    }
    return true;
}

static bool read_sections(reader *r) {
    yaml_node_t *root = yaml_document_get_root_node(&r->document);
    if (!root) return fault_set(r->fault, "%s:1: the file has no settings", r->path);
    if (root->type != YAML_MAPPING_NODE)
        return fault_set(r->fault, "%s:%d: must be sections such as 'train:', with settings below",
                         r->path, line_of(root));
    for (yaml_node_pair_t *p = root->data.mapping.pairs.start; p < root->data.mapping.pairs.top;
         p++) {
        yaml_node_t *name = yaml_document_get_node(&r->document, p->key);
        yaml_node_t *value = yaml_document_get_node(&r->document, p->value);
        if (!is_plain_text(name) || !is_section(text_of(name)))
            return fault_set(r->fault,
                             "%s:%d: %.80s: unknown section; allowed: model, nsa, data, runtime, "
                             "train, telemetry, sample",
                             r->path, line_of(name),
                             is_plain_text(name) ? text_of(name) : "a key that is no word");
        if (!check_again(r, root->data.mapping.pairs.start, p, name)) return false;
        if (value->type == YAML_SCALAR_NODE && is_null(value)) continue;
        if (value->type != YAML_MAPPING_NODE)
            return fault_set(r->fault, "%s:%d: %s: must be a section of settings", r->path,
                             line_of(value), text_of(name));
        if (!read_section(r, text_of(name), value)) return false;
    }
    return true;
}

static bool parse_fault(reader *r, const yaml_parser_t *p) {
    size_t line = p->problem_mark.line + 1;
    return fault_set(r->fault, "%s:%zu: not YAML: %s%s%s", r->path, line,
                     p->problem ? p->problem : "out of memory", p->context ? ", " : "",
                     p->context ? p->context : "");
}

static bool read_stream(reader *r, yaml_parser_t *parser) {
    yaml_document_t more;
    if (!yaml_parser_load(parser, &r->document)) return parse_fault(r, parser);
    bool ok = read_sections(r);
    yaml_document_delete(&r->document);
    if (!ok) return false;
    if (!yaml_parser_load(parser, &more)) return parse_fault(r, parser);
    yaml_node_t *root = yaml_document_get_root_node(&more);
    if (root)
        ok =
            fault_set(r->fault, "%s:%d: a second document; one is allowed", r->path, line_of(root));
    yaml_document_delete(&more);
    return ok;
}

bool config_read_yaml(config *c, const char *path, const listener *notes, fault *f) {
    reader r = {.config = c, .path = path, .notes = notes, .fault = f};
    yaml_parser_t parser;
    size_t bytes;
    char *text = files_read(path, MOST_BYTES, &bytes, f);
    if (!text) return false;
    if (!yaml_parser_initialize(&parser)) {
        free(text);
        return fault_set(f, "%s: out of memory", path);
    }
    yaml_parser_set_input_string(&parser, (unsigned char *)text, bytes);
    bool ok = read_stream(&r, &parser);
    yaml_parser_delete(&parser);
    free(text);
    return ok;
}
