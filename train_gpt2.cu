// scale-vector GPT on NVIDIA GPUs: the twin of train_gpt2.c, section by section and name by name.
//
// train_gpt2.c is included, for all that doesn't compute: flags, the table of parameters, data, checkpoints, the training
// loop. What computes follows here in namespace gpu, under the names and in the order of its sections 3 to 6, so that
// gpu::rmsnorm_forward does on a GPU what ::rmsnorm_forward does on a CPU (a kernel is called rmsnorm_forward_kernel).
// What a GPU does in one pass, to read memory once, has a name of its own, and its comment names the twins.
//
//     theta  fp32  --reparameterize_forward-->   theta~  F     --gpt_forward-->   loss        once a step | once a micro-batch
//     dtheta fp32  <--reparameterize_backward--  dtheta~ fp32  <--gpt_backward--
//
// F is float or bf16 (--precision): the type of effective weights and activations. theta, optimizer moments, gradients of
// weights and sums are fp32 either way. So the bf16 copy of the weights that mixed precision needs anyway is theta~, and
// scale vectors cost nothing in the model.
//
// Layout on the device: a tensor (rows, cols) has rows padded to `ld`, cols rounded up to a multiple of 8, and the hidden
// size and the vocabulary are padded as rows too, so that any row begins at a multiple of 16 bytes, whatever sizes the paper
// has (3413). Pads hold zeros, which all products and updates leave zero. theta, theta~, gradients and the first moments
// share one layout: an element has the same offset in each. Host and checkpoints know no pads.
//
// All sums are made in an order that depends on sizes alone: there is no atomic addition of floats, and the same flags give
// the same bits. C means columns of the residual stream, N tokens, and so on, as in train_gpt2.c.
#ifndef TESTING
#define TESTING // main is below
#define GPU_MAIN
#endif
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // of the CPU's layers, --check needs only some
#include "train_gpt2.c"
#pragma GCC diagnostic pop
#include <cuda_runtime.h>
#include <cuda_bf16.h>
#include <cublasLt.h>
#include <nccl.h>
#include <map>
#include <vector>

static_assert(sizeof(real) == sizeof(float), "theta is fp32 on the GPU");

#define CUDA_CHECK(call) do { cudaError_t status_ = (call); \
    if (status_ != cudaSuccess) { FAIL("%s: %s: %s", #call, cudaGetErrorName(status_), cudaGetErrorString(status_)); } } while (0)
#define CUBLAS_CHECK(call) do { cublasStatus_t status_ = (call); \
    if (status_ != CUBLAS_STATUS_SUCCESS) { FAIL("%s: cuBLAS status %d", #call, (int)status_); } } while (0)
#define NCCL_CHECK(call) do { ncclResult_t status_ = (call); \
    if (status_ != ncclSuccess) { FAIL("%s: %s", #call, ncclGetErrorString(status_)); } } while (0)
#define LAUNCHED() CUDA_CHECK(cudaGetLastError()) // follows each <<<>>>

namespace gpu {

typedef __nv_bfloat16 bf16;

// ----------------------------------------------------------------------------------------------------
// Numbers: W of them in one load or store, of 16 bytes where rows allow; arithmetic is always fp32.

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
template <typename F> __host__ __device__ inline F from_float(float x);
template <> __host__ __device__ inline float from_float<float>(float x) { return x; }
template <> __host__ __device__ inline bf16 from_float<bf16>(float x) { return __float2bfloat16_rn(x); }

template <typename F> inline constexpr int LANES = 16 / (int)sizeof(F); // numbers in 16 bytes

template <typename F, int W = LANES<F>> struct alignas(W * sizeof(F)) Packed {
    F value[W];
    __device__ float operator[](int i) const { return to_float(value[i]); }
    __device__ void set(int i, float x) { value[i] = from_float<F>(x); }
};
template <int W, typename F> __device__ inline Packed<F, W> load(const F *from) { return *reinterpret_cast<const Packed<F, W> *>(from); }
template <int W, typename F> __device__ inline void store(F *to, const Packed<F, W> &x) { *reinterpret_cast<Packed<F, W> *>(to) = x; }

__host__ __device__ inline int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
__host__ __device__ inline int64_t ceil_div(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

// ----------------------------------------------------------------------------------------------------
// Sums over a warp and over a block. Every thread gets the result; the order of additions is fixed.

struct Sum { static constexpr float neutral = 0; __device__ static float combine(float a, float b) { return a + b; } };
struct Max { static constexpr float neutral = -INFINITY; __device__ static float combine(float a, float b) { return fmaxf(a, b); } };

// over groups of `width` neighbouring lanes, a power of two
template <typename Op> __device__ inline float warp_reduce(float x, int width = 32) {
    for (int offset = width / 2; offset > 0; offset /= 2) { x = Op::combine(x, __shfl_xor_sync(0xffffffff, x, offset)); }
    return x;
}
__device__ inline float warp_sum(float x, int width = 32) { return warp_reduce<Sum>(x, width); }

// All threads of the block call it; blockDim.x is a multiple of 32. `scratch`: 32 floats of shared memory, which may be
// used again by the next call only after a barrier: the calls of a kernel take turns with two of them, or it has one of its own.
template <typename Op> __device__ inline float block_reduce(float x, float *scratch) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_reduce<Op>(x);
    if (lane == 0) { scratch[warp] = x; }
    __syncthreads();
    return warp_reduce<Op>(lane < warps ? scratch[lane] : Op::neutral);
}
__device__ inline float block_sum(float x, float *scratch) { return block_reduce<Sum>(x, scratch); }

// ----------------------------------------------------------------------------------------------------
// Tensor cores and asynchronous copies: the instructions of PTX under the names that dev/emu gives their CPU twins.

#ifndef CUDA_EMU
// d (16,8) += a (16,16) b (16,8): a warp's registers hold the fragments that the PTX manual draws for mma.m16n8k16.
__device__ inline void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8x8 matrices of bf16 from shared memory; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void ldmatrix_x4(uint32_t r[4], const void *smem_row) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(smem_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t r[4], const void *smem_row) { // each matrix transposed
    uint32_t at = (uint32_t)__cvta_generic_to_shared(smem_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
// 16 bytes from global to shared memory while the thread goes on; of `bytes` (0 to 16) the rest is zeros.
__device__ inline void cp_async_16(void *smem, const void *global) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(smem);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(at), "l"(global) : "memory");
}
__device__ inline void cp_async_16(void *smem, const void *global, int bytes) {
    uint32_t at = (uint32_t)__cvta_generic_to_shared(smem);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ inline void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); } // all but the last N groups are there
#endif

// ----------------------------------------------------------------------------------------------------
// A GPU: what a host thread holds to work with one.

struct Plan; // of a matrix product: section 4
struct PlanKey {
    int64_t M, N, K, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    int trans_a, trans_b, type_in, type_out, add, alignment; // alignment of the least aligned matrix, in bytes
    auto operator<=>(const PlanKey &) const = default;
};

struct Gpu {
    int device, rank, world;       // rank of world GPUs
    int multiprocessors;
    cudaStream_t stream;
    cublasLtHandle_t blas;
    void *workspace;               // of cuBLAS
    std::map<PlanKey, Plan *> plans;
    ncclComm_t comm;               // with world > 1
};
inline constexpr size_t WORKSPACE = (size_t)32 << 20; // what cuBLAS asks for on sm_90

// ----------------------------------------------------------------------------------------------------
// 2. Parameters: where those of the table are on the device. All offsets are in elements.

struct Place {                   // of a parameter, by its index in the table
    int64_t at;                  // in theta, theta~ (matrices and embedding), gradients and first moments
    int64_t v;                   // in the second moments, or -1
    int64_t rows, cols, ld;      // padded rows; true columns; padded columns, the distance of rows
    int64_t gamma;               // of a scale vector: in gamma and dgamma, or -1
    int64_t beta;                // of an OR/ER vector: in theta, or -1
    int decays, has_m;
};
struct Map {                     // a linear map: what a LinearMap of train_gpt2.c says, with offsets for indices
    int64_t w, eff;              // W in theta; W~ and dL/dW~: the same, but for a tied head
    int64_t rows, cols, ld;      // true rows and columns
    int64_t gamma_a, gamma_b;    // in gamma, or -1
    int64_t partial;             // in Model.partial: its sums over blocks of rows, for dgamma_b
    int64_t first_block;         // of the kernels that walk over all maps
};

template <typename F> struct FfnActs { // names and shapes as in train_gpt2.c, H padded
    F *gu_raw;                   // (n,2H) what swiglu_forward reads; Output-Norms are part of it, so there is no gu
    float *gu_rstd;              // (n,2)
    F *h, *down_raw;
    float *down_rstd;
};
template <typename F> struct MoeActs { // rows: N K, each expert's rounded up
    float *probs, *lse, *weights;
    int32_t *chosen, *row;
    int32_t *source;             // (rows) which of the N K this row holds, or -1
    int32_t *begin;              // (E+1)
    int32_t *host_begin;         // the same in the memory of the host
    F *x, *y;
    FfnActs<F> experts;
    F *sum;
    float *sum_rstd;
};
template <typename F> struct LayerActs {
    F *x, *ln1;
    float *ln1_rstd;
    F *qkv_raw;                  // before Output-Norms and RoPE; without norms it is turned in place, and is qkv
    F *att;
    float *lse;
    F *o_raw;
    float *o_rstd;
    F *x2, *ln2;
    float *ln2_rstd;
    FfnActs<F> ffn;
    MoeActs<F> moe;
};

struct Stats {                   // of a step, made on the device and copied to the host at its end
    double loss, balance_loss, z_loss; // sums over tokens and layers, each by its weight in the step
    float norm, clip;            // of the gradient; what the optimizer multiplies it by
};

template <typename F> struct Model {
    ::GPT *host;
    Gpu *gpu;
    std::vector<Place> places;
    std::vector<Map> maps;       // in the order of host->maps
    Place *d_places;
    Map *d_maps;
    float *theta, *grads, *m, *v;
    F *theta_eff;                // theta~
    float *gamma, *dgamma;
    int64_t num_theta, num_eff, num_v, num_gamma; // lengths, pads included
    std::vector<LayerActs<F>> acts;
    F *x_final, *ln_final;
    float *ln_final_rstd;
    F *d_ln_final, *qkv;         // qkv: of the layer at work, where it has Output-Norms
    float *qkv_rstd;
    F *logits;
    float *losses, *partial;
    int32_t *inputs, *targets;
    float *rope_cos, *rope_sin, *att_dot;
    F *dx, *d_branch, *d_wide, *d_att;
    Stats *stats;
    int64_t head_chunk, B, T;
    int accumulate, recompute;
    double grad_scale;
};

// ----------------------------------------------------------------------------------------------------
// 4. Layers.

// ---- attention, plain ----
// For fp32, and for bf16 with heads of other sizes than 64 and 128, up to ATT_MAX_HS: the same plan on CUDA cores, see "attention
// on tensor cores" below for the formulas. A block of 8 warps keeps 16 rows, 2 a warp, and streams the other side
// past in tiles of 32 rows: a lane takes one of these rows for the dot products, then HS/32 columns for the sums.

enum { ATT_ROWS = 16, ATT_LANES = 32, ATT_THREADS = 256, ATT_PER_WARP = 2, ATT_COLUMNS = ATT_MAX_HS / 32 };

// n rows of HS numbers, `stride` apart, into shared memory, rows `ld` apart; rows from n to `rows` become zeros
template <typename F> __device__ inline void att_fetch(float *to, int ld, const F *from, int64_t stride, int rows, int n, int HS) {
    for (int i = threadIdx.x; i < rows * HS; i += ATT_THREADS) {
        const int row = i / HS, d = i % HS;
        to[row * ld + d] = row < n ? to_float(from[row * stride + d]) : 0;
    }
}

// s[r] = the dot product of fixed row r of the warp with this lane's row
__device__ inline void att_dots(float s[ATT_PER_WARP], const float *fixed, const float *stream, int HS) {
    for (int r = 0; r < ATT_PER_WARP; r++) { s[r] = 0; }
    for (int d = 0; d < HS; d++) {
        const float x = stream[threadIdx.x % 32 * (HS + 1) + d];
        for (int r = 0; r < ATT_PER_WARP; r++) { s[r] += fixed[r * HS + d] * x; }
    }
}

// sum[r] += over the 32 rows of the tile, p[r] of the row's lane times the row
__device__ inline void att_add(float sum[ATT_PER_WARP][ATT_COLUMNS], const float p[ATT_PER_WARP], const float *stream, int HS) {
    for (int j = 0; j < ATT_LANES; j++) {
        for (int r = 0; r < ATT_PER_WARP; r++) {
            const float x = __shfl_sync(0xffffffff, p[r], j);
            for (int i = 0; i < ATT_COLUMNS; i++) {
                const int d = threadIdx.x % 32 + 32 * i;
                if (d < HS) { sum[r][i] += x * stream[j * (HS + 1) + d]; }
            }
        }
    }
}

template <typename F> __device__ inline void att_write(F *to, int64_t stride, int n, const float sum[ATT_PER_WARP][ATT_COLUMNS], int HS, float scale) {
    for (int r = 0; r < ATT_PER_WARP && r < n; r++) {
        for (int i = 0; i < ATT_COLUMNS; i++) {
            const int d = threadIdx.x % 32 + 32 * i;
            if (d < HS) { to[r * stride + d] = from_float<F>(sum[r][i] * scale); }
        }
    }
}

template <typename F> __global__ void __launch_bounds__(ATT_THREADS) attention_forward_kernel(F *out, float *lse, const F *qkv,
        int T, int NH, int KVH, int HS, float scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    float *sq = (float *)shared_memory, *sk = sq + ATT_ROWS * HS, *sv = sk + ATT_LANES * (HS + 1);
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ATT_PER_WARP;    // the warp's first row of the tile
    const int h = blockIdx.y, b = blockIdx.z, t0 = (gridDim.x - 1 - blockIdx.x) * ATT_ROWS;
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS, C = (int64_t)NH * HS, row0 = (int64_t)b * T;
    const F *k = qkv + row0 * stride + (int64_t)(NH + h / (NH / KVH)) * HS, *v = k + (int64_t)KVH * HS;
    float o[ATT_PER_WARP][ATT_COLUMNS] = {}, top[ATT_PER_WARP], sum[ATT_PER_WARP] = {}, p[ATT_PER_WARP];
    for (int r = 0; r < ATT_PER_WARP; r++) { top[r] = -INFINITY; }
    att_fetch(sq, HS, qkv + (row0 + t0) * stride + (int64_t)h * HS, stride, ATT_ROWS, T - t0, HS);
    for (int s0 = 0; s0 < t0 + ATT_ROWS && s0 < T; s0 += ATT_LANES) {
        __syncthreads();
        att_fetch(sk, HS + 1, k + s0 * stride, stride, ATT_LANES, T - s0, HS);
        att_fetch(sv, HS + 1, v + s0 * stride, stride, ATT_LANES, T - s0, HS);
        __syncthreads();
        att_dots(p, sq + first * HS, sk, HS);
        for (int r = 0; r < ATT_PER_WARP; r++) {
            const float s = s0 + lane > t0 + first + r ? -INFINITY : p[r] * scale, high = fmaxf(top[r], warp_reduce<Max>(s));
            const float shrink = expf(top[r] - high);
            top[r] = high;
            p[r] = expf(s - high);
            sum[r] = sum[r] * shrink + warp_sum(p[r]);
            for (int i = 0; i < ATT_COLUMNS; i++) { o[r][i] *= shrink; }
        }
        att_add(o, p, sv, HS);
    }
    for (int r = 0; r < ATT_PER_WARP && t0 + first + r < T; r++) {
        const int64_t t = t0 + first + r;
        att_write(out + (row0 + t) * C + (int64_t)h * HS, C, 1, o + r, HS, 1 / sum[r]);
        if (lane == 0) { lse[((int64_t)b * NH + h) * T + t] = top[r] + logf(sum[r]); }
    }
}

// D (B,NH,T) = rowsum(dout * out): a warp a row
template <typename F> __global__ void attention_backward_dot_kernel(float *D, const F *dout, const F *out, int64_t rows, int T, int NH, int HS) {
    const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, bt = row / NH;   // of (B,T,NH)
    if (row >= rows) { return; }
    float sum = 0;
    for (int d = threadIdx.x % 32; d < HS; d += 32) { sum += to_float(dout[row * HS + d]) * to_float(out[row * HS + d]); }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) { D[(bt / T * NH + row % NH) * T + bt % T] = sum; }
}

// dK, dV: keys are fixed, the queries of the group's heads stream past.
template <typename F> __global__ void __launch_bounds__(ATT_THREADS) attention_backward_kv_kernel(F *dqkv, const F *dout, const F *qkv,
        const float *lse, const float *D, int T, int NH, int KVH, int HS, float scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    float *sk = (float *)shared_memory, *sv = sk + ATT_ROWS * HS, *sq = sv + ATT_ROWS * HS, *sg = sq + ATT_LANES * (HS + 1);
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ATT_PER_WARP, kvh = blockIdx.y, b = blockIdx.z, s0 = blockIdx.x * ATT_ROWS;
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS, C = (int64_t)NH * HS, row0 = (int64_t)b * T;
    const int64_t k = (row0 + s0) * stride + (int64_t)(NH + kvh) * HS, v = k + (int64_t)KVH * HS;
    float dk[ATT_PER_WARP][ATT_COLUMNS] = {}, dv[ATT_PER_WARP][ATT_COLUMNS] = {}, p[ATT_PER_WARP], ds[ATT_PER_WARP];
    att_fetch(sk, HS, qkv + k, stride, ATT_ROWS, T - s0, HS);
    att_fetch(sv, HS, qkv + v, stride, ATT_ROWS, T - s0, HS);
    for (int h = kvh * (NH / KVH); h < (kvh + 1) * (NH / KVH); h++) {
        for (int t0 = s0; t0 < T; t0 += ATT_LANES) {
            __syncthreads();
            att_fetch(sq, HS + 1, qkv + (row0 + t0) * stride + (int64_t)h * HS, stride, ATT_LANES, T - t0, HS);
            att_fetch(sg, HS + 1, dout + (row0 + t0) * C + (int64_t)h * HS, C, ATT_LANES, T - t0, HS);
            __syncthreads();
            const int t = t0 + lane;
            const int64_t at = ((int64_t)b * NH + h) * T + t;
            const float L = t < T ? lse[at] : INFINITY, Dt = t < T ? D[at] : 0;
            att_dots(p, sk + first * HS, sq, HS);
            att_dots(ds, sv + first * HS, sg, HS);
            for (int r = 0; r < ATT_PER_WARP; r++) {
                p[r] = s0 + first + r > t ? 0 : expf(p[r] * scale - L);
                ds[r] = p[r] * (ds[r] - Dt);
            }
            att_add(dv, p, sg, HS);
            att_add(dk, ds, sq, HS);
        }
    }
    att_write(dqkv + k + first * stride, stride, T - s0 - first, dk, HS, scale);
    att_write(dqkv + v + first * stride, stride, T - s0 - first, dv, HS, 1);
}

// dQ: queries are fixed, keys and values stream past.
template <typename F> __global__ void __launch_bounds__(ATT_THREADS) attention_backward_q_kernel(F *dqkv, const F *dout, const F *qkv,
        const float *lse, const float *D, int T, int NH, int KVH, int HS, float scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    float *sq = (float *)shared_memory, *sg = sq + ATT_ROWS * HS, *sk = sg + ATT_ROWS * HS, *sv = sk + ATT_LANES * (HS + 1);
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * ATT_PER_WARP, h = blockIdx.y, b = blockIdx.z;
    const int t0 = (gridDim.x - 1 - blockIdx.x) * ATT_ROWS;
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS, C = (int64_t)NH * HS, row0 = (int64_t)b * T, q = (row0 + t0) * stride + (int64_t)h * HS;
    const F *k = qkv + row0 * stride + (int64_t)(NH + h / (NH / KVH)) * HS, *v = k + (int64_t)KVH * HS;
    const int64_t at = ((int64_t)b * NH + h) * T + t0 + first;
    float dq[ATT_PER_WARP][ATT_COLUMNS] = {}, p[ATT_PER_WARP], ds[ATT_PER_WARP];
    att_fetch(sq, HS, qkv + q, stride, ATT_ROWS, T - t0, HS);
    att_fetch(sg, HS, dout + (row0 + t0) * C + (int64_t)h * HS, C, ATT_ROWS, T - t0, HS);
    for (int s0 = 0; s0 < t0 + ATT_ROWS && s0 < T; s0 += ATT_LANES) {
        __syncthreads();
        att_fetch(sk, HS + 1, k + s0 * stride, stride, ATT_LANES, T - s0, HS);
        att_fetch(sv, HS + 1, v + s0 * stride, stride, ATT_LANES, T - s0, HS);
        __syncthreads();
        att_dots(p, sq + first * HS, sk, HS);
        att_dots(ds, sg + first * HS, sv, HS);
        for (int r = 0; r < ATT_PER_WARP; r++) {
            const int t = t0 + first + r;
            ds[r] = t >= T || s0 + lane > t ? 0 : expf(p[r] * scale - lse[at + r]) * (ds[r] - D[at + r]);
        }
        att_add(dq, ds, sk, HS);
    }
    att_write(dqkv + q + first * stride, stride, T - t0 - first, dq, HS, scale);
}

template <typename F> void attention_forward_plain(F *out, float *lse, const F *qkv, int B, int T, int NH, int KVH, int HS, cudaStream_t stream) {
    const int bytes = (ATT_ROWS * HS + 2 * ATT_LANES * (HS + 1)) * (int)sizeof(float);
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_forward_kernel<F><<<dim3((unsigned)ceil_div(T, ATT_ROWS), NH, B), ATT_THREADS, bytes, stream>>>(out, lse, qkv, T, NH, KVH, HS, (float)(1 / sqrt((double)HS)));
    LAUNCHED();
}

template <typename F> void attention_backward_plain(F *dqkv, float *D, const F *dout, const F *qkv, const F *out, const float *lse,
        int B, int T, int NH, int KVH, int HS, cudaStream_t stream) {
    const int bytes = (2 * ATT_ROWS * HS + 2 * ATT_LANES * (HS + 1)) * (int)sizeof(float);
    const float scale = (float)(1 / sqrt((double)HS));
    const int64_t rows = (int64_t)B * T * NH;
    const unsigned tiles = (unsigned)ceil_div(T, ATT_ROWS);
    attention_backward_dot_kernel<F><<<(unsigned)ceil_div(rows * 32, ATT_THREADS), ATT_THREADS, 0, stream>>>(D, dout, out, rows, T, NH, HS);
    LAUNCHED();
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_kv_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_backward_kv_kernel<F><<<dim3(tiles, KVH, B), ATT_THREADS, bytes, stream>>>(dqkv, dout, qkv, lse, D, T, NH, KVH, HS, scale);
    LAUNCHED();
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_q_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_backward_q_kernel<F><<<dim3(tiles, NH, B), ATT_THREADS, bytes, stream>>>(dqkv, dout, qkv, lse, D, T, NH, KVH, HS, scale);
    LAUNCHED();
}

// ---- attention on tensor cores ----
// The functions of attention_forward/backward in train_gpt2.c, for bf16 and heads of 64 or 128, with the T x T matrix
// never in memory (FlashAttention-2, arXiv 2307.08691, for the plan; its base-2 online softmax too):
//
//     S = a Q K^T,  a = 1/sqrt(HS)     P = exp(S - lse)     O = P V      masked where key > query (causal)
//     dP = dO V^T     dS = P * (dP - D), D = rowsum(dO * O)     dV = P^T dO     dK = a dS^T Q     dQ = a dS K
//
// A warp's unit of work is mma.m16n8k16: D (16x8) += A (16x16) B (16x8), spread over the registers of 32 lanes. Lane l
// holds, with g = l/4 and i = 2*(l%4), pairs of neighbours in a row of A, in a row of D, in a column of B:
//
//      A   k: i,i+1   i+8,i+9        B   n: g               D   n: i,i+1
//   row g    | a[0] |  a[2] |     k i,i+1 | b[0] |       row g   | d[0] d[1] |
//   row g+8  | a[1] |  a[3] |     k i+8,+9| b[1] |       row g+8 | d[2] d[3] |
//
// 1. Two D tiles side by side (16 x 16) are laid out exactly like an A. So P, rounded to bf16, is the A operand of P V
//    without leaving its registers; likewise dS in dS K. The kernel of dK, dV needs P^T and dS^T as A operands, and gets
//    them the same way by computing S^T = K Q^T and dP^T = V dO^T from the start.
// 2. ldmatrix loads four 8x8 tiles in one instruction: each lane names one 16-byte row, and receives from each tile the
//    pair at (row g, columns i, i+1). With .trans it receives column g of rows i, i+1: a B operand whose k runs down the
//    rows (V in P V, K in dS K) instead of along them (K in Q K^T).
// 3. Swizzle: 8 rows of a tile at the same column, one ldmatrix phase, lie a multiple of 128 bytes apart, all in the same
//    four banks. So the 16-byte chunk c of row r is kept at place c ^ (r % 8): 8 rows, 8 different places, all 32 banks.
// 4. cp.async copies global to shared memory past the registers, while the tensor cores work on tiles that have
//    arrived. Rows past the end of the sequence arrive as zeros, so that no stray NaN is multiplied by 0.
// 5. Shared memory delivers 128 bytes a clock, less than tensor cores can eat: every B fragment loaded should serve many
//    mma. A warp therefore takes 32 rows (2 A fragments) where registers allow, and operands that stay the same for a
//    whole block (Q, or K and V in the kernel of dK, dV) are kept in registers where they fit.
// 6. Causality: tiles wholly above the diagonal are never visited, only tiles on it are masked. Work grows with the
//    index of the query tile, so the longest tiles are started first, and the short ones fill the gaps at the end.
// No sum depends on the order of blocks: each gradient belongs to one block, which adds in a fixed order, so bits repeat.

enum { TC_WARPS = 4, TC_THREADS = 32 * TC_WARPS, TC_STEP = 64 }; // TC_STEP: rows of the tiles that stream through a block

__device__ inline float tc_exp2(float x) {
#ifdef CUDA_EMU
    return exp2f(x);
#else
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#endif
}

// The index of the warp. From a shuffle, so that the compiler knows it to be the same in all lanes, and keeps what follows
// from it in registers that a warp has once, not once a lane.
__device__ inline int tc_warp() { return __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0); }

// two floats, rounded, in one register; `low` comes first in memory
__device__ inline uint32_t tc_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

// Address of 16-byte chunk `chunk` of row `row` of a swizzled tile (rows, HS).
template <int HS> __device__ inline bf16 *tc_at(bf16 *tile, int row, int chunk) {
    return tile + row * HS + ((chunk ^ (row & 7)) << 3);
}

// Starts copying ROWS rows of HS numbers, `stride` apart, into a tile. Rows from `valid` on become zeros.
template <int HS, int ROWS> __device__ inline void tc_load_tile(bf16 *tile, const bf16 *src, int stride, int valid) {
    constexpr int CHUNKS = HS / 8, PASS = TC_THREADS / CHUNKS;   // a pass of all threads copies PASS rows, a multiple of 8
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    bf16 *dst = tc_at<HS>(tile, row, chunk);
    src += row * stride + chunk * 8;
    #pragma unroll
    for (int r = 0; r < ROWS; r += PASS, src += PASS * stride) { cp_async_16(dst + r * HS, src, row + r < valid ? 16 : 0); }
}

// The row that a lane names to ldmatrix, for the 16 x 16 block of a tile at (row0, column0), both multiples of 16: the four
// 8x8 tiles come in the order upper left, lower left, upper right, lower right.
template <int HS> __device__ inline bf16 *tc_lane_row(bf16 *tile, int row0, int column0) {
    const int lane = threadIdx.x % 32;
    return tile + (row0 + lane % 16) * HS + (((lane / 16 ^ (lane & 7)) << 3) ^ column0);
}

// A operand: m are the rows, k the columns of the block
template <int HS> __device__ inline void tc_load_a(uint32_t a[4], bf16 *tile, int row0, int column0) {
    ldmatrix_x4(a, tc_lane_row<HS>(tile, row0, column0));
}

// Two B operands, b[0] and b[1]: n are the rows of the block, 8 each, k the columns
template <int HS> __device__ inline void tc_load_b(uint32_t b[2][2], bf16 *tile, int row0, int column0) {
    uint32_t r[4];
    ldmatrix_x4(r, tc_lane_row<HS>(tile, row0, column0));
    b[0][0] = r[0];  b[1][0] = r[1];  b[0][1] = r[2];  b[1][1] = r[3];
}

// The same from the transpose: n are the columns of the block, 8 each, k the rows
template <int HS> __device__ inline void tc_load_b_trans(uint32_t b[2][2], bf16 *tile, int row0, int column0) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, tc_lane_row<HS>(tile, row0, column0));
    b[0][0] = r[0];  b[0][1] = r[1];  b[1][0] = r[2];  b[1][1] = r[3];
}

// Two D tiles side by side, rounded: an A operand (idea 1).
__device__ inline void tc_to_a(uint32_t a[4], const float left[4], const float right[4]) {
    a[0] = tc_pack(left[0], left[1]);    a[1] = tc_pack(left[2], left[3]);
    a[2] = tc_pack(right[0], right[1]);  a[3] = tc_pack(right[2], right[3]);
}

// Writes a warp's sums (MT*16, HS), rounded, to rows of global memory, by way of shared memory that only this warp uses:
// a row leaves as whole 16-byte chunks. Rows from `valid` on aren't written.
template <int HS, int MT> __device__ inline void tc_store_rows(bf16 *dst, int64_t stride, int valid, bf16 *tile,
        const float sum[MT][HS / 8][4], float scale) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        #pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t pair = tc_pack(sum[m][n][2 * half] * scale, sum[m][n][2 * half + 1] * scale);
                memcpy(tc_at<HS>(tile, m * 16 + half * 8 + lane / 4, n) + 2 * (lane % 4), &pair, 4);
            }
        }
    }
    __syncwarp();
    for (int i = lane; i < MT * 16 * HS / 8; i += 32) {
        const int row = i / (HS / 8), chunk = i % (HS / 8);
        if (row < valid) { *(uint4 *)(dst + row * stride + chunk * 8) = *(const uint4 *)tc_at<HS>(tile, row, chunk); }
    }
}

// Forward. A block has 128 queries of one head, 32 a warp, and goes over the keys 64 at a time. Two buffers take turns: V
// arrives while S = Q K^T is computed, the next K while the softmax and P V are. Q stays in registers if HS is 64.
// The online softmax keeps, per row, the largest score so far and the sum of exponentials relative to it; when the
// maximum grows, what was summed is scaled down. exp(a s) is exp2(c s) with c = a log2(e), one multiply-add an element.
template <int HS> struct TcForward {
    static constexpr int MT = 2, ROWS = 16 * MT * TC_WARPS;
    static constexpr bool Q_IN_REGISTERS = HS == 64;
    static constexpr int SHARED = (ROWS + 2 * TC_STEP) * HS * (int)sizeof(bf16);
};

template <int HS> __global__ void __launch_bounds__(TC_THREADS, 2) attention_forward_tc_kernel(bf16 *__restrict__ out,
        float *__restrict__ lse, const bf16 *__restrict__ qkv, int T, int NH, int KVH, float c) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    constexpr int MT = TcForward<HS>::MT, ROWS = TcForward<HS>::ROWS, KT = HS / 16, NT = TC_STEP / 8;
    bf16 *sq = (bf16 *)shared_memory, *sk = sq + ROWS * HS, *sv = sk + TC_STEP * HS;
    const int lane = threadIdx.x % 32, warp = tc_warp();
    const int h = blockIdx.y, b = blockIdx.z, t0 = (gridDim.x - 1 - blockIdx.x) * ROWS;     // longest first
    const int stride = (NH + 2 * KVH) * HS, C = NH * HS;
    const bf16 *q = qkv + (int64_t)b * T * stride + (int64_t)h * HS;
    const bf16 *k = q + (int64_t)(NH + h / (NH / KVH) - h) * HS, *v = k + (int64_t)KVH * HS;
    const int w0 = t0 + warp * 16 * MT;                                                      // the warp's first query
    const int end = t0 + ROWS < T ? t0 + ROWS : T;                                                       // keys before this one

    tc_load_tile<HS, ROWS>(sq, q + (int64_t)t0 * stride, stride, T - t0);
    tc_load_tile<HS, TC_STEP>(sk, k, stride, T);
    cp_async_commit();
    uint32_t qa[MT][TcForward<HS>::Q_IN_REGISTERS ? KT : 1][4];
    float o[MT][HS / 8][4] = {}, top[MT][2], sum[MT][2] = {};
    #pragma unroll
    for (int m = 0; m < MT; m++) { top[m][0] = top[m][1] = -INFINITY; }

    for (int s0 = 0; s0 < end; s0 += TC_STEP) {
        cp_async_wait<0>();
        __syncthreads();                             // K is here, and all warps are done with the last V
        tc_load_tile<HS, TC_STEP>(sv, v + (int64_t)s0 * stride, stride, T - s0);
        cp_async_commit();
        const bool visible = s0 <= w0 + 16 * MT - 1; // else all these keys are later than the warp's queries
        if (TcForward<HS>::Q_IN_REGISTERS && s0 == 0) {
            #pragma unroll
            for (int i = 0; i < MT * KT; i++) { tc_load_a<HS>(qa[i / KT][i % KT], sq, (warp * MT + i / KT) * 16, i % KT * 16); }
        }
        float s[MT][NT][4] = {};
        if (visible) {
            #pragma unroll (TcForward<HS>::Q_IN_REGISTERS ? KT : 1) // with Q in shared memory more would spill
            for (int kt = 0; kt < KT; kt++) {
                if (!TcForward<HS>::Q_IN_REGISTERS) {
                    #pragma unroll
                    for (int m = 0; m < MT; m++) { tc_load_a<HS>(qa[m][0], sq, (warp * MT + m) * 16, kt * 16); }
                }
                #pragma unroll
                for (int n = 0; n < NT; n += 2) {
                    uint32_t kb[2][2];
                    tc_load_b<HS>(kb, sk, n * 8, kt * 16);
                    #pragma unroll
                    for (int m = 0; m < MT; m++) {
                        const uint32_t *a = qa[m][TcForward<HS>::Q_IN_REGISTERS ? kt : 0];
                        mma_m16n8k16(s[m][n], a, kb[0]);
                        mma_m16n8k16(s[m][n + 1], a, kb[1]);
                    }
                }
            }
        }
        cp_async_wait<0>();
        __syncthreads();                             // V is here, and all warps are done with K
        if (s0 + TC_STEP < end) { tc_load_tile<HS, TC_STEP>(sk, k + (int64_t)(s0 + TC_STEP) * stride, stride, T - s0 - TC_STEP); }
        cp_async_commit();
        if (!visible) { continue; }

        if (s0 + TC_STEP - 1 > w0) {                 // on the diagonal: hide keys later than the query
            const int ahead = s0 + 2 * (lane % 4) - (w0 + lane / 4);
            #pragma unroll
            for (int i = 0; i < MT * NT * 4; i++) {
                const int m = i / (NT * 4), n = i / 4 % NT, j = i % 4;
                if (ahead + n * 8 + j % 2 > m * 16 + j / 2 * 8) { s[m][n][j] = -INFINITY; }
            }
        }
        #pragma unroll
        for (int m = 0; m < MT; m++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {   // row lane/4, row lane/4 + 8
                float high = top[m][half];
                #pragma unroll
                for (int n = 0; n < NT; n++) { high = fmaxf(high, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1])); }
                high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 1));    // a row is spread over four lanes
                high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 2));
                const float shrink = tc_exp2((top[m][half] - high) * c), offset = high * c;
                top[m][half] = high;
                float total = sum[m][half] * shrink;
                #pragma unroll
                for (int n = 0; n < NT; n++) {
                    #pragma unroll
                    for (int j = 0; j < 2; j++) {
                        float &x = s[m][n][2 * half + j];
                        x = tc_exp2(x * c - offset);
                        total += x;
                    }
                }
                sum[m][half] = total;                // of this lane's columns; the four lanes are added at the end
                #pragma unroll
                for (int n = 0; n < HS / 8; n++) { o[m][n][2 * half] *= shrink;  o[m][n][2 * half + 1] *= shrink; }
            }
        }
        #pragma unroll
        for (int kt = 0; kt < TC_STEP / 16; kt++) {
            uint32_t pa[MT][4];
            #pragma unroll
            for (int m = 0; m < MT; m++) { tc_to_a(pa[m], s[m][2 * kt], s[m][2 * kt + 1]); }
            #pragma unroll
            for (int n = 0; n < HS / 8; n += 2) {
                uint32_t vb[2][2];
                tc_load_b_trans<HS>(vb, sv, kt * 16, n * 8);
                #pragma unroll
                for (int m = 0; m < MT; m++) {
                    mma_m16n8k16(o[m][n], pa[m], vb[0]);
                    mma_m16n8k16(o[m][n + 1], pa[m], vb[1]);
                }
            }
        }
    }
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(0xffffffff, total, 1);
            total += __shfl_xor_sync(0xffffffff, total, 2);
            const float inverse = 1 / total;
            #pragma unroll
            for (int n = 0; n < HS / 8; n++) { o[m][n][2 * half] *= inverse;  o[m][n][2 * half + 1] *= inverse; }
            const int row = w0 + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && row < T) {
                lse[((int64_t)b * NH + h) * T + row] = top[m][half] * c * 0.6931471805599453f + logf(total);
            }
        }
    }
    tc_store_rows<HS, MT>(out + ((int64_t)b * T + w0) * C + (int64_t)h * HS, C, T - w0, sq + warp * 16 * MT * HS, o, 1);
}

// D (B,NH,T) = rowsum(dout * out): HS/8 lanes a row, 16 bytes a lane
template <int HS> __global__ void attention_backward_dot_tc_kernel(float *__restrict__ D, const bf16 *__restrict__ dout,
        const bf16 *__restrict__ out, int64_t rows, int T, int NH) {
    constexpr int LANES = HS / 8;
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, row = i / LANES;   // row of (B,T,NH)
    float sum = 0;
    if (row < rows) {
        uint4 x = *(const uint4 *)(dout + i * 8), y = *(const uint4 *)(out + i * 8);
        bf16 a[8], b[8];
        memcpy(a, &x, 16);
        memcpy(b, &y, 16);
        #pragma unroll
        for (int j = 0; j < 8; j++) { sum += __bfloat162float(a[j]) * __bfloat162float(b[j]); }
    }
    #pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) { sum += __shfl_xor_sync(0xffffffff, sum, step); }
    if (row < rows && threadIdx.x % LANES == 0) {
        const int64_t bt = row / NH;
        D[(bt / T * NH + row % NH) * T + bt % T] = sum;
    }
}

// Backward, both kernels: a block keeps two tiles of ROWS rows in registers as A operands, 32 rows a warp if HS is 64, else
// 16, and streams two tiles of 64 rows past them, double buffered: while one pair is in use the next one arrives. Of
// the 64 rows 16 are taken at a time, the k of one mma, so that S and dP need few registers beside the sums.
template <int HS> struct TcBackward {
    static constexpr int MT = HS == 64 ? 2 : 1, ROWS = 16 * MT * TC_WARPS;
    static constexpr int SHARED = 4 * TC_STEP * HS * (int)sizeof(bf16) + 4 * TC_STEP * (int)sizeof(float);
    static_assert(2 * ROWS <= 4 * TC_STEP, "the fixed tiles pass through the memory of the streaming ones");
};

// Loads the two fixed tiles by way of shared memory, which is free again afterwards.
template <int HS> __device__ inline void tc_load_fixed(uint32_t fa[TcBackward<HS>::MT][HS / 16][4],
        uint32_t ga[TcBackward<HS>::MT][HS / 16][4], bf16 *tile, const bf16 *f, int fstride, const bf16 *g,
        int gstride, int valid) {
    constexpr int MT = TcBackward<HS>::MT, ROWS = TcBackward<HS>::ROWS;
    tc_load_tile<HS, ROWS>(tile, f, fstride, valid);
    tc_load_tile<HS, ROWS>(tile + ROWS * HS, g, gstride, valid);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        #pragma unroll
        for (int kt = 0; kt < HS / 16; kt++) {
            tc_load_a<HS>(fa[m][kt], tile, (tc_warp() * MT + m) * 16, kt * 16);
            tc_load_a<HS>(ga[m][kt], tile + ROWS * HS, (tc_warp() * MT + m) * 16, kt * 16);
        }
    }
    __syncthreads();
}

// x (MT*16, 16) = F X^T, for the 16 rows of the tile X from row n0
template <int HS> __device__ inline void tc_product(float x[TcBackward<HS>::MT][2][4],
        const uint32_t fa[TcBackward<HS>::MT][HS / 16][4], bf16 *tile, int n0) {
    #pragma unroll
    for (int kt = 0; kt < HS / 16; kt++) {
        uint32_t b[2][2];
        tc_load_b<HS>(b, tile, n0, kt * 16);
        #pragma unroll
        for (int m = 0; m < TcBackward<HS>::MT; m++) {
            mma_m16n8k16(x[m][0], fa[m][kt], b[0]);
            mma_m16n8k16(x[m][1], fa[m][kt], b[1]);
        }
    }
}

// sum (MT*16, HS) += x (MT*16, 16) X, for the 16 rows of the tile X from row k0
template <int HS> __device__ inline void tc_add_product(float sum[TcBackward<HS>::MT][HS / 8][4],
        const float x[TcBackward<HS>::MT][2][4], bf16 *tile, int k0) {
    uint32_t a[TcBackward<HS>::MT][4];
    #pragma unroll
    for (int m = 0; m < TcBackward<HS>::MT; m++) { tc_to_a(a[m], x[m][0], x[m][1]); }
    #pragma unroll
    for (int n = 0; n < HS / 8; n += 2) {
        uint32_t b[2][2];
        tc_load_b_trans<HS>(b, tile, k0, n * 8);
        #pragma unroll
        for (int m = 0; m < TcBackward<HS>::MT; m++) {
            mma_m16n8k16(sum[m][n], a[m], b[0]);
            mma_m16n8k16(sum[m][n + 1], a[m], b[1]);
        }
    }
}

// dK, dV of one tile of keys: K and V are fixed, and Q and dO of all query heads of the group stream past, from the diagonal
// on. lse and D of the coming 64 queries are fetched into one register a thread, and put in shared memory a step later.
template <int HS> __global__ void __launch_bounds__(TC_THREADS, 2) attention_backward_kv_tc_kernel(bf16 *__restrict__ dqkv,
        const bf16 *__restrict__ dout, const bf16 *__restrict__ qkv, const float *__restrict__ lse,
        const float *__restrict__ D, int T, int NH, int KVH, float scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    constexpr int MT = TcBackward<HS>::MT, ROWS = TcBackward<HS>::ROWS, TILE = TC_STEP * HS;
    bf16 *tiles = (bf16 *)shared_memory;             // stage 0: Q, dO; stage 1: Q, dO
    float *stats = (float *)(tiles + 4 * TILE);      // stage 0: lse * log2(e) (64), D (64); stage 1 likewise
    const int lane = threadIdx.x % 32, warp = tc_warp(), tid = threadIdx.x;
    const int kvh = blockIdx.y, b = blockIdx.z, s0 = blockIdx.x * ROWS, G = NH / KVH;
    const int stride = (NH + 2 * KVH) * HS, C = NH * HS;
    const int64_t kv = ((int64_t)b * T + s0) * stride + (int64_t)(NH + kvh) * HS;
    const int w0 = s0 + warp * 16 * MT;                                                      // the warp's first key
    const int rounds = G * ((T - s0 + TC_STEP - 1) / TC_STEP);                               // pairs of tiles to go over
    const float log2e = 1.4426950408889634f, c = scale * log2e;
    const bf16 *q = qkv + (int64_t)b * T * stride + kvh * G * HS, *go = dout + (int64_t)b * T * C + kvh * G * HS;
    const float *stat = (tid < TC_STEP ? lse : D) + ((int64_t)b * NH + kvh * G) * T + tid % TC_STEP;

    uint32_t ka[MT][HS / 16][4], va[MT][HS / 16][4];
    tc_load_fixed<HS>(ka, va, tiles, qkv + kv, stride, qkv + kv + (int64_t)KVH * HS, stride, T - s0);
    float dk[MT][HS / 8][4] = {}, dv[MT][HS / 8][4] = {};

    // Each round starts the copy of the tiles of one head at queries `next`.. and computes on those of the round before, at t0.
    for (int round = 0, t0 = 0, next = s0, head = 0; round <= rounds; round++) {
        if (round > 0) {
            cp_async_wait<0>();
            __syncthreads();
        }
        float fetched = 0;
        if (round < rounds) {
            bf16 *tile = tiles + round % 2 * 2 * TILE;
            tc_load_tile<HS, TC_STEP>(tile, q + (int64_t)next * stride + head * HS, stride, T - next);
            tc_load_tile<HS, TC_STEP>(tile + TILE, go + (int64_t)next * C + head * HS, C, T - next);
            fetched = tid < TC_STEP ? INFINITY : 0;  // queries past the end: P = exp2(0 - inf) = 0
            if (next + tid % TC_STEP < T) { fetched = stat[(int64_t)head * T + next] * (tid < TC_STEP ? log2e : 1); }
        }
        cp_async_commit();
        if (round > 0) {
            bf16 *tq = tiles + (round + 1) % 2 * 2 * TILE, *tg = tq + TILE;
            const float *L = stats + (round + 1) % 2 * 2 * TC_STEP, *Di = L + TC_STEP;
            #pragma unroll 1
            for (int n0 = 0; n0 < TC_STEP; n0 += 16) {
                if (t0 + n0 + 15 < w0) { continue; } // all 16 queries come before the warp's keys
                float p[MT][2][4] = {}, ds[MT][2][4] = {};
                tc_product<HS>(p, ka, tq, n0);
                if (t0 + n0 < w0 + 16 * MT - 1) {    // on the diagonal: hide keys later than the query
                    const int ahead = w0 + lane / 4 - (t0 + n0 + 2 * (lane % 4));
                    #pragma unroll
                    for (int j = 0; j < MT * 8; j++) {
                        if (ahead + j / 8 * 16 + j / 2 % 2 * 8 > j / 4 % 2 * 8 + j % 2) { p[j / 8][j / 4 % 2][j % 4] = -INFINITY; }
                    }
                }
                tc_product<HS>(ds, va, tg, n0);
                #pragma unroll
                for (int n = 0; n < 2; n++) {
                    #pragma unroll
                    for (int j = 0; j < 2; j++) {
                        const int column = n0 + n * 8 + 2 * (lane % 4) + j;
                        const float Lj = L[column], Dj = Di[column];
                        #pragma unroll
                        for (int m = 0; m < MT; m++) {
                            #pragma unroll
                            for (int half = 0; half < 2; half++) {
                                float &x = p[m][n][2 * half + j], &y = ds[m][n][2 * half + j];
                                x = tc_exp2(x * c - Lj);
                                y = x * (y - Dj);
                            }
                        }
                    }
                }
                tc_add_product<HS>(dv, p, tg, n0);
                tc_add_product<HS>(dk, ds, tq, n0);
            }
        }
        stats[round % 2 * 2 * TC_STEP + tid] = fetched;  // TC_THREADS is 2 * TC_STEP
        t0 = next;
        if (++head == G) { head = 0;  next += TC_STEP; }
    }
    __syncthreads();
    bf16 *own = tiles + warp * 16 * MT * HS, *dst = dqkv + kv + (int64_t)warp * 16 * MT * stride;
    tc_store_rows<HS, MT>(dst, stride, T - w0, own, dk, scale);
    tc_store_rows<HS, MT>(dst + (int64_t)KVH * HS, stride, T - w0, own, dv, 1);
}

// dQ of one tile of queries: Q and dO are fixed, and K and V stream past, up to the diagonal.
template <int HS> __global__ void __launch_bounds__(TC_THREADS, 2) attention_backward_q_tc_kernel(bf16 *__restrict__ dqkv,
        const bf16 *__restrict__ dout, const bf16 *__restrict__ qkv, const float *__restrict__ lse,
        const float *__restrict__ D, int T, int NH, int KVH, float scale) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    constexpr int MT = TcBackward<HS>::MT, ROWS = TcBackward<HS>::ROWS, TILE = TC_STEP * HS;
    bf16 *tiles = (bf16 *)shared_memory;             // stage 0: K, V; stage 1: K, V
    const int lane = threadIdx.x % 32, warp = tc_warp();
    const int h = blockIdx.y, b = blockIdx.z, t0 = (gridDim.x - 1 - blockIdx.x) * ROWS;     // longest first
    const int stride = (NH + 2 * KVH) * HS, C = NH * HS;
    const int64_t row0 = (int64_t)b * T;
    const bf16 *k = qkv + row0 * stride + (int64_t)(NH + h / (NH / KVH)) * HS, *v = k + (int64_t)KVH * HS;
    const int w0 = t0 + warp * 16 * MT, end = t0 + ROWS < T ? t0 + ROWS : T;
    const float log2e = 1.4426950408889634f, c = scale * log2e;

    uint32_t qa[MT][HS / 16][4], ga[MT][HS / 16][4];
    tc_load_fixed<HS>(qa, ga, tiles, qkv + (row0 + t0) * stride + (int64_t)h * HS, stride,
                      dout + (row0 + t0) * C + (int64_t)h * HS, C, T - t0);
    float dq[MT][HS / 8][4] = {}, L[MT][2], Di[MT][2];
    #pragma unroll
    for (int m = 0; m < MT; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = w0 + m * 16 + half * 8 + lane / 4;
            const int64_t at = ((int64_t)b * NH + h) * T + row;
            L[m][half] = row < T ? lse[at] * log2e : INFINITY;
            Di[m][half] = row < T ? D[at] : 0;
        }
    }
    tc_load_tile<HS, TC_STEP>(tiles, k, stride, T);
    tc_load_tile<HS, TC_STEP>(tiles + TILE, v, stride, T);
    cp_async_commit();
    for (int s0 = 0, stage = 0; s0 < end; s0 += TC_STEP, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();
        bf16 *tk = tiles + 2 * stage * TILE, *tv = tk + TILE;
        const int ns = s0 + TC_STEP;
        if (ns < end) {
            tc_load_tile<HS, TC_STEP>(tiles + 2 * (stage ^ 1) * TILE, k + (int64_t)ns * stride, stride, T - ns);
            tc_load_tile<HS, TC_STEP>(tiles + (2 * (stage ^ 1) + 1) * TILE, v + (int64_t)ns * stride, stride, T - ns);
        }
        cp_async_commit();
        #pragma unroll 1
        for (int n0 = 0; n0 < TC_STEP && s0 + n0 <= w0 + 16 * MT - 1; n0 += 16) {
            float p[MT][2][4] = {}, ds[MT][2][4] = {};
            tc_product<HS>(p, qa, tk, n0);
            if (s0 + n0 + 15 > w0) {                 // on the diagonal: hide keys later than the query
                const int ahead = s0 + n0 + 2 * (lane % 4) - (w0 + lane / 4);
                #pragma unroll
                for (int j = 0; j < MT * 8; j++) {
                    if (ahead + j / 4 % 2 * 8 + j % 2 > j / 8 * 16 + j / 2 % 2 * 8) { p[j / 8][j / 4 % 2][j % 4] = -INFINITY; }
                }
            }
            tc_product<HS>(ds, ga, tv, n0);
            #pragma unroll
            for (int m = 0; m < MT; m++) {
                #pragma unroll
                for (int n = 0; n < 2; n++) {
                    #pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float x = tc_exp2(p[m][n][j] * c - L[m][j / 2]);
                        ds[m][n][j] = x * (ds[m][n][j] - Di[m][j / 2]);
                    }
                }
            }
            tc_add_product<HS>(dq, ds, tk, n0);
        }
    }
    __syncthreads();
    tc_store_rows<HS, MT>(dqkv + (row0 + w0) * stride + (int64_t)h * HS, stride, T - w0, tiles + warp * 16 * MT * HS, dq, scale);
}

template <int HS> void attention_forward_tc_launch(bf16 *out, float *lse, const bf16 *qkv, int B, int T, int NH,
        int KVH, cudaStream_t stream) {
    typedef TcForward<HS> F;
    const float c = (float)(1.4426950408889634 / sqrt((double)HS));
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_tc_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::SHARED));
    const dim3 grid((unsigned)ceil_div(T, F::ROWS), NH, B);
    attention_forward_tc_kernel<HS><<<grid, TC_THREADS, F::SHARED, stream>>>(out, lse, qkv, T, NH, KVH, c);
    LAUNCHED();
}

// out (B*T, NH*HS), lse (B,NH,T), qkv (B*T, (NH+2*KVH)*HS); HS is 64 or 128
inline void attention_forward_tc(bf16 *out, float *lse, const bf16 *qkv, int B, int T, int NH, int KVH, int HS,
        cudaStream_t stream) {
    if (HS == 64) { attention_forward_tc_launch<64>(out, lse, qkv, B, T, NH, KVH, stream); }
    else { attention_forward_tc_launch<128>(out, lse, qkv, B, T, NH, KVH, stream); }
}

template <int HS> void attention_backward_tc_launch(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv,
        const bf16 *out, const float *lse, int B, int T, int NH, int KVH, cudaStream_t stream) {
    typedef TcBackward<HS> K;
    const float scale = (float)(1 / sqrt((double)HS));
    const int64_t rows = (int64_t)B * T * NH;
    const unsigned dot_blocks = (unsigned)ceil_div(rows * (HS / 8), 256), tiles = (unsigned)ceil_div(T, K::ROWS);
    const dim3 kv_grid(tiles, KVH, B), q_grid(tiles, NH, B);
    attention_backward_dot_tc_kernel<HS><<<dot_blocks, 256, 0, stream>>>(D, dout, out, rows, T, NH);
    LAUNCHED();
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_kv_tc_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED));
    attention_backward_kv_tc_kernel<HS><<<kv_grid, TC_THREADS, K::SHARED, stream>>>(dqkv, dout, qkv, lse, D, T, NH, KVH, scale);
    LAUNCHED();
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_q_tc_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED));
    attention_backward_q_tc_kernel<HS><<<q_grid, TC_THREADS, K::SHARED, stream>>>(dqkv, dout, qkv, lse, D, T, NH, KVH, scale);
    LAUNCHED();
}

// dqkv, all of it, from dout (B*T, NH*HS); D (B,NH,T) is work space
inline void attention_backward_tc(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse,
        int B, int T, int NH, int KVH, int HS, cudaStream_t stream) {
    if (HS == 64) { attention_backward_tc_launch<64>(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, stream); }
    else { attention_backward_tc_launch<128>(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, stream); }
}

// ---- attention: which of the two ----
// qkv (B,T,(NH+2*KVH)*HS), out (B,T,NH*HS), lse (B,NH,T): as in train_gpt2.c.
template <typename F> void attention_forward(Gpu *gpu, F *out, float *lse, const F *qkv, int B, int T, int NH, int KVH, int HS) {
    if constexpr (std::is_same_v<F, bf16>) {
        if (HS == 64 || HS == 128) { attention_forward_tc(out, lse, qkv, B, T, NH, KVH, HS, gpu->stream); return; }
    }
    attention_forward_plain(out, lse, qkv, B, T, NH, KVH, HS, gpu->stream);
}

// dqkv is overwritten; D (B,NH,T) is work space.
template <typename F> void attention_backward(Gpu *gpu, F *dqkv, float *D, const F *dout, const F *qkv, const F *out, const float *lse,
        int B, int T, int NH, int KVH, int HS) {
    if constexpr (std::is_same_v<F, bf16>) {
        if (HS == 64 || HS == 128) { attention_backward_tc(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, HS, gpu->stream); return; }
    }
    attention_backward_plain(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, HS, gpu->stream);
}

} // namespace gpu
