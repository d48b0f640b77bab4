/* A Redis client: each connection has one request outstanding, and each request is timed separately. One connection
 * uses blocking send() and recv(); several are driven by one epoll loop.
 *   resp ADDRESS get|set VALUE_BYTES CONNECTIONS MILLISECONDS */
#include "common.h"

/* The key of redis-benchmark, so that its GET finds the value that this program has set. */
#define KEY "key:__rand_int__"

struct exchange {
    char *request;
    size_t request_bytes;
    size_t reply_bytes; /* known in advance: "+OK\r\n", or a bulk string of the value */
    char *reply_expected;
};

struct client {
    struct conn conn;
    uint64_t sent_at;
    size_t have;
    char *reply;
};

static struct exchange exchange_of(bool set, size_t value_bytes)
{
    struct exchange exchange;
    char *value = alloc_touched(value_bytes + 1);
    memset(value, 'x', value_bytes);
    value[value_bytes] = 0;
    exchange.request = alloc_touched(value_bytes + 256);
    exchange.reply_expected = alloc_touched(value_bytes + 256);
    if (set) {
        exchange.request_bytes = (size_t)sprintf(exchange.request, "*3\r\n$3\r\nSET\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n",
                                                 strlen(KEY), KEY, value_bytes, value);
        exchange.reply_bytes = (size_t)sprintf(exchange.reply_expected, "+OK\r\n");
    } else {
        exchange.request_bytes =
            (size_t)sprintf(exchange.request, "*2\r\n$3\r\nGET\r\n$%zu\r\n%s\r\n", strlen(KEY), KEY);
        exchange.reply_bytes = (size_t)sprintf(exchange.reply_expected, "$%zu\r\n%s\r\n", value_bytes, value);
    }
    free(value);
    return exchange;
}

static void check_reply(const struct exchange *exchange, const char *reply, size_t have)
{
    size_t compare = have < exchange->reply_bytes ? have : exchange->reply_bytes;
    if (memcmp(reply, exchange->reply_expected, compare) != 0)
        die_plain("the server answered '%.*s'", (int)(compare < 60 ? compare : 60), reply);
}

static void blocking_request(struct client *client, const struct exchange *exchange)
{
    conn_send_all(&client->conn, exchange->request, exchange->request_bytes);
    size_t have = 0;
    while (have < exchange->reply_bytes) {
        size_t got = conn_recv(&client->conn, client->reply + have, exchange->reply_bytes - have);
        if (got == 0)
            die_plain("the server closed the connection");
        have += got;
        check_reply(exchange, client->reply, have);
    }
}

static uint64_t run_one(struct client *client, const struct exchange *exchange, uint64_t duration, struct hist *hist,
                        struct scale *scale)
{
    for (uint64_t until = ticks() + duration / 5; ticks() < until;)
        blocking_request(client, exchange);
    *scale = scale_start();
    uint64_t done = 0;
    for (uint64_t after = scale->ticks, until = after + duration; after < until; done++) {
        uint64_t before = ticks();
        blocking_request(client, exchange);
        after = ticks();
        hist_add(hist, after - before);
    }
    return done;
}

static void start_request(struct client *client, const struct exchange *exchange)
{
    client->have = 0;
    client->sent_at = ticks();
    conn_send_all(&client->conn, exchange->request, exchange->request_bytes);
}

/* Receives the bytes that have arrived; returns true when the reply is complete. */
static bool receive_reply(struct client *client, const struct exchange *exchange)
{
    ssize_t got = recv(client->conn.fd, client->reply + client->have, exchange->reply_bytes - client->have, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    if (got < 0)
        die("recv");
    if (got == 0)
        die_plain("the server closed the connection");
    client->have += (size_t)got;
    check_reply(exchange, client->reply, client->have);
    return client->have == exchange->reply_bytes;
}

static uint64_t run_many(struct client *clients, size_t count, const struct exchange *exchange, uint64_t duration,
                         struct hist *hist, struct scale *scale)
{
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event *events = calloc(count, sizeof *events);
    if (epoll < 0 || !events)
        die("epoll");
    for (size_t index = 0; index < count; index++) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &clients[index]};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, clients[index].conn.fd, &event) != 0)
            die("epoll_ctl");
        start_request(&clients[index], exchange);
    }
    uint64_t done = 0, now = ticks(), warm_until = now + duration / 5, until = warm_until + duration;
    bool warm = false;
    *scale = scale_start();
    while (now < until || done == 0) {
        int ready = epoll_wait(epoll, events, (int)count, -1);
        if (ready < 0 && errno != EINTR)
            die("epoll_wait");
        for (int index = 0; index < ready; index++) {
            struct client *client = events[index].data.ptr;
            if (!receive_reply(client, exchange))
                continue;
            now = ticks();
            if (warm) {
                hist_add(hist, now - client->sent_at);
                done++;
            }
            start_request(client, exchange);
        }
        if (!warm && now >= warm_until) {
            warm = true;
            *scale = scale_start();
        }
    }
    return done;
}

int main(int argc, char **argv)
{
    die_with_parent();
    bool get = argc == 6 && strcmp(argv[2], "get") == 0, set = argc == 6 && strcmp(argv[2], "set") == 0;
    if (!get && !set)
        return fprintf(stderr, "usage: resp ADDRESS get|set VALUE_BYTES CONNECTIONS MILLISECONDS\n"), 2;
    size_t value_bytes = (size_t)number(argv[3], 1, 1 << 20, "value bytes");
    size_t count = (size_t)number(argv[4], 1, 10000, "connections");
    uint64_t duration = ticks_in_ms(number(argv[5], 1, 600000, "milliseconds"));
    static struct hist hist;

    struct exchange seed = exchange_of(true, value_bytes), exchange = exchange_of(set, value_bytes);
    struct client *clients = calloc(count, sizeof *clients);
    if (!clients)
        die("allocating %zu clients", count);
    for (size_t index = 0; index < count; index++) {
        clients[index].conn = conn_of(connect_to(argv[1], true), count == 1 ? WAIT_BLOCKING : WAIT_SPIN);
        clients[index].reply = alloc_touched(exchange.reply_bytes + seed.reply_bytes);
    }
    blocking_request(&clients[0], &seed); /* so that GET finds a value of this size */

    struct scale scale;
    uint64_t done = count == 1 ? run_one(&clients[0], &exchange, duration, &hist, &scale)
                               : run_many(clients, count, &exchange, duration, &hist, &scale);
    uint64_t end = ticks();
    double ns_per_tick = scale_ns_per_tick(&scale);
    double seconds = (double)(end - scale.ticks) * ns_per_tick / 1e9;
    printf("operations %llu\nseconds %.9f\n", (unsigned long long)done, seconds);
    hist_print(&hist, ns_per_tick);
    return 0;
}
