// poll, ppoll, select, pselect.
#include "check.h"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>

TEST(poll_in_when_data_arrives)
{
    struct pair pair = connected_pair();
    expect_silent(pair.server, POLLIN);
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(poll_once(pair.server, POLLIN | POLLOUT, 0), POLLIN | POLLOUT);
    expect(pair.server, "x");
    expect_silent(pair.server, POLLIN);
}

TEST(poll_in_rdnorm_alias)
{
    struct pair pair = connected_pair();
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(poll_once(pair.server, POLLRDNORM, 0), POLLRDNORM);
    CHECK_EQ(poll_once(pair.server, POLLWRNORM, 0), POLLWRNORM);
}

TEST(poll_out_until_full_then_after_drain)
{
    struct pair pair = connected_pair();
    CHECK_EQ(poll_once(pair.client, POLLOUT, 0), POLLOUT);
    size_t taken = fill_until_full(pair.client);
    expect_silent(pair.client, POLLOUT);
    CHECK_EQ(drain_until_empty(pair.server), taken);
    await(pair.client, POLLOUT);
    CHECK_EQ(send(pair.client, "x", 1, MSG_DONTWAIT), 1);
}

SERVER(poll_out_wakes_a_sleeper_when_drained)
{
    meet(me);
    pause_ms(SILENCE_MS);
    drain_until_empty(me->fd);
    meet(me);
}
CLIENT(poll_out_wakes_a_sleeper_when_drained)
{
    fill_until_full(me->fd);
    meet(me);
    await(me->fd, POLLOUT);
    meet(me);
}

SERVER(poll_in_wakes_a_sleeper)
{
    for (int i = 0; i < 20; i++) {
        await(me->fd, POLLIN);
        expect(me->fd, "wake");
        say(me->fd, "ok");
    }
}
CLIENT(poll_in_wakes_a_sleeper)
{
    for (int i = 0; i < 20; i++) {
        pause_ms(5);
        say(me->fd, "wake");
        expect(me->fd, "ok");
    }
}

TEST(poll_in_on_a_listener)
{
    struct address at;
    int listener = listen_anywhere(&at);
    expect_silent(listener, POLLIN | POLLOUT);
    dial(&at);
    await(listener, POLLIN);
    accept_from(listener);
    expect_silent(listener, POLLIN);
}

SERVER(poll_wakes_a_sleeper_on_a_listener)
{
    for (int i = 0; i < 5; i++) {
        await(me->listener, POLLIN);
        OK(close(accept_from(me->listener)));
    }
}
CLIENT(poll_wakes_a_sleeper_on_a_listener)
{
    struct address at = peer_of(me->fd);
    for (int i = 0; i < 5; i++) {
        pause_ms(10);
        int fd = dial(&at);
        expect_eof(fd);
        OK(close(fd));
    }
}

TEST(poll_rdhup_when_peer_shuts)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.client, SHUT_WR));
    await_revents(pair.server, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    CHECK_EQ(poll_once(pair.server, POLLIN | POLLOUT, 0), POLLIN | POLLOUT);
    CHECK_EQ(poll_once(pair.server, POLLRDHUP, 0), POLLRDHUP);
    expect_silent(pair.client, POLLIN);
}

TEST(poll_rdhup_when_peer_closes)
{
    struct pair pair = connected_pair();
    OK(close(pair.client));
    await_revents(pair.server, POLLIN | POLLRDHUP, POLLIN | POLLRDHUP);
    CHECK_EQ(poll_once(pair.server, POLLIN | POLLOUT | POLLRDHUP, 0),
             POLLIN | POLLOUT | POLLRDHUP);
    expect_eof(pair.server);
    CHECK_EQ(poll_once(pair.server, POLLIN, 0), POLLIN); // it stays ready
}

TEST(poll_hup_when_both_halves_are_shut)
{
    struct pair pair = connected_pair();
    OK(shutdown(pair.server, SHUT_WR));
    CHECK_EQ(poll_once(pair.server, POLLIN, 0), 0);
    OK(close(pair.client));
    await_revents(pair.server, 0, POLLHUP);
    await_revents(pair.server, POLLIN | POLLOUT | POLLRDHUP, POLLIN | POLLRDHUP | POLLHUP);
}

TEST(poll_err_after_reset)
{
    struct pair pair = connected_pair();
    say(pair.client, "unread");
    await(pair.server, POLLIN);
    OK(close(pair.server));
    await_revents(pair.client, POLLIN | POLLOUT | POLLRDHUP,
                  POLLIN | POLLOUT | POLLRDHUP | POLLERR | POLLHUP);
    CHECK_EQ(poll_once(pair.client, 0, 0), POLLERR | POLLHUP);
}

TEST(poll_on_an_unconnected_socket)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_EQ(poll_once(fd, POLLIN | POLLOUT, 0), POLLOUT | POLLHUP);
}

TEST(poll_nval_on_a_closed_descriptor)
{
    struct pair pair = connected_pair();
    int number = pair.client;
    OK(close(pair.client));
    CHECK_EQ(poll_once(number, POLLIN, WAIT_MS_MAX), POLLNVAL);
}

TEST(poll_skips_negative_descriptors)
{
    struct pair pair = connected_pair();
    struct pollfd entries[3] = {{-1, POLLIN, 77}, {pair.server, POLLIN, 0}, {-7, POLLIN, 77}};
    say(pair.client, "x");
    CHECK_EQ(poll(entries, 3, WAIT_MS_MAX), 1);
    CHECK_EQ(entries[0].revents, 0);
    CHECK_EQ(entries[1].revents, POLLIN);
    CHECK_EQ(entries[2].revents, 0);
}

TEST(poll_of_nothing_times_out)
{
    CHECK_EQ(poll(NULL, 0, 10), 0);
    struct timespec rest = {0, 10000000};
    CHECK_EQ(ppoll(NULL, 0, &rest, NULL), 0);
}

TEST(poll_times_out_while_another_connection_is_busy)
{
    // A ready descriptor that is not in the list must not wake the poll.
    struct pair pair = connected_pair();
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(poll_once(pair.server, POLLPRI, SILENCE_MS), 0);
}

TEST(poll_counts_one_descriptor_twice)
{
    struct pair pair = connected_pair();
    struct pollfd entries[2] = {{pair.server, POLLIN, 0}, {pair.server, POLLOUT, 0}};
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(poll(entries, 2, 0), 2);
    CHECK_EQ(entries[0].revents, POLLIN);
    CHECK_EQ(entries[1].revents, POLLOUT);
}

static void *write_later(void *argument)
{
    pause_ms(SILENCE_MS);
    CHECK_EQ(write(*(int *)argument, "12345678", 8), 8);
    return NULL;
}

TEST(poll_mixes_a_connection_with_a_pipe)
{
    struct pair pair = connected_pair();
    int pipe_ends[2];
    OK(pipe(pipe_ends));
    struct pollfd entries[2] = {{pair.server, POLLIN, 0}, {pipe_ends[0], POLLIN, 0}};
    pthread_t thread = start_thread(write_later, &pipe_ends[1]);
    CHECK_EQ(poll(entries, 2, WAIT_MS_MAX), 1);
    CHECK_EQ(entries[0].revents, 0);
    CHECK_EQ(entries[1].revents, POLLIN);
    join_thread(thread);
    thread = start_thread(write_later, &pair.client);
    entries[1].fd = -1;
    CHECK_EQ(poll(entries, 2, WAIT_MS_MAX), 1);
    CHECK_EQ(entries[0].revents, POLLIN);
    join_thread(thread);
}

TEST(poll_mixes_a_connection_with_eventfd_and_timerfd)
{
    struct pair pair = connected_pair();
    int event = OK(eventfd(0, 0)), timer = OK(timerfd_create(CLOCK_MONOTONIC, 0));
    struct itimerspec soon = {.it_value = {0, 20000000}};
    OK(timerfd_settime(timer, 0, &soon, NULL));
    struct pollfd entries[3] = {{pair.server, POLLIN, 0}, {event, POLLIN, 0}, {timer, POLLIN, 0}};
    CHECK_EQ(poll(entries, 3, WAIT_MS_MAX), 1);
    CHECK_EQ(entries[2].revents, POLLIN);
    uint64_t one = 1;
    CHECK_EQ(write(event, &one, 8), 8);
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(poll(entries, 3, WAIT_MS_MAX), 3);
}

TEST(poll_on_an_epoll_descriptor)
{
    struct pair pair = connected_pair();
    int epoll = epoll_with(pair.server, EPOLLIN);
    expect_silent(epoll, POLLIN);
    pthread_t thread = start_thread(write_later, &pair.client);
    await(epoll, POLLIN);
    join_thread(thread);
    expect(pair.server, "12345678");
    expect_silent(epoll, POLLIN);
}

TEST(poll_on_many_connections)
{
    enum { COUNT = 100 };
    struct address at;
    int listener = listen_anywhere(&at), clients[COUNT];
    struct pollfd entries[COUNT];
    for (int i = 0; i < COUNT; i++) {
        clients[i] = dial(&at);
        entries[i] = (struct pollfd){accept_from(listener), POLLIN, 0};
    }
    for (int i = 0; i < COUNT; i += 7) {
        say(clients[i], "x");
        CHECK_EQ(poll(entries, COUNT, WAIT_MS_MAX), 1);
        CHECK_EQ(entries[i].revents, POLLIN);
        expect(entries[i].fd, "x");
    }
}

TEST(poll_is_interrupted_even_with_sa_restart)
{
    struct pair pair = connected_pair();
    on_signal(SIGALRM, count_signal, SA_RESTART);
    alarm_every_ms(20);
    struct pollfd entry = {pair.server, POLLIN, 0};
    CHECK_ERR(poll(&entry, 1, WAIT_MS_MAX), EINTR);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(pair.server, &set);
    CHECK_ERR(select(pair.server + 1, &set, NULL, NULL, NULL), EINTR);
}

static void block_alarm(sigset_t *unblocked)
{
    sigset_t alarm_only;
    sigemptyset(&alarm_only);
    sigaddset(&alarm_only, SIGALRM);
    OK(sigprocmask(SIG_BLOCK, &alarm_only, unblocked));
    on_signal(SIGALRM, count_signal, 0);
}

TEST(ppoll_lets_a_blocked_signal_in)
{
    struct pair pair = connected_pair();
    sigset_t unblocked;
    block_alarm(&unblocked);
    OK(raise(SIGALRM));
    CHECK_EQ(signals_seen, 0);
    struct pollfd entry = {pair.server, POLLIN, 0};
    struct timespec limit = {20, 0};
    CHECK_ERR(ppoll(&entry, 1, &limit, &unblocked), EINTR);
    CHECK_EQ(signals_seen, 1);
}

TEST(pselect_lets_a_blocked_signal_in)
{
    struct pair pair = connected_pair();
    sigset_t unblocked;
    block_alarm(&unblocked);
    OK(raise(SIGALRM));
    fd_set set;
    FD_ZERO(&set);
    FD_SET(pair.server, &set);
    struct timespec limit = {20, 0};
    CHECK_ERR(pselect(pair.server + 1, &set, NULL, NULL, &limit, &unblocked), EINTR);
    CHECK_EQ(signals_seen, 1);
}

TEST(ppoll_without_time_lets_a_blocked_signal_in)
{
    struct pair pair = connected_pair();
    sigset_t unblocked;
    block_alarm(&unblocked);
    OK(raise(SIGALRM));
    struct pollfd entry = {pair.server, POLLIN, 0};
    struct timespec now = {0, 0};
    CHECK_ERR(ppoll(&entry, 1, &now, &unblocked), EINTR);
    CHECK_EQ(signals_seen, 1);
}

TEST(ppoll_keeps_a_signal_out)
{
    struct pair pair = connected_pair();
    sigset_t blocked;
    on_signal(SIGALRM, count_signal, 0);
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGALRM);
    alarm_every_ms(10);
    struct pollfd entry = {pair.server, POLLIN, 0};
    struct timespec limit = {0, 0};
    signals_seen = 0;
    while (signals_seen == 0)
        pause(); // the timer runs
    limit.tv_nsec = 60000000;
    CHECK_EQ(ppoll(&entry, 1, &limit, &blocked), 0);
}

int __poll(struct pollfd *entries, nfds_t count, int timeout_ms);

TEST(poll_by_the_symbol_that_libnsl_uses)
{
    struct pair pair = connected_pair();
    struct pollfd entry = {.fd = pair.server, .events = POLLIN};
    CHECK_EQ(__poll(&entry, 1, 0), 0);
    say(pair.client, "x");
    CHECK_EQ(__poll(&entry, 1, WAIT_MS_MAX), 1);
    CHECK_EQ(entry.revents, POLLIN);
}

TEST(select_reports_read_and_write)
{
    struct pair pair = connected_pair();
    fd_set in, out, err;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_ZERO(&err);
    FD_SET(pair.server, &in);
    FD_SET(pair.client, &in);
    FD_SET(pair.client, &out);
    FD_SET(pair.server, &err);
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(select(64, &in, &out, &err, NULL), 2);
    CHECK(FD_ISSET(pair.server, &in) && !FD_ISSET(pair.client, &in));
    CHECK(FD_ISSET(pair.client, &out) && !FD_ISSET(pair.server, &err));
}

TEST(select_times_out_and_clears)
{
    struct pair pair = connected_pair();
    fd_set in;
    FD_ZERO(&in);
    FD_SET(pair.server, &in);
    struct timeval limit = {0, 20000};
    CHECK_EQ(select(pair.server + 1, &in, NULL, NULL, &limit), 0);
    CHECK(!FD_ISSET(pair.server, &in));
    CHECK_EQ(limit.tv_sec, 0);
    CHECK_EQ(limit.tv_usec, 0); // Linux stores the remaining time
}

TEST(select_sees_eof_and_reset_as_readable)
{
    struct pair pair = connected_pair();
    OK(close(pair.client));
    fd_set in, out;
    FD_ZERO(&in);
    FD_ZERO(&out);
    FD_SET(pair.server, &in);
    FD_SET(pair.server, &out);
    await(pair.server, POLLIN);
    CHECK_EQ(select(pair.server + 1, &in, &out, NULL, NULL), 2);
}

TEST(select_wakes_on_a_listener)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = fork_child();
    if (pid == 0) {
        pause_ms(SILENCE_MS);
        expect(dial(&at), "hi");
        _exit(0);
    }
    fd_set in;
    FD_ZERO(&in);
    FD_SET(listener, &in);
    CHECK_EQ(select(listener + 1, &in, NULL, NULL, NULL), 1);
    say(accept_from(listener), "hi");
    wait_child(pid);
}

TEST(select_on_many)
{
    enum { COUNT = 60 };
    struct address at;
    int listener = listen_anywhere(&at), clients[COUNT], servers[COUNT], top = 0;
    fd_set all;
    FD_ZERO(&all);
    for (int i = 0; i < COUNT; i++) {
        clients[i] = dial(&at);
        servers[i] = accept_from(listener);
        FD_SET(servers[i], &all);
        top = servers[i] > top ? servers[i] : top;
    }
    for (int i = 0; i < COUNT; i += 5) {
        fd_set in = all;
        say(clients[i], "x");
        CHECK_EQ(select(top + 1, &in, NULL, NULL, NULL), 1);
        CHECK(FD_ISSET(servers[i], &in));
        expect(servers[i], "x");
    }
}

TEST(select_rejects_bad_arguments)
{
    struct pair pair = connected_pair();
    fd_set in;
    FD_ZERO(&in);
    FD_SET(pair.server, &in);
    int number = pair.server;
    OK(close(pair.server));
    CHECK_ERR(select(number + 1, &in, NULL, NULL, NULL), EBADF);
    CHECK_ERR(select(-1, NULL, NULL, NULL, NULL), EINVAL);
    struct timeval bad = {-1, 0};
    CHECK_ERR(select(0, NULL, NULL, NULL, &bad), EINVAL);
}

TEST(select_sleeps_without_descriptors)
{
    struct timeval limit = {0, 10000};
    CHECK_EQ(select(0, NULL, NULL, NULL, &limit), 0);
}

TEST(large_descriptor_numbers_work)
{
    struct pair pair = connected_pair();
    int client = OK(fcntl(pair.client, F_DUPFD, 900)), server = OK(dup2(pair.server, 990));
    OK(close(pair.client));
    OK(close(pair.server));
    ping_pong(client, server);
    say(client, "x");
    await(server, POLLIN);
    fd_set in;
    FD_ZERO(&in);
    FD_SET(server, &in);
    CHECK_EQ(select(server + 1, &in, NULL, NULL, NULL), 1);
    epoll_one(epoll_with(server, EPOLLIN));
}

TEST(very_large_descriptor_numbers_work)
{
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    if (limit.rlim_max < 4096)
        skip("the descriptor limit is %ld", (long)limit.rlim_max);
    limit.rlim_cur = limit.rlim_max < 70000 ? limit.rlim_max : 70000;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    struct pair pair = connected_pair();
    int high = OK(dup2(pair.client, (int)limit.rlim_cur - 1));
    OK(close(pair.client));
    ping_pong(high, pair.server);
    say(pair.server, "x");
    await(high, POLLIN);
    epoll_one(epoll_with(high, EPOLLIN));
}

// ---- limits -------------------------------------------------------------------------------------

static void limit_descriptors(rlim_t numbers)
{
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = numbers;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
}

TEST(poll_accepts_nearly_as_many_entries_as_the_limit_allows)
{
    enum { LIMIT = 64, ENTRIES = 60 };
    struct pair pair = connected_pair();
    limit_descriptors(LIMIT);
    struct pollfd entries[ENTRIES];
    for (int i = 0; i < ENTRIES; i++)
        entries[i] = (struct pollfd){i % 2 ? pair.listener : pair.client, POLLPRI, 0};
    entries[ENTRIES - 1] = (struct pollfd){pair.server, POLLIN, 0};
    CHECK_EQ(poll(entries, ENTRIES, 5), 0);
    say(pair.client, "x");
    CHECK_EQ(poll(entries, ENTRIES, WAIT_MS_MAX), 1);
    CHECK_EQ(entries[ENTRIES - 1].revents, POLLIN);
    expect(pair.server, "x");
    entries[1].events = POLLIN; // the listener
    struct address at = name_of(pair.listener);
    int another = dial(&at);
    CHECK_EQ(poll(entries, ENTRIES, WAIT_MS_MAX), 1);
    CHECK_EQ(entries[1].revents, POLLIN);
    OK(close(another));
}

TEST(select_leaves_memory_behind_small_sets_alone)
{
    enum { SELECT_COUNT = 16384 };
    // A program may pass its descriptor limit as the count, with sets only as large as its descriptors need: the
    // kernel reads no further than its descriptor table reaches.
    struct pair pair = connected_pair();
    limit_descriptors(SELECT_COUNT);
    ping_pong(pair.client, pair.server);
    struct {
        fd_set in;
        unsigned char behind[SELECT_COUNT / 8];
    } sets;
    memset(&sets, 0xa5, sizeof sets);
    FD_ZERO(&sets.in);
    FD_SET(pair.server, &sets.in);
    struct timeval now = {0};
    CHECK_EQ(select(getdtablesize(), &sets.in, NULL, NULL, &now), 0);
    say(pair.client, "x");
    FD_SET(pair.server, &sets.in);
    CHECK_EQ(select(getdtablesize(), &sets.in, NULL, NULL, NULL), 1);
    CHECK(FD_ISSET(pair.server, &sets.in));
    int pipe_fds[2];
    OK(pipe(pipe_fds));
    FD_ZERO(&sets.in);
    FD_SET(pipe_fds[0], &sets.in);
    CHECK_EQ(select(getdtablesize(), &sets.in, NULL, NULL, &now), 0);
    for (size_t i = 0; i < sizeof sets.behind; i++)
        CHECK_EQ(sets.behind[i], 0xa5);
}

TEST(more_entries_than_descriptors_are_einval)
{
    struct pair pair = connected_pair();
    say(pair.client, "x");
    await(pair.server, POLLIN);
    static struct pollfd entries[200];
    for (int index = 0; index < 200; index++)
        entries[index] = (struct pollfd){index == 7 ? pair.server : -1, POLLIN, 0};
    struct rlimit limit;
    OK(getrlimit(RLIMIT_NOFILE, &limit));
    limit.rlim_cur = 100;
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    CHECK_EQ(poll(entries, 100, 0), 1);
    struct timespec none = {0, 0};
    // Otherwise the compiler knows the number of entries, and the fortified poll aborts the program.
    struct pollfd *volatile nowhere = NULL, *volatile all = entries;
    volatile nfds_t endless = (nfds_t)-1;
    CHECK_ERR(poll(all, 101, 0), EINVAL);
    CHECK_ERR(ppoll(all, 200, &none, NULL), EINVAL);
    CHECK_ERR(syscall(SYS_ppoll, entries, 200L, &none, NULL, 8L), EINVAL);
    CHECK_ERR(poll(all, endless, 0), EINVAL);
    CHECK_ERR(poll(nowhere, endless, 0), EINVAL);
    CHECK_ERR(poll(nowhere, 101, 0), EINVAL);
    CHECK_ERR(poll(nowhere, 100, 0), EFAULT);
    CHECK_EQ(poll(nowhere, 0, 0), 0);
}

TEST(raw_waits_report_the_remaining_time)
{
    struct pair pair = connected_pair();
    struct pollfd entry = {.fd = pair.server, .events = POLLIN};
    struct timespec limit = {.tv_nsec = 1000000};
    CHECK_EQ(syscall(SYS_ppoll, &entry, 1L, &limit, NULL, 8L), 0);
    CHECK_EQ(limit.tv_nsec, 0);
    fd_set set;
    FD_ZERO(&set);
    FD_SET(pair.server, &set);
    limit.tv_nsec = 1000000;
    CHECK_EQ(syscall(SYS_pselect6, pair.server + 1L, &set, NULL, NULL, &limit, NULL), 0);
    CHECK_EQ(limit.tv_nsec, 0);
    say(pair.client, "x");
    limit.tv_sec = WAIT_MS_MAX / 1000;
    CHECK_EQ(syscall(SYS_ppoll, &entry, 1L, &limit, NULL, 8L), 1);
    CHECK(limit.tv_sec < WAIT_MS_MAX / 1000);
    FD_SET(pair.server, &set);
    limit = (struct timespec){.tv_sec = WAIT_MS_MAX / 1000};
    CHECK_EQ(syscall(SYS_pselect6, pair.server + 1L, &set, NULL, NULL, &limit, NULL), 1);
    CHECK(limit.tv_sec < WAIT_MS_MAX / 1000);
}

TEST(raw_waits_require_the_kernels_sigset_size)
{
    struct pair pair = connected_pair();
    struct pollfd entry = {.fd = pair.server, .events = POLLOUT};
    struct epoll_event event = {.events = EPOLLOUT};
    struct timespec none = {0, 0};
    int epoll = epoll_with(pair.server, EPOLLOUT);
    sigset_t mask;
    sigemptyset(&mask);
    CHECK_ERR(syscall(SYS_ppoll, &entry, 1L, &none, &mask, (long)sizeof mask), EINVAL);
    CHECK_EQ(syscall(SYS_ppoll, &entry, 1L, &none, &mask, 8L), 1);
    CHECK_EQ(syscall(SYS_ppoll, &entry, 1L, &none, NULL, 7L), 1);
    CHECK_ERR(syscall(SYS_epoll_pwait, (long)epoll, &event, 1L, 0L, &mask, 4L), EINVAL);
    CHECK_EQ(syscall(SYS_epoll_pwait, (long)epoll, &event, 1L, 0L, &mask, 8L), 1);
    CHECK_ERR(syscall(SYS_epoll_pwait2, (long)epoll, &event, 1L, &none, &mask, 4L), EINVAL);
    struct { const sigset_t *mask; size_t size; } wrong = {&mask, sizeof mask};
    CHECK_ERR(syscall(SYS_pselect6, 0L, NULL, NULL, NULL, &none, &wrong), EINVAL);
}
