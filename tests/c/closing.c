// End of stream: shutdown, close, reset, SIGPIPE.
#include "check.h"

#include <sys/time.h>

static void reset_by_linger(int fd)
{
    struct linger hard = {.l_onoff = 1, .l_linger = 0};
    OK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &hard, sizeof hard));
    OK(close(fd));
}

SERVER(eof_repeats)
{
    for (int i = 0; i < 3; i++)
        expect_eof(me->fd);
    char byte;
    CHECK_EQ(recv(me->fd, &byte, 1, MSG_DONTWAIT), 0);
    CHECK_EQ(read(me->fd, &byte, 1), 0);
}
CLIENT(eof_repeats)
{
    OK(close(me->fd));
    me->fd = -1;
}

TEST(a_server_that_closes_at_once_gives_eof)
{
    // Many clients at once, so that some of them act late after the kernel has connected them.
    enum { CLIENTS = 8, ROUNDS = 100 };
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t clients[CLIENTS];
    for (int i = 0; i < CLIENTS; i++) {
        if ((clients[i] = fork_child()) != 0)
            continue;
        for (int round = 0; round < ROUNDS; round++) {
            int fd = dial(&at);
            expect_eof(fd);
            send(fd, "x", 1, MSG_NOSIGNAL); // may succeed, as into a TCP buffer
            await(fd, POLLERR);
            CHECK_ERR(send(fd, "x", 1, MSG_NOSIGNAL), EPIPE);
            OK(close(fd));
        }
        _exit(0);
    }
    for (int i = 0; i < CLIENTS * ROUNDS; i++)
        OK(close(accept_from(listener)));
    for (int i = 0; i < CLIENTS; i++)
        wait_child(clients[i]);
}

SERVER(eof_comes_after_all_data)
{
    pattern_recv(pattern_new(21), me->fd, 1 << 20, 5000);
    expect_eof(me->fd);
}
CLIENT(eof_comes_after_all_data)
{
    pattern_send(pattern_new(21), me->fd, 1 << 20, 7000);
}

SERVER(half_close_with_data_in_flight)
{
    meet(me); // all bytes are sent, and writing is shut down
    pattern_recv(pattern_new(22), me->fd, 100000, 3000);
    expect_eof(me->fd);
    pattern_send(pattern_new(23), me->fd, 200000, 9000);
}
CLIENT(half_close_with_data_in_flight)
{
    pattern_send(pattern_new(22), me->fd, 100000, 100000);
    OK(shutdown(me->fd, SHUT_WR));
    meet(me);
    pattern_recv(pattern_new(23), me->fd, 200000, 3000);
    expect_eof(me->fd);
}

// The connection becomes busy after one end has shut its direction down.
SERVER(the_end_of_a_half_closed_connection_repeats)
{
    enum { BYTES = 1000, ROUNDS = 400 };
    char bytes[BYTES];
    struct pattern *pattern = pattern_new(24);
    meet(me); // all bytes are sent, and writing is shut down
    for (int round = 0; round < ROUNDS; round++) {
        say(me->fd, "x");
        CHECK_EQ(recv(me->fd, bytes, 1, MSG_DONTWAIT), 1);
        pattern_check(pattern, round, bytes, 1);
    }
    CHECK_EQ(recv(me->fd, bytes, BYTES, MSG_DONTWAIT), BYTES - ROUNDS);
    pattern_check(pattern, ROUNDS, bytes, BYTES - ROUNDS);
    meet(me);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(recv(me->fd, bytes, 1, MSG_DONTWAIT | (i % 2 == 0 ? MSG_PEEK : 0)), 0);
    free(pattern);
    meet(me);
}
CLIENT(the_end_of_a_half_closed_connection_repeats)
{
    struct pattern *pattern = pattern_new(24);
    pattern_send(pattern, me->fd, 1000, 1000);
    OK(shutdown(me->fd, SHUT_WR));
    meet(me);
    for (int round = 0; round < 400; round++)
        expect(me->fd, "x");
    meet(me);
    CHECK_ERR(send(me->fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    free(pattern);
    meet(me);
}

TEST(send_after_shut_wr_is_epipe)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.client, SHUT_WR));
    CHECK_ERR(send(pair.client, "x", 1, MSG_NOSIGNAL), EPIPE);
    expect_eof(pair.server);
    say(pair.server, "still open");
    expect(pair.client, "still open");
}

TEST(shut_wr_wakes_a_blocked_reader)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        close(pair.client);
        expect_eof(pair.server);
        _exit(0);
    }
    pause_ms(SILENCE_MS);
    OK(shutdown(pair.client, SHUT_WR));
    wait_child(pid);
}

TEST(recv_after_shut_rd_is_eof)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.server, SHUT_RD));
    expect_eof(pair.server);
    say(pair.server, "out");
    expect(pair.client, "out");
}

TEST(shut_rd_keeps_what_had_arrived)
{
    struct pair pair = connected_pair();
    say(pair.client, "before");
    await(pair.server, POLLIN);
    OK(shutdown(pair.server, SHUT_RD));
    expect(pair.server, "before");
    expect_eof(pair.server);
}

static void *blocked_recv(void *argument)
{
    expect_eof(*(int *)argument);
    return NULL;
}

TEST(shut_rd_wakes_own_blocked_reader)
{
    struct pair pair = connected_pair();
    pthread_t thread = start_thread(blocked_recv, &pair.server);
    pause_ms(SILENCE_MS);
    OK(shutdown(pair.server, SHUT_RD));
    join_thread(thread);
}

TEST(shut_rdwr_ends_both_ways)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.client, SHUT_RDWR));
    expect_eof(pair.client);
    expect_eof(pair.server);
    CHECK_ERR(send(pair.client, "x", 1, MSG_NOSIGNAL), EPIPE);
}

TEST(both_halves_shut_is_a_full_close)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.client, SHUT_WR));
    OK(shutdown(pair.server, SHUT_WR));
    expect_eof(pair.client);
    expect_eof(pair.server);
    await_revents(pair.client, POLLIN, POLLIN | POLLHUP);
    await_revents(pair.server, POLLIN, POLLIN | POLLHUP);
}

TEST(shutdown_twice)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.client, SHUT_WR));
    OK(shutdown(pair.client, SHUT_WR));
    expect_eof(pair.server);
}

TEST(shutdown_errors)
{
    int fresh = OK(socket(AF_INET, SOCK_STREAM, 0));
    struct pair pair = connected_pair();
    CHECK_ERR(shutdown(fresh, SHUT_WR), ENOTCONN);
    CHECK_ERR(shutdown(pair.client, 7), EINVAL);
    CHECK_ERR(shutdown(-1, SHUT_WR), EBADF);
    ping_pong(pair.client, pair.server);
}

TEST(shutdown_after_peer_reset_is_enotconn)
{
    struct pair pair = connected_pair();
    reset_by_linger(pair.server);
    await_revents(pair.client, POLLIN, POLLHUP);
    char byte;
    CHECK_ERR(recv(pair.client, &byte, 1, 0), ECONNRESET);
    CHECK_ERR(shutdown(pair.client, SHUT_RDWR), ENOTCONN);
}

SERVER(close_with_unread_data_resets)
{
    await(me->fd, POLLIN);
    OK(close(me->fd));
    me->fd = -1;
    meet(me);
}
CLIENT(close_with_unread_data_resets)
{
    char byte;
    say(me->fd, "never read");
    meet(me);
    await_revents(me->fd, POLLIN, POLLIN | POLLERR | POLLHUP);
    CHECK_ERR(recv(me->fd, &byte, 1, 0), ECONNRESET);
    CHECK_EQ(recv(me->fd, &byte, 1, 0), 0); // an error is reported once
    CHECK_ERR(send(me->fd, "x", 1, MSG_NOSIGNAL), EPIPE);
}

SERVER(close_after_peeking_everything_resets)
{
    char byte;
    CHECK_EQ(recv(me->fd, &byte, 1, MSG_PEEK), 1);
    OK(close(me->fd));
    me->fd = -1;
}
CLIENT(close_after_peeking_everything_resets)
{
    char byte;
    say(me->fd, "p");
    CHECK_ERR(recv(me->fd, &byte, 1, 0), ECONNRESET);
}

SERVER(close_after_reading_everything_does_not_reset)
{
    expect(me->fd, "read");
    OK(close(me->fd));
    me->fd = -1;
}
CLIENT(close_after_reading_everything_does_not_reset)
{
    say(me->fd, "read");
    expect_eof(me->fd);
}

SERVER(linger_zero_resets)
{
    reset_by_linger(me->fd);
    me->fd = -1;
    meet(me);
}
CLIENT(linger_zero_resets)
{
    char byte;
    meet(me);
    CHECK_ERR(recv(me->fd, &byte, 1, 0), ECONNRESET);
}

SERVER(linger_zero_wakes_a_blocked_reader)
{
    pause_ms(SILENCE_MS);
    reset_by_linger(me->fd);
    me->fd = -1;
}
CLIENT(linger_zero_wakes_a_blocked_reader)
{
    char byte;
    CHECK_ERR(recv(me->fd, &byte, 1, 0), ECONNRESET);
}

SERVER(data_before_a_reset_can_be_read)
{
    say(me->fd, "last words");
    meet(me);
    reset_by_linger(me->fd);
    me->fd = -1;
    meet(me);
}
CLIENT(data_before_a_reset_can_be_read)
{
    char byte;
    await(me->fd, POLLIN);
    meet(me);
    meet(me);
    await_revents(me->fd, POLLIN, POLLHUP);
    expect(me->fd, "last words");
    CHECK_ERR(recv(me->fd, &byte, 1, 0), ECONNRESET);
}

TEST(reset_shows_in_so_error)
{
    struct pair pair = connected_pair();
    reset_by_linger(pair.server);
    await_revents(pair.client, POLLIN, POLLERR);
    int error = 0;
    socklen_t size = sizeof error;
    OK(getsockopt(pair.client, SOL_SOCKET, SO_ERROR, &error, &size));
    CHECK_EQ(error, ECONNRESET);
    expect_eof(pair.client);
}

TEST(linger_reads_back)
{
    struct pair pair = connected_pair();
    struct linger set = {.l_onoff = 1, .l_linger = 5}, got = {0};
    socklen_t size = sizeof got;
    OK(setsockopt(pair.client, SOL_SOCKET, SO_LINGER, &set, sizeof set));
    OK(getsockopt(pair.client, SOL_SOCKET, SO_LINGER, &got, &size));
    CHECK_EQ(got.l_onoff, 1);
    CHECK_EQ(got.l_linger, 5);
}

SERVER(linger_with_time_delivers)
{
    pattern_recv(pattern_new(24), me->fd, 500000, 10000);
    expect_eof(me->fd);
}
CLIENT(linger_with_time_delivers)
{
    struct linger soft = {.l_onoff = 1, .l_linger = 10};
    OK(setsockopt(me->fd, SOL_SOCKET, SO_LINGER, &soft, sizeof soft));
    pattern_send(pattern_new(24), me->fd, 500000, 50000);
}

SERVER(write_after_peer_closed)
{
    OK(close(me->fd));
    me->fd = -1;
    meet(me);
}
CLIENT(write_after_peer_closed)
{
    meet(me);
    await(me->fd, POLLIN);
    CHECK_EQ(send(me->fd, "into the void", 13, MSG_NOSIGNAL), 13);
    await_revents(me->fd, POLLOUT, POLLHUP);
    CHECK_ERR(send(me->fd, "x", 1, MSG_NOSIGNAL), EPIPE);
    CHECK_ERR(send(me->fd, "x", 1, MSG_NOSIGNAL), EPIPE);
}

static void close_and_break(struct pair *pair)
{
    OK(close(pair->server));
    await(pair->client, POLLIN);
    CHECK_EQ(send(pair->client, "x", 1, MSG_NOSIGNAL), 1);
    await_revents(pair->client, POLLOUT, POLLHUP);
}

TEST(write_to_a_broken_connection_raises_sigpipe)
{
    struct pair pair = connected_pair();
    on_signal(SIGPIPE, count_signal, 0);
    close_and_break(&pair);
    CHECK_ERR(write(pair.client, "x", 1), EPIPE);
    CHECK_EQ(signals_seen, 1);
    struct iovec piece = {"x", 1};
    CHECK_ERR(writev(pair.client, &piece, 1), EPIPE);
    CHECK_ERR(send(pair.client, "x", 1, 0), EPIPE);
    CHECK_EQ(signals_seen, 3);
}

TEST(nosignal_raises_nothing)
{
    struct pair pair = connected_pair();
    on_signal(SIGPIPE, count_signal, 0);
    close_and_break(&pair);
    struct iovec piece = {"x", 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    CHECK_ERR(send(pair.client, "x", 1, MSG_NOSIGNAL), EPIPE);
    CHECK_ERR(sendmsg(pair.client, &message, MSG_NOSIGNAL), EPIPE);
    CHECK_EQ(signals_seen, 0);
}

TEST(sigpipe_kills_by_default)
{
    struct pair pair = connected_pair();
    close_and_break(&pair);
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(write(pair.client, "x", 1));
        _exit(0);
    }
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGPIPE);
}

TEST(ignored_sigpipe_gives_epipe)
{
    struct pair pair = connected_pair();
    CHECK(signal(SIGPIPE, SIG_IGN) != SIG_ERR);
    close_and_break(&pair);
    CHECK_ERR(write(pair.client, "x", 1), EPIPE);
}

TEST(sigpipe_goes_to_the_writing_thread)
{
    struct pair pair = connected_pair();
    sigset_t pipe_only, pending;
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    OK(sigprocmask(SIG_BLOCK, &pipe_only, NULL));
    close_and_break(&pair);
    CHECK_ERR(write(pair.client, "x", 1), EPIPE);
    OK(sigpending(&pending));
    CHECK_EQ(sigismember(&pending, SIGPIPE), 1);
}

SERVER(blocked_writer_wakes_when_the_reader_closes)
{
    pause_ms(SILENCE_MS);
    OK(close(me->fd));
    me->fd = -1;
}
CLIENT(blocked_writer_wakes_when_the_reader_closes)
{
    static char block[1 << 20];
    ssize_t sent;
    do
        sent = send(me->fd, block, sizeof block, MSG_NOSIGNAL);
    while (sent > 0);
    CHECK_EQ(sent, -1);
    CHECK(errno == ECONNRESET || errno == EPIPE);
}

// TCP accepts only what it sends before the reset arrives.
static void send_much_to_a_closed_peer(int exchanges, int flags)
{
    enum { BYTES = 10 << 20 };
    struct pair pair = connected_pair();
    for (int i = 0; i < exchanges; i++)
        ping_pong(pair.client, pair.server);
    OK(close(pair.client));
    pause_ms(SILENCE_MS);
    char *bytes = calloc(1, BYTES);
    ssize_t sent = OK(send(pair.server, bytes, BYTES, MSG_NOSIGNAL | flags));
    CHECK(sent >= 32768 && sent <= 1 << 20);
    CHECK_EQ(send(pair.server, bytes, BYTES, MSG_NOSIGNAL | flags), -1);
    CHECK(errno == EPIPE || errno == ECONNRESET);
    free(bytes);
}

TEST(a_long_send_to_a_closed_peer_is_partial) { send_much_to_a_closed_peer(0, 0); }
TEST(a_long_send_to_a_closed_peer_is_partial_when_old) { send_much_to_a_closed_peer(100, 0); }
TEST(a_long_nonblocking_send_to_a_closed_peer_is_partial) { send_much_to_a_closed_peer(0, MSG_DONTWAIT); }
TEST(a_long_nonblocking_send_to_a_closed_peer_is_partial_when_old) { send_much_to_a_closed_peer(100, MSG_DONTWAIT); }

TEST(unread_answer_survives_own_write_to_closed_peer)
{
    // The peer answered, read everything and closed; a later write here must not lose the answer.
    struct pair pair = connected_pair();
    say(pair.server, "answer");
    OK(close(pair.server));
    await_revents(pair.client, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    expect(pair.client, "answer");
    expect_eof(pair.client);
    CHECK_EQ(send(pair.client, "late", 4, MSG_NOSIGNAL), 4);
}

TEST(close_range_closes_connections)
{
    struct pair pair = connected_pair();
    int high = OK(fcntl(pair.client, F_DUPFD, 400));
    OK(close(pair.client));
    OK(close_range(400, 450, 0));
    CHECK_ERR(fcntl(high, F_GETFD), EBADF);
    expect_eof(pair.server);
    int next = OK(fcntl(2, F_DUPFD, 400)); // the number is a file again
    CHECK_EQ(next, high);
    CHECK_ERR(send(next, "x", 1, 0), ENOTSOCK);
}

TEST(a_number_is_reused_for_another_connection)
{
    struct pair pair = connected_pair();
    struct address at = name_of(pair.listener);
    for (int i = 0; i < 50; i++) {
        int number = pair.client;
        say(pair.client, "unread so far");
        expect(pair.server, "unread so far");
        OK(close(pair.client));
        expect_eof(pair.server);
        OK(close(pair.server));
        CHECK_EQ(pair.client = dial(&at), number);
        pair.server = accept_from(pair.listener);
        ping_pong(pair.client, pair.server);
    }
}

TEST(a_number_is_reused_for_a_pipe)
{
    struct pair pair = connected_pair();
    int pipe_ends[2];
    say(pair.client, "left behind");
    OK(close(pair.server));
    OK(close(pair.client));
    OK(pipe(pipe_ends));
    CHECK(pipe_ends[0] == pair.client || pipe_ends[0] == pair.server);
    CHECK_EQ(write(pipe_ends[1], "pipe", 4), 4);
    char buffer[8];
    CHECK_EQ(read(pipe_ends[0], buffer, 8), 4);
    CHECK(memcmp(buffer, "pipe", 4) == 0);
    CHECK_ERR(recv(pipe_ends[0], buffer, 8, 0), ENOTSOCK);
}

// ---- both directions shut down ------------------------------------------------------------------

static int error_of(int fd)
{
    int error = -1;
    socklen_t size = sizeof error;
    OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
    return error;
}

// By one call and by two calls. Bytes that arrived before can be read, and a blocked wait is woken.
TEST(bytes_to_an_endpoint_shut_both_ways_reset_it)
{
    for (int run = 0; run < 4; run++) {
        struct pair pair = connected_pair();
        char bytes[8];
        for (int round = 0; round < 8; round++)
            ping_pong(pair.client, pair.server);
        int one = run % 2 ? pair.client : pair.server, other = run % 2 ? pair.server : pair.client;
        say(other, "early");
        await(one, POLLIN);
        if (run < 2) {
            OK(shutdown(one, SHUT_RDWR));
        } else {
            OK(shutdown(one, SHUT_RD));
            OK(shutdown(one, SHUT_WR));
        }
        int epoll = epoll_with(one, EPOLLET);
        CHECK_EQ(epoll_one(epoll).events, EPOLLHUP);
        CHECK_EQ(poll_once(other, POLLIN | POLLOUT | POLLRDHUP, 0), POLLIN | POLLOUT | POLLRDHUP);
        CHECK_EQ(error_of(other), 0);
        CHECK_EQ(OK(send(other, "late", 4, 0)), 4);
        CHECK_EQ(epoll_one(epoll).events, EPOLLHUP | EPOLLERR);
        CHECK_EQ(poll_once(other, POLLIN | POLLOUT, 0), POLLIN | POLLOUT | POLLERR | POLLHUP);
        CHECK_EQ(error_of(other), EPIPE);
        CHECK_ERR(send(other, "later", 5, MSG_NOSIGNAL), EPIPE);
        CHECK_EQ(recv(other, bytes, sizeof bytes, 0), 0);
        CHECK_EQ(error_of(one), ECONNRESET);
        CHECK_EQ(recv(one, bytes, sizeof bytes, 0), 5);
        CHECK_EQ(recv(one, bytes, sizeof bytes, 0), 0);
        close(epoll);
        close_pair(&pair);
    }
}

// A program cannot write without end to a peer that has stopped reading.
TEST(a_send_loop_to_an_endpoint_shut_both_ways_ends)
{
    struct pair pair = connected_pair();
    static char bytes[100000];
    for (int round = 0; round < 8; round++)
        ping_pong(pair.client, pair.server);
    OK(shutdown(pair.server, SHUT_RDWR));
    ssize_t went;
    while ((went = send(pair.client, bytes, sizeof bytes, MSG_NOSIGNAL)) > 0)
        continue;
    CHECK_EQ(went, -1);
    CHECK(errno == EPIPE || errno == ECONNRESET);
}

// Holds for each state of the exchange in which one endpoint leaves.
TEST(a_reset_is_reported_once_and_leaves_unread_bytes)
{
    for (int questions = 0; questions < 5; questions++) {
        struct pair pair = connected_pair();
        struct linger at_once = {.l_onoff = 1};
        char bytes[8];
        for (int i = 0; i < questions; i++) {
            say(pair.client, "?");
            expect(pair.server, "?");
            if (i + 1 < questions) {
                say(pair.server, "!");
                expect(pair.client, "!");
            }
        }
        say(pair.server, "unread");
        OK(setsockopt(pair.server, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once));
        OK(close(pair.server));
        await_revents(pair.client, POLLIN, POLLIN | POLLHUP | POLLERR);
        CHECK_ERR(send(pair.client, "late", 4, MSG_NOSIGNAL), ECONNRESET);
        CHECK_ERR(send(pair.client, "late", 4, MSG_NOSIGNAL), EPIPE);
        CHECK_EQ(recv(pair.client, bytes, sizeof bytes, 0), 6);
        CHECK_EQ(poll_once(pair.client, POLLIN, 0), POLLIN | POLLHUP);
        CHECK_EQ(error_of(pair.client), 0);
        CHECK_EQ(recv(pair.client, bytes, sizeof bytes, 0), 0);
        OK(close(pair.client));
        OK(close(pair.listener));
    }
}
