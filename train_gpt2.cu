// scale-vector GPT on NVIDIA GPUs: the twin of train_gpt2.c, section by section and name by name.
//
// train_gpt2.c is included, for all that doesn't compute: flags, the table of parameters, data, checkpoints, the training
// loop. What computes follows here in namespace gpu, under the names and in the order of its sections 3 to 6, so that
// gpu::rmsnorm_forward does on a GPU what ::rmsnorm_forward does on a CPU (a kernel is called rmsnorm_forward_kernel).
// What a GPU does in one pass, to read memory once, has a name of its own, and its comment names the twins. After section 6 comes
// what the CPU has no twin for, many GPUs; then the way between host and device, and the machine that the loop of section 10 calls.
//
//     theta  fp32  --reparameterize_forward-->   theta~  F     --gpt_forward-->   loss        once a step | once a micro-batch
//     dtheta fp32  <--reparameterize_backward--  dtheta~ fp32  <--gpt_backward--
//
// F is float or bf16 (--precision): the type of effective weights and activations. theta, optimizer moments, gradients of
// weights and sums are fp32 either way. So the bf16 copy of the weights that mixed precision needs anyway is theta~, and
// scale vectors cost nothing in the model, but where a norm follows (DNP).
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
#ifndef NO_NCCL
#include <nccl.h>
#else // without it, one GPU: none of these is reached
struct ncclUniqueId { char internal[128]; };
typedef struct ncclComm *ncclComm_t;
enum ncclResult_t { ncclSuccess, ncclSystemError, ncclInternalError, ncclRemoteError, ncclInProgress };
enum ncclDataType_t { ncclInt64, ncclFloat32, ncclFloat64, ncclBfloat16 };
enum { ncclSum };
#define NCCL_ABSENT(name) template <typename... Args> static ncclResult_t name(Args...) { return ncclInternalError; }
NCCL_ABSENT(ncclGetUniqueId) NCCL_ABSENT(ncclCommInitRank) NCCL_ABSENT(ncclCommDestroy) NCCL_ABSENT(ncclCommAbort) NCCL_ABSENT(ncclCommGetAsyncError)
NCCL_ABSENT(ncclGroupStart) NCCL_ABSENT(ncclGroupEnd) NCCL_ABSENT(ncclAllReduce) NCCL_ABSENT(ncclReduce) NCCL_ABSENT(ncclBroadcast) NCCL_ABSENT(ncclSend) NCCL_ABSENT(ncclRecv)
static const char *ncclGetErrorString(ncclResult_t) { return "built without NCCL"; }
#endif
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>
#ifdef USE_MPI
#include <mpi.h>
#endif

static_assert(sizeof(real) == sizeof(float), "theta is fp32 on the GPU");

#define CUDA_CHECK(call) do { cudaError_t status_ = (call); \
    if (status_ != cudaSuccess) { FAIL("%s: %s: %s", #call, cudaGetErrorName(status_), cudaGetErrorString(status_)); } } while (0)
#define CUBLAS_CHECK(call) do { cublasStatus_t status_ = (call); \
    if (status_ != CUBLAS_STATUS_SUCCESS) { FAIL("%s: %s", #call, cublasLtGetStatusString(status_)); } } while (0)
#define NCCL_CHECK(call) do { ncclResult_t status_ = (call); \
    if (status_ != ncclSuccess) { gpu::wait_for_blame(status_); FAIL("%s: %s", #call, ncclGetErrorString(status_)); } } while (0)
#define MPI_CHECK(call) do { if ((call) != MPI_SUCCESS) { FAIL("%s: failed", #call); } } while (0)
#define LAUNCHED() CUDA_CHECK(cudaGetLastError()) // follows each <<<>>>

namespace gpu {

typedef __nv_bfloat16 bf16;
static void wait_for_blame(ncclResult_t status); // Many GPUs, below

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

struct PlanKey {                   // what cuBLAS chooses an algorithm by
    int64_t M, N, K, lda, ldb, ldc, batch, stride_a, stride_b, stride_c;
    int trans_a, trans_b, type_in, type_out, add, alignment; // alignment: of the least aligned matrix, in bytes
    auto operator<=>(const PlanKey &) const = default;
};
struct Plan { cublasLtMatmulDesc_t product; cublasLtMatrixLayout_t a, b, c; cublasLtMatmulAlgo_t algorithm; };

struct Gpu {
    int device, rank, world;       // rank of world GPUs
    int local;                     // its number among those of this process
    cudaStream_t stream;
    cublasLtHandle_t blas;
    void *workspace;               // of cuBLAS
    std::map<PlanKey, Plan> plans;
    ncclComm_t comm;               // with world > 1, and the stream of all that goes through it
    cudaStream_t comm_stream;
    cudaEvent_t handed, returned;  // to the stream of collectives, and back
};
constexpr size_t WORKSPACE = (size_t)32 << 20; // what cuBLAS asks for on sm_90

static void gpu_open(Gpu *gpu, int device, int rank, int world) {
    gpu->device = device;
    gpu->rank = rank;
    gpu->world = world;
    CUDA_CHECK(cudaSetDevice(device));
    gpu->local = 0;
    CUDA_CHECK(cudaStreamCreate(&gpu->stream));
    if (world > 1) {
        CUDA_CHECK(cudaStreamCreate(&gpu->comm_stream));
        CUDA_CHECK(cudaEventCreateWithFlags(&gpu->handed, cudaEventDisableTiming));
        CUDA_CHECK(cudaEventCreateWithFlags(&gpu->returned, cudaEventDisableTiming));
    }
    CUBLAS_CHECK(cublasLtCreate(&gpu->blas));
    CUDA_CHECK(cudaMalloc(&gpu->workspace, WORKSPACE));
}

static void gpu_close(Gpu *gpu) {
    for (auto &[key, plan] : gpu->plans) {
        CUBLAS_CHECK(cublasLtMatmulDescDestroy(plan.product));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan.a));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan.b));
        CUBLAS_CHECK(cublasLtMatrixLayoutDestroy(plan.c));
    }
    gpu->plans.clear();
    CUDA_CHECK(cudaFree(gpu->workspace));
    if (gpu->world > 1) {
        if (gpu->comm) { NCCL_CHECK(ncclCommDestroy(gpu->comm)); }
        CUDA_CHECK(cudaEventDestroy(gpu->handed));
        CUDA_CHECK(cudaEventDestroy(gpu->returned));
        CUDA_CHECK(cudaStreamDestroy(gpu->comm_stream));
    }
    CUBLAS_CHECK(cublasLtDestroy(gpu->blas));
    CUDA_CHECK(cudaStreamDestroy(gpu->stream));
}

// ----------------------------------------------------------------------------------------------------
// 2. Parameters: where those of the table are on the device. All offsets are in elements.

enum { MAP_ROWS = 64, MAP_COLS = 128, NORM_BLOCKS = 256 }; // of a map that a block of reparameterization takes
constexpr int UPDATE_BLOCK = 4096; // elements that a block of the optimizers takes
constexpr int PAD = 8;             // rows of tensors begin at multiples of so many elements: 16 bytes of bf16

struct Place {                     // of a parameter, by its index in the table; with --zero 1 of some rows of it
    int64_t at;                    // in theta and first moments
    int64_t eff;                   // in theta~ (of a matrix) and gradients: the same, but with --zero 1
    int64_t row;                   // first row
    int param;                     // index in the table
    int64_t v;                     // in the second moments, or -1
    int64_t rows, cols, ld;        // rows with their pads; columns; columns with their pads, the distance of rows
    int64_t gamma;                 // of a scale vector: in gamma and dgamma, or -1
    int64_t first_block;           // of the kernels that walk over all parameters
    float decay, rate;             // --weight-decay, or 0; learning rate over that of the step: --scale-lr for scale vectors
    int muon;
};
struct Map {                       // a linear map: what a LinearMap of train_gpt2.c says, with offsets for indices
    int64_t w, d;                  // W in theta, and dL/dW in dtheta
    int64_t eff;                   // W~ in theta~, and dL/dW~ in dtheta: at d, too, but for a tied head
    int param;                     // index of W in the table
    int64_t rows, cols, ld;        // without pads; the distance of rows
    int64_t gamma_a, gamma_b;      // in gamma, or -1
    int64_t partial;               // its sums over blocks of rows, for dgamma_b: (blocks, ld)
    int64_t first_forward, first_backward; // first block of the kernels that walk over all maps
};
struct Vector { int64_t alpha, beta, d_alpha, d_beta, gamma, n, partial, parts; }; // a scale vector; parts: rows (ld) of partial sums of dgamma_b

struct MuonMatrix { int64_t at, eff, rows, ld; int flip; float keep, rate; }; // flip: more rows than columns

struct Piece { int param, owner; int64_t row, rows; }; // rows of a matrix that one of several GPUs owns; pads included
struct Span { int64_t at, n; int owner; };             // neighbouring elements of gradients (and theta~)

template <typename F> struct FfnActs { // names and shapes as in train_gpt2.c, H padded
    F *gu_raw;                     // (n,2H) what swiglu_forward reads: Output-Norms are part of it, so that there is no gu
    float *gu_rstd;                // (n,2)
    F *h, *down_raw;
    float *down_rstd;
};
template <typename F> struct MoeActs { // rows of N K, each expert's rounded up
    float *probs, *lse, *weights;
    int32_t *chosen, *row;
    int32_t *source;               // (rows) which of the N K a row holds; -1: none
    int32_t *begin, *count;        // (E+1) first rows of experts; (E) how many tokens they have
    int32_t *host_begin;           // begin, in the memory of the host
    F *x, *y;
    FfnActs<F> experts;
    F *sum;
    float *sum_rstd;
};
template <typename F> struct LayerActs {
    F *x, *ln1;
    float *ln1_rstd;
    F *qkv_raw;                    // before Output-Norms and RoPE; without norms it is turned in place and is qkv
    F *att;
    float *lse;
    F *o_raw;
    float *o_rstd;
    F *x2, *ln2;
    float *ln2_rstd;
    FfnActs<F> ffn;
    MoeActs<F> moe;
};

struct Stats {                     // made on the device and copied to the host at the end of a step
    double loss, balance_loss, z_loss; // of all micro-batches
    double squares;                // of the gradient
    double stop;                   // how many processes have got a signal
    double eval;                   // mean loss of the last forward without gradients
    float norm, clip;              // of the gradient; what the optimizer multiplies it by
};

// Takes tensors from one block of device memory. With base NULL it only counts. In the emulation each tensor is an
// allocation of its own, so that overruns are caught.
struct Arena { char *base; size_t used; std::vector<void *> own; };

template <typename F> struct Model {
    ::GPT *host;
    Gpu *gpu;
    Arena arena;
    int rank, world, divided;      // divided: --zero 1, theta and moments are only those that this GPU owns
    std::vector<Place> places;     // like host->params
    std::vector<Map> maps;         // like host->maps, then the embedding
    std::vector<Piece> pieces;     // who owns what, by parameter and row
    std::vector<Place> own;        // what this GPU has in theta and moments: all of places, or its share
    std::vector<int> own_of;       // of each parameter: index of its first entry in own, or -1
    std::vector<Map> own_maps;     // likewise
    std::vector<Vector> vectors;
    std::vector<Span> norm_spans;  // whose part of the gradient's norm is this GPU's to count
    std::vector<std::vector<Span>> buckets; // of gradients: the head, each layer, the embedding
    std::vector<Span> muon_spans;  // theta of Muon's matrices
    int last;                      // the backward at work is the last of the step
    std::vector<int32_t> batch;    // inputs and targets
    int64_t num_theta, num_eff, num_v, num_gamma, num_partial; // lengths, pads included
    int64_t forward_blocks, backward_blocks, theta_blocks;
    Place *d_places;
    Map *d_maps;
    Vector *d_vectors;
    Span *d_spans;                 // norm_spans
    float *theta, *grads, *m, *v;
    F *theta_eff;                  // theta~
    float *gamma, *dgamma;
    std::vector<LayerActs<F>> acts;
    F *x_final, *ln_final, *d_ln_final;
    float *ln_final_rstd;
    F *qkv;                        // (N,Q) of the layer at work, where it has Output-Norms: is work
    float *qkv_rstd;               // (N,NH+2KVH)
    void *work;                    // shared by what isn't needed at the same time: qkv, logits, partial sums of dgamma_b, Muon
    size_t work_bytes;
    F *logits;                     // (head_chunk,V): is work
    float *partial;                // partial sums over rows
    float *losses, *head_stats;    // (N); (head_chunk,3): of a logit norm
    int32_t *staged, *host_staged; // inputs, targets, and the order in which embedding_backward adds: see stage_batch
    int32_t *inputs, *targets, *order, *tokens, *runs;
    int num_runs;
    cudaEvent_t copied;
    float *rope_cos, *rope_sin, *att_dot;
    F *dx, *branch, *d_wide, *d_att; // branch: what is added to the residual stream, and its gradient
    F *d_rows, *d_logits, *d_sum, *d_shared;
    float *d_weights;
    int64_t *expert_tokens;        // (L,E)
    Stats *stats, *host_stats;
    double *norm_parts;
    MuonMatrix *d_matrices, *host_matrices; // as many as there are in a step
    int64_t matrices_used;
    int64_t head_chunk, B, T;
    int accumulate, recompute;
    double grad_scale;
};

static bool is_bf16(const Config *cfg) { return cfg->precision != PRECISION_FP32; }

// Gives each parameter its place. q k v, and gate up, stay side by side. The rows of gate, up, router, head and embedding are
// columns of activations, so they are padded too.
template <typename F> static void layout_places(Model<F> *m) {
    const ::GPT *host = m->host;
    const Config *cfg = &host->cfg;
    std::vector<int> pads((size_t)host->num_params, 0);
    pads[0] = 1;
    for (int i = 0; i < host->num_maps; i++) {
        int site = host->maps[i].site;
        if (site == SITE_GATE || site == SITE_UP || site == SITE_ROUTER || site == SITE_HEAD) { pads[host->maps[i].weight] = 1; }
    }
    m->places.clear();
    m->maps.clear();
    m->num_eff = m->num_v = m->num_gamma = 0;
    for (int i = 0; i < host->num_params; i++) {
        const ::Param *p = &host->params[i];
        Place place = {};
        place.at = place.eff = m->num_eff;
        place.param = i;
        place.rows = pads[i] ? round_up(p->rows, PAD) : p->rows;
        place.cols = p->cols;
        place.ld = round_up(p->cols, PAD);
        int64_t size = place.rows * place.ld;
        place.v = place.gamma = -1;
        if (p->v >= 0) { place.v = m->num_v; m->num_v += size; }
        if (p->gamma >= 0) { place.gamma = m->num_gamma; m->num_gamma += place.ld; }
        place.decay = param_decays(host, p) ? (float)cfg->weight_decay : 0.0f;
        place.rate = (float)param_rate(host, p);
        place.muon = cfg->optimizer == OPTIMIZER_MUON && role_table[p->role].muon;
        m->num_eff += size;
        m->places.push_back(place);
    }
    auto gamma_of = [&](int param) { return param < 0 ? -1 : m->places[param].gamma; };
    for (int i = 0; i <= host->num_maps; i++) { // the last one is the embedding, where it isn't the head's W~ itself
        const ::LinearMap *from = i < host->num_maps ? &host->maps[i] : NULL, *head = gpt_head(host);
        int scaled = from && (from->gamma_a >= 0 || from->gamma_b >= 0), tied = cfg->tie_embeddings && from == head;
        if (!from && cfg->tie_embeddings && !map_has_copy(host, head)) { break; }
        const Place *place = &m->places[from ? from->weight : 0];
        Map map = {};
        map.param = place->param;
        map.w = map.d = map.eff = place->at;
        if (tied && scaled) { map.eff = m->num_eff; m->num_eff += place->rows * place->ld; }
        map.rows = host->params[from ? from->weight : 0].rows;
        map.cols = place->cols;
        map.ld = place->ld;
        map.gamma_a = from ? gamma_of(from->gamma_a) : -1;
        map.gamma_b = from ? gamma_of(from->gamma_b) : -1;
        m->maps.push_back(map);
    }
}

// Which GPU owns what: embedding and head by rows, other matrices whole, the largest first, each to the one that has least
// so far. Scale vectors are everybody's. In order of parameters and rows.
static std::vector<Piece> share_out(const ::GPT *host, const std::vector<Place> &places, int world) {
    std::vector<Piece> pieces;
    std::vector<int64_t> load((size_t)world, 0);
    std::vector<int> matrices, owner((size_t)host->num_params, 0);
    auto size = [&](int i) { return places[(size_t)i].rows * places[(size_t)i].ld; };
    auto by_rows = [&](int i) { return host->params[i].role == ROLE_EMBEDDING || host->params[i].role == ROLE_HEAD; };
    for (int i = 0; i < host->num_params; i++) { if (host->params[i].role < ROLE_GAMMA_B && !by_rows(i)) { matrices.push_back(i); } }
    std::stable_sort(matrices.begin(), matrices.end(), [&](int a, int b) { return size(a) > size(b); });
    for (int i : matrices) {
        owner[(size_t)i] = (int)(std::min_element(load.begin(), load.end()) - load.begin());
        load[(size_t)owner[(size_t)i]] += size(i);
    }
    for (int i = 0; i < host->num_params; i++) {
        int64_t rows = places[(size_t)i].rows;
        if (host->params[i].role >= ROLE_GAMMA_B) { continue; }
        for (int r = 0; r < world; r++) {
            int64_t first = by_rows(i) ? rows * r / world : 0, end = by_rows(i) ? rows * (r + 1) / world : rows;
            if (end > first && (by_rows(i) || r == owner[(size_t)i])) { pieces.push_back(Piece{i, r, first, end - first}); }
        }
    }
    return pieces;
}

static void add_span(std::vector<Span> &spans, int64_t at, int64_t n, int owner) {
    if (!spans.empty() && spans.back().owner == owner && spans.back().at + spans.back().n == at) { spans.back().n += n; }
    else { spans.push_back(Span{at, n, owner}); }
}

// What of theta and moments this GPU has, what it counts and updates, and what is summed over the GPUs together.
template <typename F> static void layout_share(Model<F> *m) {
    const ::GPT *host = m->host;
    const Config *cfg = &host->cfg;
    std::vector<std::vector<Piece>> of((size_t)host->num_params); // pieces of each parameter
    std::vector<int64_t> vector_at((size_t)host->num_params, -1);
    m->divided = cfg->zero == 1 && m->world > 1;
    m->pieces = share_out(host, m->places, m->world);
    for (const Piece &piece : m->pieces) { of[(size_t)piece.param].push_back(piece); }
    m->own.clear();
    m->own_of.assign((size_t)host->num_params, -1);
    m->own_maps.clear();
    m->vectors.clear();
    m->norm_spans.clear();
    m->muon_spans.clear();
    m->num_theta = m->num_v = m->num_partial = m->forward_blocks = m->backward_blocks = m->theta_blocks = 0;
    for (int i = 0; i < host->num_params; i++) {
        const Place *whole = &m->places[(size_t)i];
        int is_vector = of[(size_t)i].empty();
        auto take = [&](int64_t row, int64_t rows) {
            Place place = *whole;
            int64_t size = rows * place.ld;
            place.at = m->num_theta;
            place.eff += row * place.ld;
            place.row = row;
            place.rows = rows;
            if (place.v >= 0) { place.v = m->num_v; m->num_v += size; }
            place.first_block = m->theta_blocks;
            if (!place.muon) { m->theta_blocks += ceil_div(size, UPDATE_BLOCK); }
            m->num_theta += size;
            if (m->own_of[(size_t)i] < 0) { m->own_of[(size_t)i] = (int)m->own.size(); }
            m->own.push_back(place);
        };
        if (is_vector) { vector_at[(size_t)i] = m->num_theta; }
        if (is_vector || !m->divided) { take(0, whole->rows); }
        if (is_vector && m->rank == 0) { add_span(m->norm_spans, whole->eff, whole->rows * whole->ld, 0); }
        for (const Piece &piece : of[(size_t)i]) {
            int64_t at = whole->eff + piece.row * whole->ld, n = piece.rows * whole->ld;
            if (piece.owner == m->rank && m->divided) { take(piece.row, piece.rows); }
            if (piece.owner == m->rank) { add_span(m->norm_spans, at, n, 0); }
            if (whole->muon) { add_span(m->muon_spans, at, n, piece.owner); }
        }
    }
    for (const Map &whole : m->maps) {
        int first = m->own_of[(size_t)whole.param];
        for (size_t k = (size_t)first; first >= 0 && k < m->own.size() && m->own[k].param == whole.param; k++) {
            const Place &place = m->own[k];
            Map map = whole;
            map.w = place.at;
            map.d += place.row * map.ld;
            map.eff += place.row * map.ld;
            map.rows = at_most(whole.rows - place.row, place.rows);
            if (map.rows <= 0) { continue; } // pads
            if (map.gamma_a >= 0) { map.gamma_a += place.row; }
            map.first_forward = m->forward_blocks;
            map.first_backward = m->backward_blocks;
            m->forward_blocks += ceil_div(map.rows, MAP_ROWS);
            if (map.gamma_a >= 0 || map.gamma_b >= 0) { m->backward_blocks += ceil_div(map.rows, MAP_ROWS); }
            m->own_maps.push_back(map);
        }
    }
    if (!m->divided) { m->maps = m->own_maps; } // one for one
    m->buckets.assign((size_t)cfg->layers + 2, {});
    for (size_t i = 0; i < m->maps.size(); i++) {
        const Map *map = &m->maps[i];
        int layer = i < (size_t)host->num_maps ? host->maps[i].layer : -1;
        size_t bucket = layer >= 0 ? (size_t)layer + 1 : map->eff == m->places[0].eff ? (size_t)cfg->layers + 1 : 0;
        for (const Piece &piece : of[(size_t)map->param]) { add_span(m->buckets[bucket], map->eff + piece.row * map->ld, piece.rows * map->ld, m->divided ? piece.owner : -1); }
    }
    // The parts of one dgamma_b, of all maps that share it, lie side by side: first they are counted, then placed.
    std::map<int64_t, int64_t> parts, next; // by the vector's offset in gamma
    for (const Map &map : m->own_maps) { if (map.gamma_b >= 0) { parts[map.gamma_b] += ceil_div(map.rows, MAP_ROWS); } }
    for (int i = 0; i < host->num_params; i++) {
        const Place *place = &m->places[(size_t)i];
        if (place->gamma < 0) { continue; }
        int beta = host->params[i].beta;
        m->vectors.push_back(Vector{vector_at[(size_t)i], beta < 0 ? -1 : vector_at[(size_t)beta], place->eff, beta < 0 ? -1 : m->places[(size_t)beta].eff, place->gamma, place->cols, m->num_partial, parts[place->gamma]});
        next[place->gamma] = m->num_partial;
        m->num_partial += parts[place->gamma] * place->ld;
    }
    for (Map &map : m->own_maps) {
        if (map.gamma_b < 0) { continue; }
        map.partial = next[map.gamma_b];
        next[map.gamma_b] += ceil_div(map.rows, MAP_ROWS) * map.ld;
    }
}

// Element of a table whose entries own ranges of blocks: the last one that begins at or before `block`.
template <typename Entry> __device__ inline int find_block(const Entry *entries, int count, int64_t Entry::*first, int64_t block) {
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (entries[middle].*first <= block) { low = middle; } else { high = middle - 1; }
    }
    return low;
}

// ----------------------------------------------------------------------------------------------------
// 3. Scale vectors: theta -> theta~ and dtheta~ -> dtheta, a few launches for all tensors together.

__global__ void __launch_bounds__(256) scale_vector_forward_kernel(float *gamma, const float *theta, const Vector *vectors, int reparam) {
    __shared__ float scratch[32];
    const Vector v = vectors[blockIdx.x];
    const float *alpha = theta + v.alpha;
    float *out = gamma + v.gamma, sum = 0, beta = v.beta < 0 ? 0 : theta[v.beta];
    for (int64_t i = threadIdx.x; i < v.n && reparam != REPARAM_NONE; i += blockDim.x) { sum += reparam == REPARAM_OR ? alpha[i] * alpha[i] : alpha[i]; }
    float mean = block_sum(sum, scratch) / (float)v.n, factor = beta / sqrtf(mean + (float)NORM_EPS);
    for (int64_t i = threadIdx.x; i < v.n; i += blockDim.x) {
        out[i] = reparam == REPARAM_NONE ? alpha[i] : reparam == REPARAM_OR ? factor * alpha[i] : expf(beta + (alpha[i] - mean));
    }
}

__global__ void __launch_bounds__(256) scale_vector_backward_kernel(float *grads, const float *dgamma, const float *gamma, const float *theta, const Vector *vectors, int reparam) {
    __shared__ float scratch[2][32];
    const Vector v = vectors[blockIdx.x];
    const float *alpha = theta + v.alpha, *d = dgamma + v.gamma, *g = gamma + v.gamma;
    float *dalpha = grads + v.d_alpha, squares = 0, dot = 0;
    if (reparam == REPARAM_NONE) {
        for (int64_t i = threadIdx.x; i < v.n; i += blockDim.x) { dalpha[i] = d[i]; }
        return;
    }
    for (int64_t i = threadIdx.x; i < v.n; i += blockDim.x) {
        squares += alpha[i] * alpha[i];
        dot += d[i] * (reparam == REPARAM_OR ? alpha[i] : g[i]);
    }
    squares = block_sum(squares, scratch[0]);
    dot = block_sum(dot, scratch[1]);
    float rstd = 1 / sqrtf(squares / (float)v.n + (float)NORM_EPS), factor = theta[v.beta] * rstd;
    if (threadIdx.x == 0) { grads[v.d_beta] = reparam == REPARAM_OR ? dot * rstd : dot; }
    for (int64_t i = threadIdx.x; i < v.n; i += blockDim.x) {
        dalpha[i] = reparam == REPARAM_OR ? factor * (d[i] - alpha[i] * (rstd * rstd * dot / (float)v.n)) : d[i] * g[i] - dot / (float)v.n;
    }
}

// W~ = diag(gamma_a) W diag(gamma_b), rounded to F. A block takes MAP_ROWS rows of one map, a warp a row at a time.
template <typename F> __global__ void __launch_bounds__(256) reparameterize_forward_kernel(F *theta_eff, const float *theta, const float *gamma, const Map *maps, int num_maps) {
    const Map map = maps[find_block(maps, num_maps, &Map::first_forward, blockIdx.x)];
    int64_t row0 = (blockIdx.x - map.first_forward) * MAP_ROWS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int64_t r = row0 + warp; r < row0 + MAP_ROWS && r < map.rows; r += 8) {
        float a = map.gamma_a < 0 ? 1 : gamma[map.gamma_a + r];
        for (int64_t c = lane * PAD; c < map.ld; c += 32 * PAD) {
            auto w = load<PAD>(theta + map.w + r * map.ld + c);
            Packed<F, PAD> out;
            if (map.gamma_b < 0) {
                for (int i = 0; i < PAD; i++) { out.set(i, a * w[i]); }
            } else {
                auto b = load<PAD>(gamma + map.gamma_b + c);
                for (int i = 0; i < PAD; i++) { out.set(i, a * w[i] * b[i]); }
            }
            store(theta_eff + map.eff + r * map.ld + c, out);
        }
    }
}

// With G = dL/dW~:  dW = a G b,  da_i = sum_j G_ij W_ij b_j,  db_j = sum_i a_i G_ij W_ij. G and dW share their memory, but for a
// tied head, whose dW is added to that of the embedding. A block takes MAP_ROWS rows of one map, a warp 8 of them, MAP_COLS
// columns at a time; what db_j gets from the rows of a block goes to `partial`, and from there to dgamma in a fixed order.
__global__ void __launch_bounds__(256) map_backward_kernel(float *grads, float *dgamma, float *partial, const float *theta, const float *gamma, const Map *maps, int num_maps) {
    __shared__ float parts[8][MAP_COLS];
    const Map map = maps[find_block(maps, num_maps, &Map::first_backward, blockIdx.x)];
    int64_t block = blockIdx.x - map.first_backward, row0 = block * MAP_ROWS;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float da[MAP_ROWS / 8] = {};
    for (int64_t c0 = 0; c0 < map.ld; c0 += MAP_COLS) {
        int64_t c = c0 + lane * 4;
        float db[4] = {}, b[4] = {1, 1, 1, 1};
        if (c < map.ld) {
            if (map.gamma_b >= 0) {
                auto g = load<4>(gamma + map.gamma_b + c);
                for (int i = 0; i < 4; i++) { b[i] = g[i]; }
            }
            for (int k = 0; k < MAP_ROWS / 8; k++) {
                int64_t r = row0 + warp + 8 * k;
                if (r >= map.rows) { continue; }
                auto g = load<4>(grads + map.eff + r * map.ld + c), w = load<4>(theta + map.w + r * map.ld + c);
                float a = map.gamma_a < 0 ? 1 : gamma[map.gamma_a + r];
                Packed<float, 4> out = {};
                if (map.eff != map.d) { out = load<4>(grads + map.d + r * map.ld + c); }
                for (int i = 0; i < 4; i++) {
                    da[k] += g[i] * b[i] * w[i];
                    db[i] += a * g[i] * w[i];
                    out.value[i] += a * g[i] * b[i];
                }
                store(grads + map.d + r * map.ld + c, out);
            }
        }
        if (map.gamma_b < 0) { continue; }
        for (int i = 0; i < 4; i++) { parts[warp][lane * 4 + i] = db[i]; }
        __syncthreads();
        if (threadIdx.x < MAP_COLS && c0 + threadIdx.x < map.ld) {
            float sum = 0;
            for (int i = 0; i < 8; i++) { sum += parts[i][threadIdx.x]; }
            partial[map.partial + block * map.ld + c0 + threadIdx.x] = sum;
        }
        __syncthreads();
    }
    if (map.gamma_a < 0) { return; }
    for (int k = 0; k < MAP_ROWS / 8; k++) {
        int64_t r = row0 + warp + 8 * k;
        float sum = warp_sum(da[k]);
        if (lane == 0 && r < map.rows) { dgamma[map.gamma_a + r] = sum; }
    }
}

// Sums of the columns of partial (rows, ld), added to out (cols). Blocks of 32 columns by 8 interleaved parts of the rows.
__device__ inline void column_sum(float *out, const float *partial, int64_t rows, int64_t cols, int64_t ld, int64_t first, float (*parts)[32]) {
    int64_t c = first + threadIdx.x;
    float sum = 0;
    for (int64_t r = threadIdx.y; r < rows && c < cols; r += 8) { sum += partial[r * ld + c]; }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && c < cols) {
        float total = 0;
        for (int i = 0; i < 8; i++) { total += parts[i][threadIdx.x]; }
        out[c] += total;
    }
}
// y: experts, each with `rows` rows of its own and its own out at a distance of `stride`
__global__ void __launch_bounds__(256) column_sum_kernel(float *out, const float *partial, int64_t rows, int64_t cols, int64_t ld, int64_t stride) {
    __shared__ float parts[8][32];
    column_sum(out + blockIdx.y * stride, partial + blockIdx.y * rows * ld, rows, cols, ld, (int64_t)blockIdx.x * 32, parts);
}
__global__ void __launch_bounds__(256) vectors_sum_kernel(float *dgamma, const float *partial, const Vector *vectors) { // x: vectors
    __shared__ float parts[8][32];
    const Vector v = vectors[blockIdx.x];
    column_sum(dgamma + v.gamma, partial + v.partial, v.parts, v.parts ? v.n : 0, round_up(v.n, PAD), (int64_t)blockIdx.y * 32, parts);
}
static void column_sum(Gpu *gpu, float *out, const float *partial, int64_t rows, int64_t cols, int64_t ld, int experts = 1, int64_t stride = 0) {
    column_sum_kernel<<<dim3((unsigned)ceil_div(cols, 32), (unsigned)experts), dim3(32, 8), 0, gpu->stream>>>(out, partial, rows, cols, ld, stride);
    LAUNCHED();
}

template <typename F> static void share_effective(Model<F> *m); // Many GPUs, below
template <typename F> static void sum_dgamma(Model<F> *m);

template <typename F> static void reparameterize_forward(Model<F> *m) {
    if (!m->vectors.empty()) {
        scale_vector_forward_kernel<<<(unsigned)m->vectors.size(), 256, 0, m->gpu->stream>>>(m->gamma, m->theta, m->d_vectors, m->host->cfg.reparam);
        LAUNCHED();
    }
    if (m->forward_blocks) { reparameterize_forward_kernel<F><<<(unsigned)m->forward_blocks, 256, 0, m->gpu->stream>>>(m->theta_eff, m->theta, m->gamma, m->d_maps, (int)m->own_maps.size()); }
    LAUNCHED();
    share_effective(m);
}

template <typename F> static void reparameterize_backward(Model<F> *m) {
    if (!m->divided) { sum_dgamma(m); }
    if (m->backward_blocks) {
        map_backward_kernel<<<(unsigned)m->backward_blocks, 256, 0, m->gpu->stream>>>(m->grads, m->dgamma, (float *)m->work, m->theta, m->gamma, m->d_maps, (int)m->own_maps.size());
        LAUNCHED();
    }
    if (m->vectors.empty()) { return; }
    int64_t widest = 0;
    for (const Vector &v : m->vectors) { if (v.parts && v.n > widest) { widest = v.n; } }
    if (widest) {
        vectors_sum_kernel<<<dim3((unsigned)m->vectors.size(), (unsigned)ceil_div(widest, 32)), dim3(32, 8), 0, m->gpu->stream>>>(m->dgamma, (const float *)m->work, m->d_vectors);
        LAUNCHED();
    }
    if (m->divided) { sum_dgamma(m); } // each GPU has added what its matrices say
    scale_vector_backward_kernel<<<(unsigned)m->vectors.size(), 256, 0, m->gpu->stream>>>(m->grads, m->dgamma, m->gamma, m->theta, m->d_vectors, m->host->cfg.reparam);
    LAUNCHED();
}

// ----------------------------------------------------------------------------------------------------
// 4. Layers.

__device__ inline float exp_of(float x, float) { return expf(x); }
__device__ inline float exp_of(float x, bf16) { return __expf(x); } // its error is far below bf16's

// Matrix products by cuBLASLt, row-major: C (M,N) = alpha A B + beta C_in, with A (M,K) or, transposed, stored as (K,M), B (K,N) or
// stored as (N,K); lda, ldb, ldc: distances of rows. bf16 inputs, fp32 sums, output of either type: so gradients of weights are
// added up in fp32. batch matrices at strides.
//
// cuBLAS is column-major: what is C (M,N) here is C^T (N,M) there, and C^T = B^T A^T, so A and B change places and nothing else.
// An algorithm is chosen at the first product of a shape and kept, which also makes the bits repeat. Splitting K is allowed
// only where its parts are added in fp32; the default would let them be added in bf16.
struct Matrix { const void *data; int64_t ld, stride; int transposed; };

template <typename F> constexpr cudaDataType_t data_type() { return sizeof(F) == 2 ? CUDA_R_16BF : CUDA_R_32F; }
static int64_t alignment_of(const void *p) { uintptr_t a = (uintptr_t)p; return a % 256 == 0 ? 256 : (int64_t)(a & (~a + 1)); }

static Plan plan_product(Gpu *gpu, const PlanKey &key) {
    Plan plan;
    auto layout = [&](cublasLtMatrixLayout_t *l, int type, int64_t rows, int64_t cols, int64_t ld, int64_t stride) {
        int32_t batch = (int32_t)key.batch;
        CUBLAS_CHECK(cublasLtMatrixLayoutCreate(l, (cudaDataType_t)type, (uint64_t)rows, (uint64_t)cols, ld));
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
        CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
    };
    cublasOperation_t op_a = key.trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, op_b = key.trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    CUBLAS_CHECK(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof op_b));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof op_a));
    layout(&plan.a, key.type_in, key.trans_a ? key.M : key.K, key.trans_a ? key.K : key.M, key.lda, key.stride_a);
    layout(&plan.b, key.type_in, key.trans_b ? key.K : key.N, key.trans_b ? key.N : key.K, key.ldb, key.stride_b);
    layout(&plan.c, key.type_out, key.N, key.M, key.ldc, key.stride_c);
    cublasLtMatmulPreference_t wish;
    uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, aligned = (uint32_t)key.alignment;
    size_t workspace = WORKSPACE;
    CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&wish));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wish, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof schemes));
    for (auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
        CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wish, which, &aligned, sizeof aligned));
    }
    cublasLtMatmulHeuristicResult_t found;
    int count = 0;
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gpu->blas, plan.product, plan.b, plan.a, plan.c, plan.c, wish, 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
        FAIL("cuBLAS has no algorithm for a product (%lld,%lld) x (%lld,%lld): %s", (long long)key.M, (long long)key.K, (long long)key.K, (long long)key.N, cublasLtGetStatusString(status));
    }
    CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(wish));
    plan.algorithm = found.algo;
    return plan;
}

template <typename In, typename Out> static void matmul(Gpu *gpu, Out *c, int64_t ldc, int64_t stride_c, Matrix a, Matrix b, int64_t M, int64_t N, int64_t K,
                                                        float alpha, float beta, const Out *c_in, int64_t batch) {
    if (M == 0 || N == 0) { return; }
    if (K == 0) { // experts without a token: nothing to add
        if (beta == 0) { for (int64_t i = 0; i < batch * M; i++) { CUDA_CHECK(cudaMemsetAsync(c + i / M * stride_c + i % M * ldc, 0, (size_t)N * sizeof(Out), gpu->stream)); } }
        return;
    }
    int64_t aligned = alignment_of(c);
    for (const void *p : {a.data, b.data, (const void *)c_in}) { if (alignment_of(p) < aligned) { aligned = alignment_of(p); } }
    PlanKey key = {M, N, K, a.ld, b.ld, ldc, batch, a.stride, b.stride, stride_c, a.transposed, b.transposed, data_type<In>(), data_type<Out>(), beta != 0, (int)aligned};
    auto at = gpu->plans.find(key);
    if (at == gpu->plans.end()) { at = gpu->plans.emplace(key, plan_product(gpu, key)).first; }
    Plan &plan = at->second;
    CUBLAS_CHECK(cublasLtMatmul(gpu->blas, plan.product, &alpha, b.data, plan.b, a.data, plan.a, &beta, c_in, plan.c, c, plan.c, &plan.algorithm, gpu->workspace, WORKSPACE, gpu->stream));
}

// out (N,OC) = inp (N,C) W^T, W (OC,C). ldi, ldw, ldo: distances of rows.
template <typename F, typename Out> static void matmul_forward(Gpu *gpu, Out *out, int64_t ldo, const F *inp, int64_t ldi, const F *w, int64_t ldw, int64_t N, int64_t C, int64_t OC) {
    matmul<F, Out>(gpu, out, ldo, 0, Matrix{inp, ldi, 0, 0}, Matrix{w, ldw, 0, 1}, N, OC, C, 1, 0, out, 1);
}
// The two halves of ::matmul_backward:  dinp (N,C) = dout (N,OC) W
template <typename F> static void matmul_backward_input(Gpu *gpu, F *dinp, int64_t ldi, const F *dout, int64_t ldo, const F *w, int64_t ldw, int64_t N, int64_t C, int64_t OC) {
    matmul<F, F>(gpu, dinp, ldi, 0, Matrix{dout, ldo, 0, 0}, Matrix{w, ldw, 0, 0}, N, C, OC, 1, 0, dinp, 1);
}
// dw (OC,C) = or += dout^T inp, in fp32
template <typename F> static void matmul_backward_weight(Gpu *gpu, float *dw, int64_t ldw, const F *dout, int64_t ldo, const F *inp, int64_t ldi, int64_t N, int64_t C, int64_t OC, int accumulate) {
    matmul<F, float>(gpu, dw, ldw, 0, Matrix{dout, ldo, 0, 1}, Matrix{inp, ldi, 0, 0}, OC, C, N, 1, accumulate ? 1.0f : 0.0f, dw, 1);
}

// Rows are read W numbers at a time: 16 bytes where rows begin and end there, else pairs (all widths are even, since heads are).
template <typename F> static bool wide(int64_t width) { return width % LANES<F> == 0; }
template <typename F> static unsigned row_threads(int64_t width, int64_t most = 512) { // of a block that works on a row
    int64_t threads = round_up(ceil_div(width, wide<F>(width) ? LANES<F> : 2), 32);
    return (unsigned)at_most(threads, most);
}
#define BY_WIDTH(F, width, launch) do { \
    if (wide<F>(width)) { constexpr int W = LANES<F>; launch; } else { constexpr int W = 2; launch; } \
    LAUNCHED(); } while (0)

// out (N,C): row inputs[n] of the embedding (V,ld)
template <typename F, int W> __global__ void __launch_bounds__(512) embedding_forward_kernel(F *out, const F *embedding, const int32_t *inputs, int64_t C, int64_t ld) {
    int64_t n = blockIdx.x;
    const F *from = embedding + inputs[n] * ld;
    for (int64_t c = threadIdx.x * W; c < C; c += blockDim.x * W) { store(out + n * C + c, load<W>(from + c)); }
}
template <typename F> static void embedding_forward(Gpu *gpu, F *out, const F *embedding, const int32_t *inputs, int64_t N, int64_t C, int64_t ld) {
    BY_WIDTH(F, C, (embedding_forward_kernel<F, W><<<(unsigned)N, row_threads<F>(C), 0, gpu->stream>>>(out, embedding, inputs, C, ld)));
}

// dembedding (V,ld) += dout. order: the N places of the batch sorted by token, the places of a token in order; runs: where in
// it each of the `num_runs` tokens begins. A block has one token and 32 W columns: its 8 warps share out the token's places,
// and their sums are added in order.
template <typename F, int W> __global__ void __launch_bounds__(256) embedding_backward_kernel(float *dembedding, const F *dout, const int32_t *order, const int32_t *tokens, const int32_t *runs, int64_t C, int64_t ld) {
    __shared__ float parts[8][32 * W];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t c0 = (int64_t)blockIdx.y * 32 * W, c = c0 + lane * W;
    float sum[W] = {};
    for (int i = runs[blockIdx.x] + warp; i < runs[blockIdx.x + 1] && c < C; i += 8) {
        auto d = load<W>(dout + order[i] * C + c);
        for (int k = 0; k < W; k++) { sum[k] += d[k]; }
    }
    for (int k = 0; k < W; k++) { parts[warp][lane * W + k] = sum[k]; }
    __syncthreads();
    float *to = dembedding + tokens[blockIdx.x] * ld;
    for (int k = threadIdx.x; k < 32 * W && c0 + k < C; k += 256) {
        float total = 0;
        for (int i = 0; i < 8; i++) { total += parts[i][k]; }
        to[c0 + k] += total;
    }
}
template <typename F> static void embedding_backward(Gpu *gpu, float *dembedding, const F *dout, const int32_t *order, const int32_t *tokens, const int32_t *runs, int num_runs, int64_t C, int64_t ld) {
    BY_WIDTH(F, C, (embedding_backward_kernel<F, W><<<dim3((unsigned)num_runs, (unsigned)ceil_div(C, 32 * W)), 256, 0, gpu->stream>>>(dembedding, dout, order, tokens, runs, C, ld)));
}

// Rows that a kernel works on: all n, or in a mixture of experts those of expert blockIdx.y, begin[e] to begin[e+1].
struct Rows { int64_t n; const int32_t *begin; int experts; };
__device__ inline int64_t rows_first(Rows rows) { return rows.begin ? rows.begin[blockIdx.y] : 0; }
__device__ inline int64_t rows_last(Rows rows) { return rows.begin ? rows.begin[blockIdx.y + 1] : rows.n; }
constexpr int64_t ROW_BLOCKS = 512; // blocks that share out rows where each makes a partial sum of dgamma, over all experts together
static dim3 row_grid(Rows rows, int64_t most) {
    if (rows.begin) { most = at_most(most, 8192); } // how many rows an expert has is known to the device alone: blocks walk over them
    return dim3((unsigned)at_most(rows.n, ceil_div(most, rows.experts)), (unsigned)rows.experts);
}

// out = gamma * Norm(inp) for rows of D numbers; gamma (D) may be NULL, and is `stride` further for each next expert.
template <typename F, int W> __global__ void __launch_bounds__(512) rmsnorm_forward_kernel(F *out, float *rstd, const F *inp, const float *gamma, Rows rows, int64_t D, int64_t stride) {
    __shared__ float scratch[2][32];
    const float *scale = gamma ? gamma + blockIdx.y * stride : NULL;
    int turn = 0;
    for (int64_t n = rows_first(rows) + blockIdx.x; n < rows_last(rows); n += gridDim.x, turn ^= 1) {
        const F *x = inp + n * D;
        float sum = 0;
        for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) {
            auto v = load<W>(x + d);
            for (int i = 0; i < W; i++) { sum += v[i] * v[i]; }
        }
        float r = 1 / sqrtf(block_sum(sum, scratch[turn]) / (float)D + (float)NORM_EPS);
        if (threadIdx.x == 0) { rstd[n] = r; }
        for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) {
            auto v = load<W>(x + d);
            Packed<F, W> y;
            for (int i = 0; i < W; i++) { y.set(i, (scale ? scale[d + i] : 1.0f) * (v[i] * r)); }
            store(out + n * D + d, y);
        }
    }
}
template <typename F> static void rmsnorm_forward(Gpu *gpu, F *out, float *rstd, const F *inp, const float *gamma, Rows rows, int64_t D, int64_t stride = 0) {
    if (rows.n == 0) { return; }
    BY_WIDTH(F, D, (rmsnorm_forward_kernel<F, W><<<row_grid(rows, INT32_MAX), row_threads<F>(D), 0, gpu->stream>>>(out, rstd, inp, gamma, rows, D, stride)));
}

// Norm(inp) once more, from its rstd: what --recompute didn't keep.
template <typename F, int W> __global__ void __launch_bounds__(512) rmsnorm_again_kernel(F *out, const float *rstd, const F *inp, int64_t D) {
    int64_t n = blockIdx.x;
    for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) {
        auto v = load<W>(inp + n * D + d);
        Packed<F, W> y;
        for (int i = 0; i < W; i++) { y.set(i, v[i] * rstd[n]); }
        store(out + n * D + d, y);
    }
}
template <typename F> static void rmsnorm_again(Gpu *gpu, F *out, const float *rstd, const F *inp, int64_t N, int64_t D) {
    BY_WIDTH(F, D, (rmsnorm_again_kernel<F, W><<<(unsigned)N, row_threads<F>(D), 0, gpu->stream>>>(out, rstd, inp, D)));
}

// A branch joins the residual stream, and the next Pre-Norm:  sum = x + branch,  out = Norm(sum); where the branch ends in an
// Output-Norm, branch is what goes into it, and gamma * Norm(branch) joins. ::residual_forward and ::rmsnorm_forward in one pass.
template <typename F, int W> __global__ void __launch_bounds__(512) residual_rmsnorm_forward_kernel(F *sum, F *out, float *out_rstd, float *branch_rstd, const F *x, const F *branch, const float *gamma, int64_t D) {
    __shared__ float scratch[2][32];
    int64_t n = blockIdx.x, row = n * D;
    float squares = 0, r = 1;
    if (branch_rstd) {
        for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) {
            auto b = load<W>(branch + row + d);
            for (int i = 0; i < W; i++) { squares += b[i] * b[i]; }
        }
        r = 1 / sqrtf(block_sum(squares, scratch[0]) / (float)D + (float)NORM_EPS);
        if (threadIdx.x == 0) { branch_rstd[n] = r; }
        squares = 0;
    }
    for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) {
        auto a = load<W>(x + row + d), b = load<W>(branch + row + d);
        Packed<F, W> s;
        for (int i = 0; i < W; i++) {
            s.set(i, a[i] + (gamma ? gamma[d + i] : 1.0f) * (b[i] * r));
            squares += s[i] * s[i]; // of the sum as it is stored
        }
        store(sum + row + d, s);
    }
    r = 1 / sqrtf(block_sum(squares, scratch[1]) / (float)D + (float)NORM_EPS);
    if (threadIdx.x == 0) { out_rstd[n] = r; }
    for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) { // each thread reads what it has written itself
        auto s = load<W>(sum + row + d);
        Packed<F, W> y;
        for (int i = 0; i < W; i++) { y.set(i, s[i] * r); }
        store(out + row + d, y);
    }
}
template <typename F> static void residual_rmsnorm_forward(Gpu *gpu, F *sum, F *out, float *out_rstd, float *branch_rstd, const F *x, const F *branch, const float *gamma, int64_t N, int64_t D) {
    BY_WIDTH(F, D, (residual_rmsnorm_forward_kernel<F, W><<<(unsigned)N, row_threads<F>(D), 0, gpu->stream>>>(sum, out, out_rstd, branch_rstd, x, branch, gamma, D)));
}

// unit = x rstd, dunit = gamma dout:  dinp (+)= rstd (dunit - unit mean(dunit unit)),  dgamma += sum_n dout unit.
// A thread has the same columns in all rows of its block, so each block sums dgamma without a barrier: in shared memory where
// that has room (`in_shared`), else in its row of partial, where the sums end up either way.
template <typename F, int W> __global__ void __launch_bounds__(512) rmsnorm_backward_kernel(F *dinp, float *partial, const F *dout, const F *inp, const float *rstd, const float *gamma, Rows rows, int64_t D, int64_t stride, int accumulate, int in_shared) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    __shared__ float scratch[2][32];
    const float *scale = gamma ? gamma + blockIdx.y * stride : NULL;
    float *part = partial + ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * D, *sums = in_shared ? (float *)shared_memory : part;
    if (scale) { for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) { for (int i = 0; i < W; i++) { sums[d + i] = 0; } } }
    int turn = 0;
    for (int64_t n = rows_first(rows) + blockIdx.x; n < rows_last(rows); n += gridDim.x, turn ^= 1) {
        const F *x = inp + n * D, *dy = dout + n * D;
        F *dx = dinp + n * D;
        float r = rstd[n], dot = 0;
        for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) {
            auto v = load<W>(x + d), g = load<W>(dy + d);
            for (int i = 0; i < W; i++) {
                float t = g[i] * v[i];
                dot += scale ? scale[d + i] * t : t;
                if (scale) { sums[d + i] += t * r; }
            }
        }
        float along = r * r * r * block_sum(dot, scratch[turn]) / (float)D;
        for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) {
            auto v = load<W>(x + d), g = load<W>(dy + d);
            Packed<F, W> out = {};
            if (accumulate) { out = load<W>(dx + d); }
            for (int i = 0; i < W; i++) { out.set(i, (accumulate ? out[i] : 0.0f) + r * (scale ? scale[d + i] * g[i] : g[i]) - along * v[i]); }
            store(dx + d, out);
        }
    }
    if (scale && in_shared) { for (int64_t d = threadIdx.x * W; d < D; d += blockDim.x * W) { for (int i = 0; i < W; i++) { part[d + i] = sums[d + i]; } } }
}
constexpr int64_t SHARED_SUMS = 48 << 10; // bytes that any GPU grants a block without being asked
template <typename F> static void rmsnorm_backward(Gpu *gpu, F *dinp, float *dgamma, float *partial, const F *dout, const F *inp, const float *rstd, const float *gamma, Rows rows, int64_t D, int accumulate, int64_t stride = 0) {
    if (rows.n == 0) { return; }
    dim3 grid = row_grid(rows, gamma ? ROW_BLOCKS : INT32_MAX);
    int64_t bytes = gamma ? D * (int64_t)sizeof(float) : 0;
    int in_shared = bytes <= SHARED_SUMS - 1024;
    BY_WIDTH(F, D, (rmsnorm_backward_kernel<F, W><<<grid, row_threads<F>(D), in_shared ? bytes : 0, gpu->stream>>>(dinp, partial, dout, inp, rstd, gamma, rows, D, stride, accumulate, in_shared)));
    if (gamma) { column_sum(gpu, dgamma, partial, grid.x, D, D, rows.experts, stride); }
}

// q, k and v between their product and attention: Output-Norms of the heads (DNP, --qk-norm), then RoPE for q and k.
// ::site_norm_forward and ::rope in one pass. `lanes` neighbouring threads work on a head of a token; a thread holds W numbers of
// the head's first half and the W that RoPE pairs them with, CHUNKS times. Heads of a token: NH of q, KVH of k, KVH of v.
struct HeadNorms { const float *gamma[3]; int norm[3]; }; // of q, k, v; gamma (heads HS), or NULL
// (a parameter that is indexed by a variable would be copied to memory)
__device__ inline bool head_normed(const HeadNorms &norms, int site) { return site == 0 ? norms.norm[0] : site == 1 ? norms.norm[1] : norms.norm[2]; }
__device__ inline const float *head_gamma(const HeadNorms &norms, int site, int slot, int NH, int KVH, int HS) {
    const float *gamma = site == 0 ? norms.gamma[0] : site == 1 ? norms.gamma[1] : norms.gamma[2];
    return gamma ? gamma + (int64_t)(slot - (site == 0 ? 0 : site == 1 ? NH : NH + KVH)) * HS : NULL;
}

template <typename F, int W, int CHUNKS> __global__ void __launch_bounds__(256) qkv_forward_kernel(F *qkv, float *rstd, const F *raw, const float *cosines, const float *sines, HeadNorms norms, int64_t N, int T, int NH, int KVH, int HS, int lanes) {
    int slot = blockIdx.y * (blockDim.x / lanes) + threadIdx.x / lanes, lane = threadIdx.x % lanes; // slot: which head
    int heads = NH + 2 * KVH, half = HS / 2, site = slot < NH ? 0 : slot < NH + KVH ? 1 : 2;
    const float *gamma = head_gamma(norms, site, slot, NH, KVH, HS);
    bool normed = head_normed(norms, site), works = slot < heads && (site < 2 || normed || qkv != raw); // v alone may stay as it is
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        int64_t at = (n * heads + slot) * HS;
        Packed<F, W> x[CHUNKS], y[CHUNKS];
        float sum = 0, r = 1;
        for (int k = 0; k < CHUNKS; k++) {
            int i = (lane + k * lanes) * W;
            if (!works || i >= half) { continue; }
            x[k] = load<W>(raw + at + i);
            y[k] = load<W>(raw + at + half + i);
            for (int j = 0; j < W; j++) { sum += x[k][j] * x[k][j] + y[k][j] * y[k][j]; }
        }
        sum = warp_sum(sum, lanes);
        if (!works) { continue; }
        if (normed) {
            r = 1 / sqrtf(sum / (float)HS + (float)NORM_EPS);
            if (lane == 0) { rstd[n * heads + slot] = r; }
        }
        for (int k = 0; k < CHUNKS; k++) {
            int i = (lane + k * lanes) * W;
            if (i >= half) { continue; }
            for (int j = 0; j < W; j++) {
                float a = x[k][j] * r, b = y[k][j] * r;
                if (gamma) { a *= gamma[i + j]; b *= gamma[half + i + j]; }
                float c = site < 2 ? cosines[n % T * half + i + j] : 1, s = site < 2 ? sines[n % T * half + i + j] : 0;
                x[k].set(j, a * c - b * s);
                y[k].set(j, a * s + b * c);
            }
            store(qkv + at + i, x[k]);
            store(qkv + at + half + i, y[k]);
        }
    }
}

// dqkv, the gradient of what attention read, becomes that of raw, in place: RoPE backwards, then ::site_norm_backward. part
// (blocks, Q): sums of dgamma over the rows of each block.
template <typename F, int W, int CHUNKS> __global__ void __launch_bounds__(256) qkv_backward_kernel(F *dqkv, float *part, const F *raw, const float *rstd, const float *cosines, const float *sines, HeadNorms norms, int64_t N, int T, int NH, int KVH, int HS, int lanes) {
    int slot = blockIdx.y * (blockDim.x / lanes) + threadIdx.x / lanes, lane = threadIdx.x % lanes;
    int heads = NH + 2 * KVH, half = HS / 2, site = slot < NH ? 0 : slot < NH + KVH ? 1 : 2;
    const float *gamma = head_gamma(norms, site, slot, NH, KVH, HS);
    bool normed = head_normed(norms, site), works = slot < heads && (site < 2 || normed);
    float sums[CHUNKS][2][W] = {};
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        int64_t at = (n * heads + slot) * HS;
        float da[CHUNKS][W], db[CHUNKS][W], dot = 0, r = works && normed ? rstd[n * heads + slot] : 1;
        Packed<F, W> x[CHUNKS], y[CHUNKS];
        for (int k = 0; k < CHUNKS; k++) {
            int i = (lane + k * lanes) * W;
            if (!works || i >= half) { continue; }
            Packed<F, W> dx = load<W>(dqkv + at + i), dy = load<W>(dqkv + at + half + i);
            if (normed) { x[k] = load<W>(raw + at + i); y[k] = load<W>(raw + at + half + i); }
            for (int j = 0; j < W; j++) {
                float c = site < 2 ? cosines[n % T * half + i + j] : 1, s = site < 2 ? sines[n % T * half + i + j] : 0;
                da[k][j] = dx[j] * c + dy[j] * s;
                db[k][j] = dy[j] * c - dx[j] * s;
                if (!normed) { continue; }
                if (gamma) {
                    sums[k][0][j] += da[k][j] * (x[k][j] * r);
                    sums[k][1][j] += db[k][j] * (y[k][j] * r);
                    da[k][j] *= gamma[i + j];
                    db[k][j] *= gamma[half + i + j];
                }
                dot += da[k][j] * x[k][j] + db[k][j] * y[k][j];
            }
        }
        dot = warp_sum(dot, lanes);
        if (!works) { continue; }
        float along = normed ? r * r * r * dot / (float)HS : 0;
        for (int k = 0; k < CHUNKS; k++) {
            int i = (lane + k * lanes) * W;
            if (i >= half) { continue; }
            Packed<F, W> dx, dy;
            for (int j = 0; j < W; j++) {
                dx.set(j, normed ? r * da[k][j] - along * x[k][j] : da[k][j]);
                dy.set(j, normed ? r * db[k][j] - along * y[k][j] : db[k][j]);
            }
            store(dqkv + at + i, dx);
            store(dqkv + at + half + i, dy);
        }
    }
    if (!works || !gamma) { return; }
    float *to = part + ((int64_t)blockIdx.x * heads + slot) * HS;
    for (int k = 0; k < CHUNKS; k++) {
        int i = (lane + k * lanes) * W;
        for (int j = 0; j < W && i < half; j++) { to[i + j] = sums[k][0][j]; to[half + i + j] = sums[k][1][j]; }
    }
}

// How the heads of a token are shared out among the threads of a block.
struct HeadGrid { int lanes; dim3 grid, block; };
static HeadGrid head_grid(int64_t N, int heads, int HS, int W, int64_t most) {
    HeadGrid g;
    for (g.lanes = 1; g.lanes < 32 && g.lanes * W < HS / 2; g.lanes *= 2) { }
    int64_t threads = at_most(round_up((int64_t)heads * g.lanes, 32), 256);
    g.block = dim3((unsigned)threads);
    g.grid = dim3((unsigned)at_most(N, most), (unsigned)ceil_div((int64_t)heads * g.lanes, threads));
    return g;
}
template <typename F> static void qkv_forward(Gpu *gpu, F *qkv, float *rstd, const F *raw, const float *cosines, const float *sines, HeadNorms norms, int64_t N, int T, int NH, int KVH, int HS) {
    bool packed = HS / 2 % LANES<F> == 0 && HS / 2 / LANES<F> <= 32;
    HeadGrid g = head_grid(N, NH + 2 * KVH, HS, packed ? LANES<F> : 1, INT32_MAX);
    if (packed) { qkv_forward_kernel<F, LANES<F>, 1><<<g.grid, g.block, 0, gpu->stream>>>(qkv, rstd, raw, cosines, sines, norms, N, T, NH, KVH, HS, g.lanes); }
    else        { qkv_forward_kernel<F, 1, 4><<<g.grid, g.block, 0, gpu->stream>>>(qkv, rstd, raw, cosines, sines, norms, N, T, NH, KVH, HS, g.lanes); }
    LAUNCHED();
}
template <typename F> static void qkv_backward(Gpu *gpu, F *dqkv, float *const dgamma[3], float *partial, const F *raw, const float *rstd, const float *cosines, const float *sines, HeadNorms norms, int64_t N, int T, int NH, int KVH, int HS) {
    bool packed = HS / 2 % LANES<F> == 0 && HS / 2 / LANES<F> <= 32;
    bool scaled = norms.gamma[0] || norms.gamma[1] || norms.gamma[2];
    HeadGrid g = head_grid(N, NH + 2 * KVH, HS, packed ? LANES<F> : 1, scaled ? ROW_BLOCKS : INT32_MAX);
    if (packed) { qkv_backward_kernel<F, LANES<F>, 1><<<g.grid, g.block, 0, gpu->stream>>>(dqkv, partial, raw, rstd, cosines, sines, norms, N, T, NH, KVH, HS, g.lanes); }
    else        { qkv_backward_kernel<F, 1, 4><<<g.grid, g.block, 0, gpu->stream>>>(dqkv, partial, raw, rstd, cosines, sines, norms, N, T, NH, KVH, HS, g.lanes); }
    LAUNCHED();
    int64_t width = (int64_t)(NH + 2 * KVH) * HS, first[3] = {0, (int64_t)NH * HS, (int64_t)(NH + KVH) * HS};
    for (int site = 0; site < 3; site++) {
        if (norms.gamma[site]) { column_sum(gpu, dgamma[site], partial + first[site], g.grid.x, (int64_t)(site == 0 ? NH : KVH) * HS, width); }
    }
}

// Causal self-attention, as in train_gpt2.c: qkv (B,T,(NH+2*KVH)*HS), out (B,T,NH*HS), lse (B,NH,T). These kernels are plain and
// take any head size up to 256 and both types. A warp has one query (in the backward of k and v: one key) and meets the
// others 32 at a time, one a lane; the 8 warps of a block share the tile of 32 in shared memory. Rows there are HS + 1 apart,
// so that 32 lanes reading one column of it touch 32 banks.
//     forward  m, l, o grow by a tile as the comment on ::attention_forward says
//     dK, dV   a block owns 8 keys of one key/value head, and walks over the queries of all its query heads
//     dQ       a block owns 8 queries
// P is made again from lse in both, so nothing is added to by two blocks.
constexpr int ATT_KEYS = 32, ATT_WARPS = 8, ATT_PARTS = ATT_MAX_HS / 32; // ATT_PARTS numbers of a head a lane

template <typename F> __device__ inline void att_tile(float *tile, const F *from, int64_t stride, int first, int count, int end, int HS) { // rows [first, first+count), zeros from `end` on
    for (int i = threadIdx.x; i < count * HS; i += blockDim.x) {
        int row = i / HS, d = i % HS;
        tile[row * (HS + 1) + d] = first + row < end ? to_float(from[(int64_t)(first + row) * stride + d]) : 0.0f;
    }
}
__device__ inline float att_dot(const float *a, const float *b, int HS) {
    float sum = 0;
    for (int d = 0; d < HS; d++) { sum += a[d] * b[d]; }
    return sum;
}
// sum[i] += sum over the 32 lanes' weights of their rows' columns: this lane's are lane + 32 i. weights: 32 floats of this warp
__device__ inline void att_add(float sum[ATT_PARTS], float weight, float *weights, const float *tile, int lane, int HS) {
    __syncwarp(); // all have read what was there before
    weights[lane] = weight;
    __syncwarp();
    for (int j = 0; j < ATT_KEYS; j++) {
        for (int i = 0; i < ATT_PARTS; i++) { int d = lane + 32 * i; if (d < HS) { sum[i] += weights[j] * tile[j * (HS + 1) + d]; } }
    }
}

template <typename F> __global__ void __launch_bounds__(32 * ATT_WARPS) attention_forward_kernel(F *out, float *lse, const F *qkv, int T, int NH, int KVH, int HS) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    __shared__ float weights[ATT_WARPS][32];
    float *keys = (float *)shared_memory, *values = keys + ATT_KEYS * (HS + 1), *queries = values + ATT_KEYS * (HS + 1);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = (T + ATT_WARPS - 1) / ATT_WARPS;
    int t0 = blockIdx.x % tiles * ATT_WARPS, t = t0 + warp, h = blockIdx.y, b = blockIdx.x / tiles;
    int64_t stride = (int64_t)(NH + 2 * KVH) * HS;
    const F *row = qkv + (int64_t)b * T * stride, *k = row + (NH + h / (NH / KVH)) * HS, *v = k + KVH * HS;
    att_tile(queries, row + h * HS, stride, t0, ATT_WARPS, T, HS);
    float scale = 1 / sqrtf((float)HS), top = -INFINITY, sum = 0, o[ATT_PARTS] = {};
    for (int s0 = 0; s0 < t0 + ATT_WARPS && s0 < T; s0 += ATT_KEYS) {
        __syncthreads();
        att_tile(keys, k, stride, s0, ATT_KEYS, T, HS);
        att_tile(values, v, stride, s0, ATT_KEYS, T, HS);
        __syncthreads();
        float score = scale * att_dot(queries + warp * (HS + 1), keys + lane * (HS + 1), HS);
        if (s0 + lane > t) { score = -INFINITY; }
        float higher = fmaxf(top, warp_reduce<Max>(score)), fix = expf(top - higher), p = expf(score - higher); // finite: key 0 is never masked
        sum = sum * fix + warp_sum(p);
        for (int i = 0; i < ATT_PARTS; i++) { o[i] *= fix; }
        att_add(o, p, weights[warp], values, lane, HS);
        top = higher;
    }
    if (t >= T) { return; }
    F *to = out + ((int64_t)b * T + t) * NH * HS + h * HS;
    for (int i = 0; i < ATT_PARTS; i++) { int d = lane + 32 * i; if (d < HS) { to[d] = from_float<F>(o[i] / sum); } }
    if (lane == 0) { lse[((int64_t)b * NH + h) * T + t] = top + logf(sum); }
}

// D (B,NH,T) = rowsum(dout * out): a warp a row
template <typename F> __global__ void __launch_bounds__(256) attention_dot_kernel(float *D, const F *dout, const F *out, int64_t rows, int T, int NH, int HS) {
    int64_t i = (int64_t)blockIdx.x * 8 + threadIdx.x / 32; // (b T + t) NH + h
    if (i >= rows) { return; }
    float sum = 0;
    for (int d = threadIdx.x % 32; d < HS; d += 32) { sum += to_float(dout[i * HS + d]) * to_float(out[i * HS + d]); }
    sum = warp_sum(sum);
    int64_t n = i / NH;
    if (threadIdx.x % 32 == 0) { D[(n / T * NH + i % NH) * T + n % T] = sum; }
}

template <typename F> __global__ void __launch_bounds__(32 * ATT_WARPS) attention_backward_kv_kernel(F *dqkv, const float *D, const F *dout, const F *qkv, const float *lse, int T, int NH, int KVH, int HS) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    __shared__ float weights[ATT_WARPS][32];
    float *queries = (float *)shared_memory, *douts = queries + ATT_KEYS * (HS + 1), *keys = douts + ATT_KEYS * (HS + 1), *values = keys + ATT_WARPS * (HS + 1);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = (T + ATT_WARPS - 1) / ATT_WARPS;
    int s0 = blockIdx.x % tiles * ATT_WARPS, s = s0 + warp, kvh = blockIdx.y, b = blockIdx.x / tiles, G = NH / KVH;
    int64_t stride = (int64_t)(NH + 2 * KVH) * HS, k_at = (int64_t)(NH + kvh) * HS, v_at = k_at + (int64_t)KVH * HS;
    const F *row = qkv + (int64_t)b * T * stride;
    att_tile(keys, row + k_at, stride, s0, ATT_WARPS, T, HS);
    att_tile(values, row + v_at, stride, s0, ATT_WARPS, T, HS);
    float scale = 1 / sqrtf((float)HS), dk[ATT_PARTS] = {}, dv[ATT_PARTS] = {};
    for (int h = kvh * G; h < (kvh + 1) * G; h++) {
        for (int t0 = s0 / ATT_KEYS * ATT_KEYS; t0 < T; t0 += ATT_KEYS) {
            __syncthreads();
            att_tile(queries, row + h * HS, stride, t0, ATT_KEYS, T, HS);
            att_tile(douts, dout + (int64_t)b * T * NH * HS + h * HS, (int64_t)NH * HS, t0, ATT_KEYS, T, HS);
            __syncthreads();
            int t = t0 + lane;
            int64_t at = ((int64_t)b * NH + h) * T + t;
            float p = 0, ds = 0;
            if (t < T && t >= s) {
                p = expf(scale * att_dot(queries + lane * (HS + 1), keys + warp * (HS + 1), HS) - lse[at]);
                ds = scale * p * (att_dot(douts + lane * (HS + 1), values + warp * (HS + 1), HS) - D[at]);
            }
            att_add(dv, p, weights[warp], douts, lane, HS);
            att_add(dk, ds, weights[warp], queries, lane, HS);
        }
    }
    if (s >= T) { return; }
    F *to = dqkv + ((int64_t)b * T + s) * stride;
    for (int i = 0; i < ATT_PARTS; i++) {
        int d = lane + 32 * i;
        if (d < HS) { to[k_at + d] = from_float<F>(dk[i]); to[v_at + d] = from_float<F>(dv[i]); }
    }
}

template <typename F> __global__ void __launch_bounds__(32 * ATT_WARPS) attention_backward_q_kernel(F *dqkv, const float *D, const F *dout, const F *qkv, const float *lse, int T, int NH, int KVH, int HS) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    __shared__ float weights[ATT_WARPS][32];
    float *keys = (float *)shared_memory, *values = keys + ATT_KEYS * (HS + 1), *queries = values + ATT_KEYS * (HS + 1), *douts = queries + ATT_WARPS * (HS + 1);
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, tiles = (T + ATT_WARPS - 1) / ATT_WARPS;
    int t0 = blockIdx.x % tiles * ATT_WARPS, t = t0 + warp, h = blockIdx.y, b = blockIdx.x / tiles;
    int64_t stride = (int64_t)(NH + 2 * KVH) * HS, at = ((int64_t)b * NH + h) * T + t;
    const F *row = qkv + (int64_t)b * T * stride, *k = row + (NH + h / (NH / KVH)) * HS, *v = k + KVH * HS;
    att_tile(queries, row + h * HS, stride, t0, ATT_WARPS, T, HS);
    att_tile(douts, dout + (int64_t)b * T * NH * HS + h * HS, (int64_t)NH * HS, t0, ATT_WARPS, T, HS);
    float scale = 1 / sqrtf((float)HS), dq[ATT_PARTS] = {};
    for (int s0 = 0; s0 < t0 + ATT_WARPS && s0 < T; s0 += ATT_KEYS) {
        __syncthreads();
        att_tile(keys, k, stride, s0, ATT_KEYS, T, HS);
        att_tile(values, v, stride, s0, ATT_KEYS, T, HS);
        __syncthreads();
        float ds = 0;
        if (s0 + lane <= t && t < T) {
            float p = expf(scale * att_dot(queries + warp * (HS + 1), keys + lane * (HS + 1), HS) - lse[at]);
            ds = scale * p * (att_dot(douts + warp * (HS + 1), values + lane * (HS + 1), HS) - D[at]);
        }
        att_add(dq, ds, weights[warp], keys, lane, HS);
    }
    if (t >= T) { return; }
    F *to = dqkv + ((int64_t)b * T + t) * stride + h * HS;
    for (int i = 0; i < ATT_PARTS; i++) { int d = lane + 32 * i; if (d < HS) { to[d] = from_float<F>(dq[i]); } }
}

template <typename F> static void attention_forward_plain(Gpu *gpu, F *out, float *lse, const F *qkv, int B, int T, int NH, int KVH, int HS) {
    int bytes = (2 * ATT_KEYS + ATT_WARPS) * (HS + 1) * (int)sizeof(float);
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_forward_kernel<F><<<dim3((unsigned)(ceil_div(T, ATT_WARPS) * B), (unsigned)NH), 32 * ATT_WARPS, bytes, gpu->stream>>>(out, lse, qkv, T, NH, KVH, HS);
    LAUNCHED();
}

template <typename F> static void attention_backward_plain(Gpu *gpu, F *dqkv, float *D, const F *dout, const F *qkv, const F *out, const float *lse, int B, int T, int NH, int KVH, int HS) {
    int bytes = (2 * ATT_KEYS + 2 * ATT_WARPS) * (HS + 1) * (int)sizeof(float);
    int64_t rows = (int64_t)B * T * NH;
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_kv_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_q_kernel<F>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    attention_dot_kernel<F><<<(unsigned)ceil_div(rows, 8), 256, 0, gpu->stream>>>(D, dout, out, rows, T, NH, HS);
    LAUNCHED();
    attention_backward_kv_kernel<F><<<dim3((unsigned)(ceil_div(T, ATT_WARPS) * B), (unsigned)KVH), 32 * ATT_WARPS, bytes, gpu->stream>>>(dqkv, D, dout, qkv, lse, T, NH, KVH, HS);
    LAUNCHED();
    attention_backward_q_kernel<F><<<dim3((unsigned)(ceil_div(T, ATT_WARPS) * B), (unsigned)NH), 32 * ATT_WARPS, bytes, gpu->stream>>>(dqkv, D, dout, qkv, lse, T, NH, KVH, HS);
    LAUNCHED();
}

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

template <int HS> static void attention_forward_tc_launch(bf16 *out, float *lse, const bf16 *qkv, int B, int T, int NH,
        int KVH, cudaStream_t stream) {
    typedef TcForward<HS> F;
    const float c = (float)(1.4426950408889634 / sqrt((double)HS));
    CUDA_CHECK(cudaFuncSetAttribute(attention_forward_tc_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize, F::SHARED));
    const dim3 grid((unsigned)ceil_div(T, F::ROWS), NH, B);
    attention_forward_tc_kernel<HS><<<grid, TC_THREADS, F::SHARED, stream>>>(out, lse, qkv, T, NH, KVH, c);
    LAUNCHED();
}

// out (B*T, NH*HS), lse (B,NH,T), qkv (B*T, (NH+2*KVH)*HS); HS is 64 or 128
static void attention_forward_tc(bf16 *out, float *lse, const bf16 *qkv, int B, int T, int NH, int KVH, int HS,
        cudaStream_t stream) {
    if (HS == 64) { attention_forward_tc_launch<64>(out, lse, qkv, B, T, NH, KVH, stream); }
    else { attention_forward_tc_launch<128>(out, lse, qkv, B, T, NH, KVH, stream); }
}

template <int HS> static void attention_backward_tc_launch(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv,
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
static void attention_backward_tc(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse,
        int B, int T, int NH, int KVH, int HS, cudaStream_t stream) {
    if (HS == 64) { attention_backward_tc_launch<64>(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, stream); }
    else { attention_backward_tc_launch<128>(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, stream); }
}

// The two of them: tensor cores for bf16 and heads of 64 or 128.
template <typename F> static void attention_forward(Gpu *gpu, F *out, float *lse, const F *qkv, int B, int T, int NH, int KVH, int HS) {
    if constexpr (std::is_same_v<F, bf16>) {
        if (HS == 64 || HS == 128) { attention_forward_tc(out, lse, qkv, B, T, NH, KVH, HS, gpu->stream); return; }
    }
    attention_forward_plain(gpu, out, lse, qkv, B, T, NH, KVH, HS);
}
// dqkv is overwritten; D (B,NH,T) is work space.
template <typename F> static void attention_backward(Gpu *gpu, F *dqkv, float *D, const F *dout, const F *qkv, const F *out, const float *lse, int B, int T, int NH, int KVH, int HS) {
    if constexpr (std::is_same_v<F, bf16>) {
        if (HS == 64 || HS == 128) { attention_backward_tc(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, HS, gpu->stream); return; }
    }
    attention_backward_plain(gpu, dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, HS);
}

// h = silu(gate) * up from gate | up (n,2H), with the Output-Norms of DNP on gate and on up in between. H is padded to a multiple
// of 8, here `ld`; pads are zeros and stay so. gamma of gate and up may be NULL, and is `stride` further for each next expert.
struct GateUpNorms { const float *gate, *up; int norm_gate, norm_up; int64_t stride; };

template <typename F> __global__ void __launch_bounds__(512) swiglu_forward_kernel(F *h, float *rstd, const F *gu, GateUpNorms norms, Rows rows, int64_t H, int64_t ld) {
    constexpr int W = LANES<F>;
    __shared__ float scratch[2][32];
    const float *gamma_gate = norms.gate ? norms.gate + blockIdx.y * norms.stride : NULL, *gamma_up = norms.up ? norms.up + blockIdx.y * norms.stride : NULL;
    for (int64_t n = rows_first(rows) + blockIdx.x; n < rows_last(rows); n += gridDim.x) {
        const F *gate = gu + n * 2 * ld, *up = gate + ld;
        float r_gate = 1, r_up = 1;
        if (norms.norm_gate || norms.norm_up) {
            float sum_gate = 0, sum_up = 0;
            for (int64_t c = threadIdx.x * W; c < ld; c += blockDim.x * W) {
                auto g = load<W>(gate + c), u = load<W>(up + c);
                for (int i = 0; i < W; i++) { sum_gate += g[i] * g[i]; sum_up += u[i] * u[i]; }
            }
            sum_gate = block_sum(sum_gate, scratch[0]); // the two take turns, so that no barrier is needed between rows
            sum_up = block_sum(sum_up, scratch[1]);
            if (norms.norm_gate) { r_gate = 1 / sqrtf(sum_gate / (float)H + (float)NORM_EPS); }
            if (norms.norm_up) { r_up = 1 / sqrtf(sum_up / (float)H + (float)NORM_EPS); }
            if (threadIdx.x == 0) { rstd[2 * n] = r_gate; rstd[2 * n + 1] = r_up; }
        }
        for (int64_t c = threadIdx.x * W; c < ld; c += blockDim.x * W) {
            auto g = load<W>(gate + c), u = load<W>(up + c);
            Packed<F, W> out;
            for (int i = 0; i < W; i++) {
                float a = g[i] * r_gate, b = u[i] * r_up;
                if (gamma_gate) { a *= gamma_gate[c + i]; }
                if (gamma_up) { b *= gamma_up[c + i]; }
                out.set(i, b * (a * (1 / (1 + exp_of(-a, F()))))); // rounded as swiglu_backward does it again
            }
            store(h + n * ld + c, out);
        }
    }
}

// dgu (n,2H), the gradient of gate | up before their norms, from dh; h is written once more where it wasn't kept (else NULL).
// dgamma as in rmsnorm_backward: sums (2H) of each block.
template <typename F> __global__ void __launch_bounds__(512) swiglu_backward_kernel(F *dgu, F *h, float *partial, const F *dh, const F *gu, const float *rstd, GateUpNorms norms, Rows rows, int64_t H, int64_t ld, int in_shared) {
    constexpr int W = LANES<F>;
    extern __shared__ __align__(16) unsigned char shared_memory[];
    __shared__ float scratch[2][32];
    const float *gamma_gate = norms.gate ? norms.gate + blockIdx.y * norms.stride : NULL, *gamma_up = norms.up ? norms.up + blockIdx.y * norms.stride : NULL;
    bool normed = norms.norm_gate || norms.norm_up, scaled = gamma_gate || gamma_up;
    float *part = partial + ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * 2 * ld, *sums = in_shared ? (float *)shared_memory : part;
    if (scaled) { for (int64_t c = threadIdx.x * W; c < ld; c += blockDim.x * W) { for (int i = 0; i < W; i++) { sums[c + i] = sums[ld + c + i] = 0; } } }
    for (int64_t n = rows_first(rows) + blockIdx.x; n < rows_last(rows); n += gridDim.x) {
        const F *gate = gu + n * 2 * ld, *up = gate + ld;
        float r_gate = norms.norm_gate ? rstd[2 * n] : 1, r_up = norms.norm_up ? rstd[2 * n + 1] : 1, along_gate = 0, along_up = 0;
        // of one element: a, b after the norms; their gradients; and those before gamma
        auto element = [&](float g, float u, float d, int64_t c, float &a, float &b, float &da, float &db) {
            a = g * r_gate * (gamma_gate ? gamma_gate[c] : 1);
            b = u * r_up * (gamma_up ? gamma_up[c] : 1);
            float sigmoid = 1 / (1 + exp_of(-a, F())), silu = a * sigmoid;
            da = d * b * (sigmoid + silu * (1 - sigmoid));
            db = d * silu;
            b *= silu; // h
        };
        float a, b, da, db;
        if (normed) {
            float dot_gate = 0, dot_up = 0;
            for (int64_t c = threadIdx.x * W; c < ld; c += blockDim.x * W) {
                auto g = load<W>(gate + c), u = load<W>(up + c), d = load<W>(dh + n * ld + c);
                for (int i = 0; i < W; i++) {
                    element(g[i], u[i], d[i], c + i, a, b, da, db);
                    if (gamma_gate) { sums[c + i] += da * (g[i] * r_gate); da *= gamma_gate[c + i]; }
                    if (gamma_up) { sums[ld + c + i] += db * (u[i] * r_up); db *= gamma_up[c + i]; }
                    dot_gate += da * g[i];
                    dot_up += db * u[i];
                }
            }
            dot_gate = block_sum(dot_gate, scratch[0]);
            dot_up = block_sum(dot_up, scratch[1]);
            if (norms.norm_gate) { along_gate = r_gate * r_gate * r_gate * dot_gate / (float)H; }
            if (norms.norm_up) { along_up = r_up * r_up * r_up * dot_up / (float)H; }
        }
        for (int64_t c = threadIdx.x * W; c < ld; c += blockDim.x * W) {
            auto g = load<W>(gate + c), u = load<W>(up + c), d = load<W>(dh + n * ld + c);
            Packed<F, W> d_gate, d_up, out;
            for (int i = 0; i < W; i++) {
                element(g[i], u[i], d[i], c + i, a, b, da, db);
                out.set(i, b);
                if (gamma_gate) { da *= gamma_gate[c + i]; }
                if (gamma_up) { db *= gamma_up[c + i]; }
                d_gate.set(i, r_gate * da - along_gate * g[i]);
                d_up.set(i, r_up * db - along_up * u[i]);
            }
            store(dgu + n * 2 * ld + c, d_gate);
            store(dgu + n * 2 * ld + ld + c, d_up);
            if (h) { store(h + n * ld + c, out); }
        }
    }
    if (scaled && in_shared) {
        for (int64_t c = threadIdx.x * W; c < ld; c += blockDim.x * W) { for (int i = 0; i < W; i++) { part[c + i] = sums[c + i]; part[ld + c + i] = sums[ld + c + i]; } }
    }
}

template <typename F> static void swiglu_forward(Gpu *gpu, F *h, float *rstd, const F *gu, GateUpNorms norms, Rows rows, int64_t H, int64_t ld) {
    swiglu_forward_kernel<F><<<row_grid(rows, INT32_MAX), row_threads<F>(ld), 0, gpu->stream>>>(h, rstd, gu, norms, rows, H, ld);
    LAUNCHED();
}
template <typename F> static void swiglu_backward(Gpu *gpu, F *dgu, F *h, float *dgamma_gate, float *dgamma_up, float *partial, const F *dh, const F *gu, const float *rstd, GateUpNorms norms, Rows rows, int64_t H, int64_t ld) {
    bool scaled = norms.gate || norms.up;
    dim3 grid = row_grid(rows, scaled ? ROW_BLOCKS : INT32_MAX);
    int64_t bytes = scaled ? 2 * ld * (int64_t)sizeof(float) : 0;
    int in_shared = bytes <= SHARED_SUMS - 1024;
    swiglu_backward_kernel<F><<<grid, row_threads<F>(ld), in_shared ? bytes : 0, gpu->stream>>>(dgu, h, partial, dh, gu, rstd, norms, rows, H, ld, in_shared);
    LAUNCHED();
    if (norms.gate) { column_sum(gpu, dgamma_gate, partial, grid.x, H, 2 * ld, rows.experts, norms.stride); }
    if (norms.up) { column_sum(gpu, dgamma_up, partial + ld, grid.x, H, 2 * ld, rows.experts, norms.stride); }
}

// Cross-entropy of `rows` rows of logits (rows,ld), ld the padded V; losses (rows) receives a loss a row, and with grad_scale the
// logits turn into grad_scale * dloss/dlogits, in place; pads into zeros. A block has a row: it reads it once for maximum and sum
// (a thread keeps both of what it has seen, and when the maximum rises mends the sum), and once more to write it.
struct Softmax { float top, sum, dot; };  // maximum so far; sums of e^(x - top) and of e^(x - top) weight
template <typename F, int W> __device__ inline void softmax_add(Softmax &s, const float x[W], const float weight[W]) {
    float top = s.top;
    for (int i = 0; i < W; i++) { top = fmaxf(top, x[i]); }
    if (top > s.top) { float fix = exp_of(s.top - top, F()); s.sum *= fix; s.dot *= fix; s.top = top; }
    for (int i = 0; i < W; i++) { float e = exp_of(x[i] - top, F()); s.sum += e; s.dot += e * weight[i]; }
}

template <typename F> __global__ void __launch_bounds__(1024) classifier_kernel(F *logits, float *losses, const int32_t *targets, int64_t V, int64_t ld, float grad_scale) {
    constexpr int W = LANES<F>;
    __shared__ float scratch[2][32];
    F *z = logits + blockIdx.x * ld;
    int32_t target = targets[blockIdx.x];
    float at_target = to_float(z[target]);
    Softmax s = {-INFINITY, 0, 0};
    for (int64_t v = threadIdx.x * W; v < V; v += blockDim.x * W) {
        auto x = load<W>(z + v);
        float y[W], none[W] = {};
        for (int i = 0; i < W; i++) { y[i] = v + i < V ? x[i] : -INFINITY; }
        softmax_add<F, W>(s, y, none);
    }
    float top = block_reduce<Max>(s.top, scratch[0]);
    float sum = block_sum(s.sum == 0 ? 0 : s.sum * expf(s.top - top), scratch[1]); // threads without a column have sum 0
    if (threadIdx.x == 0) { losses[blockIdx.x] = logf(sum) + top - at_target; }
    if (grad_scale == 0) { return; }
    float scale = grad_scale / sum;
    for (int64_t v = threadIdx.x * W; v < ld; v += blockDim.x * W) {
        auto x = load<W>(z + v);
        for (int i = 0; i < W; i++) { x.set(i, v + i < V ? exp_of(x[i] - top, F()) * scale - (v + i == target ? grad_scale : 0.0f) : 0.0f); }
        store(z + v, x);
    }
}

// With the logit norm of DNP at the head, y = gamma z r with r = 1/rms(z), in two kernels: first what a row needs as a whole, stats
// (rows,3): r, the log-sum-exp of y, and rstd^3 mean(dunit z) as in rmsnorm_backward;
template <typename F> __global__ void __launch_bounds__(1024) classifier_stats_kernel(float *stats, float *losses, const F *logits, const int32_t *targets, const float *gamma, int64_t V, int64_t ld, float grad_scale) {
    constexpr int W = LANES<F>;
    __shared__ float scratch[4][32];
    const F *z = logits + blockIdx.x * ld;
    int32_t target = targets[blockIdx.x];
    float squares = 0;
    for (int64_t v = threadIdx.x * W; v < ld; v += blockDim.x * W) { // pads are zeros
        auto x = load<W>(z + v);
        for (int i = 0; i < W; i++) { squares += x[i] * x[i]; }
    }
    float r = 1 / sqrtf(block_sum(squares, scratch[0]) / (float)V + (float)NORM_EPS);
    Softmax s = {-INFINITY, 0, 0};
    for (int64_t v = threadIdx.x * W; v < V; v += blockDim.x * W) {
        auto x = load<W>(z + v);
        float y[W], t[W];
        for (int i = 0; i < W; i++) {
            t[i] = v + i < V ? (gamma ? gamma[v + i] : 1.0f) * x[i] : 0.0f;
            y[i] = v + i < V ? t[i] * r : -INFINITY;
        }
        softmax_add<F, W>(s, y, t);
    }
    float top = block_reduce<Max>(s.top, scratch[1]), fix = s.sum == 0 ? 0 : expf(s.top - top);
    float sum = block_sum(s.sum * fix, scratch[2]);
    float dot = block_sum(s.dot * fix, scratch[3]);
    if (threadIdx.x > 0) { return; }
    float t = gamma ? gamma[target] * to_float(z[target]) : to_float(z[target]);
    losses[blockIdx.x] = logf(sum) + top - t * r;
    stats[3 * blockIdx.x] = r;
    stats[3 * blockIdx.x + 1] = top + logf(sum);
    stats[3 * blockIdx.x + 2] = r * r * r * grad_scale * (dot / sum - t) / (float)V;
}
// then, by columns, the gradient of z in place and that of gamma: thread (W columns) x block row (a share of the rows), partial
// (grid.y, ld).
template <typename F> __global__ void __launch_bounds__(256) classifier_norm_backward_kernel(F *logits, float *partial, const float *stats, const int32_t *targets, const float *gamma, int64_t rows, int64_t V, int64_t ld, float grad_scale) {
    constexpr int W = LANES<F>;
    int64_t v = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    if (v >= ld) { return; }
    float scale[W], sums[W] = {};
    for (int i = 0; i < W; i++) { scale[i] = v + i < V ? (gamma ? gamma[v + i] : 1.0f) : 0.0f; }
    for (int64_t n = rows * blockIdx.y / gridDim.y; n < rows * (blockIdx.y + 1) / gridDim.y; n++) {
        float r = stats[3 * n], lse = stats[3 * n + 1], along = stats[3 * n + 2];
        int32_t target = targets[n];
        auto x = load<W>(logits + n * ld + v);
        for (int i = 0; i < W; i++) {
            float unit = x[i] * r, dy = grad_scale * (exp_of(scale[i] * unit - lse, F()) - (v + i == target ? 1.0f : 0.0f));
            sums[i] += dy * unit;
            x.set(i, v + i < V ? r * scale[i] * dy - along * x[i] : 0.0f);
        }
        store(logits + n * ld + v, x);
    }
    for (int i = 0; i < W && gamma; i++) { partial[blockIdx.y * ld + v + i] = sums[i]; }
}
constexpr int64_t CLASSIFIER_PARTS = 32;
template <typename F> static void classifier(Gpu *gpu, F *logits, float *losses, const int32_t *targets, int64_t rows, int64_t V, int64_t ld, float grad_scale, int norm, const float *gamma, float *dgamma, float *stats, float *partial) {
    unsigned threads = row_threads<F>(ld, 1024);
    if (!norm) {
        classifier_kernel<F><<<(unsigned)rows, threads, 0, gpu->stream>>>(logits, losses, targets, V, ld, grad_scale);
        LAUNCHED();
        return;
    }
    classifier_stats_kernel<F><<<(unsigned)rows, threads, 0, gpu->stream>>>(stats, losses, logits, targets, gamma, V, ld, grad_scale);
    LAUNCHED();
    if (grad_scale == 0) { return; }
    dim3 grid((unsigned)ceil_div(ld, 256 * LANES<F>), (unsigned)at_most(rows, CLASSIFIER_PARTS));
    classifier_norm_backward_kernel<F><<<grid, 256, 0, gpu->stream>>>(logits, partial, stats, targets, gamma, rows, V, ld, grad_scale);
    LAUNCHED();
    if (gamma) { column_sum(gpu, dgamma, partial, grid.y, V, ld); }
}

// *to += weight times the sum of x (n): one block, so that the order is fixed
__global__ void __launch_bounds__(1024) loss_sum_kernel(double *to, const float *x, int64_t n, double weight) {
    __shared__ double parts[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) { sum += x[i]; }
    for (int offset = 16; offset > 0; offset /= 2) { sum += __shfl_xor_sync(0xffffffff, sum, offset); }
    if (threadIdx.x % 32 == 0) { parts[threadIdx.x / 32] = sum; }
    __syncthreads();
    if (threadIdx.x > 0) { return; }
    for (unsigned i = 1; i < blockDim.x / 32; i++) { sum += parts[i]; }
    *to += weight * sum;
}

// Mixture of experts by sorted dispatch, without a capacity: tokens are sorted by expert, so that each expert works on
// neighbouring rows, and none is dropped. The E experts share the kernels between products (their rows are one range), but each
// has products of its own, since how many rows it has is up to the router. The host must know these numbers to launch them: they
// travel while the GPU is busy with the shared expert, so it doesn't wait. Each expert's rows are rounded up to MOE_ROWS, with
// zeros: so products of few different shapes occur, and cuBLAS's choice for each is kept. (Padding all experts to one capacity
// would make one batched product of them, but drop tokens or compute mostly zeros; cuBLAS has no grouped product that adds up
// gradients of bf16 in fp32.)
constexpr int MOE_ROWS = 32, ROUTER_TOKENS = 256;  // ROUTER_TOKENS: of a block that counts and places

// probs (N,ld) holds logits and leaves with their softmax; lse, chosen and weights are set. A warp has a token.
__global__ void __launch_bounds__(256) router_choose_kernel(float *probs, float *lse, float *weights, int32_t *chosen, int64_t N, int E, int64_t ld, int K) {
    int lane = threadIdx.x % 32;
    int64_t n = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (n >= N) { return; }
    float *z = probs + n * ld, top = 0, chosen_sum = 0, sum = 0;
    uint32_t taken = 0; // bit i: this lane's expert lane + 32 i
    for (int k = 0; k < K; k++) { // the k-th largest; of equals, the first
        float best = 0;
        int at = E;
        for (int e = lane; e < E; e += 32) { if (!(taken >> (e / 32) & 1) && (at == E || z[e] > best)) { best = z[e]; at = e; } }
        for (int offset = 16; offset > 0; offset /= 2) {
            float other = __shfl_xor_sync(0xffffffff, best, offset);
            int other_at = __shfl_xor_sync(0xffffffff, at, offset);
            if (other_at < E && (at == E || other > best || (other == best && other_at < at))) { best = other; at = other_at; }
        }
        if (at % 32 == lane) { taken |= 1u << (at / 32); }
        if (k == 0) { top = best; }
        float weight = expf(best - top);
        chosen_sum += weight;
        if (lane == 0) { chosen[n * K + k] = at; weights[n * K + k] = weight; }
    }
    __syncwarp();
    for (int k = lane; k < K; k += 32) { weights[n * K + k] /= chosen_sum; }
    for (int e = lane; e < E; e += 32) { sum += expf(z[e] - top); }
    sum = warp_sum(sum);
    for (int e = lane; e < E; e += 32) { z[e] = expf(z[e] - top) / sum; }
    if (lane == 0) { lse[n] = top + logf(sum); }
}

// Of the tokens of each block: counts (blocks,E) of each expert; sums (blocks,E+1) of each expert's probability and of lse^2.
__global__ void __launch_bounds__(256) router_count_kernel(int32_t *counts, float *sums, const float *probs, const float *lse, const int32_t *chosen, int64_t N, int E, int64_t ld, int K) {
    int64_t n0 = (int64_t)blockIdx.x * ROUTER_TOKENS, n1 = n0 + ROUTER_TOKENS < N ? n0 + ROUTER_TOKENS : N;
    for (int e = threadIdx.x; e <= E; e += blockDim.x) {
        float sum = 0;
        int32_t count = 0;
        for (int64_t n = n0; n < n1; n++) { sum += e < E ? probs[n * ld + e] : lse[n] * lse[n]; }
        for (int64_t i = n0 * K; i < n1 * K && e < E; i++) { count += chosen[i] == e; }
        sums[(int64_t)blockIdx.x * (E + 1) + e] = sum;
        if (e < E) { counts[(int64_t)blockIdx.x * E + e] = count; }
    }
}

// One block: first rows of the experts, counts of each block turned into first rows for its tokens, and the two losses.
__global__ void __launch_bounds__(1024) router_scan_kernel(int32_t *begin, int32_t *count, int64_t *tokens, Stats *stats, int32_t *counts, const float *sums, int blocks, int64_t N, int E, int K, double weight) {
    __shared__ float scratch[32];
    int e = threadIdx.x; // E <= 1024
    float share = 0;
    if (e < E) {
        int32_t total = 0;
        float prob = 0;
        for (int b = 0; b < blocks; b++) {
            int32_t here = counts[(int64_t)b * E + e];
            counts[(int64_t)b * E + e] = total;
            total += here;
            prob += sums[(int64_t)b * (E + 1) + e];
        }
        count[e] = total;
        tokens[e] += weight > 0 ? total : 0;
        share = (float)total / (float)(N * K) * (prob / (float)N);
    }
    float balance = block_sum(share, scratch);
    if (e > 0) { return; }
    double z = 0;
    for (int b = 0; b < blocks; b++) { z += sums[(int64_t)b * (E + 1) + E]; }
    begin[0] = 0;
    for (int i = 0; i < E; i++) { begin[i + 1] = begin[i] + (count[i] + MOE_ROWS - 1) / MOE_ROWS * MOE_ROWS; }
    stats->balance_loss += weight * E * balance;
    stats->z_loss += weight * z / (double)N;
}

// row (N,K): which row holds this token for this expert; source: the inverse. Tokens keep their order within an expert.
__global__ void __launch_bounds__(256) router_place_kernel(int32_t *row, int32_t *source, const int32_t *begin, const int32_t *counts, const int32_t *chosen, int64_t N, int E, int K) {
    int64_t n0 = (int64_t)blockIdx.x * ROUTER_TOKENS, n1 = n0 + ROUTER_TOKENS < N ? n0 + ROUTER_TOKENS : N;
    for (int e = threadIdx.x; e < E; e += blockDim.x) {
        int32_t next = begin[e] + counts[(int64_t)blockIdx.x * E + e];
        for (int64_t i = n0 * K; i < n1 * K; i++) { if (chosen[i] == e) { row[i] = next; source[next++] = (int32_t)i; } }
    }
}

// x (rows,C): what goes into the experts; zeros in the rows that round up
template <typename F, int W> __global__ void __launch_bounds__(512) moe_gather_kernel(F *x, const F *inp, const int32_t *source, const int32_t *begin, int E, int K, int64_t C) {
    int64_t r = blockIdx.x;
    if (r >= begin[E]) { return; }
    int32_t i = source[r];
    for (int64_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Packed<F, W> v = {};
        if (i >= 0) { v = load<W>(inp + i / K * C + c); }
        store(x + r * C + c, v);
    }
}

// out (N,C) = shared (or nothing) + sum of the K experts' rows by weight (NULL: by 1) + more (or nothing)
template <typename F, int W> __global__ void __launch_bounds__(512) moe_combine_kernel(F *out, const F *shared, const F *more, const F *y, const float *weights, const int32_t *row, int K, int64_t C) {
    int64_t n = blockIdx.x;
    for (int64_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        float sum[W] = {};
        if (more) { auto v = load<W>(more + n * C + c); for (int i = 0; i < W; i++) { sum[i] += v[i]; } }
        if (shared) { auto v = load<W>(shared + n * C + c); for (int i = 0; i < W; i++) { sum[i] += v[i]; } }
        for (int k = 0; k < K; k++) {
            auto v = load<W>(y + row[n * K + k] * C + c);
            float weight = weights ? weights[n * K + k] : 1;
            for (int i = 0; i < W; i++) { sum[i] += weight * v[i]; }
        }
        Packed<F, W> v;
        for (int i = 0; i < W; i++) { v.set(i, sum[i]); }
        store(out + n * C + c, v);
    }
}

// d_rows: row i/K of dout goes to each of its experts, by weight; d_weights (N,K) = <dout, y>
template <typename F, int W> __global__ void __launch_bounds__(512) moe_scatter_kernel(F *d_rows, float *d_weights, const F *dout, const F *y, const float *weights, const int32_t *source, const int32_t *begin, int E, int K, int64_t C) {
    __shared__ float scratch[32];
    int64_t r = blockIdx.x;
    if (r >= begin[E]) { return; }
    int32_t i = source[r];
    float dot = 0, weight = i < 0 ? 0 : weights[i];
    for (int64_t c = threadIdx.x * W; c < C; c += blockDim.x * W) {
        Packed<F, W> out = {};
        if (i >= 0) {
            auto d = load<W>(dout + i / K * C + c), v = load<W>(y + r * C + c);
            for (int k = 0; k < W; k++) { dot += d[k] * v[k]; out.set(k, weight * d[k]); }
        }
        store(d_rows + r * C + c, out);
    }
    dot = block_sum(dot, scratch);
    if (threadIdx.x == 0 && i >= 0) { d_weights[i] = dot; }
}

// d_logits (N,ld), pads too, from the gradients of the weights, the balance loss and the z-loss. A warp has a token.
template <typename F> __global__ void __launch_bounds__(256) router_backward_kernel(F *d_logits, const float *d_weights, const float *probs, const float *lse, const float *weights, const int32_t *chosen, const int32_t *count, int64_t N, int E, int64_t ld, int K, double balance, double z_loss) {
    int lane = threadIdx.x % 32;
    int64_t n = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
    if (n >= N) { return; }
    const float *p = probs + n * ld, *w = weights + n * K, *dw = d_weights + n * K;
    float mean = 0, dot = 0; // balance times count_e is the gradient of p_e
    for (int e = lane; e < E; e += 32) { mean += p[e] * (float)(balance * count[e]); }
    for (int k = lane; k < K; k += 32) { dot += w[k] * dw[k]; }
    mean = warp_sum(mean);
    dot = warp_sum(dot);
    for (int e = lane; e < ld; e += 32) {
        float dz = 0;
        if (e < E) {
            dz = p[e] * ((float)(balance * count[e]) - mean + (float)z_loss * lse[n]);
            for (int k = 0; k < K; k++) { if (chosen[n * K + k] == e) { dz += w[k] * (dw[k] - dot); } }
        }
        d_logits[n * ld + e] = from_float<F>(dz);
    }
}

// ----------------------------------------------------------------------------------------------------
// 5. The model.

static void *device_memory(size_t bytes) {
    void *p = NULL;
    cudaError_t status = cudaMalloc(&p, bytes);
    if (status != cudaSuccess) { FAIL("cannot allocate %.2f GiB on the GPU: %s: expected a smaller model, --batch or --seq-len, or --recompute 1 or 2 (see --estimate)", (double)bytes / (1 << 30), cudaGetErrorString(status)); }
    return p;
}
static void *arena_bytes(Arena *a, int64_t bytes) {
    [[maybe_unused]] size_t at = a->used;
    a->used += (size_t)round_up(bytes, 256);
    if (!a->base || bytes == 0) { return NULL; }
#ifdef CUDA_EMU
    void *own = device_memory((size_t)bytes);
    a->own.push_back(own);
    return own;
#else
    return a->base + at;
#endif
}
template <typename X> static void arena_take(Arena *a, X *&tensor, int64_t count) { tensor = (X *)arena_bytes(a, count * (int64_t)sizeof(X)); }

static int64_t padded_rows(const ::LinearMap *map) { return round_up(map->rows, PAD); }          // H of gate and up, as gu_raw and h have it
static int64_t moe_capacity(const Config *cfg, int64_t N) { return N * cfg->top_k + (int64_t)cfg->experts * (MOE_ROWS - 1); }

// Activations of all layers. From --recompute `level` on a tensor is made again in the backward pass, and all layers share one.
template <typename F> static void layout_activations(Model<F> *m, int64_t B, int64_t T) {
    ::GPT *host = m->host;
    const Config *cfg = &host->cfg;
    Arena *a = &m->arena;
    int64_t N = B * T, C = cfg->channels, Q = host->qkv_width, att = (int64_t)cfg->heads * host->head_size, E = cfg->experts, rows = moe_capacity(cfg, N);
    enum { KEPT_ALWAYS = 3 };
    m->acts.resize((size_t)cfg->layers);
    int qkv_norm = any_norm(gpt_layer_maps(host, 0) + SITE_Q, 3);
    int64_t gu_width = 0, h_width = 0; // the widest of gu_raw and h, times their rows
    for (int l = 0; l < cfg->layers; l++) {
        LayerActs<F> *s = &m->acts[l], *first = &m->acts[0];
        const ::LinearMap *maps = gpt_layer_maps(host, l);
        auto take = [&](auto &tensor, auto &shared, int level, int64_t count) {
            if (l > 0 && m->recompute >= level) { tensor = shared; } else { arena_take(a, tensor, count); }
        };
        auto take_ffn = [&](FfnActs<F> *f, FfnActs<F> *f0, const ::LinearMap *of, int64_t n, int down_norm) {
            int64_t H = padded_rows(&of[0]);
            if (n * 2 * H > gu_width) { gu_width = n * 2 * H; }
            if (n * H > h_width) { h_width = n * H; }
            take(f->gu_raw, f0->gu_raw, 2, n * 2 * H);
            take(f->gu_rstd, f0->gu_rstd, 2, any_norm(of, 2) ? 2 * n : 0);
            take(f->h, f0->h, 1, n * H);
            take(f->down_raw, f0->down_raw, KEPT_ALWAYS, down_norm ? n * C : 0);
            take(f->down_rstd, f0->down_rstd, KEPT_ALWAYS, down_norm ? n : 0);
        };
        take(s->x, first->x, KEPT_ALWAYS, N * C);
        take(s->ln1, first->ln1, 1, N * C);
        take(s->ln1_rstd, first->ln1_rstd, KEPT_ALWAYS, N);
        take(s->qkv_raw, first->qkv_raw, 2, N * Q);
        take(s->att, first->att, 2, N * att);
        take(s->lse, first->lse, 2, N * cfg->heads);
        take(s->o_raw, first->o_raw, 2, maps[SITE_O].norm ? N * C : 0);
        take(s->o_rstd, first->o_rstd, 2, maps[SITE_O].norm ? N : 0);
        take(s->x2, first->x2, 2, N * C);
        take(s->ln2, first->ln2, 1, N * C);
        take(s->ln2_rstd, first->ln2_rstd, 2, N);
        if (gpt_has_dense(host)) { take_ffn(&s->ffn, &first->ffn, gpt_ffn_maps(host, l, -1), N, gpt_ffn_maps(host, l, -1)[2].norm); }
        if (!E) { continue; }
        MoeActs<F> *e = &s->moe, *e0 = &first->moe;
        take(e->probs, e0->probs, 2, N * round_up(E, PAD));
        take(e->lse, e0->lse, 2, N);
        take(e->weights, e0->weights, 2, N * cfg->top_k);
        take(e->chosen, e0->chosen, 2, N * cfg->top_k);
        take(e->row, e0->row, 2, N * cfg->top_k);
        take(e->source, e0->source, 2, rows);
        take(e->begin, e0->begin, 2, E + 1);
        take(e->count, e0->count, 2, E);
        take(e->x, e0->x, 1, rows * C);
        take(e->y, e0->y, 2, rows * C);
        take_ffn(&e->experts, &e0->experts, gpt_ffn_maps(host, l, 0), rows, gpt_ffn_maps(host, l, 0)[2].norm);
        take(e->sum, e0->sum, KEPT_ALWAYS, cfg->post_norm ? N * C : 0);
        take(e->sum_rstd, e0->sum_rstd, KEPT_ALWAYS, cfg->post_norm ? N : 0);
    }
    arena_take(a, m->x_final, N * C);
    arena_take(a, m->ln_final, N * C);
    arena_take(a, m->ln_final_rstd, N);
    arena_take(a, m->d_ln_final, N * C);
    arena_take(a, m->qkv_rstd, qkv_norm ? N * (cfg->heads + 2 * cfg->kv_heads) : 0);
    arena_take(a, m->att_dot, N * cfg->heads);
    arena_take(a, m->dx, N * C);
    arena_take(a, m->branch, N * C);
    arena_take(a, m->d_wide, N * Q > gu_width ? N * Q : gu_width);
    arena_take(a, m->d_att, N * att > h_width ? N * att : h_width);
    arena_take(a, m->d_rows, E ? rows * C : 0);
    arena_take(a, m->d_logits, N * round_up(E, PAD));
    arena_take(a, m->d_weights, E ? N * cfg->top_k : 0);
    arena_take(a, m->d_sum, E && cfg->post_norm ? N * C : 0);
    arena_take(a, m->d_shared, E && gpt_has_dense(host) ? N * C : 0);
}

static int64_t muon_bytes(int64_t rows, int64_t cols, int64_t size); // of the work space for one matrix: section 6

// Lays out every buffer for micro-batches of up to B sequences of T. Called twice: to count, then to place.
template <typename F> static MemoryUse gpt_layout(Model<F> *m, int64_t B, int64_t T) {
    const Config *cfg = &m->host->cfg;
    Arena *a = &m->arena;
    int64_t N = B * T, V = round_up(cfg->vocab, PAD), C = cfg->channels, E = cfg->experts, widest = m->host->qkv_width > C ? m->host->qkv_width : C, muon = 0;
    MemoryUse use;
    m->recompute = cfg->recompute;
    layout_places(m);
    layout_share(m);
    arena_take(a, m->theta, m->num_theta);
    use.theta = a->used;
    arena_take(a, m->theta_eff, m->num_eff);
    arena_take(a, m->gamma, m->num_gamma);
    use.effective = a->used - use.theta;
    size_t before = a->used;
    arena_take(a, m->grads, m->num_eff);
    arena_take(a, m->dgamma, m->num_gamma);
    use.grads = a->used - before;
    before = a->used;
    arena_take(a, m->m, cfg->optimizer == OPTIMIZER_SGD && cfg->sgd_momentum == 0 ? 0 : m->num_theta);
    arena_take(a, m->v, m->num_v);
    use.moments = a->used - before;
    before = a->used;
    layout_activations(m, B, T);
    use.activations = a->used - before;
    before = a->used;
    for (int i = 0; i < m->host->num_maps; i++) {
        const ::LinearMap *map = &m->host->maps[i];
        const Place *place = &m->places[map->weight];
        if (map->site == SITE_GATE && 2 * place->rows > widest) { widest = 2 * place->rows; }
        int64_t bytes = place->muon ? muon_bytes(place->rows, place->ld, sizeof(F)) : 0;
        if (bytes > muon) { muon = bytes; }
    }
    m->head_chunk = (int64_t)(512 << 20) / (V * (int64_t)sizeof(F)) / 128 * 128; // 512 MiB of logits: the head's gradients, fp32, are read and written once a chunk
    if (m->head_chunk < 128) { m->head_chunk = 128; }
    if (m->head_chunk > N) { m->head_chunk = N; }
    m->work_bytes = (size_t)(m->head_chunk * V) * sizeof(F);
    if (m->work_bytes < (size_t)m->num_partial * sizeof(float)) { m->work_bytes = (size_t)m->num_partial * sizeof(float); }
    if (m->work_bytes < (size_t)muon) { m->work_bytes = (size_t)muon; }
    for (const Place &place : m->places) { if (m->work_bytes < (size_t)place.ld * sizeof(float)) { m->work_bytes = (size_t)place.ld * sizeof(float); } } // a row, for copy_state
    int64_t qkv = any_norm(gpt_layer_maps(m->host, 0) + SITE_Q, 3) ? N * m->host->qkv_width * (int64_t)sizeof(F) : 0;
    if (m->work_bytes < (size_t)qkv) { m->work_bytes = (size_t)qkv; }
    m->work = arena_bytes(a, (int64_t)m->work_bytes);
    m->logits = m->qkv = (F *)m->work;
    int64_t partial = at_most(N, ROW_BLOCKS) * widest, router = ceil_div(N, ROUTER_TOKENS) * (2 * E + 1);
    int64_t experts = E ? at_most(moe_capacity(cfg, N), ceil_div(ROW_BLOCKS, E)) * E * widest : 0; // row_grid
    if (partial < experts) { partial = experts; }
    if (partial < CLASSIFIER_PARTS * V) { partial = CLASSIFIER_PARTS * V; }
    arena_take(a, m->partial, partial > router ? partial : router);
    arena_take(a, m->losses, N);
    arena_take(a, m->head_stats, gpt_head(m->host)->norm ? 3 * m->head_chunk : 0);
    arena_take(a, m->staged, 5 * N + 1);
    arena_take(a, m->rope_cos, T * m->host->head_size / 2);
    arena_take(a, m->rope_sin, T * m->host->head_size / 2);
    arena_take(a, m->expert_tokens, cfg->layers * E);
    arena_take(a, m->stats, 1);
    arena_take(a, m->norm_parts, NORM_BLOCKS);
    arena_take(a, m->d_places, (int64_t)m->own.size());
    arena_take(a, m->d_maps, (int64_t)m->own_maps.size());
    arena_take(a, m->d_spans, (int64_t)m->norm_spans.size());
    arena_take(a, m->d_vectors, (int64_t)m->vectors.size());
    arena_take(a, m->d_matrices, cfg->optimizer == OPTIMIZER_MUON ? (int64_t)m->places.size() : 0);
    use.work = a->used - before;
    use.total = a->used;
    return use;
}

// Of `world` GPUs: of the one that needs most.
template <typename F> static MemoryUse gpt_estimate_memory(::GPT *host, int64_t B, int64_t T, int world = 1) {
    MemoryUse use = {};
    for (int rank = 0; rank < world; rank++) {
        Model<F> m = {};
        m.host = host;
        m.rank = rank;
        m.world = world;
        MemoryUse one = gpt_layout(&m, B, T);
        if (one.total > use.total) { use = one; }
        if (!m.divided) { break; } // all are alike
    }
    use.work += WORKSPACE;
    use.total += WORKSPACE;
    return use;
}

// Allocates everything on the device, and of the host what files are read to and written from: theta, moments, a batch.
template <typename F> static Model<F> *gpt_allocate(::GPT *host, Gpu *gpu, int64_t B, int64_t T) {
    auto *m = new Model<F>();
    m->host = host;
    m->gpu = gpu;
    m->rank = gpu->rank;
    m->world = gpu->world;
    size_t total = gpt_layout(m, B, T).total, available, all;
    CUDA_CHECK(cudaMemGetInfo(&available, &all));
    if (total > available) {
        FAIL("the model needs %.2f GiB, found %.2f GiB free on GPU %d of this machine: expected a smaller model, --batch or --seq-len, or --recompute 1 or 2 (see --estimate)", (double)total / (1 << 30), (double)available / (1 << 30), gpu->device);
    }
#ifdef CUDA_EMU
    m->arena.base = (char *)1; // tensors are allocations of their own
#else
    m->arena.base = (char *)device_memory(total);
    CUDA_CHECK(cudaMemsetAsync(m->arena.base, 0, total, gpu->stream));
#endif
    m->arena.used = 0;
    gpt_layout(m, B, T);
    int64_t N = B * T, E = host->cfg.experts, half = host->head_size / 2;
    m->batch.resize((size_t)(2 * N));
    auto clear = [&](auto *tensor, int64_t count) { if (tensor) { CUDA_CHECK(cudaMemsetAsync(tensor, 0, (size_t)count * sizeof *tensor, gpu->stream)); } };
    clear(m->theta, m->num_theta); // pads are zeros from here on
    clear(m->theta_eff, m->num_eff);
    clear(m->grads, m->num_eff);
    clear(m->gamma, m->num_gamma);
    clear(m->dgamma, m->num_gamma);
    clear(m->m, m->num_theta);
    clear(m->v, m->num_v);
    clear(m->stats, 1); // the host reads all of it, also after a forward alone
    clear(m->expert_tokens, host->cfg.layers * E);
    CUDA_CHECK(cudaMemcpyAsync(m->d_places, m->own.data(), m->own.size() * sizeof(Place), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaMemcpyAsync(m->d_maps, m->own_maps.data(), m->own_maps.size() * sizeof(Map), cudaMemcpyHostToDevice, gpu->stream));
    if (!m->norm_spans.empty()) { CUDA_CHECK(cudaMemcpyAsync(m->d_spans, m->norm_spans.data(), m->norm_spans.size() * sizeof(Span), cudaMemcpyHostToDevice, gpu->stream)); }
    if (!m->vectors.empty()) { CUDA_CHECK(cudaMemcpyAsync(m->d_vectors, m->vectors.data(), m->vectors.size() * sizeof(Vector), cudaMemcpyHostToDevice, gpu->stream)); }
    std::vector<float> turn((size_t)(2 * T * half));
    for (int64_t i = 0; i < T * half; i++) {
        double angle = (double)(i / half) * pow(ROPE_THETA, -(double)(i % half) / (double)half);
        turn[(size_t)i] = (float)cos(angle);
        turn[(size_t)(T * half + i)] = (float)sin(angle);
    }
    CUDA_CHECK(cudaMemcpyAsync(m->rope_cos, turn.data(), (size_t)(T * half) * sizeof(float), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaMemcpyAsync(m->rope_sin, turn.data() + T * half, (size_t)(T * half) * sizeof(float), cudaMemcpyHostToDevice, gpu->stream));
    CUDA_CHECK(cudaMallocHost((void **)&m->host_staged, (size_t)(5 * N + 1) * sizeof(int32_t)));
    CUDA_CHECK(cudaMallocHost((void **)&m->host_stats, sizeof(Stats)));
    CUDA_CHECK(cudaMallocHost((void **)&m->host_matrices, m->places.size() * sizeof(MuonMatrix)));
    for (LayerActs<F> &s : m->acts) { if (E) { CUDA_CHECK(cudaMallocHost((void **)&s.moe.host_begin, (size_t)(E + 1) * sizeof(int32_t))); } }
    CUDA_CHECK(cudaEventCreateWithFlags(&m->copied, cudaEventDisableTiming));
    CUDA_CHECK(cudaEventRecord(m->copied, gpu->stream));
    CUDA_CHECK(cudaStreamSynchronize(gpu->stream));
    return m;
}

template <typename F> static void gpt_free(Model<F> *m) {
    CUDA_CHECK(cudaStreamSynchronize(m->gpu->stream));
    for (LayerActs<F> &s : m->acts) { if (s.moe.host_begin) { CUDA_CHECK(cudaFreeHost(s.moe.host_begin)); } }
    CUDA_CHECK(cudaFreeHost(m->host_staged));
    CUDA_CHECK(cudaFreeHost(m->host_stats));
    CUDA_CHECK(cudaFreeHost(m->host_matrices));
    CUDA_CHECK(cudaEventDestroy(m->copied));
    for (void *own : m->arena.own) { CUDA_CHECK(cudaFree(own)); }
    if (m->arena.own.empty()) { CUDA_CHECK(cudaFree(m->arena.base)); }
    delete m;
}

// What the model needs of a linear map.
template <typename F> static const Map *map_of(const Model<F> *m, const ::LinearMap *map) { return &m->maps[(size_t)(map - m->host->maps)]; }
template <typename F> static F *w_eff(const Model<F> *m, const ::LinearMap *map) { return m->theta_eff + map_of(m, map)->eff; }
template <typename F> static float *dw_eff(const Model<F> *m, const ::LinearMap *map) { return m->grads + map_of(m, map)->eff; }
template <typename F> static float *gpt_gamma(const Model<F> *m, int param) { return param < 0 ? NULL : m->gamma + m->places[(size_t)param].gamma; }
template <typename F> static float *gpt_dgamma(const Model<F> *m, int param) { return param < 0 ? NULL : m->dgamma + m->places[(size_t)param].gamma; }
template <typename F> static int64_t gamma_stride(const Model<F> *m, const ::LinearMap *map, int experts) { // from one expert's vector to the next's
    return experts > 1 && map->gamma_norm >= 0 ? gpt_gamma(m, map[1 * FFN_MAPS].gamma_norm) - gpt_gamma(m, map->gamma_norm) : 0;
}
template <typename F> static HeadNorms head_norms(const Model<F> *m, const ::LinearMap *maps) {
    HeadNorms norms;
    for (int site = 0; site < 3; site++) { norms.gamma[site] = gpt_gamma(m, maps[site].gamma_norm); norms.norm[site] = maps[site].norm; }
    return norms;
}
template <typename F> static GateUpNorms gate_up_norms(const Model<F> *m, const ::LinearMap *maps, int experts) {
    int64_t gate = gamma_stride(m, &maps[0], experts), up = gamma_stride(m, &maps[1], experts);
    return GateUpNorms{gpt_gamma(m, maps[0].gamma_norm), gpt_gamma(m, maps[1].gamma_norm), maps[0].norm, maps[1].norm, gate ? gate : up};
}

// Norms and RoPE between qkv_raw and attention; returns what attention reads.
template <typename F> static F *qkv_forward(Model<F> *m, LayerActs<F> *s, const ::LinearMap *maps) {
    const Config *cfg = &m->host->cfg;
    int normed = any_norm(maps, 3);
    F *qkv = normed ? m->qkv : s->qkv_raw;
    qkv_forward(m->gpu, qkv, m->qkv_rstd, (const F *)s->qkv_raw, m->rope_cos, m->rope_sin, head_norms(m, maps), m->B * m->T, (int)m->T, cfg->heads, cfg->kv_heads, m->host->head_size);
    return qkv;
}

// x2 = x + norm_o( W_o attention(rope(norm_qkv( W_qkv ln1 ))) ),  ln2 = Norm(x2)
template <typename F> static void attention_block_forward(Model<F> *m, int l) {
    LayerActs<F> *s = &m->acts[(size_t)l];
    const ::LinearMap *maps = gpt_layer_maps(m->host, l);
    int64_t N = m->B * m->T, C = m->host->cfg.channels, Q = m->host->qkv_width, att = (int64_t)m->host->cfg.heads * m->host->head_size;
    int normed = maps[SITE_O].norm;
    F *o = normed ? s->o_raw : m->branch;
    matmul_forward(m->gpu, s->qkv_raw, Q, s->ln1, C, w_eff(m, &maps[SITE_Q]), map_of(m, &maps[SITE_Q])->ld, N, C, Q);
    const F *qkv = qkv_forward(m, s, maps);
    attention_forward(m->gpu, s->att, s->lse, qkv, (int)m->B, (int)m->T, m->host->cfg.heads, m->host->cfg.kv_heads, m->host->head_size);
    matmul_forward(m->gpu, o, C, s->att, att, w_eff(m, &maps[SITE_O]), map_of(m, &maps[SITE_O])->ld, N, att, C);
    residual_rmsnorm_forward(m->gpu, s->x2, s->ln2, s->ln2_rstd, normed ? s->o_rstd : (float *)NULL, (const F *)s->x, (const F *)o, gpt_gamma(m, maps[SITE_O].gamma_norm), N, C);
}

// dx holds dL/dx2 and leaves with dL/dx
template <typename F> static void attention_block_backward(Model<F> *m, int l) {
    LayerActs<F> *s = &m->acts[(size_t)l];
    const ::LinearMap *maps = gpt_layer_maps(m->host, l), *q = &maps[SITE_Q], *out = &maps[SITE_O];
    const Config *cfg = &m->host->cfg;
    int HS = m->host->head_size;
    int64_t N = m->B * m->T, C = cfg->channels, Q = m->host->qkv_width, att = (int64_t)cfg->heads * HS;
    const F *d_o = m->dx;
    if (m->recompute >= 1) { rmsnorm_again(m->gpu, s->ln1, s->ln1_rstd, (const F *)s->x, N, C); }
    if (out->norm) {
        rmsnorm_backward(m->gpu, m->branch, gpt_dgamma(m, out->gamma_norm), m->partial, (const F *)m->dx, (const F *)s->o_raw, s->o_rstd, gpt_gamma(m, out->gamma_norm), Rows{N, NULL, 1}, C, 0);
        d_o = m->branch;
    }
    matmul_backward_weight(m->gpu, dw_eff(m, out), map_of(m, out)->ld, d_o, C, (const F *)s->att, att, N, att, C, m->accumulate);
    matmul_backward_input(m->gpu, m->d_att, att, d_o, C, (const F *)w_eff(m, out), map_of(m, out)->ld, N, att, C);
    const F *qkv = any_norm(maps, 3) ? qkv_forward(m, s, maps) : s->qkv_raw; // made again: one a layer would be kept just for this
    attention_backward(m->gpu, m->d_wide, m->att_dot, (const F *)m->d_att, qkv, (const F *)s->att, s->lse, (int)m->B, (int)m->T, cfg->heads, cfg->kv_heads, HS);
    float *dgamma[3] = {gpt_dgamma(m, maps[SITE_Q].gamma_norm), gpt_dgamma(m, maps[SITE_K].gamma_norm), gpt_dgamma(m, maps[SITE_V].gamma_norm)};
    qkv_backward(m->gpu, m->d_wide, dgamma, m->partial, (const F *)s->qkv_raw, m->qkv_rstd, m->rope_cos, m->rope_sin, head_norms(m, maps), N, (int)m->T, cfg->heads, cfg->kv_heads, HS);
    matmul_backward_weight(m->gpu, dw_eff(m, q), map_of(m, q)->ld, (const F *)m->d_wide, Q, (const F *)s->ln1, C, N, C, Q, m->accumulate);
    matmul_backward_input(m->gpu, m->branch, C, (const F *)m->d_wide, Q, (const F *)w_eff(m, q), map_of(m, q)->ld, N, C, Q);
    rmsnorm_backward(m->gpu, m->dx, (float *)NULL, (float *)NULL, (const F *)m->branch, (const F *)s->x, s->ln1_rstd, (const float *)NULL, Rows{N, NULL, 1}, C, 1);
}

// out (n,C) = W_down swiglu(norm_gu( W_gate|up inp )) for all rows; maps: gate, up, down, of the first expert; host_begin: rows.begin,
// or NULL. The norm of down follows if `norm_down`; in a dense FFN it is part of joining the residual stream. out NULL: stop at h.
template <typename F> static void ffn_forward(Model<F> *m, const ::LinearMap *maps, FfnActs<F> *s, F *out, const F *inp, Rows rows, const int32_t *host_begin, int norm_down) {
    int64_t H = padded_rows(&maps[0]), C = maps[0].cols;
    auto first = [&](int e) { return host_begin ? (int64_t)host_begin[e] : 0; };
    auto count = [&](int e) { return host_begin ? (int64_t)host_begin[e + 1] - host_begin[e] : rows.n; };
    for (int e = 0; e < rows.experts; e++) {
        const ::LinearMap *gate = maps + FFN_MAPS * e;
        matmul_forward(m->gpu, s->gu_raw + first(e) * 2 * H, 2 * H, inp + first(e) * C, C, (const F *)w_eff(m, gate), map_of(m, gate)->ld, count(e), C, 2 * H);
    }
    swiglu_forward(m->gpu, s->h, s->gu_rstd, (const F *)s->gu_raw, gate_up_norms(m, maps, rows.experts), rows, maps[0].rows, H);
    if (!out) { return; }
    F *raw = maps[2].norm ? s->down_raw : out;
    for (int e = 0; e < rows.experts; e++) {
        const ::LinearMap *down = maps + FFN_MAPS * e + 2;
        matmul_forward(m->gpu, raw + first(e) * C, C, (const F *)s->h + first(e) * H, H, (const F *)w_eff(m, down), H, count(e), H, C);
    }
    if (maps[2].norm && norm_down) {
        rmsnorm_forward(m->gpu, out, s->down_rstd, (const F *)raw, gpt_gamma(m, maps[2].gamma_norm), rows, C, gamma_stride(m, &maps[2], rows.experts));
    }
}

// dinp (n,C) is written; dout (n,C) and dinp may be one
template <typename F> static void ffn_backward(Model<F> *m, const ::LinearMap *maps, FfnActs<F> *s, F *dinp, const F *dout, const F *inp, Rows rows, const int32_t *host_begin) {
    int64_t H = padded_rows(&maps[0]), C = maps[0].cols;
    auto first = [&](int e) { return host_begin ? (int64_t)host_begin[e] : 0; };
    auto count = [&](int e) { return host_begin ? (int64_t)host_begin[e + 1] - host_begin[e] : rows.n; };
    const ::LinearMap *down = &maps[2];
    if (down->norm) {
        rmsnorm_backward(m->gpu, dinp, gpt_dgamma(m, down->gamma_norm), m->partial, dout, (const F *)s->down_raw, s->down_rstd, gpt_gamma(m, down->gamma_norm), rows, C, 0, gamma_stride(m, down, rows.experts));
        dout = dinp;
    }
    for (int e = 0; e < rows.experts; e++) {
        matmul_backward_input(m->gpu, m->d_att + first(e) * H, H, dout + first(e) * C, C, (const F *)w_eff(m, down + FFN_MAPS * e), H, count(e), H, C);
    }
    swiglu_backward(m->gpu, m->d_wide, m->recompute == 1 ? s->h : (F *)NULL, gpt_dgamma(m, maps[0].gamma_norm), gpt_dgamma(m, maps[1].gamma_norm), m->partial, (const F *)m->d_att, (const F *)s->gu_raw, s->gu_rstd, gate_up_norms(m, maps, rows.experts), rows, maps[0].rows, H);
    for (int e = 0; e < rows.experts; e++) {
        const ::LinearMap *gate = maps + FFN_MAPS * e;
        int64_t ld = map_of(m, gate)->ld;
        const F *d_gu = m->d_wide + first(e) * 2 * H;
        matmul_backward_weight(m->gpu, dw_eff(m, gate + 2), H, dout + first(e) * C, C, (const F *)s->h + first(e) * H, H, count(e), H, C, m->accumulate);
        matmul_backward_weight(m->gpu, dw_eff(m, gate), ld, d_gu, 2 * H, inp + first(e) * C, C, count(e), C, 2 * H, m->accumulate);
        matmul_backward_input(m->gpu, dinp + first(e) * C, C, d_gu, 2 * H, (const F *)w_eff(m, gate), ld, count(e), C, 2 * H);
    }
}

template <typename F> static Rows moe_rows(const Model<F> *m, const MoeActs<F> *s) { return Rows{moe_capacity(&m->host->cfg, m->B * m->T), s->begin, m->host->cfg.experts}; }

template <typename F> static void moe_gather(Model<F> *m, MoeActs<F> *s, const F *inp) {
    int64_t C = m->host->cfg.channels;
    BY_WIDTH(F, C, (moe_gather_kernel<F, W><<<(unsigned)moe_rows(m, s).n, row_threads<F>(C), 0, m->gpu->stream>>>(s->x, inp, s->source, s->begin, m->host->cfg.experts, m->host->cfg.top_k, C)));
}

// out = sum over the K chosen experts e of weight_e * ffn_e(ln2), plus the shared expert: see train_gpt2.c. With `again`, in the
// backward pass, the host knows the rows of experts already, and it stops at h.
template <typename F> static void moe_forward(Model<F> *m, int l, F *out, int again) {
    LayerActs<F> *a = &m->acts[(size_t)l];
    MoeActs<F> *s = &a->moe;
    ::GPT *host = m->host;
    Gpu *gpu = m->gpu;
    int64_t N = m->B * m->T, C = host->cfg.channels;
    int E = host->cfg.experts, K = host->cfg.top_k, dense = gpt_has_dense(host), blocks = (int)ceil_div(N, ROUTER_TOKENS), ld = (int)round_up(E, PAD);
    const ::LinearMap *router = gpt_router(host, l);
    Rows rows = moe_rows(m, s);
    float *sums = m->partial;
    int32_t *counts = (int32_t *)(sums + (int64_t)blocks * (E + 1));
    matmul_forward(gpu, s->probs, ld, (const F *)a->ln2, C, (const F *)w_eff(m, router), map_of(m, router)->ld, N, C, ld);
    router_choose_kernel<<<(unsigned)ceil_div(N, 8), 256, 0, gpu->stream>>>(s->probs, s->lse, s->weights, s->chosen, N, E, ld, K);
    LAUNCHED();
    router_count_kernel<<<blocks, 256, 0, gpu->stream>>>(counts, sums, s->probs, s->lse, s->chosen, N, E, ld, K);
    LAUNCHED();
    double weight = again ? 0 : m->grad_scale * (double)N; // of this micro-batch in the step
    router_scan_kernel<<<1, 1024, 0, gpu->stream>>>(s->begin, s->count, m->expert_tokens + (int64_t)l * E, m->stats, counts, sums, blocks, N, E, K, weight);
    LAUNCHED();
    CUDA_CHECK(cudaMemsetAsync(s->source, 0xff, (size_t)rows.n * sizeof(int32_t), gpu->stream)); // -1
    router_place_kernel<<<blocks, 256, 0, gpu->stream>>>(s->row, s->source, s->begin, counts, s->chosen, N, E, K);
    LAUNCHED();
    if (!again) {
        CUDA_CHECK(cudaMemcpyAsync(s->host_begin, s->begin, (size_t)(E + 1) * sizeof(int32_t), cudaMemcpyDeviceToHost, gpu->stream));
        CUDA_CHECK(cudaEventRecord(m->copied, gpu->stream));
    }
    moe_gather(m, s, (const F *)a->ln2);
    F *shared = again ? NULL : out;
    if (dense) { ffn_forward(m, gpt_ffn_maps(host, l, -1), &a->ffn, shared, (const F *)a->ln2, Rows{N, NULL, 1}, (const int32_t *)NULL, 1); }
    if (!again) { CUDA_CHECK(cudaEventSynchronize(m->copied)); }
    ffn_forward(m, gpt_ffn_maps(host, l, 0), &s->experts, s->y, (const F *)s->x, rows, s->host_begin, 1); // y too: the backward pass reads it
    if (again) { return; }
    F *sum = host->cfg.post_norm ? s->sum : out;
    BY_WIDTH(F, C, (moe_combine_kernel<F, W><<<(unsigned)N, row_threads<F>(C), 0, gpu->stream>>>(sum, dense ? out : (F *)NULL, (const F *)NULL, s->y, s->weights, s->row, K, C)));
}

// dinp (N,C) is written; dout (N,C): the gradient of moe_forward's out
template <typename F> static void moe_backward(Model<F> *m, int l, F *dinp, const F *dout) {
    LayerActs<F> *a = &m->acts[(size_t)l];
    MoeActs<F> *s = &a->moe;
    ::GPT *host = m->host;
    Gpu *gpu = m->gpu;
    const Config *cfg = &host->cfg;
    int64_t N = m->B * m->T, C = cfg->channels;
    int E = cfg->experts, K = cfg->top_k, ld = (int)round_up(E, PAD), dense = gpt_has_dense(host);
    const ::LinearMap *router = gpt_router(host, l);
    Rows rows = moe_rows(m, s);
    if (cfg->post_norm) {
        int norm = host->ffn_norm[l];
        rmsnorm_backward(gpu, m->d_sum, gpt_dgamma(m, norm), m->partial, dout, (const F *)s->sum, s->sum_rstd, gpt_gamma(m, norm), Rows{N, NULL, 1}, C, 0);
        dout = m->d_sum;
    }
    if (m->recompute == 1) { moe_gather(m, s, (const F *)a->ln2); }
    BY_WIDTH(F, C, (moe_scatter_kernel<F, W><<<(unsigned)rows.n, row_threads<F>(C), 0, gpu->stream>>>(m->d_rows, m->d_weights, dout, s->y, s->weights, s->source, s->begin, E, K, C)));
    ffn_backward(m, gpt_ffn_maps(host, l, 0), &s->experts, m->d_rows, (const F *)m->d_rows, (const F *)s->x, rows, s->host_begin);
    router_backward_kernel<F><<<(unsigned)ceil_div(N, 8), 256, 0, gpu->stream>>>(m->d_logits, m->d_weights, s->probs, s->lse, s->weights, s->chosen, s->count, N, E, ld, K,
        cfg->balance_loss * E / (double)(N * K) * m->grad_scale, 2 * cfg->router_z_loss * m->grad_scale);
    LAUNCHED();
    if (dense) { ffn_backward(m, gpt_ffn_maps(host, l, -1), &a->ffn, m->d_shared, dout, (const F *)a->ln2, Rows{N, NULL, 1}, (const int32_t *)NULL); }
    matmul_backward_weight(gpu, dw_eff(m, router), map_of(m, router)->ld, (const F *)m->d_logits, ld, (const F *)a->ln2, C, N, C, ld, m->accumulate);
    matmul_backward_input(gpu, dinp, C, (const F *)m->d_logits, ld, (const F *)w_eff(m, router), map_of(m, router)->ld, N, C, ld);
    BY_WIDTH(F, C, (moe_combine_kernel<F, W><<<(unsigned)N, row_threads<F>(C), 0, gpu->stream>>>(dinp, dense ? (const F *)m->d_shared : (const F *)NULL, (const F *)dinp, m->d_rows, (const float *)NULL, s->row, K, C)));
}

// x of the next layer = x2 + ffn(ln2), and its ln1 (after the last layer: x_final and ln_final)
template <typename F> static void ffn_block_forward(Model<F> *m, int l) {
    LayerActs<F> *s = &m->acts[(size_t)l], *next = l + 1 < m->host->cfg.layers ? &m->acts[(size_t)l + 1] : NULL;
    const ::LinearMap *maps = gpt_has_dense(m->host) ? gpt_ffn_maps(m->host, l, -1) : NULL;
    int64_t N = m->B * m->T, C = m->host->cfg.channels;
    F *branch = m->branch;
    float *branch_rstd = NULL, *gamma = NULL;
    if (m->host->cfg.experts) {
        moe_forward(m, l, branch, 0);
        if (m->host->cfg.post_norm) { branch = s->moe.sum; branch_rstd = s->moe.sum_rstd; gamma = gpt_gamma(m, m->host->ffn_norm[l]); }
    } else {
        ffn_forward(m, maps, &s->ffn, branch, (const F *)s->ln2, Rows{N, NULL, 1}, (const int32_t *)NULL, 0);
        if (maps[2].norm) { branch = s->ffn.down_raw; branch_rstd = s->ffn.down_rstd; gamma = gpt_gamma(m, maps[2].gamma_norm); }
    }
    residual_rmsnorm_forward(m->gpu, next ? next->x : m->x_final, next ? next->ln1 : m->ln_final, next ? next->ln1_rstd : m->ln_final_rstd, branch_rstd, (const F *)s->x2, (const F *)branch, gamma, N, C);
}

// dx holds the gradient of the block's output and leaves with dL/dx2
template <typename F> static void ffn_block_backward(Model<F> *m, int l) {
    LayerActs<F> *s = &m->acts[(size_t)l];
    int64_t N = m->B * m->T, C = m->host->cfg.channels;
    if (m->recompute == 1) { rmsnorm_again(m->gpu, s->ln2, s->ln2_rstd, (const F *)s->x2, N, C); }
    if (m->host->cfg.experts) { moe_backward(m, l, m->branch, (const F *)m->dx); }
    else { ffn_backward(m, gpt_ffn_maps(m->host, l, -1), &s->ffn, m->branch, (const F *)m->dx, (const F *)s->ln2, Rows{N, NULL, 1}, (const int32_t *)NULL); }
    rmsnorm_backward(m->gpu, m->dx, (float *)NULL, (float *)NULL, (const F *)m->branch, (const F *)s->x2, s->ln2_rstd, (const float *)NULL, Rows{N, NULL, 1}, C, 1);
}

// --recompute 2: all of a block again, from its input. Output-Norms of down and their inputs were kept.
template <typename F> static void block_forward_again(Model<F> *m, int l) {
    LayerActs<F> *s = &m->acts[(size_t)l];
    int64_t N = m->B * m->T;
    rmsnorm_again(m->gpu, s->ln1, s->ln1_rstd, (const F *)s->x, N, m->host->cfg.channels);
    attention_block_forward(m, l);
    if (m->host->cfg.experts) { moe_forward(m, l, (F *)NULL, 1); }
    else { ffn_forward(m, gpt_ffn_maps(m->host, l, -1), &s->ffn, (F *)NULL, (const F *)s->ln2, Rows{N, NULL, 1}, (const int32_t *)NULL, 0); }
}

// Mean cross-entropy of the head over all tokens, a chunk of logits at a time. With grad_scale it leaves d_ln_final and adds to the
// head's gradients, so that logits needn't be computed again in the backward. The loss goes to stats.
template <typename F> static void head_loss(Model<F> *m) {
    const ::LinearMap *head = gpt_head(m->host);
    Gpu *gpu = m->gpu;
    int64_t N = m->B * m->T, C = m->host->cfg.channels, V = m->host->cfg.vocab, ldv = round_up(V, PAD), ld = map_of(m, head)->ld;
    for (int64_t n = 0; n < N; n += m->head_chunk) {
        int64_t rows = at_most(N - n, m->head_chunk);
        const F *x = m->ln_final + n * C, *logits = m->logits;
        matmul_forward(gpu, m->logits, ldv, x, C, (const F *)w_eff(m, head), ld, rows, C, ldv);
        classifier(gpu, m->logits, m->losses + n, m->targets + n, rows, V, ldv, (float)m->grad_scale, head->norm, gpt_gamma(m, head->gamma_norm), gpt_dgamma(m, head->gamma_norm), m->head_stats, m->partial);
        if (m->grad_scale == 0) { continue; }
        matmul_backward_weight(gpu, dw_eff(m, head), ld, logits, ldv, x, C, rows, C, ldv, m->accumulate || n > 0);
        matmul_backward_input(gpu, m->d_ln_final + n * C, C, logits, ldv, (const F *)w_eff(m, head), ld, rows, C, ldv);
    }
    if (m->grad_scale == 0) { CUDA_CHECK(cudaMemsetAsync(&m->stats->eval, 0, sizeof(double), gpu->stream)); }
    loss_sum_kernel<<<1, 1024, 0, gpu->stream>>>(m->grad_scale == 0 ? &m->stats->eval : &m->stats->loss, m->losses, N, m->grad_scale == 0 ? 1.0 / (double)N : m->grad_scale);
    LAUNCHED();
}

// Copies a batch to the device. For embedding_backward the host sorts the places of the batch by their token: a counting sort,
// which it does while the GPU is still busy with the batch before.
template <typename F> static void stage_batch(Model<F> *m, const int32_t *inputs, const int32_t *targets, int64_t N, int sorted) {
    int V = m->host->cfg.vocab;
    CUDA_CHECK(cudaEventSynchronize(m->copied)); // the last batch has left host_staged
    int32_t *at = m->host_staged, *order = at + 2 * N, *tokens = order + N, *runs = tokens + N;
    memcpy(at, inputs, (size_t)N * sizeof(int32_t));
    if (targets) { memcpy(at + N, targets, (size_t)N * sizeof(int32_t)); }
    m->num_runs = 0;
    if (sorted) {
        std::vector<int32_t> first((size_t)V + 1, 0);
        for (int64_t n = 0; n < N; n++) { first[(size_t)inputs[n] + 1]++; }
        for (int v = 0; v < V; v++) {
            if (first[(size_t)v + 1] > 0) { tokens[m->num_runs] = v; runs[m->num_runs++] = first[(size_t)v]; }
            first[(size_t)v + 1] += first[(size_t)v];
        }
        runs[m->num_runs] = (int32_t)N;
        for (int64_t n = 0; n < N; n++) { order[first[(size_t)inputs[n]]++] = (int32_t)n; }
    }
    m->inputs = m->staged;
    m->targets = m->inputs + N;
    m->order = m->targets + N;
    m->tokens = m->order + N;
    m->runs = m->tokens + N;
    int64_t count = sorted ? 4 * N + m->num_runs + 1 : targets ? 2 * N : N;
    CUDA_CHECK(cudaMemcpyAsync(m->staged, m->host_staged, (size_t)count * sizeof(int32_t), cudaMemcpyHostToDevice, m->gpu->stream));
    CUDA_CHECK(cudaEventRecord(m->copied, m->gpu->stream));
}

// As ::gpt_forward, but the loss goes to stats: it is added to stats->loss times its weight in the step, or, with grad_scale 0, its
// mean is stats->eval. The host doesn't wait.
template <typename F> static void gpt_forward(Model<F> *m, const int32_t *inputs, const int32_t *targets, int B, int T, double grad_scale) {
    int64_t N = (int64_t)B * T, C = m->host->cfg.channels;
    m->B = B;
    m->T = T;
    m->grad_scale = grad_scale;
    stage_batch(m, inputs, targets, N, grad_scale != 0);
    LayerActs<F> *s = &m->acts[0];
    embedding_forward(m->gpu, s->x, (const F *)m->theta_eff + m->places[0].at, m->inputs, N, C, m->places[0].ld);
    rmsnorm_forward(m->gpu, s->ln1, s->ln1_rstd, (const F *)s->x, (const float *)NULL, Rows{N, NULL, 1}, C);
    for (int l = 0; l < m->host->cfg.layers; l++) {
        attention_block_forward(m, l);
        ffn_block_forward(m, l);
    }
    if (targets) { head_loss(m); }
}

template <typename F> static void sum_bucket(Model<F> *m, size_t bucket); // Many GPUs, below

// Adds to dtheta~ (after gpt_zero_grad: writes) the gradients of the last gpt_forward, which must have had a grad_scale.
template <typename F> static void gpt_backward(Model<F> *m) {
    int64_t N = m->B * m->T, C = m->host->cfg.channels;
    sum_bucket(m, 0);
    rmsnorm_backward(m->gpu, m->dx, (float *)NULL, (float *)NULL, (const F *)m->d_ln_final, (const F *)m->x_final, m->ln_final_rstd, (const float *)NULL, Rows{N, NULL, 1}, C, 0);
    for (int l = m->host->cfg.layers - 1; l >= 0; l--) {
        if (m->recompute == 2) { block_forward_again(m, l); }
        ffn_block_backward(m, l);
        attention_block_backward(m, l);
        sum_bucket(m, (size_t)l + 1);
    }
    embedding_backward(m->gpu, m->grads + m->places[0].at, (const F *)m->dx, m->order, m->tokens, m->runs, m->num_runs, C, m->places[0].ld);
    sum_bucket(m, m->buckets.size() - 1);
    m->accumulate = 1;
}

template <typename F> static void gpt_zero_grad(Model<F> *m) {
    const Place *embedding = &m->places[0];
    m->accumulate = 0;
    CUDA_CHECK(cudaMemsetAsync(m->grads + embedding->at, 0, (size_t)(embedding->rows * embedding->ld) * sizeof(float), m->gpu->stream));
    if (m->num_gamma) { CUDA_CHECK(cudaMemsetAsync(m->dgamma, 0, (size_t)m->num_gamma * sizeof(float), m->gpu->stream)); }
    if (m->expert_tokens) { CUDA_CHECK(cudaMemsetAsync(m->expert_tokens, 0, (size_t)(m->host->cfg.layers * m->host->cfg.experts) * sizeof(int64_t), m->gpu->stream)); }
    CUDA_CHECK(cudaMemsetAsync(m->stats, 0, sizeof(Stats), m->gpu->stream));
}

// One row: the norm of the head, in place.
__global__ void __launch_bounds__(1024) logits_norm_kernel(float *logits, const float *gamma, int64_t V) {
    __shared__ float scratch[32];
    float sum = 0;
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) { sum += logits[v] * logits[v]; }
    float r = 1 / sqrtf(block_sum(sum, scratch) / (float)V + (float)NORM_EPS);
    for (int64_t v = threadIdx.x; v < V; v += blockDim.x) { logits[v] = (gamma ? gamma[v] : 1.0f) * (logits[v] * r); }
}
// Logits (rows,V), to the host, of the last `rows` tokens of the last gpt_forward, norm of the head included. In fp32: bf16 has
// ties among them.
template <typename F> static void gpt_logits(Model<F> *m, float *logits, int64_t rows) {
    const ::LinearMap *head = gpt_head(m->host);
    int64_t N = m->B * m->T, C = m->host->cfg.channels, V = m->host->cfg.vocab, ldv = round_up(V, PAD);
    for (int64_t r = 0; r < rows; r++) {
        matmul_forward(m->gpu, m->partial, ldv, (const F *)m->ln_final + (N - rows + r) * C, C, (const F *)w_eff(m, head), map_of(m, head)->ld, 1, C, ldv);
        if (head->norm) {
            logits_norm_kernel<<<1, 1024, 0, m->gpu->stream>>>(m->partial, gpt_gamma(m, head->gamma_norm), V);
            LAUNCHED();
        }
        CUDA_CHECK(cudaMemcpyAsync(logits + r * V, m->partial, (size_t)V * sizeof(float), cudaMemcpyDeviceToHost, m->gpu->stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(m->gpu->stream));
}

// ----------------------------------------------------------------------------------------------------
// 6. Optimizers. The norm of the gradient and what clipping makes of it stay on the device; the host reads them at the end of
// the step. A norm or loss that isn't finite leaves theta as it was.

__global__ void __launch_bounds__(512) gradient_norm_kernel(double *parts, const float *grads, const Span *spans, int num_spans) { // of multiples of PAD elements
    __shared__ float scratch[32];
    float sum = 0;
    for (int s = 0; s < num_spans; s++) {
        const float *from = grads + spans[s].at;
        for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * 4; i < spans[s].n; i += (int64_t)gridDim.x * blockDim.x * 4) {
            auto g = load<4>(from + i);
            for (int k = 0; k < 4; k++) { sum += g[k] * g[k]; }
        }
    }
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) { parts[blockIdx.x] = sum; }
}
__global__ void __launch_bounds__(NORM_BLOCKS) norm_sum_kernel(Stats *stats, const double *parts, int num_parts) {
    __shared__ double part[NORM_BLOCKS];
    if ((int)threadIdx.x < num_parts) { part[threadIdx.x] = parts[threadIdx.x]; }
    __syncthreads();
    if (threadIdx.x > 0) { return; }
    double sum = 0;
    for (int i = 0; i < num_parts; i++) { sum += part[i]; }
    stats->squares = sum;
}
__global__ void clip_kernel(Stats *stats, float most) {
    double norm = sqrt(stats->squares);
    stats->norm = (float)norm;
    stats->clip = !isfinite(norm) || !isfinite(stats->loss) ? NAN : most > 0 && norm > most ? (float)(most / norm) : 1.0f;
}
template <typename F> static void sum_stats(Model<F> *m); // Many GPUs, below
template <typename F> static void share_theta(Model<F> *m);

template <typename F> static void gradient_norm(Model<F> *m) {
    int64_t longest = 0;
    for (const Span &span : m->norm_spans) { if (span.n > longest) { longest = span.n; } }
    unsigned blocks = (unsigned)at_most(NORM_BLOCKS, ceil_div(longest, 512 * 4));
    gradient_norm_kernel<<<blocks, 512, 0, m->gpu->stream>>>(m->norm_parts, m->grads, m->d_spans, (int)m->norm_spans.size());
    LAUNCHED();
    norm_sum_kernel<<<1, NORM_BLOCKS, 0, m->gpu->stream>>>(m->stats, m->norm_parts, (int)blocks);
    LAUNCHED();
    sum_stats(m);
    clip_kernel<<<1, 1, 0, m->gpu->stream>>>(m->stats, (float)m->host->cfg.grad_clip);
    LAUNCHED();
}

// The numbers of a step that are the same for all parameters: see ::adamw_update, ::sgd_update, ::muon_update.
struct Step { float lr, rate, root, beta1, beta2, eps, momentum; };

// AdamW or SGD for all parameters but those of Muon, in one launch: blocks of 4096 elements.
template <bool SGD> __global__ void __launch_bounds__(256) update_kernel(float *theta, const float *grads, float *moment, float *second, const Place *places, int num_places, Step s, const Stats *stats) {
    const Place place = places[find_block(places, num_places, &Place::first_block, blockIdx.x)];
    float scale = stats->clip, lr = s.lr * place.rate, keep = 1 - lr * place.decay;
    if (isnan(scale)) { return; }
    int64_t size = place.rows * place.ld, begin = (blockIdx.x - place.first_block) * UPDATE_BLOCK;
    for (int64_t i = begin + threadIdx.x * 4; i < begin + UPDATE_BLOCK && i < size; i += 256 * 4) {
        int64_t at = place.at + i;
        auto w = load<4>(theta + at), g = load<4>(grads + place.eff + i);
        Packed<float, 4> m = {}, v = {};
        if (moment) { m = load<4>(moment + at); }
        if (!SGD) { v = load<4>(second + place.v + i); }
        for (int k = 0; k < 4; k++) {
            float d = g[k] * scale;
            if (SGD) {
                if (moment) { d = m.value[k] = s.momentum * m[k] + d; }
                w.value[k] = keep * w[k] - lr * d;
            } else {
                m.value[k] = s.beta1 * m[k] + (1 - s.beta1) * d;
                v.value[k] = s.beta2 * v[k] + (1 - s.beta2) * d * d;
                w.value[k] = keep * w[k] - s.rate * place.rate * m[k] / (sqrtf(v[k]) * s.root + s.eps);
            }
        }
        store(theta + at, w);
        if (moment) { store(moment + at, m); }
        if (!SGD) { store(second + place.v + i, v); }
    }
}

// Muon for many matrices at once. Those of one shape, or of its transpose, are one batch of products, as many as the work space
// holds: X (r,c) with r <= c, and A = X X^T and its square (r,r), all of type F. The smaller side comes first, so a matrix
// with more rows than columns goes in and out of X transposed, by tiles of 32 x 32 in shared memory.
// Each of the 5 steps X <- a X + (b A + c A^2) X is three products: cuBLAS adds b A and a X itself.
constexpr int MUON_TILE = 32;

struct MuonShape { // of a matrix (rows, cols), pads included
    int64_t r, c, ldx, ldg, tiles;
    MuonShape(int64_t rows, int64_t cols) : r(rows < cols ? rows : cols), c(rows < cols ? cols : rows), ldx(round_up(c, PAD)), ldg(round_up(r, PAD)), tiles(ceil_div(r, MUON_TILE) * ceil_div(c, MUON_TILE)) { }
};
static int64_t muon_bytes(int64_t rows, int64_t cols, int64_t size) {
    MuonShape s(rows, cols);
    return round_up((2 * s.r * s.ldx + 2 * s.r * s.ldg) * size + s.tiles * (int64_t)sizeof(float), 256) + 1024; // + 1024: each array begins at a multiple of 256 bytes
}

// m <- momentum m + g;  X = g + momentum m, with the sum of its squares by tiles. Blocks of 32 x 8 threads: x tile, y matrix.
template <typename F> __global__ void __launch_bounds__(256) muon_momentum_kernel(F *x, float *squares, float *m, const float *grads, const MuonMatrix *matrices, int64_t r, int64_t c, int64_t ldx, float momentum, const Stats *stats) {
    __shared__ float tile[MUON_TILE][MUON_TILE + 1], scratch[8];
    const MuonMatrix w = matrices[blockIdx.y];
    int64_t across = (c + MUON_TILE - 1) / MUON_TILE, i0 = blockIdx.x / across * MUON_TILE, j0 = blockIdx.x % across * MUON_TILE; // of X
    float scale = stats->clip, sum = 0;
    for (int k = threadIdx.y; k < MUON_TILE; k += 8) { // rows of theta, so that reading is in order
        int64_t row = (w.flip ? j0 : i0) + k, col = (w.flip ? i0 : j0) + threadIdx.x;
        float value = 0;
        if (row < (w.flip ? c : r) && col < (w.flip ? r : c)) {
            int64_t at = w.at + row * w.ld + col;
            float g = grads[w.eff + row * w.ld + col] * scale, mi = momentum * m[at] + g;
            if (!isnan(scale)) { m[at] = mi; }
            value = g + momentum * mi;
        }
        tile[k][threadIdx.x] = value;
        sum += value * value;
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) { scratch[threadIdx.y] = sum; }
    __syncthreads();
    if (threadIdx.x == 0 && threadIdx.y == 0) {
        float total = 0;
        for (int i = 0; i < 8; i++) { total += scratch[i]; }
        squares[(int64_t)blockIdx.y * gridDim.x + blockIdx.x] = total;
    }
    for (int k = threadIdx.y; k < MUON_TILE; k += 8) {
        int64_t i = i0 + k, j = j0 + threadIdx.x;
        if (i < r && j < c) { x[((int64_t)blockIdx.y * r + i) * ldx + j] = from_float<F>(w.flip ? tile[threadIdx.x][k] : tile[k][threadIdx.x]); }
    }
}
// X <- X / (|X| + 1e-7): x a row, y matrix
template <typename F> __global__ void __launch_bounds__(256) muon_scale_kernel(F *x, const float *squares, int64_t tiles, int64_t c, int64_t ldx) {
    __shared__ float scratch[32];
    float sum = 0;
    for (int64_t i = threadIdx.x; i < tiles; i += blockDim.x) { sum += squares[blockIdx.y * tiles + i]; }
    float scale = 1 / (sqrtf(block_sum(sum, scratch)) + 1e-7f);
    F *row = x + ((int64_t)blockIdx.y * gridDim.x + blockIdx.x) * ldx;
    for (int64_t j = threadIdx.x; j < c; j += blockDim.x) { row[j] = from_float<F>(to_float(row[j]) * scale); }
}
// theta <- keep theta - rate X
template <typename F> __global__ void __launch_bounds__(256) muon_apply_kernel(float *theta, const F *x, const MuonMatrix *matrices, int64_t r, int64_t c, int64_t ldx, const Stats *stats) {
    __shared__ float tile[MUON_TILE][MUON_TILE + 1];
    const MuonMatrix w = matrices[blockIdx.y];
    int64_t across = (c + MUON_TILE - 1) / MUON_TILE, i0 = blockIdx.x / across * MUON_TILE, j0 = blockIdx.x % across * MUON_TILE;
    if (isnan(stats->clip)) { return; }
    for (int k = threadIdx.y; k < MUON_TILE; k += 8) {
        int64_t i = i0 + k, j = j0 + threadIdx.x;
        tile[k][threadIdx.x] = i < r && j < c ? to_float(x[((int64_t)blockIdx.y * r + i) * ldx + j]) : 0.0f;
    }
    __syncthreads();
    for (int k = threadIdx.y; k < MUON_TILE; k += 8) {
        int64_t row = (w.flip ? j0 : i0) + k, col = (w.flip ? i0 : j0) + threadIdx.x;
        if (row >= (w.flip ? c : r) || col >= (w.flip ? r : c)) { continue; }
        float *to = theta + w.at + row * w.ld + col;
        *to = w.keep * *to - w.rate * (w.flip ? tile[threadIdx.x][k] : tile[k][threadIdx.x]);
    }
}

// X of a batch to the nearest orthogonal matrices, roughly; `next` has room for as much, gram and poly for (batch,r,ldg) each.
// Returns the one of x and next that holds the result.
template <typename F> static F *newton_schulz(Gpu *gpu, F *x, F *next, F *gram, F *poly, const MuonShape &s, int64_t batch) {
    const float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    int64_t of_x = s.r * s.ldx, of_gram = s.r * s.ldg;
    for (int step = 0; step < NEWTON_SCHULZ_STEPS; step++) {
        matmul<F, F>(gpu, gram, s.ldg, of_gram, Matrix{x, s.ldx, of_x, 0}, Matrix{x, s.ldx, of_x, 1}, s.r, s.r, s.c, 1, 0, gram, batch);
        matmul<F, F>(gpu, poly, s.ldg, of_gram, Matrix{gram, s.ldg, of_gram, 0}, Matrix{gram, s.ldg, of_gram, 0}, s.r, s.r, s.r, c, b, gram, batch);
        matmul<F, F>(gpu, next, s.ldx, of_x, Matrix{poly, s.ldg, of_gram, 0}, Matrix{x, s.ldx, of_x, 0}, s.r, s.c, s.r, 1, a, x, batch);
        std::swap(x, next);
    }
    return x;
}

template <typename F> static void muon_update(Model<F> *m, double lr) {
    const ::GPT *host = m->host;
    std::map<std::pair<int64_t, int64_t>, std::vector<MuonMatrix>> shapes;
    for (const Piece &piece : m->pieces) { // of this GPU: whole matrices
        if (!m->places[(size_t)piece.param].muon || piece.owner != m->rank) { continue; }
        const Place *p = &m->own[(size_t)m->own_of[(size_t)piece.param]];
        int64_t rows = host->params[piece.param].rows, cols = host->params[piece.param].cols;
        MuonShape s(p->rows, p->ld);
        shapes[{s.r, s.c}].push_back(MuonMatrix{p->at, p->eff, p->rows, p->ld, p->rows > p->ld, (float)(1 - lr * p->decay), (float)(lr * 0.2 * sqrt((double)(rows > cols ? rows : cols)))});
    }
    for (auto &[shape, matrices] : shapes) {
        MuonShape s(shape.first, shape.second);
        int64_t most = (int64_t)m->work_bytes / muon_bytes(s.r, s.c, sizeof(F));
        for (size_t first = 0; first < matrices.size(); first += (size_t)most) {
            int64_t batch = at_most(most, (int64_t)(matrices.size() - first));
            Arena work = {(char *)m->work, 0, {}};
            auto take = [&](int64_t bytes) { void *p = work.base + work.used; work.used += (size_t)round_up(bytes, 256); return p; };
            F *x = (F *)take(batch * s.r * s.ldx * (int64_t)sizeof(F)), *next = (F *)take(batch * s.r * s.ldx * (int64_t)sizeof(F));
            F *gram = (F *)take(batch * s.r * s.ldg * (int64_t)sizeof(F)), *poly = (F *)take(batch * s.r * s.ldg * (int64_t)sizeof(F));
            float *squares = (float *)take(batch * s.tiles * (int64_t)sizeof(float));
            MuonMatrix *list = m->d_matrices + m->matrices_used;
            memcpy(m->host_matrices + m->matrices_used, &matrices[first], (size_t)batch * sizeof(MuonMatrix));
            CUDA_CHECK(cudaMemcpyAsync(list, m->host_matrices + m->matrices_used, (size_t)batch * sizeof(MuonMatrix), cudaMemcpyHostToDevice, m->gpu->stream));
            m->matrices_used += batch;
            dim3 grid((unsigned)s.tiles, (unsigned)batch), block(MUON_TILE, 8);
            muon_momentum_kernel<F><<<grid, block, 0, m->gpu->stream>>>(x, squares, m->m, m->grads, list, s.r, s.c, s.ldx, (float)host->cfg.muon_momentum, m->stats);
            LAUNCHED();
            muon_scale_kernel<F><<<dim3((unsigned)s.r, (unsigned)batch), 256, 0, m->gpu->stream>>>(x, squares, s.tiles, s.c, s.ldx);
            LAUNCHED();
            const F *done = newton_schulz(m->gpu, x, next, gram, poly, s, batch);
            muon_apply_kernel<F><<<grid, block, 0, m->gpu->stream>>>(m->theta, done, list, s.r, s.c, s.ldx, m->stats);
            LAUNCHED();
        }
    }
}

// One update of theta from dtheta; the scale of the gradient is stats->clip. step counts from 1.
template <typename F> static void optimizer_step(Model<F> *m, int64_t step, double lr) {
    const Config *cfg = &m->host->cfg;
    Step s = {(float)lr, (float)(lr / (1 - pow(cfg->beta1, (double)step))), (float)(1 / sqrt(1 - pow(cfg->beta2, (double)step))),
              (float)cfg->beta1, (float)cfg->beta2, (float)cfg->eps, (float)cfg->sgd_momentum};
    unsigned blocks = (unsigned)m->theta_blocks; // not 0: scale vectors or not, each GPU has rows of the embedding
    int count = (int)m->own.size();
    if (cfg->optimizer == OPTIMIZER_SGD) { update_kernel<true><<<blocks, 256, 0, m->gpu->stream>>>(m->theta, m->grads, m->m, m->v, m->d_places, count, s, m->stats); }
    else { update_kernel<false><<<blocks, 256, 0, m->gpu->stream>>>(m->theta, m->grads, m->m, m->v, m->d_places, count, s, m->stats); }
    LAUNCHED();
    if (cfg->optimizer == OPTIMIZER_MUON) { muon_update(m, lr); share_theta(m); }
}

// ----------------------------------------------------------------------------------------------------
// Many GPUs. Each has all of theta~ and of the gradients, and works on every world-th micro-batch of a step. In its last
// backward the gradients of a layer are summed over the GPUs as soon as they are whole, on a stream of their own, while the
// layers below are still at work: a bucket a layer, the head first, the embedding last.
//
//     --zero 0   dtheta~ --all-reduce-->  each GPU updates all of theta
//     --zero 1   dtheta~ --reduce to the owner of a tensor-->  it updates its theta, and makes theta~ of it  --broadcast--> all
//
// The gradient of theta~ is linear in the batch, so it is summed before reparameterize_backward, and nothing else is large.
// Scale vectors are small: each GPU has them all and updates them in the same way; with --zero 1 what an owner's matrices say
// of them goes into one sum of dgamma. Muon's matrices are updated by their owners alone either way.
// A process drives its GPUs with a thread for each; several processes, one a machine, are one more range of ranks.

static struct Job {
    int processes = 1, process = 0, gpus = 1; // this process: its number, its GPUs, with ranks from process * gpus on
    int local_process = 0;         // its number among those of this machine, where that has several
    int world() const { return processes * gpus; }
    int timeout = 600;             // --timeout
    std::atomic<int> failing{0};   // a thread has begun to say why this process ends
    std::vector<Gpu *> gpus_open;
} job;
static thread_local int failing_here;

// Errors. The first thread that fails speaks; others that fail because of it keep still until the process ends. Nobody runs
// the handlers of exit(), which would pull the floor from under threads at work.
static void peers_say(const char *state);
static void job_before_failure() {
    if (failing_here || !job.failing.exchange(1)) { failing_here = 1; return; }
    for (;;) { pause(); }
}
static void job_after_failure(int status) {
    fflush(stderr);                // a file is buffered, and _exit() throws away what it holds
    std::thread([status] { sleep(3); _exit(status); }).detach(); // whatever the rest does
    peers_say("failed");
    for (Gpu *gpu : job.gpus_open) { if (gpu->comm) { ncclCommAbort(gpu->comm); } } // so that others needn't wait for us
#ifdef USE_MPI
    if (job.processes > 1) { MPI_Abort(MPI_COMM_WORLD, status); }
#endif
    _exit(status);
}

// A collective failed, perhaps because another thread or process did: who that was says more than the collective.
static void wait_for_blame(ncclResult_t status) {
    if (status != ncclRemoteError && status != ncclSystemError && status != ncclInternalError) { return; }
    for (int i = 0; i < 20 && !job.failing; i++) { usleep(50000); }
    for (int i = 0; i < 4 * job.timeout + 20 && !job.failing && job.processes > 1; i++) { usleep(500000); }
}

// Waits for all that was given to this GPU. Kernels can't wait for ever, but collectives can, for a GPU that is lost.
static void gpu_wait(Gpu *gpu, const char *what) {
    if (gpu->world == 1) { CUDA_CHECK(cudaStreamSynchronize(gpu->stream)); return; }
    double begin = seconds();
    for (int64_t round = 0;; round++) {
        cudaError_t status = cudaStreamQuery(gpu->stream);
        if (status == cudaSuccess) { return; }
        if (status != cudaErrorNotReady) { CUDA_CHECK(status); }
        if (job.failing) { job_before_failure(); }
        if (round > 1000) { usleep(20); }
        if (round % 1000 != 0 || !gpu->comm) { continue; }
        ncclResult_t error = ncclSuccess;
        NCCL_CHECK(ncclCommGetAsyncError(gpu->comm, &error));
        if (error != ncclInProgress) { NCCL_CHECK(error); }
        if (seconds() - begin > job.timeout) { FAIL("rank %d of %d: waited %d s for %s, expected an answer: one of the GPUs is lost (--timeout)", gpu->rank, gpu->world, job.timeout, what); }
    }
}

// From the stream of kernels to that of collectives, and back.
static void comm_begin(Gpu *gpu) {
    CUDA_CHECK(cudaEventRecord(gpu->handed, gpu->stream));
    CUDA_CHECK(cudaStreamWaitEvent(gpu->comm_stream, gpu->handed, 0));
}
static void comm_end(Gpu *gpu) {
    CUDA_CHECK(cudaEventRecord(gpu->returned, gpu->comm_stream));
    CUDA_CHECK(cudaStreamWaitEvent(gpu->stream, gpu->returned, 0));
}

// Several processes. Which one this is, and of how many, says MPI, or the launcher's environment. With MPI, that carries the id of
// the NCCL communicator, and its launcher ends all processes when one dies. Else it goes through the folder OUT/peers, which
// all machines must see. Files there are replaced as a whole, by rename. Those that an earlier run may have left can't be
// mistaken for this run's: each process draws a number at random, and nothing counts that doesn't name it.
//
//     process_K    its number | the number of the id it has read | GPUs | what it trains | state | beats
//     id           a number | 1: go | the numbers of all processes | the ncclUniqueId
//
// Process 0 writes the id once all others are there, and again if one of them has come anew, and says go when all have read it.
// From then on each process counts up its beats and watches those of the others: so it is known who is lost, and at once who
// has failed; NCCL itself might wait for ever.
struct PeerSign { uint64_t number, read, gpus, what; char state[16]; int64_t beats; };
static struct Peers {
    char dir[4200];
    PeerSign mine;
    std::vector<PeerSign> last;    // of each process
    std::vector<double> changed;   // when its sign last changed
    std::thread thread;
    std::mutex lock;
    std::condition_variable wake;
    int speaks, beating, leaving;  // speaks: others know of this process
} peers;

static void peers_write(const char *name, const std::string &text) {
    std::string path = std::string(peers.dir) + "/" + name, temporary = path + ".tmp";
    FILE *file = fopen(temporary.c_str(), "wb");
    if (!file || fwrite(text.data(), 1, text.size(), file) != text.size() || fclose(file) != 0 || rename(temporary.c_str(), path.c_str()) != 0) {
        FAIL("%s: cannot write: %s; expected a folder that all processes share", path.c_str(), strerror(errno));
    }
}
static std::string peers_read(const std::string &name) { // "" if it isn't there
    std::string path = std::string(peers.dir) + "/" + name, text(8192, '\0');
    FILE *file = fopen(path.c_str(), "rb");
    if (!file) { return ""; }
    text.resize(fread(&text[0], 1, text.size(), file));
    fclose(file);
    return text;
}
static std::string peers_name(int process) { return "process_" + std::to_string(process); }
static void peers_write_mine() {
    char text[256];
    const PeerSign *s = &peers.mine;
    snprintf(text, sizeof text, "%llx %llx %llu %llx %s %lld\n", (unsigned long long)s->number, (unsigned long long)s->read, (unsigned long long)s->gpus, (unsigned long long)s->what, s->state, (long long)s->beats);
    peers_write(peers_name(job.process).c_str(), text);
}
static bool peers_read_sign(int process, PeerSign *s) {
    unsigned long long number, read, gpus, what;
    long long beats;
    if (sscanf(peers_read(peers_name(process)).c_str(), "%llx %llx %llu %llx %15s %lld", &number, &read, &gpus, &what, s->state, &beats) != 6) { return false; }
    s->number = number;
    s->read = read;
    s->gpus = gpus;
    s->what = what;
    s->beats = beats;
    return true;
}
static std::string peers_ranks(int process) {
    int first = process * job.gpus, last = first + job.gpus - 1;
    return "process " + std::to_string(process) + " of " + std::to_string(job.processes) + (job.gpus == 1 ? " (rank " + std::to_string(first) : " (ranks " + std::to_string(first) + " to " + std::to_string(last)) + ")";
}

static void peers_judge(int process, const PeerSign *s) {
    if (strcmp(s->state, "failed") == 0) { FAIL("%s has failed, expected it to train on: it says why", peers_ranks(process).c_str()); }
    if (s->gpus != peers.mine.gpus || s->what != peers.mine.what) {
        FAIL("%s has %s, expected the same as here", peers_ranks(process).c_str(), s->gpus != peers.mine.gpus ? "another number of GPUs" : "other flags or another checkpoint");
    }
}

// Process 0 hands out `id`. Returns when all have it.
[[maybe_unused]] static void peers_meet(ncclUniqueId *id, const char *out, uint64_t what) {
    snprintf(peers.dir, sizeof peers.dir, "%s/peers", out);
    double begin = seconds();
    struct stat info;
    if (job.process == 0) { make_dirs(peers.dir); }
    while (stat(peers.dir, &info) != 0) {
        if (seconds() - begin > job.timeout) { FAIL("%s: not there after %d s, expected process 0 to make it (--timeout)", peers.dir, job.timeout); }
        usleep(20000);
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t drawn = random_u64((uint64_t)now.tv_sec * 1000000007 + (uint64_t)now.tv_nsec) ^ random_u64(((uint64_t)getpid() << 32) + (uint64_t)job.process), serial = 0;
    peers.mine = {drawn, 0, (uint64_t)job.gpus, what, "joins", 0};
    peers.last.assign((size_t)job.processes, {});
    std::vector<uint64_t> named((size_t)job.processes, 0);
    if (job.process == 0) { named[0] = drawn; }
    peers.speaks = 1;
    auto write_id = [&](int go) {
        std::string text((const char *)id, sizeof *id), head;
        char word[32];
        snprintf(word, sizeof word, "%llx %d", (unsigned long long)serial, go);
        head = word;
        for (uint64_t number : named) { snprintf(word, sizeof word, " %llx", (unsigned long long)number); head += word; }
        peers_write("id", head + "\n" + text);
    };
    for (;; usleep(20000)) {
        int missing = -1, go = 0;
        peers_write_mine();
        if (job.process == 0) {
            bool all = true, anew = false;
            for (int k = 1; k < job.processes; k++) {
                PeerSign *s = &peers.last[(size_t)k];
                if (!peers_read_sign(k, s)) { missing = k; break; }
                if (s->number != named[(size_t)k]) { named[(size_t)k] = s->number; anew = true; }
                if (!serial || s->read != serial) { all = false; missing = k; } else { peers_judge(k, s); }
            }
            if (missing >= 0) { all = false; }
            bool here = true;
            for (int k = 1; k < job.processes; k++) { here = here && named[(size_t)k]; }
            if (here && (anew || !serial)) { serial = random_u64(drawn + (uint64_t)++peers.mine.beats); write_id(0); }
            else if (here && all) { write_id(1); go = 1; }
        } else {
            missing = 0;
            std::string text = peers_read("id");
            size_t line = text.find('\n'), used = 0;
            unsigned long long word = 0;
            int n = 0, flag = 0;
            if (line != std::string::npos && text.size() == line + 1 + sizeof *id && sscanf(text.c_str(), "%llx %d%n", &word, &flag, &n) == 2) {
                serial = word;
                used = (size_t)n;
                std::vector<uint64_t> list;
                while (sscanf(text.c_str() + used, " %llx%n", &word, &n) == 1 && used < line) { list.push_back(word); used += (size_t)n; }
                if (list.size() >= (size_t)job.processes && list[(size_t)job.process] == drawn) {
                    PeerSign first;
                    peers.mine.read = serial;
                    if (peers_read_sign(0, &first) && first.number == list[0]) { peers_judge(0, &first); }
                    memcpy((void *)id, text.data() + line + 1, sizeof *id);
                    go = flag;
                }
            }
        }
        if (go) { break; }
        if (seconds() - begin > job.timeout) { FAIL("%s: no sign of %s in %d s, expected it to join (--timeout)", peers.dir, peers_ranks(missing < 0 ? 0 : missing).c_str(), job.timeout); }
    }
    snprintf(peers.mine.state, sizeof peers.mine.state, "trains");
    peers_write_mine();
}

// What the thread that beats does at each beat.
static void peers_beat() {
    peers.mine.beats++;
    peers_write_mine();
    for (int k = 0; k < job.processes; k++) {
        PeerSign now = {}, *last = &peers.last[(size_t)k];
        if (k == job.process || strcmp(last->state, "done") == 0) { continue; }
        if (peers_read_sign(k, &now)) {
            if (now.number != last->number || now.beats != last->beats || strcmp(now.state, last->state) != 0) { *last = now; peers.changed[(size_t)k] = seconds(); }
            peers_judge(k, &now);
        }
        if (seconds() - peers.changed[(size_t)k] > job.timeout) { FAIL("%s is lost: no sign of it in %d s (--timeout)", peers_ranks(k).c_str(), job.timeout); }
    }
}
[[maybe_unused]] static void peers_watch() { // MPI has its own
    peers.changed.assign((size_t)job.processes, seconds());
    for (PeerSign &s : peers.last) { s = {}; }
    peers.beating = 1;
    peers.thread = std::thread([] {
        double period = job.timeout / 10.0 < 5 ? job.timeout / 10.0 : 5;
        std::unique_lock<std::mutex> hold(peers.lock);
        for (;;) {
            if (!job.failing) { peers_beat(); }
            if (peers.wake.wait_for(hold, std::chrono::duration<double>(period), [] { return peers.leaving; })) { return; }
        }
    });
}
static void peers_say(const char *state) { // the last that is heard of this process: nothing more may go wrong here
    if (!peers.speaks) { return; }
    std::unique_lock<std::mutex> hold(peers.lock, std::defer_lock);
    if (peers.thread.joinable() && std::this_thread::get_id() != peers.thread.get_id()) { hold.lock(); } // after its last beat
    char text[256], path[4300], temporary[4400];
    snprintf(path, sizeof path, "%s/process_%d", peers.dir, job.process);
    snprintf(temporary, sizeof temporary, "%s.last", path);
    const PeerSign *s = &peers.mine;
    int n = snprintf(text, sizeof text, "%llx %llx %llu %llx %s %lld\n", (unsigned long long)s->number, (unsigned long long)s->read, (unsigned long long)s->gpus, (unsigned long long)s->what, state, (long long)s->beats + 1);
    FILE *file = fopen(temporary, "wb");
    if (!file) { return; }
    int written = fwrite(text, 1, (size_t)n, file) == (size_t)n;
    if (fclose(file) != 0 || !written || rename(temporary, path) != 0) { unlink(temporary); }
}
static void peers_leave() {
    if (!peers.beating) { return; }
    {
        std::lock_guard<std::mutex> hold(peers.lock);
        peers.leaving = 1;
    }
    peers.wake.notify_one();
    peers.thread.join();
    peers_say("done");
    peers.beating = 0;
}

template <typename F> constexpr ncclDataType_t NCCL_TYPE = sizeof(F) == 2 ? ncclBfloat16 : ncclFloat32;

template <typename F> static void sum_bucket(Model<F> *m, size_t bucket) {
    Gpu *gpu = m->gpu;
    if (m->world == 1 || !m->last || m->buckets[bucket].empty()) { return; }
    comm_begin(gpu);
    NCCL_CHECK(ncclGroupStart());
    for (const Span &span : m->buckets[bucket]) {
        float *g = m->grads + span.at;
        if (span.owner < 0) { NCCL_CHECK(ncclAllReduce(g, g, (size_t)span.n, ncclFloat32, ncclSum, gpu->comm, gpu->comm_stream)); }
        else { NCCL_CHECK(ncclReduce(g, g, (size_t)span.n, ncclFloat32, ncclSum, span.owner, gpu->comm, gpu->comm_stream)); }
    }
    NCCL_CHECK(ncclGroupEnd());
}

template <typename F> static void sum_dgamma(Model<F> *m) {
    if (m->world == 1 || m->num_gamma == 0) { return; }
    comm_begin(m->gpu);
    NCCL_CHECK(ncclAllReduce(m->dgamma, m->dgamma, (size_t)m->num_gamma, ncclFloat32, ncclSum, m->gpu->comm, m->gpu->comm_stream));
    comm_end(m->gpu);
}

// Losses, the gradient's square and whether a process shall stop; and the tokens of the experts.
template <typename F> static void sum_stats(Model<F> *m) {
    static_assert(offsetof(Stats, stop) == 4 * sizeof(double));
    if (m->world == 1) { return; }
    m->host_stats->stop = m->gpu->local == 0 && stop_signal;
    CUDA_CHECK(cudaMemcpyAsync(&m->stats->stop, &m->host_stats->stop, sizeof(double), cudaMemcpyHostToDevice, m->gpu->stream));
    comm_begin(m->gpu);
    NCCL_CHECK(ncclAllReduce(&m->stats->loss, &m->stats->loss, 5, ncclFloat64, ncclSum, m->gpu->comm, m->gpu->comm_stream));
    int64_t count = m->host->cfg.layers * (int64_t)m->host->cfg.experts;
    if (count) { NCCL_CHECK(ncclAllReduce(m->expert_tokens, m->expert_tokens, (size_t)count, ncclInt64, ncclSum, m->gpu->comm, m->gpu->comm_stream)); }
    comm_end(m->gpu);
}

// Each owner's part goes to all: of theta~ with --zero 1; of theta, Muon's matrices, else.
template <typename T, typename F> static void share(Model<F> *m, T *tensor, const std::vector<Span> &spans) {
    for (const Span &span : spans) {
        T *from = tensor + span.at;
        NCCL_CHECK(ncclBroadcast(from, from, (size_t)span.n, NCCL_TYPE<T>, span.owner, m->gpu->comm, m->gpu->comm_stream));
    }
}
template <typename F> static void share_effective(Model<F> *m) {
    if (!m->divided) { return; }
    comm_begin(m->gpu);
    NCCL_CHECK(ncclGroupStart());
    for (const std::vector<Span> &bucket : m->buckets) { share(m, m->theta_eff, bucket); }
    NCCL_CHECK(ncclGroupEnd());
    comm_end(m->gpu);
}
template <typename F> static void share_theta(Model<F> *m) {
    if (m->world == 1 || m->divided) { return; }
    comm_begin(m->gpu);
    NCCL_CHECK(ncclGroupStart());
    share(m, m->theta, m->muon_spans);
    NCCL_CHECK(ncclGroupEnd());
    comm_end(m->gpu);
}

// ----------------------------------------------------------------------------------------------------
// 8. Between host and device: what checkpoints are read into and written from.

// A tensor of the table between the host's rows and the device's padded ones.
static void copy_tensor(Gpu *gpu, float *host, float *device, int64_t rows, int64_t cols, int64_t ld, int to_device, std::vector<float> &turn) {
    int64_t size = rows * ld;
    turn.assign((size_t)size, 0.0f);
    for (int64_t r = 0; r < rows && to_device; r++) { memcpy(&turn[(size_t)(r * ld)], host + r * cols, (size_t)cols * sizeof(float)); }
    if (to_device) { CUDA_CHECK(cudaMemcpyAsync(device, turn.data(), (size_t)size * sizeof(float), cudaMemcpyHostToDevice, gpu->stream)); }
    else { CUDA_CHECK(cudaMemcpyAsync(turn.data(), device, (size_t)size * sizeof(float), cudaMemcpyDeviceToHost, gpu->stream)); }
    gpu_wait(gpu, "copying");
    for (int64_t r = 0; r < rows && !to_device; r++) { memcpy(host + r * cols, &turn[(size_t)(r * ld)], (size_t)cols * sizeof(float)); }
}

static void copy_tensor(Gpu *gpu, float *host, float *device, const ::Param *p, const Place *place, int to_device, std::vector<float> &turn) {
    copy_tensor(gpu, host, device, p->rows, p->cols, place->ld, to_device, turn);
}

// theta and moments. To the device: whatever a GPU has. To the host, of process 0: each of its GPUs copies what it alone or first
// has; what the GPUs of other processes own is sent to rank 0, some rows at a time.
template <typename F> static void copy_state(Model<F> *m, int to_device) {
    ::GPT *host = m->host;
    Gpu *gpu = m->gpu;
    std::vector<float> turn;
    // values: of the whole tensor on the host; tensor: where its entry in `own` begins on the device
    auto copy = [&](float *values, float *tensor, const Place *has, int param, int64_t row, int64_t rows, int holder) {
        const ::Param *p = &host->params[param];
        int64_t ld = m->places[(size_t)param].ld, remote = holder >= job.gpus;
        float *device = has ? tensor + (row - has->row) * ld : NULL;
        values += row * p->cols;
        rows = at_most(rows, p->rows - row);
        if (rows <= 0) { return; } // pads
        if (to_device) {
            if (device) { copy_tensor(gpu, values, device, rows, p->cols, ld, 1, turn); }
        } else if (!remote) {
            if (gpu->rank == holder) { copy_tensor(gpu, values, device, rows, p->cols, ld, 0, turn); }
        } else if (gpu->rank == holder || gpu->rank == 0) {
            int64_t most = (int64_t)m->work_bytes / (ld * (int64_t)sizeof(float));
            for (int64_t r = 0; r < rows; r += most) {
                int64_t some = at_most(rows - r, most);
                comm_begin(gpu);
                if (gpu->rank == holder) { NCCL_CHECK(ncclSend(device + r * ld, (size_t)(some * ld), ncclFloat32, 0, gpu->comm, gpu->comm_stream)); }
                else { NCCL_CHECK(ncclRecv(m->work, (size_t)(some * ld), ncclFloat32, holder, gpu->comm, gpu->comm_stream)); }
                comm_end(gpu);
                if (gpu->rank == 0) { copy_tensor(gpu, values + r * p->cols, (float *)m->work, some, p->cols, ld, 0, turn); }
            }
        }
    };
    auto copy_rows = [&](int param, int64_t row, int64_t rows, int owner, const Place *has) {
        const ::Param *p = &host->params[param];
        int holder = m->divided ? owner : 0, of_m = m->places[(size_t)param].muon ? owner : holder; // Muon's momentum is its owner's either way
        copy(host->theta + p->offset, has ? m->theta + has->at : NULL, has, param, row, rows, holder);
        if (p->m >= 0) { copy(host->moments + p->m, has ? m->m + has->at : NULL, has, param, row, rows, of_m); }
        if (p->v >= 0) { copy(host->moments + p->v, has ? m->v + has->v : NULL, has, param, row, rows, holder); }
    };
    for (const Piece &piece : m->pieces) {
        const Place *has = m->divided ? NULL : &m->own[(size_t)piece.param];
        if (m->divided && piece.owner == m->rank) { has = &m->own[(size_t)m->own_of[(size_t)piece.param]]; }
        copy_rows(piece.param, piece.row, piece.rows, piece.owner, has);
    }
    for (int i = 0; i < host->num_params; i++) {
        if (host->params[i].role >= ROLE_GAMMA_B) { copy_rows(i, 0, 1, 0, &m->own[(size_t)m->own_of[(size_t)i]]); }
    }
}

// ----------------------------------------------------------------------------------------------------
// 10. The machine of train_gpt2.c's loop: each of its functions is done by all GPUs of this process together.

static int device_count() {
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count < 1) { FAIL("found no GPU that can be used (%s), expected one and its driver; train_gpt2 computes on the CPU", status == cudaSuccess ? "the driver counts none" : cudaGetErrorString(status)); }
    return count;
}

static void check_options(const Config *cfg) {
    job.timeout = cfg->timeout;
    job.gpus = cfg->gpus ? cfg->gpus : device_count();
    if (cfg->check && (cfg->sample > 0 || cfg->export_dir[0])) { USAGE("--check: found with --sample or --export, expected alone: it compares a step of training"); }
    int training = cfg->sample == 0 && !cfg->export_dir[0] && !cfg->check;
#ifdef NO_NCCL
    if (job.world() > 1) { USAGE("--gpus: found %d in each of %d processes, expected one: this program was built without NCCL", job.gpus, job.processes); }
#endif
    if (job.world() > 1 && !training) { USAGE("--gpus: found %d in each of %d processes, expected 1 and 1: --sample, --export and --check are for one GPU", job.gpus, job.processes); }
    int64_t unit = (int64_t)cfg->batch * job.world(), below = cfg->total_batch / unit * unit;
    if (cfg->total_batch % unit != 0) {
        char lower[32] = "";
        if (below > 0) { snprintf(lower, sizeof lower, "%lld or ", (long long)below); }
        USAGE("--total-batch: found %d, expected a multiple of --batch %d times %d GPUs, such as %s%lld", cfg->total_batch, cfg->batch, job.world(), lower, (long long)(below + unit));
    }
}

// Gradient of one step over --total-batch sequences: ::train_gradient, but nothing waits for the GPU. Micro-batches are dealt out
// to the GPUs in turn, so they are those of one GPU.
template <typename F> static void train_gradient(Model<F> *m, Run *run) {
    ::GPT *host = m->host;
    int B = host->cfg.batch, T = host->cfg.seq_len, micro = host->cfg.total_batch / B;
    int32_t *inputs = m->batch.data(), *targets = inputs + (int64_t)B * T;
    gpt_zero_grad(m);
    for (int i = m->rank; i < micro; i += m->world) {
        for (int b = 0; b < B; b++) {
            loader_read(&run->data, run->state.sequences + (int64_t)i * B + b, inputs + (int64_t)b * T, targets + (int64_t)b * T, host->cfg.vocab);
        }
        m->last = i + m->world >= micro;
        gpt_forward(m, inputs, targets, B, T, 1.0 / ((double)host->cfg.total_batch * T));
        gpt_backward(m);
    }
    if (m->world > 1) { comm_end(m->gpu); }
    reparameterize_backward(m);
}

// What the host wants to know of a step, once it is done.
template <typename F> static void read_stats(Model<F> *m) {
    CUDA_CHECK(cudaMemcpyAsync(m->host_stats, m->stats, sizeof(Stats), cudaMemcpyDeviceToHost, m->gpu->stream));
    int64_t count = m->host->cfg.layers * (int64_t)m->host->cfg.experts;
    if (count && m->gpu->local == 0) { CUDA_CHECK(cudaMemcpyAsync(m->host->expert_tokens, m->expert_tokens, (size_t)count * sizeof(int64_t), cudaMemcpyDeviceToHost, m->gpu->stream)); }
    gpu_wait(m->gpu, "a step");
    m->matrices_used = 0;
}

template <typename F> static void train_update(Model<F> *m, Run *run, int64_t step, double lr) {
    train_gradient(m, run);
    gradient_norm(m);
    optimizer_step(m, step, lr);
    reparameterize_forward(m);
    read_stats(m);
    if (m->gpu->local > 0) { return; } // the others have the same
    run->stop = m->host_stats->stop > 0;
    run->loss = m->host_stats->loss;
    run->norm = m->host_stats->norm;
    run->balance_loss = m->host_stats->balance_loss;
    run->z_loss = m->host_stats->z_loss;
}

template <typename F> static double forward_loss(Model<F> *m, const int32_t *inputs, const int32_t *targets, int B, int T, double grad_scale) {
    gpt_forward(m, inputs, targets, B, T, grad_scale);
    if (!targets) { return 0; }
    read_stats(m);
    return grad_scale == 0 ? m->host_stats->eval : m->host_stats->loss / (grad_scale * B * T);
}

// --check: one step here and by the CPU reference, on the same batch. Prints, tensor by tensor, |difference| / |CPU's gradient|.
// beta and alpha of a scale vector are one parameter in two tensors, so beta's difference is measured against the gradient of
// both: where a norm follows, beta hardly matters, and its own gradient is a sum that all but cancels.
// What a tensor may differ by: fp32 adds in another order; bf16 rounds to 8 bits at each layer, and so a token with two nearly
// equal router logits may go to another expert than in fp32, and its gradient with it.
constexpr double CHECK_FP32 = 1e-4, CHECK_BF16 = 0.1, CHECK_BF16_EXPERTS = 0.5;

// |ours - theirs| / |theirs| of a parameter's gradient. alpha: squares of the gradient of the parameter before, of which this is beta.
static double gradient_error(const float *ours, const float *theirs, int64_t n, double alpha) {
    double squares = alpha, difference = 0;
    for (int64_t i = 0; i < n; i++) {
        squares += (double)theirs[i] * theirs[i];
        difference += ((double)ours[i] - theirs[i]) * ((double)ours[i] - theirs[i]);
    }
    return difference == 0 ? 0 : sqrt(difference / squares);
}
static double norm_of(const float *x, int64_t n) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) { squares += (double)x[i] * x[i]; }
    return sqrt(squares);
}

template <typename F> static int check(Model<F> *m, Run *run) {
    ::GPT *host = m->host;
    static ::GPT cpu;
    gpt_build(&cpu, &host->cfg);
    cpu.cfg.total_batch = host->cfg.total_batch = host->cfg.batch;
    ::gpt_allocate(&cpu, host->cfg.batch, host->cfg.seq_len);
    memcpy(cpu.theta, host->theta, (size_t)host->num_theta * sizeof(float));
    ::reparameterize_forward(&cpu);
    double loss = ::train_gradient(&cpu, run), norm = ::gradient_norm(&cpu);
    train_gradient(m, run);
    gradient_norm(m);
    read_stats(m);
    int differs = 0;
    auto report = [&](const char *name, double ours, double theirs, double error, double allowed) {
        differs |= !(error <= allowed);
        printf("%-40s %14.7g %14.7g %10.2e %10.0e%s\n", name, ours, theirs, error, allowed, error <= allowed ? "" : "  DIFFERS");
    };
    printf("error: |GPU's gradient - CPU's| / |CPU's|, of a tensor; in the last two rows of the numbers themselves\n");
    printf("%-40s %14s %14s %10s %10s\n", "norm of the gradient of", "GPU", "CPU", "error", "allowed");
    double allowed = sizeof(F) == 2 ? CHECK_BF16 : CHECK_FP32, alpha = 0;
    std::vector<float> turn, ours;
    for (int i = 0; i < host->num_params; i++) {
        const ::Param *p = &host->params[i];
        const float *theirs = cpu.grads + p->offset;
        int64_t n = p->rows * p->cols;
        ours.resize((size_t)n);
        copy_tensor(m->gpu, ours.data(), m->grads + m->places[(size_t)i].at, p, &m->places[(size_t)i], 0, turn);
        int routed = sizeof(F) == 2 && (p->expert >= 0 || p->role == ROLE_ROUTER || strstr(p->name, "router"));
        report(p->name, norm_of(ours.data(), n), norm_of(theirs, n), gradient_error(ours.data(), theirs, n, alpha), routed ? CHECK_BF16_EXPERTS : allowed);
        alpha = p->beta < 0 ? 0 : norm_of(theirs, n) * norm_of(theirs, n);
    }
    report("all parameters", m->host_stats->norm, norm, fabs(m->host_stats->norm - norm) / norm, allowed);
    report("the loss, itself", m->host_stats->loss, loss, fabs(m->host_stats->loss - loss) / loss, sizeof(F) == 2 ? 1e-2 : 1e-6);
    printf("%s in %s\n", differs ? "the GPU differs from the CPU" : "the GPU agrees with the CPU", sizeof(F) == 2 ? "bf16" : "fp32");
    return differs;
}

// Mean loss of the validation sequences: ::validate, whose micro-batches are dealt out to the GPUs in turn.
template <typename F> static double validate(Model<F> *m, const DataLoader *val) {
    const Config *cfg = &m->host->cfg;
    int64_t B = cfg->batch, T = cfg->seq_len, sequences = at_most(cfg->val_batches * B, val->windows);
    int32_t *inputs = m->batch.data(), *targets = inputs + B * T;
    double sum = 0;
    for (int64_t at = m->rank * B; at < sequences; at += m->world * B) {
        int64_t rows = at_most(sequences - at, B);
        for (int64_t b = 0; b < rows; b++) { loader_read(val, at + b, inputs + b * T, targets + b * T, cfg->vocab); }
        gpt_forward(m, inputs, targets, (int)rows, (int)T, 0);
        read_stats(m);
        sum += m->host_stats->eval * (double)rows;
    }
    if (m->world > 1) {
        m->host_stats->eval = sum;
        CUDA_CHECK(cudaMemcpyAsync(&m->stats->eval, &m->host_stats->eval, sizeof(double), cudaMemcpyHostToDevice, m->gpu->stream));
        comm_begin(m->gpu);
        NCCL_CHECK(ncclAllReduce(&m->stats->eval, &m->stats->eval, 1, ncclFloat64, ncclSum, m->gpu->comm, m->gpu->comm_stream));
        comm_end(m->gpu);
        read_stats(m);
        sum = m->host_stats->eval;
    }
    return sum / (double)sequences;
}

// The threads of this process's GPUs. The main thread gives all of them one piece of work and waits until it is done; where there
// is one GPU, it does the work itself.
struct Worker {
    Gpu gpu;
    void *model;                   // a Model of the F that --precision says
    std::thread thread;
};
static struct Team {
    ::GPT *host;
    std::vector<Worker *> workers;
    const std::function<void(Worker *)> *work; // NULL: leave
    std::mutex lock;
    std::condition_variable begin, done;
    int64_t round, busy;
} team;

static void worker_main(Worker *worker) {
    for (int64_t seen = 0;;) {
        std::unique_lock<std::mutex> hold(team.lock);
        team.begin.wait(hold, [&] { return team.round != seen; });
        seen = team.round;
        const auto *work = team.work;
        hold.unlock();
        if (!work) { return; }
        (*work)(worker);
        hold.lock();
        if (--team.busy == 0) { team.done.notify_one(); }
    }
}
static void on_all(const std::function<void(Worker *)> &work) {
    if (team.workers.size() == 1) { work(team.workers[0]); return; }
    std::unique_lock<std::mutex> hold(team.lock);
    team.work = &work;
    team.busy = (int64_t)team.workers.size();
    team.round++;
    team.begin.notify_all();
    team.done.wait(hold, [] { return team.busy == 0; });
}
#define ON_MODEL(worker, call) do { \
    if (is_bf16(&team.host->cfg)) { auto *model = (Model<bf16> *)(worker)->model; call; } \
    else { auto *model = (Model<float> *)(worker)->model; call; } } while (0)
#define ON_ALL(call) on_all([&](Worker *worker) { ON_MODEL(worker, call); })
#define ON_FIRST(call) on_all([&](Worker *worker) { if (worker == team.workers[0]) { ON_MODEL(worker, call); } })

static MemoryUse machine_estimate(::GPT *m, int64_t B, int64_t T) {
    return is_bf16(&m->cfg) ? gpt_estimate_memory<bf16>(m, B, T, job.world()) : gpt_estimate_memory<float>(m, B, T, job.world());
}
static void machine_allocate(::GPT *m, int64_t B, int64_t T) {
    int count = device_count(), world = job.world();
    if (job.local_process * job.gpus + job.gpus > count) { FAIL("--gpus: found %d from GPU %d on, expected at most the %d that are here", job.gpus, job.local_process * job.gpus, count); }
    team.host = m;
    if (world > 1) {
        before_failure = job_before_failure;
        after_failure = job_after_failure;
    }
    for (int i = 0; i < job.gpus; i++) {
        team.workers.push_back(new Worker());
        job.gpus_open.push_back(&team.workers.back()->gpu);
    }
    if (job.gpus > 1) { for (Worker *worker : team.workers) { worker->thread = std::thread(worker_main, worker); } }
    on_all([&](Worker *worker) {
        int i = (int)(std::find(team.workers.begin(), team.workers.end(), worker) - team.workers.begin());
        gpu_open(&worker->gpu, job.local_process * job.gpus + i, job.process * job.gpus + i, world);
        worker->gpu.local = i;
        worker->model = is_bf16(&m->cfg) ? (void *)gpt_allocate<bf16>(m, &worker->gpu, B, T) : (void *)gpt_allocate<float>(m, &worker->gpu, B, T);
    });
    m->theta = (real *)calloc((size_t)m->num_theta, sizeof(real));
    m->moments = (real *)calloc((size_t)m->num_moments + 1, sizeof(real));
    m->inputs = (int32_t *)calloc((size_t)(B * T), sizeof(int32_t));
    m->targets = (int32_t *)calloc((size_t)(B * T), sizeof(int32_t));
    if (!m->theta || !m->moments || !m->inputs || !m->targets) { FAIL("cannot allocate %.2f GiB on the host, for theta and moments", (double)(m->num_theta + m->num_moments) * sizeof(real) / (1 << 30)); }
}
static void machine_close() {
    if (team.workers.empty()) { return; }
    on_all([&](Worker *worker) {
        ON_MODEL(worker, gpt_free(model));
        gpu_close(&worker->gpu);
    });
    {
        std::lock_guard<std::mutex> hold(team.lock);
        team.work = NULL;
        team.round++;
    }
    team.begin.notify_all();
    for (Worker *worker : team.workers) {
        if (worker->thread.joinable()) { worker->thread.join(); }
        delete worker;
    }
    team.workers.clear();
    job.gpus_open.clear();
}

// Everything is allocated: now the GPUs meet. A first round of what they will do, so that NCCL allocates too, and a last look whether
// all mean the same run.
static void machine_connect(const ::GPT *m, int64_t step) {
    int world = job.world();
    if (job.process == 0) {
        cudaDeviceProp properties;
        CUDA_CHECK(cudaGetDeviceProperties(&properties, team.workers[0]->gpu.device));
        printf("%s on %d GPU%s (%s)%s\n", is_bf16(&m->cfg) ? "bf16" : "fp32", world, world == 1 ? "" : "s", properties.name, m->cfg.zero && world > 1 ? ", theta and moments divided among them" : "");
    }
    if (world == 1) { return; }
    ncclUniqueId id;
    char *listing = config_listing(&m->cfg, " ");
    uint64_t what = random_u64((uint64_t)step ^ (uint64_t)crc32_z(0, (const unsigned char *)listing, strlen(listing)) << 24);
    free(listing);
    if (job.process == 0) { NCCL_CHECK(ncclGetUniqueId(&id)); }
#ifdef USE_MPI
    if (job.processes > 1) {
        uint64_t mine[2] = {what, (uint64_t)job.gpus};
        std::vector<uint64_t> all((size_t)(2 * job.processes));
        MPI_CHECK(MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD));
        MPI_CHECK(MPI_Allgather(mine, 2, MPI_UINT64_T, all.data(), 2, MPI_UINT64_T, MPI_COMM_WORLD));
        for (int k = 0; k < job.processes; k++) {
            if (all[(size_t)(2 * k)] != what || all[(size_t)(2 * k + 1)] != (uint64_t)job.gpus) { FAIL("%s has other flags, another checkpoint or another number of GPUs, expected the same as here", peers_ranks(k).c_str()); }
        }
    }
#else
    if (job.processes > 1) {
        peers_meet(&id, m->cfg.out, what);
        peers_watch();
    }
#endif
    on_all([&](Worker *worker) {
        Gpu *gpu = &worker->gpu;
        NCCL_CHECK(ncclCommInitRank(&gpu->comm, world, id, gpu->rank));
        Stats *stats = NULL;
        float *work = NULL;
        ON_MODEL(worker, (stats = model->stats, work = (float *)model->work));
        CUDA_CHECK(cudaMemsetAsync(stats, 0, sizeof(Stats), gpu->stream));
        CUDA_CHECK(cudaMemsetAsync(work, 0, sizeof(float), gpu->stream));
        comm_begin(gpu);
        NCCL_CHECK(ncclAllReduce(stats, stats, 1, ncclFloat64, ncclSum, gpu->comm, gpu->comm_stream));
        NCCL_CHECK(ncclReduce(work, work, 1, ncclFloat32, ncclSum, 0, gpu->comm, gpu->comm_stream));
        NCCL_CHECK(ncclBroadcast(work, work, 1, ncclFloat32, 0, gpu->comm, gpu->comm_stream));
        for (int r = job.gpus; r < world; r++) { // as copy_state does
            if (gpu->rank == r) { NCCL_CHECK(ncclSend(work, 1, ncclFloat32, 0, gpu->comm, gpu->comm_stream)); }
            if (gpu->rank == 0) { NCCL_CHECK(ncclRecv(work, 1, ncclFloat32, r, gpu->comm, gpu->comm_stream)); }
        }
        comm_end(gpu);
        gpu_wait(gpu, "the other GPUs");
    });
}
static void machine_to_device(::GPT *) { ON_ALL(copy_state(model, 1)); }
static void machine_to_host(::GPT *) { ON_ALL(copy_state(model, 0)); }
static void machine_reparameterize(::GPT *) { ON_ALL(reparameterize_forward(model)); }
static double machine_forward(::GPT *, const int32_t *inputs, const int32_t *targets, int B, int T, double grad_scale) {
    double loss = 0;
    ON_FIRST(loss = forward_loss(model, inputs, targets, B, T, grad_scale));
    return loss;
}
static void machine_logits(::GPT *, real *logits, int64_t rows) { ON_FIRST(gpt_logits(model, logits, rows)); }
static void machine_update(::GPT *, Run *run, int64_t step, double lr) { ON_ALL(train_update(model, run, step, lr)); }
static double machine_validate(::GPT *, const DataLoader *val) {
    double loss = 0;
    on_all([&](Worker *worker) {
        double mean = 0;
        ON_MODEL(worker, mean = validate(model, val));
        if (worker->gpu.local == 0) { loss = mean; }
    });
    return loss;
}
static int machine_check(::GPT *, Run *run) {
    int differs = 0;
    ON_FIRST(differs = check(model, run));
    return differs;
}
static const Machine gpu_machine = {check_options, machine_estimate, machine_allocate, machine_connect, machine_to_device, machine_to_host, machine_reparameterize, machine_forward, machine_logits, machine_update,
                                    machine_validate, machine_check};

static int environment(const char *const *names, int otherwise) {
    for (; *names; names++) {
        const char *text = getenv(*names);
        if (text && *text) { return atoi(text); }
    }
    return otherwise;
}

// Which process this is, of how many. Open MPI, MPICH and Slurm say it to programs that know nothing of MPI as well.
static void job_begin() {
    static const char *const sizes[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", NULL}, *const ranks[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", NULL};
    static const char *const locals[] = {"OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", NULL};
    machine = &gpu_machine;
    job.processes = environment(sizes, 1);
    job.process = job.processes > 1 ? environment(ranks, -1) : 0;
#ifdef USE_MPI
    int threads = 0;
    MPI_CHECK(MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &threads));
    MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &job.processes));
    MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &job.process));
#endif
    if (job.processes < 1 || job.process < 0 || job.process >= job.processes) { FAIL("found process %d of %d in the launcher's environment, expected a number from 0 on, less than theirs", job.process, job.processes); }
    job.local_process = job.processes > 1 ? environment(locals, 0) : 0;
    num_processes = job.processes;
    process_number = job.process;
    if (job.process > 0 && !freopen("/dev/null", "w", stdout)) { FAIL("/dev/null: cannot open: %s", strerror(errno)); }
}
static void job_end() {
    machine_close();
    peers_leave();
#ifdef USE_MPI
    MPI_CHECK(MPI_Finalize());
#endif
}

} // namespace gpu

#ifdef GPU_MAIN
int main(int argc, char **argv) {
    gpu::job_begin();
    int status = train_main(argc, argv);
    gpu::job_end();
    return status;
}
#endif
