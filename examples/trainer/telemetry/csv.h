/* csv.h - a CSV that grows by a row at a time and survives a resume: rows after its step are cut
   off. Twin: csv.c. Values are numbers; the first column is the step. */
#ifndef CSV_H
#define CSV_H

#include <stdint.h>
#include <stdio.h>

#include "base/fault.h"

typedef struct csv {
    FILE *file; /* NULL: switched off, rows go nowhere */
    char path[1280];
} csv;

/* A new file where `last_step` is negative; else one whose rows up to that step stay. */
bool csv_open(csv *c, const char *folder, const char *name, const char *header, int64_t last_step,
              fault *f);
void csv_close(csv *c);

/* All rows are on the disk: what a checkpoint will go on from. */
bool csv_sync(csv *c, fault *f);

/* Gives each row's numbers, the step first, to `row`; where there is no such file, none. Lines with
   fewer than `columns` numbers, the header among them, are passed over. */
enum { CSV_COLUMNS = 16 }; /* at most */
bool csv_read(const char *folder, const char *name, int columns,
              void (*row)(void *user, const double *values), void *user, fault *f);

/* The row is in the file, not only in memory, when this returns. */
bool csv_row(csv *c, int64_t step, const double *values, int count, fault *f);

#endif
