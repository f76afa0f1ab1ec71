/* sinks.c - attention sinks (arXiv 2309.17453; one learned logit a head as in gpt-oss): a softmax
   over the window and one logit that has no value.
   Twin: none; its definition, computed naively, stands in family.h. */
#include "family.h"

enum { T = 300, H = 6, HK = 2, D = 32, WINDOW = 40 };

/* The window's out and lse, merged with a part whose out is 0 and whose lse is the sink's logit.
   The gradient of a logit sums over the queries that met it. */
static void with_nsa(problem *p, const float *sinks, float *dsinks) {
    nsa_desc d = nsa_desc_default(1, T, H, HK, D);
    d.window = WINDOW;
    float *out = floats((size_t)T * H * D), *lse = floats((size_t)T * H);
    float *dout = floats((size_t)T * H * D), *dlse = floats((size_t)T * H);
    float *dsink = floats((size_t)T * H), *zeros = floats(D);
    nsa_attend x = views_of(p), dx = gradients_of(p);
    nsa_merge m = {0}, dm = {0};
    m.out = x.out, m.lse = x.lse, dm.out = dx.out;
    m.out_a = x.out = view(out, T, H, D), m.lse_a = x.lse = view(lse, T, H, 1);
    m.out_b = view(zeros, 1, 1, D), m.lse_b = view(sinks, 1, H, 1);
    m.out_b.token = m.out_b.head = m.lse_b.token = 0; /* one row of zeros, one logit a head */
    dm.out_a = dx.out = view(dout, T, H, D), dm.lse_a = dx.lse = view(dlse, T, H, 1);
    dm.lse_b = view(dsink, T, H, 1);
    WITH_WORKSPACE(nsa_attend_win_forward_workspace_size(&d),
                   nsa_attend_win_forward(&x, &d, workspace, bytes));
    demand(nsa_merge_forward(&m, &d));
    demand(nsa_merge_backward(&dm, &m, &d));
    WITH_WORKSPACE(nsa_attend_win_backward_workspace_size(&d),
                   nsa_attend_win_backward(&dx, &x, &d, workspace, bytes));
    for (int i = 0; i < T * H; i++) dsinks[i % H] += dsink[i];
    release(out), release(lse), release(dout), release(dlse), release(dsink), release(zeros);
}

int main(void) {
    static const float of_head[H] = {0.5f, -1.0f, 2.0f, 0.0f, 4.0f, -3.0f};
    float *sinks = floats(H), dsinks[H] = {0};
    double wanted_sinks[H], wanted_dsinks[H] = {0};
    problem p = problem_new(T, H, HK, D);
    result r = result_new(&p);
    printf("attention sinks\n");
    for (int h = 0; h < H; h++) sinks[h] = of_head[h];
    with_nsa(&p, sinks, dsinks);
    for (int h = 0; h < H; h++) wanted_sinks[h] = (double)sinks[h];
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++)
            for (int s = 0; s < T; s++) p.mask[(t * H + h) * T + s] = s <= t && s > t - WINDOW;
    attend_naively(&p, wanted_sinks, wanted_dsinks, &r);
    compare_all(&p, &r);
    compare("dsinks", dsinks, wanted_dsinks, H);
    release(sinks);
    return finish(&p, &r);
}
