/* saver.c - see saver.h. */
#include "checkpoint/saver.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/memory.h"
#include "base/signals.h"

enum { LIMIT_S = 3600 }; /* for a disk that answers no more; options may say less */

struct saver {
    saver_options options;
    checkpoint_part *parts;      /* of the copy */
    safetensors_tensor *tensors; /* all parts' one after the other */
    char *memory;
    config config; /* the run's may be gone before the thread is */
    checkpoint_state state;
    pthread_t thread;
    pthread_mutex_t lock; /* guards what follows; the copy is the thread's while busy is set */
    pthread_cond_t changed;
    bool busy, stop, failed, given_up;
    fault why;
};

static void *work(void *user) {
    saver *s = user;
    const saver_options *o = &s->options;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->busy && !s->stop) pthread_cond_wait(&s->changed, &s->lock);
        if (!s->busy) break;
        pthread_mutex_unlock(&s->lock);
        fault why;
        bool ok =
            checkpoint_write(o->out_dir, &s->config, &s->state, s->parts, o->count, o->keep, &why);
        pthread_mutex_lock(&s->lock);
        bool heard = ok && !s->given_up; /* else who waited for it may be gone */
        pthread_mutex_unlock(&s->lock);
        if (heard) o->done(o->user, s->state.step);
        pthread_mutex_lock(&s->lock);
        if (!ok && !s->failed) s->why = why;
        s->failed = s->failed || !ok;
        s->busy = false;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static bool start_thread(saver *s, fault *f) {
    clock_condition(&s->changed);
    pthread_mutex_init(&s->lock, NULL);
    return signals_start_thread(&s->thread, work, s, "writes checkpoints", f);
}

/* The same lists of tensors, in memory of their own. */
static bool lay_out_copy(saver *s, fault *f) {
    const saver_options *o = &s->options;
    size_t count = 0, bytes = 0, n = 0;
    for (size_t i = 0; i < o->count; i++) {
        count += o->parts[i].count;
        for (size_t k = 0; k < o->parts[i].count; k++)
            bytes += safetensors_tensor_bytes(&o->parts[i].tensors[k]);
    }
    s->parts = calloc(o->count, sizeof *s->parts);
    s->tensors = calloc(count, sizeof *s->tensors);
    if (!memory_fits("the copy that checkpoints are written from", bytes, f)) return false;
    s->memory = malloc(bytes);
    if (!s->parts || !s->tensors || !s->memory)
        return fault_set(f,
                         "out of memory for the copy that checkpoints are written from: %.1f MiB",
                         (double)bytes / (1 << 20));
    memset(s->memory, 0, bytes); /* taken now, not in the middle of the run */
    char *at = s->memory;
    for (size_t i = 0; i < o->count; i++) {
        s->parts[i] = o->parts[i];
        s->parts[i].tensors = s->tensors + n;
        for (size_t k = 0; k < o->parts[i].count; k++, n++) {
            s->tensors[n] = o->parts[i].tensors[k];
            s->tensors[n].data = at;
            at += safetensors_tensor_bytes(&s->tensors[n]);
        }
    }
    return true;
}

static void release(saver *s) {
    free(s->parts);
    free(s->tensors);
    free(s->memory);
    free(s);
}

saver *saver_open(const saver_options *o, fault *f) {
    saver *s = calloc(1, sizeof *s);
    if (!s) {
        fault_set(f, "out of memory");
        return NULL;
    }
    s->options = *o;
    s->config = *o->config;
    if (lay_out_copy(s, f) && start_thread(s, f)) return s;
    release(s);
    return NULL;
}

static bool check_locked(const saver *s, fault *f) {
    if (s->failed) *f = s->why;
    return !s->failed;
}

static bool wait_locked(saver *s, fault *f) {
    int limit = s->options.limit_s ? s->options.limit_s : LIMIT_S;
    struct timespec end = clock_in(s->given_up ? 0 : limit);
    while (s->busy)
        if (pthread_cond_timedwait(&s->changed, &s->lock, &end) == ETIMEDOUT && s->busy) {
            s->given_up = true;
            return fault_set(f, "%s: the checkpoint of step %lld is not written after %d s",
                             s->options.out_dir, (long long)s->state.step, limit);
        }
    return check_locked(s, f);
}

bool saver_write(saver *s, const checkpoint_state *state, fault *f) {
    const saver_options *o = &s->options;
    pthread_mutex_lock(&s->lock);
    bool ok = wait_locked(s, f);
    if (ok) {
        s->state = *state;
        for (size_t i = 0; i < o->count; i++)
            for (size_t k = 0; k < o->parts[i].count; k++) {
                const safetensors_tensor *from = &o->parts[i].tensors[k];
                o->copy(o->user, s->parts[i].tensors[k].data, from->data,
                        safetensors_tensor_bytes(from));
            }
        s->busy = true;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return ok;
}

bool saver_check(saver *s, fault *f) {
    if (!s) return true;
    pthread_mutex_lock(&s->lock);
    bool ok = check_locked(s, f);
    pthread_mutex_unlock(&s->lock);
    return ok;
}

bool saver_wait(saver *s, fault *f) {
    if (!s) return true;
    pthread_mutex_lock(&s->lock);
    bool ok = wait_locked(s, f);
    pthread_mutex_unlock(&s->lock);
    return ok;
}

bool saver_is_stuck(saver *s) {
    if (!s) return false;
    pthread_mutex_lock(&s->lock);
    bool stuck = s->busy && s->given_up;
    pthread_mutex_unlock(&s->lock);
    return stuck;
}

void saver_close(saver *s) {
    if (!s) return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    bool stuck = s->busy && s->given_up;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    if (stuck) {
        pthread_detach(s->thread); /* what it uses is its own until the process ends */
        return;
    }
    pthread_join(s->thread, NULL);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->lock);
    release(s);
}
