/* options.h - generate's command line. Twin: options.c. What both trainers know too keeps its name,
   range and messages: those are config.h's. */
#ifndef OPTIONS_H
#define OPTIONS_H

#include "checkpoint/checkpoint.h"

typedef struct options {
    const char *checkpoint;  /* a checkpoint, or a run's folder */
    const char *prompt_file; /* NULL: the prompt is settings.sample.prompt; "-": standard input */
    int64_t chunk;           /* tokens of the prompt at a time */
    int64_t context; /* tokens of prompt and text together; 0: what the model was trained for */
    int64_t bench;
    int64_t ignore_end; /* go on behind the end of a text */
    option_list stops;  /* texts that end it */
    config settings;    /* what was given of the trainers' settings, for config_take */
} options;

option_outcome options_read(options *o, int argc, char **argv, fault *f);

#endif
