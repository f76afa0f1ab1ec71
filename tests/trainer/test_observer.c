/* test_observer.c - statistics of gates and block lists: the definitions on rows made by hand,
   and those of a pass against a count over what the pass left in memory, with and without
   gradient checkpointing and documents; that looking changes no bit of a gradient. Twins:
   stats.c, observer.c. */
#include "model/observer.h"
#include "model_test.h"

enum { VOCAB = 64, BATCH = 3, TOKENS = 48, LAYERS = 3, GROUPS = 2, N_SEL = 3, L_SEL = 8 };

static int32_t tokens[BATCH * TOKENS], labels[BATCH * TOKENS];

static void near(const char *what, double got, double want, double allowed) {
    CHECK(fabs(got - want) <= allowed, "%s: %.9g, must be %.9g", what, got, want);
}

/* ---- Rows made by hand ---- */

static void test_gates(void) {
    static const float even[] = {0, 0, 0}, one[] = {30, -30, -30}, far[] = {-90, -90, -90};
    static const float some[] = {0, 0, 0, 30, -30, -30};
    stats_sum sum = {0};
    stats s;
    check_case("gates by hand");
    CHECK(!stats_finish(&sum, &s), "no rows are no statistics");
    sum.k_rows = 1; /* lists are not what is asked here */
    stats_add_gates(&sum, even, 1, NSA_GATE_SIGMOID);
    CHECK(stats_finish(&sum, &s), "a row");
    near("entropy of equal gates", s.entropy_mean, log(3), 1e-6);
    near("their largest share", s.max_gate, 1.0 / 3, 1e-6);
    CHECK(s.collapse_frac == 0 && s.gate_rows == 1, "not collapsed");
    stats_add_gates(&sum, one, 1, NSA_GATE_SOFTMAX);
    stats_finish(&sum, &s);
    near("half of the rows collapsed", s.collapse_frac, 0.5, 0);
    near("their entropy", s.entropy_mean, log(3) / 2, 1e-6);
    near("share of cmp", s.shares[0], (1.0 / 3 + 1) / 2, 1e-6);
    stats_sum again = {.k_rows = 1};
    stats_add_gates(&again, some, 2, NSA_GATE_SIGMOID);
    stats_add_gates(&again, far, 1, NSA_GATE_SIGMOID);
    stats_finish(&again, &s);
    near("one of three collapsed", s.collapse_frac, 1.0 / 3, 1e-9);
    CHECK(isfinite(s.entropy_mean), "gates that are nearly nothing");
}

/* A layer is judged by itself: one that has collapsed and one that is shut among sound ones. */
static void test_layers(void) {
    static const float gates[][3] = {{0, 0, 0}, {-30, -30, -30}, {9, -9, -9}, {0, 1, 0}};
    stats_layer means = {0};
    stats_sum sum = {0};
    stats s;
    check_case("layers by hand");
    for (int layer = 0; layer < 4; layer++) {
        stats_sum one = {.k_rows = 1, .k = 3, .k_max = 3 + layer % 2, .at_max = 1};
        stats_add_gates(&one, gates[layer], 1, NSA_GATE_SIGMOID);
        stats_add_layer(&sum, &one, layer);
        stats_of_layer(&one, &means);
        near("a layer's entropy", (double)means.entropy, one.entropy, 1e-6);
        near("its sum of gates", (double)means.gate_sum, one.gates, 1e-6);
        near("its share of cmp", (double)means.shares[0], one.shares[0], 1e-6);
    }
    CHECK(stats_finish(&sum, &s), "four layers");
    CHECK(s.layers_shut == 1 && s.first_shut == 1, "%d layers are shut, the first: %d",
          (int)s.layers_shut, (int)s.first_shut);
    CHECK(s.layers_collapsed == 1 && s.first_collapsed == 2, "%d layers collapsed, the first: %d",
          (int)s.layers_collapsed, (int)s.first_collapsed);
    near("sum of the gates", s.gate_sum, (1.5 + 0 + 1 + 1 + 1 / (1 + exp(-1))) / 4, 1e-3);
    CHECK(s.k_max == 4 && s.k_rows == 4, "largest k %d", (int)s.k_max);
    near("half of them at the largest", s.pct_at_max, 0.5, 0);
}

static void test_lists(void) {
    static const int32_t lists[] = {0, -1, -1, 0, 1, -1, 0, 1, 2};
    stats_sum sum = {.gate_rows = 1};
    stats s;
    check_case("lists by hand");
    stats_add_blocks(&sum, lists, 4, 1, 1, 3, 8);      /* tokens 0 .. 4 of block 0 */
    stats_add_blocks(&sum, lists + 3, 15, 1, 1, 3, 8); /* blocks 0 and 1, whole */
    stats_add_blocks(&sum, lists + 6, 16, 1, 1, 3, 8); /* and one token of block 2 */
    CHECK(stats_finish(&sum, &s), "rows");
    near("mean", s.k_mean, (5 + 16 + 17) / 3.0, 1e-12);
    CHECK(s.k_max == 17 && s.k_rows == 3, "largest %d of %d rows", (int)s.k_max, (int)s.k_rows);
    near("share at the largest", s.pct_at_max, 1.0 / 3, 1e-12);
    stats_add_blocks(&sum, lists + 6, 16, 1, 1, 3, 8);
    stats_finish(&sum, &s);
    near("and of two", s.pct_at_max, 0.5, 1e-12);
}

/* ---- Rows of a pass ---- */

/* The same numbers from all layers' memory, which a model without checkpointing keeps. */
static stats count(const model *m) {
    stats s = {0};
    int at_max = 0, k_max = 0;
    double collapsed = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int layer = 0; layer < LAYERS; layer++)
            for (int r = 0; r < m->rows * GROUPS; r++) {
                const real *logits = (const real *)m->acts[layer].gates + 3 * r;
                const int32_t *list = m->acts[layer].blocks + N_SEL * r;
                int token = r / GROUPS, begin = token / TOKENS * TOKENS, k = 0;
                for (int i = 0; i < m->documents; i++)
                    if (m->begins[i] <= token) begin = m->begins[i];
                for (int t = begin; t <= token; t++)
                    for (int i = 0; i < N_SEL; i++) k += list[i] == (t - begin) / L_SEL;
                if (pass) {
                    at_max += k == k_max;
                    continue;
                }
                double g[3], all = 0, entropy = 0, largest = 0;
                for (int b = 0; b < 3; b++) all += g[b] = 1 / (1 + exp(-(double)logits[b]));
                for (int b = 0; b < 3; b++) {
                    double p = g[b] / all;
                    entropy -= p * log(p);
                    largest = fmax(largest, p);
                    s.shares[b] += p;
                }
                s.entropy_mean += entropy;
                s.max_gate += largest;
                collapsed += entropy < 0.1 && largest > 0.95;
                s.gate_rows++;
                s.k_mean += k;
                if (k > k_max) k_max = k;
            }
    double rows = (double)s.gate_rows;
    s.entropy_mean /= rows;
    s.max_gate /= rows;
    s.collapse_frac = collapsed / rows;
    for (int b = 0; b < 3; b++) s.shares[b] /= rows;
    s.k_mean /= rows;
    s.k_rows = s.gate_rows;
    s.k_max = k_max;
    s.pct_at_max = at_max / rows;
    return s;
}

static void same(const stats *got, const stats *want) {
    near("entropy", got->entropy_mean, want->entropy_mean, 1e-5);
    near("largest share", got->max_gate, want->max_gate, 1e-6);
    near("collapsed", got->collapse_frac, want->collapse_frac, 1e-9);
    for (int b = 0; b < 3; b++) near("share", got->shares[b], want->shares[b], 1e-6);
    near("mean of k", got->k_mean, want->k_mean, 1e-9);
    near("share at the largest", got->pct_at_max, want->pct_at_max, 1e-12);
    CHECK(got->k_max == want->k_max && got->k_rows == want->k_rows &&
              got->gate_rows == want->gate_rows,
          "largest k %d of %d rows, must be %d of %d", (int)got->k_max, (int)got->k_rows,
          (int)want->k_max, (int)want->k_rows);
}

static void silent(void *user, const char *line) {
    (void)line;
    ++*(int *)user;
}

/* One observed pass; the model stays open for whoever counts in it. */
static stats observe(model *m, observer *x, const ops *o, checkpointing how, const model_batch *b) {
    model_config c = tinylm(VOCAB, 32, LAYERS, 4, GROUPS, 8, 8, 8, 4, L_SEL, N_SEL, 16);
    stats s = {0};
    observer_wrap(x, o, m);
    if (!open_model(m, &c, BATCH, TOKENS, how, &x->table)) return s;
    enlarge(m, 40);
    x->statistics = true;
    observer_begin(x);
    train_once(m, b);
    observer_end(x);
    step_state state = model_state(m);
    CHECK(stats_finish(&state.seen, &s), "nothing was seen");
    return s;
}

static void test_pass(const char *name, const ops *o, const model_batch *b) {
    model plain, kept, lean;
    observer x, y;
    int lines = 0;
    model_config c = tinylm(VOCAB, 32, LAYERS, 4, GROUPS, 8, 8, 8, 4, L_SEL, N_SEL, 16);
    check_case("%s", name);
    if (!open_model(&plain, &c, BATCH, TOKENS, false, o)) return;
    enlarge(&plain, 40);
    train_once(&plain, b);
    stats s = observe(&kept, &x, o, false, b), want = count(&kept);
    same(&s, &want);
    CHECK(s.entropy_mean < 1.09 && s.k_rows == BATCH * TOKENS * GROUPS * LAYERS,
          "a dull case: entropy %g", s.entropy_mean);
    stats t = observe(&lean, &y, o, true, b);
    same(&t, &want);
    CHECK_BITS("gradients", kept.params.grad, plain.params.grad,
               (size_t)plain.params.elements * sizeof(real), sizeof(real));
    x.table.mark(&x.table, PHASE_OPT, -1);
    x.trace = (listener){silent, &lines};
    train_once(&kept, b);
    x.table.mark(&x.table, PHASE_OPT, -1);
    CHECK(lines == LAYERS, "%d lines for the backward of %d layers", lines, LAYERS);
    lines = 0;
    CHECK(observer_trace_gradients(&x, 1, 1, &x.trace, &why), "%s", why.text);
    CHECK(lines == kept.params.length, "%d lines for %d gradients", lines, kept.params.length);
    model_close(&plain);
    model_close(&kept);
    model_close(&lean);
}

int main(void) {
    static const int32_t begins[] = {0, 5, 48, 60, 61, 96, 144};
    model_batch b = {.tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};
    ops o = open_ops(1);
    test_gates();
    test_layers();
    test_lists();
    random_tokens(tokens, labels, BATCH, TOKENS, VOCAB, 0);
    test_pass("rows", &o, &b);
    b.begins = begins;
    b.documents = 6;
    b.longest = 48;
    test_pass("documents", &o, &b);
    ops_cpu_close(&o);
    return check_done("test_observer");
}
