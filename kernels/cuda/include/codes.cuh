// Keys and values in FP8: E4M3 codes of elements, two of a head in a half word.
//
// A head of D elements is D/2 half words; half word j holds the codes of elements j and j + D/2, a pair
// that turns together. Sign and magnitude of the first are bits 15 and 10..4, of the second 11 and
// 14..12, 3..0: two instructions more than the product make bf16 of it (WeightsFp8 in weights.cuh).
#pragma once
#include "weights.cuh"

// Of two half words, as bf16: the first elements, the second ones.
__device__ __forceinline__ uint32_t first_codes(uint32_t w) { return WeightsFp8::even(w); }
__device__ __forceinline__ uint32_t second_codes(uint32_t w) { return WeightsFp8::odd(w); }

// The nearest E4M3 code, ties to even, 448 from there on and for what is no number: as
// brain/src/quantize/e4m3.rs has it.
__device__ __forceinline__ uint32_t e4m3_code(float x) {
    const float size = fminf(fabsf(x), 448.0f);
    const uint32_t bits = __float_as_uint(size);
    const uint32_t normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
    // Below 2^-6 codes count steps of 2^-9; adding 2^23 rounds to a whole number of them.
    const uint32_t steps = __float_as_uint(size * 512.0f + 8388608.0f) & 0xff;
    return (size < 0.015625f ? steps : normal) | (__float_as_uint(x) >> 24 & 0x80);
}

// The number of a code that is no NaN's.
__device__ __forceinline__ float e4m3_value(uint32_t code) {
    const uint32_t magnitude = code & 0x7f;
    const float normal = __uint_as_float((magnitude + (120 << 3)) << 20);
    return copysignf(magnitude < 8 ? static_cast<float>(magnitude) / 512.0f : normal,
                     __uint_as_float(code << 24));
}

// A half word of two elements, each divided by what it will be multiplied with.
__device__ __forceinline__ uint32_t pack_codes(float first, float second, float scale) {
    const uint32_t a = e4m3_code(first / scale), b = e4m3_code(second / scale);
    return (a & 0x80) << 8 | (a & 0x7f) << 4 | (b & 0x80) << 4 | (b & 0x70) << 8 | (b & 0x0f);
}
