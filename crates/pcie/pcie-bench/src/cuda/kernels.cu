// The tests of pcie-bench with a GPU as the DMA device, compiled at run time with -DWORDS=n: the words of 8 bytes of a
// transfer, 1 to 512. A constant, because a warp that is alone takes longer to count than a word takes to be asked for.
//
// Every access goes past the GPU's caches: loads with system scope and volatile, so that no sector is served twice from
// a cache; stores and fences with system scope. `addresses` are offsets in the window, in the order of visits; they lie
// in the GPU's own memory.

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

// Ticks of the timer itself: two readings with nothing in between.
extern "C" __global__ void timer_cost(u64 *ticks, u32 samples) {
    for (u32 i = 0; i < samples; i++) {
        u64 start = now();
        ticks[i] = now() - start;
    }
}

// Ticks of the clock beside the nanoseconds of the global timer, for at least `ns`.
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

// Whether a lane has a word in a round: all of them but in the last.
__device__ __forceinline__ bool has_word(u32 round, u32 lane) {
    return (round + 1) * WARP <= WORDS || round * WARP + lane < WORDS;
}

// A warp's loads of a transfer; a word that a lane has not got is zero.
__device__ __forceinline__ void read(u64 (&values)[ROUNDS], const u64 *at) {
    u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) values[i] = has_word(i, lane) ? load(at + lane + i * WARP) : 0;
}

// A warp's stores of a transfer. Returns where the lane's last one is, or null.
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

// Waits until every lane's value is there. A warp issues in order, and a store cannot before that: nor can what is
// behind it, a reading of the clock among it.
__device__ __forceinline__ void wait_for(u64 value) {
    __shared__ volatile u64 arrived[WARP];
    arrived[threadIdx.x % WARP] = value;
}

// As above. A sum would be begun, and waited for, between two loads.
__device__ __forceinline__ void wait_for_all(const u64 (&values)[ROUNDS]) {
#pragma unroll
    for (u32 i = 0; i < ROUNDS; i++) wait_for(values[i]);
}

// LAT_RD by one warp. The window holds zeros, or what a host wrote: the sum loaded is added to the next address under a
// mask of nothing, so that no load begins before those before it have arrived.
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

// LAT_WRRD by one warp: stores, a fence that the host takes part in, loads of the same words.
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

// Bandwidth by many warps, each a transfer at a time. `mode` 0 reads, 1 writes, 2 alternates: each warp does, and half
// of them begin with a write. `sums` keeps the loads from being dropped; a lane that ends with writes reads its last one
// back.
extern "C" __global__ void bandwidth(char *window, const u64 *addresses, u64 *sums, u32 transfers, u32 mode) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    u32 warps = gridDim.x * blockDim.x / WARP;
    u64 values[ROUNDS], sum = 0;
    u64 *last = 0;
    u32 turn = thread / WARP;
    for (u32 i = turn; i < transfers; i += warps, turn++) {
        u64 *at = (u64 *)(window + addresses[i]);
        if (mode == 1 || (mode == 2 && turn % 2 == 1)) {
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

// The device's own write of the whole window: device-warm.
extern "C" __global__ void fill(char *window, u64 bytes, u64 value) {
    u64 stride = (u64)gridDim.x * blockDim.x * 8;
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; at < bytes; at += stride)
        store((u64 *)(window + at), value);
    __threadfence_system();
}
