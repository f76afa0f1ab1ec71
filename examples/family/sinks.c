/* sinks.c - both things that are called attention sinks. gpt-oss has a learned logit a head: a
   softmax over the window and one logit that has no value. StreamingLLM (arXiv 2309.17453) keeps
   the first tokens: a softmax over them and the window, each with its value.
   Twin: none; its definition, computed naively, stands in family.h. */
#include "family.h"

enum { T = 300, H = 6, HK = 2, D = 32, WINDOW = 40, FIRST = 4 };

/* One part of a merge: what the window, or the first tokens, make of all queries. */
typedef struct part {
    float *out, *lse, *dout, *dlse;
} part;

static part part_new(void) {
    part a = {floats((size_t)T * H * D), floats((size_t)T * H), floats((size_t)T * H * D),
              floats((size_t)T * H)};
    return a;
}

static void part_free(part *a) {
    release(a->out), release(a->lse), release(a->dout), release(a->dlse);
}

/* Attention writes to the part and reads its gradient there. */
static void part_of(const part *a, nsa_attend *x, nsa_attend *dx) {
    x->out = view(a->out, T, H, D), x->lse = view(a->lse, T, H, 1);
    dx->out = view(a->dout, T, H, D), dx->lse = view(a->dlse, T, H, 1);
}

static nsa_desc windows(void) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.window = WINDOW;
    return d;
}

/* The window's out and lse, merged with a part whose out is 0 and whose lse is the sink's logit.
   The gradient of a logit sums over the queries that met it. */
static void with_logit(problem *p, const float *sinks, float *dsinks) {
    nsa_desc d = windows();
    part window = part_new();
    float *dsink = floats((size_t)T * H), *zeros = floats(D);
    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_merge m = {0}, dm = {0};
    m.out = x.out, m.lse = x.lse, dm.out = dx.out;
    part_of(&window, &x, &dx);
    m.out_a = x.out, m.lse_a = x.lse, dm.out_a = dx.out, dm.lse_a = dx.lse;
    m.out_b = view(zeros, 1, 1, D), m.lse_b = view(sinks, 1, H, 1);
    m.out_b.token = m.out_b.head = m.lse_b.token = 0; /* one row of zeros, one logit a head */
    dm.lse_b = view(dsink, T, H, 1);
    WITH_WORKSPACE(nsa_attend_win_forward_workspace_size(&d),
                   nsa_attend_win_forward(&x, &d, workspace, bytes));
    demand(nsa_merge_forward(&m, &d));
    demand(nsa_merge_backward(&dm, &m, &d));
    WITH_WORKSPACE(nsa_attend_win_backward_workspace_size(&d),
                   nsa_attend_win_backward(&dx, &x, &d, workspace, bytes));
    for (int i = 0; i < T * H; i++) dsinks[i % H] += dsink[i];
    part_free(&window), release(dsink), release(zeros);
}

/* The window, merged with a list of those first tokens that it has left behind: blocks of one
   token, so that no key is counted twice where the two meet. */
static void with_first_tokens(problem *p) {
    nsa_desc d = windows(), e = d;
    e.slc_block = 1, e.slc_count = FIRST;
    int32_t *lists = (int32_t *)allocate(sizeof *lists * T * FIRST);
    for (int t = 0; t < T; t++)
        for (int s = 0; s < FIRST; s++) lists[t * FIRST + s] = s <= t - WINDOW ? s : -1;
    part window = part_new(), first = part_new();
    nsa_attend x = views_of(p), dx = gradients_of(p), y = x, dy = dx;
    nsa_merge m = {0}, dm = {0};
    m.out = x.out, m.lse = x.lse, dm.out = dx.out;
    part_of(&window, &x, &dx), part_of(&first, &y, &dy);
    y.blocks = nsa_tensor_bthd(lists, NSA_I32, T, 1, FIRST);
    y.blocks.head = 0;
    m.out_a = x.out, m.lse_a = x.lse, m.out_b = y.out, m.lse_b = y.lse;
    dm.out_a = dx.out, dm.lse_a = dx.lse, dm.out_b = dy.out, dm.lse_b = dy.lse;
    WITH_WORKSPACE(nsa_attend_win_forward_workspace_size(&d),
                   nsa_attend_win_forward(&x, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&e),
                   nsa_attend_slc_forward(&y, &e, workspace, bytes));
    demand(nsa_merge_forward(&m, &d));
    demand(nsa_merge_backward(&dm, &m, &d));
    WITH_WORKSPACE(nsa_attend_win_backward_workspace_size(&d),
                   nsa_attend_win_backward(&dx, &x, &d, workspace, bytes));
    WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&e),
                   nsa_attend_slc_backward(&dy, &y, &e, workspace, bytes));
    part_free(&window), part_free(&first), release(lists);
}

/* What a query reads: its window, and the first tokens of the sequence. */
static void mask_of(problem *p, int first) {
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++)
            for (int s = 0; s < T; s++)
                p->mask[(t * H + h) * T + s] = s <= t && (s > t - WINDOW || s < first);
}

static void logit(void) {
    static const float of_head[H] = {0.5f, -1.0f, 2.0f, 0.0f, 4.0f, -3.0f};
    float *sinks = floats(H), dsinks[H] = {0};
    double wanted_sinks[H], wanted_dsinks[H] = {0};
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p);
    printf("a sink that is a logit\n");
    for (int h = 0; h < H; h++) sinks[h] = of_head[h];
    with_logit(&p, sinks, dsinks);
    for (int h = 0; h < H; h++) wanted_sinks[h] = (double)sinks[h];
    mask_of(&p, 0);
    attend_naively(&p, wanted_sinks, wanted_dsinks, &r);
    compare_all(&p, &r);
    compare("dsinks", dsinks, wanted_dsinks, H);
    release(sinks);
    finish(&p, &r);
}

static void first_tokens(void) {
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p);
    printf("sinks that are the first tokens\n");
    with_first_tokens(&p);
    mask_of(&p, FIRST);
    attend_naively(&p, NULL, NULL, &r);
    compare_all(&p, &r);
    finish(&p, &r);
}

int main(void) {
    logit();
    first_tokens();
    return failures;
}
