/* nccl_double.c - collectives over a file that the processes of one machine share. Twin: nccl.h
   beside it. It checks what NCCL demands of its callers: calls in the same order, of the same size,
   in place as it allows; a process that breaks that ends with a message. */
#include "nccl.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 8, BLOCK = 1 << 16, GATHER = 1, REDUCE = 2 };

typedef struct shared {
    pthread_barrier_t barrier;
    int ready;
    size_t call[RANKS], kind[RANKS];
    float data[RANKS][BLOCK];
} shared;

struct ncclComm {
    int rank, ranks;
    size_t calls;
    shared *s;
};

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
    c->s = map(id.internal, rank, ranks);
    pthread_barrier_wait(&c->s->barrier);
    if (rank == 0) unlink(id.internal);
    *comm = c;
    return config->blocking ? ncclSuccess : ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    (void)comm;
    *error = ncclSuccess;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    munmap(comm->s, sizeof *comm->s);
    free(comm);
    return ncclSuccess;
}

static void agree(ncclComm_t c, size_t kind, size_t count) {
    shared *s = c->s;
    s->call[c->rank] = ++c->calls;
    s->kind[c->rank] = kind | count << 2;
    pthread_barrier_wait(&s->barrier);
    for (int r = 0; r < c->ranks; r++)
        if (s->call[r] != c->calls || s->kind[r] != (kind | count << 2))
            broken("the processes do not make the same calls");
}

ncclResult_t ncclReduceScatter(const void *send, void *receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t c, cudaStream_t stream) {
    const float *from = send;
    float *to = receive;
    (void)stream;
    if (type != ncclFloat32 || op != ncclSum || count * (size_t)c->ranks > BLOCK)
        broken("arguments");
    if (to != from + (size_t)c->rank * count) broken("ReduceScatter is not in place");
    memcpy(c->s->data[c->rank], from, count * (size_t)c->ranks * sizeof *from);
    agree(c, REDUCE, count);
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int r = 0; r < c->ranks; r++) sum += c->s->data[r][(size_t)c->rank * count + i];
        to[i] = sum;
    }
    pthread_barrier_wait(&c->s->barrier);
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *send, void *receive, size_t count, ncclDataType_t type,
                           ncclComm_t c, cudaStream_t stream) {
    (void)stream;
    if (type != ncclFloat32 || count > BLOCK) broken("arguments");
    if ((const float *)send != (const float *)receive + (size_t)c->rank * count)
        broken("AllGather is not in place");
    memcpy(c->s->data[c->rank], send, count * sizeof(float));
    agree(c, GATHER, count);
    for (int r = 0; r < c->ranks; r++)
        memcpy((float *)receive + (size_t)r * count, c->s->data[r], count * sizeof(float));
    pthread_barrier_wait(&c->s->barrier);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "an error";
}

/* ---- CUDA ---------------------------------------------------------------------------------- */

cudaError_t cudaSetDevice(int device) {
    (void)device;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
    (void)flags;
    *stream = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    (void)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
    (void)stream, (void)event, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
    (void)flags;
    *event = NULL;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    (void)event, (void)stream;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    (void)event;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaSuccess ? "no error" : "an error";
}
