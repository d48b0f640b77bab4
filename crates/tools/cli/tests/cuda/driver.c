/* A fake NVIDIA driver: one GPU whose kernels run on this processor, in virtual time. Its addresses differ from the
 * host's, so that confusing the two fails. */
#include "fake.h"

#define OUT_OF_MEMORY 2
#define INVALID 1
#define ILLEGAL_ADDRESS 700
#define BLOCKS_MAX 256
#define GPU_OFFSET (UINT64_C(1) << 46)
#define LAUNCH_NS 5000.0
#define CLOCK_GHZ 2
#define TIMER_TICKS 8
/* Fixed latencies; each word adds WORD_NS. */
#define READ_NS 620
#define WRITE_READ_NS 1120
/* A transfer takes TRANSFER_NS and WORD_NS for each word, a write WRITE_SHARE of that. Up to WARPS_AT_ONCE warps run
 * concurrently. */
#define TRANSFER_NS 560.0
#define WRITE_SHARE 0.8
#define WORD_NS 10
#define WARPS_AT_ONCE 64
/* Delay of the first launch after a copy. */
#define IDLE_NS 50000.0

typedef int (*kernel)(unsigned threads, void **arguments, double *ns);

struct block {
    char *base;
    size_t bytes;
    int is_pinned;
};

static struct block blocks[BLOCKS_MAX];
static int is_idle, is_ready, is_retained, is_current, is_loaded, events;
/* Number of words of a transfer with which the kernels were compiled. */
static unsigned words;
static double now_ns;

static struct block *block_of(const char *base)
{
    for (int i = 0; i < BLOCKS_MAX; i++)
        if (blocks[i].base && blocks[i].base == base)
            return &blocks[i];
    return NULL;
}

static char *block_new(size_t bytes, int is_pinned)
{
    for (int i = 0; i < BLOCKS_MAX; i++)
        if (!blocks[i].base) {
            blocks[i] = (struct block){aligned_alloc(4096, (bytes + 4095) / 4096 * 4096), bytes, is_pinned};
            return blocks[i].base;
        }
    abort();
}

static int block_free(char *base, int is_pinned, const char *function)
{
    struct block *block = block_of(base);
    expect(block && block->is_pinned == is_pinned, function, "not memory of this kind");
    if (!block)
        return INVALID;
    free(block->base);
    block->base = NULL;
    return 0;
}

/* Returns the host address of a span of GPU addresses, or NULL if the span is not in one block. */
static void *span(uint64_t address, uint64_t bytes)
{
    char *base = (char *)(uintptr_t)(address - GPU_OFFSET);
    for (int i = 0; i < BLOCKS_MAX; i++)
        if (blocks[i].base && base >= blocks[i].base && base + bytes <= blocks[i].base + blocks[i].bytes)
            return base;
    complain("address %llx, %llu bytes: not the GPU's", (unsigned long long)address, (unsigned long long)bytes);
    return NULL;
}

static uint64_t wide(void **arguments, int index)
{
    return *(uint64_t *)arguments[index];
}

static uint32_t narrow(void **arguments, int index)
{
    return *(uint32_t *)arguments[index];
}

/* --- kernels, with the signatures of kernels.cu --- */

static int timer_cost(unsigned threads, void **arguments, double *ns)
{
    uint32_t samples = narrow(arguments, 1);
    uint64_t *ticks = span(wide(arguments, 0), 8 * (uint64_t)samples);
    expect(threads == 1, __func__, "one thread times");
    for (uint32_t i = 0; ticks && i < samples; i++)
        ticks[i] = TIMER_TICKS;
    *ns = 0;
    return ticks ? 0 : ILLEGAL_ADDRESS;
}

static int clock_rate(unsigned threads, void **arguments, double *ns)
{
    uint64_t *out = span(wide(arguments, 0), 16);
    uint64_t wall = wide(arguments, 1);
    expect(threads == 1, __func__, "one thread times");
    if (!out)
        return ILLEGAL_ADDRESS;
    out[0] = CLOCK_GHZ * wall;
    out[1] = wall;
    *ns = (double)wall;
    return 0;
}

static int latency(unsigned threads, void **arguments, double *ns, int writes)
{
    uint32_t samples = narrow(arguments, 3);
    uint64_t *addresses = span(wide(arguments, 1), 8 * (uint64_t)samples);
    uint64_t *ticks = span(wide(arguments, 2), 8 * (uint64_t)samples);
    expect(threads == 32, __func__, "one warp chases");
    expect(wide(arguments, 4) == 0, __func__, "the zero mask is not zero");
    for (uint32_t i = 0; ticks && addresses && i < samples; i++) {
        uint64_t *at = span(wide(arguments, 0) + addresses[i], 8 * (uint64_t)words);
        if (!at)
            return ILLEGAL_ADDRESS;
        for (uint32_t word = 0; writes && word < words; word++)
            at[word] = i;
        ticks[i] = TIMER_TICKS + CLOCK_GHZ * (uint64_t)((writes ? WRITE_READ_NS : READ_NS) + WORD_NS * words);
    }
    *ns = (double)samples * READ_NS;
    return ticks && addresses ? 0 : ILLEGAL_ADDRESS;
}

static int lat_rd(unsigned threads, void **arguments, double *ns)
{
    return latency(threads, arguments, ns, 0);
}

static int lat_wrrd(unsigned threads, void **arguments, double *ns)
{
    return latency(threads, arguments, ns, 1);
}

static int compare(const void *one, const void *other)
{
    uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;
    return a < b ? -1 : a > b;
}

static void expect_once(const uint64_t *addresses, uint32_t transfers)
{
    uint64_t *sorted = malloc(8 * (size_t)transfers + 8);
    memcpy(sorted, addresses, 8 * (size_t)transfers);
    qsort(sorted, transfers, 8, compare);
    for (uint32_t i = 1; i < transfers; i++)
        expect(sorted[i] != sorted[i - 1], "bandwidth", "a unit is visited twice in a launch");
    free(sorted);
}

static int bandwidth(unsigned threads, void **arguments, double *ns)
{
    uint32_t transfers = narrow(arguments, 3), mode = narrow(arguments, 4);
    uint64_t *addresses = span(wide(arguments, 1), 8 * (uint64_t)transfers);
    unsigned warps = threads / 32;
    double transfer_ns = TRANSFER_NS + WORD_NS * words, all_ns = 0;
    expect(threads % 32 == 0, __func__, "whole warps");
    expect(mode <= 2, __func__, "mode");
    if (!addresses || !span(wide(arguments, 2), 8 * (uint64_t)threads))
        return ILLEGAL_ADDRESS;
    expect_once(addresses, transfers);
    for (uint32_t i = 0; i < transfers; i++) {
        uint64_t *at = span(wide(arguments, 0) + addresses[i], 8 * (uint64_t)words);
        if (!at)
            return ILLEGAL_ADDRESS;
        if (mode == 1 || (mode == 2 && (i % warps + i / warps) % 2 == 1)) {
            *at = i;
            all_ns += WRITE_SHARE * transfer_ns;
        } else {
            all_ns += transfer_ns;
        }
    }
    *ns = all_ns / (warps < WARPS_AT_ONCE ? warps : WARPS_AT_ONCE);
    return 0;
}

static int fill(unsigned threads, void **arguments, double *ns)
{
    uint64_t bytes = wide(arguments, 1);
    char *window = span(wide(arguments, 0), bytes);
    expect(threads > 1, __func__, "many threads fill");
    if (window)
        memset(window, (int)wide(arguments, 2), bytes);
    *ns = (double)bytes;
    return window ? 0 : ILLEGAL_ADDRESS;
}

static const struct {
    const char *name;
    kernel run;
} kernels[] = {
    {"timer_cost", timer_cost}, {"clock_rate", clock_rate}, {"lat_rd", lat_rd},
    {"lat_wrrd", lat_wrrd},     {"bandwidth", bandwidth},   {"fill", fill},
};

/* --- the driver's functions --- */

int cuInit(unsigned flags)
{
    BEGIN(OUT_OF_MEMORY);
    expect(flags == 0, __func__, "flags");
    is_ready = 1;
    return 0;
}

int cuDeviceGetCount(int *count)
{
    const char *wanted = getenv("FAKE_CUDA_COUNT");
    BEGIN(OUT_OF_MEMORY);
    expect(is_ready, __func__, "before cuInit");
    *count = wanted ? atoi(wanted) : 1;
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    BEGIN(OUT_OF_MEMORY);
    *device = 40 + ordinal;
    return 0;
}

int cuDeviceGetName(char *name, int bytes, int device)
{
    BEGIN(OUT_OF_MEMORY);
    expect(device == 40, __func__, "device");
    snprintf(name, (size_t)bytes, "Fake GPU");
    return 0;
}

int cuDeviceGetPCIBusId(char *address, int bytes, int device)
{
    BEGIN(OUT_OF_MEMORY);
    expect(device == 40, __func__, "device");
    /* No machine has this address: a bus has 32 devices. */
    snprintf(address, (size_t)bytes, "0000:FF:3F.0");
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    BEGIN(OUT_OF_MEMORY);
    expect(device == 40, __func__, "device");
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 8 : attribute == 39 ? 1024 : -1;
    expect(*value >= 0, __func__, "attribute");
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device)
{
    BEGIN(OUT_OF_MEMORY);
    expect(device == 40, __func__, "device");
    is_retained++;
    *context = &is_retained;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
    BEGIN(OUT_OF_MEMORY);
    expect(device == 40 && is_retained == 1, __func__, "not retained");
    is_retained--;
    is_current = 0;
    return 0;
}

int cuCtxSetCurrent(void *context)
{
    BEGIN(OUT_OF_MEMORY);
    expect(context == &is_retained && is_retained, __func__, "context");
    is_current = 1;
    return 0;
}

int cuCtxSynchronize(void)
{
    BEGIN(OUT_OF_MEMORY);
    expect(is_current, __func__, "no context is current");
    return 0;
}

int cuModuleLoadData(void **module, const void *image)
{
    BEGIN(OUT_OF_MEMORY);
    expect(is_current, __func__, "no context is current");
    expect(sscanf(image, "fake ptx for 90, %u words", &words) == 1 && words > 0, __func__, "image");
    expect(!is_loaded, __func__, "the module before is still loaded");
    is_loaded = 1;
    *module = &is_loaded;
    return 0;
}

int cuModuleUnload(void *module)
{
    BEGIN(OUT_OF_MEMORY);
    expect(is_current && module == &is_loaded && is_loaded, __func__, "module");
    is_loaded = 0;
    return 0;
}

int cuModuleGetFunction(void **function, void *module, const char *name)
{
    BEGIN(OUT_OF_MEMORY);
    expect(module == &is_loaded && is_loaded, __func__, "module");
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (strcmp(kernels[i].name, name) == 0) {
            *function = (void *)&kernels[i];
            return 0;
        }
    complain("%s: no kernel %s", __func__, name);
    return INVALID;
}

int cuMemHostAlloc(void **host, size_t bytes, unsigned flags)
{
    BEGIN(OUT_OF_MEMORY);
    expect(is_current, __func__, "no context is current");
    expect(flags == 2, __func__, "not mapped for the device");
    *host = block_new(bytes, 1);
    return 0;
}

int cuMemHostGetDevicePointer_v2(uint64_t *address, void *host, unsigned flags)
{
    BEGIN(OUT_OF_MEMORY);
    expect(flags == 0 && block_of(host) && block_of(host)->is_pinned, __func__, "not pinned memory");
    *address = (uintptr_t)host + GPU_OFFSET;
    return 0;
}

int cuMemFreeHost(void *host)
{
    BEGIN(OUT_OF_MEMORY);
    return block_free(host, 1, __func__);
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes)
{
    BEGIN(OUT_OF_MEMORY);
    expect(is_current && bytes > 0, __func__, "no context is current, or no bytes");
    *address = (uintptr_t)block_new(bytes, 0) + GPU_OFFSET;
    return 0;
}

int cuMemFree_v2(uint64_t address)
{
    BEGIN(OUT_OF_MEMORY);
    return block_free((char *)(uintptr_t)(address - GPU_OFFSET), 0, __func__);
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
    void *data = span(to, bytes);
    BEGIN(OUT_OF_MEMORY);
    is_idle = 1;
    if (data)
        memcpy(data, from, bytes);
    return data ? 0 : INVALID;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    void *data = span(from, bytes);
    BEGIN(OUT_OF_MEMORY);
    if (data)
        memcpy(to, data, bytes);
    return data ? 0 : INVALID;
}

int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,
                   void **extra)
{
    double ns = 0;
    int code;
    BEGIN(OUT_OF_MEMORY);
    expect(is_current, __func__, "no context is current");
    expect(grid_x > 0 && grid_y == 1 && grid_z == 1, __func__, "grid");
    expect(block_x > 0 && block_x <= 1024 && block_y == 1 && block_z == 1, __func__, "block");
    expect(shared_bytes == 0 && !stream && !extra, __func__, "shared memory, stream or extra");
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        if (function == (void *)&kernels[i]) {
            code = kernels[i].run(grid_x * block_x, arguments, &ns);
            now_ns += LAUNCH_NS + ns + (is_idle ? IDLE_NS : 0);
            is_idle = 0;
            return code;
        }
    complain("%s: no function", __func__);
    return INVALID;
}

int cuEventCreate(void **event, unsigned flags)
{
    BEGIN(OUT_OF_MEMORY);
    expect(flags == 0, __func__, "flags");
    events++;
    *event = calloc(1, sizeof(double));
    return 0;
}

int cuEventRecord(void *event, void *stream)
{
    BEGIN(OUT_OF_MEMORY);
    expect(event && !stream, __func__, "event or stream");
    *(double *)event = now_ns;
    return 0;
}

int cuEventSynchronize(void *event)
{
    BEGIN(OUT_OF_MEMORY);
    expect(event != NULL, __func__, "event");
    return 0;
}

int cuEventElapsedTime(float *ms, void *start, void *end)
{
    BEGIN(OUT_OF_MEMORY);
    *ms = (float)((*(double *)end - *(double *)start) / 1e6);
    return 0;
}

int cuEventDestroy_v2(void *event)
{
    BEGIN(OUT_OF_MEMORY);
    free(event);
    events--;
    return 0;
}

int cuGetErrorName(int code, const char **name)
{
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : NULL;
    return *name ? 0 : INVALID;
}

__attribute__((destructor)) static void at_end(void)
{
    for (int i = 0; i < BLOCKS_MAX; i++)
        expect(!blocks[i].base, __func__, blocks[i].is_pinned ? "pinned memory left" : "memory of the GPU left");
    expect(events == 0, __func__, "events left");
    expect(is_retained == 0, __func__, "context left");
}
