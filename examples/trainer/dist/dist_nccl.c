/* dist_nccl.c - the link between processes over NCCL, one GPU each. Twin: dist_link.h.

   Buckets are reduced and gathered in place on a stream of their own, behind what the operations'
   stream has been given so far; that stream waits for them, and the host does not. NCCL knows no
   timeout and no names, so a few bytes go over sockets: the processes meet there, share small sums,
   say last words, and call the roll when NCCL keeps them waiting. A sum is taken in NCCL's order,
   which hangs on the layout. */
#include "dist/dist_nccl.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "dist/dist_tcp.h"

enum { MEET_S = 120, ROLL_S = 3, NAP_NS = 1000000 };

typedef struct nccl_state {
    dist_tcp *tcp;
    ncclComm_t comm, group; /* of all processes; of this one's group, or NULL */
    cudaStream_t stream;
    cudaEvent_t ready, joined, step, done[LINK_ALL]; /* of LINK_SMALL none */
    bool failed, called;                             /* the roll is called once */
    fault why;
    bool *missing;
} nccl_state;

static void nap(void) {
    struct timespec t = {0, NAP_NS};
    nanosleep(&t, NULL);
}

/* ---- Failures ------------------------------------------------------------------------------ */

/* The first one is told to the others at once. */
static void note(nccl_state *s, const char *what, const char *why) {
    if (s->failed) return;
    s->failed = true;
    fault_set(&s->why, "%s: %s", what, why);
    tcp_tell(s->tcp, s->why.text);
}

static void demand_cuda(nccl_state *s, const char *what, cudaError_t e) {
    if (e != cudaSuccess) note(s, what, cudaGetErrorString(e));
}

/* A communicator that does not block may still be at it. */
static void demand_of(nccl_state *s, ncclComm_t comm, const char *what, ncclResult_t r) {
    double deadline = clock_seconds() + MEET_S;
    while (r == ncclInProgress && clock_seconds() < deadline) {
        nap();
        ncclCommGetAsyncError(comm, &r);
    }
    if (r != ncclSuccess) note(s, what, ncclGetErrorString(r));
}

static void demand(nccl_state *s, const char *what, ncclResult_t r) {
    demand_of(s, s->comm, what, r);
}

/* ---- Buckets ------------------------------------------------------------------------------- */

static size_t nccl_lane_bytes(const ops *o, int processes, int64_t each, bool compress) {
    (void)o, (void)processes, (void)each, (void)compress;
    return 0;
}

static ncclComm_t comm_of(const nccl_state *s, const link_bucket *b) {
    return b->inside ? s->group : s->comm;
}

static real *own_block(const dist_link *l, const link_bucket *b) {
    return b->blocks + (b->inside ? l->rank % l->group : l->rank) * b->each;
}

static void after_operations(nccl_state *s, const ops *o) {
    demand_cuda(s, "cudaEventRecord", cudaEventRecord(s->ready, (cudaStream_t)o->stream));
    demand_cuda(s, "cudaStreamWaitEvent", cudaStreamWaitEvent(s->stream, s->ready, 0));
}

static void nccl_reduce_start(dist_link *l, int lane, const link_bucket *b) {
    nccl_state *s = l->state;
    ncclComm_t comm = comm_of(s, b);
    after_operations(s, b->o);
    demand_of(s, comm, "ncclReduceScatter",
              ncclReduceScatter(b->blocks, own_block(l, b), (size_t)b->each, ncclFloat32, ncclSum,
                                comm, s->stream));
    demand_cuda(s, "cudaEventRecord", cudaEventRecord(s->done[lane], s->stream));
}

static void nccl_gather_start(dist_link *l, int lane, const link_bucket *b) {
    nccl_state *s = l->state;
    ncclComm_t comm = comm_of(s, b);
    after_operations(s, b->o);
    demand_of(
        s, comm, "ncclAllGather",
        ncclAllGather(own_block(l, b), b->blocks, (size_t)b->each, ncclFloat32, comm, s->stream));
    demand_cuda(s, "cudaEventRecord", cudaEventRecord(s->done[lane], s->stream));
}

/* In one launch. */
static void nccl_add_start(dist_link *l, const ops *o, step_state *sums) {
    nccl_state *s = l->state;
    const struct {
        void *number;
        ncclDataType_t type;
    } parts[] = {
        {&sums->loss, ncclFloat64}, {&sums->labels, ncclInt64}, {&sums->squares, ncclFloat64}};
    after_operations(s, o);
    demand(s, "ncclGroupStart", ncclGroupStart());
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        demand(s, "ncclAllReduce",
               ncclAllReduce(parts[i].number, parts[i].number, 1, parts[i].type, ncclSum, s->comm,
                             s->stream));
    demand(s, "ncclGroupEnd", ncclGroupEnd());
}

static void nccl_join(dist_link *l, const ops *o) {
    nccl_state *s = l->state;
    demand_cuda(s, "cudaEventRecord", cudaEventRecord(s->joined, s->stream));
    demand_cuda(s, "cudaStreamWaitEvent",
                cudaStreamWaitEvent((cudaStream_t)o->stream, s->joined, 0));
}

static void nccl_post(dist_link *l, const ops *o) {
    nccl_state *s = l->state;
    demand_cuda(s, "cudaEventRecord", cudaEventRecord(s->step, (cudaStream_t)o->stream));
}

static void nccl_share_start(dist_link *l, int lane, void *blocks, size_t bytes) {
    nccl_state *s = l->state;
    (void)lane;
    tcp_share_start(s->tcp, blocks, bytes);
}

static link_progress nccl_test(dist_link *l, int lane, fault *f) {
    nccl_state *s = l->state;
    ncclResult_t r = ncclSuccess;
    if (!s->failed && lane == LINK_SMALL) return tcp_test(s->tcp, f);
    cudaError_t e =
        s->failed ? cudaSuccess : cudaEventQuery(lane == LINK_STEP ? s->step : s->done[lane]);
    if (!s->failed && e == cudaSuccess) return LINK_DONE;
    if (e != cudaErrorNotReady) demand_cuda(s, "the device", e);
    ncclComm_t comms[] = {s->comm, s->group};
    for (int i = 0; i < 2; i++)
        if (!s->failed && comms[i] && ncclCommGetAsyncError(comms[i], &r) == ncclSuccess &&
            r != ncclInProgress && r != ncclSuccess)
            note(s, "NCCL", ncclGetErrorString(r));
    if (s->failed) {
        *f = s->why;
        return LINK_ENDED;
    }
    return tcp_ended(s->tcp, f) ? LINK_ENDED : LINK_WAITING;
}

/* Who still answers. All that wait in vain call at about the same time. */
static void call_roll(const dist_link *l) {
    nccl_state *s = l->state;
    double deadline = clock_seconds() + ROLL_S;
    unsigned char *blocks = calloc((size_t)l->world, 1);
    link_progress p = LINK_WAITING;
    fault unused;
    s->called = true;
    if (!blocks) return;
    tcp_share_start(s->tcp, blocks, 1);
    while (p == LINK_WAITING && clock_seconds() < deadline) {
        p = tcp_test(s->tcp, &unused);
        nap();
    }
    for (int r = 0; p == LINK_WAITING && r < l->world; r++)
        s->missing[r] = r != l->rank && tcp_is_missing(s->tcp, r);
    free(blocks);
}

static bool nccl_is_missing(const dist_link *l, int lane, int rank) {
    nccl_state *s = l->state;
    if (lane == LINK_SMALL) return tcp_is_missing(s->tcp, rank);
    if (!s->called) call_roll(l);
    return s->missing[rank];
}

/* ---- The end ------------------------------------------------------------------------------- */

static void nccl_tell(dist_link *l, const char *text) {
    nccl_state *s = l->state;
    tcp_tell(s->tcp, text);
}

/* The others have been told, and torchrun ends those that cannot hear. Destructors would wait for
   the device. */
static void nccl_end(dist_link *l, int code) {
    nccl_state *s = l->state;
    tcp_close(s->tcp);
    _exit(code);
}

static void nccl_close(dist_link *l) {
    nccl_state *s = l->state;
    if (s->group) ncclCommDestroy(s->group);
    ncclCommDestroy(s->comm);
    cudaStreamDestroy(s->stream);
    tcp_close(s->tcp);
    free(s->missing);
}

/* ---- Meeting ------------------------------------------------------------------------------- */

/* A whole number of the environment; `otherwise` where it is not set. */
static bool read_number(const char *name, long otherwise, long most, int *value, fault *f) {
    const char *text = getenv(name);
    char *end;
    errno = 0;
    long x = text && *text ? strtol(text, &end, 10) : otherwise;
    *value = (int)x;
    if (!text || !*text ? otherwise >= 0 : !*end && !errno && x >= 0 && x <= most) return true;
    return fault_set(f, "environment %s=%s: must be an integer in 0 .. %ld", name, text ? text : "",
                     most);
}

/* Rank 0 makes the name of the communicator, and all enter it. */
static bool meet(dist_link *l, fault *f) {
    nccl_state *s = l->state;
    ncclConfig_t settings = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId *ids = calloc((size_t)l->world, sizeof *ids);
    double deadline = clock_seconds() + MEET_S;
    link_progress p = LINK_WAITING;
    if (!ids) return fault_set(f, "out of memory");
    if (l->rank == 0) demand(s, "ncclGetUniqueId", ncclGetUniqueId(&ids[0]));
    tcp_share_start(s->tcp, ids, sizeof *ids);
    while (!s->failed && p == LINK_WAITING && clock_seconds() < deadline) {
        p = tcp_test(s->tcp, f);
        nap();
    }
    settings.blocking = 0;
    if (p == LINK_DONE)
        demand(s, "ncclCommInitRankConfig",
               ncclCommInitRankConfig(&s->comm, l->world, ids[0], l->rank, &settings));
    free(ids);
    if (s->failed) *f = s->why;
    if (p == LINK_WAITING && !s->failed) fault_set(f, "the processes did not meet in %d s", MEET_S);
    return p == LINK_DONE && !s->failed;
}

/* The ranks that have a number in common are a communicator, in the order of their ranks. */
static bool nccl_split(dist_link *l, int size, fault *f) {
    nccl_state *s = l->state;
    ncclConfig_t settings = NCCL_CONFIG_INITIALIZER;
    settings.blocking = 0;
    l->group = size;
    if (s->group) ncclCommDestroy(s->group);
    s->group = NULL;
    demand(s, "ncclCommSplit",
           ncclCommSplit(s->comm, l->rank / size, l->rank, &s->group, &settings));
    ncclResult_t r = ncclSuccess;
    if (!s->failed) ncclCommGetAsyncError(s->group, &r);
    if (!s->failed) demand_of(s, s->group, "ncclCommSplit", r);
    if (s->failed) *f = s->why;
    return !s->failed;
}

static bool prepare_device(nccl_state *s, int local, fault *f) {
    demand_cuda(s, "cudaSetDevice(LOCAL_RANK)", cudaSetDevice(local));
    demand_cuda(s, "cudaStreamCreate",
                cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking));
    cudaEvent_t *events[LINK_ALL + 3] = {&s->ready, &s->joined, &s->step};
    for (int i = 0; i < LINK_ALL; i++) events[3 + i] = &s->done[i];
    for (int i = 0; i < LINK_ALL + 3; i++)
        demand_cuda(s, "cudaEventCreate",
                    cudaEventCreateWithFlags(events[i], cudaEventDisableTiming));
    if (s->failed) *f = s->why;
    return !s->failed;
}

dist_link *dist_nccl_open(fault *f) {
    static nccl_state state;
    static dist_link l = {.name = "nccl",
                          .launcher = "torchrun --nproc-per-node N --no-python",
                          .needs_device = true,
                          .state = &state,
                          .split = nccl_split,
                          .lane_bytes = nccl_lane_bytes,
                          .reduce_start = nccl_reduce_start,
                          .gather_start = nccl_gather_start,
                          .share_start = nccl_share_start,
                          .join = nccl_join,
                          .add_start = nccl_add_start,
                          .post = nccl_post,
                          .test = nccl_test,
                          .is_missing = nccl_is_missing,
                          .tell = nccl_tell,
                          .end = nccl_end,
                          .close = nccl_close};
    const char *address = getenv("MASTER_ADDR");
    int port, local;
    f->text[0] = 0;
    if (!read_number("WORLD_SIZE", 1, 65536, &l.world, f)) return NULL;
    if (l.world < 2) return NULL;
    if (!read_number("RANK", -1, l.world - 1, &l.rank, f) ||
        !read_number("LOCAL_RANK", l.rank, 1024, &local, f) ||
        !read_number("MASTER_PORT", 29500, 65535, &port, f))
        return NULL;
    state.missing = calloc((size_t)l.world, sizeof *state.missing);
    meeting m = {address && *address ? address : "127.0.0.1",
                 port,
                 l.rank,
                 l.world,
                 meeting_token(),
                 MEET_S};
    state.tcp = tcp_open(&m, f);
    if (!state.tcp || !state.missing) return NULL;
    return prepare_device(&state, local, f) && meet(&l, f) ? &l : NULL;
}
