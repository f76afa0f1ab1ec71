/* test_row_formats.c - every number of every format of keys and values, as attention reads it:
   packed and in place, with each instruction set.
   Twin: none. Not here: how a number is rounded into a format (test_block_index.c, and
   test_convert_rows.c of 8 bits). */
#include <math.h>

#include "harness/check.h"
#include "harness/tensors.h"
#include "nsa.h"

enum { WIDE = 131, ROWS = 1024, STEP = 32, MOST = ROWS * (WIDE + 8) };

static uint16_t stored[MOST];
static double want[ROWS * WIDE];
static float q[ROWS * WIDE];
static nsa_real out[ROWS * WIDE], lse[ROWS];
static char workspace[1 << 22];

/* Query t sees key t alone, so out is the row of v and lse the number of k that q picks: exactly,
   whatever the format. A row with a number that is not finite is NaN. */
static void check_rows(int width, const char *how) {
    int wrong = 0, at = 0;
    for (int t = 0; t < ROWS; t++) {
        const double *row = want + t * width;
        double sum = 0;
        for (int c = 0; c < width; c++) sum += row[c] - row[c];
        for (int c = 0; c <= width; c++) {
            double number = row[c < width ? c : t % width];
            double got = c < width ? (double)out[t * width + c] : (double)lse[t];
            if (sum == 0 ? got == number : isnan(got)) continue;
            if (!wrong++) at = t * width + c;
        }
    }
    CHECK(!wrong, "%s: %d numbers differ, the first is %d of row %d", how, wrong, at % width,
          at / width);
}

/* In `count` queries at a time: few read keys and values in place, many pack them. */
static void run(nsa_attend x, nsa_desc d, int count) {
    memset(out, 0, sizeof out);
    for (d.count = count; d.first < ROWS; d.first += count) {
        nsa_status s = nsa_attend_win_forward(&x, &d, workspace, sizeof workspace);
        CHECK(s == NSA_OK, "%s %s", nsa_status_name(s), nsa_status_where(s));
        x.q.data = (float *)x.q.data + count * d.dim;
        x.out.data = (nsa_real *)x.out.data + count * d.dim;
        x.lse.data = (nsa_real *)x.lse.data + count;
    }
}

/* All codes of 16 bits in turn, from an odd element on, where no vector begins. */
static nsa_tensor rows_of_16(nsa_dtype dtype, int width) {
    for (int i = 0; i < ROWS * width; i++) {
        stored[1 + i] = (uint16_t)i;
        want[i] = element_get(dtype, stored + 1 + i);
    }
    return nsa_tensor_bthd(stored + 1, dtype, ROWS, 1, width);
}

/* All codes of 8 bits, those that are NaN in f8 in few rows, and behind them scales: of any size,
   one of them 0, one NaN. Rows are one byte further apart than they must be. */
static nsa_tensor rows_of_8(nsa_dtype dtype, int width) {
    const int scales = (width + 127) / 128, apart = width + 4 * scales + 1;
    nsa_tensor x = nsa_tensor_bthd(stored, dtype, ROWS, 1, width);
    CHECK(x.token == apart - 1, "elements of a row");
    x.token = apart;
    for (int t = 0; t < ROWS; t++) {
        unsigned char *row = (unsigned char *)stored + t * apart;
        float scale[2] = {0, 0};
        for (int i = 0; i < scales; i++)
            scale[i] = t == 77        ? 0
                       : t == 78 && i ? NAN
                                      : ldexpf(1 + 0.137f * (float)i, t % 60 - 30);
        memcpy(row + width, scale, 4 * (size_t)scales);
        for (int c = 0; c < width; c++) {
            const int i = (t * width + c) % 254, special = t % 16 == 5 && c < 2;
            row[c] = (unsigned char)(special ? (c ? 0xff : 0x7f) : i < 127 ? i : i + 1);
            const double number = dtype == NSA_I8 ? (signed char)row[c] : e4m3_value(row[c]);
            const double product = number * (double)scale[c / 128];
            want[t * width + c] = sizeof(nsa_real) == 4 ? (double)(float)product : product;
        }
    }
    return x;
}

static void test_every_number(nsa_dtype dtype, nsa_isa isa, int width) {
    check_case("dtype %d, %s, width %d", (int)dtype, nsa_isa_name(isa), width);
    nsa_desc d = nsa_desc_default(1, ROWS, 1, 1, width);
    d.window = d.threads = 1;
    d.isa = isa;
    d.scale = 1;
    d.products = NSA_PRODUCTS_F32; /* products of bf16 take subnormal numbers for 0 */
    memset(q, 0, sizeof q);
    for (int t = 0; t < ROWS; t++) q[t * width + t % width] = 1;
    nsa_attend x;
    memset(&x, 0, sizeof x);
    x.q = nsa_tensor_bthd(q, NSA_F32, ROWS, 1, width);
    x.out = nsa_tensor_bthd(out, NSA_REAL_DTYPE, ROWS, 1, width);
    x.lse = nsa_tensor_bthd(lse, NSA_REAL_DTYPE, ROWS, 1, 1);
    x.k = x.v =
        dtype == NSA_I8 || dtype == NSA_F8 ? rows_of_8(dtype, width) : rows_of_16(dtype, width);
    CHECK(nsa_attend_win_forward_workspace_size(&d) <= sizeof workspace, "workspace");
    run(x, d, ROWS);
    check_rows(width, "packed");
    run(x, d, STEP);
    check_rows(width, "in place");
}

int main(void) {
    static const nsa_dtype dtypes[] = {NSA_BF16, NSA_F16, NSA_I8, NSA_F8};
    CHECK(e4m3_value(0x7e) == 448 && e4m3_value(0x08) == 0x1p-6 && e4m3_value(0x07) == 0x1.cp-7 &&
              e4m3_value(0x81) == -0x1p-9 && e4m3_value(0x38) == 1 && isnan(e4m3_value(0xff)),
          "the reference is not OCP's table");
    for (int isa = NSA_ISA_PLAIN; isa <= NSA_ISA_NEON_BF16; isa++)
        for (int i = 0; nsa_isa_available((nsa_isa)isa) && i < 4; i++) {
            test_every_number(dtypes[i], (nsa_isa)isa, 64);
            test_every_number(dtypes[i], (nsa_isa)isa, WIDE);
        }
    return check_done("test_row_formats");
}
