/* One direction: the client writes `size` bytes at a time as fast as it can, and the server counts. With "messages" the
 * server calls recv() once for each message; with "bulk" it reads up to 128 KiB at a time. At the end the server sends
 * the number of bytes received, and the client checks it.
 *   stream serve ADDRESS WAITING messages|bulk SIZE MILLISECONDS
 *   stream call  ADDRESS WAITING messages|bulk SIZE MILLISECONDS */
#include "common.h"

#define BULK_READ_BYTES (128 * 1024)

struct mark {
    uint64_t bytes, ticks;
};

struct count {
    uint64_t bytes;
    struct mark start, warm; /* at accept, and at the first reading of the clock after the warm-up */
};

/* Reads to the end of the stream. The first fifth of the run is the warm-up, whose bytes are not counted. */
static struct count drain(struct conn *conn, bool messages, size_t size, uint64_t warm_ticks)
{
    size_t room = messages ? size : BULK_READ_BYTES;
    char *buffer = alloc_touched(room);
    struct count count = {.start = {0, ticks()}};
    uint64_t first_ticks = 0;
    unsigned since_clock = 0;
    for (;;) {
        size_t got = messages ? (conn_recv_all(conn, buffer, size) ? size : 0) : conn_recv(conn, buffer, room);
        if (got == 0)
            return count;
        count.bytes += got;
        if (count.warm.ticks || (++since_clock < 16 && got < 4096))
            continue;
        since_clock = 0;
        struct mark mark = {count.bytes, ticks()};
        if (!first_ticks)
            first_ticks = mark.ticks;
        else if (mark.ticks - first_ticks >= warm_ticks)
            count.warm = mark;
    }
}

static void serve(const char *address, enum waiting waiting, bool messages, size_t size, long milliseconds)
{
    uint64_t duration = ticks_in_ms(milliseconds);
    int listener = listen_at(address);
    struct conn conn = conn_of(accept_one(listener, messages), waiting);
    struct scale scale = scale_start();
    struct count count = drain(&conn, messages, size, duration / 5);
    uint64_t end = ticks();
    double ns_per_tick = scale_ns_per_tick(&scale);
    conn_send_all(&conn, (const char *)&count.bytes, sizeof count.bytes);
    /* If a busy machine received no byte after the warm-up, all bytes count. */
    struct mark from = count.warm.ticks && count.bytes > count.warm.bytes ? count.warm : count.start;
    if (count.bytes == from.bytes)
        die_plain("no bytes arrived on the connection");
    double seconds = (double)(end - from.ticks) * ns_per_tick / 1e9;
    printf("bytes %llu\nseconds %.9f\n", (unsigned long long)(count.bytes - from.bytes), seconds);
}

static void call(const char *address, enum waiting waiting, bool messages, size_t size, long milliseconds)
{
    char *message = alloc_touched(size);
    struct conn conn = conn_of(connect_to(address, messages), waiting);
    uint64_t until = ticks() + ticks_in_ms(milliseconds), sent = 0, received = 0;
    /* Reading the clock after every small write would slow the sender down. */
    unsigned writes_per_clock = size >= 4096 ? 1 : 16;
    do {
        for (unsigned write = 0; write < writes_per_clock; write++)
            conn_send_all(&conn, message, size);
        sent += (uint64_t)size * writes_per_clock;
    } while (ticks() < until);
    if (shutdown(conn.fd, SHUT_WR) != 0)
        die("shutdown");
    if (!conn_recv_all(&conn, (char *)&received, sizeof received))
        die_plain("the server closed the connection before it sent its number of bytes");
    if (received != sent)
        die_plain("sent %llu bytes, %llu arrived", (unsigned long long)sent, (unsigned long long)received);
    close(conn.fd);
}

int main(int argc, char **argv)
{
    die_with_parent();
    bool serves = argc == 7 && strcmp(argv[1], "serve") == 0;
    bool calls = argc == 7 && strcmp(argv[1], "call") == 0;
    if (!serves && !calls)
        return fprintf(stderr, "usage: stream serve|call ADDRESS WAITING messages|bulk SIZE MILLISECONDS\n"), 2;
    bool messages = strcmp(argv[4], "messages") == 0;
    if (!messages && strcmp(argv[4], "bulk") != 0)
        return fprintf(stderr, "stream: '%s' is neither messages nor bulk\n", argv[4]), 2;
    (serves ? serve : call)(argv[2], parse_waiting(argv[3]), messages, (size_t)number(argv[5], 1, 1 << 26, "size"),
                            number(argv[6], 1, 600000, "milliseconds"));
    return 0;
}
