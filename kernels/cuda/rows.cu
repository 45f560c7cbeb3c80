// Element by element, and reads by token. Floor: a launch each; the bytes are small.
//
// Compiled for all targets; run on Hopper.
#include "abi.cuh"
#include "math.cuh"
#include "ptx.cuh"
#include "weights.cuh"

namespace {

// The pair of columns this thread has: a row is blockIdx.y, widths are even.
__device__ __forceinline__ uint32_t column() { return (blockIdx.x * blockDim.x + threadIdx.x) * 2; }

__device__ __forceinline__ uint32_t read_pair(dptr base, uint32_t pitch, uint64_t row,
                                              uint32_t at) {
    return *reinterpret_cast<const uint32_t*>(reinterpret_cast<const uint16_t*>(base) +
                                              row * pitch + at);
}

__device__ __forceinline__ void write_pair(dptr base, uint32_t pitch, uint64_t row, uint32_t at,
                                           uint32_t pair) {
    *reinterpret_cast<uint32_t*>(reinterpret_cast<uint16_t*>(base) + row * pitch + at) = pair;
}

__device__ __forceinline__ uint32_t index_of(const RowsArgs& a) {
    return reinterpret_cast<const uint32_t*>(a.index)[blockIdx.y];
}

}  // namespace

// out = a[index] * scale; a is a table of bf16 rows, or the packed tiles of a tied head
extern "C" __global__ void embed(const __grid_constant__ RowsArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t k = column();
    if (k >= a.width) return;
    const uint32_t token = index_of(a);
    uint32_t pair;
    if (a.packed) {
        const uint64_t granules = (a.width + GRANULE - 1) / GRANULE;
        const uint64_t granule = token / TILE * granules + k / GRANULE;
        const uint32_t lane = token % 8 * 4 + k % 8 / 2;
        const uint32_t reg = token % 16 / 8 + k % 16 / 8 * 2;
        pair = reinterpret_cast<const uint32_t*>(
            a.a)[((granule * 4 + k % GRANULE / 16) * 32 + lane) * 4 + reg];
    } else {
        pair = read_pair(a.a, a.lda, token, k);
    }
    write_pair(a.out, a.ldo, blockIdx.y, k,
               pack_bf16(low_bf16(pair) * a.scale, high_bf16(pair) * a.scale));
}

// out = a[index]
extern "C" __global__ void gather(const __grid_constant__ RowsArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t k = column();
    if (k < a.width)
        write_pair(a.out, a.ldo, blockIdx.y, k, read_pair(a.a, a.lda, index_of(a), k));
}

// out = (norm(b * other_scale) + a[index] * scale) / sqrt 2, the norm over each layer's `width`
// columns by itself. Grid (layers, rows), one warp.
extern "C" __global__ void layer_inputs(const __grid_constant__ RowsArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t first = blockIdx.x * a.width;
    const float* weight = reinterpret_cast<const float*>(a.weight);
    float sum = 0.0f;
    for (uint32_t k = threadIdx.x * 2; k < a.width; k += 64) {
        const uint32_t pair = read_pair(a.b, a.ldb, blockIdx.y, first + k);
        const float low = round_bf16(low_bf16(pair) * a.other_scale);
        const float high = round_bf16(high_bf16(pair) * a.other_scale);
        sum += low * low;
        sum += high * high;
    }
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float inverse = 1.0f / sqrtf(sum / static_cast<float>(a.width) + a.eps);
    const uint32_t token = index_of(a);
    const auto one = [&](float context, float identity, uint32_t k) {
        const float scaled = round_bf16(context * a.other_scale);
        const float both =
            round_bf16(round_bf16(scaled * inverse * weight[k]) + round_bf16(identity * a.scale));
        return both * 0.70710678f;
    };
    for (uint32_t k = threadIdx.x * 2; k < a.width; k += 64) {
        const uint32_t context = read_pair(a.b, a.ldb, blockIdx.y, first + k);
        const uint32_t identity = read_pair(a.a, a.lda, token, first + k);
        write_pair(a.out, a.ldo, blockIdx.y, first + k,
                   pack_bf16(one(low_bf16(context), low_bf16(identity), k),
                             one(high_bf16(context), high_bf16(identity), k + 1)));
    }
}
