// Clients whose threads send and receive at the same time, against echo servers of every kind: no byte is lost,
// invented or left undelivered while connections switch to lanes.
#include "check.h"

#include <sys/epoll.h>

enum { CLIENTS = 4, CONNECTIONS = 200, BYTES_SHORT = 3000, BYTES_LONG = 200000, PIECE_MAX = 30000, FDS_MAX = 256 };

// Pauses a thread at random, for very different times.
static void pause_at_random(uint64_t *state)
{
    uint64_t choice = random_next(state) % 8;
    if (choice == 0)
        usleep(random_next(state) % 1500);
    else if (choice == 1)
        sched_yield();
    else if (choice == 2)
        for (volatile uint64_t left = random_next(state) % 3000; left > 0; left--)
            ;
}

// ---- clients --------------------------------------------------------------------------------------

struct stream {
    int fd;
    size_t total;
    uint64_t state;
    const struct pattern *pattern;
};

static void *send_stream(void *argument)
{
    struct stream *stream = argument;
    char bytes[PIECE_MAX];
    for (size_t sent = 0; sent < stream->total;) {
        size_t piece = 1 + random_next(&stream->state) % (random_next(&stream->state) % 8 == 0 ? sizeof bytes : 200);
        piece = piece < stream->total - sent ? piece : stream->total - sent;
        pattern_fill(stream->pattern, sent, bytes, piece);
        send_all(stream->fd, bytes, piece);
        sent += piece;
        pause_at_random(&stream->state);
    }
    OK(shutdown(stream->fd, SHUT_WR));
    return NULL;
}

static void receive_stream(const struct stream *stream, uint64_t state)
{
    char bytes[PIECE_MAX];
    size_t received = 0;
    for (;;) {
        ssize_t piece = OK(recv(stream->fd, bytes, 1 + random_next(&state) % sizeof bytes, 0));
        if (piece == 0)
            break;
        CHECK(received + piece <= stream->total);
        pattern_check(stream->pattern, received, bytes, piece);
        received += piece;
        pause_at_random(&state);
    }
    CHECK_EQ(received, stream->total);
}

struct client {
    struct address at;
    uint64_t state;
};

static void *run_client(void *argument)
{
    struct client *client = argument;
    for (int number = 0; number < CONNECTIONS; number++) {
        uint64_t random = random_next(&client->state);
        struct stream stream = {.fd = dial(&client->at), .state = random, .pattern = pattern_new(random)};
        stream.total = random % (random % 4 == 0 ? BYTES_LONG : BYTES_SHORT);
        pthread_t sender = start_thread(send_stream, &stream);
        receive_stream(&stream, random_next(&client->state));
        join_thread(sender);
        OK(close(stream.fd));
        free((void *)stream.pattern);
    }
    return NULL;
}

static void run_clients(void (*serve)(int listener))
{
    struct address at;
    int listener = listen_anywhere(&at);
    uint64_t seed = getpid();
    pid_t server = fork_child();
    if (server == 0)
        serve(listener);
    OK(close(listener));
    struct client clients[CLIENTS];
    pthread_t threads[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        clients[i] = (struct client){.at = at, .state = seed + i};
        threads[i] = start_thread(run_client, &clients[i]);
    }
    for (int i = 0; i < CLIENTS; i++)
        join_thread(threads[i]);
    kill_child(server);
}

// ---- servers --------------------------------------------------------------------------------------

static void *echo_in_thread(void *argument)
{
    int fd = *(int *)argument;
    char bytes[PIECE_MAX];
    uint64_t state = fd;
    free(argument);
    for (;;) {
        ssize_t piece = OK(recv(fd, bytes, 1 + random_next(&state) % sizeof bytes, 0));
        if (piece == 0)
            break;
        send_all(fd, bytes, piece);
        pause_at_random(&state);
    }
    OK(close(fd));
    return NULL;
}

static void serve_by_threads(int listener)
{
    for (;;) {
        int *fd = malloc(sizeof *fd);
        *fd = accept_from(listener);
        OK(pthread_detach(start_thread(echo_in_thread, fd)));
    }
}

static void serve_by_poll(int listener)
{
    struct pollfd entries[FDS_MAX] = {{.fd = listener, .events = POLLIN}};
    char bytes[PIECE_MAX];
    uint64_t state = 1;
    int count = 1;
    for (;;) {
        OK(poll(entries, count, -1));
        for (int i = count - 1; i > 0; i--) {
            if (entries[i].revents == 0)
                continue;
            ssize_t piece = recv(entries[i].fd, bytes, 1 + random_next(&state) % sizeof bytes, MSG_DONTWAIT);
            if (piece > 0) {
                send_all(entries[i].fd, bytes, piece);
            } else if (piece == 0) {
                OK(close(entries[i].fd));
                entries[i] = entries[--count];
            } else {
                CHECK_EQ(errno, EAGAIN);
            }
        }
        if (entries[0].revents != 0)
            entries[count++] = (struct pollfd){.fd = accept_from(listener), .events = POLLIN};
    }
}

struct echo {
    int fd;
    size_t size;
    int has_ended;
    char bytes[2 * PIECE_MAX];
};

static void send_echo(struct echo *echo)
{
    size_t sent = 0;
    while (sent < echo->size) {
        ssize_t piece = send(echo->fd, echo->bytes + sent, echo->size - sent, MSG_NOSIGNAL);
        if (piece < 0) {
            CHECK_EQ(errno, EAGAIN);
            break;
        }
        sent += piece;
    }
    memmove(echo->bytes, echo->bytes + sent, echo->size - sent);
    echo->size -= sent;
}

// Reads until no bytes are left or until the bytes read cannot be sent; then an event reports room.
static void echo_what_comes(struct echo *echo, uint64_t *state)
{
    for (;;) {
        send_echo(echo);
        size_t room = sizeof echo->bytes - echo->size;
        if (room == 0 || echo->has_ended)
            return;
        ssize_t piece = recv(echo->fd, echo->bytes + echo->size, 1 + random_next(state) % room, 0);
        if (piece < 0) {
            CHECK_EQ(errno, EAGAIN);
            return;
        }
        echo->has_ended = piece == 0;
        echo->size += piece;
    }
}

static void serve_by_edges(int listener)
{
    int epoll = epoll_with(listener, EPOLLIN);
    struct epoll_event events[8];
    uint64_t state = 1;
    set_nonblocking(listener);
    for (;;) {
        int count = OK(epoll_wait(epoll, events, 1 + random_next(&state) % 8, -1));
        for (int i = 0; i < count; i++) {
            if (events[i].data.u64 == (uint64_t)listener) {
                struct echo *echo = calloc(1, sizeof *echo);
                echo->fd = accept_from(listener);
                set_nonblocking(echo->fd);
                epoll_add(epoll, echo->fd, EPOLLIN | EPOLLOUT | EPOLLET, (uintptr_t)echo);
                continue;
            }
            struct echo *echo = (struct echo *)(uintptr_t)events[i].data.u64;
            echo_what_comes(echo, &state);
            if (echo->has_ended && echo->size == 0) {
                OK(close(echo->fd));
                free(echo);
            }
        }
    }
}

TEST(duplex_streams_keep_every_byte_with_a_server_of_threads) { run_clients(serve_by_threads); }

TEST(duplex_streams_keep_every_byte_with_a_server_that_polls) { run_clients(serve_by_poll); }

TEST(duplex_streams_keep_every_byte_with_an_edge_triggered_server) { run_clients(serve_by_edges); }
