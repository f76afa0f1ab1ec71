/* heap_count.c - loaded before a program (LD_PRELOAD), counts the bytes and the blocks that it
   holds of the heap at any moment, into the file that HEAP_COUNT names: two int64. Twin:
   test_soak.py, which reads it. For glibc, whose own functions it calls. */
#include <fcntl.h>
#include <malloc.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *block);
void *aligned_alloc(size_t alignment, size_t bytes); /* of a later C than this one */

enum { BYTES, BLOCKS, NUMBERS };

static int64_t before_start[NUMBERS];
static int64_t *held = before_start;

__attribute__((constructor)) static void start(void) {
    const char *path = getenv("HEAP_COUNT");
    int file = path ? open(path, O_RDWR) : -1;
    if (file < 0) return;
    void *memory = mmap(NULL, sizeof before_start, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return;
    held = memory;
    for (int i = 0; i < NUMBERS; i++) held[i] = before_start[i];
}

static void *count(void *block, int sign) {
    if (block) {
        int64_t bytes = sign * (int64_t)malloc_usable_size(block);
        __atomic_fetch_add(&held[BYTES], bytes, __ATOMIC_RELAXED);
        __atomic_fetch_add(&held[BLOCKS], sign, __ATOMIC_RELAXED);
    }
    return block;
}

void *malloc(size_t bytes) {
    return count(__libc_malloc(bytes), 1);
}

void *calloc(size_t blocks, size_t bytes) {
    return count(__libc_calloc(blocks, bytes), 1);
}

void *realloc(void *block, size_t bytes) {
    void *moved = __libc_realloc(count(block, -1), bytes);
    count(!moved && bytes ? block : moved, 1);
    return moved;
}

void *aligned_alloc(size_t alignment, size_t bytes) {
    return count(__libc_memalign(alignment, bytes), 1);
}

void *memalign(size_t alignment, size_t bytes) {
    return count(__libc_memalign(alignment, bytes), 1);
}

int posix_memalign(void **block, size_t alignment, size_t bytes) {
    *block = count(__libc_memalign(alignment, bytes), 1);
    return *block ? 0 : 12; /* ENOMEM */
}

void free(void *block) {
    __libc_free(count(block, -1));
}
