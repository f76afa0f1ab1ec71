/* merge.cuh: attention over two sets of keys made one.
   Twin: nsa.h, "Merge". Bound by memory: each row is read once and written once.
   Not here: the attentions whose results are merged. */
#ifndef NSA_MERGE_CUH
#define NSA_MERGE_CUH

#include "block_index.cuh"

/* The parts' shares of a row, and lse of both; the same in every thread that needs them. */
struct nsa__cuda_merge_shares {
    float w[2], lse;
};

NSA__DEVICE nsa__cuda_merge_shares nsa__cuda_merge_shares_of(const nsa_merge &x, int64_t b,
                                                             int64_t t, int64_t h) {
    const uint32_t minus_infinity = 0xff800000u; /* by its bits: fast-math knows no infinity */
    const float lse_a = *nsa__row_of<const float>(x.lse_a, b, t, h);
    const float lse_b = *nsa__row_of<const float>(x.lse_b, b, t, h);
    const bool no_a = __float_as_uint(lse_a) == minus_infinity;
    const bool no_b = __float_as_uint(lse_b) == minus_infinity;
    nsa__cuda_merge_shares m = {{no_a ? 0.0f : 1.0f, no_b ? 0.0f : 1.0f}, no_a ? lse_b : lse_a};
    if (no_a || no_b) return m;
    if (!nsa__finite(lse_a) || !nsa__finite(lse_b)) {
        m.lse = m.w[0] = m.w[1] = __uint_as_float(0x7fc00000u);
        return m;
    }
    /* the exponent is <= 0, so that nothing overflows */
    const float least = expf(-fabsf(lse_a - lse_b)), most = 1.0f / (1.0f + least);
    const bool b_larger = lse_a < lse_b;
    m.w[0] = b_larger ? least * most : most;
    m.w[1] = b_larger ? most : least * most;
    m.lse = fmaxf(lse_a, lse_b) + log1pf(least);
    return m;
}

/* Eight elements of a part's row; zeros where its share is 0, because its out may hold anything. */
NSA__DEVICE void nsa__cuda_merge_load(float (&to)[8], const nsa_tensor &out, float share,
                                      const nsa__cuda_team_place &p, int64_t t) {
    if (share != 0.0f) {
        nsa__load8(to, out.dtype, nsa__row_at(out, p.s.batch, t, p.head), p.c);
        return;
    }
#pragma unroll
    for (int c = 0; c < 8; c++) to[c] = 0.0f;
}

/* out = w_a out_a + w_b out_b, lse = ln(exp lse_a + exp lse_b) */
static __global__ void nsa__cuda_merge_forward_kernel(nsa_desc d, nsa_merge x,
                                                      nsa__cuda_teams teams) {
    const nsa__cuda_team_place p = nsa__cuda_team_place_of(d, teams, d.heads);
    if (!p.mine || p.c >= d.dim_v) return;
    const int64_t t = p.s.row + p.row;
    const nsa__cuda_merge_shares m = nsa__cuda_merge_shares_of(x, p.s.batch, t, p.head);
    float a[8], b[8], out[8];
    nsa__cuda_merge_load(a, x.out_a, m.w[0], p, t);
    nsa__cuda_merge_load(b, x.out_b, m.w[1], p, t);
#pragma unroll
    for (int c = 0; c < 8; c++) { /* a part alone as it is: a sum would lose the sign of a 0 */
        const float of_b = m.w[1] * b[c];
        out[c] = m.w[1] == 0.0f ? m.w[0] * a[c] : m.w[0] == 0.0f ? of_b : m.w[0] * a[c] + of_b;
    }
    nsa__store8(x.out.dtype, nsa__row_at(x.out, p.s.batch, t, p.head), p.c, out);
    if (p.c == 0) *nsa__row_of<float>(x.lse, p.s.batch, t, p.head) = m.lse;
}

/* The gradients of a part: `along` = dout . (out - out of the other part). */
NSA__DEVICE void nsa__cuda_merge_put(const nsa_tensor &dout_of, const nsa_tensor &dlse_of,
                                     const nsa__cuda_team_place &p, int64_t t, float share,
                                     float other, float along, float dlse, const float (&dout)[8]) {
    if (share == 0.0f) return;
    if (dout_of.data)
        nsa__add8(dout_of.dtype, nsa__row_at(dout_of, p.s.batch, t, p.head), p.c, share, dout);
    if (dlse_of.data && p.c == 0)
        *nsa__row_of<float>(dlse_of, p.s.batch, t, p.head) += share * (along * other + dlse);
}

/* w_a = exp(lse_a - lse), so dw_a / dlse_a = w_a w_b = -dw_b / dlse_a, dlse / dlse_a = w_a:
     dout_a = w_a dout,   dlse_a = w_a (w_b dout . (out_a - out_b) + dlse)
   and the same with a and b exchanged. */
static __global__ void nsa__cuda_merge_backward_kernel(nsa_desc d, nsa_merge x, nsa_merge dx,
                                                       nsa__cuda_teams teams) {
    const nsa__cuda_team_place p = nsa__cuda_team_place_of(d, teams, d.heads);
    const int64_t t = p.s.row + p.row;
    nsa__cuda_merge_shares m = {{0.0f, 0.0f}, 0.0f};
    if (p.mine) m = nsa__cuda_merge_shares_of(x, p.s.batch, t, p.head);
    const bool works = p.mine && p.c < d.dim_v;
    float dout[8], along = 0.0f;
    if (works) {
        float a[8], b[8];
        nsa__load8(dout, dx.out.dtype, nsa__row_at(dx.out, p.s.batch, t, p.head), p.c);
        nsa__cuda_merge_load(a, x.out_a, m.w[0], p, t);
        nsa__cuda_merge_load(b, x.out_b, m.w[1], p, t);
#pragma unroll
        for (int c = 0; c < 8; c++) along += dout[c] * (a[c] - b[c]);
    }
    for (int step = teams.size / 2; step > 0; step /= 2)
        along += __shfl_xor_sync(0xffffffffu, along, step);
    if (!works) return;
    const float dlse = dx.lse.data ? *nsa__row_of<const float>(dx.lse, p.s.batch, t, p.head) : 0.0f;
    nsa__cuda_merge_put(dx.out_a, dx.lse_a, p, t, m.w[0], m.w[1], along, dlse, dout);
    nsa__cuda_merge_put(dx.out_b, dx.lse_b, p, t, m.w[1], m.w[0], -along, dlse, dout);
}

extern "C" nsa_status nsa_cuda_merge_forward(const nsa_merge *x, const nsa_desc *d,
                                             cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    const nsa__checked c = nsa__cuda_checked_of(d, NSA__FLOATS, 1, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__merge_views, NSA__MERGE_VIEWS, NULL, x));
    if (d->count == 0) return NSA_OK;
    nsa__cuda_teams teams;
    dim3 grid;
    NSA__CHECK(nsa__cuda_team_grid(d, d->heads, d->dim_v, &teams, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_merge_forward_kernel, grid,
                                       dim3(NSA__TEAM_THREADS), 0, stream, nsa__cuda_all_queries(d),
                                       *x, teams));
}

extern "C" nsa_status nsa_cuda_merge_backward(const nsa_merge *dx, const nsa_merge *x,
                                              const nsa_desc *d, cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    const nsa__checked c = nsa__cuda_checked_of(d, NSA__FLOATS, 0, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__merge_views, NSA__MERGE_VIEWS, dx, x));
    if (d->count == 0) return NSA_OK;
    nsa__cuda_teams teams;
    dim3 grid;
    NSA__CHECK(nsa__cuda_team_grid(d, d->heads, d->dim_v, &teams, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_merge_backward_kernel, grid,
                                       dim3(NSA__TEAM_THREADS), 0, stream, nsa__cuda_all_queries(d),
                                       *x, *dx, teams));
}

#endif
