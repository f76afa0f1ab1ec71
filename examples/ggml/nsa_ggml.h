/* nsa_ggml.h - Native Sparse Attention as two custom operations in a graph of ggml's, forward, on
   the CPU backend. Its twin without ggml is nsa_attention_forward, whose bits it gives for any
   number of threads. Not here: a cache; keys, values and compressed rows are the host's tensors. */
#ifndef NSA_GGML_H
#define NSA_GGML_H

#include "ggml.h"
#include "nsa.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the operations of one layer need: the geometry, and memory for each of ggml's threads. It
   must live until the graph has been computed; layers that run one after another may share it. */
typedef struct nsa_ggml {
    nsa_desc desc; /* first, count: the queries of this graph; tokens = first + count */
    int tasks;     /* threads that take part; more of ggml's wait */
    int slice;     /* query rows that a task has memory for */
    char *memory;  /* tasks x task_bytes */
    size_t task_bytes;
    nsa_status *status; /* of each task, for a custom operation cannot fail */
} nsa_ggml;

/* `desc` has room for desc->tokens; `rows` is the most queries of one graph. NULL: `desc` is
   refused, or there is no memory. */
nsa_ggml *nsa_ggml_new(const nsa_desc *desc, int rows, int tasks);
void nsa_ggml_free(nsa_ggml *layer);

/* Before each graph: its queries are first .. first + count - 1. */
void nsa_ggml_rows(nsa_ggml *layer, int first, int count);

/* Behind each graph: NSA_OK, or the first error of a task; then all are forgotten. */
nsa_status nsa_ggml_status(nsa_ggml *layer);

/* Appends to `compressed`, f16 or f32 of (D, Hk, N(room)), the means of the blocks that the new
   tokens complete, from `cache` of (D, Hk, room), which must hold the new rows. Returns a view of
   `compressed`. */
struct ggml_tensor *nsa_ggml_compress(struct ggml_context *ctx, struct ggml_tensor *compressed,
                                      struct ggml_tensor *cache, nsa_ggml *layer);

/* (Dv, H, count) f32 from q of (Dk, H, count), k and v of (D, Hk, room), what nsa_ggml_compress
   returned for them, and gate logits of (3, H, count). q and the logits are f32; any strides but
   the first. */
struct ggml_tensor *nsa_ggml_attention(struct ggml_context *ctx, struct ggml_tensor *q,
                                       struct ggml_tensor *k, struct ggml_tensor *v,
                                       struct ggml_tensor *k_cmp, struct ggml_tensor *v_cmp,
                                       struct ggml_tensor *gates, nsa_ggml *layer);

#ifdef __cplusplus
}
#endif

#endif /* NSA_GGML_H */
