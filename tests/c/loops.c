// Event loops: programs that send only when they are told that there is room, and receive only when they are told that
// there is something, as those on libevent and tokio do. One loop has several connections, and in one check both ends
// of each.
//
// A seed determines every decision of a program. RANDOM_SEED is the first seed, RANDOM_COUNT the number of seeds.
#include "check.h"

#include <sys/select.h>

#define CONNECTIONS_MAX 5
#define PIECE_MAX 20000
// A conversation that makes no progress for so long has lost an event.
#define STALL_MS 10000

enum way { BY_LEVEL, BY_LEVEL_TRYING, BY_EDGE, BY_ONESHOT, BY_POLL, BY_SELECT, WAYS };

// One end of a connection in a loop.
struct end {
    int fd;
    struct pattern *out, *in;
    uint64_t to_send, sent, to_receive, received;
    bool has_shut, has_ended, may_send, may_receive;
    uint32_t registered;
};

struct loop {
    uint64_t seed, state;
    enum way way;
    int epoll;
    bool drains; // goes on until EAGAIN
    size_t send_max, receive_max;
    unsigned pause_one_in;
    struct end ends[2 * CONNECTIONS_MAX];
    int count;
    struct pollfd polled[2 * CONNECTIONS_MAX];
    char buffer[PIECE_MAX];
};

static uint64_t number_of(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static uint64_t below(struct loop *me, uint64_t bound) { return random_next(&me->state) % bound; }

// What both ends of a conversation derive from its seed.
static int connections_of(uint64_t seed)
{
    uint64_t state = seed * 2 + 1;
    return 1 + random_next(&state) % CONNECTIONS_MAX;
}

static uint64_t bytes_of(uint64_t seed, int connection, int side)
{
    uint64_t state = seed * 1000 + connection * 2 + side;
    random_next(&state);
    uint64_t most = (uint64_t[]){100, 3000, 30000, 150000}[random_next(&state) % 4];
    return 1 + random_next(&state) % most;
}

static struct loop *new_loop(uint64_t seed, int side)
{
    struct loop *me = calloc(1, sizeof *me);
    *me = (struct loop){.seed = seed, .state = seed * 3 + side};
    me->way = below(me, WAYS);
    me->epoll = OK(epoll_create1(0));
    me->drains = below(me, 2);
    me->send_max = 1 + below(me, (uint64_t[]){10, 1000, PIECE_MAX}[below(me, 3)]);
    me->receive_max = 1 + below(me, (uint64_t[]){100, 4096, PIECE_MAX}[below(me, 3)]);
    me->pause_one_in = 1 + below(me, 500);
    return me;
}

static uint32_t events_of(const struct loop *me, const struct end *end)
{
    uint32_t events = EPOLLIN | (end->sent < end->to_send ? EPOLLOUT : 0);
    switch (me->way) {
    case BY_EDGE: return EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    case BY_ONESHOT: return events | EPOLLONESHOT;
    case BY_LEVEL_TRYING: return EPOLLIN | (end->registered & EPOLLOUT);
    default: return events;
    }
}

static void register_end(struct loop *me, struct end *end, int operation, uint32_t events)
{
    if (me->way == BY_POLL || me->way == BY_SELECT)
        return;
    struct epoll_event event = {.events = events, .data.u32 = end - me->ends};
    end->registered = events;
    OK(epoll_ctl(me->epoll, operation, end->fd, &event));
}

static void add_end(struct loop *me, int fd, int connection, int side)
{
    struct end *end = &me->ends[me->count++];
    set_nonblocking(fd);
    *end = (struct end){.fd = fd};
    end->to_send = bytes_of(me->seed, connection, side);
    end->to_receive = bytes_of(me->seed, connection, !side);
    end->out = pattern_new(me->seed * 100 + connection * 2 + side);
    end->in = pattern_new(me->seed * 100 + connection * 2 + !side);
    end->may_send = me->way == BY_LEVEL_TRYING;
    register_end(me, end, EPOLL_CTL_ADD, events_of(me, end));
}

static void note_end(const struct loop *me, const struct end *end)
{
    snprintf(failure_note, sizeof failure_note,
             "seed %llu, way %d, connection %d, sent %llu of %llu, received %llu of %llu: ",
             (unsigned long long)me->seed, me->way, (int)(end - me->ends), (unsigned long long)end->sent,
             (unsigned long long)end->to_send, (unsigned long long)end->received,
             (unsigned long long)end->to_receive);
}

static void send_some(struct loop *me, struct end *end)
{
    bool is_told = me->way != BY_LEVEL_TRYING;
    for (bool is_first = true; end->may_send && end->sent < end->to_send; is_first = false) {
        uint64_t size = 1 + below(me, me->send_max), left = end->to_send - end->sent;
        size = size < left ? size : left;
        pattern_fill(end->out, end->sent, me->buffer, size);
        ssize_t count = send(end->fd, me->buffer, size, MSG_NOSIGNAL);
        note_end(me, end);
        if (count < 0) {
            CHECK_EQ(errno, EAGAIN);
            errno = 0;
            if (is_first && is_told && me->way != BY_EDGE)
                FAIL("no room, though it was reported");
            end->may_send = false;
            return;
        }
        end->sent += count;
        if (!me->drains && me->way != BY_EDGE)
            break;
    }
    if (end->sent == end->to_send && !end->has_shut) {
        OK(shutdown(end->fd, SHUT_WR));
        end->has_shut = true;
    }
}

static void receive_some(struct loop *me, struct end *end)
{
    for (bool is_first = true; end->may_receive && !end->has_ended; is_first = false) {
        ssize_t count = recv(end->fd, me->buffer, 1 + below(me, me->receive_max), 0);
        note_end(me, end);
        if (count < 0) {
            CHECK_EQ(errno, EAGAIN);
            errno = 0;
            if (is_first && me->way != BY_EDGE)
                FAIL("nothing to receive, though it was reported");
            end->may_receive = false;
            return;
        }
        end->has_ended = count == 0;
        pattern_check(end->in, end->received, me->buffer, count);
        end->received += count;
        if (!me->drains && me->way != BY_EDGE)
            break;
    }
}

static void act(struct loop *me, struct end *end, uint32_t events)
{
    bool is_level = me->way != BY_EDGE;
    bool has_input = events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP);
    end->may_receive = has_input || (!is_level && end->may_receive);
    end->may_send |= events & EPOLLOUT;
    bool sends_first = below(me, 2);
    if (sends_first)
        send_some(me, end);
    receive_some(me, end);
    if (!sends_first)
        send_some(me, end);
    if (is_level)
        end->may_receive = false;
    if (is_level && me->way != BY_LEVEL_TRYING)
        end->may_send = false;
    uint32_t wanted = events_of(me, end);
    if (me->way == BY_LEVEL_TRYING) {
        bool waits = end->sent < end->to_send && !end->may_send;
        wanted = EPOLLIN | (waits ? EPOLLOUT : 0);
    }
    if (end->has_ended && is_level)
        wanted &= ~EPOLLIN;
    if (me->way == BY_ONESHOT || wanted != end->registered)
        register_end(me, end, EPOLL_CTL_MOD, wanted);
}

// Returns whether something was reported.
static bool wait_and_act(struct loop *me)
{
    struct epoll_event events[2 * CONNECTIONS_MAX];
    int count = 0, room = 1 + below(me, me->count);
    if (me->way == BY_LEVEL_TRYING) {
        for (int i = 0; i < me->count; i++) {
            if (me->ends[i].may_send && me->ends[i].sent < me->ends[i].to_send)
                act(me, &me->ends[i], 0), count++;
        }
        if (count > 0)
            return true;
    }
    if (me->way != BY_POLL && me->way != BY_SELECT) {
        count = OK(epoll_wait(me->epoll, events, room, STALL_MS));
        for (int i = 0; i < count; i++)
            act(me, &me->ends[events[i].data.u32], events[i].events);
        return count > 0;
    }
    fd_set readable, writable;
    FD_ZERO(&readable);
    FD_ZERO(&writable);
    int highest = -1;
    for (int i = 0; i < me->count; i++) {
        struct end *end = &me->ends[i];
        bool sends = end->sent < end->to_send;
        short wanted = (end->has_ended ? 0 : POLLIN) | (sends ? POLLOUT : 0);
        me->polled[i] = (struct pollfd){.fd = wanted ? end->fd : -1, .events = wanted};
        if (!end->has_ended)
            FD_SET(end->fd, &readable);
        if (sends)
            FD_SET(end->fd, &writable);
        highest = end->fd > highest ? end->fd : highest;
    }
    struct timeval limit = {.tv_sec = STALL_MS / 1000};
    count = me->way == BY_POLL ? OK(poll(me->polled, me->count, STALL_MS))
                               : OK(select(highest + 1, &readable, &writable, NULL, &limit));
    for (int i = 0; i < me->count && count > 0; i++) {
        int fd = me->ends[i].fd;
        uint32_t found = me->way == BY_POLL ? me->polled[i].revents & (POLLIN | POLLOUT | POLLHUP)
                                            : (FD_ISSET(fd, &readable) ? EPOLLIN : 0) |
                                                  (FD_ISSET(fd, &writable) ? EPOLLOUT : 0);
        if (found)
            act(me, &me->ends[i], found);
    }
    return count > 0;
}

static bool is_over(const struct loop *me)
{
    for (int i = 0; i < me->count; i++) {
        if (!me->ends[i].has_ended || me->ends[i].sent < me->ends[i].to_send)
            return false;
    }
    return true;
}

static void run_loop(struct loop *me)
{
    while (!is_over(me)) {
        if (!wait_and_act(me)) {
            for (int i = 0; i < me->count; i++) {
                note_end(me, &me->ends[i]);
                if (!me->ends[i].has_ended || me->ends[i].sent < me->ends[i].to_send)
                    FAIL("no event for %d ms", STALL_MS);
            }
        }
        if (below(me, me->pause_one_in) == 0)
            usleep(below(me, 300));
    }
    for (int i = 0; i < me->count; i++) {
        note_end(me, &me->ends[i]);
        CHECK_EQ(me->ends[i].received, me->ends[i].to_receive);
        OK(close(me->ends[i].fd));
        free(me->ends[i].out);
        free(me->ends[i].in);
    }
    failure_note[0] = 0;
    OK(close(me->epoll));
    free(me);
}

static void exchange(int fd, int side, int requests)
{
    char byte = 'x';
    for (int i = 0; i < requests; i++) {
        if (side == 1)
            CHECK_EQ(send(fd, &byte, 1, 0), 1);
        CHECK_EQ(recv(fd, &byte, 1, 0), 1);
        if (side == 0)
            CHECK_EQ(send(fd, &byte, 1, 0), 1);
    }
}

static void run_often(struct endpoint *me, int side, const struct address *at)
{
    uint64_t first = number_of("RANDOM_SEED", 1), count = number_of("RANDOM_COUNT", 10);
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct loop *loop = new_loop(seed, side);
        int fds[CONNECTIONS_MAX];
        int connections = connections_of(seed);
        for (int i = 0; i < connections; i++) {
            fds[i] = side == 0 ? accept_from(me->listener) : dial(at);
            exchange(fds[i], side, (seed + i) % 7);
        }
        for (int i = 0; i < connections; i++)
            add_end(loop, fds[i], i, side);
        run_loop(loop);
    }
    meet(me);
}

SERVER(event_loops_at_random) { run_often(me, 0, NULL); }
CLIENT(event_loops_at_random)
{
    struct address at = peer_of(me->fd);
    run_often(me, 1, &at);
}

TEST(an_event_loop_with_both_ends_at_random)
{
    uint64_t first = number_of("RANDOM_SEED", 1), count = number_of("RANDOM_COUNT", 10);
    struct address at;
    int listener = listen_anywhere(&at);
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct loop *loop = new_loop(seed, 0);
        for (int i = 0; i < connections_of(seed); i++) {
            int client = dial(&at), server = accept_from(listener);
            for (uint64_t request = 0; request < (seed + i) % 7; request++)
                ping_pong(client, server);
            add_end(loop, client, i, 1);
            add_end(loop, server, i, 0);
        }
        run_loop(loop);
    }
    OK(close(listener));
}
