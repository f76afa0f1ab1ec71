/* ---- Attention: heads and queries ---------------------------------------------------------------
   Twin: none. Not here: products. */
#pragma once
#include "threads.h"
#include "attend_pack.h"

/* Sets sequence and kv head; computes the range of tiles its queries need. */
static void nsa__set_head(nsa__head_job *job, const nsa__seq *seq, int head, int heads) {
    const nsa__attend_plan *p = job->plan;
    int last = seq->first + seq->count - 1;
    job->seq = *seq;
    job->head = head;
    job->kv_head = head / p->lists_per_kv_head;
    job->heads = heads;
    job->task_queries = nsa__task_queries(&p->cut, p->d, p->branch, seq->tokens, seq->count);
    job->keys = p->is.compressed ? seq->cmp_tokens : seq->tokens;
    job->rows = p->is.compressed ? seq->cmp : seq->keys;
    if (p->step) job->rows.ring = p->step->ring;
    job->in_place = job->gathers || seq->count <= p->cut.in_place_max;
    if (job->gathers) job->task_queries = 1;
    job->tile_begin = nsa__span_begin(p, seq->first) / p->cut.tile;
    job->tile_end = (int)nsa__ceil_div(nsa__span_end(job, last), p->cut.tile);
    if (job->listed && !job->in_place) nsa__mark_listed(job);
}

/* Makes heads of a sequence, from `head` on, those of the jobs, one a head slot, and packs their
   keys, if they are not read in place. The head jobs are neighbours in `jobs`. */
static void nsa__pack_heads(nsa__head_job *jobs, const nsa__team *team, const nsa__seq *seq,
                            int head) {
    const nsa__attend_plan *p = jobs->plan;
    int heads = (int)nsa__min(p->cut.head_slots, p->heads - (int64_t)head);
    for (int i = 0; i < heads; i++) nsa__set_head(&jobs[i], seq, head + i, heads);
    if (jobs->in_place) return;
    nsa__run(team, (int64_t)heads * (jobs->tile_end - jobs->tile_begin), nsa__pack_task, jobs);
}

/* Packs the keys of a few heads of a sequence, then calls `work` for them: for all heads of every
   sequence with more than `few` queries, not counting those that forward gathers. Packing and work
   are two parallel loops, because a task reads tiles that other threads have packed. */
static void nsa__each_heads(nsa__head_job *jobs, const nsa__team *team, int few,
                            void (*work)(nsa__head_job *jobs, const nsa__team *team)) {
    const nsa__attend_plan *p = jobs->plan;
    const nsa_desc *d = p->d;
    for (nsa__seq seq = nsa__seq_begin(d); seq.nth < d->batch; nsa__seq_next(d, &seq)) {
        const nsa__seq part = p->dx ? seq : nsa__seq_part(p, seq, 0);
        for (int head = 0; part.count > few && head < p->heads; head += jobs->heads) {
            nsa__pack_heads(jobs, team, &part, head);
            work(jobs, team);
        }
    }
}

/* Loads the rows of a task's queries, q or dout, as products take them, with zeros behind: times
   the operand's scale, if they take a factor. A row with a non-finite value becomes zeros, and its
   nonfinite[r] is set. */
static void nsa__load_queries(const nsa__head_job *job, const nsa__tile_iter *it,
                              const nsa_tensor *x, const nsa__operand *o, nsa_real *to,
                              unsigned char *nonfinite) {
    const int rows = it->queries * job->plan->group, scaled = nsa__takes_reals(o);
    for (int r = 0; r < rows; r++) {
        nsa_real *row = to + (ptrdiff_t)r * o->stride;
        if (!nsa__copy_row(o, row, x, nsa__walk_queries(job, it, x, o->width, r))) nonfinite[r] = 1;
        if (scaled) o->tiles->scale(o->wide, o->scale, row, row);
    }
    nsa__zero_nonfinite(o, rows, to, nonfinite); /* behind scale, times which it may be too large */
}

/* The number of a row in x, as lse. If it is not finite, the result is 0 and the row is marked: of
   lse also where a query has no keys (-inf), without effect, because it reads no tile. */
static nsa_real nsa__load_number(const nsa__head_job *job, const nsa__tile_iter *it,
                                 const nsa_tensor *x, int r, unsigned char *nonfinite) {
    nsa_real number;
    nsa__load(&number, x->dtype, nsa__query_row(job, it, x, r), 1);
    if (!nsa__is_finite((double)number)) nonfinite[r] = 1;
    return nonfinite[r] ? 0 : number;
}
