/* test_attend_slc.c - the tokens of the selected blocks.
   Twin: nsa.h's nsa_attend_slc. What it shares with the other attentions is in attend_tests.h. */
#include "harness/attend_tests.h"

static const branch this_branch = {"slc",
                                   BRANCH_SLC,
                                   nsa_attend_slc_forward,
                                   nsa_attend_slc_forward_workspace_size,
                                   nsa_attend_slc_backward,
                                   nsa_attend_slc_backward_workspace_size};

/* ---- Two queries that choose the same block both reach its dK and dV ---- */

/* A number of dk or dv, by its place among the tensor's numbers. */
static double number_of(const bits *b, int i, size_t place, nsa_dtype dtype) {
    return element_get(dtype, b->of[i] + place * dtype_size(dtype));
}

static void test_shared_block(nsa_dtype dtype) {
    static const geometry g = {
        "two readers of a block", 1, 64, 2, 1, 16, 16, 16, 8, 16, 2, 1, 1, 20, 0, NULL};
    enum { FIRST = 50, SECOND = 60, BLOCK = 1, OWN = 3 }; /* each reads these blocks, others none */
    const double unit = dtype == NSA_BF16  ? 0x1p-8
                        : dtype == NSA_F16 ? 0x1p-11
                        : dtype == NSA_F64 ? 0x1p-50
                                           : 0x1p-21;
    nsa_desc d = desc_of(&g);
    numbers n = numbers_new(&this_branch, &d, dtype, 61);
    double *dout = copy_numbers(n.dout, n.nout), *dlse = copy_numbers(n.dlse, n.nlse);
    bits of[3]; /* with dout of the first, of the second, of both */
    check_case("slc, %s, two queries and one block", dtype_name(dtype));
    for (int i = 0; i < 2 * g.T; i++) {
        int reads = i / 2 == FIRST || i / 2 == SECOND;
        n.blocks[i] = !reads ? -1 : i % 2 ? OWN : BLOCK;
    }
    for (int k = 0; k < 3; k++) {
        for (int query = 0; query < g.T; query++) {
            int in = (query == FIRST && k != 1) || (query == SECOND && k != 0);
            for (int i = query * g.H * g.Dv; i < (query + 1) * g.H * g.Dv; i++)
                n.dout[i] = in ? dout[i] : 0;
            for (int i = query * g.H; i < (query + 1) * g.H; i++) n.dlse[i] = in ? dlse[i] : 0;
        }
        of[k] = bits_of(&this_branch, &d, &n, dtype, 0);
    }
    for (int i = 3; i < 5; i++) { /* dk, dv */
        int unread = 0, lost = 0;
        double worst = 0, reached[2] = {0, 0};
        for (size_t place = 0; place < n.nk; place++) {
            int block = (int)(place / 16) / g.slc_block;
            double a = number_of(&of[0], i, place, dtype), b = number_of(&of[1], i, place, dtype);
            double both = number_of(&of[2], i, place, dtype);
            unread += block != BLOCK && block != OWN && both != 0;
            if (block != BLOCK) continue;
            reached[0] += fabs(a), reached[1] += fabs(b);
            lost += !(fabs(both - a - b) <= 4 * unit * (fabs(a) + fabs(b)));
            worst = fmax(worst, fabs(both - a - b));
        }
        CHECK(!unread, "%s: %d numbers of blocks that nobody reads", bits_names[i], unread);
        CHECK(reached[0] > 0 && reached[1] > 0, "%s: %g of the first, %g of the second",
              bits_names[i], reached[0], reached[1]);
        CHECK(!lost, "%s: %d numbers are not the sum of both, by %g at most", bits_names[i], lost,
              worst);
    }
    for (int k = 0; k < 3; k++) bits_free(&of[k]);
    free(dout), free(dlse);
    numbers_free(&n);
}

/* The bad row is one of a query that is computed alone, or one that such queries read: by row T / 3
   a query sees far more keys than it lists. */
static void test_bad_list(nsa_dtype dtype) {
    static const geometry g = {
        "bad rows of listed tokens", 1, 330, 16, 1, 16, 16, 1, 1, 1, 20, 1, 2, 20, 0, NULL};
    for (int input = BAD_Q; input <= BAD_DLSE; input++)
        test_bad_value(&this_branch, &g, dtype, input, NAN);
}

int main(int argc, char **argv) {
    for (int k = 0; k < COUNT(dtypes); k++) test_shared_block(dtypes[k]);
    for (int k = 0; !CHECKS_CUDA && k < COUNT(dtypes); k++) test_bad_list(dtypes[k]);
    return attend_main(&this_branch, "test_attend_slc", argc, argv);
}
