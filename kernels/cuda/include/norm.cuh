// Rows that a block holds eight elements a thread, and their norms (norm.cu, expert_norms.cu).
#pragma once
#include "abi.cuh"
#include "math.cuh"
#include "ptx.cuh"

struct Eight {
    float v[8];
};

__device__ __forceinline__ Eight unpack(uint4 w) {
    return {low_bf16(w.x), high_bf16(w.x), low_bf16(w.y), high_bf16(w.y),
            low_bf16(w.z), high_bf16(w.z), low_bf16(w.w), high_bf16(w.w)};
}

// Of the block's own row, or of another one.
__device__ __forceinline__ Eight read_row(dptr base, uint32_t pitch, uint32_t at,
                                          uint32_t row = blockIdx.x) {
    const uint16_t* p =
        reinterpret_cast<const uint16_t*>(base) + static_cast<uint64_t>(row) * pitch + at;
    return unpack(*reinterpret_cast<const uint4*>(p));
}

__device__ __forceinline__ void write_row(dptr base, uint32_t pitch, uint32_t at, const Eight& e) {
    uint16_t* p =
        reinterpret_cast<uint16_t*>(base) + static_cast<uint64_t>(blockIdx.x) * pitch + at;
    *reinterpret_cast<uint4*>(p) = make_uint4(pack_bf16(e.v[0], e.v[1]), pack_bf16(e.v[2], e.v[3]),
                                              pack_bf16(e.v[4], e.v[5]), pack_bf16(e.v[6], e.v[7]));
}

__device__ __forceinline__ Eight read_weights(dptr base, uint32_t at) {
    const float4* p = reinterpret_cast<const float4*>(reinterpret_cast<const float*>(base) + at);
    float4 low = p[0], high = p[1];
    return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}

// 1 / sqrt(mean square + eps) of the row whose elements the block's threads hold.
__device__ __forceinline__ float inverse_rms(const Eight& e, uint32_t width, float eps,
                                             float (&warp_sums)[32]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += e.v[i] * e.v[i];
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // the array may still be read from a sum before
    if (lane == 0) warp_sums[warp] = sum;
    __syncthreads();
    sum = lane < blockDim.x / 32 ? warp_sums[lane] : 0.0f;
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
}

__device__ __forceinline__ Eight normed(const Eight& e, float inverse, const Eight& weight) {
    Eight r;
#pragma unroll
    for (int i = 0; i < 8; i++) r.v[i] = round_bf16(e.v[i] * inverse * weight.v[i]);
    return r;
}

// The stream after a branch was added: each of the three is rounded.
__device__ __forceinline__ Eight added(const Eight& x, const Eight& branch, float scale) {
    Eight r;
#pragma unroll
    for (int i = 0; i < 8; i++) r.v[i] = round_bf16(round_bf16(x.v[i] + branch.v[i]) * scale);
    return r;
}
