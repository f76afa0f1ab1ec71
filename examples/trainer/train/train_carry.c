/* train_carry.c - a run that goes on with other attention than its checkpoint: what becomes of the
   weights and moments. Twin: train_inside.h. A checkpoint of the same model is train_save.c's. */
#include <stdlib.h>
#include <string.h>

#include "train/train_inside.h"

/* The checkpoint's tensors on the host: what train_tensors is for the model's. */
typedef struct old_tensors {
    model table; /* its list of parameters; it has no memory */
    real *values, *m, *v;
    safetensors_tensor *weights, *moments;
    char (*names)[PARAM_NAME_BYTES + 2];
} old_tensors;

static void close_old(old_tensors *x) {
    model_close(&x->table);
    free(x->values);
    free(x->weights);
    free(x->moments);
    free(x->names);
}

static bool open_old(old_tensors *x, const trainer *t, const checkpoint *k, fault *f) {
    model_config c = train_model_config(&k->config, tokenizer_vocab_size(t->tokenizer));
    memset(x, 0, sizeof *x);
    if (!model_describe(&x->table, &c, t->o, f)) return false;
    const params *p = &x->table.params;
    size_t count = (size_t)p->length, elements = (size_t)p->elements;
    x->values = calloc(3 * elements, sizeof *x->values);
    x->weights = calloc(count, sizeof *x->weights);
    x->moments = calloc(2 * count, sizeof *x->moments);
    x->names = calloc(2 * count, sizeof *x->names);
    if (!x->values || !x->weights || !x->moments || !x->names)
        return fault_set(f, "out of memory for the checkpoint's tensors beside the model's");
    x->m = x->values + elements;
    x->v = x->m + elements;
    for (size_t i = 0; i < count; i++) {
        char *m = x->names[2 * i], *v = x->names[2 * i + 1];
        snprintf(m, sizeof *x->names, "m.%s", p->list[i].name);
        snprintf(v, sizeof *x->names, "v.%s", p->list[i].name);
        x->weights[i] = train_tensor(&p->list[i], p->list[i].name, x->values);
        x->moments[2 * i] = train_tensor(&p->list[i], m, x->m);
        x->moments[2 * i + 1] = train_tensor(&p->list[i], v, x->v);
    }
    return true;
}

static const param *find(const params *p, const char *name) {
    for (int i = 0; i < p->length; i++)
        if (!strcmp(p->list[i].name, name)) return &p->list[i];
    return NULL;
}

/* What a projection that the checkpoint lacks begins as: for each branch dense attention's; for
   dense attention, and for a missing window, those of the branch that reads tokens most alike. */
static const param *source_of(const params *old, const param *x, attention_kind kind) {
    static const char *const from[2][3] = {{"", "_win", "_slc"}, {"", "_slc", "_win"}};
    char name[PARAM_NAME_BYTES + 8];
    const param *same = find(old, x->name);
    const char *at = strstr(x->name, "attn.W_K");
    if (!at) at = strstr(x->name, "attn.W_V");
    if (same || !at) return same;
    int stem = (int)(at - x->name) + (int)strlen("attn.W_K");
    for (int i = 0; i < 3; i++) {
        const char *suffix = from[kind == ATTENTION_FULL][i];
        snprintf(name, sizeof name, "%.*s%s.weight", stem, x->name, suffix);
        if ((same = find(old, name))) return same;
    }
    return NULL;
}

/* Where one has fewer gates, the rows of those that both have stand first. */
static void copy_rows(safetensors_tensor *to, const real *from, int64_t count) {
    memcpy(to->data, from, (size_t)count * sizeof *from);
}

static void zero_tensor(safetensors_tensor *to) {
    memset(to->data, 0, safetensors_tensor_bytes(to));
}

/* Fills the run's tensors; those without a source keep their first values, and begin with moments
   of zero. */
static void transplant(trainer *t, const old_tensors *x, bool moments, int *fresh) {
    const params *p = &t->model.params;
    train_tensors *to = &t->tensors;
    for (int i = 0; i < p->length; i++) {
        const param *n = &p->list[i];
        attention_kind kind = n->layer < 0 ? ATTENTION_NSA : layer_kind(&t->model, n->layer);
        const param *old = source_of(&x->table.params, n, kind);
        if (moments) zero_tensor(&to->moments[2 * i]), zero_tensor(&to->moments[2 * i + 1]);
        *fresh += !old;
        if (!old) continue;
        int64_t count = n->count < old->count ? n->count : old->count;
        copy_rows(&to->weights[i], x->values + old->offset, count);
        if (!moments) continue;
        copy_rows(&to->moments[2 * i], x->m + old->offset, count);
        copy_rows(&to->moments[2 * i + 1], x->v + old->offset, count);
    }
}

bool train_carry(trainer *t, const checkpoint *k, bool moments, fault *f) {
    old_tensors x;
    bool ok = open_old(&x, t, k, f);
    size_t count = (size_t)x.table.params.length;
    checkpoint_part parts[] = {{"model", x.weights, count}, {"optimizer", x.moments, 2 * count}};
    ok = ok && checkpoint_load(k, &parts[0], f);
    ok = ok && (!moments || checkpoint_load(k, &parts[1], f));
    if (ok) transplant(t, &x, moments, &t->fresh);
    close_old(&x);
    return ok;
}

/* Neighbours that change alike share a line. */
void train_say_attention(const trainer *t, const config_model *old) {
    const config_model *now = &t->config->model;
    for (int64_t i = 0, next; i < now->n_layers; i = next) {
        attention_kind from = config_attention(old, i), to = config_attention(now, i);
        for (next = i + 1; next < now->n_layers; next++)
            if (config_attention(old, next) != from || config_attention(now, next) != to) break;
        if (from == to) continue;
        telemetry_say(t->telemetry, "WARNING: attention changes in layers %lld .. %lld: %s -> %s",
                      (long long)i, (long long)next - 1, config_attention_name(from),
                      config_attention_name(to));
    }
    telemetry_say(t->telemetry,
                  "WARNING: keys and values are taken from the pairs that are there, with their "
                  "moments; %d tensors (gates, phi) begin anew",
                  t->fresh);
}
