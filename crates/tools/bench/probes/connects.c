/* Connections: socket, connect, two bytes in each direction, close. Either one client makes one after the other, or
 * many client processes do so at once. The last connection asks the server to quit, which it does when all are closed.
 *   connects serve ADDRESS blocking|epoll
 *   connects call  ADDRESS MILLISECONDS
 *   connects call  ADDRESS CLIENTS CONNECTIONS */
#include "common.h"
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

/* Below the ephemeral port range (28 k): kernel TCP keeps each closed connection in TIME_WAIT. */
#define CONNECTIONS_MAX 25000
#define DESCRIPTORS_MAX 65536
#define EVENTS_MAX 256
#define MESSAGE_BYTES 2
#define ECHO 'e'
#define QUIT 'q'

/* ---- the server ---- */

static void serve_blocking(int listener)
{
    char message[MESSAGE_BYTES] = {0};
    while (message[0] != QUIT) {
        struct conn conn = conn_of(accept_one(listener, false), WAIT_BLOCKING);
        while (conn_recv_all(&conn, message, MESSAGE_BYTES))
            conn_send_all(&conn, message, MESSAGE_BYTES);
        close(conn.fd);
    }
}

/* Many simultaneous clients need more descriptors than the usual soft limit permits. */
static void raise_descriptor_limit(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        die("getrlimit(RLIMIT_NOFILE)");
    if (limit.rlim_cur < DESCRIPTORS_MAX)
        limit.rlim_cur = limit.rlim_max < DESCRIPTORS_MAX ? limit.rlim_max : DESCRIPTORS_MAX;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
        die("setrlimit(RLIMIT_NOFILE)");
}

/* Accepts all pending connections and returns their number. */
static long accept_waiting(int listener, int epoll)
{
    for (long count = 0;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) {
            watch(epoll, fd, EPOLLIN);
            count++;
        } else if (errno == EAGAIN) {
            return count;
        } else if (errno == EMFILE || errno == ENFILE) {
            die("accept: raise the limit of descriptors (ulimit -Hn), or use fewer clients");
        } else if (errno != EINTR && errno != ECONNABORTED) {
            die("accept");
        }
    }
}

enum outcome { ECHOED, QUIT_REQUESTED, NOT_READY, CLOSED };

static enum outcome echo(int fd)
{
    char message[MESSAGE_BYTES];
    ssize_t got = recv(fd, message, MESSAGE_BYTES, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return NOT_READY;
    if (got < 0)
        die("recv");
    if (got == 0) {
        close(fd);
        return CLOSED;
    }
    if (got != MESSAGE_BYTES)
        die_plain("received %zd of the %d bytes of a message", got, MESSAGE_BYTES);
    if (send(fd, message, MESSAGE_BYTES, MSG_NOSIGNAL) != MESSAGE_BYTES)
        die("send");
    return message[0] == QUIT ? QUIT_REQUESTED : ECHOED;
}

static void serve_epoll(int listener)
{
    int epoll = new_epoll();
    set_nonblocking(listener);
    watch(epoll, listener, EPOLLIN);
    bool quits = false;
    for (long open = 0; !quits || open > 0;) {
        struct epoll_event events[EVENTS_MAX];
        int ready = epoll_wait(epoll, events, EVENTS_MAX, -1);
        if (ready < 0 && errno != EINTR)
            die("epoll_wait");
        for (int index = 0; index < ready; index++) {
            if (events[index].data.fd == listener) {
                open += accept_waiting(listener, epoll);
                continue;
            }
            enum outcome outcome = echo(events[index].data.fd);
            quits |= outcome == QUIT_REQUESTED;
            open -= outcome == CLOSED;
        }
    }
}

/* ---- the clients ---- */

static void connection(const char *address, char what)
{
    struct conn conn = conn_of(connect_to(address, false), WAIT_BLOCKING);
    const char sent[MESSAGE_BYTES] = {what, ECHO};
    char echoed[MESSAGE_BYTES] = {0};
    conn_send_all(&conn, sent, MESSAGE_BYTES);
    if (!conn_recv_all(&conn, echoed, MESSAGE_BYTES) || memcmp(echoed, sent, MESSAGE_BYTES) != 0)
        die_plain("a connection did not echo its bytes");
    close(conn.fd);
}

static void report(uint64_t done, uint64_t elapsed_ticks, const struct hist *hist, double ns_per_tick)
{
    double seconds = (double)elapsed_ticks * ns_per_tick / 1e9;
    printf("operations %llu\nseconds %.9f\n", (unsigned long long)done, seconds);
    hist_print(hist, ns_per_tick);
}

static void call(const char *address, long milliseconds)
{
    static struct hist hist;
    uint64_t duration = ticks_in_ms(milliseconds);
    struct scale scale = scale_start();
    uint64_t until = scale.ticks + duration, before = scale.ticks, done = 0;
    while (done < 3 || (before < until && done < CONNECTIONS_MAX)) {
        connection(address, ECHO);
        uint64_t after = ticks();
        hist_add(&hist, after - before);
        before = after;
        done++;
    }
    double ns_per_tick = scale_ns_per_tick(&scale);
    connection(address, QUIT);
    report(done, before - scale.ticks, &hist, ns_per_tick);
}

struct span {
    uint64_t begin, end;
};

/* A client: reports that it is ready, waits for the gate to open, and records start and end of each connection. */
static void client(const char *address, const int gate[2], const int ready[2], struct span *spans, long connections)
{
    char byte = 0;
    die_with_parent();
    close(gate[1]);
    if (write(ready[1], &byte, 1) != 1)
        die("write");
    while (read(gate[0], &byte, 1) < 0)
        if (errno != EINTR)
            die("read");
    for (long index = 0; index < connections; index++) {
        spans[index].begin = ticks();
        connection(address, ECHO);
        spans[index].end = ticks();
    }
}

/* Starts the clients, and returns when each of them waits for the gate. */
static void start_clients(const char *address, const int gate[2], struct span *spans, long clients, long connections)
{
    int ready[2];
    if (pipe(ready) != 0)
        die("pipe");
    for (long index = 0; index < clients; index++) {
        pid_t pid = fork();
        if (pid < 0)
            die("client %ld of %ld: raise the limit of processes (ulimit -u), or use fewer", index + 1, clients);
        if (pid == 0) {
            client(address, gate, ready, spans + index * connections, connections);
            exit(0);
        }
    }
    close(ready[1]);
    char byte;
    for (long index = 0; index < clients; index++)
        if (read(ready[0], &byte, 1) != 1)
            die_plain("a client ended before it connected");
    close(ready[0]);
}

static void call_at_once(const char *address, long clients, long connections)
{
    static struct hist hist;
    size_t count = (size_t)(clients * connections);
    struct span *spans = mmap(NULL, count * sizeof *spans, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int gate[2];
    if (spans == MAP_FAILED || pipe(gate) != 0)
        die("memory and a pipe for %ld clients", clients);
    memset(spans, 0, count * sizeof *spans);
    start_clients(address, gate, spans, clients, connections);
    struct scale scale = scale_start();
    close(gate[1]);
    for (long index = 0; index < clients; index++) {
        int status;
        if (wait(&status) < 0)
            die("wait");
        if (status != 0)
            die_plain("a client failed");
    }
    double ns_per_tick = scale_ns_per_tick(&scale);
    uint64_t end = scale.ticks;
    for (size_t index = 0; index < count; index++) {
        hist_add(&hist, spans[index].end - spans[index].begin);
        end = spans[index].end > end ? spans[index].end : end;
    }
    connection(address, QUIT);
    report(count, end - scale.ticks, &hist, ns_per_tick);
}

static void serve(const char *address, const char *waiting)
{
    raise_descriptor_limit();
    int listener = listen_at(address);
    (parse_waiting(waiting) == WAIT_EPOLL ? serve_epoll : serve_blocking)(listener);
}

static void call_many(const char *address, const char *clients_text, const char *connections_text)
{
    long clients = number(clients_text, 1, CONNECTIONS_MAX, "clients");
    call_at_once(address, clients, number(connections_text, 1, CONNECTIONS_MAX / clients, "connections of a client"));
}

int main(int argc, char **argv)
{
    die_with_parent();
    if (argc == 4 && strcmp(argv[1], "serve") == 0)
        serve(argv[2], argv[3]);
    else if (argc == 4 && strcmp(argv[1], "call") == 0)
        call(argv[2], number(argv[3], 1, 600000, "milliseconds"));
    else if (argc == 5 && strcmp(argv[1], "call") == 0)
        call_many(argv[2], argv[3], argv[4]);
    else
        return fprintf(stderr, "usage: connects serve ADDRESS blocking|epoll | connects call ADDRESS MILLISECONDS | "
                               "connects call ADDRESS CLIENTS CONNECTIONS\n"),
               2;
    return 0;
}
