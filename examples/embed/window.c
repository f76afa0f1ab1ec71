/* The program of the manual in nsa.h: one branch, window attention. embed.c is the whole of it. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    enum { T = 256, H = 4, D = 32 };
    static float q[T * H * D], k[T * D], v[T * D], out[T * H * D], lse[T * H];
    for (int i = 0; i < T * H * D; i++) q[i] = (float)(i * 37 % 101) / 101;
    for (int i = 0; i < T * D; i++) k[i] = v[i] = (float)(i * 53 % 97) / 97;

    nsa_desc d = nsa_desc_default(1, T, H, 1, D);
    d.window = 64;
    nsa_attend x = {0};
    x.q = nsa_tensor_bthd(q, NSA_F32, T, H, D);
    x.k = nsa_tensor_bthd(k, NSA_F32, T, 1, D);
    x.v = nsa_tensor_bthd(v, NSA_F32, T, 1, D);
    x.out = nsa_tensor_bthd(out, NSA_F32, T, H, D);
    x.lse = nsa_tensor_bthd(lse, NSA_F32, T, H, 1);

    size_t bytes = nsa_attend_win_forward_workspace_size(&d);
    void *workspace = malloc(bytes);
    nsa_status s = nsa_attend_win_forward(&x, &d, workspace, bytes);
    printf("%s: %.4f\n", nsa_status_name(s), (double)out[(255 * H + 3) * D]);
    free(workspace);
    return s != NSA_OK;
}
