/* option.h - the command line of every program: a table of options, from which come the reading,
   the ranges, the defaults, --help, --version and what is said of mistakes. Twin: option.c. Where
   else a value may come from (a file, the environment, a checkpoint) is config.h's.

   An option takes its value as the next word or behind "="; given twice, the last one counts, and
   that is said. Words behind "--" are no options. A next word that begins with "--" is no value:
   --prompt=--x is. */
#ifndef OPTION_H
#define OPTION_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

#define OPTION_BYTES 1024

typedef enum option_kind {
    OPTION_INTEGER, /* int64_t */
    OPTION_NUMBER,  /* double */
    OPTION_SWITCH,  /* int64_t, 0 or 1; "--x", "--no-x" or "--x=no" */
    OPTION_LAYERS,  /* int64_t, see option_layers_of; a switch that can say more */
    OPTION_WORD,    /* int64_t, the place of the word in `words` */
    OPTION_PATTERN, /* char[OPTION_BYTES], some of `words` with commas between them */
    OPTION_STRING,  /* char[OPTION_BYTES] */
    OPTION_TEXT,    /* const char *, which lives as long as argv */
    OPTION_LIST     /* option_list: one more text each time that it is given */
} option_kind;

enum { OPTION_LIST_MOST = 32 };

typedef struct option_list {
    const char *at[OPTION_LIST_MOST];
    int count;
} option_list;

/* OPTION_LAYERS: none, all, all in part, or first .. last. */
enum { OPTION_LAYERS_NONE, OPTION_LAYERS_ALL, OPTION_LAYERS_SELECTIVE, OPTION_LAYERS_RANGE };

typedef struct option_layers {
    int kind, first, last;
} option_layers;

option_layers option_layers_of(int64_t value);

enum {
    OPTION_ABOVE_MIN = 1,      /* min itself is not allowed */
    OPTION_OPTIONAL_VALUE = 2, /* the flag alone means `words` */
    OPTION_NOT_IN_FILE =
        4 /* of one launch: `key` is no name of a file's. 8 and up: the table's own */
};

typedef struct option {
    const char
        *key; /* what the value is called in files: "section.name"; NULL: it has no such name */
    option_kind kind;
    size_t offset; /* of the value, in the program's struct */
    double min, max;
    const char *words;   /* OPTION_WORD: "cosine|constant"; of texts, what help calls one: "FILE" */
    const char *initial; /* the default, as it would be written; NULL: `help` tells */
    const char *flag;    /* "--seq-len", or NULL */
    const char *environment;
    int traits;
    const char *help;
} option;

typedef struct option_command {
    const char *name, *summary; /* "generate", and lines of at most 100 columns for --help */
    const char *notes;          /* NULL, or further lines, behind those on options */
    const char *words;          /* what is given beside options: "FOLDER TEXT...", or "" */
    const option *rows;
    size_t count;
    const char *alias[2]; /* an old name and the flag that it means, or NULL */
    /* NULL, or the option that a stray word is most likely meant for, or NULL */
    const char *(*meant)(const char *word);
    const listener *hears; /* NULL, or who is told of an option that is given twice */
} option_command;

typedef enum option_outcome {
    OPTION_OK,
    OPTION_HELP, /* --help or --version was printed: exit 0 */
    OPTION_ERROR /* the fault says why: exit 2 */
} option_outcome;

/* What is done with one option: `flag` is what was given, up to its "=" or end. */
typedef bool option_take(void *to, const option *row, const char *flag, const char *value,
                         fault *f);

/* Reads a command line; `take` gets each option in its turn. The other words lie in `words`, a NULL
   behind them: room for one more than command->words names, or for argc where it ends in "...". */
option_outcome option_parse(const option_command *command, int argc, char **argv, option_take *take,
                            void *to, const char **words, fault *f);

/* The same for a program whose options are all its own: defaults, then the command line, in
   `values`; its notes go to stderr. */
option_outcome option_read(const option_command *command, int argc, char **argv, void *values,
                           const char **words, fault *f);

/* The row of a flag, which may go on with "="; NULL: there is none. */
const option *option_find(const option_command *command, const char *flag);

/* Stores the defaults of a table. */
void option_defaults(const option *rows, size_t count, void *values);

/* Stores a value written as text; on failure the message is what is allowed, without a place. */
bool option_set(void *values, const option *row, const char *text, fault *f);

/* An integer among the other words of a command line; `what` is its name there. */
bool option_integer(const char *what, const char *text, int64_t min, int64_t max, int64_t *to,
                    fault *f);

/* "must be an integer in 1 .. 65536", "must be one of: cosine, constant" */
void option_allowed(const option *row, char *text, size_t bytes);

/* The value in force, as it would be written in a file. */
void option_value(const void *values, const option *row, char *text, size_t bytes);

/* The row whose name is nearest to `name`, or NULL if none is near. */
typedef const char *option_name(const option *row);
const option *option_nearest(const option *rows, size_t count, const char *name,
                             option_name *name_of);

#endif
