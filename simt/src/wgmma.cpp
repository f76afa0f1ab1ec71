/* wgmma.cpp: matrix products of four warps with operands in shared memory, done at their wait.
   Twin: sm_90a's wgmma; descriptors and layouts are those of the PTX manual ("Asynchronous
   Warpgroup Level Matrix Instructions"). Not here: sparse, 8-bit and tf32 products.

   Each warp owns 16 of the 64 rows and has its own queue; at the end all four must have issued
   the same. From issue to wait the accumulators are NaN, and the operands in shared memory are
   held. */
#include "async.h"
#include "checker.h"
#include "machine.h"
#include "memory.h"
#include "numbers.h"

#include <deque>
#include <vector>

namespace simt {
namespace {

struct product {
    wgmma_request request;
    float *c[32];
    uint32_t a[32][4];
    std::vector<float> before; /* the accumulators, if this is the first product to use them */
};

struct warp_queue {
    std::vector<product> open;
    std::deque<std::vector<product>> groups;
    bool fenced;
    std::vector<wgmma_request> issued; /* for the comparison of the four warps */
};
warp_queue queues[max_warps];

/* A 16-bit operand in shared memory: where element (m, k) lies. */
struct operand {
    const unsigned char *start;
    size_t leading, stride, chunks; /* chunks: 16-byte chunks of a swizzled row, 1 if plain */
    bool mn;                        /* M or N innermost */

    operand(uint64_t descriptor, bool mn_major)
        : start(arena_start() + (descriptor & 0x3fff) * 16),
          leading((descriptor >> 16 & 0x3fff) * 16), stride((descriptor >> 32 & 0x3fff) * 16),
          chunks(1), mn(mn_major) {
        const size_t widths[4] = {1, 8, 4, 2};
        chunks = widths[descriptor >> 62];
    }

    const unsigned char *at(size_t m, size_t k) const {
        const size_t row = 16 * chunks; /* bytes of a row of the pattern */
        size_t offset;
        if (chunks == 1 && mn)
            offset = m % 8 * 2 + m / 8 * stride + k % 8 * 16 + k / 8 * leading;
        else if (chunks == 1)
            offset = m % 8 * 16 + m / 8 * stride + k % 8 * 2 + k / 8 * leading;
        else if (mn)
            offset = m % (row / 2) * 2 + m / (row / 2) * leading + k % 8 * row + k / 8 * stride;
        else
            offset = m % 8 * row + m / 8 * stride + k * 2;
        const size_t address = reinterpret_cast<size_t>(start) + offset;
        return reinterpret_cast<const unsigned char *>(address ^
                                                       ((address >> 7 & (chunks - 1)) << 4));
    }
};

float number(const unsigned char *p, bool half) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return half ? from_f16(bits) : from_bf16(bits);
}

/* f for each 16-byte chunk of the operand: rows first .. first + count, 16 k. */
template <typename F> void each_chunk(const operand &o, int first, int count, F f) {
    for (int m = first; m < first + count; m += o.mn ? 8 : 1)
        for (int k = 0; k < 16; k += o.mn ? 1 : 8)
            f(o.at(static_cast<size_t>(m), static_cast<size_t>(k)));
}

template <typename F> void each_operand_chunk(const product &p, int rank, F f) {
    const wgmma_request &r = p.request;
    if (!r.a_registers) each_chunk(operand(r.a_tile, r.a_mn != 0), 16 * rank, 16, f);
    each_chunk(operand(r.b_tile, r.b_mn != 0), 0, r.n, f);
}

/* Row and column that value i of a lane's accumulators is. */
int row_of(int lane, int i) {
    return lane / 4 + 8 * (i / 2 % 2);
}
int column_of(int lane, int i) {
    return i / 4 * 8 + lane % 4 * 2 + i % 2;
}

void load_a(const product &p, int rank, float (&a)[16][16]) {
    const wgmma_request &r = p.request;
    const operand o(r.a_tile, r.a_mn != 0);
    for (int row = 0; row < 16 && !r.a_registers; row++)
        for (int k = 0; k < 16; k++)
            a[row][k] =
                number(o.at(static_cast<size_t>(16 * rank + row), static_cast<size_t>(k)), r.half);
    for (int lane = 0; lane < 32 && r.a_registers; lane++)
        for (int v = 0; v < 8; v++) {
            const uint16_t bits = static_cast<uint16_t>(p.a[lane][v / 2] >> (16 * (v % 2)));
            const int row = lane / 4 + 8 * (v / 2 % 2), k = lane % 4 * 2 + v % 2 + 8 * (v / 4);
            a[row][k] = r.half ? from_f16(bits) : from_bf16(bits);
        }
}

void carry_out(const product &p, int rank) {
    const wgmma_request &r = p.request;
    const size_t values = static_cast<size_t>(r.n) / 2;
    for (size_t lane = 0; lane < 32 && !p.before.empty(); lane++)
        memcpy(p.c[lane], &p.before[lane * values], values * sizeof(float));
    float a[16][16], b[16][256], c[16][256];
    load_a(p, rank, a);
    const operand o(r.b_tile, r.b_mn != 0);
    for (int k = 0; k < 16; k++)
        for (int n = 0; n < r.n; n++)
            b[k][n] = number(o.at(static_cast<size_t>(n), static_cast<size_t>(k)), r.half);
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < r.n / 2; i++)
            c[row_of(lane, i)][column_of(lane, i)] = r.accumulate ? p.c[lane][i] : 0.0f;
    const bool coarse = config().coarse;
    for (int row = 0; row < 16; row++) {
        if (coarse) add_coarsely(c[row], a[row], b, r.n);
        for (int k = 0; k < 16 && !coarse; k++)
            for (int n = 0; n < r.n; n++) c[row][n] += a[row][k] * b[k][n];
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < r.n / 2; i++) p.c[lane][i] = c[row_of(lane, i)][column_of(lane, i)];
}

/* ---- Issue -------------------------------------------------------------------------------- */

bool in_use(const warp_queue &q, const float *c) {
    for (const product &p : q.open)
        if (p.c[0] == c) return true;
    for (const auto &group : q.groups)
        for (const product &p : group)
            if (p.c[0] == c) return true;
    return false;
}

void keep_accumulators(product &p) {
    const size_t values = static_cast<size_t>(p.request.n) / 2;
    p.before.resize(32 * values);
    for (size_t lane = 0; lane < 32; lane++)
        for (size_t i = 0; i < values; i++) {
            p.before[lane * values + i] = p.c[lane][i];
            p.c[lane][i] = from_bits<float>(0xffffffffu);
        }
}

bool same_request(const wgmma_request &a, const wgmma_request &b) {
    return a.n == b.n && a.half == b.half && a.a_mn == b.a_mn && a.b_mn == b.b_mn &&
           a.accumulate == b.accumulate && a.a_tile == b.a_tile && a.b_tile == b.b_tile &&
           !a.a_registers == !b.a_registers && a.at.line == b.at.line;
}

/* The k-th product of each of the four warps is one instruction. */
void compare_warps(const warp_queue &q, int w, const wgmma_request &r) {
    const size_t k = q.issued.size() - 1;
    for (int other = w / 4 * 4; other < w / 4 * 4 + 4; other++)
        if (queues[other].issued.size() > k && !same_request(queues[other].issued[k], r))
            fail(r.at, text("wgmma: warp %d of the same four has issued another one, at ", other) +
                           place(queues[other].issued[k].at));
}

void check_operands(const product &p, int rank) {
    const site at = p.request.at;
    each_operand_chunk(p, rank, [&](const unsigned char *chunk) {
        if (!shared_owns(chunk, 16))
            fail(at, "wgmma reads outside shared memory: " + describe(chunk));
        check_async_read(chunk, 16, at);
        check_hold(chunk, 16, 1, at);
    });
    /* The instruction is the four warps': who wrote another one's rows has to be ordered too. */
    if (rank == 0 && !p.request.a_registers)
        each_chunk(operand(p.request.a_tile, p.request.a_mn != 0), 16, 48,
                   [&](const unsigned char *chunk) { check_async_read(chunk, 16, at); });
}

void issue_all(const warp &w, uint32_t) {
    const int number = w.first / 32;
    warp_queue &q = queues[number];
    product p = {};
    p.request = *static_cast<const wgmma_request *>(lane_of(w, 0).argument);
    for (int lane = 0; lane < 32; lane++) {
        const wgmma_request &r = *static_cast<const wgmma_request *>(lane_of(w, lane).argument);
        if (!same_request(r, p.request))
            fail(r.at, "wgmma: the lanes of a warp differ in operands");
        p.c[lane] = r.c;
        for (int i = 0; i < 4 && r.a_registers; i++) p.a[lane][i] = r.a_registers[i];
    }
    if (!q.fenced) fail(p.request.at, "wgmma without a wgmma.fence since the last group");
    q.issued.push_back(p.request);
    compare_warps(q, number, p.request);
    check_operands(p, number % 4);
    if (!in_use(q, p.c[0])) keep_accumulators(p);
    q.open.push_back(std::move(p));
    the.counted.wgmma++;
}

void land_group(const std::vector<product> &group, int rank) {
    for (const product &p : group) {
        carry_out(p, rank);
        each_operand_chunk(p, rank, [&](const unsigned char *chunk) {
            check_hold(chunk, 16, -1, p.request.at);
            check_async_read(chunk, 16, p.request.at);
        });
    }
}

struct wait_argument {
    int pending;
    const float *c;
    site at;
};

void wait_all(const warp &w, uint32_t) {
    const wait_argument &a = *static_cast<const wait_argument *>(lane_of(w, 0).argument);
    warp_queue &q = queues[w.first / 32];
    while (q.groups.size() > static_cast<size_t>(a.pending)) {
        land_group(q.groups.front(), w.first / 32 % 4);
        q.groups.pop_front();
    }
    for (int lane = 0; lane < 32; lane++)
        if (in_use(q, static_cast<const wait_argument *>(lane_of(w, lane).argument)->c))
            fail(a.at, "wgmma.wait_group: these accumulators belong to a group still under way");
}

void fence_all(const warp &w, uint32_t) {
    queues[w.first / 32].fenced = true;
}

void commit_all(const warp &w, uint32_t) {
    warp_queue &q = queues[w.first / 32];
    q.groups.emplace_back(std::move(q.open));
    q.open.clear();
    q.fenced = false;
}

void require_four_warps(const char *name, site at) {
    require_thread(name, at);
    const int w = the.current->warp / 4 * 4;
    if (w + 4 > the.warp_count || the.warps[w + 3].present != ~0u)
        fail(at, text("%s: needs four whole warps from a multiple of 4; the block has %d threads",
                      name, the.thread_count));
}

} // namespace

void wgmma_fence(const float *, site at) {
    require_four_warps("wgmma.fence", at);
    aligned_operation("wgmma.fence", at, nullptr, fence_all);
}

void wgmma(const wgmma_request &request) {
    require_four_warps("wgmma", request.at);
    wgmma_request r = request;
    aligned_operation("wgmma", r.at, &r, issue_all);
}

void wgmma_commit(site at) {
    require_four_warps("wgmma.commit_group", at);
    aligned_operation("wgmma.commit_group", at, nullptr, commit_all);
}

void wgmma_wait(int pending, const float *c, site at) {
    require_four_warps("wgmma.wait_group", at);
    wait_argument a = {pending, c, at};
    aligned_operation("wgmma.wait_group", at, &a, wait_all);
}

void registers(int, site at) {
    require_four_warps("setmaxnreg", at);
    aligned_operation("setmaxnreg", at, nullptr, nullptr);
}

void wgmma_begin() {
    for (warp_queue &q : queues) {
        q.open.clear();
        q.groups.clear();
        q.issued.clear();
        q.fenced = false;
    }
}

void wgmma_end() {
    for (int w = 0; w < the.warp_count; w++) {
        const warp_queue &q = queues[w], &first = queues[w / 4 * 4];
        if (!q.open.empty())
            note(place(q.open[0].request.at) + text(": wgmma of warp %d was never committed", w));
        for (const auto &group : q.groups)
            if (!group.empty())
                note(place(group[0].request.at) +
                     text(": wgmma of warp %d was never waited for", w));
        if (q.issued.size() != first.issued.size())
            note(text("wgmma: warp %d issued %zu, warp %d of the same four %zu", w, q.issued.size(),
                      w / 4 * 4, first.issued.size()));
    }
}

} // namespace simt
