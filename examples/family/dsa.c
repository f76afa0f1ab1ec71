/* dsa.c - DeepSeek Sparse Attention (arXiv 2512.02556): a lightning indexer scores every earlier
   token by sum_h w_h ReLU(q_h . k), the best tokens are read, one list for all heads. No token is
   forced, the query's own neither. GLM-5 lets some layers read by the lists of the one before: a
   second layer does that here.
   Twin: none; indexer.h computes it with nsa.h and naively. */
#include "indexer.h"

int main(void) {
    static const indexer dsa = {.name = "DSA",
                                .T = 145,
                                .H = 8,
                                .Hk = 2,
                                .D = 32,
                                .heads = 4,
                                .list_heads = 1,
                                .key_heads = 1,
                                .dim = 16,
                                .block = 1,
                                .count = 40,
                                .weighted = 1,
                                .layers = 1,
                                .act = NSA_SCORE_RELU};
    return indexer_main(&dsa);
}
