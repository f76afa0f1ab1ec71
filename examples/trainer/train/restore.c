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

/* The first `words` tokens in 48 bits, as an integer of state.json has. */
static int64_t vocabulary_of(const tokenizer *t, int64_t words) {
    uint64_t spelling = tokenizer_spelling(t, (int32_t)words);
    return !spelling || words >= 1 << 24 ? 0 : words << 24 | (int64_t)(spelling >> 40);
}

void restore_note_vocabulary(checkpoint_state *s, const tokenizer *t, int64_t asked) {
    int64_t words = tokenizer_vocab_size(t);
    s->vocabulary = tokenizer_is_byte(t) && asked > words ? 0 : vocabulary_of(t, words);
}

bool restore_same_vocabulary(const checkpoint *k, const tokenizer *t, const char *folder,
                             fault *f) {
    int64_t said = k->state.vocabulary, words = said >> 24, size = tokenizer_vocab_size(t);
    int64_t own = vocabulary_of(t, words < size ? words : size);
    if (said < 1 || !own || own == said) return true;
    return fault_set(f,
                     "%.600s: the model's tokens are not those of %.300s: data.tokenizer_path must "
                     "name the vocabulary that it was trained with",
                     k->path, *folder ? folder : "bytes");
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
