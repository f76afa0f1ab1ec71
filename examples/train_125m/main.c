/* main.c - train_125m: a model of any size, in one process or in several, from a YAML file to its
   checkpoints. All that it does is examples/trainer's, as in train_tiny. */
#include <stdio.h>
#include <string.h>

#include "dist/dist_mpi.h"
#include "dist/dist_nccl.h"
#ifdef NSA_HAVE_CUDA
#include "ops/cuda/ops_cuda.h"
#endif
#include "base/files.h"
#include "base/threads.h"
#include "train/train.h"

/* MPI, where its launcher has started the program, else NCCL, where torchrun's variables are set;
   NULL with an empty fault: one process. */
static dist_link *open_link(fault *f) {
    dist_link *link = NULL;
    f->text[0] = 0;
#ifdef NSA_HAVE_MPI
    link = dist_mpi_open();
#endif
#ifdef NSA_HAVE_NCCL
    if (!link) link = dist_nccl_open(f);
#endif
    return link;
}

static void say_nothing(void *user, const char *line) {
    (void)user;
    (void)line;
}

/* The back end that runtime.device names; auto: a GPU, where this program and the machine have
   one. */
static bool open_ops(ops *o, const config *c, const dist *d, fault *f) {
#ifdef NSA_HAVE_CUDA
    if (c->runtime.device != CONFIG_CPU) {
        if (ops_cuda_open(o, train_dtype(c), f)) return true;
        if (c->runtime.device == CONFIG_CUDA) return false;
        if (!d->rank) fprintf(stderr, "runtime.device: auto: %s\n", f->text);
    }
#endif
    (void)d;
    return train_open_cpu(o, c, f);
}

static void close_ops(ops *o) {
    if (!o->state) return;
#ifdef NSA_HAVE_CUDA
    if (!strcmp(o->name, "cuda")) {
        ops_cuda_close(o);
        return;
    }
#endif
    ops_cpu_close(o);
}

/* The settings, the same for all processes; one of them says what is wrong with them. */
static int settle(config *c, dist *d, ops *o, int argc, char **argv) {
    static const config_program program = {
        .name = "train_125m",
        .summary = "trains a language model with Native Sparse Attention.",
        .recall = train_recall,
    };
    listener notes = listener_stderr();
    fault f;
    if (d->rank) notes.say = say_nothing;
    option_outcome outcome = config_load(c, &program, argc, argv, &notes, &f);
    bool ok = outcome == OPTION_OK && dist_settle(d, c, &f) && open_ops(o, c, d, &f);
    if (ok && d->world == 1) config_say_alone(c, &notes);
    return train_worst(d, ok || outcome == OPTION_HELP ? 0 : 2, &f);
}

int main(int argc, char **argv) {
    files_claim_standard();
    threads_wait_asleep(argv);
    static config c;
    dist d;
    ops o = {.state = NULL};
    fault f;
    dist_link *link = open_link(&f);
    if (f.text[0] || !dist_open(&d, link, &f)) {
        fprintf(stderr, "%s\n", f.text);
        return 2;
    }
    int code = settle(&c, &d, &o, argc, argv);
    if (!code && c.check)
        code = d.rank ? 0 : train_check(&c, &o, &d);
    else if (!code && o.state)
        code = train_run(&c, &o, &d);
    close_ops(&o);
    dist_close(&d);
    return code;
}
