// Creating sockets, listening, accepting.
#include "check.h"

#include <sys/resource.h>
#include <sys/stat.h>

TEST(socket_flags_show_in_fcntl)
{
    int plain = OK(socket(AF_INET, SOCK_STREAM, 0));
    int both = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
    CHECK_EQ(OK(fcntl(plain, F_GETFD)), 0);
    CHECK_EQ(OK(fcntl(plain, F_GETFL)) & O_NONBLOCK, 0);
    CHECK_EQ(OK(fcntl(both, F_GETFD)), FD_CLOEXEC);
    CHECK_EQ(OK(fcntl(both, F_GETFL)) & O_NONBLOCK, O_NONBLOCK);
    CHECK_EQ(OK(fcntl(both, F_GETFL)) & O_ACCMODE, O_RDWR);
}

TEST(socket_takes_the_lowest_free_number)
{
    int gap = OK(dup(2));
    OK(dup(2));
    OK(close(gap));
    CHECK_EQ(socket(AF_INET, SOCK_STREAM, 0), gap);
}

TEST(accept_takes_the_lowest_free_number)
{
    struct address at;
    int listener = listen_anywhere(&at);
    dial(&at);
    int gap = OK(dup(2));
    OK(dup(2));
    OK(close(gap));
    CHECK_EQ(accept(listener, NULL, NULL), gap);
}

TEST(connect_keeps_the_number)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(fd, ADDRESS(&at), at.size));
    ping_pong(fd, accept_from(listener));
    int next = OK(dup(2));
    CHECK_EQ(next, fd + 2);
}

TEST(descriptors_are_sockets)
{
    struct pair pair = connected_pair();
    int fds[] = {pair.client, pair.server, pair.listener};
    for (int i = 0; i < 3; i++) {
        struct stat status;
        OK(fstat(fds[i], &status));
        CHECK(S_ISSOCK(status.st_mode));
    }
}

TEST(socket_rejects_bad_arguments)
{
    CHECK_ERR(socket(AF_INET, SOCK_STREAM, IPPROTO_UDP), EPROTONOSUPPORT);
    CHECK_ERR(socket(9999, SOCK_STREAM, 0), EAFNOSUPPORT);
    CHECK_ERR(socket(AF_INET, 99, 0), EINVAL);
}

TEST(bind_to_port_zero_gives_a_port)
{
    struct address at = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(fd, ADDRESS(&at), at.size));
    struct address bound = name_of(fd);
    CHECK(port_of(&bound) != 0);
    CHECK_ERR(bind(fd, ADDRESS(&at), at.size), EINVAL);
}

TEST(bind_rejects_a_foreign_address)
{
    struct address at = ip4("192.0.2.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(bind(fd, ADDRESS(&at), at.size), EADDRNOTAVAIL);
    CHECK_ERR(bind(fd, ADDRESS(&at), 4), EINVAL);
}

TEST(second_listener_on_a_port_is_address_in_use)
{
    struct address at;
    listen_anywhere(&at);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(bind(fd, ADDRESS(&at), at.size), EADDRINUSE);
}

TEST(wildcard_collides_with_a_listener)
{
    struct address at;
    listen_anywhere(&at);
    struct address any = ip4("0.0.0.0", port_of(&at));
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(bind(fd, ADDRESS(&any), any.size), EADDRINUSE);
}

TEST(listen_without_bind_takes_a_port)
{
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(listen(listener, 4));
    struct address bound = name_of(listener);
    CHECK(port_of(&bound) != 0);
    struct address at = ip4("127.0.0.1", port_of(&bound));
    greet(&at, listener);
}

TEST(listen_twice_succeeds)
{
    struct address at;
    int listener = listen_anywhere(&at);
    OK(listen(listener, 16));
    greet(&at, listener);
}

TEST(listen_on_a_connection_is_invalid)
{
    struct pair pair = connected_pair();
    CHECK_ERR(listen(pair.client, 4), EINVAL);
    ping_pong(pair.client, pair.server);
}

TEST(accept_needs_a_listener)
{
    struct pair pair = connected_pair();
    int fresh = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(accept(pair.client, NULL, NULL), EINVAL);
    CHECK_ERR(accept(fresh, NULL, NULL), EINVAL);
}

TEST(accept_on_a_closed_listener_is_bad_descriptor)
{
    struct address at;
    int listener = listen_anywhere(&at);
    OK(close(listener));
    CHECK_ERR(accept(listener, NULL, NULL), EBADF);
    CHECK_ERR(try_dial(&at), ECONNREFUSED);
}

TEST(accept_nonblocking_is_eagain)
{
    struct address at;
    int listener = listen_anywhere(&at);
    set_nonblocking(listener);
    CHECK_ERR(accept(listener, NULL, NULL), EAGAIN);
    int client = dial(&at);
    await(listener, POLLIN);
    int server = accept_from(listener);
    CHECK_ERR(accept(listener, NULL, NULL), EAGAIN);
    ping_pong(client, server);
}

TEST(accept_does_not_inherit_flags)
{
    struct address at;
    int listener = listen_anywhere(&at);
    set_nonblocking(listener);
    OK(fcntl(listener, F_SETFD, FD_CLOEXEC));
    dial(&at);
    await(listener, POLLIN);
    int server = accept_from(listener);
    CHECK_EQ(OK(fcntl(server, F_GETFL)) & O_NONBLOCK, 0);
    CHECK_EQ(OK(fcntl(server, F_GETFD)), 0);
}

TEST(accept4_sets_flags)
{
    struct address at;
    int listener = listen_anywhere(&at);
    dial(&at);
    int server = OK(accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC));
    CHECK_EQ(OK(fcntl(server, F_GETFL)) & O_NONBLOCK, O_NONBLOCK);
    CHECK_EQ(OK(fcntl(server, F_GETFD)), FD_CLOEXEC);
    char byte;
    CHECK_ERR(recv(server, &byte, 1, 0), EAGAIN);
    CHECK_ERR(accept4(listener, NULL, NULL, 0x7), EINVAL);
}

TEST(accept_reports_the_client)
{
    struct address at, seen = {.size = sizeof seen.storage};
    int listener = listen_anywhere(&at);
    int client = dial(&at);
    struct address want = name_of(client);
    OK(accept(listener, ADDRESS(&seen), &seen.size));
    check_same_address(&seen, &want);
}

TEST(accept_truncates_the_address_and_reports_its_size)
{
    struct address at;
    int listener = listen_anywhere(&at);
    dial(&at);
    unsigned char bytes[8];
    memset(bytes, 0xee, sizeof bytes);
    socklen_t size = 4;
    OK(accept(listener, (struct sockaddr *)bytes, &size));
    CHECK_EQ(size, sizeof(struct sockaddr_in));
    CHECK_EQ(bytes[4], 0xee);
}

TEST(connect_and_send_before_accept)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int client = dial(&at);
    say(client, "early");
    int server = accept_from(listener);
    expect(server, "early");
    ping_pong(client, server);
}

TEST(client_closed_before_accept_leaves_its_data)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int client = dial(&at);
    say(client, "gone");
    OK(close(client));
    int server = accept_from(listener);
    expect(server, "gone");
    expect_eof(server);
}

TEST(connections_are_accepted_in_order)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int clients[20];
    for (int i = 0; i < 20; i++)
        clients[i] = dial(&at);
    for (int i = 0; i < 20; i++) {
        struct address want = name_of(clients[i]), seen = peer_of(accept_from(listener));
        check_same_address(&seen, &want);
    }
}

static void *dial_late(void *argument)
{
    return (void *)(intptr_t)dial(argument);
}

TEST(a_full_backlog_blocks_a_blocking_connect)
{
    long room = 0;
    FILE *limit = fopen("/proc/sys/net/core/somaxconn", "r");
    CHECK(limit && fscanf(limit, "%ld", &room) == 1);
    fclose(limit);
    struct rlimit files;
    OK(getrlimit(RLIMIT_NOFILE, &files));
    if (room > 4096 || files.rlim_max < 20000)
        skip("a backlog of %ld, %ld descriptors", room, (long)files.rlim_max);
    files.rlim_cur = files.rlim_max;
    OK(setrlimit(RLIMIT_NOFILE, &files));
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, room);
    struct address at = name_of(listener);
    for (long i = 0; i <= room; i++)
        dial(&at);
    pthread_t late = start_thread(dial_late, &at);
    pause_ms(50);
    for (long i = 0; i <= room; i++)
        OK(close(accept_from(listener)));
    void *fd;
    CHECK_EQ(pthread_join(late, &fd), 0);
    ping_pong((int)(intptr_t)fd, accept_from(listener));
}

TEST(closing_a_listener_resets_waiting_clients)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int client = dial(&at);
    OK(close(listener));
    char byte;
    CHECK_ERR(recv(client, &byte, 1, 0), ECONNRESET);
}

TEST(a_full_backlog_holds_back_connects)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 1);
    struct address at = name_of(listener);
    for (int tried = 0; tried < 64; tried++) {
        int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
        int rc = connect(fd, ADDRESS(&at), at.size);
        if (rc == 0)
            continue;
        CHECK_EQ(errno, EINPROGRESS);
        if (poll_once(fd, POLLOUT, 200) != 0)
            continue;
        // This connect waits; it completes by itself once there is room.
        for (int waiting = 0; waiting < tried; waiting++)
            accept_from(listener);
        await(fd, POLLOUT);
        return;
    }
    FAIL("a backlog of 1 accepted 64 connections");
}

// Returns a socket whose connect waits for room in the backlog, behind `*before` connections.
static int waiting_connect(const struct address *at, int *before)
{
    for (*before = 0; *before < 64; ++*before) {
        int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
        CHECK_ERR(connect(fd, ADDRESS(at), at->size), EINPROGRESS);
        if (poll_once(fd, POLLOUT, 200) == 0)
            return fd;
    }
    FAIL("a small backlog accepted 64 connections");
}

static void accept_all(int listener, int count)
{
    while (count-- > 0)
        accept_from(listener);
}

static int pending_error(int fd)
{
    int error = -1;
    socklen_t size = sizeof error;
    OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size));
    return error;
}

TEST(a_waiting_connect_answers_as_one_in_progress)
{
    struct address any = ip4("127.0.0.1", 0), name = {.size = sizeof name.storage};
    int listener = listen_at(&any, 0), before;
    struct address at = name_of(listener);
    int fd = waiting_connect(&at, &before);
    char byte;
    CHECK_ERR(connect(fd, ADDRESS(&at), at.size), EALREADY);
    CHECK_ERR(send(fd, "x", 1, 0), EAGAIN);
    CHECK_ERR(recv(fd, &byte, 1, 0), EAGAIN);
    CHECK_ERR(getpeername(fd, ADDRESS(&name), &name.size), ENOTCONN);
    CHECK_EQ(poll_once(fd, POLLIN | POLLOUT | POLLRDHUP, 0), 0);
    CHECK_EQ(pending_error(fd), 0);
    accept_all(listener, before);
    await(fd, POLLOUT);
    CHECK_EQ(pending_error(fd), 0);
    OK(connect(fd, ADDRESS(&at), at.size));
    CHECK_ERR(connect(fd, ADDRESS(&at), at.size), EISCONN);
    int server = accept_from(listener);
    say(server, "hello");
    await(fd, POLLIN);
    expect(fd, "hello");
}

static void *wait_for_one_event(void *epoll)
{
    struct epoll_event event = epoll_one(*(int *)epoll);
    CHECK_EQ(event.events, EPOLLOUT);
    CHECK_EQ(event.data.u64, 4711);
    return NULL;
}

TEST(a_waiting_connect_is_reported_to_a_blocked_epoll_wait)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0), epoll = OK(epoll_create1(0)), before;
    struct address at = name_of(listener);
    pthread_t thread = start_thread(wait_for_one_event, &epoll);
    pause_ms(SILENCE_MS);
    int fd = waiting_connect(&at, &before);
    epoll_add(epoll, fd, EPOLLIN | EPOLLOUT | EPOLLET, 4711);
    pause_ms(SILENCE_MS);
    accept_all(listener, before);
    join_thread(thread);
    say(accept_from(listener), "hello");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN | EPOLLOUT);
    expect(fd, "hello");
}

TEST(a_waiting_connect_can_be_closed)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0), before;
    struct address at = name_of(listener);
    OK(close(waiting_connect(&at, &before)));
    accept_all(listener, before);
    expect_silent(listener, POLLIN);
    greet(&at, listener);
}

TEST(a_waiting_connect_can_be_cancelled)
{
    struct address any = ip4("127.0.0.1", 0);
    struct sockaddr nobody = {.sa_family = AF_UNSPEC};
    int listener = listen_at(&any, 0), before;
    struct address at = name_of(listener);
    int shut = waiting_connect(&at, &before);
    int dissolved = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    CHECK_ERR(connect(dissolved, ADDRESS(&at), at.size), EINPROGRESS);
    OK(shutdown(shut, SHUT_RDWR));
    OK(connect(dissolved, &nobody, sizeof nobody));
    accept_all(listener, before);
    await(shut, POLLHUP);
    await(dissolved, POLLHUP);
    expect_silent(listener, POLLIN);
    greet(&at, listener);
    // A socket that was disconnected can be connected again.
    CHECK_ERR(connect(dissolved, ADDRESS(&at), at.size), EINPROGRESS);
    await(dissolved, POLLOUT);
    CHECK_EQ(pending_error(dissolved), 0);
    accept_from(listener);
}

TEST(a_waiting_connect_is_one_connection_after_a_fork)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0), before;
    struct address at = name_of(listener);
    int fd = waiting_connect(&at, &before);
    pid_t child = fork_child();
    if (child == 0) {
        pause_ms(SILENCE_MS);
        poll_once(fd, POLLIN, SILENCE_MS);
        _exit(0);
    }
    accept_all(listener, before);
    wait_child(child);
    await(fd, POLLOUT);
    ping_pong(fd, accept_from(listener));
    expect_silent(listener, POLLIN);
}

TEST(a_waiting_connect_completes_for_a_program_that_only_sends)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0), before;
    struct address at = name_of(listener);
    int fd = waiting_connect(&at, &before);
    accept_all(listener, before);
    ssize_t sent = -1;
    for (int tried = 0; tried < 5000 && sent < 0; tried++) {
        sent = send(fd, "hello", 5, 0);
        CHECK(sent == 5 || errno == EAGAIN);
        pause_ms(1);
    }
    CHECK_EQ(sent, 5);
    expect(accept_from(listener), "hello");
}

TEST(a_waiting_connect_is_refused_when_the_listener_closes)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0), before;
    struct address at = name_of(listener);
    int fd = waiting_connect(&at, &before);
    OK(close(listener));
    await(fd, POLLOUT);
    CHECK_EQ(pending_error(fd), ECONNREFUSED);
}

#define ENDING_AT_ONCE 30

static void *wait_until_refused(void *fd)
{
    await(*(int *)fd, POLLERR);
    return NULL;
}

static void *expect_each_refusal_once(void *epoll)
{
    for (int heard = 0; heard < ENDING_AT_ONCE; heard++) {
        struct epoll_event event;
        CHECK_EQ(epoll_wait(*(int *)epoll, &event, 1, WAIT_MS_MAX), 1);
        CHECK_EQ(event.events, EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLHUP);
        CHECK_EQ(pending_error((int)event.data.u64), ECONNREFUSED);
    }
    return NULL;
}

// A poll in one thread may complete connects for which another thread is blocked.
TEST(waiting_connects_are_refused_once_to_a_blocked_epoll_wait)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0), epoll = OK(epoll_create1(0)), before;
    struct address at = name_of(listener);
    int polled[2] = {waiting_connect(&at, &before)};
    polled[1] = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    CHECK_ERR(connect(polled[1], ADDRESS(&at), at.size), EINPROGRESS);
    for (int i = 0; i < ENDING_AT_ONCE; i++) {
        int fd = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
        CHECK_ERR(connect(fd, ADDRESS(&at), at.size), EINPROGRESS);
        epoll_add(epoll, fd, EPOLLIN | EPOLLOUT | EPOLLET, fd);
    }
    pthread_t hearing = start_thread(expect_each_refusal_once, &epoll);
    pthread_t polling[2];
    for (int i = 0; i < 2; i++)
        polling[i] = start_thread(wait_until_refused, &polled[i]);
    pause_ms(SILENCE_MS);
    OK(close(listener));
    for (int i = 0; i < 2; i++)
        join_thread(polling[i]);
    join_thread(hearing);
    epoll_none(epoll);
}

TEST(listen_again_changes_the_backlog)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0), before;
    struct address at = name_of(listener);
    int fd = waiting_connect(&at, &before);
    OK(listen(listener, 8));
    await(fd, POLLOUT);
    accept_all(listener, before + 1);
}

static void *accept_after_a_while(void *listener)
{
    pause_ms(SILENCE_MS);
    accept_all(*(int *)listener, 3);
    return NULL;
}

TEST(a_blocking_connect_waits_for_room)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0);
    struct address at = name_of(listener);
    pthread_t thread = start_thread(accept_after_a_while, &listener);
    for (int i = 0; i < 3; i++)
        dial(&at);
    join_thread(thread);
}

static void *blocked_accept(void *argument)
{
    CHECK_ERR(accept(*(int *)argument, NULL, NULL), EINVAL);
    return NULL;
}

TEST(shutdown_wakes_a_blocked_accept)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pthread_t thread = start_thread(blocked_accept, &listener);
    pause_ms(SILENCE_MS);
    OK(shutdown(listener, SHUT_RD));
    join_thread(thread);
    CHECK_ERR(accept(listener, NULL, NULL), EINVAL);
    CHECK_ERR(try_dial(&at), ECONNREFUSED);
}

TEST(listener_can_listen_again_after_shutdown)
{
    struct address at;
    int listener = listen_anywhere(&at);
    OK(shutdown(listener, SHUT_RD));
    OK(listen(listener, 8));
    at = name_of(listener); // a port chosen by the kernel may have changed
    greet(&at, listener);
}

TEST(rebind_after_close_with_reuseaddr)
{
    struct pair pair = connected_pair();
    struct address at = name_of(pair.listener);
    OK(close(pair.server)); // this side closes first: the port keeps a TIME_WAIT
    expect_eof(pair.client);
    OK(close(pair.client));
    OK(close(pair.listener));
    int listener = listen_at(&at, 8);
    greet(&at, listener);
}

TEST(rebind_while_a_connection_lives_with_reuseaddr)
{
    struct pair old = connected_pair();
    struct address at = name_of(old.listener);
    OK(close(old.listener));
    int listener = listen_at(&at, 8);
    ping_pong(old.client, old.server);
    greet(&at, listener);
    ping_pong(old.client, old.server);
}

static int listen_reuseport(const struct address *at)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0)), yes = 1;
    OK(setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &yes, sizeof yes));
    OK(bind(fd, ADDRESS(at), at->size));
    OK(listen(fd, 64));
    return fd;
}

TEST(reuseport_shares_a_port)
{
    struct address any = ip4("127.0.0.1", 0);
    int one = listen_reuseport(&any);
    struct address at = name_of(one);
    int two = listen_reuseport(&at), served = 0;
    for (int i = 0; i < 16; i++) {
        int client = dial(&at);
        struct pollfd both[2] = {{one, POLLIN, 0}, {two, POLLIN, 0}};
        CHECK(poll(both, 2, WAIT_MS_MAX) == 1);
        ping_pong(client, accept_from(both[0].revents ? one : two));
        served++;
    }
    CHECK_EQ(served, 16);
}

TEST(reuseport_survivor_serves_after_one_closes)
{
    struct address any = ip4("127.0.0.1", 0);
    int one = listen_reuseport(&any);
    struct address at = name_of(one);
    int two = listen_reuseport(&at);
    OK(close(one));
    for (int i = 0; i < 8; i++)
        greet(&at, two);
}

TEST(same_port_on_two_addresses_does_not_mix)
{
    struct address any = ip4("127.0.0.1", 0);
    int one = listen_at(&any, 8);
    struct address first = name_of(one), second = ip4("127.0.0.2", port_of(&first));
    int two = listen_at(&second, 8);
    int to_second = dial(&second), to_first = dial(&first);
    int from_one = accept_from(one), from_two = accept_from(two);
    ping_pong(to_first, from_one);
    ping_pong(to_second, from_two);
}

TEST(wildcard_listener_serves_every_local_address)
{
    struct address any = ip4("0.0.0.0", 0);
    int listener = listen_at(&any, 8);
    struct address bound = name_of(listener);
    struct address at = ip4("127.0.0.5", port_of(&bound));
    int client = dial(&at), server = accept_from(listener);
    struct address name = name_of(server);
    check_same_address(&name, &at);
    ping_pong(client, server);
}

TEST(listener_on_one_address_refuses_the_others)
{
    struct address at;
    listen_anywhere(&at);
    struct address other = ip4("127.0.0.9", port_of(&at));
    CHECK_ERR(try_dial(&other), ECONNREFUSED);
}

TEST(connect_to_the_wildcard_reaches_this_machine)
{
    struct address at;
    int listener = listen_anywhere(&at);
    struct address any = ip4("0.0.0.0", port_of(&at));
    greet(&any, listener);
}
