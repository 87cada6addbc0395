// Attention of train_gpt2.cu against that of train_gpt2.c: every length around the sizes of tiles, with and without grouped
// heads, on tensor cores (bf16, heads of 64 and 128) and plain (fp32, and bf16 with other heads). Everything runs twice, in
// the emulation with the warps in another order: the bits must be the same.
#define TESTING
#include "../../train_gpt2.cu"
#include <criterion/criterion.h>

using gpu::bf16;

static std::vector<float> numbers(int64_t n, uint32_t seed) {
    std::vector<float> x((size_t)n);
    for (float &v : x) {
        float sum = 0;
        for (int i = 0; i < 4; i++) { seed = seed * 1664525u + 1013904223u;  sum += (float)(seed >> 8) / (1 << 24) - 0.5f; }
        v = sum * 1.7320508f;
    }
    return x;
}

template <typename F> struct Device {
    F *data;
    size_t n;
    explicit Device(size_t n_) : n(n_) { CUDA_CHECK(cudaMalloc((void **)&data, n * sizeof(F))); }
    explicit Device(const std::vector<float> &x) : Device(x.size()) {
        std::vector<F> y(n);
        for (size_t i = 0; i < n; i++) { y[i] = gpu::from_float<F>(x[i]); }
        CUDA_CHECK(cudaMemcpy(data, y.data(), n * sizeof(F), cudaMemcpyHostToDevice));
    }
    Device(const Device &) = delete;
    ~Device() { CUDA_CHECK(cudaFree(data)); }
    std::vector<float> get() const {
        std::vector<F> y(n);
        std::vector<float> x(n);
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaMemcpy(y.data(), data, n * sizeof(F), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < n; i++) { x[i] = gpu::to_float(y[i]); }
        return x;
    }
};

// columns [first, last) of rows of `width`
static double error_of(const std::vector<float> &found, const std::vector<float> &expected, size_t width, size_t first, size_t last) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < found.size(); i++) {
        if (i % width < first || i % width >= last) { continue; }
        difference += ((double)found[i] - expected[i]) * ((double)found[i] - expected[i]);
        norm += (double)expected[i] * expected[i];
    }
    return sqrt(difference / norm);
}

struct Worst { double out, lse, dq, dk, dv; };

template <typename F> static void check(int B, int T, int NH, int KVH, int HS, Worst most, Worst *worst) {
    const int64_t Q = (int64_t)(NH + 2 * KVH) * HS, C = (int64_t)NH * HS, N = (int64_t)B * T, nl = (int64_t)B * NH * T;
    std::vector<float> qkv = numbers(N * Q, 1), dout = numbers(N * C, 2), out(N * C), lse(nl), D(nl), dqkv(N * Q);
    for (auto *x : {&qkv, &dout}) { for (float &v : *x) { v = gpu::to_float(gpu::from_float<F>(v)); } }
    ::attention_forward(out.data(), lse.data(), qkv.data(), B, T, NH, KVH, HS);
    ::attention_backward(dqkv.data(), D.data(), dout.data(), qkv.data(), out.data(), lse.data(), B, T, NH, KVH, HS);
    std::vector<float> bits[3];
    for (int run = 0; run < 2; run++) {
#ifdef CUDA_EMU
        emu::random_state = emu::random_state_of((uint64_t)(2 + run));
#endif
        gpu::Gpu g = {};
        Device<F> d_qkv(qkv), d_dout(dout), d_out(out.size()), d_dqkv(dqkv.size());
        Device<float> d_lse(lse.size()), d_D(D.size());
        gpu::attention_forward(&g, d_out.data, d_lse.data, d_qkv.data, B, T, NH, KVH, HS);
        gpu::attention_backward(&g, d_dqkv.data, d_D.data, d_dout.data, d_qkv.data, d_out.data, d_lse.data, B, T, NH, KVH, HS);
        std::vector<float> found[3] = {d_out.get(), d_lse.get(), d_dqkv.get()};
        for (int i = 0; i < 3; i++) {
            if (run == 0) { bits[i] = found[i]; }
            cr_assert(memcmp(bits[i].data(), found[i].data(), bits[i].size() * sizeof(float)) == 0,
                      "T %d NH %d KVH %d HS %d: %s differs between two runs", T, NH, KVH, HS, i == 0 ? "out" : i == 1 ? "lse" : "dqkv");
        }
    }
    const Worst e = {error_of(bits[0], out, 1, 0, 1), error_of(bits[1], lse, 1, 0, 1), error_of(bits[2], dqkv, Q, 0, C),
                     error_of(bits[2], dqkv, Q, C, C + KVH * HS), error_of(bits[2], dqkv, Q, C + KVH * HS, Q)};
    cr_assert(e.out <= most.out && e.lse <= most.lse && e.dv <= most.dv && (T == 1 || (e.dq <= most.dq && e.dk <= most.dk)), // T = 1: dq, dk are rounding
              "B %d T %d NH %d KVH %d HS %d: relative errors out %.2e lse %.2e dq %.2e dk %.2e dv %.2e", B, T, NH, KVH, HS, e.out, e.lse, e.dq, e.dk, e.dv);
    *worst = {std::max(worst->out, e.out), std::max(worst->lse, e.lse), std::max(worst->dq, T > 1 ? e.dq : 0), std::max(worst->dk, T > 1 ? e.dk : 0), std::max(worst->dv, e.dv)};
}

static const int heads[][2] = {{1, 1}, {2, 2}, {4, 2}, {3, 1}};
template <typename F> static void sweep(int HS, std::vector<int> lengths, Worst most) {
    Worst worst = {};
    for (size_t i = 0; i < lengths.size(); i++) {
        for (int j = 0; j < 4; j++) { check<F>(1 + (int)(i + j) % 2, lengths[i], heads[j][0], heads[j][1], HS, most, &worst); }
    }
    fprintf(stderr, "attention, %s, HS %d: worst relative errors out %.1e lse %.1e dq %.1e dk %.1e dv %.1e\n", sizeof(F) == 2 ? "bf16" : "fp32", HS,
            worst.out, worst.lse, worst.dq, worst.dk, worst.dv);
}

// Rounding to bf16 is relative to 2^-9 at most, evenly spread about 2^-9/sqrt(3) = 1.1e-3 of the norm: once for the result, once for P in
// out and dv, once for dS in dq and dk, which in addition reads the rounded out in D.
static const Worst bf16_limits = {3e-3, 1e-6, 5e-3, 5e-3, 4e-3};
Test(attention, tensor_cores_64) { sweep<bf16>(64, {1, 16, 37, 64, 65, 130, 200}, bf16_limits); }
Test(attention, tensor_cores_128) { sweep<bf16>(128, {1, 16, 37, 64, 65, 130, 200}, bf16_limits); }
Test(attention, plain_bf16) { sweep<bf16>(36, {1, 17, 37, 65}, bf16_limits); }
static const Worst fp32_limits = {1e-6, 1e-6, 2e-6, 2e-6, 2e-6};
Test(attention, plain_fp32) {
    sweep<float>(64, {1, 16, 37, 65}, fp32_limits);
    sweep<float>(5, {1, 33, 70}, fp32_limits);
    Worst worst = {};
    check<float>(1, 40, 2, 1, 256, fp32_limits, &worst);
}
// Scores of several hundred: without the running maximum exp overflows. dq, dk aren't compared: softmax is one-hot, they vanish.
Test(attention, large_scores) {
    const int T = 150, HS = 64;
    std::vector<float> qkv = numbers((int64_t)T * 3 * HS, 5), out(T * HS), lse(T);
    for (size_t i = 0; i < qkv.size(); i++) { if (i % (3 * HS) < 2 * HS) { qkv[i] *= 20; }  qkv[i] = gpu::to_float(gpu::from_float<bf16>(qkv[i])); }
    ::attention_forward(out.data(), lse.data(), qkv.data(), 1, T, 1, 1, HS);
    gpu::Gpu g = {};
    Device<bf16> d_qkv(qkv), d_out(out.size());
    Device<float> d_lse(lse.size());
    gpu::attention_forward(&g, d_out.data, d_lse.data, d_qkv.data, 1, T, 1, 1, HS);
    cr_assert(error_of(d_out.get(), out, 1, 0, 1) < 5e-3);
    cr_assert(error_of(d_lse.get(), lse, 1, 0, 1) < 1e-6);
}
