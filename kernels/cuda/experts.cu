// Mixture of experts: which experts a row uses depends on that row alone, and their results are
// added by expert number, so that a row's bits do not depend on who else chose the same expert.
//
// Floor: the chosen experts' bytes / read bandwidth. 26B-A4B, one row, eight experts of 704 columns:
// 8 x 3 x 704 x 2816 x 2 = 95 MB a layer, 21 us on an H200.
//
// Pairs (row, expert) are sorted by expert on the card and cut into items of at most 8 or 64 pairs;
// a block has 16 rows of one expert's matrix for one item. Its eight warps walk the eight splits of K
// of the unit linear, so an expert's product has the bits of that unit. The grid is as large as the
// items can be many; blocks without one leave at once.
#include "experts.cuh"
#include "math.cuh"
#include "ptx.cuh"
#include "weights.cuh"

namespace {

constexpr uint32_t MOST_TOP = 32;
constexpr uint32_t MOST_EXPERTS = 512;

template <class T>
__device__ __forceinline__ T* row_at(dptr base, uint64_t row, uint32_t pitch) {
    return reinterpret_cast<T*>(base) + row * pitch;
}

// Sum over a block of 256 threads, in a fixed tree.
__device__ __forceinline__ float block_sum(float sum, float (&warps)[8]) {
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = ((warps[0] + warps[1]) + (warps[2] + warps[3])) +
          ((warps[4] + warps[5]) + (warps[6] + warps[7]));
    return sum;
}

__device__ __forceinline__ float load(const uint16_t* p) { return from_bf16(*p); }
__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ void store(uint16_t* p, float v) { *p = to_bf16(v); }
__device__ __forceinline__ void store(float* p, float v) { *p = v; }
__device__ __forceinline__ float rounded(const uint16_t*, float v) { return round_bf16(v); }
__device__ __forceinline__ float rounded(const float*, float v) { return v; }

// What the router reads: y = (x / rms) * scale * root, rounded after the first and the last.
template <class T>
__device__ __forceinline__ void router_input_row(const ExpertArgs& a) {
    __shared__ float warps[8];
    let_dependents_start();
    wait_for_inputs();
    const T* x = row_at<const T>(a.x, blockIdx.x, a.ldx);
    T* y = row_at<T>(a.y, blockIdx.x, a.ldy);
    const float* scale = reinterpret_cast<const float*>(a.weight);
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x; i < a.k; i += blockDim.x) {
        const float v = load(x + i);
        sum += v * v;
    }
    sum = block_sum(sum, warps);
    const float inverse = 1.0f / sqrtf(sum / static_cast<float>(a.k) + a.eps);
    for (uint32_t i = threadIdx.x; i < a.k; i += blockDim.x)
        store(y + i, rounded(x, load(x + i) * inverse) * scale[i] * a.root);
}

// The best `top` of the softmax over all experts, scaled to sum 1, times each expert's own scale.
// The common denominator of the softmax cancels.
template <class T>
__device__ __forceinline__ void route_row(const ExpertArgs& a) {
    __shared__ float weight[MOST_EXPERTS];
    __shared__ uint32_t best[MOST_TOP];
    __shared__ float total;
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.x, t = threadIdx.x;
    const T* scores = row_at<const T>(a.scores, row, a.ld_scores);
    float most = MINUS_INFINITY;
    for (uint32_t e = 0; e < a.experts; e++) most = fmaxf(most, load(scores + e));
    for (uint32_t e = t; e < a.experts; e += blockDim.x) weight[e] = exp_ours(load(scores + e) - most);
    __syncthreads();
    for (uint32_t e = t; e < a.experts; e += blockDim.x) {
        uint32_t better = 0;
        for (uint32_t i = 0; i < a.experts; i++)
            better += weight[i] > weight[e] || (weight[i] == weight[e] && i < e);
        if (better < a.top) best[better] = e;
    }
    __syncthreads();
    if (t == 0) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < a.top; i++) sum += weight[best[i]];
        total = sum;
    }
    __syncthreads();
    if (t >= a.top) return;
    const uint32_t mine = best[t];
    uint32_t place = 0;
    for (uint32_t i = 0; i < a.top; i++) place += best[i] < mine;
    const float* scale = reinterpret_cast<const float*>(a.scale);
    reinterpret_cast<uint32_t*>(a.chosen)[row * a.top + place] = mine;
    reinterpret_cast<float*>(a.share)[row * a.top + place] = weight[mine] / total * scale[mine];
}

// y = the weighted results of a row's experts, by expert number.
template <class T>
__device__ __forceinline__ void sum_row(const ExpertArgs& a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    float sum = 0.0f;
    for (uint32_t s = 0; s < a.top; s++) {
        const uint32_t pair = row * a.top + s;
        const uint32_t place = reinterpret_cast<const uint32_t*>(a.place)[pair];
        sum += reinterpret_cast<const float*>(a.share)[pair] *
               load(row_at<const T>(a.x, place, a.ldx) + i);
    }
    store(row_at<T>(a.y, row, a.ldy) + i, sum);
}

// 16 rows of an expert's matrix times up to 8 MB pairs.
template <int MB>
__device__ __forceinline__ void product(const ExpertArgs& a) {
    __shared__ float partial[SPLITS][MB * 8][TILE];
    let_dependents_start();
    wait_for_inputs();
    if (blockIdx.y >= *reinterpret_cast<const uint32_t*>(a.count)) return;
    const uint4 item = reinterpret_cast<const uint4*>(a.items)[blockIdx.y];
    const uint32_t split = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
    const uint32_t first = split_first(split, granules), end = split_first(split + 1, granules);
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(a.weight) + item.x * a.stride +
                           (static_cast<uint64_t>(blockIdx.x) * granules + first) *
                               GRANULE_CODES<WeightsBf16> + lane * 16;
    const uint16_t* x[MB];
#pragma unroll
    for (int b = 0; b < MB; b++) {
        const uint32_t place = item.y + min(b * 8 + lane / 4, item.z - 1);
        const uint32_t row =
            a.by_row ? reinterpret_cast<const uint32_t*>(a.row_of)[place] : place;
        x[b] = row_at<const uint16_t>(a.x, row, a.ldx) + lane % 4 * 2;
    }
    float sum[MB][4] = {};
    for (uint32_t granule = first; granule < end; granule++) {
        uint4 w[4];
#pragma unroll
        for (int block = 0; block < 4; block++) {
            w[block] = __ldcs(reinterpret_cast<const uint4*>(codes + block * 512));
        }
        codes += GRANULE_CODES<WeightsBf16>;
#pragma unroll
        for (int block = 0; block < 4; block++) {
            const uint32_t fragment[4] = {w[block].x, w[block].y, w[block].z, w[block].w};
            const uint32_t k = granule * GRANULE + block * 16 + lane % 4 * 2;
#pragma unroll
            for (int b = 0; b < MB; b++) {
                const uint16_t* at = x[b] + granule * GRANULE + block * 16;
                const uint32_t b0 = k < a.k ? *reinterpret_cast<const uint32_t*>(at) : 0;
                const uint32_t b1 = k + 8 < a.k ? *reinterpret_cast<const uint32_t*>(at + 8) : 0;
                mma_bf16(sum[b], fragment, b0, b1);
            }
        }
    }
#pragma unroll
    for (int b = 0; b < MB; b++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            partial[split][b * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sum[b][i];
    }
    __syncthreads();
    const auto total = [&](uint32_t pair, uint32_t row) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) sum += partial[s][pair][row];
        return round_bf16(sum);
    };
    const uint32_t height = a.gated ? TILE / 2 : TILE;
    for (uint32_t i = threadIdx.x; i < item.z * height; i += blockDim.x) {
        const uint32_t pair = i / height, row = i % height;
        const uint32_t n = blockIdx.x * height + row;
        if (n >= (a.gated ? a.n / 2 : a.n)) continue;
        const float v =
            a.gated ? gelu_tanh(total(pair, row)) * total(pair, row + 8) : total(pair, row);
        row_at<uint16_t>(a.y, item.y + pair, a.ldy)[n] = to_bf16(v);
    }
}

}  // namespace

// Grid (rows), 256 threads.
extern "C" __global__ void router_input(const __grid_constant__ ExpertArgs a) {
    router_input_row<uint16_t>(a);
}
extern "C" __global__ void plain_router_input(const __grid_constant__ ExpertArgs a) {
    router_input_row<float>(a);
}

// Grid (rows), 128 threads.
extern "C" __global__ void route(const __grid_constant__ ExpertArgs a) { route_row<uint16_t>(a); }
extern "C" __global__ void plain_route(const __grid_constant__ ExpertArgs a) { route_row<float>(a); }

// One block: pairs by expert, and the items of at most `height` pairs.
extern "C" __global__ void __launch_bounds__(1024)
    sort_pairs(const __grid_constant__ ExpertArgs a) {
    __shared__ uint32_t first[MOST_EXPERTS + 1];
    __shared__ uint32_t next[MOST_EXPERTS];
    let_dependents_start();
    wait_for_inputs();
    const uint32_t pairs = a.rows * a.top;
    const uint32_t* chosen = reinterpret_cast<const uint32_t*>(a.chosen);
    for (uint32_t e = threadIdx.x; e < a.experts; e += blockDim.x) next[e] = 0;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) atomicAdd(&next[chosen[i]], 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32_t sum = 0, items = 0;
        for (uint32_t e = 0; e < a.experts; e++) {
            const uint32_t count = next[e];
            first[e] = sum;
            for (uint32_t from = 0; from < count; from += a.height)
                reinterpret_cast<uint4*>(a.items)[items++] =
                    make_uint4(e, sum + from, min(a.height, count - from), 0);
            sum += count;
        }
        *reinterpret_cast<uint32_t*>(a.count) = items;
    }
    __syncthreads();
    for (uint32_t e = threadIdx.x; e < a.experts; e += blockDim.x) next[e] = first[e];
    __syncthreads();
    // Which place a pair gets among its expert's is left to chance: no pair's result depends on it.
    for (uint32_t i = threadIdx.x; i < pairs; i += blockDim.x) {
        const uint32_t place = atomicAdd(&next[chosen[i]], 1u);
        reinterpret_cast<uint32_t*>(a.place)[i] = place;
        reinterpret_cast<uint32_t*>(a.row_of)[place] = i / a.top;
    }
}

// Grid (tiles, items).
extern "C" __global__ void __launch_bounds__(256)
    experts_bf16_m8(const __grid_constant__ ExpertArgs a) {
    product<1>(a);
}
extern "C" __global__ void __launch_bounds__(256)
    experts_bf16_m64(const __grid_constant__ ExpertArgs a) {
    product<8>(a);
}

// Grid (blocks of columns, rows).
extern "C" __global__ void experts_sum(const __grid_constant__ ExpertArgs a) { sum_row<uint16_t>(a); }
extern "C" __global__ void plain_experts_sum(const __grid_constant__ ExpertArgs a) { sum_row<float>(a); }
