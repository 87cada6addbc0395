// cuda_runtime.h of the emulation: the part of the CUDA runtime API and of the device functions that this project uses,
// for g++ or clang++ on a CPU. README.md says what it shows and what it can't.
#pragma once
#ifndef CUDA_EMU
#error "this is the emulation's header: compile with -DCUDA_EMU, or put the CUDA toolkit's include directory first"
#endif
#include <algorithm>
#include <atomic>
#include <math.h>
#include <cstddef>
#include <cstdint>
#include <ctime>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define CUDART_VERSION 13000
#define CUDART_INF_F __builtin_inff()

// Vector types, aligned as CUDA's
#define EMU_VECTORS(type, name, a2, a4) \
    struct alignas(a2) name##2 { type x, y; }; \
    struct name##3 { type x, y, z; }; \
    struct alignas(a4) name##4 { type x, y, z, w; }; \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; } \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
EMU_VECTORS(float, float, 8, 16)
EMU_VECTORS(int, int, 8, 16)
EMU_VECTORS(unsigned, uint, 8, 16)
EMU_VECTORS(short, short, 4, 8)
EMU_VECTORS(unsigned short, ushort, 4, 8)
EMU_VECTORS(signed char, char, 2, 4)
EMU_VECTORS(unsigned char, uchar, 2, 4)
EMU_VECTORS(double, double, 16, 16)
#undef EMU_VECTORS
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) { }
};

// Errors: the numbers and names of the real ones
#define EMU_ERRORS(X) \
    X(cudaSuccess, 0, "no error") X(cudaErrorInvalidValue, 1, "invalid argument") X(cudaErrorMemoryAllocation, 2, "out of memory") \
    X(cudaErrorInvalidConfiguration, 9, "invalid configuration argument") X(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy") \
    X(cudaErrorNoDevice, 100, "no CUDA-capable device is detected") X(cudaErrorInvalidDevice, 101, "invalid device ordinal") \
    X(cudaErrorInvalidResourceHandle, 400, "invalid resource handle") X(cudaErrorNotReady, 600, "device not ready") \
    X(cudaErrorNotSupported, 801, "operation not supported") X(cudaErrorPeerAccessAlreadyEnabled, 704, "peer access is already enabled") \
    X(cudaErrorUnknown, 999, "unknown error")
enum cudaError_t {
#define X(name, number, text) name = number,
    EMU_ERRORS(X)
#undef X
};
typedef cudaError_t cudaError;
inline const char *cudaGetErrorName(cudaError_t error) {
    switch (error) {
#define X(name, number, text) case name: return #name;
        EMU_ERRORS(X)
#undef X
    }
    return "unrecognized error code";
}
inline const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
#define X(name, number, text) case name: return text;
        EMU_ERRORS(X)
#undef X
    }
    return "unrecognized error code";
}

// Streams run what they are given at once, so that a stream is only the device it belongs to, and an event a time.
struct CUstream_st { int device; };
struct CUevent_st { int device; bool recorded; double ms; };
typedef CUstream_st *cudaStream_t;
typedef CUevent_st *cudaEvent_t;
namespace emu {
inline int stream_device(cudaStream_t stream) { return stream && (uintptr_t)stream > 2 ? stream->device : -1; }
}
#define cudaStreamLegacy ((cudaStream_t)1)
#define cudaStreamPerThread ((cudaStream_t)2)

#include "emu_engine.h"

namespace emu {
inline constinit thread_local cudaError_t last_error = cudaSuccess;
inline void say_why(const char *call, const char *format, va_list args) {
    char what[1000];
    vsnprintf(what, sizeof what, format, args);
    fprintf(stderr, "emu: %s: %s\n", call, what);
}
// A call that the real API refuses: says why, and returns the real error.
[[gnu::format(printf, 3, 4)]] inline cudaError_t refuse(cudaError_t error, const char *call, const char *format, ...) {
    va_list args;
    va_start(args, format);
    say_why(call, format, args);
    va_end(args);
    return last_error = error;
}
inline int device_count() {
    static const int count = (int)std::clamp<int64_t>(setting("CUDA_EMU_DEVICES", 1), 0, 64);
    return count;
}
inline size_t device_bytes() {
    static const size_t bytes = (size_t)setting("CUDA_EMU_MEMORY", (int64_t)16 << 30);
    return bytes;
}
} // namespace emu

inline cudaError_t cudaGetLastError() {
    cudaError_t error = emu::last_error;
    emu::last_error = cudaSuccess;
    return error;
}
inline cudaError_t cudaPeekAtLastError() { return emu::last_error; }

// ----------------------------------------------------------------------------------------------------
// Devices

inline cudaError_t cudaGetDeviceCount(int *count) {
    *count = emu::device_count();
    return *count ? cudaSuccess : emu::last_error = cudaErrorNoDevice;
}
inline cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= emu::device_count()) {
        return emu::refuse(cudaErrorInvalidDevice, "cudaSetDevice", "device %d, there are %d (CUDA_EMU_DEVICES)", device, emu::device_count());
    }
    emu::device = device;
    return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int *device) { *device = emu::device; return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
inline cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    std::lock_guard<std::mutex> guard(emu::heap().lock);
    *total = emu::device_bytes();
    *free_bytes = *total - emu::heap().used[emu::device];
    return cudaSuccess;
}
// A device of compute capability 9.0 with few multiprocessors, so that grids sized by them stay small.
struct cudaDeviceProp {
    char name[256];
    size_t totalGlobalMem, sharedMemPerBlock, sharedMemPerMultiprocessor, sharedMemPerBlockOptin, reservedSharedMemPerBlock;
    int regsPerBlock, regsPerMultiprocessor, warpSize, maxThreadsPerBlock, maxThreadsPerMultiProcessor, maxBlocksPerMultiProcessor;
    int maxThreadsDim[3], maxGridSize[3], major, minor, multiProcessorCount, l2CacheSize, memoryBusWidth, concurrentKernels, asyncEngineCount;
    int pciBusID, pciDeviceID, pciDomainID, ECCEnabled, integrated, canMapHostMemory, unifiedAddressing, managedMemory;
};
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device) {
    if (device < 0 || device >= emu::device_count()) { return emu::refuse(cudaErrorInvalidDevice, "cudaGetDeviceProperties", "device %d", device); }
    *p = {"emulated GPU", emu::device_bytes(), emu::SHARED_DEFAULT, emu::SHARED_MOST + 1024, emu::SHARED_MOST, 1024, 65536, 65536, 32, 1024, 2048, 32,
          {1024, 1024, 64}, {0x7fffffff, 65535, 65535}, 9, 0, 4, 50 << 20, 5120, 1, 1, device, 0, 0, 1, 0, 1, 1, 1};
    return cudaSuccess;
}
enum cudaDeviceAttr {
    cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlock = 8, cudaDevAttrWarpSize = 10, cudaDevAttrClockRate = 13,
    cudaDevAttrMultiProcessorCount = 16, cudaDevAttrMemoryClockRate = 36, cudaDevAttrGlobalMemoryBusWidth = 37, cudaDevAttrL2CacheSize = 38,
    cudaDevAttrMaxThreadsPerMultiProcessor = 39, cudaDevAttrComputeCapabilityMajor = 75, cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81, cudaDevAttrMaxRegistersPerMultiprocessor = 82, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device) != cudaSuccess) { return cudaErrorInvalidDevice; }
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)p.sharedMemPerBlock; return cudaSuccess;
    case cudaDevAttrWarpSize: *value = p.warpSize; return cudaSuccess;
    case cudaDevAttrClockRate: *value = 1000000; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; return cudaSuccess;
    case cudaDevAttrMemoryClockRate: *value = 1000000; return cudaSuccess;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; return cudaSuccess;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; return cudaSuccess;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = (int)p.sharedMemPerMultiprocessor; return cudaSuccess;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerMultiprocessor; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)p.sharedMemPerBlockOptin; return cudaSuccess;
    }
    return emu::refuse(cudaErrorInvalidValue, "cudaDeviceGetAttribute", "attribute %d isn't emulated", (int)attribute);
}
inline cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
inline cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

// ----------------------------------------------------------------------------------------------------
// Memory

inline cudaError_t cudaMalloc(void **p, size_t bytes, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    *p = nullptr;
    if (bytes == 0) { return cudaSuccess; }
    size_t free_bytes, total;
    cudaMemGetInfo(&free_bytes, &total);
    *p = bytes <= free_bytes ? emu::allocate(bytes, emu::device, file, line) : nullptr;
    return *p ? cudaSuccess : emu::last_error = cudaErrorMemoryAllocation;
}
template <typename T> cudaError_t cudaMalloc(T **p, size_t bytes, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return cudaMalloc((void **)(void *)p, bytes, file, line);
}
inline cudaError_t cudaFree(void *p) {
    if (!p || emu::release(p, true)) { return cudaSuccess; }
    return emu::refuse(cudaErrorInvalidValue, "cudaFree", "%p isn't the start of an allocation (freed twice?)", p);
}
template <typename T>
cudaError_t cudaMallocHost(T **p, size_t bytes, unsigned = 0, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    *p = bytes ? (T *)emu::allocate(bytes, -1, file, line) : nullptr;
    return *p || !bytes ? cudaSuccess : emu::last_error = cudaErrorMemoryAllocation;
}
inline cudaError_t cudaFreeHost(void *p) {
    if (!p || emu::release(p, false)) { return cudaSuccess; }
    return emu::refuse(cudaErrorInvalidValue, "cudaFreeHost", "%p isn't the start of an allocation (freed twice?)", p);
}
enum cudaMemcpyKind { cudaMemcpyHostToHost, cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
namespace emu {
inline bool on_device(const void *p) {
    Allocation *a = find(p);
    return a && a->device >= 0;
}
inline cudaError_t memory_copy(const char *call, void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    if (bytes == 0) { return cudaSuccess; }
    if ((unsigned)kind > cudaMemcpyDefault) { return refuse(cudaErrorInvalidMemcpyDirection, call, "kind %d", (int)kind); }
    if (stream_device(stream) >= 0 && stream_device(stream) != device) {
        return refuse(cudaErrorInvalidResourceHandle, call, "the stream belongs to device %d, the current device is %d", stream_device(stream), device);
    }
    auto check = [&](const char *name, const void *p, bool expected) {
        if (kind != cudaMemcpyDefault && on_device(p) != expected) {
            return refuse(cudaErrorInvalidValue, call, "%s %p is %s memory, its kind says otherwise", name, p, expected ? "no device" : "device");
        }
        const char *wrong = on_device(p) ? outside(p, bytes) : nullptr;
        return wrong ? refuse(cudaErrorInvalidValue, call, "%zu bytes: %s %p %s", bytes, name, p, wrong) : cudaSuccess;
    };
    cudaError_t error = check("destination", to, kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice);
    if (error == cudaSuccess) { error = check("source", from, kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice); }
    if (error != cudaSuccess) { return error; }
    Now outer = now;
    now = {call, "", 0, false, nullptr, nullptr};
    copy(to, from, bytes);
    now = outer;
    return cudaSuccess;
}
inline cudaError_t memory_set(const char *call, void *to, int value, size_t bytes) {
    const char *wrong = outside(to, bytes);
    if (bytes && wrong) { return refuse(cudaErrorInvalidValue, call, "%zu bytes: %p %s", bytes, to, wrong); }
    if (bytes) { fill(to, value, bytes); }
    return cudaSuccess;
}
} // namespace emu
inline cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return emu::memory_copy("cudaMemcpy", to, from, bytes, kind, nullptr);
}
inline cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream = nullptr) {
    return emu::memory_copy("cudaMemcpyAsync", to, from, bytes, kind, stream);
}
inline cudaError_t cudaMemset(void *to, int value, size_t bytes) { return emu::memory_set("cudaMemset", to, value, bytes); }
inline cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t = nullptr) { return emu::memory_set("cudaMemsetAsync", to, value, bytes); }

// ----------------------------------------------------------------------------------------------------
// Streams and events

#define cudaStreamDefault 0
#define cudaStreamNonBlocking 1
#define cudaEventDefault 0
#define cudaEventBlockingSync 1
#define cudaEventDisableTiming 2
inline cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = new CUstream_st{emu::device}; return cudaSuccess; }
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned) { return cudaStreamCreate(s); }
inline cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned, int) { return cudaStreamCreate(s); }
inline cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
inline cudaError_t cudaStreamDestroy(cudaStream_t s) { delete s; return cudaSuccess; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreate(cudaEvent_t *e) { *e = new CUevent_st{emu::device, false, 0}; return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned) { return cudaEventCreate(e); }
inline cudaError_t cudaEventDestroy(cudaEvent_t e) { delete e; return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t stream = nullptr) {
    if (!e || (emu::stream_device(stream) >= 0 && emu::stream_device(stream) != e->device)) {
        return emu::refuse(cudaErrorInvalidResourceHandle, "cudaEventRecord", "the event and the stream belong to different devices");
    }
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    e->ms = t.tv_sec * 1e3 + t.tv_nsec * 1e-6;
    e->recorded = true;
    return cudaSuccess;
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned = 0) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    if (!from->recorded || !to->recorded) { return emu::refuse(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime", "an event was never recorded"); }
    *ms = (float)(to->ms - from->ms);
    return cudaSuccess;
}

// ----------------------------------------------------------------------------------------------------
// Kernels

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8, cudaFuncAttributePreferredSharedMemoryCarveout = 9 };
template <typename F> cudaError_t cudaFuncSetAttribute(F *kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) { return cudaSuccess; }
    if (value < 0 || (size_t)value > emu::SHARED_MOST) {
        return emu::refuse(cudaErrorInvalidValue, "cudaFuncSetAttribute", "%d bytes of dynamic shared memory, at most %zu are allowed", value, emu::SHARED_MOST);
    }
    std::lock_guard<std::mutex> guard(emu::shared_limits_lock);
    emu::shared_limits[{emu::device, (const void *)kernel}] = value;
    return cudaSuccess;
}
struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, maxDynamicSharedSizeBytes;
};
template <typename F> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *a, F *kernel) {
    std::lock_guard<std::mutex> guard(emu::shared_limits_lock);
    auto at = emu::shared_limits.find({emu::device, (const void *)kernel});
    *a = {0, 0, 0, 1024, 32, 90, 90, at == emu::shared_limits.end() ? (int)emu::SHARED_DEFAULT : at->second};
    return cudaSuccess;
}
template <typename F> cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, F *, int threads, size_t shared) {
    if (threads < 1 || threads > 1024) { return emu::refuse(cudaErrorInvalidValue, "cudaOccupancyMaxActiveBlocksPerMultiprocessor", "%d threads", threads); }
    *blocks = (int)std::min<size_t>({size_t(2048 / threads), 32, (emu::SHARED_MOST + 1024) / (shared + 1024)});
    return cudaSuccess;
}

// ----------------------------------------------------------------------------------------------------
// Device functions

inline void __syncthreads(int line = __builtin_LINE()) { emu::barrier("__syncthreads", 0, line); }
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) { return emu::barrier("__syncthreads_count", predicate, line); }
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) { return emu::barrier("__syncthreads_or", predicate, line) > 0; }
inline int __syncthreads_and(int predicate, int line = __builtin_LINE()) { return emu::barrier("__syncthreads_and", predicate, line) == emu::engine->count; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emu::meet("__syncwarp", mask, nullptr, [](void **, unsigned) { }); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    struct Vote { int predicate; unsigned ballot; } mine = {predicate, 0};
    emu::meet("a warp vote", mask, &mine, [](void **lanes, unsigned set) {
        unsigned ballot = 0;
        for (int i = 0; i < 32; i++) { ballot |= (unsigned)((set >> i & 1) && ((Vote *)lanes[i])->predicate) << i; }
        for (int i = 0; i < 32; i++) { if (set >> i & 1) { ((Vote *)lanes[i])->ballot = ballot; } }
    });
    return mine.ballot;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
inline unsigned __activemask() { // the lanes that haven't ended: here they all count as active
    unsigned set = 0;
    emu::Thread *lanes = emu::self - emu::self->lane;
    for (int i = 0; i < 32; i++) { set |= (unsigned)((emu::self->warp->lanes >> i & 1) && !lanes[i].ended) << i; }
    return set;
}

namespace emu {
// Each lane brings a value and the number of the lane whose value it wants.
template <typename T> T shuffle(const char *what, unsigned mask, T value, int source) {
    struct Lane { T value, result; int source; } mine = {value, value, source};
    meet(what, mask, &mine, [](void **lanes, unsigned set) {
        for (unsigned left = set; left; left &= left - 1) {
            Lane *lane = (Lane *)lanes[__builtin_ctz(left)];
            if (!(set >> lane->source & 1)) { fail("lane %d shuffles from lane %d, which isn't in mask 0x%08x", __builtin_ctz(left), lane->source, set); }
            lane->result = ((Lane *)lanes[lane->source])->value;
        }
    });
    return mine.result;
}
}
// width: the warp is cut into segments of this many lanes; outside of its segment a lane gets its own value
template <typename T> T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return emu::shuffle("__shfl_sync", mask, value, (emu::self->lane & -width) | (source & (width - 1)));
}
template <typename T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emu::self->lane, source = lane - (int)delta;
    return emu::shuffle("__shfl_up_sync", mask, value, source < (lane & -width) ? lane : source);
}
template <typename T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = emu::self->lane, source = lane + (int)delta;
    return emu::shuffle("__shfl_down_sync", mask, value, source > (lane | (width - 1)) ? lane : source);
}
template <typename T> T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    int lane = emu::self->lane, source = lane ^ bits;
    return emu::shuffle("__shfl_xor_sync", mask, value, source > (lane | (width - 1)) ? lane : source);
}

// Atomics: only one thread of a device runs at a time, so plain code is atomic.
#define EMU_ATOMIC(name, update) \
    template <typename T> T name(T *p, std::type_identity_t<T> v) { T old = *p; *p = (update); return old; }
EMU_ATOMIC(atomicAdd, (T)(old + v))
EMU_ATOMIC(atomicSub, (T)(old - v))
EMU_ATOMIC(atomicMax, old < v ? v : old)
EMU_ATOMIC(atomicMin, v < old ? v : old)
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicOr, (T)(old | v))
EMU_ATOMIC(atomicAnd, (T)(old & v))
EMU_ATOMIC(atomicXor, (T)(old ^ v))
inline unsigned atomicInc(unsigned *p, unsigned most) { unsigned old = *p; *p = old >= most ? 0 : old + 1; return old; }
template <typename T> T atomicCAS(T *p, std::type_identity_t<T> expected, std::type_identity_t<T> v) { T old = *p; if (old == expected) { *p = v; } return old; }
inline void __threadfence() { }
inline void __threadfence_block() { }
inline void __threadfence_system() { }
[[noreturn]] inline void __trap() { emu::fail("__trap"); }

template <typename T> T __ldg(const T *p) { return *p; }
template <typename T> T __ldcs(const T *p) { return *p; }
template <typename T> T __ldcg(const T *p) { return *p; }
template <typename T> void __stcs(T *p, std::type_identity_t<T> v) { *p = v; }
template <typename T> void __stcg(T *p, std::type_identity_t<T> v) { *p = v; }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline void __sincosf(float x, float *s, float *c) { *s = sinf(x); *c = cosf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((uint64_t)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) { return (unsigned long long)((unsigned __int128)x * y >> 64); }
inline int __mul24(int x, int y) { return x * y; }
template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) {
    typedef std::common_type_t<A, B> C;
    return (C)b < (C)a ? (C)b : (C)a;
}
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) {
    typedef std::common_type_t<A, B> C;
    return (C)a < (C)b ? (C)b : (C)a;
}
inline size_t __cvta_generic_to_shared(const void *p) { return (size_t)p; }

#include "emu_mma.h"
