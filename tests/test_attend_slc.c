/* test_attend_slc.c - the tokens of the selected blocks.
   Twin: nsa.h's nsa_attend_slc. What it shares with the other attentions is in attend_tests.h. */
#include "attend_tests.h"

static const branch this_branch = {"slc",
                                   BRANCH_SLC,
                                   nsa_attend_slc_forward,
                                   nsa_attend_slc_forward_workspace_size,
                                   nsa_attend_slc_backward,
                                   nsa_attend_slc_backward_workspace_size};

int main(int argc, char **argv) {
    return attend_main(&this_branch, "test_attend_slc", argc, argv);
}
