/* free_port.h - a port of this machine that nobody else has while the test runs. Twin: none. */
#ifndef FREE_PORT_H
#define FREE_PORT_H

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

/* The kernel chooses it. It stays bound until this process ends, so that no other process is given
   it. Because SO_REUSEADDR is set and nobody listens here, a listener that sets it too may bind the
   port. -1 if there is none. */
static inline int free_port(void) {
    struct sockaddr_in a = {.sin_family = AF_INET};
    socklen_t bytes = sizeof a;
    int on = 1, fd = socket(AF_INET, SOCK_STREAM, 0);
    a.sin_addr.s_addr = htonl(INADDR_ANY);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) ||
        bind(fd, (struct sockaddr *)&a, sizeof a) || getsockname(fd, (struct sockaddr *)&a, &bytes))
        return -1;
    return ntohs(a.sin_port);
}

#endif
