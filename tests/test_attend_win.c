/* test_attend_win.c - the sliding window.
   Twin: nsa.h's nsa_attend_win. What it shares with the other attentions is in attend_tests.h. */
#include "harness/attend_tests.h"

static const branch this_branch = {"win",
                                   BRANCH_WIN,
                                   nsa_attend_win_forward,
                                   nsa_attend_win_forward_workspace_size,
                                   nsa_attend_win_backward,
                                   nsa_attend_win_backward_workspace_size};

int main(int argc, char **argv) {
    return attend_main(&this_branch, "test_attend_win", argc, argv);
}
