/* Shared by the probe programs of `crosslane bench`: clock, histogram, addresses, and the ways an ordinary program
 * waits on a socket (blocking, spinning on a non-blocking descriptor, level-triggered epoll_wait). Nothing here depends
 * on Crosslane. */
#ifndef PROBE_COMMON_H
#define PROBE_COMMON_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#define UNUSED __attribute__((unused))

/* Backlog for many clients that connect at once: with less, kernel TCP drops handshakes and retries after a second. */
#define LISTEN_BACKLOG 4096

/* ---- errors: one line, exit 1 ---- */

__attribute__((noreturn, format(printf, 1, 2))) static UNUSED void die(const char *format, ...)
{
    int saved = errno;
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    if (saved)
        fprintf(stderr, ": %s", strerror(saved));
    fputc('\n', stderr);
    exit(1);
}

__attribute__((noreturn, format(printf, 1, 2))) static UNUSED void die_plain(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

static UNUSED void die_with_parent(void)
{
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        die("prctl(PR_SET_PDEATHSIG)");
}

static UNUSED long number(const char *text, long low, long high, const char *what)
{
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno || *text == 0 || *end || value < low || value > high) {
        errno = 0;
        die_plain("%s: '%s' is not a number from %ld to %ld", what, text, low, high);
    }
    return value;
}

static UNUSED void *alloc_touched(size_t bytes)
{
    void *memory = aligned_alloc(4096, (bytes + 4095) & ~(size_t)4095);
    if (!memory)
        die("allocating %zu bytes", bytes);
    memset(memory, 0x5a, bytes); /* page faults happen here, not in the measurement */
    return memory;
}

/* ---- clock: the cheapest counter, scaled against CLOCK_MONOTONIC over the whole run ---- */

static inline UNUSED uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline UNUSED uint64_t ticks(void)
{
#if defined(__x86_64__)
    return __rdtsc();
#elif defined(__aarch64__)
    uint64_t value;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(value));
    return value;
#else
    return clock_ns();
#endif
}

struct scale {
    uint64_t ticks, ns;
};

static UNUSED struct scale scale_start(void)
{
    struct scale start = {ticks(), clock_ns()};
    return start;
}

static UNUSED double scale_ns_per_tick(const struct scale *start)
{
    uint64_t now_ticks = ticks(), now_ns = clock_ns();
    if (now_ticks <= start->ticks || now_ns <= start->ns)
        die_plain("the clock did not advance");
    return (double)(now_ns - start->ns) / (double)(now_ticks - start->ticks);
}

/* Returns the ticks in `milliseconds`, from a 2 ms calibration, which is precise enough only to end a run. */
static UNUSED uint64_t ticks_in_ms(long milliseconds)
{
    struct scale start = scale_start();
    while (clock_ns() - start.ns < 2000000)
        ;
    return (uint64_t)((double)milliseconds * 1e6 / scale_ns_per_tick(&start));
}

/* ---- histogram: log-linear, 256 buckets an octave, so a bucket is at most 0.4% wide ---- */

#define HIST_SUB_BITS 8
#define HIST_SUB (1u << HIST_SUB_BITS)
#define HIST_BUCKETS ((64 - HIST_SUB_BITS + 1) * HIST_SUB)

struct hist {
    uint64_t count[HIST_BUCKETS];
    uint64_t max;
};

static inline UNUSED void hist_add(struct hist *hist, uint64_t value)
{
    unsigned index;
    if (value < HIST_SUB) {
        index = (unsigned)value;
    } else {
        unsigned shift = 63 - (unsigned)__builtin_clzll(value) - HIST_SUB_BITS;
        index = (shift + 1) * HIST_SUB + (unsigned)((value >> shift) & (HIST_SUB - 1));
    }
    hist->count[index]++;
    if (value > hist->max)
        hist->max = value;
}

static UNUSED void hist_print(const struct hist *hist, double ns_per_tick)
{
    for (unsigned index = 0; index < HIST_BUCKETS; index++) {
        if (!hist->count[index])
            continue;
        double middle = index;
        if (index >= HIST_SUB) {
            unsigned shift = index / HIST_SUB - 1;
            double low = (double)(((uint64_t)HIST_SUB + index % HIST_SUB) << shift);
            middle = low + ((double)(1ull << shift) - 1) / 2;
        }
        printf("hist %.2f %llu\n", middle * ns_per_tick, (unsigned long long)hist->count[index]);
    }
    printf("max_ns %.2f\n", (double)hist->max * ns_per_tick);
}

/* ---- addresses: "/path" is AF_UNIX, "A.B.C.D:PORT" is TCP ---- */

struct address {
    union {
        struct sockaddr any;
        struct sockaddr_in in;
        struct sockaddr_un un;
    } at;
    socklen_t len;
};

static UNUSED struct address parse_address(const char *text)
{
    struct address address;
    memset(&address, 0, sizeof address);
    if (text[0] == '/') {
        if (strlen(text) >= sizeof address.at.un.sun_path)
            die_plain("%s: the path is too long for a socket", text);
        address.at.un.sun_family = AF_UNIX;
        strcpy(address.at.un.sun_path, text);
        address.len = sizeof address.at.un;
        return address;
    }
    char host[64];
    const char *colon = strrchr(text, ':');
    if (!colon || (size_t)(colon - text) >= sizeof host)
        die_plain("%s: expected HOST:PORT or an absolute path", text);
    memcpy(host, text, (size_t)(colon - text));
    host[colon - text] = 0;
    address.at.in.sin_family = AF_INET;
    address.at.in.sin_port = htons((uint16_t)number(colon + 1, 0, 65535, "port"));
    if (inet_pton(AF_INET, host, &address.at.in.sin_addr) != 1)
        die_plain("%s: not an IPv4 address", host);
    address.len = sizeof address.at.in;
    return address;
}

static UNUSED int open_socket(const struct address *address, bool nodelay)
{
    int fd = socket(address->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        die("socket");
    int one = 1;
    bool tcp = address->at.any.sa_family == AF_INET;
    if (tcp && nodelay && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0)
        die("setsockopt(TCP_NODELAY)");
    return fd;
}

/* Listens, and prints the address for the driver: "ready ADDRESS" is the first line of a server. */
static UNUSED int listen_at(const char *text)
{
    struct address address = parse_address(text);
    int fd = open_socket(&address, false);
    int one = 1;
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0)
        die("setsockopt(SO_REUSEADDR)");
    if (bind(fd, &address.at.any, address.len) != 0)
        die("bind %s", text);
    if (listen(fd, LISTEN_BACKLOG) != 0)
        die("listen %s", text);
    if (address.at.any.sa_family == AF_UNIX) {
        printf("ready %s\n", text);
    } else {
        if (getsockname(fd, &address.at.any, &address.len) != 0)
            die("getsockname");
        char host[INET_ADDRSTRLEN];
        inet_ntop(AF_INET, &address.at.in.sin_addr, host, sizeof host);
        printf("ready %s:%u\n", host, ntohs(address.at.in.sin_port));
    }
    fflush(stdout);
    return fd;
}

static UNUSED int accept_one(int listener, bool nodelay)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0)
        die("accept");
    int one = 1;
    if (nodelay && setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) != 0 && errno != EOPNOTSUPP)
        die("setsockopt(TCP_NODELAY)");
    return fd;
}

static UNUSED int connect_to(const char *text, bool nodelay)
{
    struct address address = parse_address(text);
    int fd = open_socket(&address, nodelay);
    if (connect(fd, &address.at.any, address.len) != 0)
        die("connect %s", text);
    return fd;
}

/* ---- a connection and its wait mode ---- */

static UNUSED void set_nonblocking(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0)
        die("fcntl(O_NONBLOCK)");
}

static UNUSED int new_epoll(void)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    if (epoll < 0)
        die("epoll_create1");
    return epoll;
}

static UNUSED void watch(int epoll, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = fd};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) != 0)
        die("epoll_ctl");
}

enum waiting { WAIT_BLOCKING, WAIT_SPIN, WAIT_EPOLL, WAIT_EPOLL_SPIN };

static UNUSED enum waiting parse_waiting(const char *text)
{
    static const char *names[] = {"blocking", "spin", "epoll", "epoll-spin"};
    for (int index = 0; index < 4; index++)
        if (strcmp(text, names[index]) == 0)
            return (enum waiting)index;
    die_plain("%s: expected blocking, spin, epoll or epoll-spin", text);
}

struct conn {
    int fd, epoll;
    enum waiting waiting;
};

static UNUSED struct conn conn_of(int fd, enum waiting waiting)
{
    struct conn conn = {fd, -1, waiting};
    if (waiting == WAIT_BLOCKING)
        return conn;
    set_nonblocking(fd);
    if (waiting == WAIT_SPIN)
        return conn;
    conn.epoll = new_epoll();
    watch(conn.epoll, fd, EPOLLIN);
    return conn;
}

static UNUSED void conn_wait(struct conn *conn)
{
    struct epoll_event event;
    int timeout = conn->waiting == WAIT_EPOLL_SPIN ? 0 : -1;
    int got;
    do
        got = epoll_wait(conn->epoll, &event, 1, timeout);
    while (got == 0 || (got < 0 && errno == EINTR));
    if (got < 0)
        die("epoll_wait");
}

static UNUSED void conn_wait_writable(struct conn *conn)
{
    if (conn->waiting == WAIT_SPIN)
        return;
    struct epoll_event event = {.events = EPOLLOUT, .data.fd = conn->fd};
    if (epoll_ctl(conn->epoll, EPOLL_CTL_MOD, conn->fd, &event) != 0)
        die("epoll_ctl");
    conn_wait(conn);
    event.events = EPOLLIN;
    if (epoll_ctl(conn->epoll, EPOLL_CTL_MOD, conn->fd, &event) != 0)
        die("epoll_ctl");
}

static inline UNUSED void conn_send_all(struct conn *conn, const char *data, size_t bytes)
{
    while (bytes) {
        ssize_t sent = send(conn->fd, data, bytes, MSG_NOSIGNAL);
        if (sent >= 0) {
            data += sent;
            bytes -= (size_t)sent;
        } else if (errno == EAGAIN) {
            conn_wait_writable(conn);
        } else if (errno != EINTR) {
            die("send");
        }
    }
}

/* Receives at most `bytes` with one recv(), in the wait mode of the connection; 0 is end of stream. */
static inline UNUSED size_t conn_recv(struct conn *conn, char *data, size_t bytes)
{
    for (;;) {
        if (conn->epoll >= 0)
            conn_wait(conn);
        ssize_t got = recv(conn->fd, data, bytes, 0);
        if (got >= 0)
            return (size_t)got;
        if (errno != EAGAIN && errno != EINTR)
            die("recv");
    }
}

/* Receives exactly `bytes`; false if the stream ended before the first of them. */
static inline UNUSED bool conn_recv_all(struct conn *conn, char *data, size_t bytes)
{
    size_t have = 0;
    while (have < bytes) {
        size_t got = conn_recv(conn, data + have, bytes - have);
        if (got == 0) {
            if (have == 0)
                return false;
            errno = 0;
            die_plain("the stream ended after %zu of %zu bytes of a message", have, bytes);
        }
        have += got;
    }
    return true;
}

#endif
