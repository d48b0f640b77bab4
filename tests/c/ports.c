// Ports that connections occupy.
#include "check.h"

static int fresh(int shares)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &shares, sizeof shares));
    return fd;
}

static void expect_taken(struct address where, int shares)
{
    int fd = fresh(shares);
    CHECK_ERR(bind(fd, ADDRESS(&where), where.size), EADDRINUSE);
    OK(close(fd));
}

static void expect_free(struct address where, int shares)
{
    int fd = fresh(shares);
    OK(bind(fd, ADDRESS(&where), where.size));
    OK(close(fd));
}

// TCP releases a connection's port when the last acknowledgement has arrived.
static void expect_free_soon(struct address where)
{
    int fd = fresh(0), tries = 0;
    while (bind(fd, ADDRESS(&where), where.size) < 0) {
        CHECK_EQ(errno, EADDRINUSE);
        CHECK(++tries < WAIT_MS_MAX / 10);
        pause_ms(10);
    }
    OK(close(fd));
}

// Returns one of two addresses that only this process uses; on shared addresses other processes occupy ports.
static struct address own_address(int which)
{
    int pid = getpid();
    char text[32];
    snprintf(text, sizeof text, "127.%d.%d.%d", 128 + (pid >> 14 & 63), pid >> 6 & 255, (pid & 63) * 2 + 1 + which);
    return ip4(text, 0);
}

static int dial_from(const struct address *to, const struct address *from, int shares)
{
    int fd = fresh(shares);
    OK(bind(fd, ADDRESS(from), from->size));
    OK(connect(fd, ADDRESS(to), to->size));
    return fd;
}

TEST(port_of_a_client_is_taken)
{
    struct address at, here = own_address(0);
    int listener = listen_anywhere(&at), client = dial_from(&at, &here, 0), server = accept_from(listener);
    struct address own = name_of(client), elsewhere = own_address(1);
    uint16_t port = port_of(&own);
    ((struct sockaddr_in *)&elsewhere.storage)->sin_port = htons(port);
    for (int shares = 0; shares < 2; shares++) {
        expect_taken(own, shares);
        expect_taken(ip4("0.0.0.0", port), shares);
        expect_free(elsewhere, shares);
    }
    OK(close(server));
    expect_eof(client);
    expect_taken(own, 0);
    OK(close(client));
    expect_free_soon(own);
}

TEST(port_of_a_client_is_taken_for_ip6_sockets_of_both_families)
{
    require_ip6();
    struct pair pair = connected_pair();
    struct address own = name_of(pair.client), any = ip6("::", port_of(&own));
    int both = OK(socket(AF_INET6, SOCK_STREAM, 0)), alone = OK(socket(AF_INET6, SOCK_STREAM, 0));
    CHECK_ERR(bind(both, ADDRESS(&any), any.size), EADDRINUSE);
    OK(setsockopt(alone, IPPROTO_IPV6, IPV6_V6ONLY, &(int){1}, sizeof(int)));
    OK(bind(alone, ADDRESS(&any), any.size));
}

TEST(port_of_another_processes_client_is_taken)
{
    struct address bound, own = {0};
    int listener = listen_anywhere(&bound);
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(listener));
        int client = dial(&bound);
        expect_eof(client);
        _exit(0);
    }
    int server = accept_from(listener);
    own = peer_of(server);
    expect_taken(own, 0);
    expect_taken(own, 1);
    expect_taken(ip4("0.0.0.0", port_of(&own)), 1);
    OK(close(server));
    wait_child(pid);
}

TEST(port_of_a_reuseaddr_client_is_free_with_reuseaddr)
{
    struct address one, other, here = own_address(0);
    listen_anywhere(&one);
    listen_anywhere(&other);
    struct address own = name_of(dial_from(&one, &here, 1));
    expect_taken(own, 0);
    expect_free(own, 1);
    dial_from(&other, &own, 1); // to another address, so the connections differ
}

TEST(two_connections_never_have_the_same_addresses)
{
    struct address bound, here = own_address(0);
    int listener = listen_anywhere(&bound), client = dial_from(&bound, &here, 1), server = accept_from(listener);
    struct address own = name_of(client);
    int second = fresh(1);
    OK(bind(second, ADDRESS(&own), own.size));
    CHECK_ERR(connect(second, ADDRESS(&bound), bound.size), EADDRNOTAVAIL);
    ping_pong(client, server);
}

// Connects so often that the kernel would choose some port twice if it did not know of the connections. A program
// that asks for the port before it connects relies on it.
static void connect_many_from_ports_of_the_kernel(int asks)
{
    struct address bound, here = own_address(0);
    int listener = listen_anywhere(&bound);
    for (int i = 0; i < 600; i++) {
        int client = fresh(0);
        OK(bind(client, ADDRESS(&here), here.size));
        struct address chosen = here;
        if (asks)
            chosen = name_of(client);
        OK(connect(client, ADDRESS(&bound), bound.size));
        struct address own = name_of(client);
        if (asks)
            CHECK_EQ(port_of(&own), port_of(&chosen));
        int server = OK(accept(listener, NULL, NULL));
        struct address peer = peer_of(server);
        CHECK_EQ(port_of(&peer), port_of(&own));
        OK(close(server)); // the client still occupies the port
    }
}

TEST(a_port_chosen_by_the_kernel_is_free_to_connect_from)
{
    connect_many_from_ports_of_the_kernel(0);
}

// A connection whose port a lane occupies uses the kernel.
TEST(a_port_that_getsockname_reported_is_kept)
{
    connect_many_from_ports_of_the_kernel(1);
}

TEST(port_of_an_accepted_connection_is_taken_without_its_listener)
{
    for (int is_shut = 0; is_shut < 2; is_shut++) {
        struct address bound;
        int listener = listen_anywhere(&bound), client = dial(&bound), server = accept_from(listener);
        if (is_shut)
            OK(shutdown(listener, SHUT_RD));
        else
            OK(close(listener));
        expect_taken(bound, 0);
        expect_taken(ip4("0.0.0.0", port_of(&bound)), 0);
        ping_pong(client, server);
        OK(close(client));
        expect_eof(server);
        expect_taken(bound, 0); // the server has not shut down its stream
    }
}

TEST(port_of_a_connection_accepted_by_another_process_is_taken)
{
    struct address bound;
    int listener = listen_anywhere(&bound), client = dial(&bound);
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(client));
        int server = accept_from(listener);
        OK(close(listener));
        say(server, "accepted");
        expect_eof(server);
        _exit(0);
    }
    expect(client, "accepted");
    OK(close(listener));
    expect_taken(bound, 0);
    OK(shutdown(client, SHUT_WR));
    wait_child(pid);
}

TEST(a_reuseaddr_server_restarts_on_its_address)
{
    struct address bound = ip4("127.0.0.1", 0);
    int listener = fresh(1);
    OK(bind(listener, ADDRESS(&bound), bound.size));
    OK(listen(listener, 8));
    bound = name_of(listener);
    int client = dial(&bound), server = accept_from(listener);
    OK(close(listener));
    expect_taken(bound, 0);
    int again = fresh(1);
    OK(bind(again, ADDRESS(&bound), bound.size));
    OK(listen(again, 8));
    greet(&bound, again);
    ping_pong(client, server);
}
