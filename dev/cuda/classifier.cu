// Cross-entropy and its gradient, in place over the logits (rows, V); see lab.h for how to compile. Logits are the largest tensor
// of a small model: what counts is how often they travel.
//
// 1           as the formula reads: a kernel each for the maximum, the sum, the loss and the gradient; a thread a row in the
//             first two: four reads, and neighbouring threads a row apart
// 2           a block a row, still one pass for the maximum, one for the sum, one for the gradient
// 3           train_gpt2.cu's: maximum and sum in one pass (online softmax), 16 bytes a thread, then the gradient in place
// normed 1    train_gpt2.cu's with the logit norm of DNP: only validated
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::to_float;
using lab::from_float;

template <typename F> __global__ void top_kernel(float *top, const F *z, int64_t rows, int64_t V, int64_t ld) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows) { return; }
    float most = -INFINITY;
    for (int64_t v = 0; v < V; v++) { most = fmaxf(most, to_float(z[n * ld + v])); }
    top[n] = most;
}
template <typename F> __global__ void sum_kernel(float *sum, const float *top, const F *z, int64_t rows, int64_t V, int64_t ld) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= rows) { return; }
    float s = 0;
    for (int64_t v = 0; v < V; v++) { s += expf(to_float(z[n * ld + v]) - top[n]); }
    sum[n] = s;
}
template <typename F> __global__ void loss_kernel(float *losses, const float *top, const float *sum, const F *z, const int32_t *targets, int64_t rows, int64_t ld) {
    const int64_t n = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (n < rows) { losses[n] = logf(sum[n]) + top[n] - to_float(z[n * ld + targets[n]]); }
}
template <typename F> __global__ void gradient_kernel(F *z, const float *top, const float *sum, const int32_t *targets, int64_t rows, int64_t V, int64_t ld, float scale) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = i / ld, v = i % ld;
    if (n >= rows) { return; }
    z[i] = from_float<F>(v < V ? scale * (expf(to_float(z[i]) - top[n]) / sum[n] - (v == targets[n] ? 1.0f : 0.0f)) : 0);
}
template <typename F> __global__ void row_kernel(F *z, float *losses, const int32_t *targets, int64_t V, int64_t ld, float scale) {
    __shared__ float scratch[2][32];
    F *x = z + blockIdx.x * ld;
    const int32_t target = targets[blockIdx.x];
    const float at_target = to_float(x[target]);
    float top = -INFINITY, sum = 0;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) { top = fmaxf(top, to_float(x[v])); }
    top = gpu::block_reduce<gpu::Max>(top, scratch[0]);
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) { sum += expf(to_float(x[v]) - top); }
    sum = gpu::block_sum(sum, scratch[1]);
    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + top - at_target; }
    for (int64_t v = threadIdx.x; v < ld; v += blockDim.x) { x[v] = from_float<F>(v < V ? scale * (expf(to_float(x[v]) - top) / sum - (v == target ? 1.0f : 0.0f)) : 0); }
}
// work: 2 rows
template <typename F> static void classifier(int version, F *z, float *losses, const int32_t *targets, float *work, int64_t rows, int64_t V, int64_t ld, float scale, int block) {
    const unsigned blocks = (unsigned)gpu::ceil_div(rows, block);
    if (version == 1) {
        top_kernel<F><<<blocks, block>>>(work, z, rows, V, ld);
        LAUNCHED();
        sum_kernel<F><<<blocks, block>>>(work + rows, work, z, rows, V, ld);
        LAUNCHED();
        loss_kernel<F><<<blocks, block>>>(losses, work, work + rows, z, targets, rows, ld);
        LAUNCHED();
        gradient_kernel<F><<<(unsigned)gpu::ceil_div(rows * ld, block), block>>>(z, work, work + rows, targets, rows, V, ld, scale);
    }
    if (version == 2) { row_kernel<F><<<(unsigned)rows, block>>>(z, losses, targets, V, ld, scale); }
    LAUNCHED();
    if (version == 3) { gpu::classifier<F>(lab::device(), z, losses, targets, rows, V, ld, scale, 0, NULL, NULL, NULL, NULL); }
}

template <typename F> static void validate(int version, int norm) {
    int done = 0;
    const float scale = 0.125f;
    for (int64_t rows : {1, 20}) {
        for (int64_t V : {8, 259, 1000}) {
            const int64_t ld = gpu::round_up(V, gpu::PAD);
            std::vector<float> z = lab::rounded<F>(lab::random(rows * V, 1, 4)), padded((size_t)(rows * ld)), gamma = lab::random(V, 2), dgamma(V), work(NUM_BLOCKS * V), partial(NUM_BLOCKS * V), expected((size_t)(rows * ld));
            std::vector<int32_t> targets((size_t)rows);
            std::vector<double> losses((size_t)rows);
            for (int64_t n = 0; n < rows; n++) { targets[(size_t)n] = (int32_t)((n * 7919 + 5) % V); }
            for (int64_t i = 0; i < rows * V; i++) { padded[(size_t)(i / V * ld + i % V)] = z[(size_t)i]; }
            ::classifier(z.data(), losses.data(), targets.data(), rows, V, scale, norm, norm ? gamma.data() : NULL, dgamma.data(), work.data(), partial.data());
            for (int64_t i = 0; i < rows * V; i++) { expected[(size_t)(i / V * ld + i % V)] = z[(size_t)i]; }
            const std::vector<float> expected_losses(losses.begin(), losses.end());
            for (int block : {32, 256, 1024}) {
                lab::Array<F> d_z(lab::convert<F>(padded));
                lab::Array<float> d_losses(rows), d_work(3 * rows), d_gamma(gamma), d_dgamma(std::vector<float>(V, 0)), d_partial(gpu::CLASSIFIER_PARTS * ld);
                lab::Array<int32_t> d_targets(targets);
                char name[100];
                snprintf(name, sizeof(name), "classifier version %d%s, rows %d V %d, block %d", version, norm ? " normed" : "", (int)rows, (int)V, block);
                if (norm) { gpu::classifier<F>(lab::device(), d_z, d_losses, d_targets, rows, V, ld, scale, 1, d_gamma, d_dgamma, d_work, d_partial); }
                else { classifier<F>(version, d_z, d_losses, d_targets, d_work, rows, V, ld, scale, block); }
                lab::validate(name, d_losses, expected_losses, 1e-5);
                lab::validate(name, d_z, expected, sizeof(F) == 2 ? 4e-3 : 1e-5);
                if (norm) { lab::validate(name, d_dgamma, dgamma, 1e-4); }
                done++;
            }
        }
    }
    lab::checked(text_format("classifier%s %s", norm ? " normed" : "", sizeof(F) == 2 ? "bf16" : "fp32"), version, done);
}

int main() {
    for (int version = 1; version <= 3; version++) { validate<gpu::bf16>(version, 0);  validate<float>(version, 0); }
    validate<gpu::bf16>(1, 1);
    validate<float>(1, 1);
    if (lab::timing()) {
        typedef gpu::bf16 F;
        const int64_t rows = 8192, V = 50257, ld = gpu::round_up(V, gpu::PAD);
        lab::Array<F> fresh(lab::noise<F>(rows * ld, 1, 2)), z(rows * ld);
        lab::Array<float> losses(rows), work(2 * rows);
        lab::Array<int32_t> targets(std::vector<int32_t>((size_t)rows, 17));
        for (int v = 1; v <= 3; v++) {
            CUDA_CHECK(cudaMemcpy(z, fresh, (size_t)z.n * sizeof(F), cudaMemcpyDeviceToDevice));
            lab::time_kernel("classifier", v, 0, 3.0 * 2 * (double)(rows * ld), false, [&] { classifier<F>(v, z, losses, targets, work, rows, V, ld, 1e-4f, 1024); });
        }
    }
    lab::finish();
}
