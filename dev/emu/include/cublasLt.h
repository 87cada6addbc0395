// cublasLt.h of the emulation: D = alpha op(A) op(B) + beta C in plain loops, fp32 accumulation, with the checks of the
// real library's documentation ("cublasLtMatmul") and a check that every matrix lies inside its allocation.
#pragma once
#include "cuda_bf16.h"

#define EMU_CUBLAS_STATUS(X) \
    X(CUBLAS_STATUS_SUCCESS, 0) X(CUBLAS_STATUS_NOT_INITIALIZED, 1) X(CUBLAS_STATUS_ALLOC_FAILED, 3) X(CUBLAS_STATUS_INVALID_VALUE, 7) \
    X(CUBLAS_STATUS_ARCH_MISMATCH, 8) X(CUBLAS_STATUS_EXECUTION_FAILED, 13) X(CUBLAS_STATUS_INTERNAL_ERROR, 14) X(CUBLAS_STATUS_NOT_SUPPORTED, 15)
enum cublasStatus_t {
#define X(name, number) name = number,
    EMU_CUBLAS_STATUS(X)
#undef X
};
inline const char *cublasGetStatusName(cublasStatus_t status) {
    switch (status) {
#define X(name, number) case name: return #name;
        EMU_CUBLAS_STATUS(X)
#undef X
    }
    return "unknown cuBLAS status";
}
inline const char *cublasGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }
inline const char *cublasLtGetStatusName(cublasStatus_t status) { return cublasGetStatusName(status); }
inline const char *cublasLtGetStatusString(cublasStatus_t status) { return cublasGetStatusName(status); }
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
typedef cudaDataType_t cudaDataType;
enum cublasComputeType_t { CUBLAS_COMPUTE_16F = 64, CUBLAS_COMPUTE_32F = 68, CUBLAS_COMPUTE_32F_PEDANTIC = 69, CUBLAS_COMPUTE_64F = 70,
                           CUBLAS_COMPUTE_32F_FAST_16BF = 75, CUBLAS_COMPUTE_32F_FAST_TF32 = 77 };
enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T, CUBLAS_OP_C };
enum cublasLtOrder_t { CUBLASLT_ORDER_COL, CUBLASLT_ORDER_ROW };
enum cublasLtPointerMode_t { CUBLASLT_POINTER_MODE_HOST, CUBLASLT_POINTER_MODE_DEVICE };
enum cublasLtEpilogue_t { CUBLASLT_EPILOGUE_DEFAULT = 1, CUBLASLT_EPILOGUE_RELU = 2, CUBLASLT_EPILOGUE_BIAS = 4, CUBLASLT_EPILOGUE_GELU = 32 };
enum cublasLtMatmulDescAttributes_t { CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, CUBLASLT_MATMUL_DESC_SCALE_TYPE, CUBLASLT_MATMUL_DESC_POINTER_MODE,
                                      CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB, CUBLASLT_MATMUL_DESC_TRANSC,
                                      CUBLASLT_MATMUL_DESC_FILL_MODE, CUBLASLT_MATMUL_DESC_EPILOGUE };
enum cublasLtMatrixLayoutAttribute_t { CUBLASLT_MATRIX_LAYOUT_TYPE, CUBLASLT_MATRIX_LAYOUT_ORDER, CUBLASLT_MATRIX_LAYOUT_ROWS, CUBLASLT_MATRIX_LAYOUT_COLS,
                                       CUBLASLT_MATRIX_LAYOUT_LD, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET };
enum cublasLtReductionScheme_t { CUBLASLT_REDUCTION_SCHEME_NONE, CUBLASLT_REDUCTION_SCHEME_INPLACE, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE,
                                 CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE = 4, CUBLASLT_REDUCTION_SCHEME_MASK = 7 };
enum cublasLtMatmulPreferenceAttributes_t { CUBLASLT_MATMUL_PREF_SEARCH_MODE, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK = 3,
                                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES = 5, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                                            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES };

struct cublasLtContext { int device; };
struct cublasLtMatmulDescOpaque_t { cublasComputeType_t compute; cudaDataType_t scale; cublasOperation_t a, b; };
struct cublasLtMatrixLayoutOpaque_t { cudaDataType_t type; uint64_t rows, cols; int64_t ld; cublasLtOrder_t order; int32_t batch; int64_t stride; };
struct cublasLtMatmulPreferenceOpaque_t { size_t workspace; uint32_t alignment[4]; };
struct cublasLtMatmulAlgo_t { uint64_t data[8]; }; // data[0..3]: the alignment that it was chosen for, of A, B, C, D
struct cublasLtMatmulHeuristicResult_t { cublasLtMatmulAlgo_t algo; size_t workspaceSize; cublasStatus_t state; float wavesCount; int reserved[4]; };
typedef cublasLtContext *cublasLtHandle_t;
typedef cublasLtMatmulDescOpaque_t *cublasLtMatmulDesc_t;
typedef cublasLtMatrixLayoutOpaque_t *cublasLtMatrixLayout_t;
typedef cublasLtMatmulPreferenceOpaque_t *cublasLtMatmulPreference_t;

namespace emu {
[[gnu::format(printf, 3, 4)]] inline cublasStatus_t refuse_blas(cublasStatus_t status, const char *call, const char *format, ...) {
    va_list args;
    va_start(args, format);
    say_why(call, format, args);
    va_end(args);
    return status;
}
template <typename T> cublasStatus_t set_field(const char *call, T &field, const void *value, size_t bytes) {
    if (!value || bytes != sizeof(T)) { return refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "%zu bytes for an attribute of %zu", bytes, sizeof(T)); }
    memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
inline size_t type_bytes(cudaDataType_t type) { return type == CUDA_R_32F ? 4 : 2; }
}
inline cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { *handle = new cublasLtContext{emu::device}; return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { delete handle; return CUBLAS_STATUS_SUCCESS; }
inline size_t cublasLtGetVersion() { return 130000; }
inline cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale) {
    *desc = new cublasLtMatmulDescOpaque_t{compute, scale, CUBLAS_OP_N, CUBLAS_OP_N};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) { delete desc; return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t which, const void *value, size_t bytes) {
    const char *call = "cublasLtMatmulDescSetAttribute";
    int only = 0; // attributes of which one value is emulated
    cublasStatus_t status;
    switch (which) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return emu::set_field(call, desc->a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return emu::set_field(call, desc->b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        status = emu::set_field(call, only, value, bytes);
        if (status == CUBLAS_STATUS_SUCCESS && only == (which == CUBLASLT_MATMUL_DESC_EPILOGUE ? (int)CUBLASLT_EPILOGUE_DEFAULT : (int)CUBLASLT_POINTER_MODE_HOST)) { return status; }
        [[fallthrough]];
    default: return emu::refuse_blas(CUBLAS_STATUS_NOT_SUPPORTED, call, "attribute %d with value %d isn't emulated", (int)which, only);
    }
}
inline cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType_t type, uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = new cublasLtMatrixLayoutOpaque_t{type, rows, cols, ld, CUBLASLT_ORDER_COL, 1, 0};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { delete layout; return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t which, const void *value, size_t bytes) {
    const char *call = "cublasLtMatrixLayoutSetAttribute";
    switch (which) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE: return emu::set_field(call, layout->type, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ORDER: return emu::set_field(call, layout->order, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS: return emu::set_field(call, layout->rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS: return emu::set_field(call, layout->cols, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD: return emu::set_field(call, layout->ld, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT: return emu::set_field(call, layout->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET: return emu::set_field(call, layout->stride, value, bytes);
    }
    return emu::refuse_blas(CUBLAS_STATUS_NOT_SUPPORTED, call, "attribute %d isn't emulated", (int)which);
}
inline cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) {
    *p = new cublasLtMatmulPreferenceOpaque_t{0, {256, 256, 256, 256}};
    return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { delete p; return CUBLAS_STATUS_SUCCESS; }
inline cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t which, const void *value, size_t bytes) {
    const char *call = "cublasLtMatmulPreferenceSetAttribute";
    uint32_t ignored;
    switch (which) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return emu::set_field(call, p->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_SEARCH_MODE:
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return emu::set_field(call, ignored, value, bytes);
    default: return emu::set_field(call, p->alignment[which - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value, bytes);
    }
}

namespace emu {
typedef const cublasLtMatrixLayoutOpaque_t Layout;
// What doesn't depend on the pointers. Types as in the real table: A and B alike, C and D alike, fp32 or bf16 in,
// fp32 out, or bf16 out of bf16.
inline cublasStatus_t check_matmul(const char *call, const cublasLtMatmulDescOpaque_t *desc, Layout *A, Layout *B, Layout *C, Layout *D) {
    if (!desc || !A || !B || !C || !D) { return refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "a descriptor is null"); }
    bool fp32 = desc->compute == CUBLAS_COMPUTE_32F || desc->compute == CUBLAS_COMPUTE_32F_PEDANTIC || desc->compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    if (!fp32 || desc->scale != CUDA_R_32F) { return refuse_blas(CUBLAS_STATUS_NOT_SUPPORTED, call, "compute type %d, scale type %d", (int)desc->compute, (int)desc->scale); }
    bool inputs = A->type == B->type && (A->type == CUDA_R_32F || A->type == CUDA_R_16BF);
    bool outputs = C->type == D->type && (D->type == CUDA_R_32F || (D->type == CUDA_R_16BF && A->type == CUDA_R_16BF));
    if (!inputs || !outputs) {
        return refuse_blas(CUBLAS_STATUS_NOT_SUPPORTED, call, "types %d, %d, %d, %d of A, B, C, D", (int)A->type, (int)B->type, (int)C->type, (int)D->type);
    }
    uint64_t m = desc->a == CUBLAS_OP_N ? A->rows : A->cols, k = desc->a == CUBLAS_OP_N ? A->cols : A->rows;
    uint64_t kb = desc->b == CUBLAS_OP_N ? B->rows : B->cols, n = desc->b == CUBLAS_OP_N ? B->cols : B->rows;
    if (k != kb || D->rows != m || D->cols != n || C->rows != m || C->cols != n || !m || !n || !k) {
        return refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "op(A) %zux%zu, op(B) %zux%zu, C %zux%zu, D %zux%zu don't fit", (size_t)m, (size_t)k,
                           (size_t)kb, (size_t)n, (size_t)C->rows, (size_t)C->cols, (size_t)D->rows, (size_t)D->cols);
    }
    for (Layout *x : {A, B, C, D}) {
        uint64_t line = x->order == CUBLASLT_ORDER_COL ? x->rows : x->cols;
        if (x->ld < (int64_t)line) { return refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "leading dimension %lld of a %zux%zu matrix", (long long)x->ld, (size_t)x->rows, (size_t)x->cols); }
        if (x->batch < 1 || x->batch != D->batch) { return refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "batch count %d beside %d", x->batch, D->batch); }
    }
    return CUBLAS_STATUS_SUCCESS;
}
inline size_t matrix_bytes(Layout *x) { // from the first to the last element of the last matrix
    uint64_t lines = x->order == CUBLASLT_ORDER_COL ? x->cols : x->rows, line = x->order == CUBLASLT_ORDER_COL ? x->rows : x->cols;
    return ((uint64_t)(x->batch - 1) * x->stride + (lines - 1) * x->ld + line) * type_bytes(x->type);
}
// matrix b of x, transposed or not, to dense column-major floats
inline void read_matrix(std::vector<float> &to, Layout *x, const void *from, int64_t b, bool transpose) {
    int64_t rows = (int64_t)x->rows, cols = (int64_t)x->cols;
    to.resize((size_t)(rows * cols));
    for (int64_t j = 0; j < cols; j++) {
        for (int64_t i = 0; i < rows; i++) {
            int64_t at = b * x->stride + (x->order == CUBLASLT_ORDER_COL ? j * x->ld + i : i * x->ld + j);
            to[(size_t)(transpose ? i * cols + j : j * rows + i)] = x->type == CUDA_R_32F ? ((const float *)from)[at] : (float)((const __nv_bfloat16 *)from)[at];
        }
    }
}
// c (m x n) = a (m x k) b (k x n), column-major: four columns of c at a time, which stay in cache
#ifdef __clang__
inline
#else
__attribute__((optimize("O3"))) inline
#endif
void product(float *c, const float *__restrict__ a, const float *__restrict__ b, int64_t m, int64_t n, int64_t k) {
    memset(c, 0, (size_t)(m * n) * sizeof(float));
    for (int64_t i0 = 0; i0 < m; i0 += 512) {
        int64_t rows = m - i0 < 512 ? m - i0 : 512;
        for (int64_t j = 0; j < n; j += 4) {
            int64_t cols = n - j < 4 ? n - j : 4;
            float *__restrict__ c0 = c + j * m + i0, *__restrict__ c1 = c0 + m, *__restrict__ c2 = c1 + m, *__restrict__ c3 = c2 + m;
            for (int64_t l = 0; l < k; l++) {
                const float *column = a + l * m + i0, *row = b + j * k + l;
                if (cols == 4) {
                    float b0 = row[0], b1 = row[k], b2 = row[2 * k], b3 = row[3 * k];
                    for (int64_t i = 0; i < rows; i++) {
                        float v = column[i];
                        c0[i] += v * b0;
                        c1[i] += v * b1;
                        c2[i] += v * b2;
                        c3[i] += v * b3;
                    }
                } else {
                    for (int64_t q = 0; q < cols; q++) {
                        for (int64_t i = 0; i < rows; i++) { c0[q * m + i] += column[i] * row[q * k]; }
                    }
                }
            }
        }
    }
}
} // namespace emu

inline cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B, cublasLtMatrixLayout_t C,
                                                     cublasLtMatrixLayout_t D, cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t *results, int *found) {
    *found = 0;
    cublasStatus_t status = emu::check_matmul("cublasLtMatmulAlgoGetHeuristic", desc, A, B, C, D);
    if (status != CUBLAS_STATUS_SUCCESS) { return status; }
    if (wanted < 1 || !results || !preference) { return emu::refuse_blas(CUBLAS_STATUS_INVALID_VALUE, "cublasLtMatmulAlgoGetHeuristic", "no place for results"); }
    results[0] = {};
    for (int i = 0; i < 4; i++) { results[0].algo.data[i] = std::min(preference->alignment[i], 16u); }
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

inline cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *a, cublasLtMatrixLayout_t A, const void *b,
                                     cublasLtMatrixLayout_t B, const void *beta, const void *c, cublasLtMatrixLayout_t C, void *d, cublasLtMatrixLayout_t D,
                                     const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes, cudaStream_t stream,
                                     const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    const char *call = "cublasLtMatmul";
    if (!handle) { return emu::refuse_blas(CUBLAS_STATUS_NOT_INITIALIZED, call, "the handle is null"); }
    if (handle->device != emu::device || (emu::stream_device(stream) >= 0 && emu::stream_device(stream) != emu::device)) {
        return emu::refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "handle or stream of another device than %d", emu::device);
    }
    cublasStatus_t status = emu::check_matmul(call, desc, A, B, C, D);
    if (status != CUBLAS_STATUS_SUCCESS) { return status; }
    if (!alpha || !beta || emu::on_device(alpha) || emu::on_device(beta)) { return emu::refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "alpha or beta isn't in host memory"); }
    float scale = *(const float *)alpha, keep = *(const float *)beta;
    const void *pointers[4] = {a, b, c, d};
    emu::Layout *layouts[4] = {A, B, C, D};
    for (int i = 0; i < 4; i++) {
        if (i == 2 && keep == 0) { continue; } // C isn't read
        uintptr_t alignment = algo ? algo->data[i] : emu::type_bytes(layouts[i]->type);
        if ((uintptr_t)pointers[i] % alignment) {
            return emu::refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "%c isn't aligned to %zu bytes, for which the algorithm was chosen", "ABCD"[i], (size_t)alignment);
        }
        emu::Allocation *at = emu::find(pointers[i]);
        const char *wrong = at && at->device != emu::device ? "is memory of another device" : emu::outside(pointers[i], emu::matrix_bytes(layouts[i]));
        if (wrong) { return emu::refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "%c (%zu bytes) %s", "ABCD"[i], emu::matrix_bytes(layouts[i]), wrong); }
    }
    if (workspace_bytes && emu::outside(workspace, workspace_bytes)) { return emu::refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "the workspace %s", emu::outside(workspace, workspace_bytes)); }
    if (keep != 0 && c == d && (C->ld != D->ld || C->order != D->order || C->stride != D->stride)) {
        return emu::refuse_blas(CUBLAS_STATUS_INVALID_VALUE, call, "C and D are one matrix with two layouts");
    }
    emu::operate({call, file, line, false, nullptr, nullptr}, [&] {
        int64_t m = (int64_t)D->rows, n = (int64_t)D->cols, k = (int64_t)(desc->a == CUBLAS_OP_N ? A->cols : A->rows);
        std::vector<float> left, right, result((size_t)(m * n));
        for (int64_t batch = 0; batch < D->batch; batch++) {
            emu::read_matrix(left, A, a, batch, desc->a != CUBLAS_OP_N);
            emu::read_matrix(right, B, b, batch, desc->b != CUBLAS_OP_N);
            emu::product(result.data(), left.data(), right.data(), m, n, k);
            for (int64_t j = 0; j < n; j++) {
                for (int64_t i = 0; i < m; i++) {
                    auto at = [&](emu::Layout *x) { return batch * x->stride + (x->order == CUBLASLT_ORDER_COL ? j * x->ld + i : i * x->ld + j); };
                    float value = scale * result[(size_t)(j * m + i)];
                    if (keep != 0) { value += keep * (C->type == CUDA_R_32F ? ((const float *)c)[at(C)] : (float)((const __nv_bfloat16 *)c)[at(C)]); }
                    if (D->type == CUDA_R_32F) { ((float *)d)[at(D)] = value; } else { ((__nv_bfloat16 *)d)[at(D)] = value; }
                }
            }
        }
    });
    return CUBLAS_STATUS_SUCCESS;
}
