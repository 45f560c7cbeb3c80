// What the attention kernels share of the softmax. Part of the numeric definition: every kernel that
// computes a row takes these steps, so its bits do not depend on which one it was.
//
// A split keeps the largest score so far, the sum of weights and the weighted values, all relative to
// that score. Splits are joined in order, both sides relative to the larger of their maxima.
#pragma once
#include "abi.cuh"
#include "math.cuh"

// e^x for x <= 0 within 3e-7: exactly 1 at 0, exactly 0 from -88.03 down and for what is no number.
// 2^t of a whole number and a rest in [-1/2, 1/2], the rest by a polynomial that is exact at 0.
__device__ __forceinline__ float weight_of(float x) {
    constexpr float ROUND = 12582912.0f;  // adding it rounds a small number to a whole one
    const float t = fmaxf(x * 1.44269504f, -127.0f);
    const float shifted = t + ROUND;
    const float rest = t - (shifted - ROUND);
    float p = 0.0013381302f;
    p = fmaf(p, rest, 0.0096663684f);
    p = fmaf(p, rest, 0.055503812f);
    p = fmaf(p, rest, 0.24022350f);
    p = fmaf(p, rest, 0.69314718f);
    p = fmaf(p, rest, 1.0f);
    return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
}

// What weights are relative to. No key seen yet: any finite number will do.
__device__ __forceinline__ float reference_of(float most) {
    return most == MINUS_INFINITY ? 0.0f : most;
}

// Of two maxima, what sums so far and the next split's sums are multiplied with.
struct Join {
    float most, keep, take;
    __device__ __forceinline__ Join(float before, float next) {
        most = fmaxf(before, next);
        keep = weight_of(before - reference_of(most));
        take = weight_of(next - reference_of(most));
    }
};

__device__ __forceinline__ float joined(float before, float keep, float next, float take) {
    return fmaf(next, take, before * keep);
}

// The first key that a row sees, of those before `end`.
__device__ __forceinline__ uint32_t first_key(const AttentionArgs& a, uint32_t end) {
    return a.window && end > a.window ? end - a.window : 0;
}
