/* params.c - the table of parameters. Twin: params.h. */
#include "model/params.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"

enum { ALIGN = 16 }; /* elements: 64 bytes of f32, 32 of a bf16 copy */

int params_add(params *p, int layer, const param_spec *spec) {
    if (p->length == p->room) {
        int room = p->room ? 2 * p->room : 64;
        param *list = realloc(p->list, (size_t)room * sizeof *list);
        if (!list) return -1;
        p->list = list;
        p->room = room;
    }
    param *x = &p->list[p->length];
    memset(x, 0, sizeof *x);
    if (layer < 0)
        snprintf(x->name, sizeof x->name, "%s", spec->name);
    else
        snprintf(x->name, sizeof x->name, "blocks.%d.%s", layer, spec->name);
    x->count = 1;
    for (; x->dims < PARAM_DIMS && spec->shape[x->dims]; x->dims++) {
        x->shape[x->dims] = spec->shape[x->dims];
        x->count *= spec->shape[x->dims];
    }
    x->layer = layer;
    x->init_mean = spec->mean;
    x->init_std = spec->std;
    x->decay = spec->decay;
    x->inner = spec->decay && layer >= 0;
    x->offset = spec->joined ? p->elements : (p->elements + ALIGN - 1) / ALIGN * ALIGN;
    p->elements = x->offset + x->count;
    p->count += x->count;
    return p->length++;
}

void params_free(params *p) {
    free(p->list);
    memset(p, 0, sizeof *p);
}

void params_divide(params *p, int64_t multiple, int processes) {
    p->elements = (p->elements + multiple - 1) / multiple * multiple;
    p->moments = p->elements / processes;
}

void params_changed(const params *p, const ops *o) {
    if (p->narrow) o->convert(o, p->narrow, p->value, p->elements);
}

void params_layout(params *p, arena *a, bool training, size_t element) {
    size_t bytes = (size_t)p->elements * sizeof(real), share = (size_t)p->moments * sizeof(real);
    p->value = arena_take(a, FOR_WEIGHTS, bytes);
    if (element != sizeof(real))
        p->narrow = arena_take(a, FOR_WEIGHTS, (size_t)p->elements * element);
    if (!training) return;
    p->grad = arena_take(a, FOR_GRADIENTS, bytes);
    p->m = arena_take(a, FOR_MOMENTS, share);
    p->v = arena_take(a, FOR_MOMENTS, share);
}

/* FNV-1a: a tensor's stream of random numbers hangs on its name, not on what stands before it. */
static uint64_t name_hash(const char *name) {
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x100000001b3u;
    return h;
}

static void draw(real *to, const param *x, uint64_t seed) {
    uint64_t stream = name_hash(x->name) << 8 | RNG_INIT;
    for (int64_t e = 0; e < x->count; e++) {
        double normal = x->init_std != 0 ? rng_normal(seed, stream, (uint64_t)e) : 0;
        to[e] = (real)(x->init_mean + x->init_std * normal);
    }
}

bool params_init(const params *p, const ops *o, uint64_t seed, fault *f) {
    int64_t most = 0;
    for (int i = 0; i < p->length; i++)
        if (p->list[i].count > most) most = p->list[i].count;
    real *host = malloc((size_t)most * sizeof *host);
    if (!host) return fault_set(f, "out of memory for a tensor of %lld elements", (long long)most);
    for (int i = 0; i < p->length; i++) {
        const param *x = &p->list[i];
        draw(host, x, seed);
        o->upload(o, p->value + x->offset, host, (size_t)x->count * sizeof *host);
    }
    free(host);
    params_changed(p, o);
    return true;
}
