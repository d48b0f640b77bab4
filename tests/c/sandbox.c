// Sandboxes that a program puts itself in: what they forbid stays forbidden, and what they allow goes on working.
#include "check.h"

#include <sys/prctl.h>
#include <sys/syscall.h>

#define CONNECT_TCP 2 // LANDLOCK_ACCESS_NET_CONNECT_TCP
#define RULE_NET_PORT 2

static void require_landlock_of_ports(void)
{
    if (syscall(SYS_landlock_create_ruleset, 0, 0, 1) < 4)
        skip("this kernel has no Landlock rules about TCP ports");
}

// From now on this process may connect to this port alone.
static void allow_port(uint16_t port)
{
    struct {
        uint64_t fs, net;
    } handled = {0, CONNECT_TCP};
    struct {
        uint64_t allowed, port;
    } rule = {CONNECT_TCP, port};
    int rules = OK(syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0));
    OK(syscall(SYS_landlock_add_rule, rules, RULE_NET_PORT, &rule, 0));
    OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    OK(syscall(SYS_landlock_restrict_self, rules, 0));
    OK(close(rules));
}

// Neither a blocking connect nor one in non-blocking mode gets through, and the listener hears of neither.
static void check_denied(const struct address *where, int listener)
{
    for (int flags = 0; flags <= SOCK_NONBLOCK; flags += SOCK_NONBLOCK) {
        int fd = OK(socket(where->storage.ss_family, SOCK_STREAM | flags, 0));
        CHECK_ERR(connect(fd, ADDRESS(where), where->size), EACCES);
        CHECK_ERR(getpeername(fd, ADDRESS(&(struct address){.size = 1}), &(socklen_t){0}), ENOTCONN);
        OK(close(fd));
    }
    struct pollfd waiting = {.fd = listener, .events = POLLIN};
    CHECK_EQ(poll(&waiting, 1, SILENCE_MS), 0);
}

static void check_landlock_at(const struct address *any)
{
    require_landlock_of_ports();
    int forbidden = listen_at(any, 8), allowed = listen_at(any, 8);
    struct address forbidden_at = name_of(forbidden), allowed_at = name_of(allowed);
    allow_port(port_of(&allowed_at));
    check_denied(&forbidden_at, forbidden);
    greet(&allowed_at, allowed);
    // A child and its socket are under the same rules.
    int child = OK(fork()), status;
    if (child == 0) {
        check_denied(&forbidden_at, forbidden);
        greet(&allowed_at, allowed);
        _exit(0);
    }
    OK(waitpid(child, &status, 0));
    CHECK_EQ(status, 0);
}

TEST(landlock_denies_connects_ip4)
{
    struct address any = ip4("127.0.0.1", 0);
    check_landlock_at(&any);
}

TEST(landlock_denies_connects_ip6)
{
    require_ip6();
    struct address any = ip6("::1", 0);
    check_landlock_at(&any);
}
