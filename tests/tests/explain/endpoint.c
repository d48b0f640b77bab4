// A program with TCP sockets in the states that `crosslane explain` tells apart.
// Connections are busy: they have made ROUND_TRIPS.
// usage: endpoint serve [ADDRESS:]PORT    echo what all clients send
//        endpoint connect [ADDRESS:]PORT...
//                                         connect to each port, with an unconnected socket and a copy of the first
//        endpoint young PORT              connect, and make one round trip
//        endpoint steady PORT             connect, and go on with round trips
//        endpoint signals PORT            connect a socket that asks for SIGIO
//        endpoint filter PORT PORT        connect, install a filter that allows everything, connect
//        endpoint deny-unix PROGRAM ARGS  run a program that cannot create AF_UNIX sockets
//        endpoint pass PORT PROGRAM ARGS  run a program that inherits a connection
//        endpoint hold                    keep what was inherited
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

// Round trips after which a connection has tried to get a lane.
#define ROUND_TRIPS 50
#define CLIENTS_MAX 64

static void die(const char *what) {
    perror(what);
    exit(1);
}

// Parses PORT or ADDRESS:PORT.
static struct sockaddr_in address(const char *text) {
    const char *colon = strchr(text, ':');
    char ip[64] = "127.0.0.1";
    if (colon)
        snprintf(ip, sizeof ip, "%.*s", (int)(colon - text), text);
    struct sockaddr_in at = {.sin_family = AF_INET};
    at.sin_port = htons((unsigned short)atoi(colon ? colon + 1 : text));
    if (inet_pton(AF_INET, ip, &at.sin_addr) != 1)
        die(text);
    return at;
}

static void exchange(int fd, int round_trips) {
    char byte = 'x';
    for (int i = 0; i < round_trips; i++)
        if (send(fd, &byte, 1, 0) != 1 || recv(fd, &byte, 1, 0) != 1)
            die("exchange");
}

static int connected(const char *port, int asks_for_signals, int round_trips) {
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in to = address(port);
    if (asks_for_signals && fcntl(fd, F_SETFL, O_ASYNC) != 0)
        die("F_SETFL");
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        die("connect");
    exchange(fd, round_trips);
    return fd;
}

static void install(struct sock_filter *filter, unsigned short length) {
    struct sock_fprog program = {.len = length, .filter = filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        die("seccomp");
}

static void keep(void) {
    puts("ready");
    fflush(stdout);
    for (;;)
        pause();
}

static void serve(const char *port) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in at = address(port);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 16) != 0)
        die("listen");
    struct pollfd fds[1 + CLIENTS_MAX] = {{.fd = listener, .events = POLLIN}};
    int count = 1;
    for (;;) {
        if (poll(fds, (nfds_t)count, -1) < 0)
            die("poll");
        for (int i = count - 1; i > 0; i--) {
            char buffer[4096];
            ssize_t bytes = fds[i].revents ? recv(fds[i].fd, buffer, sizeof buffer, MSG_DONTWAIT) : -1;
            if (bytes > 0)
                send(fds[i].fd, buffer, (size_t)bytes, MSG_NOSIGNAL);
            else if (bytes == 0 || (fds[i].revents && errno != EAGAIN)) {
                close(fds[i].fd);
                fds[i] = fds[--count];
            }
        }
        if (fds[0].revents) {
            int client = accept(listener, NULL, NULL);
            if (client < 0 || count > CLIENTS_MAX)
                die("accept");
            fds[count++] = (struct pollfd){.fd = client, .events = POLLIN};
        }
    }
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "serve") && argc == 3) {
        serve(argv[2]);
    } else if (!strcmp(what, "connect")) {
        int first = -1;
        for (int i = 2; i < argc; i++) {
            int fd = connected(argv[i], 0, ROUND_TRIPS);
            first = i == 2 ? fd : first;
        }
        if (socket(AF_INET, SOCK_STREAM, 0) < 0 || dup(first) < 0 || socket(AF_INET, SOCK_DGRAM, 0) < 0)
            die("socket");
        keep();
    } else if (!strcmp(what, "young") && argc == 3) {
        connected(argv[2], 0, 1);
        keep();
    } else if (!strcmp(what, "steady") && argc == 3) {
        int fd = connected(argv[2], 0, ROUND_TRIPS);
        puts("ready");
        fflush(stdout);
        for (;;) {
            exchange(fd, 1);
            usleep(10000);
        }
    } else if (!strcmp(what, "signals") && argc == 3) {
        connected(argv[2], 1, ROUND_TRIPS);
        keep();
    } else if (!strcmp(what, "filter") && argc == 4) {
        struct sock_filter allow[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
        connected(argv[2], 0, ROUND_TRIPS);
        install(allow, 1);
        connected(argv[3], 0, ROUND_TRIPS);
        keep();
    } else if (!strcmp(what, "deny-unix") && argc > 2) {
        struct sock_filter deny[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 0, 3),
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAFNOSUPPORT),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        install(deny, sizeof deny / sizeof *deny);
        execvp(argv[2], argv + 2);
        die(argv[2]);
    } else if (!strcmp(what, "pass") && argc > 3) {
        connected(argv[2], 0, ROUND_TRIPS);
        execvp(argv[3], argv + 3);
        die(argv[3]);
    } else if (!strcmp(what, "hold")) {
        keep();
    }
    fprintf(stderr, "endpoint: wrong use\n");
    return 2;
}
