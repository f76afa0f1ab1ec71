/* format.c - see format.h. */
#include "data/format.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/lines.h"
#include "base/text.h"
#include "config/config.h"
#include "data/unpack.h"

static size_t skip_space(const char *text, size_t bytes, size_t at) {
    while (at < bytes &&
           (text[at] == ' ' || text[at] == '\t' || text[at] == '\r' || text[at] == '\n'))
        at++;
    return at;
}

/* Of the byte order mark that programs of Windows put before UTF-8, one after the other. */
static size_t mark_bytes(const char *head, size_t bytes) {
    size_t at = 0;
    while (bytes - at >= 3 && !memcmp(head + at, "\xef\xbb\xbf", 3)) at += 3;
    return at;
}

/* ---- What is no data ---- */

/* First bytes of files that people have, what they are, and what to do. What is a word of letters
   and digits counts where other bytes are not those of text. */
static const struct {
    const char *bytes;
    size_t count, at;
    const char *what, *advice; /* of pictures and such: TEXT, and a folder's are passed over */
} strangers[] = {
#define TO_LINES "write it as JSON lines with a \"text\" first"
#define UNPACKED "unpack it first"
#define TEXT     "give text"
    {"PAR1", 4, 0, "a Parquet file", TO_LINES},
    {"ARROW1", 6, 0, "an Arrow file", TO_LINES},
    {"\xff\xff\xff\xff", 4, 0, "an Arrow stream", TO_LINES},
    {"ORC", 3, 0, "an ORC file", TO_LINES},
    {"Obj\x01", 4, 0, "an Avro file", TO_LINES},
    {"SQLite format 3", 16, 0, "an SQLite database", TO_LINES},
    {"\x89HDF\r\n\x1a\n", 8, 0, "an HDF5 file", TO_LINES},
    {"\x93NUMPY", 6, 0, "a NumPy array", "scripts may write it as a token shard (.bin)"},
    {"PK\x03\x04", 4, 0, "a zip archive, or a file in one (.docx, .npz, .pt)", UNPACKED},
    {"PK\x05\x06", 4, 0, "an empty zip archive", TEXT},
    {"\xfd"
     "7zXZ\0",
     6, 0, "packed by xz", "unpack it first (xz -d), or pack it by zstd or gzip"},
    {"1AY&SY", 6, 4, "packed by bzip2", "unpack it first (bzip2 -d), or pack it by zstd or gzip"},
    {"\x04\x22\x4d\x18", 4, 0, "packed by lz4", "unpack it first (lz4 -d)"},
    {"LZIP", 4, 0, "packed by lzip", UNPACKED},
    {"\x1f\x9d", 2, 0, "packed by compress", "unpack it first (gzip -d)"},
    {"7z\xbc\xaf\x27\x1c", 6, 0, "a 7z archive", UNPACKED},
    {"Rar!\x1a\x07", 6, 0, "a RAR archive", UNPACKED},
    {"ustar", 5, 257, "a tar archive", "unpack it first (tar -x) and give the folder"},
    {"%PDF-", 5, 0, "a PDF", "take its text out first (pdftotext)"},
    {"%!PS", 4, 0, "PostScript", "take its text out first (ps2ascii)"},
    {"{\\rtf", 5, 0, "an RTF document", "save it as plain text"},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", 8, 0, "an old Office document", "save it as plain text"},
    {"\x7f"
     "ELF",
     4, 0, "a program (ELF)", TEXT},
    {"\xca\xfe\xba\xbe", 4, 0, "a program (Java, Mach-O)", TEXT},
    {"\xcf\xfa\xed\xfe", 4, 0, "a program (Mach-O)", TEXT},
    {"\0asm", 4, 0, "a program (WebAssembly)", TEXT},
    {"\x89PNG\r\n\x1a\n", 8, 0, "a picture (PNG)", TEXT},
    {"\xff\xd8\xff", 3, 0, "a picture (JPEG)", TEXT},
    {"GIF8", 4, 0, "a picture (GIF)", TEXT},
    {"RIFF", 4, 0, "sound or a picture (RIFF)", TEXT},
    {"OggS", 4, 0, "sound (Ogg)", TEXT},
    {"fLaC", 4, 0, "sound (FLAC)", TEXT},
    {"ID3", 3, 0, "sound (MP3)", TEXT},
    {"ftyp", 4, 4, "a film (MP4)", TEXT},
    {"\x1a\x45\xdf\xa3", 4, 0, "a film (Matroska)", TEXT},
    {"GGUF", 4, 0, "a model (GGUF)", TEXT},
    {"version https://git-lfs.github.com/", 35, 0, "a pointer of Git LFS, not the data themselves",
     "fetch them (git lfs pull)"},
    {"\x1e{", 2, 0, "a sequence of JSON texts (RFC 7464)",
     "take its separators out first (tr -d '\\036')"},
    {"\xff\xfe\0\0", 4, 0, "text in UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"},
    {"\0\0\xfe\xff", 4, 0, "text in UTF-32", "convert it to UTF-8 (iconv -f UTF-32 -t UTF-8)"},
    {"\xff\xfe", 2, 0, "text in UTF-16", "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
    {"\xfe\xff", 2, 0, "text in UTF-16", "convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)"},
#undef UNPACKED
};

/* First words of text that is marked up, behind white space, in small letters. A page that says
   that the data cannot be had is one too. */
static const struct {
    const char *begin, *what;
} markups[] = {
    {"<!doctype html", "a page of the web (HTML)"},
    {"<html", "a page of the web (HTML)"},
    {"<head", "a page of the web (HTML)"},
    {"<body", "a page of the web (HTML)"},
    {"<mediawiki", "a dump of a wiki (XML)"},
    {"<svg", "a picture (SVG)"},
    {"<?xml", "XML"},
    {"warc/1.", "a crawl's pages (WARC)"},
};

/* A length in 8 bytes, then JSON. */
static bool is_safetensors(const char *head, size_t bytes) {
    size_t at = skip_space(head, bytes, 9);
    return bytes > at && !memcmp(head + 5, "\0\0\0", 3) && head[8] == '{' &&
           (head[at] == '"' || head[at] == '}');
}

/* Pickles of protocol 2 to 5 begin with its number. */
static bool is_pickle(const char *head, size_t bytes) {
    return bytes > 2 && head[0] == '\x80' && head[1] >= 2 && head[1] <= 5;
}

static bool refuse(fault *f, const char *name, bool inside, const char *what, const char *advice) {
    return fault_set(f, "%.700s: %s%s: %s", name, inside ? "in it " : "", what, advice);
}

/* A text may begin with ORCHARD or RIFF, or have "mustard" where tar has its name. */
static bool is_word(const char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++) {
        char c = (char)(bytes[i] | 0x20);
        if ((c < 'a' || c > 'z') && (bytes[i] < '0' || bytes[i] > '9')) return false;
    }
    return true;
}

/* Control characters that no text has: none of white space, of DOS's end, of terminals' colours. */
static bool has_controls(const char *text, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c < '\b' || (c > '\r' && c < 0x1a)) return true;
    }
    return false;
}

/* A mark of UTF-8 that a careless program has put before them does not hide the bytes. */
static bool check_stranger(file_format *to, const char *name, const char *head, size_t bytes,
                           bool inside, fault *f) {
    size_t mark = mark_bytes(head, bytes);
    bool binary = has_controls(head, bytes);
    for (size_t i = 0; i < sizeof strangers / sizeof *strangers; i++) {
        size_t at = strangers[i].at + mark, count = strangers[i].count;
        if (bytes < at + count || memcmp(head + at, strangers[i].bytes, count) ||
            (!binary && is_word(strangers[i].bytes, count)))
            continue;
        if (!strcmp(strangers[i].advice, TEXT)) to->no_data = strangers[i].what;
        return refuse(f, name, inside, strangers[i].what, strangers[i].advice);
    }
    if (is_safetensors(head, bytes))
        return refuse(f, name, inside, to->no_data = "a model (safetensors)", TEXT);
    if (is_pickle(head, bytes)) return refuse(f, name, inside, "a pickle of Python", TO_LINES);
    return true;
}
#undef TO_LINES
#undef TEXT

/* ---- Names ---- */

static bool ends_with(const char *name, size_t length, const char *ending) {
    size_t n = strlen(ending);
    if (length < n) return false;
    for (size_t i = 0; i < n; i++) {
        char c = name[length - n + i];
        if ((c >= 'A' && c <= 'Z' ? c + 32 : c) != ending[i]) return false;
    }
    return true;
}

/* Without .gz or .zst. */
static size_t plain_length(const char *name) {
    static const char *const packed[] = {".gz", ".gzip", ".zst", ".zstd"};
    size_t length = strlen(name);
    for (size_t i = 0; i < sizeof packed / sizeof *packed; i++)
        if (ends_with(name, length, packed[i])) return length - strlen(packed[i]);
    return length;
}

static bool names_json(const char *name) {
    size_t n = plain_length(name);
    return ends_with(name, n, ".jsonl") || ends_with(name, n, ".json") ||
           ends_with(name, n, ".ndjson") || ends_with(name, n, ".jsonlines");
}

/* Tables look like text, and would be trained on with their commas and quotes. */
static bool names_table(const char *name) {
    size_t n = plain_length(name);
    return ends_with(name, n, ".csv") || ends_with(name, n, ".tsv");
}

static bool names_shard(const char *name) {
    return ends_with(name, plain_length(name), ".bin");
}

/* ---- Shards ---- */

static int32_t little_endian_32(const char *bytes) {
    const unsigned char *b = (const unsigned char *)bytes;
    return (int32_t)((uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 |
                     (uint32_t)b[3] << 24);
}

/* The vocabulary that it was made with; other programs leave zeros there. */
static void take_stamp(file_format *to, const char *head) {
    if (little_endian_32(head + 12) != FORMAT_STAMP) return;
    to->words = little_endian_32(head + 16);
    to->spelling = (uint32_t)little_endian_32(head + 20) |
                   (uint64_t)(uint32_t)little_endian_32(head + 24) << 32;
}

static bool judge_shard(file_format *to, const char *name, const char *head, size_t bytes,
                        int64_t size, bool inside, fault *f) {
    if (inside || size < 0)
        return fault_set(f, "%s: token shards are read from plain files: unpack it first", name);
    if (size < FORMAT_HEADER || bytes < 12)
        return fault_set(f, "%s: %lld bytes; a token shard begins with a header of %d", name,
                         (long long)size, FORMAT_HEADER);
    int32_t magic = little_endian_32(head), version = little_endian_32(head + 4);
    if (magic == 20240522)
        return fault_set(f, "%s: questions of llm.c with several answers, not tokens to train on",
                         name);
    if (magic != FORMAT_MAGIC_16 && magic != FORMAT_MAGIC_32)
        return fault_set(f,
                         "%s: not a token shard: its first number is %d, must be %d (uint16) or %d "
                         "(uint32); one without a header is made anew by `shards`",
                         name, magic, FORMAT_MAGIC_16, FORMAT_MAGIC_32);
    to->width = magic == FORMAT_MAGIC_16 ? 2 : 4;
    if (version != 1 && (to->width == 2 || version != 7))
        return fault_set(f, "%s: a token shard of version %d; allowed: 1 of uint16, 7 of uint32",
                         name, version);
    to->kind = FORMAT_SHARD;
    to->begin = FORMAT_HEADER;
    to->tokens = little_endian_32(head + 8);
    if (bytes >= FORMAT_HEADER) take_stamp(to, head);
    if (to->tokens < 1)
        return fault_set(f, "%s: its header says %lld tokens; must be above 0", name,
                         (long long)to->tokens);
    if (size != FORMAT_HEADER + to->width * to->tokens)
        return fault_set(f,
                         "%s: its header says %lld tokens, that is %lld bytes; the file has %lld",
                         name, (long long)to->tokens,
                         (long long)(FORMAT_HEADER + to->width * to->tokens), (long long)size);
    return true;
}

static bool begins_shard(const char *head, size_t bytes) {
    int32_t magic = bytes >= 4 ? little_endian_32(head) : 0;
    return magic == FORMAT_MAGIC_16 || magic == FORMAT_MAGIC_32;
}

/* ---- Text and JSON ---- */

/* { and then ", or [ and then {, [ or a number before a string: as no text begins that was meant as
   text. */
static bool looks_like_json(const char *text, size_t bytes, size_t at) {
    char first = text[at];
    size_t next = skip_space(text, bytes, at + 1), digits = next;
    if (next == bytes) return false;
    if (first == '{') return text[next] == '"';
    if (first != '[') return false;
    while (digits < bytes && text[digits] >= '0' && text[digits] <= '9') digits++;
    bool numbered = digits > next && digits < bytes && text[digits] == ',';
    if (!numbered && text[next] != '{' && text[next] != '[') return false;
    next = skip_space(text, bytes, numbered ? digits + 1 : next + 1);
    while (!numbered && next < bytes && (text[next] == '[' || text[next] == '{'))
        next = skip_space(text, bytes, next + 1);
    return next < bytes && text[next] == '"';
}

bool format_holds_object(const char *line, size_t bytes) {
    while (bytes && strchr(" \t\r\n,", line[bytes - 1])) bytes--;
    if (!bytes || line[bytes - 1] != '}') return false;
    for (size_t at = 0; at < bytes; at++) {
        size_t next = line[at] == '{' ? skip_space(line, bytes, at + 1) : bytes;
        if (next == bytes || (line[next] != '"' && line[next] != '\'')) continue;
        char quote = line[next++];
        while (next < bytes && line[next] != quote) next += line[next] == '\\' ? 2 : 1;
        next = next < bytes ? skip_space(line, bytes, next + 1) : bytes;
        return next < bytes && line[next] == ':';
    }
    return false;
}

bool format_refuse_objects(const char *name, bool inside, fault *f) {
    return refuse(f, name, inside,
                  "lines that hold objects, of JSON or Python, and are no JSON lines",
                  "write each line as an object of JSON with a \"text\" and nothing beside it "
                  "(--dataset text takes a file as it is)");
}

/* Whether half of the whole lines or more do, whatever stands before their objects. */
static bool holds_objects(const char *text, size_t bytes) {
    size_t whole = 0, objects = 0, at = 0;
    for (const char *end; (end = memchr(text + at, '\n', bytes - at));
         at = (size_t)(end - text) + 1) {
        size_t length = (size_t)(end - text) - at;
        whole += skip_space(text + at, length, 0) < length;
        objects += format_holds_object(text + at, length);
    }
    return format_are_objects(whole, objects);
}

/* The [ at `at` begins an array of strings: of JSON's, which are all on one line. */
static bool begins_strings(const char *text, size_t bytes, size_t at) {
    size_t next = skip_space(text, bytes, at + 1);
    if (text[at] != '[' || next == bytes || text[next] != '"') return false;
    for (next++; next < bytes && text[next] != '"'; next++) {
        if ((unsigned char)text[next] < ' ') return false;
        next += text[next] == '\\';
    }
    next = skip_space(text, bytes, next + 1);
    if (next >= bytes) return true;
    size_t behind = skip_space(text, bytes, next + 1);
    return text[next] == ',' ? behind == bytes || text[behind] == '"'
                             : text[next] == ']' && behind == bytes;
}

/* The first line is none of JSON, but the second is an object of it. */
static bool hides_json(const char *text, size_t bytes, size_t at) {
    const char *newline = memchr(text + at, '\n', bytes - at);
    size_t begin = newline ? skip_space(text, bytes, (size_t)(newline - text)) : bytes, end = begin;
    while (end < bytes && text[end] != '\n') end++;
    bool whole = end < bytes;
    while (end > begin && (text[end - 1] == ' ' || text[end - 1] == '\r')) end--;
    return begin < bytes && text[begin] == '{' && looks_like_json(text, bytes, begin) &&
           (!whole || text[end - 1] == '}');
}

/* Behind white space and comments of XML. */
static size_t skip_comments(const char *text, size_t bytes) {
    size_t at = 0;
    while (bytes - at > 4 && !memcmp(text + at, "<!--", 4)) {
        size_t end = at + 4;
        while (bytes - end >= 3 && memcmp(text + end, "-->", 3)) end++;
        if (bytes - end < 3) return at;
        at = skip_space(text, bytes, end + 3);
    }
    return at;
}

/* What is text, but not such that anybody means its very bytes, who does not say so. */
static bool check_markup(const char *name, const char *text, size_t bytes, bool inside, fault *f) {
    const char *what = names_table(name) ? "a table by its name" : NULL;
    size_t comments = skip_comments(text, bytes);
    text += comments;
    bytes -= comments;
    for (size_t i = 0; i < sizeof markups / sizeof *markups; i++) {
        size_t length = strlen(markups[i].begin);
        if (bytes >= length && !strncasecmp(text, markups[i].begin, length)) what = markups[i].what;
    }
    return !what ||
           refuse(f, name, inside, what,
                  names_json(name) ? "take its text out first"
                                   : "take its text out first (--dataset text takes it as it is)");
}

/* Latin-1, say, or binary: bytes that are no UTF-8 outnumber the characters that are, and are more
   than a stray one among a thousand. The last character may be cut off. */
static bool is_other_text(const char *text, size_t bytes) {
    size_t good = 0, bad = 0;
    for (size_t at = 0, n; at + 3 < bytes; at += n ? n : 1) {
        n = text_character(text + at, bytes - at);
        good += n > 1;
        bad += !n;
    }
    return bad > good && bad > bytes / 1000;
}

static bool judge_text(file_format *to, const char *name, const char *head, size_t bytes,
                       format_wish wish, bool inside, fault *f) {
    bool json = names_json(name);
    size_t at = mark_bytes(head, bytes);
    to->begin = (int64_t)at;
    to->is_empty = at == bytes;
    to->kind = json ? FORMAT_JSON_LINES : FORMAT_TEXT;
    at = skip_space(head, bytes, at);
    if (at == bytes) return true;
    if (wish != FORMAT_BYTES && !check_markup(name, head + at, bytes - at, inside, f)) return false;
    char first = head[at];
    if (json && first != '{' && first != '[' && first != '"')
        return fault_set(f,
                         "%s: named as JSON, but byte %zu begins none: each line must be an object "
                         "with a \"text\", or the file an array of them; plain text has another "
                         "name (.txt)",
                         name, at);
    size_t next = skip_space(head, bytes, at + 1);
    bool strings = first == '[' && next < bytes && head[next] == '"';
    bool records = json || (wish == FORMAT_RECORDS && (first == '{' || strings)) ||
                   (wish != FORMAT_BYTES &&
                    (looks_like_json(head, bytes, at) || begins_strings(head, bytes, at)));
    if (wish != FORMAT_BYTES && !records && hides_json(head, bytes, at))
        return refuse(f, name, inside, "JSON lines behind a first line that is none",
                      "cut that off (tail -n +2); --dataset text takes it as it is");
    if (wish != FORMAT_BYTES && !records && holds_objects(head + at, bytes - at))
        return format_refuse_objects(name, inside, f);
    if (records) to->kind = first == '[' ? FORMAT_JSON_ARRAY : FORMAT_JSON_LINES;
    if (records && first == '{' && memchr(head + at, '\n', next - at))
        return fault_set(f,
                         "%s: a JSON object over several lines, which would be read as one value a "
                         "line: write each on a line (jq -c), or all as an array",
                         name);
    bool wide = next < bytes && !head[next]; /* a sign in 16 bits */
    if ((records && !wide) || wish == FORMAT_BYTES) return true;
    to->no_zeros = true;
    if (!memchr(head, 0, bytes))
        return !is_other_text(head, bytes) ||
               refuse(f, name, inside, "text that is not in UTF-8, or none",
                      "convert it (iconv -f LATIN1 -t UTF-8, or whatever it is in); --dataset text "
                      "takes its bytes as they are");
    return fault_set(f,
                     "%s: holds zero bytes, as no text in UTF-8 does: a binary file, or UTF-16 "
                     "without its mark (--dataset text takes such bytes as they are)",
                     name);
}

bool format_check_rest(const char *name, const char *text, size_t bytes, int64_t offset, fault *f) {
    const char *zero = bytes ? memchr(text, 0, bytes) : NULL;
    return !zero || fault_in_data(f,
                                  "%s: text that is none at byte %lld, which is 0: damaged, or a "
                                  "binary file behind it (--dataset text takes it as it is)",
                                  name, (long long)(offset + (zero - text)));
}

/* Frames that zstd's readers skip may come first. */
static format_packing packing_of(const char *head, size_t bytes) {
    const unsigned char *b = (const unsigned char *)head;
    if (bytes >= 2 && b[0] == 0x1f && b[1] == 0x8b) return FORMAT_GZIP;
    if (bytes < 4) return FORMAT_PLAIN;
    bool skipped = b[0] >= 0x50 && b[0] <= 0x5f && b[1] == 0x2a && b[2] == 0x4d && b[3] == 0x18;
    bool frame = b[0] == 0x28 && b[1] == 0xb5 && b[2] == 0x2f && b[3] == 0xfd;
    return skipped || frame ? FORMAT_ZSTD : FORMAT_PLAIN;
}

bool format_judge(file_format *to, const char *name, const char *head, size_t bytes, int64_t size,
                  format_wish wish, bool inside, fault *f) {
    format_packing packing = packing_of(head, bytes);
    if (inside && packing != FORMAT_PLAIN)
        return fault_set(f, "%s: packed twice: unpack it once", name);
    if (!inside) memset(to, 0, sizeof *to);
    if (packing != FORMAT_PLAIN) {
        to->packing = packing;
        return true;
    }
    if (begins_shard(head, bytes)) return judge_shard(to, name, head, bytes, size, inside, f);
    if (!check_stranger(to, name, head, bytes, inside, f)) return false;
    if (names_shard(name) && size >= 0) return judge_shard(to, name, head, bytes, size, inside, f);
    return judge_text(to, name, head, bytes, wish, inside, f);
}

bool format_of(file_format *to, const char *path, format_wish wish, fault *f) {
    struct stat s;
    lines l;
    const char *head;
    size_t bytes;
    int fd = files_open(path, f);
    if (fd < 0) return false;
    lines_open(&l, fd, path, 0, -1);
    bool ok = !fstat(fd, &s) || fault_errno(f, "%s: cannot read", path);
    ok = ok && lines_head(&l, FORMAT_HEAD, &head, &bytes, f) &&
         format_judge(to, path, head, bytes, s.st_size, wish, false, f);
    if (ok && to->packing != FORMAT_PLAIN)
        ok = unpack_lines(&l, to->packing, f) && lines_head(&l, FORMAT_HEAD, &head, &bytes, f) &&
             format_judge(to, path, head, bytes, s.st_size, wish, true, f);
    lines_close(&l);
    return ok;
}

bool format_prompt(const char *name, const char **text, size_t *bytes, fault *f) {
    file_format unused;
    size_t mark = mark_bytes(*text, *bytes);
    if (packing_of(*text, *bytes) != FORMAT_PLAIN)
        return fault_set(f, "%.700s: packed by gzip or zstd: unpack it first", name);
    *text += mark;
    *bytes -= mark;
    return check_stranger(&unused, name, *text, *bytes, false, f);
}
