/* steps.c: the steps of decode.h as a shared library that peers_decode.py times, and what one reads
   and leaves, copied out as f32. No test of the library. */
#define _POSIX_C_SOURCE 200809L
#include "decode.h"

decoding *steps_make(int dtype, const char *text, int batch, int threads);
int steps_run(decoding *c, int m);
int steps_copy(const decoding *c, int m, float *q, float *k, float *v, float *out);
int steps_copy_index(const decoding *c, float *q, float *k, float *weights);
const int32_t *steps_list(const decoding *c, int m);
void steps_free(decoding *c);

decoding *steps_make(int dtype, const char *text, int batch, int threads) {
    shape s;
    if (!parse_shape(&s, text)) return NULL;
    decoding *c = (decoding *)allocate(sizeof *c);
    decoding_make(c, (nsa_dtype)dtype, &s, batch, threads);
    return c;
}

int steps_run(decoding *c, int m) {
    return (int)run_step(c, (method)m);
}

static int copy(const nsa_tensor *from, float *to, const nsa_desc *d, int tokens, int heads,
                int width) {
    nsa_tensor t = nsa_tensor_bthd(to, NSA_F32, tokens, heads, width);
    return !to || nsa_convert_rows(from, &t, d->batch, tokens, heads, width) == NSA_OK;
}

/* (batch, tokens, heads, width) of attention `m`; NULL where one is not asked for. */
int steps_copy(const decoding *c, int m, float *q, float *k, float *v, float *out) {
    const nsa_attend *x = &c->over[m];
    const nsa_desc *d = &c->desc[m];
    return copy(&x->q, q, d, 1, d->heads, d->dim) &&
           copy(&x->k, k, d, d->tokens, d->kv_heads, d->dim) &&
           copy(&x->v, v, d, d->tokens, d->kv_heads, d->dim_v) &&
           copy(&x->out, out, d, 1, d->heads, d->dim_v);
}

/* The same of the indexer. */
int steps_copy_index(const decoding *c, float *q, float *k, float *weights) {
    const nsa_score *x = &c->index;
    const nsa_desc *d = &c->desc[INDEX_STEP];
    return copy(&x->q, q, d, 1, INDEX_HEADS, INDEX_WIDTH) &&
           copy(&x->k, k, d, d->tokens, 1, INDEX_WIDTH) &&
           copy(&x->weights, weights, d, 1, INDEX_HEADS, 1);
}

/* The list that every kv head of every sequence has; the indexer's, one after the other. */
const int32_t *steps_list(const decoding *c, int m) {
    return (const int32_t *)(m == INDEX_STEP ? c->index.blocks : c->over[m].blocks).data;
}

void steps_free(decoding *c) {
    decoding_free(c);
    free(c);
}
