// Bulk data, many connections, back-pressure.
#include "check.h"

#include <time.h>

#define BIG_BYTES ((uint64_t)64 << 20)

static void both_ways(struct endpoint *me, uint64_t out_seed, uint64_t in_seed)
{
    pid_t writer = fork_child();
    if (writer == 0) {
        pattern_send(pattern_new(out_seed), me->fd, BIG_BYTES, 131072);
        _exit(0);
    }
    pattern_recv(pattern_new(in_seed), me->fd, BIG_BYTES, 131072);
    wait_child(writer);
}

SERVER(big_transfer_both_ways) { both_ways(me, 71, 72); }
CLIENT(big_transfer_both_ways) { both_ways(me, 72, 71); }

static uint64_t seed_of_today(void)
{
    const char *text = getenv("SEMANTICS_SEED");
    uint64_t seed = text ? strtoull(text, NULL, 0) : (uint64_t)time(NULL) * 1000003 + getpid();
    info("SEMANTICS_SEED=%llu", (unsigned long long)seed);
    return seed;
}

static size_t random_size(uint64_t *state)
{
    uint64_t r = random_next(state);
    switch (r % 4) {
    case 0:
        return 1 + (r >> 8) % 128;
    case 1:
        return 1 + (r >> 8) % 4096;
    case 2:
        return 1 + (r >> 8) % 70000;
    default:
        return 1 + (r >> 8) % 300000;
    }
}

#define RANDOM_BYTES ((uint64_t)24 << 20)

static void random_send(int fd, uint64_t seed)
{
    struct pattern *pattern = pattern_new(seed);
    char *buffer = malloc(300000);
    for (uint64_t position = 0; position < RANDOM_BYTES;) {
        size_t size = random_size(&seed), left = RANDOM_BYTES - position;
        size = size < left ? size : left;
        pattern_fill(pattern, position, buffer, size);
        send_all(fd, buffer, size);
        position += size;
    }
    free(buffer);
}

// Receives by a random mixture of recv, peek-then-recv, readv and MSG_WAITALL.
static ssize_t random_take(int fd, char *buffer, size_t size, size_t left, uint64_t *state)
{
    struct iovec pieces[2] = {{buffer, size / 3}, {buffer + size / 3, size - size / 3}};
    switch (random_next(state) % 5) {
    case 0:
        size = OK(recv(fd, buffer, size, MSG_PEEK));
        CHECK_EQ(recv(fd, buffer, size, 0), size);
        return size;
    case 1:
        return readv(fd, pieces, 2);
    case 2:
        return recv(fd, buffer, size < left ? size : left, MSG_WAITALL);
    case 3:
        return read(fd, buffer, size);
    default:
        return recv(fd, buffer, size, 0);
    }
}

static void random_recv(int fd, uint64_t seed)
{
    struct pattern *pattern = pattern_new(seed);
    uint64_t state = seed ^ 0x5555;
    char *buffer = malloc(300000);
    for (uint64_t position = 0; position < RANDOM_BYTES;) {
        size_t left = RANDOM_BYTES - position;
        ssize_t got = OK(random_take(fd, buffer, random_size(&state), left, &state));
        CHECK(got > 0);
        pattern_check(pattern, position, buffer, got);
        position += got;
    }
    free(buffer);
}

SERVER(random_sizes)
{
    uint64_t seed = seed_of_today();
    send_all(me->fd, &seed, sizeof seed);
    random_recv(me->fd, seed);
    random_send(me->fd, seed + 1);
}
CLIENT(random_sizes)
{
    uint64_t seed;
    recv_exact(me->fd, &seed, sizeof seed);
    random_send(me->fd, seed);
    random_recv(me->fd, seed + 1);
}

SERVER(two_connections_do_not_mix)
{
    int other = accept_from(me->listener);
    struct pattern *first = pattern_new(81), *second = pattern_new(82);
    for (int i = 0; i < 200; i++) {
        char one[5000], two[5000];
        recv_exact(me->fd, one, sizeof one);
        recv_exact(other, two, sizeof two);
        pattern_check(first, (uint64_t)i * 5000, one, sizeof one);
        pattern_check(second, (uint64_t)i * 5000, two, sizeof two);
    }
    say(me->fd, "one");
    say(other, "two");
}
CLIENT(two_connections_do_not_mix)
{
    struct address at = peer_of(me->fd);
    int other = dial(&at);
    struct pattern *first = pattern_new(81), *second = pattern_new(82);
    for (int i = 0; i < 200; i++) {
        char one[5000], two[5000];
        pattern_fill(first, (uint64_t)i * 5000, one, sizeof one);
        pattern_fill(second, (uint64_t)i * 5000, two, sizeof two);
        send_all(other, two, sizeof two);
        send_all(me->fd, one, sizeof one);
    }
    expect(other, "two");
    expect(me->fd, "one");
}

SERVER(one_unread_connection_stalls_only_itself)
{
    int unread = accept_from(me->listener);
    for (int i = 0; i < 500; i++) {
        expect(me->fd, "ping");
        say(me->fd, "pong");
    }
    pattern_recv(pattern_new(83), me->fd, 10 << 20, 50000);
    meet(me);
    OK(close(unread));
}
CLIENT(one_unread_connection_stalls_only_itself)
{
    struct address at = peer_of(me->fd);
    int unread = dial(&at);
    fill_until_full(unread);
    for (int i = 0; i < 500; i++) {
        say(me->fd, "ping");
        expect(me->fd, "pong");
    }
    pattern_send(pattern_new(83), me->fd, 10 << 20, 50000);
    fill_until_full(unread); // the kernel may have made a little more room
    meet(me);
}

SERVER(writer_under_pressure_continues_after_drain)
{
    struct pattern *pattern = pattern_new(84);
    for (uint64_t position = 0; position < 30000000; position += 3000000) {
        meet(me); // the writer is full
        static char bytes[3000000];
        recv_exact(me->fd, bytes, sizeof bytes);
        pattern_check(pattern, position, bytes, sizeof bytes);
    }
}
CLIENT(writer_under_pressure_continues_after_drain)
{
    struct pattern *pattern = pattern_new(84);
    static char block[30000];
    uint64_t position = 0, met = 0;
    set_nonblocking(me->fd);
    while (position < 30000000) {
        size_t left = 30000000 - position, size = left < sizeof block ? left : sizeof block;
        pattern_fill(pattern, position, block, size);
        ssize_t sent = send(me->fd, block, size, MSG_NOSIGNAL);
        if (sent > 0) {
            position += sent;
            continue;
        }
        CHECK_EQ(errno, EAGAIN);
        if (met * 3000000 <= position && met < 10) {
            meet(me);
            met++;
        }
        await(me->fd, POLLOUT);
    }
    while (met++ < 10)
        meet(me);
}

// A reader that takes half of what there is, and then waits for the writer: room must return, however the writer waits
// for it, and also if the connection begins to use memory while megabytes are unread in TCP.
enum room_wait { POLL, SELECT, LEVEL, EDGE, SEND };

static uint64_t send_until_full(int fd, const struct pattern *pattern, uint64_t position)
{
    static char block[30000];
    for (;;) {
        pattern_fill(pattern, position, block, sizeof block);
        ssize_t sent = send(fd, block, sizeof block, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            CHECK_EQ(errno, EAGAIN);
            return position;
        }
        position += sent;
    }
}

static void room_returns_after(int trips, enum room_wait how)
{
    struct pair pair = connected_pair();
    for (; trips > 0; trips--)
        ping_pong(pair.client, pair.server);
    struct pattern *pattern = pattern_new(88);
    static char bytes[1000];
    uint64_t read = 0, written = 0;
    int epoll = epoll_with(pair.client, how == EDGE ? EPOLLOUT | EPOLLET : how == LEVEL ? EPOLLOUT : 0);
    for (int i = 0; i < 8; i++) {
        uint64_t before = written;
        written = send_until_full(pair.client, pattern, written);
        CHECK(written > before);
        for (uint64_t left = (written - read) / 2000; left > 0; left--, read += sizeof bytes) {
            recv_exact(pair.server, bytes, sizeof bytes);
            pattern_check(pattern, read, bytes, sizeof bytes);
        }
        if (how == POLL) {
            await(pair.client, POLLOUT);
        } else if (how == SELECT) {
            fd_set set;
            FD_ZERO(&set);
            FD_SET(pair.client, &set);
            CHECK_EQ(select(pair.client + 1, NULL, &set, NULL, &(struct timeval){.tv_sec = WAIT_MS_MAX / 1000}), 1);
        } else if (how == SEND) {
            pattern_fill(pattern, written, bytes, sizeof bytes);
            send_all(pair.client, bytes, sizeof bytes);
            written += sizeof bytes;
        } else {
            CHECK(epoll_one(epoll).events & EPOLLOUT);
        }
    }
    OK(close(epoll));
    close_pair(&pair);
}

static void room_returns(enum room_wait how)
{
    for (int trips = 0; trips < 4; trips++)
        room_returns_after(trips, how);
}

TEST(room_returns_for_poll) { room_returns(POLL); }
TEST(room_returns_for_select) { room_returns(SELECT); }
TEST(room_returns_for_epoll) { room_returns(LEVEL); }
TEST(room_returns_as_an_edge) { room_returns(EDGE); }
TEST(room_returns_for_send) { room_returns(SEND); }

TEST(a_connection_buffers_32_kib)
{
    // Programs that write before their peer reads rely on some tens of kilobytes.
    struct pair pair = connected_pair();
    static char block[32768];
    CHECK_EQ(send(pair.client, block, sizeof block, MSG_DONTWAIT), sizeof block);
    CHECK_EQ(drain_until_empty(pair.server), sizeof block);
}

static void set_size(int fd, int option, int bytes)
{
    OK(setsockopt(fd, SOL_SOCKET, option, &bytes, sizeof bytes));
}

TEST(small_buffers_hold_little)
{
    struct address at;
    int listener = listen_anywhere(&at);
    set_size(listener, SO_RCVBUF, 4096);
    int client = dial(&at);
    set_size(client, SO_SNDBUF, 4096);
    // Until the connection is accepted, a lane does not know the receive buffer size of the peer.
    int server = accept_from(listener);
    size_t early = fill_until_full(client);
    CHECK(early >= 1000 && early < 65536);
    size_t held = early + fill_until_full(client);
    CHECK(held < 65536);
    expect_silent(client, POLLOUT);
    while (held > 0)
        held -= drain_until_empty(server);
    await(client, POLLOUT);
    // The other direction has its own buffers.
    CHECK(fill_until_full(server) > 100000);
}

TEST(a_larger_receive_buffer_holds_more)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int client = dial(&at);
    set_size(client, SO_SNDBUF, 4096);
    fill_until_full(client);
    int server = accept_from(listener);
    set_size(server, SO_RCVBUF, 200000);
    set_size(client, SO_SNDBUF, 200000);
    await(client, POLLOUT);
    CHECK(fill_until_full(client) > 0);
    CHECK(drain_until_empty(server) > 60000);
}

// Kernel TCP takes four seconds for this: it waits for acknowledgements.
SERVER(small_buffers_carry_much)
{
    set_size(me->fd, SO_RCVBUF, 4096);
    pattern_recv(pattern_new(87), me->fd, 1 << 18, 5000);
    say(me->fd, "all");
}
CLIENT(small_buffers_carry_much)
{
    set_size(me->fd, SO_SNDBUF, 4096);
    pattern_send(pattern_new(87), me->fd, 1 << 18, 40000);
    expect(me->fd, "all");
}

TEST(one_byte_at_a_time)
{
    struct pair pair = connected_pair();
    struct pattern *pattern = pattern_new(85);
    char bytes[20000], got[20000];
    pattern_fill(pattern, 0, bytes, sizeof bytes);
    for (size_t i = 0; i < sizeof bytes; i += 100) {
        for (size_t j = i; j < i + 100; j++)
            CHECK_EQ(send(pair.client, bytes + j, 1, 0), 1);
        for (size_t j = i; j < i + 100; j++)
            CHECK_EQ(recv(pair.server, got + j, 1, 0), 1);
    }
    CHECK(memcmp(bytes, got, sizeof bytes) == 0);
}

TEST(many_small_sends_before_one_read)
{
    struct pair pair = connected_pair();
    struct pattern *pattern = pattern_new(86);
    char bytes[30000], got[30000];
    pattern_fill(pattern, 0, bytes, sizeof bytes);
    size_t sent = 0;
    while (sent < sizeof bytes && send(pair.client, bytes + sent, 3, MSG_DONTWAIT) == 3)
        sent += 3;
    CHECK(sent >= 3000);
    recv_exact(pair.server, got, sent);
    pattern_check(pattern, 0, got, sent);
}

static uint64_t processor_ns(void)
{
    struct timespec now;
    OK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now));
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

TEST(a_sleeping_reader_uses_no_processor)
{
    // This bound is loose: a reader that spins for its whole wait uses all of that time.
    struct pair pair = connected_pair();
    struct timeval limit = {.tv_sec = 1};
    char byte;
    OK(setsockopt(pair.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    uint64_t before_ns = processor_ns();
    CHECK_ERR(recv(pair.server, &byte, 1, 0), EAGAIN);
    CHECK(processor_ns() - before_ns < 500000000);
}
