/* cases.h - the shapes that the tests run over, and the random numbers in them.
   Twin: none. Every shape of the specification's list of rules has a line here, under its name. */
#ifndef NSA_TESTS_CASES_H
#define NSA_TESTS_CASES_H

#include "tensors.h"

typedef struct geometry {
    const char *name;
    int B, T, H, Hk, Dk, Dv;
    int l, d, slc_block, n, init, local, w;
    double scale;
    const int32_t *begins;
} geometry;

static const int32_t begins_one[] = {0, 15};
static const int32_t begins_four[] = {0, 15, 205, 550, 800};
static const int32_t begins_three[] = {0, 256, 500, 1000};
/* Empty sequences, and rows before the first. */
static const int32_t begins_empty[] = {3, 3, 40, 40, 41, 90, 90};
static const int32_t begins_short[] = {70, 119, 130, 131, 147}; /* tiles before the first */
/* As long as the longest, and behind as many rows as they have: the last is above B T. */
static const int32_t begins_behind[] = {37, 58, 79};
static const int32_t begins_tiny[] = {0, 11, 11, 18};

/* clang-format off: tables are read in columns. */
/* Small enough for a reference in nested loops, every one of them. */
static const geometry geometries[] = {
    /* name                      B    T   H  Hk  Dk   Dv   l   d  l'  n i  l   w  scale begins */
    {"small", 2, 70, 4, 2, 16, 16, 8, 4, 16, 3, 1, 1, 20, 0, NULL},
    {"G 1, D 16", 1, 97, 2, 2, 16, 16, 16, 8, 32, 2, 1, 1, 32, 0, NULL},
    {"G 2, D 24", 2, 75, 4, 2, 24, 24, 8, 8, 16, 2, 0, 1, 17, 0, NULL},
    {"G 3, D 64", 1, 150, 3, 1, 64, 64, 32, 16, 64, 2, 1, 1, 50, 0, NULL},
    {"G 6, D 80", 1, 129, 6, 1, 80, 80, 16, 4, 16, 5, 1, 2, 64, 0, NULL},
    {"G 12, D 96", 1, 90, 12, 1, 96, 96, 16, 8, 16, 4, 1, 2, 33, 0, NULL},
    {"G 16, D 128", 1, 100, 16, 1, 128, 128, 32, 16, 32, 2, 1, 1, 40, 0, NULL},
    {"D 192 / 128", 1, 80, 6, 1, 192, 128, 16, 16, 16, 3, 1, 1, 31, 0, NULL},
    {"D 7 / 13", 2, 65, 4, 2, 7, 13, 6, 3, 12, 3, 1, 1, 19, 0, NULL},
    {"D 1 / 3", 1, 40, 3, 3, 1, 3, 4, 1, 4, 4, 2, 2, 9, 0, NULL},
    {"D 256", 1, 50, 2, 1, 256, 256, 8, 2, 16, 3, 0, 2, 16, 0, NULL},
    {"D 320 / 200", 1, 70, 3, 1, 320, 200, 8, 8, 16, 3, 1, 1, 21, 0, NULL},
    {"D 576 / 512", 1, 75, 5, 1, 576, 512, 16, 8, 16, 3, 1, 1, 33, 0, NULL},
    {"D 575 / 511", 2, 41, 4, 2, 575, 511, 8, 4, 8, 3, 1, 1, 19, 0, NULL},
    {"scale 1, heads 16", 1, 63, 16, 1, 64, 64, 32, 16, 32, 16, 1, 2, 32, 1, NULL},
    {"scale 1, D 100", 3, 111, 32, 1, 100, 100, 32, 16, 32, 16, 1, 2, 32, 1, NULL},
    {"T 1", 2, 1, 2, 1, 16, 16, 8, 4, 16, 2, 1, 1, 4, 0, NULL},
    {"T < l", 1, 15, 2, 1, 16, 16, 16, 8, 16, 2, 1, 1, 64, 0, NULL},
    {"T = l", 1, 16, 2, 1, 16, 16, 16, 8, 16, 2, 1, 1, 64, 0, NULL},
    {"T > w, one block more", 1, 257, 2, 1, 16, 16, 16, 8, 32, 3, 1, 1, 16, 0, NULL},
    {"T no multiple of anything", 1, 211, 2, 1, 32, 32, 12, 6, 30, 3, 1, 1, 47, 0, NULL},
    {"w 1", 1, 37, 2, 1, 16, 16, 4, 2, 16, 2, 1, 1, 1, 0, NULL},
    {"w > T", 1, 37, 2, 1, 16, 16, 4, 2, 16, 2, 1, 1, 500, 0, NULL},
    {"n 1", 1, 66, 2, 1, 16, 16, 8, 4, 8, 1, 0, 1, 10, 0, NULL},
    {"one head, l' far above l", 1, 300, 1, 1, 32, 32, 4, 4, 128, 2, 0, 1, 90, 0, NULL},
    {"full at S 8", 1, 8, 4, 2, 16, 16, 4, 2, 4, 4, 1, 1, 16, 0, NULL},
    {"the paper's blocks", 1, 700, 4, 1, 32, 32, 32, 16, 64, 4, 1, 2, 128, 0, NULL},
    {"varlen one", 1, 15, 4, 2, 32, 32, 8, 4, 8, 2, 1, 1, 8, 0, begins_one},
    {"varlen four", 4, 345, 4, 2, 32, 32, 32, 16, 32, 4, 1, 2, 64, 0, begins_four},
    {"varlen empty", 6, 49, 4, 2, 16, 24, 8, 4, 16, 2, 1, 1, 13, 0, begins_empty},
    {"varlen behind others", 2, 21, 4, 2, 24, 16, 8, 4, 8, 2, 1, 1, 8, 0, begins_behind},
    {"varlen l = d", 4, 49, 2, 1, 24, 16, 8, 8, 16, 2, 1, 1, 13, 0, begins_short},
#ifndef CHECK_CUDA
    /* kv heads so wide that the chain's backward takes them one by one */
    {"Hk 2, D 136", 1, 45, 2, 2, 136, 16, 8, 4, 16, 2, 1, 1, 12, 0, NULL},
    /* lists of blocks that are no tiles: of queries that see many keys tiles hold listed ones */
    {"blocks of 2", 2, 120, 16, 1, 32, 32, 2, 1, 2, 5, 0, 1, 20, 0, NULL},
    {"blocks of 3", 4, 345, 4, 1, 16, 16, 3, 3, 3, 22, 0, 1, 20, 0, begins_four},
    {"single tokens", 1, 280, 12, 1, 16, 24, 1, 1, 1, 70, 1, 2, 20, 0, NULL},
#endif
#ifdef CHECK_CUDA
    /* The edges of what CUDA takes: selection blocks that are no multiple of a tile, of single
       tokens, and too long; every padded width, more heads than a tile of rows, more blocks than a
       warp has lanes. */
    {"l' 48", 1, 205, 3, 1, 32, 40, 16, 8, 48, 3, 1, 1, 33, 0, NULL},
    {"l' 80", 1, 170, 2, 2, 128, 96, 16, 16, 80, 2, 0, 1, 40, 0, NULL},
    {"l' 112", 1, 240, 4, 2, 64, 64, 28, 14, 112, 2, 1, 1, 70, 0, NULL},
    {"D 136 / 200", 1, 70, 2, 1, 136, 200, 8, 8, 16, 3, 1, 1, 21, 0, NULL},
    {"D 8 / 256", 1, 61, 3, 3, 8, 256, 8, 4, 16, 2, 1, 1, 17, 0, NULL},
    {"G 80", 1, 37, 80, 1, 24, 16, 8, 4, 16, 2, 1, 1, 11, 0, NULL},
    {"35 blocks", 1, 550, 1, 1, 24, 16, 8, 8, 16, 2, 0, 1, 20, 0, NULL},
    {"tokens for blocks", 1, 150, 6, 2, 24, 16, 1, 1, 1, 40, 1, 2, 20, 0, NULL},
    {"l' 4", 2, 90, 8, 1, 16, 16, 4, 2, 4, 7, 0, 1, 20, 0, NULL},
    {"l' 256", 1, 300, 2, 1, 16, 16, 32, 16, 256, 1, 0, 1, 20, 0, NULL},
#endif
};

/* Minutes under the reference: label slow. */
static const geometry large_geometries[] = {
    {"S 1024, scale 0.1", 3, 1024, 32, 2, 60, 60, 32, 16, 32, 16, 1, 2, 128, .1, NULL},
    {"varlen three", 3, 500, 8, 2, 64, 64, 32, 16, 64, 4, 1, 2, 128, 0, begins_three},
    {"S 1024, w 512", 1, 1024, 16, 1, 64, 64, 32, 16, 64, 8, 1, 2, 512, 0, NULL},
    {"S 2100, n 16", 1, 2100, 4, 1, 128, 128, 32, 16, 64, 16, 1, 2, 512, 0, NULL},
};

/* Under the executor a geometry takes seconds, so CUDA's short runs take these, from the first on.
   Those that "broad" adds catch planted faults that no other does: one sequence alone (bad values
   ask for that), a group that no tile of rows is a multiple of, many heads, the widest. */
static const char *const cuda_names[] = {
    "small",        "T 1",         "varlen empty",
    "D 192 / 128",  "T < l",       "one head, l' far above l",
    "w 1",          "35 blocks",   "l' 80",
    "l' 256",       "l' 4",        "tokens for blocks",
    "varlen l = d", "G 1, D 16",   "l' 48",
    "G 80",         "D 136 / 200",
};
enum { CUDA_LITTLE = 3, CUDA_QUICK = 13 };

/* Asked for by name, in no run over a table: selection blocks of 16, which CUDA takes too. */
static const geometry single_geometries[] = {
    {"full at S 60", 1, 60, 4, 2, 16, 16, 4, 2, 16, 4, 1, 1, 64, 0, NULL},
    {"T 34", 1, 34, 4, 2, 16, 16, 8, 4, 8, 2, 0, 1, 10, 0, NULL},
    {"few of many", 1, 200, 16, 1, 16, 16, 8, 4, 16, 4, 1, 1, 20, 0, NULL},
    {"G 6, D 48", 1, 45, 12, 2, 48, 40, 8, 4, 16, 2, 1, 1, 12, 0, NULL},
    {"grad, D 576 / 512", 1, 5, 2, 1, 576, 512, 4, 2, 4, 2, 1, 1, 3, 0, NULL},
};

/* For finite differences in every number. */
static const geometry tiny_geometries[] = {
    {"grad, G 2", 1, 19, 2, 1, 4, 3, 4, 2, 4, 3, 1, 1, 5, 0, NULL},
    {"grad, G 1", 2, 13, 2, 2, 3, 5, 4, 4, 4, 2, 0, 1, 13, .7, NULL},
    {"grad, G 3, overlap 4", 1, 18, 3, 1, 2, 2, 8, 2, 8, 2, 1, 1, 3, 0, NULL},
    {"grad, varlen", 3, 11, 2, 1, 3, 2, 4, 2, 4, 2, 1, 1, 4, 0, begins_tiny},
};
/* clang-format on */

#define COUNT(table) ((int)(sizeof(table) / sizeof(table)[0]))

/* The geometry of that name, from whichever table. Names are unique. */
static inline const geometry *shape(const char *name) {
    for (int i = 0; i < COUNT(geometries); i++)
        if (!strcmp(geometries[i].name, name)) return &geometries[i];
    for (int i = 0; i < COUNT(tiny_geometries); i++)
        if (!strcmp(tiny_geometries[i].name, name)) return &tiny_geometries[i];
    for (int i = 0; i < COUNT(large_geometries); i++)
        if (!strcmp(large_geometries[i].name, name)) return &large_geometries[i];
    for (int i = 0; i < COUNT(single_geometries); i++)
        if (!strcmp(single_geometries[i].name, name)) return &single_geometries[i];
    fprintf(stderr, "cases.h: no geometry is called \"%s\"\n", name);
    exit(EXIT_FAILURE);
}

/* Options that desc_of gives every geometry; a test that sets them sets them back. */
static struct {
    nsa_mask mask;
    int heads_of_list; /* query heads that share a list; 0: all heads of a group */
    nsa_window_rule window_rule;
} case_options;

static inline nsa_desc desc_of(const geometry *g) {
    nsa_desc d = nsa_desc_default(g->B, g->T, g->H, g->Hk, g->Dk);
    d.dim_v = g->Dv;
    d.begins = g->begins;
    /* where the rows are known, and elsewhere not */
    if (d.begins && d.batch % 2 == 0) d.rows = d.begins[d.batch] + d.batch % 4;
    d.cmp_block = g->l, d.cmp_stride = g->d;
    d.slc_block = g->slc_block, d.slc_count = g->n, d.slc_init = g->init, d.slc_local = g->local;
    d.window = g->w;
    d.scale = g->scale;
    d.mask = case_options.mask;
    if (case_options.heads_of_list) d.list_heads = d.heads / case_options.heads_of_list;
    d.window_rule = case_options.window_rule;
    return d;
}

/* The dtypes that this build's tensors may have, its own first. */
static const nsa_dtype dtypes[] = {
#ifdef CHECK_F64
    NSA_F64, NSA_F32
#else
    NSA_F32, NSA_BF16,
#ifndef NSA_CUDA_NO_F16
    NSA_F16
#endif
#endif
};

/* Tests take another layout, slice and gradient dtype with each: CUDA, which has no instruction
   sets, gets two turns. */
#ifdef CHECK_CUDA
enum { CHECKS_CUDA = 1 };
static const nsa_isa isas[] = {NSA_ISA_DETECT, NSA_ISA_DETECT};
#else
enum { CHECKS_CUDA = 0 };
static const nsa_isa isas[] = {NSA_ISA_DETECT,  NSA_ISA_PLAIN,       NSA_ISA_SSE2,
                               NSA_ISA_AVX2,    NSA_ISA_AVX512,      NSA_ISA_NEON,
                               NSA_ISA_SIMD128, NSA_ISA_AVX512_BF16, NSA_ISA_NEON_BF16};
#endif

/* The field that a call of this geometry is refused by, NULL if it is taken: CUDA takes dims in
   steps of 8, up to what is compiled, and selection blocks of at most 128 tokens. */
#ifndef NSA_CUDA_MAX_DIM
#define NSA_CUDA_MAX_DIM 256
#endif
static inline const char *refused_by(const nsa_desc *d) {
    if (!CHECKS_CUDA) return NULL;
    if (d->dim % 8 || d->dim > NSA_CUDA_MAX_DIM) return "dim";
    if (d->dim_v % 8 || d->dim_v > NSA_CUDA_MAX_DIM) return "dim_v";
    return d->slc_block > 128 ? "slc_block" : NULL;
}

/* Begins on the device may hold anything but a wrong end: kernels stay in their views' rows. Four
   sequences of 50 rows, and in their place numbers that do not ascend and lie far outside.
   Sequences that overlap write the same rows, which the executor's checker reports as what it is, a
   race. */
#if defined(CHECK_CUDA) && !defined(CHECK_RACES)
enum { ANY_BEGINS = 12 };
#else
enum { ANY_BEGINS = 0 };
#endif
static const int32_t begins_roomy[] = {0, 50, 100, 150, 200};
/* Rows in all are fewer than 4 x 48: workspaces lie one behind the other. With stride 8 and blocks
   of 8 they have all the compressed rows that rows in all may amount to. */
static const int32_t begins_packed[] = {0, 48, 64, 112, 120};

static inline nsa_desc roomy_desc(const nsa_desc *of) {
    nsa_desc d = *of;
    const int packed = d.cmp_block == 8 && d.cmp_stride == 8;
    d.batch = 4, d.tokens = d.count = packed ? 48 : 50, d.first = 0;
    d.begins = packed ? begins_packed : begins_roomy, d.rows = packed ? 120 : 0;
    return d;
}

/* Where the host knows rows: more than there are or, of just those, a wrong end. */
static inline void any_begins(int trial, nsa_desc *d, int32_t begins[5]) {
    static const int32_t more[][4] = {{0, 48, 0, 48}, {0, 40, 110, 200}}; /* than there are rows */
    for (int b = 0; b < 4; b++) {
        int kind = check_below(8, 81 + (uint64_t)trial, (uint64_t)b);
        begins[b] = trial < 2   ? more[trial][b]
                    : kind == 0 ? INT32_MIN
                    : kind == 1 ? INT32_MAX
                    : kind == 2 ? -1
                                : check_below(260, 82 + (uint64_t)trial, (uint64_t)b);
    }
    begins[4] = d->rows && trial == 1 ? INT32_MAX : d->begins[4];
    if (d->rows) d->rows = d->begins[4] + (trial == 1 ? 0 : 4);
}

/* Under the executor a kernel takes its time: quick runs there put the questions that take many
   runs to small geometries only. */
static inline int asks_little(const geometry *g, int quick) {
    const int rows = (g->begins ? g->begins[g->B] : g->B * g->T) * g->H;
    return CHECKS_CUDA && (quick ? rows * (g->Dk + g->Dv) > 18000 : rows > 1000);
}

/* How much of the table a run takes: the argument of a test program. `quick` is for long tables and
   for builds that only differ in how they were compiled: every third geometry, in f64 another one,
   on CUDA some of those above. `least` asks fewer questions of what `little` takes: for the
   executor's slow modes. */
typedef enum amount { WHOLE, BROAD, QUICK, LITTLE, LEAST } amount;
#ifdef CHECK_F64
enum { FIRST_TAKEN = 1 };
#else
enum { FIRST_TAKEN = 0 };
#endif

static inline int is_taken(int i, amount a) {
    const int names = a >= LITTLE ? CUDA_LITTLE : a == QUICK ? CUDA_QUICK : COUNT(cuda_names);
    int taken = a == WHOLE || (!CHECKS_CUDA && i % 3 == FIRST_TAKEN);
    for (int n = 0; CHECKS_CUDA && n < names; n++)
        taken |= !strcmp(geometries[i].name, cuda_names[n]);
    return taken;
}

/* n normal numbers rounded to the dtype. */
static inline double *random_numbers(uint64_t seed, size_t n, nsa_dtype dtype) {
    double *x = ref_zeros(n);
    for (size_t i = 0; i < n; i++) x[i] = ref_store(dtype_prec(dtype), check_normal(seed, i));
    return x;
}

static inline double *copy_numbers(const double *x, size_t n) {
    double *y = ref_zeros(n);
    memcpy(y, x, n * sizeof *x);
    return y;
}

/* Block lists for every row of every sequence, as anybody may write them: any ascending subset of
   the candidates, empty and full ones among them. */
static inline int32_t *random_blocks(const nsa_desc *d, uint64_t seed) {
    plan p = plan_of(d);
    int width = nsa_block_list_width(d), heads = list_heads_of(d);
    int32_t *blocks = (int32_t *)check_alloc((size_t)p.rows * (size_t)(heads * width) * 4);
    for (int i = 0; i < p.rows * heads * width; i++) blocks[i] = -1;
    for (int b = 0; b < p.sequences; b++)
        for (int t = 0; t < p.length[b]; t++)
            for (int h = 0; h < heads; h++) {
                int row = (p.row[b] + t) * heads + h, slot = 0,
                    last = d->mask == NSA_MASK_NONE ? p.length[b] - 1 : t,
                    candidates = last / d->slc_block + 1;
                int room = check_below(4, seed + 1, (uint64_t)row)
                               ? width
                               : check_below(width + 1, seed + 2, (uint64_t)row);
                for (int j = 0; j < candidates && slot < room; j++)
                    if (check_below(candidates - j, seed, (uint64_t)(row * 977 + j)) < room - slot)
                        blocks[row * width + slot++] = j;
            }
    return blocks;
}

#endif
