/* test_counters.cpp: what a kernel moves and multiplies, counted by the executor, against formulas:
   bytes brought into shared memory, products of tensor cores, bank conflicts (none); launches of a
   decoding step, and what it writes, which the checker counts; backward's workspace.
   Twin: bench/gpu/predict.py, which predicts times from the same formulas. Not here: results. */
#include "nsa_cuda.cuh"

#include "expect.h"

#include <algorithm>
#include <set>

enum { KEYS = 64 }; /* of a tile, bf16, heads of 128 */

#ifdef NSA__SIMT_WGMMA
enum { TOGETHER = 64 }; /* rows that are multiplied together */
#else
enum { TOGETHER = 16 };
#endif

/* One problem of bf16 zeros; only places and sizes matter here. */
struct problem {
    nsa_desc d;
    std::vector<int32_t> lists;
    device_array<uint16_t> q, k, v, out, dout, dq, dk, dv;
    device_array<float> lse;
    device_array<int32_t> blocks;
    device_array<unsigned char> workspace;

    static std::vector<int32_t> make_lists(const nsa_desc &d) {
        const int width = nsa_block_list_width(&d);
        std::vector<int32_t> lists(static_cast<size_t>(d.tokens * d.kv_heads * width), -1);
        for (int i = 0; i < d.tokens * d.kv_heads; i++) {
            const int candidates = i / d.kv_heads / d.slc_block + 1;
            int slot = 0;
            for (int j = 0; j < candidates && slot < width; j++)
                if ((i * 7 + j * 3) % 4 || candidates - j <= width - slot)
                    lists[static_cast<size_t>(i * width + slot++)] = j;
        }
        return lists;
    }
    static size_t count(const nsa_desc &d, int heads, int width) {
        return static_cast<size_t>(d.tokens * heads * width);
    }
    explicit problem(const nsa_desc &of)
        : d(of), lists(make_lists(of)), q(zeros(of.heads, of.dim)), k(zeros(of.kv_heads, of.dim)),
          v(zeros(of.kv_heads, of.dim_v)), out(zeros(of.heads, of.dim_v)),
          dout(zeros(of.heads, of.dim_v)), dq(zeros(of.heads, of.dim)),
          dk(zeros(of.kv_heads, of.dim)), dv(zeros(of.kv_heads, of.dim_v)),
          lse(std::vector<float>(count(of, of.heads, 1))), blocks(lists), workspace(8 << 20) {}
    std::vector<uint16_t> zeros(int heads, int width) const {
        return std::vector<uint16_t>(count(d, heads, width));
    }
    nsa_tensor view(void *data, nsa_dtype dtype, int heads, int width) const {
        return nsa_tensor_bthd(data, dtype, d.tokens, heads, width);
    }
    nsa_attend x() const {
        return {view(q.data, NSA_BF16, d.heads, d.dim),
                view(k.data, NSA_BF16, d.kv_heads, d.dim),
                view(v.data, NSA_BF16, d.kv_heads, d.dim_v),
                view(out.data, NSA_BF16, d.heads, d.dim_v),
                view(lse.data, NSA_F32, d.heads, 1),
                view(blocks.data, NSA_I32, d.kv_heads, nsa_block_list_width(&d))};
    }
    nsa_attend dx(bool of_q) const {
        nsa_attend g = x();
        g.out.data = dout.data;
        g.lse = nsa_tensor{};
        g.q.data = of_q ? dq.data : nullptr;
        g.k.data = of_q ? nullptr : dk.data;
        g.v.data = of_q ? nullptr : dv.data;
        return g;
    }
};

/* Bytes and products as a formula has them. */
struct work {
    uint64_t bytes = 0, products = 0;
};

typedef nsa_status forward_of(const nsa_attend *, const nsa_desc *, void *, size_t,
                              nsa_cuda_stream);
typedef nsa_status backward_of(const nsa_attend *, const nsa_attend *, const nsa_desc *, void *,
                               size_t, nsa_cuda_stream);
enum branch_keys { CMP, SLC, WIN, DENSE };
static const struct {
    const char *name;
    branch_keys keys;
    forward_of *forward;
    backward_of *backward;
} branches[] = {{"cmp", CMP, nsa_cuda_attend_cmp_forward, nsa_cuda_attend_cmp_backward},
                {"slc", SLC, nsa_cuda_attend_slc_forward, nsa_cuda_attend_slc_backward},
                {"win", WIN, nsa_cuda_attend_win_forward, nsa_cuda_attend_win_backward},
                {"dense", DENSE, nsa_cuda_attend_dense_forward, nsa_cuda_attend_dense_backward}};

/* The blocks that a query reads, by its list. */
static std::set<int> listed(const problem &p, int kv_head, int query) {
    const int width = nsa_block_list_width(&p.d);
    const auto row = p.lists.begin() + (query * p.d.kv_heads + kv_head) * width;
    std::set<int> blocks(row, row + width);
    blocks.erase(-1);
    return blocks;
}

/* Keys begin .. end - 1 of each tile that the queries first .. last read, and who of them does. */
struct tile {
    int begin, end;
};

static std::vector<tile> tiles_of(const problem &p, branch_keys keys, int kv_head, int first,
                                  int last) {
    std::vector<tile> tiles;
    const auto add = [&](int begin, int end) {
        for (; begin < end; begin += KEYS) tiles.push_back({begin, std::min(begin + KEYS, end)});
    };
    if (keys == CMP) add(0, nsa_cmp_visible(&p.d, last));
    if (keys == DENSE) add(0, last + 1);
    if (keys == WIN) add(nsa_window_begin(&p.d, first) / KEYS * KEYS, last + 1);
    if (keys == SLC) {
        std::set<int> blocks;
        for (int t = first; t <= last; t++)
            for (int j : listed(p, kv_head, t)) blocks.insert(j);
        for (int j : blocks) add(j * p.d.slc_block, std::min((j + 1) * p.d.slc_block, last + 1));
    }
    return tiles;
}

/* Whether a query sees a key of the tile. */
static bool sees(const problem &p, branch_keys keys, int kv_head, int query, const tile &t) {
    const int end = keys == CMP ? nsa_cmp_visible(&p.d, query) : query + 1;
    const int begin = keys == WIN ? nsa_window_begin(&p.d, query) : 0;
    if (std::max(t.begin, begin) >= std::min(t.end, end)) return false;
    return keys != SLC || listed(p, kv_head, query).count(t.begin / p.d.slc_block);
}

enum { FORWARD_ROWS = 128, BACKWARD_ROWS = TOGETHER == 64 ? 128 : 64 }; /* of a tile */

/* What a warp issues to multiply its 16 rows and KEYS keys if they take part: forward q k and p v,
   for dq a third product. m16n8k16 each on its own; together k16 of all keys or of all columns. */
static unsigned products_of(const nsa_desc &d, bool backward) {
    const int nt = backward ? d.dim + d.dim_v : d.dim, nn = backward ? d.dim : d.dim_v;
    return static_cast<unsigned>(TOGETHER == 64 ? nt / 16 + KEYS / 16 : KEYS / 8 * (nt + nn) / 16);
}

/* A tile of rows brings in its own rows once and its key tiles one after the other; rows that are
   multiplied together meet a tile if one of their queries sees a key there (of contiguous keys,
   where the tile of rows as a whole does). */
static work query_side(const problem &p, branch_keys keys, bool backward) {
    work w;
    const nsa_desc &d = p.d;
    const int G = d.heads / d.kv_heads, both = d.dim + d.dim_v;
    const int held = backward ? both : d.dim;
    const int ROWS = backward ? BACKWARD_ROWS : FORWARD_ROWS;
    for (int kv_head = 0; kv_head < d.kv_heads; kv_head++)
        for (int row = 0; row < d.tokens * G; row += ROWS) {
            const int rows = std::min(ROWS, d.tokens * G - row);
            w.bytes += 2u * static_cast<unsigned>(rows * held);
            for (const tile &t : tiles_of(p, keys, kv_head, row / G, (row + rows - 1) / G)) {
                w.bytes += 2u * static_cast<unsigned>((t.end - t.begin) * both);
                for (int first = row; first < row + rows; first += TOGETHER) {
                    bool any = TOGETHER == 64 && keys != SLC;
                    for (int r = first; r < std::min(first + TOGETHER, row + rows); r++)
                        any |= sees(p, keys, kv_head, r / G, t);
                    if (any) w.products += TOGETHER / 16 * products_of(d, backward);
                }
            }
        }
    return w;
}

/* slc of few heads: a tile of rows has readers of one block, and brings it in with them. */
static work gathered_side(const problem &p, bool backward) {
    work w;
    const nsa_desc &d = p.d;
    const int G = d.heads / d.kv_heads, both = d.dim + d.dim_v;
    const int part = (backward ? BACKWARD_ROWS : FORWARD_ROWS) / G, held = backward ? both : d.dim;
    for (int kv_head = 0; kv_head < d.kv_heads; kv_head++)
        for (int begin = 0; begin < d.tokens; begin += d.slc_block) {
            std::vector<int> readers;
            for (int query = 0; query < d.tokens; query++)
                if (listed(p, kv_head, query).count(begin / d.slc_block)) readers.push_back(query);
            const int n = static_cast<int>(readers.size());
            for (int i = 0; i < n; i += part) {
                const int last = std::min(i + part, n) - 1, rows = (last - i + 1) * G;
                const int end =
                    std::min(begin + d.slc_block, readers[static_cast<size_t>(last)] + 1);
                w.bytes += 2u * static_cast<unsigned>(rows * held + (end - begin) * both);
                w.products += static_cast<unsigned>((rows + TOGETHER - 1) / TOGETHER) * TOGETHER /
                              16 * products_of(d, backward);
            }
        }
    return w;
}

/* A tile of 64 keys, or 128 that two warpgroups share, is brought in once, and then, once, every
   row that may read one of them, with three floats of its terms and, of slc without a producer, the
   number of its query. */
static uint64_t key_side_bytes(const problem &p, branch_keys keys) {
    uint64_t bytes = 0;
    const nsa_desc &d = p.d;
    const bool pipe = TOGETHER == 64;
    const int G = d.heads / d.kv_heads, both = d.dim + d.dim_v;
    const int of = keys == CMP ? nsa_cmp_count(&d, d.tokens) : d.tokens;
    const int kept = pipe && keys != SLC ? 2 * KEYS : KEYS;
    for (int kv_head = 0; kv_head < d.kv_heads; kv_head++)
        for (int begin = 0; begin < of; begin += kept) {
            const tile t = {begin, std::min(begin + kept, of)};
            int readers = 0;
            for (int query = 0; query < d.tokens; query++)
                readers += sees(p, keys, kv_head, query, t);
            if (readers)
                bytes += 2u * static_cast<unsigned>((t.end - t.begin + readers * G) * both) +
                         (keys == SLC && !pipe ? 16u : 12u) * static_cast<unsigned>(readers * G);
        }
    return bytes;
}

static uint64_t products() {
    return TOGETHER == 64 ? simt::count().wgmma : simt::count().mma;
}

/* ldmatrix is not needed where wgmma reads shared memory itself, in the same swizzle. */
static void expect_no_conflicts(const char *name) {
    const simt::counters &n = simt::count();
    EXPECT_EQUAL(n.ldmatrix_phases > 0, TOGETHER == 16);
    if (n.ldmatrix_cycles != n.ldmatrix_phases)
        printf("%s: %llu cycles for %llu phases\n", name,
               static_cast<unsigned long long>(n.ldmatrix_cycles),
               static_cast<unsigned long long>(n.ldmatrix_phases));
    EXPECT_EQUAL(n.ldmatrix_cycles, n.ldmatrix_phases);
}

static void test_branch(const problem &p, int i) {
    const nsa_attend x = p.x(), dq = p.dx(true), dkv = p.dx(false);
    const size_t bytes = p.workspace.count;
    simt::reset_counters();
    EXPECT(branches[i].forward(&x, &p.d, p.workspace.data, bytes, nullptr) == NSA_OK);
    const bool gathered = branches[i].keys == SLC && p.d.heads / p.d.kv_heads <= 4;
    const work forward =
        gathered ? gathered_side(p, false) : query_side(p, branches[i].keys, false);
    EXPECT_EQUAL(simt::count().async_bytes, forward.bytes);
    EXPECT_EQUAL(products(), forward.products);
    expect_no_conflicts(branches[i].name);

    simt::reset_counters();
    EXPECT(branches[i].backward(&dq, &x, &p.d, p.workspace.data, bytes, nullptr) == NSA_OK);
    const work backward = gathered ? gathered_side(p, true) : query_side(p, branches[i].keys, true);
    EXPECT_EQUAL(simt::count().async_bytes, backward.bytes);
    EXPECT_EQUAL(products(), backward.products);
    expect_no_conflicts(branches[i].name);

    simt::reset_counters();
    EXPECT(branches[i].backward(&dkv, &x, &p.d, p.workspace.data, bytes, nullptr) == NSA_OK);
    EXPECT_EQUAL(simt::count().async_bytes, key_side_bytes(p, branches[i].keys));
    expect_no_conflicts(branches[i].name);
}

/* Selection walks the compressed keys once for each tile of queries. On its own a warp multiplies
   16 keys at a time, up to the last that one of its queries sees; together all multiply every tile,
   a first one even if there are no keys, and q is brought in too. */
static work select_side(const problem &p) {
    work w;
    const nsa_desc &d = p.d;
    const bool pipe = TOGETHER == 64;
    const int G = d.heads / d.kv_heads, wide = pipe ? 16 : G <= 2 ? 8 : 32, warps = pipe ? 16 : 8;
    int columns = pipe ? 2 : 1;
    while (columns < G) columns *= 2;
    const int queries = wide / columns, each = d.dim / 16 * (pipe ? 1 : wide / 8);
    for (int kv_head = 0; kv_head < d.kv_heads; kv_head++)
        for (int first = 0; first < d.tokens; first += warps * queries) {
            const int end = std::min(first + warps * queries, d.tokens);
            const int keys = nsa_cmp_visible(&d, end - 1);
            w.bytes += 2u * static_cast<unsigned>((keys + (pipe ? (end - first) * G : 0)) * d.dim);
            for (int i = 0; i < warps; i++) {
                const int last = std::min(first + (i + 1) * queries, end) - 1;
                const int mine = first + i * queries < end ? nsa_cmp_visible(&d, last) : 0;
                const int turns = pipe ? std::max((keys + KEYS - 1) / KEYS, 1) : (mine + 15) / 16;
                w.products += static_cast<unsigned>(turns * each);
            }
        }
    return w;
}

static void test_select(const problem &p) {
    const nsa_attend x = p.x();
    const nsa_select s = {x.q, x.k, x.lse, x.blocks, {}, {}};
    simt::reset_counters();
    EXPECT(nsa_cuda_select_blocks(&s, &p.d, p.workspace.data, p.workspace.count, nullptr) ==
           NSA_OK);
    const work all = select_side(p);
    EXPECT_EQUAL(simt::count().async_bytes, all.bytes);
    EXPECT_EQUAL(products(), all.products);
    expect_no_conflicts("select");
}

/* ---- Decoding -------------------------------------------------------------------------------- */

#ifndef NSA__DECODE_RUN_KEYS
#define NSA__DECODE_RUN_KEYS 256
#endif
enum { LAUNCHES = 7 };

/* Bytes of one token's step with `held` tokens in the cache: every key and value once, the
   compressed ones too, and q once for each run of keys whose scores are taken. */
static uint64_t decode_bytes(const nsa_desc &d, int held) {
    const int seen = nsa_cmp_visible(&d, held), window = held + 1 - nsa_window_begin(&d, held);
    const int per_run = std::max(NSA__DECODE_RUN_KEYS / KEYS, 1);
    const int listed = std::min(d.slc_count * d.slc_block, held + 1);
    const auto runs = [&](int tiles) { return (tiles + per_run - 1) / per_run; };
    const int first = nsa_window_begin(&d, held) / KEYS;
    const int of_win = runs(held / KEYS - first + 1), of_cmp = runs((seen + KEYS - 1) / KEYS);
    const int of_slc = runs(nsa_block_list_width(&d) * d.slc_block / KEYS);
    const int keys = seen + listed + window, both = d.dim + d.dim_v;
    return 2u * static_cast<unsigned>(d.kv_heads * keys * both +
                                      d.heads * d.dim * (of_cmp + of_slc + of_win));
}

/* A cache of zeros, and what a step of it takes. */
struct decoder {
    enum { CHUNK = 16 };
    problem p;
    nsa_cache cache;
    nsa_attention x = {};
    device_array<float> gates;
    device_array<uint16_t> weights;
    device_array<unsigned char> memory, workspace;

    decoder(const nsa_desc &d, nsa_phi phi)
        : p(d), gates(std::vector<float>(problem::count(d, d.heads, 3))),
          weights(std::vector<uint16_t>(static_cast<size_t>(d.cmp_block * d.kv_heads * d.dim))),
          memory(nsa_cuda_cache_size(&d, NSA_BF16, CHUNK)),
          workspace(static_cast<size_t>(16) << 20) {
        EXPECT(nsa_cuda_cache_init(&cache, &d, NSA_BF16, CHUNK, memory.data, memory.count,
                                   nullptr) == NSA_OK);
        x.q = p.x().q;
        x.k_slc = x.k_win = x.k_cmp.x = p.x().k;
        x.v_slc = x.v_win = x.v_cmp.x = p.x().v;
        x.out = x.out_cmp = x.out_slc = x.out_win = p.x().out;
        x.lse_cmp = x.lse_slc = x.lse_win = p.x().lse;
        x.blocks = p.x().blocks;
        x.gates = p.view(gates.data, NSA_F32, d.heads, 3);
        x.k_cmp.phi = x.v_cmp.phi = phi;
        x.k_cmp.dim = x.v_cmp.dim = d.dim;
        x.k_cmp.w1 = x.v_cmp.w1 = p.view(weights.data, NSA_BF16, d.kv_heads, d.dim);
    }
    /* What the step of `count` tokens counts. */
    simt::counters step(int count) {
        simt::reset_counters();
        EXPECT(nsa_cuda_decode(&x, &cache, count, nullptr, nullptr, nullptr, workspace.data,
                               workspace.count, nullptr) == NSA_OK);
        return simt::count();
    }
};

/* Every block is in reach of the list, so that each key is read once. */
static void test_decode(nsa_phi phi) {
    enum { CHUNK = decoder::CHUNK, TOKENS = 8 * CHUNK };
    const nsa_desc d = nsa_desc_default(1, TOKENS, 32, 2, 128);
    decoder it(d, phi);
    for (int held = 0; held < TOKENS - 1; held += held < TOKENS - CHUNK ? CHUNK : 1) {
        const int count = held < TOKENS - CHUNK ? CHUNK : 1;
        const simt::counters n = it.step(count);
        EXPECT_EQUAL(n.launches, LAUNCHES);
        if (count == 1) EXPECT_EQUAL(n.async_bytes, decode_bytes(d, held));
    }
}

/* What a step writes for a tile more of compressed keys: scores of all heads and their sum over
   heads once; for each head the tile's largest score and four shares of its sum; of its run, which
   has this tile alone, the unit and the product with V in 16 bits (that it has no key, or the
   largest score, is written in both steps). Lists, window and the new token are alike. */
static void test_decode_writes() {
    nsa_desc d = nsa_desc_default(1, 160, 16, 1, 64);
    d.cmp_block = 8, d.cmp_stride = 1, d.slc_block = 16, d.slc_count = 4, d.window = KEYS;
    decoder it(d, NSA_PHI_MEAN);
    uint64_t written[2];
    for (int i = 0, held = 0; i < 2; i++) {
        for (; held < 72 + i * KEYS; held += 9) it.step(9);
        written[i] = it.step(1).global_write_bytes;
        held++;
    }
    const int of_head = 4 * KEYS + (1 + 4 + 1) * 4 + 2 * d.dim_v;
    EXPECT_EQUAL(written[1] - written[0], static_cast<uint64_t>(4 * KEYS + d.heads * of_head));
}

/* The whole backward at 64k tokens: a gradient of a branch's output alone would be 1.07 GB. Sizes
   look at no data. */
static void test_workspace() {
    const nsa_desc d = nsa_desc_default(1, 65536, 64, 4, 128);
    const auto view = [&](nsa_dtype dtype, int rows, int heads, int width) {
        return nsa_tensor_bthd(reinterpret_cast<void *>(uintptr_t{256}), dtype, rows, heads, width);
    };
    const int rows = nsa_cmp_count(&d, d.tokens);
    nsa_attention x = {}, dx;
    x.q = x.out = x.out_cmp = x.out_slc = x.out_win = view(NSA_BF16, d.tokens, d.heads, d.dim);
    x.k_slc = x.v_slc = x.k_win = x.v_win = view(NSA_BF16, d.tokens, d.kv_heads, d.dim);
    x.k_cmp.phi = x.v_cmp.phi = NSA_PHI_MEAN;
    x.k_cmp.dim = x.v_cmp.dim = d.dim;
    x.k_cmp.x = x.v_cmp.x = x.k_slc;
    x.k_cmp.out = x.v_cmp.out = view(NSA_BF16, rows, d.kv_heads, d.dim);
    x.gates = view(NSA_BF16, d.tokens, d.gate_heads, 3);
    x.blocks = view(NSA_I32, d.tokens, d.kv_heads, nsa_block_list_width(&d));
    x.lse_cmp = x.lse_slc = x.lse_win = view(NSA_F32, d.tokens, d.heads, 1);
    dx = x;
    const size_t bytes = nsa_cuda_attention_backward_workspace_size(&dx, &x, &d);
    printf("backward's workspace at %d tokens: %zu bytes\n", d.tokens, bytes);
    EXPECT(bytes > 0 && bytes <= size_t{1000000000});
}

int main() {
    if (simt::checking()) {
        test_decode_writes();
        return expect_result("test_counters, what a step writes");
    }
    nsa_desc d = nsa_desc_default(1, 192, 32, 2, 128);
    d.slc_count = 2, d.slc_local = 1, d.window = 70;
    for (int heads = 32; heads >= 2; heads /= 4) { /* G 16, 4 and 1 */
        d.heads = d.gate_heads = heads;
        const problem p(d);
        for (int i = 0; i < 4; i++) test_branch(p, i);
        test_select(p);
    }
    test_decode(NSA_PHI_MEAN);
    test_decode(NSA_PHI_CONV);
    test_workspace();
    return expect_result("test_counters");
}
