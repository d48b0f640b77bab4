// dup in all its forms, shared streams, limits.
#include "check.h"

#include <sys/resource.h>
#include <sys/syscall.h>

static void check_copy_shares(struct pair *pair, int copy)
{
    CHECK(copy != pair->client);
    say(pair->client, "one");
    say(copy, "two");
    expect(pair->server, "onetwo");
    say(pair->server, "abcd");
    expect(copy, "ab");
    expect(pair->client, "cd");
    OK(close(pair->client));
    expect_silent(pair->server, POLLIN); // the copy keeps the connection alive
    ping_pong(copy, pair->server);
    OK(close(copy));
    expect_eof(pair->server);
}

TEST(dup_shares_the_stream)
{
    struct pair pair = connected_pair();
    check_copy_shares(&pair, OK(dup(pair.client)));
}

TEST(dup2_shares_the_stream)
{
    struct pair pair = connected_pair();
    CHECK_EQ(dup2(pair.client, 300), 300);
    check_copy_shares(&pair, 300);
}

TEST(dup3_with_bad_flags_closes_nothing)
{
    struct pair pair = connected_pair(), other = connected_pair();
    CHECK_ERR(dup3(pair.client, other.client, O_APPEND), EINVAL);
    ping_pong(other.client, other.server);
    ping_pong(pair.client, pair.server);
}

TEST(dup3_shares_the_stream)
{
    struct pair pair = connected_pair();
    CHECK_EQ(dup3(pair.client, 301, O_CLOEXEC), 301);
    CHECK_EQ(OK(fcntl(301, F_GETFD)), FD_CLOEXEC);
    check_copy_shares(&pair, 301);
}

TEST(f_dupfd_shares_the_stream)
{
    struct pair pair = connected_pair();
    int copy = OK(fcntl(pair.client, F_DUPFD, 302));
    CHECK_EQ(copy, 302);
    check_copy_shares(&pair, copy);
}

TEST(f_dupfd_cloexec_shares_the_stream)
{
    struct pair pair = connected_pair();
    int copy = OK(fcntl(pair.client, F_DUPFD_CLOEXEC, 303));
    CHECK_EQ(OK(fcntl(copy, F_GETFD)), FD_CLOEXEC);
    check_copy_shares(&pair, copy);
}

TEST(dup2_onto_a_connection_closes_it)
{
    struct pair one = connected_pair(), two = connected_pair();
    OK(dup2(one.client, two.client));
    expect_eof(two.server);
    say(two.client, "now the first");
    expect(one.server, "now the first");
    ping_pong(one.client, one.server);
}

TEST(dup2_of_a_file_onto_a_connection_closes_it)
{
    struct pair pair = connected_pair();
    int pipe_ends[2];
    OK(pipe(pipe_ends));
    OK(dup2(pipe_ends[1], pair.client));
    expect_eof(pair.server);
    CHECK_EQ(write(pair.client, "to the pipe", 11), 11);
    char buffer[16];
    CHECK_EQ(read(pipe_ends[0], buffer, 16), 11);
}

TEST(dup2_onto_itself_changes_nothing)
{
    struct pair pair = connected_pair();
    CHECK_EQ(dup2(pair.client, pair.client), pair.client);
    ping_pong(pair.client, pair.server);
    CHECK_ERR(dup3(pair.client, pair.client, 0), EINVAL);
    CHECK_ERR(dup2(987, pair.client), EBADF);
    CHECK_ERR(dup2(pair.client, -1), EBADF);
    ping_pong(pair.client, pair.server);
}

TEST(dup_of_a_listener_accepts)
{
    struct address at;
    int listener = listen_anywhere(&at), copy = OK(dup(listener));
    greet(&at, copy);
    OK(close(listener));
    greet(&at, copy);
    OK(close(copy));
    CHECK_ERR(try_dial(&at), ECONNREFUSED);
}

TEST(dup_before_connect_is_connected_too)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0)), copy = OK(dup(fd));
    OK(connect(fd, ADDRESS(&at), at.size));
    int server = accept_from(listener);
    ping_pong(fd, server);
    ping_pong(copy, server);
}

TEST(dup_before_listen_listens_too)
{
    struct address any = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0)), copy = OK(dup(fd));
    OK(bind(fd, ADDRESS(&any), any.size));
    OK(listen(copy, 8));
    struct address at = name_of(fd);
    OK(close(copy));
    greet(&at, fd);
}

TEST(nonblocking_is_shared_by_copies)
{
    struct pair pair = connected_pair();
    int copy = OK(dup(pair.server));
    set_nonblocking(copy);
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, 0), EAGAIN);
    CHECK_EQ(OK(fcntl(pair.server, F_GETFL)) & O_NONBLOCK, O_NONBLOCK);
}

TEST(shutdown_through_a_copy_shuts_all)
{
    struct pair pair = connected_pair();
    int copy = OK(dup(pair.client));
    OK(shutdown(copy, SHUT_WR));
    expect_eof(pair.server);
    CHECK_ERR(send(pair.client, "x", 1, MSG_NOSIGNAL), EPIPE);
    say(pair.server, "back");
    expect(pair.client, "back");
}

TEST(options_are_shared_by_copies)
{
    struct pair pair = connected_pair();
    int copy = OK(dup(pair.client)), yes = 1, got = 0;
    socklen_t size = sizeof got;
    OK(setsockopt(pair.client, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes));
    OK(getsockopt(copy, IPPROTO_TCP, TCP_NODELAY, &got, &size));
    CHECK(got != 0);
}

TEST(open_by_proc_is_refused_as_for_any_socket)
{
    struct pair pair = connected_pair();
    char path[64], target[64] = {0};
    snprintf(path, sizeof path, "/proc/self/fd/%d", pair.client);
    CHECK_ERR(open(path, O_RDWR), ENXIO);
    ssize_t size = OK(readlink(path, target, sizeof target - 1));
    CHECK(size > 8 && memcmp(target, "socket:[", 8) == 0);
}

static void limit_descriptors(rlim_t count)
{
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = count;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
}

// Sets the descriptor limit such that `count` numbers are free, wherever the open ones are.
static void leave_descriptors(int count)
{
    int fds[64];
    CHECK(count <= 64);
    for (int i = 0; i < count; i++)
        fds[i] = OK(dup(2));
    limit_descriptors(fds[count - 1] + 1);
    while (count > 0)
        OK(close(fds[--count]));
}

TEST(socket_at_the_limit_is_emfile)
{
    int next = OK(dup(2));
    OK(close(next));
    limit_descriptors(next + 1);
    int last = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(socket(AF_INET, SOCK_STREAM, 0), EMFILE);
    OK(close(last));
    last = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(dup(last), EMFILE);
}

TEST(accept_at_the_limit_is_emfile_and_loses_nothing)
{
    struct address at;
    int listener = listen_anywhere(&at), client = dial(&at);
    say(client, "waiting");
    int spare = OK(dup(2));
    limit_descriptors(spare + 1);
    CHECK_ERR(accept(listener, NULL, NULL), EMFILE);
    CHECK_ERR(accept(listener, NULL, NULL), EMFILE);
    OK(close(spare));
    int server = accept_from(listener);
    expect(server, "waiting");
    ping_pong(client, server);
}

TEST(connect_at_the_limit_needs_no_descriptor)
{
    struct address at;
    int listener = listen_anywhere(&at), fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    limit_descriptors(fd + 1);
    OK(connect(fd, ADDRESS(&at), at.size));
    limit_descriptors(512);
    ping_pong(fd, accept_from(listener));
}

TEST(listen_at_the_limit_needs_no_descriptor)
{
    struct address any = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(fd, ADDRESS(&any), any.size));
    limit_descriptors(fd + 1);
    OK(listen(fd, 8));
    limit_descriptors(512);
    struct address at = name_of(fd);
    greet(&at, fd);
}

TEST(a_program_at_the_limit_still_serves)
{
    // Opens up to the limit and closes everything, repeatedly: no descriptor may leak.
    struct address at;
    int listener = listen_anywhere(&at);
    leave_descriptors(40);
    for (int round = 0; round < 20; round++) {
        int fds[64], count = 0;
        while (count < 64) {
            int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
            OK(connect(fd, ADDRESS(&at), at.size));
            fds[count++] = fd;
            if ((fd = accept(listener, NULL, NULL)) < 0)
                break;
            fds[count++] = fd;
            if (count >= 38)
                break;
        }
        ping_pong(fds[0], fds[1]);
        while (count > 0)
            OK(close(fds[--count]));
    }
}

// ---- system calls by number ---------------------------------------------------------------------

TEST(syscall_by_number_closes) // as libuv does
{
    struct pair pair = connected_pair();
    OK(syscall(SYS_close, pair.client));
    expect_eof(pair.server);
    int pipe_fds[2];
    OK(pipe(pipe_fds));
    CHECK_EQ(pipe_fds[0], pair.client); // the lowest free number
    char bytes[4];
    CHECK_EQ(write(pipe_fds[1], "pipe", 4), 4);
    CHECK_EQ(read(pipe_fds[0], bytes, 4), 4);
    CHECK(memcmp(bytes, "pipe", 4) == 0);
}

TEST(syscall_by_number_moves_bytes)
{
    struct pair pair = connected_pair();
    char bytes[8];
    CHECK_EQ(syscall(SYS_sendto, pair.client, "abcd", 4, 0, NULL, 0), 4);
    CHECK_EQ(syscall(SYS_write, pair.client, "efgh", 4), 4);
    CHECK_EQ(syscall(SYS_recvfrom, pair.server, bytes, 4, MSG_WAITALL, NULL, NULL), 4);
    CHECK_EQ(syscall(SYS_read, pair.server, bytes + 4, 4), 4);
    CHECK(memcmp(bytes, "abcdefgh", 8) == 0);
    CHECK_ERR(syscall(SYS_recvfrom, pair.server, bytes, 4, MSG_DONTWAIT, NULL, NULL), EAGAIN);
}

TEST(syscall_by_number_makes_connections)
{
    struct address at;
    int listener = listen_anywhere(&at);
    int client = (int)OK(syscall(SYS_socket, AF_INET, SOCK_STREAM, 0));
    OK(syscall(SYS_connect, client, ADDRESS(&at), at.size));
    int server = (int)OK(syscall(SYS_accept4, listener, NULL, NULL, 0));
    ping_pong(client, server);
    int copy = (int)OK(syscall(SYS_dup, client));
    OK(close(client));
    ping_pong(copy, server);
    OK(syscall(SYS_shutdown, copy, SHUT_WR));
    expect_eof(server);
}

TEST(syscall_by_number_waits)
{
    struct pair pair = connected_pair();
    struct pollfd entry = {.fd = pair.server, .events = POLLIN};
    struct timespec limit = {.tv_nsec = 1000000};
    CHECK_EQ(syscall(SYS_ppoll, &entry, 1, &limit, NULL, 8), 0);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(pair.server, &set);
    limit = (struct timespec){.tv_nsec = 1000000};
    CHECK_EQ(syscall(SYS_pselect6, pair.server + 1, &set, NULL, NULL, &limit, NULL), 0);
    say(pair.client, "x");
    limit = (struct timespec){.tv_sec = WAIT_MS_MAX / 1000};
    CHECK_EQ(syscall(SYS_ppoll, &entry, 1, &limit, NULL, 8), 1);
    CHECK_EQ(entry.revents, POLLIN);
    FD_SET(pair.server, &set);
    sigset_t none;
    sigemptyset(&none);
    struct { const sigset_t *mask; size_t size; } mask = {&none, 8};
    CHECK_EQ(syscall(SYS_pselect6, pair.server + 1, &set, NULL, NULL, &limit, &mask), 1);
    CHECK(FD_ISSET(pair.server, &set));
}

TEST(syscall_by_number_splices)
{
    struct pair pair = connected_pair();
    int fds[2];
    OK(pipe(fds));
    say(pair.client, "spliced");
    CHECK_EQ(syscall(SYS_splice, pair.server, NULL, fds[1], NULL, 100, 0), 7);
    char bytes[8] = {0};
    CHECK_EQ(read(fds[0], bytes, 7), 7);
    CHECK(memcmp(bytes, "spliced", 7) == 0);
}

// ---- errno --------------------------------------------------------------------------------------

// A call that succeeds keeps errno, also when the library had to close hidden descriptors to make room.
TEST(duplicates_up_to_the_limit_leave_errno_alone)
{
    struct pair pairs[20];
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = 200;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    for (int i = 0; i < 20; i++) {
        pairs[i] = connected_pair();
        for (int round = 0; round < 4; round++)
            ping_pong(pairs[i].client, pairs[i].server);
    }
    for (int i = 0;; i++) {
        errno = 0;
        int fd = i % 2 ? dup(pairs[0].server) : fcntl(pairs[0].server, F_DUPFD, 0);
        if (fd < 0)
            break;
        CHECK_EQ(errno, 0);
    }
    CHECK_EQ(errno, EMFILE);
    ping_pong(pairs[19].client, pairs[19].server);
}

static rlim_t address_space_used(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    unsigned long pages;
    CHECK(file != NULL && fscanf(file, "%lu", &pages) == 1);
    fclose(file);
    return pages * 4096;
}

// A library that cannot allocate more memory for a connection continues without it and keeps errno.
TEST(calls_without_memory_to_spare_leave_errno_alone)
{
    struct pair pair = connected_pair();
    static char bytes[1 << 20];
    struct rlimit limit;
    set_nonblocking(pair.client);
    OK(getrlimit(RLIMIT_AS, &limit));
    limit.rlim_cur = address_space_used() + (1 << 20);
    OK(setrlimit(RLIMIT_AS, &limit));
    int yes = 1;
    OK(setsockopt(pair.client, IPPROTO_TCP, TCP_CORK, &yes, sizeof yes));
    CHECK_EQ(OK(send(pair.client, "corked", 6, 0)), 6);
    yes = 0;
    OK(setsockopt(pair.client, IPPROTO_TCP, TCP_CORK, &yes, sizeof yes));
    CHECK(OK(send(pair.client, bytes, sizeof bytes, 0)) > 0);
    await(pair.server, POLLIN);
    OK(recv(pair.server, bytes, sizeof bytes, 0));
    for (int round = 0; round < 8; round++) {
        OK(send(pair.client, "question", 8, 0));
        await(pair.server, POLLIN);
        OK(recv(pair.server, bytes, sizeof bytes, 0));
        OK(send(pair.server, "answer", 6, 0));
        await(pair.client, POLLIN);
        OK(recv(pair.client, bytes, 64, 0));
    }
}

// ---- numbers that change hands during a call ----------------------------------------------------

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

// As the kernel's own call, so that nothing takes the filter for a sandbox that the program enters.
static long raw_call(long number, long first, long second, long third)
{
#ifdef __aarch64__
    register long arg1 __asm__("x0") = first, arg2 __asm__("x1") = second, arg3 __asm__("x2") = third;
    register long arg4 __asm__("x3") = 0, arg5 __asm__("x4") = 0, nr __asm__("x8") = number;
    __asm__ volatile("svc 0" : "+r"(arg1) : "r"(arg2), "r"(arg3), "r"(arg4), "r"(arg5), "r"(nr) : "memory");
    return arg1;
#else
    register long fourth __asm__("r10") = 0, fifth __asm__("r8") = 0;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(first), "S"(second), "d"(third), "r"(fourth), "r"(fifth)
                     : "rcx", "r11", "memory");
    return result;
#endif
}

// Makes each system call of this thread that may use a socket wait for an answer. Returns the descriptor that reports
// them.
static int pause_at_socket_calls(void)
{
    static const int calls[] = {SYS_read,   SYS_write,   SYS_recvfrom, SYS_recvmsg,
                                SYS_sendto, SYS_sendmsg, SYS_ppoll,    SYS_ioctl,
#ifdef SYS_poll
                                SYS_poll,
#endif
    };
    enum { COUNT = sizeof calls / sizeof *calls };
    struct sock_filter steps[COUNT + 3];
    steps[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < COUNT; i++)
        steps[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], COUNT - i, 0);
    steps[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    steps[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF);
    struct sock_fprog program = {COUNT + 3, steps};
    CHECK_EQ(raw_call(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0), 0);
    return raw_call(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, (long)&program);
}

struct call_by_copy {
    int copy, pauses;
    bool sends;
    char bytes[8];
    volatile bool is_over;
};

static void *call_by_copy(void *argument)
{
    struct call_by_copy *call = argument;
    __atomic_store_n(&call->pauses, pause_at_socket_calls(), __ATOMIC_RELEASE);
    if (call->pauses >= 0)
        CHECK_EQ(call->sends ? send(call->copy, "hello", 5, 0) : recv(call->copy, call->bytes, 5, 0), 5);
    call->is_over = true;
    return NULL;
}

// Lets the paused call go on. At its system call number `step`, first closes `number`, which then names a connection
// that the call has nothing to do with. Returns whether the call made that many.
static bool change_number_at(struct call_by_copy *call, int step, int number, int other)
{
    bool is_changed = false;
    for (int seen = 0; !call->is_over;) {
        struct pollfd paused = {.fd = call->pauses, .events = POLLIN};
        // The end of the thread is reported too, by POLLHUP; older kernels would then block in the next call.
        if (poll(&paused, 1, 10) != 1 || !(paused.revents & POLLIN))
            continue;
        struct seccomp_notif notice = {0};
        if (ioctl(call->pauses, SECCOMP_IOCTL_NOTIF_RECV, &notice) != 0)
            continue;
        if (seen++ == step) {
            OK(close(number));
            CHECK_EQ(dup(other), number);
            is_changed = true;
        }
        struct seccomp_notif_resp answer = {.id = notice.id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
        ioctl(call->pauses, SECCOMP_IOCTL_NOTIF_SEND, &answer);
    }
    return is_changed;
}

static void check_calls_by_copies(bool sends, int round_trips)
{
    bool is_changed = true;
    for (int step = 0; is_changed; step++) {
        struct pair pair = connected_pair(), other = connected_pair();
        for (int i = 0; i < round_trips; i++) {
            ping_pong(pair.client, pair.server);
            ping_pong(other.client, other.server);
        }
        struct call_by_copy call = {.copy = OK(dup(pair.client)), .sends = sends, .pauses = INT32_MAX};
        if (!sends)
            say(pair.server, "hello");
        say(other.server, "secret");
        pthread_t thread = start_thread(call_by_copy, &call);
        while (__atomic_load_n(&call.pauses, __ATOMIC_ACQUIRE) == INT32_MAX)
            usleep(100);
        if (call.pauses < 0)
            skip("no notifications of system calls: %s", strerrorname_np(-call.pauses));
        is_changed = change_number_at(&call, step, pair.client, other.client);
        join_thread(thread);
        snprintf(failure_note, sizeof failure_note, "step %d: ", step);
        if (sends)
            expect(pair.server, "hello");
        else
            CHECK_EQ(memcmp(call.bytes, "hello", 5), 0);
        expect(other.client, "secret");
        expect_silent(other.server, POLLIN);
        ping_pong(other.client, other.server);
        ping_pong(call.copy, pair.server);
        OK(close(call.copy));
        OK(close(call.pauses));
        OK(close(pair.client)); // the other connection's, after the first change
        OK(close(pair.server));
        OK(close(pair.listener));
        close_pair(&other);
    }
}

TEST(a_receive_uses_no_number_that_was_closed_meanwhile) { check_calls_by_copies(false, 0); }
TEST(a_receive_in_memory_uses_no_number_that_was_closed_meanwhile) { check_calls_by_copies(false, 6); }
TEST(a_send_uses_no_number_that_was_closed_meanwhile) { check_calls_by_copies(true, 0); }
TEST(a_send_in_memory_uses_no_number_that_was_closed_meanwhile) { check_calls_by_copies(true, 6); }
