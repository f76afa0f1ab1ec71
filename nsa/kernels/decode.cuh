/* decode.cuh: the decoding step: append, compress, attend, commit, all positions on the device.
   Twin: nsa.h, "Decoding", nsa_decode.
   Not here: the cache (decode_cache.cuh), attention (decode_attend.cuh), selection
   (decode_select.cuh).

   What is launched hangs on sizes that the host knows, so that a captured step can be replayed. New
   tokens are attended from in slices, which bounds the workspace; their rows are all appended
   before. */
#ifndef NSA_DECODE_CUH
#define NSA_DECODE_CUH

#include "decode_select.cuh"

enum { NSA__DECODE_SLICE = 16 };

/* A step's share of the workspace. */
struct nsa__cuda_decode_plan {
    nsa__cuda_decode_step step;
    nsa_desc blocks_desc; /* of the compression: packed sequences of at most so many rows */
    int blocks;           /* that a sequence completes, at most */
    nsa_tensor k_rows, v_rows, k_blocks, v_blocks;
    void *compress;
    nsa__cuda_decode_params cmp, slc, win;
    nsa__cuda_decode_select_params select;
};

/* No step takes more tokens of a sequence, whatever `count` allows; sizes need at least one. Of the
   cache only the desc counts, so that sizes can be asked for before it has memory. */
static int nsa__cuda_decode_most(const nsa_cache *cache, int count) {
    const int most = count < cache->desc.tokens ? count : cache->desc.tokens;
    return most > 1 ? most : 1;
}

static nsa_tensor nsa__cuda_decode_packed(nsa__cuda_arena *a, nsa_dtype dtype, int64_t rows,
                                          int heads, int width) {
    nsa_tensor x = nsa_tensor_bthd(NULL, dtype, 0, heads, width);
    x.batch = 0;
    x.data =
        nsa__cuda_take<char>(a, rows * x.token * static_cast<int64_t>(nsa__dtype_bytes(dtype)));
    return x;
}

/* phi over the copied rows. */
static nsa_compress nsa__cuda_decode_phi(const nsa_compress *x, nsa_tensor rows, nsa_tensor out) {
    nsa_compress phi = *x;
    phi.x = rows;
    phi.out = out;
    return phi;
}

static void nsa__cuda_decode_plan_job(nsa__cuda_decode_params *params, const nsa_desc *d,
                                      nsa__cuda_branch_keys branch, nsa__cuda_arena *a) {
    nsa__cuda_arena bits = {NULL, 0}; /* the cache has them */
    *params = {};
    nsa__cuda_attend_plan(params, d, branch, &bits);
    nsa__cuda_decode_take(params, a);
}

static void nsa__cuda_decode_plan_of(nsa__cuda_decode_plan *p, const nsa_attention *x,
                                     const nsa_cache *cache, int count, nsa__cuda_arena *a) {
    nsa_desc d = cache->desc;
    const nsa_dtype dtype = x->q.dtype; /* the cache's too */
    static const int32_t packed = 0;
    d.first = 0;
    d.count = count < NSA__DECODE_SLICE ? count : NSA__DECODE_SLICE;
    p->step.places = nsa__cuda_take<int2>(a, d.batch);
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
    p->k_rows = nsa__cuda_decode_packed(a, dtype, rows, d.kv_heads, d.dim);
    p->v_rows = nsa__cuda_decode_packed(a, dtype, rows, d.kv_heads, d.dim_v);
    p->k_blocks = nsa__cuda_decode_packed(a, dtype, blocks, d.kv_heads, d.dim);
    p->v_blocks = nsa__cuda_decode_packed(a, dtype, blocks, d.kv_heads, d.dim_v);
    const nsa_compress k = nsa__cuda_decode_phi(&x->k_cmp, p->k_rows, p->k_blocks);
    const nsa_compress v = nsa__cuda_decode_phi(&x->v_cmp, p->v_rows, p->v_blocks);
    const size_t k_bytes = nsa__cuda_compress_bytes(&k, &p->blocks_desc, 0);
    const size_t v_bytes = nsa__cuda_compress_bytes(&v, &p->blocks_desc, 0);
    p->compress =
        nsa__cuda_take<char>(a, static_cast<int64_t>(k_bytes > v_bytes ? k_bytes : v_bytes));
    nsa__cuda_decode_plan_job(&p->cmp, &d, NSA__KEYS_CMP, a);
    nsa__cuda_decode_plan_job(&p->slc, &d, NSA__KEYS_SLC, a);
    nsa__cuda_decode_plan_job(&p->win, &d, NSA__KEYS_WIN, a);
    p->select = {};
    p->select.d = d;
    p->select.scale2 = p->cmp.scale2;
    nsa__cuda_decode_select_take(&p->select, a);
}

extern "C" size_t nsa_cuda_decode_workspace_size(const nsa_attention *x, const nsa_cache *cache,
                                                 int count) {
    if (!x || !cache || count < 0 || nsa__cuda_attention_check_sizes(x, &cache->desc) != NSA_OK)
        return 0;
    nsa__cuda_decode_plan p;
    nsa__cuda_arena a = nsa__cuda_arena_at(NULL);
    nsa__cuda_decode_plan_of(&p, x, cache, nsa__cuda_decode_most(cache, count), &a);
    return nsa__cuda_arena_bytes(&a);
}

/* ---- Checks ---------------------------------------------------------------------------------- */

/* The new rows in the order of the cache's first six parts. */
static void nsa__cuda_decode_inputs(const nsa_attention *x, nsa_tensor inputs[NSA__CACHE_INPUTS]) {
    const nsa_tensor all[NSA__CACHE_INPUTS] = {x->k_slc, x->v_slc,   x->k_win,
                                               x->v_win, x->k_cmp.x, x->v_cmp.x};
    memcpy(inputs, all, sizeof all);
}

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

static nsa_status nsa__cuda_decode_check(const nsa_attention *x, const nsa_cache *cache,
                                         int count) {
    static const int fields[NSA__CACHE_INPUTS] = {NSA__AT_k_slc, NSA__AT_v_slc,   NSA__AT_k_win,
                                                  NSA__AT_v_win, NSA__AT_k_cmp_x, NSA__AT_v_cmp_x};
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    nsa_status s = nsa__cuda_attention_check_sizes(x, &cache->desc);
    if (s != NSA_OK) return s;
    NSA__CHECK(nsa__cuda_check_decodes(&cache->desc));
    if (count < 0) return nsa__error(NSA_ERROR_RANGE, NSA__AT_count);
    nsa_desc d = cache->desc;
    d.count = count && d.tokens ? nsa__cuda_decode_most(cache, count) : 0;
    const nsa_attention all = nsa__cuda_decode_views(x, cache);
    if ((s = nsa__cuda_attention_check(&all, &d, 1)) != NSA_OK) return s;
    nsa_tensor inputs[NSA__CACHE_INPUTS];
    nsa__cuda_decode_inputs(x, inputs);
    for (int i = 0; s == NSA_OK && i < NSA__CACHE_INPUTS; i++) {
        const nsa__shape shape = {d.batch, d.count, d.kv_heads, i % 2 ? d.dim_v : d.dim};
        s = nsa__cuda_check_rows(&inputs[i], shape, NSA__FLOATS, 0, fields[i]);
    }
    return s;
}

/* ---- The step -------------------------------------------------------------------------------- */

static nsa_status nsa__cuda_decode_append(const nsa_attention *x, nsa_cache *cache, int count,
                                          const nsa__cuda_decode_plan *p, cudaStream_t stream) {
    const nsa_desc *d = &cache->desc;
    const int widest = d->dim > d->dim_v ? d->dim : d->dim_v;
    nsa__cuda_cache_part parts[NSA__CACHE_PARTS];
    nsa_tensor inputs[NSA__CACHE_INPUTS];
    nsa__cuda_row_moves moves;
    dim3 grid;
    nsa__cuda_cache_parts(cache, parts);
    nsa__cuda_decode_inputs(x, inputs);
    for (int i = 0; i < NSA__CACHE_INPUTS; i++)
        moves.of[i] = {inputs[i], *parts[i].rows, parts[i].width, parts[i].ring};
    const nsa_status s = nsa__cuda_decode_rows_grid(d, count, widest, NSA__CACHE_INPUTS, &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_append_kernel, grid,
                                       dim3(NSA__DECODE_THREADS), 0, stream, *d, moves,
                                       p->step.places));
}

/* The compressed rows that the new tokens complete. */
static nsa_status nsa__cuda_decode_compress(const nsa_attention *x, const nsa_cache *cache,
                                            const nsa__cuda_decode_plan *p, cudaStream_t stream) {
    const nsa_desc *d = &cache->desc;
    const int widest = d->dim > d->dim_v ? d->dim : d->dim_v;
    const int ring = static_cast<int>(cache->k_raw.batch / cache->k_raw.token);
    nsa__cuda_row_moves in = {}, out = {};
    in.of[0] = {cache->k_raw, p->k_rows, d->dim, ring};
    in.of[1] = {cache->v_raw, p->v_rows, d->dim_v, ring};
    out.of[0] = {p->k_blocks, cache->k_cmp, d->dim, 0};
    out.of[1] = {p->v_blocks, cache->v_cmp, d->dim_v, 0};
    dim3 grid;
    nsa_status s = nsa__cuda_decode_rows_grid(d, p->blocks_desc.tokens, widest, 2, &grid);
    if (s == NSA_OK)
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_stage_kernel, grid,
                                        dim3(NSA__DECODE_THREADS), 0, stream, *d, in, p->step));
    const nsa_compress k = nsa__cuda_decode_phi(&x->k_cmp, p->k_rows, p->k_blocks);
    const nsa_compress v = nsa__cuda_decode_phi(&x->v_cmp, p->v_rows, p->v_blocks);
    if (s == NSA_OK) s = nsa__cuda_compress_forward_run(&k, &p->blocks_desc, p->compress, stream);
    if (s == NSA_OK) s = nsa__cuda_compress_forward_run(&v, &p->blocks_desc, p->compress, stream);
    if (s == NSA_OK) s = nsa__cuda_decode_rows_grid(d, p->blocks, widest, 2, &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_emit_kernel, grid,
                                       dim3(NSA__DECODE_THREADS), 0, stream, *d, out, p->step));
}

static nsa_status nsa__cuda_decode_bits(const nsa_cache *cache, int count,
                                        const nsa__cuda_cache_bits *bits,
                                        const nsa__cuda_decode_plan *p, cudaStream_t stream) {
    const nsa_desc *d = &cache->desc;
    const int ring = static_cast<int>(cache->k_win.batch / cache->k_win.token);
    const nsa__cuda_bits_jobs tokens = {
        {{cache->k_slc, cache->v_slc, bits->slc, bits->words, 0, false},
         {cache->k_win, cache->v_win, bits->win, bits->words, ring, false}}};
    const nsa__cuda_bits_jobs blocks = {
        {{cache->k_cmp, cache->v_cmp, bits->cmp, bits->cmp_words, 0, true}, {}}};
    const int64_t pairs = static_cast<int64_t>(d->batch) * d->kv_heads;
    dim3 grid;
    nsa_status s = nsa__cuda_grid(pairs * ((count - 1) / 64 + 2), &grid);
    grid.y = 2;
    if (s == NSA_OK)
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_bits_kernel, grid, dim3(32), 0, stream, *d,
                                        tokens, p->step.places));
    if (s == NSA_OK) s = nsa__cuda_grid(pairs * ((p->blocks - 1) / 64 + 2), &grid);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_bits_kernel, grid, dim3(32), 0, stream, *d,
                                       blocks, p->step.places));
}

/* A view from its row `first` on. */
static nsa_tensor nsa__cuda_rows_from(nsa_tensor x, int first) {
    x.data = static_cast<char *>(x.data) +
             x.token * first * static_cast<int64_t>(nsa__dtype_bytes(x.dtype));
    return x;
}

/* New tokens first .. first + count - 1. */
static nsa_status nsa__cuda_decode_attend(const nsa_attention *x, const nsa_cache *cache,
                                          const nsa__cuda_cache_bits *bits, int first, int count,
                                          nsa__cuda_decode_plan *p, nsa_reads *reads,
                                          cudaStream_t stream) {
    nsa_attention one = nsa__cuda_decode_views(x, cache);
    nsa_tensor *const queries[] = {&one.q,       &one.gates,   &one.blocks,  &one.out_cmp,
                                   &one.out_slc, &one.out_win, &one.lse_cmp, &one.lse_slc,
                                   &one.lse_win, &one.out};
    for (nsa_tensor *view : queries) *view = nsa__cuda_rows_from(*view, first);
    const nsa__chain c = nsa__chain_of(&one);
    const nsa__cuda_places places = {p->step.places};
    const struct {
        nsa__cuda_decode_params *params;
        const nsa_attend *x;
        uint64_t *bits;
        int words, ring;
        int64_t *reads;
    } branches[3] = {{&p->cmp, &c.cmp, bits->cmp, bits->cmp_words, 0, reads ? &reads->cmp : NULL},
                     {&p->slc, &c.slc, bits->slc, bits->words, 0, reads ? &reads->slc : NULL},
                     {&p->win, &c.win, bits->win, bits->words,
                      static_cast<int>(cache->k_win.batch / cache->k_win.token),
                      reads ? &reads->win : NULL}};
    nsa_desc d = p->cmp.d;
    d.first = first;
    d.count = count;
    nsa_status s = NSA_OK;
    for (int i = 0; s == NSA_OK && i < 3; i++) {
        nsa__cuda_decode_params *params = branches[i].params;
        params->d = d;
        params->x = *branches[i].x;
        params->bad = branches[i].bits;
        params->words.each = branches[i].words;
        params->ring = branches[i].ring;
        params->reads = branches[i].reads;
        params->places = places;
        s = nsa__cuda_attend_choose<nsa__cuda_decode_run>(*params, stream);
        if (i > 0 || s != NSA_OK) continue;
        p->select.d = d;
        p->select.x = c.select;
        p->select.places = places;
        const nsa__cuda_decode_select_call call = {&p->select, stream};
        s = nsa__cuda_select_choose(one.q.dtype, &d, call);
    }
    return s == NSA_OK ? nsa__cuda_gate_forward_run(&c.gate, &d, places, stream) : s;
}

extern "C" nsa_status nsa_cuda_decode(const nsa_attention *x, nsa_cache *cache, int count,
                                      const int32_t *counts, nsa_reads *reads, nsa_status *verdict,
                                      void *workspace, size_t bytes, cudaStream_t stream) {
    nsa_status s = nsa__cuda_decode_check(x, cache, count);
    if (s != NSA_OK) return s;
    s = nsa__cuda_check_workspace(nsa_cuda_decode_workspace_size(x, cache, count), workspace,
                                  bytes);
    if (s != NSA_OK) return s;
    if (!counts && (count > cache->desc.tokens || count - 1 > cache->max_rewind))
        return nsa__error(NSA_ERROR_CACHE, NSA__AT_cache);
    nsa__cuda_decode_plan p;
    nsa__cuda_arena a = nsa__cuda_arena_at(workspace);
    nsa__cuda_decode_plan_of(&p, x, cache, nsa__cuda_decode_most(cache, count), &a);
    s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_places_kernel, dim3(1), dim3(32), 0, stream,
                                    *cache, count, counts, p.step, reads, verdict));
    if (s != NSA_OK || count == 0 || cache->desc.tokens == 0) return s;
    count = nsa__cuda_decode_most(cache, count);
    const nsa__cuda_cache_bits bits = nsa__cuda_cache_bits_of(cache);
    s = nsa__cuda_decode_append(x, cache, count, &p, stream);
    if (s == NSA_OK) s = nsa__cuda_decode_compress(x, cache, &p, stream);
    if (s == NSA_OK) s = nsa__cuda_decode_bits(cache, count, &bits, &p, stream);
    for (int first = 0; s == NSA_OK && first < count; first += NSA__DECODE_SLICE)
        s = nsa__cuda_decode_attend(x, cache, &bits, first,
                                    count - first < NSA__DECODE_SLICE ? count - first
                                                                      : NSA__DECODE_SLICE,
                                    &p, reads, stream);
    if (s != NSA_OK) return s;
    return nsa__cuda_status(NSA_LAUNCH(
        nsa__cuda_decode_commit_kernel,
        dim3(static_cast<unsigned>(nsa__cuda_ceil_div(cache->desc.batch, NSA__DECODE_THREADS))),
        dim3(NSA__DECODE_THREADS), 0, stream, *cache, p.step.places));
}

#endif
