// Muon's Newton-Schulz: five steps X <- a X + (b A + c A^2) X, A = X X^T, for a batch of matrices of one shape (a model has many);
// see lab.h for how to compile.
//
// 1  a matrix at a time, a thread an element of each product
// 2  a matrix at a time, products by cuBLASLt, sums of them by kernels of their own
// 3  train_gpt2.cu's: the whole batch in one product, and cuBLASLt adds b A and a X itself
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::to_float;
using lab::from_float;

// C (M,N) = A B or, with `transposed`, A B^T
template <typename F> __global__ void product_kernel(F *c, int64_t ldc, const F *a, int64_t lda, const F *b, int64_t ldb, int64_t M, int64_t N, int64_t K, int transposed) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, m = i / N, n = i % N;
    if (m >= M) { return; }
    float sum = 0;
    for (int64_t k = 0; k < K; k++) { sum += to_float(a[m * lda + k]) * to_float(transposed ? b[n * ldb + k] : b[k * ldb + n]); }
    c[m * ldc + n] = from_float<F>(sum);
}
template <typename F> __global__ void add_kernel(F *y, float scale_y, const F *x, float scale_x, int64_t rows, int64_t cols, int64_t ld) { // y = scale_y y + scale_x x
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, at = i / cols * ld + i % cols;
    if (i < rows * cols) { y[at] = from_float<F>(scale_y * to_float(y[at]) + scale_x * to_float(x[at])); }
}
template <typename F> static F *newton_schulz(int version, F *x, F *next, F *gram, F *poly, const gpu::MuonShape &s, int64_t batch, int block) {
    if (version == 3) { return gpu::newton_schulz<F>(lab::device(), x, next, gram, poly, s, batch); }
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    const unsigned square = (unsigned)gpu::ceil_div(s.r * s.r, block), wide = (unsigned)gpu::ceil_div(s.r * s.c, block);
    for (int64_t i = 0; i < batch; i++, x += s.r * s.ldx) {
        for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
            if (version == 1) {
                product_kernel<F><<<square, block>>>(gram, s.ldg, x, s.ldx, x, s.ldx, s.r, s.r, s.c, 1);
                LAUNCHED();
                product_kernel<F><<<square, block>>>(poly, s.ldg, gram, s.ldg, gram, s.ldg, s.r, s.r, s.r, 0);
                LAUNCHED();
            } else {
                gpu::matmul<F, F>(lab::device(), gram, s.ldg, 0, gpu::Matrix{x, s.ldx, 0, 0}, gpu::Matrix{x, s.ldx, 0, 1}, s.r, s.r, s.c, 1, 0, gram, 1);
                gpu::matmul<F, F>(lab::device(), poly, s.ldg, 0, gpu::Matrix{gram, s.ldg, 0, 0}, gpu::Matrix{gram, s.ldg, 0, 0}, s.r, s.r, s.r, 1, 0, poly, 1);
            }
            add_kernel<F><<<square, block>>>(poly, c, gram, b, s.r, s.r, s.ldg);
            LAUNCHED();
            if (version == 1) {
                product_kernel<F><<<wide, block>>>(next, s.ldx, poly, s.ldg, x, s.ldx, s.r, s.c, s.r, 0);
                LAUNCHED();
            } else {
                gpu::matmul<F, F>(lab::device(), next, s.ldx, 0, gpu::Matrix{poly, s.ldg, 0, 0}, gpu::Matrix{x, s.ldx, 0, 0}, s.r, s.c, s.r, 1, 0, next, 1);
            }
            add_kernel<F><<<wide, block>>>(x, a, next, 1, s.r, s.c, s.ldx);
            LAUNCHED();
        }
    }
    return x - batch * s.r * s.ldx;
}

template <typename F> static void validate(int version) {
    const int64_t shapes[][3] = {{8, 64, 2}, {24, 40, 3}, {1, 40, 1}, {33, 33, 2}};
    int done = 0;
    for (const int64_t *shape : shapes) {
        const int64_t r = shape[0], c = shape[1], batch = shape[2];
        const gpu::MuonShape s(r, c);
        std::vector<float> x((size_t)(batch * r * s.ldx)), expected((size_t)(batch * r * c)), work((size_t)(r * c + 2 * r * r));
        for (int64_t i = 0; i < batch; i++) {
            std::vector<float> one = lab::random(r * c, (uint64_t)(i + 1));
            double squares = 0;
            for (float v : one) { squares += (double)v * v; }
            for (float &v : one) { v = to_float(from_float<F>((float)(v / sqrt(squares)))); }
            for (int64_t j = 0; j < r * c; j++) { x[(size_t)((i * r + j / c) * s.ldx + j % c)] = one[(size_t)j]; }
            ::newton_schulz(one.data(), r, c, work.data());
            std::copy(one.begin(), one.end(), expected.begin() + i * r * c);
        }
        for (int block : {32, 128, 512}) {
            if (version == 3 && block > 32) { continue; }
            const std::vector<float> zeros((size_t)(batch * r * std::max(s.ldx, s.ldg)));
            lab::Array<F> d_x(lab::convert<F>(x)), next(lab::convert<F>(zeros)), gram(lab::convert<F>(zeros)), poly(lab::convert<F>(zeros));
            const F *result = newton_schulz<F>(version, d_x, next, gram, poly, s, batch, block);
            const std::vector<float> all = lab::floats((result == d_x.data ? d_x : next).get());
            std::vector<float> found;
            for (int64_t j = 0; j < batch * r * c; j++) { found.push_back(all[(size_t)(j / c * s.ldx + j % c)]); }
            char name[100];
            snprintf(name, sizeof(name), "newton_schulz version %d, %d matrices (%d,%d), block %d", version, (int)batch, (int)r, (int)c, block);
            lab::validate(name, found, expected, sizeof(F) == 2 ? 3e-2 : 1e-4); // the steps amplify rounding: their slope at 0 is 3.4 each
            done++;
        }
    }
    lab::checked(text_format("newton_schulz %s", sizeof(F) == 2 ? "bf16" : "fp32"), version, done);
}

int main() {
    for (int version = 1; version <= 3; version++) { validate<gpu::bf16>(version);  validate<float>(version); }
    if (lab::timing()) {
        typedef gpu::bf16 F;
        const int64_t batch = 12;
        const gpu::MuonShape s(768, 2048);
        lab::Array<F> x(lab::noise<F>(batch * s.r * s.ldx, 1, 1e-3f)), next(batch * s.r * s.ldx), gram(batch * s.r * s.ldg), poly(batch * s.r * s.ldg);
        const double flops = 5.0 * (double)batch * 2 * (double)s.r * (double)s.r * (2.0 * (double)s.c + (double)s.r);
        for (int v = 1; v <= 3; v++) { lab::time_kernel("newton_schulz", v, flops, 2.0 * 2 * (double)x.n, true, [&] { newton_schulz<F>(v, x, next, gram, poly, s, batch, 256); }); }
    }
    lab::finish();
}
