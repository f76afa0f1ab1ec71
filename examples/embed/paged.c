/* A serving engine's step: its cache lies in pages, three sequences share those of a common prompt,
   and one call takes what each of them has to do, a chunk of a prompt or one token. Each then has
   the bits of itself alone over straight rows, which is what the program ends by checking.
   Not an engine: pages are never given back, and the model is random numbers. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { B = 3, T = 1024, H = 4, D = 32, PAGE = 64, SLOTS = T / PAGE, PREFIX = 6 * PAGE };
enum { PAGES = 32, CMP = PAGE / 16, CHUNK = 512, LIST = 16 };

/* What a model would compute, token by token, and what attention has answered. */
static float q[B][T * H * D], k[B][T * D], v[B][T * D], gates[B][T * H * 3];
static float answer[B][T * H * D];
static int32_t chosen[B][T * LIST];

/* The cache: pages of k, v and their compressed rows, and which of them each sequence has. */
static float k_pages[PAGES * PAGE * D], v_pages[PAGES * PAGE * D];
static float k_cmp_pages[PAGES * CMP * D], v_cmp_pages[PAGES * CMP * D];
static int32_t table[B * SLOTS], held[B];
static int used;

/* One call's rows on the query's side, or those of a sequence alone. */
static float q_rows[B * CHUNK * H * D], gate_rows[B * CHUNK * H * 3], out[B * CHUNK * H * D];
static float branch[3][B * CHUNK * H * D], lse[3][B * CHUNK * H], k_cmp[T * D], v_cmp[T * D];
static int32_t blocks[B * CHUNK * LIST];

static void fill(float *x, int n, uint32_t seed) { /* numbers in -2 .. 2 */
    for (int i = 0; i < n; i++)
        x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 4194304 - 2;
}

/* Everything but where keys lie. */
static nsa_attention queries(float *from, float *logits) {
    nsa_attention x = {0};
    x.q = nsa_tensor_bthd(from, NSA_F32, 0, H, D);
    x.gates = nsa_tensor_bthd(logits, NSA_F32, 0, H, 3);
    x.blocks = nsa_tensor_bthd(blocks, NSA_I32, 0, 1, LIST);
    nsa_tensor *outs[] = {&x.out_cmp, &x.out_slc, &x.out_win};
    nsa_tensor *lses[] = {&x.lse_cmp, &x.lse_slc, &x.lse_win};
    for (int i = 0; i < 3; i++) {
        *outs[i] = nsa_tensor_bthd(branch[i], NSA_F32, 0, H, D);
        *lses[i] = nsa_tensor_bthd(lse[i], NSA_F32, 0, H, 1);
    }
    x.out = nsa_tensor_bthd(out, NSA_F32, 0, H, D);
    x.k_cmp.dim = x.v_cmp.dim = D;
    return x;
}

static nsa_status attend(const nsa_attention *x, const nsa_desc *d) {
    size_t bytes = nsa_attention_forward_workspace_size(x, d);
    void *workspace = malloc(bytes);
    nsa_status s = nsa_attention_forward(x, d, workspace, bytes);
    free(workspace);
    return s;
}

/* The new tokens' rows of K and V go to their pages; a page is taken when the last one is full. */
static void append(int b, int count) {
    for (int t = held[b]; t < held[b] + count; t++) {
        if (t % PAGE == 0) table[b * SLOTS + t / PAGE] = used++;
        int row = table[b * SLOTS + t / PAGE] * PAGE + t % PAGE;
        memcpy(k_pages + row * D, k[b] + t * D, sizeof(float) * D);
        memcpy(v_pages + row * D, v[b] + t * D, sizeof(float) * D);
    }
}

/* A step: counts[b] new tokens of each sequence, all in one call. */
static nsa_status step(const int32_t counts[B]) {
    nsa_desc d = nsa_desc_default(B, T, H, 1, D);
    nsa_attention x = queries(q_rows, gate_rows);
    d.count = CHUNK, d.firsts = held, d.counts = counts;
    d.pages = table, d.table_width = SLOTS, d.page_tokens = PAGE, d.page_count = PAGES;
    x.k_cmp.x = x.k_slc = x.k_win = nsa_tensor_bthd(k_pages, NSA_F32, PAGE, 1, D);
    x.v_cmp.x = x.v_slc = x.v_win = nsa_tensor_bthd(v_pages, NSA_F32, PAGE, 1, D);
    x.k_cmp.out = nsa_tensor_bthd(k_cmp_pages, NSA_F32, CMP, 1, D);
    x.v_cmp.out = nsa_tensor_bthd(v_cmp_pages, NSA_F32, CMP, 1, D);
    for (int b = 0, row = 0; b < B; row += counts[b++]) {
        size_t n = (size_t)counts[b] * H * sizeof(float);
        append(b, counts[b]);
        memcpy(q_rows + row * H * D, q[b] + held[b] * H * D, n * D);
        memcpy(gate_rows + row * H * 3, gates[b] + held[b] * H * 3, n * 3);
    }
    nsa_status s = attend(&x, &d);
    for (int b = 0, row = 0; b < B; row += counts[b++]) {
        size_t n = (size_t)counts[b];
        memcpy(answer[b] + held[b] * H * D, out + row * H * D, n * H * D * sizeof(float));
        memcpy(chosen[b] + held[b] * LIST, blocks + row * LIST, n * LIST * sizeof(int32_t));
        held[b] += counts[b];
    }
    return s;
}

/* 1 if tokens `first` and on of sequence b have the bits of one call for it, over straight rows. */
static int same_alone(int b, int first) {
    nsa_desc d = nsa_desc_default(1, held[b], H, 1, D);
    nsa_attention x = queries(q[b] + first * H * D, gates[b] + first * H * 3);
    d.first = first, d.count = held[b] - first;
    x.k_cmp.x = x.k_slc = x.k_win = nsa_tensor_bthd(k[b], NSA_F32, T, 1, D);
    x.v_cmp.x = x.v_slc = x.v_win = nsa_tensor_bthd(v[b], NSA_F32, T, 1, D);
    x.k_cmp.out = nsa_tensor_bthd(k_cmp, NSA_F32, T, 1, D);
    x.v_cmp.out = nsa_tensor_bthd(v_cmp, NSA_F32, T, 1, D);
    size_t n = (size_t)d.count;
    return attend(&x, &d) == NSA_OK &&
           !memcmp(answer[b] + first * H * D, out, n * H * D * sizeof(float)) &&
           !memcmp(chosen[b] + first * LIST, blocks, n * LIST * sizeof(int32_t));
}

int main(void) {
    for (uint32_t b = 0; b < B; b++) {
        fill(q[b], T * H * D, 1 + 4 * b), fill(gates[b], T * H * 3, 2 + 4 * b);
        fill(k[b], T * D, 3 + 4 * b), fill(v[b], T * D, 4 + 4 * b);
        memcpy(k[b], k[0], sizeof(float) * PREFIX * D);
        memcpy(v[b], v[0], sizeof(float) * PREFIX * D);
    }
    /* The first sequence's prompt; then two more that begin as it does: they take its pages. */
    static const int32_t prompt[B] = {CHUNK, 0, 0}, mixed[B] = {1, 300, 77}, token[B] = {1, 1, 1};
    nsa_status s = step(prompt);
    for (int b = 1; b < B; b++) {
        memcpy(table + b * SLOTS, table, PREFIX / PAGE * sizeof *table);
        held[b] = PREFIX;
    }
    if (s == NSA_OK) s = step(mixed); /* one token of the first, chunks of the others' prompts */
    for (int i = 0; s == NSA_OK && i < 100; i++) s = step(token);
    if (s != NSA_OK) return fprintf(stderr, "%s: %s\n", nsa_status_where(s), nsa_status_text(s)), 1;

    int same = same_alone(0, 0) + same_alone(1, PREFIX) + same_alone(2, PREFIX);
    printf("%d + %d + %d tokens in %d pages, %d of them shared\n", held[0], held[1], held[2], used,
           PREFIX / PAGE);
    printf("sequences with the bits of themselves alone: %d of %d\n", same, B);
    return same != B;
}
