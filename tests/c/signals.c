// Signals during blocking calls and handlers that use sockets.
#include "check.h"

#include <setjmp.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>

// A signal soon after the start of the call must interrupt it, also while the wait is still spinning. A busy machine
// sometimes delivers a signal before the call.
#define CHECK_INTERRUPTED_SOON(call) CHECK_INTERRUPTED_SOON_AFTER((void)0, call)
#define CHECK_INTERRUPTED_SOON_AFTER(prepare, call)                                                \
    do {                                                                                           \
        int missed = 0;                                                                            \
        on_signal(SIGALRM, count_signal, 0);                                                       \
        for (int round = 0; round < 40; round++) {                                                 \
            signals_seen = 0;                                                                      \
            prepare;                                                                               \
            alarm_soon();                                                                          \
            CHECK_ERR(call, EINTR);                                                                \
            alarm_every_ms(0);                                                                     \
            missed += signals_seen > 1;                                                            \
        }                                                                                          \
        if (missed > 20)                                                                           \
            FAIL("%s missed %d of 40 signals", #call, missed);                                     \
    } while (0)

TEST(recv_is_interrupted_as_soon_as_it_waits)
{
    struct pair pair = connected_pair();
    char byte;
    CHECK_INTERRUPTED_SOON(recv(pair.server, &byte, 1, 0));
    ping_pong(pair.client, pair.server);
}

TEST(recv_with_time_out_is_interrupted_as_soon_as_it_waits)
{
    struct pair pair = connected_pair();
    struct timeval limit = {20, 0};
    char byte;
    OK(setsockopt(pair.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    CHECK_INTERRUPTED_SOON(recv(pair.server, &byte, 1, 0));
}

TEST(full_send_is_interrupted_as_soon_as_it_waits)
{
    struct pair pair = connected_pair();
    fill_until_full(pair.client);
    CHECK_INTERRUPTED_SOON(send(pair.client, "x", 1, 0));
}

TEST(accept_is_interrupted_as_soon_as_it_waits)
{
    struct address at;
    int listener = listen_anywhere(&at);
    CHECK_INTERRUPTED_SOON(accept(listener, NULL, NULL));
    greet(&at, listener);
}

static int select_readable(int fd)
{
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    return select(fd + 1, &set, NULL, NULL, NULL);
}

TEST(poll_and_select_are_interrupted_as_soon_as_they_wait)
{
    struct pair pair = connected_pair();
    struct pollfd entry = {.fd = pair.server, .events = POLLIN};
    CHECK_INTERRUPTED_SOON(poll(&entry, 1, WAIT_MS_MAX));
    CHECK_INTERRUPTED_SOON(select_readable(pair.server));
}

static void send_word(const struct pair *pair, int epoll)
{
    say(pair->client, "word");
    epoll_one(epoll);
    expect(pair->server, "word");
}

TEST(epoll_wait_is_interrupted_as_soon_as_it_waits)
{
    struct pair pair = connected_pair();
    struct epoll_event event;
    int epoll = epoll_with(pair.server, EPOLLIN);
    // After traffic, because an epoll wait spins longer on a connection that has just been busy.
    CHECK_INTERRUPTED_SOON_AFTER(send_word(&pair, epoll), epoll_wait(epoll, &event, 1, -1));
    ping_pong(pair.client, pair.server);
}

static void keep_signals_out(struct pair *pair, sigset_t *blocked)
{
    struct pollfd entry = {.fd = pair->server, .events = POLLIN};
    struct timespec limit = {0, 1000000};
    struct epoll_event event;
    int epoll = epoll_with(pair->server, EPOLLIN);
    for (int round = 0; round < 16; round++) {
        signals_seen = 0;
        send_word(pair, epoll);
        alarm_soon();
        CHECK_EQ(round % 2 ? ppoll(&entry, 1, &limit, blocked) : epoll_pwait(epoll, &event, 1, 1, blocked), 0);
        CHECK(signals_seen > 0);
        alarm_every_ms(0);
    }
    OK(close(epoll));
}

// On connections of every age: one that has just met its other end takes another way than a young one or a lane.
TEST(a_mask_keeps_signals_out_as_soon_as_a_call_waits)
{
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGALRM);
    on_signal(SIGALRM, count_signal, 0);
    for (int age = 0; age < 9; age++) {
        struct pair pair = connected_pair();
        for (int round = 0; round < age; round++)
            ping_pong(pair.client, pair.server);
        keep_signals_out(&pair, &blocked);
        OK(close(pair.client));
        OK(close(pair.server));
    }
}

static void *signal_main_thread(void *thread)
{
    for (int i = 0; i < 20; i++) {
        pause_ms(5);
        CHECK_EQ(pthread_kill(*(pthread_t *)thread, SIGUSR1), 0);
    }
    return NULL;
}

TEST(a_handler_in_another_thread_interrupts_no_wait)
{
    struct pair pair = connected_pair();
    pthread_t self = pthread_self();
    on_signal(SIGUSR1, count_signal, 0);
    pid_t pid = fork_child();
    if (pid == 0) {
        pause_ms(300);
        say(pair.client, "x");
        _exit(0);
    }
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, &usr1, NULL), 0);
    pthread_t thread = start_thread(signal_main_thread, &self);
    expect(pair.server, "x"); // the signal is blocked here: no handler runs in this thread
    join_thread(thread);
    wait_child(pid);
}

static volatile sig_atomic_t number_informed, sender_informed, value_informed;

static void note_information(int signal, siginfo_t *information, void *context)
{
    number_informed = context ? signal : -1;
    sender_informed = information->si_pid;
    value_informed = information->si_value.sival_int;
}

TEST(sigaction_shows_the_handlers_that_were_set)
{
    struct sigaction plain = {.sa_handler = count_signal}, old;
    struct sigaction informed = {.sa_sigaction = note_information, .sa_flags = SA_SIGINFO | SA_RESTART};
    OK(sigaction(SIGUSR1, &plain, &old));
    CHECK(old.sa_handler == SIG_DFL);
    OK(sigaction(SIGUSR1, &informed, &old));
    CHECK(old.sa_handler == count_signal);
    OK(sigaction(SIGUSR1, NULL, &old));
    CHECK(old.sa_sigaction == note_information);
    CHECK_EQ(old.sa_flags & (SA_SIGINFO | SA_RESTART), SA_SIGINFO | SA_RESTART);
    union sigval value = {.sival_int = 4711};
    OK(sigqueue(getpid(), SIGUSR1, value));
    CHECK_EQ(number_informed, SIGUSR1);
    CHECK_EQ(sender_informed, getpid());
    CHECK_EQ(value_informed, 4711);
    OK(sigaction(SIGUSR1, &old, NULL));
    OK(sigaction(SIGUSR1, &plain, &old));
    CHECK(old.sa_sigaction == note_information);
    CHECK_ERR(sigaction(SIGKILL, &plain, NULL), EINVAL);
    CHECK_ERR(sigaction(SIGUSR1 + 1000, &plain, NULL), EINVAL);
    OK(raise(SIGUSR1));
    CHECK_EQ(signals_seen, 1);
}

TEST(signal_shows_the_handlers_that_were_set)
{
    struct sigaction old;
    CHECK(signal(SIGUSR2, count_signal) == SIG_DFL);
    CHECK(signal(SIGUSR2, SIG_IGN) == count_signal);
    OK(raise(SIGUSR2));
    CHECK_EQ(signals_seen, 0);
    CHECK(signal(SIGUSR2, count_signal) == SIG_IGN);
    OK(sigaction(SIGUSR2, NULL, &old));
    CHECK(old.sa_handler == count_signal && (old.sa_flags & SA_RESTART));
    OK(raise(SIGUSR2));
    OK(raise(SIGUSR2));
    CHECK_EQ(signals_seen, 2);
    CHECK(sysv_signal(SIGUSR2, count_signal) == count_signal);
    OK(raise(SIGUSR2));
    CHECK_EQ(signals_seen, 3);
    CHECK(signal(SIGUSR2, SIG_DFL) == SIG_DFL); // sysv_signal sets SA_RESETHAND
    errno = 0;
    CHECK(signal(SIGKILL, count_signal) == SIG_ERR);
    CHECK_EQ(errno, EINVAL);
}

static void end_in_handler(int signal)
{
    _exit(signal == SIGUSR1 ? 7 : 8);
}

TEST(handlers_of_a_child_of_vfork_are_its_own)
{
    int status;
    on_signal(SIGUSR1, count_signal, 0);
    pid_t pid = vfork();
    if (pid == 0) {
        struct sigaction other = {.sa_handler = end_in_handler};
        sigaction(SIGUSR1, &other, NULL);
        syscall(SYS_kill, syscall(SYS_getpid), SIGUSR1);
        _exit(1);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    OK(raise(SIGUSR1));
    CHECK_EQ(signals_seen, 1);
}

TEST(recv_is_interrupted_without_sa_restart)
{
    struct pair pair = connected_pair();
    char byte;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1};
    on_signal(SIGALRM, count_signal, 0);
    alarm_every_ms(20);
    CHECK_ERR(recv(pair.server, &byte, 1, 0), EINTR);
    CHECK_ERR(read(pair.server, &byte, 1), EINTR);
    CHECK_ERR(recvmsg(pair.server, &message, 0), EINTR);
    CHECK_ERR(readv(pair.server, &piece, 1), EINTR);
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_PEEK), EINTR);
    alarm_every_ms(0);
    ping_pong(pair.client, pair.server);
}

static void answer_after_signals(int fd)
{
    pause_ms(200); // many alarms arrive
    say(fd, "after the signals");
}

SERVER(recv_restarts_with_sa_restart)
{
    on_signal(SIGALRM, count_signal, SA_RESTART);
    alarm_every_ms(20);
    expect(me->fd, "after the signals");
    CHECK(signals_seen > 0);
    alarm_every_ms(0);
}
CLIENT(recv_restarts_with_sa_restart)
{
    // With threads an alarm may also interrupt this role: pause_ms() continues, send restarts.
    answer_after_signals(me->fd);
}

TEST(recv_with_time_out_is_interrupted_even_with_sa_restart)
{
    struct pair pair = connected_pair();
    struct timeval limit = {20, 0};
    char byte;
    OK(setsockopt(pair.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    on_signal(SIGALRM, count_signal, SA_RESTART);
    alarm_every_ms(20);
    CHECK_ERR(recv(pair.server, &byte, 1, 0), EINTR);
}

TEST(waitall_is_interrupted_with_what_it_has)
{
    struct pair pair = connected_pair();
    char buffer[100];
    say(pair.client, "some");
    await(pair.server, POLLIN);
    on_signal(SIGALRM, count_signal, 0);
    alarm_every_ms(50);
    CHECK_EQ(recv(pair.server, buffer, sizeof buffer, MSG_WAITALL), 4);
}

TEST(accept_is_interrupted_without_sa_restart)
{
    struct address at;
    int listener = listen_anywhere(&at);
    on_signal(SIGALRM, count_signal, 0);
    alarm_every_ms(20);
    CHECK_ERR(accept(listener, NULL, NULL), EINTR);
    CHECK_ERR(accept4(listener, NULL, NULL, SOCK_CLOEXEC), EINTR);
    alarm_every_ms(0);
    greet(&at, listener);
}

TEST(accept_restarts_with_sa_restart)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = fork_child();
    if (pid == 0) {
        pause_ms(200);
        expect(dial(&at), "at last");
        _exit(0);
    }
    on_signal(SIGALRM, count_signal, SA_RESTART);
    alarm_every_ms(20);
    int fd = accept_from(listener);
    CHECK(signals_seen > 0);
    alarm_every_ms(0);
    say(fd, "at last");
    wait_child(pid);
}

TEST(full_send_is_interrupted_without_sa_restart)
{
    struct pair pair = connected_pair();
    size_t taken = fill_until_full(pair.client);
    on_signal(SIGALRM, count_signal, 0);
    alarm_every_ms(20);
    CHECK_ERR(send(pair.client, "x", 1, 0), EINTR);
    CHECK_ERR(write(pair.client, "x", 1), EINTR);
    alarm_every_ms(0);
    CHECK_EQ(drain_until_empty(pair.server), taken);
    ping_pong(pair.client, pair.server);
}

TEST(large_send_is_interrupted_with_what_it_has)
{
    struct pair pair = connected_pair();
    size_t size = (size_t)64 << 20;
    char *block = calloc(1, size);
    on_signal(SIGALRM, count_signal, 0);
    alarm_every_ms(50);
    ssize_t sent = send(pair.client, block, size, 0);
    CHECK(sent > 0 && (size_t)sent < size);
    alarm_every_ms(0);
    CHECK_EQ(drain_until_empty(pair.server), sent);
}

SERVER(full_send_restarts_with_sa_restart)
{
    meet(me);
    pause_ms(150);
    drain_until_empty(me->fd);
    meet(me);
}
CLIENT(full_send_restarts_with_sa_restart)
{
    fill_until_full(me->fd);
    meet(me);
    on_signal(SIGALRM, count_signal, SA_RESTART);
    alarm_every_ms(20);
    CHECK_EQ(send(me->fd, "x", 1, 0), 1);
    alarm_every_ms(0);
    meet(me);
}

TEST(connect_is_interrupted_without_sa_restart)
{
    struct address any = ip4("127.0.0.1", 0);
    int listener = listen_at(&any, 0);
    struct address at = name_of(listener);
    on_signal(SIGALRM, count_signal, 0);
    alarm_every_ms(100);
    for (int tried = 0; tried < 64; tried++) {
        int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
        if (connect(fd, ADDRESS(&at), at.size) == 0)
            continue;
        CHECK_EQ(errno, EINTR);
        alarm_every_ms(0);
        while (tried-- > 0)
            accept_from(listener);
        await(fd, POLLOUT); // the connect continues in the background
        return;
    }
    FAIL("a backlog of 0 accepted 64 connections");
}

SERVER(traffic_amid_signals)
{
    pattern_recv(pattern_new(61), me->fd, 8 << 20, 20000);
    pattern_send(pattern_new(62), me->fd, 8 << 20, 20000);
}
CLIENT(traffic_amid_signals)
{
    on_signal(SIGALRM, count_signal, SA_RESTART);
    alarm_every_ms(1);
    pattern_send(pattern_new(61), me->fd, 8 << 20, 30000);
    pattern_recv(pattern_new(62), me->fd, 8 << 20, 30000);
    alarm_every_ms(0);
}

static int handler_fd;

static void send_in_handler(int signal)
{
    (void)signal;
    int saved = errno;
    if (signals_seen++ == 0 && send(handler_fd, "signal!", 7, MSG_DONTWAIT) != 7)
        _exit(3);
    errno = saved;
}

TEST(handler_sends_on_the_socket_that_is_blocked_in_recv)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        expect(pair.client, "signal!");
        say(pair.client, "thanks");
        _exit(0);
    }
    handler_fd = pair.server;
    on_signal(SIGALRM, send_in_handler, SA_RESTART);
    alarm_every_ms(50);
    expect(pair.server, "thanks");
    alarm_every_ms(0);
    wait_child(pid);
}

static struct pair handler_pair;

static void peek_in_handler(int signal)
{
    (void)signal;
    int saved = errno;
    char bytes[8];
    if (recv(handler_pair.client, bytes, sizeof bytes, MSG_DONTWAIT) != -1 || errno != EAGAIN)
        _exit(4);
    ssize_t got = recv(handler_pair.server, bytes, sizeof bytes, MSG_PEEK | MSG_DONTWAIT);
    if (got == -1 ? errno != EAGAIN : memcmp(bytes, "data" + (4 - got), got) != 0)
        _exit(5);
    signals_seen++;
    errno = saved;
}

TEST(handler_receives_on_the_sockets_that_are_busy)
{
    // The handler interrupts send() and recv() on the same sockets at any point.
    handler_pair = connected_pair();
    on_signal(SIGALRM, peek_in_handler, SA_RESTART);
    alarm_every_ms(1);
    while (signals_seen < 50) {
        say(handler_pair.client, "data");
        expect(handler_pair.server, "data");
    }
    alarm_every_ms(0);
    ping_pong(handler_pair.client, handler_pair.server);
}

static sigjmp_buf jump_target;

static void jump_out(int signal)
{
    (void)signal;
    siglongjmp(jump_target, 1);
}

TEST(handler_jumps_out_of_a_blocked_recv)
{
    struct pair pair = connected_pair();
    on_signal(SIGALRM, jump_out, 0);
    if (sigsetjmp(jump_target, 1) == 0) {
        char byte;
        alarm_every_ms(30);
        recv(pair.server, &byte, 1, 0);
        FAIL("recv returned");
    }
    alarm_every_ms(0);
    ping_pong(pair.client, pair.server);
}

// A way to wait on a connection that stays silent.
typedef void wait_fn(int fd, int set);

static void wait_by_recv(int fd, int set)
{
    char byte;
    (void)set;
    recv(fd, &byte, 1, 0);
}

static void wait_by_poll(int fd, int set)
{
    struct pollfd waiting = {.fd = fd, .events = POLLIN};
    (void)set;
    poll(&waiting, 1, -1);
}

static void wait_by_epoll(int fd, int set)
{
    struct epoll_event event;
    (void)fd;
    epoll_wait(set, &event, 1, -1);
}

// A handler jumps out of the wait repeatedly, at any moment; the connection stays usable.
static void check_jumps(wait_fn *wait)
{
    struct pair pair = connected_pair();
    struct epoll_event event = {.events = EPOLLIN};
    int set = OK(epoll_create1(0));
    OK(epoll_ctl(set, EPOLL_CTL_ADD, pair.server, &event));
    for (int i = 0; i < 50; i++)
        ping_pong(pair.client, pair.server);
    on_signal(SIGALRM, jump_out, 0);
    for (volatile int jumps = 0; jumps < 1000; jumps++) {
        if (sigsetjmp(jump_target, 1) == 0) {
            struct itimerval once = {.it_value = {.tv_usec = 1 + jumps % 300}};
            OK(setitimer(ITIMER_REAL, &once, NULL));
            wait(pair.server, set);
            FAIL("the wait returned");
        }
    }
    for (int i = 0; i < 50; i++) {
        say(pair.client, "data");
        CHECK_EQ(epoll_wait(set, &event, 1, WAIT_MS_MAX), 1);
        expect(pair.server, "data");
    }
    ping_pong(pair.client, pair.server);
}

TEST(handler_jumps_out_of_recv_at_any_moment) { check_jumps(wait_by_recv); }
TEST(handler_jumps_out_of_poll_at_any_moment) { check_jumps(wait_by_poll); }
TEST(handler_jumps_out_of_epoll_wait_at_any_moment) { check_jumps(wait_by_epoll); }

TEST(stopped_and_continued_process_works)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        expect(pair.server, "before");
        say(pair.server, "one");
        expect(pair.server, "after");
        say(pair.server, "two");
        _exit(0);
    }
    say(pair.client, "before");
    expect(pair.client, "one");
    OK(kill(pid, SIGSTOP));
    CHECK_EQ(waitpid(pid, NULL, WUNTRACED), pid); // the child has stopped
    say(pair.client, "after");
    expect_silent(pair.client, POLLIN);
    OK(kill(pid, SIGCONT));
    expect(pair.client, "two");
    wait_child(pid);
}

static volatile sig_atomic_t closed_by_handler;

static void close_in_handler(int signal)
{
    (void)signal;
    int saved = errno, fd = closed_by_handler;
    closed_by_handler = -1;
    if (fd != -1 && close(fd) != 0)
        _exit(6);
    signals_seen++;
    errno = saved;
}

// Waits on an epoll instance that has just been busy, until a handler closes a descriptor during the wait.
static void close_while_waiting(int epoll, int fd, int after_us)
{
    struct itimerval timer = {{0, 50000}, {0, after_us}};
    struct epoll_event event;
    closed_by_handler = fd;
    on_signal(SIGALRM, close_in_handler, SA_RESTART);
    OK(setitimer(ITIMER_REAL, &timer, NULL));
    CHECK_EQ(epoll_wait(epoll, &event, 1, -1), -1);
    if (errno != EBADF || fd != epoll) // EBADF if the handler ran before the call
        CHECK_EQ(errno, EINTR);
    alarm_every_ms(0);
    CHECK_EQ(closed_by_handler, -1);
}

TEST(handler_closes_a_descriptor_of_the_epoll_waited_on)
{
    struct pair busy = connected_pair();
    struct address at = name_of(busy.listener);
    int epoll = epoll_with(busy.server, EPOLLIN);
    for (int round = 0; round < 100; round++) {
        int client = dial(&at), server = accept_from(busy.listener), closed = server;
        struct epoll_event event = {.events = EPOLLIN};
        epoll_add(epoll, server, EPOLLIN, 4711);
        send_word(&busy, epoll);
        close_while_waiting(epoll, server, 2 + round % 50);
        expect_eof(client);
        CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_MOD, closed, &event), EBADF);
        CHECK_EQ(OK(dup(busy.client)), closed);
        CHECK_ERR(epoll_ctl(epoll, EPOLL_CTL_MOD, closed, &event), ENOENT);
        send_word(&busy, epoll);
        OK(close(closed));
        OK(close(client));
    }
}

TEST(handler_closes_one_of_two_descriptors_of_the_epoll_waited_on)
{
    struct pair busy = connected_pair(), pair = connected_pair();
    int epoll = epoll_with(busy.server, EPOLLIN);
    epoll_add(epoll, pair.server, EPOLLIN, 4711);
    for (int round = 0; round < 50; round++) {
        int other = OK(dup(pair.server));
        send_word(&busy, epoll);
        close_while_waiting(epoll, other, 2 + round);
    }
    int other = OK(dup(pair.server));
    close_while_waiting(epoll, pair.server, 10);
    say(pair.client, "x");
    CHECK_EQ(epoll_one(epoll).data.u64, 4711); // as long as another descriptor is open
    expect(other, "x");
    OK(close(other));
    epoll_none(epoll);
}

TEST(handler_closes_the_epoll_waited_on)
{
    struct pair pair = connected_pair();
    struct epoll_event event;
    for (int round = 0; round < 50; round++) {
        int epoll = epoll_with(pair.server, EPOLLIN);
        send_word(&pair, epoll);
        close_while_waiting(epoll, epoll, 2 + round);
        CHECK_ERR(epoll_wait(epoll, &event, 1, 0), EBADF);
    }
    int epoll = epoll_with(pair.server, EPOLLIN);
    send_word(&pair, epoll);
}

enum { SIGNALS_QUEUED = 3000 };

static volatile sig_atomic_t queued_seen, queued_out_of_order;

static void note_queued(int signal, siginfo_t *information, void *context)
{
    (void)signal, (void)context;
    queued_out_of_order += information->si_value.sival_int != queued_seen || information->si_code != SI_QUEUE;
    queued_seen++;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (fd >= 0)
        close(fd);
}

// Signals may interrupt changes of a connection, during which the library defers handlers.
TEST(queued_signals_arrive_once_in_order_with_their_values)
{
    struct address at;
    int listener = listen_anywhere(&at), one = 1;
    struct sigaction action = {.sa_sigaction = note_queued, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigset_t before = {0}, after = {0};
    OK(sigaction(SIGRTMIN + 3, &action, NULL));
    OK(sigprocmask(SIG_SETMASK, NULL, &before));
    pid_t sender = OK(fork());
    if (sender == 0) {
        for (int number = 0; number < SIGNALS_QUEUED; number++) {
            union sigval value = {.sival_int = number};
            while (sigqueue(getppid(), SIGRTMIN + 3, value) != 0)
                usleep(100);
            usleep(number % 50);
        }
        _exit(0);
    }
    while (queued_seen < SIGNALS_QUEUED) {
        int client = dial(&at), server = accept_from(listener);
        OK(setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one));
        say(client, "x");
        expect(server, "x");
        OK(close(server));
        OK(close(client));
    }
    CHECK_EQ(queued_seen, SIGNALS_QUEUED);
    CHECK_EQ(queued_out_of_order, 0);
    CHECK_EQ(waitpid(sender, NULL, 0), sender);
    OK(sigprocmask(SIG_SETMASK, NULL, &after));
    CHECK(memcmp(&before, &after, sizeof before) == 0);
}
