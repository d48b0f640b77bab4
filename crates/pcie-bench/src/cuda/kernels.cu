// The tests of pcie-bench with a GPU as the DMA device, compiled at run time.
//
// Every access goes past the GPU's caches: loads with system scope and volatile, so that no sector is served twice from
// a cache; stores and fences with system scope. `addresses` are offsets in the window, in the order of visits; they lie
// in the GPU's own memory.

typedef unsigned long long u64;
typedef unsigned int u32;

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

// LAT_RD by one thread. The window holds zeros, or what a host wrote: the value loaded is added to the next address
// under a mask of nothing, so that no load begins before the one before it has arrived.
extern "C" __global__ void lat_rd(char *window, const u64 *addresses, u64 *ticks, u32 samples, u32 words, u64 nothing) {
    __shared__ volatile u64 arrived;
    u64 carried = 0;
    for (u32 i = 0; i < samples; i++) {
        u64 *at = (u64 *)(window + addresses[i] + (carried & nothing));
        u64 start = now();
        u64 sum = 0;
        for (u32 w = 0; w < words; w++) sum ^= load(at + w);
        carried = sum;
        // A warp issues in order, and this store cannot before the sum is known: neither can the clock behind it.
        arrived = sum;
        u64 end = now();
        ticks[i] = end - start;
    }
}

// LAT_WRRD by one thread: store, fence that the host takes part in, load of the same words.
extern "C" __global__ void lat_wrrd(char *window, const u64 *addresses, u64 *ticks, u32 samples, u32 words, u64 nothing) {
    __shared__ volatile u64 arrived;
    u64 carried = 0;
    for (u32 i = 0; i < samples; i++) {
        u64 *at = (u64 *)(window + addresses[i] + (carried & nothing));
        u64 start = now();
        for (u32 w = 0; w < words; w++) store(at + w, i);
        __threadfence_system();
        u64 sum = 0;
        for (u32 w = 0; w < words; w++) sum ^= load(at + w);
        carried = sum;
        arrived = sum;
        u64 end = now();
        ticks[i] = end - start;
    }
}

// Bandwidth by whole warps: a warp takes a transfer at a time, its lanes the words of it. `mode` 0 reads, 1 writes,
// 2 alternates. `sums` keeps the loads from being dropped; the warp that ends a run of writes reads its last one back.
extern "C" __global__ void bandwidth(char *window, const u64 *addresses, u64 *sums, u32 transfers, u32 words, u32 mode) {
    u32 lane = threadIdx.x % 32;
    u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    u32 warps = gridDim.x * blockDim.x / 32;
    u64 sum = 0;
    u64 *last = 0;
    for (u32 i = warp; i < transfers; i += warps) {
        u64 *at = (u64 *)(window + addresses[i]);
        bool writes = mode == 1 || (mode == 2 && i % 2 == 1);
        for (u32 w = lane; w < words; w += 32) {
            if (writes) {
                store(at + w, i);
                last = at + w;
            } else {
                sum += load(at + w);
            }
        }
    }
    if (last) {
        __threadfence_system();
        sum += load(last);
    }
    sums[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// The device's own write of the whole window: device-warm.
extern "C" __global__ void fill(char *window, u64 bytes, u64 value) {
    u64 stride = (u64)gridDim.x * blockDim.x * 8;
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; at < bytes; at += stride)
        store((u64 *)(window + at), value);
    __threadfence_system();
}
