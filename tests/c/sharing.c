// Connections that several processes hold since a fork: one process closes, ends or runs another program, and the
// others go on. Each part is long enough for a connection to become busy again.
#include "check.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>

// Round trips after which a connection is certainly busy, and may have moved.
#define BUSY 100

static void go_on(const struct pair *pair, int rounds)
{
    struct pattern *pattern = pattern_new(52);
    uint8_t bytes[512];
    uint64_t position = 0;
    for (int round = 0; round < rounds; round++) {
        size_t size = 1 + (size_t)round * 37 % sizeof bytes;
        int ends[2] = {pair->client, pair->server};
        for (int from = 0; from < 2; from++) {
            pattern_fill(pattern, position, bytes, size);
            send_all(ends[from], bytes, size);
            memset(bytes, 0, size);
            recv_exact(ends[1 - from], bytes, size);
            pattern_check(pattern, position, bytes, size);
            position += size;
        }
    }
    free(pattern);
}

static void close_on_exec(const struct pair *pair)
{
    OK(fcntl(pair->client, F_SETFD, FD_CLOEXEC));
    OK(fcntl(pair->server, F_SETFD, FD_CLOEXEC));
    OK(fcntl(pair->listener, F_SETFD, FD_CLOEXEC));
}

// Ways in which a process ends.
enum end { UNDERSCORE_EXIT, EXIT, QUICK_EXIT, EXIT_GROUP, EXIT_THREAD, CLOSES_FIRST, RUNS_A_PROGRAM, IS_KILLED, ENDS };

__attribute__((noreturn)) static void end_by(enum end end, const struct pair *pair)
{
    switch (end) {
    case EXIT:
        exit(0);
    case QUICK_EXIT:
        quick_exit(0);
    case EXIT_GROUP:
        syscall(SYS_exit_group, 0);
        break;
    case EXIT_THREAD:
        syscall(SYS_exit, 0);
        break;
    case CLOSES_FIRST:
        OK(close(pair->client));
        if (pair->server >= 0)
            OK(close(pair->server));
        pause_ms(SILENCE_MS);
        break;
    case RUNS_A_PROGRAM:
        execlp("true", "true", (char *)NULL);
        FAIL("exec of true failed");
    case IS_KILLED:
        raise(SIGKILL);
        break;
    default:
        break;
    }
    _exit(0);
}

static void await_end(enum end end, pid_t pid)
{
    if (end != IS_KILLED)
        return wait_child(pid);
    int status;
    CHECK_EQ(OK(waitpid(pid, &status, 0)), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(a_parent_goes_on_after_each_end_of_its_child)
{
    for (enum end end = 0; end < ENDS; end++) {
        struct pair pair = connected_pair();
        close_on_exec(&pair);
        pid_t pid = fork_child();
        if (pid == 0) {
            ping_pong(pair.client, pair.server);
            end_by(end, &pair);
        }
        await_end(end, pid);
        go_on(&pair, BUSY);
        close_pair(&pair);
    }
}

TEST(a_parent_goes_on_while_its_child_ends)
{
    struct pair pair = connected_pair();
    close_on_exec(&pair);
    for (enum end end = 0; end < ENDS; end++) {
        pid_t pid = fork_child();
        if (pid == 0)
            end_by(end, &pair);
        go_on(&pair, BUSY);
        await_end(end, pid);
    }
    go_on(&pair, BUSY);
}

TEST(a_child_goes_on_after_its_parent_closes)
{
    struct pair pair = connected_pair();
    int barrier[2];
    OK(pipe(barrier));
    pid_t pid = fork_child();
    if (pid == 0) {
        char byte;
        go_on(&pair, 3);
        CHECK_EQ(read(barrier[0], &byte, 1), 1);
        go_on(&pair, BUSY);
        _exit(0);
    }
    OK(close(pair.client));
    OK(close(pair.server));
    CHECK_EQ(write(barrier[1], "x", 1), 1);
    wait_child(pid);
}

TEST(one_end_goes_on_in_the_parent_and_the_other_in_the_child)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.client));
        for (int i = 0; i < 4 * BUSY; i++) {
            expect(pair.server, "to the child");
            say(pair.server, "and back");
        }
        _exit(0);
    }
    OK(close(pair.server));
    for (int i = 0; i < 4 * BUSY; i++) {
        say(pair.client, "to the child");
        expect(pair.client, "and back");
    }
    expect_eof(pair.client);
    wait_child(pid);
}

TEST(a_grandchild_goes_on_when_all_others_have_ended)
{
    struct pair pair = connected_pair();
    int report[2];
    OK(pipe(report));
    pid_t pid = fork_child();
    if (pid == 0) {
        if (fork_child() > 0)
            _exit(0);
        go_on(&pair, 2 * BUSY);
        CHECK_EQ(write(report[1], "x", 1), 1);
        _exit(0);
    }
    OK(close(pair.client));
    OK(close(pair.server));
    wait_child(pid);
    char byte;
    CHECK_EQ(read(report[0], &byte, 1), 1);
}

// Sends messages of one letter.
static void send_letters(int fd, char letter, int count)
{
    char message[4];
    memset(message, letter, sizeof message);
    for (int i = 0; i < count; i++)
        send_all(fd, message, sizeof message);
}

static void count_letters(int fd, int messages, int *of_parent, int *of_child)
{
    *of_parent = *of_child = 0;
    for (int i = 0; i < messages; i++) {
        char message[4];
        recv_exact(fd, message, sizeof message);
        CHECK(memcmp(message, message + 1, sizeof message - 1) == 0);
        *of_parent += message[0] == 'p';
        *of_child += message[0] == 'c';
    }
}

TEST(both_processes_send_and_then_one_goes_on)
{
    struct pair pair = connected_pair();
    for (int fork_number = 0; fork_number < 10; fork_number++) {
        pid_t pid = fork_child();
        if (pid == 0) {
            send_letters(pair.client, 'c', BUSY);
            send_letters(pair.server, 'c', BUSY);
            _exit(0);
        }
        send_letters(pair.client, 'p', BUSY);
        send_letters(pair.server, 'p', BUSY);
        int of_parent, of_child;
        count_letters(pair.server, 2 * BUSY, &of_parent, &of_child);
        CHECK(of_parent == BUSY && of_child == BUSY);
        count_letters(pair.client, 2 * BUSY, &of_parent, &of_child);
        CHECK(of_parent == BUSY && of_child == BUSY);
        wait_child(pid);
        go_on(&pair, BUSY);
    }
}

TEST(a_child_uses_a_connection_after_a_failed_exec)
{
    struct pair pair = connected_pair();
    close_on_exec(&pair);
    pid_t pid = fork_child();
    if (pid == 0) {
        for (int i = 0; i < 5; i++) {
            CHECK_ERR(execl("/nonexistent/program", "program", (char *)NULL), ENOENT);
            go_on(&pair, BUSY);
        }
        _exit(0);
    }
    wait_child(pid);
    go_on(&pair, BUSY);
}

TEST(a_child_ends_after_a_failed_exec)
{
    struct pair pair = connected_pair();
    close_on_exec(&pair);
    for (int i = 0; i < 20; i++) {
        pid_t pid = fork_child();
        if (pid == 0) {
            execl("/nonexistent/program", "program", (char *)NULL);
            execl("/another/nonexistent/program", "program", (char *)NULL);
            _exit(0);
        }
        go_on(&pair, 10); // without a wait for the child
        wait_child(pid);
    }
    go_on(&pair, BUSY);
}

TEST(signals_arrive_while_a_process_forks)
{
    struct pair pair = connected_pair();
    on_signal(SIGALRM, count_signal, SA_RESTART);
    for (int i = 0; i < 200; i++) {
        alarm_soon();
        pid_t pid = fork_child();
        if (pid == 0)
            _exit(0);
        wait_child(pid);
        ping_pong(pair.client, pair.server);
    }
    alarm_every_ms(0);
    CHECK(signals_seen > 0);
    go_on(&pair, BUSY);
}

TEST(a_process_goes_on_after_a_failed_fork)
{
    struct pair pair = connected_pair();
    for (int i = 0; i < 5; i++) {
        // Handlers can be shared only together with the memory.
        CHECK_ERR(syscall(SYS_clone, CLONE_SIGHAND | SIGCHLD, 0, 0, 0, 0), EINVAL);
        go_on(&pair, BUSY);
    }
}

// The processes share one table of descriptors: what the child closes, the parent does not have any more.
TEST(a_process_goes_on_with_a_child_that_shares_its_descriptors)
{
    struct pair pair = connected_pair(), other = connected_pair();
    go_on(&pair, BUSY);
    go_on(&other, BUSY);
    int barrier[2];
    OK(pipe(barrier));
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
    CHECK(pid >= 0);
    if (pid == 0) {
        go_on(&pair, BUSY);
        close_pair(&other);
        CHECK_EQ(write(barrier[1], "x", 1), 1);
        _exit(0);
    }
    char byte;
    CHECK_EQ(read(barrier[0], &byte, 1), 1);
    CHECK_ERR(send(other.client, "x", 1, 0), EBADF);
    wait_child(pid);
    go_on(&pair, BUSY);
    struct pair another = connected_pair();
    go_on(&another, BUSY);
    close_pair(&another);
    close_pair(&pair);
}

TEST(a_process_that_has_forked_gets_all_descriptors)
{
    enum { LIMIT = 200 };
    struct rlimit limit = {LIMIT, LIMIT};
    OK(setrlimit(RLIMIT_NOFILE, &limit));
    int used = 3, opened = 0; // the pair and its listener
    for (int fd = 0; fd < LIMIT; fd++)
        used += fcntl(fd, F_GETFD) != -1;
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0)
        _exit(0);
    wait_child(pid);
    while (socket(AF_INET, SOCK_STREAM, 0) != -1)
        opened++;
    CHECK_EQ(errno, EMFILE);
    CHECK_EQ(used + opened, LIMIT);
    go_on(&pair, BUSY);
}

static void *receive_once(void *argument)
{
    expect(*(int *)argument, "for the blocked thread");
    return NULL;
}

TEST(a_child_goes_on_while_a_thread_of_its_parent_is_blocked_in_a_closed_connection)
{
    struct pair pair = connected_pair();
    int server = pair.server, barrier[2];
    OK(pipe(barrier));
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.client));
        char byte;
        CHECK_EQ(read(barrier[0], &byte, 1), 1);
        for (int i = 0; i < BUSY; i++) {
            expect(server, "for the child");
            say(server, "from the child");
        }
        _exit(0);
    }
    pthread_t thread = start_thread(receive_once, &server);
    pause_ms(SILENCE_MS);
    // A number of its own, so that the thread's number stays valid.
    OK(close(pair.server));
    say(pair.client, "for the blocked thread");
    join_thread(thread);
    CHECK_EQ(write(barrier[1], "x", 1), 1);
    for (int i = 0; i < BUSY; i++) {
        say(pair.client, "for the child");
        expect(pair.client, "from the child");
    }
    wait_child(pid);
}

TEST(duplicates_in_parent_and_child_are_closed_one_by_one)
{
    struct pair pair = connected_pair();
    int duplicate = OK(dup(pair.server));
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.server));
        struct pair rest = {.client = pair.client, .server = duplicate};
        go_on(&rest, BUSY);
        _exit(0);
    }
    wait_child(pid);
    go_on(&pair, BUSY);
    OK(close(pair.server));
    struct pair rest = {.client = pair.client, .server = duplicate};
    go_on(&rest, BUSY);
}

SERVER(children_come_and_go_while_a_server_serves)
{
    int fd = me->fd, epoll = epoll_with(fd, EPOLLIN);
    pid_t children[4] = {0};
    for (int request = 0; request < 1200; request++) {
        if (request % 60 == 30) {
            int which = request / 60 % 4;
            if (children[which] != 0)
                wait_child(children[which]);
            children[which] = fork_child();
            if (children[which] == 0) {
                pause_ms(request % 7);
                _exit(0);
            }
        }
        epoll_one(epoll);
        char text[8] = {0};
        recv_exact(fd, text, 7);
        say(fd, text);
    }
    for (int which = 0; which < 4; which++)
        wait_child(children[which]);
    OK(close(epoll));
}

CLIENT(children_come_and_go_while_a_server_serves)
{
    for (int request = 0; request < 1200; request++) {
        char text[16];
        snprintf(text, sizeof text, "%07d", request);
        say(me->fd, text);
        expect(me->fd, text);
    }
}

SERVER(a_server_forks_for_each_connection_and_serves_long)
{
    for (int connection = 0; connection < 3; connection++) {
        int fd = connection == 0 ? me->fd : accept_from(me->listener);
        pid_t pid = fork_child();
        if (pid == 0) {
            struct pattern *pattern = pattern_new(7);
            for (int request = 0; request < 300; request++) {
                pattern_recv(pattern, fd, 700, 700);
                pattern_send(pattern, fd, 900, 900);
            }
            _exit(0);
        }
        OK(close(fd));
        me->fd = -1;
        wait_child(pid);
        meet(me);
    }
}

CLIENT(a_server_forks_for_each_connection_and_serves_long)
{
    struct address at = peer_of(me->fd);
    for (int connection = 0; connection < 3; connection++) {
        int fd = connection == 0 ? me->fd : dial(&at);
        struct pattern *pattern = pattern_new(7);
        for (int request = 0; request < 300; request++) {
            pattern_send(pattern, fd, 700, 700);
            pattern_recv(pattern, fd, 900, 900);
        }
        free(pattern);
        expect_eof(fd);
        OK(close(fd));
        me->fd = -1;
        meet(me);
    }
}

TEST(a_child_serves_by_its_standard_descriptors)
{
    struct pair pair = connected_pair();
    pid_t pid = fork_child();
    if (pid == 0) {
        OK(close(pair.client));
        OK(dup2(pair.server, 0));
        OK(dup2(pair.server, 1));
        OK(close(pair.server));
        for (int i = 0; i < 2 * BUSY; i++) {
            char text[6] = {0};
            for (int got = 0; got < 5;)
                got += (int)OK(read(0, text + got, (size_t)(5 - got)));
            CHECK(strcmp(text, "query") == 0);
            CHECK_EQ(write(1, "reply", 5), 5);
        }
        exit(0);
    }
    OK(close(pair.server));
    for (int i = 0; i < 2 * BUSY; i++) {
        say(pair.client, "query");
        expect(pair.client, "reply");
    }
    expect_eof(pair.client);
    wait_child(pid);
}

// The sender is gone when the receiver forks: parent and child share what is unread, each byte once.
SERVER(parent_and_child_receive_what_a_peer_has_left_behind)
{
    struct pattern *pattern = pattern_new(9);
    char bytes[10000];
    meet(me);
    pause_ms(SILENCE_MS);
    for (uint64_t position = 0; position < 40000; position += 2 * sizeof bytes) {
        pid_t pid = fork_child();
        if (pid == 0) {
            int unread;
            await(me->fd, POLLIN);
            OK(ioctl(me->fd, FIONREAD, &unread));
            CHECK_EQ(unread, 40000 - position);
            CHECK_EQ(recv(me->fd, bytes, 9, MSG_PEEK), 9);
            pattern_check(pattern, position, bytes, 9);
            recv_exact(me->fd, bytes, sizeof bytes);
            pattern_check(pattern, position, bytes, sizeof bytes);
            _exit(0);
        }
        wait_child(pid);
        recv_exact(me->fd, bytes, sizeof bytes);
        pattern_check(pattern, position + sizeof bytes, bytes, sizeof bytes);
    }
    expect_eof(me->fd);
}

CLIENT(parent_and_child_receive_what_a_peer_has_left_behind)
{
    pattern_send(pattern_new(9), me->fd, 40000, 1000);
    OK(close(me->fd));
    me->fd = -1;
    meet(me);
}

// The peer of a connection that goes on in a child has watched it all the time.
static const uint32_t watch_modes[] = {0, EPOLLET, EPOLLONESHOT, EPOLLET | EPOLLONESHOT};

SERVER(a_child_goes_on_with_a_connection_that_the_peer_watches)
{
    for (size_t mode = 0; mode < sizeof watch_modes / sizeof *watch_modes; mode++) {
        int fd = accept_from(me->listener);
        for (int i = 0; i < BUSY; i++) {
            expect(fd, "request");
            say(fd, "answer");
        }
        pid_t pid = fork_child();
        if (pid == 0) {
            int epoll = epoll_with(fd, EPOLLIN | watch_modes[mode]);
            for (int i = 0; i < 3 * BUSY; i++) {
                epoll_one(epoll);
                struct epoll_event again = {.events = EPOLLIN | watch_modes[mode]};
                expect(fd, "request");
                if (watch_modes[mode] & EPOLLONESHOT)
                    OK(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &again));
                say(fd, "answer");
            }
            _exit(0);
        }
        OK(close(fd));
        wait_child(pid);
    }
}

CLIENT(a_child_goes_on_with_a_connection_that_the_peer_watches)
{
    struct address at = peer_of(me->fd);
    for (size_t mode = 0; mode < sizeof watch_modes / sizeof *watch_modes; mode++) {
        int fd = dial(&at), epoll = epoll_with(fd, EPOLLIN | watch_modes[mode]);
        for (int i = 0; i < 4 * BUSY; i++) {
            say(fd, "request");
            struct epoll_event again = {.events = EPOLLIN | watch_modes[mode]};
            epoll_one(epoll);
            expect(fd, "answer");
            if (watch_modes[mode] & EPOLLONESHOT)
                OK(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &again));
        }
        expect_eof(fd);
        OK(close(epoll));
        OK(close(fd));
    }
}

// ---- what a peer has left -----------------------------------------------------------------------

// Ways in which a peer leaves what it has sent.
enum leave { LEAVES_BY_KILL, LEAVES_BY_CLOSE, LEAVES_BY_EXIT, LEAVES_BY_SHUTDOWN, LEAVES };

#define LEFT_BYTES 48000
#define LEFT_MESSAGE 8

// A peer that has sent LEFT_BYTES, and leaves when it is told to.
struct leaver {
    pid_t pid;
    int fd;      // this side of the connection
    int command; // a byte tells the peer to leave
};

static struct leaver start_leaver(enum leave leave, int listener)
{
    struct address at = name_of(listener);
    int command[2], report[2];
    OK(pipe(command));
    OK(pipe(report));
    struct leaver leaver = {.command = command[1]};
    leaver.pid = fork_child();
    if (leaver.pid == 0) {
        int fd = dial(&at);
        char byte;
        for (int i = 0; i < BUSY; i++) {
            say(fd, "request");
            expect(fd, "answer");
        }
        pattern_send(pattern_new(9), fd, LEFT_BYTES, 1000);
        CHECK_EQ(write(report[1], "x", 1), 1);
        CHECK_EQ(read(command[0], &byte, 1), 1);
        switch (leave) {
        case LEAVES_BY_KILL:
            raise(SIGKILL);
            break;
        case LEAVES_BY_CLOSE:
            OK(close(fd));
            break;
        case LEAVES_BY_SHUTDOWN:
            OK(shutdown(fd, SHUT_WR));
            break;
        default:
            break;
        }
        if (leave != LEAVES_BY_EXIT) {
            CHECK_EQ(write(report[1], "x", 1), 1);
            CHECK_EQ(read(command[0], &byte, 1), 1);
        }
        _exit(0);
    }
    OK(close(command[0]));
    leaver.fd = accept_from(listener);
    for (int i = 0; i < BUSY; i++) {
        expect(leaver.fd, "request");
        say(leaver.fd, "answer");
    }
    char byte;
    CHECK_EQ(read(report[0], &byte, 1), 1);
    OK(close(report[0]));
    OK(close(report[1]));
    return leaver;
}

// Has the peer leave, and waits until the end of its stream is here.
static void have_leave(const struct leaver *leaver)
{
    CHECK_EQ(write(leaver->command, "x", 1), 1);
    await(leaver->fd, POLLRDHUP);
}

static void end_leaver(const struct leaver *leaver, enum leave leave)
{
    if (leave != LEAVES_BY_KILL && leave != LEAVES_BY_EXIT)
        CHECK_EQ(write(leaver->command, "x", 1), 1);
    await_end(leave == LEAVES_BY_KILL ? IS_KILLED : EXIT, leaver->pid);
    OK(close(leaver->command));
    OK(close(leaver->fd));
}

// Receives the next bytes in one of several ways.
static void receive_left(int fd, int way, uint64_t position, size_t size)
{
    static struct pattern *pattern;
    if (pattern == NULL)
        pattern = pattern_new(9);
    char *bytes = calloc(1, size);
    int unread;
    CHECK(bytes != NULL);
    switch (way % 4) {
    case 0:
        OK(ioctl(fd, FIONREAD, &unread));
        CHECK_EQ(unread, LEFT_BYTES - position);
        recv_exact(fd, bytes, size);
        break;
    case 1:
        await(fd, POLLIN);
        CHECK_EQ(recv(fd, bytes, size, MSG_WAITALL), size);
        break;
    case 2:
        CHECK_EQ(recv(fd, bytes, 9, MSG_PEEK), 9);
        pattern_check(pattern, position, bytes, 9);
        CHECK_EQ(recv(fd, bytes, size, MSG_PEEK | MSG_WAITALL), size);
        pattern_check(pattern, position, bytes, size);
        memset(bytes, 0, size);
        recv_exact(fd, bytes, size);
        break;
    default:;
        struct iovec spans[2] = {{bytes, 5}, {bytes + 5, size - 5}};
        CHECK_EQ(readv(fd, spans, 2), size);
        break;
    }
    pattern_check(pattern, position, bytes, size);
    free(bytes);
}

// Parent and children receive alternately.
static void receive_alternately(int fd, int way, uint64_t begin)
{
    size_t size = 4000;
    for (uint64_t position = begin; position < LEFT_BYTES; position += 2 * size, way++) {
        pid_t pid = fork_child();
        if (pid == 0) {
            receive_left(fd, way, position, size);
            _exit(0);
        }
        wait_child(pid);
        receive_left(fd, way + 1, position + size, size);
    }
    char byte;
    CHECK_EQ(recv(fd, &byte, 1, 0), 0);
}

static void leave_and_receive(bool leaves_before_fork)
{
    struct address at;
    int listener = listen_anywhere(&at);
    for (enum leave leave = 0; leave < LEAVES; leave++) {
        for (int way = 0; way < 4; way++) {
            snprintf(failure_note, sizeof failure_note, "end %d, way %d: ", leave, way);
            struct leaver leaver = start_leaver(leave, listener);
            if (leaves_before_fork)
                have_leave(&leaver);
            pid_t pid = fork_child();
            if (pid == 0) {
                if (!leaves_before_fork)
                    await(leaver.fd, POLLRDHUP);
                receive_left(leaver.fd, way, 0, 8000);
                _exit(0);
            }
            if (!leaves_before_fork)
                have_leave(&leaver);
            wait_child(pid);
            receive_left(leaver.fd, way + 1, 8000, 8000);
            receive_alternately(leaver.fd, way + 2, 16000);
            end_leaver(&leaver, leave);
        }
    }
    OK(close(listener));
}

TEST(parent_and_child_receive_what_a_peer_has_left_before_the_fork)
{
    leave_and_receive(true);
}

TEST(parent_and_child_receive_what_a_peer_leaves_after_the_fork)
{
    leave_and_receive(false);
}

// Parent and children receive at once: each message reaches one of them.
TEST(processes_receive_what_a_peer_has_left_at_the_same_time)
{
    enum { READERS = 3, MESSAGES = LEFT_BYTES / LEFT_MESSAGE };
    struct address at;
    int listener = listen_anywhere(&at);
    struct pattern *pattern = pattern_new(9);
    static uint8_t all[LEFT_BYTES];
    pattern_fill(pattern, 0, all, LEFT_BYTES);
    for (enum leave leave = 0; leave < LEAVES; leave++) {
        snprintf(failure_note, sizeof failure_note, "end %d: ", leave);
        struct leaver leaver = start_leaver(leave, listener);
        have_leave(&leaver);
        pid_t readers[READERS];
        int counts[2];
        OK(pipe(counts));
        for (int i = 0; i <= READERS; i++) {
            if (i < READERS && (readers[i] = fork_child()) != 0)
                continue;
            int count = 0;
            uint8_t bytes[LEFT_MESSAGE], *found = all;
            for (ssize_t got; (got = OK(recv(leaver.fd, bytes, sizeof bytes, 0))) > 0; count++) {
                CHECK_EQ(got, LEFT_MESSAGE);
                // Each reader finds its messages in the order of the stream.
                while (found < all + LEFT_BYTES && memcmp(found, bytes, sizeof bytes) != 0)
                    found += LEFT_MESSAGE;
                CHECK(found < all + LEFT_BYTES);
                found += LEFT_MESSAGE;
            }
            CHECK_EQ(write(counts[1], &count, sizeof count), sizeof count);
            if (i < READERS)
                _exit(0);
        }
        int sum = 0;
        for (int i = 0, count; i <= READERS; i++, sum += count)
            CHECK_EQ(read(counts[0], &count, sizeof count), sizeof count);
        CHECK_EQ(sum, MESSAGES);
        for (int i = 0; i < READERS; i++)
            wait_child(readers[i]);
        OK(close(counts[0]));
        OK(close(counts[1]));
        end_leaver(&leaver, leave);
    }
    OK(close(listener));
}

// ---- at random ----------------------------------------------------------------------------------

#define STEPS 500

// One end of a conversation, which processes hand over, lend and share. A seed determines it.
struct talk {
    int fd;
    int side;
    int report;
    int step;
    uint64_t steps;    // random numbers of both sides
    uint64_t decisions; // random numbers of this side
    uint64_t position;
    struct pattern *pattern;
    bool kills;      // Children are killed.
    pid_t helpers[STEPS];
    enum end ends[STEPS];
    int helper_count;
};

static unsigned below(uint64_t *state, unsigned limit)
{
    return (unsigned)(random_next(state) % limit);
}

static void take_step(struct talk *me, bool by_another)
{
    static const size_t sizes[] = {8, 100, 100, 1000, 5000, 150000};
    bool sends = below(&me->steps, 2) == (unsigned)me->side;
    size_t size = 1 + below(&me->steps, sizes[below(&me->steps, sizeof sizes / sizeof *sizes)]);
    if (!by_another) {
        char *bytes = malloc(size);
        CHECK(bytes != NULL);
        pattern_fill(me->pattern, me->position, bytes, size);
        if (sends) {
            send_all(me->fd, bytes, size);
        } else {
            if (below(&me->decisions, 3) == 0)
                await(me->fd, POLLIN);
            memset(bytes, 0, size);
            recv_exact(me->fd, bytes, size);
            pattern_check(me->pattern, me->position, bytes, size);
        }
        free(bytes);
    }
    me->position += size;
    me->step++;
}

static void await_helpers(struct talk *me)
{
    for (int i = 0; i < me->helper_count; i++)
        await_end(me->ends[i], me->helpers[i]);
    me->helper_count = 0;
}

// Forks a process that has the connection for a while and does nothing with it.
static void start_helper(struct talk *me)
{
    enum end end = below(&me->decisions, me->kills ? ENDS : IS_KILLED);
    unsigned pause_us = below(&me->decisions, 3) * 700, failures = below(&me->decisions, 8);
    pid_t pid = fork_child();
    if (pid == 0) {
        struct pair pair = {.client = me->fd, .server = -1};
        usleep(pause_us);
        for (; failures > 5; failures--)
            execl("/nonexistent/program", "program", (char *)NULL);
        end_by(end, &pair);
    }
    me->ends[me->helper_count] = end;
    me->helpers[me->helper_count++] = pid;
}

// Goes on in a child.
static void hand_over(struct talk *me)
{
    bool waits = below(&me->decisions, 2), closes = below(&me->decisions, 2);
    int helpers = me->helper_count;
    me->helper_count = 0;
    pid_t pid = fork_child();
    if (pid == 0)
        return;
    me->helper_count = helpers;
    if (closes || waits)
        OK(close(me->fd));
    if (waits)
        wait_child(pid);
    await_helpers(me);
    _exit(0);
}

// Has some steps done by a child, and goes on after its end.
static void lend(struct talk *me)
{
    int steps = 1 + (int)below(&me->decisions, 40);
    pid_t pid = fork_child();
    for (int i = 0; i < steps && me->step < STEPS - 1; i++)
        take_step(me, pid != 0);
    if (pid == 0)
        _exit(0);
    wait_child(pid);
}

static void *keep_busy(void *argument)
{
    struct pair *pair = argument;
    for (;;)
        ping_pong(pair->client, pair->server);
    return NULL;
}

__attribute__((noreturn)) static void converse(int fd, int side, uint64_t seed, int report)
{
    struct talk *me = malloc(sizeof *me);
    CHECK(me != NULL);
    *me = (struct talk){.fd = fd, .side = side, .report = report, .steps = seed * 1000003};
    me->decisions = me->steps + 77 + (uint64_t)side;
    me->pattern = pattern_new(seed);
    snprintf(failure_note, sizeof failure_note, "seed %llu, side %d: ", (unsigned long long)seed, side);
    int on = 1;
    OK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
    me->kills = below(&me->decisions, 4) == 0;
    if (!me->kills || below(&me->decisions, 2) == 0)
        OK(fcntl(fd, F_SETFD, FD_CLOEXEC));
    if (below(&me->decisions, 3) == 0) {
        static struct pair noise;
        noise = connected_pair();
        start_thread(keep_busy, &noise);
    }
    while (me->step < STEPS) {
        unsigned decision = below(&me->decisions, 100);
        if (decision < 3)
            start_helper(me);
        else if (decision == 3)
            hand_over(me);
        else if (decision == 4)
            lend(me);
        take_step(me, false);
    }
    CHECK_EQ(write(me->report, "x", 1), 1);
    await_helpers(me);
    _exit(0);
}

TEST(forks_at_random)
{
    const char *first_text = getenv("RANDOM_SEED"), *count_text = getenv("RANDOM_COUNT");
    uint64_t first = first_text ? strtoull(first_text, NULL, 10) : 1;
    uint64_t count = count_text ? strtoull(count_text, NULL, 10) : 12;
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct address at;
        int listener = listen_anywhere(&at), report[2];
        OK(pipe(report));
        pid_t roles[2];
        for (int side = 0; side < 2; side++) {
            roles[side] = fork_child();
            if (roles[side] == 0)
                converse(side == 0 ? dial(&at) : accept_from(listener), side, seed, report[1]);
        }
        for (int side = 0; side < 2; side++) {
            char byte;
            CHECK_EQ(read(report[0], &byte, 1), 1);
        }
        wait_child(roles[0]);
        wait_child(roles[1]);
        OK(close(listener));
        OK(close(report[0]));
        OK(close(report[1]));
    }
}
