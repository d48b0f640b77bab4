/* Connections one after the other: socket, connect, one byte there and back, close.
 * The last connection sends QUIT, which ends the server.
 *   connects serve ADDRESS
 *   connects call  ADDRESS MILLISECONDS */
#include "common.h"

/* Below the ephemeral port range (28 k): kernel TCP keeps each closed connection in TIME_WAIT. */
#define CONNECTIONS_MAX 25000
#define ECHO 'e'
#define QUIT 'q'

static void serve(const char *address)
{
    int listener = listen_at(address);
    char byte = ECHO;
    while (byte != QUIT) {
        struct conn conn = conn_of(accept_one(listener, false), WAIT_BLOCKING);
        while (conn_recv_all(&conn, &byte, 1))
            conn_send_all(&conn, &byte, 1);
        close(conn.fd);
    }
}

static void connection(const char *address, char sent)
{
    struct conn conn = conn_of(connect_to(address, false), WAIT_BLOCKING);
    char echoed = 0;
    conn_send_all(&conn, &sent, 1);
    if (!conn_recv_all(&conn, &echoed, 1) || echoed != sent)
        die_plain("a connection did not echo its byte");
    close(conn.fd);
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
    double seconds = (double)(before - scale.ticks) * ns_per_tick / 1e9;
    printf("operations %llu\nseconds %.9f\n", (unsigned long long)done, seconds);
    hist_print(&hist, ns_per_tick);
}

int main(int argc, char **argv)
{
    die_with_parent();
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        serve(argv[2]);
    else if (argc == 4 && strcmp(argv[1], "call") == 0)
        call(argv[2], number(argv[3], 1, 600000, "milliseconds"));
    else
        return fprintf(stderr, "usage: connects serve ADDRESS | connects call ADDRESS MILLISECONDS\n"), 2;
    return 0;
}
