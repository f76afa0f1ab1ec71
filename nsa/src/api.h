/* nsa.h - Native Sparse Attention (arXiv 2502.11089) in one C header: forward and backward, on the
   CPU. Its twin for GPUs is nsa_cuda.cuh.

   Do this in one file of your program:

       #define NSA_IMPLEMENTATION
       #include "nsa.h"

   and only `#include "nsa.h"` everywhere else. Link with -lm; compile with -fopenmp to use threads.

   A complete program (examples/embed/window.c; embed.c beside it is the whole chain):

       #define NSA_IMPLEMENTATION
       #include "nsa.h"
       #include <stdio.h>
       #include <stdlib.h>

       int main(void) {
           enum { T = 256, H = 4, D = 32 };
           static float q[T * H * D], k[T * D], v[T * D], out[T * H * D], lse[T * H];
           for (int i = 0; i < T * H * D; i++) q[i] = (float)(i * 37 % 101) / 101;
           for (int i = 0; i < T * D; i++) k[i] = v[i] = (float)(i * 53 % 97) / 97;

           nsa_desc d = nsa_desc_default(1, T, H, 1, D);
           d.window = 64;
           nsa_attend x = {0};
           x.q = nsa_tensor_bthd(q, NSA_F32, T, H, D);
           x.k = nsa_tensor_bthd(k, NSA_F32, T, 1, D);
           x.v = nsa_tensor_bthd(v, NSA_F32, T, 1, D);
           x.out = nsa_tensor_bthd(out, NSA_F32, T, H, D);
           x.lse = nsa_tensor_bthd(lse, NSA_F32, T, H, 1);

           size_t bytes = nsa_attend_win_forward_workspace_size(&d);
           void *workspace = malloc(bytes);
           nsa_status s = nsa_attend_win_forward(&x, &d, workspace, bytes);
           printf("%s: %.4f\n", nsa_status_name(s), (double)out[(255 * H + 3) * D]);
           free(workspace);
           return s != NSA_OK;
       }

   It prints "NSA_OK: 0.5034".

   THE ALGORITHM ON ONE PAGE

   B sequences of T tokens; H query heads share Hk key-value heads, G = H / Hk to a group. A query t
   reads keys through three branches, each a softmax attention over few keys, and a gate adds the
   three up:

     compress  k_cmp[i] = phi(k[i d .. i d + l)), v_cmp likewise       Eq. 7   nsa_compress_forward
     cmp       attention over the compressed blocks before t                 nsa_attend_cmp_forward
     select    p_cmp = softmax(q k_cmp)                                Eq. 8
               p_slc[j] = sum of p_cmp[i], weighted by how far
               block i overlaps block j, over the heads of a group     Eq. 9, 10
               the n best blocks j of l' tokens                        Eq. 11      nsa_select_blocks
     slc       attention over the tokens of those blocks               Eq. 12 nsa_attend_slc_forward
     win       attention over the last w tokens                              nsa_attend_win_forward
     gate      out = g_cmp out_cmp + g_slc out_slc + g_win out_win     Eq. 5       nsa_gate_forward

   nsa_attention_forward runs all of it. nsa_rope_forward rotates q and k before anything else sees
   them. Each function but select has a backward of the same shape beside it.

   CONVENTIONS

   - Tensors are views: pointer, dtype, and element strides for batch, token and head; the innermost
     dimension is packed (that of gates may have gate_stride). (B,T,H,D), (B,H,T,D) and slices of a
     fused qkv projection need no copy.
     In comments a shape is written (B, T, H, D) whatever the strides.
   - Query rows first .. first + count - 1 of `tokens` keys may be computed alone. Every view on the
     query's side (q, out, lse, blocks, gate logits, and their gradients) then starts at row
     `first`: its row 0 is query `first`. Fewer queries than keys are not the last ones unless
     `first` says so, tokens - count: other libraries align both ends.
   - Variable length: `begins` holds B + 1 offsets into packed rows; sequence b is rows begins[b] ..
     begins[b + 1] - 1, `tokens` the longest length; batch strides are not used. first and count
     then speak of every sequence alike (rows that a sequence does not have are skipped). Compressed
     rows are packed in the same order from row 0, nsa_cmp_count(desc, length) for each sequence. A
     sequence's results equal those of it alone, bit for bit.
   - Ragged batch: with `firsts` and `counts` sequence b has the queries firsts[b] .. firsts[b] +
     counts[b] - 1, some a prompt's chunk, some one token, and keys up to the last of them (with
     `begins` those that it says). Rows on the query's side are packed, counts[b] of sequence b
     behind those of b - 1; batch strides are not used there. `first` is not used, and `count` is
     at least the largest of counts. Compression then makes the rows that the new tokens complete,
     nsa_cmp_count(firsts[b]) .. nsa_cmp_count(keys) - 1, behind those of earlier calls.
   - Pages: with `pages` token s of sequence b lies in row s % page_tokens of the page that entry
     s / page_tokens of its table names. Views of k and v (slc, win, dense, and what phi reads) are
     then (page_count, page_tokens, Hk, D): batch strides over pages. Compressed rows lie in the
     same pages, each where the last token of its block does: (page_count, page_tokens / d, Hk, D),
     block i in row (i d + l - 1) % page_tokens / d. So sequences with one prefix share its pages.
     A serving engine's own cache is attended where it is, to the bits of straight rows.
   - Forward overwrites its outputs. Backward ADDS to its gradients: zero them first, or let
     branches share one. A gradient struct has the type of its primitive: dx.q is the gradient of
     x.q; dx.out is the incoming gradient of x.out. A gradient whose data is NULL is not computed. A
     gradient may be of the real dtype whatever its tensor's is.
   - Positions are 0-based and causal: query t reads nothing after token t. A query without keys
     gives out = 0, lse = -inf, gradients 0.
   - A non-finite value in a row of q, k, v or dout is no error. Every query that reads the row gets
     NaN, and no other; this holds under -ffast-math too.
   - The same bits from run to run and for any number of threads; a query's bits depend on its own
     keys alone.
   - The library allocates nothing, prints nothing, never aborts and keeps no global state.
     Workspace is the caller's, of any alignment, sized by the *_workspace_size function of the
     call; its content means nothing between calls. A workspace size of 0 is returned for a
     descriptor that the call refuses, and where none is needed. A call takes up to 28 KB of stack,
     with NSA_REAL double 42, and each of OpenMP's threads as much, whatever the widths.
   - Arguments are checked once, before anything is written: a call that does not return NSA_OK has
     touched nothing.
   - An output shares no memory with an input or another output (RoPE's may be its input; gradients
     may be added to one view). This is not checked.

   What it does not do: dropout, attention biases, cross attention of packed sequences, double
   backward, key-value caches of several layers.

   CONFIGURATION (define before the include, the same in every file)

     NSA_IMPLEMENTATION  the implementation too, in one file
     NSA_STATIC          every function is static: a private copy in each file that includes the
                         implementation
     NSA_REAL            float (default) or double: what is accumulated in. double also makes lse
                         f64 and admits f64 tensors: the same source becomes its own f64 oracle. Do
                         not mix the two in one program without NSA_STATIC.
     NSA_UNALIGNED_SPILLS  GCC for Windows: AVX too. For a compiler or an assembler that spills by
                         unaligned moves, as with -Wa,-muse-unaligned-vector-move
*/
#ifndef NSA_H
#define NSA_H

#include <stddef.h>
#include <stdint.h>

#define NSA_VERSION_MAJOR 0
#define NSA_VERSION_MINOR 1
#define NSA_VERSION_PATCH 0

#ifndef NSA_REAL
#define NSA_REAL float
#endif

#ifdef NSA_STATIC
#if defined(__GNUC__) || defined(__clang__)
#define NSA_API static __attribute__((__unused__))
#else
#define NSA_API static
#endif
#else
#define NSA_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Types --------------------------------------------------------------------------------- */

/* What sums are accumulated in, and what lse holds. */
typedef NSA_REAL nsa_real;

typedef enum nsa_dtype {
    NSA_F32 = 0,
    NSA_BF16, /* the upper half of an f32 */
    NSA_F16,  /* IEEE 754 binary16 */
    NSA_F64,  /* only where NSA_REAL is double */
    NSA_I32,  /* block lists and positions */
    NSA_I8,   /* rows of 8 bits with their scales: keys and values, forward, on the CPU */
    NSA_F8    /* the same of OCP's fp8 e4m3, which has NaN and no infinities */
} nsa_dtype;

#define NSA_REAL_DTYPE (sizeof(nsa_real) == sizeof(double) ? NSA_F64 : NSA_F32)

/* A view of rows. Row (b, t, h) starts batch * b + token * t + head * h elements after data.
   Strides are >= 0; those of an output must keep its rows apart. data is aligned to its element's
   size. A row of 8 bits is bytes, and behind them an f32, of any alignment, for every 128 of them:
   column c reads as its number times scale c / 128. Strides count both, as in nsa_tensor_bthd. */
typedef struct nsa_tensor {
    void *data;
    nsa_dtype dtype;
    int64_t batch, token, head;
} nsa_tensor;

/* Views of whole contiguous arrays: (B, tokens, heads, width) and (B, heads, tokens, width). */
NSA_API nsa_tensor nsa_tensor_bthd(void *data, nsa_dtype dtype, int tokens, int heads, int width);
NSA_API nsa_tensor nsa_tensor_bhtd(void *data, nsa_dtype dtype, int tokens, int heads, int width);

/* What a call returns: 0, or a kind of error and the field that it is about. Compare
   nsa_status_kind(s) with the constants below; show a person nsa_status_where(s) and
   nsa_status_text(s). */
typedef int nsa_status;

enum {
    NSA_OK = 0,
    NSA_ERROR_NULL,       /* a pointer that is needed is null */
    NSA_ERROR_ALIGNMENT,  /* data is not aligned to its element's size */
    NSA_ERROR_DTYPE,      /* a dtype that is not allowed for this field */
    NSA_ERROR_STRIDE,     /* a negative stride, or an output whose rows overlap */
    NSA_ERROR_OVERFLOW,   /* sizes whose product passes the address space */
    NSA_ERROR_SIZE,       /* a size outside its range */
    NSA_ERROR_HEADS,      /* heads is not a multiple of kv_heads, or gate_heads is neither */
    NSA_ERROR_CMP_STRIDE, /* cmp_stride does not divide cmp_block */
    NSA_ERROR_SLC_BLOCK,  /* cmp_stride does not divide slc_block, or slc_block < cmp_block */
    NSA_ERROR_SLC_COUNT, /* slc_init + slc_local > slc_count, with forced blocks inside the count */
    NSA_ERROR_SLC_LOCAL, /* slc_local < 1, with forced blocks inside the count */
    NSA_ERROR_RANGE,     /* first < 0, count < 0 or first + count > tokens */
    NSA_ERROR_BEGINS,    /* begins descends, starts below 0, passes rows, or tokens in a sequence */
    NSA_ERROR_OPTION,    /* an option that is no value of its enum */
    NSA_ERROR_SCALE,     /* scale is not finite, or beyond 1e38 */
    NSA_ERROR_ISA,       /* this machine, or this build, has no such instruction set */
    NSA_ERROR_BLOCKS,    /* a block list that nsa_check_blocks refuses */
    NSA_ERROR_WORKSPACE, /* the workspace is null or smaller than its size query said */
    NSA_ERROR_CUDA,      /* the CUDA runtime refused a launch (nsa_cuda_ functions only) */
    NSA_ERROR_CACHE,     /* a cache without room for the new tokens, or of another geometry */
    NSA_ERROR_REWIND,    /* a length that the cache no longer, or not yet, holds */
    NSA_ERROR_SHARED,    /* a gradient of lse is forward's lse itself */
    NSA_ERROR_PAGES      /* a table of pages that nsa_check_pages refuses */
};

NSA_API int nsa_status_kind(nsa_status s);
/* "NSA_ERROR_DTYPE"; what is wrong and what is allowed, one sentence; the field: "q", "dx.k",
   "cmp_stride", or "" where there is none. */
NSA_API const char *nsa_status_name(nsa_status s);
NSA_API const char *nsa_status_text(nsa_status s);
NSA_API const char *nsa_status_where(nsa_status s);

/* Instruction sets of the tile kernels. */
typedef enum nsa_isa {
    NSA_ISA_DETECT = 0, /* the widest that this machine has */
    NSA_ISA_PLAIN,      /* portable C loops */
    NSA_ISA_SSE2,
    NSA_ISA_AVX2, /* with FMA */
    NSA_ISA_AVX512,
    NSA_ISA_NEON,
    NSA_ISA_SIMD128,     /* WebAssembly's */
    NSA_ISA_AVX512_BF16, /* AVX-512 that multiplies pairs of bf16: see nsa_products */
    NSA_ISA_NEON_BF16    /* NEON that does */
} nsa_isa;

NSA_API int nsa_isa_available(nsa_isa isa);
NSA_API const char *nsa_isa_name(nsa_isa isa);

/* How attention and selection multiply rows of bf16. A product takes pairs of bf16 if the caller's
   rows in it are bf16 (q k^T: q and k; p v: v alone; dout v^T: dx.out and v) and `isa` has such
   products. Sums stay f32; p and ds are the library's own, and rounded to bf16 once there, as on
   CUDA. All other rows are widened to f32, and so are those of phi and of the scores of given
   lists. In backward dx.out must be bf16 too. */
typedef enum nsa_products {
    NSA_PRODUCTS_BF16 = 0, /* as bf16, where the instruction set has it */
    NSA_PRODUCTS_F32       /* as f32 everywhere */
} nsa_products;

/* How forced blocks count. docs/algorithm.md says which public implementation has which option. */
typedef enum nsa_forced {
    NSA_FORCED_INSIDE = 0, /* slc_count includes the forced blocks (the paper) */
    NSA_FORCED_ON_TOP, /* slc_count blocks by score, the forced ones besides; slc_local may be 0 */
    NSA_FORCED_TAIL    /* as on top, but only of blocks that lie wholly at or before t; slc_local
                          is 0 or 1: 1 takes the block at t too, if it is not whole */
} nsa_forced;

/* How p_cmp, summed over the heads of a group, becomes the score of a selection block. */
typedef enum nsa_score_map {
    NSA_SCORE_OVERLAP_SUM = 0, /* sum of p_cmp[i] * overlap(i, j) / stride: Eq. 9 */
    NSA_SCORE_OVERLAP_MAX      /* the largest p_cmp[i] of the blocks i that overlap block j */
} nsa_score_map;

/* Which keys a window of w holds. */
typedef enum nsa_window_rule {
    NSA_WINDOW_COUNTS_SELF = 0, /* w keys: t - w + 1 .. t */
    NSA_WINDOW_BEFORE_SELF      /* w keys before t, and t: t - w .. t */
} nsa_window_rule;

/* Which keys a query may see at all. */
typedef enum nsa_mask {
    NSA_MASK_CAUSAL = 0, /* those at or before it */
    NSA_MASK_NONE        /* all of its sequence: a window holds the keys with |t - s| < w (with
                            NSA_WINDOW_BEFORE_SELF <= w), and no block is forced for its place;
                            without begins and firsts count may be above tokens, except on CUDA */
} nsa_mask;

typedef enum nsa_gate_kind {
    NSA_GATE_SIGMOID = 0, /* g = sigmoid(logits), each branch by itself (the paper) */
    NSA_GATE_SOFTMAX,     /* g = softmax of the three logits */
    NSA_GATE_NONE         /* the logits are g itself */
} nsa_gate_kind;

/* One problem's geometry. Start from nsa_desc_default and change fields. Heads and blocks end at
   2^30 - 1; slc_count, slc_init and slc_local at 2^29 - 1. */
typedef struct nsa_desc {
    int batch;             /* B >= 1 */
    int tokens;            /* T >= 0 keys held (variable length: the longest sequence) */
    int heads;             /* H >= 1 query heads, a multiple of kv_heads */
    int kv_heads;          /* Hk >= 1 */
    int dim, dim_v;        /* Dk of q and k, Dv of v and out: 1 .. 576 */
    int first, count;      /* the query rows to compute: first .. first + count - 1 */
    const int32_t *begins; /* NULL, or B + 1 ascending offsets of packed sequences */
    const int32_t *firsts; /* NULL, or of each sequence its first query; needs counts */
    const int32_t *counts; /* NULL, or of each sequence how many queries; needs firsts */
    int cmp_block;         /* l: tokens a compressed block covers */
    int cmp_stride;        /* d: tokens between the starts of compressed blocks; divides l and l' */
    int slc_block;         /* l' >= l: tokens of a selection block */
    int slc_count;         /* n: blocks selected for a query */
    int slc_init;          /* forced blocks at the start of the sequence */
    int slc_local;         /* forced blocks at the query: its own and those just before */
    int window;            /* w >= 1 */
    double scale;          /* of q k; 0 means 1 / sqrt(dim) */
    nsa_forced forced;
    nsa_score_map score_map;
    nsa_window_rule window_rule;
    nsa_gate_kind gate;
    int gate_heads;      /* H, or Hk: then one gate serves a group */
    int64_t gate_stride; /* elements between a head's three gates, in logits and their gradient: of
                            three tensors (3, B, T, gate_heads), or parts of a projection; 0: 1 */
    nsa_mask mask;
    int list_heads; /* heads that have block lists of their own: 0 means Hk, one list for the heads
                       of a group; H, or between them a multiple of Hk that divides H */
    int rows;       /* of packed sequences in all: begins[B], or more; of a ragged batch without
                       begins the sum of firsts and counts. What nsa_cuda_ functions need grows with
                       it, because their arrays lie on the device; 0: B x T */
    const int32_t *pages; /* NULL, or (B, table_width): the page of each page_tokens tokens of a
                             sequence; entries behind its last token are not read */
    int table_width;
    int page_tokens; /* rows of a page, a multiple of cmp_stride */
    int page_count;  /* pages that the views of K and V have */
    int threads; /* 0: what OpenMP offers when the workspace is sized; a call uses no more than its
                    workspace holds */
    nsa_isa isa;
    nsa_products products; /* of rows of bf16 */
} nsa_desc;

/* The paper's l 32, d 16, l' 64, n 16 (1 first and 2 local blocks among them), w 512; dim_v = dim,
   all query rows, a sigmoid gate per query head. */
NSA_API nsa_desc nsa_desc_default(int batch, int tokens, int heads, int kv_heads, int dim);

/* NSA_OK, or the first rule that the descriptor breaks. Every function checks it; this is for
   asking early, of a chain. A function called alone does not look at those of cmp_block ..
   slc_local that it has no use for: they may hold anything, and need not agree. */
NSA_API nsa_status nsa_desc_check(const nsa_desc *d);

/* What is wrong with firsts, counts or pages, and where. */
typedef struct nsa_page_fault {
    int sequence;
    int slot; /* of its row of the table, or 0 */
    int32_t value;
    const char *reason; /* "first below 0", "count below 0", "count above desc.count", "queries
                           behind the last token", "more tokens than the table has pages for",
                           "not a page" */
} nsa_page_fault;

/* NSA_OK, or what every call that is given this descriptor returns: if NSA_ERROR_RANGE or
   NSA_ERROR_PAGES at firsts, counts or pages, *fault (which may be NULL) is the first fault. */
NSA_API nsa_status nsa_check_pages(const nsa_desc *d, nsa_page_fault *fault);

/* ---- Block index: which blocks there are, and which a query may see ---------------------------
   Closed forms, for a descriptor that nsa_desc_check accepts. Compressed block i covers tokens
   [i d, i d + l); selection block j covers [j l', (j + 1) l'). */

/* N(T): compressed blocks of T tokens; and N(t + 1): those that lie wholly at or before t. */
NSA_API int nsa_cmp_count(const nsa_desc *d, int tokens);
NSA_API int nsa_cmp_visible(const nsa_desc *d, int query);
/* Selection blocks of T tokens, the last may be short; and those that t may select: t / l' + 1, but
   whole ones of NSA_FORCED_TAIL without slc_local. (Without a mask t is as the last token here.) */
NSA_API int nsa_slc_count(const nsa_desc *d, int tokens);
NSA_API int nsa_slc_candidates(const nsa_desc *d, int query);
/* The first token of t's window. */
NSA_API int nsa_window_begin(const nsa_desc *d, int query);

/* M(i, j) of Eq. 9: tokens shared by compressed block i and selection block j, in strides. */
NSA_API int nsa_block_overlap(const nsa_desc *d, int cmp, int slc);
/* The compressed blocks *begin .. *end - 1, of N(tokens), that overlap selection block `slc`. */
NSA_API void nsa_block_overlap_range(const nsa_desc *d, int tokens, int slc, int *begin, int *end);

/* The map M as CSR for `tokens` tokens: a row for each selection block, a column for each
   compressed block. The arrays are the caller's: indptr holds nsa_slc_count(d, tokens) + 1 entries,
   indices and weights nsa_block_map_size(d, tokens). */
NSA_API int64_t nsa_block_map_size(const nsa_desc *d, int tokens);
NSA_API nsa_status nsa_block_map(const nsa_desc *d, int tokens, int32_t *indptr, int32_t *indices,
                                 nsa_real *weights);

/* Variable length: where each sequence's compressed rows begin; B + 1. Without begins: b N(T). */
NSA_API nsa_status nsa_cmp_begins(const nsa_desc *d, int32_t *cmp_begins);

/* ---- RoPE: rotary positions, per head ---------------------------------------------------------
   out = magnitude R(position) x, R a rotation of the plane of each pair (x[a], x[b]) by position *
   frequency. Pair i of D/2 has frequency base^(-2i/D) radians a position, changed by `scaling`, or
   the one that the caller gives; a part of a row is turned by a view of that part. All on rows
   first .. first + count - 1 of each sequence. */

typedef enum nsa_rope_pairs {
    NSA_ROPE_INTERLEAVED = 0, /* (x[2i], x[2i + 1]) */
    NSA_ROPE_HALVES           /* (x[i], x[i + D/2]) */
} nsa_rope_pairs;

typedef enum nsa_rope_scaling {
    NSA_ROPE_SCALING_NONE = 0,
    NSA_ROPE_SCALING_LINEAR,  /* positions / factor */
    NSA_ROPE_SCALING_NTK,     /* base * factor^(D / (D - 2)) */
    NSA_ROPE_SCALING_YARN,    /* slow pairs as linear, fast ones unchanged, between them a ramp over
                                whole pair numbers, as its authors' code has it and models were
                                trained with (their paper's runs over turns);
                                magnitude 0.1 ln factor + 1 */
    NSA_ROPE_SCALING_DYNAMIC, /* NTK by factor context / trained_context - (factor - 1) */
    NSA_ROPE_SCALING_LLAMA3,  /* Llama 3.1's: slow pairs as linear, fast ones unchanged, between
                                 them a ramp over turns */
    NSA_ROPE_SCALING_LONGROPE /* frequency / short_factors[i], with context > trained_context /
                                 long_factors[i]; magnitude (1 + ln factor / ln trained_context)^0.5
                                 */
} nsa_rope_scaling;

typedef struct nsa_rope {
    nsa_tensor x;         /* (B, count, heads, dim) */
    nsa_tensor out;       /* as x; may be x itself */
    nsa_tensor positions; /* (B, count) i32, head stride unused; data NULL: the row's place in its
                             sequence */
    int heads;            /* H for q, Hk for k */
    int dim;              /* even, 2 .. 576 */
    double base;          /* 0 means 10000 */
    nsa_rope_pairs pairs;
    nsa_rope_scaling scaling;
    double factor;       /* >= 1: context now / context trained; used by the scalings */
    int trained_context; /* YaRN, dynamic, Llama 3, LongRoPE: tokens the model was trained with */
    double fast, slow;   /* YaRN, Llama 3: turns over trained_context that are unchanged, and fully
                            slowed; 0 means 32 (Llama 3: 4) and 1; fast > slow */
    int context;         /* dynamic, LongRoPE: tokens of the longest sequence now; 0, and all up to
                            trained_context: as trained. Rows of a cache keep what they were turned
                            by */
    int untruncated;     /* YaRN, 1: the ramp does not begin and end at whole pairs */
    double magnitude;    /* of out; 0: what the scaling says, else 1 */
    double mscale, mscale_all_dim; /* YaRN, both > 0: magnitude (0.1 mscale ln factor + 1) / (0.1
                                      mscale_all_dim ln factor + 1) */
    const double *short_factors, *long_factors; /* LongRoPE: D/2 numbers > 0 */
    const double *frequencies; /* NULL, or D/2 numbers: then base and scaling are not looked at.
                                  In the host's memory, for nsa_cuda_ functions too */
} nsa_rope;

/* What forward turns by: D/2 numbers, radians from one position to the next, and the magnitude.
   Reads heads, dim and the options. */
NSA_API nsa_status nsa_rope_frequencies(const nsa_rope *x, double *frequencies, double *magnitude);

NSA_API nsa_status nsa_rope_forward(const nsa_rope *x, const nsa_desc *d);
/* dx.x += magnitude R^T dx.out, not in place. Options, positions, heads and dim are read from x. */
NSA_API nsa_status nsa_rope_backward(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d);

/* ---- Compression: phi, Eq. 7 ------------------------------------------------------------------
   out[i] = phi(x[i d], .., x[i d + l - 1]) for the N(T) blocks of every sequence and kv head; first
   and count are not used; with firsts only for the blocks that the new tokens complete. Called once
   for k (rotated) and once for v, each with its own parameters. Backward takes neither firsts nor
   pages. */

typedef enum nsa_phi {
    NSA_PHI_MEAN = 0, /* the average of the l rows */
    NSA_PHI_CONV,     /* depthwise: out[c] = sum_j w1[j][c] x[j][c] + b1[c] */
    NSA_PHI_MLP       /* out = w2 silu(w1 flatten(x + pos) + b1) + b2 */
} nsa_phi;

/* Parameters are (Hk, rows, columns): `head` strides over kv heads (0: all share one), `token` over
   rows, batch is not used. Where `optional` is said data may be NULL. */
typedef struct nsa_compress {
    nsa_phi phi;
    int dim;        /* D: width of x and out, 1 .. 576 */
    int hidden;     /* mlp: width of the hidden layer, >= 1 */
    nsa_tensor x;   /* (B, T, Hk, D) */
    nsa_tensor out; /* (B, N, Hk, D) */
    nsa_tensor pos; /* mlp, optional: (Hk, l, D) */
    nsa_tensor w1;  /* conv: (Hk, l, D); mlp: (Hk, hidden, l D) */
    nsa_tensor b1;  /* optional; conv: (Hk, 1, D); mlp: (Hk, 1, hidden) */
    nsa_tensor w2;  /* mlp: (Hk, D, hidden) */
    nsa_tensor b2;  /* mlp, optional: (Hk, 1, D) */
} nsa_compress;

NSA_API size_t nsa_compress_forward_workspace_size(const nsa_compress *x, const nsa_desc *d);
NSA_API nsa_status nsa_compress_forward(const nsa_compress *x, const nsa_desc *d, void *workspace,
                                        size_t bytes);
/* dx.out in; adds to dx.x, dx.pos, dx.w1, dx.b1, dx.w2, dx.b2. A head stride of 0 in dx sums over
   the heads. */
NSA_API size_t nsa_compress_backward_workspace_size(const nsa_compress *x, const nsa_desc *d);
NSA_API nsa_status nsa_compress_backward(const nsa_compress *dx, const nsa_compress *x,
                                         const nsa_desc *d, void *workspace, size_t bytes);

/* ---- Attention over few keys ------------------------------------------------------------------
   out[t] = sum_s p[s] v[s], p = softmax of scale q[t] k[s] over the keys s that t sees,
   lse = ln sum_s exp(scale q[t] k[s]).

     cmp    keys are the compressed rows 0 .. nsa_cmp_visible(t) - 1: k and v hold N(T) rows, from
            nsa_compress_forward
     slc    keys are the tokens s <= t of the blocks that `blocks` lists for t, lists in the form of
            nsa_select_blocks
     win    keys are nsa_window_begin(t) .. t
     dense  keys are 0 .. t: causal attention, the baseline and the fall-back

   Backward recomputes p from lse: x.q, x.k, x.v, x.out, x.lse (and x.blocks) must be what forward
   read and wrote. It takes no pages: sequences that share one would add to the same rows. */
typedef struct nsa_attend {
    nsa_tensor q;      /* (B, count, H, Dk) */
    nsa_tensor k;      /* (B, T, Hk, Dk); cmp: (B, N, Hk, Dk) */
    nsa_tensor v;      /* (B, T, Hk, Dv); cmp: (B, N, Hk, Dv). May be k's first Dv columns, as in
                          MLA; dx.v then its own view, or dx.k, to which both are added */
    nsa_tensor out;    /* (B, count, H, Dv) */
    nsa_tensor lse;    /* (B, count, H) of dtype NSA_REAL_DTYPE */
    nsa_tensor blocks; /* slc: (B, count, list heads, nsa_block_list_width) i32 */
} nsa_attend;

NSA_API size_t nsa_attend_cmp_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_cmp_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                          size_t bytes);
/* dx.out in, and dx.lse, the incoming gradient of lse, which may be NULL; adds to dx.q, dx.k, dx.v
   (dx.blocks is not used). With dx.k and dx.v NULL only dx.q is computed and the other way round.
   Slices by batch and kv head, and for dx.q by queries, never add to the same row. */
NSA_API size_t nsa_attend_cmp_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_cmp_backward(const nsa_attend *dx, const nsa_attend *x,
                                           const nsa_desc *d, void *workspace, size_t bytes);

NSA_API size_t nsa_attend_slc_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_slc_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                          size_t bytes);
NSA_API size_t nsa_attend_slc_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_slc_backward(const nsa_attend *dx, const nsa_attend *x,
                                           const nsa_desc *d, void *workspace, size_t bytes);

NSA_API size_t nsa_attend_win_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_win_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                          size_t bytes);
NSA_API size_t nsa_attend_win_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_win_backward(const nsa_attend *dx, const nsa_attend *x,
                                           const nsa_desc *d, void *workspace, size_t bytes);

NSA_API size_t nsa_attend_dense_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_dense_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                            size_t bytes);
NSA_API size_t nsa_attend_dense_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_dense_backward(const nsa_attend *dx, const nsa_attend *x,
                                             const nsa_desc *d, void *workspace, size_t bytes);

/* ---- Merge: attention over two sets of keys made one ------------------------------------------
   out = w_a out_a + w_b out_b, w_a = exp(lse_a - lse), lse = ln(exp lse_a + exp lse_b): what one
   softmax over both sets gives, if no key is in both. A part without keys (lse = -inf) changes no
   bit of the other; its out is not read. With it slc and win become one softmax, keys are split
   over owners, and an attention sink is a part whose out is 0 and whose lse is the sink's logit
   (views with strides of 0 need one row of each; such gradients are sums, on CUDA refused). An lse
   of +inf or NaN makes its row NaN, out and lse, if both have keys: no sum of keys is infinite. */
typedef struct nsa_merge {
    nsa_tensor out_a, out_b; /* (B, count, H, Dv) */
    nsa_tensor lse_a, lse_b; /* (B, count, H) of dtype NSA_REAL_DTYPE */
    nsa_tensor out;          /* out: (B, count, H, Dv) */
    nsa_tensor lse;          /* out: (B, count, H) of dtype NSA_REAL_DTYPE */
} nsa_merge;

NSA_API nsa_status nsa_merge_forward(const nsa_merge *x, const nsa_desc *d);
/* dx.out in, dx.lse may be NULL; adds to dx.out_a .. dx.lse_b. x.out and x.lse are not read. */
NSA_API nsa_status nsa_merge_backward(const nsa_merge *dx, const nsa_merge *x, const nsa_desc *d);

/* ---- Selection, Eq. 8 to 11 -------------------------------------------------------------------
   For each query and kv head: p_cmp = exp(scale q k_cmp - lse_cmp) over the visible compressed
   blocks, summed over the G heads of the group, then mapped to selection blocks (score_map; of the
   maximum the order matters); then the forced blocks and the best of the rest. Equal scores: the
   lower index wins. NaN ranks last. It has no gradient. */
typedef struct nsa_select {
    nsa_tensor q;      /* (B, count, H, Dk) */
    nsa_tensor k;      /* (B, N, Hk, Dk): compressed keys */
    nsa_tensor lse;    /* (B, count, H): of nsa_attend_cmp_forward */
    nsa_tensor blocks; /* out: (B, count, list heads, nsa_block_list_width) i32: ascending, no
                          duplicates, -1 behind the last */
    nsa_tensor scores; /* out, optional: (B, count, list heads, nsa_slc_count(T)) of NSA_REAL_DTYPE:
                          what the blocks were chosen by; -inf behind the query's candidates */
    nsa_tensor p_cmp;  /* out, optional: (B, count, list heads, N(T)) of dtype NSA_REAL_DTYPE; 0
                         where t sees no block, and of a query with a value that is not finite */
} nsa_select;

/* Entries of a list: slc_count, and unless NSA_FORCED_INSIDE those of slc_init and slc_local that
   are forced besides: with NSA_MASK_NONE none are, but the tail of NSA_FORCED_TAIL. */
NSA_API int nsa_block_list_width(const nsa_desc *d);

NSA_API size_t nsa_select_blocks_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_select_blocks(const nsa_select *x, const nsa_desc *d, void *workspace,
                                     size_t bytes);

/* Scores that are no attention, and the lists of the best blocks by them: what learned indexers
   compute (DeepSeek Sparse Attention, MiniMax Sparse Attention) and MoBA's gate. Token s has the
   score sum over the heads h of a group of weights[h] act(q[t, h] . k[s]); block j the maximum or
   the mean over those of its tokens that t sees. desc.scale is not used. A list serves one kv head:
   ask with kv_heads 1 for one list that all heads share. A block with a key that is not finite
   ranks last; a query with such a value has scores of 0. The lists have no gradient.
   With `stride` a key stands for so many tokens (Qwen's QSA, DeepSeek's CSA): key i for those from
   i stride on, and t sees it if all of them lie at or before t. Rows of k are those of compressed
   blocks with cmp_block = cmp_stride = stride. A block of which t sees no key has the score -inf;
   NSA_FORCED_TAIL keeps it out, or takes it besides. Few queries need no workspace for keys. */
typedef enum nsa_score_act { NSA_SCORE_LINEAR = 0, NSA_SCORE_RELU } nsa_score_act;
typedef enum nsa_score_pool { NSA_POOL_MAX = 0, NSA_POOL_MEAN } nsa_score_pool;
typedef struct nsa_score {
    nsa_score_act act;
    nsa_score_pool pool;
    nsa_tensor q;       /* (B, count, H, Dk) */
    nsa_tensor k;       /* (B, T, Hk, Dk); with a stride (B, T / stride, Hk, Dk) */
    nsa_tensor weights; /* optional: (B, count, H); without it every head weighs 1 */
    nsa_tensor blocks;  /* out: (B, count, list heads, nsa_block_list_width) i32 */
    nsa_tensor scores;  /* out, optional: (B, count, list heads, nsa_slc_count(T)) of
                           NSA_REAL_DTYPE; -inf where t sees no key of it, behind candidates too */
    int stride;         /* tokens of a key; divides slc_block and page_tokens. 0 means 1 */
} nsa_score;

NSA_API size_t nsa_score_blocks_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_score_blocks(const nsa_score *x, const nsa_desc *d, void *workspace,
                                    size_t bytes);

/* The scores of given lists, and their gradient: x.blocks is read, x.scores is (B, count, list
   heads, nsa_block_list_width), -inf behind a list and where t sees no key. A maximum's gradient is
   its first key's. A value that is not finite makes all NaN that its entry reads. */
NSA_API size_t nsa_score_blocks_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_score_blocks_forward(const nsa_score *x, const nsa_desc *d, void *workspace,
                                            size_t bytes);
/* dx.scores in; adds to dx.q, dx.k, dx.weights. It takes no pages. */
NSA_API size_t nsa_score_blocks_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_score_blocks_backward(const nsa_score *dx, const nsa_score *x,
                                             const nsa_desc *d, void *workspace, size_t bytes);

/* The ranking alone, for scores from elsewhere: scores[j] of blocks j = 0 ..
   nsa_slc_candidates(query) - 1, list of nsa_block_list_width entries. */
NSA_API nsa_status nsa_rank_blocks(const nsa_real *scores, int query, const nsa_desc *d,
                                   int32_t *list);

/* The ranking of every query and list at once. */
typedef struct nsa_rank {
    nsa_tensor scores; /* (B, count, list heads, nsa_slc_count(T)): of the candidates; others are
                          not read */
    nsa_tensor blocks; /* out: (B, count, list heads, nsa_block_list_width) i32 */
} nsa_rank;

NSA_API size_t nsa_rank_queries_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_rank_queries(const nsa_rank *x, const nsa_desc *d, void *workspace,
                                    size_t bytes);

/* What is wrong with a list, and where. */
typedef struct nsa_block_fault {
    int batch, query, kv_head, slot; /* query counts from 0 in its sequence */
    int32_t value;
    const char *reason; /* "not a candidate of its query", "not ascending", "duplicate",
                           "entry behind a -1" */
} nsa_block_fault;

/* NSA_OK, or NSA_ERROR_BLOCKS and *fault (or NULL) the first fault. slc refuses what this does. */
NSA_API nsa_status nsa_check_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                    nsa_block_fault *fault);
/* Brings any lists into the form: sorts, drops duplicates and what is no candidate of its query,
   pads with -1. */
NSA_API nsa_status nsa_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d);

/* ---- Gate, Eq. 5 ------------------------------------------------------------------------------
   out = g[0] cmp + g[1] slc + g[2] win, g from the logits by desc.gate, per token and gate head. */
typedef struct nsa_gate {
    nsa_tensor logits;        /* (B, count, gate_heads, 3): cmp, slc, win, gate_stride apart */
    nsa_tensor cmp, slc, win; /* (B, count, H, Dv) */
    nsa_tensor out;           /* (B, count, H, Dv) */
} nsa_gate;

NSA_API nsa_status nsa_gate_forward(const nsa_gate *x, const nsa_desc *d);
/* dx.out in; adds to dx.logits, dx.cmp, dx.slc, dx.win. x.out is not read. */
NSA_API nsa_status nsa_gate_backward(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d);

/* ---- The whole --------------------------------------------------------------------------------
   compress, cmp, select, slc, win, gate. Each branch has its own keys and values, or shares them:
   give the same view. What backward needs again is a named output. k_cmp.dim is dim, v_cmp.dim is
   dim_v. With firsts forward is a step of a serving engine: the caller has stored the new tokens'
   rows of K and V, in pages or straight, and k_cmp.out and v_cmp.out hold the compressed rows of
   earlier steps. Backward takes neither firsts nor pages. */
typedef struct nsa_attention {
    nsa_tensor q;              /* (B, count, H, Dk) */
    nsa_compress k_cmp, v_cmp; /* x: what cmp compresses; out: the compressed rows, an output */
    nsa_tensor k_slc, v_slc;   /* (B, T, Hk, Dk), (B, T, Hk, Dv) */
    nsa_tensor k_win, v_win;   /* likewise */
    nsa_tensor gates;          /* (B, count, gate_heads, 3): as the gate's logits */
    nsa_tensor blocks;         /* out: (B, count, list heads, nsa_block_list_width) i32 */
    nsa_tensor out_cmp, out_slc, out_win; /* out: (B, count, H, Dv) */
    nsa_tensor lse_cmp, lse_slc, lse_win; /* out: (B, count, H) of dtype NSA_REAL_DTYPE */
    nsa_tensor out;                       /* out: (B, count, H, Dv) */
} nsa_attention;

NSA_API size_t nsa_attention_forward_workspace_size(const nsa_attention *x, const nsa_desc *d);
NSA_API nsa_status nsa_attention_forward(const nsa_attention *x, const nsa_desc *d, void *workspace,
                                         size_t bytes);
/* dx.out in; adds to dx.q, the x and parameters of dx.k_cmp and dx.v_cmp, dx.k_slc .. dx.v_win,
   dx.gates. The sums of the branches are taken in the real dtype and rounded once. The other fields
   of dx are not used. The size depends on both structs: which gradients are asked for, of which
   dtype, and which of them share memory. */
NSA_API size_t nsa_attention_backward_workspace_size(const nsa_attention *dx,
                                                     const nsa_attention *x, const nsa_desc *d);
NSA_API nsa_status nsa_attention_backward(const nsa_attention *dx, const nsa_attention *x,
                                          const nsa_desc *d, void *workspace, size_t bytes);

/* ---- Decoding ---------------------------------------------------------------------------------
   A cache of one layer for B sequences, each of its own length, in the caller's memory. It holds k
   and v of slc; the last window of win and the last rows that phi may still need, as rings; the
   compressed rows. nsa_decode appends tokens and attends from them: one at a time, a prompt in
   chunks, or some at once to check a guess. The blocks it selects and the bits of its outputs are
   those of nsa_attention_forward over the whole sequence; the work for one token is that of its own
   keys and, every cmp_stride tokens, of one compressed row. Decoding is causal, a kv head has one
   list, and the cache knows positions and rows: desc.mask, desc.list_heads, desc.firsts and
   desc.pages that say otherwise are refused. (Over a cache of yours, in pages or straight, call
   nsa_attention_forward with firsts and counts.) */
typedef struct nsa_cache {
    nsa_desc desc;  /* batch: sequences; tokens: room of each; first, count, begins are not used */
    int max_rewind; /* r: how far a sequence can be taken back; r + 1 tokens at once at most */
    int32_t *lengths; /* B: tokens held. To be read; nsa_decode and the functions below write */
    int32_t *newest;  /* B: the greatest length since the sequence began: the rings hold what
                             led to it */
    nsa_tensor k_slc, v_slc; /* (B, tokens, Hk, D) */
    nsa_tensor k_win, v_win; /* (B, window's keys + r, Hk, D), token t in row t % rows */
    nsa_tensor k_raw, v_raw; /* (B, l + r, Hk, D), likewise */
    nsa_tensor k_cmp, v_cmp; /* (B, N(tokens), Hk, D) */
} nsa_cache;

/* Bytes for nsa_cache_init; 0 for arguments that it refuses. Rows are rounded to `dtype` once: the
   bits are those of the whole sequence if it is the dtype of all rows that are appended. */
NSA_API size_t nsa_cache_size(const nsa_desc *d, nsa_dtype dtype, int max_rewind);
/* Lays an empty cache out in memory of any alignment, which lives as long as the cache is used. */
NSA_API nsa_status nsa_cache_init(nsa_cache *cache, const nsa_desc *d, nsa_dtype dtype,
                                  int max_rewind, void *memory, size_t bytes);
/* Takes a sequence back to `length` tokens, at most max_rewind below its newest length; to 0 it may
   always go, and begins anew. */
NSA_API nsa_status nsa_cache_rewind(nsa_cache *cache, int sequence, int length);
/* Makes a sequence the copy of another's first `length` tokens, of the same or another cache of the
   same geometry. Copies: sharing a prefix's memory is up to the owner of the memory. */
NSA_API nsa_status nsa_cache_fork(nsa_cache *to, int to_sequence, const nsa_cache *from,
                                  int from_sequence, int length);

/* Keys that a step has read in a sequence, counted when they are read, over its new rows. */
typedef struct nsa_reads {
    int64_t cmp, slc, win;
} nsa_reads;

/* Appends `count` tokens to every sequence, or counts[b] <= count to sequence b, and attends from
   them. The views of x hold the new rows only, `count` of each sequence: q, k_cmp.x .. v_win in;
   out, the branches' out and lse, and blocks out. k_cmp.out and v_cmp.out are the cache's and not
   used here. `reads` is NULL or of B entries. Nothing is appended unless all sequences have room.
   A cache has one owner: of two calls at once both would find room for the same row.
   The workspace for `count` tokens serves fewer too. */
NSA_API size_t nsa_decode_workspace_size(const nsa_attention *x, const nsa_cache *cache, int count);
NSA_API nsa_status nsa_decode(const nsa_attention *x, nsa_cache *cache, int count,
                              const int32_t *counts, nsa_reads *reads, void *workspace,
                              size_t bytes);

/* ---- Numbers ------------------------------------------------------------------------------- */

NSA_API float nsa_bf16_to_f32(uint16_t x);
NSA_API uint16_t nsa_f32_to_bf16(float x); /* to nearest, ties to even; NaN stays NaN */
NSA_API float nsa_f16_to_f32(uint16_t x);
NSA_API uint16_t nsa_f32_to_f16(float x);
/* Rows of x in another dtype, to nearest, ties to even; f64 by way of f32. Of 8 bits a scale is the
   largest magnitude of its columns / 127 (f8: 448), NaN if one is not finite: docs/numerics.md */
NSA_API nsa_status nsa_convert_rows(const nsa_tensor *x, const nsa_tensor *out, int batch,
                                    int tokens, int heads, int width);

#ifdef __cplusplus
}
#endif

#endif /* NSA_H */
