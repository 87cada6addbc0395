// RMSNorm, forward and backward, and the norm that follows a residual connection; see lab.h for how to compile. Memory is all:
// these kernels do a handful of operations a number, so the best reads and writes each number once, 16 bytes at a time.
//
// forward 1   a thread a row: neighbouring threads read numbers a row apart, so each read of a warp touches 32 lines
// forward 2   a warp a row: neighbouring lanes read neighbours, sums by shuffles
// forward 3   train_gpt2.cu's: a block a row, 16 bytes a thread
// backward 1  a thread a row for dinp, a thread a column for dgamma, which reads everything once more
// backward 2  a warp a row for dinp; dgamma in two steps: blocks of rows, then over the blocks
// backward 3  train_gpt2.cu's: both in one pass, a block keeps its sums of dgamma in shared memory over many rows
// residual 1  two kernels: sum = x + branch, then the norm of it, which reads what has just been written
// residual 2  train_gpt2.cu's: one kernel
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::to_float;
using lab::from_float;

template <typename F> __global__ void forward1_kernel(F *out, float *rstd, const F *inp, const float *gamma, int64_t N, int64_t D) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    float sum = 0;
    for (int64_t d = 0; d < D; d++) { sum += to_float(inp[n * D + d]) * to_float(inp[n * D + d]); }
    const float r = 1 / sqrtf(sum / (float)D + (float)NORM_EPS);
    for (int64_t d = 0; d < D; d++) { out[n * D + d] = from_float<F>(gamma[d] * (to_float(inp[n * D + d]) * r)); }
    rstd[n] = r;
}
template <typename F> __global__ void forward2_kernel(F *out, float *rstd, const F *inp, const float *gamma, int64_t N, int64_t D) {
    const int64_t n = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (n >= N) { return; }
    float sum = 0;
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) { sum += to_float(inp[n * D + d]) * to_float(inp[n * D + d]); }
    const float r = 1 / sqrtf(gpu::warp_sum(sum) / (float)D + (float)NORM_EPS);
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) { out[n * D + d] = from_float<F>((gamma ? gamma[d] : 1.0f) * (to_float(inp[n * D + d]) * r)); }
    if (threadIdx.x % 32 == 0) { rstd[n] = r; }
}
template <typename F> static void forward(int version, F *out, float *rstd, const F *inp, const float *gamma, int64_t N, int64_t D, int block) {
    if (version == 1) { forward1_kernel<F><<<(unsigned)gpu::ceil_div(N, block), block>>>(out, rstd, inp, gamma, N, D); }
    if (version == 2) { forward2_kernel<F><<<(unsigned)gpu::ceil_div(N * 32, block), block>>>(out, rstd, inp, gamma, N, D); }
    LAUNCHED();
    if (version == 3) { gpu::rmsnorm_forward<F>(lab::device(), out, rstd, inp, gamma, gpu::Rows{N, NULL, 1}, D); }
}

template <typename F> __global__ void input_gradient1_kernel(F *dinp, const F *dout, const F *inp, const float *rstd, const float *gamma, int64_t N, int64_t D) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) { return; }
    float dot = 0, r = rstd[n];
    for (int64_t d = 0; d < D; d++) { dot += gamma[d] * to_float(dout[n * D + d]) * to_float(inp[n * D + d]); }
    const float along = r * r * r * dot / (float)D;
    for (int64_t d = 0; d < D; d++) { dinp[n * D + d] = from_float<F>(r * gamma[d] * to_float(dout[n * D + d]) - along * to_float(inp[n * D + d])); }
}
template <typename F> __global__ void input_gradient2_kernel(F *dinp, const F *dout, const F *inp, const float *rstd, const float *gamma, int64_t N, int64_t D) {
    const int64_t n = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (n >= N) { return; }
    float dot = 0, r = rstd[n];
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) { dot += gamma[d] * to_float(dout[n * D + d]) * to_float(inp[n * D + d]); }
    const float along = r * r * r * gpu::warp_sum(dot) / (float)D;
    for (int64_t d = threadIdx.x % 32; d < D; d += 32) { dinp[n * D + d] = from_float<F>(r * gamma[d] * to_float(dout[n * D + d]) - along * to_float(inp[n * D + d])); }
}
// part (gridDim.y, D): sums of dgamma over a share of the rows
template <typename F> __global__ void gamma_gradient_kernel(float *part, const F *dout, const F *inp, const float *rstd, int64_t N, int64_t D) {
    const int64_t d = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (d >= D) { return; }
    float sum = 0;
    for (int64_t n = N * blockIdx.y / gridDim.y; n < N * (blockIdx.y + 1) / gridDim.y; n++) { sum += to_float(dout[n * D + d]) * to_float(inp[n * D + d]) * rstd[n]; }
    part[blockIdx.y * D + d] = sum;
}
template <typename F> static void backward(int version, F *dinp, float *dgamma, float *partial, const F *dout, const F *inp, const float *rstd, const float *gamma, int64_t N, int64_t D, int block) {
    if (version == 3) { gpu::rmsnorm_backward<F>(lab::device(), dinp, dgamma, partial, dout, inp, rstd, gamma, gpu::Rows{N, NULL, 1}, D, 0); return; }
    const unsigned parts = version == 1 ? 1 : (unsigned)at_most(N, 128);
    if (version == 1) { input_gradient1_kernel<F><<<(unsigned)gpu::ceil_div(N, block), block>>>(dinp, dout, inp, rstd, gamma, N, D); }
    else { input_gradient2_kernel<F><<<(unsigned)gpu::ceil_div(N * 32, block), block>>>(dinp, dout, inp, rstd, gamma, N, D); }
    LAUNCHED();
    gamma_gradient_kernel<F><<<dim3((unsigned)gpu::ceil_div(D, block), parts), block>>>(partial, dout, inp, rstd, N, D);
    LAUNCHED();
    gpu::column_sum(lab::device(), dgamma, partial, parts, D, D);
}

template <typename F> __global__ void residual_kernel(F *sum, const F *x, const F *branch, int64_t n) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { sum[i] = from_float<F>(to_float(x[i]) + to_float(branch[i])); }
}
template <typename F> static void residual(int version, F *sum, F *out, float *rstd, const F *x, const F *branch, int64_t N, int64_t D, int block) {
    if (version == 2) { gpu::residual_rmsnorm_forward<F>(lab::device(), sum, out, rstd, NULL, x, branch, NULL, N, D); return; }
    residual_kernel<F><<<(unsigned)gpu::ceil_div(N * D, block), block>>>(sum, x, branch, N * D);
    LAUNCHED();
    forward2_kernel<F><<<(unsigned)gpu::ceil_div(N * 32, block), block>>>(out, rstd, sum, NULL, N, D);
    LAUNCHED();
}

template <typename F> static void validate(int pass, int version) {
    const double tolerance = sizeof(F) == 2 ? 3e-3 : 1e-6;
    int done = 0;
    for (int64_t N : {1, 37, 64}) {
        for (int64_t D : {8, 72, 102, 768}) {        // 102: rows that don't begin at multiples of 16 bytes
            std::vector<float> inp = lab::rounded<F>(lab::random(N * D, 1)), dout = lab::rounded<F>(lab::random(N * D, 2)), gamma = lab::random(D, 3);
            std::vector<float> sum(N * D), out(N * D), rstd(N), dinp(N * D), dgamma(D), partial(NUM_BLOCKS * D);
            for (int64_t i = 0; i < N * D; i++) { sum[i] = to_float(from_float<F>(inp[i] + dout[i])); }
            if (pass == 2) { ::rmsnorm_forward(out.data(), rstd.data(), sum.data(), NULL, N, 1, D, D); }
            else { ::rmsnorm_forward(out.data(), rstd.data(), inp.data(), gamma.data(), N, 1, D, D); }
            ::rmsnorm_backward(dinp.data(), dgamma.data(), partial.data(), dout.data(), inp.data(), rstd.data(), gamma.data(), N, 1, D, D, 0);
            for (int block : {32, 128, 512}) {
                lab::Array<F> d_inp(lab::convert<F>(inp)), d_dout(lab::convert<F>(dout)), result(N * D), d_sum(N * D);
                lab::Array<float> d_gamma(gamma), d_rstd(rstd), result_rstd(N), d_partial(512 * D), d_dgamma(std::vector<float>(D, 0));
                char name[100];
                snprintf(name, sizeof(name), "rmsnorm pass %d version %d, N %d D %d, block %d", pass, version, (int)N, (int)D, block);
                if (pass == 0) { forward<F>(version, result, result_rstd, d_inp, d_gamma, N, D, block); }
                if (pass == 1) { backward<F>(version, result, d_dgamma, d_partial, d_dout, d_inp, d_rstd, d_gamma, N, D, block); }
                if (pass == 2) { residual<F>(version, d_sum, result, result_rstd, d_inp, d_dout, N, D, block); }
                lab::validate(name, result, pass == 1 ? dinp : out, tolerance);
                if (pass == 1) { lab::validate(name, d_dgamma, dgamma, 1e-5); } else { lab::validate(name, result_rstd, rstd, 1e-6); }
                if (pass == 2) { lab::validate(name, d_sum, sum, 1e-6); }
                done++;
            }
        }
    }
    lab::checked(text_format("rmsnorm_%s %s", pass == 0 ? "forward" : pass == 1 ? "backward" : "residual", sizeof(F) == 2 ? "bf16" : "fp32"), version, done);
}

int main() {
    const int versions[] = {3, 3, 2};
    for (int pass = 0; pass < 3; pass++) {
        for (int version = 1; version <= versions[pass]; version++) { validate<gpu::bf16>(pass, version);  validate<float>(pass, version); }
    }
    if (lab::timing()) {
        typedef gpu::bf16 F;
        const int64_t N = 32 * 1024, D = 768, n = N * D;
        lab::Array<F> inp(lab::noise<F>(n, 1)), dout(lab::noise<F>(n, 2)), out(n), sum(n);
        lab::Array<float> gamma(lab::noise<float>(D, 3)), rstd(N), partial(512 * D), dgamma(std::vector<float>(D, 0));
        for (int v = 1; v <= 3; v++) { lab::time_kernel("rmsnorm_forward", v, 0, 2.0 * 2 * n, false, [&] { forward<F>(v, out, rstd, inp, gamma, N, D, 256); }); }
        for (int v = 1; v <= 3; v++) { lab::time_kernel("rmsnorm_backward", v, 0, 3.0 * 2 * n, false, [&] { backward<F>(v, out, dgamma, partial, dout, inp, rstd, gamma, N, D, 256); }); }
        for (int v = 1; v <= 2; v++) { lab::time_kernel("rmsnorm_residual", v, 0, 4.0 * 2 * n, false, [&] { residual<F>(v, sum, out, rstd, inp, dout, N, D, 256); }); }
    }
    lab::finish();
}
