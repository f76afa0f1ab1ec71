/* bf16_units.c - loaded before a program (LD_PRELOAD), says that this processor has units for bf16;
   oneDNN then emulates them. Where BF16_UNITS_BLOCKS is set, weights get a layout of blocks, as
   such units want them and plain, slow code of oneDNN reads them; else they stay as they lie.
   Twin: gemm_bf16.c. It says nothing about speed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SKIPPED = 77 };

static void find(const char *name, void *function, size_t bytes) {
    void *symbol = dlsym(RTLD_NEXT, name);
    memcpy(function, &symbol, bytes);
}

dnnl_cpu_isa_t dnnl_get_effective_cpu_isa(void) {
    dnnl_cpu_isa_t (*here)(void);
    find("dnnl_get_effective_cpu_isa", &here, sizeof here);
    if ((here() & dnnl_cpu_isa_avx512_core) != dnnl_cpu_isa_avx512_core) _exit(SKIPPED);
    return dnnl_cpu_isa_avx512_core_bf16;
}

/* oneDNN 2 and 3 have different names for the same. */
#if DNNL_VERSION_MAJOR >= 3
#define DESCRIBE dnnl_memory_desc_create_with_tag
#define NAME     "dnnl_memory_desc_create_with_tag"
#else
#define DESCRIBE dnnl_memory_desc_init_by_tag
#define NAME     "dnnl_memory_desc_init_by_tag"
#endif

dnnl_status_t DESCRIBE(dnnl_memory_desc_t *to, int count, const dnnl_dims_t sizes,
                       dnnl_data_type_t type, dnnl_format_tag_t tag) {
    dnnl_status_t (*next)(dnnl_memory_desc_t *, int, const dnnl_dims_t, dnnl_data_type_t,
                          dnnl_format_tag_t);
    find(NAME, &next, sizeof next);
    if (getenv("BF16_UNITS_BLOCKS") && tag == dnnl_format_tag_any) tag = dnnl_BA16a64b2a;
    return next(to, count, sizes, type, tag);
}
