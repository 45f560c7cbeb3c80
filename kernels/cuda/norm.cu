// Norms over whole rows, alone and with the residual sums around them.
//
// Floor: the rows' bytes are nothing (5376 x 2 bytes); a launch is 0.57 us in a graph with dependent
// launch, and two reductions in a block about a microsecond. So everything between two products is
// one kernel. A block has a row, a thread eight elements: the tree of the sum of squares
// depends on the width alone.
//
// Compiled for all targets; run on Hopper.
#include "abi.cuh"
#include "math.cuh"
#include "ptx.cuh"

namespace {

struct Eight {
    float v[8];
};

__device__ __forceinline__ Eight unpack(uint4 w) {
    return {low_bf16(w.x), high_bf16(w.x), low_bf16(w.y), high_bf16(w.y),
            low_bf16(w.z), high_bf16(w.z), low_bf16(w.w), high_bf16(w.w)};
}

__device__ __forceinline__ Eight read_row(dptr base, uint32_t pitch, uint32_t at) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(base) +
                        static_cast<uint64_t>(blockIdx.x) * pitch + at;
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

}  // namespace

// out = norm(x)
extern "C" __global__ void __launch_bounds__(1024) norm_rows(const __grid_constant__ NormArgs a) {
    __shared__ float warp_sums[32];
    let_dependents_start();
    const uint32_t at = threadIdx.x * 8;
    const bool mine = at < a.width;
    Eight weight = {};
    if (mine) weight = read_weights(a.weight, at);
    wait_for_inputs();
    Eight x = {};
    if (mine) x = read_row(a.x, a.ldx, at);
    const float inverse = inverse_rms(x, a.width, a.eps, warp_sums);
    if (mine) write_row(a.out, a.ldo, at, normed(x, inverse, weight));
}

// x = (x + norm(branch)) * scale, each of the three rounded; out = norm(x) by the next norm
extern "C" __global__ void __launch_bounds__(1024) add_norm(const __grid_constant__ NormArgs a) {
    __shared__ float warp_sums[32];
    let_dependents_start();
    const uint32_t at = threadIdx.x * 8;
    const bool mine = at < a.width;
    Eight weight = {}, next = {};
    if (mine) {
        weight = read_weights(a.weight, at);
        if (a.other) next = read_weights(a.other, at);
    }
    wait_for_inputs();
    Eight branch = {}, x = {};
    if (mine) {
        branch = read_row(a.branch, a.ldb, at);
        x = read_row(a.x, a.ldx, at);
    }
    const Eight added = normed(branch, inverse_rms(branch, a.width, a.eps, warp_sums), weight);
#pragma unroll
    for (int i = 0; i < 8; i++) x.v[i] = round_bf16(round_bf16(x.v[i] + added.v[i]) * a.scale);
    if (mine) write_row(a.x, a.ldx, at, x);
    if (!a.other) return;
    const float inverse = inverse_rms(x, a.width, a.other_eps, warp_sums);
    if (mine) write_row(a.out, a.ldo, at, normed(x, inverse, next));
}

// x = other_norm(x) + norm(branch), each rounded before the sum
extern "C" __global__ void __launch_bounds__(1024) sum_norms(const __grid_constant__ NormArgs a) {
    __shared__ float warp_sums[32];
    let_dependents_start();
    const uint32_t at = threadIdx.x * 8;
    const bool mine = at < a.width;
    Eight weight = {}, other = {};
    if (mine) {
        weight = read_weights(a.weight, at);
        other = read_weights(a.other, at);
    }
    wait_for_inputs();
    Eight branch = {}, x = {};
    if (mine) {
        branch = read_row(a.branch, a.ldb, at);
        x = read_row(a.x, a.ldx, at);
    }
    const float of_x = inverse_rms(x, a.width, a.other_eps, warp_sums);
    const float of_branch = inverse_rms(branch, a.width, a.eps, warp_sums);
    Eight sum = normed(x, of_x, other);
    const Eight added = normed(branch, of_branch, weight);
#pragma unroll
    for (int i = 0; i < 8; i++) sum.v[i] = sum.v[i] + added.v[i];
    if (mine) write_row(a.x, a.ldx, at, sum);
}
