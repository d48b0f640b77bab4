/* A parent process generates a stream in the ring from which its child reads it, and the child computes a checksum in
 * place: no copy on either side.
 *
 *   cargo build --release -p lane-c
 *   cc -O2 -Icrates/sockets/lane-c/include -o in_place crates/sockets/lane-c/examples/in_place.c \
 *      target/release/libcrosslane_lane.a -lgcc_s -lm
 *   ./in_place [MEGABYTES] */
#include "crosslane_lane.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define RING_BYTES (1 << 20)
#define TIMEOUT_MS 30000

/* Fletcher's checksum, which depends on the order of the bytes. */
struct checksum {
    uint64_t first;
    uint64_t second;
};

static void checksum_add(struct checksum *sum, uint8_t byte)
{
    sum->first += byte;
    sum->second += sum->first;
}

static uint8_t stream_byte(uint64_t position)
{
    return (uint8_t)(position * UINT64_C(0x9E3779B97F4A7C15) >> 56);
}

/* Ends the process with the name of the call that failed; otherwise returns the call's result. */
static ssize_t check(const char *what, ssize_t result)
{
    if (result < 0) {
        fprintf(stderr, "%s: %s\n", what, strerror((int)-result));
        _exit(1);
    }
    return result;
}

static void wait_for(crosslane_lane *lane, int events)
{
    if (check("wait", crosslane_lane_wait(lane, events, TIMEOUT_MS)) == 0) {
        fprintf(stderr, "wait: nothing from the peer for %d s\n", TIMEOUT_MS / 1000);
        _exit(1);
    }
}

/* Writes the stream in place; returns its checksum. */
static uint64_t produce(crosslane_lane *lane, uint64_t stream_bytes)
{
    struct checksum sum = {0, 0};
    uint64_t sent_bytes = 0;
    while (sent_bytes < stream_bytes) {
        void *at = NULL;
        ssize_t room_bytes = crosslane_lane_reserve(lane, (size_t)(stream_bytes - sent_bytes), &at);
        if (room_bytes == -EAGAIN) {
            wait_for(lane, CROSSLANE_LANE_OUT);
            continue;
        }
        check("reserve", room_bytes);
        for (ssize_t index = 0; index < room_bytes; index++) {
            uint8_t byte = stream_byte(sent_bytes + (uint64_t)index);
            ((uint8_t *)at)[index] = byte;
            checksum_add(&sum, byte);
        }
        check("commit", crosslane_lane_commit(lane, (size_t)room_bytes));
        sent_bytes += (uint64_t)room_bytes;
    }
    check("finish", crosslane_lane_finish(lane));
    return sum.second;
}

/* Reads the stream in place up to its end; returns its checksum. */
static uint64_t consume(crosslane_lane *lane)
{
    struct checksum sum = {0, 0};
    for (;;) {
        const void *at = NULL;
        ssize_t chunk_bytes = crosslane_lane_peek(lane, &at);
        if (chunk_bytes == -EAGAIN) {
            wait_for(lane, CROSSLANE_LANE_IN);
            continue;
        }
        if (check("peek", chunk_bytes) == 0)
            return sum.second;
        /* Volatile: an untrusted peer may change a byte at any time, so each byte is read just once. */
        const volatile uint8_t *bytes = at;
        for (ssize_t index = 0; index < chunk_bytes; index++)
            checksum_add(&sum, bytes[index]);
        check("consume", crosslane_lane_consume(lane, (size_t)chunk_bytes));
    }
}

/* The child: computes the checksum of the stream, and sends it back in the other direction. */
static int run_child(int memfd)
{
    crosslane_lane *lane = NULL;
    check("attach side 1", crosslane_lane_attach(memfd, 1, &lane));
    uint64_t sum = consume(lane);
    if (check("write", crosslane_lane_write(lane, &sum, sizeof sum)) != (ssize_t)sizeof sum)
        return 1;
    check("finish", crosslane_lane_finish(lane));
    check("close", crosslane_lane_close(lane));
    return 0;
}

int main(int argc, char **argv)
{
    uint64_t stream_bytes = (argc > 1 ? strtoull(argv[1], NULL, 10) : 64) << 20;
    int memfd = (int)check("create", crosslane_lane_create(RING_BYTES));
    pid_t child = fork();
    if (child < 0) {
        perror("fork");
        return 1;
    }
    if (child == 0)
        _exit(run_child(memfd));

    crosslane_lane *lane = NULL;
    check("attach side 0", crosslane_lane_attach(memfd, 0, &lane));
    uint64_t sent_sum = produce(lane, stream_bytes);
    uint64_t received_sum = 0;
    wait_for(lane, CROSSLANE_LANE_IN);
    check("read", crosslane_lane_read(lane, &received_sum, sizeof received_sum));
    check("close", crosslane_lane_close(lane));

    int status = 0;
    if (waitpid(child, &status, 0) != child || status != 0 || sent_sum != received_sum) {
        fprintf(stderr, "sent %016llx, received %016llx\n", (unsigned long long)sent_sum,
                (unsigned long long)received_sum);
        return 1;
    }
    printf("%llu bytes in place, checksum %016llx, the same at both endpoints\n", (unsigned long long)stream_bytes,
           (unsigned long long)sent_sum);
    return 0;
}
