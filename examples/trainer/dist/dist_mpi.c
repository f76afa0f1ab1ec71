/* dist_mpi.c - the link between processes over MPI, for the CPU, and for GPUs by way of the host.
   Twin: dist_link.h.

   MPI_THREAD_FUNNELED: the training thread alone calls MPI, between layers and while it waits. So
   MPI needs no locks, any build of it will do, and no thread takes a core from the arithmetic.

   Each process sends its blocks straight to their owners and adds up what it gets, rather than
   leave both to MPI_Iallreduce: the order of the sum is ours, bf16 is added in f32, and a process
   that waits knows whose message is missing. The traffic is the least that a reduction can have. */
#include "dist/dist_mpi.h"

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CHUNK = 4096, TAG_WORDS = LINK_ALL, TELL_MS = 500 };

typedef struct lane {
    MPI_Request *requests; /* from each rank, then to each */
    link_bucket bucket;
    bool is_reduction, is_bucket;
} lane;

typedef struct mpi_state {
    MPI_Comm comm;
    lane lanes[LINK_ALL];
    int *completed; /* room for MPI_Testsome */
} mpi_state;

/* ---- What a lane's memory holds ------------------------------------------------------------ */

/* The processes that exchange a bucket: ranks first .. first + count - 1. */
typedef struct members {
    int first, count;
} members;

static members members_of(const dist_link *l, bool inside) {
    members all = {0, l->world}, group = {0, l->group};
    if (!inside) return all;
    group.first = l->rank / l->group * l->group;
    return group;
}

/* A host copy of the bucket where the back end's memory is not the host's; bf16 on their way out
   where they are compressed; what the others send. */
typedef struct parts {
    real *copy;
    char *out, *in;
    size_t value; /* bytes, as it travels */
} parts;

static parts divide(const dist_link *l, const link_bucket *b) {
    size_t elements = (size_t)members_of(l, b->inside).count * (size_t)b->each;
    parts p = {.value = b->compress ? sizeof(uint16_t) : sizeof(real)};
    char *at = b->memory;
    p.copy = b->blocks;
    if (!b->o->host_memory) {
        p.copy = (real *)(void *)at;
        at += elements * sizeof(real);
    }
    p.out = (char *)p.copy;
    if (b->compress) {
        p.out = at;
        at += elements * p.value;
    }
    p.in = at;
    return p;
}

static size_t mpi_lane_bytes(const ops *o, int processes, int64_t each, bool compress) {
    size_t block = (size_t)each, value = compress ? sizeof(uint16_t) : sizeof(real);
    size_t copy = o->host_memory ? 0 : block * sizeof(real), out = compress ? block * value : 0;
    return (size_t)processes * (copy + out + block * value);
}

/* ---- Sending ------------------------------------------------------------------------------- */

/* From and to each other member; the block of r in `in` comes from r, and that in `out`, or where
   `one` is set this process's own, goes to r. */
static void exchange(dist_link *l, int number, members m, const char *out, char *in, size_t bytes,
                     bool one) {
    mpi_state *s = l->state;
    lane *x = &s->lanes[number];
    for (int r = 0; r < 2 * l->world; r++) x->requests[r] = MPI_REQUEST_NULL;
    for (int r = m.first; r < m.first + m.count; r++) {
        const char *block = out + (size_t)((one ? l->rank : r) - m.first) * bytes;
        if (r == l->rank) continue;
        MPI_Irecv(in + (size_t)(r - m.first) * bytes, (int)bytes, MPI_BYTE, r, number, s->comm,
                  &x->requests[r]);
        MPI_Isend(block, (int)bytes, MPI_BYTE, r, number, s->comm, &x->requests[l->world + r]);
    }
}

static void mpi_reduce_start(dist_link *l, int number, const link_bucket *b) {
    mpi_state *s = l->state;
    lane *x = &s->lanes[number];
    members m = members_of(l, b->inside);
    parts p = divide(l, b);
    int64_t count = m.count * b->each;
    x->bucket = *b;
    x->is_bucket = x->is_reduction = true;
    if (!b->o->host_memory) b->o->download(b->o, p.copy, b->blocks, (size_t)count * sizeof(real));
    uint16_t *half = (uint16_t *)(void *)p.out;
    for (int64_t i = 0; b->compress && i < count; i++) half[i] = nsa_f32_to_bf16((float)p.copy[i]);
    exchange(l, number, m, p.out, p.in, (size_t)b->each * p.value, false);
}

static void mpi_gather_start(dist_link *l, int number, const link_bucket *b) {
    mpi_state *s = l->state;
    lane *x = &s->lanes[number];
    members m = members_of(l, b->inside);
    parts p = divide(l, b);
    size_t bytes = (size_t)b->each * sizeof(real);
    int64_t own = (l->rank - m.first) * b->each;
    x->bucket = *b;
    x->is_bucket = true;
    x->is_reduction = false;
    if (!b->o->host_memory) b->o->download(b->o, p.copy + own, b->blocks + own, bytes);
    exchange(l, number, m, (char *)p.copy, (char *)p.copy, bytes, true);
}

static void mpi_share_start(dist_link *l, int number, void *blocks, size_t bytes) {
    mpi_state *s = l->state;
    s->lanes[number].is_bucket = false;
    exchange(l, number, members_of(l, false), blocks, blocks, bytes, true);
}

/* ---- What has come ------------------------------------------------------------------------- */

/* sum += block, or sum = block for the first. Blocks travel as they were sent. */
static void add(real *sum, const char *block, size_t value, int64_t first, int64_t count,
                bool is_first) {
    const real *whole = (const real *)(const void *)block + first;
    const uint16_t *half = (const uint16_t *)(const void *)block + first;
    for (int64_t i = 0; i < count; i++) {
        real x = value == sizeof(uint16_t) ? (real)nsa_bf16_to_f32(half[i]) : whole[i];
        sum[i] = is_first ? x : sum[i] + x;
    }
}

/* In the order of the ranks, whichever came first. */
static void add_up(const dist_link *l, const link_bucket *b) {
    members m = members_of(l, b->inside);
    parts p = divide(l, b);
    int64_t offset = (l->rank - m.first) * b->each;
    real sum[CHUNK], *own = p.copy + offset;
    for (int64_t first = 0; first < b->each; first += CHUNK) {
        int64_t count = b->each - first < CHUNK ? b->each - first : CHUNK;
        for (int r = 0; r < m.count; r++) {
            const char *block = p.in + (size_t)(r * b->each) * p.value;
            if (r == l->rank - m.first)
                add(sum, (const char *)own, sizeof(real), first, count, r == 0);
            else
                add(sum, block, p.value, first, count, r == 0);
        }
        memcpy(own + first, sum, (size_t)count * sizeof *own);
    }
    if (!b->o->host_memory)
        b->o->upload(b->o, b->blocks + offset, own, (size_t)b->each * sizeof *own);
}

static void complete(const dist_link *l, const lane *x) {
    const link_bucket *b = &x->bucket;
    if (!x->is_bucket) return;
    if (x->is_reduction)
        add_up(l, b);
    else if (!b->o->host_memory)
        b->o->upload(b->o, b->blocks, divide(l, b).copy,
                     (size_t)(members_of(l, b->inside).count * b->each) * sizeof(real));
}

/* Another process's last words, should there be some. */
static bool hear(dist_link *l, fault *f) {
    mpi_state *s = l->state;
    MPI_Status from;
    char text[FAULT_BYTES];
    int waiting = 0, length;
    MPI_Iprobe(MPI_ANY_SOURCE, TAG_WORDS, s->comm, &waiting, &from);
    if (!waiting) return false;
    MPI_Recv(text, sizeof text, MPI_CHAR, from.MPI_SOURCE, TAG_WORDS, s->comm, &from);
    MPI_Get_count(&from, MPI_CHAR, &length);
    fault_set(f, "rank %d ends the run: %.*s", from.MPI_SOURCE, length, text);
    return true;
}

static link_progress mpi_test(dist_link *l, int number, fault *f) {
    mpi_state *s = l->state;
    lane *x = &s->lanes[number];
    int count, open = 0;
    MPI_Testsome(2 * l->world, x->requests, &count, s->completed, MPI_STATUSES_IGNORE);
    for (int i = 0; i < 2 * l->world; i++) open += x->requests[i] != MPI_REQUEST_NULL;
    if (open) return hear(l, f) ? LINK_ENDED : LINK_WAITING;
    complete(l, x);
    return LINK_DONE;
}

static bool mpi_is_missing(const dist_link *l, int number, int rank) {
    const mpi_state *s = l->state;
    const MPI_Request *r = s->lanes[number].requests;
    return r[rank] != MPI_REQUEST_NULL || r[l->world + rank] != MPI_REQUEST_NULL;
}

/* ---- The end ------------------------------------------------------------------------------- */

/* A process that is stopped takes nothing; the others have it within the time given. */
static void mpi_tell(dist_link *l, const char *text) {
    mpi_state *s = l->state;
    struct timespec nap = {0, 1000000};
    lane *x = &s->lanes[LINK_SMALL];
    int done = 0, length = (int)strnlen(text, FAULT_BYTES - 1);
    for (int r = 0; r < 2 * l->world; r++) x->requests[r] = MPI_REQUEST_NULL;
    for (int r = 0; r < l->world; r++)
        if (r != l->rank) MPI_Isend(text, length, MPI_CHAR, r, TAG_WORDS, s->comm, &x->requests[r]);
    for (int ms = 0; !done && ms < TELL_MS; ms++) {
        MPI_Testall(l->world, x->requests, &done, MPI_STATUSES_IGNORE);
        nanosleep(&nap, NULL);
    }
}

static void mpi_end(dist_link *l, int code) {
    (void)l;
    MPI_Abort(MPI_COMM_WORLD, code);
}

static void mpi_close(dist_link *l) {
    mpi_state *s = l->state;
    MPI_Comm_free(&s->comm);
    for (int i = 0; i < LINK_ALL; i++) free(s->lanes[i].requests);
    free(s->completed);
    MPI_Finalize();
}

static bool launched(void) {
    static const char *const variables[] = {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_SIZE",
                                            "MV2_COMM_WORLD_SIZE"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++)
        if (getenv(variables[i])) return true;
    return false;
}

/* Messages go from process to process anyway. */
static bool mpi_split(dist_link *l, int size, fault *f) {
    (void)f;
    l->group = size;
    return true;
}

dist_link *dist_mpi_open(void) {
    static mpi_state state;
    static dist_link l = {.name = "mpi",
                          .launcher = "mpirun -n N",
                          .state = &state,
                          .split = mpi_split,
                          .lane_bytes = mpi_lane_bytes,
                          .reduce_start = mpi_reduce_start,
                          .gather_start = mpi_gather_start,
                          .share_start = mpi_share_start,
                          .test = mpi_test,
                          .is_missing = mpi_is_missing,
                          .tell = mpi_tell,
                          .end = mpi_end,
                          .close = mpi_close};
    int given;
    if (!launched()) return NULL;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &given);
    MPI_Comm_dup(MPI_COMM_WORLD, &state.comm);
    MPI_Comm_rank(state.comm, &l.rank);
    MPI_Comm_size(state.comm, &l.world);
    state.completed = calloc(2 * (size_t)l.world, sizeof *state.completed);
    bool ok = state.completed != NULL;
    for (int i = 0; i < LINK_ALL; i++)
        ok = (state.lanes[i].requests = calloc(2 * (size_t)l.world, sizeof(MPI_Request))) && ok;
    if (ok) return &l;
    fprintf(stderr, "rank %d: out of memory\n", l.rank);
    MPI_Abort(MPI_COMM_WORLD, 1);
    return NULL;
}
