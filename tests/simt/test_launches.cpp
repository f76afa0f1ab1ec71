/* test_launches.cpp - asks for the launches of every function of nsa_cuda.cuh, without running
   them: every kernel, dtype and width, many groups, blocks and lists. A device refuses none.
   Twin: none; the limits are those of the architecture that NSA_SIMT_ARCH names (simt/README.md).
   Not here: results. Views point at no memory. */
#include "nsa_cuda.cuh"
#include "simt.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#ifndef NSA_CUDA_MAX_DIM
#define NSA_CUDA_MAX_DIM 256
#endif

static long calls, failures;
static uintptr_t next_address;
static nsa_dtype dtype;

static void *somewhere() {
    return reinterpret_cast<void *>(next_address += uintptr_t(1) << 34);
}
static nsa_tensor view(int tokens, int heads, int width, nsa_dtype type = dtype) {
    return nsa_tensor_bthd(somewhere(), type, tokens, heads, width);
}

/* A call's outcome: none is refused but for grids that pass what a launch may have. */
static int expected = NSA_OK;
static void asked(const char *what, nsa_status s, const nsa_desc &d) {
    calls++;
    if (nsa_status_kind(s) == expected || ++failures > 20) return;
    printf(
        "%s: %s of %s (dtype %d, dim %d and %d, %d heads to %d, l %d, d %d, l' %d, n %d, %d lists, "
        "%d tokens)\n",
        what, nsa_status_name(s), nsa_status_where(s), static_cast<int>(dtype), d.dim, d.dim_v,
        d.heads, d.kv_heads, d.cmp_block, d.cmp_stride, d.slc_block, d.slc_count, d.list_heads,
        d.tokens);
}
#define ASK(name, ...) asked(#name, nsa_cuda_##name(__VA_ARGS__, nullptr), d)
#define ROOM           somewhere(), SIZE_MAX

static nsa_tensor lists(const nsa_desc &d) {
    return view(d.count, d.list_heads ? d.list_heads : d.kv_heads, nsa_block_list_width(&d),
                NSA_I32);
}

static nsa_attend attend_of(const nsa_desc &d, int keys) {
    nsa_attend x = {};
    x.q = view(d.count, d.heads, d.dim);
    x.k = view(keys, d.kv_heads, d.dim);
    x.v = view(keys, d.kv_heads, d.dim_v);
    x.out = view(d.count, d.heads, d.dim_v);
    x.lse = view(d.count, d.heads, 1, NSA_F32);
    x.blocks = lists(d);
    return x;
}

static void ask_attend(const nsa_desc &d) {
    const nsa_attend x = attend_of(d, d.tokens), dx = attend_of(d, d.tokens);
    const int rows = nsa_cmp_count(&d, d.tokens);
    const nsa_attend cmp = attend_of(d, rows), dcmp = attend_of(d, rows);
    ASK(attend_win_forward, &x, &d, ROOM);
    ASK(attend_win_backward, &dx, &x, &d, ROOM);
    ASK(attend_slc_forward, &x, &d, ROOM);
    ASK(attend_slc_backward, &dx, &x, &d, ROOM);
    ASK(attend_dense_forward, &x, &d, ROOM);
    ASK(attend_dense_backward, &dx, &x, &d, ROOM);
    ASK(attend_cmp_forward, &cmp, &d, ROOM);
    ASK(attend_cmp_backward, &dcmp, &cmp, &d, ROOM);
}

static void ask_select(const nsa_desc &d) {
    nsa_select x = {};
    x.q = view(d.count, d.heads, d.dim);
    x.k = view(nsa_cmp_count(&d, d.tokens), d.kv_heads, d.dim);
    x.lse = view(d.count, d.heads, 1, NSA_F32);
    x.blocks = lists(d);
    x.p_cmp = view(d.count, d.list_heads ? d.list_heads : d.kv_heads, nsa_cmp_count(&d, d.tokens),
                   NSA_F32);
    ASK(select_blocks, &x, &d, ROOM);
    nsa_score y = {};
    y.q = view(d.count, d.heads, d.dim);
    y.k = view(d.tokens, d.kv_heads, d.dim);
    y.blocks = lists(d);
    ASK(score_blocks, &y, &d, ROOM);
    y.scores =
        view(d.count, d.list_heads ? d.list_heads : d.kv_heads, nsa_block_list_width(&d), NSA_F32);
    ASK(score_blocks_forward, &y, &d, ROOM);
    ASK(score_blocks_backward, &y, &y, &d, ROOM);
    nsa_rank z = {};
    z.scores = view(d.count, d.list_heads ? d.list_heads : d.kv_heads, nsa_slc_count(&d, d.tokens),
                    NSA_F32);
    z.blocks = lists(d);
    ASK(rank_queries, &z, &d);
    ASK(check_blocks, &z.blocks, &d, static_cast<nsa_cuda_block_verdict *>(somewhere()));
    ASK(normalize_blocks, &z.blocks, &d);
}

static nsa_compress compress_of(const nsa_desc &d, nsa_phi phi, int dim) {
    nsa_compress x = {};
    x.phi = phi;
    x.dim = dim;
    x.hidden = 64;
    x.x = view(d.tokens, d.kv_heads, dim);
    x.out = view(nsa_cmp_count(&d, d.tokens), d.kv_heads, dim);
    if (phi == NSA_PHI_MEAN) return x;
    const int columns = d.cmp_block * dim, out = phi == NSA_PHI_CONV ? dim : x.hidden;
    x.w1 = nsa_tensor_bhtd(somewhere(), dtype, phi == NSA_PHI_CONV ? d.cmp_block : x.hidden,
                           d.kv_heads, phi == NSA_PHI_CONV ? dim : columns);
    x.b1 = nsa_tensor_bhtd(somewhere(), dtype, 1, d.kv_heads, out);
    if (phi == NSA_PHI_CONV) return x;
    x.pos = nsa_tensor_bhtd(somewhere(), dtype, d.cmp_block, d.kv_heads, dim);
    x.w2 = nsa_tensor_bhtd(somewhere(), dtype, dim, d.kv_heads, x.hidden);
    x.b2 = nsa_tensor_bhtd(somewhere(), dtype, 1, d.kv_heads, dim);
    return x;
}

static nsa_attention attention_of(const nsa_desc &d, nsa_phi phi) {
    nsa_attention x = {};
    const int T = d.tokens, H = d.heads, Hk = d.kv_heads;
    x.q = view(d.count, H, d.dim);
    x.k_cmp = compress_of(d, phi, d.dim);
    x.v_cmp = compress_of(d, phi, d.dim_v);
    x.k_slc = view(T, Hk, d.dim), x.k_win = view(T, Hk, d.dim);
    x.v_slc = view(T, Hk, d.dim_v), x.v_win = view(T, Hk, d.dim_v);
    x.gates = view(d.count, d.gate_heads, 3);
    x.blocks = lists(d);
    for (nsa_tensor *t : {&x.out_cmp, &x.out_slc, &x.out_win, &x.out})
        *t = view(d.count, H, d.dim_v);
    for (nsa_tensor *t : {&x.lse_cmp, &x.lse_slc, &x.lse_win}) *t = view(d.count, H, 1, NSA_F32);
    return x;
}

/* A cache's steps, of one token and of some; what moves it. */
static void ask_decode(nsa_desc d, nsa_phi phi) {
    nsa_cache cache, other;
    nsa_status *const verdict = static_cast<nsa_status *>(somewhere());
    ASK(cache_init, &cache, &d, dtype, 8, ROOM);
    ASK(cache_init, &other, &d, dtype, 8, ROOM);
    ASK(cache_rewind, &cache, 0, 0, verdict);
    ASK(cache_fork, &other, 0, &cache, 0, 0, verdict);
    for (const int count : {1, 9}) {
        d.count = count;
        const nsa_attention x = attention_of(d, phi);
        ASK(decode, &x, &cache, count, nullptr, nullptr, verdict, ROOM);
    }
}

/* What does not hang on blocks and lists. */
static void ask_rest(nsa_desc d) {
    int32_t *const numbers = static_cast<int32_t *>(somewhere());
    for (const nsa_phi phi : {NSA_PHI_MEAN, NSA_PHI_CONV, NSA_PHI_MLP}) {
        const nsa_compress x = compress_of(d, phi, d.dim), dx = compress_of(d, phi, d.dim);
        ASK(compress_forward, &x, &d, ROOM);
        ASK(compress_backward, &dx, &x, &d, ROOM);
        const nsa_attention y = attention_of(d, phi), dy = attention_of(d, phi);
        ASK(attention_forward, &y, &d, ROOM);
        ASK(attention_backward, &dy, &y, &d, ROOM);
        ask_decode(d, phi);
    }
    nsa_rope r = {}, dr;
    r.heads = d.heads, r.dim = d.dim;
    r.x = view(d.count, d.heads, d.dim), r.out = view(d.count, d.heads, d.dim);
    dr = r;
    dr.x.data = somewhere(), dr.out.data = somewhere();
    ASK(rope_forward, &r, &d);
    ASK(rope_backward, &dr, &r, &d);
    nsa_merge m = {}, dm;
    for (nsa_tensor *t : {&m.out_a, &m.out_b, &m.out}) *t = view(d.count, d.heads, d.dim_v);
    for (nsa_tensor *t : {&m.lse_a, &m.lse_b, &m.lse}) *t = view(d.count, d.heads, 1, NSA_F32);
    dm = m;
    dm.lse.data = somewhere();
    ASK(merge_forward, &m, &d);
    ASK(merge_backward, &dm, &m, &d);
    nsa_gate g = {};
    g.logits = view(d.count, d.gate_heads, 3);
    for (nsa_tensor *t : {&g.cmp, &g.slc, &g.win, &g.out}) *t = view(d.count, d.heads, d.dim_v);
    ASK(gate_forward, &g, &d);
    ASK(gate_backward, &g, &g, &d);
    ASK(block_map, &d, d.tokens, numbers, static_cast<int32_t *>(somewhere()),
        static_cast<float *>(somewhere()));
    ASK(rank_blocks, static_cast<const float *>(somewhere()), 9, &d, numbers);
    d.begins = static_cast<const int32_t *>(somewhere());
    ASK(cmp_begins, &d, numbers);
    for (d.rows = 0; d.rows <= d.tokens; d.rows += d.tokens) {
        ask_select(d);
        ask_attend(d);
    }
    d.rows = 0, d.begins = nullptr;
    d.firsts = numbers, d.counts = numbers, d.pages = numbers;
    d.page_tokens = d.slc_block, d.table_width = d.tokens / d.page_tokens + 1, d.page_count = 8;
    ASK(check_pages, &d, static_cast<nsa_cuda_page_verdict *>(somewhere()));
}

static void ask_geometry(int dim, int dim_v, int group, const int (&blocks)[3]) {
    const int counts[] = {1, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 512};
    for (const int count : counts)
        for (const int own_lists : {0, 1})
            for (const int tokens : {1024, 65536}) {
                if (own_lists && (group == 1 || count > 16)) continue;
                next_address = uintptr_t(1) << 40;
                nsa_desc d = nsa_desc_default(1, tokens, 2 * group, 2, dim);
                d.dim_v = dim_v, d.slc_count = count;
                d.cmp_block = blocks[0], d.cmp_stride = blocks[1], d.slc_block = blocks[2];
                d.slc_init = count > 2, d.slc_local = count > 2 ? 2 : 1;
                if (own_lists) d.list_heads = d.heads;
                ask_select(d);
                if (count != 4 && count != 16) continue;
                ask_attend(d);
                if (!own_lists) ask_rest(d);
            }
}

/* A thread block for each 16 rows would be more than 2^31. */
static void ask_too_much() {
    nsa_desc d = nsa_desc_default(1, 1 << 29, 4096, 4096, 64);
    d.cmp_block = d.cmp_stride = 1;
    dtype = NSA_BF16, expected = NSA_ERROR_OVERFLOW;
    const nsa_compress x = compress_of(d, NSA_PHI_MEAN, d.dim);
    ASK(compress_forward, &x, &d, ROOM);
    ASK(compress_backward, &x, &x, &d, ROOM);
    const nsa_attend y = attend_of(d, d.tokens), dy = attend_of(d, d.tokens);
    ASK(attend_win_forward, &y, &d, ROOM);
    ASK(attend_win_backward, &dy, &y, &d, ROOM);
}

/* Whether a function's symbol is that of a kernel: _Z, L where it is no template, the length of its
   name and the name. */
static bool is_kernel(const std::string &symbol) {
    size_t at = symbol.compare(0, 3, "_ZL") == 0 ? 3 : 2, length = 0;
    if (symbol.compare(0, 2, "_Z") != 0) return false;
    while (at < symbol.size() && isdigit(static_cast<unsigned char>(symbol[at])))
        length = 10 * length + static_cast<size_t>(symbol[at++] - '0');
    return symbol.compare(at, 5, "nsa__") == 0 && length > 7 && at + length <= symbol.size() &&
           symbol.compare(at + length - 7, 7, "_kernel") == 0;
}

/* Counts kernels that no call has asked for, but for those of another path. With NSA_TEST_TABLE it
   prints the static bytes of the others (tests/cuda/static_shared.py). */
static void expect_all_asked() {
    long kernels = 0, other_path = 0;
    for (const simt::function &f : simt::functions()) {
        if (!is_kernel(f.symbol)) continue;
        kernels += f.launched;
        if (f.launched && getenv("NSA_TEST_TABLE"))
            printf("%s %zu\n", f.symbol.c_str(), f.static_bytes);
        if (f.launched) continue;
#ifdef NSA__SIMT_WGMMA
        const bool other = f.symbol.find("attend_") != std::string::npos &&
                           f.symbol.find("_sm90_") == std::string::npos;
#else
        const bool other = f.symbol.find("_sm90_") != std::string::npos;
#endif
        other_path += other;
        if (!other && ++failures <= 20) printf("no call asked for %s\n", f.symbol.c_str());
    }
    printf("%ld kernels; %ld of another path\n", kernels, other_path);
}

/* "little": the geometries that planted faults take. */
int main(int argc, char **argv) {
    const bool little = argc > 1 && !strcmp(argv[1], "little");
    static const int dims[][2] = {{8, 8},     {64, 64},   {32, 64},   {128, 128},
                                  {96, 128},  {64, 128},  {192, 128}, {136, 128},
                                  {192, 192}, {256, 256}, {64, 256}};
    static const int blocks[][3] = {{32, 16, 64}, {16, 16, 64}, {32, 16, 128}, {32, 16, 32},
                                    {64, 16, 64}, {16, 8, 16},  {128, 1, 128}, {8, 4, 128}};
    simt::config().ask = true;
    for (const nsa_dtype type : {NSA_F32, NSA_BF16, NSA_F16}) {
        dtype = type;
#ifdef NSA_CUDA_NO_F16
        if (type == NSA_F16) continue;
#endif
        for (const auto &dim : dims) {
            if (little && dim[0] != 64 && dim[0] != 128) continue;
            for (const int group : {1, 2, 3, 4, 8, 16, 32, 64})
                for (const auto &block : blocks)
                    if (dim[0] <= NSA_CUDA_MAX_DIM && dim[1] <= NSA_CUDA_MAX_DIM)
                        ask_geometry(dim[0], dim[1], group, block);
        }
    }
    if (!little) expect_all_asked();
    ask_too_much();
    printf("test_launches: sm_%d: %ld calls, %ld failures\n", simt::config().architecture, calls,
           failures);
    return failures != 0;
}
