/* train_carry.c - a run that goes on with other attention than its checkpoint: what becomes of the
   weights and moments. Twin: train_inside.h. A checkpoint of the same model is train_save.c's. */
#include <stdlib.h>
#include <string.h>

#include "train/train_inside.h"

/* The checkpoint's tensors on the host: what train_tensors is for the model's. */
typedef struct old_tensors {
    model table; /* its list of parameters; it has no memory */
    train_tensors tensors;
} old_tensors;

static void close_old(old_tensors *x) {
    model_close(&x->table);
    free(x->tensors.flat[0]);
    free(x->tensors.weights);
    free(x->tensors.moments);
    free(x->tensors.names);
}

static bool open_old(old_tensors *x, const trainer *t, const checkpoint *k, fault *f) {
    model_config c = train_model_config(&k->config, tokenizer_vocab_size(t->tokenizer));
    train_tensors *list = &x->tensors;
    memset(x, 0, sizeof *x);
    if (!model_describe(&x->table, &c, t->o, f)) return false;
    size_t count = (size_t)x->table.params.length, elements = (size_t)x->table.params.elements;
    list->flat[0] = calloc(3 * elements, sizeof *list->flat[0]);
    list->weights = calloc(count, sizeof *list->weights);
    list->moments = calloc(2 * count, sizeof *list->moments);
    list->names = calloc(2 * count, sizeof *list->names);
    if (!list->flat[0] || !list->weights || !list->moments || !list->names)
        return fault_set(f, "out of memory for the checkpoint's tensors beside the model's");
    list->flat[1] = list->flat[0] + elements;
    list->flat[2] = list->flat[1] + elements;
    train_list_tensors(list, &x->table.params, t->model.options.muon);
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

/* Fills the run's tensors; those without a source keep their first values, and begin with moments
   of zero. Where one has fewer gates, the rows of those that both have stand first. */
static void transplant(trainer *t, const old_tensors *x, bool moments) {
    const params *p = &t->model.params;
    real *const *to = t->tensors.flat, *const *from = x->tensors.flat;
    for (int i = 0; i < p->length; i++) {
        const param *n = &p->list[i];
        attention_kind kind = n->layer < 0 ? ATTENTION_NSA : layer_kind(&t->model, n->layer);
        const param *old = source_of(&x->table.params, n, kind);
        size_t count = old ? (size_t)(n->count < old->count ? n->count : old->count) : 0;
        t->fresh += !old;
        for (int k = 0; k < (moments ? 3 : 1); k++) {
            if (k) memset(to[k] + n->offset, 0, (size_t)n->count * sizeof(real));
            if (old) memcpy(to[k] + n->offset, from[k] + old->offset, count * sizeof(real));
        }
    }
}

bool train_carry(trainer *t, const checkpoint *k, bool moments, fault *f) {
    old_tensors x;
    bool ok = open_old(&x, t, k, f);
    checkpoint_part parts[] = {{"model", x.tensors.weights, x.tensors.weight_count},
                               {"optimizer", x.tensors.moments, x.tensors.moment_count}};
    ok = ok && checkpoint_load(k, &parts[0], f);
    ok = ok && (!moments || checkpoint_load(k, &parts[1], f));
    if (ok) transplant(t, &x, moments);
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
