/* library.c - nsa.h as a shared library with plain symbols, and what nsa/_library.py asks it.
   Twins: src/nsa/_library.py; layout.c, which bindings.py writes. It is compiled once for each
   NSA_REAL. Not here: anything that knows Python. */

/* glibc 2.29 gave these functions new versions, which differ in how they report errors alone. By
   their first ones the library also loads where glibc is older. */
#if defined(__linux__) && defined(__GNUC__) && defined(NSA_PYTHON_GLIBC_SYMBOLS)
#include <features.h>
#if defined(__GLIBC__) && defined(__x86_64__)
#define NSA__FIRST "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define NSA__FIRST "GLIBC_2.17"
#endif
#ifdef NSA__FIRST
__asm__(".symver exp,exp@" NSA__FIRST);
__asm__(".symver exp2,exp2@" NSA__FIRST);
__asm__(".symver log,log@" NSA__FIRST);
__asm__(".symver log2,log2@" NSA__FIRST);
__asm__(".symver pow,pow@" NSA__FIRST);
#endif
#endif

#define NSA_IMPLEMENTATION
#include "nsa.h"

#include "layout.c"

/* ---- Rows that no query writes -------------------------------------------------------------------
   nsa.h leaves them as they are; what a host allocated has nothing there that may be read. */

/* Rows begin .. end - 1 of a batch of x, (heads, width) each: 0, or if `infinite` -inf; of i32 -1. */
NSA_API void nsa_python_fill(const nsa_tensor *x, int64_t batch, int64_t begin, int64_t end,
                             int64_t heads, int64_t width, int infinite);
NSA_API void nsa_python_fill(const nsa_tensor *x, int64_t batch, int64_t begin, int64_t end,
                             int64_t heads, int64_t width, int infinite) {
    const float f32 = -HUGE_VALF;
    const double f64 = -HUGE_VAL;
    size_t size = x->dtype == NSA_F64 ? 8 : x->dtype == NSA_F32 || x->dtype == NSA_I32 ? 4 : 2;
    for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < heads; h++) {
            int64_t row = batch * x->batch + t * x->token + h * x->head;
            char *to = (char *)x->data + row * (int64_t)size;
            memset(to, x->dtype == NSA_I32 ? 0xff : 0, (size_t)width * size);
            for (int64_t c = 0; infinite && c < width; c++)
                if (x->dtype == NSA_F32 || x->dtype == NSA_F64)
                    memcpy(to + c * (int64_t)size, size == 4 ? (const void *)&f32 : &f64, size);
        }
}

/* Of the packed rows of x, `rows` in all, those that are no query of a sequence. d: what the call
   had that has written the others. */
NSA_API void nsa_python_clear(const nsa_desc *d, const nsa_tensor *x, int64_t rows, int64_t heads,
                              int64_t width, int infinite);
NSA_API void nsa_python_clear(const nsa_desc *d, const nsa_tensor *x, int64_t rows, int64_t heads,
                              int64_t width, int infinite) {
    int64_t written = 0;
    for (int b = 0; b < d->batch; b++) {
        if (d->counts) {
            written += d->counts[b];
            continue;
        }
        int64_t count = (int64_t)d->begins[b + 1] - d->begins[b] - d->first;
        nsa_python_fill(x, 0, written, d->begins[b], heads, width, infinite);
        written = d->begins[b] + (count < 0 ? 0 : count < d->count ? count : d->count);
    }
    nsa_python_fill(x, 0, written, rows, heads, width, infinite);
}
