/* attention.h - the kinds of attention that a layer may have. Twins: model.attention of the
   settings, which names them by layer (config.h); model_layer.c, which computes them. */
#ifndef ATTENTION_H
#define ATTENTION_H

#include <stdbool.h>

enum { LAYERS_MOST = 1024 };

/* In the order of their names in config_table.c. */
typedef enum attention_kind {
    ATTENTION_NSA,     /* cmp, slc and win */
    ATTENTION_FULL,    /* dense and causal */
    ATTENTION_WINDOW,  /* dense over the last w tokens */
    ATTENTION_CMP_SLC, /* nsa without its window: what is near is another layer's to read */
    ATTENTION_KINDS
} attention_kind;

/* Whether it compresses, selects and has gates. */
static inline bool attention_is_sparse(attention_kind kind) {
    return kind == ATTENTION_NSA || kind == ATTENTION_CMP_SLC;
}

/* Pairs of keys and values: one for each branch. */
static inline int attention_pairs(attention_kind kind) {
    return kind == ATTENTION_NSA ? 3 : kind == ATTENTION_CMP_SLC ? 2 : 1;
}

#endif
