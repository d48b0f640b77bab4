// Sending and receiving: every call, every flag.
#include "check.h"

#include <sys/mman.h>
#include <sys/time.h>

SERVER(every_size_arrives_whole)
{
    struct pattern *pattern = pattern_new(11);
    char *buffer = malloc(300000);
    for (size_t size = 1; size < 300000; size = size * 3 / 2 + 1) {
        recv_exact(me->fd, buffer, size);
        pattern_check(pattern, size, buffer, size);
        send_all(me->fd, buffer, size);
    }
}
CLIENT(every_size_arrives_whole)
{
    struct pattern *pattern = pattern_new(11);
    char *buffer = malloc(300000);
    for (size_t size = 1; size < 300000; size = size * 3 / 2 + 1) {
        pattern_fill(pattern, size, buffer, size);
        send_all(me->fd, buffer, size);
        memset(buffer, 0, size);
        recv_exact(me->fd, buffer, size);
        pattern_check(pattern, size, buffer, size);
    }
}

SERVER(small_sizes_around_cache_lines)
{
    struct pattern *pattern = pattern_new(12);
    uint64_t total = 0;
    for (size_t size = 1; size <= 520; size++)
        total += size;
    pattern_recv(pattern, me->fd, total, 777);
    say(me->fd, "got it");
}
CLIENT(small_sizes_around_cache_lines)
{
    struct pattern *pattern = pattern_new(12);
    char buffer[520];
    uint64_t position = 0;
    for (size_t size = 1; size <= 520; size++) {
        pattern_fill(pattern, position, buffer, size);
        send_all(me->fd, buffer, size);
        position += size;
    }
    expect(me->fd, "got it");
}

// Receives `size` bytes into a larger buffer, the rest of which must stay unchanged.
static void receive_and_compare_rest(int fd, size_t size, int flags, bool in_parts)
{
    unsigned char room[256];
    memset(room, 0xa5, sizeof room);
    struct iovec parts[] = {{room, 3}, {room + 3, sizeof room - 3}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    await(fd, POLLIN);
    ssize_t got = in_parts ? recvmsg(fd, &message, flags) : recv(fd, room, sizeof room, flags);
    CHECK_EQ(got, size);
    for (size_t at = size; at < sizeof room; at++)
        CHECK_EQ(room[at], 0xa5);
}

// Depending on the progress of the upgrade, the library's own messages lie before or behind the unread answer, or
// there are none.
TEST(buffer_behind_received_bytes_is_unchanged)
{
    for (int variant = 0; variant < 32; variant++) {
        struct pair pair = connected_pair();
        for (int answered = 0; answered < variant / 4; answered++)
            ping_pong(pair.client, pair.server);
        say(pair.server, "an answer");
        for (int more = 0; more < 4; more++) {
            char byte;
            say(pair.client, ".");
            recv_exact(pair.server, &byte, 1);
        }
        if (variant & 1)
            receive_and_compare_rest(pair.client, 9, MSG_PEEK, variant & 2);
        receive_and_compare_rest(pair.client, 9, 0, variant & 2);
        close_pair(&pair);
    }
}

SERVER(recv_into_larger_buffer_returns_the_available_bytes)
{
    char buffer[4096];
    CHECK_EQ(recv(me->fd, buffer, sizeof buffer, 0), 64);
    meet(me);
    CHECK_EQ(read(me->fd, buffer, sizeof buffer), 65);
    meet(me);
}
CLIENT(recv_into_larger_buffer_returns_the_available_bytes)
{
    char buffer[65] = {0};
    CHECK_EQ(send(me->fd, buffer, 64, 0), 64);
    meet(me);
    CHECK_EQ(write(me->fd, buffer, 65), 65);
    meet(me);
}

TEST(read_of_exactly_what_was_sent_does_not_hang)
{
    struct pair pair = connected_pair();
    char buffer[16384] = {0};
    for (size_t size = 1; size <= sizeof buffer; size *= 2) {
        send_all(pair.client, buffer, size);
        recv_exact(pair.server, buffer, size);
    }
    CHECK_ERR(recv(pair.server, buffer, 1, MSG_DONTWAIT), EAGAIN);
}

TEST(short_reads_take_a_message_in_pieces)
{
    struct pair pair = connected_pair();
    say(pair.client, "abcdefghij");
    expect(pair.server, "a");
    expect(pair.server, "bcd");
    expect(pair.server, "efghij");
}

TEST(consecutive_messages_run_together)
{
    struct pair pair = connected_pair();
    say(pair.client, "one");
    say(pair.client, "two");
    say(pair.client, "three");
    expect(pair.server, "onetwothree");
}

TEST(zero_length_send_and_recv)
{
    struct pair pair = connected_pair();
    char byte;
    CHECK_EQ(send(pair.client, "", 0, 0), 0);
    CHECK_EQ(write(pair.client, "", 0), 0);
    expect_silent(pair.server, POLLIN);
    CHECK_EQ(read(pair.server, &byte, 0), 0);
    CHECK_ERR(recv(pair.server, &byte, 0, MSG_DONTWAIT), EAGAIN); // unlike read()
    ping_pong(pair.client, pair.server);
}

TEST(zero_length_recv_does_not_consume)
{
    struct pair pair = connected_pair();
    say(pair.client, "kept");
    await(pair.server, POLLIN);
    char byte;
    CHECK_EQ(recv(pair.server, &byte, 0, 0), 0);
    expect(pair.server, "kept");
}

TEST(dontwait_is_eagain_when_empty)
{
    struct pair pair = connected_pair();
    char byte;
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_DONTWAIT), EAGAIN);
    CHECK_EQ(OK(fcntl(pair.server, F_GETFL)) & O_NONBLOCK, 0);
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(recv(pair.server, &byte, 1, MSG_DONTWAIT), 1);
    CHECK_ERR(recv(pair.server, &byte, 1, MSG_DONTWAIT), EAGAIN);
}

TEST(dontwait_is_eagain_when_full)
{
    struct pair pair = connected_pair();
    size_t taken = fill_until_full(pair.client);
    CHECK(taken > 0);
    CHECK_ERR(send(pair.client, "x", 1, MSG_DONTWAIT), EAGAIN);
    CHECK_EQ(drain_until_empty(pair.server), taken);
    CHECK_EQ(send(pair.client, "x", 1, MSG_DONTWAIT), 1);
    expect(pair.server, "x");
}

TEST(nonblocking_by_fcntl_and_back)
{
    struct pair pair = connected_pair();
    char byte;
    set_nonblocking(pair.server);
    CHECK_ERR(read(pair.server, &byte, 1), EAGAIN);
    OK(fcntl(pair.server, F_SETFL, O_RDWR));
    struct timeval limit = {.tv_usec = 30000};
    OK(setsockopt(pair.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    CHECK_ERR(read(pair.server, &byte, 1), EAGAIN);
    say(pair.client, "y");
    CHECK_EQ(read(pair.server, &byte, 1), 1);
}

TEST(nonblocking_by_fionbio_and_back)
{
    struct pair pair = connected_pair();
    int yes = 1, no = 0;
    char byte;
    OK(ioctl(pair.server, FIONBIO, &yes));
    CHECK_EQ(OK(fcntl(pair.server, F_GETFL)) & O_NONBLOCK, O_NONBLOCK);
    CHECK_ERR(read(pair.server, &byte, 1), EAGAIN);
    OK(ioctl(pair.server, FIONBIO, &no));
    CHECK_EQ(OK(fcntl(pair.server, F_GETFL)) & O_NONBLOCK, 0);
}

TEST(nonblocking_send_is_partial)
{
    struct pair pair = connected_pair();
    set_nonblocking(pair.client);
    size_t size = (size_t)64 << 20;
    char *buffer = calloc(1, size);
    ssize_t taken = OK(send(pair.client, buffer, size, 0));
    CHECK(taken > 0 && (size_t)taken < size);
    size_t more = fill_until_full(pair.client);
    CHECK_EQ(drain_until_empty(pair.server), taken + more);
}

SERVER(blocking_send_of_much_waits_for_room)
{
    meet(me);
    struct pattern *pattern = pattern_new(13);
    pattern_recv(pattern, me->fd, 24 << 20, 100000);
    say(me->fd, "all");
}
CLIENT(blocking_send_of_much_waits_for_room)
{
    struct pattern *pattern = pattern_new(13);
    char *buffer = malloc(24 << 20);
    pattern_fill(pattern, 0, buffer, 24 << 20);
    meet(me);
    CHECK_EQ(send(me->fd, buffer, 24 << 20, 0), 24 << 20);
    expect(me->fd, "all");
}

TEST(sendto_and_recvfrom_on_a_stream)
{
    struct pair pair = connected_pair();
    struct address elsewhere = ip4("127.0.0.1", 9), from = {.size = sizeof from.storage};
    char buffer[8];
    CHECK_EQ(sendto(pair.client, "to", 2, 0, NULL, 0), 2);
    CHECK_EQ(recvfrom(pair.server, buffer, 8, 0, NULL, NULL), 2);
    // A stream ignores the address of sendto() and reports none from recvfrom().
    CHECK_EQ(sendto(pair.client, "to", 2, 0, ADDRESS(&elsewhere), elsewhere.size), 2);
    CHECK_EQ(recvfrom(pair.server, buffer, 8, 0, ADDRESS(&from), &from.size), 2);
    CHECK_EQ(from.size, 0);
}

TEST(readv_and_writev_gather_and_scatter)
{
    struct pair pair = connected_pair();
    char a[3], b[1], c[6];
    struct iovec out[] = {{"", 0}, {"abc", 3}, {NULL, 0}, {"defg", 4}, {"hij", 3}};
    struct iovec in[] = {{a, 3}, {NULL, 0}, {b, 1}, {c, 6}};
    CHECK_EQ(writev(pair.client, out, 5), 10);
    await(pair.server, POLLIN);
    CHECK_EQ(readv(pair.server, in, 4), 10);
    CHECK(memcmp(a, "abc", 3) == 0 && b[0] == 'd' && memcmp(c, "efghij", 6) == 0);
}

TEST(writev_of_nothing)
{
    struct pair pair = connected_pair();
    struct iovec none[] = {{"", 0}, {NULL, 0}};
    CHECK_EQ(writev(pair.client, none, 2), 0);
    CHECK_EQ(writev(pair.client, none, 0), 0);
    CHECK_ERR(writev(pair.client, none, -1), EINVAL);
    CHECK_ERR(writev(pair.client, none, 1025), EINVAL);
    ping_pong(pair.client, pair.server);
}

TEST(writev_of_many_pieces)
{
    struct pair pair = connected_pair();
    struct pattern *pattern = pattern_new(14);
    char bytes[1024 * 7];
    struct iovec pieces[1024];
    pattern_fill(pattern, 0, bytes, sizeof bytes);
    for (int i = 0; i < 1024; i++)
        pieces[i] = (struct iovec){bytes + i * 7, 7};
    CHECK_EQ(writev(pair.client, pieces, 1024), sizeof bytes);
    memset(bytes, 0, sizeof bytes);
    await(pair.server, POLLIN);
    CHECK_EQ(recv(pair.server, bytes, sizeof bytes, MSG_WAITALL), sizeof bytes);
    pattern_check(pattern, 0, bytes, sizeof bytes);
}

TEST(readv_returns_early_with_the_available_bytes)
{
    struct pair pair = connected_pair();
    char a[4], b[100];
    struct iovec in[] = {{a, 4}, {b, 100}};
    say(pair.client, "sixsix");
    await(pair.server, POLLIN);
    CHECK_EQ(readv(pair.server, in, 2), 6);
    CHECK(memcmp(a, "sixs", 4) == 0 && memcmp(b, "ix", 2) == 0);
}

TEST(sendmsg_and_recvmsg)
{
    struct pair pair = connected_pair();
    char a[2], b[8];
    struct iovec out[] = {{"head", 4}, {"body", 4}}, in[] = {{a, 2}, {b, 8}};
    struct msghdr message = {.msg_iov = out, .msg_iovlen = 2};
    CHECK_EQ(sendmsg(pair.client, &message, MSG_NOSIGNAL), 8);
    char name[32], control[64];
    struct msghdr got = {.msg_iov = in, .msg_iovlen = 2, .msg_name = name,
                         .msg_namelen = sizeof name, .msg_control = control,
                         .msg_controllen = sizeof control, .msg_flags = -1};
    await(pair.server, POLLIN);
    CHECK_EQ(recvmsg(pair.server, &got, 0), 8);
    CHECK_EQ(got.msg_namelen, 0);
    CHECK_EQ(got.msg_controllen, 0);
    CHECK_EQ(got.msg_flags & (MSG_TRUNC | MSG_CTRUNC | MSG_OOB), 0);
    CHECK(memcmp(a, "he", 2) == 0 && memcmp(b, "adbody", 6) == 0);
}

TEST(recvmsg_without_room_returns_zero)
{
    struct pair pair = connected_pair();
    struct msghdr nothing = {0};
    say(pair.client, "kept");
    await(pair.server, POLLIN);
    CHECK_EQ(recvmsg(pair.server, &nothing, MSG_DONTWAIT), 0);
    CHECK_EQ(sendmsg(pair.client, &nothing, 0), 0);
    expect(pair.server, "kept");
}

TEST(sendmmsg_sends_each)
{
    struct pair pair = connected_pair();
    struct iovec pieces[3] = {{"one", 3}, {"twotwo", 6}, {"3", 1}};
    struct mmsghdr messages[3] = {0};
    for (int i = 0; i < 3; i++)
        messages[i].msg_hdr = (struct msghdr){.msg_iov = &pieces[i], .msg_iovlen = 1};
    CHECK_EQ(sendmmsg(pair.client, messages, 3, MSG_NOSIGNAL), 3);
    CHECK_EQ(messages[0].msg_len, 3);
    CHECK_EQ(messages[1].msg_len, 6);
    CHECK_EQ(messages[2].msg_len, 1);
    expect(pair.server, "onetwotwo3");
}

TEST(recvmmsg_fills_what_it_can)
{
    struct pair pair = connected_pair();
    char buffers[3][4];
    struct iovec pieces[3];
    struct mmsghdr messages[3] = {0};
    for (int i = 0; i < 3; i++) {
        pieces[i] = (struct iovec){buffers[i], 4};
        messages[i].msg_hdr = (struct msghdr){.msg_iov = &pieces[i], .msg_iovlen = 1};
    }
    say(pair.client, "abcdef");
    await(pair.server, POLLIN);
    CHECK_EQ(recvmmsg(pair.server, messages, 3, MSG_DONTWAIT, NULL), 2);
    CHECK_EQ(messages[0].msg_len, 4);
    CHECK_EQ(messages[1].msg_len, 2);
    CHECK(memcmp(buffers[0], "abcd", 4) == 0 && memcmp(buffers[1], "ef", 2) == 0);
    say(pair.client, "gh");
    CHECK_EQ(recvmmsg(pair.server, messages, 3, MSG_WAITFORONE, NULL), 1);
    CHECK_EQ(messages[0].msg_len, 2);
}

TEST(peek_leaves_the_data)
{
    struct pair pair = connected_pair();
    char buffer[16];
    say(pair.client, "look");
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(recv(pair.server, buffer, sizeof buffer, MSG_PEEK), 4);
        CHECK(memcmp(buffer, "look", 4) == 0);
    }
    CHECK_EQ(recv(pair.server, buffer, 2, MSG_PEEK), 2);
    expect(pair.server, "look");
    CHECK_ERR(recv(pair.server, buffer, 1, MSG_PEEK | MSG_DONTWAIT), EAGAIN);
}

TEST(peek_spans_several_sends)
{
    struct pair pair = connected_pair();
    struct pattern *pattern = pattern_new(15);
    char bytes[1000], got[3000];
    for (int i = 0; i < 3; i++) {
        pattern_fill(pattern, i * 1000, bytes, 1000);
        send_all(pair.client, bytes, 1000);
    }
    CHECK_EQ(recv(pair.server, got, 3000, MSG_PEEK | MSG_WAITALL), 3000);
    pattern_check(pattern, 0, got, 3000);
    CHECK_EQ(recv(pair.server, got, 1500, 0), 1500);
    CHECK_EQ(recv(pair.server, got, 3000, MSG_PEEK), 1500);
    pattern_check(pattern, 1500, got, 1500);
}

TEST(peek_with_recvmsg_and_iovecs)
{
    struct pair pair = connected_pair();
    char a[2], b[2];
    struct iovec in[] = {{a, 2}, {b, 2}};
    struct msghdr message = {.msg_iov = in, .msg_iovlen = 2};
    say(pair.client, "wxyz");
    await(pair.server, POLLIN);
    CHECK_EQ(recvmsg(pair.server, &message, MSG_PEEK), 4);
    CHECK(memcmp(a, "wx", 2) == 0 && memcmp(b, "yz", 2) == 0);
    expect(pair.server, "wxyz");
}

SERVER(peek_sees_eof_after_data)
{
    char buffer[8];
    meet(me);
    CHECK_EQ(recv(me->fd, buffer, 8, MSG_PEEK), 3);
    expect(me->fd, "end");
    CHECK_EQ(recv(me->fd, buffer, 8, MSG_PEEK), 0);
    CHECK_EQ(recv(me->fd, buffer, 8, MSG_PEEK | MSG_DONTWAIT), 0);
    expect_eof(me->fd);
}
CLIENT(peek_sees_eof_after_data)
{
    say(me->fd, "end");
    OK(close(me->fd));
    me->fd = -1;
    meet(me);
}

SERVER(waitall_waits_for_all)
{
    char buffer[300000];
    CHECK_EQ(recv(me->fd, buffer, sizeof buffer, MSG_WAITALL), sizeof buffer);
    pattern_check(pattern_new(16), 0, buffer, sizeof buffer);
}
CLIENT(waitall_waits_for_all)
{
    struct pattern *pattern = pattern_new(16);
    char buffer[300000];
    pattern_fill(pattern, 0, buffer, sizeof buffer);
    send_all(me->fd, buffer, 10);
    pause_ms(20);
    send_all(me->fd, buffer + 10, 150000);
    pause_ms(20);
    send_all(me->fd, buffer + 150010, sizeof buffer - 150010);
}

SERVER(waitall_ends_short_at_eof)
{
    char buffer[100];
    CHECK_EQ(recv(me->fd, buffer, sizeof buffer, MSG_WAITALL), 5);
    CHECK_EQ(recv(me->fd, buffer, sizeof buffer, MSG_WAITALL), 0);
}
CLIENT(waitall_ends_short_at_eof)
{
    say(me->fd, "short");
}

TEST(waitall_with_dontwait_returns_the_available_bytes)
{
    struct pair pair = connected_pair();
    char buffer[100];
    say(pair.client, "some");
    await(pair.server, POLLIN);
    CHECK_EQ(recv(pair.server, buffer, 100, MSG_WAITALL | MSG_DONTWAIT), 4);
}

TEST(waitall_with_time_out_returns_the_received_bytes)
{
    struct pair pair = connected_pair();
    char buffer[100];
    struct timeval limit = {.tv_usec = 50000};
    OK(setsockopt(pair.server, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit));
    say(pair.client, "part");
    CHECK_EQ(recv(pair.server, buffer, 100, MSG_WAITALL), 4);
    CHECK_ERR(recv(pair.server, buffer, 100, MSG_WAITALL), EAGAIN);
}

TEST(trunc_discards)
{
    struct pair pair = connected_pair();
    say(pair.client, "discarded:kept");
    await(pair.server, POLLIN);
    CHECK_EQ(recv(pair.server, NULL, 10, MSG_TRUNC), 10);
    expect(pair.server, "kept");
}

TEST(trunc_does_not_touch_the_buffer)
{
    struct pair pair = connected_pair();
    char buffer[4] = "safe";
    say(pair.client, "evil");
    await(pair.server, POLLIN);
    CHECK_EQ(recv(pair.server, buffer, 4, MSG_TRUNC), 4);
    CHECK(memcmp(buffer, "safe", 4) == 0);
}

// ---- file operations ---------------------------------------------------------------------------

TEST(a_stream_has_no_positions)
{
    struct pair pair = connected_pair();
    char byte = 0;
    CHECK_ERR(lseek(pair.client, 0, SEEK_SET), ESPIPE);
    CHECK_ERR(pread(pair.client, &byte, 1, 0), ESPIPE);
    CHECK_ERR(pwrite(pair.client, &byte, 1, 0), ESPIPE);
    ping_pong(pair.client, pair.server);
}

TEST(stdio_works_over_a_connection)
{
    struct pair pair = connected_pair();
    FILE *file = fdopen(pair.server, "r+");
    CHECK(file != NULL);
    setvbuf(file, NULL, _IOLBF, 4096);
    char line[64];
    say(pair.client, "GET /\n");
    CHECK(fgets(line, sizeof line, file) != NULL);
    CHECK(strcmp(line, "GET /\n") == 0);
    fseek(file, 0, SEEK_CUR);
    CHECK(fputs("200 OK\n", file) >= 0);
    CHECK_EQ(fflush(file), 0);
    expect(pair.client, "200 OK\n");
}

TEST(stdio_works_on_a_socket_that_is_connected_later)
{
    struct address at;
    int listener = listen_anywhere(&at);
    FILE *file = fdopen(OK(socket(AF_INET, SOCK_STREAM, 0)), "r+");
    CHECK(file != NULL);
    OK(connect(fileno(file), ADDRESS(&at), at.size));
    int server = accept_from(listener);
    CHECK(fputs("hello\n", file) >= 0);
    CHECK_EQ(fflush(file), 0);
    expect(server, "hello\n");
    say(server, "answer\n");
    char line[64];
    CHECK(fgets(line, sizeof line, file) != NULL);
    CHECK(strcmp(line, "answer\n") == 0);
    CHECK_EQ(fclose(file), 0);
    expect_eof(server);
}

TEST(dprintf_works_over_a_connection)
{
    struct pair pair = connected_pair();
    CHECK_EQ(dprintf(pair.client, "answer %d\n", 42), 10);
    expect(pair.server, "answer 42\n");
}

// ---- fortified calls ----------------------------------------------------------------------------

// The compiler knows the size of the buffers but not of the requests, so each call becomes its __..._chk form.
static volatile size_t eight = 8;

TEST(fortified_reads)
{
    struct pair pair = connected_pair();
    char buffer[16];
    say(pair.client, "12345678abcdefghABCDEFGH");
    CHECK_EQ(read(pair.server, buffer, eight), 8);
    CHECK(memcmp(buffer, "12345678", 8) == 0);
    CHECK_EQ(recv(pair.server, buffer, eight, 0), 8);
    CHECK(memcmp(buffer, "abcdefgh", 8) == 0);
    CHECK_EQ(recvfrom(pair.server, buffer, eight, 0, NULL, NULL), 8);
    CHECK(memcmp(buffer, "ABCDEFGH", 8) == 0);
}

TEST(fortified_poll)
{
    struct pair pair = connected_pair();
    struct pollfd entries[2] = {{pair.server, POLLIN, 0}, {pair.client, POLLOUT, 0}};
    volatile nfds_t two = 2;
    say(pair.client, "x");
    await(pair.server, POLLIN);
    CHECK_EQ(poll(entries, two, 1000), 2);
    struct timespec second = {1, 0};
    CHECK_EQ(ppoll(entries, two, &second, NULL), 2);
    CHECK_EQ(entries[0].revents, POLLIN);
    CHECK_EQ(entries[1].revents, POLLOUT);
}

// ---- bad memory ---------------------------------------------------------------------------------

// The usual bad addresses: null, addresses near it, and non-canonical ones. Bytes that were not moved stay intact.
TEST(unmapped_addresses_are_efault)
{
    char *const nowhere[] = { NULL, (char *)16, (char *)-1, (char *)(1UL << 60) };
    for (int i = 0; i < 8; i++) {
        struct pair pair = connected_pair();
        for (int busy = 0; busy < (i < 4 ? 0 : 4); busy++)
            ping_pong(pair.client, pair.server);
        char *bad = nowhere[i % 4], bytes[8];
        bool is_near_null = i % 4 < 2;
        CHECK_ERR(send(pair.client, bad, 10, 0), EFAULT);
        CHECK_ERR(write(pair.client, bad, 10), EFAULT);
        CHECK_ERR(recv(pair.server, bad, 10, MSG_DONTWAIT), is_near_null ? EAGAIN : EFAULT);
        say(pair.client, "intact");
        await(pair.server, POLLIN);
        CHECK_ERR(recv(pair.server, bad, 6, 0), EFAULT);
        CHECK_ERR(read(pair.server, bad, 6), EFAULT);
        CHECK_ERR(recv(pair.server, bad, 6, MSG_PEEK), EFAULT);
        struct iovec behind[] = { { bytes, 2 }, { bad, 4 } }, enough[] = { { bytes, 6 }, { bad, 4 } };
        CHECK_ERR(readv(pair.server, behind, 2), EFAULT);
        CHECK_ERR(writev(pair.client, behind, 2), EFAULT);
        if (is_near_null) {
            CHECK_EQ(readv(pair.server, enough, 2), 6);
            CHECK(memcmp(bytes, "intact", 6) == 0);
        } else {
            CHECK_ERR(readv(pair.server, enough, 2), EFAULT);
            expect(pair.server, "intact");
        }
        OK(shutdown(pair.client, SHUT_WR));
        signal(SIGPIPE, SIG_IGN);
        CHECK_ERR(send(pair.client, bad, 1, 0), is_near_null ? EPIPE : EFAULT);
        await(pair.server, POLLIN);
        if (is_near_null)
            CHECK_EQ(recv(pair.server, bad, 1, 0), 0);
        close_pair(&pair);
    }
}

TEST(bad_addresses_are_efault)
{
    struct pair pair = connected_pair();
    char *nowhere = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int i = 0; i < 4; i++) { // often enough for the upgrade to a lane
        say(pair.client, "question");
        expect(pair.server, "question");
        say(pair.server, "answer");
        expect(pair.client, "answer");
    }
    CHECK_ERR(send(pair.client, nowhere, 10, 0), EFAULT);
    say(pair.client, "intact");
    await(pair.server, POLLIN);
    CHECK_ERR(recv(pair.server, nowhere, 6, 0), EFAULT);
    expect(pair.server, "intact");
}
