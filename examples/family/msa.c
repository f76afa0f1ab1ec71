/* msa.c - MiniMax Sparse Attention (arXiv 2606.13392): one index head a kv group, a block scores by
   its best token, 16 blocks of 128 tokens are read, the query's own among them.
   Twin: none; indexer.h computes it with nsa.h and naively. */
#include "indexer.h"

int main(void) {
    static const indexer msa = {"MSA", 384, 8, 2, 32, 2, 2, 16, 16, 6, 1, 0, 0, NSA_SCORE_LINEAR};
    return indexer_main(&msa);
}
