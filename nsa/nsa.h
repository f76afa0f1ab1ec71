/* nsa.h - Native Sparse Attention (arXiv 2502.11089) in one C header: forward and backward, on the CPU.

   Do this in one file of your program:

       #define NSA_IMPLEMENTATION
       #include "nsa.h"

   and only `#include "nsa.h"` everywhere else. Link with -lm; compile with -fopenmp to use threads.

   A complete program (examples/embed holds it, with its output):

       #define NSA_IMPLEMENTATION
       #include "nsa.h"
       #include <stdio.h>
       #include <stdlib.h>

       int main(void) {
           enum { T = 256, H = 4, D = 32 };
           static float q[T][H][D], k[T][1][D], v[T][1][D], out[T][H][D], lse[T][H];
           for (int i = 0; i < T * H * D; i++) (&q[0][0][0])[i] = (float)(i * 37 % 101) / 101;
           for (int i = 0; i < T * D; i++) (&k[0][0][0])[i] = (&v[0][0][0])[i] = (float)(i * 53 % 97) / 97;

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
           printf("%s: out[255][3][0] = %.4f\n", nsa_status_name(s), (double)out[255][3][0]);
           free(workspace);
           return s != NSA_OK;
       }

   THE ALGORITHM ON ONE PAGE

   B sequences of T tokens; H query heads share Hk key-value heads, G = H / Hk to a group. A query t reads
   keys through three branches, each a softmax attention over few keys, and a gate adds the three up:

     compress   k_cmp[i] = phi(k[i d .. i d + l)), v_cmp likewise            (Eq. 7)  nsa_compress_forward
     cmp        attention over the compressed blocks that lie before t               nsa_attend_cmp_forward
     select     p_cmp = softmax(q k_cmp)                                     (Eq. 8)
                p_slc[j] = sum of p_cmp[i] weighted by how far block i
                overlaps block j, summed over the heads of a group      (Eq. 9, 10)
                the n best blocks j of l' tokens                       (Eq. 11, 12)  nsa_select_blocks
     slc        attention over the tokens of those blocks                            nsa_attend_slc_forward
     win        attention over the last w tokens                                     nsa_attend_win_forward
     gate       out = g_cmp out_cmp + g_slc out_slc + g_win out_win          (Eq. 5)  nsa_gate_forward

   nsa_attention_forward runs all of it. nsa_rope_forward rotates q and k before anything else sees them.
   Each function but select has a backward of the same shape beside it.

   CONVENTIONS

   - Tensors are views: pointer, dtype, and element strides for batch, token and head; the innermost
     dimension is packed. (B,T,H,D), (B,H,T,D) and slices of a fused qkv projection need no copy.
     In comments a shape is written (B, T, H, D) whatever the strides.
   - Query rows first .. first + count - 1 of `tokens` keys may be computed alone. Every view on the query's side
     (q, out, lse, blocks, gate logits, and their gradients) then starts at row `first`: its row 0 is query `first`.
   - Variable length: `begins` holds B + 1 offsets into packed rows; sequence b is rows begins[b] .. begins[b + 1] - 1,
     `tokens` the longest length; batch strides are not used. first and count then speak of every sequence alike
     (rows that a sequence does not have are skipped). Compressed rows are packed in the same order from row 0,
     nsa_cmp_count(desc, length) for each sequence. A sequence's results equal those of it alone, bit for bit.
   - Forward overwrites its outputs. Backward ADDS to its gradients: zero them first, or let branches share one.
     A gradient struct has the type of its primitive: dx.q is the gradient of x.q; dx.out is the incoming gradient of
     x.out. A gradient whose data is NULL is not computed. A gradient may be of the real dtype whatever its tensor's is.
   - Positions are 0-based and causal: query t reads nothing after token t. A query without keys gives out = 0,
     lse = -inf, gradients 0.
   - A non-finite value in a row of q, k, v or dout is no error. Every query that reads the row gets NaN, and no other;
     this holds under -ffast-math too.
   - The same bits from run to run and for any number of threads; a query's bits depend on its own keys alone.
   - The library allocates nothing, prints nothing, never aborts and keeps no global state. Workspace is the caller's,
     of any alignment, sized by the *_workspace_size function of the call; its content means nothing between calls.
     A workspace size of 0 is returned for a descriptor that nsa_desc_check refuses, and where none is needed.
   - Arguments are checked once, before anything is written: a call that does not return NSA_OK has touched nothing.

   What it does not do: dropout, attention biases, cross attention, double backward, key-value caches of several layers,
   quantised keys.

   CONFIGURATION (define before the include, the same in every file)

     NSA_IMPLEMENTATION   the implementation too, in one file
     NSA_STATIC           every function is static: a private copy in each file that includes the implementation
     NSA_REAL             float (default) or double: what is accumulated in. double also makes lse f64 and admits
                          f64 tensors: the same source becomes its own f64 oracle. Do not mix the two in one program
                          without NSA_STATIC.
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
#define NSA_API static __attribute__((unused))
#else
#define NSA_API static
#endif
#else
#define NSA_API extern
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Types ------------------------------------------------------------------------------------------------------ */

/* What sums are accumulated in, and what lse holds. */
typedef NSA_REAL nsa_real;

typedef enum nsa_dtype {
    NSA_F32 = 0,
    NSA_BF16, /* the upper half of an f32 */
    NSA_F16,  /* IEEE 754 binary16 */
    NSA_F64,  /* only where NSA_REAL is double */
    NSA_I32   /* block lists and positions */
} nsa_dtype;

#define NSA_REAL_DTYPE (sizeof(nsa_real) == sizeof(double) ? NSA_F64 : NSA_F32)

/* A view of rows. Row (b, t, h) starts batch * b + token * t + head * h elements after data. Strides are >= 0; those of
   an output must keep its rows apart. data is aligned to the element's size. */
typedef struct nsa_tensor {
    void *data;
    nsa_dtype dtype;
    int64_t batch, token, head;
} nsa_tensor;

/* Views of whole contiguous arrays: (B, tokens, heads, width) and (B, heads, tokens, width). */
NSA_API nsa_tensor nsa_tensor_bthd(void *data, nsa_dtype dtype, int tokens, int heads, int width);
NSA_API nsa_tensor nsa_tensor_bhtd(void *data, nsa_dtype dtype, int tokens, int heads, int width);

/* What a call returns: 0, or a kind of error and the field that it is about. Compare nsa_status_kind(s) with the
   constants below; show a person nsa_status_where(s) and nsa_status_text(s). */
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
    NSA_ERROR_SLC_COUNT,  /* slc_init + slc_local > slc_count, with forced blocks inside the count */
    NSA_ERROR_SLC_LOCAL,  /* slc_local < 1, with forced blocks inside the count */
    NSA_ERROR_RANGE,      /* first < 0, count < 0 or first + count > tokens */
    NSA_ERROR_BEGINS,     /* begins descends, starts below 0, or holds a sequence longer than tokens */
    NSA_ERROR_OPTION,     /* an option that is no value of its enum */
    NSA_ERROR_SCALE,      /* scale is not finite */
    NSA_ERROR_ISA,        /* this machine, or this build, has no such instruction set */
    NSA_ERROR_BLOCKS,     /* a block list that nsa_check_blocks refuses */
    NSA_ERROR_WORKSPACE,  /* the workspace is null or smaller than its size query said */
    NSA_ERROR_CUDA        /* the CUDA runtime refused a launch (nsa_cuda_ functions only) */
};

NSA_API int nsa_status_kind(nsa_status s);
NSA_API const char *nsa_status_name(nsa_status s);  /* "NSA_ERROR_DTYPE" */
NSA_API const char *nsa_status_text(nsa_status s);  /* what is wrong and what is allowed, one sentence */
NSA_API const char *nsa_status_where(nsa_status s); /* the field: "q", "dx.k", "cmp_stride"; "" where there is none */

/* Instruction sets of the tile kernels. */
typedef enum nsa_isa {
    NSA_ISA_DETECT = 0, /* the widest that this machine has */
    NSA_ISA_PLAIN,      /* portable C loops */
    NSA_ISA_SSE2,
    NSA_ISA_AVX2, /* with FMA */
    NSA_ISA_AVX512,
    NSA_ISA_NEON
} nsa_isa;

NSA_API int nsa_isa_available(nsa_isa isa);
NSA_API const char *nsa_isa_name(nsa_isa isa);

/* How forced blocks count. docs/algorithm.md says which public implementation uses which value of these options. */
typedef enum nsa_forced {
    NSA_FORCED_INSIDE = 0, /* slc_count includes the forced blocks (the paper) */
    NSA_FORCED_ON_TOP      /* slc_count blocks by score, the forced ones besides; slc_local may be 0 */
} nsa_forced;

/* How p_cmp of the compressed blocks becomes the score of a selection block. */
typedef enum nsa_score_map {
    NSA_SCORE_OVERLAP_SUM = 0, /* sum of p_cmp[i] * overlap(i, j) / stride: Eq. 9 */
    NSA_SCORE_OVERLAP_MAX      /* the largest p_cmp[i] among blocks i that overlap block j */
} nsa_score_map;

/* Which keys a window of w holds. */
typedef enum nsa_window_rule {
    NSA_WINDOW_COUNTS_SELF = 0, /* w keys: t - w + 1 .. t */
    NSA_WINDOW_BEFORE_SELF      /* w keys before t, and t: t - w .. t */
} nsa_window_rule;

typedef enum nsa_gate_kind {
    NSA_GATE_SIGMOID = 0, /* g = sigmoid(logits), each branch by itself (the paper) */
    NSA_GATE_SOFTMAX,     /* g = softmax of the three logits */
    NSA_GATE_NONE         /* the logits are g itself */
} nsa_gate_kind;

/* One problem's geometry. Start from nsa_desc_default and change fields. */
typedef struct nsa_desc {
    int batch;             /* B >= 1 */
    int tokens;            /* T >= 0 keys held (variable length: the longest sequence) */
    int heads;             /* H >= 1 query heads, a multiple of kv_heads */
    int kv_heads;          /* Hk >= 1 */
    int dim, dim_v;        /* Dk of q and k, Dv of v and out: 1 .. 256 */
    int first, count;      /* the query rows to compute: first .. first + count - 1 */
    const int32_t *begins; /* NULL, or B + 1 ascending offsets of packed sequences */
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
    int gate_heads; /* H, or Hk: then one gate serves a group */
    int threads;    /* 0: what OpenMP offers when the workspace is sized; a call uses no more than its workspace holds */
    nsa_isa isa;
} nsa_desc;

/* The paper's l 32, d 16, l' 64, n 16 (1 first and 2 local blocks among them), w 512; dim_v = dim, all query rows, a
   sigmoid gate per query head. */
NSA_API nsa_desc nsa_desc_default(int batch, int tokens, int heads, int kv_heads, int dim);

/* NSA_OK, or the first rule that the descriptor breaks. Every function checks it; this is for asking early. */
NSA_API nsa_status nsa_desc_check(const nsa_desc *d);

/* ---- Block index: which blocks there are, and which a query may see ------------------------------------------------
   Closed forms, for a descriptor that nsa_desc_check accepts. Compressed block i covers tokens [i d, i d + l); selection
   block j covers [j l', (j + 1) l'). */

NSA_API int nsa_cmp_count(const nsa_desc *d, int tokens);     /* N(T): compressed blocks of T tokens */
NSA_API int nsa_cmp_visible(const nsa_desc *d, int query);    /* N(t + 1): those that lie wholly at or before t */
NSA_API int nsa_slc_count(const nsa_desc *d, int tokens);     /* selection blocks of T tokens, the last may be short */
NSA_API int nsa_slc_candidates(const nsa_desc *d, int query); /* t / l' + 1: blocks that t may select */
NSA_API int nsa_window_begin(const nsa_desc *d, int query);   /* the first token of t's window */

/* M(i, j) of Eq. 9: tokens shared by compressed block i and selection block j, in strides. */
NSA_API int nsa_block_overlap(const nsa_desc *d, int cmp, int slc);
/* The compressed blocks *begin .. *end - 1 that overlap selection block `slc`, of N(tokens) in all. */
NSA_API void nsa_block_overlap_range(const nsa_desc *d, int tokens, int slc, int *begin, int *end);

/* The map M as CSR for `tokens` tokens: a row for each selection block, a column for each compressed block. The arrays are
   the caller's: indptr holds nsa_slc_count(d, tokens) + 1 entries, indices and weights nsa_block_map_size(d, tokens). */
NSA_API int64_t nsa_block_map_size(const nsa_desc *d, int tokens);
NSA_API nsa_status nsa_block_map(const nsa_desc *d, int tokens, int32_t *indptr, int32_t *indices, nsa_real *weights);

/* Variable length: where each sequence's compressed rows begin; B + 1 entries. Without begins: b N(T). */
NSA_API nsa_status nsa_cmp_begins(const nsa_desc *d, int32_t *cmp_begins);

/* ---- RoPE: rotary positions, per head -------------------------------------------------------------------------------
   out = R(position) x, R a rotation of the plane of each pair (x[a], x[b]) by position * frequency. Pair i of D/2 has
   frequency base^(-2i/D), changed by `scaling`. All on rows first .. first + count of each sequence. */

typedef enum nsa_rope_pairs {
    NSA_ROPE_INTERLEAVED = 0, /* (x[2i], x[2i + 1]) */
    NSA_ROPE_HALVES           /* (x[i], x[i + D/2]) */
} nsa_rope_pairs;

typedef enum nsa_rope_scaling {
    NSA_ROPE_SCALING_NONE = 0,
    NSA_ROPE_SCALING_LINEAR, /* positions / factor */
    NSA_ROPE_SCALING_NTK,    /* base * factor^(D / (D - 2)) */
    NSA_ROPE_SCALING_YARN    /* slow pairs as linear, fast ones unchanged, a ramp between; out * (0.1 ln factor + 1) */
} nsa_rope_scaling;

typedef struct nsa_rope {
    nsa_tensor x;         /* (B, count, heads, dim) */
    nsa_tensor out;       /* as x; may be x itself */
    nsa_tensor positions; /* (B, count) i32, head stride unused; data NULL: the row's place in its sequence */
    int heads;            /* H for q, Hk for k */
    int dim;              /* even, 2 .. 256 */
    double base;          /* 0 means 10000 */
    nsa_rope_pairs pairs;
    nsa_rope_scaling scaling;
    double factor;           /* >= 1: context now / context trained; used by the scalings */
    int trained_context;     /* YaRN: tokens the model was trained with */
    double fast, slow;       /* YaRN: turns over trained_context where the ramp ends and begins; 0 means 32 and 1 */
} nsa_rope;

NSA_API nsa_status nsa_rope_forward(const nsa_rope *x, const nsa_desc *d);
/* dx.x += R^T dx.out. Options, positions, heads and dim are read from x; in-place gradients are not allowed. */
NSA_API nsa_status nsa_rope_backward(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d);

/* ---- Compression: phi, Eq. 7 --------------------------------------------------------------------------------------------
   out[i] = phi(x[i d], .., x[i d + l - 1]) for the N(T) blocks of every sequence and kv head; first and count are not used.
   Called once for k (rotated) and once for v, each with its own parameters. */

typedef enum nsa_phi {
    NSA_PHI_MEAN = 0, /* the average of the l rows */
    NSA_PHI_CONV,     /* depthwise: out[c] = sum_j w1[j][c] x[j][c] + b1[c] */
    NSA_PHI_MLP       /* out = w2 silu(w1 flatten(x + pos) + b1) + b2 */
} nsa_phi;

/* Parameters are (Hk, rows, columns): `head` strides over kv heads (0: all share one), `token` over rows, batch is not used.
   Where `optional` is said data may be NULL. */
typedef struct nsa_compress {
    nsa_phi phi;
    int dim;        /* D: width of x and out, 1 .. 256 */
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
NSA_API nsa_status nsa_compress_forward(const nsa_compress *x, const nsa_desc *d, void *workspace, size_t bytes);
/* dx.out in; adds to dx.x, dx.pos, dx.w1, dx.b1, dx.w2, dx.b2. A head stride of 0 in dx sums over the heads. */
NSA_API size_t nsa_compress_backward_workspace_size(const nsa_compress *x, const nsa_desc *d);
NSA_API nsa_status nsa_compress_backward(const nsa_compress *dx, const nsa_compress *x, const nsa_desc *d, void *workspace,
                                         size_t bytes);

/* ---- Attention over few keys -----------------------------------------------------------------------------------------------
   out[t] = sum_s p[s] v[s],  p = softmax over the keys s that t sees of scale q[t] k[s],  lse = ln sum_s exp(scale q[t] k[s]).

     cmp    keys are the compressed rows 0 .. nsa_cmp_visible(t) - 1: k and v hold N(T) rows, from nsa_compress_forward
     slc    keys are the tokens s <= t of the blocks that `blocks` lists for t, lists in the form of nsa_select_blocks
     win    keys are nsa_window_begin(t) .. t
     dense  keys are 0 .. t: causal attention, the baseline and the fall-back

   Backward recomputes p from lse: x.q, x.k, x.v, x.out, x.lse (and x.blocks) must be what forward read and wrote. */
typedef struct nsa_attend {
    nsa_tensor q;      /* (B, count, H, Dk) */
    nsa_tensor k;      /* (B, T, Hk, Dk); cmp: (B, N, Hk, Dk) */
    nsa_tensor v;      /* (B, T, Hk, Dv); cmp: (B, N, Hk, Dv) */
    nsa_tensor out;    /* (B, count, H, Dv) */
    nsa_tensor lse;    /* (B, count, H) of dtype NSA_REAL_DTYPE */
    nsa_tensor blocks; /* slc: (B, count, Hk, nsa_block_list_width) i32 */
} nsa_attend;

NSA_API size_t nsa_attend_cmp_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_cmp_forward(const nsa_attend *x, const nsa_desc *d, void *workspace, size_t bytes);
/* dx.out in; adds to dx.q, dx.k, dx.v (dx.lse and dx.blocks are not used). With dx.k and dx.v NULL only dx.q is computed
   and the other way round. Slices by batch and kv head, and for dx.q by queries, never add to the same row. */
NSA_API size_t nsa_attend_cmp_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_cmp_backward(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d, void *workspace,
                                           size_t bytes);

NSA_API size_t nsa_attend_slc_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_slc_forward(const nsa_attend *x, const nsa_desc *d, void *workspace, size_t bytes);
NSA_API size_t nsa_attend_slc_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_slc_backward(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d, void *workspace,
                                           size_t bytes);

NSA_API size_t nsa_attend_win_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_win_forward(const nsa_attend *x, const nsa_desc *d, void *workspace, size_t bytes);
NSA_API size_t nsa_attend_win_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_win_backward(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d, void *workspace,
                                           size_t bytes);

NSA_API size_t nsa_attend_dense_forward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_dense_forward(const nsa_attend *x, const nsa_desc *d, void *workspace, size_t bytes);
NSA_API size_t nsa_attend_dense_backward_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_attend_dense_backward(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d, void *workspace,
                                             size_t bytes);

/* ---- Selection, Eq. 8 to 12 -----------------------------------------------------------------------------------------------
   For each query and kv head: p_cmp = exp(scale q k_cmp - lse_cmp) over the visible compressed blocks, mapped to selection
   blocks (score_map), summed over the G heads of the group; then the forced blocks and the best of the rest. Equal scores: the lower index wins.
   NaN ranks last. It has no gradient. */
typedef struct nsa_select {
    nsa_tensor q;      /* (B, count, H, Dk) */
    nsa_tensor k;      /* (B, N, Hk, Dk): compressed keys */
    nsa_tensor lse;    /* (B, count, H): of nsa_attend_cmp_forward */
    nsa_tensor blocks; /* out: (B, count, Hk, nsa_block_list_width) i32: ascending, no duplicates, -1 behind the last */
} nsa_select;

/* Entries of a list: slc_count, and with NSA_FORCED_ON_TOP slc_init + slc_local more. */
NSA_API int nsa_block_list_width(const nsa_desc *d);

NSA_API size_t nsa_select_blocks_workspace_size(const nsa_desc *d);
NSA_API nsa_status nsa_select_blocks(const nsa_select *x, const nsa_desc *d, void *workspace, size_t bytes);

/* The ranking alone, for scores from elsewhere: scores[j] of blocks j = 0 .. nsa_slc_candidates(query) - 1, list of
   nsa_block_list_width entries. */
NSA_API nsa_status nsa_rank_blocks(const nsa_real *scores, int query, const nsa_desc *d, int32_t *list);

/* What is wrong with a list, and where. */
typedef struct nsa_block_fault {
    int batch, query, kv_head, slot; /* query counts from 0 in its sequence */
    int32_t value;
    const char *reason; /* "not a candidate of its query", "not ascending", "duplicate", "entry behind a -1" */
} nsa_block_fault;

/* NSA_OK, or NSA_ERROR_BLOCKS and *fault (which may be NULL) the first fault. slc refuses what this refuses. */
NSA_API nsa_status nsa_check_blocks(const nsa_tensor *blocks, const nsa_desc *d, nsa_block_fault *fault);
/* Brings any lists into the form: sorts, drops duplicates and what is no candidate of its query, pads with -1. */
NSA_API nsa_status nsa_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d);

/* ---- Gate, Eq. 5 ---------------------------------------------------------------------------------------------------------------
   out = g[0] cmp + g[1] slc + g[2] win, g from the logits by desc.gate, per token and gate head. */
typedef struct nsa_gate {
    nsa_tensor logits;        /* (B, count, gate_heads, 3): cmp, slc, win */
    nsa_tensor cmp, slc, win; /* (B, count, H, Dv) */
    nsa_tensor out;           /* (B, count, H, Dv) */
} nsa_gate;

NSA_API nsa_status nsa_gate_forward(const nsa_gate *x, const nsa_desc *d);
/* dx.out in; adds to dx.logits, dx.cmp, dx.slc, dx.win. x.out is not read. */
NSA_API nsa_status nsa_gate_backward(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d);

/* ---- The whole ---------------------------------------------------------------------------------------------------------------
   compress, cmp, select, slc, win, gate. Each branch has its own keys and values, or shares them: give the same view.
   What backward needs again is a named output. k_cmp.dim is dim, v_cmp.dim is dim_v. */
typedef struct nsa_attention {
    nsa_tensor q;                       /* (B, count, H, Dk) */
    nsa_compress k_cmp, v_cmp;          /* x: what cmp compresses; out: the compressed rows, an output */
    nsa_tensor k_slc, v_slc;            /* (B, T, Hk, Dk), (B, T, Hk, Dv) */
    nsa_tensor k_win, v_win;            /* likewise */
    nsa_tensor gates;                   /* (B, count, gate_heads, 3): logits, or g with NSA_GATE_NONE */
    nsa_tensor blocks;                  /* out: (B, count, Hk, nsa_block_list_width) i32 */
    nsa_tensor out_cmp, out_slc, out_win; /* out: (B, count, H, Dv) */
    nsa_tensor lse_cmp, lse_slc, lse_win; /* out: (B, count, H) of dtype NSA_REAL_DTYPE */
    nsa_tensor out;                     /* out: (B, count, H, Dv) */
} nsa_attention;

NSA_API size_t nsa_attention_forward_workspace_size(const nsa_attention *x, const nsa_desc *d);
NSA_API nsa_status nsa_attention_forward(const nsa_attention *x, const nsa_desc *d, void *workspace, size_t bytes);
/* dx.out in; adds to dx.q, the x and parameters of dx.k_cmp and dx.v_cmp, dx.k_slc .. dx.v_win, dx.gates. The sums of the
   branches are taken in the real dtype and rounded once. The other fields of dx are not used. The size depends on both
   structs: which gradients are asked for, of which dtype, and which of them share memory. */
NSA_API size_t nsa_attention_backward_workspace_size(const nsa_attention *dx, const nsa_attention *x, const nsa_desc *d);
NSA_API nsa_status nsa_attention_backward(const nsa_attention *dx, const nsa_attention *x, const nsa_desc *d, void *workspace,
                                          size_t bytes);

/* ---- Numbers --------------------------------------------------------------------------------------------------------------- */

NSA_API float nsa_bf16_to_f32(uint16_t x);
NSA_API uint16_t nsa_f32_to_bf16(float x); /* to nearest, ties to even; NaN stays NaN */
NSA_API float nsa_f16_to_f32(uint16_t x);
NSA_API uint16_t nsa_f32_to_f16(float x);

#ifdef __cplusplus
}
#endif

#endif /* NSA_H */
