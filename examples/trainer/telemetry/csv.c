/* csv.c - see csv.h. */
#include "telemetry/csv.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
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
    c->file = NULL;
    if (!files_join(c->path, sizeof c->path, folder, name, f)) return false;
    snprintf(line, sizeof line, "%s\n", header);
    bool ok = last_step < 0 ? files_replace(c->path, line, strlen(line), f)
                            : cut_back(c, line, last_step, f);
    if (!ok) return false;
    int fd = files_open_end(c->path, f);
    c->file = fd < 0 ? NULL : fdopen(fd, "a");
    if (fd >= 0 && !c->file) close(fd), fault_set(f, "%s: out of memory", c->path);
    return c->file != NULL;
}

void csv_close(csv *c) {
    if (c->file) fclose(c->file);
    c->file = NULL;
}

bool csv_sync(csv *c, fault *f) {
    if (!c->file || !fsync(fileno(c->file)) || errno == EINVAL) return true;
    return fault_errno(f, "%s: cannot flush", c->path);
}

static bool parse_row(const char *at, int columns, double *values) {
    for (int i = 0; i < columns; i++) {
        char *end;
        values[i] = strtod(at, &end);
        if (end == at || (i + 1 < columns && *end != ',')) return false;
        at = end + 1;
    }
    return true;
}

bool csv_read(const char *folder, const char *name, int columns,
              void (*row)(void *user, const double *values), void *user, fault *f) {
    char path[1280], line[1024];
    double values[CSV_COLUMNS];
    if (!files_join(path, sizeof path, folder, name, f)) return false;
    if (!files_exist(path)) return true;
    int fd = files_open(path, f);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    if (!file && fd >= 0) close(fd), fault_set(f, "%s: out of memory", path);
    if (!file) return false;
    while (fgets(line, sizeof line, file))
        if (parse_row(line, columns, values)) row(user, values);
    bool ok = !ferror(file) || fault_errno(f, "%s: cannot read", path);
    fclose(file);
    return ok;
}

bool csv_row(csv *c, int64_t step, const double *values, int count, fault *f) {
    if (!c->file) return true;
    fprintf(c->file, "%lld", (long long)step);
    for (int i = 0; i < count; i++) fprintf(c->file, ",%.9g", values[i]);
    fputc('\n', c->file);
    if (!fflush(c->file) && !ferror(c->file)) return true;
    fault_errno(f, "%s: cannot write the row of step %lld", c->path, (long long)step);
    clearerr(c->file);
    return false;
}
