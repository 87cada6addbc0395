// cuda_bf16.h of the emulation: bf16 is the upper half of a float, rounded to nearest even; every NaN becomes 0x7fff,
// as the toolkit's host code does. Arithmetic is done in float and rounded once an operation.
#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16_raw { unsigned short x; };
struct alignas(2) __nv_bfloat16 {
    unsigned short __x;
    __nv_bfloat16() = default;
    constexpr __nv_bfloat16(const __nv_bfloat16_raw &raw) : __x(raw.x) { }
    constexpr __nv_bfloat16(float f) : __x(round(f)) { }
    constexpr __nv_bfloat16(double f) : __x(round((float)f)) { }
    constexpr __nv_bfloat16(int i) : __x(round((float)i)) { }
    constexpr operator float() const { return __builtin_bit_cast(float, (unsigned)__x << 16); }
    operator __nv_bfloat16_raw() const { return {__x}; }
    __nv_bfloat16 &operator=(float f) { __x = round(f); return *this; }
    static constexpr unsigned short round(float f) {
        unsigned bits = __builtin_bit_cast(unsigned, f);
        if ((bits & 0x7fffffff) > 0x7f800000) { return 0x7fff; }
        return (unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    constexpr __nv_bfloat162(const __nv_bfloat16 &a, const __nv_bfloat16 &b) : x(a), y(b) { }
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
inline __nv_bfloat16 __double2bfloat16(double f) { return __nv_bfloat16((float)f); }
inline __nv_bfloat16 __int2bfloat16_rn(int i) { return __nv_bfloat16((float)i); }
inline float __bfloat162float(__nv_bfloat16 b) { return (float)b; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.__x; }
inline short __bfloat16_as_short(__nv_bfloat16 b) { return (short)b.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }
inline __nv_bfloat162 __float2bfloat162_rn(float f) { return {__nv_bfloat16(f), __nv_bfloat16(f)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {__nv_bfloat16(a), __nv_bfloat16(b)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) { return __floats2bfloat162_rn(f.x, f.y); }
inline float2 __bfloat1622float2(__nv_bfloat162 b) { return {(float)b.x, (float)b.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 a) { return {a, a}; }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 b) { return b.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 b) { return b.y; }
inline float __low2float(__nv_bfloat162 b) { return (float)b.x; }
inline float __high2float(__nv_bfloat162 b) { return (float)b.y; }

#define EMU_BF16(op, name) \
    inline __nv_bfloat16 operator op(const __nv_bfloat16 &a, const __nv_bfloat16 &b) { return __nv_bfloat16((float)a op (float)b); } \
    inline __nv_bfloat162 operator op(const __nv_bfloat162 &a, const __nv_bfloat162 &b) { return {a.x op b.x, a.y op b.y}; } \
    inline __nv_bfloat16 &operator op##=(__nv_bfloat16 &a, const __nv_bfloat16 &b) { return a = a op b; } \
    inline __nv_bfloat16 name(__nv_bfloat16 a, __nv_bfloat16 b) { return a op b; } \
    inline __nv_bfloat162 name##2(__nv_bfloat162 a, __nv_bfloat162 b) { return a op b; }
EMU_BF16(+, __hadd)
EMU_BF16(-, __hsub)
EMU_BF16(*, __hmul)
EMU_BF16(/, __hdiv)
#undef EMU_BF16
inline __nv_bfloat16 operator-(const __nv_bfloat16 &a) { return __nv_bfloat16_raw{(unsigned short)(a.__x ^ 0x8000)}; }
#define EMU_BF16(op) inline bool operator op(const __nv_bfloat16 &a, const __nv_bfloat16 &b) { return (float)a op (float)b; }
EMU_BF16(==) EMU_BF16(!=) EMU_BF16(<) EMU_BF16(<=) EMU_BF16(>) EMU_BF16(>=)
#undef EMU_BF16
