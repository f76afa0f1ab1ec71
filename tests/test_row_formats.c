/* test_row_formats.c - every number of every format of keys and values, as attention reads it:
   packed and in place, with each instruction set.
   Twin: none. Not here: how a number is rounded into a format (test_block_index.c). */
#include <math.h>

#include "harness/check.h"
#include "harness/tensors.h"
#include "nsa.h"

enum { CODES = 1 << 16, STRIDE = 64, ROWS = CODES / STRIDE, STEP = 32 };

static uint16_t codes[CODES + 1];
static float q[CODES], out[CODES];
static nsa_real lse[ROWS];
static char workspace[1 << 22];

static nsa_tensor rows_of(void *data, nsa_dtype dtype) {
    return nsa_tensor_bthd(data, dtype, ROWS, 1, STRIDE);
}

/* Query t sees key t alone, so out is the row of v and lse the number of k that q picks: exactly,
   whatever the format. A row with a number that is not finite is NaN. */
static void check_rows(nsa_dtype dtype, int width, const char *how) {
    int wrong = 0, at = 0;
    for (int t = 0; t < ROWS; t++) {
        double row[STRIDE], sum = 0;
        for (int c = 0; c < width; c++) {
            row[c] = element_get(dtype, codes + 1 + t * STRIDE + c);
            sum += row[c] - row[c];
        }
        for (int c = 0; c <= width; c++) {
            double want = row[c < width ? c : t % width];
            double got = c < width ? (double)out[t * STRIDE + c] : (double)lse[t];
            if (sum == 0 ? got == want : isnan(got)) continue;
            if (!wrong++) at = t * STRIDE + c;
        }
    }
    CHECK(!wrong, "%s: %d numbers differ, the first is %d of row %d", how, wrong, at % STRIDE,
          at / STRIDE);
}

/* In `count` queries at a time: few read keys and values in place, many pack them. */
static void run(nsa_attend x, nsa_desc d, int count) {
    memset(out, 0, sizeof out);
    for (d.count = count; d.first < ROWS; d.first += count) {
        nsa_status s = nsa_attend_win_forward(&x, &d, workspace, sizeof workspace);
        CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
        x.q.data = (float *)x.q.data + count * STRIDE;
        x.out.data = (float *)x.out.data + count * STRIDE;
        x.lse.data = (nsa_real *)x.lse.data + count;
    }
}

/* Rows begin at an odd element, where no vector does. */
static void test_every_number(nsa_dtype dtype, nsa_isa isa, int width) {
    check_case("%s, %s, width %d", dtype_name(dtype), nsa_isa_name(isa), width);
    nsa_desc d = nsa_desc_default(1, ROWS, 1, 1, width);
    d.window = d.threads = 1;
    d.isa = isa;
    d.scale = 1;
    d.products = NSA_PRODUCTS_F32; /* products of bf16 take subnormal numbers for 0 */
    memset(q, 0, sizeof q);
    for (int i = 0; i < CODES; i++) codes[1 + i] = (uint16_t)i;
    for (int t = 0; t < ROWS; t++) q[t * STRIDE + t % width] = 1;
    nsa_attend x = {rows_of(q, NSA_F32),   rows_of(codes + 1, dtype),    rows_of(codes + 1, dtype),
                    rows_of(out, NSA_F32), rows_of(lse, NSA_REAL_DTYPE), rows_of(NULL, NSA_I32)};
    x.lse.token = 1;
    CHECK(nsa_attend_win_forward_workspace_size(&d) <= sizeof workspace, "workspace");
    run(x, d, ROWS);
    check_rows(dtype, width, "packed");
    run(x, d, STEP);
    check_rows(dtype, width, "in place");
}

int main(void) {
    static const nsa_dtype dtypes[] = {NSA_BF16, NSA_F16};
    for (int isa = NSA_ISA_PLAIN; isa <= NSA_ISA_NEON_BF16; isa++)
        for (int i = 0; nsa_isa_available((nsa_isa)isa) && i < 2; i++) {
            test_every_number(dtypes[i], (nsa_isa)isa, STRIDE);
            test_every_number(dtypes[i], (nsa_isa)isa, STRIDE - 3);
        }
    return check_done("test_row_formats");
}
