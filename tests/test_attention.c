/* test_attention.c - the whole: compress, cmp, select, slc, win, gate, forward and backward.
   Twin: nsa.h's "The whole". */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS, MAP_NORESERVE */
#include "harness/compress_slots.h"

#if defined(__unix__) && !defined(CHECK_CUDA)
#include <sys/mman.h>
#endif

typedef struct chain_case {
    const char *name, *shape;
    nsa_phi k_phi, v_phi;
    int shared, bare; /* of the parameters of phi */
    nsa_gate_kind gate;
    int group;         /* one gate for the heads of a group */
    int lists_by_head; /* every query head chooses blocks for itself */
    int apart;         /* three tensors of gates */
} chain_case;

/* clang-format off: a table is read in columns. */
static const chain_case chain_cases[] = {
    {"mean", "small", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0},
    {"conv", "small", NSA_PHI_CONV, NSA_PHI_CONV, 0, 0, NSA_GATE_SOFTMAX, 1, 0, 0},
    {"mlp", "small", NSA_PHI_MLP, NSA_PHI_MLP, 0, 0, NSA_GATE_SIGMOID, 1, 0, 0},
    {"mlp k, mean v, shared", "G 2, D 24", NSA_PHI_MLP, NSA_PHI_MEAN, 1, 0, NSA_GATE_NONE, 0, 0, 0},
    {"conv k, mlp v, bare", "D 7 / 13", NSA_PHI_CONV, NSA_PHI_MLP, 0, 1, NSA_GATE_SOFTMAX, 0, 0, 1},
    {"G 1, D 16", "G 1, D 16", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0},
    {"G 3, D 64", "G 3, D 64", NSA_PHI_MEAN, NSA_PHI_CONV, 0, 0, NSA_GATE_SIGMOID, 1, 0, 0},
    {"G 6, D 80", "G 6, D 80", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SOFTMAX, 1, 0, 0},
    {"G 12, D 96", "G 12, D 96", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0},
    {"G 16, D 128", "G 16, D 128", NSA_PHI_CONV, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 1, 0, 1},
    {"D 192 / 128", "D 192 / 128", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0},
#ifndef CHECK_CUDA
    {"kv heads one by one", "Hk 2, D 136", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0,
     0},
#endif
    {"scale 1", "scale 1, heads 16", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 1, 0, 0},
    {"T 1", "T 1", NSA_PHI_MLP, NSA_PHI_CONV, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0},
    {"T < l", "T < l", NSA_PHI_CONV, NSA_PHI_MLP, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0},
    {"T = l", "T = l", NSA_PHI_MLP, NSA_PHI_MLP, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0},
    {"T > w", "T > w, one block more", NSA_PHI_MEAN, NSA_PHI_CONV, 0, 0, NSA_GATE_SIGMOID, 1, 0, 0},
    {"no multiple", "T no multiple of anything", NSA_PHI_MEAN, NSA_PHI_CONV, 0, 0, NSA_GATE_SIGMOID,
     0, 0, 0},
    {"the paper's blocks", "the paper's blocks", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID,
     0, 0, 0},
    {"varlen four", "varlen four", NSA_PHI_MEAN, NSA_PHI_CONV, 0, 0, NSA_GATE_SIGMOID, 1, 0, 1},
    {"varlen empty", "varlen empty", NSA_PHI_MLP, NSA_PHI_CONV, 0, 0, NSA_GATE_SOFTMAX, 0, 0, 1},
    {"varlen behind others", "varlen behind others", NSA_PHI_CONV, NSA_PHI_MLP, 0, 0,
     NSA_GATE_SOFTMAX, 1, 0, 0},
    {"lists by head", "G 3, D 64", NSA_PHI_CONV, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 1, 0},
    {"varlen, lists by head", "varlen four", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SOFTMAX, 1,
     1, 0},
};
/* clang-format on */

enum { HIDDEN = CHECKS_CUDA ? 8 : 6 };

static const char *const k_names[PHI_TENSORS] = {"k_cmp.x",  "k_cmp.out", "k_cmp.pos", "k_cmp.w1",
                                                 "k_cmp.b1", "k_cmp.w2",  "k_cmp.b2"};
static const char *const v_names[PHI_TENSORS] = {"v_cmp.x",  "v_cmp.out", "v_cmp.pos", "v_cmp.w1",
                                                 "v_cmp.b1", "v_cmp.w2",  "v_cmp.b2"};

/* Where each tensor of the chain lies among the suite's slots. */
typedef struct chain_slots {
    int q, k_slc, v_slc, k_win, v_win, gates, blocks, branch[3], lse[3], out;
    compress_slots k_cmp, v_cmp;
} chain_slots;

static nsa_desc chain_desc(const chain_case *c) {
    nsa_desc d = desc_of(shape(c->shape));
    d.gate = c->gate;
    d.gate_heads = c->group ? d.kv_heads : d.heads;
    if (c->lists_by_head) d.list_heads = d.heads;
    if (c->apart) d.gate_stride = apart_of(&d, d.gate_heads);
    return d;
}

static phi_case phi_of(const chain_case *c, int v) {
    const geometry *g = shape(c->shape);
    phi_case p = {
        v ? c->v_phi : c->k_phi, v ? g->Dv : g->Dk, HIDDEN, c->shared, c->bare, g->Hk, g->l};
    return p;
}

#define AT(field) offsetof(nsa_attention, field)

static int add_input(suite *s, const char *name, size_t at, slot_rows rows, int heads, int width) {
    suite_add(s, name, at, rows, heads, width)->gradient = 1;
    return s->count - 1;
}

static int add_output(suite *s, const char *name, size_t at, int heads, int width, int dtype) {
    slot *t = suite_add(s, name, at, ROWS_QUERY, heads, width);
    t->output = 1, t->dtype = dtype;
    return s->count - 1;
}

static chain_slots add_slots(suite *s, const chain_case *c) {
    const geometry *g = shape(c->shape);
    nsa_desc d = chain_desc(c);
    phi_case k = phi_of(c, 0), v = phi_of(c, 1);
    chain_slots at;
    at.q = add_input(s, "q", AT(q), ROWS_QUERY, g->H, g->Dk);
    at.k_cmp = compress_add(s, &k, k_names, AT(k_cmp), 0);
    at.v_cmp = compress_add(s, &v, v_names, AT(v_cmp), 0);
    at.k_slc = add_input(s, "k_slc", AT(k_slc), ROWS_KEY, g->Hk, g->Dk);
    at.v_slc = add_input(s, "v_slc", AT(v_slc), ROWS_KEY, g->Hk, g->Dv);
    at.k_win = add_input(s, "k_win", AT(k_win), ROWS_KEY, g->Hk, g->Dk);
    at.v_win = add_input(s, "v_win", AT(v_win), ROWS_KEY, g->Hk, g->Dv);
    at.gates = add_input(s, "gates", AT(gates), ROWS_QUERY, d.gate_heads, 3);
    s->slots[at.gates].apart = c->apart;
    at.blocks =
        add_output(s, "blocks", AT(blocks), list_heads_of(&d), nsa_block_list_width(&d), NSA_I32);
    at.branch[0] = add_output(s, "out_cmp", AT(out_cmp), g->H, g->Dv, DTYPE_UNDER_TEST);
    at.branch[1] = add_output(s, "out_slc", AT(out_slc), g->H, g->Dv, DTYPE_UNDER_TEST);
    at.branch[2] = add_output(s, "out_win", AT(out_win), g->H, g->Dv, DTYPE_UNDER_TEST);
    at.lse[0] = add_output(s, "lse_cmp", AT(lse_cmp), g->H, 1, NSA_REAL_DTYPE);
    at.lse[1] = add_output(s, "lse_slc", AT(lse_slc), g->H, 1, NSA_REAL_DTYPE);
    at.lse[2] = add_output(s, "lse_win", AT(lse_win), g->H, 1, NSA_REAL_DTYPE);
    at.out = add_output(s, "out", AT(out), g->H, g->Dv, DTYPE_UNDER_TEST);
    s->slots[at.out].gradient = 1;
    /* cmp's scores choose the blocks; a query that reads a NaN value has no scores either. */
    s->slots[at.k_cmp.at[PHI_X]].steers = s->slots[at.v_cmp.at[PHI_X]].steers = 1;
    s->slots[at.q].steers = g->H > list_heads_of(&d); /* the heads of a group share a list */
    return at;
}

static chain_slots slots_of(const chain_case *c) {
    suite unused;
    memset(&unused, 0, sizeof unused);
    return add_slots(&unused, c);
}

static nsa_status chain_forward(const void *x, const nsa_desc *d, void *work, size_t bytes) {
    return nsa_attention_forward((const nsa_attention *)x, d, work, bytes);
}

static nsa_status chain_backward(const void *dx, const void *x, const nsa_desc *d, void *work,
                                 size_t bytes) {
    return nsa_attention_backward((const nsa_attention *)dx, (const nsa_attention *)x, d, work,
                                  bytes);
}

static size_t chain_forward_size(const void *x, const nsa_desc *d) {
    return nsa_attention_forward_workspace_size((const nsa_attention *)x, d);
}

static size_t chain_backward_size(const void *dx, const void *x, const nsa_desc *d) {
    return nsa_attention_backward_workspace_size((const nsa_attention *)dx,
                                                 (const nsa_attention *)x, d);
}

static void chain_configure(const suite *s, void *x) {
    const chain_case *c = (const chain_case *)s->options;
    const geometry *g = shape(c->shape);
    nsa_attention *a = (nsa_attention *)x;
    a->k_cmp.phi = c->k_phi, a->k_cmp.dim = g->Dk, a->k_cmp.hidden = HIDDEN;
    a->v_cmp.phi = c->v_phi, a->v_cmp.dim = g->Dv, a->v_cmp.hidden = HIDDEN;
}

/* The reference goes on with the block lists that it is given. What is no block counts as none. */
static void chain_reference(const suite *s, const nsa_desc *d, int tokens, ref_prec prec,
                            double **x, double **dx) {
    static const ref_gate_kind kinds[] = {REF_SIGMOID, REF_SOFTMAX, REF_GIVEN};
    const chain_case *c = (const chain_case *)s->options;
    chain_slots at = slots_of(c);
    phi_case k = phi_of(c, 0), v = phi_of(c, 1);
    ref_desc r = ref_desc_of(d, tokens);
    size_t lists = (size_t)(tokens * list_heads_of(d) * ref_list_width(&r));
    int32_t *blocks = (int32_t *)check_alloc(lists * sizeof *blocks);
    for (size_t i = 0; i < lists; i++) {
        double j = x[at.blocks][i];
        blocks[i] = j >= 0 && j < ref_slc_count(&r, tokens) ? (int32_t)j : -1;
    }
    /* Backward of the chain makes the gradient of the compressed rows itself: room, not an input.
       */
    double *with_room[SLOTS];
    memcpy(with_room, dx, sizeof with_room);
    compress_reference rk, rv;
    compress_make(&rk, s, &at.k_cmp, &k, d, tokens, prec, x, with_room);
    compress_make(&rv, s, &at.v_cmp, &v, d, tokens, prec, x, with_room);
    ref_attention a = {prec,
                       kinds[d->gate],
                       d->gate_heads,
                       x[at.q],
                       rk.x,
                       rv.x,
                       x[at.k_slc],
                       x[at.v_slc],
                       x[at.k_win],
                       x[at.v_win],
                       x[at.gates],
                       blocks,
                       1,
                       {x[at.branch[0]], x[at.branch[1]], x[at.branch[2]]},
                       {x[at.lse[0]], x[at.lse[1]], x[at.lse[2]]},
                       x[at.out]};
    ref_attention_grad g = {dx[at.out],   dx[at.q],     dx[at.k_slc], dx[at.v_slc], dx[at.k_win],
                            dx[at.v_win], dx[at.gates], rk.dx,        rv.dx};
    ref_attention_forward(&a, &r);
    ref_attention_backward(&a, &r, &g);
    compress_done(&rk, s, &at.k_cmp, dx);
    compress_done(&rv, s, &at.v_cmp, dx);
    free(blocks);
}

/* The chain put together from its primitives, on the block lists that stand in x.blocks already. */
static void composed_forward(instance *p) {
    nsa_attention *a = (nsa_attention *)instance_x(p);
    const nsa_desc *d = &p->d;
    size_t bytes = nsa_attend_cmp_forward_workspace_size(d) +
                   nsa_attend_slc_forward_workspace_size(d) +
                   nsa_attend_win_forward_workspace_size(d) +
                   nsa_compress_forward_workspace_size(&a->k_cmp, d) +
                   nsa_compress_forward_workspace_size(&a->v_cmp, d);
    void *work = workspace_new(bytes, 1)->data;
    nsa_attend cmp = {a->q, a->k_cmp.out, a->v_cmp.out, a->out_cmp, a->lse_cmp, a->blocks};
    nsa_attend slc = {a->q, a->k_slc, a->v_slc, a->out_slc, a->lse_slc, a->blocks};
    nsa_attend win = {a->q, a->k_win, a->v_win, a->out_win, a->lse_win, a->blocks};
    nsa_gate gate = {a->gates, a->out_cmp, a->out_slc, a->out_win, a->out};
    nsa_status s[] = {nsa_compress_forward(&a->k_cmp, d, work, bytes),
                      nsa_compress_forward(&a->v_cmp, d, work, bytes),
                      nsa_attend_cmp_forward(&cmp, d, work, bytes),
                      nsa_attend_slc_forward(&slc, d, work, bytes),
                      nsa_attend_win_forward(&win, d, work, bytes),
                      nsa_gate_forward(&gate, d)};
    for (int i = 0; i < COUNT(s); i++)
        CHECK(s[i] == NSA_OK, "part %d: %s", i, nsa_status_name(s[i]));
    guarded_drop();
}

static suite suite_of(const chain_case *c) {
    suite s;
    memset(&s, 0, sizeof s);
    s.name = c->name, s.struct_size = sizeof(nsa_attention), s.options = c;
    s.forward = chain_forward, s.backward = chain_backward;
    s.forward_size = chain_forward_size, s.backward_size = chain_backward_size;
    s.configure = chain_configure, s.reference = chain_reference;
    s.prepare = compress_weights, s.held_forward = composed_forward;
    add_slots(&s, c);
    return s;
}

/* ---- Questions 1 and 3 ---- */

/* Every parameter and input that the geometry uses gets a gradient that is not 0. */
static void check_gradients_reach(const instance *p) {
    plan rows = plan_of(&p->d);
    for (int i = 0; i < p->s->count; i++) {
        const slot *t = &p->s->slots[i];
        if (t->output || !t->gradient || !rows.rows) continue;
        int of_cmp = !strncmp(t->name, "k_cmp", 5) || !strncmp(t->name, "v_cmp", 5);
        /* Without a compressed row phi is not used; a softmax over one key does not feel its score.
           */
        if (of_cmp && !rows.cmp_rows) continue;
        if ((!strncmp(t->name, "k_", 2) || !strcmp(t->name, "q")) &&
            (p->d.tokens < 2 || rows.cmp_rows < 2))
            continue;
        size_t n = tensor_count(&p->dx[i]);
        double *dx = ref_zeros(n);
        tensor_get(&p->dx[i], dx);
        CHECK(check_norm(dx, n) > 0, "the gradient of %s is 0", t->name);
        free(dx);
    }
}

/* The chain against the reference on the lists that it found (test_select_blocks checks those). */
static void test_reference(const chain_case *c, nsa_dtype dtype, int seed) {
    suite s = suite_of(c);
    chain_slots at = slots_of(c);
    for (int i = 0, run = 0; i < COUNT(isas); i++) {
        nsa_desc d = chain_desc(c);
        if (!nsa_isa_available(isas[i]) || (seed + i) % 2)
            continue; /* every other, so that time stays small */
        d.isa = isas[i], d.threads = 1 + (i + seed) % 3;
        if (run++ % 2) d.first = d.tokens / 3, d.count = (d.tokens + 1) / 2;
        nsa_dtype grad = (i + seed) % 4 ? NSA_REAL_DTYPE : dtype;
        values in = values_random(&s, &d, dtype, (uint64_t)seed),
               start = values_start(&s, &d, dtype, grad);
        instance p;
        check_case("attention, %s, %s, gradients %s, isa %s, rows %d + %d", c->name,
                   dtype_name(dtype), dtype_name(grad), nsa_isa_name(d.isa), d.first, d.count);
        instance_new(&p, &s, &d, &in, dtype, grad, i + seed, &start);
        instance_run(&p);
        tensor_get(&p.x[at.blocks], in.x[at.blocks]);
        values want = values_reference(&s, &d, &in, REF_F64),
               plain = values_plain(&s, &d, &in, dtype, &want);
        suite_compare_all(&p, &want, &plain, &start, grad);
        values_free(&in), values_free(&start), values_free(&want), values_free(&plain);
        guards_free();
    }
}

static void test_reach(const chain_case *c) {
    nsa_desc d = chain_desc(c);
    suite s = suite_of(c);
    values in = values_random(&s, &d, NSA_REAL_DTYPE, 5), zeros = values_zero(&s, &d);
    instance p;
    check_case("attention, %s, gradients reach everything", c->name);
    instance_new(&p, &s, &d, &in, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    instance_run(&p);
    check_gradients_reach(&p);
    values_free(&in), values_free(&zeros);
    guards_free();
}

/* The chain is its primitives one after the other, bit for bit; also where slc and win have one K
   and V, and the chain computes queries that see every key through both only once. */
static void test_composed(const chain_case *c, nsa_dtype dtype, int one_kv) {
    nsa_desc d = chain_desc(c);
    suite s = suite_of(c);
    values in = values_random(&s, &d, dtype, 6), zeros = values_zero(&s, &d);
    instance p;
    check_case("attention, %s, %s, composed%s", c->name, dtype_name(dtype),
               one_kv ? ", one K and V" : "");
    instance_new(&p, &s, &d, &in, dtype, dtype, 1, &zeros);
    nsa_attention *x = (nsa_attention *)instance_x(&p);
    if (one_kv) x->k_win = x->k_slc, x->v_win = x->v_slc;
    instance_run(&p);
    suite_bits chain = bits_take(&p);
    composed_forward(&p);
    suite_bits parts = bits_take(&p);
    same_bits(&s, &d, &parts, &chain, dtype);
    bits_free(&chain), bits_free(&parts);
    values_free(&in), values_free(&zeros);
    guards_free();
}

/* Not causal, and every query head with a list of its own; then both. */
static void test_options(int cases) {
    for (int i = 0; i < COUNT(chain_cases); i++)
        for (int option = 1; option < 4; option++) {
            case_options.mask = option & 1 ? NSA_MASK_NONE : NSA_MASK_CAUSAL;
            case_options.heads_of_list = option >> 1;
            const chain_case *c = &chain_cases[i];
            /* few cases, and the one whose heads are taken in slices */
            if (i >= cases && strcmp(c->name, "kv heads one by one")) continue;
            nsa_desc d = chain_desc(c);
            suite s = suite_of(c);
            if ((i + option) % 2 && cases > 1) continue;
            if (suite_refused(&s, &d, NULL)) continue;
            test_reference(c, dtypes[(i + option) % COUNT(dtypes)], 40 + 2 * i);
            test_composed(c, dtypes[(i + option) % COUNT(dtypes)], option == 1);
        }
    memset(&case_options, 0, sizeof case_options);
}

/* One K and one V for all three branches, their gradients likewise in one tensor. */
static void run_shared(instance *p) {
    nsa_attention *x = (nsa_attention *)instance_x(p), *dx = (nsa_attention *)instance_dx(p);
    x->k_win = x->k_cmp.x = x->k_slc, x->v_win = x->v_cmp.x = x->v_slc;
    dx->k_win = dx->k_cmp.x = dx->k_slc, dx->v_win = dx->v_cmp.x = dx->v_slc;
    instance_run(p);
}

/* Shared gradients of low precision are the sums of the branches, `real`, rounded once. */
static void test_shared_rounding(const suite *s, const nsa_desc *d, nsa_dtype dtype,
                                 const values *in, const values *zeros, const instance *real,
                                 const int keys[2]) {
    instance p;
    instance_new(&p, s, d, in, dtype, dtype, 0, zeros);
    run_shared(&p);
    for (int i = 0; i < 2; i++) {
        size_t n = tensor_count(&real->dx[keys[i]]), width = (size_t)s->slots[keys[i]].width;
        double *want = ref_zeros(n), *got = ref_zeros(n);
        tensor_get(&real->dx[keys[i]], want), tensor_get(&p.dx[keys[i]], got);
        for (size_t j = 0; j < n; j++) want[j] = ref_store(dtype_prec(dtype), want[j]);
        CHECK_NEAR(s->slots[keys[i]].name, got, want, n, width, 0);
        free(want), free(got);
    }
}

/* All three branches over one K and one V, their gradients in one tensor: the sum of the three. */
static void test_shared_keys(const chain_case *c, nsa_dtype dtype) {
    nsa_desc d = chain_desc(c);
    suite s = suite_of(c);
    chain_slots at = slots_of(c);
    plan rows = plan_of(&d);
    values in = values_random(&s, &d, dtype, 7), zeros = values_zero(&s, &d);
    int k[] = {at.k_slc, at.k_win, at.k_cmp.at[PHI_X]},
        v[] = {at.v_slc, at.v_win, at.v_cmp.at[PHI_X]};
    for (int i = 1; i < 3; i++) {
        memcpy(in.x[k[i]], in.x[k[0]], slot_count(&s.slots[k[0]], &rows) * sizeof(double));
        memcpy(in.x[v[i]], in.x[v[0]], slot_count(&s.slots[v[0]], &rows) * sizeof(double));
    }
    instance p;
    check_case("attention, %s, %s, shared K and V", c->name, dtype_name(dtype));
    instance_new(&p, &s, &d, &in, dtype, NSA_REAL_DTYPE, 0, &zeros);
    run_shared(&p);
    const int keys[] = {k[0], v[0]};
    if (dtype != NSA_REAL_DTYPE) test_shared_rounding(&s, &d, dtype, &in, &zeros, &p, keys);
    tensor_get(&p.x[at.blocks], in.x[at.blocks]);
    values want = values_reference(&s, &d, &in, REF_F64),
           plain = values_plain(&s, &d, &in, dtype, &want);
    for (int i = 1; i < 3; i++) {
        for (size_t j = 0; j < slot_count(&s.slots[k[0]], &rows); j++)
            want.dx[k[0]][j] += want.dx[k[i]][j], plain.dx[k[0]][j] += plain.dx[k[i]][j];
        for (size_t j = 0; j < slot_count(&s.slots[v[0]], &rows); j++)
            want.dx[v[0]][j] += want.dx[v[i]][j], plain.dx[v[0]][j] += plain.dx[v[i]][j];
    }
    suite_compare("dx.k", &p.dx[k[0]], &d, 0, want.dx[k[0]], plain.dx[k[0]], 3);
    suite_compare("dx.v", &p.dx[v[0]], &d, 0, want.dx[v[0]], plain.dx[v[0]], 3);
    suite_compare("dx.q", &p.dx[at.q], &d, 1, want.dx[at.q], plain.dx[at.q], 3);
    suite_compare("dx.gates", &p.dx[at.gates], &d, 1, want.dx[at.gates], plain.dx[at.gates], 3);
    suite_compare("out", &p.x[at.out], &d, 1, want.x[at.out], plain.x[at.out], 2);
    values_free(&in), values_free(&zeros), values_free(&want), values_free(&plain);
    guards_free();
}

/* Gradients of keys within the rows of values, which are wider: they add up, and a sum of the
   narrow rows does not stand in for one of the wide. */
static void test_nested_rows(nsa_dtype dtype) {
    const chain_case c = {
        "", "varlen empty", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0};
    nsa_desc d = chain_desc(&c);
    suite s = suite_of(&c);
    chain_slots at = slots_of(&c);
    int k[] = {at.k_slc, at.k_win, at.k_cmp.at[PHI_X]},
        v[] = {at.v_slc, at.v_win, at.v_cmp.at[PHI_X]};
    values in = values_random(&s, &d, dtype, 10), zeros = values_zero(&s, &d);
    instance p;
    check_case("attention, %s, gradients of K in the rows of V", dtype_name(dtype));
    instance_new(&p, &s, &d, &in, dtype, dtype, 0, &zeros);
    nsa_attention *dx = (nsa_attention *)instance_dx(&p);
    dx->k_slc = dx->k_win = dx->k_cmp.x = dx->v_win = dx->v_cmp.x = dx->v_slc;
    instance_run(&p);
    tensor_get(&p.x[at.blocks], in.x[at.blocks]);
    values want = values_reference(&s, &d, &in, REF_F64),
           plain = values_plain(&s, &d, &in, dtype, &want);
    plan rows = plan_of(&d);
    size_t wide = (size_t)d.dim_v, narrow = (size_t)d.dim,
           count = slot_count(&s.slots[v[0]], &rows);
    for (size_t j = 0; j < count; j++) {
        size_t of_k = j / wide * narrow + j % wide;
        for (int i = 0; i < 3; i++) {
            if (i) want.dx[v[0]][j] += want.dx[v[i]][j], plain.dx[v[0]][j] += plain.dx[v[i]][j];
            if (j % wide >= narrow) continue;
            want.dx[v[0]][j] += want.dx[k[i]][of_k], plain.dx[v[0]][j] += plain.dx[k[i]][of_k];
        }
    }
    suite_compare("dx.v", &p.dx[v[0]], &d, 0, want.dx[v[0]], plain.dx[v[0]], 3);
    values_free(&in), values_free(&zeros), values_free(&want), values_free(&plain);
    guards_free();
}

/* Lists of the caller may lack a block that lies in the window. Then slc's gradients there are not
   win's, whose part of a shared tensor would else be counted for both. */
static void test_list_with_gap(void) {
    const chain_case c = {
        "", "the paper's blocks", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0};
    nsa_desc d = chain_desc(&c);
    suite s = suite_of(&c);
    chain_slots at = slots_of(&c);
    plan rows = plan_of(&d);
    const size_t n = slot_count(&s.slots[at.k_slc], &rows);
    values in = values_random(&s, &d, NSA_REAL_DTYPE, 12), zeros = values_zero(&s, &d);
    double *dk[2] = {ref_zeros(n), ref_zeros(n)}, *of_win = ref_zeros(n);
    check_case("attention, a list with a gap, shared K and V");
    for (int apart = 0; apart < 2; apart++) {
        instance p;
        instance_new(&p, &s, &d, &in, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
        nsa_attention *x = (nsa_attention *)instance_x(&p), *dx = (nsa_attention *)instance_dx(&p);
        x->k_win = x->k_slc, x->v_win = x->v_slc;
        if (!apart) dx->k_win = dx->k_slc, dx->v_win = dx->v_slc;
        CHECK(instance_forward(&p) == NSA_OK, "forward");
        for (int t = d.slc_block; t < d.window; t++) /* the first two blocks: one is left */
            memset(tensor_at(&p.x[at.blocks], 0, t, 0, 1), -1, sizeof(int32_t));
        CHECK(instance_backward(&p) == NSA_OK, "backward");
        tensor_get(&p.dx[at.k_slc], dk[apart]);
        if (apart) tensor_get(&p.dx[at.k_win], of_win);
        guards_free();
    }
    for (size_t i = 0; i < n; i++) dk[1][i] += of_win[i];
    CHECK_NEAR("dx.k", dk[0], dk[1], n, (size_t)d.dim, 1e-4);
    values_free(&in), values_free(&zeros);
    free(dk[0]), free(dk[1]), free(of_win);
}

/* ---- A NaN in what cmp compresses: it may change lists, but only of queries that see it ---- */

static void test_nan_before_selection(const chain_case *c, nsa_dtype dtype, int of_v) {
    nsa_desc d = chain_desc(c);
    if (d.begins || d.batch != 1) return;
    suite s = suite_of(c);
    chain_slots at = slots_of(c);
    int x = of_v ? at.v_cmp.at[PHI_X] : at.k_cmp.at[PHI_X];
    int row = d.tokens / 2, heads = d.kv_heads, width = s.slots[x].width;
    int seen = 0; /* the first query that sees a block with the row in it */
    while (seen < d.tokens && !(nsa_cmp_visible(&d, seen) &&
                                (nsa_cmp_visible(&d, seen) - 1) * d.cmp_stride + d.cmp_block > row))
        seen++;
    values in = values_random(&s, &d, dtype, 8);
    suite_bits clean = bits_of(&s, &d, &in, dtype, 0);
    in.x[x][(row * heads) * width + width / 2] = NAN;
    check_case("attention, %s, %s, NaN in %s", c->name, dtype_name(dtype), s.slots[x].name);
    suite_bits bad = bits_of(&s, &d, &in, dtype, 0);
    for (int i = 0; i < s.count; i++)
        if (s.slots[i].rows == ROWS_QUERY) same_rows(&s, i, &bad, 0, &clean, 0, seen, dtype);
    bits_free(&clean), bits_free(&bad);
    values_free(&in);
}

/* ---- RoPE: positions that all move by the same change no score ---- */

static void rotate(const double *x, double *out, int rows, int heads, int dim, int shift) {
    int32_t *positions = (int32_t *)check_alloc((size_t)rows * 4);
    for (int t = 0; t < rows; t++) positions[t] = t + shift;
    ref_rope r;
    memset(&r, 0, sizeof r);
    r.prec = REF_F64, r.rows = rows, r.heads = heads, r.dim = dim, r.positions = positions;
    r.base = 10000;
    ref_rope_rotate(&r, 1, x, out);
    for (int i = 0; i < rows * heads * dim; i++)
        out[i] = ref_store(dtype_prec(NSA_REAL_DTYPE), out[i]);
    free(positions);
}

/* phi is the mean: it commutes with a common rotation, conv and mlp do not. */
static void test_shift(const chain_case *c, int shift) {
    nsa_desc d = chain_desc(c);
    suite s = suite_of(c);
    chain_slots at = slots_of(c);
    int turned[] = {at.q, at.k_cmp.at[PHI_X], at.k_slc, at.k_win};
    double *lse[2][3];
    check_case("attention, %s, positions moved by %d", c->name, shift);
    for (int k = 0; k < 2; k++) {
        values in = values_random(&s, &d, NSA_REAL_DTYPE, 9), zeros = values_zero(&s, &d);
        for (int i = 0; i < COUNT(turned); i++)
            for (int b = 0; b < d.batch; b++) {
                const slot *t = &s.slots[turned[i]];
                double *rows = in.x[turned[i]] + b * d.tokens * t->heads * t->width;
                rotate(rows, rows, d.tokens, t->heads, t->width, k * shift);
            }
        instance p;
        instance_new(&p, &s, &d, &in, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
        instance_run(&p);
        for (int b = 0; b < 3; b++) {
            lse[k][b] = ref_zeros(tensor_count(&p.x[at.lse[b]]));
            tensor_get(&p.x[at.lse[b]], lse[k][b]);
        }
        values_free(&in), values_free(&zeros);
        guards_free();
    }
    size_t n = (size_t)(d.batch * d.tokens * d.heads);
    /* Of a rotated row each number is off by a rounding: 16 of them in a sum of dim, and in f64 the
       angle's own. */
    double roundoff = sizeof(nsa_real) == 8 ? 1.1e-16 * shift : 6.0e-8;
    for (int b = 0; b < 3; b++) {
        check_empty_rows(lse[1][b], lse[0][b], lse[0][b], n);
        CHECK_NEAR("lse", lse[1][b], lse[0][b], n, 1, 64 * roundoff * sqrt((double)n));
    }
    for (int k = 0; k < 2; k++)
        for (int b = 0; b < 3; b++) free(lse[k][b]);
}

/* ---- Small sequences: with room for every block all keys are read ---- */

/* S 8, l 4, d 2, l' 4, n 4, w 16: slc and win are both causal attention over every key. */
static void test_full(void) {
    chain_case c = {"full",
                    CHECKS_CUDA ? "full at S 60" : "full at S 8",
                    NSA_PHI_MEAN,
                    NSA_PHI_MEAN,
                    0,
                    0,
                    NSA_GATE_SIGMOID,
                    0,
                    0,
                    0};
    nsa_desc d = chain_desc(&c);
    suite s = suite_of(&c);
    chain_slots at = slots_of(&c);
    values in = values_random(&s, &d, NSA_REAL_DTYPE, 10), zeros = values_zero(&s, &d);
    plan rows = plan_of(&d);
    memcpy(in.x[at.k_win], in.x[at.k_slc], slot_count(&s.slots[at.k_slc], &rows) * sizeof(double));
    memcpy(in.x[at.v_win], in.x[at.v_slc], slot_count(&s.slots[at.v_slc], &rows) * sizeof(double));
    instance p;
    check_case("attention, %s", c.shape);
    instance_new(&p, &s, &d, &in, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    instance_run(&p);
    ref_desc r = ref_desc_of(&d, d.tokens);
    unsigned char *mask = ref_mask_dense(&r);
    size_t n = tensor_count(&p.x[at.branch[1]]);
    double *out = ref_zeros(n), *lse = ref_zeros((size_t)(d.tokens * d.heads));
    ref_attend a = {REF_F64,        d.tokens,       d.tokens, d.heads, d.kv_heads,
                    d.dim,          d.dim_v,        r.scale,  mask,    in.x[at.q],
                    in.x[at.k_slc], in.x[at.v_slc], out,      lse,     0};
    ref_attend_forward(&a);
    suite_compare("out_slc", &p.x[at.branch[1]], &d, 1, out, out, 2);
    suite_compare("out_win", &p.x[at.branch[2]], &d, 1, out, out, 2);
    free(mask), free(out), free(lse);
    values_free(&in), values_free(&zeros);
    guards_free();
}

/* ---- Refusals of the whole alone ---- */

static void test_widths(void) {
    suite s = suite_of(&chain_cases[0]);
    nsa_desc d = chain_desc(&chain_cases[0]);
    spoiled b;
    spoiled_new(&b, &s, &d);
    nsa_attention *x = (nsa_attention *)instance_x(&b.p), good = *x;
    const refusal *both[] = {&b.forward, &b.backward};
    for (int i = 0; i < 2; i++) {
        x->k_cmp.dim = 8, refused(both[i], "k_cmp of another width", NSA_ERROR_SIZE, "k_cmp.dim"),
        *x = good;
        x->v_cmp.dim = 0, refused(both[i], "v_cmp without width", NSA_ERROR_SIZE, "v_cmp.dim"),
        *x = good;
        x->k_cmp.phi = (nsa_phi)9, refused(both[i], "no phi", NSA_ERROR_OPTION, "k_cmp.phi"),
        *x = good;
    }
    guards_free();
}

/* ---- Strides that pass 2^31 elements: what is read and written, and its bits, is the same ---- */

#if defined(__unix__) && !defined(CHECK_CUDA)
/* Every row of tokens at a place of its own, as far from the next as an int cannot say, in memory
   of which the system gives those pages that are touched. */
static void place_far(instance *p, unsigned char *memory, int64_t stride, const values *in) {
    enum { APART = 1 << 14 }; /* a row of all heads fits in between */
    for (int i = 0; i < p->s->count; i++) {
        const slot *t = &p->s->slots[i];
        tensor *both[] = {&p->x[i], &p->dx[i]};
        const double *numbers[] = {t->output ? NULL : in->x[i], t->output ? in->dx[i] : NULL};
        void *structs[] = {instance_x(p), instance_dx(p)};
        for (int k = 0; k < 1 + t->gradient && t->rows != ROWS_PARAMETER; k++) {
            both[k]->view = nsa_tensor_bthd(memory + (2 * i + k) * APART, both[k]->view.dtype,
                                            both[k]->tokens, t->heads, t->width);
            both[k]->view.token = stride;
            *slot_view(t, structs[k]) = both[k]->view;
            if (numbers[k]) tensor_put(both[k], numbers[k]);
        }
    }
}

static void test_far_rows(const chain_case *c) {
    const int64_t stride = ((int64_t)1 << 31) + (1 << 20);
    nsa_desc d = chain_desc(c);
    suite s = suite_of(c);
    check_case("attention, %s, rows 2^31 elements apart", c->name);
    size_t room = ((size_t)d.tokens * (size_t)stride + (1 << 20)) * sizeof(nsa_real);
    void *memory = sizeof room < 8 ? MAP_FAILED
                                   : mmap(NULL, room, PROT_READ | PROT_WRITE,
                                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        printf("not tried, for want of addresses: attention, %s, far rows\n", c->name);
        return;
    }
    values in = values_random(&s, &d, NSA_REAL_DTYPE, 11), zeros = values_zero(&s, &d);
    instance near, far;
    instance_new(&near, &s, &d, &in, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    instance_new(&far, &s, &d, &in, NSA_REAL_DTYPE, NSA_REAL_DTYPE, 0, &zeros);
    place_far(&far, (unsigned char *)memory, stride, &in);
    instance_run(&near);
    size_t forward = s.forward_size(instance_x(&far), &d),
           backward = s.backward_size(instance_dx(&far), instance_x(&far), &d);
    void *work = check_alloc(forward > backward ? forward : backward);
    nsa_status status = s.forward(instance_x(&far), &d, work, forward);
    CHECK_OK("forward", status);
    status = s.backward(instance_dx(&far), instance_x(&far), &d, work, backward);
    CHECK_OK("backward", status);
    for (int i = 0; i < s.count; i++) {
        const slot *t = &s.slots[i];
        const tensor *a = t->output ? &far.x[i] : &far.dx[i],
                     *b = t->output ? &near.x[i] : &near.dx[i];
        if (!t->output && !t->gradient) continue;
        unsigned char *got = tensor_bits(a), *want = tensor_bits(b);
        CHECK_BITS(t->name, got, want, tensor_count(b) * dtype_size(b->view.dtype), 1);
        free(got), free(want);
    }
    munmap(memory, room);
    free(work);
    values_free(&in), values_free(&zeros);
    guards_free();
}
#else
static void test_far_rows(const chain_case *c) {
    (void)c; /* kernels' tests lie in the executor's memory, of which each byte is watched */
}
#endif

/* ---- Memory: what docs/embedding.md says of the whole's workspace ---- */

/* The documented bytes, without what threads and phi take. */
static double documented_bytes(const nsa_desc *d, int backward) {
    double real = sizeof(nsa_real), tokens = d->tokens, near = 256 / d->dim;
    double heads = near < 1 ? 1 : near > 4 ? 4 : near;
    if (heads > d->kv_heads) heads = d->kv_heads;
    if (!backward) return real * tokens * heads * (d->dim + d->dim_v);
    double rows = floor(1024.0 * d->kv_heads / d->heads / d->dim);
    if (heads > rows) heads = rows < 1 ? 1 : rows;
    return real * tokens *
           (heads * (3 * d->dim + 2 * d->dim_v) +
            (double)d->kv_heads * (d->dim + d->dim_v) / d->cmp_stride);
}

/* What a thread takes, at most: slc's, where the keys of all tokens are packed. */
static double documented_thread_bytes(int backward) {
    return (backward ? 18.5e6 : 3.3e6) * sizeof(nsa_real) / sizeof(float);
}

static double whole_bytes(const nsa_attention *x, const nsa_desc *d, int backward, int threads) {
    nsa_desc own = *d;
    own.threads = threads;
    return (double)(backward ? nsa_attention_backward_workspace_size(x, x, &own)
                             : nsa_attention_forward_workspace_size(x, &own));
}

static void test_workspace_is_linear(void) {
    static const int shapes[][4] = {{16, 1, 64, 64}, {12, 12, 64, 64}, {16, 4, 192, 128}};
#ifdef _OPENMP /* or a call has one thread, whose share is not to be told from the rest */
    const int n = COUNT(shapes);
#else
    const int n = 0;
#endif
    for (int i = 0; i < n; i++)
        for (int tokens = 65536; tokens <= 1 << 22; tokens *= 8) {
            nsa_desc d = nsa_desc_default(1, tokens, shapes[i][0], shapes[i][1], shapes[i][2]);
            nsa_attention x;
            memset(&x, 0, sizeof x);
            d.dim_v = shapes[i][3];
            x.k_cmp.dim = d.dim, x.v_cmp.dim = d.dim_v;
            check_case("attention, workspace of %d tokens, %d heads", tokens, d.heads);
            for (int backward = 0; backward < 2; backward++) {
                double one = whole_bytes(&x, &d, backward, 1),
                       of_thread = whole_bytes(&x, &d, backward, 2) - one;
                double want = documented_bytes(&d, backward);
                CHECK(fabs((one - of_thread) / want - 1) < 0.1, "%s: %.0f bytes, not %.0f",
                      backward ? "backward" : "forward", one - of_thread, want);
                want = documented_thread_bytes(backward);
                CHECK(of_thread > want / 4 && of_thread < want, "%s: a thread takes %.0f, not %.0f",
                      backward ? "backward" : "forward", of_thread, want);
            }
        }
}

/* Sums of bf16 gradients: those of q only for the heads at hand, of keys and values for all. */
static void test_workspace_of_half(void) {
    static char memory[8];
    const double goal = 1.2e9 * sizeof(nsa_real) / sizeof(float);
    nsa_desc d = nsa_desc_default(1, 65536, 64, 4, 128);
    nsa_attention x;
    memset(&x, 0, sizeof x);
    d.threads = 1;
    x.k_cmp.dim = x.v_cmp.dim = d.dim;
    x.q = nsa_tensor_bthd(memory, NSA_BF16, d.tokens, d.heads, d.dim);
    x.k_slc = nsa_tensor_bthd(memory + 2, NSA_BF16, d.tokens, d.kv_heads, d.dim);
    x.v_slc = nsa_tensor_bthd(memory + 4, NSA_BF16, d.tokens, d.kv_heads, d.dim);
    x.k_win = x.k_cmp.x = x.k_slc;
    x.v_win = x.v_cmp.x = x.v_slc;
    check_case("attention, workspace of bf16 gradients");
    double bytes = (double)nsa_attention_backward_workspace_size(&x, &x, &d);
    CHECK(bytes > goal / 2 && bytes < goal, "%.0f bytes", bytes);
}

/* 64 packed sequences of 64k rows in all take about the workspace of one of 64k, however long the
   longest is: for every function that takes one, largest first the bytes of the one sequence. */
static void test_workspace_of_packed(int heads, int kv_heads, int dim, nsa_phi phi) {
    enum { SEQUENCES = 64, ROWS = 65536, LONGEST = 16384 };
    static char memory[8];
    int32_t begins[SEQUENCES + 1] = {0, LONGEST};
    for (int b = 2; b <= SEQUENCES; b++)
        begins[b] = LONGEST + (int)((int64_t)(ROWS - LONGEST) * (b - 1) / (SEQUENCES - 1));
    double bytes[2][13];
    static const char *const names[] = {
        "compress forward",  "compress backward", "cmp forward", "cmp backward",
        "slc forward",       "slc backward",      "win forward", "win backward",
        "dense forward",     "dense backward",    "select",      "attention forward",
        "attention backward"};
    for (int packed = 0; packed < 2; packed++) {
        nsa_desc d = packed ? nsa_desc_default(SEQUENCES, LONGEST, heads, kv_heads, dim)
                            : nsa_desc_default(1, ROWS, heads, kv_heads, dim);
        if (packed) d.begins = begins, d.rows = ROWS;
        d.threads = 1;
        nsa_attention x;
        memset(&x, 0, sizeof x);
        x.q = nsa_tensor_bthd(memory, NSA_BF16, d.tokens, heads, dim);
        x.k_slc = nsa_tensor_bthd(memory + 2, NSA_BF16, d.tokens, kv_heads, dim);
        x.v_slc = nsa_tensor_bthd(memory + 4, NSA_BF16, d.tokens, kv_heads, dim);
        x.k_win = x.k_cmp.x = x.k_slc;
        x.v_win = x.v_cmp.x = x.v_slc;
        x.k_cmp.dim = x.v_cmp.dim = dim, x.k_cmp.hidden = x.v_cmp.hidden = 64;
        x.k_cmp.phi = x.v_cmp.phi = phi;
        const size_t all[] = {nsa_compress_forward_workspace_size(&x.k_cmp, &d),
                              nsa_compress_backward_workspace_size(&x.k_cmp, &d),
                              nsa_attend_cmp_forward_workspace_size(&d),
                              nsa_attend_cmp_backward_workspace_size(&d),
                              nsa_attend_slc_forward_workspace_size(&d),
                              nsa_attend_slc_backward_workspace_size(&d),
                              nsa_attend_win_forward_workspace_size(&d),
                              nsa_attend_win_backward_workspace_size(&d),
                              nsa_attend_dense_forward_workspace_size(&d),
                              nsa_attend_dense_backward_workspace_size(&d),
                              nsa_select_blocks_workspace_size(&d),
                              nsa_attention_forward_workspace_size(&x, &d),
                              nsa_attention_backward_workspace_size(&x, &x, &d)};
        for (int i = 0; i < COUNT(all); i++) bytes[packed][i] = (double)all[i];
    }
    for (int i = 0; i < COUNT(names); i++) {
        check_case("%s of %d packed rows, heads %d / %d", names[i], ROWS, heads, kv_heads);
        CHECK(bytes[1][i] <= 1.3 * bytes[0][i] + 65536, "%.0f bytes, one sequence %.0f",
              bytes[1][i], bytes[0][i]);
    }
}

#ifdef CHECK_F64
static void test_gradients(void) {
    static const nsa_phi phis[] = {NSA_PHI_MEAN, NSA_PHI_CONV, NSA_PHI_MLP};
    for (int i = 0; i < COUNT(tiny_geometries); i++)
        for (int k = 0; k < COUNT(phis); k++) {
            chain_case c = {
                tiny_geometries[i].name,
                tiny_geometries[i].name,
                phis[k],
                phis[(k + i) % 3],
                i % 2,
                0,
                (nsa_gate_kind)((k + i) % 3),
                (i + k) % 2,
                k == 1,
                i % 2}; /* a mean or an MLP has lists by kv head, a convolution by head */
            nsa_desc d = chain_desc(&c);
            suite s = suite_of(&c);
            suite_gradcheck(&s, &d);
        }
}
#endif

/* As many queries as tiles go through the branches group by group; the last slice here has fewer,
   so its branches run one after another. */
static void test_late_queries(void) {
    const chain_case c = {
        "few of many", "few of many", NSA_PHI_MEAN, NSA_PHI_MEAN, 0, 0, NSA_GATE_SIGMOID, 0, 0, 0};
    nsa_desc d = chain_desc(&c);
    suite s = suite_of(&c);
    suite_slices(&s, &d, NSA_REAL_DTYPE);
}

static const chain_case *case_named(const char *name) {
    const chain_case *c = chain_cases;
    while (strcmp(c->name, name)) c++;
    return c;
}

int main(int argc, char **argv) {
    int step = asked_step(argc, argv, CHECKS_CUDA ? 9 : 4, 19), quick = step > 1;
    int least = asked_amount(argc, argv) == LEAST; /* bits and NaN are for the other builds */
#ifdef CHECK_F64
    const int first = step > 1; /* other cases than in f32 */
#else
    const int first = 0;
#endif
    for (int i = first; i < COUNT(chain_cases); i += step) {
        const chain_case *c = &chain_cases[i];
        nsa_desc d = chain_desc(c);
        suite s = suite_of(c);
        if (suite_refused(&s, &d, NULL)) continue;
        for (int k = 0; k < COUNT(dtypes); k++) {
            int others = (i / step + k) % COUNT(dtypes),
                little = asks_little(shape(c->shape), quick);
            if (CHECKS_CUDA && quick && others) continue;
            test_reference(c, dtypes[k], i + k);
            if (CHECKS_CUDA && quick && little) continue;
            test_composed(c, dtypes[k], 0);
            test_composed(c, dtypes[k], 1);
            if (others || little) continue; /* these in one dtype a case */
            if (!least) suite_bit_tests(&s, &d, dtypes[k]);
            if (!least) suite_nan(&s, &d, dtypes[k]);
            test_nan_before_selection(c, dtypes[k], 0);
            test_nan_before_selection(c, dtypes[k], 1);
            test_shared_keys(c, dtypes[k]);
        }
        if (!CHECKS_CUDA || !quick || i == 0) test_reach(c);
    }
    for (int k = 0; quick && k < COUNT(dtypes); k++)
        test_reference(case_named("varlen behind others"), dtypes[k], 4 * k); /* of its dtype */
    test_options(!quick ? COUNT(chain_cases) : CHECKS_CUDA ? 1 : 3);
    if (CHECKS_CUDA && quick && step < 19) test_shared_keys(&chain_cases[0], dtypes[1]);
    test_shift(&chain_cases[0], 1000);
    if (!CHECKS_CUDA || !quick) test_shift(&chain_cases[5], 1000);
    test_full();
    test_widths();
    test_nested_rows(dtypes[1]);
    if (!CHECKS_CUDA) test_list_with_gap();
    test_far_rows(&chain_cases[5]);  /* tiles of packed keys */
    test_far_rows(&chain_cases[14]); /* few queries; networks as phi */
    if (!CHECKS_CUDA) test_late_queries();
    if (!CHECKS_CUDA && sizeof(size_t) >= 8) test_workspace_is_linear(), test_workspace_of_half();
    test_workspace_of_packed(64, 4, 64, NSA_PHI_MEAN);
    test_workspace_of_packed(16, 16, 64, NSA_PHI_CONV);
    test_workspace_of_packed(12, 1, 64, NSA_PHI_MLP);
#ifdef CHECK_F64
    test_gradients();
#endif
    nsa_desc d = chain_desc(&chain_cases[2]);
    suite s = suite_of(&chain_cases[2]);
    suite_refusals(&s, &d);
    suite_refuse_gates(&s, &d, "dx.gates");
    return check_done("test_attention");
}
