// lab.h: what the kernel labs share: numbers to compute with, comparing with the CPU, timing against the machine's limits.
//
// A lab is one file for one kernel, in versions from naive to the one that train_gpt2.cu uses, which it includes, so that
// the two can't drift apart. It first validates each version against the function of train_gpt2.c, over several shapes and
// block sizes, and fails (status 1) on the first difference; then, on a GPU only, it times them.
//
// With a GPU:  nvcc -std=c++20 -O3 -arch=native -Xcompiler -fopenmp dev/cuda/NAME.cu -o NAME -lcublasLt -lnccl -lcjson -lpcre2-8 -lz
//              ./NAME
// Without:     make build/lab/NAME && build/lab/NAME        (dev/emu: validates, doesn't time);  all labs: make labs
// Included after train_gpt2.cu.
#pragma once
#include <algorithm>
#include <functional>

namespace lab {

using gpu::bf16;
using gpu::to_float;
using gpu::from_float;

// ----------------------------------------------------------------------------------------------------
// Memory on the device, freed at the end of the block

template <typename F> struct Array {
    F *data = nullptr;
    int64_t n;
    explicit Array(int64_t n_) : n(n_) { CUDA_CHECK(cudaMalloc((void **)&data, (size_t)n * sizeof(F))); }
    explicit Array(const std::vector<F> &from) : Array((int64_t)from.size()) { set(from); }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;
    Array(Array &&other) : data(other.data), n(other.n) { other.data = nullptr; }
    ~Array() { CUDA_CHECK(cudaFree(data)); }
    operator F *() const { return data; }
    void set(const std::vector<F> &from) { CUDA_CHECK(cudaMemcpy(data, from.data(), (size_t)n * sizeof(F), cudaMemcpyHostToDevice)); }
    std::vector<F> get() const {
        std::vector<F> to((size_t)n);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(to.data(), data, (size_t)n * sizeof(F), cudaMemcpyDeviceToHost));
        return to;
    }
};

// ----------------------------------------------------------------------------------------------------
// Random numbers: about normal, the same in every run. `rounded` are numbers that bf16 can hold, so that GPU and CPU
// compute with the same ones.

inline std::vector<float> random(int64_t n, uint64_t seed, float scale = 1) {
    std::vector<float> x((size_t)n);
    uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
    for (float &v : x) {
        float sum = 0;
        for (int i = 0; i < 4; i++) {
            state = state * 6364136223846793005ull + 1442695040888963407ull;
            sum += (float)(state >> 40) / (1 << 24) - 0.5f;
        }
        v = sum * 1.7320508f * scale; // the sum of four has variance 1/3
    }
    return x;
}
template <typename F> std::vector<F> convert(const std::vector<float> &x) {
    std::vector<F> y(x.size());
    for (size_t i = 0; i < x.size(); i++) { y[i] = from_float<F>(x[i]); }
    return y;
}
template <typename F> std::vector<float> floats(const std::vector<F> &x) {
    std::vector<float> y(x.size());
    for (size_t i = 0; i < x.size(); i++) { y[i] = to_float(x[i]); }
    return y;
}
template <typename F> std::vector<float> rounded(std::vector<float> x) {
    for (float &v : x) { v = to_float(from_float<F>(v)); }
    return x;
}

// n numbers on the device, to time with: the same million again and again, since making them takes the host longer than the kernels
template <typename F> Array<F> noise(int64_t n, uint64_t seed, float scale = 1) {
    const int64_t million = 1 << 20;
    const std::vector<F> x = convert<F>(random(std::min(n, million), seed, scale));
    Array<F> array(n);
    for (int64_t at = 0; at < n; at += million) {
        CUDA_CHECK(cudaMemcpy(array.data + at, x.data(), (size_t)std::min(million, n - at) * sizeof(F), cudaMemcpyHostToDevice));
    }
    return array;
}

// ----------------------------------------------------------------------------------------------------
// Validation: the norm of the difference over the norm of what is expected

inline double worst_error; // since the last `checked`
template <typename F> void validate(const char *what, const F *found, const float *expected, int64_t n, double tolerance) {
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = (double)to_float(found[i]) - expected[i];
        difference += d * d;
        norm += (double)expected[i] * expected[i];
    }
    const double error = norm > 0 ? sqrt(difference / norm) : sqrt(difference);
    if (!(error <= tolerance)) {
        for (int64_t i = 0, shown = 0; i < n && shown < 5; i++) {
            const double d = fabs((double)to_float(found[i]) - expected[i]);
            if (!(d <= 4 * tolerance * sqrt(norm / (double)n))) {
                fprintf(stderr, "  at %lld: found %g, expected %g\n", (long long)i, to_float(found[i]), expected[i]);
                shown++;
            }
        }
        fprintf(stderr, "%s: relative error %.3g, at most %.3g is allowed\n", what, error, tolerance);
        exit(1);
    }
    worst_error = std::max(worst_error, error);
}
inline void validate(const char *what, const std::vector<float> &found, const std::vector<float> &expected, double tolerance) {
    if (found.size() != expected.size()) { FAIL("%s: %zu numbers, expected %zu", what, found.size(), expected.size()); }
    validate(what, found.data(), expected.data(), (int64_t)found.size(), tolerance);
}
template <typename F> void validate(const char *what, const Array<F> &found, const std::vector<float> &expected, double tolerance) {
    validate(what, floats(found.get()), expected, tolerance);
}
inline void checked(const char *name, int version, int cases) {
    printf("%-28s version %d: agrees with the CPU in %3d cases, worst relative error %.2e\n", name, version, cases, worst_error);
    fflush(stdout);
    worst_error = 0;
}

// ----------------------------------------------------------------------------------------------------
// The machine's limits: dense bf16 TFLOP/s of the tensor cores by the data sheet, or else from clock and number of
// multiprocessors; fp32 likewise; GB/s from the memory's clock and width.

struct Limits { double tensor_tflops, fp32_tflops, gbs; };
inline int attribute(cudaDeviceAttr which) {
    int value, device;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
    return value;
}
inline Limits limits() {
    static const struct { const char *name; Limits limits; } known[] = {
        {"H200", {989, 67, 4800}}, {"GH200", {989, 67, 4000}}, {"H100 PCIe", {756, 51, 2000}}, {"H100", {989, 67, 3350}},
        {"A100-SXM4-80GB", {312, 19.5, 2039}}, {"A100-SXM4-40GB", {312, 19.5, 1555}}, {"A100", {312, 19.5, 1935}},
        {"L40S", {362, 91.6, 864}}, {"RTX 4090", {165, 82.6, 1008}}, {"RTX 3090", {71, 35.6, 936}},
    };
    cudaDeviceProp p;
    int device;
    CUDA_CHECK(cudaGetDevice(&device));
    CUDA_CHECK(cudaGetDeviceProperties(&p, device));
    for (const auto &k : known) { if (strstr(p.name, k.name)) { return k.limits; } }
    const double clock = attribute(cudaDevAttrClockRate) * 1e3 * p.multiProcessorCount / 1e12; // kHz; FLOP a clock and multiprocessor:
    const double tensor = p.major >= 10 ? 8192 : p.major == 9 ? 4096 : p.minor == 0 ? 2048 : 512, fp32 = p.major == 8 && p.minor == 0 ? 128 : 256;
    return {clock * tensor, clock * fp32, 2e3 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8 / 1e9};
}

// ----------------------------------------------------------------------------------------------------
// Timing: the median of several runs, each after the L2 cache was filled with something else. `flops` and `bytes` are what the
// task needs at least, not what a version does; the share is that of the nearer limit. Emulated kernels aren't timed.

inline bool timing() {
#ifdef CUDA_EMU
    return false;
#else
    return true;
#endif
}
inline void time_kernel(const char *name, int version, double flops, double bytes, bool tensor_cores, const std::function<void()> &kernel) {
    if (!timing()) { return; }
    Array<unsigned char> junk(2 * (int64_t)attribute(cudaDevAttrL2CacheSize));
    cudaEvent_t begin, end;
    CUDA_CHECK(cudaEventCreate(&begin));
    CUDA_CHECK(cudaEventCreate(&end));
    std::vector<float> ms;
    float spent = 0;
    for (int i = 0; i < 22 && (ms.empty() || spent < 300); i++) {    // the first two only warm up, unless one is enough
        CUDA_CHECK(cudaMemsetAsync(junk.data, i, (size_t)junk.n, 0));
        CUDA_CHECK(cudaEventRecord(begin, 0));
        kernel();
        CUDA_CHECK(cudaEventRecord(end, 0));
        CUDA_CHECK(cudaEventSynchronize(end));
        float t = 0;
        CUDA_CHECK(cudaEventElapsedTime(&t, begin, end));
        spent += t;
        if (i >= 2 || t > 300) { ms.push_back(t); }
    }
    CUDA_CHECK(cudaEventDestroy(begin));
    CUDA_CHECK(cudaEventDestroy(end));
    std::sort(ms.begin(), ms.end());
    const Limits most = limits();
    const double s = ms[ms.size() / 2] * 1e-3, tflops = flops / s / 1e12, gbs = bytes / s / 1e9;
    const double by_compute = tflops / (tensor_cores ? most.tensor_tflops : most.fp32_tflops), by_memory = gbs / most.gbs;
    printf("%-28s version %d: %9.4f ms %8.1f TFLOP/s %8.0f GB/s  %3.0f%% of the machine's %s\n", name, version, s * 1e3, tflops, gbs,
           100 * std::max(by_compute, by_memory), by_compute > by_memory ? tensor_cores ? "tensor cores" : "fp32 rate" : "memory bandwidth");
    fflush(stdout);
}

// A Gpu to hand to the functions of train_gpt2.cu; a lab runs everything in the default stream.
inline gpu::Gpu *device() {
    static gpu::Gpu *g = nullptr;
    if (g) { return g; }
    g = new gpu::Gpu();
    gpu::gpu_open(g, 0, 0, 1);
    CUDA_CHECK(cudaStreamDestroy(g->stream));
    g->stream = 0;
    return g;
}
inline void finish() {
    if (!timing()) { printf("not timed: these kernels ran in the emulation, whose speed says nothing\n"); }
    CUDA_CHECK(cudaDeviceSynchronize());
}

} // namespace lab
