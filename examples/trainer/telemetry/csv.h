/* csv.h - a CSV that grows by a row at a time and survives a resume: rows after its step are cut
   off. Twin: csv.c. Values are numbers; the first column is the step. */
#ifndef CSV_H
#define CSV_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

enum { CSV_COLUMNS = 16, CSV_OWED = 2048 }; /* columns at most; bytes of rows that wait */

/* What a step may be: a double has it to the digit, and the sum of some is an int64_t. */
#define CSV_STEP_MOST 1e15

typedef struct csv {
    bool on; /* false: switched off, rows go nowhere */
    int fd;
    int64_t bytes; /* of whole rows in the file */
    char owed[CSV_OWED];
    size_t owed_bytes; /* of rows that could not be written yet */
    char path[1280];
} csv;

/* A new file where `last_step` is negative; else one whose rows up to that step stay. */
bool csv_open(csv *c, const char *folder, const char *name, const char *header, int64_t last_step,
              fault *f);
void csv_close(csv *c);

/* All rows are on the disk, those that a full one did not take among them: what a checkpoint will
   go on from. */
bool csv_sync(csv *c, fault *f);

/* Whether the file still has its name: nobody has renamed or removed it, or a folder above it. */
bool csv_in_place(const csv *c);

/* Gives each row's numbers, the step first (0 .. CSV_STEP_MOST), to `row`; where there is no such
   file, none. Lines with fewer than `columns` numbers are passed over: the number of the first of
   them but the header, 0 where there is none; -1: a fault. */
int64_t csv_read(const char *folder, const char *name, int columns,
                 void (*row)(void *user, const double *values), void *user, fault *f);

/* The row is in the file, not only in memory, when this returns. False: it is owed, and no step may
   be saved before csv_sync has written it. */
bool csv_row(csv *c, int64_t step, const double *values, int count, fault *f);

#endif
