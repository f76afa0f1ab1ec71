/* What the implementation takes of the system. Twin: none. Not here: what the interface takes
   (api.h), and what both sides share (shared.h). */
#pragma once
#include "shared.h"

#include <float.h>
#include <limits.h>
#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#define NSA__HAS_SCHED
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
