// AdamW for all tensors of a model; see lab.h for how to compile. Four numbers are read for a parameter and three written, 28 bytes
// in all, so a model of 124M parameters takes 3.5 GB through memory a step.
//
// 1  a launch a tensor, a thread an element: a model has hundreds of tensors, most of them tiny scale vectors
// 2  a launch a tensor, 16 bytes a thread
// 3  train_gpt2.cu's: one launch; a block finds its tensor, with its decay, in a table
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"

__global__ void update1_kernel(float *w, const float *grad, float *m, float *v, int64_t n, float decay, gpu::Step s, float scale) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) { return; }
    const float g = grad[i] * scale;
    m[i] = s.beta1 * m[i] + (1 - s.beta1) * g;
    v[i] = s.beta2 * v[i] + (1 - s.beta2) * g * g;
    w[i] = (1 - s.lr * decay) * w[i] - s.rate * m[i] / (sqrtf(v[i]) * s.root + s.eps);
}
__global__ void update2_kernel(float *w, const float *grad, float *m, float *v, int64_t n, float decay, gpu::Step s, float scale) {
    const int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (i >= n) { return; }                          // n is a multiple of 8
    auto W = gpu::load<4>(w + i), G = gpu::load<4>(grad + i), M = gpu::load<4>(m + i), V = gpu::load<4>(v + i);
    for (int k = 0; k < 4; k++) {
        const float g = G[k] * scale;
        M.value[k] = s.beta1 * M[k] + (1 - s.beta1) * g;
        V.value[k] = s.beta2 * V[k] + (1 - s.beta2) * g * g;
        W.value[k] = (1 - s.lr * decay) * W[k] - s.rate * M[k] / (sqrtf(V[k]) * s.root + s.eps);
    }
    gpu::store(w + i, W);
    gpu::store(m + i, M);
    gpu::store(v + i, V);
}

struct Tensors {                                     // places as train_gpt2.cu's table has them
    std::vector<gpu::Place> places;
    int64_t n = 0, blocks = 0;
    void add(int64_t rows, int64_t cols, float decay) {
        gpu::Place p = {};
        p.at = p.eff = p.v = n;
        p.rows = rows;
        p.cols = cols;
        p.ld = gpu::round_up(cols, gpu::PAD);
        p.gamma = -1;
        p.decay = decay;
        p.first_block = blocks;
        n += p.rows * p.ld;
        blocks += gpu::ceil_div(p.rows * p.ld, gpu::UPDATE_BLOCK);
        places.push_back(p);
    }
};
struct State {
    lab::Array<float> w, g, m, v;
    lab::Array<gpu::Place> places;
    lab::Array<gpu::Stats> stats;
};
static void update(int version, State &x, const Tensors &t, gpu::Step s, float scale, int block) {
    if (version == 3) {
        gpu::update_kernel<false><<<(unsigned)t.blocks, 256>>>(x.w, x.g, x.m, x.v, x.places, (int)t.places.size(), s, x.stats);
        LAUNCHED();
        return;
    }
    for (const gpu::Place &p : t.places) {
        const int64_t n = p.rows * p.ld;
        if (version == 1) { update1_kernel<<<(unsigned)gpu::ceil_div(n, block), block>>>(x.w + p.at, x.g + p.at, x.m + p.at, x.v + p.v, n, p.decay, s, scale); }
        else { update2_kernel<<<(unsigned)gpu::ceil_div(n / 4, block), block>>>(x.w + p.at, x.g + p.at, x.m + p.at, x.v + p.v, n, p.decay, s, scale); }
        LAUNCHED();
    }
}
static gpu::Stats stats_of(float clip) { gpu::Stats s = {};  s.clip = clip;  return s; }

int main() {
    Config cfg;
    config_defaults(&cfg);
    const double lr = 1e-3;
    const int64_t step = 3;
    const float scale = 0.5f;
    const gpu::Step s = {(float)lr, (float)(lr / (1 - pow(cfg.beta1, (double)step))), (float)(1 / sqrt(1 - pow(cfg.beta2, (double)step))), (float)cfg.beta1, (float)cfg.beta2, (float)cfg.eps, 0};
    for (int version = 1; version <= 3; version++) {
        int done = 0;
        for (int shape = 0; shape < 3; shape++) {
            Tensors t;
            for (int i = 0; i <= 2 * shape; i++) { t.add(1 + 37 * i, 8 + 30 * i, i % 2 ? 0.1f : 0.0f); }
            std::vector<float> w = lab::random(t.n, 1), g = lab::random(t.n, 2), m = lab::random(t.n, 3), v = lab::random(t.n, 4);
            for (float &x : v) { x *= x; }
            for (int block : {32, 128, 512}) {
                State x = {lab::Array<float>(w), lab::Array<float>(g), lab::Array<float>(m), lab::Array<float>(v), lab::Array<gpu::Place>(t.places), lab::Array<gpu::Stats>(std::vector<gpu::Stats>(1, stats_of(scale)))};
                std::vector<float> ew = w, em = m, ev = v;
                for (const gpu::Place &p : t.places) { ::adamw_update(&ew[(size_t)p.at], &g[(size_t)p.at], &em[(size_t)p.at], &ev[(size_t)p.at], p.rows * p.ld, &cfg, step, lr, p.decay, scale); }
                update(version, x, t, s, scale, block);
                char name[100];
                snprintf(name, sizeof(name), "adamw version %d, %d tensors, block %d", version, (int)t.places.size(), block);
                lab::validate(name, x.w, ew, 1e-6);
                lab::validate(name, x.m, em, 1e-6);
                lab::validate(name, x.v, ev, 1e-6);
                done++;
            }
        }
        lab::checked("adamw", version, done);
    }
    if (lab::timing()) {                             // the tensors of 12 layers, 768 wide
        Tensors t;
        t.add(50257, 768, 0.1f);
        for (int l = 0; l < 12; l++) {
            for (int i = 0; i < 4; i++) { t.add(768, 768, 0.1f); }
            for (int i = 0; i < 3; i++) { t.add(2048, 768, 0.1f); }
            for (int i = 0; i < 14; i++) { t.add(1, 768, 0); }
        }
        State x = {lab::Array<float>(lab::noise<float>(t.n, 1)), lab::Array<float>(lab::noise<float>(t.n, 2)), lab::Array<float>(t.n), lab::Array<float>(t.n), lab::Array<gpu::Place>(t.places), lab::Array<gpu::Stats>(std::vector<gpu::Stats>(1, stats_of(scale)))};
        for (float *p : {x.m.data, x.v.data}) { CUDA_CHECK(cudaMemset(p, 0, (size_t)t.n * sizeof(float))); }
        for (int v = 1; v <= 3; v++) { lab::time_kernel("adamw", v, 0, 28.0 * (double)t.n, false, [&] { update(v, x, t, s, scale, 256); }); }
    }
    lab::finish();
}
