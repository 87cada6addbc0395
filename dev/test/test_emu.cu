// test_emu.cu: does the emulation of dev/emu do what CUDA promises, and does its checker catch what it should?
// Itself a .cu that goes through the transform: make test-emu.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
#include <nccl.h>
#include <criterion/criterion.h>
#include <cstdio>
#include <vector>

TestSuite(emu, .timeout = 60);

#define CHECK(x) do { cudaError_t e_ = (x); cr_assert(e_ == cudaSuccess, "%s: %s", #x, cudaGetErrorString(e_)); } while (0)

template <typename T> struct Device { // device memory of a test
    T *p = nullptr;
    size_t n;
    Device(size_t n_) : n(n_) { CHECK(cudaMalloc(&p, n * sizeof(T))); }
    Device(const std::vector<T> &v) : Device(v.size()) { CHECK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice)); }
    ~Device() { cudaFree(p); }
    operator T *() { return p; }
    std::vector<T> get() {
        std::vector<T> v(n);
        CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

__global__ void add_kernel(float *out, const float *a, const float *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = a[i] + b[i]; }
}
Test(emu, grid_of_threads) {
    int n = 1000;
    std::vector<float> a(n), b(n);
    for (int i = 0; i < n; i++) { a[i] = i; b[i] = 2 * i; }
    Device<float> da(a), db(b), out(n);
    add_kernel<<<(n + 255) / 256, 256>>>(out, da, db, n);
    CHECK(cudaGetLastError());
    std::vector<float> c = out.get();
    for (int i = 0; i < n; i++) { cr_assert(c[i] == 3 * i); }
}

template <typename T, int BLOCK> __global__ void sum_kernel(T *out, const T *in, int n) {
    __shared__ T partial[BLOCK / 32], total;
    T sum = 0;
    for (int i = threadIdx.x; i < n; i += BLOCK) { sum += in[blockIdx.x * n + i]; }
    for (int offset = 16; offset > 0; offset >>= 1) { sum += __shfl_xor_sync(0xffffffff, sum, offset); }
    if (threadIdx.x % 32 == 0) { partial[threadIdx.x / 32] = sum; }
    __syncthreads();
    if (threadIdx.x == 0) {
        T s = 0;
        for (int w = 0; w < BLOCK / 32; w++) { s += partial[w]; }
        total = s;
    }
    __syncthreads();
    if (threadIdx.x == BLOCK - 1) { out[blockIdx.x] = total; }
}
template <typename T> static void sum_rows() {
    int rows = 7, n = 300;
    std::vector<T> in(rows * n);
    for (int i = 0; i < rows * n; i++) { in[i] = (T)(i % 17); }
    Device<T> din(in), out(rows);
    sum_kernel<T, 128><<<
        rows,   // a launch over several lines, with a template of two arguments
        128>>>(out,
               din, n);
    CHECK(cudaGetLastError());
    std::vector<T> sums = out.get();
    for (int r = 0; r < rows; r++) {
        T s = 0;
        for (int i = 0; i < n; i++) { s += in[r * n + i]; }
        cr_assert(sums[r] == s);
    }
}
Test(emu, templates_static_shared_memory_and_shuffles) {
    sum_rows<float>();
    sum_rows<double>();
    sum_rows<int>();
}
