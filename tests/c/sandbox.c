// Sandboxes that a program enters: what they forbid stays forbidden, and what they allow continues to work.
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

// Restricts this process to connecting to this port.
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

// Neither a blocking nor a non-blocking connect succeeds, and the listener sees neither.
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

// ---- system call filters ------------------------------------------------------------------------

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>

// Installs a filter that kills the process at any system call but these.
static void filter_to(const int *allowed, int count, bool by_syscall)
{
    struct sock_filter steps[32];
    int n = 0;
    steps[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < count; i++) {
        steps[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, allowed[i], 0, 1);
        steps[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
    steps[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {n, steps};
    OK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    if (by_syscall)
        OK(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program));
    else
        OK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program));
}

static const int bytes_alone[] = {SYS_read, SYS_write, SYS_close, SYS_exit, SYS_exit_group, SYS_rt_sigreturn};
// The system call of libc's poll: newer architectures have only ppoll.
#ifdef SYS_poll
#define SYS_OF_POLL SYS_poll
#else
#define SYS_OF_POLL SYS_ppoll
#endif
static const int bytes_and_poll[] = {SYS_read,       SYS_write,        SYS_close, SYS_exit,
                                     SYS_exit_group, SYS_rt_sigreturn, SYS_OF_POLL};
static const int bytes_and_select[] = {SYS_read,         SYS_write,    SYS_close,   SYS_exit_group,
                                       SYS_rt_sigreturn, SYS_pselect6,
#ifdef SYS_select
                                       SYS_select,
#endif
};
static const int messages_alone[] = {SYS_recvfrom, SYS_sendto, SYS_exit_group, SYS_rt_sigreturn};
#define FILTER(calls, by_syscall) filter_to(calls, sizeof(calls) / sizeof *(calls), by_syscall)

// The calls that move bytes and wait for them. A filtered process can report only by its exit code.
enum calls { BYTES, BYTES_AND_POLL, BYTES_AND_SELECT, MESSAGES };

static bool write_all(int fd, const char *bytes, size_t size, enum calls calls)
{
    for (size_t done = 0; done < size;) {
        size_t left = size - done;
        errno = 0;
        ssize_t went = calls != MESSAGES ? write(fd, bytes + done, left) : send(fd, bytes + done, left, 0);
        if (went <= 0 || errno != 0)
            return false;
        done += went;
    }
    return true;
}

static bool read_all(int fd, char *bytes, size_t size, enum calls calls)
{
    for (size_t done = 0; done < size;) {
        size_t left = size - done;
        errno = 0;
        ssize_t got = calls != MESSAGES ? read(fd, bytes + done, left) : recv(fd, bytes + done, left, 0);
        if (got <= 0 || errno != 0)
            return false;
        done += got;
    }
    return true;
}

#define ROUNDS 500
#define BLOCK_BYTES (3 << 20)

static void fill(char *bytes, size_t size, unsigned seed)
{
    for (size_t i = 0; i < size; i++)
        bytes[i] = (char)((i * 31 + i / 4093 + seed) % 251);
}

static bool is_readable_soon(int fd, enum calls calls)
{
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    if (calls == BYTES_AND_POLL)
        return poll(&waiting, 1, WAIT_MS_MAX) == 1 && waiting.revents == POLLIN;
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    struct timeval limit = {.tv_sec = WAIT_MS_MAX / 1000};
    return calls != BYTES_AND_SELECT || (select(fd + 1, &set, NULL, NULL, &limit) == 1 && FD_ISSET(fd, &set));
}

// The filtered side answers, then sends a block that the other side reads late, then receives a block.
static int filtered_side(int fd, char *block, enum calls calls)
{
    char text[600];
    for (int i = 0; i < ROUNDS; i++) {
        if (!is_readable_soon(fd, calls))
            return 10;
        if (!read_all(fd, text, sizeof text, calls) || text[7] != (char)i)
            return 11;
        if (!write_all(fd, text, sizeof text, calls))
            return 12;
    }
    if (!write_all(fd, block, BLOCK_BYTES, calls))
        return 13;
    if (!read_all(fd, block, BLOCK_BYTES, calls))
        return 14;
    for (size_t i = 0; i < BLOCK_BYTES; i++)
        if (block[i] != (char)((i * 31 + i / 4093 + 5) % 251))
            return 15;
    // The other side waits for this byte and then closes.
    if (!write_all(fd, "!", 1, calls) || read_all(fd, text, 1, calls))
        return 16;
    return 0;
}

static void other_side(int fd, bool is_nonblocking)
{
    char *block = malloc(BLOCK_BYTES), *want = malloc(BLOCK_BYTES), text[600] = "", answer[600];
    for (int i = 0; i < ROUNDS; i++) {
        text[7] = (char)i;
        send_all(fd, text, sizeof text);
        recv_exact(fd, answer, sizeof answer);
        CHECK(memcmp(text, answer, sizeof text) == 0);
    }
    usleep(50000); // The filtered side has no room meanwhile.
    recv_exact(fd, block, BLOCK_BYTES);
    fill(want, BLOCK_BYTES, 3);
    CHECK(memcmp(block, want, BLOCK_BYTES) == 0);
    fill(block, BLOCK_BYTES, 5);
    if (is_nonblocking)
        OK(fcntl(fd, F_SETFL, O_NONBLOCK));
    for (size_t done = 0; done < BLOCK_BYTES;) {
        ssize_t went = write(fd, block + done, BLOCK_BYTES - done);
        if (went < 0) {
            CHECK_EQ(errno, EAGAIN);
            struct pollfd waiting = {.fd = fd, .events = POLLOUT};
            CHECK_EQ(poll(&waiting, 1, WAIT_MS_MAX), 1);
            continue;
        }
        done += went;
    }
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    CHECK_EQ(poll(&waiting, 1, WAIT_MS_MAX), 1);
    expect(fd, "!");
    OK(fcntl(fd, F_SETFL, 0));
    free(block);
    free(want);
}

// `rounds_before`: the exchanges before the filter is installed, which decide whether the connection uses its
// lifeline or lanes.
static void check_filtered(int rounds_before, enum calls calls, bool by_syscall, bool is_client)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int child = OK(fork()), status;
    int fd = (child == 0) == is_client ? dial(&at) : accept_from(listener);
    bool asks = child != 0;
    char text[100] = "before";
    for (int i = 0; i < rounds_before; i++) {
        if (asks)
            send_all(fd, text, sizeof text);
        recv_exact(fd, text, sizeof text);
        if (!asks)
            send_all(fd, text, sizeof text);
    }
    if (child == 0) {
        char *block = malloc(BLOCK_BYTES);
        fill(block, BLOCK_BYTES, 3);
        switch (calls) {
        case BYTES:
            FILTER(bytes_alone, by_syscall);
            break;
        case BYTES_AND_POLL:
            FILTER(bytes_and_poll, by_syscall);
            break;
        case BYTES_AND_SELECT:
            FILTER(bytes_and_select, by_syscall);
            break;
        case MESSAGES:
            FILTER(messages_alone, by_syscall);
        }
        int outcome = filtered_side(fd, block, calls);
        if (calls != MESSAGES && close(fd) != 0)
            outcome = 17;
        syscall(SYS_exit_group, outcome);
    }
    other_side(fd, calls == BYTES_AND_POLL);
    OK(shutdown(fd, SHUT_WR));
    expect_eof(fd);
    OK(waitpid(child, &status, 0));
    CHECK_EQ(status, 0);
}

#define FILTERED(name, rounds, calls, by_syscall)                                                  \
    TEST(name##_of_a_server) { check_filtered(rounds, calls, by_syscall, false); }                 \
    TEST(name##_of_a_client) { check_filtered(rounds, calls, by_syscall, true); }

FILTERED(a_filter_of_bytes_on_a_new_connection, 0, BYTES, false)
FILTERED(a_filter_of_bytes_on_a_busy_connection, 200, BYTES, true)
FILTERED(a_filter_of_bytes_and_poll_on_a_new_connection, 1, BYTES_AND_POLL, true)
FILTERED(a_filter_of_bytes_and_poll_on_a_busy_connection, 200, BYTES_AND_POLL, false)
FILTERED(a_filter_of_bytes_and_select_on_a_new_connection, 1, BYTES_AND_SELECT, false)
FILTERED(a_filter_of_bytes_and_select_on_a_busy_connection, 200, BYTES_AND_SELECT, true)
FILTERED(a_filter_of_messages_on_a_new_connection, 2, MESSAGES, false)
FILTERED(a_filter_of_messages_on_a_busy_connection, 200, MESSAGES, true)

// A filter that the kernel refuses changes nothing.
TEST(a_filter_that_is_refused_leaves_connections_as_they_are)
{
    struct pair pair = connected_pair();
    CHECK_ERR(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, NULL), EFAULT);
    for (int i = 0; i < 50; i++)
        ping_pong(pair.client, pair.server);
    struct address mine = name_of(pair.client), seen = peer_of(pair.server);
    check_same_address(&mine, &seen);
    close_pair(&pair);
}

// ---- limits -------------------------------------------------------------------------------------

#include <sys/resource.h>

// A write to a file beyond this limit raises SIGXFSZ; a connection writes no file.
TEST(a_process_that_may_write_no_files_connects)
{
    struct rlimit none = {0, 0};
    OK(setrlimit(RLIMIT_FSIZE, &none));
    struct pair pair = connected_pair();
    for (int i = 0; i < 100; i++)
        ping_pong(pair.client, pair.server);
    close_pair(&pair);
}
