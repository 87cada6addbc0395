// The embedding: a gather forward, a scatter with addition backward; see lab.h for how to compile.
//
// forward 1   a thread an element
// forward 2   train_gpt2.cu's: a block a token, 16 bytes a thread
// backward 1  a thread a column, which goes over all tokens: no two threads add to the same number, but hardly any threads
// backward 2  a thread an element, with atomic addition: fast where tokens differ, but a frequent token is a queue, and the order
//             of additions, so the bits, change from run to run: with CUDA_EMU_CHECK=1 the emulation stops here and says so
// backward 3  train_gpt2.cu's: the host sorts the places of the batch by token, a block adds up the places of one token, in order
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::to_float;

template <typename F> __global__ void forward1_kernel(F *out, const F *embedding, const int32_t *inputs, int64_t N, int64_t C, int64_t ld) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N * C) { out[i] = embedding[inputs[i / C] * ld + i % C]; }
}
template <typename F> static void forward(int version, F *out, const F *embedding, const int32_t *inputs, int64_t N, int64_t C, int64_t ld, int block) {
    if (version == 2) { gpu::embedding_forward<F>(lab::device(), out, embedding, inputs, N, C, ld); return; }
    forward1_kernel<F><<<(unsigned)gpu::ceil_div(N * C, block), block>>>(out, embedding, inputs, N, C, ld);
    LAUNCHED();
}

template <typename F> __global__ void backward1_kernel(float *dembedding, const F *dout, const int32_t *inputs, int64_t N, int64_t C, int64_t ld) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (int64_t n = 0; n < N && c < C; n++) { dembedding[inputs[n] * ld + c] += to_float(dout[n * C + c]); }
}
template <typename F> __global__ void backward2_kernel(float *dembedding, const F *dout, const int32_t *inputs, int64_t N, int64_t C, int64_t ld) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < N * C) { atomicAdd(dembedding + inputs[i / C] * ld + i % C, to_float(dout[i])); }
}
// The places of a batch sorted by token, as train_gpt2.cu's stage_batch makes them
struct Sorted { std::vector<int32_t> order, tokens, runs; };
static Sorted sorted(const std::vector<int32_t> &inputs) {
    Sorted s;
    for (size_t n = 0; n < inputs.size(); n++) { s.order.push_back((int32_t)n); }
    std::stable_sort(s.order.begin(), s.order.end(), [&](int32_t a, int32_t b) { return inputs[(size_t)a] < inputs[(size_t)b]; });
    for (size_t i = 0; i < s.order.size(); i++) {
        const int32_t token = inputs[(size_t)s.order[i]];
        if (i == 0 || token != s.tokens.back()) { s.tokens.push_back(token);  s.runs.push_back((int32_t)i); }
    }
    s.runs.push_back((int32_t)inputs.size());
    return s;
}
struct DeviceSorted { lab::Array<int32_t> order, tokens, runs; };
template <typename F> static void backward(int version, float *dembedding, const F *dout, const int32_t *inputs, const DeviceSorted &s, int64_t N, int64_t C, int64_t ld, int block) {
    if (version == 3) { gpu::embedding_backward<F>(lab::device(), dembedding, dout, s.order, s.tokens, s.runs, (int)s.tokens.n, C, ld); return; }
    if (version == 1) { backward1_kernel<F><<<(unsigned)gpu::ceil_div(C, block), block>>>(dembedding, dout, inputs, N, C, ld); }
    else { backward2_kernel<F><<<(unsigned)gpu::ceil_div(N * C, block), block>>>(dembedding, dout, inputs, N, C, ld); }
    LAUNCHED();
}
static std::vector<int32_t> text(int64_t N, int64_t V) { // small ids come often, as words do
    std::vector<int32_t> inputs;
    for (float x : lab::random(N, 5)) { inputs.push_back((int32_t)(fabsf(x * x * x) * (float)V / 8) % (int32_t)V); }
    return inputs;
}

template <typename F> static void validate(int pass, int version) {
    int done = 0;
    for (int64_t N : {1, 100}) {
        for (int64_t C : {8, 72, 102, 600}) {
            const int64_t V = 59, ld = gpu::round_up(C, gpu::PAD);
            std::vector<float> embedding = lab::rounded<F>(lab::random(V * C, 1)), dout = lab::rounded<F>(lab::random(N * C, 2)), before = lab::random(V * C, 3), out(N * C), expected = before;
            const std::vector<int32_t> inputs = text(N, V);
            ::embedding_forward(out.data(), embedding.data(), inputs.data(), N, C);
            ::embedding_backward(expected.data(), dout.data(), inputs.data(), N, C);
            auto padded = [&](const std::vector<float> &x) {
                std::vector<float> y((size_t)(V * ld));
                for (int64_t i = 0; i < V * C; i++) { y[(size_t)(i / C * ld + i % C)] = x[(size_t)i]; }
                return y;
            };
            for (int block : {32, 256, 1024}) {
                lab::Array<F> d_embedding(lab::convert<F>(padded(embedding))), d_dout(lab::convert<F>(dout)), d_out(N * C);
                lab::Array<float> d_dembedding(padded(before));
                lab::Array<int32_t> d_inputs(inputs);
                const Sorted s = sorted(inputs);
                DeviceSorted d_sorted = {lab::Array<int32_t>(s.order), lab::Array<int32_t>(s.tokens), lab::Array<int32_t>(s.runs)};
                char name[100];
                snprintf(name, sizeof(name), "embedding pass %d version %d, N %d C %d, block %d", pass, version, (int)N, (int)C, block);
                if (pass == 0) {
                    forward<F>(version, d_out, d_embedding, d_inputs, N, C, ld, block);
                    lab::validate(name, d_out, out, 0);
                } else {
                    backward<F>(version, d_dembedding, d_dout, d_inputs, d_sorted, N, C, ld, block);
                    lab::validate(name, d_dembedding, padded(expected), 1e-6);
                }
                done++;
            }
        }
    }
    lab::checked(text_format("embedding_%s %s", pass == 0 ? "forward" : "backward", sizeof(F) == 2 ? "bf16" : "fp32"), version, done);
}

int main() {
    for (int pass = 0; pass < 2; pass++) {
        for (int version = 1; version <= 2 + pass; version++) { validate<gpu::bf16>(pass, version);  validate<float>(pass, version); }
    }
    if (lab::timing()) {
        typedef gpu::bf16 F;
        const int64_t N = 32 * 1024, C = 768, V = 50257;
        const std::vector<int32_t> inputs = text(N, V);
        const Sorted s = sorted(inputs);
        lab::Array<F> embedding(lab::noise<F>(V * C, 1)), out(N * C);
        lab::Array<float> dembedding(std::vector<float>((size_t)(V * C), 0));
        lab::Array<int32_t> d_inputs(inputs);
        DeviceSorted d_sorted = {lab::Array<int32_t>(s.order), lab::Array<int32_t>(s.tokens), lab::Array<int32_t>(s.runs)};
        const double read = 2.0 * (double)(N * C), add = 8.0 * (double)((int64_t)s.tokens.size() * C);
        for (int v = 1; v <= 2; v++) { lab::time_kernel("embedding_forward", v, 0, 2 * read, false, [&] { forward<F>(v, out, embedding, d_inputs, N, C, C, 256); }); }
        for (int v = 1; v <= 3; v++) { lab::time_kernel("embedding_backward", v, 0, read + add, false, [&] { backward<F>(v, dembedding, out, d_inputs, d_sorted, N, C, C, 256); }); }
    }
    lab::finish();
}
