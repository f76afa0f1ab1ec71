/* test_idle_threads.c - a step of decoding with more threads than sequences and kv heads: each
   number has the bits that one thread gives.
   Twin: nsa/src/attend_split.h. Not here: whether one thread is right (test_decode.c), one branch
   alone (test_attend_dense.c and others). */
#include <math.h>

#include "harness/check.h"
#include "harness/tensors.h"
#include "nsa.h"

#define COUNT(table) ((int)(sizeof(table) / sizeof(table)[0]))
#define CHECK_OK(what, call)                                             \
    do {                                                                 \
        nsa_status status = (call);                                      \
        CHECK(status == NSA_OK, what ": %s %s", nsa_status_name(status), \
              nsa_status_where(status));                                 \
    } while (0)

enum { TOKENS = 8320, MOST_NEW = 32, MOST_HEADS = 512, DIM = 48, DIM_V = 72, MOST_BLOCKS = 64 };
enum { MOST_ROWS = 4 * MOST_HEADS }; /* of tokens and heads */

static const struct {
    nsa_dtype dtype;
    int bytes;
    const char *name;
} caches[] = {{NSA_F32, 4, "f32"},
              {NSA_BF16, 2, "bf16"},
              {NSA_F16, 2, "f16"},
              {NSA_I8, 1, "i8"},
              {NSA_F64, 8, "f64"}};

/* New tokens of each of some sequences. */
typedef struct shape {
    int heads, count, sequences;
    int slc_block; /* 0: the default; blocks that no tiles divide are gathered */
} shape;

/* What a step gives. */
typedef struct results {
    nsa_real out[MOST_ROWS * DIM_V], lse[3][MOST_ROWS];
    int32_t blocks[MOST_NEW * MOST_BLOCKS];
    nsa_reads reads[MOST_NEW];
} results;

static results alone, split;
static nsa_real outs[3][MOST_ROWS * DIM_V];
static double numbers[TOKENS * DIM_V + 8 + 32 * MOST_NEW], queries[MOST_ROWS * DIM];

/* One row more of each sequence than are used. */
static nsa_tensor rows_of(void *data, int count, int heads, int width) {
    return nsa_tensor_bthd(data, NSA_REAL_DTYPE, count + 1, heads, width);
}

static nsa_compress mean_of(nsa_tensor x, nsa_tensor out, int dim) {
    nsa_compress c;
    memset(&c, 0, sizeof c);
    c.phi = NSA_PHI_MEAN, c.dim = dim, c.x = x, c.out = out;
    return c;
}

static nsa_real *as_reals(const double *from, int n) {
    nsa_real *to = (nsa_real *)malloc((size_t)n * sizeof *to);
    for (int i = 0; i < n; i++) to[i] = (nsa_real)from[i];
    return to;
}

/* Rows of a sequence of the cache, from numbers of its own. */
static void fill(nsa_cache *c, int sequence, int bytes) {
    nsa_tensor *parts[] = {&c->k_slc, &c->k_win, &c->k_raw, &c->k_cmp,
                           &c->v_slc, &c->v_win, &c->v_raw, &c->v_cmp};
    for (int i = 0; i < 8; i++) {
        const int width = i < 4 ? DIM : DIM_V, rows = (int)(parts[i]->batch / parts[i]->token);
        nsa_real *from = as_reals(numbers + i + 32 * sequence, rows * width);
        nsa_tensor reals = nsa_tensor_bthd(from, NSA_REAL_DTYPE, rows, 1, width), to = *parts[i];
        to.data = (char *)to.data + sequence * to.batch * bytes;
        CHECK_OK("rows", nsa_convert_rows(&reals, &to, 1, rows, 1, width));
        free(from);
    }
}

/* Sequences of different lengths; `counts`: NULL, or as nsa_decode takes it. */
static void step(results *to, int format, const shape *s, const int32_t *counts, int threads) {
    const int count = s->count, heads = s->heads, rows = (count + 1) * s->sequences;
    const nsa_dtype dtype = caches[format].dtype;
    nsa_cache cache;
    nsa_desc d = nsa_desc_default(s->sequences, TOKENS, heads, 1, DIM);
    d.dim_v = DIM_V;
    d.threads = threads;
    if (s->slc_block) d.slc_block = s->slc_block, d.cmp_block = d.cmp_stride = s->slc_block / 3;
    size_t bytes = nsa_cache_size(&d, dtype, MOST_NEW);
    void *memory = malloc(bytes);
    CHECK_OK("cache", nsa_cache_init(&cache, &d, dtype, MOST_NEW, memory, bytes));
    for (int b = 0; b < s->sequences; b++) {
        fill(&cache, b, caches[format].bytes);
        cache.lengths[b] = cache.newest[b] = TOKENS - count - 3 - 1000 * b;
    }
    nsa_attention x;
    memset(&x, 0, sizeof x);
    nsa_real *q = as_reals(queries, rows * heads * DIM), *k = as_reals(numbers, rows * DIM),
             *v = as_reals(numbers + 5, rows * DIM_V), *g = as_reals(numbers, rows * heads * 3);
    x.q = rows_of(q, count, heads, DIM);
    x.k_slc = x.k_win = rows_of(k, count, 1, DIM), x.v_slc = x.v_win = rows_of(v, count, 1, DIM_V);
    x.k_cmp = mean_of(x.k_slc, cache.k_cmp, DIM), x.v_cmp = mean_of(x.v_slc, cache.v_cmp, DIM_V);
    x.gates = rows_of(g, count, heads, 3);
    nsa_tensor *branches[] = {&x.out_cmp, &x.out_slc, &x.out_win};
    nsa_tensor *lses[] = {&x.lse_cmp, &x.lse_slc, &x.lse_win};
    for (int i = 0; i < 3; i++) *branches[i] = rows_of(outs[i], count, heads, DIM_V);
    for (int i = 0; i < 3; i++) *lses[i] = rows_of(to->lse[i], count, heads, 1);
    x.out = rows_of(to->out, count, heads, DIM_V);
    x.blocks = nsa_tensor_bthd(to->blocks, NSA_I32, count + 1, 1, nsa_block_list_width(&d));
    bytes = nsa_decode_workspace_size(&x, &cache, count);
    void *workspace = malloc(bytes);
    memset(workspace, 0x7f, bytes); /* as an earlier call may leave it */
    memset(to, 0, sizeof *to);
    CHECK_OK("step", nsa_decode(&x, &cache, count, counts, to->reads, workspace, bytes));
    free(workspace), free(q), free(k), free(v), free(g), free(memory);
}

static void compare(int format, shape s, const int32_t *counts, const char *what) {
    static const int threads[] = {2, 3, 8, 17};
    step(&alone, format, &s, counts, 1);
    for (int i = 0; i < COUNT(threads); i++) {
        check_case("%s, %d heads, %d tokens of %d sequences, blocks of %d, %s, %d threads",
                   caches[format].name, s.heads, s.count, s.sequences, s.slc_block, what,
                   threads[i]);
        step(&split, format, &s, counts, threads[i]);
        CHECK_BITS("out", split.out, alone.out, sizeof alone.out, sizeof(nsa_real));
        CHECK_BITS("lse", split.lse, alone.lse, sizeof alone.lse, sizeof(nsa_real));
        CHECK_BITS("blocks", split.blocks, alone.blocks, sizeof alone.blocks, sizeof(int32_t));
        CHECK(!memcmp(split.reads, alone.reads, sizeof alone.reads), "reads differ");
    }
}

/* Work for some threads: less is done by one. Queries that are one batch read keys in place. Groups
   of 20 heads have no parts of eight rows. */
static const shape sizes[] = {{64, 1, 1, 0}, {16, 4, 1, 0}, {20, 3, 1, 0},
                              {17, 2, 1, 0}, {16, 1, 4, 0}, {64, 1, 1, 24}};

int main(void) {
    static const int32_t one_waits[] = {1, 0, 1, 1};
    static const shape wide = {MOST_HEADS, 1, 1, 0}, apart = {64, 4, 1, 24}, many = {2, 32, 1, 0};
    for (int i = 0; i < COUNT(numbers); i++) numbers[i] = check_normal(1, (uint64_t)i);
    for (int i = 0; i < COUNT(queries); i++) queries[i] = check_normal(2, (uint64_t)i);
    for (int i = 0; i < COUNT(caches); i++) {
        if (caches[i].dtype == NSA_F64 && sizeof(nsa_real) == 4) continue;
        for (int j = 0; j < COUNT(sizes); j++) compare(i, sizes[j], NULL, "all finite");
    }
    compare(0, wide, NULL, "more numbers than a part has room for");
    compare(0, many, NULL, "more queries than batches at hand");
    compare(0, apart, NULL, "blocks that are gathered, each query alone");
    compare(0, sizes[4], one_waits, "one without a token");
    queries[7 + 19 * DIM] = NAN;
    compare(0, sizes[1], NULL, "a query is NaN");
    numbers[777 * DIM_V + 60] = INFINITY;
    compare(0, sizes[1], NULL, "a number of keys and values is inf");
    compare(1, sizes[2], NULL, "a number of keys and values is inf");
    compare(0, sizes[4], NULL, "a number of keys and values is inf");
    return check_done("test_idle_threads");
}
