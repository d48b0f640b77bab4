// Helpers of all checks: registration, assertions, connections, peers.
//
// A check is a function. It runs in a process group of its own with a time limit; the first failed
// assertion, in whichever process or thread of the group, reports and ends the whole group.
#ifndef CHECK_H
#define CHECK_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

// Limit of one wait. Long enough for a busy machine: only a real hang waits this long.
#define WAIT_MS_MAX 20000
// How long a descriptor must stay silent before a check concludes that nothing will arrive.
#define SILENCE_MS 60

// ---- reporting ----------------------------------------------------------------------------------

__attribute__((noreturn, format(printf, 3, 4))) void fail_at(const char *file, int line,
                                                              const char *format, ...);
__attribute__((noreturn, format(printf, 1, 2))) void skip(const char *format, ...);
__attribute__((format(printf, 1, 2))) void info(const char *format, ...);

// Prefix of this thread's failure message, such as the random seed.
extern _Thread_local char failure_note[160];

#define FAIL(...) fail_at(__FILE__, __LINE__, __VA_ARGS__)

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition))                                                                          \
            FAIL("%s is false", #condition);                                                       \
    } while (0)

#define CHECK_EQ(got, want)                                                                        \
    do {                                                                                           \
        long long got_ = (long long)(got), want_ = (long long)(want);                              \
        if (got_ != want_)                                                                         \
            FAIL("%s is %lld (errno %s), want %lld", #got, got_, strerrorname_np(errno), want_);   \
    } while (0)

// Fails the check unless the call returns -1 with this errno.
#define CHECK_ERR(call, want)                                                                      \
    do {                                                                                           \
        errno = 0;                                                                                 \
        long long got_ = (long long)(call);                                                        \
        int errno_ = errno;                                                                        \
        if (got_ != -1 || errno_ != (want))                                                        \
            FAIL("%s gave %lld and errno %s, want -1 and %s", #call, got_,                         \
                 strerrorname_np(errno_), strerrorname_np(want));                                  \
    } while (0)

// Fails the check if the call returns -1 or sets errno; yields the value of the call.
#define OK(call)                                                                                   \
    ({                                                                                             \
        errno = 0;                                                                                 \
        __auto_type value_ = (call);                                                               \
        if (value_ == -1)                                                                          \
            FAIL("%s failed: %s", #call, strerrorname_np(errno));                                  \
        if (errno != 0)                                                                            \
            FAIL("%s succeeded and set errno to %s", #call, strerrorname_np(errno));               \
        value_;                                                                                    \
    })

// ---- registration -------------------------------------------------------------------------------

typedef void check_fn(void);
void register_check(const char *name, check_fn *run);

// A check that runs as one process, or that starts its peers itself.
#define TEST(name)                                                                                 \
    static void name(void);                                                                        \
    __attribute__((constructor)) static void register_##name(void) { register_check(#name, name); } \
    static void name(void)

// One endpoint of a connection whose other endpoint belongs to another process or thread.
struct endpoint {
    int fd;        // the connection; a role may close it and must then set it to -1
    int listener;  // only in the server role, otherwise -1
    int to_peer;   // pipe to the other role
    int from_peer; // pipe from the other role
};
typedef void role_fn(struct endpoint *me);
void run_in_processes(role_fn *server, role_fn *client);
void run_in_threads(role_fn *server, role_fn *client);

// A check of two roles: SERVER(name) {...}, then CLIENT(name) {...}. It is registered twice: with the
// client in another process, and with the client in another thread.
#define SERVER(name) static void name##_server(struct endpoint *me)
#define CLIENT(name)                                                                               \
    static void name##_client(struct endpoint *me);                                                     \
    static void name##_processes(void) { run_in_processes(name##_server, name##_client); }         \
    static void name##_threads(void) { run_in_threads(name##_server, name##_client); }             \
    __attribute__((constructor)) static void register_##name(void)                                 \
    {                                                                                              \
        register_check(#name ".processes", name##_processes);                                      \
        register_check(#name ".threads", name##_threads);                                          \
    }                                                                                              \
    static void name##_client(struct endpoint *me)

// Barrier of the two roles.
void meet(struct endpoint *me);

// ---- connections --------------------------------------------------------------------------------

struct address {
    struct sockaddr_storage storage;
    socklen_t size;
};
#define ADDRESS(a) ((struct sockaddr *)&(a)->storage)

struct address ip4(const char *text, uint16_t port);
struct address ip6(const char *text, uint16_t port);
struct address name_of(int fd);
struct address peer_of(int fd);
uint16_t port_of(const struct address *address);
void check_same_address(const struct address *got, const struct address *want);
void require_ip6(void);

int listen_at(const struct address *where, int backlog);
// Listens on a free port of 127.0.0.1 and stores the address in `bound`.
int listen_anywhere(struct address *bound);
// Returns a port of 127.0.0.1 on which nothing listens.
struct address silent_address(void);
int dial(const struct address *where);
int try_dial(const struct address *where); // -1 and errno if refused
int accept_from(int listener);

struct pair {
    int client;
    int server;
    int listener;
};
// Both endpoints are in this process.
struct pair connected_pair(void);
struct pair connected_pair_at(const struct address *where);
void close_pair(struct pair *pair);

// ---- bytes --------------------------------------------------------------------------------------

void send_all(int fd, const void *bytes, size_t size);
void recv_exact(int fd, void *bytes, size_t size);
void say(int fd, const char *text);
void expect(int fd, const char *text);
void expect_eof(int fd);
void ping_pong(int one, int other); // both directions of a connection work
void greet(const struct address *where, int listener); // a new connection works

// A byte stream in which each position differs from its neighbours.
struct pattern;
struct pattern *pattern_new(uint64_t seed);
void pattern_fill(const struct pattern *pattern, uint64_t position, void *bytes, size_t size);
void pattern_check(const struct pattern *pattern, uint64_t position, const void *bytes, size_t size);
void pattern_send(const struct pattern *pattern, int fd, uint64_t total, size_t chunk);
void pattern_recv(const struct pattern *pattern, int fd, uint64_t total, size_t chunk);
uint64_t random_next(uint64_t *state);

// ---- readiness ----------------------------------------------------------------------------------

int poll_once(int fd, int events, int timeout_ms); // returns revents, 0 after the time-out
void await(int fd, int events);                     // waits for one of these events
void await_revents(int fd, int events, int all);    // waits for all of these events
void expect_silent(int fd, int events);
void set_nonblocking(int fd);
size_t fill_until_full(int fd); // sends until EAGAIN; returns the number of bytes accepted
size_t drain_until_empty(int fd);
int64_t now_ms(void); // monotonic, from an arbitrary origin
void pause_ms(int milliseconds);

int epoll_with(int fd, uint32_t events);
void epoll_add(int epoll, int fd, uint32_t events, uint64_t data);
struct epoll_event epoll_one(int epoll); // waits for exactly one event
void epoll_none(int epoll);

// ---- processes and signals ----------------------------------------------------------------------

int options_of(int fd);     // TCP_CORK, SO_OOBINLINE, TCP_NODELAY and SO_KEEPALIVE, one bit each
void set_options(int fd, int bits);
pid_t fork_child(void);     // 0 in the child, which must end with _exit(0)
void wait_child(pid_t pid); // reaps; fails unless the child exited with 0
void kill_child(pid_t pid); // sends SIGKILL and reaps
void on_signal(int signal, void (*handler)(int), int flags);
void count_signal(int signal); // handler that increments signals_seen
extern volatile sig_atomic_t signals_seen;
void alarm_every_ms(int milliseconds); // SIGALRM, repeatedly, so that a wait cannot miss all of them; 0 stops

// SIGALRM in 20 us, and then every 50 ms for a call that missed the first one.
void alarm_soon(void);

pthread_t start_thread(void *(*body)(void *), void *argument);
void join_thread(pthread_t thread);

#endif
