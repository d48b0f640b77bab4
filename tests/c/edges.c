// Rare arguments and rare interleavings: the corner cases of the manual pages.
#include "check.h"

#include <limits.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/time.h>

// ---- arguments ----------------------------------------------------------------------------------

TEST(too_many_pieces_of_a_message_are_emsgsize)
{
    struct pair pair = connected_pair();
    static char byte;
    static struct iovec pieces[IOV_MAX + 1];
    for (int i = 0; i <= IOV_MAX; i++)
        pieces[i] = (struct iovec){&byte, 1};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = IOV_MAX + 1};
    CHECK_ERR(sendmsg(pair.client, &message, 0), EMSGSIZE);
    CHECK_ERR(recvmsg(pair.server, &message, MSG_DONTWAIT), EMSGSIZE);
    struct mmsghdr many = {.msg_hdr = message};
    CHECK_ERR(sendmmsg(pair.client, &many, 1, 0), EMSGSIZE);
    message.msg_iovlen = IOV_MAX;
    CHECK_EQ(sendmsg(pair.client, &message, 0), IOV_MAX);
    CHECK_EQ(recvmsg(pair.server, &message, MSG_WAITALL), IOV_MAX);
}

TEST(pieces_at_null_are_efault)
{
    struct pair pair = connected_pair();
    struct msghdr message = {.msg_iovlen = 1};
    CHECK_ERR(sendmsg(pair.client, &message, 0), EFAULT);
    CHECK_ERR(recvmsg(pair.server, &message, MSG_DONTWAIT), EFAULT);
    CHECK_ERR(writev(pair.client, NULL, 1), EFAULT);
    ping_pong(pair.client, pair.server);
}

TEST(pieces_longer_than_ssize_max_are_einval)
{
    struct pair pair = connected_pair();
    static char byte;
    struct iovec pieces[] = {{&byte, 1}, {&byte, (size_t)SSIZE_MAX + 1}};
    CHECK_ERR(writev(pair.client, pieces, 2), EINVAL);
    CHECK_ERR(readv(pair.server, pieces, 2), EINVAL);
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    CHECK_ERR(sendmsg(pair.client, &message, 0), EINVAL);
    ping_pong(pair.client, pair.server);
}

TEST(recvmmsg_at_the_end_fills_every_message)
{
    struct pair pair = connected_pair();
    char bytes[3][4];
    struct iovec pieces[3];
    struct mmsghdr messages[3] = {0};
    for (int i = 0; i < 3; i++) {
        pieces[i] = (struct iovec){bytes[i], 4};
        messages[i].msg_hdr = (struct msghdr){.msg_iov = &pieces[i], .msg_iovlen = 1};
        messages[i].msg_len = 77;
    }
    say(pair.client, "end");
    OK(shutdown(pair.client, SHUT_WR));
    await(pair.server, POLLRDHUP);
    CHECK_EQ(recvmmsg(pair.server, messages, 3, 0, NULL), 3);
    CHECK_EQ(messages[0].msg_len, 3);
    CHECK_EQ(messages[1].msg_len, 0);
    CHECK_EQ(messages[2].msg_len, 0);
}

TEST(recvmmsg_checks_its_timeout_after_each_message)
{
    struct pair pair = connected_pair();
    char bytes[2];
    struct iovec pieces[] = {{bytes, 1}, {bytes + 1, 1}};
    struct mmsghdr messages[2] = {{.msg_hdr = {.msg_iov = pieces, .msg_iovlen = 1}},
                                  {.msg_hdr = {.msg_iov = pieces + 1, .msg_iovlen = 1}}};
    struct timespec limit = {0};
    say(pair.client, "x");
    CHECK_EQ(recvmmsg(pair.server, messages, 2, 0, &limit), 1);
    limit.tv_nsec = 2000000000;
    CHECK_ERR(recvmmsg(pair.server, messages, 2, 0, &limit), EINVAL);
}

// ---- flags --------------------------------------------------------------------------------------

TEST(peek_and_trunc_together_only_count)
{
    struct pair pair = connected_pair();
    char bytes[4] = "safe";
    say(pair.client, "counted");
    await(pair.server, POLLIN);
    CHECK_EQ(recv(pair.server, NULL, 100, MSG_PEEK | MSG_TRUNC), 7);
    CHECK_EQ(recv(pair.server, bytes, 4, MSG_PEEK | MSG_TRUNC), 4);
    CHECK(memcmp(bytes, "safe", 4) == 0);
    expect(pair.server, "counted");
}

SERVER(peek_with_waitall_waits_for_all)
{
    char bytes[6];
    CHECK_EQ(recv(me->fd, bytes, 6, MSG_PEEK | MSG_WAITALL), 6);
    CHECK(memcmp(bytes, "onetwo", 6) == 0);
    expect(me->fd, "onetwo");
    meet(me);
    CHECK_EQ(recv(me->fd, bytes, 6, MSG_PEEK | MSG_WAITALL), 3);
    expect(me->fd, "end");
}
CLIENT(peek_with_waitall_waits_for_all)
{
    say(me->fd, "one");
    pause_ms(20);
    say(me->fd, "two");
    meet(me);
    say(me->fd, "end");
    pause_ms(20);
    OK(shutdown(me->fd, SHUT_WR));
}

TEST(peek_with_waitall_keeps_its_timeout)
{
    struct pair pair = connected_pair();
    char bytes[6];
    struct timeval limit = {.tv_usec = 50000};
    OK(setsockopt(pair.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    say(pair.client, "part");
    CHECK_EQ(recv(pair.server, bytes, 6, MSG_PEEK | MSG_WAITALL), 4);
    expect(pair.server, "part");
}

SERVER(low_water_mark_keeps_recv_blocked)
{
    char bytes[16];
    int level = 6;
    OK(setsockopt(me->fd, SOL_SOCKET, SO_RCVLOWAT, &level, sizeof level));
    meet(me);
    CHECK_EQ(recv(me->fd, bytes, 6, 0), 6);
    meet(me);
    CHECK_EQ(recv(me->fd, bytes, 2, 0), 2); // the level is at most the size of the buffer
    CHECK_EQ(recv(me->fd, bytes, sizeof bytes, MSG_DONTWAIT), 1);
}
CLIENT(low_water_mark_keeps_recv_blocked)
{
    meet(me);
    say(me->fd, "abc");
    pause_ms(20);
    say(me->fd, "def");
    say(me->fd, "xyz"); // before the peer waits: the kernel wakes no waiter for less than the level
    meet(me);
}

TEST(an_empty_send_to_a_closed_peer_does_nothing)
{
    struct pair pair = connected_pair();
    OK(close(pair.server));
    await(pair.client, POLLRDHUP);
    CHECK_EQ(send(pair.client, "", 0, MSG_NOSIGNAL), 0);
    CHECK_EQ(send(pair.client, "", 0, MSG_NOSIGNAL), 0);
    CHECK_EQ(send(pair.client, "x", 1, MSG_NOSIGNAL), 1);
    await(pair.client, POLLERR);
    CHECK_ERR(send(pair.client, "x", 1, MSG_NOSIGNAL), EPIPE);
}

// ---- interleavings ------------------------------------------------------------------------------

static void *shut_writing_later(void *argument)
{
    pause_ms(SILENCE_MS);
    OK(shutdown(*(int *)argument, SHUT_WR));
    return NULL;
}

TEST(shutdown_of_writing_by_another_thread_wakes_a_blocked_send)
{
    struct pair pair = connected_pair();
    static char block[1 << 20];
    pthread_t thread = start_thread(shut_writing_later, &pair.client);
    while (send(pair.client, block, sizeof block, MSG_NOSIGNAL) > 0)
        ;
    CHECK_EQ(errno, EPIPE);
    join_thread(thread);
}

// Returns how often this process blocked while it waited for `want`: a few times if the wait sleeps until it is
// woken, some hundred times if it polls every millisecond.
static long blocks_while_expecting(int fd, const char *want)
{
    struct rusage before, after;
    OK(getrusage(RUSAGE_SELF, &before));
    expect(fd, want);
    OK(getrusage(RUSAGE_SELF, &after));
    return after.ru_nvcsw - before.ru_nvcsw;
}

enum { LONG_MS = 400, SLEEPS_MAX = 60 };

static struct pair nested_pair;

static void receive_in_handler(int signal)
{
    (void)signal;
    char byte;
    if (recv(nested_pair.server, &byte, 1, 0) != 1)
        _exit(4);
    signals_seen++;
}

TEST(interrupted_recv_stays_blocked_after_a_recv_in_the_handler)
{
    struct pair pair = connected_pair();
    nested_pair = connected_pair();
    on_signal(SIGUSR1, receive_in_handler, SA_RESTART);
    pid_t parent = getpid();
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.server));
        OK(close(nested_pair.server));
        pause_ms(SILENCE_MS);
        OK(kill(parent, SIGUSR1));
        pause_ms(SILENCE_MS);
        say(nested_pair.client, "n");
        pause_ms(SILENCE_MS);
        say(pair.client, "answer");
        pause_ms(LONG_MS);
        say(pair.client, "later");
        _exit(0);
    }
    OK(close(pair.client));
    OK(close(nested_pair.client));
    expect(pair.server, "answer");
    CHECK_EQ(signals_seen, 1);
    CHECK(blocks_while_expecting(pair.server, "later") < SLEEPS_MAX);
    wait_child(pid);
}

SERVER(waits_block_after_a_child_has_exited)
{
    pid_t pid = fork_child();
    if (pid == 0)
        _exit(0);
    wait_child(pid);
    meet(me);
    CHECK(blocks_while_expecting(me->fd, "later") < SLEEPS_MAX);
}
CLIENT(waits_block_after_a_child_has_exited)
{
    meet(me);
    pause_ms(LONG_MS);
    say(me->fd, "later");
}

TEST(sendfile_rejects_a_pipe)
{
    struct pair pair = connected_pair();
    int ends[2];
    OK(pipe(ends));
    CHECK_EQ(write(ends[1], "piped", 5), 5);
    off_t start = 0;
    CHECK_ERR(sendfile(pair.client, ends[0], NULL, 5), EINVAL);
    CHECK_ERR(sendfile(pair.client, ends[0], &start, 5), ESPIPE);
    ping_pong(pair.client, pair.server);
}

// Sends `count` descriptors over a pair of AF_UNIX sockets to a message with room for `room` bytes of control data.
static struct msghdr pass_descriptors(int carrier[2], const int *fds, int count, char *control, size_t room)
{
    static char byte;
    static struct iovec piece = {&byte, 1};
    _Alignas(struct cmsghdr) char out[CMSG_SPACE(8 * sizeof(int))] = {0};
    struct msghdr sent = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = out,
                          .msg_controllen = CMSG_SPACE(count * sizeof(int))};
    struct cmsghdr *header = CMSG_FIRSTHDR(&sent);
    *header = (struct cmsghdr){CMSG_LEN(count * sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    CHECK_EQ(sendmsg(carrier[0], &sent, 0), 1);
    struct msghdr got = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = room};
    CHECK_EQ(recvmsg(carrier[1], &got, 0), 1);
    return got;
}

TEST(descriptors_beyond_the_control_buffer_are_cut_off)
{
    struct pair pair = connected_pair();
    int carrier[2], ends[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, carrier));
    OK(pipe(ends));
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))];
    int fds[] = {ends[1], pair.client, ends[0]};
    for (int room = 1; room <= 3; room++) {
        struct msghdr got = pass_descriptors(carrier, fds, 3, control, CMSG_LEN(room * sizeof(int)));
        struct cmsghdr *header = CMSG_FIRSTHDR(&got);
        CHECK(header != NULL);
        CHECK_EQ(header->cmsg_len, CMSG_LEN(room * sizeof(int)));
        CHECK_EQ(got.msg_flags & MSG_CTRUNC, room < 3 ? MSG_CTRUNC : 0);
        int received[3];
        memcpy(received, CMSG_DATA(header), room * sizeof(int));
        for (int i = 0; i < room; i++)
            OK(close(received[i]));
    }
    ping_pong(pair.client, pair.server);
}

// ---- handlers that interrupt a call on the same connection ---------------------------------------

static struct pair busy_pair;

static void poll_in_handler(int signal)
{
    (void)signal;
    int saved = errno, error, unread;
    socklen_t size = sizeof error;
    struct pollfd entries[] = {{busy_pair.client, POLLIN | POLLOUT, 0}, {busy_pair.server, POLLIN | POLLOUT, 0}};
    if (poll(entries, 2, 0) < 0 || getsockopt(busy_pair.client, SOL_SOCKET, SO_ERROR, &error, &size) < 0 ||
        ioctl(busy_pair.server, FIONREAD, &unread) < 0)
        _exit(4);
    signals_seen++;
    errno = saved;
}

static void every_100_us(bool on)
{
    struct timeval time = {.tv_usec = on ? 100 : 0};
    struct itimerval timer = {time, time};
    OK(setitimer(ITIMER_REAL, &timer, NULL));
}

TEST(handlers_that_poll_a_busy_connection_return)
{
    static char block[4096];
    busy_pair = connected_pair();
    on_signal(SIGALRM, poll_in_handler, SA_RESTART);
    every_100_us(true);
    while (signals_seen < 2000) {
        CHECK_EQ(send(busy_pair.client, block, sizeof block, 0), (int)sizeof block);
        recv_exact(busy_pair.server, block, sizeof block);
    }
    every_100_us(false);
    ping_pong(busy_pair.client, busy_pair.server);
}

static volatile sig_atomic_t closes_instead;

static void end_in_handler(int signal)
{
    (void)signal;
    int saved = errno;
    if (closes_instead ? close(busy_pair.client) : shutdown(busy_pair.client, SHUT_RDWR))
        _exit(4);
    signals_seen++;
    errno = saved;
}

TEST(handlers_that_close_a_busy_connection_return)
{
    static char block[65536];
    on_signal(SIGALRM, end_in_handler, SA_RESTART);
    for (int round = 0; round < 200; round++) {
        busy_pair = connected_pair();
        signals_seen = 0;
        closes_instead = round % 2;
        struct itimerval timer = {.it_value.tv_usec = 20 + round};
        OK(setitimer(ITIMER_REAL, &timer, NULL));
        while (signals_seen == 0 && send(busy_pair.client, block, sizeof block, MSG_NOSIGNAL | MSG_DONTWAIT) != 0 &&
               recv(busy_pair.server, block, sizeof block, MSG_DONTWAIT) != 0)
            ;
        while (recv(busy_pair.server, block, sizeof block, 0) > 0) // the end follows the bytes that were sent
            ;
        if (!closes_instead)
            OK(close(busy_pair.client));
        OK(close(busy_pair.server));
        OK(close(busy_pair.listener));
    }
}

static void *read_to_the_end(void *argument)
{
    expect_eof(*(int *)argument);
    return NULL;
}

static void *read_later(void *argument)
{
    pause_ms(LONG_MS);
    drain_until_empty(*(int *)argument);
    return NULL;
}

TEST(a_blocked_send_sleeps_after_a_shutdown_of_reading_woke_a_reader)
{
    struct pair pair = connected_pair();
    static char block[1 << 16];
    pthread_t reader = start_thread(read_to_the_end, &pair.client);
    pause_ms(SILENCE_MS);
    OK(shutdown(pair.client, SHUT_RD));
    join_thread(reader);
    set_nonblocking(pair.client);
    fill_until_full(pair.client);
    OK(fcntl(pair.client, F_SETFL, 0));
    pthread_t drain = start_thread(read_later, &pair.server);
    struct rusage before, after;
    OK(getrusage(RUSAGE_THREAD, &before));
    CHECK(send(pair.client, block, sizeof block, 0) > 0);
    OK(getrusage(RUSAGE_THREAD, &after));
    long busy_us = (after.ru_utime.tv_sec + after.ru_stime.tv_sec - before.ru_utime.tv_sec - before.ru_stime.tv_sec) *
                       1000000L + after.ru_utime.tv_usec + after.ru_stime.tv_usec - before.ru_utime.tv_usec -
                   before.ru_stime.tv_usec;
    CHECK(busy_us < LONG_MS * 1000 / 4);
    join_thread(drain);
}

// ---- other names of the same calls ---------------------------------------------------------------

TEST(preadv2_and_pwritev2_without_a_position_are_readv_and_writev)
{
    struct pair pair = connected_pair();
    char bytes[8] = "placeles";
    struct iovec piece = {bytes, sizeof bytes};
    CHECK_EQ(pwritev2(pair.client, &piece, 1, -1, 0), 8);
    expect(pair.server, "placeles");
    say(pair.client, "answer");
    await(pair.server, POLLIN);
    CHECK_EQ(preadv2(pair.server, &piece, 1, -1, 0), 6);
    CHECK(memcmp(bytes, "answer", 6) == 0);
    CHECK_ERR(preadv2(pair.server, &piece, 1, -1, RWF_NOWAIT), EAGAIN);
    CHECK_ERR(preadv2(pair.server, &piece, 1, 0, 0), ESPIPE);
    CHECK_ERR(pwritev2(pair.server, &piece, 1, 0, 0), ESPIPE);
}

TEST(sockatmark_is_0_without_urgent_data)
{
    struct pair pair = connected_pair();
    CHECK_EQ(sockatmark(pair.server), 0);
    say(pair.client, "plain");
    await(pair.server, POLLIN);
    CHECK_EQ(sockatmark(pair.server), 0);
}

TEST(text_printed_before_dup2_goes_to_the_old_stdout)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        static char buffer[BUFSIZ];
        OK(setvbuf(stdout, buffer, _IOFBF, sizeof buffer));
        printf("before, ");
        OK(dup2(pair.client, STDOUT_FILENO));
        printf("after");
        fflush(stdout);
        _exit(0);
    }
    OK(close(pair.client));
    expect(pair.server, "before, after");
    wait_child(pid);
}

static void *ask_for_numbers(void *argument)
{
    FILE *file = argument;
    while (!signals_seen)
        CHECK(fileno(file) >= 0);
    return NULL;
}

TEST(fileno_works_in_the_child_of_a_fork_while_a_thread_asks_for_it_too)
{
    struct pair pair = connected_pair();
    FILE *file = fdopen(pair.client, "w");
    CHECK(file != NULL);
    pthread_t thread = start_thread(ask_for_numbers, file);
    for (int round = 0; round < 200; round++) {
        pid_t pid = fork_child();
        if (pid == 0) {
            alarm(5);
            CHECK_EQ(fileno(file), pair.client);
            _exit(0);
        }
        wait_child(pid);
    }
    signals_seen = 1;
    join_thread(thread);
}

#define SPANS 12
#define SPAN_BYTES 3072

// Receives as nginx does: into many spans, some times in a row, and not again before an edge once a receive was short.
// In the course of it the connection becomes busy.
static void receive_until_short(struct pair pair, char *buffer, uint64_t total)
{
    struct pattern *pattern = pattern_new(3);
    struct iovec spans[SPANS];
    for (int i = 0; i < SPANS; i++)
        spans[i] = (struct iovec){buffer + i * SPAN_BYTES, SPAN_BYTES};
    int epoll = OK(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLET};
    OK(epoll_ctl(epoll, EPOLL_CTL_ADD, pair.server, &event));
    set_nonblocking(pair.server);
    char *piece = buffer + SPANS * SPAN_BYTES;
    bool is_ready = false;
    for (uint64_t sent = 0, received = 0; received < total;) {
        ssize_t count = 0;
        for (int i = 0; i < 3 && count >= 0 && sent < total; i++) {
            size_t size = total - sent < 100000 ? total - sent : 100000;
            pattern_fill(pattern, sent, piece, size);
            count = send(pair.client, piece, size, MSG_DONTWAIT);
            sent += count > 0 ? count : 0;
        }
        if (!is_ready) {
            // The first wait sleeps, so that nothing is polled afterwards that has not asked for it.
            bool has_edge = epoll_wait(epoll, &event, 1, 1) > 0;
            if (!has_edge && sent == total && epoll_wait(epoll, &event, 1, WAIT_MS_MAX) == 0)
                FAIL("no edge after %llu bytes", (unsigned long long)received);
        }
        is_ready = true;
        for (int i = 0; is_ready && i < 3; i++) {
            count = readv(pair.server, spans, SPANS);
            is_ready = count == SPANS * SPAN_BYTES;
            if (count > 0)
                pattern_check(pattern, received, buffer, count);
            received += count > 0 ? count : 0;
        }
    }
    OK(close(epoll));
}

TEST(an_edge_follows_a_short_receive)
{
    char *buffer = malloc(200000);
    for (int rounds = 0; rounds < 8; rounds++) {
        for (uint64_t total = 30000; total < 4000000; total = total * 3 / 2) {
            struct pair pair = connected_pair();
            for (int i = 0; i < rounds; i++)
                ping_pong(pair.client, pair.server);
            receive_until_short(pair, buffer, total);
            OK(close(pair.client));
            OK(close(pair.server));
        }
    }
    free(buffer);
}
