// emu_mma.h: CPU twins of the tensor-core and async-copy instructions that train_gpt2.cu wraps in functions.
// Layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix".
#pragma once

namespace emu {
inline float bf16_half(uint32_t pair, int high) { return __builtin_bit_cast(float, high ? pair & 0xffff0000u : pair << 16); }
inline void need_full_warp(const char *what, unsigned mask) {
    if (mask != 0xffffffffu) { fail("%s needs all 32 lanes, has 0x%08x", what, mask); }
}
struct Lanes { float *d; const uint32_t *a, *b; };
inline void mma_of_warp(void **records, unsigned) {
    float A[16][16], B[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const Lanes &r = *(const Lanes *)records[lane];
        int group = lane >> 2, pair = lane % 4 * 2;
        for (int h = 0; h < 2; h++) { // the two halves of a register: neighbouring columns of A, rows of B
            for (int i = 0; i < 4; i++) { A[group + i % 2 * 8][pair + h + i / 2 * 8] = bf16_half(r.a[i], h); }
            for (int i = 0; i < 2; i++) { B[pair + h + i * 8][group] = bf16_half(r.b[i], h); }
        }
    }
    float C[16][8] = {};
    for (int m = 0; m < 16; m++) {
        for (int k = 0; k < 16; k++) {
            for (int n = 0; n < 8; n++) { C[m][n] += A[m][k] * B[k][n]; }
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        float *d = ((const Lanes *)records[lane])->d;
        for (int i = 0; i < 4; i++) { d[i] += C[(lane >> 2) + i / 2 * 8][lane % 4 * 2 + i % 2]; }
    }
}
struct Rows { uint32_t *r; const void *row; };
template <bool TRANSPOSED> void ldmatrix_of_warp(void **records, unsigned) {
    uint16_t matrix[4][8][8];
    for (int lane = 0; lane < 32; lane++) { // lane 8 i + j has the address of row j of matrix i
        const void *row = ((const Rows *)records[lane])->row;
        if ((uintptr_t)row % 16) { fail("ldmatrix: the row of lane %d isn't aligned to 16 bytes", lane); }
        if (!in_shared(row, 16)) { fail("ldmatrix: the row of lane %d isn't inside the block's shared memory", lane); }
        memcpy(matrix[lane / 8][lane % 8], row, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) {
            int a = lane / 4, b = lane % 4 * 2;
            uint32_t low = TRANSPOSED ? matrix[i][b][a] : matrix[i][a][b], high = TRANSPOSED ? matrix[i][b + 1][a] : matrix[i][a][b + 1];
            ((const Rows *)records[lane])->r[i] = low | high << 16;
        }
    }
}
} // namespace emu

// d (16x8, fp32) += a (16x16, bf16, row-major) b (16x8, bf16, column-major)
inline void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    emu::Lanes mine = {d, a, b};
    emu::meet("mma_m16n8k16", 0xffffffffu, &mine, emu::mma_of_warp);
}
inline void ldmatrix_x4(uint32_t r[4], const void *row) {
    emu::Rows mine = {r, row};
    emu::meet("ldmatrix_x4", 0xffffffffu, &mine, emu::ldmatrix_of_warp<false>);
}
inline void ldmatrix_x4_trans(uint32_t r[4], const void *row) {
    emu::Rows mine = {r, row};
    emu::meet("ldmatrix_x4_trans", 0xffffffffu, &mine, emu::ldmatrix_of_warp<true>);
}

// An async copy happens as late as it may, in the wait for its group; until then its destination holds poison.
// source_bytes < 16: the rest becomes zeros.
inline void cp_async_16(void *to, const void *from, int source_bytes = 16) {
    if ((uintptr_t)to % 16 || (source_bytes > 0 && (uintptr_t)from % 16)) { emu::fail("cp_async_16: an address isn't aligned to 16 bytes"); }
    if (source_bytes < 0 || source_bytes > 16) { emu::fail("cp_async_16: %d source bytes", source_bytes); }
    if (!emu::in_shared(to, 16)) { emu::fail("cp_async_16: the destination isn't inside the block's shared memory"); }
    emu::poison_shared((char *)to, 16);
    emu::self->copies.push_back({to, from, source_bytes, emu::self->groups});
}
inline void cp_async_commit() { emu::self->groups++; }
// waits until at most N groups of this thread are on their way
template <int N> void cp_async_wait() {
    auto &copies = emu::self->copies;
    size_t kept = 0;
    for (emu::Copy &c : copies) {
        if (c.group >= emu::self->groups - N) {
            copies[kept++] = c;
            continue;
        }
        unsigned char bytes[16] = {};
        if (c.bytes) { memcpy(bytes, c.from, (size_t)c.bytes); }
        memcpy(c.to, bytes, 16);
    }
    copies.resize(kept);
}
