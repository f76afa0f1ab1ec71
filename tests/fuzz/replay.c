/* replay.c - runs a harness over kept inputs, with any compiler. Twin: fuzz.h. Not a fuzzer: it
   makes no inputs up.

   replay FILE|FOLDER... gives each file, and each file of each folder, to the harness. A folder
   without files is a failure: a corpus that went missing is not a corpus that passes. */
#include "fuzz.h"

#include <dirent.h>
#include <string.h>
#include <sys/stat.h>

static int replay_file(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) return perror(path), 0;
    long size = ftell(file);
    rewind(file);
    uint8_t *data = size < 0 ? NULL : malloc(size ? (size_t)size : 1); /* exact, for sanitizers */
    int ok = data && fread(data, 1, (size_t)size, file) == (size_t)size;
    fclose(file);
    if (ok)
        LLVMFuzzerTestOneInput(data, (size_t)size);
    else
        fprintf(stderr, "%s: cannot be read\n", path);
    free(data);
    return ok;
}

/* The number of files replayed, or -1. */
static int replay(const char *path) {
    struct stat s;
    char name[4096];
    int files = 0;
    if (stat(path, &s)) return perror(path), -1;
    if (!S_ISDIR(s.st_mode)) return replay_file(path) ? 1 : -1;
    DIR *folder = opendir(path);
    if (!folder) return perror(path), -1;
    for (struct dirent *e; files >= 0 && (e = readdir(folder));) {
        if (e->d_name[0] == '.') continue;
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        files = replay_file(name) ? files + 1 : -1;
    }
    closedir(folder);
    return files;
}

int main(int argc, char **argv) {
    int failures = argc < 2;
    for (int i = 1; i < argc; i++) {
        int files = replay(argv[i]);
        printf("%s: %d inputs\n", argv[i], files);
        failures += files <= 0;
    }
    return failures;
}
