/* csa.c - DeepSeek-V4's two attentions over compressed entries, each made of some tokens and read
   as key and value at once. CSA: an indexer chooses among the entries of 4 tokens; HCA: all entries
   of many tokens are read. One softmax runs over a window of tokens, those entries that lie wholly
   at or before the query, and a learned logit.
   Twin: none; its definition, computed naively, stands in family.h. Not here: how an entry is made
   (tokens, weighed by a softmax over them): to attention it is an input. */
#include "family.h"

enum { T = 150, H = 4, D = 32, WINDOW = 24, COUNT = 6 };
enum { INDEX_HEADS = 4, INDEX_DIM = 16, ROWS = 2 * T }; /* of keys: tokens, then entries */

/* A part of the softmax: its out and lse, and their gradients. */
typedef struct part {
    nsa_tensor out, lse, dout, dlse;
} part;

static part part_new(void) {
    part a = {view(floats((size_t)T * H * D), T, H, D), view(floats((size_t)T * H), T, H, 1),
              view(floats((size_t)T * H * D), T, H, D), view(floats((size_t)T * H), T, H, 1)};
    return a;
}

static void part_free(part *a) {
    release(a->out.data), release(a->lse.data), release(a->dout.data), release(a->dlse.data);
}

/* A learned logit a head: a part without a value, the same for all queries. */
static part part_of_logits(const float *logits, const float *zeros) {
    part a = part_new();
    release(a.out.data), release(a.lse.data);
    a.out = view(zeros, 1, 1, D), a.lse = view(logits, 1, H, 1);
    a.out.token = a.out.head = a.lse.token = 0;
    return a;
}

/* Attention with keys that are values, from row `first` on; it writes to the part `a`. */
static nsa_attend attend_of(const problem *p, int first, const part *a) {
    nsa_attend x = {0};
    x.q = view(p->q, T, H, D);
    x.k = x.v = view(p->k + first * D, T, 1, D);
    x.out = a->out, x.lse = a->lse;
    return x;
}

static nsa_attend gradient_of(const problem *p, int first, const part *a) {
    nsa_attend dx = {0};
    dx.q = view(p->dq, T, H, D);
    dx.k = dx.v = view(p->dk + first * D, T, 1, D);
    dx.out = a->dout, dx.lse = a->dlse;
    return dx;
}

static nsa_merge merge_of(const part *both, const part *a, const part *b) {
    nsa_merge m = {a->out, b->out, a->lse, b->lse, both->out, both->lse};
    return m;
}

static nsa_merge merge_gradient(const part *both, const part *a, const part *b) {
    nsa_merge m = {a->dout, b->dout, a->dlse, b->dlse, both->dout, both->dlse};
    return m;
}

/* The lists of CSA: the best entries of those that are whole; no tail, for the window has it. */
static void choose(int tokens, const float *q, const float *keys, const float *weights,
                   int32_t *lists) {
    nsa_desc d = nsa_desc_default(1, T, INDEX_HEADS, 1, INDEX_DIM);
    d.slc_block = tokens, d.slc_count = COUNT;
    d.forced = NSA_FORCED_TAIL, d.slc_init = d.slc_local = 0;
    nsa_score score = {NSA_SCORE_RELU, NSA_POOL_MAX, {0}, {0}, {0}, {0}, {0}, tokens};
    score.q = view(q, T, INDEX_HEADS, INDEX_DIM), score.k = view(keys, T / tokens, 1, INDEX_DIM);
    score.weights = view(weights, T, INDEX_HEADS, 1);
    score.blocks = nsa_tensor_bthd(lists, NSA_I32, T, 1, COUNT);
    WITH_WORKSPACE(nsa_score_blocks_workspace_size(&d),
                   nsa_score_blocks(&score, &d, workspace, bytes));
}

/* Window and entries, merged, then the logit; and back. `lists`: of CSA; NULL: HCA. */
static void with_nsa(problem *p, int tokens, const int32_t *lists, const float *logits,
                     float *dlogits) {
    nsa_desc d = nsa_desc_default(1, T, H, 1, D), of_entries = d;
    d.window = WINDOW;
    of_entries.cmp_block = of_entries.cmp_stride = tokens;
    of_entries.slc_block = lists ? 1 : tokens, of_entries.slc_count = COUNT;
    float *zeros = floats(D);
    part window = part_new(), entries = part_new(), keys = part_new();
    part logit = part_of_logits(logits, zeros), all = keys;
    all.out = view(p->out, T, H, D), all.lse = view(p->lse, T, H, 1);
    all.dout = view(p->dout, T, H, D), all.dlse.data = NULL;
    nsa_attend x = attend_of(p, 0, &window), dx = gradient_of(p, 0, &window);
    nsa_attend y = attend_of(p, T, &entries), dy = gradient_of(p, T, &entries);
    nsa_merge inner = merge_of(&keys, &window, &entries), outer = merge_of(&all, &keys, &logit);
    nsa_merge dinner = merge_gradient(&keys, &window, &entries);
    nsa_merge douter = merge_gradient(&all, &keys, &logit);
    douter.out_b.data = NULL; /* a row of zeros takes no gradient */
    if (lists) y.blocks = nsa_tensor_bthd((void *)(uintptr_t)lists, NSA_I32, T, 1, COUNT);

    WITH_WORKSPACE(nsa_attend_win_forward_workspace_size(&d),
                   nsa_attend_win_forward(&x, &d, workspace, bytes));
    if (lists)
        WITH_WORKSPACE(nsa_attend_slc_forward_workspace_size(&of_entries),
                       nsa_attend_slc_forward(&y, &of_entries, workspace, bytes));
    else
        WITH_WORKSPACE(nsa_attend_cmp_forward_workspace_size(&of_entries),
                       nsa_attend_cmp_forward(&y, &of_entries, workspace, bytes));
    demand(nsa_merge_forward(&inner, &d)), demand(nsa_merge_forward(&outer, &d));
    demand(nsa_merge_backward(&douter, &outer, &d)),
        demand(nsa_merge_backward(&dinner, &inner, &d));
    WITH_WORKSPACE(nsa_attend_win_backward_workspace_size(&d),
                   nsa_attend_win_backward(&dx, &x, &d, workspace, bytes));
    if (lists)
        WITH_WORKSPACE(nsa_attend_slc_backward_workspace_size(&of_entries),
                       nsa_attend_slc_backward(&dy, &y, &of_entries, workspace, bytes));
    else
        WITH_WORKSPACE(nsa_attend_cmp_backward_workspace_size(&of_entries),
                       nsa_attend_cmp_backward(&dy, &y, &of_entries, workspace, bytes));
    for (int i = 0; i < T * H; i++) dlogits[i % H] += ((float *)logit.dlse.data)[i];
    part_free(&window), part_free(&entries), part_free(&keys);
    release(logit.dout.data), release(logit.dlse.data), release(zeros);
}

/* ---- The definition ---- */

/* Whether a list has the best whole entries by sum_h w_h ReLU(q_h . k), and no other. */
static int is_list_of(int tokens, int t, const float *q, const float *keys, const float *weights,
                      const int32_t *list) {
    double scores[T] = {0};
    int whole = (t + 1) / tokens, held = 0;
    for (int i = 0; i < whole; i++)
        for (int h = 0; h < INDEX_HEADS; h++) {
            double product =
                dot(q + (t * INDEX_HEADS + h) * INDEX_DIM, keys + i * INDEX_DIM, INDEX_DIM);
            scores[i] += product > 0 ? (double)weights[t * INDEX_HEADS + h] * product : 0;
        }
    while (held < COUNT && list[held] >= 0) held++;
    return held == (whole < COUNT ? whole : COUNT) && is_best(list, held, scores, whole);
}

/* What query t reads: a window of tokens, and of the entries those of its list, or all. */
static void mask_of(problem *p, int tokens, const int32_t *lists) {
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            unsigned char *mask = p->mask + (t * H + h) * ROWS;
            for (int s = 0; s <= t; s++) mask[s] = s > t - WINDOW;
            for (int i = 0; i < (t + 1) / tokens; i++) mask[T + i] = !lists;
            for (int i = 0; lists && i < COUNT && lists[t * COUNT + i] >= 0; i++)
                mask[T + lists[t * COUNT + i]] = 1;
        }
}

static void run(const char *name, int tokens, int chooses) {
    static const float of_head[H] = {0.5f, -1.0f, 2.0f, -3.0f};
    float *logits = floats(H), dlogits[H] = {0};
    double wanted_logits[H], wanted_dlogits[H] = {0};
    problem p = problem_new(ROWS, H, 1, D);
    result r = result_new(&p);
    float *q = random_floats(11, (size_t)T * INDEX_HEADS * INDEX_DIM);
    float *keys = random_floats(12, (size_t)T * INDEX_DIM);
    float *weights = random_floats(13, (size_t)T * INDEX_HEADS);
    int32_t *lists = (int32_t *)allocate(sizeof *lists * T * COUNT);
    int best = 1;
    printf("%s\n", name);
    for (int h = 0; h < H; h++) logits[h] = of_head[h], wanted_logits[h] = (double)of_head[h];
    for (int i = 0; i < ROWS * D; i++) p.v[i] = p.k[i];
    for (int i = T * H * D; i < ROWS * H * D; i++) p.dout[i] = 0; /* entries ask nothing */
    if (chooses) {
        choose(tokens, q, keys, weights, lists);
        for (int t = 0; t < T; t++)
            best &= is_list_of(tokens, t, q, keys, weights, lists + t * COUNT);
        check(best, "every list holds the best whole entries");
    }
    with_nsa(&p, tokens, chooses ? lists : NULL, logits, dlogits);
    mask_of(&p, tokens, chooses ? lists : NULL);
    attend_naively(&p, wanted_logits, wanted_dlogits, &r);
    for (int i = 0; i < ROWS * D; i++) r.dk[i] += r.dv[i]; /* one array is both */
    compare("out", p.out, r.out, (size_t)T * H * D), compare("lse", p.lse, r.lse, (size_t)T * H);
    compare("dq", p.dq, r.dq, (size_t)T * H * D), compare("dkv", p.dk, r.dk, (size_t)ROWS * D);
    compare("dlogits", dlogits, wanted_dlogits, H);
    release(logits), release(q), release(keys), release(weights), release(lists);
    finish(&p, &r);
}

int main(void) {
    run("CSA", 4, 1);
    run("HCA", 32, 0);
    return failures;
}
