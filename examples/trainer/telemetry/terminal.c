/* terminal.c - see terminal.h. */
#include "telemetry/terminal.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/signals.h"

enum { ROOM = 1 << 18, PARTING_S = 2 };

struct terminal {
    int fd;
    pthread_t thread;
    pthread_mutex_t lock; /* guards what follows */
    pthread_cond_t changed;
    char *waiting, *writing; /* ROOM bytes each; the second is the thread's while `busy` */
    size_t count;            /* of waiting */
    long long dropped;       /* lines, since the last that was taken */
    bool busy, stop, finished;
};

static void *work(void *user) {
    terminal *t = user;
    fault unused; /* nobody will ever read it */
    pthread_mutex_lock(&t->lock);
    for (;;) {
        while (!t->count && !t->stop) pthread_cond_wait(&t->changed, &t->lock);
        if (!t->count) break;
        char *text = t->waiting;
        size_t count = t->count;
        t->waiting = t->writing;
        t->writing = text;
        t->count = 0;
        t->busy = true;
        pthread_mutex_unlock(&t->lock);
        (void)files_write_all(t->fd, "", text, count, &unused);
        pthread_mutex_lock(&t->lock);
        t->busy = false;
        pthread_cond_broadcast(&t->changed);
    }
    t->finished = true;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    return NULL;
}

static void release(terminal *t) {
    pthread_cond_destroy(&t->changed);
    pthread_mutex_destroy(&t->lock);
    free(t->waiting);
    free(t->writing);
    free(t);
}

terminal *terminal_open(int fd, fault *f) {
    terminal *t = calloc(1, sizeof *t);
    if (!t) {
        fault_set(f, "out of memory");
        return NULL;
    }
    t->fd = fd;
    t->waiting = malloc(ROOM);
    t->writing = malloc(ROOM);
    clock_condition(&t->changed);
    pthread_mutex_init(&t->lock, NULL);
    if (!t->waiting || !t->writing)
        fault_set(f, "out of memory");
    else if (signals_start_thread(&t->thread, work, t, "prints", f))
        return t;
    release(t);
    return NULL;
}

static void add_locked(terminal *t, const char *text, size_t bytes) {
    memcpy(t->waiting + t->count, text, bytes);
    t->count += bytes;
}

void terminal_put(terminal *t, const char *text, size_t bytes) {
    char note[96];
    size_t more = 0;
    pthread_mutex_lock(&t->lock);
    if (t->dropped)
        more = (size_t)snprintf(note, sizeof note, "(%lld lines that nobody read are left out)\n",
                                t->dropped);
    if (t->count + more + bytes > ROOM) {
        t->dropped++;
    } else {
        add_locked(t, note, more);
        add_locked(t, text, bytes);
        t->dropped = 0;
        pthread_cond_broadcast(&t->changed);
    }
    pthread_mutex_unlock(&t->lock);
}

void terminal_flush(terminal *t, double seconds) {
    struct timespec end = clock_in(seconds);
    pthread_mutex_lock(&t->lock);
    while ((t->count || t->busy) &&
           pthread_cond_timedwait(&t->changed, &t->lock, &end) != ETIMEDOUT)
        continue;
    pthread_mutex_unlock(&t->lock);
}

void terminal_close(terminal *t) {
    if (!t) return;
    terminal_flush(t, PARTING_S);
    pthread_mutex_lock(&t->lock);
    t->stop = true;
    bool stuck = t->count || t->busy;
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
    if (stuck) {
        pthread_detach(t->thread); /* it may still read all of it */
        return;
    }
    pthread_join(t->thread, NULL);
    release(t);
}
