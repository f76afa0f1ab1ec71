/* nsa_cuda.cuh - Native Sparse Attention on CUDA: the functions of nsa.h that touch tensors, on
   device memory.
   Twin: nsa.h. nsa_cuda_X does what nsa_X does and means the same by every struct, option, status.
   Not here: the maths (nsa.h has it), the kernels (kernels/), anything that allocates or waits.

   Include it anywhere, from C99 on, for the declarations; they need neither nvcc nor a CUDA header.
   In one .cu file do

       #define NSA_CUDA_IMPLEMENTATION
       #include "nsa_cuda.cuh"

   and give that file to nvcc, as C++17, for compute capability 8.0 or later; for H100 and H200 name
   sm_90a, as -gencode arch=compute_90a,code=sm_90a, for what it compiles to sm_90 alone does
   without their wgmma. An architecture takes about a minute of one core (-arch=sm_90a adds PTX, and
   half as much again); CONFIGURATION leaves out what is not used. nsa.h's own implementation must
   be in the program too (in a C file, or in this one): it holds what no GPU is needed for.

   WHAT DIFFERS FROM THE CPU

   - The data of every view, desc.begins, firsts, counts and pages, positions and the workspace are
     device pointers. The desc and the structs are the host's, and so is what *_workspace_size
     returns.
   - A call only launches, on the stream given: no allocation, no wait, no copy between host and
     device; it can be captured in a CUDA graph. NSA_OK says that the launches were accepted,
     NSA_ERROR_CUDA that the runtime refused one: cudaGetLastError says why. The launches before it
     have run, so outputs may be partly written; any other error has touched nothing.
   - The stream's device must be current (cudaSetDevice): kernels are loaded onto the current
     device. The first call of a kind loads its kernels, which takes long and may not be captured;
     nsa_cuda_load and nsa_cuda_load_decode do it ahead of time. After cudaDeviceReset no call may
     follow: kernels have lost what they had asked for.
   - Every device of compute capability 8.0 or later serves every width and dtype. A block of
     threads takes up to 99 KB of shared memory, all that 8.6, 8.9 and 12.0 have; code for sm_90a
     up to the 227 KB of 9.0, which alone runs it. An older device has no code to load: its first
     call returns NSA_ERROR_CUDA and has launched nothing.
   - What lies on the device is not checked on the host: begins, firsts, pages and block lists may
     hold anything, and no kernel leaves its views' rows for it (packed rows end at begins[B], and
     those of a ragged batch's queries at the sum of counts, which are trusted; compressed rows are
     as many as begins amount to, batch x nsa_cmp_count(tokens) at most). What is no page is taken
     for the nearest one. nsa_cuda_check_blocks and nsa_cuda_check_pages leave their verdicts in
     device memory.
   - So the host does not know how many rows packed sequences have. desc.rows tells it: begins[B],
     or more; without begins the sum of firsts and counts. Workspaces and grids then grow with these
     rows and batch, not with batch x tokens. Rows end there whatever the arrays hold, compressed
     rows at rows / cmp_stride. The results keep their bits. With rows 0 each sequence is taken to
     be as long as the longest may be.
   - Of a ragged batch each block of threads adds up the counts of the sequences before its own.
   - Sums are f32 whatever NSA_REAL is; f64 tensors are refused (NSA_ERROR_DTYPE); lse is f32.
   - dim, dim_v, a compress's hidden and rope's dim are multiples of 8 (else NSA_ERROR_SIZE),
     slc_block is at most 128 (NSA_ERROR_SLC_BLOCK). Rows that are read in bulk
     (q, k, v, out, cmp, slc, win, x, parameters, their gradients) start at multiples of 16 bytes:
     data (NSA_ERROR_ALIGNMENT) and strides (NSA_ERROR_STRIDE). lse, logits, block lists and
     positions need their element's alignment only.
   - The tensors of an attention, a selection or an mlp have one dtype; gradients have that or f32.
     Rope, gate, merge, mean and conv take any mixture.
   - With up to four query heads to a kv head slc's workspace has up to 512 MB more (or what 32
     queries take): queries are gathered by the block they read, and what they find is added up.
   - desc.threads, desc.isa and desc.products are not used. tokens times list_heads / kv_heads is at
     most 2^30 - 64 (NSA_ERROR_OVERFLOW).

   CONFIGURATION (define before the include in the file with the implementation; what is left out is
   not compiled, and refused at run time by NSA_ERROR_DTYPE or NSA_ERROR_SIZE)

     NSA_CUDA_NO_F32, NSA_CUDA_NO_BF16, NSA_CUDA_NO_F16
                         leave a dtype out of attention, selection and mlp
     NSA_CUDA_MAX_DIM    the largest dim and dim_v: 64, 128, 192 or 256 (the default)
     NSA_CUDA_QUIET      no message if code is compiled for plain sm_90, which has no wgmma, or for
                         sm_90a by CUDA 12.5, which waits for each
*/
#ifndef NSA_CUDA_CUH
#define NSA_CUDA_CUH

#include "nsa.h"

#ifdef __cplusplus
extern "C" {
#endif

struct CUstream_st;
/* The runtime's cudaStream_t under a name that needs no CUDA header; NULL is the default stream. */
typedef struct CUstream_st *nsa_cuda_stream;

/* ---- What is wrong with begins, firsts, counts or pages ----------------------------------------
   nsa_page_fault for device memory: its reason is a number, and nsa_cuda_page_reason has the
   words. All zeros: there is no fault. Of begins it says no place. */
typedef struct nsa_cuda_page_verdict {
    nsa_status status; /* what nsa_check_pages returns */
    int32_t reason;    /* 0: no fault; the other fields are of the first fault */
    int32_t sequence, slot;
    int32_t value;
} nsa_cuda_page_verdict;

const char *nsa_cuda_page_reason(int reason); /* the text of nsa_page_fault.reason; "" for 0 */

nsa_status nsa_cuda_check_pages(const nsa_desc *d, nsa_cuda_page_verdict *verdict,
                                nsa_cuda_stream stream);

/* ---- Block index. The arrays lie on the device. ---------------------------------------------- */

nsa_status nsa_cuda_block_map(const nsa_desc *d, int tokens, int32_t *indptr, int32_t *indices,
                              float *weights, nsa_cuda_stream stream);
nsa_status nsa_cuda_cmp_begins(const nsa_desc *d, int32_t *cmp_begins, nsa_cuda_stream stream);

/* ---- RoPE ------------------------------------------------------------------------------------ */

nsa_status nsa_cuda_rope_forward(const nsa_rope *x, const nsa_desc *d, nsa_cuda_stream stream);
nsa_status nsa_cuda_rope_backward(const nsa_rope *dx, const nsa_rope *x, const nsa_desc *d,
                                  nsa_cuda_stream stream);

/* ---- Compression ----------------------------------------------------------------------------- */

size_t nsa_cuda_compress_forward_workspace_size(const nsa_compress *x, const nsa_desc *d);
nsa_status nsa_cuda_compress_forward(const nsa_compress *x, const nsa_desc *d, void *workspace,
                                     size_t bytes, nsa_cuda_stream stream);
size_t nsa_cuda_compress_backward_workspace_size(const nsa_compress *x, const nsa_desc *d);
nsa_status nsa_cuda_compress_backward(const nsa_compress *dx, const nsa_compress *x,
                                      const nsa_desc *d, void *workspace, size_t bytes,
                                      nsa_cuda_stream stream);

/* ---- Attention over few keys. A block that is no candidate of its query is passed over by slc. */

size_t nsa_cuda_attend_cmp_forward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_cmp_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                       size_t bytes, nsa_cuda_stream stream);
size_t nsa_cuda_attend_cmp_backward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_cmp_backward(const nsa_attend *dx, const nsa_attend *x,
                                        const nsa_desc *d, void *workspace, size_t bytes,
                                        nsa_cuda_stream stream);

size_t nsa_cuda_attend_slc_forward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_slc_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                       size_t bytes, nsa_cuda_stream stream);
size_t nsa_cuda_attend_slc_backward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_slc_backward(const nsa_attend *dx, const nsa_attend *x,
                                        const nsa_desc *d, void *workspace, size_t bytes,
                                        nsa_cuda_stream stream);

size_t nsa_cuda_attend_win_forward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_win_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                       size_t bytes, nsa_cuda_stream stream);
size_t nsa_cuda_attend_win_backward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_win_backward(const nsa_attend *dx, const nsa_attend *x,
                                        const nsa_desc *d, void *workspace, size_t bytes,
                                        nsa_cuda_stream stream);

size_t nsa_cuda_attend_dense_forward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_dense_forward(const nsa_attend *x, const nsa_desc *d, void *workspace,
                                         size_t bytes, nsa_cuda_stream stream);
size_t nsa_cuda_attend_dense_backward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_attend_dense_backward(const nsa_attend *dx, const nsa_attend *x,
                                          const nsa_desc *d, void *workspace, size_t bytes,
                                          nsa_cuda_stream stream);

/* ---- Merge ----------------------------------------------------------------------------------- */

nsa_status nsa_cuda_merge_forward(const nsa_merge *x, const nsa_desc *d, nsa_cuda_stream stream);
nsa_status nsa_cuda_merge_backward(const nsa_merge *dx, const nsa_merge *x, const nsa_desc *d,
                                   nsa_cuda_stream stream);

/* ---- Selection ------------------------------------------------------------------------------- */

size_t nsa_cuda_select_blocks_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_select_blocks(const nsa_select *x, const nsa_desc *d, void *workspace,
                                  size_t bytes, nsa_cuda_stream stream);

/* A product that overflows counts as one with a key that is not finite. The workspace holds the
   scores of some 2048 lists at a time. */
size_t nsa_cuda_score_blocks_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_score_blocks(const nsa_score *x, const nsa_desc *d, void *workspace,
                                 size_t bytes, nsa_cuda_stream stream);

/* A block that is no candidate of its query has the score -inf, and no gradient. */
size_t nsa_cuda_score_blocks_forward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_score_blocks_forward(const nsa_score *x, const nsa_desc *d, void *workspace,
                                         size_t bytes, nsa_cuda_stream stream);
size_t nsa_cuda_score_blocks_backward_workspace_size(const nsa_desc *d);
nsa_status nsa_cuda_score_blocks_backward(const nsa_score *dx, const nsa_score *x,
                                          const nsa_desc *d, void *workspace, size_t bytes,
                                          nsa_cuda_stream stream);

/* scores and list lie on the device. */
nsa_status nsa_cuda_rank_blocks(const float *scores, int query, const nsa_desc *d, int32_t *list,
                                nsa_cuda_stream stream);

/* It takes no workspace. */
nsa_status nsa_cuda_rank_queries(const nsa_rank *x, const nsa_desc *d, nsa_cuda_stream stream);

/* nsa_block_fault for device memory: its reason is a number, and nsa_cuda_block_reason has the
   words. All zeros: the lists are in the form of nsa_select_blocks. */
typedef struct nsa_cuda_block_verdict {
    int32_t reason; /* 0: no fault; the other fields are of the first fault */
    int32_t batch, query, kv_head, slot;
    int32_t value;
} nsa_cuda_block_verdict;

const char *nsa_cuda_block_reason(int reason); /* the text of nsa_block_fault.reason; "" for 0 */

nsa_status nsa_cuda_check_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                 nsa_cuda_block_verdict *verdict, nsa_cuda_stream stream);
nsa_status nsa_cuda_normalize_blocks(const nsa_tensor *blocks, const nsa_desc *d,
                                     nsa_cuda_stream stream);

/* ---- Gate ------------------------------------------------------------------------------------ */

nsa_status nsa_cuda_gate_forward(const nsa_gate *x, const nsa_desc *d, nsa_cuda_stream stream);
nsa_status nsa_cuda_gate_backward(const nsa_gate *dx, const nsa_gate *x, const nsa_desc *d,
                                  nsa_cuda_stream stream);

/* ---- The whole ------------------------------------------------------------------------------- */

size_t nsa_cuda_attention_forward_workspace_size(const nsa_attention *x, const nsa_desc *d);
nsa_status nsa_cuda_attention_forward(const nsa_attention *x, const nsa_desc *d, void *workspace,
                                      size_t bytes, nsa_cuda_stream stream);
size_t nsa_cuda_attention_backward_workspace_size(const nsa_attention *dx, const nsa_attention *x,
                                                  const nsa_desc *d);
nsa_status nsa_cuda_attention_backward(const nsa_attention *dx, const nsa_attention *x,
                                       const nsa_desc *d, void *workspace, size_t bytes,
                                       nsa_cuda_stream stream);

/* Loads onto the current device the kernels that nsa_cuda_attention_forward(x, d) and, unless dx is
   NULL, nsa_cuda_attention_backward(dx, x, d) launch. It checks its arguments as they do, launches
   nothing and touches no view. Call it before a capture, and before times are taken. */
nsa_status nsa_cuda_load(const nsa_attention *dx, const nsa_attention *x, const nsa_desc *d);

/* ---- Decoding --------------------------------------------------------------------------------
   The cache's memory, lengths included, lies on the device; so do counts, reads and verdict. The
   host does not know lengths, so what hangs on them is refused on the device: `verdict`, unless it
   is NULL, becomes NSA_OK or the status that nsa.h's function of that name returns, and a refused
   call changes nothing else. A step can be captured in a graph and replayed, each time with the
   tokens that x, and the counts that counts, then hold. Block numbers are those of
   nsa_cuda_attention_forward over the whole sequence; outputs are sums in another order. Chunks
   that are longer than some 16 tokens are right, but faster through nsa_cuda_attention_forward. */

size_t nsa_cuda_cache_size(const nsa_desc *d, nsa_dtype dtype, int max_rewind);
nsa_status nsa_cuda_cache_init(nsa_cache *cache, const nsa_desc *d, nsa_dtype dtype, int max_rewind,
                               void *memory, size_t bytes, nsa_cuda_stream stream);
nsa_status nsa_cuda_cache_rewind(nsa_cache *cache, int sequence, int length, nsa_status *verdict,
                                 nsa_cuda_stream stream);
nsa_status nsa_cuda_cache_fork(nsa_cache *to, int to_sequence, const nsa_cache *from,
                               int from_sequence, int length, nsa_status *verdict,
                               nsa_cuda_stream stream);

size_t nsa_cuda_decode_workspace_size(const nsa_attention *x, const nsa_cache *cache, int count);
nsa_status nsa_cuda_decode(const nsa_attention *x, nsa_cache *cache, int count,
                           const int32_t *counts, nsa_reads *reads, nsa_status *verdict,
                           void *workspace, size_t bytes, nsa_cuda_stream stream);

/* The same for the kernels of nsa_cuda_decode(x, cache, count). */
nsa_status nsa_cuda_load_decode(const nsa_attention *x, nsa_cache *cache, int count);

#ifdef __cplusplus
}
#endif

#endif /* NSA_CUDA_CUH */

/* ==== Implementation ========================================================================== */
#if defined(NSA_CUDA_IMPLEMENTATION) && !defined(NSA__CUDA_IMPLEMENTED)
#define NSA__CUDA_IMPLEMENTED

#include "kernels/common.cuh"
#include "kernels/checks.cuh"
#include "kernels/rows.cuh"
#include "kernels/block_index.cuh"
#include "kernels/rope.cuh"
#include "kernels/compress.cuh"
#include "kernels/attend_branches.cuh"
#include "kernels/merge.cuh"
#include "kernels/select_blocks.cuh"
#include "kernels/select_lists.cuh"
#include "kernels/score_blocks.cuh"
#include "kernels/score_lists.cuh"
#include "kernels/gate.cuh"
#include "kernels/attention.cuh"
#include "kernels/decode.cuh"
#include "kernels/load.cuh"

#endif
