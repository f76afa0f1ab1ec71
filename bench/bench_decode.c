/* bench_decode: a step of decoding by NSA, by lists of blocks and of tokens, and over all keys,
   which all keep all k and v, and the indexer that makes such lists: the time of a token, for one
   sequence and for a batch, beside what memory and multiply-add units allow in the same run.
   scripts/write_numbers.py makes tables of the file. It checks nothing: the tests do that. */
#define _POSIX_C_SOURCE 200809L
#include "command.h"
#include "decode.h"
#include "peak.h"

enum { MAX_ROUNDS = 15, MAX_STEPS = 256 };

static const double ENOUGH = 5e-3; /* s: what a clock and a neighbour do not disturb */

static double time_steps(decoding *c, method m, int steps) {
    double at = seconds();
    for (int i = 0; i < steps; i++) {
        nsa_status s = run_step(c, m);
        if (s == NSA_OK) continue;
        fprintf(stderr, "bench_decode: %s: %s (%s)\n", method_names[m], nsa_status_text(s),
                nsa_status_where(s));
        exit(1);
    }
    return (seconds() - at) / steps;
}

/* How many steps make a time worth reading; their first also fills the processor's caches. */
static int steps_of(decoding *c, method m) {
    int steps = 1;
    time_steps(c, m, 1);
    while (steps < MAX_STEPS && time_steps(c, m, steps) * steps < ENOUGH) steps *= 2;
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

/* What this many threads can do: bytes and operations a second. */
typedef struct machine {
    double memory, flops;
} machine;

static machine machine_of(nsa_dtype dtype, int threads) {
    peak p = peak_of(dtype);
    peak_measure(&p, threads);
    machine m = {memory_rate(threads), 1e9 * p.rate};
    return m;
}

/* The rows of one file. */
typedef struct report {
    FILE *json;
    int rows;
} report;

typedef struct result {
    timing step;
    double over_dense; /* the median of the rounds' ratios */
} result;

/* Rounds of every method's steps: what is compared ran side by side. */
static void time_rounds(decoding *c, result *results) {
    double times[METHODS][MAX_ROUNDS], ratios[METHODS][MAX_ROUNDS];
    int steps[METHODS];
    for (int m = 0; m < METHODS; m++) steps[m] = steps_of(c, (method)m);
    for (int i = 0; i < MAX_ROUNDS; i++) {
        for (int m = 0; m < METHODS; m++) times[m][i] = time_steps(c, (method)m, steps[m]);
        for (int m = 0; m < METHODS; m++) ratios[m][i] = times[DENSE_STEP][i] / times[m][i];
    }
    for (int m = 0; m < METHODS; m++) {
        results[m].step = summarise(times[m], MAX_ROUNDS);
        results[m].over_dense = summarise(ratios[m], MAX_ROUNDS).median;
    }
}

/* Bytes of a row. */
static double row_bytes(nsa_dtype dtype, int width) {
    const double each = dtype == NSA_F32 ? 4 : dtype == NSA_BF16 || dtype == NSA_F16 ? 2 : 1;
    return each * (double)nsa_tensor_bthd(NULL, dtype, 1, 1, width).token;
}

/* One row: ms, bytes and operations are those of one token of one sequence. No step is faster than
   its bytes or its operations allow; `bound` is what bytes alone allow over dense. */
static void write_row(report *r, const decoding *c, method m, const result *got, machine on) {
    const nsa_desc *d = &c->p.d;
    const int indexes = m == INDEX_STEP; /* which has keys of its own, and no values */
    double key = indexes ? row_bytes(c->kept, INDEX_WIDTH)
                         : row_bytes(c->kept, d->dim) + row_bytes(c->kept, d->dim_v);
    double keys = m == NSA_STEP ? keys_counted(c) : keys_of(c, m), bytes = key * keys;
    double flops = 2.0 * (indexes ? INDEX_WIDTH : d->dim + d->dim_v) * keys *
                   (indexes ? INDEX_HEADS : d->heads / d->kv_heads);
    double took = got->step.median / d->batch, by_bytes = bytes / on.memory,
           by_flops = flops / on.flops, least = by_bytes > by_flops ? by_bytes : by_flops;
    double bound = keys_of(c, DENSE_STEP) / keys;
    printf(
        "%-12s %-4s %2d/%d x %d, %6d tokens x %2d, %d threads: %8.4f ms a token, %5.2f times its "
        "bound; %5.2f x dense, bytes allow %5.2f; GB/s %.1f of %.1f, GFLOP/s %.0f of %.0f; "
        "spread %.0f %%\n",
        method_names[m], dtype_names[c->kept], d->heads, d->kv_heads, d->dim, d->tokens, d->batch,
        d->threads, 1e3 * took, took / least, got->over_dense, bound, 1e-9 * bytes / took,
        1e-9 * on.memory, 1e-9 * flops / took, 1e-9 * on.flops, 100 * got->step.spread);
    fflush(stdout);
    if (!r->json) return;
    fprintf(r->json, "%s\n    {\"branch\": \"%s\", \"pass\": \"step\", \"heads\": %d, ",
            r->rows++ ? "," : "", method_names[m], d->heads);
    fprintf(r->json, "\"kv_heads\": %d, \"dim\": %d, \"dim_v\": %d, \"tokens\": %d, ", d->kv_heads,
            d->dim, d->dim_v, d->tokens);
    fprintf(r->json, "\"batch\": %d, \"threads\": %d, \"dtype\": \"%s\", \"ms\": %.4g, ", d->batch,
            d->threads, dtype_names[c->kept], 1e3 * took);
    fprintf(r->json, "\"spread\": %.2g, \"bytes\": %.0f, \"bytes_by_formula\": %.0f, ",
            got->step.spread, bytes, key * keys_of(c, m));
    fprintf(r->json, "\"gb_s\": %.3g, \"memory_gb_s\": %.3g, \"gflops\": %.3g, ",
            1e-9 * bytes / took, 1e-9 * on.memory, 1e-9 * flops / took);
    fprintf(r->json, "\"peak_gflops\": %.3g, \"over_bound\": %.3g, ", 1e-9 * on.flops,
            took / least);
    if (m == DENSE_STEP || indexes)
        fprintf(r->json, "\"over_dense\": null, \"bound\": null}");
    else
        fprintf(r->json, "\"over_dense\": %.3g, \"bound\": %.3g}", got->over_dense, bound);
}

static void measure(report *r, nsa_dtype dtype, const shape *s, int batch, int threads,
                    machine on) {
    decoding c;
    result results[METHODS];
    decoding_make(&c, dtype, s, batch, threads);
    time_rounds(&c, results);
    for (int m = 0; m < METHODS; m++) write_row(r, &c, (method)m, &results[m], on);
    decoding_free(&c);
}

/* The lengths of one shape, then the longest of wider ones, which one batch makes long enough. */
static void measure_all(report *r, nsa_dtype dtype) {
    static const struct {
        shape shape;
        int batch; /* the most: 1 and 16 */
    } all[] = {{{16, 1, 64, 1024, 0}, 16},  {{16, 1, 64, 8192, 0}, 16},
               {{16, 1, 64, 16384, 0}, 16}, {{16, 1, 64, 32768, 0}, 16},
               {{16, 1, 64, 65536, 0}, 16}, {{16, 1, 128, 65536, 0}, 16},
               {{64, 4, 128, 65536, 0}, 1}, {{128, 1, 576, 65536, 512}, 1}};
    const machine on[] = {machine_of(dtype, 1), machine_of(dtype, 2)};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        for (int batch = 1; batch <= all[i].batch; batch *= 16)
            for (int threads = 1; threads <= 2; threads++)
                measure(r, dtype, &all[i].shape, batch, threads, on[threads - 1]);
}

typedef struct options {
    int64_t quick, dtype, batch, threads;
    const char *json;
    option_list shapes;
} options;

static const option own[] = {
    {.flag = "--quick",
     .kind = OPTION_SWITCH,
     .offset = offsetof(options, quick),
     .help = "16,1,64 of 8192 tokens alone"},
    {.flag = "--shape",
     .kind = OPTION_LIST,
     .offset = offsetof(options, shapes),
     .words = "H,Hk,D,T",
     .help = "query heads, kv heads, width (or Dk/Dv), tokens; may be given several times;\n"
             "default: those of the tables, for one sequence and sixteen, in minutes"},
    {.flag = "--batch",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, batch),
     .min = 1,
     .max = 4096,
     .initial = "1",
     .help = "sequences, of each --shape"},
    {.flag = "--threads",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, threads),
     .min = 1,
     .max = 1024,
     .initial = "1",
     .help = "of each --shape"},
    {.flag = "--dtype",
     .kind = OPTION_WORD,
     .offset = offsetof(options, dtype),
     .words = DTYPE_WORDS "|i8|f8",
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
    shape shapes[OPTION_LIST_MOST] = {{16, 1, 64, 8192, 0}};
    command_read(&command, argc, argv, &given);
    int count = command_shapes(command.name, &given.shapes, shapes);
    if (given.quick && !count) count = 1;
    if (!count && (given.batch > 1 || given.threads > 1)) {
        fprintf(stderr, "bench_decode: --batch and --threads have no effect without --shape\n");
        return 2;
    }
    nsa_dtype dtype =
        (nsa_dtype)(given.dtype > NSA_F16 ? NSA_I8 + given.dtype - NSA_F16 - 1 : given.dtype);
    report r = {command_json(command.name, given.json), 0};
    if (r.json) report_origin(r.json);
    if (r.json) fprintf(r.json, "  \"rows\": [");
    machine on = {0, 0};
    if (count) on = machine_of(dtype, (int)given.threads);
    for (int i = 0; i < count; i++)
        measure(&r, dtype, &shapes[i], (int)given.batch, (int)given.threads, on);
    if (!count) measure_all(&r, dtype);
    if (!r.json) return 0;
    fprintf(r.json, "\n  ]\n}\n");
    int failed = ferror(r.json) != 0;
    failed |= fclose(r.json) != 0;
    if (failed) fprintf(stderr, "bench_decode: cannot write %s: %s\n", given.json, strerror(errno));
    return failed;
}
