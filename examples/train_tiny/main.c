/* main.c - train_tiny: a small model on the CPU, from a YAML file to a sample of what it learnt.
   All that it does is examples/trainer's; train_125m is the same over more back ends and
   processes. */
#include <stdio.h>

#include "base/files.h"
#include "base/threads.h"
#include "train/train.h"

int main(int argc, char **argv) {
    files_claim_standard();
    threads_wait_asleep(argv);
    static const char *const no_effect[] = {"runtime.ddp",
                                            "runtime.context_parallel",
                                            "runtime.ddp_bucket_mb",
                                            "runtime.ddp_compress",
                                            "runtime.ddp_check_every",
                                            "runtime.ddp_timeout",
                                            "runtime.world_size",
                                            "runtime.rank",
                                            "runtime.local_rank",
                                            "runtime.master_addr",
                                            "runtime.master_port",
                                            "telemetry.trace_ddp_buckets",
                                            NULL};
    static const config_program program = {
        .name = "train_tiny",
        .summary = "trains a small language model with Native Sparse Attention on the CPU.",
        .no_effect = no_effect,
        .recall = train_recall,
    };
    static config c;
    listener notes = listener_stderr();
    ops o;
    dist d = dist_alone();
    fault f;
    option_outcome outcome = config_load(&c, &program, argc, argv, &notes, &f);
    if (outcome == OPTION_HELP) return 0;
    if (outcome == OPTION_ERROR || !train_open_cpu(&o, &c, &f)) {
        fprintf(stderr, "%s\n", f.text);
        return 2;
    }
    int code = c.check ? train_check(&c, &o, &d) : train_run(&c, &o, &d);
    ops_cpu_close(&o);
    return code;
}
