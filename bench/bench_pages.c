/* bench_pages: 64 sequences of 65,536 rows in all, the longest of 16,384, in one call of the
   whole's forward: over straight rows, over pages of 64 and of 16, and as 64 calls, one after
   another. First their prompts, then a token of each. bench_pages [THREADS]. It checks nothing: the
   tests do that. */
#define _POSIX_C_SOURCE 200809L
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { B = 64, ROWS = 65536, LONGEST = 16384, H = 16, HK = 4, D = 64, LIST = 16, ROUNDS = 5 };
enum { ALONE, STRAIGHT, PAGES_64, PAGES_16, WAYS };

static float *q, *k, *v, *k_cmp, *v_cmp, *gates, *out, *branch, *lse;
static int32_t *blocks, firsts[B], counts[B], begins[B + 1], table[B * LONGEST / 16];

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static float *numbers(size_t n) { /* in -2 .. 2 */
    float *x = (float *)malloc(n * sizeof *x);
    uint32_t seed = (uint32_t)n;
    for (size_t i = 0; x && i < n; i++)
        x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 4194304 - 2;
    if (!x) exit(1);
    return x;
}

static float *row(float *x, int64_t at, int heads, int width) {
    return x + at * heads * width;
}

/* Views from a row of the query's side, a row of keys and a compressed row on. */
static nsa_attention views(int64_t query, int64_t key, int64_t cmp, int page) {
    nsa_attention x = {0};
    nsa_tensor *outs[] = {&x.out_cmp, &x.out_slc, &x.out_win};
    nsa_tensor *lses[] = {&x.lse_cmp, &x.lse_slc, &x.lse_win};
    x.q = nsa_tensor_bthd(row(q, query, H, D), NSA_F32, 0, H, D);
    x.gates = nsa_tensor_bthd(row(gates, query, H, 3), NSA_F32, 0, H, 3);
    x.out = nsa_tensor_bthd(row(out, query, H, D), NSA_F32, 0, H, D);
    x.blocks = nsa_tensor_bthd(blocks + query * HK * LIST, NSA_I32, 0, HK, LIST);
    for (int64_t i = 0; i < 3; i++) {
        *outs[i] = nsa_tensor_bthd(row(branch, i * ROWS + query, H, D), NSA_F32, 0, H, D);
        *lses[i] = nsa_tensor_bthd(row(lse, i * ROWS + query, H, 1), NSA_F32, 0, H, 1);
    }
    x.k_cmp.dim = x.v_cmp.dim = D;
    x.k_cmp.x = x.k_slc = x.k_win = nsa_tensor_bthd(row(k, key, HK, D), NSA_F32, page, HK, D);
    x.v_cmp.x = x.v_slc = x.v_win = nsa_tensor_bthd(row(v, key, HK, D), NSA_F32, page, HK, D);
    x.k_cmp.out = nsa_tensor_bthd(row(k_cmp, cmp, HK, D), NSA_F32, page / 16, HK, D);
    x.v_cmp.out = nsa_tensor_bthd(row(v_cmp, cmp, HK, D), NSA_F32, page / 16, HK, D);
    return x;
}

static double call(const nsa_attention *x, const nsa_desc *d, void *workspace, size_t bytes) {
    double at = seconds();
    nsa_status s = nsa_attention_forward(x, d, workspace, bytes);
    if (s == NSA_OK) return seconds() - at;
    fprintf(stderr, "bench_pages: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
    exit(1);
}

/* Pages in an order of chance. */
static void lay_out(nsa_desc *d, int page) {
    int n = 0, width = LONGEST / page, pages = 0;
    for (int b = 0; b < B; b++) pages += (begins[b + 1] - begins[b] + page - 1) / page;
    for (int b = 0; b < B; b++)
        for (int j = 0; j * page < begins[b + 1] - begins[b]; j++, n++)
            table[b * width + j] = (int32_t)((int64_t)n * 7919 % pages);
    d->pages = table, d->table_width = width, d->page_tokens = page, d->page_count = pages;
}

/* One way of doing it, in seconds. */
static double run(int way, int threads, int most, void *workspace, size_t bytes) {
    nsa_desc d = nsa_desc_default(B, LONGEST, H, HK, D);
    int page = way == PAGES_64 ? 64 : 16;
    double sum = 0;
    d.threads = threads, d.count = most, d.firsts = firsts, d.counts = counts;
    if (way == STRAIGHT) d.begins = begins;
    if (way > STRAIGHT) lay_out(&d, page);
    nsa_attention x = views(0, 0, 0, page);
    if (way != ALONE) return call(&x, &d, workspace, bytes);
    d.batch = 1;
    for (int64_t b = 0, query = 0, cmp = 0; b < B; query += counts[b++]) {
        d.tokens = begins[b + 1] - begins[b], d.count = counts[b];
        d.firsts = firsts + b, d.counts = counts + b;
        x = views(query, begins[b], cmp, 0);
        sum += call(&x, &d, workspace, bytes);
        cmp += nsa_cmp_count(&d, d.tokens);
    }
    return sum;
}

static int ascending(const void *a, const void *b) {
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* The ways in turn, each time, so that a neighbour disturbs all alike; of each the middle one. */
static void compare(const char *what, int threads, int most, int rounds) {
    static const char *const names[] = {"one by one", "one call, straight", "pages of 64", "of 16"};
    double times[WAYS][ROUNDS];
    nsa_desc d = nsa_desc_default(1, ROWS, H, HK, D);
    nsa_attention x = views(0, 0, 0, 0);
    d.threads = threads;
    size_t bytes = nsa_attention_forward_workspace_size(&x, &d);
    void *workspace = malloc(bytes);
    for (int i = -1; i < rounds; i++) /* once before, for memory that nothing has touched yet */
        for (int way = 0; way < WAYS; way++) {
            double at = run(way, threads, most, workspace, bytes);
            if (i >= 0) times[way][i] = at;
        }
    free(workspace);
    printf("%s, %d threads:", what, threads);
    for (int way = 0; way < WAYS; way++) {
        qsort(times[way], (size_t)rounds, sizeof **times, ascending);
        printf(" %s %.2f ms (%.3f)%s", names[way], 1e3 * times[way][rounds / 2],
               times[way][rounds / 2] / times[ALONE][rounds / 2], way + 1 < WAYS ? "," : "\n");
    }
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    const size_t rows = ROWS + (size_t)B * 64; /* pages that are not full */
    q = numbers(rows * H * D), k = numbers(rows * HK * D), v = numbers(rows * HK * D);
    k_cmp = numbers(rows * HK * D), v_cmp = numbers(rows * HK * D), gates = numbers(rows * H * 3);
    out = numbers(rows * H * D), branch = numbers(3 * rows * H * D), lse = numbers(3 * rows * H);
    blocks = (int32_t *)malloc(rows * HK * LIST * sizeof *blocks);
    for (int b = 0; b < B; b++) {
        counts[b] = b ? (ROWS - LONGEST) / (B - 1) : LONGEST;
        begins[b + 1] = begins[b] + counts[b];
    }
    compare("prompts", threads, LONGEST, 3);
    for (int b = 0; b < B; b++) firsts[b] = counts[b] - 1, counts[b] = 1;
    compare("a token of each", threads, 1, ROUNDS);
    return 0;
}
