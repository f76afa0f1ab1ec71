/* ---- Attention: forward, a call -----------------------------------------------------------------
   Twin: none. Not here: a task (attend_forward.h, attend_split.h). */
#pragma once
#include "attend_split.h"

/* Head jobs of sequences with few queries that run side by side; of the chain, those of three
   branches. */
static int64_t nsa__in_place_slots(const nsa__attend_plan *p) {
    return (p->select ? 3 : 1) * nsa__min(2 * NSA__TASKS, (int64_t)p->d->batch * p->heads);
}

/* What the jobs take of the shared workspace. A plan counts it, without a base. Returns the jobs
   that read in place. */
static nsa__head_job *nsa__forward_layout(nsa__head_job *jobs, const nsa__attend_plan *p,
                                          nsa__arena *shared) {
    nsa__head_job *in_place =
        (nsa__head_job *)nsa__alloc(shared, nsa__in_place_slots(p), sizeof(nsa__head_job));
    for (int i = 0; i < p->cut.head_slots; i++) {
        nsa__head_job *job = &jobs[i];
        *job = nsa__job_make(p);
        if (p->d->count <= p->cut.in_place_max) continue;
        const int64_t keys = nsa__alloc_keys(job, shared);
        job->rows_over[NSA__OF_V] = nsa__alloc_reals(shared, keys * p->v.wide);
    }
    return in_place;
}

/* Plans for `x`, which is NULL in a size query. */
static nsa__attend_plan nsa__forward_plan(const nsa_attend *x, const nsa_desc *d,
                                          nsa__branch branch, const nsa_select *select,
                                          const nsa__step *step) {
    const int lists = nsa__traits_of[branch].lists || select;
    nsa__attend_plan p = nsa__attend_plan_of(x, NULL, d, branch, lists, nsa__heads_near(d));
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__split_room room;
    nsa__split split;
    nsa__arena shared = {NULL, 0}, scratch = {NULL, 0};
    p.select = select;
    p.step = step;
    p.cut.in_place_max = p.cut.batch_queries;
    nsa__forward_layout(jobs, &p, &shared);
    nsa__split_room_alloc(&room, &p, &scratch);
    p.room = scratch.used;
    nsa__split_alloc(&split, &p, &scratch);
    p.shared = shared.used;
    p.scratch = nsa__pack_scratch(&p, scratch.used);
    return p;
}

static void nsa__forward_heads(nsa__head_job *jobs, const nsa__team *team) {
    nsa__run(team, nsa__query_tasks(jobs), nsa__forward_task, jobs);
}

/* Threads for n jobs that read in place. */
static int nsa__in_place_threads(const nsa__head_job *jobs, int64_t n, const nsa__team *team) {
    int64_t work = 0;
    for (int64_t i = 0; i < n; i++) {
        const nsa__attend_plan *p = jobs[i].plan;
        int64_t keys = (int64_t)(jobs[i].tile_end - jobs[i].tile_begin) * p->cut.tile;
        if (p->is.lists) keys = nsa__min(keys, (int64_t)p->list_width * p->d->slc_block);
        keys *= nsa__ceil_div((int64_t)jobs[i].seq.count * p->group, NSA__LANES) * NSA__LANES;
        work += keys * (p->k.wide + p->v.wide);
    }
    return nsa__threads_for(team->threads, work);
}

/* Runs n jobs, which may have too little work for all threads. Those with fewer tasks than others
   have empty ones. */
static void nsa__in_place_run(nsa__head_job *jobs, int n, const nsa__team *team) {
    nsa__team fewer = *team;
    int64_t most = 0;
    for (int i = 0; i < n; i++) {
        most = nsa__max(most, nsa__head_tasks(&jobs[i]));
        jobs[i].heads = n;
    }
    fewer.threads = nsa__in_place_threads(jobs, n, team);
    nsa__run(&fewer, n * most, nsa__forward_task, jobs);
}

/* Runs the sequences with few queries and the queries that gather, which read keys in place.
   Nothing is packed for them, so heads of many sequences run at once. */
static void nsa__forward_in_place(const nsa__head_job *any, nsa__head_job *jobs,
                                  const nsa__team *team) {
    const nsa__attend_plan *p = any->plan;
    int n = 0;
    for (nsa__seq seq = nsa__seq_begin(p->d); seq.nth < p->d->batch; nsa__seq_next(p->d, &seq))
        for (int i = 0; i < 2 * p->heads; i++) {
            const int gathers = i / p->heads;
            const nsa__seq part = nsa__seq_part(p, seq, gathers);
            if (!part.count || (!gathers && part.count > p->cut.in_place_max)) continue;
            jobs[n] = *any;
            jobs[n].gathers = gathers;
            nsa__set_head(&jobs[n], &part, i % p->heads, 0);
            if (++n < nsa__in_place_slots(p)) continue;
            nsa__in_place_run(jobs, n, team);
            n = 0;
        }
    if (n) nsa__in_place_run(jobs, n, team);
}

/* A thread's scratch where tasks of n plans are split, and in it the most of a thread's room. */
static size_t nsa__split_scratch(const nsa__attend_plan *p, int n, size_t *room) {
    size_t task = *room = 0;
    for (int i = 0; i < n; i++) {
        *room = nsa__larger(*room, p[i].room);
        task = nsa__larger(task, p[i].scratch - p[i].room);
    }
    return *room + task;
}

/* The jobs of all sequences and heads, each of one task, or none: of plan i from at[i] on. Returns
   0 if there are sequences with more tasks. */
static int nsa__split_jobs(nsa__head_job *at[3], const nsa__attend_plan *p, int n) {
    const nsa_desc *d = p->d;
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq))
        for (int i = 0; i < n; i++) {
            const int gathers = nsa__seq_part(&p[i], seq, 1).count;
            if (!seq.count || seq.count > (gathers ? 1 : p[i].cut.in_place_max)) return 0;
            for (int head = 0; head < p[i].heads; head++, at[i]++) {
                *at[i] = nsa__job_make(&p[i]);
                at[i]->gathers = gathers;
                nsa__set_head(at[i], &seq, head, 0);
            }
        }
    return 1;
}

/* One plan, or the three of the chain, all of whose tasks are split; slc's begin as those of cmp
   end, which make their lists. Returns 0 if there are not more threads than that. */
static int nsa__forward_split(const nsa__attend_plan *p, int n, void *workspace, size_t bytes) {
    const int64_t batch = p->d->batch, first = batch * p->heads, most = nsa__in_place_slots(p);
    const int64_t win = n == 3 ? batch * p[NSA__WIN].heads : 0;
    const int64_t count = first + win, all_jobs = count + (n == 3 ? first : 0);
    nsa__arena shared = nsa__arena_at(workspace);
    nsa__team team;
    nsa__splits all = {&team, 0, (int)count, (int)first};
    const size_t scratch = nsa__split_scratch(p, n, &all.room);
    if (all_jobs > most || p->d->count > p->cut.in_place_max) return 0;
    if (nsa__team_make(&team, p->d, workspace, bytes, p->shared, scratch) != NSA_OK) return 0;
    nsa__head_job *jobs = (nsa__head_job *)nsa__alloc(&shared, most, sizeof *jobs);
    nsa__head_job *at[] = {jobs, jobs + count, jobs + first};
    if (team.threads <= first || !nsa__split_jobs(at, p, n)) return 0;
    for (int64_t i = 0; n == 3 && i < first; i++) jobs[i].then = &jobs[count + i];
    team.threads = nsa__in_place_threads(jobs, all_jobs, &team);
    if (team.threads <= first || team.threads < count) return 0;
    nsa__split_run(&all, jobs);
    return 1;
}

/* Tasks are more where the threads are, so the jobs have a plan of their own. */
static nsa_status nsa__forward_run(const nsa__attend_plan *p, void *workspace, size_t bytes) {
    nsa__attend_plan own = *p;
    nsa__head_job jobs[NSA__HEADS_NEAR];
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace);
    if (nsa__forward_split(p, 1, workspace, bytes)) return NSA_OK;
    NSA__CHECK(nsa__team_make(&team, p->d, workspace, bytes, p->shared, p->scratch));
    own.cut.least_tasks = nsa__shared_tasks(&p->cut, p->branch, team.threads);
    nsa__head_job *in_place = nsa__forward_layout(jobs, &own, &shared);
    nsa__forward_in_place(jobs, in_place, &team);
    nsa__each_heads(jobs, &team, p->cut.in_place_max, nsa__forward_heads);
    return NSA_OK;
}
