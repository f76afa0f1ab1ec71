/* ladder: attention over a window, forward, from three plain loops to the shipped code: each rung
   changes one thing, and gives the same numbers. docs/ladder.md goes through them.
   ladder [--json FILE] times them in one run, one thread; ladder --check compares them with the
   first and times nothing. Not here: other branches, backward, threads. */
#define _POSIX_C_SOURCE 200809L
#include "report.h"
#include <errno.h>

enum { TILE = 64, BATCH = 64, ROUNDS = 5 };

typedef struct sizes {
    int tokens, heads, dim, window; /* one key-value head; dim at most 64, heads at most BATCH */
} sizes;

typedef struct window_task {
    sizes of;
    const float *q, *k, *v; /* (tokens, heads, dim), (tokens, dim), (tokens, dim) */
    float *out;             /* as q */
    float *packed;          /* room for the keys, transposed by tile */
    float scale;
} window_task;

static int first_key(const window_task *x, int t) {
    return t + 1 > x->of.window ? t + 1 - x->of.window : 0;
}

static const float *query_row(const window_task *x, int t, int h) {
    return x->q + ((ptrdiff_t)t * x->of.heads + h) * x->of.dim;
}

static float *out_row(const window_task *x, int t, int h) {
    return x->out + ((ptrdiff_t)t * x->of.heads + h) * x->of.dim;
}

static float dot(const float *a, const float *b, int n) {
    float sum = 0;
    for (int c = 0; c < n; c++) sum += a[c] * b[c];
    return sum;
}

/* ---- 1: three loops over all keys, as the formula has it ---- */

static void three_loops(const window_task *x) {
    int dim = x->of.dim;
    float *p = (float *)allocate((size_t)x->of.tokens * sizeof *p);
    for (int t = 0; t < x->of.tokens; t++)
        for (int h = 0; h < x->of.heads; h++) {
            const float *q = query_row(x, t, h);
            float most = -INFINITY, sum = 0, *out = out_row(x, t, h);
            int begin = first_key(x, t);
            for (int s = begin; s <= t; s++) {
                p[s] = x->scale * dot(q, x->k + (ptrdiff_t)s * dim, dim);
                most = p[s] > most ? p[s] : most;
            }
            for (int s = begin; s <= t; s++) sum += p[s] = expf(p[s] - most);
            for (int c = 0; c < dim; c++) out[c] = 0;
            for (int s = begin; s <= t; s++)
                for (int c = 0; c < dim; c++) out[c] += p[s] / sum * x->v[(ptrdiff_t)s * dim + c];
        }
    free(p);
}

/* ---- 2: one loop: what has been summed shrinks where a larger score comes ---- */

static void online(const window_task *x) {
    int dim = x->of.dim;
    for (int t = 0; t < x->of.tokens; t++)
        for (int h = 0; h < x->of.heads; h++) {
            const float *q = query_row(x, t, h);
            float most = -INFINITY, sum = 0, *out = out_row(x, t, h);
            for (int c = 0; c < dim; c++) out[c] = 0;
            for (int s = first_key(x, t); s <= t; s++) {
                float score = x->scale * dot(q, x->k + (ptrdiff_t)s * dim, dim);
                float now = score > most ? score : most;
                float shrink = expf(most - now), p = expf(score - now);
                sum = sum * shrink + p;
                for (int c = 0; c < dim; c++)
                    out[c] = out[c] * shrink + p * x->v[(ptrdiff_t)s * dim + c];
                most = now;
            }
            for (int c = 0; c < dim; c++) out[c] /= sum;
        }
}

/* ---- 3: a tile of keys at a time: the sums shrink once a tile, not once a key ---- */

static void tiles(const window_task *x) {
    int dim = x->of.dim;
    float p[TILE];
    for (int t = 0; t < x->of.tokens; t++)
        for (int h = 0; h < x->of.heads; h++) {
            const float *q = query_row(x, t, h);
            float most = -INFINITY, sum = 0, *out = out_row(x, t, h);
            for (int c = 0; c < dim; c++) out[c] = 0;
            for (int s = first_key(x, t), end; s <= t; s = end) {
                end = (s / TILE + 1) * TILE < t + 1 ? (s / TILE + 1) * TILE : t + 1;
                float now = most;
                for (int j = s; j < end; j++) {
                    p[j - s] = x->scale * dot(q, x->k + (ptrdiff_t)j * dim, dim);
                    now = p[j - s] > now ? p[j - s] : now;
                }
                float shrink = expf(most - now);
                sum *= shrink;
                for (int c = 0; c < dim; c++) out[c] *= shrink;
                for (int j = s; j < end; j++) {
                    float of_key = expf(p[j - s] - now);
                    sum += of_key;
                    for (int c = 0; c < dim; c++) out[c] += of_key * x->v[(ptrdiff_t)j * dim + c];
                }
                most = now;
            }
            for (int c = 0; c < dim; c++) out[c] /= sum;
        }
}

/* ---- 4 and 5: a tile serves many rows, and its keys lie transposed ---- */

/* Column j of tile i is key TILE i + j: scores of neighbouring keys are a vector, and each is a sum
   of its own, which a compiler may not make of one dot product. */
static void pack_keys(const window_task *x) {
    int dim = x->of.dim, tiles_all = (x->of.tokens + TILE - 1) / TILE;
    memset(x->packed, 0, (size_t)tiles_all * TILE * (size_t)dim * sizeof *x->packed);
    for (int s = 0; s < x->of.tokens; s++)
        for (int c = 0; c < dim; c++)
            x->packed[((ptrdiff_t)(s / TILE) * dim + c) * TILE + s % TILE] =
                x->k[(ptrdiff_t)s * dim + c];
}

/* 2^x for -126 <= x <= 0, without a branch or a call: an integer for the exponent, a polynomial for
   the rest. nsa.h has the same in vectors. */
static inline float power_of_2(float x) {
    union {
        float value;
        int32_t bits;
    } u;
    int32_t e = (int32_t)(x - 0.5f);
    float r = x - (float)e, p = r * 0.0001535336f + 0.0013398874f;
    p = p * r + 0.0096184374f;
    p = p * r + 0.055503325f;
    p = p * r + 0.2402264791f;
    p = p * r + 0.6931472029f;
    u.value = p * r + 1;
    u.bits += e * (1 << 23);
    return u.value;
}

/* The exponentials of a row of scores, and their sum; what is far below the largest becomes next to
   nothing, in a loop of its own so that the next has no branch. */
NSA__INLINE float exponentials(float *p, float most, int own_exp) {
    float sum = 0;
    for (int j = 0; j < TILE; j++) p[j] = p[j] - most > -126 ? p[j] - most : -126;
    for (int j = 0; j < TILE; j++) p[j] = own_exp ? power_of_2(p[j]) : exp2f(p[j]);
    for (int j = 0; j < TILE; j++) sum += p[j];
    return sum;
}

/* One row, of token t, through the tile that begins at key `tile`. */
NSA__INLINE void row_through_tile(const window_task *x, int t, const float *q, int tile,
                                  float *most, float *sum, float *out, int own_exp) {
    int dim = x->of.dim, last = x->of.tokens - 1 - tile;
    const float *k_t = x->packed + (ptrdiff_t)tile * dim;
    float p[TILE] = {0}, now = *most;
    for (int c = 0; c < dim; c++)
        for (int j = 0; j < TILE; j++) p[j] += q[c] * k_t[c * TILE + j];
    for (int j = 0; j < TILE; j++) {
        int seen = tile + j >= first_key(x, t) && tile + j <= t;
        p[j] = seen ? p[j] : -1e30f;
        now = p[j] > now ? p[j] : now;
    }
    float shrink = exp2f(*most - now);
    *sum = *sum * shrink + exponentials(p, now, own_exp);
    for (int c = 0; c < dim; c++) out[c] *= shrink;
    for (int j = 0; j < TILE && j <= last; j++)
        for (int c = 0; c < dim; c++) out[c] += p[j] * x->v[(ptrdiff_t)(tile + j) * dim + c];
    *most = now;
}

/* Rows are the heads of neighbouring queries: a tile stays in the cache for all of them. */
NSA__INLINE void many_rows(const window_task *x, int own_exp) {
    int dim = x->of.dim, heads = x->of.heads, queries = BATCH / heads;
    float q[BATCH][TILE], most[BATCH], sum[BATCH];
    pack_keys(x);
    for (int first = 0; first < x->of.tokens; first += queries) {
        int last = first + queries <= x->of.tokens ? first + queries - 1 : x->of.tokens - 1;
        int rows = (last - first + 1) * heads;
        for (int r = 0; r < rows; r++) {
            most[r] = -1e29f, sum[r] = 0; /* above a masked score */
            for (int c = 0; c < dim; c++) {
                q[r][c] = query_row(x, first, r)[c] * x->scale * (float)NSA__LOG2E;
                out_row(x, first, r)[c] = 0;
            }
        }
        for (int tile = first_key(x, first) / TILE * TILE; tile <= last; tile += TILE)
            for (int r = 0; r < rows; r++)
                row_through_tile(x, first + r / heads, q[r], tile, &most[r], &sum[r],
                                 out_row(x, first, r), own_exp);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < dim; c++) out_row(x, first, r)[c] /= sum[r];
    }
}

static void rows_of_a_tile(const window_task *x) {
    many_rows(x, 0);
}

static void own_exponential(const window_task *x) {
    many_rows(x, 1);
}

/* ---- 6 and on: nsa.h, whose tiles keep a piece of the result in registers ---- */

static void shipped(const window_task *x, nsa_isa isa) {
    const sizes *n = &x->of;
    nsa_desc d = nsa_desc_default(1, n->tokens, n->heads, 1, n->dim);
    nsa_attend a;
    float *lse = (float *)allocate((size_t)n->tokens * (size_t)n->heads * sizeof *lse);
    memset(&a, 0, sizeof a);
    d.window = n->window;
    d.isa = isa;
    d.threads = 1;
    a.q = nsa_tensor_bthd((void *)x->q, NSA_F32, n->tokens, n->heads, n->dim);
    a.k = nsa_tensor_bthd((void *)x->k, NSA_F32, n->tokens, 1, n->dim);
    a.v = nsa_tensor_bthd((void *)x->v, NSA_F32, n->tokens, 1, n->dim);
    a.out = nsa_tensor_bthd(x->out, NSA_F32, n->tokens, n->heads, n->dim);
    a.lse = nsa_tensor_bthd(lse, NSA_F32, n->tokens, n->heads, 1);
    size_t bytes = nsa_attend_win_forward_workspace_size(&d);
    void *workspace = allocate(bytes);
    nsa_status s = nsa_attend_win_forward(&a, &d, workspace, bytes);
    if (s != NSA_OK) {
        fprintf(stderr, "ladder: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
        exit(1);
    }
    free(workspace);
    free(lse);
}

/* Of this thread alone, so that what else runs on the machine does not count. */
static double processor_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- The ladder ---- */

typedef struct rung {
    const char *name;
    void (*run)(const window_task *x); /* NULL: shipped, with `isa` */
    nsa_isa isa;
} rung;

static const rung ladder[] = {{"three loops", three_loops, NSA_ISA_DETECT},
                              {"online softmax", online, NSA_ISA_DETECT},
                              {"tiles of 64 keys", tiles, NSA_ISA_DETECT},
                              {"64 rows a tile, keys transposed", rows_of_a_tile, NSA_ISA_DETECT},
                              {"own 2^x", own_exponential, NSA_ISA_DETECT},
                              {"nsa.h, plain C", NULL, NSA_ISA_PLAIN},
                              {"nsa.h, SSE2", NULL, NSA_ISA_SSE2},
                              {"nsa.h, AVX2", NULL, NSA_ISA_AVX2},
                              {"nsa.h, AVX-512", NULL, NSA_ISA_AVX512},
                              {"nsa.h, NEON", NULL, NSA_ISA_NEON}};

enum { RUNGS = sizeof ladder / sizeof *ladder };

static void climb(const window_task *x, const rung *r) {
    if (r->run)
        r->run(x);
    else
        shipped(x, r->isa);
}

static window_task task_new(sizes n) {
    size_t keys = (size_t)n.tokens * (size_t)n.dim, all = keys * (size_t)n.heads;
    window_task x = {n,
                     random_floats(all, 1),
                     random_floats(keys, 2),
                     random_floats(keys, 3),
                     (float *)allocate(all * sizeof(float)),
                     NULL,
                     0};
    x.packed = (float *)allocate((keys + (size_t)n.dim * TILE) * sizeof(float));
    x.scale = 1 / sqrtf((float)n.dim);
    return x;
}

static void task_free(window_task *x) {
    free((void *)x->q), free((void *)x->k), free((void *)x->v);
    free(x->out), free(x->packed);
}

/* Every rung's numbers against the first's: out is a mean of v, of size about 1, and a sum of
   `window` terms is off by as many roundings at most. */
static int check(sizes n) {
    window_task x = task_new(n);
    size_t all = (size_t)n.tokens * (size_t)n.heads * (size_t)n.dim;
    float *want = (float *)allocate(all * sizeof *want);
    int failures = 0;
    for (int i = 0; i < RUNGS; i++) {
        double worst = 0;
        if (!ladder[i].run && !nsa_isa_available(ladder[i].isa)) continue;
        memset(x.out, 0xff, all * sizeof *x.out); /* NaN */
        climb(&x, &ladder[i]);
        if (i == 0) memcpy(want, x.out, all * sizeof *want);
        for (size_t j = 0; j < all; j++) {
            double error = fabs((double)x.out[j] - (double)want[j]);
            worst = error > worst || isnan(error) ? error : worst;
        }
        int wrong = !(worst <= n.window * 6.0e-8 * 4);
        if (wrong)
            fprintf(stderr, "ladder: %s is off by %g at T %d, H %d, D %d, w %d\n", ladder[i].name,
                    worst, n.tokens, n.heads, n.dim, n.window);
        failures += wrong;
    }
    free(want);
    task_free(&x);
    return failures;
}

/* Each rung's time and rate. Rounds go over all rungs, so that a neighbour disturbs all alike. */
static void measure(FILE *json, sizes n) {
    double times[RUNGS][ROUNDS], keys = 0, first = 0;
    window_task x = task_new(n);
    for (int t = 0; t < n.tokens; t++) keys += t + 1 - first_key(&x, t);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < RUNGS; i++) {
            if (!ladder[i].run && !nsa_isa_available(ladder[i].isa)) continue;
            double at = processor_seconds();
            climb(&x, &ladder[i]);
            times[i][round] = processor_seconds() - at;
        }
    for (int i = 0, rows = 0; i < RUNGS; i++) {
        if (!ladder[i].run && !nsa_isa_available(ladder[i].isa)) continue;
        timing t = summarise(times[i], ROUNDS);
        double gflops = 4e-9 * n.dim * n.heads * keys / t.median;
        if (i == 0) first = t.median;
        printf("%2d  %-32s %8.1f ms %7.2f Gflop/s %6.1f times the first\n", i + 1, ladder[i].name,
               t.median * 1e3, gflops, first / t.median);
        if (json)
            fprintf(json,
                    "%s\n    {\"rung\": %d, \"what\": \"%s\", \"ms\": %.4g, \"spread\": %.2g, "
                    "\"gflops\": %.4g, \"over_first\": %.3g}",
                    rows++ ? "," : "", i + 1, ladder[i].name, t.median * 1e3, t.spread, gflops,
                    first / t.median);
    }
    task_free(&x);
}

int main(int argc, char **argv) {
    static const sizes timed = {1024, 16, 64, 256},
                       odd[] = {
                           {150, 3, 20, 40}, {64, 16, 64, 64}, {1, 1, 8, 1}, {131, 5, 64, 300}};
    const char *path = argc == 3 && !strcmp(argv[1], "--json") ? argv[2] : NULL;
    FILE *json = NULL;
    int failures = 0;
    if (argc == 2 && !strcmp(argv[1], "--check")) {
        for (size_t i = 0; i < sizeof odd / sizeof *odd; i++) failures += check(odd[i]);
        return failures;
    }
    if (argc > 1 && !path) return fprintf(stderr, "usage: ladder [--json FILE | --check]\n"), 2;
    if (path && !(json = fopen(path, "w")))
        return fprintf(stderr, "ladder: cannot write %s: %s\n", path, strerror(errno)), 1;
    if (json) report_origin(json), fprintf(json, "  \"rows\": [");
    measure(json, timed);
    if (!json) return 0;
    fprintf(json, "\n  ]\n}\n");
    return fclose(json) ? fprintf(stderr, "ladder: cannot write %s\n", path), 1 : 0;
}
