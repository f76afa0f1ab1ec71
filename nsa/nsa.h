/* Made by scripts/amalgamate.py from nsa/src: edit there. */
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

/* ==== Private, shared with nsa_cuda.cuh =========================================================

   Host code that both need: what a status can name, the check of one view, the arena, RoPE's
   frequencies, the views of the whole's primitives, the cache's arrays. */

#if (defined(NSA_IMPLEMENTATION) || defined(NSA_CUDA_IMPLEMENTATION)) && !defined(NSA__SHARED_PARTS)
#define NSA__SHARED_PARTS

#include <math.h>
#include <string.h>

#define NSA__MAX_DIM 576

/* Every field that a status can name, by the struct that has it. The fields of a compress stand
   three times, in the same order, because the whole adds NSA__TO_K_CMP or NSA__TO_V_CMP to the id
   of such a field. */
#define NSA__FIELDS(X)                                                                            \
    X(arguments), X(desc), X(workspace), X(batch), X(tokens), X(heads), X(kv_heads),              \
        X(gate_heads), X(gate_stride), X(dim_v), X(first), X(count), X(begins), X(firsts),        \
        X(pages), X(table_width), X(page_tokens), X(page_count), X(cmp_block), X(cmp_stride),     \
        X(slc_block), X(slc_count), X(slc_init), X(slc_local), X(window), X(scale), X(forced),    \
        X(score_map), X(window_rule), X(gate), X(mask), X(list_heads), X(rows), X(threads),       \
        X(isa), X(products), X(indptr), X(indices), X(weights), X(cmp_begins), X(positions),      \
        X(base), X(pairs), X(scaling), X(factor), X(trained_context), X(fast), X(context),        \
        X(magnitude), X(mscale), X(short_factors), X(long_factors), X(frequencies), X(cache),     \
        X(counts), X(length), X(sequence), X(max_rewind), X(query), X(scores), X(p_cmp), X(act),  \
        X(pool), X(stride), X(width), X(list), X(dtype), X(memory), X(q), X(k), X(v), X(lse),     \
        X(blocks), X(logits), X(cmp), X(slc), X(win), X(k_slc), X(v_slc), X(k_win), X(v_win),     \
        X(gates), X(out_cmp), X(out_slc), X(out_win), X(out_a), X(out_b), X(lse_cmp), X(lse_slc), \
        X(lse_win), X(lse_a), X(lse_b)
#define NSA__COMPRESS_FIELDS(X) \
    X(phi), X(dim), X(hidden), X(x), X(out), X(pos), X(w1), X(b1), X(w2), X(b2)

/* A status has its kind in bits 0 to 7 and the id of its field from bit 8 on. NSA__GRADIENT is
   added to an id if the field is one of dx. */
#define NSA__ID(name)       NSA__AT_##name
#define NSA__K_CMP_ID(name) NSA__AT_k_cmp_##name
#define NSA__V_CMP_ID(name) NSA__AT_v_cmp_##name
enum {
    NSA__AT_none,
    NSA__FIELDS(NSA__ID),
    NSA__COMPRESS_FIELDS(NSA__ID),
    NSA__COMPRESS_FIELDS(NSA__K_CMP_ID),
    NSA__COMPRESS_FIELDS(NSA__V_CMP_ID),
    NSA__GRADIENT = 1 << 16
};

static nsa_status nsa__error(int kind, int field) {
    return kind | field << 8;
}

/* Leaves a function with the status of what failed. */
#define NSA__CHECK(call)                     \
    do {                                     \
        nsa_status failed = (call);          \
        if (failed != NSA_OK) return failed; \
    } while (0)

static size_t nsa__dtype_bytes(nsa_dtype dtype) {
    switch (dtype) {
    case NSA_I8:
    case NSA_F8:
        return 1;
    case NSA_BF16:
    case NSA_F16:
        return 2;
    case NSA_F64:
        return 8;
    case NSA_F32:
    case NSA_I32:
        break;
    }
    return 4;
}

/* 1 if the product of the sizes, each >= 0, in elements of up to 8 bytes, fits the address space.
   The product is taken in double, because it could overflow an int64_t. */
static int nsa__fits(int64_t a, int64_t b, int64_t c, int64_t e) {
    const double limit =
        sizeof(size_t) >= 8 ? 1152921504606846976.0 /* 2^60 */ : (double)(SIZE_MAX / 16);
    return (double)a * (double)b * (double)c * (double)e < limit;
}

/* The rows that a view must have, as its strides see them. */
typedef struct nsa__shape {
    int64_t batch, rows, heads, width;
} nsa__shape;

/* One axis of a view: elements from entry to entry, and the number of entries. */
typedef struct nsa__axis {
    int64_t stride, extent;
} nsa__axis;

/* 1 if no two elements of the shape are one; those of a row are `inner` apart. Axes are sorted by
   stride. Elements are apart if each stride steps over all elements that the axes before it cover.
   Interleaved axes are refused too, even if they share nothing. */
static int nsa__rows_disjoint(const nsa_tensor *x, nsa__shape shape, int64_t inner) {
    nsa__axis axes[4] = {{inner, shape.width},
                         {x->batch, shape.batch},
                         {x->token, shape.rows},
                         {x->head, shape.heads}};
    for (int i = 1; i < 4; i++) /* ascending strides */
        for (int j = i; j > 0 && axes[j].stride < axes[j - 1].stride; j--) {
            nsa__axis swap = axes[j];
            axes[j] = axes[j - 1];
            axes[j - 1] = swap;
        }
    int64_t covered = 1;
    for (int i = 0; i < 4; i++) {
        if (axes[i].extent <= 1) continue;
        if (axes[i].stride < covered) return 0;
        covered += axes[i].stride * (axes[i].extent - 1);
    }
    return 1;
}

enum {
    NSA__FLOATS = 1 << NSA_F32 | 1 << NSA_BF16 | 1 << NSA_F16,
    NSA__INTS = 1 << NSA_I32,
    NSA__SCALED = 1 << NSA_I8 | 1 << NSA_F8,
    NSA__SCALE_COLUMNS = 128 /* of a row of 8 bits that share a scale */
};

/* What a row of so many numbers takes. */
static int64_t nsa__row_elements(nsa_dtype dtype, int64_t width) {
    if (!(NSA__SCALED >> dtype & 1)) return width;
    return width + (width + NSA__SCALE_COLUMNS - 1) / NSA__SCALE_COLUMNS * (int64_t)sizeof(float);
}

/* Checks one view. `dtypes` is a set: bit x stands for dtype x. `writes` 1: the view is an output,
   so its rows must be apart. A stride is not looked at if its axis has one entry. */
static nsa_status nsa__check_view(const nsa_tensor *x, nsa__shape shape, unsigned dtypes,
                                  int writes, int field) {
    if (shape.batch == 0 || shape.rows == 0 || shape.heads == 0)
        return NSA_OK; /* nothing will be touched */
    if (!x->data) return nsa__error(NSA_ERROR_NULL, field);
    if ((unsigned)x->dtype > NSA_F8 || !(dtypes >> x->dtype & 1))
        return nsa__error(NSA_ERROR_DTYPE, field);
    shape.width = nsa__row_elements(x->dtype, shape.width);
    if ((uintptr_t)x->data % nsa__dtype_bytes(x->dtype))
        return nsa__error(NSA_ERROR_ALIGNMENT, field);
    int64_t batch = shape.batch > 1 ? x->batch : 0, token = shape.rows > 1 ? x->token : 0;
    int64_t head = shape.heads > 1 ? x->head : 0;
    if (batch < 0 || token < 0 || head < 0) return nsa__error(NSA_ERROR_STRIDE, field);
    if (!nsa__fits(batch, shape.batch, 4, 1) || !nsa__fits(token, shape.rows, 4, 1) ||
        !nsa__fits(head, shape.heads, 4, 1) || !nsa__fits(shape.width, 4, 1, 1))
        return nsa__error(NSA_ERROR_OVERFLOW, field);
    if (writes && !nsa__rows_disjoint(x, shape, 1)) return nsa__error(NSA_ERROR_STRIDE, field);
    return NSA_OK;
}

static int64_t nsa__gate_stride(const nsa_desc *d) {
    return d->gate_stride ? d->gate_stride : 1;
}

/* Checks a view of gates, the one whose rows are not packed where gate_stride says so. */
static nsa_status nsa__check_gates(const nsa_tensor *x, const nsa_desc *d, nsa__shape shape,
                                   unsigned dtypes, int writes, int field) {
    NSA__CHECK(nsa__check_view(x, shape, dtypes, 0, field));
    if (!writes || shape.batch == 0 || shape.rows == 0) return NSA_OK;
    return nsa__rows_disjoint(x, shape, nsa__gate_stride(d)) ? NSA_OK
                                                             : nsa__error(NSA_ERROR_STRIDE, field);
}

/* The caller's workspace, handed out from its start. Without a base it only counts, so that a size
   query is the same code as the call itself. `used` saturates, so that no sum overflows. */
typedef struct nsa__arena {
    char *base;
    size_t used;
} nsa__arena;

/* Hands out `count` elements, from a multiple of `align` on. A size that does not fit leaves `used`
   at its largest value, which no workspace can satisfy. */
static void *nsa__alloc_aligned(nsa__arena *a, int64_t count, size_t size, size_t align) {
    char *at = a->base ? a->base + a->used : NULL;
    if ((uint64_t)count > (SIZE_MAX - a->used - align) / size) {
        a->used = SIZE_MAX - align;
        return at;
    }
    a->used += ((size_t)count * size + align - 1) / align * align;
    return at;
}

/* An arena whose base is the workspace's first multiple of `align`. */
static nsa__arena nsa__arena_aligned(void *workspace, size_t align) {
    size_t skew = (align - (size_t)((uintptr_t)workspace % align)) % align;
    nsa__arena a = {workspace ? (char *)workspace + skew : NULL, 0};
    return a;
}

static int nsa__list_heads(const nsa_desc *d) {
    return d->list_heads ? d->list_heads : d->kv_heads;
}

/* The descriptor for a primitive that uses only some of the fields cmp_block .. slc_local: the
   others are set so that they break no rule. Blocks are forced in no list that is given. */
enum {
    NSA__USES_CMP = 1,
    NSA__USES_SLC = 2,   /* lists */
    NSA__USES_FORCED = 4 /* it makes them */
};

static const nsa_desc *nsa__desc_using(const nsa_desc *d, int uses, nsa_desc *own) {
    if (!d) return d;
    *own = *d;
    if (!(uses & NSA__USES_CMP)) own->cmp_block = own->cmp_stride = 1;
    if (!(uses & NSA__USES_SLC)) own->slc_block = own->cmp_block, own->slc_count = 1;
    if (!(uses & NSA__USES_SLC) || (!(uses & NSA__USES_FORCED) && own->forced == NSA_FORCED_INSIDE))
        own->slc_init = 0, own->slc_local = 1;
    return own;
}

/* The descriptor for what ranks. */
static const nsa_desc *nsa__rank_desc(const nsa_desc *d, nsa_desc *own) {
    return nsa__desc_using(d, NSA__USES_SLC | NSA__USES_FORCED, own);
}

/* By its bits: -ffast-math folds isnan and isinf to 0, and takes any comparison for a number's.
   clang 19 folds the bits of an argument too, but not what it reads from volatile memory. */
static int nsa__is_finite(double x) {
    uint64_t copy;
    memcpy(&copy, &x, sizeof copy);
    const volatile uint64_t bits = copy;
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

/* `numbers`, one a pair, each a number; above 0 if a frequency is divided by them. */
static nsa_status nsa__rope_check_pairs(const nsa_rope *x, const double *numbers, int divides,
                                        int field) {
    if (!numbers) return nsa__error(NSA_ERROR_NULL, field);
    for (int i = 0; i < x->dim / 2; i++)
        if (!nsa__is_finite(numbers[i]) || (divides && !(numbers[i] > 0)))
            return nsa__error(NSA_ERROR_SIZE, field);
    return NSA_OK;
}

/* 0 means that the option was not given. */
static int nsa__rope_option(double x, double least) {
    return nsa__is_finite(x) && (x == 0 || (x >= least && x < 1e300));
}

static double nsa__rope_fast(const nsa_rope *x) {
    return x->fast != 0 ? x->fast : x->scaling == NSA_ROPE_SCALING_LLAMA3 ? 4 : 32;
}

static double nsa__rope_slow(const nsa_rope *x) {
    return x->slow != 0 ? x->slow : 1;
}

/* What the scaling reads, and no more. */
static nsa_status nsa__rope_check_scaling(const nsa_rope *x) {
    const nsa_rope_scaling scaling = x->scaling;
    if ((unsigned)scaling > NSA_ROPE_SCALING_LONGROPE)
        return nsa__error(NSA_ERROR_OPTION, NSA__AT_scaling);
    if (!nsa__rope_option(x->base, 1) || x->base == 1)
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_base);
    if (scaling == NSA_ROPE_SCALING_NONE) return NSA_OK;
    const int is_long = scaling == NSA_ROPE_SCALING_LONGROPE;
    if (!(is_long && x->magnitude > 0) && (x->factor == 0 || !nsa__rope_option(x->factor, 1)))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_factor);
    if (scaling == NSA_ROPE_SCALING_LINEAR || scaling == NSA_ROPE_SCALING_NTK) return NSA_OK;
    /* LongRoPE's magnitude has ln 1 = 0 for divisor. */
    if (x->trained_context < (is_long ? 2 : 1))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_trained_context);
    if (is_long) {
        NSA__CHECK(nsa__rope_check_pairs(x, x->short_factors, 1, NSA__AT_short_factors));
        NSA__CHECK(nsa__rope_check_pairs(x, x->long_factors, 1, NSA__AT_long_factors));
    }
    if (is_long || scaling == NSA_ROPE_SCALING_DYNAMIC)
        return x->context < 0 ? nsa__error(NSA_ERROR_SIZE, NSA__AT_context) : NSA_OK;
    const double fast = nsa__rope_fast(x), slow = nsa__rope_slow(x);
    if (!nsa__is_finite(fast) || !nsa__is_finite(slow) || !(slow > 0 && slow < fast))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_fast);
    if (scaling == NSA_ROPE_SCALING_YARN &&
        (!nsa__rope_option(x->mscale, 0) || !nsa__rope_option(x->mscale_all_dim, 0)))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_mscale);
    return NSA_OK;
}

static nsa_status nsa__rope_check_options(const nsa_rope *x) {
    if (x->heads < 1) return nsa__error(NSA_ERROR_SIZE, NSA__AT_heads);
    if (x->dim < 2 || x->dim > NSA__MAX_DIM || x->dim % 2)
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
    if ((unsigned)x->pairs > NSA_ROPE_HALVES) return nsa__error(NSA_ERROR_OPTION, NSA__AT_pairs);
    if (!nsa__rope_option(x->magnitude, 0)) return nsa__error(NSA_ERROR_SIZE, NSA__AT_magnitude);
    return x->frequencies ? nsa__rope_check_pairs(x, x->frequencies, 0, NSA__AT_frequencies)
                          : nsa__rope_check_scaling(x);
}

/* The pair, as a fractional number, that turns `turns` times over the trained context of L tokens:
   L base^(-2i/dim) / (2 pi) = turns, solved for i. */
static double nsa__rope_pair_of(const nsa_rope *x, double base, double turns) {
    return x->dim * log(x->trained_context / (turns * 6.283185307179586)) / (2 * log(base));
}

/* How much of pair i is slowed, 0 to 1.
   YaRN:    pairs up to `low` turn at least `fast` times over the trained context, pairs from `high`
            on at most `slow` times; the ramp runs over pair numbers. If low and high meet, 0.001
            between them keeps its division from 0 / 0.
   Llama 3: the ramp runs over turns themselves. */
static double nsa__rope_ramp(const nsa_rope *x, double base, int i) {
    const double fast = nsa__rope_fast(x), slow = nsa__rope_slow(x);
    double ramp = 0;
    if (x->scaling == NSA_ROPE_SCALING_LLAMA3) {
        double turns = x->trained_context * pow(base, -2.0 * i / x->dim) / 6.283185307179586;
        ramp = (fast - turns) / (fast - slow);
    } else {
        double low = nsa__rope_pair_of(x, base, fast), high = nsa__rope_pair_of(x, base, slow);
        if (!x->untruncated) low = floor(low), high = ceil(high);
        low = low < 0 ? 0 : low;
        high = high > x->dim - 1 ? x->dim - 1 : high;
        if (high == low) high += 0.001;
        ramp = (i - low) / (high - low);
    }
    return ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
}

/* The factor on the result. */
static double nsa__rope_magnitude(const nsa_rope *x) {
    const int is_long = x->scaling == NSA_ROPE_SCALING_LONGROPE;
    if (x->magnitude != 0) return x->magnitude;
    if (x->frequencies || !(is_long || x->scaling == NSA_ROPE_SCALING_YARN)) return 1;
    const double length = log(x->factor);
    if (is_long) return sqrt(1 + length / log(x->trained_context));
    if (x->mscale > 0 && x->mscale_all_dim > 0)
        return (0.1 * x->mscale * length + 1) / (0.1 * x->mscale_all_dim * length + 1);
    return 0.1 * length + 1;
}

/* The angle of pair i from one position to the next, and the factor on the result.
   NTK: a larger base. Pair 0 keeps its frequency; the exponent dim / (dim - 2) divides that of the
        last pair, dim / 2 - 1, by exactly the factor. Dynamic NTK: by 1 at the trained context, by
        `factor` more for each further one. */
static void nsa__rope_frequencies(const nsa_rope *x, double frequency_of[], double *magnitude) {
    const nsa_rope_scaling scaling = x->scaling;
    const int beyond = x->context > x->trained_context;
    double base = x->base != 0 ? x->base : 10000, stretch = 1;
    *magnitude = nsa__rope_magnitude(x);
    if (scaling == NSA_ROPE_SCALING_NTK) stretch = x->factor;
    if (scaling == NSA_ROPE_SCALING_DYNAMIC && beyond)
        stretch = x->factor * x->context / x->trained_context - (x->factor - 1);
    if (x->dim > 2) base *= pow(stretch, (double)x->dim / (x->dim - 2));
    if (x->frequencies) memcpy(frequency_of, x->frequencies, (size_t)x->dim / 2 * sizeof(double));
    for (int i = 0; i < x->dim / 2 && !x->frequencies; i++) {
        double frequency = pow(base, -2.0 * i / x->dim), slowed = frequency / x->factor;
        if (scaling == NSA_ROPE_SCALING_LINEAR) frequency = slowed;
        if (scaling == NSA_ROPE_SCALING_YARN || scaling == NSA_ROPE_SCALING_LLAMA3)
            frequency += nsa__rope_ramp(x, base, i) * (slowed - frequency);
        if (scaling == NSA_ROPE_SCALING_LONGROPE)
            frequency /= (beyond ? x->long_factors : x->short_factors)[i];
        frequency_of[i] = frequency;
    }
}

/* The chain's views as its primitives see them; for a gradient struct, their gradients. */
typedef struct nsa__chain {
    nsa_attend cmp, slc, win;
    nsa_select select;
    nsa_gate gate;
} nsa__chain;

static const nsa_tensor nsa__no_view = {NULL, NSA_F32, 0, 0, 0};

/* Copies views, no rows. */
static nsa__chain nsa__chain_of(const nsa_attention *x) {
    const nsa_tensor none = nsa__no_view;
    const nsa__chain c = {{x->q, x->k_cmp.out, x->v_cmp.out, x->out_cmp, x->lse_cmp, x->blocks},
                          {x->q, x->k_slc, x->v_slc, x->out_slc, x->lse_slc, x->blocks},
                          {x->q, x->k_win, x->v_win, x->out_win, x->lse_win, x->blocks},
                          {x->q, x->k_cmp.out, x->lse_cmp, x->blocks, none, none},
                          {x->gates, x->out_cmp, x->out_slc, x->out_win, x->out}};
    return c;
}

enum {
    NSA__TO_K_CMP = NSA__AT_k_cmp_phi - NSA__AT_phi,
    NSA__TO_V_CMP = NSA__AT_v_cmp_phi - NSA__AT_phi
};

static int nsa__same_view(const nsa_tensor *a, const nsa_tensor *b) {
    return a->data == b->data && a->dtype == b->dtype && a->batch == b->batch &&
           a->token == b->token && a->head == b->head;
}

/* Gradients that several branches may add to. Each addition to a view of bf16 or f16 would round,
   so the sum is then taken in workspace and added once. Views of the same memory share one sum. */
enum {
    NSA__SUM_Q,
    NSA__SUM_K_CMP,
    NSA__SUM_V_CMP,
    NSA__SUM_K_SLC,
    NSA__SUM_V_SLC,
    NSA__SUM_K_WIN,
    NSA__SUM_V_WIN,
    NSA__SUMS
};

/* These views of a gradient struct. */
static void nsa__sum_views(nsa_attention *dx, nsa_tensor *views[NSA__SUMS]) {
    nsa_tensor *const all[NSA__SUMS] = {&dx->q,     &dx->k_cmp.x, &dx->v_cmp.x, &dx->k_slc,
                                        &dx->v_slc, &dx->k_win,   &dx->v_win};
    memcpy(views, all, sizeof all);
}
static int nsa__sum_width(const nsa_desc *d, int i) {
    return i == NSA__SUM_V_CMP || i == NSA__SUM_V_SLC || i == NSA__SUM_V_WIN ? d->dim_v : d->dim;
}

/* The first sum before sum i that adds to the same view, or i. Sums of the same memory but another
   width are apart, because their rows are not the same rows. q is never shared. */
static int nsa__shared_sum(nsa_tensor *const to[NSA__SUMS], const nsa_desc *d, int i) {
    for (int k = NSA__SUM_K_CMP; i != NSA__SUM_Q && k < i; k++)
        if (nsa__same_view(to[k], to[i]) && nsa__sum_width(d, k) == nsa__sum_width(d, i)) return k;
    return i;
}

/* One of a cache's arrays: what it holds, how many rows, how they are indexed. */
typedef struct nsa__cache_part {
    nsa_tensor *rows; /* the cache's view */
    int64_t count;    /* rows of a sequence */
    int width;        /* numbers of a row */
    int ring;         /* rows of a ring, 0 for straight arrays */
} nsa__cache_part;

enum {
    NSA__PART_K_SLC,
    NSA__PART_V_SLC,
    NSA__PART_K_WIN,
    NSA__PART_V_WIN,
    NSA__PART_K_RAW,
    NSA__PART_V_RAW,
    NSA__PART_K_CMP,
    NSA__PART_V_CMP,
    NSA__PARTS,
    NSA__INPUTS = NSA__PART_K_CMP /* the first ones, which a step appends to */
};

/* The new rows of x in the order of the parts that they are appended to. */
static void nsa__cache_inputs(const nsa_attention *x, nsa_tensor inputs[NSA__INPUTS]) {
    const nsa_tensor all[NSA__INPUTS] = {x->k_slc, x->v_slc,   x->k_win,
                                         x->v_win, x->k_cmp.x, x->v_cmp.x};
    memcpy(inputs, all, sizeof all);
}

/* 1 if rows of one cache can be copied to the other: equal dtypes, widths, rings and strides. */
static int nsa__same_geometry(const nsa_cache *a, const nsa_cache *b) {
    const nsa_desc *x = &a->desc, *y = &b->desc;
    return x->window == y->window && x->window_rule == y->window_rule &&
           x->kv_heads == y->kv_heads && x->dim == y->dim && x->dim_v == y->dim_v &&
           x->cmp_block == y->cmp_block && x->cmp_stride == y->cmp_stride &&
           a->k_slc.dtype == b->k_slc.dtype && a->max_rewind == b->max_rewind &&
           a->k_win.batch == b->k_win.batch && a->k_raw.batch == b->k_raw.batch;
}

/* A step sees what came before it, through one list for each kv head, and knows its own rows. */
static nsa_status nsa__check_decodes(const nsa_desc *d) {
    if (d->mask != NSA_MASK_CAUSAL) return nsa__error(NSA_ERROR_OPTION, NSA__AT_mask);
    if (nsa__list_heads(d) != d->kv_heads) return nsa__error(NSA_ERROR_HEADS, NSA__AT_list_heads);
    if (d->firsts || d->counts)
        return nsa__error(NSA_ERROR_OPTION, d->firsts ? NSA__AT_firsts : NSA__AT_counts);
    return d->pages ? nsa__error(NSA_ERROR_OPTION, NSA__AT_pages) : NSA_OK;
}

/* The widths of phi in a chain; `sizes_of` checks those of one phi. */
static nsa_status nsa__chain_check_sizes(const nsa_attention *x, const nsa_desc *d,
                                         nsa_status (*sizes_of)(const nsa_compress *x,
                                                                const nsa_desc *d, int base)) {
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(sizes_of(&x->k_cmp, d, NSA__TO_K_CMP));
    NSA__CHECK(sizes_of(&x->v_cmp, d, NSA__TO_V_CMP));
    if (x->k_cmp.dim != d->dim) return nsa__error(NSA_ERROR_SIZE, NSA__AT_k_cmp_dim);
    return x->v_cmp.dim != d->dim_v ? nsa__error(NSA_ERROR_SIZE, NSA__AT_v_cmp_dim) : NSA_OK;
}

/* What backward is not computed for: pages, and if `whole` sequences at positions of their own. */
static nsa_status nsa__check_backward(const nsa_desc *d, int whole) {
    if (d->pages) return nsa__error(NSA_ERROR_OPTION, NSA__AT_pages);
    return whole && d->firsts ? nsa__error(NSA_ERROR_OPTION, NSA__AT_firsts) : NSA_OK;
}

#endif /* NSA__SHARED_PARTS */

/* ==== Private, shared with nsa_cuda.cuh: the tensors of each public struct =======================

   A row a tensor: no check can forget one. nsa.h and nsa_cuda.cuh walk these tables, each with its
   own idea of shapes. Not here: what a list holds (lists.h). */

#if (defined(NSA_IMPLEMENTATION) || defined(NSA_CUDA_IMPLEMENTATION)) && !defined(NSA__SHARED_VIEWS)
#define NSA__SHARED_VIEWS

/* Rows: of queries by heads, gates or lists, or of keys, or of compressed keys. Then the numbers of
   a row. */
enum { NSA__OF_HEADS, NSA__OF_GATES, NSA__OF_LISTS, NSA__OF_KEYS, NSA__OF_BLOCKS };
enum {
    NSA__WIDE_DIM,
    NSA__WIDE_DIM_V,
    NSA__WIDE_ONE,
    NSA__WIDE_GATES,
    NSA__WIDE_LIST,
    NSA__WIDE_SLC,
    NSA__WIDE_CMP
};
/* What is read piece by piece, numbers one by one, gates, reals, lists: decides the dtypes. */
enum { NSA__AS_ROWS, NSA__AS_NUMBERS, NSA__AS_GATES, NSA__AS_REALS, NSA__AS_INTS };
enum {
    NSA__READ = 0,
    NSA__WRITTEN = 1, /* by forward; backward reads it */
    NSA__FORWARD = 2, /* backward does not look at it */
    NSA__OPTIONAL = 4 /* it may be absent */
};
enum { NSA__NONE, NSA__GIVEN, NSA__GIVEN_LSE, NSA__ADDED }; /* of dx: what becomes of it */

typedef struct nsa__view {
    size_t offset;
    unsigned char rows, width, as, use, gradient;
    int field;
} nsa__view;

#define NSA__VIEW(of, name, rows, width, as, use, gradient)                             \
    {                                                                                   \
        offsetof(nsa_##of, name), NSA__OF_##rows, NSA__WIDE_##width, NSA__AS_##as, use, \
            NSA__##gradient, NSA__AT_##name                                             \
    }

enum { NSA__ATTEND_VIEWS = 6 }; /* the last one is for slc alone */
static const nsa__view nsa__attend_views[NSA__ATTEND_VIEWS] = {
    NSA__VIEW(attend, q, HEADS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attend, k, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attend, v, KEYS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attend, out, HEADS, DIM_V, ROWS, NSA__WRITTEN, GIVEN),
    NSA__VIEW(attend, lse, HEADS, ONE, REALS, NSA__WRITTEN, GIVEN_LSE),
    NSA__VIEW(attend, blocks, LISTS, LIST, INTS, NSA__READ, NONE)};

enum { NSA__MERGE_VIEWS = 6 };
static const nsa__view nsa__merge_views[NSA__MERGE_VIEWS] = {
    NSA__VIEW(merge, out_a, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(merge, out_b, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(merge, lse_a, HEADS, ONE, REALS, NSA__READ, ADDED),
    NSA__VIEW(merge, lse_b, HEADS, ONE, REALS, NSA__READ, ADDED),
    NSA__VIEW(merge, out, HEADS, DIM_V, ROWS, NSA__WRITTEN | NSA__FORWARD, GIVEN),
    NSA__VIEW(merge, lse, HEADS, ONE, REALS, NSA__WRITTEN | NSA__FORWARD, GIVEN_LSE)};

enum { NSA__SELECT_VIEWS = 6 };
static const nsa__view nsa__select_views[NSA__SELECT_VIEWS] = {
    NSA__VIEW(select, q, HEADS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(select, k, KEYS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(select, lse, HEADS, ONE, REALS, NSA__READ, NONE),
    NSA__VIEW(select, scores, LISTS, SLC, REALS, NSA__WRITTEN | NSA__OPTIONAL, NONE),
    NSA__VIEW(select, p_cmp, LISTS, CMP, REALS, NSA__WRITTEN | NSA__OPTIONAL, NONE),
    NSA__VIEW(select, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE)};

enum { NSA__SCORE_VIEWS = 5 };
static const nsa__view nsa__score_views[NSA__SCORE_VIEWS] = {
    NSA__VIEW(score, q, HEADS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(score, k, KEYS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(score, weights, HEADS, ONE, NUMBERS, NSA__OPTIONAL, NONE),
    NSA__VIEW(score, scores, LISTS, SLC, REALS, NSA__WRITTEN | NSA__OPTIONAL, NONE),
    NSA__VIEW(score, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE)};

/* The same struct where its lists are given. */
static const nsa__view nsa__listed_views[NSA__SCORE_VIEWS] = {
    NSA__VIEW(score, q, HEADS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(score, k, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(score, weights, HEADS, ONE, NUMBERS, NSA__OPTIONAL, ADDED),
    NSA__VIEW(score, blocks, LISTS, LIST, INTS, NSA__READ, NONE),
    NSA__VIEW(score, scores, LISTS, LIST, REALS, NSA__WRITTEN | NSA__FORWARD, GIVEN)};

enum { NSA__RANK_VIEWS = 2 };
static const nsa__view nsa__rank_views[NSA__RANK_VIEWS] = {
    NSA__VIEW(rank, scores, LISTS, SLC, NUMBERS, NSA__READ, NONE),
    NSA__VIEW(rank, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE)};

enum { NSA__GATE_VIEWS = 5 };
static const nsa__view nsa__gate_views[NSA__GATE_VIEWS] = {
    NSA__VIEW(gate, logits, GATES, GATES, GATES, NSA__READ, ADDED),
    NSA__VIEW(gate, cmp, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(gate, slc, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(gate, win, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(gate, out, HEADS, DIM_V, ROWS, NSA__WRITTEN | NSA__FORWARD, GIVEN)};

/* Those of the whole, but for what only phi takes. The last two are the gate's, of any dtype. */
enum { NSA__ATTENTION_VIEWS = 16, NSA__GATE_AT = 14 };
static const nsa__view nsa__attention_views[NSA__ATTENTION_VIEWS] = {
    NSA__VIEW(attention, q, HEADS, DIM, ROWS, NSA__READ, ADDED),
    {offsetof(nsa_attention, k_cmp.out), NSA__OF_BLOCKS, NSA__WIDE_DIM, NSA__AS_ROWS, NSA__READ,
     NSA__NONE, NSA__AT_k_cmp_out},
    {offsetof(nsa_attention, v_cmp.out), NSA__OF_BLOCKS, NSA__WIDE_DIM_V, NSA__AS_ROWS, NSA__READ,
     NSA__NONE, NSA__AT_v_cmp_out},
    NSA__VIEW(attention, out_cmp, HEADS, DIM_V, ROWS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, lse_cmp, HEADS, ONE, REALS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, k_slc, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, v_slc, KEYS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, out_slc, HEADS, DIM_V, ROWS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, lse_slc, HEADS, ONE, REALS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, k_win, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, v_win, KEYS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, out_win, HEADS, DIM_V, ROWS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, lse_win, HEADS, ONE, REALS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, gates, GATES, GATES, GATES, NSA__READ, ADDED),
    NSA__VIEW(attention, out, HEADS, DIM_V, ROWS, NSA__WRITTEN | NSA__FORWARD, GIVEN)};
#undef NSA__VIEW

/* The check of a descriptor, what shapes are, how rows are checked that are read in pieces, and the
   sets of dtypes that tensors may have, and lse. */
typedef struct nsa__side {
    nsa_status (*desc)(const nsa_desc *d);
    nsa__shape (*queries)(const nsa_desc *d, int64_t heads, int64_t width);
    nsa__shape (*keys)(const nsa_desc *d, int compressed, int64_t width);
    nsa_status (*rows)(const nsa_tensor *x, nsa__shape shape, unsigned dtypes, int writes,
                       int field);
    unsigned floats, reals;
} nsa__side;

/* A call's views. */
typedef struct nsa__checked {
    const nsa__side *side;
    const nsa_desc *d;
    unsigned rows;  /* dtypes of rows; of keys and values alone those with a scale */
    int forward;    /* 0: backward */
    int compressed; /* keys are compressed blocks */
    int sums;       /* a gradient of a row that tokens, heads or sequences share is the sum */
} nsa__checked;

static nsa__shape nsa__view_shape(const nsa__checked *c, const nsa__view *v) {
    const nsa_desc *d = c->d;
    const int heads[] = {d->heads, d->gate_heads, nsa__list_heads(d)};
    const int widths[] = {d->dim,
                          d->dim_v,
                          1,
                          3,
                          nsa_block_list_width(d),
                          nsa_slc_count(d, d->tokens),
                          nsa_cmp_count(d, d->tokens)};
    if (v->rows < NSA__OF_KEYS) return c->side->queries(d, heads[v->rows], widths[v->width]);
    return c->side->keys(d, c->compressed || v->rows == NSA__OF_BLOCKS, widths[v->width]);
}

/* Checks a view of x, or of dx if the field says so. */
static nsa_status nsa__check_by(const nsa__checked *c, const nsa__view *v, const nsa_tensor *x,
                                unsigned dtypes, int writes, int field) {
    nsa__shape shape = nsa__view_shape(c, v);
    if (v->use & NSA__OPTIONAL && !shape.width) return NSA_OK; /* no block is to be had */
    if (c->sums && writes && field & NSA__GRADIENT) {
        if (!x->token && shape.rows > 1) shape.rows = 1;
        if (!x->head) shape.heads = 1;
        if (!x->batch && shape.batch > 1) shape.batch = 1;
    }
    if (v->as == NSA__AS_GATES) return nsa__check_gates(x, c->d, shape, dtypes, writes, field);
    return (v->as == NSA__AS_ROWS ? c->side->rows : nsa__check_view)(x, shape, dtypes, writes,
                                                                     field);
}

static unsigned nsa__view_dtypes(const nsa__checked *c, const nsa__view *v) {
    const unsigned floats = c->side->floats;
    const unsigned others = v->rows >= NSA__OF_KEYS ? 0 : NSA__SCALED;
    const unsigned dtypes[] = {c->rows & ~others, floats, floats, c->side->reals, NSA__INTS};
    return dtypes[v->as];
}

/* The view in a struct of the table. */
static const nsa_tensor *nsa__view_in(const void *of, const nsa__view *v) {
    return (const nsa_tensor *)(const void *)((const char *)of + v->offset);
}

/* A gradient's dtype is its tensor's or the real one. The range of the tensor's dtype is tested,
   because a tensor that backward does not read is unchecked. */
static unsigned nsa__gradient_dtypes(const nsa__side *side, const nsa_tensor *x) {
    return side->reals | ((unsigned)x->dtype > NSA_F8 ? 0 : 1u << x->dtype & side->floats);
}

/* The first n views of a struct x. */
static nsa_status nsa__check_views(const nsa__checked *c, const nsa__view *views, int n,
                                   const void *x) {
    for (int i = 0; i < n; i++) {
        const nsa__view *v = &views[i];
        const nsa_tensor *view = nsa__view_in(x, v);
        if (v->use & NSA__FORWARD && !c->forward) continue;
        if (v->use & NSA__OPTIONAL && !view->data) continue;
        NSA__CHECK(nsa__check_by(c, v, view, nsa__view_dtypes(c, v),
                                 v->use & NSA__WRITTEN && c->forward, v->field));
    }
    return NSA_OK;
}

/* The gradients in dx: first those that are given, of which dx.lse may be absent, then those that
   are asked for. A caller who fills dx by copying x leaves forward's lse in dx.lse, where it would
   be taken for a gradient. */
static nsa_status nsa__check_gradients(const nsa__checked *c, const nsa__view *views, int n,
                                       const void *dx, const void *x) {
    for (int adds = 0; adds < 2; adds++)
        for (int i = 0; i < n; i++) {
            const nsa__view *v = &views[i];
            const nsa_tensor *of = nsa__view_in(x, v), *to = nsa__view_in(dx, v);
            const int field = v->field | NSA__GRADIENT;
            if (v->gradient == NSA__NONE || adds != (v->gradient == NSA__ADDED)) continue;
            if (v->gradient != NSA__GIVEN && !to->data) continue;
            if (v->gradient == NSA__GIVEN_LSE && to->data == of->data)
                return nsa__error(NSA_ERROR_SHARED, field);
            const unsigned dtypes =
                adds ? nsa__gradient_dtypes(c->side, of) : nsa__view_dtypes(c, v) | c->side->reals;
            NSA__CHECK(nsa__check_by(c, v, to, dtypes, adds, field));
        }
    return NSA_OK;
}

/* What an entry looks at first: its descriptor, x, of backward dx, then the views of both. */
static nsa_status nsa__check_call(const nsa__checked *c, const nsa__view *views, int n,
                                  const void *dx, const void *x) {
    NSA__CHECK(c->side->desc(c->d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (!c->forward && !dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    for (int i = 0; !c->forward && i < n; i++)
        if (views[i].rows == NSA__OF_KEYS) NSA__CHECK(nsa__check_backward(c->d, 0));
    NSA__CHECK(nsa__check_views(c, views, n, x));
    return c->forward ? NSA_OK : nsa__check_gradients(c, views, n, dx, x);
}

/* Checks the options of scores, and makes *d the descriptor for keys of `stride` tokens. */
static nsa_status nsa__score_options(const nsa_score *x, int uses, const nsa_desc **d,
                                     nsa_desc *own) {
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (x->stride < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_stride);
    if ((unsigned)x->act > NSA_SCORE_RELU) return nsa__error(NSA_ERROR_OPTION, NSA__AT_act);
    if ((unsigned)x->pool > NSA_POOL_MEAN) return nsa__error(NSA_ERROR_OPTION, NSA__AT_pool);
    *d = nsa__desc_using(*d, uses, own);
    own->cmp_block = own->cmp_stride = x->stride ? x->stride : 1;
    return NSA_OK;
}

/* A gradient that is asked for. */
static nsa_status nsa__check_gradient(const nsa__side *side, const nsa_tensor *dx,
                                      const nsa_tensor *x, nsa__shape shape, int field) {
    if (!dx->data) return NSA_OK;
    return side->rows(dx, shape, nsa__gradient_dtypes(side, x), 1, field | NSA__GRADIENT);
}

/* RoPE's width is an option, so its views stand in no table. */
static nsa_status nsa__rope_check(const nsa__side *side, const nsa_rope *dx, const nsa_rope *x,
                                  const nsa_desc *d, int backward) {
    NSA__CHECK(side->desc(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__rope_check_options(x));
    if (!nsa__fits(d->batch, d->tokens, x->heads, x->dim))
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_heads);
    const nsa__shape shape = side->queries(d, x->heads, x->dim), one = side->queries(d, 1, 1);
    if (x->positions.data)
        NSA__CHECK(nsa__check_view(&x->positions, one, NSA__INTS, 0, NSA__AT_positions));
    if (!backward) {
        NSA__CHECK(side->rows(&x->x, shape, side->floats, 0, NSA__AT_x));
        return side->rows(&x->out, shape, side->floats, 1, NSA__AT_out);
    }
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(side->rows(&dx->out, shape, side->floats, 0, NSA__AT_out | NSA__GRADIENT));
    return nsa__check_gradient(side, &dx->x, &x->x, shape, NSA__AT_x);
}

/* phi's parameters, the one list of them. */
enum { NSA__W1, NSA__B1, NSA__POS, NSA__W2, NSA__B2, NSA__PARAMETERS };
typedef struct nsa__parameter {
    const nsa_tensor *x, *dx; /* the caller's views; dx is x if no gradient is computed */
    int64_t rows;             /* for one head: rows of `width` numbers */
    int width, optional, field;
} nsa__parameter;

static int nsa__parameters(const nsa_compress *dx, const nsa_compress *x, const nsa_desc *d,
                           nsa__parameter list[NSA__PARAMETERS]) {
    const int l = d->cmp_block, mlp = x->phi == NSA_PHI_MLP;
    if (!dx) dx = x;
    const nsa__parameter all[NSA__PARAMETERS] = {
        {&x->w1, &dx->w1, mlp ? x->hidden : l, mlp ? l * x->dim : x->dim, 0, NSA__AT_w1},
        {&x->b1, &dx->b1, 1, mlp ? x->hidden : x->dim, 1, NSA__AT_b1},
        {&x->pos, &dx->pos, l, x->dim, 1, NSA__AT_pos},
        {&x->w2, &dx->w2, x->dim, x->hidden, 0, NSA__AT_w2},
        {&x->b2, &dx->b2, 1, x->dim, 1, NSA__AT_b2}};
    memcpy(list, all, sizeof all);
    return mlp ? 5 : x->phi == NSA_PHI_CONV ? 2 : 0;
}

/* The views of phi. `base` is 0, or NSA__TO_K_CMP or NSA__TO_V_CMP in the chain. Backward of the
   mean does not read x. */
static nsa_status nsa__check_phi(const nsa__checked *c, const nsa_compress *x, int base) {
    nsa__parameter list[NSA__PARAMETERS];
    if (c->forward || x->phi != NSA_PHI_MEAN)
        NSA__CHECK(
            c->side->rows(&x->x, c->side->keys(c->d, 0, x->dim), c->rows, 0, base + NSA__AT_x));
    if (c->forward)
        NSA__CHECK(
            c->side->rows(&x->out, c->side->keys(c->d, 1, x->dim), c->rows, 1, base + NSA__AT_out));
    for (int i = 0, count = nsa__parameters(NULL, x, c->d, list); i < count; i++) {
        const nsa__shape shape = {1, list[i].rows, c->d->kv_heads, list[i].width};
        if (list[i].optional && !list[i].x->data) continue;
        NSA__CHECK(c->side->rows(list[i].x, shape, c->rows & ~(unsigned)NSA__SCALED, 0,
                                 base + list[i].field));
    }
    return NSA_OK;
}

/* A gradient whose head stride is 0 sums over the heads: then its view has one head, and its rows
   are apart. */
static nsa_status nsa__check_phi_gradient(const nsa__side *side, const nsa_compress *dx,
                                          const nsa_compress *x, const nsa_desc *d, int base) {
    nsa__parameter list[NSA__PARAMETERS];
    NSA__CHECK(
        nsa__check_gradient(side, &dx->x, &x->x, side->keys(d, 0, x->dim), base + NSA__AT_x));
    for (int i = 0, count = nsa__parameters(dx, x, d, list); i < count; i++) {
        const int heads = list[i].dx->head ? d->kv_heads : 1;
        const nsa__shape shape = {1, list[i].rows, heads, list[i].width};
        NSA__CHECK(nsa__check_gradient(side, list[i].dx, list[i].x, shape, base + list[i].field));
    }
    return NSA_OK;
}

/* Rows of a ring that always holds the last `needed` rows and max_rewind before them; a cache of
   fewer tokens needs no more rows than tokens. */
static int nsa__ring_rows(const nsa_desc *d, int64_t needed, int max_rewind) {
    const int64_t rows = needed + max_rewind < d->tokens ? needed + max_rewind : d->tokens;
    return (int)(rows > 1 ? rows : 1);
}

/* The table of the cache's arrays, in the order of the enum. */
static void nsa__cache_parts(nsa_cache *c, nsa__cache_part parts[NSA__PARTS]) {
    const nsa_desc *d = &c->desc;
    int64_t window = (int64_t)d->window + (d->window_rule == NSA_WINDOW_BEFORE_SELF);
    int win = nsa__ring_rows(d, window, c->max_rewind);
    int raw = nsa__ring_rows(d, d->cmp_block, c->max_rewind);
    int cmp = nsa_cmp_count(d, d->tokens);
    const nsa__cache_part table[NSA__PARTS] = {
        {&c->k_slc, d->tokens, d->dim, 0}, {&c->v_slc, d->tokens, d->dim_v, 0},
        {&c->k_win, win, d->dim, win},     {&c->v_win, win, d->dim_v, win},
        {&c->k_raw, raw, d->dim, raw},     {&c->v_raw, raw, d->dim_v, raw},
        {&c->k_cmp, cmp, d->dim, 0},       {&c->v_cmp, cmp, d->dim_v, 0}};
    memcpy(parts, table, sizeof table);
}

static nsa_status nsa__check_inputs(const nsa__side *side, const nsa_attention *x,
                                    const nsa_desc *d) {
    static const int fields[NSA__INPUTS] = {NSA__AT_k_slc, NSA__AT_v_slc,   NSA__AT_k_win,
                                            NSA__AT_v_win, NSA__AT_k_cmp_x, NSA__AT_v_cmp_x};
    nsa_tensor inputs[NSA__INPUTS];
    nsa__cache_inputs(x, inputs);
    for (int i = 0; i < NSA__INPUTS; i++) {
        const nsa__shape shape = {d->batch, d->count, d->kv_heads, i % 2 ? d->dim_v : d->dim};
        NSA__CHECK(side->rows(&inputs[i], shape, side->floats, 0, fields[i]));
    }
    return NSA_OK;
}

#endif /* NSA__SHARED_VIEWS */

/* ==== Implementation ============================================================================

   A section is a file of nsa/src, which includes what it uses; so it uses only sections above it.
   Public functions check their arguments; below them every argument is trusted.

   CONTRIBUTING.md has the words, each with one meaning. */
#if defined(NSA_IMPLEMENTATION) && !defined(NSA__IMPLEMENTED)
#define NSA__IMPLEMENTED

/* What the implementation takes of the system. Twin: none. Not here: what the interface takes
   (api.h), and what both sides share (shared.h). */

#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#define NSA__HAS_SCHED
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Rows and numbers: the one place that knows dtypes ------------------------------------------
   Twin: kernels/rows.cuh. Not here: which rows a sequence has (sequences.h). */

#define NSA__LOG2E 1.4426950408889634074
/* Stands for "no maximum yet". Finite, so that no difference of two maxima is inf - inf. */
#define NSA__LOWEST ((nsa_real)(sizeof(nsa_real) == sizeof(double) ? -DBL_MAX : -FLT_MAX))

/* Numbers of the widest vector, AVX-512's in f32. Packed rows are padded to multiples of it. */
enum { NSA__LANES = 16 };

/* Integers as wide as nsa_real. Their names are pasted together from the text of NSA_REAL, because
   the preprocessor knows no sizeof. */
#define NSA__BITS_float       32
#define NSA__BITS_double      64
#define NSA__INT_(bits, kind) kind##bits##_t
#define NSA__INT(bits, kind)  NSA__INT_(bits, kind)
#define NSA__REAL_BITS_(real) NSA__BITS_##real
#define NSA__REAL_BITS(real)  NSA__REAL_BITS_(real)
typedef NSA__INT(NSA__REAL_BITS(NSA_REAL), int) nsa__lane;
typedef NSA__INT(NSA__REAL_BITS(NSA_REAL), uint) nsa__bits_t;

#if defined(__GNUC__) || defined(__clang__)
#define NSA__INLINE   static inline __attribute__((__always_inline__))
#define NSA__NOINLINE __attribute__((__noinline__))
#else
#define NSA__INLINE static inline
#define NSA__NOINLINE
#endif

NSA__INLINE float nsa__float_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

NSA__INLINE uint32_t nsa__float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Volatile, because under -ffast-math clang 19 takes a function that is known to return one
   of them for one that returns anything. */
static nsa_real nsa__nan(void) {
    const volatile uint32_t bits = 0x7fc00000u;
    return (nsa_real)nsa__float_from_bits(bits);
}
static nsa_real nsa__minus_infinity(void) {
    const volatile uint32_t bits = 0xff800000u;
    return (nsa_real)nsa__float_from_bits(bits);
}

/* What loops call is inlined: a public function that a shared library exports never is. */
NSA__INLINE float nsa__from_bf16(uint16_t x) {
    return nsa__float_from_bits((uint32_t)x << 16);
}

/* bf16 is the upper half of an f32. The code adds 0x7fff, and 1 more if the kept half is odd. That
   carries into the kept half exactly if it must be rounded up: to nearest, ties to even. A carry
   out of the mantissa raises the exponent, at the end to infinity, as it must. The bit 0x40 makes a
   NaN quiet; without it a NaN whose payload lies in the lower half would become infinity. */
NSA__INLINE uint16_t nsa__to_bf16(float x) {
    uint32_t bits = nsa__float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40); /* a quiet NaN */
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* f16 has 5 bits of exponent with bias 15 and 10 of mantissa, f32 has 8 with bias 127 and 23: the
   exponent grows by 112, the mantissa moves up by 13 bits. No branches, so that a compiler makes
   vectors of a loop over it. A subnormal number is a difference of normal ones, because -ffast-math
   may take subnormal floats for 0. */
NSA__INLINE float nsa__from_f16(uint16_t x) {
    const uint32_t least = 113u << 23; /* 2^-14, the least normal number */
    uint32_t rest = (uint32_t)(x & 0x7fffu) << 13, exponent = rest >> 23;
    uint32_t subnormal =
        nsa__float_bits(nsa__float_from_bits(rest | least) - nsa__float_from_bits(least));
    uint32_t is_subnormal = 0u - (uint32_t)(exponent == 0),
             is_infinite = 0u - (uint32_t)(exponent == 31);
    uint32_t normal = rest + (112u << 23) + (is_infinite & 112u << 23);
    return nsa__float_from_bits((uint32_t)(x & 0x8000u) << 16 | (is_subnormal & subnormal) |
                                (~is_subnormal & normal));
}

/* The magnitude of an f32 to nearest, ties to even, in a format with `drop` bits less of mantissa
   and a bias that is smaller by `less`. Exponent and mantissa are rounded as one integer, so that a
   carry out of the mantissa raises the exponent. A subnormal number is the lower bits of a sum with
   the number whose last place is the format's smallest step. What is too large for the format is
   the caller's. No branches, as above. */
NSA__INLINE uint32_t nsa__round_to(uint32_t magnitude, int drop, uint32_t less) {
    const uint32_t least = (less + 1) << 23, step = least + ((uint32_t)drop << 23);
    uint32_t subnormal =
        nsa__float_bits(nsa__float_from_bits(magnitude) + nsa__float_from_bits(step)) - step;
    uint32_t normal = magnitude - (less << 23) + (1u << (drop - 1)) - 1 + (magnitude >> drop & 1);
    uint32_t is_subnormal = 0u - (uint32_t)(magnitude < least);
    return (is_subnormal & subnormal) | (~is_subnormal & normal >> drop);
}

/* 0x477ff000 is 65520, halfway between the largest f16 and 65536. */
NSA__INLINE uint16_t nsa__to_f16(float x) {
    uint32_t bits = nsa__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = nsa__round_to(magnitude, 13, 112);
    if (magnitude >= 0x477ff000u) rounded = 0x7c00u; /* rounds to 65536 or beyond */
    if (magnitude > 0x7f800000u) rounded = 0x7e00u;
    return (uint16_t)((bits >> 16 & 0x8000u) | rounded);
}

/* e4m3 as f16, divided by 256: a mantissa that is 7 bits shorter, an exponent whose bias is 7. */
NSA__INLINE float nsa__from_f8(unsigned char x) {
    const int nan = (x & 0x7f) == 0x7f;
    return nsa__from_f16((uint16_t)((x & 0x80) << 8 | (x & 0x7f) << 7 | (nan ? 0x7c00 : 0))) * 256;
}

/* The scale of column c of a row of n numbers of 8 bits. */
NSA__INLINE float nsa__row_scale(const void *row, int n, int c) {
    float scale;
    memcpy(&scale, (const char *)row + n + c / NSA__SCALE_COLUMNS * (int)sizeof scale,
           sizeof scale);
    return scale;
}

NSA_API float nsa_bf16_to_f32(uint16_t x) {
    return nsa__from_bf16(x);
}
NSA_API uint16_t nsa_f32_to_bf16(float x) {
    return nsa__to_bf16(x);
}
NSA_API float nsa_f16_to_f32(uint16_t x) {
    return nsa__from_f16(x);
}
NSA_API uint16_t nsa_f32_to_f16(float x) {
    return nsa__to_f16(x);
}

/* The address of a row: the one place that turns strides, which count elements, into bytes. */
static void *nsa__row(const nsa_tensor *x, int64_t batch, int64_t row, int64_t head) {
    int64_t element = x->batch * batch + x->token * row + x->head * head;
    return (char *)x->data + (ptrdiff_t)element * (ptrdiff_t)nsa__dtype_bytes(x->dtype);
}

static size_t nsa__row_bytes(const nsa_tensor *x, int width) {
    return (size_t)nsa__row_elements(x->dtype, width) * nsa__dtype_bytes(x->dtype);
}

#if defined(__GNUC__) || defined(__clang__)
#define NSA__PREFETCH(at, locality) __builtin_prefetch(at, 0, locality)
#define NSA__HAS_EFFECT             __asm__ __volatile__("")
#else
#define NSA__PREFETCH(at, locality) (void)(at)
#define NSA__HAS_EFFECT             (void)0
#endif

/* malloc's rows begin within a line. A macro, because clang 14 fails at -O0 where the locality is
   no constant. */
#define NSA__FETCH(at, bytes, locality)                                             \
    do {                                                                            \
        const char *from = (const char *)(at);                                      \
        for (size_t i = 0; i < (bytes); i += 64) NSA__PREFETCH(from + i, locality); \
        if (bytes) NSA__PREFETCH(from + (bytes)-1, locality);                       \
    } while (0)

/* Prefetches memory into L1, or into L2. Rows of one head are a row of all heads apart, which is
   further than the hardware prefetches. To GCC a function that only prefetches has no effect, so
   that it removes calls of it; the empty instruction is one. */
static void nsa__fetch(const void *at, size_t bytes) {
    NSA__HAS_EFFECT;
    NSA__FETCH(at, bytes, 3);
}
static void nsa__fetch_l2(const void *at, size_t bytes) {
    NSA__HAS_EFFECT;
    NSA__FETCH(at, bytes, 2);
}

/* A user's -O0, -ffast-math or -std=c99 must not reach what is hot. GCC takes the level and the
   rules of arithmetic by attribute, clang takes the rules by pragma. With clang's `on` a product
   and the sum in the same expression are always one rounding. With `fast` they are so only within
   one block of code; sanitizers split blocks, and bits that must be equal would differ. */
#if defined(__clang__)
#define NSA__COMPILED
#define NSA__ARITHMETIC _Pragma("clang fp reassociate(off) contract(on)")
/* elsewhere clang warns that it cannot */
#if defined(__x86_64__) || (defined(__aarch64__) && __clang_major__ >= 16)
#define NSA__QUOTIENTS _Pragma("float_control(precise, on)")
#endif
#elif defined(__GNUC__)
#define NSA__COMPILED \
    __attribute__((__optimize__("O3", "fp-contract=fast", "no-fast-math", "align-loops=64")))
#define NSA__ARITHMETIC
#else
#define NSA__COMPILED
#define NSA__ARITHMETIC
#endif
#ifndef NSA__QUOTIENTS /* of rows of 8 bits are no products with a reciprocal */
#define NSA__QUOTIENTS
#endif

/* Before a loop of few, known turns over an array that shall become registers. Unless GCC unrolls
   such loops first of all, it keeps the array in memory, as clang does at -O2. With a sanitizer's
   checks between them clang would take minutes. */
#if defined(__clang__) && !defined(__CUDACC__)
#if __has_feature(undefined_behavior_sanitizer)
#define NSA__UNROLL
#else
#define NSA__UNROLL _Pragma("clang loop unroll(full)")
#endif
#elif defined(__GNUC__) && __GNUC__ >= 8 && !defined(__CUDACC__)
#define NSA__UNROLL _Pragma("GCC unroll 16")
#else
#define NSA__UNROLL
#endif

static nsa_real nsa__exp2(nsa_real x) {
    return sizeof x == sizeof(double) ? (nsa_real)exp2((double)x) : (nsa_real)exp2f((float)x);
}

/* Loads numbers i to n - 1 of a row of n as reals. */
NSA__INLINE void nsa__widen(nsa_real *to, nsa_dtype dtype, const void *row, int i, int n) {
    const uint16_t *half = (const uint16_t *)row;
    const signed char *eighth = (const signed char *)row;
    switch (dtype) {
    case NSA_F32:
        for (; i < n; i++) to[i] = (nsa_real)((const float *)row)[i];
        break;
    case NSA_F64:
        for (; i < n; i++) to[i] = (nsa_real)((const double *)row)[i];
        break;
    case NSA_BF16:
        for (; i < n; i++) to[i] = (nsa_real)nsa__from_bf16(half[i]);
        break;
    case NSA_F16:
        for (; i < n; i++) to[i] = (nsa_real)nsa__from_f16(half[i]);
        break;
    case NSA_I8:
    case NSA_F8:
        for (int end; i < n; i = end) { /* the columns of a scale */
            const nsa_real scale = (nsa_real)nsa__row_scale(row, n, i);
            end = (i / NSA__SCALE_COLUMNS + 1) * NSA__SCALE_COLUMNS;
            end = end < n ? end : n;
            for (int j = i; dtype == NSA_I8 && j < end; j++) to[j] = (nsa_real)eighth[j] * scale;
            for (int j = i; dtype == NSA_F8 && j < end; j++)
                to[j] = (nsa_real)nsa__from_f8((unsigned char)eighth[j]) * scale;
        }
        break;
    case NSA_I32:
        break;
    }
}

NSA__COMPILED static void nsa__load(nsa_real *to, nsa_dtype dtype, const void *row, int n) {
    nsa__widen(to, dtype, row, 0, n);
}

/* The scale of n numbers: what the format's largest number is multiplied by to give theirs. Rounded
   down where that product would be infinite; 0 rather than subnormal, which -ffast-math may take
   for 0. NaN where one of the numbers is not finite. */
NSA__COMPILED static float nsa__scale_of(nsa_dtype dtype, const nsa_real *x, int n) {
    NSA__QUOTIENTS
    const float largest = dtype == NSA_I8 ? 127 : 448;
    uint32_t most = 0, bits;
    for (int i = 0; i < n; i++) {
        bits = nsa__float_bits((float)x[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    if (most >= 0x7f800000u) return (float)nsa__nan();
    bits = nsa__float_bits(nsa__float_from_bits(most) / largest);
    if ((double)nsa__float_from_bits(bits) * (double)largest > FLT_MAX) bits--;
    return nsa__float_from_bits(bits < 0x00800000u ? 0 : bits);
}

/* x in units of a scale, |x| <= 127 or 448 of them but for rounding. The sum with 2^23 rounds to
   whole numbers. */
NSA__INLINE unsigned char nsa__to_scaled(nsa_dtype dtype, float x) {
    const uint32_t bits = nsa__float_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t rounded = nsa__float_bits(nsa__float_from_bits(magnitude) + 8388608.0f) & 0xff;
    if (dtype == NSA_I8) return (unsigned char)(bits >> 31 ? 0u - rounded : rounded);
    rounded = nsa__round_to(magnitude, 20, 120);
    return (unsigned char)((bits >> 24 & 0x80) | (rounded < 0x7e ? rounded : 0x7e));
}

/* Writes a row of 8 bits and its scales. Numbers whose scale is 0 or NaN are zeros. */
NSA__COMPILED static void nsa__store_scaled(nsa_dtype dtype, unsigned char *row,
                                            const nsa_real *from, int n) {
    NSA__QUOTIENTS
    for (int begin = 0; begin < n; begin += NSA__SCALE_COLUMNS) {
        const int end = n - begin < NSA__SCALE_COLUMNS ? n : begin + NSA__SCALE_COLUMNS;
        const float scale = nsa__scale_of(dtype, from + begin, end - begin);
        const int none = nsa__float_bits(scale) == 0 || !nsa__is_finite((double)scale);
        memcpy(row + n + begin / NSA__SCALE_COLUMNS * (int)sizeof scale, &scale, sizeof scale);
        for (int i = begin; i < end; i++)
            row[i] = none ? 0 : nsa__to_scaled(dtype, (float)from[i] / scale);
    }
}

/* f64 reaches bf16 and f16 through f32, so it is rounded twice there. */
NSA__COMPILED static void nsa__store(nsa_dtype dtype, void *row, const nsa_real *from, int n) {
    uint16_t *half = (uint16_t *)row;
    switch (dtype) {
    case NSA_F32:
        for (int i = 0; i < n; i++) ((float *)row)[i] = (float)from[i];
        break;
    case NSA_F64:
        for (int i = 0; i < n; i++) ((double *)row)[i] = (double)from[i];
        break;
    case NSA_BF16:
        for (int i = 0; i < n; i++) half[i] = nsa__to_bf16((float)from[i]);
        break;
    case NSA_F16:
        for (int i = 0; i < n; i++) half[i] = nsa__to_f16((float)from[i]);
        break;
    case NSA_I8:
    case NSA_F8:
        nsa__store_scaled(dtype, (unsigned char *)row, from, n);
        break;
    case NSA_I32:
        break;
    }
}

/* row += factor * from, summed in the real dtype and rounded once. Rows of w1 in a compress can be
   longer than NSA__MAX_DIM, so the sum is taken piece by piece. */
NSA__COMPILED static void nsa__add(nsa_dtype dtype, void *row, nsa_real factor,
                                   const nsa_real *from, int n) {
    nsa_real sum[NSA__MAX_DIM];
    for (int at = 0; at < n; at += NSA__MAX_DIM) {
        int part = n - at < NSA__MAX_DIM ? n - at : NSA__MAX_DIM;
        void *to = (char *)row + (size_t)at * nsa__dtype_bytes(dtype);
        nsa__load(sum, dtype, to, part);
        for (int i = 0; i < part; i++) sum[i] += factor * from[at + i];
        nsa__store(dtype, to, sum, part);
    }
}

/* Of the bits of a number, or of many: the exponent plus one, which sets the sign bit if all of the
   exponent is ones: infinity or NaN. So an and, an add and an or find out about many numbers. Every
   vector unit has these three for integers; SSE2 has no integer maximum. */
#define NSA__SIGN                 ((nsa__bits_t)1 << (8 * sizeof(nsa_real) - 1))
#define NSA__EXPONENT             ((nsa__bits_t)1 << (sizeof(nsa_real) == 8 ? 52 : 23))
#define NSA__INFINITY             (NSA__SIGN - NSA__EXPONENT)
#define NSA__EXPONENT_CARRY(bits) (((bits)&NSA__INFINITY) + NSA__EXPONENT)

/* sum += factor * row */
NSA__COMPILED static void nsa__add_to(nsa_real *sum, nsa_real factor, nsa_dtype dtype,
                                      const void *row, int n) {
    nsa_real x[NSA__MAX_DIM];
    nsa__load(x, dtype, row, n);
    for (int i = 0; i < n; i++) sum[i] += factor * x[i];
}

/* Adds up 16 partial sums by halves. The order is written out, so that a compiler's choice of
   vectors changes no bit. */
NSA__INLINE nsa_real nsa__sum_parts(nsa_real part[NSA__LANES]) {
    NSA__ARITHMETIC
    NSA__UNROLL
    for (int half = NSA__LANES / 2; half; half /= 2) {
        NSA__UNROLL
        for (int j = 0; j < half; j++) part[j] += part[j + half];
    }
    return part[0];
}

/* a . b, in 16 partial sums; n is a multiple of 16. */
NSA__COMPILED static nsa_real nsa__dot(const nsa_real *a, const nsa_real *b, int n) {
    nsa_real part[NSA__LANES] = {0};
    for (int i = 0; i < n; i += NSA__LANES)
        for (int j = 0; j < NSA__LANES; j++) part[j] += a[i + j] * b[i + j];
    return nsa__sum_parts(part);
}

/* Copies a row of bf16 as pairs, with zeros up to `wide` numbers. A non-finite row becomes zeros
   and returns 0. */
NSA__COMPILED static int nsa__copy_finite_pairs(nsa_real *to, const void *row, int n, int wide) {
    uint32_t any = 0;
    memset((uint16_t *)to + n, 0, (size_t)(wide - n) * sizeof(uint16_t));
    memcpy(to, row, (size_t)n * sizeof(uint16_t));
    for (int i = 0; i < wide / 2; i++) {
        uint32_t pair;
        memcpy(&pair, to + i, sizeof pair);
        any |= (pair & 0x7f807f80u) + 0x00800080u; /* NSA__EXPONENT_CARRY of two */
    }
    if (!(any & 0x80008000u)) return 1;
    memset(to, 0, (size_t)wide * sizeof(uint16_t));
    return 0;
}

static nsa_real nsa__sigmoid(nsa_real x) {
    return (nsa_real)(1 / (1 + exp(-(double)x)));
}

/* Bytes from one of a head's gates to the next, in a view of that dtype. */
static ptrdiff_t nsa__gates_apart(const nsa_tensor *x, const nsa_desc *d) {
    return (ptrdiff_t)nsa__gate_stride(d) * (ptrdiff_t)nsa__dtype_bytes(x->dtype);
}

static void nsa__load_gates(nsa_real g[3], const nsa_tensor *x, const nsa_desc *d, int64_t batch,
                            int64_t row, int64_t head) {
    const char *at = (const char *)nsa__row(x, batch, row, head);
    ptrdiff_t apart = nsa__gates_apart(x, d);
    for (int i = 0; i < 3; i++) nsa__load(&g[i], x->dtype, at + i * apart, 1);
}

static void nsa__add_gates(const nsa_tensor *x, const nsa_desc *d, int64_t batch, int64_t row,
                           int64_t head, const nsa_real dg[3]) {
    char *at = (char *)nsa__row(x, batch, row, head);
    ptrdiff_t apart = nsa__gates_apart(x, d);
    for (int i = 0; i < 3; i++) nsa__add(x->dtype, at + i * apart, 1, &dg[i], 1);
}

/* Turns three logits into the weights g of Eq. 5; without a gate function the logits are g. Softmax
   subtracts the maximum, so that exp cannot overflow. */
static void nsa__gate_weights(nsa_gate_kind kind, nsa_real g[3]) {
    if (kind == NSA_GATE_SIGMOID)
        for (int i = 0; i < 3; i++) g[i] = nsa__sigmoid(g[i]);
    if (kind == NSA_GATE_SOFTMAX) {
        nsa_real most = g[0] > g[1] ? g[0] : g[1], sum = 0;
        most = most > g[2] ? most : g[2];
        for (int i = 0; i < 3; i++) sum += g[i] = (nsa_real)exp((double)(g[i] - most));
        for (int i = 0; i < 3; i++) g[i] /= sum;
    }
}

/* Arguments are int64_t, so that sums and products are compared before they are narrowed to int. */
static int64_t nsa__min(int64_t a, int64_t b) {
    return a < b ? a : b;
}
static int64_t nsa__max(int64_t a, int64_t b) {
    return a > b ? a : b;
}
static int64_t nsa__ceil_div(int64_t a, int64_t b) {
    return (a + b - 1) / b;
}

/* Numbers of a row in whole vectors. */
static int nsa__whole_vectors(int width) {
    return (int)nsa__ceil_div(width, NSA__LANES) * NSA__LANES;
}

NSA_API nsa_tensor nsa_tensor_bthd(void *data, nsa_dtype dtype, int tokens, int heads, int width) {
    const int64_t row = nsa__row_elements(dtype, width);
    const nsa_tensor x = {data, dtype, row * heads * tokens, row * heads, row};
    return x;
}

NSA_API nsa_tensor nsa_tensor_bhtd(void *data, nsa_dtype dtype, int tokens, int heads, int width) {
    const int64_t row = nsa__row_elements(dtype, width);
    const nsa_tensor x = {data, dtype, row * tokens * heads, row, row * tokens};
    return x;
}

/* ---- Block index: closed forms ------------------------------------------------------------------
   Twin: kernels/block_index.cuh. Not here: the same as arrays (index_arrays.h). */

/* N(tokens): compressed block i covers tokens i d .. i d + l - 1 and exists if all of them do, so i
   <= (tokens - l) / d. */
NSA_API int nsa_cmp_count(const nsa_desc *d, int tokens) {
    return tokens < d->cmp_block ? 0 : (tokens - d->cmp_block) / d->cmp_stride + 1;
}

/* Tokens before this one are visible to `query` of a sequence of `tokens`. Causality
   enters here alone: visible compressed blocks, candidates and the end of spans follow from it. */
static int nsa__visible_end(const nsa_desc *d, int tokens, int query) {
    return d->mask == NSA_MASK_NONE ? tokens : query + 1;
}

static int nsa__cmp_visible(const nsa_desc *d, int tokens, int query) {
    return nsa_cmp_count(d, nsa__visible_end(d, tokens, query));
}

NSA_API int nsa_cmp_visible(const nsa_desc *d, int query) {
    return nsa__cmp_visible(d, d->tokens, query);
}

NSA_API int nsa_slc_count(const nsa_desc *d, int tokens) {
    return (int)nsa__ceil_div(tokens, d->slc_block);
}

/* The tokens that t sees of the block at its end, if the block is not whole; only there. */
static int nsa__slc_tail(const nsa_desc *d, int tokens, int query) {
    return nsa__visible_end(d, tokens, query) % d->slc_block;
}

static int nsa__slc_candidates(const nsa_desc *d, int tokens, int query) {
    int without_tail = d->forced == NSA_FORCED_TAIL && !d->slc_local;
    int tail = without_tail ? nsa__slc_tail(d, tokens, query) : 0;
    return nsa_slc_count(d, nsa__visible_end(d, tokens, query) - tail);
}

NSA_API int nsa_slc_candidates(const nsa_desc *d, int query) {
    return nsa__slc_candidates(d, d->tokens, query);
}

NSA_API int nsa_window_begin(const nsa_desc *d, int query) {
    int64_t before = (int64_t)d->window - (d->window_rule == NSA_WINDOW_COUNTS_SELF);
    return (int)nsa__max(0, query - before);
}

/* One behind the window's last token. With a mask that token is the query; without one the window
   reaches as far ahead as back. */
static int nsa__window_end(const nsa_desc *d, int tokens, int query) {
    int64_t ahead = (int64_t)d->window + (d->window_rule == NSA_WINDOW_BEFORE_SELF);
    int end = nsa__visible_end(d, tokens, query);
    return d->mask == NSA_MASK_NONE ? (int)nsa__min(end, query + ahead) : end;
}

/* The weight of p_cmp[cmp] in p_slc[slc], Eq. 9: tokens that both blocks cover, in strides. The
   paper's double sum over (m, n) counts the same, if its indices begin at 1. */
NSA_API int nsa_block_overlap(const nsa_desc *d, int cmp, int slc) {
    int64_t cmp_begin = (int64_t)cmp * d->cmp_stride, slc_begin = (int64_t)slc * d->slc_block;
    int64_t begin = nsa__max(cmp_begin, slc_begin);
    int64_t end = nsa__min(cmp_begin + d->cmp_block, slc_begin + d->slc_block);
    return (int)(nsa__max(0, end - begin) / d->cmp_stride);
}

/* Compressed blocks *begin .. *end - 1 overlap the selection block. All sizes are multiples of d,
   so the block that begins l - d before slc_begin is the first that reaches into it. */
NSA_API void nsa_block_overlap_range(const nsa_desc *d, int tokens, int slc, int *begin, int *end) {
    int64_t slc_begin = (int64_t)slc * d->slc_block, count = nsa_cmp_count(d, tokens);
    /* blocks that start before slc_begin and overlap it */
    int64_t before = d->cmp_block / d->cmp_stride - 1;
    *begin = (int)nsa__min(count, nsa__max(0, slc_begin / d->cmp_stride - before));
    *end = (int)nsa__min(count, (slc_begin + d->slc_block) / d->cmp_stride);
}

/* Forced blocks at the start of the sequence, and at the query. They belong to the causal mask:
   without it neither place is special, so no block is forced. */
static int nsa__forced_first(const nsa_desc *d) {
    return d->mask == NSA_MASK_NONE ? 0 : d->slc_init;
}
static int nsa__forced_local(const nsa_desc *d, int tokens, int query) {
    if (d->forced == NSA_FORCED_TAIL) return nsa__slc_tail(d, tokens, query) ? d->slc_local : 0;
    return d->mask == NSA_MASK_NONE ? 0 : d->slc_local;
}

NSA_API int nsa_block_list_width(const nsa_desc *d) {
    int most_local = d->mask == NSA_MASK_NONE && d->forced == NSA_FORCED_ON_TOP ? 0 : d->slc_local;
    if (d->forced == NSA_FORCED_INSIDE) return d->slc_count;
    return d->slc_count + nsa__forced_first(d) + most_local;
}

/* ---- Instruction sets ---------------------------------------------------------------------------
   Twin: none. Not here: the tiles of each set (tiles.h). */

#if (defined(__GNUC__) || defined(__clang__)) && !defined(__CUDACC__)
/* The machine too: Emscripten's -msse2 says SSE2, of WebAssembly. */
#if defined(__SSE2__) && (defined(__x86_64__) || defined(__i386__))
#define NSA__HAS_SSE2
/* GCC for Windows spills wide vectors to a stack that is not aligned for them: its PR 54412. */
#if (!defined(_WIN32) || defined(__clang__) || defined(NSA_UNALIGNED_SPILLS)) && \
    !defined(NSA__WITHOUT_AVX) /* a test defines it: the wide tiles take longest to compile */
#define NSA__HAS_AVX
#endif
#elif defined(__ARM_NEON) && defined(__aarch64__) && !defined(__AARCH64EB__)
#define NSA__HAS_NEON /* big-endian, clang hands a vector to asm with its lanes turned */
#elif defined(__wasm_simd128__)
#define NSA__HAS_SIMD128
#endif
/* AVX2's processors convert f16, but not all compilers can ask; without it the loop is plain. */
#if defined(NSA__HAS_AVX) && (defined(__clang__) ? __clang_major__ >= 18 : __GNUC__ >= 11)
#define NSA__HAS_F16C
#endif
/* Products of bf16, for sums in f32. A test defines NSA__BF16_BY_HAND, the name of a file with
   plain code for the one instruction that its machine may lack. */
#if NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 11)
#if defined(NSA__HAS_SSE2) && defined(NSA__BF16_BY_HAND)
#define NSA__HAS_BF16_BY_HAND
#elif defined(NSA__HAS_AVX)
#define NSA__HAS_AVX512_BF16
#elif defined(NSA__HAS_NEON) && \
    (defined(__linux__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
#define NSA__HAS_NEON_BF16
#endif
#endif
#endif

NSA_API int nsa_isa_available(nsa_isa isa) {
    switch (isa) {
    case NSA_ISA_DETECT:
    case NSA_ISA_PLAIN:
#ifdef NSA__HAS_SSE2
    case NSA_ISA_SSE2:
#endif
#ifdef NSA__HAS_NEON
    case NSA_ISA_NEON:
#endif
#ifdef NSA__HAS_SIMD128
    case NSA_ISA_SIMD128:
#endif
#ifdef NSA__HAS_BF16_BY_HAND
    case NSA_ISA_AVX512_BF16:
#endif
        return 1;
/* A set that the flags promise is not asked for: Zig's runtime says no to every question (0.17). */
#ifdef NSA__HAS_AVX
    case NSA_ISA_AVX2:
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
        return 1;
#else
#ifdef NSA__HAS_F16C
        if (!__builtin_cpu_supports("f16c")) return 0;
#endif
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    case NSA_ISA_AVX512:
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
        return 1;
#else
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
#endif
#endif
#ifdef NSA__HAS_AVX512_BF16
    case NSA_ISA_AVX512_BF16:
#ifdef __AVX512BF16__
        return 1;
#else
        return nsa_isa_available(NSA_ISA_AVX512) && __builtin_cpu_supports("avx512bf16");
#endif
#endif
#ifdef NSA__HAS_NEON_BF16
    case NSA_ISA_NEON_BF16: /* BFDOT: the compiler's flags may promise it; Linux says it */
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
        return 1;
#else
        return (getauxval(AT_HWCAP2) >> 14 & 1) != 0; /* HWCAP2_BF16 */
#endif
#endif
    default:
        return 0;
    }
}

NSA_API const char *nsa_isa_name(nsa_isa isa) {
    static const char *const names[] = {"detect", "plain",   "SSE2",         "AVX2",     "AVX-512",
                                        "NEON",   "SIMD128", "AVX-512 BF16", "NEON BF16"};
    return (unsigned)isa < sizeof names / sizeof *names ? names[isa] : "not an instruction set";
}

/* ---- Checks -------------------------------------------------------------------------------------
   Twin: kernels/checks.cuh. Not here: what only one primitive asks (its own room). */

/* Every kind of error once: its name and its sentence. */
#define NSA__STATUSES(X)                                                                           \
    X(NSA_OK, "success")                                                                           \
    X(NSA_ERROR_NULL, "a pointer that is needed is null")                                          \
    X(NSA_ERROR_ALIGNMENT, "data must be aligned to the size of its element, on CUDA to 16 bytes") \
    X(NSA_ERROR_DTYPE,                                                                             \
      "this dtype is not allowed here: tensors are f32, bf16 or f16 (f64 where "                   \
      "NSA_REAL is double), of forward's keys and values i8 or f8 too, lse is of NSA_REAL_DTYPE, " \
      "blocks and positions are "                                                                  \
      "i32, a gradient has its tensor's dtype or NSA_REAL_DTYPE; on CUDA all are "                 \
      "of one dtype, lse is f32, and the dtype is one that was compiled in")                       \
    X(NSA_ERROR_STRIDE, "strides must be >= 0, on CUDA multiples of 16 bytes, and those of an "    \
                        "output must keep its rows apart")                                         \
    X(NSA_ERROR_OVERFLOW, "the product of these sizes passes the address space")                   \
    X(NSA_ERROR_SIZE,                                                                              \
      "out of range: batch, strides, window and hidden are >= 1, tokens, rows, list_heads, a "     \
      "score's stride and max_rewind >= 0, "                                                       \
      "heads and blocks 1..2^30-1, slc_count 1..2^29-1, slc_init and slc_local 0..2^29-1, "        \
      "page_tokens >= 1, page_count and table_width >= 0, "                                        \
      "threads 0..65536, dims 1..576; of rope dim is even, base 0 or > 1, factor and "             \
      "trained_context >= 1 (LongRoPE: 2), fast > slow > 0, context, magnitude and mscale >= 0, "  \
      "short_factors and long_factors > 0, and all are numbers; in a chain k_cmp.dim is dim and "  \
      "v_cmp.dim is dim_v; on CUDA dims and hidden are multiples of 8, dim and dim_v at most "     \
      "NSA_CUDA_MAX_DIM, which is at most 256, and those of rope and phi at most 256")             \
    X(NSA_ERROR_HEADS,                                                                             \
      "heads must be a multiple of kv_heads, gate_heads must be heads or kv_heads, list_heads 0 "  \
      "or a multiple of kv_heads that divides heads (on CUDA and in a cache kv_heads)")            \
    X(NSA_ERROR_CMP_STRIDE,                                                                        \
      "cmp_stride must divide cmp_block, and page_tokens if there are pages")                      \
    X(NSA_ERROR_SLC_BLOCK,                                                                         \
      "slc_block must be a multiple of cmp_stride and at least cmp_block, on CUDA at most 128")    \
    X(NSA_ERROR_SLC_COUNT,                                                                         \
      "slc_init + slc_local must not exceed slc_count (or use NSA_FORCED_ON_TOP)")                 \
    X(NSA_ERROR_SLC_LOCAL, "slc_local must be >= 1 (>= 0 with NSA_FORCED_ON_TOP, 0 or 1 with "     \
                           "NSA_FORCED_TAIL)")                                                     \
    X(NSA_ERROR_RANGE,                                                                             \
      "first, count and query must be >= 0, first + count <= tokens and query < tokens (unless "   \
      "mask is NSA_MASK_NONE, without begins and firsts, on the CPU), firsts and counts of every " \
      "sequence too, and no count above desc.count: nsa_check_pages says where; a sequence must "  \
      "be in 0..batch-1")                                                                          \
    X(NSA_ERROR_BEGINS,                                                                            \
      "begins must ascend from 0 or more, and no sequence may be longer than tokens")              \
    X(NSA_ERROR_OPTION, "not a value of this option's enum, or one that is not computed here "     \
                        "(mask in a cache; firsts and pages there and in backward)")               \
    X(NSA_ERROR_SCALE, "must be finite and at most 1e38")                                          \
    X(NSA_ERROR_ISA, "this machine or this build has no such instruction set")                     \
    X(NSA_ERROR_BLOCKS, "a block list must hold candidates of its query, ascending, no "           \
                        "duplicates, -1 behind the last; "                                         \
                        "nsa_check_blocks says which fails, nsa_normalize_blocks mends them")      \
    X(NSA_ERROR_WORKSPACE, "the workspace is null or smaller than its size query says")            \
    X(NSA_ERROR_CUDA, "the CUDA runtime refused; cudaGetLastError says why")                       \
    X(NSA_ERROR_CACHE,                                                                             \
      "the cache has no room for these tokens (its desc.tokens in all, max_rewind + 1 at once), "  \
      "or is of another geometry")                                                                 \
    X(NSA_ERROR_REWIND, "the cache does not hold this length: 0, or at most its length, and at "   \
                        "least its newest length - max_rewind")                                    \
    X(NSA_ERROR_SHARED,                                                                            \
      "the incoming gradient of lse must not be forward's lse: give its own view, or none")        \
    X(NSA_ERROR_PAGES, "every page of a sequence's tokens must be in 0..page_count-1, and its "    \
                       "table long enough; nsa_check_pages says which is not")

NSA_API int nsa_status_kind(nsa_status s) {
    return s & 0xff;
}

/* Of the kind, column 0: its name, column 1: its sentence. */
static const char *nsa__status_says(nsa_status s, int column) {
#define NSA__SAYS(id, text) \
    case id:                \
        return column ? text : #id;
    switch (nsa_status_kind(s)) {
        NSA__STATUSES(NSA__SAYS)
    default:
        return column ? "not a status of this library" : "not a status";
    }
#undef NSA__SAYS
}

NSA_API const char *nsa_status_name(nsa_status s) {
    return nsa__status_says(s, 0);
}

NSA_API const char *nsa_status_text(nsa_status s) {
    return nsa__status_says(s, 1);
}

NSA_API const char *nsa_status_where(nsa_status s) {
#define NSA__NAME(name)       "dx." #name
#define NSA__K_CMP_NAME(name) "dx.k_cmp." #name
#define NSA__V_CMP_NAME(name) "dx.v_cmp." #name
    static const char *const names[] = {
        "dx.", NSA__FIELDS(NSA__NAME), NSA__COMPRESS_FIELDS(NSA__NAME),
        NSA__COMPRESS_FIELDS(NSA__K_CMP_NAME), NSA__COMPRESS_FIELDS(NSA__V_CMP_NAME)};
    const int field = s >> 8, id = field & ~NSA__GRADIENT;
    if ((size_t)id >= sizeof names / sizeof *names) return "";
    return names[id] + (id == field ? sizeof("dx.") - 1 : 0);
}

NSA_API nsa_desc nsa_desc_default(int batch, int tokens, int heads, int kv_heads, int dim) {
    nsa_desc d;
    memset(&d, 0, sizeof d);
    d.batch = batch;
    d.tokens = d.count = tokens;
    d.heads = d.gate_heads = heads;
    d.kv_heads = kv_heads;
    d.dim = d.dim_v = dim;
    d.cmp_block = 32;
    d.cmp_stride = 16;
    d.slc_block = 64;
    d.slc_count = 16;
    d.slc_init = 1;
    d.slc_local = 2;
    d.window = 512;
    return d;
}

/* Limits leave room for sums in int: rows of a query are rounded up to whole vectors, and the width
   of a list is slc_count + slc_init + slc_local. */
static nsa_status nsa__check_ranges(const nsa_desc *d) {
    const struct {
        int value, least, most, field;
    } ranges[] = {
        {d->batch, 1, INT_MAX, NSA__AT_batch},
        {d->tokens, 0, INT_MAX, NSA__AT_tokens},
        {d->heads, 1, INT_MAX / 2, NSA__AT_heads},
        {d->kv_heads, 1, INT_MAX / 2, NSA__AT_kv_heads},
        {d->gate_heads, 1, INT_MAX / 2, NSA__AT_gate_heads},
        {d->list_heads, 0, INT_MAX / 2, NSA__AT_list_heads},
        {d->rows, 0, INT_MAX, NSA__AT_rows},
        {d->dim, 1, NSA__MAX_DIM, NSA__AT_dim},
        {d->dim_v, 1, NSA__MAX_DIM, NSA__AT_dim_v},
        {d->cmp_block, 1, INT_MAX / 2, NSA__AT_cmp_block},
        {d->cmp_stride, 1, INT_MAX, NSA__AT_cmp_stride},
        {d->slc_block, 1, INT_MAX / 2, NSA__AT_slc_block},
        {d->slc_count, 1, INT_MAX / 4, NSA__AT_slc_count},
        {d->slc_init, 0, INT_MAX / 4, NSA__AT_slc_init},
        {d->slc_local, 0, INT_MAX / 4, NSA__AT_slc_local},
        {d->window, 1, INT_MAX, NSA__AT_window},
        {d->threads, 0, 1 << 16, NSA__AT_threads},
        {d->pages ? d->table_width : 0, 0, INT_MAX, NSA__AT_table_width},
        {d->pages ? d->page_tokens : 1, 1, INT_MAX, NSA__AT_page_tokens},
        {d->pages ? d->page_count : 0, 0, INT_MAX, NSA__AT_page_count},
        {(int)d->forced, 0, NSA_FORCED_TAIL, NSA__AT_forced}, /* options from here on */
        {(int)d->score_map, 0, NSA_SCORE_OVERLAP_MAX, NSA__AT_score_map},
        {(int)d->window_rule, 0, NSA_WINDOW_BEFORE_SELF, NSA__AT_window_rule},
        {(int)d->mask, 0, NSA_MASK_NONE, NSA__AT_mask},
        {(int)d->gate, 0, NSA_GATE_NONE, NSA__AT_gate},
        {(int)d->products, 0, NSA_PRODUCTS_F32, NSA__AT_products},
        {(int)d->isa, 0, NSA_ISA_NEON_BF16, NSA__AT_isa},
    };
    int kind = NSA_ERROR_SIZE;
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
        if (ranges[i].field == NSA__AT_forced) kind = NSA_ERROR_OPTION;
        if (ranges[i].value < ranges[i].least || ranges[i].value > ranges[i].most)
            return nsa__error(kind, ranges[i].field);
    }
    if (!nsa_isa_available(d->isa)) return nsa__error(NSA_ERROR_ISA, NSA__AT_isa);
    /* it must be finite as a float too */
    if (!nsa__is_finite(d->scale) || fabs(d->scale) > 1e38)
        return nsa__error(NSA_ERROR_SCALE, NSA__AT_scale);
    return NSA_OK;
}

/* `begins` is read here, so this part is the CPU's alone: a CUDA caller's begins lie on the
   device. */
static nsa_status nsa__check_begins(const nsa_desc *d) {
    if (!d->begins) return NSA_OK;
    if (d->begins[0] < 0) return nsa__error(NSA_ERROR_BEGINS, NSA__AT_begins);
    for (int b = 0; b < d->batch; b++) {
        int64_t length = (int64_t)d->begins[b + 1] - d->begins[b];
        if (length < 0 || length > d->tokens) return nsa__error(NSA_ERROR_BEGINS, NSA__AT_begins);
    }
    if (d->rows && d->rows < d->begins[d->batch]) return nsa__error(NSA_ERROR_BEGINS, NSA__AT_rows);
    return NSA_OK;
}

/* Tokens of sequence b. */
static int nsa__tokens_of(const nsa_desc *d, int b) {
    if (d->begins) return d->begins[b + 1] - d->begins[b];
    return d->counts ? d->firsts[b] + d->counts[b] : d->tokens;
}

/* The row of the table that is sequence b's. */
static const int32_t *nsa__table(const nsa_desc *d, int b) {
    return d->pages ? d->pages + (ptrdiff_t)b * d->table_width : NULL;
}

static nsa_status nsa__check_queries(const nsa_desc *d, int b, nsa_page_fault *fault) {
    int64_t first = d->firsts[b], count = d->counts[b];
    int64_t tokens = d->begins ? d->begins[b + 1] - d->begins[b] : d->tokens;
    fault->value = (int32_t)(first < 0 ? first : count);
    fault->reason = first < 0                ? "first below 0"
                    : count < 0              ? "count below 0"
                    : count > d->count       ? "count above desc.count"
                    : first + count > tokens ? "queries behind the last token"
                                             : NULL;
    if (!fault->reason) return NSA_OK;
    return nsa__error(NSA_ERROR_RANGE, first < 0 ? NSA__AT_firsts : NSA__AT_counts);
}

static nsa_status nsa__check_table(const nsa_desc *d, int b, nsa_page_fault *fault) {
    const int32_t *table = nsa__table(d, b);
    int64_t pages = nsa__ceil_div(nsa__tokens_of(d, b), d->page_tokens);
    fault->value = d->table_width;
    fault->reason = "more tokens than the table has pages for";
    if (pages > d->table_width) return nsa__error(NSA_ERROR_PAGES, NSA__AT_pages);
    fault->reason = "not a page";
    for (fault->slot = 0; fault->slot < pages; fault->slot++) {
        fault->value = table[fault->slot];
        if (fault->value < 0 || fault->value >= d->page_count)
            return nsa__error(NSA_ERROR_PAGES, NSA__AT_pages);
    }
    return NSA_OK;
}

/* Like begins, these arrays are read here, so this part is the CPU's alone. */
static nsa_status nsa__check_ragged(const nsa_desc *d, nsa_page_fault *fault) {
    if (!d->firsts != !d->counts)
        return nsa__error(NSA_ERROR_NULL, d->firsts ? NSA__AT_counts : NSA__AT_firsts);
    if (!d->counts && !d->pages) return NSA_OK; /* there may be 2^31 sequences */
    for (fault->sequence = 0; fault->sequence < d->batch; fault->sequence++) {
        fault->slot = 0;
        if (d->counts) NSA__CHECK(nsa__check_queries(d, fault->sequence, fault));
        if (d->pages) NSA__CHECK(nsa__check_table(d, fault->sequence, fault));
    }
    return NSA_OK;
}

/* All rules of a descriptor but those of its arrays. Entry points call it once, through
   nsa_desc_check. */
static nsa_status nsa__check_geometry(const nsa_desc *d) {
    if (!d) return nsa__error(NSA_ERROR_NULL, NSA__AT_desc);
    NSA__CHECK(nsa__check_ranges(d));
    if (d->heads % d->kv_heads) return nsa__error(NSA_ERROR_HEADS, NSA__AT_heads);
    if (d->gate_heads != d->heads && d->gate_heads != d->kv_heads)
        return nsa__error(NSA_ERROR_HEADS, NSA__AT_gate_heads);
    if (d->gate_stride < 0) return nsa__error(NSA_ERROR_STRIDE, NSA__AT_gate_stride);
    if (!nsa__fits(nsa__gate_stride(d), 3, 4, 1))
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_gate_stride);
    if (d->heads % nsa__list_heads(d) || nsa__list_heads(d) % d->kv_heads)
        return nsa__error(NSA_ERROR_HEADS, NSA__AT_list_heads);
    if (d->cmp_block % d->cmp_stride) return nsa__error(NSA_ERROR_CMP_STRIDE, NSA__AT_cmp_stride);
    if (d->pages && d->page_tokens % d->cmp_stride)
        return nsa__error(NSA_ERROR_CMP_STRIDE, NSA__AT_page_tokens);
    if (d->slc_block % d->cmp_stride || d->slc_block < d->cmp_block)
        return nsa__error(NSA_ERROR_SLC_BLOCK, NSA__AT_slc_block);
    if (d->forced == NSA_FORCED_INSIDE && d->mask == NSA_MASK_CAUSAL) {
        if (d->slc_local < 1) return nsa__error(NSA_ERROR_SLC_LOCAL, NSA__AT_slc_local);
        if (d->slc_init + d->slc_local > d->slc_count)
            return nsa__error(NSA_ERROR_SLC_COUNT, NSA__AT_slc_count);
    }
    if (d->forced == NSA_FORCED_TAIL && d->slc_local > 1)
        return nsa__error(NSA_ERROR_SLC_LOCAL, NSA__AT_slc_local);
    const int first = d->firsts ? 0 : d->first;
    if (first < 0 || first > d->tokens) return nsa__error(NSA_ERROR_RANGE, NSA__AT_first);
    /* without a mask, of whole sequences, queries need no place among the keys */
    const int apart = d->mask == NSA_MASK_NONE && !d->begins && !d->firsts;
    if (d->count < 0 || d->count > (apart ? INT_MAX : d->tokens) - first)
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_count);
    /* 256: rows of lse, gates and lists are short of it */
    const int64_t widest = nsa__max(256, nsa__max(d->dim, d->dim_v));
    const int64_t rows = nsa__max(d->tokens, d->count);
    if (!nsa__fits(d->batch, rows, d->heads, widest) ||
        !nsa__fits(d->batch, rows, nsa__list_heads(d), nsa_block_list_width(d)))
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    return NSA_OK;
}

NSA_API nsa_status nsa_check_pages(const nsa_desc *d, nsa_page_fault *fault) {
    nsa_page_fault found;
    NSA__CHECK(nsa__check_geometry(d));
    NSA__CHECK(nsa__check_begins(d));
    nsa_status s = nsa__check_ragged(d, &found);
    int located = nsa_status_kind(s) == NSA_ERROR_RANGE || nsa_status_kind(s) == NSA_ERROR_PAGES;
    if (fault && located) *fault = found;
    return s;
}

NSA_API nsa_status nsa_desc_check(const nsa_desc *d) {
    return nsa_check_pages(d, NULL);
}

/* A view's shape: (batch, rows, heads, width), or one sequence of all packed rows. */
static nsa__shape nsa__shape_of(const nsa_desc *d, int64_t rows, int64_t packed_rows, int64_t heads,
                                int64_t width) {
    nsa__shape shape = {d->batch, rows, heads, width};
    if (d->begins) {
        shape.batch = 1;
        shape.rows = nsa__max(packed_rows, 0);
    }
    return shape;
}

/* Packed rows up to the last token; a view is addressed from row 0, not from begins[0]. */
static int64_t nsa__packed_tokens(const nsa_desc *d) {
    /* Without any token no row is touched, wherever they would begin. */
    return d->begins && d->begins[d->batch] > d->begins[0] ? d->begins[d->batch] : 0;
}

/* Compressed rows of all sequences. */
static int64_t nsa__cmp_rows(const nsa_desc *d) {
    int64_t rows = d->begins ? 0 : (int64_t)d->batch * nsa_cmp_count(d, d->tokens);
    for (int b = 0; d->begins && b < d->batch; b++)
        rows += nsa_cmp_count(d, d->begins[b + 1] - d->begins[b]);
    return rows;
}

/* The shape of a view on the query's side: row 0 is query `first`. */
static nsa__shape nsa__query_shape(const nsa_desc *d, int64_t heads, int64_t width) {
    /* Query `first` of sequence b is row begins[b] of a packed view. The last sequence that has
       queries has the last row. */
    int64_t in_all = 0;
    if (d->counts) {
        for (int b = 0; b < d->batch; b++) in_all += d->counts[b];
        nsa__shape ragged = {1, in_all, heads, width};
        return ragged;
    }
    for (int b = 0; d->begins && b < d->batch; b++) {
        int64_t length = d->begins[b + 1] - d->begins[b];
        int64_t rows = nsa__min(length - d->first, d->count);
        if (rows > 0) in_all = d->begins[b] + rows;
    }
    return nsa__shape_of(d, d->count, in_all, heads, width);
}

/* The shape of a view of keys: a row for each token, or compressed block. */
static nsa__shape nsa__key_shape(const nsa_desc *d, int compressed, int64_t width) {
    const int64_t rows = compressed ? nsa_cmp_count(d, d->tokens) : d->tokens;
    const int64_t in_all = compressed ? nsa__cmp_rows(d) : nsa__packed_tokens(d);
    const int stride = compressed ? d->cmp_stride : 1;
    const nsa__shape paged = {d->page_count, d->page_tokens / stride, d->kv_heads, width};
    return d->pages ? paged : nsa__shape_of(d, rows, in_all, d->kv_heads, width);
}

/* The dtypes of tensors here. */
enum { NSA__TENSORS = NSA__FLOATS | (NSA_REAL_DTYPE == NSA_F64 ? 1 << NSA_F64 : 0) };

static const nsa__side nsa__cpu = {nsa_desc_check,  nsa__query_shape, nsa__key_shape,
                                   nsa__check_view, NSA__TENSORS,     1u << NSA_REAL_DTYPE};

NSA_API nsa_status nsa_convert_rows(const nsa_tensor *x, const nsa_tensor *out, int batch,
                                    int tokens, int heads, int width) {
    const nsa__shape shape = {batch, tokens, heads, width};
    const unsigned dtypes = (unsigned)NSA__TENSORS | NSA__SCALED;
    nsa_real row[NSA__MAX_DIM];
    if (!x || !out) return nsa__error(NSA_ERROR_NULL, x ? NSA__AT_out : NSA__AT_x);
    if (batch < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_batch);
    if (tokens < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_tokens);
    if (heads < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_heads);
    if (width < 1 || width > NSA__MAX_DIM) return nsa__error(NSA_ERROR_SIZE, NSA__AT_width);
    NSA__CHECK(nsa__check_view(x, shape, dtypes, 0, NSA__AT_x));
    NSA__CHECK(nsa__check_view(out, shape, dtypes, 1, NSA__AT_out));
    for (int b = 0; b < batch; b++)
        for (int t = 0; t < tokens; t++)
            for (int h = 0; h < heads; h++) {
                nsa__load(row, x->dtype, nsa__row(x, b, t, h), width);
                nsa__store(out->dtype, nsa__row(out, b, t, h), row, width);
            }
    return NSA_OK;
}

/* The views of a call under their own names. */
static nsa__checked nsa__checked_of(const nsa_desc *d, int forward, int compressed) {
    const unsigned rows = NSA__TENSORS | (forward ? NSA__SCALED : 0);
    const nsa__checked c = {&nsa__cpu, d, rows, forward, compressed, 0};
    return c;
}

/* ---- Sequences, workspace -----------------------------------------------------------------------
   Twin: none; kernels take views. Not here: who runs (threads.h). */

/* Where the rows of a sequence's keys lie, or of its compressed ones. */
typedef struct nsa__key_layout {
    int64_t batch, row;   /* what batch strides multiply, and the row of key 0 */
    int ring;             /* a decoding cache's: key s lies in row s % ring; 0: straight */
    const int32_t *pages; /* NULL, or where batch and row are found: see nsa__key_row */
    int page_rows, page_offset;
    const int32_t *list; /* NULL, or keys are counted along a block list, from its first on */
    int list_block;
} nsa__key_layout;

/* The sequence's key that is number `at` of a list's. */
static int64_t nsa__key_in_list(const nsa__key_layout *rows, int64_t at) {
    const uint32_t nth = (uint32_t)at, n = (uint32_t)rows->list_block;
    return n == 1 ? rows->list[nth] : (int64_t)rows->list[nth / n] * n + nth % n;
}

/* The row of a key: the one place that knows rings, pages and lists. */
static void *nsa__key_row(const nsa__key_layout *rows, const nsa_tensor *x, int64_t key,
                          int64_t head) {
    if (rows->list) key = nsa__key_in_list(rows, key);
    if (rows->pages) {
        uint32_t at = (uint32_t)(key + rows->page_offset), n = (uint32_t)rows->page_rows;
        return nsa__row(x, rows->pages[at / n], at % n, head);
    }
    return nsa__row(x, rows->batch, rows->row + (rows->ring ? key % rows->ring : key), head);
}

/* Keys from this one on whose rows follow each other by the token stride. */
static int nsa__rows_together(const nsa__key_layout *rows, int key) {
    int most = INT_MAX, next = INT_MAX;
    if (rows->list) {
        most = rows->list_block - (int)((uint32_t)key % (uint32_t)rows->list_block);
        key = (int)nsa__key_in_list(rows, key);
    }
    if (rows->pages)
        next = rows->page_rows -
               (int)((uint32_t)(key + rows->page_offset) % (uint32_t)rows->page_rows);
    else if (rows->ring)
        next = rows->ring - key % rows->ring;
    return (int)nsa__min(most, next);
}

/* One sequence of the batch. Iterate with nsa__seq_begin and nsa__seq_next from the first one on,
   because packed rows are sums over the sequences before. */
typedef struct nsa__seq {
    int nth;            /* b */
    int64_t batch, row; /* on the query's side: what batch strides multiply, and the view's row of
                           query `first` */
    nsa__key_layout keys, cmp;
    int tokens, cmp_tokens; /* its keys, and its compressed keys */
    int first, count; /* the queries to compute that it has: positions first .. first + count - 1 */
} nsa__seq;

/* Fills the fields that follow from `nth`; behind the last sequence they keep their values. */
static void nsa__seq_set(const nsa_desc *d, nsa__seq *s) {
    int b = s->nth;
    if (b >= d->batch) return;
    s->tokens = nsa__tokens_of(d, b);
    s->cmp_tokens = nsa_cmp_count(d, s->tokens);
    s->first = d->firsts ? d->firsts[b] : d->first;
    s->count = d->counts   ? d->counts[b]
               : d->begins ? (int)nsa__max(0, nsa__min(d->count, (int64_t)s->tokens - d->first))
                           : d->count;
    s->keys.batch = s->cmp.batch = d->begins ? 0 : b;
    s->keys.row = d->begins ? d->begins[b] : 0;
    s->batch = d->counts ? 0 : s->keys.batch;
    if (!d->counts) s->row = s->keys.row;
    if (!d->pages) return;
    s->keys.pages = s->cmp.pages = nsa__table(d, b);
    s->keys.page_rows = d->page_tokens;
    s->cmp.page_rows = d->page_tokens / d->cmp_stride;
    s->cmp.page_offset =
        d->cmp_block / d->cmp_stride - 1; /* a block lies where its last token does */
}

/* The first sequence. The loop ends when index reaches d->batch. */
static nsa__seq nsa__seq_begin(const nsa_desc *d) {
    nsa__seq s;
    memset(&s, 0, sizeof s);
    nsa__seq_set(d, &s);
    return s;
}

static void nsa__seq_next(const nsa_desc *d, nsa__seq *s) {
    if (d->begins) s->cmp.row += s->cmp_tokens;
    if (d->counts) s->row += s->count;
    s->nth++;
    nsa__seq_set(d, s);
}

enum { NSA__ALIGN = 64 }; /* bytes: a cache line, and the widest vector */

static void *nsa__alloc(nsa__arena *a, int64_t count, size_t size) {
    return nsa__alloc_aligned(a, count, size, NSA__ALIGN);
}
static nsa_real *nsa__alloc_reals(nsa__arena *a, int64_t count) {
    return (nsa_real *)nsa__alloc(a, count, sizeof(nsa_real));
}
static nsa__arena nsa__arena_at(void *workspace) {
    return nsa__arena_aligned(workspace, NSA__ALIGN);
}

static size_t nsa__larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* Threads that the caller asks for: desc.threads, or what OpenMP offers. */
static int nsa__threads(const nsa_desc *d) {
#ifdef _OPENMP
    return d->threads ? d->threads : omp_get_max_threads();
#else
    (void)d;
    return 1;
#endif
}

/* Threads whose scratch a workspace must hold at least. */
static int nsa__least_threads(const nsa_desc *d) {
    return d->threads ? nsa__threads(d) : 1;
}

/* Bytes of a workspace, whose parts lie in this order:
     | up to 63 bytes to align | shared | scratch of thread 0 | scratch of thread 1 | ... |
   `shared` holds packed keys and sums; a thread's scratch is used by one task after another. */
static size_t nsa__bytes_for(size_t shared, int scratches, size_t scratch) {
    nsa__arena total = {NULL, shared};
    if (scratch) nsa__alloc(&total, scratches, scratch);
    return total.used + NSA__ALIGN;
}

static size_t nsa__workspace_bytes(const nsa_desc *d, size_t shared, size_t scratch) {
    return nsa__bytes_for(shared, nsa__threads(d), scratch);
}

/* The threads of a call. Thread i has scratch_bytes of scratch from scratch + i scratch_bytes. */
typedef struct nsa__team {
    int threads;
    char *scratch;
    size_t scratch_bytes;
} nsa__team;

/* Checks the workspace and splits it into the shared part and each thread's scratch. If `threads`
   is 0, the size of the workspace decides how many threads the call uses. */
static nsa_status nsa__team_make(nsa__team *team, const nsa_desc *d, void *workspace, size_t bytes,
                                 size_t shared, size_t scratch) {
    size_t least = nsa__bytes_for(shared, nsa__least_threads(d), scratch);
    if (!workspace || bytes < least) return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    size_t room = scratch ? (bytes - NSA__ALIGN - shared) / scratch : (size_t)nsa__threads(d);
    team->threads = (int)nsa__min((int64_t)nsa__min((int64_t)room, INT_MAX), nsa__threads(d));
    team->scratch = nsa__arena_at(workspace).base + shared;
    team->scratch_bytes = scratch;
    return NSA_OK;
}

/* ---- Threads ------------------------------------------------------------------------------------
   Twin: none; a task is a thread block there. Not here: what a task computes. */

/* A task: piece `nth` of the work that `context` describes. It writes rows that no other task
   writes, each as a sum in one fixed order. So no bit depends on which thread runs the task, or
   when. */
typedef void nsa__task(const void *context, int64_t nth, void *scratch);

/* Threads for this many multiply-adds, a million or more for each: that takes some 10 us, and
   waking a thread as long, or longer if it sleeps. It depends on the shape alone, and no bit
   depends on it. */
static int nsa__threads_for(int threads, int64_t work) {
    return (int)nsa__max(1, nsa__min(threads, work >> 20));
}

/* Runs tasks 0 .. tasks - 1 on the team's threads. They begin in index order, because neighbouring
   tasks read neighbouring rows and often the same tiles; no result depends on the order. One thread
   enters no parallel region: what its tasks run would be nested there, with threads of its own that
   are created each time. */
static void nsa__run(const nsa__team *team, int64_t tasks, nsa__task *task, const void *context) {
#ifdef _OPENMP
    int threads = (int)nsa__min(team->threads, tasks);
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(monotonic : dynamic)
        for (int64_t i = 0; i < tasks; i++)
            task(context, i,
                 team->scratch_bytes
                     ? team->scratch + team->scratch_bytes * (size_t)omp_get_thread_num()
                     : NULL);
        return;
    }
#endif
    for (int64_t i = 0; i < tasks; i++) task(context, i, team->scratch);
}

/* -- tasks of all sequences -- */

/* Work of which each sequence has some items: its queries, or its blocks. */
typedef struct nsa__by_seq {
    const nsa_desc *d;
    const void *job;
    int64_t (*items)(const void *job, const nsa__seq *seq); /* how many it has */
    void (*item)(const void *job, const nsa__seq *seq, int64_t nth, void *scratch);
    int per;         /* items of a task */
    int64_t stripes; /* set where it is run */
} nsa__by_seq;

static int64_t nsa__all_tasks(const nsa__by_seq *by) {
    int64_t sum = 0;
    for (nsa__seq seq = nsa__seq_begin(by->d); seq.nth < by->d->batch; nsa__seq_next(by->d, &seq))
        sum += nsa__ceil_div(by->items(by->job, &seq), by->per);
    return sum;
}

/* Every stripes-th task of all sequences, from number `nth` on. */
static void nsa__stripe_task(const void *context, int64_t nth, void *scratch) {
    const nsa__by_seq *by = (const nsa__by_seq *)context;
    for (nsa__seq seq = nsa__seq_begin(by->d); seq.nth < by->d->batch; nsa__seq_next(by->d, &seq)) {
        const int64_t items = by->items(by->job, &seq), tasks = nsa__ceil_div(items, by->per);
        for (; nth < tasks; nth += by->stripes)
            for (int64_t i = nth * by->per; i < nsa__min(items, (nth + 1) * by->per); i++)
                by->item(by->job, &seq, i, scratch);
        nth -= tasks;
    }
}

/* One region for all sequences, because a step of decoding has little work in each. A thread gets
   several stripes: one that has lost its core leaves some of them to others. */
static void nsa__run_by_seq(const nsa__team *team, nsa__by_seq by) {
    const int64_t most = team->threads > 1 ? (int64_t)4 * team->threads : 1;
    by.stripes = nsa__min(most, nsa__all_tasks(&by));
    nsa__run(team, by.stripes, nsa__stripe_task, &by);
}

static int64_t nsa__seq_queries(const void *job, const nsa__seq *seq) {
    (void)job;
    return seq->count;
}

enum { NSA__TASK_TOKENS = 16 };

/* Work that is done token by token, for the queries of all sequences. */
static void nsa__run_tokens(const nsa__team *team, const nsa_desc *d,
                            void (*token)(const void *job, const nsa__seq *seq, int64_t t,
                                          void *scratch),
                            const void *job) {
    const nsa__by_seq by = {d, job, nsa__seq_queries, token, NSA__TASK_TOKENS, 0};
    nsa__run_by_seq(team, by);
}

/* -- ordered tasks --
   Backward's tasks add to dk and dv of the same tiles. Each sum must have one order of tasks,
   whatever the number of threads. So a task enters a tile only if the task that it follows, and all
   before that one, have left it.
   Tasks go through their tiles upwards. A task that may not go on keeps its state in its slot, and
   its thread takes another task. No thread waits for one that has lost its core as long as there is
   other work.
   Slot i takes tasks i, i + slots, i + 2 slots, ... one after another, so tasks begin in index
   order. The first unfinished task is then always in a slot, and it waits for no other task: the
   tasks cannot lock. */

enum { NSA__TASK_SLOTS = 4 }; /* slots for each thread */

/* Gives the core to another thread, because the caller has found nothing to do. */
static void nsa__yield(void) {
#ifdef NSA__HAS_SCHED
    sched_yield();
#endif
}

/* Reads a number that other threads write. Behind the flush this thread sees all that the writer
   had written before it wrote the number. */
static int32_t nsa__read(const int32_t *x) {
    int32_t value;
#ifdef _OPENMP
#pragma omp atomic read
#endif
    value = *x;
#ifdef _OPENMP
#pragma omp flush
#endif
    return value;
}

/* Writes a number that other threads read. seq_cst: they see the sums of a tile before they see
   that the tile is free. */
static void nsa__write(int32_t *x, int32_t value) {
#ifdef _OPENMP
#pragma omp atomic write seq_cst
#endif
    *x = value;
    (void)value; /* gcc takes what an atomic writes for unused */
}

/* 1 for the first thread that asks, until that thread writes 0. The others only count on, and leave
   the slot alone. */
static int nsa__claim(int32_t *claims) {
    int32_t earlier;
#ifdef _OPENMP
#pragma omp atomic capture seq_cst
#endif
    earlier = (*claims)++;
    return earlier == 0;
}

/* Where a task keeps its state from its first tile to its last. The state itself follows in memory.
   A thread that has not claimed the slot reads its fields by nsa__read, as a hint. */
typedef struct nsa__task_slot {
    int32_t claims;    /* 0: no thread works here */
    int32_t task;      /* the task that is here or begins next; ordered->tasks: none is left */
    int32_t wait_tile; /* its predecessor must have left it before the task goes on; -1: no tile */
    int32_t started;   /* 1: its state has been loaded */
} nsa__task_slot;

/* A run of such tasks. A thread's scratch is | scratch_bytes | slot 0 | .. | slot 3 |. */
typedef struct nsa__ordered {
    int32_t tasks;
    int32_t heads;     /* the predecessor of task i, which adds to the same sums, is i - heads */
    int32_t *progress; /* of task i: it, and all that it follows, have left tiles < progress[i] */
    const void *context;
    /* goes on with a task by one step; returns 1 if the task is done */
    int (*step)(const struct nsa__ordered *ordered, nsa__task_slot *slot, void *scratch);
    size_t slot_bytes;    /* of a slot and the state of its task */
    size_t scratch_bytes; /* of a thread, before its slots: what holds for one tile only */
} nsa__ordered;

static size_t nsa__ordered_scratch(const nsa__ordered *ordered) {
    return ordered->scratch_bytes + NSA__TASK_SLOTS * ordered->slot_bytes;
}

static int nsa__may_enter(const nsa__ordered *ordered, int32_t task, int32_t tile) {
    const int32_t predecessor = task - ordered->heads;
    return predecessor < 0 || nsa__read(ordered->progress + predecessor) > tile;
}

static nsa__task_slot *nsa__slot_at(const nsa__ordered *ordered, const nsa__team *team, int i) {
    char *of_thread = team->scratch + team->scratch_bytes * (size_t)(i / NSA__TASK_SLOTS);
    return (nsa__task_slot *)(void *)(of_thread + ordered->scratch_bytes +
                                      ordered->slot_bytes * (size_t)(i % NSA__TASK_SLOTS));
}

/* Puts `task` into a slot that no other thread works at, or marks the slot as done. */
static void nsa__slot_next(const nsa__ordered *ordered, nsa__task_slot *slot, int64_t task) {
    nsa__write(&slot->started, 0);
    nsa__write(&slot->wait_tile, -1);
    nsa__write(&slot->task, (int32_t)nsa__min(task, ordered->tasks));
}

/* Claims the slot of the first task that may go on and that no thread works at; NULL if there is
   none. *idle becomes 1 if any unfinished task is unclaimed. Fields are read before the slot is
   claimed, and tested again behind the claim, because another thread may have gone on with it. */
static nsa__task_slot *nsa__slot_find(const nsa__ordered *ordered, const nsa__team *team,
                                      int *idle) {
    nsa__task_slot *best = NULL;
    int32_t first = ordered->tasks;
    *idle = 0;
    for (int i = 0; i < team->threads * NSA__TASK_SLOTS; i++) {
        nsa__task_slot *slot = nsa__slot_at(ordered, team, i);
        int32_t task = nsa__read(&slot->task);
        if (task >= ordered->tasks || nsa__read(&slot->claims)) continue;
        *idle = 1;
        if (task >= first || !nsa__may_enter(ordered, task, nsa__read(&slot->wait_tile))) continue;
        first = task;
        best = slot;
    }
    if (!best || !nsa__claim(&best->claims)) return NULL;
    if (best->task < ordered->tasks && nsa__may_enter(ordered, best->task, best->wait_tile))
        return best;
    nsa__write(&best->claims, 0); /* another thread has been at it meanwhile */
    return NULL;
}

/* Goes on with one task, as far as it may. Returns 0 if no task may go on. */
static int nsa__step_slot(const nsa__ordered *ordered, const nsa__team *team, void *scratch,
                          int *idle) {
    nsa__task_slot *slot = nsa__slot_find(ordered, team, idle);
    int done = 0;
    if (!slot) return 0;
    while (!done && nsa__may_enter(ordered, slot->task, slot->wait_tile))
        done = ordered->step(ordered, slot, scratch);
    if (done) nsa__slot_next(ordered, slot, slot->task + (int64_t)team->threads * NSA__TASK_SLOTS);
    nsa__write(&slot->claims, 0);
    return 1;
}

/* The work of one thread. It ends if every task that is not done is claimed by another thread.
   The first unfinished task may always go on, so a thread yields only while another works at
   that task. */
static void nsa__run_slots(const nsa__ordered *ordered, const nsa__team *team, void *scratch) {
    for (int idle = 1; idle;)
        if (nsa__step_slot(ordered, team, scratch, &idle))
            idle = 1;
        else if (idle)
            nsa__yield();
}

/* Fills the slots with the first tasks. No task has left any tile. */
static void nsa__ordered_begin(const nsa__ordered *ordered, const nsa__team *team) {
    for (int i = 0; i < team->threads * NSA__TASK_SLOTS; i++) {
        nsa__task_slot *slot = nsa__slot_at(ordered, team, i);
        slot->claims = 0;
        nsa__slot_next(ordered, slot, i);
    }
    for (int32_t i = 0; i < ordered->tasks; i++) ordered->progress[i] = 0;
}

static void nsa__run_ordered(const nsa__team *team, const nsa__ordered *ordered) {
    nsa__ordered_begin(ordered, team);
#ifdef _OPENMP
    int threads = (int)nsa__max(1, nsa__min(team->threads, ordered->tasks));
#pragma omp parallel num_threads(threads) if (threads > 1)
    nsa__run_slots(ordered, team,
                   team->scratch + team->scratch_bytes * (size_t)omp_get_thread_num());
#else
    nsa__run_slots(ordered, team, team->scratch);
#endif
}

/* ---- Block index as arrays ----------------------------------------------------------------------
   Twin: kernels/block_index.cuh. Not here: the closed forms (index.h). */

NSA_API int64_t nsa_block_map_size(const nsa_desc *d, int tokens) {
    int64_t entries = 0;
    for (int j = 0; j < nsa_slc_count(d, tokens); j++) {
        int begin, end;
        nsa_block_overlap_range(d, tokens, j, &begin, &end);
        entries += end - begin;
    }
    return entries;
}

/* Eq. 9 as a sparse matrix in CSR form: the entries of row j are indptr[j] .. indptr[j + 1] - 1,
   the column is the compressed block, the weight nsa_block_overlap. */
NSA_API nsa_status nsa_block_map(const nsa_desc *d, int tokens, int32_t *indptr, int32_t *indices,
                                 nsa_real *weights) {
    NSA__CHECK(nsa__check_geometry(d));
    if (tokens < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_tokens);
    int64_t entries = nsa_block_map_size(d, tokens);
    if (entries > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    if (!indptr) return nsa__error(NSA_ERROR_NULL, NSA__AT_indptr);
    if (entries && !indices) return nsa__error(NSA_ERROR_NULL, NSA__AT_indices);
    if (entries && !weights) return nsa__error(NSA_ERROR_NULL, NSA__AT_weights);
    int32_t at = 0;
    for (int j = 0; j < nsa_slc_count(d, tokens); j++) {
        int begin, end;
        nsa_block_overlap_range(d, tokens, j, &begin, &end);
        indptr[j] = at;
        for (int i = begin; i < end; i++, at++) {
            indices[at] = i;
            weights[at] = (nsa_real)nsa_block_overlap(d, i, j);
        }
    }
    indptr[nsa_slc_count(d, tokens)] = at;
    return NSA_OK;
}

NSA_API nsa_status nsa_cmp_begins(const nsa_desc *d, int32_t *cmp_begins) {
    NSA__CHECK(nsa_desc_check(d));
    if (!cmp_begins) return nsa__error(NSA_ERROR_NULL, NSA__AT_cmp_begins);
    if (nsa__cmp_rows(d) > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    cmp_begins[0] = 0;
    for (int b = 0; b < d->batch; b++) {
        int tokens = d->begins ? d->begins[b + 1] - d->begins[b] : d->tokens;
        cmp_begins[b + 1] = cmp_begins[b] + nsa_cmp_count(d, tokens);
    }
    return NSA_OK;
}

/* ---- Tiles: products and sums over rows of keys ----------------------------------------------
   Twin: none. Not here: their text (tiles.inl), which keys a tile has (attend_pack.h).
   All arithmetic on rows of keys is in a few functions. Their one text is src/tiles.inl, of bf16
   pairs src/pairs.inl, which is read once per instruction set. They are compiled for that set
   whatever flags the user gave; desc.isa or the machine chooses among them when a call begins. The
   bits of a row of the result depend on that row's operands alone, because every sum runs over k
   in ascending order. How many rows there are, and where the row stands among them, changes
   nothing. */

/* What a product reads: packed keys and values, queries, their gradients, weights. Where products
   take pairs of bf16, one of these holds the bits of a pair, the first in the lower half. A pair
   that has been copied is finite, so it is no NaN, whose bits a move might change. */
typedef nsa_real nsa__packed;

/* An operand of a product: element (i, c) is data[r * row + c * step], where r is i, or rows[i]. */
typedef struct nsa__matrix {
    const nsa__packed *data;
    ptrdiff_t row, step; /* in elements; step is 1 in the right operand */
    const int *rows;     /* NULL: all rows in order */
} nsa__matrix;

/* Lines that follow each other and are read after a product, which prefetches one in each step of
   its sums: many at once would fill the queue of misses. The last of some has no end. */
typedef struct nsa__lines {
    const char *at;
    int n;
} nsa__lines;

/* What a product writes: row i of a b goes to row i of data, or rows[i]. With `add` it is added to
   scale[i] times what is there; softmax needs this to shrink a row's earlier sums. */
typedef struct nsa__result {
    nsa_real *data;
    ptrdiff_t row;
    const int *rows; /* NULL: all rows in order */
    int add;
    const nsa_real *scale; /* a factor for each row of the product, NULL: 1 */
    nsa__lines *later;     /* prefetched meanwhile, or NULL */
} nsa__result;

/* All rows in order, without a factor. */
static nsa__result nsa__result_at(nsa_real *data, ptrdiff_t row, int add) {
    const nsa__result result = {data, row, NULL, add, NULL, NULL};
    return result;
}

/* A product, from a column of its result on; rows i .. m - 1 of it, in pieces. */
typedef struct nsa__product {
    int k, column;
    const nsa__matrix *a, *b;
    const nsa__result *c;
    nsa_real factor;   /* of pairs */
    nsa__lines *later; /* those that are left */
} nsa__product;
typedef void nsa__pieces(nsa__product *x, int i, int m);

/* Scores of one tile, for rows of some queries: keys first .. first + n - 1, n a multiple of 16. */
typedef struct nsa__scored {
    int rows, n, group, first;
    const uint64_t *mask; /* bit j of mask[r / group] is 1 if row r sees key j of the tile */
    const int *row;       /* row r is row row[r] of what is kept for a task */
} nsa__scored;

/* The running softmax of a task's rows. */
typedef struct nsa__running {
    nsa_real *m; /* of every row: the largest score so far */
    nsa_real *l; /* of every row: 16 partial sums of p */
    nsa_real
        *shrink; /* of the rows at hand: what earlier sums of p are to be multiplied by; written
                         in whole vectors, so it has room for 16 more */
} nsa__running;

typedef struct nsa__tiles {
    /* c[m][n] = a[m][k] b[k][n] */
    void (*gemm)(int m, int n, int k, const nsa__matrix *a, const nsa__matrix *b,
                 const nsa__result *c);
    /* Takes scores s, rows `ld` apart, into the running softmax. p gets exp(s - m), 0 where masked,
       with rows `ld_p` apart; it may be s, whose masked scores become the lowest number. A row that
       sees none of the keys keeps its state to the bit. */
    void (*softmax)(const nsa__scored *x, ptrdiff_t ld, nsa_real *s, ptrdiff_t ld_p, nsa_real *p,
                    const nsa__running *so_far);
    /* sum[j] = sum over the rows r of exp(s[r][j] - lse[r]) */
    void (*probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse, const nsa_real *s,
                        nsa_real *sum);
    /* how many of n numbers have bits of at least `least`, as integers */
    int (*at_least)(int n, const nsa_real *x, nsa__lane least);
    /* whether all numbers are finite; n is a multiple of 16 */
    int (*all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x);
    /* n numbers of each of the rows of x from `row` on as reals; rows of `to` are ld apart */
    void (*widen)(int rows, int n, const nsa_tensor *x, const void *row, ptrdiff_t ld,
                  nsa_real *to);
    /* to = factor x, for n numbers, a multiple of 16 */
    void (*scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to);
    /* c = x + c.scale c as a product ends, for rows of n numbers, a multiple of 16 */
    void (*join)(int rows, int n, const nsa_real *x, const nsa__result *c);
    /* to = g[0] x[0] + g[1] x[1] + g[2] x[2], for n numbers, a multiple of 16 */
    void (*gate)(int n, const nsa_real g[3], const nsa_real *const x[3], nsa_real *to);
    /* Row c of `to` becomes column c of x. Rows are whole vectors on both sides, and some more may
       be read and written: both hold a multiple of 16 rows or numbers of them. */
    void (*transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x, ptrdiff_t ld_to,
                      nsa_real *to);
    /* s becomes p = exp(s - lse), 0 where masked, and dp becomes ds = p (dp - delta), rows `ld`
       apart, with lse and delta of the task's rows */
    void (*gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse, const nsa_real *delta,
                     nsa_real *s, nsa_real *dp);
} nsa__tiles;

/* Products of rows of bf16. Their operands are pairs along k, their sums f32. */
typedef struct nsa__pairs {
    /* c[m][n] = factor a[m][k] b[k][n] for k pairs, where n is a multiple of 16. A result that is
       added to takes no factor. b has all rows in order. */
    void (*gemm)(int m, int n, int k, const nsa__matrix *a, const nsa__matrix *b,
                 const nsa__result *c, nsa_real factor);
    /* Rows 2 r and 2 r + 1 of n rows of x become row r of `to`, `wide` pairs; behind an odd n stand
       zeros. `wide` is a multiple of 16. */
    void (*pair_rows)(int n, int wide, const nsa__matrix *x, nsa__packed *to);
    /* n numbers of each row become n / 2 pairs, rounded, from the row's start on */
    void (*round_rows)(int rows, int n, ptrdiff_t ld, nsa_real *x);
    /* The same of x times factor[row_index[r]], or times 1 if that is NULL; x becomes the pairs
       that rows 2 r and 2 r + 1 make, rows one after the other, `ld` apart. `by_row` may be NULL;
       its rows are ld / 2 apart. n and ld are multiples of 16. */
    void (*round_pairs)(int rows, int n, ptrdiff_t ld, const int *row_index, const nsa_real *factor,
                        nsa_real *x, nsa__packed *by_row);
    /* as nsa__store of bf16 */
    void (*store)(int n, const nsa_real *x, void *row);
} nsa__pairs;

/* -- tiles of each instruction set -- */

/* What these are depends on the set that is read: NSA__T(name) is its name of a function or type,
   NSA__L the numbers of its vector. */
#define NSA__PASTE_(a, b) nsa__##a##_##b
#define NSA__PASTE(a, b)  NSA__PASTE_(a, b)
#define NSA__T(name)      NSA__PASTE(name, NSA__ISA)
#define NSA__L            (NSA__BYTES ? NSA__BYTES / (int)sizeof(nsa_real) : 1)
#define NSA__V            NSA__T(vec)
#define NSA__I            NSA__T(lanes)
#define NSA__TO(x)        (*(NSA__T(memory) *)(x))
#define NSA__FROM(x)      (*(const NSA__T(memory) *)(x))

/* NSA__BYTES is the size of a vector. A piece of a product, NSA__ROWS x NSA__VECTORS, stays in
   registers, beside NSA__VECTORS of b and a factor of a. That makes 6 x 2 + 2 + 1 = 15 of AVX2's 16
   registers, and 6 x 4 + 4 + 1 = 29 of the 32 of AVX-512 and NEON. NSA__KEEP_IN_REGISTER(x) is an
   empty instruction that may change x, so that the compiler keeps x in a register. NSA__MAX(x, a,
   b) is x = a > b ? a : b in one instruction, which GCC makes three of. NSA__NEAREST(e, x) is e = x
   rounded to whole numbers, and NSA__SCALEF(p, e) p = p 2^e, which is 0 if e is -inf, even of NaN.
   NSA__OF_F16(x, halves) is x = a vector of f16 as f32. */
#define NSA__ISA     plain
#define NSA__BYTES   0
#define NSA__ROWS    4
#define NSA__VECTORS 4
/* Where all machines have multiply-adds, GCC makes them of some copies of a loop of numbers and not
   of others, and a token that is decoded would get other bits than in the whole. */
#if defined(__GNUC__) && !defined(__clang__)
#define NSA__TARGET __attribute__((__optimize__("O3", "fp-contract=off", "no-fast-math")))
#else
#define NSA__TARGET NSA__COMPILED
#endif
#define NSA__KEEP_IN_REGISTER(x) (void)(x)
/* ---- The text of the tiles, read once per instruction set --------------------------------------
   Twin: none. Not here: products of bf16 pairs behind their pieces (pairs.inl).
   Written for vectors of NSA__L numbers in GCC's vector extension, which clang shares. Without the
   extension a vector is one number. */

/* Rows of a piece of one vector: two units of multiply-adds, each with a latency of four cycles,
   would wait for fewer chains than eight. */
#if NSA__BYTES == 64
#define NSA__NARROW 8
#else
#define NSA__NARROW NSA__ROWS
#endif

/* How a product adds up. A set that defines it has products of bf16 alone. */
#ifdef NSA__DOT
#define NSA__OF_PAIRS 1
#else
#define NSA__OF_PAIRS       0
#define NSA__DOT(sum, a, b) (sum) += (a) * (b)
#endif

/* A vector, its lanes as signed and as unsigned integers, and a vector that may lie at any address
   of a number. */
#if NSA__BYTES
typedef nsa_real NSA__T(vec) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__lane NSA__T(lanes) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__bits_t NSA__T(bits) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa_real NSA__T(memory)
    __attribute__((__vector_size__(NSA__BYTES), __aligned__(sizeof(nsa_real)), __may_alias__));
typedef uint16_t NSA__T(halves) __attribute__((__vector_size__(2 * NSA__L)));
typedef unsigned char NSA__T(eighths) __attribute__((__vector_size__(NSA__L)));
#else
typedef nsa_real NSA__T(vec);
typedef nsa__lane NSA__T(lanes);
typedef nsa__bits_t NSA__T(bits);
typedef nsa_real NSA__T(memory);
#endif

#if NSA__BYTES
NSA__INLINE NSA__TARGET NSA__V NSA__T(splat)(nsa_real x) {
    const NSA__V zero = {0}; /* x - 0 is a broadcast; x + 0 would be a sum, for -0 + 0 is 0 */
    return x - zero;
}
#if NSA__OF_PAIRS
/* A pair of the left operand in all lanes. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    NSA__T(bits) zero = {0};
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (NSA__V)(zero + pair);
}
/* NSA__L numbers of bf16 from memory of any alignment, each in the lower half of its lane. */
NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(halves_at)(const uint16_t *x) {
    NSA__T(halves) numbers;
    memcpy(&numbers, x, sizeof numbers);
#ifdef NSA__OF_HALVES
    NSA__T(bits) bits;
    NSA__OF_HALVES(bits, numbers);
    return bits;
#else
    return __builtin_convertvector(numbers, NSA__T(bits));
#endif
}
#else
/* Lane by lane on ? a : b, where the lanes of `on` are 0 or -1. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return (NSA__V)(((NSA__I)a & on) | ((NSA__I)b & ~on));
}
/* Bits j .. j + NSA__L - 1 of a mask. */
NSA__INLINE NSA__TARGET NSA__I NSA__T(seen)(uint64_t mask, int j) {
    static const nsa__lane one_bit[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                          256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    NSA__I zero = {0}, lane;
    memcpy(&lane, one_bit, sizeof lane);
    return ((zero + (nsa__lane)(mask >> j & 0xffff)) & lane) != 0;
}
#endif
#else
NSA__INLINE NSA__V NSA__T(splat)(nsa_real x) {
    return x;
}
NSA__INLINE NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return on ? a : b;
}
NSA__INLINE NSA__I NSA__T(seen)(uint64_t mask, int j) {
    return (NSA__I)(mask >> j & 1);
}
#endif

#if !NSA__OF_PAIRS
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    return NSA__T(splat)(*x);
}
NSA__INLINE NSA__TARGET NSA__V NSA__T(greater)(NSA__V a, NSA__V b) {
#ifdef NSA__MAX
    NSA__V larger;
    NSA__MAX(larger, a, b);
    return larger;
#else
    return NSA__T(pick)(a > b, a, b);
#endif
}

#if NSA__BYTES
/* 2^r for |r| <= 1/2 in f32: a minimax polynomial with a relative error of 2e-8. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2_of_fraction)(NSA__V r) {
    NSA__ARITHMETIC
    NSA__V p = r * 0.0001535336206885849f + 0.001339887439398139f;
    p = p * r + 0.00961843735695742f;
    p = p * r + 0.055503324711908573f;
    p = p * r + 0.24022647913636852f;
    p = p * r + 0.6931472028550316f;
    return p * r + 1.0f;
}
#endif

/* 2^x for x <= 0, as softmax needs it. 2^0 is exactly 1, so a shrink of 1 changes no bit. Results
   below the normal numbers are 0 or subnormal. x = e + r with e an integer and |r| <= 1/2. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2)(NSA__V x) {
    NSA__ARITHMETIC
    nsa_real lane[NSA__L];
#ifdef NSA__SCALEF /* of any x: -inf gives 0, what is too large gives inf */
    if (sizeof(nsa_real) == sizeof(float)) {
        NSA__V e, p;
        NSA__NEAREST(e, x);
        p = NSA__T(exp2_of_fraction)(x - e);
        NSA__SCALEF(p, e);
        return p;
    }
#elif NSA__BYTES
    /* Numbers from 2^23 on are whole, so x + 1.5 2^23 is rounded to the integer nearest to x: e
       stands in its lowest bits, and the sum less 1.5 2^23 is e. The bits of 2^r plus e << 23 are
       2^r 2^e, because e is added to the exponent. x is cut at -127, where the exponent becomes 0
       and the result 0. NaN stays NaN: the NaN that arithmetic makes has no low bits. */
    if (sizeof(nsa_real) == sizeof(float)) {
        x = NSA__T(greater)(NSA__T(splat)(-127), x);
        const NSA__V whole = NSA__T(splat)(12582912), e = x + whole, r = x - (e - whole);
        const NSA__V p = NSA__T(exp2_of_fraction)(r);
        return (NSA__V)((NSA__T(bits))p + ((NSA__T(bits))e << 23));
    }
#endif
    memcpy(lane, &x, sizeof x);
    for (int j = 0; j < NSA__L; j++) lane[j] = nsa__exp2(lane[j]);
    memcpy(&x, lane, sizeof x);
    return x;
}

/* e^-x, with e^-least for what is smaller. NaN stays NaN. */
NSA__INLINE NSA__TARGET NSA__V NSA__T(exp_minus)(NSA__V x, nsa_real least) {
    NSA__ARITHMETIC
    return NSA__T(exp2)(NSA__T(greater)(NSA__T(splat)(least), x) *
                        NSA__T(splat)((nsa_real)-NSA__LOG2E));
}

/* The largest lane, by halves. */
NSA__INLINE NSA__TARGET nsa_real NSA__T(largest)(NSA__V x) {
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    memcpy(&lane, order, sizeof lane);
    for (int half = NSA__L / 2; half; half /= 2)
        x = NSA__T(greater)(x, __builtin_shuffle(x, lane ^ half));
    return x[0];
#else
    nsa_real lane[NSA__LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = NSA__L / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] = lane[j] > lane[j + half] ? lane[j] : lane[j + half];
    return lane[0];
#endif
}
#endif

/* Where the rows of a piece are in the result. */
NSA__INLINE NSA__TARGET void NSA__T(piece_rows)(int rows, const nsa__product *x, int first,
                                                nsa_real *c[NSA__NARROW]) {
    nsa_real *at = x->c->data + x->column;
    const int *of_c = x->c->rows;
    if (of_c)
        of_c += first;
    else
        at += first * x->c->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) c[i] = at + (of_c ? of_c[i] : i) * x->c->row;
}

/* Writes a piece. The two kinds of result are apart, because GCC would test for them between any
   two vectors. */
NSA__INLINE NSA__TARGET void NSA__T(piece_end)(int rows, int vectors,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__product *x, int first) {
    NSA__ARITHMETIC
    nsa_real *c[NSA__NARROW];
    NSA__T(piece_rows)(rows, x, first, c);
    if (x->c->scale) {
        const nsa_real *of_row = x->c->scale + first;
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            const NSA__V scale = NSA__T(splat)(of_row[i]);
            NSA__UNROLL
            for (int j = 0; j < vectors; j++)
                NSA__TO(c[i] + j * NSA__L) = sum[i][j] + scale * NSA__FROM(c[i] + j * NSA__L);
        }
        return;
    }
    if (NSA__OF_PAIRS && !x->c->add) {
        const NSA__V factor = NSA__T(splat)(x->factor);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] *= factor;
        }
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__TO(c[i] + j * NSA__L) = sum[i][j];
    }
}

/* A step of the sums: a column of a times a row of b. */
NSA__INLINE NSA__TARGET void NSA__T(piece_step)(int rows, int vectors,
                                                NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                const nsa__packed *a[NSA__NARROW], ptrdiff_t at,
                                                const nsa__packed *b_row) {
    NSA__ARITHMETIC
    NSA__V of_b[NSA__VECTORS];
    NSA__UNROLL
    for (int j = 0; j < vectors; j++) {
        of_b[j] = NSA__FROM(b_row + j * NSA__L);
        NSA__KEEP_IN_REGISTER(of_b[j]); /* or each of the multiply-adds would load it again */
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        const NSA__V of_a = NSA__T(of_left)(a[i] + at);
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__DOT(sum[i][j], of_a, of_b[j]);
    }
    /* of a lone chain GCC, if it tunes for some machines, would make products and sums */
    if (rows * vectors == 1) NSA__KEEP_IN_REGISTER(sum[0][0]);
}

/* sum += a b: every element is one chain of multiply-adds over ascending k, whatever the piece, so
   its bits depend on its own row and column alone. `listed`, a constant: b has rows. */
NSA__INLINE NSA__TARGET void NSA__T(piece_sum)(int rows, int vectors, int listed,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__packed *a[NSA__NARROW],
                                               const nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b = x->b->data + x->column;
    const int *b_rows = x->b->rows;
    ptrdiff_t at = 0, b_at = 0;
    for (int p = 0, k = x->k; p < k; p++, at += step, b_at += row)
        NSA__T(piece_step)(rows, vectors, sum, a, at, b + (listed ? b_rows[p] * row : b_at));
}

/* The same, and in each step a line of what is read later. */
NSA__INLINE NSA__TARGET void NSA__T(piece_sum_later)(int rows, int vectors,
                                                     NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                     const nsa__packed *a[NSA__NARROW],
                                                     nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b_row = x->b->data + x->column;
    ptrdiff_t at = 0;
    for (int left = x->k, n; left > 0; left -= n) {
        while (!x->later->n) x->later++;
        nsa__lines *lines = x->later;
        n = left < lines->n ? left : lines->n;
        for (int p = 0; p < n; p++, at += step, b_row += row) {
            NSA__PREFETCH(lines->at + (ptrdiff_t)p * 64, 2);
            NSA__T(piece_step)(rows, vectors, sum, a, at, b_row);
        }
        if (lines->n == INT_MAX) continue; /* those without end are the same each time */
        lines->at += (ptrdiff_t)n * 64;
        lines->n -= n;
    }
}

/* A piece of c in registers: rows x vectors and `later`, constants once this is inlined. With `add`
   alone its chains begin with the c that is there. With `scale` they begin with 0 and scale c is
   added at the end. Softmax adds many tiles to a row: a chain for each tile rounds less than one
   chain through all of them. */
NSA__INLINE NSA__TARGET void NSA__T(piece)(int rows, int vectors, int later, nsa__product *x,
                                           int first) {
    NSA__V sum[NSA__NARROW][NSA__VECTORS];
    const NSA__V zero = NSA__T(splat)(0);
    const nsa__packed *a[NSA__NARROW], *a_first = x->a->data;
    const int *of_a = x->a->rows;
    nsa_real *c[NSA__NARROW];
    if (x->c->add && !x->c->scale) {
        NSA__T(piece_rows)(rows, x, first, c);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = NSA__FROM(c[i] + j * NSA__L);
        }
    } else {
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = zero;
        }
    }
    if (of_a)
        of_a += first;
    else
        a_first += first * x->a->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) a[i] = a_first + (of_a ? of_a[i] : i) * x->a->row;
    if (later)
        NSA__T(piece_sum_later)(rows, vectors, sum, a, x);
    else if (!NSA__OF_PAIRS && x->b->rows) /* see nsa__pairs */
        NSA__T(piece_sum)(rows, vectors, 1, sum, a, x);
    else
        NSA__T(piece_sum)(rows, vectors, 0, sum, a, x);
    NSA__T(piece_end)(rows, vectors, sum, x, first);
}

/* Rows i .. m - 1 in pieces of one vector, and of NSA__VECTORS. These are functions, as in one they
   would have too few registers, and clang holds the sums of narrow ones in memory. */
#define NSA__PIECE(name, n, vectors, later)                                              \
    NSA__TARGET NSA__NOINLINE static void NSA__T(name)(nsa__product * x, int i, int m) { \
        for (; i < m; i += n) NSA__T(piece)(n, vectors, later, x, i);                    \
    }
#define NSA__PIECES(n)             \
    NSA__PIECE(narrow##n, n, 1, 0) \
    NSA__PIECE(wide##n, n, NSA__VECTORS, 0)
NSA__PIECES(1)
NSA__PIECES(2)
NSA__PIECES(3)
NSA__PIECES(4)
#if NSA__ROWS > 4
NSA__PIECES(5)
NSA__PIECES(6)
#endif
#if NSA__NARROW > 6
NSA__PIECE(narrow7, 7, 1, 0)
NSA__PIECE(narrow8, 8, 1, 0)
#endif
NSA__PIECE(narrow_later, NSA__NARROW, 1, 1)
NSA__PIECE(wide_later, NSA__ROWS, NSA__VECTORS, 1)
static nsa__pieces *const NSA__T(pieces)[NSA__NARROW][2] = {
    {NSA__T(narrow1), NSA__T(wide1)}, {NSA__T(narrow2), NSA__T(wide2)},
    {NSA__T(narrow3), NSA__T(wide3)}, {NSA__T(narrow4), NSA__T(wide4)},
#if NSA__ROWS > 4
    {NSA__T(narrow5), NSA__T(wide5)}, {NSA__T(narrow6), NSA__T(wide6)},
#endif
#if NSA__NARROW > 6
    {NSA__T(narrow7), NULL},          {NSA__T(narrow8), NULL},
#endif
};

/* The columns that whole vectors hold, in pieces of NSA__VECTORS, then in single vectors. The last
   two pieces of m rows share what is left, because one of few rows waits for its own sums. Returns
   how many columns these are. */
NSA__TARGET static int NSA__T(product)(int m, int n, nsa__product *x) {
    for (int wide = 1; wide >= 0; wide--) {
        const int columns = wide ? NSA__VECTORS * NSA__L : NSA__L;
        const int most = wide ? NSA__ROWS : NSA__NARROW, rest = m % most;
        const int shared = rest && m > most ? most + rest : rest;
        nsa__pieces *const later = wide ? NSA__T(wide_later) : NSA__T(narrow_later);
        nsa__pieces *const whole = x->later ? later : NSA__T(pieces)[most - 1][wide];
        for (; x->column + columns <= n; x->column += columns) {
            whole(x, 0, m - shared);
            for (int i = m - shared, rows; i < m; i += rows) {
                rows = m - i > most ? (m - i + 1) / 2 : m - i;
                NSA__T(pieces)[rows - 1][wide](x, i, i + rows);
            }
        }
    }
    return x->column;
}

#if !NSA__OF_PAIRS
/* What no vector holds is the same chain of multiply-adds one by one, so an element has the same
   bits wherever it stands. */
NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c) {
    NSA__ARITHMETIC
    nsa__product x = {k, 0, a, b, c, 1, c->later};
    for (int j = NSA__T(product)(m, n, &x); j < n; j++)
        for (int i = 0; i < m; i++) {
            const nsa__packed *a_row = a->data + (a->rows ? a->rows[i] : i) * a->row;
            nsa_real *to = c->data + (c->rows ? c->rows[i] : i) * c->row + j;
            nsa_real sum = c->add && !c->scale ? *to : 0;
            for (int p = 0; p < k; p++) {
                sum += a_row[p * a->step] * b->data[(b->rows ? b->rows[p] : p) * b->row + j];
                NSA__KEEP_IN_REGISTER(sum); /* as in a piece */
            }
            *to = c->scale ? sum + c->scale[i] * *to : sum;
        }
}

/* Three loops over the rows: the maxima, the shrinks of all rows as vectors, then p and the sums.
   See nsa__tiles for the arguments. A mask of ones, which most tiles have, needs no picking. */
NSA__TARGET static void NSA__T(softmax)(const nsa__scored *scored, ptrdiff_t ld, nsa_real *s,
                                        ptrdiff_t ld_p, nsa_real *p, const nsa__running *so_far) {
    NSA__ARITHMETIC
    const int rows = scored->rows, n = scored->n, *row = scored->row;
    nsa_real *m = so_far->m, *l = so_far->l, *shrink = so_far->shrink;
    const NSA__V lowest = NSA__T(splat)(NSA__LOWEST), log2e = NSA__T(splat)((nsa_real)NSA__LOG2E);
    for (int r = 0; r < rows; r++) { /* the largest so far; masked scores become the lowest */
        const uint64_t seen = scored->mask[r / scored->group];
        nsa_real *x = s + r * ld;
        NSA__V most = lowest;
        for (int j = 0; j < n; j += NSA__L) {
            if (seen != ~(uint64_t)0)
                NSA__TO(x + j) =
                    NSA__T(pick)(NSA__T(seen)(seen, scored->first + j), NSA__FROM(x + j), lowest);
            most = NSA__T(greater)(NSA__FROM(x + j), most);
        }
        const nsa_real largest = NSA__T(largest)(most);
        nsa_real *highest = m + row[r];
        shrink[r] = *highest;
        *highest = largest > *highest ? largest : *highest;
        shrink[r] -= *highest;
    }
    /* shrink = exp(the maximum before - the maximum now) */
    for (int r = 0; r < rows; r += NSA__L)
        NSA__TO(shrink + r) = NSA__T(exp2)(NSA__FROM(shrink + r) * log2e);
    /* p, and the sums. A row that has seen no key subtracts 0 and gets p = exp(lowest) = 0, which
       lowest - lowest = 0 would make 1. Key j adds to partial sum j % 16, for vectors of any width.
     */
    for (int r = 0; r < rows; r++) {
        const NSA__V most = NSA__T(splat)(m[row[r]] == NSA__LOWEST ? 0 : m[row[r]]);
        const nsa_real *x = s + r * ld;
        nsa_real *to = p + r * ld_p, *sum = l + (ptrdiff_t)row[r] * NSA__LANES;
        for (int j = 0; j < NSA__LANES; j += NSA__L) {
            NSA__V of_lane = NSA__FROM(sum + j) * NSA__T(splat)(shrink[r]);
            for (int at = j; at < n; at += NSA__LANES) {
                const NSA__V e = NSA__T(exp2)((NSA__FROM(x + at) - most) * log2e);
                NSA__TO(to + at) = e;
                of_lane += e;
            }
            NSA__TO(sum + j) = of_lane;
        }
    }
}

/* p = exp(s - lse), at most 1 though lse be another program's, and ds = p (dp - delta), where delta
   is dout . out - dlse. s and dp are overwritten. */
NSA__TARGET static void NSA__T(gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse,
                                         const nsa_real *delta, nsa_real *s, nsa_real *dp) {
    NSA__ARITHMETIC
    const int n = x->n, *row = x->row;
    for (int r = 0; r < x->rows; r++) {
        const uint64_t seen = x->mask[r / x->group];
        const NSA__V of_sum = NSA__T(splat)(lse[row[r]]), of_row = NSA__T(splat)(delta[row[r]]);
        const NSA__V zero = NSA__T(splat)(0);
        for (int j = 0; j < n; j += NSA__L) {
            NSA__V p = NSA__T(exp_minus)(of_sum - NSA__FROM(s + r * ld + j), 0);
            NSA__V ds = p * (NSA__FROM(dp + r * ld + j) - of_row);
            if (seen != ~(uint64_t)0) { /* ds too: what is masked may overflow, and 0 inf is NaN */
                const NSA__I on = NSA__T(seen)(seen, x->first + j);
                p = NSA__T(pick)(on, p, zero);
                ds = NSA__T(pick)(on, ds, zero);
            }
            NSA__TO(s + r * ld + j) = p;
            NSA__TO(dp + r * ld + j) = ds;
        }
    }
}

/* Eq. 8 and 10: p_cmp of each key, summed over the heads of a group, for one query. */
NSA__TARGET static void NSA__T(probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse,
                                            const nsa_real *s, nsa_real *sum) {
    NSA__ARITHMETIC
    /* A caller of nsa_select_blocks may give another lse than that of s, and p of a number is wrong
       then but neither negative nor NaN. */
    for (int j = 0; j < n; j += NSA__L) {
        NSA__V p = NSA__T(splat)(0);
        for (int r = 0; r < rows; r++)
            p += NSA__T(exp_minus)(NSA__T(splat)(lse[r]) - NSA__FROM(s + r * ld + j), -87);
        NSA__TO(sum + j) = p;
    }
}

/* How many x, as integers, are at least `least`: a compare makes -1 of true, which is
   subtracted. */
NSA__TARGET static int NSA__T(at_least)(int n, const nsa_real *x, nsa__lane least) {
    int j = 0, sum = 0;
#if NSA__BYTES
    nsa__lane lane[NSA__L];
    NSA__I count = {0};
    const NSA__I bound = count + least;
    for (; j + NSA__L <= n; j += NSA__L)
        count -= (NSA__I)NSA__FROM(x + j) >= bound; /* true is -1 */
    memcpy(lane, &count, sizeof count);
    for (int i = 0; i < NSA__L; i++) sum += (int)lane[i];
#endif
    for (; j < n; j++) {
        nsa__lane bits;
        memcpy(&bits, x + j, sizeof bits);
        sum += bits >= least;
    }
    return sum;
}

NSA__TARGET static int NSA__T(all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x) {
    NSA__T(bits) bits, carry = {0};
    nsa__bits_t lane[NSA__L], sum = 0;
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L) {
            memcpy(&bits, x + j, sizeof bits);
            carry |= NSA__EXPONENT_CARRY(bits);
        }
    memcpy(lane, &carry, sizeof carry);
    for (int j = 0; j < NSA__L; j++) sum |= lane[j];
    return !(sum & NSA__SIGN);
}

NSA__TARGET static void NSA__T(widen)(int rows, int n, const nsa_tensor *x, const void *row,
                                      ptrdiff_t ld, nsa_real *to) {
    const nsa_dtype dtype = x->dtype;
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(dtype);
    const ptrdiff_t apart = rows > 1 ? (ptrdiff_t)x->token * bytes : 0; /* of one row: anything */
    const char *from = (const char *)row;
    for (int r = 0; r < rows; r++, to += ld) {
        int j = 0;
        if (r) from += apart;
#if defined(NSA__OF_F16) && NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) || __GNUC__ > 8)
        for (; dtype == NSA_F16 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(halves) numbers;
            NSA__V reals;
            memcpy(&numbers, from + j * bytes, sizeof numbers);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals;
        }
        for (; dtype == NSA_F8 && j + NSA__L <= n; j += NSA__L) { /* as nsa__from_f8 */
            NSA__T(eighths) codes;
            NSA__V reals;
            memcpy(&codes, from + j, sizeof codes);
            const NSA__T(halves) code = __builtin_convertvector(codes, NSA__T(halves));
            const NSA__T(halves) numbers = (code & 0x80) << 8 | (code & 0x7f) << 7 |
                                           ((NSA__T(halves))((code & 0x7f) == 0x7f) & 0x7c00);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals * 256 * NSA__T(splat)(nsa__row_scale(from, n, j));
        }
#endif
        nsa__widen(to, dtype, from, j, n);
    }
}

NSA__TARGET static void NSA__T(scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to) {
    for (int j = 0; j < n; j += NSA__L) NSA__TO(to + j) = NSA__T(splat)(factor) * NSA__FROM(x + j);
}

NSA__TARGET static void NSA__T(join)(int rows, int n, const nsa_real *x, const nsa__result *c) {
    NSA__ARITHMETIC
    for (int r = 0; r < rows; r++, x += n) {
        const NSA__V scale = NSA__T(splat)(c->scale[r]);
        nsa_real *to = c->data + (c->rows ? c->rows[r] : r) * c->row;
        for (int j = 0; j < n; j += NSA__L)
            NSA__TO(to + j) = NSA__FROM(x + j) + scale * NSA__FROM(to + j);
    }
}

NSA__TARGET static void NSA__T(gate)(int n, const nsa_real g[3], const nsa_real *const x[3],
                                     nsa_real *to) {
    NSA__ARITHMETIC
    const NSA__V a = NSA__T(splat)(g[0]), b = NSA__T(splat)(g[1]), c = NSA__T(splat)(g[2]);
    for (int j = 0; j < n; j += NSA__L)
        NSA__TO(to + j) =
            a * NSA__FROM(x[0] + j) + b * NSA__FROM(x[1] + j) + c * NSA__FROM(x[2] + j);
}

/* Blocks of NSA__L x NSA__L, then single columns, which are cheaper than a block if they are few. A
   step exchanges the halves that are off the diagonal, of the block, then of its quarters, and so
   on. */
NSA__TARGET static void NSA__T(transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x,
                                          ptrdiff_t ld_to, nsa_real *to) {
    int c = 0, most = columns;
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    NSA__V block[NSA__L];
    memcpy(&lane, order, sizeof lane);
    for (; c + NSA__L / 4 < columns; c += NSA__L)
        for (int r = 0; r < rows; r += NSA__L) {
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++) block[i] = NSA__FROM(x + (r + i) * ld + c);
            NSA__UNROLL
            for (int half = NSA__L / 2; half; half /= 2) {
                /* lanes below `half`, then those from `half` on, of two rows */
                const NSA__I low = lane + (((lane & half) != 0) & (NSA__L - half)),
                             high = low + half;
                NSA__UNROLL
                for (int i = 0; i < NSA__L; i++)
                    if (!(i & half)) {
                        const NSA__V a = block[i], b = block[i + half];
                        block[i] = __builtin_shuffle(a, b, low);
                        block[i + half] = __builtin_shuffle(a, b, high);
                    }
            }
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++)
                if (c + i < columns) NSA__TO(to + (c + i) * ld_to + r) = block[i];
        }
    most = NSA__L / 4;
#endif
    /* what is left is counted too: GCC 10 warns that c might pass 2^31, where no column is left */
    for (int i = 0; i < most && c < columns; i++, c++)
        for (int r = 0; r < rows; r++) to[c * ld_to + r] = x[r * ld + c];
}

static const nsa__tiles NSA__T(tiles) = {NSA__T(gemm),      NSA__T(softmax),    NSA__T(probability),
                                         NSA__T(at_least),  NSA__T(all_finite), NSA__T(widen),
                                         NSA__T(scale),     NSA__T(join),       NSA__T(gate),
                                         NSA__T(transpose), NSA__T(gradient)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS
#endif

/* One of these, where there is one: no machine has two. */
#if defined(NSA__HAS_SSE2)
#define NSA__ISA                 sse2
#define NSA__BYTES               16
#define NSA__ROWS                4
#define NSA__VECTORS             2
#define NSA__TARGET              NSA__COMPILED
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+x"(x))
#elif defined(NSA__HAS_NEON)
#define NSA__ISA                 neon
#define NSA__BYTES               16
#define NSA__ROWS                6
#define NSA__VECTORS             4
#define NSA__TARGET              NSA__COMPILED
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+w"(x))
#define NSA__OF_F16(x, halves)   __asm__("fcvtl %0.4s, %1.4h" : "=w"(x) : "w"(halves))
#elif defined(NSA__HAS_SIMD128)
#define NSA__ISA                 simd128
#define NSA__BYTES               16
#define NSA__ROWS                4
#define NSA__VECTORS             2
#define NSA__TARGET              NSA__COMPILED
#define NSA__KEEP_IN_REGISTER(x) (void)(x) /* the engine that runs it chooses the registers */
#endif
#ifdef NSA__ISA

#if NSA__BYTES == 64
#define NSA__NARROW 8
#else
#define NSA__NARROW NSA__ROWS
#endif

#ifdef NSA__DOT
#define NSA__OF_PAIRS 1
#else
#define NSA__OF_PAIRS       0
#define NSA__DOT(sum, a, b) (sum) += (a) * (b)
#endif

#if NSA__BYTES
typedef nsa_real NSA__T(vec) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__lane NSA__T(lanes) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__bits_t NSA__T(bits) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa_real NSA__T(memory)
    __attribute__((__vector_size__(NSA__BYTES), __aligned__(sizeof(nsa_real)), __may_alias__));
typedef uint16_t NSA__T(halves) __attribute__((__vector_size__(2 * NSA__L)));
typedef unsigned char NSA__T(eighths) __attribute__((__vector_size__(NSA__L)));
#else
typedef nsa_real NSA__T(vec);
typedef nsa__lane NSA__T(lanes);
typedef nsa__bits_t NSA__T(bits);
typedef nsa_real NSA__T(memory);
#endif

#if NSA__BYTES
NSA__INLINE NSA__TARGET NSA__V NSA__T(splat)(nsa_real x) {
    const NSA__V zero = {0};
    return x - zero;
}
#if NSA__OF_PAIRS

NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    NSA__T(bits) zero = {0};
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (NSA__V)(zero + pair);
}

NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(halves_at)(const uint16_t *x) {
    NSA__T(halves) numbers;
    memcpy(&numbers, x, sizeof numbers);
#ifdef NSA__OF_HALVES
    NSA__T(bits) bits;
    NSA__OF_HALVES(bits, numbers);
    return bits;
#else
    return __builtin_convertvector(numbers, NSA__T(bits));
#endif
}
#else

NSA__INLINE NSA__TARGET NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return (NSA__V)(((NSA__I)a & on) | ((NSA__I)b & ~on));
}

NSA__INLINE NSA__TARGET NSA__I NSA__T(seen)(uint64_t mask, int j) {
    static const nsa__lane one_bit[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                          256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    NSA__I zero = {0}, lane;
    memcpy(&lane, one_bit, sizeof lane);
    return ((zero + (nsa__lane)(mask >> j & 0xffff)) & lane) != 0;
}
#endif
#else
NSA__INLINE NSA__V NSA__T(splat)(nsa_real x) {
    return x;
}
NSA__INLINE NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return on ? a : b;
}
NSA__INLINE NSA__I NSA__T(seen)(uint64_t mask, int j) {
    return (NSA__I)(mask >> j & 1);
}
#endif

#if !NSA__OF_PAIRS
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    return NSA__T(splat)(*x);
}
NSA__INLINE NSA__TARGET NSA__V NSA__T(greater)(NSA__V a, NSA__V b) {
#ifdef NSA__MAX
    NSA__V larger;
    NSA__MAX(larger, a, b);
    return larger;
#else
    return NSA__T(pick)(a > b, a, b);
#endif
}

#if NSA__BYTES

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2_of_fraction)(NSA__V r) {
    NSA__ARITHMETIC
    NSA__V p = r * 0.0001535336206885849f + 0.001339887439398139f;
    p = p * r + 0.00961843735695742f;
    p = p * r + 0.055503324711908573f;
    p = p * r + 0.24022647913636852f;
    p = p * r + 0.6931472028550316f;
    return p * r + 1.0f;
}
#endif

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2)(NSA__V x) {
    NSA__ARITHMETIC
    nsa_real lane[NSA__L];
#ifdef NSA__SCALEF
    if (sizeof(nsa_real) == sizeof(float)) {
        NSA__V e, p;
        NSA__NEAREST(e, x);
        p = NSA__T(exp2_of_fraction)(x - e);
        NSA__SCALEF(p, e);
        return p;
    }
#elif NSA__BYTES

    if (sizeof(nsa_real) == sizeof(float)) {
        x = NSA__T(greater)(NSA__T(splat)(-127), x);
        const NSA__V whole = NSA__T(splat)(12582912), e = x + whole, r = x - (e - whole);
        const NSA__V p = NSA__T(exp2_of_fraction)(r);
        return (NSA__V)((NSA__T(bits))p + ((NSA__T(bits))e << 23));
    }
#endif
    memcpy(lane, &x, sizeof x);
    for (int j = 0; j < NSA__L; j++) lane[j] = nsa__exp2(lane[j]);
    memcpy(&x, lane, sizeof x);
    return x;
}

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp_minus)(NSA__V x, nsa_real least) {
    NSA__ARITHMETIC
    return NSA__T(exp2)(NSA__T(greater)(NSA__T(splat)(least), x) *
                        NSA__T(splat)((nsa_real)-NSA__LOG2E));
}

NSA__INLINE NSA__TARGET nsa_real NSA__T(largest)(NSA__V x) {
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    memcpy(&lane, order, sizeof lane);
    for (int half = NSA__L / 2; half; half /= 2)
        x = NSA__T(greater)(x, __builtin_shuffle(x, lane ^ half));
    return x[0];
#else
    nsa_real lane[NSA__LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = NSA__L / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] = lane[j] > lane[j + half] ? lane[j] : lane[j + half];
    return lane[0];
#endif
}
#endif

NSA__INLINE NSA__TARGET void NSA__T(piece_rows)(int rows, const nsa__product *x, int first,
                                                nsa_real *c[NSA__NARROW]) {
    nsa_real *at = x->c->data + x->column;
    const int *of_c = x->c->rows;
    if (of_c)
        of_c += first;
    else
        at += first * x->c->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) c[i] = at + (of_c ? of_c[i] : i) * x->c->row;
}

NSA__INLINE NSA__TARGET void NSA__T(piece_end)(int rows, int vectors,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__product *x, int first) {
    NSA__ARITHMETIC
    nsa_real *c[NSA__NARROW];
    NSA__T(piece_rows)(rows, x, first, c);
    if (x->c->scale) {
        const nsa_real *of_row = x->c->scale + first;
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            const NSA__V scale = NSA__T(splat)(of_row[i]);
            NSA__UNROLL
            for (int j = 0; j < vectors; j++)
                NSA__TO(c[i] + j * NSA__L) = sum[i][j] + scale * NSA__FROM(c[i] + j * NSA__L);
        }
        return;
    }
    if (NSA__OF_PAIRS && !x->c->add) {
        const NSA__V factor = NSA__T(splat)(x->factor);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] *= factor;
        }
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__TO(c[i] + j * NSA__L) = sum[i][j];
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece_step)(int rows, int vectors,
                                                NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                const nsa__packed *a[NSA__NARROW], ptrdiff_t at,
                                                const nsa__packed *b_row) {
    NSA__ARITHMETIC
    NSA__V of_b[NSA__VECTORS];
    NSA__UNROLL
    for (int j = 0; j < vectors; j++) {
        of_b[j] = NSA__FROM(b_row + j * NSA__L);
        NSA__KEEP_IN_REGISTER(of_b[j]);
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        const NSA__V of_a = NSA__T(of_left)(a[i] + at);
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__DOT(sum[i][j], of_a, of_b[j]);
    }

    if (rows * vectors == 1) NSA__KEEP_IN_REGISTER(sum[0][0]);
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum)(int rows, int vectors, int listed,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__packed *a[NSA__NARROW],
                                               const nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b = x->b->data + x->column;
    const int *b_rows = x->b->rows;
    ptrdiff_t at = 0, b_at = 0;
    for (int p = 0, k = x->k; p < k; p++, at += step, b_at += row)
        NSA__T(piece_step)(rows, vectors, sum, a, at, b + (listed ? b_rows[p] * row : b_at));
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum_later)(int rows, int vectors,
                                                     NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                     const nsa__packed *a[NSA__NARROW],
                                                     nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b_row = x->b->data + x->column;
    ptrdiff_t at = 0;
    for (int left = x->k, n; left > 0; left -= n) {
        while (!x->later->n) x->later++;
        nsa__lines *lines = x->later;
        n = left < lines->n ? left : lines->n;
        for (int p = 0; p < n; p++, at += step, b_row += row) {
            NSA__PREFETCH(lines->at + (ptrdiff_t)p * 64, 2);
            NSA__T(piece_step)(rows, vectors, sum, a, at, b_row);
        }
        if (lines->n == INT_MAX) continue;
        lines->at += (ptrdiff_t)n * 64;
        lines->n -= n;
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece)(int rows, int vectors, int later, nsa__product *x,
                                           int first) {
    NSA__V sum[NSA__NARROW][NSA__VECTORS];
    const NSA__V zero = NSA__T(splat)(0);
    const nsa__packed *a[NSA__NARROW], *a_first = x->a->data;
    const int *of_a = x->a->rows;
    nsa_real *c[NSA__NARROW];
    if (x->c->add && !x->c->scale) {
        NSA__T(piece_rows)(rows, x, first, c);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = NSA__FROM(c[i] + j * NSA__L);
        }
    } else {
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = zero;
        }
    }
    if (of_a)
        of_a += first;
    else
        a_first += first * x->a->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) a[i] = a_first + (of_a ? of_a[i] : i) * x->a->row;
    if (later)
        NSA__T(piece_sum_later)(rows, vectors, sum, a, x);
    else if (!NSA__OF_PAIRS && x->b->rows)
        NSA__T(piece_sum)(rows, vectors, 1, sum, a, x);
    else
        NSA__T(piece_sum)(rows, vectors, 0, sum, a, x);
    NSA__T(piece_end)(rows, vectors, sum, x, first);
}

#define NSA__PIECE(name, n, vectors, later)                                              \
    NSA__TARGET NSA__NOINLINE static void NSA__T(name)(nsa__product * x, int i, int m) { \
        for (; i < m; i += n) NSA__T(piece)(n, vectors, later, x, i);                    \
    }
#define NSA__PIECES(n)             \
    NSA__PIECE(narrow##n, n, 1, 0) \
    NSA__PIECE(wide##n, n, NSA__VECTORS, 0)
NSA__PIECES(1)
NSA__PIECES(2)
NSA__PIECES(3)
NSA__PIECES(4)
#if NSA__ROWS > 4
NSA__PIECES(5)
NSA__PIECES(6)
#endif
#if NSA__NARROW > 6
NSA__PIECE(narrow7, 7, 1, 0)
NSA__PIECE(narrow8, 8, 1, 0)
#endif
NSA__PIECE(narrow_later, NSA__NARROW, 1, 1)
NSA__PIECE(wide_later, NSA__ROWS, NSA__VECTORS, 1)
static nsa__pieces *const NSA__T(pieces)[NSA__NARROW][2] = {
    {NSA__T(narrow1), NSA__T(wide1)}, {NSA__T(narrow2), NSA__T(wide2)},
    {NSA__T(narrow3), NSA__T(wide3)}, {NSA__T(narrow4), NSA__T(wide4)},
#if NSA__ROWS > 4
    {NSA__T(narrow5), NSA__T(wide5)}, {NSA__T(narrow6), NSA__T(wide6)},
#endif
#if NSA__NARROW > 6
    {NSA__T(narrow7), NULL},          {NSA__T(narrow8), NULL},
#endif
};

NSA__TARGET static int NSA__T(product)(int m, int n, nsa__product *x) {
    for (int wide = 1; wide >= 0; wide--) {
        const int columns = wide ? NSA__VECTORS * NSA__L : NSA__L;
        const int most = wide ? NSA__ROWS : NSA__NARROW, rest = m % most;
        const int shared = rest && m > most ? most + rest : rest;
        nsa__pieces *const later = wide ? NSA__T(wide_later) : NSA__T(narrow_later);
        nsa__pieces *const whole = x->later ? later : NSA__T(pieces)[most - 1][wide];
        for (; x->column + columns <= n; x->column += columns) {
            whole(x, 0, m - shared);
            for (int i = m - shared, rows; i < m; i += rows) {
                rows = m - i > most ? (m - i + 1) / 2 : m - i;
                NSA__T(pieces)[rows - 1][wide](x, i, i + rows);
            }
        }
    }
    return x->column;
}

#if !NSA__OF_PAIRS

NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c) {
    NSA__ARITHMETIC
    nsa__product x = {k, 0, a, b, c, 1, c->later};
    for (int j = NSA__T(product)(m, n, &x); j < n; j++)
        for (int i = 0; i < m; i++) {
            const nsa__packed *a_row = a->data + (a->rows ? a->rows[i] : i) * a->row;
            nsa_real *to = c->data + (c->rows ? c->rows[i] : i) * c->row + j;
            nsa_real sum = c->add && !c->scale ? *to : 0;
            for (int p = 0; p < k; p++) {
                sum += a_row[p * a->step] * b->data[(b->rows ? b->rows[p] : p) * b->row + j];
                NSA__KEEP_IN_REGISTER(sum);
            }
            *to = c->scale ? sum + c->scale[i] * *to : sum;
        }
}

NSA__TARGET static void NSA__T(softmax)(const nsa__scored *scored, ptrdiff_t ld, nsa_real *s,
                                        ptrdiff_t ld_p, nsa_real *p, const nsa__running *so_far) {
    NSA__ARITHMETIC
    const int rows = scored->rows, n = scored->n, *row = scored->row;
    nsa_real *m = so_far->m, *l = so_far->l, *shrink = so_far->shrink;
    const NSA__V lowest = NSA__T(splat)(NSA__LOWEST), log2e = NSA__T(splat)((nsa_real)NSA__LOG2E);
    for (int r = 0; r < rows; r++) {
        const uint64_t seen = scored->mask[r / scored->group];
        nsa_real *x = s + r * ld;
        NSA__V most = lowest;
        for (int j = 0; j < n; j += NSA__L) {
            if (seen != ~(uint64_t)0)
                NSA__TO(x + j) =
                    NSA__T(pick)(NSA__T(seen)(seen, scored->first + j), NSA__FROM(x + j), lowest);
            most = NSA__T(greater)(NSA__FROM(x + j), most);
        }
        const nsa_real largest = NSA__T(largest)(most);
        nsa_real *highest = m + row[r];
        shrink[r] = *highest;
        *highest = largest > *highest ? largest : *highest;
        shrink[r] -= *highest;
    }

    for (int r = 0; r < rows; r += NSA__L)
        NSA__TO(shrink + r) = NSA__T(exp2)(NSA__FROM(shrink + r) * log2e);

    for (int r = 0; r < rows; r++) {
        const NSA__V most = NSA__T(splat)(m[row[r]] == NSA__LOWEST ? 0 : m[row[r]]);
        const nsa_real *x = s + r * ld;
        nsa_real *to = p + r * ld_p, *sum = l + (ptrdiff_t)row[r] * NSA__LANES;
        for (int j = 0; j < NSA__LANES; j += NSA__L) {
            NSA__V of_lane = NSA__FROM(sum + j) * NSA__T(splat)(shrink[r]);
            for (int at = j; at < n; at += NSA__LANES) {
                const NSA__V e = NSA__T(exp2)((NSA__FROM(x + at) - most) * log2e);
                NSA__TO(to + at) = e;
                of_lane += e;
            }
            NSA__TO(sum + j) = of_lane;
        }
    }
}

NSA__TARGET static void NSA__T(gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse,
                                         const nsa_real *delta, nsa_real *s, nsa_real *dp) {
    NSA__ARITHMETIC
    const int n = x->n, *row = x->row;
    for (int r = 0; r < x->rows; r++) {
        const uint64_t seen = x->mask[r / x->group];
        const NSA__V of_sum = NSA__T(splat)(lse[row[r]]), of_row = NSA__T(splat)(delta[row[r]]);
        const NSA__V zero = NSA__T(splat)(0);
        for (int j = 0; j < n; j += NSA__L) {
            NSA__V p = NSA__T(exp_minus)(of_sum - NSA__FROM(s + r * ld + j), 0);
            NSA__V ds = p * (NSA__FROM(dp + r * ld + j) - of_row);
            if (seen != ~(uint64_t)0) {
                const NSA__I on = NSA__T(seen)(seen, x->first + j);
                p = NSA__T(pick)(on, p, zero);
                ds = NSA__T(pick)(on, ds, zero);
            }
            NSA__TO(s + r * ld + j) = p;
            NSA__TO(dp + r * ld + j) = ds;
        }
    }
}

NSA__TARGET static void NSA__T(probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse,
                                            const nsa_real *s, nsa_real *sum) {
    NSA__ARITHMETIC

    for (int j = 0; j < n; j += NSA__L) {
        NSA__V p = NSA__T(splat)(0);
        for (int r = 0; r < rows; r++)
            p += NSA__T(exp_minus)(NSA__T(splat)(lse[r]) - NSA__FROM(s + r * ld + j), -87);
        NSA__TO(sum + j) = p;
    }
}

NSA__TARGET static int NSA__T(at_least)(int n, const nsa_real *x, nsa__lane least) {
    int j = 0, sum = 0;
#if NSA__BYTES
    nsa__lane lane[NSA__L];
    NSA__I count = {0};
    const NSA__I bound = count + least;
    for (; j + NSA__L <= n; j += NSA__L)
        count -= (NSA__I)NSA__FROM(x + j) >= bound;
    memcpy(lane, &count, sizeof count);
    for (int i = 0; i < NSA__L; i++) sum += (int)lane[i];
#endif
    for (; j < n; j++) {
        nsa__lane bits;
        memcpy(&bits, x + j, sizeof bits);
        sum += bits >= least;
    }
    return sum;
}

NSA__TARGET static int NSA__T(all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x) {
    NSA__T(bits) bits, carry = {0};
    nsa__bits_t lane[NSA__L], sum = 0;
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L) {
            memcpy(&bits, x + j, sizeof bits);
            carry |= NSA__EXPONENT_CARRY(bits);
        }
    memcpy(lane, &carry, sizeof carry);
    for (int j = 0; j < NSA__L; j++) sum |= lane[j];
    return !(sum & NSA__SIGN);
}

NSA__TARGET static void NSA__T(widen)(int rows, int n, const nsa_tensor *x, const void *row,
                                      ptrdiff_t ld, nsa_real *to) {
    const nsa_dtype dtype = x->dtype;
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(dtype);
    const ptrdiff_t apart = rows > 1 ? (ptrdiff_t)x->token * bytes : 0;
    const char *from = (const char *)row;
    for (int r = 0; r < rows; r++, to += ld) {
        int j = 0;
        if (r) from += apart;
#if defined(NSA__OF_F16) && NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) || __GNUC__ > 8)
        for (; dtype == NSA_F16 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(halves) numbers;
            NSA__V reals;
            memcpy(&numbers, from + j * bytes, sizeof numbers);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals;
        }
        for (; dtype == NSA_F8 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(eighths) codes;
            NSA__V reals;
            memcpy(&codes, from + j, sizeof codes);
            const NSA__T(halves) code = __builtin_convertvector(codes, NSA__T(halves));
            const NSA__T(halves) numbers = (code & 0x80) << 8 | (code & 0x7f) << 7 |
                                           ((NSA__T(halves))((code & 0x7f) == 0x7f) & 0x7c00);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals * 256 * NSA__T(splat)(nsa__row_scale(from, n, j));
        }
#endif
        nsa__widen(to, dtype, from, j, n);
    }
}

NSA__TARGET static void NSA__T(scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to) {
    for (int j = 0; j < n; j += NSA__L) NSA__TO(to + j) = NSA__T(splat)(factor) * NSA__FROM(x + j);
}

NSA__TARGET static void NSA__T(join)(int rows, int n, const nsa_real *x, const nsa__result *c) {
    NSA__ARITHMETIC
    for (int r = 0; r < rows; r++, x += n) {
        const NSA__V scale = NSA__T(splat)(c->scale[r]);
        nsa_real *to = c->data + (c->rows ? c->rows[r] : r) * c->row;
        for (int j = 0; j < n; j += NSA__L)
            NSA__TO(to + j) = NSA__FROM(x + j) + scale * NSA__FROM(to + j);
    }
}

NSA__TARGET static void NSA__T(gate)(int n, const nsa_real g[3], const nsa_real *const x[3],
                                     nsa_real *to) {
    NSA__ARITHMETIC
    const NSA__V a = NSA__T(splat)(g[0]), b = NSA__T(splat)(g[1]), c = NSA__T(splat)(g[2]);
    for (int j = 0; j < n; j += NSA__L)
        NSA__TO(to + j) =
            a * NSA__FROM(x[0] + j) + b * NSA__FROM(x[1] + j) + c * NSA__FROM(x[2] + j);
}

NSA__TARGET static void NSA__T(transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x,
                                          ptrdiff_t ld_to, nsa_real *to) {
    int c = 0, most = columns;
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    NSA__V block[NSA__L];
    memcpy(&lane, order, sizeof lane);
    for (; c + NSA__L / 4 < columns; c += NSA__L)
        for (int r = 0; r < rows; r += NSA__L) {
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++) block[i] = NSA__FROM(x + (r + i) * ld + c);
            NSA__UNROLL
            for (int half = NSA__L / 2; half; half /= 2) {

                const NSA__I low = lane + (((lane & half) != 0) & (NSA__L - half)),
                             high = low + half;
                NSA__UNROLL
                for (int i = 0; i < NSA__L; i++)
                    if (!(i & half)) {
                        const NSA__V a = block[i], b = block[i + half];
                        block[i] = __builtin_shuffle(a, b, low);
                        block[i + half] = __builtin_shuffle(a, b, high);
                    }
            }
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++)
                if (c + i < columns) NSA__TO(to + (c + i) * ld_to + r) = block[i];
        }
    most = NSA__L / 4;
#endif

    for (int i = 0; i < most && c < columns; i++, c++)
        for (int r = 0; r < rows; r++) to[c * ld_to + r] = x[r * ld + c];
}

static const nsa__tiles NSA__T(tiles) = {NSA__T(gemm),      NSA__T(softmax),    NSA__T(probability),
                                         NSA__T(at_least),  NSA__T(all_finite), NSA__T(widen),
                                         NSA__T(scale),     NSA__T(join),       NSA__T(gate),
                                         NSA__T(transpose), NSA__T(gradient)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS
#endif

#endif

#ifdef NSA__HAS_AVX
#define NSA__LETTER_float     "s" /* of single and double in x86's names of instructions */
#define NSA__LETTER_double    "d"
#define NSA__LETTER_OF_(real) NSA__LETTER_##real
#define NSA__LETTER_OF(real)  NSA__LETTER_OF_(real)
#define NSA__OF_TWO(name)     "v" name "p" NSA__LETTER_OF(NSA_REAL) " {%2, %1, %0|%0, %1, %2}"

/* The machine comes behind the level: with -Os GCC 13 and 14 take a level that follows for the
   end of the machine, and compile vectors as memory. */
#define NSA__ISA                 avx2
#define NSA__BYTES               32
#define NSA__ROWS                6
#define NSA__VECTORS             2
#define NSA__TARGET              NSA__COMPILED __attribute__((__target__("avx2,fma")))
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+x"(x))
#define NSA__MAX(x, a, b)        __asm__(NSA__OF_TWO("max") : "=x"(x) : "x"(a), "x"(b))
#ifdef NSA__HAS_F16C
#define NSA__OF_F16(x, halves) __asm__("vcvtph2ps {%1, %0|%0, %1}" : "=x"(x) : "xm"(halves))
#endif

#if NSA__BYTES == 64
#define NSA__NARROW 8
#else
#define NSA__NARROW NSA__ROWS
#endif

#ifdef NSA__DOT
#define NSA__OF_PAIRS 1
#else
#define NSA__OF_PAIRS       0
#define NSA__DOT(sum, a, b) (sum) += (a) * (b)
#endif

#if NSA__BYTES
typedef nsa_real NSA__T(vec) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__lane NSA__T(lanes) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__bits_t NSA__T(bits) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa_real NSA__T(memory)
    __attribute__((__vector_size__(NSA__BYTES), __aligned__(sizeof(nsa_real)), __may_alias__));
typedef uint16_t NSA__T(halves) __attribute__((__vector_size__(2 * NSA__L)));
typedef unsigned char NSA__T(eighths) __attribute__((__vector_size__(NSA__L)));
#else
typedef nsa_real NSA__T(vec);
typedef nsa__lane NSA__T(lanes);
typedef nsa__bits_t NSA__T(bits);
typedef nsa_real NSA__T(memory);
#endif

#if NSA__BYTES
NSA__INLINE NSA__TARGET NSA__V NSA__T(splat)(nsa_real x) {
    const NSA__V zero = {0};
    return x - zero;
}
#if NSA__OF_PAIRS

NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    NSA__T(bits) zero = {0};
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (NSA__V)(zero + pair);
}

NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(halves_at)(const uint16_t *x) {
    NSA__T(halves) numbers;
    memcpy(&numbers, x, sizeof numbers);
#ifdef NSA__OF_HALVES
    NSA__T(bits) bits;
    NSA__OF_HALVES(bits, numbers);
    return bits;
#else
    return __builtin_convertvector(numbers, NSA__T(bits));
#endif
}
#else

NSA__INLINE NSA__TARGET NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return (NSA__V)(((NSA__I)a & on) | ((NSA__I)b & ~on));
}

NSA__INLINE NSA__TARGET NSA__I NSA__T(seen)(uint64_t mask, int j) {
    static const nsa__lane one_bit[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                          256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    NSA__I zero = {0}, lane;
    memcpy(&lane, one_bit, sizeof lane);
    return ((zero + (nsa__lane)(mask >> j & 0xffff)) & lane) != 0;
}
#endif
#else
NSA__INLINE NSA__V NSA__T(splat)(nsa_real x) {
    return x;
}
NSA__INLINE NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return on ? a : b;
}
NSA__INLINE NSA__I NSA__T(seen)(uint64_t mask, int j) {
    return (NSA__I)(mask >> j & 1);
}
#endif

#if !NSA__OF_PAIRS
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    return NSA__T(splat)(*x);
}
NSA__INLINE NSA__TARGET NSA__V NSA__T(greater)(NSA__V a, NSA__V b) {
#ifdef NSA__MAX
    NSA__V larger;
    NSA__MAX(larger, a, b);
    return larger;
#else
    return NSA__T(pick)(a > b, a, b);
#endif
}

#if NSA__BYTES

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2_of_fraction)(NSA__V r) {
    NSA__ARITHMETIC
    NSA__V p = r * 0.0001535336206885849f + 0.001339887439398139f;
    p = p * r + 0.00961843735695742f;
    p = p * r + 0.055503324711908573f;
    p = p * r + 0.24022647913636852f;
    p = p * r + 0.6931472028550316f;
    return p * r + 1.0f;
}
#endif

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2)(NSA__V x) {
    NSA__ARITHMETIC
    nsa_real lane[NSA__L];
#ifdef NSA__SCALEF
    if (sizeof(nsa_real) == sizeof(float)) {
        NSA__V e, p;
        NSA__NEAREST(e, x);
        p = NSA__T(exp2_of_fraction)(x - e);
        NSA__SCALEF(p, e);
        return p;
    }
#elif NSA__BYTES

    if (sizeof(nsa_real) == sizeof(float)) {
        x = NSA__T(greater)(NSA__T(splat)(-127), x);
        const NSA__V whole = NSA__T(splat)(12582912), e = x + whole, r = x - (e - whole);
        const NSA__V p = NSA__T(exp2_of_fraction)(r);
        return (NSA__V)((NSA__T(bits))p + ((NSA__T(bits))e << 23));
    }
#endif
    memcpy(lane, &x, sizeof x);
    for (int j = 0; j < NSA__L; j++) lane[j] = nsa__exp2(lane[j]);
    memcpy(&x, lane, sizeof x);
    return x;
}

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp_minus)(NSA__V x, nsa_real least) {
    NSA__ARITHMETIC
    return NSA__T(exp2)(NSA__T(greater)(NSA__T(splat)(least), x) *
                        NSA__T(splat)((nsa_real)-NSA__LOG2E));
}

NSA__INLINE NSA__TARGET nsa_real NSA__T(largest)(NSA__V x) {
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    memcpy(&lane, order, sizeof lane);
    for (int half = NSA__L / 2; half; half /= 2)
        x = NSA__T(greater)(x, __builtin_shuffle(x, lane ^ half));
    return x[0];
#else
    nsa_real lane[NSA__LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = NSA__L / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] = lane[j] > lane[j + half] ? lane[j] : lane[j + half];
    return lane[0];
#endif
}
#endif

NSA__INLINE NSA__TARGET void NSA__T(piece_rows)(int rows, const nsa__product *x, int first,
                                                nsa_real *c[NSA__NARROW]) {
    nsa_real *at = x->c->data + x->column;
    const int *of_c = x->c->rows;
    if (of_c)
        of_c += first;
    else
        at += first * x->c->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) c[i] = at + (of_c ? of_c[i] : i) * x->c->row;
}

NSA__INLINE NSA__TARGET void NSA__T(piece_end)(int rows, int vectors,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__product *x, int first) {
    NSA__ARITHMETIC
    nsa_real *c[NSA__NARROW];
    NSA__T(piece_rows)(rows, x, first, c);
    if (x->c->scale) {
        const nsa_real *of_row = x->c->scale + first;
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            const NSA__V scale = NSA__T(splat)(of_row[i]);
            NSA__UNROLL
            for (int j = 0; j < vectors; j++)
                NSA__TO(c[i] + j * NSA__L) = sum[i][j] + scale * NSA__FROM(c[i] + j * NSA__L);
        }
        return;
    }
    if (NSA__OF_PAIRS && !x->c->add) {
        const NSA__V factor = NSA__T(splat)(x->factor);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] *= factor;
        }
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__TO(c[i] + j * NSA__L) = sum[i][j];
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece_step)(int rows, int vectors,
                                                NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                const nsa__packed *a[NSA__NARROW], ptrdiff_t at,
                                                const nsa__packed *b_row) {
    NSA__ARITHMETIC
    NSA__V of_b[NSA__VECTORS];
    NSA__UNROLL
    for (int j = 0; j < vectors; j++) {
        of_b[j] = NSA__FROM(b_row + j * NSA__L);
        NSA__KEEP_IN_REGISTER(of_b[j]);
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        const NSA__V of_a = NSA__T(of_left)(a[i] + at);
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__DOT(sum[i][j], of_a, of_b[j]);
    }

    if (rows * vectors == 1) NSA__KEEP_IN_REGISTER(sum[0][0]);
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum)(int rows, int vectors, int listed,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__packed *a[NSA__NARROW],
                                               const nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b = x->b->data + x->column;
    const int *b_rows = x->b->rows;
    ptrdiff_t at = 0, b_at = 0;
    for (int p = 0, k = x->k; p < k; p++, at += step, b_at += row)
        NSA__T(piece_step)(rows, vectors, sum, a, at, b + (listed ? b_rows[p] * row : b_at));
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum_later)(int rows, int vectors,
                                                     NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                     const nsa__packed *a[NSA__NARROW],
                                                     nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b_row = x->b->data + x->column;
    ptrdiff_t at = 0;
    for (int left = x->k, n; left > 0; left -= n) {
        while (!x->later->n) x->later++;
        nsa__lines *lines = x->later;
        n = left < lines->n ? left : lines->n;
        for (int p = 0; p < n; p++, at += step, b_row += row) {
            NSA__PREFETCH(lines->at + (ptrdiff_t)p * 64, 2);
            NSA__T(piece_step)(rows, vectors, sum, a, at, b_row);
        }
        if (lines->n == INT_MAX) continue;
        lines->at += (ptrdiff_t)n * 64;
        lines->n -= n;
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece)(int rows, int vectors, int later, nsa__product *x,
                                           int first) {
    NSA__V sum[NSA__NARROW][NSA__VECTORS];
    const NSA__V zero = NSA__T(splat)(0);
    const nsa__packed *a[NSA__NARROW], *a_first = x->a->data;
    const int *of_a = x->a->rows;
    nsa_real *c[NSA__NARROW];
    if (x->c->add && !x->c->scale) {
        NSA__T(piece_rows)(rows, x, first, c);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = NSA__FROM(c[i] + j * NSA__L);
        }
    } else {
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = zero;
        }
    }
    if (of_a)
        of_a += first;
    else
        a_first += first * x->a->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) a[i] = a_first + (of_a ? of_a[i] : i) * x->a->row;
    if (later)
        NSA__T(piece_sum_later)(rows, vectors, sum, a, x);
    else if (!NSA__OF_PAIRS && x->b->rows)
        NSA__T(piece_sum)(rows, vectors, 1, sum, a, x);
    else
        NSA__T(piece_sum)(rows, vectors, 0, sum, a, x);
    NSA__T(piece_end)(rows, vectors, sum, x, first);
}

#define NSA__PIECE(name, n, vectors, later)                                              \
    NSA__TARGET NSA__NOINLINE static void NSA__T(name)(nsa__product * x, int i, int m) { \
        for (; i < m; i += n) NSA__T(piece)(n, vectors, later, x, i);                    \
    }
#define NSA__PIECES(n)             \
    NSA__PIECE(narrow##n, n, 1, 0) \
    NSA__PIECE(wide##n, n, NSA__VECTORS, 0)
NSA__PIECES(1)
NSA__PIECES(2)
NSA__PIECES(3)
NSA__PIECES(4)
#if NSA__ROWS > 4
NSA__PIECES(5)
NSA__PIECES(6)
#endif
#if NSA__NARROW > 6
NSA__PIECE(narrow7, 7, 1, 0)
NSA__PIECE(narrow8, 8, 1, 0)
#endif
NSA__PIECE(narrow_later, NSA__NARROW, 1, 1)
NSA__PIECE(wide_later, NSA__ROWS, NSA__VECTORS, 1)
static nsa__pieces *const NSA__T(pieces)[NSA__NARROW][2] = {
    {NSA__T(narrow1), NSA__T(wide1)}, {NSA__T(narrow2), NSA__T(wide2)},
    {NSA__T(narrow3), NSA__T(wide3)}, {NSA__T(narrow4), NSA__T(wide4)},
#if NSA__ROWS > 4
    {NSA__T(narrow5), NSA__T(wide5)}, {NSA__T(narrow6), NSA__T(wide6)},
#endif
#if NSA__NARROW > 6
    {NSA__T(narrow7), NULL},          {NSA__T(narrow8), NULL},
#endif
};

NSA__TARGET static int NSA__T(product)(int m, int n, nsa__product *x) {
    for (int wide = 1; wide >= 0; wide--) {
        const int columns = wide ? NSA__VECTORS * NSA__L : NSA__L;
        const int most = wide ? NSA__ROWS : NSA__NARROW, rest = m % most;
        const int shared = rest && m > most ? most + rest : rest;
        nsa__pieces *const later = wide ? NSA__T(wide_later) : NSA__T(narrow_later);
        nsa__pieces *const whole = x->later ? later : NSA__T(pieces)[most - 1][wide];
        for (; x->column + columns <= n; x->column += columns) {
            whole(x, 0, m - shared);
            for (int i = m - shared, rows; i < m; i += rows) {
                rows = m - i > most ? (m - i + 1) / 2 : m - i;
                NSA__T(pieces)[rows - 1][wide](x, i, i + rows);
            }
        }
    }
    return x->column;
}

#if !NSA__OF_PAIRS

NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c) {
    NSA__ARITHMETIC
    nsa__product x = {k, 0, a, b, c, 1, c->later};
    for (int j = NSA__T(product)(m, n, &x); j < n; j++)
        for (int i = 0; i < m; i++) {
            const nsa__packed *a_row = a->data + (a->rows ? a->rows[i] : i) * a->row;
            nsa_real *to = c->data + (c->rows ? c->rows[i] : i) * c->row + j;
            nsa_real sum = c->add && !c->scale ? *to : 0;
            for (int p = 0; p < k; p++) {
                sum += a_row[p * a->step] * b->data[(b->rows ? b->rows[p] : p) * b->row + j];
                NSA__KEEP_IN_REGISTER(sum);
            }
            *to = c->scale ? sum + c->scale[i] * *to : sum;
        }
}

NSA__TARGET static void NSA__T(softmax)(const nsa__scored *scored, ptrdiff_t ld, nsa_real *s,
                                        ptrdiff_t ld_p, nsa_real *p, const nsa__running *so_far) {
    NSA__ARITHMETIC
    const int rows = scored->rows, n = scored->n, *row = scored->row;
    nsa_real *m = so_far->m, *l = so_far->l, *shrink = so_far->shrink;
    const NSA__V lowest = NSA__T(splat)(NSA__LOWEST), log2e = NSA__T(splat)((nsa_real)NSA__LOG2E);
    for (int r = 0; r < rows; r++) {
        const uint64_t seen = scored->mask[r / scored->group];
        nsa_real *x = s + r * ld;
        NSA__V most = lowest;
        for (int j = 0; j < n; j += NSA__L) {
            if (seen != ~(uint64_t)0)
                NSA__TO(x + j) =
                    NSA__T(pick)(NSA__T(seen)(seen, scored->first + j), NSA__FROM(x + j), lowest);
            most = NSA__T(greater)(NSA__FROM(x + j), most);
        }
        const nsa_real largest = NSA__T(largest)(most);
        nsa_real *highest = m + row[r];
        shrink[r] = *highest;
        *highest = largest > *highest ? largest : *highest;
        shrink[r] -= *highest;
    }

    for (int r = 0; r < rows; r += NSA__L)
        NSA__TO(shrink + r) = NSA__T(exp2)(NSA__FROM(shrink + r) * log2e);

    for (int r = 0; r < rows; r++) {
        const NSA__V most = NSA__T(splat)(m[row[r]] == NSA__LOWEST ? 0 : m[row[r]]);
        const nsa_real *x = s + r * ld;
        nsa_real *to = p + r * ld_p, *sum = l + (ptrdiff_t)row[r] * NSA__LANES;
        for (int j = 0; j < NSA__LANES; j += NSA__L) {
            NSA__V of_lane = NSA__FROM(sum + j) * NSA__T(splat)(shrink[r]);
            for (int at = j; at < n; at += NSA__LANES) {
                const NSA__V e = NSA__T(exp2)((NSA__FROM(x + at) - most) * log2e);
                NSA__TO(to + at) = e;
                of_lane += e;
            }
            NSA__TO(sum + j) = of_lane;
        }
    }
}

NSA__TARGET static void NSA__T(gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse,
                                         const nsa_real *delta, nsa_real *s, nsa_real *dp) {
    NSA__ARITHMETIC
    const int n = x->n, *row = x->row;
    for (int r = 0; r < x->rows; r++) {
        const uint64_t seen = x->mask[r / x->group];
        const NSA__V of_sum = NSA__T(splat)(lse[row[r]]), of_row = NSA__T(splat)(delta[row[r]]);
        const NSA__V zero = NSA__T(splat)(0);
        for (int j = 0; j < n; j += NSA__L) {
            NSA__V p = NSA__T(exp_minus)(of_sum - NSA__FROM(s + r * ld + j), 0);
            NSA__V ds = p * (NSA__FROM(dp + r * ld + j) - of_row);
            if (seen != ~(uint64_t)0) {
                const NSA__I on = NSA__T(seen)(seen, x->first + j);
                p = NSA__T(pick)(on, p, zero);
                ds = NSA__T(pick)(on, ds, zero);
            }
            NSA__TO(s + r * ld + j) = p;
            NSA__TO(dp + r * ld + j) = ds;
        }
    }
}

NSA__TARGET static void NSA__T(probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse,
                                            const nsa_real *s, nsa_real *sum) {
    NSA__ARITHMETIC

    for (int j = 0; j < n; j += NSA__L) {
        NSA__V p = NSA__T(splat)(0);
        for (int r = 0; r < rows; r++)
            p += NSA__T(exp_minus)(NSA__T(splat)(lse[r]) - NSA__FROM(s + r * ld + j), -87);
        NSA__TO(sum + j) = p;
    }
}

NSA__TARGET static int NSA__T(at_least)(int n, const nsa_real *x, nsa__lane least) {
    int j = 0, sum = 0;
#if NSA__BYTES
    nsa__lane lane[NSA__L];
    NSA__I count = {0};
    const NSA__I bound = count + least;
    for (; j + NSA__L <= n; j += NSA__L)
        count -= (NSA__I)NSA__FROM(x + j) >= bound;
    memcpy(lane, &count, sizeof count);
    for (int i = 0; i < NSA__L; i++) sum += (int)lane[i];
#endif
    for (; j < n; j++) {
        nsa__lane bits;
        memcpy(&bits, x + j, sizeof bits);
        sum += bits >= least;
    }
    return sum;
}

NSA__TARGET static int NSA__T(all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x) {
    NSA__T(bits) bits, carry = {0};
    nsa__bits_t lane[NSA__L], sum = 0;
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L) {
            memcpy(&bits, x + j, sizeof bits);
            carry |= NSA__EXPONENT_CARRY(bits);
        }
    memcpy(lane, &carry, sizeof carry);
    for (int j = 0; j < NSA__L; j++) sum |= lane[j];
    return !(sum & NSA__SIGN);
}

NSA__TARGET static void NSA__T(widen)(int rows, int n, const nsa_tensor *x, const void *row,
                                      ptrdiff_t ld, nsa_real *to) {
    const nsa_dtype dtype = x->dtype;
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(dtype);
    const ptrdiff_t apart = rows > 1 ? (ptrdiff_t)x->token * bytes : 0;
    const char *from = (const char *)row;
    for (int r = 0; r < rows; r++, to += ld) {
        int j = 0;
        if (r) from += apart;
#if defined(NSA__OF_F16) && NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) || __GNUC__ > 8)
        for (; dtype == NSA_F16 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(halves) numbers;
            NSA__V reals;
            memcpy(&numbers, from + j * bytes, sizeof numbers);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals;
        }
        for (; dtype == NSA_F8 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(eighths) codes;
            NSA__V reals;
            memcpy(&codes, from + j, sizeof codes);
            const NSA__T(halves) code = __builtin_convertvector(codes, NSA__T(halves));
            const NSA__T(halves) numbers = (code & 0x80) << 8 | (code & 0x7f) << 7 |
                                           ((NSA__T(halves))((code & 0x7f) == 0x7f) & 0x7c00);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals * 256 * NSA__T(splat)(nsa__row_scale(from, n, j));
        }
#endif
        nsa__widen(to, dtype, from, j, n);
    }
}

NSA__TARGET static void NSA__T(scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to) {
    for (int j = 0; j < n; j += NSA__L) NSA__TO(to + j) = NSA__T(splat)(factor) * NSA__FROM(x + j);
}

NSA__TARGET static void NSA__T(join)(int rows, int n, const nsa_real *x, const nsa__result *c) {
    NSA__ARITHMETIC
    for (int r = 0; r < rows; r++, x += n) {
        const NSA__V scale = NSA__T(splat)(c->scale[r]);
        nsa_real *to = c->data + (c->rows ? c->rows[r] : r) * c->row;
        for (int j = 0; j < n; j += NSA__L)
            NSA__TO(to + j) = NSA__FROM(x + j) + scale * NSA__FROM(to + j);
    }
}

NSA__TARGET static void NSA__T(gate)(int n, const nsa_real g[3], const nsa_real *const x[3],
                                     nsa_real *to) {
    NSA__ARITHMETIC
    const NSA__V a = NSA__T(splat)(g[0]), b = NSA__T(splat)(g[1]), c = NSA__T(splat)(g[2]);
    for (int j = 0; j < n; j += NSA__L)
        NSA__TO(to + j) =
            a * NSA__FROM(x[0] + j) + b * NSA__FROM(x[1] + j) + c * NSA__FROM(x[2] + j);
}

NSA__TARGET static void NSA__T(transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x,
                                          ptrdiff_t ld_to, nsa_real *to) {
    int c = 0, most = columns;
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    NSA__V block[NSA__L];
    memcpy(&lane, order, sizeof lane);
    for (; c + NSA__L / 4 < columns; c += NSA__L)
        for (int r = 0; r < rows; r += NSA__L) {
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++) block[i] = NSA__FROM(x + (r + i) * ld + c);
            NSA__UNROLL
            for (int half = NSA__L / 2; half; half /= 2) {

                const NSA__I low = lane + (((lane & half) != 0) & (NSA__L - half)),
                             high = low + half;
                NSA__UNROLL
                for (int i = 0; i < NSA__L; i++)
                    if (!(i & half)) {
                        const NSA__V a = block[i], b = block[i + half];
                        block[i] = __builtin_shuffle(a, b, low);
                        block[i + half] = __builtin_shuffle(a, b, high);
                    }
            }
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++)
                if (c + i < columns) NSA__TO(to + (c + i) * ld_to + r) = block[i];
        }
    most = NSA__L / 4;
#endif

    for (int i = 0; i < most && c < columns; i++, c++)
        for (int r = 0; r < rows; r++) to[c * ld_to + r] = x[r * ld + c];
}

static const nsa__tiles NSA__T(tiles) = {NSA__T(gemm),      NSA__T(softmax),    NSA__T(probability),
                                         NSA__T(at_least),  NSA__T(all_finite), NSA__T(widen),
                                         NSA__T(scale),     NSA__T(join),       NSA__T(gate),
                                         NSA__T(transpose), NSA__T(gradient)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS
#endif

#define NSA__ISA     avx512
#define NSA__BYTES   64
#define NSA__ROWS    6
#define NSA__VECTORS 4
#define NSA__TARGET \
    NSA__COMPILED __attribute__((__target__("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#define NSA__MAX(x, a, b)        __asm__(NSA__OF_TWO("max") : "=v"(x) : "v"(a), "v"(b))
#define NSA__NEAREST(e, x) \
    __asm__("vrndscalep" NSA__LETTER_OF(NSA_REAL) " {$8, %1, %0|%0, %1, 8}" : "=v"(e) : "v"(x))
#define NSA__SCALEF(p, e)      __asm__(NSA__OF_TWO("scalef") : "=v"(p) : "v"(p), "v"(e))
#define NSA__OF_F16(x, halves) __asm__("vcvtph2ps {%1, %0|%0, %1}" : "=v"(x) : "vm"(halves))

#if NSA__BYTES == 64
#define NSA__NARROW 8
#else
#define NSA__NARROW NSA__ROWS
#endif

#ifdef NSA__DOT
#define NSA__OF_PAIRS 1
#else
#define NSA__OF_PAIRS       0
#define NSA__DOT(sum, a, b) (sum) += (a) * (b)
#endif

#if NSA__BYTES
typedef nsa_real NSA__T(vec) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__lane NSA__T(lanes) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__bits_t NSA__T(bits) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa_real NSA__T(memory)
    __attribute__((__vector_size__(NSA__BYTES), __aligned__(sizeof(nsa_real)), __may_alias__));
typedef uint16_t NSA__T(halves) __attribute__((__vector_size__(2 * NSA__L)));
typedef unsigned char NSA__T(eighths) __attribute__((__vector_size__(NSA__L)));
#else
typedef nsa_real NSA__T(vec);
typedef nsa__lane NSA__T(lanes);
typedef nsa__bits_t NSA__T(bits);
typedef nsa_real NSA__T(memory);
#endif

#if NSA__BYTES
NSA__INLINE NSA__TARGET NSA__V NSA__T(splat)(nsa_real x) {
    const NSA__V zero = {0};
    return x - zero;
}
#if NSA__OF_PAIRS

NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    NSA__T(bits) zero = {0};
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (NSA__V)(zero + pair);
}

NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(halves_at)(const uint16_t *x) {
    NSA__T(halves) numbers;
    memcpy(&numbers, x, sizeof numbers);
#ifdef NSA__OF_HALVES
    NSA__T(bits) bits;
    NSA__OF_HALVES(bits, numbers);
    return bits;
#else
    return __builtin_convertvector(numbers, NSA__T(bits));
#endif
}
#else

NSA__INLINE NSA__TARGET NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return (NSA__V)(((NSA__I)a & on) | ((NSA__I)b & ~on));
}

NSA__INLINE NSA__TARGET NSA__I NSA__T(seen)(uint64_t mask, int j) {
    static const nsa__lane one_bit[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                          256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    NSA__I zero = {0}, lane;
    memcpy(&lane, one_bit, sizeof lane);
    return ((zero + (nsa__lane)(mask >> j & 0xffff)) & lane) != 0;
}
#endif
#else
NSA__INLINE NSA__V NSA__T(splat)(nsa_real x) {
    return x;
}
NSA__INLINE NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return on ? a : b;
}
NSA__INLINE NSA__I NSA__T(seen)(uint64_t mask, int j) {
    return (NSA__I)(mask >> j & 1);
}
#endif

#if !NSA__OF_PAIRS
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    return NSA__T(splat)(*x);
}
NSA__INLINE NSA__TARGET NSA__V NSA__T(greater)(NSA__V a, NSA__V b) {
#ifdef NSA__MAX
    NSA__V larger;
    NSA__MAX(larger, a, b);
    return larger;
#else
    return NSA__T(pick)(a > b, a, b);
#endif
}

#if NSA__BYTES

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2_of_fraction)(NSA__V r) {
    NSA__ARITHMETIC
    NSA__V p = r * 0.0001535336206885849f + 0.001339887439398139f;
    p = p * r + 0.00961843735695742f;
    p = p * r + 0.055503324711908573f;
    p = p * r + 0.24022647913636852f;
    p = p * r + 0.6931472028550316f;
    return p * r + 1.0f;
}
#endif

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2)(NSA__V x) {
    NSA__ARITHMETIC
    nsa_real lane[NSA__L];
#ifdef NSA__SCALEF
    if (sizeof(nsa_real) == sizeof(float)) {
        NSA__V e, p;
        NSA__NEAREST(e, x);
        p = NSA__T(exp2_of_fraction)(x - e);
        NSA__SCALEF(p, e);
        return p;
    }
#elif NSA__BYTES

    if (sizeof(nsa_real) == sizeof(float)) {
        x = NSA__T(greater)(NSA__T(splat)(-127), x);
        const NSA__V whole = NSA__T(splat)(12582912), e = x + whole, r = x - (e - whole);
        const NSA__V p = NSA__T(exp2_of_fraction)(r);
        return (NSA__V)((NSA__T(bits))p + ((NSA__T(bits))e << 23));
    }
#endif
    memcpy(lane, &x, sizeof x);
    for (int j = 0; j < NSA__L; j++) lane[j] = nsa__exp2(lane[j]);
    memcpy(&x, lane, sizeof x);
    return x;
}

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp_minus)(NSA__V x, nsa_real least) {
    NSA__ARITHMETIC
    return NSA__T(exp2)(NSA__T(greater)(NSA__T(splat)(least), x) *
                        NSA__T(splat)((nsa_real)-NSA__LOG2E));
}

NSA__INLINE NSA__TARGET nsa_real NSA__T(largest)(NSA__V x) {
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    memcpy(&lane, order, sizeof lane);
    for (int half = NSA__L / 2; half; half /= 2)
        x = NSA__T(greater)(x, __builtin_shuffle(x, lane ^ half));
    return x[0];
#else
    nsa_real lane[NSA__LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = NSA__L / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] = lane[j] > lane[j + half] ? lane[j] : lane[j + half];
    return lane[0];
#endif
}
#endif

NSA__INLINE NSA__TARGET void NSA__T(piece_rows)(int rows, const nsa__product *x, int first,
                                                nsa_real *c[NSA__NARROW]) {
    nsa_real *at = x->c->data + x->column;
    const int *of_c = x->c->rows;
    if (of_c)
        of_c += first;
    else
        at += first * x->c->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) c[i] = at + (of_c ? of_c[i] : i) * x->c->row;
}

NSA__INLINE NSA__TARGET void NSA__T(piece_end)(int rows, int vectors,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__product *x, int first) {
    NSA__ARITHMETIC
    nsa_real *c[NSA__NARROW];
    NSA__T(piece_rows)(rows, x, first, c);
    if (x->c->scale) {
        const nsa_real *of_row = x->c->scale + first;
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            const NSA__V scale = NSA__T(splat)(of_row[i]);
            NSA__UNROLL
            for (int j = 0; j < vectors; j++)
                NSA__TO(c[i] + j * NSA__L) = sum[i][j] + scale * NSA__FROM(c[i] + j * NSA__L);
        }
        return;
    }
    if (NSA__OF_PAIRS && !x->c->add) {
        const NSA__V factor = NSA__T(splat)(x->factor);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] *= factor;
        }
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__TO(c[i] + j * NSA__L) = sum[i][j];
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece_step)(int rows, int vectors,
                                                NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                const nsa__packed *a[NSA__NARROW], ptrdiff_t at,
                                                const nsa__packed *b_row) {
    NSA__ARITHMETIC
    NSA__V of_b[NSA__VECTORS];
    NSA__UNROLL
    for (int j = 0; j < vectors; j++) {
        of_b[j] = NSA__FROM(b_row + j * NSA__L);
        NSA__KEEP_IN_REGISTER(of_b[j]);
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        const NSA__V of_a = NSA__T(of_left)(a[i] + at);
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__DOT(sum[i][j], of_a, of_b[j]);
    }

    if (rows * vectors == 1) NSA__KEEP_IN_REGISTER(sum[0][0]);
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum)(int rows, int vectors, int listed,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__packed *a[NSA__NARROW],
                                               const nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b = x->b->data + x->column;
    const int *b_rows = x->b->rows;
    ptrdiff_t at = 0, b_at = 0;
    for (int p = 0, k = x->k; p < k; p++, at += step, b_at += row)
        NSA__T(piece_step)(rows, vectors, sum, a, at, b + (listed ? b_rows[p] * row : b_at));
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum_later)(int rows, int vectors,
                                                     NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                     const nsa__packed *a[NSA__NARROW],
                                                     nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b_row = x->b->data + x->column;
    ptrdiff_t at = 0;
    for (int left = x->k, n; left > 0; left -= n) {
        while (!x->later->n) x->later++;
        nsa__lines *lines = x->later;
        n = left < lines->n ? left : lines->n;
        for (int p = 0; p < n; p++, at += step, b_row += row) {
            NSA__PREFETCH(lines->at + (ptrdiff_t)p * 64, 2);
            NSA__T(piece_step)(rows, vectors, sum, a, at, b_row);
        }
        if (lines->n == INT_MAX) continue;
        lines->at += (ptrdiff_t)n * 64;
        lines->n -= n;
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece)(int rows, int vectors, int later, nsa__product *x,
                                           int first) {
    NSA__V sum[NSA__NARROW][NSA__VECTORS];
    const NSA__V zero = NSA__T(splat)(0);
    const nsa__packed *a[NSA__NARROW], *a_first = x->a->data;
    const int *of_a = x->a->rows;
    nsa_real *c[NSA__NARROW];
    if (x->c->add && !x->c->scale) {
        NSA__T(piece_rows)(rows, x, first, c);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = NSA__FROM(c[i] + j * NSA__L);
        }
    } else {
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = zero;
        }
    }
    if (of_a)
        of_a += first;
    else
        a_first += first * x->a->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) a[i] = a_first + (of_a ? of_a[i] : i) * x->a->row;
    if (later)
        NSA__T(piece_sum_later)(rows, vectors, sum, a, x);
    else if (!NSA__OF_PAIRS && x->b->rows)
        NSA__T(piece_sum)(rows, vectors, 1, sum, a, x);
    else
        NSA__T(piece_sum)(rows, vectors, 0, sum, a, x);
    NSA__T(piece_end)(rows, vectors, sum, x, first);
}

#define NSA__PIECE(name, n, vectors, later)                                              \
    NSA__TARGET NSA__NOINLINE static void NSA__T(name)(nsa__product * x, int i, int m) { \
        for (; i < m; i += n) NSA__T(piece)(n, vectors, later, x, i);                    \
    }
#define NSA__PIECES(n)             \
    NSA__PIECE(narrow##n, n, 1, 0) \
    NSA__PIECE(wide##n, n, NSA__VECTORS, 0)
NSA__PIECES(1)
NSA__PIECES(2)
NSA__PIECES(3)
NSA__PIECES(4)
#if NSA__ROWS > 4
NSA__PIECES(5)
NSA__PIECES(6)
#endif
#if NSA__NARROW > 6
NSA__PIECE(narrow7, 7, 1, 0)
NSA__PIECE(narrow8, 8, 1, 0)
#endif
NSA__PIECE(narrow_later, NSA__NARROW, 1, 1)
NSA__PIECE(wide_later, NSA__ROWS, NSA__VECTORS, 1)
static nsa__pieces *const NSA__T(pieces)[NSA__NARROW][2] = {
    {NSA__T(narrow1), NSA__T(wide1)}, {NSA__T(narrow2), NSA__T(wide2)},
    {NSA__T(narrow3), NSA__T(wide3)}, {NSA__T(narrow4), NSA__T(wide4)},
#if NSA__ROWS > 4
    {NSA__T(narrow5), NSA__T(wide5)}, {NSA__T(narrow6), NSA__T(wide6)},
#endif
#if NSA__NARROW > 6
    {NSA__T(narrow7), NULL},          {NSA__T(narrow8), NULL},
#endif
};

NSA__TARGET static int NSA__T(product)(int m, int n, nsa__product *x) {
    for (int wide = 1; wide >= 0; wide--) {
        const int columns = wide ? NSA__VECTORS * NSA__L : NSA__L;
        const int most = wide ? NSA__ROWS : NSA__NARROW, rest = m % most;
        const int shared = rest && m > most ? most + rest : rest;
        nsa__pieces *const later = wide ? NSA__T(wide_later) : NSA__T(narrow_later);
        nsa__pieces *const whole = x->later ? later : NSA__T(pieces)[most - 1][wide];
        for (; x->column + columns <= n; x->column += columns) {
            whole(x, 0, m - shared);
            for (int i = m - shared, rows; i < m; i += rows) {
                rows = m - i > most ? (m - i + 1) / 2 : m - i;
                NSA__T(pieces)[rows - 1][wide](x, i, i + rows);
            }
        }
    }
    return x->column;
}

#if !NSA__OF_PAIRS

NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c) {
    NSA__ARITHMETIC
    nsa__product x = {k, 0, a, b, c, 1, c->later};
    for (int j = NSA__T(product)(m, n, &x); j < n; j++)
        for (int i = 0; i < m; i++) {
            const nsa__packed *a_row = a->data + (a->rows ? a->rows[i] : i) * a->row;
            nsa_real *to = c->data + (c->rows ? c->rows[i] : i) * c->row + j;
            nsa_real sum = c->add && !c->scale ? *to : 0;
            for (int p = 0; p < k; p++) {
                sum += a_row[p * a->step] * b->data[(b->rows ? b->rows[p] : p) * b->row + j];
                NSA__KEEP_IN_REGISTER(sum);
            }
            *to = c->scale ? sum + c->scale[i] * *to : sum;
        }
}

NSA__TARGET static void NSA__T(softmax)(const nsa__scored *scored, ptrdiff_t ld, nsa_real *s,
                                        ptrdiff_t ld_p, nsa_real *p, const nsa__running *so_far) {
    NSA__ARITHMETIC
    const int rows = scored->rows, n = scored->n, *row = scored->row;
    nsa_real *m = so_far->m, *l = so_far->l, *shrink = so_far->shrink;
    const NSA__V lowest = NSA__T(splat)(NSA__LOWEST), log2e = NSA__T(splat)((nsa_real)NSA__LOG2E);
    for (int r = 0; r < rows; r++) {
        const uint64_t seen = scored->mask[r / scored->group];
        nsa_real *x = s + r * ld;
        NSA__V most = lowest;
        for (int j = 0; j < n; j += NSA__L) {
            if (seen != ~(uint64_t)0)
                NSA__TO(x + j) =
                    NSA__T(pick)(NSA__T(seen)(seen, scored->first + j), NSA__FROM(x + j), lowest);
            most = NSA__T(greater)(NSA__FROM(x + j), most);
        }
        const nsa_real largest = NSA__T(largest)(most);
        nsa_real *highest = m + row[r];
        shrink[r] = *highest;
        *highest = largest > *highest ? largest : *highest;
        shrink[r] -= *highest;
    }

    for (int r = 0; r < rows; r += NSA__L)
        NSA__TO(shrink + r) = NSA__T(exp2)(NSA__FROM(shrink + r) * log2e);

    for (int r = 0; r < rows; r++) {
        const NSA__V most = NSA__T(splat)(m[row[r]] == NSA__LOWEST ? 0 : m[row[r]]);
        const nsa_real *x = s + r * ld;
        nsa_real *to = p + r * ld_p, *sum = l + (ptrdiff_t)row[r] * NSA__LANES;
        for (int j = 0; j < NSA__LANES; j += NSA__L) {
            NSA__V of_lane = NSA__FROM(sum + j) * NSA__T(splat)(shrink[r]);
            for (int at = j; at < n; at += NSA__LANES) {
                const NSA__V e = NSA__T(exp2)((NSA__FROM(x + at) - most) * log2e);
                NSA__TO(to + at) = e;
                of_lane += e;
            }
            NSA__TO(sum + j) = of_lane;
        }
    }
}

NSA__TARGET static void NSA__T(gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse,
                                         const nsa_real *delta, nsa_real *s, nsa_real *dp) {
    NSA__ARITHMETIC
    const int n = x->n, *row = x->row;
    for (int r = 0; r < x->rows; r++) {
        const uint64_t seen = x->mask[r / x->group];
        const NSA__V of_sum = NSA__T(splat)(lse[row[r]]), of_row = NSA__T(splat)(delta[row[r]]);
        const NSA__V zero = NSA__T(splat)(0);
        for (int j = 0; j < n; j += NSA__L) {
            NSA__V p = NSA__T(exp_minus)(of_sum - NSA__FROM(s + r * ld + j), 0);
            NSA__V ds = p * (NSA__FROM(dp + r * ld + j) - of_row);
            if (seen != ~(uint64_t)0) {
                const NSA__I on = NSA__T(seen)(seen, x->first + j);
                p = NSA__T(pick)(on, p, zero);
                ds = NSA__T(pick)(on, ds, zero);
            }
            NSA__TO(s + r * ld + j) = p;
            NSA__TO(dp + r * ld + j) = ds;
        }
    }
}

NSA__TARGET static void NSA__T(probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse,
                                            const nsa_real *s, nsa_real *sum) {
    NSA__ARITHMETIC

    for (int j = 0; j < n; j += NSA__L) {
        NSA__V p = NSA__T(splat)(0);
        for (int r = 0; r < rows; r++)
            p += NSA__T(exp_minus)(NSA__T(splat)(lse[r]) - NSA__FROM(s + r * ld + j), -87);
        NSA__TO(sum + j) = p;
    }
}

NSA__TARGET static int NSA__T(at_least)(int n, const nsa_real *x, nsa__lane least) {
    int j = 0, sum = 0;
#if NSA__BYTES
    nsa__lane lane[NSA__L];
    NSA__I count = {0};
    const NSA__I bound = count + least;
    for (; j + NSA__L <= n; j += NSA__L)
        count -= (NSA__I)NSA__FROM(x + j) >= bound;
    memcpy(lane, &count, sizeof count);
    for (int i = 0; i < NSA__L; i++) sum += (int)lane[i];
#endif
    for (; j < n; j++) {
        nsa__lane bits;
        memcpy(&bits, x + j, sizeof bits);
        sum += bits >= least;
    }
    return sum;
}

NSA__TARGET static int NSA__T(all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x) {
    NSA__T(bits) bits, carry = {0};
    nsa__bits_t lane[NSA__L], sum = 0;
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L) {
            memcpy(&bits, x + j, sizeof bits);
            carry |= NSA__EXPONENT_CARRY(bits);
        }
    memcpy(lane, &carry, sizeof carry);
    for (int j = 0; j < NSA__L; j++) sum |= lane[j];
    return !(sum & NSA__SIGN);
}

NSA__TARGET static void NSA__T(widen)(int rows, int n, const nsa_tensor *x, const void *row,
                                      ptrdiff_t ld, nsa_real *to) {
    const nsa_dtype dtype = x->dtype;
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(dtype);
    const ptrdiff_t apart = rows > 1 ? (ptrdiff_t)x->token * bytes : 0;
    const char *from = (const char *)row;
    for (int r = 0; r < rows; r++, to += ld) {
        int j = 0;
        if (r) from += apart;
#if defined(NSA__OF_F16) && NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) || __GNUC__ > 8)
        for (; dtype == NSA_F16 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(halves) numbers;
            NSA__V reals;
            memcpy(&numbers, from + j * bytes, sizeof numbers);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals;
        }
        for (; dtype == NSA_F8 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(eighths) codes;
            NSA__V reals;
            memcpy(&codes, from + j, sizeof codes);
            const NSA__T(halves) code = __builtin_convertvector(codes, NSA__T(halves));
            const NSA__T(halves) numbers = (code & 0x80) << 8 | (code & 0x7f) << 7 |
                                           ((NSA__T(halves))((code & 0x7f) == 0x7f) & 0x7c00);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals * 256 * NSA__T(splat)(nsa__row_scale(from, n, j));
        }
#endif
        nsa__widen(to, dtype, from, j, n);
    }
}

NSA__TARGET static void NSA__T(scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to) {
    for (int j = 0; j < n; j += NSA__L) NSA__TO(to + j) = NSA__T(splat)(factor) * NSA__FROM(x + j);
}

NSA__TARGET static void NSA__T(join)(int rows, int n, const nsa_real *x, const nsa__result *c) {
    NSA__ARITHMETIC
    for (int r = 0; r < rows; r++, x += n) {
        const NSA__V scale = NSA__T(splat)(c->scale[r]);
        nsa_real *to = c->data + (c->rows ? c->rows[r] : r) * c->row;
        for (int j = 0; j < n; j += NSA__L)
            NSA__TO(to + j) = NSA__FROM(x + j) + scale * NSA__FROM(to + j);
    }
}

NSA__TARGET static void NSA__T(gate)(int n, const nsa_real g[3], const nsa_real *const x[3],
                                     nsa_real *to) {
    NSA__ARITHMETIC
    const NSA__V a = NSA__T(splat)(g[0]), b = NSA__T(splat)(g[1]), c = NSA__T(splat)(g[2]);
    for (int j = 0; j < n; j += NSA__L)
        NSA__TO(to + j) =
            a * NSA__FROM(x[0] + j) + b * NSA__FROM(x[1] + j) + c * NSA__FROM(x[2] + j);
}

NSA__TARGET static void NSA__T(transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x,
                                          ptrdiff_t ld_to, nsa_real *to) {
    int c = 0, most = columns;
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    NSA__V block[NSA__L];
    memcpy(&lane, order, sizeof lane);
    for (; c + NSA__L / 4 < columns; c += NSA__L)
        for (int r = 0; r < rows; r += NSA__L) {
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++) block[i] = NSA__FROM(x + (r + i) * ld + c);
            NSA__UNROLL
            for (int half = NSA__L / 2; half; half /= 2) {

                const NSA__I low = lane + (((lane & half) != 0) & (NSA__L - half)),
                             high = low + half;
                NSA__UNROLL
                for (int i = 0; i < NSA__L; i++)
                    if (!(i & half)) {
                        const NSA__V a = block[i], b = block[i + half];
                        block[i] = __builtin_shuffle(a, b, low);
                        block[i + half] = __builtin_shuffle(a, b, high);
                    }
            }
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++)
                if (c + i < columns) NSA__TO(to + (c + i) * ld_to + r) = block[i];
        }
    most = NSA__L / 4;
#endif

    for (int i = 0; i < most && c < columns; i++, c++)
        for (int r = 0; r < rows; r++) to[c * ld_to + r] = x[r * ld + c];
}

static const nsa__tiles NSA__T(tiles) = {NSA__T(gemm),      NSA__T(softmax),    NSA__T(probability),
                                         NSA__T(at_least),  NSA__T(all_finite), NSA__T(widen),
                                         NSA__T(scale),     NSA__T(join),       NSA__T(gate),
                                         NSA__T(transpose), NSA__T(gradient)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS
#endif

#endif

/* Sets with products of bf16 have nothing else of their own. NSA__DOT(sum, a, b) adds to each lane
   of f32 sums the two products of its pairs. It is the instruction itself, because compilers have
   changed the types of its builtins from version to version. VDPBF16PS adds the odd product, then
   the even one, each as a multiply-add that rounds to nearest. BFDOT rounds to odd. Both take
   subnormal numbers for 0. NSA__ROUND(halves, x) rounds a vector of f32 to bf16 in one
   instruction, and NSA__OF_HALVES(x, halves) widens one, which GCC does in two parts. */
#if defined(NSA__HAS_BF16_BY_HAND)
#include NSA__BF16_BY_HAND
#elif defined(NSA__HAS_AVX512_BF16)
#define NSA__ISA     bf16
#define NSA__BYTES   64
#define NSA__ROWS    6
#define NSA__VECTORS 4
#define NSA__TARGET \
    NSA__COMPILED   \
    __attribute__((__target__("avx512bf16,avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+v"(x))
#define NSA__DOT(sum, a, b) \
    __asm__("vdpbf16ps {%2, %1, %0|%0, %1, %2}" : "+v"(sum) : "v"(a), "v"(b))
#define NSA__ROUND(halves, x)     __asm__("vcvtneps2bf16 {%1, %0|%0, %1}" : "=v"(halves) : "v"(x))
#define NSA__OF_HALVES(x, halves) __asm__("vpmovzxwd {%1, %0|%0, %1}" : "=v"(x) : "vm"(halves))
#elif defined(NSA__HAS_NEON_BF16)
#ifdef __clang__
#define NSA__BFDOT __attribute__((__target__("bf16")))
#else
#define NSA__BFDOT __attribute__((__target__("+bf16")))
#endif
#define NSA__ISA                 bf16
#define NSA__BYTES               16
#define NSA__ROWS                6
#define NSA__VECTORS             4
#define NSA__TARGET              NSA__COMPILED NSA__BFDOT
#define NSA__KEEP_IN_REGISTER(x) __asm__("" : "+w"(x))
#define NSA__DOT(sum, a, b)      __asm__("bfdot %0.4s, %1.8h, %2.8h" : "+w"(sum) : "w"(a), "w"(b))
#endif
#ifdef NSA__ISA

#if NSA__BYTES == 64
#define NSA__NARROW 8
#else
#define NSA__NARROW NSA__ROWS
#endif

#ifdef NSA__DOT
#define NSA__OF_PAIRS 1
#else
#define NSA__OF_PAIRS       0
#define NSA__DOT(sum, a, b) (sum) += (a) * (b)
#endif

#if NSA__BYTES
typedef nsa_real NSA__T(vec) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__lane NSA__T(lanes) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa__bits_t NSA__T(bits) __attribute__((__vector_size__(NSA__BYTES)));
typedef nsa_real NSA__T(memory)
    __attribute__((__vector_size__(NSA__BYTES), __aligned__(sizeof(nsa_real)), __may_alias__));
typedef uint16_t NSA__T(halves) __attribute__((__vector_size__(2 * NSA__L)));
typedef unsigned char NSA__T(eighths) __attribute__((__vector_size__(NSA__L)));
#else
typedef nsa_real NSA__T(vec);
typedef nsa__lane NSA__T(lanes);
typedef nsa__bits_t NSA__T(bits);
typedef nsa_real NSA__T(memory);
#endif

#if NSA__BYTES
NSA__INLINE NSA__TARGET NSA__V NSA__T(splat)(nsa_real x) {
    const NSA__V zero = {0};
    return x - zero;
}
#if NSA__OF_PAIRS

NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    NSA__T(bits) zero = {0};
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (NSA__V)(zero + pair);
}

NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(halves_at)(const uint16_t *x) {
    NSA__T(halves) numbers;
    memcpy(&numbers, x, sizeof numbers);
#ifdef NSA__OF_HALVES
    NSA__T(bits) bits;
    NSA__OF_HALVES(bits, numbers);
    return bits;
#else
    return __builtin_convertvector(numbers, NSA__T(bits));
#endif
}
#else

NSA__INLINE NSA__TARGET NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return (NSA__V)(((NSA__I)a & on) | ((NSA__I)b & ~on));
}

NSA__INLINE NSA__TARGET NSA__I NSA__T(seen)(uint64_t mask, int j) {
    static const nsa__lane one_bit[16] = {1,   2,   4,    8,    16,   32,   64,    128,
                                          256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
    NSA__I zero = {0}, lane;
    memcpy(&lane, one_bit, sizeof lane);
    return ((zero + (nsa__lane)(mask >> j & 0xffff)) & lane) != 0;
}
#endif
#else
NSA__INLINE NSA__V NSA__T(splat)(nsa_real x) {
    return x;
}
NSA__INLINE NSA__V NSA__T(pick)(NSA__I on, NSA__V a, NSA__V b) {
    return on ? a : b;
}
NSA__INLINE NSA__I NSA__T(seen)(uint64_t mask, int j) {
    return (NSA__I)(mask >> j & 1);
}
#endif

#if !NSA__OF_PAIRS
NSA__INLINE NSA__TARGET NSA__V NSA__T(of_left)(const nsa__packed *x) {
    return NSA__T(splat)(*x);
}
NSA__INLINE NSA__TARGET NSA__V NSA__T(greater)(NSA__V a, NSA__V b) {
#ifdef NSA__MAX
    NSA__V larger;
    NSA__MAX(larger, a, b);
    return larger;
#else
    return NSA__T(pick)(a > b, a, b);
#endif
}

#if NSA__BYTES

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2_of_fraction)(NSA__V r) {
    NSA__ARITHMETIC
    NSA__V p = r * 0.0001535336206885849f + 0.001339887439398139f;
    p = p * r + 0.00961843735695742f;
    p = p * r + 0.055503324711908573f;
    p = p * r + 0.24022647913636852f;
    p = p * r + 0.6931472028550316f;
    return p * r + 1.0f;
}
#endif

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp2)(NSA__V x) {
    NSA__ARITHMETIC
    nsa_real lane[NSA__L];
#ifdef NSA__SCALEF
    if (sizeof(nsa_real) == sizeof(float)) {
        NSA__V e, p;
        NSA__NEAREST(e, x);
        p = NSA__T(exp2_of_fraction)(x - e);
        NSA__SCALEF(p, e);
        return p;
    }
#elif NSA__BYTES

    if (sizeof(nsa_real) == sizeof(float)) {
        x = NSA__T(greater)(NSA__T(splat)(-127), x);
        const NSA__V whole = NSA__T(splat)(12582912), e = x + whole, r = x - (e - whole);
        const NSA__V p = NSA__T(exp2_of_fraction)(r);
        return (NSA__V)((NSA__T(bits))p + ((NSA__T(bits))e << 23));
    }
#endif
    memcpy(lane, &x, sizeof x);
    for (int j = 0; j < NSA__L; j++) lane[j] = nsa__exp2(lane[j]);
    memcpy(&x, lane, sizeof x);
    return x;
}

NSA__INLINE NSA__TARGET NSA__V NSA__T(exp_minus)(NSA__V x, nsa_real least) {
    NSA__ARITHMETIC
    return NSA__T(exp2)(NSA__T(greater)(NSA__T(splat)(least), x) *
                        NSA__T(splat)((nsa_real)-NSA__LOG2E));
}

NSA__INLINE NSA__TARGET nsa_real NSA__T(largest)(NSA__V x) {
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    memcpy(&lane, order, sizeof lane);
    for (int half = NSA__L / 2; half; half /= 2)
        x = NSA__T(greater)(x, __builtin_shuffle(x, lane ^ half));
    return x[0];
#else
    nsa_real lane[NSA__LANES];
    memcpy(lane, &x, sizeof x);
    for (int half = NSA__L / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            lane[j] = lane[j] > lane[j + half] ? lane[j] : lane[j + half];
    return lane[0];
#endif
}
#endif

NSA__INLINE NSA__TARGET void NSA__T(piece_rows)(int rows, const nsa__product *x, int first,
                                                nsa_real *c[NSA__NARROW]) {
    nsa_real *at = x->c->data + x->column;
    const int *of_c = x->c->rows;
    if (of_c)
        of_c += first;
    else
        at += first * x->c->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) c[i] = at + (of_c ? of_c[i] : i) * x->c->row;
}

NSA__INLINE NSA__TARGET void NSA__T(piece_end)(int rows, int vectors,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__product *x, int first) {
    NSA__ARITHMETIC
    nsa_real *c[NSA__NARROW];
    NSA__T(piece_rows)(rows, x, first, c);
    if (x->c->scale) {
        const nsa_real *of_row = x->c->scale + first;
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            const NSA__V scale = NSA__T(splat)(of_row[i]);
            NSA__UNROLL
            for (int j = 0; j < vectors; j++)
                NSA__TO(c[i] + j * NSA__L) = sum[i][j] + scale * NSA__FROM(c[i] + j * NSA__L);
        }
        return;
    }
    if (NSA__OF_PAIRS && !x->c->add) {
        const NSA__V factor = NSA__T(splat)(x->factor);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] *= factor;
        }
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__TO(c[i] + j * NSA__L) = sum[i][j];
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece_step)(int rows, int vectors,
                                                NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                const nsa__packed *a[NSA__NARROW], ptrdiff_t at,
                                                const nsa__packed *b_row) {
    NSA__ARITHMETIC
    NSA__V of_b[NSA__VECTORS];
    NSA__UNROLL
    for (int j = 0; j < vectors; j++) {
        of_b[j] = NSA__FROM(b_row + j * NSA__L);
        NSA__KEEP_IN_REGISTER(of_b[j]);
    }
    NSA__UNROLL
    for (int i = 0; i < rows; i++) {
        const NSA__V of_a = NSA__T(of_left)(a[i] + at);
        NSA__UNROLL
        for (int j = 0; j < vectors; j++) NSA__DOT(sum[i][j], of_a, of_b[j]);
    }

    if (rows * vectors == 1) NSA__KEEP_IN_REGISTER(sum[0][0]);
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum)(int rows, int vectors, int listed,
                                               NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                               const nsa__packed *a[NSA__NARROW],
                                               const nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b = x->b->data + x->column;
    const int *b_rows = x->b->rows;
    ptrdiff_t at = 0, b_at = 0;
    for (int p = 0, k = x->k; p < k; p++, at += step, b_at += row)
        NSA__T(piece_step)(rows, vectors, sum, a, at, b + (listed ? b_rows[p] * row : b_at));
}

NSA__INLINE NSA__TARGET void NSA__T(piece_sum_later)(int rows, int vectors,
                                                     NSA__V sum[NSA__NARROW][NSA__VECTORS],
                                                     const nsa__packed *a[NSA__NARROW],
                                                     nsa__product *x) {
    const ptrdiff_t step = x->a->step, row = x->b->row;
    const nsa__packed *b_row = x->b->data + x->column;
    ptrdiff_t at = 0;
    for (int left = x->k, n; left > 0; left -= n) {
        while (!x->later->n) x->later++;
        nsa__lines *lines = x->later;
        n = left < lines->n ? left : lines->n;
        for (int p = 0; p < n; p++, at += step, b_row += row) {
            NSA__PREFETCH(lines->at + (ptrdiff_t)p * 64, 2);
            NSA__T(piece_step)(rows, vectors, sum, a, at, b_row);
        }
        if (lines->n == INT_MAX) continue;
        lines->at += (ptrdiff_t)n * 64;
        lines->n -= n;
    }
}

NSA__INLINE NSA__TARGET void NSA__T(piece)(int rows, int vectors, int later, nsa__product *x,
                                           int first) {
    NSA__V sum[NSA__NARROW][NSA__VECTORS];
    const NSA__V zero = NSA__T(splat)(0);
    const nsa__packed *a[NSA__NARROW], *a_first = x->a->data;
    const int *of_a = x->a->rows;
    nsa_real *c[NSA__NARROW];
    if (x->c->add && !x->c->scale) {
        NSA__T(piece_rows)(rows, x, first, c);
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = NSA__FROM(c[i] + j * NSA__L);
        }
    } else {
        NSA__UNROLL
        for (int i = 0; i < rows; i++) {
            NSA__UNROLL
            for (int j = 0; j < vectors; j++) sum[i][j] = zero;
        }
    }
    if (of_a)
        of_a += first;
    else
        a_first += first * x->a->row;
    NSA__UNROLL
    for (int i = 0; i < rows; i++) a[i] = a_first + (of_a ? of_a[i] : i) * x->a->row;
    if (later)
        NSA__T(piece_sum_later)(rows, vectors, sum, a, x);
    else if (!NSA__OF_PAIRS && x->b->rows)
        NSA__T(piece_sum)(rows, vectors, 1, sum, a, x);
    else
        NSA__T(piece_sum)(rows, vectors, 0, sum, a, x);
    NSA__T(piece_end)(rows, vectors, sum, x, first);
}

#define NSA__PIECE(name, n, vectors, later)                                              \
    NSA__TARGET NSA__NOINLINE static void NSA__T(name)(nsa__product * x, int i, int m) { \
        for (; i < m; i += n) NSA__T(piece)(n, vectors, later, x, i);                    \
    }
#define NSA__PIECES(n)             \
    NSA__PIECE(narrow##n, n, 1, 0) \
    NSA__PIECE(wide##n, n, NSA__VECTORS, 0)
NSA__PIECES(1)
NSA__PIECES(2)
NSA__PIECES(3)
NSA__PIECES(4)
#if NSA__ROWS > 4
NSA__PIECES(5)
NSA__PIECES(6)
#endif
#if NSA__NARROW > 6
NSA__PIECE(narrow7, 7, 1, 0)
NSA__PIECE(narrow8, 8, 1, 0)
#endif
NSA__PIECE(narrow_later, NSA__NARROW, 1, 1)
NSA__PIECE(wide_later, NSA__ROWS, NSA__VECTORS, 1)
static nsa__pieces *const NSA__T(pieces)[NSA__NARROW][2] = {
    {NSA__T(narrow1), NSA__T(wide1)}, {NSA__T(narrow2), NSA__T(wide2)},
    {NSA__T(narrow3), NSA__T(wide3)}, {NSA__T(narrow4), NSA__T(wide4)},
#if NSA__ROWS > 4
    {NSA__T(narrow5), NSA__T(wide5)}, {NSA__T(narrow6), NSA__T(wide6)},
#endif
#if NSA__NARROW > 6
    {NSA__T(narrow7), NULL},          {NSA__T(narrow8), NULL},
#endif
};

NSA__TARGET static int NSA__T(product)(int m, int n, nsa__product *x) {
    for (int wide = 1; wide >= 0; wide--) {
        const int columns = wide ? NSA__VECTORS * NSA__L : NSA__L;
        const int most = wide ? NSA__ROWS : NSA__NARROW, rest = m % most;
        const int shared = rest && m > most ? most + rest : rest;
        nsa__pieces *const later = wide ? NSA__T(wide_later) : NSA__T(narrow_later);
        nsa__pieces *const whole = x->later ? later : NSA__T(pieces)[most - 1][wide];
        for (; x->column + columns <= n; x->column += columns) {
            whole(x, 0, m - shared);
            for (int i = m - shared, rows; i < m; i += rows) {
                rows = m - i > most ? (m - i + 1) / 2 : m - i;
                NSA__T(pieces)[rows - 1][wide](x, i, i + rows);
            }
        }
    }
    return x->column;
}

#if !NSA__OF_PAIRS

NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c) {
    NSA__ARITHMETIC
    nsa__product x = {k, 0, a, b, c, 1, c->later};
    for (int j = NSA__T(product)(m, n, &x); j < n; j++)
        for (int i = 0; i < m; i++) {
            const nsa__packed *a_row = a->data + (a->rows ? a->rows[i] : i) * a->row;
            nsa_real *to = c->data + (c->rows ? c->rows[i] : i) * c->row + j;
            nsa_real sum = c->add && !c->scale ? *to : 0;
            for (int p = 0; p < k; p++) {
                sum += a_row[p * a->step] * b->data[(b->rows ? b->rows[p] : p) * b->row + j];
                NSA__KEEP_IN_REGISTER(sum);
            }
            *to = c->scale ? sum + c->scale[i] * *to : sum;
        }
}

NSA__TARGET static void NSA__T(softmax)(const nsa__scored *scored, ptrdiff_t ld, nsa_real *s,
                                        ptrdiff_t ld_p, nsa_real *p, const nsa__running *so_far) {
    NSA__ARITHMETIC
    const int rows = scored->rows, n = scored->n, *row = scored->row;
    nsa_real *m = so_far->m, *l = so_far->l, *shrink = so_far->shrink;
    const NSA__V lowest = NSA__T(splat)(NSA__LOWEST), log2e = NSA__T(splat)((nsa_real)NSA__LOG2E);
    for (int r = 0; r < rows; r++) {
        const uint64_t seen = scored->mask[r / scored->group];
        nsa_real *x = s + r * ld;
        NSA__V most = lowest;
        for (int j = 0; j < n; j += NSA__L) {
            if (seen != ~(uint64_t)0)
                NSA__TO(x + j) =
                    NSA__T(pick)(NSA__T(seen)(seen, scored->first + j), NSA__FROM(x + j), lowest);
            most = NSA__T(greater)(NSA__FROM(x + j), most);
        }
        const nsa_real largest = NSA__T(largest)(most);
        nsa_real *highest = m + row[r];
        shrink[r] = *highest;
        *highest = largest > *highest ? largest : *highest;
        shrink[r] -= *highest;
    }

    for (int r = 0; r < rows; r += NSA__L)
        NSA__TO(shrink + r) = NSA__T(exp2)(NSA__FROM(shrink + r) * log2e);

    for (int r = 0; r < rows; r++) {
        const NSA__V most = NSA__T(splat)(m[row[r]] == NSA__LOWEST ? 0 : m[row[r]]);
        const nsa_real *x = s + r * ld;
        nsa_real *to = p + r * ld_p, *sum = l + (ptrdiff_t)row[r] * NSA__LANES;
        for (int j = 0; j < NSA__LANES; j += NSA__L) {
            NSA__V of_lane = NSA__FROM(sum + j) * NSA__T(splat)(shrink[r]);
            for (int at = j; at < n; at += NSA__LANES) {
                const NSA__V e = NSA__T(exp2)((NSA__FROM(x + at) - most) * log2e);
                NSA__TO(to + at) = e;
                of_lane += e;
            }
            NSA__TO(sum + j) = of_lane;
        }
    }
}

NSA__TARGET static void NSA__T(gradient)(const nsa__scored *x, ptrdiff_t ld, const nsa_real *lse,
                                         const nsa_real *delta, nsa_real *s, nsa_real *dp) {
    NSA__ARITHMETIC
    const int n = x->n, *row = x->row;
    for (int r = 0; r < x->rows; r++) {
        const uint64_t seen = x->mask[r / x->group];
        const NSA__V of_sum = NSA__T(splat)(lse[row[r]]), of_row = NSA__T(splat)(delta[row[r]]);
        const NSA__V zero = NSA__T(splat)(0);
        for (int j = 0; j < n; j += NSA__L) {
            NSA__V p = NSA__T(exp_minus)(of_sum - NSA__FROM(s + r * ld + j), 0);
            NSA__V ds = p * (NSA__FROM(dp + r * ld + j) - of_row);
            if (seen != ~(uint64_t)0) {
                const NSA__I on = NSA__T(seen)(seen, x->first + j);
                p = NSA__T(pick)(on, p, zero);
                ds = NSA__T(pick)(on, ds, zero);
            }
            NSA__TO(s + r * ld + j) = p;
            NSA__TO(dp + r * ld + j) = ds;
        }
    }
}

NSA__TARGET static void NSA__T(probability)(int rows, int n, ptrdiff_t ld, const nsa_real *lse,
                                            const nsa_real *s, nsa_real *sum) {
    NSA__ARITHMETIC

    for (int j = 0; j < n; j += NSA__L) {
        NSA__V p = NSA__T(splat)(0);
        for (int r = 0; r < rows; r++)
            p += NSA__T(exp_minus)(NSA__T(splat)(lse[r]) - NSA__FROM(s + r * ld + j), -87);
        NSA__TO(sum + j) = p;
    }
}

NSA__TARGET static int NSA__T(at_least)(int n, const nsa_real *x, nsa__lane least) {
    int j = 0, sum = 0;
#if NSA__BYTES
    nsa__lane lane[NSA__L];
    NSA__I count = {0};
    const NSA__I bound = count + least;
    for (; j + NSA__L <= n; j += NSA__L)
        count -= (NSA__I)NSA__FROM(x + j) >= bound;
    memcpy(lane, &count, sizeof count);
    for (int i = 0; i < NSA__L; i++) sum += (int)lane[i];
#endif
    for (; j < n; j++) {
        nsa__lane bits;
        memcpy(&bits, x + j, sizeof bits);
        sum += bits >= least;
    }
    return sum;
}

NSA__TARGET static int NSA__T(all_finite)(int rows, int n, ptrdiff_t ld, const nsa_real *x) {
    NSA__T(bits) bits, carry = {0};
    nsa__bits_t lane[NSA__L], sum = 0;
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L) {
            memcpy(&bits, x + j, sizeof bits);
            carry |= NSA__EXPONENT_CARRY(bits);
        }
    memcpy(lane, &carry, sizeof carry);
    for (int j = 0; j < NSA__L; j++) sum |= lane[j];
    return !(sum & NSA__SIGN);
}

NSA__TARGET static void NSA__T(widen)(int rows, int n, const nsa_tensor *x, const void *row,
                                      ptrdiff_t ld, nsa_real *to) {
    const nsa_dtype dtype = x->dtype;
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(dtype);
    const ptrdiff_t apart = rows > 1 ? (ptrdiff_t)x->token * bytes : 0;
    const char *from = (const char *)row;
    for (int r = 0; r < rows; r++, to += ld) {
        int j = 0;
        if (r) from += apart;
#if defined(NSA__OF_F16) && NSA__REAL_BITS(NSA_REAL) == 32 && (defined(__clang__) || __GNUC__ > 8)
        for (; dtype == NSA_F16 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(halves) numbers;
            NSA__V reals;
            memcpy(&numbers, from + j * bytes, sizeof numbers);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals;
        }
        for (; dtype == NSA_F8 && j + NSA__L <= n; j += NSA__L) {
            NSA__T(eighths) codes;
            NSA__V reals;
            memcpy(&codes, from + j, sizeof codes);
            const NSA__T(halves) code = __builtin_convertvector(codes, NSA__T(halves));
            const NSA__T(halves) numbers = (code & 0x80) << 8 | (code & 0x7f) << 7 |
                                           ((NSA__T(halves))((code & 0x7f) == 0x7f) & 0x7c00);
            NSA__OF_F16(reals, numbers);
            NSA__TO(to + j) = reals * 256 * NSA__T(splat)(nsa__row_scale(from, n, j));
        }
#endif
        nsa__widen(to, dtype, from, j, n);
    }
}

NSA__TARGET static void NSA__T(scale)(int n, nsa_real factor, const nsa_real *x, nsa_real *to) {
    for (int j = 0; j < n; j += NSA__L) NSA__TO(to + j) = NSA__T(splat)(factor) * NSA__FROM(x + j);
}

NSA__TARGET static void NSA__T(join)(int rows, int n, const nsa_real *x, const nsa__result *c) {
    NSA__ARITHMETIC
    for (int r = 0; r < rows; r++, x += n) {
        const NSA__V scale = NSA__T(splat)(c->scale[r]);
        nsa_real *to = c->data + (c->rows ? c->rows[r] : r) * c->row;
        for (int j = 0; j < n; j += NSA__L)
            NSA__TO(to + j) = NSA__FROM(x + j) + scale * NSA__FROM(to + j);
    }
}

NSA__TARGET static void NSA__T(gate)(int n, const nsa_real g[3], const nsa_real *const x[3],
                                     nsa_real *to) {
    NSA__ARITHMETIC
    const NSA__V a = NSA__T(splat)(g[0]), b = NSA__T(splat)(g[1]), c = NSA__T(splat)(g[2]);
    for (int j = 0; j < n; j += NSA__L)
        NSA__TO(to + j) =
            a * NSA__FROM(x[0] + j) + b * NSA__FROM(x[1] + j) + c * NSA__FROM(x[2] + j);
}

NSA__TARGET static void NSA__T(transpose)(int rows, int columns, ptrdiff_t ld, const nsa_real *x,
                                          ptrdiff_t ld_to, nsa_real *to) {
    int c = 0, most = columns;
#if NSA__BYTES && !defined(__clang__)
    static const nsa__lane order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    NSA__I lane;
    NSA__V block[NSA__L];
    memcpy(&lane, order, sizeof lane);
    for (; c + NSA__L / 4 < columns; c += NSA__L)
        for (int r = 0; r < rows; r += NSA__L) {
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++) block[i] = NSA__FROM(x + (r + i) * ld + c);
            NSA__UNROLL
            for (int half = NSA__L / 2; half; half /= 2) {

                const NSA__I low = lane + (((lane & half) != 0) & (NSA__L - half)),
                             high = low + half;
                NSA__UNROLL
                for (int i = 0; i < NSA__L; i++)
                    if (!(i & half)) {
                        const NSA__V a = block[i], b = block[i + half];
                        block[i] = __builtin_shuffle(a, b, low);
                        block[i + half] = __builtin_shuffle(a, b, high);
                    }
            }
            NSA__UNROLL
            for (int i = 0; i < NSA__L; i++)
                if (c + i < columns) NSA__TO(to + (c + i) * ld_to + r) = block[i];
        }
    most = NSA__L / 4;
#endif

    for (int i = 0; i < most && c < columns; i++, c++)
        for (int r = 0; r < rows; r++) to[c * ld_to + r] = x[r * ld + c];
}

static const nsa__tiles NSA__T(tiles) = {NSA__T(gemm),      NSA__T(softmax),    NSA__T(probability),
                                         NSA__T(at_least),  NSA__T(all_finite), NSA__T(widen),
                                         NSA__T(scale),     NSA__T(join),       NSA__T(gate),
                                         NSA__T(transpose), NSA__T(gradient)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS
#endif

/* ---- Products of bf16 pairs, read once behind the tiles of their set ----------------------------
   Twin: kernels/tiles.cuh. Not here: the pieces of a product (tiles.inl), what each function does
   (nsa__pairs, tiles.h). */

/* See nsa__pairs. */
NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c, nsa_real factor) {
    nsa__product x = {k, 0, a, b, c, factor, c->later};
    NSA__T(product)(m, n, &x);
}

/* nsa__to_bf16, lane by lane. A NaN keeps the quiet bit, which lies in the upper half. Only one
   with all bits of its mantissa set would overflow; arithmetic makes none. */
NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(rounded)(NSA__V x) {
    const NSA__T(bits) bits = (NSA__T(bits))x;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
/* The same of a factor of products, by one instruction where there is one. That takes subnormal
   numbers for 0, as the products do. */
NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(rounded_factor)(NSA__V x) {
#ifdef NSA__ROUND
    NSA__T(halves) numbers;
    NSA__ROUND(numbers, x);
    return __builtin_convertvector(numbers, NSA__T(bits));
#else
    return NSA__T(rounded)(x);
#endif
}
NSA__INLINE NSA__TARGET void NSA__T(put_halves)(uint16_t *to, NSA__T(bits) numbers) {
    const NSA__T(halves) halves = __builtin_convertvector(numbers, NSA__T(halves));
    memcpy(to, &halves, sizeof halves);
}

NSA__TARGET static void NSA__T(store)(int n, const nsa_real *x, void *row) {
    uint16_t *to = (uint16_t *)row;
    int j = 0;
    for (; j + NSA__L <= n; j += NSA__L)
        NSA__T(put_halves)(to + j, NSA__T(rounded)(NSA__FROM(x + j)));
    for (; j < n; j++) to[j] = nsa__to_bf16((float)x[j]);
}

/* The row's start takes the pairs: they lie before all that is still to be read. */
NSA__TARGET static void NSA__T(round_rows)(int rows, int n, ptrdiff_t ld, nsa_real *x) {
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L)
            NSA__T(put_halves)((uint16_t *)x + j, NSA__T(rounded_factor)(NSA__FROM(x + j)));
}

/* A row of pairs goes to row r / 2, and so overwrites no number that is still to be read. An odd
   number of rows ends with zeros. */
NSA__TARGET static void NSA__T(round_pairs)(int rows, int n, ptrdiff_t ld, const int *row_index,
                                            const nsa_real *factor, nsa_real *x,
                                            nsa__packed *by_row) {
    for (int r = 0; r < rows; r += 2) {
        const int two = r + 1 < rows;
        const nsa_real *first = x + r * ld, *second = first + (two ? ld : 0);
        const NSA__V low = NSA__T(splat)(factor ? factor[row_index[r]] : 1),
                     high = NSA__T(splat)(factor && two ? factor[row_index[r + 1]] : 1);
        for (int j = 0; j < n; j += NSA__L) {
            const NSA__T(bits) a = NSA__T(rounded_factor)(NSA__FROM(first + j) * low);
            NSA__T(bits) b = {0};
            if (two) b = NSA__T(rounded_factor)(NSA__FROM(second + j) * high);
            if (by_row) NSA__T(put_halves)((uint16_t *)(by_row + r * ld / 2) + j, a);
            if (by_row && two) NSA__T(put_halves)((uint16_t *)(by_row + r * ld / 2) + ld + j, b);
            NSA__TO(x + r / 2 * ld + j) = (NSA__V)(a | b << 16);
        }
    }
}

/* See nsa__pairs. */
NSA__TARGET static void NSA__T(pair_rows)(int n, int wide, const nsa__matrix *x, nsa__packed *to) {
    for (int r = 0; r < n; r += 2, to += wide) {
        const nsa__packed *first = x->data + (x->rows ? x->rows[r] : r) * x->row, *second = NULL;
        if (r + 1 < n) second = x->data + (x->rows ? x->rows[r + 1] : r + 1) * x->row;
        for (int j = 0; j < wide; j += NSA__L) {
            NSA__T(bits) pairs = NSA__T(halves_at)((const uint16_t *)first + j);
            if (second) pairs |= NSA__T(halves_at)((const uint16_t *)second + j) << 16;
            NSA__TO(to + j) = (NSA__V)pairs;
        }
    }
}

static const nsa__pairs NSA__T(pairs) = {NSA__T(gemm), NSA__T(pair_rows), NSA__T(round_rows),
                                         NSA__T(round_pairs), NSA__T(store)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS

#endif

/* The set that a call uses, of those that nsa_isa_available has allowed. The enum lists the sets of
   one kind of machine from narrow to wide, so the first available from its end is the widest. */
static nsa_isa nsa__isa_of(nsa_isa isa) {
    for (int widest = NSA_ISA_NEON_BF16; isa == NSA_ISA_DETECT; widest--)
        if (nsa_isa_available((nsa_isa)widest)) isa = (nsa_isa)widest;
    return isa;
}

/* The products of bf16 of a call, or NULL: its rows of bf16 are widened then. */
static const nsa__pairs *nsa__pairs_of(const nsa_desc *d) {
    nsa_isa isa = nsa__isa_of(d->isa);
    if (d->products == NSA_PRODUCTS_F32 || (isa != NSA_ISA_AVX512_BF16 && isa != NSA_ISA_NEON_BF16))
        return NULL;
#if defined(NSA__HAS_BF16_BY_HAND) || defined(NSA__HAS_AVX512_BF16) || defined(NSA__HAS_NEON_BF16)
    return &nsa__pairs_bf16;
#else
    return NULL;
#endif
}

/* As nsa__store. `pairs` may be NULL. */
static void nsa__store_by(const nsa__pairs *pairs, nsa_dtype dtype, void *row, const nsa_real *from,
                          int n) {
    if (pairs && dtype == NSA_BF16)
        pairs->store(n, from, row);
    else
        nsa__store(dtype, row, from, n);
}

static const nsa__tiles *nsa__tiles_of(nsa_isa isa) {
    switch (nsa__isa_of(isa)) {
#ifdef NSA__HAS_SSE2
#ifdef NSA__HAS_BF16_BY_HAND
    case NSA_ISA_AVX512_BF16:
#endif
    case NSA_ISA_SSE2:
        return &nsa__tiles_sse2;
#endif
#ifdef NSA__HAS_AVX
    case NSA_ISA_AVX2:
        return &nsa__tiles_avx2;
#ifdef NSA__HAS_AVX512_BF16
    case NSA_ISA_AVX512_BF16:
#endif
    case NSA_ISA_AVX512:
        return &nsa__tiles_avx512;
#endif
#ifdef NSA__HAS_NEON
    case NSA_ISA_NEON_BF16:
    case NSA_ISA_NEON:
        return &nsa__tiles_neon;
#endif
#ifdef NSA__HAS_SIMD128
    case NSA_ISA_SIMD128:
        return &nsa__tiles_simd128;
#endif
    default:
        return &nsa__tiles_plain;
    }
}

/* ---- RoPE ---------------------------------------------------------------------------------------
   Twin: kernels/rope.cuh. Not here: frequencies, which both sides share (shared.h). */

typedef struct nsa__rope_job {
    const nsa_rope *x, *dx;             /* dx NULL: forward */
    double frequency[NSA__MAX_DIM / 2]; /* of each pair, radians from one position to the next */
    double magnitude;
} nsa__rope_job;

/* Rotates one row: pair (a, b) becomes (a cos - b sin, b cos + a sin). The pair is numbers
   (2i, 2i + 1), or (i, i + dim/2) with NSA_ROPE_HALVES. With sign -1 the matrix is the transpose,
   which backward needs. */
static void nsa__rope_rotate(const nsa_rope *x, const double *cosine, const double *sine,
                             double sign, nsa_real *row) {
    int step = x->pairs == NSA_ROPE_HALVES ? 1 : 2,
        other = x->pairs == NSA_ROPE_HALVES ? x->dim / 2 : 1;
    for (int i = 0; i < x->dim / 2; i++) {
        double a = (double)row[step * i], b = (double)row[step * i + other];
        row[step * i] = (nsa_real)(a * cosine[i] - sign * b * sine[i]);
        row[step * i + other] = (nsa_real)(b * cosine[i] + sign * a * sine[i]);
    }
}

/* Forward rotates x into out; backward rotates dout back and adds it to dx. Angles are computed
   once per token and serve all heads. They are doubles, because f32 has steps of 1/16 near an angle
   of 10^6 radians. */
static void nsa__rope_token(const void *job, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__rope_job *p = (const nsa__rope_job *)job;
    const nsa_rope *x = p->x;
    const nsa_tensor *from = p->dx ? &p->dx->out : &x->x, *to = p->dx ? &p->dx->x : &x->out;
    double cosine[NSA__MAX_DIM / 2], sine[NSA__MAX_DIM / 2];
    double position = (double)(seq->first + t);
    nsa_real row[NSA__MAX_DIM];
    (void)scratch;
    if (x->positions.data)
        position = *(const int32_t *)nsa__row(&x->positions, seq->batch, seq->row + t, 0);
    for (int i = 0; i < x->dim / 2; i++) {
        cosine[i] = p->magnitude * cos(position * p->frequency[i]);
        sine[i] = p->magnitude * sin(position * p->frequency[i]);
    }
    for (int h = 0; h < x->heads; h++) {
        nsa__load(row, from->dtype, nsa__row(from, seq->batch, seq->row + t, h), x->dim);
        nsa__rope_rotate(x, cosine, sine, p->dx ? -1 : 1, row);
        void *at = nsa__row(to, seq->batch, seq->row + t, h);
        if (p->dx)
            nsa__add(to->dtype, at, 1, row, x->dim);
        else
            nsa__store(to->dtype, at, row, x->dim);
    }
}

/* Frequencies are computed once per call, because pow is slow and they depend on the options alone.
   */
static nsa_status nsa__rope_run(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d,
                                int backward) {
    nsa__rope_job p;
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    NSA__CHECK(nsa__rope_check(&nsa__cpu, dx, x, d, backward));
    if (backward && !dx->x.data) return NSA_OK;
    const nsa__team team = {nsa__threads(d), NULL, 0};
    p.x = x;
    p.dx = dx;
    nsa__rope_frequencies(x, p.frequency, &p.magnitude);
    nsa__run_tokens(&team, d, nsa__rope_token, &p);
    return NSA_OK;
}

NSA_API nsa_status nsa_rope_frequencies(const nsa_rope *x, double *frequencies, double *magnitude) {
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__rope_check_options(x));
    if (!frequencies) return nsa__error(NSA_ERROR_NULL, NSA__AT_frequencies);
    if (!magnitude) return nsa__error(NSA_ERROR_NULL, NSA__AT_magnitude);
    nsa__rope_frequencies(x, frequencies, magnitude);
    return NSA_OK;
}

NSA_API nsa_status nsa_rope_forward(const nsa_rope *x, const nsa_desc *d) {
    return nsa__rope_run(NULL, x, d, 0);
}
NSA_API nsa_status nsa_rope_backward(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d) {
    return nsa__rope_run(dx, x, d, 1);
}

/* ---- Gate ---------------------------------------------------------------------------------------
   Twin: kernels/gate.cuh. Not here: the gate of backward's dout (attend_backward.h). */

typedef struct nsa__gate_job {
    const nsa_gate *x, *dx;
    const nsa_desc *d;
    const nsa__tiles *tiles;
    const nsa__pairs *pairs; /* NULL, or what stores rows of bf16 */
    const nsa_tensor
        *delta_out; /* NULL, or the chain's backward: dout . out of every row, by branch */
} nsa__gate_job;

/* out = sum_i g[i] branch[i] of all heads of a token. */
static void nsa__gate_forward_token(const void *job, const nsa__seq *seq, int64_t t,
                                    void *scratch) {
    const nsa__gate_job *p = (const nsa__gate_job *)job;
    const nsa_desc *d = p->d;
    const nsa_tensor *branch[3] = {&p->x->cmp, &p->x->slc, &p->x->win}, *out = &p->x->out;
    int64_t batch = seq->batch, at = seq->row + t;
    int dim_v = d->dim_v, wide = nsa__whole_vectors(dim_v);
    nsa_real g[3], row[4][NSA__MAX_DIM];
    const nsa_real *const x[3] = {row[0], row[1], row[2]};
    (void)scratch;
    for (int h = 0; h < d->heads; h++) {
        nsa__load_gates(g, &p->x->logits, d, batch, at, h / (d->heads / d->gate_heads));
        nsa__gate_weights(d->gate, g);
        for (int i = 0; i < 3; i++) {
            nsa__load(row[i], branch[i]->dtype, nsa__row(branch[i], batch, at, h), dim_v);
            memset(row[i] + dim_v, 0, (size_t)(wide - dim_v) * sizeof **row);
        }
        p->tiles->gate(wide, g, x, row[3]);
        nsa__store_by(p->pairs, out->dtype, nsa__row(out, batch, at, h), row[3], dim_v);
    }
}

/* dg of one token and gate head, and the branches' gradients of its query heads:
   out = sum_i g[i] branch[i]  =>  dbranch[i] = g[i] dout,  dg[i] = sum over heads and c of dout
   branch[i]. */
static void nsa__gate_backward_head(const nsa__gate_job *p, int64_t batch, int64_t at,
                                    int gate_head, const nsa_real g[3], nsa_real dg[3]) {
    const nsa_desc *d = p->d;
    const nsa_tensor *branch[3] = {&p->x->cmp, &p->x->slc, &p->x->win};
    const nsa_tensor *dbranch[3] = {&p->dx->cmp, &p->dx->slc, &p->dx->win};
    int sharers = d->heads / d->gate_heads, wide = nsa__whole_vectors(d->dim_v);
    nsa_real row[NSA__MAX_DIM], dout[NSA__MAX_DIM];
    for (int c = d->dim_v; c < wide; c++) row[c] = dout[c] = 0;
    for (int h = gate_head * sharers; h < (gate_head + 1) * sharers; h++) {
        nsa__load(dout, p->dx->out.dtype, nsa__row(&p->dx->out, batch, at, h), d->dim_v);
        for (int i = 0; i < 3; i++) {
            if (p->dx->logits.data) {
                nsa__load(row, branch[i]->dtype, nsa__row(branch[i], batch, at, h), d->dim_v);
                dg[i] += nsa__dot(dout, row, wide);
            }
            if (dbranch[i]->data)
                nsa__add(dbranch[i]->dtype, nsa__row(dbranch[i], batch, at, h), g[i], dout,
                         d->dim_v);
        }
    }
}

/* The same dg from what the branches' backward leaves. */
static void nsa__gate_add_delta(const nsa__gate_job *p, int64_t batch, int64_t at, int gate_head,
                                nsa_real dg[3]) {
    int sharers = p->d->heads / p->d->gate_heads;
    for (int h = gate_head * sharers; h < (gate_head + 1) * sharers; h++) {
        const nsa_real *delta = (const nsa_real *)nsa__row(p->delta_out, batch, at, h);
        for (int i = 0; i < 3; i++) dg[i] += delta[i];
    }
}

/* The derivative of the gate function: sigmoid dl = dg g (1 - g); softmax dl = g (dg - g . dg);
   without a function dl = dg. A task has all query heads of a gate head, so dg is one sum. */
static void nsa__gate_backward_token(const void *job, const nsa__seq *seq, int64_t t,
                                     void *scratch) {
    const nsa__gate_job *p = (const nsa__gate_job *)job;
    const nsa_desc *d = p->d;
    const int64_t batch = seq->batch, at = seq->row + t;
    (void)scratch;
    for (int h = 0; h < d->gate_heads; h++) {
        nsa_real g[3], dg[3] = {0, 0, 0};
        nsa__load_gates(g, &p->x->logits, d, batch, at, h);
        nsa__gate_weights(d->gate, g);
        if (p->delta_out)
            nsa__gate_add_delta(p, batch, at, h, dg);
        else
            nsa__gate_backward_head(p, batch, at, h, g, dg);
        nsa_real mean = g[0] * dg[0] + g[1] * dg[1] + g[2] * dg[2];
        for (int i = 0; i < 3; i++) {
            if (d->gate == NSA_GATE_SIGMOID) dg[i] *= g[i] * (1 - g[i]);
            if (d->gate == NSA_GATE_SOFTMAX) dg[i] = g[i] * (dg[i] - mean);
        }
        if (p->dx->logits.data) nsa__add_gates(&p->dx->logits, d, batch, at, h, dg);
    }
}

/* Runs the job: backward if it has a dx. */
static void nsa__gate_run(nsa__gate_job p) {
    const nsa__team team = {nsa__threads(p.d), NULL, 0};
    nsa__run_tokens(&team, p.d, p.dx ? nsa__gate_backward_token : nsa__gate_forward_token, &p);
}

/* A job without the chain's parts. */
static nsa__gate_job nsa__gate_job_make(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d) {
    nsa__gate_job p;
    memset(&p, 0, sizeof p);
    p.dx = dx;
    p.x = x;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    p.pairs = nsa__pairs_of(d);
    return p;
}

static nsa_status nsa__gate_call(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d,
                                 int backward) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    const nsa__checked c = nsa__checked_of(d, !backward, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__gate_views, NSA__GATE_VIEWS, dx, x));
    nsa__gate_run(nsa__gate_job_make(dx, x, d));
    return NSA_OK;
}

NSA_API nsa_status nsa_gate_forward(const nsa_gate *x, const nsa_desc *d) {
    return nsa__gate_call(NULL, x, d, 0);
}
NSA_API nsa_status nsa_gate_backward(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d) {
    return nsa__gate_call(dx, x, d, 1);
}

/* ---- Compression --------------------------------------------------------------------------------
   Twin: kernels/compress.cuh. Not here: how many compressed rows there are (index.h). */

typedef struct nsa__compress_job {
    const nsa_compress *x, *dx;
    const nsa_desc *d;
    const nsa__tiles *tiles;
    nsa__seq seq;
    int head;
    int ring;            /* a decoding cache's raw rows; 0: straight */
    nsa_real *w1, *w1_t; /* mlp, of `head`: (hidden, l D) and its transpose */
    nsa_real *w2, *w2_t; /* mlp, of `head`: (D, hidden) and its transpose */
    nsa_real *act, *dh;  /* mlp backward, of every compressed row of `head`: silu(h) and dh */
    int64_t rows, row;   /* rows of act and dh, and where those of `seq` begin */
    nsa_real *sum[NSA__PARAMETERS]; /* of the gradients, of their parameters' shapes */
    nsa_real *dh_sum; /* mlp backward: (hidden), the sum of dh over all rows of `head` */
} nsa__compress_job;

/* Blocks of a task, and tokens of a task that gathers dx. */
enum { NSA__CMP_ROWS = 64, NSA__CMP_TOKENS = 64 };

/* Row `row` of a parameter of one head; zeros if the parameter is absent: pos, b1 and b2 are
   optional. */
static void nsa__load_parameter(nsa_real *to, const nsa_tensor *x, int head, int64_t row, int n) {
    if (x->data)
        nsa__load(to, x->dtype, nsa__row(x, 0, row, head), n);
    else
        memset(to, 0, (size_t)n * sizeof *to);
}

/* n rows of a task's sums begin with the bias. */
static void nsa__load_bias(nsa_real *to, const nsa_tensor *x, int head, int n, int width) {
    for (int i = 0; i < n; i++, to += width) nsa__load_parameter(to, x, head, 0, width);
}

/* Stores the rows of blocks begin .. end - 1. */
static void nsa__store_blocks(const nsa__compress_job *p, int64_t begin, int64_t end,
                              const nsa_real *from) {
    const nsa_tensor *out = &p->x->out;
    for (int64_t i = begin; i < end; i++, from += p->x->dim)
        nsa__store(out->dtype, nsa__key_row(&p->seq.cmp, out, i, p->head), from, p->x->dim);
}

/* Loads the row of dout of a block. */
static void nsa__load_dout(const nsa__compress_job *p, nsa_real *to, int64_t block) {
    const nsa_tensor *dout = &p->dx->out;
    nsa__load(to, dout->dtype, nsa__key_row(&p->seq.cmp, dout, block, p->head), p->x->dim);
}

/* The row of x of a token, which counts from the start of the sequence. */
static const void *nsa__compress_input(const nsa__compress_job *p, int64_t token) {
    return nsa__key_row(&p->seq.keys, &p->x->x, token, p->head);
}

/* The first block to compute. If tokens have been appended, those before query `first` have their
   blocks. */
static int nsa__compress_begin(const nsa_desc *d, const nsa__seq *seq) {
    return d->firsts ? nsa_cmp_count(d, seq->first) : 0;
}

/* A task's own copy of the job, for the sequence and head of the task. */
static nsa__compress_job nsa__compress_job_of(const nsa__compress_job *all, const nsa__seq *seq,
                                              int head) {
    nsa__compress_job p = *all;
    p.seq = *seq;
    p.seq.keys.ring = p.ring;
    p.head = head;
    return p;
}

/* -- mean and conv: Eq. 7 with phi a weighted sum of the l rows, each channel for itself --
   out[i][c] = sum_j w[j][c] x[i d + j][c] + b[c], w = 1 / l for mean. Tap j of a block is its token
   i d + j. */

/* The weights w[j][c] of tap j for all channels. */
static void nsa__load_taps(const nsa__compress_job *p, nsa_real *w, int j) {
    if (p->x->phi == NSA_PHI_CONV)
        nsa__load_parameter(w, &p->x->w1, p->head, j, p->x->dim);
    else
        for (int c = 0; c < p->x->dim; c++) w[c] = (nsa_real)(1.0 / p->d->cmp_block);
}

/* Taps are the outer loop, because a tap's weights are then loaded once for all blocks of the task.
   A sum still runs over ascending j, so its bits depend on its own block alone. Neighbouring tasks
   are those of neighbouring heads, whose rows share a page. */
static void nsa__filter_task(const void *job, const nsa__seq *seq, int64_t nth, void *scratch) {
    const nsa__compress_job *all = (const nsa__compress_job *)job;
    const int heads = all->d->kv_heads;
    const nsa__compress_job of_head = nsa__compress_job_of(all, seq, (int)(nth % heads));
    const nsa__compress_job *p = &of_head;
    const nsa_compress *x = p->x;
    nsa_real w[NSA__MAX_DIM], row[NSA__MAX_DIM], *out = (nsa_real *)scratch;
    int64_t begin = nsa__compress_begin(p->d, seq) + nth / heads * NSA__CMP_ROWS;
    int64_t end = nsa__min(p->seq.cmp_tokens, begin + NSA__CMP_ROWS);
    nsa__load_bias(out, x->phi == NSA_PHI_CONV ? &x->b1 : &nsa__no_view, p->head,
                   (int)(end - begin), x->dim);
    for (int j = 0; j < p->d->cmp_block; j++) {
        nsa__load_taps(p, w, j);
        for (int64_t i = begin; i < end; i++) {
            nsa__load(row, x->x.dtype, nsa__compress_input(p, i * p->d->cmp_stride + j), x->dim);
            for (int c = 0; c < x->dim; c++) out[(i - begin) * x->dim + c] += w[c] * row[c];
        }
    }
    nsa__store_blocks(p, begin, end, out);
}

/* dx[t][c] = sum over the blocks i that cover t of w[t - i d][c] dout[i][c]: gathered by token, so
   that no two tasks add to one row. i d <= t < i d + l, so (t - l) / d < i <= t / d. The case t < l
   is apart, because C rounds a negative quotient towards 0. */
static void nsa__filter_input_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    const nsa_tensor *to = &p->dx->x;
    nsa_real w[NSA__MAX_DIM], row[NSA__MAX_DIM], sum[NSA__MAX_DIM];
    const int dim = p->x->dim, l = p->d->cmp_block, stride = p->d->cmp_stride;
    int64_t last = nsa__min(p->seq.tokens, (nth + 1) * NSA__CMP_TOKENS);
    (void)scratch;
    for (int64_t t = nth * NSA__CMP_TOKENS; t < last; t++) {
        const int64_t begin = t < l ? 0 : (t - l) / stride + 1;
        const int64_t end = nsa__min(p->seq.cmp_tokens, t / stride + 1);
        if (begin >= end) continue;
        memset(sum, 0, sizeof sum);
        for (int64_t i = begin; i < end; i++) {
            nsa__load_taps(p, w, (int)(t - i * stride));
            nsa__load_dout(p, row, i);
            for (int c = 0; c < dim; c++) sum[c] += w[c] * row[c];
        }
        nsa__add(to->dtype, nsa__key_row(&p->seq.keys, to, t, p->head), 1, sum, dim);
    }
}

/* Task j: dw[j][c] += sum_i dout[i][c] x[i d + j][c]; task l: db[c] += sum_i dout[i][c]. */
static void nsa__conv_parameter_gradient_task(const void *context, int64_t j, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    nsa_real row[NSA__MAX_DIM], grad[NSA__MAX_DIM];
    int dim = p->x->dim, bias = j == p->d->cmp_block;
    nsa_real *sum = bias ? p->sum[NSA__B1] : p->sum[NSA__W1] + j * dim;
    (void)scratch;
    for (int64_t i = 0; i < p->seq.cmp_tokens; i++) {
        nsa__load_dout(p, grad, i);
        if (!bias)
            nsa__load(row, p->x->x.dtype, nsa__compress_input(p, i * p->d->cmp_stride + j), dim);
        for (int c = 0; c < dim; c++) sum[c] += bias ? grad[c] : grad[c] * row[c];
    }
}

/* -- mlp: h = w1 u + b1, out = w2 silu(h) + b2, u = flatten(x + pos) the l D numbers of a block --
   The u of all blocks would hold every token l / d times, so u is never built. h is a sum over
   the taps j: (x[i d + j] + pos[j]) times columns j D .. (j + 1) D of w1. For n blocks:
     h (n, hidden) = sum_j tap_j (n, D) w1_t[j D ..] (D, hidden) + b1
     out (n, D)    = silu(h) (n, hidden) w2_t (hidden, D) + b2
   Backward, in this order:
     act = silu(h), dh = (dout w2) silu'(h)           nsa__mlp_hidden_gradient_task
     dx[i d + j] += dh[i] w1[:, j]                    nsa__mlp_input_gradient_task
     dw1[:, j] += dh^T tap_j, dw2 += dout^T act       nsa__mlp_parameter_gradient_task
     db1 = sum dh, dpos = (sum dh) w1                 nsa__mlp_finish_sums */

static void nsa__transpose(nsa_real *to, const nsa_real *from, int rows, int columns) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            to[(ptrdiff_t)c * rows + r] = from[(ptrdiff_t)r * columns + c];
}

/* l D: the numbers of a block, and of a row of w1. */
static int nsa__flat(const nsa__compress_job *p) {
    return p->d->cmp_block * p->x->dim;
}

static void nsa__mlp_alloc_weights(nsa__compress_job *p, nsa__arena *a) {
    int64_t w1 = (int64_t)p->x->hidden * nsa__flat(p), w2 = (int64_t)p->x->hidden * p->x->dim;
    p->w1 = nsa__alloc_reals(a, w1);
    p->w1_t = nsa__alloc_reals(a, w1);
    p->w2 = nsa__alloc_reals(a, w2);
    p->w2_t = nsa__alloc_reals(a, w2);
}

/* Packs the parameters of one kv head, as they are and transposed, because the right operand of a
   product has contiguous rows. Forward uses the transposes, backward uses both. */
static void nsa__mlp_load_weights(const nsa__compress_job *p) {
    int flat = nsa__flat(p), hidden = p->x->hidden, dim = p->x->dim;
    for (int r = 0; r < hidden; r++)
        nsa__load_parameter(p->w1 + (ptrdiff_t)r * flat, &p->x->w1, p->head, r, flat);
    for (int r = 0; r < dim; r++)
        nsa__load_parameter(p->w2 + (ptrdiff_t)r * hidden, &p->x->w2, p->head, r, hidden);
    nsa__transpose(p->w1_t, p->w1, hidden, flat);
    nsa__transpose(p->w2_t, p->w2, dim, hidden);
}

/* One tap of the flattened input: row i of `to` is x[(begin + i) d + j] + pos[j]. */
static void nsa__mlp_load_tap(const nsa__compress_job *p, int64_t begin, int n, int j,
                              nsa_real *to) {
    nsa_real pos[NSA__MAX_DIM];
    int dim = p->x->dim;
    nsa__load_parameter(pos, &p->x->pos, p->head, j, dim);
    for (int i = 0; i < n; i++, to += dim) {
        const void *row = nsa__compress_input(p, (begin + i) * p->d->cmp_stride + j);
        nsa__load(to, p->x->x.dtype, row, dim);
        for (int c = 0; c < dim; c++) to[c] += pos[c];
    }
}

/* Blocks begin .. begin + n - 1 of a task, and scratch for NSA__CMP_ROWS of them: one tap of their
   inputs, h, and out or its gradient. */
typedef struct nsa__mlp_rows {
    int64_t begin;
    int n;
    nsa_real *tap, *h, *out;
} nsa__mlp_rows;

static void nsa__mlp_rows_alloc(nsa__mlp_rows *f, const nsa__compress_job *p, nsa__arena *a) {
    f->tap = nsa__alloc_reals(a, NSA__CMP_ROWS * p->x->dim);
    f->h = nsa__alloc_reals(a, (int64_t)NSA__CMP_ROWS * p->x->hidden);
    f->out = nsa__alloc_reals(a, NSA__CMP_ROWS * p->x->dim);
}

/* h of a task's blocks, before the SiLU. The sum begins with b1 and goes through the taps in
   order. */
static nsa__mlp_rows nsa__mlp_hidden(const nsa__compress_job *p, int64_t nth, void *scratch) {
    nsa__arena a = {(char *)scratch, 0};
    nsa__mlp_rows f;
    int hidden = p->x->hidden, dim = p->x->dim;
    nsa__mlp_rows_alloc(&f, p, &a);
    f.begin = nsa__compress_begin(p->d, &p->seq) + nth * NSA__CMP_ROWS;
    f.n = (int)nsa__min(NSA__CMP_ROWS, p->seq.cmp_tokens - f.begin);
    nsa__load_bias(f.h, &p->x->b1, p->head, f.n, hidden);
    const nsa__matrix tap = {f.tap, dim, 1, NULL};
    const nsa__result h = nsa__result_at(f.h, hidden, 1);
    for (int j = 0; j < p->d->cmp_block; j++) {
        const nsa__matrix w1_t = {p->w1_t + (ptrdiff_t)j * dim * hidden, hidden, 1, NULL};
        nsa__mlp_load_tap(p, f.begin, f.n, j, f.tap);
        p->tiles->gemm(f.n, hidden, dim, &tap, &w1_t, &h);
    }
    return f;
}

/* out = w2 silu(h) + b2 for up to NSA__CMP_ROWS blocks; silu(h) = h sigmoid(h). */
static void nsa__mlp_forward_task(const void *job, const nsa__seq *seq, int64_t nth,
                                  void *scratch) {
    const nsa__compress_job *all = (const nsa__compress_job *)job;
    const nsa__compress_job of_seq = nsa__compress_job_of(all, seq, all->head), *p = &of_seq;
    const nsa__mlp_rows f = nsa__mlp_hidden(p, nth, scratch);
    int hidden = p->x->hidden, dim = p->x->dim;
    for (int i = 0; i < f.n * hidden; i++) f.h[i] *= nsa__sigmoid(f.h[i]);
    nsa__load_bias(f.out, &p->x->b2, p->head, f.n, dim);
    const nsa__matrix act = {f.h, hidden, 1, NULL}, w2_t = {p->w2_t, dim, 1, NULL};
    const nsa__result out = nsa__result_at(f.out, dim, 1);
    p->tiles->gemm(f.n, dim, hidden, &act, &w2_t, &out);
    nsa__store_blocks(p, f.begin, f.begin + f.n, f.out);
}

/* act = silu(h), dact = dout w2, dh = dact silu'(h), with
     silu'(h) = sigmoid(h) (1 + h (1 - sigmoid(h))).
   h is computed again, because forward keeps nothing. dact is computed where dh will be. */
static void nsa__mlp_hidden_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    const nsa__mlp_rows f = nsa__mlp_hidden(p, nth, scratch);
    int hidden = p->x->hidden, dim = p->x->dim;
    const int64_t first = (p->row + f.begin) * hidden;
    nsa_real *act = p->act + first, *dh = p->dh + first;
    for (int i = 0; i < f.n; i++) nsa__load_dout(p, f.out + (ptrdiff_t)i * dim, f.begin + i);
    const nsa__matrix douts = {f.out, dim, 1, NULL}, w2 = {p->w2, hidden, 1, NULL};
    const nsa__result dact = nsa__result_at(dh, hidden, 0);
    p->tiles->gemm(f.n, hidden, dim, &douts, &w2, &dact);
    for (ptrdiff_t i = 0; i < (ptrdiff_t)f.n * hidden; i++) {
        nsa_real h = f.h[i], sigmoid = nsa__sigmoid(h);
        act[i] = h * sigmoid;
        dh[i] *= sigmoid * (1 + h * (1 - sigmoid));
    }
}

/* dx[i d + j] += dh[i] w1[:, j], gathered by chunks of tokens, because blocks overlap and two tasks
   must not add to one row. For each tap j the task takes the blocks whose token i d + j lies in its
   chunk: ceil((begin - j) / d) <= i < ceil((end - j) / d). Their rows of the sum are d tokens
   apart. */
static void nsa__mlp_input_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    nsa_real *sum = (nsa_real *)scratch;
    int hidden = p->x->hidden, dim = p->x->dim, stride = p->d->cmp_stride;
    int64_t chunk = (int64_t)NSA__CMP_ROWS * stride, begin = nth * chunk;
    int64_t end = nsa__min(p->seq.tokens, begin + chunk);
    memset(sum, 0, (size_t)(end - begin) * (size_t)dim * sizeof *sum);
    for (int j = 0; j < p->d->cmp_block; j++) {
        int64_t from = nsa__max(0, nsa__ceil_div(nsa__max(0, begin - j), stride));
        int64_t to = nsa__min(p->seq.cmp_tokens, nsa__ceil_div(nsa__max(0, end - j), stride));
        if (from >= to) continue;
        const nsa__matrix dh = {p->dh + (p->row + from) * hidden, hidden, 1, NULL};
        const nsa__matrix w1 = {p->w1 + (ptrdiff_t)j * dim, nsa__flat(p), 1, NULL};
        nsa_real *first = sum + (from * stride + j - begin) * dim;
        const nsa__result dx = nsa__result_at(first, (ptrdiff_t)stride * dim, 1);
        p->tiles->gemm((int)(to - from), dim, hidden, &dh, &w1, &dx);
    }
    for (int64_t t = begin; t < end; t++)
        nsa__add(p->dx->x.dtype, nsa__key_row(&p->seq.keys, &p->dx->x, t, p->head), 1,
                 sum + (t - begin) * dim, dim);
}

/* Task j < l: dw1[:, j] += dh^T (x + pos)[j], columns that no other task writes. Task l: dw2 +=
   dout^T act, db2 += sum dout, dh_sum += sum dh, of which db1 and dpos are made. */
static void nsa__mlp_parameter_gradient_task(const void *context, int64_t j, void *scratch) {
    const nsa__compress_job *p = (const nsa__compress_job *)context;
    nsa_real *rows = (nsa_real *)scratch;
    int hidden = p->x->hidden, dim = p->x->dim, flat = nsa__flat(p);
    for (int64_t begin = 0; begin < p->seq.cmp_tokens; begin += NSA__CMP_ROWS) {
        int n = (int)nsa__min(NSA__CMP_ROWS, p->seq.cmp_tokens - begin);
        const nsa_real *dh = p->dh + (p->row + begin) * hidden,
                       *act = p->act + (p->row + begin) * hidden;
        if (j < p->d->cmp_block) {
            nsa__mlp_load_tap(p, begin, n, (int)j, rows);
            const nsa__matrix dh_t = {dh, 1, hidden, NULL}, tap = {rows, dim, 1, NULL};
            const nsa__result dw1 = nsa__result_at(p->sum[NSA__W1] + j * dim, flat, 1);
            p->tiles->gemm(hidden, dim, n, &dh_t, &tap, &dw1);
            continue;
        }
        for (int i = 0; i < n; i++) {
            nsa_real *row = rows + (ptrdiff_t)i * dim;
            nsa__load_dout(p, row, begin + i);
            for (int c = 0; c < dim; c++) p->sum[NSA__B2][c] += row[c];
            for (int c = 0; c < hidden; c++) p->dh_sum[c] += dh[(ptrdiff_t)i * hidden + c];
        }
        const nsa__matrix dout_t = {rows, 1, dim, NULL}, acts = {act, hidden, 1, NULL};
        const nsa__result dw2 = nsa__result_at(p->sum[NSA__W2], hidden, 1);
        p->tiles->gemm(dim, hidden, n, &dout_t, &acts, &dw2);
    }
}

/* -- sums of the parameter gradients, and the entry points -- */

/* The sums have the shapes of nsa__parameters for one head. A pointer that a phi does not use stays
   NULL. */
static void nsa__compress_alloc_sums(nsa__compress_job *p, nsa__arena *a) {
    nsa__parameter list[NSA__PARAMETERS];
    for (int i = 0, count = nsa__parameters(NULL, p->x, p->d, list); i < count; i++)
        p->sum[i] = nsa__alloc_reals(a, list[i].rows * list[i].width);
    if (p->x->phi != NSA_PHI_MLP) return;
    p->dh_sum = nsa__alloc_reals(a, p->x->hidden);
    p->act = nsa__alloc_reals(a, p->rows * p->x->hidden);
    p->dh = nsa__alloc_reals(a, p->rows * p->x->hidden);
}

/* The job of a call. In backward act and dh of all compressed rows of a kv head are kept, so that h
   is computed once. Its three steps run one after another, so a thread's scratch is the larger of
   their needs. */
static nsa__compress_job nsa__compress_plan(const nsa_compress *x, const nsa_desc *d, int backward,
                                            nsa__arena *shared, nsa__arena *scratch) {
    const int mlp = x->phi == NSA_PHI_MLP;
    nsa__compress_job p;
    nsa__mlp_rows f;
    memset(&p, 0, sizeof p);
    p.x = x;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    p.rows = nsa__cmp_rows(d);
    if (backward) nsa__compress_alloc_sums(&p, shared);
    if (mlp) nsa__mlp_alloc_weights(&p, shared);
    if (mlp) nsa__mlp_rows_alloc(&f, &p, scratch);
    if (!mlp && !backward) nsa__alloc_reals(scratch, NSA__CMP_ROWS * x->dim);
    nsa__arena tokens = {NULL, 0};
    if (mlp && backward) nsa__alloc_reals(&tokens, (int64_t)NSA__CMP_ROWS * d->cmp_stride * x->dim);
    scratch->used = nsa__larger(scratch->used, tokens.used);
    return p;
}

/* Tasks of up to NSA__CMP_ROWS blocks of a head and sequence. If tokens are appended, only the
   blocks that they complete are computed. */
static int64_t nsa__compress_tasks(const void *job, const nsa__seq *seq) {
    const nsa_desc *d = ((const nsa__compress_job *)job)->d;
    return nsa__ceil_div(seq->cmp_tokens - nsa__compress_begin(d, seq), NSA__CMP_ROWS);
}

static int64_t nsa__filter_tasks(const void *job, const nsa__seq *seq) {
    return ((const nsa__compress_job *)job)->d->kv_heads * nsa__compress_tasks(job, seq);
}

/* A network's weights are one head's at a time, and not loaded where no block is complete: a step
   of decoding has the earlier rows in its cache, so a token costs 1 / d of one. */
static void nsa__compress_forward_run(nsa__compress_job *p, const nsa__team *team) {
    const nsa__by_seq filters = {p->d, p, nsa__filter_tasks, nsa__filter_task, 1, 0};
    const nsa__by_seq networks = {p->d, p, nsa__compress_tasks, nsa__mlp_forward_task, 1, 0};
    if (p->x->phi != NSA_PHI_MLP)
        nsa__run_by_seq(team, filters);
    else if (nsa__all_tasks(&networks))
        for (p->head = 0; p->head < p->d->kv_heads; p->head++) {
            nsa__mlp_load_weights(p);
            nsa__run_by_seq(team, networks);
        }
}

/* The gradients of one sequence and head, those of the parameters into their sums. */
static void nsa__compress_backward_sequence(nsa__compress_job *p, const nsa__team *team,
                                            int parameters) {
    int mlp = p->x->phi == NSA_PHI_MLP;
    if (p->seq.cmp_tokens == 0) return;
    if (mlp)
        nsa__run(team, nsa__ceil_div(p->seq.cmp_tokens, NSA__CMP_ROWS),
                 nsa__mlp_hidden_gradient_task, p);
    if (p->dx->x.data && mlp)
        nsa__run(team, nsa__ceil_div(p->seq.tokens, (int64_t)NSA__CMP_ROWS * p->d->cmp_stride),
                 nsa__mlp_input_gradient_task, p);
    if (p->dx->x.data && !mlp)
        nsa__run(team, nsa__ceil_div(p->seq.tokens, NSA__CMP_TOKENS),
                 nsa__filter_input_gradient_task, p);
    if (parameters)
        nsa__run(team, p->d->cmp_block + 1,
                 mlp ? nsa__mlp_parameter_gradient_task : nsa__conv_parameter_gradient_task, p);
}

/* db1 = sum dh. pos is added to every block alike, so dpos = sum_i dh[i] w1 = (sum_i dh[i]) w1: one
   row times w1 instead of N rows. */
static void nsa__mlp_finish_sums(const nsa__compress_job *p) {
    const nsa__matrix dh_sum = {p->dh_sum, p->x->hidden, 1, NULL};
    const nsa__matrix w1 = {p->w1, nsa__flat(p), 1, NULL};
    const nsa__result dpos = nsa__result_at(p->sum[NSA__POS], nsa__flat(p), 1);
    p->tiles->gemm(1, nsa__flat(p), p->x->hidden, &dh_sum, &w1, &dpos);
    for (int c = 0; c < p->x->hidden; c++) p->sum[NSA__B1][c] += p->dh_sum[c];
}

/* Heads are the outer loop, because packed weights and sums are those of one head. A gradient with
   head stride 0 belongs to all heads: its sum starts at the first and is added after the last. */
static void nsa__compress_backward_run(nsa__compress_job *p, const nsa__team *team) {
    nsa__parameter list[NSA__PARAMETERS];
    int count = nsa__parameters(p->dx, p->x, p->d, list);
    int parameters = 0; /* 1: the gradient of one is asked for */
    for (int i = 0; i < count; i++) parameters |= list[i].dx->data != NULL;
    for (p->head = 0; p->head < p->d->kv_heads; p->head++) {
        for (int i = 0; i < count; i++) /* a head stride of 0: the sum runs on over the heads */
            if (p->head == 0 || list[i].dx->head != 0)
                memset(p->sum[i], 0,
                       (size_t)list[i].rows * (size_t)list[i].width * sizeof(nsa_real));
        if (p->x->phi == NSA_PHI_MLP) {
            nsa__mlp_load_weights(p);
            memset(p->dh_sum, 0, (size_t)p->x->hidden * sizeof *p->dh_sum);
        }
        p->row = 0;
        for (p->seq = nsa__seq_begin(p->d); p->seq.nth < p->d->batch;
             nsa__seq_next(p->d, &p->seq)) {
            nsa__compress_backward_sequence(p, team, parameters);
            p->row += p->seq.cmp_tokens;
        }
        if (p->x->phi == NSA_PHI_MLP) nsa__mlp_finish_sums(p);
        for (int i = 0; i < count; i++) {
            if (!list[i].dx->data || (p->head + 1 < p->d->kv_heads && list[i].dx->head == 0))
                continue;
            for (int64_t r = 0; r < list[i].rows; r++)
                nsa__add(list[i].dx->dtype, nsa__row(list[i].dx, 0, r, p->head), 1,
                         p->sum[i] + r * list[i].width, list[i].width);
        }
    }
}

/* The limits let NSA__CMP_ROWS rows of l D or hidden numbers be counted by an int. */
static nsa_status nsa__compress_check_sizes(const nsa_compress *x, const nsa_desc *d, int base) {
    if ((unsigned)x->phi > NSA_PHI_MLP) return nsa__error(NSA_ERROR_OPTION, base + NSA__AT_phi);
    if (x->dim < 1 || x->dim > NSA__MAX_DIM) return nsa__error(NSA_ERROR_SIZE, base + NSA__AT_dim);
    if (x->phi == NSA_PHI_MLP && x->hidden < 1)
        return nsa__error(NSA_ERROR_SIZE, base + NSA__AT_hidden);
    int64_t hidden = x->phi == NSA_PHI_MLP ? x->hidden : 1;
    if ((int64_t)d->cmp_block * x->dim > INT_MAX / 64 ||
        !nsa__fits(hidden, d->cmp_block, x->dim, 8) ||
        !nsa__fits(hidden, d->batch, nsa_cmp_count(d, d->tokens), 8) || hidden > INT_MAX / 64)
        return nsa__error(NSA_ERROR_OVERFLOW, base + NSA__AT_hidden);
    return NSA_OK;
}

static nsa_status nsa__compress_check_arguments(const nsa_compress *x, const nsa_desc *d) {
    nsa_desc own;
    NSA__CHECK(nsa_desc_check(nsa__desc_using(d, NSA__USES_CMP, &own)));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    return nsa__compress_check_sizes(x, d, 0);
}

static nsa_status nsa__compress_go(const nsa_compress *dx, const nsa_compress *x, const nsa_desc *d,
                                   int ring, void *workspace, size_t bytes) {
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace), scratch = {NULL, 0};
    nsa__compress_job p = nsa__compress_plan(x, d, dx != NULL, &shared, &scratch);
    p.dx = dx;
    p.ring = ring;
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, shared.used, scratch.used));
    (dx ? nsa__compress_backward_run : nsa__compress_forward_run)(&p, &team);
    return NSA_OK;
}

static size_t nsa__compress_bytes(const nsa_compress *x, const nsa_desc *d, int backward,
                                  int threads) {
    nsa__arena shared = {NULL, 0}, scratch = {NULL, 0};
    nsa__compress_plan(x, d, backward, &shared, &scratch);
    return nsa__bytes_for(shared.used, threads, scratch.used);
}

NSA_API size_t nsa_compress_forward_workspace_size(const nsa_compress *x, const nsa_desc *d) {
    if (nsa__compress_check_arguments(x, d) != NSA_OK) return 0;
    return nsa__compress_bytes(x, d, 0, nsa__threads(d));
}

NSA_API nsa_status nsa_compress_forward(const nsa_compress *x, const nsa_desc *d, void *workspace,
                                        size_t bytes) {
    NSA__CHECK(nsa__compress_check_arguments(x, d));
    const nsa__checked c = nsa__checked_of(d, 1, 0);
    NSA__CHECK(nsa__check_phi(&c, x, 0));
    return nsa__compress_go(NULL, x, d, 0, workspace, bytes);
}

NSA_API size_t nsa_compress_backward_workspace_size(const nsa_compress *x, const nsa_desc *d) {
    if (nsa__compress_check_arguments(x, d) != NSA_OK || nsa__check_backward(d, 1) != NSA_OK)
        return 0;
    return nsa__compress_bytes(x, d, 1, nsa__threads(d));
}

NSA_API nsa_status nsa_compress_backward(const nsa_compress *dx, const nsa_compress *x,
                                         const nsa_desc *d, void *workspace, size_t bytes) {
    NSA__CHECK(nsa__compress_check_arguments(x, d));
    NSA__CHECK(nsa__check_backward(d, 1));
    const nsa__checked c = nsa__checked_of(d, 0, 0);
    NSA__CHECK(nsa__check_phi(&c, x, 0));
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__check_view(&dx->out, nsa__key_shape(d, 1, x->dim), NSA__TENSORS, 0,
                               NSA__AT_out | NSA__GRADIENT));
    NSA__CHECK(nsa__check_phi_gradient(&nsa__cpu, dx, x, d, 0));
    return nsa__compress_go(dx, x, d, 0, workspace, bytes);
}

/* ---- Block lists: ranking, form -----------------------------------------------------------------
   Twin: kernels/select_rank.cuh. Not here: scores of blocks (select_scores.h). */

static nsa__bits_t nsa__bits_of(nsa_real x) {
    nsa__bits_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Maps a score to an unsigned integer with the same order, NaN below all. Bits of positive floats
   ascend already; the sign bit puts them above the negative ones, whose bits descend and are
   subtracted. -0 equals 0. The function looks at bits, because -ffast-math assumes that there is no
   NaN. */
static nsa__bits_t nsa__score_order(nsa_real score) {
    const nsa__bits_t bits = nsa__bits_of(score), size = bits & ~NSA__SIGN;
    if (size > NSA__INFINITY) return 0; /* NaN */
    return bits == size ? NSA__SIGN + size : NSA__SIGN - size;
}

/* Scores as numbers whose bits, taken for signed integers, are in the scores' order: vector units
   compare signed integers. */
NSA__COMPILED static void nsa__order(nsa_real *scores, int n) {
    for (int j = 0; j < n; j++) {
        nsa__bits_t order = nsa__score_order(scores[j]) ^ NSA__SIGN;
        memcpy(scores + j, &order, sizeof order);
    }
}

/* How many of n scores have an order of at least `least`. With `tiles` they are given as nsa__order
   makes them. */
NSA__COMPILED static int nsa__at_least(const nsa_real *scores, int n, nsa__bits_t least,
                                       const nsa__tiles *tiles) {
    int count = 0;
    if (tiles) return tiles->at_least(n, scores, (nsa__lane)(least ^ NSA__SIGN));
    for (int j = 0; j < n; j++) count += nsa__score_order(scores[j]) >= least;
    return count;
}

/* The largest order that at least `room` of n scores have, room <= n. It is found bit by bit: a bit
   stays set if enough scores are still at or above. */
static nsa__bits_t nsa__order_of_rank(const nsa_real *scores, int n, int room,
                                      const nsa__tiles *tiles) {
    nsa__bits_t order = 0, one_bit = NSA__SIGN;
    for (int reached = n; one_bit && reached != room; one_bit >>= 1) {
        int count = nsa__at_least(scores, n, order | one_bit, tiles);
        if (count < room) continue;
        order |= one_bit;
        reached = count;
    }
    return order;
}

/* Eq. 11: forced blocks, and the `room` best of the rest. Candidates are three ranges:
     | 0 .. begin - 1 forced | begin .. end - 1 the rest | end .. candidates - 1 forced |
   Of the rest, all blocks above the order of rank `room` are taken, and `ties` blocks that have
   this order, the lower indices first. Blocks are visited by index, so the list ascends without a
   sort. NaN has order 0: it is taken only if numbers do not fill the list. */
NSA__COMPILED static void nsa__rank(const nsa_real *scores, int candidates, int local,
                                    const nsa_desc *d, const nsa__tiles *tiles, int32_t *list) {
    int width = nsa_block_list_width(d), n = 0;
    int begin = (int)nsa__min(nsa__forced_first(d), candidates); /* forced: before begin, */
    int end = (int)nsa__max(begin, (int64_t)candidates - local); /* from end on */
    int forced = begin + candidates - end;
    int room = d->forced == NSA_FORCED_INSIDE ? d->slc_count - forced : d->slc_count;
    room = (int)nsa__min(room, end - begin);
    const nsa_real *rest = scores + begin;
    nsa__bits_t order = room > 0 ? nsa__order_of_rank(rest, end - begin, room, tiles) : 0;
    int ties = room - nsa__at_least(rest, end - begin, order + 1, tiles);
    for (; n < begin; n++) list[n] = n;
    for (int j = begin, full = begin + room; n < full; j += NSA__LANES) {
        int lanes = (int)nsa__min(NSA__LANES, end - j);
        if (!nsa__at_least(scores + j, lanes, order, tiles)) continue;
        for (int i = j; i < j + lanes && n < full; i++) {
            nsa__bits_t of_block =
                tiles ? nsa__bits_of(scores[i]) ^ NSA__SIGN : nsa__score_order(scores[i]);
            int ties_in = of_block == order && ties > 0;
            list[n] = i; /* stays if it is taken: a branch would be mispredicted often */
            n += of_block > order || ties_in;
            ties -= ties_in;
        }
    }
    for (int j = end; j < candidates; j++) list[n++] = j;
    while (n < width) list[n++] = -1;
}

NSA_API nsa_status nsa_rank_blocks(const nsa_real *scores, int query, const nsa_desc *d,
                                   int32_t *list) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    NSA__CHECK(nsa__check_geometry(d));
    if (!scores || !list) return nsa__error(NSA_ERROR_NULL, scores ? NSA__AT_list : NSA__AT_scores);
    if (query < 0 || (query >= d->tokens && d->mask == NSA_MASK_CAUSAL))
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_query);
    nsa__rank(scores, nsa_slc_candidates(d, query), nsa__forced_local(d, d->tokens, query), d, NULL,
              list);
    return NSA_OK;
}

typedef struct nsa__rank_job {
    const nsa_rank *x;
    const nsa_desc *d;
    const nsa__tiles *tiles;
} nsa__rank_job;

/* The lists of a query: of each its scores as reals, then as ordered integers. */
static void nsa__rank_token(const void *job, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__rank_job *p = (const nsa__rank_job *)job;
    const nsa_tensor *x = &p->x->scores, *blocks = &p->x->blocks;
    const int64_t batch = seq->batch, row = seq->row + t;
    const int query = seq->first + (int)t;
    const int n = nsa__slc_candidates(p->d, seq->tokens, query);
    nsa_real *scores = (nsa_real *)scratch;
    for (int head = 0; head < nsa__list_heads(p->d); head++) {
        nsa__load(scores, x->dtype, nsa__row(x, batch, row, head), n);
        nsa__order(scores, n);
        nsa__rank(scores, n, nsa__forced_local(p->d, seq->tokens, query), p->d, p->tiles,
                  (int32_t *)nsa__row(blocks, batch, row, head));
    }
}

/* Scratch of a thread: the scores of one list, in whole vectors. */
static size_t nsa__rank_scratch(const nsa_desc *d) {
    nsa__arena scratch = {NULL, 0};
    nsa__alloc_reals(&scratch, (int64_t)nsa_slc_count(d, d->tokens) + NSA__LANES);
    return scratch.used;
}

NSA_API size_t nsa_rank_queries_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    return nsa_desc_check(d) == NSA_OK ? nsa__workspace_bytes(d, 0, nsa__rank_scratch(d)) : 0;
}

NSA_API nsa_status nsa_rank_queries(const nsa_rank *x, const nsa_desc *d, void *workspace,
                                    size_t bytes) {
    nsa__rank_job p;
    nsa__team team;
    nsa_desc own;
    d = nsa__rank_desc(d, &own);
    const nsa__checked c = nsa__checked_of(d, 1, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__rank_views, NSA__RANK_VIEWS, NULL, x));
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, 0, nsa__rank_scratch(d)));
    p.x = x;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    nsa__run_tokens(&team, d, nsa__rank_token, &p);
    return NSA_OK;
}

/* The first of n slots that breaks the form, or -1: a list ascends, without duplicates, and has
   nothing but -1 behind its last candidate. */
static int nsa__list_fault(int candidates, const int32_t *list, int n, const char **reason) {
    for (int i = 0; i < n; i++) {
        *reason = NULL;
        if (list[i] < -1 || list[i] >= candidates) *reason = "not a candidate of its query";
        if (i > 0 && list[i] >= 0) {
            if (list[i - 1] < 0)
                *reason = "entry behind a -1";
            else if (list[i - 1] == list[i])
                *reason = "duplicate";
            else if (list[i - 1] > list[i])
                *reason = "not ascending";
        }
        if (*reason) return i;
    }
    return -1;
}

/* What an entry for lists looks at first. */
static nsa_status nsa__check_list_view(const nsa_tensor *blocks, const nsa_desc *d, int writes) {
    NSA__CHECK(nsa_desc_check(d));
    if (!blocks) return nsa__error(NSA_ERROR_NULL, NSA__AT_blocks);
    return nsa__check_view(blocks, nsa__query_shape(d, nsa__list_heads(d), nsa_block_list_width(d)),
                           NSA__INTS, writes, NSA__AT_blocks);
}

/* The form of all lists; the first fault goes to *fault, which may be NULL. */
static nsa_status nsa__check_lists(const nsa_tensor *blocks, const nsa_desc *d,
                                   nsa_block_fault *fault) {
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int t = 0; t < seq.count; t++) {
            const int candidates = nsa__slc_candidates(d, seq.tokens, seq.first + t);
            for (int head = 0; head < nsa__list_heads(d); head++) {
                const int32_t *list =
                    (const int32_t *)nsa__row(blocks, seq.batch, seq.row + t, head);
                const char *reason;
                int slot = nsa__list_fault(candidates, list, nsa_block_list_width(d), &reason);
                if (slot < 0) continue;
                if (fault) {
                    fault->batch = seq.nth;
                    fault->query = seq.first + t;
                    fault->kv_head = head;
                    fault->slot = slot;
                    fault->value = list[slot];
                    fault->reason = reason;
                }
                return nsa__error(NSA_ERROR_BLOCKS, NSA__AT_blocks);
            }
        }
    return NSA_OK;
}

NSA_API nsa_status nsa_check_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                    nsa_block_fault *fault) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    NSA__CHECK(nsa__check_list_view(blocks, d, 0));
    return nsa__check_lists(blocks, d, fault);
}

/* Sorts by insertion, because lists are short and nearly in order. */
static void nsa__sort_blocks(int32_t *list, int n) {
    for (int i = 1; i < n; i++) {
        int32_t block = list[i];
        int at = i;
        for (; at > 0 && list[at - 1] > block; at--) list[at] = list[at - 1];
        list[at] = block;
    }
}

NSA_API nsa_status nsa_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    NSA__CHECK(nsa__check_list_view(blocks, d, 1));
    const int width = nsa_block_list_width(d);
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int t = 0; t < seq.count; t++)
            for (int head = 0; head < nsa__list_heads(d); head++) {
                int32_t *list = (int32_t *)nsa__row(blocks, seq.batch, seq.row + t, head);
                int candidates = nsa__slc_candidates(d, seq.tokens, seq.first + t), n = 0, kept = 0;
                for (int i = 0; i < width; i++)
                    if (list[i] >= 0 && list[i] < candidates) list[n++] = list[i];
                nsa__sort_blocks(list, n);
                for (int i = 0; i < n; i++)
                    if (kept == 0 || list[kept - 1] != list[i]) list[kept++] = list[i];
                while (kept < width) list[kept++] = -1;
            }
    return NSA_OK;
}

/* ---- Attention: schedule ------------------------------------------------------------------------
   Twin: none. Not here: which keys a query sees (attend_plan.h), who runs tasks (threads.h).
   How the work of a branch is cut: keys into tiles, queries into batches and tasks, heads into
   those that run at once. Tiles, and backward's batches and tasks, decide the order of sums, and
   with it bits; they follow from the geometry alone. No bit depends on what threads decide
   (nsa__shared_tasks). */

/* The order is that of the gate's three weights. */
typedef enum nsa__branch { NSA__CMP, NSA__SLC, NSA__WIN, NSA__DENSE } nsa__branch;

/* What the branches differ in beside their spans (attend_plan.h). */
typedef struct nsa__traits {
    int uses;       /* of the descriptor's sizes of blocks: NSA__USES_CMP, NSA__USES_SLC */
    int lists;      /* a query's keys are those of a block list; tasks are large, see below */
    int compressed; /* keys are compressed blocks */
    int last_first; /* forward's tasks begin with the last queries */
} nsa__traits;

static const nsa__traits nsa__traits_of[] = {
    {NSA__USES_CMP, 0, 1, 0}, {NSA__USES_SLC, 1, 0, 1}, {0, 0, 0, 0}, {0, 0, 0, 1}};

/* All constants of how attention is cut and of what is prefetched, with the machine and what was
   measured there. Ratios are the time without it over that with it, or the speed of another value
   over that of this one; 12/12/64 are heads, kv heads and their width. bench/NOTES.md has all. */
enum {
    /* keys of a tile at most: a query's mask of it is a uint64_t */
    NSA__TILE = 64,
    /* rows of a batch, which share a tile's loads; Zen 5: 48 rows 0.99, 96 to 192 0.98 to 1.01 */
    NSA__BATCH_ROWS = 64,
    /* backward, of a batch's rows of q and dout; Zen 4, heads of 64: 1.02 */
    NSA__BATCH_NUMBERS = 1 << 14,
    /* of a task's rows of q and v, which L2 holds; Zen 3, 12/12/64: half 0.97, backward 0.94 */
    NSA__TASK_NUMBERS = 1 << 17,
    /* lists: times so many in a long sequence, at most; Zen 5, 64k: slc 1.25, backward 1.12 */
    NSA__GROWTH = 4,
    /* lists: keys that neighbours of a listed block add to what is multiplied, at most */
    NSA__BESIDE = 32,
    /* lists: tasks of NSA__HEADS_NEAR heads, about; 12/12/64: twice as many 0.96 */
    NSA__TASKS = 32,
    /* heads side by side, whose rows share pages; 12/12/64, 8k: cmp 1.23, win 1.20; 12 not more */
    NSA__HEADS_NEAR = 4,
    /* backward: shares of dk and dv that wait their turn; 64 threads, simulated: 0.18 to 0.44 */
    NSA__PENDING = 8,
    /* in place: keys of a product are a piece of its rows or some, and have about so many bytes,
       for what is prefetched before it must not fill the queue of misses; Zen 4, 64k, dense: twice
       the bytes 0.81 to 0.90, half 0.96 to 1.04; Zen 5, 128 wide: a third more 0.88. Of long rows
       they are some, lest a product wait for its own sums */
    NSA__KEYS_AT_ONCE = 8,
    NSA__KEYS_LEAST = 6,
    NSA__BYTES_AT_ONCE = 3072,
    /* a task by several threads: batches that one takes, at most; numbers of their sums, which L2
       holds; masks of the batches at hand; and how often a thread looks for work before it gives
       its core away, which another program may keep for milliseconds: Zen 4, one of two cores
       busy, 64k, none 0.1 */
    NSA__SPLIT_BATCHES = 4,
    NSA__SPLIT_NUMBERS = 1 << 15,
    NSA__SPLIT_MASKS = 256,
    NSA__SPLIT_LOOKS = 4096,
    /* scores of few queries: tiles of a task; see bench/NOTES.md */
    NSA__SCORED_TILES = 32,
    /* rows between a load and its prefetch; Zen 5: 8 rows 0.99, 32 0.95 */
    NSA__ROWS_AHEAD = 16
};

typedef struct nsa__schedule {
    int tile, tile_log2; /* keys of a tile, and its logarithm */
    int tile_in_block;   /* lists: every tile lies in one selection block */
    int batch_queries;   /* queries of a batch */
    int task_queries;    /* queries of a task, at most */
    int l2_queries;      /* the same in a short sequence */
    int in_place_max;    /* forward: of sequences with so many queries K and V are read unpacked */
    int gathers_from;    /* lists: queries that see so many keys are computed from listed ones */
    int head_slots;      /* head jobs that the workspace has packed keys for */
    int least_tasks;     /* of a head job, if its queries are enough */
} nsa__schedule;

/* Numbers in whole vectors of a row of q and one of v, or of k and v. */
static int nsa__row_numbers(const nsa_desc *d) {
    return nsa__whole_vectors(d->dim) + nsa__whole_vectors(d->dim_v);
}

/* Queries of a batch: about NSA__BATCH_ROWS rows. If a sequence has no more queries than one batch,
   its K and V are read in place. */
static int nsa__batch_queries(const nsa_desc *d) {
    return (int)nsa__max(1, (int64_t)NSA__BATCH_ROWS * d->kv_heads / d->heads);
}

/* Tiles of lists divide their blocks if a power of two from 16 to 64 does. A tile then holds keys
   of one block, and a query sees all of a listed tile, up to the end of its span. */
static int nsa__tile_size(const nsa_desc *d, nsa__branch branch) {
    if (nsa__traits_of[branch].lists)
        for (int tile = NSA__TILE; tile >= 16; tile /= 2)
            if (d->slc_block % tile == 0) return tile;
    return NSA__TILE;
}

/* Head jobs at once: as many as make one token's rows some 256 numbers, because rows of
   neighbouring heads share pages. */
static int nsa__heads_near(const nsa_desc *d) {
    int64_t nearby = nsa__max(1, 256 / d->dim);
    return (int)nsa__min(d->kv_heads, nsa__min(nearby, NSA__HEADS_NEAR));
}

/* Queries of a task of lists in a sequence of `tokens`; `nearby` are those of a short one. A block
   of a long sequence is in few lists, so tasks grow there until its readers fill a batch, about:
   that their rows leave L2 costs less than a tile for few of them. */
static int64_t nsa__grown_queries(const nsa_desc *d, int tokens, int64_t nearby, int64_t batch) {
    int64_t wanted = batch * nsa_slc_count(d, tokens) / nsa__max(1, nsa_block_list_width(d));
    return nsa__max(nearby, nsa__min(wanted, NSA__GROWTH * nearby));
}

/* Queries of a task of a sequence that has `tokens` and of which `count` are queries, as at least
   least_tasks. Tasks of lists are large: each K/V tile is then loaded into L2 once for many
   queries. */
static int nsa__task_queries(const nsa__schedule *s, const nsa_desc *d, nsa__branch branch,
                             int tokens, int64_t count) {
    int64_t most = s->l2_queries, shared = nsa__ceil_div(count, s->least_tasks);
    if (nsa__traits_of[branch].lists) most = nsa__grown_queries(d, tokens, most, s->batch_queries);
    return (int)nsa__max(s->batch_queries, nsa__min(most, shared));
}

/* Lists whose blocks are no tiles: how many keys a query sees from where on tiles hold the keys
   that its own list names, and it is computed alone. Below, tiles hold neighbouring keys, which
   queries share. So it pays if a list names few of the keys that lie beside its own. A query alone
   has few rows: its products take as long as those of `lost` more. */
static int nsa__gathers_from(const nsa_desc *d, nsa__branch branch, int group, int lost) {
    const int64_t blocks = nsa_block_list_width(d);
    const int64_t listed = nsa__min(blocks * d->slc_block, INT_MAX);
    const int64_t least = nsa__ceil_div(listed * (group + lost), group);
    if (!nsa__traits_of[branch].lists || d->slc_block % NSA__LANES == 0) return INT_MAX;
    if (blocks * (d->slc_block + NSA__BESIDE) < least || least > INT_MAX) return INT_MAX;
    return (int)least;
}

/* Forward's, for `group` query heads a job. `seats`: nsa__heads_near of the call, of which d may be
   some heads, or 1. */
static nsa__schedule nsa__schedule_of(const nsa_desc *d, nsa__branch branch, int group, int seats) {
    const int lists = nsa__traits_of[branch].lists;
    nsa__schedule s;
    memset(&s, 0, sizeof s);
    s.tile = nsa__tile_size(d, branch);
    while (1 << s.tile_log2 < s.tile) s.tile_log2++;
    s.tile_in_block = lists && d->slc_block % s.tile == 0;
    s.batch_queries = (int)nsa__max(1, NSA__BATCH_ROWS / group);
    s.gathers_from = nsa__gathers_from(d, branch, group, NSA__LANES);
    s.head_slots = seats;
    s.least_tasks = lists ? NSA__TASKS / seats : 1;
    s.l2_queries = lists ? NSA__TASK_NUMBERS / nsa__row_numbers(d) / group : s.batch_queries;
    s.task_queries = nsa__task_queries(&s, d, branch, d->tokens, d->count);
    return s;
}

/* Tasks of a head job in forward, at least, for so many threads: tasks of lists are large, and many
   threads want more of them. */
static int nsa__shared_tasks(const nsa__schedule *s, nsa__branch branch, int threads) {
    const int64_t each = 2; /* tasks for a thread */
    if (!nsa__traits_of[branch].lists) return s->least_tasks;
    return (int)nsa__ceil_div(nsa__max(NSA__TASKS, each * threads), s->head_slots);
}

/* Backward's, from forward's. Its batches have up to twice the rows, because each reads and writes
   its tile's share of dk and dv once. But all its rows of q and dout should be no more than
   NSA__BATCH_NUMBERS numbers. Tasks are large enough that few shares of dk and dv are added; those
   of lists are larger yet. */
static nsa__schedule nsa__backward_schedule(nsa__schedule s, const nsa_desc *d, nsa__branch branch,
                                            int group) {
    const int numbers = nsa__row_numbers(d);
    const int64_t rows = nsa__min(NSA__BATCH_NUMBERS / numbers, 2 * NSA__BATCH_ROWS);
    s.gathers_from = nsa__gathers_from(d, branch, group, 2 * NSA__LANES);
    s.batch_queries = (int)nsa__max(s.batch_queries, rows / group);
    if (!nsa__traits_of[branch].lists)
        s.l2_queries = (int)nsa__min(s.tile, NSA__TASK_NUMBERS / numbers / group);
    s.task_queries = nsa__task_queries(&s, d, branch, d->tokens, d->count);
    s.head_slots = (int)nsa__min(s.head_slots, d->kv_heads); /* of which the call may have some */
    return s;
}

/* ---- Attention: formats of operands -------------------------------------------------------------
   Twin: kernels/tiles.cuh. Not here: products (tiles.inl), how rows are read (attend_rows.h,
   attend_pack.h, attend_in_place.h).
   Attention multiplies along rows, q k and dout v, and over rows, as p v and ds k. A format says
   how a row lies and which products take it: numbers, or pairs of bf16. In rows that are multiplied
   along, a pair is two neighbours of a row; over rows it is one column of two neighbouring rows. */

/* Rows of q and k, or of dout and v. */
typedef struct nsa__operand {
    const nsa__tiles *tiles;
    const nsa__pairs *pairs; /* of bf16; NULL: numbers */
    int width, wide;         /* dim or dim_v, and rounded up to whole vectors */
    int depth;               /* what a product sums along a row: width, or half of it in pairs */
    int stride;              /* from row to row, where they lie side by side: wide, or half of it */
    nsa_real
        scale; /* of q k. q is loaded times it; in pairs, which would round, products have it */
} nsa__operand;

static nsa__operand nsa__operand_of(const nsa__tiles *tiles, int width, double scale) {
    const int wide = nsa__whole_vectors(width);
    const nsa__operand o = {tiles, NULL, width, wide, width, wide, (nsa_real)scale};
    return o;
}

static void nsa__operand_pair(nsa__operand *o, const nsa__pairs *pairs) {
    o->pairs = pairs;
    o->depth = (o->width + 1) / 2;
    o->stride = o->wide / 2;
}

/* A product takes pairs of bf16 where all that it reads is bf16, in backward where dout is too.
   Forward and selection ask this alike for q k, so both have the same scores. A size query has no
   x: pairs take less. Returns the products of bf16 that the machine has and the caller wants. */
static const nsa__pairs *nsa__pair_operands(nsa__operand *k, nsa__operand *v, const nsa_attend *x,
                                            const nsa_attend *dx, const nsa_desc *d) {
    const nsa__pairs *pairs = nsa__pairs_of(d);
    if (!x || !pairs || (dx && dx->out.dtype != NSA_BF16)) return pairs;
    int scores = x->q.dtype == NSA_BF16 && x->k.dtype == NSA_BF16;
    int values = x->v.data && x->v.dtype == NSA_BF16;
    if (dx && !(scores && values)) return pairs;
    if (scores) nsa__operand_pair(k, pairs);
    if (values) nsa__operand_pair(v, pairs);
    return pairs;
}

/* c = scale a b, along the rows of both. The order of a sum is the same from packed keys and in
   place, and each multiplies q by k as k by q. */
static void nsa__product_along(const nsa__operand *o, int m, int n, const nsa__matrix *a,
                               const nsa__matrix *b, const nsa__result *c) {
    if (o->pairs)
        o->pairs->gemm(m, n, o->depth, a, b, c, o->scale);
    else
        o->tiles->gemm(m, n, o->depth, a, b, c);
}

/* c = a b, over n rows of b. */
static void nsa__product_over(const nsa__operand *o, int m, int n, const nsa__matrix *a,
                              const nsa__matrix *b, const nsa__result *c) {
    if (o->pairs)
        o->pairs->gemm(m, o->wide, (n + 1) / 2, a, b, c, 1);
    else
        o->tiles->gemm(m, o->wide, n, a, b, c);
}

/* n rows of it, side by side, as `columns` columns of `to`. Those behind the last are zeros, as up
   to 15 rows behind the n become. */
static void nsa__rows_to_columns(const nsa__operand *o, int n, nsa_real *rows, int columns,
                                 nsa_real *to) {
    const int behind = nsa__whole_vectors(n) - n;
    memset(rows + (ptrdiff_t)n * o->stride, 0, (size_t)behind * (size_t)o->stride * sizeof *rows);
    memset(to, 0, (size_t)o->depth * (size_t)columns * sizeof *to);
    o->tiles->transpose(n, o->depth, o->stride, rows, columns, to);
}

/* n rows as such a product takes them: pairs of rows go to `paired`, which numbers do not need. */
static nsa__matrix nsa__rows_for_over(const nsa__operand *o, int n, nsa__matrix rows,
                                      nsa__packed *paired) {
    const nsa__matrix pairs = {paired, o->wide, 1, NULL};
    if (!o->pairs) return rows;
    o->pairs->pair_rows(n, o->wide, &rows, paired);
    return pairs;
}

/* p or ds, the left operand of such products: in pairs rounded, times factor of the row, to pairs
   by key. They also go to `by_row`, if it is there; what is multiplied along a row is returned. */
static const nsa__packed *nsa__round_left(const nsa__operand *o, const nsa__scored *x, ptrdiff_t ld,
                                          const nsa_real *factor, nsa_real *s,
                                          nsa__packed *by_row) {
    if (!o->pairs) return s;
    o->pairs->round_pairs(x->rows, x->n, ld, x->row, factor, s, by_row);
    return by_row;
}

/* The same of p, which no other product reads: row by row, from each row's start on. */
static void nsa__round_rows(const nsa__operand *o, int rows, int n, ptrdiff_t ld, nsa_real *s) {
    if (o->pairs) o->pairs->round_rows(rows, n, ld, s);
}

/* Whether a product reads reals, which rows of every dtype may be widened to; and whether what was
   loaded may be multiplied where it is, which would round pairs twice. */
static int nsa__takes_reals(const nsa__operand *o) {
    return !o->pairs;
}

/* What so many rows are to such a product: rows, or pairs of them. */
static ptrdiff_t nsa__rows_over(const nsa__operand *o, ptrdiff_t rows) {
    return o->pairs ? rows / 2 : rows;
}

/* What a sum over rows of q lacks: the scale, if rows were not loaded times it. */
static nsa_real nsa__sum_scale(const nsa__operand *o) {
    return o->pairs ? o->scale : 1;
}

/* Numbers of the format from row to row of a view, and whether products read its rows where they
   lie: they are of the format, whole vectors, and pairs begin where a pair may lie. */
static ptrdiff_t nsa__operand_stride(const nsa__operand *o, const nsa_tensor *x) {
    return (ptrdiff_t)(o->pairs ? x->token / 2 : x->token);
}
static int nsa__is_operand(const nsa__operand *o, const nsa_tensor *x) {
    if (o->width != o->wide) return 0;
    if (!o->pairs) return x->dtype == NSA_REAL_DTYPE;
    return (uintptr_t)x->data % sizeof(nsa__packed) == 0 && !((x->batch | x->token | x->head) & 1);
}

/* Copies rows of x from `row` on as reals, with zeros behind each. */
static void nsa__widen_rows(const nsa__operand *o, int rows, const nsa_tensor *x, const void *row,
                            nsa_real *to) {
    const size_t behind = (size_t)(o->wide - o->width) * sizeof *to;
    for (int r = 0; behind && r < rows; r++)
        memset(to + (ptrdiff_t)r * o->stride + o->width, 0, behind);
    o->tiles->widen(rows, o->width, x, row, o->stride, to);
}

/* A non-finite row becomes zeros and returns 0: the caller records it in a mask, and queries that
   use the row get NaN at the end. So no kernel meets a NaN and no other query is affected. In place
   it is otherwise: there the scores of a tile are checked afterwards, and at the end the output. */
static int nsa__finite_row(const nsa__operand *o, nsa_real *row) {
    if (o->tiles->all_finite(1, o->wide, 0, row)) return 1;
    memset(row, 0, (size_t)o->wide * sizeof *row);
    return 0;
}

/* The same of many rows of numbers: nonfinite[r] becomes 1. Few tasks have such a row, and a look
   at all of them costs little more than at one. */
static void nsa__zero_nonfinite(const nsa__operand *o, int rows, nsa_real *x,
                                unsigned char *nonfinite) {
    if (o->pairs || o->tiles->all_finite(rows, o->wide, o->stride, x)) return;
    for (int r = 0; r < rows; r++)
        if (!nsa__finite_row(o, x + (ptrdiff_t)r * o->stride)) nonfinite[r] = 1;
}

/* Copies a row of the format, and returns the same, but for numbers, which nsa__zero_nonfinite is
   to look at. */
static int nsa__copy_row(const nsa__operand *o, nsa_real *to, const nsa_tensor *x,
                         const void *from) {
    if (o->pairs) return nsa__copy_finite_pairs(to, from, o->width, o->wide);
    nsa__widen_rows(o, 1, x, from, to);
    return 1;
}

/* The same of one row alone. */
static int nsa__copy_operand(const nsa__operand *o, nsa_real *to, const nsa_tensor *x,
                             const void *from) {
    return nsa__copy_row(o, to, x, from) && (o->pairs || nsa__finite_row(o, to));
}

/* ---- Attention: plan and spans ----------------------------------------------------------------
   Twin: kernels/attend_keys.cuh. Not here: packing, products.
   The branches differ in one thing: which spans of key rows a query sees (nsa__span). All else is
   one core. It iterates over tiles of up to 64 keys. Tile i holds keys i tile .. (i + 1) tile - 1
   of the sequence, whatever the queries, so a query's sums do not depend on its neighbours; or, of
   a query that is computed alone, keys of its list, counted along it (nsa__gather). The
   keys of a tile that a query sees are a mask of 64 bits. A tile that it does not see leaves its
   state as it is, to the bit. The core takes one sequence and a few kv heads at a time. It packs
   their keys once, then runs tasks of neighbouring queries and one head side by side. */

/* A branch of a step of decoding, whose threads have just worked. */
typedef struct nsa__step {
    int ring;       /* the cache's window: see nsa__key_layout; 0 if rows are straight */
    int64_t *reads; /* of each query and kv head: how many keys it has read */
} nsa__step;

/* What is the same for all sequences and heads of a call. A size query fills one and returns its
   bytes; a call fills one, checks the workspace against it and runs it. Constant from then on. */
typedef struct nsa__attend_plan {
    const nsa_attend *x, *dx; /* NULL in a size query */
    const nsa_select *select; /* NULL, or lists are written to it: in the chain by cmp too */
    const nsa_desc *d;
    const nsa__tiles *tiles;
    nsa__branch branch;
    nsa__traits is;
    nsa__schedule cut;
    const nsa__step *step;     /* forward: NULL, or it is a step's */
    const nsa__gate_job *gate; /* backward: NULL, or dx.out is the gate's: the branch's dout is its
                                  g times that, and gate->delta_out gets dout . out */
    int heads;             /* head jobs of a sequence: kv heads, or heads with lists of their own */
    int lists_per_kv_head; /* jobs that read one kv head: 1, or list heads of a kv head */
    int group;             /* query heads of a job */
    int list_width;        /* entries of a block list */
    const nsa__pairs *pairs; /* products of bf16 that the machine has and the caller wants */
    nsa__operand k, v;       /* rows of q and k, and of dout and v */
    size_t shared;           /* bytes of workspace that all threads share */
    size_t scratch;          /* bytes of workspace for each thread */
    size_t room;             /* of them, what a thread has for its parts of split tasks */
} nsa__attend_plan;

/* State of one branch's kernel for one (sequence, kv head). The arrays are workspace and serve one
   head after another. */
typedef struct nsa__head_job {
    const nsa__attend_plan *plan;
    const struct nsa__head_job *then; /* of a split task: the job that begins when it has ended */
    int heads;                        /* jobs that run at once, side by side in one array */
    nsa__seq seq;
    int head, kv_head;           /* which of plan->heads, and whose keys */
    int task_queries;            /* queries of a task */
    int keys;                    /* rows of K that the sequence has */
    nsa__key_layout rows;        /* where K and V lie */
    int in_place;                /* K and V are read unpacked; then all queries are one task, */
    int gathers;                 /* or each is, and its keys are those of its list: nsa__gather */
    int tile_begin, tile_end;    /* tiles that any of the queries sees */
    nsa__packed *rows_over[2];   /* of v and k by tile: rows to be summed over; NULL: not needed */
    nsa__packed *columns[2];     /* the same, transposed tile by tile */
    nsa__packed *listed_rows[2]; /* backward of listed keys: rows to be gathered */
    uint64_t *nonfinite;         /* of every tile: keys with a non-finite value, packed as zeros */
    unsigned char *listed;       /* slc: tiles that a list names; the others are not packed */
    nsa_real *sum[2];            /* backward: dv and dk, sums over the queries; or NULL */
    uint64_t *nonfinite_keys;    /* backward, of every tile: keys that get NaN */
    int32_t *progress;           /* backward, of every task of all jobs at hand: see nsa__ordered */
} nsa__head_job;

/* Backward has two of much: of v, dout and p; and of k, q and ds. */
enum { NSA__OF_V, NSA__OF_K };
static const nsa__operand *nsa__operand_at(const nsa__attend_plan *p, int i) {
    return i == NSA__OF_K ? &p->k : &p->v;
}

/* Whether there are queries that see enough keys to be computed alone, from those of their list. */
static int nsa__plan_gathers(const nsa__attend_plan *p) {
    return p->cut.gathers_from < INT_MAX;
}

/* slc's list of a query; NULL for the other branches. */
static const int32_t *nsa__block_list(const nsa__head_job *job, int query) {
    const nsa__attend_plan *p = job->plan;
    if (!p->is.lists) return NULL;
    return (const int32_t *)nsa__row(&p->x->blocks, job->seq.batch,
                                     job->seq.row + query - job->seq.first, job->head);
}

/* Keys begin .. end - 1 are the most that a query sees: all of cmp, win and dense; of slc those of
   them that its list names. Both grow with the query. Keys of cmp count compressed blocks. */
static int nsa__span_begin(const nsa__attend_plan *p, int query) {
    return p->branch == NSA__WIN ? nsa_window_begin(p->d, query) : 0;
}
static int nsa__span_end(const nsa__head_job *job, int query) {
    const nsa__attend_plan *p = job->plan;
    int tokens = job->seq.tokens;
    if (p->branch == NSA__WIN) return nsa__window_end(p->d, tokens, query);
    return p->branch == NSA__CMP ? nsa__cmp_visible(p->d, tokens, query)
                                 : nsa__visible_end(p->d, tokens, query);
}

/* slc (Eq. 12): span `number` of the keys that a query sees, of one listed block; spans ascend. A
   block is cut at `seen`, the query's nsa__span_end, because the one that holds the query goes on
   behind it. Returns 0 if there is none left. */
NSA__INLINE int nsa__span(const nsa__attend_plan *p, const int32_t *list, int seen, int number,
                          int *begin, int *end) {
    if (number >= p->list_width || list[number] < 0) return 0;
    *begin = list[number] * p->d->slc_block;
    *end = (int)nsa__min((int64_t)*begin + p->d->slc_block, seen);
    return 1;
}

/* The queries of a sequence whose keys are gathered, or those before them. */
static nsa__seq nsa__seq_part(const nsa__attend_plan *p, nsa__seq seq, int gathers) {
    const int none = p->d->mask == NSA_MASK_NONE, from = p->cut.gathers_from;
    const int64_t first = none ? (seq.tokens < from ? INT_MAX : 0) : (int64_t)from - 1;
    const int before = (int)nsa__min(nsa__max(0, first - seq.first), seq.count);
    if (gathers) seq.first += before, seq.row += before;
    seq.count = gathers ? seq.count - before : before;
    return seq;
}

/* The most keys that a sequence can have: arrays of tiles are sized by it. */
static int nsa__max_keys(const nsa__attend_plan *p) {
    return p->is.compressed ? nsa_cmp_count(p->d, p->d->tokens) : p->d->tokens;
}

/* The job of the head that task `index` is for; the index becomes the task's among that head's.
   `jobs` points to the first of first->heads jobs. Tasks interleave heads, because rows of
   neighbouring heads share a page: this saves TLB misses. */
static const nsa__head_job *nsa__job_of(const void *jobs, int64_t *nth) {
    const nsa__head_job *first = (const nsa__head_job *)jobs;
    const nsa__head_job *job = first + *nth % first->heads;
    *nth /= first->heads;
    return job;
}

/* The tasks of one head, and of all heads at hand. */
static int64_t nsa__head_tasks(const nsa__head_job *job) {
    return nsa__ceil_div(job->seq.count, job->task_queries);
}
static int64_t nsa__query_tasks(const nsa__head_job *job) {
    return job->heads * nsa__head_tasks(job);
}

/* The row of a key in K or V, or in their gradients. */
static void *nsa__key(const nsa__head_job *job, const nsa_tensor *x, int key) {
    return nsa__key_row(&job->rows, x, key, job->kv_head);
}

/* The part of a plan that does not depend on what is computed. `lists`: blocks are read or written,
   so that each head with a list is a job of its own. `nearby`: nsa__heads_near of the call, of
   which d may be some heads. */
static nsa__attend_plan nsa__attend_plan_of(const nsa_attend *x, const nsa_attend *dx,
                                            const nsa_desc *d, nsa__branch branch, int lists,
                                            int nearby) {
    nsa__attend_plan p;
    memset(&p, 0, sizeof p);
    p.x = x;
    p.dx = dx;
    p.d = d;
    p.tiles = nsa__tiles_of(d->isa);
    p.branch = branch;
    p.heads = lists ? nsa__list_heads(d) : d->kv_heads;
    p.lists_per_kv_head = p.heads / d->kv_heads;
    p.group = d->heads / p.heads;
    p.list_width = nsa_block_list_width(d);
    p.is = nsa__traits_of[branch];
    if (p.lists_per_kv_head > 1) nearby = 1; /* they add to the same dk and dv */
    p.cut = nsa__schedule_of(d, branch, p.group, nearby);
    p.k = nsa__operand_of(p.tiles, d->dim, d->scale != 0 ? d->scale : 1 / sqrt((double)d->dim));
    p.v = nsa__operand_of(p.tiles, d->dim_v, 1);
    p.pairs = nsa__pair_operands(&p.k, &p.v, x, dx, d);
    return p;
}

/* Bytes of workspace for so many threads. */
static size_t nsa__attend_plan_bytes(const nsa__attend_plan *p, int threads) {
    return nsa__bytes_for(p->shared, threads, p->scratch);
}

/* A head job without memory; a layout hands it out. */
static nsa__head_job nsa__job_make(const nsa__attend_plan *p) {
    nsa__head_job job;
    memset(&job, 0, sizeof job);
    job.plan = p;
    return job;
}

/* ---- Attention: tile iteration ------------------------------------------------------------------
   Twin: kernels/attend_keys.cuh. Not here: what is computed with a tile. */

/* Bits begin .. end - 1 of a tile's mask. */
static uint64_t nsa__bits(int begin, int end) {
    int n = end - begin;
    return n <= 0 ? 0 : (n >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << n) - 1) << begin;
}

/* Ones of a mask, without a builtin: of two bits each, then of four, then of all bytes. */
static int nsa__bit_count(uint64_t mask) {
    const uint64_t two = ~(uint64_t)0 / 3, four = ~(uint64_t)0 / 5, bytes = ~(uint64_t)0 / 255;
    mask -= mask >> 1 & two;
    mask = (mask & four) + (mask >> 2 & four);
    return (int)(((mask + (mask >> 4)) & 15 * bytes) * bytes >> 56);
}

/* The first entry of a list that is `block` or more; -1, as the largest number, is behind all. */
static int nsa__first_listed(const int32_t *list, int n, int block) {
    int low = 0;
    for (int half = n / 2; n > 0; half = n / 2) {
        const int before = (uint32_t)list[low + half] < (uint32_t)block;
        low += before ? half + 1 : 0;
        n = before ? n - half - 1 : half;
    }
    return low;
}

/* The keys tile_begin .. tile_begin + tile - 1 that `query` sees, as a mask. */
static uint64_t nsa__visible(const nsa__head_job *job, int query, int tile_begin) {
    const nsa__attend_plan *p = job->plan;
    const int32_t *list = nsa__block_list(job, query);
    int begin, end;
    int64_t tile_end = (int64_t)tile_begin + p->cut.tile;
    const int first = tile_begin / p->d->slc_block, seen = nsa__span_end(job, query); /* block */
    uint64_t mask = 0;
    for (int i = nsa__first_listed(list, p->list_width, first);
         nsa__span(p, list, seen, i, &begin, &end) && begin < tile_end; i++)
        mask |= nsa__bits((int)nsa__max(begin, tile_begin) - tile_begin,
                          (int)nsa__min(end, tile_end) - tile_begin);
    return mask;
}

/* Makes `own` the job of one query, whose keys are counted along its list. A block is whole but for
   the last one. */
static const nsa__head_job *nsa__gather(nsa__head_job *own, const nsa__head_job *job, int query) {
    const nsa__attend_plan *p = job->plan;
    const int32_t *list = nsa__block_list(job, query);
    const int n = nsa__first_listed(list, p->list_width, INT_MAX);
    int begin = 0, end = 0;
    if (n) nsa__span(p, list, nsa__span_end(job, query), n - 1, &begin, &end);
    *own = *job;
    own->rows.list = list;
    own->rows.list_block = p->d->slc_block;
    own->keys = n ? (n - 1) * p->d->slc_block + end - begin : 0;
    own->tile_end = (int)nsa__ceil_div(own->keys, p->cut.tile);
    return own;
}

/* Whether a tile's queries are found by the lists. */
static int nsa__inverts(const nsa__head_job *job) {
    return job->plan->is.lists && !job->gathers;
}

/* A task iterates over the tiles that any of its queries sees. Queries count from 0 in their task;
   rows are query-major: row a group + g is query head g of query a. */
typedef struct nsa__tile_iter {
    int first, queries; /* positions first .. first + queries - 1 */
    int tile, tile_end; /* the current tile, and the end of those that there are */
    int tile_queries;   /* how many queries see any key of the current tile */
    int *tile_query;    /* these queries, ascending */
    uint64_t *mask;     /* for each of them the keys of the tile that it sees */
    int *row;           /* the rows of a batch of them */
    int *list;          /* slc: the queries of each tile, one tile after the other */
    int *list_begin;    /* slc: those of tile i are list[list_begin[i] .. list_begin[i + 1]) */
} nsa__tile_iter;

/* What holds for one tile comes from `of_tile`, the thread's scratch; the rest from `a`, which
   keeps its content as long as the task lasts. A listed block touches at most l' / tile + 2 tiles,
   or exactly l' / tile if tiles divide blocks. */
static void nsa__tile_iter_alloc(nsa__tile_iter *it, const nsa__attend_plan *p, nsa__arena *a,
                                 nsa__arena *of_tile) {
    it->tile_query = (int *)nsa__alloc(of_tile, p->cut.task_queries, sizeof *it->tile_query);
    it->mask = (uint64_t *)nsa__alloc(of_tile, p->cut.task_queries, sizeof *it->mask);
    it->row = (int *)nsa__alloc(of_tile, (int64_t)p->cut.batch_queries * p->group, sizeof *it->row);
    if (!p->is.lists) return;
    int64_t tiles = nsa__ceil_div(p->d->tokens, p->cut.tile);
    int64_t of_block = p->d->slc_block / p->cut.tile + (p->cut.tile_in_block ? 0 : 2);
    int64_t of_query = nsa__min(p->list_width * of_block, tiles);
    it->list_begin = (int *)nsa__alloc(a, tiles + 2, sizeof *it->list_begin);
    it->list = (int *)nsa__alloc(a, p->cut.task_queries * of_query, sizeof *it->list);
}

/* The list of each query of a task in turn; the one NSA__ROWS_AHEAD behind it is prefetched. */
static const int32_t *nsa__walk_lists(const nsa__head_job *job, const nsa__tile_iter *it, int a) {
    const int later = a + NSA__ROWS_AHEAD;
    if (later < it->queries)
        nsa__fetch(nsa__block_list(job, it->first + later),
                   (size_t)job->plan->list_width * sizeof(int32_t));
    return nsa__block_list(job, it->first + a);
}

/* A pass over the lists: counts the queries of tile i in at[i + 1], or, to fill the tiles, writes
   each query at at[i] and moves that on. Inlined with a constant `fill`, so that the innermost loop
   has no test of it. */
NSA__INLINE void nsa__tile_iter_pass(nsa__tile_iter *it, const nsa__head_job *job, int *at,
                                     int fill) {
    const nsa__attend_plan *p = job->plan;
    const int log2 = p->cut.tile_log2;
    for (int a = 0; a < it->queries; a++) {
        const int32_t *list = nsa__walk_lists(job, it, a);
        const int seen = nsa__span_end(job, it->first + a);
        int begin, end, next = 0; /* the first tile that this query has not been counted for */
        for (int i = 0; nsa__span(p, list, seen, i, &begin, &end); i++) {
            int tile = begin >> log2 > next ? begin >> log2 : next;
            next = ((end - 1) >> log2) + 1;
            for (; tile < next; tile++) {
                if (fill)
                    it->list[at[tile]++] = a;
                else
                    at[tile + 1]++;
            }
        }
    }
}

/* Inverts the block lists: for each tile the queries that list it, ascending. A counting sort in
   two passes over the lists. After the first, sums make at[i] the place where tile i begins; the
   second moves it on, so that list_begin[i + 1], the same number, ends where tile i ends. */
static void nsa__tile_iter_invert(nsa__tile_iter *it, const nsa__head_job *job) {
    int *at = it->list_begin + 1; /* of each tile, its next free place */
    memset(it->list_begin, 0, (size_t)(job->tile_end + 2) * sizeof *at);
    nsa__tile_iter_pass(it, job, at, 0);
    for (int tile = 0; tile < job->tile_end; tile++) at[tile + 1] += at[tile];
    nsa__tile_iter_pass(it, job, at, 1);
}

/* The end of the keys that a query sees, or of those that it gathers. */
static int nsa__keys_end(const nsa__head_job *job, int query) {
    return job->gathers ? job->keys : nsa__span_end(job, query);
}

/* Starts before the first tile of a task. Spans grow with the query (nsa__span_begin,
   nsa__span_end), so the first query's begin and the last query's end bound the tiles of a task
   without lists. A query sees each of them, unless all queries are behind the keys. */
static void nsa__tile_iter_begin(nsa__tile_iter *it, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    const int64_t from = task * job->task_queries;
    it->first = job->seq.first + (int)from;
    it->queries = (int)nsa__min(job->task_queries, job->seq.count - from);
    it->tile = job->tile_begin - 1;
    it->tile_end = job->tile_end;
    if (nsa__inverts(job)) {
        nsa__tile_iter_invert(it, job);
        return;
    }
    const int begin = nsa__span_begin(p, it->first);
    const int end = nsa__keys_end(job, it->first + it->queries - 1);
    it->tile = begin / p->cut.tile - 1;
    it->tile_end = begin < end ? (int)nsa__ceil_div(end, p->cut.tile) : 0;
}

/* Finds the queries that see a key of the current tile, and their masks. With lists the inverted
   lists name the queries. Where a tile does not lie in one block, the blocks of a query's list cut
   it; elsewhere only the ends of the query's span do. */
static void nsa__tile_iter_read(nsa__tile_iter *it, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    int begin = it->tile * p->cut.tile, listed = nsa__inverts(job);
    int n = listed ? it->list_begin[it->tile + 1] - it->list_begin[it->tile] : it->queries;
    const int *readers = listed ? it->list + it->list_begin[it->tile] : NULL;
    it->tile_queries = 0;
    for (int i = 0; i < n; i++) {
        int a = listed ? readers[i] : i, query = it->first + a;
        uint64_t mask;
        if (listed && !p->cut.tile_in_block)
            mask = nsa__visible(job, query, begin);
        else
            mask =
                nsa__bits((int)nsa__max(nsa__span_begin(p, query) - begin, 0),
                          (int)nsa__min((int64_t)nsa__keys_end(job, query) - begin, p->cut.tile));
        if (!mask) continue;
        it->tile_query[it->tile_queries] = a;
        it->mask[it->tile_queries++] = mask;
    }
}

/* The next tile that any query of the task sees; tile_end or more if there is none. */
static int nsa__tile_iter_peek(const nsa__tile_iter *it, const nsa__head_job *job) {
    int tile = it->tile + 1;
    if (nsa__inverts(job))
        while (tile < it->tile_end && it->list_begin[tile] == it->list_begin[tile + 1]) tile++;
    return tile;
}

/* Goes up to that tile and reads it. Returns 0 if there is none. */
static int nsa__tile_iter_next(nsa__tile_iter *it, const nsa__head_job *job) {
    it->tile = nsa__tile_iter_peek(it, job);
    if (it->tile >= it->tile_end) return 0;
    nsa__tile_iter_read(it, job);
    return 1;
}

/* Queries that go through a tile at once. In place they are neighbours, because there their rows
   are columns of one matrix. */
typedef struct nsa__batch {
    int queries, rows;
    const int *query;     /* which of the task's queries, ascending */
    const uint64_t *mask; /* for each query the keys of the tile that it sees */
    const int *row;       /* which of the task's rows */
    int begin, end;       /* keys of the tile that any of them sees, in whole vectors */
    int key, present; /* key `begin` of the tile is the sequence's `key`; the keys that there are */
    int next_key;     /* the first of the tile that the task iterates to next; or all keys */
} nsa__batch;

/* The batch that begins with tile query `from`. Keys that none of its queries sees are cut off at
   both ends in whole vectors, because windows and diagonals leave much of a tile unseen. Every mask
   has a bit, so the loops end. Cut keys would add p = 0, and a key keeps its lane of the partial
   sums, so the cut changes no bit. */
static nsa__batch nsa__batch_at(const nsa__tile_iter *it, const nsa__head_job *job, int from) {
    const nsa__attend_plan *p = job->plan;
    nsa__batch b = {0, 0, it->tile_query + from, it->mask + from, it->row, 0, p->cut.tile, 0, 0, 0};
    int most = (int)nsa__min(p->cut.batch_queries, it->tile_queries - from);
    const int next = nsa__tile_iter_peek(it, job);
    uint64_t seen = 0;
    for (; b.queries < most; b.queries++) {
        int a = b.query[b.queries];
        if (job->in_place && a != b.query[0] + b.queries) break;
        for (int g = 0; g < p->group; g++) it->row[b.rows++] = a * p->group + g;
        seen |= b.mask[b.queries];
    }
    while (!(seen >> b.begin & 0xffff)) b.begin += NSA__LANES;
    while (!(seen >> (b.end - NSA__LANES) & 0xffff)) b.end -= NSA__LANES;
    b.key = it->tile * p->cut.tile + b.begin;
    b.present = (int)nsa__min(b.end - b.begin, job->keys - (int64_t)b.key);
    b.next_key = next < it->tile_end ? next * p->cut.tile : job->keys;
    return b;
}

/* The batch as what its scores go to sees it. */
static nsa__scored nsa__batch_scored(const nsa__attend_plan *p, const nsa__batch *b) {
    const nsa__scored x = {b->rows, b->end - b->begin, p->group, b->begin, b->mask, b->row};
    return x;
}

/* ---- Attention: prefetching ---------------------------------------------------------------------
   Twin: kernels/load.cuh. Not here: how far ahead (schedule.h).
   Rows of one head are a row of all heads apart, which is further than the hardware prefetches. Who
   goes through such rows takes them from a walker, which prefetches the row that comes later. */

/* Row r of a task's queries in x. */
static void *nsa__query_row(const nsa__head_job *job, const nsa__tile_iter *it, const nsa_tensor *x,
                            int r) {
    const nsa__attend_plan *p = job->plan;
    return nsa__row(x, job->seq.batch, job->seq.row + it->first - job->seq.first + r / p->group,
                    job->head * p->group + r % p->group);
}

/* The same of each r in turn; the row NSA__ROWS_AHEAD behind it is prefetched. */
static void *nsa__walk_queries(const nsa__head_job *job, const nsa__tile_iter *it,
                               const nsa_tensor *x, int width, int r) {
    const int later = r + NSA__ROWS_AHEAD;
    if (later < it->queries * job->plan->group)
        nsa__fetch(nsa__query_row(job, it, x, later), nsa__row_bytes(x, width));
    return nsa__query_row(job, it, x, r);
}

/* The row of x of each key up to end - 1 in turn. */
static void *nsa__walk_keys(const nsa__head_job *job, const nsa_tensor *x, int width, int key,
                            int end) {
    const int later = key + NSA__ROWS_AHEAD;
    if (later < end) nsa__fetch(nsa__key(job, x, later), nsa__row_bytes(x, width));
    return nsa__key(job, x, key);
}

/* Prefetches rows begin .. end - 1 of x, as far as there are keys. They are read in place some
   thousand cycles later, and into L1 they would drive out what is read now. */
static void nsa__fetch_rows(const nsa__head_job *job, const nsa_tensor *x, int begin, int end,
                            int width) {
    const ptrdiff_t bytes = (ptrdiff_t)nsa__dtype_bytes(x->dtype);
    end = (int)nsa__min(end, job->keys);
    for (int some; begin < end; begin += some) {
        const char *at = (const char *)nsa__key(job, x, begin);
        some = (int)nsa__min(end - begin, nsa__rows_together(&job->rows, begin));
        for (int r = 0; r < some; r++) {
            if (r) at += (ptrdiff_t)x->token * bytes; /* of one row it may be anything */
            nsa__fetch_l2(at, nsa__row_bytes(x, width));
        }
    }
}

/* Adds the lines of n rows of x from key `begin` on, as far as there are keys. Returns their end,
   or NULL if less than a piece's rows follow each other. */
static nsa__lines *nsa__add_lines(nsa__lines *to, const nsa__head_job *job, const nsa_tensor *x,
                                  int width, int begin, int n) {
    const ptrdiff_t bytes = (ptrdiff_t)nsa__row_bytes(x, width);
    const int end = (int)nsa__min((int64_t)begin + n, job->keys);
    const ptrdiff_t number = (ptrdiff_t)nsa__dtype_bytes(x->dtype);
    if (end - begin > 1 && (ptrdiff_t)x->token * number != bytes) return NULL;
    for (int some; begin < end; begin += some, to++) {
        some = (int)nsa__min(end - begin, nsa__rows_together(&job->rows, begin));
        if (some < end - begin && some < NSA__KEYS_AT_ONCE) return NULL;
        to->at = (const char *)nsa__key(job, x, begin);
        to->n = (int)nsa__ceil_div(some * bytes, 64);
    }
    return to;
}

/* ---- Attention: keys packed by tile -------------------------------------------------------------
   Twin: none. Not here: keys that are not copied (attend_in_place.h). */

/* Workspace that the threads share: packed keys of one sequence and kv head, of k and v alike.
     rows_over  one row a key: element (key, c) at key wide + c
     columns    tile by tile transposed: element (key, c) at (key / tile dim + c) tile + key % tile
       | tile 0: c = 0 of its keys | c = 1 of its keys | ... | tile 1: c = 0 of its keys | ...
   A right operand has contiguous rows, so q k^T reads columns of k and p v reads rows of v.
   Backward reads columns of v for dout v^T and rows of k for ds k. Pairs of bf16 pair the index
   that the product sums over: an element of columns is two neighbouring c of a key, and one of
   rows_over is c of two neighbouring keys. Returns how many keys there is room for. */
static int64_t nsa__alloc_keys(nsa__head_job *job, nsa__arena *a) {
    const nsa__attend_plan *p = job->plan;
    const int64_t tiles = nsa__ceil_div(nsa__max_keys(p), p->cut.tile);
    job->nonfinite = (uint64_t *)nsa__alloc(a, tiles, sizeof *job->nonfinite);
    if (p->is.lists) job->listed = (unsigned char *)nsa__alloc(a, tiles, 1);
    job->columns[NSA__OF_K] = nsa__alloc_reals(a, tiles * p->cut.tile * p->d->dim);
    return tiles * p->cut.tile;
}

/* Clears a tile's sums of the gradient. Heads that share a kv head add to the same ones, one after
   another: the first clears them, the last adds them to dx. */
static void nsa__key_gradient_clear(const nsa__head_job *job, ptrdiff_t tile) {
    const nsa__attend_plan *p = job->plan;
    if (!job->nonfinite_keys || job->head % p->lists_per_kv_head) return;
    job->nonfinite_keys[tile] = 0;
    for (int i = 0; i < 2; i++) {
        const ptrdiff_t numbers = (ptrdiff_t)p->cut.tile * nsa__operand_at(p, i)->wide;
        nsa_real *sum = job->sum[i];
        if (sum) memset(sum + tile * numbers, 0, (size_t)numbers * sizeof *sum);
    }
}

/* Key `key` of packed rows, or the pair that begins with it. */
static nsa__packed *nsa__packed_rows(const nsa__head_job *job, int i, ptrdiff_t key) {
    const nsa__operand *o = nsa__operand_at(job->plan, i);
    return job->rows_over[i] ? job->rows_over[i] + nsa__rows_over(o, key) * o->wide : NULL;
}

/* Column `key` of a transpose. The columns behind it in its tile follow; rows are a tile apart. */
static nsa__packed *nsa__packed_columns(const nsa__head_job *job, int i, ptrdiff_t key) {
    const int tile = job->plan->cut.tile, depth = nsa__operand_at(job->plan, i)->depth;
    return job->columns[i] ? job->columns[i] + key / tile * tile * depth + key % tile : NULL;
}

/* Packs the keys of a tile from key `begin` on, or their values, as the layout has given memory, as
   many rows at a time as a transpose takes. Rows behind the last key, and non-finite ones, are
   zeros: products then need no short tiles. Returns the mask of the non-finite ones. Numbers are
   loaded where they stay; rows that become pairs, or are transposed alone, into `room`, which has
   place for NSA__LANES of them. */
static uint64_t nsa__pack(const nsa__head_job *job, int nth, int begin, nsa_real *room) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *o = nsa__operand_at(p, nth);
    const nsa_tensor *x = nth == NSA__OF_K ? &p->x->k : &p->x->v;
    const int tile = p->cut.tile, end = (int)nsa__min((int64_t)begin + tile, job->keys);
    uint64_t nonfinite = 0;
    for (int first = 0; first < tile; first += NSA__LANES) {
        nsa__packed *rows = nsa__packed_rows(job, nth, begin + first);
        nsa__packed *columns = nsa__packed_columns(job, nth, begin + first);
        nsa_real *loaded = rows && nsa__takes_reals(o) ? rows : room;
        const nsa__matrix by_key = {loaded, o->stride, 1, NULL};
        unsigned char bad[NSA__LANES] = {0};
        for (int i = 0, key = begin + first; i < NSA__LANES; i++) {
            nsa_real *row = loaded + (ptrdiff_t)i * o->stride;
            if (key + i >= end)
                memset(row, 0, (size_t)o->stride * sizeof *row);
            else
                bad[i] = !nsa__copy_row(o, row, x, nsa__walk_keys(job, x, o->width, key + i, end));
        }
        nsa__zero_nonfinite(o, NSA__LANES, loaded, bad);
        for (int i = 0; i < NSA__LANES; i++) nonfinite |= (uint64_t)bad[i] << (first + i);
        if (columns) o->tiles->transpose(NSA__LANES, o->depth, o->stride, loaded, tile, columns);
        if (rows) nsa__rows_for_over(o, NSA__LANES, by_key, rows);
        if (job->listed_rows[nth])
            memcpy(job->listed_rows[nth] + ((ptrdiff_t)begin + first) * o->stride, loaded,
                   (size_t)NSA__LANES * (size_t)o->stride * sizeof *loaded);
    }
    return nonfinite;
}

/* A thread's scratch, of which a task takes `task` bytes and packing some rows. */
static size_t nsa__pack_scratch(const nsa__attend_plan *p, size_t task) {
    nsa__arena rows = {NULL, 0};
    nsa__alloc_reals(&rows, (int64_t)NSA__LANES * nsa__max(p->k.wide, p->v.wide));
    return nsa__larger(task, rows.used);
}

/* Packs one tile of one head. Without values there is nothing to pack of them. */
static void nsa__pack_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    const ptrdiff_t tile = job->tile_begin + (ptrdiff_t)nth;
    const int begin = (int)tile * job->plan->cut.tile;
    nsa__key_gradient_clear(job, tile);
    if (job->listed && !job->listed[tile]) return;
    job->nonfinite[tile] = nsa__pack(job, NSA__OF_K, begin, (nsa_real *)scratch);
    if (job->rows_over[NSA__OF_V] || job->columns[NSA__OF_V])
        job->nonfinite[tile] |= nsa__pack(job, NSA__OF_V, begin, (nsa_real *)scratch);
}

/* Marks the tiles that any list names, because a few queries of a long cache read few tiles.
   Every tile is marked, and no list is read, if there are at least as many queries as tiles.
   Every tile is marked too if heads share a kv head, because dk and dv then sum over the lists
   of all of them. */
static void nsa__mark_listed(const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    int begin, end, many = p->lists_per_kv_head > 1 || job->seq.count >= job->tile_end;
    memset(job->listed, many, (size_t)job->tile_end);
    if (many) return;
    for (int query = job->seq.first; query < job->seq.first + job->seq.count; query++) {
        const int32_t *list = nsa__block_list(job, query);
        const int seen = nsa__span_end(job, query);
        for (int i = 0; nsa__span(p, list, seen, i, &begin, &end); i++) {
            int first = begin / p->cut.tile, tiles = (end - 1) / p->cut.tile - first + 1;
            memset(job->listed + first, 1, (size_t)tiles);
        }
    }
}

/* ---- Attention: in-place keys -----------------------------------------------------------------
   Twin: none. Not here: when they are (attend_plan.h).
   Small query counts (decoding) use K and V in place, unpacked, because packing a tile would cost
   more than its products do. */

/* The batch's rows of x, where they lie. From page to page and around a ring's end they do
   not follow each other: `order` then says where each one lies. Without data if no product can read
   them: they are neither reals nor pairs, no whole vectors, or lie apart by what is no multiple of
   a row's stride. */
static nsa__matrix nsa__rows_in_place(const nsa__head_job *job, const nsa_tensor *x,
                                      const nsa__operand *o, const nsa__batch *b, int *order) {
    nsa__matrix rows = {NULL, nsa__operand_stride(o, x), 1, NULL};
    const int begin = b->key, n = b->present;
    const nsa__packed *first = (const nsa__packed *)nsa__key(job, x, begin);
    if (!nsa__is_operand(o, x)) return rows;
    for (int i = 0, together; n > nsa__rows_together(&job->rows, begin) && i < n; i += together) {
        ptrdiff_t offset = (const nsa__packed *)nsa__key(job, x, begin + i) - first;
        ptrdiff_t at = rows.row ? offset / rows.row : 0;
        if (at * rows.row != offset || at < INT_MIN || at > INT_MAX - n) return rows;
        together = (int)nsa__min(n - i, nsa__rows_together(&job->rows, begin + i));
        for (int r = 0; r < together; r++) order[i + r] = (int)at + r;
        rows.rows = order;
    }
    rows.data = first;
    return rows;
}

/* Scratch of a task that reads keys in place. It computes s^T = k q^T, because the right operand of
   a product has contiguous rows: queries are cheap to transpose, keys are not. */
typedef struct nsa__in_place {
    nsa_real *q_t;       /* (depth, columns): q transposed */
    nsa_real *s_t;       /* (tile, columns): the scores of a tile, transposed */
    nsa_real *rows;      /* copies, as reals or pairs, of rows that no product can read in place */
    nsa__packed *paired; /* values as pairs of rows */
    int *order;          /* of rows in place that do not follow each other */
    uint64_t nonfinite;  /* keys of the batch whose rows of k or v were copied as zeros */
    int copies;          /* 1: values are copied, because a sum over them was not finite */
    int columns; /* rows of a batch in whole vectors, and one vector more: a product reads whole
                    vectors from any row on that a batch begins with */
} nsa__in_place;

/* What belongs to the queries, */
static void nsa__in_place_queries(nsa__in_place *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.batch_queries * p->group;
    memset(f, 0, sizeof *f);
    f->columns = (int)nsa__ceil_div(rows, NSA__LANES) * NSA__LANES + NSA__LANES;
    f->q_t = nsa__alloc_reals(a, (int64_t)p->d->dim * f->columns);
}

/* and to the batch at hand. */
static void nsa__in_place_alloc(nsa__in_place *f, const nsa__attend_plan *p, nsa__arena *a) {
    f->s_t = nsa__alloc_reals(a, (int64_t)p->cut.tile * f->columns);
    f->order = (int *)nsa__alloc(a, p->cut.tile, sizeof *f->order);
    f->rows = nsa__alloc_reals(a, p->cut.tile * nsa__max(p->k.wide, p->v.wide));
    if (p->pairs) f->paired = nsa__alloc_reals(a, (int64_t)p->cut.tile / 2 * p->v.wide);
}

/* Keys begin .. begin + n - 1 of x as reals, whatever they hold. */
static nsa__matrix nsa__rows_widened(const nsa__in_place *f, const nsa__head_job *job,
                                     const nsa_tensor *x, const nsa__operand *o, int begin, int n) {
    const nsa__matrix rows = {f->rows, o->stride, 1, NULL};
    for (int i = 0, some; i < n; i += some) {
        some = (int)nsa__min(n - i, nsa__rows_together(&job->rows, begin + i));
        nsa__widen_rows(o, some, x, nsa__key(job, x, begin + i),
                        f->rows + (ptrdiff_t)i * o->stride);
    }
    return rows;
}

/* Keys of one product. */
static int nsa__keys_at_once(const nsa_tensor *k, int width) {
    const int keys = NSA__BYTES_AT_ONCE / (int)nsa__row_bytes(k, width), piece = NSA__KEYS_AT_ONCE;
    return keys > piece ? keys - keys % piece : (int)nsa__max(keys, NSA__KEYS_LEAST);
}

/* What is read after the scores of a batch: its values, unless only scores are wanted, and keys of
   the next tile. Returns NULL if their rows lie apart. */
static nsa__lines *nsa__in_place_later(const nsa__in_place *f, const nsa__head_job *job,
                                       const nsa__batch *b, nsa__lines *later) {
    const nsa__attend_plan *p = job->plan;
    const nsa__lines no_more = {(const char *)f->q_t, INT_MAX};
    nsa__lines *end = later;
    if (p->x->v.data) end = nsa__add_lines(end, job, &p->x->v, p->v.width, b->key, b->present);
    if (end) end = nsa__add_lines(end, job, &p->x->k, p->k.width, b->next_key, b->present);
    if (!end) return NULL;
    *end = no_more;
    return later;
}

/* s_t = k q_t for the batch's keys; without data they are widened part by part, so that a part is
   still in L1 when it is multiplied. What is read later is prefetched meanwhile or, where rows lie
   apart, before each part. Every score is the same sum in the same order as from packed keys. */
static void nsa__in_place_product(const nsa__in_place *f, const nsa__head_job *job,
                                  const nsa__batch *b, const nsa__matrix *keys) {
    const nsa__attend_plan *p = job->plan;
    nsa__lines room[2 * NSA__TILE + 1], *later = nsa__in_place_later(f, job, b, room);
    const int ahead = b->next_key, begin = b->key, n = b->present;
    const int at_once = keys->data && later ? n : nsa__keys_at_once(&p->x->k, p->k.width);
    int columns = (int)nsa__ceil_div(b->rows, NSA__LANES) * NSA__LANES;
    const nsa__matrix q_t = {f->q_t + (ptrdiff_t)b->query[0] * p->group, f->columns, 1, NULL};
    for (int i = 0, some; i < n; i += some) {
        some = (int)nsa__min(at_once, n - i);
        nsa__matrix k = *keys;
        const nsa__result s_t = {
            f->s_t + (ptrdiff_t)i * f->columns, f->columns, NULL, 0, NULL, later};
        if (!later && p->x->v.data)
            nsa__fetch_rows(job, &p->x->v, begin + i, begin + i + some, p->v.width);
        if (!later) nsa__fetch_rows(job, &p->x->k, ahead + i, ahead + i + some, p->k.width);
        if (!k.data)
            k = nsa__rows_widened(f, job, &p->x->k, &p->k, begin + i, some);
        else if (k.rows)
            k.rows += i;
        else
            k.data += i * k.row;
        nsa__product_along(&p->k, some, columns, &k, &q_t, &s_t);
    }
}

/* A copy of the batch's rows of x. A non-finite row becomes zeros and sets its bit of
   f->nonfinite. */
static nsa__matrix nsa__rows_copied(nsa__in_place *f, const nsa__head_job *job, const nsa_tensor *x,
                                    const nsa__operand *o, const nsa__batch *b) {
    nsa__matrix rows = {f->rows, o->stride, 1, NULL};
    nsa_real *copy = f->rows;
    for (int i = 0; i < b->present; i++, copy += o->stride)
        if (!nsa__copy_operand(o, copy, x, nsa__key(job, x, b->key + i)))
            f->nonfinite |= (uint64_t)1 << i;
    return rows;
}

/* The batch's scores as rows of s, `apart` numbers from each other. A non-finite key makes a
   non-finite score, so keys are tested one by one, in copies, only if a score is not finite. The
   last tile may be short: of its keys only `present` exist, and masks hide the rest. */
static void nsa__in_place_scores(nsa__in_place *f, const nsa__head_job *job, const nsa__batch *b,
                                 ptrdiff_t apart, nsa_real *s) {
    const nsa__attend_plan *p = job->plan;
    int columns = (int)nsa__ceil_div(b->rows, NSA__LANES) * NSA__LANES, n = b->present, done = 0;
    nsa__matrix k = nsa__rows_in_place(job, &p->x->k, &p->k, b, f->order);
    f->nonfinite = 0;
    if (k.data || nsa__takes_reals(&p->k)) {
        nsa__in_place_product(f, job, b, &k);
        done = p->tiles->all_finite(n, columns, f->columns, f->s_t);
    }
    if (!done) {
        k = nsa__rows_copied(f, job, &p->x->k, &p->k, b);
        nsa__in_place_product(f, job, b, &k);
    }
    p->tiles->transpose(n, b->rows, f->columns, f->s_t, apart, s);
    for (int r = 0; n < b->end - b->begin && r < b->rows; r++, s += apart)
        for (int i = n; i < b->end - b->begin; i++) s[i] = 0;
}

/* out = out * shrink + p v for the batch's keys. A non-finite value makes its column of out
   non-finite, whatever p is: nsa__forward_repeats sees it. Then values come from copies, where
   non-finite rows are zeros. */
static void nsa__in_place_sums(nsa__in_place *f, const nsa__head_job *job, const nsa__batch *b,
                               const nsa__matrix *weights, const nsa__result *out) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *o = &p->v;
    nsa__matrix v = nsa__rows_in_place(job, &p->x->v, o, b, f->order);
    if (f->copies || (!v.data && !nsa__takes_reals(o)))
        v = nsa__rows_copied(f, job, &p->x->v, o, b);
    else if (!v.data)
        v = nsa__rows_widened(f, job, &p->x->v, o, b->key, b->present);
    v = nsa__rows_for_over(o, b->present, v, f->paired);
    nsa__product_over(o, b->rows, b->present, weights, &v, out);
}

/* ---- Attention: heads and queries ---------------------------------------------------------------
   Twin: none. Not here: products. */

/* Sets sequence and kv head; computes the range of tiles its queries need. */
static void nsa__set_head(nsa__head_job *job, const nsa__seq *seq, int head, int heads) {
    const nsa__attend_plan *p = job->plan;
    int last = seq->first + seq->count - 1;
    job->seq = *seq;
    job->head = head;
    job->kv_head = head / p->lists_per_kv_head;
    job->heads = heads;
    job->task_queries = nsa__task_queries(&p->cut, p->d, p->branch, seq->tokens, seq->count);
    job->keys = p->is.compressed ? seq->cmp_tokens : seq->tokens;
    job->rows = p->is.compressed ? seq->cmp : seq->keys;
    if (p->step) job->rows.ring = p->step->ring;
    job->in_place = job->gathers || seq->count <= p->cut.in_place_max;
    if (job->gathers) job->task_queries = 1;
    job->tile_begin = nsa__span_begin(p, seq->first) / p->cut.tile;
    job->tile_end = (int)nsa__ceil_div(nsa__span_end(job, last), p->cut.tile);
    if (job->listed && !job->in_place) nsa__mark_listed(job);
}

/* Makes heads of a sequence, from `head` on, those of the jobs, one a head slot, and packs their
   keys, if they are not read in place. The head jobs are neighbours in `jobs`. */
static void nsa__pack_heads(nsa__head_job *jobs, const nsa__team *team, const nsa__seq *seq,
                            int head) {
    const nsa__attend_plan *p = jobs->plan;
    int heads = (int)nsa__min(p->cut.head_slots, p->heads - (int64_t)head);
    for (int i = 0; i < heads; i++) nsa__set_head(&jobs[i], seq, head + i, heads);
    if (jobs->in_place) return;
    nsa__run(team, (int64_t)heads * (jobs->tile_end - jobs->tile_begin), nsa__pack_task, jobs);
}

/* Packs the keys of a few heads of a sequence, then calls `work` for them: for all heads of every
   sequence with more than `few` queries, not counting those that forward gathers. Packing and work
   are two parallel loops, because a task reads tiles that other threads have packed. */
static void nsa__each_heads(nsa__head_job *jobs, const nsa__team *team, int few,
                            void (*work)(nsa__head_job *jobs, const nsa__team *team)) {
    const nsa__attend_plan *p = jobs->plan;
    const nsa_desc *d = p->d;
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
        const nsa__seq part = p->dx ? seq : nsa__seq_part(p, seq, 0);
        for (int head = 0; part.count > few && head < p->heads; head += jobs->heads) {
            nsa__pack_heads(jobs, team, &part, head);
            work(jobs, team);
        }
    }
}

/* Loads the rows of a task's queries, q or dout, as products take them, with zeros behind: times
   the operand's scale, if they take a factor. A row with a non-finite value becomes zeros, and its
   nonfinite[r] is set. */
static void nsa__load_queries(const nsa__head_job *job, const nsa__tile_iter *it,
                              const nsa_tensor *x, const nsa__operand *o, nsa_real *to,
                              unsigned char *nonfinite) {
    const int rows = it->queries * job->plan->group, scaled = nsa__takes_reals(o);
    for (int r = 0; r < rows; r++) {
        nsa_real *row = to + (ptrdiff_t)r * o->stride;
        if (!nsa__copy_row(o, row, x, nsa__walk_queries(job, it, x, o->width, r))) nonfinite[r] = 1;
        if (scaled) o->tiles->scale(o->wide, o->scale, row, row);
    }
    nsa__zero_nonfinite(o, rows, to, nonfinite); /* behind scale, times which it may be too large */
}

/* The number of a row in x, as lse. If it is not finite, the result is 0 and the row is marked: of
   lse also where a query has no keys (-inf), without effect, because it reads no tile. */
static nsa_real nsa__load_number(const nsa__head_job *job, const nsa__tile_iter *it,
                                 const nsa_tensor *x, int r, unsigned char *nonfinite) {
    nsa_real number;
    nsa__load(&number, x->dtype, nsa__query_row(job, it, x, r), 1);
    if (!nsa__is_finite((double)number)) nonfinite[r] = 1;
    return nonfinite[r] ? 0 : number;
}

/* ---- Selection: scores of blocks -------------------------------------------------------------
   Twin: kernels/select_score.cuh. Not here: who asks for lists (score.h, attend_forward.h).
   From scores to lists, for the queries of a task. nsa_select_blocks computes the scores for this
   end; cmp's forward keeps those that it computes anyway.
     Eq. 8:  p_cmp = exp(scale q k_cmp - lse_cmp), of every head
     Eq. 10: p_cmp is summed over the heads of a group
     Eq. 9:  p_slc[j] = sum_u stencil[u] p_cmp[j l'/d - lead + u]
     Eq. 11: nsa__rank
   Eq. 10 comes before Eq. 9, because Eq. 9 is linear: the heads' sum is mapped once, not each head.
   The maximum of NSA_SCORE_OVERLAP_MAX is taken over that sum. */

/* What selection needs of a task's rows: all of their scores against the compressed keys. */
typedef struct nsa__scoring {
    nsa_real *s;      /* of every row, its scores against all compressed keys, times scale; then
                         in the first row of a query p_cmp, summed over the group's heads */
    int64_t stride;   /* of a row of s: whole tiles and one vector */
    nsa_real *scores; /* of one query and selection block: p_slc */
} nsa__scoring;

/* Eq. 9 in strides: selection block j collects compressed blocks j l'/d - lead .. j l'/d - lead +
   size - 1. With l 32, d 16, l' 64 these are blocks 4j - 1 .. 4j + 3, with weights 1 2 2 2 1. */
static int nsa__stencil_lead(const nsa_desc *d) {
    return d->cmp_block / d->cmp_stride - 1;
}
static int nsa__stencil_size(const nsa_desc *d) {
    return d->slc_block / d->cmp_stride + nsa__stencil_lead(d);
}

static void nsa__scoring_alloc(nsa__scoring *f, const nsa__attend_plan *p, nsa__arena *a) {
    /* One vector more: rows a power of two apart would share the same few sets of the cache. */
    f->stride = nsa__ceil_div(nsa__max_keys(p), p->cut.tile) * p->cut.tile + NSA__LANES;
    f->s = nsa__alloc_reals(a, (int64_t)p->cut.task_queries * p->group * f->stride);
    f->scores = nsa__alloc_reals(a, nsa_slc_count(p->d, p->d->tokens));
}

/* Scores of the candidates of one query from its p_cmp. The stencil is cut at block 0 and at the
   last compressed block that the query sees. A candidate without such a block has score 0. One
   weight at a time for all candidates: a candidate alone has too few for a loop. The weight is
   nsa_block_overlap's, of a block whose stencil does not begin before block 0. */
NSA__COMPILED static void nsa__scores(const nsa__scoring *f, const nsa__head_job *job, int query,
                                      const nsa_real *p_cmp) {
    const nsa_desc *d = job->plan->d;
    nsa_real *scores = f->scores;
    const int visible = nsa__cmp_visible(d, job->seq.tokens, query);
    const int candidates = nsa__slc_candidates(d, job->seq.tokens, query);
    const int step = d->slc_block / d->cmp_stride, lead = nsa__stencil_lead(d);
    memset(scores, 0, (size_t)candidates * sizeof *scores);
    for (int u = 0; u < nsa__stencil_size(d); u++) {
        const nsa_real weight = (nsa_real)(nsa__min(u + 1, step) - nsa__max(u - lead, 0));
        const int from = (int)nsa__ceil_div(nsa__max(0, lead - u), step);
        const int to = (int)nsa__min(candidates, nsa__ceil_div(visible + lead - u, step));
        for (int j = from; j < to; j++) {
            const nsa_real value = p_cmp[(ptrdiff_t)j * step + u - lead];
            if (d->score_map == NSA_SCORE_OVERLAP_SUM)
                scores[j] += weight * value;
            else if (value > scores[j])
                scores[j] = value;
        }
    }
}

/* The row of a query and of the list that the job makes. */
static void *nsa__list_row(const nsa__head_job *job, const nsa_tensor *x, int query) {
    return nsa__row(x, job->seq.batch, job->seq.row + query - job->seq.first, job->head);
}

/* Stores n numbers, and `behind` up to the row's width. */
static void nsa__store_reals(void *row, const nsa_real *from, int n, int width, nsa_real behind) {
    nsa_real *to = (nsa_real *)row;
    memcpy(to, from, (size_t)n * sizeof *to);
    for (; n < width; n++) to[n] = behind;
}

/* Ends a query: stores its scores, if they are asked for, and its list, Eq. 11. The scores become
   integers in their order. */
static void nsa__store_list(const nsa__head_job *job, int query, nsa_real *scores) {
    const nsa__attend_plan *p = job->plan;
    const nsa_select *to = p->select;
    const int n = nsa__slc_candidates(p->d, job->seq.tokens, query);
    if (to->scores.data)
        nsa__store_reals(nsa__list_row(job, &to->scores, query), scores, n,
                         nsa_slc_count(p->d, p->d->tokens), nsa__minus_infinity());
    nsa__order(scores, n);
    nsa__rank(scores, n, nsa__forced_local(p->d, job->seq.tokens, query), p->d, p->tiles,
              (int32_t *)nsa__list_row(job, &to->blocks, query));
}

/* p_cmp of n keys of every query of a task, from `key` on. */
static void nsa__select_keys(const nsa__head_job *job, const nsa__tile_iter *it,
                             const nsa__scoring *f, const nsa_real *lse, int key, int n) {
    const nsa__attend_plan *p = job->plan;
    for (int a = 0; a < it->queries; a++) {
        const int visible = nsa__cmp_visible(p->d, job->seq.tokens, it->first + a);
        const int end = (int)nsa__min((int64_t)key + n, nsa__whole_vectors(visible));
        nsa_real *s = f->s + (ptrdiff_t)a * p->group * f->stride + key;
        p->tiles->probability(p->group, end - key, (ptrdiff_t)f->stride,
                              lse + (ptrdiff_t)a * p->group, s, s);
    }
}

/* Scores and list of every query of a task, from p_cmp. A query that read a non-finite number gets
   the list of equal scores, because its real scores are NaN and a list must still be valid. */
static void nsa__select_queries(const nsa__head_job *job, const nsa__tile_iter *it,
                                const nsa__scoring *f, const unsigned char *nonfinite_rows) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *to = &p->select->p_cmp;
    int group = p->group;
    for (int a = 0; a < it->queries; a++) {
        int query = it->first + a, nonfinite = 0;
        int visible = nsa__cmp_visible(p->d, job->seq.tokens, query);
        int candidates = nsa__slc_candidates(p->d, job->seq.tokens, query);
        const nsa_real *p_cmp = f->s + (ptrdiff_t)a * group * f->stride;
        nsa__scores(f, job, query, p_cmp);
        for (int g = 0; g < group; g++) nonfinite |= nonfinite_rows[a * group + g];
        for (int j = 0; nonfinite && j < candidates; j++) f->scores[j] = 0;
        if (to->data)
            nsa__store_reals(nsa__list_row(job, to, query), p_cmp, nonfinite ? 0 : visible,
                             nsa_cmp_count(p->d, p->d->tokens), 0);
        nsa__store_list(job, query, f->scores);
    }
}

static void nsa__select(const nsa__head_job *job, const nsa__tile_iter *it, const nsa__scoring *f,
                        const nsa_real *lse, const unsigned char *nonfinite_rows) {
    nsa__select_keys(job, it, f, lse, 0, INT_MAX);
    nsa__select_queries(job, it, f, nonfinite_rows);
}

/* ---- Attention: forward ----------------------------------------------------------------------
   Twin: kernels/attend_forward.cuh. Not here: which keys (attend_plan.h, attend_tiles.h).
   Softmax in one pass over the keys. q has been multiplied by scale. For each row
   and tile:
     m'  = max(m, max s)             the largest score so far
     p   = exp(s - m')               never more than 1, so nothing overflows
     l   = l exp(m - m') + sum p     exp(m - m') is the shrink of all sums before this tile
     out = out exp(m - m') + p v
   At the end out / l is the softmax's average of v, and lse = m + ln l. If one key has
   all of p, lse is its score to the bit, and backward, whose scores are the same bits, finds p = 1
   however large they are. So scores are in base e, and a difference of two is taken to base 2. */

/* A forward task's scratch. */
typedef struct nsa__forward {
    nsa__tile_iter iter;
    nsa_real *q;              /* rows of the task, times scale, and up to 15 more */
    nsa_real *out;            /* rows of the task: sums of p v, not yet divided by l */
    nsa_real *m;              /* of every row: the largest score so far */
    nsa_real *l;              /* of the same: NSA__LANES partial sums of p */
    nsa_real *s;              /* rows of a batch: scores of a tile, if they are not kept; then p */
    nsa_real *shrink;         /* of every row of a batch, for the tile at hand */
    unsigned char *nonfinite; /* of every row: 1 if it used a non-finite number; it becomes NaN */
    nsa__scoring scoring;     /* if lists are selected too */
    nsa__in_place in_place;
} nsa__forward;

static void nsa__forward_alloc(nsa__forward *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.task_queries * p->group,
            batch_rows = (int64_t)p->cut.batch_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, a);
    f->q = nsa__alloc_reals(a, (rows + NSA__LANES) * p->k.wide);
    f->out = nsa__alloc_reals(a, rows * p->v.wide);
    f->m = nsa__alloc_reals(a, rows);
    f->l = nsa__alloc_reals(a, rows * NSA__LANES);
    f->shrink = nsa__alloc_reals(a, batch_rows + NSA__LANES);
    f->s = nsa__alloc_reals(a, batch_rows * p->cut.tile);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
    if (p->select) nsa__scoring_alloc(&f->scoring, p, a);
    /* Allocated for many queries too, because a workspace for them must serve fewer. */
    nsa__in_place_queries(&f->in_place, p, a);
}

/* Sums of a row start at 0 and its maximum at the lowest number, so that the first tile needs no
   case of its own. */
static void nsa__forward_begin(nsa__forward *f, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    nsa__tile_iter_begin(&f->iter, job, task);
    int rows = f->iter.queries * p->group;
    memset(f->nonfinite, 0, (size_t)rows);
    memset(f->out, 0, (size_t)rows * (size_t)p->v.wide * sizeof *f->out);
    memset(f->l, 0, (size_t)rows * NSA__LANES * sizeof *f->l);
    for (int r = 0; r < rows; r++) f->m[r] = NSA__LOWEST;
    nsa__load_queries(job, &f->iter, &p->x->q, &p->k, f->q, f->nonfinite);
    if (job->in_place)
        nsa__rows_to_columns(&p->k, rows, f->q, f->in_place.columns, f->in_place.q_t);
}

/* Where the scores of a batch go, and how far apart its rows are. If lists are selected, they stay
   in the task's scores; rows of a batch of cmp are neighbours. */
static nsa_real *nsa__forward_scores(const nsa__forward *f, const nsa__attend_plan *p,
                                     const nsa__batch *b, ptrdiff_t *apart) {
    *apart = p->select ? (ptrdiff_t)f->scoring.stride : p->cut.tile;
    return p->select ? f->scoring.s + b->row[0] * *apart + b->key : f->s;
}

/* f->s = p, the softmax so far of scores s, as pairs if v is. l sums p before it is rounded. */
static void nsa__forward_softmax(nsa__forward *f, const nsa__head_job *job, const nsa__batch *b,
                                 nsa_real *s, ptrdiff_t apart) {
    const nsa__attend_plan *p = job->plan;
    const nsa__scored x = nsa__batch_scored(p, b);
    const nsa__running so_far = {f->m, f->l, f->shrink};
    p->tiles->softmax(&x, apart, s, p->cut.tile, f->s, &so_far);
    nsa__round_rows(&p->v, x.rows, x.n, p->cut.tile, f->s);
}

/* Counts the keys that the batch has read, and marks its rows that read a non-finite one. A marked
   row goes on with zeros in place of the key, and is made NaN at the end. */
static void nsa__forward_note(nsa__forward *f, const nsa__head_job *job, const nsa__batch *b,
                              uint64_t nonfinite) {
    const nsa__attend_plan *p = job->plan;
    int64_t *reads = p->step && !f->in_place.copies ? p->step->reads : NULL;
    if (!reads && !nonfinite) return;
    for (int i = 0; i < b->queries; i++) {
        int64_t query = job->seq.row + f->iter.first - job->seq.first + b->query[i];
        if (reads) reads[query * p->d->kv_heads + job->kv_head] += nsa__bit_count(b->mask[i]);
        if (b->mask[i] & nonfinite)
            memset(f->nonfinite + (ptrdiff_t)b->query[i] * p->group, 1, (size_t)p->group);
    }
}

/* Rows s of a batch's scores q k^T, `apart` numbers from each other, from packed keys or in place;
   f->nonfinite gets the keys that are not finite. */
static void nsa__batch_scores(nsa__in_place *f, const nsa__head_job *job, const nsa__batch *b,
                              const nsa_real *rows, ptrdiff_t apart, nsa_real *s) {
    const nsa__attend_plan *p = job->plan;
    if (job->in_place) {
        nsa__in_place_scores(f, job, b, apart, s);
        return;
    }
    const nsa__matrix q = {rows, p->k.stride, 1, b->row};
    const nsa__matrix k_t = {nsa__packed_columns(job, NSA__OF_K, b->key), p->cut.tile, 1, NULL};
    const nsa__result products = nsa__result_at(s, apart, 0);
    nsa__product_along(&p->k, b->rows, b->end - b->begin, &q, &k_t, &products);
    f->nonfinite = job->nonfinite[b->key / p->cut.tile] >> b->begin;
}

/* s = q k^T, with q scaled; p = softmax so far; out = out * shrink + p v */
static void nsa__forward_batch(nsa__forward *f, const nsa__head_job *job, const nsa__batch *b) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *v = &p->v;
    const nsa__matrix weights = {f->s, p->cut.tile, 1, NULL};
    const nsa__matrix values = {nsa__packed_rows(job, NSA__OF_V, b->key), v->wide, 1, NULL};
    const nsa__result out = {f->out, v->wide, b->row, 1, f->shrink, NULL};
    ptrdiff_t apart;
    nsa_real *scores = nsa__forward_scores(f, p, b, &apart);
    nsa__batch_scores(&f->in_place, job, b, f->q, apart, scores);
    nsa__forward_softmax(f, job, b, scores, apart);
    if (job->in_place)
        nsa__in_place_sums(&f->in_place, job, b, &weights, &out);
    else
        nsa__product_over(v, b->rows, b->end - b->begin, &weights, &values, &out);
    nsa__forward_note(f, job, b, f->in_place.nonfinite << b->begin);
}

/* 1 / l of a row, where l is the sum of its parts, and lse = m + ln l. Of a row without keys, whose
   l is 0, these are 0 and -inf. NaN is found by its bits, because -ffast-math knows none. */
NSA__COMPILED static nsa_real nsa__forward_finish(nsa_real *parts, nsa_real m, nsa_real *lse) {
    NSA__ARITHMETIC
    const nsa_real l = nsa__sum_parts(parts);
    if (l == 0) {
        *lse = nsa__minus_infinity();
        return 0;
    }
    *lse = nsa__is_finite((double)l) ? (nsa_real)((double)m + log((double)l)) : l;
    return (nsa_real)(1 / (double)l);
}

/* out and lse of one row; both are NaN if the row used what is not finite. Selection reads lse back
   from the caller's view, because nsa_select_blocks does: both get the same bits. */
static void nsa__forward_row(nsa__forward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *out = &p->x->out;
    void *row = nsa__walk_queries(job, &f->iter, out, p->d->dim_v, r);
    nsa_real *sums = f->out + (ptrdiff_t)r * p->v.wide, lse;
    const nsa_real inv_l = nsa__forward_finish(f->l + (ptrdiff_t)r * NSA__LANES, f->m[r], &lse);
    p->tiles->scale(p->v.wide, inv_l, sums, sums);
    if (inv_l != 0 && f->nonfinite[r]) {
        for (int c = 0; c < p->d->dim_v; c++) sums[c] = nsa__nan();
        lse = nsa__nan();
    }
    nsa__store_by(p->pairs, out->dtype, row, sums, p->d->dim_v);
    nsa__store(p->x->lse.dtype, nsa__query_row(job, &f->iter, &p->x->lse, r), &lse, 1);
    if (p->select) f->m[r] = nsa__load_number(job, &f->iter, &p->x->lse, r, f->nonfinite);
}

static void nsa__forward_rows(nsa__forward *f, const nsa__head_job *job) {
    const int rows = f->iter.queries * job->plan->group;
    for (int r = 0; r < rows; r++) nsa__forward_row(f, job, r);
}

/* Whether the task goes through its tiles once more, after nsa__forward_begin: if it read values in
   place and a sum is not finite, so that one of them may not be. */
static int nsa__forward_repeats(nsa__forward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    const int rows = f->iter.queries * p->group, first = job->in_place && !f->in_place.copies;
    if (!first || p->tiles->all_finite(rows, p->v.wide, p->v.wide, f->out)) return 0;
    return f->in_place.copies = 1;
}

/* A task: some queries of one head, through all of their tiles. Every batch of a tile's queries
   updates the running softmax of its rows. slc's tasks are large, and dense's last ones are its
   longest: these go from the last queries to the first, which have least to read, because no thread
   should begin much last. */
static void nsa__forward_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    nsa__forward f;
    nsa__arena a = {(char *)scratch, 0};
    nsa__head_job own;
    if (nth >= nsa__head_tasks(job)) return;
    if (job->plan->is.last_first) nth = nsa__head_tasks(job) - 1 - nth;
    if (job->gathers) job = nsa__gather(&own, job, job->seq.first + (int)nth);
    nsa__forward_alloc(&f, job->plan, &a);
    nsa__in_place_alloc(&f.in_place, job->plan, &a);
    do {
        nsa__forward_begin(&f, job, nth);
        while (nsa__tile_iter_next(&f.iter, job))
            for (int i = 0; i < f.iter.tile_queries;) {
                nsa__batch b = nsa__batch_at(&f.iter, job, i);
                nsa__forward_batch(&f, job, &b);
                i += b.queries;
            }
    } while (nsa__forward_repeats(&f, job));
    nsa__forward_rows(&f, job);
    if (job->plan->select) nsa__select(job, &f.iter, &f.scoring, f.m, f.nonfinite);
}

/* ---- Attention: one task by several threads -----------------------------------------------------
   Twin: none; a step of few queries is split there by keys (kernels/decode_attend.cuh). Not here:
   products, sums (attend_in_place.h).
   A step of decoding may have fewer tasks than threads. Then a task's batches are computed by
   several threads, some batches at a time, and only what depends on the batches before is done in
   turn:
     scores:  q k^T
     softmax: in turn, because it goes on from the maximum and the sum before
     sums:    p v of each batch alone
     joined:  in turn, out = p v + shrink out
   Where lists are selected, the last parts are keys of p_cmp. Each number is the same sum in the
   same order as nsa__forward_task computes it alone.
   All tasks of a call are in one parallel region. A thread looks for a part of any of them. Where
   all parts at hand have been joined, the thread that sees it takes the next batches in hand, or
   ends the task, while the others work at other tasks: win's batches fill the time in which one
   thread selects blocks. */

/* What a thread has for its part of any task. */
typedef struct nsa__split_room {
    nsa__in_place in_place;
    nsa_real *p;      /* of each batch of a part */
    nsa_real *shrink; /* of the same */
    nsa_real *sums;   /* of the same: p v */
} nsa__split_room;

/* A task that is split. It lies in the scratch of a thread, behind the thread's own room, as there
   are no more tasks than threads. */
typedef struct nsa__split {
    int32_t claims;            /* 0: no thread takes a part */
    int32_t ended;             /* 1: nothing is left */
    int32_t taken, parts;      /* of the batches at hand: parts that have been taken, and all */
    int32_t scored;            /* parts whose softmax is done */
    int32_t joined;            /* parts that are in out */
    int selects;               /* 1: parts are keys of p_cmp */
    const nsa__head_job *job;  /* NULL: not begun */
    const nsa__head_job *then; /* the job to begin next */
    nsa__head_job own;         /* the job of one query, whose keys are gathered */
    nsa__forward f;
    int from;            /* of the tile's queries, the first of the next batch */
    int n, most;         /* batches at hand, and room for them */
    int at_once;         /* batches of a part */
    nsa__batch *batches; /* the query, row and mask of each lie in the next two: */
    uint64_t *masks;     /* of each batch and query */
    int *ascending;      /* 0, 1, 2, ...: queries of a batch in place are neighbours */
} nsa__split;

/* Queries and rows of a batch. */
static int nsa__split_queries(const nsa__attend_plan *p) {
    return (int)nsa__max(1, nsa__min(p->d->count, p->cut.batch_queries));
}
static int nsa__split_rows(const nsa__attend_plan *p) {
    return nsa__split_queries(p) * p->group;
}

static void nsa__split_room_alloc(nsa__split_room *r, const nsa__attend_plan *p, nsa__arena *a) {
    const int64_t rows = (int64_t)p->cut.batch_queries * p->group;
    nsa__arena task = {NULL, 0}; /* which has the queries */
    nsa__in_place_queries(&r->in_place, p, &task);
    nsa__in_place_alloc(&r->in_place, p, a);
    r->p = nsa__alloc_reals(a, NSA__SPLIT_BATCHES * rows * p->cut.tile);
    r->shrink = nsa__alloc_reals(a, NSA__SPLIT_BATCHES * (rows + NSA__LANES));
    r->sums = nsa__alloc_reals(a, nsa__max(NSA__SPLIT_NUMBERS, rows * p->v.wide));
}

/* What a split task has, from the split itself on. More queries have fewer batches at hand, and all
   have the room of the most, because a workspace for many must serve fewer. */
static void nsa__split_alloc(nsa__split *s, const nsa__attend_plan *p, nsa__arena *a) {
    const int queries = p->cut.batch_queries;
    const int64_t rows = (int64_t)queries * p->group;
    const int64_t masks = nsa__max(NSA__SPLIT_MASKS, (int64_t)NSA__SPLIT_BATCHES * queries);
    nsa__alloc(a, 1, sizeof *s);
    nsa__forward_alloc(&s->f, p, a);
    s->most = (int)(masks / nsa__split_queries(p));
    s->batches = (nsa__batch *)nsa__alloc(a, masks, sizeof *s->batches);
    s->masks = (uint64_t *)nsa__alloc(a, masks, sizeof *s->masks);
    s->ascending = (int *)nsa__alloc(a, rows, sizeof *s->ascending);
}

/* What the threads share. */
typedef struct nsa__splits {
    const nsa__team *team;
    size_t room; /* bytes of a thread's own room */
    int count;   /* tasks that are split */
    int first;   /* the first of them, which all threads prefer: others wait for them */
} nsa__splits;

static nsa__split *nsa__split_at(const nsa__splits *all, int64_t i) {
    const nsa__team *team = all->team;
    return (nsa__split *)(void *)(team->scratch + team->scratch_bytes * (size_t)i + all->room);
}

/* The task from its first tile on. */
static void nsa__split_restart(nsa__split *s) {
    nsa__forward_begin(&s->f, s->job, 0);
    s->f.iter.tile_queries = s->from = 0;
}

/* Begins the next job. */
static void nsa__split_begin(nsa__split *s) {
    const nsa__head_job *job = s->then;
    nsa__arena a = {(char *)s, 0};
    nsa__split_alloc(s, job->plan, &a);
    s->then = job->then;
    s->job = job;
    if (job->gathers) s->job = nsa__gather(&s->own, job, job->seq.first);
    for (int r = 0; r < nsa__split_rows(job->plan); r++) s->ascending[r] = r;
    nsa__split_restart(s);
}

/* What is at hand now, as so many parts. */
static void nsa__split_offer(nsa__split *s, int64_t parts) {
    s->taken = s->scored = s->joined = 0;
    s->parts = (int32_t)parts;
}

/* Takes the next batches in hand: two parts or more for each of the task's threads, of two batches
   or more. The last of a part prefetches the keys of the part that its thread is likely to take
   next. Returns 0 at the end. */
static int nsa__split_next(nsa__split *s, int threads) {
    const nsa__attend_plan *p = s->job->plan;
    const int64_t fit = NSA__SPLIT_NUMBERS / p->v.wide / nsa__split_rows(p);
    nsa__tile_iter *it = &s->f.iter;
    for (s->n = 0; s->n < s->most; s->n++) {
        nsa__batch *b = &s->batches[s->n];
        if (s->from >= it->tile_queries) {
            if (!nsa__tile_iter_next(it, s->job)) break;
            s->from = 0;
        }
        *b = nsa__batch_at(it, s->job, s->from);
        s->from += b->queries;
        uint64_t *mask = s->masks + (ptrdiff_t)s->n * nsa__split_queries(p);
        memcpy(mask, b->mask, (size_t)b->queries * sizeof *mask);
        b->mask = mask;
        b->query = s->ascending + b->query[0];
        b->row = s->ascending + b->row[0];
    }
    const int64_t share = nsa__max(2, s->n / (2 * threads));
    s->at_once = (int)nsa__max(1, nsa__min(nsa__min(NSA__SPLIT_BATCHES, fit), share));
    const int apart = (threads - 1) * s->at_once;
    for (int i = s->at_once - 1; i + 1 + apart < s->n; i += s->at_once)
        s->batches[i].next_key = s->batches[i + 1 + apart].key;
    nsa__split_offer(s, nsa__ceil_div(s->n, s->at_once));
    return s->n > 0;
}

/* The job's batches have all been joined: its rows, or once more from its first tile on. Returns 1
   if there are parts at hand then: of its batches, or of p_cmp. */
static int nsa__split_end(nsa__split *s, int threads) {
    const nsa__head_job *job = s->job;
    if (nsa__forward_repeats(&s->f, job)) {
        nsa__split_restart(s);
        return nsa__split_next(s, threads);
    }
    nsa__forward_rows(&s->f, job);
    s->selects = job->plan->select != NULL;
    if (s->selects) nsa__split_offer(s, nsa__ceil_div(job->tile_end, NSA__SPLIT_BATCHES));
    return s->selects;
}

/* All parts at hand have been joined: the next, or those of the next job, or the end. */
static void nsa__split_go_on(nsa__split *s, int threads) {
    if (s->job && !s->selects && (nsa__split_next(s, threads) || nsa__split_end(s, threads)))
        return;
    if (s->job && s->selects)
        nsa__select_queries(s->job, &s->f.iter, &s->f.scoring, s->f.nonfinite);
    s->selects = 0;
    if (s->then)
        nsa__split_begin(s);
    else
        nsa__write(&s->ended, 1);
}

/* A part of the batches at hand, by one thread. */
typedef struct nsa__part {
    int32_t nth;
    int n; /* batches */
    const nsa__batch *batches;
    nsa__in_place *in_place;              /* the thread's */
    nsa__forward of[NSA__SPLIT_BATCHES];  /* the task's, with p and shrink of each batch */
    nsa_real *scores[NSA__SPLIT_BATCHES]; /* rows `apart` from each other */
    nsa_real *sums[NSA__SPLIT_BATCHES];
    uint64_t nonfinite[NSA__SPLIT_BATCHES]; /* keys of each batch */
    ptrdiff_t apart;
} nsa__part;

static nsa__part nsa__split_part(const nsa__split *s, int32_t nth, nsa__split_room *mine) {
    const nsa__attend_plan *p = s->job->plan;
    const ptrdiff_t rows = nsa__split_rows(p);
    nsa__part part;
    memset(&part, 0, sizeof part);
    part.nth = nth;
    part.n = (int)nsa__min(s->at_once, s->n - nth * s->at_once);
    part.batches = s->batches + (ptrdiff_t)nth * s->at_once;
    part.in_place = &mine->in_place;
    part.in_place->q_t = s->f.in_place.q_t;
    part.in_place->copies = s->f.in_place.copies;
    for (int i = 0; i < part.n; i++) {
        part.of[i] = s->f;
        part.of[i].s = mine->p + i * rows * p->cut.tile;
        part.of[i].shrink = mine->shrink + i * (rows + NSA__LANES);
        part.sums[i] = mine->sums + i * rows * p->v.wide;
        part.scores[i] = nsa__forward_scores(&part.of[i], p, &part.batches[i], &part.apart);
    }
    return part;
}

/* Waits until it is the turn of part `nth`. Those before it have begun, and wait for none behind
   them. */
static void nsa__split_await(const int32_t *turn, int32_t nth) {
    for (int looks = 0; nsa__read(turn) != nth; looks++)
        if (looks > NSA__SPLIT_LOOKS) nsa__yield();
}

static void nsa__split_softmax(nsa__split *s, nsa__part *part) {
    nsa__split_await(&s->scored, part->nth);
    for (int i = 0; i < part->n; i++)
        nsa__forward_softmax(&part->of[i], s->job, &part->batches[i], part->scores[i], part->apart);
    nsa__write(&s->scored, part->nth + 1);
}

static void nsa__split_sums(nsa__split *s, nsa__part *part) {
    const nsa__attend_plan *p = s->job->plan;
    const int wide = p->v.wide;
    for (int i = 0; i < part->n; i++) {
        const nsa__matrix weights = {part->of[i].s, p->cut.tile, 1, NULL};
        const nsa__result sums = nsa__result_at(part->sums[i], wide, 0);
        part->in_place->nonfinite = part->nonfinite[i];
        nsa__in_place_sums(part->in_place, s->job, &part->batches[i], &weights, &sums);
        part->nonfinite[i] = part->in_place->nonfinite;
    }
    nsa__split_await(&s->joined, part->nth);
    for (int i = 0; i < part->n; i++) {
        const nsa__batch *b = &part->batches[i];
        const nsa__result out = {s->f.out, wide, b->row, 1, part->of[i].shrink, NULL};
        p->tiles->join(b->rows, wide, part->sums[i], &out);
        nsa__forward_note(&s->f, s->job, b, part->nonfinite[i] << b->begin);
    }
    nsa__write(&s->joined, part->nth + 1);
}

/* p_cmp of the keys of part `nth`, which are those of as many batches as another part has. */
static void nsa__split_select(nsa__split *s, int32_t nth, void *scratch) {
    const int keys = NSA__SPLIT_BATCHES * s->job->plan->cut.tile;
    (void)scratch;
    nsa__select_keys(s->job, &s->f.iter, &s->f.scoring, s->f.m, nth * keys, keys);
    nsa__split_await(&s->joined, nth);
    nsa__write(&s->joined, nth + 1);
}

/* Part `nth` of a task's batches. */
static void nsa__split_compute(nsa__split *s, int32_t nth, void *scratch) {
    nsa__split_room mine;
    nsa__arena a = {(char *)scratch, 0};
    nsa__split_room_alloc(&mine, s->job->plan, &a);
    nsa__part part = nsa__split_part(s, nth, &mine);
    for (int i = 0; i < part.n; i++) {
        nsa__in_place_scores(part.in_place, s->job, &part.batches[i], part.apart, part.scores[i]);
        part.nonfinite[i] = part.in_place->nonfinite;
    }
    nsa__split_softmax(s, &part);
    nsa__split_sums(s, &part);
}

/* One part of the task, or the next batches of it. Returns 0 if there is neither, or if another
   thread takes one. */
static int nsa__split_step(const nsa__splits *all, nsa__split *s, void *scratch) {
    const int threads = (int)nsa__ceil_div(all->team->threads, all->first); /* of a task */
    int32_t part = -1;
    int goes_on;
    if (nsa__read(&s->claims) || !nsa__claim(&s->claims)) return 0;
    goes_on = !s->ended && nsa__read(&s->joined) == s->parts;
    if (goes_on) nsa__split_go_on(s, threads);
    if (!goes_on && s->taken < s->parts) part = s->taken++;
    nsa__write(&s->claims, 0);
    if (part >= 0) (s->selects ? nsa__split_select : nsa__split_compute)(s, part, scratch);
    return goes_on || part >= 0;
}

/* What thread `nth` does, until all tasks have ended. Of the first tasks it looks at one of its own
   before the others. */
static void nsa__split_work(const void *context, int64_t nth, void *scratch) {
    const nsa__splits *all = (const nsa__splits *)context;
    for (int left = 1, done, looks = 0; left;) {
        left = done = 0;
        for (int i = 0; i < all->count && !done; i++) {
            nsa__split *s = nsa__split_at(all, i < all->first ? (nth + i) % all->first : i);
            if (nsa__read(&s->ended)) continue;
            left = 1;
            done = nsa__split_step(all, s, scratch);
        }
        looks = done ? 0 : looks + 1;
        if (left && looks > NSA__SPLIT_LOOKS) nsa__yield();
    }
}

/* Runs the first tasks of `count` jobs, which are no more than the team has threads. */
static void nsa__split_run(const nsa__splits *all, const nsa__head_job *jobs) {
    for (int i = 0; i < all->count; i++) {
        nsa__split *s = nsa__split_at(all, i);
        s->claims = s->ended = s->taken = s->parts = s->scored = s->joined = s->selects = 0;
        s->job = NULL;
        s->then = &jobs[i];
    }
    nsa__run(all->team, all->team->threads, nsa__split_work, all);
}

/* ---- Attention: forward, a call -----------------------------------------------------------------
   Twin: none. Not here: a task (attend_forward.h, attend_split.h). */

/* Head jobs of sequences with few queries that run side by side; of the chain, those of three
   branches. */
static int64_t nsa__in_place_slots(const nsa__attend_plan *p) {
    return (p->select ? 3 : 1) * nsa__min(2 * NSA__TASKS, (int64_t)p->d->batch * p->heads);
}

/* What the jobs take of the shared workspace. A plan counts it, without a base. Returns the jobs
   that read in place. */
static nsa__head_job *nsa__forward_layout(nsa__head_job *jobs, const nsa__attend_plan *p,
                                          nsa__arena *shared) {
    nsa__head_job *in_place =
        (nsa__head_job *)nsa__alloc(shared, nsa__in_place_slots(p), sizeof(nsa__head_job));
    for (int i = 0; i < p->cut.head_slots; i++) {
        nsa__head_job *job = &jobs[i];
        *job = nsa__job_make(p);
        if (p->d->count <= p->cut.in_place_max) continue;
        const int64_t keys = nsa__alloc_keys(job, shared);
        job->rows_over[NSA__OF_V] = nsa__alloc_reals(shared, keys * p->v.wide);
    }
    return in_place;
}

/* Plans for `x`, which is NULL in a size query. */
static nsa__attend_plan nsa__forward_plan(const nsa_attend *x, const nsa_desc *d,
                                          nsa__branch branch, const nsa_select *select,
                                          const nsa__step *step) {
    const int lists = nsa__traits_of[branch].lists || select;
    nsa__attend_plan p = nsa__attend_plan_of(x, NULL, d, branch, lists, nsa__heads_near(d));
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__split_room room;
    nsa__split split;
    nsa__arena shared = {NULL, 0}, scratch = {NULL, 0};
    p.select = select;
    p.step = step;
    p.cut.in_place_max = p.cut.batch_queries;
    nsa__forward_layout(jobs, &p, &shared);
    nsa__split_room_alloc(&room, &p, &scratch);
    p.room = scratch.used;
    nsa__split_alloc(&split, &p, &scratch);
    p.shared = shared.used;
    p.scratch = nsa__pack_scratch(&p, scratch.used);
    return p;
}

static void nsa__forward_heads(nsa__head_job *jobs, const nsa__team *team) {
    nsa__run(team, nsa__query_tasks(jobs), nsa__forward_task, jobs);
}

/* Threads for n jobs that read in place. */
static int nsa__in_place_threads(const nsa__head_job *jobs, int64_t n, const nsa__team *team) {
    int64_t work = 0;
    for (int64_t i = 0; i < n; i++) {
        const nsa__attend_plan *p = jobs[i].plan;
        int64_t keys = (int64_t)(jobs[i].tile_end - jobs[i].tile_begin) * p->cut.tile;
        if (p->is.lists) keys = nsa__min(keys, (int64_t)p->list_width * p->d->slc_block);
        keys *= nsa__ceil_div((int64_t)jobs[i].seq.count * p->group, NSA__LANES) * NSA__LANES;
        work += keys * (p->k.wide + p->v.wide);
    }
    return nsa__threads_for(team->threads, work);
}

/* Runs n jobs, which may have too little work for all threads. Those with fewer tasks than others
   have empty ones. */
static void nsa__in_place_run(nsa__head_job *jobs, int n, const nsa__team *team) {
    nsa__team fewer = *team;
    int64_t most = 0;
    for (int i = 0; i < n; i++) {
        most = nsa__max(most, nsa__head_tasks(&jobs[i]));
        jobs[i].heads = n;
    }
    fewer.threads = nsa__in_place_threads(jobs, n, team);
    nsa__run(&fewer, n * most, nsa__forward_task, jobs);
}

/* Runs the sequences with few queries and the queries that gather, which read keys in place.
   Nothing is packed for them, so heads of many sequences run at once. */
static void nsa__forward_in_place(const nsa__head_job *any, nsa__head_job *jobs,
                                  const nsa__team *team) {
    const nsa__attend_plan *p = any->plan;
    int n = 0;
    for (nsa__seq seq = nsa__seq_begin(p->d); seq.nth < p->d->batch; nsa__seq_next(p->d, &seq))
        for (int i = 0; i < 2 * p->heads; i++) {
            const int gathers = i / p->heads;
            const nsa__seq part = nsa__seq_part(p, seq, gathers);
            if (!part.count || (!gathers && part.count > p->cut.in_place_max)) continue;
            jobs[n] = *any;
            jobs[n].gathers = gathers;
            nsa__set_head(&jobs[n], &part, i % p->heads, 0);
            if (++n < nsa__in_place_slots(p)) continue;
            nsa__in_place_run(jobs, n, team);
            n = 0;
        }
    if (n) nsa__in_place_run(jobs, n, team);
}

/* A thread's scratch where tasks of n plans are split, and in it the most of a thread's room. */
static size_t nsa__split_scratch(const nsa__attend_plan *p, int n, size_t *room) {
    size_t task = *room = 0;
    for (int i = 0; i < n; i++) {
        *room = nsa__larger(*room, p[i].room);
        task = nsa__larger(task, p[i].scratch - p[i].room);
    }
    return *room + task;
}

/* The jobs of all sequences and heads, each of one task, or none: of plan i from at[i] on. Returns
   0 if there are sequences with more tasks. */
static int nsa__split_jobs(nsa__head_job *at[3], const nsa__attend_plan *p, int n) {
    const nsa_desc *d = p->d;
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int i = 0; i < n; i++) {
            const int gathers = nsa__seq_part(&p[i], seq, 1).count;
            if (!seq.count || seq.count > (gathers ? 1 : p[i].cut.in_place_max)) return 0;
            for (int head = 0; head < p[i].heads; head++, at[i]++) {
                *at[i] = nsa__job_make(&p[i]);
                at[i]->gathers = gathers;
                nsa__set_head(at[i], &seq, head, 0);
            }
        }
    return 1;
}

/* One plan, or the three of the chain, all of whose tasks are split; slc's begin as those of cmp
   end, which make their lists. Returns 0 if there are not more threads than that. */
static int nsa__forward_split(const nsa__attend_plan *p, int n, void *workspace, size_t bytes) {
    const int64_t batch = p->d->batch, first = batch * p->heads, most = nsa__in_place_slots(p);
    const int64_t win = n == 3 ? batch * p[NSA__WIN].heads : 0;
    const int64_t count = first + win, all_jobs = count + (n == 3 ? first : 0);
    nsa__arena shared = nsa__arena_at(workspace);
    nsa__team team;
    nsa__splits all = {&team, 0, (int)count, (int)first};
    const size_t scratch = nsa__split_scratch(p, n, &all.room);
    if (all_jobs > most || p->d->count > p->cut.in_place_max) return 0;
    if (nsa__team_make(&team, p->d, workspace, bytes, p->shared, scratch) != NSA_OK) return 0;
    nsa__head_job *jobs = (nsa__head_job *)nsa__alloc(&shared, most, sizeof *jobs);
    nsa__head_job *at[] = {jobs, jobs + count, jobs + first};
    if (team.threads <= first || !nsa__split_jobs(at, p, n)) return 0;
    for (int64_t i = 0; n == 3 && i < first; i++) jobs[i].then = &jobs[count + i];
    team.threads = nsa__in_place_threads(jobs, all_jobs, &team);
    if (team.threads <= first || team.threads < count) return 0;
    nsa__split_run(&all, jobs);
    return 1;
}

/* Tasks are more where the threads are, so the jobs have a plan of their own. */
static nsa_status nsa__forward_run(const nsa__attend_plan *p, void *workspace, size_t bytes) {
    nsa__attend_plan own = *p;
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace);
    if (nsa__forward_split(p, 1, workspace, bytes)) return NSA_OK;
    NSA__CHECK(nsa__team_make(&team, p->d, workspace, bytes, p->shared, p->scratch));
    own.cut.least_tasks = nsa__shared_tasks(&p->cut, p->branch, team.threads);
    nsa__head_job *in_place = nsa__forward_layout(jobs, &own, &shared);
    nsa__forward_in_place(jobs, in_place, &team);
    nsa__each_heads(jobs, &team, p->cut.in_place_max, nsa__forward_heads);
    return NSA_OK;
}

/* ---- Attention: backward ---------------------------------------------------------------------
   Twin: kernels/attend_backward.cuh. Not here: the order of its tasks (threads.h).
   With p = exp(scale q k - lse), delta = dout . out and dlse, the incoming gradient of lse:
     dv[s] = sum_t p dout[t]                   because out = sum_s p v[s]
     ds    = p (dout . v[s] - delta + dlse)    because delta = sum_s p (dout . v[s]), dlse / ds = p
     dq[t] = scale sum_s ds k[s],  dk[s] = scale sum_t ds q[t]
   delta comes from out, so no row needs all its p at once; dlse is subtracted from delta when the
   row is loaded. q is loaded times scale, as in forward, so ds^T q has it; dq gets it when it is
   added to the caller's view. A task computes p and ds of a tile once and uses them three times. In
   pairs of bf16 q is as it is, and so is dout: its gate is a factor of p and ds before they are
   rounded, once. dq belongs to the task alone. A tile's dk and dv belong to all tasks that read the
   tile, which add in a fixed order (nsa__ordered). So all sums have the same bits for any number
   of threads. A query that is computed alone is a task, whose tiles hold the keys of its list:
   products gather their rows, and add to rows of dk and dv. */

/* A backward task: p and ds are scratch of the thread, the rest stays in the task's slot. Of two
   the first is of v, with dout and p; the second of k, with q and ds. */
typedef struct nsa__backward {
    nsa__tile_iter iter;
    nsa_real *rows[2];        /* dout and q of the task */
    nsa_real *columns[2];     /* the same transposed, if the query is computed alone */
    nsa_real *dq;             /* rows of the task */
    nsa_real *lse, *delta;    /* of every row */
    nsa_real *gate;           /* in pairs, of every row: the gate of its dout */
    nsa_real *left[2];        /* rows of a batch: dp and scores of a tile, then p and ds */
    nsa__packed *ds_rows;     /* in pairs: ds by row, while ds has pairs of rows */
    nsa__packed *paired;      /* in pairs: rows of a batch, or keys, as pairs of rows */
    unsigned char *nonfinite; /* of every row: what it adds to becomes NaN */
    unsigned char *reads;     /* of every query: 1 if it has seen a key */
    /* Its shares of dv and dk of tiles that it may not enter yet: `pending` of them, `oldest` to
       `newest`, around the end. Of a query that is computed alone p and ds wait there. */
    nsa_real *share[2];
    uint64_t nonfinite_keys[NSA__PENDING]; /* keys that get NaN */
    int32_t pending_tile[NSA__PENDING];
    int32_t pending_last[NSA__PENDING]; /* what it enters: the tile, or a list's last key there */
    int pending, oldest, newest;
    int at_once;              /* 1: the newest share is added by its products */
    nsa_real ones[NSA__TILE]; /* factors of the sums that are there */
    int keys[NSA__TILE];      /* of the tile at hand, if the query is computed alone */
} nsa__backward;

/* Share `nth` of dv or dk, and the numbers of each. */
static ptrdiff_t nsa__share_numbers(const nsa__attend_plan *p, int i) {
    const int64_t alone = nsa__plan_gathers(p) ? (int64_t)p->group * p->cut.tile : 0;
    return (ptrdiff_t)nsa__max((int64_t)p->cut.tile * nsa__operand_at(p, i)->wide, alone);
}
static nsa_real *nsa__share(const nsa__backward *f, const nsa__attend_plan *p, int i, int nth) {
    return f->share[i] + nth * nsa__share_numbers(p, i);
}

static void nsa__backward_alloc(nsa__backward *f, const nsa__attend_plan *p, nsa__arena *a,
                                nsa__arena *of_tile) {
    const int64_t rows = (int64_t)p->cut.task_queries * p->group;
    const int batch_rows = p->cut.batch_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, of_tile);
    f->dq = nsa__alloc_reals(a, rows * p->k.wide);
    f->lse = nsa__alloc_reals(a, rows);
    f->delta = nsa__alloc_reals(a, rows);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
    f->reads = (unsigned char *)nsa__alloc(a, p->cut.task_queries, 1);
    for (int i = 0; i < 2; i++) {
        const nsa__operand *o = nsa__operand_at(p, i);
        f->rows[i] = nsa__alloc_reals(a, (rows + NSA__LANES) * o->stride);
        f->left[i] =
            nsa__alloc_reals(of_tile, (int64_t)nsa__whole_vectors(batch_rows) * p->cut.tile);
        f->share[i] = nsa__alloc_reals(a, NSA__PENDING * nsa__share_numbers(p, i));
        if (!nsa__plan_gathers(p)) continue;
        f->columns[i] = nsa__alloc_reals(a, (int64_t)o->width * nsa__whole_vectors(p->group));
    }
    if (!p->pairs) return;
    const int64_t paired = nsa__max(batch_rows + 1, p->cut.tile) / 2;
    f->gate = nsa__alloc_reals(a, rows);
    f->ds_rows = nsa__alloc_reals(of_tile, (int64_t)batch_rows * p->cut.tile / 2);
    f->paired = nsa__alloc_reals(of_tile, paired * nsa__max(p->k.wide, p->v.wide));
}

/* Scales a row of dout by its gate, which saves the chain a gradient of every branch's output: out
   = sum_c g[c] out_c  =>  dout_c = g[c] dout. Returns the factor of its delta. In pairs dout and
   delta stay as they are, and the gate is a factor of p and ds later. */
static nsa_real nsa__backward_scale(nsa__backward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    const nsa_desc *d = p->d;
    int query = f->iter.first + r / p->group, head = job->head * p->group + r % p->group;
    nsa_real gates[3], *dout = f->rows[NSA__OF_V] + (ptrdiff_t)r * p->v.stride;
    nsa__load_gates(gates, &p->gate->x->logits, d, job->seq.batch,
                    job->seq.row + query - job->seq.first, head / (d->heads / d->gate_heads));
    nsa__gate_weights(d->gate, gates);
    const nsa_real g = gates[p->branch];
    if (nsa__takes_reals(&p->v)) {
        p->tiles->scale(p->v.wide, g, dout, dout);
        return g;
    }
    const int is_real = nsa__is_finite((double)g);
    f->gate[r] = is_real ? g : 0;
    if (!is_real) f->nonfinite[r] = 1;
    return (nsa_real)is_real;
}

/* dout . out of a row, before the gate. dout is read again, because the task's may have pairs, and
   zeros in place of a non-finite row: the gate's gradient of that row is not finite. */
static nsa_real nsa__backward_dot(const nsa__backward *f, const nsa__head_job *job, int r) {
    const nsa__attend_plan *p = job->plan;
    const nsa__tile_iter *it = &f->iter;
    const nsa_tensor *of_out = &p->x->out, *of_dout = &p->dx->out;
    const int dim_v = p->d->dim_v, wide = p->v.wide;
    nsa_real out[NSA__MAX_DIM], dout[NSA__MAX_DIM];
    nsa__load(out, of_out->dtype, nsa__walk_queries(job, it, of_out, dim_v, r), dim_v);
    nsa__load(dout, of_dout->dtype, nsa__query_row(job, it, of_dout, r), dim_v);
    for (int c = dim_v; c < wide; c++) out[c] = dout[c] = 0;
    return nsa__dot(out, dout, wide);
}

/* Loads q, dout and lse, and computes delta = dout . out - dlse of every row. A row that read a
   non-finite key has lse = NaN from forward, so its lse marks it; keys need no second look. */
static void nsa__backward_begin(nsa__backward *f, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    const nsa__gate_job *gate = p->gate;
    nsa_real *dout = f->rows[NSA__OF_V];
    nsa__tile_iter_begin(&f->iter, job, task);
    f->pending = f->oldest = 0;
    for (int i = 0; i < NSA__TILE; i++) f->ones[i] = 1;
    int rows = f->iter.queries * p->group;
    memset(f->reads, 0, (size_t)f->iter.queries);
    memset(f->nonfinite, 0, (size_t)rows);
    memset(f->dq, 0, (size_t)rows * (size_t)p->k.wide * sizeof *f->dq);
    nsa__load_queries(job, &f->iter, &p->x->q, &p->k, f->rows[NSA__OF_K], f->nonfinite);
    nsa__load_queries(job, &f->iter, &p->dx->out, &p->v, dout, f->nonfinite);
    for (int r = 0; r < rows; r++) {
        nsa_real dot = nsa__backward_dot(f, job, r);
        if (gate && gate->delta_out)
            ((nsa_real *)nsa__query_row(job, &f->iter, gate->delta_out, r))[p->branch] = dot;
        if (gate) dot *= nsa__backward_scale(f, job, r);
        f->delta[r] = dot;
    }
    /* a gate may be NaN, and its product with dout too large */
    if (gate) nsa__zero_nonfinite(&p->v, rows, dout, f->nonfinite);
    for (int r = 0; r < rows; r++) {
        f->lse[r] = nsa__load_number(job, &f->iter, &p->x->lse, r, f->nonfinite);
        if (p->dx->lse.data)
            f->delta[r] -= nsa__load_number(job, &f->iter, &p->dx->lse, r, f->nonfinite);
        if (f->nonfinite[r]) f->delta[r] = 0;
    }
    for (int i = 0; job->gathers && i < 2; i++)
        nsa__rows_to_columns(nsa__operand_at(p, i), rows, f->rows[i], nsa__whole_vectors(rows),
                             f->columns[i]);
}

/* Marks the queries that have read a key, and the keys that a nonfinite row has read: their dk and
   dv become NaN, because each is a sum with that row. */
static void nsa__backward_note(nsa__backward *f, const nsa__head_job *job, const nsa__batch *b) {
    int group = job->plan->group;
    for (int i = 0; i < b->queries; i++) {
        f->reads[b->query[i]] = 1;
        for (int g = 0; g < group; g++)
            if (f->nonfinite[b->query[i] * group + g]) f->nonfinite_keys[f->newest] |= b->mask[i];
    }
}

/* Scores s and dp become p = exp(s - lse) and ds = p (dp - delta), rounded if they are pairs.
   Returns ds by row. */
static const nsa__packed *nsa__backward_weights(const nsa__backward *f, const nsa__attend_plan *p,
                                                const nsa__scored *x, nsa_real *const left[2]) {
    const nsa_real *gate = p->gate ? f->gate : NULL;
    const ptrdiff_t ld = p->cut.tile;
    p->tiles->gradient(x, ld, f->lse, f->delta, left[NSA__OF_V], left[NSA__OF_K]);
    nsa__round_left(&p->v, x, ld, gate, left[NSA__OF_V], NULL);
    return nsa__round_left(&p->v, x, ld, gate, left[NSA__OF_K], f->ds_rows);
}

/* dv += p^T dout, or dk += ds^T q */
static void nsa__backward_keys(const nsa__backward *f, const nsa__attend_plan *p, int i,
                               const nsa__scored *x, const nsa_real *left, const nsa__result *sum) {
    const nsa__operand *o = nsa__operand_at(p, i);
    const nsa__matrix left_t = {left, 1, p->cut.tile, NULL};
    const nsa__matrix by_row = {f->rows[i], o->stride, 1, x->row};
    const nsa__matrix right = nsa__rows_for_over(o, x->rows, by_row, f->paired);
    nsa__product_over(o, x->n, x->rows, &left_t, &right, sum);
}

/* dq += ds k, of n keys */
static void nsa__backward_queries(const nsa__backward *f, const nsa__attend_plan *p,
                                  const nsa__scored *x, const nsa__packed *ds, int n,
                                  const nsa__matrix *keys) {
    const nsa__matrix left = {ds, nsa__rows_over(&p->k, p->cut.tile), 1, NULL};
    const nsa__result dq = {f->dq, p->k.wide, x->row, 1, NULL, NULL};
    if (p->dx->q.data) nsa__product_over(&p->k, x->rows, n, &left, keys, &dq);
}

/* What adds to the sums of dv or dk, from a key on, as a product ends: a share has the same bits
   whether its product adds it or it has waited. */
static nsa__result nsa__backward_sums(const nsa__backward *f, const nsa__head_job *job, int i,
                                      ptrdiff_t key) {
    const int wide = nsa__operand_at(job->plan, i)->wide;
    const nsa__result sums = {job->sum[i] + key * wide, wide, NULL, 1, f->ones, NULL};
    return sums;
}

/* Where a batch adds its part of the newest share. The first one is written there, and what it does
   not reach becomes zeros. */
static nsa__result nsa__backward_part(const nsa__backward *f, const nsa__attend_plan *p, int i,
                                      const nsa__batch *b) {
    const int wide = nsa__operand_at(p, i)->wide, first = b->query == f->iter.tile_query;
    nsa_real *share = nsa__share(f, p, i, f->newest), *end = share + (ptrdiff_t)b->end * wide;
    const size_t row = (size_t)wide * sizeof *share;
    if (first) {
        memset(share, 0, (size_t)b->begin * row);
        memset(end, 0, (size_t)(p->cut.tile - b->end) * row);
    }
    return nsa__result_at(share + (ptrdiff_t)b->begin * wide, wide, !first);
}

/* Adds the lines of so many numbers, if they are there. */
static nsa__lines *nsa__add_numbers(nsa__lines *to, const nsa_real *at, ptrdiff_t numbers) {
    const nsa__lines lines = {(const char *)at, (int)(numbers * (ptrdiff_t)sizeof *at / 64)};
    *to = lines;
    return at ? to + 1 : to;
}

/* What the next tile's products read and add to, which the first batch of a tile prefetches: a
   tile of all heads at once is more than L2 has, and the next one of a list may lie anywhere. */
static nsa__lines *nsa__backward_later(const nsa__backward *f, const nsa__head_job *job,
                                       const nsa__batch *b, nsa__lines *later) {
    const nsa__attend_plan *p = job->plan;
    const ptrdiff_t tile = p->cut.tile, next = b->next_key;
    const nsa__lines no_more = {(const char *)later, INT_MAX};
    nsa__lines *to = later;
    if (next >= job->keys || b->query != f->iter.tile_query) return NULL;
    for (int i = 0; i < 2; i++) {
        const nsa__operand *o = nsa__operand_at(p, i);
        const nsa_real *sum = job->sum[i] ? job->sum[i] + next * o->wide : NULL;
        to = nsa__add_numbers(to, nsa__packed_columns(job, i, next), tile * o->depth);
        to = nsa__add_numbers(to, sum, tile * o->wide);
    }
    to = nsa__add_numbers(to, nsa__packed_rows(job, NSA__OF_K, next),
                          nsa__rows_over(&p->k, tile) * p->k.wide);
    *to = no_more;
    return later;
}

/* s = q k^T, dp = dout v^T, then p and ds, and the gradients' products from these */
static void nsa__backward_batch(nsa__backward *f, const nsa__head_job *job, const nsa__batch *b) {
    const nsa__attend_plan *p = job->plan;
    const nsa__scored x = nsa__batch_scored(p, b);
    nsa__lines room[6], *later = nsa__backward_later(f, job, b, room);
    for (int i = 0; i < 2; i++) {
        const nsa__operand *o = nsa__operand_at(p, i);
        const nsa__matrix rows = {f->rows[i], o->stride, 1, b->row};
        const nsa__matrix columns = {nsa__packed_columns(job, i, b->key), p->cut.tile, 1, NULL};
        const nsa__result scores = {f->left[!i], p->cut.tile, NULL, 0, NULL, later};
        nsa__product_along(o, x.rows, x.n, &rows, &columns, &scores);
    }
    const nsa__packed *ds = nsa__backward_weights(f, p, &x, f->left);
    for (int i = 0; i < 2; i++) {
        if (!job->sum[i]) continue;
        const nsa__result sum =
            f->at_once ? nsa__backward_sums(f, job, i, b->key) : nsa__backward_part(f, p, i, b);
        nsa__backward_keys(f, p, i, &x, f->left[i], &sum);
    }
    const nsa__matrix keys = {nsa__packed_rows(job, NSA__OF_K, b->key), p->k.wide, 1, NULL};
    nsa__backward_queries(f, p, &x, ds, x.n, &keys);
    nsa__backward_note(f, job, b);
}

/* Adds the task's dq. A row that read a non-finite number gets NaN; one that read nothing stays. */
static void nsa__backward_end(nsa__backward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *to = &p->dx->q;
    int dim = p->d->dim, rows = to->data ? f->iter.queries * p->group : 0;
    for (int r = 0; r < rows; r++) {
        nsa_real *dq = f->dq + (ptrdiff_t)r * p->k.wide;
        void *row = nsa__walk_queries(job, &f->iter, to, dim, r);
        if (!f->reads[r / p->group]) continue;
        for (int c = 0; f->nonfinite[r] && c < dim; c++) dq[c] = nsa__nan();
        nsa__add(to->dtype, row, p->k.scale, dq, dim);
    }
}

/* -- queries that are computed alone -- */

/* The keys of a tile of its list; returns how many. */
static int nsa__alone_keys(nsa__backward *f, const nsa__head_job *own, int tile) {
    const int size = own->plan->cut.tile, begin = tile * size;
    const int n = (int)nsa__min(size, own->keys - (int64_t)begin);
    for (int i = 0; i < n; i++) f->keys[i] = (int)nsa__key_in_list(&own->rows, begin + i);
    return n;
}

/* Prefetches what products add to for the keys at hand, and the rows of the next tile's keys. */
static void nsa__alone_fetch(const nsa__backward *f, const nsa__head_job *own, int i, int n) {
    const nsa__operand *o = nsa__operand_at(own->plan, i);
    const ptrdiff_t along = o->stride;
    const int64_t next = (f->iter.tile + (int64_t)1) * own->plan->cut.tile;
    for (int j = 0; j < n; j++) {
        nsa_real *sum = own->sum[i];
        if (sum) nsa__fetch(sum + (ptrdiff_t)f->keys[j] * o->wide, (size_t)o->wide * sizeof *sum);
        if (next + j >= own->keys) continue;
        const ptrdiff_t later = (ptrdiff_t)nsa__key_in_list(&own->rows, next + j);
        nsa__fetch(own->listed_rows[i] + later * along, (size_t)along * sizeof(nsa_real));
    }
}

/* s = q k^T, or dp = dout v^T, of n keys at hand, and zeros behind them. The products are by key,
   where a batch would have p and ds. */
static void nsa__alone_product(const nsa__backward *f, const nsa__head_job *own, int i, int n,
                               nsa_real *s) {
    const nsa__attend_plan *p = own->plan;
    const nsa__operand *o = nsa__operand_at(p, i);
    const int columns = nsa__whole_vectors(p->group);
    const nsa__matrix rows = {own->listed_rows[i], o->stride, 1, f->keys};
    const nsa__matrix of_query = {f->columns[i], columns, 1, NULL};
    const nsa__result s_t = nsa__result_at(f->left[i], columns, 0);
    nsa__product_along(o, n, columns, &rows, &of_query, &s_t);
    p->tiles->transpose(n, p->group, columns, f->left[i], p->cut.tile, s);
    for (int r = 0; r < p->group; r++, s += p->cut.tile)
        for (int j = n; j < nsa__whole_vectors(n); j++) s[j] = 0;
}

/* dq += ds k. p and ds of the tile wait for dk and dv. */
static void nsa__alone_tile(nsa__backward *f, const nsa__head_job *own) {
    const nsa__attend_plan *p = own->plan;
    const nsa__batch b = nsa__batch_at(&f->iter, own, 0);
    const nsa__scored x = nsa__batch_scored(p, &b);
    const int n = nsa__alone_keys(f, own, f->iter.tile);
    nsa_real *const left[] = {nsa__share(f, p, 0, f->newest), nsa__share(f, p, 1, f->newest)};
    f->pending_last[f->newest] = f->keys[n - 1];
    for (int i = 0; i < 2; i++) nsa__alone_fetch(f, own, i, n);
    for (int i = 0; i < 2; i++) nsa__alone_product(f, own, i, n, left[!i]);
    const nsa__packed *ds = nsa__backward_weights(f, p, &x, left);
    const nsa__matrix listed = {own->listed_rows[NSA__OF_K], p->k.stride, 1, f->keys};
    const nsa__matrix keys = nsa__rows_for_over(&p->k, n, listed, f->paired);
    nsa__backward_queries(f, p, &x, ds, n, &keys);
    nsa__backward_note(f, own, &b);
}

/* dv += p^T dout and dk += ds^T q, for the tile that has waited longest. */
static void nsa__alone_add(nsa__backward *f, const nsa__head_job *own) {
    const nsa__attend_plan *p = own->plan;
    const int n = nsa__alone_keys(f, own, f->pending_tile[f->oldest]), tile = p->cut.tile;
    const nsa__scored x = {p->group, n, p->group, 0, NULL, NULL};
    for (int i = 0; i < 2; i++) {
        const nsa__result sum = {own->sum[i], nsa__operand_at(p, i)->wide, f->keys, 1, NULL, NULL};
        if (own->sum[i]) nsa__backward_keys(f, p, i, &x, nsa__share(f, p, i, f->oldest), &sum);
    }
    for (int i = 0; i < n; i++)
        if (f->nonfinite_keys[f->oldest] >> i & 1)
            own->nonfinite_keys[f->keys[i] / tile] |= (uint64_t)1 << f->keys[i] % tile;
}

/* A slot of the backward pass: the slot, the task's state, then the arrays of that state. */
typedef struct nsa__backward_slot {
    nsa__task_slot slot;
    nsa__backward task;
} nsa__backward_slot;

/* The state of the task in a slot, with its arrays: those of one tile in `scratch`, the others in
   `own`, behind the slot. Without a slot it only counts the bytes of both arenas. */
static nsa__backward *nsa__backward_at(const nsa__attend_plan *p, void *slot, nsa__arena *scratch,
                                       nsa__arena *own) {
    nsa__backward any, *f = slot ? &((nsa__backward_slot *)slot)->task : NULL;
    own->base = (char *)slot;
    nsa__alloc(own, 1, sizeof(nsa__backward_slot));
    nsa__backward_alloc(f ? f : &any, p, own, scratch);
    return f;
}

/* The share of a tile of dk and dv, summed alone: the order of sums does not depend on when a task
   may add it. If it may enter now, and one batch is all of the share, the batch's products add
   it. */
static void nsa__backward_tile(nsa__backward *f, const nsa__head_job *job, int may_enter) {
    const nsa__attend_plan *p = job->plan;
    f->at_once = may_enter && !f->pending && f->iter.tile_queries <= p->cut.batch_queries;
    f->newest = (f->oldest + f->pending++) % NSA__PENDING;
    f->pending_tile[f->newest] = f->pending_last[f->newest] = f->iter.tile;
    f->nonfinite_keys[f->newest] = 0;
    if (job->gathers) {
        nsa__alone_tile(f, job);
        return;
    }
    for (int i = 0, queries = f->iter.tile_queries; i < queries;) {
        nsa__batch b = nsa__batch_at(&f->iter, job, i);
        nsa__backward_batch(f, job, &b);
        i += b.queries;
    }
}

/* Adds the oldest share to the tile's sums. */
static void nsa__backward_share(const nsa__backward *f, const nsa__head_job *job) {
    const nsa__attend_plan *p = job->plan;
    const int32_t oldest = f->oldest, tile = f->pending_tile[oldest], keys = p->cut.tile;
    for (int i = 0; i < 2; i++) {
        if (!job->sum[i] || f->at_once) continue;
        const nsa__result sums = nsa__backward_sums(f, job, i, (ptrdiff_t)tile * keys);
        p->tiles->join(keys, nsa__operand_at(p, i)->wide, nsa__share(f, p, i, oldest), &sums);
    }
    job->nonfinite_keys[tile] |= f->nonfinite_keys[oldest];
}

/* Adds what has waited longest, and returns what the task has then left. */
static int32_t nsa__backward_add(nsa__backward *f, const nsa__head_job *job) {
    const int32_t last = f->pending_last[f->oldest];
    if (job->gathers)
        nsa__alone_add(f, job);
    else
        nsa__backward_share(f, job);
    f->pending--;
    f->oldest = f->pending ? (f->oldest + 1) % NSA__PENDING : 0;
    return last + 1;
}

/* One step of a task: it loads its rows, computes a tile's share, adds its oldest share, or ends. A
   task may come back in another thread, whose scratch does not have its masks: the step that needs
   them reads the tile. */
static int nsa__backward_step(const nsa__ordered *ordered, nsa__task_slot *slot, void *scratch) {
    int64_t nth = slot->task;
    const nsa__head_job *job = nsa__job_of(ordered->context, &nth);
    nsa__head_job alone;
    nsa__arena of_tile = {(char *)scratch, 0}, own = {NULL, 0};
    nsa__backward *f = nsa__backward_at(job->plan, slot, &of_tile, &own);
    nsa__tile_iter *it = &f->iter;
    /* from the last queries on: they have most to read, which no thread should begin last */
    nth = nsa__head_tasks(job) - 1 - nth;
    if (job->gathers) job = nsa__gather(&alone, job, job->seq.first + (int)nth);
    if (!slot->started) {
        nsa__backward_begin(f, job, nth);
        it->tile = nsa__tile_iter_peek(it, job);
        slot->started = 1;
    } else if (f->pending && nsa__may_enter(ordered, slot->task, f->pending_last[f->oldest])) {
        nsa__write(ordered->progress + slot->task, nsa__backward_add(f, job));
    } else if (it->tile < it->tile_end) {
        nsa__tile_iter_read(it, job);
        nsa__backward_tile(f, job, nsa__may_enter(ordered, slot->task, it->tile));
        it->tile = nsa__tile_iter_peek(it, job);
        if (it->tile >= it->tile_end) nsa__backward_end(f, job);
    } else {
        nsa__write(ordered->progress + slot->task, INT32_MAX);
        return 1;
    }
    int32_t wait_tile = f->pending ? f->pending_last[f->oldest] : INT32_MAX - 1;
    if (it->tile < it->tile_end && f->pending < NSA__PENDING) wait_tile = -1;
    nsa__write(&slot->wait_tile, wait_tile);
    return 0;
}

/* Adds a tile's sum to dk or dv. Keys that a NaN row has read get NaN. */
static void nsa__key_gradient_add(const nsa__head_job *job, int tile, int i) {
    const nsa__attend_plan *p = job->plan;
    const nsa__operand *o = nsa__operand_at(p, i);
    const nsa_tensor *to = i == NSA__OF_K ? &p->dx->k : &p->dx->v;
    int begin = tile * p->cut.tile, end = (int)nsa__min((int64_t)begin + p->cut.tile, job->keys);
    for (int key = begin; job->sum[i] && key < end; key++) {
        nsa_real *row = job->sum[i] + (ptrdiff_t)key * o->wide;
        void *added = nsa__walk_keys(job, to, o->width, key, end);
        for (int c = 0; job->nonfinite_keys[tile] >> (key - begin) & 1 && c < o->width; c++)
            row[c] = nsa__nan();
        nsa__add(to->dtype, added, nsa__sum_scale(o), row, o->width);
    }
}

/* The last step: a tile's sums go to dx.k and dx.v, when all tasks have added to them. */
static void nsa__key_gradient_task(const void *context, int64_t nth, void *scratch) {
    const nsa__head_job *job = nsa__job_of(context, &nth);
    const nsa__attend_plan *p = job->plan;
    int tile = job->tile_begin + (int)nth;
    (void)scratch;
    if (job->head % p->lists_per_kv_head != p->lists_per_kv_head - 1) return;
    if (job->listed && !job->listed[tile]) return;
    for (int i = 0; i < 2; i++) nsa__key_gradient_add(job, tile, i);
}

/* The order of these jobs' tasks. nsa__backward_heads sets `tasks` when it knows the queries. */
static nsa__ordered nsa__backward_ordered(const nsa__head_job *jobs) {
    nsa__arena scratch = {NULL, 0}, slot = {NULL, 0};
    nsa__backward_at(jobs->plan, NULL, &scratch, &slot);
    const nsa__ordered ordered = {0,         jobs->heads, jobs->progress, jobs, nsa__backward_step,
                                  slot.used, scratch.used};
    return ordered;
}

static void nsa__backward_layout(nsa__head_job *jobs, const nsa__attend_plan *p,
                                 nsa__arena *shared) {
    const int gathers = nsa__plan_gathers(p), each = gathers ? 1 : p->cut.task_queries;
    int64_t tasks = nsa__max(p->cut.least_tasks, nsa__ceil_div(p->d->count, each));
    int32_t *progress = (int32_t *)nsa__alloc(shared, p->cut.head_slots * tasks, sizeof *progress);
    for (int i = 0; i < p->cut.head_slots; i++) {
        nsa__head_job *job = &jobs[i];
        *job = nsa__job_make(p);
        job->progress = progress;
        const int64_t keys = nsa__alloc_keys(job, shared);
        job->rows_over[NSA__OF_K] = nsa__alloc_reals(shared, keys * p->k.wide);
        job->columns[NSA__OF_V] = nsa__alloc_reals(shared, keys * p->d->dim_v);
        job->nonfinite_keys =
            (uint64_t *)nsa__alloc(shared, keys / p->cut.tile, sizeof *job->nonfinite_keys);
        for (int j = 0; j < 2; j++) {
            const nsa__operand *o = nsa__operand_at(p, j);
            if (gathers) job->listed_rows[j] = nsa__alloc_reals(shared, keys * o->stride);
            job->sum[j] = nsa__alloc_reals(shared, keys * o->wide);
        }
        if (p->dx && !p->dx->v.data) job->sum[NSA__OF_V] = NULL;
        if (p->dx && !p->dx->k.data) job->sum[NSA__OF_K] = NULL;
    }
}

/* Plans for `x` and `dx`, which are NULL in a size query. d has all heads of `whole` or some: a
   head's tasks are the same whichever heads are beside it. */
static nsa__attend_plan nsa__backward_plan(const nsa_attend *dx, const nsa_attend *x,
                                           const nsa_desc *d, nsa__branch branch,
                                           const nsa_desc *whole) {
    const int lists = nsa__traits_of[branch].lists;
    nsa__attend_plan p = nsa__attend_plan_of(x, dx, d, branch, lists, nsa__heads_near(whole));
    p.cut = nsa__backward_schedule(p.cut, d, branch, p.group);
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__arena shared = {NULL, 0};
    nsa__backward_layout(jobs, &p, &shared);
    nsa__ordered ordered = nsa__backward_ordered(jobs);
    p.shared = shared.used;
    p.scratch = nsa__pack_scratch(&p, nsa__ordered_scratch(&ordered));
    return p;
}

/* The queries that share tiles, then those that are computed alone. */
static void nsa__backward_heads(nsa__head_job *jobs, const nsa__team *team) {
    nsa__ordered ordered = nsa__backward_ordered(jobs);
    const nsa__seq seq = jobs->seq;
    for (int gathers = 0; gathers < 2; gathers++) {
        const nsa__seq part = nsa__seq_part(jobs->plan, seq, gathers);
        for (int i = 0; i < jobs->heads; i++) {
            jobs[i].seq = part;
            jobs[i].gathers = gathers;
            if (gathers) jobs[i].task_queries = 1;
        }
        ordered.tasks = (int32_t)nsa__query_tasks(jobs);
        if (part.count) nsa__run_ordered(team, &ordered);
    }
    for (int i = 0; i < jobs->heads; i++) jobs[i].seq = seq, jobs[i].gathers = 0;
    nsa__run(team, (int64_t)jobs->heads * (jobs->tile_end - jobs->tile_begin),
             nsa__key_gradient_task, jobs);
}

static nsa_status nsa__backward_run(const nsa__attend_plan *p, void *workspace, size_t bytes) {
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace);
    NSA__CHECK(nsa__team_make(&team, p->d, workspace, bytes, p->shared, p->scratch));
    nsa__backward_layout(jobs, p, &shared);
    nsa__each_heads(jobs, &team, 0, nsa__backward_heads);
    return NSA_OK;
}

/* ---- Attention: entry points --------------------------------------------------------------------
   Twin: kernels/attend_branches.cuh. Not here: what they run (attend_forward.h,
   attend_backward.h). */

static size_t nsa__attend_bytes(const nsa_desc *d, nsa__branch branch, int backward) {
    nsa_desc own;
    d = nsa__desc_using(d, nsa__traits_of[branch].uses, &own);
    if (nsa_desc_check(d) != NSA_OK || (backward && d->pages)) return 0;
    nsa__attend_plan p = backward ? nsa__backward_plan(NULL, NULL, d, branch, d)
                                  : nsa__forward_plan(NULL, d, branch, NULL, NULL);
    return nsa__attend_plan_bytes(&p, nsa__threads(d));
}

static nsa_status nsa__attend_check(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d,
                                    nsa__branch branch, int forward) {
    const nsa__traits *is = &nsa__traits_of[branch];
    const nsa__checked c = nsa__checked_of(d, forward, is->compressed);
    NSA__CHECK(nsa__check_call(&c, nsa__attend_views, NSA__ATTEND_VIEWS - !is->lists, dx, x));
    return is->lists ? nsa__check_lists(&x->blocks, d, NULL) : NSA_OK;
}

static nsa_status nsa__attend_forward(const nsa_attend *x, const nsa_desc *d, nsa__branch branch,
                                      void *workspace, size_t bytes) {
    nsa_desc own;
    d = nsa__desc_using(d, nsa__traits_of[branch].uses, &own);
    NSA__CHECK(nsa__attend_check(NULL, x, d, branch, 1));
    const nsa__attend_plan p = nsa__forward_plan(x, d, branch, NULL, NULL);
    return nsa__forward_run(&p, workspace, bytes);
}

static nsa_status nsa__attend_backward(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d,
                                       nsa__branch branch, void *workspace, size_t bytes) {
    nsa_desc own;
    d = nsa__desc_using(d, nsa__traits_of[branch].uses, &own);
    NSA__CHECK(nsa__attend_check(dx, x, d, branch, 0));
    const nsa__attend_plan p = nsa__backward_plan(dx, x, d, branch, d);
    return nsa__backward_run(&p, workspace, bytes);
}

/* The four public functions of each branch. */
#define NSA__ATTEND_ENTRY_POINTS(name, branch)                                                 \
    NSA_API size_t nsa_attend_##name##_forward_workspace_size(const nsa_desc *d) {             \
        return nsa__attend_bytes(d, branch, 0);                                                \
    }                                                                                          \
    NSA_API nsa_status nsa_attend_##name##_forward(const nsa_attend *x, const nsa_desc *d,     \
                                                   void *workspace, size_t bytes) {            \
        return nsa__attend_forward(x, d, branch, workspace, bytes);                            \
    }                                                                                          \
    NSA_API size_t nsa_attend_##name##_backward_workspace_size(const nsa_desc *d) {            \
        return nsa__attend_bytes(d, branch, 1);                                                \
    }                                                                                          \
    NSA_API nsa_status nsa_attend_##name##_backward(const nsa_attend *dx, const nsa_attend *x, \
                                                    const nsa_desc *d, void *workspace,        \
                                                    size_t bytes) {                            \
        return nsa__attend_backward(dx, x, d, branch, workspace, bytes);                       \
    }

NSA__ATTEND_ENTRY_POINTS(cmp, NSA__CMP)
NSA__ATTEND_ENTRY_POINTS(slc, NSA__SLC)
NSA__ATTEND_ENTRY_POINTS(win, NSA__WIN)
NSA__ATTEND_ENTRY_POINTS(dense, NSA__DENSE)
#undef NSA__ATTEND_ENTRY_POINTS

/* ---- Merge --------------------------------------------------------------------------------------
   Twin: kernels/merge.cuh. Not here: attention. */

typedef struct nsa__merge_job {
    const nsa_merge *x, *dx;
    const nsa_desc *d;
} nsa__merge_job;

/* A row of a gradient that several rows of x may share, and its sum so far. */
typedef struct nsa__merge_sum {
    void *row;
    double *of;
} nsa__merge_sum;

/* Recognised by its bits, because -ffast-math knows no infinity. */
static int nsa__is_minus_infinity(nsa_real x) {
    const nsa_real infinity = nsa__minus_infinity();
    return memcmp(&x, &infinity, sizeof x) == 0;
}

/* The parts' shares w[2] of one row, and lse of both: w_a = exp(lse_a - lse). A part without keys
   leaves w = 1 and lse of the other as they are, to the bit. Returns the parts that count, as bits,
   because under -ffast-math a NaN share may compare equal to 0. */
static int nsa__merge_weights(nsa_real a, nsa_real b, nsa_real w[2], nsa_real *lse) {
    int no_a = nsa__is_minus_infinity(a), no_b = nsa__is_minus_infinity(b);
    w[0] = no_a ? 0 : 1;
    w[1] = no_b ? 0 : 1;
    *lse = no_a ? b : a;
    if (no_a || no_b) return (no_a ? 0 : 1) | (no_b ? 0 : 2);
    if (!nsa__is_finite((double)a) || !nsa__is_finite((double)b)) {
        *lse = w[0] = w[1] = nsa__nan();
        return 3;
    }
    /* lse = max + ln(1 + exp(min - max)): exp of a number <= 0 cannot overflow. a < b is the index
       of the larger part. */
    double least = exp(-fabs((double)a - (double)b)), most = 1 / (1 + least);
    w[a < b] = (nsa_real)most;
    w[a >= b] = (nsa_real)(least * most);
    *lse = (nsa_real)((double)(a < b ? b : a) + log1p(least));
    return (w[0] > 0 ? 1 : 0) | (w[1] > 0 ? 2 : 0);
}

/* One real number of a view. */
static nsa_real nsa__load_real(const nsa_tensor *x, int64_t batch, int64_t row, int64_t head) {
    nsa_real value;
    nsa__load(&value, x->dtype, nsa__row(x, batch, row, head), 1);
    return value;
}

/* out = w_a out_a + w_b out_b, lse = ln(exp lse_a + exp lse_b) */
static void nsa__merge_forward_row(const nsa__merge_job *job, int64_t batch, int64_t row,
                                   int head) {
    const nsa_merge *x = job->x;
    const nsa_tensor *part[2] = {&x->out_a, &x->out_b};
    nsa_real w[2], lse, out[NSA__MAX_DIM];
    int parts = nsa__merge_weights(nsa__load_real(&x->lse_a, batch, row, head),
                                   nsa__load_real(&x->lse_b, batch, row, head), w, &lse);
    memset(out, 0, (size_t)job->d->dim_v * sizeof *out);
    if (parts == 1 || parts == 2) /* as it is: a sum would lose the sign of a 0 */
        nsa__load(out, part[parts / 2]->dtype, nsa__row(part[parts / 2], batch, row, head),
                  job->d->dim_v);
    for (int i = 0; parts == 3 && i < 2; i++)
        nsa__add_to(out, w[i], part[i]->dtype, nsa__row(part[i], batch, row, head), job->d->dim_v);
    nsa__store(x->out.dtype, nsa__row(&x->out, batch, row, head), out, job->d->dim_v);
    nsa__store(x->lse.dtype, nsa__row(&x->lse, batch, row, head), &lse, 1);
}

/* Adds factor * from to a row of a gradient, or to `sum`, which goes to its row, rounded once, when
   another row comes, or none. */
static void nsa__merge_add(nsa__merge_sum *sum, const nsa_tensor *x, void *row, nsa_real factor,
                           const nsa_real *from, int n) {
    if (!sum) {
        nsa__add(x->dtype, row, factor, from, n);
        return;
    }
    if (sum->row && sum->row != row) {
        nsa_real whole[NSA__MAX_DIM];
        for (int c = 0; c < n; c++) whole[c] = (nsa_real)sum->of[c];
        nsa__add(x->dtype, sum->row, 1, whole, n);
    }
    if (sum->row != row) memset(sum->of, 0, (size_t)n * sizeof *sum->of);
    for (int c = 0; from && c < n; c++) sum->of[c] += (double)(factor * from[c]);
    sum->row = row;
}

/* w_a = exp(lse_a - lse), so dw_a / dlse_a = w_a w_b = -dw_b / dlse_a, dlse / dlse_a = w_a:
     dout_a = w_a dout,   dlse_a = w_a (w_b dout . (out_a - out_b) + dlse)
   and the same with a and b exchanged. `sums`: NULL, or of dout_a, dout_b, dlse_a and dlse_b. */
static void nsa__merge_backward_row(const nsa__merge_job *job, int64_t batch, int64_t row, int head,
                                    nsa__merge_sum *sums) {
    const nsa_merge *x = job->x, *dx = job->dx;
    const nsa_tensor *part[2] = {&x->out_a, &x->out_b}, *dpart[2] = {&dx->out_a, &dx->out_b},
                     *dlse_of[2] = {&dx->lse_a, &dx->lse_b};
    int dim_v = job->d->dim_v;
    nsa_real w[2], lse, along = 0, dout[NSA__MAX_DIM], out[2][NSA__MAX_DIM];
    int parts = nsa__merge_weights(nsa__load_real(&x->lse_a, batch, row, head),
                                   nsa__load_real(&x->lse_b, batch, row, head), w, &lse);
    if (!parts) return;
    nsa_real dlse = dx->lse.data ? nsa__load_real(&dx->lse, batch, row, head) : 0;
    nsa__load(dout, dx->out.dtype, nsa__row(&dx->out, batch, row, head), dim_v);
    for (int i = 0; i < 2; i++)
        if (parts >> i & 1)
            nsa__load(out[i], part[i]->dtype, nsa__row(part[i], batch, row, head), dim_v);
        else
            memset(out[i], 0, (size_t)dim_v * sizeof **out);
    for (int c = 0; c < dim_v; c++) along += dout[c] * (out[0][c] - out[1][c]);
    for (int i = 0; i < 2; i++) {
        if (!(parts >> i & 1)) continue;
        nsa_real sum = w[i] * ((i ? -along : along) * w[!i] + dlse);
        if (dpart[i]->data)
            nsa__merge_add(sums ? sums + i : NULL, dpart[i], nsa__row(dpart[i], batch, row, head),
                           w[i], dout, dim_v);
        if (dlse_of[i]->data)
            nsa__merge_add(sums ? sums + 2 + i : NULL, dlse_of[i],
                           nsa__row(dlse_of[i], batch, row, head), 1, &sum, 1);
    }
}

/* All rows of one head, whose gradients may share rows, in order: no bit depends on threads. */
static void nsa__merge_head_task(const void *context, int64_t head, void *scratch) {
    const nsa__merge_job *job = (const nsa__merge_job *)context;
    const nsa_tensor *to[] = {&job->dx->out_a, &job->dx->out_b, &job->dx->lse_a, &job->dx->lse_b};
    double out[2][NSA__MAX_DIM], lse[2];
    nsa__merge_sum sums[] = {{NULL, out[0]}, {NULL, out[1]}, {NULL, lse}, {NULL, lse + 1}};
    (void)scratch;
    for (nsa__seq seq = nsa__seq_begin(job->d); seq.nth < job->d->batch;
         nsa__seq_next(job->d, &seq))
        for (int64_t t = 0; t < seq.count; t++)
            nsa__merge_backward_row(job, seq.batch, seq.row + t, (int)head, sums);
    for (int i = 0; i < 4; i++)
        nsa__merge_add(&sums[i], to[i], NULL, 0, NULL, i < 2 ? job->d->dim_v : 1);
}

/* Rows of x and out are read and written in one step, so a task needs no scratch. */
static void nsa__merge_token(const void *context, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__merge_job *job = (const nsa__merge_job *)context;
    (void)scratch;
    for (int h = 0; h < job->d->heads; h++) {
        if (job->dx)
            nsa__merge_backward_row(job, seq->batch, seq->row + t, h, NULL);
        else
            nsa__merge_forward_row(job, seq->batch, seq->row + t, h);
    }
}

/* Whether tokens, or sequences, share a row of a gradient: 0 no, 1 yes, 2 heads share it too. */
static int nsa__merge_sharers(const nsa_merge *dx, const nsa_desc *d) {
    const nsa_tensor *to[] = {&dx->out_a, &dx->out_b, &dx->lse_a, &dx->lse_b};
    const nsa__shape all = nsa__query_shape(d, 1, 1);
    int shared = 0, heads = 0;
    for (int i = 0; i < 4; i++) {
        if (!to[i]->data) continue;
        shared |= (!to[i]->token && all.rows > 1) || (!to[i]->batch && all.batch > 1);
        heads |= !to[i]->head && d->heads > 1;
    }
    return shared ? 1 + heads : 0;
}

static nsa_status nsa__merge_run(const nsa_merge *dx, const nsa_merge *x, const nsa_desc *d,
                                 int backward) {
    nsa__merge_job job;
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    nsa__checked c = nsa__checked_of(d, !backward, 0);
    c.sums = 1;
    NSA__CHECK(nsa__check_call(&c, nsa__merge_views, NSA__MERGE_VIEWS, dx, x));
    nsa__team team = {nsa__threads(d), NULL, 0};
    job.x = x;
    job.dx = dx;
    job.d = d;
    const int shared = backward ? nsa__merge_sharers(dx, d) : 0;
    if (shared > 1) team.threads = 1;
    if (shared)
        nsa__run(&team, d->heads, nsa__merge_head_task, &job);
    else
        nsa__run_tokens(&team, d, nsa__merge_token, &job);
    return NSA_OK;
}

NSA_API nsa_status nsa_merge_forward(const nsa_merge *x, const nsa_desc *d) {
    return nsa__merge_run(NULL, x, d, 0);
}
NSA_API nsa_status nsa_merge_backward(const nsa_merge *dx, const nsa_merge *x, const nsa_desc *d) {
    return nsa__merge_run(dx, x, d, 1);
}

/* ---- Selection by scores of keys -------------------------------------------------------------
   Twin: kernels/score_blocks.cuh. Not here: ranking (lists.h), p_cmp (select_scores.h).
   Tasks iterate over keys as attention does, tile by tile. nsa_select_blocks keeps all scores of
   cmp's keys and ends as cmp's forward does. nsa_score_blocks has scores that are no attention:
     of_key[i] = sum_h weights[t, h] act(q[t, h] . k[i]) for query t and the heads h of a group
   The score of block j is the maximum or the mean of of_key[i] over those i of the block that t
   sees. A tile may hold parts of several blocks, and a block may cover several tiles, so a block's
   score is pooled part by part, in the order of its keys. A task has some queries and all tiles. A
   sequence of few queries would be one such a head. There a task has all queries and some tiles,
   which it reads in place and which end where a block does. */

/* A task and its scratch. */
typedef struct nsa__scorer {
    const nsa_score *x; /* NULL: nsa_select_blocks */
    nsa__tile_iter iter;
    nsa_real *q;              /* of every row; for a pool not scaled */
    nsa_real *of_row;         /* of every row: its lse; for a pool its weight, or 1 */
    unsigned char *nonfinite; /* of every row: 1 if its q or that number is not finite */
    nsa__scoring scoring;     /* nsa_select_blocks */
    nsa_real *s;              /* of every row of a batch: q . k for the keys of the tile at hand */
    nsa_real *scores;         /* of every query and selection block, pooled so far */
    nsa__in_place in_place;
} nsa__scorer;

/* The context of the tasks: the head jobs, and the arguments that a head job does not have. */
typedef struct nsa__scorer_jobs {
    nsa__head_job keys[NSA__HEADS_NEAR]; /* first: nsa__job_of takes the context for it */
    const nsa_score *x;
    nsa_real *scores; /* in place: of the one job at hand, whose tasks share them */
    int64_t tiles;    /* in place: of a task */
} nsa__scorer_jobs;

/* Numbers from one query's scores to the next one's. */
static int64_t nsa__scorer_stride(const nsa_desc *d) {
    return nsa__ceil_div(nsa_slc_count(d, d->tokens), NSA__LANES) * NSA__LANES;
}

/* Queries of the job whose scores are shared: none if no sequence has few. */
static int64_t nsa__scorer_shared(const nsa__attend_plan *p) {
    const int few = p->cut.in_place_max, ragged = p->d->counts || p->d->begins;
    return ragged || p->d->count <= few ? nsa__min(p->d->count, few) : 0;
}

static void nsa__scorer_alloc(nsa__scorer *f, const nsa__attend_plan *p, nsa__arena *a) {
    int64_t rows = (int64_t)p->cut.task_queries * p->group;
    nsa__tile_iter_alloc(&f->iter, p, a, a);
    f->q = nsa__alloc_reals(a, (rows + NSA__LANES) * p->k.wide);
    f->of_row = nsa__alloc_reals(a, rows);
    f->nonfinite = (unsigned char *)nsa__alloc(a, rows, 1);
    if (!p->cut.in_place_max) { /* nsa_select_blocks, which has all keys packed */
        nsa__scoring_alloc(&f->scoring, p, a);
        return;
    }
    f->s = nsa__alloc_reals(a, rows * p->cut.tile);
    nsa__in_place_queries(&f->in_place, p, a);
    nsa__in_place_alloc(&f->in_place, p, a);
    if (p->d->count > p->cut.in_place_max)
        f->scores = nsa__alloc_reals(a, p->cut.task_queries * nsa__scorer_stride(p->d));
}

/* One head's part of n keys: of_key[i] += weight act(s[i]). */
NSA__COMPILED static void nsa__scorer_add_head(nsa_real *of_key, const nsa_real *s, int n,
                                               nsa_real weight, nsa_score_act act) {
    if (act == NSA_SCORE_RELU)
        for (int i = 0; i < n; i++) of_key[i] += weight * (s[i] > 0 ? s[i] : 0);
    else
        for (int i = 0; i < n; i++) of_key[i] += weight * s[i];
}

/* Pools keys begin .. end - 1 of a tile, which lie in one block, into the block's score.
   `nonfinite` has a bit for each non-finite key of the tile. One such key makes the score NaN. NaN
   is found by its order, because -ffast-math folds comparisons with it. */
static void nsa__scorer_pool(nsa_real *score, const nsa_real *of_key, int begin, int end,
                             uint64_t nonfinite, nsa_score_pool pool) {
    if (nonfinite & nsa__bits(begin, end)) *score = nsa__nan();
    if (nsa__score_order(*score) == 0) return;
    for (int i = begin; i < end; i++) {
        if (pool == NSA_POOL_MEAN)
            *score += of_key[i];
        else
            *score = of_key[i] > *score ? of_key[i] : *score;
    }
}

/* Keys of a block. */
static int nsa__scorer_block(const nsa_desc *d) {
    return d->slc_block / d->cmp_stride;
}

/* Query i of a batch: adds up the heads' scores of keys, then pools them block by block, up to the
   last key that the query sees. */
static void nsa__scorer_pool_keys(const nsa__scorer *f, const nsa__head_job *job,
                                  const nsa__batch *b, int i) {
    const nsa__attend_plan *p = job->plan;
    const int a = b->query[i], block = nsa__scorer_block(p->d), n = b->end - b->begin;
    const int end = (int)nsa__min(b->key + (int64_t)n, nsa__span_end(job, f->iter.first + a));
    nsa_real of_key[NSA__TILE] = {0};
    for (int g = 0; g < p->group; g++)
        nsa__scorer_add_head(of_key, f->s + (ptrdiff_t)(i * p->group + g) * p->cut.tile, n,
                             f->of_row[a * p->group + g], f->x->act);
    for (int key = b->key; key < end;) {
        int j = key / block, until = (int)nsa__min((j + (int64_t)1) * block, end);
        nsa__scorer_pool(f->scores + a * nsa__scorer_stride(p->d) + j, of_key, key - b->key,
                         until - b->key, f->in_place.nonfinite, f->x->pool);
        key = until;
    }
}

/* One product for all rows of a batch; then each of its queries pools what it sees. Of those that
   it does not see, nsa__scores reads no p_cmp. */
static void nsa__scorer_batch(nsa__scorer *f, const nsa__head_job *job, const nsa__batch *b) {
    const ptrdiff_t stride = f->x ? job->plan->cut.tile : (ptrdiff_t)f->scoring.stride;
    nsa_real *s = f->x ? f->s : f->scoring.s + b->row[0] * stride + b->key;
    nsa__batch_scores(&f->in_place, job, b, f->q, stride, s);
    for (int i = 0; f->x && i < b->queries; i++) nsa__scorer_pool_keys(f, job, b, i);
}

/* Ends one query: divides sums by the keys seen if the mean is asked for, stores the scores, ranks
   them. The last candidate may be cut by the query's own position, and have no key then. */
static void nsa__scorer_end(const nsa__scorer *f, const nsa__head_job *job, int a) {
    const nsa__attend_plan *p = job->plan;
    const nsa_desc *d = p->d;
    int query = f->iter.first + a, nonfinite = 0, block = nsa__scorer_block(d);
    int n = nsa__slc_candidates(d, job->seq.tokens, query);
    nsa_real *scores = f->scores + a * nsa__scorer_stride(d);
    for (int g = 0; g < p->group; g++) nonfinite |= f->nonfinite[a * p->group + g];
    if (nonfinite) memset(scores, 0, (size_t)n * sizeof *scores);
    for (int j = 0; j < n; j++) {
        int64_t keys = nsa__min(block, nsa__span_end(job, query) - (int64_t)j * block);
        if (keys <= 0)
            scores[j] = nsa__minus_infinity();
        else if (f->x->pool == NSA_POOL_MEAN)
            scores[j] /= (nsa_real)keys;
    }
    nsa__store_list(job, query, scores);
}

/* Loads the rows of q and their numbers, and marks rows that are not finite. */
static void nsa__scorer_begin(nsa__scorer *f, const nsa__head_job *job, int64_t task) {
    const nsa__attend_plan *p = job->plan;
    const nsa_tensor *of_row = f->x ? &f->x->weights : &p->x->lse;
    nsa__tile_iter_begin(&f->iter, job, task);
    int rows = f->iter.queries * p->group;
    memset(f->nonfinite, 0, (size_t)rows);
    nsa__load_queries(job, &f->iter, &p->x->q, &p->k, f->q, f->nonfinite);
    for (int r = 0; r < rows; r++)
        f->of_row[r] = of_row->data ? nsa__load_number(job, &f->iter, of_row, r, f->nonfinite) : 1;
}

/* Tiles of a task in place: about NSA__SCORED_TILES, or a thread's share, as whole blocks too. */
static int64_t nsa__scorer_task_tiles(const nsa__head_job *job, int threads) {
    const int tile = job->plan->cut.tile;
    const int64_t block = nsa__scorer_block(job->plan->d);
    const int64_t least = block / nsa__min(tile, block & -block);
    const int64_t share = nsa__max(1, nsa__ceil_div(job->tile_end, threads));
    return nsa__ceil_div(nsa__min(NSA__SCORED_TILES, share), least) * least;
}

/* All tiles up to the last query's of tiles `begin` .. end - 1. Pools start at 0 for a sum, at the
   lowest number for a maximum. */
static void nsa__scorer_tiles(nsa__scorer *f, const nsa__head_job *job, int64_t begin,
                              int64_t tiles) {
    const nsa__attend_plan *p = job->plan;
    const int64_t stride = nsa__scorer_stride(p->d), block = nsa__scorer_block(p->d);
    const int64_t from = begin * p->cut.tile / block;
    const int64_t to = nsa__min(stride, nsa__ceil_div((begin + tiles) * p->cut.tile, block));
    for (int a = 0; f->x && a < f->iter.queries; a++)
        for (int64_t j = from; j < to; j++)
            f->scores[a * stride + j] = f->x->pool == NSA_POOL_MEAN ? 0 : NSA__LOWEST;
    f->iter.tile = (int)begin - 1;
    f->iter.tile_end = (int)nsa__min(f->iter.tile_end, begin + tiles);
    while (nsa__tile_iter_next(&f->iter, job)) {
        const nsa__batch b = nsa__batch_at(&f->iter, job, 0);
        nsa__scorer_batch(f, job, &b);
    }
}

/* The scratch of a task, and where its scores are. */
static const nsa__head_job *nsa__scorer_make(nsa__scorer *f, const void *context, int64_t *nth,
                                             void *scratch) {
    const nsa__scorer_jobs *jobs = (const nsa__scorer_jobs *)context;
    const nsa__head_job *job = nsa__job_of(context, nth);
    const nsa__attend_plan *p = job->plan;
    nsa__arena a = {(char *)scratch, 0};
    nsa__scorer_alloc(f, p, &a);
    f->x = jobs->x;
    if (job->in_place) f->scores = jobs->scores;
    nsa__scorer_begin(f, job, job->in_place ? 0 : *nth);
    return job;
}

/* Some queries of a head, through all of their tiles, to their lists. */
static void nsa__scorer_task(const void *context, int64_t nth, void *scratch) {
    nsa__scorer f;
    const nsa__head_job *job = nsa__scorer_make(&f, context, &nth, scratch);
    nsa__scorer_tiles(&f, job, 0, f.iter.tile_end);
    for (int i = 0; f.x && i < f.iter.queries; i++) nsa__scorer_end(&f, job, i);
    if (!f.x) nsa__select(job, &f.iter, &f.scoring, f.of_row, f.nonfinite);
}

/* In place: some tiles of a head, for all queries. */
static void nsa__scorer_keys_task(const void *context, int64_t nth, void *scratch) {
    nsa__scorer f;
    const nsa__head_job *job = nsa__scorer_make(&f, context, &nth, scratch);
    const int64_t tiles = ((const nsa__scorer_jobs *)context)->tiles;
    nsa__rows_to_columns(&job->plan->k, f.iter.queries * job->plan->group, f.q, f.in_place.columns,
                         f.in_place.q_t);
    nsa__scorer_tiles(&f, job, nth * tiles, tiles);
}

/* In place: a query, when all tiles are done. */
static void nsa__scorer_end_task(const void *context, int64_t nth, void *scratch) {
    nsa__scorer f;
    const nsa__head_job *job = nsa__scorer_make(&f, context, &nth, scratch);
    nsa__scorer_end(&f, job, (int)nth);
}

/* Returns the scores that tasks share. */
static nsa_real *nsa__scorer_layout(nsa__head_job *jobs, const nsa__attend_plan *p,
                                    nsa__arena *shared) {
    for (int i = 0; i < p->cut.head_slots; i++) {
        jobs[i] = nsa__job_make(p);
        if (p->d->count > p->cut.in_place_max) nsa__alloc_keys(&jobs[i], shared);
    }
    return nsa__alloc_reals(shared, nsa__scorer_shared(p) * nsa__scorer_stride(p->d));
}

/* The plan of a branch whose spans are all keys that a query sees: tokens, or compressed blocks.
   x has q and k, and cmp's lse; NULL in a size query. */
static nsa__attend_plan nsa__scorer_plan(const nsa_attend *x, const nsa_desc *d, int pools) {
    const nsa__branch branch = pools && d->cmp_stride == 1 ? NSA__DENSE : NSA__CMP;
    nsa__attend_plan p = nsa__attend_plan_of(x, NULL, d, branch, 1, nsa__heads_near(d));
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__scorer f;
    nsa__arena shared = {NULL, 0}, scratch = {NULL, 0};
    if (pools) p.k.scale = 1, p.cut.in_place_max = p.cut.batch_queries;
    nsa__scorer_layout(jobs, &p, &shared);
    nsa__scorer_alloc(&f, &p, &scratch);
    p.shared = shared.used;
    p.scratch = nsa__pack_scratch(&p, scratch.used);
    return p;
}

/* In place one head after another, because the threads share its keys. */
static void nsa__scorer_heads(nsa__head_job *jobs, const nsa__team *team) {
    const nsa__attend_plan *p = jobs->plan;
    nsa__scorer_jobs one = *(const nsa__scorer_jobs *)(const void *)jobs;
    nsa__team fewer = *team;
    if (!jobs->in_place) {
        nsa__run(team, nsa__query_tasks(jobs), nsa__scorer_task, jobs);
        return;
    }
    const int64_t queries = jobs->seq.count;
    fewer.threads = nsa__threads_for(team->threads, queries * p->group * p->k.wide * jobs->keys);
    for (int i = 0; i < jobs->heads; i++) {
        one.keys[0] = jobs[i];
        one.keys[0].heads = 1;
        one.tiles = nsa__scorer_task_tiles(jobs, fewer.threads);
        nsa__run(&fewer, nsa__ceil_div(jobs->tile_end, one.tiles), nsa__scorer_keys_task, &one);
        nsa__run(&fewer, queries, nsa__scorer_end_task, &one);
    }
}

static size_t nsa__scorer_bytes(const nsa_desc *d, int pools) {
    if (nsa_desc_check(d) != NSA_OK) return 0;
    const nsa__attend_plan p = nsa__scorer_plan(NULL, d, pools);
    return nsa__attend_plan_bytes(&p, nsa__threads(d));
}

/* Lists of `to` from its q and k, by x or, if that is NULL, as cmp's forward makes them. */
static nsa_status nsa__scorer_run(const nsa_select *to, const nsa_score *x, const nsa_desc *d,
                                  void *workspace, size_t bytes) {
    nsa__scorer_jobs jobs;
    nsa__team team;
    nsa_attend attend;
    nsa__arena shared = nsa__arena_at(workspace);
    memset(&attend, 0, sizeof attend);
    attend.q = to->q;
    attend.k = to->k;
    attend.lse = to->lse;
    nsa__attend_plan p = nsa__scorer_plan(&attend, d, x != NULL);
    p.select = to;
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, p.shared, p.scratch));
    jobs.x = x;
    jobs.scores = nsa__scorer_layout(jobs.keys, &p, &shared);
    nsa__each_heads(jobs.keys, &team, 0, nsa__scorer_heads);
    return NSA_OK;
}

NSA_API size_t nsa_score_blocks_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    return nsa__scorer_bytes(nsa__rank_desc(d, &own), 1);
}

NSA_API nsa_status nsa_score_blocks(const nsa_score *x, const nsa_desc *d, void *workspace,
                                    size_t bytes) {
    nsa_desc own;
    nsa_select to;
    NSA__CHECK(nsa__score_options(x, NSA__USES_SLC | NSA__USES_FORCED, &d, &own));
    const nsa__checked c = nsa__checked_of(d, 1, x->stride > 1);
    NSA__CHECK(nsa__check_call(&c, nsa__score_views, NSA__SCORE_VIEWS, NULL, x));
    memset(&to, 0, sizeof to);
    to.q = x->q;
    to.k = x->k;
    to.scores = x->scores;
    to.blocks = x->blocks;
    return nsa__scorer_run(&to, x, d, workspace, bytes);
}

NSA_API size_t nsa_select_blocks_workspace_size(const nsa_desc *d) {
    return nsa__scorer_bytes(d, 0);
}

NSA_API nsa_status nsa_select_blocks(const nsa_select *x, const nsa_desc *d, void *workspace,
                                     size_t bytes) {
    const nsa__checked c = nsa__checked_of(d, 1, 1);
    NSA__CHECK(nsa__check_call(&c, nsa__select_views, NSA__SELECT_VIEWS, NULL, x));
    return nsa__scorer_run(x, NULL, d, workspace, bytes);
}

/* ---- Scores of given lists, and their gradient -----------------------------------------------
   Twin: kernels/score_lists.cuh. Not here: scores of all blocks (score.h).
   of_key[i] = sum_g w[g] act(s[g][i]), s[g][i] = q[g] . k[i], for the heads g of a list; a block's
   score is the maximum or the mean over those of its keys that t sees. Tasks of queries own rows of
   dq and dweights, tasks of keys rows of dk. Both compute s anew: nothing as large as the lists is
   kept. */

enum { NSA__LISTED_QUERIES = 8, NSA__LISTED_KEYS = 64 }; /* of a task; keys in whole blocks */

/* A call; in a task its scratch, the query and the block at hand. */
typedef struct nsa__listed {
    const nsa_score *x, *dx; /* dx NULL: forward */
    const nsa_desc *d;
    nsa__operand row; /* of q and k, as numbers */
    nsa__seq seq;
    int group, wide, block, keys, width; /* heads of a list; numbers of a row; keys of a block, of a
                                            task; entries */
    int64_t query_tasks;
    nsa_real *q, *weights, *dq, *dweights, *k, *s, *of_key, *dk;
    nsa_real *scores;               /* of the list, or their gradients */
    nsa_real score;                 /* of the block */
    int bad_query, bad, seen, best; /* something is not finite; keys seen, the first of the best */
} nsa__listed;

static void nsa__listed_alloc(nsa__listed *f, nsa__arena *a) {
    const int64_t group = f->group, wide = f->wide;
    nsa_real **const parts[] = {&f->q,  &f->dq, &f->weights, &f->dweights, &f->k,
                                &f->dk, &f->s,  &f->of_key,  &f->scores};
    /* A call of larger blocks has the size of this one: these may fill the task better. */
    const int64_t keys = nsa__max(f->keys, NSA__LISTED_KEYS);
    const int64_t sizes[] = {group * wide, group * wide,     group,    group,   f->block * wide,
                             keys * wide,  group * f->block, f->block, f->width};
    for (int i = 0; i < 9; i++) *parts[i] = nsa__alloc_reals(a, sizes[i]);
}

/* Keys are tokens, or rows of several. */
static void *nsa__listed_key(const nsa__listed *f, const nsa_tensor *k, int64_t key, int kv_head) {
    return nsa__key_row(f->d->cmp_stride > 1 ? &f->seq.cmp : &f->seq.keys, k, key, kv_head);
}

static void nsa__listed_query(nsa__listed *f, int64_t row, int list) {
    const nsa_tensor *q = &f->x->q, *weights = &f->x->weights;
    memset(f->dq, 0, (size_t)f->group * (size_t)f->wide * sizeof *f->dq);
    memset(f->dweights, 0, (size_t)f->group * sizeof *f->dweights);
    f->bad_query = 0;
    for (int g = 0; g < f->group; g++) {
        const int head = list * f->group + g;
        f->bad_query |= !nsa__copy_operand(&f->row, f->q + (ptrdiff_t)g * f->wide, q,
                                           nsa__row(q, f->seq.batch, row, head));
        f->weights[g] = 1;
        if (weights->data)
            nsa__load(&f->weights[g], weights->dtype, nsa__row(weights, f->seq.batch, row, head),
                      1);
        if (nsa__is_finite((double)f->weights[g])) continue;
        f->weights[g] = 0;
        f->bad_query = 1;
    }
}

/* Scores block j for the query at hand; 0 if t sees none of its keys. */
static int nsa__listed_block(nsa__listed *f, int64_t t, int kv_head, int64_t j) {
    const int visible = nsa__cmp_visible(f->d, f->seq.tokens, f->seq.first + (int)t);
    const int n = f->seen = (int)nsa__max(0, nsa__min(f->block, visible - j * f->block));
    const int mean = f->x->pool == NSA_POOL_MEAN;
    if (n == 0) return 0;
    f->bad = f->bad_query;
    for (int i = 0; i < n; i++)
        f->bad |= !nsa__copy_operand(&f->row, f->k + (ptrdiff_t)i * f->wide, &f->x->k,
                                     nsa__listed_key(f, &f->x->k, j * f->block + i, kv_head));
    memset(f->of_key, 0, (size_t)n * sizeof *f->of_key);
    for (int g = 0; g < f->group; g++) {
        nsa_real *s = f->s + (ptrdiff_t)g * f->block;
        for (int i = 0; i < n; i++)
            s[i] = nsa__dot(f->q + (ptrdiff_t)g * f->wide, f->k + (ptrdiff_t)i * f->wide, f->wide);
        nsa__scorer_add_head(f->of_key, s, n, f->weights[g], f->x->act);
    }
    f->score = mean ? 0 : NSA__LOWEST;
    nsa__scorer_pool(&f->score, f->of_key, 0, n, 0, f->x->pool);
    for (f->best = 0; f->best < n - 1 && f->of_key[f->best] < f->score;) f->best++;
    f->score = f->bad ? nsa__nan() : mean ? f->score / (nsa_real)n : f->score;
    return 1;
}

/* score = mean over i, or the one of the best i, of sum_g w_g act(q_g . k_i). With s = q_g . k_i:
     dw_g += dscore act(s) / n,   dq_g += dscore w_g act'(s) k_i / n,   dk_i += the same of q_g
   A value that is not finite reaches all that the block read. Adds to dk, or to dq and dw. */
NSA__COMPILED static void nsa__listed_gradient(const nsa__listed *f, nsa_real dscore,
                                               nsa_real *dk) {
    const int bad = f->bad || !nsa__is_finite((double)dscore), mean = f->x->pool == NSA_POOL_MEAN;
    const int begin = bad || mean ? 0 : f->best, end = bad || mean ? f->seen : f->best + 1;
    const nsa_real each = bad ? nsa__nan() : mean ? dscore / (nsa_real)f->seen : dscore;
    for (int g = 0; g < f->group; g++)
        for (int i = begin; i < end; i++) {
            const nsa_real s = f->s[(ptrdiff_t)g * f->block + i], ds = each * f->weights[g];
            nsa_real *q = f->q + (ptrdiff_t)g * f->wide, *k = f->k + (ptrdiff_t)i * f->wide;
            nsa_real *sum = dk ? dk + (ptrdiff_t)i * f->wide : f->dq + (ptrdiff_t)g * f->wide;
            if (!bad && f->x->act == NSA_SCORE_RELU && !(s > 0)) continue;
            f->dweights[g] += each * s;
            for (int c = 0; c < f->wide; c++) sum[c] += ds * (dk ? q : k)[c];
        }
}

/* Blocks begin .. end - 1 of a list: their scores, or what their gradients add. */
static void nsa__listed_list(nsa__listed *f, int64_t t, int head, int begin, int end,
                             nsa_real *dk) {
    const int64_t batch = f->seq.batch, row = f->seq.row + t;
    const int32_t *list = (const int32_t *)nsa__row(&f->x->blocks, batch, row, head);
    const nsa_tensor *scores = f->dx ? &f->dx->scores : &f->x->scores;
    const int kv_head = head / (nsa__list_heads(f->d) / f->d->kv_heads);
    int i = nsa__first_listed(list, f->width, begin);
    if (dk && (i == f->width || (uint32_t)list[i] >= (uint32_t)end)) return;
    nsa__listed_query(f, row, head);
    for (int n = 0; n < f->width; n++) f->scores[n] = nsa__minus_infinity();
    if (f->dx) nsa__load(f->scores, scores->dtype, nsa__row(scores, batch, row, head), f->width);
    for (; i < f->width && (uint32_t)list[i] < (uint32_t)end; i++) {
        if (!nsa__listed_block(f, t, kv_head, list[i])) continue;
        if (f->dx)
            nsa__listed_gradient(f, f->scores[i],
                                 dk ? dk + (ptrdiff_t)(list[i] - begin) * f->block * f->wide
                                    : NULL);
        else
            f->scores[i] = f->score;
    }
    if (!f->dx) nsa__store(scores->dtype, nsa__row(scores, batch, row, head), f->scores, f->width);
}

/* Some queries, or behind all of them the keys of some blocks, of one kv head. */
static void nsa__listed_task(const void *context, int64_t nth, void *scratch) {
    nsa__listed f = *(const nsa__listed *)context;
    const nsa_score *dx = f.dx;
    const int kv_heads = f.d->kv_heads, lists = nsa__list_heads(f.d), of_head = lists / kv_heads;
    const int64_t task = nth - f.query_tasks, from = nth * NSA__LISTED_QUERIES;
    const int64_t key = task / kv_heads * f.keys, block = key / f.block;
    const int kv_head = (int)(task % kv_heads), blocks = f.keys / f.block;
    nsa__arena a = {(char *)scratch, 0};
    nsa__listed_alloc(&f, &a);
    for (int64_t t = from; t < nsa__min(from + NSA__LISTED_QUERIES, task < 0 ? f.seq.count : 0);
         t++)
        for (int list = 0; list < lists; list++) {
            nsa__listed_list(&f, t, list, 0, INT_MAX, NULL);
            for (int g = 0; dx && g < f.group; g++) {
                const int64_t row = f.seq.row + t, head = (int64_t)list * f.group + g;
                if (dx->q.data)
                    nsa__add(dx->q.dtype, nsa__row(&dx->q, f.seq.batch, row, head), 1,
                             f.dq + (ptrdiff_t)g * f.wide, f.d->dim);
                if (dx->weights.data)
                    nsa__add(dx->weights.dtype, nsa__row(&dx->weights, f.seq.batch, row, head), 1,
                             &f.dweights[g], 1);
            }
        }
    if (task < 0) return;
    memset(f.dk, 0, (size_t)f.keys * (size_t)f.wide * sizeof *f.dk);
    for (int64_t t = 0; t < f.seq.count; t++)
        for (int list = kv_head * of_head; list < (kv_head + 1) * of_head; list++)
            nsa__listed_list(&f, t, list, (int)block, (int)block + blocks, f.dk);
    for (int i = 0; i < nsa__min(f.keys, nsa_cmp_count(f.d, f.seq.tokens) - key); i++)
        nsa__add(dx->k.dtype, nsa__listed_key(&f, &dx->k, key + i, kv_head), 1,
                 f.dk + (ptrdiff_t)i * f.wide, f.d->dim);
}

/* The call for a descriptor that is right. */
static nsa__listed nsa__listed_of(const nsa_score *dx, const nsa_score *x, const nsa_desc *d) {
    nsa__listed f;
    memset(&f, 0, sizeof f);
    f.x = x, f.dx = dx, f.d = d;
    f.group = d->heads / nsa__list_heads(d);
    f.row = nsa__operand_of(nsa__tiles_of(d->isa), d->dim, 1);
    f.wide = f.row.wide;
    f.block = (int)nsa__min(nsa__scorer_block(d), nsa__max(1, nsa_cmp_count(d, d->tokens)));
    f.keys = (int)nsa__max(1, NSA__LISTED_KEYS / f.block) * f.block;
    f.width = nsa_block_list_width(d);
    return f;
}

/* Scratch of a thread. */
static size_t nsa__listed_scratch(nsa__listed f) {
    nsa__arena scratch = {NULL, 0};
    nsa__listed_alloc(&f, &scratch);
    return scratch.used;
}

static nsa_status nsa__listed_run(const nsa_score *dx, const nsa_score *x, const nsa_desc *d,
                                  int backward, void *workspace, size_t bytes) {
    nsa__team team;
    nsa_desc own;
    NSA__CHECK(nsa__score_options(x, NSA__USES_SLC, &d, &own));
    const nsa__checked c = nsa__checked_of(d, !backward, x->stride > 1);
    NSA__CHECK(nsa__check_call(&c, nsa__listed_views, NSA__SCORE_VIEWS, dx, x));
    NSA__CHECK(nsa__check_lists(&x->blocks, d, NULL));
    nsa__listed f = nsa__listed_of(dx, x, d);
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, 0, nsa__listed_scratch(f)));
    for (f.seq = nsa__seq_begin(d); f.seq.nth < d->batch; nsa__seq_next(d, &f.seq)) {
        const int64_t keys = nsa_cmp_count(d, f.seq.tokens), queries = f.seq.count;
        const int of_keys = dx && dx->k.data, of_queries = !dx || dx->q.data || dx->weights.data;
        f.query_tasks = of_queries ? nsa__ceil_div(queries, NSA__LISTED_QUERIES) : 0;
        nsa__run(&team, f.query_tasks + (of_keys ? nsa__ceil_div(keys, f.keys) * d->kv_heads : 0),
                 nsa__listed_task, &f);
    }
    return NSA_OK;
}

/* Sized for keys of one token, which need most. */
NSA_API size_t nsa_score_blocks_forward_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    if (nsa_desc_check(d) != NSA_OK) return 0;
    return nsa__workspace_bytes(d, 0, nsa__listed_scratch(nsa__listed_of(NULL, NULL, d)));
}
NSA_API nsa_status nsa_score_blocks_forward(const nsa_score *x, const nsa_desc *d, void *workspace,
                                            size_t bytes) {
    return nsa__listed_run(NULL, x, d, 0, workspace, bytes);
}
NSA_API size_t nsa_score_blocks_backward_workspace_size(const nsa_desc *d) {
    return d && d->pages ? 0 : nsa_score_blocks_forward_workspace_size(d);
}
NSA_API nsa_status nsa_score_blocks_backward(const nsa_score *dx, const nsa_score *x,
                                             const nsa_desc *d, void *workspace, size_t bytes) {
    return nsa__listed_run(dx, x, d, 1, workspace, bytes);
}

/* ---- The whole -------------------------------------------------------------------------------
   Twin: kernels/attention.cuh. Not here: its primitives.
   Forward runs phi of k and v, then cmp with selection, slc, win, and the gate. Each part may
   overwrite the workspace of the one before, so the largest need serves all.
   Backward runs the branches, the gate's logits from what they leave, then phi of k and v. */

static nsa_status nsa__attention_check_sizes(const nsa_attention *x, const nsa_desc *d) {
    NSA__CHECK(nsa_desc_check(d));
    return nsa__chain_check_sizes(x, d, nsa__compress_check_sizes);
}

/* Blocks are an output of forward and an input of backward, so lists are checked only there. */
static nsa_status nsa__attention_check(const nsa_attention *x, const nsa_desc *d, int forward) {
    const nsa__checked c = nsa__checked_of(d, forward, 0);
    NSA__CHECK(nsa__check_phi(&c, &x->k_cmp, NSA__TO_K_CMP));
    NSA__CHECK(nsa__check_phi(&c, &x->v_cmp, NSA__TO_V_CMP));
    NSA__CHECK(nsa__check_views(&c, nsa__attention_views, NSA__ATTENTION_VIEWS, x));
    return forward ? NSA_OK : nsa__check_lists(&x->blocks, d, NULL);
}

/* One call of the chain: its views, and the plans of the branches, which point to the views. */
typedef struct nsa__chain_plan {
    nsa__chain views;
    nsa__attend_plan branch[3];
} nsa__chain_plan;

/* p must not be moved afterwards, because the plans point to its views. `steps`: NULL, or of every
   branch. */
static void nsa__chain_plan_make(nsa__chain_plan *p, const nsa_attention *x, const nsa_desc *d,
                                 const nsa__step *steps) {
    const nsa__chain *c = &p->views;
    const nsa_attend *const views[] = {&c->cmp, &c->slc, &c->win};
    p->views = nsa__chain_of(x);
    for (int i = NSA__CMP; i <= NSA__WIN; i++)
        p->branch[i] =
            nsa__forward_plan(views[i], d, (nsa__branch)i, i == NSA__CMP ? &c->select : NULL,
                              steps ? steps + i : NULL);
}

/* Bytes of phi of k and of v, one after the other. */
static size_t nsa__phi_bytes(const nsa_attention *x, const nsa_desc *d, int backward, int threads) {
    return nsa__larger(nsa__compress_bytes(&x->k_cmp, d, backward, threads),
                       nsa__compress_bytes(&x->v_cmp, d, backward, threads));
}

/* The workspace of the parts one after another. */
static size_t nsa__chain_plan_bytes(const nsa__chain_plan *p, const nsa_attention *x,
                                    const nsa_desc *d, int threads) {
    size_t most = nsa__phi_bytes(x, d, 0, threads), room;
    const size_t scratch = nsa__split_scratch(p->branch, 3, &room);
    for (int i = 0; i < 3; i++)
        most = nsa__larger(most, nsa__attend_plan_bytes(&p->branch[i], threads));
    if (d->count > p->branch->cut.in_place_max || threads == 1) return most;
    return nsa__larger(most, nsa__bytes_for(p->branch->shared, threads, scratch));
}

/* The parts one after another, but for branches that are split; `ring`: of phi's rows. */
static nsa_status nsa__chain_run(const nsa__chain_plan *p, const nsa_attention *x,
                                 const nsa_desc *d, int ring, void *workspace, size_t bytes) {
    NSA__CHECK(nsa__compress_go(NULL, &x->k_cmp, d, ring, workspace, bytes));
    NSA__CHECK(nsa__compress_go(NULL, &x->v_cmp, d, ring, workspace, bytes));
    if (!nsa__forward_split(p->branch, 3, workspace, bytes))
        for (int i = 0; i < 3; i++) NSA__CHECK(nsa__forward_run(&p->branch[i], workspace, bytes));
    nsa__gate_run(nsa__gate_job_make(NULL, &p->views.gate, d));
    return NSA_OK;
}

NSA_API size_t nsa_attention_forward_workspace_size(const nsa_attention *x, const nsa_desc *d) {
    nsa__chain_plan p;
    if (nsa__attention_check_sizes(x, d) != NSA_OK) return 0;
    nsa__chain_plan_make(&p, x, d, NULL);
    return nsa__chain_plan_bytes(&p, x, d, nsa__threads(d));
}

NSA_API nsa_status nsa_attention_forward(const nsa_attention *x, const nsa_desc *d, void *workspace,
                                         size_t bytes) {
    nsa__chain_plan p;
    NSA__CHECK(nsa__attention_check_sizes(x, d));
    NSA__CHECK(nsa__attention_check(x, d, 1));
    nsa__chain_plan_make(&p, x, d, NULL);
    /* The largest of the parts' least needs, so that no part fails after another has written. */
    if (!workspace || bytes < nsa__chain_plan_bytes(&p, x, d, nsa__least_threads(d)))
        return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    return nsa__chain_run(&p, x, d, 0, workspace, bytes);
}

/* One of the gradients NSA__SUM_K_CMP to NSA__SUM_V_WIN. */
typedef struct nsa__sum {
    nsa_tensor to;    /* the caller's view */
    nsa_tensor *view; /* what the primitives add to: a copy of *to, or reals in workspace */
    int owner; /* 1: the view's memory belongs to this sum, which adds it to *to at the end */
} nsa__sum;

/* The workspace of backward: | sums | delta_out | dk_cmp | dv_cmp | the primitives' own |. The
   branches run for a few kv heads of one sequence at a time, so that the sum of dq and delta_out
   need memory for those heads alone. It must not be moved, because sums point to views of dx. */
typedef struct nsa__chain_gradient {
    nsa_attention dx; /* the gradients as the primitives see them: sums in place of the caller's
                         views, out for every branch; k_cmp.out and v_cmp.out are dk_cmp and dv_cmp,
                         to which cmp adds, and which phi's backward reads */
    nsa__sum sum[NSA__SUMS];
    nsa_tensor dq;        /* of these heads, the sum of dq; no data: it goes to dx.q as it is */
    nsa_tensor delta_out; /* of every row of them: dout . out by branch, for the gate */
    void *rest;           /* the primitives' workspace */
    size_t rest_bytes;
    size_t own;   /* bytes before it */
    int kv_heads; /* of a run */
} nsa__chain_gradient;

/* Rows of a sum in workspace, and the caller's rows that they are added to. They become zeros, for
   the next heads. */
typedef struct nsa__flush {
    nsa_tensor from, to;
    int64_t rows;
    int heads, width, clear; /* clear: they become zeros alone */
} nsa__flush;

enum { NSA__FLUSH_ROWS = 64 }; /* of a task */

static void nsa__flush_task(const void *context, int64_t nth, void *scratch) {
    const nsa__flush *f = (const nsa__flush *)context;
    int64_t end = nsa__min(f->rows, (nth + 1) * NSA__FLUSH_ROWS);
    (void)scratch;
    for (int64_t t = nth * NSA__FLUSH_ROWS; t < end; t++)
        for (int h = 0; h < f->heads; h++) {
            nsa_real *row = (nsa_real *)nsa__row(&f->from, 0, t, h);
            if (!f->clear) nsa__add(f->to.dtype, nsa__row(&f->to, 0, t, h), 1, row, f->width);
            memset(row, 0, (size_t)f->width * sizeof *row);
        }
}

static void nsa__flush_run(const nsa__flush *f, const nsa_desc *d) {
    const int64_t moves = 32; /* multiply-adds in the time in which a number is moved, about */
    nsa__team team = {nsa__threads(d), NULL, 0};
    team.threads = nsa__threads_for(team.threads, moves * f->rows * f->heads * f->width);
    nsa__run(&team, nsa__ceil_div(f->rows, NSA__FLUSH_ROWS), nsa__flush_task, f);
}

/* Rows of zeros, side by side. */
static nsa_tensor nsa__alloc_sums(nsa__arena *a, nsa__shape shape, const nsa_desc *d) {
    nsa_tensor x;
    x.dtype = NSA_REAL_DTYPE;
    x.head = shape.width;
    x.token = shape.width * shape.heads;
    x.batch = x.token * shape.rows;
    x.data = nsa__alloc(a, x.batch * shape.batch, sizeof(nsa_real));
    const nsa__flush zeros = {x, x, shape.batch * shape.rows, 1, (int)x.token, 1};
    if (a->base) nsa__flush_run(&zeros, d);
    return x;
}

/* kv heads of one run of the branches: about 1024 numbers of q a token, but no more heads than
   attention has jobs at once. */
static int nsa__chain_heads(const nsa_desc *d) {
    int64_t row = (int64_t)d->dim * (d->heads / d->kv_heads);
    return (int)nsa__min(nsa__heads_near(d), nsa__max(1, 1024 / row));
}

/* The view x from a row and head on, which become row 0 and head 0. */
static nsa_tensor nsa__view_at(nsa_tensor x, int64_t batch, int64_t row, int64_t head) {
    if (x.data) x.data = nsa__row(&x, batch, row, head);
    return x;
}

/* Some kv heads of one sequence, as if they were a call of their own: the geometry. */
static nsa_desc nsa__slice_desc(const nsa_desc *d, int tokens, int count, int kv_heads) {
    nsa_desc slice = *d;
    slice.batch = 1;
    slice.begins = NULL;
    slice.tokens = tokens;
    slice.count = count;
    slice.kv_heads = kv_heads;
    slice.heads = d->heads / d->kv_heads * kv_heads;
    slice.gate_heads = d->gate_heads == d->heads ? slice.heads : kv_heads;
    slice.list_heads = nsa__list_heads(d) / d->kv_heads * kv_heads;
    return slice;
}

/* The same: the branches' views and the gates, from the sequence and its kv head `head` on. */
static nsa_attention nsa__slice_views(const nsa_attention *x, const nsa_desc *d,
                                      const nsa__seq *seq, int head) {
    const int heads[] = {d->heads, d->gate_heads, nsa__list_heads(d), d->kv_heads, d->kv_heads};
    nsa_attention y = *x;
    for (int i = 0; i < NSA__ATTENTION_VIEWS; i++) {
        const nsa__view *v = &nsa__attention_views[i];
        const nsa__key_layout *keys = v->rows == NSA__OF_BLOCKS ? &seq->cmp : &seq->keys;
        const int of_keys = v->rows >= NSA__OF_KEYS;
        nsa_tensor *view = (nsa_tensor *)(void *)((char *)&y + v->offset);
        if (v->use & NSA__FORWARD) continue; /* out: backward's may be anything */
        *view =
            nsa__view_at(*view, of_keys ? keys->batch : seq->batch, of_keys ? keys->row : seq->row,
                         (int64_t)head * (heads[v->rows] / d->kv_heads));
    }
    return y;
}

/* Finds out which gradients need a sum in workspace, and which of them share one. A gradient of the
   real dtype needs none: the primitives add to the caller's view. */
static void nsa__chain_gradient_layout(nsa__chain_gradient *g, const nsa_attention *dx,
                                       const nsa_desc *d, nsa__arena *a) {
    nsa_attention own = *dx;
    nsa_tensor *to[NSA__SUMS], *view[NSA__SUMS];
    nsa__sum_views(&own, to);
    nsa__sum_views(&g->dx, view);
    g->kv_heads = nsa__chain_heads(d);
    const int heads = d->heads / d->kv_heads * g->kv_heads;
    const nsa__shape of_q = {1, d->count, heads, d->dim}, of_delta = {1, d->count, heads, 3};
    g->dx = *dx;
    g->dx.out_cmp = g->dx.out_slc = g->dx.out_win = dx->out;
    g->dx.blocks = g->dx.lse_cmp = g->dx.lse_slc = g->dx.lse_win = nsa__no_view;
    g->dq = nsa__no_view;
    if (dx->q.data && dx->q.dtype != NSA_REAL_DTYPE) g->dq = nsa__alloc_sums(a, of_q, d);
    for (int i = NSA__SUM_K_CMP; i < NSA__SUMS; i++) {
        nsa__sum *sum = &g->sum[i];
        sum->to = *to[i];
        sum->view = view[i];
        const int needed = to[i]->data && to[i]->dtype != NSA_REAL_DTYPE;
        const int same = needed ? nsa__shared_sum(to, d, i) : i;
        sum->owner = needed && same == i;
        if (sum->owner)
            *view[i] = nsa__alloc_sums(a, nsa__key_shape(d, 0, nsa__sum_width(d, i)), d);
        if (same < i) *view[i] = *view[same];
    }
    if (dx->gates.data) g->delta_out = nsa__alloc_sums(a, of_delta, d);
    g->dx.k_cmp.out = nsa__alloc_sums(a, nsa__key_shape(d, 1, d->dim), d);
    g->dx.v_cmp.out = nsa__alloc_sums(a, nsa__key_shape(d, 1, d->dim_v), d);
    g->own = a->used;
    g->rest = a->base ? a->base + a->used : NULL;
}

/* The bytes that the call needs. Of a sequence the first run of the branches needs the most,
   because later runs have as many heads or fewer. */
static size_t nsa__chain_backward_bytes(const nsa__chain_gradient *g, const nsa_attention *x,
                                        const nsa_desc *d, int threads) {
    size_t most = nsa__phi_bytes(x, d, 1, threads);
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
        const nsa_desc slice = nsa__slice_desc(d, seq.tokens, seq.count, g->kv_heads);
        for (int i = NSA__CMP; i <= NSA__WIN; i++) {
            const nsa__attend_plan p = nsa__backward_plan(NULL, NULL, &slice, (nsa__branch)i, d);
            most = nsa__larger(most, nsa__attend_plan_bytes(&p, threads));
        }
        if (!d->begins) break; /* all are alike */
    }
    return nsa__bytes_for(g->own, 1, most);
}

NSA_API size_t nsa_attention_backward_workspace_size(const nsa_attention *dx,
                                                     const nsa_attention *x, const nsa_desc *d) {
    nsa__chain_gradient g;
    nsa__arena a = {NULL, 0};
    if (nsa__attention_check_sizes(x, d) != NSA_OK || !dx || nsa__check_backward(d, 1) != NSA_OK)
        return 0;
    nsa__chain_gradient_layout(&g, dx, d, &a);
    return nsa__chain_backward_bytes(&g, x, d, nsa__threads(d));
}

static nsa_status nsa__attention_gradient_check(const nsa_attention *dx, const nsa_attention *x,
                                                const nsa_desc *d) {
    const nsa__checked c = nsa__checked_of(d, 0, 0);
    NSA__CHECK(nsa__check_gradients(&c, nsa__attention_views, NSA__ATTENTION_VIEWS, dx, x));
    NSA__CHECK(nsa__check_phi_gradient(&nsa__cpu, &dx->k_cmp, &x->k_cmp, d, NSA__TO_K_CMP));
    return nsa__check_phi_gradient(&nsa__cpu, &dx->v_cmp, &x->v_cmp, d, NSA__TO_V_CMP);
}

/* The three branches and the gate of some heads of a sequence. Each branch adds to their dq, and
   the sum is added to dx.q with one rounding. dk and dv go to the sums of all heads. */
static nsa_status nsa__chain_heads_backward(const nsa__chain_gradient *g, const nsa_attention *x,
                                            const nsa_desc *d, const nsa__seq *seq, int head,
                                            int kv_heads) {
    const nsa_desc slice = nsa__slice_desc(d, seq->tokens, seq->count, kv_heads);
    const nsa_attention part = nsa__slice_views(x, d, seq, head);
    nsa_attention dpart = nsa__slice_views(&g->dx, d, seq, head);
    const nsa__flush dq = {g->dq, dpart.q, slice.count, slice.heads, d->dim, 0};
    if (g->dq.data) dpart.q = g->dq;
    const nsa__chain c = nsa__chain_of(&part), dc = nsa__chain_of(&dpart);
    const nsa_attend *views[] = {&c.cmp, &c.slc, &c.win}, *dviews[] = {&dc.cmp, &dc.slc, &dc.win};
    nsa__gate_job gate = nsa__gate_job_make(&dc.gate, &c.gate, &slice);
    gate.delta_out = dpart.gates.data ? &g->delta_out : NULL;
    for (int i = NSA__CMP; i <= NSA__WIN; i++) {
        nsa__attend_plan p = nsa__backward_plan(dviews[i], views[i], &slice, (nsa__branch)i, d);
        p.gate = &gate;
        NSA__CHECK(nsa__backward_run(&p, g->rest, g->rest_bytes));
    }
    if (gate.delta_out) nsa__gate_run(gate);
    if (g->dq.data) nsa__flush_run(&dq, d);
    return NSA_OK;
}

/* Adds the sums of keys and values to the caller's views, with one rounding. */
static void nsa__chain_flush(const nsa__chain_gradient *g, const nsa_desc *d) {
    for (int i = NSA__SUM_K_CMP; i < NSA__SUMS; i++) {
        const nsa__sum *sum = &g->sum[i];
        if (!sum->owner) continue;
        for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
            const nsa__flush f = {nsa__view_at(*sum->view, seq.keys.batch, seq.keys.row, 0),
                                  nsa__view_at(sum->to, seq.keys.batch, seq.keys.row, 0),
                                  seq.tokens,
                                  d->kv_heads,
                                  nsa__sum_width(d, i),
                                  0};
            nsa__flush_run(&f, d);
        }
    }
}

/* The branches with the gate's logits, then phi of k and v. phi comes after them because its dout,
   dk_cmp and dv_cmp, sums over all queries. The sums of keys and values reach the caller's views
   last. */
static nsa_status nsa__attention_backward_run(nsa__chain_gradient *g, const nsa_attention *x,
                                              const nsa_desc *d) {
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int head = 0; seq.count && head < d->kv_heads; head += g->kv_heads) {
            int heads = (int)nsa__min(g->kv_heads, d->kv_heads - (int64_t)head);
            NSA__CHECK(nsa__chain_heads_backward(g, x, d, &seq, head, heads));
        }
    NSA__CHECK(nsa__compress_go(&g->dx.k_cmp, &x->k_cmp, d, 0, g->rest, g->rest_bytes));
    NSA__CHECK(nsa__compress_go(&g->dx.v_cmp, &x->v_cmp, d, 0, g->rest, g->rest_bytes));
    nsa__chain_flush(g, d);
    return NSA_OK;
}

NSA_API nsa_status nsa_attention_backward(const nsa_attention *dx, const nsa_attention *x,
                                          const nsa_desc *d, void *workspace, size_t bytes) {
    nsa__chain_gradient g;
    NSA__CHECK(nsa__attention_check_sizes(x, d));
    NSA__CHECK(nsa__attention_check(x, d, 0));
    NSA__CHECK(nsa__check_backward(d, 1));
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__attention_gradient_check(dx, x, d));
    nsa__arena a = {NULL, 0};
    nsa__chain_gradient_layout(&g, dx, d, &a);
    if (!workspace || bytes < nsa__chain_backward_bytes(&g, x, d, nsa__least_threads(d)))
        return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    a = nsa__arena_at(workspace);
    nsa__chain_gradient_layout(&g, dx, d, &a);
    g.rest_bytes = bytes - (size_t)((char *)g.rest - (char *)workspace);
    return nsa__attention_backward_run(&g, x, d);
}

/* ---- Decoding --------------------------------------------------------------------------------
   Twin: kernels/decode.cuh. Not here: the primitives that it runs.
   nsa_decode takes a sequence from length L to L + n:
     1. All checks; nothing has been written before they pass.
     2. newest = max(newest, L + n), because the rings are about to lose rows.
     3. Each task appends its n rows: k_slc and v_slc at L, k_win .. v_raw into rings.
     4. It compresses the blocks that end in the new tokens, from the raw rows of the ring.
     5. cmp, selection, slc, win, gate: the code of forward, with first = L and count = n.
     6. lengths = L + n, if every task has succeeded.
   A ring of R rows holds token s in row s % R: the last R tokens written. R is what a query needs,
   the keys of a window or l, plus max_rewind r. With a need of 3, r = 2 and 8 tokens the rows hold
   | 5 | 6 | 7 | 3 | 4 |. The sequence may go back to length 6, whose last three tokens are 3 to 5,
   and no further. A rewind only sets the length; rows behind it are overwritten when tokens come
   again. */

static nsa_status nsa__cache_check(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    if (!d) return nsa__error(NSA_ERROR_NULL, NSA__AT_desc);
    nsa_desc room = *d;
    room.first = room.count = 0;
    NSA__CHECK(nsa__check_geometry(&room));
    NSA__CHECK(nsa__check_decodes(d));
    if ((unsigned)dtype > NSA_F8 || !(((unsigned)NSA__TENSORS | NSA__SCALED) >> dtype & 1))
        return nsa__error(NSA_ERROR_DTYPE, NSA__AT_dtype);
    return max_rewind < 0 ? nsa__error(NSA_ERROR_SIZE, NSA__AT_max_rewind) : NSA_OK;
}

/* Sets every pointer of the cache; with a base of NULL only counts. */
static void nsa__cache_lay_out(nsa_cache *c, nsa_dtype dtype, nsa__arena *a) {
    nsa__cache_part parts[NSA__PARTS];
    int batch = c->desc.batch, heads = c->desc.kv_heads;
    c->lengths = (int32_t *)nsa__alloc(a, batch, sizeof *c->lengths);
    c->newest = (int32_t *)nsa__alloc(a, batch, sizeof *c->newest);
    nsa__cache_parts(c, parts);
    for (int i = 0; i < NSA__PARTS; i++) {
        int rows = (int)parts[i].count;
        *parts[i].rows = nsa_tensor_bthd(NULL, dtype, rows, heads, parts[i].width);
        parts[i].rows->data = nsa__alloc(a, parts[i].rows->batch * batch, nsa__dtype_bytes(dtype));
    }
}

static size_t nsa__cache_bytes(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    nsa_cache cache;
    nsa__arena a = {NULL, 0};
    cache.desc = *d;
    cache.max_rewind = max_rewind;
    nsa__cache_lay_out(&cache, dtype, &a);
    return a.used + NSA__ALIGN;
}

NSA_API size_t nsa_cache_size(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    if (nsa__cache_check(d, dtype, max_rewind) != NSA_OK) return 0;
    return nsa__cache_bytes(d, dtype, max_rewind);
}

NSA_API nsa_status nsa_cache_init(nsa_cache *cache, const nsa_desc *d, nsa_dtype dtype,
                                  int max_rewind, void *memory, size_t bytes) {
    NSA__CHECK(nsa__cache_check(d, dtype, max_rewind));
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    if (!memory || bytes < nsa__cache_bytes(d, dtype, max_rewind))
        return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_memory);
    nsa__arena a = nsa__arena_at(memory);
    cache->desc = *d;
    cache->desc.first = cache->desc.count = 0;
    cache->desc.begins = NULL;
    cache->max_rewind = max_rewind;
    nsa__cache_lay_out(cache, dtype, &a);
    memset(cache->lengths, 0, (size_t)d->batch * sizeof *cache->lengths);
    memset(cache->newest, 0, (size_t)d->batch * sizeof *cache->newest);
    return NSA_OK;
}

/* NSA_OK if the sequence can be taken back to `length`: the rings hold the rows that a query there
   needs. They lost rows when the sequence was at `newest`, not at its present length. Length 0
   needs no row. */
static nsa_status nsa__check_length(const nsa_cache *c, int sequence, int length) {
    if (!c) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    if (sequence < 0 || sequence >= c->desc.batch)
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_sequence);
    int64_t least = (int64_t)c->newest[sequence] - c->max_rewind;
    if (length < 0 || length > c->lengths[sequence] || (length != 0 && length < least))
        return nsa__error(NSA_ERROR_REWIND, NSA__AT_length);
    return NSA_OK;
}

NSA_API nsa_status nsa_cache_rewind(nsa_cache *cache, int sequence, int length) {
    NSA__CHECK(nsa__check_length(cache, sequence, length));
    cache->lengths[sequence] = length;
    if (length == 0) cache->newest[sequence] = 0;
    return NSA_OK;
}

/* Copies whole rings, because rows are indexed by s % R in both caches; of straight arrays the rows
   before `length`. `newest` goes with them, because the rings are those of the source. */
NSA_API nsa_status nsa_cache_fork(nsa_cache *to, int to_sequence, const nsa_cache *from,
                                  int from_sequence, int length) {
    nsa__cache_part source[NSA__PARTS], into[NSA__PARTS];
    nsa_cache copy;
    NSA__CHECK(nsa__check_length(from, from_sequence, length));
    NSA__CHECK(nsa__check_length(to, to_sequence, 0));
    if (!nsa__same_geometry(to, from) || length > to->desc.tokens)
        return nsa__error(NSA_ERROR_CACHE, NSA__AT_cache);
    copy = *from;
    nsa__cache_parts(&copy, source);
    nsa__cache_parts(to, into);
    for (int i = 0; i < NSA__PARTS && length; i++) {
        int compressed = i == NSA__PART_K_CMP || i == NSA__PART_V_CMP;
        int64_t rows = source[i].ring ? source[i].count
                       : compressed   ? nsa_cmp_count(&from->desc, length)
                                      : length;
        memmove(nsa__row(into[i].rows, to_sequence, 0, 0),
                nsa__row(source[i].rows, from_sequence, 0, 0),
                (size_t)(rows * into[i].rows->token) * nsa__dtype_bytes(into[i].rows->dtype));
    }
    to->newest[to_sequence] = length ? from->newest[from_sequence] : 0;
    to->lengths[to_sequence] = length;
    return NSA_OK;
}

/* What a sequence and its heads of a task return. It is read when all tasks have ended. */
typedef struct nsa__decode_result {
    int64_t reads[3]; /* of cmp, slc and win */
    nsa_status status;
} nsa__decode_result;

/* At most nsa__batch_queries tokens: one task per (sequence, kv head). More: one task per sequence.
   Or one task of all sequences, which uses all threads: see nsa__decode_whole. */
typedef struct nsa__decode_job {
    const nsa_attention *x;
    nsa_cache *cache;
    int count;                   /* new tokens of every sequence, at most */
    int32_t *counts;             /* of every sequence: its new tokens */
    int parts;                   /* tasks of a sequence: its kv heads, or 1 */
    int sequences;               /* of a task: 1, or all of the batch */
    int threads;                 /* of a task */
    size_t shared;               /* bytes of workspace for counts and results */
    size_t bytes;                /* bytes of workspace for a task */
    nsa__decode_result *results; /* of every sequence and part */
} nsa__decode_job;

/* The geometry of a task from sequence b on: the new tokens as queries behind those that the cache
   holds, over all keys up to them; its share of the heads. */
static nsa_desc nsa__decode_desc(const nsa__decode_job *p, int b) {
    const nsa_desc *all = &p->cache->desc;
    nsa_desc d = nsa__slice_desc(all, all->tokens, p->count, all->kv_heads / p->parts);
    d.batch = p->sequences;
    d.threads = p->threads;
    if (!p->counts) return d; /* a size query's */
    d.firsts = p->cache->lengths + b;
    d.counts = p->counts + b;
    return d;
}

/* x from sequence b of the batch and kv head `head` on, over the cache's keys. `joined`: sequences
   of one new token are rows of one, as nsa_desc has queries where there are counts. */
static nsa_attention nsa__decode_views(const nsa_attention *x, const nsa_cache *cache, int b,
                                       int head, int joined) {
    const nsa_desc *d = &cache->desc;
    nsa_attention one = *x;
    nsa_compress *phis[] = {&one.k_cmp, &one.v_cmp};
    nsa_tensor *rows[] = {&one.q,       &one.out_cmp, &one.out_slc, &one.out_win, &one.lse_cmp,
                          &one.lse_slc, &one.lse_win, &one.out,     &one.gates,   &one.blocks};
    nsa__seq seq;
    memset(&seq, 0, sizeof seq);
    seq.batch = seq.keys.batch = seq.cmp.batch = b;
    one.k_slc = cache->k_slc;
    one.v_slc = cache->v_slc;
    one.k_win = cache->k_win;
    one.v_win = cache->v_win;
    one.k_cmp.out = cache->k_cmp;
    one.v_cmp.out = cache->v_cmp;
    one = nsa__slice_views(&one, d, &seq, head);
    for (int i = 0; joined && i < 10; i++) rows[i]->token = rows[i]->batch;
    one.k_cmp.x = nsa__view_at(cache->k_raw, b, 0, head);
    one.v_cmp.x = nsa__view_at(cache->v_raw, b, 0, head);
    one.out = nsa__view_at(one.out, b, 0, (int64_t)d->heads / d->kv_heads * head);
    for (int i = 0; i < 2; i++) {
        nsa_tensor *parameters[] = {&phis[i]->pos, &phis[i]->w1, &phis[i]->b1, &phis[i]->w2,
                                    &phis[i]->b2};
        for (size_t j = 0; j < sizeof parameters / sizeof *parameters; j++)
            *parameters[j] = nsa__view_at(*parameters[j], 0, 0, head);
    }
    return one;
}

/* The new rows of kv heads from `head` on, of sequences from b on. */
typedef struct nsa__append_job {
    nsa__cache_part parts[NSA__PARTS];
    nsa_tensor inputs[NSA__INPUTS];
    int b, head, kv_heads;
} nsa__append_job;

/* Converts a token's rows to the cache's dtype and stores them, in the ring or behind the last. */
static void nsa__append_token(const void *job, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__append_job *p = (const nsa__append_job *)job;
    const int64_t b = p->b + seq->nth, token = seq->first + t;
    nsa_real row[NSA__MAX_DIM];
    (void)scratch;
    for (int i = 0; i < NSA__INPUTS; i++) {
        const nsa__cache_part *part = &p->parts[i];
        const nsa_tensor *from = &p->inputs[i];
        const int64_t at = part->ring ? token % part->ring : token;
        for (int h = p->head; h < p->head + p->kv_heads; h++) {
            nsa__load(row, from->dtype, nsa__row(from, b, t, h), part->width);
            nsa__store(part->rows->dtype, nsa__row(part->rows, b, at, h), row, part->width);
        }
    }
}

static void nsa__decode_append(const nsa__decode_job *p, const nsa_desc *d, int b, int head) {
    const nsa__team team = {nsa__threads(d), NULL, 0};
    nsa__append_job job;
    job.b = b;
    job.head = head;
    job.kv_heads = d->kv_heads;
    nsa__cache_parts(p->cache, job.parts);
    nsa__cache_inputs(p->x, job.inputs);
    nsa__run_tokens(&team, d, nsa__append_token, &job);
}

/* The chain over a task's cache: nsa_attention_forward's steps with the new tokens as its queries.
   `reads`, by branch, has a number for each of them and kv head. */
static nsa_status nsa__decode_attend(const nsa_attention *x, nsa_cache *cache, const nsa_desc *d,
                                     int64_t *const reads[3], void *workspace, size_t bytes) {
    nsa__cache_part parts[NSA__PARTS];
    nsa__chain_plan chain;
    nsa__cache_parts(cache, parts);
    const nsa__step steps[] = {
        {0, reads[NSA__CMP]}, {0, reads[NSA__SLC]}, {parts[NSA__PART_K_WIN].ring, reads[NSA__WIN]}};
    nsa__chain_plan_make(&chain, x, d, steps);
    return nsa__chain_run(&chain, x, d, parts[NSA__PART_K_RAW].ring, workspace, bytes);
}

/* One task: append, compress, attend. It returns its status through p->results, because a task has
   no caller that could look at it. Its workspace is the thread's scratch. */
static void nsa__decode_task(const void *context, int64_t nth, void *scratch) {
    const nsa__decode_job *p = (const nsa__decode_job *)context;
    const int b = (int)(nth / p->parts), head = (int)(nth % p->parts);
    const nsa_desc d = nsa__decode_desc(p, b);
    nsa__decode_result *result = &p->results[nth];
    nsa__arena a = nsa__arena_at(scratch);
    int64_t rows = 0, at = 0, *reads[3];
    for (int i = 0; i < p->sequences; i++) rows += d.counts[i];
    for (int i = 0; i < 3; i++)
        reads[i] = (int64_t *)nsa__alloc(&a, rows * d.kv_heads, sizeof **reads);
    memset(result, 0, (size_t)p->sequences * sizeof *result);
    const size_t used = (size_t)(a.base + a.used - (char *)scratch);
    if (p->bytes < used) result->status = nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    if (p->bytes < used || !rows) return;
    for (int i = 0; i < 3; i++) memset(reads[i], 0, (size_t)(rows * d.kv_heads) * sizeof **reads);
    nsa__decode_append(p, &d, b, head);
    const nsa_attention one = nsa__decode_views(p->x, p->cache, b, head, p->sequences > 1);
    result->status =
        nsa__decode_attend(&one, p->cache, &d, reads, a.base + a.used, p->bytes - used);
    for (int i = 0; i < p->sequences; i++)
        for (int64_t end = at + (int64_t)d.counts[i] * d.kv_heads; at < end; at++)
            for (int k = 0; k < 3; k++) result[i].reads[k] += reads[k][at];
}

/* Whether a call is one task of all sequences: of one that is large or has few heads; of several,
   whose new tokens must be one row each, if there are threads enough for two at each head. */
static int nsa__decode_whole(const nsa_desc *all, int count, const int32_t *counts) {
    const int threads = nsa__threads(all);
    if (all->batch == 1) return count > nsa__batch_queries(all) || threads > all->kv_heads;
    for (int b = 0; b < all->batch; b++)
        if ((counts ? counts[b] : count) != 1) return 0;
    return threads / 2 >= (int64_t)all->batch * all->kv_heads;
}

/* What the tasks share. */
static void nsa__decode_layout(nsa__decode_job *p, nsa__arena *shared) {
    const int64_t batch = p->cache->desc.batch;
    p->counts = (int32_t *)nsa__alloc(shared, batch, sizeof *p->counts);
    p->results = (nsa__decode_result *)nsa__alloc(shared, batch * p->parts, sizeof *p->results);
}

/* How a call of this many tokens is cut into tasks, and what they need. `threads` are those of the
   one task of a whole call. Sizes are those of a full cache, so that the workspace stays the same
   while sequences grow. */
static nsa__decode_job nsa__decode_plan(const nsa_attention *x, nsa_cache *cache, int count,
                                        int threads, int whole) {
    const nsa_desc *all = &cache->desc;
    const int few = count <= nsa__batch_queries(all);
    nsa__decode_job p = {x, cache, (int)nsa__min(count, all->tokens), NULL, 1, 1, 1, 0, 0, NULL};
    nsa__chain_plan chain;
    nsa__arena shared = {NULL, 0}, task = {NULL, 0};
    if (whole)
        p.sequences = all->batch, p.threads = threads;
    else if (few)
        p.parts = all->kv_heads;
    nsa_desc d = nsa__decode_desc(&p, 0);
    d.first = d.tokens - d.count;
    nsa__decode_layout(&p, &shared);
    for (int i = 0; i < 3; i++)
        nsa__alloc(&task, (int64_t)p.sequences * p.count * d.kv_heads, sizeof(int64_t));
    nsa__chain_plan_make(&chain, x, &d, NULL);
    p.shared = shared.used;
    p.bytes = nsa__bytes_for(task.used, 1, nsa__chain_plan_bytes(&chain, x, &d, nsa__threads(&d)));
    return p;
}

/* Of all cuts of so many tokens: `counts` decides too. */
static size_t nsa__decode_bytes(const nsa_attention *x, nsa_cache cache, int count) {
    size_t most = 0;
    for (int whole = nsa__decode_whole(&cache.desc, count, NULL); whole >= 0; whole--) {
        const nsa__decode_job p = nsa__decode_plan(x, &cache, count, cache.desc.threads, whole);
        nsa_desc d = cache.desc;
        if (whole) d.threads = 1;
        most = nsa__larger(most, nsa__workspace_bytes(&d, p.shared, p.bytes));
    }
    return most;
}

/* A smaller count can be split into other tasks and need more memory, so take the larger of both
   sizes. */
NSA_API size_t nsa_decode_workspace_size(const nsa_attention *x, const nsa_cache *cache,
                                         int count) {
    if (!x || !cache || count < 0 || nsa__attention_check_sizes(x, &cache->desc) != NSA_OK)
        return 0;
    int step = (int)nsa__min(count, nsa__batch_queries(&cache->desc));
    return nsa__larger(nsa__decode_bytes(x, *cache, step), nsa__decode_bytes(x, *cache, count));
}

/* Checks the views of the chain over the cache's arrays, then those of the new rows. */
static nsa_status nsa__decode_check_views(const nsa_attention *x, const nsa_cache *cache,
                                          int count) {
    nsa_desc d = cache->desc;
    d.count = (int)nsa__min(count, d.tokens);
    const nsa_attention all = nsa__decode_views(x, cache, 0, 0, 0);
    NSA__CHECK(nsa__attention_check(&all, &d, 1));
    return nsa__check_inputs(&nsa__cpu, x, &d);
}

/* At most max_rewind + 1 tokens come at once. All are appended before the first of them attends,
   and the rings must still hold its keys then. */
static nsa_status nsa__decode_check(const nsa_attention *x, const nsa_cache *cache, int count,
                                    const int32_t *counts) {
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    NSA__CHECK(nsa__attention_check_sizes(x, &cache->desc));
    if (count < 0) return nsa__error(NSA_ERROR_RANGE, NSA__AT_count);
    for (int b = 0; b < cache->desc.batch; b++) {
        int64_t more = counts ? counts[b] : count;
        if (more < 0 || more > count) return nsa__error(NSA_ERROR_RANGE, NSA__AT_counts);
        if (cache->lengths[b] + more > cache->desc.tokens || more - 1 > cache->max_rewind)
            return nsa__error(NSA_ERROR_CACHE, NSA__AT_cache);
    }
    return nsa__decode_check_views(x, cache, count);
}

/* Multiply-adds of the call, from the keys that its tokens read at most. */
static int64_t nsa__decode_work(const nsa__decode_job *p) {
    const nsa_desc *d = &p->cache->desc;
    int64_t keys = 0;
    for (int b = 0; b < d->batch; b++) {
        int count = p->counts[b], held = p->cache->lengths[b] + count;
        keys += count * (nsa_cmp_count(d, held) + nsa__min(d->window, held) +
                         nsa__min((int64_t)d->slc_count * d->slc_block, held));
    }
    return keys * d->kv_heads * nsa__whole_vectors(d->heads / d->kv_heads) * (d->dim + d->dim_v);
}

/* Runs the tasks and adds up their reads. The lengths grow only if all tasks have succeeded.
   `newest` grows before, because a task that fails has written to the rings already. */
static nsa_status nsa__decode_run(nsa__decode_job *p, const nsa__team *team, nsa_reads *reads) {
    nsa_cache *cache = p->cache;
    const int64_t results = (int64_t)cache->desc.batch * p->parts, tasks = results / p->sequences;
    for (int b = 0; b < cache->desc.batch; b++) {
        int length = cache->lengths[b] + p->counts[b];
        if (cache->newest[b] < length) cache->newest[b] = length;
    }
    nsa__run(team, tasks, nsa__decode_task, p);
    for (int64_t i = 0; i < tasks; i++)
        if (p->results[i].status != NSA_OK) return p->results[i].status;
    for (int b = 0; b < cache->desc.batch; b++) cache->lengths[b] += p->counts[b];
    if (reads) memset(reads, 0, (size_t)cache->desc.batch * sizeof *reads);
    for (int64_t i = 0; reads && i < results; i++) {
        reads[i / p->parts].cmp += p->results[i].reads[NSA__CMP];
        reads[i / p->parts].slc += p->results[i].reads[NSA__SLC];
        reads[i / p->parts].win += p->results[i].reads[NSA__WIN];
    }
    return NSA_OK;
}

/* Many tasks: each runs on one thread, with a thread's scratch as its workspace. A single task:
   the plan is made for the fewest threads, so that any sufficient workspace passes. The task then
   gets all of the workspace, and the primitives in it use as many threads as fit. */
NSA_API nsa_status nsa_decode(const nsa_attention *x, nsa_cache *cache, int count,
                              const int32_t *counts, nsa_reads *reads, void *workspace,
                              size_t bytes) {
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace);
    NSA__CHECK(nsa__decode_check(x, cache, count, counts));
    nsa_desc d = cache->desc;
    const int whole = nsa__decode_whole(&d, count, counts);
    nsa__decode_job p = nsa__decode_plan(x, cache, count, d.threads ? d.threads : 1, whole);
    if (whole) d.threads = 1;
    NSA__CHECK(nsa__team_make(&team, &d, workspace, bytes, p.shared, p.bytes));
    nsa__decode_layout(&p, &shared);
    for (int b = 0; b < d.batch; b++) p.counts[b] = counts ? counts[b] : count;
    const int worth = nsa__threads_for(nsa__threads(&cache->desc), nsa__decode_work(&p));
    team.threads = (int)nsa__min(team.threads, worth);
    if (whole) { /* gets all of the workspace, whose size decides how many threads */
        p.threads = worth > 1 ? cache->desc.threads : 1;
        p.bytes = bytes - NSA__ALIGN - p.shared;
    }
    return nsa__decode_run(&p, &team, reads);
}

#ifdef __cplusplus
}
#endif

#endif /* NSA_IMPLEMENTATION */

/* MIT License

   Copyright (c) 2026 The nsa authors

   Permission is hereby granted, free of charge, to any person obtaining a copy
   of this software and associated documentation files (the "Software"), to deal
   in the Software without restriction, including without limitation the rights
   to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
   copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all
   copies or substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
   IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
   FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
   AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
   LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
   SOFTWARE. */
