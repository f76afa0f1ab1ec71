/* bench_tinylm.c - time and memory of TinyLM's forward and backward: over layers, and for the models
   whose speed is tracked. Prints two tables; medians of a few passes. Twin: model.c. The attention
   alone is not measured here. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "model.h"
#include "rng.h"
#include "threads.h"

enum { PASSES = 5 };

typedef struct shape {
    const char *name;
    model_config config;
    int batch, tokens;
    bool checkpointing;
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
    model_options options = {s->batch, s->tokens, true, s->checkpointing};
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

static void over_layers(const ops *o) {
    printf("TinyLM(256,128,L,8,2,16,16,16,8,32,8,64), one row of 128 tokens, forward + backward\n");
    printf("%6s %10s %10s %14s\n", "layers", "ms", "MiB", "ms / layer");
    for (int layers = 1; layers <= 12; layers++) {
        shape s = {"", tinylm(256, 128, layers, 8, 2, 16, 16, 16, 8, 32, 8, 64), 1, 128, false};
        figures x = measure(&s, o);
        printf("%6d %10.2f %10.1f %14.2f\n", layers, x.milliseconds, x.mebibytes,
               x.milliseconds / layers);
    }
}

static void tracked(const ops *o) {
    model_config tiny = tinylm(256, 128, 2, 8, 2, 16, 16, 16, 8, 32, 8, 64);
    model_config large = tinylm(256, 768, 12, 12, 2, 64, 64, 32, 16, 64, 16, 512);
    const shape shapes[] = {{"dim 128, 2 layers, S 256, B 8", tiny, 8, 256, false},
                            {"dim 768, 12 layers, S 2048, B 1", large, 1, 2048, false},
                            {"the same with checkpointing", large, 1, 2048, true}};
    printf("\n%-34s %10s %10s %10s\n", "forward + backward", "ms", "MiB", "tokens/s");
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        figures x = measure(&shapes[i], o);
        printf("%-34s %10.1f %10.1f %10.0f\n", shapes[i].name, x.milliseconds, x.mebibytes,
               shapes[i].batch * shapes[i].tokens / x.milliseconds * 1e3);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    fault f;
    ops o;
    threads_wait_asleep(argv);
    if (argc > 2 || (argc == 2 && atoi(argv[1]) < 1)) {
        fprintf(stderr, "usage: bench_tinylm [threads]\n");
        return 2;
    }
    if (!ops_cpu_open(&o, argc == 2 ? atoi(argv[1]) : 0, &f)) fail(f.text);
    printf("%d threads, %s\n", o.threads, o.library);
    over_layers(&o);
    tracked(&o);
    ops_cpu_close(&o);
    return 0;
}
