/* bench_attention: how fast nsa.h is on this machine, each branch and the whole, forward and
   backward, beside the sgemm rate of the same run and beside dense attention.
   bench_attention [--quick] [--json FILE]; scripts/write_numbers.py makes tables of the file.
   It checks nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#define NSA_IMPLEMENTATION
#define NSA_STATIC
#include "nsa.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#ifdef NSA_HAVE_CBLAS
#include <cblas.h>
#endif

enum { MAX_REPEATS = 9 };

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *allocate(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) {
        fprintf(stderr, "bench_attention: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

/* Normally distributed, near enough: the sum of four uniform numbers, variance 1. */
static float *random_floats(size_t n, uint64_t seed) {
    float *x = (float *)allocate(n * sizeof *x);
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < n; i++) {
        float sum = 0;
        for (int u = 0; u < 4; u++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            sum += (float)(state >> 40) / 16777216.0f - 0.5f;
        }
        x[i] = sum * 1.7320508f;
    }
    return x;
}

/* One problem: NSA whose branches share k and v, its gradients, and dense attention on the same. */
typedef struct problem {
    nsa_desc d;
    nsa_attention x, dx;
    nsa_attend dense, ddense;
    nsa_select select;
    void *workspace;
    size_t bytes;
    void *owned[32];
    int owns;
} problem;

static nsa_tensor take(problem *p, int rows, int heads, int width, uint64_t seed) {
    size_t n = (size_t)rows * (size_t)heads * (size_t)width;
    float *data = seed ? random_floats(n, seed) : (float *)allocate(n * sizeof *data);
    if (!seed) memset(data, 0, n * sizeof *data);
    p->owned[p->owns++] = data;
    return nsa_tensor_bthd(data, NSA_F32, rows, heads, width);
}

static nsa_compress mean_of(nsa_tensor x, nsa_tensor out, int dim) {
    nsa_compress c;
    memset(&c, 0, sizeof c);
    c.phi = NSA_PHI_MEAN;
    c.dim = dim;
    c.x = x;
    c.out = out;
    return c;
}

static void problem_gradients(problem *p) {
    const nsa_desc *d = &p->d;
    p->dx = p->x;
    p->dx.q = take(p, d->tokens, d->heads, d->dim, 0);
    p->dx.k_slc = p->dx.k_win = p->dx.k_cmp.x = take(p, d->tokens, d->kv_heads, d->dim, 0);
    p->dx.v_slc = p->dx.v_win = p->dx.v_cmp.x = take(p, d->tokens, d->kv_heads, d->dim, 0);
    p->dx.gates = take(p, d->tokens, d->heads, 3, 0);
    p->dx.out = take(p, d->tokens, d->heads, d->dim, 5);
    p->ddense.q = p->dx.q;
    p->ddense.k = p->dx.k_slc;
    p->ddense.v = p->dx.v_slc;
    p->ddense.out = p->dx.out;
}

static void problem_make(problem *p, int heads, int kv_heads, int dim, int tokens, int threads) {
    memset(p, 0, sizeof *p);
    nsa_desc *d = &p->d;
    *d = nsa_desc_default(1, tokens, heads, kv_heads, dim);
    d->threads = threads;
    nsa_tensor k = take(p, tokens, kv_heads, dim, 2), v = take(p, tokens, kv_heads, dim, 3);
    int cmp = nsa_cmp_count(d, tokens);
    p->x.q = take(p, tokens, heads, dim, 1);
    p->x.k_slc = p->x.k_win = k;
    p->x.v_slc = p->x.v_win = v;
    p->x.k_cmp = mean_of(k, take(p, cmp, kv_heads, dim, 0), dim);
    p->x.v_cmp = mean_of(v, take(p, cmp, kv_heads, dim, 0), dim);
    p->x.gates = take(p, tokens, heads, 3, 4);
    p->x.blocks = take(p, tokens, kv_heads, nsa_block_list_width(d), 0);
    p->x.blocks.dtype = NSA_I32;
    nsa_tensor *outs[] = {&p->x.out_cmp, &p->x.out_slc, &p->x.out_win, &p->x.out, &p->dense.out};
    nsa_tensor *lses[] = {&p->x.lse_cmp, &p->x.lse_slc, &p->x.lse_win, &p->dense.lse};
    for (size_t i = 0; i < sizeof outs / sizeof *outs; i++)
        *outs[i] = take(p, tokens, heads, dim, 0);
    for (size_t i = 0; i < sizeof lses / sizeof *lses; i++) *lses[i] = take(p, tokens, heads, 1, 0);
    p->dense.q = p->x.q;
    p->dense.k = k;
    p->dense.v = v;
    problem_gradients(p);
    const size_t sizes[] = {nsa_attention_forward_workspace_size(&p->x, d),
                            nsa_attention_backward_workspace_size(&p->dx, &p->x, d),
                            nsa_attend_dense_forward_workspace_size(d),
                            nsa_attend_dense_backward_workspace_size(d)};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        p->bytes = sizes[i] > p->bytes ? sizes[i] : p->bytes;
    p->workspace = allocate(p->bytes);
}

static void problem_free(problem *p) {
    for (int i = 0; i < p->owns; i++) free(p->owned[i]);
    free(p->workspace);
}

static nsa_attend branch_of(const nsa_attention *x, nsa__branch branch) {
    nsa__chain c = nsa__chain_of(x);
    return branch == NSA__CMP ? c.cmp : branch == NSA__SLC ? c.slc : c.win;
}

static nsa_gate gate_of(const nsa_attention *x) {
    return nsa__chain_of(x).gate;
}

/* -- what is timed -- */

typedef nsa_status run(problem *p);

static nsa_status run_cmp(problem *p) {
    nsa_attend x = branch_of(&p->x, NSA__CMP);
    return nsa_attend_cmp_forward(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_slc(problem *p) {
    nsa_attend x = branch_of(&p->x, NSA__SLC);
    return nsa_attend_slc_forward(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_win(problem *p) {
    nsa_attend x = branch_of(&p->x, NSA__WIN);
    return nsa_attend_win_forward(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_select(problem *p) {
    nsa_select x = nsa__chain_of(&p->x).select;
    return nsa_select_blocks(&x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_gate(problem *p) {
    nsa_gate x = gate_of(&p->x);
    return nsa_gate_forward(&x, &p->d);
}
static nsa_status run_nsa(problem *p) {
    return nsa_attention_forward(&p->x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_dense(problem *p) {
    return nsa_attend_dense_forward(&p->dense, &p->d, p->workspace, p->bytes);
}

/* A branch's backward by itself: its gradients are those of slc's k and v in every case but cmp. */
static nsa_status branch_backward(problem *p, nsa__branch branch) {
    nsa_attend x = branch_of(&p->x, branch), dx = p->ddense;
    if (branch == NSA__SLC) return nsa_attend_slc_backward(&dx, &x, &p->d, p->workspace, p->bytes);
    if (branch == NSA__WIN) return nsa_attend_win_backward(&dx, &x, &p->d, p->workspace, p->bytes);
    return nsa_attend_cmp_backward(&dx, &x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_cmp_backward(problem *p) {
    return branch_backward(p, NSA__CMP);
}
static nsa_status run_slc_backward(problem *p) {
    return branch_backward(p, NSA__SLC);
}
static nsa_status run_win_backward(problem *p) {
    return branch_backward(p, NSA__WIN);
}
static nsa_status run_gate_backward(problem *p) {
    nsa_gate x = gate_of(&p->x), dx = gate_of(&p->dx);
    dx.cmp = dx.slc = dx.win = p->dense.out; /* any memory of that shape */
    return nsa_gate_backward(&dx, &x, &p->d);
}
static nsa_status run_nsa_backward(problem *p) {
    return nsa_attention_backward(&p->dx, &p->x, &p->d, p->workspace, p->bytes);
}
static nsa_status run_dense_backward(problem *p) {
    return nsa_attend_dense_backward(&p->ddense, &p->dense, &p->d, p->workspace, p->bytes);
}

enum { ROW_CMP, ROW_SELECT, ROW_SLC, ROW_WIN, ROW_GATE, ROW_NSA, ROW_DENSE, ROWS };
static const char *const row_names[ROWS] = {"cmp", "select", "slc", "win", "gate", "nsa", "dense"};
/* Forward in the order that fills what the next one reads. */
static run *const forwards[ROWS] = {run_cmp,  run_select, run_slc,  run_win,
                                    run_gate, run_nsa,    run_dense};
static run *const backwards[ROWS] = {run_cmp_backward,  NULL,
                                     run_slc_backward,  run_win_backward,
                                     run_gate_backward, run_nsa_backward,
                                     run_dense_backward};

/* Query-key pairs of each branch, over all query heads. */
static void count_pairs(const problem *p, double pairs[ROWS]) {
    const nsa_desc *d = &p->d;
    memset(pairs, 0, ROWS * sizeof *pairs);
    for (int t = 0; t < d->tokens; t++) {
        pairs[ROW_CMP] += d->heads * (double)nsa_cmp_visible(d, t);
        pairs[ROW_WIN] += d->heads * (double)(t + 1 - nsa_window_begin(d, t));
        pairs[ROW_DENSE] += d->heads * (t + 1.0);
        for (int h = 0; h < d->kv_heads; h++) {
            const int32_t *list = (const int32_t *)nsa__row(&p->x.blocks, 0, t, h);
            for (int i = 0; i < nsa_block_list_width(d) && list[i] >= 0; i++) {
                int begin = list[i] * d->slc_block, end = begin + d->slc_block;
                pairs[ROW_SLC] +=
                    d->heads / d->kv_heads * (double)((end > t ? t + 1 : end) - begin);
            }
        }
    }
    pairs[ROW_NSA] = pairs[ROW_CMP] + pairs[ROW_SLC] + pairs[ROW_WIN];
}

/* -- timing -- */

typedef struct timing {
    double median, spread; /* seconds; (slowest - fastest) / median */
} timing;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static timing summarise(double *times, int n) {
    timing t;
    qsort(times, (size_t)n, sizeof *times, compare_doubles);
    t.median = times[n / 2];
    t.spread = (times[n - 1] - times[0]) / t.median;
    return t;
}

/* As many runs as fit in `budget` seconds, one at least. */
static timing time_run(run *f, problem *p, double budget) {
    double times[MAX_REPEATS], begin = seconds();
    int n = 0;
    while (n < MAX_REPEATS && (n == 0 || seconds() - begin < budget)) {
        double at = seconds();
        nsa_status s = f(p);
        times[n++] = seconds() - at;
        if (s == NSA_OK) continue;
        fprintf(stderr, "bench_attention: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
        exit(1);
    }
    return summarise(times, n);
}

#ifdef NSA_HAVE_CBLAS
static const char sgemm_name[] = "OpenBLAS";
static void sgemm(int n, const float *a, const float *b, float *c, int threads) {
    openblas_set_num_threads(threads);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1, a, n, b, n, 0, c, n);
}
#else
static const char sgemm_name[] = "the tiles of nsa.h";
static void sgemm(int n, const float *a, const float *b, float *c, int threads) {
    const nsa__tiles *tiles = nsa__tiles_of(NSA_ISA_DETECT);
#ifdef _OPENMP
#pragma omp parallel for num_threads(threads)
#endif
    for (int j = 0; j < n; j += 64) {
        float panel[256 * 64];
        for (int k = 0; k < n; k += 256) {
            for (int p = 0; p < 256; p++)
                memcpy(panel + p * 64, b + (ptrdiff_t)(k + p) * n + j, 64 * sizeof *panel);
            tiles->gemm(n, 64, 256, a + k, n, 1, panel, 64, c + j, n, k > 0, NULL);
        }
    }
    (void)threads;
}
#endif

/* The rate of a large matrix product, GFLOP/s: the best of a few, for it stands for the peak. */
static double sgemm_rate(int threads) {
    enum { N = 2048 };
    float *a = random_floats(N * N, 1), *b = random_floats(N * N, 2), *c = random_floats(N * N, 3);
    double best = 0;
    for (int i = 0; i < 4; i++) {
        double at = seconds();
        sgemm(N, a, b, c, threads);
        double rate = 2e-9 * N * N * N / (seconds() - at);
        best = rate > best ? rate : best;
    }
    free(a);
    free(b);
    free(c);
    return best;
}

/* What NSA_ISA_DETECT finds. */
static const char *widest_isa(void) {
    int isa = NSA_ISA_NEON;
    while (!nsa_isa_available((nsa_isa)isa)) isa--;
    return nsa_isa_name((nsa_isa)isa);
}

/* -- the report -- */

typedef struct report {
    FILE *json;
    int rows;
    double budget;
} report;

static void report_row(report *r, const problem *p, int row, int backward, timing t,
                       const double pairs[ROWS], double peak, double dense) {
    const nsa_desc *d = &p->d;
    /* forward: q k and p v; backward: q k, dout v, p dout, ds k, ds q */
    double flops = pairs[row] * 2 * (backward ? 3 * d->dim + 2 * d->dim_v : d->dim + d->dim_v);
    double rate = flops / t.median * 1e-9, bound = pairs[ROW_DENSE] / pairs[ROW_NSA];
    const char *pass = backward ? "bwd" : "fwd";
    printf("%-6s %s  %2d %2d %3d  %6d  %d  %10.2f ms", row_names[row], pass, d->heads, d->kv_heads,
           d->dim, d->tokens, d->threads, t.median * 1e3);
    if (flops > 0) printf("  %6.1f GFLOP/s  %3.0f %% of sgemm", rate, 100 * rate / peak);
    if (row == ROW_NSA) printf("  %.2f x dense, bound %.2f", dense / t.median, bound);
    printf("  spread %.0f %%\n", 100 * t.spread);
    fflush(stdout);
    if (!r->json) return;
    fprintf(r->json, "%s\n    {\"branch\": \"%s\", \"pass\": \"%s\", \"heads\": %d, ",
            r->rows++ ? "," : "", row_names[row], pass, d->heads);
    fprintf(r->json, "\"kv_heads\": %d, \"dim\": %d, \"tokens\": %d, \"threads\": %d, ",
            d->kv_heads, d->dim, d->tokens, d->threads);
    fprintf(r->json, "\"ms\": %.4g, \"spread\": %.2g", t.median * 1e3, t.spread);
    if (flops > 0)
        fprintf(r->json, ", \"gflops\": %.4g, \"over_sgemm\": %.3g", rate, rate / peak);
    else
        fprintf(r->json, ", \"gflops\": null, \"over_sgemm\": null");
    if (row == ROW_NSA)
        fprintf(r->json, ", \"over_dense\": %.3g, \"bound\": %.3g}", dense / t.median, bound);
    else
        fprintf(r->json, ", \"over_dense\": null, \"bound\": null}");
}

static void measure(report *r, int heads, int kv_heads, int dim, int tokens, int threads) {
    problem p;
    timing forward[ROWS], backward[ROWS];
    double pairs[ROWS], peak = sgemm_rate(threads);
    problem_make(&p, heads, kv_heads, dim, tokens, threads);
    run_nsa(&p); /* fills caches and the block lists */
    count_pairs(&p, pairs);
    for (int i = 0; i < ROWS; i++) forward[i] = time_run(forwards[i], &p, r->budget);
    for (int i = 0; i < ROWS; i++)
        if (backwards[i]) backward[i] = time_run(backwards[i], &p, r->budget);
    printf("sgemm (%s), %d threads: %.1f GFLOP/s; tiles: %s\n", sgemm_name, threads, peak,
           widest_isa());
    for (int i = 0; i < ROWS; i++)
        report_row(r, &p, i, 0, forward[i], pairs, peak, forward[ROW_DENSE].median);
    for (int i = 0; i < ROWS; i++)
        if (backwards[i])
            report_row(r, &p, i, 1, backward[i], pairs, peak, backward[ROW_DENSE].median);
    problem_free(&p);
}

/* The first line of a command's output, as a JSON string's inside. */
static void first_line(const char *command, char *to, size_t size) {
    FILE *f = popen(command, "r");
    size_t n = 0;
    int c;
    while (f && (c = fgetc(f)) != EOF && c != '\n')
        if (n + 1 < size && c >= 32 && c != '"' && c != '\\') to[n++] = (char)c;
    to[n] = 0;
    if (f) pclose(f);
}

static void report_begin(report *r) {
    char machine[200], commit[64], date[16];
    time_t now = time(NULL);
    if (!r->json) return;
    first_line("lscpu | sed -n 's/^Model name: *//p'", machine, sizeof machine);
    first_line("git rev-parse --short HEAD 2>/dev/null", commit, sizeof commit);
    strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
    fprintf(r->json, "{\n  \"machine\": \"%s, %s\",\n  \"date\": \"%s\",\n  \"commit\": \"%s\",\n",
            machine, widest_isa(), date, commit);
    fprintf(r->json, "  \"sgemm\": \"%s\",\n  \"rows\": [", sgemm_name);
}

static int report_end(report *r, const char *path) {
    if (!r->json) return 0;
    fprintf(r->json, "\n  ]\n}\n");
    int failed = ferror(r->json) != 0;
    failed |= fclose(r->json) != 0;
    if (failed) fprintf(stderr, "bench_attention: cannot write %s: %s\n", path, strerror(errno));
    return failed;
}

/* Every geometry at every length that its dense baseline can be waited for. */
static void measure_all(report *r) {
    static const struct {
        int heads, kv_heads, dim, least, most;
    } shapes[] = {{16, 1, 64, 1024, 65536},
                  {16, 4, 128, 1024, 16384},
                  {12, 12, 64, 1024, 16384},
                  {12, 2, 64, 1024, 16384},
                  {64, 4, 128, 8192, 8192}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int tokens = shapes[i].least; tokens <= shapes[i].most; tokens *= 2)
            for (int threads = 1; threads <= 2; threads++) {
                if (threads == 1 && tokens > 8192) continue;
                measure(r, shapes[i].heads, shapes[i].kv_heads, shapes[i].dim, tokens, threads);
            }
}

int main(int argc, char **argv) {
    report r = {NULL, 0, 1.5};
    const char *path = NULL;
    int quick = 0;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--quick")) {
            quick = 1;
        } else if (!strcmp(argv[i], "--json") && i + 1 < argc) {
            path = argv[++i];
        } else {
            fprintf(stderr, "usage: bench_attention [--quick] [--json FILE]\n");
            return 2;
        }
    }
    if (path && !(r.json = fopen(path, "w"))) {
        fprintf(stderr, "bench_attention: cannot write %s: %s\n", path, strerror(errno));
        return 1;
    }
    report_begin(&r);
    if (quick)
        measure(&r, 16, 1, 64, 8192, 2);
    else
        measure_all(&r);
    return report_end(&r, path);
}
