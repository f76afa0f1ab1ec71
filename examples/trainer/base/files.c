/* files.c - see files.h. */
#include "base/files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/text.h"

/* A path has at most PATH_ROOM bytes, and each level of a listing two of them on the stack. */
enum { PATH_ROOM = 4096, LEVELS = 64, NAME_MOST = 255 };

/* A named pipe would make a plain open wait for its writer, for ever. */
int files_open(const char *path, fault *f) {
    struct stat s;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        fault_errno(f, "%s: cannot open", path);
        return -1;
    }
    if (!fstat(fd, &s) && S_ISREG(s.st_mode)) return fd;
    close(fd);
    fault_set(f, "%s: must be a plain file", path);
    return -1;
}

/* The file `name` of the open folder, of which a message says `path`. */
static int open_end_at(int folder, const char *name, const char *path, fault *f) {
    struct stat s;
    int flags = O_RDWR | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    int fd = openat(folder, name, flags, 0666);
    if (fd >= 0 && !fstat(fd, &s) && S_ISREG(s.st_mode)) return fd;
    if (fd >= 0 || errno == ELOOP || errno == ENXIO)
        fault_set(f, "%s: must be a plain file, and no link to one", path);
    else
        fault_errno(f, "%s: cannot open", path);
    if (fd >= 0) close(fd);
    return -1;
}

int files_open_end(const char *path, fault *f) {
    return open_end_at(AT_FDCWD, path, path, f);
}

int files_open_anew(const char *path, fault *f) {
    unlink(path);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) fault_errno(f, "%s: cannot create", path);
    return fd;
}

/* Of a pipe too that another program made non-blocking. */
static ssize_t read_some(int fd, char *to, size_t bytes) {
    struct pollfd empty = {.fd = fd, .events = POLLIN};
    for (;;) {
        ssize_t got = read(fd, to, bytes);
        if (got >= 0 || (errno != EINTR && errno != EAGAIN)) return got;
        if (errno == EAGAIN) (void)poll(&empty, 1, -1);
    }
}

/* Takes over fd. */
static char *read_all(int fd, const char *path, size_t most, size_t *bytes, fault *f) {
    size_t room = 65536, used = 0;
    ssize_t got = 1;
    char *text = malloc(room + 1);
    while (text && used <= most && (got = read_some(fd, text + used, room - used)) > 0) {
        used += (size_t)got;
        if (used < room) continue;
        char *more = realloc(text, room * 2 + 1);
        if (!more) free(text);
        text = more;
        room *= 2;
    }
    if (!text)
        fault_set(f, "%s: out of memory", path);
    else if (got < 0)
        fault_errno(f, "%s: cannot read", path);
    else if (used > most)
        fault_set(f, "%s: longer than the %zu bytes that are allowed", path, most);
    bool ok = text && got >= 0 && used <= most;
    close(fd);
    if (!ok) {
        free(text);
        return NULL;
    }
    text[used] = 0;
    *bytes = used;
    return text;
}

char *files_read(const char *path, size_t most, size_t *bytes, fault *f) {
    int fd = files_open(path, f);
    return fd < 0 ? NULL : read_all(fd, path, most, bytes, f);
}

char *files_read_input(const char *path, size_t most, size_t *bytes, fault *f) {
    if (strcmp(path, "-")) return files_read(path, most, bytes, f);
    int fd = dup(STDIN_FILENO);
    if (fd >= 0) return read_all(fd, "standard input", most, bytes, f);
    fault_errno(f, "standard input: cannot read");
    return NULL;
}

static bool ends_early(int fd, const char *path, int64_t offset, size_t bytes, fault *f) {
    struct stat s;
    long long size = fstat(fd, &s) ? -1 : (long long)s.st_size;
    return fault_set(f, "%s: %zu bytes were expected at byte %lld; the file has %lld", path, bytes,
                     (long long)offset, size);
}

bool files_read_at(int fd, const char *path, void *to, size_t bytes, int64_t offset, fault *f) {
    char *at = to;
    while (bytes) {
        ssize_t got = pread(fd, at, bytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fault_errno(f, "%s: cannot read at byte %lld", path, (long long)offset);
        if (!got) return ends_early(fd, path, offset, bytes, f);
        at += got;
        offset += got;
        bytes -= (size_t)got;
    }
    return true;
}

bool files_write_all(int fd, const char *path, const void *from, size_t bytes, fault *f) {
    const char *at = from;
    while (bytes) {
        ssize_t put = write(fd, at, bytes);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0 && errno == EAGAIN) { /* a pipe that another program made so, and full */
            struct pollfd full = {.fd = fd, .events = POLLOUT};
            (void)poll(&full, 1, -1);
            continue;
        }
        if (put < 0) return fault_errno(f, "%s: cannot write", path);
        at += put;
        bytes -= (size_t)put;
    }
    return true;
}

/* The folder that a path lies in. */
static void folder_of(char *folder, size_t bytes, const char *path) {
    const char *slash = strrchr(path, '/');
    if (!slash)
        snprintf(folder, bytes, ".");
    else
        snprintf(folder, bytes, "%.*s", slash == path ? 1 : (int)(slash - path), path);
}

bool files_replace(const char *path, const void *from, size_t bytes, fault *f) {
    char aside[PATH_ROOM], folder[PATH_ROOM];
    if (snprintf(aside, sizeof aside, "%s.%ld.tmp", path, (long)getpid()) >= PATH_ROOM)
        return fault_set(f, "%.200s...: the path is too long", path);
    int fd = files_open_anew(aside, f); /* a killed process of that number may have left it */
    bool ok = fd >= 0 && files_write_all(fd, path, from, bytes, f);
    if (ok && fsync(fd)) ok = fault_errno(f, "%s: cannot flush", path);
    if (fd >= 0 && close(fd) && ok) ok = fault_errno(f, "%s: cannot close", path);
    if (ok && rename(aside, path)) ok = fault_errno(f, "%s: cannot put in place", path);
    if (!ok) {
        unlink(aside);
        return false;
    }
    folder_of(folder, sizeof folder, path);
    return files_sync_folder(folder, f);
}

/* Where the file is or will be, and whether there is no other way than to write it as it lies. */
static bool find_draft(files_draft *d, const char *path, struct stat *s, fault *f) {
    char folder[PATH_ROOM], real[PATH_MAX];
    bool named = files_exist(path), there = !stat(path, s);
    const char *at = there && realpath(path, real) ? real : path;
    if (strlen(at) >= sizeof d->path) return fault_set(f, "%.200s...: the path is too long", path);
    memcpy(d->path, at, strlen(at) + 1);
    folder_of(folder, sizeof folder, d->path);
    d->in_place = named && (!there || !S_ISREG(s->st_mode) || access(folder, W_OK | X_OK));
    d->given = path;
    if (!there) s->st_mode = 0666;
    return true;
}

bool files_draft_open(files_draft *d, const char *path, fault *f) {
    struct stat s;
    if (!find_draft(d, path, &s, f)) return false;
    d->replaces = !d->in_place && files_exist(d->path);
    snprintf(d->aside, sizeof d->aside, "%s.%ld.tmp", d->path, (long)getpid());
    if (!d->in_place) unlink(d->aside); /* a killed process of that number may have left it */
    int flags = O_WRONLY | O_CREAT | O_TRUNC | O_NONBLOCK | O_CLOEXEC;
    d->fd = d->in_place ? open(path, flags, 0666)
                        : open(d->aside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, s.st_mode & 0777);
    if (d->fd < 0 && d->in_place && errno == ENXIO) /* which would be waited for */
        return fault_set(f, "%s: a named pipe that nobody reads", path);
    if (d->fd < 0) return fault_errno(f, "%s: cannot create", path);
    (void)fcntl(d->fd, F_SETFL, 0);
    if (d->replaces) (void)!fchmod(d->fd, s.st_mode & 0777);
    return true;
}

bool files_draft_close(files_draft *d, bool ok, fault *f) {
    char folder[PATH_ROOM];
    fault unused;
    /* A device cannot be flushed and says EINVAL. */
    if (ok && fsync(d->fd) && errno != EINVAL) ok = fault_errno(f, "%s: cannot flush", d->given);
    if (close(d->fd) && ok) ok = fault_errno(f, "%s: cannot close", d->given);
    if (ok && !d->in_place && rename(d->aside, d->path))
        ok = fault_errno(f, "%s: cannot be put in place", d->given);
    if (!ok && d->in_place)
        files_remove_partial(d->given);
    else if (!ok)
        unlink(d->aside);
    folder_of(folder, sizeof folder, d->path);
    if (ok && d->replaces) (void)files_sync_folder(folder, &unused); /* it may be unreadable */
    return ok;
}

bool files_append_line(const char *path, const char *line, fault *f) {
    char last = '\n';
    struct stat s;
    int fd = files_open_end(path, f);
    if (fd < 0) return false;
    bool ok = !fstat(fd, &s) || fault_errno(f, "%s: cannot read", path);
    if (ok && s.st_size) ok = files_read_at(fd, path, &last, 1, s.st_size - 1, f);
    ok = ok && (last == '\n' || files_write_all(fd, path, "\n", 1, f)) &&
         files_write_all(fd, path, line, strlen(line), f) && files_write_all(fd, path, "\n", 1, f);
    if (ok && fsync(fd)) ok = fault_errno(f, "%s: cannot flush", path);
    close(fd);
    return ok;
}

bool files_may_write(const char *path, fault *f) {
    char folder[PATH_ROOM];
    struct stat s;
    if (strlen(path) >= sizeof folder) return fault_set(f, "%.200s...: the path is too long", path);
    folder_of(folder, sizeof folder, path);
    if (stat(folder, &s)) return fault_errno(f, "%s: cannot use the folder", folder);
    if (!S_ISDIR(s.st_mode)) return fault_set(f, "%s: is a file, must be a folder", folder);
    if (!stat(path, &s)) {
        if (S_ISDIR(s.st_mode)) return fault_set(f, "%s: is a folder, must be a file", path);
        return !access(path, W_OK) || fault_errno(f, "%s: cannot write", path);
    }
    return !access(folder, W_OK | X_OK) || fault_errno(f, "%s: cannot write there", folder);
}

bool files_may_make_folder(const char *path, fault *f) {
    char part[PATH_ROOM], above[PATH_ROOM];
    struct stat s;
    if (strlen(path) >= sizeof part) return fault_set(f, "%.200s...: the path is too long", path);
    snprintf(part, sizeof part, "%s", path);
    while (stat(part, &s)) {
        if (errno != ENOENT || !strcmp(part, "."))
            return fault_errno(f, "%s: cannot use the folder", part);
        size_t length = strlen(part);
        while (length > 1 && part[length - 1] == '/') part[--length] = 0;
        folder_of(above, sizeof above, part);
        memcpy(part, above, strlen(above) + 1);
    }
    if (!S_ISDIR(s.st_mode)) return fault_set(f, "%s: is a file, must be a folder", part);
    return !access(part, W_OK | X_OK) || fault_errno(f, "%s: cannot write there", part);
}

void files_remove_partial(const char *path) {
    struct stat s;
    if (!lstat(path, &s) && S_ISREG(s.st_mode)) unlink(path);
}

void files_claim_standard(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", fd ? O_WRONLY : O_RDONLY) != fd) return;
}

/* Takes the descriptor, and gives it back once its file is this process's alone; else -1. */
static int hold(int fd, const char *folder, fault *f) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    if (fd < 0 || !fcntl(fd, F_SETLK, &lock) || (errno != EACCES && errno != EAGAIN)) return fd;
    lock.l_pid = 0;
    (void)fcntl(fd, F_GETLK, &lock);
    fault_set(f, "%s: another run is in this folder (process %ld)", folder, (long)lock.l_pid);
    close(fd);
    return -1;
}

int files_lock(const char *folder, const char *name, fault *f) {
    char path[PATH_ROOM];
    if (!files_join(path, sizeof path, folder, name, f)) return -1;
    return hold(files_open_end(path, f), folder, f);
}

/* The place behind the last newline of the first `size` bytes; -1: unreadable. */
static int64_t last_line_end(int fd, const char *path, int64_t size, fault *f) {
    char block[4096];
    while (size > 0) {
        int64_t count = size < (int64_t)sizeof block ? size : (int64_t)sizeof block;
        if (!files_read_at(fd, path, block, (size_t)count, size - count, f)) return -1;
        for (int64_t i = count; i > 0; i--)
            if (block[i - 1] == '\n') return size - count + i;
        size -= count;
    }
    return 0;
}

bool files_drop_partial_line(const char *path, fault *f) {
    struct stat s;
    if (!files_exist(path)) return true;
    int fd = files_open_end(path, f);
    bool ok = fd >= 0 && (!fstat(fd, &s) || fault_errno(f, "%s: cannot read", path));
    int64_t kept = ok ? last_line_end(fd, path, s.st_size, f) : -1;
    if (kept >= 0 && kept < s.st_size && ftruncate(fd, (off_t)kept))
        kept = -1, fault_errno(f, "%s: cannot be cut back", path);
    if (fd >= 0) close(fd);
    return kept >= 0;
}

bool files_end_output(fault *f) {
    bool ok = !fflush(stdout) && !ferror(stdout);
    return ok ? true : fault_errno(f, "standard output: cannot write");
}

bool files_make_folder(const char *path, fault *f) {
    char part[PATH_ROOM];
    struct stat s;
    size_t length = strlen(path);
    if (length >= sizeof part) return fault_set(f, "%.200s...: the path is too long", path);
    for (size_t i = 1; i <= length; i++) {
        if (path[i] && path[i] != '/') continue;
        memcpy(part, path, i);
        part[i] = 0;
        if (mkdir(part, 0777) && errno != EEXIST)
            return fault_errno(f, "%s: cannot make the folder", part);
    }
    if (stat(path, &s)) return fault_errno(f, "%s: cannot use the folder", path);
    if (!S_ISDIR(s.st_mode)) return fault_set(f, "%s: is a file, must be a folder", path);
    return true;
}

bool files_sync_folder(const char *path, fault *f) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fault_errno(f, "%s: cannot open the folder", path);
    /* Some file systems cannot flush a folder and say EINVAL: they need no flush. */
    bool ok = !fsync(fd) || errno == EINVAL || fault_errno(f, "%s: cannot flush the folder", path);
    close(fd);
    return ok;
}

/* Removes what is in an open folder but for `kept`. */
static bool empty_folder(int fd, const char *path, const char *kept, fault *f) {
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = again < 0 ? NULL : fdopendir(again);
    if (!folder) {
        fault_errno(f, "%s: cannot open the folder", path);
        if (again >= 0) close(again);
        return false;
    }
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(folder));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..") || !strcmp(e->d_name, kept))
            continue;
        if (unlinkat(fd, e->d_name, 0))
            ok = fault_errno(f, "%s/%.200s: cannot remove", path, e->d_name);
    }
    closedir(folder);
    return ok;
}

static int open_folder(const char *path) {
    return open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

/* A link is removed itself: what it points at is somebody else's. */
bool files_remove_folder(const char *path, fault *f) {
    struct stat s;
    int fd = open_folder(path);
    if (fd < 0 && errno == ENOENT) return true;
    if (fd < 0 && !lstat(path, &s) && S_ISLNK(s.st_mode))
        return !unlink(path) || fault_errno(f, "%s: cannot remove", path);
    if (fd < 0) return fault_errno(f, "%s: cannot open the folder", path);
    bool ok = empty_folder(fd, path, "", f);
    close(fd);
    if (ok && rmdir(path)) ok = fault_errno(f, "%s: cannot remove", path);
    return ok;
}

static bool is_same(const struct stat *a, const struct stat *b) {
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* The lock that is held is that of the open folder. */
static bool is_lock_of(int folder, int held) {
    struct stat ours, there;
    return !fstat(held, &ours) && !fstatat(folder, FILES_CLAIM, &there, AT_SYMLINK_NOFOLLOW) &&
           is_same(&ours, &there);
}

/* The call that had the folder may have given it another name, or removed it, between our two looks
   at it: a lock that we made is in something whole then, and goes again. */
static bool is_claimed(int folder, const char *path, int held) {
    struct stat ours, there;
    if (!is_lock_of(folder, held)) return false;
    if (!fstat(folder, &ours) && !lstat(path, &there) && is_same(&ours, &there)) return true;
    unlinkat(folder, FILES_CLAIM, 0);
    return false;
}

int files_claim_folder(const char *path, fault *f) {
    if (!files_make_folder(path, f)) return -1;
    int folder = open_folder(path), held = -1;
    if (folder < 0)
        fault_errno(f, "%s: cannot open the folder", path);
    else
        held = hold(open_end_at(folder, FILES_CLAIM, path, f), path, f);
    bool ok = held >= 0 && (is_claimed(folder, path, held) ||
                            fault_set(f, "%s: another run has just ended there", path));
    ok = ok && empty_folder(folder, path, FILES_CLAIM, f);
    if (folder >= 0) close(folder);
    if (held >= 0 && !ok) close(held);
    return ok ? held : -1;
}

/* The lock goes last: whoever finds none begins there. */
void files_remove_claimed(const char *path, int held) {
    fault unused;
    int folder = open_folder(path);
    if (folder >= 0 && is_lock_of(folder, held) &&
        empty_folder(folder, path, FILES_CLAIM, &unused) && !unlinkat(folder, FILES_CLAIM, 0))
        rmdir(path);
    if (folder >= 0) close(folder);
    close(held);
}

bool files_exist(const char *path) {
    struct stat s;
    return !lstat(path, &s);
}

bool files_check_fetched(const char *path, const char *head, size_t bytes, fault *f) {
    static const char pointer[] = "version https://git-lfs.github.com/";
    return bytes < sizeof pointer || strncmp(head, pointer, sizeof pointer - 1) ||
           fault_set(f,
                     "%.700s: a pointer of Git LFS, not the data themselves: fetch them (git lfs "
                     "pull)",
                     path);
}

bool files_same(const char *a, const char *b) {
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

bool files_spare(const char *path, char *to, size_t bytes, fault *f) {
    char number[16] = "";
    for (int i = 2;; i++) {
        if ((size_t)snprintf(to, bytes, "%s.left%s", path, number) >= bytes)
            return fault_set(f, "%.700s: too long a name", path);
        if (!files_exist(to)) return true;
        snprintf(number, sizeof number, "%d", i);
    }
}

bool files_plain_name(const char *name) {
    char printed[NAME_MOST + 1];
    size_t length = strlen(name);
    if (!length || length > NAME_MOST || name[0] == '.' || strchr(name, '/')) return false;
    memcpy(printed, name, length + 1);
    text_keep_printable(printed);
    return !strcmp(printed, name);
}

bool files_join(char *path, size_t bytes, const char *folder, const char *name, fault *f) {
    size_t a = strlen(folder), b = strlen(name);
    bool slash = a && folder[a - 1] != '/';
    if (a + slash + b >= bytes)
        return fault_set(f, "%.200s/%.200s: the path is longer than %zu bytes", folder, name,
                         bytes - 1);
    memcpy(path, folder, a);
    if (slash) path[a] = '/';
    memcpy(path + a + slash, name, b + 1);
    return true;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bool list_add(char ***names, size_t *count, const char *name, const char *why) {
    if ((*count & (*count - 1)) == 0) { /* room doubles at each power of two */
        size_t room = *count ? *count * 2 : 1;
        char **more = realloc(*names, room * sizeof *more);
        if (!more) return false;
        *names = more;
    }
    size_t length = strlen(name), more = strlen(why) + 1;
    char *copy = malloc(length + more);
    if (!copy) return false;
    memcpy(copy, name, length);
    memcpy(copy + length, why, more);
    (*names)[(*count)++] = copy;
    return true;
}

/* What a trainer has written, or writes now, is nobody's text. */
static bool holds_run(const char *folder) {
    char lock[PATH_ROOM], settings[PATH_ROOM];
    fault unused;
    return files_join(lock, sizeof lock, folder, FILES_CLAIM, &unused) && files_exist(lock) &&
           files_join(settings, sizeof settings, folder, "env.json", &unused) &&
           files_exist(settings);
}

/* Why this one is not listed, NULL where it is one to list or a folder to enter. */
static const char *passed_over(const char *path, const char *name, const struct stat *s) {
    struct stat target;
    if (name[0] == '.') return "";
    if (S_ISDIR(s->st_mode)) return holds_run(path) ? " (the folder of a run)" : NULL;
    if (S_ISREG(s->st_mode)) return NULL;
    if (!S_ISLNK(s->st_mode)) return " (no plain file)";
    if (stat(path, &target)) return " (a link to nothing)";
    if (S_ISDIR(target.st_mode)) return " (a link to a folder)";
    return S_ISREG(target.st_mode) ? NULL : " (no plain file)";
}

/* Adds the files of `folder` and of those below it; `below` is its own name in the list, "" for the
   first. A link to a folder is not followed, so that no folder is met twice. */
static bool list_folder(files_list *list, const char *folder, const char *below, int level,
                        fault *f) {
    char path[PATH_ROOM], name[PATH_ROOM];
    struct stat s;
    if (level > LEVELS)
        return fault_set(f, "%.200s...: folders in folders, more than %d deep", folder, LEVELS);
    DIR *open_folder = opendir(folder);
    if (!open_folder) return fault_errno(f, "%s: cannot open the folder", folder);
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(open_folder));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        ok = files_join(path, sizeof path, folder, e->d_name, f) &&
             files_join(name, sizeof name, below, e->d_name, f);
        if (!ok || lstat(path, &s)) continue;
        const char *why = passed_over(path, e->d_name, &s);
        if (!why && S_ISDIR(s.st_mode))
            ok = list_folder(list, path, name, level + 1, f);
        else if (why ? !list_add(&list->passed, &list->passed_count, name, why)
                     : !list_add(&list->names, &list->count, name, ""))
            ok = fault_set(f, "%s: out of memory", folder);
    }
    closedir(open_folder);
    return ok;
}

bool files_list_open(files_list *list, const char *folder, fault *f) {
    files_list empty = {NULL, 0, NULL, 0};
    *list = empty;
    bool ok = list_folder(list, folder, "", 1, f);
    if (!ok) files_list_close(list);
    if (list->count) qsort(list->names, list->count, sizeof *list->names, by_name);
    if (list->passed_count) qsort(list->passed, list->passed_count, sizeof *list->passed, by_name);
    return ok;
}

void files_list_close(files_list *list) {
    files_list empty = {NULL, 0, NULL, 0};
    for (size_t i = 0; i < list->count; i++) free(list->names[i]);
    for (size_t i = 0; i < list->passed_count; i++) free(list->passed[i]);
    free(list->names);
    free(list->passed);
    *list = empty;
}
