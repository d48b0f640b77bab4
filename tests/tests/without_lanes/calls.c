// Calls of a program that uses no lane, each between two marks for strace: a write to no descriptor of the name of the
// call, and one of "end".
// usage: calls serve PORT     accept a client, read to its end, again and again
//        calls call PORT      the calls of a client of that server
//        calls accept PORT    the calls of a server, which prints "ready" and has clients that send two bytes
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

// Pause after the first connect: the rack directory may just have been made.
#define SETTLE_US 200000

extern char **environ;

static void mark(const char *name) {
    if (write(-1, name, strlen(name)) >= 0)
        exit(3);
}

#define STEP(name, call)                                                                                               \
    do {                                                                                                               \
        mark(name);                                                                                                    \
        long result_ = (long)(call);                                                                                   \
        mark("end");                                                                                                   \
        (void)result_;                                                                                                 \
    } while (0)

static struct sockaddr_in address(int port) {
    return (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((unsigned short)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
}

static int tcp(int flags) { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0); }

static int listening(int port) {
    int listener = tcp(0), on = 1;
    struct sockaddr_in at = address(port);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 64) != 0)
        exit(1);
    return listener;
}

static void serve(int port) {
    char byte;
    for (int listener = listening(port);;) {
        int client = accept(listener, NULL, NULL);
        if (recv(client, &byte, 1, 0) == 1)
            send(client, "xy", 2, MSG_NOSIGNAL);
        while (recv(client, &byte, 1, 0) == 1)
            ;
        close(client);
    }
}

static void processes(void) {
    char *const arguments[] = {"true", NULL};
    pid_t child;
    STEP("fork", (child = fork()) == 0 ? (_exit(0), 0) : waitpid(child, NULL, 0));
    STEP("spawn", posix_spawn(&child, "/bin/true", NULL, NULL, arguments, environ) == 0 ? waitpid(child, NULL, 0) : 0);
}

static void call(int port) {
    struct sockaddr_in closed = address(1), server = address(port);
    struct epoll_event event = {.events = EPOLLIN};
    char bytes[8];
    struct iovec one = {bytes, 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1};
    fd_set set;
    int fd = tcp(0);
    connect(fd, (struct sockaddr *)&server, sizeof server);
    close(fd);
    usleep(SETTLE_US);
    connect(fd = tcp(0), (struct sockaddr *)&closed, sizeof closed);
    close(fd);
    STEP("socket", fd = tcp(0));
    STEP("connect, refused", connect(fd, (struct sockaddr *)&closed, sizeof closed));
    STEP("close, refused", close(fd));
    fd = tcp(SOCK_NONBLOCK);
    STEP("connect, non-blocking", connect(fd, (struct sockaddr *)&server, sizeof server));
    close(fd);
    fd = tcp(0);
    STEP("connect", connect(fd, (struct sockaddr *)&server, sizeof server));
    STEP("send", send(fd, "x", 1, 0));
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    STEP("poll", poll(&readable, 1, 10000));
    FD_ZERO(&set);
    FD_SET(fd, &set);
    STEP("select", select(fd + 1, &set, NULL, NULL, NULL));
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    STEP("epoll_ctl", epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
    STEP("epoll_wait", epoll_wait(epoll, &event, 1, -1));
    STEP("recv", recv(fd, bytes, 1, 0));
    STEP("recvmsg", recvmsg(fd, &message, 0));
    STEP("sendmsg", sendmsg(fd, &message, 0));
    STEP("shutdown", shutdown(fd, SHUT_WR));
    STEP("close, connected", close(fd));
    processes();
}

static void accept_clients(int port) {
    char bytes[8];
    int listener = listening(port);
    struct pollfd waiting = {.fd = listener, .events = POLLIN};
    puts("ready");
    fflush(stdout);
    for (int round = 0; round < 2; round++) {
        poll(&waiting, 1, 10000);
        int client;
        STEP("accept", client = accept4(listener, NULL, NULL, SOCK_CLOEXEC));
        recv(client, bytes, 2, 0);
        STEP("close, accepted", close(client));
    }
}

int main(int argc, char **argv) {
    int port = argc == 3 ? atoi(argv[2]) : 0;
    if (port != 0 && strcmp(argv[1], "serve") == 0)
        serve(port);
    else if (port != 0 && strcmp(argv[1], "call") == 0)
        call(port);
    else if (port != 0 && strcmp(argv[1], "accept") == 0)
        accept_clients(port);
    else
        return 2;
    return 0;
}
