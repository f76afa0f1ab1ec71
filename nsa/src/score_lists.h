/* ---- Scores of given lists, and their gradient -----------------------------------------------
   Twin: kernels/score_lists.cuh. Not here: scores of all blocks (score.h).
   of_key[i] = sum_g w[g] act(s[g][i]), s[g][i] = q[g] . k[i], for the heads g of a list; a block's
   score is the maximum or the mean over those of its keys that t sees. Tasks of queries own rows of
   dq and dweights, tasks of keys rows of dk. Both compute s anew: nothing as large as the lists is
   kept. */
#pragma once
#include "score.h"

enum { NSA__LISTED_QUERIES = 8, NSA__LISTED_KEYS = 64 }; /* of a task; keys in whole blocks */

/* A call; in a task its scratch, the query and the block at hand. */
typedef struct nsa__listed {
    const nsa_score *x, *dx; /* dx NULL: forward */
    const nsa_desc *d;
    nsa__operand row; /* of q and k, as numbers */
    nsa__seq seq;
    int group, wide, block, keys, width; /* heads of a list; numbers of a row; keys of a block, of a
                                            task; entries */
    int64_t query_tasks;
    nsa_real *q, *weights, *dq, *dweights, *k, *s, *of_key, *dk;
    nsa_real *scores;               /* of the list, or their gradients */
    nsa_real score;                 /* of the block */
    int bad_query, bad, seen, best; /* something is not finite; keys seen, the first of the best */
} nsa__listed;

static void nsa__listed_alloc(nsa__listed *f, nsa__arena *a) {
    const int64_t group = f->group, wide = f->wide;
    nsa_real **const parts[] = {&f->q,  &f->dq, &f->weights, &f->dweights, &f->k,
                                &f->dk, &f->s,  &f->of_key,  &f->scores};
    /* A call of larger blocks has the size of this one: these may fill the task better. */
    const int64_t keys = nsa__max(f->keys, NSA__LISTED_KEYS);
    const int64_t sizes[] = {group * wide, group * wide,     group,    group,   f->block * wide,
                             keys * wide,  group * f->block, f->block, f->width};
    for (int i = 0; i < 9; i++) *parts[i] = nsa__alloc_reals(a, sizes[i]);
}

/* Keys are tokens, or rows of several. */
static void *nsa__listed_key(const nsa__listed *f, const nsa_tensor *k, int64_t key, int kv_head) {
    return nsa__key_row(f->d->cmp_stride > 1 ? &f->seq.cmp : &f->seq.keys, k, key, kv_head);
}

static void nsa__listed_query(nsa__listed *f, int64_t row, int list) {
    const nsa_tensor *q = &f->x->q, *weights = &f->x->weights;
    memset(f->dq, 0, (size_t)f->group * (size_t)f->wide * sizeof *f->dq);
    memset(f->dweights, 0, (size_t)f->group * sizeof *f->dweights);
    f->bad_query = 0;
    for (int g = 0; g < f->group; g++) {
        const int head = list * f->group + g;
        f->bad_query |= !nsa__copy_operand(&f->row, f->q + (ptrdiff_t)g * f->wide, q,
                                           nsa__row(q, f->seq.batch, row, head));
        f->weights[g] = 1;
        if (weights->data)
            nsa__load(&f->weights[g], weights->dtype, nsa__row(weights, f->seq.batch, row, head),
                      1);
        if (nsa__is_finite((double)f->weights[g])) continue;
        f->weights[g] = 0;
        f->bad_query = 1;
    }
}

/* Scores block j for the query at hand; 0 if t sees none of its keys. */
static int nsa__listed_block(nsa__listed *f, int64_t t, int kv_head, int64_t j) {
    const int visible = nsa__cmp_visible(f->d, f->seq.tokens, f->seq.first + (int)t);
    const int n = f->seen = (int)nsa__max(0, nsa__min(f->block, visible - j * f->block));
    const int mean = f->x->pool == NSA_POOL_MEAN;
    if (n == 0) return 0;
    f->bad = f->bad_query;
    for (int i = 0; i < n; i++)
        f->bad |= !nsa__copy_operand(&f->row, f->k + (ptrdiff_t)i * f->wide, &f->x->k,
                                     nsa__listed_key(f, &f->x->k, j * f->block + i, kv_head));
    memset(f->of_key, 0, (size_t)n * sizeof *f->of_key);
    for (int g = 0; g < f->group; g++) {
        nsa_real *s = f->s + (ptrdiff_t)g * f->block;
        for (int i = 0; i < n; i++)
            s[i] = nsa__dot(f->q + (ptrdiff_t)g * f->wide, f->k + (ptrdiff_t)i * f->wide, f->wide);
        nsa__scorer_add_head(f->of_key, s, n, f->weights[g], f->x->act);
    }
    f->score = mean ? 0 : NSA__LOWEST;
    nsa__scorer_pool(&f->score, f->of_key, 0, n, 0, f->x->pool);
    for (f->best = 0; f->best < n - 1 && f->of_key[f->best] < f->score;) f->best++;
    f->score = f->bad ? nsa__nan() : mean ? f->score / (nsa_real)n : f->score;
    return 1;
}

/* score = mean over i, or the one of the best i, of sum_g w_g act(q_g . k_i). With s = q_g . k_i:
     dw_g += dscore act(s) / n,   dq_g += dscore w_g act'(s) k_i / n,   dk_i += the same of q_g
   A value that is not finite reaches all that the block read. Adds to dk, or to dq and dw. */
NSA__COMPILED static void nsa__listed_gradient(const nsa__listed *f, nsa_real dscore,
                                               nsa_real *dk) {
    const int bad = f->bad || !nsa__is_finite((double)dscore), mean = f->x->pool == NSA_POOL_MEAN;
    const int begin = bad || mean ? 0 : f->best, end = bad || mean ? f->seen : f->best + 1;
    const nsa_real each = bad ? nsa__nan() : mean ? dscore / (nsa_real)f->seen : dscore;
    for (int g = 0; g < f->group; g++)
        for (int i = begin; i < end; i++) {
            const nsa_real s = f->s[(ptrdiff_t)g * f->block + i], ds = each * f->weights[g];
            nsa_real *q = f->q + (ptrdiff_t)g * f->wide, *k = f->k + (ptrdiff_t)i * f->wide;
            nsa_real *sum = dk ? dk + (ptrdiff_t)i * f->wide : f->dq + (ptrdiff_t)g * f->wide;
            if (!bad && f->x->act == NSA_SCORE_RELU && !(s > 0)) continue;
            f->dweights[g] += each * s;
            for (int c = 0; c < f->wide; c++) sum[c] += ds * (dk ? q : k)[c];
        }
}

/* Blocks begin .. end - 1 of a list: their scores, or what their gradients add. */
static void nsa__listed_list(nsa__listed *f, int64_t t, int head, int begin, int end,
                             nsa_real *dk) {
    const int64_t batch = f->seq.batch, row = f->seq.row + t;
    const int32_t *list = (const int32_t *)nsa__row(&f->x->blocks, batch, row, head);
    const nsa_tensor *scores = f->dx ? &f->dx->scores : &f->x->scores;
    const int kv_head = head / (nsa__list_heads(f->d) / f->d->kv_heads);
    int i = nsa__first_listed(list, f->width, begin);
    if (dk && (i == f->width || (uint32_t)list[i] >= (uint32_t)end)) return;
    nsa__listed_query(f, row, head);
    for (int n = 0; n < f->width; n++) f->scores[n] = nsa__minus_infinity();
    if (f->dx) nsa__load(f->scores, scores->dtype, nsa__row(scores, batch, row, head), f->width);
    for (; i < f->width && (uint32_t)list[i] < (uint32_t)end; i++) {
        if (!nsa__listed_block(f, t, kv_head, list[i])) continue;
        if (f->dx)
            nsa__listed_gradient(f, f->scores[i],
                                 dk ? dk + (ptrdiff_t)(list[i] - begin) * f->block * f->wide
                                    : NULL);
        else
            f->scores[i] = f->score;
    }
    if (!f->dx) nsa__store(scores->dtype, nsa__row(scores, batch, row, head), f->scores, f->width);
}

/* Some queries, or behind all of them the keys of some blocks, of one kv head. */
static void nsa__listed_task(const void *context, int64_t nth, void *scratch) {
    nsa__listed f = *(const nsa__listed *)context;
    const nsa_score *dx = f.dx;
    const int kv_heads = f.d->kv_heads, lists = nsa__list_heads(f.d), of_head = lists / kv_heads;
    const int64_t task = nth - f.query_tasks, from = nth * NSA__LISTED_QUERIES;
    const int64_t key = task / kv_heads * f.keys, block = key / f.block;
    const int kv_head = (int)(task % kv_heads), blocks = f.keys / f.block;
    nsa__arena a = {(char *)scratch, 0};
    nsa__listed_alloc(&f, &a);
    for (int64_t t = from; t < nsa__min(from + NSA__LISTED_QUERIES, task < 0 ? f.seq.count : 0);
         t++)
        for (int list = 0; list < lists; list++) {
            nsa__listed_list(&f, t, list, 0, INT_MAX, NULL);
            for (int g = 0; dx && g < f.group; g++) {
                const int64_t row = f.seq.row + t, head = (int64_t)list * f.group + g;
                if (dx->q.data)
                    nsa__add(dx->q.dtype, nsa__row(&dx->q, f.seq.batch, row, head), 1,
                             f.dq + (ptrdiff_t)g * f.wide, f.d->dim);
                if (dx->weights.data)
                    nsa__add(dx->weights.dtype, nsa__row(&dx->weights, f.seq.batch, row, head), 1,
                             &f.dweights[g], 1);
            }
        }
    if (task < 0) return;
    memset(f.dk, 0, (size_t)f.keys * (size_t)f.wide * sizeof *f.dk);
    for (int64_t t = 0; t < f.seq.count; t++)
        for (int list = kv_head * of_head; list < (kv_head + 1) * of_head; list++)
            nsa__listed_list(&f, t, list, (int)block, (int)block + blocks, f.dk);
    for (int i = 0; i < nsa__min(f.keys, nsa_cmp_count(f.d, f.seq.tokens) - key); i++)
        nsa__add(dx->k.dtype, nsa__listed_key(&f, &dx->k, key + i, kv_head), 1,
                 f.dk + (ptrdiff_t)i * f.wide, f.d->dim);
}

/* The call for a descriptor that is right. */
static nsa__listed nsa__listed_of(const nsa_score *dx, const nsa_score *x, const nsa_desc *d) {
    nsa__listed f;
    memset(&f, 0, sizeof f);
    f.x = x, f.dx = dx, f.d = d;
    f.group = d->heads / nsa__list_heads(d);
    f.row = nsa__operand_of(nsa__tiles_of(d->isa), d->dim, 1);
    f.wide = f.row.wide;
    f.block = (int)nsa__min(nsa__scorer_block(d), nsa__max(1, nsa_cmp_count(d, d->tokens)));
    f.keys = (int)nsa__max(1, NSA__LISTED_KEYS / f.block) * f.block;
    f.width = nsa_block_list_width(d);
    return f;
}

/* Scratch of a thread. */
static size_t nsa__listed_scratch(nsa__listed f) {
    nsa__arena scratch = {NULL, 0};
    nsa__listed_alloc(&f, &scratch);
    return scratch.used;
}

static nsa_status nsa__listed_run(const nsa_score *dx, const nsa_score *x, const nsa_desc *d,
                                  int backward, void *workspace, size_t bytes) {
    nsa__team team;
    nsa_desc own;
    NSA__CHECK(nsa__score_options(x, NSA__USES_SLC, &d, &own));
    const nsa__checked c = nsa__checked_of(d, !backward, x->stride > 1);
    NSA__CHECK(nsa__check_call(&c, nsa__listed_views, NSA__SCORE_VIEWS, dx, x));
    NSA__CHECK(nsa__check_lists(&x->blocks, d, NULL));
    nsa__listed f = nsa__listed_of(dx, x, d);
    NSA__CHECK(nsa__team_make(&team, d, workspace, bytes, 0, nsa__listed_scratch(f)));
    for (f.seq = nsa__seq_begin(d); f.seq.nth < d->batch; nsa__seq_next(d, &f.seq)) {
        const int64_t keys = nsa_cmp_count(d, f.seq.tokens), queries = f.seq.count;
        const int of_keys = dx && dx->k.data, of_queries = !dx || dx->q.data || dx->weights.data;
        f.query_tasks = of_queries ? nsa__ceil_div(queries, NSA__LISTED_QUERIES) : 0;
        nsa__run(&team, f.query_tasks + (of_keys ? nsa__ceil_div(keys, f.keys) * d->kv_heads : 0),
                 nsa__listed_task, &f);
    }
    return NSA_OK;
}

/* Sized for keys of one token, which need most. */
NSA_API size_t nsa_score_blocks_forward_workspace_size(const nsa_desc *d) {
    nsa_desc own;
    d = nsa__desc_using(d, NSA__USES_SLC, &own);
    if (nsa_desc_check(d) != NSA_OK) return 0;
    return nsa__workspace_bytes(d, 0, nsa__listed_scratch(nsa__listed_of(NULL, NULL, d)));
}
NSA_API nsa_status nsa_score_blocks_forward(const nsa_score *x, const nsa_desc *d, void *workspace,
                                            size_t bytes) {
    return nsa__listed_run(NULL, x, d, 0, workspace, bytes);
}
NSA_API size_t nsa_score_blocks_backward_workspace_size(const nsa_desc *d) {
    return d && d->pages ? 0 : nsa_score_blocks_forward_workspace_size(d);
}
NSA_API nsa_status nsa_score_blocks_backward(const nsa_score *dx, const nsa_score *x,
                                             const nsa_desc *d, void *workspace, size_t bytes) {
    return nsa__listed_run(dx, x, d, 1, workspace, bytes);
}
