/* dist.c - buckets, waiting with an end, sums and comparisons. Twin: dist.h. */
#include "dist/dist.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/signals.h"

/* What a process may share at once; a long wait sleeps between looks; its end until the settings
   are known; time for rank 0 to write how the run ended. */
enum { SHARE_BYTES = 1024, NAP_NS = 50000, TIMEOUT_S = 120, PARTING_S = 3 };

/* Blocks are a multiple of this many elements, so that each begins on a line of cache. */
enum { ALIGN = 16 };

/* ---- Opening and closing ------------------------------------------------------------------- */

dist dist_alone(void) {
    dist d = {.world = 1, .context = 1, .next = -1, .oldest = -1};
    return d;
}

int dist_groups(const dist *d) {
    return d->world / d->context;
}

int dist_group(const dist *d) {
    return d->rank / d->context;
}

/* How many processes a launcher says that it has started (1: none says so), and its name. */
static int announced_processes(const char **launcher) {
    static const struct {
        const char *variable, *launcher;
    } known[] = {{"OMPI_COMM_WORLD_SIZE", "mpirun"},
                 {"PMI_SIZE", "mpiexec or srun"},
                 {"MV2_COMM_WORLD_SIZE", "mpirun"}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *value = getenv(known[i].variable);
        *launcher = known[i].launcher;
        if (value && atoi(value) > 0) return atoi(value);
    }
    return 1;
}

/* Of groups of processes that divide sequences, each takes its rows of a batch. */
static bool check_shares(const dist *d, const config *c, fault *f) {
    int64_t context = c->runtime.context_parallel, rows = c->train.batch_size;
    const char *how = d->link ? d->link->launcher : "mpirun -n N (a build with MPI)";
    if (d->world % context)
        return fault_set(f,
                         "runtime.context_parallel = %lld: must divide the number of processes, "
                         "and there %s %d; they are started with %s",
                         (long long)context, d->world == 1 ? "is" : "are", d->world, how);
    if (context > 1 && c->train.seq_len % (2 * context))
        return fault_set(f,
                         "train.seq_len = %lld: must be a multiple of %lld, twice "
                         "runtime.context_parallel: a process takes two parts of a sequence",
                         (long long)c->train.seq_len, (long long)(2 * context));
    if (rows % (d->world / context) == 0) return true;
    if (context == 1)
        return fault_set(f, "train.batch_size = %lld: must be a multiple of the %d processes",
                         (long long)rows, d->world);
    return fault_set(f,
                     "train.batch_size = %lld: must be a multiple of %lld: %d processes in groups "
                     "of runtime.context_parallel = %lld",
                     (long long)rows, (long long)(d->world / context), d->world,
                     (long long)context);
}

static bool check_launch(const dist *d, const config *c, fault *f) {
    const config_runtime *r = &c->runtime;
    const char *launcher, *how = d->link ? d->link->launcher : "mpirun -n N (a build with MPI)";
    int announced = announced_processes(&launcher);
    if (announced > 1 && !d->link)
        return fault_set(f, "%s has started %d processes, but this program was built without MPI",
                         launcher, announced);
    if (r->ddp == 1 && d->world == 1)
        return fault_set(f, "--ddp 1: there is one process; several are started with %s", how);
    if (r->ddp == 0 && d->world > 1)
        return fault_set(f, "--ddp 0, but there are %d processes", d->world);
    if (config_from(c, "runtime.world_size") != CONFIG_FROM_DEFAULT && r->world_size != d->world)
        return fault_set(f,
                         "WORLD_SIZE=%lld, but there %s %d process%s: processes are started with "
                         "%s, not with variables",
                         (long long)r->world_size, d->world == 1 ? "is" : "are", d->world,
                         d->world == 1 ? "" : "es", how);
    if (d->link && d->link->needs_device && r->ddp_compress)
        return fault_set(f, "runtime.ddp_compress: must be off over %s", d->link->name);
    return check_shares(d, c, f);
}

bool dist_open(dist *d, dist_link *link, fault *f) {
    *d = dist_alone();
    d->link = link;
    if (link) {
        d->rank = link->rank;
        d->world = link->world;
    }
    d->timeout = TIMEOUT_S;
    d->shared = malloc((size_t)d->world * SHARE_BYTES);
    return d->shared != NULL || fault_set(f, "out of memory");
}

bool dist_settle(dist *d, const config *c, fault *f) {
    d->compress = c->runtime.ddp_compress != 0;
    d->timeout = c->runtime.ddp_timeout;
    d->bucket_bytes = c->runtime.ddp_bucket_mb << 20;
    d->timed = c->telemetry.trace_ddp_buckets;
    if (!check_launch(d, c, f)) return false;
    d->context = (int)c->runtime.context_parallel;
    d->part = d->rank % d->context;
    return true;
}

bool dist_divide(dist *d, int context, fault *f) {
    d->context = context;
    d->part = d->rank % context;
    return context == 1 || d->link->split(d->link, context, f);
}

void dist_detach(dist *d) {
    for (int i = 0; i < LINK_LANES; i++) {
        free(d->memory[i]);
        d->memory[i] = NULL;
    }
    free(d->rows_memory);
    free(d->blocks);
    free(d->times);
    d->rows_memory = NULL;
    d->blocks = NULL;
    d->times = NULL;
    d->o = NULL;
}

void dist_close(dist *d) {
    fault f;
    double nothing = 0;
    if (d->link && !dist_sum(d, &nothing, 1, &f)) dist_end(d, f.text, 1);
    dist_detach(d);
    free(d->shared);
    if (d->link) d->link->close(d->link);
}

/* Rank 0 has written how the run ended when it comes here; the others give it the time for that. */
void dist_end(dist *d, const char *why, int code) {
    struct timespec parting = {PARTING_S, 0};
    if (!d->link) return;
    if (!d->ended) d->link->tell(d->link, why);
    if (d->rank) nanosleep(&parting, NULL);
    d->link->end(d->link, code);
}

/* ---- Buckets ------------------------------------------------------------------------------- */

int64_t dist_multiple(const dist *d) {
    return (int64_t)d->world * ALIGN;
}

static int64_t bucket_elements(const dist *d, int64_t elements) {
    int64_t multiple = dist_multiple(d), most = d->bucket_bytes / (int64_t)sizeof(real);
    int64_t bucket = most / multiple * multiple;
    if (bucket < multiple) bucket = multiple;
    return bucket < elements ? bucket : elements;
}

size_t dist_bytes(const dist *d, const ops *o, int64_t elements) {
    if (!d->link) return 0;
    int64_t bucket = bucket_elements(d, elements);
    int64_t moments = d->rank == 0 && d->world > 1 ? 2 * elements : 0;
    return LINK_LANES * d->link->lane_bytes(o, d->world, bucket / d->world, d->compress) +
           (size_t)(bucket + moments) * sizeof(real);
}

bool dist_attach(dist *d, const ops *o, real *value, real *grad, int64_t elements, fault *f) {
    d->o = o;
    d->value = value;
    d->grad = grad;
    d->elements = elements;
    d->bucket = d->link ? bucket_elements(d, elements) : elements;
    d->buckets = (int)((elements + d->bucket - 1) / d->bucket);
    if (!d->link) return true;
    if (d->link->needs_device && o->host_memory)
        return fault_set(f, "%s connects GPUs; processes on the CPU are started with mpirun",
                         d->link->name);
    if (d->link->needs_device && !o->stream)
        return fault_set(f, "%s: the %s does not say what its operations are launched on",
                         d->link->name, o->name);
    size_t bytes = d->link->lane_bytes(o, d->world, d->bucket / d->world, d->compress);
    bool ok = true;
    for (int i = 0; i < LINK_LANES; i++) ok = (d->memory[i] = malloc(bytes + 1)) && ok;
    d->blocks = malloc((size_t)d->bucket * sizeof *d->blocks);
    if (d->timed) d->times = calloc(2 * (size_t)d->buckets, sizeof *d->times);
    return (ok && d->blocks && (d->times || !d->timed)) ||
           fault_set(f, "out of memory for buckets of gradients: %.1f MiB",
                     (double)dist_bytes(d, o, elements) / (1 << 20));
}

static int64_t bucket_first(const dist *d, int i) {
    return i * d->bucket;
}

static int64_t bucket_count(const dist *d, int i) {
    int64_t left = d->elements - bucket_first(d, i);
    return left < d->bucket ? left : d->bucket;
}

int dist_pieces(const dist *d) {
    return d->buckets;
}

dist_piece dist_piece_at(const dist *d, int i) {
    int64_t count = bucket_count(d, i) / d->world, first = bucket_first(d, i);
    dist_piece p = {first + d->rank * count, count, first / d->world};
    return p;
}

/* ---- Waiting ------------------------------------------------------------------------------- */

/* "rank 1, rank 3" */
static void list_missing(const dist *d, int lane, char *text, size_t bytes) {
    size_t used = 0;
    text[0] = 0;
    for (int r = 0; r < d->world && used + 24 < bytes; r++)
        if (r != d->rank && d->link->is_missing(d->link, lane, r))
            used += (size_t)snprintf(text + used, bytes - used, "%srank %d", used ? ", " : "", r);
}

static void too_late(dist *d, int lane) {
    char missing[256];
    list_missing(d, lane, missing, sizeof missing);
    fault_set(&d->why, "%s: no answer for %g s (--ddp-timeout): dead, stopped or far behind",
              missing[0] ? missing : "another rank", d->timeout);
    d->ended = true;
    d->link->tell(d->link, d->why.text);
}

/* After an end nothing is sent any more: every call returns false with its cause. */
bool dist_ended(const dist *d, fault *f) {
    if (d->ended) *f = d->why;
    return d->ended;
}

/* One look; false once the run has ended. */
static bool look(dist *d, int lane, bool *done) {
    link_progress p = d->link->test(d->link, lane, &d->why);
    *done = p == LINK_DONE;
    if (p == LINK_ENDED) d->ended = true;
    return !d->ended;
}

/* The phase and the layer of this process's own device. */
static uint32_t place(void) {
    return __atomic_load_n(phase_word(), __ATOMIC_RELAXED);
}

/* While this process's own device goes on, nobody keeps it waiting. Nor does time count in which
   the process itself stood still: a machine that slept, all processes stopped at once. It looks
   without a pause for a time, not so and so often: a look may give the processor to others (Open
   MPI's mpi_yield_when_idle), and take as long as they like. */
static bool wait_for(dist *d, int lane, fault *f) {
    static const double awake = 1e-3, longest_nap = 0.1; /* a look later was held up itself */
    struct timespec nap = {0, NAP_NS};
    const double begin = clock_seconds();
    double waited = 0, last = begin;
    uint32_t before = place();
    bool done = false, is_long = false;
    if (dist_ended(d, f)) return false;
    for (;;) {
        if (!look(d, lane, &done)) return !dist_ended(d, f);
        if (done) return true;
        double now = clock_seconds();
        if (now - begin < awake) continue;
        if (!is_long && d->o && lane != LINK_STEP) d->o->mark(d->o, PHASE_COMM, -1);
        is_long = true;
        waited += fmin(now - last, longest_nap);
        last = now;
        if (before != place()) waited = 0, before = place();
        if (waited > d->timeout) {
            too_late(d, lane);
            return !dist_ended(d, f);
        }
        if (d->waiting && signals_stop_requested()) {
            char missing[256];
            list_missing(d, lane, missing, sizeof missing);
            d->waiting(d, waited, missing);
        }
        nanosleep(&nap, NULL);
    }
}

/* ---- A step -------------------------------------------------------------------------------- */

static int lane_of(const dist *d, int bucket) {
    return (d->buckets - 1 - bucket) % LINK_LANES;
}

static link_bucket describe(const dist *d, real *array, int bucket) {
    link_bucket b = {.o = d->o,
                     .blocks = array + bucket_first(d, bucket),
                     .each = bucket_count(d, bucket) / d->world,
                     .compress = d->compress,
                     .memory = d->memory[lane_of(d, bucket)]};
    return b;
}

static void note_time(dist *d, int bucket, int which) {
    if (d->times && d->timing) d->times[2 * bucket + which] = clock_seconds() - d->began;
}

/* The oldest bucket under way, to its end. */
static bool end_oldest(dist *d, fault *f) {
    if (!wait_for(d, lane_of(d, d->oldest), f)) return false;
    note_time(d, d->oldest, 1);
    d->oldest--;
    return true;
}

/* Takes what has come by itself. Buckets end in the order in which they began. */
static void end_ready(dist *d) {
    for (bool done = true; done && d->oldest > d->next;) {
        if (!look(d, lane_of(d, d->oldest), &done)) return;
        if (!done) return;
        note_time(d, d->oldest, 1);
        d->oldest--;
    }
}

/* The next bucket is under way; on the stream nobody asks when it ends. */
static void started(dist *d) {
    d->next--;
    if (!dist_on_stream(d)) return;
    d->oldest = d->next;
    d->unjoined = true;
}

void dist_begin(dist *d) {
    d->next = d->oldest = d->buckets - 1;
    d->began = d->link ? clock_seconds() : 0;
    d->timing = true;
}

void dist_final_from(dist *d, int64_t first) {
    fault unused;
    if (!d->link || d->ended) return;
    end_ready(d);
    while (!d->ended && d->next >= 0 && bucket_first(d, d->next) >= first) {
        if (d->oldest - d->next == LINK_LANES && !end_oldest(d, &unused)) return;
        link_bucket b = describe(d, d->grad, d->next);
        note_time(d, d->next, 0);
        d->link->reduce_start(d->link, lane_of(d, d->next), &b);
        started(d);
    }
}

bool dist_reduced(dist *d, fault *f) {
    dist_final_from(d, 0);
    while (d->link && d->oldest >= 0)
        if (dist_ended(d, f) || !end_oldest(d, f)) return false;
    dist_join(d);
    d->timing = false;
    return !dist_ended(d, f);
}

bool dist_add(dist *d, step_state *s, fault *f) {
    step_state x;
    if (!d->link) return true;
    if (dist_on_stream(d)) {
        d->link->add_start(d->link, d->o, s);
        d->unjoined = true;
        dist_join(d);
        return true;
    }
    d->o->download(d->o, &x, s, sizeof x);
    double sums[] = {x.loss, (double)x.labels, x.squares};
    if (!dist_sum(d, sums, 3, f)) return false;
    x.loss = sums[0];
    x.labels = (int64_t)sums[1];
    x.squares = sums[2];
    d->o->upload(d->o, s, &x, sizeof x);
    return true;
}

bool dist_spread(dist *d, real *array, fault *f) {
    if (!d->link) return true;
    d->next = d->oldest = d->buckets - 1;
    while (d->oldest >= 0) {
        while (d->next >= 0 && d->oldest - d->next < LINK_LANES) {
            link_bucket b = describe(d, array, d->next);
            d->link->gather_start(d->link, lane_of(d, d->next), &b);
            started(d);
        }
        if (d->oldest >= 0 && !end_oldest(d, f)) return false;
    }
    dist_join(d);
    return true;
}

/* ---- Blocks of a divided sequence ----------------------------------------------------------- */

size_t dist_blocks_bytes(const dist *d, const ops *o, int64_t each) {
    return d->link->lane_bytes(o, d->context, each, false);
}

bool dist_attach_blocks(dist *d, const ops *o, int64_t each, fault *f) {
    size_t bytes = dist_blocks_bytes(d, o, each);
    d->rows_memory = malloc(bytes + 1);
    return d->rows_memory != NULL || fault_set(f, "out of memory for rows: %zu bytes", bytes);
}

static void exchange(dist *d, void (*start)(dist_link *l, int lane, const link_bucket *b),
                     real *blocks, int64_t each) {
    fault unused;
    link_bucket b = {.o = d->o, .blocks = blocks, .each = each, .inside = true};
    b.memory = d->rows_memory;
    if (d->ended) return;
    start(d->link, LINK_ROWS, &b);
    d->unjoined = dist_on_stream(d);
    if (d->unjoined)
        dist_join(d);
    else
        (void)wait_for(d, LINK_ROWS, &unused);
}

void dist_gather_blocks(dist *d, real *blocks, int64_t each) {
    exchange(d, d->link->gather_start, blocks, each);
}

void dist_reduce_blocks(dist *d, real *blocks, int64_t each) {
    exchange(d, d->link->reduce_start, blocks, each);
}

/* ---- On the device's streams ---------------------------------------------------------------- */

bool dist_on_stream(const dist *d) {
    return !d->link || (d->link->join && !d->timed);
}

void dist_join(dist *d) {
    if (!d->unjoined) return;
    d->o->mark(d->o, PHASE_COMM, -1);
    d->link->join(d->link, d->o); /* NOLINT: without a link nothing is unjoined */
    d->unjoined = false;
}

void dist_post(dist *d) {
    if (!d->link || !dist_on_stream(d)) return;
    d->link->post(d->link, d->o);
    d->posted = true;
}

bool dist_catch_up(dist *d, fault *f) {
    if (d->posted && !wait_for(d, LINK_STEP, f)) return false;
    d->posted = false;
    return true;
}

/* ---- Moments ------------------------------------------------------------------------------- */

bool dist_collect(dist *d, const real *own, real *whole, fault *f) {
    if (!d->link) {
        d->o->download(d->o, whole, own, (size_t)d->elements * sizeof *whole);
        return true;
    }
    for (int i = 0; i < d->buckets; i++) {
        dist_piece p = dist_piece_at(d, i);
        size_t bytes = (size_t)p.count * sizeof *own;
        if (dist_ended(d, f)) return false;
        d->o->download(d->o, d->blocks + d->rank * p.count, own + p.own, bytes);
        d->link->share_start(d->link, LINK_SMALL, d->blocks, bytes);
        if (!wait_for(d, LINK_SMALL, f)) return false;
        if (d->rank == 0) memcpy(whole + bucket_first(d, i), d->blocks, bytes * (size_t)d->world);
    }
    return true;
}

void dist_pick(const dist *d, real *own, const real *whole) {
    for (int i = 0; i < d->buckets; i++) {
        dist_piece p = dist_piece_at(d, i);
        d->o->upload(d->o, own + p.own, whole + p.first, (size_t)p.count * sizeof *own);
    }
}

/* ---- Sums and comparisons ------------------------------------------------------------------ */

/* Everybody's `bytes`, one behind the other; NULL: the fault says why. */
static const void *share(dist *d, const void *mine, size_t bytes, fault *f) {
    if (bytes > SHARE_BYTES) {
        fault_set(f, "%zu bytes are to be shared at once; at most %d", bytes, SHARE_BYTES);
        return NULL;
    }
    if (dist_ended(d, f)) return NULL;
    memcpy(d->shared + (size_t)d->rank * bytes, mine, bytes);
    d->link->share_start(d->link, LINK_SMALL, d->shared, bytes);
    return wait_for(d, LINK_SMALL, f) ? d->shared : NULL;
}

bool dist_sum(dist *d, double *x, int count, fault *f) {
    if (!d->link) return true;
    const double *all = share(d, x, (size_t)count * sizeof *x, f);
    if (!all) return false;
    for (int i = 0; i < count; i++) {
        x[i] = all[i];
        for (int r = 1; r < d->world; r++) x[i] += all[r * count + i];
    }
    return true;
}

bool dist_largest(dist *d, int64_t *x, int *rank, fault *f) {
    *rank = 0;
    if (!d->link) return true;
    const int64_t *all = share(d, x, sizeof *x, f);
    if (!all) return false;
    for (int r = 1; r < d->world; r++)
        if (all[r] > all[*rank]) *rank = r;
    *x = all[*rank];
    return true;
}

static int how_many(const uint64_t *all, int world, int count, int rank) {
    int same = 0;
    for (int r = 0; r < world; r++)
        same += !memcmp(all + r * count, all + rank * count, (size_t)count * sizeof *all);
    return same;
}

bool dist_same(dist *d, const uint64_t *sums, int count, int *rank, int *which, fault *f) {
    int usual = 0;
    *rank = -1;
    if (!d->link) return true;
    const uint64_t *all = share(d, sums, (size_t)count * sizeof *sums, f);
    if (!all) return false;
    for (int r = 1; r < d->world; r++)
        if (how_many(all, d->world, count, r) > how_many(all, d->world, count, usual)) usual = r;
    for (int r = 0; r < d->world; r++)
        for (int i = 0; i < count && *rank < r; i++)
            if (all[r * count + i] != all[usual * count + i]) *rank = r, *which = i;
    return true;
}
