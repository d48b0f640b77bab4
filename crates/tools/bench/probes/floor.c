/* Floors: the times of the machine itself, without a socket or a lane.
 *   floor line    CORE_A CORE_B MILLISECONDS    one cache line bounced between two cores
 *   floor copy    CORE_A CORE_B MILLISECONDS    a two-copy pipeline through shared memory, by chunk size
 *   floor mapping CORE   MILLISECONDS           memcpy into shared memory like that of windows, by size of a piece
 *   floor syscall CORE   MILLISECONDS           the cheapest system call */
#include "common.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#define COPY_SLOTS 4
#define BATCH 64

static struct {
    _Alignas(128) atomic_uint_fast64_t line; /* sequence number; odd: the second core continues */
    _Alignas(128) atomic_uint_fast64_t written;
    _Alignas(128) atomic_uint_fast64_t read;
    _Alignas(128) atomic_bool stop;
} shared;

static int other_core;
static size_t chunk_bytes;
static char *slots;

static void pin(int core)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)core, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0)
        die("pinning to core %d", core);
}

static void *bounce_back(void *unused)
{
    (void)unused;
    pin(other_core);
    for (uint64_t sequence = 1;; sequence += 2) {
        uint64_t seen;
        while ((seen = atomic_load_explicit(&shared.line, memory_order_acquire)) != sequence)
            if (seen == UINT64_MAX)
                return NULL;
        atomic_store_explicit(&shared.line, sequence + 1, memory_order_release);
    }
}

static inline void bounce(uint64_t *sequence)
{
    atomic_store_explicit(&shared.line, *sequence + 1, memory_order_release);
    while (atomic_load_explicit(&shared.line, memory_order_acquire) != *sequence + 2)
        ;
    *sequence += 2;
}

static void line_floor(long milliseconds)
{
    static struct hist each, batches;
    pthread_t thread;
    if (pthread_create(&thread, NULL, bounce_back, NULL) != 0)
        die_plain("cannot start a thread");
    uint64_t sequence = 0, half = ticks_in_ms(milliseconds) / 2;
    for (int warm = 0; warm < 1000; warm++)
        bounce(&sequence);
    struct scale scale = scale_start();
    /* Each bounce is timed as the probes time a round trip; ratios use these times. */
    for (uint64_t after = ticks(), until = after + half; after < until;) {
        uint64_t before = ticks();
        bounce(&sequence);
        after = ticks();
        hist_add(&each, after - before);
    }
    /* The same without a clock between bounces, to show the cost of the clock. */
    for (uint64_t after = ticks(), until = after + half; after < until;) {
        uint64_t before = ticks();
        for (int index = 0; index < BATCH; index++)
            bounce(&sequence);
        after = ticks();
        hist_add(&batches, after - before);
    }
    double ns_per_tick = scale_ns_per_tick(&scale);
    atomic_store(&shared.line, UINT64_MAX);
    pthread_join(thread, NULL);
    hist_print(&each, ns_per_tick);
    uint64_t total = 0, passed = 0;
    for (unsigned index = 0; index < HIST_BUCKETS; index++)
        total += batches.count[index];
    for (unsigned index = 0; index < HIST_BUCKETS; index++) {
        passed += batches.count[index];
        if (passed * 2 >= total && passed) {
            double low = index;
            if (index >= HIST_SUB)
                low = (double)(((uint64_t)HIST_SUB + index % HIST_SUB) << (index / HIST_SUB - 1));
            printf("untimed_ns %.2f\n", low * ns_per_tick / BATCH);
            break;
        }
    }
}

static void *copy_out(void *unused)
{
    (void)unused;
    pin(other_core);
    char *sink = alloc_touched(chunk_bytes);
    for (uint64_t done = 0;; done++) {
        while (atomic_load_explicit(&shared.written, memory_order_acquire) == done)
            if (atomic_load_explicit(&shared.stop, memory_order_relaxed))
                return free(sink), NULL;
        memcpy(sink, slots + done % COPY_SLOTS * chunk_bytes, chunk_bytes);
        __asm__ volatile("" : : "r"(sink) : "memory"); /* the copy must happen */
        atomic_store_explicit(&shared.read, done + 1, memory_order_release);
    }
}

static void copy_chunks(long milliseconds)
{
    atomic_store(&shared.written, 0);
    atomic_store(&shared.read, 0);
    atomic_store(&shared.stop, false);
    char *source = alloc_touched(chunk_bytes);
    pthread_t thread;
    if (pthread_create(&thread, NULL, copy_out, NULL) != 0)
        die_plain("cannot start a thread");
    uint64_t done = 0, warm = 4 * COPY_SLOTS, start = 0, duration = ticks_in_ms(milliseconds);
    struct scale scale = scale_start();
    uint64_t now = ticks();
    for (; done < warm || now < start + duration; done++) {
        while (done - atomic_load_explicit(&shared.read, memory_order_acquire) >= COPY_SLOTS)
            ;
        memcpy(slots + done % COPY_SLOTS * chunk_bytes, source, chunk_bytes);
        atomic_store_explicit(&shared.written, done + 1, memory_order_release);
        now = ticks();
        if (done + 1 == warm)
            start = now;
    }
    double seconds = (double)(now - start) * scale_ns_per_tick(&scale) / 1e9;
    atomic_store(&shared.stop, true);
    pthread_join(thread, NULL);
    free(source);
    printf("chunk %zu %.6f\n", chunk_bytes, (double)(done - warm) * (double)chunk_bytes / seconds / 1e9);
}

static void copy_floor(long milliseconds)
{
    static const size_t chunks_kb[] = {8, 16, 32, 64, 128};
    size_t count = sizeof chunks_kb / sizeof *chunks_kb, bytes = COPY_SLOTS * 128 * 1024;
    slots = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (slots == MAP_FAILED)
        die("mapping %zu bytes", bytes);
    for (size_t index = 0; index < count; index++) {
        chunk_bytes = chunks_kb[index] * 1024;
        copy_chunks((milliseconds + (long)count - 1) / (long)count);
    }
}

/* One core copies pieces one after the other into a mapping of the size of a bulk partition's ring. */
static void mapping_floor(long milliseconds)
{
    static const size_t pieces_kb[] = {1, 4, 16, 64, 256, 1024};
    size_t count = sizeof pieces_kb / sizeof *pieces_kb, ring = 512 * 1024, longest = 1024 * 1024;
    int memory = memfd_create("floor", MFD_CLOEXEC);
    if (memory < 0 || ftruncate(memory, (off_t)ring) != 0)
        die("memory of %zu bytes", ring);
    char *window = mmap(NULL, ring, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, memory, 0);
    if (window == MAP_FAILED)
        die("mapping %zu bytes", ring);
    char *source = alloc_touched(longest);
    uint64_t duration = ticks_in_ms((milliseconds + (long)count - 1) / (long)count);
    for (size_t index = 0; index < count; index++) {
        size_t piece = pieces_kb[index] * 1024, part = piece < ring ? piece : ring, at = 0;
        uint64_t bytes = 0, now;
        struct scale scale = scale_start();
        do {
            for (size_t done = 0; done < piece; done += part, at = (at + part) % ring)
                memcpy(window + at, source + done, part);
            __asm__ volatile("" : : "r"(window) : "memory"); /* the copy must happen */
            bytes += piece;
            now = ticks();
        } while (now < scale.ticks + duration);
        double seconds = (double)(now - scale.ticks) * scale_ns_per_tick(&scale) / 1e9;
        printf("chunk %zu %.6f\n", piece, (double)bytes / seconds / 1e9);
    }
}

static void syscall_floor(long milliseconds)
{
    static struct hist hist;
    uint64_t duration = ticks_in_ms(milliseconds);
    struct scale scale = scale_start();
    for (uint64_t after = scale.ticks, until = after + duration; after < until;) {
        uint64_t before = ticks();
        syscall(SYS_getppid);
        after = ticks();
        hist_add(&hist, after - before);
    }
    hist_print(&hist, scale_ns_per_tick(&scale));
}

int main(int argc, char **argv)
{
    die_with_parent();
    bool syscall = argc == 4 && strcmp(argv[1], "syscall") == 0;
    bool mapping = argc == 4 && strcmp(argv[1], "mapping") == 0;
    if (syscall || mapping) {
        pin((int)number(argv[2], 0, CPU_SETSIZE - 1, "core"));
        (syscall ? syscall_floor : mapping_floor)(number(argv[3], 1, 600000, "milliseconds"));
        return 0;
    }
    bool line = argc == 5 && strcmp(argv[1], "line") == 0;
    bool copy = argc == 5 && strcmp(argv[1], "copy") == 0;
    if (!line && !copy)
        return fprintf(stderr, "usage: floor line|copy CORE_A CORE_B MILLISECONDS"
                               " | floor mapping|syscall CORE MILLISECONDS\n"),
               2;
    other_core = (int)number(argv[3], 0, CPU_SETSIZE - 1, "core");
    pin((int)number(argv[2], 0, CPU_SETSIZE - 1, "core"));
    (line ? line_floor : copy_floor)(number(argv[4], 1, 600000, "milliseconds"));
    return 0;
}
