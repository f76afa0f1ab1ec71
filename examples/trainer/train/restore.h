/* restore.h - a model from a checkpoint, to be read from and not trained. Twin: restore.c. It takes
   the settings as they are in `k`, which a caller may have changed since checkpoint_open: a setting
   that changes the shape of a tensor is refused by the tensor's name. */
#ifndef RESTORE_H
#define RESTORE_H

#include "checkpoint/checkpoint.h"
#include "data/tokenizer.h"
#include "model/model.h"

/* Whether this machine holds such a model, and its control group does: asked before it is made. */
bool restore_fits(const model_config *c, const model_options *options, const ops *o, fault *f);

/* What a checkpoint says of the vocabulary, nothing where shards of one that is larger than bytes
   are trained on without it (model.vocab_size asks so); and whether that of `folder` (bytes: "") is
   the same, or the same with more behind. */
void restore_note_vocabulary(checkpoint_state *s, const tokenizer *t, int64_t asked);
bool restore_same_vocabulary(const checkpoint *k, const tokenizer *t, const char *folder, fault *f);

/* options.batch is 1; options.training is off. */
bool restore_model(model *m, const checkpoint *k, int vocab, int chunk, int room, const ops *o,
                   fault *f);

#endif
