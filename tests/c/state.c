// Options and requests whose result depends on the peer of a socket, and on whether it is still connected.
#include "check.h"

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static struct linger linger_of(int fd)
{
    struct linger got = {-1, -1};
    socklen_t size = sizeof got;
    OK(getsockopt(fd, SOL_SOCKET, SO_LINGER, &got, &size));
    return got;
}

static void linger(int fd, int on, int seconds)
{
    struct linger set = {on, seconds};
    OK(setsockopt(fd, SOL_SOCKET, SO_LINGER, &set, sizeof set));
}

TEST(linger_that_is_off_keeps_its_time)
{
    struct pair pair = connected_pair();
    for (int end = 0; end < 2; end++) {
        int fd = end ? pair.server : pair.client;
        linger(fd, 0, 7);
        CHECK_EQ(linger_of(fd).l_linger, 0);
        linger(fd, 1, 5);
        linger(fd, 0, 9);
        linger(fd, 0, 0);
        CHECK_EQ(linger_of(fd).l_onoff, 0);
        CHECK_EQ(linger_of(fd).l_linger, 5);
        linger(fd, 1, 3);
        linger(fd, 0, 1);
        CHECK_EQ(linger_of(fd).l_linger, 3);
    }
}

static int number_of(int fd, int level, int name)
{
    int value = -1;
    socklen_t size = sizeof value;
    OK(getsockopt(fd, level, name, &value, &size));
    return value;
}

static int set_number(int fd, int level, int name, int value)
{
    return setsockopt(fd, level, name, &value, sizeof value);
}

TEST(window_clamp_of_a_connection_is_never_zero)
{
    struct pair pair = connected_pair();
    CHECK_EQ(number_of(pair.client, IPPROTO_TCP, TCP_WINDOW_CLAMP), number_of(pair.client, SOL_SOCKET, SO_RCVBUF) / 2);
    CHECK_ERR(set_number(pair.client, IPPROTO_TCP, TCP_WINDOW_CLAMP, 0), EINVAL);
    OK(set_number(pair.client, IPPROTO_TCP, TCP_WINDOW_CLAMP, 1));
    CHECK_EQ(number_of(pair.client, IPPROTO_TCP, TCP_WINDOW_CLAMP), 1152);
    OK(set_number(pair.server, IPPROTO_TCP, TCP_WINDOW_CLAMP, 70000));
    CHECK_EQ(number_of(pair.server, IPPROTO_TCP, TCP_WINDOW_CLAMP), 70000);
    int fresh = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(set_number(fresh, IPPROTO_TCP, TCP_WINDOW_CLAMP, 0));
}

TEST(options_that_must_precede_connect_are_refused_after_it)
{
    struct pair pair = connected_pair();
    for (int value = 0; value < 2; value++) {
        CHECK_ERR(set_number(pair.client, IPPROTO_TCP, TCP_FASTOPEN, value), EINVAL);
        CHECK_ERR(set_number(pair.client, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, value), EINVAL);
        CHECK_ERR(set_number(pair.server, IPPROTO_TCP, TCP_FASTOPEN_NO_COOKIE, value), EINVAL);
    }
    require_ip6();
    struct address any = ip6("::1", 0);
    struct pair pair6 = connected_pair_at(&any);
    CHECK_ERR(set_number(pair6.client, IPPROTO_IPV6, IPV6_V6ONLY, 1), EINVAL);
    CHECK_ERR(set_number(pair6.server, IPPROTO_IPV6, IPV6_V6ONLY, 0), EINVAL);
}

TEST(ip_mtu_is_that_of_the_loopback_interface)
{
    struct pair pair = connected_pair();
    CHECK_EQ(number_of(pair.client, IPPROTO_IP, IP_MTU), 65535);
    CHECK_EQ(number_of(pair.server, IPPROTO_IP, IP_MTU), 65535);
}

static void check_interface(int fd)
{
    struct ifreq interface = {.ifr_name = "lo"};
    struct sockaddr_in *address = (struct sockaddr_in *)&interface.ifr_addr;
    OK(ioctl(fd, SIOCGIFADDR, &interface));
    CHECK_EQ(address->sin_family, AF_INET);
    CHECK_EQ(ntohl(address->sin_addr.s_addr), INADDR_LOOPBACK);
    OK(ioctl(fd, SIOCGIFNETMASK, &interface));
    CHECK_EQ(ntohl(address->sin_addr.s_addr), 0xff000000);
    OK(ioctl(fd, SIOCGIFINDEX, &interface));
    CHECK_EQ(interface.ifr_ifindex, 1);
    struct ethtool_value link = {.cmd = ETHTOOL_GLINK};
    interface.ifr_data = (void *)&link;
    OK(ioctl(fd, SIOCETHTOOL, &interface));
    CHECK_EQ(link.data, 1);
    struct ifreq all[8];
    struct ifconf list = {.ifc_len = sizeof all, .ifc_req = all};
    OK(ioctl(fd, SIOCGIFCONF, &list));
    CHECK(list.ifc_len >= (int)sizeof *all && strcmp(all[0].ifr_name, "lo") == 0);
    strcpy(interface.ifr_name, "nosuch");
    CHECK_ERR(ioctl(fd, SIOCGIFADDR, &interface), ENODEV);
}

TEST(interface_requests_work_on_each_endpoint)
{
    struct address bound;
    int listener = listen_anywhere(&bound), client = dial(&bound), server = accept_from(listener);
    check_interface(listener);
    check_interface(client);
    check_interface(server);
    int waiting = -1;
    OK(ioctl(client, SIOCOUTQNSD, &waiting));
    CHECK_EQ(waiting, 0);
    CHECK_ERR(ioctl(client, SIOCGSTAMP, &(struct timeval){0}), ENOENT);
    CHECK_ERR(ioctl(client, SIOCPROTOPRIVATE, &waiting), ENOTTY);
    ping_pong(client, server);
}

static void expect_no_peer(int fd)
{
    struct sockaddr_storage peer;
    socklen_t size = sizeof peer;
    CHECK_ERR(getpeername(fd, (struct sockaddr *)&peer, &size), ENOTCONN);
    CHECK_ERR(shutdown(fd, SHUT_RDWR), ENOTCONN);
    CHECK_ERR(shutdown(fd, SHUT_WR), ENOTCONN);
}

static void carry_traffic(struct pair *pair)
{
    for (int round = 0; round < 10; round++)
        ping_pong(pair->client, pair->server);
}

TEST(a_connection_that_was_reset_has_no_peer)
{
    for (int is_old = 0; is_old < 2; is_old++) {
        struct pair pair = connected_pair();
        if (is_old)
            carry_traffic(&pair);
        say(pair.server, "unread");
        await(pair.client, POLLIN);
        OK(close(pair.client)); // with unread bytes, so the peer is reset
        await_revents(pair.server, POLLIN, POLLHUP);
        expect_no_peer(pair.server);
    }
}

TEST(a_reset_is_seen_by_getpeername_alone)
{
    for (int is_old = 0; is_old < 2; is_old++) {
        struct pair pair = connected_pair();
        if (is_old)
            carry_traffic(&pair);
        say(pair.server, "unread");
        await(pair.client, POLLIN);
        OK(close(pair.client)); // with unread bytes, so the peer is reset
        struct sockaddr_storage peer;
        socklen_t size = sizeof peer;
        pause_ms(SILENCE_MS);
        CHECK_ERR(getpeername(pair.server, (struct sockaddr *)&peer, &size), ENOTCONN);
    }
}

TEST(a_connection_whose_streams_have_both_ended_has_no_peer)
{
    for (int is_old = 0; is_old < 2; is_old++) {
        struct pair pair = connected_pair();
        if (is_old)
            carry_traffic(&pair);
        OK(shutdown(pair.client, SHUT_WR));
        OK(shutdown(pair.client, SHUT_WR));
        peer_of(pair.client);
        expect_eof(pair.server);
        peer_of(pair.server);
        OK(shutdown(pair.server, SHUT_RD));
        peer_of(pair.server);
        OK(shutdown(pair.server, SHUT_WR));
        expect_no_peer(pair.server);
        expect_eof(pair.client);
        expect_no_peer(pair.client);
    }
}

TEST(a_connection_shut_both_ways_by_one_endpoint_has_a_peer)
{
    for (int is_old = 0; is_old < 2; is_old++) {
        struct pair pair = connected_pair();
        if (is_old)
            carry_traffic(&pair);
        OK(shutdown(pair.client, SHUT_RDWR));
        peer_of(pair.client);
        OK(shutdown(pair.client, SHUT_RDWR));
        peer_of(pair.server);
    }
}

// ---- TCP_DEFER_ACCEPT ------------------------------------------------------------------------------

static void defer(int listener, int seconds)
{
    OK(setsockopt(listener, IPPROTO_TCP, TCP_DEFER_ACCEPT, &seconds, sizeof seconds));
}

static void expect_no_client(int listener)
{
    set_nonblocking(listener);
    expect_silent(listener, POLLIN);
    CHECK_ERR(accept(listener, NULL, NULL), EAGAIN);
}

static int deferring_listener(struct address *bound)
{
    int listener = listen_anywhere(bound);
    defer(listener, 60);
    return listener;
}

TEST(defer_accept_holds_back_silent_clients)
{
    struct address bound;
    int listener = deferring_listener(&bound), silent = dial(&bound), client = dial(&bound);
    expect_no_client(listener);
    say(client, "hello");
    await(listener, POLLIN);
    struct address who = {.size = sizeof who.storage}, own = name_of(client);
    int server = OK(accept4(listener, (struct sockaddr *)&who.storage, &who.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    check_same_address(&who, &own);
    CHECK_EQ(OK(fcntl(server, F_GETFD)), FD_CLOEXEC);
    CHECK_EQ(OK(fcntl(server, F_GETFL)) & O_NONBLOCK, O_NONBLOCK);
    expect(server, "hello");
    expect_no_client(listener);
    say(silent, "at last");
    await(listener, POLLIN);
    int second = accept_from(listener);
    CHECK_EQ(OK(fcntl(second, F_GETFL)) & O_NONBLOCK, 0);
    expect(second, "at last");
    OK(fcntl(server, F_SETFL, 0));
    ping_pong(client, server);
    ping_pong(silent, second);
}

TEST(defer_accept_set_before_listen_applies)
{
    struct address bound = ip4("127.0.0.1", 0);
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0));
    defer(listener, 60);
    OK(bind(listener, ADDRESS(&bound), bound.size));
    OK(listen(listener, 8));
    bound = name_of(listener);
    int client = dial(&bound);
    expect_no_client(listener);
    say(client, "x");
    await(listener, POLLIN);
    expect(accept_from(listener), "x");
}

TEST(defer_accept_admits_a_client_that_ends_its_stream)
{
    struct address bound;
    int listener = deferring_listener(&bound), client = dial(&bound);
    expect_no_client(listener);
    OK(shutdown(client, SHUT_WR));
    await(listener, POLLIN);
    int server = accept_from(listener);
    expect_eof(server);
    say(server, "bye");
    expect(client, "bye");
}

TEST(defer_accept_expires)
{
    struct address bound;
    int listener = listen_anywhere(&bound);
    defer(listener, 1);
    int client = dial(&bound), epoll = epoll_with(listener, EPOLLIN);
    expect_no_client(listener);
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    await(listener, POLLIN);
    ping_pong(client, accept_from(listener));
    epoll_none(epoll);
}

TEST(defer_accept_blocks_accept_until_the_first_bytes)
{
    struct address bound;
    int listener = deferring_listener(&bound);
    pid_t pid = fork_child();
    if (pid == 0) {
        int client = dial(&bound);
        pause_ms(SILENCE_MS);
        say(client, "now");
        _exit(0);
    }
    int server = accept_from(listener);
    int waiting = 0;
    OK(ioctl(server, FIONREAD, &waiting));
    CHECK_EQ(waiting, 3);
    expect(server, "now");
    wait_child(pid);
}

static void check_defer_in_epoll(uint32_t events, bool is_set_late)
{
    struct address bound;
    int listener = listen_anywhere(&bound), epoll = OK(epoll_create1(0));
    set_nonblocking(listener);
    if (!is_set_late)
        defer(listener, 60);
    epoll_add(epoll, listener, EPOLLIN | events, 7);
    if (is_set_late)
        defer(listener, 60);
    int silent = dial(&bound), client = dial(&bound);
    epoll_none(epoll);
    say(client, "a");
    CHECK_EQ(epoll_one(epoll).data.u64, 7);
    expect(accept_from(listener), "a");
    if (events & EPOLLONESHOT)
        OK(epoll_ctl(epoll, EPOLL_CTL_MOD, listener, &(struct epoll_event){EPOLLIN | events, {.u64 = 7}}));
    epoll_none(epoll);
    say(silent, "b");
    CHECK_EQ(epoll_one(epoll).data.u64, 7);
    expect(accept_from(listener), "b");
    OK(epoll_ctl(epoll, EPOLL_CTL_DEL, listener, NULL));
    int last = dial(&bound);
    say(last, "c");
    epoll_none(epoll);
}

TEST(defer_accept_applies_to_epoll)
{
    const uint32_t kinds[] = {0, EPOLLET, EPOLLONESHOT, EPOLLEXCLUSIVE};
    for (int kind = 0; kind < 4; kind++) {
        check_defer_in_epoll(kinds[kind], false);
        check_defer_in_epoll(kinds[kind], true);
    }
}

TEST(defer_accept_of_many_clients_applies_to_edges)
{
    struct address bound = ip4("127.0.0.1", 0);
    int listener = listen_at(&bound, 256), epoll = epoll_with(listener, EPOLLIN | EPOLLET), clients[200];
    set_nonblocking(listener);
    bound = name_of(listener);
    defer(listener, 60);
    for (int i = 0; i < 200; i++)
        clients[i] = dial(&bound);
    epoll_none(epoll);
    say(clients[199], "last");
    CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
    expect(accept_from(listener), "last");
}

TEST(defer_accept_turned_off_admits_new_clients)
{
    struct address bound;
    int listener = deferring_listener(&bound);
    defer(listener, 0);
    int client = dial(&bound);
    await(listener, POLLIN);
    ping_pong(client, accept_from(listener));
}

TEST(defer_accept_of_a_shared_listener_serves_in_every_process)
{
    struct address bound;
    int listener = deferring_listener(&bound), silent = dial(&bound);
    expect_no_client(listener); // this process has polled the silent client
    OK(fcntl(listener, F_SETFL, 0));
    pid_t pid = fork_child();
    if (pid == 0) {
        int server = accept_from(listener);
        expect(server, "for the child");
        say(server, "seen");
        _exit(0);
    }
    int client = dial(&bound);
    say(client, "for the child");
    expect(client, "seen");
    wait_child(pid);
    say(silent, "for the parent");
    expect(accept_from(listener), "for the parent");
}

// What a process does after it has polled the silent clients of a listener that it shares.
enum leaving { IS_BUSY, CLOSES, EXITS };

static void leave_silent_clients(enum leaving how)
{
    struct address bound;
    int listener = deferring_listener(&bound), ways[2], silent[3];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, ways));
    pid_t pid = fork_child();
    if (pid == 0) {
        expect(ways[1], "all are there");
        expect_no_client(listener); // this process has polled the silent clients
        say(ways[1], "seen");
        if (how == IS_BUSY) {
            await(listener, POLLIN);
            expect(accept_from(listener), "busy");
            say(ways[1], "busy");
            expect(ways[1], "all are served");
        } else if (how == CLOSES) {
            OK(close(listener));
            say(ways[1], "closed");
            expect(ways[1], "all are served");
        }
        exit(0);
    }
    for (int i = 0; i < 3; i++)
        silent[i] = dial(&bound);
    say(ways[0], "all are there");
    expect(ways[0], "seen");
    int first = 0;
    if (how == IS_BUSY) {
        say(silent[first++], "busy");
        expect(ways[0], "busy");
    } else if (how == CLOSES) {
        expect(ways[0], "closed");
    } else {
        wait_child(pid);
    }
    for (int i = first; i < 3; i++) {
        say(silent[i], "late");
        await(listener, POLLIN);
        int server = accept_from(listener);
        expect(server, "late");
        ping_pong(silent[i], server);
    }
    if (how != EXITS) {
        say(ways[0], "all are served");
        wait_child(pid);
    }
}

TEST(defer_accept_leaves_clients_of_a_busy_process_to_others)
{
    leave_silent_clients(IS_BUSY);
}

TEST(defer_accept_leaves_clients_to_others_when_a_process_closes_the_listener)
{
    leave_silent_clients(CLOSES);
}

TEST(defer_accept_leaves_clients_to_others_when_a_process_exits)
{
    leave_silent_clients(EXITS);
}

// ---- TCP_DEFER_ACCEPT and exec ----------------------------------------------------------------------

// Marks the channel close-on-exec: its reader sees the end of stream when this process execs or exits.
static void notify_and_close_on_exec(int way)
{
    say(way, "seen");
    OK(fcntl(way, F_SETFD, FD_CLOEXEC));
}

static char *const *echo_of(int listener, int clients)
{
    static char fd[16], count[16];
    static char *arguments[] = {"semantics", "--echo-accepted", fd, count, NULL};
    snprintf(fd, sizeof fd, "%d", listener);
    snprintf(count, sizeof count, "%d", clients);
    return arguments;
}

__attribute__((noreturn)) static void become_echo(int listener, int clients)
{
    OK(fcntl(listener, F_SETFL, 0));
    execv("/proc/self/exe", echo_of(listener, clients));
    FAIL("exec failed: %s", strerrorname_np(errno));
}

static void check_echo(int client)
{
    say(client, "a question");
    expect(client, "a question");
    OK(shutdown(client, SHUT_WR));
    expect_eof(client);
    OK(close(client));
}

static void *accept_before_exec(void *listener)
{
    accept(*(int *)listener, NULL, NULL);
    FAIL("a client was accepted before exec");
}

// The channel to a server in another process, with clients that send nothing until the server has polled them.
struct silence {
    struct address bound;
    int listener;
    int way;
    int clients[500];
};

static pid_t start_server(struct silence *silence, int clients)
{
    int ways[2];
    silence->bound = ip4("127.0.0.1", 0);
    silence->listener = listen_at(&silence->bound, clients + 8);
    silence->bound = name_of(silence->listener);
    defer(silence->listener, 60);
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, ways));
    pid_t pid = fork_child();
    OK(close(ways[pid == 0 ? 0 : 1]));
    silence->way = ways[pid == 0 ? 1 : 0];
    if (pid == 0) {
        expect(silence->way, "all are there");
        expect_no_client(silence->listener);
        OK(fcntl(silence->listener, F_SETFL, 0));
        return 0;
    }
    OK(close(silence->listener));
    for (int i = 0; i < clients; i++)
        silence->clients[i] = dial(&silence->bound);
    say(silence->way, "all are there");
    expect(silence->way, "seen");
    return pid;
}

// A server that has polled its silent clients replaces itself by another program.
static void replace_by_exec(int clients, bool has_thread)
{
    struct silence silence;
    pid_t pid = start_server(&silence, clients);
    if (pid == 0) {
        if (has_thread) {
            start_thread(accept_before_exec, &silence.listener);
            pause_ms(SILENCE_MS);
        }
        notify_and_close_on_exec(silence.way);
        become_echo(silence.listener, clients);
    }
    expect_eof(silence.way);
    for (int i = clients; i-- > 0;)
        check_echo(silence.clients[i]);
    wait_child(pid);
}

TEST(defer_accept_keeps_clients_across_exec)
{
    replace_by_exec(3, false);
}

TEST(defer_accept_keeps_many_clients_across_exec)
{
    replace_by_exec(500, false);
}

TEST(defer_accept_keeps_clients_across_exec_while_a_thread_accepts)
{
    replace_by_exec(3, true);
}

TEST(defer_accept_keeps_clients_when_exec_fails)
{
    char empty[] = "/tmp/semantics-XXXXXX";
    int file = OK(mkostemp(empty, O_CLOEXEC));
    OK(fchmod(file, 0700));
    OK(close(file));
    const struct { const char *path; int error; } refused[] =
        {{"/nonexistent", ENOENT}, {"/dev/null", EACCES}, {empty, ENOEXEC}};
    for (int i = 0; i < 3; i++) {
        struct address bound;
        int listener = deferring_listener(&bound), silent = dial(&bound), client = dial(&bound);
        int epoll = epoll_with(listener, EPOLLIN | EPOLLET);
        expect_no_client(listener);
        epoll_none(epoll);
        CHECK_ERR(execv(refused[i].path, echo_of(listener, 1)), refused[i].error);
        expect_no_client(listener);
        epoll_none(epoll);
        say(client, "still here");
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
        int server = accept_from(listener);
        expect(server, "still here");
        ping_pong(client, server);
        say(silent, "me too");
        CHECK_EQ(epoll_one(epoll).events, EPOLLIN);
        expect(accept_from(listener), "me too");
    }
    OK(unlink(empty));
}

// How a server that has polled its silent clients starts another program with the listener, before closing its own.
enum starting { BY_FORK, BY_FORK_FROM_A_LOOP, BY_VFORK, BY_SPAWN };

static pid_t start_echo(enum starting how, int listener, int clients)
{
    char *const *arguments = echo_of(listener, clients);
    pid_t pid;
    if (how == BY_SPAWN) {
        CHECK_EQ(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ), 0);
    } else if (how == BY_VFORK) {
        pid = vfork();
        if (pid == 0) {
            execv("/proc/self/exe", arguments);
            _exit(9);
        }
    } else {
        pid = fork_child();
        if (pid == 0)
            become_echo(listener, clients);
    }
    return pid;
}

static void hand_over_to_a_program(enum starting how)
{
    struct silence silence;
    pid_t pid = start_server(&silence, 3);
    if (pid == 0) {
        if (how == BY_FORK_FROM_A_LOOP)
            epoll_none(epoll_with(silence.listener, EPOLLIN));
        pid_t program = start_echo(how, silence.listener, 3);
        say(silence.way, "seen");
        expect(silence.way, "the program serves");
        expect_silent(silence.listener, POLLIN);
        OK(close(silence.listener));
        say(silence.way, "closed");
        wait_child(program);
        _exit(0);
    }
    check_echo(silence.clients[0]);
    say(silence.way, "the program serves");
    expect(silence.way, "closed");
    check_echo(silence.clients[1]);
    check_echo(silence.clients[2]);
    wait_child(pid);
}

TEST(defer_accept_hands_clients_over_by_fork_and_exec)
{
    hand_over_to_a_program(BY_FORK);
}

TEST(defer_accept_hands_clients_over_from_a_loop)
{
    hand_over_to_a_program(BY_FORK_FROM_A_LOOP);
}

TEST(defer_accept_hands_clients_over_by_vfork)
{
    hand_over_to_a_program(BY_VFORK);
}

TEST(defer_accept_hands_clients_over_by_posix_spawn)
{
    hand_over_to_a_program(BY_SPAWN);
}

TEST(a_finished_connection_can_be_dissolved)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.client, SHUT_WR));
    OK(shutdown(pair.server, SHUT_WR));
    expect_eof(pair.client);
    struct sockaddr nowhere = {.sa_family = AF_UNSPEC};
    OK(connect(pair.client, &nowhere, sizeof nowhere));
}
