/* gate.cuh: out = g[0] cmp + g[1] slc + g[2] win.
   Twin: nsa.h, "Gate". Bound by memory: each row is read once and written once.
   Not here: the projection that makes the logits. */
#ifndef NSA_GATE_CUH
#define NSA_GATE_CUH

#include "block_index.cuh"

/* Number i of a head's three gates. */
NSA__DEVICE void *nsa__cuda_gate_at(const nsa_desc &d, const nsa_tensor &x, int64_t b, int64_t t,
                                    int64_t h, int i) {
    const int64_t stride = d.gate_stride ? d.gate_stride : 1;
    return nsa__element_at(x, x.batch * b + x.token * t + x.head * h + i * stride);
}

/* g of a head's logits; the same in every thread that needs it. */
NSA__DEVICE void nsa__cuda_gate_weights(const nsa_desc &d, const nsa_tensor &logits, int64_t b,
                                        int64_t t, int64_t h, float (&g)[3]) {
    const nsa_gate_kind kind = d.gate;
#pragma unroll
    for (int i = 0; i < 3; i++)
        g[i] = nsa__load1(logits.dtype, nsa__cuda_gate_at(d, logits, b, t, h, i), 0);
    if (kind == NSA_GATE_SIGMOID)
#pragma unroll
        for (int i = 0; i < 3; i++) g[i] = 1.0f / (1.0f + expf(-g[i]));
    if (kind == NSA_GATE_SOFTMAX) {
        const float most = fmaxf(g[0], fmaxf(g[1], g[2]));
#pragma unroll
        for (int i = 0; i < 3; i++) g[i] = expf(g[i] - most);
        const float scale = 1.0f / (g[0] + g[1] + g[2]);
#pragma unroll
        for (int i = 0; i < 3; i++) g[i] *= scale;
    }
}

static __global__ void nsa__cuda_gate_forward_kernel(nsa_desc d, nsa_gate x, nsa__cuda_teams teams,
                                                     nsa__cuda_positions positions) {
    const nsa__cuda_team_place p = nsa__cuda_team_place_of(d, teams, d.heads, positions);
    if (!p.mine || p.c >= d.dim_v) return;
    const nsa_tensor *branch[3] = {&x.cmp, &x.slc, &x.win};
    const int64_t t = p.s.row + p.row;
    float g[3], out[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    nsa__cuda_gate_weights(d, x.logits, p.s.batch, t, p.head / (d.heads / d.gate_heads), g);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        float row[8];
        nsa__load8(row, branch[i]->dtype, nsa__row_at(*branch[i], p.s.batch, t, p.head), p.c);
#pragma unroll
        for (int c = 0; c < 8; c++) out[c] += g[i] * row[c];
    }
    nsa__store8(x.out.dtype, nsa__row_at(x.out, p.s.batch, t, p.head), p.c, out);
}

/* dlogits += the derivative of the gate's kind, of which dg is the gradient of g. */
NSA__DEVICE void nsa__cuda_gate_put_logits(const nsa_desc &d, const nsa_tensor &dlogits, int64_t b,
                                           int64_t t, int64_t h, const float (&g)[3],
                                           float (&dg)[3]) {
    const float mean = g[0] * dg[0] + g[1] * dg[1] + g[2] * dg[2];
#pragma unroll
    for (int i = 0; i < 3; i++) {
        if (d.gate == NSA_GATE_SIGMOID) dg[i] *= g[i] * (1.0f - g[i]);
        if (d.gate == NSA_GATE_SOFTMAX) dg[i] = g[i] * (dg[i] - mean);
        void *to = nsa__cuda_gate_at(d, dlogits, b, t, h, i);
        nsa__store1(dlogits.dtype, to, 0, nsa__load1(dlogits.dtype, to, 0) + dg[i]);
    }
}

/* out = sum_i g[i] branch[i]  =>  dbranch[i] = g[i] dout, and over the heads that share the gate
   dg[i] = sum_h sum_c dout branch[i]; then through the gate's kind to the logits. */
static __global__ void nsa__cuda_gate_backward_kernel(nsa_desc d, nsa_gate x, nsa_gate dx,
                                                      nsa__cuda_teams teams) {
    const nsa__cuda_team_place p = nsa__cuda_team_place_of(d, teams, d.gate_heads);
    const nsa_tensor *branch[3] = {&x.cmp, &x.slc, &x.win};
    const nsa_tensor *dbranch[3] = {&dx.cmp, &dx.slc, &dx.win};
    const int64_t t = p.s.row + p.row;
    const int sharers = d.heads / d.gate_heads;
    float g[3] = {0, 0, 0}, dg[3] = {0, 0, 0};
    if (p.mine) nsa__cuda_gate_weights(d, x.logits, p.s.batch, t, p.head, g);
    for (int h = p.head * sharers; p.mine && p.c < d.dim_v && h < (p.head + 1) * sharers; h++) {
        float dout[8];
        nsa__load8(dout, dx.out.dtype, nsa__row_at(dx.out, p.s.batch, t, h), p.c);
#pragma unroll
        for (int i = 0; i < 3; i++) {
            if (dbranch[i]->data)
                nsa__add8(dbranch[i]->dtype, nsa__row_at(*dbranch[i], p.s.batch, t, h), p.c, g[i],
                          dout);
            if (!dx.logits.data) continue;
            float row[8];
            nsa__load8(row, branch[i]->dtype, nsa__row_at(*branch[i], p.s.batch, t, h), p.c);
#pragma unroll
            for (int c = 0; c < 8; c++) dg[i] += dout[c] * row[c];
        }
    }
    if (!dx.logits.data) return;
    for (int step = teams.size / 2; step > 0; step /= 2)
#pragma unroll
        for (int i = 0; i < 3; i++) dg[i] += __shfl_xor_sync(0xffffffffu, dg[i], step);
    if (!p.mine || p.c != 0) return;
    nsa__cuda_gate_put_logits(d, dx.logits, p.s.batch, t, p.head, g, dg);
}

/* The launches alone, for the entry points and for the chain. */
static nsa_status nsa__cuda_gate_forward_run(const nsa_gate *x, const nsa_desc *d,
                                             nsa__cuda_positions positions, cudaStream_t stream) {
    if (d->count == 0) return NSA_OK;
    nsa__cuda_teams teams;
    dim3 grid;
    NSA__CHECK(nsa__cuda_team_grid(d, d->heads, d->dim_v, &teams, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_gate_forward_kernel, grid, dim3(NSA__TEAM_THREADS),
                                       0, stream, nsa__cuda_all_queries(d), *x, teams, positions));
}
static nsa_status nsa__cuda_gate_backward_run(const nsa_gate *dx, const nsa_gate *x,
                                              const nsa_desc *d, cudaStream_t stream) {
    if (d->count == 0) return NSA_OK;
    nsa__cuda_teams teams;
    dim3 grid;
    NSA__CHECK(nsa__cuda_team_grid(d, d->gate_heads, d->dim_v, &teams, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_gate_backward_kernel, grid,
                                       dim3(NSA__TEAM_THREADS), 0, stream, nsa__cuda_all_queries(d),
                                       *x, *dx, teams));
}

extern "C" nsa_status nsa_cuda_gate_forward(const nsa_gate *x, const nsa_desc *d,
                                            cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    const nsa__checked c = nsa__cuda_checked_of(d, NSA__FLOATS, 1, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__gate_views, NSA__GATE_VIEWS, NULL, x));
    return nsa__cuda_gate_forward_run(x, d, {NULL}, stream);
}

extern "C" nsa_status nsa_cuda_gate_backward(const nsa_gate *dx, const nsa_gate *x,
                                             const nsa_desc *d, cudaStream_t stream) {
    nsa_desc own;
    d = nsa__desc_using(d, 0, &own);
    const nsa__checked c = nsa__cuda_checked_of(d, NSA__FLOATS, 0, 0);
    NSA__CHECK(nsa__check_call(&c, nsa__gate_views, NSA__GATE_VIEWS, dx, x));
    return nsa__cuda_gate_backward_run(dx, x, d, stream);
}

#endif
