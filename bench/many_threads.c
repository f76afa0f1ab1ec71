/* many_threads: how well a call would share its work among more threads than this machine has. It
   runs the tasks of a call for N threads on one, notes how long each takes and which it waits for,
   and replays them on N simulated threads, by the rules of nsa.h's scheduler. Efficiency is beside
   the tasks of a call for one thread, which may be larger. The bandwidth that cores share is not
   simulated. bench_attention measures what there is. No test. */
#define _POSIX_C_SOURCE 200809L
#include <stdint.h>

/* nsa.h calls `task` for every task, and `step` for every step of ordered ones. Here both
   calls note the time before and after. */
static const void *note_task(intptr_t what, const void *context, int64_t index, void *scratch);
static void *note_step(const void *ordered, void *slot);
static int note_end(int done);
#define task(context, index, scratch) \
    task(note_task((intptr_t)task, context, index, scratch), index, scratch), note_end(0)
#define step(ordered, slot, scratch) \
    step(ordered, note_step(ordered, slot), scratch) ? note_end(1) : note_end(0)
#include "decode.h"
#undef task
#undef step
#include "command.h"
#include "report.h"

enum { MAX_THREADS = 1024, ROUNDS = 3, LINES_AT_ONCE = 10, FORK_LINES = 10 };

/* -- recording -- */

/* A task, or a step of ordered ones: either it makes the task's share of a tile, or it adds
   the oldest share that is pending; then the task has left other tiles afterwards than before. Or a
   step of a split task. */
typedef struct event {
    intptr_t what; /* the function; 0: a step of ordered ones */
    nsa__branch branch;
    int32_t task, predecessor, left, leaves;
    int first;              /* of split tasks, those that threads look at first; 0: not split */
    int begins;             /* 1: it is the first of its region */
    int goes_on;            /* 1: the task takes its next batches; 0: it computes a part of them */
    size_t bytes;           /* of the sums of a tile */
    double seconds, before; /* of it, and of what one thread alone did before it */
} event;

typedef struct record {
    event *events;
    size_t count, room;
    double last;            /* when the last event ended */
    int depth;              /* tasks that have begun and not ended */
    const int32_t *leaving; /* where the step at hand writes what it has left */
} record;

static record recording;

static double cpu_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Room for events, written to once: a page's first use takes as long as a small task. */
static void record_grow(record *r) {
    const size_t more = r->room ? r->room : 4096;
    r->events = (event *)realloc(r->events, (r->room + more) * sizeof *r->events);
    if (!r->events) exit((perror("many_threads"), 1));
    memset(r->events + r->room, 0, more * sizeof *r->events);
    r->room += more;
}

/* What a task runs within it is part of it: it notes no event of its own. */
static event *note_begin(void) {
    static event inner;
    record *r = &recording;
    if (r->depth++) return &inner;
    if (r->count == r->room) record_grow(r);
    event *e = &r->events[r->count++];
    memset(e, 0, sizeof *e);
    e->seconds = cpu_seconds();
    e->before = e->seconds - r->last;
    return e;
}

/* Attention's tasks have head jobs as their context. */
static int is_attention(intptr_t what) {
    return what == (intptr_t)nsa__pack_task || what == (intptr_t)nsa__forward_task ||
           what == (intptr_t)nsa__key_gradient_task;
}

/* A step of decoding that is one task, whose parts threads share. */
static int is_shared(intptr_t what, const void *context) {
    return what == (intptr_t)nsa__decode_task && ((const nsa__decode_job *)context)->threads > 1;
}

static int note_end(int done);

/* Does itself what the tasks do that are split, step by step. */
static void note_splits(const nsa__splits *all, void *scratch) {
    int begins = 1;
    for (int i = 0; i < all->count;) {
        nsa__split *s = nsa__split_at(all, i);
        if (s->ended && ++i) continue;
        event *e = note_begin();
        e->what = (intptr_t)nsa__split_work;
        e->task = i;
        e->first = all->first;
        e->begins = begins;
        e->goes_on = s->joined == s->parts;
        begins = 0;
        nsa__split_step(all, s, scratch);
        note_end(0);
    }
}

static const void *note_task(intptr_t what, const void *context, int64_t index, void *scratch) {
    if (what == (intptr_t)nsa__split_work) {
        note_splits((const nsa__splits *)context, scratch);
        return context;
    }
    if (is_shared(what, context)) return context;
    event *e = note_begin();
    e->what = what;
    if (what == (intptr_t)nsa__stripe_task)
        e->what = (intptr_t)((const nsa__by_seq *)context)->item;
    e->task = (int32_t)index;
    if (is_attention(what)) e->branch = ((const nsa__head_job *)context)->plan->branch;
    return context;
}

static void *note_step(const void *ordered, void *slot) {
    const nsa__ordered *t = (const nsa__ordered *)ordered;
    const nsa__task_slot *at = (const nsa__task_slot *)slot;
    const nsa__attend_plan *p = ((const nsa__head_job *)t->context)->plan;
    event *e = note_begin();
    e->branch = p->branch;
    e->task = at->task;
    e->predecessor = at->task - t->heads;
    e->bytes = (size_t)(p->cut.tile * (p->k.wide + p->v.wide)) * sizeof(nsa_real);
    e->left = t->progress[at->task];
    recording.leaving = t->progress + at->task;
    return slot;
}

/* Behind split tasks there is no event: their threads have only seen that all have ended. */
static int note_end(int done) {
    event *e = &recording.events[recording.count - 1];
    if (!recording.depth) recording.last = cpu_seconds();
    if (!recording.depth || --recording.depth) return done;
    recording.last = cpu_seconds();
    e->seconds = recording.last - e->seconds;
    if (e->what) return done;
    e->leaves = *recording.leaving;
    return done;
}

/* The least of several runs: what else the machine does only adds. */
static record record_run(run *f, problem *p) {
    record best;
    memset(&best, 0, sizeof best);
    for (int i = 0; i < ROUNDS; i++) {
        memset(&recording, 0, sizeof recording);
        record_grow(&recording);
        recording.last = cpu_seconds();
        nsa_status s = f(p);
        if (s != NSA_OK || (i && best.count != recording.count)) {
            fprintf(stderr, "many_threads: %s\n", nsa_status_text(s));
            exit(1);
        }
        for (size_t k = 0; i && k < best.count; k++) {
            event *a = &best.events[k], *b = &recording.events[k];
            a->seconds = b->seconds < a->seconds ? b->seconds : a->seconds;
            a->before = b->before < a->before ? b->before : a->before;
        }
        if (i)
            free(recording.events);
        else
            best = recording;
    }
    return best;
}

/* -- replaying -- */

typedef struct machine {
    int threads;
    double line; /* seconds that a cache line takes from one core to another */
} machine;

/* Waking all threads, and their meeting at the end, where each changes the same line. */
static double fork_seconds(const machine *m, int threads) {
    return threads > 1 ? (FORK_LINES + threads) * m->line : 0;
}

static int earliest(const double *clock, int threads) {
    int least = 0;
    for (int i = 1; i < threads; i++) least = clock[i] < clock[least] ? i : least;
    return least;
}

static double latest(const double *clock, int threads) {
    double most = 0;
    for (int i = 0; i < threads; i++) most = clock[i] > most ? clock[i] : most;
    return most;
}

/* Tasks that wait for none: whoever is free takes the next. All count in one line. */
static double replay_tasks(const machine *m, const event *e, size_t count) {
    double clock[MAX_THREADS] = {0}, counter = 0;
    int threads = (int)nsa__min(m->threads, (int64_t)count);
    for (size_t i = 0; i < count; i++) {
        int at = earliest(clock, threads);
        if (threads > 1) {
            counter = (counter > clock[at] ? counter : clock[at]) + m->line;
            clock[at] = counter;
        }
        clock[at] += e[i].seconds;
    }
    return latest(clock, threads) + fork_seconds(m, threads);
}

/* A task that is split, as it is simulated. */
typedef struct split {
    size_t at;           /* its next event; `count`: none is left */
    double free, joined; /* when it may be claimed, and when all of its parts have been joined */
} split;

static size_t next_step(const event *e, size_t count, size_t at, int32_t task) {
    while (at < count && e[at].task != task) at++;
    return at;
}

/* The thread's next step, as nsa__split_work looks for it. Returns when it ends, or when to look
   again; HUGE_VAL if all tasks have ended. Parts that wait for each other's softmax are replayed as
   if they did not. */
static double split_step(const machine *m, const event *e, size_t count, split *s, int tasks,
                         int me, double now) {
    double again = HUGE_VAL;
    for (int i = 0; i < tasks; i++) {
        const int32_t task = i < e->first ? (me + i) % e->first : i;
        split *of = &s[task];
        const event *next = &e[of->at];
        if (of->at == count) continue;
        const double from = next->goes_on && of->joined > of->free ? of->joined : of->free;
        if (from > now) {
            again = from < again ? from : again;
            continue;
        }
        of->free = now + m->line + (next->goes_on ? next->seconds : 0);
        now += m->line + next->seconds;
        of->joined = now > of->joined ? now : of->joined;
        of->at = next_step(e, count, of->at + 1, task);
        return now;
    }
    return again;
}

static double replay_splits(const machine *m, const event *e, size_t count) {
    double clock[MAX_THREADS] = {0}, end = 0;
    int tasks = 0, left = m->threads;
    for (size_t i = 0; i < count; i++) tasks = e[i].task >= tasks ? e[i].task + 1 : tasks;
    split *s = (split *)allocate((size_t)tasks * sizeof *s);
    for (int i = 0; i < tasks; i++) s[i] = (split){next_step(e, count, 0, i), 0, 0};
    while (left) {
        const int me = earliest(clock, m->threads);
        end = clock[me] > end ? clock[me] : end;
        clock[me] = split_step(m, e, count, s, tasks, me, clock[me]);
        left -= clock[me] == HUGE_VAL;
    }
    free(s);
    return end + fork_seconds(m, m->threads);
}

/* A simulated slot of nsa__ordered. */
typedef struct slot {
    size_t share, add, end; /* of the events: the next of either kind, and behind the task's last */
    int32_t task;
    int claimed, pending;
} slot;

/* A task, as it is simulated. */
typedef struct turn {
    size_t begin;
    int32_t left;
    double since; /* when `left` was written */
    int thread;   /* who wrote it */
} turn;

typedef struct ordered {
    const machine *m;
    const event *e;
    turn *task;
    int32_t tasks;
    slot *slots;
    int threads;
} ordered;

static int is_add(const event *e) {
    return e->left != e->leaves;
}

/* The first event from `at` on that adds, or does not; the task's last, which only ends it, is
   neither. */
static size_t next_of(const ordered *t, const slot *p, size_t at, int add) {
    while (at + 1 < p->end && is_add(&t->e[at]) != add) at++;
    return at;
}

static void slot_take(ordered *t, slot *p, int64_t of) {
    p->task = (int32_t)nsa__min(of, t->tasks);
    p->end = of < t->tasks ? t->task[p->task + 1].begin : 0;
    p->claimed = p->pending = 0;
    if (!p->end) return;
    p->share = next_of(t, p, t->task[p->task].begin, 0);
    p->add = next_of(t, p, t->task[p->task].begin, 1);
}

/* Whether the task before has left the tiles up to `tile`. */
static int may_enter(const ordered *t, const event *e, int32_t tile, double now) {
    const turn *before = e->predecessor < 0 ? NULL : &t->task[e->predecessor];
    return !before || (before->left > tile && before->since <= now);
}

/* The event that the slot's task goes on with, as nsa__backward_step does; its end where it may not
   go on. */
static size_t next_event(const ordered *t, const slot *p, double now) {
    const event *last = &t->e[p->end - 1];
    if (p->pending && may_enter(t, last, t->e[p->add].leaves - 1, now)) return p->add;
    if (p->share + 1 < p->end && p->pending < NSA__PENDING) return p->share;
    return !p->pending && p->share + 1 == p->end && may_enter(t, last, INT32_MAX - 1, now)
               ? p->end - 1
               : p->end;
}

/* The slot that the thread goes to; -1: none yet, -2: none will come. */
static int find_slot(const ordered *t, double now) {
    int best = -1, idle = 0;
    for (int i = 0; i < t->threads * NSA__TASK_SLOTS; i++) {
        const slot *p = &t->slots[i];
        if (p->task >= t->tasks || p->claimed) continue;
        idle = 1;
        if ((best < 0 || p->task < t->slots[best].task) && next_event(t, p, now) < p->end) best = i;
    }
    return best >= 0 ? best : idle ? -1 : -2;
}

/* When event `at` ends that thread `me` begins at `now`. Sums come from the core that had them. */
static double event_end(const ordered *t, size_t at, int me, double now) {
    const event *e = &t->e[at];
    if (is_add(e) && e->predecessor >= 0 && t->task[e->predecessor].thread != me)
        now += t->m->line * (1 + (double)e->bytes / 64 / LINES_AT_ONCE);
    return now + e->seconds;
}

/* What holds after event `at`; 1 where that was the task's last. */
static int finish(ordered *t, slot *p, size_t at, int me, double now) {
    turn *of = &t->task[p->task];
    if (is_add(&t->e[at])) {
        of->left = t->e[at].leaves;
        of->since = now + t->m->line;
        of->thread = me;
    }
    if (at + 1 == p->end) {
        slot_take(t, p, p->task + (int64_t)t->threads * NSA__TASK_SLOTS);
        return 1;
    }
    if (at == p->add) {
        p->pending--;
        p->add = next_of(t, p, at + 1, 1);
    } else {
        p->pending += is_add(&t->e[at + 1]) && at + 2 < p->end;
        p->share = next_of(t, p, at + 1, 0);
    }
    return 0;
}

/* The events of all threads in the order of their ends: the one who is first goes on. */
static double replay_threads(ordered *t) {
    double clock[MAX_THREADS] = {0}, end = 0;
    size_t doing[MAX_THREADS];
    int at[MAX_THREADS], left = t->threads;
    const double look = t->m->line * (1 + (double)t->threads * NSA__TASK_SLOTS / LINES_AT_ONCE);
    for (int i = 0; i < t->threads; i++) at[i] = -1, doing[i] = 0;
    while (left) {
        int me = earliest(clock, t->threads);
        double now = clock[me];
        slot *p = at[me] < 0 ? NULL : &t->slots[at[me]];
        if (p && doing[me] < p->end && finish(t, p, doing[me], me, now)) p = NULL;
        if (p && (doing[me] = next_event(t, p, now)) < p->end) {
            clock[me] = event_end(t, doing[me], me, now);
            continue;
        }
        if (p) p->claimed = 0;
        at[me] = find_slot(t, now);
        clock[me] = at[me] == -2 ? HUGE_VAL : now + look;
        if (at[me] >= 0) {
            t->slots[at[me]].claimed = 1;
            doing[me] = t->slots[at[me]].end;
        }
        left -= at[me] == -2;
        end = now > end ? now : end;
    }
    return end;
}

static double replay_ordered(const machine *m, const event *e, size_t count) {
    ordered t = {m, e, NULL, e[count - 1].task + 1, NULL, 0};
    t.threads = (int)nsa__min(m->threads, t.tasks);
    t.task = (turn *)allocate(((size_t)t.tasks + 1) * sizeof *t.task);
    t.slots = (slot *)allocate((size_t)t.threads * NSA__TASK_SLOTS * sizeof *t.slots);
    for (int32_t i = 0; i <= t.tasks; i++) t.task[i] = (turn){count, 0, 0, -1};
    for (size_t i = count; i-- > 0;) t.task[e[i].task] = (turn){i, e[i].left, 0, -1};
    for (int i = 0; i < t.threads * NSA__TASK_SLOTS; i++) slot_take(&t, &t.slots[i], i);
    double end = replay_threads(&t);
    free(t.task);
    free(t.slots);
    return end + fork_seconds(m, t.threads);
}

/* -- reporting -- */

/* What a parallel region is for; the rest is what one thread does between them. */
static const struct {
    intptr_t what;
    const char *name;
} names[] = {{(intptr_t)nsa__pack_task, "pack"},
             {(intptr_t)nsa__forward_task, "attend"},
             {(intptr_t)nsa__split_work, "attend, split"},
             {(intptr_t)nsa__key_gradient_task, "add dk, dv"},
             {(intptr_t)nsa__decode_task, "sequence"},
             {(intptr_t)nsa__append_token, "append"},
             {(intptr_t)nsa__filter_task, "compress"},
             {(intptr_t)nsa__filter_input_gradient_task, "compress"},
             {(intptr_t)nsa__gate_forward_token, "gate"}};

static const char *name_of(intptr_t what) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].what == what) return names[i].name;
    return what ? "other" : "attend";
}

/* Regions of one name and branch together. */
typedef struct part {
    const char *name, *branch;
    size_t tasks;
    double alone, together, longest;
} part;

enum { MAX_PARTS = 64 };

typedef struct summary {
    part parts[MAX_PARTS];
    int count;
    double alone, together;
} summary;

static void add_part(summary *s, const char *name, const char *branch, size_t tasks, double alone,
                     double together, double longest) {
    int i = 0;
    while (i < s->count && (strcmp(s->parts[i].name, name) || s->parts[i].branch != branch)) i++;
    if (i == MAX_PARTS) exit(1);
    if (i == s->count) s->parts[s->count++] = (part){name, branch, 0, 0, 0, 0};
    part *p = &s->parts[i];
    p->tasks += tasks;
    p->alone += alone;
    p->together += together;
    p->longest = longest > p->longest ? longest : p->longest;
    s->alone += alone;
    s->together += together;
}

static int same_region(const event *a, const event *b) {
    if (a->first) return b->first && !b->begins;
    return a->what == b->what && (a->what ? b->task > a->task : b->task >= a->task);
}

static summary replay(const machine *m, const record *r) {
    static const char *const branches[] = {"cmp", "slc", "win", "dense"};
    summary s;
    memset(&s, 0, sizeof s);
    for (size_t i = 0; i < r->count;) {
        const event *e = &r->events[i];
        size_t n = 1, tasks = 1;
        double alone = e->seconds, longest = 0, of_task = e->seconds;
        for (; i + n < r->count && same_region(&e[n - 1], &e[n]); n++) {
            int next = e[n].task != e[n - 1].task;
            of_task = (next ? 0 : of_task) + e[n].seconds;
            longest = of_task > longest ? of_task : longest;
            tasks += (size_t)next;
            alone += e[n].seconds;
        }
        const char *branch = !e->what || is_attention(e->what) ? branches[e->branch] : "";
        add_part(&s, "one thread alone", "", 0, e->before, e->before, e->before);
        add_part(&s, name_of(e->what), branch, tasks, alone,
                 (e->first  ? replay_splits
                  : e->what ? replay_tasks
                            : replay_ordered)(m, e, n),
                 longest);
        i += n;
    }
    return s;
}

typedef struct simulation {
    machine m;
    FILE *json;
    int rows;
} simulation;

static void print_summary(const summary *s, const machine *m) {
    for (int i = 0; i < s->count; i++) {
        const part *p = &s->parts[i];
        printf("  %-6s%-17s %6zu tasks %9.3f ms, longest %8.3f; %8.3f ms, %5.1f %% of the time\n",
               p->branch, p->name, p->tasks, 1e3 * p->alone, 1e3 * p->longest, 1e3 * p->together,
               100 * p->together / s->together);
    }
    printf("  in all %.1f ms, %d threads %.2f ms: efficiency %.2f\n", 1e3 * s->alone, m->threads,
           1e3 * s->together, s->alone / s->together / m->threads);
}

static void measure_pass(simulation *o, const shape *of, problem *p, const char *branch,
                         const char *pass, run *f) {
    p->d.threads = 1;
    record r = record_run(f, p);
    summary s = replay(&o->m, &r);
    const double alone = s.alone;
    free(r.events);
    p->d.threads = o->m.threads;
    r = record_run(f, p);
    s = replay(&o->m, &r);
    s.alone = alone;
    printf("%s %s, %d heads over %d, %d wide, %d tokens\n", branch, pass, of->heads, of->kv_heads,
           of->dim, of->tokens);
    print_summary(&s, &o->m);
    free(r.events);
    if (!o->json) return;
    fprintf(o->json,
            "%s\n    {\"branch\": \"%s\", \"pass\": \"%s\", \"heads\": %d, \"kv_heads\": %d, "
            "\"dim\": %d, \"tokens\": %d, \"threads\": %d, \"one_thread_ms\": %.1f, "
            "\"simulated_ms\": %.2f, \"efficiency\": %.3f}",
            o->rows++ ? "," : "", branch, pass, of->heads, of->kv_heads, of->dim, of->tokens,
            o->m.threads, 1e3 * s.alone, 1e3 * s.together, s.alone / s.together / o->m.threads);
}

static void measure(simulation *o, const shape *s) {
    problem p;
    problem_make_as(&p, NSA_F32, s, o->m.threads);
    measure_pass(o, s, &p, "nsa", "fwd", run_nsa);
    measure_pass(o, s, &p, "nsa", "bwd", run_nsa_backward);
    measure_pass(o, s, &p, "dense", "fwd", run_dense);
    measure_pass(o, s, &p, "dense", "bwd", run_dense_backward);
    problem_free(&p);
}

static nsa_status run_decode(problem *p) {
    decoding *c = (decoding *)(void *)p; /* which the problem is the first part of */
    c->cache.desc.threads = p->d.threads;
    return run_step(c, NSA_STEP);
}

static void measure_decode(simulation *o, const shape *s, int batch) {
    decoding c;
    decoding_make(&c, NSA_F32, s, batch, o->m.threads);
    measure_pass(o, s, &c.p, "nsa", "step", run_decode);
    decoding_free(&c);
}

typedef struct options {
    int64_t threads, decode;
    double line;
    const char *json;
    option_list shapes;
} options;

static const option own[] = {
    {.flag = "--threads",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, threads),
     .min = 1,
     .max = MAX_THREADS,
     .initial = "64",
     .help = "how many are simulated"},
    {.flag = "--line",
     .kind = OPTION_NUMBER,
     .offset = offsetof(options, line),
     .max = 1e9,
     .initial = "100",
     .help = "nanoseconds that a cache line takes from one core to another"},
    {.flag = "--decode",
     .kind = OPTION_INTEGER,
     .offset = offsetof(options, decode),
     .max = 4096,
     .words = "BATCH",
     .help = "a step of decoding of so many sequences alone; parts of one task that wait for each\n"
             "other's softmax are replayed as if they did not"},
    {.flag = "--shape",
     .kind = OPTION_LIST,
     .offset = offsetof(options, shapes),
     .words = "H,Hk,D,T",
     .help = "query heads, kv heads, width, tokens; may be given several times;\n"
             "default: the five of the tables at 8192 tokens"},
    {.flag = "--json",
     .kind = OPTION_TEXT,
     .offset = offsetof(options, json),
     .words = "FILE",
     .help = "where the figures go, beside the table"},
};

static const option_command command = {
    .name = "many_threads",
    .summary = "how well a call would share its work among more threads than there are.",
    .words = "",
    .rows = own,
    .count = sizeof own / sizeof *own,
};

int main(int argc, char **argv) {
    shape shapes[OPTION_LIST_MOST] = {{16, 1, 64, 8192, 0},
                                      {16, 4, 128, 8192, 0},
                                      {12, 12, 64, 8192, 0},
                                      {12, 2, 64, 8192, 0},
                                      {64, 4, 128, 8192, 0}};
    options given = {0};
    command_read(&command, argc, argv, &given);
    int count = command_shapes(command.name, &given.shapes, shapes);
    simulation s = {
        {(int)given.threads, 1e-9 * given.line}, command_json(command.name, given.json), 0};
#ifdef _OPENMP
    omp_set_max_active_levels(0); /* one thread, of however many a call asks for */
#endif
    if (s.json) report_origin(s.json);
    if (s.json) fprintf(s.json, "  \"line_ns\": %.0f,\n  \"rows\": [", given.line);
    for (int i = 0; i < (count ? count : 5); i++) {
        if (given.decode)
            measure_decode(&s, &shapes[i], (int)given.decode);
        else
            measure(&s, &shapes[i]);
    }
    if (s.json) fprintf(s.json, "\n  ]\n}\n");
    return s.json ? fclose(s.json) != 0 : 0;
}
