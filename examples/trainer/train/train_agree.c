/* train_agree.c - where the processes of a run must be at one: their settings, their parameters,
   how they end. Twin: train_inside.h. How they reach each other is dist.c's. */
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "train/train_inside.h"

/* What each process has of its own. */
static bool is_own(const char *key) {
    static const char *const own[] = {"runtime.rank", "runtime.local_rank", "runtime.threads",
                                      "config"};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        if (!strcmp(key, own[i])) return true;
    return false;
}

bool train_same_settings(const config *c, dist *d, fault *f) {
    uint64_t sums[CONFIG_ENTRIES_MAX] = {0};
    char value[CONFIG_PATH_BYTES];
    int rank, which, count = 0;
    for (; config_key((size_t)count); count++) {
        if (is_own(config_key((size_t)count))) continue;
        config_text(c, (size_t)count, value, sizeof value);
        sums[count] = XXH64(value, strlen(value), 0);
    }
    if (!dist_same(d, sums, count, &rank, &which, f)) return false;
    return rank < 0 || fault_set(f, "%s of rank %d is not that of the other processes",
                                 config_key((size_t)which), rank);
}

/* Which process differs, or -1. To start again would find the same: the launch is refused. */
static bool compare(trainer *t, const uint64_t *sums, int count, int *rank, int *which, fault *f) {
    int64_t none = 0;
    int unused;
    fault lost;
    if (!dist_same(t->dist, sums, count, rank, which, f)) return false;
    t->starved = *rank >= 0 && t->state.step < t->first_step;
    /* none ends the run before all have seen it: those would fail at another's end instead */
    if (*rank >= 0) (void)dist_largest(t->dist, &none, &unused, &lost);
    return true;
}

bool train_same_parameters(trainer *t, fault *f) {
    enum { CHUNK = 1 << 20 };
    const params *p = &t->model.params;
    const ops *o = t->o;
    uint64_t sum = 0;
    int rank, which;
    if (t->dist->world == 1) return true;
    o->mark(o, PHASE_COMM, -1);
    real *chunk = malloc(CHUNK * sizeof *chunk);
    if (!chunk) return fault_set(f, "out of memory for a comparison of parameters");
    for (int64_t first = 0; first < p->elements; first += CHUNK) {
        int64_t left = p->elements - first, count = left < CHUNK ? left : CHUNK;
        o->download(o, chunk, p->value + first, (size_t)count * sizeof *chunk);
        sum = XXH64(chunk, (size_t)count * sizeof *chunk, sum);
    }
    free(chunk);
    if (!compare(t, &sum, 1, &rank, &which, f)) return false;
    return rank < 0 ||
           fault_set(f,
                     "rank %d disagrees: after step %lld its parameters are not those of the other "
                     "processes",
                     rank, (long long)t->state.step);
}

bool train_same_start(trainer *t, fault *f) {
    const config *c = t->config;
    uint64_t sums[] = {(uint64_t)t->state.step, tokenizer_sum(t->tokenizer),
                       data_fingerprint(t->data)};
    int rank, which;
    if (t->dist->world == 1) return true;
    if (!compare(t, sums, 3, &rank, &which, f)) return false;
    if (rank < 0) return true;
    if (which == 0)
        return fault_set(f,
                         "train.out_dir = %.300s: what rank %d goes on from there is not after the "
                         "step of the other processes: it must be one folder for all",
                         c->train.out_dir, rank);
    return fault_set(f,
                     "%s = %.300s: what rank %d reads there is not what the other processes "
                     "read: %s differ",
                     which == 1 ? "data.tokenizer_path" : "data.path",
                     which == 1 ? c->data.tokenizer_path : c->data.path, rank,
                     which == 1 ? "vocabularies" : "names, sizes or contents");
}

void train_complain(const dist *d, const char *why) {
    if (d->world > 1)
        fprintf(stderr, "rank %d: %s\n", d->rank, why);
    else
        fprintf(stderr, "%s\n", why);
}

int train_worst(dist *d, int code, const fault *f) {
    int64_t worst = code;
    int rank;
    fault lost;
    if (!dist_largest(d, &worst, &rank, &lost)) {
        train_complain(d, code ? f->text : lost.text);
        dist_end(d, lost.text, 1);
    }
    if (worst && rank == d->rank) train_complain(d, f->text);
    return (int)worst;
}
