/* bench_attention: how fast nsa.h is on this machine, each branch and the whole, forward and
   backward, beside what its multiply-add units and sgemm reach in the same run, and beside dense
   attention; with --beside K again while K processes do nothing but keep cores busy.
   scripts/write_numbers.py makes tables of the file. It checks nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#include "command.h"
#include "peak.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef NSA_HAVE_CBLAS
#include <cblas.h>
#endif

/* Dense attention over more tokens than MAX_DENSE would take hours, and over more than LONG is long
   enough to need no warming up. */
enum { MAX_ROUNDS = 9, MAX_DENSE = 65536, LONG = 8192, MAX_BESIDE = 256 };

/* -- timing -- */

/* Every pass of one direction. */
typedef struct timings {
    timing row[ROWS];
    double over_dense; /* dense over the whole: the median of the rounds' ratios, or 0 */
} timings;

static double time_once(run *f, problem *p) {
    double at = seconds();
    nsa_status s = f(p);
    at = seconds() - at;
    if (s == NSA_OK) return at;
    fprintf(stderr, "bench_attention: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
    exit(1);
}

/* Rounds through all of the passes, as many as fit in `budget` seconds and one at least: what is
   compared ran side by side, so that a machine's moods reach all of them. */
static timings time_rounds(run *const passes[ROWS], problem *p, double budget) {
    double times[ROWS][MAX_ROUNDS], ratios[MAX_ROUNDS], begin = seconds();
    int n = 0, dense = p->d.tokens <= MAX_DENSE;
    timings t;
    memset(&t, 0, sizeof t);
    for (; n < MAX_ROUNDS && (n == 0 || seconds() - begin < budget); n++) {
        for (int i = 0; i < ROWS; i++)
            times[i][n] = passes[i] && (i != ROW_DENSE || dense) ? time_once(passes[i], p) : 0;
        ratios[n] = times[ROW_DENSE][n] / times[ROW_NSA][n];
    }
    for (int i = 0; i < ROWS; i++)
        if (times[i][0] > 0) t.row[i] = summarise(times[i], n);
    t.over_dense = summarise(ratios, n).median;
    return t;
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
            const nsa__matrix left = {a + k, n, 1, NULL}, right = {panel, 64, 1, NULL};
            const nsa__result sum = nsa__result_at(c + j, n, k > 0);
            tiles->gemm(n, 64, 256, &left, &right, &sum);
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

/* -- busy neighbours -- */

typedef struct neighbours {
    pid_t pid[MAX_BESIDE];
    int count;
} neighbours;

/* Until the parent is gone, if it does not end this before. */
static void keep_busy(pid_t parent) {
    for (volatile unsigned turns = 0;; turns++)
        if (turns % (1u << 24) == 0 && getppid() != parent) _exit(0);
}

/* Processes of their own, as another program's would be. */
static void neighbours_begin(neighbours *n, int count) {
    pid_t parent = getpid();
    fflush(NULL);
    for (n->count = 0; n->count < count; n->count++) {
        pid_t pid = fork();
        if (pid < 0) {
            fprintf(stderr, "bench_attention: fork: %s\n", strerror(errno));
            break;
        }
        if (pid == 0) keep_busy(parent);
        n->pid[n->count] = pid;
    }
}

static void neighbours_end(neighbours *n) {
    for (int i = 0; i < n->count; i++) {
        kill(n->pid[i], SIGKILL);
        waitpid(n->pid[i], NULL, 0);
    }
}

/* -- the report -- */

typedef struct report {
    FILE *json;
    int rows;
    double budget; /* seconds for the rounds of one direction */
    nsa_dtype dtype;
    int beside; /* neighbours of a second measurement; 0: none */
} report;

/* What the machine did in this run, quiet. */
typedef struct limits {
    double sgemm;
    peak peak;
} limits;

static double workspace_mib(const problem *p, int backward) {
    size_t bytes = backward ? nsa_attention_backward_workspace_size(&p->dx, &p->x, &p->d)
                            : nsa_attention_forward_workspace_size(&p->x, &p->d);
    return (double)bytes / (1 << 20);
}

static void json_number(FILE *f, const char *name, double value) {
    if (value > 0)
        fprintf(f, ", \"%s\": %.4g", name, value);
    else
        fprintf(f, ", \"%s\": null", name);
}

static void report_row(report *r, const problem *p, int row, int backward, const timings *all,
                       const double pairs[ROWS], const limits *of, int beside) {
    const nsa_desc *d = &p->d;
    timing t = all->row[row];
    /* forward: q k and p v; backward: q k, dout v, p dout, ds k, ds q */
    double flops = pairs[row] * 2 * (backward ? 3 * d->dim + 2 * d->dim_v : d->dim + d->dim_v);
    double rate = flops / t.median * 1e-9, bound = pairs[ROW_DENSE] / pairs[ROW_NSA];
    double over_dense = row == ROW_NSA ? all->over_dense : 0;
    const char *pass = backward ? "bwd" : "fwd";
    if (t.median <= 0) return;
    printf("%-6s %s  %2d %2d %3d  %6d  %d  %10.2f ms", row_names[row], pass, d->heads, d->kv_heads,
           d->dim, d->tokens, d->threads, t.median * 1e3);
    if (d->dim_v != d->dim) printf("  Dv %d", d->dim_v);
    if (beside) printf("  beside %d", beside);
    if (flops > 0)
        printf("  %6.1f GFLOP/s  %3.0f %% of peak, %3.0f %% of sgemm", rate,
               100 * rate / of->peak.rate, 100 * rate / of->sgemm);
    if (over_dense > 0) printf("  %.2f x dense, bound %.2f", over_dense, bound);
    printf("  spread %.0f %%\n", 100 * t.spread);
    fflush(stdout);
    if (!r->json) return;
    fprintf(r->json, "%s\n    {\"branch\": \"%s\", \"pass\": \"%s\", \"heads\": %d, ",
            r->rows++ ? "," : "", row_names[row], pass, d->heads);
    fprintf(r->json, "\"kv_heads\": %d, \"dim\": %d, \"tokens\": %d, \"threads\": %d", d->kv_heads,
            d->dim, d->tokens, d->threads);
    if (d->dim_v != d->dim) fprintf(r->json, ", \"dim_v\": %d", d->dim_v);
    fprintf(r->json, ", \"dtype\": \"%s\", \"beside\": %d", dtype_names[p->dtype], beside);
    json_number(r->json, "ms", t.median * 1e3);
    fprintf(r->json, ", \"spread\": %.2g", t.spread);
    json_number(r->json, "gflops", rate);
    json_number(r->json, "over_sgemm", rate / of->sgemm);
    json_number(r->json, "over_peak", rate / of->peak.rate);
    fprintf(r->json, ", \"peak\": \"%s\", \"peak_gflops\": %.4g", of->peak.name, of->peak.rate);
    json_number(r->json, "over_dense", over_dense);
    json_number(r->json, "bound", row == ROW_NSA ? bound : 0);
    json_number(r->json, "workspace_mib", row == ROW_NSA ? workspace_mib(p, backward) : 0);
    fprintf(r->json, "}");
}

/* More than it had before stays: a machine may be disturbed at one of the readings. */
static void limits_measure(limits *of, int threads) {
    double sgemm = sgemm_rate(threads);
    of->sgemm = sgemm > of->sgemm ? sgemm : of->sgemm;
    peak_measure(&of->peak, threads);
}

static void measure_passes(report *r, problem *p, limits *of, int beside) {
    double pairs[ROWS];
    count_pairs(p, pairs);
    timings forward = time_rounds(forwards, p, r->budget);
    timings backward = time_rounds(backwards, p, r->budget);
    if (!beside) limits_measure(of, p->d.threads);
    for (int i = 0; i < ROWS; i++) report_row(r, p, i, 0, &forward, pairs, of, beside);
    for (int i = 0; i < ROWS; i++) report_row(r, p, i, 1, &backward, pairs, of, beside);
}

static void measure(report *r, const shape *s, int threads) {
    problem p;
    neighbours busy;
    limits of = {0, peak_of(r->dtype)};
    limits_measure(&of, threads);
    problem_make_as(&p, r->dtype, s, threads);
    run_nsa(&p); /* fills caches and the block lists */
    if (s->tokens <= LONG) run_dense(&p);
    measure_passes(r, &p, &of, 0);
    printf("%d threads: peak (%s) %.1f GFLOP/s, sgemm (%s) %.1f; tiles: %s; rows: %s\n", threads,
           of.peak.name, of.peak.rate, sgemm_name, of.sgemm, widest_isa(), dtype_names[r->dtype]);
    if (r->beside) {
        neighbours_begin(&busy, r->beside);
        measure_passes(r, &p, &of, r->beside);
        neighbours_end(&busy);
    }
    problem_free(&p);
}

static void report_begin(report *r) {
    if (!r->json) return;
    report_origin(r->json);
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

/* In both numbers of threads, but for what takes minutes. */
static void measure_threads(report *r, const shape *s) {
    if (s->tokens <= LONG) measure(r, s, 1);
    measure(r, s, 2);
}

static void measure_all(report *r) {
    static const struct {
        shape shape; /* tokens: the most */
        int least;
    } shapes[] = {{{16, 1, 64, 65536, 0}, 1024},
                  {{16, 4, 128, 65536, 0}, 1024},
                  {{12, 12, 64, 65536, 0}, 1024},
                  {{12, 2, 64, 65536, 0}, 1024},
                  {{64, 4, 128, 8192, 0}, 8192}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        shape s = shapes[i].shape;
        for (s.tokens = shapes[i].least; s.tokens <= shapes[i].shape.tokens; s.tokens *= 2)
            measure_threads(r, &s);
    }
}

typedef struct options {
    int64_t quick, beside, dtype;
    double seconds;
    const char *json;
    option_list shapes;
} options;

static const option own[] = {
    {.flag = "--quick",
     .kind = OPTION_SWITCH,
     .offset = offsetof(options, quick),
     .help = "one shape, under a minute"},
    {.flag = "--shape",
     .kind = OPTION_LIST,
     .offset = offsetof(options, shapes),
     .words = "H,Hk,D,T",
     .help = "query heads, kv heads, width (or Dk/Dv), tokens; may be given several times;\n"
             "default: the five of the tables up to 65536 tokens, in about an hour"},
    {.flag = "--dtype",
     .kind = OPTION_WORD,
     .offset = offsetof(options, dtype),
     .words = DTYPE_WORDS,
     .initial = "f32",
     .help = "of what the caller stores"},
    {.flag = "--beside",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, beside),
     .max = MAX_BESIDE,
     .initial = "0",
     .help = "measure all a second time beside so many busy processes"},
    {.flag = "--seconds",
     .kind = OPTION_NUMBER,
     .offset = offsetof(options, seconds),
     .max = 86400,
     .traits = OPTION_ABOVE_MIN,
     .initial = "12",
     .help = "how long rounds of one direction begin"},
    {.flag = "--json",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, json),
     .words = "FILE",
     .help = "where the figures go, beside the table"},
};

static const option_command command = {
    .name = "bench_attention",
    .summary = "how fast nsa.h is on this machine, beside its peak and dense attention.",
    .words = "",
    .rows = own,
    .count = sizeof own / sizeof *own,
};

int main(int argc, char **argv) {
    options given = {0};
    shape shapes[OPTION_LIST_MOST];
    command_read(&command, argc, argv, &given);
    int count = command_shapes(command.name, &given.shapes, shapes);
    report r = {command_json(command.name, given.json), 0, given.seconds, (nsa_dtype)given.dtype,
                (int)given.beside};
    report_begin(&r);
    if (given.quick) measure(&r, &(shape){16, 1, 64, 8192, 0}, 2);
    for (int i = 0; i < count; i++) measure_threads(&r, &shapes[i]);
    if (!given.quick && !count) measure_all(&r);
    return report_end(&r, given.json);
}
