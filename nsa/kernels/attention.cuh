/* attention.cuh: the chain: compress, cmp, select, slc, win, gate on one stream.
   Twin: nsa.h, "The whole".
   Not here: a kernel but the one that adds a sum to a view; the parts are the primitives'. */
#ifndef NSA_ATTENTION_CUH
#define NSA_ATTENTION_CUH

#include "attend_branches.cuh"
#include "compress.cuh"
#include "gate.cuh"
#include "select_blocks.cuh"

static nsa_status nsa__cuda_attention_check_sizes(const nsa_attention *x, const nsa_desc *d) {
    NSA__CHECK(nsa__cuda_check_desc(d));
    return nsa__chain_check_sizes(x, d, nsa__cuda_compress_check_sizes);
}

static nsa_status nsa__cuda_attention_check(const nsa_attention *x, const nsa_desc *d,
                                            int forward) {
    NSA__CHECK(nsa__cuda_attention_check_sizes(x, d));
    NSA__CHECK(nsa__cuda_compress_check(&x->k_cmp, d, forward, NSA__TO_K_CMP));
    NSA__CHECK(nsa__cuda_compress_check(&x->v_cmp, d, forward, NSA__TO_V_CMP));
    nsa__checked c = nsa__cuda_checked_of(d, nsa__cuda_dtype_of(&x->q, d), forward, 0);
    const nsa__view *gate = nsa__attention_views + NSA__GATE_AT;
    NSA__CHECK(nsa__check_views(&c, nsa__attention_views, NSA__GATE_AT, x));
    c.rows = NSA__FLOATS;
    return nsa__check_views(&c, gate, NSA__ATTENTION_VIEWS - NSA__GATE_AT, x);
}

static size_t nsa__cuda_most(const size_t *sizes, size_t n) {
    size_t most = 0;
    for (size_t i = 0; i < n; i++) most = sizes[i] > most ? sizes[i] : most;
    return most;
}

extern "C" size_t nsa_cuda_attention_forward_workspace_size(const nsa_attention *x,
                                                            const nsa_desc *d) {
    if (nsa__cuda_attention_check_sizes(x, d) != NSA_OK) return 0;
    const size_t parts[] = {nsa__cuda_compress_bytes(&x->k_cmp, d, 0),
                            nsa__cuda_compress_bytes(&x->v_cmp, d, 0),
                            nsa__cuda_attend_bytes(d, NSA__KEYS_CMP, nsa__cuda_forward_plan),
                            nsa__cuda_select_bytes(d),
                            nsa__cuda_attend_bytes(d, NSA__KEYS_SLC, nsa__cuda_forward_plan),
                            nsa__cuda_attend_bytes(d, NSA__KEYS_WIN, nsa__cuda_forward_plan)};
    return nsa__cuda_most(parts, sizeof parts / sizeof *parts);
}

extern "C" nsa_status nsa_cuda_attention_forward(const nsa_attention *x, const nsa_desc *d,
                                                 void *workspace, size_t bytes,
                                                 cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_attention_check(x, d, 1));
    NSA__CHECK(nsa__cuda_check_workspace(nsa_cuda_attention_forward_workspace_size(x, d), workspace,
                                         bytes));
    const nsa__chain c = nsa__chain_of(x);
    nsa_status s = nsa__cuda_compress_forward_run(&x->k_cmp, d, workspace, stream);
    if (s == NSA_OK) s = nsa__cuda_compress_forward_run(&x->v_cmp, d, workspace, stream);
    if (s == NSA_OK) s = nsa__cuda_attend_forward_run(&c.cmp, d, NSA__KEYS_CMP, workspace, stream);
    if (s == NSA_OK) s = nsa__cuda_select_run(&c.select, d, workspace, stream);
    if (s == NSA_OK) s = nsa__cuda_attend_forward_run(&c.slc, d, NSA__KEYS_SLC, workspace, stream);
    if (s == NSA_OK) s = nsa__cuda_attend_forward_run(&c.win, d, NSA__KEYS_WIN, workspace, stream);
    return s == NSA_OK ? nsa__cuda_gate_forward_run(&c.gate, d, {NULL}, stream) : s;
}

/* ---- Backward ------------------------------------------------------------------------------- */

struct nsa__cuda_sum {
    nsa_tensor to;   /* the caller's view */
    nsa_tensor view; /* what the primitives add to */
    int heads, width;
    bool owner; /* this sum holds the memory, and flushes it */
};

struct nsa__cuda_chain_gradient {
    nsa_attention dx; /* as the primitives see it: sums in place of the caller's views, out for
                         every branch; k_cmp.out and v_cmp.out are dk_cmp and dv_cmp, f32 */
    nsa__cuda_sum sum[NSA__SUMS];
    char *zeros; /* sums, dk_cmp and dv_cmp lie in one piece */
    size_t zero_bytes;
    void *rest;                        /* the branches' workspace, then compression's */
    nsa__cuda_attend_params branch[3]; /* cmp, slc, win */
};

/* A gradient that one kernel adds to once needs no sum: q, unless slc's queries are gathered, and
   keys whose view no other branch shares. Compression may add more than once. */
static bool nsa__cuda_chain_adds_once(nsa_tensor *const to[NSA__SUMS], int i, const nsa_desc *d) {
    if (i == NSA__SUM_Q) {
        nsa__cuda_attend_params slc;
        nsa__arena none = {NULL, 0};
        nsa__cuda_backward_plan(&slc, d, NSA__KEYS_SLC, &none);
        return slc.chunk == 0;
    }
    if (i == NSA__SUM_K_CMP || i == NSA__SUM_V_CMP) return false;
    for (int other = NSA__SUM_K_CMP; other < NSA__SUMS; other++)
        if (other != i && to[other]->data == to[i]->data) return false;
    return true;
}

/* A view of (B, rows, heads, width) in workspace, one of every `stride` tokens; of packed rows B *
   tokens, or what desc.rows says: see nsa__cuda_sum_row. */
static nsa_tensor nsa__cuda_take_tensor(nsa__arena *a, const nsa_desc *d, nsa_dtype dtype,
                                        int64_t rows, int stride, int64_t heads, int64_t width) {
    const int64_t all = nsa__cuda_extent_of(d, rows, 1, stride, 0).total;
    nsa_tensor x;
    x.dtype = dtype;
    x.head = width;
    x.token = heads * width;
    x.batch = rows * x.token;
    x.data = dtype == NSA_F32 ? static_cast<void *>(nsa__cuda_take<float>(a, all * x.token))
                              : nsa__cuda_take<uint16_t>(a, all * x.token);
    return x;
}

static void nsa__cuda_chain_gradient_plan(nsa__cuda_chain_gradient *g, const nsa_attention *dx,
                                          const nsa_attention *x, const nsa_desc *d,
                                          nsa__arena *a) {
    nsa_attention own = *dx;
    nsa_tensor *to[NSA__SUMS], *view[NSA__SUMS];
    const int query_rows = d->begins ? d->tokens : d->count;
    const int blocks = nsa_cmp_count(d, d->tokens);
    const size_t first = a->used;
    g->zeros = a->base ? a->base + first : NULL;
    nsa__sum_views(&own, to);
    nsa__sum_views(&g->dx, view);
    g->dx = own;
    g->dx.out_cmp = g->dx.out_slc = g->dx.out_win = dx->out;
    g->dx.blocks = g->dx.lse_cmp = g->dx.lse_slc = g->dx.lse_win = nsa__no_view;
    g->dx.k_cmp.out =
        nsa__cuda_take_tensor(a, d, NSA_F32, blocks, d->cmp_stride, d->kv_heads, d->dim);
    g->dx.v_cmp.out =
        nsa__cuda_take_tensor(a, d, NSA_F32, blocks, d->cmp_stride, d->kv_heads, d->dim_v);
    for (int i = 0; i < NSA__SUMS; i++) {
        nsa__cuda_sum *sum = &g->sum[i];
        const bool needed =
            to[i]->data && to[i]->dtype != NSA_F32 && !nsa__cuda_chain_adds_once(to, i, d);
        const int same = needed ? nsa__shared_sum(to, d, i) : i;
        sum->to = *to[i];
        sum->owner = needed && same == i;
        sum->heads = i == NSA__SUM_Q ? d->heads : d->kv_heads;
        sum->width = nsa__sum_width(d, i);
        if (sum->owner)
            *view[i] = nsa__cuda_take_tensor(
                a, d, NSA_F32, i == NSA__SUM_Q ? query_rows : d->tokens, 1, sum->heads, sum->width);
        if (same < i) *view[i] = *view[same];
        sum->view = *view[i];
    }
    g->zero_bytes = a->used - first;
    g->rest = a->base ? a->base + a->used : NULL;
    nsa__arena compress = *a;
    const nsa__cuda_branch_keys branches[3] = {NSA__KEYS_CMP, NSA__KEYS_SLC, NSA__KEYS_WIN};
    for (int i = 0; i < 3; i++) nsa__cuda_backward_plan(&g->branch[i], d, branches[i], a);
    const size_t parts[] = {nsa__cuda_compress_bytes(&x->k_cmp, d, 1),
                            nsa__cuda_compress_bytes(&x->v_cmp, d, 1)};
    nsa__cuda_take<char>(&compress, static_cast<int64_t>(nsa__cuda_most(parts, 2)));
    if (compress.used > a->used) a->used = compress.used;
}

extern "C" size_t nsa_cuda_attention_backward_workspace_size(const nsa_attention *dx,
                                                             const nsa_attention *x,
                                                             const nsa_desc *d) {
    nsa__cuda_chain_gradient g;
    nsa__arena a = {NULL, 0};
    if (nsa__cuda_attention_check_sizes(x, d) != NSA_OK || !dx ||
        nsa__check_backward(d, 1) != NSA_OK)
        return 0;
    nsa__cuda_chain_gradient_plan(&g, dx, x, d, &a);
    return nsa__cuda_arena_bytes(&a);
}

static nsa_status nsa__cuda_attention_gradient_check(const nsa_attention *dx,
                                                     const nsa_attention *x, const nsa_desc *d) {
    const nsa__checked c = nsa__cuda_checked_of(d, NSA__FLOATS, 0, 0);
    NSA__CHECK(nsa__check_gradients(&c, nsa__attention_views, NSA__ATTENTION_VIEWS, dx, x));
    NSA__CHECK(nsa__check_phi_gradient(&nsa__cuda_side, &dx->k_cmp, &x->k_cmp, d, NSA__TO_K_CMP));
    return nsa__check_phi_gradient(&nsa__cuda_side, &dx->v_cmp, &x->v_cmp, d, NSA__TO_V_CMP);
}

static bool nsa__cuda_is_sum(const nsa__cuda_sum *sum) {
    return sum->view.data != sum->to.data;
}

/* Which of branch i's gradients are sums of tokens: compressed rows are packed from row 0 on. */
static int nsa__cuda_branch_sums(const nsa__cuda_chain_gradient *g, int i) {
    const nsa__cuda_sum *k[] = {NULL, &g->sum[NSA__SUM_K_SLC], &g->sum[NSA__SUM_K_WIN]},
                        *v[] = {NULL, &g->sum[NSA__SUM_V_SLC], &g->sum[NSA__SUM_V_WIN]};
    int sums = nsa__cuda_is_sum(&g->sum[NSA__SUM_Q]) ? NSA__CUDA_SUM_Q : 0;
    if (i && nsa__cuda_is_sum(k[i])) sums |= NSA__CUDA_SUM_K;
    if (i && nsa__cuda_is_sum(v[i])) sums |= NSA__CUDA_SUM_V;
    return sums;
}

/* The branches' parameters, and which of their keys are not finite; win shares slc's answer where
   it shares slc's keys. */
static nsa_status nsa__cuda_chain_prepare(nsa__cuda_chain_gradient *g, const nsa__chain *c,
                                          cudaStream_t stream) {
    const nsa_attend x[3] = {c->cmp, c->slc, c->win};
    const nsa__chain dc = nsa__chain_of(&g->dx);
    const nsa_attend dx[3] = {dc.cmp, dc.slc, dc.win};
    for (int i = 0; i < 3; i++) {
        nsa__cuda_attend_params *params = &g->branch[i];
        params->x = x[i];
        params->dx = dx[i];
        params->sums = nsa__cuda_branch_sums(g, i);
        if (i == 2 && nsa__same_view(&x[1].k, &x[2].k) && nsa__same_view(&x[1].v, &x[2].v))
            params->bad = g->branch[1].bad, params->d.begins = g->branch[1].d.begins;
        else
            NSA__CHECK(nsa__cuda_attend_prepare(params, stream));
    }
    return NSA_OK;
}

/* The terms of every row in all branches, and the gate's gradient. */
static nsa_status nsa__cuda_chain_rows(const nsa__cuda_chain_gradient *g, const nsa__chain *c,
                                       const nsa_desc *d, cudaStream_t stream) {
    nsa__cuda_rows_params rows = {};
    rows.d = g->branch[0].d;
    rows.branches = 3;
    rows.gate_heads = d->gate_heads;
    rows.rows_of = g->branch[0].rows_of;
    rows.dout = g->dx.out;
    rows.logits = c->gate.logits;
    rows.dlogits = g->dx.gates;
    for (int i = 0; i < 3; i++) {
        rows.out[i] = g->branch[i].x.out;
        rows.lse[i] = g->branch[i].x.lse;
        rows.rows[i] = g->branch[i].rows;
    }
    return nsa__cuda_attend_rows(rows, stream);
}

/* dq of all branches by one kernel; gathered queries of slc take one of their own. */
static nsa_status nsa__cuda_chain_dq(const nsa__cuda_chain_gradient *g, cudaStream_t stream) {
    nsa__cuda_dq_whole whole = {
        g->branch[0], {&g->branch[2], &g->branch[1]}, g->branch[1].chunk ? 2 : 3};
    if (!g->branch[1].chunk) { /* a tile has the heads of one list */
        whole.group = g->branch[1].group;
        whole.lists = g->branch[1].lists;
    }
    NSA__CHECK(nsa__cuda_attend_choose<nsa__cuda_dq_launch>(whole, stream));
    return g->branch[1].chunk ? nsa__cuda_attend_dq(&g->branch[1], stream) : NSA_OK;
}

static nsa_status nsa__cuda_chain_attend(nsa__cuda_chain_gradient *g, const nsa__chain *c,
                                         const nsa_desc *d, cudaStream_t stream) {
    if (d->count == 0) return NSA_OK;
    NSA__CHECK(nsa__cuda_chain_prepare(g, c, stream));
    NSA__CHECK(nsa__cuda_chain_rows(g, c, d, stream));
    if (g->dx.q.data) NSA__CHECK(nsa__cuda_chain_dq(g, stream));
    for (int i = 0; i < 3; i++) NSA__CHECK(nsa__cuda_attend_dkv(&g->branch[i], stream));
    return NSA_OK;
}

enum { NSA__CUDA_FLUSH_THREADS = 128 };

/* to += sum, rounded once: on the query's side, or on that of the keys. */
static __global__ void nsa__cuda_flush_kernel(nsa_desc d, nsa__cuda_sum sum, bool queries,
                                              nsa__cuda_extent blocks) {
    const int units = sum.width / 8;
    const nsa__cuda_item block = nsa__cuda_item_at(d, blocks, blockIdx.x);
    const nsa__sequence s = nsa__sequence_of(d, block.b);
    const int64_t item = block.local * NSA__CUDA_FLUSH_THREADS + threadIdx.x;
    const int c = static_cast<int>(item % units) * 8,
              h = static_cast<int>(item / units % sum.heads);
    const int64_t row = item / units / sum.heads;
    if (row >= (queries ? s.count : s.tokens)) return;
    float value[8];
    nsa__load8(value, NSA_F32, nsa__row_at(sum.view, s.batch, nsa__cuda_sum_row(d, s.row + row), h),
               c);
    nsa__add8(sum.to.dtype, nsa__row_at(sum.to, s.batch, s.row + row, h), c, 1.0f, value);
}

static nsa_status nsa__cuda_chain_flush(const nsa__cuda_chain_gradient *g, const nsa_desc *d,
                                        cudaStream_t stream) {
    nsa_status s = NSA_OK;
    for (int i = 0; s == NSA_OK && i < NSA__SUMS; i++) {
        const nsa__cuda_sum *sum = &g->sum[i];
        const int64_t rows = i == NSA__SUM_Q ? d->count : d->tokens;
        if (!sum->owner || rows == 0) continue;
        nsa__cuda_extent blocks;
        dim3 grid;
        NSA__CHECK(nsa__cuda_row_grid(d, rows, static_cast<int64_t>(sum->heads) * (sum->width / 8),
                                      NSA__CUDA_FLUSH_THREADS, &blocks, &grid));
        s = nsa__cuda_status(NSA_LAUNCH(nsa__cuda_flush_kernel, grid, dim3(NSA__CUDA_FLUSH_THREADS),
                                        0, stream, *d, *sum, i == NSA__SUM_Q, blocks));
    }
    return s;
}

extern "C" nsa_status nsa_cuda_attention_backward(const nsa_attention *dx, const nsa_attention *x,
                                                  const nsa_desc *d, void *workspace, size_t bytes,
                                                  cudaStream_t stream) {
    NSA__CHECK(nsa__cuda_attention_check(x, d, 0));
    NSA__CHECK(nsa__check_backward(d, 1));
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__cuda_attention_gradient_check(dx, x, d));
    NSA__CHECK(nsa__cuda_check_workspace(nsa_cuda_attention_backward_workspace_size(dx, x, d),
                                         workspace, bytes));
    nsa__cuda_chain_gradient g;
    nsa__arena a = nsa__cuda_arena_at(workspace);
    nsa__cuda_chain_gradient_plan(&g, dx, x, d, &a);
    const nsa__chain c = nsa__chain_of(x);
    if (g.zero_bytes) NSA__CHECK(nsa__cuda_status(nsa__memset(g.zeros, 0, g.zero_bytes, stream)));
    NSA__CHECK(nsa__cuda_chain_attend(&g, &c, d, stream));
    NSA__CHECK(nsa__cuda_compress_backward_run(
        &g.dx.k_cmp, &x->k_cmp, d, nsa__cuda_is_sum(&g.sum[NSA__SUM_K_CMP]), g.rest, stream));
    NSA__CHECK(nsa__cuda_compress_backward_run(
        &g.dx.v_cmp, &x->v_cmp, d, nsa__cuda_is_sum(&g.sum[NSA__SUM_V_CMP]), g.rest, stream));
    return nsa__cuda_chain_flush(&g, d, stream);
}

#endif
