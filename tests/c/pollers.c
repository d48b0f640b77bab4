// Threads that move bytes and never wait in the kernel: other threads wait on the epoll sets and wake them, as in the
// schedulers of language runtimes. Whatever the age of a connection and the mode of its registrations, and wherever a
// thread is interrupted, no event is lost and none is late.
//
// A seed determines every decision. POLLERS_SEED is the first seed, POLLERS_COUNT the number of seeds.
#include "check.h"

#include <sys/eventfd.h>
#include <time.h>

enum { INPUT, OUTPUT, DIRECTIONS };
enum mode { ONESHOT, EDGE, EDGE_ONESHOT, LEVEL, MODES };
enum { CONNECTIONS_MAX = 3, STREAMS_MAX = CONNECTIONS_MAX * DIRECTIONS, PIECE_MAX = 1 << 17, BYTES_MAX = 10 << 20 };

static uint64_t number_from(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

// ---- streams: one direction of a connection, and the thread that moves its bytes ----------------

struct stream {
    int fd, epoll, direction;
    enum mode mode;
    bool is_registered, has_pauses;
    size_t piece_max;
    uint64_t seed, state, moved, total;
    const struct pattern *pattern;
    pthread_mutex_t lock;
    pthread_cond_t is_ready;
    bool may_proceed;
};

static void wait_for_event(struct stream *stream)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += WAIT_MS_MAX / 1000;
    pthread_mutex_lock(&stream->lock);
    while (!stream->may_proceed)
        if (pthread_cond_timedwait(&stream->is_ready, &stream->lock, &until) == ETIMEDOUT && !stream->may_proceed)
            FAIL("%s, mode %d: no event after %llu of %llu bytes", stream->direction == INPUT ? "input" : "output",
                 stream->mode, (unsigned long long)stream->moved, (unsigned long long)stream->total);
    pthread_mutex_unlock(&stream->lock);
}

static void set_may_proceed(struct stream *stream, bool may_proceed)
{
    pthread_mutex_lock(&stream->lock);
    stream->may_proceed = may_proceed;
    pthread_cond_signal(&stream->is_ready);
    pthread_mutex_unlock(&stream->lock);
}

static void enter_set(struct stream *stream)
{
    static const uint32_t flags[MODES] = {EPOLLONESHOT, EPOLLET, EPOLLET | EPOLLONESHOT, 0};
    uint32_t events = (stream->direction == INPUT ? EPOLLIN : EPOLLOUT) | flags[stream->mode];
    struct epoll_event event = {.events = events, .data.ptr = stream};
    // The poller removes a level-triggered registration that it has reported.
    int operation = stream->is_registered && stream->mode != LEVEL ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    OK(epoll_ctl(stream->epoll, operation, stream->fd, &event));
    stream->is_registered = true;
}

// Blocks the thread until the set has reported the direction.
static void await_event(struct stream *stream)
{
    if (stream->mode != EDGE) {
        set_may_proceed(stream, false);
        enter_set(stream);
    }
    wait_for_event(stream);
}

static ssize_t move_piece(struct stream *stream, void *bytes)
{
    uint64_t left = stream->total - stream->moved;
    size_t size = 1 + random_next(&stream->state) % stream->piece_max;
    size = size < left ? size : left;
    if (stream->direction == OUTPUT) {
        pattern_fill(stream->pattern, stream->moved, bytes, size);
        return send(stream->fd, bytes, size, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    ssize_t count = recv(stream->fd, bytes, size, MSG_DONTWAIT);
    if (count > 0)
        pattern_check(stream->pattern, stream->moved, bytes, count);
    return count;
}

static void *run_stream(void *argument)
{
    struct stream *stream = argument;
    char *bytes = malloc(PIECE_MAX);
    snprintf(failure_note, sizeof failure_note, "seed %llu: ", (unsigned long long)stream->seed);
    if (stream->mode == EDGE)
        enter_set(stream);
    while (stream->moved < stream->total) {
        if (stream->mode == EDGE)
            set_may_proceed(stream, false); // before the attempt: an event during it counts
        ssize_t count = move_piece(stream, bytes);
        if (count < 0 && errno == EAGAIN)
            await_event(stream);
        else if (count <= 0)
            FAIL("mode %d: %zd, %s", stream->mode, count, strerrorname_np(errno));
        else
            stream->moved += count;
        if (stream->has_pauses && random_next(&stream->state) % 64 == 0)
            usleep(random_next(&stream->state) % 400);
    }
    free(bytes);
    return NULL;
}

// ---- pollers: threads that wait on sets, and a thread that interrupts all others ----------------

struct poller {
    int epoll, stop; // an eventfd
    pthread_t thread;
};

static void *run_poller(void *argument)
{
    struct poller *poller = argument;
    for (;;) {
        struct epoll_event events[8];
        int count = epoll_wait(poller->epoll, events, 8, -1);
        if (count < 0 && errno != EINTR)
            FAIL("epoll_wait: %s", strerrorname_np(errno));
        for (int i = 0; i < count; i++) {
            struct stream *stream = events[i].data.ptr;
            if (stream == NULL)
                return NULL;
            if (stream->mode == LEVEL)
                OK(epoll_ctl(poller->epoll, EPOLL_CTL_DEL, stream->fd, NULL));
            set_may_proceed(stream, true);
        }
    }
}

static void start_poller(struct poller *poller)
{
    poller->epoll = OK(epoll_create1(EPOLL_CLOEXEC));
    poller->stop = OK(eventfd(0, EFD_CLOEXEC));
    epoll_add(poller->epoll, poller->stop, EPOLLIN, 0);
    poller->thread = start_thread(run_poller, poller);
}

static void stop_poller(struct poller *poller)
{
    CHECK_EQ(write(poller->stop, &(uint64_t){1}, 8), 8);
    join_thread(poller->thread);
    OK(close(poller->stop));
    OK(close(poller->epoll));
}

// A preemption between any two instructions.
static void sleep_in_handler(int signal)
{
    int saved = errno;
    struct timespec pause = {.tv_nsec = 1000 * (50 + 10 * (signal % 8) + rand() % 1500)};
    nanosleep(&pause, NULL);
    errno = saved;
}

struct interrupter {
    pthread_t victims[STREAMS_MAX + DIRECTIONS];
    int count;
    uint64_t state;
    volatile bool is_over;
};

static void *interrupt_at_random(void *argument)
{
    struct interrupter *me = argument;
    while (!me->is_over) {
        usleep(random_next(&me->state) % 300);
        pthread_kill(me->victims[random_next(&me->state) % me->count], SIGUSR1);
    }
    return NULL;
}

// ---- one endpoint of a seed's connections -------------------------------------------------------

static void converse_by_pollers(const int *fds, int connections, uint64_t seed, bool is_server)
{
    uint64_t state = seed * 2 + is_server;
    bool has_two_sets = random_next(&state) % 4 != 0, interrupts = random_next(&state) % 2;
    bool has_pauses = random_next(&state) % 2;
    unsigned modes = random_next(&state) % 2 ? MODES : 1; // half of the seeds are one-shot, as most schedulers are
    struct poller pollers[DIRECTIONS];
    struct stream streams[STREAMS_MAX];
    struct interrupter interrupter = {.state = state};
    int copies[CONNECTIONS_MAX], count = connections * DIRECTIONS;
    for (int i = 0; i <= has_two_sets; i++) {
        start_poller(&pollers[i]);
        interrupter.victims[interrupter.count++] = pollers[i].thread;
    }
    for (int i = 0; i < count; i++) {
        int connection = i / DIRECTIONS, direction = i % DIRECTIONS;
        // A set holds a descriptor only once; with one set, the directions have a descriptor each.
        int fd = direction == OUTPUT && !has_two_sets ? copies[connection] = OK(dup(fds[connection])) : fds[connection];
        uint64_t name = seed * 100 + connection * DIRECTIONS + (is_server == (direction == INPUT)), size = name;
        struct stream *stream = &streams[i];
        *stream = (struct stream){.fd = fd, .direction = direction, .has_pauses = has_pauses, .seed = seed};
        stream->epoll = pollers[has_two_sets ? direction : 0].epoll;
        stream->mode = random_next(&state) % modes;
        stream->piece_max = (size_t[]){300, 1 << 14, PIECE_MAX, PIECE_MAX}[random_next(&state) % 4];
        stream->state = random_next(&state);
        stream->total = random_next(&size) % (random_next(&size) % 4 ? BYTES_MAX : 100000);
        stream->pattern = pattern_new(name);
        stream->lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        stream->is_ready = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    }
    for (int i = 0; i < count; i++)
        interrupter.victims[interrupter.count++] = start_thread(run_stream, &streams[i]);
    pthread_t interrupting = 0;
    if (interrupts)
        interrupting = start_thread(interrupt_at_random, &interrupter);
    // The threads stay joinable until the interrupter has ended, so that it never names one that is gone.
    for (int i = 0; i < count; i++)
        while (__atomic_load_n(&streams[i].moved, __ATOMIC_RELAXED) < streams[i].total)
            usleep(500);
    interrupter.is_over = true;
    if (interrupts)
        join_thread(interrupting);
    for (int i = 0; i < count; i++) {
        join_thread(interrupter.victims[has_two_sets + 1 + i]);
        free((void *)streams[i].pattern);
    }
    for (int i = 0; i <= has_two_sets; i++)
        stop_poller(&pollers[i]);
    for (int i = 0; !has_two_sets && i < connections; i++)
        OK(close(copies[i]));
}

// Round trips before the streams begin: a young connection changes its path during them.
static int age_of(uint64_t seed) { return (int[]){0, 0, 1, 2, 3, 8}[seed % 6]; }

static void play_seeds(struct endpoint *me, bool is_server)
{
    struct address at = is_server ? (struct address){} : peer_of(me->fd);
    uint64_t first = number_from("POLLERS_SEED", 1), count = number_from("POLLERS_COUNT", 24);
    on_signal(SIGUSR1, sleep_in_handler, SA_RESTART);
    for (uint64_t seed = first; seed < first + count; seed++) {
        snprintf(failure_note, sizeof failure_note, "seed %llu: ", (unsigned long long)seed);
        int fds[CONNECTIONS_MAX], connections = 1 + seed % CONNECTIONS_MAX;
        for (int i = 0; i < connections; i++) {
            fds[i] = is_server ? accept_from(me->listener) : dial(&at);
            for (int round = 0; round < age_of(seed); round++) {
                char byte = 'a';
                if (!is_server)
                    send_all(fds[i], &byte, 1);
                recv_exact(fds[i], &byte, 1);
                if (is_server)
                    send_all(fds[i], &byte, 1);
            }
        }
        converse_by_pollers(fds, connections, seed, is_server);
        meet(me);
        for (int i = 0; i < connections; i++)
            OK(close(fds[i]));
    }
}

SERVER(pollers_lose_no_event) { play_seeds(me, true); }
CLIENT(pollers_lose_no_event) { play_seeds(me, false); }

// ---- registrations while a connection moves ------------------------------------------------------

#define RACING_SETS 16
#define RACING_ROUNDS 12

struct racing_pair {
    struct pair pair;
    int sets[RACING_SETS];
    uint32_t flags;
    pthread_barrier_t begin;
};

static void *register_everywhere(void *argument)
{
    struct racing_pair *racing = argument;
    pthread_barrier_wait(&racing->begin);
    // Again and again, so that the connection moves during one of the calls.
    for (int round = 0; round < RACING_ROUNDS; round++) {
        for (int i = 0; i < RACING_SETS; i++) {
            struct epoll_event event = {.events = EPOLLIN | racing->flags, .data.u64 = i};
            OK(epoll_ctl(racing->sets[i], EPOLL_CTL_ADD, racing->pair.server, &event));
        }
        for (int i = 0; i < RACING_SETS; i++) {
            struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | racing->flags, .data.u64 = i};
            OK(epoll_ctl(racing->sets[i], EPOLL_CTL_MOD, racing->pair.server, &event));
        }
        for (int i = 0; i < RACING_SETS && round + 1 < RACING_ROUNDS; i++)
            OK(epoll_ctl(racing->sets[i], EPOLL_CTL_DEL, racing->pair.server, NULL));
    }
    return NULL;
}

// One thread registers a connection in sets while it moves in another: each set reports its bytes afterwards.
TEST(registrations_see_a_move_in_another_thread)
{
    static const uint32_t flags[] = {0, EPOLLET, EPOLLONESHOT};
    for (int trial = 0; trial < 60; trial++) {
        struct racing_pair racing = {.pair = connected_pair(), .flags = flags[trial % 3]};
        for (int i = 0; i < RACING_SETS; i++)
            racing.sets[i] = OK(epoll_create1(EPOLL_CLOEXEC));
        pthread_barrier_init(&racing.begin, NULL, 2);
        pthread_t thread = start_thread(register_everywhere, &racing);
        pthread_barrier_wait(&racing.begin);
        for (int round = 0; round < 8; round++)
            ping_pong(racing.pair.client, racing.pair.server);
        join_thread(thread);
        struct epoll_event event;
        for (int i = 0; i < RACING_SETS; i++) // Input that was there before is no event of interest.
            while (racing.flags == EPOLLET && OK(epoll_wait(racing.sets[i], &event, 1, 0)) > 0)
                ;
        if (racing.flags == EPOLLONESHOT)
            for (int i = 0; i < RACING_SETS; i++) {
                event = (struct epoll_event){.events = EPOLLIN | EPOLLONESHOT, .data.u64 = i};
                OK(epoll_ctl(racing.sets[i], EPOLL_CTL_MOD, racing.pair.server, &event));
            }
        say(racing.pair.client, "word");
        for (int i = 0; i < RACING_SETS; i++) {
            snprintf(failure_note, sizeof failure_note, "trial %d, set %d: ", trial, i);
            CHECK_EQ(epoll_wait(racing.sets[i], &event, 1, WAIT_MS_MAX / 4), 1);
            CHECK_EQ(event.data.u64, i);
            OK(close(racing.sets[i]));
        }
        failure_note[0] = 0;
        expect(racing.pair.server, "word");
        close_pair(&racing.pair);
    }
}

// ---- other descriptors in a set with connections that are always ready --------------------------

enum other { PIPE, DATAGRAM, COUNTER, LISTENER, CONNECTION, IDLE_CONNECTION, NESTED, OTHERS };

// A descriptor that is silent, and how to make it readable.
struct source {
    int fd, writes_to;
    enum other kind;
    struct pair pair;
    struct address at;
};

static struct source source_of(enum other kind)
{
    struct source source = {.kind = kind, .pair = {-1, -1, -1}};
    int ends[2];
    switch (kind) {
    case PIPE:
        OK(pipe2(ends, O_CLOEXEC));
        source.fd = ends[0], source.writes_to = ends[1];
        break;
    case DATAGRAM:
        source.fd = OK(socket(AF_INET, SOCK_DGRAM, 0)), source.at = ip4("127.0.0.1", 0);
        OK(bind(source.fd, ADDRESS(&source.at), source.at.size));
        source.at = name_of(source.fd), source.writes_to = OK(socket(AF_INET, SOCK_DGRAM, 0));
        OK(connect(source.writes_to, ADDRESS(&source.at), source.at.size));
        break;
    case COUNTER:
        source.fd = source.writes_to = OK(eventfd(0, EFD_CLOEXEC));
        break;
    case LISTENER:
        source.fd = listen_anywhere(&source.at), source.writes_to = -1;
        break;
    default:
        source.pair = connected_pair();
        for (int round = 0; kind != CONNECTION && round < 4; round++)
            ping_pong(source.pair.client, source.pair.server);
        source.fd = source.pair.server, source.writes_to = source.pair.client;
        if (kind == NESTED)
            source.fd = epoll_with(source.pair.server, EPOLLIN);
    }
    return source;
}

static void make_readable(struct source *source)
{
    if (source->kind == LISTENER)
        source->writes_to = dial(&source->at);
    else
        CHECK_EQ(write(source->writes_to, &(uint64_t){1}, 8), 8);
}

static void close_source(struct source *source)
{
    if (source->pair.client < 0) {
        OK(close(source->fd));
        if (source->writes_to != source->fd)
            OK(close(source->writes_to));
        return;
    }
    if (source->kind == NESTED)
        OK(close(source->fd));
    close_pair(&source->pair);
}

// Waits with room for all events, two milliseconds apart, until one is of `fd`. Returns the number of waits.
static int waits_until_reported(int epoll, int fd)
{
    for (int waits = 1; waits < 100; waits++) {
        struct epoll_event events[16];
        int count = OK(epoll_wait(epoll, events, 16, WAIT_MS_MAX));
        for (int i = 0; i < count; i++)
            if ((int)events[i].data.u64 == fd)
                return waits;
        pause_ms(2);
    }
    FAIL("%d is never reported", fd);
}

TEST(connections_that_stay_ready_delay_no_other_descriptor)
{
    uint64_t state = number_from("POLLERS_SEED", 1);
    for (int round = 0; round < 3 * OTHERS; round++) {
        struct pair ready[3];
        int count = 1 + random_next(&state) % 3, epoll = OK(epoll_create1(EPOLL_CLOEXEC));
        for (int i = 0; i < count; i++) {
            ready[i] = connected_pair();
            for (int trips = random_next(&state) % 4; trips > 0; trips--)
                ping_pong(ready[i].client, ready[i].server);
            epoll_add(epoll, ready[i].client, random_next(&state) % 2 ? EPOLLOUT : EPOLLIN | EPOLLOUT, 0);
        }
        struct source source = source_of(round % OTHERS);
        epoll_add(epoll, source.fd, EPOLLIN, source.fd);
        for (int waits = random_next(&state) % 20; waits > 0; waits--) {
            struct epoll_event events[16];
            CHECK_EQ(epoll_wait(epoll, events, 16, random_next(&state) % 2 ? 0 : WAIT_MS_MAX), count);
            if (random_next(&state) % 2)
                pause_ms(1);
        }
        make_readable(&source);
        pause_ms(2);
        snprintf(failure_note, sizeof failure_note, "kind %d, %d ready: ", source.kind, count);
        CHECK_EQ(waits_until_reported(epoll, source.fd), 1);
        close_source(&source);
        for (int i = 0; i < count; i++)
            close_pair(&ready[i]);
        OK(close(epoll));
    }
}
