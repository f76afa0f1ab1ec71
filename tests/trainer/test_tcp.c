/* test_tcp.c - the sockets between processes: blocks of any size come to all, last words and deaths
   are heard, who is missing is known, a meeting to which not all come ends, and strangers cost it
   nothing. Twins: dist_tcp.c, dist_meet.c. */
#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "dist/dist_tcp.h"
#include "free_port.h"
#include "harness/check.h"

enum { WORLD = 3, LONG = 120 }; /* LONG: s, for what must come sooner or later */

static fault why;
static int port;
static int gate[2]; /* a pipe: rank 2 waits at [0] for a byte that rank 0 writes to [1] */

static void nap(int ms) {
    struct timespec t = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&t, NULL);
}

static dist_tcp *open_as(const char *address, int rank, int world, const char *token,
                         double timeout) {
    meeting m = {address, port, rank, world, token, timeout};
    return tcp_open(&m, &why);
}

static link_progress finish(dist_tcp *t, double seconds) {
    link_progress p = LINK_WAITING;
    for (int ms = 0; p == LINK_WAITING && ms < seconds * 1000; ms++) {
        p = tcp_test(t, &why);
        if (p == LINK_WAITING) nap(1);
    }
    return p;
}

/* Block r of round k holds bytes of (r, k, place). */
static void test_blocks(dist_tcp *t, int rank) {
    static const size_t sizes[] = {1, 8, 1000, 3000001, 5};
    check_case("blocks, rank %d", rank);
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        unsigned char *blocks = check_alloc(WORLD * sizes[k]);
        int64_t wrong = 0;
        memset(blocks, 0, WORLD * sizes[k]);
        for (size_t i = 0; i < sizes[k]; i++)
            blocks[(size_t)rank * sizes[k] + i] =
                (unsigned char)(rank * 50 + (int)k + (int)(i % 7));
        if (rank == 1 && k == 2) nap(50); /* not all are equally fast */
        tcp_share_start(t, blocks, sizes[k]);
        CHECK(finish(t, LONG) == LINK_DONE, "round %zu: %s", k, why.text);
        for (int r = 0; r < WORLD; r++)
            for (size_t i = 0; i < sizes[k]; i++)
                wrong += blocks[(size_t)r * sizes[k] + i] !=
                         (unsigned char)(r * 50 + (int)k + (int)(i % 7));
        CHECK(wrong == 0, "round %zu: %lld bytes are wrong", k, (long long)wrong);
        free(blocks);
    }
}

/* Rank 2 comes to an exchange only when rank 0 has seen that nobody but rank 2 is missing. */
static void test_missing(dist_tcp *t, int rank) {
    unsigned char blocks[WORLD] = {0};
    char go = 0;
    check_case("missing, rank %d", rank);
    if (rank == 2) CHECK(read(gate[0], &go, 1) == 1, "rank 0 opened no gate");
    tcp_share_start(t, blocks, 1);
    if (rank == 0) {
        for (int ms = 0; tcp_is_missing(t, 1) && ms < LONG * 1000; ms++) finish(t, 0.001);
        CHECK(finish(t, 0.1) == LINK_WAITING, "rank 2 is early");
        CHECK(tcp_is_missing(t, 2) && !tcp_is_missing(t, 1), "missing: %d %d", tcp_is_missing(t, 1),
              tcp_is_missing(t, 2));
        CHECK(write(gate[1], &go, 1) == 1, "the gate stays shut");
    }
    CHECK(finish(t, LONG) == LINK_DONE, "%s", why.text);
}

/* Rank 1 speaks, outside an exchange for rank 0; rank 2 hears of it once rank 0 ends its
   connection. */
static void test_words(dist_tcp *t, int rank) {
    check_case("words, rank %d", rank);
    if (rank == 1) {
        tcp_tell(t, "no more data");
        return;
    }
    bool ended = false;
    unsigned char blocks[WORLD] = {0};
    if (rank == 2) tcp_share_start(t, blocks, 1); /* an early block is no end */
    for (int ms = 0; !ended && ms < LONG * 1000; ms++) {
        ended = rank == 0 ? tcp_ended(t, &why) : tcp_test(t, &why) == LINK_ENDED;
        if (!ended) nap(1);
    }
    CHECK(ended, "nothing was heard");
    if (rank == 0) {
        CHECK(strstr(why.text, "rank 1 ends the run: no more data") != NULL, "%s", why.text);
        tcp_tell(t, why.text);
    } else {
        CHECK(strstr(why.text, "rank 1 ends the run") != NULL, "%s", why.text);
    }
}

static int all_rounds(int rank) {
    dist_tcp *t = open_as("127.0.0.1", rank, WORLD, "test", LONG);
    if (!CHECK(t != NULL, "rank %d: %s", rank, why.text)) return 1;
    test_blocks(t, rank);
    test_missing(t, rank);
    test_words(t, rank);
    tcp_close(t);
    return check_failures;
}

/* A name for this machine, which a bare one may not have: then its address. */
static const char *name_or_address(void) {
    struct addrinfo *list;
    if (getaddrinfo("localhost", NULL, NULL, &list)) return "127.0.0.1";
    freeaddrinfo(list);
    return "localhost";
}

/* Rank 1 is killed in the middle of an exchange. */
static int death(int rank) {
    unsigned char blocks[WORLD] = {0};
    dist_tcp *t = open_as(name_or_address(), rank, WORLD, "test", LONG);
    if (!CHECK(t != NULL, "rank %d: %s", rank, why.text)) return 1;
    check_case("death, rank %d", rank);
    if (rank == 1) raise(SIGKILL);
    tcp_share_start(t, blocks, 1);
    CHECK(finish(t, LONG) == LINK_ENDED, "the death of rank 1 was not seen");
    if (rank == 0) {
        CHECK(strstr(why.text, "rank 1 has closed its connection") != NULL, "%s", why.text);
        tcp_tell(t, why.text);
    } else {
        CHECK(strstr(why.text, "rank 1 has closed") != NULL, "%s", why.text);
    }
    tcp_close(t);
    return check_failures;
}

static void run(const char *name, int (*part)(int rank), int killed) {
    pid_t child[WORLD];
    port = free_port();
    for (int r = 0; r < WORLD; r++)
        if (!(child[r] = fork())) {
            int failures = part(r);
            fflush(stdout);
            _exit(failures ? 1 : 0);
        }
    for (int r = 0; r < WORLD; r++) {
        int status = 0;
        waitpid(child[r], &status, 0);
        check_case("%s", name);
        bool ok = r == killed ? WIFSIGNALED(status) : WIFEXITED(status) && !WEXITSTATUS(status);
        CHECK(ok, "rank %d ended with status %d", r, status);
    }
}

/* Somebody else's connection is not taken for a rank; the rank that does not come is named. */
static void test_meeting(void) {
    port = free_port();
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    check_case("meeting");
    CHECK(!open_as("127.0.0.1", 1, 2, "", 0.3), "rank 1 met nobody");
    CHECK(strstr(why.text, "nobody at MASTER_ADDR=127.0.0.1") != NULL, "%s", why.text);
    pid_t stranger = fork();
    if (!stranger) {
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        for (int i = 0; i < 100 && connect(fd, (struct sockaddr *)&a, sizeof a); i++) {
            close(fd);
            nap(10);
            fd = socket(AF_INET, SOCK_STREAM, 0);
        }
        static const char request[] = "GET / HTTP/1.1\r\nHost: nobody\r\n\r\n";
        _exit(send(fd, request, sizeof request, MSG_NOSIGNAL) < 0);
    }
    CHECK(!open_as("127.0.0.1", 0, 2, "", 1), "a stranger was taken for rank 1");
    CHECK(strstr(why.text, "rank 1 has not come") != NULL, "%s", why.text);
    waitpid(stranger, NULL, 0);
}

/* ---- Strangers ----------------------------------------------------------------------------- */

static int socket_to(const char *address) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    inet_pton(AF_INET, address, &a.sin_addr);
    if (!connect(fd, (struct sockaddr *)&a, sizeof a)) return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* Once rank 0 listens. */
static int knock(void) {
    int fd = -1;
    for (int i = 0; fd < 0 && i < 1000; i++) {
        fd = socket_to("127.0.0.1");
        if (fd < 0) nap(10);
    }
    return fd;
}

static void say(int fd, const void *bytes, size_t count) {
    (void)!send(fd, bytes, count, MSG_NOSIGNAL);
}

/* Silent ones, one who says a byte now and then, noise, words of the protocol with another token,
   or with none, those who leave at once, and more than anybody would let in; they stay until
   killed. */
static void be_strangers(void) {
    static const char request[] = "GET / HTTP/1.1\r\nHost: nobody\r\n\r\n";
    uint32_t words[20] = {4, 1, 5}, hello[20] = {0, 0, 1, WORLD};
    char noise[4096];
    memcpy(hello, "nsa run", 8);
    memset(noise, 0xa5, sizeof noise);
    int slow = knock();
    for (int i = 0; i < 8; i++) (void)knock();
    say(knock(), request, sizeof request);
    say(knock(), noise, sizeof noise);
    say(knock(), words, sizeof words);
    say(knock(), hello, sizeof hello);
    hello[2] = UINT32_MAX;
    say(knock(), hello, sizeof hello);
    for (int i = 0; i < 50; i++) close(knock());
    for (int i = 0; i < 200; i++) (void)knock();
    for (;;) {
        say(slow, "n", 1);
        nap(100);
    }
}

static void tick(int number) {
    (void)number;
}

/* Signals come all the time; all ranks meet in a small part of the time that there is. */
static int meets(int rank) {
    struct sigaction a = {.sa_handler = tick};
    struct itimerval often = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
    sigaction(SIGALRM, &a, NULL);
    check_case("strangers, rank %d", rank);
    if (rank) nap(1500);
    setitimer(ITIMER_REAL, &often, NULL);
    double begin = clock_seconds();
    dist_tcp *t = open_as("127.0.0.1", rank, WORLD, "test", LONG);
    double end = clock_seconds();
    setitimer(ITIMER_REAL, &never, NULL);
    if (!CHECK(t != NULL, "rank %d: %s", rank, why.text)) return 1;
    CHECK(end - begin < LONG / 2, "%.1f s", end - begin);
    test_blocks(t, rank);
    tcp_close(t);
    return check_failures;
}

static int strangers(int rank) {
    pid_t child = rank ? -1 : fork();
    if (!child) be_strangers();
    int failures = meets(rank);
    if (child > 0) kill(child, SIGKILL), waitpid(child, NULL, 0);
    return failures;
}

/* Another run's process is a stranger, on either side, and a second one of a rank is. */
static int other_tokens(int rank) {
    static const char *const tokens[WORLD] = {"this run", "that run", "this run"};
    check_case("tokens, rank %d", rank);
    bool met = open_as("127.0.0.1", rank, WORLD, tokens[rank], 10) != NULL;
    CHECK(met == (rank == 2), "rank %d: %d", rank, met); /* it cannot know of rank 1 */
    CHECK(rank != 0 || strstr(why.text, "rank 1 has not come to MASTER_ADDR=127.0.0.1"), "%s",
          why.text);
    CHECK(rank != 1 || strstr(why.text, "MASTER_TOKEN must be the same"), "%s", why.text);
    return check_failures;
}

/* Rank 1 comes, dies before rank 2 is there, and comes again. */
static int comes_again(int rank) {
    check_case("coming again, rank %d", rank);
    if (rank == 1 && !fork()) _exit(open_as("127.0.0.1", 1, WORLD, "test", LONG) == NULL);
    if (rank == 1) wait(NULL);
    if (rank == 2) nap(700);
    return meets(rank);
}

/* Rank 0 listens where MASTER_ADDR is and nowhere else. */
static void test_interface(void) {
    port = free_port();
    check_case("interface");
    pid_t rank_0 = fork();
    if (!rank_0) _exit(open_as("127.0.0.1", 0, 2, "test", LONG) != NULL);
    int fd = knock();
    CHECK(fd >= 0, "rank 0 does not listen");
    CHECK(socket_to("127.0.0.2") < 0 && errno == ECONNREFUSED, "another interface answers");
    kill(rank_0, SIGKILL);
    waitpid(rank_0, NULL, 0);
    close(fd);
    CHECK(!open_as("192.0.2.1", 0, 2, "", 1), "an address of nobody's");
    CHECK(strstr(why.text, "MASTER_ADDR=192.0.2.1: no interface of rank 0 has that address"), "%s",
          why.text);
}

/* MASTER_ADDR may be of IPv6, and a name may have addresses of both kinds. */
static void test_addresses(void) {
    static const char *const addresses[] = {"::1", "localhost"};
    for (size_t i = 0; i < sizeof addresses / sizeof *addresses; i++) {
        struct sockaddr_in6 a = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
        int probe = socket(AF_INET6, SOCK_STREAM, 0);
        bool has_6 = probe >= 0 && !bind(probe, (struct sockaddr *)&a, sizeof a);
        if (probe >= 0) close(probe);
        if (addresses[i][0] == ':' && !has_6) continue; /* this machine has no IPv6 */
        port = free_port();
        check_case("%s", addresses[i]);
        pid_t rank_1 = fork();
        if (!rank_1) _exit(open_as(addresses[i], 1, 2, "test", LONG) == NULL);
        int status = -1;
        CHECK(open_as(addresses[i], 0, 2, "test", LONG), "%s", why.text);
        waitpid(rank_1, &status, 0);
        CHECK(status == 0, "rank 1 did not come to %s", addresses[i]);
    }
}

/* Who listens there says nothing, or something else: he is not taken for rank 0. */
static void test_false_rank_0(void) {
    static const char lie[100] = "yes, this is rank 0";
    struct sockaddr_in a = {.sin_family = AF_INET};
    int on = 1, door = socket(AF_INET, SOCK_STREAM, 0);
    port = free_port();
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    check_case("a false rank 0");
    CHECK(!bind(door, (struct sockaddr *)&a, sizeof a) && !listen(door, 5), "no door");
    CHECK(!open_as("127.0.0.1", 1, 2, "test", 1), "a silent one was taken for rank 0");
    pid_t liar = fork();
    if (!liar)
        for (;;) say(accept(door, NULL, NULL), lie, sizeof lie);
    CHECK(!open_as("127.0.0.1", 1, 2, "test", 1), "a liar was taken for rank 0");
    CHECK(strstr(why.text, "does not take it for one of his run"), "%s", why.text);
    kill(liar, SIGKILL);
    waitpid(liar, NULL, 0);
    close(door);
}

int main(void) {
    if (!CHECK(pipe(gate) == 0, "no pipe")) return check_done("test_tcp");
    run("rounds", all_rounds, -1);
    run("death", death, 1);
    test_meeting();
    run("strangers", strangers, -1);
    run("tokens", other_tokens, -1);
    run("coming again", comes_again, -1);
    test_interface();
    test_addresses();
    test_false_rank_0();
    return check_done("test_tcp");
}
