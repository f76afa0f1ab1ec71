/* test_model_gradients.c - in f64, the gradient of every element of every parameter of a 2-layer
   TinyLM against finite differences of its loss. Twin: model.c.

   A selected block that flips between two points is a jump of the loss, not a derivative, so the
   block lists of the unperturbed point are kept. The seam for it is the table of operations: here
   attention_forward is the chain of nsa.h's primitives without nsa_select_blocks, which leaves the
   lists in the layer's buffer as the last whole pass wrote them. Backward is nsa.h's own. */
#include "model_test.h"

enum { BATCH = 2, TOKENS = 24, ROWS = BATCH * TOKENS, VOCAB = 11 };

typedef struct variant {
    const char *name;
    model_config config;
    bool documents;
    int64_t most; /* elements of a tensor that are checked, or a little fewer; 0: every one */
} variant;

static void attend_with_lists_kept(const ops *o, const nsa_attention *x, const nsa_desc *d,
                                   void *workspace, size_t bytes) {
    nsa_attend cmp = {x->q, x->k_cmp.out, x->v_cmp.out, x->out_cmp, x->lse_cmp, {0}};
    nsa_attend slc = {x->q, x->k_slc, x->v_slc, x->out_slc, x->lse_slc, x->blocks};
    nsa_attend win = {x->q, x->k_win, x->v_win, x->out_win, x->lse_win, {0}};
    nsa_gate gate = {x->gates, x->out_cmp, x->out_slc, x->out_win, x->out};
    nsa_status s[] = {nsa_compress_forward(&x->k_cmp, d, workspace, bytes),
                      nsa_compress_forward(&x->v_cmp, d, workspace, bytes),
                      nsa_attend_cmp_forward(&cmp, d, workspace, bytes),
                      nsa_attend_slc_forward(&slc, d, workspace, bytes),
                      nsa_attend_win_forward(&win, d, workspace, bytes),
                      nsa_gate_forward(&gate, d)};
    (void)o;
    for (size_t i = 0; i < sizeof s / sizeof *s; i++)
        CHECK(s[i] == NSA_OK, "primitive %zu: %s", i, nsa_status_name(s[i]));
}

/* (loss(x + step) - loss(x - step)) / (2 step) */
static double slope(model *m, const model_batch *b, real *x, double step) {
    real kept = *x;
    *x = kept + step;
    double above = evaluate_once(m, b);
    *x = kept - step;
    double below = evaluate_once(m, b);
    *x = kept;
    return (above - below) / (2 * step);
}

/* The derivative by one element: of second order in the step where that already agrees with
   `gradient` to 3e-7 of itself, and as closely as is asked; else of fourth, which takes twice the
   passes. */
static double numeric(model *m, const model_batch *b, real *x, double gradient) {
    /* truncation ~ h^4, rounding ~ 1e-14 / h: both far below 1e-7 */
    const double near = 2e-5, h = 3e-4;
    double second = slope(m, b, x, near);
    bool close = fabs(gradient - second) <= 3e-7 * fabs(second);
    if (close && gradient_error(gradient, second) <= 1e-7) return second;
    return (4 * slope(m, b, x, h) - slope(m, b, x, 2 * h)) / 3;
}

/* Every element within 1e-7 as gradient_error counts, and the tensor as a whole within 1e-6 of its
   own size, so that small gradients are checked too. */
static void check_tensor(model *m, const model_batch *b, const param *p, int64_t most) {
    double worst = 0, difference = 0, size = 0;
    int64_t at = 0, stride = most && p->count > most ? p->count / most : 1;
    while (stride % 2 == 0 || stride % 3 == 0) stride++; /* rows have 4, 6 or 8: not one column */
    for (int64_t e = 0; e < p->count; e += stride) {
        double a = m->params.grad[p->offset + e];
        double n = numeric(m, b, m->params.value + p->offset + e, a), error = gradient_error(a, n);
        if (!(error <= worst)) worst = error, at = e;
        difference += (a - n) * (a - n);
        size += n * n;
    }
    CHECK(worst <= 1e-7, "%s[%lld]: error %.3g > 1e-7", p->name, (long long)at, worst);
    CHECK(size > 0, "%s: the gradient is zero", p->name);
    CHECK(difference <= 1e-12 * size, "%s: gradient off by %.3g of its size", p->name,
          sqrt(difference / size));
}

static void check_variant(const variant *v, const ops *whole) {
    ops kept = *whole;
    model m;
    int32_t tokens[ROWS], labels[ROWS], begins[] = {0, 3, 15, TOKENS, TOKENS + 5, ROWS};
    model_batch b = {.tokens = tokens, .labels = labels, .batch = BATCH, .tokens_each = TOKENS};
    check_case("%s", v->name);
    if (v->documents) b.begins = begins, b.documents = 5, b.longest = 19;
    if (!open_model(&m, &v->config, BATCH, TOKENS, false, whole)) return;
    random_tokens(tokens, labels, BATCH, TOKENS, VOCAB, 0);
    labels[5] = -1;
    enlarge(&m, 4);
    double loss = train_once(&m, &b);
    kept.attention_forward = attend_with_lists_kept;
    m.o = &kept;
    CHECK(loss == evaluate_once(&m, &b), "the seam changes the loss of the unperturbed point");
    for (int i = 0; i < m.params.length; i++) check_tensor(&m, &b, &m.params.list[i], v->most);
    model_close(&m);
}

int main(int argc, char **argv) {
    bool quick = argc == 2 && !strcmp(argv[1], "quick"); /* few elements of each tensor */
    ops o = open_ops(1);
    model_config base = tinylm(VOCAB, 8, 2, 4, 2, 4, 6, 4, 2, 4, 4, 5);
    variant variants[16];
    int count = 0;
    enum { SOME = 40, FEW = 12 };
    variants[count++] = (variant){"phi mean, sigmoid", base, false, SOME};
    variants[count] = (variant){"phi conv, softmax, tied", base, false, SOME};
    variants[count].config.phi = NSA_PHI_CONV;
    variants[count].config.gate = NSA_GATE_SOFTMAX;
    variants[count++].config.tied = true;
    /* every element, of the model that has every kind of tensor */
    variants[count] = (variant){"phi mlp, halves", base, false, 0};
    variants[count].config.phi = NSA_PHI_MLP;
    variants[count++].config.rope_pairs = NSA_ROPE_HALVES;
    variants[count] = (variant){"full", base, false, SOME};
    model_attend_with(&variants[count++].config, ATTENTION_FULL);
    variants[count] = (variant){"window", base, false, SOME};
    model_attend_with(&variants[count++].config, ATTENTION_WINDOW);
    variants[count] = (variant){"cmp+slc, softmax, norm of q and k", base, false, SOME};
    variants[count].config.gate = NSA_GATE_SOFTMAX;
    variants[count].config.qk_norm = true;
    model_attend_with(&variants[count++].config, ATTENTION_CMP_SLC);
    /* one layer that compresses and one that does not, one with three pairs and one with two */
    variants[count] = (variant){"cmp+slc and window, documents", base, true, SOME};
    variants[count].config.attention[0] = ATTENTION_CMP_SLC;
    variants[count++].config.attention[1] = ATTENTION_WINDOW;
    variants[count] = (variant){"full and nsa, norm of q and k", base, false, SOME};
    variants[count].config.qk_norm = true;
    variants[count++].config.attention[0] = ATTENTION_FULL;
    variants[count++] = (variant){"documents", base, true, SOME};
    variants[count] = (variant){"full, documents", base, true, SOME};
    model_attend_with(&variants[count++].config, ATTENTION_FULL);
    /* as public models of Llama's shape have it */
    variants[count] = (variant){"swiglu, shared k and v, linear gate", base, false, SOME};
    variants[count].config.swiglu = variants[count].config.shared_kv = true;
    variants[count].config.gate_linear = true;
    variants[count].config.hidden = 10;
    variants[count].config.slc_init = 0;
    variants[count].config.slc_local = 1;
    variants[count++].config.norm_eps = 1e-2;
    variants[count] = (variant){"nsa, linear gate, and full; swiglu", base, false, SOME};
    variants[count].config.attention[1] = ATTENTION_FULL;
    variants[count].config.swiglu = variants[count].config.gate_linear = true;
    variants[count++].config.gate = NSA_GATE_SOFTMAX;
    variants[count] = (variant){"cmp+slc, shared k and v, documents", base, true, SOME};
    model_attend_with(&variants[count].config, ATTENTION_CMP_SLC);
    variants[count++].config.shared_kv = true;
    for (int i = 0; i < count; i++) {
        if (quick) variants[i].most = FEW;
        check_variant(&variants[i], &o);
    }
    ops_cpu_close(&o);
    return check_done("test_model_gradients");
}
