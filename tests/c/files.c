// Files and pipes: sendfile and splice.
#include "check.h"

#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/sendfile.h>

static int file_of(const struct pattern *pattern, size_t size)
{
    int file = OK(memfd_create("content", MFD_CLOEXEC));
    char *buffer = malloc(size);
    pattern_fill(pattern, 0, buffer, size);
    CHECK_EQ(write(file, buffer, size), size);
    free(buffer);
    OK(lseek(file, 0, SEEK_SET));
    return file;
}

TEST(sendfile_without_offset_moves_the_file_position)
{
    struct pair pair = connected_pair();
    struct pattern *pattern = pattern_new(17);
    int file = file_of(pattern, 10000);
    CHECK_EQ(sendfile(pair.client, file, NULL, 6000), 6000);
    CHECK_EQ(lseek(file, 0, SEEK_CUR), 6000);
    CHECK_EQ(sendfile(pair.client, file, NULL, 6000), 4000);
    CHECK_EQ(sendfile(pair.client, file, NULL, 6000), 0);
    pattern_recv(pattern, pair.server, 10000, 4096);
}

TEST(sendfile_with_offset_leaves_the_file_position)
{
    struct pair pair = connected_pair();
    struct pattern *pattern = pattern_new(18);
    int file = file_of(pattern, 10000);
    off_t offset = 1000;
    CHECK_EQ(sendfile(pair.client, file, &offset, 5000), 5000);
    CHECK_EQ(offset, 6000);
    CHECK_EQ(lseek(file, 0, SEEK_CUR), 0);
    char got[5000];
    recv_exact(pair.server, got, sizeof got);
    pattern_check(pattern, 1000, got, sizeof got);
}

SERVER(sendfile_large)
{
    pattern_recv(pattern_new(19), me->fd, 16 << 20, 65536);
    expect_eof(me->fd);
}
CLIENT(sendfile_large)
{
    int file = file_of(pattern_new(19), 16 << 20);
    off_t offset = 0;
    while (offset < 16 << 20) {
        off_t before = offset;
        ssize_t sent = OK(sendfile(me->fd, file, &offset, (16 << 20) - offset));
        CHECK(sent > 0);
        CHECK_EQ(offset, before + sent);
    }
}

TEST(sendfile_nonblocking_is_partial)
{
    struct pair pair = connected_pair();
    struct pattern *pattern = pattern_new(20);
    int file = file_of(pattern, 32 << 20);
    set_nonblocking(pair.client);
    off_t offset = 0;
    ssize_t sent;
    while ((sent = sendfile(pair.client, file, &offset, 32 << 20)) > 0)
        CHECK(offset < 32 << 20);
    CHECK_EQ(errno, EAGAIN);
    pattern_recv(pattern, pair.server, offset, 65536);
    CHECK_ERR(recv(pair.server, &sent, 1, MSG_DONTWAIT), EAGAIN);
}

// Each on a fresh connection.
TEST(sendfile_nonblocking_from_an_offset_and_the_file_position)
{
    struct pattern *pattern = pattern_new(64);
    int file = file_of(pattern, 120000);
    for (int has_offset = 0; has_offset < 2; has_offset++) {
        struct pair pair = connected_pair();
        set_nonblocking(pair.client);
        off_t offset = 20000;
        CHECK_EQ(lseek(file, has_offset ? 7 : 20000, SEEK_SET), has_offset ? 7 : 20000);
        ssize_t sent = OK(sendfile(pair.client, file, has_offset ? &offset : NULL, 90000));
        CHECK(sent > 16384);
        CHECK_EQ(lseek(file, 0, SEEK_CUR), has_offset ? 7 : 20000 + sent);
        if (has_offset)
            CHECK_EQ(offset, 20000 + sent);
        char *bytes = malloc(sent);
        recv_exact(pair.server, bytes, sent);
        pattern_check(pattern, 20000, bytes, sent);
        free(bytes);
        ping_pong(pair.client, pair.server);
        close_pair(&pair);
    }
}

TEST(sendfile_rejects_bad_arguments)
{
    struct pair pair = connected_pair();
    CHECK_ERR(sendfile(pair.client, -1, NULL, 10), EBADF);
    CHECK_ERR(sendfile(pair.client, pair.server, NULL, 10), EINVAL);
}

TEST(sendfile_consumes_nothing_from_an_eventfd_or_folder)
{
    struct pair pair = connected_pair();
    int counter = OK(eventfd(3, EFD_NONBLOCK)), folder = OK(open("/", O_RDONLY | O_DIRECTORY));
    CHECK_ERR(sendfile(pair.client, counter, NULL, 8), EINVAL);
    eventfd_t count = 0;
    OK(eventfd_read(counter, &count));
    CHECK_EQ(count, 3);
    CHECK_ERR(sendfile(pair.client, folder, NULL, 8), EINVAL);
    expect_silent(pair.server, POLLIN);
}

TEST(sendfile_at_the_end_of_the_file_needs_no_peer)
{
    struct pair pair = connected_pair();
    int file = file_of(pattern_new(21), 1000);
    off_t end = 1000;
    OK(close(pair.server));
    await(pair.client, POLLIN);
    CHECK_EQ(sendfile(pair.client, file, &end, 10), 0);
    OK(lseek(file, 0, SEEK_END));
    CHECK_EQ(sendfile(pair.client, file, NULL, 10), 0);
    OK(shutdown(pair.client, SHUT_WR));
    CHECK_EQ(sendfile(pair.client, file, NULL, 10), 0);
    signal(SIGPIPE, SIG_IGN);
    CHECK_ERR(send(pair.client, "x", 1, 0), EPIPE);
    CHECK_EQ(sendfile(pair.client, file, NULL, 10), 0);
    end = 0;
    CHECK_ERR(sendfile(pair.client, file, &end, 10), EPIPE);
    CHECK_EQ(end, 0);
}

// ---- splice -------------------------------------------------------------------------------------

struct pipe_ends {
    int out; // the read end
    int in;
};

static struct pipe_ends pipe_of(int bytes)
{
    int ends[2];
    OK(pipe(ends));
    if (bytes > 0)
        OK(fcntl(ends[1], F_SETPIPE_SZ, bytes));
    return (struct pipe_ends){ends[0], ends[1]};
}

TEST(splice_between_connection_and_pipe)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(0);
    say(pair.client, "spliced");
    await(pair.server, POLLIN);
    CHECK_EQ(splice(pair.server, NULL, pipe_ends.in, NULL, 7, 0), 7);
    CHECK_EQ(splice(pipe_ends.out, NULL, pair.server, NULL, 7, SPLICE_F_MOVE | SPLICE_F_MORE), 7);
    shutdown(pair.server, SHUT_WR);
    expect(pair.client, "spliced");
}

TEST(splice_moves_a_part_of_the_bytes)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(0);
    char got[4];
    say(pair.client, "parts");
    await(pair.server, POLLIN);
    CHECK_EQ(splice(pair.server, NULL, pipe_ends.in, NULL, 4, 0), 4);
    CHECK_EQ(read(pipe_ends.out, got, 4), 4);
    CHECK(memcmp(got, "part", 4) == 0);
    expect(pair.server, "s");
    // More bytes are requested than are unread.
    say(pair.client, "rest");
    await(pair.server, POLLIN);
    CHECK_EQ(splice(pair.server, NULL, pipe_ends.in, NULL, 1 << 20, 0), 4);
}

TEST(splice_loses_nothing_to_a_full_pipe)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(4096);
    struct pattern *pattern = pattern_new(22);
    static char bytes[30000], got[30000];
    pattern_fill(pattern, 0, bytes, sizeof bytes);
    send_all(pair.client, bytes, sizeof bytes);
    shutdown(pair.client, SHUT_WR);
    size_t taken = 0;
    int times_full = 0;
    for (;;) {
        await(pair.server, POLLIN);
        ssize_t moved = splice(pair.server, NULL, pipe_ends.in, NULL, 1 << 20, SPLICE_F_NONBLOCK);
        if (moved == 0)
            break;
        if (moved > 0)
            continue;
        CHECK_EQ(errno, EAGAIN);
        times_full++;
        ssize_t read_now = OK(read(pipe_ends.out, got + taken, 4096));
        taken += read_now;
        CHECK(taken <= sizeof got);
    }
    OK(close(pipe_ends.in));
    for (ssize_t last; (last = OK(read(pipe_ends.out, got + taken, sizeof got - taken))) > 0;)
        taken += last;
    CHECK_EQ(taken, sizeof bytes);
    CHECK(times_full > 0);
    pattern_check(pattern, 0, got, sizeof got);
}

TEST(splice_consumes_from_the_pipe_only_what_it_sends)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(65536);
    struct pattern *pattern = pattern_new(23);
    static char bytes[40000];
    fill_until_full(pair.client);
    set_nonblocking(pair.client);
    pattern_fill(pattern, 0, bytes, sizeof bytes);
    CHECK_EQ(write(pipe_ends.in, bytes, sizeof bytes), sizeof bytes);
    while (splice(pipe_ends.out, NULL, pair.client, NULL, sizeof bytes, SPLICE_F_MOVE) > 0)
        fill_until_full(pair.client); // the kernel may have found a little more room
    CHECK_EQ(errno, EAGAIN);
    int left = 0;
    OK(ioctl(pipe_ends.out, FIONREAD, &left));
    CHECK(left > 0);
    drain_until_empty(pair.server);
    await(pair.client, POLLOUT);
    ssize_t moved = OK(splice(pipe_ends.out, NULL, pair.client, NULL, left, 0));
    static char got[sizeof bytes];
    recv_exact(pair.server, got, moved);
    pattern_check(pattern, sizeof bytes - left, got, moved);
}

TEST(splice_reports_missing_bytes_and_the_end_of_a_pipe)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(4096);
    CHECK_ERR(splice(pipe_ends.out, NULL, pair.client, NULL, 10, SPLICE_F_NONBLOCK), EAGAIN);
    set_nonblocking(pair.client);
    CHECK_ERR(splice(pair.client, NULL, pipe_ends.in, NULL, 10, 0), EAGAIN);
    CHECK_EQ(splice(pair.client, NULL, pipe_ends.in, NULL, 0, 0), 0);
    // O_NONBLOCK of the pipe has the same effect as the flag.
    set_nonblocking(pipe_ends.out);
    CHECK_ERR(splice(pipe_ends.out, NULL, pair.server, NULL, 10, 0), EAGAIN);
    OK(close(pipe_ends.in));
    CHECK_EQ(splice(pipe_ends.out, NULL, pair.client, NULL, 10, 0), 0);
}

TEST(splice_rejects_bad_arguments)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(0);
    loff_t offset = 0;
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_ERR(splice(pair.server, NULL, pair.client, NULL, 1, 0), EINVAL);
    int file = file_of(pattern_new(24), 100);
    CHECK_ERR(splice(pair.server, NULL, file, NULL, 1, 0), EINVAL);
    CHECK_ERR(splice(file, NULL, pair.server, NULL, 1, 0), EINVAL);
    CHECK_ERR(splice(pair.server, NULL, pipe_ends.in, NULL, 1, 0x100), EINVAL);
    CHECK_ERR(splice(pair.server, NULL, pipe_ends.in, &offset, 1, 0), ESPIPE);
    CHECK_ERR(splice(pair.server, NULL, pipe_ends.out, NULL, 1, 0), EBADF);
    CHECK_ERR(splice(pipe_ends.in, NULL, pair.server, NULL, 1, 0), EBADF);
    CHECK_ERR(splice(pair.server, NULL, -1, NULL, 1, 0), EBADF);
    expect(pair.server, "x");
}

TEST(splice_raises_sigpipe)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(0), other = pipe_of(0);
    on_signal(SIGPIPE, count_signal, 0);
    say(pair.client, "x");
    await(pair.server, POLLIN);
    OK(close(pipe_ends.out));
    CHECK_ERR(splice(pair.server, NULL, pipe_ends.in, NULL, 1, 0), EPIPE);
    expect(pair.server, "x");
    OK(shutdown(pair.client, SHUT_WR));
    CHECK_EQ(write(other.in, "y", 1), 1);
    CHECK_ERR(splice(other.out, NULL, pair.client, NULL, 1, 0), EPIPE);
    CHECK(signals_seen > 0);
}

TEST(splice_is_interrupted_without_sa_restart)
{
    struct pair pair = connected_pair();
    struct pipe_ends pipe_ends = pipe_of(4096);
    on_signal(SIGALRM, count_signal, 0);
    alarm_every_ms(20);
    CHECK_ERR(splice(pair.server, NULL, pipe_ends.in, NULL, 10, 0), EINTR);
    CHECK_ERR(splice(pipe_ends.out, NULL, pair.server, NULL, 10, 0), EINTR);
    alarm_every_ms(0);
}

// As a proxy does: all bytes of one connection are forwarded through a pipe to another.
#define RELAYED_BYTES ((uint64_t)8 << 20)

static void *relay(void *argument)
{
    int *ends = argument;
    struct pipe_ends pipe_ends = pipe_of(0);
    for (;;) {
        ssize_t came = OK(splice(ends[0], NULL, pipe_ends.in, NULL, 1 << 20, SPLICE_F_MOVE | SPLICE_F_MORE));
        if (came == 0)
            break;
        while (came > 0)
            came -= OK(splice(pipe_ends.out, NULL, ends[1], NULL, came, SPLICE_F_MOVE));
    }
    OK(shutdown(ends[1], SHUT_WR));
    return NULL;
}

SERVER(splice_relays_much)
{
    int next = accept_from(me->listener);
    relay((int[]){me->fd, next});
}
CLIENT(splice_relays_much)
{
    struct address at = peer_of(me->fd);
    int next = dial(&at);
    pid_t writer = fork_child();
    if (writer == 0) {
        pattern_send(pattern_new(25), me->fd, RELAYED_BYTES, 100000);
        OK(shutdown(me->fd, SHUT_WR));
        _exit(0);
    }
    pattern_recv(pattern_new(25), next, RELAYED_BYTES, 65536);
    expect_eof(next);
    wait_child(writer);
}

TEST(splice_receives_while_a_connection_becomes_busy)
{
    struct pair pair = connected_pair();
    int ends[2];
    OK(pipe(ends));
    for (int i = 0; i < 100; i++) {
        char bytes[5] = "";
        say(pair.client, "ping");
        CHECK_EQ(splice(pair.server, NULL, ends[1], NULL, 1000, 0), 4);
        CHECK_EQ(read(ends[0], bytes, sizeof bytes), 4);
        CHECK(strcmp(bytes, "ping") == 0);
        say(pair.server, "pong");
        expect(pair.client, "pong");
    }
}
