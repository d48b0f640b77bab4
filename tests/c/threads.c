// Threads that share sockets; cancellation.
#include "check.h"

struct job {
    int fd;
    uint64_t seed;
    uint64_t total;
    size_t chunk;
};

static void *send_job(void *argument)
{
    struct job *job = argument;
    pattern_send(pattern_new(job->seed), job->fd, job->total, job->chunk);
    return NULL;
}

static void full_duplex(struct endpoint *me, uint64_t out_seed, uint64_t in_seed)
{
    struct job job = {me->fd, out_seed, 20 << 20, 50000};
    pthread_t thread = start_thread(send_job, &job);
    pattern_recv(pattern_new(in_seed), me->fd, 20 << 20, 40000);
    join_thread(thread);
}

SERVER(reader_and_writer_thread_full_duplex) { full_duplex(me, 51, 52); }
CLIENT(reader_and_writer_thread_full_duplex) { full_duplex(me, 52, 51); }

enum { MESSAGES = 2000, MESSAGE_BYTES = 32 };

struct writer {
    int fd;
    char letter;
};

static void *write_messages(void *argument)
{
    struct writer *writer = argument;
    char message[MESSAGE_BYTES];
    memset(message, writer->letter, sizeof message);
    for (int i = 0; i < MESSAGES; i++)
        CHECK_EQ(send(writer->fd, message, sizeof message, 0), MESSAGE_BYTES);
    return NULL;
}

SERVER(writers_do_not_tear_small_messages)
{
    int seen[256] = {0};
    for (int i = 0; i < 3 * MESSAGES; i++) {
        char message[MESSAGE_BYTES], same[MESSAGE_BYTES];
        recv_exact(me->fd, message, sizeof message);
        memset(same, message[0], sizeof same);
        CHECK(memcmp(message, same, sizeof same) == 0);
        seen[(unsigned char)message[0]]++;
    }
    CHECK(seen['a'] == MESSAGES && seen['b'] == MESSAGES && seen['c'] == MESSAGES);
}
CLIENT(writers_do_not_tear_small_messages)
{
    struct writer writers[3] = {{me->fd, 'a'}, {me->fd, 'b'}, {OK(dup(me->fd)), 'c'}};
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        threads[i] = start_thread(write_messages, &writers[i]);
    for (int i = 0; i < 3; i++)
        join_thread(threads[i]);
}

enum { LARGE_BYTES = 8 << 20, TICKS = 4000, PIECE_BYTES = 2000 };

static void *write_large(void *argument)
{
    struct writer *writer = argument;
    static char large[LARGE_BYTES];
    memset(large, writer->letter, sizeof large);
    send_all(writer->fd, large, sizeof large);
    return NULL;
}

// Most of one large send is still to come while the connection becomes busy and other threads send.
SERVER(a_large_send_and_small_ones_share_a_stream)
{
    static char bytes[PIECE_BYTES];
    uint64_t seen[256] = {0}, all = 0, wanted = LARGE_BYTES + MESSAGES * MESSAGE_BYTES;
    for (int tick = 0; all < wanted; tick++) {
        if (tick < TICKS)
            send_all(me->fd, "t", 1);
        size_t got = OK(recv(me->fd, bytes, sizeof bytes, 0));
        CHECK(got > 0);
        for (size_t i = 0; i < got; i++)
            seen[(unsigned char)bytes[i]]++;
        all += got;
    }
    CHECK_EQ(seen['a'], LARGE_BYTES);
    CHECK_EQ(seen['b'], MESSAGES * MESSAGE_BYTES);
}
CLIENT(a_large_send_and_small_ones_share_a_stream)
{
    struct writer large = {me->fd, 'a'}, small = {me->fd, 'b'};
    pthread_t first = start_thread(write_large, &large), second = 0;
    for (int tick = 0; tick < TICKS; tick++) {
        char byte;
        recv_exact(me->fd, &byte, 1);
        if (tick == TICKS / 8)
            second = start_thread(write_messages, &small);
    }
    join_thread(first);
    join_thread(second);
}

struct reader {
    int fd;
    uint64_t bytes;
    uint64_t sum;
};

static void *read_words(void *argument)
{
    struct reader *reader = argument;
    unsigned char buffer[777];
    ssize_t got;
    while ((got = OK(recv(reader->fd, buffer, sizeof buffer, 0))) > 0) {
        reader->bytes += got;
        for (ssize_t i = 0; i < got; i++)
            reader->sum += buffer[i];
    }
    return NULL;
}

SERVER(readers_share_one_stream)
{
    struct reader readers[3] = {{me->fd, 0, 0}, {me->fd, 0, 0}, {OK(dup(me->fd)), 0, 0}};
    pthread_t threads[3];
    uint64_t bytes = 0, sum = 0, want = 0;
    for (int i = 0; i < 3; i++)
        threads[i] = start_thread(read_words, &readers[i]);
    for (int i = 0; i < 3; i++) {
        join_thread(threads[i]);
        bytes += readers[i].bytes;
        sum += readers[i].sum;
    }
    for (int i = 0; i < 1000000; i++)
        want += i % 251;
    CHECK_EQ(bytes, 1000000);
    CHECK_EQ(sum, want);
}
CLIENT(readers_share_one_stream)
{
    static unsigned char bytes[1000000];
    for (int i = 0; i < 1000000; i++)
        bytes[i] = i % 251;
    for (int i = 0; i < 1000000; i += 5000)
        send_all(me->fd, bytes + i, 5000);
}

static void *recv_late_answer(void *argument)
{
    expect(*(int *)argument, "late answer");
    return NULL;
}

TEST(close_of_one_copy_leaves_a_reader_of_the_other)
{
    struct pair pair = connected_pair();
    int copy = OK(dup(pair.server));
    pthread_t thread = start_thread(recv_late_answer, &copy);
    pause_ms(SILENCE_MS);
    OK(close(pair.server));
    pause_ms(SILENCE_MS);
    say(pair.client, "late answer");
    join_thread(thread);
    ping_pong(pair.client, copy);
}

// The kernel keeps a socket open while a thread is in a call on it; meanwhile the number may refer to another file.
static void close_under_a_reader(int exchanges)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < exchanges; i++)
        ping_pong(pair.client, pair.server);
    int number = pair.server, ends[2];
    pthread_t thread = start_thread(recv_late_answer, &number);
    pause_ms(SILENCE_MS);
    OK(close(number));
    OK(pipe(ends));
    CHECK(ends[0] == number || ends[1] == number);
    expect_silent(pair.client, POLLIN | POLLRDHUP);
    pause_ms(SILENCE_MS);
    say(pair.client, "late answer");
    join_thread(thread);
    expect_eof(pair.client);
    CHECK_EQ(write(ends[1], "a pipe", 6), 6);
    char text[8];
    CHECK_EQ(read(ends[0], text, sizeof text), 6);
}

// Another file takes the number at once, by `dup2`.
TEST(dup2_lets_a_blocked_recv_finish)
{
    struct pair pair = connected_pair(), other = connected_pair();
    int number = pair.server;
    pthread_t thread = start_thread(recv_late_answer, &number);
    pause_ms(SILENCE_MS);
    OK(dup2(other.server, number));
    expect_silent(pair.client, POLLIN | POLLRDHUP);
    ping_pong(other.client, number);
    say(pair.client, "late answer");
    join_thread(thread);
    expect_eof(pair.client);
    ping_pong(other.client, number);
}

TEST(close_range_lets_a_blocked_recv_finish)
{
    struct pair pair = connected_pair();
    int number = pair.server;
    pthread_t thread = start_thread(recv_late_answer, &number);
    pause_ms(SILENCE_MS);
    OK(close_range((unsigned)number, (unsigned)number, 0));
    expect_silent(pair.client, POLLIN | POLLRDHUP);
    say(pair.client, "late answer");
    join_thread(thread);
    expect_eof(pair.client);
}

static void *recv_many(void *argument)
{
    char bytes[50000];
    CHECK_EQ(recv(*(int *)argument, bytes, sizeof bytes, MSG_WAITALL), (ssize_t)sizeof bytes);
    return NULL;
}

TEST(a_blocked_recv_outlives_the_descriptor_for_as_long_as_it_needs)
{
    struct pair pair = connected_pair();
    int number = pair.server;
    pthread_t thread = start_thread(recv_many, &number);
    pause_ms(SILENCE_MS);
    OK(close(number));
    char bytes[10000] = {0};
    for (int i = 0; i < 5; i++) {
        CHECK_EQ(poll_once(pair.client, POLLRDHUP, 20), 0);
        CHECK_EQ(send(pair.client, bytes, sizeof bytes, MSG_NOSIGNAL), (ssize_t)sizeof bytes);
    }
    join_thread(thread);
    expect_eof(pair.client);
}

static void *recv_the_end(void *argument)
{
    char byte;
    CHECK_EQ(recv(*(int *)argument, &byte, 1, 0), 0);
    return NULL;
}

TEST(close_lets_a_blocked_recv_find_the_end)
{
    struct pair pair = connected_pair();
    int number = pair.server;
    pthread_t thread = start_thread(recv_the_end, &number);
    pause_ms(SILENCE_MS);
    OK(close(number));
    OK(close(pair.client));
    join_thread(thread);
}

TEST(a_child_does_not_hold_what_a_blocked_recv_of_its_parent_holds)
{
    struct pair pair = connected_pair();
    int number = pair.server, ends[2];
    pthread_t thread = start_thread(recv_late_answer, &number);
    pause_ms(SILENCE_MS);
    OK(close(number));
    OK(pipe(ends));
    pid_t pid = fork_child();
    if (pid == 0) {
        char byte;
        close(pair.client);
        close(ends[1]);
        _exit((int)read(ends[0], &byte, 1));
    }
    say(pair.client, "late answer");
    join_thread(thread);
    expect_eof(pair.client);
    OK(close(ends[1]));
    wait_child(pid);
}

static void *wait_in_epoll(void *argument)
{
    struct epoll_event event;
    CHECK_EQ(epoll_wait(*(int *)argument, &event, 1, 5 * SILENCE_MS), 0);
    return NULL;
}

TEST(a_closed_descriptor_leaves_the_epoll_that_a_thread_waits_on)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    pthread_t thread = start_thread(wait_in_epoll, &epoll);
    pause_ms(SILENCE_MS);
    OK(close(pair.server));
    expect_eof(pair.client);
    send(pair.client, "x", 1, MSG_NOSIGNAL);
    join_thread(thread);
}

TEST(close_lets_a_blocked_recv_finish) { close_under_a_reader(0); }
TEST(close_lets_a_blocked_recv_finish_when_old) { close_under_a_reader(100); }

static void *send_last(void *argument)
{
    CHECK_EQ(send(*(int *)argument, "last", 4, MSG_NOSIGNAL), 4);
    return NULL;
}

TEST(close_lets_a_blocked_send_finish)
{
    struct pair pair = connected_pair();
    size_t filled = fill_until_full(pair.server);
    int flags = OK(fcntl(pair.server, F_GETFL));
    OK(fcntl(pair.server, F_SETFL, flags & ~O_NONBLOCK));
    int number = pair.server;
    pthread_t thread = start_thread(send_last, &number);
    pause_ms(SILENCE_MS);
    OK(close(number));
    pause_ms(SILENCE_MS);
    size_t received = 0;
    char bytes[65536];
    for (ssize_t got; (got = OK(recv(pair.client, bytes, sizeof bytes, 0))) > 0;)
        received += got;
    CHECK_EQ(received, filled + 4);
    join_thread(thread);
}

TEST(send_works_while_another_thread_is_blocked_in_recv)
{
    struct pair pair = connected_pair();
    pthread_t thread = start_thread(recv_late_answer, &pair.client);
    pause_ms(SILENCE_MS);
    for (int i = 0; i < 100; i++) {
        say(pair.client, "request");
        expect(pair.server, "request");
    }
    say(pair.server, "late answer");
    join_thread(thread);
}

static void *poll_then_recv(void *argument)
{
    await(*(int *)argument, POLLIN);
    expect(*(int *)argument, "polled");
    return NULL;
}

TEST(send_works_while_another_thread_polls)
{
    struct pair pair = connected_pair();
    pthread_t thread = start_thread(poll_then_recv, &pair.client);
    pause_ms(SILENCE_MS);
    say(pair.client, "request");
    expect(pair.server, "request");
    say(pair.server, "polled");
    join_thread(thread);
}

static void *shut_later(void *argument)
{
    pause_ms(SILENCE_MS);
    OK(shutdown(*(int *)argument, SHUT_RDWR));
    return NULL;
}

TEST(shutdown_by_another_thread_wakes_recv_and_poll)
{
    struct pair one = connected_pair(), two = connected_pair();
    pthread_t first = start_thread(shut_later, &one.client);
    expect_eof(one.client);
    pthread_t second = start_thread(shut_later, &two.client);
    CHECK(poll_once(two.client, POLLIN, WAIT_MS_MAX) & POLLHUP);
    join_thread(first);
    join_thread(second);
}

TEST(shutdown_by_another_thread_wakes_a_blocked_send)
{
    struct pair pair = connected_pair();
    static char block[1 << 20];
    pthread_t thread = start_thread(shut_later, &pair.client);
    while (send(pair.client, block, sizeof block, MSG_NOSIGNAL) > 0)
        ;
    CHECK_EQ(errno, EPIPE);
    join_thread(thread);
}

struct acceptor {
    int listener;
    int count;
};

static void *accept_many(void *argument)
{
    struct acceptor *acceptor = argument;
    for (;;) {
        int fd = accept(acceptor->listener, NULL, NULL);
        if (fd < 0)
            return NULL; // the listener was shut down
        acceptor->count++;
        say(fd, "hello");
        OK(close(fd));
    }
}

TEST(threads_share_a_listener)
{
    struct address at;
    int listener = listen_anywhere(&at);
    struct acceptor acceptors[3] = {{listener, 0}, {listener, 0}, {listener, 0}};
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        threads[i] = start_thread(accept_many, &acceptors[i]);
    for (int i = 0; i < 60; i++) {
        int fd = dial(&at);
        expect(fd, "hello");
        expect_eof(fd);
        OK(close(fd));
    }
    OK(shutdown(listener, SHUT_RD));
    for (int i = 0; i < 3; i++)
        join_thread(threads[i]);
    CHECK_EQ(acceptors[0].count + acceptors[1].count + acceptors[2].count, 60);
}

static void *open_and_close(void *argument)
{
    const struct address *at = argument;
    for (int i = 0; i < 100; i++) {
        int fd = dial(at);
        expect(fd, "hello");
        OK(close(fd));
    }
    return NULL;
}

TEST(threads_open_and_close_at_once)
{
    struct address at;
    int listener = listen_anywhere(&at);
    struct acceptor acceptor = {listener, 0};
    pthread_t server = start_thread(accept_many, &acceptor), clients[4];
    for (int i = 0; i < 4; i++)
        clients[i] = start_thread(open_and_close, &at);
    for (int i = 0; i < 4; i++)
        join_thread(clients[i]);
    OK(shutdown(listener, SHUT_RD));
    join_thread(server);
    CHECK_EQ(acceptor.count, 400);
}

// ---- cancellation -------------------------------------------------------------------------------

static void cancel_and_join(pthread_t thread)
{
    void *result;
    pause_ms(SILENCE_MS);
    CHECK_EQ(pthread_cancel(thread), 0);
    CHECK_EQ(pthread_join(thread, &result), 0);
    CHECK(result == PTHREAD_CANCELED);
}

static void *block_in_recv(void *argument)
{
    char byte;
    recv(*(int *)argument, &byte, 1, 0);
    FAIL("recv returned");
}

static void *block_in_read(void *argument)
{
    char byte;
    CHECK_EQ(read(*(int *)argument, &byte, 1), 1);
    FAIL("read returned");
}

static void *block_in_send(void *argument)
{
    static char block[1 << 20];
    for (;;)
        CHECK(send(*(int *)argument, block, sizeof block, 0) > 0);
}

static void *block_in_accept(void *argument)
{
    accept(*(int *)argument, NULL, NULL);
    FAIL("accept returned");
}

static void *block_in_poll(void *argument)
{
    struct pollfd entry = {*(int *)argument, POLLIN, 0};
    poll(&entry, 1, -1);
    FAIL("poll returned");
}

static void *block_in_epoll(void *argument)
{
    struct epoll_event event;
    epoll_wait(epoll_with(*(int *)argument, EPOLLIN), &event, 1, -1);
    FAIL("epoll_wait returned");
}

TEST(cancel_in_recv_leaves_the_connection_usable)
{
    struct pair pair = connected_pair();
    cancel_and_join(start_thread(block_in_recv, &pair.server));
    ping_pong(pair.client, pair.server);
    cancel_and_join(start_thread(block_in_read, &pair.server));
    ping_pong(pair.client, pair.server);
}

TEST(close_after_a_cancelled_recv_ends_the_stream)
{
    struct pair pair = connected_pair();
    cancel_and_join(start_thread(block_in_recv, &pair.server));
    OK(close(pair.server));
    expect_eof(pair.client);
}

TEST(cancel_in_send_leaves_the_connection_usable)
{
    struct pair pair = connected_pair();
    cancel_and_join(start_thread(block_in_send, &pair.client));
    drain_until_empty(pair.server);
    ping_pong(pair.client, pair.server);
}

TEST(cancel_in_accept_leaves_the_listener_usable)
{
    struct address at;
    int listener = listen_anywhere(&at);
    cancel_and_join(start_thread(block_in_accept, &listener));
    greet(&at, listener);
}

TEST(cancel_in_poll_and_epoll_leaves_the_connection_usable)
{
    struct pair pair = connected_pair();
    cancel_and_join(start_thread(block_in_poll, &pair.server));
    cancel_and_join(start_thread(block_in_epoll, &pair.server));
    ping_pong(pair.client, pair.server);
}

static void *loop_on_ready_data(void *argument)
{
    char byte;
    for (;;)
        CHECK_EQ(recv(*(int *)argument, &byte, 1, MSG_PEEK), 1);
}

TEST(recv_with_data_is_a_cancellation_point)
{
    struct pair pair = connected_pair();
    say(pair.client, "x");
    await(pair.server, POLLIN);
    cancel_and_join(start_thread(loop_on_ready_data, &pair.server));
    expect(pair.server, "x");
    ping_pong(pair.client, pair.server);
}

static void *recv_with_cancel_off(void *argument)
{
    int old;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old);
    expect(*(int *)argument, "not cancelled");
    return NULL;
}

TEST(disabled_cancellation_waits)
{
    struct pair pair = connected_pair();
    void *result;
    pthread_t thread = start_thread(recv_with_cancel_off, &pair.server);
    pause_ms(SILENCE_MS);
    CHECK_EQ(pthread_cancel(thread), 0);
    pause_ms(SILENCE_MS);
    say(pair.client, "not cancelled");
    CHECK_EQ(pthread_join(thread, &result), 0);
    CHECK(result == NULL);
}

// ---- fork while other threads wait --------------------------------------------------------------

static volatile bool look_stop;

static void *poll_repeatedly(void *argument)
{
    struct epoll_event event;
    while (!look_stop)
        CHECK_EQ(epoll_wait(*(int *)argument, &event, 1, 0), 1);
    return NULL;
}

static void fork_while_polling(int epoll)
{
    enum { FORKS = 300 };
    pthread_t thread = start_thread(poll_repeatedly, &epoll);
    for (int i = 0; i < FORKS; i++) {
        pid_t pid = fork_child();
        if (pid == 0)
            _exit(0);
        wait_child(pid);
    }
    look_stop = true;
    join_thread(thread);
}

TEST(fork_while_a_thread_polls_a_listener_by_epoll)
{
    struct pair pair = connected_pair();
    struct address at = name_of(pair.listener);
    dial(&at); // never accepted
    fork_while_polling(epoll_with(pair.listener, EPOLLIN));
}

TEST(fork_while_a_thread_polls_nested_epolls)
{
    struct pair pair = connected_pair();
    int outer = OK(epoll_create1(0)); // older than the inner one
    int inner = epoll_with(pair.server, EPOLLIN);
    epoll_add(outer, inner, EPOLLIN, 1);
    say(pair.client, "x");
    await(pair.server, POLLIN);
    fork_while_polling(outer);
}

TEST(fork_while_a_thread_polls_an_epoll_in_an_older_one)
{
    struct pair pair = connected_pair();
    int inner = epoll_with(pair.server, EPOLLIN);
    int outer = epoll_with(inner, EPOLLIN);
    say(pair.client, "x");
    await(pair.server, POLLIN);
    fork_while_polling(outer);
}
