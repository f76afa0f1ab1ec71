/* split.c - attention over keys that two owners hold, each attending with its own, merged: how ring
   attention and context parallelism split a sequence.
   Twin: none; its definition, attention over all keys at once, stands in family.h. */
#include "family.h"

enum { T = 384, H = 8, HK = 2, D = 32, BLOCK = 16, COUNT = 6, PART = T / 2 };

/* What one owner is asked: the queries of one half of the sequence, over the keys of its own. */
typedef struct question {
    nsa_desc d;
    nsa_attend x, dx;
} question;

static nsa_tensor from(nsa_tensor x, int row) {
    if (x.data) x.data = (float *)x.data + row * x.token; /* lists too: 4 bytes */
    return x;
}

/* Queries behind all keys of the owner see every one of them; those beside them see the ones
   before. */
static question ask(const nsa_attend *x, const nsa_attend *dx, int owner, int half) {
    question a = {nsa_desc_default(1, PART, H, HK, D), *x, *dx};
    nsa_attend *both[] = {&a.x, &a.dx};
    a.d.slc_block = BLOCK, a.d.slc_count = COUNT;
    a.d.mask = half > owner ? NSA_MASK_NONE : NSA_MASK_CAUSAL;
    for (int i = 0; i < 2; i++) {
        both[i]->q = from(both[i]->q, half * PART), both[i]->out = from(both[i]->out, half * PART);
        both[i]->lse = from(both[i]->lse, half * PART);
        both[i]->k = from(both[i]->k, owner * PART), both[i]->v = from(both[i]->v, owner * PART);
    }
    a.x.blocks = from(a.x.blocks, half * PART);
    return a;
}

/* lists[o]: of owner o's blocks, which it counts from its first. The owner of the later keys has
   none for the earlier queries: out 0 and lse -inf, as a branch writes where no key is seen. */
static void with_nsa(problem *p, int32_t *const lists[2]) {
    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_attend part[2] = {x, x}, dpart[2] = {dx, dx};
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    float *out[2], *lse[2], *dout[2], *dlse[2]; /* of the parts */
    for (int o = 0; o < 2; o++) {
        out[o] = floats((size_t)T * H * D), dout[o] = floats((size_t)T * H * D);
        lse[o] = floats((size_t)T * H), dlse[o] = floats((size_t)T * H);
        for (int i = 0; i < T * H; i++) lse[o][i] = -INFINITY;
        part[o].out = view(out[o], T, H, D), part[o].lse = view(lse[o], T, H, 1);
        dpart[o].out = view(dout[o], T, H, D), dpart[o].lse = view(dlse[o], T, H, 1);
        part[o].blocks = nsa_tensor_bthd(lists[o], NSA_I32, T, HK, COUNT);
    }
    nsa_merge m = {part[0].out, part[1].out, part[0].lse, part[1].lse, x.out, x.lse};
    nsa_merge dm = {dpart[0].out, dpart[1].out, dpart[0].lse, dpart[1].lse, dx.out, {0}};
    question asked[] = {ask(&part[0], &dpart[0], 0, 0), ask(&part[0], &dpart[0], 0, 1),
                        ask(&part[1], &dpart[1], 1, 1)};
    for (int i = 0; i < 3; i++) {
        question *a = &asked[i];
        WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&a->d),
                       nsa_attend_slc_forward(&a->x, &a->d, workspace, bytes));
    }
    demand(nsa_merge_forward(&m, &d));
    demand(nsa_merge_backward(&dm, &m, &d));
    for (int i = 0; i < 3; i++) { /* dx.lse of each part is what merging made of it */
        question *a = &asked[i];
        WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&a->d),
                       nsa_attend_slc_backward(&a->dx, &a->x, &a->d, workspace, bytes));
    }
    for (int o = 0; o < 2; o++)
        release(out[o]), release(lse[o]), release(dout[o]), release(dlse[o]);
}

/* A query reads its own block and some before it, at random: of both owners, of one, of none but
   its own. */
static int reads_block(int t, int hk, int j) {
    unsigned state = (unsigned)(t * HK + hk) * 40503u + (unsigned)j * 2654435761u;
    state = (state ^ state >> 15) * 2246822519u;
    return j == t / BLOCK || (state >> 13 & 3) == 0;
}

int main(void) {
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p);
    int32_t *lists[2];
    printf("keys split between two owners\n");
    for (int o = 0; o < 2; o++) {
        lists[o] = (int32_t *)allocate(sizeof **lists * T * HK * COUNT);
        for (int i = 0; i < T * HK * COUNT; i++) lists[o][i] = -1;
    }
    for (int row = 0; row < T * HK; row++) {
        int n[2] = {0, 0}, per_owner = PART / BLOCK;
        for (int j = row / HK / BLOCK; j >= 0; j--) { /* its own first, because lists are short */
            int owner = j / per_owner;
            if (!reads_block(row / HK, row % HK, j) || n[owner] == COUNT) continue;
            int32_t *list = lists[owner] + row * COUNT;
            for (int i = n[owner]++; i > 0; i--) list[i] = list[i - 1]; /* ascending */
            list[0] = j - owner * per_owner;
            for (int h = row % HK * (H / HK); h < (row % HK + 1) * (H / HK); h++)
                for (int s = j * BLOCK; s < (j + 1) * BLOCK && s <= row / HK; s++)
                    p.mask[(row / HK * H + h) * T + s] = 1;
        }
    }
    with_nsa(&p, lists);
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    release(lists[0]), release(lists[1]);
    return finish(&p, &r);
}
