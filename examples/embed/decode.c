/* The smallest decoder: the sequence of embed.c through a cache, most of it in chunks as a prompt
   would come, the last token alone as a generated one does. It prints what embed.c prints. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>

enum { T = 2048, H = 4, D = 32, LIST = 16, CHUNK = 256 };
static float q[T * H * D], k[T * D], v[T * D], gates[T * H * 3];
static float out_cmp[CHUNK * H * D], out_slc[CHUNK * H * D], out_win[CHUNK * H * D];
static float out[CHUNK * H * D], lse_cmp[CHUNK * H], lse_slc[CHUNK * H], lse_win[CHUNK * H];
static int32_t blocks[CHUNK * LIST];

static nsa_tensor rows(float *data, int heads, int width) {
    return nsa_tensor_bthd(data, NSA_F32, CHUNK, heads, width);
}

static void fill(float *x, int n, uint32_t seed) { /* numbers in -2 .. 2 */
    for (int i = 0; i < n; i++)
        x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 4194304 - 2;
}

/* The new tokens' rows of the inputs, and room for their outputs. */
static nsa_attention views(int first) {
    nsa_attention x = {0};
    x.q = rows(q + first * H * D, H, D);
    x.k_cmp.x = x.k_slc = x.k_win = rows(k + first * D, 1, D);
    x.v_cmp.x = x.v_slc = x.v_win = rows(v + first * D, 1, D);
    x.k_cmp.dim = x.v_cmp.dim = D;
    x.gates = rows(gates + first * H * 3, H, 3);
    x.blocks = nsa_tensor_bthd(blocks, NSA_I32, CHUNK, 1, LIST);
    x.out_cmp = rows(out_cmp, H, D), x.lse_cmp = rows(lse_cmp, H, 1);
    x.out_slc = rows(out_slc, H, D), x.lse_slc = rows(lse_slc, H, 1);
    x.out_win = rows(out_win, H, D), x.lse_win = rows(lse_win, H, 1);
    x.out = rows(out, H, D);
    return x;
}

int main(void) {
    fill(q, T * H * D, 1), fill(k, T * D, 2), fill(v, T * D, 3), fill(gates, T * H * 3, 4);

    nsa_desc d = nsa_desc_default(1, T, H, 1, D); /* room for T tokens */
    nsa_cache cache = {0};
    size_t held = nsa_cache_size(&d, NSA_F32, CHUNK - 1); /* CHUNK tokens at once at most */
    void *memory = malloc(held);
    nsa_status s = nsa_cache_init(&cache, &d, NSA_F32, CHUNK - 1, memory, held);

    nsa_attention x = views(0);
    size_t bytes = nsa_decode_workspace_size(&x, &cache, CHUNK);
    void *workspace = malloc(bytes);
    nsa_reads reads = {0, 0, 0};
    for (int first = 0, count; s == NSA_OK && first < T; first += count) {
        count = T - 1 - first < CHUNK ? T - 1 - first : CHUNK;
        if (first == T - 1) count = 1; /* the last token, by itself */
        x = views(first);
        s = nsa_decode(&x, &cache, count, NULL, &reads, workspace, bytes);
    }
    free(workspace);
    free(memory);
    if (s != NSA_OK) return fprintf(stderr, "%s: %s\n", nsa_status_where(s), nsa_status_text(s)), 1;

    printf("query %d reads %d compressed rows, %d tokens of its window, and of %d blocks these:",
           T - 1, (int)reads.cmp, (int)reads.win, nsa_slc_count(&d, T));
    for (int i = 0; i < LIST; i++) printf(" %d", blocks[i]);
    printf("\nits output: %.4f %.4f %.4f ...\n", (double)out[0], (double)out[1], (double)out[2]);
    return 0;
}
