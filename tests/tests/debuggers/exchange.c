// A client and a server that exchange messages of up to 20 kB, by the calls of ordinary programs.
// usage: exchange serve PORT    serve one client by epoll in a second thread, then end
//        exchange call PORT     send and receive by poll and blocking calls; prints "done"
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#define MESSAGES 60
#define BYTES_MAX 20000

static void die(const char *what) {
    perror(what);
    exit(1);
}

static struct sockaddr_in address(const char *port) {
    return (struct sockaddr_in){.sin_family = AF_INET,
                                .sin_port = htons((unsigned short)atoi(port)),
                                .sin_addr = {htonl(INADDR_LOOPBACK)}};
}

static void send_all(int fd, const char *bytes, size_t count) {
    while (count > 0) {
        ssize_t sent = send(fd, bytes, count, MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN)
            die("send");
        if (sent < 0) {
            struct pollfd room = {.fd = fd, .events = POLLOUT};
            poll(&room, 1, -1);
            continue;
        }
        bytes += sent;
        count -= (size_t)sent;
    }
}

static void *serve_client(void *listener) {
    int epoll = epoll_create1(EPOLL_CLOEXEC), client = -1;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = *(int *)listener};
    char bytes[4096];
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, *(int *)listener, &event) != 0)
        die("epoll_ctl");
    for (;;) {
        if (epoll_wait(epoll, &event, 1, -1) != 1)
            continue;
        if (event.data.fd == *(int *)listener) {
            client = accept4(*(int *)listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (client < 0)
                die("accept");
            event = (struct epoll_event){.events = EPOLLIN, .data.fd = client};
            if (epoll_ctl(epoll, EPOLL_CTL_ADD, client, &event) != 0)
                die("epoll_ctl");
            continue;
        }
        ssize_t got = read(client, bytes, sizeof bytes);
        if (got == 0)
            break;
        if (got > 0)
            send_all(client, bytes, (size_t)got);
        else if (errno != EAGAIN)
            die("read");
    }
    close(client);
    close(epoll);
    return NULL;
}

static void serve(const char *port) {
    struct sockaddr_in at = address(port);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    pthread_t thread;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 4) != 0)
        die("listen");
    if (pthread_create(&thread, NULL, serve_client, &listener) != 0 || pthread_join(thread, NULL) != 0)
        die("pthread_create");
    close(listener);
}

static void call(const char *port) {
    struct sockaddr_in to = address(port);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    static char sent[BYTES_MAX], received[BYTES_MAX];
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0)
        die("connect");
    for (int index = 0; index < MESSAGES; index++) {
        size_t count = 1 + (size_t)index * 331 % BYTES_MAX, got = 0;
        memset(sent, 'a' + index % 26, count);
        send_all(fd, sent, count);
        while (got < count) {
            struct pollfd readable = {.fd = fd, .events = POLLIN};
            struct iovec rest = {received + got, count - got};
            if (index % 3 == 0 && poll(&readable, 1, -1) != 1)
                die("poll");
            ssize_t part = index % 2 ? readv(fd, &rest, 1) : recv(fd, received + got, count - got, 0);
            if (part <= 0)
                die("recv");
            got += (size_t)part;
        }
        if (memcmp(sent, received, count) != 0)
            die("other bytes");
    }
    close(fd);
    puts("done");
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        serve(argv[2]);
    else if (argc == 3 && strcmp(argv[1], "call") == 0)
        call(argv[2]);
    else
        return 2;
    return 0;
}
