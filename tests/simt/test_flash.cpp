/* test_flash.cpp: causal attention of one head as a GPU does it - cp.async in two stages, ldmatrix,
   mma.sync, online softmax - against a plain f64 sum, then with one fault at a time.
   Twin: nsa/kernels/attend_forward.cuh, of which this is a small, independent cousin that stays as
   it is: what the executor catches here is a figure about the executor.
   Not here: faults in the real kernels (mutate/). */
#include "expect.h"

#include <cmath>

using bf16 = __nv_bfloat16;
constexpr int width = 64, rows = 64, keys = 32, threads = 128; /* rows and keys of a tile */

enum fault {
    none,
    no_barrier_after_wait,
    waits_for_one_less,
    no_commit,
    no_barrier_before_reuse,
    wrong_stage,
    mask_one_late,
    no_mask,
    mask_ignores_lower_rows,
    maximum_of_two_lanes,
    no_rescale,
    sum_of_two_lanes,
    maximum_starts_at_zero,
    read_unswizzled,
    values_not_transposed,
    k_halves_swapped,
    packed_swapped,
    not_normalised,
    last_tile_skipped,
    sums_not_cleared,
    queries_past_end,
    keys_past_end,
    rows_left_unfilled,
    stores_past_end,
    tile_past_end,
    half_mask,
    lane_leaves_product,
    warp_leaves_barrier,
    shared_too_small,
    fault_count
};

/* 16-byte chunk `chunk` of row `row`; the chunks of 8 rows lie in 8 different bank groups. */
template <bool SWIZZLED> __device__ bf16 *at(bf16 *tile, int row, int chunk) {
    return tile + row * width + 8 * (SWIZZLED ? chunk ^ (row % 8) : chunk);
}

template <int FAULT>
static __device__ void load_rows(bf16 *tile, const bf16 *from, int first, int count, int tokens) {
    for (int i = static_cast<int>(threadIdx.x); i < count * 8; i += threads) {
        const int row = i / 8, chunk = i % 8, token = first + row;
        const bool inside = token < tokens;
        if (FAULT == rows_left_unfilled && !inside) continue;
        const bool reads = inside || FAULT == (count == rows ? queries_past_end : keys_past_end);
        nsa__cp_async<16>(at<true>(tile, row, chunk),
                          from + static_cast<int64_t>(reads ? token : 0) * width + 8 * chunk,
                          reads ? 16 : 0);
    }
}

/* s (16 x keys of this warp) = q k^T */
template <int FAULT>
static __device__ void scores(float (&s)[keys / 8][4], bf16 *q, bf16 *k, int warp, int lane) {
    constexpr bool swizzled = FAULT != read_unswizzled;
    for (auto &tile : s)
        for (float &x : tile) x = 0.0f;
    for (int j = 0; j < width / 16; j++) {
        uint32_t a[4];
        nsa__ldmatrix_x4(a, at<true>(q, 16 * warp + lane % 16, 2 * j + lane / 16));
        for (int n = 0; n < keys / 16; n++) {
            uint32_t b[4];
            nsa__ldmatrix_x4(
                b, at<swizzled>(k, 16 * n + lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2));
            const int low = FAULT == k_halves_swapped, high = 1 - low;
            if (FAULT == lane_leaves_product && lane == 9) continue;
            nsa__mma_m16n8k16<bf16>(s[2 * n], a, b[low], b[high]);
            nsa__mma_m16n8k16<bf16>(s[2 * n + 1], a, b[2 + low], b[2 + high]);
        }
    }
}

template <int FAULT>
static __device__ void mask(float (&s)[keys / 8][4], int first_row, int first_key, int lane,
                            float scale) {
    for (int n = 0; n < keys / 8; n++)
        for (int e = 0; e < 4; e++) {
            const int row =
                first_row + lane / 4 + (FAULT == mask_ignores_lower_rows ? 0 : e / 2 * 8);
            const int key = first_key + 8 * n + lane % 4 * 2 + e % 2;
            const bool seen = FAULT == no_mask || key <= row + (FAULT == mask_one_late);
            s[n][e] = seen ? s[n][e] * scale : -INFINITY;
        }
}

/* Largest or sum over the four lanes that share a row. */
template <int FAULT> static __device__ float row_max(float x) {
    constexpr unsigned lanes = FAULT == half_mask ? 0x0000ffffu : 0xffffffffu;
    x = fmaxf(x, __shfl_xor_sync(lanes, x, 1));
    if (FAULT != maximum_of_two_lanes) x = fmaxf(x, __shfl_xor_sync(lanes, x, 2));
    return x;
}
template <int FAULT> static __device__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    if (FAULT != sum_of_two_lanes) x += __shfl_xor_sync(0xffffffffu, x, 2);
    return x;
}

/* One tile of keys into the running maximum, sum and output; s becomes p. */
template <int FAULT>
static __device__ void online(float (&s)[keys / 8][4], float (&top)[2], float (&sum)[2],
                              float (&out)[width / 8][4]) {
    for (int h = 0; h < 2; h++) {
        float largest = top[h];
        for (auto &tile : s) largest = fmaxf(largest, fmaxf(tile[2 * h], tile[2 * h + 1]));
        largest = row_max<FAULT>(largest);
        const float shrink = nsa__ex2(top[h] - largest);
        top[h] = largest;
        sum[h] *= shrink;
        for (auto &tile : s)
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                tile[e] = nsa__ex2(tile[e] - largest);
                sum[h] += tile[e];
            }
        for (auto &tile : out)
            for (int e = 2 * h; e < 2 * h + 2; e++)
                if (FAULT != no_rescale) tile[e] *= shrink;
    }
}

/* out += p v */
template <int FAULT>
static __device__ void outputs(float (&out)[width / 8][4], const float (&p)[keys / 8][4], bf16 *v,
                               int lane) {
    for (int j = 0; j < keys / 16; j++) {
        uint32_t a[4];
        for (int r = 0; r < 4; r++) {
            const float *pair = &p[2 * j + r / 2][r % 2 * 2];
            a[r] = FAULT == packed_swapped ? nsa__pack<bf16>(pair[1], pair[0])
                                           : nsa__pack<bf16>(pair[0], pair[1]);
        }
        for (int n = 0; n < width / 16; n++) {
            uint32_t b[4];
            bf16 *row = at<true>(v, 16 * j + lane % 16, 2 * n + lane / 16);
            if (FAULT == values_not_transposed)
                nsa__ldmatrix_x4(b, row);
            else
                nsa__ldmatrix_x4_trans(b, row);
            nsa__mma_m16n8k16<bf16>(out[2 * n], a, b[0], b[1]);
            nsa__mma_m16n8k16<bf16>(out[2 * n + 1], a, b[2], b[3]);
        }
    }
}

template <int FAULT>
static __device__ void store(float *to, const float (&out)[width / 8][4], const float (&sum)[2],
                             int first_row, int tokens, int lane) {
    for (int h = 0; h < 2; h++) {
        const int row = first_row + lane / 4 + 8 * h;
        const float scale = FAULT == not_normalised ? 1.0f : 1.0f / row_sum<FAULT>(sum[h]);
        if (row >= tokens && FAULT != stores_past_end) continue;
        for (int n = 0; n < width / 8; n++)
            for (int e = 0; e < 2; e++)
                to[static_cast<int64_t>(row) * width + 8 * n + lane % 4 * 2 + e] =
                    out[n][2 * h + e] * scale;
    }
}

template <int FAULT>
static __global__ void flash_kernel(const bf16 *q, const bf16 *k, const bf16 *v, float *out,
                                    int tokens, float scale) {
    NSA_SHARED_ALL(bytes);
    bf16 *tile_q = reinterpret_cast<bf16 *>(bytes), *tile_k = tile_q + rows * width,
         *tile_v = tile_k + 2 * keys * width;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int first_row = rows * static_cast<int>(blockIdx.x);
    const int last_row = min(first_row + rows, tokens);
    const int steps = (last_row + keys - 1) / keys - (FAULT == last_tile_skipped);
    float acc[width / 8][4], sum[2] = {0.0f, 0.0f};
    float top[2] = {FAULT == maximum_starts_at_zero ? 0.0f : -1e30f, top[0]};
    for (auto &tile : acc)
        for (float &x : tile)
            if (FAULT != sums_not_cleared) x = 0.0f;
    if (FAULT == warp_leaves_barrier && first_row + 16 * warp >= tokens) return;
    load_rows<FAULT>(tile_q, q, first_row, rows, tokens);
    load_rows<FAULT>(tile_k, k, 0, keys, tokens);
    load_rows<FAULT>(tile_v, v, 0, keys, tokens);
    nsa__cp_async_commit();
    for (int i = 0; i < steps; i++) {
        const int stage = i % 2 * keys * width, next = (i + 1) % 2 * keys * width;
        if (i + 1 < steps || FAULT == tile_past_end) {
            const int room = FAULT == tile_past_end ? 1 << 20 : tokens;
            load_rows<FAULT>(tile_k + next, k, (i + 1) * keys, keys, room);
            load_rows<FAULT>(tile_v + next, v, (i + 1) * keys, keys, room);
        }
        if (FAULT != no_commit) nsa__cp_async_commit();
        if (FAULT == waits_for_one_less)
            nsa__cp_async_wait<2>();
        else
            nsa__cp_async_wait<1>();
        if (FAULT != no_barrier_after_wait) __syncthreads();
        float s[keys / 8][4];
        scores<FAULT>(s, tile_q, tile_k + (FAULT == wrong_stage ? next : stage), warp, lane);
        mask<FAULT>(s, first_row + 16 * warp, i * keys, lane, scale);
        online<FAULT>(s, top, sum, acc);
        outputs<FAULT>(acc, s, tile_v + stage, lane);
        if (FAULT != no_barrier_before_reuse) __syncthreads();
    }
    nsa__cp_async_wait<0>();
    store<FAULT>(out, acc, sum, first_row + 16 * warp, tokens, lane);
}

/* ---- The plain way, and the comparison ---------------------------------------------------- */

struct problem {
    int tokens;
    std::vector<bf16> q, k, v;
    std::vector<double> want;
};

/* `shift` is added to every element of q, and taken from every element of k. */
static problem make_problem(int tokens, float shift) {
    problem p = {tokens, {}, {}, {}, {}};
    unsigned state = 11;
    std::vector<bf16> *const all[3] = {&p.q, &p.k, &p.v};
    for (int which = 0; which < 3; which++)
        for (int i = 0; i < tokens * width; i++) {
            state = state * 1664525u + 1013904223u;
            const float u = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
            const float grow = 1.0f + 0.02f * static_cast<float>(i / width);
            const float values[3] = {u + shift, u * grow - shift,
                                     u}; /* the largest score comes late */
            all[which]->push_back(__float2bfloat16(values[which]));
        }
    auto at = [](const std::vector<bf16> &x, int row, int d) {
        return static_cast<double>(__bfloat162float(x[static_cast<size_t>(row * width + d)]));
    };
    p.want.assign(static_cast<size_t>(tokens * width), 0.0);
    for (int t = 0; t < tokens; t++) {
        std::vector<double> w;
        double sum = 0.0;
        for (int s = 0; s <= t; s++) {
            double score = 0.0;
            for (int d = 0; d < width; d++) score += at(p.q, t, d) * at(p.k, s, d);
            w.push_back(std::exp(score / 8.0));
            sum += w.back();
        }
        for (int s = 0; s <= t; s++)
            for (int d = 0; d < width; d++)
                p.want[static_cast<size_t>(t * width + d)] +=
                    w[static_cast<size_t>(s)] / sum * at(p.v, s, d);
    }
    return p;
}

/* Relative L2 error of the output; 1 if the launch failed. */
template <int FAULT> static double run(const problem &p) {
    const device_array<bf16> q(p.q), k(p.k), v(p.v);
    device_array<float> out(p.want.size());
    const unsigned blocks = static_cast<unsigned>((p.tokens + rows - 1) / rows);
    const size_t shared =
        sizeof(bf16) * width * (rows + 4 * keys) - (FAULT == shared_too_small ? 16 : 0);
    const float log2_scale = 0.125f * 1.44269504f;
    EXPECT(NSA_LAUNCH(flash_kernel<FAULT>, blocks, threads, shared, nullptr, q.data, k.data, v.data,
                      out.data, p.tokens, log2_scale) == cudaSuccess);
    if (cudaDeviceSynchronize() != cudaSuccess) {
        simt::clear_report(); /* and free what was allocated */
        return 1.0;
    }
    double wrong = 0.0, size = 0.0;
    const std::vector<float> got = out.read();
    for (size_t i = 0; i < got.size(); i++) {
        wrong += (got[i] - p.want[i]) * (got[i] - p.want[i]);
        size += p.want[i] * p.want[i];
    }
    const double error = std::sqrt(wrong / size);
    return error == error ? error : 1.0;
}

constexpr double tolerance = 6e-3; /* p and v have 8 bits: 2^-8 each, over many keys less */

static void each_schedule(bool all, void (*body)()) {
    for (const simt::order o : {simt::order::in_order, simt::order::reversed, simt::order::random})
        for (const bool early : {false, true}) {
            simt::config().schedule = o;
            simt::config().early = early;
            body();
            if (!all) return;
        }
}

static void test_right() {
    for (const int tokens : {1, 31, 64, 100, 161}) {
        const double error = run<none>(make_problem(tokens, 0.0f));
        EXPECT(error < tolerance);
        if (error >= tolerance) printf("%d tokens: relative error %g\n", tokens, error);
    }
}

/* Swizzled tiles are read without a bank conflict; every product of the tiles is one mma. */
static void test_counts() {
    simt::reset_counters();
    EXPECT(run<none>(make_problem(64, 0.0f)) < tolerance);
    const simt::counters &n = simt::count();
    EXPECT_EQUAL(n.ldmatrix_cycles, n.ldmatrix_phases);
    EXPECT_EQUAL(n.mma, 2 * 4 * (2 * rows / 16 * keys / 8 / 4 * width / 16 * 2 / 2));
    EXPECT_EQUAL(n.async_bytes, 2 * width * (rows + 2 * 64));
}

/* ---- One fault at a time ------------------------------------------------------------------ */

#ifndef __SANITIZE_ADDRESS__ /* which ends the program at a stray access */

static int caught, planted;

/* What no other mode than the checker can be sure to see: the schedules and the landing of copies
   hide it from the result. */
static bool only_checker(int fault) {
    return fault == no_barrier_after_wait;
}

template <int FAULT> static void test_fault(const std::vector<problem> &problems) {
    if (only_checker(FAULT) && !simt::checking()) return;
    bool seen = false;
    simt::config().quiet = true;
    for (const simt::order o : {simt::order::in_order, simt::order::reversed, simt::order::random})
        for (const bool early : {false, true})
            for (const problem &p : problems) {
                if (seen) continue;
                simt::config().schedule = o;
                simt::config().early = early;
                seen = !(run<FAULT>(p) < tolerance);
            }
    simt::config().quiet = false;
    planted++;
    caught += seen;
    if (!seen) printf("fault %d was not caught\n", FAULT);
}

template <int... FAULTS> static void test_faults(std::integer_sequence<int, FAULTS...>) {
    /* The second has scores of about -300 throughout; the third fills its second stage once. */
    const std::vector<problem> problems = {make_problem(100, 0.0f), make_problem(64, 6.0f),
                                           make_problem(50, 0.0f)};
    for (const problem &p : problems) EXPECT(run<none>(p) < tolerance);
    (test_fault<FAULTS + 1>(problems), ...);
    printf("%d of %d faults caught\n", caught, planted);
    EXPECT_EQUAL(caught, planted);
}

#endif

int main() {
    each_schedule(true, test_right);
    each_schedule(false, test_counts);
#ifndef __SANITIZE_ADDRESS__
    test_faults(std::make_integer_sequence<int, fault_count - 1>());
#endif
    return expect_result("test_flash");
}
