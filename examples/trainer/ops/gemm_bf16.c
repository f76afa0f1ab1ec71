/* gemm_bf16.c - matrix products of bf16 by oneDNN. Twin: gemm_bf16.h.

   Tiles of c are cut and shared out as in gemm.c. oneDNN makes a kernel for each shape of tile,
   which takes longer than a small product, so kernels are kept. A kernel says how it wants b; where
   that is not how a weight lies, each tile's columns are copied once and kept. */
#include "ops/gemm_bf16.h"

const char *gemm_bf16_reason(bool built, bool units) {
    if (!units) return "this processor has no units for bf16";
    if (built)
        return "oneDNN may not use this processor's units (ONEDNN_MAX_CPU_ISA), or has no memory";
    return "built without oneDNN, with which (Debian, Ubuntu: libdnnl-dev) --precision bf16 takes "
           "0.6 "
           "to 0.7 of fp32's time on this processor";
}

#ifdef NSA_HAVE_DNNL

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "ops/dnnl_layout.h"

enum { ACROSS = 512, KERNELS = 64, ALIGNMENT = 64 };

/* What a kernel hangs on; without holes, so that its bytes compare. Strides are of a as (m, k), of
   b as (k, n) and of c. */
typedef struct tile_shape {
    int64_t m, n, k, a_row, a_col, b_row, b_col, c_row;
    int64_t c_is_f32, add, keeps_b;
} tile_shape;

typedef struct kernel {
    tile_shape shape;
    dnnl_primitive_t run; /* NULL: this place is free */
    layout a, b, c, plain_b, scratch;
    int64_t used; /* when it was last */
} kernel;

/* Columns of a weight as they lie and as a kernel wants them. */
typedef struct packed {
    const uint16_t *from;
    layout plain, kept;
    void *data;
    bool fresh;
} packed;

typedef struct worker {
    dnnl_stream_t stream;
    void *scratch;
    size_t bytes;
} worker;

struct gemm_bf16 {
    dnnl_engine_t engine;
    kernel kernels[KERNELS];
    int64_t uses;
    packed *packed;
    int packed_count, packed_room;
    worker *workers;
    int threads;
};

/* A product, with the kernels of its four kinds of tile and the copies of b's columns. A kind is
   the sum of LAST_COLUMN and LAST_ROW, or 0. */
enum { LAST_COLUMN = 1, LAST_ROW = 2, KINDS = 4 };

typedef struct job {
    gemm_bf16 *g;
    gemm_tiles tiles;
    int m, n;
    const uint16_t *a, *b;
    char *c;
    tile_shape strides;
    const kernel *kernels[KINDS];
    int *copies; /* of each column, and again for the last row: a place in g->packed, or PLAIN */
    int *stale;  /* places that must be packed first */
    int stale_count;
} job;

enum { PLAIN = -1, NO_MEMORY = -2 };

bool gemm_bf16_built(void) {
    return true;
}

gemm_bf16 *gemm_bf16_open(int threads) {
    if ((dnnl_get_effective_cpu_isa() & dnnl_cpu_isa_avx512_core_bf16) !=
        dnnl_cpu_isa_avx512_core_bf16)
        return NULL;
    gemm_bf16 *g = calloc(1, sizeof *g);
    if (!g) return NULL;
    bool ok = dnnl_engine_create(&g->engine, dnnl_cpu, 0) == dnnl_success;
    g->threads = threads;
    g->workers = calloc((size_t)threads, sizeof *g->workers);
    for (int i = 0; ok && g->workers && i < threads; i++)
        ok = dnnl_stream_create(&g->workers[i].stream, g->engine, dnnl_stream_default_flags) ==
             dnnl_success;
    if (ok && g->workers) return g;
    gemm_bf16_close(g);
    return NULL;
}

static void kernel_free(kernel *x) {
    if (x->run) dnnl_primitive_destroy(x->run);
    layout_free(&x->a);
    layout_free(&x->b);
    layout_free(&x->c);
    layout_free(&x->plain_b);
    layout_free(&x->scratch);
    memset(x, 0, sizeof *x);
}

static void packed_free(packed *x) {
    layout_free(&x->plain);
    layout_free(&x->kept);
    free(x->data);
}

void gemm_bf16_close(gemm_bf16 *g) {
    if (!g) return;
    for (int i = 0; i < KERNELS; i++) kernel_free(&g->kernels[i]);
    for (int i = 0; i < g->packed_count; i++) packed_free(&g->packed[i]);
    for (int i = 0; g->workers && i < g->threads; i++) {
        if (g->workers[i].stream) dnnl_stream_destroy(g->workers[i].stream);
        free(g->workers[i].scratch);
    }
    if (g->engine) dnnl_engine_destroy(g->engine);
    free(g->workers);
    free(g->packed);
    free(g);
}

void gemm_bf16_changed(gemm_bf16 *g, const void *first, size_t bytes) {
    uintptr_t begin = (uintptr_t)first;
    for (int i = 0; i < g->packed_count; i++)
        if ((uintptr_t)g->packed[i].from - begin < bytes) g->packed[i].fresh = false;
}

/* ---- Kernels ------------------------------------------------------------------------------- */

static bool describe(layout *to, int64_t rows, int64_t cols, int64_t row, int64_t col, bool f32) {
    const dnnl_dims_t sizes = {rows, cols}, strides = {row, col};
    return layout_strided(to, f32 ? dnnl_f32 : dnnl_bf16, sizes, strides);
}

static bool set_attributes(dnnl_primitive_attr_t attributes, bool add) {
    dnnl_post_ops_t after = NULL;
    bool ok = dnnl_post_ops_create(&after) == dnnl_success && (!add || layout_append_sum(after)) &&
              dnnl_primitive_attr_set_post_ops(attributes, after) == dnnl_success &&
              dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user) ==
                  dnnl_success;
    if (after) dnnl_post_ops_destroy(after);
    return ok;
}

static bool kernel_create(const gemm_bf16 *g, kernel *x, dnnl_primitive_attr_t attributes) {
    const tile_shape *s = &x->shape;
    const dnnl_dims_t b_sizes = {s->k, s->n};
    layout wanted;
    memset(&wanted, 0, sizeof wanted);
    dnnl_primitive_desc_t made = NULL;
    bool ok =
        describe(&x->a, s->m, s->k, s->a_row, s->a_col, false) &&
        describe(&x->plain_b, s->k, s->n, s->b_row, s->b_col, false) &&
        describe(&x->c, s->m, s->n, s->c_row, 1, s->c_is_f32) &&
        (s->keeps_b ? layout_any(&wanted, dnnl_bf16, b_sizes)
                    : layout_copy(&wanted, layout_of(&x->plain_b))) &&
        set_attributes(attributes, s->add) &&
        layout_product(&made, &x->a, &wanted, &x->c, attributes, g->engine) &&
        dnnl_primitive_create(&x->run, made) == dnnl_success &&
        layout_copy(&x->b, dnnl_primitive_desc_query_md(made, dnnl_query_weights_md, 0)) &&
        layout_copy(&x->scratch, dnnl_primitive_desc_query_md(made, dnnl_query_scratchpad_md, 0));
    if (made) dnnl_primitive_desc_destroy(made);
    layout_free(&wanted);
    return ok;
}

/* The one that was not used for longest makes room: a job's four are never that. */
static const kernel *kernel_for(gemm_bf16 *g, const tile_shape *s) {
    kernel *x = g->kernels;
    dnnl_primitive_attr_t attributes;
    for (int i = 0; i < KERNELS; i++) {
        kernel *y = &g->kernels[i];
        if (y->run && !memcmp(&y->shape, s, sizeof *s)) {
            y->used = ++g->uses;
            return y;
        }
        if (y->used < x->used) x = y;
    }
    kernel_free(x);
    x->shape = *s;
    if (dnnl_primitive_attr_create(&attributes) != dnnl_success) return NULL;
    bool ok = kernel_create(g, x, attributes);
    dnnl_primitive_attr_destroy(attributes);
    if (!ok) return kernel_free(x), NULL;
    x->used = ++g->uses;
    return x;
}

/* ---- Copies of weights --------------------------------------------------------------------- */

static int packed_place(gemm_bf16 *g, const uint16_t *from, const kernel *x) {
    layout_ref wanted = layout_of(&x->b), plain = layout_of(&x->plain_b);
    if (dnnl_memory_desc_equal(wanted, plain)) return PLAIN;
    for (int i = 0; i < g->packed_count; i++) {
        const packed *y = &g->packed[i];
        if (y->from == from && dnnl_memory_desc_equal(layout_of(&y->kept), wanted) &&
            dnnl_memory_desc_equal(layout_of(&y->plain), plain))
            return i;
    }
    if (g->packed_count == g->packed_room) {
        int room = 2 * g->packed_room + 16;
        packed *more = realloc(g->packed, (size_t)room * sizeof *more);
        if (!more) return NO_MEMORY;
        g->packed = more;
        g->packed_room = room;
    }
    packed made;
    memset(&made, 0, sizeof made);
    made.from = from;
    if (!layout_copy(&made.plain, plain) || !layout_copy(&made.kept, wanted) ||
        posix_memalign(&made.data, ALIGNMENT, dnnl_memory_desc_get_size(wanted))) {
        packed_free(&made);
        return NO_MEMORY;
    }
    g->packed[g->packed_count] = made;
    return g->packed_count++;
}

typedef struct argument {
    int name;
    layout_ref lies;
    const void *data;
} argument;

enum { ARGUMENTS = 4 };

static bool execute(const gemm_bf16 *g, dnnl_primitive_t run, const argument *x, int count) {
    dnnl_exec_arg_t given[ARGUMENTS];
    int made = 0;
    bool ok = true;
    for (; ok && made < count; made += ok) {
        given[made].arg = x[made].name;
        ok = dnnl_memory_create(&given[made].memory, x[made].lies, g->engine,
                                (void *)(uintptr_t)x[made].data) == dnnl_success;
    }
    dnnl_stream_t stream = g->workers[omp_get_thread_num()].stream;
    ok = ok && dnnl_primitive_execute(run, stream, made, given) == dnnl_success &&
         dnnl_stream_wait(stream) == dnnl_success;
    while (made) dnnl_memory_destroy(given[--made].memory);
    return ok;
}

static bool pack(const gemm_bf16 *g, const packed *x) {
    layout_ref from = layout_of(&x->plain), to = layout_of(&x->kept);
    const argument arguments[] = {{DNNL_ARG_FROM, from, x->from}, {DNNL_ARG_TO, to, x->data}};
    dnnl_primitive_desc_t made = NULL;
    dnnl_primitive_t run = NULL;
    bool ok = dnnl_reorder_primitive_desc_create(&made, from, g->engine, to, g->engine, NULL) ==
                  dnnl_success &&
              dnnl_primitive_create(&run, made) == dnnl_success && execute(g, run, arguments, 2);
    if (run) dnnl_primitive_destroy(run);
    if (made) dnnl_primitive_desc_destroy(made);
    return ok;
}

/* ---- A product ----------------------------------------------------------------------------- */

static int kind_of(const job *x, int row, int col) {
    return (row == x->tiles.rows - 1 ? LAST_ROW : 0) + (col == x->tiles.cols - 1 ? LAST_COLUMN : 0);
}

static const uint16_t *columns_of(const job *x, int col) {
    return x->b + (ptrdiff_t)col * x->tiles.across * x->strides.b_col;
}

static bool choose_kernels(job *x) {
    for (int kind = 0; kind < KINDS; kind++) {
        tile_shape s = x->strides;
        int above = (x->tiles.rows - 1) * x->tiles.side,
            left = (x->tiles.cols - 1) * x->tiles.across;
        s.m = kind & LAST_ROW || !above ? x->m - above : x->tiles.side;
        s.n = kind & LAST_COLUMN || !left ? x->n - left : x->tiles.across;
        x->kernels[kind] = kernel_for(x->g, &s);
        if (!x->kernels[kind]) return false;
    }
    return true;
}

static bool choose_copies(job *x) {
    for (int i = 0; i < 2 * x->tiles.cols; i++) {
        int col = i % x->tiles.cols, row = i < x->tiles.cols ? 0 : x->tiles.rows - 1;
        int place = packed_place(x->g, columns_of(x, col), x->kernels[kind_of(x, row, col)]);
        if (place == NO_MEMORY) return false;
        x->copies[i] = place;
        if (place == PLAIN || x->g->packed[place].fresh) continue;
        x->stale[x->stale_count++] = place;
        x->g->packed[place].fresh = true;
    }
    return true;
}

static bool make_scratch(const job *x) {
    size_t bytes = 0;
    for (int kind = 0; kind < KINDS; kind++) {
        size_t more = dnnl_memory_desc_get_size(layout_of(&x->kernels[kind]->scratch));
        bytes = more > bytes ? more : bytes;
    }
    for (int i = 0; i < x->g->threads; i++) {
        worker *w = &x->g->workers[i];
        if (w->bytes >= bytes) continue;
        free(w->scratch);
        w->bytes = 0;
        if (posix_memalign(&w->scratch, ALIGNMENT, bytes)) return w->scratch = NULL, false;
        w->bytes = bytes;
    }
    return true;
}

static bool multiply_tile(const job *x, int row, int col) {
    const kernel *k = x->kernels[kind_of(x, row, col)];
    int place = x->copies[col + (row == x->tiles.rows - 1 ? x->tiles.cols : 0)];
    const void *b = place == PLAIN ? columns_of(x, col) : x->g->packed[place].data;
    ptrdiff_t top = (ptrdiff_t)row * x->tiles.side;
    ptrdiff_t c = top * x->n + (ptrdiff_t)col * x->tiles.across;
    const argument arguments[] = {
        {DNNL_ARG_SRC, layout_of(&k->a), x->a + top * x->strides.a_row},
        {DNNL_ARG_WEIGHTS, layout_of(&k->b), b},
        {DNNL_ARG_DST, layout_of(&k->c),
         x->c + c * (ptrdiff_t)(x->strides.c_is_f32 ? sizeof(float) : sizeof(uint16_t))},
        {DNNL_ARG_SCRATCHPAD, layout_of(&k->scratch), x->g->workers[omp_get_thread_num()].scratch}};
    return execute(x->g, k->run, arguments, ARGUMENTS);
}

/* Kernels are made for one thread, so they are chosen where oneDNN sees one. */
static bool prepare(job *x) {
    bool ok = false;
#pragma omp parallel num_threads(1)
    {
        gemm_stay_alone();
        ok = choose_kernels(x) && choose_copies(x) && make_scratch(x);
    }
    return ok;
}

static bool multiply_tiles(const job *x) {
    int failed = 0;
#pragma omp parallel num_threads(x->g->threads) reduction(| : failed)
    {
        gemm_stay_alone();
#pragma omp for schedule(dynamic)
        for (int i = 0; i < x->stale_count; i++) failed |= !pack(x->g, &x->g->packed[x->stale[i]]);
#pragma omp for collapse(2) schedule(dynamic)
        for (int row = 0; row < x->tiles.rows; row++)
            for (int col = 0; col < x->tiles.cols; col++) failed |= !multiply_tile(x, row, col);
    }
    return !failed;
}

bool gemm_bf16_multiply(gemm_bf16 *g, gemm_form form, int m, int n, int k, const uint16_t *a,
                        const uint16_t *b, void *c, bool c_is_f32, bool add) {
    tile_shape s = {.k = k, .a_row = k, .a_col = 1, .b_row = n, .b_col = 1, .c_row = n};
    if (form == GEMM_TN) s.a_row = 1, s.a_col = m;
    if (form == GEMM_NT) s.b_row = 1, s.b_col = k;
    s.c_is_f32 = c_is_f32, s.add = add, s.keeps_b = form != GEMM_TN;
    job x = {g, gemm_cut(m, n, ACROSS), m, n, a, b, c, s, {NULL}, NULL, NULL, 0};
    x.copies = malloc(4 * (size_t)x.tiles.cols * sizeof *x.copies);
    x.stale = x.copies ? x.copies + 2 * x.tiles.cols : NULL;
    bool ok = x.copies && prepare(&x) && multiply_tiles(&x);
    for (int i = 0; !ok && i < x.stale_count; i++) g->packed[x.stale[i]].fresh = false;
    free(x.copies);
    return ok;
}

#else

bool gemm_bf16_built(void) {
    return false;
}

gemm_bf16 *gemm_bf16_open(int threads) {
    (void)threads;
    return NULL;
}

void gemm_bf16_close(gemm_bf16 *g) {
    (void)g;
}

void gemm_bf16_changed(gemm_bf16 *g, const void *first, size_t bytes) {
    (void)g, (void)first, (void)bytes;
}

bool gemm_bf16_multiply(gemm_bf16 *g, gemm_form form, int m, int n, int k, const uint16_t *a,
                        const uint16_t *b, void *c, bool c_is_f32, bool add) {
    (void)g, (void)form, (void)m, (void)n, (void)k, (void)a, (void)b, (void)c, (void)c_is_f32;
    (void)add;
    return false;
}

#endif
