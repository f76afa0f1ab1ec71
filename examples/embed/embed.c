/* The smallest caller of the whole of Native Sparse Attention: one sequence, the paper's blocks and
   window, every branch on the same keys and values. Its twin in C++ is embed.cpp; no training here.
 */
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>

enum { T = 2048, H = 4, D = 32, N = (T - 32) / 16 + 1, LIST = 16 };
static float q[T * H * D], k[T * D], v[T * D], gates[T * H * 3], k_cmp[N * D], v_cmp[N * D];
static float out_cmp[T * H * D], out_slc[T * H * D], out_win[T * H * D], out[T * H * D];
static float lse_cmp[T * H], lse_slc[T * H], lse_win[T * H];
static int32_t blocks[T * LIST];

static nsa_tensor rows(float *data, int heads, int width) {
    return nsa_tensor_bthd(data, NSA_F32, T, heads, width);
}

static void fill(float *x, int n, uint32_t seed) { /* numbers in -2 .. 2 */
    for (int i = 0; i < n; i++)
        x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 4194304 - 2;
}

int main(void) {
    fill(q, T * H * D, 1), fill(k, T * D, 2), fill(v, T * D, 3), fill(gates, T * H * 3, 4);

    nsa_desc d =
        nsa_desc_default(1, T, H, 1, D); /* batch 1, T tokens, H heads over 1 key-value head */
    nsa_attention x = {0};
    x.q = rows(q, H, D);
    x.k_cmp.x = x.k_slc = x.k_win = rows(k, 1, D);
    x.v_cmp.x = x.v_slc = x.v_win = rows(v, 1, D);
    x.k_cmp.dim = x.v_cmp.dim = D; /* phi is the mean of a block unless another is asked for */
    x.k_cmp.out = nsa_tensor_bthd(k_cmp, NSA_F32, N, 1, D);
    x.v_cmp.out = nsa_tensor_bthd(v_cmp, NSA_F32, N, 1, D);
    x.gates = rows(gates, H, 3);
    x.blocks = nsa_tensor_bthd(blocks, NSA_I32, T, 1, LIST);
    x.out_cmp = rows(out_cmp, H, D), x.lse_cmp = rows(lse_cmp, H, 1);
    x.out_slc = rows(out_slc, H, D), x.lse_slc = rows(lse_slc, H, 1);
    x.out_win = rows(out_win, H, D), x.lse_win = rows(lse_win, H, 1);
    x.out = rows(out, H, D);

    size_t bytes = nsa_attention_forward_workspace_size(&x, &d);
    void *workspace = malloc(bytes);
    nsa_status s = nsa_attention_forward(&x, &d, workspace, bytes);
    free(workspace);
    if (s != NSA_OK) return fprintf(stderr, "%s: %s\n", nsa_status_where(s), nsa_status_text(s)), 1;

    printf("query %d reads %d compressed rows, %d tokens of its window, and of %d blocks these:",
           T - 1, nsa_cmp_visible(&d, T - 1), T - nsa_window_begin(&d, T - 1),
           nsa_slc_count(&d, T));
    for (int i = 0; i < LIST; i++) printf(" %d", blocks[(T - 1) * LIST + i]);
    printf("\nits output: %.4f %.4f %.4f ...\n", (double)out[(T - 1) * H * D],
           (double)out[(T - 1) * H * D + 1], (double)out[(T - 1) * H * D + 2]);
    return 0;
}
