/* disk_fault.c - loaded before a program (LD_PRELOAD): kills it at the KILL_AT-th call that changes
   a file or a folder, before the call is done; or lets a disk be full once, when the FULL_AT-th
   write goes to a file whose path ends with FULL_NAME, of which half is written; or, with NO_LINKS,
   is a disk that has no links; or lets the first open of LATE_NAME be so late that its folder,
   which has been looked up, holds none of that name any more. Twins: test_going_back.py,
   test_shards.py. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static int number_of(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

static int has_links(void) {
    errno = EPERM;
    return !getenv("NO_LINKS");
}

static void count(void) {
    static int calls; /* atomic: several threads write */
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == number_of("KILL_AT")) raise(SIGKILL);
}

int rename(const char *from, const char *to) {
    count();
    return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int link(const char *from, const char *to) {
    count();
    if (!has_links()) return -1;
    return (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int symlink(const char *target, const char *path) {
    count();
    if (!has_links()) return -1;
    return (int)syscall(SYS_symlinkat, target, AT_FDCWD, path);
}

int unlink(const char *path) {
    count();
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}

int ftruncate(int fd, off_t bytes) {
    count();
    return (int)syscall(SYS_ftruncate, fd, bytes);
}

static int is_full(int fd) {
    static int writes;
    char link[64], path[4096];
    const char *name = getenv("FULL_NAME");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = name ? readlink(link, path, sizeof path - 1) : -1;
    if (n < 0 || (size_t)n < strlen(name)) return 0;
    path[n] = 0;
    return !strcmp(path + n - strlen(name), name) &&
           __atomic_add_fetch(&writes, 1, __ATOMIC_RELAXED) == number_of("FULL_AT");
}

ssize_t write(int fd, const void *from, size_t bytes) {
    static __thread int cut; /* the rest of a write that was cut is what fails: of this thread's,
                                not of a line that another prints meanwhile */
    count();
    if (cut) {
        cut = 0;
        errno = ENOSPC;
        return -1;
    }
    if (is_full(fd)) {
        cut = 1;
        return syscall(SYS_write, fd, from, bytes / 2);
    }
    return syscall(SYS_write, fd, from, bytes);
}

/* Stands for a kernel that is held up between the two halves of an open that makes its file. */
int openat(int folder, const char *name, int flags, ...) {
    static int opened;
    const char *late = getenv("LATE_NAME");
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (late && !strcmp(name, late) && !opened++)
        while (!syscall(SYS_faccessat, folder, late, F_OK)) usleep(1000);
    return (int)syscall(SYS_openat, folder, name, flags, mode);
}
