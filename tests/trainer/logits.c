/* logits.c - a checkpoint's logits, for tests that compare them with another program's: those
   behind each token of a file of i32, as f32. They are generate's: chunks of the prompt through the
   caches. Arguments: checkpoint, file of tokens, file of logits. Not a test. */
#include <stdio.h>
#include <stdlib.h>

#include "base/files.h"
#include "train/restore.h"

static bool run(model *m, const int32_t *tokens, int count, const char *path, fault *f) {
    size_t numbers = (size_t)count * (size_t)m->config.vocab;
    real *logits = malloc(numbers * sizeof *logits);
    bool ok = logits && model_append(m, tokens, count, count, logits, f) &&
              files_replace(path, logits, numbers * sizeof *logits, f);
    free(logits);
    return ok;
}

int main(int argc, char **argv) {
    enum { MOST = 1 << 20, CHUNK = 64 };
    checkpoint k;
    model m;
    ops o;
    fault f;
    size_t bytes;
    if (argc != 4) return 2;
    char *tokens = files_read(argv[2], MOST, &bytes, &f);
    int count = (int)(bytes / sizeof(int32_t));
    bool ok = tokens && ops_cpu_open(&o, 1, &f) && checkpoint_open(&k, argv[1], &f);
    int vocab = ok && k.config.model.vocab_size ? (int)k.config.model.vocab_size : 256;
    ok = ok && restore_model(&m, &k, vocab, CHUNK, count, &o, &f) &&
         run(&m, (const int32_t *)(void *)tokens, count, argv[3], &f);
    if (!ok) fprintf(stderr, "logits: %s\n", f.text);
    return !ok;
}
