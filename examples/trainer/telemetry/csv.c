/* csv.c - see csv.h. */
#include "telemetry/csv.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"

enum { CSV_LIMIT = 1 << 30 };

/* Bytes of the header and of the whole rows up to last_step. A row that a kill cut short has no
   newline and goes too. */
static size_t bytes_to_keep(const char *text, size_t header, int64_t last_step) {
    size_t kept = header;
    for (;;) {
        const char *row = text + kept, *newline = strchr(row, '\n');
        if (!newline || strtoll(row, NULL, 10) > last_step) return kept;
        kept += (size_t)(newline - row) + 1;
    }
}

static bool cut_back(const csv *c, const char *header, int64_t last_step, fault *f) {
    size_t bytes, length = strlen(header);
    if (!files_exist(c->path)) return files_replace(c->path, header, length, f);
    char *text = files_read(c->path, CSV_LIMIT, &bytes, f);
    if (!text) return false;
    bool ok = true;
    if (strncmp(text, header, length))
        ok = fault_set(f, "%s: its first line must be %.*s", c->path, (int)length - 1, header);
    else
        ok = files_replace(c->path, text, bytes_to_keep(text, length, last_step), f);
    free(text);
    return ok;
}

bool csv_open(csv *c, const char *folder, const char *name, const char *header, int64_t last_step,
              fault *f) {
    char line[256];
    c->on = false;
    c->owed_bytes = 0;
    if (!files_join(c->path, sizeof c->path, folder, name, f)) return false;
    snprintf(line, sizeof line, "%s\n", header);
    bool ok = last_step < 0 ? files_replace(c->path, line, strlen(line), f)
                            : cut_back(c, line, last_step, f);
    if (!ok) return false;
    struct stat st;
    c->fd = files_open_end(c->path, f);
    if (c->fd < 0) return false;
    c->on = !fstat(c->fd, &st) || fault_errno(f, "%s: cannot read", c->path);
    c->bytes = (int64_t)st.st_size;
    if (!c->on) close(c->fd);
    return c->on;
}

void csv_close(csv *c) {
    if (c->on) close(c->fd);
    c->on = false;
}

/* Writes what is owed; of what a full disk has taken of it before, nothing stays. */
static bool pay(csv *c, fault *f) {
    if (!c->owed_bytes) return true;
    if (ftruncate(c->fd, (off_t)c->bytes)) return fault_errno(f, "%s: cannot be cut", c->path);
    if (!files_write_all(c->fd, c->path, c->owed, c->owed_bytes, f)) return false;
    c->bytes += (int64_t)c->owed_bytes;
    c->owed_bytes = 0;
    return true;
}

bool csv_sync(csv *c, fault *f) {
    if (!c->on) return true;
    if (!pay(c, f)) return false;
    return !fsync(c->fd) || errno == EINVAL || fault_errno(f, "%s: cannot flush", c->path);
}

static bool parse_row(const char *at, int columns, double *values) {
    for (int i = 0; i < columns; i++) {
        char *end;
        values[i] = strtod(at, &end);
        if (end == at || (i + 1 < columns && *end != ',')) return false;
        at = end + 1;
    }
    return values[0] >= 0 && values[0] <= CSV_STEP_MOST;
}

bool csv_in_place(const csv *c) {
    struct stat own, named;
    return !c->on || (!fstat(c->fd, &own) && !stat(c->path, &named) && own.st_dev == named.st_dev &&
                      own.st_ino == named.st_ino);
}

int64_t csv_read(const char *folder, const char *name, int columns,
                 void (*row)(void *user, const double *values), void *user, fault *f) {
    char path[1280], line[1024];
    double values[CSV_COLUMNS];
    int64_t number = 0, unread = 0;
    if (!files_join(path, sizeof path, folder, name, f)) return -1;
    if (!files_exist(path)) return 0;
    int fd = files_open(path, f);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    if (!file && fd >= 0) close(fd), fault_set(f, "%s: out of memory", path);
    if (!file) return -1;
    while (fgets(line, sizeof line, file)) {
        bool is_row = parse_row(line, columns, values);
        if (is_row) row(user, values);
        if (++number > 1 && !is_row && !unread) unread = number;
    }
    bool ok = !ferror(file) || fault_errno(f, "%s: cannot read", path);
    fclose(file);
    return ok ? unread : -1;
}

bool csv_row(csv *c, int64_t step, const double *values, int count, fault *f) {
    char row[32 * (CSV_COLUMNS + 1)];
    fault why;
    if (!c->on) return true;
    size_t n = (size_t)snprintf(row, sizeof row, "%lld", (long long)step);
    for (int i = 0; i < count && n < sizeof row; i++)
        n += (size_t)snprintf(row + n, sizeof row - n, ",%.9g", values[i]);
    if (n + 1 > sizeof row || c->owed_bytes + n + 1 > CSV_OWED)
        return fault_set(f, "%s: no room for the row of step %lld", c->path, (long long)step);
    row[n++] = '\n';
    memcpy(c->owed + c->owed_bytes, row, n);
    c->owed_bytes += n;
    if (pay(c, &why)) return true;
    return fault_errno(f, "%s: cannot write the row of step %lld", c->path, (long long)step);
}
