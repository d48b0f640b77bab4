// Urgent data: MSG_OOB, the mark in the stream, EPOLLPRI, SO_OOBINLINE, SIGURG.
#include "check.h"

#include <sys/select.h>
#include <time.h>

// Registers a check twice: for a fresh connection, and for one that has carried some messages.
#define TEST_YOUNG_AND_OLD(name)                                                                   \
    static void name##_of(struct pair pair);                                                       \
    TEST(name)                                                                                     \
    {                                                                                              \
        name##_of(connected_pair());                                                               \
    }                                                                                              \
    TEST(name##_when_old)                                                                          \
    {                                                                                              \
        struct pair pair = connected_pair();                                                       \
        for (int round = 0; round < 8; round++)                                                    \
            ping_pong(pair.client, pair.server);                                                   \
        name##_of(pair);                                                                           \
    }                                                                                              \
    static void name##_of(struct pair pair)

static void send_urgent(int fd, const char *text)
{
    CHECK_EQ(send(fd, text, strlen(text), MSG_OOB), strlen(text));
}

static void expect_urgent(int fd, char want)
{
    char byte = 0;
    CHECK_EQ(recv(fd, &byte, 1, MSG_OOB), 1);
    CHECK_EQ(byte, want);
}

static int unread(int fd)
{
    int bytes = -1;
    OK(ioctl(fd, FIONREAD, &bytes));
    return bytes;
}

// Fails unless one receive returns exactly this text.
static void expect_piece(int fd, const char *want)
{
    char bytes[64];
    CHECK_EQ(recv(fd, bytes, sizeof bytes, MSG_DONTWAIT), strlen(want));
    CHECK(memcmp(bytes, want, strlen(want)) == 0);
}

static void expect_nothing(int fd)
{
    char byte;
    CHECK_ERR(recv(fd, &byte, 1, MSG_DONTWAIT), EAGAIN);
}

static void set_inline(int fd)
{
    int on = 1;
    OK(setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &on, sizeof on));
}

TEST_YOUNG_AND_OLD(an_urgent_byte_is_received_out_of_band)
{
    say(pair.client, "first");
    send_urgent(pair.client, "second!");
    await(pair.server, POLLPRI);
    expect_urgent(pair.server, '!');
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_OOB), EINVAL);
    CHECK_EQ(poll_once(pair.server, POLLPRI | POLLIN, 0), POLLIN);
    expect(pair.server, "firstsecond");
    say(pair.client, "third");
    await(pair.server, POLLIN);
    expect_piece(pair.server, "third");
    ping_pong(pair.client, pair.server);
}

TEST_YOUNG_AND_OLD(a_receive_stops_at_the_mark_and_the_next_one_continues_behind_it)
{
    say(pair.client, "before");
    send_urgent(pair.client, "!");
    say(pair.client, "behind");
    await(pair.server, POLLPRI);
    CHECK_EQ(sockatmark(pair.server), 0);
    CHECK_EQ(unread(pair.server), 6);
    expect_piece(pair.server, "before");
    CHECK_EQ(sockatmark(pair.server), 1);
    CHECK_EQ(unread(pair.server), 0);
    CHECK_EQ(poll_once(pair.server, POLLPRI | POLLIN, 0), POLLPRI | POLLIN);
    expect_piece(pair.server, "behind");
    CHECK_EQ(sockatmark(pair.server), 0);
    // A receiver that has passed the mark has lost the byte.
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_OOB), EINVAL);
    expect_silent(pair.server, POLLPRI | POLLIN);
    ping_pong(pair.client, pair.server);
}

TEST_YOUNG_AND_OLD(an_urgent_byte_alone_is_not_input)
{
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    CHECK_EQ(poll_once(pair.server, POLLIN | POLLPRI, 0), POLLPRI);
    CHECK_EQ(sockatmark(pair.server), 1);
    CHECK_EQ(unread(pair.server), 0);
    expect_urgent(pair.server, '!');
    CHECK_EQ(poll_once(pair.server, POLLIN | POLLPRI, 0), 0);
    CHECK_EQ(sockatmark(pair.server), 1);
    expect_nothing(pair.server);
    CHECK_EQ(sockatmark(pair.server), 0);
    say(pair.client, "more");
    await(pair.server, POLLIN);
    expect_piece(pair.server, "more");
}

TEST_YOUNG_AND_OLD(an_urgent_byte_that_the_receiver_passes_is_lost)
{
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    expect_nothing(pair.server);
    CHECK_EQ(poll_once(pair.server, POLLIN | POLLPRI, 0), 0);
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_OOB), EINVAL);
    ping_pong(pair.client, pair.server);
}

TEST_YOUNG_AND_OLD(urgent_bytes_are_received_in_line_with_so_oobinline)
{
    set_inline(pair.server);
    say(pair.client, "before");
    send_urgent(pair.client, "!");
    say(pair.client, "behind");
    await(pair.server, POLLPRI);
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_OOB), EINVAL);
    CHECK_EQ(unread(pair.server), 13);
    expect_piece(pair.server, "before");
    CHECK_EQ(sockatmark(pair.server), 1);
    CHECK_EQ(poll_once(pair.server, POLLPRI | POLLIN, 0), POLLPRI | POLLIN);
    expect_piece(pair.server, "!behind");
    CHECK_EQ(sockatmark(pair.server), 0);
    CHECK_EQ(poll_once(pair.server, POLLPRI | POLLIN, 0), 0);
}

enum urgent_by { OUT_OF_BAND, IN_LINE, NOT_AT_ALL };

static void send_urgent_before_the_answer(struct pair pair, enum urgent_by way)
{
    say(pair.client, "question");
    expect(pair.server, "question");
    send_urgent(pair.client, "!");
    // Not by a wait, which would also notice whatever else has happened.
    while (sockatmark(pair.server) == 0)
        usleep(100);
    if (way == OUT_OF_BAND)
        expect_urgent(pair.server, '!');
    if (way == IN_LINE) {
        set_inline(pair.server);
        expect_piece(pair.server, "!");
    }
    if (way == NOT_AT_ALL) {
        char byte;
        expect_nothing(pair.server);
        CHECK_ERR(recv(pair.server, &byte, 1, MSG_OOB), EINVAL);
    }
    say(pair.client, "behind");
    await(pair.server, POLLIN);
    expect_piece(pair.server, "behind");
    say(pair.server, "answer");
    expect(pair.client, "answer");
    for (int round = 0; round < 8; round++)
        ping_pong(pair.client, pair.server);
}

// The server may have met the client by then, and the client may not know it.
TEST(an_urgent_byte_before_an_answer_is_received_at_every_age)
{
    for (int age = 0; age < 10; age++) {
        for (enum urgent_by way = OUT_OF_BAND; way <= NOT_AT_ALL; way++) {
            struct pair pair = connected_pair();
            for (int round = 0; round < age; round++)
                ping_pong(pair.client, pair.server);
            send_urgent_before_the_answer(pair, way);
            close_pair(&pair);
        }
    }
}

TEST_YOUNG_AND_OLD(only_the_latest_urgent_byte_has_a_mark)
{
    say(pair.client, "a");
    send_urgent(pair.client, "1");
    say(pair.client, "b");
    send_urgent(pair.client, "2");
    say(pair.client, "c");
    await(pair.server, POLLPRI);
    pause_ms(SILENCE_MS);
    expect_urgent(pair.server, '2');
    CHECK_EQ(unread(pair.server), 3);
    expect_piece(pair.server, "a1b");
    CHECK_EQ(sockatmark(pair.server), 1);
    expect_piece(pair.server, "c");
    expect_nothing(pair.server);
}

TEST_YOUNG_AND_OLD(a_receiver_at_the_mark_loses_the_byte_to_the_next_one)
{
    send_urgent(pair.client, "1");
    await(pair.server, POLLPRI);
    send_urgent(pair.client, "2");
    pause_ms(SILENCE_MS);
    CHECK_EQ(sockatmark(pair.server), 1);
    expect_urgent(pair.server, '2');
    say(pair.client, "c");
    await(pair.server, POLLIN);
    expect_piece(pair.server, "c");
    expect_nothing(pair.server);
}

TEST_YOUNG_AND_OLD(peeking_at_an_urgent_byte_leaves_it)
{
    say(pair.client, "ab");
    send_urgent(pair.client, "!");
    say(pair.client, "cd");
    await(pair.server, POLLPRI);
    char bytes[8] = "";
    CHECK_EQ(recv(pair.server, bytes, 8, MSG_OOB | MSG_PEEK), 1);
    CHECK_EQ(bytes[0], '!');
    CHECK_EQ(recv(pair.server, bytes, 8, MSG_PEEK), 2);
    CHECK(memcmp(bytes, "ab", 2) == 0);
    expect_piece(pair.server, "ab");
    CHECK_EQ(recv(pair.server, bytes, 8, MSG_PEEK), 2);
    CHECK(memcmp(bytes, "cd", 2) == 0);
    CHECK_EQ(sockatmark(pair.server), 1);
    expect_urgent(pair.server, '!');
    expect_piece(pair.server, "cd");
}

TEST_YOUNG_AND_OLD(recvmsg_flags_an_urgent_byte)
{
    struct iovec pieces[3] = {{"out ", 4}, {"of turn", 7}, {"", 0}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 3};
    CHECK_EQ(sendmsg(pair.client, &message, MSG_OOB), 11);
    await(pair.server, POLLPRI);
    char bytes[8] = "";
    struct iovec room = {bytes, sizeof bytes};
    struct msghdr got = {.msg_iov = &room, .msg_iovlen = 1};
    CHECK_EQ(recvmsg(pair.server, &got, MSG_OOB), 1);
    CHECK_EQ(bytes[0], 'n');
    CHECK_EQ(got.msg_flags & ~MSG_CMSG_CLOEXEC, MSG_OOB);
    CHECK_EQ(recvmsg(pair.server, &got, MSG_DONTWAIT), 8);
    CHECK_EQ(got.msg_flags & ~MSG_CMSG_CLOEXEC, 0);
    expect_piece(pair.server, "ur");
    CHECK_EQ(send(pair.client, "", 0, MSG_OOB), 0);
    ping_pong(pair.client, pair.server);
}

TEST_YOUNG_AND_OLD(recvmsg_without_room_for_an_urgent_byte_sets_msg_trunc)
{
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    struct iovec none = {"", 0};
    struct msghdr got = {.msg_iov = &none, .msg_iovlen = 1};
    CHECK_EQ(recvmsg(pair.server, &got, MSG_OOB), 0);
    CHECK_EQ(got.msg_flags & ~MSG_CMSG_CLOEXEC, MSG_OOB | MSG_TRUNC);
}

TEST_YOUNG_AND_OLD(urgent_bytes_from_or_to_null_are_efault)
{
    CHECK_ERR(send(pair.client, NULL, 1, MSG_OOB), EFAULT);
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    CHECK_ERR(recv(pair.server, NULL, 1, MSG_OOB), EFAULT);
}

static void *wait_for_all(void *argument)
{
    static char bytes[8];
    memset(bytes, 0, sizeof bytes);
    CHECK_EQ(recv(*(int *)argument, bytes, sizeof bytes, MSG_WAITALL), 4);
    CHECK(memcmp(bytes, "only", 4) == 0);
    return NULL;
}

TEST_YOUNG_AND_OLD(waitall_returns_the_bytes_before_the_mark)
{
    pthread_t waiter = start_thread(wait_for_all, &pair.server);
    pause_ms(20);
    say(pair.client, "on");
    pause_ms(20);
    say(pair.client, "ly");
    pause_ms(20);
    send_urgent(pair.client, "!");
    say(pair.client, "behind");
    join_thread(waiter);
    expect_urgent(pair.server, '!');
    expect_piece(pair.server, "behind");
}

static void *send_urgent_soon(void *argument)
{
    pause_ms(30);
    send_urgent(*(int *)argument, "!");
    return NULL;
}

TEST_YOUNG_AND_OLD(urgent_bytes_wake_blocked_waits)
{
    pthread_t peer = start_thread(send_urgent_soon, &pair.client);
    CHECK_EQ(poll_once(pair.server, POLLPRI, WAIT_MS_MAX), POLLPRI);
    join_thread(peer);
    expect_urgent(pair.server, '!');

    peer = start_thread(send_urgent_soon, &pair.client);
    fd_set except;
    FD_ZERO(&except);
    FD_SET(pair.server, &except);
    struct timeval patience = {.tv_sec = WAIT_MS_MAX / 1000};
    CHECK_EQ(select(pair.server + 1, NULL, NULL, &except, &patience), 1);
    join_thread(peer);
    expect_urgent(pair.server, '!');

    int epoll = epoll_with(pair.server, EPOLLPRI);
    peer = start_thread(send_urgent_soon, &pair.client);
    CHECK_EQ(epoll_one(epoll).events, EPOLLPRI);
    join_thread(peer);
    expect_urgent(pair.server, '!');
    epoll_none(epoll);
}

TEST_YOUNG_AND_OLD(urgent_bytes_behind_unread_bytes_wake_blocked_waits)
{
    say(pair.client, "unread");
    await(pair.server, POLLIN);
    pthread_t peer = start_thread(send_urgent_soon, &pair.client);
    CHECK_EQ(poll_once(pair.server, POLLPRI, WAIT_MS_MAX), POLLPRI);
    join_thread(peer);
    expect_urgent(pair.server, '!');

    int epoll = epoll_with(pair.server, EPOLLPRI);
    epoll_none(epoll);
    peer = start_thread(send_urgent_soon, &pair.client);
    CHECK_EQ(epoll_one(epoll).events, EPOLLPRI);
    join_thread(peer);
    expect_urgent(pair.server, '!');
    expect_piece(pair.server, "unread!");
}

TEST_YOUNG_AND_OLD(each_urgent_byte_is_an_edge)
{
    int epoll = epoll_with(pair.server, EPOLLPRI | EPOLLET);
    for (char round = '0'; round < '4'; round++) {
        char text[2] = {round, 0};
        send_urgent(pair.client, text);
        CHECK_EQ(epoll_one(epoll).events, EPOLLPRI);
        epoll_none(epoll);
        expect_urgent(pair.server, round);
    }
    close(epoll);
    epoll = epoll_with(pair.server, EPOLLIN | EPOLLPRI | EPOLLET);
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    CHECK_EQ(epoll_one(epoll).events, EPOLLPRI);
}

TEST_YOUNG_AND_OLD(urgent_bytes_are_received_before_the_end)
{
    say(pair.client, "last");
    send_urgent(pair.client, "!");
    OK(shutdown(pair.client, SHUT_WR));
    await(pair.server, POLLPRI);
    await(pair.server, POLLRDHUP);
    expect_piece(pair.server, "last");
    expect_urgent(pair.server, '!');
    expect_eof(pair.server);
}

TEST_YOUNG_AND_OLD(splice_stops_at_the_mark)
{
    say(pair.client, "before");
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    int pipe_fds[2];
    OK(pipe(pipe_fds));
    CHECK_EQ(splice(pair.server, NULL, pipe_fds[1], NULL, 100, SPLICE_F_NONBLOCK), 6);
    CHECK_EQ(sockatmark(pair.server), 1);
    expect_urgent(pair.server, '!');
}

TEST_YOUNG_AND_OLD(discarding_bytes_stops_at_the_mark)
{
    say(pair.client, "before");
    send_urgent(pair.client, "!");
    say(pair.client, "behind");
    await(pair.server, POLLPRI);
    char bytes[64];
    CHECK_EQ(recv(pair.server, bytes, sizeof bytes, MSG_TRUNC), 6);
    CHECK_EQ(sockatmark(pair.server), 1);
    CHECK_EQ(recv(pair.server, bytes, sizeof bytes, MSG_TRUNC), 6);
    expect_nothing(pair.server);
}

TEST_YOUNG_AND_OLD(urgent_bytes_wait_for_room_like_others)
{
    set_nonblocking(pair.client);
    size_t taken = fill_until_full(pair.client);
    CHECK_ERR(send(pair.client, "!", 1, MSG_OOB), EAGAIN);
    CHECK(drain_until_empty(pair.server) == taken);
    await(pair.client, POLLOUT);
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    expect_urgent(pair.server, '!');
}

TEST_YOUNG_AND_OLD(sigurg_goes_to_the_owner_that_the_program_set)
{
    OK(fcntl(pair.server, F_SETOWN, getpid()));
    CHECK_EQ(fcntl(pair.server, F_GETOWN), getpid());
    signals_seen = 0;
    on_signal(SIGURG, count_signal, SA_RESTART);
    for (int round = 1; round < 4; round++) {
        say(pair.client, "text");
        await(pair.server, POLLIN);
        CHECK_EQ(signals_seen, round - 1);
        send_urgent(pair.client, "!");
        for (int waited = 0; signals_seen < round && waited < WAIT_MS_MAX; waited++)
            pause_ms(1);
        CHECK_EQ(signals_seen, round);
        await(pair.server, POLLPRI);
        expect_urgent(pair.server, '!');
        expect_piece(pair.server, "text");
        say(pair.client, "more");
        await(pair.server, POLLIN);
        expect_piece(pair.server, "more");
    }
}

TEST_YOUNG_AND_OLD(an_urgent_byte_after_shut_wr_is_epipe)
{
    OK(shutdown(pair.client, SHUT_WR));
    CHECK_ERR(send(pair.client, "!", 1, MSG_OOB | MSG_NOSIGNAL), EPIPE);
    send_urgent(pair.server, "!");
    await(pair.client, POLLPRI);
    expect_urgent(pair.client, '!');
}

TEST_YOUNG_AND_OLD(urgent_bytes_flush_a_cork)
{
    int on = 1;
    OK(setsockopt(pair.client, IPPROTO_TCP, TCP_CORK, &on, sizeof on));
    say(pair.client, "held");
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    await(pair.server, POLLIN);
    expect_piece(pair.server, "held");
    CHECK_EQ(sockatmark(pair.server), 1);
    expect_urgent(pair.server, '!');
    say(pair.client, "behind");
    int off = 0;
    OK(setsockopt(pair.client, IPPROTO_TCP, TCP_CORK, &off, sizeof off));
    await(pair.server, POLLIN);
    expect_piece(pair.server, "behind");
}

TEST_YOUNG_AND_OLD(both_endpoints_send_urgent_bytes_at_once)
{
    say(pair.client, "from client");
    say(pair.server, "from server");
    send_urgent(pair.client, "c");
    send_urgent(pair.server, "s");
    await(pair.client, POLLPRI);
    await(pair.server, POLLPRI);
    expect_urgent(pair.client, 's');
    expect_urgent(pair.server, 'c');
    send_urgent(pair.client, "C");
    send_urgent(pair.server, "S");
    await(pair.client, POLLPRI);
    await(pair.server, POLLPRI);
    expect_urgent(pair.client, 'S');
    expect_urgent(pair.server, 'C');
    expect_piece(pair.client, "from servers");
    expect_piece(pair.server, "from clientc");
    CHECK_EQ(sockatmark(pair.client), 1);
    CHECK_EQ(sockatmark(pair.server), 1);
    say(pair.client, "end");
    await(pair.server, POLLIN);
    expect_piece(pair.server, "end");
}

SERVER(urgent_bytes_travel_both_ways)
{
    for (int round = 0; round < 200; round++) {
        await(me->fd, POLLPRI);
        expect_urgent(me->fd, (char)round);
        char byte = (char)(round + 1);
        expect(me->fd, "in turn");
        CHECK_EQ(send(me->fd, &byte, 1, MSG_OOB), 1);
    }
    expect_eof(me->fd);
}
CLIENT(urgent_bytes_travel_both_ways)
{
    for (int round = 0; round < 200; round++) {
        char byte = (char)round;
        say(me->fd, "in turn");
        CHECK_EQ(send(me->fd, &byte, 1, MSG_OOB), 1);
        await(me->fd, POLLPRI);
        expect_urgent(me->fd, (char)(round + 1));
        // The receiver passes the mark, which would otherwise count as unread.
        expect_nothing(me->fd);
    }
}

TEST_YOUNG_AND_OLD(a_child_receives_an_urgent_byte)
{
    say(pair.client, "ab");
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    pid_t pid = fork_child();
    if (pid == 0) {
        expect_piece(pair.server, "ab");
        CHECK_EQ(sockatmark(pair.server), 1);
        expect_urgent(pair.server, '!');
        send_urgent(pair.server, "?");
        _exit(0);
    }
    wait_child(pid);
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_OOB), EINVAL);
    CHECK_EQ(sockatmark(pair.server), 1);
    await(pair.client, POLLPRI);
    expect_urgent(pair.client, '?');
}

TEST_YOUNG_AND_OLD(so_oobinline_applies_to_all_processes)
{
    int to_child[2];
    char byte = 0;
    OK(pipe(to_child));
    say(pair.client, "ab");
    pid_t pid = fork_child();
    if (pid == 0) {
        CHECK_EQ(read(to_child[0], &byte, 1), 1);
        expect_piece(pair.server, "ab");
        expect_piece(pair.server, "!");
        _exit(0);
    }
    set_inline(pair.server);
    send_urgent(pair.client, "!");
    await(pair.server, POLLPRI);
    CHECK_EQ(write(to_child[1], &byte, 1), 1);
    wait_child(pid);
}

// The first send after the peer's close is accepted, as into TCP's buffer, and the next one is refused.
TEST_YOUNG_AND_OLD(an_urgent_byte_to_a_closed_peer_is_accepted_once)
{
    OK(close(pair.server));
    pause_ms(SILENCE_MS);
    CHECK_EQ(send(pair.client, "!", 1, MSG_OOB | MSG_NOSIGNAL), 1);
    pause_ms(SILENCE_MS);
    CHECK_ERR(send(pair.client, "?", 1, MSG_OOB | MSG_NOSIGNAL), EPIPE);
    pair.server = OK(dup(pair.client));
}

TEST_YOUNG_AND_OLD(an_urgent_byte_to_a_peer_that_shut_reading_is_accepted)
{
    OK(shutdown(pair.server, SHUT_RD));
    pause_ms(SILENCE_MS);
    CHECK_EQ(send(pair.client, "!", 1, MSG_OOB | MSG_NOSIGNAL), 1);
    CHECK_EQ(send(pair.client, "?", 1, MSG_NOSIGNAL), 1);
}
