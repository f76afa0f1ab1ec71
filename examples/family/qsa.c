/* qsa.c - Qwen's sparse attention: as DeepSeek's, but index heads have no weights and score means
   of four tokens, and blocks of four are read; the tail at the query is always among them.
   Twin: none; indexer.h computes it with nsa.h and naively. */
#include "indexer.h"

int main(void) {
    /* the mean of logits is the logit of the mean, as long as nothing stands between them */
    static const indexer qsa = {"QSA", 192, 8, 2, 32, 1, 1, 16, 4, 14, 2, 0, 1, NSA_SCORE_LINEAR};
    return indexer_main(&qsa);
}
