/* bpe.c - encoding with byte-level BPE: text is split into words by the vocabulary's patterns, one
   after the other, then in each word the neighbours of the lowest rank are joined, leftmost first,
   until none can be. Twin: bpe.h. */
#include "data/bpe.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/text.h"
#include "data/bpe_vocab.h"
#if NSA_HAVE_UTF8PROC
#include <utf8proc.h>
#endif

/* A word being joined: a list of tokens, linked by their places. */
typedef struct symbol {
    int32_t id; /* -1: joined to the one before */
    int32_t before, after;
} symbol;

/* Two neighbours that could be joined; out of date once either has changed. */
typedef struct candidate {
    int32_t rank, place, left, right, merged;
} candidate;

/* What one match may take: words of ordinary patterns need some steps a byte. */
enum { MATCH_STEPS = 10000000, MATCH_KIB = 1 << 16 };

/* An added token, as it stands in the vocabulary's arena. */
typedef struct added_token {
    const char *text;
    size_t bytes, place; /* place: in the file's list */
    int32_t id;
} added_token;

enum { ADDED_LONGEST = 4096 };

struct bpe {
    char folder[1024]; /* to be named */
    bpe_vocab vocab;
    added_token *added; /* sorted */
    pcre2_code *patterns[BPE_PATTERNS];
    pcre2_match_data *matches[BPE_PATTERNS];
    pcre2_match_context *bounds;
    symbol *symbols;
    candidate *heap;
    size_t room, waiting; /* symbols there is room for; entries of the heap */
};

static bool compile(bpe *b, int i, fault *f) {
    int error;
    PCRE2_SIZE where;
    const char *pattern = b->vocab.patterns[i], *unknown;
    if (!bpe_pattern_is_known(pattern, &unknown))
        return fault_set(f,
                         "%s: pre_tokenizer: the pattern \"%.200s\" cannot be read here as the "
                         "package tokenizers reads it, at \"%.40s\"",
                         b->folder, pattern, unknown);
    char *written = bpe_pattern_written_out(pattern);
    if (!written) return fault_set(f, "%s: out of memory", b->folder);
    b->patterns[i] = pcre2_compile(
        (PCRE2_SPTR)written, PCRE2_ZERO_TERMINATED,
        PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &where, NULL);
    free(written);
    if (b->patterns[i]) {
        (void)pcre2_jit_compile(b->patterns[i], PCRE2_JIT_COMPLETE); /* where it cannot, slower */
        b->matches[i] = pcre2_match_data_create_from_pattern(b->patterns[i], NULL);
    }
    if (b->matches[i]) return true;
    return fault_set(f,
                     "%s: the regular expression library refuses the pattern that splits text into "
                     "words (error %d)",
                     b->folder, error);
}

static bool sort_added(bpe *b, fault *f);

bpe *bpe_open(const char *folder, fault *f) {
    bpe *b = calloc(1, sizeof *b);
    if (b) b->bounds = pcre2_match_context_create(NULL);
    if (!b || !b->bounds) {
        fault_set(f, "out of memory");
        free(b);
        return NULL;
    }
    snprintf(b->folder, sizeof b->folder, "%s", folder);
    pcre2_set_match_limit(b->bounds, MATCH_STEPS);
    pcre2_set_heap_limit(b->bounds, MATCH_KIB);
    bool ok = bpe_vocab_load(&b->vocab, folder, f) && sort_added(b, f);
    for (int i = 0; ok && i < b->vocab.pattern_count; i++) ok = compile(b, i, f);
    if (ok) return b;
    bpe_close(b);
    return NULL;
}

void bpe_close(bpe *b) {
    if (!b) return;
    bpe_vocab_free(&b->vocab);
    free(b->added);
    pcre2_match_context_free(b->bounds);
    for (int i = 0; i < BPE_PATTERNS; i++) {
        pcre2_match_data_free(b->matches[i]);
        pcre2_code_free(b->patterns[i]);
    }
    free(b->symbols);
    free(b->heap);
    free(b);
}

int32_t bpe_vocab_size(const bpe *b) {
    return b->vocab.size;
}

int32_t bpe_end_of_text(const bpe *b) {
    return b->vocab.end_of_text;
}

int32_t bpe_prefix(const bpe *b) {
    return b->vocab.prefix;
}

uint64_t bpe_sum(const bpe *b) {
    return b->vocab.sum;
}

const char *bpe_bytes(const bpe *b, int32_t id, size_t *bytes) {
    *bytes = 0;
    if (id < 0 || id >= b->vocab.size) return "";
    *bytes = b->vocab.tokens[id].bytes;
    return b->vocab.arena + b->vocab.tokens[id].begin;
}

/* ---- Joining: a binary heap by (rank, place) ---- */

static bool goes_first(const candidate *a, const candidate *b) {
    return a->rank != b->rank ? a->rank < b->rank : a->place < b->place;
}

static void push(bpe *b, candidate c) {
    size_t i = b->waiting++;
    for (; i && goes_first(&c, &b->heap[(i - 1) / 2]); i = (i - 1) / 2)
        b->heap[i] = b->heap[(i - 1) / 2];
    b->heap[i] = c;
}

static candidate pop(bpe *b) {
    candidate top = b->heap[0], last = b->heap[--b->waiting];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= b->waiting) break;
        if (child + 1 < b->waiting && goes_first(&b->heap[child + 1], &b->heap[child])) child++;
        if (!goes_first(&b->heap[child], &last)) break;
        b->heap[i] = b->heap[child];
        i = child;
    }
    b->heap[i] = last;
    return top;
}

static void propose(bpe *b, int32_t place) {
    if (place < 0 || b->symbols[place].after < 0) return;
    int32_t left = b->symbols[place].id, right = b->symbols[b->symbols[place].after].id;
    const bpe_merge *m = bpe_vocab_merge(&b->vocab, left, right);
    if (!m) return;
    candidate c = {m->rank, place, left, right, m->merged};
    push(b, c);
}

/* Each join proposes at most two new ones and removes a symbol: 3 n entries are enough. */
static bool make_room(bpe *b, size_t n, fault *f) {
    if (n <= b->room) return true;
    if (n > INT32_MAX / 4) return fault_set(f, "a word of %zu bytes; at most 2^29 are allowed", n);
    free(b->symbols);
    free(b->heap);
    b->room = n < 256 ? 256 : n;
    b->symbols = malloc(b->room * sizeof *b->symbols);
    b->heap = malloc(3 * b->room * sizeof *b->heap);
    if (b->symbols && b->heap) return true;
    b->room = 0;
    return fault_set(f, "out of memory for a word of %zu bytes", n);
}

static void join(bpe *b) {
    while (b->waiting) {
        candidate c = pop(b);
        symbol *left = &b->symbols[c.place];
        if (left->id != c.left || left->after < 0 || b->symbols[left->after].id != c.right)
            continue;
        symbol *right = &b->symbols[left->after];
        left->id = c.merged;
        left->after = right->after;
        if (right->after >= 0) b->symbols[right->after].before = c.place;
        right->id = -1;
        propose(b, left->before);
        propose(b, c.place);
    }
}

static bool encode_word(bpe *b, const char *word, size_t bytes, token_list *out, fault *f) {
    int32_t known = b->vocab.whole ? bpe_vocab_id(&b->vocab, word, bytes) : -1;
    if (known >= 0) return token_list_push(out, known) || fault_set(f, "out of memory for tokens");
    if (!make_room(b, bytes, f)) return false;
    int32_t n = (int32_t)bytes;
    for (int32_t i = 0; i < n; i++) {
        symbol s = {b->vocab.of_byte[(unsigned char)word[i]], i - 1, i + 1 < n ? i + 1 : -1};
        b->symbols[i] = s;
    }
    b->waiting = 0;
    for (int32_t i = 0; i < n; i++) propose(b, i);
    join(b);
    for (int32_t i = 0; i >= 0; i = b->symbols[i].after)
        if (!token_list_push(out, b->symbols[i].id))
            return fault_set(f, "out of memory for tokens");
    return true;
}

/* ---- Splitting ---- */

static size_t well_formed_bytes(const char *text, size_t bytes) {
    size_t at = 0, n;
    while (at < bytes && (n = text_character(text + at, bytes - at))) at += n;
    return at;
}

/* The text is known to be well-formed, so the library need not check it at each word. The stack of
   compiled patterns is small; where it ends, the interpreter takes memory up to MATCH_KIB. */
static int match_from(bpe *b, int level, const char *text, size_t bytes, size_t at) {
    const pcre2_code *pattern = b->patterns[level];
    pcre2_match_data *match = b->matches[level];
    uint32_t how = PCRE2_NO_UTF_CHECK;
    int found = pcre2_match(pattern, (PCRE2_SPTR)text, bytes, at, how, match, b->bounds);
    if (found != PCRE2_ERROR_JIT_STACKLIMIT) return found;
    return pcre2_match(pattern, (PCRE2_SPTR)text, bytes, at, how | PCRE2_NO_JIT, match, b->bounds);
}

static bool encode_run(bpe *b, int level, const char *text, size_t bytes, token_list *out,
                       fault *f);

/* One piece of the pattern before, if it is none of nothing. */
static bool encode_piece(bpe *b, int level, const char *text, size_t from, size_t to,
                         token_list *out, fault *f) {
    return from == to || encode_run(b, level, text + from, to - from, out, f);
}

/* Splits a text by the patterns from `level` on: each match is a piece, and so is what lies between
   two; a match of nothing ends one piece and begins another. A piece knows nothing of what stands
   around it. */
static bool encode_run(bpe *b, int level, const char *text, size_t bytes, token_list *out,
                       fault *f) {
    if (level == b->vocab.pattern_count) return encode_word(b, text, bytes, out, f);
    size_t from = 0; /* of the piece that is not ended */
    for (size_t at = 0; at < bytes;) {
        int found = match_from(b, level, text, bytes, at);
        if (found == PCRE2_ERROR_NOMATCH) break;
        if (found < 1)
            return fault_set(f,
                             "%s: its pattern number %d cannot split text at byte %zu (error %d of "
                             "PCRE2%s)",
                             b->folder, level, at, found,
                             found == PCRE2_ERROR_MATCHLIMIT || found == PCRE2_ERROR_HEAPLIMIT
                                 ? ": it takes too many steps"
                                 : "");
        const PCRE2_SIZE *match = pcre2_get_ovector_pointer(b->matches[level]);
        size_t begin = match[0] < from ? from : match[0], end = match[1]; /* of \K: at or before */
        if (end < begin) end = begin;
        if (!encode_piece(b, level + 1, text, from, begin, out, f) ||
            !encode_piece(b, level + 1, text, begin, end, out, f))
            return false;
        at = from = end;
        if (end == begin && at < bytes) at += text_character(text + at, bytes - at);
    }
    return encode_piece(b, level + 1, text, from, bytes, out, f);
}

static bool encode_around(bpe *b, bool first, const char *text, size_t bytes, token_list *out,
                          fault *f);

/* A run in Unicode's form C, where the vocabulary wants it so, and the other added tokens in it.
   Characters below U+0300 are: they begin with a byte below 0xcc. */
static bool encode_normal(bpe *b, const char *text, size_t bytes, token_list *out, fault *f) {
    size_t plain = 0;
    while (plain < bytes && (unsigned char)text[plain] < 0xcc) plain++;
    if (!b->vocab.nfc || plain == bytes) return encode_around(b, false, text, bytes, out, f);
#if NSA_HAVE_UTF8PROC
    utf8proc_uint8_t *normal = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)bytes,
                                      &normal, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    bool ok = n < 0 ? fault_set(f, "cannot normalize text (%s)", utf8proc_errmsg(n))
                    : encode_around(b, false, (const char *)normal, (size_t)n, out, f);
    free(normal);
    return ok;
#else
    return fault_set(f, "cannot normalize text: built without utf8proc");
#endif
}

/* Bytes that are no UTF-8 are words of their own, so that every byte string survives. */
static bool encode_plain(bpe *b, const char *text, size_t bytes, token_list *out, fault *f) {
    for (size_t at = 0; at < bytes;) {
        size_t good = well_formed_bytes(text + at, bytes - at);
        if (good && !encode_normal(b, text + at, good, out, f)) return false;
        at += good;
        if (at < bytes && !encode_word(b, text + at, 1, out, f)) return false;
        at += at < bytes;
    }
    return true;
}

/* ---- Added tokens -------------------------------------------------------------------------- */

/* By their bytes; the first of equal ones is the first in the file. */
static int added_order(const void *a, const void *b) {
    const added_token *x = a, *y = b;
    size_t shared = x->bytes < y->bytes ? x->bytes : y->bytes;
    int order = memcmp(x->text, y->text, shared);
    if (order) return order;
    if (x->bytes != y->bytes) return x->bytes < y->bytes ? -1 : 1;
    return (x->place > y->place) - (x->place < y->place);
}

static bool sort_added(bpe *b, fault *f) {
    size_t count = b->vocab.added_count;
    b->added = calloc(count + 1, sizeof *b->added);
    if (!b->added) return fault_set(f, "%s: out of memory", b->folder);
    for (size_t i = 0; i < count; i++) {
        added_token *x = &b->added[i];
        *x = (added_token){.id = b->vocab.added[i], .place = i};
        x->text = bpe_bytes(b, x->id, &x->bytes);
        if (x->bytes > ADDED_LONGEST)
            return fault_set(f, "%s: added_tokens, number %zu: %zu bytes; at most %d are allowed",
                             b->folder, i, x->bytes, ADDED_LONGEST);
    }
    size_t first = b->vocab.added_first;
    if (first) qsort(b->added, first, sizeof *b->added, added_order);
    if (first < count) qsort(b->added + first, count - first, sizeof *b->added, added_order);
    return true;
}

/* Of the tokens from low to high, which share their first n bytes and have more, the first whose
   next byte is not below `byte`. */
static size_t first_not_below(const bpe *b, size_t low, size_t high, size_t n, int byte) {
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if ((unsigned char)b->added[middle].text[n] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The longest added token, of the first ones or the others, that the text begins with, or -1: byte
   by byte fewer of the sorted tokens are left. */
static int32_t added_at(const bpe *b, bool first, const char *text, size_t left) {
    int32_t found = -1;
    size_t low = first ? 0 : b->vocab.added_first;
    size_t high = first ? b->vocab.added_first : b->vocab.added_count;
    for (size_t n = 0; low < high && n < left; n++) {
        int byte = (unsigned char)text[n];
        low = first_not_below(b, low, high, n, byte);
        high = first_not_below(b, low, high, n, byte + 1);
        if (low < high && b->added[low].bytes == n + 1) found = b->added[low].id;
        while (low < high && b->added[low].bytes == n + 1) low++;
    }
    return found;
}

/* What lies between the first added tokens has others, and that between these is words. */
static bool encode_between(bpe *b, bool first, const char *text, size_t bytes, token_list *out,
                           fault *f) {
    if (!bytes) return true;
    return first ? encode_plain(b, text, bytes, out, f) : encode_run(b, 0, text, bytes, out, f);
}

static bool encode_around(bpe *b, bool first, const char *text, size_t bytes, token_list *out,
                          fault *f) {
    size_t from = 0, skip;
    for (size_t at = 0; at < bytes; at += skip) {
        bool starts = b->vocab.starts[(unsigned char)text[at]];
        int32_t added = starts ? added_at(b, first, text + at, bytes - at) : -1;
        skip = 1;
        if (added < 0) continue;
        if (!encode_between(b, first, text + from, at - from, out, f)) return false;
        if (!token_list_push(out, added)) return fault_set(f, "out of memory for tokens");
        (void)bpe_bytes(b, added, &skip);
        from = at + skip;
    }
    return encode_between(b, first, text + from, bytes - from, out, f);
}

bool bpe_encode(bpe *b, const char *text, size_t bytes, token_list *out, fault *f) {
    return encode_around(b, true, text, bytes, out, f);
}
