/* signals.c - see signals.h. */
#include "base/signals.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static int requested; /* atomic: handlers and threads ask, the training thread looks */
static void (*volatile last_words)(int number);

/* Where the training thread's handlers run: its own stack may have run out, or be hidden while a
   library's kernel computes (signals.h). */
static char other_stack[65536];

/* POLITE: saves and ends the run; FATAL: ends it at once; FOREIGN: too, where no profiler or other
   library handles it. A batch system may warn by SIGUSR2 and SIGXCPU that time is nearly up. */
typedef enum signal_kind { POLITE, FATAL, FOREIGN } signal_kind;

#define SIGNAL(name, kind) \
    { name, #name, kind }

static const struct {
    int number;
    const char *name;
    signal_kind kind;
} signals[] = {
    SIGNAL(SIGTERM, POLITE),    SIGNAL(SIGINT, POLITE),   SIGNAL(SIGHUP, POLITE),
    SIGNAL(SIGUSR2, POLITE),    SIGNAL(SIGXCPU, POLITE),  SIGNAL(SIGSEGV, FATAL),
    SIGNAL(SIGBUS, FATAL),      SIGNAL(SIGFPE, FATAL),    SIGNAL(SIGILL, FATAL),
    SIGNAL(SIGABRT, FATAL),     SIGNAL(SIGQUIT, FATAL),   SIGNAL(SIGTRAP, FATAL),
    SIGNAL(SIGSYS, FATAL),      SIGNAL(SIGALRM, FOREIGN), SIGNAL(SIGVTALRM, FOREIGN),
    SIGNAL(SIGPROF, FOREIGN),
#ifdef SIGPOLL
    SIGNAL(SIGPOLL, FOREIGN),
#endif
#ifdef SIGPWR
    SIGNAL(SIGPWR, FOREIGN),
#endif
#ifdef SIGSTKFLT
    SIGNAL(SIGSTKFLT, FOREIGN),
#endif
};

enum { SIGNALS = sizeof signals / sizeof signals[0] };

const char *signals_name(int number) {
    for (int i = 0; i < SIGNALS; i++)
        if (signals[i].number == number) return signals[i].name;
    return "a signal";
}

static void die(int number) {
    struct sigaction plain;
    memset(&plain, 0, sizeof plain);
    plain.sa_handler = SIG_DFL;
    if (last_words) last_words(number);
    sigaction(number, &plain, NULL);
    raise(number);
}

/* SIGXCPU comes again each second. */
static void ask(int number) {
    if (signals_stop_requested() && number != SIGXCPU) die(number);
    signals_ask(number);
}

static void handle(int number, void (*handler)(int), int flags) {
    struct sigaction a;
    memset(&a, 0, sizeof a);
    a.sa_handler = handler;
    a.sa_flags = flags;
    sigemptyset(&a.sa_mask);
    sigaction(number, &a, NULL);
}

static bool is_by(int number, void (*handler)(int)) {
    struct sigaction a;
    return !sigaction(number, NULL, &a) && a.sa_handler == handler;
}

/* As SIGHUP by nohup. A shell's script ignores SIGINT and SIGQUIT of what it starts in the
   background, for they come from its terminal; a SIGINT sent to the run ends it there too. */
static bool stays_ignored(int number, signal_kind kind) {
    if (number == SIGINT || number == SIGTERM || (kind == FATAL && number != SIGQUIT)) return false;
    return is_by(number, SIG_IGN);
}

void signals_install(void (*last)(int number)) {
    stack_t stack = {.ss_sp = other_stack, .ss_size = sizeof other_stack};
    last_words = last;
    sigaltstack(&stack, NULL);
    for (int i = 0; i < SIGNALS; i++) {
        int number = signals[i].number;
        if (stays_ignored(number, signals[i].kind)) continue;
        if (signals[i].kind == FOREIGN && !is_by(number, SIG_DFL)) continue;
        bool polite = signals[i].kind == POLITE;
        handle(number, polite ? ask : die, polite ? SA_RESTART | SA_ONSTACK : SA_ONSTACK);
    }
    handle(SIGPIPE, SIG_IGN, 0);
    handle(SIGXFSZ, SIG_IGN, 0);
}

static void *receive(void *unused) {
    for (;;) pause();
    return unused;
}

bool signals_begin(fault *f) {
    pthread_t thread;
    sigset_t elsewhere;
    errno = pthread_create(&thread, NULL, receive, NULL);
    if (errno) return fault_errno(f, "cannot start the thread that receives signals");
    pthread_detach(thread);
    sigemptyset(&elsewhere);
    for (int i = 0; i < SIGNALS; i++)
        if (signals[i].kind == POLITE) sigaddset(&elsewhere, signals[i].number);
    sigaddset(&elsewhere, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &elsewhere, NULL);
    return true;
}

void signals_ask(int number) {
    int none = 0;
    __atomic_compare_exchange_n(&requested, &none, number, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
}

int signals_stop_requested(void) {
    return __atomic_load_n(&requested, __ATOMIC_RELAXED);
}

bool signals_start_thread(pthread_t *thread, void *(*run)(void *), void *user, const char *what,
                          fault *f) {
    sigset_t most, before;
    sigfillset(&most);
    for (int i = 0; i < SIGNALS; i++)
        if (signals[i].kind == FATAL) sigdelset(&most, signals[i].number);
    pthread_sigmask(SIG_SETMASK, &most, &before);
    errno = pthread_create(thread, NULL, run, user);
    bool ok = !errno || fault_errno(f, "cannot start the thread that %s", what);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return ok;
}
