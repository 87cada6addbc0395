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

__device__ static inline float tc_exp2(float x) {
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
__device__ static inline int tc_warp() { return __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0); }

// two floats, rounded, in one register; `low` comes first in memory
__device__ static inline uint32_t tc_pack(float low, float high) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, 4);
    return bits;
}

// Address of 16-byte chunk `chunk` of row `row` of a swizzled tile (rows, HS).
template <int HS> __device__ static inline bf16 *tc_at(bf16 *tile, int row, int chunk) {
    return tile + row * HS + ((chunk ^ (row & 7)) << 3);
}

// Starts copying ROWS rows of HS numbers, `stride` apart, into a tile. Rows from `valid` on become zeros.
template <int HS, int ROWS> __device__ static inline void tc_load_tile(bf16 *tile, const bf16 *src, int stride, int valid) {
    constexpr int CHUNKS = HS / 8, PASS = TC_THREADS / CHUNKS;   // a pass of all threads copies PASS rows, a multiple of 8
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    bf16 *dst = tc_at<HS>(tile, row, chunk);
    src += row * stride + chunk * 8;
    #pragma unroll
    for (int r = 0; r < ROWS; r += PASS, src += PASS * stride) { cp_async_16(dst + r * HS, src, row + r < valid ? 16 : 0); }
}

// The row that a lane names to ldmatrix, for the 16 x 16 block of a tile at (row0, column0), both multiples of 16: the four
// 8x8 tiles come in the order upper left, lower left, upper right, lower right.
template <int HS> __device__ static inline bf16 *tc_lane_row(bf16 *tile, int row0, int column0) {
    const int lane = threadIdx.x % 32;
    return tile + (row0 + lane % 16) * HS + (((lane / 16 ^ (lane & 7)) << 3) ^ column0);
}

// A operand: m are the rows, k the columns of the block
template <int HS> __device__ static inline void tc_load_a(uint32_t a[4], bf16 *tile, int row0, int column0) {
    ldmatrix_x4(a, tc_lane_row<HS>(tile, row0, column0));
}

// Two B operands, b[0] and b[1]: n are the rows of the block, 8 each, k the columns
template <int HS> __device__ static inline void tc_load_b(uint32_t b[2][2], bf16 *tile, int row0, int column0) {
    uint32_t r[4];
    ldmatrix_x4(r, tc_lane_row<HS>(tile, row0, column0));
    b[0][0] = r[0];  b[1][0] = r[1];  b[0][1] = r[2];  b[1][1] = r[3];
}

// The same from the transpose: n are the columns of the block, 8 each, k the rows
template <int HS> __device__ static inline void tc_load_b_trans(uint32_t b[2][2], bf16 *tile, int row0, int column0) {
    uint32_t r[4];
    ldmatrix_x4_trans(r, tc_lane_row<HS>(tile, row0, column0));
    b[0][0] = r[0];  b[0][1] = r[1];  b[1][0] = r[2];  b[1][1] = r[3];
}

// Two D tiles side by side, rounded: an A operand (idea 1).
__device__ static inline void tc_to_a(uint32_t a[4], const float left[4], const float right[4]) {
    a[0] = tc_pack(left[0], left[1]);    a[1] = tc_pack(left[2], left[3]);
    a[2] = tc_pack(right[0], right[1]);  a[3] = tc_pack(right[2], right[3]);
}

// Writes a warp's sums (MT*16, HS), rounded, to rows of global memory, by way of shared memory that only this warp uses:
// a row leaves as whole 16-byte chunks. Rows from `valid` on aren't written.
template <int HS, int MT> __device__ static inline void tc_store_rows(bf16 *dst, int64_t stride, int valid, bf16 *tile,
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
    const int end = min(T, t0 + ROWS);                                                       // keys before this one

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
template <int HS> __device__ static inline void tc_load_fixed(uint32_t fa[TcBackward<HS>::MT][HS / 16][4],
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
template <int HS> __device__ static inline void tc_product(float x[TcBackward<HS>::MT][2][4],
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
template <int HS> __device__ static inline void tc_add_product(float sum[TcBackward<HS>::MT][HS / 8][4],
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
    const int w0 = t0 + warp * 16 * MT, end = min(T, t0 + ROWS);
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
    const dim3 grid((T + F::ROWS - 1) / F::ROWS, NH, B);
    attention_forward_tc_kernel<HS><<<grid, TC_THREADS, F::SHARED, stream>>>(out, lse, qkv, T, NH, KVH, c);
    CUDA_CHECK(cudaGetLastError());
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
    const unsigned dot_blocks = (unsigned)((rows * (HS / 8) + 255) / 256), tiles = (T + K::ROWS - 1) / K::ROWS;
    const dim3 kv_grid(tiles, KVH, B), q_grid(tiles, NH, B);
    attention_backward_dot_tc_kernel<HS><<<dot_blocks, 256, 0, stream>>>(D, dout, out, rows, T, NH);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_kv_tc_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED));
    attention_backward_kv_tc_kernel<HS><<<kv_grid, TC_THREADS, K::SHARED, stream>>>(dqkv, dout, qkv, lse, D, T, NH, KVH, scale);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(cudaFuncSetAttribute(attention_backward_q_tc_kernel<HS>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::SHARED));
    attention_backward_q_tc_kernel<HS><<<q_grid, TC_THREADS, K::SHARED, stream>>>(dqkv, dout, qkv, lse, D, T, NH, KVH, scale);
    CUDA_CHECK(cudaGetLastError());
}

// dqkv, all of it, from dout (B*T, NH*HS); D (B,NH,T) is work space
static void attention_backward_tc(bf16 *dqkv, float *D, const bf16 *dout, const bf16 *qkv, const bf16 *out, const float *lse,
        int B, int T, int NH, int KVH, int HS, cudaStream_t stream) {
    if (HS == 64) { attention_backward_tc_launch<64>(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, stream); }
    else { attention_backward_tc_launch<128>(dqkv, D, dout, qkv, out, lse, B, T, NH, KVH, stream); }
}
