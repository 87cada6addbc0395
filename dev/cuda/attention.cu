// Causal attention, forward and backward; see lab.h for how to compile. bf16, packed q, k, v, grouped heads, HS 64 or 128.
//
// forward 1   as the formula reads: a kernel for S = a Q K^T, one for the softmax of its rows, one for P V. S and P, T x T
//             a head, travel through memory: 12 T^2 bytes where 8 T HS would do
// forward 2   train_gpt2.cu's plain kernel: one block a tile of query rows, a warp a row, online softmax, so S never leaves
//             the chip; sums on CUDA cores, every factor read from shared memory
// forward 3   tensor cores: 16 rows a warp, S and P in registers. Tiles are copied by plain loads and stores, and
//             lie row after row in shared memory, so that the eight rows that ldmatrix reads at once share four banks
// forward 4   train_gpt2.cu's: 32 rows a warp, swizzled tiles, copies that run while it computes
// backward 1  kernels for P, dS (T x T each), and the three gradients
// backward 2  train_gpt2.cu's plain kernels: P computed again from lse, dK and dV by key tile, dQ by query tile
// backward 3  train_gpt2.cu's: the same on tensor cores
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::bf16;

struct Shape { int B, T, NH, KVH, HS; };

// ---- version 1 ----
__global__ void scores_kernel(float *s, const bf16 *qkv, int T, int NH, int KVH, int HS) {  // s (B,NH,T,T)
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, key = i % T, query = i / T;
    const int h = blockIdx.y, b = blockIdx.z;
    if (query >= T) { return; }
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS;
    const bf16 *q = qkv + (b * (int64_t)T + query) * stride + (int64_t)h * HS;
    const bf16 *k = qkv + (b * (int64_t)T + key) * stride + (int64_t)(NH + h / (NH / KVH)) * HS;
    float sum = -INFINITY;
    if (key <= query) {
        sum = 0;
        for (int d = 0; d < HS; d++) { sum += lab::to_float(q[d]) * lab::to_float(k[d]); }
        sum *= rsqrtf((float)HS);
    }
    s[((int64_t)b * NH + h) * T * T + i] = sum;
}
__global__ void softmax_kernel(float *s, float *lse, int T, int64_t rows) {                 // a warp a row
    const int64_t row = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (row >= rows) { return; }
    float *x = s + row * T, top = -INFINITY, sum = 0;
    for (int j = threadIdx.x % 32; j < T; j += 32) { top = fmaxf(top, x[j]); }
    top = gpu::warp_reduce<gpu::Max>(top);
    for (int j = threadIdx.x % 32; j < T; j += 32) { sum += expf(x[j] - top); }
    sum = gpu::warp_sum(sum);
    for (int j = threadIdx.x % 32; j < T; j += 32) { x[j] = expf(x[j] - top) / sum; }
    if (threadIdx.x % 32 == 0) { lse[row] = top + logf(sum); }
}
__global__ void values_kernel(bf16 *out, const float *p, const bf16 *qkv, int T, int NH, int KVH, int HS) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, query = i / HS, d = i % HS;
    const int h = blockIdx.y, b = blockIdx.z;
    if (query >= T) { return; }
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS;
    const bf16 *v = qkv + b * (int64_t)T * stride + (int64_t)(NH + KVH + h / (NH / KVH)) * HS + d;
    const float *row = p + (((int64_t)b * NH + h) * T + query) * T;
    float sum = 0;
    for (int64_t key = 0; key <= query; key++) { sum += row[key] * lab::to_float(v[key * stride]); }
    out[(b * (int64_t)T + query) * NH * HS + (int64_t)h * HS + d] = lab::from_float<bf16>(sum);
}
static void forward1(bf16 *out, float *lse, const bf16 *qkv, float *s, Shape x, int block) {
    const int64_t T = x.T, rows = T * x.B * x.NH;
    scores_kernel<<<dim3((unsigned)gpu::ceil_div(T * T, block), x.NH, x.B), block>>>(s, qkv, x.T, x.NH, x.KVH, x.HS);
    LAUNCHED();
    softmax_kernel<<<(unsigned)gpu::ceil_div(rows * 32, block), block>>>(s, lse, x.T, rows);
    LAUNCHED();
    values_kernel<<<dim3((unsigned)gpu::ceil_div(T * x.HS, block), x.NH, x.B), block>>>(out, s, qkv, x.T, x.NH, x.KVH, x.HS);
    LAUNCHED();
}

// p (B,NH,T,T) = P, ds likewise = a * P * (dP - D)
__global__ void score_gradients_kernel(float *p, float *ds, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse,
        int T, int NH, int KVH, int HS) {
    const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, key = i % T, query = i / T;
    const int h = blockIdx.y, b = blockIdx.z;
    if (query >= T) { return; }
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS, at = ((int64_t)b * NH + h) * T * T + i;
    const bf16 *q = qkv + (b * (int64_t)T + query) * stride + (int64_t)h * HS;
    const bf16 *k = qkv + (b * (int64_t)T + key) * stride + (int64_t)(NH + h / (NH / KVH)) * HS, *v = k + (int64_t)KVH * HS;
    const bf16 *g = dout + (b * (int64_t)T + query) * NH * HS + (int64_t)h * HS, *o = out + (g - dout);
    float s = 0, dp = 0, D = 0, a = rsqrtf((float)HS);
    p[at] = ds[at] = 0;
    if (key > query) { return; }
    for (int d = 0; d < HS; d++) {
        s += lab::to_float(q[d]) * lab::to_float(k[d]);
        dp += lab::to_float(g[d]) * lab::to_float(v[d]);
        D += lab::to_float(g[d]) * lab::to_float(o[d]);
    }
    p[at] = expf(s * a - lse[((int64_t)b * NH + h) * T + query]);
    ds[at] = a * p[at] * (dp - D);
}
__global__ void gradients_kernel(bf16 *dqkv, const float *p, const float *ds, const bf16 *dout, const bf16 *qkv, int T, int NH, int KVH, int HS) {
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS, i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;    // of (T, Q)
    const int64_t t = i / stride, column = i % stride, row0 = (int64_t)blockIdx.z * T;
    if (t >= T) { return; }
    const int head = (int)(column / HS), d = (int)(column % HS), G = NH / KVH, which = head < NH ? 0 : head < NH + KVH ? 1 : 2;
    const int kvh = which == 0 ? head / G : which == 1 ? head - NH : head - NH - KVH;
    float sum = 0;
    for (int h = which == 0 ? head : kvh * G; h < (which == 0 ? head + 1 : kvh * G + G); h++) {
        const int64_t square = ((int64_t)blockIdx.z * NH + h) * T * T;
        if (which == 0) { for (int64_t s = 0; s <= t; s++) { sum += ds[square + t * T + s] * lab::to_float(qkv[(row0 + s) * stride + (int64_t)(NH + kvh) * HS + d]); } }
        if (which == 1) { for (int64_t s = t; s < T; s++) { sum += ds[square + s * T + t] * lab::to_float(qkv[(row0 + s) * stride + (int64_t)h * HS + d]); } }
        if (which == 2) { for (int64_t s = t; s < T; s++) { sum += p[square + s * T + t] * lab::to_float(dout[(row0 + s) * NH * HS + (int64_t)h * HS + d]); } }
    }
    dqkv[(row0 + t) * stride + column] = lab::from_float<bf16>(sum);
}
static void backward1(bf16 *dqkv, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, float *p, float *ds, Shape x, int block) {
    const int64_t T = x.T, Q = (int64_t)(x.NH + 2 * x.KVH) * x.HS;
    score_gradients_kernel<<<dim3((unsigned)gpu::ceil_div(T * T, block), x.NH, x.B), block>>>(p, ds, dout, qkv, out, lse, x.T, x.NH, x.KVH, x.HS);
    LAUNCHED();
    gradients_kernel<<<dim3((unsigned)gpu::ceil_div(T * Q, block), 1, x.B), block>>>(dqkv, p, ds, dout, qkv, x.T, x.NH, x.KVH, x.HS);
    LAUNCHED();
}

// ---- version 3 ----
// Fragments as drawn in train_gpt2.cu; a tile has rows of HS, one after the other.
template <int HS> __device__ inline void load_rows(bf16 *tile, const bf16 *src, int64_t stride, int valid) {
    for (int i = threadIdx.x; i < 64 * HS / 8; i += 128) {
        const int row = i / (HS / 8), chunk = i % (HS / 8);
        uint4 x = {0, 0, 0, 0};
        if (row < valid) { x = *(const uint4 *)(src + row * stride + chunk * 8); }
        *(uint4 *)(tile + row * HS + chunk * 8) = x;
    }
}
template <int HS> __global__ void __launch_bounds__(128) forward3_kernel(bf16 *out, float *lse, const bf16 *qkv, int T, int NH, int KVH, float scale) {
    using namespace gpu;
    __shared__ __align__(16) bf16 tile[64 * HS];     // Q, K, V in turn
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, h = blockIdx.y, b = blockIdx.z, t0 = blockIdx.x * 64;
    const int64_t stride = (int64_t)(NH + 2 * KVH) * HS, C = (int64_t)NH * HS, row0 = (int64_t)b * T;
    const bf16 *k = qkv + row0 * stride + (int64_t)(NH + h / (NH / KVH)) * HS, *v = k + (int64_t)KVH * HS;
    bf16 *named = tile + lane % 16 * HS + lane / 16 * 8;             // the row this lane names to ldmatrix, in the first block
    uint32_t q[HS / 16][4], r[4], a[4];
    float o[HS / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    load_rows<HS>(tile, qkv + (row0 + t0) * stride + (int64_t)h * HS, stride, T - t0);
    __syncthreads();
    for (int kt = 0; kt < HS / 16; kt++) { ldmatrix_x4(q[kt], named + warp * 16 * HS + kt * 16); }
    for (int s0 = 0; s0 < t0 + 64 && s0 < T; s0 += 64) {
        float s[8][4] = {};
        __syncthreads();
        load_rows<HS>(tile, k + s0 * stride, stride, T - s0);
        __syncthreads();
        #pragma unroll
        for (int kt = 0; kt < HS / 16; kt++) {
            #pragma unroll
            for (int n = 0; n < 8; n += 2) {
                ldmatrix_x4(r, named + n * 8 * HS + kt * 16);
                const uint32_t left[2] = {r[0], r[2]}, right[2] = {r[1], r[3]};
                mma_m16n8k16(s[n], q[kt], left);
                mma_m16n8k16(s[n + 1], q[kt], right);
            }
        }
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = t0 + warp * 16 + half * 8 + lane / 4;
            float high = top[half], total = 0;
            #pragma unroll
            for (int n = 0; n < 8; n++) {
                #pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    s[n][j] = s0 + n * 8 + 2 * (lane % 4) + j % 2 > row ? -INFINITY : s[n][j] * scale;
                    high = fmaxf(high, s[n][j]);
                }
            }
            high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 1));
            high = fmaxf(high, __shfl_xor_sync(0xffffffff, high, 2));
            #pragma unroll
            for (int n = 0; n < 8; n++) {
                #pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) { s[n][j] = __expf(s[n][j] - high);  total += s[n][j]; }
            }
            const float shrink = __expf(top[half] - high);
            top[half] = high;
            sum[half] = sum[half] * shrink + gpu::warp_sum(total, 4);
            #pragma unroll
            for (int n = 0; n < HS / 8; n++) { o[n][2 * half] *= shrink;  o[n][2 * half + 1] *= shrink; }
        }
        __syncthreads();
        load_rows<HS>(tile, v + s0 * stride, stride, T - s0);
        __syncthreads();
        #pragma unroll
        for (int kt = 0; kt < 4; kt++) {
            gpu::tc_to_a(a, s[2 * kt], s[2 * kt + 1]);
            #pragma unroll
            for (int n = 0; n < HS / 8; n += 2) {
                ldmatrix_x4_trans(r, named + kt * 16 * HS + n * 8);
                mma_m16n8k16(o[n], a, r);
                mma_m16n8k16(o[n + 1], a, r + 2);
            }
        }
    }
    #pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = t0 + warp * 16 + half * 8 + lane / 4;
        if (row >= T) { continue; }
        #pragma unroll
        for (int n = 0; n < HS / 8; n++) {
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                out[(row0 + row) * C + (int64_t)h * HS + n * 8 + 2 * (lane % 4) + j] = lab::from_float<bf16>(o[n][2 * half + j] / sum[half]);
            }
        }
        if (lane % 4 == 0) { lse[((int64_t)b * NH + h) * T + row] = top[half] + logf(sum[half]); }
    }
}
static void forward3(bf16 *out, float *lse, const bf16 *qkv, Shape x) {
    const dim3 grid((unsigned)gpu::ceil_div(x.T, 64), x.NH, x.B);
    const float scale = (float)(1 / sqrt((double)x.HS));
    if (x.HS == 64) { forward3_kernel<64><<<grid, 128>>>(out, lse, qkv, x.T, x.NH, x.KVH, scale); }
    else { forward3_kernel<128><<<grid, 128>>>(out, lse, qkv, x.T, x.NH, x.KVH, scale); }
    LAUNCHED();
}

// ---- validation and timing ----
struct Case {
    Shape x;
    int64_t nq, no, nl;
    std::vector<float> qkv, dout, out, lse, dqkv, D;
    explicit Case(Shape x_) : x(x_), nq((int64_t)x.B * x.T * (x.NH + 2 * x.KVH) * x.HS), no((int64_t)x.B * x.T * x.NH * x.HS), nl((int64_t)x.B * x.NH * x.T),
            qkv(lab::rounded<bf16>(lab::random(nq, 1))), dout(lab::rounded<bf16>(lab::random(no, 2))), out(no), lse(nl), dqkv(nq), D(nl) {
        ::attention_forward(out.data(), lse.data(), qkv.data(), x.B, x.T, x.NH, x.KVH, x.HS);
        ::attention_backward(dqkv.data(), D.data(), dout.data(), qkv.data(), out.data(), lse.data(), x.B, x.T, x.NH, x.KVH, x.HS);
    }
};

// dq, dk or dv of dqkv
static std::vector<float> part_of(Shape x, const std::vector<float> &dqkv, int part) {
    const int first = part == 0 ? 0 : (x.NH + (part - 1) * x.KVH) * x.HS, last = part == 0 ? x.NH * x.HS : first + x.KVH * x.HS;
    std::vector<float> found;
    for (int64_t row = 0; row < (int64_t)x.B * x.T; row++) {
        const float *from = dqkv.data() + row * (x.NH + 2 * x.KVH) * x.HS;
        found.insert(found.end(), from + first, from + last);
    }
    return found;
}

static void forward(int version, bf16 *out, float *lse, const bf16 *qkv, float *square, Shape x, int block) {
    if (version == 1) { forward1(out, lse, qkv, square, x, block); }
    if (version == 2) { gpu::attention_forward_plain(lab::device(), out, lse, qkv, x.B, x.T, x.NH, x.KVH, x.HS); }
    if (version == 3) { forward3(out, lse, qkv, x); }
    if (version == 4) { gpu::attention_forward_tc(out, lse, qkv, x.B, x.T, x.NH, x.KVH, x.HS, 0); }
}
static void backward(int version, bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse, float *square, Shape x, int block) {
    if (version == 1) { backward1(dqkv, dout, qkv, out, lse, square, square + (int64_t)x.B * x.NH * x.T * x.T, x, block); }
    if (version == 2) { gpu::attention_backward_plain(lab::device(), dqkv, D, dout, qkv, out, lse, x.B, x.T, x.NH, x.KVH, x.HS); }
    if (version == 3) { gpu::attention_backward_tc(dqkv, D, dout, qkv, out, lse, x.B, x.T, x.NH, x.KVH, x.HS, 0); }
}

int main() {
    std::vector<Case> cases;
    const int heads[][2] = {{1, 1}, {2, 2}, {4, 2}, {3, 1}}, lengths[] = {1, 16, 37, 64, 65, 130, 200};
    for (int HS : {64, 128}) {
        for (int i = 0; i < 7; i++) {
            const int *h = heads[(i + HS / 64) % 4];
            cases.emplace_back(Shape{1 + i % 2, lengths[i], h[0], h[1], HS});
        }
    }
    for (int pass = 0; pass < 2; pass++) {           // forward, backward
        for (int version = 1; version <= (pass == 0 ? 4 : 3); version++) {
            int done = 0;
            for (const Case &c : cases) {
                for (int block : {64, 128, 256}) {
                    if (version > 1 && block > 64) { continue; } // theirs are fixed
                    lab::Array<bf16> qkv(lab::convert<bf16>(c.qkv)), out(lab::convert<bf16>(c.out)), dout(lab::convert<bf16>(c.dout)), dqkv(c.nq), result(c.no);
                    lab::Array<float> lse(c.lse), D(c.nl), square(2 * c.nl * c.x.T), result_lse(c.nl);
                    char name[200];
                    snprintf(name, sizeof(name), "attention %s version %d, B %d T %d NH %d KVH %d HS %d, block %d", pass ? "backward" : "forward", version,
                             c.x.B, c.x.T, c.x.NH, c.x.KVH, c.x.HS, block);
                    if (pass == 0) {
                        forward(version, result, result_lse, qkv, square, c.x, block);
                        lab::validate(name, result, c.out, 5e-3);
                        lab::validate(name, result_lse, c.lse, 1e-5);
                    } else {
                        backward(version, dqkv, D, dout, qkv, out, lse, square, c.x, block);
                        lab::validate(name, dqkv, c.dqkv, 1e-2);
                        for (int part = 0; part < 3 && c.x.T > 1; part++) {  // at T = 1 dq and dk are 0 but for rounding
                            lab::validate(name, part_of(c.x, lab::floats(dqkv.get()), part), part_of(c.x, c.dqkv, part), 1e-2);
                        }
                    }
                    done++;
                }
            }
            lab::checked(pass ? "attention_backward" : "attention_forward", version, done);
        }
    }
    if (lab::timing()) {
        for (Shape x : {Shape{32, 1024, 12, 12, 64}, Shape{8, 2048, 16, 16, 128}, Shape{2, 8192, 16, 4, 128}}) {
            const int64_t nq = (int64_t)x.B * x.T * (x.NH + 2 * x.KVH) * x.HS, no = (int64_t)x.B * x.T * x.NH * x.HS, nl = (int64_t)x.B * x.NH * x.T;
            const bool small = 2 * nl * x.T * (int64_t)sizeof(float) < (int64_t)16 << 30;
            lab::Array<bf16> qkv(lab::noise<bf16>(nq, 1)), dout(lab::noise<bf16>(no, 2)), out(no), dqkv(nq);
            lab::Array<float> lse(nl), D(nl), square(small ? 2 * nl * x.T : 1);
            const double product = (double)x.B * x.NH * x.T * ((double)x.T + 1) / 2 * x.HS * 2;    // FLOP of one of the products, causal
            printf("B %d T %d NH %d KVH %d HS %d\n", x.B, x.T, x.NH, x.KVH, x.HS);
            for (int version = small ? 1 : 2; version <= 4; version++) {
                lab::time_kernel("attention_forward", version, 2 * product, 2.0 * (double)(nq + no), true, [&] { forward(version, out, lse, qkv, square, x, 256); });
            }
            for (int version = small ? 1 : 2; version <= 3; version++) {
                lab::time_kernel("attention_backward", version, 5 * product, 2.0 * (double)(2 * nq + 2 * no), true,
                                 [&] { backward(version, dqkv, D, dout, qkv, out, lse, square, x, 256); });
            }
        }
    }
    lab::finish();
}
