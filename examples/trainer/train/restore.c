/* restore.c - a model from a checkpoint. Twin: restore.h. */
#include "train/restore.h"

#include <stdlib.h>

#include "base/memory.h"
#include "train/train_inside.h"

static bool load(model *m, const checkpoint *k, fault *f) {
    const params *p = &m->params;
    safetensors_tensor *weights = calloc((size_t)p->length, sizeof *weights);
    bool direct = m->o->host_memory; /* else through a copy on the host */
    real *values = direct ? p->value : calloc((size_t)p->elements, sizeof *values);
    if (!weights || !values) {
        free(weights);
        if (!direct) free(values);
        return fault_set(f, "out of memory for the list of %d tensors, or their copy", p->length);
    }
    for (int i = 0; i < p->length; i++)
        weights[i] = train_tensor(&p->list[i], p->list[i].name, values);
    checkpoint_part part = {"model", weights, (size_t)p->length};
    bool ok =
        checkpoint_load(k, &part, f) && safetensors_check_finite(k->path, weights, part.count, f);
    if (ok && !direct) m->o->upload(m->o, p->value, values, (size_t)p->elements * sizeof *values);
    if (ok) params_changed(p, m->o);
    if (!direct) free(values);
    free(weights);
    return ok;
}

bool restore_fits(const model_config *c, const model_options *options, const ops *o, fault *f) {
    arena sizes;
    int64_t parameters;
    if (!o->host_memory) return true;
    return model_measure(c, options, o, &sizes, &parameters, f) &&
           memory_fits("model", sizes.used, f);
}

bool restore_model(model *m, const checkpoint *k, int vocab, int chunk, int room, const ops *o,
                   fault *f) {
    model_config c = train_model_config(&k->config, vocab);
    model_options options = {.batch = 1, .tokens = chunk, .room = room};
    if (!restore_fits(&c, &options, o, f) || !model_open(m, &c, &options, o, 0, f)) return false;
    bool ok = load(m, k, f);
    if (!ok) model_close(m);
    return ok;
}
