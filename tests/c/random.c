// Random conversations: both endpoints send and receive at once, by any call, after any wait, and both receive every
// byte.
//
// A seed determines every decision of a program. RANDOM_SEED is the first seed, RANDOM_COUNT the number of seeds.
#include "check.h"

#include <dirent.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>

#define BUFFER_BYTES (1 << 20)
#define PIPE_BYTES 16384

enum way { BY_POLL, BY_SELECT, BY_LEVELS, BY_EDGES, BY_ONESHOT, BY_NAPS, WAYS };

// One endpoint of a conversation.
struct talker {
    uint64_t seed; // of the conversation
    uint64_t state;
    int fd;
    bool is_alone; // the only conversation of its process, which may therefore fork
    struct pattern *out, *in;
    uint64_t to_send, sent, to_receive, received;
    uint64_t leaves_at; // number of bytes, in both directions together, after which it leaves
    bool has_shut, has_ended; // the outgoing stream, the incoming stream
    bool shuts_early;
    bool may_send, may_receive; // according to the last wait
    size_t piece_max;
    unsigned pause_one_in;
    bool has_napped;
    enum way way;
    int epoll;
    bool is_in_group; // whose members share one epoll instance
    bool is_watched; // by that instance
    int file;
    int to_pipe[2]; // bytes to be sent
    size_t in_pipe;
    char *buffer;
};

static uint64_t below(struct talker *me, uint64_t bound) { return random_next(&me->state) % bound; }
static bool one_in(struct talker *me, uint64_t n) { return below(me, n) == 0; }

// Notes the progress in failure_note before a call that the peer can make fail.
static void note_state(struct talker *me)
{
    snprintf(failure_note, sizeof failure_note, "seed %llu, sent %llu of %llu, received %llu of %llu, way %d: ",
             (unsigned long long)me->seed, (unsigned long long)me->sent, (unsigned long long)me->to_send,
             (unsigned long long)me->received, (unsigned long long)me->to_receive, me->way);
}

// In this thread's conversation: whether the peer may leave at any time, and whether it has left.
static _Thread_local bool peer_may_leave, peer_has_left;

// Returns the number of bytes, or -1 after EAGAIN or if the peer has left.
static ssize_t count_of(ssize_t count, const char *call)
{
    if (count < 0 && peer_may_leave && (errno == ECONNRESET || errno == EPIPE || errno == ENOTCONN))
        peer_has_left = true;
    else if (count < 0 && errno != EAGAIN)
        FAIL("%s: %s", call, strerrorname_np(errno));
    return count;
}

static size_t pieces_of(struct talker *me, struct iovec *pieces, size_t size)
{
    size_t count = 1 + below(me, 4), at = 0;
    for (size_t i = 0; i < count; i++) {
        size_t length = i + 1 == count ? size - at : below(me, size - at + 1);
        pieces[i] = (struct iovec){me->buffer + at, length};
        at += length;
    }
    return count;
}

// ---- sending ------------------------------------------------------------------------------------

static ssize_t send_by_pipe(struct talker *me, size_t size)
{
    if (me->in_pipe == 0) {
        me->in_pipe = size < PIPE_BYTES ? size : PIPE_BYTES;
        pattern_fill(me->out, me->sent, me->buffer, me->in_pipe);
        CHECK_EQ(write(me->to_pipe[1], me->buffer, me->in_pipe), me->in_pipe);
    }
    ssize_t moved = splice(me->to_pipe[0], NULL, me->fd, NULL, me->in_pipe, SPLICE_F_NONBLOCK);
    if (count_of(moved, "splice") > 0)
        me->in_pipe -= moved;
    return moved;
}

// The kernel sends from the pages of the file, so the file is written once, before the conversation.
static void fill_file(struct talker *me)
{
    for (uint64_t at = 0; at < me->to_send; at += BUFFER_BYTES) {
        size_t size = me->to_send - at < BUFFER_BYTES ? me->to_send - at : BUFFER_BYTES;
        pattern_fill(me->out, at, me->buffer, size);
        CHECK_EQ(pwrite(me->file, me->buffer, size, at), size);
    }
}

static ssize_t send_by_file(struct talker *me, size_t size)
{
    off_t offset = me->sent;
    return count_of(sendfile(me->fd, me->file, &offset, size), "sendfile");
}

static ssize_t send_piece(struct talker *me)
{
    uint64_t left = me->to_send - me->sent;
    size_t size = 1 + below(me, me->piece_max);
    size = size < left ? size : left;
    unsigned kind = below(me, 8);
    if (me->in_pipe > 0 || kind == 0)
        return send_by_pipe(me, size);
    if (kind == 1)
        return send_by_file(me, size);
    pattern_fill(me->out, me->sent, me->buffer, size);
    struct iovec pieces[4];
    struct msghdr message = {.msg_iov = pieces};
    switch (kind) {
    case 2:
        return count_of(write(me->fd, me->buffer, size), "write");
    case 3:
        return count_of(writev(me->fd, pieces, pieces_of(me, pieces, size)), "writev");
    case 4:
        message.msg_iovlen = pieces_of(me, pieces, size);
        return count_of(sendmsg(me->fd, &message, MSG_NOSIGNAL), "sendmsg");
    case 5:
        return count_of(send(me->fd, me->buffer, size, MSG_MORE | MSG_NOSIGNAL), "send more");
    case 6:
        if (one_in(me, 8))
            return count_of(send(me->fd, me->buffer, size, MSG_OOB | MSG_NOSIGNAL), "send oob");
        // fall through
    default:
        return count_of(send(me->fd, me->buffer, size, MSG_NOSIGNAL), "send");
    }
}

static void send_some(struct talker *me)
{
    for (int calls = 1 + below(me, 4); calls > 0 && me->sent < me->to_send && me->may_send; calls--) {
        ssize_t sent = send_piece(me);
        me->may_send = sent >= 0;
        me->sent += sent > 0 ? sent : 0;
    }
}

// ---- receiving ----------------------------------------------------------------------------------

static ssize_t receive_by_pipe(struct talker *me, size_t size)
{
    int ends[2];
    OK(pipe2(ends, O_NONBLOCK));
    ssize_t got = splice(me->fd, NULL, ends[1], NULL, size < PIPE_BYTES ? size : PIPE_BYTES, SPLICE_F_NONBLOCK);
    if (count_of(got, "splice") > 0)
        CHECK_EQ(read(ends[0], me->buffer, got), got);
    close(ends[0]);
    close(ends[1]);
    // splice cannot move an urgent byte: it returns 0 or EAGAIN in front of one. No event would follow that EAGAIN.
    return got <= 0 && !peer_has_left ? count_of(recv(me->fd, me->buffer, size, 0), "recv") : got;
}

static ssize_t receive_piece(struct talker *me)
{
    size_t size = 1 + below(me, me->piece_max);
    struct iovec pieces[4];
    struct msghdr message = {.msg_iov = pieces};
    switch (below(me, 8)) {
    case 0:
        return receive_by_pipe(me, size);
    case 1:
        return count_of(read(me->fd, me->buffer, size), "read");
    case 2:
        return count_of(readv(me->fd, pieces, pieces_of(me, pieces, size)), "readv");
    case 3:
        message.msg_iovlen = pieces_of(me, pieces, size);
        return count_of(recvmsg(me->fd, &message, 0), "recvmsg");
    case 4: {
        ssize_t peeked = count_of(recv(me->fd, me->buffer, size, MSG_PEEK), "peek");
        if (peeked <= 0)
            return peeked;
        pattern_check(me->in, me->received, me->buffer, peeked);
        memset(me->buffer, 0, peeked);
        return count_of(recv(me->fd, me->buffer, peeked, MSG_DONTWAIT), "recv what was peeked");
    }
    default:
        return count_of(recv(me->fd, me->buffer, size, MSG_DONTWAIT), "recv");
    }
}

static void receive_some(struct talker *me)
{
    for (int calls = 1 + below(me, 4); calls > 0 && !me->has_ended && me->may_receive; calls--) {
        ssize_t got = receive_piece(me);
        me->may_receive = got >= 0;
        if (got == 0) {
            if (me->received < me->to_receive && !peer_may_leave)
                FAIL("the stream ended early");
            me->has_ended = true;
        }
        if (got > 0 && me->received + got > me->to_receive)
            FAIL("%zd bytes too many", (ssize_t)(me->received + got - me->to_receive));
        pattern_check(me->in, me->received, me->buffer, got > 0 ? got : 0);
        me->received += got > 0 ? got : 0;
    }
}

// ---- waiting ------------------------------------------------------------------------------------

static void choose_way(struct talker *me)
{
    if (me->epoll >= 0)
        close(me->epoll);
    me->epoll = -1;
    me->way = below(me, WAYS);
    if (me->way == BY_LEVELS || me->way == BY_EDGES || me->way == BY_ONESHOT) {
        me->epoll = OK(epoll_create1(EPOLL_CLOEXEC));
        uint32_t events = me->way == BY_EDGES ? EPOLLIN | EPOLLOUT | EPOLLET | EPOLLRDHUP
                          : me->way == BY_ONESHOT ? EPOLLONESHOT
                                                  : 0;
        struct epoll_event event = {.events = events};
        OK(epoll_ctl(me->epoll, EPOLL_CTL_ADD, me->fd, &event));
    }
}

static void note_events(struct talker *me, uint32_t events)
{
    me->may_receive |= (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0;
    me->may_send |= (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
}

static void wait_by_epoll(struct talker *me, uint32_t wanted)
{
    struct epoll_event event = {.events = wanted | (me->way == BY_ONESHOT ? EPOLLONESHOT : 0)};
    if (me->way != BY_EDGES)
        OK(epoll_ctl(me->epoll, EPOLL_CTL_MOD, me->fd, &event));
    if (OK(epoll_wait(me->epoll, &event, 1, WAIT_MS_MAX)) == 0)
        FAIL("epoll_wait for 0x%x returned no event", wanted);
    note_events(me, event.events);
}

static void wait_by_way(struct talker *me, bool wants_in, bool wants_out)
{
    uint32_t wanted = (wants_in ? EPOLLIN : 0) | (wants_out ? EPOLLOUT : 0);
    if (me->way == BY_POLL) {
        struct pollfd entry = {.fd = me->fd, .events = (short)(wanted | (one_in(me, 2) ? POLLPRI : 0))};
        if (OK(poll(&entry, 1, WAIT_MS_MAX)) == 0)
            FAIL("poll for 0x%x returned no event", entry.events);
        note_events(me, entry.revents);
    } else if (me->way == BY_SELECT) {
        fd_set in, out;
        FD_ZERO(&in);
        FD_ZERO(&out);
        if (wants_in)
            FD_SET(me->fd, &in);
        if (wants_out)
            FD_SET(me->fd, &out);
        struct timeval limit = {.tv_sec = WAIT_MS_MAX / 1000};
        if (OK(select(me->fd + 1, &in, &out, NULL, &limit)) == 0)
            FAIL("select for 0x%x returned no event", wanted);
        note_events(me, (FD_ISSET(me->fd, &in) ? EPOLLIN : 0) | (FD_ISSET(me->fd, &out) ? EPOLLOUT : 0));
    } else if (me->way == BY_NAPS) {
        usleep(200);
        note_events(me, EPOLLIN | EPOLLOUT);
    } else {
        wait_by_epoll(me, wanted);
    }
}

// A wait polls once more when its time-out ends and would then hide a lost wake-up, so a late return is a failure.
static void fail_if_late(int64_t began_ms)
{
    if (now_ms() - began_ms >= WAIT_MS_MAX)
        FAIL("a wait returned only at its time-out");
}

static void wait_for(struct talker *me, bool wants_in, bool wants_out)
{
    int64_t began_ms = now_ms();
    wait_by_way(me, wants_in, wants_out);
    fail_if_late(began_ms);
}

// ---- conversations ------------------------------------------------------------------------------

static void replace_descriptor(struct talker *me)
{
    int copy = OK(dup(me->fd));
    if (me->epoll >= 0)
        OK(epoll_ctl(me->epoll, EPOLL_CTL_DEL, me->fd, NULL));
    OK(close(me->fd));
    me->fd = copy;
    choose_way(me);
}

// Sends the descriptor to this process itself and continues with the received one.
static void pass_on(struct talker *me)
{
    int ends[2], fd;
    OK(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends));
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof fd)];
    } control = {.header = {CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec piece = {"x", 1};
    struct msghdr message = {NULL, 0, &piece, 1, &control, sizeof control, 0};
    memcpy(CMSG_DATA(&control.header), &me->fd, sizeof me->fd);
    CHECK_EQ(sendmsg(ends[0], &message, 0), 1);
    if (me->epoll >= 0)
        OK(epoll_ctl(me->epoll, EPOLL_CTL_DEL, me->fd, NULL));
    OK(close(me->fd));
    char byte;
    piece.iov_base = &byte;
    message.msg_controllen = sizeof control;
    CHECK_EQ(recvmsg(ends[1], &message, 0), 1);
    memcpy(&me->fd, CMSG_DATA(&control.header), sizeof me->fd);
    OK(close(ends[0]));
    OK(close(ends[1]));
    choose_way(me);
}

// Does something other than sending and receiving. Returns true in a parent whose child continues in its place.
static bool do_something_else(struct talker *me)
{
    int value = below(me, 2);
    unsigned kind = below(me, 10);
    if (me->is_in_group && (kind == 2 || kind == 3 || kind == 6 || kind == 7))
        return false;
    switch (kind) {
    case 0:
        OK(setsockopt(me->fd, IPPROTO_TCP, TCP_CORK, &value, sizeof value));
        break;
    case 1:
        OK(ioctl(me->fd, FIONREAD, &value)); // Not compared; the reason is in docs/results/connections.md.
        break;
    case 2:
        replace_descriptor(me);
        break;
    case 3:
        choose_way(me);
        break;
    case 4:
        if (!me->has_napped && one_in(me, 4)) {
            pause_ms(250);
            me->has_napped = true;
        }
        break;
    case 5:
        value = 1 << (12 + below(me, 9));
        OK(setsockopt(me->fd, SOL_SOCKET, SO_SNDBUF, &value, sizeof value));
        break;
    case 6: {
        pid_t pid = me->is_alone && one_in(me, 4) ? fork_child() : -1;
        if (pid == 0 && one_in(me, 2))
            _exit(0);
        // The same random number in the parent decides which of the two continues.
        if (pid > 0 && !one_in(me, 2)) {
            close(me->fd);
            wait_child(pid);
            return true;
        }
        if (pid > 0)
            wait_child(pid);
        break;
    }
    case 7:
        pass_on(me);
        break;
    default:
        usleep(below(me, 1000));
    }
    return false;
}

// Sends and receives as the last wait allows. Returns true where a child continues in place of this process.
static bool proceed(struct talker *me)
{
    note_state(me);
    if (one_in(me, 2)) {
        receive_some(me);
        send_some(me);
    } else {
        send_some(me);
        receive_some(me);
    }
    if (one_in(me, me->pause_one_in) && do_something_else(me))
        return true;
    bool may_shut = me->shuts_early || me->received == me->to_receive || me->has_ended;
    if (!me->has_shut && me->sent == me->to_send && may_shut) {
        CHECK_EQ(count_of(shutdown(me->fd, SHUT_WR), "shutdown"), peer_has_left ? -1 : 0);
        me->has_shut = true;
    }
    return false;
}

static bool can_proceed(const struct talker *me)
{
    bool must_shut = !me->has_shut && me->sent == me->to_send && (me->received == me->to_receive || me->has_ended);
    return (!me->has_ended && me->may_receive) || (me->sent < me->to_send && me->may_send) || must_shut;
}

static bool is_over(const struct talker *me)
{
    // Leaves only after the peer has sent something: until then its calls must not fail.
    bool is_leaving = me->leaves_at != 0 && me->received > 0 && me->sent + me->received >= me->leaves_at;
    return (me->has_shut && me->has_ended) || peer_has_left || is_leaving;
}

// Returns true where a child has continued.
static bool talk_until_over(struct talker *me)
{
    set_nonblocking(me->fd);
    choose_way(me);
    while (!is_over(me)) {
        if (!can_proceed(me))
            wait_for(me, !me->has_ended, me->sent < me->to_send);
        if (proceed(me))
            return true;
    }
    return false;
}

static void *send_blocking(void *argument)
{
    struct talker *me = argument;
    char *buffer = malloc(BUFFER_BYTES);
    while (me->sent < me->to_send) {
        note_state(me);
        size_t size = 1 + below(me, me->piece_max);
        size = size < me->to_send - me->sent ? size : me->to_send - me->sent;
        pattern_fill(me->out, me->sent, buffer, size);
        send_all(me->fd, buffer, size);
        me->sent += size;
        if (one_in(me, me->pause_one_in))
            usleep(below(me, 1000));
    }
    OK(shutdown(me->fd, SHUT_WR));
    free(buffer);
    return NULL;
}

static void talk_in_two_threads(struct talker *me)
{
    struct talker sender = *me;
    sender.state ^= 77;
    pthread_t thread = start_thread(send_blocking, &sender);
    while (!me->has_ended) {
        note_state(me);
        size_t size = 1 + below(me, me->piece_max);
        ssize_t got = OK(recv(me->fd, me->buffer, size, one_in(me, 4) ? MSG_WAITALL : 0));
        if (got == 0 && me->received < me->to_receive)
            FAIL("the stream ended early");
        me->has_ended = got == 0;
        pattern_check(me->in, me->received, me->buffer, got);
        me->received += got;
    }
    join_thread(thread);
}

static uint64_t random_total(uint64_t *state)
{
    static const uint64_t totals[] = {1, 1000, 20000, 100000, 100000, 1000000, 4000000};
    return random_next(state) % totals[random_next(state) % 7];
}

static struct talker *new_talker(int fd, uint64_t seed, int side)
{
    static const size_t pieces[] = {60, 3000, 3000, 40000, 400000};
    static const unsigned pauses[] = {5, 50, 1000};
    uint64_t shared = seed * 1000003, totals[2];
    for (int i = 0; i < 2; i++)
        totals[i] = random_total(&shared);
    struct talker *me = malloc(sizeof *me);
    *me = (struct talker){.seed = seed, .state = random_next(&shared) + side, .fd = fd};
    me->piece_max = pieces[below(me, 5)];
    me->pause_one_in = pauses[below(me, 3)];
    for (int i = 0; i < 2; i++) // Small pieces of long streams would take too long.
        totals[i] = random_next(&shared) % 4 != 0 ? totals[i] % 200000 : totals[i];
    me->to_send = totals[side];
    me->to_receive = totals[!side];
    me->out = pattern_new(seed + side);
    me->in = pattern_new(seed + !side);
    me->may_send = me->may_receive = true;
    me->shuts_early = one_in(me, 2);
    me->epoll = -1;
    me->file = OK(memfd_create("random", MFD_CLOEXEC));
    OK(pipe2(me->to_pipe, O_NONBLOCK));
    me->buffer = malloc(BUFFER_BYTES);
    note_state(me);
    fill_file(me);
    int in_line = 1;
    OK(setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &in_line, sizeof in_line));
    say(fd, "!"); // so that no urgent byte arrives before it
    expect(fd, "!");
    return me;
}

static void delete_talker(struct talker *me)
{
    if (!me->is_in_group)
        close(me->epoll);
    close(me->file);
    close(me->to_pipe[0]);
    close(me->to_pipe[1]);
    free(me->buffer);
    free(me->out);
    free(me->in);
    free(me);
}

static void converse(int fd, uint64_t seed, int side, bool is_alone)
{
    struct talker *me = new_talker(fd, seed, side);
    me->is_alone = is_alone;
    bool has_gone = false;
    if (one_in(me, 4))
        talk_in_two_threads(me);
    else
        has_gone = talk_until_over(me);
    if (!has_gone)
        OK(close(me->fd));
    delete_talker(me);
}

static uint64_t number_in(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static bool has_threads(void)
{
    DIR *threads = opendir("/proc/self/task");
    int count = 0;
    while (readdir(threads) != NULL)
        count++;
    closedir(threads);
    return count > 3; // including . and ..
}

// A child that continues in place of its parent exits at the end of its conversation.
static void converse_often(struct endpoint *me, int side, const struct address *at)
{
    uint64_t first = number_in("RANDOM_SEED", 1), count = number_in("RANDOM_COUNT", 25);
    bool is_alone = !has_threads();
    for (uint64_t seed = first; seed < first + count; seed++) {
        int fd = side == 0 ? accept_from(me->listener) : dial(at);
        pid_t before = getpid();
        converse(fd, seed, side, is_alone);
        if (getpid() != before)
            _exit(0);
    }
}

SERVER(conversations_at_random) { converse_often(me, 0, NULL); }
CLIENT(conversations_at_random)
{
    struct address at = peer_of(me->fd);
    converse_often(me, 1, &at);
}

// ---- peers that leave ---------------------------------------------------------------------------

// Leaves by close, by shutdown, by a reset or, where a process may be killed for it, by SIGKILL.
static void leave_in_the_middle(int fd, uint64_t seed, bool may_die)
{
    struct talker *me = new_talker(fd, seed, 1);
    me->leaves_at = 1 + below(me, me->to_send + me->to_receive + 1);
    peer_may_leave = true; // The peer may be done before.
    signal(SIGPIPE, SIG_IGN);
    talk_until_over(me);
    struct linger reset = {.l_onoff = 1};
    unsigned how = below(me, may_die ? 4 : 3);
    if (how == 0)
        OK(setsockopt(me->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset));
    if (how == 1)
        shutdown(me->fd, SHUT_RDWR);
    if (how == 3)
        OK(kill(getpid(), SIGKILL));
    OK(close(me->fd));
    delete_talker(me);
    peer_may_leave = peer_has_left = false;
}

SERVER(peers_leave_at_random)
{
    uint64_t first = number_in("RANDOM_SEED", 1), count = number_in("RANDOM_COUNT", 25);
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct talker *talker = new_talker(accept_from(me->listener), seed, 0);
        peer_may_leave = true;
        signal(SIGPIPE, SIG_IGN);
        talk_until_over(talker);
        OK(close(talker->fd));
        delete_talker(talker);
        peer_may_leave = peer_has_left = false;
    }
}
CLIENT(peers_leave_at_random)
{
    struct address at = peer_of(me->fd);
    bool by_threads = has_threads();
    uint64_t first = number_in("RANDOM_SEED", 1), count = number_in("RANDOM_COUNT", 25);
    for (uint64_t seed = first; seed < first + count; seed++) {
        int status;
        pid_t pid = by_threads ? -1 : fork_child();
        if (pid <= 0)
            leave_in_the_middle(dial(&at), seed, pid == 0);
        if (pid == 0)
            _exit(0);
        if (pid > 0)
            CHECK_EQ(waitpid(pid, &status, 0), pid);
    }
}

// ---- groups -------------------------------------------------------------------------------------

#define GROUP 8

static void watch(struct talker *me, int operation, uint64_t place)
{
    static const uint32_t kinds[] = {[BY_LEVELS] = 0, [BY_EDGES] = EPOLLET, [BY_ONESHOT] = EPOLLONESHOT};
    uint32_t wanted = me->way == BY_EDGES ? EPOLLIN | EPOLLOUT | EPOLLRDHUP
                                          : (me->has_ended ? 0 : EPOLLIN) | (me->sent < me->to_send ? EPOLLOUT : 0);
    struct epoll_event event = {.events = wanted | kinds[me->way], .data.u64 = place};
    OK(epoll_ctl(me->epoll, operation, me->fd, &event));
}

// One thread serves all conversations of a group by one epoll instance.
static void serve_by_one_thread(int listener, uint64_t seed)
{
    struct talker *all[GROUP];
    struct epoll_event events[GROUP];
    int epoll = OK(epoll_create1(EPOLL_CLOEXEC)), left = GROUP;
    for (int i = 0; i < GROUP; i++) {
        int fd = accept_from(listener);
        unsigned char place;
        recv_exact(fd, &place, 1);
        all[i] = new_talker(fd, seed + place, 0);
        all[i]->is_in_group = true;
        all[i]->epoll = epoll;
        all[i]->way = BY_LEVELS + below(all[i], 3);
        set_nonblocking(fd);
        watch(all[i], EPOLL_CTL_ADD, i);
    }
    while (left > 0) {
        bool is_busy = false;
        for (int i = 0; i < GROUP; i++)
            is_busy |= all[i] != NULL && can_proceed(all[i]);
        int64_t began_ms = now_ms();
        int count = OK(epoll_wait(epoll, events, 1 + random_next(&seed) % GROUP, is_busy ? 0 : WAIT_MS_MAX));
        fail_if_late(began_ms);
        if (count == 0 && !is_busy)
            FAIL("epoll_wait returned no event, and %d conversations are not over", left);
        for (int i = 0; i < count; i++)
            note_events(all[events[i].data.u64], events[i].events);
        for (int i = 0; i < GROUP; i++) {
            if (all[i] == NULL || !can_proceed(all[i]))
                continue;
            proceed(all[i]);
            if (is_over(all[i])) {
                OK(close(all[i]->fd));
                delete_talker(all[i]);
                all[i] = NULL;
                left--;
            } else if (all[i]->way != BY_EDGES && !can_proceed(all[i])) {
                watch(all[i], EPOLL_CTL_MOD, i);
            }
        }
    }
    close(epoll);
}

// An epoll instance on which some threads wait, and which others change: a waiter that gets an event passes the
// connection to a worker, and the worker registers it again.
struct pool {
    pthread_mutex_t lock;
    pthread_cond_t has_work;
    int epoll, is_over[2]; // a pipe
    int left;
    struct talker *work[GROUP];
    int work_count;
};

static void queue_for_worker(struct pool *pool, struct talker *talker)
{
    pthread_mutex_lock(&pool->lock);
    pool->work[pool->work_count++] = talker;
    pthread_cond_signal(&pool->has_work);
    pthread_mutex_unlock(&pool->lock);
}

static struct talker *take_work(struct pool *pool)
{
    pthread_mutex_lock(&pool->lock);
    while (pool->left > 0 && pool->work_count == 0)
        pthread_cond_wait(&pool->has_work, &pool->lock);
    struct talker *talker = pool->work_count > 0 ? pool->work[--pool->work_count] : NULL;
    pthread_mutex_unlock(&pool->lock);
    return talker;
}

static void end_one(struct pool *pool, struct talker *talker)
{
    OK(close(talker->fd));
    delete_talker(talker);
    pthread_mutex_lock(&pool->lock);
    if (--pool->left == 0) {
        pthread_cond_broadcast(&pool->has_work);
        CHECK_EQ(write(pool->is_over[1], "x", 1), 1);
    }
    pthread_mutex_unlock(&pool->lock);
}

static void *work_in_pool(void *argument)
{
    struct pool *pool = argument;
    for (struct talker *talker; (talker = take_work(pool)) != NULL;) {
        while (!is_over(talker) && can_proceed(talker))
            proceed(talker);
        if (is_over(talker)) {
            end_one(pool, talker);
            continue;
        }
        bool is_added = talker->way != BY_ONESHOT || !talker->is_watched;
        talker->is_watched = true;
        watch(talker, is_added ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, (uint64_t)talker);
    }
    return NULL;
}

static void *wait_in_pool(void *argument)
{
    struct pool *pool = argument;
    struct epoll_event events[GROUP];
    for (;;) {
        int64_t began_ms = now_ms();
        int count = OK(epoll_wait(pool->epoll, events, GROUP, WAIT_MS_MAX));
        fail_if_late(began_ms);
        if (count == 0)
            FAIL("epoll_wait returned no event, and %d conversations are not over", pool->left);
        for (int i = 0; i < count; i++) {
            struct talker *talker = (struct talker *)events[i].data.u64;
            if (talker == NULL)
                return NULL;
            // Unless the event is one-shot, another thread may have received it too: the thread that deletes the
            // registration owns the connection.
            if (talker->way != BY_ONESHOT && epoll_ctl(pool->epoll, EPOLL_CTL_DEL, talker->fd, NULL) != 0)
                FAIL("epoll_ctl: %s", strerrorname_np(errno));
            note_events(talker, events[i].events);
            queue_for_worker(pool, talker);
        }
    }
}

static void serve_by_workers(int listener, uint64_t seed)
{
    struct pool pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .has_work = PTHREAD_COND_INITIALIZER};
    pthread_t threads[4];
    pool.epoll = OK(epoll_create1(EPOLL_CLOEXEC));
    OK(pipe(pool.is_over));
    epoll_add(pool.epoll, pool.is_over[0], EPOLLIN, 0);
    pool.left = GROUP;
    // Only one-shot events go to one thread each; with other events two waiters could receive the same one.
    uint64_t state = seed;
    int waiters = 1 + random_next(&state) % 2;
    for (int i = 0; i < 4; i++)
        threads[i] = start_thread(i < waiters ? wait_in_pool : work_in_pool, &pool);
    for (int i = 0; i < GROUP; i++) {
        int fd = accept_from(listener);
        unsigned char place;
        recv_exact(fd, &place, 1);
        struct talker *talker = new_talker(fd, seed + place, 0);
        talker->is_in_group = true;
        talker->epoll = pool.epoll;
        talker->way = waiters > 1 ? BY_ONESHOT : BY_LEVELS + below(talker, 3);
        set_nonblocking(fd);
        queue_for_worker(&pool, talker);
    }
    for (int i = 0; i < 4; i++)
        join_thread(threads[i]);
    close(pool.epoll);
    close(pool.is_over[0]);
    close(pool.is_over[1]);
}

struct member {
    const struct address *at;
    uint64_t seed;
    unsigned char place;
};

static void *talk_to_server(void *argument)
{
    struct member *member = argument;
    int fd = dial(member->at);
    send_all(fd, &member->place, 1);
    converse(fd, member->seed + member->place, 1, false);
    return NULL;
}

static void serve_groups(struct endpoint *me, void serve(int listener, uint64_t seed))
{
    uint64_t first = number_in("RANDOM_SEED", 1), count = number_in("RANDOM_COUNT", 25);
    for (uint64_t seed = first; seed < first + count; seed += GROUP)
        serve(me->listener, seed);
}

static void talk_in_groups(struct endpoint *me)
{
    struct address at = peer_of(me->fd);
    bool by_threads = has_threads();
    uint64_t first = number_in("RANDOM_SEED", 1), count = number_in("RANDOM_COUNT", 25);
    for (uint64_t seed = first; seed < first + count; seed += GROUP) {
        struct member members[GROUP];
        pthread_t threads[GROUP];
        pid_t children[GROUP];
        for (int i = 0; i < GROUP; i++) {
            members[i] = (struct member){&at, seed, i};
            if (by_threads)
                threads[i] = start_thread(talk_to_server, &members[i]);
            else if ((children[i] = fork_child()) == 0) {
                talk_to_server(&members[i]);
                _exit(0);
            }
        }
        for (int i = 0; i < GROUP; i++) {
            if (by_threads)
                join_thread(threads[i]);
            else
                wait_child(children[i]);
        }
    }
}

SERVER(groups_converse_at_random) { serve_groups(me, serve_by_one_thread); }
CLIENT(groups_converse_at_random) { talk_in_groups(me); }

SERVER(workers_converse_at_random) { serve_groups(me, serve_by_workers); }
CLIENT(workers_converse_at_random) { talk_in_groups(me); }
