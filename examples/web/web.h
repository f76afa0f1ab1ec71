/* web.h - what the page asks of the model: read a text with given n, w and l', then say what one
   query and head read. Twins: web.c; nsa.js, which calls it in WebAssembly; numbers.c, which calls
   it natively, so that a test can compare the two. One model at a time; arrays that a call returns
   hold until the next call. */
#ifndef WEB_H
#define WEB_H

#include <stdint.h>

#ifdef __wasm__
#define WEB_CALL(name) __attribute__((export_name(#name)))
#else
#define WEB_CALL(name)
#endif

/* Why the last call failed. */
WEB_CALL(web_fault) const char *web_fault(void);

/* Memory for the page to write to. */
WEB_CALL(web_allocate) void *web_allocate(int bytes);
WEB_CALL(web_release) void web_release(void *memory);

/* Takes a model as pack.py writes it; 0: web_fault says what is wrong with it. */
WEB_CALL(web_open) int web_open(const uint8_t *file, int bytes);

/* What web_size tells of the model and the text. */
enum {
    WEB_LAYERS,
    WEB_HEADS,
    WEB_KV_HEADS,
    WEB_CMP_BLOCK,
    WEB_CMP_STRIDE,
    WEB_SLC_BLOCK, /* these three as web_open found them: what the model was trained with */
    WEB_SLC_COUNT,
    WEB_WINDOW,
    WEB_SLC_INIT,
    WEB_SLC_LOCAL,
    WEB_SLC_COUNT_MOST, /* the largest n that web_read takes */
    WEB_CONTEXT,        /* the longest text, in bytes */
    WEB_PARAMETERS,
    WEB_STEPS, /* of its training */
    WEB_VOCAB,
    WEB_DIM_K,
    WEB_SIZES
};
WEB_CALL(web_size) int web_size(int which);

/* Reads a text whole, with n, w and l' of the caller's choice and an instruction set of nsa.h.
   Dense attention over q and the keys of slc runs beside it, for its time alone. */
WEB_CALL(web_read)
int web_read(const uint8_t *text, int bytes, int slc_count, int window, int slc_block, int isa);

/* Of the text that was read: milliseconds that attention took in all layers, and bits per byte. */
WEB_CALL(web_nsa_ms) double web_nsa_ms(void);
WEB_CALL(web_dense_ms) double web_dense_ms(void);
WEB_CALL(web_bits) double web_bits(void);

/* Keys that a query and kv head reads: cmp, slc, win. */
WEB_CALL(web_reads) const int32_t *web_reads(int layer, int kv_head, int token);
/* Its block list; -1 behind the last of slc_count places. */
WEB_CALL(web_blocks) const int32_t *web_blocks(int layer, int kv_head, int token);

/* What web_look gives, as one array of doubles: how many each part has, by `which`. */
enum { WEB_GATES, WEB_SCORES, WEB_MASS, WEB_P_CMP, WEB_P_SLC, WEB_P_WIN, WEB_PARTS };
WEB_CALL(web_part) int web_part(int which);
/* Of a query head and token: the gates of its kv head; the score of each block, and the share that
   dense attention over the keys of slc gives it (measure.h); and what softmax of this head gives to
   each compressed block, and to each token in slc and in win; 0 where it does not read. */
WEB_CALL(web_look) const double *web_look(int layer, int head, int token);

/* The model's probabilities of the byte after `token`. */
WEB_CALL(web_next) const float *web_next(int token);

/* Milliseconds of one layer's attention, dense or sparse, over random rows of a geometry of the
   caller's choice; below 0: it failed. No model need be open. web_race_keys: the mean number of
   keys that a query read. */
WEB_CALL(web_race)
double web_race(int tokens, int heads, int kv_heads, int dim, int cmp_block, int cmp_stride,
                int slc_count, int window, int slc_block, int dense, int isa);
WEB_CALL(web_race_keys) double web_race_keys(void);

#endif
