/* dist_meet.c - see dist_meet.h. A process says hello with a digest of the token; rank 0 answers
   with the same. Who says something else, or nothing for HELLO_S, is shown out, while all others
   are listened to. */
#include "dist/dist_meet.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

enum { GUESTS = 64, LANES = 8, RETRY_MS = 100 };
static const double HELLO_S = 2, ANSWER_S = 5;

typedef struct hello {
    char magic[8];
    uint32_t rank, world;
    uint64_t digest[LANES];
} hello;

/* Somebody who has not said all of his hello. */
typedef struct guest {
    int fd;
    double until;
    size_t got;
    hello in;
} guest;

typedef struct door {
    const meeting *m;
    int fd, *sockets, missing;
    guest guests[GUESTS];
    int count;
} door;

const char *meeting_token(void) {
    static const char *const names[] = {"MASTER_TOKEN", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]);
        if (value && *value) return value;
    }
    return "";
}

/* FNV-1a in lanes that begin differently: no cipher, but any token fits. */
static hello hello_of(const meeting *m, int rank) {
    hello h = {"nsa run", (uint32_t)rank, (uint32_t)m->world, {0}};
    for (uint64_t lane = 0; lane < LANES; lane++) {
        uint64_t x = 0xcbf29ce484222325u + lane;
        for (const char *c = m->token; *c; c++) x = (x ^ (unsigned char)*c) * 0x100000001b3u;
        h.digest[lane] = x;
    }
    return h;
}

static int milliseconds_until(double deadline) {
    double left = deadline - clock_seconds();
    return left > 0 ? (int)(left * 1e3) + 1 : 0;
}

/* False: the time is over. */
static bool wait_for(int fd, short events, double deadline) {
    struct pollfd p = {.fd = fd, .events = events};
    for (;;) {
        int ready = poll(&p, 1, milliseconds_until(deadline));
        if (ready > 0) return true;
        if (ready == 0 || errno != EINTR) return false;
    }
}

static bool would_wait(void) {
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static void set_options(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    fcntl(fd, F_SETFL, O_NONBLOCK);
}

/* ---- Rank 0 -------------------------------------------------------------------------------- */

static int listen_at(const struct sockaddr *a, socklen_t bytes) {
    int on = 1, fd = socket(a->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0) setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd >= 0 && !bind(fd, a, bytes) && !listen(fd, SOMAXCONN)) return fd;
    int error = errno;
    if (fd >= 0) close(fd);
    errno = error;
    return -1;
}

/* IPv4 or IPv6, as the name has them. Without a name: all interfaces. */
static struct addrinfo *find(const char *name, int family, int port) {
    struct addrinfo *list = NULL, hints = {.ai_family = family, .ai_socktype = SOCK_STREAM};
    char service[16];
    hints.ai_flags = name ? 0 : AI_PASSIVE;
    snprintf(service, sizeof service, "%d", port);
    return getaddrinfo(name, service, &hints, &list) ? NULL : list;
}

/* At the first of them that can be had; -1 with errno. */
static int listen_at_any(const struct addrinfo *list) {
    int fd = -1;
    for (; list && fd < 0; list = list->ai_next) fd = listen_at(list->ai_addr, list->ai_addrlen);
    return fd;
}

/* An address that no interface here has is that of a gate before this machine: then the token alone
   keeps strangers out, and must be there. */
static int open_door(const meeting *m, fault *f) {
    struct addrinfo *list = find(m->address, AF_UNSPEC, m->port);
    if (!list) {
        fault_set(f, "MASTER_ADDR=%.200s: rank 0 finds no such machine", m->address);
        return -1;
    }
    int fd = listen_at_any(list), family = list->ai_family;
    bool elsewhere = fd < 0 && errno == EADDRNOTAVAIL;
    freeaddrinfo(list);
    if (elsewhere && m->token[0]) {
        list = find(NULL, family, m->port);
        fd = listen_at_any(list);
        if (list) freeaddrinfo(list);
    } else if (elsewhere) {
        fault_set(
            f,
            "MASTER_ADDR=%.200s: no interface of rank 0 has that address; where it is another "
            "machine's that leads here, MASTER_TOKEN must be set",
            m->address);
        return -1;
    }
    if (fd < 0)
        fault_errno(f, "MASTER_ADDR=%.200s MASTER_PORT=%d: rank 0 cannot listen there", m->address,
                    m->port);
    return fd;
}

/* Who has come and is gone may come once more: a process waits ANSWER_S, then comes anew. */
static bool is_here(int fd) {
    char byte;
    if (fd < 0) return false;
    ssize_t n = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return n > 0 || (n < 0 && would_wait());
}

/* Whether the guest is one of the run, who then gets its answer. */
static bool admit(door *d, const guest *g) {
    hello due = hello_of(d->m, (int)g->in.rank), answer = hello_of(d->m, 0);
    if (memcmp(&due, &g->in, sizeof due) || !g->in.rank || g->in.rank >= due.world) return false;
    int *place = &d->sockets[g->in.rank];
    if (!is_here(g->fd) || is_here(*place) ||
        send(g->fd, &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof answer)
        return false;
    d->missing -= *place < 0;
    if (*place >= 0) close(*place);
    *place = g->fd;
    return true;
}

/* Reads what a guest says; false: he is no guest any more. */
static bool attend(door *d, guest *g) {
    ssize_t n = recv(g->fd, (char *)&g->in + g->got, sizeof g->in - g->got, MSG_DONTWAIT);
    bool waits = n < 0 && would_wait();
    if (n > 0) g->got += (size_t)n;
    if ((n > 0 || waits) && g->got < sizeof g->in && clock_seconds() < g->until) return true;
    if (g->got < sizeof g->in || !admit(d, g)) close(g->fd);
    return false;
}

static void attend_all(door *d) {
    int kept = 0;
    for (int i = 0; i < d->count; i++)
        if (attend(d, &d->guests[i])) d->guests[kept++] = d->guests[i];
    d->count = kept;
}

/* Takes one who knocks; where all places are taken the one who has been silent longest goes. False:
   nobody knocks. */
static bool let_in(door *d) {
    int fd = accept(d->fd, NULL, NULL);
    if (fd < 0) return false;
    if (d->count == GUESTS) {
        close(d->guests[0].fd);
        memmove(d->guests, d->guests + 1, (size_t)--d->count * sizeof *d->guests);
    }
    set_options(fd);
    guest *g = &d->guests[d->count];
    g->fd = fd;
    g->until = clock_seconds() + HELLO_S;
    g->got = 0;
    d->count += attend(d, g);
    return true;
}

static void wait_for_guests(const door *d, double deadline) {
    struct pollfd p[GUESTS + 1] = {{.fd = d->fd, .events = POLLIN}};
    for (int i = 0; i < d->count; i++) {
        p[i + 1] = (struct pollfd){.fd = d->guests[i].fd, .events = POLLIN};
        if (d->guests[i].until < deadline) deadline = d->guests[i].until;
    }
    (void)poll(p, (nfds_t)d->count + 1, milliseconds_until(deadline)); /* a signal: once more */
}

static bool receive_all(const meeting *m, int *sockets, double deadline, fault *f) {
    struct timespec nap = {0, RETRY_MS * 1000000L};
    door d = {.m = m, .sockets = sockets, .missing = m->world - 1};
    if ((d.fd = open_door(m, f)) < 0) return false;
    while (d.missing && clock_seconds() < deadline) {
        wait_for_guests(&d, deadline);
        attend_all(&d);
        for (int i = 0; d.missing && i < GUESTS && let_in(&d); i++) continue;
        if (errno == EMFILE || errno == ENFILE) nanosleep(&nap, NULL);
    }
    for (int i = 0; i < d.count; i++) close(d.guests[i].fd);
    close(d.fd);
    for (int r = 1; d.missing && r < m->world; r++)
        if (sockets[r] < 0)
            return fault_set(f,
                             "rank %d has not come to MASTER_ADDR=%.200s MASTER_PORT=%d (%d of %d "
                             "are missing)",
                             r, m->address, m->port, d.missing, m->world - 1);
    return true;
}

/* ---- The others ---------------------------------------------------------------------------- */

static int connect_once(const meeting *m, double deadline) {
    struct addrinfo *list = find(m->address, AF_UNSPEC, m->port);
    int fd = -1;
    for (struct addrinfo *a = list; a && fd < 0; a = a->ai_next) {
        int error = 0;
        socklen_t bytes = sizeof error;
        if ((fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol)) < 0) continue;
        set_options(fd);
        bool ok = !connect(fd, a->ai_addr, a->ai_addrlen) ||
                  ((errno == EINPROGRESS || errno == EINTR) && wait_for(fd, POLLOUT, deadline) &&
                   !getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes) && !error);
        if (ok) continue;
        close(fd);
        fd = -1;
    }
    if (list) freeaddrinfo(list);
    return fd;
}

/* Says hello, and waits for the answer. */
static bool is_answered(const meeting *m, int fd, double deadline) {
    hello out = hello_of(m, m->rank), due = hello_of(m, 0), in;
    if (send(fd, &out, sizeof out, MSG_NOSIGNAL | MSG_DONTWAIT) != sizeof out) return false;
    for (size_t got = 0; got < sizeof in;) {
        if (!wait_for(fd, POLLIN, deadline)) return false;
        ssize_t n = recv(fd, (char *)&in + got, sizeof in - got, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && !would_wait())) return false;
        if (n > 0) got += (size_t)n;
    }
    return !memcmp(&in, &due, sizeof in);
}

static bool come(const meeting *m, int *socket, double deadline, fault *f) {
    struct timespec nap = {0, RETRY_MS * 1000000L};
    bool met = false;
    while (clock_seconds() < deadline) {
        double patience = clock_seconds() + ANSWER_S,
               end = patience < deadline ? patience : deadline;
        *socket = connect_once(m, end);
        if (*socket >= 0 && is_answered(m, *socket, end)) return true;
        met = met || *socket >= 0;
        if (*socket >= 0) close(*socket);
        *socket = -1;
        nanosleep(&nap, NULL);
    }
    return fault_set(f,
                     met ? "rank %d: who listens at MASTER_ADDR=%.200s MASTER_PORT=%d does not "
                           "take it for one of his run: WORLD_SIZE and MASTER_TOKEN must be the "
                           "same in all processes, and no RANK given twice"
                         : "rank %d: nobody at MASTER_ADDR=%.200s MASTER_PORT=%d",
                     m->rank, m->address, m->port);
}

bool meeting_hold(const meeting *m, int *sockets, fault *f) {
    double deadline = clock_seconds() + m->timeout;
    for (int r = 0; r < m->world; r++) sockets[r] = -1;
    return m->rank ? come(m, &sockets[0], deadline, f) : receive_all(m, sockets, deadline, f);
}
