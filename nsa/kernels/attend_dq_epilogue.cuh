/* attend_dq_epilogue.cuh: what the kernels of dq know of their rows: terms, ds, how a row ends.
   Twin: nsa.h, "Attention over few keys", its backward.
   Not here: products and walks (attend_backward.cuh, attend_dq_sm90.cuh). */
#ifndef NSA_ATTEND_DQ_EPILOGUE_CUH
#define NSA_ATTEND_DQ_EPILOGUE_CUH

#include "attend_dkv_scheduler.cuh"

/* Starts copying rows of dout; rounds them on the way if dout is of another dtype. `offset` of a
   row: its element offset in the view, or -1: no row. */
template <typename T, int DV, int ROWS, int THREADS, typename Offset>
NSA__DEVICE void nsa__cuda_stage_dout(T *tile, const nsa__cuda_attend_params &params,
                                      Offset offset) {
    const nsa_tensor &dout = params.dx.out;
    if (dout.dtype == nsa__dtype_of<T>::value) {
        const T *const from = static_cast<const T *>(dout.data);
        nsa__cuda_tile_copy<T, DV, ROWS, THREADS>(tile, params.d.dim_v, from, [&](int r) {
            const int64_t at = offset(r);
            return at >= 0 ? from + at : nullptr;
        });
    } else {
        nsa__cuda_tile_round<T, DV, ROWS, THREADS>(tile, params.d.dim_v, dout.dtype, [&](int r) {
            const int64_t at = offset(r);
            return at >= 0 ? nsa__element_at(dout, at) : nullptr;
        });
    }
}

/* The branches whose dq one kernel makes: of the whole cmp, win and slc, so that dq stays in
   registers and is added to memory once. */
struct nsa__cuda_dq_params {
    nsa__cuda_attend_params branch[3];
    int branches; /* LISTS: the last one follows block lists */
};

/* What a thread knows of its two rows, g and g + 8 of its warp, in one branch; READS and BAD are of
   all branches so far. A bool for each would take eight registers; ptxas has one left. */
struct nsa__cuda_dq_rows {
    nsa__cuda_key_span keys[2];
    int number[2];
    nsa__cuda_row_terms terms[2]; /* lse is inf where p is to be 0 */
    unsigned flags;               /* of row h NSA__DQ_SEES << h and so on */
};
enum {
    NSA__DQ_SEES = 1,   /* this branch: the row has seen a key */
    NSA__DQ_NAN = 4,    /* it is not finite */
    NSA__DQ_READS = 16, /* some branch has seen a key */
    NSA__DQ_BAD = 64    /* some branch that has was not finite */
};

NSA__DEVICE void nsa__cuda_dq_begin(nsa__cuda_dq_rows &rows, const nsa__cuda_attend_params &params,
                                    const nsa__cuda_attend_head &at,
                                    const nsa__cuda_query_tile &tile) {
    rows.flags &= 3 * NSA__DQ_READS | 3 * NSA__DQ_BAD;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(params, at, tile, nsa__cuda_upper_row() + 8 * h);
        rows.number[h] = (tile.skip + nsa__cuda_upper_row() + 8 * h) / params.group -
                         nsa__cuda_warpgroup_first(params, tile);
        rows.keys[h] = {0, 0};
        rows.terms[h] = {INFINITY, 0, 0};
        if (!row.there) continue;
        rows.terms[h] =
            *nsa__cuda_row_terms_at(params, at.row + row.query - at.seq.first, row.head);
        rows.keys[h] = nsa__cuda_keys_of(params, at.seq.tokens, row.query);
        if (nsa__cuda_is_nan_bits(rows.terms[h].lse)) {
            rows.flags |= NSA__DQ_NAN << h;
            rows.terms[h].lse = INFINITY;
        }
        rows.terms[h].delta *= rows.terms[h].gate; /* ds = p (gate dp - gate delta) */
    }
}

/* What of a tile the thread's rows see; a row that sees something has read a key. */
NSA__DEVICE void nsa__cuda_dq_see(nsa__cuda_key_span (&seen)[2], nsa__cuda_dq_rows &rows,
                                  const nsa__cuda_key_tile &tile) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        seen[h] = nsa__cuda_seen_of(tile, rows.keys[h], rows.number[h]);
        if (seen[h].begin < seen[h].end) rows.flags |= NSA__DQ_SEES << h;
    }
}

/* s = q k^T becomes p, wrong for keys that a row does not see. */
template <int N>
NSA__DEVICE void nsa__cuda_dq_p(float (&s)[N][4], const nsa__cuda_dq_rows &rows, float scale) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) s[n][e] = nsa__cuda_p(s[n][e], scale, rows.terms[e / 2].lse);
}

/* p becomes ds, wrong for keys that a row does not see: dp of those may overflow, and 0 inf is NaN,
   so nsa__cuda_hide makes it 0. */
template <int N>
NSA__DEVICE void nsa__cuda_dq_ds(float (&p)[N][4], const float (&dp)[N][4],
                                 const nsa__cuda_dq_rows &rows) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            p[n][e] *= fmaf(rows.terms[e / 2].gate, dp[n][e], -rows.terms[e / 2].delta);
}

/* Behind the last tile of a branch. */
NSA__DEVICE void nsa__cuda_dq_branch_end(nsa__cuda_dq_rows &rows) {
    const unsigned sees = rows.flags & 3, nan = rows.flags / NSA__DQ_NAN & 3;
    rows.flags |= sees * NSA__DQ_READS | (sees & nan) * NSA__DQ_BAD;
}

/* dq += scale (what the thread's rows have summed up). */
template <typename T, int N>
NSA__DEVICE void nsa__cuda_dq_end(const nsa__cuda_attend_params &params,
                                  const nsa__cuda_attend_head &at, const nsa__cuda_query_tile &tile,
                                  const nsa__cuda_dq_rows &rows, const float (&dq)[N][4]) {
    const int column = static_cast<int>(threadIdx.x) % 4 * 2;
    const float nan = __uint_as_float(0x7fc00000u);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const nsa__cuda_query_row row =
            nsa__cuda_query_row_of(params, at, tile, nsa__cuda_upper_row() + 8 * h);
        if (!row.there || !(rows.flags & NSA__DQ_READS << h)) continue;
        const bool bad = rows.flags & NSA__DQ_BAD << h;
        if (params.gathered) {
            float *partial = params.partial_out +
                             nsa__cuda_partial_out_index(params, at, tile, row) * params.d.dim;
#pragma unroll
            for (int n = 0; n < N; n++)
                if (8 * n < params.d.dim)
                    nsa__store_pair(partial + 8 * n + column, dq[n][2 * h], dq[n][2 * h + 1]);
            continue;
        }
        const int64_t nth =
            nsa__cuda_gradient_row(params, NSA__CUDA_SUM_Q, at.seq.row + row.query - at.seq.first);
        void *to = nsa__row_at(params.dx.q, at.seq.batch, nth, row.head);
#pragma unroll
        for (int n = 0; n < N; n++)
            if (8 * n < params.d.dim)
                nsa__cuda_add_pair<T>(params.dx.q.dtype, to, 8 * n + column, params.scale,
                                      bad ? nan : dq[n][2 * h], bad ? nan : dq[n][2 * h + 1]);
    }
}

#endif
