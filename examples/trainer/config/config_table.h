/* config_table.h - the table of settings, shared by the files that read, check and print it.
   Twin: config_table.c. Programs include config.h, not this. */
#ifndef CONFIG_TABLE_H
#define CONFIG_TABLE_H

#include "config/config.h"

/* Traits beside option.h's. */
enum {
    CONFIG_NOT_SAVED = 8,  /* says nothing about the model or the data of a checkpoint */
    CONFIG_NO_EFFECT = 16, /* accepted for old files and commands */
    CONFIG_NEGATED = 32    /* its variable, where true, means false; else nothing */
};

extern const option config_entries[];
extern const size_t config_entry_count;

const option *config_find(const char *key); /* NULL: there is none */

/* "configs/x.yaml:12", "environment", "command line", "default" */
void config_place(const config *c, const option *e, char *text, size_t bytes);

/* Whether a key of a file, or a variable, is one of nsa-vibe's: *instead becomes what replaces it,
   NULL where it chose a fast path, of which there are none here. */
bool config_other_key(const char *key, const char **instead);
bool config_other_variable(const char *name, const char **instead);

bool config_read_yaml(config *c, const char *path, const listener *notes, fault *f);

#endif
