// The tests of pcie-bench with a GPU as the DMA device, compiled at run time with -DWORDS=n: the number of 8-byte words
// a transfer, 1 to 512. It is a constant, because for a single warp the loop control takes longer than the issue of a
// load.
//
// Every access bypasses the GPU's caches: loads have system scope and are volatile, so that a cache serves no sector
// twice; stores and fences have system scope. `addresses` are offsets in the window, in the order of visits, and are in
// the GPU's own memory.

typedef unsigned long long u64;
typedef unsigned int u32;

#define WARP 32
// Words of a transfer for each lane of a warp.
#define ROUNDS ((WORDS + WARP - 1) / WARP)

__device__ __forceinline__ u64 now() {
    u64 ticks;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(ticks)::"memory");
    return ticks;
}

__device__ __forceinline__ u64 load(const u64 *at) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store(u64 *at, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// Measures the ticks of the timer itself: two readings with no work between them.
extern "C" __global__ void timer_cost(u64 *ticks, u32 samples) {
    for (u32 i = 0; i < samples; i++) {
        u64 start = now();
        ticks[i] = now() - start;
    }
}

// Measures the clock against the global timer for at least `ns`: ticks, then nanoseconds.
extern "C" __global__ void clock_rate(u64 *out, u64 ns) {
    u64 wall, wall_end;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(wall)::"memory");
    u64 start = now();
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(wall_end)::"memory");
    } while (wall_end - wall < ns);
    out[0] = now() - start;
    out[1] = wall_end - wall;
}

// Whether a lane has a word in a round: in the last round some lanes have none.
__device__ __forceinline__ bool has_word(u32 round, u32 lane) {
    return (round + 1) * WARP <= WORDS || round * WARP + lane < WORDS;
}

// Loads a transfer with one warp; the value of a lane without a word is zero.
__device__ __forceinline__ void read(u64 (&values)[ROUNDS], const u64 *at) {
    u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) values[i] = has_word(i, lane) ? load(at + lane + i * WARP) : 0;
}

// Stores a transfer with one warp. Returns the address of the lane's last word, or null.
__device__ __forceinline__ u64 *write(u64 *at, u64 value) {
    u32 lane = threadIdx.x % WARP;
    u64 *last = 0;
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) {
        if (has_word(i, lane)) {
            last = at + lane + i * WARP;
            store(last, value);
        }
    }
    return last;
}

__device__ __forceinline__ u64 sum_of(const u64 (&values)[ROUNDS]) {
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) sum ^= values[i];
    return sum;
}

// Waits until the value has arrived in every lane. A warp issues in order, and the store to shared memory needs the
// value, so no later instruction, such as a reading of the clock, issues before it has arrived.
__device__ __forceinline__ void wait_for(u64 value) {
    __shared__ volatile u64 arrived[WARP];
    arrived[threadIdx.x % WARP] = value;
}

// Waits for all values of a lane. Adding them up instead would stall between two loads.
__device__ __forceinline__ void wait_for_all(const u64 (&values)[ROUNDS]) {
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) wait_for(values[i]);
}

// LAT_RD with one warp. The next address depends on the loaded sum, masked with `nothing` (zero), so that no load
// begins before all earlier ones have arrived.
extern "C" __global__ void lat_rd(char *window, const u64 *addresses, u64 *ticks, u32 samples, u64 nothing) {
    u64 values[ROUNDS], carried = 0;
    for (u32 i = 0; i < samples; i++) {
        u64 *at = (u64 *)(window + addresses[i] + (carried & nothing));
        wait_for((u64)at);
        u64 start = now();
        read(values, at);
        wait_for_all(values);
        u64 end = now();
        carried = sum_of(values);
        if (threadIdx.x == 0) ticks[i] = end - start;
    }
}

// LAT_WRRD with one warp: stores, a fence with system scope, loads of the same words.
extern "C" __global__ void lat_wrrd(char *window, const u64 *addresses, u64 *ticks, u32 samples, u64 nothing) {
    u64 values[ROUNDS], carried = 0;
    for (u32 i = 0; i < samples; i++) {
        u64 *at = (u64 *)(window + addresses[i] + (carried & nothing));
        wait_for((u64)at);
        u64 start = now();
        write(at, i);
        __threadfence_system();
        read(values, at);
        wait_for_all(values);
        u64 end = now();
        carried = sum_of(values);
        if (threadIdx.x == 0) ticks[i] = end - start;
    }
}

// Bandwidth with many warps, each of which does one transfer after the other. `mode` 0 reads, 1 writes, 2 alternates;
// in mode 2 half of the warps begin with a write. `sums` keeps the compiler from removing the loads; a lane that has
// written reads its last word back.
extern "C" __global__ void bandwidth(char *window, const u64 *addresses, u64 *sums, u32 transfers, u32 mode) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    u32 warps = gridDim.x * blockDim.x / WARP;
    u64 values[ROUNDS], sum = 0;
    u64 *last = 0;
    u32 index = thread / WARP;
    for (u32 i = index; i < transfers; i += warps, index++) {
        u64 *at = (u64 *)(window + addresses[i]);
        if (mode == 1 || (mode == 2 && index % 2 == 1)) {
            last = write(at, i);
        } else {
            read(values, at);
            sum += sum_of(values);
        }
    }
    if (last) {
        __threadfence_system();
        sum += load(last);
    }
    sums[thread] = sum;
}

// Writes the whole window from the device, for the cache state device-warm.
extern "C" __global__ void fill(char *window, u64 bytes, u64 value) {
    u64 stride = (u64)gridDim.x * blockDim.x * 8;
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; at < bytes; at += stride)
        store((u64 *)(window + at), value);
    __threadfence_system();
}
