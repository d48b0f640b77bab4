// fork, exec, spawn, descriptors passed to other processes, killed processes.
#include "check.h"

#include <sched.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

extern char **environ;

// Runs cat in place of this process.
__attribute__((noreturn)) static void become_cat(void)
{
    execlp("cat", "cat", (char *)NULL);
    FAIL("exec of cat failed");
}

// Exchanges a text with a child that echoes, and then ends it.
static void echo_and_end(int fd, const char *text, pid_t child)
{
    say(fd, text);
    expect(fd, text);
    OK(shutdown(fd, SHUT_WR));
    expect_eof(fd);
    wait_child(child);
}

// ---- fork ---------------------------------------------------------------------------------------

TEST(child_serves_and_parent_closes)
{
    struct address at;
    int listener = listen_anywhere(&at);
    for (int i = 0; i < 10; i++) {
        int client = dial(&at), server = accept_from(listener);
        pid_t pid = fork_child();
        if (pid == 0) {
            OK(close(client));
            OK(close(listener));
            expect(server, "request");
            say(server, "answer");
            _exit(0);
        }
        OK(close(server));
        say(client, "request");
        expect(client, "answer");
        expect_eof(client);
        OK(close(client));
        wait_child(pid);
    }
}

SERVER(fork_per_connection)
{
    pid_t children[8];
    for (int i = 0; i < 8; i++) {
        int fd = accept_from(me->listener);
        if ((children[i] = fork_child()) == 0) {
            struct pattern *pattern = pattern_new(100);
            pattern_recv(pattern, fd, 300000, 4000);
            pattern_send(pattern, fd, 300000, 5000);
            _exit(0);
        }
        OK(close(fd));
    }
    for (int i = 0; i < 8; i++)
        wait_child(children[i]);
}
CLIENT(fork_per_connection)
{
    struct address at = peer_of(me->fd);
    struct pattern *pattern = pattern_new(100);
    int fds[8];
    for (int i = 0; i < 8; i++)
        fds[i] = dial(&at);
    for (int i = 7; i >= 0; i--) {
        pattern_send(pattern, fds[i], 300000, 3000);
        pattern_recv(pattern, fds[i], 300000, 7000);
        expect_eof(fds[i]);
    }
}

// Each endpoint may switch to lanes in memory of its own, and only one process receives the message that brings the
// peer's.
static void exchange_in_children(struct endpoint *me, int fd)
{
    meet(me);
    pid_t writer = fork_child();
    if (writer == 0) {
        pattern_send(pattern_new(101), fd, 1 << 20, 50000);
        _exit(0);
    }
    pattern_recv(pattern_new(101), fd, 1 << 20, 50000);
    wait_child(writer);
    OK(close(fd));
}

enum { FORKS_AT_ONCE = 40 };

SERVER(both_endpoints_fork_at_once)
{
    for (int i = 0; i < FORKS_AT_ONCE; i++)
        exchange_in_children(me, accept_from(me->listener));
}
CLIENT(both_endpoints_fork_at_once)
{
    struct address at = peer_of(me->fd);
    for (int i = 0; i < FORKS_AT_ONCE; i++)
        exchange_in_children(me, dial(&at));
}

TEST(prefork_workers_share_a_listener)
{
    enum { WORKERS = 4 };
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t workers[WORKERS];
    for (int i = 0; i < WORKERS; i++) {
        if ((workers[i] = fork_child()) != 0)
            continue;
        for (;;) {
            int fd = accept_from(listener);
            expect(fd, "hello");
            say(fd, "worker");
            OK(close(fd));
        }
    }
    for (int i = 0; i < 60; i++) {
        int fd = dial(&at);
        say(fd, "hello");
        expect(fd, "worker");
        expect_eof(fd);
        OK(close(fd));
    }
    for (int i = 0; i < WORKERS; i++)
        kill_child(workers[i]);
}

TEST(prefork_survives_a_killed_worker)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t workers[2];
    for (int i = 0; i < 2; i++) {
        if ((workers[i] = fork_child()) != 0)
            continue;
        for (;;) {
            int fd = accept_from(listener);
            say(fd, "served");
            OK(close(fd));
        }
    }
    pause_ms(SILENCE_MS); // both block in accept()
    kill_child(workers[0]);
    for (int i = 0; i < 10; i++) {
        int fd = dial(&at);
        expect(fd, "served");
        OK(close(fd));
    }
    kill_child(workers[1]);
}

static int served_by(const struct address *where)
{
    unsigned char worker;
    int fd = dial(where);
    recv_exact(fd, &worker, 1);
    expect_eof(fd);
    OK(close(fd));
    return worker;
}

TEST(workers_that_each_listen_share_an_inherited_socket)
{
    enum { WORKERS = 3, TRIES = 300 };
    struct address at = ip4("127.0.0.1", 0);
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0)), listening[2], served[WORKERS] = {0};
    OK(bind(listener, ADDRESS(&at), at.size));
    at = name_of(listener);
    OK(pipe(listening));
    pid_t workers[WORKERS];
    for (unsigned char i = 0; i < WORKERS; i++) {
        if ((workers[i] = fork_child()) == 0) {
            OK(listen(listener, 128));
            OK(write(listening[1], &i, 1));
            for (;;) {
                int fd = accept_from(listener);
                OK(send(fd, &i, 1, 0));
                OK(close(fd));
            }
        }
        unsigned char ready;
        CHECK_EQ(read(listening[0], &ready, 1), 1);
    }
    for (int i = 0; i < TRIES; i++)
        served[served_by(&at)]++;
    for (int i = 0; i < WORKERS; i++)
        CHECK(served[i] > 0);
    for (int i = 0; i < WORKERS - 1; i++)
        kill_child(workers[i]);
    for (int i = 0; i < 20; i++)
        CHECK_EQ(served_by(&at), WORKERS - 1);
    kill_child(workers[WORKERS - 1]);
}

TEST(daemon_inherits_its_listener)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = fork_child();
    if (pid == 0) {
        if (fork_child() != 0)
            _exit(0);
        OK(setsid());
        int fd = accept_from(listener);
        expect(fd, "anyone?");
        say(fd, "yes");
        _exit(0);
    }
    wait_child(pid);
    OK(close(listener));
    int fd = dial(&at);
    say(fd, "anyone?");
    expect(fd, "yes");
    expect_eof(fd);
}

TEST(parent_and_child_write_one_connection)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        for (int i = 0; i < 500; i++)
            say(pair.client, "cccccccc");
        _exit(0);
    }
    int from_parent = 0, from_child = 0;
    for (int i = 0; i < 500; i++)
        say(pair.client, "pppppppp");
    for (int i = 0; i < 1000; i++) {
        char message[9] = {0};
        recv_exact(pair.server, message, 8);
        from_parent += strcmp(message, "pppppppp") == 0;
        from_child += strcmp(message, "cccccccc") == 0;
    }
    CHECK_EQ(from_parent, 500);
    CHECK_EQ(from_child, 500);
    wait_child(pid);
}

TEST(parent_and_child_read_in_turn)
{
    struct pair pair = connected_pair();
    int to_child[2], to_parent[2];
    char turn = 't';
    OK(pipe(to_child));
    OK(pipe(to_parent));
    say(pair.client, "aaaabbbbccccddddeeeeffff");
    pid_t pid = fork_child();
    if (pid == 0) {
        const char *mine[] = {"bbbb", "dddd", "ffff"};
        for (int i = 0; i < 3; i++) {
            CHECK_EQ(read(to_child[0], &turn, 1), 1);
            expect(pair.server, mine[i]);
            CHECK_EQ(write(to_parent[1], &turn, 1), 1);
        }
        _exit(0);
    }
    const char *mine[] = {"aaaa", "cccc", "eeee"};
    for (int i = 0; i < 3; i++) {
        expect(pair.server, mine[i]);
        CHECK_EQ(write(to_child[1], &turn, 1), 1);
        CHECK_EQ(read(to_parent[0], &turn, 1), 1);
    }
    wait_child(pid);
    ping_pong(pair.client, pair.server);
}

TEST(parent_writes_while_child_reads)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        pattern_recv(pattern_new(41), pair.server, 4000000, 10000);
        _exit(0);
    }
    pattern_send(pattern_new(41), pair.client, 4000000, 30000);
    wait_child(pid);
    ping_pong(pair.client, pair.server);
}

TEST(child_exit_leaves_the_connection_to_the_parent)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork_child();
        if (pid == 0)
            _exit(0);
        wait_child(pid);
        ping_pong(pair.client, pair.server);
    }
}

TEST(child_normal_exit_leaves_the_connection_to_the_parent)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0)
        exit(0); // with exit handlers and destructors
    wait_child(pid);
    ping_pong(pair.client, pair.server);
}

TEST(connection_outlives_its_killed_opener)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t opener = fork_child();
    if (opener == 0) {
        int fd = dial(&at);
        if (fork_child() == 0) {
            prctl(PR_SET_PDEATHSIG, 0);
            expect(fd, "still there?");
            say(fd, "child");
            _exit(0);
        }
        pause();
    }
    int server = accept_from(listener);
    pause_ms(SILENCE_MS);
    kill_child(opener);
    say(server, "still there?");
    expect(server, "child");
    expect_eof(server);
}

TEST(child_closes_and_parent_continues)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.client));
        OK(close(pair.server));
        OK(close(pair.listener));
        struct pair own = connected_pair();
        ping_pong(own.client, own.server);
        _exit(0);
    }
    wait_child(pid);
    ping_pong(pair.client, pair.server);
}

TEST(child_shutdown_is_seen_by_all)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(shutdown(pair.client, SHUT_WR));
        _exit(0);
    }
    wait_child(pid);
    expect_eof(pair.server);
    CHECK_ERR(send(pair.client, "x", 1, MSG_NOSIGNAL), EPIPE);
    say(pair.server, "back");
    expect(pair.client, "back");
}

static void *echo_once(void *argument)
{
    int fd = *(int *)argument;
    expect(fd, "from the child");
    say(fd, "echo");
    return NULL;
}

TEST(fork_while_a_thread_is_blocked_in_recv)
{
    struct pair pair = connected_pair();
    pthread_t thread = start_thread(echo_once, &pair.server);
    pause_ms(SILENCE_MS);
    pid_t pid = fork_child();
    if (pid == 0) {
        say(pair.client, "from the child");
        expect(pair.client, "echo");
        say(pair.server, "other way"); // the direction in which no thread was blocked
        expect(pair.client, "other way");
        _exit(0);
    }
    wait_child(pid);
    join_thread(thread);
    ping_pong(pair.client, pair.server);
}

static volatile bool traffic_stop;

static void *make_traffic(void *argument)
{
    struct pair *pair = argument;
    while (!traffic_stop)
        ping_pong(pair->client, pair->server);
    return NULL;
}

TEST(fork_amid_traffic_of_other_threads)
{
    struct pair busy = connected_pair(), quiet = connected_pair();
    pthread_t thread = start_thread(make_traffic, &busy);
    for (int i = 0; i < 30; i++) {
        pid_t pid = fork_child();
        if (pid == 0) {
            ping_pong(quiet.client, quiet.server);
            struct pair own = connected_pair();
            ping_pong(own.client, own.server);
            _exit(0);
        }
        wait_child(pid);
    }
    traffic_stop = true;
    join_thread(thread);
}

// A child of a fork that runs no atfork handlers works with its copy of all state.
static void run_as_copy(struct pair *pair)
{
    OK(close(pair->server));
    int pipe_ends[2], number = pair->server;
    OK(pipe(pipe_ends));
    CHECK(pipe_ends[0] == number || pipe_ends[1] == number);
    CHECK_EQ(write(pipe_ends[1], "pipe", 4), 4);
    char buffer[4];
    CHECK_EQ(read(pipe_ends[0], buffer, 4), 4);
    for (int i = 0; i < 100; i++)
        say(pair->client, "cccc");
    OK(close(pair->client));
    _exit(0);
}

static void check_copy(struct pair *pair, pid_t pid)
{
    CHECK(pid > 0);
    int from_parent = 0, from_child = 0;
    for (int i = 0; i < 100; i++)
        say(pair->client, "pppp");
    for (int i = 0; i < 200; i++) {
        char message[5] = {0};
        recv_exact(pair->server, message, 4);
        from_parent += strcmp(message, "pppp") == 0;
        from_child += strcmp(message, "cccc") == 0;
    }
    CHECK_EQ(from_parent, 100);
    CHECK_EQ(from_child, 100);
    wait_child(pid);
    ping_pong(pair->client, pair->server);
}

TEST(child_of_bare_fork)
{
    struct pair pair = connected_pair();
    pid_t pid = _Fork();
    if (pid == 0)
        run_as_copy(&pair);
    check_copy(&pair, pid);
}

TEST(child_of_the_fork_system_call)
{
    struct pair pair = connected_pair();
    pid_t pid = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (pid == 0)
        run_as_copy(&pair);
    check_copy(&pair, pid);
}

static int run_as_clone(void *pair)
{
    run_as_copy(pair);
    return 1;
}

TEST(child_of_clone)
{
    static char stack[1 << 18] __attribute__((aligned(16)));
    struct pair pair = connected_pair();
    check_copy(&pair, clone(run_as_clone, stack + sizeof stack, SIGCHLD, &pair));
}

// ---- exec ---------------------------------------------------------------------------------------

// Starts `program` with the connection as standard input and output, by fork and exec.
static pid_t exec_on(int fd, char *const argv[], const int *close_these, int close_count)
{
    pid_t pid = fork_child();
    if (pid != 0)
        return pid;
    OK(dup2(fd, 0));
    OK(dup2(fd, 1));
    OK(close(fd));
    for (int i = 0; i < close_count; i++)
        OK(close(close_these[i]));
    execvp(argv[0], argv);
    FAIL("exec of %s failed: %s", argv[0], strerror(errno));
}

static void check_filter(char *const argv[])
{
    struct pair pair = connected_pair();
    const int others[] = {pair.client, pair.listener};
    pid_t pid = exec_on(pair.server, argv, others, 2);
    OK(close(pair.server));
    echo_and_end(pair.client, "through another program\n", pid);
}

TEST(exec_self_echoes_on_stdio)
{
    char *const argv[] = {"/proc/self/exe", "--echo-stdio", NULL};
    check_filter(argv);
}

TEST(exec_cat_on_a_connection)
{
    char *const argv[] = {"cat", NULL};
    check_filter(argv);
}

TEST(exec_shell_on_a_connection)
{
    char *const argv[] = {"sh", "-c", "cat | cat", NULL};
    check_filter(argv);
}

TEST(exec_shell_builtins_on_a_connection)
{
    char *const argv[] = {"sh", "-c", "read -r line; echo \"$line\"", NULL};
    check_filter(argv);
}

TEST(exec_stdio_program_on_a_connection)
{
    char *const argv[] = {"sed", "-u", "s/a/a/", NULL};
    check_filter(argv);
}

TEST(exec_bulk_through_cat)
{
    struct pair pair = connected_pair();
    char *const argv[] = {"cat", NULL};
    const int others[] = {pair.client, pair.listener};
    pid_t pid = exec_on(pair.server, argv, others, 2);
    OK(close(pair.server));
    pid_t writer = fork_child();
    if (writer == 0) {
        pattern_send(pattern_new(42), pair.client, 8000000, 60000);
        OK(shutdown(pair.client, SHUT_WR));
        _exit(0);
    }
    pattern_recv(pattern_new(42), pair.client, 8000000, 60000);
    expect_eof(pair.client);
    wait_child(writer);
    wait_child(pid);
}

TEST(unread_data_survives_exec)
{
    struct pair pair = connected_pair();
    char *const argv[] = {"cat", NULL};
    const int others[] = {pair.client, pair.listener};
    say(pair.client, "read here;read there");
    expect(pair.server, "read here;");
    pid_t pid = exec_on(pair.server, argv, others, 2);
    OK(close(pair.server));
    expect(pair.client, "read there");
    OK(shutdown(pair.client, SHUT_WR));
    expect_eof(pair.client);
    wait_child(pid);
}

TEST(cloexec_closes_at_exec)
{
    struct pair pair = connected_pair();
    OK(fcntl(pair.client, F_SETFD, FD_CLOEXEC));
    int gate[2];
    OK(pipe(gate));
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(dup2(gate[0], 0));
        OK(close(gate[0]));
        OK(close(gate[1]));
        OK(close(pair.server));
        become_cat();
    }
    OK(close(pair.client));
    expect_eof(pair.server); // while the child is still running
    OK(close(gate[1]));
    OK(close(gate[0]));
    wait_child(pid);
}

static void *answer_later(void *argument)
{
    pause_ms(400);
    say(*(int *)argument, "answer");
    return NULL;
}

TEST(parent_does_not_poll_while_a_child_runs_another_program)
{
    struct pair pair = connected_pair();
    OK(fcntl(pair.client, F_SETFD, FD_CLOEXEC));
    OK(fcntl(pair.server, F_SETFD, FD_CLOEXEC));
    int gate[2], echo[2];
    OK(pipe(gate));
    OK(pipe(echo));
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(dup2(gate[0], 0));
        OK(dup2(echo[1], 1));
        OK(close(gate[1]));
        become_cat();
    }
    char byte = 'x';
    CHECK_EQ(write(gate[1], &byte, 1), 1);
    CHECK_EQ(read(echo[0], &byte, 1), 1); // the child runs cat by now
    pthread_t thread = start_thread(answer_later, &pair.server);
    struct rusage before, after;
    OK(getrusage(RUSAGE_THREAD, &before));
    expect(pair.client, "answer");
    OK(getrusage(RUSAGE_THREAD, &after));
    long sleeps = after.ru_nvcsw - before.ru_nvcsw;
    if (sleeps > 20) // polling every millisecond would be hundreds
        FAIL("blocked %ld times for one message", sleeps);
    join_thread(thread);
    kill_child(pid);
}

static void *answer_requests(void *argument)
{
    for (int i = 0; i < 4; i++) {
        expect(*(int *)argument, "request");
        say(*(int *)argument, "answer");
    }
    return NULL;
}

TEST(reading_parent_does_not_poll_while_a_child_writes) // like clients that use a process for each direction
{
    struct pair pair = connected_pair();
    pthread_t thread = start_thread(answer_requests, &pair.server);
    pid_t pid = fork_child();
    if (pid == 0) {
        for (int i = 0; i < 4; i++) {
            say(pair.client, "request");
            pause_ms(100);
        }
        _exit(0);
    }
    struct rusage before, after;
    expect(pair.client, "answer"); // the child is running
    OK(getrusage(RUSAGE_THREAD, &before));
    for (int i = 1; i < 4; i++)
        expect(pair.client, "answer");
    OK(getrusage(RUSAGE_THREAD, &after));
    long sleeps = after.ru_nvcsw - before.ru_nvcsw;
    if (sleeps > 40) // polling every millisecond would be hundreds
        FAIL("blocked %ld times for three messages", sleeps);
    join_thread(thread);
    wait_child(pid);
    ping_pong(pair.client, pair.server);
}

static void answer_each_byte(int fd)
{
    char byte;
    while (OK(read(fd, &byte, 1)) == 1)
        CHECK_EQ(write(fd, "k", 1), 1);
}

static void *answer_each_byte_here(void *argument)
{
    answer_each_byte(*(int *)argument);
    return NULL;
}

// Each question is sent when all of them may be blocked: none consumes the wake-up of another.
TEST(parent_threads_and_child_answer_on_one_connection)
{
    struct pair pair = connected_pair();
    pthread_t early = start_thread(answer_each_byte_here, &pair.server); // blocks before the child exists
    pause_ms(50);
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.client));
        answer_each_byte(pair.server);
        _exit(0);
    }
    char byte = '?';
    for (int i = 0; i < 200; i++) {
        if (i % 8 == 0)
            pause_ms(2);
        CHECK_EQ(write(pair.client, &byte, 1), 1);
        CHECK_EQ(read(pair.client, &byte, 1), 1);
    }
    OK(shutdown(pair.client, SHUT_WR));
    join_thread(early);
    wait_child(pid);
    expect_silent(pair.client, POLLHUP);
}

TEST(exec_on_a_copy_without_close_on_exec)
{
    struct pair pair = connected_pair();
    OK(fcntl(pair.server, F_SETFD, FD_CLOEXEC)); // dup2 does not copy the flag
    const int others[] = {pair.client, pair.listener};
    char *const argv[] = {"cat", NULL};
    pid_t pid = exec_on(pair.server, argv, others, 2);
    OK(close(pair.server));
    echo_and_end(pair.client, "by a copy", pid);
}

TEST(close_range_with_cloexec_leaves_lower_descriptors_alone)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(dup2(pair.server, 0));
        OK(dup2(pair.server, 1));
        OK(close_range(3, ~0u, CLOSE_RANGE_CLOEXEC));
        become_cat();
    }
    OK(close(pair.server));
    echo_and_end(pair.client, "still there", pid);
}

TEST(close_range_with_cloexec_closes_at_exec)
{
    struct pair pair = connected_pair();
    int gate[2];
    OK(pipe(gate));
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(dup2(gate[0], 0));
        OK(close_range(3, ~0u, CLOSE_RANGE_CLOEXEC));
        become_cat();
    }
    OK(close(pair.client));
    expect_eof(pair.server); // while the child is still running
    OK(close(gate[1]));
    wait_child(pid);
}

TEST(close_range_rejects_unknown_flags)
{
    struct pair pair = connected_pair();
    CHECK_ERR(close_range(pair.client, pair.client, 1u << 30), EINVAL);
    ping_pong(pair.client, pair.server);
}

// `keep` is one of the ways to let a descriptor survive exec.
static void check_listener_survives_exec(void (*keep)(int))
{
    struct address at;
    char number[16];
    int listener = listen_anywhere(&at);
    OK(fcntl(listener, F_SETFD, FD_CLOEXEC));
    pid_t pid = fork_child();
    if (pid == 0) {
        keep(listener);
        snprintf(number, sizeof number, "%d", listener);
        execl("/proc/self/exe", "semantics", "--echo-accepted", number, "1", (char *)NULL);
        FAIL("exec failed");
    }
    OK(close(listener));
    int client = dial(&at);
    echo_and_end(client, "a new program", pid);
}

static void keep_by_fcntl(int fd) { OK(fcntl(fd, F_SETFD, 0)); }
static void keep_by_ioctl(int fd) { OK(ioctl(fd, FIONCLEX)); }
static void keep_by_dup2(int fd)
{
    int spare = OK(dup(0));
    OK(dup2(fd, spare));
    OK(dup2(spare, fd));
    OK(close(spare));
}

TEST(listener_kept_by_fcntl_survives_exec) { check_listener_survives_exec(keep_by_fcntl); }
TEST(listener_kept_by_ioctl_survives_exec) { check_listener_survives_exec(keep_by_ioctl); }
TEST(listener_kept_by_dup2_survives_exec) { check_listener_survives_exec(keep_by_dup2); }

TEST(exec_after_accept_in_a_child)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = fork_child();
    if (pid == 0) {
        int fd = accept_from(listener);
        OK(dup2(fd, 0));
        OK(dup2(fd, 1));
        OK(close(fd));
        become_cat();
    }
    int client = dial(&at);
    echo_and_end(client, "inetd", pid);
}

TEST(posix_spawn_with_dup2_actions)
{
    struct pair pair = connected_pair();
    posix_spawn_file_actions_t actions;
    CHECK_EQ(posix_spawn_file_actions_init(&actions), 0);
    CHECK_EQ(posix_spawn_file_actions_adddup2(&actions, pair.server, 0), 0);
    CHECK_EQ(posix_spawn_file_actions_adddup2(&actions, pair.server, 1), 0);
    CHECK_EQ(posix_spawn_file_actions_addclose(&actions, pair.server), 0);
    CHECK_EQ(posix_spawn_file_actions_addclose(&actions, pair.client), 0);
    char *argv[] = {"cat", NULL};
    pid_t pid;
    CHECK_EQ(posix_spawnp(&pid, "cat", &actions, NULL, argv, environ), 0);
    OK(close(pair.server));
    echo_and_end(pair.client, "spawned", pid);
}

TEST(vfork_and_exec)
{
    struct pair pair = connected_pair();
    OK(fcntl(pair.client, F_SETFD, FD_CLOEXEC));
    OK(fcntl(pair.server, F_SETFD, FD_CLOEXEC));
    pid_t pid = vfork();
    if (pid == 0) {
        dup2(pair.server, 0);
        dup2(pair.server, 1);
        execlp("cat", "cat", (char *)NULL);
        _exit(9);
    }
    CHECK(pid > 0);
    ping_pong(pair.client, pair.client); // cat echoes
    ping_pong(pair.client, pair.client);
    OK(close(pair.server));
    OK(shutdown(pair.client, SHUT_WR));
    expect_eof(pair.client);
    wait_child(pid);
}

// ---- options ------------------------------------------------------------------------------------

// Number of questions and answers that a connection has carried before another process uses it.
static const int QUESTIONS[] = {0, 4};

static struct pair asked_pair(int questions)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < questions; i++)
        ping_pong(pair.client, pair.server);
    return pair;
}

static void check_exit(pid_t pid, int want)
{
    int status;
    CHECK_EQ(OK(waitpid(pid, &status, 0)), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), want);
}

// For exec in a process without children, and for exec in a child.
TEST(options_survive_exec)
{
    char *const argv[] = {"/proc/self/exe", "--options-of-stdin", NULL};
    for (int run = 0; run < 64; run++) {
        int bits = run % 16, questions = QUESTIONS[run / 16 % 2];
        struct pair pair;
        if (run < 32) {
            pair = asked_pair(questions);
            set_options(pair.server, bits);
        }
        pid_t pid = fork_child();
        if (pid == 0) {
            if (run >= 32) {
                pair = asked_pair(questions);
                set_options(pair.server, bits);
            }
            OK(dup2(pair.server, 0));
            execv(argv[0], argv);
            FAIL("exec failed");
        }
        check_exit(pid, bits);
        if (run < 32)
            close_pair(&pair);
    }
}

// One program holds both endpoints of a connection across exec.
TEST(both_endpoints_survive_exec)
{
    for (int run = 0; run < 2; run++) {
        struct pair pair = asked_pair(QUESTIONS[run]);
        pid_t pid = fork_child();
        if (pid == 0) {
            say(pair.client, "before");
            OK(dup2(pair.client, 1));
            OK(dup2(pair.server, 0));
            execl("/proc/self/exe", "semantics", "--use-both-endpoints", (char *)NULL);
            FAIL("exec failed");
        }
        close_pair(&pair);
        wait_child(pid);
    }
}

TEST(options_survive_posix_spawn)
{
    char *const argv[] = {"semantics", "--options-of-stdin", NULL};
    for (int run = 0; run < 32; run++) {
        struct pair pair = asked_pair(QUESTIONS[run / 16]);
        set_options(pair.server, run % 16);
        if (run % 2)
            OK(fcntl(pair.server, F_SETFD, FD_CLOEXEC));
        posix_spawn_file_actions_t actions;
        CHECK_EQ(posix_spawn_file_actions_init(&actions), 0);
        CHECK_EQ(posix_spawn_file_actions_adddup2(&actions, pair.server, 0), 0);
        pid_t pid;
        CHECK_EQ(posix_spawn(&pid, "/proc/self/exe", &actions, NULL, argv, environ), 0);
        CHECK_EQ(posix_spawn_file_actions_destroy(&actions), 0);
        check_exit(pid, run % 16);
        close_pair(&pair);
    }
}

// Whichever process sets them, also when another option is set in between.
TEST(options_are_shared_by_all_holders_of_a_connection)
{
    for (int run = 0; run < 2; run++) {
        struct pair pair = asked_pair(QUESTIONS[run]);
        set_options(pair.client, 3);
        int to_child[2], to_parent[2];
        char byte = 0;
        OK(pipe(to_child));
        OK(pipe(to_parent));
        pid_t pid = fork_child();
        if (pid == 0) {
            CHECK_EQ(options_of(pair.client), 3);
            CHECK_EQ(write(to_parent[1], &byte, 1), 1);
            CHECK_EQ(read(to_child[0], &byte, 1), 1);
            CHECK_EQ(options_of(pair.client), 14);
            set_options(pair.client, 5);
            CHECK_EQ(write(to_parent[1], &byte, 1), 1);
            _exit(0);
        }
        CHECK_EQ(read(to_parent[0], &byte, 1), 1);
        set_options(pair.client, 14);
        CHECK_EQ(write(to_child[1], &byte, 1), 1);
        CHECK_EQ(read(to_parent[0], &byte, 1), 1);
        struct timeval limit = {.tv_sec = 20};
        OK(setsockopt(pair.client, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
        CHECK_EQ(options_of(pair.client), 5);
        wait_child(pid);
        close_pair(&pair);
    }
}

TEST(vfork_child_leaves_the_parents_connections_alone)
{
    struct pair pair = connected_pair();
    pid_t pid = vfork();
    if (pid == 0) {
        close(pair.client);
        close(pair.server);
        execlp("true", "true", (char *)NULL);
        _exit(9);
    }
    wait_child(pid);
    ping_pong(pair.client, pair.server);
}

TEST(system_and_popen_disturb_nothing)
{
    struct pair pair = connected_pair();
    CHECK_EQ(system("true"), 0);
    FILE *pipe_file = popen("echo from a shell", "r");
    char line[64];
    CHECK(pipe_file != NULL && fgets(line, sizeof line, pipe_file) != NULL);
    CHECK(strcmp(line, "from a shell\n") == 0);
    CHECK_EQ(pclose(pipe_file), 0);
    ping_pong(pair.client, pair.server);
}

// ---- passing descriptors ------------------------------------------------------------------------

static void send_fd(int channel, int fd)
{
    char byte = 'f', control[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
    CHECK_EQ(sendmsg(channel, &message, 0), 1);
}

static int receive_fd(int channel)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec piece = {&byte, 1};
    struct msghdr message = {.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control,
                             .msg_controllen = sizeof control};
    CHECK_EQ(recvmsg(channel, &message, 0), 1);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    CHECK(header != NULL && header->cmsg_type == SCM_RIGHTS);
    int fd;
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

// The process that receives the socket after bind() serves all clients, although the sender listens too and never
// accepts.
TEST(a_socket_passed_before_listen_serves_where_accepted)
{
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    pid_t pid = fork_child();
    if (pid == 0) {
        int listener = receive_fd(channel[1]);
        OK(listen(listener, 128));
        say(channel[1], "listening");
        for (;;) {
            int fd = accept_from(listener);
            say(fd, "served");
            OK(close(fd));
        }
    }
    struct address at = ip4("127.0.0.1", 0);
    int listener = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(listener, ADDRESS(&at), at.size));
    at = name_of(listener);
    send_fd(channel[0], listener);
    OK(listen(listener, 128));
    expect(channel[0], "listening");
    for (int i = 0; i < 10; i++) {
        int fd = dial(&at);
        expect(fd, "served");
        OK(close(fd));
    }
    kill_child(pid);
}

// Starts a process that receives a connection and serves it; it is forked before the connection exists.
static pid_t start_receiver(int channel[2])
{
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    pid_t pid = fork_child();
    if (pid != 0) {
        OK(close(channel[1]));
        return pid;
    }
    OK(close(channel[0]));
    int fd = receive_fd(channel[1]);
    expect(fd, "hello taker");
    say(fd, "hello giver");
    pattern_recv(pattern_new(43), fd, 1000000, 10000);
    pattern_send(pattern_new(44), fd, 1000000, 10000);
    _exit(0);
}

static void use_receiver(int client)
{
    say(client, "hello taker");
    expect(client, "hello giver");
    pattern_send(pattern_new(43), client, 1000000, 9000);
    pattern_recv(pattern_new(44), client, 1000000, 9000);
    expect_eof(client);
}

TEST(scm_rights_passes_a_connection)
{
    int channel[2];
    pid_t pid = start_receiver(channel);
    struct pair pair = connected_pair();
    send_fd(channel[0], pair.server);
    OK(close(pair.server));
    use_receiver(pair.client);
    wait_child(pid);
}

TEST(scm_rights_passes_a_used_connection_with_unread_data)
{
    int channel[2];
    pid_t pid = start_receiver(channel);
    struct pair pair = connected_pair();
    ping_pong(pair.client, pair.server);
    say(pair.client, "for the giver;hello ");
    expect(pair.server, "for the giver;");
    send_fd(channel[0], pair.server);
    OK(close(pair.server));
    say(pair.client, "taker");
    expect(pair.client, "hello giver");
    pattern_send(pattern_new(43), pair.client, 1000000, 9000);
    pattern_recv(pattern_new(44), pair.client, 1000000, 9000);
    expect_eof(pair.client);
    wait_child(pid);
}

TEST(scm_rights_in_flight_keeps_the_connection)
{
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    struct pair pair = connected_pair();
    send_fd(channel[0], pair.server);
    OK(close(pair.server)); // the only reference is in flight
    expect_silent(pair.client, POLLIN);
    say(pair.client, "kept");
    int server = receive_fd(channel[1]);
    expect(server, "kept");
    ping_pong(pair.client, server);
    OK(close(server));
    expect_eof(pair.client);
}

TEST(scm_rights_passes_a_listener)
{
    int channel[2];
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, channel));
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(channel[0]));
        int fd = accept_from(receive_fd(channel[1]));
        expect(fd, "hello");
        say(fd, "listener moved");
        _exit(0);
    }
    OK(close(channel[1]));
    struct address at;
    int listener = listen_anywhere(&at);
    send_fd(channel[0], listener);
    OK(close(listener));
    int client = dial(&at);
    say(client, "hello");
    expect(client, "listener moved");
    wait_child(pid);
}

// ---- killed processes ---------------------------------------------------------------------------

static pid_t start_victim(const struct address *at, void (*life)(int fd))
{
    pid_t pid = fork_child();
    if (pid != 0)
        return pid;
    life(dial(at));
    _exit(0);
}

static void live_idle(int fd)
{
    say(fd, "alive");
    for (;;)
        pause();
}

static void live_reading(int fd)
{
    char buffer[1000];
    say(fd, "alive");
    for (;;)
        recv_exact(fd, buffer, sizeof buffer);
}

static void live_writing(int fd)
{
    say(fd, "alive");
    pattern_send(pattern_new(45), fd, ~0ull, 10000);
}

static void live_without_reading(int fd)
{
    say(fd, "alive");
    await(fd, POLLIN);
    for (;;)
        pause();
}

TEST(killed_idle_peer_is_eof)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_idle);
    int fd = accept_from(listener);
    OK(close(listener));
    expect(fd, "alive");
    kill_child(pid);
    expect_eof(fd);
}

enum { SHORT_MESSAGES = 20000 };

// Waits until all messages have arrived, and then reads exactly those.
static void live_late_reading(int fd)
{
    static char bytes[SHORT_MESSAGES];
    say(fd, "alive");
    for (int arrived = 0; arrived < SHORT_MESSAGES; pause_ms(1))
        OK(ioctl(fd, FIONREAD, &arrived));
    for (size_t got = 0; got < SHORT_MESSAGES;) {
        ssize_t count = recv(fd, bytes, SHORT_MESSAGES - got, 0);
        CHECK(count > 0);
        got += (size_t)count;
    }
    say(fd, "read");
    for (;;)
        pause();
}

TEST(killed_peer_that_has_read_many_short_messages_is_eof)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_late_reading);
    int fd = accept_from(listener);
    expect(fd, "alive");
    for (int i = 0; i < SHORT_MESSAGES; i++)
        CHECK_EQ(send(fd, "x", 1, MSG_DONTWAIT), 1);
    expect(fd, "read");
    OK(shutdown(fd, SHUT_WR));
    kill_child(pid);
    expect_eof(fd);
}

static void *kill_later(void *argument)
{
    pause_ms(SILENCE_MS);
    OK(kill(*(pid_t *)argument, SIGKILL));
    return NULL;
}

TEST(killed_idle_peer_wakes_recv)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_idle);
    int fd = accept_from(listener);
    expect(fd, "alive");
    pthread_t thread = start_thread(kill_later, &pid);
    expect_eof(fd);
    join_thread(thread);
}

TEST(killed_idle_peer_wakes_poll_and_epoll)
{
    for (int use_epoll = 0; use_epoll < 2; use_epoll++) {
        struct address at;
        int listener = listen_anywhere(&at);
        pid_t pid = start_victim(&at, live_idle);
        int fd = accept_from(listener);
        expect(fd, "alive");
        int epoll = epoll_with(fd, EPOLLIN | EPOLLRDHUP);
        pthread_t thread = start_thread(kill_later, &pid);
        if (use_epoll)
            CHECK_EQ(epoll_one(epoll).events, EPOLLIN | EPOLLRDHUP);
        else
            CHECK_EQ(poll_once(fd, POLLRDHUP, WAIT_MS_MAX), POLLRDHUP);
        join_thread(thread);
    }
}

TEST(killed_peer_is_seen_before_it_is_reaped)
{
    // The victim is reaped only after the survivor has seen the end of the stream.
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_idle);
    int fd = accept_from(listener);
    expect(fd, "alive");
    OK(kill(pid, SIGKILL));
    expect_eof(fd);
    CHECK_EQ(waitpid(pid, NULL, 0), pid);
}

TEST(killed_writer_leaves_an_exact_prefix)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_writing);
    int fd = accept_from(listener);
    struct pattern *pattern = pattern_new(45);
    static char buffer[1 << 16];
    expect(fd, "alive");
    uint64_t position = 0;
    ssize_t got;
    while ((got = recv(fd, buffer, sizeof buffer, 0)) > 0) {
        pattern_check(pattern, position, buffer, got);
        if (position < 5000000 && position + got >= 5000000)
            OK(kill(pid, SIGKILL));
        position += got;
    }
    CHECK(got == 0 || errno == ECONNRESET);
    CHECK(position >= 5000000);
}

TEST(killed_reader_breaks_the_writer)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_reading);
    int fd = accept_from(listener);
    static char block[100000];
    expect(fd, "alive");
    ssize_t sent;
    for (int i = 0; (sent = send(fd, block, sizeof block, MSG_NOSIGNAL)) >= 0; i++)
        if (i == 50)
            OK(kill(pid, SIGKILL));
    CHECK(errno == ECONNRESET || errno == EPIPE);
    CHECK_ERR(send(fd, "x", 1, MSG_NOSIGNAL), EPIPE);
}

TEST(killed_peer_with_unread_bytes_resets_and_raises_hup)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_without_reading);
    int fd = accept_from(listener);
    expect(fd, "alive");
    fill_until_full(fd);
    int epoll = epoll_with(fd, EPOLLOUT);
    pthread_t thread = start_thread(kill_later, &pid);
    struct epoll_event event = epoll_one(epoll);
    CHECK_EQ(event.events, EPOLLOUT | EPOLLERR | EPOLLHUP);
    CHECK_EQ(poll_once(fd, POLLOUT, 0), POLLOUT | POLLERR | POLLHUP);
    char byte;
    CHECK_ERR(recv(fd, &byte, 1, 0), ECONNRESET);
    join_thread(thread);
}

TEST(killed_peer_with_unread_bytes_wakes_a_blocked_writer)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_without_reading);
    int fd = accept_from(listener);
    static char block[1 << 20];
    expect(fd, "alive");
    pthread_t thread = start_thread(kill_later, &pid);
    while (send(fd, block, sizeof block, MSG_NOSIGNAL) > 0)
        ;
    CHECK(errno == ECONNRESET || errno == EPIPE);
    join_thread(thread);
}

TEST(killed_before_accept_is_eof_after_its_data)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_idle);
    await(listener, POLLIN);
    pause_ms(SILENCE_MS);
    kill_child(pid);
    int fd = accept_from(listener);
    expect(fd, "alive");
    expect_eof(fd);
}

TEST(killed_client_leaves_others_alone)
{
    struct address at;
    int listener = listen_anywhere(&at);
    pid_t pid = start_victim(&at, live_writing);
    int doomed = accept_from(listener);
    int client = dial(&at), server = accept_from(listener);
    ping_pong(client, server);
    kill_child(pid);
    for (int i = 0; i < 100; i++)
        ping_pong(client, server);
    OK(close(doomed));
}

static pid_t start_server(const struct address *at, int ready)
{
    pid_t pid = fork_child();
    if (pid != 0)
        return pid;
    int listener = listen_at(at, 16);
    CHECK_EQ(write(ready, "r", 1), 1);
    for (;;) {
        int fd = accept_from(listener);
        say(fd, "welcome");
    }
}

TEST(killed_server_restarts_on_its_port)
{
    // Bound while the check runs, so that no other process is assigned the port.
    struct address at = ip4("127.0.0.1", 0);
    int keeper = OK(socket(AF_INET, SOCK_STREAM, 0)), yes = 1, ready[2];
    OK(setsockopt(keeper, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes));
    OK(bind(keeper, ADDRESS(&at), at.size));
    at = name_of(keeper);
    OK(pipe(ready));
    for (int round = 0; round < 4; round++) {
        char byte;
        pid_t pid = start_server(&at, ready[1]);
        CHECK_EQ(read(ready[0], &byte, 1), 1);
        int one = dial(&at), two = dial(&at);
        expect(one, "welcome");
        expect(two, "welcome");
        kill_child(pid);
        expect_eof(one);
        expect_eof(two);
        CHECK_ERR(try_dial(&at), ECONNREFUSED);
        OK(close(one));
        OK(close(two));
    }
}
