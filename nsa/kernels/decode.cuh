/* decode.cuh: the decoding step: append, compress, attend, commit, all positions on the device.
   Twin: nsa.h, "Decoding", nsa_decode.
   Not here: the cache (decode_cache.cuh), attention (decode_attend.cuh), selection
   (decode_select.cuh).

   A step of one token is seven launches, if phi is no mlp: append, blocks, then for each slice of
   tokens cmp (and a memset before it), sums, rank, keys and finish.

   What is launched hangs on sizes that the host knows, so that a captured step can be replayed. New
   tokens are attended from in slices, which bounds the workspace; their rows are all appended
   before. */
#ifndef NSA_DECODE_CUH
#define NSA_DECODE_CUH

#include "decode_select.cuh"

enum { NSA__DECODE_SLICE = 16, NSA__DECODE_SCORES = 1 << 26 };

/* A step's share of the workspace. */
struct nsa__cuda_decode_plan {
    nsa__cuda_decode_step step;
    nsa_desc blocks_desc; /* of the compression: packed sequences of at most so many rows */
    int blocks;           /* that a sequence completes, at most */
    nsa_compress mlp[2];  /* phi of k and v; of mlp with packed rows as x and out */
    void *compress;
    nsa__cuda_decode_params of[3]; /* cmp, slc, win */
    nsa__cuda_decode_select_params select;
};

/* Tokens of a slice: fewer if the scores of compressed keys, which lie in the workspace, would be
   many. */
static int nsa__cuda_decode_slice(const nsa_desc *d, int count) {
    const int64_t of_token = nsa__cuda_decode_scores(d) * d->heads * static_cast<int64_t>(d->batch);
    int slice = NSA__DECODE_SLICE;
    while (slice > 1 && slice * of_token > NSA__DECODE_SCORES) slice /= 2;
    if (count < slice) slice = count;
    return slice;
}

/* No step takes more tokens of a sequence, whatever `count` allows; sizes need at least one. Of the
   cache only the desc counts, so that sizes can be asked for before it has memory. */
static int nsa__cuda_decode_most(const nsa_cache *cache, int count) {
    const int most = count < cache->desc.tokens ? count : cache->desc.tokens;
    return most > 1 ? most : 1;
}

static nsa_tensor nsa__cuda_decode_packed(nsa__arena *a, nsa_dtype dtype, int64_t rows, int heads,
                                          int width) {
    nsa_tensor x = nsa_tensor_bthd(NULL, dtype, 0, heads, width);
    x.batch = 0;
    x.data =
        nsa__cuda_take<char>(a, rows * x.token * static_cast<int64_t>(nsa__dtype_bytes(dtype)));
    return x;
}

static void nsa__cuda_decode_plan_branch(nsa__cuda_decode_params *params, const nsa_desc *d,
                                         nsa_dtype dtype, nsa__cuda_branch_keys branch,
                                         nsa__arena *a) {
    *params = {};
    nsa__cuda_branch_plan(params, d, branch);
    nsa__cuda_decode_take(params, dtype, a);
}

static void nsa__cuda_decode_plan_of(nsa__cuda_decode_plan *p, const nsa_attention *x,
                                     const nsa_cache *cache, int count, nsa__arena *a) {
    nsa_desc d = cache->desc;
    const nsa_dtype dtype = x->q.dtype; /* the cache's too */
    static const int32_t packed = 0;
    d.first = 0;
    d.count = nsa__cuda_decode_slice(&d, count);
    p->step.positions = nsa__cuda_take<int2>(a, d.batch);
    p->step.begins = nsa__cuda_take<int32_t>(a, d.batch + int64_t(1));
    p->step.cmp_begins = nsa__cuda_take<int32_t>(a, d.batch + int64_t(1));
    p->blocks = (count - 1) / d.cmp_stride + 1;
    p->blocks_desc = d;
    p->blocks_desc.tokens = (p->blocks - 1) * d.cmp_stride + d.cmp_block;
    p->blocks_desc.count = 0;
    p->blocks_desc.rows = 0;
    p->blocks_desc.begins = p->step.begins ? p->step.begins : &packed;
    const int64_t rows = static_cast<int64_t>(d.batch) * p->blocks_desc.tokens;
    const int64_t blocks = static_cast<int64_t>(d.batch) * p->blocks;
    const nsa_compress *const phi[2] = {&x->k_cmp, &x->v_cmp};
    size_t bytes = 0;
    for (int i = 0; i < 2; i++) {
        p->mlp[i] = *phi[i];
        if (phi[i]->phi != NSA_PHI_MLP) continue;
        p->mlp[i].x = nsa__cuda_decode_packed(a, dtype, rows, d.kv_heads, phi[i]->dim);
        p->mlp[i].out = nsa__cuda_decode_packed(a, dtype, blocks, d.kv_heads, phi[i]->dim);
        const size_t needed = nsa__cuda_compress_bytes(&p->mlp[i], &p->blocks_desc, 0);
        bytes = needed > bytes ? needed : bytes;
    }
    p->compress = nsa__cuda_take<char>(a, static_cast<int64_t>(bytes));
    nsa__cuda_decode_plan_branch(&p->of[0], &d, dtype, NSA__KEYS_CMP, a);
    nsa__cuda_decode_plan_branch(&p->of[1], &d, dtype, NSA__KEYS_SLC, a);
    nsa__cuda_decode_plan_branch(&p->of[2], &d, dtype, NSA__KEYS_WIN, a);
    p->select = {};
    p->select.cmp.d = d;
    nsa__cuda_decode_select_take(&p->select, a);
}

extern "C" size_t nsa_cuda_decode_workspace_size(const nsa_attention *x, const nsa_cache *cache,
                                                 int count) {
    if (!x || !cache || count < 0 || nsa__cuda_attention_check_sizes(x, &cache->desc) != NSA_OK)
        return 0;
    nsa__cuda_decode_plan p;
    nsa__arena a = nsa__cuda_arena_at(NULL);
    nsa__cuda_decode_plan_of(&p, x, cache, nsa__cuda_decode_most(cache, count), &a);
    return nsa__cuda_arena_bytes(&a);
}

/* ---- Checks ---------------------------------------------------------------------------------- */

/* x over the cache's keys. */
static nsa_attention nsa__cuda_decode_views(const nsa_attention *x, const nsa_cache *cache) {
    nsa_attention all = *x;
    all.k_slc = cache->k_slc;
    all.v_slc = cache->v_slc;
    all.k_win = cache->k_win;
    all.v_win = cache->v_win;
    all.k_cmp.x = cache->k_raw;
    all.v_cmp.x = cache->v_raw;
    all.k_cmp.out = cache->k_cmp;
    all.v_cmp.out = cache->v_cmp;
    return all;
}

/* With `counts` the device knows how many tokens come. */
static nsa_status nsa__cuda_decode_check(const nsa_attention *x, const nsa_cache *cache, int count,
                                         const int32_t *counts) {
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    nsa_status s = nsa__cuda_attention_check_sizes(x, &cache->desc);
    if (s != NSA_OK) return s;
    NSA__CHECK(nsa__check_decodes(&cache->desc));
    if (count < 0) return nsa__error(NSA_ERROR_RANGE, NSA__AT_count);
    if (!counts && (count > cache->desc.tokens || count - 1 > cache->max_rewind))
        return nsa__error(NSA_ERROR_CACHE, NSA__AT_cache);
    nsa_desc d = cache->desc;
    d.count = count && d.tokens ? nsa__cuda_decode_most(cache, count) : 0;
    const nsa_attention all = nsa__cuda_decode_views(x, cache);
    if ((s = nsa__cuda_attention_check(&all, &d, 1)) != NSA_OK) return s;
    return nsa__check_inputs(&nsa__cuda_side, x, &d);
}

/* ---- The step -------------------------------------------------------------------------------- */

/* Whether the step can be taken, and its rows into the cache. */
static nsa_status nsa__cuda_decode_append(const nsa_attention *x, nsa_cache *cache, int count,
                                          const int32_t *counts, const nsa__cuda_cache_bits *bits,
                                          const nsa__cuda_decode_plan *p, nsa_reads *reads,
                                          nsa_status *verdict, cudaStream_t stream) {
    const nsa_desc *d = &cache->desc;
    nsa__cache_part parts[NSA__PARTS];
    nsa_tensor from[NSA__INPUTS];
    nsa__cuda_decode_inputs inputs = {};
    dim3 grid;
    nsa__cache_parts(cache, parts);
    nsa__cache_inputs(x, from);
    for (int i = 0; i < NSA__INPUTS; i++) {
        inputs.of[i / 2].from[i % 2] = from[i];
        inputs.of[i / 2].rows.to[i % 2] = *parts[i].rows;
        inputs.of[i / 2].rows.ring = parts[i].ring;
        inputs.of[i / 2].rows.words = bits->words;
    }
    inputs.of[0].rows.bits = bits->slc;
    inputs.of[1].rows.bits = bits->win;
    NSA__CHECK(
        nsa__cuda_decode_put_grid(d, nsa__cuda_decode_most(cache, count), NSA__INPUTS / 2, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_append_kernel, grid,
                                       dim3(NSA__DECODE_THREADS), 0, stream, *cache, inputs, count,
                                       counts, p->step, reads, verdict));
}

/* The compressed rows that the new tokens complete. */
static nsa_status nsa__cuda_decode_compress(const nsa_cache *cache,
                                            const nsa__cuda_cache_bits *bits,
                                            const nsa__cuda_decode_plan *p, cudaStream_t stream) {
    const nsa_desc *d = &cache->desc;
    const nsa_tensor raw[2] = {cache->k_raw, cache->v_raw};
    nsa__cuda_decode_made made = {};
    dim3 grid;
    made.ring = static_cast<int>(cache->k_raw.batch / cache->k_raw.token);
    made.rows = {{cache->k_cmp, cache->v_cmp}, 0, bits->cmp, bits->cmp_words};
    for (int i = 0; i < 2; i++) {
        made.phi[i] = p->mlp[i];
        if (p->mlp[i].phi != NSA_PHI_MLP) {
            made.phi[i].x = raw[i];
            continue;
        }
        const int width = p->mlp[i].dim;
        NSA__CHECK(nsa__cuda_decode_rows_grid(d, p->blocks_desc.tokens, width, &grid));
        NSA__CHECK(nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_stage_kernel, grid,
                                               dim3(NSA__DECODE_THREADS), 0, stream, *d, raw[i],
                                               p->mlp[i].x, width, made.ring, p->step)));
        NSA__CHECK(
            nsa__cuda_compress_forward_run(&p->mlp[i], &p->blocks_desc, p->compress, stream));
    }
    NSA__CHECK(nsa__cuda_decode_put_grid(d, p->blocks, 1, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_blocks_kernel, grid,
                                       dim3(NSA__DECODE_THREADS), 0, stream, *d, made, p->step));
}

/* A view from its row `first` on. */
static nsa_tensor nsa__cuda_rows_from(nsa_tensor x, int first) {
    x.data = static_cast<char *>(x.data) +
             x.token * first * static_cast<int64_t>(nsa__dtype_bytes(x.dtype));
    return x;
}

/* New tokens first .. first + count - 1; `last`: the step's last. */
static nsa_status nsa__cuda_decode_attend(const nsa_attention *x, const nsa_cache *cache,
                                          const nsa__cuda_cache_bits *bits, int first, int count,
                                          bool last, nsa__cuda_decode_plan *p, nsa_reads *reads,
                                          cudaStream_t stream) {
    nsa_attention one = nsa__cuda_decode_views(x, cache);
    nsa_tensor *const queries[] = {&one.q,       &one.gates,   &one.blocks,  &one.out_cmp,
                                   &one.out_slc, &one.out_win, &one.lse_cmp, &one.lse_slc,
                                   &one.lse_win, &one.out};
    for (nsa_tensor *view : queries) *view = nsa__cuda_rows_from(*view, first);
    const nsa__chain c = nsa__chain_of(&one);
    const struct {
        const nsa_attend *x;
        uint64_t *bits;
        int words, ring;
        int64_t *reads;
    } branches[3] = {{&c.cmp, bits->cmp, bits->cmp_words, 0, reads ? &reads->cmp : NULL},
                     {&c.slc, bits->slc, bits->words, 0, reads ? &reads->slc : NULL},
                     {&c.win, bits->win, bits->words,
                      static_cast<int>(cache->k_win.batch / cache->k_win.token),
                      reads ? &reads->win : NULL}};
    nsa_desc d = p->of[0].d;
    d.first = first;
    d.count = count;
    for (int i = 0; i < 3; i++) {
        nsa__cuda_decode_params *params = &p->of[i];
        params->d = d;
        params->x = *branches[i].x;
        params->bad = branches[i].bits;
        params->words = branches[i].words;
        params->ring = branches[i].ring;
        params->reads = branches[i].reads;
        params->positions = {p->step.positions};
    }
    const nsa__cuda_decode_branches slice = {d, c.cmp, p->of};
    NSA__CHECK(nsa__cuda_attend_choose<nsa__cuda_decode_cmp_launch>(slice, stream));
    p->select.cmp = p->of[0];
    p->select.x = c.select;
    const nsa__cuda_decode_select_call call = {&p->select, stream};
    NSA__CHECK(nsa__cuda_select_choose(one.q.dtype, &d, call));
    NSA__CHECK(nsa__cuda_attend_choose<nsa__cuda_decode_keys_launch>(slice, stream));
    return nsa__cuda_decode_finish_launch(slice, &c.gate, cache, last, stream);
}

extern "C" nsa_status nsa_cuda_decode(const nsa_attention *x, nsa_cache *cache, int count,
                                      const int32_t *counts, nsa_reads *reads, nsa_status *verdict,
                                      void *workspace, size_t bytes, cudaStream_t stream) {
    nsa_status s = nsa__cuda_decode_check(x, cache, count, counts);
    if (s != NSA_OK) return s;
    s = nsa__cuda_check_workspace(nsa_cuda_decode_workspace_size(x, cache, count), workspace,
                                  bytes);
    if (s != NSA_OK) return s;
    nsa__cuda_decode_plan p;
    nsa__arena a = nsa__cuda_arena_at(workspace);
    nsa__cuda_decode_plan_of(&p, x, cache, nsa__cuda_decode_most(cache, count), &a);
    const nsa__cuda_cache_bits bits = nsa__cuda_cache_bits_of(cache);
    NSA__CHECK(nsa__cuda_decode_append(x, cache, count, counts, &bits, &p, reads, verdict, stream));
    if (count == 0 || cache->desc.tokens == 0) return NSA_OK;
    count = nsa__cuda_decode_most(cache, count);
    NSA__CHECK(nsa__cuda_decode_compress(cache, &bits, &p, stream));
    const int slice = p.of[0].d.count;
    for (int first = 0; first < count; first += slice) {
        const bool last = count - first <= slice;
        NSA__CHECK(nsa__cuda_decode_attend(x, cache, &bits, first, last ? count - first : slice,
                                           last, &p, reads, stream));
    }
    return NSA_OK;
}

#endif
