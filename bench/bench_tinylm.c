/* bench_tinylm.c - time and memory of TinyLM's forward and backward: over layers, and for the
   models whose speed is tracked. bench_tinylm [--threads N] [--json FILE] prints two tables,
   medians of a few passes; scripts/write_numbers.py makes tables of the file. Twin: model.c. The
   attention alone is not measured here: that is bench_attention. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/option.h"
#include "base/rng.h"
#include "base/threads.h"
#include "model/model.h"
#include "origin.h"

enum { PASSES = 5 };

typedef struct shape {
    const char *name;
    model_config config;
    int batch, tokens;
    checkpointing how;
    int first, end; /* layers that are computed again; 0, 0: all */
} shape;

typedef struct figures {
    double milliseconds, mebibytes;
} figures;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void fail(const char *what) {
    fprintf(stderr, "bench_tinylm: %s\n", what);
    exit(1);
}

static figures measure(const shape *s, const ops *o) {
    fault f;
    model m;
    model_options options = {.batch = s->batch,
                             .tokens = s->tokens,
                             .training = true,
                             .checkpointing = s->how,
                             .first = s->first,
                             .end = s->end};
    size_t count = (size_t)s->batch * (size_t)s->tokens;
    int32_t *ids = malloc(2 * count * sizeof *ids);
    double times[PASSES];
    if (!ids) fail("out of memory");
    for (size_t i = 0; i < 2 * count; i++)
        ids[i] = (int32_t)rng_below(1, RNG_SYNTHETIC, i, (uint64_t)s->config.vocab);
    if (!model_open(&m, &s->config, &options, o, 1, &f)) fail(f.text);
    model_batch b = {
        .tokens = ids, .labels = ids + count, .batch = s->batch, .tokens_each = s->tokens};
    if (!model_train(&m, &b, 1, &f)) fail(f.text); /* touches all memory once */
    for (int i = 0; i < PASSES; i++) {
        double begin = now_ms();
        if (!model_train(&m, &b, 1, &f)) fail(f.text);
        times[i] = now_ms() - begin;
    }
    qsort(times, PASSES, sizeof *times, by_size);
    figures result = {times[PASSES / 2], (double)m.arena.used / (1 << 20)};
    model_close(&m);
    free(ids);
    return result;
}

/* The tables go to the terminal and, as rows of one array, to a file. */
typedef struct report {
    FILE *json;
    int rows, threads;
} report;

static void report_row(report *r, const char *name, const shape *s, figures x) {
    double per_second = s->batch * s->tokens / x.milliseconds * 1e3;
    printf("%-34s %6d %10.2f %10.1f %10.2f %10.0f\n", name, s->config.n_layers, x.milliseconds,
           x.mebibytes, x.milliseconds / s->config.n_layers, per_second);
    fflush(stdout);
    if (!r->json) return;
    fprintf(r->json, "%s\n    {\"model\": \"%s\", \"layers\": %d, \"tokens\": %d, ",
            r->rows++ ? "," : "", name, s->config.n_layers, s->tokens);
    fprintf(r->json, "\"batch\": %d, \"threads\": %d, \"ms\": %.4g, \"MiB\": %.4g, ", s->batch,
            r->threads, x.milliseconds, x.mebibytes);
    fprintf(r->json, "\"ms_per_layer\": %.4g, \"tokens_per_second\": %.4g}",
            x.milliseconds / s->config.n_layers, per_second);
}

static void over_layers(report *r, const ops *o) {
    static const int tokens[] = {128, 512, 1024, 2048};
    for (size_t t = 0; t < sizeof tokens / sizeof *tokens; t++)
        for (int layers = 1; layers <= 12; layers++) {
            char name[32];
            shape s = {.config = tinylm(256, 128, layers, 8, 2, 16, 16, 16, 8, 32, 8, 64),
                       .batch = 1,
                       .tokens = tokens[t]};
            snprintf(name, sizeof name, "dim 128, S %d, B 1", tokens[t]);
            report_row(r, name, &s, measure(&s, o));
        }
}

static void tracked(report *r, const ops *o) {
    model_config tiny = tinylm(256, 128, 2, 8, 2, 16, 16, 16, 8, 32, 8, 64);
    model_config large = tinylm(256, 768, 12, 12, 2, 64, 64, 32, 16, 64, 16, 512);
    const shape shapes[] = {
        {"dim 128, S 256, B 8", tiny, 8, 256, CHECKPOINT_NONE, 0, 0},
        {"dim 768, S 2048, B 1", large, 1, 2048, CHECKPOINT_NONE, 0, 0},
        {"the same with checkpointing", large, 1, 2048, CHECKPOINT_LAYERS, 0, 0},
        {"the same, of layers 0 to 5", large, 1, 2048, CHECKPOINT_LAYERS, 0, 6},
        {"the same, selective", large, 1, 2048, CHECKPOINT_SELECTIVE, 0, 0},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        report_row(r, shapes[i].name, &shapes[i], measure(&shapes[i], o));
}

static void report_open(report *r, const char *path, const ops *o) {
    if (path && !(r->json = fopen(path, "w"))) fail(strerror(errno));
    if (r->json) {
        origin here = origin_here();
        fprintf(r->json, "{\n  \"machine\": \"%s, %d threads, %s\",\n  \"date\": \"%s\",\n",
                here.machine, o->threads, o->library, here.date);
        fprintf(r->json, "  \"commit\": \"%s\",\n  \"rows\": [", here.commit);
    }
    printf("forward + backward, %d threads, %s\n", o->threads, o->library);
    printf("%-34s %6s %10s %10s %10s %10s\n", "model", "layers", "ms", "MiB", "ms / layer",
           "tokens/s");
}

static void report_close(report *r) {
    if (!r->json) return;
    fprintf(r->json, "\n  ]\n}\n");
    if (fclose(r->json)) fail(strerror(errno));
}

typedef struct options {
    int64_t threads; /* 0: all */
    const char *json;
} options;

int main(int argc, char **argv) {
    static const option own[] = {
        {.flag = "--threads",
         .kind = OPTION_INTEGER,
         .offset = offsetof(options, threads),
         .max = 1024,
         .initial = "0",
         .help = "CPU threads; 0: all that the process may use"},
        {.flag = "--json",
         .kind = OPTION_TEXT,
         .offset = offsetof(options, json),
         .words = "FILE",
         .help = "where the figures go, beside the table"},
    };
    static const option_command command = {
        .name = "bench_tinylm",
        .summary = "what a step of the trainers' models takes, phase by phase.",
        .words = "",
        .rows = own,
        .count = 2,
    };
    fault f;
    ops o;
    report r = {NULL, 0, 0};
    options given = {0};
    threads_wait_asleep(argv);
    option_outcome outcome = option_read(&command, argc, argv, &given, NULL, &f);
    if (outcome == OPTION_ERROR) fprintf(stderr, "bench_tinylm: %s\n", f.text);
    if (outcome != OPTION_OK) return outcome == OPTION_ERROR ? 2 : 0;
    if (!ops_cpu_open(&o, (int)given.threads, &f)) fail(f.text);
    r.threads = o.threads;
    report_open(&r, given.json, &o);
    over_layers(&r, &o);
    tracked(&r, &o);
    report_close(&r);
    ops_cpu_close(&o);
    return 0;
}
