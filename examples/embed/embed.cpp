// The smallest caller of the whole of Native Sparse Attention, in C++: embed.c says more.
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <cstdio>
#include <vector>

enum { T = 2048, H = 4, D = 32, N = (T - 32) / 16 + 1, LIST = 16 };

struct Rows { // (T, heads, width), and the view of it that nsa.h takes
    std::vector<float> data;
    nsa_tensor view;
    Rows(int tokens, int heads, int width) : data(size_t(tokens * heads * width)) {
        view = nsa_tensor_bthd(data.data(), NSA_F32, tokens, heads, width);
    }
    Rows(int tokens, int heads, int width, uint32_t seed) : Rows(tokens, heads, width) {
        for (float &x : data) x = float((seed = seed * 1664525u + 1013904223u) >> 8) / 4194304 - 2;
    }
};

int main() {
    Rows q(T, H, D, 1), k(T, 1, D, 2), v(T, 1, D, 3), gates(T, H, 3, 4), k_cmp(N, 1, D),
        v_cmp(N, 1, D);
    Rows out_cmp(T, H, D), out_slc(T, H, D), out_win(T, H, D), out(T, H, D);
    Rows lse_cmp(T, H, 1), lse_slc(T, H, 1), lse_win(T, H, 1);
    std::vector<int32_t> blocks(T * LIST);

    nsa_desc d = nsa_desc_default(1, T, H, 1, D);
    nsa_attention x = {};
    x.q = q.view;
    x.k_cmp.x = x.k_slc = x.k_win = k.view;
    x.v_cmp.x = x.v_slc = x.v_win = v.view;
    x.k_cmp.dim = x.v_cmp.dim = D;
    x.k_cmp.out = k_cmp.view, x.v_cmp.out = v_cmp.view;
    x.gates = gates.view;
    x.blocks = nsa_tensor_bthd(blocks.data(), NSA_I32, T, 1, LIST);
    x.out_cmp = out_cmp.view, x.lse_cmp = lse_cmp.view;
    x.out_slc = out_slc.view, x.lse_slc = lse_slc.view;
    x.out_win = out_win.view, x.lse_win = lse_win.view;
    x.out = out.view;

    std::vector<char> workspace(nsa_attention_forward_workspace_size(&x, &d));
    nsa_status s = nsa_attention_forward(&x, &d, workspace.data(), workspace.size());
    if (s != NSA_OK)
        return std::fprintf(stderr, "%s: %s\n", nsa_status_where(s), nsa_status_text(s)), 1;

    std::printf(
        "query %d reads %d compressed rows, %d tokens of its window, and of %d blocks these:",
        T - 1, nsa_cmp_visible(&d, T - 1), T - nsa_window_begin(&d, T - 1), nsa_slc_count(&d, T));
    const int32_t *list = &blocks[(T - 1) * LIST];
    const float *o = &out.data[(T - 1) * H * D];
    for (int i = 0; i < LIST; i++) std::printf(" %d", list[i]);
    std::printf("\nits output: %.4f %.4f %.4f ...\n", double(o[0]), double(o[1]), double(o[2]));
}
