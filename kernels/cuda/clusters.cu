// The drafter's head by clusters: the likeliest clusters by their scores, then the logits of their
// tokens alone.
//
// Floor of the second: top x size rows of the head, 32 x 128 x 512 bytes for E2B and E4B, half a
// microsecond of bandwidth; launches set the time.
#include "math.cuh"
#include "ptx.cuh"
#include "sample.cuh"

namespace {

__device__ __forceinline__ float load(const uint16_t* p) { return from_bf16(*p); }
__device__ __forceinline__ float load(const float* p) { return *p; }

// What a product leaves: rounded where activations are bf16.
__device__ __forceinline__ float leave(const uint16_t*, float v) { return round_bf16(v); }
__device__ __forceinline__ float leave(const float*, float v) { return v; }

// A cluster's place is the number of better ones: by score, then by number.
template <class T>
__device__ __forceinline__ void pick(const ClusterArgs& a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.y, mine = blockIdx.x * blockDim.x + threadIdx.x;
    if (mine >= a.count) return;
    const T* scores = reinterpret_cast<const T*>(a.scores) + static_cast<uint64_t>(row) * a.ld_scores;
    const float score = load(scores + mine);
    uint32_t better = 0;
    for (uint32_t i = 0; i < a.count; i++) {
        const float other = load(scores + i);
        better += other > score || (other == score && i < mine);
    }
    if (better < a.top) reinterpret_cast<uint32_t*>(a.best)[row * a.top + better] = mine;
}

// A warp has a token: elements by lane, then a tree.
template <class T>
__device__ __forceinline__ void logits(const ClusterArgs& a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.y, lane = threadIdx.x % 32;
    const uint32_t place = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (place >= a.top * a.size) return;
    const uint32_t cluster = reinterpret_cast<const uint32_t*>(a.best)[row * a.top + place / a.size];
    const uint64_t at = static_cast<uint64_t>(cluster) * a.size + place % a.size;
    const T* h = reinterpret_cast<const T*>(a.h) + static_cast<uint64_t>(row) * a.ldh;
    const T* head = reinterpret_cast<const T*>(a.head) + at * a.width;
    float sum = 0.0f;
    for (uint32_t k = lane; k < a.width; k += 32) sum += load(h + k) * load(head + k);
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane) return;
    reinterpret_cast<float*>(a.logits)[static_cast<uint64_t>(row) * a.ld + place] = leave(h, sum);
    reinterpret_cast<uint32_t*>(a.ids)[row * a.top * a.size + place] =
        reinterpret_cast<const uint32_t*>(a.ordering)[at];
}

}  // namespace

// Grid (blocks of clusters, rows).
extern "C" __global__ void cluster_pick(const __grid_constant__ ClusterArgs a) { pick<uint16_t>(a); }
extern "C" __global__ void plain_cluster_pick(const __grid_constant__ ClusterArgs a) { pick<float>(a); }
// Grid (blocks of tokens, rows).
extern "C" __global__ void cluster_logits(const __grid_constant__ ClusterArgs a) { logits<uint16_t>(a); }
extern "C" __global__ void plain_cluster_logits(const __grid_constant__ ClusterArgs a) { logits<float>(a); }
