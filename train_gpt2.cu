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

// qkv (B,T,(NH+2*KVH)*HS), out (B,T,NH*HS), lse (B,NH,T): as in train_gpt2.c. F is float or bf16.
template <typename F> void attention_forward(Gpu *gpu, F *out, float *lse, const F *qkv, int B, int T, int NH, int KVH, int HS);
// dqkv is overwritten; D (B,NH,T) is work space.
template <typename F> void attention_backward(Gpu *gpu, F *dqkv, float *D, const F *dout, const F *qkv, const F *out, const float *lse, int B, int T, int NH, int KVH, int HS);

} // namespace gpu
