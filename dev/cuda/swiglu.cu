// SwiGLU, h = silu(gate) * up, forward and backward, alone and with DNP's norms before it; see lab.h for how to compile.
// gate | up lie side by side (n, 2 ld), ld = H rounded up to a multiple of 8; pads hold zeros.
//
// 1           a thread an element
// 2           16 bytes a thread
// 3           train_gpt2.cu's: a block a row, 16 bytes a thread, and norms in the same kernel
// normed 1    the norms of gate and up, each read and written again, then SwiGLU: six trips through memory instead of three
// normed 2    train_gpt2.cu's
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::to_float;
using lab::from_float;

__device__ inline float silu(float x) { return x / (1 + expf(-x)); }
__device__ inline void gradient(float g, float u, float d, float &dg, float &du) {
    const float s = 1 / (1 + expf(-g));
    dg = d * u * (s + g * s * (1 - s));
    du = d * g * s;
}
template <typename F> __global__ void forward1_kernel(F *h, const F *gu, int64_t N, int64_t ld) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / ld, c = i % ld;
    if (n < N) { h[i] = from_float<F>(silu(to_float(gu[n * 2 * ld + c])) * to_float(gu[n * 2 * ld + ld + c])); }
}
template <typename F> __global__ void backward1_kernel(F *dgu, const F *dh, const F *gu, int64_t N, int64_t ld) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / ld, c = i % ld;
    if (n >= N) { return; }
    float dg, du;
    gradient(to_float(gu[n * 2 * ld + c]), to_float(gu[n * 2 * ld + ld + c]), to_float(dh[i]), dg, du);
    dgu[n * 2 * ld + c] = from_float<F>(dg);
    dgu[n * 2 * ld + ld + c] = from_float<F>(du);
}
template <typename F> __global__ void forward2_kernel(F *h, const F *gu, int64_t N, int64_t ld) {
    constexpr int W = gpu::LANES<F>;
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W, n = i / ld, c = i % ld;
    if (n >= N) { return; }
    auto g = gpu::load<W>(gu + n * 2 * ld + c), u = gpu::load<W>(gu + n * 2 * ld + ld + c);
    for (int k = 0; k < W; k++) { g.set(k, silu(g[k]) * u[k]); }
    gpu::store(h + i, g);
}
template <typename F> __global__ void backward2_kernel(F *dgu, const F *dh, const F *gu, int64_t N, int64_t ld) {
    constexpr int W = gpu::LANES<F>;
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W, n = i / ld, c = i % ld;
    if (n >= N) { return; }
    auto g = gpu::load<W>(gu + n * 2 * ld + c), u = gpu::load<W>(gu + n * 2 * ld + ld + c), d = gpu::load<W>(dh + i);
    for (int k = 0; k < W; k++) {
        float dg, du;
        gradient(g[k], u[k], d[k], dg, du);
        g.set(k, dg);
        u.set(k, du);
    }
    gpu::store(dgu + n * 2 * ld + c, g);
    gpu::store(dgu + n * 2 * ld + ld + c, u);
}
template <typename F> __global__ void split_kernel(F *to, const F *from, int64_t N, int64_t H, int64_t to_ld, int64_t from_ld) { // (N,H) between two distances of rows
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / H, c = i % H;
    if (n < N) { to[n * to_ld + c] = from[n * from_ld + c]; }
}

template <typename F> static void forward(int version, F *h, float *rstd, const F *gu, int64_t N, int64_t H, int64_t ld, int block) {
    if (version == 1) { forward1_kernel<F><<<(unsigned)gpu::ceil_div(N * ld, block), block>>>(h, gu, N, ld); }
    if (version == 2) { forward2_kernel<F><<<(unsigned)gpu::ceil_div(N * ld / gpu::LANES<F>, block), block>>>(h, gu, N, ld); }
    LAUNCHED();
    if (version == 3) { gpu::swiglu_forward<F>(lab::device(), h, rstd, gu, gpu::GateUpNorms{NULL, NULL, 0, 0, 0}, gpu::Rows{N, NULL, 1}, H, ld); }
}
template <typename F> static void backward(int version, F *dgu, const F *dh, const F *gu, int64_t N, int64_t H, int64_t ld, int block) {
    if (version == 1) { backward1_kernel<F><<<(unsigned)gpu::ceil_div(N * ld, block), block>>>(dgu, dh, gu, N, ld); }
    if (version == 2) { backward2_kernel<F><<<(unsigned)gpu::ceil_div(N * ld / gpu::LANES<F>, block), block>>>(dgu, dh, gu, N, ld); }
    LAUNCHED();
    if (version == 3) { gpu::swiglu_backward<F>(lab::device(), dgu, (F *)NULL, NULL, NULL, NULL, dh, gu, NULL, gpu::GateUpNorms{NULL, NULL, 0, 0, 0}, gpu::Rows{N, NULL, 1}, H, ld); }
}
// `work` (N,4 ld): gate and up apart, and their norms
template <typename F> static void normed(int version, F *h, float *rstd, F *work, const F *gu, const float *gamma, int64_t N, int64_t H, int64_t ld, int block) {
    if (version == 2) { gpu::swiglu_forward<F>(lab::device(), h, rstd, gu, gpu::GateUpNorms{gamma, gamma + ld, 1, 1, 0}, gpu::Rows{N, NULL, 1}, H, ld); return; }
    const unsigned blocks = (unsigned)gpu::ceil_div(N * H, block);
    F *dense = work, *gu_normed = work + 2 * N * ld;
    CUDA_CHECK(cudaMemsetAsync(gu_normed, 0, (size_t)(2 * N * ld) * sizeof(F), 0));
    for (int part = 0; part < 2; part++) {
        split_kernel<F><<<blocks, block>>>(dense, gu + part * ld, N, H, H, 2 * ld);
        LAUNCHED();
        gpu::rmsnorm_forward<F>(lab::device(), dense + N * ld, rstd, dense, gamma + part * ld, gpu::Rows{N, NULL, 1}, H);
        split_kernel<F><<<blocks, block>>>(gu_normed + part * ld, dense + N * ld, N, H, 2 * ld, H);
        LAUNCHED();
    }
    forward1_kernel<F><<<(unsigned)gpu::ceil_div(N * ld, block), block>>>(h, gu_normed, N, ld);
    LAUNCHED();
}

static std::vector<float> padded(const std::vector<float> &x, int64_t rows, int64_t cols, int64_t ld) {
    std::vector<float> y((size_t)(rows * ld));
    for (int64_t i = 0; i < rows * cols; i++) { y[(size_t)(i / cols * ld + i % cols)] = x[(size_t)i]; }
    return y;
}

template <typename F> static void validate(int pass, int version) {
    int done = 0;
    for (int64_t N : {1, 37}) {
        for (int64_t H : {8, 102, 256}) {
            const int64_t ld = gpu::round_up(H, gpu::PAD);
            std::vector<float> gu = lab::rounded<F>(lab::random(2 * N * H, 1, 2)), dh = lab::rounded<F>(lab::random(N * H, 2)), gamma = lab::random(2 * H, 3), h(N * H), dgu(2 * N * H), rstd(2 * N);
            if (pass == 2) {                         // gate | up of the CPU: rows of two groups of H
                std::vector<float> raw = gu;
                ::rmsnorm_forward(gu.data(), rstd.data(), raw.data(), gamma.data(), N, 2, H, 2 * H);
                ::swiglu_forward(h.data(), gu.data(), N, H);
                gu = raw;
            } else {
                ::swiglu_forward(h.data(), gu.data(), N, H);
            }
            ::swiglu_backward(dgu.data(), dh.data(), gu.data(), N, H);
            for (int block : {32, 128, 512}) {
                lab::Array<F> d_gu(lab::convert<F>(padded(gu, 2 * N, H, ld))), d_dh(lab::convert<F>(padded(dh, N, H, ld))), result(pass == 1 ? 2 * N * ld : N * ld), work(4 * N * ld);
                lab::Array<float> d_gamma(padded(gamma, 2, H, ld)), d_rstd(2 * N);
                char name[100];
                snprintf(name, sizeof(name), "swiglu pass %d version %d, N %d H %d, block %d", pass, version, (int)N, (int)H, block);
                if (pass == 0) { forward<F>(version, result, d_rstd, d_gu, N, H, ld, block); }
                if (pass == 1) { backward<F>(version, result, d_dh, d_gu, N, H, ld, block); }
                if (pass == 2) { normed<F>(version, result, d_rstd, work, d_gu, d_gamma, N, H, ld, block); }
                const double tolerance = sizeof(F) == 4 ? 1e-6 : pass == 2 && version == 1 ? 6e-3 : 3e-3; // its normed numbers are rounded, too
                lab::validate(name, result, pass == 1 ? padded(dgu, 2 * N, H, ld) : padded(h, N, H, ld), tolerance);
                done++;
            }
        }
    }
    lab::checked(text_format("swiglu_%s %s", pass == 0 ? "forward" : pass == 1 ? "backward" : "normed", sizeof(F) == 2 ? "bf16" : "fp32"), version, done);
}

int main() {
    const int versions[] = {3, 3, 2};
    for (int pass = 0; pass < 3; pass++) {
        for (int version = 1; version <= versions[pass]; version++) { validate<gpu::bf16>(pass, version);  validate<float>(pass, version); }
    }
    if (lab::timing()) {
        typedef gpu::bf16 F;
        const int64_t N = 32 * 1024, H = 3072, n = N * H;
        lab::Array<F> gu(lab::noise<F>(2 * n, 1)), dh(lab::noise<F>(n, 2)), h(n), dgu(2 * n), work(4 * n);
        lab::Array<float> gamma(lab::noise<float>(2 * H, 3)), rstd(2 * N);
        for (int v = 1; v <= 3; v++) { lab::time_kernel("swiglu_forward", v, 0, 3.0 * 2 * n, false, [&] { forward<F>(v, h, rstd, gu, N, H, H, 256); }); }
        for (int v = 1; v <= 3; v++) { lab::time_kernel("swiglu_backward", v, 0, 5.0 * 2 * n, false, [&] { backward<F>(v, dgu, dh, gu, N, H, H, 256); }); }
        for (int v = 1; v <= 2; v++) { lab::time_kernel("swiglu_normed", v, 0, 3.0 * 2 * n, false, [&] { normed<F>(v, h, rstd, work, gu, gamma, N, H, H, 256); }); }
    }
    lab::finish();
}
