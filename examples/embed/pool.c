/* embed.c once more, with the program's own threads in place of OpenMP: phi first, then each thread
   its slice of the queries through the branches. It prints the last line of what embed.c prints.
   Not a pool that is kept: these threads live for one call. Compile without -fopenmp, with
   -lpthread. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { T = 2048, H = 4, D = 32, N = (T - 32) / 16 + 1, LIST = 16, THREADS = 4 };
static float q[T * H * D], k[T * D], v[T * D], gates[T * H * 3], k_cmp[N * D], v_cmp[N * D];
static float branch[3][T * H * D], out[T * H * D], lse[3][T * H];
static int32_t blocks[T * LIST];

static void fill(float *x, int n, uint32_t seed) { /* numbers in -2 .. 2 */
    for (int i = 0; i < n; i++)
        x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 4194304 - 2;
}

/* A view of the queries' rows from `first` on: what a call for a slice is given. */
static nsa_tensor from(float *data, int first, int width) {
    return nsa_tensor_bthd(data + first * H * width, NSA_F32, T, H, width);
}

static nsa_attend attend(int b, int first, float *keys, float *values) {
    nsa_attend x = {0};
    x.q = from(q, first, D);
    x.k = nsa_tensor_bthd(keys, NSA_F32, b ? T : N, 1, D);
    x.v = nsa_tensor_bthd(values, NSA_F32, b ? T : N, 1, D);
    x.out = from(branch[b], first, D);
    x.lse = from(lse[b], first, 1);
    x.blocks = nsa_tensor_bthd(blocks + first * LIST, NSA_I32, T, 1, LIST);
    return x;
}

static nsa_status slice(const nsa_desc *d) {
    nsa_attend cmp = attend(0, d->first, k_cmp, v_cmp);
    nsa_attend slc = attend(1, d->first, k, v), win = attend(2, d->first, k, v);
    nsa_select select = {cmp.q, cmp.k, cmp.lse, cmp.blocks, {0}, {0}};
    nsa_gate gate = {from(gates, d->first, 3), cmp.out, slc.out, win.out, from(out, d->first, D)};
    size_t sizes[] = {nsa_attend_cmp_forward_workspace_size(d), nsa_select_blocks_workspace_size(d),
                      nsa_attend_slc_forward_workspace_size(d),
                      nsa_attend_win_forward_workspace_size(d)};
    size_t bytes = 0;
    for (int i = 0; i < 4; i++) bytes = sizes[i] > bytes ? sizes[i] : bytes;
    void *workspace = malloc(bytes); /* each thread its own */
    nsa_status s = nsa_attend_cmp_forward(&cmp, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_select_blocks(&select, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attend_slc_forward(&slc, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_attend_win_forward(&win, d, workspace, bytes);
    if (s == NSA_OK) s = nsa_gate_forward(&gate, d);
    free(workspace);
    return s;
}

static void *run(void *desc) {
    return (void *)(intptr_t)slice((const nsa_desc *)desc);
}

int main(void) {
    fill(q, T * H * D, 1), fill(k, T * D, 2), fill(v, T * D, 3), fill(gates, T * H * 3, 4);
    nsa_desc d = nsa_desc_default(1, T, H, 1, D), slices[THREADS];
    nsa_compress phi = {0};
    phi.dim = D;
    size_t bytes = nsa_compress_forward_workspace_size(&phi, &d);
    void *workspace = malloc(bytes), *result;
    nsa_status s = NSA_OK;
    for (int i = 0; i < 2 && s == NSA_OK; i++) { /* every query reads what this writes */
        phi.x = nsa_tensor_bthd(i ? v : k, NSA_F32, T, 1, D);
        phi.out = nsa_tensor_bthd(i ? v_cmp : k_cmp, NSA_F32, N, 1, D);
        s = nsa_compress_forward(&phi, &d, workspace, bytes);
    }
    free(workspace);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        slices[i] = d;
        slices[i].first = T * i / THREADS;
        slices[i].count = T * (i + 1) / THREADS - slices[i].first;
        if (pthread_create(&threads[i], NULL, run, &slices[i])) return perror("thread"), 1;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], &result);
        if (s == NSA_OK) s = (nsa_status)(intptr_t)result;
    }
    if (s != NSA_OK) return fprintf(stderr, "%s: %s\n", nsa_status_where(s), nsa_status_text(s)), 1;

    const float *last = out + (T - 1) * H * D;
    printf("its output: %.4f %.4f %.4f ...\n", (double)last[0], (double)last[1], (double)last[2]);
    return 0;
}
