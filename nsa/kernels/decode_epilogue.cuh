/* decode_epilogue.cuh: the end of a step: what the runs of a row left is added in their order and
   gated; and the launches of a step's attention.
   Twin: nsa.h, "Decoding", nsa_decode.
   Not here: what a run computes (decode_attend.cuh). */
#ifndef NSA_DECODE_EPILOGUE_CUH
#define NSA_DECODE_EPILOGUE_CUH

#include "decode_attend.cuh"

/* ---- The end of a step ----------------------------------------------------------------------- */

/* What the runs of a branch left, and where it goes. */
struct nsa__cuda_decode_runs {
    nsa_tensor out, lse;
    int count;
    const float *most, *sums, *units;
    const char *parts;
    nsa_dtype dtype;      /* of parts */
    const float2 *totals; /* of cmp, else NULL */
};

struct nsa__cuda_decode_finish {
    nsa_desc d;
    nsa__cuda_positions positions;
    nsa__cuda_decode_runs of[3];
    nsa_gate gate;
    nsa__cuda_teams teams;
    int32_t *lengths, *newest; /* of the cache; NULL: later slices follow */
};

/* What a row's runs of slc or win amount to: the largest score, inf if a value was not finite. */
NSA__DEVICE float2 nsa__cuda_decode_add_runs(const nsa__cuda_decode_runs &runs, int64_t row) {
    const float *most = runs.most + row * runs.count, *sums = runs.sums + row * runs.count;
    float2 total = make_float2(-INFINITY, 0);
    for (int r = 0; r < runs.count; r++) {
        if (most[r] == -INFINITY) continue; /* without keys */
        const float now = fmaxf(total.x, most[r]);
        total.y =
            fmaf(total.y, nsa__cuda_shrink(total.x, now), sums[r] * nsa__cuda_shrink(most[r], now));
        total.x = now;
    }
    return total;
}

/* A branch's out and lse of a row, of which the thread has columns c .. c + 7; they are in `value`
   as out keeps them. */
NSA__DEVICE void nsa__cuda_decode_combine(float (&value)[8], const nsa__cuda_decode_runs &runs,
                                          const nsa__cuda_team_place &p, int64_t row, int dim_v) {
    const float2 total = runs.totals ? runs.totals[row] : nsa__cuda_decode_add_runs(runs, row);
    const float nan = __uint_as_float(0x7fc00000u);
    const bool bad = total.x == INFINITY;
    const float inverse = total.y == 0 ? 0.0f : 1.0f / total.y;
#pragma unroll
    for (int c = 0; c < 8; c++) value[c] = 0.0f;
    for (int r = 0; r < runs.count && !bad; r++) {
        const int64_t run = row * runs.count + r;
        const float most = runs.most[run];
        if (most == -INFINITY) continue;
        const float share = nsa__cuda_shrink(most, total.x) * runs.units[run];
        float part[8];
        nsa__load8(part, runs.dtype, runs.parts + run * dim_v * (runs.dtype == NSA_F32 ? 4 : 2),
                   p.c);
#pragma unroll
        for (int c = 0; c < 8; c++) value[c] = fmaf(part[c], share, value[c]);
    }
#pragma unroll
    for (int c = 0; c < 8; c++) value[c] = bad ? nan : value[c] * inverse;
    void *const to = nsa__row_at(runs.out, p.s.batch, p.row, p.head);
    nsa__store8(runs.out.dtype, to, p.c, value);
    nsa__load8(value, runs.out.dtype, to, p.c);
    if (p.c == 0)
        *nsa__row_of<float>(runs.lse, p.s.batch, p.row, p.head) = nsa__cuda_decode_lse(total);
}

/* A team to a row: its three branches and their gated sum, added as gate.cuh adds it. With the
   last slice the cache's lengths grow: a step that fails on its way has not happened. */
static __global__ void __launch_bounds__(NSA__TEAM_THREADS, 2)
    nsa__cuda_decode_finish_kernel(const NSA_GRID_CONSTANT nsa__cuda_decode_finish finish) {
    const nsa_desc &d = finish.d;
    if (blockIdx.x == 0 && finish.lengths)
        for (int b = static_cast<int>(threadIdx.x); b < d.batch; b += NSA__TEAM_THREADS) {
            const int2 position = finish.positions.of[b];
            if (position.y == 0) continue;
            finish.lengths[b] = position.x + position.y;
            finish.newest[b] = max(finish.newest[b], position.x + position.y);
        }
    const nsa__cuda_team_place p =
        nsa__cuda_team_place_of(d, finish.teams, d.heads, finish.positions);
    if (!p.mine || p.c >= d.dim_v) return;
    const int64_t row = (static_cast<int64_t>(p.b) * d.count + p.row) * d.heads + p.head;
    float g[3], out[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    nsa__cuda_gate_weights(d, finish.gate.logits, p.s.batch, p.row,
                           p.head / (d.heads / d.gate_heads), g);
#pragma unroll
    for (int i = 0; i < 3; i++) {
        float value[8];
        nsa__cuda_decode_combine(value, finish.of[i], p, row, d.dim_v);
#pragma unroll
        for (int c = 0; c < 8; c++) out[c] += g[i] * value[c];
    }
    nsa__store8(finish.gate.out.dtype, nsa__row_at(finish.gate.out, p.s.batch, p.row, p.head), p.c,
                out);
}

/* ---- Launches -------------------------------------------------------------------------------- */

/* The branches of a slice: cmp, slc, win. `d` and `x` are what the choice of a kernel looks at. */
struct nsa__cuda_decode_branches {
    const nsa_desc &d;
    const nsa_attend &x;
    nsa__cuda_decode_params *of;
};

/* Blocks for `runs` runs of every query and kv head; `row_count` rows to a block. */
static nsa_status nsa__cuda_decode_grid(nsa__cuda_decode_params *params, int row_count, int runs,
                                        dim3 *grid) {
    const nsa_desc *d = &params->d;
    params->parts = (params->group - 1) / row_count + 1;
    const int64_t pairs = static_cast<int64_t>(d->batch) * d->count * d->kv_heads;
    return nsa__cuda_grid(pairs * params->parts * runs, grid);
}

/* The scores and values of cmp. Selection follows, so the sizes of its tiles stay in `of`. */
template <typename T, int DK, int DV> struct nsa__cuda_decode_cmp_launch {
    template <int HOPPER>
    static nsa_status launch_as(const nsa__cuda_decode_branches &slice, cudaStream_t stream) {
        using shape = nsa__cuda_decode_shape<T, DK, DV, HOPPER>;
        nsa__cuda_decode_params *cmp = &slice.of[0];
        dim3 grid;
        nsa__cuda_decode_share(cmp, shape::STAGE);
        NSA__CHECK(nsa__cuda_decode_grid(cmp, shape::TILE, cmp->runs, &grid));
        const int64_t rows = static_cast<int64_t>(cmp->d.batch) * cmp->d.count * cmp->d.heads;
        const size_t words = 1 + static_cast<size_t>(rows * cmp->runs);
        NSA__CHECK(
            nsa__cuda_status(nsa__memset(cmp->started, 0xff, words * sizeof(uint32_t), stream)));
        return nsa__cuda_status(
            NSA_LAUNCH((nsa__cuda_decode_cmp_kernel<T, DK, DV>), grid, dim3(shape::THREADS),
                       sizeof(nsa__cuda_decode_memory<T, DK, DV, HOPPER>), stream, *cmp));
    }
    static nsa_status launch(const nsa__cuda_decode_branches &slice, cudaStream_t stream) {
        bool hopper;
        NSA__CHECK(nsa__cuda_on_hopper(&hopper));
        return hopper ? launch_as<1>(slice, stream) : launch_as<0>(slice, stream);
    }
};

/* slc and win. */
template <typename T, int DK, int DV> struct nsa__cuda_decode_keys_launch {
    template <int HOPPER>
    static nsa_status launch_as(const nsa__cuda_decode_branches &slice, cudaStream_t stream) {
        using shape = nsa__cuda_decode_shape<T, DK, DV, HOPPER>;
        int runs = 0;
        dim3 grid;
        for (int i = 1; i < 3; i++) {
            nsa__cuda_decode_share(&slice.of[i], shape::STAGE);
            runs += slice.of[i].runs;
        }
        for (int i = 1; i < 3; i++)
            NSA__CHECK(nsa__cuda_decode_grid(&slice.of[i], shape::TILE, runs, &grid));
        const nsa__cuda_decode_pair both = {{slice.of[1], slice.of[2]}};
        return nsa__cuda_status(NSA_LAUNCH((nsa__cuda_decode_keys_kernel<T, DK, DV>), grid,
                                           dim3(shape::THREADS), shape::BYTES, stream, both));
    }
    static nsa_status launch(const nsa__cuda_decode_branches &slice, cudaStream_t stream) {
        bool hopper;
        NSA__CHECK(nsa__cuda_on_hopper(&hopper));
        return hopper ? launch_as<1>(slice, stream) : launch_as<0>(slice, stream);
    }
};

/* `last`: no more slices of the step follow. */
static nsa_status nsa__cuda_decode_finish_launch(const nsa__cuda_decode_branches &slice,
                                                 const nsa_gate *gate, const nsa_cache *cache,
                                                 bool last, cudaStream_t stream) {
    nsa__cuda_decode_finish finish = {};
    dim3 grid;
    finish.d = slice.d;
    finish.positions = slice.of[0].positions;
    finish.gate = *gate;
    for (int i = 0; i < 3; i++) {
        const nsa__cuda_decode_params *of = &slice.of[i];
        finish.of[i] = {of->x.out,
                        of->x.lse,
                        of->runs,
                        of->most,
                        of->sums,
                        of->units,
                        static_cast<const char *>(of->out),
                        nsa__cuda_part_dtype(of->x.q.dtype),
                        of->totals};
    }
    if (last) finish.lengths = cache->lengths, finish.newest = cache->newest;
    NSA__CHECK(nsa__cuda_team_grid(&slice.d, slice.d.heads, slice.d.dim_v, &finish.teams, &grid));
    return nsa__cuda_status(NSA_LAUNCH(nsa__cuda_decode_finish_kernel, grid,
                                       dim3(NSA__TEAM_THREADS), 0, stream, finish));
}

#endif
