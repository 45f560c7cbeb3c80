// The token at a position: argmax over v of (logit / T + G(seed, position, v)), ties to the lowest
// id. G comes from Philox 4x32-10 keyed by seed and counted by (v / 4, position): no state.
//
// Floor: 262144 logits of 4 bytes a row, 0.23 us of bandwidth; the noise costs ten rounds for four
// tokens. A launch and a merge set the time. Filters that need an order (top-k, top-p, min-p) are
// not here.
//
// Compiled for all targets; not yet run.
#include "abi.cuh"
#include "math.cuh"
#include "ptx.cuh"

namespace {

__device__ __forceinline__ uint4 philox(uint4 counter, uint32_t key0, uint32_t key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint32_t low0 = 0xd2511f53u * counter.x, high0 = __umulhi(0xd2511f53u, counter.x);
        const uint32_t low1 = 0xcd9e8d57u * counter.z, high1 = __umulhi(0xcd9e8d57u, counter.z);
        counter = make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return counter;
}

// Sorts by (value ascending, id descending): the largest is the winner.
__device__ __forceinline__ uint64_t rank(float value, uint32_t id) {
    const uint32_t bits = __float_as_uint(value + 0.0f);  // the two zeros are one
    const uint32_t ascending = bits >> 31 ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ascending) << 32 | static_cast<uint32_t>(~id);
}

__device__ __forceinline__ uint64_t largest(uint64_t mine, uint64_t (&warp_best)[32]) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const uint64_t other = __shfl_xor_sync(0xffffffffu, mine, step);
        mine = other > mine ? other : mine;
    }
    if (threadIdx.x % 32 == 0) warp_best[threadIdx.x / 32] = mine;
    __syncthreads();
    mine = threadIdx.x % 32 < blockDim.x / 32 ? warp_best[threadIdx.x % 32] : 0;
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const uint64_t other = __shfl_xor_sync(0xffffffffu, mine, step);
        mine = other > mine ? other : mine;
    }
    return mine;
}

}  // namespace

// Grid (chunks, rows): the best of a chunk of the vocabulary.
extern "C" __global__ void __launch_bounds__(256) sample(const __grid_constant__ SampleArgs a) {
    __shared__ uint64_t warp_best[32];
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.y;
    const float* logits =
        reinterpret_cast<const float*>(a.logits) + static_cast<uint64_t>(row) * a.ld;
    const float temperature = reinterpret_cast<const float*>(a.temperature)[row];
    const uint64_t seed = reinterpret_cast<const uint64_t*>(a.seed)[row];
    const uint64_t position = reinterpret_cast<const uint64_t*>(a.position)[row];
    const uint32_t groups = (a.vocab + 3) / 4;
    uint64_t best = 0;
    for (uint32_t group = blockIdx.x * blockDim.x + threadIdx.x; group < groups;
         group += gridDim.x * blockDim.x) {
        uint4 words = make_uint4(0, 0, 0, 0);
        if (temperature > 0.0f)
            words = philox(make_uint4(group, position, position >> 32, 0), seed, seed >> 32);
        const uint32_t noise[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t id = group * 4 + i;
            if (id >= a.vocab) break;
            float value = logits[id];
            // A NaN must not win, and infinities must not breed new ones.
            value = value != value ? MINUS_INFINITY : fminf(value, 3.40282347e38f);
            if (temperature > 0.0f)
                value = fminf(value / temperature, 3.40282347e38f) + gumbel(noise[i]);
            const uint64_t mine = rank(value, id);
            best = mine > best ? mine : best;
        }
    }
    best = largest(best, warp_best);
    if (threadIdx.x == 0)
        reinterpret_cast<uint64_t*>(a.best)[static_cast<uint64_t>(row) * a.chunks + blockIdx.x] =
            best;
}

// Grid (rows): the best of all chunks.
extern "C" __global__ void __launch_bounds__(256)
    sample_merge(const __grid_constant__ SampleArgs a) {
    __shared__ uint64_t warp_best[32];
    let_dependents_start();
    wait_for_inputs();
    const uint64_t* chunks =
        reinterpret_cast<const uint64_t*>(a.best) + static_cast<uint64_t>(blockIdx.x) * a.chunks;
    uint64_t best = 0;
    for (uint32_t i = threadIdx.x; i < a.chunks; i += blockDim.x)
        best = chunks[i] > best ? chunks[i] : best;
    best = largest(best, warp_best);
    if (threadIdx.x == 0)
        reinterpret_cast<uint32_t*>(a.token)[blockIdx.x] = ~static_cast<uint32_t>(best);
}
