// Socket options, ioctl, fcntl; errno after wrong use; descriptors that are not TCP.
#include "check.h"

#include <linux/sockios.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>

static int option(int fd, int level, int name)
{
    int value = -12345;
    socklen_t size = sizeof value;
    OK(getsockopt(fd, level, name, &value, &size));
    CHECK_EQ(size, sizeof value);
    return value;
}

static void set_option(int fd, int level, int name, int value)
{
    OK(setsockopt(fd, level, name, &value, sizeof value));
}

TEST(so_type_domain_protocol)
{
    struct pair pair = connected_pair();
    int fds[] = {pair.client, pair.server, pair.listener};
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(option(fds[i], SOL_SOCKET, SO_TYPE), SOCK_STREAM);
        CHECK_EQ(option(fds[i], SOL_SOCKET, SO_DOMAIN), AF_INET);
        CHECK_EQ(option(fds[i], SOL_SOCKET, SO_PROTOCOL), IPPROTO_TCP);
        CHECK_EQ(option(fds[i], SOL_SOCKET, SO_ERROR), 0);
    }
}

TEST(so_domain_ip6)
{
    require_ip6();
    struct address any = ip6("::1", 0);
    struct pair pair = connected_pair_at(&any);
    CHECK_EQ(option(pair.client, SOL_SOCKET, SO_DOMAIN), AF_INET6);
    CHECK_EQ(option(pair.server, SOL_SOCKET, SO_DOMAIN), AF_INET6);
}

TEST(so_acceptconn)
{
    struct pair pair = connected_pair();
    CHECK_EQ(option(pair.listener, SOL_SOCKET, SO_ACCEPTCONN), 1);
    CHECK_EQ(option(pair.client, SOL_SOCKET, SO_ACCEPTCONN), 0);
    CHECK_EQ(option(pair.server, SOL_SOCKET, SO_ACCEPTCONN), 0);
}

TEST(tcp_nodelay_reads_back)
{
    struct pair pair = connected_pair();
    CHECK_EQ(option(pair.client, IPPROTO_TCP, TCP_NODELAY), 0);
    set_option(pair.client, IPPROTO_TCP, TCP_NODELAY, 1);
    CHECK(option(pair.client, IPPROTO_TCP, TCP_NODELAY) != 0);
    set_option(pair.client, IPPROTO_TCP, TCP_NODELAY, 0);
    CHECK_EQ(option(pair.client, IPPROTO_TCP, TCP_NODELAY), 0);
    ping_pong(pair.client, pair.server);
}

TEST(options_set_before_connect_stay)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    OK(connect(fd, ADDRESS(&at), at.size));
    CHECK(option(fd, IPPROTO_TCP, TCP_NODELAY) != 0);
    CHECK(option(fd, SOL_SOCKET, SO_KEEPALIVE) != 0);
    ping_pong(fd, accept_from(listener));
}

TEST(options_of_a_listener_are_inherited)
{
    struct address at;
    int listener = listen_anywhere(&at);
    set_option(listener, IPPROTO_TCP, TCP_NODELAY, 1);
    set_option(listener, SOL_SOCKET, SO_KEEPALIVE, 1);
    dial(&at);
    int server = accept_from(listener);
    CHECK(option(server, IPPROTO_TCP, TCP_NODELAY) != 0);
    CHECK(option(server, SOL_SOCKET, SO_KEEPALIVE) != 0);
}

TEST(keepalive_options_read_back)
{
    struct pair pair = connected_pair();
    set_option(pair.client, SOL_SOCKET, SO_KEEPALIVE, 1);
    set_option(pair.client, IPPROTO_TCP, TCP_KEEPIDLE, 61);
    set_option(pair.client, IPPROTO_TCP, TCP_KEEPINTVL, 7);
    set_option(pair.client, IPPROTO_TCP, TCP_KEEPCNT, 5);
    set_option(pair.client, IPPROTO_TCP, TCP_USER_TIMEOUT, 12000);
    CHECK_EQ(option(pair.client, SOL_SOCKET, SO_KEEPALIVE), 1);
    CHECK_EQ(option(pair.client, IPPROTO_TCP, TCP_KEEPIDLE), 61);
    CHECK_EQ(option(pair.client, IPPROTO_TCP, TCP_KEEPINTVL), 7);
    CHECK_EQ(option(pair.client, IPPROTO_TCP, TCP_KEEPCNT), 5);
    CHECK_EQ(option(pair.client, IPPROTO_TCP, TCP_USER_TIMEOUT), 12000);
}

TEST(other_tcp_options_are_accepted)
{
    struct pair pair = connected_pair();
    set_option(pair.client, IPPROTO_TCP, TCP_QUICKACK, 1);
    set_option(pair.client, IPPROTO_IP, IP_TOS, 0x10);
    CHECK_EQ(option(pair.client, IPPROTO_IP, IP_TOS), 0x10);
    set_option(pair.listener, IPPROTO_TCP, TCP_DEFER_ACCEPT, 1);
    CHECK(option(pair.client, IPPROTO_TCP, TCP_MAXSEG) > 0);
    char name[32] = {0};
    socklen_t size = sizeof name;
    OK(getsockopt(pair.client, IPPROTO_TCP, TCP_CONGESTION, name, &size));
    CHECK(name[0] != 0);
    ping_pong(pair.client, pair.server);
}

static int tcp_state(int fd)
{
    struct tcp_info tcp = {0};
    socklen_t size = sizeof tcp;
    OK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &tcp, &size));
    CHECK(size >= offsetof(struct tcp_info, tcpi_total_retrans));
    return tcp.tcpi_state;
}

TEST(tcp_info_reports_the_state)
{
    struct pair pair = connected_pair();
    CHECK_EQ(tcp_state(pair.client), TCP_ESTABLISHED);
    CHECK_EQ(tcp_state(pair.server), TCP_ESTABLISHED);
    CHECK_EQ(tcp_state(pair.listener), TCP_LISTEN);
    CHECK_EQ(tcp_state(OK(socket(AF_INET, SOCK_STREAM, 0))), TCP_CLOSE);
    OK(shutdown(pair.client, SHUT_WR));
    await_revents(pair.server, POLLRDHUP, POLLRDHUP);
    CHECK_EQ(tcp_state(pair.server), TCP_CLOSE_WAIT);
}

// A counter of Linux's `struct tcp_info`; libc's declaration ends before it.
static uint64_t tcp_counter(int fd, size_t offset)
{
    unsigned char bytes[192];
    socklen_t size = sizeof bytes;
    OK(getsockopt(fd, IPPROTO_TCP, TCP_INFO, bytes, &size));
    CHECK_EQ(size, sizeof bytes);
    uint64_t counter;
    memcpy(&counter, bytes + offset, sizeof counter);
    return counter;
}

TEST(tcp_info_counts_the_bytes)
{
    const size_t bytes_acked = 120, bytes_received = 128;
    struct pair pair = connected_pair();
    char bytes[1000] = {0};
    // Other exchanges may have come before, and the last acknowledgement may be under way.
    pause_ms(SILENCE_MS);
    uint64_t acked = tcp_counter(pair.client, bytes_acked), received = tcp_counter(pair.server, bytes_received);
    send_all(pair.client, bytes, sizeof bytes);
    recv_exact(pair.server, bytes, sizeof bytes);
    CHECK_EQ(tcp_counter(pair.server, bytes_received) - received, 1000);
    for (int i = 0; tcp_counter(pair.client, bytes_acked) - acked < 1000; i++) {
        CHECK(i < WAIT_MS_MAX);
        pause_ms(1);
    }
    CHECK(tcp_counter(pair.client, bytes_acked) - acked <= 1001); // the SYN counts
}

TEST(buffer_sizes_read_back_doubled)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    struct pair pair = connected_pair();
    int fds[] = {fd, pair.client, pair.server};
    for (int i = 0; i < 3; i++) {
        CHECK(option(fds[i], SOL_SOCKET, SO_RCVBUF) > 0);
        CHECK(option(fds[i], SOL_SOCKET, SO_SNDBUF) > 0);
        set_option(fds[i], SOL_SOCKET, SO_RCVBUF, 50000);
        set_option(fds[i], SOL_SOCKET, SO_SNDBUF, 40000);
        CHECK_EQ(option(fds[i], SOL_SOCKET, SO_RCVBUF), 100000);
        CHECK_EQ(option(fds[i], SOL_SOCKET, SO_SNDBUF), 80000);
    }
    ping_pong(pair.client, pair.server);
}

TEST(flags_of_addresses_read_back)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_EQ(option(fd, SOL_SOCKET, SO_REUSEADDR), 0);
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    set_option(fd, SOL_SOCKET, SO_REUSEPORT, 1);
    CHECK_EQ(option(fd, SOL_SOCKET, SO_REUSEADDR), 1);
    CHECK_EQ(option(fd, SOL_SOCKET, SO_REUSEPORT), 1);
}

static void check_timeout(int fd, int name, long milliseconds)
{
    struct timeval got = {-1, -1};
    socklen_t size = sizeof got;
    OK(getsockopt(fd, SOL_SOCKET, name, &got, &size));
    long got_ms = got.tv_sec * 1000 + got.tv_usec / 1000;
    CHECK(got_ms >= milliseconds && got_ms <= milliseconds + 20); // the kernel counts in jiffies
}

TEST(time_outs_read_back)
{
    struct pair pair = connected_pair();
    struct timeval limit = {2, 340000};
    check_timeout(pair.client, SO_RCVTIMEO, 0);
    OK(setsockopt(pair.client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    OK(setsockopt(pair.client, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
    check_timeout(pair.client, SO_RCVTIMEO, 2340);
    check_timeout(pair.client, SO_SNDTIMEO, 2340);
    struct timeval bad = {0, 2000000};
    CHECK_ERR(setsockopt(pair.client, SOL_SOCKET, SO_RCVTIMEO, &bad, sizeof bad), EDOM);
}

TEST(rcvtimeo_ends_recv_and_accept)
{
    struct pair pair = connected_pair();
    struct timeval limit = {0, 50000};
    char byte;
    OK(setsockopt(pair.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    OK(setsockopt(pair.listener, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    CHECK_ERR(recv(pair.server, &byte, 1, 0), EAGAIN);
    CHECK_ERR(read(pair.server, &byte, 1), EAGAIN);
    CHECK_ERR(accept(pair.listener, NULL, NULL), EAGAIN);
    ping_pong(pair.client, pair.server);
}

TEST(sndtimeo_ends_send)
{
    struct pair pair = connected_pair();
    struct timeval limit = {0, 50000};
    static char block[1 << 20];
    OK(setsockopt(pair.client, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
    ssize_t sent;
    size_t total = 0;
    while ((sent = send(pair.client, block, sizeof block, 0)) > 0)
        total += sent; // the last successful send may be short
    CHECK_EQ(errno, EAGAIN);
    CHECK_EQ(drain_until_empty(pair.server), total);
    ping_pong(pair.client, pair.server);
}

TEST(rcvlowat_holds_poll_back)
{
    struct pair pair = connected_pair();
    set_option(pair.server, SOL_SOCKET, SO_RCVLOWAT, 8);
    CHECK_EQ(option(pair.server, SOL_SOCKET, SO_RCVLOWAT), 8);
    say(pair.client, "four");
    expect_silent(pair.server, POLLIN);
    say(pair.client, "more");
    await(pair.server, POLLIN);
}

TEST(bad_options_are_enoprotoopt)
{
    struct pair pair = connected_pair();
    int value = 1;
    socklen_t size = sizeof value;
    CHECK_ERR(getsockopt(pair.client, SOL_SOCKET, 9999, &value, &size), ENOPROTOOPT);
    CHECK_ERR(setsockopt(pair.client, SOL_SOCKET, 9999, &value, size), ENOPROTOOPT);
    CHECK_ERR(getsockopt(pair.client, IPPROTO_TCP, 9999, &value, &size), ENOPROTOOPT);
    CHECK_ERR(setsockopt(pair.client, IPPROTO_TCP, 9999, &value, size), ENOPROTOOPT);
    CHECK_ERR(setsockopt(pair.client, SOL_SOCKET, SO_KEEPALIVE, &value, 1), EINVAL);
}

TEST(short_option_buffers_truncate_the_value)
{
    struct pair pair = connected_pair();
    char one = 0x7f;
    socklen_t size = 1;
    OK(getsockopt(pair.client, SOL_SOCKET, SO_TYPE, &one, &size));
    CHECK_EQ(size, 1);
    CHECK_EQ(one, SOCK_STREAM);
}

TEST(fionread_counts_unread_bytes)
{
    struct pair pair = connected_pair();
    int waiting = -1;
    OK(ioctl(pair.server, FIONREAD, &waiting));
    CHECK_EQ(waiting, 0);
    say(pair.client, "12345");
    say(pair.client, "678");
    while (waiting != 8) // the time limit of the check bounds this loop
        OK(ioctl(pair.server, FIONREAD, &waiting));
    expect(pair.server, "123");
    OK(ioctl(pair.server, FIONREAD, &waiting));
    CHECK_EQ(waiting, 5);
    CHECK_ERR(ioctl(pair.listener, FIONREAD, &waiting), EINVAL);
}

TEST(siocoutq_is_zero_once_read)
{
    struct pair pair = connected_pair();
    int queued = -1;
    say(pair.client, "12345");
    expect(pair.server, "12345");
    do
        OK(ioctl(pair.client, SIOCOUTQ, &queued));
    while (queued != 0); // the acknowledgement may come later
}

TEST(siocoutq_counts_bytes_the_peer_has_no_room_for)
{
    struct pair pair = connected_pair();
    int queued = 0;
    fill_until_full(pair.client);
    OK(ioctl(pair.client, SIOCOUTQ, &queued));
    CHECK(queued > 0);
}

TEST(unknown_ioctl_is_enotty)
{
    struct pair pair = connected_pair();
    int value = 0;
    CHECK_ERR(ioctl(pair.client, TCGETS, &value), ENOTTY);
    CHECK_EQ(isatty(pair.client), 0);
}

TEST(cloexec_by_fcntl)
{
    struct pair pair = connected_pair();
    CHECK_EQ(OK(fcntl(pair.client, F_GETFD)), 0);
    OK(fcntl(pair.client, F_SETFD, FD_CLOEXEC));
    CHECK_EQ(OK(fcntl(pair.client, F_GETFD)), FD_CLOEXEC);
}

// ---- wrong use ----------------------------------------------------------------------------------

TEST(bad_descriptor_everywhere)
{
    char byte = 0;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    int value = 0;
    socklen_t size = sizeof value;
    struct address at = ip4("127.0.0.1", 9);
    CHECK_ERR(send(987, &byte, 1, 0), EBADF);
    CHECK_ERR(recv(987, &byte, 1, 0), EBADF);
    CHECK_ERR(read(-1, &byte, 1), EBADF);
    CHECK_ERR(writev(-5, &piece, 1), EBADF);
    CHECK_ERR(sendmsg(987, &message, 0), EBADF);
    CHECK_ERR(recvmsg(987, &message, 0), EBADF);
    CHECK_ERR(connect(987, ADDRESS(&at), at.size), EBADF);
    CHECK_ERR(listen(987, 1), EBADF);
    CHECK_ERR(accept(987, NULL, NULL), EBADF);
    CHECK_ERR(getsockopt(987, SOL_SOCKET, SO_TYPE, &value, &size), EBADF);
    CHECK_ERR(close(987), EBADF);
    CHECK_ERR(dup(987), EBADF);
    CHECK_ERR(ioctl(987, FIONREAD, &value), EBADF);
    CHECK_ERR(close(1 << 30), EBADF);
    CHECK_ERR(recv(0x7fffffff, &byte, 1, 0), EBADF);
}

TEST(socket_calls_on_a_pipe_are_enotsock)
{
    int pipe_ends[2], value = 0;
    socklen_t size = sizeof value;
    char byte = 0;
    struct address at = ip4("127.0.0.1", 9);
    OK(pipe(pipe_ends));
    CHECK_ERR(send(pipe_ends[1], &byte, 1, 0), ENOTSOCK);
    CHECK_ERR(recv(pipe_ends[0], &byte, 1, 0), ENOTSOCK);
    CHECK_ERR(connect(pipe_ends[0], ADDRESS(&at), at.size), ENOTSOCK);
    CHECK_ERR(listen(pipe_ends[0], 1), ENOTSOCK);
    CHECK_ERR(accept(pipe_ends[0], NULL, NULL), ENOTSOCK);
    CHECK_ERR(shutdown(pipe_ends[0], SHUT_RD), ENOTSOCK);
    CHECK_ERR(getsockopt(pipe_ends[0], SOL_SOCKET, SO_TYPE, &value, &size), ENOTSOCK);
}

TEST(unconnected_socket_cannot_send_or_receive)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    char byte = 0;
    CHECK_ERR(recv(fd, &byte, 1, 0), ENOTCONN);
    CHECK_ERR(read(fd, &byte, 1), ENOTCONN);
    CHECK_ERR(send(fd, &byte, 1, MSG_NOSIGNAL), EPIPE);
    struct address at;
    int listener = listen_anywhere(&at);
    CHECK_ERR(recv(listener, &byte, 1, 0), ENOTCONN);
    CHECK_ERR(send(listener, &byte, 1, MSG_NOSIGNAL), EPIPE);
}

TEST(msg_oob_without_urgent_data_is_refused)
{
    struct pair pair = connected_pair();
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_OOB | MSG_DONTWAIT), EINVAL);
    ping_pong(pair.client, pair.server);
}

TEST(errqueue_is_empty)
{
    struct pair pair = connected_pair();
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_ERRQUEUE), EAGAIN);
}

// ---- descriptors that are not TCP ---------------------------------------------------------------

TEST(udp_is_untouched)
{
    struct address any = ip4("127.0.0.1", 0), from = {.size = sizeof from.storage};
    int one = OK(socket(AF_INET, SOCK_DGRAM, 0)), two = OK(socket(AF_INET, SOCK_DGRAM, 0));
    OK(bind(one, ADDRESS(&any), any.size));
    OK(bind(two, ADDRESS(&any), any.size));
    struct address at = name_of(one), sender = name_of(two);
    char buffer[16];
    CHECK_EQ(sendto(two, "datagram", 8, 0, ADDRESS(&at), at.size), 8);
    CHECK_EQ(sendto(two, "", 0, 0, ADDRESS(&at), at.size), 0);
    CHECK_EQ(recvfrom(one, buffer, 4, MSG_TRUNC, ADDRESS(&from), &from.size), 8);
    check_same_address(&from, &sender);
    CHECK_EQ(recv(one, buffer, sizeof buffer, 0), 0);
    OK(connect(two, ADDRESS(&at), at.size));
    CHECK_EQ(send(two, "again", 5, 0), 5);
    CHECK_EQ(recv(one, buffer, sizeof buffer, 0), 5);
    CHECK_ERR(listen(one, 1), EOPNOTSUPP);
    CHECK_ERR(accept(one, NULL, NULL), EOPNOTSUPP);
}

TEST(unix_sockets_are_untouched)
{
    int ends[2];
    char buffer[16];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
    ping_pong(ends[0], ends[1]);
    OK(close(ends[0]));
    expect_eof(ends[1]);
    OK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends));
    CHECK_EQ(send(ends[0], "packet", 6, 0), 6);
    CHECK_EQ(recv(ends[1], buffer, 3, MSG_TRUNC), 6);
    CHECK_EQ(name_of(ends[0]).storage.ss_family, AF_UNIX);
}

TEST(unix_listener_is_untouched)
{
    struct sockaddr_un name = {.sun_family = AF_UNIX}; // no name: the kernel chooses an abstract one
    int listener = OK(socket(AF_UNIX, SOCK_STREAM, 0));
    OK(bind(listener, (struct sockaddr *)&name, sizeof(sa_family_t)));
    OK(listen(listener, 4));
    struct address at = name_of(listener);
    int client = OK(socket(AF_UNIX, SOCK_STREAM, 0));
    OK(connect(client, ADDRESS(&at), at.size));
    ping_pong(client, accept_from(listener));
}

TEST(pipes_and_eventfds_are_untouched)
{
    int pipe_ends[2], event = OK(eventfd(0, EFD_NONBLOCK)), waiting = 0;
    uint64_t value = 3;
    char buffer[8];
    OK(pipe(pipe_ends));
    CHECK_EQ(write(pipe_ends[1], "12345678", 8), 8);
    OK(ioctl(pipe_ends[0], FIONREAD, &waiting));
    CHECK_EQ(waiting, 8);
    CHECK_EQ(read(pipe_ends[0], buffer, 8), 8);
    CHECK_ERR(read(event, &value, 8), EAGAIN);
    CHECK_EQ(write(event, &value, 8), 8);
    CHECK_EQ(read(event, &value, 8), 8);
    CHECK_EQ(value, 3);
    OK(close(pipe_ends[1]));
    CHECK_EQ(read(pipe_ends[0], buffer, 8), 0);
    CHECK_EQ(poll_once(pipe_ends[0], POLLIN, 0), POLLHUP);
}

TEST(io_uring_setup)
{
    char parameters[256] = {0};
    int fd = (int)syscall(SYS_io_uring_setup, 4, parameters);
    info("%s", fd >= 0 ? "gives a ring" : strerrorname_np(errno));
}
