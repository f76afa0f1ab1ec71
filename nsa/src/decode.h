/* ---- Decoding --------------------------------------------------------------------------------
   Twin: kernels/decode.cuh. Not here: the primitives that it runs.
   nsa_decode takes a sequence from length L to L + n:
     1. All checks; nothing has been written before they pass.
     2. newest = max(newest, L + n), because the rings are about to lose rows.
     3. Each task appends its n rows: k_slc and v_slc at L, k_win .. v_raw into rings.
     4. It compresses the blocks that end in the new tokens, from the raw rows of the ring.
     5. cmp, selection, slc, win, gate: the code of forward, with first = L and count = n.
     6. lengths = L + n, if every task has succeeded.
   A ring of R rows holds token s in row s % R: the last R tokens written. R is what a query needs,
   the keys of a window or l, plus max_rewind r. With a need of 3, r = 2 and 8 tokens the rows hold
   | 5 | 6 | 7 | 3 | 4 |. The sequence may go back to length 6, whose last three tokens are 3 to 5,
   and no further. A rewind only sets the length; rows behind it are overwritten when tokens come
   again. */
#pragma once
#include "attention.h"

static nsa_status nsa__cache_check(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    if (!d) return nsa__error(NSA_ERROR_NULL, NSA__AT_desc);
    nsa_desc room = *d;
    room.first = room.count = 0;
    NSA__CHECK(nsa__check_geometry(&room));
    NSA__CHECK(nsa__check_decodes(d));
    if ((unsigned)dtype > NSA_F8 || !(((unsigned)NSA__TENSORS | NSA__SCALED) >> dtype & 1))
        return nsa__error(NSA_ERROR_DTYPE, NSA__AT_dtype);
    return max_rewind < 0 ? nsa__error(NSA_ERROR_SIZE, NSA__AT_max_rewind) : NSA_OK;
}

/* Sets every pointer of the cache; with a base of NULL only counts. */
static void nsa__cache_lay_out(nsa_cache *c, nsa_dtype dtype, nsa__arena *a) {
    nsa__cache_part parts[NSA__PARTS];
    int batch = c->desc.batch, heads = c->desc.kv_heads;
    c->lengths = (int32_t *)nsa__alloc(a, batch, sizeof *c->lengths);
    c->newest = (int32_t *)nsa__alloc(a, batch, sizeof *c->newest);
    nsa__cache_parts(c, parts);
    for (int i = 0; i < NSA__PARTS; i++) {
        int rows = (int)parts[i].count;
        *parts[i].rows = nsa_tensor_bthd(NULL, dtype, rows, heads, parts[i].width);
        parts[i].rows->data = nsa__alloc(a, parts[i].rows->batch * batch, nsa__dtype_bytes(dtype));
    }
}

static size_t nsa__cache_bytes(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    nsa_cache cache;
    nsa__arena a = {NULL, 0};
    cache.desc = *d;
    cache.max_rewind = max_rewind;
    nsa__cache_lay_out(&cache, dtype, &a);
    return a.used + NSA__ALIGN;
}

NSA_API size_t nsa_cache_size(const nsa_desc *d, nsa_dtype dtype, int max_rewind) {
    if (nsa__cache_check(d, dtype, max_rewind) != NSA_OK) return 0;
    return nsa__cache_bytes(d, dtype, max_rewind);
}

NSA_API nsa_status nsa_cache_init(nsa_cache *cache, const nsa_desc *d, nsa_dtype dtype,
                                  int max_rewind, void *memory, size_t bytes) {
    NSA__CHECK(nsa__cache_check(d, dtype, max_rewind));
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    if (!memory || bytes < nsa__cache_bytes(d, dtype, max_rewind))
        return nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_memory);
    nsa__arena a = nsa__arena_at(memory);
    cache->desc = *d;
    cache->desc.first = cache->desc.count = 0;
    cache->desc.begins = NULL;
    cache->max_rewind = max_rewind;
    nsa__cache_lay_out(cache, dtype, &a);
    memset(cache->lengths, 0, (size_t)d->batch * sizeof *cache->lengths);
    memset(cache->newest, 0, (size_t)d->batch * sizeof *cache->newest);
    return NSA_OK;
}

/* NSA_OK if the sequence can be taken back to `length`: the rings hold the rows that a query there
   needs. They lost rows when the sequence was at `newest`, not at its present length. Length 0
   needs no row. */
static nsa_status nsa__check_length(const nsa_cache *c, int sequence, int length) {
    if (!c) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    if (sequence < 0 || sequence >= c->desc.batch)
        return nsa__error(NSA_ERROR_RANGE, NSA__AT_sequence);
    int64_t least = (int64_t)c->newest[sequence] - c->max_rewind;
    if (length < 0 || length > c->lengths[sequence] || (length != 0 && length < least))
        return nsa__error(NSA_ERROR_REWIND, NSA__AT_length);
    return NSA_OK;
}

NSA_API nsa_status nsa_cache_rewind(nsa_cache *cache, int sequence, int length) {
    NSA__CHECK(nsa__check_length(cache, sequence, length));
    cache->lengths[sequence] = length;
    if (length == 0) cache->newest[sequence] = 0;
    return NSA_OK;
}

/* Copies whole rings, because rows are indexed by s % R in both caches; of straight arrays the rows
   before `length`. `newest` goes with them, because the rings are those of the source. */
NSA_API nsa_status nsa_cache_fork(nsa_cache *to, int to_sequence, const nsa_cache *from,
                                  int from_sequence, int length) {
    nsa__cache_part source[NSA__PARTS], into[NSA__PARTS];
    nsa_cache copy;
    NSA__CHECK(nsa__check_length(from, from_sequence, length));
    NSA__CHECK(nsa__check_length(to, to_sequence, 0));
    if (!nsa__same_geometry(to, from) || length > to->desc.tokens)
        return nsa__error(NSA_ERROR_CACHE, NSA__AT_cache);
    copy = *from;
    nsa__cache_parts(&copy, source);
    nsa__cache_parts(to, into);
    for (int i = 0; i < NSA__PARTS && length; i++) {
        int compressed = i == NSA__PART_K_CMP || i == NSA__PART_V_CMP;
        int64_t rows = source[i].ring ? source[i].count
                       : compressed   ? nsa_cmp_count(&from->desc, length)
                                      : length;
        memmove(nsa__row(into[i].rows, to_sequence, 0, 0),
                nsa__row(source[i].rows, from_sequence, 0, 0),
                (size_t)(rows * into[i].rows->token) * nsa__dtype_bytes(into[i].rows->dtype));
    }
    to->newest[to_sequence] = length ? from->newest[from_sequence] : 0;
    to->lengths[to_sequence] = length;
    return NSA_OK;
}

/* What a sequence and its heads of a task return. It is read when all tasks have ended. */
typedef struct nsa__decode_result {
    int64_t reads[3]; /* of cmp, slc and win */
    nsa_status status;
} nsa__decode_result;

/* At most nsa__batch_queries tokens: one task per (sequence, kv head). More: one task per sequence.
   Or one task of all sequences, which uses all threads: see nsa__decode_whole. */
typedef struct nsa__decode_job {
    const nsa_attention *x;
    nsa_cache *cache;
    int count;                   /* new tokens of every sequence, at most */
    int32_t *counts;             /* of every sequence: its new tokens */
    int parts;                   /* tasks of a sequence: its kv heads, or 1 */
    int sequences;               /* of a task: 1, or all of the batch */
    int threads;                 /* of a task */
    size_t shared;               /* bytes of workspace for counts and results */
    size_t bytes;                /* bytes of workspace for a task */
    nsa__decode_result *results; /* of every sequence and part */
} nsa__decode_job;

/* The geometry of a task from sequence b on: the new tokens as queries behind those that the cache
   holds, over all keys up to them; its share of the heads. */
static nsa_desc nsa__decode_desc(const nsa__decode_job *p, int b) {
    const nsa_desc *all = &p->cache->desc;
    nsa_desc d = nsa__slice_desc(all, all->tokens, p->count, all->kv_heads / p->parts);
    d.batch = p->sequences;
    d.threads = p->threads;
    if (!p->counts) return d; /* a size query's */
    d.firsts = p->cache->lengths + b;
    d.counts = p->counts + b;
    return d;
}

/* x from sequence b of the batch and kv head `head` on, over the cache's keys. `joined`: sequences
   of one new token are rows of one, as nsa_desc has queries where there are counts. */
static nsa_attention nsa__decode_views(const nsa_attention *x, const nsa_cache *cache, int b,
                                       int head, int joined) {
    const nsa_desc *d = &cache->desc;
    nsa_attention one = *x;
    nsa_compress *phis[] = {&one.k_cmp, &one.v_cmp};
    nsa_tensor *rows[] = {&one.q,       &one.out_cmp, &one.out_slc, &one.out_win, &one.lse_cmp,
                          &one.lse_slc, &one.lse_win, &one.out,     &one.gates,   &one.blocks};
    nsa__seq seq;
    memset(&seq, 0, sizeof seq);
    seq.batch = seq.keys.batch = seq.cmp.batch = b;
    one.k_slc = cache->k_slc;
    one.v_slc = cache->v_slc;
    one.k_win = cache->k_win;
    one.v_win = cache->v_win;
    one.k_cmp.out = cache->k_cmp;
    one.v_cmp.out = cache->v_cmp;
    one = nsa__slice_views(&one, d, &seq, head);
    for (int i = 0; joined && i < 10; i++) rows[i]->token = rows[i]->batch;
    one.k_cmp.x = nsa__view_at(cache->k_raw, b, 0, head);
    one.v_cmp.x = nsa__view_at(cache->v_raw, b, 0, head);
    one.out = nsa__view_at(one.out, b, 0, (int64_t)d->heads / d->kv_heads * head);
    for (int i = 0; i < 2; i++) {
        nsa_tensor *parameters[] = {&phis[i]->pos, &phis[i]->w1, &phis[i]->b1, &phis[i]->w2,
                                    &phis[i]->b2};
        for (size_t j = 0; j < sizeof parameters / sizeof *parameters; j++)
            *parameters[j] = nsa__view_at(*parameters[j], 0, 0, head);
    }
    return one;
}

/* The new rows of kv heads from `head` on, of sequences from b on. */
typedef struct nsa__append_job {
    nsa__cache_part parts[NSA__PARTS];
    nsa_tensor inputs[NSA__INPUTS];
    int b, head, kv_heads;
} nsa__append_job;

/* Converts a token's rows to the cache's dtype and stores them, in the ring or behind the last. */
static void nsa__append_token(const void *job, const nsa__seq *seq, int64_t t, void *scratch) {
    const nsa__append_job *p = (const nsa__append_job *)job;
    const int64_t b = p->b + seq->nth, token = seq->first + t;
    nsa_real row[NSA__MAX_DIM];
    (void)scratch;
    for (int i = 0; i < NSA__INPUTS; i++) {
        const nsa__cache_part *part = &p->parts[i];
        const nsa_tensor *from = &p->inputs[i];
        const int64_t at = part->ring ? token % part->ring : token;
        for (int h = p->head; h < p->head + p->kv_heads; h++) {
            nsa__load(row, from->dtype, nsa__row(from, b, t, h), part->width);
            nsa__store(part->rows->dtype, nsa__row(part->rows, b, at, h), row, part->width);
        }
    }
}

static void nsa__decode_append(const nsa__decode_job *p, const nsa_desc *d, int b, int head) {
    const nsa__team team = {nsa__threads(d), NULL, 0};
    nsa__append_job job;
    job.b = b;
    job.head = head;
    job.kv_heads = d->kv_heads;
    nsa__cache_parts(p->cache, job.parts);
    nsa__cache_inputs(p->x, job.inputs);
    nsa__run_tokens(&team, d, nsa__append_token, &job);
}

/* The chain over a task's cache: nsa_attention_forward's steps with the new tokens as its queries.
   `reads`, by branch, has a number for each of them and kv head. */
static nsa_status nsa__decode_attend(const nsa_attention *x, nsa_cache *cache, const nsa_desc *d,
                                     int64_t *const reads[3], void *workspace, size_t bytes) {
    nsa__cache_part parts[NSA__PARTS];
    nsa__chain_plan chain;
    nsa__cache_parts(cache, parts);
    const nsa__step steps[] = {
        {0, reads[NSA__CMP]}, {0, reads[NSA__SLC]}, {parts[NSA__PART_K_WIN].ring, reads[NSA__WIN]}};
    nsa__chain_plan_make(&chain, x, d, steps);
    return nsa__chain_run(&chain, x, d, parts[NSA__PART_K_RAW].ring, workspace, bytes);
}

/* One task: append, compress, attend. It returns its status through p->results, because a task has
   no caller that could look at it. Its workspace is the thread's scratch. */
static void nsa__decode_task(const void *context, int64_t nth, void *scratch) {
    const nsa__decode_job *p = (const nsa__decode_job *)context;
    const int b = (int)(nth / p->parts), head = (int)(nth % p->parts);
    const nsa_desc d = nsa__decode_desc(p, b);
    nsa__decode_result *result = &p->results[nth];
    nsa__arena a = nsa__arena_at(scratch);
    int64_t rows = 0, at = 0, *reads[3];
    for (int i = 0; i < p->sequences; i++) rows += d.counts[i];
    for (int i = 0; i < 3; i++)
        reads[i] = (int64_t *)nsa__alloc(&a, rows * d.kv_heads, sizeof **reads);
    memset(result, 0, (size_t)p->sequences * sizeof *result);
    const size_t used = (size_t)(a.base + a.used - (char *)scratch);
    if (p->bytes < used) result->status = nsa__error(NSA_ERROR_WORKSPACE, NSA__AT_workspace);
    if (p->bytes < used || !rows) return;
    for (int i = 0; i < 3; i++) memset(reads[i], 0, (size_t)(rows * d.kv_heads) * sizeof **reads);
    nsa__decode_append(p, &d, b, head);
    const nsa_attention one = nsa__decode_views(p->x, p->cache, b, head, p->sequences > 1);
    result->status =
        nsa__decode_attend(&one, p->cache, &d, reads, a.base + a.used, p->bytes - used);
    for (int i = 0; i < p->sequences; i++)
        for (int64_t end = at + (int64_t)d.counts[i] * d.kv_heads; at < end; at++)
            for (int k = 0; k < 3; k++) result[i].reads[k] += reads[k][at];
}

/* Whether a call is one task of all sequences: of one that is large or has few heads; of several,
   whose new tokens must be one row each, if there are threads enough for two at each head. */
static int nsa__decode_whole(const nsa_desc *all, int count, const int32_t *counts) {
    const int threads = nsa__threads(all);
    if (all->batch == 1) return count > nsa__batch_queries(all) || threads > all->kv_heads;
    for (int b = 0; b < all->batch; b++)
        if ((counts ? counts[b] : count) != 1) return 0;
    return threads / 2 >= (int64_t)all->batch * all->kv_heads;
}

/* What the tasks share. */
static void nsa__decode_layout(nsa__decode_job *p, nsa__arena *shared) {
    const int64_t batch = p->cache->desc.batch;
    p->counts = (int32_t *)nsa__alloc(shared, batch, sizeof *p->counts);
    p->results = (nsa__decode_result *)nsa__alloc(shared, batch * p->parts, sizeof *p->results);
}

/* How a call of this many tokens is cut into tasks, and what they need. `threads` are those of the
   one task of a whole call. Sizes are those of a full cache, so that the workspace stays the same
   while sequences grow. */
static nsa__decode_job nsa__decode_plan(const nsa_attention *x, nsa_cache *cache, int count,
                                        int threads, int whole) {
    const nsa_desc *all = &cache->desc;
    const int few = count <= nsa__batch_queries(all);
    nsa__decode_job p = {x, cache, (int)nsa__min(count, all->tokens), NULL, 1, 1, 1, 0, 0, NULL};
    nsa__chain_plan chain;
    nsa__arena shared = {NULL, 0}, task = {NULL, 0};
    if (whole)
        p.sequences = all->batch, p.threads = threads;
    else if (few)
        p.parts = all->kv_heads;
    nsa_desc d = nsa__decode_desc(&p, 0);
    d.first = d.tokens - d.count;
    nsa__decode_layout(&p, &shared);
    for (int i = 0; i < 3; i++)
        nsa__alloc(&task, (int64_t)p.sequences * p.count * d.kv_heads, sizeof(int64_t));
    nsa__chain_plan_make(&chain, x, &d, NULL);
    p.shared = shared.used;
    p.bytes = nsa__bytes_for(task.used, 1, nsa__chain_plan_bytes(&chain, x, &d, nsa__threads(&d)));
    return p;
}

/* Of all cuts of so many tokens: `counts` decides too. */
static size_t nsa__decode_bytes(const nsa_attention *x, nsa_cache cache, int count) {
    size_t most = 0;
    for (int whole = nsa__decode_whole(&cache.desc, count, NULL); whole >= 0; whole--) {
        const nsa__decode_job p = nsa__decode_plan(x, &cache, count, cache.desc.threads, whole);
        nsa_desc d = cache.desc;
        if (whole) d.threads = 1;
        most = nsa__larger(most, nsa__workspace_bytes(&d, p.shared, p.bytes));
    }
    return most;
}

/* A smaller count can be split into other tasks and need more memory, so take the larger of both
   sizes. */
NSA_API size_t nsa_decode_workspace_size(const nsa_attention *x, const nsa_cache *cache,
                                         int count) {
    if (!x || !cache || count < 0 || nsa__attention_check_sizes(x, &cache->desc) != NSA_OK)
        return 0;
    int step = (int)nsa__min(count, nsa__batch_queries(&cache->desc));
    return nsa__larger(nsa__decode_bytes(x, *cache, step), nsa__decode_bytes(x, *cache, count));
}

/* Checks the views of the chain over the cache's arrays, then those of the new rows. */
static nsa_status nsa__decode_check_views(const nsa_attention *x, const nsa_cache *cache,
                                          int count) {
    nsa_desc d = cache->desc;
    d.count = (int)nsa__min(count, d.tokens);
    const nsa_attention all = nsa__decode_views(x, cache, 0, 0, 0);
    NSA__CHECK(nsa__attention_check(&all, &d, 1));
    return nsa__check_inputs(&nsa__cpu, x, &d);
}

/* At most max_rewind + 1 tokens come at once. All are appended before the first of them attends,
   and the rings must still hold its keys then. */
static nsa_status nsa__decode_check(const nsa_attention *x, const nsa_cache *cache, int count,
                                    const int32_t *counts) {
    if (!cache) return nsa__error(NSA_ERROR_NULL, NSA__AT_cache);
    NSA__CHECK(nsa__attention_check_sizes(x, &cache->desc));
    if (count < 0) return nsa__error(NSA_ERROR_RANGE, NSA__AT_count);
    for (int b = 0; b < cache->desc.batch; b++) {
        int64_t more = counts ? counts[b] : count;
        if (more < 0 || more > count) return nsa__error(NSA_ERROR_RANGE, NSA__AT_counts);
        if (cache->lengths[b] + more > cache->desc.tokens || more - 1 > cache->max_rewind)
            return nsa__error(NSA_ERROR_CACHE, NSA__AT_cache);
    }
    return nsa__decode_check_views(x, cache, count);
}

/* Multiply-adds of the call, from the keys that its tokens read at most. */
static int64_t nsa__decode_work(const nsa__decode_job *p) {
    const nsa_desc *d = &p->cache->desc;
    int64_t keys = 0;
    for (int b = 0; b < d->batch; b++) {
        int count = p->counts[b], held = p->cache->lengths[b] + count;
        keys += count * (nsa_cmp_count(d, held) + nsa__min(d->window, held) +
                         nsa__min((int64_t)d->slc_count * d->slc_block, held));
    }
    return keys * d->kv_heads * nsa__whole_vectors(d->heads / d->kv_heads) * (d->dim + d->dim_v);
}

/* Runs the tasks and adds up their reads. The lengths grow only if all tasks have succeeded.
   `newest` grows before, because a task that fails has written to the rings already. */
static nsa_status nsa__decode_run(nsa__decode_job *p, const nsa__team *team, nsa_reads *reads) {
    nsa_cache *cache = p->cache;
    const int64_t results = (int64_t)cache->desc.batch * p->parts, tasks = results / p->sequences;
    for (int b = 0; b < cache->desc.batch; b++) {
        int length = cache->lengths[b] + p->counts[b];
        if (cache->newest[b] < length) cache->newest[b] = length;
    }
    nsa__run(team, tasks, nsa__decode_task, p);
    for (int64_t i = 0; i < tasks; i++)
        if (p->results[i].status != NSA_OK) return p->results[i].status;
    for (int b = 0; b < cache->desc.batch; b++) cache->lengths[b] += p->counts[b];
    if (reads) memset(reads, 0, (size_t)cache->desc.batch * sizeof *reads);
    for (int64_t i = 0; reads && i < results; i++) {
        reads[i / p->parts].cmp += p->results[i].reads[NSA__CMP];
        reads[i / p->parts].slc += p->results[i].reads[NSA__SLC];
        reads[i / p->parts].win += p->results[i].reads[NSA__WIN];
    }
    return NSA_OK;
}

/* Many tasks: each runs on one thread, with a thread's scratch as its workspace. A single task:
   the plan is made for the fewest threads, so that any sufficient workspace passes. The task then
   gets all of the workspace, and the primitives in it use as many threads as fit. */
NSA_API nsa_status nsa_decode(const nsa_attention *x, nsa_cache *cache, int count,
                              const int32_t *counts, nsa_reads *reads, void *workspace,
                              size_t bytes) {
    nsa__team team;
    nsa__arena shared = nsa__arena_at(workspace);
    NSA__CHECK(nsa__decode_check(x, cache, count, counts));
    nsa_desc d = cache->desc;
    const int whole = nsa__decode_whole(&d, count, counts);
    nsa__decode_job p = nsa__decode_plan(x, cache, count, d.threads ? d.threads : 1, whole);
    if (whole) d.threads = 1;
    NSA__CHECK(nsa__team_make(&team, &d, workspace, bytes, p.shared, p.bytes));
    nsa__decode_layout(&p, &shared);
    for (int b = 0; b < d.batch; b++) p.counts[b] = counts ? counts[b] : count;
    const int worth = nsa__threads_for(nsa__threads(&cache->desc), nsa__decode_work(&p));
    team.threads = (int)nsa__min(team.threads, worth);
    if (whole) { /* gets all of the workspace, whose size decides how many threads */
        p.threads = worth > 1 ? cache->desc.threads : 1;
        p.bytes = bytes - NSA__ALIGN - p.shared;
    }
    return nsa__decode_run(&p, &team, reads);
}
