/* tensor.cpp: ldmatrix and mma.sync on 16-bit values, and the approximate functions beside them.
   Twin: sm_80's tensor cores; the fragment layouts are those of the PTX manual, which
   test_fragments.cpp checks one by one. Not here: wgmma (wgmma.cpp).
   Sums are plain f32 in the order of k; a device's order and rounding differ, for which there is
   NSA_SIMT_ROUNDING=device. */
#include "checker.h"
#include "machine.h"
#include "memory.h"
#include "numbers.h"

namespace simt {
namespace {

struct mma_argument {
    float *c;
    const uint32_t *a;
    uint32_t b[2];
};

/* Register r of A holds rows g + 8 (r odd), columns 2i, 2i + 1 + 8 (r >= 2); of B, rows
   2i, 2i + 1 + 8 r, column g. */
template <float convert(unsigned)> void mma_all(const warp &w, uint32_t) {
    float a[16][16], b[16][8], c[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const mma_argument &m = *static_cast<mma_argument *>(lane_of(w, lane).argument);
        const int g = lane / 4, i = lane % 4;
        for (int r = 0; r < 4; r++)
            for (int h = 0; h < 2; h++)
                a[g + 8 * (r & 1)][2 * i + h + 8 * (r >> 1)] =
                    convert(m.a[r] >> (16 * h) & 0xffffu);
        for (int r = 0; r < 2; r++)
            for (int h = 0; h < 2; h++)
                b[2 * i + h + 8 * r][g] = convert(m.b[r] >> (16 * h) & 0xffffu);
        for (int r = 0; r < 4; r++) c[g + 8 * (r >> 1)][2 * i + (r & 1)] = m.c[r];
    }
    const bool coarse = config().coarse;
    for (int row = 0; row < 16; row++) {
        if (coarse) add_coarsely(c[row], a[row], b, 8);
        for (int k = 0; k < 16 && !coarse; k++)
            for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
    }
    for (int lane = 0; lane < 32; lane++) {
        const mma_argument &m = *static_cast<mma_argument *>(lane_of(w, lane).argument);
        const int g = lane / 4, i = lane % 4;
        for (int r = 0; r < 4; r++) m.c[r] = c[g + 8 * (r >> 1)][2 * i + (r & 1)];
    }
    the.counted.mma++;
}

struct ldmatrix_argument {
    uint32_t *r;
    const unsigned char *row;
    bool transposed;
    site at;
};

/* One phase is the 8 rows of one matrix: as many cycles as the busiest of the 32 banks has
   words. */
void count_phase(const unsigned char *const *rows) {
    int words[32] = {}, most = 0;
    for (int r = 0; r < 8; r++) {
        bool seen = false; /* equal addresses are one access */
        for (int before = 0; before < r; before++) seen = seen || rows[before] == rows[r];
        if (seen) continue;
        for (size_t word = 0; word < 4; word++) {
            const int n = ++words[(reinterpret_cast<size_t>(rows[r]) / 4 + word) % 32];
            if (n > most) most = n;
        }
    }
    the.counted.ldmatrix_phases++;
    the.counted.ldmatrix_cycles += static_cast<uint64_t>(most);
}

void ldmatrix_all(const warp &w, uint32_t) {
    for (int m = 0; m < 4; m++) {
        uint16_t values[8][8];
        const unsigned char *rows[8];
        for (int r = 0; r < 8; r++) {
            const ldmatrix_argument &l =
                *static_cast<ldmatrix_argument *>(lane_of(w, 8 * m + r).argument);
            rows[r] = l.row;
            memcpy(values[r], l.row, sizeof values[r]);
        }
        count_phase(rows);
        for (int lane = 0; lane < 32; lane++) {
            const ldmatrix_argument &l =
                *static_cast<ldmatrix_argument *>(lane_of(w, lane).argument);
            const int g = lane / 4, i = 2 * (lane % 4);
            const uint32_t low = l.transposed ? values[i][g] : values[g][i];
            const uint32_t high = l.transposed ? values[i + 1][g] : values[g][i + 1];
            l.r[m] = low | high << 16;
        }
    }
    the.counted.ldmatrix++;
}

/* In -1 .. 1, by the bits of x alone: which way a function errs there, and how far. */
float error_at(float x) {
    const uint32_t mixed = static_cast<uint32_t>(to_bits(x)) * 2654435769u;
    return static_cast<float>(static_cast<int32_t>(mixed ^ mixed >> 15)) * 0x1p-31f;
}

} // namespace

void ldmatrix_x4(uint32_t *r, const void *row, bool transposed, site at) {
    require_thread("ldmatrix", at);
    if (reinterpret_cast<size_t>(row) % 16 != 0)
        fail(at, "ldmatrix: the address of a row must be a multiple of 16");
    if (!shared_owns(row, 16)) fail(at, "ldmatrix reads outside shared memory: " + describe(row));
    check_read(row, 16, at);
    ldmatrix_argument l = {r, static_cast<const unsigned char *>(row), transposed, at};
    aligned_operation(transposed ? "ldmatrix.trans" : "ldmatrix", at, &l, ldmatrix_all);
}

void mma_m16n8k16_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1, site at) {
    mma_argument m = {c, a, {b0, b1}};
    aligned_operation("mma.m16n8k16.bf16", at, &m, mma_all<from_bf16>);
}

void mma_m16n8k16_f16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1, site at) {
    mma_argument m = {c, a, {b0, b1}};
    aligned_operation("mma.m16n8k16.f16", at, &m, mma_all<from_f16>);
}

void pack_bf16(uint32_t *r, float low, float high, site) {
    *r = from_bits<uint16_t>(to_bits(__float2bfloat16_rn(low))) |
         uint32_t(from_bits<uint16_t>(to_bits(__float2bfloat16_rn(high)))) << 16;
}

void pack_f16(uint32_t *r, float low, float high, site) {
    *r = from_bits<uint16_t>(to_bits(__float2half_rn(low))) |
         uint32_t(from_bits<uint16_t>(to_bits(__float2half_rn(high)))) << 16;
}

void exp2_approx(float *y, float x, site) {
    float exact = exp2f(x);
    if (config().coarse && x != 0) exact *= 1 + 0x1p-22f * error_at(x);
    *y = fabsf(exact) < 1.17549435e-38f ? 0.0f : exact; /* .ftz */
}

void log2_approx(float *y, float x, site) {
    *y = log2f(fabsf(x) < 1.17549435e-38f ? copysignf(0.0f, x) : x);
    if (config().coarse && x != 1 && fabsf(*y) < INFINITY)
        *y += 0x1p-22f * fmaxf(fabsf(*y), 1.0f) * error_at(x);
}

} // namespace simt
