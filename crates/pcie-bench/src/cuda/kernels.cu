// The tests of pcie-bench with a GPU as the DMA device, compiled at run time.
//
// Every access goes past the GPU's caches: loads with system scope and volatile, so that no sector is served twice from
// a cache; stores and fences with system scope. `addresses` are offsets in the window, in the order of visits; they lie
// in the GPU's own memory.

typedef unsigned long long u64;
typedef unsigned int u32;

#define WARP 32
// Words of 8 bytes in a transfer of 4 KiB, the largest, for each lane of a warp.
#define WORDS_OF_LANE_MAX 16

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

// A warp's loads of a transfer, a word a lane at a time: all of them are asked for before the first is waited for.
// Returns the lane's sum.
__device__ __forceinline__ u64 read(const u64 *at, u32 words) {
    u64 values[WORDS_OF_LANE_MAX];
    u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 i = 0; i < WORDS_OF_LANE_MAX; i++) {
        u32 word = i * WARP + lane;
        values[i] = word < words ? load(at + word) : 0;
    }
    u64 sum = 0;
#pragma unroll
    for (u32 i = 0; i < WORDS_OF_LANE_MAX; i++) sum ^= values[i];
    return sum;
}

// A warp's stores of a transfer. Returns the lane's last one, or null.
__device__ __forceinline__ u64 *write(u64 *at, u32 words, u64 value) {
    u64 *last = 0;
    for (u32 word = threadIdx.x % WARP; word < words; word += WARP) {
        last = at + word;
        store(last, value);
    }
    return last;
}

// LAT_RD by one warp. The window holds zeros, or what a host wrote: the sum loaded is added to the next address under a
// mask of nothing, so that no load begins before those before it have arrived.
extern "C" __global__ void lat_rd(char *window, const u64 *addresses, u64 *ticks, u32 samples, u32 words, u64 nothing) {
    __shared__ volatile u64 arrived[WARP];
    u64 carried = 0;
    for (u32 i = 0; i < samples; i++) {
        u64 *at = (u64 *)(window + addresses[i] + (carried & nothing));
        __syncwarp();
        u64 start = now();
        carried = read(at, words);
        // A warp issues in order, and this store cannot before every lane's sum is known: nor can the clock behind it.
        arrived[threadIdx.x] = carried;
        u64 end = now();
        if (threadIdx.x == 0) ticks[i] = end - start;
    }
}

// LAT_WRRD by one warp: stores, a fence that the host takes part in, loads of the same words.
extern "C" __global__ void lat_wrrd(char *window, const u64 *addresses, u64 *ticks, u32 samples, u32 words, u64 nothing) {
    __shared__ volatile u64 arrived[WARP];
    u64 carried = 0;
    for (u32 i = 0; i < samples; i++) {
        u64 *at = (u64 *)(window + addresses[i] + (carried & nothing));
        __syncwarp();
        u64 start = now();
        write(at, words, i);
        __threadfence_system();
        carried = read(at, words);
        arrived[threadIdx.x] = carried;
        u64 end = now();
        if (threadIdx.x == 0) ticks[i] = end - start;
    }
}

// Bandwidth by many warps, each a transfer at a time. `mode` 0 reads, 1 writes, 2 alternates. `sums` keeps the loads
// from being dropped; a lane that ends with writes reads its last one back.
extern "C" __global__ void bandwidth(char *window, const u64 *addresses, u64 *sums, u32 transfers, u32 words, u32 mode) {
    u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
    u32 warps = gridDim.x * blockDim.x / WARP;
    u64 sum = 0;
    u64 *last = 0;
    for (u32 i = thread / WARP; i < transfers; i += warps) {
        u64 *at = (u64 *)(window + addresses[i]);
        if (mode == 1 || (mode == 2 && i % 2 == 1)) {
            last = write(at, words, i);
        } else {
            sum += read(at, words);
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
