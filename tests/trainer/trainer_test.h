/* trainer_test.h - what the trainers' tests share: a folder of their own, files in it, what was
   said, faults that must name their cause. Twin: none. Counting is check.h's. */
#ifndef TRAINER_TEST_H
#define TRAINER_TEST_H

#include <dirent.h>
#include <stdbool.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fault.h"
#include "harness/check.h"

static char test_root[512];   /* the folder, removed by test_end */
static char test_said[65536]; /* all lines that went to test_notes() */

/* "test_root/name", which stays. */
static inline const char *test_path(const char *name) {
    static char *paths[4096];
    char path[1024];
    int i = 0;
    snprintf(path, sizeof path, "%s/%s", test_root, name);
    while (paths[i] && strcmp(paths[i], path)) i++;
    if (!paths[i]) paths[i] = strdup(path);
    return paths[i];
}

static inline void test_begin(void) {
    const char *where = getenv("TMPDIR");
    snprintf(test_root, sizeof test_root, "%s/nsa-test-XXXXXX", where ? where : "/tmp");
    if (mkdtemp(test_root)) return;
    printf("cannot make a folder in %s\n", where ? where : "/tmp");
    exit(1);
}

static inline void test_remove(const char *folder) {
    char path[2048];
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));) {
        struct stat s;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (snprintf(path, sizeof path, "%s/%s", folder, e->d_name) >= (int)sizeof path) continue;
        if (!lstat(path, &s) && S_ISDIR(s.st_mode))
            test_remove(path);
        else
            unlink(path);
    }
    if (d) closedir(d);
    rmdir(folder);
}

static inline int test_end(const char *program) {
    test_remove(test_root);
    return check_done(program);
}

static inline void test_write(const char *path, const void *bytes, size_t count) {
    unlink(path); /* some file systems flush a file that is overwritten */
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, count, file) == count, "cannot write %s", path);
    if (file) fclose(file);
}

static inline void test_write_text(const char *path, const char *text) {
    test_write(path, text, strlen(text));
}

static inline void test_mkdir(const char *name) {
    CHECK(!mkdir(test_path(name), 0777), "cannot make %s", name);
}

/* The whole file, to be freed, with a zero byte behind it. */
static inline char *test_read(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    char *text = calloc(1, 1 << 22);
    *bytes = 0;
    if (file && text) *bytes = fread(text, 1, (1 << 22) - 1, file);
    if (file) fclose(file);
    return text;
}

static void test_listen(void *user, const char *line) {
    (void)user;
    strncat(test_said, line, sizeof test_said - strlen(test_said) - 1);
    strncat(test_said, "\n", sizeof test_said - strlen(test_said) - 1);
}

static inline listener test_notes(void) {
    listener l = {test_listen, NULL};
    test_said[0] = 0;
    return l;
}

/* A call must have failed, and its message must hold each of the words, which '&' separates. */
static inline void test_fault(const char *file, int line, bool ok, const fault *f,
                              const char *words) {
    char word[512];
    if (!check_that(!ok, file, line, "succeeded; a fault with \"%s\" was due", words)) return;
    while (*words) {
        size_t length = strcspn(words, "&");
        snprintf(word, sizeof word, "%.*s", (int)length, words);
        check_that(strstr(f->text, word) != NULL, file, line, "\"%s\" lacks \"%s\"", f->text, word);
        words += length + (words[length] == '&');
    }
}

#define TEST_FAULT(ok, f, words) test_fault(__FILE__, __LINE__, ok, f, words)

#endif
