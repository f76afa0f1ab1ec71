/* files.h - a scratch folder for the harnesses that fuzz file parsers. Twin: none. Not here: the
   files. */
#ifndef NSA_TESTS_FUZZ_FILES_H
#define NSA_TESTS_FUZZ_FILES_H

#include "fuzz.h"

#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Made once, in memory where the machine has a folder that is; removed when the process ends. */
static char fuzz_folder[256];
static char fuzz_names[8][512];
static int fuzz_name_count;

static void fuzz_remove(void) {
    for (int i = 0; i < fuzz_name_count; i++) unlink(fuzz_names[i]);
    rmdir(fuzz_folder);
}

/* "folder/name", to be removed in the end. */
static inline const char *fuzz_path(const char *name) {
    char path[512];
    if (!fuzz_folder[0]) {
        const char *where = getenv("TMPDIR");
        if (!where) where = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
        snprintf(fuzz_folder, sizeof fuzz_folder, "%.200s/nsa-fuzz-XXXXXX", where);
        FUZZ_ASSERT(mkdtemp(fuzz_folder), "cannot make a folder in %s", where);
        atexit(fuzz_remove);
    }
    snprintf(path, sizeof path, "%s/%.100s", fuzz_folder, name);
    for (int i = 0; i < fuzz_name_count; i++)
        if (!strcmp(fuzz_names[i], path)) return fuzz_names[i];
    FUZZ_ASSERT(fuzz_name_count < 8, "too many files");
    return strcpy(fuzz_names[fuzz_name_count++], path);
}

static inline const char *fuzz_write(const char *name, const void *bytes, size_t count) {
    const char *path = fuzz_path(name);
    FILE *file = fopen(path, "wb");
    FUZZ_ASSERT(file && fwrite(bytes, 1, count, file) == count && !fclose(file), "%s", path);
    return path;
}

#endif
