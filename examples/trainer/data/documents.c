/* documents.c - see documents.h. */
#include "data/documents.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/files.h"
#include "base/json_file.h"
#include "base/memory.h"
#include "data/unpack.h"

/* ---- Opening ---- */

/* First bytes that tell: all that a file's head has; of a pipe, whose writer may wait, no more than
   a line or a few hundred. */
static bool show_head(lines *l, int64_t size, const char **head, size_t *bytes, fault *f) {
    enum { ENOUGH = 512 };
    if (size >= 0) return lines_head(l, FORMAT_HEAD, head, bytes, f);
    for (size_t want = 4;; want = *bytes + 1) {
        if (!lines_head(l, want, head, bytes, f)) return false;
        if (*bytes < want || *bytes >= ENOUGH || memchr(*head, '\n', *bytes)) return true;
    }
}

static bool judge(documents *d, int64_t size, format_wish wish, fault *f) {
    const char *head, *name = d->lines.name;
    size_t bytes;
    if (!show_head(&d->lines, size, &head, &bytes, f) ||
        !format_judge(&d->format, name, head, bytes, size, wish, false, f))
        return false;
    if (d->format.packing == FORMAT_PLAIN) return true;
    return unpack_lines(&d->lines, d->format.packing, f) &&
           show_head(&d->lines, size, &head, &bytes, f) &&
           format_judge(&d->format, name, head, bytes, size, wish, true, f);
}

bool documents_open(documents *d, int fd, const char *name, int64_t size, format_wish wish,
                    int64_t offset, int cancel, fault *f) {
    memset(d, 0, sizeof *d);
    lines_open(&d->lines, fd, name, 0, cancel);
    d->by_line = wish == FORMAT_RECORDS;
    d->size = size;
    if (!judge(d, size, wish, f)) return false;
    if (d->format.kind == FORMAT_SHARD)
        return fault_set(f, "%s: token shards, where text is read", name);
    d->is_first = offset <= d->format.begin;
    return lines_seek(&d->lines, offset > d->format.begin ? offset : d->format.begin, f);
}

void documents_close(documents *d) {
    lines_close(&d->lines);
}

/* ---- JSON ---- */

static bool is_space(char c) {
    return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

/* What an object without a text has, so that its reader can see what it is. */
static void name_keys(documents *d, json_t *object) {
    size_t used = strlen(d->why);
    const char *key, *before = ", but ";
    json_t *value;
    json_object_foreach(object, key, value) {
        if (used + 48 > sizeof d->why) return;
        used += (size_t)snprintf(d->why + used, sizeof d->why - used, "%s\"%.24s\"", before, key);
        before = ", ";
    }
}

static const char *kind_of(const json_t *value) {
    return json_is_null(value)     ? "null"
           : json_is_number(value) ? "a number"
           : json_is_array(value)  ? "an array"
           : json_is_object(value) ? "an object"
                                   : "true or false";
}

/* A string, or an object with a text. */
static bool take_value(documents *d, const char *text, size_t bytes, tokenizer *t, token_list *to,
                       fault *f) {
    fault reason;
    json_t *root = json_file_parse(NULL, text, bytes, &json_of_document,
                                   JSON_ALLOW_NUL | JSON_DECODE_ANY | JSON_DECODE_INT_AS_REAL,
                                   &reason); /* other keys' integers may be of any length */
    json_t *found = json_is_string(root) ? root : json_object_get(root, "text");
    bool ok = true;
    if (!root) {
        snprintf(d->why, sizeof d->why, "is %.180s", reason.text);
    } else if (found && !json_is_string(found)) {
        snprintf(d->why, sizeof d->why, "has no \"text\" that is a string, but %s", kind_of(found));
    } else if (!found) {
        snprintf(d->why, sizeof d->why, "has no \"text\" that is a string");
        if (json_is_object(root)) name_keys(d, root);
    } else {
        ok = tokenizer_encode_document(t, json_string_value(found), json_string_length(found), to,
                                       f);
    }
    json_decref(root);
    return ok;
}

/* Looks for the end of the value at the front: s->at becomes its bytes. A number or a word ends
   before what cannot belong to it. False: more bytes are needed; what was seen is not seen
   again. */
typedef struct scan {
    size_t at;
    int depth;
    bool in_string, escaped, begun;
} scan;

static bool scan_value(scan *s, const char *text, size_t bytes) {
    for (; s->at < bytes; s->at++) {
        char c = text[s->at];
        if (s->in_string) {
            if (s->escaped)
                s->escaped = false;
            else if (c == '\\')
                s->escaped = true;
            else if (c == '"')
                s->in_string = false;
            if (!s->in_string && !s->depth) return s->at++, true;
            continue;
        }
        bool ends = c == ',' || c == ']' || c == '}' || is_space(c);
        if (!s->depth && s->begun && ends) return true;
        s->begun = true;
        s->in_string = c == '"';
        if (c == '{' || c == '[') s->depth++;
        if ((c == '}' || c == ']') && --s->depth <= 0) return s->at++, true;
    }
    return false;
}

/* The next byte that is no white space, left at the front; 0 at the end, where a byte of 0 is 1. */
static bool next_sign(documents *d, char *sign, fault *f) {
    const char *text;
    size_t bytes;
    for (;;) {
        if (!lines_head(&d->lines, 1, &text, &bytes, f)) return false;
        size_t space = 0;
        while (space < bytes && is_space(text[space])) space++;
        *sign = space < bytes ? (char)(text[space] + !text[space]) : 0;
        lines_take(&d->lines, space);
        if (space < bytes || !bytes) return true;
    }
}

static bool array_fault(const documents *d, const char *what, fault *f) {
    return fault_in_data(f, "%s: not a JSON array at byte %lld: %s", d->lines.name,
                         (long long)d->lines.offset, what);
}

/* Behind the array white space may stand, and nothing else. */
static lines_result end_array(documents *d, fault *f) {
    char sign;
    d->closed = true;
    if (!next_sign(d, &sign, f)) return LINES_FAULT;
    if (!sign) return LINES_END;
    array_fault(d, "bytes behind its end", f);
    return LINES_FAULT;
}

/* To the first byte of the next value; LINES_END behind the last. */
static lines_result find_value(documents *d, fault *f) {
    char sign;
    if (!next_sign(d, &sign, f)) return LINES_FAULT;
    if (d->closed) return end_array(d, f);
    if (sign == (d->is_first ? '[' : ',')) {
        lines_take(&d->lines, 1);
        if (!next_sign(d, &sign, f)) return LINES_FAULT;
        if (sign && (sign != ']' || d->is_first)) {
            if (sign != ']') return LINES_ONE;
            lines_take(&d->lines, 1);
            return end_array(d, f);
        }
        array_fault(d, sign ? "a comma and no value" : "it ends in the middle: cut short", f);
        return LINES_FAULT;
    }
    if (sign == ']' && !d->is_first) {
        lines_take(&d->lines, 1);
        return end_array(d, f);
    }
    array_fault(d, sign ? "a comma or ] is missing" : "it ends in the middle: cut short", f);
    return LINES_FAULT;
}

static lines_result next_element(documents *d, tokenizer *t, token_list *to, fault *f) {
    const char *text;
    size_t bytes, want = 1;
    scan s = {0};
    lines_result r = find_value(d, f);
    if (r != LINES_ONE) return r;
    d->is_first = false;
    for (;; want = bytes + 1) {
        if (!lines_head(&d->lines, want, &text, &bytes, f)) return LINES_FAULT;
        if (scan_value(&s, text, bytes)) break;
        if (bytes >= want) continue;
        array_fault(d, "a value that does not end: cut short", f);
        return LINES_FAULT;
    }
    bool ok = take_value(d, text, s.at, t, to, f);
    lines_take(&d->lines, s.at);
    return ok ? LINES_ONE : LINES_FAULT;
}

/* ---- Text ---- */

/* All that is left, as one text. */
static char *read_rest(documents *d, size_t *bytes, fault *f) {
    lines *l = &d->lines;
    size_t room = 0;
    char *all = NULL;
    *bytes = 0;
    for (;;) {
        const char *part;
        size_t count;
        bool ok = lines_head(l, 1, &part, &count, f);
        if (ok && !count) return all ? all : calloc(1, 1);
        ok = ok && (!d->format.no_zeros || format_check_rest(l->name, part, count, l->offset, f));
        if (ok && (int64_t)(*bytes + count) > DOCUMENTS_TEXT_BYTES)
            ok = fault_set(f, "%s: more than %lld bytes of text in one document", l->name,
                           (long long)DOCUMENTS_TEXT_BYTES);
        if (ok && *bytes + count > room) {
            room = memory_grow(l->name, *bytes, count, f);
            char *more = room ? realloc(all, room) : NULL;
            if (more) all = more;
            ok = more != NULL;
            if (room && !more) fault_set(f, "%s: out of memory for its text", l->name);
        }
        if (!ok) {
            free(all);
            return NULL;
        }
        memcpy(all + *bytes, part, count);
        *bytes += count;
        lines_take(l, count);
    }
}

static lines_result next_text(documents *d, tokenizer *t, token_list *to, fault *f) {
    const char *unused;
    size_t bytes;
    if (!lines_head(&d->lines, 1, &unused, &bytes, f)) return LINES_FAULT;
    if (!bytes) return LINES_END;
    char *text = read_rest(d, &bytes, f);
    /* What separates documents is added: of bytes a newline, which this may have. */
    if (text && tokenizer_is_byte(t) && bytes && text[bytes - 1] == '\n') bytes--;
    bool ok = text && tokenizer_encode_document(t, text, bytes, to, f);
    free(text);
    return ok ? LINES_ONE : LINES_FAULT;
}

/* The first lines that come by a pipe, one after the other, are judged as a file's head is. */
static bool judge_line(documents *d, bool is_one, const char *line, size_t bytes, fault *f) {
    enum { ENOUGH = 16 };
    if (d->seen >= ENOUGH) return true;
    d->seen += is_one && bytes;
    d->objects += is_one && format_holds_object(line, bytes);
    if (is_one && d->seen < ENOUGH) return true;
    bool are = format_are_objects(d->seen, d->objects);
    d->seen = ENOUGH;
    return !are || format_refuse_objects(d->lines.name, d->format.packing != FORMAT_PLAIN, f);
}

static lines_result next_line(documents *d, tokenizer *t, token_list *to, fault *f) {
    const char *line;
    size_t bytes;
    int64_t begin = d->lines.offset;
    lines_result r = lines_next(&d->lines, &line, &bytes, f);
    bool plain = d->format.kind == FORMAT_TEXT;
    if (r == LINES_FAULT || (plain && !judge_line(d, r == LINES_ONE, line, bytes, f)))
        return LINES_FAULT;
    if (r == LINES_END) return r;
    if (d->format.no_zeros && !format_check_rest(d->lines.name, line, bytes, begin, f))
        return LINES_FAULT;
    while (bytes && (line[bytes - 1] == '\r' || (!plain && is_space(line[bytes - 1])))) bytes--;
    if (!plain && bytes >= 3 && !memcmp(line, "\xef\xbb\xbf", 3)) { /* of files put together */
        line += 3;
        bytes -= 3;
    }
    if (!bytes) return r;
    bool ok = plain ? tokenizer_encode_document(t, line, bytes, to, f)
                    : take_value(d, line, bytes, t, to, f);
    return ok ? LINES_ONE : LINES_FAULT;
}

/* A file that has become shorter would be an epoch, or a corpus, that nobody asked for. */
static bool check_end(const documents *d, fault *f) {
    return d->lines.arrived >= d->size ||
           fault_set(f, "%s: ends at byte %lld; it had %lld when the run began", d->lines.name,
                     (long long)d->lines.arrived, (long long)d->size);
}

lines_result documents_next(documents *d, tokenizer *t, token_list *to, int64_t *offset, fault *f) {
    *offset = d->lines.offset;
    d->why[0] = 0;
    bool is_text = d->format.kind == FORMAT_TEXT && !d->by_line;
    lines_result r = d->format.kind == FORMAT_JSON_ARRAY ? next_element(d, t, to, f)
                     : is_text                           ? next_text(d, t, to, f)
                                                         : next_line(d, t, to, f);
    return r == LINES_END && !check_end(d, f) ? LINES_FAULT : r;
}

char *documents_read_text(const format_file *file, size_t *bytes, fault *f) {
    documents d;
    int fd = files_open(file->path, f);
    if (fd < 0) return NULL;
    bool ok = documents_open(&d, fd, file->path, 0, FORMAT_BYTES, 0, -1, f);
    d.format.no_zeros = file->format.no_zeros;
    char *text = ok ? read_rest(&d, bytes, f) : NULL;
    documents_close(&d);
    return text;
}
