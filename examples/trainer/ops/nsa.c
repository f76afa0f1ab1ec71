/* nsa.c - the one file of the trainers that holds nsa.h's implementation. */
#define NSA_IMPLEMENTATION
#include "nsa.h"
