/* Ping-pong: the client sends `size` bytes and waits for their echo; each round trip is timed separately.
 *   rtt serve ADDRESS WAITING SIZE
 *   rtt call  ADDRESS WAITING SIZE MILLISECONDS */
#include "common.h"

#define ITERATIONS_MIN 10

static void serve(const char *address, enum waiting waiting, size_t size)
{
    char *message = alloc_touched(size);
    struct conn conn = conn_of(accept_one(listen_at(address), true), waiting);
    while (conn_recv_all(&conn, message, size))
        conn_send_all(&conn, message, size);
}

static void round_trip(struct conn *conn, char *message, size_t size)
{
    conn_send_all(conn, message, size);
    if (!conn_recv_all(conn, message, size))
        die_plain("the server closed the connection");
}

static void call(const char *address, enum waiting waiting, size_t size, long milliseconds)
{
    static struct hist hist;
    char *message = alloc_touched(size);
    struct conn conn = conn_of(connect_to(address, true), waiting);
    uint64_t duration = ticks_in_ms(milliseconds);

    uint64_t warm_until = ticks() + duration / 5;
    for (uint64_t done = 0; done < ITERATIONS_MIN / 2 || ticks() < warm_until; done++)
        round_trip(&conn, message, size);

    struct scale scale = scale_start();
    uint64_t until = scale.ticks + duration, after = 0, done = 0;
    while (done < ITERATIONS_MIN || after < until) {
        uint64_t mark = (done * 0x9e3779b97f4a7c15u) >> 56;
        message[0] = (char)mark;
        message[size - 1] = (char)mark;
        uint64_t before = ticks();
        round_trip(&conn, message, size);
        after = ticks();
        if (message[0] != (char)mark || message[size - 1] != (char)mark)
            die_plain("round trip %llu returned other bytes than were sent", (unsigned long long)done);
        hist_add(&hist, after - before);
        done++;
    }
    hist_print(&hist, scale_ns_per_tick(&scale));
    close(conn.fd);
}

int main(int argc, char **argv)
{
    die_with_parent();
    bool serves = argc == 5 && strcmp(argv[1], "serve") == 0;
    bool calls = argc == 6 && strcmp(argv[1], "call") == 0;
    if (!serves && !calls) {
        fprintf(stderr, "usage: rtt serve ADDRESS WAITING SIZE | rtt call ADDRESS WAITING SIZE MILLISECONDS\n");
        return 2;
    }
    enum waiting waiting = parse_waiting(argv[3]);
    size_t size = (size_t)number(argv[4], 1, 1 << 26, "size");
    if (serves)
        serve(argv[2], waiting, size);
    else
        call(argv[2], waiting, size, number(argv[5], 1, 600000, "milliseconds"));
    return 0;
}
