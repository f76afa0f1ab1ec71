/* attend_mainloop.cuh: attention over few keys: what loops over key tiles share: tiles in shared
   memory, scores and softmax, the choice of a kernel, the launch of a call.
   Twin: nsa.h, "Attention: forward", "Attention: entry points".
   Not here: the loops that multiply (attend_forward.cuh, attend_backward.cuh). */
#ifndef NSA_ATTEND_MAINLOOP_CUH
#define NSA_ATTEND_MAINLOOP_CUH

#include "attend_scheduler.cuh"

/* ---- Tiles in shared memory ---------------------------------------------------------------- */

/* The shared memory that a thread block may have: on every device from 8.0 on (8.6, 8.9 and 12.0
   have the least), and on Hopper. Tiles have 2 KB less, for what is static. */
enum { NSA__SHARED_DEVICE = 99 * 1024, NSA__SHARED_DEVICE_HOPPER = 227 * 1024 };
enum {
    NSA__SHARED_MOST = NSA__SHARED_DEVICE - 2048,
    NSA__SHARED_HOPPER = NSA__SHARED_DEVICE_HOPPER - 2048
};

/* The shapes of tiles differ by architecture. Device code knows its own; the host asks which code
   its device has loaded (nsa__cuda_on_hopper). */
enum { NSA__HOPPER = NSA__USES_WGMMA };

/* For a kernel to assert: its dynamic bytes fit beside those of its arrays, which are filled up
   to a multiple of 1024. */
template <size_t DYNAMIC, size_t ARRAYS> struct nsa__cuda_shared_fits {
    static constexpr size_t most = NSA__HOPPER ? NSA__SHARED_DEVICE_HOPPER : NSA__SHARED_DEVICE;
    static constexpr bool value = (ARRAYS + 1023) / 1024 * 1024 + DYNAMIC <= most;
};

#ifdef NSA_SIMT
static inline nsa_status nsa__cuda_on_hopper(bool *hopper) {
    *hopper = NSA__HOPPER;
    return NSA_OK;
}
#else
/* Its launch bounds tell the host whether this device runs code that multiplies by wgmma. */
static __global__ void __launch_bounds__(NSA__HOPPER ? 256 : 128) nsa__cuda_probe_kernel() {}

static inline nsa_status nsa__cuda_on_hopper(bool *hopper) {
    enum { DEVICES = 64 };
    static std::atomic<int> known[DEVICES]; /* 0: not asked yet; the kernel's threads */
    int device = 0;
    cudaFuncAttributes probe;
    NSA__CHECK(nsa__cuda_status(cudaGetDevice(&device)));
    int threads = device < DEVICES ? known[device].load() : 0;
    if (!threads) {
        NSA__CHECK(nsa__cuda_status(
            cudaFuncGetAttributes(&probe, reinterpret_cast<const void *>(nsa__cuda_probe_kernel))));
        threads = probe.maxThreadsPerBlock;
        if (device < DEVICES) known[device].store(threads);
    }
    *hopper = threads == 256;
    return NSA_OK;
}
#endif

/* A kernel keeps one tile of rows in shared memory, TILE_WIDTH wide, and loads tiles of the other
   side through two stages, STAGE_WIDTH wide: the largest that fit, of at most MOST rows or, in f32,
   MOST_F32, because products are unrolled over them. A warp owns 16 rows of the tile, which has 64,
   or TILE_MOST if the stages keep their size: then they are loaded less often. The field calls the
   two BLOCK_M and BLOCK_N: forward and dq keep queries (BLOCK_M) and load keys (BLOCK_N), dkv keeps
   keys and loads queries. */
template <typename T, int TILE_WIDTH, int STAGE_WIDTH, int MOST, int MOST_F32, int HOPPER,
          int TILE_MOST = 64>
struct nsa__cuda_tile_shape {
    static constexpr int most = sizeof(T) == 2 ? MOST : MOST_F32;
    static constexpr int limit = HOPPER ? NSA__SHARED_HOPPER : NSA__SHARED_MOST;
    static constexpr int bytes(int tile, int stage) {
        return static_cast<int>(sizeof(T)) * (tile * TILE_WIDTH + 2 * stage * STAGE_WIDTH);
    }
    static constexpr int stage_with(int tile) {
        return bytes(tile, most) <= limit       ? most
               : bytes(tile, most / 2) <= limit ? most / 2
               : bytes(tile, most / 4) <= limit ? most / 4
                                                : 0;
    }
    static constexpr int LEAST = sizeof(T) == 2 ? 16 : 8; /* of a product */
    static constexpr int FEW = stage_with(64) >= LEAST ? 64 : 32;
    static constexpr int STAGE = stage_with(FEW);
    static constexpr int TILE = sizeof(T) == 2 && stage_with(TILE_MOST) == STAGE ? TILE_MOST : FEW;
    static constexpr int BYTES = bytes(TILE, STAGE);
    static constexpr int WARPS = TILE / 16;
    static_assert(STAGE >= LEAST, "does not fit shared memory");
};

/* Starts copying a tile's keys or values out of pages, each row from where its page is. */
template <typename T, int D, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_stage_pages(T *to, const nsa__cuda_attend_params &params,
                                       const nsa__cuda_attend_head &at, const nsa_tensor &x,
                                       int width, int begin, int end) {
    const T *const data = static_cast<const T *>(x.data);
    nsa__cuda_tile_copy<T, D, KEYS, THREADS>(to, width, data, [&](int r) {
        return begin + r < end ? data + nsa__cuda_row_offset(params, at, x, begin + r) : nullptr;
    });
}

/* Starts copying a tile's keys and values, which lie side by side in a stage. PAGED: they may lie
   in pages. */
template <typename T, int DK, int DV, int KEYS, int THREADS, bool PAGED>
NSA__DEVICE void nsa__cuda_stage_keys(T *stage, const nsa__cuda_attend_params &params,
                                      const nsa__cuda_attend_head &at,
                                      const nsa__cuda_key_tile &tile) {
    if (PAGED && params.d.pages) {
        nsa__cuda_stage_pages<T, DK, KEYS, THREADS>(stage, params, at, params.x.k, params.d.dim,
                                                    tile.begin, tile.end);
        nsa__cuda_stage_pages<T, DV, KEYS, THREADS>(stage + KEYS * DK, params, at, params.x.v,
                                                    params.d.dim_v, tile.begin, tile.end);
        return;
    }
    const T *k =
        nsa__row_of<const T>(params.x.k, at.seq.key_batch, at.key_row + tile.begin, at.kv_head);
    const T *v =
        nsa__row_of<const T>(params.x.v, at.seq.key_batch, at.key_row + tile.begin, at.kv_head);
    const int count = tile.end - tile.begin;
    nsa__cuda_tile_copy_rows<T, DK, KEYS, THREADS>(stage, params.d.dim, k, params.x.k.token, count);
    nsa__cuda_tile_copy_rows<T, DV, KEYS, THREADS>(stage + KEYS * DK, params.d.dim_v, v,
                                                   params.x.v.token, count);
}

/* Zeros the rows of a stage that hold a non-finite value. */
template <typename T, int DK, int DV, int KEYS, int THREADS>
NSA__DEVICE void nsa__cuda_clean_stage(T *stage, uint64_t bad) {
    nsa__cuda_tile_zero<T, DK, KEYS, THREADS>(stage, bad);
    nsa__cuda_tile_zero<T, DV, KEYS, THREADS>(stage + KEYS * DK, bad);
    nsa__cuda_tiles_written<T, KEYS>();
}

/* ---- Scores and softmax -------------------------------------------------------------------- */

NSA__DEVICE float nsa__cuda_quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
NSA__DEVICE float nsa__cuda_quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* What belongs to keys that a row does not see becomes `value`. */
template <int N>
NSA__DEVICE void nsa__cuda_hide(float (&s)[N][4], const nsa__cuda_key_span (&seen)[2],
                                float value) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    bool whole = true;
#pragma unroll
    for (int h = 0; h < 2; h++) whole &= seen[h].begin == 0 && seen[h].end == 8 * N;
    if (__all_sync(0xffffffffu, whole)) return;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int c = 8 * n + column + e % 2;
            if (c < seen[e / 2].begin || c >= seen[e / 2].end) s[n][e] = value;
        }
}

/* Scales the scores. Decoding has to find the same bits, so no compiler may join the product with a
   later sum in one of the two. */
template <int N> NSA__DEVICE void nsa__cuda_scale_tile(float (&s)[N][4], float scale) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = __fmul_rn(s[n][e], scale);
}

/* And those of keys that a row does not see become -inf. */
template <int N>
NSA__DEVICE void nsa__cuda_mask_tile(float (&s)[N][4], const nsa__cuda_key_span (&seen)[2],
                                     float scale) {
    nsa__cuda_scale_tile(s, scale);
    nsa__cuda_hide(s, seen, -INFINITY);
}

/* p of a product, with the score's bits of nsa__cuda_scale_tile: never above 1. */
NSA__DEVICE float nsa__cuda_p(float product, float scale, float lse) {
    return nsa__exp(fminf(__fmul_rn(product, scale) - lse, 0.0f));
}

/* What is subtracted from scores whose largest is `most`: never an infinity. */
NSA__DEVICE float nsa__cuda_base(float most) {
    return most == -INFINITY ? 0.0f : most;
}

/* What sums relative to the largest score `before` become relative to `most`: times exactly 1 where
   it stays. Decoding goes through the same steps tile by tile (decode_attend.cuh). */
NSA__DEVICE float nsa__cuda_shrink(float before, float most) {
    return most == before ? 1.0f : nsa__exp(before - nsa__cuda_base(most));
}

/* ---- Choosing a kernel --------------------------------------------------------------------- */

/* The padded widths that are compiled: 64, 128, 192 with 128 (the paper's), and the largest. */
template <template <typename, int, int> class Run, typename T, typename Params>
static nsa_status nsa__cuda_attend_choose_width(const Params &params, cudaStream_t stream) {
    constexpr int MOST = NSA_CUDA_MAX_DIM;
    const int dim = params.d.dim, dim_v = params.d.dim_v;
    if (dim <= 64 && dim_v <= 64) return Run<T, 64, 64>::launch(params, stream);
    if constexpr (MOST >= 128)
        if (dim <= 128 && dim_v <= 128) return Run<T, 128, 128>::launch(params, stream);
    if constexpr (MOST >= 192) {
        if (dim <= 192 && dim_v <= 128) return Run<T, 192, 128>::launch(params, stream);
        return Run<T, MOST, MOST>::launch(params, stream);
    }
    return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
}

template <template <typename, int, int> class Run, typename Params>
static nsa_status nsa__cuda_attend_choose(const Params &params, cudaStream_t stream) {
    switch (params.x.q.dtype) {
#ifndef NSA_CUDA_NO_F32
    case NSA_F32:
        return nsa__cuda_attend_choose_width<Run, float>(params, stream);
#endif
#ifndef NSA_CUDA_NO_BF16
    case NSA_BF16:
        return nsa__cuda_attend_choose_width<Run, __nv_bfloat16>(params, stream);
#endif
#ifndef NSA_CUDA_NO_F16
    case NSA_F16:
        return nsa__cuda_attend_choose_width<Run, __half>(params, stream);
#endif
    default:
        return nsa__error(NSA_ERROR_DTYPE, NSA__AT_q);
    }
}

/* ---- Calls --------------------------------------------------------------------------------- */

/* What a call and a step know of a branch before they have views. */
static void nsa__cuda_branch_plan(nsa__cuda_branch *params, const nsa_desc *d,
                                  nsa__cuda_branch_keys branch) {
    const double scale = d->scale != 0 ? d->scale : 1 / sqrt(static_cast<double>(d->dim));
    params->d = nsa__cuda_all_queries(d);
    params->branch = branch;
    params->lists = branch == NSA__KEYS_SLC ? nsa__list_heads(d) / d->kv_heads : 1;
    params->group = d->heads / d->kv_heads / params->lists;
    params->list_width = nsa_block_list_width(d);
    params->scale = static_cast<float>(scale);
}

/* The workspace that forward and backward share, dealt out; the size query is the same code. */
static void nsa__cuda_attend_plan(nsa__cuda_attend_params *params, const nsa_desc *d,
                                  nsa__cuda_branch_keys branch, nsa__arena *arena) {
    const int64_t keys = branch == NSA__KEYS_CMP ? nsa_cmp_count(d, d->tokens) : d->tokens;
    *params = {};
    nsa__cuda_branch_plan(params, d, branch);
    params->spread = 1;
    params->words = /* one more, because a tile may straddle */
        nsa__cuda_extent_of(d, nsa__cuda_ceil_div(keys, 64) + 1, 1,
                            64 * (branch == NSA__KEYS_CMP ? d->cmp_stride : int64_t(1)), 2);
    params->bad = nsa__cuda_take<uint64_t>(arena, params->words.total * d->kv_heads);
    if (d->begins && d->rows)
        params->ascending = nsa__cuda_take<int32_t>(arena, static_cast<int64_t>(d->batch) + 1);
    if (branch == NSA__KEYS_CMP && d->begins)
        params->cmp_begins = nsa__cuda_take<int32_t>(arena, static_cast<int64_t>(d->batch) + 1);
}

typedef void nsa__cuda_attend_planner(nsa__cuda_attend_params *, const nsa_desc *,
                                      nsa__cuda_branch_keys, nsa__arena *);

static const nsa_desc *nsa__cuda_branch_desc(const nsa_desc *d, nsa__cuda_branch_keys branch,
                                             nsa_desc *own) {
    return nsa__desc_using(d,
                           branch == NSA__KEYS_CMP   ? NSA__USES_CMP
                           : branch == NSA__KEYS_SLC ? NSA__USES_SLC
                                                     : 0,
                           own);
}

static size_t nsa__cuda_attend_bytes(const nsa_desc *d, nsa__cuda_branch_keys branch,
                                     nsa__cuda_attend_planner *plan) {
    nsa__cuda_attend_params params;
    nsa__arena arena = nsa__cuda_arena_at(NULL);
    nsa_desc own;
    d = nsa__cuda_branch_desc(d, branch, &own);
    if (nsa__cuda_check_desc(d) != NSA_OK) return 0;
    plan(&params, d, branch, &arena);
    return nsa__cuda_arena_bytes(&arena);
}

/* The parameters of a call whose workspace is large enough. */
static nsa__cuda_attend_params nsa__cuda_attend_params_of(const nsa_desc *d,
                                                          nsa__cuda_branch_keys branch,
                                                          nsa__cuda_attend_planner *plan,
                                                          void *workspace) {
    nsa__cuda_attend_params params;
    nsa__arena arena = nsa__cuda_arena_at(workspace);
    plan(&params, d, branch, &arena);
    return params;
}

/* What comes before any attention: begins that ascend, where compressed rows begin, which keys are
   not finite. */
static nsa_status nsa__cuda_attend_prepare(nsa__cuda_attend_params *params, cudaStream_t stream) {
    if (params->ascending) {
        NSA__CHECK(nsa__cuda_status(NSA_LAUNCH(nsa__cuda_ascending_kernel, dim3(1), dim3(32), 0,
                                               stream, params->d, params->ascending)));
        params->d.begins = params->ascending;
    }
    nsa__cuda_attend_params scan = *params;
    dim3 grid;
    if (params->cmp_begins) {
        NSA__CHECK(
            nsa__cuda_cmp_begins(&params->d, const_cast<int32_t *>(params->cmp_begins), stream));
    }
    nsa__cuda_extent tiles = params->words; /* of words; spare is enough for them, too */
    tiles.each = nsa__cuda_ceil_div(tiles.each, NSA__SCAN_WARPS);
    tiles = nsa__cuda_extent_of(&scan.d, tiles.each, 1, tiles.den * NSA__SCAN_WARPS, 2);
    NSA__CHECK(nsa__cuda_attend_grid(&scan, tiles, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_attend_scan_kernel, grid,
                                       dim3(32 * NSA__SCAN_WARPS), 0, stream, scan));
}

/* One dtype for all; what the lists hold is not looked at. */
static nsa__checked nsa__cuda_attend_checked(const nsa_attend *x, const nsa_desc *d,
                                             nsa__cuda_branch_keys branch, int forward) {
    return nsa__cuda_checked_of(d, nsa__cuda_dtype_of(&x->q, d), forward, branch == NSA__KEYS_CMP);
}
static nsa_status nsa__cuda_attend_check(const nsa_attend *x, const nsa_desc *d,
                                         nsa__cuda_branch_keys branch, int forward) {
    const nsa__checked c = nsa__cuda_attend_checked(x, d, branch, forward);
    const int views = branch == NSA__KEYS_SLC ? NSA__ATTEND_VIEWS : NSA__ATTEND_VIEWS - 1;
    return nsa__check_views(&c, nsa__attend_views, views, x);
}

#endif
