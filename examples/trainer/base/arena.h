/* arena.h - one block of memory, handed out from front to back and counted by purpose. Twin:
   arena.c. The same code lays a model out twice: first without memory, to learn the sizes, then
   with it. Nothing is given back piece by piece. */
#ifndef ARENA_H
#define ARENA_H

#include <stddef.h>

typedef enum purpose {
    FOR_WEIGHTS,
    FOR_GRADIENTS,
    FOR_MOMENTS,
    FOR_CHECKPOINTS, /* inputs of the layers */
    FOR_ACTIVATIONS, /* what else backward needs of the layers */
    FOR_BACKWARD,    /* gradients of activations, and what is recomputed */
    FOR_LOGITS,
    FOR_WORKSPACE, /* of attention */
    FOR_BATCH,
    FOR_CACHE,         /* keys and values of the tokens that model_append has seen */
    FOR_COMMUNICATION, /* of several processes */
    FOR_SNAPSHOT,      /* the copy that is written while the run goes on */
    FOR_PACKED,        /* weights once more, laid out as the products' library wants them */
    PURPOSES
} purpose;

typedef struct arena {
    char *base; /* NULL: only counts; what it hands out are places, not memory */
    size_t used, by_purpose[PURPOSES];
} arena;

/* 64-byte aligned, never NULL. */
void *arena_take(arena *a, purpose p, size_t bytes);

/* Counts memory that lies elsewhere. */
void arena_note(arena *a, purpose p, size_t bytes);

const char *purpose_name(purpose p);

#endif
