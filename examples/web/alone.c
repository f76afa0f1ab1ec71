/* alone.c - dist.h's calls for one process, where there are no others to wait for: a page has
   neither threads nor sockets; and threads.h's word of that. Twin: dist.h. It stands in for dist.c
   and threads.c, of which the model's forward pass asks nothing else. */
#include "base/threads.h"
#include "dist/dist.h"

int threads_granted(int setting) {
    (void)setting;
    return 1;
}

dist dist_alone(void) {
    dist d = {.world = 1, .context = 1};
    return d;
}

int64_t dist_multiple(const dist *d) {
    (void)d;
    return 1;
}

size_t dist_bytes(const dist *d, const ops *o, int64_t elements) {
    (void)d, (void)o, (void)elements;
    return 0;
}

void dist_begin(dist *d) {
    (void)d;
}

void dist_final_from(dist *d, int64_t first) {
    (void)d, (void)first;
}

void dist_join(dist *d) {
    (void)d;
}

bool dist_ended(const dist *d, fault *f) {
    (void)d, (void)f;
    return false;
}

/* Of a sequence that nobody divides no blocks are exchanged. */
bool dist_attach_blocks(dist *d, const ops *o, int64_t each, fault *f) {
    (void)d, (void)o, (void)each, (void)f;
    return true;
}

size_t dist_blocks_bytes(const dist *d, const ops *o, int64_t each) {
    (void)d, (void)o, (void)each;
    return 0;
}

void dist_gather_blocks(dist *d, real *blocks, int64_t each) {
    (void)d, (void)blocks, (void)each;
}

void dist_reduce_blocks(dist *d, real *blocks, int64_t each) {
    (void)d, (void)blocks, (void)each;
}

bool dist_catch_up(dist *d, fault *f) {
    (void)d, (void)f;
    return true;
}
