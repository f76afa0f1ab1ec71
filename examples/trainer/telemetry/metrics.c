/* metrics.c - see metrics.h. The text is kept ready in one of two buffers, so that a signal handler
   has only to write it, whatever the signal interrupted. */
#include "telemetry/metrics.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"
#include "base/signals.h"

enum { TEXT_BYTES = 2048, PATH_ROOM = 1280 };

static struct {
    char text[2][TEXT_BYTES];
    char path[PATH_ROOM], aside[PATH_ROOM + 32];
    int ready; /* 0: nothing; else 1 + the buffer */
} last;

/* JSON has no NaN and no infinity. */
static const char *number(char *text, size_t bytes, double x) {
    snprintf(text, bytes, isfinite(x) ? "%.9g" : "null", x);
    return text;
}

/* A JSON string's inside; what is not plain ASCII becomes a question mark. */
static void quote(char *text, size_t bytes, const char *verdict) {
    size_t n = 0;
    for (; *verdict && n + 3 < bytes; verdict++) {
        unsigned char c = (unsigned char)*verdict;
        if (c == '"' || c == '\\') text[n++] = '\\';
        text[n++] = c < 0x20 || c > 0x7e ? '?' : (char)c;
    }
    text[n] = 0;
}

/* Everything but the last two fields and the closing brace. */
static void render(char *text, const metrics *m) {
    char n[9][32], data[400];
    quote(data, sizeof data, m->data);
    snprintf(text, TEXT_BYTES,
             "{\n  \"device\": \"%.60s\",\n  \"dtype\": \"%.60s\",\n  \"steps\": %lld,\n"
             "  \"steps_done\": %lld,\n  \"seq_len\": %lld,\n  \"batch_global\": %lld,\n"
             "  \"lr\": %s,\n  \"loss_first\": %s,\n  \"loss_last\": %s,\n"
             "  \"toks_per_s_p50\": %s,\n  \"peak_memory_mib\": %s,\n  \"seconds\": %s,\n"
             "  \"sel_pct_at_max\": %s,\n  \"gate_layers_collapsed\": %lld,\n"
             "  \"gate_layers_shut\": %lld,\n  \"total_fallbacks\": %lld,\n  \"tokens\": %lld,\n"
             "  \"val_loss\": %s,\n  \"val_loss_best\": %s,\n  \"data\": \"%s\",\n"
             "  \"synthetic_from\": %lld,\n",
             m->device, m->dtype, (long long)m->steps, (long long)m->steps_done,
             (long long)m->seq_len, (long long)m->batch_global, number(n[0], 32, m->lr),
             number(n[1], 32, m->loss_first), number(n[2], 32, m->loss_last),
             number(n[3], 32, m->toks_per_s_p50), number(n[4], 32, m->peak_memory_mib),
             number(n[5], 32, m->seconds), number(n[6], 32, m->sel_pct_at_max),
             (long long)m->gate_layers_collapsed, (long long)m->gate_layers_shut,
             (long long)m->total_fallbacks, (long long)m->tokens, number(n[7], 32, m->val_loss),
             number(n[8], 32, m->val_loss_best), data, (long long)m->synthetic_from);
}

void metrics_prepare(const char *path, const metrics *m) {
    int next = last.ready == 1 ? 2 : 1;
    if (!last.ready) {
        snprintf(last.path, sizeof last.path, "%s", path);
        snprintf(last.aside, sizeof last.aside, "%s.%ld.tmp", path, (long)getpid());
    }
    render(last.text[next - 1], m);
    __atomic_store_n(&last.ready, next, __ATOMIC_RELEASE);
}

void metrics_disarm(void) {
    __atomic_store_n(&last.ready, 0, __ATOMIC_RELEASE);
}

static bool put(int fd, const char *text) {
    size_t bytes = strlen(text);
    return write(fd, text, bytes) == (ssize_t)bytes;
}

/* Only calls that POSIX allows in a handler. */
void metrics_last_words(int signal_number) {
    int ready = __atomic_load_n(&last.ready, __ATOMIC_ACQUIRE);
    int code = 128 + signal_number;
    char digits[] = {(char)('0' + code / 100), (char)('0' + code / 10 % 10),
                     (char)('0' + code % 10), 0};
    if (!ready) return;
    int fd = open(last.aside, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) return;
    bool ok = put(fd, last.text[ready - 1]) && put(fd, "  \"verdict\": \"killed by ") &&
              put(fd, signals_name(signal_number)) && put(fd, "\",\n  \"exit_code\": ") &&
              put(fd, digits) && put(fd, "\n}\n");
    close(fd);
    if (ok) rename(last.aside, last.path);
}

void metrics_foretell(const char *verdict, int exit_code, bool unless_there) {
    int ready = __atomic_load_n(&last.ready, __ATOMIC_ACQUIRE);
    char text[TEXT_BYTES * 2], quoted[512];
    fault unused;
    if (!ready || (unless_there && files_exist(last.path))) return;
    quote(quoted, sizeof quoted, verdict);
    snprintf(text, sizeof text, "%s  \"verdict\": \"%s\",\n  \"exit_code\": %d\n}\n",
             last.text[ready - 1], quoted, exit_code);
    (void)files_replace(last.path, text, strlen(text), &unused);
}

bool metrics_write(const char *path, const metrics *m, const char *verdict, int exit_code,
                   fault *f) {
    char text[TEXT_BYTES * 2], quoted[TEXT_BYTES - 64];
    render(text, m);
    quote(quoted, sizeof quoted, verdict);
    size_t n = strlen(text);
    n += (size_t)snprintf(text + n, sizeof text - n,
                          "  \"verdict\": \"%s\",\n  \"exit_code\": %d\n}\n", quoted, exit_code);
    return files_replace(path, text, n, f);
}
