/* check.h - counts what a test program checks; compares numbers, draws random ones, guards memory.
   Twin: none. Not here: anything of nsa.h (tensors.h), any formula (reference.h).

   A test program calls CHECK and the compare functions and returns check_done(), the number of its
   failures. */
#ifndef NSA_TESTS_CHECK_H
#define NSA_TESTS_CHECK_H

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Counting ---- */

static int check_count, check_failures;
static char check_where[256]; /* what is being tested, printed with a failure */

/* Names the case at hand: check_case("win, %s, bf16", g->name). */
static inline void check_case(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(check_where, sizeof check_where, format, args);
    va_end(args);
}

/* Counts one check. After many failures the rest is silent: the first ones tell the story. */
static inline int check_that(int ok, const char *file, int line, const char *format, ...) {
    check_count++;
    if (ok) return 1;
    if (++check_failures > 40) return 0;
    va_list args;
    va_start(args, format);
    printf("%s:%d: FAIL [%s] ", file, line, check_where);
    vprintf(format, args);
    printf("\n");
    fflush(stdout);
    va_end(args);
    return 0;
}

#define CHECK(ok, ...) check_that((ok) != 0, __FILE__, __LINE__, __VA_ARGS__)

/* The last line of a test program; a program that checked nothing has failed. */
static inline int check_done(const char *program) {
    printf("%s: %d checks, %d failures\n", program, check_count, check_failures);
    if (!check_count) return 1;
    return check_failures > 100 ? 100 : check_failures;
}

/* ---- Comparing ---- */

/* sqrt(sum of squares). */
static inline double check_norm(const double *x, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += x[i] * x[i];
    return sqrt(sum);
}

static inline double check_distance(const double *x, const double *y, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        if (x[i] == y[i]) continue; /* equal infinities too */
        sum += (x[i] - y[i]) * (x[i] - y[i]);
    }
    return sqrt(sum);
}

/* The L2 distance of got from want is at most `allowed`. A NaN anywhere fails. On failure prints
   the worst element; rows of `width` make its index readable. */
static inline int check_near(const char *file, int line, const char *what, const double *got,
                             const double *want, size_t n, size_t width, double allowed) {
    double distance = check_distance(got, want, n);
    size_t worst = 0;
    if (distance <= allowed) return check_that(1, file, line, "%s", what);
    for (size_t i = 0; i < n; i++) {
        double e = fabs(got[i] - want[i]), w = fabs(got[worst] - want[worst]);
        if (isnan(w)) break;
        if (got[i] != want[i] && (isnan(e) || e > w)) worst = i;
    }
    double a = got[worst], b = want[worst];
    return check_that(0, file, line,
                      "%s: L2 error %.3g > %.3g allowed (norm %.3g); worst at row %zu, column %zu: "
                      "got %.9g, want %.9g, abs %.3g, rel %.3g",
                      what, distance, allowed, check_norm(want, n), worst / width, worst % width, a,
                      b, fabs(a - b), fabs(a - b) / fabs(b));
}

#define CHECK_NEAR(what, got, want, n, width, allowed) \
    check_near(__FILE__, __LINE__, what, got, want, n, width, allowed)

/* The larger of two; a NaN stays one, which fmax() would drop and a limit then not see. */
static inline double check_larger(double a, double b) {
    return isnan(a) || b <= a ? a : b;
}

/* How far an analytic gradient is from a numeric one. */
static inline double gradient_error(double analytic, double numeric) {
    double size = fmax(1, fmax(fabs(analytic), fabs(numeric)));
    return fabs(analytic - numeric) / size;
}

/* Equal bits. */
static inline int check_bits(const char *file, int line, const char *what, const void *got,
                             const void *want, size_t bytes, size_t element) {
    const unsigned char *a = (const unsigned char *)got, *b = (const unsigned char *)want;
    size_t i = 0;
    if (!bytes || !memcmp(a, b, bytes)) return check_that(1, file, line, "%s", what);
    while (a[i] == b[i]) i++;
    return check_that(0, file, line, "%s: bits differ first at element %zu of %zu", what,
                      i / element, bytes / element);
}

#define CHECK_BITS(what, got, want, bytes, element) \
    check_bits(__FILE__, __LINE__, what, got, want, bytes, element)

/* ---- Random numbers: a function of (seed, counter), so that any element can be drawn alone
   ---- */

static inline uint64_t check_hash(uint64_t seed, uint64_t counter) {
    uint64_t z = seed * 0x9e3779b97f4a7c15u + (counter + 1) * 0xd1342543de82ef95u;
    z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
    z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
    return z ^ (z >> 32);
}

/* Uniform in (0, 1). */
static inline double check_uniform(uint64_t seed, uint64_t counter) {
    return ((double)(check_hash(seed, counter) >> 12) + 0.5) / 4503599627370496.0;
}

/* Normal, mean 0, deviation 1 (Box-Muller). */
static inline double check_normal(uint64_t seed, uint64_t counter) {
    double u = check_uniform(seed, 2 * counter), v = check_uniform(seed, 2 * counter + 1);
    return sqrt(-2 * log(u)) * cos(6.283185307179586 * v);
}

/* Below n. */
static inline int check_below(int n, uint64_t seed, uint64_t counter) {
    return (int)(check_hash(seed, counter) % (uint64_t)n);
}

/* ---- Guarded memory ----
   A buffer of exact size between two red zones, filled with bytes that are NaN in every float
   format. guards_freeze() takes a copy of every live buffer; guards_verify() then demands that the
   zones and every byte not opened by guarded_open() are as they were. Under AddressSanitizer
   the zones are poisoned too, so that a read of them is caught as well.

   Most of a test's time would pass here, because buffers are large and calls are many: a buffer
   that is open as a whole is neither copied nor compared, a closed one is compared at once. */

/* Reals of CHECK_POISON are NaN. As an integer it would be the -1 of an unused slot of a list. */
enum { CHECK_ZONE = 192, CHECK_POISON = 0xff, CHECK_POISON_INT = 0x5a, CHECK_GUARD = 0xa5 };

/* What the next call may write: nothing, the bytes marked in `open`, or all. */
typedef enum guarded_state { GUARDED_CLOSED, GUARDED_IN_PART, GUARDED_OPEN } guarded_state;

typedef struct guarded {
    struct guarded *next;
    const char *name;
    unsigned char *base, *data; /* base: the allocation; data: what a test hands out */
    unsigned char *copy, *open; /* one byte for each of data's */
    size_t bytes;
    guarded_state state;
} guarded;

static guarded *guards_live;

#ifdef __ELF__ /* present where the program is linked with AddressSanitizer */
__attribute__((weak)) void __asan_poison_memory_region(void const volatile *address, size_t bytes);
__attribute__((weak)) void __asan_unpoison_memory_region(void const volatile *address,
                                                         size_t bytes);
#endif

static inline void guarded_poison(guarded *g, int on) {
#ifdef __ELF__
    if (!__asan_poison_memory_region) return;
    /* Whole granules of 8 bytes: what lies before data's granule, and what lies behind data. */
    uintptr_t first = (uintptr_t)g->data / 8 * 8;
    unsigned char *end = g->data + g->bytes;
    size_t before = (size_t)(first - (uintptr_t)g->base);
    size_t behind = (size_t)(g->base + 2 * CHECK_ZONE + g->bytes - end);
    if (on)
        __asan_poison_memory_region(g->base, before);
    else
        __asan_unpoison_memory_region(g->base, before);
    if (on)
        __asan_poison_memory_region(end, behind);
    else
        __asan_unpoison_memory_region(end, behind);
#else
    (void)g;
    (void)on;
#endif
}

static inline void *check_alloc(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "check: out of memory for %zu bytes\n", bytes);
        exit(99);
    }
    return p;
}

/* `shift` bytes moves data off malloc's alignment: element-aligned is all that nsa.h asks for. */
static inline guarded *guarded_filled(const char *name, size_t bytes, size_t shift, int poison) {
    guarded *g = (guarded *)check_alloc(sizeof *g);
    g->name = name;
    g->bytes = bytes;
    g->base = (unsigned char *)check_alloc(bytes + 2 * CHECK_ZONE);
    g->data = g->base + CHECK_ZONE / 2 + shift % (CHECK_ZONE / 2);
    g->copy = (unsigned char *)check_alloc(bytes);
    g->open = (unsigned char *)check_alloc(bytes);
    g->state = GUARDED_CLOSED;
    memset(g->base, CHECK_GUARD, (size_t)(g->data - g->base));
    memset(g->data, poison, bytes);
    memset(g->data + bytes, CHECK_GUARD, (size_t)(g->base + 2 * CHECK_ZONE - g->data));
    g->next = guards_live;
    guards_live = g;
    guarded_poison(g, 1);
    return g;
}

static inline guarded *guarded_new(const char *name, size_t bytes, size_t shift) {
    return guarded_filled(name, bytes, shift, CHECK_POISON);
}

/* The next calls may write these bytes. */
static inline void guarded_open(guarded *g, const void *at, size_t bytes) {
    if (bytes == g->bytes) g->state = GUARDED_OPEN;
    if (g->state == GUARDED_OPEN) return;
    if (g->state == GUARDED_CLOSED) memset(g->open, 0, g->bytes);
    g->state = GUARDED_IN_PART;
    memset(g->open + ((const unsigned char *)at - g->data), 1, bytes);
}

static inline void guards_freeze(void) {
    for (guarded *g = guards_live; g; g = g->next)
        if (g->state != GUARDED_OPEN) memcpy(g->copy, g->data, g->bytes);
}

static inline void guards_close(void) {
    for (guarded *g = guards_live; g; g = g->next) g->state = GUARDED_CLOSED;
}

static inline int guarded_zones_intact(const guarded *g) {
    const unsigned char *end = g->base + g->bytes + 2 * CHECK_ZONE, *p = g->base;
    while (p < g->data && *p == CHECK_GUARD) p++;
    if (p < g->data) return 0;
    for (p += g->bytes; p < end && *p == CHECK_GUARD;) p++;
    return p == end;
}

/* The first byte that was changed and not open, or g->bytes. Blocks of bytes as vectors: a test
   asks this of all of its memory after each call. */
static inline size_t guarded_changed(const guarded *g) {
    enum { BLOCK = 4096 };
    size_t i = 0;
    if (g->state == GUARDED_OPEN || !g->bytes) return g->bytes;
    if (g->state == GUARDED_CLOSED) {
        if (!memcmp(g->data, g->copy, g->bytes)) return g->bytes;
        while (g->data[i] == g->copy[i]) i++;
        return i;
    }
    for (; i + BLOCK <= g->bytes; i += BLOCK) {
        unsigned char changed = 0;
        for (size_t j = i; j < i + BLOCK; j++)
            changed |= (unsigned char)((g->data[j] ^ g->copy[j]) & (unsigned char)(g->open[j] - 1));
        if (changed) break;
    }
    while (i < g->bytes && (g->open[i] || g->data[i] == g->copy[i])) i++;
    return i;
}

/* Every zone and every closed byte of every live buffer is as it was at guards_freeze(). */
static inline void guards_verify(const char *call) {
    for (guarded *g = guards_live; g; g = g->next) {
        guarded_poison(g, 0);
        CHECK(guarded_zones_intact(g), "%s wrote outside the buffer of %s", call, g->name);
        guarded_poison(g, 1);
        size_t i = guarded_changed(g);
        CHECK(i == g->bytes, "%s changed byte %zu of %zu of %s, which it must not write", call, i,
              g->bytes, g->name);
    }
}

/* The newest buffer goes. */
static inline void guarded_drop(void) {
    guarded *g = guards_live;
    guards_live = g->next;
    guarded_poison(g, 0);
    free(g->base);
    free(g->copy);
    free(g->open);
    free(g);
}

static inline void guards_free(void) {
    while (guards_live) guarded_drop();
}

#endif
