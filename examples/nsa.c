/* nsa.c - nsa.h's implementation for all programs of these folders, compiled once for a build.
   Twin: none. Not here: what a program alone needs; it defines NSA_IMPLEMENTATION itself. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
