/* ---- Block index as arrays ----------------------------------------------------------------------
   Twin: kernels/block_index.cuh. Not here: the closed forms (index.h). */
#pragma once
#include "checks.h"

NSA_API int64_t nsa_block_map_size(const nsa_desc *d, int tokens) {
    int64_t entries = 0;
    for (int j = 0; j < nsa_slc_count(d, tokens); j++) {
        int begin, end;
        nsa_block_overlap_range(d, tokens, j, &begin, &end);
        entries += end - begin;
    }
    return entries;
}

/* Eq. 9 as a sparse matrix in CSR form: the entries of row j are indptr[j] .. indptr[j + 1] - 1,
   the column is the compressed block, the weight nsa_block_overlap. */
NSA_API nsa_status nsa_block_map(const nsa_desc *d, int tokens, int32_t *indptr, int32_t *indices,
                                 nsa_real *weights) {
    NSA__CHECK(nsa__check_geometry(d));
    if (tokens < 0) return nsa__error(NSA_ERROR_SIZE, NSA__AT_tokens);
    int64_t entries = nsa_block_map_size(d, tokens);
    if (entries > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    if (!indptr) return nsa__error(NSA_ERROR_NULL, NSA__AT_indptr);
    if (entries && !indices) return nsa__error(NSA_ERROR_NULL, NSA__AT_indices);
    if (entries && !weights) return nsa__error(NSA_ERROR_NULL, NSA__AT_weights);
    int32_t at = 0;
    for (int j = 0; j < nsa_slc_count(d, tokens); j++) {
        int begin, end;
        nsa_block_overlap_range(d, tokens, j, &begin, &end);
        indptr[j] = at;
        for (int i = begin; i < end; i++, at++) {
            indices[at] = i;
            weights[at] = (nsa_real)nsa_block_overlap(d, i, j);
        }
    }
    indptr[nsa_slc_count(d, tokens)] = at;
    return NSA_OK;
}

NSA_API nsa_status nsa_cmp_begins(const nsa_desc *d, int32_t *cmp_begins) {
    NSA__CHECK(nsa_desc_check(d));
    if (!cmp_begins) return nsa__error(NSA_ERROR_NULL, NSA__AT_cmp_begins);
    if (nsa__cmp_rows(d) > INT32_MAX) return nsa__error(NSA_ERROR_OVERFLOW, NSA__AT_tokens);
    cmp_begins[0] = 0;
    for (int b = 0; b < d->batch; b++) {
        int tokens = d->begins ? d->begins[b + 1] - d->begins[b] : d->tokens;
        cmp_begins[b + 1] = cmp_begins[b] + nsa_cmp_count(d, tokens);
    }
    return NSA_OK;
}
