// connect(): blocking, non-blocking, refused; addresses of both endpoints.
#include "check.h"

SERVER(ping_pong_many)
{
    for (int i = 0; i < 1000; i++) {
        expect(me->fd, "ping");
        say(me->fd, "pong");
    }
    expect_eof(me->fd);
}
CLIENT(ping_pong_many)
{
    for (int i = 0; i < 1000; i++) {
        say(me->fd, "ping");
        expect(me->fd, "pong");
    }
}

SERVER(names_agree)
{
    struct address mine = name_of(me->fd), peer = peer_of(me->fd);
    struct address listening = name_of(me->listener);
    check_same_address(&mine, &listening);
    send_all(me->fd, &peer, sizeof peer);
    expect(me->fd, "same");
}
CLIENT(names_agree)
{
    struct address seen, mine = name_of(me->fd);
    recv_exact(me->fd, &seen, sizeof seen);
    check_same_address(&mine, &seen);
    say(me->fd, "same");
}

static void check_names(const struct pair *pair)
{
    struct address client = name_of(pair->client), server = name_of(pair->server);
    struct address client_seen = peer_of(pair->server), server_seen = peer_of(pair->client);
    check_same_address(&client_seen, &client);
    check_same_address(&server_seen, &server);
    CHECK(port_of(&client) != 0 && port_of(&client) != port_of(&server));
}

TEST(names_agree_ip4)
{
    struct pair pair = connected_pair();
    check_names(&pair);
    CHECK_EQ(name_of(pair.client).storage.ss_family, AF_INET);
}

TEST(names_agree_ip6)
{
    require_ip6();
    struct address any = ip6("::1", 0);
    struct pair pair = connected_pair_at(&any);
    check_names(&pair);
    CHECK_EQ(name_of(pair.client).storage.ss_family, AF_INET6);
    ping_pong(pair.client, pair.server);
}

TEST(dual_stack_listener_shows_mapped_addresses)
{
    require_ip6();
    struct address any = ip6("::", 0);
    int listener = listen_at(&any, 8);
    struct address bound = name_of(listener);
    struct address at = ip4("127.0.0.1", port_of(&bound));
    int client = dial(&at), server = accept_from(listener);
    struct address mine = name_of(client), seen = peer_of(server), name = name_of(server);
    struct address want = ip6("::ffff:127.0.0.1", port_of(&mine));
    struct address want_name = ip6("::ffff:127.0.0.1", port_of(&at));
    check_same_address(&seen, &want);
    check_same_address(&name, &want_name);
    ping_pong(client, server);
}

TEST(dual_stack_listener_serves_ip6_too)
{
    require_ip6();
    struct address any = ip6("::", 0);
    int listener = listen_at(&any, 8);
    struct address bound = name_of(listener);
    struct address at = ip6("::1", port_of(&bound));
    greet(&at, listener);
}

TEST(mapped_client_reaches_an_ip4_listener)
{
    require_ip6();
    struct address at;
    int listener = listen_anywhere(&at);
    struct address mapped = ip6("::ffff:127.0.0.1", port_of(&at));
    int client = dial(&mapped), server = accept_from(listener);
    struct address peer = peer_of(client), mine = name_of(client), seen = peer_of(server);
    struct address want = ip4("127.0.0.1", port_of(&mine));
    check_same_address(&peer, &mapped);
    check_same_address(&seen, &want);
    ping_pong(client, server);
}

TEST(v6only_listener_refuses_ip4)
{
    require_ip6();
    struct address any = ip6("::", 0);
    int fd = OK(socket(AF_INET6, SOCK_STREAM, 0)), yes = 1;
    OK(setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof yes));
    OK(bind(fd, ADDRESS(&any), any.size));
    OK(listen(fd, 8));
    struct address bound = name_of(fd);
    struct address four = ip4("127.0.0.1", port_of(&bound)), six = ip6("::1", port_of(&bound));
    CHECK_ERR(try_dial(&four), ECONNREFUSED);
    greet(&six, fd);
}

TEST(client_bound_to_an_address_shows_it)
{
    struct address at, from = ip4("127.0.0.7", 0);
    int listener = listen_anywhere(&at);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(fd, ADDRESS(&from), from.size));
    struct address bound = name_of(fd);
    OK(connect(fd, ADDRESS(&at), at.size));
    struct address seen = peer_of(accept_from(listener)), mine = name_of(fd);
    check_same_address(&seen, &bound);
    check_same_address(&mine, &bound);
}

TEST(unconnected_socket_has_no_peer)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    struct address address = {.size = sizeof address.storage};
    CHECK_ERR(getpeername(fd, ADDRESS(&address), &address.size), ENOTCONN);
    struct address name = name_of(fd);
    CHECK_EQ(port_of(&name), 0);
}

TEST(two_clients_have_different_ports)
{
    struct address at;
    int listener = listen_anywhere(&at);
    struct address one = name_of(dial(&at)), two = name_of(dial(&at));
    CHECK(port_of(&one) != port_of(&two));
    struct address first = peer_of(accept_from(listener)), second = peer_of(accept_from(listener));
    check_same_address(&first, &one);
    check_same_address(&second, &two);
}

TEST(getsockname_truncates_and_reports_the_size)
{
    struct pair pair = connected_pair();
    char bytes[4];
    socklen_t size = sizeof bytes;
    OK(getsockname(pair.client, (struct sockaddr *)bytes, &size));
    CHECK_EQ(size, sizeof(struct sockaddr_in));
    size = sizeof bytes;
    OK(getpeername(pair.server, (struct sockaddr *)bytes, &size));
    CHECK_EQ(size, sizeof(struct sockaddr_in));
}

TEST(connect_blocking_is_refused)
{
    struct address at = silent_address();
    CHECK_ERR(try_dial(&at), ECONNREFUSED);
}

TEST(connect_again_after_refusal)
{
    struct address silent = silent_address(), at;
    int listener = listen_anywhere(&at);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(connect(fd, ADDRESS(&silent), silent.size), ECONNREFUSED);
    OK(connect(fd, ADDRESS(&at), at.size));
    ping_pong(fd, accept_from(listener));
}

static int error_of(int fd)
{
    int error = -1;
    socklen_t size = sizeof error;
    OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
    CHECK_EQ(size, sizeof error);
    return error;
}

// A connect may succeed at once on a non-blocking socket, but kernel TCP says EINPROGRESS.
static int begin_connect(const struct address *at)
{
    int fd = OK(socket(at->storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK, 0));
    CHECK_ERR(connect(fd, ADDRESS(at), at->size), EINPROGRESS);
    return fd;
}

TEST(connect_nonblocking_is_refused)
{
    struct address at = silent_address();
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    int rc = connect(fd, ADDRESS(&at), at.size);
    CHECK_EQ(rc, -1);
    if (errno == ECONNREFUSED)
        return; // allowed: the refusal had already arrived
    CHECK_EQ(errno, EINPROGRESS);
    await(fd, POLLOUT);
    int revents = poll_once(fd, POLLOUT, 0);
    CHECK_EQ(revents, POLLOUT | POLLERR | POLLHUP);
    CHECK_EQ(error_of(fd), ECONNREFUSED);
    CHECK_EQ(error_of(fd), 0);
}

TEST(connect_nonblocking_refused_shows_in_second_connect)
{
    struct address at = silent_address();
    int fd = begin_connect(&at);
    await(fd, POLLOUT);
    CHECK_ERR(connect(fd, ADDRESS(&at), at.size), ECONNREFUSED);
}

TEST(connect_nonblocking_refused_shows_in_recv)
{
    struct address at = silent_address();
    int fd = begin_connect(&at);
    await(fd, POLLOUT);
    char byte;
    CHECK_ERR(recv(fd, &byte, 1, 0), ECONNREFUSED);
}

TEST(connect_nonblocking_completes)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int fd = begin_connect(&at);
    await(fd, POLLOUT);
    CHECK_EQ(poll_once(fd, POLLOUT | POLLIN, 0), POLLOUT);
    CHECK_EQ(error_of(fd), 0);
    // Linux: the first connect() after completion reports success, the next ones EISCONN.
    OK(connect(fd, ADDRESS(&at), at.size));
    CHECK_ERR(connect(fd, ADDRESS(&at), at.size), EISCONN);
    int server = accept_from(listener);
    CHECK_EQ(OK(fcntl(fd, F_GETFL)) & O_NONBLOCK, O_NONBLOCK);
    say(fd, "ping");
    expect(server, "ping");
}

TEST(connect_nonblocking_through_epoll)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int fd = begin_connect(&at);
    int epoll = epoll_with(fd, EPOLLOUT | EPOLLIN | EPOLLET);
    struct epoll_event event = epoll_one(epoll);
    CHECK_EQ(event.events, EPOLLOUT);
    CHECK_EQ(error_of(fd), 0);
    int server = accept_from(listener);
    say(server, "hello");
    event = epoll_one(epoll);
    CHECK(event.events & EPOLLIN);
    expect(fd, "hello");
}

TEST(epoll_registered_before_connect_sees_it)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    int epoll = OK(epoll_create1(0));
    epoll_add(epoll, fd, EPOLLIN | EPOLLRDHUP | EPOLLET, 77);
    CHECK_ERR(connect(fd, ADDRESS(&at), at.size), EINPROGRESS);
    int server = accept_from(listener);
    await(fd, POLLOUT);
    say(server, "x");
    struct epoll_event event;
    do
        event = epoll_one(epoll); // a HUP from before the connect may come first
    while (!(event.events & EPOLLIN));
    CHECK_EQ(event.data.u64, 77);
    expect(fd, "x");
}

TEST(connect_on_a_connection_is_eisconn)
{
    struct pair pair = connected_pair();
    struct address at = name_of(pair.listener);
    CHECK_ERR(connect(pair.client, ADDRESS(&at), at.size), EISCONN);
    CHECK_ERR(connect(pair.server, ADDRESS(&at), at.size), EISCONN);
    CHECK_ERR(connect(pair.listener, ADDRESS(&at), at.size), EISCONN);
    CHECK_ERR(connect(pair.client, NULL, at.size), EFAULT);
    CHECK_ERR(connect(pair.client, ADDRESS(&at), 1), EINVAL);
    ping_pong(pair.client, pair.server);
}

TEST(connect_rejects_bad_arguments)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    struct address at = ip4("127.0.0.1", 9);
    CHECK_ERR(connect(fd, ADDRESS(&at), 4), EINVAL);
    struct sockaddr_in strange = {.sin_family = 99};
    CHECK_ERR(connect(fd, (struct sockaddr *)&strange, sizeof strange), EAFNOSUPPORT);
}

TEST(socket_connects_to_itself)
{
    struct address any = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(fd, ADDRESS(&any), any.size));
    struct address at = name_of(fd);
    OK(connect(fd, ADDRESS(&at), at.size));
    say(fd, "mirror");
    expect(fd, "mirror");
}

TEST(connect_times_out_only_with_so_sndtimeo)
{
    // A full backlog is the only address that does not answer on every machine.
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0);
    struct address at = name_of(listener);
    struct timeval limit = {.tv_usec = 300000};
    for (int tried = 0; tried < 64; tried++) {
        int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
        OK(setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit));
        if (connect(fd, ADDRESS(&at), at.size) == 0)
            continue;
        CHECK_EQ(errno, EINPROGRESS); // the error of Linux when SO_SNDTIMEO ends a connect
        return;
    }
    FAIL("a backlog of 0 accepted 64 connections");
}

TEST(thousand_connects_in_turn)
{
    struct address at;
    int listener = listen_anywhere(&at);
    for (int i = 0; i < 1000; i++) {
        int client = dial(&at), server = accept_from(listener);
        ping_pong(client, server);
        OK(close(client));
        expect_eof(server);
        OK(close(server));
    }
}

SERVER(two_hundred_connections)
{
    int fds[200];
    for (int i = 0; i < 200; i++)
        fds[i] = accept_from(me->listener);
    for (int i = 0; i < 200; i++) {
        uint32_t id;
        recv_exact(fds[i], &id, sizeof id);
        id ^= 0xffffffff;
        send_all(fds[i], &id, sizeof id);
    }
    expect_eof(me->fd);
    for (int i = 0; i < 200; i++) {
        expect_eof(fds[i]);
        OK(close(fds[i]));
    }
}
CLIENT(two_hundred_connections)
{
    int fds[200];
    struct address at = peer_of(me->fd);
    for (uint32_t i = 0; i < 200; i++) {
        fds[i] = dial(&at);
        send_all(fds[i], &i, sizeof i);
    }
    for (uint32_t i = 0; i < 200; i++) {
        uint32_t answer;
        recv_exact(fds[i], &answer, sizeof answer);
        CHECK_EQ(answer ^ 0xffffffff, i);
        OK(close(fds[i]));
    }
}

// ---- connect and send in one call ---------------------------------------------------------------

static void check_fast_open(int fd, ssize_t sent, int listener)
{
    if (sent < 0) { // without a cookie of that server the SYN carries no data
        CHECK_EQ(errno, EINPROGRESS);
        await(fd, POLLOUT);
        say(fd, "early");
    } else {
        CHECK_EQ(sent, 5);
    }
    int server = accept_from(listener);
    expect(server, "early");
    ping_pong(fd, server);
    OK(close(server));
}

TEST(fast_open_connects_and_sends)
{
    struct address at;
    int listener = listen_anywhere(&at);
    struct iovec pieces[] = {{"ea", 2}, {"rly", 3}};
    struct msghdr message = {.msg_name = ADDRESS(&at), .msg_namelen = at.size, .msg_iov = pieces, .msg_iovlen = 2};
    for (int i = 0; i < 2; i++) {
        int kind = SOCK_STREAM | (i ? SOCK_NONBLOCK : 0);
        int one = OK(socket(AF_INET, kind, 0)), two = OK(socket(AF_INET, kind, 0));
        errno = 0;
        ssize_t sent = sendto(one, "early", 5, MSG_FASTOPEN, ADDRESS(&at), at.size);
        if (sent < 0 && errno == EOPNOTSUPP)
            skip("net.ipv4.tcp_fastopen does not enable clients");
        check_fast_open(one, sent, listener);
        sent = sendmsg(two, &message, MSG_FASTOPEN);
        check_fast_open(two, sent, listener);
    }
}

TEST(fast_open_without_a_listener_is_refused)
{
    struct address at;
    OK(close(listen_anywhere(&at)));
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    errno = 0;
    CHECK_EQ(sendto(fd, "early", 5, MSG_FASTOPEN, ADDRESS(&at), at.size), -1);
    CHECK(errno == ECONNREFUSED || errno == EOPNOTSUPP);
}

// ---- AF_UNSPEC ----------------------------------------------------------------------------------

static void *recv_until_reset(void *argument)
{
    char byte;
    ssize_t got = recv(*(int *)argument, &byte, 1, 0);
    CHECK(got == 0 || (got < 0 && (errno == ECONNRESET || errno == EPIPE)));
    return NULL;
}

// The peer is reset, a blocked wait is woken, and the socket can be used like a new one, also in its epoll instance.
static void dissolve_after(int exchanges)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int client = dial(&at), server = accept_from(listener), one = 1;
    OK(setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
    for (int i = 0; i < exchanges; i++)
        ping_pong(client, server);
    int epoll = epoll_with(client, EPOLLIN);
    pthread_t sleeper = start_thread(recv_until_reset, &client);
    pause_ms(SILENCE_MS);
    struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    OK(connect(client, &nowhere, sizeof nowhere));
    join_thread(sleeper);
    char byte;
    CHECK_ERR(recv(server, &byte, 1, 0), ECONNRESET);
    CHECK_ERR(getpeername(client, ADDRESS(&at), &(socklen_t){0}), ENOTCONN);
    CHECK_EQ(send(client, &byte, 1, MSG_NOSIGNAL), -1);
    error_of(client);

    OK(connect(client, ADDRESS(&at), at.size));
    int second = accept_from(listener);
    ping_pong(client, second);
    say(second, "!");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    socklen_t size = sizeof one;
    OK(getsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, &size));
    CHECK(one);
    expect(client, "!");
    OK(close(second));
    expect_eof(client);
}

TEST(connect_to_af_unspec_leaves_a_reusable_socket) { dissolve_after(0); }
TEST(connect_to_af_unspec_leaves_a_reusable_socket_when_old) { dissolve_after(100); }
