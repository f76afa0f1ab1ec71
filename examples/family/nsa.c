/* nsa.c - nsa.h's implementation for all programs of this folder, where a build has several.
   Twin: none. Not here: what a program alone needs; `cc dsa.c -I../../nsa -lm` is enough. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
