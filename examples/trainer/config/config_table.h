/* config_table.h - the table of settings, shared by the files that read, check and print it.
   Twin: config_table.c. Programs include config.h, not this. */
#ifndef CONFIG_TABLE_H
#define CONFIG_TABLE_H

#include <stddef.h>

#include "config/config.h"

typedef enum config_kind {
    CONFIG_INTEGER, /* int64_t */
    CONFIG_NUMBER,  /* double */
    CONFIG_SWITCH,  /* int64_t, 0 or 1 */
    CONFIG_LAYERS,  /* int64_t, see config_gc_of; a switch that can say more */
    CONFIG_WORD,    /* int64_t, the place of the word in `words` */
    CONFIG_PATTERN, /* char[CONFIG_PATH_BYTES], some of `words` with commas between them */
    CONFIG_STRING   /* char[CONFIG_PATH_BYTES] */
} config_kind;

enum {
    CONFIG_NOT_IN_FILE = 1,       /* of one launch: refused in a config file */
    CONFIG_NOT_SAVED = 2,         /* says nothing about the model or the data of a checkpoint */
    CONFIG_ABOVE_MIN = 4,         /* min itself is not allowed */
    CONFIG_OPTIONAL_ARGUMENT = 8, /* the flag alone means `words` */
    CONFIG_NO_EFFECT = 16,        /* accepted for old files and commands */
    CONFIG_NEGATED = 32           /* its variable, where true, means false; else nothing */
};

typedef struct config_entry {
    const char *key; /* "section.name" */
    config_kind kind;
    size_t offset; /* in config */
    double min, max;
    const char *words;   /* CONFIG_WORD: "cosine|constant" */
    const char *initial; /* the default, as it would be written */
    const char *flag;    /* "--seq-len", or NULL */
    const char *environment;
    int traits;
    const char *help;
} config_entry;

extern const config_entry config_entries[];
extern const size_t config_entry_count;

const config_entry *config_find(const char *key); /* NULL: there is none */

/* Stores a value written as text; on failure the message is what is allowed, without a place. */
bool config_set(config *c, const config_entry *e, const char *text, fault *f);

/* "must be an integer in 1 .. 65536", "must be one of: cosine, constant" */
void config_allowed(const config_entry *e, char *text, size_t bytes);

/* The value in force, as it would be written in a file. */
void config_value(const config *c, const config_entry *e, char *text, size_t bytes);

/* "configs/x.yaml:12", "environment", "command line", "default" */
void config_place(const config *c, const config_entry *e, char *text, size_t bytes);

/* The entry whose key, flag or environment name is nearest to `name`, or NULL if none is near. */
typedef const char *(*config_name_of)(const config_entry *e);
const config_entry *config_nearest(const char *name, config_name_of name_of);

/* Whether a key of a file, or a variable, is one of nsa-vibe's: *instead becomes what replaces it,
   NULL where it chose a fast path, of which there are none here. */
bool config_other_key(const char *key, const char **instead);
bool config_other_variable(const char *name, const char **instead);

/* What was given has no effect beside the other settings: refused where it was typed, else said. */
bool config_check_effects(const config *c, const listener *notes, fault *f);

bool config_read_yaml(config *c, const char *path, const listener *notes, fault *f);
void config_print_help(const config_program *program);

#endif
