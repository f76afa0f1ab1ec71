/* version.c: one nsa.h as a shared library that versions.py times: a problem, and each pass on it.
   It is compiled with the nsa.h of a commit. No test. */
#define _POSIX_C_SOURCE 200809L
#include "report.h"

/* Versions take turns on one problem, if they agree about its layout. */
size_t version_problem_bytes(void);
problem *version_make(int dtype, int heads, int kv_heads, int dim, int tokens, int threads);
double version_time(problem *p, int row, int backward);

size_t version_problem_bytes(void) {
    return sizeof(problem);
}

problem *version_make(int dtype, int heads, int kv_heads, int dim, int tokens, int threads) {
    problem *p = (problem *)allocate(sizeof *p);
    const shape s = {heads, kv_heads, dim, tokens, 0};
    problem_make_as(p, (nsa_dtype)dtype, &s, threads);
    p->bytes += p->bytes / 4; /* another version may ask for more */
    free(p->workspace);
    p->workspace = allocate(p->bytes);
    return p;
}

/* Seconds of one pass of one of problem.h's rows; less than 0 if it fails. */
double version_time(problem *p, int row, int backward) {
    double at = seconds();
    nsa_status s = (backward ? backwards : forwards)[row](p);
    return s == NSA_OK ? seconds() - at : -1;
}
