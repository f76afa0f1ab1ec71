/* gemm.c - matrix products through CBLAS, or plain loops. Twin: gemm.h. */
#include "gemm.h"

#ifdef NSA_HAVE_CBLAS

#include <cblas.h>

void gemm(gemm_form form, int m, int n, int k, const nsa_real *a, const nsa_real *b, nsa_real *c,
          int add) {
    CBLAS_TRANSPOSE ta = form == GEMM_TN ? CblasTrans : CblasNoTrans;
    CBLAS_TRANSPOSE tb = form == GEMM_NT ? CblasTrans : CblasNoTrans;
    int lda = form == GEMM_TN ? m : k, ldb = form == GEMM_NT ? k : n;
    if (sizeof(nsa_real) == sizeof(double))
        cblas_dgemm(CblasRowMajor, ta, tb, m, n, k, 1, (const void *)a, lda, (const void *)b, ldb,
                    add, (void *)c, n);
    else
        cblas_sgemm(CblasRowMajor, ta, tb, m, n, k, 1, (const void *)a, lda, (const void *)b, ldb,
                    (float)add, (void *)c, n);
}

/* The OpenMP build follows omp_set_num_threads, the pthread build only this. */
void gemm_threads(int threads) {
    openblas_set_num_threads(threads);
}

const char *gemm_name(void) {
    return openblas_get_config();
}

int gemm_is_deterministic(void) {
    return 0;
}

#else

#include <stddef.h>
#include <string.h>

/* A tile of b, ROWS x COLS, is copied so that the inner loop runs over packed memory whatever the
   form; a tile of c, FEW x COLS, stays in registers or first-level cache meanwhile. Every element
   of c is one sum in the order of k, so the bits do not depend on the threads. */
enum { FEW = 4, ROWS = 128, COLS = 64, CHUNK = 64 };

typedef struct product {
    const nsa_real *a, *b;
    nsa_real *c;
    ptrdiff_t a_row, a_col, b_row, b_col; /* strides of a as (m, k) and of b as (k, n) */
    int m, n, k, add;
} product;

static int threads_allowed = 1;

static int smaller(int a, int b) {
    return a < b ? a : b;
}

static void copy_tile(nsa_real tile[ROWS][COLS], const product *p, int row, int rows, int col,
                      int cols) {
    for (int i = 0; i < rows; i++) {
        const nsa_real *b = p->b + (row + i) * p->b_row + col * p->b_col;
        for (int j = 0; j < COLS; j++) tile[i][j] = j < cols ? b[j * p->b_col] : 0;
    }
}

static void multiply_tile(nsa_real acc[FEW][COLS], const product *p, int i, int few, int row,
                          int rows, nsa_real tile[ROWS][COLS]) {
    for (int r = 0; r < rows; r++)
        for (int f = 0; f < few; f++) {
            nsa_real x = p->a[(i + f) * p->a_row + (row + r) * p->a_col];
            for (int j = 0; j < COLS; j++) acc[f][j] += x * tile[r][j];
        }
}

/* Rows first .. last - 1 and COLS columns from col on of c. */
static void multiply_panel(const product *p, int first, int last, int col) {
    nsa_real tile[ROWS][COLS], acc[FEW][COLS];
    int cols = smaller(COLS, p->n - col);
    for (int row = 0; row < p->k || row == 0; row += ROWS) {
        int rows = smaller(ROWS, p->k - row), keep = p->add || row > 0;
        copy_tile(tile, p, row, rows, col, cols);
        for (int i = first; i < last; i += FEW) {
            int few = smaller(FEW, last - i);
            memset(acc, 0, sizeof acc);
            for (int f = 0; keep && f < few; f++)
                memcpy(acc[f], p->c + (ptrdiff_t)(i + f) * p->n + col,
                       (size_t)cols * sizeof acc[f][0]);
            multiply_tile(acc, p, i, few, row, rows, tile);
            for (int f = 0; f < few; f++)
                memcpy(p->c + (ptrdiff_t)(i + f) * p->n + col, acc[f],
                       (size_t)cols * sizeof acc[f][0]);
        }
    }
}

void gemm(gemm_form form, int m, int n, int k, const nsa_real *a, const nsa_real *b, nsa_real *c,
          int add) {
    product p = {a, b, c, k, 1, n, 1, m, n, k, add};
    if (form == GEMM_TN) p.a_row = 1, p.a_col = m;
    if (form == GEMM_NT) p.b_row = 1, p.b_col = k;
    int chunks = (m + CHUNK - 1) / CHUNK, panels = (n + COLS - 1) / COLS;
#pragma omp parallel for collapse(2) num_threads(threads_allowed) schedule(static)
    for (int chunk = 0; chunk < chunks; chunk++)
        for (int panel = 0; panel < panels; panel++)
            multiply_panel(&p, chunk * CHUNK, smaller(m, (chunk + 1) * CHUNK), panel * COLS);
}

void gemm_threads(int threads) {
    threads_allowed = threads;
}

const char *gemm_name(void) {
    return "plain loops";
}

int gemm_is_deterministic(void) {
    return 1;
}

#endif
