// Options that decide which peers may connect to a socket, or which way its packets take. Lanes implement no keys,
// filters, marks or devices, so such a socket uses kernel TCP.
#include "check.h"

#include <linux/filter.h>

#ifndef SO_BINDTOIFINDEX
#define SO_BINDTOIFINDEX 62
#endif

// Sets a key that no peer has, for connections from 127.0.0.1.
static void require_md5_key(int fd)
{
    struct tcp_md5sig key = {.tcpm_keylen = 6, .tcpm_key = "secret"};
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    memcpy(&key.tcpm_addr, &from, sizeof from);
    if (setsockopt(fd, IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key) != 0)
        skip("this kernel has no TCP_MD5SIG");
}

// Attaches a filter that drops all packets.
static void drop_everything(int fd)
{
    struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog program = {1, &nothing};
    OK(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program));
}

// Requires a larger TTL than loopback packets have.
static void require_max_ttl(int fd)
{
    int hops = 255;
    OK(setsockopt(fd, IPPROTO_IP, IP_MINTTL, &hops, sizeof hops));
}

static int bound_listener(struct address *at)
{
    *at = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(fd, ADDRESS(at), at->size));
    *at = name_of(fd);
    return fd;
}

// A client that does not meet the demand gets no answer, and the listener gets no connection.
static void check_excluded(const struct address *at, int listener)
{
    int client = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    CHECK_ERR(connect(client, ADDRESS(at), at->size), EINPROGRESS);
    struct pollfd waiting[2] = {{.fd = listener, .events = POLLIN}, {.fd = client, .events = POLLOUT}};
    CHECK_EQ(poll(waiting, 2, 3 * SILENCE_MS), 0);
    OK(close(client));
}

typedef void demand_fn(int fd);

static void check_before_listen(demand_fn *demand)
{
    struct address at;
    int listener = bound_listener(&at);
    demand(listener);
    OK(listen(listener, 8));
    check_excluded(&at, listener);
}

// Accept and epoll both wait at the listener as before.
static void check_after_listen(demand_fn *demand)
{
    struct address at;
    int listener = bound_listener(&at), set = OK(epoll_create1(0));
    OK(listen(listener, 8));
    struct epoll_event event = {.events = EPOLLIN};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event));
    greet(&at, listener);
    demand(listener);
    check_excluded(&at, listener);
    CHECK_EQ(epoll_wait(set, &event, 1, 0), 0);
}

TEST(md5_keys_set_before_listen_are_required) { check_before_listen(require_md5_key); }
TEST(md5_keys_set_after_listen_are_required) { check_after_listen(require_md5_key); }
TEST(filters_attached_before_listen_drop) { check_before_listen(drop_everything); }
TEST(filters_attached_after_listen_drop) { check_after_listen(drop_everything); }
TEST(min_ttl_set_before_listen_is_enforced) { check_before_listen(require_max_ttl); }
TEST(min_ttl_set_after_listen_is_enforced) { check_after_listen(require_max_ttl); }

// A client's demands on packets also apply to a server that has lanes.
static void check_client(demand_fn *demand)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int client = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
    demand(client);
    CHECK_ERR(connect(client, ADDRESS(&at), at.size), EINPROGRESS);
    struct pollfd waiting = {.fd = client, .events = POLLOUT};
    CHECK_EQ(poll(&waiting, 1, 3 * SILENCE_MS), 0);
    OK(close(client));
    OK(close(listener));
}

TEST(md5_keys_of_a_client_are_required) { check_client(require_md5_key); }
TEST(filters_of_a_client_drop) { check_client(drop_everything); }
TEST(min_ttl_of_a_client_is_enforced) { check_client(require_max_ttl); }

// A listener whose demand all clients meet continues to serve.
TEST(a_listener_serves_clients_that_meet_its_min_ttl)
{
    struct address at;
    int listener = bound_listener(&at), set = OK(epoll_create1(0)), hops = 1;
    OK(listen(listener, 8));
    struct epoll_event event = {.events = EPOLLIN, .data = {.u64 = 7}};
    OK(epoll_ctl(set, EPOLL_CTL_ADD, listener, &event));
    OK(setsockopt(listener, IPPROTO_IP, IP_MINTTL, &hops, sizeof hops));
    int client = dial(&at);
    CHECK_EQ(epoll_wait(set, &event, 1, WAIT_MS_MAX), 1);
    CHECK_EQ(event.data.u64, 7);
    int server = accept_from(listener);
    ping_pong(client, server);
    socklen_t size = sizeof hops;
    OK(getsockopt(server, IPPROTO_IP, IP_MINTTL, &hops, &size));
    CHECK_EQ(hops, 1);
}

TEST(a_v6only_client_cannot_reach_a_mapped_address)
{
    require_ip6();
    struct address at, any = ip6("::", 0);
    int listener = listen_at(&any, 8), on = 1;
    at = name_of(listener);
    at = ip6("::ffff:127.0.0.1", port_of(&at));
    int client = OK(socket(AF_INET6, SOCK_STREAM, 0));
    OK(setsockopt(client, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on));
    CHECK_ERR(connect(client, ADDRESS(&at), at.size), ENETUNREACH);
    OK(close(listener));
}

// A connection ignores none of these options: setsockopt either succeeds and the option has effect, or it fails.
TEST(security_options_of_a_connection_hold_or_are_refused)
{
    struct pair pair = connected_pair();
    struct tcp_md5sig key = {.tcpm_keylen = 6, .tcpm_key = "secret"};
    struct sockaddr_in from = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    memcpy(&key.tcpm_addr, &from, sizeof from);
    struct sock_filter nothing = BPF_STMT(BPF_RET | BPF_K, 0);
    struct sock_fprog program = {1, &nothing};
    int hops = 255, device = 1;
    bool holds = setsockopt(pair.client, IPPROTO_TCP, TCP_MD5SIG, &key, sizeof key) == 0;
    CHECK(holds || errno == EOPNOTSUPP || errno == ENOPROTOOPT);
    if (setsockopt(pair.client, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0)
        holds = true;
    else
        CHECK_EQ(errno, EOPNOTSUPP);
    if (setsockopt(pair.client, IPPROTO_IP, IP_MINTTL, &hops, sizeof hops) == 0)
        holds = true;
    else
        CHECK_EQ(errno, EOPNOTSUPP);
    if (setsockopt(pair.client, SOL_SOCKET, SO_BINDTOIFINDEX, &device, sizeof device) != 0)
        CHECK(errno == EOPNOTSUPP || errno == EPERM);
    send_all(pair.server, "ping", 4);
    if (holds) {
        struct pollfd waiting = {.fd = pair.client, .events = POLLIN};
        CHECK_EQ(poll(&waiting, 1, 3 * SILENCE_MS), 0);
    } else {
        expect(pair.client, "ping");
    }
    hops = 0;
    OK(setsockopt(pair.client, IPPROTO_IP, IP_MINTTL, &hops, sizeof hops));
}
