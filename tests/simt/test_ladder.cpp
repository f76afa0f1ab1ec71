/* test_ladder.cpp: attention over a window on CUDA, from a thread for each row to the shipped
   kernel. Each rung changes one thing; what it moves and multiplies is counted by the executor,
   held to a formula, and written for docs/ladder.md: simt_ladder_check [--json FILE].
   Twin: bench/ladder.c, the same on the CPU, in times. Not here: times, which take a GPU. */
#include "nsa_cuda.cuh"

#include "../../bench/origin.h"
#include "expect.h"

#include <algorithm>
#include <cmath>

using bf16 = __nv_bfloat16;
/* 16 heads read one key-value head of 64; a block has 64 rows, a tile 32 keys. Row t heads + h of q
   and out is head h of token t. */
constexpr int tokens = 192, heads = 16, width = 64, window = 96, rows = 64, keys = 32;
constexpr float scale = 0.125f, log2e = 1.44269504f;

static __device__ int first_key(int token) {
    return token + 1 > window ? token + 1 - window : 0;
}

static __device__ void load_row(float (&x)[width], const bf16 *from) {
    for (int c = 0; c < width; c += 8) {
        const uint4 part = *reinterpret_cast<const uint4 *>(from + c);
        const uint32_t words[4] = {part.x, part.y, part.z, part.w};
        for (int i = 0; i < 4; i++) { /* the upper half of an f32, two to a word */
            x[c + 2 * i] = __uint_as_float(words[i] << 16);
            x[c + 2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

/* One row's running softmax, for the rungs where a thread has a row. */
struct row_state {
    float q[width], out[width], most, sum;

    __device__ void begin(const bf16 *from) {
        load_row(q, from);
        for (float &x : out) x = 0.0f;
        most = -1e30f;
        sum = 0.0f;
    }
    __device__ void add(const bf16 *k, const bf16 *v) {
        float row[width], score = 0.0f;
        load_row(row, k);
        for (int c = 0; c < width; c++) score += q[c] * row[c];
        score *= scale * log2e;
        const float now = fmaxf(most, score), shrink = nsa__ex2(most - now),
                    p = nsa__ex2(score - now);
        load_row(row, v);
        sum = sum * shrink + p;
        for (int c = 0; c < width; c++) out[c] = out[c] * shrink + p * row[c];
        most = now;
    }
    __device__ void end(float *to) const {
        for (int c = 0; c < width; c++) to[c] = out[c] / sum;
    }
};

/* ---- 1: a thread for each row reads its keys from device memory ---- */

static __global__ void thread_kernel(const bf16 *q, const bf16 *k, const bf16 *v, float *out) {
    const int row = static_cast<int>(blockIdx.x) * rows + static_cast<int>(threadIdx.x);
    const int token = row / heads;
    row_state x;
    x.begin(q + row * width);
    for (int s = first_key(token); s <= token; s++) x.add(k + s * width, v + s * width);
    x.end(out + row * width);
}

/* ---- 2: a block's rows share the keys that it brings into shared memory ---- */

/* Chunk of 16 bytes number `chunk` of a row: where rows lie 128 bytes apart, the same chunk of 8
   rows is in the same banks; swizzled, it is in 8 different ones. */
template <bool SWIZZLED> __device__ bf16 *at(bf16 *tile, int row, int chunk) {
    return tile + row * width + 8 * (SWIZZLED ? chunk ^ (row % 8) : chunk);
}

template <bool SWIZZLED>
static __device__ void bring(bf16 *tile, const bf16 *from, int first, int count, int end) {
    const int threads = static_cast<int>(blockDim.x);
    for (int i = static_cast<int>(threadIdx.x); i < count * 8; i += threads) {
        const bool inside = first + i / 8 < end;
        nsa__cp_async<16>(at<SWIZZLED>(tile, i / 8, i % 8),
                          from + (inside ? first + i / 8 : 0) * width + i % 8 * 8, inside ? 16 : 0);
    }
}

/* All of a block's copies have landed. */
static __device__ void wait_for_all() {
    nsa__cp_async_commit();
    nsa__cp_async_wait<0>();
    __syncthreads();
}

static __global__ void shared_kernel(const bf16 *q, const bf16 *k, const bf16 *v, float *out) {
    NSA_SHARED_ALL(bytes);
    bf16 *tile_k = reinterpret_cast<bf16 *>(bytes), *tile_v = tile_k + keys * width;
    const int row = static_cast<int>(blockIdx.x) * rows + static_cast<int>(threadIdx.x);
    const int token = row / heads, first = static_cast<int>(blockIdx.x) * rows / heads;
    const int last = first + rows / heads - 1;
    row_state x;
    x.begin(q + row * width);
    for (int begin = first_key(first) / keys * keys; begin <= last; begin += keys) {
        bring<false>(tile_k, k, begin, keys, last + 1);
        bring<false>(tile_v, v, begin, keys, last + 1);
        wait_for_all();
        for (int s = begin; s < begin + keys; s++)
            if (s >= first_key(token) && s <= token)
                x.add(tile_k + (s - begin) * width, tile_v + (s - begin) * width);
        __syncthreads();
    }
    x.end(out + row * width);
}

/* ---- 3 and 4: tensor cores multiply; tiles as they come, then swizzled ---- */

/* A warp's 16 rows: fragments of scores, of the output, and of two rows' softmax in each lane. */
struct warp_state {
    float out[width / 8][4], most[2], sum[2];
};

template <bool SWIZZLED>
static __device__ void scores(float (&s)[keys / 8][4], bf16 *q, bf16 *k, int warp, int lane) {
    for (auto &tile : s)
        for (float &x : tile) x = 0.0f;
    for (int j = 0; j < width / 16; j++) {
        uint32_t a[4], b[4];
        nsa__ldmatrix_x4(a, at<SWIZZLED>(q, 16 * warp + lane % 16, 2 * j + lane / 16));
        for (int n = 0; n < keys / 16; n++) {
            nsa__ldmatrix_x4(
                b, at<SWIZZLED>(k, 16 * n + lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2));
            nsa__mma_m16n8k16<bf16>(s[2 * n], a, b[0], b[1]);
            nsa__mma_m16n8k16<bf16>(s[2 * n + 1], a, b[2], b[3]);
        }
    }
}

/* Scores of one tile, masked, into the running softmax; s becomes p. Four lanes share a row. */
static __device__ void soften(warp_state &x, float (&s)[keys / 8][4], int row, int begin,
                              int lane) {
    for (int h = 0; h < 2; h++) {
        const int token = (row + lane / 4 + 8 * h) / heads;
        float now = x.most[h];
        for (int n = 0; n < keys / 8; n++)
            for (int e = 2 * h; e < 2 * h + 2; e++) {
                const int key = begin + 8 * n + lane % 4 * 2 + e % 2;
                const bool seen = key >= first_key(token) && key <= token;
                s[n][e] = seen ? s[n][e] * (scale * log2e) : -1e30f;
                now = fmaxf(now, s[n][e]);
            }
        for (int i = 1; i < 4; i *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, i));
        const float shrink = nsa__ex2(x.most[h] - now);
        x.sum[h] *= shrink;
        for (auto &tile : x.out) tile[2 * h] *= shrink, tile[2 * h + 1] *= shrink;
        for (auto &tile : s)
            for (int e = 2 * h; e < 2 * h + 2; e++)
                x.sum[h] += tile[e] = tile[e] > -1e29f ? nsa__ex2(tile[e] - now) : 0.0f;
        x.most[h] = now;
    }
}

template <bool SWIZZLED>
static __device__ void outputs(warp_state &x, const float (&p)[keys / 8][4], bf16 *v, int lane) {
    for (int j = 0; j < keys / 16; j++) {
        uint32_t a[4], b[4];
        for (int r = 0; r < 4; r++)
            a[r] = nsa__pack<bf16>(p[2 * j + r / 2][r % 2 * 2], p[2 * j + r / 2][r % 2 * 2 + 1]);
        for (int n = 0; n < width / 16; n++) {
            nsa__ldmatrix_x4_trans(b, at<SWIZZLED>(v, 16 * j + lane % 16, 2 * n + lane / 16));
            nsa__mma_m16n8k16<bf16>(x.out[2 * n], a, b[0], b[1]);
            nsa__mma_m16n8k16<bf16>(x.out[2 * n + 1], a, b[2], b[3]);
        }
    }
}

template <bool SWIZZLED>
static __global__ void tensor_kernel(const bf16 *q, const bf16 *k, const bf16 *v, float *out) {
    NSA_SHARED_ALL(bytes);
    bf16 *tile_q = reinterpret_cast<bf16 *>(bytes), *tile_k = tile_q + rows * width,
         *tile_v = tile_k + keys * width;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int block = static_cast<int>(blockIdx.x) * rows, row = block + 16 * warp;
    const int first = block / heads, last = first + rows / heads - 1;
    warp_state x = {{}, {-1e29f, -1e29f}, {0.0f, 0.0f}};
    bring<SWIZZLED>(tile_q, q, block, rows, tokens * heads);
    for (int begin = first_key(first) / keys * keys; begin <= last; begin += keys) {
        float s[keys / 8][4];
        bring<SWIZZLED>(tile_k, k, begin, keys, last + 1);
        bring<SWIZZLED>(tile_v, v, begin, keys, last + 1);
        wait_for_all();
        scores<SWIZZLED>(s, tile_q, tile_k, warp, lane);
        soften(x, s, row, begin, lane);
        outputs<SWIZZLED>(x, s, tile_v, lane);
        __syncthreads();
    }
    for (int h = 0; h < 2; h++) {
        float sum = x.sum[h];
        for (int i = 1; i < 4; i *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);
        float *to = out + (row + lane / 4 + 8 * h) * width + lane % 4 * 2;
        for (int n = 0; n < width / 8; n++)
            for (int e = 0; e < 2; e++) to[8 * n + e] = x.out[n][2 * h + e] / sum;
    }
}

/* ---- The ladder ---- */

struct problem {
    std::vector<bf16> q, k, v;
    std::vector<double> want;

    problem() {
        unsigned state = 17;
        for (auto *x : {&q, &k, &v})
            for (int i = 0; i < tokens * width * (x == &q ? heads : 1); i++) {
                state = state * 1664525u + 1013904223u;
                x->push_back(__float2bfloat16(static_cast<float>(state >> 8) / 8388608.0f - 1.0f));
            }
        for (int row = 0; row < tokens * heads; row++) add_row(row);
    }
    static double value(const std::vector<bf16> &x, int row, int c) {
        return static_cast<double>(__bfloat162float(x[static_cast<size_t>(row * width + c)]));
    }
    /* The reference: the formula in f64. */
    void add_row(int row) {
        double out[width] = {}, sum = 0.0;
        for (int s = std::max(0, row / heads + 1 - window); s <= row / heads; s++) {
            double score = 0.0;
            for (int c = 0; c < width; c++) score += value(q, row, c) * value(k, s, c);
            const double p = std::exp(static_cast<double>(scale) * score);
            sum += p;
            for (int c = 0; c < width; c++) out[c] += p * value(v, s, c);
        }
        for (double x : out) want.push_back(x / sum);
    }
};

struct rung {
    const char *name;
    void (*kernel)(const bf16 *, const bf16 *, const bf16 *, float *); /* null: the shipped one */
    unsigned threads;
    int shared_rows; /* of a tile, in shared memory */
    int cycles;      /* that a phase of ldmatrix takes; 0: it has none */
};

static const rung ladder[] = {{"a thread for each row", thread_kernel, rows, 0, 0},
                              {"keys in shared memory", shared_kernel, rows, 2 * keys, 0},
                              {"tensor cores", tensor_kernel<false>, 128, rows + 2 * keys, 8},
                              {"tiles swizzled", tensor_kernel<true>, 128, rows + 2 * keys, 1},
                              {"the shipped kernel", nullptr, 0, 0, 1}};

static std::vector<float> run_shipped(const problem &p) {
    nsa_desc d = nsa_desc_default(1, tokens, heads, 1, width);
    d.window = window;
    device_array<bf16> q(p.q), k(p.k), v(p.v), out(p.q.size());
    device_array<float> lse(static_cast<size_t>(tokens * heads));
    nsa_attend x = {};
    x.q = nsa_tensor_bthd(q.data, NSA_BF16, tokens, heads, width);
    x.k = nsa_tensor_bthd(k.data, NSA_BF16, tokens, 1, width);
    x.v = nsa_tensor_bthd(v.data, NSA_BF16, tokens, 1, width);
    x.out = nsa_tensor_bthd(out.data, NSA_BF16, tokens, heads, width);
    x.lse = nsa_tensor_bthd(lse.data, NSA_F32, tokens, heads, 1);
    const size_t bytes = nsa_cuda_attend_win_forward_workspace_size(&d);
    device_array<unsigned char> workspace(bytes + 1);
    simt::reset_counters();
    EXPECT(nsa_cuda_attend_win_forward(&x, &d, workspace.data, bytes, nullptr) == NSA_OK);
    std::vector<float> got;
    for (const bf16 &x_of : out.read()) got.push_back(__bfloat162float(x_of));
    return got;
}

static std::vector<float> run_rung(const rung &r, const problem &p) {
    if (!r.kernel) return run_shipped(p);
    const device_array<bf16> q(p.q), k(p.k), v(p.v);
    device_array<float> out(p.q.size());
    simt::reset_counters();
    EXPECT(NSA_LAUNCH(r.kernel, tokens * heads / rows, r.threads,
                      sizeof(bf16) * static_cast<size_t>(r.shared_rows * width), nullptr, q.data,
                      k.data, v.data, out.data) == cudaSuccess);
    EXPECT(cudaDeviceSynchronize() == cudaSuccess);
    return out.read();
}

/* Bytes that a rung reads of q, k and v: of each row itself, and of the keys, that each row reads
   for itself or each block for all of its rows. */
static uint64_t bytes_by_formula(bool shared) {
    uint64_t key_rows = 0;
    const int step = shared ? rows / heads : 1, readers = shared ? 1 : heads;
    for (int first = 0; first < tokens; first += step) {
        const int last = first + step - 1, begin = std::max(0, first + 1 - window);
        key_rows +=
            static_cast<uint64_t>((last + 1 - (shared ? begin / keys * keys : begin)) * readers);
    }
    return 2u * width * (static_cast<uint64_t>(tokens * heads) + 2 * key_rows);
}

/* Out is a mean of v with weights of 8 bits in bf16, and in f32 exact to a few roundings. */
static void expect_near(const rung &r, const problem &p, const std::vector<float> &got) {
    double wrong = 0.0, size = 0.0;
    for (size_t i = 0; i < got.size(); i++) {
        wrong += std::pow(static_cast<double>(got[i]) - p.want[i], 2);
        size += p.want[i] * p.want[i];
    }
    const double error = std::sqrt(wrong / size);
    EXPECT(error < (r.threads == rows ? 1e-5 : 6e-3));
    if (!(error < 6e-3)) printf("%s: relative error %g\n", r.name, error);
}

static void climb(const rung &r, const problem &p, FILE *json) {
    expect_near(r, p, run_rung(r, p));
    const simt::counters &n = simt::count();
    const uint64_t bytes = n.global_read_bytes + n.async_bytes;
    const double cycles = n.ldmatrix_phases ? static_cast<double>(n.ldmatrix_cycles) /
                                                  static_cast<double>(n.ldmatrix_phases)
                                            : 0.0;
    if (r.kernel) EXPECT_EQUAL(bytes, bytes_by_formula(r.shared_rows > 0));
    EXPECT_EQUAL(cycles, r.cycles);
    EXPECT((n.mma > 0) == (r.cycles > 0));
    const double multiplied = r.cycles ? 2.0 * 16 * 8 * 16 * static_cast<double>(n.mma) : 0.0;
    printf("%-24s %10llu bytes read, %8.3g flop of tensor cores, %g cycles a phase\n", r.name,
           static_cast<unsigned long long>(bytes), multiplied, cycles);
    if (!json) return;
    fprintf(json, "%s\n    {\"rung\": %d, \"what\": \"%s\", \"KiB_read\": %llu, ",
            &r == ladder ? "" : ",", static_cast<int>(&r - ladder) + 1, r.name,
            static_cast<unsigned long long>(bytes / 1024));
    fprintf(json, "\"tensor_Mflop\": %.4g, \"cycles_a_phase\": ", multiplied / 1e6);
    fprintf(json, r.cycles ? "%g}" : "null}", cycles);
}

/* The file's first lines. */
static void write_origin(FILE *json) {
    const origin o = origin_here();
    fprintf(json,
            "{\n  \"machine\": \"the executor of tests/simt, which counts and does not time\",\n");
    fprintf(json, "  \"date\": \"%s\",\n  \"commit\": \"%s\",\n  \"rows\": [", o.date, o.commit);
}

int main(int argc, char **argv) {
    FILE *json = argc == 3 && !strcmp(argv[1], "--json") ? fopen(argv[2], "w") : nullptr;
    const problem p;
    if (argc > 1 && !json) {
        fprintf(stderr, "usage: simt_ladder_check [--json FILE that can be written]\n");
        return 2;
    }
    if (!simt::checking()) return 77; /* plain loads are counted by the checker alone */
    if (json) write_origin(json);
    for (const rung &r : ladder) climb(r, p, json);
    if (json) fprintf(json, "\n  ]\n}\n"), fclose(json);
    return expect_result("test_ladder");
}
