/* pairs PAIRS SECONDS BYTES block|epoll LOOPS: round trips of pairs of processes that share the processors.
 *
 * Each pair is a client and a server, connected by TCP on loopback, that send each other messages of BYTES without a
 * pause. LOOPS more processes use a processor in a loop. Prints the round trips of all pairs per second, percentiles of
 * one round trip, and how many times as many round trips the busiest pair did as the least busy one.
 *
 *     cc -O2 -o pairs scripts/pairs.c && crosslane run -- ./pairs 16 1 8 block 0
 *
 * For the nodes of a rack, SERVER_RUN and CLIENT_RUN precede the commands of the parties, and SERVER_ADDRESS is the
 * address of the servers:
 *
 *     SERVER_ADDRESS=127.77.0.1 SERVER_RUN="crosslane run --rack rack.toml --node a --" \
 *         CLIENT_RUN="crosslane run --rack rack.toml --node b --" ./pairs 1 1 8 block 0
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAIRS_MAX = 64, LOOPS_MAX = 64, BUCKETS = 2048, BUCKETS_PER_OCTAVE = 32 };

/* What all processes share. */
struct results {
    volatile int is_measuring, is_over, ready;
    volatile int ports[PAIRS_MAX];
    volatile uint64_t round_trips[PAIRS_MAX];
    volatile uint32_t histogram[BUCKETS]; /* of nanoseconds; processes may lose each other's counts */
};

static struct results *results;
static int pairs, loops, uses_epoll;
static double seconds;
static size_t size;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static int bucket(uint64_t ns) {
    int octave = 63 - __builtin_clzll(ns | BUCKETS_PER_OCTAVE);
    int index = (octave - 5) * BUCKETS_PER_OCTAVE + (int)((ns >> (octave - 5)) & (BUCKETS_PER_OCTAVE - 1));
    return index < BUCKETS ? index : BUCKETS - 1;
}

static double bucket_us(int index) {
    double unit = (double)(1ull << (index / BUCKETS_PER_OCTAVE));
    return (BUCKETS_PER_OCTAVE + index % BUCKETS_PER_OCTAVE) * unit / 1000;
}

static double percentile_us(double share) {
    uint64_t samples = 0, below = 0;
    int index = 0;
    for (int i = 0; i < BUCKETS; i++) samples += results->histogram[i];
    while (index < BUCKETS - 1 && (below += results->histogram[index]) < share * (double)samples) index++;
    return bucket_us(index);
}

/* Returns 0 once the peer has closed. */
static int receive(int socket, int epoll, char *bytes) {
    struct epoll_event event;
    for (size_t done = 0; done < size;) {
        while (uses_epoll && epoll_wait(epoll, &event, 1, -1) < 1) {
        }
        ssize_t count = recv(socket, bytes + done, size - done, 0);
        if (count <= 0) return 0;
        done += (size_t)count;
    }
    return 1;
}

static void send_all(int socket, const char *bytes) {
    for (size_t done = 0; done < size;) {
        ssize_t count = send(socket, bytes + done, size - done, MSG_NOSIGNAL);
        if (count < 0) exit(0);
        done += (size_t)count;
    }
}

static int connect_pair(int pair, int is_server) {
    const char *text = getenv("SERVER_ADDRESS");
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(text ? text : "127.0.0.1")};
    socklen_t length = sizeof address;
    int one = 1, connection = socket(AF_INET, SOCK_STREAM, 0);
    if (is_server) {
        int listener = connection;
        if (bind(listener, (void *)&address, length) || listen(listener, 1)) fail("listen");
        if (getsockname(listener, (void *)&address, &length)) fail("getsockname");
        results->ports[pair] = ntohs(address.sin_port);
        connection = accept(listener, NULL, NULL);
    } else {
        while (!results->ports[pair]) usleep(1000);
        address.sin_port = htons((uint16_t)results->ports[pair]);
        if (connect(connection, (void *)&address, length)) fail("connect");
    }
    if (connection < 0 || setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one)) fail("connection");
    return connection;
}

static void run_party(int pair, int is_server) {
    int connection = connect_pair(pair, is_server), epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    char *bytes = calloc(1, size);
    if (!bytes || epoll_ctl(epoll, EPOLL_CTL_ADD, connection, &event)) fail("epoll_ctl");
    __atomic_fetch_add(&results->ready, 1, __ATOMIC_RELAXED);
    while (is_server && receive(connection, epoll, bytes)) send_all(connection, bytes);
    while (!is_server && !results->is_over) {
        uint64_t began = now_ns();
        send_all(connection, bytes);
        if (!receive(connection, epoll, bytes)) break;
        if (!results->is_measuring) continue;
        results->histogram[bucket(now_ns() - began)]++;
        results->round_trips[pair]++;
    }
    exit(0);
}

/* Starts a party as a program of its own, so that nothing of its library comes from this one. */
static void start_party(char **arguments, int party, int memory) {
    const char *prefix = getenv(party % 2 ? "SERVER_RUN" : "CLIENT_RUN");
    char command[4096];
    snprintf(command, sizeof command, "exec %s \"%s\" %d %s %s %s 0 %d /proc/%d/fd/%d", prefix ? prefix : "",
             arguments[0], pairs, arguments[2], arguments[3], arguments[4], party, getppid(), memory);
    execl("/bin/sh", "sh", "-c", command, (char *)NULL);
    fail("sh");
}

static void use_processor(void) {
    for (;;) __asm__ volatile("");
}

static void report(double measured_seconds) {
    uint64_t total = 0, least = UINT64_MAX, most = 0;
    for (int i = 0; i < pairs; i++) {
        uint64_t count = results->round_trips[i];
        total += count;
        least = count < least ? count : least;
        most = count > most ? count : most;
    }
    printf("%10.1f k/s  p50 %9.2f p99 %9.1f p99.9 %9.1f us  share %6.2f\n", (double)total / measured_seconds / 1000,
           percentile_us(0.5), percentile_us(0.99), percentile_us(0.999), (double)most / (double)(least ? least : 1));
}

/* Returns 0 if an argument is out of range. */
static int read_arguments(char **arguments) {
    long bytes = atol(arguments[3]);
    pairs = atoi(arguments[1]), seconds = atof(arguments[2]), size = (size_t)bytes, loops = atoi(arguments[5]);
    uses_epoll = strcmp(arguments[4], "epoll") == 0;
    return pairs >= 1 && pairs <= PAIRS_MAX && seconds > 0 && bytes >= 1 && loops >= 0 && loops <= LOOPS_MAX &&
           (uses_epoll || strcmp(arguments[4], "block") == 0);
}

int main(int count, char **arguments) {
    if (count < 6 || !read_arguments(arguments)) {
        fprintf(stderr, "usage: pairs PAIRS SECONDS BYTES block|epoll LOOPS (1 to %d pairs, 0 to %d loops)\n",
                PAIRS_MAX, LOOPS_MAX);
        return 2;
    }
    int memory = count > 7 ? open(arguments[7], O_RDWR) : memfd_create("pairs", 0);
    if (memory < 0 || ftruncate(memory, sizeof *results)) fail("memory");
    results = mmap(NULL, sizeof *results, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (results == MAP_FAILED) fail("mmap");
    if (count > 7) run_party(atoi(arguments[6]) / 2, atoi(arguments[6]) % 2);
    pid_t processes[2 * PAIRS_MAX + LOOPS_MAX];
    for (int i = 0; i < 2 * pairs + loops; i++) {
        processes[i] = fork();
        if (processes[i]) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (i < 2 * pairs) start_party(arguments, i, memory);
        use_processor();
    }
    while (results->ready < 2 * pairs) usleep(1000);
    usleep((useconds_t)(seconds * 300000));
    uint64_t began = now_ns();
    results->is_measuring = 1;
    usleep((useconds_t)(seconds * 1000000));
    results->is_measuring = 0;
    double measured_seconds = (double)(now_ns() - began) / 1e9;
    results->is_over = 1;
    for (int i = 0; i < 2 * pairs + loops; i++) kill(processes[i], SIGKILL);
    while (wait(NULL) > 0) {
    }
    report(measured_seconds);
    return 0;
}
