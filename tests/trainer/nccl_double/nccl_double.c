/* nccl_double.c - collectives over a file that the processes of one machine share, each a function
   that its stream calls. Twin: nccl.h beside it. It checks what NCCL demands of its callers: calls
   in the same order, of the same size, in place as it allows; a process that breaks that ends with
   a message. */
#include "nccl.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, BYTES = 1 << 20, GATHER = 1, REDUCE_SCATTER, ALL_REDUCE };

typedef struct shared {
    pthread_barrier_t barrier;
    int ready;
    size_t call[RANKS], kind[RANKS];
    char data[RANKS][BYTES];
} shared;

/* A graph may run it again, so it lives as long as the communicator. */
typedef struct call {
    ncclComm_t comm;
    int kind;
    ncclDataType_t type;
    size_t count;
    const void *send;
    void *receive;
    struct call *next;
} call;

struct ncclComm {
    int rank, ranks, splits;
    char name[NCCL_UNIQUE_ID_BYTES];
    size_t calls;
    shared *s;
    call *made;
};

static size_t width(ncclDataType_t type) {
    return type == ncclFloat32 ? sizeof(float) : sizeof(double);
}

static void broken(const char *what) {
    fprintf(stderr, "nccl double: %s\n", what);
    _exit(70);
}

static void nap(void) {
    struct timespec t = {0, 1000000};
    nanosleep(&t, NULL);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    const char *where = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%.60s/nccl-double-%d", where ? where : "/tmp",
             (int)getpid());
    unlink(id->internal); /* what an earlier process of this number may have left */
    return ncclSuccess;
}

/* Rank 0 makes the file; the others wait for it. */
static shared *map(const char *path, int rank, int ranks) {
    int fd = -1;
    if (rank == 0 && (fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600)) >= 0 &&
        ftruncate(fd, sizeof(shared)))
        broken("ftruncate");
    for (int tries = 0; rank && tries < 10000 && fd < 0; tries++, nap()) fd = open(path, O_RDWR);
    while (rank && fd >= 0 && lseek(fd, 0, SEEK_END) < (off_t)sizeof(shared)) nap();
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || s == MAP_FAILED) broken("no shared memory");
    close(fd);
    if (rank == 0) {
        pthread_barrierattr_t a;
        pthread_barrierattr_init(&a);
        pthread_barrierattr_setpshared(&a, PTHREAD_PROCESS_SHARED);
        pthread_barrier_init(&s->barrier, &a, (unsigned)ranks);
        __atomic_store_n(&s->ready, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&s->ready, __ATOMIC_ACQUIRE)) nap();
    return s;
}

/* As the real one does when it need not block, it is not done when it returns. */
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config) {
    ncclComm_t c = calloc(1, sizeof *c);
    if (!c || ranks > RANKS) broken("too many ranks");
    c->rank = rank;
    c->ranks = ranks;
    memcpy(c->name, id.internal, sizeof c->name);
    c->s = map(id.internal, rank, ranks);
    pthread_barrier_wait(&c->s->barrier);
    if (rank == 0) unlink(id.internal);
    *comm = c;
    return config->blocking ? ncclSuccess : ncclInProgress;
}

/* A file of its own for each colour. Nothing may be under way. */
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *split,
                           ncclConfig_t *config) {
    ncclUniqueId id;
    int rank = 0, ranks = 0, mine[2] = {color, key}, other[2];
    memcpy(c->s->data[c->rank], mine, sizeof mine);
    pthread_barrier_wait(&c->s->barrier);
    for (int r = 0; r < c->ranks; r++) {
        memcpy(other, c->s->data[r], sizeof other);
        if (other[0] != color) continue;
        ranks++;
        rank += other[1] < key || (other[1] == key && r < c->rank);
    }
    pthread_barrier_wait(&c->s->barrier);
    snprintf(id.internal, sizeof id.internal, "%.90s-%d-%d", c->name, c->splits++, color);
    return ncclCommInitRankConfig(split, ranks, id, rank, config);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    (void)comm;
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    for (call *x = comm->made, *next; x; x = next) {
        next = x->next;
        free(x);
    }
    munmap(comm->s, sizeof *comm->s);
    free(comm);
    return ncclSuccess;
}

/* ---- Calls --------------------------------------------------------------------------------- */

static void agree(const call *x) {
    ncclComm_t c = x->comm;
    shared *s = c->s;
    size_t kind = (size_t)x->kind | (size_t)x->type << 2 | x->count << 6;
    s->call[c->rank] = ++c->calls;
    s->kind[c->rank] = kind;
    pthread_barrier_wait(&s->barrier);
    for (int r = 0; r < c->ranks; r++)
        if (s->call[r] != c->calls || s->kind[r] != kind)
            broken("the processes do not make the same calls");
}

/* sum += x */
static void add(void *sum, const void *x, size_t count, ncclDataType_t type) {
    for (size_t i = 0; i < count; i++) {
        if (type == ncclFloat32)
            ((float *)sum)[i] += ((const float *)x)[i];
        else if (type == ncclFloat64)
            ((double *)sum)[i] += ((const double *)x)[i];
        else
            ((long long *)sum)[i] += ((const long long *)x)[i];
    }
}

/* What the stream does. */
static void run(void *user) {
    const call *x = user;
    ncclComm_t c = x->comm;
    bool scatter = x->kind == REDUCE_SCATTER;
    size_t each = x->count * width(x->type), own = scatter ? (size_t)c->rank * each : 0;
    memcpy(c->s->data[c->rank], x->send, scatter ? each * (size_t)c->ranks : each);
    agree(x);
    if (x->kind != GATHER) memset(x->receive, 0, each);
    for (int r = 0; r < c->ranks; r++)
        if (x->kind == GATHER)
            memcpy((char *)x->receive + (size_t)r * each, c->s->data[r], each);
        else
            add(x->receive, c->s->data[r] + own, x->count, x->type);
    pthread_barrier_wait(&c->s->barrier);
}

static ncclResult_t launch(call given, cudaStream_t stream) {
    ncclComm_t c = given.comm;
    size_t blocks = given.kind == REDUCE_SCATTER ? (size_t)c->ranks : 1;
    call *x = malloc(sizeof *x);
    if (!x || given.count * blocks * width(given.type) > BYTES) broken("too much");
    *x = given;
    x->next = c->made;
    c->made = x;
    return cudaLaunchHostFunc(stream, run, x) == cudaSuccess ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    call x = {c, REDUCE_SCATTER, type, count, send, receive, NULL};
    if (op != ncclSum) broken("not a sum");
    if ((char *)receive != (const char *)send + (size_t)c->rank * count * width(type))
        broken("ReduceScatter is not in place");
    return launch(x, stream);
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t c, cudaStream_t stream) {
    call x = {c, GATHER, type, count, send, receive, NULL};
    if ((const char *)send != (char *)receive + (size_t)c->rank * count * width(type))
        broken("AllGather is not in place");
    return launch(x, stream);
}

ncclResult_t ncclAllReduce(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    call x = {c, ALL_REDUCE, type, count, send, receive, NULL};
    if (op != ncclSum || send != receive) broken("AllReduce is no sum, or not in place");
    return launch(x, stream);
}

/* What a group holds is in order, so it need not wait for its end. */
ncclResult_t ncclGroupStart(void) {
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "an error";
}
