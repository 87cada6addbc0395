// Scale vectors: theta -> theta~ and dtheta~ -> dtheta for a whole model; see lab.h for how to compile. With W~ = diag(a) W diag(b)
// and G = dL/dW~:  dW = a G b,  da_i = sum_j G_ij W_ij b_j,  db_j = sum_i a_i G_ij W_ij.
//
// forward 1   a launch a map, a thread an element
// forward 2   a launch a map, a warp a row, 8 elements a lane: a_i is read once a row
// forward 3   train_gpt2.cu's: one launch for all maps
// backward 1  three kernels a map: da with a thread a row, db with a thread a column, then dW: G and W are read three times
// backward 2  train_gpt2.cu's: one launch, each of G and W read once
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::to_float;
using lab::from_float;
using gpu::Map;

template <typename F> __global__ void forward1_kernel(F *eff, const float *w, const float *a, const float *b, int64_t rows, int64_t cols, int64_t ld) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, r = i / cols, c = i % cols;
    if (r < rows) { eff[r * ld + c] = from_float<F>((a ? a[r] : 1) * w[r * ld + c] * (b ? b[c] : 1)); }
}
template <typename F> __global__ void forward2_kernel(F *eff, const float *w, const float *a, const float *b, int64_t rows, int64_t ld) {
    const int64_t r = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (r >= rows) { return; }
    const float scale = a ? a[r] : 1;
    for (int64_t c = threadIdx.x % 32 * 8; c < ld; c += 32 * 8) {
        auto x = gpu::load<8>(w + r * ld + c);
        gpu::Packed<F, 8> y;
        for (int i = 0; i < 8; i++) { y.set(i, scale * x[i] * (b ? b[c + i] : 1)); }
        gpu::store(eff + r * ld + c, y);
    }
}
template <typename F> static void forward(int version, gpu::Model<F> *m, int block) {
    if (version == 3) { gpu::reparameterize_forward(m); return; }
    if (!m->vectors.empty()) {
        gpu::scale_vector_forward_kernel<<<(unsigned)m->vectors.size(), 256>>>(m->gamma, m->theta, m->d_vectors, m->host->cfg.reparam);
        LAUNCHED();
    }
    for (const Map &map : m->maps) {
        const float *a = map.gamma_a < 0 ? NULL : m->gamma + map.gamma_a, *b = map.gamma_b < 0 ? NULL : m->gamma + map.gamma_b;
        if (version == 1) { forward1_kernel<F><<<(unsigned)gpu::ceil_div(map.rows * map.cols, block), block>>>(m->theta_eff + map.eff, m->theta + map.w, a, b, map.rows, map.cols, map.ld); }
        else { forward2_kernel<F><<<(unsigned)gpu::ceil_div(map.rows * 32, block), block>>>(m->theta_eff + map.eff, m->theta + map.w, a, b, map.rows, map.ld); }
        LAUNCHED();
    }
}

__global__ void row_gradient_kernel(float *da, const float *g, const float *w, const float *b, int64_t rows, int64_t cols, int64_t ld) {
    const int64_t r = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int64_t c = 0; r < rows && c < cols; c++) { sum += g[r * ld + c] * w[r * ld + c] * (b ? b[c] : 1); }
    if (r < rows) { da[r] += sum; }
}
__global__ void column_gradient_kernel(float *db, const float *g, const float *w, const float *a, int64_t rows, int64_t cols, int64_t ld) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    float sum = 0;
    for (int64_t r = 0; c < cols && r < rows; r++) { sum += (a ? a[r] : 1) * g[r * ld + c] * w[r * ld + c]; }
    if (c < cols) { db[c] += sum; }
}
__global__ void weight_gradient_kernel(float *dw, const float *a, const float *b, int64_t rows, int64_t cols, int64_t ld) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, r = i / cols, c = i % cols;
    if (r < rows) { dw[r * ld + c] *= (a ? a[r] : 1) * (b ? b[c] : 1); }
}
template <typename F> static void backward(int version, gpu::Model<F> *m, int block) {
    if (version == 2) { gpu::reparameterize_backward(m); return; }
    for (const Map &map : m->maps) {
        const float *a = map.gamma_a < 0 ? NULL : m->gamma + map.gamma_a, *b = map.gamma_b < 0 ? NULL : m->gamma + map.gamma_b, *w = m->theta + map.w;
        float *g = m->grads + map.eff;               // and dW: embeddings aren't tied here
        if (a) { row_gradient_kernel<<<(unsigned)gpu::ceil_div(map.rows, block), block>>>(m->dgamma + map.gamma_a, g, w, b, map.rows, map.cols, map.ld); }
        LAUNCHED();
        if (b) { column_gradient_kernel<<<(unsigned)gpu::ceil_div(map.cols, block), block>>>(m->dgamma + map.gamma_b, g, w, a, map.rows, map.cols, map.ld); }
        LAUNCHED();
        if (a || b) { weight_gradient_kernel<<<(unsigned)gpu::ceil_div(map.rows * map.cols, block), block>>>(g, a, b, map.rows, map.cols, map.ld); }
        LAUNCHED();
    }
    if (m->vectors.empty()) { return; }
    gpu::scale_vector_backward_kernel<<<(unsigned)m->vectors.size(), 256>>>(m->grads, m->dgamma, m->gamma, m->theta, m->d_vectors, m->host->cfg.reparam);
    LAUNCHED();
}

// The same model on the CPU and on the GPU
template <typename F> struct Both {
    Config cfg;
    GPT cpu;
    gpu::Model<F> *model;
    explicit Both(const std::vector<const char *> &flags) {
        std::vector<const char *> argv = {"lab", "--precision", sizeof(F) == 2 ? "bf16" : "fp32"};
        argv.insert(argv.end(), flags.begin(), flags.end());
        config_defaults(&cfg);
        config_parse_flags(&cfg, (int)argv.size(), argv.data());
        presets_apply(&cfg);
        config_resolve(&cfg);
        gpt_build(&cpu, &cfg);
        ::gpt_allocate(&cpu, cfg.batch, cfg.seq_len);
        gpt_init(&cpu);
        const std::vector<float> noise = lab::random(cpu.num_theta, 1, 0.02f);
        for (int64_t i = 0; i < cpu.num_theta; i++) { cpu.theta[i] += noise[(size_t)i]; }   // scale vectors other than 1
        model = gpu::gpt_allocate<F>(&cpu, lab::device(), cfg.batch, cfg.seq_len);
        gpu::copy_state(model, 1);
    }
    ~Both() { gpu::gpt_free(model); }
    void copy(float *host, float *device, int to_device) { // a gradient of each parameter
        std::vector<float> turn;
        for (int i = 0; i < cpu.num_params; i++) {
            gpu::copy_tensor(lab::device(), host + cpu.params[i].offset, device + model->places[(size_t)i].at, &cpu.params[i], &model->places[(size_t)i], to_device, turn);
        }
    }
};

template <typename F> static void validate(int pass, int version) {
    int done = 0;
    for (const char *variant : {"baseline", "hg", "dp", "or", "er", "unified"}) {
        Both<F> both({"--layers", "2", "--channels", "72", "--heads", "6", "--hidden", "101", "--vocab", "259", "--seq-len", "8", "--batch", "1", "--tie-embeddings", "off", "--variant", variant});
        GPT *cpu = &both.cpu;
        gpu::Model<F> *m = both.model;
        ::reparameterize_forward(cpu);
        ::gpt_zero_grad(cpu);
        for (int i = 0; i < cpu->num_maps; i++) {
            const std::vector<float> g = lab::random(cpu->maps[i].rows * cpu->maps[i].cols, (uint64_t)(i + 1));
            std::copy(g.begin(), g.end(), cpu->maps[i].dw_eff);
        }
        std::vector<float> before(cpu->grads, cpu->grads + cpu->num_theta), found(before.size()), expected;
        ::reparameterize_backward(cpu);
        expected.assign(cpu->grads, cpu->grads + cpu->num_theta);
        for (int block : {32, 256}) {
            char name[100];
            snprintf(name, sizeof(name), "reparameterize pass %d version %d, %s, block %d", pass, version, variant, block);
            forward(pass == 0 ? version : 3, m, block);
            if (pass == 0) {
                for (int i = 0; i < cpu->num_maps; i++) {
                    const Map &map = m->maps[(size_t)i];
                    std::vector<F> eff((size_t)(map.rows * map.ld));
                    CUDA_CHECK(cudaDeviceSynchronize());
                    CUDA_CHECK(cudaMemcpy(eff.data(), m->theta_eff + map.eff, eff.size() * sizeof(F), cudaMemcpyDeviceToHost));
                    std::vector<float> ours, theirs(cpu->maps[i].w_eff, cpu->maps[i].w_eff + map.rows * map.cols);
                    for (int64_t j = 0; j < map.rows * map.cols; j++) { ours.push_back(to_float(eff[(size_t)(j / map.cols * map.ld + j % map.cols)])); }
                    lab::validate(name, ours, theirs, sizeof(F) == 2 ? 3e-3 : 1e-6);
                }
            } else {
                gpu::gpt_zero_grad(m);
                both.copy(before.data(), m->grads, 1);
                backward(version, m, block);
                CUDA_CHECK(cudaDeviceSynchronize());
                both.copy(found.data(), m->grads, 0);
                for (int i = 0; i < cpu->num_params; i++) {
                    const ::Param *p = &cpu->params[i];
                    if (p->rows * p->cols == 1) { continue; } // beta of OR, ER: a sum that nearly cancels
                    lab::validate(name, found.data() + p->offset, expected.data() + p->offset, p->rows * p->cols, 1e-4);
                }
            }
            done++;
        }
    }
    lab::checked(text_format("reparameterize_%s %s", pass == 0 ? "forward" : "backward", sizeof(F) == 2 ? "bf16" : "fp32"), version, done);
}

int main() {
    for (int pass = 0; pass < 2; pass++) {
        for (int version = 1; version <= 3 - pass; version++) { validate<gpu::bf16>(pass, version);  validate<float>(pass, version); }
    }
    if (lab::timing()) {
        Both<gpu::bf16> both({"--model", "0.12b", "--variant", "unified", "--batch", "1", "--seq-len", "8"});
        gpu::Model<gpu::bf16> *m = both.model;
        gpu::gpt_zero_grad(m);
        CUDA_CHECK(cudaMemset(m->grads, 0, (size_t)m->num_theta * sizeof(float)));
        for (int v = 1; v <= 3; v++) { lab::time_kernel("reparameterize_forward", v, 0, 6.0 * (double)m->num_theta, false, [&] { forward(v, m, 256); }); }
        for (int v = 1; v <= 2; v++) { lab::time_kernel("reparameterize_backward", v, 0, 12.0 * (double)m->num_theta, false, [&] { backward(v, m, 256); }); }
    }
    lab::finish();
}
