/* gemm_cuda.cu - matrix products over cuBLASLt. Twin: gemm_cuda.h. It holds no kernel; how a
   product is computed is chosen once for each shape, and kept. */
#include "ops/cuda/gemm_cuda.h"

#include <cublasLt.h>
#include <stdio.h>
#include <stdlib.h>

enum { SHAPES = 256, WORKSPACE_BYTES = 32 << 20 };

/* One shape's descriptors and algorithm. */
typedef struct shape {
    gemm_cuda_product key; /* pointers: their alignment, as far as it counts */
    cublasLtMatmulDesc_t matmul;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
} shape;

struct gemm_cuda {
    cublasLtHandle_t handle;
    void *workspace;
    int count;
    shape shapes[SHAPES];
    char name[32];
};

gemm_cuda *gemm_cuda_open(const char **library) {
    gemm_cuda *g = static_cast<gemm_cuda *>(calloc(1, sizeof *g));
    if (!g) return NULL;
    if (cublasLtCreate(&g->handle) != CUBLAS_STATUS_SUCCESS ||
        cudaMalloc(&g->workspace, WORKSPACE_BYTES) != cudaSuccess) {
        gemm_cuda_close(g);
        return NULL;
    }
    const size_t version = cublasLtGetVersion();
    snprintf(g->name, sizeof g->name, "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100,
             version % 100);
    *library = g->name;
    return g;
}

static void forget(shape *s) {
    if (s->a) cublasLtMatrixLayoutDestroy(s->a);
    if (s->b) cublasLtMatrixLayoutDestroy(s->b);
    if (s->d) cublasLtMatrixLayoutDestroy(s->d);
    if (s->matmul) cublasLtMatmulDescDestroy(s->matmul);
}

void gemm_cuda_close(gemm_cuda *g) {
    if (!g) return;
    for (int i = 0; i < g->count; i++) forget(&g->shapes[i]);
    if (g->workspace) cudaFree(g->workspace);
    if (g->handle) cublasLtDestroy(g->handle);
    free(g);
}

static cudaDataType_t type_of(nsa_dtype dtype) {
    return dtype == NSA_F32 ? CUDA_R_32F : dtype == NSA_BF16 ? CUDA_R_16BF : CUDA_R_16F;
}

/* 16 bytes is all that an algorithm asks for. */
static uint32_t alignment(const void *pointer) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(pointer);
    uint32_t bytes = 16;
    while (at % bytes) bytes /= 2;
    return bytes;
}

static const void *aligned_as(const void *pointer) {
    return reinterpret_cast<const void *>(static_cast<uintptr_t>(alignment(pointer)));
}

static gemm_cuda_product key_of(const gemm_cuda_product *p) {
    gemm_cuda_product key = *p;
    key.a = aligned_as(p->a);
    key.b = aligned_as(p->b);
    key.d = const_cast<void *>(aligned_as(p->d));
    key.add = p->add ? aligned_as(p->add) : NULL;
    return key;
}

static bool same(const gemm_cuda_product *a, const gemm_cuda_product *b) {
    return a->form == b->form && a->m == b->m && a->n == b->n && a->k == b->k && a->in == b->in &&
           a->out == b->out && a->a == b->a && a->b == b->b && a->d == b->d && a->add == b->add;
}

/* The library counts columns first: to it our matrices are their transposes, and d^T = b^T a^T. So
   its A is our b, its B our a. */
static bool describe(shape *s) {
    const gemm_cuda_product *p = &s->key;
    const cublasOperation_t a = p->form == GEMM_CUDA_NT ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t b = p->form == GEMM_CUDA_TN ? CUBLAS_OP_T : CUBLAS_OP_N;
    const uint64_t m = static_cast<uint64_t>(p->m), n = static_cast<uint64_t>(p->n),
                   k = static_cast<uint64_t>(p->k);
    const uint64_t a_rows = a == CUBLAS_OP_T ? k : n, a_columns = a == CUBLAS_OP_T ? n : k;
    const uint64_t b_rows = b == CUBLAS_OP_T ? m : k, b_columns = b == CUBLAS_OP_T ? k : m;
    bool ok = cublasLtMatmulDescCreate(&s->matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F) ==
              CUBLAS_STATUS_SUCCESS;
    ok = ok && cublasLtMatmulDescSetAttribute(s->matmul, CUBLASLT_MATMUL_DESC_TRANSA, &a,
                                              sizeof a) == CUBLAS_STATUS_SUCCESS;
    ok = ok && cublasLtMatmulDescSetAttribute(s->matmul, CUBLASLT_MATMUL_DESC_TRANSB, &b,
                                              sizeof b) == CUBLAS_STATUS_SUCCESS;
    ok = ok && cublasLtMatrixLayoutCreate(&s->a, type_of(p->in), a_rows, a_columns,
                                          static_cast<int64_t>(a_rows)) == CUBLAS_STATUS_SUCCESS;
    ok = ok && cublasLtMatrixLayoutCreate(&s->b, type_of(p->in), b_rows, b_columns,
                                          static_cast<int64_t>(b_rows)) == CUBLAS_STATUS_SUCCESS;
    return ok && cublasLtMatrixLayoutCreate(&s->d, type_of(p->out), n, m,
                                            static_cast<int64_t>(n)) == CUBLAS_STATUS_SUCCESS;
}

static bool choose(gemm_cuda *g, shape *s) {
    const gemm_cuda_product *p = &s->key;
    const size_t room = WORKSPACE_BYTES;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        uint32_t bytes;
    } alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p->b)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p->a)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p->add ? p->add : p->d)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p->d)}};
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    if (cublasLtMatmulPreferenceCreate(&preference) != CUBLAS_STATUS_SUCCESS) return false;
    bool ok =
        cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &room, sizeof room) == CUBLAS_STATUS_SUCCESS;
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++)
        ok = ok && cublasLtMatmulPreferenceSetAttribute(
                       preference, alignments[i].attribute, &alignments[i].bytes,
                       sizeof alignments[i].bytes) == CUBLAS_STATUS_SUCCESS;
    ok = ok &&
         cublasLtMatmulAlgoGetHeuristic(g->handle, s->matmul, s->a, s->b, s->d, s->d, preference, 1,
                                        &found, &count) == CUBLAS_STATUS_SUCCESS;
    cublasLtMatmulPreferenceDestroy(preference);
    if (!ok || !count) return false;
    s->algorithm = found.algo;
    return true;
}

/* Kept from the first product of the shape on; with more shapes than there is room for, the last
   place is used again. */
static shape *shape_of(gemm_cuda *g, const gemm_cuda_product *p) {
    const gemm_cuda_product key = key_of(p);
    for (int i = 0; i < g->count; i++)
        if (same(&g->shapes[i].key, &key)) return &g->shapes[i];
    if (g->count == SHAPES) forget(&g->shapes[--g->count]);
    shape *s = &g->shapes[g->count];
    *s = shape();
    s->key = key;
    if (!describe(s) || !choose(g, s)) {
        forget(s);
        return NULL;
    }
    g->count++;
    return s;
}

bool gemm_cuda_run(gemm_cuda *g, const gemm_cuda_product *p, nsa_cuda_stream stream) {
    const float one = 1, beta = p->add ? 1.0f : 0.0f;
    if (p->m == 0 || p->n == 0) return true;
    const shape *s = shape_of(g, p);
    if (!s) return false;
    return cublasLtMatmul(g->handle, s->matmul, &one, p->b, s->a, p->a, s->b, &beta,
                          p->add ? p->add : p->d, s->d, p->d, s->d, &s->algorithm, g->workspace,
                          WORKSPACE_BYTES, stream) == CUBLAS_STATUS_SUCCESS;
}
