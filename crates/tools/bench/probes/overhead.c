/* Calls of a program that uses no lane: what each takes, as the median over many of them.
 *   overhead serve ADDRESS       the peer, without the library: echoes, and connects to the port that a client asks for
 *   overhead call ADDRESS TIMES  the program: prints "NAME NANOSECONDS" for each call
 *   overhead start TIMES PROGRAM [ARGS...]   prints "start NANOSECONDS": from posix_spawn to the end of the program */
#include "common.h"
#include <poll.h>
#include <spawn.h>
#include <sys/select.h>
#include <sys/wait.h>

#define TIMES_MAX 100000
/* Ports from here on, of an address where nobody listens. */
#define CLOSED_PORT 1000
#define CLOSED_PORTS 100
/* Pause after the first connect: listeners of other programs may just have begun or ended. */
#define SETTLE_US 100000
/* Processes take a thousand times as long as other calls. */
#define PROCESS_SHARE 20

extern char **environ;

static uint64_t samples[TIMES_MAX];
static long times;

static int compare(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return (a > b) - (a < b);
}

static void report(const char *name, long count, double ns_per_tick)
{
    qsort(samples, (size_t)count, sizeof samples[0], compare);
    printf("%s %.1f\n", name, (double)samples[count / 2] * ns_per_tick);
}

/* ---- the peer ---- */

/* A connection of the peer: what it is for, and the connection that was made for it. */
struct client {
    char purpose;
    int made;
    struct address to;
};

static struct client clients[4096];

/* The first byte "c" and a port: every further byte makes a connection to that port, or closes it. */
static bool serve_connects(int fd)
{
    struct client *client = &clients[fd];
    char byte;
    if (recv(fd, &byte, 1, 0) != 1)
        return false;
    if (client->made >= 0) {
        close(client->made);
        client->made = -1;
    } else {
        client->made = open_socket(&client->to, false);
        if (connect(client->made, &client->to.at.any, client->to.len) != 0)
            die("connect");
    }
    return send(fd, &byte, 1, MSG_NOSIGNAL) == 1;
}

static bool serve_client(int fd)
{
    struct client *client = &clients[fd];
    char buffer[4096];
    if (client->purpose == 'c')
        return serve_connects(fd);
    if (client->purpose == 0) {
        if (recv(fd, &client->purpose, 1, 0) != 1)
            return false;
        if (client->purpose != 'c')
            return true;
        client->to = parse_address("127.0.0.1:0");
        return recv(fd, &client->to.at.in.sin_port, 2, MSG_WAITALL) == 2;
    }
    ssize_t got = recv(fd, buffer, sizeof buffer, 0);
    return got > 0 && send(fd, buffer, (size_t)got, MSG_NOSIGNAL) == got;
}

static void serve(const char *address)
{
    int listener = listen_at(address), epoll = new_epoll();
    watch(epoll, listener, EPOLLIN);
    for (;;) {
        struct epoll_event event;
        if (epoll_wait(epoll, &event, 1, -1) != 1)
            continue;
        int fd = event.data.fd;
        if (fd == listener) {
            fd = accept_one(listener, true);
            if (fd >= (int)(sizeof clients / sizeof clients[0]))
                die_plain("too many connections");
            clients[fd] = (struct client){.made = -1};
            watch(epoll, fd, EPOLLIN);
        } else if (!serve_client(fd)) {
            close(fd);
        }
    }
}

/* ---- the program ---- */

static fd_set set_of(int fd)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    return set;
}

/* Times `call` in each of `count` iterations; `before` and `after` are not timed. */
#define TIME(name, count, before, call, after)                                                                         \
    do {                                                                                                               \
        struct scale scale = scale_start();                                                                            \
        for (long index = 0; index < (count); index++) {                                                               \
            before;                                                                                                    \
            uint64_t began = ticks();                                                                                  \
            call;                                                                                                      \
            samples[index] = ticks() - began;                                                                          \
            after;                                                                                                     \
        }                                                                                                              \
        report(name, (count), scale_ns_per_tick(&scale));                                                              \
    } while (0)

static int tcp_socket(int flags)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0);
    if (fd < 0)
        die("socket");
    return fd;
}

static void expect(bool is_right, const char *what)
{
    if (!is_right)
        die("%s", what);
}

static void time_connects(const struct address *server)
{
    struct address closed = parse_address("127.0.0.1:0");
    int fd = -1;
    closed.at.in.sin_port = htons(CLOSED_PORT);
    connect(fd = tcp_socket(0), &server->at.any, server->len); /* what only the first connect does */
    close(fd);
    usleep(SETTLE_US);
    TIME("connect_refused", times, fd = tcp_socket(0),
         expect(connect(fd, &closed.at.any, closed.len) != 0 && errno == ECONNREFUSED, "connect"), close(fd));
    TIME("connect_refused_other_port", times,
         (fd = tcp_socket(0), closed.at.in.sin_port = htons((uint16_t)(CLOSED_PORT + index % CLOSED_PORTS))),
         expect(connect(fd, &closed.at.any, closed.len) != 0 && errno == ECONNREFUSED, "connect"), close(fd));
    TIME("connect", times, fd = tcp_socket(0), expect(connect(fd, &server->at.any, server->len) == 0, "connect"),
         close(fd));
    TIME("connect_nonblocking", times, fd = tcp_socket(SOCK_NONBLOCK),
         expect(connect(fd, &server->at.any, server->len) != 0 && errno == EINPROGRESS, "connect"), close(fd));
    TIME("close_connected", times, (fd = tcp_socket(0), connect(fd, &server->at.any, server->len)), close(fd), (void)0);
}

static void time_sockets(void)
{
    struct address any = parse_address("127.0.0.1:0");
    int fd = -1, one = 1;
    TIME("socket", times, (void)0, fd = tcp_socket(0), close(fd));
    TIME("close", times, fd = tcp_socket(0), close(fd), (void)0);
    TIME("setsockopt", times, fd = tcp_socket(0), setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one),
         close(fd));
    TIME("bind_any_port", times, fd = tcp_socket(0), expect(bind(fd, &any.at.any, any.len) == 0, "bind"), close(fd));
    /* A port that is free: the kernel has just given it to a socket that is closed again. */
    int free_port = tcp_socket(0);
    struct address known = any;
    expect(bind(free_port, &known.at.any, known.len) == 0 && getsockname(free_port, &known.at.any, &known.len) == 0,
           "bind");
    close(free_port);
    TIME("bind", times, fd = tcp_socket(0), expect(bind(fd, &known.at.any, known.len) == 0, "bind"), close(fd));
    TIME("listen", times, (fd = tcp_socket(0), bind(fd, &known.at.any, known.len)),
         expect(listen(fd, 16) == 0, "listen"), close(fd));
    TIME("close_listener", times, (fd = tcp_socket(0), bind(fd, &known.at.any, known.len), listen(fd, 16)), close(fd),
         (void)0);
}

/* Asks the peer for one more connection, which is established when this returns. */
static void ask(int control)
{
    char byte = 'x';
    expect(send(control, &byte, 1, 0) == 1 && recv(control, &byte, 1, 0) == 1, "the peer");
}

static void time_accepts(const char *server)
{
    struct address own = parse_address("127.0.0.1:0");
    int listener = tcp_socket(0), fd = -1, control = connect_to(server, true), epoll = new_epoll();
    struct epoll_event event;
    struct pollfd entry = {.fd = listener, .events = POLLIN};
    char request[3] = {'c'};
    expect(bind(listener, &own.at.any, own.len) == 0 && listen(listener, 16) == 0, "listen");
    expect(getsockname(listener, &own.at.any, &own.len) == 0, "getsockname");
    memcpy(request + 1, &own.at.in.sin_port, 2);
    expect(send(control, request, sizeof request, 0) == sizeof request, "the peer");
    TIME("accept", times, ask(control), fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), (close(fd), ask(control)));
    TIME("close_accepted", times, (ask(control), fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)), close(fd),
         ask(control));
    watch(epoll, listener, EPOLLIN);
    TIME("epoll_wait_listener", times, ask(control), expect(epoll_wait(epoll, &event, 1, -1) == 1, "epoll_wait"),
         (fd = accept(listener, NULL, NULL), close(fd), ask(control)));
    set_nonblocking(listener);
    TIME("accept_none", times, (void)0, expect(accept(listener, NULL, NULL) < 0 && errno == EAGAIN, "accept"), (void)0);
    TIME("poll_listener_none", times, (void)0, expect(poll(&entry, 1, 0) == 0, "poll"), (void)0);
    close(epoll);
    close(listener);
    close(control);
}

static void time_transfers(const char *server)
{
    char byte = 'e', bytes[64] = {0};
    int tcp = connect_to(server, true), epoll = new_epoll();
    struct epoll_event event;
    struct pollfd entry = {.fd = tcp, .events = POLLIN};
    struct iovec vector = {bytes, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1};
    fd_set set;
    expect(send(tcp, &byte, 1, 0) == 1, "send"); /* the peer echoes the rest */
    watch(epoll, tcp, EPOLLIN);
    TIME("epoll_wait_none", times, (void)0, expect(epoll_wait(epoll, &event, 1, 0) == 0, "epoll_wait"), (void)0);
    TIME("send", times, (void)0, expect(send(tcp, bytes, 1, 0) == 1, "send"), recv(tcp, bytes, 1, 0));
    TIME("recv", times, (send(tcp, bytes, 1, 0), poll(&entry, 1, -1)), expect(recv(tcp, bytes, 1, 0) == 1, "recv"),
         (void)0);
    TIME("sendmsg", times, (void)0, expect(sendmsg(tcp, &message, 0) == 1, "sendmsg"), recv(tcp, bytes, 1, 0));
    TIME("recvmsg", times, (send(tcp, bytes, 1, 0), poll(&entry, 1, -1)),
         expect(recvmsg(tcp, &message, 0) == 1, "recvmsg"), (void)0);
    TIME("recv_none", times, (void)0, expect(recv(tcp, bytes, 1, MSG_DONTWAIT) < 0, "recv"), (void)0);
    expect(send(tcp, bytes, 1, 0) == 1 && poll(&entry, 1, -1) == 1, "send");
    TIME("epoll_wait", times, (void)0, expect(epoll_wait(epoll, &event, 1, -1) == 1, "epoll_wait"), (void)0);
    TIME("poll", times, (void)0, expect(poll(&entry, 1, -1) == 1, "poll"), (void)0);
    TIME("select", times, set = set_of(tcp),
         expect(select(tcp + 1, &set, NULL, NULL, NULL) == 1, "select"), (void)0);
    TIME("epoll_ctl", times, event = ((struct epoll_event){.events = EPOLLIN}),
         expect(epoll_ctl(epoll, EPOLL_CTL_MOD, tcp, &event) == 0, "epoll_ctl"), (void)0);
    close(epoll);
    close(tcp);
}

static void time_pipes(void)
{
    int ends[2], epoll = new_epoll(), copy = -1;
    char byte = 'x';
    expect(pipe(ends) == 0, "pipe");
    struct epoll_event event;
    struct pollfd entry = {.fd = ends[0], .events = POLLIN};
    fd_set set;
    watch(epoll, ends[0], EPOLLIN);
    TIME("write_pipe", times, (void)0, expect(write(ends[1], &byte, 1) == 1, "write"), (void)!read(ends[0], &byte, 1));
    TIME("read_pipe", times, (void)!write(ends[1], &byte, 1), expect(read(ends[0], &byte, 1) == 1, "read"), (void)0);
    expect(write(ends[1], &byte, 1) == 1, "write");
    TIME("poll_pipe", times, (void)0, expect(poll(&entry, 1, -1) == 1, "poll"), (void)0);
    TIME("select_pipe", times, set = set_of(ends[0]),
         expect(select(ends[0] + 1, &set, NULL, NULL, NULL) == 1, "select"), (void)0);
    TIME("epoll_wait_pipe", times, (void)0, expect(epoll_wait(epoll, &event, 1, -1) == 1, "epoll_wait"), (void)0);
    TIME("dup_pipe", times, (void)0, copy = dup(ends[0]), close(copy));
    TIME("close_pipe", times, copy = dup(ends[0]), close(copy), (void)0);
    close(epoll);
    close(ends[0]);
    close(ends[1]);
}

/* Starts a program and waits for its end. */
static void start(char *const *command)
{
    pid_t child;
    int status;
    errno = posix_spawnp(&child, command[0], NULL, NULL, command, environ);
    if (errno)
        die("starting %s", command[0]);
    if (waitpid(child, &status, 0) != child || status != 0)
        die_plain("%s failed", command[0]);
}

static void fork_and_exit(void)
{
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    if (child < 0 || waitpid(child, NULL, 0) != child)
        die("fork");
}

static void time_processes(void)
{
    static char *const command[] = {"/bin/true", NULL};
    long count = times / PROCESS_SHARE + 1;
    TIME("fork", count, (void)0, fork_and_exit(), (void)0);
    TIME("spawn", count, (void)0, start(command), (void)0);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0) {
        die_with_parent();
        serve(argv[2]);
    } else if (argc == 4 && strcmp(argv[1], "call") == 0) {
        times = number(argv[3], 1, TIMES_MAX, "times");
        struct address server = parse_address(argv[2]);
        time_connects(&server);
        time_sockets();
        time_transfers(argv[2]);
        time_pipes();
        time_accepts(argv[2]);
        time_processes();
    } else if (argc >= 4 && strcmp(argv[1], "start") == 0) {
        times = number(argv[2], 1, TIMES_MAX, "times");
        TIME("start", times, (void)0, start(argv + 3), (void)0);
    } else {
        fprintf(stderr, "usage: overhead serve ADDRESS | call ADDRESS TIMES | start TIMES PROGRAM [ARGS...]\n");
        return 2;
    }
    return 0;
}
