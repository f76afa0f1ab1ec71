/* ---- Threads ------------------------------------------------------------------------------------
   Twin: none; a task is a thread block there. Not here: what a task computes. */
#pragma once
#include "sequences.h"

/* A task: piece `nth` of the work that `context` describes. It writes rows that no other task
   writes, each as a sum in one fixed order. So no bit depends on which thread runs the task, or
   when. */
typedef void nsa__task(const void *context, int64_t nth, void *scratch);

/* Threads for this many multiply-adds, a million or more for each: that takes some 10 us, and
   waking a thread as long, or longer if it sleeps. It depends on the shape alone, and no bit
   depends on it. */
static int nsa__threads_for(int threads, int64_t work) {
    return (int)nsa__max(1, nsa__min(threads, work >> 20));
}

/* Runs tasks 0 .. tasks - 1 on the team's threads. They begin in index order, because neighbouring
   tasks read neighbouring rows and often the same tiles; no result depends on the order. One thread
   enters no parallel region: what its tasks run would be nested there, with threads of its own that
   are created each time. */
static void nsa__run(const nsa__team *team, int64_t tasks, nsa__task *task, const void *context) {
#ifdef _OPENMP
    int threads = (int)nsa__min(team->threads, tasks);
    if (threads > 1) {
#pragma omp parallel for num_threads(threads) schedule(monotonic : dynamic)
        for (int64_t i = 0; i < tasks; i++)
            task(context, i,
                 team->scratch_bytes
                     ? team->scratch + team->scratch_bytes * (size_t)omp_get_thread_num()
                     : NULL);
        return;
    }
#endif
    for (int64_t i = 0; i < tasks; i++) task(context, i, team->scratch);
}

/* -- tasks of all sequences -- */

/* Work of which each sequence has some items: its queries, or its blocks. */
typedef struct nsa__by_seq {
    const nsa_desc *d;
    const void *job;
    int64_t (*items)(const void *job, const nsa__seq *seq); /* how many it has */
    void (*item)(const void *job, const nsa__seq *seq, int64_t nth, void *scratch);
    int per;         /* items of a task */
    int64_t stripes; /* set where it is run */
} nsa__by_seq;

static int64_t nsa__all_tasks(const nsa__by_seq *by) {
    int64_t sum = 0;
    for (nsa__seq seq = nsa__seq_begin(by->d); seq.nth < by->d->batch; nsa__seq_next(by->d, &seq))
        sum += nsa__ceil_div(by->items(by->job, &seq), by->per);
    return sum;
}

/* Every stripes-th task of all sequences, from number `nth` on. */
static void nsa__stripe_task(const void *context, int64_t nth, void *scratch) {
    const nsa__by_seq *by = (const nsa__by_seq *)context;
    for (nsa__seq seq = nsa__seq_begin(by->d); seq.nth < by->d->batch; nsa__seq_next(by->d, &seq)) {
        const int64_t items = by->items(by->job, &seq), tasks = nsa__ceil_div(items, by->per);
        for (; nth < tasks; nth += by->stripes)
            for (int64_t i = nth * by->per; i < nsa__min(items, (nth + 1) * by->per); i++)
                by->item(by->job, &seq, i, scratch);
        nth -= tasks;
    }
}

/* One region for all sequences, because a step of decoding has little work in each. A thread gets
   several stripes: one that has lost its core leaves some of them to others. */
static void nsa__run_by_seq(const nsa__team *team, nsa__by_seq by) {
    const int64_t most = team->threads > 1 ? (int64_t)4 * team->threads : 1;
    by.stripes = nsa__min(most, nsa__all_tasks(&by));
    nsa__run(team, by.stripes, nsa__stripe_task, &by);
}

static int64_t nsa__seq_queries(const void *job, const nsa__seq *seq) {
    (void)job;
    return seq->count;
}

enum { NSA__TASK_TOKENS = 16 };

/* Work that is done token by token, for the queries of all sequences. */
static void nsa__run_tokens(const nsa__team *team, const nsa_desc *d,
                            void (*token)(const void *job, const nsa__seq *seq, int64_t t,
                                          void *scratch),
                            const void *job) {
    const nsa__by_seq by = {d, job, nsa__seq_queries, token, NSA__TASK_TOKENS, 0};
    nsa__run_by_seq(team, by);
}

/* -- ordered tasks --
   Backward's tasks add to dk and dv of the same tiles. Each sum must have one order of tasks,
   whatever the number of threads. So a task enters a tile only if the task that it follows, and all
   before that one, have left it.
   Tasks go through their tiles upwards. A task that may not go on keeps its state in its slot, and
   its thread takes another task. No thread waits for one that has lost its core as long as there is
   other work.
   Slot i takes tasks i, i + slots, i + 2 slots, ... one after another, so tasks begin in index
   order. The first unfinished task is then always in a slot, and it waits for no other task: the
   tasks cannot lock. */

enum { NSA__TASK_SLOTS = 4 }; /* slots for each thread */

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

/* Writes a number that other threads read. seq_cst: they see the sums of a tile before they see
   that the tile is free. */
static void nsa__write(int32_t *x, int32_t value) {
#ifdef _OPENMP
#pragma omp atomic write seq_cst
#endif
    *x = value;
    (void)value; /* gcc takes what an atomic writes for unused */
}

/* 1 for the first thread that asks, until that thread writes 0. The others only count on, and leave
   the slot alone. */
static int nsa__claim(int32_t *claims) {
    int32_t earlier;
#ifdef _OPENMP
#pragma omp atomic capture seq_cst
#endif
    earlier = (*claims)++;
    return earlier == 0;
}

/* Where a task keeps its state from its first tile to its last. The state itself follows in memory.
   A thread that has not claimed the slot reads its fields by nsa__read, as a hint. */
typedef struct nsa__task_slot {
    int32_t claims;    /* 0: no thread works here */
    int32_t task;      /* the task that is here or begins next; ordered->tasks: none is left */
    int32_t wait_tile; /* its predecessor must have left it before the task goes on; -1: no tile */
    int32_t started;   /* 1: its state has been loaded */
} nsa__task_slot;

/* A run of such tasks. A thread's scratch is | scratch_bytes | slot 0 | .. | slot 3 |. */
typedef struct nsa__ordered {
    int32_t tasks;
    int32_t heads;     /* the predecessor of task i, which adds to the same sums, is i - heads */
    int32_t *progress; /* of task i: it, and all that it follows, have left tiles < progress[i] */
    const void *context;
    /* goes on with a task by one step; returns 1 if the task is done */
    int (*step)(const struct nsa__ordered *ordered, nsa__task_slot *slot, void *scratch);
    size_t slot_bytes;    /* of a slot and the state of its task */
    size_t scratch_bytes; /* of a thread, before its slots: what holds for one tile only */
} nsa__ordered;

static size_t nsa__ordered_scratch(const nsa__ordered *ordered) {
    return ordered->scratch_bytes + NSA__TASK_SLOTS * ordered->slot_bytes;
}

static int nsa__may_enter(const nsa__ordered *ordered, int32_t task, int32_t tile) {
    const int32_t predecessor = task - ordered->heads;
    return predecessor < 0 || nsa__read(ordered->progress + predecessor) > tile;
}

static nsa__task_slot *nsa__slot_at(const nsa__ordered *ordered, const nsa__team *team, int i) {
    char *of_thread = team->scratch + team->scratch_bytes * (size_t)(i / NSA__TASK_SLOTS);
    return (nsa__task_slot *)(void *)(of_thread + ordered->scratch_bytes +
                                      ordered->slot_bytes * (size_t)(i % NSA__TASK_SLOTS));
}

/* Puts `task` into a slot that no other thread works at, or marks the slot as done. */
static void nsa__slot_next(const nsa__ordered *ordered, nsa__task_slot *slot, int64_t task) {
    nsa__write(&slot->started, 0);
    nsa__write(&slot->wait_tile, -1);
    nsa__write(&slot->task, (int32_t)nsa__min(task, ordered->tasks));
}

/* Claims the slot of the first task that may go on and that no thread works at; NULL if there is
   none. *idle becomes 1 if any unfinished task is unclaimed. Fields are read before the slot is
   claimed, and tested again behind the claim, because another thread may have gone on with it. */
static nsa__task_slot *nsa__slot_find(const nsa__ordered *ordered, const nsa__team *team,
                                      int *idle) {
    nsa__task_slot *best = NULL;
    int32_t first = ordered->tasks;
    *idle = 0;
    for (int i = 0; i < team->threads * NSA__TASK_SLOTS; i++) {
        nsa__task_slot *slot = nsa__slot_at(ordered, team, i);
        int32_t task = nsa__read(&slot->task);
        if (task >= ordered->tasks || nsa__read(&slot->claims)) continue;
        *idle = 1;
        if (task >= first || !nsa__may_enter(ordered, task, nsa__read(&slot->wait_tile))) continue;
        first = task;
        best = slot;
    }
    if (!best || !nsa__claim(&best->claims)) return NULL;
    if (best->task < ordered->tasks && nsa__may_enter(ordered, best->task, best->wait_tile))
        return best;
    nsa__write(&best->claims, 0); /* another thread has been at it meanwhile */
    return NULL;
}

/* Goes on with one task, as far as it may. Returns 0 if no task may go on. */
static int nsa__step_slot(const nsa__ordered *ordered, const nsa__team *team, void *scratch,
                          int *idle) {
    nsa__task_slot *slot = nsa__slot_find(ordered, team, idle);
    int done = 0;
    if (!slot) return 0;
    while (!done && nsa__may_enter(ordered, slot->task, slot->wait_tile))
        done = ordered->step(ordered, slot, scratch);
    if (done) nsa__slot_next(ordered, slot, slot->task + (int64_t)team->threads * NSA__TASK_SLOTS);
    nsa__write(&slot->claims, 0);
    return 1;
}

/* The work of one thread. It ends if every task that is not done is claimed by another thread.
   The first unfinished task may always go on, so a thread yields only while another works at
   that task. */
static void nsa__run_slots(const nsa__ordered *ordered, const nsa__team *team, void *scratch) {
    for (int idle = 1; idle;)
        if (nsa__step_slot(ordered, team, scratch, &idle))
            idle = 1;
        else if (idle)
            nsa__yield();
}

/* Fills the slots with the first tasks. No task has left any tile. */
static void nsa__ordered_begin(const nsa__ordered *ordered, const nsa__team *team) {
    for (int i = 0; i < team->threads * NSA__TASK_SLOTS; i++) {
        nsa__task_slot *slot = nsa__slot_at(ordered, team, i);
        slot->claims = 0;
        nsa__slot_next(ordered, slot, i);
    }
    for (int32_t i = 0; i < ordered->tasks; i++) ordered->progress[i] = 0;
}

static void nsa__run_ordered(const nsa__team *team, const nsa__ordered *ordered) {
    nsa__ordered_begin(ordered, team);
#ifdef _OPENMP
    int threads = (int)nsa__max(1, nsa__min(team->threads, ordered->tasks));
#pragma omp parallel num_threads(threads) if (threads > 1)
    nsa__run_slots(ordered, team,
                   team->scratch + team->scratch_bytes * (size_t)omp_get_thread_num());
#else
    nsa__run_slots(ordered, team, team->scratch);
#endif
}
