/* bench_decode: a step of decoding beside the same step of dense attention, which keeps all k and v
   too: time and bytes of a token, for one sequence and for a batch, and beside the rate at which
   they are read the rate at which memory can be. scripts/write_numbers.py makes tables of the file.
   It checks nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#include "command.h"
#include "decode.h"
#include "report.h"

enum { MAX_ROUNDS = 15, MAX_STEPS = 256 };

static const double ENOUGH = 5e-3; /* s: what a clock and a neighbour do not disturb */

typedef nsa_status step(decoding *c);

static double time_steps(step *f, decoding *c, int steps) {
    double at = seconds();
    for (int i = 0; i < steps; i++) {
        nsa_status s = f(c);
        if (s == NSA_OK) continue;
        fprintf(stderr, "bench_decode: %s (%s)\n", nsa_status_text(s), nsa_status_where(s));
        exit(1);
    }
    return (seconds() - at) / steps;
}

/* How many steps make a time worth reading; their first also fills the processor's caches. */
static int steps_of(step *f, decoding *c) {
    int steps = 1;
    time_steps(f, c, 1);
    while (steps < MAX_STEPS && time_steps(f, c, steps) * steps < ENOUGH) steps *= 2;
    return steps;
}

/* ---- Memory -------------------------------------------------------------------------------- */

enum { CHUNKS = 64, CHUNK_WORDS = 1 << 19 }; /* 256 MiB: beyond every cache */

typedef struct reading {
    const uint64_t *words;
    uint64_t sums[CHUNKS];
} reading;

static void read_chunk(const void *context, int64_t index, void *scratch) {
    reading *r = (reading *)(uintptr_t)context;
    const uint64_t *at = r->words + index * CHUNK_WORDS;
    uint64_t sum[8] = {0};
    (void)scratch;
    for (int i = 0; i < CHUNK_WORDS; i += 8)
        for (int j = 0; j < 8; j++) sum[j] += at[i + j];
    for (int j = 1; j < 8; j++) sum[0] += sum[j];
    r->sums[index] = sum[0];
}

/* Bytes a second that so many threads read from memory, the fastest of some rounds. */
static double memory_rate(int threads) {
    static reading r;
    size_t bytes = (size_t)CHUNKS * CHUNK_WORDS * sizeof *r.words;
    uint64_t *words = (uint64_t *)allocate(bytes), sum = 0;
    nsa__team team = {threads, NULL, 0};
    double least = 0;
    memset(words, 1, bytes);
    r.words = words;
    for (int i = 0; i < MAX_ROUNDS; i++) {
        double at = seconds();
        nsa__run(&team, CHUNKS, read_chunk, &r);
        double took = seconds() - at;
        least = i == 0 || took < least ? took : least;
        for (int j = 0; j < CHUNKS; j++) sum += r.sums[j];
    }
    if (sum == 0) exit(1); /* it is not; and so all of it must be read */
    free(words);
    return (double)bytes / least;
}

/* ---- Steps --------------------------------------------------------------------------------- */

typedef struct result {
    timing sparse, dense;
    double over_dense; /* the median of the rounds' ratios */
} result;

/* Rounds of sparse and dense steps: what is compared ran side by side. */
static result time_rounds(decoding *c) {
    double sparse[MAX_ROUNDS], dense[MAX_ROUNDS], ratios[MAX_ROUNDS];
    int sparse_steps = steps_of(run_decode, c), dense_steps = steps_of(run_dense_decode, c);
    for (int i = 0; i < MAX_ROUNDS; i++) {
        sparse[i] = time_steps(run_decode, c, sparse_steps);
        dense[i] = time_steps(run_dense_decode, c, dense_steps);
        ratios[i] = dense[i] / sparse[i];
    }
    result r = {summarise(sparse, MAX_ROUNDS), summarise(dense, MAX_ROUNDS),
                summarise(ratios, MAX_ROUNDS).median};
    return r;
}

/* One row of the file; ms and bytes are those of one token, and GB/s that of its bytes beside what
   memory gives. over 0: the row of dense itself. */
static void write_row(FILE *json, int *rows, const decoding *c, const char *branch, timing t,
                      double bytes, double formula, double memory, double over, double bound) {
    const nsa_desc *d = &c->p.d;
    fprintf(json, "%s\n    {\"branch\": \"%s\", \"pass\": \"step\", \"heads\": %d, ",
            (*rows)++ ? "," : "", branch, d->heads);
    fprintf(json, "\"kv_heads\": %d, \"dim\": %d, \"tokens\": %d, \"batch\": %d, ", d->kv_heads,
            d->dim, d->tokens, d->batch);
    fprintf(json, "\"threads\": %d, \"ms\": %.4g, \"spread\": %.2g, ", d->threads,
            t.median * 1e3 / d->batch, t.spread);
    fprintf(json, "\"dtype\": \"%s\", ", dtype_names[c->p.dtype]);
    fprintf(json, "\"gflops\": null, \"over_sgemm\": null, \"bytes\": %.0f, ", bytes);
    fprintf(json, "\"bytes_by_formula\": %.0f, ", formula);
    fprintf(json, "\"gb_s\": %.3g, \"memory_gb_s\": %.3g, ", 1e-9 * bytes * d->batch / t.median,
            1e-9 * memory);
    if (over > 0)
        fprintf(json, "\"over_dense\": %.3g, \"bound\": %.3g}", over, bound);
    else
        fprintf(json, "\"over_dense\": null, \"bound\": null}");
}

static void measure(FILE *json, int *rows, nsa_dtype dtype, int tokens, int batch, int threads,
                    double memory) {
    decoding c;
    decoding_make(&c, dtype, batch, 16, 1, 64, tokens, threads);
    result r = time_rounds(&c);
    decode_bytes b = count_bytes(&c);
    double bound = b.dense / b.counted;
    double rate = 1e-9 * b.counted * batch / r.sparse.median;
    double dense_rate = 1e-9 * b.dense * batch / r.dense.median;
    printf(
        "%s, %6d tokens x %2d, %d threads: %8.4f ms a token, dense %8.4f: %5.2f x, bound by bytes "
        "%5.2f; GB/s %.1f, dense %.1f, memory %.1f; %.0f bytes read, by the formula %.0f; "
        "spread %.0f %%\n",
        dtype_names[dtype], tokens, batch, threads, r.sparse.median * 1e3 / batch,
        r.dense.median * 1e3 / batch, r.over_dense, bound, rate, dense_rate, 1e-9 * memory,
        b.counted, b.formula, 100 * r.sparse.spread);
    fflush(stdout);
    if (json) {
        write_row(json, rows, &c, "decode", r.sparse, b.counted, b.formula, memory, r.over_dense,
                  bound);
        write_row(json, rows, &c, "dense decode", r.dense, b.dense, b.dense, memory, 0, 0);
    }
    decoding_free(&c);
}

static void measure_all(FILE *json, int *rows, nsa_dtype dtype) {
    static const int lengths[] = {1024, 8192, 16384, 32768, 65536};
    const double memory[] = {memory_rate(1), memory_rate(2)};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        for (int batch = 1; batch <= 16; batch *= 16)
            for (int threads = 1; threads <= 2; threads++)
                measure(json, rows, dtype, lengths[i], batch, threads, memory[threads - 1]);
}

typedef struct options {
    int64_t quick, dtype;
    const char *json;
} options;

static const option own[] = {
    {.flag = "--quick",
     .kind = OPTION_SWITCH,
     .offset = offsetof(options, quick),
     .help = "8192 tokens, one sequence, one thread"},
    {.flag = "--dtype",
     .kind = OPTION_WORD,
     .offset = offsetof(options, dtype),
     .words = DTYPE_WORDS,
     .initial = "f32",
     .help = "of the rows that are kept"},
    {.flag = "--json",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, json),
     .words = "FILE",
     .help = "where the figures go, beside the table"},
};

static const option_command command = {
    .name = "bench_decode",
    .summary = "what a step of decoding takes, and what it reads.",
    .words = "",
    .rows = own,
    .count = sizeof own / sizeof *own,
};

int main(int argc, char **argv) {
    options given = {0};
    int rows = 0;
    command_read(&command, argc, argv, &given);
    nsa_dtype dtype = (nsa_dtype)given.dtype;
    FILE *json = command_json(command.name, given.json);
    if (json) report_origin(json);
    if (json) fprintf(json, "  \"rows\": [");
    if (given.quick)
        measure(json, &rows, dtype, 8192, 1, 1, memory_rate(1));
    else
        measure_all(json, &rows, dtype);
    if (!json) return 0;
    fprintf(json, "\n  ]\n}\n");
    int failed = ferror(json) != 0;
    failed |= fclose(json) != 0;
    if (failed) fprintf(stderr, "bench_decode: cannot write %s: %s\n", given.json, strerror(errno));
    return failed;
}
