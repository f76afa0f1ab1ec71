/* attend_softmax.cuh: what forward knows of a row: its largest score, its sum, its end.
   Twin: nsa.h, "Attention over few keys".
   Not here: products and walks (attend_forward.cuh, attend_forward_sm90.cuh). */
#ifndef NSA_ATTEND_SOFTMAX_CUH
#define NSA_ATTEND_SOFTMAX_CUH

#include "attend_slc_scheduler.cuh"

/* What a thread knows of its two rows, g and g + 8 of its warp. */
struct nsa__cuda_forward_rows {
    nsa__cuda_key_span keys[2];
    int number[2]; /* the query's place in the warp's group */
    float most[2]; /* the largest score so far; -inf before the first */
    float sum[2];  /* of this thread's columns */
    bool bad[2];
};

/* s becomes p = exp(s - most), 0 where masked; shrink is what earlier p of a row are to be
   multiplied by: exactly 1 where the maximum stays. No infinity is subtracted from another. */
template <int N>
NSA__DEVICE void nsa__cuda_softmax_tile(float (&s)[N][4], nsa__cuda_forward_rows &rows,
                                        float (&shrink)[2]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float most = rows.most[h], sum = 0;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) most = fmaxf(most, s[n][2 * h + e]);
        most = nsa__cuda_quad_max(most);
        const float base = nsa__cuda_base(most);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float &x = s[n][2 * h + e];
                x = nsa__exp(x - base);
                sum += x;
            }
        shrink[h] = nsa__cuda_shrink(rows.most[h], most);
        rows.sum[h] = fmaf(rows.sum[h], shrink[h], sum);
        rows.most[h] = most;
    }
}

/* What a gathered tile leaves of the thread's two rows. */
template <typename T, int N>
NSA__DEVICE void
nsa__cuda_gathered_end(const nsa__cuda_attend_params &params, const nsa__cuda_attend_head &at,
                       const nsa__cuda_query_tile &tile, const nsa__cuda_forward_rows &rows,
                       const float (&out)[N][4]) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(params, at, tile, nsa__cuda_upper_row() + 8 * h);
        const float sum = nsa__cuda_quad_sum(rows.sum[h]), unit = nsa__cuda_part_unit<T>(out, h);
        if (!row.there) continue;
        const int64_t index = nsa__cuda_partial_out_index(params, at, tile, row);
        nsa__cuda_part_store<T>(params.partial_out, index, params.d.dim_v, unit, out, h);
        if (threadIdx.x % 4 != 0) continue;
        params.partial_sums[index] = make_float2(rows.bad[h] ? INFINITY : rows.most[h], sum);
        params.partial_units[index] = unit;
    }
}

/* out / sum and lse of the thread's two rows. */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_forward_end(const nsa__cuda_attend_params &params,
                                       const nsa__cuda_attend_head &at,
                                       const nsa__cuda_query_tile &tile,
                                       const nsa__cuda_forward_rows &rows, float (&out)[N][4]) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    const float nan = __uint_as_float(0x7fc00000u), ln2 = 0.693147180559945f;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(params, at, tile, nsa__cuda_upper_row() + 8 * h);
        const float sum = nsa__cuda_quad_sum(rows.sum[h]);
        if (!row.there) continue;
        const bool empty = sum == 0, bad = rows.bad[h] && !empty;
        const float inverse = empty ? 0.0f : 1.0f / sum;
        T *to = nsa__cuda_query_at<T>(params.x.out, at, row.query, row.head);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (8 * n < params.d.dim_v)
                nsa__store_pair(to + 8 * n + column, bad ? nan : out[n][2 * h] * inverse,
                                bad ? nan : out[n][2 * h + 1] * inverse);
        if (column == 0)
            *nsa__cuda_query_at<float>(params.x.lse, at, row.query, row.head) =
                bad     ? nan
                : empty ? -INFINITY
                        : rows.most[h] + nsa__log2(sum) * ln2;
    }
}

NSA__DEVICE void nsa__cuda_forward_begin(nsa__cuda_forward_rows &rows,
                                         const nsa__cuda_branch &params,
                                         const nsa__cuda_attend_head &at,
                                         const nsa__cuda_query_tile &tile, uint32_t bad) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int r = lane / 4 + 8 * h;
        const nsa__cuda_query_row row = nsa__cuda_query_row_of(params, at, tile, 16 * warp + r);
        rows.number[h] =
            (tile.skip + 16 * warp + r) / params.group - nsa__cuda_warpgroup_first(params, tile);
        rows.keys[h] = {0, 0};
        if (row.there) rows.keys[h] = nsa__cuda_keys_of(params, at.seq.tokens, row.query);
        rows.most[h] = -INFINITY;
        rows.sum[h] = 0;
        rows.bad[h] = bad >> r & 1;
    }
}

#endif
