// Control messages received with the bytes of a connection: TCP_INQ and time stamps.
#include "check.h"

#include <linux/net_tstamp.h>
#include <time.h>

#define SO_TIMESTAMP_OF_64_BITS 63

struct received {
    ssize_t size;
    struct msghdr message;
    char bytes[64];
    _Alignas(struct cmsghdr) char control[256];
};

static struct received *receive(int fd, size_t size, size_t room, int flags)
{
    static struct received got;
    got = (struct received){0};
    struct iovec span = {got.bytes, size};
    got.message = (struct msghdr){
        .msg_iov = &span, .msg_iovlen = 1, .msg_control = got.control, .msg_controllen = room};
    got.size = OK(recvmsg(fd, &got.message, flags));
    return &got;
}

static const struct cmsghdr *control_of(struct received *got, int level, int type)
{
    for (struct cmsghdr *header = CMSG_FIRSTHDR(&got->message); header; header = CMSG_NXTHDR(&got->message, header))
        if (header->cmsg_level == level && header->cmsg_type == type)
            return header;
    return NULL;
}

static void set_option(int fd, int level, int name, int value)
{
    OK(setsockopt(fd, level, name, &value, sizeof value));
    int got = -1;
    socklen_t size = sizeof got;
    OK(getsockopt(fd, level, name, &got, &size));
    CHECK_EQ(got, value);
}

static void expect_unread(int fd, size_t size, int flags, int unread)
{
    struct received *got = receive(fd, size, sizeof got->control, flags);
    const struct cmsghdr *header = control_of(got, IPPROTO_TCP, TCP_CM_INQ);
    CHECK(header && header->cmsg_len == CMSG_LEN(sizeof(int)));
    CHECK_EQ(*(const int *)CMSG_DATA(header), unread);
    CHECK_EQ(got->message.msg_controllen, CMSG_SPACE(sizeof(int)));
    CHECK_EQ(got->message.msg_flags, 0);
}

static struct pair pair_of_age(int is_old)
{
    struct pair pair = connected_pair();
    for (int round = 0; is_old && round < 10; round++)
        ping_pong(pair.client, pair.server);
    return pair;
}

TEST(inq_reports_the_unread_bytes)
{
    for (int is_old = 0; is_old < 2; is_old++) {
        struct pair pair = pair_of_age(is_old);
        CHECK_ERR(setsockopt(pair.server, IPPROTO_TCP, TCP_INQ, &(int){2}, sizeof(int)), EINVAL);
        say(pair.client, "hello world");
        await(pair.server, POLLIN);
        struct received *got = receive(pair.server, 1, 100, 0);
        CHECK_EQ(got->message.msg_controllen, 0);
        set_option(pair.server, IPPROTO_TCP, TCP_INQ, 1);
        expect_unread(pair.server, 3, 0, 7);
        expect_unread(pair.server, 3, MSG_PEEK, 7);
        got = receive(pair.server, 1, 4, 0);
        CHECK_EQ(got->message.msg_controllen, 0);
        CHECK_EQ(got->message.msg_flags, MSG_CTRUNC);
        OK(shutdown(pair.client, SHUT_WR));
        await(pair.server, POLLRDHUP);
        expect_unread(pair.server, 2, 0, 5); // the end of the stream counts as one byte
        expect_unread(pair.server, 60, 0, 1);
        expect_unread(pair.server, 60, 0, 1);
        set_option(pair.server, IPPROTO_TCP, TCP_INQ, 0);
        got = receive(pair.server, 60, 100, 0);
        CHECK_EQ(got->message.msg_controllen, 0);
    }
}

TEST(inq_is_inherited_by_accepted_connections)
{
    struct address bound;
    int listener = listen_anywhere(&bound);
    set_option(listener, IPPROTO_TCP, TCP_INQ, 1);
    int client = dial(&bound), server = accept_from(listener);
    say(client, "abcd");
    await(server, POLLIN);
    expect_unread(server, 1, 0, 3);
}

// Returns the seconds since the time stamp of a message, whose second word counts `units` a second.
static double age_of(const struct cmsghdr *header, double units)
{
    const int64_t *words = (const int64_t *)CMSG_DATA(header);
    struct timespec now;
    OK(clock_gettime(CLOCK_REALTIME, &now));
    return (double)(now.tv_sec - words[0]) + (double)now.tv_nsec / 1e9 - (double)words[1] / units;
}

static void expect_time_stamp(struct pair *pair, int name, size_t size, double units)
{
    pause_ms(SILENCE_MS); // the kernel enables time stamps with a delay
    say(pair->client, "x");
    await(pair->server, POLLIN);
    struct received *got = receive(pair->server, 1, sizeof got->control, 0);
    const struct cmsghdr *header = control_of(got, SOL_SOCKET, name);
    CHECK(header && header->cmsg_len == CMSG_LEN(size));
    double age = age_of(header, units);
    CHECK(age >= 0 && age < WAIT_MS_MAX / 1000.0);
    CHECK_EQ(got->message.msg_controllen, CMSG_SPACE(size));
}

TEST(time_stamps_come_with_the_bytes)
{
    for (int is_old = 0; is_old < 2; is_old++) {
        struct pair pair = pair_of_age(is_old);
        set_option(pair.server, SOL_SOCKET, SO_TIMESTAMP, 1);
        expect_time_stamp(&pair, SCM_TIMESTAMP, 16, 1e6);
        set_option(pair.server, SOL_SOCKET, SO_TIMESTAMPNS, 1);
        expect_time_stamp(&pair, SCM_TIMESTAMPNS, 16, 1e9);
        set_option(pair.server, SOL_SOCKET, SO_TIMESTAMP_OF_64_BITS, 1);
        expect_time_stamp(&pair, SO_TIMESTAMP_OF_64_BITS, 16, 1e6);
        set_option(pair.server, SOL_SOCKET, SO_TIMESTAMP_OF_64_BITS, 0);
        set_option(pair.server, SOL_SOCKET, SO_TIMESTAMPING, SOF_TIMESTAMPING_SOFTWARE | SOF_TIMESTAMPING_RX_SOFTWARE);
        expect_time_stamp(&pair, SCM_TIMESTAMPING, 48, 1e9);
        set_option(pair.server, SOL_SOCKET, SO_TIMESTAMPING, 0);
        say(pair.client, "x");
        struct received *got = receive(pair.server, 1, sizeof got->control, 0);
        CHECK_EQ(got->message.msg_controllen, 0);
        OK(shutdown(pair.client, SHUT_WR));
        set_option(pair.server, SOL_SOCKET, SO_TIMESTAMP, 1);
        got = receive(pair.server, 1, sizeof got->control, 0);
        CHECK_EQ(got->size, 0);
        CHECK_EQ(got->message.msg_controllen, 0);
    }
}
