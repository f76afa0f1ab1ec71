/* test_attend_dense.c - causal attention over every key.
   Twin: nsa.h's nsa_attend_dense. What it shares with the other attentions is in attend_tests.h. */
#include "harness/attend_tests.h"

static const branch this_branch = {"dense",
                                   BRANCH_DENSE,
                                   nsa_attend_dense_forward,
                                   nsa_attend_dense_forward_workspace_size,
                                   nsa_attend_dense_backward,
                                   nsa_attend_dense_backward_workspace_size};

int main(int argc, char **argv) {
    return attend_main(&this_branch, "test_attend_dense", argc, argv);
}
