/* count_attention: every pass of every branch once, for valgrind to count; count_instructions.py
   runs it. Heads 4, kv_heads 1, dim 64, 512 tokens, one thread, the AVX2 tiles. It prints how many
   query-key pairs each branch has, and measures no time; bench_attention does. */
#include "problem.h"

int main(void) {
    problem p;
    double pairs[ROWS];
    nsa_status s = NSA_OK;
    if (!nsa_isa_available(NSA_ISA_AVX2)) {
        fprintf(stderr, "count_attention: this machine has no AVX2 with FMA\n");
        return 77;
    }
    problem_make(&p, 4, 1, 64, 512, 1);
    p.d.isa = NSA_ISA_AVX2;
    for (int i = 0; s == NSA_OK && i < ROWS; i++) s = forwards[i](&p);
    for (int i = 0; s == NSA_OK && i < ROWS; i++)
        if (backwards[i]) s = backwards[i](&p);
    if (s != NSA_OK) fprintf(stderr, "count_attention: %s\n", nsa_status_text(s));
    count_pairs(&p, pairs);
    for (int i = 0; i < ROWS; i++) printf("%s %.0f\n", row_names[i], pairs[i]);
    problem_free(&p);
    return s != NSA_OK;
}
