/* ---- Threads ------------------------------------------------------------------------------------
   Twin: none; a task is a thread block there. Not here: what a task computes. */
#pragma once
#include "sequences.h"

/* A task: piece `index` of the work that `context` describes. It writes rows that no other task
   writes, each as a sum in one fixed order. So no bit depends on which thread runs the task, or
   when. */
typedef void nsa__task(const void *context, int64_t nth, void *scratch);

#if defined(_OPENMP) && _OPENMP >= 201511
#define NSA__IN_ORDER \
    monotonic:        \
    dynamic
#else
#define NSA__IN_ORDER dynamic
#endif

/* Threads for this many multiply-adds. Waking a thread takes some 50 us; with less work than that a
   parallel region does not pay. It depends on the shape alone, and no bit depends on it. */
static int nsa__threads_for(int threads, int64_t work) {
    const int64_t worth = (int64_t)1 << 22;
    return (int)nsa__max(1, nsa__min(threads, work / worth));
}

/* Runs tasks 0 .. tasks - 1 on the team's threads. They begin in index order, because neighbouring
   tasks read neighbouring rows and often the same tiles; no result depends on the order. */
static void nsa__run(const nsa__team *team, int64_t tasks, nsa__task *task, const void *context) {
#ifdef _OPENMP
    int threads = (int)nsa__max(1, nsa__min(team->threads, tasks));
#pragma omp parallel for num_threads(threads) schedule(NSA__IN_ORDER) if (threads > 1)
    for (int64_t i = 0; i < tasks; i++)
        task(context, i,
             team->scratch_bytes
                 ? team->scratch + team->scratch_bytes * (size_t)omp_get_thread_num()
                 : NULL);
#else
    for (int64_t i = 0; i < tasks; i++) task(context, i, team->scratch);
#endif
}

/* -- tasks that take turns --
   Backward's tasks add to dk and dv of the same tiles. Each sum must have one order of tasks,
   whatever the number of threads. So a task enters a tile only if the task that it follows, and all
   before that one, have left it.
   Tasks go through their tiles upwards. A task that may not go on keeps its state in its place, and
   its thread takes another task. No thread waits for one that has lost its core as long as there is
   other work.
   Place i takes tasks i, i + places, i + 2 places, ... one after another, so tasks begin in index
   order. The first unfinished task is then always in a place, and it waits for no other task: the
   tasks cannot lock. */

enum { NSA__PLACES = 4 }; /* places for each thread */

/* Gives the core to another thread, because the caller has found nothing to do. */
static void nsa__yield(void) {
#ifdef NSA__HAS_SCHED
    sched_yield();
#endif
}

/* Reads a number that other threads write. Behind the flush this thread sees all that the writer
   had written before it wrote the number. */
static int32_t nsa__read(const int32_t *x) {
    int32_t value;
#ifdef _OPENMP
#pragma omp atomic read
#endif
    value = *x;
#ifdef _OPENMP
#pragma omp flush
#endif
    return value;
}

/* Writes a number that other threads read. The flush before it lets them see the sums of a tile
   before they see that the tile is free. */
static void nsa__write(int32_t *x, int32_t value) {
#ifdef _OPENMP
#pragma omp flush
#pragma omp atomic write
#endif
    *x = value;
    (void)value; /* gcc takes what an atomic writes for unused */
}

/* 1 for the first thread that asks, until that thread writes 0. The others only count on, and leave
   the place alone. */
static int nsa__claim(int32_t *claims) {
    int32_t earlier;
#ifdef _OPENMP
#pragma omp atomic capture
#endif
    earlier = (*claims)++;
#ifdef _OPENMP
#pragma omp flush
#endif
    return earlier == 0;
}

/* Where a task keeps its state from its first tile to its last. The state itself follows in memory.
   A thread that has not claimed the place reads its fields by nsa__read, as a hint. */
typedef struct nsa__place {
    int32_t claims;  /* 0: no thread works here */
    int32_t task;    /* the task that is here or begins next; turns->tasks: none is left */
    int32_t follows; /* the task that it follows, or -1 */
    int32_t needs;   /* the tile that this one must have left before the task goes on, or -1 */
    int32_t begun;   /* 1: its state has been loaded */
    int32_t moved;   /* 1: the thread's scratch is not the task's any more */
} nsa__place;

/* A run of such tasks. A thread's scratch is | scratch_bytes | place 0 | .. | place 3 |. */
typedef struct nsa__turns {
    int32_t tasks;
    int32_t *progress; /* of task i: it, and all that it follows, have left tiles < progress[i] */
    const void *context;
    /* sets follows and needs of a task that has come to a place */
    void (*come)(const struct nsa__turns *turns, nsa__place *place);
    /* goes on with a task by one step; returns 1 if the task is done */
    int (*go)(const struct nsa__turns *turns, nsa__place *place, void *scratch);
    size_t place_bytes;   /* of a place and the state of its task */
    size_t scratch_bytes; /* of a thread, before its places: what holds for one tile only */
} nsa__turns;

static size_t nsa__turns_scratch(const nsa__turns *turns) {
    return turns->scratch_bytes + NSA__PLACES * turns->place_bytes;
}

static int nsa__may_enter(const nsa__turns *turns, int32_t follows, int32_t tile) {
    return follows < 0 || nsa__read(turns->progress + follows) > tile;
}

static nsa__place *nsa__place_at(const nsa__turns *turns, const nsa__team *team, int i) {
    char *of_thread = team->scratch + team->scratch_bytes * (size_t)(i / NSA__PLACES);
    return (nsa__place *)(void *)(of_thread + turns->scratch_bytes +
                                  turns->place_bytes * (size_t)(i % NSA__PLACES));
}

/* Puts `task` into a place that no other thread works at, or marks the place as done. */
static void nsa__place_next(const nsa__turns *turns, nsa__place *place, int64_t task) {
    nsa__write(&place->begun, 0);
    nsa__write(&place->task, (int32_t)nsa__min(task, turns->tasks));
    if (task < turns->tasks) turns->come(turns, place);
}

/* Claims the place of the first task that may go on and that no thread works at; NULL if there is
   none. *idle becomes 1 if any unfinished task is unclaimed. Fields are read before the place is
   claimed, and tested again behind the claim, because another thread may have gone on with it. */
static nsa__place *nsa__place_find(const nsa__turns *turns, const nsa__team *team, int *idle) {
    nsa__place *best = NULL;
    int32_t first = turns->tasks;
    *idle = 0;
    for (int i = 0; i < team->threads * NSA__PLACES; i++) {
        nsa__place *place = nsa__place_at(turns, team, i);
        int32_t task = nsa__read(&place->task);
        if (task >= turns->tasks || nsa__read(&place->claims)) continue;
        *idle = 1;
        if (task >= first ||
            !nsa__may_enter(turns, nsa__read(&place->follows), nsa__read(&place->needs)))
            continue;
        first = task;
        best = place;
    }
    if (!best || !nsa__claim(&best->claims)) return NULL;
    if (best->task < turns->tasks && nsa__may_enter(turns, best->follows, best->needs)) return best;
    nsa__write(&best->claims, 0); /* another thread has been at it meanwhile */
    return NULL;
}

/* Goes on with one task, as far as it may. Returns 0 if no task may go on. */
static int nsa__take_turn(const nsa__turns *turns, const nsa__team *team, void *scratch,
                          int *idle) {
    nsa__place *place = nsa__place_find(turns, team, idle);
    int done = 0;
    if (!place) return 0;
    place->moved = 1;
    while (!done && nsa__may_enter(turns, place->follows, place->needs))
        done = turns->go(turns, place, scratch);
    if (done) nsa__place_next(turns, place, place->task + (int64_t)team->threads * NSA__PLACES);
    nsa__write(&place->claims, 0);
    return 1;
}

/* The work of one thread. It ends if every task that is not done is claimed by another thread.
   The first unfinished task may always go on, so a thread yields only while another works at
   that task. */
static void nsa__take_turns(const nsa__turns *turns, const nsa__team *team, void *scratch) {
    for (int idle = 1; idle;)
        if (nsa__take_turn(turns, team, scratch, &idle))
            idle = 1;
        else if (idle)
            nsa__yield();
}

/* Fills the places with the first tasks. No task has left any tile. */
static void nsa__turns_begin(const nsa__turns *turns, const nsa__team *team) {
    for (int i = 0; i < team->threads * NSA__PLACES; i++) {
        nsa__place *place = nsa__place_at(turns, team, i);
        place->claims = 0;
        nsa__place_next(turns, place, i);
    }
    for (int32_t i = 0; i < turns->tasks; i++) turns->progress[i] = 0;
}

static void nsa__run_in_turn(const nsa__team *team, const nsa__turns *turns) {
    nsa__turns_begin(turns, team);
#ifdef _OPENMP
    int threads = (int)nsa__max(1, nsa__min(team->threads, turns->tasks));
#pragma omp parallel num_threads(threads) if (threads > 1)
    nsa__take_turns(turns, team,
                    team->scratch + team->scratch_bytes * (size_t)omp_get_thread_num());
#else
    nsa__take_turns(turns, team, team->scratch);
#endif
}
