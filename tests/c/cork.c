// TCP_CORK and MSG_MORE: bytes are held back until the program completes the message, a segment is full,
// the stream ends, or 200 ms have passed.
#include "check.h"

#include <linux/sockios.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <time.h>

// A poll later than this may find the bytes that were held back.
#define SOON_MS 150
// Bytes that are not held back arrive within this time, which includes the wait for an acknowledgement (40 ms).
#define AT_ONCE_MS 120
#define TRIES 20

static void set_cork(int fd, int value)
{
    OK(setsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, sizeof value));
}

static int asked(int fd, unsigned long request)
{
    int value = -1;
    OK(ioctl(fd, request, &value));
    return value;
}

// Fails if bytes sent since then are visible, unless the machine was too busy for the check to tell.
static void expect_held(int fd, int64_t since_ms)
{
    char byte;
    int ready = poll_once(fd, POLLIN, 0), unread = asked(fd, FIONREAD);
    ssize_t got = recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    int error = errno;
    if (now_ms() - since_ms > SOON_MS)
        return;
    CHECK_EQ(ready, 0);
    CHECK_EQ(unread, 0);
    CHECK_EQ(got, -1);
    CHECK_EQ(error, EAGAIN);
}

// Fails unless one receive returns the whole text.
static void expect_together(int fd, const char *text)
{
    char bytes[64];
    CHECK_EQ(poll_once(fd, POLLIN, AT_ONCE_MS), POLLIN);
    CHECK_EQ(recv(fd, bytes, sizeof bytes, 0), strlen(text));
    CHECK(memcmp(bytes, text, strlen(text)) == 0);
}

// Returns a connection that has carried this many questions and answers.
static struct pair pair_of_age(int questions)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < questions; i++)
        ping_pong(pair.client, pair.server);
    return pair;
}

#define FOR_EACH_AGE(pair)                                                                         \
    for (int age_ = 0; age_ < 2; age_++)                                                           \
        for (struct pair pair = pair_of_age(age_ * 4); pair.listener != -1;                        \
             close_pair(&pair), pair.listener = -1)

TEST(cork_holds_bytes_until_it_is_removed)
{
    FOR_EACH_AGE(pair)
    {
        set_cork(pair.client, 1);
        int64_t begin = now_ms();
        say(pair.client, "cor");
        expect_held(pair.server, begin);
        say(pair.client, "ked");
        expect_held(pair.server, begin);
        int held = asked(pair.client, SIOCOUTQNSD);
        if (now_ms() - begin <= SOON_MS)
            CHECK_EQ(held, 6);
        set_cork(pair.client, 0);
        expect_together(pair.server, "corked");
        CHECK_EQ(asked(pair.client, SIOCOUTQNSD), 0);
        say(pair.client, "free");
        expect_together(pair.server, "free");
    }
}

TEST(msg_more_holds_bytes_until_the_rest_is_sent)
{
    FOR_EACH_AGE(pair)
    {
        int64_t begin = now_ms();
        CHECK_EQ(send(pair.client, "head", 4, MSG_MORE), 4);
        CHECK_EQ(send(pair.client, "er+", 3, MSG_MORE), 3);
        expect_held(pair.server, begin);
        say(pair.client, "body");
        expect_together(pair.server, "header+body");
        say(pair.client, "next");
        expect_together(pair.server, "next");
    }
}

TEST(held_bytes_arrive_after_200_ms_for_each_kind_of_wait)
{
    for (int how = 0; how < 5; how++) {
        FOR_EACH_AGE(pair)
        {
            char byte;
            set_cork(pair.client, 1);
            int64_t begin = now_ms();
            say(pair.client, "late");
            int epoll = epoll_with(pair.server, EPOLLIN);
            fd_set set;
            FD_ZERO(&set);
            FD_SET(pair.server, &set);
            if (how == 0)
                CHECK_EQ(recv(pair.server, &byte, 1, MSG_PEEK), 1);
            if (how == 1)
                CHECK_EQ(poll_once(pair.server, POLLIN, WAIT_MS_MAX), POLLIN);
            if (how == 2)
                CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
            if (how == 3)
                CHECK_EQ(select(pair.server + 1, &set, NULL, NULL, NULL), 1);
            while (how == 4 && recv(pair.server, &byte, 1, MSG_DONTWAIT | MSG_PEEK) == -1)
                pause_ms(1);
            CHECK(now_ms() - begin >= SOON_MS);
            expect_together(pair.server, "late");
            OK(close(epoll));
        }
    }
}

// Holds for an epoll instance that is registered with another one, and for one that is polled.
TEST(held_bytes_are_reported_to_nested_epolls)
{
    FOR_EACH_AGE(pair)
    {
        int inner = epoll_with(pair.server, EPOLLIN), outer = epoll_with(inner, EPOLLIN);
        set_cork(pair.client, 1);
        say(pair.client, "late");
        CHECK_EQ(epoll_one(outer).events, EPOLLIN);
        CHECK_EQ(poll_once(inner, POLLIN, WAIT_MS_MAX), POLLIN);
        expect(pair.server, "late");
        OK(close(inner));
        OK(close(outer));
    }
}

TEST(held_bytes_arrive_with_the_end)
{
    for (int closes = 0; closes < 2; closes++) {
        FOR_EACH_AGE(pair)
        {
            set_cork(pair.client, 1);
            int64_t begin = now_ms();
            say(pair.client, "last");
            expect_held(pair.server, begin);
            OK(closes ? close(pair.client) : shutdown(pair.client, SHUT_WR));
            expect_together(pair.server, "last");
            expect_eof(pair.server);
            if (closes)
                pair.client = OK(socket(AF_INET, SOCK_STREAM, 0));
        }
    }
}

TEST(held_bytes_survive_a_killed_sender)
{
    FOR_EACH_AGE(pair)
    {
        pid_t pid = fork_child();
        if (pid == 0) {
            set_cork(pair.client, 1);
            say(pair.client, "last words");
            OK(send(pair.client, "!", 1, MSG_MORE));
            raise(SIGKILL);
        }
        OK(close(pair.client));
        CHECK_EQ(waitpid(pid, NULL, 0), pid);
        expect_together(pair.server, "last words!");
        expect_eof(pair.server);
        pair.client = OK(socket(AF_INET, SOCK_STREAM, 0));
    }
}

TEST(a_cork_is_shared_by_all_holders_of_the_connection)
{
    FOR_EACH_AGE(pair)
    {
        set_cork(pair.client, 1);
        say(pair.client, "corked");
        pid_t pid = fork_child();
        if (pid == 0) {
            set_cork(pair.client, 0);
            _exit(0);
        }
        wait_child(pid);
        expect_together(pair.server, "corked");
        say(pair.client, "free");
        expect_together(pair.server, "free");
    }
}

TEST(a_full_segment_is_not_held)
{
    FOR_EACH_AGE(pair)
    {
        static char bytes[70000];
        set_cork(pair.client, 1);
        send_all(pair.client, bytes, sizeof bytes / 2);
        send_all(pair.client, bytes, sizeof bytes / 2);
        CHECK_EQ(poll_once(pair.server, POLLIN, AT_ONCE_MS), POLLIN);
        CHECK(asked(pair.server, FIONREAD) > 30000);
        set_cork(pair.client, 0);
        recv_exact(pair.server, bytes, sizeof bytes);
    }
}

TEST(nodelay_flushes_held_bytes_and_keeps_the_cork)
{
    FOR_EACH_AGE(pair)
    {
        int yes = 1;
        OK(setsockopt(pair.client, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes));
        set_cork(pair.client, 1);
        int64_t begin = now_ms();
        say(pair.client, "first");
        expect_held(pair.server, begin);
        OK(setsockopt(pair.client, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes));
        expect_together(pair.server, "first");
        begin = now_ms();
        say(pair.client, "second");
        expect_held(pair.server, begin);
        expect(pair.server, "second");
    }
}

// A receiver that is already blocked returns only when all bytes have arrived.
static void *receive_once(void *argument)
{
    char bytes[64];
    ssize_t got = recv(*(int *)argument, bytes, sizeof bytes, 0);
    return (void *)got;
}

static ssize_t received_by_sleeper(struct pair *pair)
{
    void *got;
    pthread_t thread = start_thread(receive_once, &pair->server);
    pause_ms(20);
    set_cork(pair->client, 1);
    say(pair->client, "head");
    pause_ms(20);
    say(pair->client, "body");
    set_cork(pair->client, 0);
    CHECK_EQ(pthread_join(thread, &got), 0);
    return (ssize_t)got;
}

TEST(a_blocked_receiver_gets_held_bytes_together)
{
    FOR_EACH_AGE(pair)
    {
        int tries = 0;
        while (received_by_sleeper(&pair) != 8) {
            // A thread may have been scheduled only after 200 ms, but not each time.
            CHECK(++tries < TRIES);
            recv_exact(pair.server, (char[4]){0}, 4);
        }
    }
}

TEST(a_file_is_held_behind_its_header)
{
    FOR_EACH_AGE(pair)
    {
        FILE *file = tmpfile();
        CHECK(file != NULL && fputs("contents", file) >= 0 && fflush(file) == 0);
        off_t start = 0;
        set_cork(pair.client, 1);
        int64_t begin = now_ms();
        say(pair.client, "header,");
        CHECK_EQ(sendfile(pair.client, fileno(file), &start, 100), 8);
        expect_held(pair.server, begin);
        set_cork(pair.client, 0);
        expect_together(pair.server, "header,contents");
        fclose(file);
    }
}

// Any non-zero value corks, and the option may be set before connect.
TEST(a_cork_set_before_connect_is_kept)
{
    struct address at;
    int listener = listen_anywhere(&at), fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    set_cork(fd, 7);
    OK(connect(fd, ADDRESS(&at), at.size));
    int server = accept_from(listener), value = -1;
    socklen_t size = sizeof value;
    OK(getsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, &size));
    CHECK_EQ(value, 1);
    int64_t begin = now_ms();
    say(fd, "early");
    expect_held(server, begin);
    set_cork(fd, 0);
    expect_together(server, "early");
    CHECK_ERR(setsockopt(fd, IPPROTO_TCP, TCP_CORK, &value, 1), EINVAL);
}

// More single bytes than any ring has slots for.
TEST(single_bytes_are_held_in_order)
{
    FOR_EACH_AGE(pair)
    {
        struct pattern *pattern = pattern_new(7);
        set_cork(pair.client, 1);
        pattern_send(pattern, pair.client, 20000, 1);
        set_cork(pair.client, 0);
        pattern_recv(pattern, pair.server, 20000, 4096);
    }
}
