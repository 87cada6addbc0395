// test_kernels.cu: each kernel of train_gpt2.cu alone against its twin in train_gpt2.c, in fp32 and in bf16.
//
//   make test-emu     on a CPU, by dev/emu          make test-gpu     the same tests on a GPU
//
// Shapes are odd where the program allows odd ones (37 tokens, 72 columns, hidden size 101, vocabulary 259), and there are
// enough rows that blocks have one, several, or none of them. In bf16 the twin gets the same rounded numbers as the
// kernel and computes in fp32, so that what differs is the kernel's own rounding. What the kernel needs from before (rstd,
// lse, out) comes from the twin as well, so that errors don't hide behind each other's.
//
// Errors are the norm of the difference over the norm of what is expected. Allowed in fp32: 1e-6, a few roundings, where not
// said otherwise. In bf16: 2.5e-3 for one rounding of the result. bf16 has 8 bits, so a rounding is off by at most half of
// 2^-8 and in the mean by 2^-8 / sqrt(12) = 1.13e-3 of the power of two below the number, 1.4e-3 to 1.7e-3 of the norm: seen is 1.7e-3.
// All errors: KERNEL_ERRORS=1.
//
// In the emulation its check mode is on: each kernel runs twice, with its warps in two random orders and on two copies of
// the memory that differ where nobody has written, and must leave the same bits. On a GPU that can't be asked for.
#define TESTING
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function"
#include "../../train_gpt2.cu"
#pragma GCC diagnostic pop
#include <criterion/criterion.h>
#include <algorithm>
#include <numeric>
#include <string_view>

using gpu::bf16, gpu::Rows, gpu::ceil_div, gpu::round_up, gpu::wide, gpu::LANES;

extern "C" const char *__asan_default_options(void);
extern "C" const char *__asan_default_options(void) { return "detect_leaks=0"; } // Criterion's own

// ----------------------------------------------------------------------------------------------------
// Helpers: random numbers, device memory, comparisons

typedef std::vector<float> Floats;
typedef std::vector<int32_t> Ints;

static gpu::Gpu device;
static std::vector<void *> taken; // device memory of the running case

static uint64_t noise_state = 0x2545F4914F6CDD1Du; // each test is a process of its own and begins here
static double noise(void) { // uniform in (-1, 1): xorshift64*
    noise_state ^= noise_state >> 12;
    noise_state ^= noise_state << 25;
    noise_state ^= noise_state >> 27;
    return (double)(int64_t)(noise_state * 0x2545F4914F6CDD1Du) / 9223372036854775808.0;
}
static int noise_int(int n) { return (int)((noise() + 1) / 2 * n) % n; }
static Floats random_floats(int64_t n, double scale = 1, double middle = 0) {
    Floats x((size_t)n);
    for (float &v : x) { v = (float)(middle + scale * noise()); }
    return x;
}
static Ints random_ints(int64_t n, int below) {
    Ints x((size_t)n);
    for (int32_t &v : x) { v = noise_int(below); }
    return x;
}
template <typename F> static Floats random_of(int64_t n, double scale = 1, double middle = 0) { // such as F can hold
    Floats x = random_floats(n, scale, middle);
    for (float &v : x) { v = gpu::to_float(gpu::from_float<F>(v)); }
    return x;
}
template <typename F> static Floats rounded(Floats x) {
    for (float &v : x) { v = gpu::to_float(gpu::from_float<F>(v)); }
    return x;
}
// rows at a distance of ld, and a matrix of such rows without what is between them
static Floats spaced(const Floats &x, int64_t rows, int64_t cols, int64_t ld, float between = 0) {
    Floats y((size_t)(rows * ld), between);
    for (int64_t r = 0; r < rows; r++) { std::copy_n(x.begin() + r * cols, cols, y.begin() + r * ld); }
    return y;
}
static Floats cropped(const Floats &x, int64_t rows, int64_t cols, int64_t ld, int64_t from = 0) {
    Floats y;
    for (int64_t r = 0; r < rows; r++) { y.insert(y.end(), x.begin() + r * ld + from, x.begin() + r * ld + from + cols); }
    return y;
}

template <typename X> static X *take(int64_t n) { // holds nothing yet
    void *p;
    CUDA_CHECK(cudaMalloc(&p, (size_t)std::max<int64_t>(n, 1) * sizeof(X)));
    taken.push_back(p);
    return (X *)p;
}
template <typename X> static X *raw_up(const std::vector<X> &x) {
    X *p = take<X>((int64_t)x.size());
    if (!x.empty()) { CUDA_CHECK(cudaMemcpyAsync(p, x.data(), x.size() * sizeof(X), cudaMemcpyHostToDevice, device.stream)); }
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    return p;
}
template <typename F> static F *up(const Floats &x) {
    std::vector<F> y;
    for (float v : x) { y.push_back(gpu::from_float<F>(v)); }
    return raw_up(y);
}
template <typename X> static std::vector<X> raw_down(const X *p, int64_t n) {
    std::vector<X> x((size_t)n);
    if (n > 0) { CUDA_CHECK(cudaMemcpyAsync(x.data(), p, x.size() * sizeof(X), cudaMemcpyDeviceToHost, device.stream)); }
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    return x;
}
template <typename F> static Floats down(const F *p, int64_t n) {
    Floats x;
    for (F v : raw_down(p, n)) { x.push_back(gpu::to_float(v)); }
    return x;
}
static void case_done(void) {
    CUDA_CHECK(cudaStreamSynchronize(device.stream));
    for (void *p : taken) { CUDA_CHECK(cudaFree(p)); }
    taken.clear();
}

template <typename F> constexpr const char *type_name() { return sizeof(F) == 2 ? "bf16" : "fp32"; }
static double error_of(const Floats &found, const Floats &expected) {
    double difference = 0, size = 0;
    cr_assert(found.size() == expected.size());
    for (size_t i = 0; i < found.size(); i++) {
        difference += ((double)found[i] - expected[i]) * ((double)found[i] - expected[i]);
        size += (double)expected[i] * expected[i];
    }
    return difference == 0 ? 0 : sqrt(difference / size); // NaN if there is one
}
static void close_at(int line, const char *type, const char *what, const Floats &found, const Floats &expected, double allowed, const char *shape) {
    double error = error_of(found, expected);
    if (getenv("KERNEL_ERRORS")) { fprintf(stderr, "error\t%s\t%s\t%.2e\tof %.1e, line %d, %s\n", type, what, error, allowed, line, shape); }
    cr_assert(error <= allowed, "line %d, %s: %s is off by %.3g, allowed %.3g, %s", line, type, what, error, allowed, shape);
}
// What is `found` in F; allowed in fp32 and in bf16
#define CLOSE(found, expected, fp32, bf, ...) close_at(__LINE__, type_name<F>(), #expected, found, expected, sizeof(F) == 2 ? (bf) : (fp32), text_format(__VA_ARGS__))
#define EQUAL(found, expected, ...) cr_assert((found) == (expected), #found ": other numbers than expected, %s", text_format(__VA_ARGS__))
constexpr double FP32 = 1e-6, BF16 = 2.5e-3; // see the top
// of what contains a sum of n terms: the CPU adds them one after the other where it has no SIMD, which is off by up to 5e-6 for n = 6021
static double sum_of(int64_t n) { return n > 1000 ? 1e-5 : FP32; }

static void open_device(void) {
#ifdef _OPENMP
    omp_set_num_threads(1); // Criterion runs tests side by side
#endif
#ifdef CUDA_EMU
    setenv("CUDA_EMU_CHECK", "1", 1);
#endif
    gpu::gpu_open(&device, 0, 0, 1);
#ifdef CUDA_EMU // which doesn't use cuBLAS's work space: no need to copy it at each kernel
    CUDA_CHECK(cudaFree(device.workspace));
    CUDA_CHECK(cudaMallocHost(&device.workspace, gpu::WORKSPACE));
#endif
}
TestSuite(kernels, .init = open_device, .timeout = 100);
#ifndef ONLY // -DONLY='"rmsnorm"' compiles that pair of tests alone, which is quicker (dev/test/mutate.sh)
#define ONLY ""
#endif
constexpr bool wanted(std::string_view kernel) { return std::string_view(ONLY) == "" || std::string_view(ONLY) == kernel; }
#define BOTH(kernel) \
    Test(kernels, kernel##_fp32) { if constexpr (wanted(#kernel)) { kernel<float>(); } } \
    Test(kernels, kernel##_bf16) { if constexpr (wanted(#kernel)) { kernel<bf16>(); } }

// ----------------------------------------------------------------------------------------------------
// Is the order of warps checked at all?

__global__ void neighbour_kernel(int32_t *x) { // lacks a barrier between its lines
    __shared__ int32_t seen[64];
    seen[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = seen[63 - threadIdx.x];
}
#ifdef CUDA_EMU
Test(kernels, a_missing_barrier_stops_the_test, .signal = SIGABRT) {
    Ints x(64);
    std::iota(x.begin(), x.end(), 1);
    neighbour_kernel<<<1, 64, 0, device.stream>>>(raw_up(x));
}
#else
Test(kernels, two_orders_of_warps) { cr_skip_test("a GPU orders warps as it likes: make test-emu runs each kernel with two orders"); }
#endif

// ----------------------------------------------------------------------------------------------------
// 3. Scale vectors

static ::GPT *host_model(const char *flags, int B, int T) {
    const char *argv[96] = {"test"};
    int argc = 1;
    char *text = text_format("--seq-len %d --batch %d %s", T, B, flags), *save = NULL;
    for (char *word = strtok_r(text, " ", &save); word; word = strtok_r(NULL, " ", &save)) { argv[argc++] = word; }
    static Config cfg;
    memset(&cfg, 0, sizeof cfg);
    config_defaults(&cfg);
    config_parse_flags(&cfg, argc, argv);
    presets_apply(&cfg);
    config_resolve(&cfg);
    auto *m = (::GPT *)calloc(1, sizeof(::GPT));
    gpt_build(m, &cfg);
    ::gpt_allocate(m, B, T);
    return m;
}
// theta, moments or gradients of the host, in table order, as they lie on the device
template <typename F> static Floats placed(const gpu::Model<F> *m, const float *x) {
    Floats y((size_t)m->num_eff, 0.0f);
    for (int i = 0; i < m->host->num_params; i++) {
        const Param *p = &m->host->params[i];
        for (int64_t r = 0; r < p->rows; r++) { std::copy_n(x + p->offset + r * p->cols, p->cols, y.begin() + m->places[(size_t)i].at + r * m->places[(size_t)i].ld); }
    }
    return y;
}
template <typename F> static Floats param_of(const gpu::Model<F> *m, const Floats &x, int i) {
    const gpu::Place *place = &m->places[(size_t)i];
    return cropped(x, m->host->params[i].rows, m->host->params[i].cols, place->ld, place->at);
}
template <typename X> static void overwrite(X *to, const Floats &x) { CUDA_CHECK(cudaMemcpy(to, x.data(), x.size() * sizeof(X), cudaMemcpyHostToDevice)); }
static Floats host_floats(const float *x, int64_t n) { return Floats(x, x + n); }

static const char *const scale_models[] = {
    "--variant noscale", "--variant baseline", "--variant hg", "--variant hg+ap", "--variant hg+dp", "--variant hg+dnp", "--variant or", "--variant dp+er", "--variant unified",
    "--variant unified --placement q=ap,k=dp,v=dnp,gate=input,up=dnp,head=dp,o=dp,down=dnp",
    "--variant unified --tie-embeddings on", "--variant noscale --tie-embeddings on", "--variant hg+dp --tie-embeddings on",
    "--variant dp --channels 144 --heads 4 --hidden 200",
    "--variant unified --experts 3 --top-k 2 --expert-hidden 37 --shared-hidden 104",
};
static char *small_model(const char *flags) {
    return text_format("--layers 1 %s %s %s %s", strstr(flags, "vocab") ? "" : "--vocab 259", strstr(flags, "channels") ? "" : "--channels 72 --heads 3 --kv-heads 1", strstr(flags, "hidden") ? "" : "--hidden 101", flags);
}
template <typename F> static void reparameterize(void) {
    for (const char *flags : scale_models) {
        ::GPT *host = host_model(small_model(flags), 1, 4);
        gpu::Model<F> *m = gpu::gpt_allocate<F>(host, &device, 1, 4);
        for (int64_t i = 0; i < host->num_theta; i++) { host->theta[i] = (float)(0.3 + noise()); }
        ::reparameterize_forward(host);
        Floats theta = placed(m, host->theta);
        theta.resize((size_t)m->num_theta);
        overwrite(m->theta, theta);
        gpu::reparameterize_forward(m);
        Floats eff = down(m->theta_eff, m->num_eff), gamma = down(m->gamma, m->num_gamma);
        for (int i = 0; i < host->num_maps; i++) {
            const LinearMap *map = &host->maps[i];
            Floats w_eff = host_floats(map->w_eff, map->rows * map->cols);
            CLOSE(cropped(eff, map->rows, map->cols, m->maps[(size_t)i].ld, m->maps[(size_t)i].eff), w_eff, FP32, BF16, "map %d, %s", i, flags);
        }
        Floats embedding = host_floats(host->theta + host->params[0].offset, host->params[0].rows * host->params[0].cols);
        CLOSE(param_of(m, eff, 0), embedding, FP32, BF16, "%s", flags);
        for (int i = 0; i < host->num_params; i++) {
            const Param *p = &host->params[i];
            if (p->gamma < 0) { continue; }
            Floats scale_vector = host_floats(host->gamma + p->gamma, p->cols);
            CLOSE(cropped(gamma, 1, p->cols, 0, m->places[(size_t)i].gamma), scale_vector, FP32, FP32, "%s, %s", p->name, flags);
        }

        // dW~ of each map and dgamma of the Output-Norms are random; those of vectors that are folded into maps begin at 0
        for (int64_t i = 0; i < host->num_theta; i++) { host->grads[i] = (float)noise(); }
        std::fill_n(host->dgamma, host->num_gamma, 0.0f);
        Floats grads = placed(m, host->grads), dgamma((size_t)m->num_gamma, 0.0f);
        for (int i = 0; i < host->num_maps; i++) {
            const LinearMap *map = &host->maps[i];
            for (int64_t j = 0; j < map->rows * map->cols; j++) {
                map->dw_eff[j] = (float)noise();
                grads[(size_t)(m->maps[(size_t)i].eff + j / map->cols * m->maps[(size_t)i].ld + j % map->cols)] = map->dw_eff[j];
            }
        }
        for (int i = 0; i < host->num_params; i++) {
            const Param *p = &host->params[i];
            for (int64_t j = 0; p->role == ROLE_GAMMA_NORM && p->gamma >= 0 && j < p->cols; j++) {
                dgamma[(size_t)(m->places[(size_t)i].gamma + j)] = host->dgamma[p->gamma + j] = (float)noise();
            }
        }
        overwrite(m->grads, grads);
        if (m->num_gamma) { overwrite(m->dgamma, dgamma); }
        ::reparameterize_backward(host);
        gpu::reparameterize_backward(m);
        grads = down(m->grads, m->num_eff);
        for (int i = 0; i < host->num_params; i++) {
            const Param *p = &host->params[i];
            Floats dtheta = host_floats(host->grads + p->offset, p->rows * p->cols);
            // sums of up to 259 terms that cancel: dalpha and dbeta are small beside their terms
            CLOSE(param_of(m, grads, i), dtheta, 3e-6, 3e-6, "%s, %s", p->name, flags);
        }
        gpu::gpt_free(m);
    }
}
BOTH(reparameterize)

// ----------------------------------------------------------------------------------------------------
// 4. Layers

// out, dinp and dw with gaps between rows, which stay as they are; dw written, then added to
template <typename F> static void matmul_layers(void) {
    struct { int64_t N, C, OC; } shapes[] = {{37, 72, 104}, {1, 104, 264}, {130, 8, 40}};
    for (auto [N, C, OC] : shapes) {
        int64_t ldi = C + 8, ldw = C + 16, ldo = OC + 8;
        Floats inp = random_of<F>(N * C), w = random_of<F>(OC * C), dout = random_of<F>(N * OC);
        Floats out((size_t)(N * OC)), dinp((size_t)(N * C)), dw((size_t)(OC * C)), gap((size_t)(N * 8), 3.0f);
        F *d_inp = up<F>(spaced(inp, N, C, ldi, NAN)), *d_w = up<F>(spaced(w, OC, C, ldw, NAN)), *d_dout = up<F>(spaced(dout, N, OC, ldo, NAN));
        F *d_out = up<F>(Floats((size_t)(N * ldo), 3)), *d_dinp = up<F>(Floats((size_t)(N * ldi), 3));
        float *d_wide = up<float>(Floats((size_t)(N * ldo), 3)), *d_dw = up<float>(Floats((size_t)(OC * ldw), 3));
        ::matmul_forward(out.data(), inp.data(), w.data(), N, C, OC);
        gpu::matmul_forward(&device, d_out, ldo, (const F *)d_inp, ldi, (const F *)d_w, ldw, N, C, OC);
        CLOSE(cropped(down(d_out, N * ldo), N, OC, ldo), out, FP32, BF16, "N %d C %d OC %d", (int)N, (int)C, (int)OC);
        EQUAL(cropped(down(d_out, N * ldo), N, 8, ldo, OC), gap, "gaps of out");
        gpu::matmul_forward(&device, d_wide, ldo, (const F *)d_inp, ldi, (const F *)d_w, ldw, N, C, OC);
        CLOSE(cropped(down(d_wide, N * ldo), N, OC, ldo), out, FP32, FP32, "fp32 out, N %d C %d OC %d", (int)N, (int)C, (int)OC);
        gpu::matmul_backward_input(&device, d_dinp, ldi, (const F *)d_dout, ldo, (const F *)d_w, ldw, N, C, OC);
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            ::matmul_backward(dinp.data(), dw.data(), dout.data(), inp.data(), w.data(), N, C, OC, accumulate);
            gpu::matmul_backward_weight(&device, d_dw, ldw, (const F *)d_dout, ldo, (const F *)d_inp, ldi, N, C, OC, accumulate);
            CLOSE(cropped(down(d_dw, OC * ldw), OC, C, ldw), dw, FP32, FP32, "accumulate %d, N %d C %d OC %d", accumulate, (int)N, (int)C, (int)OC);
        }
        CLOSE(cropped(down(d_dinp, N * ldi), N, C, ldi), dinp, FP32, BF16, "N %d C %d OC %d", (int)N, (int)C, (int)OC);
        case_done();
    }
}
BOTH(matmul_layers)

// every transposition, with batches, alpha and beta, in both output types, and with K = 0
template <typename F, typename Out> static void matmul_general(void) {
    int64_t M = 24, N = 40, batch = 3;
    for (int mode = 0; mode < 8; mode++) {
        int ta = mode & 1, tb = mode >> 1 & 1;
        int64_t K = mode >> 2 ? 0 : 56, lda = ta ? M : K + 8, ldb = tb ? K + 8 : N, ldc = N + 8, sa = (ta ? K : M) * lda + 16, sb = (tb ? N : K) * ldb + 8, sc = M * ldc + 24;
        float alpha = 0.5f, beta = mode == 3 || mode == 7 ? 0.0f : 0.25f;
        Floats a = random_of<F>(batch * sa), b = random_of<F>(batch * sb), c = random_of<Out>(batch * sc), product = c;
        for (int64_t i = 0; i < batch * M * N; i++) {
            int64_t n = i % N, row = i / N % M, s = i / N / M;
            double sum = 0;
            for (int64_t k = 0; k < K; k++) { sum += (double)a[(size_t)(s * sa + (ta ? k * lda + row : row * lda + k))] * b[(size_t)(s * sb + (tb ? n * ldb + k : k * ldb + n))]; }
            float *to = &product[(size_t)(s * sc + row * ldc + n)];
            *to = (float)(alpha * sum + beta * *to);
        }
        if (K == 0 && beta != 0) { continue; } // there beta is 1
        Out *d_c = up<Out>(c);
        gpu::matmul<F, Out>(&device, d_c, ldc, sc, gpu::Matrix{up<F>(a), lda, sa, ta}, gpu::Matrix{up<F>(b), ldb, sb, tb}, M, N, K, alpha, beta, d_c, batch);
        CLOSE(down(d_c, batch * sc), product, FP32, sizeof(Out) == 4 ? FP32 : BF16, "transposed %d %d, K %d", ta, tb, (int)K);
        case_done();
    }
}
Test(kernels, matmul_general_fp32) { matmul_general<float, float>(); }
Test(kernels, matmul_general_bf16) { matmul_general<bf16, bf16>(); }
Test(kernels, matmul_general_bf16_to_fp32) { matmul_general<bf16, float>(); }

template <typename F> static void embedding(void) {
    struct { int64_t N, C; int V; } shapes[] = {{37, 72, 259}, {600, 74, 5}, {1, 264, 1}};
    for (auto [N, C, V] : shapes) {
        int64_t ld = round_up(C, 8);
        Ints inputs = random_ints(N, V), order((size_t)N), tokens, runs;
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return inputs[(size_t)a] < inputs[(size_t)b]; });
        for (int32_t i = 0; i < N; i++) {
            int32_t token = inputs[(size_t)order[(size_t)i]];
            if (tokens.empty() || tokens.back() != token) { tokens.push_back(token); runs.push_back(i); }
        }
        runs.push_back((int32_t)N);
        Floats table = random_of<F>(V * C), dout = random_of<F>(N * C), dembedding = random_floats(V * C), out((size_t)(N * C));
        F *d_out = take<F>(N * C);
        ::embedding_forward(out.data(), table.data(), inputs.data(), N, C);
        gpu::embedding_forward(&device, d_out, (const F *)up<F>(spaced(table, V, C, ld)), raw_up(inputs), N, C, ld);
        EQUAL(down(d_out, N * C), out, "N %d C %d V %d", (int)N, (int)C, V);
        float *d_dembedding = up<float>(spaced(dembedding, V, C, ld, 5));
        ::embedding_backward(dembedding.data(), dout.data(), inputs.data(), N, C);
        gpu::embedding_backward(&device, d_dembedding, (const F *)up<F>(dout), raw_up(order), raw_up(tokens), raw_up(runs), (int)tokens.size(), C, ld);
        CLOSE(down(d_dembedding, V * ld), spaced(dembedding, V, C, ld, 5), FP32, FP32, "N %d C %d V %d", (int)N, (int)C, V);
        case_done();
    }
}
BOTH(embedding)

// Rows of one norm, or of three experts, of which one has no rows; row 600 is beyond the 512 blocks that share out dgamma; 4104 columns
// are beyond the 512 threads of a block, and 12040 sums of dgamma beyond shared memory.
struct NormShape { int64_t N, D; int scaled, experts; };
static const NormShape norm_shapes[] = {{37, 72, 1, 1}, {37, 72, 0, 1}, {600, 74, 1, 1}, {1, 264, 1, 1}, {3, 4104, 1, 1}, {2, 12040, 1, 1}, {37, 72, 1, 3}, {600, 10, 1, 3}, {37, 36, 0, 3}};
struct ExpertRows { Ints begin; int64_t stride; int E; Rows rows; };
static ExpertRows expert_rows(const NormShape &s) { // 5 rows are of nobody
    ExpertRows e = {{0, (int32_t)s.N}, round_up(s.D, 8), s.experts, {s.N, NULL, s.experts}};
    if (s.experts == 3) {
        e.begin = {0, (int32_t)(s.N / 3), (int32_t)(s.N / 3), (int32_t)s.N - 5};
        e.rows.begin = raw_up(e.begin);
    }
    return e;
}
template <typename F> static void rmsnorm(void) {
    for (const NormShape &s : norm_shapes) {
        auto [N, D, scaled, experts] = s;
        ExpertRows of = expert_rows(s);
        Floats inp = random_of<F>(N * D, 1, 0.2), gamma = random_floats(experts * of.stride, 1, 1), dout = random_of<F>(N * D), start = random_of<F>(N * D), dgamma = random_floats(experts * of.stride);
        Floats out((size_t)(N * D), 7), rstd((size_t)N, 7), dinp((size_t)(N * D), 7), dadd = start, work((size_t)(NUM_BLOCKS * D));
        F *d_inp = up<F>(inp), *d_dout = up<F>(dout), *d_out = up<F>(out), *d_dinp = up<F>(dinp), *d_dadd = up<F>(start);
        float *d_rstd = up<float>(rstd), *d_gamma = scaled ? up<float>(gamma) : NULL, *d_dgamma = up<float>(dgamma), *d_partial = take<float>((gpu::ROW_BLOCKS + 3) * D);
        Floats dgamma2 = dgamma;
        for (int e = 0; e < experts; e++) {
            int64_t r = of.begin[(size_t)e], n = of.begin[(size_t)e + 1] - r;
            float *g = scaled ? gamma.data() + e * of.stride : NULL;
            ::rmsnorm_forward(out.data() + r * D, rstd.data() + r, inp.data() + r * D, g, n, 1, D, D);
            ::rmsnorm_backward(dinp.data() + r * D, dgamma.data() + e * of.stride, work.data(), dout.data() + r * D, inp.data() + r * D, rstd.data() + r, g, n, 1, D, D, 0);
            ::rmsnorm_backward(dadd.data() + r * D, dgamma2.data() + e * of.stride, work.data(), dout.data() + r * D, inp.data() + r * D, rstd.data() + r, g, n, 1, D, D, 1);
        }
        char *shape = text_format("N %d D %d scaled %d experts %d", (int)N, (int)D, scaled, experts);
        gpu::rmsnorm_forward(&device, d_out, d_rstd, (const F *)d_inp, d_gamma, of.rows, D, of.stride);
        CLOSE(down(d_out, N * D), out, sum_of(D), BF16, "%s", shape);
        CLOSE(down(d_rstd, N), rstd, sum_of(D), sum_of(D), "%s", shape);
        float *d_given = up<float>(rstd);
        gpu::rmsnorm_backward(&device, d_dinp, d_dgamma, d_partial, (const F *)d_dout, (const F *)d_inp, d_given, d_gamma, of.rows, D, 0, of.stride);
        CLOSE(down(d_dinp, N * D), dinp, sum_of(D), BF16, "%s", shape);
        CLOSE(down(d_dgamma, experts * of.stride), dgamma, sum_of(D), sum_of(D), "%s", shape);
        gpu::rmsnorm_backward(&device, d_dadd, d_dgamma, d_partial, (const F *)d_dout, (const F *)d_inp, d_given, d_gamma, of.rows, D, 1, of.stride);
        CLOSE(down(d_dadd, N * D), dadd, sum_of(D), BF16, "added, %s", shape);
        for (int blocks : {1, 7}) { // other numbers of blocks and threads than the launcher's: same rows
            F *walked = up<F>(out);
            BY_WIDTH(F, D, (gpu::rmsnorm_forward_kernel<F, W><<<dim3((unsigned)blocks, (unsigned)experts), 32 * blocks, 0, device.stream>>>(walked, d_rstd, d_inp, d_gamma, of.rows, D, of.stride)));
            CLOSE(down(walked, N * D), out, sum_of(D), BF16, "%d blocks, %s", blocks, shape);
        }
        if (!scaled && experts == 1) {
            F *again = take<F>(N * D);
            gpu::rmsnorm_again(&device, again, d_given, (const F *)d_inp, N, D);
            CLOSE(down(again, N * D), out, sum_of(D), BF16, "again, %s", shape);
        }
        case_done();
    }
}
BOTH(rmsnorm)

template <typename F> static void residual_rmsnorm(void) {
    for (int mode = 0; mode < 9; mode++) {
        int64_t N = mode / 3 ? 5 : 37, D = mode / 3 == 0 ? 72 : mode / 3 == 1 ? 74 : 4104;
        int norm = mode % 3 > 0, scaled = mode % 3 == 2;
        Floats x = random_of<F>(N * D), branch = random_of<F>(N * D, 1, 0.3), gamma = random_floats(D, 1, 1), unit = branch;
        Floats sum((size_t)(N * D)), out((size_t)(N * D)), rstd((size_t)N), branch_rstd((size_t)N);
        F *d_sum = take<F>(N * D), *d_out = take<F>(N * D);
        float *d_rstd = take<float>(N), *d_branch_rstd = take<float>(N);
        gpu::residual_rmsnorm_forward(&device, d_sum, d_out, d_rstd, norm ? d_branch_rstd : (float *)NULL, (const F *)up<F>(x), (const F *)up<F>(branch), scaled ? up<float>(gamma) : (float *)NULL, N, D);
        if (norm) {
            ::rmsnorm_forward(unit.data(), branch_rstd.data(), branch.data(), scaled ? gamma.data() : NULL, N, 1, D, D);
            CLOSE(down(d_branch_rstd, N), branch_rstd, sum_of(D), sum_of(D), "mode %d", mode);
        }
        ::residual_forward(sum.data(), x.data(), unit.data(), N * D);
        CLOSE(down(d_sum, N * D), sum, sum_of(D), BF16, "mode %d", mode);
        sum = down(d_sum, N * D); // the norm is of the sum as it is stored
        ::rmsnorm_forward(out.data(), rstd.data(), sum.data(), NULL, N, 1, D, D);
        CLOSE(down(d_out, N * D), out, sum_of(D), BF16, "mode %d", mode);
        CLOSE(down(d_rstd, N), rstd, sum_of(D), sum_of(D), "mode %d", mode);
        case_done();
    }
}
BOTH(residual_rmsnorm)

static void rope_tables(Floats &cosines, Floats &sines, int T, int HS) {
    cosines.clear();
    sines.clear();
    for (int i = 0; i < T * (HS / 2); i++) {
        double angle = i / (HS / 2) * pow(ROPE_THETA, -(double)(i % (HS / 2)) / (HS / 2));
        cosines.push_back((float)cos(angle));
        sines.push_back((float)sin(angle));
    }
}
// norms: bit 0, 1, 2 of q, k, v; scaled likewise
template <typename F> static void qkv(void) {
    struct { int B, T, NH, KVH, HS, norms, scaled; } shapes[] = {
        {2, 37, 3, 1, 24, 0, 0}, {2, 37, 3, 1, 24, 7, 7}, {1, 37, 4, 2, 36, 3, 0}, {1, 5, 4, 4, 64, 3, 3}, {2, 5, 2, 1, 128, 7, 5}, {1, 3, 2, 1, 256, 7, 7}, {15, 37, 2, 1, 8, 7, 7}, {1, 9, 20, 4, 64, 5, 4}};
    for (auto [B, T, NH, KVH, HS, norms, scaled] : shapes) {
        int64_t N = B * T, heads = NH + 2 * KVH, Q = heads * HS;
        char *shape = text_format("B %d T %d NH %d KVH %d HS %d norms %d scaled %d", B, T, NH, KVH, HS, norms, scaled);
        Floats cosines, sines, raw = random_of<F>(N * Q, 1, 0.2), dqkv = random_of<F>(N * Q), gamma = random_floats(Q, 1, 1), dgamma = random_floats(Q);
        rope_tables(cosines, sines, T, HS);
        Floats turned = raw, draw = dqkv, rstd((size_t)(N * heads), 7), work((size_t)(NUM_BLOCKS * Q));
        F *d_raw = up<F>(raw), *d_qkv = norms ? take<F>(N * Q) : up<F>(raw), *d_dqkv = up<F>(dqkv);
        float *d_rstd = up<float>(rstd), *d_cosines = up<float>(cosines), *d_sines = up<float>(sines), *d_gamma = up<float>(gamma), *d_dgamma = up<float>(dgamma), *d_partial = take<float>(gpu::ROW_BLOCKS * Q);
        gpu::HeadNorms head_norms = {};
        float *to_dgamma[3] = {};
        ::rope(draw.data(), cosines.data(), sines.data(), N, T, NH + KVH, HS, Q, -1);
        for (int site = 0; site < 3; site++) {
            int first = site == 0 ? 0 : site == 1 ? NH : NH + KVH, G = site == 0 ? NH : KVH;
            if (!(norms >> site & 1)) { continue; }
            bool scales = scaled >> site & 1;
            Floats r((size_t)(N * G));
            head_norms.norm[site] = 1;
            if (scales) { head_norms.gamma[site] = d_gamma + first * HS; to_dgamma[site] = d_dgamma + first * HS; }
            float *g = scales ? gamma.data() + first * HS : NULL;
            ::rmsnorm_forward(turned.data() + first * HS, r.data(), raw.data() + first * HS, g, N, G, HS, Q);
            ::rmsnorm_backward(draw.data() + first * HS, dgamma.data() + first * HS, work.data(), draw.data() + first * HS, raw.data() + first * HS, r.data(), g, N, G, HS, Q, 0);
            for (int64_t i = 0; i < N * G; i++) { rstd[(size_t)(i / G * heads + first + i % G)] = r[(size_t)i]; }
        }
        ::rope(turned.data(), cosines.data(), sines.data(), N, T, NH + KVH, HS, Q, 1);
        gpu::qkv_forward(&device, d_qkv, d_rstd, (const F *)(norms ? d_raw : d_qkv), d_cosines, d_sines, head_norms, N, T, NH, KVH, HS);
        CLOSE(down(d_qkv, N * Q), turned, FP32, BF16, "%s", shape);
        CLOSE(down(d_rstd, N * heads), rstd, FP32, FP32, "%s", shape);
        gpu::qkv_backward(&device, d_dqkv, to_dgamma, d_partial, (const F *)d_raw, up<float>(rstd), d_cosines, d_sines, head_norms, N, T, NH, KVH, HS);
        CLOSE(down(d_dqkv, N * Q), draw, FP32, BF16, "%s", shape);
        CLOSE(down(d_dgamma, Q), dgamma, FP32, FP32, "%s", shape);
        case_done();
    }
}
BOTH(qkv)

// q, k, v large enough that some scores stand out and the maximum rises along a row
template <typename F> static void attention(void) {
    struct { int B, T, NH, KVH, HS; } shapes[] = {{2, 37, 3, 1, 24}, {1, 37, 4, 2, 36}, {2, 37, 2, 1, 64}, {1, 150, 2, 1, 64}, {1, 1, 2, 2, 64}, {1, 70, 2, 2, 128}, {1, 9, 1, 1, 256}};
    for (auto [B, T, NH, KVH, HS] : shapes) {
        int64_t N = B * T, Q = (NH + 2 * KVH) * HS, A = NH * HS, parts[] = {0, A, A + KVH * HS, Q};
        char *shape = text_format("B %d T %d NH %d KVH %d HS %d", B, T, NH, KVH, HS);
        Floats qkv = random_of<F>(N * Q, 2), dout = random_of<F>(N * A), out((size_t)(N * A)), lse((size_t)(B * NH * T)), D((size_t)(B * NH * T)), dqkv((size_t)(N * Q));
        F *d_qkv = up<F>(qkv), *d_out = take<F>(N * A), *d_dqkv = take<F>(N * Q);
        float *d_lse = take<float>(B * NH * T), *d_D = take<float>(B * NH * T);
        ::attention_forward(out.data(), lse.data(), qkv.data(), B, T, NH, KVH, HS);
        gpu::attention_forward(&device, d_out, d_lse, (const F *)d_qkv, B, T, NH, KVH, HS);
        CLOSE(down(d_out, N * A), out, 2e-6, 3e-3, "%s", shape); // on tensor cores P is rounded as well: seen are 1.9e-3, and of gradients 2.4e-3
        CLOSE(down(d_lse, B * NH * T), lse, 2e-6, 2e-6, "%s", shape);
        out = rounded<F>(out);
        ::attention_backward(dqkv.data(), D.data(), dout.data(), qkv.data(), out.data(), lse.data(), B, T, NH, KVH, HS);
        gpu::attention_backward(&device, d_dqkv, d_D, (const F *)up<F>(dout), (const F *)d_qkv, (const F *)up<F>(out), up<float>(lse), B, T, NH, KVH, HS);
        Floats found = down(d_dqkv, N * Q);
        if (T == 1) { // the softmax of one score is constant: of q and k there is no gradient, just its rounding
            CLOSE(found, dqkv, 2e-6, 5e-3, "%s", shape);
            case_done();
            continue;
        }
        for (int i = 0; i < 3; i++) {
            Floats gradient = cropped(dqkv, N, parts[i + 1] - parts[i], Q, parts[i]);
            CLOSE(cropped(found, N, parts[i + 1] - parts[i], Q, parts[i]), gradient, 2e-6, 5e-3, "of %c, %s", "qkv"[i], shape);
        }
        case_done();
    }
}
BOTH(attention)

// norms, scaled: bit 0 of gate, bit 1 of up
template <typename F> static void swiglu(void) {
    struct { int64_t N, H; int norms, scaled, experts; } shapes[] = {{37, 101, 0, 0, 1}, {37, 101, 3, 3, 1}, {1, 8, 1, 1, 1}, {600, 10, 2, 2, 1}, {600, 5, 3, 1, 3}, {37, 101, 3, 0, 3}, {37, 37, 3, 3, 3}, {2, 6021, 3, 3, 1}};
    for (auto [N, H, norms, scaled, experts] : shapes) {
        int64_t ld = round_up(H, 8);
        char *shape = text_format("N %d H %d norms %d scaled %d experts %d", (int)N, (int)H, norms, scaled, experts);
        ExpertRows of = expert_rows({N, 2 * ld, 1, experts});
        Floats raw = random_of<F>(N * 2 * H, 2, 0.2), gamma = random_floats(experts * of.stride, 1, 1), dh = random_of<F>(N * H), dgamma = random_floats(experts * of.stride);
        Floats gu = raw, h((size_t)(N * H)), dgu((size_t)(N * 2 * H)), rstd((size_t)(2 * N), 1), work((size_t)(NUM_BLOCKS * H)), padded_gamma((size_t)(experts * of.stride), 0.0f);
        for (int e = 0; e < experts; e++) { // gate at 0, up at ld, pads are zeros
            for (int64_t i = 0; i < 2 * H; i++) { padded_gamma[(size_t)(e * of.stride + i / H * ld + i % H)] = gamma[(size_t)(e * of.stride + i / H * ld + i % H)]; }
        }
        auto norm = [&](int backward) {
            for (int e = 0; e < experts; e++) {
                int64_t r = of.begin[(size_t)e], n = of.begin[(size_t)e + 1] - r;
                for (int side = 0; side < 2; side++) {
                    if (!(norms >> side & 1)) { continue; }
                    int64_t at = r * 2 * H + side * H, g_at = e * of.stride + side * ld;
                    float *g = scaled >> side & 1 ? gamma.data() + g_at : NULL;
                    Floats side_rstd((size_t)n);
                    ::rmsnorm_forward(gu.data() + at, side_rstd.data(), raw.data() + at, g, n, 1, H, 2 * H);
                    for (int64_t i = 0; i < n; i++) { rstd[(size_t)(2 * (r + i) + side)] = side_rstd[(size_t)i]; }
                    if (backward) { ::rmsnorm_backward(dgu.data() + at, dgamma.data() + g_at, work.data(), dgu.data() + at, raw.data() + at, side_rstd.data(), g, n, 1, H, 2 * H, 0); }
                }
            }
        };
        norm(0);
        int64_t rows = of.begin.back(); // those of nobody are left out
        ::swiglu_forward(h.data(), gu.data(), rows, H);
        float *d_gamma = up<float>(padded_gamma), *d_dgamma = up<float>(dgamma), *d_rstd = up<float>(Floats((size_t)(2 * N), 1));
        gpu::GateUpNorms of_norms = {scaled & 1 ? d_gamma : NULL, scaled & 2 ? d_gamma + ld : NULL, norms & 1, norms >> 1, of.stride};
        F *d_gu = up<F>(spaced(raw, 2 * N, H, ld)), *d_h = up<F>(Floats((size_t)(N * ld))), *d_dgu = up<F>(Floats((size_t)(N * 2 * ld)));
        gpu::swiglu_forward(&device, d_h, d_rstd, (const F *)d_gu, of_norms, of.rows, H, ld);
        CLOSE(down(d_h, N * ld), spaced(h, N, H, ld), sum_of(H), BF16, "%s", shape);
        if (norms) { CLOSE(down(d_rstd, 2 * N), rstd, sum_of(H), sum_of(H), "%s", shape); }
        gpu::swiglu_forward_kernel<F><<<dim3(3, (unsigned)experts), 64, 0, device.stream>>>(d_h, d_rstd, d_gu, of_norms, of.rows, H, ld);
        LAUNCHED();
        CLOSE(down(d_h, N * ld), spaced(h, N, H, ld), sum_of(H), BF16, "3 blocks, %s", shape);
        ::swiglu_backward(dgu.data(), dh.data(), gu.data(), rows, H);
        norm(1);
        F *again = up<F>(Floats((size_t)(N * ld)));
        gpu::swiglu_backward(&device, d_dgu, again, d_dgamma, d_dgamma + ld, take<float>((gpu::ROW_BLOCKS + 3) * 2 * ld), (const F *)up<F>(spaced(dh, N, H, ld)), (const F *)d_gu, up<float>(rstd), of_norms, of.rows, H, ld);
        CLOSE(down(d_dgu, N * 2 * ld), spaced(dgu, 2 * N, H, ld), sum_of(H), BF16, "%s", shape);
        CLOSE(down(again, N * ld), spaced(h, N, H, ld), sum_of(H), BF16, "h again, %s", shape);
        CLOSE(down(d_dgamma, experts * of.stride), dgamma, sum_of(H), sum_of(H), "%s", shape);
        case_done();
    }
}
BOTH(swiglu)

// With chunks of `chunk` rows, one after the other, as head_loss does. 9003 columns are beyond the 1024 threads of a block.
template <typename F> static void classifier(void) {
    struct { int64_t rows, V, chunk; int norm, scaled; float grad_scale; } shapes[] = {
        {37, 259, 37, 0, 0, 0.1f}, {37, 259, 13, 1, 1, 0.1f}, {70, 5, 70, 1, 1, 2.0f}, {5, 259, 5, 1, 0, 0.1f}, {5, 259, 5, 0, 0, 0}, {5, 259, 2, 1, 1, 0}, {3, 9003, 3, 0, 0, 0.1f}, {3, 9003, 3, 1, 1, 0.1f}, {1, 8, 1, 0, 0, 1}};
    for (auto [rows, V, chunk, norm, scaled, grad_scale] : shapes) {
        int64_t ld = round_up(V, 8);
        char *shape = text_format("rows %d V %d chunk %d norm %d scaled %d scale %g", (int)rows, (int)V, (int)chunk, norm, scaled, grad_scale);
        Ints targets = random_ints(rows, (int)V);
        targets[0] = (int32_t)V - 1;
        Floats z = random_of<F>(rows * V, 4, 0.5), gamma = random_floats(V, 1, 1.5), dgamma = random_floats(V), work((size_t)(NUM_BLOCKS * V)), partial = work, dz = z;
        std::vector<double> losses((size_t)rows);
        F *d_z = up<F>(spaced(z, rows, V, ld));
        float *d_losses = take<float>(rows), *d_gamma = scaled ? up<float>(spaced(gamma, 1, V, ld)) : NULL, *d_dgamma = up<float>(dgamma), *d_stats = take<float>(3 * chunk), *d_partial = take<float>(gpu::CLASSIFIER_PARTS * ld);
        int32_t *d_targets = raw_up(targets);
        ::classifier(dz.data(), losses.data(), targets.data(), rows, V, grad_scale, norm, scaled ? gamma.data() : NULL, dgamma.data(), work.data(), partial.data());
        for (int64_t n = 0; n < rows; n += chunk) {
            gpu::classifier(&device, d_z + n * ld, d_losses + n, d_targets + n, std::min(chunk, rows - n), V, ld, grad_scale, norm, d_gamma, d_dgamma, d_stats, d_partial);
        }
        Floats loss(losses.begin(), losses.end());
        CLOSE(down(d_losses, rows), loss, sum_of(V), sum_of(V), "%s", shape);
        if (grad_scale == 0) {
            EQUAL(down(d_z, rows * ld), spaced(z, rows, V, ld), "%s", shape);
        } else {
            CLOSE(down(d_z, rows * ld), spaced(dz, rows, V, ld), 2 * sum_of(V), BF16, "%s", shape);
        }
        CLOSE(down(d_dgamma, V), dgamma, sum_of(V), sum_of(V), "%s", shape);
        case_done();
    }
}
BOTH(classifier)

Test(kernels, logits_norm) {
    typedef float F;
    for (int with_gamma = 0; with_gamma < 2; with_gamma++) {
        int64_t V = 5003;
        Floats z = random_of<F>(V, 2, 0.5), gamma = random_floats(V, 1, 1), rstd(1), expected = z;
        ::rmsnorm_forward(expected.data(), rstd.data(), z.data(), with_gamma ? gamma.data() : NULL, 1, 1, V, V);
        float *d_z = up<float>(z);
        gpu::logits_norm_kernel<<<1, 1024, 0, device.stream>>>(d_z, with_gamma ? up<float>(gamma) : (float *)NULL, V);
        LAUNCHED();
        CLOSE(down(d_z, V), expected, sum_of(V), sum_of(V), "gamma %d", with_gamma);
        case_done();
    }
}

Test(kernels, column_sum) {
    typedef float F;
    struct { int64_t rows, cols, ld; int experts; } shapes[] = {{1, 37, 40, 1}, {7, 64, 64, 1}, {600, 101, 104, 2}, {512, 3, 8, 3}};
    for (auto [rows, cols, ld, experts] : shapes) {
        int64_t stride = cols + 5;
        Floats parts = random_floats(experts * rows * ld), sums = random_floats(experts * stride);
        float *d_sums = up<float>(sums);
        for (int64_t i = 0; i < experts * cols; i++) {
            double sum = 0;
            for (int64_t r = 0; r < rows; r++) { sum += parts[(size_t)((i / cols * rows + r) * ld + i % cols)]; }
            sums[(size_t)(i / cols * stride + i % cols)] += (float)sum;
        }
        gpu::column_sum(&device, d_sums, up<float>(parts), rows, cols, ld, experts, stride);
        CLOSE(down(d_sums, experts * stride), sums, FP32, FP32, "rows %d cols %d", (int)rows, (int)cols);
        case_done();
    }
}

Test(kernels, loss_sum) {
    for (int64_t n : {1, 37, 2500}) {
        Floats x = random_floats(n, 1, 3);
        std::vector<double> to = {0.5};
        double *d_to = raw_up(to);
        for (int twice = 0; twice < 2; twice++) { gpu::loss_sum_kernel<<<1, 1024, 0, device.stream>>>(d_to, up<float>(x), n, 0.25); }
        LAUNCHED();
        double expected = 0.5 + 2 * 0.25 * std::accumulate(x.begin(), x.end(), 0.0);
        cr_assert(fabs(raw_down(d_to, 1)[0] - expected) < 1e-12 * expected);
        case_done();
    }
}

// Router, dispatch and back. Logits are multiples of 1/4, so that ties occur; 600 tokens are more than two blocks count.
template <typename F> static void moe(void) {
    struct { int N, E, K, C; } shapes[] = {{37, 5, 2, 72}, {600, 37, 3, 10}, {1, 2, 1, 8}, {9, 40, 35, 8}, {300, 3, 3, 74}};
    for (auto [N, E, K, C] : shapes) {
        int64_t ld = round_up(E, 8), capacity = (int64_t)N * K + (int64_t)E * (gpu::MOE_ROWS - 1);
        int blocks = (int)ceil_div(N, gpu::ROUTER_TOKENS);
        char *shape = text_format("N %d E %d K %d C %d", N, E, K, C);
        Floats logits = random_floats((int64_t)N * E, 2, 0.5), probs, lse((size_t)N), weights((size_t)(N * K));
        for (float &z : logits) { z = rintf(4 * z) / 4; }
        probs = logits;
        Ints chosen((size_t)(N * K)), row((size_t)(N * K));
        std::vector<int64_t> begin((size_t)E + 1), tokens((size_t)E, 5);
        ::MoeActs s = {};
        s.probs = probs.data();
        s.lse = lse.data();
        s.weights = weights.data();
        s.chosen = chosen.data();
        s.row = row.data();
        s.begin = begin.data();
        static ::GPT host;
        host.balance_loss = host.z_loss = 0;
        ::router_choose(&s, N, E, K);
        ::router_sort(&host, &s, tokens.data(), N, E, K);

        float *d_probs = up<float>(spaced(logits, N, E, ld)), *d_lse = take<float>(N), *d_weights = take<float>(N * K), *d_sums = take<float>(blocks * (E + 1));
        int32_t *d_chosen = take<int32_t>(N * K), *d_row = take<int32_t>(N * K), *d_counts = take<int32_t>(blocks * E), *d_begin = take<int32_t>(E + 1), *d_count = take<int32_t>(E);
        int32_t *d_source = raw_up(Ints((size_t)capacity, -1));
        int64_t *d_tokens = raw_up(std::vector<int64_t>((size_t)E, 5));
        gpu::Stats *d_stats = raw_up(std::vector<gpu::Stats>(1));
        gpu::router_choose_kernel<<<(unsigned)ceil_div(N, 8), 256, 0, device.stream>>>(d_probs, d_lse, d_weights, d_chosen, N, E, ld, K);
        gpu::router_count_kernel<<<blocks, 256, 0, device.stream>>>(d_counts, d_sums, d_probs, d_lse, d_chosen, N, E, ld, K);
        gpu::router_scan_kernel<<<1, 1024, 0, device.stream>>>(d_begin, d_count, d_tokens, d_stats, d_counts, d_sums, blocks, N, E, K, 0.5);
        gpu::router_place_kernel<<<blocks, 256, 0, device.stream>>>(d_row, d_source, d_begin, d_counts, d_chosen, N, E, K);
        LAUNCHED();
        EQUAL(raw_down(d_chosen, N * K), chosen, "%s", shape);
        EQUAL(raw_down(d_tokens, E), tokens, "%s", shape);
        CLOSE(down(d_weights, N * K), weights, FP32, FP32, "%s", shape);
        CLOSE(cropped(down(d_probs, N * ld), N, E, ld), probs, FP32, FP32, "%s", shape);
        CLOSE(down(d_lse, N), lse, FP32, FP32, "%s", shape);
        gpu::Stats stats = raw_down(d_stats, 1)[0];
        cr_assert(fabs(stats.balance_loss - 0.5 * host.balance_loss) < 1e-6 * host.balance_loss && fabs(stats.z_loss - 0.5 * host.z_loss) < 1e-6 * host.z_loss, "%s", shape);
        Ints first = raw_down(d_begin, E + 1), at = raw_down(d_row, N * K), source = raw_down(d_source, capacity), count = raw_down(d_count, E);
        for (int e = 0; e < E; e++) {
            cr_assert(count[(size_t)e] == begin[(size_t)e + 1] - begin[(size_t)e] && first[(size_t)e + 1] - first[(size_t)e] == round_up(count[(size_t)e], gpu::MOE_ROWS), "%s", shape);
        }
        int64_t rows = first[(size_t)E];
        cr_assert(first[0] == 0 && rows <= capacity && std::count(source.begin(), source.end(), -1) == capacity - N * K, "%s", shape);
        for (int i = 0; i < N * K; i++) { // the same place within the expert's rows
            int32_t e = chosen[(size_t)i];
            cr_assert(at[(size_t)i] - first[(size_t)e] == row[(size_t)i] - begin[(size_t)e] && source[(size_t)at[(size_t)i]] == i, "%s", shape);
        }

        // to the experts' rows and back: the loops of ::moe_forward and ::moe_backward
        Floats inp = random_of<F>(N * C), y = random_of<F>(capacity * C), dout = random_of<F>(N * C), shared = random_of<F>(N * C), more = random_of<F>(N * C);
        Floats x((size_t)(capacity * C), 3), d_rows = x, combined = shared, added = more, d_of_weights((size_t)(N * K));
        std::fill_n(x.begin(), rows * C, 0.0f);
        std::fill_n(d_rows.begin(), rows * C, 0.0f);
        for (int i = 0; i < N * K; i++) {
            double dot = 0;
            for (int c = 0; c < C; c++) {
                size_t of_row = (size_t)(at[(size_t)i] * C + c), of_token = (size_t)(i / K * C + c);
                x[of_row] = inp[of_token];
                d_rows[of_row] = weights[(size_t)i] * dout[of_token];
                combined[of_token] += weights[(size_t)i] * y[of_row];
                added[of_token] += y[of_row];
                dot += (double)dout[of_token] * y[of_row];
            }
            d_of_weights[(size_t)i] = (float)dot;
        }
        F *d_x = up<F>(Floats((size_t)(capacity * C), 3)), *d_dinp_rows = up<F>(Floats((size_t)(capacity * C), 3)), *d_out = take<F>(N * C), *d_y = up<F>(y), *d_dout = up<F>(dout);
        float *d_dweights = take<float>(N * K), *d_given = up<float>(weights);
        unsigned threads = gpu::row_threads<F>(C);
        BY_WIDTH(F, C, (gpu::moe_gather_kernel<F, W><<<(unsigned)capacity, threads, 0, device.stream>>>(d_x, up<F>(inp), d_source, d_begin, E, K, C)));
        EQUAL(down(d_x, capacity * C), x, "%s", shape);
        BY_WIDTH(F, C, (gpu::moe_combine_kernel<F, W><<<(unsigned)N, threads, 0, device.stream>>>(d_out, up<F>(shared), (const F *)NULL, d_y, d_given, d_row, K, C)));
        CLOSE(down(d_out, N * C), combined, FP32, BF16, "%s", shape);
        BY_WIDTH(F, C, (gpu::moe_combine_kernel<F, W><<<(unsigned)N, threads, 0, device.stream>>>(d_out, (const F *)NULL, up<F>(more), d_y, (const float *)NULL, d_row, K, C)));
        CLOSE(down(d_out, N * C), added, FP32, BF16, "%s", shape);
        BY_WIDTH(F, C, (gpu::moe_scatter_kernel<F, W><<<(unsigned)capacity, threads, 0, device.stream>>>(d_dinp_rows, d_dweights, d_dout, d_y, d_given, d_source, d_begin, E, K, C)));
        CLOSE(down(d_dinp_rows, capacity * C), d_rows, FP32, BF16, "%s", shape);
        CLOSE(down(d_dweights, N * K), d_of_weights, FP32, FP32, "%s", shape);

        Floats d_logits((size_t)(N * E));
        host.d_logits = d_logits.data();
        host.grad_scale = 0.3;
        host.cfg.balance_loss = 0.01;
        host.cfg.router_z_loss = 0.002;
        ::router_backward(&host, &s, d_of_weights.data(), N, E, K);
        F *d_dlogits = take<F>(N * ld);
        gpu::router_backward_kernel<F><<<(unsigned)ceil_div(N, 8), 256, 0, device.stream>>>(d_dlogits, up<float>(d_of_weights), up<float>(spaced(probs, N, E, ld)), up<float>(lse), d_given, d_chosen, d_count,
            N, E, ld, K, 0.01 * E / (N * K) * 0.3, 2 * 0.002 * 0.3);
        LAUNCHED();
        CLOSE(down(d_dlogits, N * ld), spaced(d_logits, N, E, ld), 2e-6, BF16, "%s", shape);
        case_done();
    }
}
BOTH(moe)

// ----------------------------------------------------------------------------------------------------
// 6. Optimizers: two steps from random gradients, pads included. theta and moments are fp32 in both; only Muon's X is of type F.

template <typename F> static Floats placed_second(const gpu::Model<F> *m, const float *moments) {
    Floats y((size_t)m->num_v, 0.0f);
    for (int i = 0; i < m->host->num_params; i++) {
        const Param *p = &m->host->params[i];
        for (int64_t j = 0; p->v >= 0 && j < p->rows * p->cols; j++) { y[(size_t)(m->places[(size_t)i].v + j / p->cols * m->places[(size_t)i].ld + j % p->cols)] = moments[p->v + j]; }
    }
    return y;
}
template <typename F> static Floats placed_first(const gpu::Model<F> *m, const float *moments) {
    Floats table((size_t)m->host->num_theta, 0.0f);
    for (int i = 0; i < m->host->num_params; i++) {
        const Param *p = &m->host->params[i];
        if (p->m >= 0) { std::copy_n(moments + p->m, p->rows * p->cols, table.begin() + p->offset); }
    }
    return placed(m, table.data());
}
static Floats minus(Floats a, const Floats &b) {
    for (size_t i = 0; i < a.size(); i++) { a[i] -= b[i]; }
    return a;
}
template <typename F> static void optimizer(const char *flags, double muon = 1e-5) {
    ::GPT *host = host_model(small_model(flags), 1, 4);
    gpu::Model<F> *m = gpu::gpt_allocate<F>(host, &device, 1, 4);
    int64_t n = m->num_theta;
    auto cut = [&](Floats x) { x.resize((size_t)n); return x; };
    for (int64_t i = 0; i < host->num_theta; i++) { host->theta[i] = (float)noise(); }
    overwrite(m->theta, cut(placed(m, host->theta)));
    for (int step = 1; step <= 2; step++) { // the second is clipped
        Floats before = down(m->theta, n);
        for (int64_t i = 0; i < host->num_theta; i++) { host->grads[i] = (float)(noise() * (i % 7 ? 0.1 : 1e-4)); }
        overwrite(m->grads, placed(m, host->grads));
        std::vector<gpu::Stats> zeros(1);
        CUDA_CHECK(cudaMemcpy(m->stats, zeros.data(), sizeof(gpu::Stats), cudaMemcpyHostToDevice));
        double norm = ::gradient_norm(host), clip = step == 2 ? 0.25 * norm : 2 * norm, lr = 0.01 * step;
        host->cfg.grad_clip = clip;
        gpu::gradient_norm(m);
        gpu::Stats stats = raw_down(m->stats, 1)[0];
        cr_assert(fabs(stats.norm - norm) < 1e-6 * norm, "norm %.9g, expected %.9g", stats.norm, norm);
        cr_assert(fabs(stats.clip - (step == 2 ? 0.25 : 1)) < 1e-6, "clip %.9g", stats.clip);
        ::optimizer_step(host, step, lr, norm > clip ? clip / norm : 1);
        gpu::optimizer_step(m, step, lr);
        m->matrices_used = 0;
        Floats update = minus(cut(placed(m, host->theta)), before);
        Floats found = minus(down(m->theta, n), before), of_muon, of_rest, found_of_muon, found_of_rest;
        for (int i = 0; i < host->num_params; i++) {
            Floats theirs = param_of(m, update, i), ours = param_of(m, found, i);
            Floats &to = m->places[(size_t)i].muon ? of_muon : of_rest, &found_to = m->places[(size_t)i].muon ? found_of_muon : found_of_rest;
            to.insert(to.end(), theirs.begin(), theirs.end());
            found_to.insert(found_to.end(), ours.begin(), ours.end());
        }
        CLOSE(found_of_rest, of_rest, 1e-5, 1e-5, "step %d, %s", step, flags); // of an update of 0.01, theta's last bit, 6e-8, is 6e-6
        CLOSE(found_of_muon, of_muon, 1e-5, muon, "step %d, %s", step, flags);
        CLOSE(found, update, 1e-5, muon, "pads, step %d, %s", step, flags);
        if (m->m) {
            Floats first_moments = cut(placed_first(m, host->moments));
            CLOSE(down(m->m, n), first_moments, FP32, FP32, "step %d, %s", step, flags);
        }
        if (m->num_v) {
            Floats second_moments = placed_second(m, host->moments);
            CLOSE(down(m->v, m->num_v), second_moments, FP32, FP32, "step %d, %s", step, flags);
        }
        overwrite(m->theta, cut(placed(m, host->theta))); // differences don't add up
    }
    // a gradient that isn't finite: theta stays
    Floats before = down(m->theta, n), grads = placed(m, host->grads);
    grads[5] = INFINITY;
    overwrite(m->grads, grads);
    gpu::gradient_norm(m);
    gpu::optimizer_step(m, 4, 0.01);
    EQUAL(down(m->theta, n), before, "%s", flags);
    gpu::gpt_free(m);
}
template <typename F> static void adamw(void) { optimizer<F>("--vocab 37 --variant unified"); }
template <typename F> static void sgd(void) {
    optimizer<F>("--vocab 37 --optimizer sgd --sgd-momentum 0 --variant unified");
    optimizer<F>("--vocab 37 --optimizer sgd --sgd-momentum 0.9 --weight-decay 0 --variant baseline");
}
template <typename F> static void muon(void) {
    // X, its Gram matrix and their products are rounded to bf16 five times each, and singular values near 1 feel little of it
    // Experts: matrices of one shape and of its transpose, in one batch
    optimizer<F>("--vocab 37 --optimizer muon --variant unified --experts 2 --top-k 1 --expert-hidden 37 --shared-hidden 0", 2e-2);
}
BOTH(adamw)
BOTH(sgd)
BOTH(muon)

// ----------------------------------------------------------------------------------------------------
// Was each kernel of train_gpt2.cu launched, in two orders of warps? Known once all tests have run: status 1 and the names.

#ifdef CUDA_EMU
static int kernels_left_out(const std::string &launches) {
    std::string source, word;
    for (FILE *file = fopen("train_gpt2.cu", "rb"); file; fclose(file), file = NULL) { for (int c; (c = fgetc(file)) != EOF;) { source += (char)c; } }
    int kernels = 0, left_out = 0;
    for (size_t at = 0; (at = source.find("__global__", at)) != std::string::npos; at++) { // __global__ ... name_kernel(
        size_t end = source.find("_kernel(", at);
        if (end == std::string::npos) { break; }
        size_t begin = source.find_last_not_of("abcdefghijklmnopqrstuvwxyz_0123456789", end) + 1;
        std::string name = source.substr(begin, end - begin) + "_kernel";
        kernels++;
        bool checked = false;
        for (size_t line = 0, next; (next = launches.find('\n', line)) != std::string::npos; line = next + 1) {
            word = launches.substr(line, next - line);
            if (word.compare(0, 5, "gpu::") == 0) { word.erase(0, 5); }
            checked = checked || (word.compare(0, name.size(), name) == 0 && (word[name.size()] == '<' || word[name.size()] == ' ') && word.ends_with(" checked"));
        }
        if (!checked) { fprintf(stderr, "test_kernels: %s of train_gpt2.cu was launched by no test here, expected each kernel in two orders of warps\n", name.c_str()); }
        left_out += !checked;
    }
    if (kernels < 40) { fprintf(stderr, "test_kernels: found %d kernels in train_gpt2.cu, expected them all: run it from the root of the repository\n", kernels); }
    else { printf("%d of the %d kernels of train_gpt2.cu ran in two orders of warps\n", kernels - left_out, kernels); }
    return left_out || kernels < 40;
}
int main(int argc, char **argv) {
    bool all = wanted("");
    for (int i = 1; i < argc; i++) { all = all && (strncmp(argv[i], "--tap", 5) == 0 || strncmp(argv[i], "-j", 2) == 0); } // no filter
    char path[] = "/tmp/test_kernels_XXXXXX";
    int file = mkstemp(path), status = 0;
    if (file < 0 || setenv("CUDA_EMU_LAUNCHES", path, 1)) { FAIL("%s: %s", path, strerror(errno)); }
    struct criterion_test_set *tests = criterion_initialize();
    if (criterion_handle_args(argc, argv, true)) { status = !criterion_run_all_tests(tests); }
    criterion_finalize(tests);
    std::string launches;
    char piece[4096];
    for (ssize_t n; (n = read(file, piece, sizeof piece)) > 0;) { launches.append(piece, (size_t)n); }
    close(file);
    unlink(path);
    return all && kernels_left_out(launches) ? 1 : status;
}
#endif
