/* dnnl_layout.h - where a matrix of oneDNN's lies, for its versions 2 and 3 alike: a memory
   descriptor is a value in the one and a handle, which has an owner, in the other. Twin:
   gemm_bf16.c. */
#ifndef DNNL_LAYOUT_H
#define DNNL_LAYOUT_H

#include <oneapi/dnnl/dnnl.h>
#include <stdbool.h>
#include <stdint.h>

typedef dnnl_memory_desc_t layout; /* all zeros: none */

#if DNNL_VERSION_MAJOR >= 3

typedef const_dnnl_memory_desc_t layout_ref; /* what oneDNN's functions take */

static inline layout_ref layout_of(const layout *x) {
    return *x;
}

static inline void layout_free(layout *x) {
    if (*x) dnnl_memory_desc_destroy(*x);
    *x = NULL;
}

static inline bool layout_copy(layout *to, layout_ref from) {
    return dnnl_memory_desc_clone(to, from) == dnnl_success;
}

static inline bool layout_strided(layout *to, dnnl_data_type_t type, const dnnl_dims_t sizes,
                                  const dnnl_dims_t strides) {
    return dnnl_memory_desc_create_with_strides(to, 2, sizes, type, strides) == dnnl_success;
}

/* As the kernel wants it, which then says how that is. */
static inline bool layout_any(layout *to, dnnl_data_type_t type, const dnnl_dims_t sizes) {
    return dnnl_memory_desc_create_with_tag(to, 2, sizes, type, dnnl_format_tag_any) ==
           dnnl_success;
}

/* What a product of a and b, to be written to c, is made from. */
static inline bool layout_product(dnnl_primitive_desc_t *made, const layout *a, const layout *b,
                                  const layout *c, dnnl_primitive_attr_t attributes,
                                  dnnl_engine_t engine) {
    return dnnl_matmul_primitive_desc_create(made, engine, *a, *b, NULL, *c, attributes) ==
           dnnl_success;
}

static inline bool layout_append_sum(dnnl_post_ops_t after) {
    return dnnl_post_ops_append_sum(after, 1, 0, dnnl_data_type_undef) == dnnl_success;
}

#else

typedef const dnnl_memory_desc_t *layout_ref;

static inline layout_ref layout_of(const layout *x) {
    return x;
}

static inline void layout_free(layout *x) {
    (void)x;
}

static inline bool layout_copy(layout *to, layout_ref from) {
    *to = *from;
    return true;
}

static inline bool layout_strided(layout *to, dnnl_data_type_t type, const dnnl_dims_t sizes,
                                  const dnnl_dims_t strides) {
    return dnnl_memory_desc_init_by_strides(to, 2, sizes, type, strides) == dnnl_success;
}

static inline bool layout_any(layout *to, dnnl_data_type_t type, const dnnl_dims_t sizes) {
    return dnnl_memory_desc_init_by_tag(to, 2, sizes, type, dnnl_format_tag_any) == dnnl_success;
}

static inline bool layout_product(dnnl_primitive_desc_t *made, const layout *a, const layout *b,
                                  const layout *c, dnnl_primitive_attr_t attributes,
                                  dnnl_engine_t engine) {
    dnnl_matmul_desc_t product;
    return dnnl_matmul_desc_init(&product, a, b, NULL, c) == dnnl_success &&
           dnnl_primitive_desc_create(made, &product, attributes, engine, NULL) == dnnl_success;
}

static inline bool layout_append_sum(dnnl_post_ops_t after) {
    return dnnl_post_ops_append_sum(after, 1) == dnnl_success;
}

#endif

#endif
