/* reference.h - Native Sparse Attention as the formulas say it, in double, dense and slow.
   Twin: nsa/nsa.h, which every test compares with this file. It shares no code with it and never
   includes it. Not here: views, variable length, slices, threads. One call is one sequence of
   contiguous arrays; tests cut the rest.

   Letters: T tokens, N compressed blocks, J selection blocks, H query heads, Hk key-value heads, G
   = H / Hk. Arrays are row-major in the order that the comment beside them gives. */
#ifndef NSA_TESTS_REFERENCE_H
#define NSA_TESTS_REFERENCE_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- Precision: the same loops are the f64 reference and "the plain algorithm in one dtype" ----
   The plain algorithm of a low precision rounds what it stores and takes its sums in f32; the f64
   reference does neither. */

typedef enum ref_prec { REF_F64, REF_F32, REF_BF16, REF_F16 } ref_prec;

/* x rounded to `bits` significant bits, ties to even, below 2^min_exp to multiples of the smallest
 * subnormal. Of an ordinary number the last bits of its double are rounded off: most of them are
 * ordinary, and ilogb and ldexp take long. */
static inline double ref_round_bits(double x, int bits, int min_exp, double largest) {
    if (fabs(x) > ldexp(2, min_exp) && fabs(x) < largest / 2) {
        const int off = 53 - bits;
        uint64_t u;
        memcpy(&u, &x, 8);
        u += ((uint64_t)1 << (off - 1)) - 1 + (u >> off & 1);
        u = u >> off << off;
        memcpy(&x, &u, 8);
        return x;
    }
    if (x == 0 || !isfinite(x)) return x;
    int exponent = ilogb(x);
    if (exponent < min_exp) exponent = min_exp;
    double ulp = ldexp(1.0, exponent - (bits - 1));
    double y = nearbyint(x / ulp) * ulp;
    return fabs(y) > largest ? copysign(INFINITY, x) : y;
}

static inline double ref_store(ref_prec prec, double x) {
    switch (prec) {
    case REF_F32:
        return (double)(float)x;
    case REF_BF16:
        return ref_round_bits(x, 8, -126, 3.3895313892515355e38);
    case REF_F16:
        return ref_round_bits(x, 11, -14, 65504.0);
    default:
        return x;
    }
}

static inline double ref_sum(ref_prec prec, double x) {
    return prec == REF_F64 ? x : (double)(float)x;
}

static inline void ref_store_all(ref_prec prec, double *x, size_t n) {
    for (size_t i = 0; i < n; i++) x[i] = ref_store(prec, x[i]);
}

/* n zeroed doubles; a test that cannot have them cannot go on. */
static inline double *ref_zeros(size_t n) {
    double *x = (double *)calloc(n ? n : 1, sizeof *x);
    if (!x) {
        fprintf(stderr, "reference: out of memory for %zu doubles\n", n);
        exit(99);
    }
    return x;
}

/* ---- Geometry ---- */

typedef struct ref_desc {
    int tokens, heads, kv_heads, dim, dim_v;
    int cmp_block, cmp_stride, slc_block, slc_count, slc_init, slc_local, window;
    int forced_on_top, score_max, window_before_self; /* options, 0 is the paper */
    int whole_blocks; /* forced_on_top, and blocks that t sees a part of have no score */
    double scale;     /* never 0 here */
    int not_causal;   /* every key is seen, no block forced */
    int list_heads;   /* heads with lists, a multiple of kv_heads */
} ref_desc;

/* Block i exists if all of its tokens do. */
static inline int ref_cmp_count(const ref_desc *d, int tokens) {
    int n = 0;
    while (n * d->cmp_stride + d->cmp_block <= tokens) n++;
    return n;
}

static inline int ref_slc_count(const ref_desc *d, int tokens) {
    int n = 0;
    while (n * d->slc_block < tokens) n++;
    return n;
}

/* Query t sees compressed block i if no token of the block lies after t. */
static inline int ref_cmp_sees(const ref_desc *d, int t, int i) {
    for (int s = i * d->cmp_stride; s < i * d->cmp_stride + d->cmp_block; s++)
        if (s > t && !d->not_causal) return 0;
    return 1;
}

static inline int ref_win_sees(const ref_desc *d, int t, int s) {
    int before = d->window_before_self ? d->window : d->window - 1;
    return (s <= t || (d->not_causal && s <= t + before)) && s >= t - before;
}

/* M(i, j): the tokens that lie in both, counted one by one, in strides. */
static inline int ref_overlap(const ref_desc *d, int i, int j) {
    int shared = 0;
    for (int s = i * d->cmp_stride; s < i * d->cmp_stride + d->cmp_block; s++)
        if (s / d->slc_block == j) shared++;
    return shared / d->cmp_stride;
}

static inline int ref_list_width(const ref_desc *d) {
    int first = d->not_causal ? 0 : d->slc_init;
    int local = d->not_causal && !d->whole_blocks ? 0 : d->slc_local;
    return d->slc_count + (d->forced_on_top ? first + local : 0);
}

/* ---- Masks: mask[T][Hk][keys] is 1 where the query sees the key; slc's has a mask for each head
   with a list ---- */

static inline unsigned char *ref_mask(size_t n) {
    unsigned char *m = (unsigned char *)calloc(n ? n : 1, 1);
    if (!m) exit(99);
    return m;
}

static inline unsigned char *ref_mask_cmp(const ref_desc *d) {
    size_t N = (size_t)ref_cmp_count(d, d->tokens);
    unsigned char *m = ref_mask((size_t)d->tokens * (size_t)d->kv_heads * N);
    for (int t = 0, row = 0; t < d->tokens; t++)
        for (int hk = 0; hk < d->kv_heads; hk++, row++)
            for (size_t i = 0; i < N; i++)
                m[(size_t)row * N + i] = (unsigned char)ref_cmp_sees(d, t, (int)i);
    return m;
}

static inline unsigned char *ref_mask_win(const ref_desc *d) {
    size_t T = (size_t)d->tokens;
    unsigned char *m = ref_mask(T * (size_t)d->kv_heads * T);
    for (int t = 0, row = 0; t < d->tokens; t++)
        for (int hk = 0; hk < d->kv_heads; hk++, row++)
            for (size_t s = 0; s < T; s++)
                m[(size_t)row * T + s] = (unsigned char)ref_win_sees(d, t, (int)s);
    return m;
}

static inline unsigned char *ref_mask_dense(const ref_desc *d) {
    size_t T = (size_t)d->tokens;
    unsigned char *m = ref_mask(T * (size_t)d->kv_heads * T);
    for (int t = 0, row = 0; t < d->tokens; t++)
        for (int hk = 0; hk < d->kv_heads; hk++, row++)
            for (size_t s = 0; s < T; s++)
                if (s <= (size_t)t || d->not_causal) m[(size_t)row * T + s] = 1;
    return m;
}

/* blocks[T][heads with lists][width], -1 where there is none. */
static inline unsigned char *ref_mask_slc(const ref_desc *d, const int32_t *blocks) {
    size_t T = (size_t)d->tokens;
    int width = ref_list_width(d);
    unsigned char *m = ref_mask(T * (size_t)d->list_heads * T);
    for (int t = 0, row = 0; t < d->tokens; t++)
        for (int h = 0; h < d->list_heads; h++, row++)
            for (int slot = 0; slot < width; slot++) {
                int32_t j = blocks[(size_t)row * (size_t)width + (size_t)slot];
                for (int s = 0; j >= 0 && s < d->tokens; s++)
                    if (s / d->slc_block == j && (s <= t || d->not_causal))
                        m[(size_t)row * T + (size_t)s] = 1;
            }
    return m;
}

/* ---- Masked softmax attention ---- */

typedef struct ref_attend {
    ref_prec prec;
    int queries, keys, heads, kv_heads, dim, dim_v;
    double scale;
    const unsigned char *mask; /* [queries][Hk][keys] */
    const double *q;           /* [queries][H][Dk] */
    const double *k, *v;       /* [keys][Hk][Dk], [keys][Hk][Dv] */
    double *out, *lse;         /* [queries][H][Dv], [queries][H] */
    int mask_heads;            /* heads of the mask; 0: kv_heads */
} ref_attend;

typedef struct ref_attend_grad {
    const double *out; /* in: the gradient of out */
    double *q, *k, *v; /* added to */
    const double *lse; /* in: the gradient of lse, or NULL */
} ref_attend_grad;

static inline double ref_dot(ref_prec prec, const double *a, const double *b, int n) {
    double sum = 0;
    for (int c = 0; prec == REF_F64 && c < n; c++) sum += a[c] * b[c];
    for (int c = 0; prec != REF_F64 && c < n; c++) sum = ref_sum(prec, sum + a[c] * b[c]);
    return sum;
}

/* dots[i] = ref_dot(a, rows[i]). Eight at once, because each addition of one of them waits for the
   one before. */
enum { REF_DOTS = 8 };
static inline void ref_dots(ref_prec prec, const double *a, const double *const rows[REF_DOTS],
                            int n, double dots[REF_DOTS]) {
    double sum[REF_DOTS] = {0};
    for (int c = 0; prec == REF_F64 && c < n; c++)
        for (int i = 0; i < REF_DOTS; i++) sum[i] += a[c] * rows[i][c];
    for (int c = 0; prec != REF_F64 && c < n; c++)
        for (int i = 0; i < REF_DOTS; i++) sum[i] = ref_sum(prec, sum[i] + a[c] * rows[i][c]);
    memcpy(dots, sum, sizeof sum);
}

/* y += a x. */
static inline void ref_add(ref_prec prec, double *y, double a, const double *x, int n) {
    for (int c = 0; prec == REF_F64 && c < n; c++) y[c] += a * x[c];
    for (int c = 0; prec != REF_F64 && c < n; c++) y[c] = ref_sum(prec, y[c] + a * x[c]);
}

/* The rows that query t of head h works with. */
typedef struct ref_rows {
    size_t query; /* t H + h */
    size_t head;  /* hk */
    const double *q;
    const unsigned char *mask;
} ref_rows;

static inline ref_rows ref_rows_of(const ref_attend *x, int t, int h) {
    ref_rows r;
    r.query = (size_t)t * (size_t)x->heads + (size_t)h;
    r.head = (size_t)(h / (x->heads / x->kv_heads));
    r.q = x->q + r.query * (size_t)x->dim;
    int masks = x->mask_heads ? x->mask_heads : x->kv_heads;
    r.mask = x->mask + (size_t)(t * masks + h / (x->heads / masks)) * (size_t)x->keys;
    return r;
}

static inline const double *ref_key(const ref_attend *x, const ref_rows *r, int s) {
    return x->k + ((size_t)s * (size_t)x->kv_heads + r->head) * (size_t)x->dim;
}

static inline const double *ref_value(const ref_attend *x, const ref_rows *r, int s) {
    return x->v + ((size_t)s * (size_t)x->kv_heads + r->head) * (size_t)x->dim_v;
}

/* dots[s] = a . row s of the keys or values, of n numbers, for the keys that the mask lets through;
   0 for the others. */
static inline void ref_dots_of_row(const ref_attend *x, const ref_rows *r, const double *a,
                                   const double *first, int n, double *dots) {
    const double *rows[REF_DOTS];
    double some[REF_DOTS];
    int keys[REF_DOTS], count = 0;
    for (int s = 0; s <= x->keys; s++) {
        if (s < x->keys) dots[s] = 0;
        if (s < x->keys && r->mask[s]) {
            rows[count] = first + ((size_t)s * (size_t)x->kv_heads + r->head) * (size_t)n;
            keys[count++] = s;
        }
        if (!count || (count < REF_DOTS && s < x->keys)) continue;
        for (int i = count; i < REF_DOTS; i++) rows[i] = rows[0];
        ref_dots(x->prec, a, rows, n, some);
        while (count) count--, dots[keys[count]] = some[count];
    }
}

/* p[s] = exp(scale q k[s]) / sum, 0 where the mask is. Returns lse; -inf without keys. */
static inline double ref_softmax_row(const ref_attend *x, const ref_rows *r, double *p) {
    double largest = -INFINITY, sum = 0;
    ref_dots_of_row(x, r, r->q, x->k, x->dim, p);
    for (int s = 0; s < x->keys; s++) {
        if (!r->mask[s]) continue;
        p[s] = ref_sum(x->prec, x->scale * p[s]);
        if (p[s] > largest) largest = p[s];
    }
    for (int s = 0; s < x->keys; s++)
        if (r->mask[s]) {
            p[s] = ref_sum(x->prec, exp(p[s] - largest));
            sum = ref_sum(x->prec, sum + p[s]);
        }
    for (int s = 0; s < x->keys; s++)
        if (r->mask[s]) p[s] = ref_sum(x->prec, p[s] / sum);
    return sum == 0 ? -INFINITY : ref_sum(x->prec, largest + log(sum)); /* a NaN stays one */
}

static inline void ref_attend_forward(const ref_attend *x) {
    double *p = ref_zeros((size_t)x->keys);
    for (int t = 0; t < x->queries; t++)
        for (int h = 0; h < x->heads; h++) {
            ref_rows r = ref_rows_of(x, t, h);
            double *out = x->out + r.query * (size_t)x->dim_v;
            x->lse[r.query] = ref_softmax_row(x, &r, p);
            for (int c = 0; c < x->dim_v; c++) out[c] = 0;
            for (int s = 0; s < x->keys; s++)
                if (r.mask[s])
                    ref_add(x->prec, out, ref_store(x->prec, p[s]), ref_value(x, &r, s), x->dim_v);
            ref_store_all(x->prec, out, (size_t)x->dim_v);
            /* A query that reads a NaN, be it in a value, is NaN in all that it gives. */
            for (int c = 0; c < x->dim_v; c++)
                if (isnan(out[c])) x->lse[r.query] = NAN;
        }
    free(p);
}

/* One query of one head: P = softmax, dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)), dQ =
   scale dS K, dK = scale dS^T Q. The plain algorithm takes rowsum(P dP) as dO . O, which is the
   same sum. lse has P as its derivative, so that dS gains P dlse. */
static inline void ref_attend_backward_row(const ref_attend *x, const ref_attend_grad *dx, int t,
                                           int h, double *p, double *dp) {
    ref_rows r = ref_rows_of(x, t, h);
    const double *dout = dx->out + r.query * (size_t)x->dim_v;
    double *dq = dx->q + r.query * (size_t)x->dim;
    ref_softmax_row(x, &r, p);
    double dlse = dx->lse ? dx->lse[r.query] : 0;
    for (int s = 0; s < x->keys && isnan(x->lse[r.query]); s++) p[s] = NAN;
    double delta = ref_dot(x->prec, dout, x->out + r.query * (size_t)x->dim_v, x->dim_v);
    ref_dots_of_row(x, &r, dout, x->v, x->dim_v, dp);
    for (int s = 0; s < x->keys; s++) {
        if (!r.mask[s]) continue;
        const double *k = ref_key(x, &r, s);
        size_t row = (size_t)s * (size_t)x->kv_heads + r.head;
        double *dk = dx->k + row * (size_t)x->dim, *dv = dx->v + row * (size_t)x->dim_v;
        double ds = ref_store(x->prec, ref_sum(x->prec, p[s] * (dp[s] - delta + dlse)));
        ref_add(x->prec, dv, ref_store(x->prec, p[s]), dout, x->dim_v);
        ref_add(x->prec, dq, x->scale * ds, k, x->dim);
        ref_add(x->prec, dk, x->scale * ds, r.q, x->dim);
    }
}

/* x->out must hold what forward wrote. Rounds the gradients once, at the end. */
static inline void ref_attend_backward(const ref_attend *x, const ref_attend_grad *dx) {
    double *p = ref_zeros((size_t)x->keys), *dp = ref_zeros((size_t)x->keys);
    size_t keys = (size_t)x->keys * (size_t)x->kv_heads;
    for (int t = 0; t < x->queries; t++)
        for (int h = 0; h < x->heads; h++) ref_attend_backward_row(x, dx, t, h, p, dp);
    ref_store_all(x->prec, dx->q, (size_t)x->queries * (size_t)x->heads * (size_t)x->dim);
    ref_store_all(x->prec, dx->k, keys * (size_t)x->dim);
    ref_store_all(x->prec, dx->v, keys * (size_t)x->dim_v);
    free(p), free(dp);
}

/* ---- Merge: two softmaxes over disjoint keys as one ---- */

typedef struct ref_merge {
    ref_prec prec;
    int rows, dim_v;
    const double *out[2], *lse[2]; /* [rows][Dv], [rows]; rows are (t, h) */
    double *merged, *merged_lse;
} ref_merge;

typedef struct ref_merge_grad {
    const double *merged, *merged_lse; /* in */
    double *out[2], *lse[2];           /* added to */
} ref_merge_grad;

/* Shares of the parts: exp(lse) of each over the sum of both. */
static inline double ref_merge_shares(const ref_merge *x, int r, double share[2]) {
    double largest = fmax(x->lse[0][r], x->lse[1][r]), sum = 0;
    if (isnan(x->lse[0][r] + x->lse[1][r]) && isnan(largest)) largest = NAN;
    for (int i = 0; i < 2; i++) share[i] = 0;
    if (largest == -INFINITY) return -INFINITY;
    for (int i = 0; i < 2; i++) sum += share[i] = exp(x->lse[i][r] - largest);
    for (int i = 0; i < 2; i++) share[i] /= sum;
    return largest + log(sum);
}

static inline void ref_merge_forward(const ref_merge *x) {
    for (int r = 0; r < x->rows; r++) {
        double share[2];
        x->merged_lse[r] = ref_sum(x->prec, ref_merge_shares(x, r, share));
        for (int c = 0; c < x->dim_v; c++) {
            size_t at = (size_t)r * (size_t)x->dim_v + (size_t)c;
            double sum = 0;
            for (int i = 0; i < 2; i++)
                if (share[i] != 0) sum += ref_sum(x->prec, share[i]) * x->out[i][at];
            x->merged[at] = ref_store(x->prec, sum);
        }
    }
}

/* The Jacobian of the softmax over two numbers, share[i] (1 if i is j, else 0 - share[j]), written
   out for every pair. */
static inline void ref_merge_backward(const ref_merge *x, const ref_merge_grad *dx) {
    for (int r = 0; r < x->rows; r++) {
        double share[2], along[2] = {0, 0};
        ref_merge_shares(x, r, share);
        for (int i = 0; i < 2; i++)
            for (int c = 0; c < x->dim_v && share[i] != 0; c++) {
                size_t at = (size_t)r * (size_t)x->dim_v + (size_t)c;
                along[i] = ref_sum(x->prec, along[i] + dx->merged[at] * x->out[i][at]);
                dx->out[i][at] += ref_store(x->prec, share[i] * dx->merged[at]);
            }
        for (int i = 0; i < 2; i++) {
            if (share[i] == 0) continue;
            double sum = share[i] * dx->merged_lse[r];
            for (int j = 0; j < 2; j++)
                if (share[j] != 0) sum += along[j] * share[j] * ((i == j ? 1 : 0) - share[i]);
            dx->lse[i][r] += ref_sum(x->prec, sum);
        }
    }
}

/* ---- Selection ---- */

/* group[N] += p_cmp of one query of one head over the blocks it sees. */
static inline void ref_p_cmp(const ref_desc *d, int t, int h, const double *q, const double *k_cmp,
                             const double *lse, double *group) {
    size_t query = (size_t)t * (size_t)d->heads + (size_t)h;
    size_t hk = (size_t)(h / (d->heads / d->kv_heads));
    for (int i = 0; i < ref_cmp_count(d, d->tokens); i++) {
        if (!ref_cmp_sees(d, t, i)) continue;
        const double *k = k_cmp + ((size_t)i * (size_t)d->kv_heads + hk) * (size_t)d->dim;
        group[i] +=
            exp(d->scale * ref_dot(REF_F64, q + query * (size_t)d->dim, k, d->dim) - lse[query]);
    }
}

/* scores[T][heads with lists][J]: p_cmp summed over the heads of a list, mapped to selection
   blocks: by overlap, or the largest of the blocks that overlap. lse[T][H] belongs to q and
   k_cmp. */
static inline void ref_scores(const ref_desc *d, const double *q, const double *k_cmp,
                              const double *lse, double *scores) {
    int N = ref_cmp_count(d, d->tokens), J = ref_slc_count(d, d->tokens),
        G = d->heads / d->list_heads;
    double *group = ref_zeros((size_t)N), *overlaps = ref_zeros((size_t)J * (size_t)N);
    for (int j = 0; j < J; j++)
        for (int i = 0; i < N; i++) overlaps[j * N + i] = ref_overlap(d, i, j);
    for (int t = 0; t < d->tokens; t++)
        for (int list = 0; list < d->list_heads; list++) {
            for (int i = 0; i < N; i++) group[i] = 0;
            for (int h = list * G; h < (list + 1) * G; h++)
                ref_p_cmp(d, t, h, q, k_cmp, lse, group);
            for (int j = 0; j < J; j++) {
                double score = 0;
                for (int i = 0; i < N; i++) {
                    double overlap = overlaps[j * N + i];
                    if (!d->score_max)
                        score += overlap * group[i];
                    else if (overlap > 0 && group[i] > score)
                        score = group[i];
                }
                scores[((size_t)t * (size_t)d->list_heads + (size_t)list) * (size_t)J + (size_t)j] =
                    score;
            }
        }
    free(group), free(overlaps);
}

/* Does query t see a token of block j, and does it see all that a block has? */
static inline int ref_slc_sees(const ref_desc *d, int t, int j) {
    int s = j * d->slc_block;
    return s < d->tokens && (s <= t || d->not_causal);
}
static inline int ref_slc_whole(const ref_desc *d, int t, int j) {
    int s = (j + 1) * d->slc_block - 1;
    return s < d->tokens && (s <= t || d->not_causal);
}

/* The blocks that query t may read: those that it sees a token of. */
static inline int ref_candidates(const ref_desc *d, int t) {
    int n = 0;
    while (ref_slc_sees(d, t, n)) n++;
    return n - (d->whole_blocks && !d->slc_local && n > 0 && !ref_slc_whole(d, t, n - 1));
}

/* Is block j forced for query t: one of the first `slc_init`, or of the last `slc_local` up to t's
   own? Where only whole blocks have a score: one that is not. */
static inline int ref_forced(const ref_desc *d, int t, int j) {
    int own = t / d->slc_block;
    if (d->whole_blocks)
        return ref_slc_sees(d, t, j) &&
               (!ref_slc_whole(d, t, j) || (!d->not_causal && j < d->slc_init));
    return !d->not_causal && j <= own && (j < d->slc_init || j > own - d->slc_local);
}

/* Does block a, of score x, go before block b, of score y? */
static inline int ref_before(double x, int a, double y, int b) {
    if (isnan(x) != isnan(y)) return isnan(y);
    if (!isnan(x) && x != y) return x > y;
    return a < b;
}

/* list[width]: forced blocks, then the best of the rest one after the other, written ascending. */
static inline void ref_rank(const ref_desc *d, int t, const double *scores, int32_t *list) {
    int candidates = ref_candidates(d, t);
    int width = ref_list_width(d), forced = 0;
    unsigned char *chosen = ref_mask((size_t)candidates);
    for (int j = 0; j < candidates; j++) forced += chosen[j] = (unsigned char)ref_forced(d, t, j);
    int rest = d->forced_on_top ? d->slc_count : d->slc_count - forced;
    for (int pick = 0; pick < rest; pick++) {
        int best = -1;
        for (int j = 0; j < candidates; j++)
            if (!chosen[j] && (best < 0 || ref_before(scores[j], j, scores[best], best))) best = j;
        if (best >= 0) chosen[best] = 1;
    }
    int slot = 0;
    for (int j = 0; j < candidates; j++)
        if (chosen[j]) list[slot++] = j;
    while (slot < width) list[slot++] = -1;
    free(chosen);
}

/* blocks[T][heads with lists][width] of scores[T][heads with lists][J]. */
static inline void ref_select(const ref_desc *d, const double *scores, int32_t *blocks) {
    int J = ref_slc_count(d, d->tokens), width = ref_list_width(d);
    for (int t = 0, row = 0; t < d->tokens; t++)
        for (int list = 0; list < d->list_heads; list++, row++)
            ref_rank(d, t, scores + (size_t)row * (size_t)J, blocks + (size_t)row * (size_t)width);
}

/* ---- Scores that are no attention ---- */

typedef struct ref_scorer {
    ref_prec prec;
    int relu, mean;        /* of a product; over a block's keys (else their maximum) */
    const double *q, *k;   /* [T][H][D], [T / stride][Hk][D] */
    const double *weights; /* [T][H], or NULL: 1 */
    int stride;            /* tokens that a key stands for: their last must not lie after t */
} ref_scorer;

/* scores[T][heads with lists][J], J blocks of T tokens: for every key that t sees the weighted sum
   over the heads of a list; then over the keys of a block that t sees. -inf where t sees none. */
static inline void ref_token_scores(const ref_desc *d, const ref_scorer *x, double *scores) {
    int J = ref_slc_count(d, d->tokens), G = d->heads / d->list_heads;
    for (int row = 0; row < d->tokens * d->list_heads; row++) {
        int t = row / d->list_heads, list = row % d->list_heads;
        int hk = list / (d->list_heads / d->kv_heads);
        double *of_block = scores + (size_t)row * (size_t)J;
        for (int j = 0; j < J; j++) {
            double sum = 0, largest = -INFINITY;
            int n = 0;
            for (int key = 0; (key + 1) * x->stride <= d->tokens; key++) {
                int first = key * x->stride, last = first + x->stride - 1;
                if (first / d->slc_block != j || (last > t && !d->not_causal)) continue;
                n++;
                double token = 0;
                for (int h = list * G; h < (list + 1) * G; h++) {
                    size_t query = (size_t)(t * d->heads + h);
                    double dot =
                        ref_dot(x->prec, x->q + query * (size_t)d->dim,
                                x->k + (size_t)(key * d->kv_heads + hk) * (size_t)d->dim, d->dim);
                    if (x->relu && dot < 0) dot = 0;
                    token = ref_sum(x->prec, token + (x->weights ? x->weights[query] : 1) * dot);
                }
                sum = ref_sum(x->prec, sum + token);
                if (token > largest) largest = token;
            }
            of_block[j] = !n ? -INFINITY : x->mean ? ref_sum(x->prec, sum / n) : largest;
        }
    }
}

/* Scores of given lists, and their gradient. */
typedef struct ref_lists {
    int width;
    const double *blocks;       /* [T][heads with lists][width], -1 behind the last */
    double *listed;             /* out: likewise; -inf behind the last, and where t sees no key */
    const double *dlisted;      /* NULL: no gradient; else the incoming one */
    double *dq, *dk, *dweights; /* added to; dweights may be NULL */
} ref_lists;

/* The score of key for the heads of a list at t. */
static inline double ref_key_score(const ref_desc *d, const ref_scorer *x, int t, int list,
                                   int key) {
    int G = d->heads / d->list_heads, hk = list / (d->list_heads / d->kv_heads);
    double score = 0;
    for (int h = list * G; h < (list + 1) * G; h++) {
        size_t query = (size_t)(t * d->heads + h);
        double dot = ref_dot(x->prec, x->q + query * (size_t)d->dim,
                             x->k + (size_t)(key * d->kv_heads + hk) * (size_t)d->dim, d->dim);
        if (x->relu && dot < 0) dot = 0;
        score = ref_sum(x->prec, score + (x->weights ? x->weights[query] : 1) * dot);
    }
    return score;
}

/* Adds what a key's score with gradient g brings: score = sum_h w_h act(q_h . k), so dw_h = g act,
   dq_h = g w_h act' k, dk = g sum_h w_h act' q_h. act' of a ReLU is 0 at 0. */
static inline void ref_key_gradient(const ref_desc *d, const ref_scorer *x, const ref_lists *l,
                                    int t, int list, int key, double g) {
    int G = d->heads / d->list_heads, hk = list / (d->list_heads / d->kv_heads);
    size_t D = (size_t)d->dim;
    for (int h = list * G; h < (list + 1) * G; h++) {
        size_t query = (size_t)(t * d->heads + h), row = (size_t)(key * d->kv_heads + hk);
        double dot = ref_dot(x->prec, x->q + query * D, x->k + row * D, d->dim);
        double w = x->weights ? x->weights[query] : 1, slope = x->relu && !(dot > 0) ? 0 : 1;
        if (isnan(g)) slope = 1; /* reaches all that the entry read */
        if (l->dweights)
            l->dweights[query] = ref_sum(x->prec, l->dweights[query] + (slope != 0 ? g * dot : 0));
        for (size_t c = 0; c < D; c++) {
            double *dq = &l->dq[query * D + c], *dk = &l->dk[row * D + c];
            *dq = ref_sum(x->prec, *dq + g * w * slope * x->k[row * D + c]);
            *dk = ref_sum(x->prec, *dk + g * w * slope * x->q[query * D + c]);
        }
    }
}

/* Entry i of a list: the maximum, whose gradient goes to the first key that has it, or the mean
   over the keys of the block that t sees. An entry that reads a value that is not finite is NaN,
   and so is all that its gradient reaches. */
static inline void ref_list_entry(const ref_desc *d, const ref_scorer *x, const ref_lists *l, int t,
                                  int list, size_t at) {
    int G = d->heads / d->list_heads, hk = list / (d->list_heads / d->kv_heads);
    int j = (int)l->blocks[at], n = 0, best = -1, begin = -1;
    double sum = 0, largest = -INFINITY, bad = 0;
    l->listed[at] = -INFINITY;
    for (int key = 0; j >= 0 && (key + 1) * x->stride <= d->tokens; key++) {
        int first = key * x->stride, last = first + x->stride - 1;
        if (first / d->slc_block != j || (last > t && !d->not_causal)) continue;
        double score = ref_key_score(d, x, t, list, key);
        if (!n++) begin = key;
        if (!isfinite(score)) bad = NAN;
        sum = ref_sum(x->prec, sum + score);
        if (score > largest) largest = score, best = key;
        for (int h = 0; h < G; h++) /* a ReLU hides what is not finite below 0 */
            for (int c = 0; c < d->dim; c++)
                if (!isfinite(x->q[(size_t)((t * d->heads + list * G + h) * d->dim + c)]) ||
                    !isfinite(x->k[(size_t)((key * d->kv_heads + hk) * d->dim + c)]))
                    bad = NAN;
    }
    if (!n) return;
    l->listed[at] = bad + (x->mean ? ref_sum(x->prec, sum / n) : largest);
    if (!l->dlisted) return;
    double g = l->dlisted[at] + bad;
    for (int key = begin; key < begin + n; key++)
        if (x->mean || key == best || isnan(g))
            ref_key_gradient(d, x, l, t, list, key, x->mean ? g / n : g);
}

static inline void ref_listed_scores(const ref_desc *d, const ref_scorer *x, const ref_lists *l) {
    for (int row = 0; row < d->tokens * d->list_heads; row++)
        for (int i = 0; i < l->width; i++)
            ref_list_entry(d, x, l, row / d->list_heads, row % d->list_heads,
                           (size_t)row * (size_t)l->width + (size_t)i);
}

/* ---- RoPE ---- */

typedef struct ref_rope {
    ref_prec prec;
    int rows, heads, dim;
    const int32_t *positions; /* [rows] */
    double base;
    int halves; /* pairs (x[i], x[i + D/2]) instead of (x[2i], x[2i + 1]) */
    enum {
        REF_ROPE_NONE,
        REF_ROPE_LINEAR,
        REF_ROPE_NTK,
        REF_ROPE_YARN,
        REF_ROPE_DYNAMIC,
        REF_ROPE_LLAMA3,
        REF_ROPE_LONGROPE
    } scaling;
    double factor, trained_context, fast, slow, context;
    int untruncated;
    double magnitude, mscale, mscale_all_dim; /* 0: not given */
    const double *short_factors, *long_factors, *frequencies;
} ref_rope;

/* How often pair i turns round over the trained context, before any scaling. */
static inline double ref_rope_turns(const ref_rope *r, int i) {
    return r->trained_context * pow(r->base, -2.0 * i / r->dim) / (2 * acos(-1.0));
}

/* The place among the pairs, not a whole number, of the pair that would turn so often: pairs lie
   evenly in the logarithm of their turns. */
static inline double ref_rope_place(const ref_rope *r, double turns) {
    double first = log(ref_rope_turns(r, 0)), second = log(ref_rope_turns(r, 1));
    return (first - log(turns)) / (first - second);
}

/* YaRN as its authors' code has it (the paper's ramp runs over turns, that of the code, which
   models were trained with, over pair numbers): from the last pair of at least `fast` turns,
   unchanged, to the first of at most `slow`, fully slowed. Returns how much pair i is slowed, 0 to
   1. The code takes the ends as they come, whichever is larger. */
static inline double ref_rope_yarn_ramp(const ref_rope *r, int i) {
    double low = ref_rope_place(r, r->fast), high = ref_rope_place(r, r->slow);
    if (!r->untruncated) low = floor(low), high = ceil(high);
    low = fmax(low, 0), high = fmin(high, r->dim - 1);
    if (high == low) high = low + 0.001;
    return fmin(fmax((i - low) / (high - low), 0), 1);
}

/* Meta's code for Llama 3.1 speaks of wavelengths, in tokens. */
static inline double ref_rope_llama3(const ref_rope *r, double frequency) {
    double wavelength = 2 * acos(-1.0) / frequency;
    double longest = r->trained_context / r->slow, shortest = r->trained_context / r->fast;
    if (wavelength < shortest) return frequency;
    if (wavelength > longest) return frequency / r->factor;
    double smooth = (r->trained_context / wavelength - r->slow) / (r->fast - r->slow);
    return (1 - smooth) * frequency / r->factor + smooth * frequency;
}

static inline double ref_rope_magnitude(const ref_rope *r) {
    if (r->magnitude != 0) return r->magnitude;
    if (r->frequencies) return 1;
    if (r->scaling == REF_ROPE_LONGROPE) return sqrt(1 + log(r->factor) / log(r->trained_context));
    if (r->scaling != REF_ROPE_YARN) return 1;
    if (r->mscale != 0 && r->mscale_all_dim != 0)
        return (1 + 0.1 * r->mscale * log(r->factor)) /
               (1 + 0.1 * r->mscale_all_dim * log(r->factor));
    return 1 + 0.1 * log(r->factor);
}

/* Radians a token for pair i; *stretch is what the rotated row is multiplied by. */
static inline double ref_rope_frequency(const ref_rope *r, int i, double *stretch) {
    double D = r->dim, base = r->base;
    *stretch = ref_rope_magnitude(r);
    if (r->frequencies) return r->frequencies[i];
    if (r->scaling == REF_ROPE_NTK) base *= pow(r->factor, D / (D - 2));
    if (r->scaling == REF_ROPE_DYNAMIC)
        base *= pow(r->factor * fmax(r->context, r->trained_context) / r->trained_context -
                        (r->factor - 1),
                    D / (D - 2));
    double frequency = pow(base, -2.0 * i / D);
    if (r->scaling == REF_ROPE_LINEAR) frequency /= r->factor;
    if (r->scaling == REF_ROPE_LLAMA3) frequency = ref_rope_llama3(r, frequency);
    if (r->scaling == REF_ROPE_LONGROPE)
        frequency /= r->context > r->trained_context ? r->long_factors[i] : r->short_factors[i];
    if (r->scaling == REF_ROPE_YARN) {
        double slowed = ref_rope_yarn_ramp(r, i);
        frequency = (1 - slowed) * frequency + slowed * frequency / r->factor;
    }
    return frequency;
}

/* out[rows][heads][dim]; sign 1 rotates, -1 rotates back (the transpose: what a gradient needs). */
static inline void ref_rope_rotate(const ref_rope *r, int sign, const double *x, double *out) {
    for (int t = 0; t < r->rows; t++)
        for (int h = 0; h < r->heads; h++)
            for (int i = 0; i < r->dim / 2; i++) {
                size_t row = ((size_t)t * (size_t)r->heads + (size_t)h) * (size_t)r->dim;
                size_t a = row + (size_t)(r->halves ? i : 2 * i);
                size_t b = row + (size_t)(r->halves ? i + r->dim / 2 : 2 * i + 1);
                double stretch, angle = r->positions[t] * ref_rope_frequency(r, i, &stretch);
                double c = stretch * cos(angle), s = sign * stretch * sin(angle), xa = x[a],
                       xb = x[b];
                out[a] = ref_store(r->prec, xa * c - xb * s);
                out[b] = ref_store(r->prec, xa * s + xb * c);
            }
}

/* ---- Compression ---- */

typedef struct ref_compress {
    ref_prec prec;
    enum { REF_MEAN, REF_CONV, REF_MLP } phi;
    int tokens, heads, dim, hidden, cmp_block, cmp_stride;
    int shared; /* one set of parameters for all heads: then [1][..] below instead of [heads][..] */
    const double *x;   /* [T][heads][D] */
    double *out;       /* [N][heads][D] */
    const double *pos; /* mlp: [heads][l][D], or NULL */
    const double *w1;  /* conv: [heads][l][D]; mlp: [heads][hidden][l D] */
    const double *b1;  /* conv: [heads][D]; mlp: [heads][hidden]; or NULL */
    const double *w2;  /* mlp: [heads][D][hidden] */
    const double *b2;  /* mlp: [heads][D], or NULL */
} ref_compress;

typedef struct ref_compress_grad {
    const double *out;                   /* in */
    double *x, *pos, *w1, *b1, *w2, *b2; /* added to; NULL where the parameter is */
} ref_compress_grad;

/* Where block i of head h finds row j of its input, and head h its parameters of `size` numbers a
 * head. */
static inline size_t ref_compress_row(const ref_compress *x, int i, int j, int h) {
    return ((size_t)(i * x->cmp_stride + j) * (size_t)x->heads + (size_t)h) * (size_t)x->dim;
}

static inline size_t ref_compress_param(const ref_compress *x, int h, int size) {
    return x->shared ? 0 : (size_t)h * (size_t)size;
}

/* input[l D] = the rows of block i (+ pos), flattened. */
static inline void ref_compress_gather(const ref_compress *x, int i, int h, double *input) {
    for (int j = 0; j < x->cmp_block; j++)
        for (int c = 0; c < x->dim; c++) {
            double p = x->pos ? x->pos[ref_compress_param(x, h, x->cmp_block * x->dim) +
                                       (size_t)(j * x->dim + c)]
                              : 0;
            input[j * x->dim + c] =
                ref_sum(x->prec, x->x[ref_compress_row(x, i, j, h) + (size_t)c] + p);
        }
}

/* before[hidden] = w1 input + b1: the hidden layer before its SiLU. */
static inline void ref_compress_hidden(const ref_compress *x, int h, const double *input,
                                       double *before) {
    int width = x->cmp_block * x->dim;
    const double *w1 = x->w1 + ref_compress_param(x, h, x->hidden * width);
    for (int m = 0; m < x->hidden; m++) {
        double b = x->b1 ? x->b1[ref_compress_param(x, h, x->hidden) + (size_t)m] : 0;
        before[m] =
            ref_sum(x->prec, ref_dot(x->prec, w1 + (size_t)m * (size_t)width, input, width) + b);
    }
}

static inline double ref_sigmoid(double x) {
    return 1 / (1 + exp(-x));
}

static inline void ref_compress_block(const ref_compress *x, int i, int h, double *input,
                                      double *before, double *out) {
    int width = x->cmp_block * x->dim;
    ref_compress_gather(x, i, h, input);
    if (x->phi == REF_MLP) ref_compress_hidden(x, h, input, before);
    for (int c = 0; c < x->dim; c++) {
        double sum = 0;
        for (int j = 0; x->phi == REF_MEAN && j < x->cmp_block; j++)
            sum = ref_sum(x->prec, sum + input[j * x->dim + c] / x->cmp_block);
        for (int j = 0; x->phi == REF_CONV && j < x->cmp_block; j++)
            sum = ref_sum(
                x->prec,
                sum + input[j * x->dim + c] *
                          x->w1[ref_compress_param(x, h, width) + (size_t)(j * x->dim + c)]);
        if (x->phi == REF_CONV && x->b1) sum += x->b1[ref_compress_param(x, h, x->dim) + (size_t)c];
        for (int m = 0; x->phi == REF_MLP && m < x->hidden; m++)
            sum = ref_sum(x->prec, sum + before[m] * ref_sigmoid(before[m]) *
                                             x->w2[ref_compress_param(x, h, x->dim * x->hidden) +
                                                   (size_t)(c * x->hidden + m)]);
        if (x->phi == REF_MLP && x->b2) sum += x->b2[ref_compress_param(x, h, x->dim) + (size_t)c];
        out[c] = ref_store(x->prec, sum);
    }
}

static inline int ref_compress_count(const ref_compress *x) {
    ref_desc d = {0};
    d.cmp_block = x->cmp_block;
    d.cmp_stride = x->cmp_stride;
    return ref_cmp_count(&d, x->tokens);
}

static inline void ref_compress_forward(const ref_compress *x) {
    double *input = ref_zeros((size_t)x->cmp_block * (size_t)x->dim),
           *before = ref_zeros((size_t)x->hidden);
    for (int i = 0; i < ref_compress_count(x); i++)
        for (int h = 0; h < x->heads; h++)
            ref_compress_block(x, i, h, input, before,
                               x->out +
                                   ((size_t)i * (size_t)x->heads + (size_t)h) * (size_t)x->dim);
    free(input);
    free(before);
}

/* dinput[l D] of one block from dout[D]; adds to the parameters' gradients. */
static inline void ref_compress_linear_backward(const ref_compress *x, const ref_compress_grad *dx,
                                                int h, const double *input, const double *dout,
                                                double *dinput) {
    size_t at = ref_compress_param(x, h, x->cmp_block * x->dim);
    for (int j = 0; j < x->cmp_block; j++)
        for (int c = 0; c < x->dim; c++) {
            size_t jc = (size_t)(j * x->dim + c);
            dinput[jc] = x->phi == REF_MEAN ? dout[c] / x->cmp_block : x->w1[at + jc] * dout[c];
            if (x->phi == REF_CONV)
                dx->w1[at + jc] = ref_sum(x->prec, dx->w1[at + jc] + input[jc] * dout[c]);
        }
    for (int c = 0; x->phi == REF_CONV && dx->b1 && c < x->dim; c++) {
        double *b = &dx->b1[ref_compress_param(x, h, x->dim) + (size_t)c];
        *b = ref_sum(x->prec, *b + dout[c]);
    }
}

/* out = w2 a + b2, a = silu(u), u = w1 input + b1: da = w2^T dout, du = da silu'(u), silu'(u) =
   sigmoid(u) (1 + u (1 - sigmoid(u))), dinput = w1^T du. */
static inline void ref_compress_mlp_backward(const ref_compress *x, const ref_compress_grad *dx,
                                             int h, const double *input, const double *before,
                                             const double *dout, double *dinput) {
    size_t width = (size_t)(x->cmp_block * x->dim);
    size_t at1 = ref_compress_param(x, h, x->hidden * (int)width),
           at2 = ref_compress_param(x, h, x->dim * x->hidden);
    size_t atm = ref_compress_param(x, h, x->hidden), atc = ref_compress_param(x, h, x->dim);
    for (size_t jc = 0; jc < width; jc++) dinput[jc] = 0;
    for (int c = 0; dx->b2 && c < x->dim; c++) dx->b2[atc + (size_t)c] += dout[c];
    for (int m = 0; m < x->hidden; m++) {
        double u = before[m], s = ref_sigmoid(u), da = 0;
        for (int c = 0; c < x->dim; c++) {
            size_t cm = at2 + (size_t)(c * x->hidden + m);
            da = ref_sum(x->prec, da + x->w2[cm] * dout[c]);
            dx->w2[cm] = ref_sum(x->prec, dx->w2[cm] + dout[c] * u * s);
        }
        double du = ref_sum(x->prec, da * s * (1 + u * (1 - s)));
        if (dx->b1) dx->b1[atm + (size_t)m] = ref_sum(x->prec, dx->b1[atm + (size_t)m] + du);
        for (size_t jc = 0; jc < width; jc++) {
            size_t w = at1 + (size_t)m * width + jc;
            dx->w1[w] = ref_sum(x->prec, dx->w1[w] + du * input[jc]);
            dinput[jc] = ref_sum(x->prec, dinput[jc] + du * x->w1[w]);
        }
    }
}

static inline void ref_compress_store_grad(const ref_compress *x, const ref_compress_grad *dx) {
    size_t sets = x->shared ? 1 : (size_t)x->heads, width = (size_t)(x->cmp_block * x->dim);
    size_t hidden = (size_t)x->hidden, D = (size_t)x->dim;
    int mlp = x->phi == REF_MLP;
    ref_store_all(x->prec, dx->x, (size_t)x->tokens * (size_t)x->heads * D);
    if (dx->pos) ref_store_all(x->prec, dx->pos, sets * width);
    if (dx->w1) ref_store_all(x->prec, dx->w1, sets * width * (mlp ? hidden : 1));
    if (dx->b1) ref_store_all(x->prec, dx->b1, sets * (mlp ? hidden : D));
    if (dx->w2) ref_store_all(x->prec, dx->w2, sets * D * hidden);
    if (dx->b2) ref_store_all(x->prec, dx->b2, sets * D);
}

static inline void ref_compress_backward(const ref_compress *x, const ref_compress_grad *dx) {
    size_t width = (size_t)x->cmp_block * (size_t)x->dim;
    double *input = ref_zeros(width), *dinput = ref_zeros(width),
           *before = ref_zeros((size_t)x->hidden);
    for (int i = 0; i < ref_compress_count(x); i++)
        for (int h = 0; h < x->heads; h++) {
            const double *dout =
                dx->out + ((size_t)i * (size_t)x->heads + (size_t)h) * (size_t)x->dim;
            ref_compress_gather(x, i, h, input);
            if (x->phi == REF_MLP) {
                ref_compress_hidden(x, h, input, before);
                ref_compress_mlp_backward(x, dx, h, input, before, dout, dinput);
            } else {
                ref_compress_linear_backward(x, dx, h, input, dout, dinput);
            }
            for (int j = 0; j < x->cmp_block; j++)
                for (int c = 0; c < x->dim; c++) {
                    size_t to = ref_compress_row(x, i, j, h) + (size_t)c,
                           jc = (size_t)(j * x->dim + c);
                    dx->x[to] = ref_sum(x->prec, dx->x[to] + dinput[jc]);
                    if (dx->pos) dx->pos[ref_compress_param(x, h, (int)width) + jc] += dinput[jc];
                }
        }
    ref_compress_store_grad(x, dx);
    free(input);
    free(dinput);
    free(before);
}

/* ---- Gate ---- */

typedef enum ref_gate_kind { REF_SIGMOID, REF_SOFTMAX, REF_GIVEN } ref_gate_kind;

typedef struct ref_gate {
    ref_prec prec;
    ref_gate_kind kind;
    int rows, heads, gate_heads, dim_v;
    const double *logits;    /* [rows][gate_heads][3] */
    const double *branch[3]; /* cmp, slc, win: [rows][H][Dv] */
    double *out;             /* [rows][H][Dv] */
} ref_gate;

typedef struct ref_gate_grad {
    const double *out;          /* in */
    double *logits, *branch[3]; /* added to */
} ref_gate_grad;

static inline void ref_gates(ref_gate_kind kind, const double *logits, double *g) {
    double largest = fmax(logits[0], fmax(logits[1], logits[2])), sum = 0;
    for (int b = 0; b < 3; b++) sum += exp(logits[b] - largest);
    for (int b = 0; b < 3; b++)
        g[b] = kind == REF_SIGMOID   ? ref_sigmoid(logits[b])
               : kind == REF_SOFTMAX ? exp(logits[b] - largest) / sum
                                     : logits[b];
}

static inline void ref_gate_forward(const ref_gate *x) {
    for (int t = 0; t < x->rows; t++)
        for (int h = 0; h < x->heads; h++) {
            double g[3];
            int gate = h / (x->heads / x->gate_heads);
            ref_gates(x->kind, x->logits + (t * x->gate_heads + gate) * 3, g);
            for (int c = 0; c < x->dim_v; c++) {
                size_t at =
                    ((size_t)t * (size_t)x->heads + (size_t)h) * (size_t)x->dim_v + (size_t)c;
                x->out[at] = ref_store(x->prec, g[0] * x->branch[0][at] + g[1] * x->branch[1][at] +
                                                    g[2] * x->branch[2][at]);
            }
        }
}

/* dlogits[3] from dg[3]: the Jacobian of each kind, written out. */
static inline void ref_gates_backward(ref_gate_kind kind, const double *g, const double *dg,
                                      double *dlogits) {
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++) {
            double same = a == b ? 1 : 0;
            double jacobian = kind == REF_SIGMOID   ? same * g[a] * (1 - g[a])
                              : kind == REF_SOFTMAX ? g[b] * (same - g[a])
                                                    : same;
            dlogits[a] += jacobian * dg[b];
        }
}

static inline void ref_gate_backward(const ref_gate *x, const ref_gate_grad *dx) {
    size_t n = (size_t)x->rows * (size_t)x->heads * (size_t)x->dim_v;
    for (int t = 0; t < x->rows; t++)
        for (int h = 0; h < x->heads; h++) {
            double g[3], dg[3] = {0, 0, 0};
            int gate = t * x->gate_heads + h / (x->heads / x->gate_heads);
            ref_gates(x->kind, x->logits + gate * 3, g);
            for (int c = 0; c < x->dim_v; c++)
                for (int b = 0; b < 3; b++) {
                    size_t at =
                        ((size_t)t * (size_t)x->heads + (size_t)h) * (size_t)x->dim_v + (size_t)c;
                    dg[b] = ref_sum(x->prec, dg[b] + x->branch[b][at] * dx->out[at]);
                    dx->branch[b][at] += g[b] * dx->out[at];
                }
            ref_gates_backward(x->kind, g, dg, dx->logits + gate * 3);
        }
    for (int b = 0; b < 3; b++) ref_store_all(x->prec, dx->branch[b], n);
    ref_store_all(x->prec, dx->logits, (size_t)x->rows * (size_t)x->gate_heads * 3);
}

/* ---- The whole: compress, cmp, select, slc, win, gate ---- */

typedef struct ref_attention {
    ref_prec prec;
    ref_gate_kind gate;
    int gate_heads;
    const double *q;           /* [T][H][Dk] */
    ref_compress k_cmp, v_cmp; /* x and parameters set by the caller, out allocated by him */
    const double *k_slc, *v_slc, *k_win, *v_win; /* [T][Hk][..] */
    const double *gates;                         /* [T][gate_heads][3] */
    int32_t *blocks; /* [T][Hk][width]: read if blocks_given, else written */
    int blocks_given;
    double *branch[3], *lse[3]; /* cmp, slc, win: [T][H][Dv], [T][H] */
    double *out;                /* [T][H][Dv] */
} ref_attention;

typedef struct ref_attention_grad {
    const double *out;
    double *q, *k_slc, *v_slc, *k_win, *v_win, *gates;
    ref_compress_grad k_cmp, v_cmp; /* their out is not used */
} ref_attention_grad;

/* Branch 0 cmp, 1 slc, 2 win as a masked attention; the mask is the caller's to free. */
static inline ref_attend ref_attention_branch(const ref_attention *x, const ref_desc *d,
                                              int branch) {
    ref_attend a = {0};
    a.prec = x->prec;
    a.queries = d->tokens;
    a.keys = branch == 0 ? ref_cmp_count(d, d->tokens) : d->tokens;
    a.heads = d->heads;
    a.kv_heads = d->kv_heads;
    a.dim = d->dim;
    a.dim_v = d->dim_v;
    a.scale = d->scale;
    a.mask = branch == 0   ? ref_mask_cmp(d)
             : branch == 1 ? ref_mask_slc(d, x->blocks)
                           : ref_mask_win(d);
    a.mask_heads = branch == 1 ? d->list_heads : 0;
    a.q = x->q;
    a.k = branch == 0 ? x->k_cmp.out : branch == 1 ? x->k_slc : x->k_win;
    a.v = branch == 0 ? x->v_cmp.out : branch == 1 ? x->v_slc : x->v_win;
    a.out = x->branch[branch];
    a.lse = x->lse[branch];
    return a;
}

static inline ref_gate ref_attention_gate(const ref_attention *x, const ref_desc *d) {
    ref_gate g = {0};
    g.prec = x->prec;
    g.kind = x->gate;
    g.rows = d->tokens;
    g.heads = d->heads;
    g.gate_heads = x->gate_heads;
    g.dim_v = d->dim_v;
    g.logits = x->gates;
    for (int b = 0; b < 3; b++) g.branch[b] = x->branch[b];
    g.out = x->out;
    return g;
}

static inline void ref_attention_forward(const ref_attention *x, const ref_desc *d) {
    ref_compress_forward(&x->k_cmp);
    ref_compress_forward(&x->v_cmp);
    for (int branch = 0; branch < 3; branch++) {
        ref_attend a = ref_attention_branch(x, d, branch);
        ref_attend_forward(&a);
        free((void *)a.mask);
        if (branch == 0 && !x->blocks_given) {
            double *scores = ref_zeros((size_t)d->tokens * (size_t)d->list_heads *
                                       (size_t)ref_slc_count(d, d->tokens));
            ref_scores(d, x->q, x->k_cmp.out, x->lse[0], scores);
            ref_select(d, scores, x->blocks);
            free(scores);
        }
    }
    ref_gate g = ref_attention_gate(x, d);
    ref_gate_forward(&g);
}

static inline void ref_attention_backward(const ref_attention *x, const ref_desc *d,
                                          const ref_attention_grad *dx) {
    size_t rows = (size_t)d->tokens * (size_t)d->heads;
    size_t cmp_rows = (size_t)ref_cmp_count(d, d->tokens) * (size_t)d->kv_heads;
    double *dk_cmp = ref_zeros(cmp_rows * (size_t)d->dim),
           *dv_cmp = ref_zeros(cmp_rows * (size_t)d->dim_v);
    double *dbranch[3], *dk[3] = {dk_cmp, dx->k_slc, dx->k_win},
                        *dv[3] = {dv_cmp, dx->v_slc, dx->v_win};
    for (int b = 0; b < 3; b++) dbranch[b] = ref_zeros(rows * (size_t)d->dim_v);

    ref_gate g = ref_attention_gate(x, d);
    ref_gate_grad dg = {dx->out, dx->gates, {dbranch[0], dbranch[1], dbranch[2]}};
    ref_gate_backward(&g, &dg);
    for (int branch = 0; branch < 3; branch++) {
        ref_attend a = ref_attention_branch(x, d, branch);
        ref_attend_grad da = {dbranch[branch], dx->q, dk[branch], dv[branch], NULL};
        ref_attend_backward(&a, &da);
        free((void *)a.mask);
    }
    ref_compress_grad k = dx->k_cmp, v = dx->v_cmp;
    k.out = dk_cmp;
    v.out = dv_cmp;
    ref_compress_backward(&x->k_cmp, &k);
    ref_compress_backward(&x->v_cmp, &v);
    free(dk_cmp);
    free(dv_cmp);
    for (int b = 0; b < 3; b++) free(dbranch[b]);
}

#endif
