// epoll: level, edge, one-shot, exclusive; lifetimes; mixtures; nesting.
#include "check.h"

#include <linux/sockios.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>

static void modify(int epoll, int fd, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.u64 = fd};
    OK(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event));
}

TEST(epoll_level_repeats_until_read)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    epoll_none(epoll);
    say(pair.client, "ab");
    for (int i = 0; i < 3; i++)
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    expect(pair.server, "a");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    expect(pair.server, "b");
    epoll_none(epoll);
}

TEST(epoll_edge_is_reported_once)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLET);
    say(pair.client, "ab");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    epoll_none(epoll);
    expect(pair.server, "a"); // a partial read causes no new edge
    epoll_none(epoll);
}

TEST(epoll_edge_is_reported_for_each_arrival)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLET);
    for (int i = 0; i < 5; i++) {
        say(pair.client, "more"); // nothing is read in between
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    }
    epoll_none(epoll);
    expect(pair.server, "moremoremoremoremore");
}

TEST(epoll_edge_reports_events_pending_at_add)
{
    struct pair pair = connected_pair();
    say(pair.client, "early");
    await(pair.server, POLLIN);
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLOUT | EPOLLET);
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN | EPOLLOUT);
    epoll_none(epoll);
}

TEST(epoll_mod_rearms_an_edge)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLET);
    say(pair.client, "x");
    epoll_one(epoll);
    epoll_none(epoll);
    modify(epoll, pair.server, EPOLLIN | EPOLLET);
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
}

TEST(epoll_edge_out_after_full_and_drained)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.client, EPOLLOUT | EPOLLET);
    CHECK_EQ(epoll_one(epoll).events, EPOLLOUT);
    epoll_none(epoll);
    fill_until_full(pair.client);
    while (epoll_wait(epoll, &(struct epoll_event){0}, 1, SILENCE_MS) > 0)
        fill_until_full(pair.client); // an edge from before the last byte fitted
    drain_until_empty(pair.server);
    CHECK_EQ(epoll_one(epoll).events, EPOLLOUT);
}

SERVER(epoll_edge_event_loop)
{
    // The usual loop: read until EAGAIN, then wait for the next edge.
    struct pattern *pattern = pattern_new(31);
    int epoll = epoll_with(me->fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
    char buffer[4096];
    uint64_t position = 0;
    set_nonblocking(me->fd);
    for (ssize_t got = -1; got != 0;) {
        epoll_one(epoll);
        while ((got = recv(me->fd, buffer, sizeof buffer, 0)) > 0) {
            pattern_check(pattern, position, buffer, got);
            position += got;
        }
        CHECK(got == 0 || errno == EAGAIN);
    }
    CHECK_EQ(position, 3000000);
}
CLIENT(epoll_edge_event_loop)
{
    struct pattern *pattern = pattern_new(31);
    int epoll = epoll_with(me->fd, EPOLLOUT | EPOLLET);
    char buffer[5000];
    set_nonblocking(me->fd);
    for (uint64_t position = 0; position < 3000000;) {
        size_t left = 3000000 - position, size = left < sizeof buffer ? left : sizeof buffer;
        pattern_fill(pattern, position, buffer, size);
        ssize_t sent = send(me->fd, buffer, size, MSG_NOSIGNAL);
        if (sent > 0) {
            position += sent;
            continue;
        }
        CHECK_EQ(errno, EAGAIN);
        epoll_one(epoll);
    }
}

// Room is there in each wait, so that an arrival may come while the wait reports nothing but that.
#define ROUND_TRIPS 30000

SERVER(epoll_edge_of_input_is_not_lost_beside_room)
{
    int epoll = epoll_with(me->fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    set_nonblocking(me->fd);
    for (int answered = 0; answered < ROUND_TRIPS;) {
        struct epoll_event event;
        if (OK(epoll_wait(epoll, &event, 1, WAIT_MS_MAX)) == 0)
            FAIL("no edge after %d messages", answered);
        char byte;
        if (!(event.events & EPOLLIN))
            continue;
        while (recv(me->fd, &byte, 1, 0) == 1) {
            CHECK_EQ(send(me->fd, &byte, 1, 0), 1);
            answered++;
        }
        CHECK_EQ(errno, EAGAIN);
        errno = 0;
    }
    meet(me);
}
CLIENT(epoll_edge_of_input_is_not_lost_beside_room)
{
    uint64_t state = 1;
    for (int i = 0; i < ROUND_TRIPS; i++) {
        char byte = (char)i;
        // The time between two messages varies by about the time of a wait that finds something.
        for (uint64_t pause = random_next(&state) % 1024; pause > 0; pause--)
            __asm__ volatile("");
        CHECK_EQ(send(me->fd, &byte, 1, 0), 1);
        CHECK_EQ(recv(me->fd, &byte, 1, 0), 1);
        CHECK_EQ(byte, (char)i);
    }
    meet(me);
}

// One thread is both ends. It sends whenever there is room and receives whenever there is something; in the course of
// it the connection becomes busy.
static void stream_by_events(size_t sent_at_once, size_t received_at_once, int requests)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < requests; i++)
        ping_pong(pair.client, pair.server);
    set_nonblocking(pair.client);
    set_nonblocking(pair.server);
    int epoll = OK(epoll_create1(0));
    struct epoll_event room = {.events = EPOLLIN | EPOLLOUT, .data.fd = pair.client};
    struct epoll_event input = {.events = EPOLLIN, .data.fd = pair.server};
    OK(epoll_ctl(epoll, EPOLL_CTL_ADD, pair.client, &room));
    OK(epoll_ctl(epoll, EPOLL_CTL_ADD, pair.server, &input));
    static char buffer[16384];
    size_t total = 256 * 1024, sent = 0, received = 0;
    while (received < total) {
        struct epoll_event events[2];
        int count = OK(epoll_wait(epoll, events, 2, WAIT_MS_MAX));
        if (count == 0)
            FAIL("no event after %zu bytes sent and %zu received, %d requests before", sent, received, requests);
        for (int i = 0; i < count; i++) {
            if (events[i].data.fd == pair.server) {
                received += OK(recv(pair.server, buffer, received_at_once, 0));
            } else if (sent < total) {
                size_t left = total - sent;
                sent += OK(send(pair.client, buffer, left < sent_at_once ? left : sent_at_once, 0));
            } else {
                room.events = EPOLLIN;
                OK(epoll_ctl(epoll, EPOLL_CTL_MOD, pair.client, &room));
            }
        }
    }
    CHECK_EQ(received, total);
    OK(close(epoll));
    close_pair(&pair);
}

TEST(epoll_reports_room_while_a_connection_becomes_busy)
{
    for (int requests = 0; requests < 8; requests++) {
        for (int i = 0; i < 3; i++) {
            stream_by_events(1000, 4096, requests);
            stream_by_events(1000, 16384, requests);
            stream_by_events(16384, 4096, requests);
        }
    }
}

// A client does something on a connection of few requests, and then sends on its busy one. A wait that reports the
// second reports the first as well, if no earlier one has.
#define ORDERS 200

struct ordered {
    struct address address;
    int busy;
};

static void tell_and_wait(int busy)
{
    char byte = 't';
    CHECK_EQ(send(busy, &byte, 1, 0), 1);
    CHECK_EQ(recv(busy, &byte, 1, 0), 1);
}

static void *act_in_order(void *argument)
{
    struct ordered *it = argument;
    for (int i = 0; i < ORDERS; i++) {
        int other = dial(&it->address);
        tell_and_wait(it->busy);
        CHECK_EQ(send(other, "o", 1, 0), 1);
        tell_and_wait(it->busy);
        OK(close(other));
        tell_and_wait(it->busy);
    }
    return NULL;
}

// Waits until the busy connection has something. Returns whether `other` was reported before or with it: the kernel's
// order within one wait depends on what was reported last.
static bool is_not_later(int epoll, int other, int busy)
{
    for (bool is_seen = false, is_done = false; !is_done;) {
        struct epoll_event events[8];
        int count = OK(epoll_wait(epoll, events, 8, WAIT_MS_MAX));
        CHECK(count > 0);
        for (int i = 0; i < count; i++) {
            is_seen |= events[i].data.fd == other;
            is_done |= events[i].data.fd == busy;
        }
        if (is_done)
            return is_seen;
    }
    return false;
}

static void answer(int busy)
{
    char byte;
    CHECK_EQ(recv(busy, &byte, 1, 0), 1);
    CHECK_EQ(send(busy, &byte, 1, 0), 1);
}

TEST(epoll_reports_a_busy_connection_with_what_its_peer_did_before)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < 20; i++)
        ping_pong(pair.client, pair.server);
    struct ordered it = {name_of(pair.listener), pair.client};
    pthread_t client = start_thread(act_in_order, &it);
    int epoll = epoll_with(pair.listener, EPOLLIN);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = pair.listener};
    OK(epoll_ctl(epoll, EPOLL_CTL_MOD, pair.listener, &event));
    event.data.fd = pair.server;
    OK(epoll_ctl(epoll, EPOLL_CTL_ADD, pair.server, &event));
    for (int i = 0; i < ORDERS; i++) {
        if (!is_not_later(epoll, pair.listener, pair.server))
            FAIL("the connect of round %d was reported later", i);
        int other = accept_from(pair.listener);
        event.data.fd = other;
        OK(epoll_ctl(epoll, EPOLL_CTL_ADD, other, &event));
        answer(pair.server);
        if (!is_not_later(epoll, other, pair.server))
            FAIL("the byte of round %d was reported later", i);
        char byte;
        CHECK_EQ(recv(other, &byte, 1, 0), 1);
        answer(pair.server);
        if (!is_not_later(epoll, other, pair.server))
            FAIL("the close of round %d was reported later", i);
        OK(close(other));
        answer(pair.server);
    }
    join_thread(client);
}

TEST(epoll_oneshot_reports_once_until_rearmed)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLONESHOT);
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    say(pair.client, "y");
    epoll_none(epoll);
    modify(epoll, pair.server, EPOLLIN | EPOLLONESHOT);
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    epoll_none(epoll);
}

TEST(epoll_oneshot_rearmed_when_empty_waits)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLONESHOT);
    say(pair.client, "x");
    epoll_one(epoll);
    expect(pair.server, "x");
    modify(epoll, pair.server, EPOLLIN | EPOLLONESHOT);
    epoll_none(epoll);
    say(pair.client, "y");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
}

SERVER(epoll_wakes_a_sleeper)
{
    int epoll = epoll_with(me->fd, EPOLLIN);
    for (int i = 0; i < 20; i++) {
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
        expect(me->fd, "wake");
        say(me->fd, "ok");
    }
}
CLIENT(epoll_wakes_a_sleeper)
{
    for (int i = 0; i < 20; i++) {
        pause_ms(5);
        say(me->fd, "wake");
        expect(me->fd, "ok");
    }
}

SERVER(epoll_ping_pong_many)
{
    int epoll = epoll_with(me->fd, EPOLLIN);
    for (int i = 0; i < 2000; i++) {
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
        expect(me->fd, "ping");
        say(me->fd, "pong");
    }
}
CLIENT(epoll_ping_pong_many)
{
    int epoll = epoll_with(me->fd, EPOLLIN);
    for (int i = 0; i < 2000; i++) {
        say(me->fd, "ping");
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
        expect(me->fd, "pong");
    }
}

TEST(epoll_on_a_listener)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int epoll = epoll_with(listener, EPOLLIN);
    epoll_none(epoll);
    int client = dial(&at);
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    int server = accept_from(listener);
    epoll_none(epoll);
    ping_pong(client, server);
}

TEST(epoll_edge_on_a_listener)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int epoll = epoll_with(listener, EPOLLIN | EPOLLET);
    set_nonblocking(listener);
    for (int round = 0; round < 5; round++) {
        dial(&at);
        dial(&at);
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
        accept_from(listener);
        accept_from(listener);
        CHECK_ERR(accept(listener, NULL, NULL), EAGAIN);
    }
}

TEST(epoll_rdhup_when_peer_shuts)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLRDHUP);
    OK(shutdown(pair.client, SHUT_WR));
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN | EPOLLRDHUP);
    modify(epoll, pair.server, EPOLLIN);
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
}

TEST(epoll_hup_when_both_are_shut)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLRDHUP);
    OK(shutdown(pair.server, SHUT_WR));
    epoll_none(epoll);
    OK(shutdown(pair.client, SHUT_WR));
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN | EPOLLRDHUP | EPOLLHUP);
    modify(epoll, pair.server, 0); // HUP is always reported
    CHECK_EQ(epoll_one(epoll).events, EPOLLHUP);
}

TEST(epoll_err_after_reset)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.client, EPOLLIN);
    say(pair.client, "unread");
    await(pair.server, POLLIN);
    OK(close(pair.server));
    struct epoll_event event = epoll_one(epoll);
    CHECK_EQ(event.events, EPOLLIN | EPOLLERR | EPOLLHUP);
    char byte;
    CHECK_ERR(recv(pair.client, &byte, 1, 0), ECONNRESET);
}

SERVER(epoll_sleeper_sees_the_peer_close)
{
    int epoll = epoll_with(me->fd, EPOLLIN | EPOLLRDHUP | EPOLLET);
    meet(me);
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN | EPOLLRDHUP);
    expect_eof(me->fd);
}
CLIENT(epoll_sleeper_sees_the_peer_close)
{
    meet(me);
    pause_ms(SILENCE_MS);
}

TEST(epoll_data_keeps_64_bits)
{
    struct pair pair = connected_pair();
    int epoll = OK(epoll_create(1));
    epoll_add(epoll, pair.server, EPOLLIN, 0xfedcba9876543210u);
    epoll_add(epoll, pair.listener, EPOLLIN, 0x8000000000000001u);
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).data.u64, 0xfedcba9876543210u);
    expect(pair.server, "x");
    struct address at = name_of(pair.listener);
    dial(&at);
    CHECK_EQ(epoll_one(epoll).data.u64, 0x8000000000000001u);
}

TEST(epoll_mod_changes_the_data)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = ~0ull};
    OK(epoll_ctl(epoll, EPOLL_CTL_MOD, pair.server, &event));
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).data.u64, ~0ull);
}

TEST(epoll_del_silences)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    say(pair.client, "x");
    epoll_one(epoll);
    OK(epoll_ctl(epoll, EPOLL_CTL_DEL, pair.server, NULL));
    epoll_none(epoll);
    epoll_add(epoll, pair.server, EPOLLIN, 5);
    CHECK_EQ(epoll_one(epoll).data.u64, 5);
}

TEST(epoll_ctl_errors)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_ADD, pair.server, &event), EEXIST);
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_MOD, pair.client, &event), ENOENT);
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_DEL, pair.client, &event), ENOENT);
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_ADD, 987, &event), EBADF);
    CHECK_ERR(epoll_ctl(987, EPOLL_CTL_ADD, pair.client, &event), EBADF);
    CHECK_ERR(epoll_ctl(epoll, 9, pair.client, &event), EINVAL);
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_ADD, epoll, &event), EINVAL);
    CHECK_ERR(epoll_ctl(pair.server, EPOLL_CTL_ADD, pair.client, &event), EINVAL);
}

TEST(epoll_wait_errors)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    struct epoll_event event;
    CHECK_ERR(epoll_wait(epoll, &event, 0, 0), EINVAL);
    CHECK_ERR(epoll_wait(pair.server, &event, 1, 0), EINVAL);
    CHECK_ERR(epoll_wait(987, &event, 1, 0), EBADF);
    CHECK_ERR(epoll_create(0), EINVAL);
    CHECK_ERR(epoll_create1(77), EINVAL);
}

TEST(epoll_create1_cloexec)
{
    CHECK_EQ(OK(fcntl(OK(epoll_create1(EPOLL_CLOEXEC)), F_GETFD)), FD_CLOEXEC);
    CHECK_EQ(OK(fcntl(OK(epoll_create1(0)), F_GETFD)), 0);
}

TEST(epoll_forgets_a_closed_descriptor)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    say(pair.client, "x");
    epoll_one(epoll);
    OK(close(pair.server));
    epoll_none(epoll);
}

TEST(epoll_accepts_a_reused_number)
{
    struct pair pair = connected_pair();
    struct address at = name_of(pair.listener);
    int epoll = epoll_with(pair.server, EPOLLIN);
    int number = pair.server;
    OK(close(pair.server));
    int client = dial(&at);
    CHECK_EQ(client, number);
    int server = accept_from(pair.listener);
    epoll_add(epoll, client, EPOLLIN, 4711);
    say(server, "new");
    CHECK_EQ(epoll_one(epoll).data.u64, 4711);
    expect(client, "new");
    epoll_none(epoll);
}

TEST(epoll_keeps_reporting_while_a_dup_is_open)
{
    struct pair pair = connected_pair();
    int epoll = OK(epoll_create1(0));
    epoll_add(epoll, pair.server, EPOLLIN, 99);
    int copy = OK(dup(pair.server));
    OK(close(pair.server));
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).data.u64, 99);
    expect(copy, "x");
    epoll_none(epoll);
    OK(close(copy));
    epoll_none(epoll);
}

TEST(epoll_keeps_the_registration_of_a_closed_number)
{
    struct pair pair = connected_pair();
    int epoll = OK(epoll_create1(0)), number = OK(dup(pair.server));
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 2};
    epoll_add(epoll, number, EPOLLIN | EPOLLET, 1);
    OK(close(number));
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_DEL, number, NULL), EBADF);
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_MOD, pair.server, &event), ENOENT);
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).data.u64, 1);
    expect(pair.server, "x");
    // The number refers to the same connection again, and its registration is still there.
    CHECK_EQ(dup2(pair.server, number), number);
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_ADD, number, &event), EEXIST);
    OK(epoll_ctl(epoll, EPOLL_CTL_MOD, number, &event));
    say(pair.client, "y");
    CHECK_EQ(epoll_one(epoll).data.u64, 2);
    expect(pair.server, "y");
    OK(close(number));
    OK(close(pair.server));
    epoll_none(epoll);
    pair.server = number;
}

TEST(epoll_reports_a_closed_number_and_all_its_dups)
{
    struct pair pair = connected_pair();
    int epoll = OK(epoll_create1(0)), copy = OK(dup(pair.server)), last = OK(dup(pair.server));
    epoll_add(epoll, pair.server, EPOLLIN, 1);
    epoll_add(epoll, copy, EPOLLIN, 2);
    epoll_none(epoll);
    OK(close(pair.server));
    OK(close(copy));
    epoll_add(epoll, last, EPOLLIN, 4);
    epoll_none(epoll);
    say(pair.client, "x");
    unsigned seen = 0;
    for (int looks = 0; seen != 7; looks++) {
        struct epoll_event events[4];
        int count = OK(epoll_wait(epoll, events, 4, WAIT_MS_MAX));
        CHECK(count > 0 && looks < 1000);
        for (int i = 0; i < count; i++)
            seen |= events[i].data.u64;
    }
    expect(last, "x");
    epoll_none(epoll);
}

TEST(epoll_keeps_a_listener_when_a_dup_lives)
{
    struct address at;
    int listener = listen_anywhere(&at), copy = OK(dup(listener));
    int epoll = epoll_with(listener, EPOLLIN);
    OK(close(listener));
    int client = dial(&at);
    epoll_one(epoll);
    ping_pong(client, accept_from(copy));
    epoll_none(epoll);
    OK(close(copy));
    epoll_none(epoll);
}

TEST(epoll_accepts_a_dup_in_addition_to_its_original)
{
    struct pair pair = connected_pair();
    int epoll = OK(epoll_create1(0)), copy = OK(dup(pair.server));
    epoll_add(epoll, pair.server, EPOLLIN, 1);
    epoll_add(epoll, copy, EPOLLIN, 2);
    say(pair.client, "x");
    await(copy, POLLIN);
    struct epoll_event events[4];
    CHECK_EQ(epoll_wait(epoll, events, 4, WAIT_MS_MAX), 2);
    CHECK_EQ(events[0].data.u64 + events[1].data.u64, 3);
}

TEST(two_epolls_hold_one_connection)
{
    struct pair pair = connected_pair();
    int level = epoll_with(pair.server, EPOLLIN), edge = epoll_with(pair.server, EPOLLIN | EPOLLET);
    say(pair.client, "x");
    epoll_one(level);
    epoll_one(edge);
    epoll_one(level);
    epoll_none(edge);
    expect(pair.server, "x");
    epoll_none(level);
}

TEST(a_dup_of_an_epoll_is_the_same_epoll)
{
    struct pair pair = connected_pair();
    int epoll = OK(epoll_create1(0)), copy = OK(dup(epoll));
    epoll_add(copy, pair.server, EPOLLIN, 8);
    OK(close(epoll));
    say(pair.client, "x");
    CHECK_EQ(epoll_one(copy).data.u64, 8);
}

TEST(epoll_mixes_connections_with_other_descriptors)
{
    struct pair pair = connected_pair();
    int pipe_ends[2], epoll = OK(epoll_create1(0));
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    OK(sigprocmask(SIG_BLOCK, &usr1, NULL));
    OK(pipe(pipe_ends));
    int event = OK(eventfd(0, 0)), timer = OK(timerfd_create(CLOCK_MONOTONIC, 0));
    int signals = OK(signalfd(-1, &usr1, 0));
    int fds[] = {pair.server, pipe_ends[0], event, timer, signals};
    for (int i = 0; i < 5; i++)
        epoll_add(epoll, fds[i], EPOLLIN | EPOLLET, i);
    epoll_none(epoll);
    struct itimerspec soon = {.it_value = {0, 1000000}};
    uint64_t one = 1;
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).data.u64, 0);
    CHECK_EQ(write(pipe_ends[1], "x", 1), 1);
    CHECK_EQ(epoll_one(epoll).data.u64, 1);
    CHECK_EQ(write(event, &one, 8), 8);
    CHECK_EQ(epoll_one(epoll).data.u64, 2);
    OK(timerfd_settime(timer, 0, &soon, NULL));
    CHECK_EQ(epoll_one(epoll).data.u64, 3);
    OK(raise(SIGUSR1));
    CHECK_EQ(epoll_one(epoll).data.u64, 4);
}

static void *write_eventfd_later(void *argument)
{
    uint64_t one = 1;
    pause_ms(SILENCE_MS);
    CHECK_EQ(write(*(int *)argument, &one, 8), 8);
    return NULL;
}

TEST(eventfd_wakes_an_epoll_that_sleeps_on_connections)
{
    struct pair pair = connected_pair();
    int event = OK(eventfd(0, 0));
    int epoll = epoll_with(pair.server, EPOLLIN);
    epoll_add(epoll, event, EPOLLIN, 12345);
    pthread_t thread = start_thread(write_eventfd_later, &event);
    CHECK_EQ(epoll_one(epoll).data.u64, 12345);
    join_thread(thread);
}

TEST(a_busy_connection_does_not_starve_a_pipe)
{
    struct pair pair = connected_pair();
    int pipe_ends[2];
    OK(pipe(pipe_ends));
    int epoll = epoll_with(pair.server, EPOLLIN); // level, never read: always ready
    epoll_add(epoll, pipe_ends[0], EPOLLIN, 555);
    say(pair.client, "always ready");
    CHECK_EQ(write(pipe_ends[1], "x", 1), 1);
    struct epoll_event event;
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(epoll_wait(epoll, &event, 1, WAIT_MS_MAX), 1);
        if (event.data.u64 == 555)
            return;
    }
    FAIL("the pipe was never reported");
}

TEST(a_busy_pipe_does_not_starve_a_connection)
{
    struct pair pair = connected_pair();
    int pipe_ends[2];
    OK(pipe(pipe_ends));
    int epoll = epoll_with(pipe_ends[0], EPOLLIN);
    epoll_add(epoll, pair.server, EPOLLIN, 555);
    CHECK_EQ(write(pipe_ends[1], "x", 1), 1);
    say(pair.client, "x");
    struct epoll_event event;
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(epoll_wait(epoll, &event, 1, WAIT_MS_MAX), 1);
        if (event.data.u64 == 555)
            return;
    }
    FAIL("the connection was never reported");
}

TEST(small_maxevents_is_fair)
{
    enum { COUNT = 8 };
    struct address at;
    int listener = listen_anywhere(&at), epoll = OK(epoll_create1(0)), seen = 0;
    for (int i = 0; i < COUNT; i++) {
        say(dial(&at), "x");
        int server = accept_from(listener);
        await(server, POLLIN);
        epoll_add(epoll, server, EPOLLIN, i);
    }
    for (int round = 0; round < 2 * COUNT; round++) {
        struct epoll_event events[2];
        int count = OK(epoll_wait(epoll, events, 2, WAIT_MS_MAX));
        CHECK(count >= 1 && count <= 2);
        for (int i = 0; i < count; i++)
            seen |= 1 << events[i].data.u64;
    }
    CHECK_EQ(seen, (1 << COUNT) - 1);
}

TEST(epoll_reports_all_that_are_ready)
{
    enum { COUNT = 50 };
    struct address at;
    int listener = listen_anywhere(&at), epoll = OK(epoll_create1(0));
    for (int i = 0; i < COUNT; i++) {
        say(dial(&at), "x");
        int server = accept_from(listener);
        await(server, POLLIN);
        epoll_add(epoll, server, EPOLLIN | EPOLLET, 1);
    }
    struct epoll_event events[2 * COUNT];
    CHECK_EQ(epoll_wait(epoll, events, 2 * COUNT, WAIT_MS_MAX), COUNT);
    epoll_none(epoll);
}

TEST(nested_epoll)
{
    struct pair pair = connected_pair();
    int inner = epoll_with(pair.server, EPOLLIN), outer = OK(epoll_create1(0));
    epoll_add(outer, inner, EPOLLIN, 31);
    epoll_none(outer);
    say(pair.client, "x");
    CHECK_EQ(epoll_one(outer).data.u64, 31);
    CHECK_EQ(epoll_one(inner).data.u64, pair.server);
    expect(pair.server, "x");
    epoll_none(outer);
}

static void *say_later(void *argument)
{
    pause_ms(SILENCE_MS);
    say(*(int *)argument, "later");
    return NULL;
}

TEST(nested_epoll_wakes_a_sleeper)
{
    struct pair pair = connected_pair();
    int inner = epoll_with(pair.server, EPOLLIN), middle = epoll_with(inner, EPOLLIN);
    int outer = epoll_with(middle, EPOLLIN);
    pthread_t thread = start_thread(say_later, &pair.client);
    CHECK_EQ(epoll_one(outer).data.u64, middle);
    join_thread(thread);
    struct pollfd entry = {outer, POLLIN, 0};
    CHECK_EQ(poll(&entry, 1, 0), 1);
}

TEST(nested_epoll_edge)
{
    struct pair pair = connected_pair();
    int inner = epoll_with(pair.server, EPOLLIN);
    int outer = epoll_with(inner, EPOLLIN | EPOLLET);
    for (int i = 0; i < 3; i++) {
        say(pair.client, "x");
        CHECK_EQ(epoll_one(outer).data.u64, inner);
        epoll_one(inner);
        expect(pair.server, "x");
        epoll_none(outer);
    }
}

TEST(nested_epoll_of_what_is_received_without_a_wait)
{
    struct pair pair = connected_pair();
    int inner = epoll_with(pair.server, EPOLLIN), middle = epoll_with(inner, EPOLLIN);
    int outer = epoll_with(middle, EPOLLIN);
    for (int i = 0; i < 3; i++) {
        say(pair.client, "x");
        CHECK_EQ(epoll_one(outer).data.u64, middle);
        CHECK_EQ(epoll_one(outer).data.u64, middle);
        expect(pair.server, "x");
        epoll_none(outer);
        CHECK_EQ(poll_once(outer, POLLIN, 0), 0);
        CHECK_EQ(poll_once(inner, POLLIN, 0), 0);
        say(pair.client, "y");
        CHECK_EQ(poll_once(outer, POLLIN, WAIT_MS_MAX), POLLIN);
        expect(pair.server, "y");
        CHECK_EQ(poll_once(outer, POLLIN, 0), 0);
        epoll_none(inner);
    }
}

TEST(nested_epoll_in_an_edge)
{
    struct pair pair = connected_pair();
    int inner = epoll_with(pair.server, EPOLLIN), middle = epoll_with(inner, EPOLLIN);
    int outer = epoll_with(middle, EPOLLIN | EPOLLET);
    for (int i = 0; i < 3; i++) {
        say(pair.client, "x");
        CHECK_EQ(epoll_one(outer).data.u64, middle);
        epoll_none(outer);
        epoll_one(inner);
        expect(pair.server, "x");
        epoll_none(outer);
    }
}

TEST(nested_epoll_once)
{
    struct pair pair = connected_pair();
    int inner = epoll_with(pair.server, EPOLLIN), outer = epoll_with(inner, EPOLLIN | EPOLLONESHOT);
    for (int i = 0; i < 3; i++) {
        say(pair.client, "x");
        CHECK_EQ(epoll_one(outer).data.u64, inner);
        epoll_none(outer);
        epoll_one(inner);
        expect(pair.server, "x");
        modify(outer, inner, EPOLLIN | EPOLLONESHOT);
        epoll_none(outer);
    }
}

static void *add_pair_later(void *argument)
{
    const int *epoll_and_fd = argument;
    pause_ms(SILENCE_MS);
    epoll_add(epoll_and_fd[0], epoll_and_fd[1], EPOLLIN, 3);
    return NULL;
}

TEST(connection_added_while_epoll_sleeps)
{
    struct pair pair = connected_pair();
    int epoll_and_fd[2] = {OK(epoll_create1(0)), pair.server};
    say(pair.client, "x");
    pthread_t thread = start_thread(add_pair_later, epoll_and_fd);
    CHECK_EQ(epoll_one(epoll_and_fd[0]).data.u64, 3);
    join_thread(thread);
}

struct worker_group {
    int epoll;
    int served;
    pthread_mutex_t lock;
};

static void *serve_oneshot(void *argument)
{
    struct worker_group *worker_group = argument;
    struct epoll_event event;
    while (epoll_wait(worker_group->epoll, &event, 1, WAIT_MS_MAX) == 1) {
        char message[4];
        if (event.data.u64 == 0)
            return NULL;
        recv_exact((int)event.data.u64, message, 4);
        pthread_mutex_lock(&worker_group->lock);
        worker_group->served++;
        pthread_mutex_unlock(&worker_group->lock);
        say((int)event.data.u64, "done");
        modify(worker_group->epoll, (int)event.data.u64, EPOLLIN | EPOLLONESHOT);
    }
    FAIL("a worker was not woken");
}

TEST(several_threads_wait_on_one_epoll)
{
    struct worker_group worker_group = {.epoll = OK(epoll_create1(0)), .lock = PTHREAD_MUTEX_INITIALIZER};
    struct address at;
    int listener = listen_anywhere(&at), clients[6], stop[2];
    pthread_t threads[4];
    for (int i = 0; i < 6; i++) {
        clients[i] = dial(&at);
        int server = accept_from(listener);
        epoll_add(worker_group.epoll, server, EPOLLIN | EPOLLONESHOT, server);
    }
    for (int i = 0; i < 4; i++)
        threads[i] = start_thread(serve_oneshot, &worker_group);
    for (int round = 0; round < 50; round++) {
        for (int i = 0; i < 6; i++)
            say(clients[i], "work");
        for (int i = 0; i < 6; i++)
            expect(clients[i], "done");
    }
    CHECK_EQ(worker_group.served, 300);
    OK(pipe(stop));
    epoll_add(worker_group.epoll, stop[0], EPOLLIN, 0);
    CHECK_EQ(write(stop[1], "x", 1), 1);
    for (int i = 0; i < 4; i++)
        join_thread(threads[i]);
}

TEST(a_child_keeps_its_epoll_when_the_parent_closes_the_connection)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    say(pair.client, "first");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    expect(pair.server, "first");
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.client));
        for (int i = 0; i < 200; i++) {
            CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
            expect(pair.server, "question");
            say(pair.server, "answer");
        }
        _exit(0);
    }
    OK(close(pair.server));
    for (int i = 0; i < 200; i++) {
        if (i % 50 == 0)
            pause_ms(SILENCE_MS); // the child blocks meanwhile
        say(pair.client, "question");
        expect(pair.client, "answer");
    }
    wait_child(pid);
}

// ---- room that comes back -----------------------------------------------------------------------

// Waits for an event of the sender. If there is none, tells a lost edge from a peer that has stopped reading.
static struct epoll_event room_event(const struct endpoint *me, int epoll)
{
    struct epoll_event event;
    if (OK(epoll_wait(epoll, &event, 1, WAIT_MS_MAX)) == 1)
        return event;
    int unsent = -1, peer_is_done = poll_once(me->from_peer, POLLIN, 0);
    OK(ioctl(me->fd, SIOCOUTQ, &unsent));
    int room = poll_once(me->fd, POLLOUT, 0);
    FAIL("no event in %d ms: poll reports %#x, %d bytes unsent, the peer %s", WAIT_MS_MAX, room, unsent,
         peer_is_done ? "has found everything read" : "still reads");
}

// A sender waits in epoll_wait with room to spare, fills the connection, and waits until its peer has received
// everything; twice.
static void sleep_until_drained(struct endpoint *me, uint32_t edge)
{
    struct epoll_event event;
    say(me->fd, "head");
    int epoll = epoll_with(me->fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | edge);
    CHECK((epoll_one(epoll).events & EPOLLOUT) != 0);
    static char bytes[100000];
    send_all(me->fd, bytes, sizeof bytes);
    set_nonblocking(me->fd);
    for (int round = 0; round < 2; round++) {
        while (edge != 0 && epoll_wait(epoll, &event, 1, SILENCE_MS) == 1)
            continue;
        fill_until_full(me->fd);
        while (epoll_wait(epoll, &event, 1, 0) == 1 && (event.events & EPOLLOUT) != 0)
            fill_until_full(me->fd);
        meet(me);
        do {
            event = room_event(me, epoll);
            if ((event.events & EPOLLOUT) == 0)
                pause_ms(1);
        } while ((event.events & EPOLLOUT) == 0);
        say(me->fd, "tail");
        meet(me);
    }
}

#define ROOM_IS_REPORTED(name, before, once_full)                                                   \
    static void drain_##name(struct endpoint *me)                                                       \
    {                                                                                              \
        before;                                                                                    \
        for (int round = 0; round < 2; round++) {                                                  \
            meet(me);                                                                              \
            once_full;                                                                             \
            pause_ms(SILENCE_MS); /* the sender blocks meanwhile */                                \
            drain_until_empty(me->fd);                                                             \
            meet(me);                                                                              \
        }                                                                                          \
    }                                                                                              \
    SERVER(room_is_reported_to_edges_##name) { sleep_until_drained(me, EPOLLET); }                  \
    CLIENT(room_is_reported_to_edges_##name) { drain_##name(me); }                                  \
    SERVER(room_is_reported_to_levels_##name) { sleep_until_drained(me, 0); }                       \
    CLIENT(room_is_reported_to_levels_##name) { drain_##name(me); }

ROOM_IS_REPORTED(from_a_reader, (void)me, (void)me)
ROOM_IS_REPORTED(from_one_that_has_shut_down, OK(shutdown(me->fd, SHUT_WR)), (void)me)
ROOM_IS_REPORTED(from_one_that_shuts_down_late, (void)me, OK(shutdown(me->fd, SHUT_WR)))
ROOM_IS_REPORTED(from_one_that_awaits_urgent_bytes, (void)me, await(me->fd, POLLIN | POLLPRI))

// Waits without a time-out, because a wait polls once more when its time-out ends.
static void *wait_for_one(void *argument)
{
    struct epoll_event event;
    CHECK_EQ(epoll_wait(*(int *)argument, &event, 1, -1), 1);
    CHECK_EQ(event.data.u64, 1);
    return NULL;
}

// A thread is blocked in epoll_wait while another one adds or modifies a connection that has unread bytes.
static void change_while_blocked(uint32_t events, bool is_added_before)
{
    struct pair busy = connected_pair();
    struct address at = name_of(busy.listener);
    for (int i = 0; i < 10; i++) // A client with a busy connection upgrades its other connections to lanes sooner.
        ping_pong(busy.client, busy.server);
    int epoll = epoll_with(busy.listener, EPOLLIN);
    int client = dial(&at), server = accept_from(busy.listener);
    if (is_added_before)
        epoll_add(epoll, server, 0, 1);
    pthread_t waiter = start_thread(wait_for_one, &epoll);
    pause_ms(SILENCE_MS);
    say(client, "x");
    struct epoll_event event = {.events = events, .data.u64 = 1};
    OK(epoll_ctl(epoll, is_added_before ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, server, &event));
    join_thread(waiter);
    OK(close(client));
    OK(close(server));
    close_pair(&busy);
    OK(close(epoll));
}

TEST(epoll_ctl_wakes_another_thread_in_epoll_wait)
{
    for (int is_added_before = 0; is_added_before < 2; is_added_before++) {
        change_while_blocked(EPOLLIN, is_added_before);
        change_while_blocked(EPOLLIN | EPOLLET, is_added_before);
        change_while_blocked(EPOLLIN | EPOLLRDHUP | EPOLLONESHOT, is_added_before);
    }
}

TEST(adding_an_epoll_wakes_another_thread_in_epoll_wait)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < 10; i++)
        ping_pong(pair.client, pair.server);
    int inner = epoll_with(pair.server, EPOLLIN), outer = epoll_with(pair.listener, EPOLLIN);
    pthread_t waiter = start_thread(wait_for_one, &outer);
    pause_ms(SILENCE_MS);
    epoll_add(outer, inner, EPOLLIN, 1);
    pause_ms(SILENCE_MS);
    say(pair.client, "x");
    join_thread(waiter);
    close_pair(&pair);
    OK(close(inner));
    OK(close(outer));
}

TEST(epollout_added_by_another_thread_wakes_epoll_wait)
{
    static char bytes[1 << 16];
    struct pair pair = connected_pair();
    say(pair.client, "x");
    OK(shutdown(pair.client, SHUT_WR)); // The client sends nothing more that could wake the server.
    expect(pair.server, "x");
    expect_eof(pair.server);
    set_nonblocking(pair.server);
    uint64_t sent = 0;
    for (ssize_t count; (count = send(pair.server, bytes, sizeof bytes, MSG_NOSIGNAL)) > 0;)
        sent += count;
    CHECK_EQ(errno, EAGAIN);
    int epoll = epoll_with(pair.listener, EPOLLIN);
    pthread_t waiter = start_thread(wait_for_one, &epoll);
    pause_ms(SILENCE_MS);
    epoll_add(epoll, pair.server, EPOLLOUT, 1);
    pause_ms(SILENCE_MS);
    for (uint64_t left = sent; left > 0;)
        left -= OK(recv(pair.client, bytes, sizeof bytes, 0));
    join_thread(waiter);
    close_pair(&pair);
    OK(close(epoll));
}

static void *count_edges(void *argument)
{
    struct worker_group *worker_group = argument;
    struct epoll_event event;
    for (;;) {
        CHECK_EQ(epoll_wait(worker_group->epoll, &event, 1, WAIT_MS_MAX), 1);
        if (event.data.u64 == 0)
            return NULL;
        pthread_mutex_lock(&worker_group->lock);
        worker_group->served++;
        pthread_mutex_unlock(&worker_group->lock);
    }
}

TEST(one_edge_wakes_one_thread)
{
    struct pair pair = connected_pair();
    struct worker_group worker_group = {.epoll = epoll_with(pair.server, EPOLLIN | EPOLLET),
                        .lock = PTHREAD_MUTEX_INITIALIZER};
    pthread_t threads[3];
    int stop[2];
    for (int i = 0; i < 3; i++)
        threads[i] = start_thread(count_edges, &worker_group);
    pause_ms(SILENCE_MS);
    say(pair.client, "x");
    pause_ms(SILENCE_MS);
    OK(pipe(stop));
    epoll_add(worker_group.epoll, stop[0], EPOLLIN, 0);
    CHECK_EQ(write(stop[1], "x", 1), 1);
    for (int i = 0; i < 3; i++)
        join_thread(threads[i]);
    CHECK_EQ(worker_group.served, 1);
}

TEST(exclusive_listener_in_two_processes_serves_all)
{
    struct address at;
    int listener = listen_anywhere(&at);
    set_nonblocking(listener);
    pid_t workers[2];
    for (int i = 0; i < 2; i++) {
        if ((workers[i] = fork_child()) != 0)
            continue;
        int epoll = epoll_with(listener, EPOLLIN | EPOLLEXCLUSIVE);
        for (;;) {
            epoll_one(epoll);
            int fd = accept(listener, NULL, NULL);
            if (fd < 0)
                continue;
            say(fd, "served");
            OK(close(fd));
        }
    }
    for (int i = 0; i < 40; i++) {
        int client = dial(&at);
        expect(client, "served");
        OK(close(client));
    }
    kill_child(workers[0]);
    kill_child(workers[1]);
}

TEST(exclusive_rules)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN | EPOLLEXCLUSIVE);
    struct epoll_event event = {.events = EPOLLIN};
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_MOD, pair.server, &event), EINVAL);
    event.events = EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT;
    CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_ADD, pair.client, &event), EINVAL);
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
}

TEST(epoll_is_interrupted_even_with_sa_restart)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    struct epoll_event event;
    on_signal(SIGALRM, count_signal, SA_RESTART);
    alarm_every_ms(20);
    CHECK_ERR(epoll_wait(epoll, &event, 1, -1), EINTR);
}

static void block_alarm(sigset_t *unblocked)
{
    sigset_t alarm_only;
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    OK(sigprocmask(SIG_BLOCK, &alarm_only, unblocked));
    on_signal(SIGALRM, count_signal, 0);
}

TEST(epoll_pwait_lets_a_blocked_signal_in)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    struct epoll_event event;
    sigset_t unblocked, now;
    block_alarm(&unblocked);
    OK(raise(SIGALRM));
    CHECK_ERR(epoll_pwait(epoll, &event, 1, WAIT_MS_MAX, &unblocked), EINTR);
    CHECK_EQ(signals_seen, 1);
    OK(sigprocmask(SIG_BLOCK, NULL, &now));
    CHECK_EQ(sigismember(&now, SIGALRM), 1);
    say(pair.client, "x");
    CHECK_EQ(epoll_pwait(epoll, &event, 1, WAIT_MS_MAX, NULL), 1);
}

TEST(epoll_pwait2_takes_a_mask_and_nanoseconds)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    struct epoll_event event;
    sigset_t unblocked;
    struct timespec soon = {0, 1000000}, later = {20, 0};
    int first = epoll_pwait2(epoll, &event, 1, &soon, NULL);
    if (first < 0 && errno == ENOSYS)
        skip("this kernel has no epoll_pwait2");
    CHECK_EQ(first, 0);
    block_alarm(&unblocked);
    OK(raise(SIGALRM));
    CHECK_ERR(epoll_pwait2(epoll, &event, 1, &later, &unblocked), EINTR);
    CHECK_EQ(signals_seen, 1);
    say(pair.client, "x");
    CHECK_EQ(epoll_pwait2(epoll, &event, 1, &later, NULL), 1);
    CHECK_EQ(epoll_pwait2(epoll, &event, 1, NULL, NULL), 1);
}

TEST(epoll_works_in_a_child_that_inherited_it)
{
    struct pair pair = connected_pair();
    int epoll = OK(epoll_create1(0));
    epoll_add(epoll, pair.server, EPOLLIN, 600613);
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.client));
        CHECK_EQ(epoll_one(epoll).data.u64, 600613);
        expect(pair.server, "to the child");
        say(pair.server, "from the child");
        _exit(0);
    }
    say(pair.client, "to the child");
    expect(pair.client, "from the child");
    wait_child(pid);
    say(pair.client, "to the parent");
    CHECK_EQ(epoll_one(epoll).data.u64, 600613);
    expect(pair.server, "to the parent");
}

TEST(many_idle_connections_and_one_active)
{
    enum { COUNT = 300 };
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    if (limit.rlim_max < 4096)
        skip("the descriptor limit is %ld", (long)limit.rlim_max);
    limit.rlim_cur = limit.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    struct address at;
    int listener = listen_anywhere(&at), epoll = OK(epoll_create1(0)), client = -1, server = -1;
    for (int i = 0; i < COUNT; i++) {
        client = dial(&at);
        server = accept_from(listener);
        epoll_add(epoll, server, EPOLLIN, server);
    }
    for (int i = 0; i < 100; i++) {
        say(client, "ping");
        CHECK_EQ(epoll_one(epoll).data.u64, server);
        expect(server, "ping");
    }
}

TEST(maxevents_1_reports_a_pipe_behind_a_drained_connection)
{
    struct pair pair = connected_pair();
    int pipe_fds[2], epoll = epoll_with(pair.server, EPOLLIN);
    struct epoll_event event;
    char byte;
    OK(pipe(pipe_fds));
    epoll_add(epoll, pipe_fds[0], EPOLLIN, 77);
    CHECK_EQ(epoll_wait(epoll, &event, 1, SILENCE_MS), 0); // blocked: a sender wakes the epoll instance
    say(pair.client, "x");
    expect(pair.server, "x"); // before the epoll instance could report it
    CHECK_EQ(write(pipe_fds[1], "y", 1), 1);
    CHECK_EQ(epoll_wait(epoll, &event, 1, 0), 1);
    CHECK_EQ(event.data.u64, 77);
    CHECK_EQ(read(pipe_fds[0], &byte, 1), 1);
    epoll_none(epoll);
}

TEST(duplicates_of_an_epoll_instance_are_one_set_when_a_connection_becomes_busy)
{
    struct address at;
    int listener = listen_anywhere(&at), epoll = OK(epoll_create1(0));
    int by_fcntl = OK(fcntl(epoll, F_DUPFD_CLOEXEC, 0)), by_dup = OK(dup(epoll));
    int client = dial(&at), server = accept_from(listener);
    epoll_add(by_fcntl, server, EPOLLIN | EPOLLET, 7);
    int waited[] = {epoll, by_fcntl, by_dup};
    for (int i = 0; i < 30; i++) {
        say(client, "ping");
        struct epoll_event event = epoll_one(waited[i % 3]);
        CHECK_EQ(event.data.u64, 7);
        CHECK_EQ(event.events, EPOLLIN);
        expect(server, "ping");
        say(server, "pong");
        expect(client, "pong");
    }
    OK(close(epoll));
    struct epoll_event changed = {.events = EPOLLIN, .data.u64 = 8};
    OK(epoll_ctl(by_dup, EPOLL_CTL_MOD, server, &changed));
    say(client, "ping");
    CHECK_EQ(epoll_one(by_fcntl).data.u64, 8);
    OK(close(by_fcntl));
    CHECK_EQ(epoll_one(by_dup).data.u64, 8);
    OK(epoll_ctl(by_dup, EPOLL_CTL_DEL, server, NULL));
    epoll_none(by_dup);
}
