/* observer.c - see observer.h. */
#include "observer.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* ---- Statistics ---------------------------------------------------------------------------- */

static void to_floats(float *to, const void *from, nsa_dtype dtype, int64_t count) {
    const float *f32 = from;
    const double *f64 = from;
    const uint16_t *half = from;
    for (int64_t i = 0; i < count; i++)
        to[i] = dtype == NSA_F32    ? f32[i]
                : dtype == NSA_F64  ? (float)f64[i]
                : dtype == NSA_BF16 ? nsa_bf16_to_f32(half[i])
                                    : nsa_f16_to_f32(half[i]);
}

/* The lists of a layer, sequence after sequence: a row of the batch, or a document. */
static void add_lists(observer *x, const nsa_desc *d) {
    const model *m = x->model;
    int groups = m->config.n_kv_groups, width = nsa_block_list_width(d);
    int sequences = m->documents ? m->documents : m->batch;
    size_t bytes = ((size_t)m->documents + 1) * sizeof *x->begins;
    if (m->documents) x->inner->download(x->inner, x->begins, m->begins, bytes);
    for (int i = 0; i < sequences; i++) {
        int64_t begin = m->documents ? x->begins[i] : (int64_t)i * m->tokens_each;
        int64_t end = m->documents ? x->begins[i + 1] : begin + m->tokens_each;
        stats_add_blocks(&x->sum, x->blocks + begin * groups * width, 0, end - begin, groups, width,
                         m->config.l_sel);
    }
}

static void collect(observer *x, int layer) {
    double begin = now_ms();
    const model *m = x->model;
    const ops *o = x->inner;
    const layer_acts *a = &m->acts[layer];
    nsa_desc d = layer_desc(m);
    int64_t rows = (int64_t)m->rows * m->config.n_kv_groups;
    size_t lists = (size_t)rows * (size_t)nsa_block_list_width(&d);
    o->download(o, x->raw, a->gates, (size_t)rows * BRANCHES * m->element);
    o->download(o, x->blocks, a->blocks, lists * sizeof *x->blocks);
    to_floats(x->gates, x->raw, o->dtype, rows * BRANCHES);
    stats_add_gates(&x->sum, x->gates, rows, m->config.gate);
    add_lists(x, &d);
    x->spent += now_ms() - begin;
}

/* ---- Marks --------------------------------------------------------------------------------- */

static void trace_backward(observer *x, phase p, int layer) {
    bool same = p == x->phase && layer == x->layer; /* recomputing, then going back */
    double now = now_ms();
    if (!same && x->phase == PHASE_BWD)
        listener_say(&x->trace, "trace: backward of layer %d, %.3f ms", x->layer, now - x->since);
    if (!same) x->since = now;
}

static void mark(const ops *o, phase p, int layer) {
    observer *x = (observer *)(uintptr_t)o; /* the table that observer_wrap filled, not const */
    int last = x->model->config.n_layers - 1;
    if (x->collecting && p == PHASE_FWD && layer > 0) collect(x, layer - 1);
    if (x->collecting && p == PHASE_BWD && layer == last) {
        if (x->phase != PHASE_BWD) collect(x, last);
    }
    if (x->trace.say) trace_backward(x, p, layer);
    x->phase = p;
    x->layer = layer;
    x->inner->mark(x->inner, p, layer);
}

void observer_wrap(observer *x, const ops *o, const model *m) {
    observer empty = {.table = *o, .inner = o, .model = m};
    *x = empty;
    x->table.mark = mark;
}

bool observer_open(observer *x, bool statistics, fault *f) {
    const model *m = x->model;
    if (!statistics || m->config.full) return true;
    nsa_desc d = model_desc(m, m->options.batch, m->options.tokens);
    size_t rows = (size_t)m->options.batch * (size_t)m->options.tokens;
    x->begins = malloc((rows + 1) * sizeof *x->begins);
    rows *= (size_t)m->config.n_kv_groups;
    x->raw = malloc(rows * BRANCHES * m->element);
    x->gates = malloc(rows * BRANCHES * sizeof *x->gates);
    x->blocks = malloc(rows * (size_t)nsa_block_list_width(&d) * sizeof *x->blocks);
    return (x->begins && x->raw && x->gates && x->blocks) ||
           fault_set(f, "out of memory for statistics");
}

void observer_close(observer *x) {
    free(x->begins);
    free(x->raw);
    free(x->gates);
    free(x->blocks);
}

void observer_begin(observer *x) {
    stats_sum zero = {0};
    x->sum = zero;
    x->spent = 0;
    x->collecting = x->raw != NULL;
}

bool observer_end(observer *x, stats *result) {
    x->collecting = false;
    return stats_finish(&x->sum, result);
}

/* ---- Gradients ----------------------------------------------------------------------------- */

bool observer_trace_gradients(const observer *x, int64_t step, double scale, const listener *to,
                              fault *f) {
    const model *m = x->model;
    const ops *o = x->inner;
    for (int i = 0; i < m->params.length; i++) {
        const param *p = &m->params.list[i];
        real *g = malloc((size_t)p->count * sizeof *g);
        double sum = 0, most = 0;
        if (!g) return fault_set(f, "out of memory to trace the gradient of %s", p->name);
        o->download(o, g, model_gradient(m, i), (size_t)p->count * sizeof *g);
        for (int64_t e = 0; e < p->count; e++) {
            double value = fabs((double)g[e]) / scale;
            sum += value * value;
            most = value > most ? value : most;
        }
        free(g);
        listener_say(to, "trace: step %lld, gradient of %s: norm %.6g, largest %.6g",
                     (long long)step, p->name, sqrt(sum), most);
    }
    return true;
}
