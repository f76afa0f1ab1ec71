/* test_dtypes.cpp: which dtypes CUDA takes, beside an nsa.h whose own numbers are double: sums, lse
   and the gradients of lse are f32 whatever NSA_REAL is; f64 and rows of 8 bits are refused by
   name.
   Twin: the tests of the CPU with NSA_REAL=double, test_convert_rows.c.
   Not here: results; merge stands for all, because one table says which views are lse (views.h). */
#define NSA_REAL double
#define NSA_CUDA_IMPLEMENTATION
#include "nsa_cuda.cuh"

#include "expect.h"

static const int tokens = 3, heads = 2, width = 8;

struct views {
    device_array<double> data{tokens * heads * width}; /* room for either dtype */
    nsa_tensor of(nsa_dtype dtype, int columns) {
        return nsa_tensor_bthd(data.data, dtype, tokens, heads, columns);
    }
};

/* merge of rows of 2 and of 4 with the same lse: their mean, and lse + ln 2. */
static nsa_status merge(nsa_dtype rows, nsa_dtype lse, std::vector<float> *mean,
                        std::vector<float> *sum) {
    const size_t n = tokens * heads;
    device_array<float> a(std::vector<float>(n * width, 2)), b(std::vector<float>(n * width, 4)),
        lse_ab(std::vector<float>(n, 1));
    views out, lse_out;
    nsa_desc d = nsa_desc_default(1, tokens, heads, heads, width);
    nsa_merge x = {};
    x.out_a = nsa_tensor_bthd(a.data, NSA_F32, tokens, heads, width);
    x.out_b = nsa_tensor_bthd(b.data, NSA_F32, tokens, heads, width);
    x.lse_a = x.lse_b = nsa_tensor_bthd(lse_ab.data, NSA_F32, tokens, heads, 1);
    x.out = out.of(rows, width);
    x.lse = lse_out.of(lse, 1);
    const nsa_status s = nsa_cuda_merge_forward(&x, &d, nullptr);
    mean->resize(n * width);
    sum->resize(n);
    EXPECT(cudaMemcpy(mean->data(), out.data.data, mean->size() * sizeof(float),
                      cudaMemcpyDeviceToHost) == cudaSuccess);
    EXPECT(cudaMemcpy(sum->data(), lse_out.data.data, n * sizeof(float), cudaMemcpyDeviceToHost) ==
           cudaSuccess);
    return s;
}

static void refused(nsa_status s, const char *where) {
    EXPECT_EQUAL(nsa_status_kind(s), NSA_ERROR_DTYPE);
    EXPECT(!strcmp(nsa_status_where(s), where));
}

static void test_rows_of_8_bits(nsa_dtype dtype) {
    views q, k, k8, lse;
    nsa_desc d = nsa_desc_default(1, tokens, heads, heads, width);
    nsa_attend x = {};
    x.q = x.out = q.of(NSA_F32, width);
    x.k = x.v = k.of(NSA_F32, width);
    x.lse = lse.of(NSA_F32, 1);
    x.k = k8.of(dtype, width);
    refused(nsa_cuda_attend_win_forward(&x, &d, nullptr, 0, nullptr), "k");
}

int main() {
    std::vector<float> mean, sum;
    EXPECT_EQUAL(merge(NSA_F32, NSA_F32, &mean, &sum), NSA_OK);
    for (float x : mean) EXPECT_EQUAL(x, 3);
    for (float x : sum) EXPECT(x > 1.693147f && x < 1.693148f);
    refused(merge(NSA_F64, NSA_F32, &mean, &sum), "out");
    refused(merge(NSA_F32, NSA_F64, &mean, &sum), "lse");
    test_rows_of_8_bits(NSA_I8);
    test_rows_of_8_bits(NSA_F8);
    return expect_result("test_dtypes");
}
