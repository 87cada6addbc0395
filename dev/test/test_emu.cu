// test_emu.cu: does the emulation of dev/emu do what CUDA promises, and does its checker catch what it should?
// Itself a .cu that goes through the transform: make test-emu.
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
#include <nccl.h>
#include <criterion/criterion.h>
#include <cstdio>
#include <functional>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <vector>
#include "test_emu.cuh"

TestSuite(emu, .timeout = 60);
TestSuite(emu_catches, .timeout = 60);

#define CHECK(x) do { cudaError_t e_ = (x); cr_assert(e_ == cudaSuccess, "%s: %s", #x, cudaGetErrorString(e_)); } while (0)

template <typename T> struct Device { // device memory of a test
    T *p = nullptr;
    size_t n;
    Device(size_t n_) : n(n_) { CHECK(cudaMalloc(&p, n * sizeof(T))); }
    Device(const Device &) = delete;
    Device(const std::vector<T> &v) : Device(v.size()) { CHECK(cudaMemcpy(p, v.data(), n * sizeof(T), cudaMemcpyHostToDevice)); }
    ~Device() { cudaFree(p); }
    operator T *() { return p; }
    std::vector<T> get() {
        std::vector<T> v(n);
        CHECK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

// Runs what must go wrong in a child and returns what it wrote to stderr; *ended is its exit status, or -1 for a signal.
static std::string planted(const std::function<void()> &body, int *ended = nullptr) {
    int ends[2];
    cr_assert(pipe(ends) == 0);
    fflush(nullptr);
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        body();
        _exit(0);
    }
    close(ends[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) { text.append(buffer, (size_t)n); }
    close(ends[0]);
    int status;
    cr_assert(waitpid(child, &status, 0) == child);
    if (ended) { *ended = WIFEXITED(status) ? WEXITSTATUS(status) : -1; }
    return text;
}
// The child must stop with a line that holds all of the parts.
struct Planted {
    std::function<void()> body;
    int line;
    template <typename F> Planted(F f, int line_ = __builtin_LINE()) : body(f), line(line_) { }
};
template <typename... Parts> static void catches(Planted plant, Parts... parts) {
    int ended;
    std::string text = planted(plant.body, &ended);
    cr_assert(ended != 0, "line %d: nothing was caught; stderr: %s", plant.line, text.c_str());
    for (const char *part : {parts...}) { cr_assert(strstr(text.c_str(), part), "line %d: expected '%s' in: %s", plant.line, part, text.c_str()); }
}
static void check_mode() { emu::heap().check = true; }

// ----------------------------------------------------------------------------------------------------
// Grid, block, transform

__global__ void index_kernel(int *counts, int *last) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    counts[block * (blockDim.x * blockDim.y * blockDim.z) + thread]++;
    if (thread == 0) { last[block] = warpSize; }
}
Test(emu, every_thread_of_every_block_runs_once) {
    dim3 grid(2, 3, 4), block(5, 7, 3);
    Device<int> counts(24 * 105), last(24);
    CHECK(cudaMemset(counts, 0, 24 * 105 * sizeof(int)));
    index_kernel<<<grid, block>>>(counts, last);
    CHECK(cudaGetLastError());
    for (int c : counts.get()) { cr_assert(c == 1); }
    for (int w : last.get()) { cr_assert(w == 32); }
}

__global__ void add_kernel(float *out, const float *a, const float *b, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { out[i] = a[i] + b[i]; }
}
Test(emu, threads_that_return_early) {
    int n = 1000;
    std::vector<float> a(n), b(n);
    for (int i = 0; i < n; i++) { a[i] = i; b[i] = 2 * i; }
    Device<float> da(a), db(b), out(n);
    add_kernel<<<(n + 255) / 256, 256>>>(out, da, db, n);
    CHECK(cudaGetLastError());
    std::vector<float> c = out.get();
    for (int i = 0; i < n; i++) { cr_assert(c[i] == 3 * i); }
}

#define LAUNCH(kernel, blocks, ...) kernel<<<blocks, 64>>>(__VA_ARGS__)
Test(emu, transform) {
    // not launches: add_kernel<<<1, 1>>>(a), __shared__ float x;
    /* nor here: add_kernel<<<1, 1>>>(a)
       __shared__ float y[2]; */
    const char *text = "add_kernel<<<1, 1>>>(a); __shared__ float z; // \" ' \\";
    cr_assert(strstr(text, "<<<1, 1>>>"));
    cr_assert(strstr(__FILE__, "dev/test/test_emu.cu") && !strstr(__FILE__, "/src/"));
    char quote = '"'; int big = 1'000;
    Device<float> out(big), in(std::vector<float>(big, 1.0f));
    void (*pointer)(float *, const float *, const float *, int) = add_kernel; int one = 1;
    (quote == '"' ? pointer : nullptr)<<<(big + 63) / 64, dim3(64 << one >> one)>>>(out, in, in, big); // the kernel is an expression
    pointer
        <<<16, 64>>>(out, in, in, big);
    LAUNCH(add_kernel, 16, out, in, in, big); if (one) { add_kernel<<<16, 64, 0, nullptr>>>(out, out, in, big); }
    std::vector<float> sums = out.get();
    for (float s : sums) { cr_assert(s == 3.0f); }
    Device<double> filled(3 * 64);
    far::fill<double>(filled, 3, 2.5);
    for (double d : filled.get()) { cr_assert(d == 2.5); }
}

// ----------------------------------------------------------------------------------------------------
// Barriers, warps, atomics

__global__ void reverse_kernel(int *x, int *votes) {
    __shared__ int copy[256];
    int t = threadIdx.x, rounds = 5;
    for (int r = 0; r < rounds; r++) { // an odd number of reversals
        copy[t] = x[t];
        __syncthreads();
        x[t] = copy[255 - t];
        __syncthreads();
    }
    int count = __syncthreads_count(t % 3 == 0), any = __syncthreads_or(t == 77), none = __syncthreads_or(0);
    int all = __syncthreads_and(1), most = __syncthreads_and(t != 200);
    votes[t] = count * 10000 + any * 1000 + none * 100 + all * 10 + most;
}
Test(emu, barriers_and_their_votes) {
    std::vector<int> x(256);
    for (int i = 0; i < 256; i++) { x[i] = i; }
    Device<int> dx(x), votes(256);
    reverse_kernel<<<1, 256>>>(dx, votes);
    std::vector<int> y = dx.get();
    for (int i = 0; i < 256; i++) { cr_assert(y[i] == 255 - i); }
    for (int v : votes.get()) { cr_assert(v == 861010, "%d", v); }
}

struct Pair { float a; int b; };
template <typename T> __global__ void shuffle_kernel(T *out, int width) {
    int t = threadIdx.x;
    T mine = (T)(t * 3 + 1);
    out[t] = __shfl_sync(0xffffffff, mine, t + 5, width);
    out[64 + t] = __shfl_up_sync(0xffffffff, mine, 3, width);
    out[128 + t] = __shfl_down_sync(0xffffffff, mine, 3, width);
    out[192 + t] = __shfl_xor_sync(0xffffffff, mine, 5, width);
}
template <typename T> static void shuffles() {
    for (int width : {32, 16, 8}) {
        Device<T> out(256);
        shuffle_kernel<T><<<1, 64>>>(out, width);
        std::vector<T> v = out.get();
        for (int t = 0; t < 64; t++) {
            int lane = t % 32, begin = lane / width * width, end = begin + width, warp = t - lane;
            auto value = [&](int l) { return (T)((warp + l) * 3 + 1); };
            cr_assert(v[t] == value(begin + (lane + 5) % width));
            cr_assert(v[64 + t] == value(lane - 3 < begin ? lane : lane - 3));
            cr_assert(v[128 + t] == value(lane + 3 >= end ? lane : lane + 3));
            cr_assert(v[192 + t] == value((lane ^ 5) >= end ? lane : lane ^ 5));
        }
    }
}
__global__ void vote_kernel(unsigned *out) {
    int t = threadIdx.x, lane = t % 32;
    out[t] = __ballot_sync(0xffffffff, lane % 3 == 1);
    out[64 + t] = __any_sync(0xffffffff, t == 40) * 2 + __all_sync(0xffffffff, t < 40);
    unsigned half = lane < 16 ? 0x0000ffffu : 0xffff0000u; // the halves of a warp go different ways
    unsigned sum = (unsigned)t;
    if (lane < 16) {
        for (int d = 8; d > 0; d /= 2) { sum += __shfl_xor_sync(half, sum, d); }
    } else {
        sum = __ballot_sync(half, lane & 1);
    }
    __syncwarp();
    out[128 + t] = sum;
    if (lane >= 24) { return; }
    out[192 + t] = __activemask();
    Pair p = {t * 0.5f, t}; // anything up to any size goes through a shuffle here; CUDA takes 4 and 8 bytes
    p.b = __shfl_sync(0x00ffffff, p.b, 23);
    out[256 + t] = (unsigned)p.b;
}
Test(emu, shuffles_and_votes) {
    shuffles<int>();
    shuffles<float>();
    shuffles<double>();
    shuffles<unsigned long long>();
    Device<unsigned> out(320);
    CHECK(cudaMemset(out, 0, 320 * sizeof(unsigned)));
    vote_kernel<<<1, 64>>>(out);
    std::vector<unsigned> v = out.get();
    for (int t = 0; t < 64; t++) {
        int lane = t % 32, warp = t - lane;
        cr_assert(v[t] == 0x92492492u);
        cr_assert(v[64 + t] == (t < 32 ? 1u : 2u));
        cr_assert(v[128 + t] == (lane < 16 ? 16u * warp + 120 : 0xaaaa0000u));
        if (lane >= 24) { continue; }
        cr_assert((v[192 + t] & 0x00ffffff) == 0x00ffffff);
        cr_assert(v[256 + t] == (unsigned)warp + 23);
    }
}

__global__ void atomic_kernel(int *i, unsigned long long *u, float *f, int *order) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&i[0], 1);
    atomicMax(&i[1], t);
    atomicMin(&i[2], -t);
    atomicOr(&i[3], 1 << t % 20);
    atomicExch(&i[4], 5);
    atomicCAS(&i[5], 0, 7);
    atomicAdd(u, (unsigned long long)t);
    atomicAdd(f, 0.5f);
    order[atomicSub(&i[6], 1) - 1] = t; // each gets its own place
}
Test(emu, atomics) {
    Device<int> i(std::vector<int>{0, 0, 0, 0, 0, 0, 300}), order(300);
    Device<unsigned long long> u(std::vector<unsigned long long>(1));
    Device<float> f(std::vector<float>(1));
    atomic_kernel<<<3, 100>>>(i, u, f, order);
    cr_assert((i.get() == std::vector<int>{300, 299, -299, (1 << 20) - 1, 5, 7, 0}));
    cr_assert(u.get()[0] == 299 * 300 / 2);
    cr_assert(f.get()[0] == 150.0f);
    std::vector<int> o = order.get();
    std::sort(o.begin(), o.end());
    for (int t = 0; t < 300; t++) { cr_assert(o[t] == t); }
}

// ----------------------------------------------------------------------------------------------------
// Shared memory

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
Test(emu, static_shared_memory_in_templates) {
    sum_rows<float>();
    sum_rows<double>();
    sum_rows<int>();
}
template <int N> __global__ void tile_kernel(float *out, int *alignments) {
    __shared__ __align__(16) float tile[N][N + 1]; __shared__ std::pair<int, float> pair;
    __shared__ unsigned char odd[3], *pointer;
    extern __shared__ __align__(16) unsigned char shared_memory[];
    float *copy = (float *)shared_memory;
    int x = threadIdx.x, y = threadIdx.y;
    tile[y][x] = (float)(y * N + x);
    copy[y * N + x] = 0.5f;
    if (x == 0 && y == 0) { pair = {3, 0.25f}; pointer = odd; odd[2] = 1; }
    __syncthreads();
    out[y * N + x] = tile[x][y] + copy[x * N + y] + pair.second + *(pointer + 2);
    if (x == 0 && y == 0) {
        alignments[0] = (uintptr_t)&tile % 16 || (uintptr_t)shared_memory % 16 || (uintptr_t)&pair % 4;
        alignments[1] = odd == (unsigned char *)&tile || (void *)&pair == (void *)&tile;
    }
}
Test(emu, dynamic_shared_memory_and_several_arrays) {
    Device<float> out(16 * 16);
    Device<int> alignments(2);
    tile_kernel<16><<<1, dim3(16, 16), 16 * 16 * sizeof(float)>>>(out, alignments);
    std::vector<float> v = out.get();
    for (int y = 0; y < 16; y++) { for (int x = 0; x < 16; x++) { cr_assert(v[y * 16 + x] == x * 16 + y + 1.75f); } }
    cr_assert((alignments.get() == std::vector<int>{0, 0}));
}
__global__ void big_kernel(int *out, int bytes) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    for (int i = threadIdx.x; i < bytes; i += blockDim.x) { shared_memory[i] = (unsigned char)i; }
    __syncthreads();
    if (threadIdx.x == 0) { *out = shared_memory[bytes - 1]; }
}
Test(emu, shared_memory_up_to_the_limit) {
    Device<int> out(1);
    big_kernel<<<2, 64, 48 << 10>>>(out, 48 << 10);
    CHECK(cudaFuncSetAttribute(big_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 << 10));
    big_kernel<<<2, 64, 227 << 10>>>(out, 227 << 10);
    cr_assert(out.get()[0] == 0xff);
    std::string text = planted([] { if (cudaFuncSetAttribute(big_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (227 << 10) + 1) != cudaErrorInvalidValue) { fputs("accepted", stderr); } });
    cr_assert(strstr(text.c_str(), "at most 232448"), "%s", text.c_str());
}

// ----------------------------------------------------------------------------------------------------
// bf16

Test(emu, bf16_rounds_to_nearest_even) {
    for (unsigned b = 0; b < 65536; b++) { // every bf16 keeps its bits; a NaN stays one
        float f = __bfloat162float(__ushort_as_bfloat16((unsigned short)b));
        unsigned short back = __bfloat16_as_ushort(__float2bfloat16_rn(f));
        cr_assert(isnan(f) ? back == 0x7fff : back == b, "%04x became %04x", b, back);
    }
    uint64_t state = 1;
    for (int i = 0; i < 1000000; i++) { // the nearer neighbour, and of two at the same distance the even one
        state = state * 6364136223846793005u + 1442695040888963407u;
        unsigned bits = (unsigned)(state >> 32);
        if (i % 4 == 0) { bits = (bits & 0xffff0000) | 0x8000; } // a tie
        float f = __uint_as_float(bits);
        if (isnan(f)) { continue; }
        unsigned down = bits >> 16, up = down + 1, low = bits & 0xffff;
        unsigned expected = low < 0x8000 ? down : low > 0x8000 ? up : down & 1 ? up : down;
        cr_assert(__bfloat16_as_ushort(__float2bfloat16(f)) == expected);
    }
    cr_assert(isinf((float)__float2bfloat16(3.4e38f)) && isnan((float)__float2bfloat16(NAN)));
    __nv_bfloat16 a = 1.5f, b = 0.25f;
    __nv_bfloat162 p = __floats2bfloat162_rn(1.0f, -2.0f);
    cr_assert((float)(a + b) == 1.75f && (float)(a * b) == 0.375f && a > b && (float)-a == -1.5f);
    cr_assert(__low2float(p) == 1.0f && __bfloat1622float2(p + p).y == -4.0f && sizeof p == 4);
    cr_assert((float)(__nv_bfloat16(256.0f) + __nv_bfloat16(1.0f)) == 256.0f); // rounded after the sum
}

// ----------------------------------------------------------------------------------------------------
// Tensor-core and async-copy twins against plain loops

__device__ uint32_t pack(__nv_bfloat16 low, __nv_bfloat16 high) { return __bfloat16_as_ushort(low) | (uint32_t)__bfloat16_as_ushort(high) << 16; }
// fragments by the formulas of the PTX manual: row and column of element i of a thread's fragment
__global__ void mma_kernel(float *c, const __nv_bfloat16 *a, const __nv_bfloat16 *b) { // c (16,8) += a (16,16) b (16,8)
    int lane = threadIdx.x % 32, group = lane >> 2, in_group = lane % 4;
    __nv_bfloat16 fa[8], fb[4];
    for (int i = 0; i < 8; i++) {
        int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8, col = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
        fa[i] = a[row * 16 + col];
    }
    for (int i = 0; i < 4; i++) {
        int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0), col = group;
        fb[i] = b[row * 8 + col];
    }
    float fc[4];
    for (int i = 0; i < 4; i++) { fc[i] = c[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)]; }
    uint32_t ra[4], rb[2];
    for (int i = 0; i < 4; i++) { ra[i] = pack(fa[2 * i], fa[2 * i + 1]); }
    for (int i = 0; i < 2; i++) { rb[i] = pack(fb[2 * i], fb[2 * i + 1]); }
    mma_m16n8k16(fc, ra, rb);
    for (int i = 0; i < 4; i++) { c[(i < 2 ? group : group + 8) * 8 + in_group * 2 + (i & 1)] = fc[i]; }
}
// the same product as kernels do it: cp.async to shared memory, ldmatrix for A, ldmatrix.trans for a row-major B
__global__ void mma_pipeline_kernel(float *c, const __nv_bfloat16 *a, const __nv_bfloat16 *b) {
    __shared__ alignas(16) __nv_bfloat16 sa[16 * 16], sb[16 * 8];
    int lane = threadIdx.x;
    cp_async_16(&sa[lane * 8], &a[lane * 8]);
    cp_async_commit();
    if (lane < 16) { cp_async_16(&sb[lane * 8], &b[lane * 8]); }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    uint32_t ra[4], rb[4];
    ldmatrix_x4(ra, &sa[lane % 16 * 16 + lane / 16 * 8]); // matrices: rows 0-7, rows 8-15, then their right halves
    ldmatrix_x4_trans(rb, &sb[lane % 16 * 8]);            // matrices 2 and 3 repeat 0 and 1
    float d[4] = {0, 0, 0, 0};
    mma_m16n8k16(d, ra, rb);
    for (int i = 0; i < 4; i++) { c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] += d[i]; }
}
Test(emu, mma_ldmatrix_and_cp_async) {
    std::vector<__nv_bfloat16> a(16 * 16), b(16 * 8);
    std::vector<float> c(16 * 8), expected(16 * 8);
    for (int i = 0; i < 256; i++) { a[i] = (float)(i * 7 % 31 - 15); }
    for (int i = 0; i < 128; i++) { b[i] = (float)(i * 5 % 23 - 11); c[i] = (float)i; }
    for (int m = 0; m < 16; m++) {
        for (int n = 0; n < 8; n++) {
            expected[m * 8 + n] = c[m * 8 + n];
            for (int k = 0; k < 16; k++) { expected[m * 8 + n] += (float)a[m * 16 + k] * (float)b[k * 8 + n]; }
        }
    }
    Device<__nv_bfloat16> da(a), db(b);
    Device<float> plain(c), pipeline(c);
    mma_kernel<<<1, 32>>>(plain, da, db);
    mma_pipeline_kernel<<<1, 32>>>(pipeline, da, db);
    cr_assert(plain.get() == expected); // small integers: exact in any order
    cr_assert(pipeline.get() == expected);
}
__global__ void ldmatrix_kernel(uint32_t *out) {
    __shared__ alignas(16) uint16_t m[4][8][8];
    int lane = threadIdx.x;
    for (int j = 0; j < 8; j++) { m[lane / 8][lane % 8][j] = (uint16_t)(lane / 8 * 100 + lane % 8 * 10 + j); } // matrix, row, column
    __syncwarp();
    ldmatrix_x4(out + lane * 8, m[lane / 8][lane % 8]);
    ldmatrix_x4_trans(out + lane * 8 + 4, m[lane / 8][lane % 8]);
}
Test(emu, ldmatrix_layout) {
    Device<uint32_t> out(32 * 8);
    ldmatrix_kernel<<<1, 32>>>(out);
    std::vector<uint32_t> v = out.get();
    for (uint32_t lane = 0; lane < 32; lane++) {
        for (uint32_t i = 0; i < 4; i++) {
            uint32_t row = lane / 4, col = lane % 4 * 2;
            cr_assert(v[lane * 8 + i] == ((i * 100 + row * 10 + col) | (i * 100 + row * 10 + col + 1) << 16));
            cr_assert(v[lane * 8 + 4 + i] == ((i * 100 + col * 10 + row) | (i * 100 + (col + 1) * 10 + row) << 16));
        }
    }
}
__global__ void cp_async_kernel(float *out, const float *in) {
    __shared__ alignas(16) float s[3][4];
    for (int g = 0; g < 3; g++) { cp_async_16(s[g], in + 4 * g, g == 2 ? 8 : 16); cp_async_commit(); }
    out[0] = s[0][0];
    cp_async_wait<2>();
    out[1] = s[0][3];
    out[2] = s[1][0];
    cp_async_wait<1>();
    out[3] = s[1][0];
    out[4] = s[2][0];
    cp_async_wait<0>();
    for (int i = 0; i < 4; i++) { out[5 + i] = s[2][i]; }
}
Test(emu, cp_async_is_late_by_groups) {
    Device<float> in(std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}), out(9);
    cp_async_kernel<<<1, 1>>>(out, in);
    std::vector<float> v = out.get();
    cr_assert(isnan(v[0]) && v[1] == 4 && isnan(v[2]) && v[3] == 5 && isnan(v[4]));
    cr_assert(v[5] == 9 && v[6] == 10 && v[7] == 0 && v[8] == 0);
}

// ----------------------------------------------------------------------------------------------------
// The runtime API

Test(emu, streams_events_and_memory) {
    cudaStream_t a, b;
    cudaEvent_t begin, end;
    CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CHECK(cudaStreamCreate(&b));
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreateWithFlags(&end, cudaEventDefault));
    float ms = -1, *host;
    std::string text = planted([&] { float unset; _exit(cudaEventElapsedTime(&unset, begin, end) == cudaErrorInvalidResourceHandle ? 0 : 1); });
    cr_assert(strstr(text.c_str(), "never recorded"));
    CHECK(cudaEventRecord(begin, a));
    Device<float> x(std::vector<float>(100, 2.0f)), y(100);
    add_kernel<<<1, 128, 0, a>>>(y, x, x, 100);
    CHECK(cudaEventRecord(end, a));
    CHECK(cudaStreamWaitEvent(b, end, 0));
    CHECK(cudaMallocHost(&host, 100 * sizeof(float)));
    CHECK(cudaMemcpyAsync(host, y, 100 * sizeof(float), cudaMemcpyDeviceToHost, b));
    CHECK(cudaMemsetAsync(x, 0, 50 * sizeof(float), b));
    CHECK(cudaMemcpyAsync(y, x, 100 * sizeof(float), cudaMemcpyDeviceToDevice, b));
    CHECK(cudaStreamSynchronize(b));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    cr_assert(ms >= 0 && host[99] == 4.0f && y.get()[0] == 0 && y.get()[99] == 2.0f);
    CHECK(cudaFreeHost(host));
    CHECK(cudaStreamDestroy(a));
    CHECK(cudaStreamDestroy(b));
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    cudaDeviceProp p;
    int value, blocks, count;
    CHECK(cudaGetDeviceProperties(&p, 0));
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add_kernel, 256, 100 << 10));
    CHECK(cudaGetDeviceCount(&count));
    cr_assert(value == p.multiProcessorCount && p.warpSize == 32 && blocks == 2 && count == 1);
    size_t before, after, total;
    CHECK(cudaMemGetInfo(&before, &total));
    {
        Device<char> some(1 << 20);
        CHECK(cudaMemGetInfo(&after, &total));
    }
    cr_assert(before - after == 1 << 20);
    char *too_much;
    cr_assert(cudaMalloc(&too_much, total + 1) == cudaErrorMemoryAllocation && !too_much);
    cr_assert(cudaGetLastError() == cudaErrorMemoryAllocation && cudaGetLastError() == cudaSuccess);
    cr_assert(!strcmp(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation") && !strcmp(cudaGetErrorString(cudaSuccess), "no error"));
}
Test(emu, wrong_copies_are_refused) {
    std::string text = planted([] {
        Device<float> x(10);
        float host[20] = {};
        bool refused = cudaMemcpy(x, host, 44, cudaMemcpyHostToDevice) == cudaErrorInvalidValue;
        refused &= cudaMemcpy(x, host, 40, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue;
        refused &= cudaMemcpy(host, x, 40, cudaMemcpyHostToDevice) == cudaErrorInvalidValue;
        refused &= cudaMemset(x.p + 1, 0, 40) == cudaErrorInvalidValue;
        refused &= cudaFree(x.p + 1) == cudaErrorInvalidValue;
        refused &= cudaSetDevice(1) == cudaErrorInvalidDevice;
        if (!refused) { fputs("accepted", stderr); }
    });
    for (const char *part : {"reaches past the end", "source", "destination", "cudaMemset", "cudaFree", "CUDA_EMU_DEVICES"}) { cr_assert(strstr(text.c_str(), part), "%s", text.c_str()); }
    cr_assert(!strstr(text.c_str(), "accepted"));
}

// ----------------------------------------------------------------------------------------------------
// cuBLASLt against the naive loop

#define BLAS(x) do { cublasStatus_t s_ = (x); cr_assert(s_ == CUBLAS_STATUS_SUCCESS, "%s: %s", #x, cublasGetStatusString(s_)); } while (0)
struct Gemm { cublasOperation_t ta, tb; int m, n, k, pad, batch; cublasLtOrder_t order; float alpha, beta; };
template <typename I, typename O> static cublasStatus_t gemm(const Gemm &g, cudaDataType_t in, cudaDataType_t out, float tolerance) {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t layouts[3];
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t result;
    BLAS(cublasLtCreate(&handle));
    BLAS(cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    BLAS(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSA, &g.ta, sizeof g.ta));
    BLAS(cublasLtMatmulDescSetAttribute(desc, CUBLASLT_MATMUL_DESC_TRANSB, &g.tb, sizeof g.tb));
    int rows[3] = {g.ta ? g.k : g.m, g.tb ? g.n : g.k, g.m}, cols[3] = {g.ta ? g.m : g.k, g.tb ? g.k : g.n, g.n}, ld[3];
    int64_t stride[3];
    for (int i = 0; i < 3; i++) {
        bool column = g.order == CUBLASLT_ORDER_COL;
        ld[i] = (column ? rows[i] : cols[i]) + g.pad;
        stride[i] = (int64_t)ld[i] * (column ? cols[i] : rows[i]) + 3 * g.pad;
        BLAS(cublasLtMatrixLayoutCreate(&layouts[i], i == 2 ? out : in, rows[i], cols[i], ld[i]));
        BLAS(cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_ORDER, &g.order, sizeof g.order));
        BLAS(cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &g.batch, sizeof g.batch));
        BLAS(cublasLtMatrixLayoutSetAttribute(layouts[i], CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride[i], sizeof stride[i]));
    }
    size_t workspace = 1 << 20;
    BLAS(cublasLtMatmulPreferenceCreate(&preference));
    BLAS(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    int found = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, desc, layouts[0], layouts[1], layouts[2], layouts[2], preference, 1, &result, &found);
    std::vector<I> a(stride[0] * g.batch), b(stride[1] * g.batch);
    std::vector<O> c(stride[2] * g.batch), d;
    for (size_t i = 0; i < a.size(); i++) { a[i] = (I)((float)(i * 7 % 29) / 16 - 0.8f); }
    for (size_t i = 0; i < b.size(); i++) { b[i] = (I)((float)(i * 5 % 31) / 16 - 0.9f); }
    for (size_t i = 0; i < c.size(); i++) { c[i] = (O)((float)(i % 13) - 6.0f); }
    if (status == CUBLAS_STATUS_SUCCESS) {
        Device<I> da(a), db(b);
        Device<O> dd(c);
        Device<char> space(workspace);
        BLAS(cublasLtMatmul(handle, desc, &g.alpha, da.p, layouts[0], db.p, layouts[1], &g.beta, dd.p, layouts[2], dd.p, layouts[2],
                            g.batch > 1 ? nullptr : &result.algo, space.p, workspace, nullptr));
        d = dd.get();
        std::vector<bool> written(d.size());
        auto at = [&](int i, int64_t q, int row, int col) { return (size_t)(q * stride[i] + (g.order == CUBLASLT_ORDER_COL ? (int64_t)col * ld[i] + row : (int64_t)row * ld[i] + col)); };
        for (int q = 0; q < g.batch; q++) {
            for (int i = 0; i < g.m; i++) {
                for (int j = 0; j < g.n; j++) {
                    double sum = 0;
                    for (int l = 0; l < g.k; l++) { sum += (double)(float)a[g.ta ? at(0, q, l, i) : at(0, q, i, l)] * (float)b[g.tb ? at(1, q, j, l) : at(1, q, l, j)]; }
                    size_t p = at(2, q, i, j);
                    double expected = g.alpha * sum + (g.beta != 0 ? (double)g.beta * (float)c[p] : 0);
                    written[p] = true;
                    cr_assert(fabs((float)d[p] - expected) <= tolerance * (1 + fabs(expected)), "%d %d: %g, expected %g", i, j, (float)d[p], expected);
                }
            }
        }
        for (size_t p = 0; p < d.size(); p++) { cr_assert(written[p] || (float)d[p] == (float)c[p], "padding was written"); }
    }
    for (auto l : layouts) { BLAS(cublasLtMatrixLayoutDestroy(l)); }
    BLAS(cublasLtMatmulPreferenceDestroy(preference));
    BLAS(cublasLtMatmulDescDestroy(desc));
    BLAS(cublasLtDestroy(handle));
    return status;
}
Test(emu, cublaslt_all_layouts_and_types) {
    for (int ta = 0; ta < 2; ta++) {
        for (int tb = 0; tb < 2; tb++) {
            for (int order = 0; order < 2; order++) {
                for (int batch : {1, 3}) {
                    for (float beta : {0.0f, 1.0f, -0.5f}) {
                        Gemm g = {(cublasOperation_t)ta, (cublasOperation_t)tb, 13, 7, 19, batch == 1 ? 0 : 5, batch, (cublasLtOrder_t)order, beta == 0 ? 1.0f : 0.5f, beta};
                        BLAS((gemm<float, float>(g, CUDA_R_32F, CUDA_R_32F, 1e-6f)));
                        BLAS((gemm<__nv_bfloat16, float>(g, CUDA_R_16BF, CUDA_R_32F, 1e-6f)));
                        BLAS((gemm<__nv_bfloat16, __nv_bfloat16>(g, CUDA_R_16BF, CUDA_R_16BF, 1.0f / 256)));
                    }
                }
            }
        }
    }
    Gemm big = {CUBLAS_OP_T, CUBLAS_OP_N, 601, 70, 33, 0, 1, CUBLASLT_ORDER_COL, 1, 0}; // over a block of rows
    BLAS((gemm<float, float>(big, CUDA_R_32F, CUDA_R_32F, 1e-5f)));
}
Test(emu, cublaslt_refuses_what_cublas_refuses) {
    Gemm good = {CUBLAS_OP_N, CUBLAS_OP_N, 8, 8, 8, 0, 1, CUBLASLT_ORDER_COL, 1, 0}, bad = good;
    bad.pad = -1;
    std::string text = planted([&] { // a child, for its stderr
        if (gemm<float, float>(bad, CUDA_R_32F, CUDA_R_32F, 0) != CUBLAS_STATUS_INVALID_VALUE) { fputs("accepted", stderr); }
        if (gemm<float, __nv_bfloat16>(good, CUDA_R_32F, CUDA_R_16BF, 0) != CUBLAS_STATUS_NOT_SUPPORTED) { fputs("accepted", stderr); }
    });
    cr_assert(strstr(text.c_str(), "leading dimension 7") && strstr(text.c_str(), "types 0, 0, 14, 14") && !strstr(text.c_str(), "accepted"), "%s", text.c_str());
    text = planted([] {
        cublasLtHandle_t handle;
        cublasLtMatmulDesc_t desc;
        cublasLtMatrixLayout_t l;
        cublasLtMatmulPreference_t preference;
        cublasLtMatmulHeuristicResult_t r;
        int found;
        float one = 1, zero = 0;
        Device<float> a(65), d(63);
        std::vector<float> host(64);
        cublasLtCreate(&handle);
        cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        cublasLtMatrixLayoutCreate(&l, CUDA_R_32F, 8, 8, 8);
        cublasLtMatmulPreferenceCreate(&preference);
        cublasLtMatmulAlgoGetHeuristic(handle, desc, l, l, l, l, preference, 1, &r, &found);
        auto call = [&](const void *left, float *to) { return cublasLtMatmul(handle, desc, &one, left, l, left, l, &zero, to, l, to, l, &r.algo, nullptr, 0, nullptr); };
        if (call(a.p, d.p) != CUBLAS_STATUS_INVALID_VALUE || call(host.data(), a.p) != CUBLAS_STATUS_INVALID_VALUE || call(a.p + 1, a.p) != CUBLAS_STATUS_INVALID_VALUE) { fputs("accepted", stderr); }
        int32_t two = 2; // the second matrix of a batch isn't there
        int64_t stride = 64;
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &two, sizeof two);
        cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
        if (call(a.p, a.p) != CUBLAS_STATUS_INVALID_VALUE) { fputs("accepted", stderr); }
    });
    cr_assert(strstr(text.c_str(), "reaches past the end") && strstr(text.c_str(), "isn't in an allocation") && strstr(text.c_str(), "isn't aligned to 16") && strstr(text.c_str(), "A (512 bytes) reaches past"), "%s", text.c_str());
    cr_assert(!strstr(text.c_str(), "accepted"));
}

// ----------------------------------------------------------------------------------------------------
// NCCL between threads, in groups of one thread, and between processes

#define NCCL(x) do { ncclResult_t r_ = (x); if (r_) { fprintf(stderr, "%s: %s\n", #x, ncclGetErrorString(r_)); abort(); } } while (0)
// What one rank does: every collective, checked. n is odd and larger than a piece for the first one.
static void rank_work(ncclComm_t comm, int rank, int world) {
    auto need = [&](bool ok, const char *what) { if (!ok) { fprintf(stderr, "rank %d of %d: %s\n", rank, world, what); abort(); } };
    int n = 100003, s = 1001;
    std::vector<float> mine(n);
    for (int i = 0; i < n; i++) { mine[i] = (float)(i % 100) + rank; }
    Device<float> x(mine), y(n), all(s * world), part(s);
    Device<__nv_bfloat16> b(std::vector<__nv_bfloat16>(s, 1.0f + rank));
    Device<int> max(std::vector<int>{rank, -rank});
    cudaStream_t stream;
    cudaStreamCreate(&stream);
    NCCL(ncclAllReduce(x.p, y.p, n, ncclFloat, ncclSum, comm, stream));
    std::vector<float> v = y.get();
    for (int i = 0; i < n; i++) { need(v[i] == world * (float)(i % 100) + world * (world - 1) / 2, "all-reduce"); }
    NCCL(ncclAllReduce(b.p, b.p, s, ncclBfloat16, ncclAvg, comm, stream)); // in place
    need((float)b.get()[s - 1] == (float)__nv_bfloat16(1 + (world - 1) / 2.0f), "average of bf16");
    NCCL(ncclAllReduce(max.p, max.p, 2, ncclInt32, ncclMax, comm, stream));
    need((max.get() == std::vector<int>{world - 1, 0}), "max of int");
    NCCL(ncclAllGather(x.p, all.p, s, ncclFloat, comm, stream));
    v = all.get();
    for (int i = 0; i < s * world; i++) { need(v[i] == (float)(i % s % 100) + i / s, "all-gather"); }
    NCCL(ncclReduceScatter(all.p, part.p, s, ncclFloat, ncclSum, comm, stream)); // all ranks have the same data by now
    v = part.get();
    for (int i = 0; i < s; i++) { need(v[i] == world * ((float)(i % 100) + rank), "reduce-scatter"); }
    int root = world - 1;
    NCCL(ncclBroadcast(x.p, y.p, n, ncclFloat, root, comm, stream));
    need(y.get()[5] == 5.0f + root, "broadcast");
    NCCL(ncclReduce(x.p, y.p, s, ncclFloat, ncclSum, 0, comm, stream));
    need(y.get()[7] == (rank ? 7.0f + root : 7.0f * world + world * (world - 1) / 2), "reduce");
    NCCL(ncclGroupStart()); // a ring
    NCCL(ncclSend(x.p, n, ncclFloat, (rank + 1) % world, comm, stream));
    NCCL(ncclRecv(y.p, n, ncclFloat, (rank + world - 1) % world, comm, stream));
    NCCL(ncclGroupEnd());
    need(y.get()[n - 1] == (float)((n - 1) % 100) + (rank + world - 1) % world, "send and receive");
    ncclResult_t error;
    NCCL(ncclCommGetAsyncError(comm, &error));
    need(error == ncclSuccess, "async error");
    cudaStreamDestroy(stream);
}
static const int worlds[] = {1, 2, 3, 8};
static void devices(int n) { setenv("CUDA_EMU_DEVICES", std::to_string(n).c_str(), 1); }
Test(emu, nccl_between_threads) {
    devices(8);
    for (int world : worlds) {
        std::vector<ncclComm_t> comms(world);
        NCCL(ncclCommInitAll(comms.data(), world, nullptr));
        std::vector<std::thread> threads;
        for (int r = 0; r < world; r++) { threads.emplace_back([&, r] { cudaSetDevice(r); rank_work(comms[r], r, world); ncclCommDestroy(comms[r]); }); }
        for (auto &t : threads) { t.join(); }
    }
}
Test(emu, nccl_between_processes) {
    for (int world : worlds) {
        ncclUniqueId id;
        NCCL(ncclGetUniqueId(&id));
        std::vector<pid_t> children;
        for (int r = 0; r < world; r++) {
            pid_t child = fork();
            if (child == 0) {
                ncclComm_t comm;
                NCCL(ncclCommInitRank(&comm, world, id, r));
                rank_work(comm, r, world);
                NCCL(ncclCommDestroy(comm));
                _exit(0);
            }
            children.push_back(child);
        }
        for (pid_t child : children) {
            int status;
            cr_assert(waitpid(child, &status, 0) == child && status == 0, "status %d of %d ranks", status, world);
        }
        cr_assert(access(id.internal, F_OK) != 0, "the file is left");
    }
}
Test(emu, nccl_groups_of_one_thread) {
    devices(3);
    std::vector<ncclComm_t> comms(3);
    NCCL(ncclCommInitAll(comms.data(), 3, nullptr));
    std::vector<float *> x(3);
    for (int r = 0; r < 3; r++) {
        float value = 1.0f + r;
        CHECK(cudaSetDevice(r));
        CHECK(cudaMalloc(&x[r], 4));
        CHECK(cudaMemcpy(x[r], &value, 4, cudaMemcpyHostToDevice));
    }
    NCCL(ncclGroupStart());
    for (int r = 0; r < 3; r++) {
        NCCL(ncclAllReduce(x[r], x[r], 1, ncclFloat, ncclSum, comms[r], nullptr));
        NCCL(ncclAllReduce(x[r], x[r], 1, ncclFloat, ncclProd, comms[r], nullptr)); // after the first, in its order
    }
    NCCL(ncclGroupEnd());
    for (int r = 0; r < 3; r++) {
        float value;
        CHECK(cudaMemcpy(&value, x[r], 4, cudaMemcpyDeviceToHost));
        cr_assert(value == 216.0f);
        CHECK(cudaFree(x[r]));
        NCCL(ncclCommDestroy(comms[r]));
    }
}
// runs f(comm, rank) in a thread per rank, in a child
static std::string nccl_planted(int world, void (*f)(ncclComm_t, int), int *ended, const char *timeout = "20") {
    return planted([=] {
        devices(world);
        setenv("CUDA_EMU_NCCL_TIMEOUT", timeout, 1);
        std::vector<ncclComm_t> comms(world);
        NCCL(ncclCommInitAll(comms.data(), world, nullptr));
        std::vector<std::thread> threads;
        for (int r = 0; r < world; r++) { threads.emplace_back([&, r] { cudaSetDevice(r); f(comms[r], r); }); }
        for (auto &t : threads) { t.join(); }
    }, ended);
}
Test(emu_catches, nccl_wrong_order) {
    int ended;
    std::string text = nccl_planted(3, [](ncclComm_t comm, int rank) {
        Device<float> x(std::vector<float>(30));
        if (rank == 1) { ncclAllGather(x.p, x.p, 10, ncclFloat, comm, nullptr); } else { ncclAllReduce(x.p, x.p, 10, ncclFloat, ncclSum, comm, nullptr); }
    }, &ended);
    cr_assert(ended != 0);
    for (const char *part : {"wrong collective order", "rank 1 calls ncclAllGather(10 x float32", "calls ncclAllReduce(10 x float32, sum"}) { cr_assert(strstr(text.c_str(), part), "%s", text.c_str()); }
    text = nccl_planted(2, [](ncclComm_t comm, int rank) {
        Device<float> x(std::vector<float>(30));
        ncclAllReduce(x.p, x.p, 10 + rank, ncclFloat, ncclSum, comm, nullptr);
    }, &ended);
    cr_assert(ended != 0 && strstr(text.c_str(), "10 x float32") && strstr(text.c_str(), "11 x float32"), "%s", text.c_str());
}
Test(emu_catches, nccl_missing_rank) {
    int ended;
    std::string text = nccl_planted(3, [](ncclComm_t comm, int rank) {
        Device<float> x(std::vector<float>(10));
        ncclResult_t async;
        if (rank == 2) { return; }
        if (ncclAllReduce(x.p, x.p, 10, ncclFloat, ncclSum, comm, nullptr) != ncclRemoteError) { fputs("accepted", stderr); }
        if (ncclCommGetAsyncError(comm, &async) || async != ncclRemoteError) { fputs("accepted", stderr); }
    }, &ended, "2");
    cr_assert(ended == 0 && strstr(text.c_str(), "rank 0 of 3 waited 2 s in ncclAllReduce for rank 2") && !strstr(text.c_str(), "accepted"), "%s", text.c_str());
}
Test(emu_catches, nccl_killed_process) { // wherever the kill hits, the others get an error and nobody hangs
    setenv("CUDA_EMU_NCCL_TIMEOUT", "3", 1);
    ncclUniqueId id;
    NCCL(ncclGetUniqueId(&id));
    std::vector<pid_t> children;
    for (int r = 0; r < 3; r++) {
        pid_t child = fork();
        if (child == 0) {
            ncclComm_t comm;
            NCCL(ncclCommInitRank(&comm, 3, id, r));
            Device<float> x(std::vector<float>(200000));
            if (!freopen("/dev/null", "w", stderr)) { _exit(3); } // it says for whom it waits
            for (;;) { if (ncclAllReduce(x.p, x.p, 200000, ncclFloat, ncclSum, comm, nullptr) == ncclRemoteError) { _exit(5); } }
        }
        children.push_back(child);
    }
    usleep(300000);
    kill(children[1], SIGKILL);
    for (int r = 0; r < 3; r++) {
        int status;
        cr_assert(waitpid(children[r], &status, 0) == children[r]);
        cr_assert(r == 1 ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == 5, "rank %d: status %d", r, status);
    }
}
Test(emu, nccl_abort_wakes_all) {
    int ended;
    std::string text = nccl_planted(3, [](ncclComm_t comm, int rank) {
        Device<float> x(std::vector<float>(10));
        if (rank == 2) {
            usleep(100000);
            ncclCommAbort(comm);
        } else if (ncclAllReduce(x.p, x.p, 10, ncclFloat, ncclSum, comm, nullptr) != ncclRemoteError) { fputs("accepted", stderr); }
    }, &ended);
    cr_assert(ended == 0 && text.empty(), "%s", text.c_str()); // nobody had to wait for the timeout
}

Test(emu, devices_run_side_by_side) {
    devices(8);
    std::vector<std::thread> threads;
    std::atomic<int> right{0};
    for (int d = 0; d < 8; d++) {
        threads.emplace_back([&, d] {
            cudaSetDevice(d);
            Device<float> in(std::vector<float>(7 * 300, (float)d)), out(7);
            for (int i = 0; i < 20; i++) { sum_kernel<float, 128><<<7, 128>>>(out, in, 300); }
            int current = -1;
            cudaGetDevice(&current);
            right += current == d && out.get() == std::vector<float>(7, 300.0f * d);
        });
    }
    for (auto &t : threads) { t.join(); }
    cr_assert(right == 8);
}

// ----------------------------------------------------------------------------------------------------
// What the checker must catch, by the kernel's name

__global__ void wild_kernel(float *x, int at, int write) {
    if (threadIdx.x == 3) { if (write) { x[at] = 1; } else { x[0] = x[at]; } }
}
static void wild(int at, int write) {
    Device<float> x(std::vector<float>(64));
    wild_kernel<<<2, 32>>>(x, at, write);
}
Test(emu_catches, out_of_bounds) {
    catches([] { wild(64 + 1024, 0); }, "kernel wild_kernel", "block (0,0,0)", "thread (3,0,0)"); // read far away
    catches([] { wild(-2000, 0); }, "kernel wild_kernel", "thread (3,0,0)");
    catches([] { Device<float> x(std::vector<float>(63)); wild_kernel<<<1, 32>>>(x, 63, 1); }, "kernel wild_kernel"); // a write just past the end
    catches([] { wild(-1, 1); }, "kernel wild_kernel");
    catches([] { check_mode(); Device<float> x(std::vector<float>(63)); wild_kernel<<<1, 32>>>(x, 63, 0); }, "kernel wild_kernel"); // a read just past the end
    std::string text = planted([] { wild(63, 1); });
    cr_assert(text.empty(), "%s", text.c_str());
}
Test(emu_catches, use_after_free_and_foreign_memory) {
    catches([] {
        float **table, *x; // through a table, so that the argument itself is fine
        CHECK(cudaMalloc(&table, sizeof *table));
        CHECK(cudaMalloc(&x, 256));
        CHECK(cudaMemcpy(table, &x, sizeof x, cudaMemcpyHostToDevice));
        CHECK(cudaFree(x));
        void (*through)(float **) = [](float **t) { t[0][threadIdx.x] = 1; };
        through<<<1, 1>>>(table);
    }, "kernel through", "use after free of 256 bytes", "thread (0,0,0)");
    catches([] { Device<float> x(4); cudaFree(x.p); wild_kernel<<<1, 32>>>(x, 0, 1); }, "kernel wild_kernel", "argument 1");
    catches([] { std::vector<float> host(64); wild_kernel<<<1, 32>>>(host.data(), 0, 1); }, "kernel wild_kernel", "argument 1", "no device memory");
    catches([] { devices(2); Device<float> x(64); cudaSetDevice(1); wild_kernel<<<1, 32>>>(x, 0, 1); }, "kernel wild_kernel", "memory of device 0");
    if (emu::heap().key >= 0) { catches([] { Device<float> x(64); *(volatile float *)x.p = 1; }, "host code touches device memory"); }
}
__global__ void uninitialised_kernel(float *out, const float *in, int n) { if (threadIdx.x < (unsigned)n) { out[threadIdx.x] = in[threadIdx.x] * 2; } }
__global__ void uninitialised_shared_kernel(float *out) {
    __shared__ float s[32];
    if (threadIdx.x < 31) { s[threadIdx.x] = 1; }
    __syncthreads();
    out[threadIdx.x] = s[31 - threadIdx.x];
}
Test(emu_catches, uninitialised_read) {
    catches([] {
        check_mode();
        Device<float> in(32), out(32);
        CHECK(cudaMemset(in, 0, 31 * 4));
        uninitialised_kernel<<<1, 32>>>(out, in, 31);
        fputs("so far so good\n", stderr);
        uninitialised_kernel<<<1, 32>>>(out, in, 32);
    }, "so far so good", "kernel uninitialised_kernel", "never written");
    catches([] { check_mode(); Device<float> out(32); uninitialised_shared_kernel<<<1, 32>>>(out); }, "kernel uninitialised_shared_kernel", "never written");
    catches([] { check_mode(); Device<float> x(8); float host[8]; cudaMemcpy(host, x, 32, cudaMemcpyDeviceToHost); }, "cudaMemcpy", "never written");
    Device<float> in(32), out(32); // and without check mode: NaN
    uninitialised_kernel<<<1, 32>>>(out, in, 32);
    cr_assert(isnan(out.get()[5]));
}
template <bool BARRIER> __global__ void barrier_kernel(float *x) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    if (BARRIER) { __syncthreads(); }
    x[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool BARRIER> __global__ void in_place_kernel(float *x, int n) { // a race in global memory
    float v = x[(threadIdx.x + 1) % n];
    if (BARRIER) { __syncwarp(); }
    x[threadIdx.x] = v;
}
Test(emu_catches, missing_barrier) {
    auto values = [] { std::vector<float> v(64); for (int i = 0; i < 64; i++) { v[i] = (float)i; } return v; };
    catches([&] { check_mode(); Device<float> x(values()); for (int i = 0; i < 5; i++) { barrier_kernel<false><<<1, 64>>>(x); } }, "kernel barrier_kernel<false>");
    catches([&] { check_mode(); Device<float> x(values()); for (int i = 0; i < 5; i++) { in_place_kernel<false><<<1, 32>>>(x, 32); } },
            "kernel in_place_kernel<false>", "order of the warps");
    std::string text = planted([&] {
        check_mode();
        Device<float> x(values());
        for (int i = 0; i < 20; i++) { barrier_kernel<true><<<1, 64>>>(x); in_place_kernel<true><<<1, 32>>>(x, 32); }
    });
    cr_assert(text.empty(), "%s", text.c_str());
}
__global__ void stuck_kernel(float *x, int way) {
    unsigned t = threadIdx.x;
    if (way == 0) { // some have ended
        if (t >= 32) { return; }
        __syncthreads();
    } else if (way == 1) { // two different barriers
        if (t < 32) { __syncthreads(); } else {
            __syncthreads();
        }
    } else if (way == 2) { // lanes missing
        if (t % 32 < 16) { x[t] = __shfl_xor_sync(0xffffffff, 1.0f, 1); }
    } else if (way == 3) { // some lanes at the barrier
        if (t % 32 < 16) { x[t] = __shfl_xor_sync(0xffffffff, 1.0f, 1); } else { __syncthreads(); }
    } else if (way == 4) { // not in its own mask
        __syncwarp(0xfffe);
    } else if (way == 5) { // from a lane that doesn't take part
        if (t < 16) { x[t] = __shfl_sync(0xffff, 1.0f, 20); }
    } else { // two different operations
        if (t % 32 < 16) { __syncwarp(); } else { x[t] = (float)__any_sync(0xffffffff, 1); }
    }
}
static std::function<void()> stuck(int way, int threads = 64) {
    return [=] { Device<float> x(std::vector<float>(64)); stuck_kernel<<<1, threads>>>(x, way); };
}
Test(emu_catches, barrier_not_reached_by_all_and_missing_lanes) {
    catches(stuck(0), "kernel stuck_kernel", "barrier not reached by all: 32 threads wait", "32 have ended", "thread (32,0,0)");
    catches(stuck(1), "kernel stuck_kernel", "comes to the __syncthreads of line", "while 32 threads wait");
    catches(stuck(2), "kernel stuck_kernel", "__shfl_xor_sync", "lanes 0xffff0000 that never come", "has ended");
    catches(stuck(3), "kernel stuck_kernel", "__shfl_xor_sync", "lanes 0xffff0000 that never come", "waits in __syncthreads");
    catches(stuck(4), "kernel stuck_kernel", "which leaves it out");
    catches(stuck(5), "kernel stuck_kernel", "shuffles from lane 20");
    catches(stuck(6), "kernel stuck_kernel", "__syncwarp", "warp vote");
    catches(stuck(2, 16), "kernel stuck_kernel", "doesn't exist in this block");
}
template <int BYTES> __global__ void static_kernel(unsigned char *x) {
    __shared__ unsigned char s[BYTES];
    s[threadIdx.x] = 1;
    *x = s[threadIdx.x];
}
Test(emu_catches, bad_launch) {
    catches([] { add_kernel<<<1, 0>>>(nullptr, nullptr, nullptr, 0); }, "kernel add_kernel", "bad launch", "block (0,1,1)");
    catches([] { add_kernel<<<1, 1025>>>(nullptr, nullptr, nullptr, 0); }, "kernel add_kernel", "bad launch");
    catches([] { add_kernel<<<1, dim3(1, 1, 65)>>>(nullptr, nullptr, nullptr, 0); }, "bad launch");
    catches([] { add_kernel<<<0, 32>>>(nullptr, nullptr, nullptr, 0); }, "bad launch: grid (0,1,1)");
    catches([] { add_kernel<<<dim3(1, 65536), 32>>>(nullptr, nullptr, nullptr, 0); }, "bad launch: grid (1,65536,1)");
    catches([] { add_kernel<<<1u << 31, 32>>>(nullptr, nullptr, nullptr, 0); }, "bad launch: grid");
    catches([] { void (*none)(int) = nullptr; none<<<1, 1>>>(1); }, "kernel none", "null pointer");
    catches([] { Device<int> x(1); big_kernel<<<1, 32, (48 << 10) + 1>>>(x, 1); }, "kernel big_kernel", "dynamic shared memory", "cudaFuncSetAttribute");
    catches([] {
        Device<int> x(1);
        CHECK(cudaFuncSetAttribute(big_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 100 << 10));
        devices(2);
        CHECK(cudaSetDevice(1)); // the attribute was set on device 0 only
        Device<int> y(1);
        big_kernel<<<1, 32, 100 << 10>>>(y, 1);
    }, "kernel big_kernel", "dynamic shared memory");
    catches([] { Device<unsigned char> x(1); static_kernel<50000><<<1, 1>>>(x); }, "kernel static_kernel<50000>", "static shared memory");
}
__global__ void shared_overrun_kernel(float *x, int at) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    ((float *)shared_memory)[at] = 1;
    *x = 1;
}
__global__ void stack_kernel(float *x) {
    volatile char large[1 << 20];
    for (int i = 0; i < 1 << 20; i += 512) { large[(1 << 20) - 1 - i] = 1; }
    *x = large[5];
}
__global__ void assert_kernel(float *x) { if (threadIdx.x == 5) { abort(); } *x = 1; }
__global__ void unwaited_kernel(float *out, const float *in) {
    __shared__ alignas(16) float s[4];
    cp_async_16(s, in);
    cp_async_commit();
    out[0] = s[0];
}
__global__ void unaligned_kernel(float *out, const float *in) {
    __shared__ float s[8];
    cp_async_16(&s[0], in + 1);
    cp_async_commit();
    cp_async_wait<0>();
    out[0] = s[0];
}
Test(emu_catches, other_faults_of_kernels) {
    catches([] { Device<float> x(1); shared_overrun_kernel<<<1, 1, 64>>>(x, 16); }, "kernel shared_overrun_kernel");
    catches([] { Device<float> x(1); stack_kernel<<<1, 1>>>(x); }, "kernel stack_kernel");
    catches([] { Device<float> x(1); assert_kernel<<<1, 32>>>(x); }, "kernel assert_kernel", "thread (5,0,0)", "aborted");
    catches([] { check_mode(); Device<float> in(std::vector<float>(8)), x(1); unwaited_kernel<<<1, 1>>>(x, in); }, "kernel unwaited_kernel", "never written");
    catches([] { Device<float> in(std::vector<float>(8)), x(1); unaligned_kernel<<<1, 1>>>(x, in); }, "kernel unaligned_kernel", "aligned");
}
Test(emu_catches, leaks) {
    int ended;
    std::string text = planted([] {
        float *x;
        CHECK(cudaMalloc(&x, 12345));
        _exit(emu::check_leaks() == 1 ? 7 : 0);
    }, &ended);
    cr_assert(ended == 7 && strstr(text.c_str(), "leak: 12345 bytes of device 0, allocated at dev/test/test_emu.cu:"), "%s", text.c_str());
    text = planted([] { { Device<float> x(5); } _exit(emu::check_leaks()); }, &ended);
    cr_assert(ended == 0 && text.empty());
    text = planted([] {
        setenv("CUDA_EMU_LEAKS", "1", 1);
        float *x;
        CHECK(cudaMalloc(&x, 54321));
        exit(0);
    }, &ended);
    cr_assert(ended == 1 && strstr(text.c_str(), "leak: 54321 bytes"), "%d %s", ended, text.c_str());
}
Test(emu, same_bits_under_any_seed_and_poison) {
    std::vector<float> results[4];
    for (int i = 0; i < 4; i++) {
        emu::random_state = emu::random_state_of(i + 1);
        Device<float> in(std::vector<float>(7 * 300, 0.1f)), out(7);
        sum_kernel<float, 128><<<7, 128>>>(out, in, 300);
        results[i] = out.get();
        cr_assert(results[i] == results[0]);
    }
}
