/* sync_log.c - loaded before a program (LD_PRELOAD), writes a line into the file that SYNC_LOG
   names for each file that is flushed to the disk, with its length, and for each that is renamed.
   Twin: test_sync.py, which reads it. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void log_line(const char *what, const char *path, long long bytes) {
    char line[8192];
    const char *to = getenv("SYNC_LOG");
    int file = to ? open(to, O_WRONLY | O_APPEND | O_CREAT, 0666) : -1;
    if (file < 0) return;
    int n = snprintf(line, sizeof line, "%s %lld %s\n", what, bytes, path);
    if (write(file, line, (size_t)n) != n) abort();
    close(file);
}

static void log_flush(int fd) {
    char link[64], path[4096];
    struct stat s;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0 || fstat(fd, &s)) return;
    path[n] = 0;
    log_line("flush", path, (long long)s.st_size);
}

int fsync(int fd) {
    int done = (int)syscall(SYS_fsync, fd);
    if (!done) log_flush(fd);
    return done;
}

int fdatasync(int fd) {
    int done = (int)syscall(SYS_fdatasync, fd);
    if (!done) log_flush(fd);
    return done;
}

int rename(const char *from, const char *to) {
    int done = (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
    if (!done) log_line("rename", to, 0);
    return done;
}
