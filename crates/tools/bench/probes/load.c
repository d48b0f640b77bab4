/* Background load: streams in one direction that send as fast as the server reads, and one more that nobody reads.
 *   load serve ADDRESS STREAMS
 *   load call  ADDRESS STREAMS MILLISECONDS
 * The client prints "loading" when all are connected; the server prints the number of bytes of the streams. */
#include "common.h"

#define STREAMS_MAX 64
#define PIECE_BYTES (64 * 1024)
#define READ_BYTES (128 * 1024)
/* The first byte of a connection: whether the server reads the rest. */
#define STREAM_READ 'r'
#define STREAM_UNREAD 'u'

/* Accepts all connections, and registers those to read with epoll. */
static void accept_all(int listener, int epoll, long streams)
{
    for (long index = 0; index <= streams; index++) {
        int fd = accept_one(listener, false);
        char what = 0;
        if (recv(fd, &what, 1, 0) != 1)
            die("a connection did not send its first byte");
        if (what == STREAM_READ) {
            set_nonblocking(fd);
            watch(epoll, fd, EPOLLIN);
        }
    }
}

static void serve(const char *address, long streams)
{
    char *buffer = alloc_touched(READ_BYTES);
    int epoll = new_epoll(), listener = listen_at(address);
    accept_all(listener, epoll, streams);
    struct scale scale = scale_start();
    uint64_t bytes = 0;
    for (long open = streams; open > 0;) {
        struct epoll_event events[STREAMS_MAX];
        int ready = epoll_wait(epoll, events, STREAMS_MAX, -1);
        if (ready < 0 && errno != EINTR)
            die("epoll_wait");
        for (int index = 0; index < ready; index++) {
            ssize_t got = recv(events[index].data.fd, buffer, READ_BYTES, 0);
            if (got > 0)
                bytes += (uint64_t)got;
            if (got < 0 && errno != EAGAIN && errno != EINTR)
                die("recv");
            if (got == 0) {
                close(events[index].data.fd);
                open--;
            }
        }
    }
    double seconds = (double)(ticks() - scale.ticks) * scale_ns_per_tick(&scale) / 1e9;
    printf("bytes %llu\nseconds %.9f\n", (unsigned long long)bytes, seconds);
}

static void call(const char *address, long streams, long milliseconds)
{
    char *piece = alloc_touched(PIECE_BYTES);
    int fds[STREAMS_MAX + 1], epoll = new_epoll();
    for (long index = 0; index <= streams; index++) {
        char what = index < streams ? STREAM_READ : STREAM_UNREAD;
        fds[index] = connect_to(address, false);
        if (send(fds[index], &what, 1, MSG_NOSIGNAL) != 1)
            die("send");
        set_nonblocking(fds[index]);
        watch(epoll, fds[index], EPOLLOUT);
    }
    printf("loading\n");
    fflush(stdout);
    uint64_t until = clock_ns() + (uint64_t)milliseconds * 1000000u;
    while (clock_ns() < until) {
        struct epoll_event events[STREAMS_MAX + 1];
        int ready = epoll_wait(epoll, events, STREAMS_MAX + 1, 10);
        if (ready < 0 && errno != EINTR)
            die("epoll_wait");
        for (int index = 0; index < ready; index++)
            if (send(events[index].data.fd, piece, PIECE_BYTES, MSG_NOSIGNAL) < 0 && errno != EAGAIN && errno != EINTR)
                die("send");
    }
    for (long index = 0; index <= streams; index++)
        close(fds[index]);
}

int main(int argc, char **argv)
{
    die_with_parent();
    bool serves = argc == 4 && strcmp(argv[1], "serve") == 0;
    bool calls = argc == 5 && strcmp(argv[1], "call") == 0;
    if (!serves && !calls)
        return fprintf(stderr, "usage: load serve ADDRESS STREAMS | load call ADDRESS STREAMS MILLISECONDS\n"), 2;
    long streams = number(argv[3], 1, STREAMS_MAX, "streams");
    if (serves)
        serve(argv[2], streams);
    else
        call(argv[2], streams, number(argv[4], 1, 600000, "milliseconds"));
    return 0;
}
