/* gemm.c - matrix products through oneDNN (f32), CBLAS, or plain loops. Twin: gemm.h.

   The product is cut into tiles of c whose size hangs on the shapes alone. Threads take tiles, and
   for each a library is called that is told to use one thread. So there is one team of threads in
   the program, whatever build of a library it meets, and the bits are the same for any number. */
#include "ops/gemm.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifndef _OPENMP /* then the loops' pragmas are unknown, and what they alone name is unused */
#pragma GCC diagnostic ignored "-Wunknown-pragmas"
#pragma GCC diagnostic ignored "-Wunused-parameter"
#endif

typedef struct product {
    const nsa_real *a, *b;
    nsa_real *c;
    ptrdiff_t a_row, a_col, b_row, b_col; /* strides of a as (m, k) and of b as (k, n) */
    gemm_form form;
    int m, n, k, add;
} product;

static int smaller(int a, int b) {
    return a < b ? a : b;
}

enum { WIDEST = 256, NARROWEST = 64, ENOUGH = 8 }; /* rows of a tile; tiles to share out */

#ifdef NSA_HAVE_CBLAS

#include <cblas.h>

/* Rows i .. i + rows - 1 and columns j .. j + cols - 1 of c. */
static void multiply_tile(const product *p, int i, int rows, int j, int cols) {
    CBLAS_TRANSPOSE ta = p->form == GEMM_TN ? CblasTrans : CblasNoTrans;
    CBLAS_TRANSPOSE tb = p->form == GEMM_NT ? CblasTrans : CblasNoTrans;
    int lda = p->form == GEMM_TN ? p->m : p->k, ldb = p->form == GEMM_NT ? p->k : p->n;
    const void *a = p->a + i * p->a_row, *b = p->b + j * p->b_col;
    void *c = p->c + (ptrdiff_t)i * p->n + j;
    if (sizeof(nsa_real) == sizeof(double))
        cblas_dgemm(CblasRowMajor, ta, tb, rows, cols, p->k, 1, a, lda, b, ldb, p->add, c, p->n);
    else
        cblas_sgemm(CblasRowMajor, ta, tb, rows, cols, p->k, 1, a, lda, b, ldb, (float)p->add, c,
                    p->n);
}

const char *gemm_open(void) {
    openblas_set_num_threads(1);
    return openblas_get_config();
}

#else

/* Part of b, DEEP x COLS, is copied so that the inner loop runs over packed memory whatever the
   form; part of c, FEW x COLS, stays in first-level cache meanwhile. Every element of c is one sum
   in the order of k. */
enum { FEW = 4, DEEP = 128, COLS = 64 };

static void copy_b(nsa_real tile[DEEP][COLS], const product *p, int row, int rows, int col,
                   int cols) {
    for (int i = 0; i < rows; i++) {
        const nsa_real *b = p->b + (row + i) * p->b_row + col * p->b_col;
        for (int j = 0; j < COLS; j++) tile[i][j] = j < cols ? b[j * p->b_col] : 0;
    }
}

static void multiply_few(nsa_real acc[FEW][COLS], const product *p, int i, int few, int row,
                         int rows, nsa_real tile[DEEP][COLS]) {
    for (int r = 0; r < rows; r++)
        for (int f = 0; f < few; f++) {
            nsa_real x = p->a[(i + f) * p->a_row + (row + r) * p->a_col];
            for (int j = 0; j < COLS; j++) acc[f][j] += x * tile[r][j];
        }
}

static void multiply_panel(const product *p, int first, int last, int col, int cols) {
    nsa_real tile[DEEP][COLS], acc[FEW][COLS];
    for (int row = 0; row < p->k || row == 0; row += DEEP) {
        int rows = smaller(DEEP, p->k - row), keep = p->add || row > 0;
        copy_b(tile, p, row, rows, col, cols);
        for (int i = first; i < last; i += FEW) {
            int few = smaller(FEW, last - i);
            memset(acc, 0, sizeof acc);
            for (int f = 0; keep && f < few; f++)
                memcpy(acc[f], p->c + (ptrdiff_t)(i + f) * p->n + col,
                       (size_t)cols * sizeof acc[f][0]);
            multiply_few(acc, p, i, few, row, rows, tile);
            for (int f = 0; f < few; f++)
                memcpy(p->c + (ptrdiff_t)(i + f) * p->n + col, acc[f],
                       (size_t)cols * sizeof acc[f][0]);
        }
    }
}

/* Rows i .. i + rows - 1 and columns j .. j + cols - 1 of c. */
static void multiply_tile(const product *p, int i, int rows, int j, int cols) {
    for (int col = 0; col < cols; col += COLS)
        multiply_panel(p, i, i + rows, j + col, smaller(COLS, cols - col));
}

#endif

#ifdef NSA_HAVE_DNNL

#include <oneapi/dnnl/dnnl.h>
#include <omp.h>
#include <stdlib.h>

/* A tile is wide, because oneDNN reads b once for all of its rows. Where a comes transposed oneDNN
   is slow, so DEEPEST rows of it are laid out straight and stay in second-level cache meanwhile. */
enum { ACROSS = 512, DEEPEST = 384, EDGE = 16 };

const char *gemm_open(void) {
    static char name[64];
    const dnnl_version_t *v = dnnl_version();
    snprintf(name, sizeof name, "oneDNN %d.%d.%d", v->major, v->minor, v->patch);
    return name;
}

void gemm_stay_alone(void) {
    omp_set_num_threads(1);
}

/* to[f][r] = a[r][i + f], by squares of a few cache lines. The square below is asked for ahead: its
   rows are too far apart for the processor to guess them. */
static void straighten(float to[WIDEST][DEEPEST], const product *p, int i, int rows) {
    for (int k = 0; k < p->k; k += EDGE)
        for (int f = 0; f < rows; f += EDGE)
            for (int r = k; r < smaller(k + EDGE, p->k); r++) {
                const float *row = p->a + (ptrdiff_t)r * p->m + i;
                if (r + EDGE < p->k) __builtin_prefetch(row + (ptrdiff_t)EDGE * p->m + f);
                for (int g = f; g < smaller(f + EDGE, rows); g++) to[g][r] = row[g];
            }
}

/* False: there is no memory, and c is as it was. */
static int multiply_by_dnnl(const product *p, int i, int rows, int j, int cols) {
    static __thread float(*straight)[DEEPEST]; /* too large for a small stack */
    const float *a = p->a + i * p->a_row, *b = p->b + j * p->b_col;
    int turned = p->form == GEMM_TN, lda = turned ? DEEPEST : p->k;
    if (turned && !straight && !(straight = malloc(WIDEST * sizeof *straight))) return 0;
    if (turned) straighten(straight, p, i, rows), a = straight[0];
    return dnnl_sgemm('N', p->form == GEMM_NT ? 'T' : 'N', rows, cols, p->k, 1, a, lda, b,
                      p->form == GEMM_NT ? p->k : p->n, (float)p->add,
                      p->c + (ptrdiff_t)i * p->n + j, p->n) == dnnl_success;
}

static void multiply(const product *p, int i, int rows, int j, int cols) {
    int deep = p->form == GEMM_TN ? DEEPEST : p->k;
    for (int row = 0; row < p->k; row += deep) {
        product part = *p;
        part.a += row * p->a_col;
        part.b += row * p->b_row;
        part.k = smaller(deep, p->k - row);
        part.add |= row > 0;
        if (!multiply_by_dnnl(&part, i, rows, j, cols)) multiply_tile(&part, i, rows, j, cols);
    }
}

#else

enum { ACROSS = 0 }; /* columns of a tile: as many as rows */

#ifndef NSA_HAVE_CBLAS
const char *gemm_open(void) {
    return "plain loops";
}
#endif

void gemm_stay_alone(void) {}

static void multiply(const product *p, int i, int rows, int j, int cols) {
    multiply_tile(p, i, rows, j, cols);
}

#endif

gemm_tiles gemm_cut(int m, int n, int across) {
    gemm_tiles t = {.side = WIDEST};
    for (;; t.side /= 2) {
        t.across = across ? across : t.side;
        t.rows = (m + t.side - 1) / t.side;
        t.cols = (n + t.across - 1) / t.across;
        if (t.side == NARROWEST || (int64_t)t.rows * t.cols >= ENOUGH) return t;
    }
}

void gemm(gemm_form form, int m, int n, int k, const nsa_real *a, const nsa_real *b, nsa_real *c,
          int add, int threads) {
    product p = {a, b, c, k, 1, n, 1, form, m, n, k, add};
    gemm_tiles t = gemm_cut(m, n, ACROSS);
    if (form == GEMM_TN) p.a_row = 1, p.a_col = m;
    if (form == GEMM_NT) p.b_row = 1, p.b_col = k;
#pragma omp parallel num_threads(threads)
    {
        gemm_stay_alone();
#pragma omp for collapse(2) schedule(dynamic)
        for (int i = 0; i < t.rows; i++)
            for (int j = 0; j < t.cols; j++)
                multiply(&p, i * t.side, smaller(t.side, m - i * t.side), j * t.across,
                         smaller(t.across, n - j * t.across));
    }
}
