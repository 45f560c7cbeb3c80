// Functions whose bits are ours: no library exp, log, tanh. Units compile with -fmad=false, so a
// fused multiply-add happens exactly where fmaf stands.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

__device__ __forceinline__ float from_bf16(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ uint16_t to_bf16(float v) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

__device__ __forceinline__ float round_bf16(float v) { return from_bf16(to_bf16(v)); }

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    return static_cast<uint32_t>(to_bf16(low)) | static_cast<uint32_t>(to_bf16(high)) << 16;
}

// 2^x within 1.5e-7 relative; exactly 1 at 0, exactly 0 below -126 (so at minus infinity too),
// infinity from 128 on.
__device__ __forceinline__ float exp2_ours(float x) {
    if (x < -126.0f) return 0.0f;
    if (x >= 128.0f) return __uint_as_float(0x7f800000u);
    float whole = rintf(x);
    float f = x - whole;
    float p = 1.5353362e-4f;
    p = fmaf(p, f, 1.3398874e-3f);
    p = fmaf(p, f, 9.6184373e-3f);
    p = fmaf(p, f, 5.5503324e-2f);
    p = fmaf(p, f, 2.4022648e-1f);
    p = fmaf(p, f, 6.9314718e-1f);
    p = fmaf(p, f, 1.0f);
    // Two steps, because 2^128 is no float.
    int n = static_cast<int>(whole);
    int half = n >> 1;
    float a = __uint_as_float(static_cast<uint32_t>(half + 127) << 23);
    float b = __uint_as_float(static_cast<uint32_t>(n - half + 127) << 23);
    return p * a * b;
}

__device__ __forceinline__ float exp_ours(float x) { return exp2_ours(x * 1.44269504f); }

// ln x for normal x > 0, within 1e-7 absolute or 2 ulp.
__device__ __forceinline__ float ln_ours(float x) {
    uint32_t bits = __float_as_uint(x);
    // Mantissa into [sqrt(1/2), sqrt 2).
    int e = static_cast<int>(bits - 0x3f3504f3u) >> 23;
    float mantissa = __uint_as_float(bits - (static_cast<uint32_t>(e) << 23));
    // ln m = 2 atanh s, s = (m - 1) / (m + 1), |s| <= 0.1716.
    float s = (mantissa - 1.0f) / (mantissa + 1.0f);
    float q = s * s;
    float p = 0.11628458f;
    p = fmaf(p, q, 0.14276809f);
    p = fmaf(p, q, 0.20000048f);
    p = fmaf(p, q, 0.33333334f);
    float two_s = s + s;
    float tail = two_s * q * p;
    float n = static_cast<float>(e);
    // ln 2 in two parts: the first times any exponent is exact.
    return fmaf(n, 0.693145752f, two_s + fmaf(n, 1.42860677e-6f, tail));
}

__device__ __forceinline__ float tanh_ours(float x) {
    // tanh x = 1 - 2 / (e^2x + 1); near 0 the odd series, where that difference would cancel.
    float a = fabsf(x);
    float r;
    if (a < 0.125f) {
        float q = a * a;
        float p = fmaf(q, -0.053968254f, 0.13333334f);
        p = fmaf(p, q, -0.33333334f);
        r = fmaf(a * q, p, a);
    } else {
        r = 1.0f - 2.0f / (exp_ours(a + a) + 1.0f);
    }
    return copysignf(r, x);
}

// 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))).
__device__ __forceinline__ float gelu_tanh(float z) {
    float u = 0.7978845608f * fmaf(0.044715f * z * z, z, z);
    return 0.5f * z * (1.0f + tanh_ours(u));
}
