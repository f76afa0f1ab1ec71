/* ---- Attention: entry points --------------------------------------------------------------------
   Twin: kernels/attend_branches.cuh. Not here: what they run (attend_forward.h,
   attend_backward.h). */
#pragma once
#include "attend_forward.h"
#include "attend_backward.h"

static const nsa__attend_options nsa__no_options = {NULL, 0, NULL, NULL, NULL};

static const nsa_desc *nsa__branch_desc(const nsa_desc *d, nsa__branch branch, nsa_desc *own) {
    return nsa__desc_using(d, nsa__traits_of[branch].uses, own);
}

static size_t nsa__attend_bytes(const nsa_desc *d, nsa__branch branch, int backward) {
    nsa_desc own;
    d = nsa__branch_desc(d, branch, &own);
    if (nsa_desc_check(d) != NSA_OK || (backward && d->pages)) return 0;
    nsa__attend_plan p = backward ? nsa__backward_plan(NULL, NULL, d, branch, d)
                                  : nsa__forward_plan(NULL, d, branch, nsa__no_options);
    return nsa__attend_plan_bytes(&p, nsa__threads(d));
}

static nsa__shape nsa__branch_shape(const nsa_desc *d, nsa__branch branch, int width) {
    return nsa__traits_of[branch].compressed ? nsa__cmp_shape(d, width) : nsa__key_shape(d, width);
}

/* Checks the views of a branch. `lists` 0: block lists are not checked, because the chain's forward
   has yet to write them. */
static nsa_status nsa__attend_check(const nsa_attend *x, const nsa_desc *d, nsa__branch branch,
                                    int forward, int lists, const nsa__attend_fields *at) {
    nsa__shape out = nsa__query_shape(d, d->heads, d->dim_v),
               lse = nsa__query_shape(d, d->heads, 1);
    NSA__CHECK(
        nsa__check_view(&x->q, nsa__query_shape(d, d->heads, d->dim), nsa__floats(), 0, at->q));
    NSA__CHECK(
        nsa__check_view(&x->k, nsa__branch_shape(d, branch, d->dim), nsa__floats(), 0, at->k));
    NSA__CHECK(
        nsa__check_view(&x->v, nsa__branch_shape(d, branch, d->dim_v), nsa__floats(), 0, at->v));
    NSA__CHECK(nsa__check_view(&x->out, out, nsa__floats(), forward, at->out));
    NSA__CHECK(nsa__check_view(&x->lse, lse, nsa__real_dtypes(), forward, at->lse));
    if (!nsa__traits_of[branch].lists || !lists) return NSA_OK;
    nsa_status s = nsa__check_lists(&x->blocks, d, NULL);
    return s == NSA_OK ? s : nsa__error(nsa_status_kind(s), at->blocks);
}

/* dx.out is read; the other gradients are added to, and may be absent. */
static nsa_status nsa__attend_gradient_check(const nsa_attend *dx, const nsa_attend *x,
                                             const nsa_desc *d, nsa__branch branch,
                                             const nsa__attend_fields *at) {
    nsa__shape dout = nsa__query_shape(d, d->heads, d->dim_v);
    NSA__CHECK(nsa__check_view(&dx->out, dout, nsa__floats(), 0, at->out | NSA__GRADIENT));
    NSA__CHECK(nsa__check_gradient(&dx->q, &x->q, nsa__query_shape(d, d->heads, d->dim), at->q));
    NSA__CHECK(nsa__check_gradient(&dx->k, &x->k, nsa__branch_shape(d, branch, d->dim), at->k));
    return nsa__check_gradient(&dx->v, &x->v, nsa__branch_shape(d, branch, d->dim_v), at->v);
}

static nsa_status nsa__attend_forward(const nsa_attend *x, const nsa_desc *d, nsa__branch branch,
                                      void *workspace, size_t bytes) {
    nsa_desc own;
    d = nsa__branch_desc(d, branch, &own);
    NSA__CHECK(nsa_desc_check(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__attend_check(x, d, branch, 1, 1, &nsa__attend_names));
    const nsa__attend_plan p = nsa__forward_plan(x, d, branch, nsa__no_options);
    return nsa__forward_run(&p, workspace, bytes);
}

static nsa_status nsa__attend_backward(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d,
                                       nsa__branch branch, void *workspace, size_t bytes) {
    nsa_desc own;
    d = nsa__branch_desc(d, branch, &own);
    NSA__CHECK(nsa_desc_check(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(nsa__check_backward(d, 0));
    NSA__CHECK(nsa__attend_check(x, d, branch, 0, 1, &nsa__attend_names));
    NSA__CHECK(nsa__attend_gradient_check(dx, x, d, branch, &nsa__attend_names));
    NSA__CHECK(nsa__check_lse_gradient(&dx->lse, &x->lse, nsa__query_shape(d, d->heads, 1)));
    const nsa__attend_plan p = nsa__backward_plan(dx, x, d, branch, d);
    return nsa__backward_run(&p, workspace, bytes);
}

/* The four public functions of each branch. */
#define NSA__ATTEND_ENTRY_POINTS(name, branch)                                                 \
    NSA_API size_t nsa_attend_##name##_forward_workspace_size(const nsa_desc *d) {             \
        return nsa__attend_bytes(d, branch, 0);                                                \
    }                                                                                          \
    NSA_API nsa_status nsa_attend_##name##_forward(const nsa_attend *x, const nsa_desc *d,     \
                                                   void *workspace, size_t bytes) {            \
        return nsa__attend_forward(x, d, branch, workspace, bytes);                            \
    }                                                                                          \
    NSA_API size_t nsa_attend_##name##_backward_workspace_size(const nsa_desc *d) {            \
        return nsa__attend_bytes(d, branch, 1);                                                \
    }                                                                                          \
    NSA_API nsa_status nsa_attend_##name##_backward(const nsa_attend *dx, const nsa_attend *x, \
                                                    const nsa_desc *d, void *workspace,        \
                                                    size_t bytes) {                            \
        return nsa__attend_backward(dx, x, d, branch, workspace, bytes);                       \
    }

NSA__ATTEND_ENTRY_POINTS(cmp, NSA__CMP)
NSA__ATTEND_ENTRY_POINTS(slc, NSA__SLC)
NSA__ATTEND_ENTRY_POINTS(win, NSA__WIN)
NSA__ATTEND_ENTRY_POINTS(dense, NSA__DENSE)
#undef NSA__ATTEND_ENTRY_POINTS
