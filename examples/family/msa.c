/* msa.c - MiniMax Sparse Attention (arXiv 2606.13392): an index head for each kv group and one head
   of index keys for all of them; a block scores by its best token, 16 blocks of 128 tokens are
   read, the query's own among them.
   Twin: none; indexer.h computes it with nsa.h and naively. */
#include "indexer.h"

int main(void) {
    static const indexer msa = {.name = "MSA",
                                .T = 390,
                                .H = 8,
                                .Hk = 2,
                                .D = 32,
                                .heads = 2,
                                .list_heads = 2,
                                .key_heads = 1,
                                .dim = 16,
                                .block = 16,
                                .count = 6,
                                .local = 1,
                                .act = NSA_SCORE_LINEAR};
    return indexer_main(&msa);
}
