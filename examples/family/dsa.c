/* dsa.c - DeepSeek Sparse Attention (arXiv 2512.02556): a lightning indexer scores every earlier
   token by sum_h w_h ReLU(q_h . k), the best tokens are read, one list for all heads.
   Twin: none; indexer.h computes it with nsa.h and naively. */
#include "indexer.h"

int main(void) {
    static const indexer dsa = {"DSA", 144, 8, 2, 32, 4, 1, 16, 1, 40, 1, 1, 0, NSA_SCORE_RELU};
    return indexer_main(&dsa);
}
