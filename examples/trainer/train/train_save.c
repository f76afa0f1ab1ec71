/* train_save.c - a run's tensors in checkpoints. Twin: train_inside.h. Formats are
   checkpoint.c's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "train/train_inside.h"

safetensors_tensor train_tensor(const param *p, const char *name, real *values) {
    safetensors_tensor t = {.name = name,
                            .dtype = sizeof(real) == 8 ? SAFETENSORS_F64 : SAFETENSORS_F32,
                            .dims = p->dims,
                            .data = values + p->offset};
    for (int i = 0; i < p->dims; i++) t.shape[i] = p->shape[i];
    return t;
}

/* Values, m and v as the host reads and writes them: the back end's own memory, or a copy of it. */
static bool find_values(trainer *t, real **values, fault *f) {
    const params *p = &t->model.params;
    size_t count = (size_t)(p->elements + 2 * p->moments);
    *values = p->value;
    if (t->o->host_memory) return true;
    if (!t->copy) t->copy = malloc(count * sizeof *t->copy);
    *values = t->copy;
    return t->copy || fault_set(f, "out of memory for the host's copy of %zu numbers", count);
}

/* All of the copy, from the back end or to it; nothing where the host reads its memory. */
static void move_copy(const trainer *t, bool to_host) {
    const ops *o = t->o;
    const params *p = &t->model.params;
    real *const arrays[] = {p->value, p->m, p->v};
    real *at = t->copy;
    for (int i = 0; at && i < 3; i++) {
        size_t count = (size_t)(i ? p->moments : p->elements);
        if (to_host)
            o->download(o, at, arrays[i], count * sizeof *at);
        else
            o->upload(o, arrays[i], at, count * sizeof *at);
        at += count;
    }
}

/* Where all of m and v lie once they are collected: with one process they always do. */
static bool find_moments(trainer *t, real **m, real **v, fault *f) {
    const params *p = &t->model.params;
    *m = t->copy ? t->copy + p->elements : p->m;
    *v = t->copy ? *m + p->moments : p->v;
    if (t->dist->world == 1) return true;
    if (!t->moments) t->moments = malloc(2 * (size_t)p->elements * sizeof *t->moments);
    if (!t->moments) return fault_set(f, "out of memory for the moments of all processes");
    *m = t->moments;
    *v = t->moments + p->elements;
    return true;
}

void train_list_tensors(train_tensors *x, const params *p, bool muon) {
    size_t n = 0;
    for (int i = 0; i < p->length; i++) {
        const param *tensor = &p->list[i];
        x->weights[i] = train_tensor(tensor, tensor->name, x->flat[0]);
        for (int k = 0; k < (muon && tensor->inner ? 1 : 2); k++, n++) {
            snprintf(x->names[n], sizeof *x->names, "%c.%s", "mv"[k], tensor -> name);
            x->moments[n] = train_tensor(tensor, x->names[n], x->flat[1 + k]);
        }
    }
    x->weight_count = (size_t)p->length;
    x->moment_count = n;
}

bool train_describe_tensors(trainer *t, fault *f) {
    const params *p = &t->model.params;
    train_tensors *x = &t->tensors;
    size_t count = (size_t)p->length;
    x->weights = calloc(count, sizeof *x->weights);
    x->moments = calloc(2 * count, sizeof *x->moments);
    x->names = calloc(2 * count, sizeof *x->names);
    if (!x->weights || !x->moments || !x->names)
        return fault_set(f, "out of memory for the list of %zu tensors", count);
    if (!find_values(t, &x->flat[0], f) || !find_moments(t, &x->flat[1], &x->flat[2], f))
        return false;
    train_list_tensors(x, p, t->model.options.muon);
    return true;
}

static void list_parts(const trainer *t, checkpoint_part parts[2]) {
    const train_tensors *x = &t->tensors;
    parts[0] = (checkpoint_part){"model", x->weights, x->weight_count};
    parts[1] = (checkpoint_part){"optimizer", x->moments, x->moment_count};
}

bool train_other_attention(const trainer *t, const checkpoint *k) {
    return !config_same_attention(&t->config->model, &k->config.model);
}

static bool load_parts(trainer *t, const checkpoint *k, bool moments, fault *f) {
    checkpoint_part parts[2];
    list_parts(t, parts);
    if (train_other_attention(t, k)) return train_carry(t, k, moments, f);
    return checkpoint_load(k, &parts[0], f) && (!moments || checkpoint_load(k, &parts[1], f));
}

bool train_load(trainer *t, const checkpoint *k, fault *f) {
    const params *p = &t->model.params;
    move_copy(t, true); /* what lies between the tensors stays as it is */
    if (!load_parts(t, k, true, f)) return false;
    move_copy(t, false);
    params_changed(p, t->o);
    if (t->dist->world == 1) return true;
    dist_pick(t->dist, p->m, t->moments);
    dist_pick(t->dist, p->v, t->moments + p->elements);
    if (t->dist->rank == 0) return true;
    free(t->moments); /* only rank 0 collects them again */
    t->moments = NULL;
    return true;
}

bool train_load_weights(trainer *t, const checkpoint *k, fault *f) {
    move_copy(t, true);
    if (!load_parts(t, k, false, f)) return false;
    move_copy(t, false);
    params_changed(&t->model.params, t->o);
    return true;
}

/* Rank 0 writes what all have. */
static bool collect_moments(trainer *t, fault *f) {
    const params *p = &t->model.params;
    move_copy(t, true);
    if (!t->o->host_memory && t->o->failed(t->o, f)) return false; /* it may be anything */
    if (t->dist->world == 1) return true;
    real *v = t->moments ? t->moments + p->elements : NULL;
    return dist_collect(t->dist, p->m, t->moments, f) && dist_collect(t->dist, p->v, v, f);
}

static void say_saved(const void *user, int64_t step) {
    const trainer *t = user;
    fault unused;
    telemetry_say(t->telemetry, "step %04lld | saved %s/checkpoints", (long long)step,
                  t->config->train.out_dir);
    (void)telemetry_note(t->telemetry, "progress", &unused);
}

static void copy_to_host(const void *user, void *to, const void *from, size_t bytes) {
    const trainer *t = user;
    if (t->copy || (t->moments && (const real *)from >= t->moments &&
                    (const real *)from < t->moments + 2 * t->model.params.elements))
        memcpy(to, from, bytes); /* copied or collected, and so on the host */
    else
        t->o->download(t->o, to, from, bytes);
}

/* Whether there is a checkpoint before the last step. */
static bool saves_beside(const config_train *c) {
    return c->save_every && c->save_every < c->steps;
}

/* What is saved only where the run ends needs no copy. */
bool train_open_saver(trainer *t, fault *f) {
    const config_train *c = &t->config->train;
    saver_options options = {.out_dir = c->out_dir,
                             .config = t->config,
                             .parts = t->parts,
                             .count = 2,
                             .keep = c->keep_checkpoints,
                             .copy = copy_to_host,
                             .done = say_saved,
                             .user = t};
    list_parts(t, t->parts);
    if (t->dist->rank || !saves_beside(c)) return true;
    train_note_snapshot(t->config, t->dist, t->model.params.count, &t->model.arena);
    t->saver = saver_open(&options, f);
    return t->saver != NULL;
}

void train_note_snapshot(const config *c, const dist *d, int64_t parameters, arena *a) {
    if (saves_beside(&c->train) && d->rank == 0)
        arena_note(a, FOR_SNAPSHOT, 3 * (size_t)parameters * sizeof(real));
}

/* Rank 0 has all of it, for it has just been loaded. */
bool train_save_carried(trainer *t, const checkpoint *k, fault *f) {
    const config_train *c = &t->config->train;
    listener notes = telemetry_listener(t->telemetry);
    if (!checkpoint_set_aside(k, c->out_dir, &notes, f)) return false;
    t->state.val_loss = (double)NAN; /* it was that of the other attention */
    return checkpoint_write(c->out_dir, t->config, &t->state, t->parts, 2, 0, f);
}

bool train_save(trainer *t, bool beside, fault *f) {
    const config_train *c = &t->config->train;
    bool needed = !t->spoilt && t->saved_step != t->state.step;
    t->o->mark(t->o, PHASE_SAVE, -1);
    if (needed && !collect_moments(t, f)) return false;
    if (needed) t->saved_step = t->state.step;
    if (!beside && !saver_wait(t->saver, f)) {
        if (t->spoilt || saver_is_stuck(t->saver)) return false;
        needed = true; /* once more, for what the thread could not write */
    }
    if (!needed || t->dist->rank) return true;
    if (!telemetry_sync(t->telemetry, f)) return false;
    t->state.seconds = telemetry_seconds(t->telemetry);
    t->state.loss_first = telemetry_loss_first(t->telemetry);
    if (beside) return saver_write(t->saver, &t->state, f);
    if (!checkpoint_write(c->out_dir, t->config, &t->state, t->parts, 2, c->keep_checkpoints, f))
        return false;
    say_saved(t, t->state.step);
    return true;
}
