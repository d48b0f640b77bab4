// Connections, bytes, readiness and processes for the checks.
#include "check.h"

#include <sys/time.h>
#include <time.h>

// ---- addresses and connections ------------------------------------------------------------------

struct address ip4(const char *text, uint16_t port)
{
    struct address address = {.size = sizeof(struct sockaddr_in)};
    struct sockaddr_in *in = (struct sockaddr_in *)&address.storage;
    in->sin_family = AF_INET;
    in->sin_port = htons(port);
    CHECK_EQ(inet_pton(AF_INET, text, &in->sin_addr), 1);
    return address;
}

struct address ip6(const char *text, uint16_t port)
{
    struct address address = {.size = sizeof(struct sockaddr_in6)};
    struct sockaddr_in6 *in = (struct sockaddr_in6 *)&address.storage;
    in->sin6_family = AF_INET6;
    in->sin6_port = htons(port);
    CHECK_EQ(inet_pton(AF_INET6, text, &in->sin6_addr), 1);
    return address;
}

struct address name_of(int fd)
{
    struct address address = {.size = sizeof address.storage};
    OK(getsockname(fd, ADDRESS(&address), &address.size));
    return address;
}

struct address peer_of(int fd)
{
    struct address address = {.size = sizeof address.storage};
    OK(getpeername(fd, ADDRESS(&address), &address.size));
    return address;
}

uint16_t port_of(const struct address *address)
{
    if (address->storage.ss_family == AF_INET6)
        return ntohs(((const struct sockaddr_in6 *)&address->storage)->sin6_port);
    return ntohs(((const struct sockaddr_in *)&address->storage)->sin_port);
}

static void address_text(const struct address *address, char *text, size_t size)
{
    char ip[INET6_ADDRSTRLEN] = "?";
    if (address->storage.ss_family == AF_INET6)
        inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)&address->storage)->sin6_addr, ip,
                  sizeof ip);
    else
        inet_ntop(AF_INET, &((const struct sockaddr_in *)&address->storage)->sin_addr, ip,
                  sizeof ip);
    snprintf(text, size, "[%s]:%u", ip, port_of(address));
}

void check_same_address(const struct address *got, const struct address *want)
{
    char got_text[80], want_text[80];
    address_text(got, got_text, sizeof got_text);
    address_text(want, want_text, sizeof want_text);
    if (got->storage.ss_family != want->storage.ss_family || strcmp(got_text, want_text) != 0)
        FAIL("address is %s (family %d), want %s (family %d)", got_text, got->storage.ss_family,
             want_text, want->storage.ss_family);
    CHECK_EQ(got->size, want->size);
}

void require_ip6(void)
{
    struct address any = ip6("::1", 0);
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, ADDRESS(&any), any.size) != 0)
        skip("this machine has no IPv6 loopback");
    close(fd);
}

int listen_at(const struct address *where, int backlog)
{
    int fd = OK(socket(where->storage.ss_family, SOCK_STREAM, 0));
    int yes = 1;
    OK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes));
    OK(bind(fd, ADDRESS(where), where->size));
    OK(listen(fd, backlog));
    return fd;
}

int listen_anywhere(struct address *bound)
{
    struct address any = ip4("127.0.0.1", 0);
    int fd = listen_at(&any, 128);
    *bound = name_of(fd);
    return fd;
}

struct address silent_address(void)
{
    // Bound but not listening, so that no other process can bind the port while the check runs.
    struct address any = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(fd, ADDRESS(&any), any.size));
    struct address address = name_of(fd);
    OK(fcntl(fd, F_DUPFD, 600));
    OK(close(fd));
    return address;
}

int try_dial(const struct address *where)
{
    int fd = OK(socket(where->storage.ss_family, SOCK_STREAM, 0));
    if (connect(fd, ADDRESS(where), where->size) == 0)
        return fd;
    int saved = errno;
    close(fd);
    errno = saved;
    return -1;
}

int dial(const struct address *where)
{
    return OK(try_dial(where));
}

int accept_from(int listener)
{
    return OK(accept(listener, NULL, NULL));
}

// Round trips on each connection before a check begins: a connection that has carried some is not a young one.
static int rounds_before(void)
{
    const char *rounds = getenv("SEMANTICS_ROUNDS");
    return rounds ? atoi(rounds) : 0;
}

static void say_byte(int fd)
{
    char byte = 'r';
    CHECK_EQ(send(fd, &byte, 1, MSG_NOSIGNAL), 1);
}

static void expect_byte(int fd)
{
    char byte;
    CHECK_EQ(recv(fd, &byte, 1, 0), 1);
}

struct pair connected_pair_at(const struct address *where)
{
    struct pair pair;
    pair.listener = listen_at(where, 128);
    struct address bound = name_of(pair.listener);
    pair.client = dial(&bound);
    pair.server = accept_from(pair.listener);
    for (int round = 0; round < rounds_before(); round++) {
        say_byte(pair.client);
        expect_byte(pair.server);
        say_byte(pair.server);
        expect_byte(pair.client);
    }
    return pair;
}

struct pair connected_pair(void)
{
    struct address any = ip4("127.0.0.1", 0);
    return connected_pair_at(&any);
}

void close_pair(struct pair *pair)
{
    OK(close(pair->client));
    OK(close(pair->server));
    OK(close(pair->listener));
}

// ---- two roles ----------------------------------------------------------------------------------

void meet(struct endpoint *me)
{
    char byte = 'm';
    CHECK_EQ(write(me->to_peer, &byte, 1), 1);
    CHECK_EQ(read(me->from_peer, &byte, 1), 1);
}

struct roles {
    role_fn *client;
    struct endpoint client_endpoint;
    struct address address;
};

static void play_client(struct roles *roles)
{
    roles->client_endpoint.fd = dial(&roles->address);
    for (int round = 0; round < rounds_before(); round++) {
        say_byte(roles->client_endpoint.fd);
        expect_byte(roles->client_endpoint.fd);
    }
    roles->client(&roles->client_endpoint);
    if (roles->client_endpoint.fd >= 0)
        OK(close(roles->client_endpoint.fd));
}

static void play_server(role_fn *server, struct endpoint *endpoint)
{
    endpoint->fd = accept_from(endpoint->listener);
    for (int round = 0; round < rounds_before(); round++) {
        expect_byte(endpoint->fd);
        say_byte(endpoint->fd);
    }
    server(endpoint);
    if (endpoint->fd >= 0)
        OK(close(endpoint->fd));
    OK(close(endpoint->listener));
}

static void prepare(struct roles *roles, struct endpoint *server_endpoint)
{
    int up[2], down[2];
    OK(pipe(up));
    OK(pipe(down));
    *server_endpoint = (struct endpoint){.fd = -1, .to_peer = down[1], .from_peer = up[0]};
    server_endpoint->listener = listen_anywhere(&roles->address);
    roles->client_endpoint = (struct endpoint){.fd = -1, .listener = -1, .to_peer = up[1], .from_peer = down[0]};
}

void run_in_processes(role_fn *server, role_fn *client)
{
    struct roles roles = {.client = client};
    struct endpoint server_endpoint;
    prepare(&roles, &server_endpoint);
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(server_endpoint.listener));
        play_client(&roles);
        _exit(0);
    }
    play_server(server, &server_endpoint);
    wait_child(pid);
}

static void *client_thread(void *argument)
{
    play_client(argument);
    return NULL;
}

void run_in_threads(role_fn *server, role_fn *client)
{
    struct roles roles = {.client = client};
    struct endpoint server_endpoint;
    prepare(&roles, &server_endpoint);
    pthread_t thread = start_thread(client_thread, &roles);
    play_server(server, &server_endpoint);
    join_thread(thread);
}

// ---- bytes --------------------------------------------------------------------------------------

void send_all(int fd, const void *bytes, size_t size)
{
    const char *next = bytes;
    while (size > 0) {
        ssize_t sent = OK(send(fd, next, size, MSG_NOSIGNAL));
        CHECK(sent > 0 && (size_t)sent <= size);
        next += sent;
        size -= sent;
    }
}

void recv_exact(int fd, void *bytes, size_t size)
{
    char *next = bytes;
    while (size > 0) {
        ssize_t got = OK(recv(fd, next, size, 0));
        if (got == 0)
            FAIL("end of stream with %zu bytes still expected", size);
        CHECK((size_t)got <= size);
        next += got;
        size -= got;
    }
}

void say(int fd, const char *text)
{
    send_all(fd, text, strlen(text));
}

void expect(int fd, const char *text)
{
    char got[256] = {0};
    size_t size = strlen(text);
    CHECK(size < sizeof got);
    recv_exact(fd, got, size);
    if (memcmp(got, text, size) != 0)
        FAIL("received \"%s\", want \"%s\"", got, text);
}

void expect_eof(int fd)
{
    char byte;
    CHECK_EQ(recv(fd, &byte, 1, 0), 0);
}

void ping_pong(int one, int other)
{
    say(one, "ping");
    expect(other, "ping");
    say(other, "pong");
    expect(one, "pong");
}

void greet(const struct address *where, int listener)
{
    int client = dial(where);
    int server = accept_from(listener);
    ping_pong(client, server);
    OK(close(client));
    OK(close(server));
}

// A prime, so that a shift by any usual buffer size is detected.
#define PATTERN_BYTES 65521

struct pattern {
    unsigned char bytes[PATTERN_BYTES];
};

uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

struct pattern *pattern_new(uint64_t seed)
{
    struct pattern *pattern = malloc(sizeof *pattern);
    CHECK(pattern != NULL);
    for (size_t i = 0; i < PATTERN_BYTES; i++)
        pattern->bytes[i] = (unsigned char)random_next(&seed);
    return pattern;
}

static size_t run_at(uint64_t position, size_t size)
{
    size_t left = PATTERN_BYTES - position % PATTERN_BYTES;
    return size < left ? size : left;
}

void pattern_fill(const struct pattern *pattern, uint64_t position, void *bytes, size_t size)
{
    char *next = bytes;
    while (size > 0) {
        size_t run = run_at(position, size);
        memcpy(next, pattern->bytes + position % PATTERN_BYTES, run);
        next += run;
        position += run;
        size -= run;
    }
}

static void fail_at_difference(const unsigned char *got, const unsigned char *want, size_t size,
                               uint64_t position)
{
    for (size_t i = 0; i < size; i++)
        if (got[i] != want[i])
            FAIL("byte %llu of the stream is 0x%02x, want 0x%02x",
                 (unsigned long long)(position + i), got[i], want[i]);
}

void pattern_check(const struct pattern *pattern, uint64_t position, const void *bytes, size_t size)
{
    const unsigned char *next = bytes;
    while (size > 0) {
        size_t run = run_at(position, size);
        const unsigned char *want = pattern->bytes + position % PATTERN_BYTES;
        if (memcmp(next, want, run) != 0)
            fail_at_difference(next, want, run, position);
        next += run;
        position += run;
        size -= run;
    }
}

void pattern_send(const struct pattern *pattern, int fd, uint64_t total, size_t chunk)
{
    char *buffer = malloc(chunk);
    CHECK(buffer != NULL);
    for (uint64_t position = 0; position < total;) {
        size_t size = total - position < chunk ? total - position : chunk;
        pattern_fill(pattern, position, buffer, size);
        send_all(fd, buffer, size);
        position += size;
    }
    free(buffer);
}

void pattern_recv(const struct pattern *pattern, int fd, uint64_t total, size_t chunk)
{
    char *buffer = malloc(chunk);
    CHECK(buffer != NULL);
    for (uint64_t position = 0; position < total;) {
        size_t size = total - position < chunk ? total - position : chunk;
        ssize_t got = OK(recv(fd, buffer, size, 0));
        if (got == 0)
            FAIL("end of stream after %llu of %llu bytes", (unsigned long long)position,
                 (unsigned long long)total);
        pattern_check(pattern, position, buffer, got);
        position += got;
    }
    free(buffer);
}

// ---- readiness ----------------------------------------------------------------------------------

int poll_once(int fd, int events, int timeout_ms)
{
    struct pollfd entry = {.fd = fd, .events = (short)events};
    int ready = OK(poll(&entry, 1, timeout_ms));
    CHECK_EQ(ready, entry.revents != 0);
    return entry.revents;
}

void await(int fd, int events)
{
    int revents = poll_once(fd, events, WAIT_MS_MAX);
    if (!(revents & events))
        FAIL("poll for 0x%x gave 0x%x", events, revents);
}

void await_revents(int fd, int events, int all)
{
    int revents = 0;
    for (int waited_ms = 0; waited_ms < WAIT_MS_MAX; waited_ms++) {
        revents = poll_once(fd, events, 0);
        if ((revents & all) == all)
            return;
        pause_ms(1);
    }
    FAIL("poll for 0x%x gave 0x%x, want 0x%x", events, revents, all);
}

void expect_silent(int fd, int events)
{
    int revents = poll_once(fd, events, SILENCE_MS);
    if (revents != 0)
        FAIL("poll for 0x%x gave 0x%x, want silence", events, revents);
}

void set_nonblocking(int fd)
{
    OK(fcntl(fd, F_SETFL, OK(fcntl(fd, F_GETFL)) | O_NONBLOCK));
}

size_t fill_until_full(int fd)
{
    static const char block[65536];
    size_t total = 0;
    // Kernel TCP makes more room when its probe timers fire, the last one after about 200 ms.
    for (int silent = 0; silent < 35;) {
        ssize_t sent = send(fd, block, sizeof block, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent > 0) {
            total += sent;
            silent = 0;
            continue;
        }
        CHECK_EQ(errno, EAGAIN);
        silent++;
        pause_ms(10);
        CHECK(total < (size_t)1 << 30);
    }
    return total;
}

size_t drain_until_empty(int fd)
{
    static char block[65536];
    size_t total = 0;
    while (poll_once(fd, POLLIN, SILENCE_MS) & POLLIN) {
        ssize_t got = OK(recv(fd, block, sizeof block, MSG_DONTWAIT));
        if (got == 0)
            break;
        total += got;
    }
    return total;
}

int64_t now_ms(void)
{
    struct timespec now;
    OK(clock_gettime(CLOCK_MONOTONIC, &now));
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void pause_ms(int milliseconds)
{
    struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    while (nanosleep(&rest, &rest) != 0)
        CHECK_EQ(errno, EINTR);
}

void epoll_add(int epoll, int fd, uint32_t events, uint64_t data)
{
    struct epoll_event event = {.events = events, .data.u64 = data};
    OK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
}

int epoll_with(int fd, uint32_t events)
{
    int epoll = OK(epoll_create1(EPOLL_CLOEXEC));
    epoll_add(epoll, fd, events, fd);
    return epoll;
}

struct epoll_event epoll_one(int epoll)
{
    struct epoll_event events[8];
    CHECK_EQ(epoll_wait(epoll, events, 8, WAIT_MS_MAX), 1);
    return events[0];
}

void epoll_none(int epoll)
{
    struct epoll_event event;
    int ready = OK(epoll_wait(epoll, &event, 1, SILENCE_MS));
    if (ready != 0)
        FAIL("epoll reports 0x%x, want silence", event.events);
}

// ---- processes, signals, threads ----------------------------------------------------------------

static const struct {
    int level, name;
} OPTIONS[] = {
    {IPPROTO_TCP, TCP_CORK},
    {SOL_SOCKET, SO_OOBINLINE},
    {IPPROTO_TCP, TCP_NODELAY},
    {SOL_SOCKET, SO_KEEPALIVE},
};

int options_of(int fd)
{
    int bits = 0;
    for (int i = 0; i < 4; i++) {
        int value = -1;
        socklen_t size = sizeof value;
        OK(getsockopt(fd, OPTIONS[i].level, OPTIONS[i].name, &value, &size));
        bits |= value << i;
    }
    return bits;
}

void set_options(int fd, int bits)
{
    for (int i = 0; i < 4; i++) {
        int value = bits >> i & 1;
        OK(setsockopt(fd, OPTIONS[i].level, OPTIONS[i].name, &value, sizeof value));
    }
}

pid_t fork_child(void)
{
    return OK(fork());
}

void wait_child(pid_t pid)
{
    int status;
    while (waitpid(pid, &status, 0) != pid)
        CHECK_EQ(errno, EINTR);
    if (WIFSIGNALED(status))
        FAIL("a child was killed by SIG%s", sigabbrev_np(WTERMSIG(status)));
    if (WEXITSTATUS(status) != 0)
        FAIL("a child exited with %d", WEXITSTATUS(status));
}

void kill_child(pid_t pid)
{
    OK(kill(pid, SIGKILL));
    CHECK_EQ(waitpid(pid, NULL, 0), pid);
}

volatile sig_atomic_t signals_seen;

void count_signal(int signal)
{
    (void)signal;
    signals_seen++;
}

void on_signal(int signal, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    OK(sigaction(signal, &action, NULL));
}

void alarm_every_ms(int milliseconds)
{
    struct timeval period = {milliseconds / 1000, milliseconds % 1000 * 1000L};
    struct itimerval timer = {period, period};
    OK(setitimer(ITIMER_REAL, &timer, NULL));
}

// Calls of an emulated processor take longer to begin.
static int alarm_us(void)
{
    const char *text = getenv("SEMANTICS_ALARM_US");
    int value = text ? atoi(text) : 0;
    return value > 0 ? value : 20;
}

void alarm_soon(void)
{
    struct itimerval timer = {{0, 50000}, {0, alarm_us()}};
    OK(setitimer(ITIMER_REAL, &timer, NULL));
}

pthread_t start_thread(void *(*body)(void *), void *argument)
{
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, body, argument), 0);
    return thread;
}

void join_thread(pthread_t thread)
{
    CHECK_EQ(pthread_join(thread, NULL), 0);
}
