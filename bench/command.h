/* command.h: the command line of the programs of this folder, read by the table that every program
   of the project has (examples/trainer/base/option.h). Who cannot go on ends here. No test. */
#ifndef BENCH_COMMAND_H
#define BENCH_COMMAND_H

#include "problem.h" /* before option.h, whose names the parameters of nsa.h would shadow */

#include "base/option.h"
#include <errno.h>

static inline void command_read(const option_command *command, int argc, char **argv,
                                void *values) {
    fault f;
    option_outcome outcome = option_read(command, argc, argv, values, NULL, &f);
    if (outcome == OPTION_OK) return;
    if (outcome == OPTION_ERROR) fprintf(stderr, "%s: %s\n", command->name, f.text);
    exit(outcome == OPTION_ERROR ? 2 : 0);
}

/* The shapes that --shape named. */
static inline int command_shapes(const char *program, const option_list *texts, shape *shapes) {
    for (int i = 0; i < texts->count; i++) {
        if (parse_shape(&shapes[i], texts->at[i])) continue;
        fprintf(stderr,
                "%s: --shape %s: must be H,Hk,D,T or H,Hk,Dk/Dv,T: Hk divides H, widths are in "
                "1 .. 576\n",
                program, texts->at[i]);
        exit(2);
    }
    return texts->count;
}

/* The file of --json, or NULL where none was asked for. */
static inline FILE *command_json(const char *program, const char *path) {
    FILE *json = path ? fopen(path, "w") : NULL;
    if (!path || json) return json;
    fprintf(stderr, "%s: cannot write %s: %s\n", program, path, strerror(errno));
    exit(1);
}

#endif
