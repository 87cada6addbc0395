// Matrix products; see lab.h for how to compile. out (N,OC) = inp (N,C) W^T with W (OC,C), bf16 with fp32 sums: both operands
// have the common dimension C along their rows.
//
// forward 1   a thread an output, both rows read from memory: each number is read OC or N times
// forward 2   blocks of 32 x 32 outputs, tiles in shared memory: each number is read 32 times less
// forward 3   tensor cores (mma.sync): blocks of 128 x 128, 64 x 64 a warp, tiles swizzled and copied while the last ones are in
//             use; the ideas and the layout of fragments are drawn in train_gpt2.cu, at attention on tensor cores
// forward 4   train_gpt2.cu's: cuBLASLt
// backward 1  dinp = dout W and dw += dout^T inp, a thread an output
// backward 2  train_gpt2.cu's: cuBLASLt; dw is added up in fp32
#define TESTING
#include "../../train_gpt2.cu"
#include "lab.h"
using lab::bf16;
using lab::to_float;
using lab::from_float;

__global__ void forward1_kernel(bf16 *out, const bf16 *inp, const bf16 *w, int64_t N, int64_t C, int64_t OC) {
    const int64_t oc = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)blockIdx.y * blockDim.y + threadIdx.y;
    if (n >= N || oc >= OC) { return; }
    float sum = 0;
    for (int64_t c = 0; c < C; c++) { sum += to_float(inp[n * C + c]) * to_float(w[oc * C + c]); }
    out[n * OC + oc] = from_float<bf16>(sum);
}

__global__ void __launch_bounds__(1024) forward2_kernel(bf16 *out, const bf16 *inp, const bf16 *w, int64_t N, int64_t C, int64_t OC) {
    __shared__ float a[32][33], b[32][33];           // 33: a column touches 32 banks
    const int x = threadIdx.x, y = threadIdx.y;
    const int64_t n0 = (int64_t)blockIdx.y * 32, oc0 = (int64_t)blockIdx.x * 32;
    float sum = 0;
    for (int64_t c0 = 0; c0 < C; c0 += 32) {
        a[y][x] = n0 + y < N && c0 + x < C ? to_float(inp[(n0 + y) * C + c0 + x]) : 0;
        b[y][x] = oc0 + y < OC && c0 + x < C ? to_float(w[(oc0 + y) * C + c0 + x]) : 0;
        __syncthreads();
        for (int k = 0; k < 32; k++) { sum += a[y][k] * b[x][k]; }
        __syncthreads();
    }
    if (n0 + y < N && oc0 + x < OC) { out[(n0 + y) * OC + oc0 + x] = from_float<bf16>(sum); }
}

// 128 rows of 64 columns into a swizzled tile; C is a multiple of 8
__device__ inline void load_tile(bf16 *tile, const bf16 *from, int64_t rows, int64_t C, int64_t row0, int64_t c0) {
    using namespace gpu;
    for (int i = threadIdx.x; i < 128 * 8; i += 128) {
        const int row = i / 8, chunk = i % 8;
        const bool inside = row0 + row < rows && c0 + chunk * 8 < C;
        cp_async_16(tc_at<64>(tile, row, chunk), inside ? from + (row0 + row) * C + c0 + chunk * 8 : from, inside ? 16 : 0);
    }
}
__global__ void __launch_bounds__(128) forward3_kernel(bf16 *out, const bf16 *inp, const bf16 *w, int64_t N, int64_t C, int64_t OC) {
    using namespace gpu;
    extern __shared__ __align__(16) unsigned char shared_memory[];
    bf16 *tiles = (bf16 *)shared_memory;             // stage 0: inp, w; stage 1: inp, w; (128,64) each
    constexpr int TILE = 128 * 64;
    const int lane = threadIdx.x % 32, warp = tc_warp(), row0 = warp / 2 * 64, column0 = warp % 2 * 64;
    const int64_t n0 = (int64_t)blockIdx.y * 128, oc0 = (int64_t)blockIdx.x * 128;
    float sum[4][8][4] = {};
    load_tile(tiles, inp, N, C, n0, 0);
    load_tile(tiles + TILE, w, OC, C, oc0, 0);
    cp_async_commit();
    for (int64_t c0 = 0, stage = 0; c0 < C; c0 += 64, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();                             // these tiles are here, and all warps are done with the others
        if (c0 + 64 < C) {
            load_tile(tiles + 2 * (stage ^ 1) * TILE, inp, N, C, n0, c0 + 64);
            load_tile(tiles + (2 * (stage ^ 1) + 1) * TILE, w, OC, C, oc0, c0 + 64);
        }
        cp_async_commit();
        bf16 *ta = tiles + 2 * stage * TILE, *tb = ta + TILE;
        #pragma unroll
        for (int k = 0; k < 64; k += 16) {
            uint32_t a[4][4];
            #pragma unroll
            for (int m = 0; m < 4; m++) { tc_load_a<64>(a[m], ta, row0 + 16 * m, k); }
            #pragma unroll
            for (int n = 0; n < 8; n += 2) {
                uint32_t b[2][2];
                tc_load_b<64>(b, tb, column0 + 8 * n, k);
                #pragma unroll
                for (int m = 0; m < 4; m++) {
                    mma_m16n8k16(sum[m][n], a[m], b[0]);
                    mma_m16n8k16(sum[m][n + 1], a[m], b[1]);
                }
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < 4 * 8 * 4; i++) {
        const int m = i / 32, n = i / 4 % 8, j = i % 4;
        const int64_t row = n0 + row0 + 16 * m + lane / 4 + j / 2 * 8, column = oc0 + column0 + 8 * n + 2 * (lane % 4) + j % 2;
        if (row < N && column < OC) { out[row * OC + column] = from_float<bf16>(sum[m][n][j]); }
    }
}
static void forward(int version, bf16 *out, const bf16 *inp, const bf16 *w, int64_t N, int64_t C, int64_t OC, int block) {
    if (version == 1) { forward1_kernel<<<dim3((unsigned)gpu::ceil_div(OC, block), (unsigned)gpu::ceil_div(N, block)), dim3(block, block)>>>(out, inp, w, N, C, OC); }
    if (version == 2) { forward2_kernel<<<dim3((unsigned)gpu::ceil_div(OC, 32), (unsigned)gpu::ceil_div(N, 32)), dim3(32, 32)>>>(out, inp, w, N, C, OC); }
    if (version == 3) {
        const int bytes = 4 * 128 * 64 * (int)sizeof(bf16);
        CUDA_CHECK(cudaFuncSetAttribute(forward3_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        forward3_kernel<<<dim3((unsigned)gpu::ceil_div(OC, 128), (unsigned)gpu::ceil_div(N, 128)), 128, bytes>>>(out, inp, w, N, C, OC);
    }
    LAUNCHED();
    if (version == 4) { gpu::matmul_forward<bf16, bf16>(lab::device(), out, OC, inp, C, w, C, N, C, OC); }
}

__global__ void input_gradient_kernel(bf16 *dinp, const bf16 *dout, const bf16 *w, int64_t N, int64_t C, int64_t OC) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)blockIdx.y * blockDim.y + threadIdx.y;
    if (n >= N || c >= C) { return; }
    float sum = 0;
    for (int64_t oc = 0; oc < OC; oc++) { sum += to_float(dout[n * OC + oc]) * to_float(w[oc * C + c]); }
    dinp[n * C + c] = from_float<bf16>(sum);
}
__global__ void weight_gradient_kernel(float *dw, const bf16 *dout, const bf16 *inp, int64_t N, int64_t C, int64_t OC) {
    const int64_t c = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, oc = (int64_t)blockIdx.y * blockDim.y + threadIdx.y;
    if (oc >= OC || c >= C) { return; }
    float sum = 0;
    for (int64_t n = 0; n < N; n++) { sum += to_float(dout[n * OC + oc]) * to_float(inp[n * C + c]); }
    dw[oc * C + c] += sum;
}
static void backward(int version, bf16 *dinp, float *dw, const bf16 *dout, const bf16 *inp, const bf16 *w, int64_t N, int64_t C, int64_t OC, int block) {
    if (version == 1) {
        input_gradient_kernel<<<dim3((unsigned)gpu::ceil_div(C, block), (unsigned)gpu::ceil_div(N, block)), dim3(block, block)>>>(dinp, dout, w, N, C, OC);
        LAUNCHED();
        weight_gradient_kernel<<<dim3((unsigned)gpu::ceil_div(C, block), (unsigned)gpu::ceil_div(OC, block)), dim3(block, block)>>>(dw, dout, inp, N, C, OC);
        LAUNCHED();
        return;
    }
    gpu::matmul_backward_input<bf16>(lab::device(), dinp, C, dout, OC, w, C, N, C, OC);
    gpu::matmul_backward_weight<bf16>(lab::device(), dw, C, dout, OC, inp, C, N, C, OC, 1);
}

int main() {
    const int64_t shapes[][3] = {{1, 8, 8}, {37, 72, 104}, {130, 200, 264}, {256, 64, 128}}; // rows begin at multiples of 16 bytes, as train_gpt2.cu pads them
    for (int pass = 0; pass < 2; pass++) {
        for (int version = 1; version <= (pass == 0 ? 4 : 2); version++) {
            int done = 0;
            for (const int64_t *s : shapes) {
                const int64_t N = s[0], C = s[1], OC = s[2];
                std::vector<float> inp = lab::rounded<bf16>(lab::random(N * C, 1)), w = lab::rounded<bf16>(lab::random(OC * C, 2)), dout = lab::rounded<bf16>(lab::random(N * OC, 3));
                std::vector<float> out(N * OC), dinp(N * C), before = lab::random(OC * C, 4), dw = before;
                ::matmul_forward(out.data(), inp.data(), w.data(), N, C, OC);
                ::matmul_backward(dinp.data(), dw.data(), dout.data(), inp.data(), w.data(), N, C, OC, 1);
                for (int block : {8, 16, 32}) {
                    if (version > 1 && block > 8) { continue; }
                    lab::Array<bf16> d_inp(lab::convert<bf16>(inp)), d_w(lab::convert<bf16>(w)), d_dout(lab::convert<bf16>(dout)), result(pass == 0 ? N * OC : N * C);
                    lab::Array<float> d_dw(before);
                    char name[100];
                    snprintf(name, sizeof(name), "matmul pass %d version %d, N %d C %d OC %d, block %d", pass, version, (int)N, (int)C, (int)OC, block);
                    if (pass == 0) { forward(version, result, d_inp, d_w, N, C, OC, block); }
                    else { backward(version, result, d_dw, d_dout, d_inp, d_w, N, C, OC, block); }
                    lab::validate(name, result, pass == 0 ? out : dinp, 3e-3);
                    if (pass == 1) { lab::validate(name, d_dw, dw, 1e-5); }
                    done++;
                }
            }
            lab::checked(pass ? "matmul_backward" : "matmul_forward", version, done);
        }
    }
    if (lab::timing()) {
        const int64_t big[][3] = {{32768, 768, 2304}, {32768, 768, 8192}, {8192, 768, 50304}, {16384, 2048, 16384}};
        for (const int64_t *s : big) {
            const int64_t N = s[0], C = s[1], OC = s[2];
            lab::Array<bf16> inp(lab::noise<bf16>(N * C, 1)), w(lab::noise<bf16>(OC * C, 2)), out(lab::noise<bf16>(N * OC, 3)), dinp(N * C);
            lab::Array<float> dw(std::vector<float>((size_t)(OC * C), 0));
            printf("N %lld C %lld OC %lld\n", (long long)N, (long long)C, (long long)OC);
            const double flops = 2.0 * (double)N * (double)C * (double)OC, bytes = 2.0 * (double)(N * C + OC * C + N * OC);
            for (int version = N * C * OC > (int64_t)100e9 ? 2 : 1; version <= 4; version++) {
                lab::time_kernel("matmul_forward", version, flops, bytes, true, [&] { forward(version, out, inp, w, N, C, OC, 16); });
            }
            lab::time_kernel("matmul_backward", 2, 2 * flops, 2 * bytes, true, [&] { backward(2, dinp, dw, out, inp, w, N, C, OC, 16); });
        }
    }
    lab::finish();
}
