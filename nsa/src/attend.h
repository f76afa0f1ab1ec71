/* ---- Attention: entry points --------------------------------------------------------------------
   Twin: kernels/attend_branches.cuh. Not here: what they run (attend_forward.h,
   attend_backward.h). */
#pragma once
#include "attend_forward_run.h"
#include "attend_backward.h"

static size_t nsa__attend_bytes(const nsa_desc *d, nsa__branch branch, int backward) {
    nsa_desc own;
    d = nsa__desc_using(d, nsa__traits_of[branch].uses, &own);
    if (nsa_desc_check(d) != NSA_OK || (backward && d->pages)) return 0;
    nsa__attend_plan p = backward ? nsa__backward_plan(NULL, NULL, d, branch, d)
                                  : nsa__forward_plan(NULL, d, branch, NULL, NULL);
    return nsa__attend_plan_bytes(&p, nsa__threads(d));
}

static nsa_status nsa__attend_check(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d,
                                    nsa__branch branch, int forward) {
    const nsa__traits *is = &nsa__traits_of[branch];
    const nsa__checked c = nsa__checked_of(d, forward, is->compressed);
    NSA__CHECK(nsa__check_call(&c, nsa__attend_views, NSA__ATTEND_VIEWS - !is->lists, dx, x));
    return is->lists ? nsa__check_lists(&x->blocks, d, NULL) : NSA_OK;
}

static nsa_status nsa__attend_forward(const nsa_attend *x, const nsa_desc *d, nsa__branch branch,
                                      void *workspace, size_t bytes) {
    nsa_desc own;
    d = nsa__desc_using(d, nsa__traits_of[branch].uses, &own);
    NSA__CHECK(nsa__attend_check(NULL, x, d, branch, 1));
    const nsa__attend_plan p = nsa__forward_plan(x, d, branch, NULL, NULL);
    return nsa__forward_run(&p, workspace, bytes);
}

static nsa_status nsa__attend_backward(const nsa_attend *dx, const nsa_attend *x, const nsa_desc *d,
                                       nsa__branch branch, void *workspace, size_t bytes) {
    nsa_desc own;
    d = nsa__desc_using(d, nsa__traits_of[branch].uses, &own);
    NSA__CHECK(nsa__attend_check(dx, x, d, branch, 0));
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
