/* ==== Private, shared with nsa_cuda.cuh: the tensors of each public struct =======================

   A row a tensor: no check can forget one. nsa.h and nsa_cuda.cuh walk these tables, each with its
   own idea of shapes. Not here: what a list holds (lists.h). */
#include "shared.h"

#if (defined(NSA_IMPLEMENTATION) || defined(NSA_CUDA_IMPLEMENTATION)) && !defined(NSA__SHARED_VIEWS)
#define NSA__SHARED_VIEWS

/* Rows: of queries by heads, gates or lists, or of keys, or of compressed keys. Then the numbers of
   a row. */
enum { NSA__OF_HEADS, NSA__OF_GATES, NSA__OF_LISTS, NSA__OF_KEYS, NSA__OF_BLOCKS };
enum {
    NSA__WIDE_DIM,
    NSA__WIDE_DIM_V,
    NSA__WIDE_ONE,
    NSA__WIDE_GATES,
    NSA__WIDE_LIST,
    NSA__WIDE_SLC,
    NSA__WIDE_CMP
};
/* What is read piece by piece, numbers one by one, gates, reals, lists: decides the dtypes. */
enum { NSA__AS_ROWS, NSA__AS_NUMBERS, NSA__AS_GATES, NSA__AS_REALS, NSA__AS_INTS };
enum {
    NSA__READ = 0,
    NSA__WRITTEN = 1, /* by forward; backward reads it */
    NSA__FORWARD = 2, /* backward does not look at it */
    NSA__OPTIONAL = 4 /* it may be absent */
};
enum { NSA__NONE, NSA__GIVEN, NSA__GIVEN_LSE, NSA__ADDED }; /* of dx: what becomes of it */

typedef struct nsa__view {
    size_t offset;
    unsigned char rows, width, as, use, gradient;
    int field;
} nsa__view;

#define NSA__VIEW(of, name, rows, width, as, use, gradient)                             \
    {                                                                                   \
        offsetof(nsa_##of, name), NSA__OF_##rows, NSA__WIDE_##width, NSA__AS_##as, use, \
            NSA__##gradient, NSA__AT_##name                                             \
    }

enum { NSA__ATTEND_VIEWS = 6 }; /* the last one is for slc alone */
static const nsa__view nsa__attend_views[NSA__ATTEND_VIEWS] = {
    NSA__VIEW(attend, q, HEADS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attend, k, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attend, v, KEYS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attend, out, HEADS, DIM_V, ROWS, NSA__WRITTEN, GIVEN),
    NSA__VIEW(attend, lse, HEADS, ONE, REALS, NSA__WRITTEN, GIVEN_LSE),
    NSA__VIEW(attend, blocks, LISTS, LIST, INTS, NSA__READ, NONE)};

enum { NSA__MERGE_VIEWS = 6 };
static const nsa__view nsa__merge_views[NSA__MERGE_VIEWS] = {
    NSA__VIEW(merge, out_a, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(merge, out_b, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(merge, lse_a, HEADS, ONE, REALS, NSA__READ, ADDED),
    NSA__VIEW(merge, lse_b, HEADS, ONE, REALS, NSA__READ, ADDED),
    NSA__VIEW(merge, out, HEADS, DIM_V, ROWS, NSA__WRITTEN | NSA__FORWARD, GIVEN),
    NSA__VIEW(merge, lse, HEADS, ONE, REALS, NSA__WRITTEN | NSA__FORWARD, GIVEN_LSE)};

enum { NSA__SELECT_VIEWS = 6 };
static const nsa__view nsa__select_views[NSA__SELECT_VIEWS] = {
    NSA__VIEW(select, q, HEADS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(select, k, KEYS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(select, lse, HEADS, ONE, REALS, NSA__READ, NONE),
    NSA__VIEW(select, scores, LISTS, SLC, REALS, NSA__WRITTEN | NSA__OPTIONAL, NONE),
    NSA__VIEW(select, p_cmp, LISTS, CMP, REALS, NSA__WRITTEN | NSA__OPTIONAL, NONE),
    NSA__VIEW(select, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE)};

enum { NSA__SCORE_VIEWS = 5 };
static const nsa__view nsa__score_views[NSA__SCORE_VIEWS] = {
    NSA__VIEW(score, q, HEADS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(score, k, KEYS, DIM, ROWS, NSA__READ, NONE),
    NSA__VIEW(score, weights, HEADS, ONE, NUMBERS, NSA__OPTIONAL, NONE),
    NSA__VIEW(score, scores, LISTS, SLC, REALS, NSA__WRITTEN | NSA__OPTIONAL, NONE),
    NSA__VIEW(score, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE)};

/* The same struct where its lists are given. */
static const nsa__view nsa__listed_views[NSA__SCORE_VIEWS] = {
    NSA__VIEW(score, q, HEADS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(score, k, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(score, weights, HEADS, ONE, NUMBERS, NSA__OPTIONAL, ADDED),
    NSA__VIEW(score, blocks, LISTS, LIST, INTS, NSA__READ, NONE),
    NSA__VIEW(score, scores, LISTS, LIST, REALS, NSA__WRITTEN | NSA__FORWARD, GIVEN)};

enum { NSA__RANK_VIEWS = 2 };
static const nsa__view nsa__rank_views[NSA__RANK_VIEWS] = {
    NSA__VIEW(rank, scores, LISTS, SLC, NUMBERS, NSA__READ, NONE),
    NSA__VIEW(rank, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE)};

enum { NSA__GATE_VIEWS = 5 };
static const nsa__view nsa__gate_views[NSA__GATE_VIEWS] = {
    NSA__VIEW(gate, logits, GATES, GATES, GATES, NSA__READ, ADDED),
    NSA__VIEW(gate, cmp, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(gate, slc, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(gate, win, HEADS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(gate, out, HEADS, DIM_V, ROWS, NSA__WRITTEN | NSA__FORWARD, GIVEN)};

/* Those of the whole, but for what only phi takes. The last two are the gate's, of any dtype. */
enum { NSA__ATTENTION_VIEWS = 16, NSA__GATE_AT = 14 };
static const nsa__view nsa__attention_views[NSA__ATTENTION_VIEWS] = {
    NSA__VIEW(attention, q, HEADS, DIM, ROWS, NSA__READ, ADDED),
    {offsetof(nsa_attention, k_cmp.out), NSA__OF_BLOCKS, NSA__WIDE_DIM, NSA__AS_ROWS, NSA__READ,
     NSA__NONE, NSA__AT_k_cmp_out},
    {offsetof(nsa_attention, v_cmp.out), NSA__OF_BLOCKS, NSA__WIDE_DIM_V, NSA__AS_ROWS, NSA__READ,
     NSA__NONE, NSA__AT_v_cmp_out},
    NSA__VIEW(attention, out_cmp, HEADS, DIM_V, ROWS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, lse_cmp, HEADS, ONE, REALS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, blocks, LISTS, LIST, INTS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, k_slc, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, v_slc, KEYS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, out_slc, HEADS, DIM_V, ROWS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, lse_slc, HEADS, ONE, REALS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, k_win, KEYS, DIM, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, v_win, KEYS, DIM_V, ROWS, NSA__READ, ADDED),
    NSA__VIEW(attention, out_win, HEADS, DIM_V, ROWS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, lse_win, HEADS, ONE, REALS, NSA__WRITTEN, NONE),
    NSA__VIEW(attention, gates, GATES, GATES, GATES, NSA__READ, ADDED),
    NSA__VIEW(attention, out, HEADS, DIM_V, ROWS, NSA__WRITTEN | NSA__FORWARD, GIVEN)};
#undef NSA__VIEW

/* The check of a descriptor, what shapes are, how rows are checked that are read in pieces, and the
   sets of dtypes that tensors may have, and lse. */
typedef struct nsa__side {
    nsa_status (*desc)(const nsa_desc *d);
    nsa__shape (*queries)(const nsa_desc *d, int64_t heads, int64_t width);
    nsa__shape (*keys)(const nsa_desc *d, int compressed, int64_t width);
    nsa_status (*rows)(const nsa_tensor *x, nsa__shape shape, unsigned dtypes, int writes,
                       int field);
    unsigned floats, reals;
} nsa__side;

/* A call's views. */
typedef struct nsa__checked {
    const nsa__side *side;
    const nsa_desc *d;
    unsigned rows;  /* dtypes of rows; of keys and values alone those with a scale */
    int forward;    /* 0: backward */
    int compressed; /* keys are compressed blocks */
    int sums;       /* a gradient of a row that tokens, heads or sequences share is the sum */
} nsa__checked;

static nsa__shape nsa__view_shape(const nsa__checked *c, const nsa__view *v) {
    const nsa_desc *d = c->d;
    const int heads[] = {d->heads, d->gate_heads, nsa__list_heads(d)};
    const int widths[] = {d->dim,
                          d->dim_v,
                          1,
                          3,
                          nsa_block_list_width(d),
                          nsa_slc_count(d, d->tokens),
                          nsa_cmp_count(d, d->tokens)};
    if (v->rows < NSA__OF_KEYS) return c->side->queries(d, heads[v->rows], widths[v->width]);
    return c->side->keys(d, c->compressed || v->rows == NSA__OF_BLOCKS, widths[v->width]);
}

/* Checks a view of x, or of dx if the field says so. */
static nsa_status nsa__check_by(const nsa__checked *c, const nsa__view *v, const nsa_tensor *x,
                                unsigned dtypes, int writes, int field) {
    nsa__shape shape = nsa__view_shape(c, v);
    if (v->use & NSA__OPTIONAL && !shape.width) return NSA_OK; /* no block is to be had */
    if (c->sums && writes && field & NSA__GRADIENT) {
        if (!x->token && shape.rows > 1) shape.rows = 1;
        if (!x->head) shape.heads = 1;
        if (!x->batch && shape.batch > 1) shape.batch = 1;
    }
    if (v->as == NSA__AS_GATES) return nsa__check_gates(x, c->d, shape, dtypes, writes, field);
    return (v->as == NSA__AS_ROWS ? c->side->rows : nsa__check_view)(x, shape, dtypes, writes,
                                                                     field);
}

static unsigned nsa__view_dtypes(const nsa__checked *c, const nsa__view *v) {
    const unsigned floats = c->side->floats;
    const unsigned others = v->rows >= NSA__OF_KEYS ? 0 : NSA__SCALED;
    const unsigned dtypes[] = {c->rows & ~others, floats, floats, c->side->reals, NSA__INTS};
    return dtypes[v->as];
}

/* The view in a struct of the table. */
static const nsa_tensor *nsa__view_in(const void *of, const nsa__view *v) {
    return (const nsa_tensor *)(const void *)((const char *)of + v->offset);
}

/* A gradient's dtype is its tensor's or the real one. The range of the tensor's dtype is tested,
   because a tensor that backward does not read is unchecked. */
static unsigned nsa__gradient_dtypes(const nsa__side *side, const nsa_tensor *x) {
    return side->reals | ((unsigned)x->dtype > NSA_F8 ? 0 : 1u << x->dtype & side->floats);
}

/* The first n views of a struct x. */
static nsa_status nsa__check_views(const nsa__checked *c, const nsa__view *views, int n,
                                   const void *x) {
    for (int i = 0; i < n; i++) {
        const nsa__view *v = &views[i];
        const nsa_tensor *view = nsa__view_in(x, v);
        if (v->use & NSA__FORWARD && !c->forward) continue;
        if (v->use & NSA__OPTIONAL && !view->data) continue;
        NSA__CHECK(nsa__check_by(c, v, view, nsa__view_dtypes(c, v),
                                 v->use & NSA__WRITTEN && c->forward, v->field));
    }
    return NSA_OK;
}

/* The gradients in dx: first those that are given, of which dx.lse may be absent, then those that
   are asked for. A caller who fills dx by copying x leaves forward's lse in dx.lse, where it would
   be taken for a gradient. */
static nsa_status nsa__check_gradients(const nsa__checked *c, const nsa__view *views, int n,
                                       const void *dx, const void *x) {
    for (int adds = 0; adds < 2; adds++)
        for (int i = 0; i < n; i++) {
            const nsa__view *v = &views[i];
            const nsa_tensor *of = nsa__view_in(x, v), *to = nsa__view_in(dx, v);
            const int field = v->field | NSA__GRADIENT;
            if (v->gradient == NSA__NONE || adds != (v->gradient == NSA__ADDED)) continue;
            if (v->gradient != NSA__GIVEN && !to->data) continue;
            if (v->gradient == NSA__GIVEN_LSE && to->data == of->data)
                return nsa__error(NSA_ERROR_SHARED, field);
            const unsigned dtypes =
                adds ? nsa__gradient_dtypes(c->side, of) : nsa__view_dtypes(c, v) | c->side->reals;
            NSA__CHECK(nsa__check_by(c, v, to, dtypes, adds, field));
        }
    return NSA_OK;
}

/* What an entry looks at first: its descriptor, x, of backward dx, then the views of both. */
static nsa_status nsa__check_call(const nsa__checked *c, const nsa__view *views, int n,
                                  const void *dx, const void *x) {
    NSA__CHECK(c->side->desc(c->d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (!c->forward && !dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    for (int i = 0; !c->forward && i < n; i++)
        if (views[i].rows == NSA__OF_KEYS) NSA__CHECK(nsa__check_backward(c->d, 0));
    NSA__CHECK(nsa__check_views(c, views, n, x));
    return c->forward ? NSA_OK : nsa__check_gradients(c, views, n, dx, x);
}

/* Checks the options of scores, and makes *d the descriptor for keys of `stride` tokens. */
static nsa_status nsa__score_options(const nsa_score *x, int uses, const nsa_desc **d,
                                     nsa_desc *own) {
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    if (x->stride < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_stride);
    if ((unsigned)x->act > NSA_SCORE_RELU) return nsa__error(NSA_ERROR_OPTION, NSA__AT_act);
    if ((unsigned)x->pool > NSA_POOL_MEAN) return nsa__error(NSA_ERROR_OPTION, NSA__AT_pool);
    *d = nsa__desc_using(*d, uses, own);
    own->cmp_block = own->cmp_stride = x->stride ? x->stride : 1;
    return NSA_OK;
}

/* A gradient that is asked for. */
static nsa_status nsa__check_gradient(const nsa__side *side, const nsa_tensor *dx,
                                      const nsa_tensor *x, nsa__shape shape, int field) {
    if (!dx->data) return NSA_OK;
    return side->rows(dx, shape, nsa__gradient_dtypes(side, x), 1, field | NSA__GRADIENT);
}

/* RoPE's width is an option, so its views stand in no table. */
static nsa_status nsa__rope_check(const nsa__side *side, const nsa_rope *dx, const nsa_rope *x,
                                  const nsa_desc *d, int backward) {
    NSA__CHECK(side->desc(d));
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(nsa__rope_check_options(x));
    if (!nsa__fits(d->batch, d->tokens, x->heads, x->dim))
        return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_heads);
    const nsa__shape shape = side->queries(d, x->heads, x->dim), one = side->queries(d, 1, 1);
    if (x->positions.data)
        NSA__CHECK(nsa__check_view(&x->positions, one, NSA__INTS, 0, NSA__AT_positions));
    if (!backward) {
        NSA__CHECK(side->rows(&x->x, shape, side->floats, 0, NSA__AT_x));
        return side->rows(&x->out, shape, side->floats, 1, NSA__AT_out);
    }
    if (!dx) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments | NSA__GRADIENT);
    NSA__CHECK(side->rows(&dx->out, shape, side->floats, 0, NSA__AT_out | NSA__GRADIENT));
    return nsa__check_gradient(side, &dx->x, &x->x, shape, NSA__AT_x);
}

/* phi's parameters, the one list of them. */
enum { NSA__W1, NSA__B1, NSA__POS, NSA__W2, NSA__B2, NSA__PARAMETERS };
typedef struct nsa__parameter {
    const nsa_tensor *x, *dx; /* the caller's views; dx is x if no gradient is computed */
    int64_t rows;             /* for one head: rows of `width` numbers */
    int width, optional, field;
} nsa__parameter;

static int nsa__parameters(const nsa_compress *dx, const nsa_compress *x, const nsa_desc *d,
                           nsa__parameter list[NSA__PARAMETERS]) {
    const int l = d->cmp_block, mlp = x->phi == NSA_PHI_MLP;
    if (!dx) dx = x;
    const nsa__parameter all[NSA__PARAMETERS] = {
        {&x->w1, &dx->w1, mlp ? x->hidden : l, mlp ? l * x->dim : x->dim, 0, NSA__AT_w1},
        {&x->b1, &dx->b1, 1, mlp ? x->hidden : x->dim, 1, NSA__AT_b1},
        {&x->pos, &dx->pos, l, x->dim, 1, NSA__AT_pos},
        {&x->w2, &dx->w2, x->dim, x->hidden, 0, NSA__AT_w2},
        {&x->b2, &dx->b2, 1, x->dim, 1, NSA__AT_b2}};
    memcpy(list, all, sizeof all);
    return mlp ? 5 : x->phi == NSA_PHI_CONV ? 2 : 0;
}

/* The views of phi. `base` is 0, or NSA__TO_K_CMP or NSA__TO_V_CMP in the chain. Backward of the
   mean does not read x. */
static nsa_status nsa__check_phi(const nsa__checked *c, const nsa_compress *x, int base) {
    nsa__parameter list[NSA__PARAMETERS];
    if (c->forward || x->phi != NSA_PHI_MEAN)
        NSA__CHECK(
            c->side->rows(&x->x, c->side->keys(c->d, 0, x->dim), c->rows, 0, base + NSA__AT_x));
    if (c->forward)
        NSA__CHECK(
            c->side->rows(&x->out, c->side->keys(c->d, 1, x->dim), c->rows, 1, base + NSA__AT_out));
    for (int i = 0, count = nsa__parameters(NULL, x, c->d, list); i < count; i++) {
        const nsa__shape shape = {1, list[i].rows, c->d->kv_heads, list[i].width};
        if (list[i].optional && !list[i].x->data) continue;
        NSA__CHECK(c->side->rows(list[i].x, shape, c->rows & ~(unsigned)NSA__SCALED, 0,
                                 base + list[i].field));
    }
    return NSA_OK;
}

/* A gradient whose head stride is 0 sums over the heads: then its view has one head, and its rows
   are apart. */
static nsa_status nsa__check_phi_gradient(const nsa__side *side, const nsa_compress *dx,
                                          const nsa_compress *x, const nsa_desc *d, int base) {
    nsa__parameter list[NSA__PARAMETERS];
    NSA__CHECK(
        nsa__check_gradient(side, &dx->x, &x->x, side->keys(d, 0, x->dim), base + NSA__AT_x));
    for (int i = 0, count = nsa__parameters(dx, x, d, list); i < count; i++) {
        const int heads = list[i].dx->head ? d->kv_heads : 1;
        const nsa__shape shape = {1, list[i].rows, heads, list[i].width};
        NSA__CHECK(nsa__check_gradient(side, list[i].dx, list[i].x, shape, base + list[i].field));
    }
    return NSA_OK;
}

/* Rows of a ring that always holds the last `needed` rows and max_rewind before them; a cache of
   fewer tokens needs no more rows than tokens. */
static int nsa__ring_rows(const nsa_desc *d, int64_t needed, int max_rewind) {
    const int64_t rows = needed + max_rewind < d->tokens ? needed + max_rewind : d->tokens;
    return (int)(rows > 1 ? rows : 1);
}

/* The table of the cache's arrays, in the order of the enum. */
static void nsa__cache_parts(nsa_cache *c, nsa__cache_part parts[NSA__PARTS]) {
    const nsa_desc *d = &c->desc;
    int64_t window = (int64_t)d->window + (d->window_rule == NSA_WINDOW_BEFORE_SELF);
    int win = nsa__ring_rows(d, window, c->max_rewind);
    int raw = nsa__ring_rows(d, d->cmp_block, c->max_rewind);
    int cmp = nsa_cmp_count(d, d->tokens);
    const nsa__cache_part table[NSA__PARTS] = {
        {&c->k_slc, d->tokens, d->dim, 0}, {&c->v_slc, d->tokens, d->dim_v, 0},
        {&c->k_win, win, d->dim, win},     {&c->v_win, win, d->dim_v, win},
        {&c->k_raw, raw, d->dim, raw},     {&c->v_raw, raw, d->dim_v, raw},
        {&c->k_cmp, cmp, d->dim, 0},       {&c->v_cmp, cmp, d->dim_v, 0}};
    memcpy(parts, table, sizeof table);
}

static nsa_status nsa__check_inputs(const nsa__side *side, const nsa_attention *x,
                                    const nsa_desc *d) {
    static const int fields[NSA__INPUTS] = {NSA__AT_k_slc, NSA__AT_v_slc,   NSA__AT_k_win,
                                            NSA__AT_v_win, NSA__AT_k_cmp_x, NSA__AT_v_cmp_x};
    nsa_tensor inputs[NSA__INPUTS];
    nsa__cache_inputs(x, inputs);
    for (int i = 0; i < NSA__INPUTS; i++) {
        const nsa__shape shape = {d->batch, d->count, d->kv_heads, i % 2 ? d->dim_v : d->dim};
        NSA__CHECK(side->rows(&inputs[i], shape, side->floats, 0, fields[i]));
    }
    return NSA_OK;
}

#endif /* NSA__SHARED_VIEWS */
