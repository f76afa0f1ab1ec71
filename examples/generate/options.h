/* options.h - generate's command line. Twin: options.c. What both trainers know too keeps its name,
   range and messages: those are config.h's. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "checkpoint/checkpoint.h"

typedef struct options {
    const char *checkpoint;  /* a checkpoint, or a run's folder */
    const char *prompt_file; /* NULL: the prompt is settings.sample.prompt; "-": standard input */
    long chunk;              /* tokens of the prompt at a time */
    long context; /* tokens of prompt and text together; 0: what the model was trained for */
    bool bench;
} options;

/* Reads the command line: once before the checkpoint is open, with c NULL, then again into its
   settings. CONFIG_HELP: --help was printed. */
config_outcome options_read(options *o, config *c, int argc, char **argv, fault *f);

#endif
