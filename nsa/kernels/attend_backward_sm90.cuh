/* attend_backward_sm90.cuh: attention over few keys, dk and dv, as a pipeline for sm_90a.
   Twin: nsa.h, "Attention over few keys", its backward; attend_backward.cuh says what is computed.
   Not here: which keys and rows (attend_keys.cuh, attend_dkv_scheduler.cuh), dq, other
   architectures.

   A thread block keeps a tile of keys and meets every row that reads one of them. The third
   warpgroup is the producer: it finds the rows, copies them into stages and publishes beside each
   the terms of its rows. The first two are consumers, each with sums of 64 keys in registers. In
   cmp, win and dense they have 64 keys each and share every stage: a row is then loaded once for
   128 keys, and nothing is left to add up. A block of slc has readers of its own, so there both
   have the same 64 keys and take the stages by turns; in the end the first adds the second's sums.

   Each of a consumer's steps has four products: s = k q^T, dp = v dout^T, dv += p dout, dk += ds q.
   Registers are few, so dp is started when p is there, and p and ds of heads wider than 64 become
   operands in halves. s of the next step runs beside the last half of dk (all of it for heads of
   64), and either consumer's arithmetic beside the other one's products. Where every row of a step
   sees all keys of a warp no mask is applied; the branch that asks for it also keeps ptxas from
   putting arithmetic between two products.

   | heads    | branches        | keys | rows of a stage | stages | shared | registers, both sides |
   |---|---|---|---|---|---|---|
   | 64, 64   | cmp, win, dense | 128  | 64              | 4      | 96 KB  | 232, 40 |
   | 128, 128 | cmp, win, dense | 128  | 64              | 4      | 192 KB | 232, 40 |
   | 192, 128 | cmp, win, dense | 128  | 32              | 4      | 160 KB | 224, 56 |
   | 64, 64   | slc             | 64   | 64              | 4      | 80 KB  | 232, 40 |
   | 128, 128 | slc             | 64   | 64              | 4      | 160 KB | 232, 40 |
   | 192, 128 | slc             | 64   | 32              | 4      | 120 KB | 224, 56 |
   One thread block an SM.

   What a step of 64 rows costs a consumer of heads of 128, of 64 keys:
   | what | cycles |
   |---|---|
   | tensor cores            | 16 m64n64k16 and 8 m64n128k16: 1024 cycles |
   | shared memory, products | 96 KB, 768 cycles |
   | shared memory, copies   | 32 KB, 256 cycles, for both consumers where they share a stage |
   | L2                      | 32 KB, likewise: why the two keep 128 keys where they can |
   | instructions            | those of a warp, tests/cuda/counts.json */
#ifndef NSA_ATTEND_BACKWARD_SM90_CUH
#define NSA_ATTEND_BACKWARD_SM90_CUH

#include "attend_dkv_scheduler.cuh"

/* Whether the pipeline serves these heads: wider ones leave no registers for the sums. */
template <typename T, int DK, int DV, bool LISTS = false> struct nsa__cuda_dkv_pipe {
    static constexpr bool value = sizeof(T) == 2 && DK + DV <= 320;
    static constexpr int BLOCK_M = DK + DV > 256 ? 32 : 64, BLOCK_N = LISTS ? 64 : 128;
    static constexpr unsigned STAGES = 4;
    static constexpr int CONSUMERS = 256, PRODUCERS = 128, TEAMS = PRODUCERS / BLOCK_M;
    /* Operands of all rows of a stage: beside the sums of wide heads those of half of them fit. */
    static constexpr int PARTS = DK + DV > 128 ? 2 : 1;
    static constexpr int MORE = DK + DV > 256 ? 224 : 232, LESS = 2 * (252 - MORE); /* registers */
    static constexpr unsigned STRIDE = LISTS ? 2 : 1; /* from a consumer's stage to its next one */
    static constexpr int BYTES =
        static_cast<int>(sizeof(T)) * (DK + DV) * (BLOCK_N + int{STAGES} * BLOCK_M);
    /* A consumer holds a step until it has its next one: that one must be posted by then. */
    static_assert(STAGES >= STRIDE + 2,
                  "the producer would wait for the consumers, and they for it");
    /* What one group hands to the other lies in the stages. */
    static_assert(!LISTS || sizeof(T) * STAGES * BLOCK_M >= 64 * sizeof(float), "stages too small");
};

/* The keys that all of a warp's rows see, and those that any does: begin .. end - 1. */
struct alignas(16) nsa__cuda_dkv_range {
    int all_begin, all_end, any_begin, any_end;
};

/* What the producer publishes beside a stage; a pair of rows is what a thread has of a product. */
template <int ROWS> struct alignas(16) nsa__cuda_dkv_table {
    float terms[ROWS / 2][4]; /* lse of both, then gate; all are 0 if there is no row */
    int keys[ROWS / 2][4];    /* the first that each sees, then how many */
    float delta[ROWS];
    nsa__cuda_dkv_range range[ROWS / 32]; /* of each 32 rows */
    uint32_t bad[ROWS / 32];              /* a bit for each row that is not finite */
};

/* A row that the producer copies next, as its threads share it: where it lies in q, dout and the
   row terms, in elements, and which keys it sees. */
struct alignas(16) nsa__cuda_dkv_row {
    int64_t q, dout, terms; /* terms < 0: there is no row */
    nsa__cuda_key_span keys;
};

/* How many steps there are, and rows in the last; how many readers and heads it is from a producer
   thread's row to its next one. */
struct nsa__cuda_dkv_plan {
    unsigned steps, last;
    int readers, heads;
};

/* What both sides share: a stage is full when all producers have arrived, and empty when a lane of
   each consumer warp that reads it has. */
template <typename T, int ROWS> struct nsa__cuda_dkv_memory {
    T *k, *stages; /* v lies behind k */
    nsa__cuda_dkv_table<ROWS> *tables;
    nsa__cuda_dkv_row (*rows)[ROWS]; /* of this step and the next one */
    uint64_t *full, *empty;
    uint8_t *bad; /* of a consumer's thread: which of its two keys a row reads that is not finite */
    const nsa__cuda_dkv_plan *plan;
};

#if NSA__USES_WGMMA

/* ---- Producer ------------------------------------------------------------------------------ */

/* Thread i makes row i of every PRODUCERS rows, so teams of threads take steps by turns. */
struct nsa__cuda_dkv_reader {
    int number, head; /* the reader's, and which head of the group */
    int entry;        /* what a list says of it, asked for long before it is used */
};

/* Finds the row that the thread makes next, and asks for the one behind it. */
NSA__DEVICE void nsa__cuda_dkv_find(nsa__cuda_dkv_row &row, nsa__cuda_dkv_reader &x,
                                    const nsa__cuda_dkv_plan &plan,
                                    const nsa__cuda_attend_params &params,
                                    const nsa__cuda_attend_head &at,
                                    const nsa__cuda_key_work &work) {
    if (x.number < work.readers) {
        nsa__cuda_reader reader = {work.first + x.number, 0};
        if (work.list) reader = nsa__cuda_reader_of(params, x.entry);
        const int query = reader.query, head = (at.list + reader.list) * params.group + x.head;
        row.q = nsa__cuda_query_offset(params.x.q, at, query, head);
        row.dout = nsa__cuda_query_offset(params.dx.out, at, query, head);
        row.terms = (at.row + query - at.seq.first) * params.d.heads + head;
        row.keys = nsa__cuda_keys_of(params, at.seq.tokens, query);
    } else {
        row = {0, 0, -1, {0, 0}};
    }
    x.number += plan.readers;
    x.head += plan.heads;
    if (x.head >= params.group) {
        x.head -= params.group;
        x.number++;
    }
    if (work.list && x.number < work.readers) x.entry = work.list[x.number];
}

/* Writes what the table says of row `place`, and starts copying its terms. */
template <int ROWS>
NSA__DEVICE void nsa__cuda_dkv_publish(nsa__cuda_dkv_table<ROWS> &table, unsigned place,
                                       const nsa__cuda_dkv_row &row,
                                       const nsa__cuda_attend_params &params) {
    const int bytes = row.terms < 0 ? 0 : 4;
    const nsa__cuda_row_terms *const terms = params.rows + (bytes ? row.terms : 0);
    float *const pair = table.terms[place / 2] + place % 2;
    int *const keys = table.keys[place / 2] + place % 2;
    nsa__cp_async<4>(pair, &terms->lse, bytes);
    nsa__cp_async<4>(pair + 2, &terms->gate, bytes);
    nsa__cp_async<4>(table.delta + place, &terms->delta, bytes);
    keys[0] = row.keys.begin;
    keys[2] = max(row.keys.end - row.keys.begin, 0);
    const nsa__cuda_dkv_range range = {__reduce_max_sync(0xffffffffu, row.keys.begin),
                                       __reduce_min_sync(0xffffffffu, row.keys.end),
                                       __reduce_min_sync(0xffffffffu, row.keys.begin),
                                       __reduce_max_sync(0xffffffffu, row.keys.end)};
    if (place % 32 == 0) table.range[place / 32] = range;
}

/* Starts copying the first `count` rows of q and dout into a stage, zeros behind them. Eight
   threads bring 128 bytes of a row, panel by panel. */
template <typename T, int DK, int DV, int ROWS, int THREADS>
NSA__DEVICE void nsa__cuda_dkv_copy(T *stage, const nsa__cuda_dkv_row *rows, unsigned count,
                                    const nsa__cuda_attend_params &params) {
    constexpr int size = nsa__cuda_piece<T>::size;
    const unsigned thread = threadIdx.x % THREADS;
    const int column = static_cast<int>(thread % 8 * size);
    const T *const of_q = static_cast<const T *>(params.x.q.data) + column,
                   *const of_dout = static_cast<const T *>(params.dx.out.data) + column;
    const bool rounds = params.dx.out.dtype != nsa__dtype_of<T>::value;
    T *to = nsa__cuda_tile_at<T, ROWS>(stage, static_cast<int>(thread / 8),
                                       static_cast<int>(thread % 8));
#pragma unroll 1 /* else their addresses would stay in registers, which are few */
    for (unsigned row = thread / 8; row < ROWS; row += THREADS / 8) {
        const T *const q = of_q + rows[row].q, *const dout = of_dout + rows[row].dout;
        const bool there = row < count;
#pragma unroll
        for (int c = 0; c < DK; c += 64)
            nsa__cp_async<16>(to + c * ROWS, q + c, there && c + column < params.d.dim ? 16 : 0);
#pragma unroll
        for (int c = 0; c < DV && !rounds; c += 64)
            nsa__cp_async<16>(to + (DK + c) * ROWS, dout + c,
                              there && c + column < params.d.dim_v ? 16 : 0);
        to += THREADS / 8 * 64;
    }
    if (rounds)
        nsa__cuda_tile_round<T, DV, ROWS, THREADS>(
            stage + ROWS * DK, params.d.dim_v, params.dx.out.dtype, [&](int r) {
                return r < static_cast<int>(count) ? nsa__element_at(params.dx.out, rows[r].dout)
                                                   : nullptr;
            });
}

/* The step's copies have arrived: rows that are not finite become zeros, and their p too. */
template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_dkv_commit(const nsa__cuda_dkv_memory<T, nsa__cuda_dkv_pipe<T, DK, DV>::BLOCK_M> &pipe,
                     unsigned step) {
    using shape = nsa__cuda_dkv_pipe<T, DK, DV, LISTS>;
    constexpr int ROWS = shape::BLOCK_M, THREADS = shape::PRODUCERS;
    const unsigned stage = step % shape::STAGES, thread = threadIdx.x % THREADS;
    nsa__cuda_dkv_table<ROWS> &table = pipe.tables[stage];
    uint64_t bad = 0;
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++) bad |= static_cast<uint64_t>(table.bad[i]) << 32 * i;
    if (__builtin_expect(bad != 0, 0)) {
        T *const q = pipe.stages + stage * ROWS * (DK + DV);
        nsa__cuda_tile_zero<T, DK, ROWS, THREADS>(q, bad);
        nsa__cuda_tile_zero<T, DV, ROWS, THREADS>(q + ROWS * DK, bad);
        if (thread < ROWS && bad >> thread & 1) table.terms[thread / 2][thread % 2] = INFINITY;
    }
    nsa__fence_async();
    nsa__mbarrier_arrive(pipe.full + stage);
}

template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_dkv_produce(const nsa__cuda_dkv_memory<T, nsa__cuda_dkv_pipe<T, DK, DV>::BLOCK_M> &pipe,
                      const nsa__cuda_attend_params &params, const nsa__cuda_attend_head &at,
                      const nsa__cuda_key_work &work) {
    using shape = nsa__cuda_dkv_pipe<T, DK, DV, LISTS>;
    constexpr int ROWS = shape::BLOCK_M, THREADS = shape::PRODUCERS;
    constexpr unsigned STAGES = shape::STAGES;
    const unsigned thread = threadIdx.x % THREADS, row = thread % ROWS;
    const auto mine = [&](unsigned step) { return thread / ROWS == step % shape::TEAMS; };
    nsa__cuda_dkv_reader x = {static_cast<int>(thread) / params.group,
                              static_cast<int>(thread) % params.group, 0};
    if (work.list && x.number < work.readers) x.entry = work.list[x.number];
    if (mine(0)) nsa__cuda_dkv_find(pipe.rows[0][row], x, *pipe.plan, params, at, work);
    nsa__barrier_sync(1, THREADS);
    for (unsigned step = 0; step <= pipe.plan->steps; step++) {
        const unsigned stage = step % STAGES;
        if (step < pipe.plan->steps) {
            if (step >= STAGES) nsa__mbarrier_wait(pipe.empty + stage, (step / STAGES & 1) ^ 1);
            nsa__cuda_dkv_copy<T, DK, DV, ROWS, THREADS>(
                pipe.stages + stage * ROWS * (DK + DV), pipe.rows[step % 2],
                step + 1 < pipe.plan->steps ? ROWS : pipe.plan->last, params);
            if (mine(step))
                nsa__cuda_dkv_publish<ROWS>(pipe.tables[stage], row, pipe.rows[step % 2][row],
                                            params);
        }
        nsa__cp_async_commit();
        if (mine(step + 1))
            nsa__cuda_dkv_find(pipe.rows[(step + 1) % 2][row], x, *pipe.plan, params, at, work);
        nsa__cp_async_wait<1>();
        if (step > 0 && mine(step - 1)) {
            nsa__cuda_dkv_table<ROWS> &table = pipe.tables[(step - 1) % STAGES];
            const uint32_t bad =
                __ballot_sync(0xffffffffu, nsa__cuda_is_nan_bits(table.terms[row / 2][row % 2]));
            if (row % 32 == 0) table.bad[row / 32] = bad;
        }
        /* all parts of the step before have arrived, and the rows of the next are known */
        nsa__barrier_sync(1, THREADS);
        if (step > 0) nsa__cuda_dkv_commit<T, DK, DV, LISTS>(pipe, step - 1);
    }
}

/* ---- Consumers ----------------------------------------------------------------------------- */

/* A consumer's step, and whether its warpgroup sees something of it. */
struct nsa__cuda_dkv_state {
    unsigned number, steps; /* of all */
    bool sees;              /* the warpgroup; false behind the last step, too */
};

/* The first key of the thread's warpgroup, and of its warp. */
template <bool LISTS> NSA__DEVICE int nsa__cuda_dkv_group_key(const nsa__cuda_key_work &work) {
    return work.begin + (LISTS ? 0 : static_cast<int>(threadIdx.x / 128 * 64));
}
template <bool LISTS> NSA__DEVICE int nsa__cuda_dkv_warp_key(const nsa__cuda_key_work &work) {
    return nsa__cuda_dkv_group_key<LISTS>(work) + static_cast<int>(threadIdx.x % 128 / 32 * 16);
}

/* Turns to the warpgroup's next step. */
template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_dkv_next(nsa__cuda_dkv_state &state,
                   const nsa__cuda_dkv_memory<T, nsa__cuda_dkv_pipe<T, DK, DV>::BLOCK_M> &pipe,
                   const nsa__cuda_key_work &work) {
    using shape = nsa__cuda_dkv_pipe<T, DK, DV, LISTS>;
    state.number += shape::STRIDE;
    state.sees = false;
    if (state.number >= state.steps) return;
    const unsigned stage = state.number % shape::STAGES;
    const int first = nsa__cuda_dkv_group_key<LISTS>(work);
    nsa__mbarrier_wait(pipe.full + stage, state.number / shape::STAGES & 1);
#pragma unroll
    for (int i = 0; i < shape::BLOCK_M / 32; i++) {
        const nsa__cuda_dkv_range &range = pipe.tables[stage].range[i];
        state.sees |= range.any_begin < first + 64 && range.any_end > first;
    }
}

/* From a step that the warpgroup sees nothing of, released unread, to the next that it does. */
template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_dkv_skip(nsa__cuda_dkv_state &state,
                   const nsa__cuda_dkv_memory<T, nsa__cuda_dkv_pipe<T, DK, DV>::BLOCK_M> &pipe,
                   const nsa__cuda_key_work &work) {
    while (!state.sees && state.number < state.steps) {
        nsa__cuda_pipe_release(pipe.empty + state.number % nsa__cuda_dkv_pipe<T, DK, DV>::STAGES);
        nsa__cuda_dkv_next<T, DK, DV, LISTS>(state, pipe, work);
    }
}

/* Whether every row of the table sees all 16 keys of a warp. */
template <int ROWS>
NSA__DEVICE bool nsa__cuda_dkv_whole(const nsa__cuda_dkv_table<ROWS> &table, int first) {
    bool whole = true;
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++)
        whole &= table.range[i].all_begin <= first && table.range[i].all_end >= first + 16;
    return whole;
}

/* s = k q^T becomes gate p; columns are rows of the table. `key`: the upper one of the thread. */
template <int N>
NSA__DEVICE void nsa__cuda_dkv_pipe_p(float (&s)[N / 8][4], const nsa__cuda_dkv_table<N> &table,
                                      int key, float scale, bool whole) {
    const int pair = static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const float4 terms = nsa__cuda_float4_at(table.terms[4 * n + pair]);
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = nsa__cuda_p(s[n][e], scale, e % 2 ? terms.y : terms.x) *
                      (e % 2 ? terms.w : terms.z);
    }
    if (whole) return;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const int4 keys = *reinterpret_cast<const int4 *>(table.keys[4 * n + pair]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int place = key + e / 2 * 8 - (e % 2 ? keys.y : keys.x);
            if (static_cast<unsigned>(place) >= static_cast<unsigned>(e % 2 ? keys.w : keys.z))
                s[n][e] = 0;
        }
    }
}

/* dp = v dout^T becomes ds = p (dp - delta), in one of PARTS parts of the rows. dp of what is
   masked may overflow, delta too, and 0 inf is NaN: if a mask was applied, ds is 0 where p is. A
   branch before the arithmetic, and none behind it, keeps it out from between products. */
template <int N, int PARTS, int PART>
NSA__DEVICE void nsa__cuda_dkv_pipe_ds(const float (&p)[N / 8][4], float (&dp)[N / 8][4],
                                       const nsa__cuda_dkv_table<N> &table, bool whole) {
    constexpr int BEGIN = PART * N / 8 / PARTS, END = (PART + 1) * N / 8 / PARTS;
    const int pair = static_cast<int>(threadIdx.x % 4);
    if (!whole) {
#pragma unroll
        for (int n = BEGIN; n < END; n++) {
            const float2 delta = *reinterpret_cast<const float2 *>(table.delta + 8 * n + 2 * pair);
#pragma unroll
            for (int e = 0; e < 4; e++)
                dp[n][e] = p[n][e] == 0 ? 0 : p[n][e] * (dp[n][e] - (e % 2 ? delta.y : delta.x));
        }
        return;
    }
#pragma unroll
    for (int n = BEGIN; n < END; n++) {
        const float2 delta = *reinterpret_cast<const float2 *>(table.delta + 8 * n + 2 * pair);
#pragma unroll
        for (int e = 0; e < 4; e++) dp[n][e] = p[n][e] * (dp[n][e] - (e % 2 ? delta.y : delta.x));
    }
}

/* One of PARTS parts of a step's rows as an operand. */
template <typename T, int N, int PARTS, int PART>
NSA__DEVICE void nsa__cuda_dkv_pack(uint32_t (&to)[N / 16 / PARTS][4], const float (&p)[N / 8][4]) {
    constexpr int COUNT = N / 16 / PARTS;
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        nsa__cuda_pack_product<T>(to[k], p[2 * (PART * COUNT + k)], p[2 * (PART * COUNT + k) + 1]);
}

/* The gradient of keys that a row reads is NaN if the row is not finite. */
template <int N>
NSA__DEVICE void nsa__cuda_dkv_note(uint8_t *bad_keys, const nsa__cuda_dkv_table<N> &table,
                                    int key) {
#pragma unroll
    for (int i = 0; i < N / 32; i++)
        for (uint32_t bad = table.bad[i]; bad; bad &= bad - 1) {
            const int row = 32 * i + __ffs(static_cast<int>(bad)) - 1;
            const int begin = table.keys[row / 2][row % 2],
                      end = begin + table.keys[row / 2][2 + row % 2];
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (key + 8 * h >= begin && key + 8 * h < end)
                    bad_keys[threadIdx.x] |= static_cast<uint8_t>(1 << h);
        }
}

template <typename T, int DK, int DV, bool LISTS>
NSA__DEVICE void
nsa__cuda_dkv_consume(float (&dk)[DK / 8][4], float (&dv)[DV / 8][4],
                      const nsa__cuda_dkv_memory<T, nsa__cuda_dkv_pipe<T, DK, DV>::BLOCK_M> &pipe,
                      const nsa__cuda_key_work &work, float scale) {
    using shape = nsa__cuda_dkv_pipe<T, DK, DV, LISTS>;
    constexpr int ROWS = shape::BLOCK_M, KEYS = shape::BLOCK_N, PARTS = shape::PARTS,
                  PART = ROWS / PARTS;
    constexpr unsigned STAGES = shape::STAGES;
    /* in units of 16 bytes: from k to v, to the first stage, from a stage to the next one, from its
       q to its dout; and what makes a descriptor of rows one of columns, which says how far panels
       are apart */
    constexpr uint32_t V = KEYS * DK / 8, FIRST = KEYS * (DK + DV) / 8, STEP = ROWS * (DK + DV) / 8;
    constexpr uint32_t DOUT = ROWS * DK / 8, COLUMNS = (ROWS * 8 - 1) * 65536u;
    const uint64_t base = nsa__wgmma_descriptor(pipe.k, 16, 1024, NSA__SWIZZLE_128);
    /* made anew for every product: those that stay would take registers, and not uniform ones */
    const auto keys = [&] {
        return nsa__cuda_warpgroup_moved(base, LISTS ? 0 : threadIdx.x / 128 * 512);
    };
    const auto rows = [&](unsigned number) {
        return nsa__cuda_warpgroup_moved(base, FIRST + number % STAGES * STEP);
    };
    float s[ROWS / 8][4];
    nsa__cuda_dkv_state state = {(LISTS ? threadIdx.x / 128 : 0) - shape::STRIDE, pipe.plan->steps,
                                 false};
    nsa__cuda_dkv_next<T, DK, DV, LISTS>(state, pipe, work);
    nsa__cuda_dkv_skip<T, DK, DV, LISTS>(state, pipe, work);
    while (state.sees) {
        nsa__cuda_warpgroup_start_nt<T, DK, ROWS, KEYS>(s, keys(), rows(state.number));
        unsigned before; /* the step whose dk is under way, and that the warp holds */
        for (;;) {
            before = state.number;
            const nsa__cuda_dkv_table<ROWS> &table = pipe.tables[before % STAGES];
            const int first = nsa__cuda_dkv_warp_key<LISTS>(work),
                      key = first + static_cast<int>(threadIdx.x % 32 / 4);
            const bool whole = nsa__cuda_dkv_whole(table, first);
            float dp[ROWS / 8][4];
            uint32_t a[PART / 16][4], b[PART / 16][4];
            nsa__cuda_warpgroup_await<ROWS, 0>(s);
            nsa__cuda_dkv_pipe_p<ROWS>(s, table, key, scale, whole);
            nsa__cuda_dkv_pack<T, ROWS, PARTS, 0>(a, s);
            /* not earlier, because p takes the registers that dp has from here on */
            const uint64_t dout = rows(before) + DOUT;
            nsa__cuda_warpgroup_start_nt<T, DV, ROWS, KEYS>(dp, keys() + V, dout);
            nsa__cuda_warpgroup_start_nn<T, PART, DV>(dv, a, dout + COLUMNS);
            nsa__cuda_warpgroup_await<ROWS, 1>(dp);
            nsa__cuda_dkv_pipe_ds<ROWS, PARTS, 0>(s, dp, table, whole);
            if constexpr (PARTS > 1) {
                nsa__cuda_warpgroup_await<DV, 0>(dv);
                nsa__cuda_dkv_pack<T, ROWS, PARTS, 1>(a, s);
                nsa__cuda_warpgroup_start_nn<T, PART, DV>(dv, a,
                                                          rows(before) + DOUT + COLUMNS + PART * 8);
                nsa__cuda_dkv_pipe_ds<ROWS, PARTS, 1>(s, dp, table, whole);
                nsa__cuda_warpgroup_await<DV, 0>(dv);
            }
            nsa__cuda_dkv_pack<T, ROWS, PARTS, 0>(b, dp);
            nsa__cuda_warpgroup_start_nn<T, PART, DK>(dk, b, rows(before) + COLUMNS);
            nsa__cuda_dkv_note<ROWS>(pipe.bad, table, key);
            if constexpr (PARTS > 1) {
                nsa__cuda_warpgroup_await<DK, 0>(dk);
                nsa__cuda_dkv_pack<T, ROWS, PARTS, 1>(b, dp);
                nsa__cuda_warpgroup_start_nn<T, PART, DK>(dk, b, rows(before) + COLUMNS + PART * 8);
            }
            nsa__cuda_dkv_next<T, DK, DV, LISTS>(state, pipe, work);
            if (!state.sees) break;
            nsa__cuda_warpgroup_start_nt<T, DK, ROWS, KEYS>(s, keys(), rows(state.number));
            if constexpr (PARTS == 1) nsa__cuda_warpgroup_await<DV, 1>(dv);
            nsa__cuda_warpgroup_await<DK, 1>(dk);
            nsa__cuda_pipe_release(pipe.empty + before % STAGES);
        }
        /* It may hold one step until the next is posted, but not pass over others meanwhile: the
           producer would wait for that one. */
        if constexpr (PARTS == 1) nsa__cuda_warpgroup_await<DV, 0>(dv);
        nsa__cuda_warpgroup_await<DK, 0>(dk);
        nsa__cuda_pipe_release(pipe.empty + before % STAGES);
        nsa__cuda_dkv_skip<T, DK, DV, LISTS>(state, pipe, work);
    }
}

/* slc: the second consumer hands its sums over, thread by thread; true for the first, whose sums
   then are those of all steps, always added in the same order. */
template <typename T, int DK, int DV>
NSA__DEVICE bool nsa__cuda_dkv_merge(float (&dk)[DK / 8][4], float (&dv)[DV / 8][4], float *sums,
                                     uint8_t *bad) {
    constexpr int THREADS = nsa__cuda_dkv_pipe<T, DK, DV>::CONSUMERS;
    const int thread = static_cast<int>(threadIdx.x % 128);
    const bool hands = threadIdx.x >= 128;
    float *const of_k = sums + thread, *const of_v = of_k + DK / 2 * 128;
    nsa__barrier_sync(2, THREADS); /* nobody multiplies any more */
    if (hands) {
#pragma unroll
        for (int i = 0; i < DK / 2; i++) of_k[128 * i] = dk[i / 4][i % 4];
#pragma unroll
        for (int i = 0; i < DV / 2; i++) of_v[128 * i] = dv[i / 4][i % 4];
    }
    nsa__barrier_sync(2, THREADS);
    if (hands) return false;
#pragma unroll
    for (int i = 0; i < DK / 2; i++) dk[i / 4][i % 4] += of_k[128 * i];
#pragma unroll
    for (int i = 0; i < DV / 2; i++) dv[i / 4][i % 4] += of_v[128 * i];
    bad[thread] |= bad[thread + 128];
    return true;
}

#endif

/* LISTS: slc, where the readers of a block are listed. */
template <typename T, int DK, int DV, bool LISTS>
static __global__ void __launch_bounds__(384, 1)
    nsa__cuda_attend_dkv_sm90_kernel(const NSA_GRID_CONSTANT nsa__cuda_attend_params params) {
#if NSA__USES_WGMMA
    using shape = nsa__cuda_dkv_pipe<T, DK, DV, LISTS>;
    constexpr int BLOCK_M = shape::BLOCK_M, BLOCK_N = shape::BLOCK_N;
    constexpr unsigned STAGES = shape::STAGES;
    constexpr int THREADS = shape::CONSUMERS + shape::PRODUCERS;
    NSA_SHARED_ALL(shared);
    NSA_SHARED(nsa__cuda_dkv_table<BLOCK_M>, tables, [STAGES]);
    NSA_SHARED(nsa__cuda_dkv_row, rows, [2][BLOCK_M]);
    NSA_SHARED(uint64_t, full, [STAGES]);
    NSA_SHARED(uint64_t, empty, [STAGES]);
    NSA_SHARED(uint8_t, bad, [shape::CONSUMERS]);
    T *const k = reinterpret_cast<T *>(shared), *const v = k + BLOCK_N * DK;
    NSA_SHARED(nsa__cuda_attend_head, at, );
    NSA_SHARED(nsa__cuda_key_work, work, );
    NSA_SHARED(nsa__cuda_dkv_plan, plan, );
    static_assert(nsa__cuda_shared_fits<shape::BYTES, sizeof tables + sizeof rows + sizeof full +
                                                          sizeof empty + sizeof bad + sizeof at +
                                                          sizeof work + sizeof plan>::value);
    const nsa__cuda_dkv_memory<T, BLOCK_M> pipe = {
        k, v + BLOCK_N * DV, tables, rows, full, empty, bad, &plan};
    if (threadIdx.x == 0) {
        at = nsa__cuda_attend_head_of(params, blockIdx.x);
        work = LISTS ? nsa__cuda_key_work_of_block(params, at, BLOCK_N)
                     : nsa__cuda_key_work_of_tile(params, at, BLOCK_N);
        const int64_t all = static_cast<int64_t>(work.readers) * params.group;
        plan.steps = static_cast<unsigned>((all + BLOCK_M - 1) / BLOCK_M);
        plan.last = static_cast<unsigned>(all - int64_t(plan.steps - 1) * BLOCK_M);
        plan.readers = shape::PRODUCERS / params.group;
        plan.heads = shape::PRODUCERS % params.group;
        for (unsigned i = 0; i < STAGES; i++) {
            nsa__mbarrier_init(full + i, shape::PRODUCERS);
            nsa__mbarrier_init(empty + i, shape::CONSUMERS / 32 / int{shape::STRIDE});
        }
        nsa__fence_async();
    }
    __syncthreads();
    if (work.begin >= work.end || !work.readers) return;
    nsa__cuda_stage_keys<T, DK, DV, BLOCK_N, THREADS, false>(k, params, at,
                                                             {work.begin, work.end, 0, 0});
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();
    if (threadIdx.x >= shape::CONSUMERS) {
        nsa__registers<shape::LESS, false>();
        nsa__cuda_dkv_produce<T, DK, DV, LISTS>(pipe, params, at, work);
        return;
    }
    nsa__registers<shape::MORE, true>();
    const int warp = static_cast<int>(threadIdx.x / 32);
    if (warp < BLOCK_N / 16) {
        nsa__cuda_tile_clean<T, DK, BLOCK_N>(k, 16 * warp);
        nsa__cuda_tile_clean<T, DV, BLOCK_N>(v, 16 * warp);
    }
    /* also those that the producers copied (nsa__cuda_attend_forward_sm90_kernel says why) */
    nsa__fence_async(); /* copied and cleaned rows, before the warpgroups multiply them */
    nsa__barrier_sync(2, shape::CONSUMERS);
    float dk[DK / 8][4] = {}, dv[DV / 8][4] = {};
    bad[threadIdx.x] = 0;
    nsa__cuda_dkv_consume<T, DK, DV, LISTS>(dk, dv, pipe, work, params.scale);
    if constexpr (LISTS)
        if (!nsa__cuda_dkv_merge<T, DK, DV>(dk, dv, reinterpret_cast<float *>(pipe.stages), bad))
            return;
    const int lane = static_cast<int>(threadIdx.x % 32),
              key = nsa__cuda_dkv_warp_key<LISTS>(work) + lane / 4;
    const bool bad_key[2] = {(bad[threadIdx.x] & 1) != 0, bad[threadIdx.x] > 1};
    nsa__cuda_dkv_end<T>(params, at, work, params.dx.k, params.d.dim, 0, params.scale, key,
                         lane % 4 * 2, bad_key, dk);
    nsa__cuda_dkv_end<T>(params, at, work, params.dx.v, params.d.dim_v, params.d.dim, 1.0f, key,
                         lane % 4 * 2, bad_key, dv);
#else
    static_cast<void>(params); /* never launched (nsa__cuda_on_hopper) */
#endif
}

#endif
