/* attend.h - one attention problem: its numbers, its views, its reference, its bits.
   Twin: nsa.h's "Attention over few keys". Not here: what is tested with it (attend_tests.h). */
#ifndef NSA_TESTS_ATTEND_H
#define NSA_TESTS_ATTEND_H

#include "cases.h"

typedef struct branch {
    const char *name;
    enum { BRANCH_CMP, BRANCH_SLC, BRANCH_WIN, BRANCH_DENSE } keys;
    nsa_status (*forward)(const nsa_attend *, const nsa_desc *, void *, size_t);
    size_t (*forward_size)(const nsa_desc *);
    nsa_status (*backward)(const nsa_attend *, const nsa_attend *, const nsa_desc *, void *,
                           size_t);
    size_t (*backward_size)(const nsa_desc *);
} branch;

/* ---- One problem: the numbers, and the same numbers as nsa.h's views ---- */

typedef struct numbers {
    double *q, *k, *v, *dout;      /* inputs, dense, rounded to the dtype */
    double *dlse;                  /* the incoming gradient of lse; one problem in three has none */
    int32_t *blocks;               /* slc */
    double *out, *lse;             /* results */
    double *dq, *dk, *dv;          /* gradients */
    size_t nq, nk, nv, nout, nlse; /* how many there are of each */
} numbers;

static inline int key_rows(const branch *br, const plan *p) {
    return br->keys == BRANCH_CMP ? p->cmp_rows : p->rows;
}

static inline numbers numbers_new(const branch *br, const nsa_desc *d, nsa_dtype dtype,
                                  uint64_t seed) {
    plan p = plan_of(d);
    numbers n;
    size_t rows = (size_t)p.rows * (size_t)d->heads,
           keys = (size_t)(key_rows(br, &p) * d->kv_heads);
    n.nq = rows * (size_t)d->dim, n.nout = rows * (size_t)d->dim_v, n.nlse = rows;
    n.nk = keys * (size_t)d->dim, n.nv = keys * (size_t)d->dim_v;
    n.q = random_numbers(seed, n.nq, dtype);
    n.k = random_numbers(seed + 1, n.nk, dtype);
    n.v = random_numbers(seed + 2, n.nv, dtype);
    n.dout = random_numbers(seed + 3, n.nout, dtype);
    n.dlse = seed % 3 ? random_numbers(seed + 5, n.nlse, NSA_REAL_DTYPE) : NULL;
    n.blocks = br->keys == BRANCH_SLC ? random_blocks(d, seed + 4) : NULL;
    n.out = ref_zeros(n.nout), n.lse = ref_zeros(n.nlse);
    n.dq = ref_zeros(n.nq), n.dk = ref_zeros(n.nk), n.dv = ref_zeros(n.nv);
    return n;
}

static inline void numbers_free(numbers *n) {
    double *all[] = {n->q, n->k, n->v, n->dout, n->dlse, n->out, n->lse, n->dq, n->dk, n->dv};
    for (int i = 0; i < COUNT(all); i++) free(all[i]);
    free(n->blocks);
}

/* Results and gradients by the reference, for the rows of the slice, in the given precision. */
static inline numbers numbers_reference(const branch *br, const nsa_desc *d, const numbers *in,
                                        ref_prec prec) {
    plan p = plan_of(d);
    numbers n = *in;
    int width = nsa_block_list_width(d);
    double *dout = copy_numbers(in->dout, in->nout);
    double *dlse = in->dlse ? copy_numbers(in->dlse, in->nlse) : NULL;
    plan_zero_outside(d, dout, d->heads * d->dim_v);
    if (dlse) plan_zero_outside(d, dlse, d->heads);
    n.out = ref_zeros(n.nout), n.lse = ref_zeros(n.nlse);
    n.dq = ref_zeros(n.nq), n.dk = ref_zeros(n.nk), n.dv = ref_zeros(n.nv);
    for (int b = 0; b < p.sequences; b++) {
        ref_desc r = ref_desc_of(d, p.length[b]);
        size_t row = (size_t)p.row[b],
               key = (size_t)(br->keys == BRANCH_CMP ? p.cmp_row[b] : p.row[b]);
        size_t q = row * (size_t)(d->heads * d->dim), o = row * (size_t)(d->heads * d->dim_v);
        size_t k = key * (size_t)(d->kv_heads * d->dim), v = key * (size_t)(d->kv_heads * d->dim_v);
        unsigned char *mask =
            br->keys == BRANCH_CMP ? ref_mask_cmp(&r)
            : br->keys == BRANCH_SLC
                ? ref_mask_slc(&r, in->blocks + row * (size_t)(list_heads_of(d) * width))
            : br->keys == BRANCH_WIN ? ref_mask_win(&r)
                                     : ref_mask_dense(&r);
        ref_attend x = {prec,
                        r.tokens,
                        br->keys == BRANCH_CMP ? p.cmp_count[b] : r.tokens,
                        d->heads,
                        d->kv_heads,
                        d->dim,
                        d->dim_v,
                        r.scale,
                        mask,
                        in->q + q,
                        in->k + k,
                        in->v + v,
                        n.out + o,
                        n.lse + row * (size_t)d->heads,
                        br->keys == BRANCH_SLC ? list_heads_of(d) : 0};
        ref_attend_grad dx = {dout + o, n.dq + q, n.dk + k, n.dv + v,
                              dlse ? dlse + row * (size_t)d->heads : NULL};
        ref_attend_forward(&x);
        ref_attend_backward(&x, &dx);
        free(mask);
    }
    free(dout), free(dlse);
    plan_zero_outside(d, n.out, d->heads * d->dim_v);
    plan_zero_outside(d, n.lse, d->heads);
    return n;
}

/* By the plain algorithm in the dtype; in f64 that is the reference, which took long enough. */
static inline numbers numbers_plain(const branch *br, const nsa_desc *d, const numbers *in,
                                    nsa_dtype dtype, const numbers *reference) {
    if (dtype_prec(dtype) != REF_F64) return numbers_reference(br, d, in, dtype_prec(dtype));
    numbers n = *reference;
    n.out = copy_numbers(n.out, n.nout), n.lse = copy_numbers(n.lse, n.nlse);
    n.dq = copy_numbers(n.dq, n.nq), n.dk = copy_numbers(n.dk, n.nk);
    n.dv = copy_numbers(n.dv, n.nv);
    return n;
}

static inline void numbers_free_results(numbers *n) {
    double *all[] = {n->out, n->lse, n->dq, n->dk, n->dv};
    for (int i = 0; i < COUNT(all); i++) free(all[i]);
}

typedef struct problem {
    nsa_desc d;
    tensor q, k, v, out, lse, blocks, dq, dk, dv, dout, dlse;
    nsa_attend x, dx; /* views that start at row d.first */
} problem;

/* Tensors for the numbers. Gradients begin at `start` (numbers of their dtype), results poisoned;
   that of out is read, and has their dtype in every other form. Bits of a form from MIXED on say
   which of q, k, v and out have the real dtype instead. */
enum { MIXED = 1 << 16 };

static inline problem problem_new(const branch *br, const nsa_desc *d, const numbers *n,
                                  nsa_dtype dtype, nsa_dtype grad, int form, const double *start) {
    problem p;
    int cmp = br->keys == BRANCH_CMP, width = nsa_block_list_width(d);
    memset(&p, 0, sizeof p);
    p.d = *d;
#define LAYOUT_OF(i) ((layout)((form + (i)) % LAYOUTS))
#define DTYPE_OF(i)  (form / MIXED >> (i)&1 ? NSA_REAL_DTYPE : dtype)
    p.q = tensor_of("q", LAYOUT_OF(0), DTYPE_OF(0), d, 0, d->heads, d->dim, 1);
    p.k = tensor_of("k", LAYOUT_OF(1), DTYPE_OF(1), d, cmp, d->kv_heads, d->dim, 3);
    p.v = tensor_of("v", LAYOUT_OF(2), DTYPE_OF(2), d, cmp, d->kv_heads, d->dim_v, 5);
    p.out = tensor_of("out", LAYOUT_OF(3), DTYPE_OF(3), d, 0, d->heads, d->dim_v, 1);
    p.lse = tensor_of("lse", LAYOUT_OF(1), NSA_REAL_DTYPE, d, 0, d->heads, 1, 1);
    p.dq = tensor_of("dx.q", LAYOUT_OF(2), grad, d, 0, d->heads, d->dim, 0);
    p.dk = tensor_of("dx.k", LAYOUT_OF(3), grad, d, cmp, d->kv_heads, d->dim, 7);
    p.dv = tensor_of("dx.v", LAYOUT_OF(0), grad, d, cmp, d->kv_heads, d->dim_v, 1);
    p.dout =
        tensor_of("dx.out", LAYOUT_OF(1), form % 2 ? dtype : grad, d, 0, d->heads, d->dim_v, 3);
    if (n->dlse) {
        p.dlse = tensor_of("dx.lse", LAYOUT_OF(2), NSA_REAL_DTYPE, d, 0, d->heads, 1, 1);
        tensor_put(&p.dlse, n->dlse);
        p.dx.lse = view_from(p.dlse.view, 0, d->first, 0);
    }
    tensor_put(&p.q, n->q), tensor_put(&p.k, n->k), tensor_put(&p.v, n->v),
        tensor_put(&p.dout, n->dout);
    tensor_put(&p.dq, start), tensor_put(&p.dk, start), tensor_put(&p.dv, start);
    if (br->keys == BRANCH_SLC) {
        p.blocks = tensor_of("blocks", LAYOUT_OF(3), NSA_I32, d, 0, list_heads_of(d), width, 1);
        tensor_put_i32(&p.blocks, n->blocks);
        p.x.blocks = view_from(p.blocks.view, 0, d->first, 0);
    }
    p.x.q = view_from(p.q.view, 0, d->first, 0);
    p.x.k = p.k.view, p.x.v = p.v.view;
    p.x.out = view_from(p.out.view, 0, d->first, 0);
    p.x.lse = view_from(p.lse.view, 0, d->first, 0);
    p.dx.q = view_from(p.dq.view, 0, d->first, 0);
    p.dx.k = p.dk.view, p.dx.v = p.dv.view;
    p.dx.out = view_from(p.dout.view, 0, d->first, 0);
    return p;
}

/* The threads that a workspace has room for; 0: those of the call. */
static int room_for;

static inline guarded *room_of(size_t (*size)(const nsa_desc *), const problem *p) {
    nsa_desc d = p->d;
    if (room_for) d.threads = room_for;
    return workspace_new(size(&d), 1);
}

/* Calls forward in a workspace of the exact size and verifies that nothing else was touched. */
static inline nsa_status run_forward(const branch *br, const problem *p) {
    guarded *w = room_of(br->forward_size, p);
    tensor_open_slice(&p->out, &p->d);
    tensor_open_slice(&p->lse, &p->d);
    guards_freeze();
    nsa_status s = br->forward(&p->x, &p->d, w->data, w->bytes);
    guards_verify("forward");
    guards_close();
    guarded_drop(); /* the workspace */
    return s;
}

static inline nsa_status run_backward(const branch *br, const problem *p) {
    guarded *w = room_of(br->backward_size, p);
    if (p->dx.q.data) tensor_open_slice(&p->dq, &p->d);
    if (p->dx.k.data) tensor_open(&p->dk);
    if (p->dx.v.data) tensor_open(&p->dv);
    guards_freeze();
    nsa_status s = br->backward(&p->dx, &p->x, &p->d, w->data, w->bytes);
    guards_verify("backward");
    guards_close();
    guarded_drop(); /* the workspace */
    return s;
}

#define CHECK_OK(call, status)                                              \
    CHECK((status) == NSA_OK, "%s: %s (%s)", call, nsa_status_name(status), \
          nsa_status_where(status))

static inline void run_both(const branch *br, const problem *p) {
    nsa_status s = run_forward(br, p);
    CHECK_OK("forward", s);
    s = run_backward(br, p);
    CHECK_OK("backward", s);
}

#endif
