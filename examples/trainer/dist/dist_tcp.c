/* dist_tcp.c - a star of sockets around rank 0. Twin: dist_tcp.h.

   A message is a kind and a length, then the bytes. In an exchange each rank sends its block to
   rank 0, which sends all of them back when it has the last. A connection that closes is a process
   that died. */
#include "dist/dist_tcp.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

enum { BLOCK = 1, ALL, WORDS };
enum { TELL_MS = 500 };

typedef struct header {
    uint32_t kind, rank;
    uint64_t bytes;
} header;

typedef struct peer {
    int fd;
    header in, out;
    size_t received, sent; /* of header and body */
    const char *body;      /* that goes out; NULL: nothing does */
    bool arrived;          /* what this exchange wants of it */
    char words[FAULT_BYTES];
} peer;

struct dist_tcp {
    int rank, world;
    peer *peers; /* of rank 0: one for each rank; of the others: rank 0's alone is used */
    char *blocks;
    size_t each;
    bool answering; /* rank 0 has all blocks and sends them back */
};

/* Ranks that this process has a connection to: all others, or rank 0. */
static bool is_peer(const dist_tcp *t, int r) {
    return r != t->rank && (t->rank == 0 || r == 0);
}

/* ---- Messages ------------------------------------------------------------------------------ */

static void post(const dist_tcp *t, peer *p, uint32_t kind, const void *body, size_t bytes) {
    header h = {kind, (uint32_t)t->rank, bytes};
    p->out = h;
    p->body = body;
    p->sent = 0;
}

/* What can be sent without waiting. False: the connection is gone. */
static bool push(peer *p) {
    while (p->body) {
        bool head = p->sent < sizeof p->out;
        const char *from =
            head ? (const char *)&p->out + p->sent : p->body + p->sent - sizeof p->out;
        size_t left = (head ? sizeof p->out : sizeof p->out + (size_t)p->out.bytes) - p->sent;
        ssize_t n = left ? send(p->fd, from, left, MSG_NOSIGNAL | MSG_DONTWAIT) : 0;
        if (n < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
        p->sent += (size_t)n;
        if (p->sent == sizeof p->out + (size_t)p->out.bytes) p->body = NULL;
    }
    return true;
}

/* Where the body of an incoming message goes; NULL: it is not what may come now. */
static char *place_of(dist_tcp *t, peer *p, int r) {
    if (p->in.kind == WORDS && p->in.bytes < sizeof p->words) return p->words;
    if (t->rank == 0 && p->in.kind == BLOCK && p->in.bytes == t->each)
        return t->blocks + (size_t)r * t->each;
    if (t->rank && p->in.kind == ALL && p->in.bytes == t->each * (size_t)t->world) return t->blocks;
    return NULL;
}

static bool read_some(peer *p, char *to, size_t left, bool *more) {
    ssize_t n = recv(p->fd, to, left, MSG_DONTWAIT);
    *more = n > 0;
    if (n > 0) p->received += (size_t)n;
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR));
}

static bool is_words(const peer *p) {
    return p->received >= sizeof p->in && p->in.kind == WORDS &&
           p->received == sizeof p->in + (size_t)p->in.bytes;
}

/* What has come, up to the end of one message. False: the connection is gone, or makes no sense. */
static bool pull(dist_tcp *t, peer *p, int r) {
    bool more = true;
    while (more && !p->arrived) {
        size_t head = sizeof p->in;
        if (p->received < head) {
            if (!read_some(p, (char *)&p->in + p->received, head - p->received, &more))
                return false;
            continue;
        }
        char *body = place_of(t, p, r);
        size_t left = head + (size_t)p->in.bytes - p->received;
        if (!body) return false;
        if (left && !read_some(p, body + p->received - head, left, &more)) return false;
        if (p->received < head + (size_t)p->in.bytes) continue;
        if (is_words(p)) return true;
        p->arrived = true;
        p->received = 0;
    }
    return true;
}

/* ---- The exchange -------------------------------------------------------------------------- */

static bool is_alive(dist_tcp *t, int r, fault *f) {
    peer *p = &t->peers[r];
    bool ok = push(p) && pull(t, p, r);
    if (ok && is_words(p)) {
        p->words[p->in.bytes] = 0;
        return fault_set(f, "rank %d ends the run: %.900s", (int)p->in.rank, p->words);
    }
    return ok || fault_set(f, "rank %d has closed its connection: it died", r);
}

void tcp_share_start(dist_tcp *t, void *blocks, size_t bytes_each) {
    t->blocks = blocks;
    t->each = bytes_each;
    t->answering = false;
    for (int r = 0; r < t->world; r++) t->peers[r].arrived = false;
    if (t->rank) post(t, &t->peers[0], BLOCK, t->blocks + (size_t)t->rank * bytes_each, bytes_each);
}

link_progress tcp_test(dist_tcp *t, fault *f) {
    bool all = true, sent = true;
    for (int r = 0; r < t->world; r++) {
        if (!is_peer(t, r)) continue;
        if (!is_alive(t, r, f)) return LINK_ENDED;
        all = all && t->peers[r].arrived;
    }
    if (all && t->rank == 0 && !t->answering) {
        t->answering = true;
        for (int r = 1; r < t->world; r++)
            post(t, &t->peers[r], ALL, t->blocks, t->each * (size_t)t->world);
        return LINK_WAITING;
    }
    for (int r = 0; r < t->world; r++) sent = sent && !t->peers[r].body;
    return all && sent ? LINK_DONE : LINK_WAITING;
}

bool tcp_is_missing(const dist_tcp *t, int rank) {
    if (t->rank) return rank == 0;
    return !t->peers[rank].arrived || t->peers[rank].body;
}

/* Looks at what is there and takes words alone: a rank that is ahead may have sent a block
   already. */
bool tcp_ended(dist_tcp *t, fault *f) {
    for (int r = 0; r < t->world; r++) {
        peer *p = &t->peers[r];
        header h;
        if (!is_peer(t, r) || p->received) continue;
        ssize_t n = recv(p->fd, &h, sizeof h, MSG_PEEK | MSG_DONTWAIT);
        if (n == 0 || (n == sizeof h && h.kind == WORDS)) {
            p->arrived = false;
            if (!is_alive(t, r, f)) return true;
        }
    }
    return false;
}

void tcp_tell(dist_tcp *t, const char *text) {
    struct timespec nap = {0, 1000000};
    for (int r = 0; r < t->world; r++)
        if (is_peer(t, r) && !t->peers[r].body) post(t, &t->peers[r], WORDS, text, strlen(text));
    for (int ms = 0, left = 1; left && ms < TELL_MS; ms++) {
        left = 0;
        for (int r = 0; r < t->world; r++)
            if (is_peer(t, r) && push(&t->peers[r])) left += t->peers[r].body != NULL;
        nanosleep(&nap, NULL);
    }
}

/* ---- Opening and closing ------------------------------------------------------------------- */

static int milliseconds_until(double deadline) {
    double left = deadline - clock_seconds();
    return left > 0 ? (int)(left * 1e3) + 1 : 0;
}

dist_tcp *tcp_open(const meeting *m, fault *f) {
    dist_tcp *t = calloc(1, sizeof *t);
    int *sockets = calloc((size_t)m->world, sizeof *sockets);
    if (t) t->peers = calloc((size_t)m->world, sizeof *t->peers);
    if (!t || !t->peers || !sockets) {
        if (t) free(t->peers);
        free(t);
        free(sockets);
        fault_set(f, "out of memory");
        return NULL;
    }
    t->rank = m->rank;
    t->world = m->world;
    bool met = meeting_hold(m, sockets, f);
    for (int r = 0; r < m->world; r++) t->peers[r].fd = sockets[r];
    free(sockets);
    if (met) return t;
    tcp_close(t);
    return NULL;
}

/* A socket that is closed while something in it is unread takes back what it has sent, last words
   too: it is read to the end that the other side makes, unless that takes long. */
static void part(int fd) {
    char nothing[4096];
    struct pollfd p = {.fd = fd, .events = POLLIN};
    double deadline = clock_seconds() + TELL_MS * 1e-3;
    shutdown(fd, SHUT_WR);
    while (poll(&p, 1, milliseconds_until(deadline)) > 0)
        if (recv(fd, nothing, sizeof nothing, MSG_DONTWAIT) <= 0) break;
    close(fd);
}

void tcp_close(dist_tcp *t) {
    for (int r = 0; r < t->world; r++)
        if (t->peers[r].fd >= 0) part(t->peers[r].fd);
    free(t->peers);
    free(t);
}
