/* files.h - the few operations on files that must not lose data: whole reads with a limit, writes
   that end up complete or not at all, folders. Twin: files.c. Not a general file layer. */
#ifndef FILES_H
#define FILES_H

#include <stddef.h>
#include <stdint.h>

#include "base/fault.h"

/* A descriptor to read a plain file from; -1: unreadable, or a pipe, a device, a folder. */
int files_open(const char *path, fault *f);

/* A descriptor to append to a plain file, which is made where it is not there; -1: what bears the
   name is something else, or a link: it may lead anywhere. */
int files_open_end(const char *path, fault *f);

/* A descriptor to write a new file; what bore the name is removed, of a link the link. */
int files_open_anew(const char *path, fault *f);

/* The whole file, with a zero byte behind it, to be freed; NULL: unreadable or above `most` bytes.
 */
char *files_read(const char *path, size_t most, size_t *bytes, fault *f);

/* The same, where "-" is standard input, to its end. */
char *files_read_input(const char *path, size_t most, size_t *bytes, fault *f);

/* Exactly `bytes` bytes at `offset`; a file that ends before is a fault. */
bool files_read_at(int fd, const char *path, void *to, size_t bytes, int64_t offset, fault *f);

/* All of it, however many writes that takes. */
bool files_write_all(int fd, const char *path, const void *from, size_t bytes, fault *f);

/* Writes beside `path`, flushes, and renames onto it: a reader sees the old file or the new one. */
bool files_replace(const char *path, const void *from, size_t bytes, fault *f);

/* A file whose name the user gave, while it is written: beside `path`, so that an older file of
   that name stays until the new one is whole, and where it cannot be written for good. A link is
   followed. A device, a pipe, or a file in a folder that lets nobody add one, is written as it
   lies. */
typedef struct files_draft {
    int fd;
    bool in_place, replaces;
    const char *given; /* the name that messages have */
    char path[4096], aside[4096 + 32];
} files_draft;

bool files_draft_open(files_draft *d, const char *path, fault *f);

/* Flushes it and puts it in place; with `ok` false, takes it back and leaves the fault as it is. */
bool files_draft_close(files_draft *d, bool ok, fault *f);

/* Adds a line, of which a killed process leaves all or a part that the next call ends; flushed. */
bool files_append_line(const char *path, const char *line, fault *f);

/* Whether a file of that name can be made or written anew: asked before the work, not after it. */
bool files_may_write(const char *path, fault *f);

/* The same of a folder, with those above it. */
bool files_may_make_folder(const char *path, fault *f);

/* Removes what was written half way, but never a device or a link that somebody named. */
void files_remove_partial(const char *path);

/* First in main: where a program is started without standard input, output or errors, the next
   files that it opens would take their places, and get its lines. */
void files_claim_standard(void);

/* Holds the file `name` of a folder for this process, until the descriptor is closed; -1: another
   has it. A file system without locks gives it to everybody. */
int files_lock(const char *folder, const char *name, fault *f);

/* A folder of work that gets its name, or whose files get theirs, once all of it is there: made, or
   emptied of what a call that was killed has left, and held as by files_lock with FILES_CLAIM,
   which lies in it; -1: another has it. */
#define FILES_CLAIM ".lock"
int files_claim_folder(const char *path, fault *f);

/* Removes the folder that is held, unless it has another name by now, and lets it go. */
void files_remove_claimed(const char *path, int held);

/* Cuts off what follows the last newline, reading no more than the end. */
bool files_drop_partial_line(const char *path, fault *f);

/* What was printed on the standard output has got there: a full disk or a closed one is a fault. */
bool files_end_output(fault *f);

/* Makes the folder and those above it. */
bool files_make_folder(const char *path, fault *f);

/* Flushes a folder's list of names to the disk. */
bool files_sync_folder(const char *path, fault *f);

/* Removes a folder and the files in it; a folder inside is a fault. Absent is no fault. Of a link,
   the link goes and what it points at stays. */
bool files_remove_folder(const char *path, fault *f);

bool files_exist(const char *path);

/* False, with its fault: `head` is what a clone without Git LFS has where the file would be. */
bool files_check_fetched(const char *path, const char *head, size_t bytes, fault *f);

/* Whether two paths lead to one file or folder that is there. */
bool files_same(const char *a, const char *b);

/* The first name for what is there that is free: PATH.left, PATH.left2 ... */
bool files_spare(const char *path, char *to, size_t bytes, fault *f);

/* Whether a name that somebody wrote into a file may be joined to a folder: it stays in there, is
   not hidden, and steers no terminal. */
bool files_plain_name(const char *name);

/* "folder/name" in `path`; a path that does not fit is a fault. */
bool files_join(char *path, size_t bytes, const char *folder, const char *name, fault *f);

/* The plain files in a folder and in those below it, "a.txt", "sub/b.txt", sorted by bytes; names
   that start with a dot are passed over, folders too, and so are folders of runs, links to folders
   and what is no plain file. Folders more than 64 deep are a fault. */
typedef struct files_list {
    char **names;
    size_t count;
    char **passed; /* "sub/link (a link to a folder)", sorted */
    size_t passed_count;
} files_list;

bool files_list_open(files_list *list, const char *folder, fault *f);
void files_list_close(files_list *list);

#endif
