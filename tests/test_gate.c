/* test_gate.c - the gate over the three branches.
   Twin: nsa.h's "Gate". */
#include "harness/suite.h"

typedef struct gate_case {
    const char *name, *shape;
    nsa_gate_kind kind;
    int group;     /* one gate for the heads of a group */
    double logits; /* what the logits are multiplied by */
    int apart;     /* three tensors of gates */
} gate_case;

static const gate_case gate_cases[] = {
    {"sigmoid", "small", NSA_GATE_SIGMOID, 0, 1, 0},
    {"sigmoid, a gate a group", "G 6, D 80", NSA_GATE_SIGMOID, 1, 1, 0},
    {"softmax", "G 2, D 24", NSA_GATE_SOFTMAX, 0, 1, 0},
    {"softmax, a gate a group, apart", "small", NSA_GATE_SOFTMAX, 1, 1, 1},
    {"given", "D 192 / 128", NSA_GATE_NONE, 0, 1, 0},
    {"given, a gate a group, apart", "G 12, D 96", NSA_GATE_NONE, 1, 1, 1},
    {"sigmoid, large logits", "small", NSA_GATE_SIGMOID, 0, 300, 0},
    {"softmax, large logits", "small", NSA_GATE_SOFTMAX, 0, 300, 0},
    {"varlen, sigmoid, apart", "varlen empty", NSA_GATE_SIGMOID, 0, 1, 1},
    {"varlen, softmax, a gate a group", "varlen four", NSA_GATE_SOFTMAX, 1, 1, 0},
    {"D 1 / 3, softmax, apart", "D 1 / 3", NSA_GATE_SOFTMAX, 1, 1, 1},
    {"sigmoid, Dv 511", "D 575 / 511", NSA_GATE_SIGMOID, 1, 1, 0},
};

enum { SLOT_LOGITS, SLOT_CMP, SLOT_SLC, SLOT_WIN, SLOT_OUT };

static nsa_status gate_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    (void)work, (void)bytes;
    return nsa_gate_forward((const nsa_gate *)x, d);
}

static nsa_status gate_backward(const void *dx, const void *x, const nsa_desc *d, void *work,
                                size_t bytes) {
    (void)work, (void)bytes;
    return nsa_gate_backward((const nsa_gate *)dx, (const nsa_gate *)x, d);
}

static void gate_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec, double **x,
                           double **dx) {
    static const ref_gate_kind kinds[] = {REF_SIGMOID, REF_SOFTMAX, REF_GIVEN};
    ref_gate g = {
        prec,          kinds[d->gate], tokens,         d->heads,
        d->gate_heads, d->dim_v,       x[SLOT_LOGITS], {x[SLOT_CMP], x[SLOT_SLC], x[SLOT_WIN]},
        x[SLOT_OUT]};
    ref_gate_grad dg = {dx[SLOT_OUT], dx[SLOT_LOGITS], {dx[SLOT_CMP], dx[SLOT_SLC], dx[SLOT_WIN]}};
    (void)s;
    ref_gate_forward(&g);
    ref_gate_backward(&g, &dg);
}

static void scale_logits(const suite *s, const nsa_desc *d, double **x) {
    const gate_case *c = (const gate_case *)s->options;
    plan p = plan_of(d);
    for (int i = 0; c->logits != 1 && i < p.rows * d->gate_heads * 3; i++)
        x[SLOT_LOGITS][i] = ref_store(REF_BF16, x[SLOT_LOGITS][i] * c->logits);
}

static nsa_desc gate_desc(const gate_case *c) {
    nsa_desc d = desc_of(shape(c->shape));
    d.gate = c->kind;
    d.gate_heads = c->group ? d.kv_heads : d.heads;
    if (c->apart) d.gate_stride = apart_of(&d, d.gate_heads);
    return d;
}

static suite suite_of(const gate_case *c) {
    nsa_desc d = gate_desc(c);
    suite s;
    memset(&s, 0, sizeof s);
    s.name = c->name, s.struct_size = sizeof(nsa_gate), s.options = c;
    s.forward = gate_forward, s.backward = gate_backward, s.reference = gate_reference;
    s.prepare = scale_logits;
    slot *logits = suite_add(&s, "logits", offsetof(nsa_gate, logits), ROWS_QUERY, d.gate_heads, 3);
    logits->gradient = 1, logits->apart = c->apart;
    suite_add(&s, "cmp", offsetof(nsa_gate, cmp), ROWS_QUERY, d.heads, d.dim_v)->gradient = 1;
    suite_add(&s, "slc", offsetof(nsa_gate, slc), ROWS_QUERY, d.heads, d.dim_v)->gradient = 1;
    suite_add(&s, "win", offsetof(nsa_gate, win), ROWS_QUERY, d.heads, d.dim_v)->gradient = 1;
    slot *out = suite_add(&s, "out", offsetof(nsa_gate, out), ROWS_QUERY, d.heads, d.dim_v);
    out->output = out->gradient = 1;
    return s;
}

int main(int argc, char **argv) {
    int step = asked_step(argc, argv, CHECKS_CUDA ? 1 : 3, 5);
    for (int i = 0; i < COUNT(gate_cases); i += step) {
        nsa_desc d = gate_desc(&gate_cases[i]);
        suite s = suite_of(&gate_cases[i]);
        for (int k = 0; k < COUNT(dtypes) && !suite_refused(&s, &d, NULL); k++) {
            suite_reference(&s, &d, dtypes[k], (uint64_t)(10 * i + k));
            if ((i / step + k) % COUNT(dtypes)) continue; /* these in one dtype a case */
            suite_bit_tests(&s, &d, dtypes[k]);
            suite_nan(&s, &d, dtypes[k]);
        }
    }
#ifdef CHECK_F64
    for (int i = 0; i < COUNT(tiny_geometries); i++)
        for (int kind = 0; kind < 3; kind++)
            for (int group = 0; group < 2; group++) {
                const char *name = tiny_geometries[i].name;
                gate_case c = {name, name, (nsa_gate_kind)kind, group, 1, kind == group};
                nsa_desc d = gate_desc(&c);
                suite s = suite_of(&c);
                suite_gradcheck(&s, &d);
            }
#endif
    nsa_desc d = gate_desc(&gate_cases[0]);
    suite s = suite_of(&gate_cases[0]);
    s.unused = UNUSED_CMP | UNUSED_SLC | UNUSED_FORCED;
    suite_refusals(&s, &d);
    suite_refuse_gates(&s, &d, "dx.logits");
    return check_done("test_gate");
}
