/* config_other.c - names that are not this program's own: settings and variables of nsa-vibe, the
   training system in Python whose model and configs the trainers share. Twin: config_table.h. What
   chose its fast paths has no effect here; what changes a result is refused by what replaces it. */
#include "config/config_table.h"

#include <string.h>

typedef struct other_name {
    const char *name;    /* "runtime.fa2_*": any ending */
    const char *instead; /* NULL: accepted, without effect */
} other_name;

static const other_name keys[] = {
    {"runtime.fa2_*", NULL},
    {"runtime.use_fa2*", NULL},
    {"runtime.sel_triton_*", NULL},
    {"runtime.use_triton_*", NULL},
    {"runtime.sel_cuda*", NULL},
    {"runtime.compile_*", NULL},
    {"runtime.triton_*", NULL},
    {"runtime.use_sel_*", NULL},
    {"runtime.sdpa_*", NULL},
    {"runtime.use_cmp_*", NULL},
    {"runtime.use_win_*", NULL},
    {"runtime.prefill_*", NULL},
    {"train.max_grad_norm", "train.grad_clip"},
};

/* Longer beginnings first. */
static const other_name variables[] = {
    {"NSA_FORCE_BRANCH", "--attention window, or full; no other branch is trained alone"},
    {"NSA_FORCE_UNIFORM_GATE", "nothing: gates are trained"},
    {"NSA_STOPGRAD_GATES", "nothing: gates are trained"},
    {"NSA_ROPE_SCALE", "--rope-scaling linear --rope-factor X"},
    {"NSA_GC_RANGE", "--gc=FIRST..LAST, the last included"},
    {"NSA_DDP_SAFE_GC_LAYERS", "--gc=FIRST..LAST, the last included"},
    {"NSA_DDP_DISABLE_GC", "--no-gc"},
    {"NSA_DTYPE", "--precision"},
    {"NSA_OPT_FUSED", NULL},
    {"NSA_PG_TIMEOUT_MIN", "--ddp-timeout SECONDS"},
    {"NSA_FWE_WARMUP_TIMEOUT", "--loader-timeout SECONDS"},
    {"NSA_WATCH_HEARTBEAT_STALL_S", "--stall-timeout SECONDS"},
    {"NSA_TRAIN_STEPS", "--steps"},
    {"NSA_TRAIN_WARMUP", "--warmup-steps"},
    {"NSA_TRAIN_SEED", "--seed"},
    {"NSA_TRAIN_MAX_LEN", "--seq-len"},
    {"NSA_TRAIN_LR", "--lr"},
    {"NSA_TRAIN_CLIP", "--grad-clip"},
    {"NSA_TRAIN_BS", "--batch-size"},
    {"NSA_PREFILL_*", NULL},
    {"NSA_DDP_STATIC_GRAPH", NULL},
    {"NSA_DDP_FIND_UNUSED", NULL},
    {"NSA_DDP_GRAD_AS_BUCKET_VIEW", NULL},
    {"NSA_DDP_BROADCAST_BUFFERS", NULL},
    {"NSA_DDP_SAFE_MODE", NULL},
    {"NSA_USE_*", NULL},
    {"NSA_FA2_*", NULL},
    {"NSA_ALLOW_SLIDING_FA2", NULL},
    {"NSA_SDPA_*", NULL},
    {"NSA_SEL_*", NULL},
    {"NSA_TRITON_*", NULL},
    {"NSA_VARLEN_*", NULL},
    {"NSA_FORCE_SEL_MASK", NULL},
    {"NSA_WIN_FORCE_DENSE", NULL},
    {"NSA_P_CMP_MIXED", NULL},
    {"NSA_TRAIN_SAFE_PACK", NULL},
    {"NSA_GC_REENTRANT", NULL},
    {"NSA_FSDP_*", NULL},
    {"NSA_LOG_GRAD_NORM", NULL},
    {"NSA_STRICT_ASSERTS", NULL},
    {"NSA_DEBUG_*", NULL},
    {"NSA_NVTX", NULL},
    {"NSA_FWE_DOC_BATCH", NULL},
    {"NSA_FWE_PREFETCH", NULL},
    {"NSA_FWE_Q", NULL},
    {"NSA_FWE_WARMUP_BATCHES", NULL},
};

static bool matches(const char *pattern, const char *name) {
    size_t length = strlen(pattern);
    if (length && pattern[length - 1] == '*') return !strncmp(pattern, name, length - 1);
    return !strcmp(pattern, name);
}

static bool look_up(const other_name *list, size_t count, const char *name, const char **instead) {
    for (size_t i = 0; i < count; i++) {
        if (!matches(list[i].name, name)) continue;
        *instead = list[i].instead;
        return true;
    }
    return false;
}

bool config_other_key(const char *key, const char **instead) {
    return look_up(keys, sizeof keys / sizeof *keys, key, instead);
}

bool config_other_variable(const char *name, const char **instead) {
    return look_up(variables, sizeof variables / sizeof *variables, name, instead);
}
