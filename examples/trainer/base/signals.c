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

static const struct {
    int number;
    const char *name;
} names[] = {{SIGTERM, "SIGTERM"}, {SIGINT, "SIGINT"},  {SIGHUP, "SIGHUP"}, {SIGSEGV, "SIGSEGV"},
             {SIGBUS, "SIGBUS"},   {SIGFPE, "SIGFPE"},  {SIGILL, "SIGILL"}, {SIGABRT, "SIGABRT"},
             {SIGQUIT, "SIGQUIT"}, {SIGXCPU, "SIGXCPU"}};

const char *signals_name(int number) {
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i].number == number) return names[i].name;
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

static void ask(int number) {
    if (signals_stop_requested()) die(number);
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

/* By nohup, so that a run goes on where its terminal ends. */
static bool is_ignored(int number) {
    struct sigaction a;
    return !sigaction(number, NULL, &a) && a.sa_handler == SIG_IGN;
}

static const int polite[] = {SIGTERM, SIGINT, SIGHUP};
static const int fatal[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGQUIT, SIGXCPU};

void signals_install(void (*last)(int number)) {
    stack_t stack = {.ss_sp = other_stack, .ss_size = sizeof other_stack};
    last_words = last;
    sigaltstack(&stack, NULL);
    for (size_t i = 0; i < sizeof polite / sizeof polite[0]; i++)
        if (polite[i] != SIGHUP || !is_ignored(SIGHUP))
            handle(polite[i], ask, SA_RESTART | SA_ONSTACK);
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++) handle(fatal[i], die, SA_ONSTACK);
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
    for (size_t i = 0; i < sizeof polite / sizeof polite[0]; i++) sigaddset(&elsewhere, polite[i]);
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
    for (size_t i = 0; i < sizeof fatal / sizeof fatal[0]; i++) sigdelset(&most, fatal[i]);
    pthread_sigmask(SIG_SETMASK, &most, &before);
    errno = pthread_create(thread, NULL, run, user);
    bool ok = !errno || fault_errno(f, "cannot start the thread that %s", what);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return ok;
}
