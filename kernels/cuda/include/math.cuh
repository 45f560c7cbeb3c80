// Functions whose bits are ours: no library exp, log, tanh. The formulas are those of
// brain/src/sched/math.rs, plain multiplications and additions in the same order, and units compile
// with -fmad=false: the same input gives the same bits on the processor and on every card.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>

constexpr float MINUS_INFINITY = -__builtin_huge_valf();

__device__ __forceinline__ float from_bf16(uint16_t bits) {
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

__device__ __forceinline__ uint16_t to_bf16(float v) {
    return __bfloat16_as_ushort(__float2bfloat16_rn(v));
}

__device__ __forceinline__ float round_bf16(float v) { return from_bf16(to_bf16(v)); }

__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }

__device__ __forceinline__ float high_bf16(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    return static_cast<uint32_t>(to_bf16(low)) | static_cast<uint32_t>(to_bf16(high)) << 16;
}

// ln 2, cut after 9 bits so that a product with a small whole number is exact, and the rest.
constexpr float LN2_HIGH = 355.0f / 512.0f;
constexpr float LN2_LOW = static_cast<float>(0.6931471805599453094 - 355.0 / 512.0);

// e^x within 2 ulp; 0 below -87.33, infinite above 88.72, exactly 1 at 0.
__device__ __forceinline__ float exp_ours(float x) {
    constexpr float ROUND = 12582912.0f;  // adding it rounds a small number to a whole one
    float clamped = fminf(fmaxf(x, -87.33654f), 88.722839f);
    float shifted = clamped * 1.44269504f + ROUND;
    float n = shifted - ROUND;
    int whole = static_cast<int>(__float_as_uint(shifted) - __float_as_uint(ROUND));
    float r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    float p = 1.0f / 5040.0f;
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    float small = (p * r) * r + r;
    // Two factors, because neither 2^128 nor 2^-127 is a normal float.
    int first = whole >> 1;
    float a = __uint_as_float(static_cast<uint32_t>(first + 127) << 23);
    float b = __uint_as_float(static_cast<uint32_t>(whole - first + 127) << 23);
    float y = ((small + 1.0f) * a) * b;
    y = x < -87.33654f ? 0.0f : y;
    y = x > 88.722839f ? __builtin_huge_valf() : y;
    return x != x ? x : y;
}

// ln(1 + f) for 1 + f in [0.7, 1.42]: 2 atanh(f / (2 + f)).
__device__ __forceinline__ float ln_near_one(float f) {
    float s = f / (2.0f + f);
    float z = s * s;
    float p = 2.0f / 11.0f;
    p = p * z + 2.0f / 9.0f;
    p = p * z + 2.0f / 7.0f;
    p = p * z + 2.0f / 5.0f;
    p = p * z + 2.0f / 3.0f;
    return (p * z) * s + 2.0f * s;
}

// ln x of a normal positive number, within 2 ulp.
__device__ __forceinline__ float ln_ours(float x) {
    // Mantissa in [sqrt(1/2), sqrt 2), so that the result near 1 does not cancel.
    uint32_t bits = __float_as_uint(x) - 0x3f3504f3u;
    float e = static_cast<float>(static_cast<int>(bits) >> 23);
    float m = __uint_as_float((bits & 0x007fffffu) + 0x3f3504f3u);
    return e * LN2_HIGH + (e * LN2_LOW + ln_near_one(m - 1.0f));
}

// tanh x within 1.2e-7.
__device__ __forceinline__ float tanh_ours(float x) {
    float t = exp_ours(-2.0f * fabsf(x));
    return copysignf((1.0f - t) / (1.0f + t), x);
}

// 0.5 z (1 + tanh(sqrt(2/pi) (z + 0.044715 z^3))).
__device__ __forceinline__ float gelu_tanh(float z) {
    float inner = 0.79788456f * (z + 0.044715f * ((z * z) * z));
    return (0.5f * z) * (1.0f + tanh_ours(inner));
}

// -ln(-ln(1 - u)), u = (x + 1/2) / 2^32: finite for every x.
__device__ __forceinline__ float gumbel(uint32_t x) {
    constexpr float SCALE = 1.0f / 4294967296.0f;
    float u = (static_cast<float>(x) + 0.5f) * SCALE;
    float rest = (static_cast<float>(~x) + 0.5f) * SCALE;
    float e = u < 0.28f ? -ln_near_one(-u) : -ln_ours(rest);
    return -ln_ours(e);
}
