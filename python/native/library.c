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
