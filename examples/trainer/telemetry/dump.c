/* dump.c - see dump.h. The handler does only what is safe wherever the signal strikes;
   backtrace() is, once it has been called before, which loads what it needs. */
#include "telemetry/dump.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/files.h"
#include "base/phase.h"

#if defined(__GLIBC__) || defined(__APPLE__)
#include <execinfo.h>
#define HAVE_BACKTRACE 1
#else
#define HAVE_BACKTRACE 0 /* then a dump is its first line */
#endif

enum { FRAMES = 64, LINE = 256 };

static pthread_t training;
static char path[1280];
static int64_t rank_here, step_now;
static int written;

/* Lines are put together without stdio, which may be what the signal interrupts. */
static size_t add_text(char *line, size_t n, const char *text) {
    for (; *text && n < LINE; text++) line[n++] = *text;
    return n;
}

static size_t add_number(char *line, size_t n, const char *name, int64_t x) {
    char digits[24];
    int count = 0;
    uint64_t rest = x < 0 ? 0 - (uint64_t)x : (uint64_t)x;
    n = add_text(line, n, name);
    if (x < 0) n = add_text(line, n, "-");
    do digits[count++] = (char)('0' + rest % 10);
    while (rest /= 10);
    while (count && n < LINE) line[n++] = digits[--count];
    return n;
}

static void write_dump(int fd) {
    char line[LINE];
    int layer;
    phase p = phase_get(&layer);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    size_t n = add_number(line, 0, "---- ts ", now.tv_sec);
    n = add_number(line, n, " pid ", getpid());
    n = add_number(line, n, " rank ", rank_here);
    n = add_number(line, n, " step ", __atomic_load_n(&step_now, __ATOMIC_RELAXED));
    n = add_text(line, n, " phase ");
    n = add_text(line, n, phase_name(p));
    n = add_number(line, n, " layer ", layer);
    n = add_text(line, n, "\n");
    if (write(fd, line, n) != (ssize_t)n) return;
#if HAVE_BACKTRACE
    void *frames[FRAMES];
    backtrace_symbols_fd(frames, backtrace(frames, FRAMES), fd);
#endif
}

/* SIGUSR1 comes to any thread. SIGURG, which does nothing by itself, is how it is passed on. */
void dump_ask(void) {
    pthread_kill(training, SIGURG);
}

static void pass_on(int number) {
    (void)number;
    dump_ask();
}

static void handle(int number) {
    (void)number;
    const int before = errno; /* the code that is interrupted may be about to read it */
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
    if (fd >= 0) {
        write_dump(fd);
        close(fd);
        __atomic_add_fetch(&written, 1, __ATOMIC_RELEASE);
    }
    errno = before;
}

static bool set_handler(int number, void (*handler)(int)) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = handler;
    a.sa_flags = SA_RESTART | SA_ONSTACK; /* not on the thread's own stack: signals.h */
    sigemptyset(&a.sa_mask);
    return !sigaction(number, &a, NULL);
}

void dump_prepare(void) {
    set_handler(SIGUSR1, SIG_IGN);
}

bool dump_install(const char *folder, int64_t rank, fault *f) {
    char name[64];
    snprintf(name, sizeof name, "stack_rank%lld.txt", (long long)rank);
    if (!files_join(path, sizeof path, folder, name, f)) return false;
#if HAVE_BACKTRACE
    void *frames[FRAMES];
    (void)backtrace(frames, FRAMES);
#endif
    rank_here = rank;
    training = pthread_self();
    return (set_handler(SIGURG, handle) && set_handler(SIGUSR1, pass_on)) ||
           fault_errno(f, "SIGUSR1 cannot be handled");
}

void dump_step(int64_t step) {
    __atomic_store_n(&step_now, step, __ATOMIC_RELAXED);
}

int dump_count(void) {
    return __atomic_load_n(&written, __ATOMIC_ACQUIRE);
}

const char *dump_path(void) {
    return path;
}
