/* ==== Private, shared with nsa_cuda.cuh =========================================================

   Host code that both need: what a status can name, the check of one view, the arena, RoPE's
   frequencies, the views of the whole's primitives, the cache's arrays. */
#include "api.h"

#if (defined(NSA_IMPLEMENTATION) || defined(NSA_CUDA_IMPLEMENTATION)) && !defined(NSA__SHARED_PARTS)
#define NSA__SHARED_PARTS

#include <math.h>
#include <string.h>

#define NSA__MAX_DIM 576

/* Every field that a status can name, by the struct that has it. The fields of a compress stand
   three times, in the same order, because the whole adds NSA__TO_K_CMP or NSA__TO_V_CMP to the id
   of such a field. */
#define NSA__FIELDS(X)                                                                            \
    X(arguments), X(desc), X(workspace), X(batch), X(tokens), X(heads), X(kv_heads),              \
        X(gate_heads), X(gate_stride), X(dim_v), X(first), X(count), X(begins), X(firsts),        \
        X(pages), X(table_width), X(page_tokens), X(page_count), X(cmp_block), X(cmp_stride),     \
        X(slc_block), X(slc_count), X(slc_init), X(slc_local), X(window), X(scale), X(forced),    \
        X(score_map), X(window_rule), X(gate), X(mask), X(list_heads), X(rows), X(threads),       \
        X(isa), X(products), X(indptr), X(indices), X(weights), X(cmp_begins), X(positions),      \
        X(base), X(pairs), X(scaling), X(factor), X(trained_context), X(fast), X(context),        \
        X(magnitude), X(mscale), X(short_factors), X(long_factors), X(frequencies), X(cache),     \
        X(counts), X(length), X(sequence), X(max_rewind), X(query), X(scores), X(p_cmp), X(act),  \
        X(pool), X(stride), X(width), X(list), X(dtype), X(memory), X(q), X(k), X(v), X(lse),     \
        X(blocks), X(logits), X(cmp), X(slc), X(win), X(k_slc), X(v_slc), X(k_win), X(v_win),     \
        X(gates), X(out_cmp), X(out_slc), X(out_win), X(out_a), X(out_b), X(lse_cmp), X(lse_slc), \
        X(lse_win), X(lse_a), X(lse_b)
#define NSA__COMPRESS_FIELDS(X) \
    X(phi), X(dim), X(hidden), X(x), X(out), X(pos), X(w1), X(b1), X(w2), X(b2)

/* A status has its kind in bits 0 to 7 and the id of its field from bit 8 on. NSA__GRADIENT is
   added to an id if the field is one of dx. */
#define NSA__ID(name)       NSA__AT_##name
#define NSA__K_CMP_ID(name) NSA__AT_k_cmp_##name
#define NSA__V_CMP_ID(name) NSA__AT_v_cmp_##name
enum {
    NSA__AT_none,
    NSA__FIELDS(NSA__ID),
    NSA__COMPRESS_FIELDS(NSA__ID),
    NSA__COMPRESS_FIELDS(NSA__K_CMP_ID),
    NSA__COMPRESS_FIELDS(NSA__V_CMP_ID),
    NSA__GRADIENT = 1 << 16
};

static nsa_status nsa__error(int kind, int field) {
    return kind | field << 8;
}

/* Leaves a function with the status of what failed. */
#define NSA__CHECK(call)                     \
    do {                                     \
        nsa_status failed = (call);          \
        if (failed != NSA_OK) return failed; \
    } while (0)

static size_t nsa__dtype_bytes(nsa_dtype dtype) {
    switch (dtype) {
    case NSA_I8:
    case NSA_F8:
        return 1;
    case NSA_BF16:
    case NSA_F16:
        return 2;
    case NSA_F64:
        return 8;
    case NSA_F32:
    case NSA_I32:
        break;
    }
    return 4;
}

/* 1 if the product of the sizes, each >= 0, in elements of up to 8 bytes, fits the address space.
   The product is taken in double, because it could overflow an int64_t. */
static int nsa__fits(int64_t a, int64_t b, int64_t c, int64_t e) {
    const double limit =
        sizeof(size_t) >= 8 ? 1152921504606846976.0 /* 2^60 */ : (double)(SIZE_MAX / 16);
    return (double)a * (double)b * (double)c * (double)e < limit;
}

/* The rows that a view must have, as its strides see them. */
typedef struct nsa__shape {
    int64_t batch, rows, heads, width;
} nsa__shape;

/* One axis of a view: elements from entry to entry, and the number of entries. */
typedef struct nsa__axis {
    int64_t stride, extent;
} nsa__axis;

/* 1 if no two elements of the shape are one; those of a row are `inner` apart. Axes are sorted by
   stride. Elements are apart if each stride steps over all elements that the axes before it cover.
   Interleaved axes are refused too, even if they share nothing. */
static int nsa__rows_disjoint(const nsa_tensor *x, nsa__shape shape, int64_t inner) {
    nsa__axis axes[4] = {{inner, shape.width},
                         {x->batch, shape.batch},
                         {x->token, shape.rows},
                         {x->head, shape.heads}};
    for (int i = 1; i < 4; i++) /* ascending strides */
        for (int j = i; j > 0 && axes[j].stride < axes[j - 1].stride; j--) {
            nsa__axis swap = axes[j];
            axes[j] = axes[j - 1];
            axes[j - 1] = swap;
        }
    int64_t covered = 1;
    for (int i = 0; i < 4; i++) {
        if (axes[i].extent <= 1) continue;
        if (axes[i].stride < covered) return 0;
        covered += axes[i].stride * (axes[i].extent - 1);
    }
    return 1;
}

enum {
    NSA__FLOATS = 1 << NSA_F32 | 1 << NSA_BF16 | 1 << NSA_F16,
    NSA__INTS = 1 << NSA_I32,
    NSA__SCALED = 1 << NSA_I8 | 1 << NSA_F8,
    NSA__SCALE_COLUMNS = 128 /* of a row of 8 bits that share a scale */
};

/* What a row of so many numbers takes. */
static int64_t nsa__row_elements(nsa_dtype dtype, int64_t width) {
    if (!(NSA__SCALED >> dtype & 1)) return width;
    return width + (width + NSA__SCALE_COLUMNS - 1) / NSA__SCALE_COLUMNS * (int64_t)sizeof(float);
}

/* Checks one view. `dtypes` is a set: bit x stands for dtype x. `writes` 1: the view is an output,
   so its rows must be apart. A stride is not looked at if its axis has one entry. */
static nsa_status nsa__check_view(const nsa_tensor *x, nsa__shape shape, unsigned dtypes,
                                  int writes, int field) {
    if (shape.batch == 0 || shape.rows == 0 || shape.heads == 0)
        return NSA_OK; /* nothing will be touched */
    if (!x->data) return nsa__error(NSA_ERROR_NULL, field);
    if ((unsigned)x->dtype > NSA_F8 || !(dtypes >> x->dtype & 1))
        return nsa__error(NSA_ERROR_DTYPE, field);
    shape.width = nsa__row_elements(x->dtype, shape.width);
    if ((uintptr_t)x->data % nsa__dtype_bytes(x->dtype))
        return nsa__error(NSA_ERROR_ALIGNMENT, field);
    int64_t batch = shape.batch > 1 ? x->batch : 0, token = shape.rows > 1 ? x->token : 0;
    int64_t head = shape.heads > 1 ? x->head : 0;
    if (batch < 0 || token < 0 || head < 0) return nsa__error(NSA_ERROR_STRIDE, field);
    if (!nsa__fits(batch, shape.batch, 4, 1) || !nsa__fits(token, shape.rows, 4, 1) ||
        !nsa__fits(head, shape.heads, 4, 1) || !nsa__fits(shape.width, 4, 1, 1))
        return nsa__error(NSA_ERROR_OVERFLOW, field);
    if (writes && !nsa__rows_disjoint(x, shape, 1)) return nsa__error(NSA_ERROR_STRIDE, field);
    return NSA_OK;
}

static int64_t nsa__gate_stride(const nsa_desc *d) {
    return d->gate_stride ? d->gate_stride : 1;
}

/* Checks a view of gates, the one whose rows are not packed where gate_stride says so. */
static nsa_status nsa__check_gates(const nsa_tensor *x, const nsa_desc *d, nsa__shape shape,
                                   unsigned dtypes, int writes, int field) {
    NSA__CHECK(nsa__check_view(x, shape, dtypes, 0, field));
    if (!writes || shape.batch == 0 || shape.rows == 0) return NSA_OK;
    return nsa__rows_disjoint(x, shape, nsa__gate_stride(d)) ? NSA_OK
                                                             : nsa__error(NSA_ERROR_STRIDE, field);
}

/* The caller's workspace, handed out from its start. Without a base it only counts, so that a size
   query is the same code as the call itself. `used` saturates, so that no sum overflows. */
typedef struct nsa__arena {
    char *base;
    size_t used;
} nsa__arena;

/* Hands out `count` elements, from a multiple of `align` on. A size that does not fit leaves `used`
   at its largest value, which no workspace can satisfy. */
static void *nsa__alloc_aligned(nsa__arena *a, int64_t count, size_t size, size_t align) {
    char *at = a->base ? a->base + a->used : NULL;
    if ((uint64_t)count > (SIZE_MAX - a->used - align) / size) {
        a->used = SIZE_MAX - align;
        return at;
    }
    a->used += ((size_t)count * size + align - 1) / align * align;
    return at;
}

/* An arena whose base is the workspace's first multiple of `align`. */
static nsa__arena nsa__arena_aligned(void *workspace, size_t align) {
    size_t skew = (align - (size_t)((uintptr_t)workspace % align)) % align;
    nsa__arena a = {workspace ? (char *)workspace + skew : NULL, 0};
    return a;
}

static int nsa__list_heads(const nsa_desc *d) {
    return d->list_heads ? d->list_heads : d->kv_heads;
}

/* The descriptor for a primitive that uses only some of the fields cmp_block .. slc_local: the
   others are set so that they break no rule. Blocks are forced in no list that is given. */
enum {
    NSA__USES_CMP = 1,
    NSA__USES_SLC = 2,   /* lists */
    NSA__USES_FORCED = 4 /* it makes them */
};

static const nsa_desc *nsa__desc_using(const nsa_desc *d, int uses, nsa_desc *own) {
    if (!d) return d;
    *own = *d;
    if (!(uses & NSA__USES_CMP)) own->cmp_block = own->cmp_stride = 1;
    if (!(uses & NSA__USES_SLC)) own->slc_block = own->cmp_block, own->slc_count = 1;
    if (!(uses & NSA__USES_SLC) || (!(uses & NSA__USES_FORCED) && own->forced == NSA_FORCED_INSIDE))
        own->slc_init = 0, own->slc_local = 1;
    return own;
}

/* The descriptor for what ranks. */
static const nsa_desc *nsa__rank_desc(const nsa_desc *d, nsa_desc *own) {
    return nsa__desc_using(d, NSA__USES_SLC | NSA__USES_FORCED, own);
}

/* By its bits: -ffast-math folds isnan and isinf to 0, and takes any comparison for a number's.
   clang 19 folds the bits of an argument too, but not what it reads from volatile memory. */
static int nsa__is_finite(double x) {
    uint64_t copy;
    memcpy(&copy, &x, sizeof copy);
    const volatile uint64_t bits = copy;
    return (bits >> 52 & 0x7ff) != 0x7ff;
}

/* `numbers`, one a pair, each a number; above 0 if a frequency is divided by them. */
static nsa_status nsa__rope_check_pairs(const nsa_rope *x, const double *numbers, int divides,
                                        int field) {
    if (!numbers) return nsa__error(NSA_ERROR_NULL, field);
    for (int i = 0; i < x->dim / 2; i++)
        if (!nsa__is_finite(numbers[i]) || (divides && !(numbers[i] > 0)))
            return nsa__error(NSA_ERROR_SIZE, field);
    return NSA_OK;
}

/* 0 means that the option was not given. */
static int nsa__rope_option(double x, double least) {
    return nsa__is_finite(x) && (x == 0 || (x >= least && x < 1e300));
}

static double nsa__rope_fast(const nsa_rope *x) {
    return x->fast != 0 ? x->fast : x->scaling == NSA_ROPE_SCALING_LLAMA3 ? 4 : 32;
}

static double nsa__rope_slow(const nsa_rope *x) {
    return x->slow != 0 ? x->slow : 1;
}

/* What the scaling reads, and no more. */
static nsa_status nsa__rope_check_scaling(const nsa_rope *x) {
    const nsa_rope_scaling scaling = x->scaling;
    if ((unsigned)scaling > NSA_ROPE_SCALING_LONGROPE)
        return nsa__error(NSA_ERROR_OPTION, NSA__AT_scaling);
    if (!nsa__rope_option(x->base, 1) || x->base == 1)
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_base);
    if (scaling == NSA_ROPE_SCALING_NONE) return NSA_OK;
    const int is_long = scaling == NSA_ROPE_SCALING_LONGROPE;
    if (!(is_long && x->magnitude > 0) && (x->factor == 0 || !nsa__rope_option(x->factor, 1)))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_factor);
    if (scaling == NSA_ROPE_SCALING_LINEAR || scaling == NSA_ROPE_SCALING_NTK) return NSA_OK;
    /* LongRoPE's magnitude has ln 1 = 0 for divisor. */
    if (x->trained_context < (is_long ? 2 : 1))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_trained_context);
    if (is_long) {
        NSA__CHECK(nsa__rope_check_pairs(x, x->short_factors, 1, NSA__AT_short_factors));
        NSA__CHECK(nsa__rope_check_pairs(x, x->long_factors, 1, NSA__AT_long_factors));
    }
    if (is_long || scaling == NSA_ROPE_SCALING_DYNAMIC)
        return x->context < 0 ? nsa__error(NSA_ERROR_SIZE, NSA__AT_context) : NSA_OK;
    const double fast = nsa__rope_fast(x), slow = nsa__rope_slow(x);
    if (!nsa__is_finite(fast) || !nsa__is_finite(slow) || !(slow > 0 && slow < fast))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_fast);
    if (scaling == NSA_ROPE_SCALING_YARN &&
        (!nsa__rope_option(x->mscale, 0) || !nsa__rope_option(x->mscale_all_dim, 0)))
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_mscale);
    return NSA_OK;
}

static nsa_status nsa__rope_check_options(const nsa_rope *x) {
    if (x->heads < 1) return nsa__error(NSA_ERROR_SIZE, NSA__AT_heads);
    if (x->dim < 2 || x->dim > NSA__MAX_DIM || x->dim % 2)
        return nsa__error(NSA_ERROR_SIZE, NSA__AT_dim);
    if ((unsigned)x->pairs > NSA_ROPE_HALVES) return nsa__error(NSA_ERROR_OPTION, NSA__AT_pairs);
    if (!nsa__rope_option(x->magnitude, 0)) return nsa__error(NSA_ERROR_SIZE, NSA__AT_magnitude);
    return x->frequencies ? nsa__rope_check_pairs(x, x->frequencies, 0, NSA__AT_frequencies)
                          : nsa__rope_check_scaling(x);
}

/* The pair, as a fractional number, that turns `turns` times over the trained context of L tokens:
   L base^(-2i/dim) / (2 pi) = turns, solved for i. */
static double nsa__rope_pair_of(const nsa_rope *x, double base, double turns) {
    return x->dim * log(x->trained_context / (turns * 6.283185307179586)) / (2 * log(base));
}

/* How much of pair i is slowed, 0 to 1.
   YaRN:    pairs up to `low` turn at least `fast` times over the trained context, pairs from `high`
            on at most `slow` times; the ramp runs over pair numbers. If low and high meet, 0.001
            between them keeps its division from 0 / 0.
   Llama 3: the ramp runs over turns themselves. */
static double nsa__rope_ramp(const nsa_rope *x, double base, int i) {
    const double fast = nsa__rope_fast(x), slow = nsa__rope_slow(x);
    double ramp = 0;
    if (x->scaling == NSA_ROPE_SCALING_LLAMA3) {
        double turns = x->trained_context * pow(base, -2.0 * i / x->dim) / 6.283185307179586;
        ramp = (fast - turns) / (fast - slow);
    } else {
        double low = nsa__rope_pair_of(x, base, fast), high = nsa__rope_pair_of(x, base, slow);
        if (!x->untruncated) low = floor(low), high = ceil(high);
        low = low < 0 ? 0 : low;
        high = high > x->dim - 1 ? x->dim - 1 : high;
        if (high == low) high += 0.001;
        ramp = (i - low) / (high - low);
    }
    return ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
}

/* The factor on the result. */
static double nsa__rope_magnitude(const nsa_rope *x) {
    const int is_long = x->scaling == NSA_ROPE_SCALING_LONGROPE;
    if (x->magnitude != 0) return x->magnitude;
    if (x->frequencies || !(is_long || x->scaling == NSA_ROPE_SCALING_YARN)) return 1;
    const double length = log(x->factor);
    if (is_long) return sqrt(1 + length / log(x->trained_context));
    if (x->mscale > 0 && x->mscale_all_dim > 0)
        return (0.1 * x->mscale * length + 1) / (0.1 * x->mscale_all_dim * length + 1);
    return 0.1 * length + 1;
}

/* The angle of pair i from one position to the next, and the factor on the result.
   NTK: a larger base. Pair 0 keeps its frequency; the exponent dim / (dim - 2) divides that of the
        last pair, dim / 2 - 1, by exactly the factor. Dynamic NTK: by 1 at the trained context, by
        `factor` more for each further one. */
static void nsa__rope_frequencies(const nsa_rope *x, double frequency_of[], double *magnitude) {
    const nsa_rope_scaling scaling = x->scaling;
    const int beyond = x->context > x->trained_context;
    double base = x->base != 0 ? x->base : 10000, stretch = 1;
    *magnitude = nsa__rope_magnitude(x);
    if (scaling == NSA_ROPE_SCALING_NTK) stretch = x->factor;
    if (scaling == NSA_ROPE_SCALING_DYNAMIC && beyond)
        stretch = x->factor * x->context / x->trained_context - (x->factor - 1);
    if (x->dim > 2) base *= pow(stretch, (double)x->dim / (x->dim - 2));
    if (x->frequencies) memcpy(frequency_of, x->frequencies, (size_t)x->dim / 2 * sizeof(double));
    for (int i = 0; i < x->dim / 2 && !x->frequencies; i++) {
        double frequency = pow(base, -2.0 * i / x->dim), slowed = frequency / x->factor;
        if (scaling == NSA_ROPE_SCALING_LINEAR) frequency = slowed;
        if (scaling == NSA_ROPE_SCALING_YARN || scaling == NSA_ROPE_SCALING_LLAMA3)
            frequency += nsa__rope_ramp(x, base, i) * (slowed - frequency);
        if (scaling == NSA_ROPE_SCALING_LONGROPE)
            frequency /= (beyond ? x->long_factors : x->short_factors)[i];
        frequency_of[i] = frequency;
    }
}

/* The chain's views as its primitives see them; for a gradient struct, their gradients. */
typedef struct nsa__chain {
    nsa_attend cmp, slc, win;
    nsa_select select;
    nsa_gate gate;
} nsa__chain;

static const nsa_tensor nsa__no_view = {NULL, NSA_F32, 0, 0, 0};

/* Copies views, no rows. */
static nsa__chain nsa__chain_of(const nsa_attention *x) {
    const nsa_tensor none = nsa__no_view;
    const nsa__chain c = {{x->q, x->k_cmp.out, x->v_cmp.out, x->out_cmp, x->lse_cmp, x->blocks},
                          {x->q, x->k_slc, x->v_slc, x->out_slc, x->lse_slc, x->blocks},
                          {x->q, x->k_win, x->v_win, x->out_win, x->lse_win, x->blocks},
                          {x->q, x->k_cmp.out, x->lse_cmp, x->blocks, none, none},
                          {x->gates, x->out_cmp, x->out_slc, x->out_win, x->out}};
    return c;
}

enum {
    NSA__TO_K_CMP = NSA__AT_k_cmp_phi - NSA__AT_phi,
    NSA__TO_V_CMP = NSA__AT_v_cmp_phi - NSA__AT_phi
};

static int nsa__same_view(const nsa_tensor *a, const nsa_tensor *b) {
    return a->data == b->data && a->dtype == b->dtype && a->batch == b->batch &&
           a->token == b->token && a->head == b->head;
}

/* Gradients that several branches may add to. Each addition to a view of bf16 or f16 would round,
   so the sum is then taken in workspace and added once. Views of the same memory share one sum. */
enum {
    NSA__SUM_Q,
    NSA__SUM_K_CMP,
    NSA__SUM_V_CMP,
    NSA__SUM_K_SLC,
    NSA__SUM_V_SLC,
    NSA__SUM_K_WIN,
    NSA__SUM_V_WIN,
    NSA__SUMS
};

/* These views of a gradient struct. */
static void nsa__sum_views(nsa_attention *dx, nsa_tensor *views[NSA__SUMS]) {
    nsa_tensor *const all[NSA__SUMS] = {&dx->q,     &dx->k_cmp.x, &dx->v_cmp.x, &dx->k_slc,
                                        &dx->v_slc, &dx->k_win,   &dx->v_win};
    memcpy(views, all, sizeof all);
}
static int nsa__sum_width(const nsa_desc *d, int i) {
    return i == NSA__SUM_V_CMP || i == NSA__SUM_V_SLC || i == NSA__SUM_V_WIN ? d->dim_v : d->dim;
}

/* The first sum before sum i that adds to the same view, or i. Sums of the same memory but another
   width are apart, because their rows are not the same rows. q is never shared. */
static int nsa__shared_sum(nsa_tensor *const to[NSA__SUMS], const nsa_desc *d, int i) {
    for (int k = NSA__SUM_K_CMP; i != NSA__SUM_Q && k < i; k++)
        if (nsa__same_view(to[k], to[i]) && nsa__sum_width(d, k) == nsa__sum_width(d, i)) return k;
    return i;
}

/* One of a cache's arrays: what it holds, how many rows, how they are indexed. */
typedef struct nsa__cache_part {
    nsa_tensor *rows; /* the cache's view */
    int64_t count;    /* rows of a sequence */
    int width;        /* numbers of a row */
    int ring;         /* rows of a ring, 0 for straight arrays */
} nsa__cache_part;

enum {
    NSA__PART_K_SLC,
    NSA__PART_V_SLC,
    NSA__PART_K_WIN,
    NSA__PART_V_WIN,
    NSA__PART_K_RAW,
    NSA__PART_V_RAW,
    NSA__PART_K_CMP,
    NSA__PART_V_CMP,
    NSA__PARTS,
    NSA__INPUTS = NSA__PART_K_CMP /* the first ones, which a step appends to */
};

/* The new rows of x in the order of the parts that they are appended to. */
static void nsa__cache_inputs(const nsa_attention *x, nsa_tensor inputs[NSA__INPUTS]) {
    const nsa_tensor all[NSA__INPUTS] = {x->k_slc, x->v_slc,   x->k_win,
                                         x->v_win, x->k_cmp.x, x->v_cmp.x};
    memcpy(inputs, all, sizeof all);
}

/* 1 if rows of one cache can be copied to the other: equal dtypes, widths, rings and strides. */
static int nsa__same_geometry(const nsa_cache *a, const nsa_cache *b) {
    const nsa_desc *x = &a->desc, *y = &b->desc;
    return x->window == y->window && x->window_rule == y->window_rule &&
           x->kv_heads == y->kv_heads && x->dim == y->dim && x->dim_v == y->dim_v &&
           x->cmp_block == y->cmp_block && x->cmp_stride == y->cmp_stride &&
           a->k_slc.dtype == b->k_slc.dtype && a->max_rewind == b->max_rewind &&
           a->k_win.batch == b->k_win.batch && a->k_raw.batch == b->k_raw.batch;
}

/* A step sees what came before it, through one list for each kv head, and knows its own rows. */
static nsa_status nsa__check_decodes(const nsa_desc *d) {
    if (d->mask != NSA_MASK_CAUSAL) return nsa__error(NSA_ERROR_OPTION, NSA__AT_mask);
    if (nsa__list_heads(d) != d->kv_heads) return nsa__error(NSA_ERROR_HEADS, NSA__AT_list_heads);
    if (d->firsts || d->counts)
        return nsa__error(NSA_ERROR_OPTION, d->firsts ? NSA__AT_firsts : NSA__AT_counts);
    return d->pages ? nsa__error(NSA_ERROR_OPTION, NSA__AT_pages) : NSA_OK;
}

/* The widths of phi in a chain; `sizes_of` checks those of one phi. */
static nsa_status nsa__chain_check_sizes(const nsa_attention *x, const nsa_desc *d,
                                         nsa_status (*sizes_of)(const nsa_compress *x,
                                                                const nsa_desc *d, int base)) {
    if (!x) return nsa__error(NSA_ERROR_NULL, NSA__AT_arguments);
    NSA__CHECK(sizes_of(&x->k_cmp, d, NSA__TO_K_CMP));
    NSA__CHECK(sizes_of(&x->v_cmp, d, NSA__TO_V_CMP));
    if (x->k_cmp.dim != d->dim) return nsa__error(NSA_ERROR_SIZE, NSA__AT_k_cmp_dim);
    return x->v_cmp.dim != d->dim_v ? nsa__error(NSA_ERROR_SIZE, NSA__AT_v_cmp_dim) : NSA_OK;
}

/* What backward is not computed for: pages, and if `whole` sequences at positions of their own. */
static nsa_status nsa__check_backward(const nsa_desc *d, int whole) {
    if (d->pages) return nsa__error(NSA_ERROR_OPTION, NSA__AT_pages);
    return whole && d->firsts ? nsa__error(NSA_ERROR_OPTION, NSA__AT_firsts) : NSA_OK;
}

#endif /* NSA__SHARED_PARTS */
