/* nsa_impl.c - the implementation under test, compiled once for each way of compiling it.
   Twin: none. Not here: tests; they are compiled apart, without the flags under test. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
