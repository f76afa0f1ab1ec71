/* bench_attention: how fast nsa.h is on this machine, each branch and the whole, forward and
   backward, beside the sgemm rate of the same run and beside dense attention.
   bench_attention [--quick] [--json FILE]; scripts/write_numbers.py makes tables of the file.
   It checks nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#include "problem.h"
#include <errno.h>
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
