/* test_idle_threads.c - a step of decoding of one sequence with more threads than kv heads: each
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

enum { TOKENS = 8320, MOST_NEW = 5, MOST_HEADS = 64, DIM = 48, DIM_V = 72, MOST_BLOCKS = 64 };

static const struct {
    nsa_dtype dtype;
    const char *name;
} caches[] = {
    {NSA_F32, "f32"}, {NSA_BF16, "bf16"}, {NSA_F16, "f16"}, {NSA_I8, "i8"}, {NSA_F64, "f64"}};

/* What a step gives. */
typedef struct results {
    nsa_real out[MOST_NEW * MOST_HEADS * DIM_V], lse[3][MOST_NEW * MOST_HEADS];
    int32_t blocks[MOST_NEW * MOST_BLOCKS];
    nsa_reads reads;
} results;

static results alone, split;
static nsa_real outs[3][MOST_NEW * MOST_HEADS * DIM_V];
static double numbers[TOKENS * DIM_V + 8], queries[MOST_NEW * MOST_HEADS * DIM];

static nsa_tensor rows_of(void *data, int heads, int width) {
    return nsa_tensor_bthd(data, NSA_REAL_DTYPE, MOST_NEW, heads, width);
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

/* Rows of the cache, from the same numbers. */
static void fill(nsa_cache *c) {
    nsa_tensor *parts[] = {&c->k_slc, &c->k_win, &c->k_raw, &c->k_cmp,
                           &c->v_slc, &c->v_win, &c->v_raw, &c->v_cmp};
    for (int i = 0; i < 8; i++) {
        const int width = i < 4 ? DIM : DIM_V, rows = (int)(parts[i]->batch / parts[i]->token);
        nsa_real *from = as_reals(numbers + i, rows * width);
        nsa_tensor reals = nsa_tensor_bthd(from, NSA_REAL_DTYPE, rows, 1, width);
        CHECK_OK("rows", nsa_convert_rows(&reals, parts[i], 1, rows, 1, width));
        free(from);
    }
}

static void step(results *to, nsa_dtype dtype, nsa_desc d, int count, int threads) {
    nsa_cache cache;
    d.threads = threads;
    size_t bytes = nsa_cache_size(&d, dtype, MOST_NEW);
    void *memory = malloc(bytes);
    CHECK_OK("cache", nsa_cache_init(&cache, &d, dtype, MOST_NEW, memory, bytes));
    fill(&cache);
    cache.lengths[0] = cache.newest[0] = TOKENS - count - 3;
    nsa_attention x;
    memset(&x, 0, sizeof x);
    nsa_real *q = as_reals(queries, count * d.heads * DIM), *k = as_reals(numbers, count * DIM),
             *v = as_reals(numbers + 5, count * DIM_V), *g = as_reals(numbers, count * d.heads * 3);
    x.q = rows_of(q, d.heads, DIM);
    x.k_slc = x.k_win = rows_of(k, 1, DIM), x.v_slc = x.v_win = rows_of(v, 1, DIM_V);
    x.k_cmp = mean_of(x.k_slc, cache.k_cmp, DIM), x.v_cmp = mean_of(x.v_slc, cache.v_cmp, DIM_V);
    x.gates = rows_of(g, d.heads, 3);
    x.out_cmp = rows_of(outs[0], d.heads, DIM_V), x.out_slc = rows_of(outs[1], d.heads, DIM_V);
    x.out_win = rows_of(outs[2], d.heads, DIM_V), x.out = rows_of(to->out, d.heads, DIM_V);
    x.lse_cmp = rows_of(to->lse[0], d.heads, 1), x.lse_slc = rows_of(to->lse[1], d.heads, 1);
    x.lse_win = rows_of(to->lse[2], d.heads, 1);
    x.blocks = nsa_tensor_bthd(to->blocks, NSA_I32, MOST_NEW, 1, nsa_block_list_width(&d));
    bytes = nsa_decode_workspace_size(&x, &cache, count);
    void *workspace = malloc(bytes);
    memset(to, 0, sizeof *to);
    CHECK_OK("step", nsa_decode(&x, &cache, count, NULL, &to->reads, workspace, bytes));
    free(workspace), free(q), free(k), free(v), free(g), free(memory);
}

static void compare(int cache, int heads, int count, const char *bad) {
    nsa_desc d = nsa_desc_default(1, TOKENS, heads, 1, DIM);
    static const int threads[] = {2, 3, 8, 17};
    d.dim_v = DIM_V;
    step(&alone, caches[cache].dtype, d, count, 1);
    for (int i = 0; i < COUNT(threads); i++) {
        check_case("%s, %d heads, %d tokens, %s, %d threads", caches[cache].name, d.heads, count,
                   bad, threads[i]);
        step(&split, caches[cache].dtype, d, count, threads[i]);
        CHECK_BITS("out", split.out, alone.out, sizeof alone.out, sizeof(nsa_real));
        CHECK_BITS("lse", split.lse, alone.lse, sizeof alone.lse, sizeof(nsa_real));
        CHECK_BITS("blocks", split.blocks, alone.blocks, sizeof alone.blocks, sizeof(int32_t));
        CHECK(!memcmp(&split.reads, &alone.reads, sizeof alone.reads), "reads differ");
    }
}

/* Work for some threads: less is done by one. Queries that are one batch read keys in place. Groups
   of 20 heads have no parts of eight rows. */
static const struct { int heads, count; } sizes[] = {{64, 1}, {16, 4}, {20, 3}, {17, 2}};

int main(void) {
    for (int i = 0; i < COUNT(numbers); i++) numbers[i] = check_normal(1, (uint64_t)i);
    for (int i = 0; i < COUNT(queries); i++) queries[i] = check_normal(2, (uint64_t)i);
    for (int i = 0; i < COUNT(caches); i++) {
        if (caches[i].dtype == NSA_F64 && sizeof(nsa_real) == 4) continue;
        for (int j = 0; j < COUNT(sizes); j++)
            compare(i, sizes[j].heads, sizes[j].count, "all finite");
    }
    queries[7 + 19 * DIM] = NAN;
    compare(0, 16, 4, "a query is NaN");
    numbers[777 * DIM_V + 60] = INFINITY;
    compare(0, 16, 4, "a number of keys and values is inf");
    compare(1, 20, 3, "a number of keys and values is inf");
    return check_done("test_idle_threads");
}
