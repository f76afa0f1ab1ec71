/* test_attend_cmp.c - the compressed blocks that a query sees.
   Twin: nsa.h's nsa_attend_cmp. What it shares with the other attentions is in attend_tests.h. */
#include "harness/attend_tests.h"

static const branch this_branch = {"cmp",
                                   BRANCH_CMP,
                                   nsa_attend_cmp_forward,
                                   nsa_attend_cmp_forward_workspace_size,
                                   nsa_attend_cmp_backward,
                                   nsa_attend_cmp_backward_workspace_size};

int main(int argc, char **argv) {
    return attend_main(&this_branch, "test_attend_cmp", argc, argv);
}
