/* phase.h - what a run is doing at this moment: a phase and a layer in one word, set by the
   training thread, read by any other. On CUDA the device writes a word of the same form to mapped
   memory. Twin: phase.c. */
#ifndef PHASE_H
#define PHASE_H

#include <stdint.h>

typedef enum phase {
    PHASE_BOOT,
    PHASE_DATA,
    PHASE_FWD,
    PHASE_BWD,
    PHASE_OPT,
    PHASE_COMM,
    PHASE_EVAL,
    PHASE_SAVE,
    PHASE_SAMPLE,
    PHASE_END
} phase;

void phase_set(phase p, int layer); /* layer -1: none */
phase phase_get(int *layer);
const char *phase_name(phase p); /* "bwd" */

/* The word itself, for what writes it from elsewhere: phase << 16 | layer + 1. */
uint32_t *phase_word(void);

/* From here on the word is this one, memory that a device writes too; NULL: the host's own
   again. */
void phase_use(uint32_t *word);

#endif
