// Mixture of experts: which experts a row uses depends on that row alone, and their results are
// added by expert number, so that a row's bits do not depend on who else chose the same expert.
//
// Floor: the chosen experts' bytes / read bandwidth. 26B-A4B, one row, eight experts of 704 columns:
// 8 x 3 x 704 x 2816 x 2 = 95 MB a layer, 21 us on an H200.
//
// Pairs (row, expert) are sorted by expert on the card and cut into items of at most 8 or 64 pairs;
// a block has 16 rows of one expert's matrix for one item. Its eight warps walk the eight splits of K
// of the unit linear, so an expert's product has the bits of that unit. The grid is as large as the
// items can be many; blocks without one leave at once. What the experts read and what becomes of
// their results is in expert_norms.cu.
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

__device__ __forceinline__ float load(const uint16_t* p) { return from_bf16(*p); }
__device__ __forceinline__ float load(const float* p) { return *p; }

// Where the threads of a row meet while they route it.
struct Routing {
    float weight[MOST_EXPERTS];
    uint32_t best[MOST_TOP];
    float most[4], total;
};

// The best `top` of the softmax over all experts, scaled to sum 1, times each expert's own scale.
// The common denominator of the softmax cancels. By 128 threads, `t` of them; all of the block's
// come here, `there` those that have a row.
template <class T>
__device__ __forceinline__ void route_row(const ExpertArgs& a, uint32_t row, uint32_t t, bool there,
                                          Routing& r) {
    const T* scores = row_at<const T>(a.scores, there ? row : 0, a.ld_scores);
    float most = MINUS_INFINITY;
    for (uint32_t e = t; e < a.experts; e += 128) most = fmaxf(most, load(scores + e));
#pragma unroll
    for (int step = 16; step; step /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (t % 32 == 0) r.most[t / 32] = most;
    __syncthreads();
    most = fmaxf(fmaxf(r.most[0], r.most[1]), fmaxf(r.most[2], r.most[3]));
    for (uint32_t e = t; e < a.experts; e += 128) r.weight[e] = exp_ours(load(scores + e) - most);
    __syncthreads();
    for (uint32_t e = t; e < a.experts; e += 128) {
        const float mine = r.weight[e];
        uint32_t better = 0;
#pragma unroll 8
        for (uint32_t i = 0; i < a.experts; i++)
            better += r.weight[i] > mine || (r.weight[i] == mine && i < e);
        if (better < a.top) r.best[better] = e;
    }
    __syncthreads();
    if (t == 0) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < a.top; i++) sum += r.weight[r.best[i]];
        r.total = sum;
    }
    __syncthreads();
    if (!there || t >= a.top) return;
    const uint32_t mine = r.best[t];
    uint32_t place = 0;
    for (uint32_t i = 0; i < a.top; i++) place += r.best[i] < mine;
    const float* scale = reinterpret_cast<const float*>(a.scale);
    reinterpret_cast<uint32_t*>(a.chosen)[row * a.top + place] = mine;
    reinterpret_cast<float*>(a.share)[row * a.top + place] = r.weight[mine] / r.total * scale[mine];
}

// What a thread's number sums up to with those of the threads in front of it, itself left out; both
// halves by themselves. By 1024 threads.
__device__ __forceinline__ uint2 sum_before(uint2 mine, uint2 (&warps)[32]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint2 all = mine, before = make_uint2(0, 0);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const uint32_t x = __shfl_xor_sync(0xffffffffu, all.x, step);
        const uint32_t y = __shfl_xor_sync(0xffffffffu, all.y, step);
        if (lane & step) before = make_uint2(before.x + x, before.y + y);
        all = make_uint2(all.x + x, all.y + y);
    }
    if (lane == 0) warps[warp] = all;
    __syncthreads();
    for (uint32_t i = 0; i < warp; i++)
        before = make_uint2(before.x + warps[i].x, before.y + warps[i].y);
    return before;
}

// Pairs by expert, and the items of at most `height` pairs. By 1024 threads.
__device__ __forceinline__ void sort(const ExpertArgs& a) {
    __shared__ uint32_t next[MOST_EXPERTS];
    __shared__ uint2 warps[32];
    const uint32_t pairs = a.rows * a.top, t = threadIdx.x;
    const uint32_t* chosen = reinterpret_cast<const uint32_t*>(a.chosen);
    if (t < MOST_EXPERTS) next[t] = 0;
    __syncthreads();
    for (uint32_t i = t; i < pairs; i += blockDim.x) atomicAdd(&next[chosen[i]], 1u);
    __syncthreads();
    const uint32_t count = t < a.experts ? next[t] : 0;
    const uint2 first = sum_before(make_uint2(count, (count + a.height - 1) / a.height), warps);
    uint32_t item = first.y;
    for (uint32_t from = 0; from < count; from += a.height)
        reinterpret_cast<uint4*>(a.items)[item++] =
            make_uint4(t, first.x + from, min(a.height, count - from), 0);
    if (t < a.experts) next[t] = first.x;
    if (t == blockDim.x - 1) *reinterpret_cast<uint32_t*>(a.count) = item;
    __syncthreads();
    // Which place a pair gets among its expert's is left to chance: no pair's result depends on it.
    for (uint32_t i = t; i < pairs; i += blockDim.x) {
        const uint32_t place = atomicAdd(&next[chosen[i]], 1u);
        reinterpret_cast<uint32_t*>(a.place)[i] = place;
        reinterpret_cast<uint32_t*>(a.row_of)[place] = i / a.top;
    }
}

// A lane's part of a granule of packed weights, straight from memory.
template <class W>
struct Granule {
    static constexpr int CODES = GRANULE_CODES<W> / 512;
    uint4 codes[CODES];
    uint2 scales;

    __device__ __forceinline__ void read(const uint8_t* from, const uint8_t* scales_from) {
#pragma unroll
        for (int i = 0; i < CODES; i++)
            codes[i] = __ldcs(reinterpret_cast<const uint4*>(from + i * 512));
        if constexpr (W::SCALES > 0) scales = __ldcs(reinterpret_cast<const uint2*>(scales_from));
    }

    template <int STAGE>
    __device__ __forceinline__ typename W::Raw raw() const {
        if constexpr (W::SCALES > 0) {
            return {codes[0], scales};
        } else {
            return {{codes[STAGE * 2], codes[STAGE * 2 + 1]}};
        }
    }
};

// 16 rows of an expert's matrix times up to 8 MB pairs.
template <class W, int MB>
__device__ __forceinline__ void product(const ExpertArgs& a) {
    __shared__ float partial[SPLITS][MB * 8][TILE];
    let_dependents_start();
    wait_for_inputs();
    // Both are read at once; what lies behind the last item is of an earlier step.
    const uint4 item = reinterpret_cast<const uint4*>(a.items)[blockIdx.y];
    if (blockIdx.y >= *reinterpret_cast<const uint32_t*>(a.count)) return;
    const uint32_t split = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
    const uint32_t first = split_first(split, granules), end = split_first(split + 1, granules);
    const uint64_t at = static_cast<uint64_t>(blockIdx.x) * granules + first;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(a.weight) + item.x * a.stride +
                           at * GRANULE_CODES<W> + lane * 16;
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(a.block_scale) +
                            item.x * a.scale_stride + at * W::SCALES + lane / 4 * 8;
    Granule<W> ahead = {};
    if (first < end) ahead.read(codes, scales);
    const uint16_t* x[MB];
#pragma unroll
    for (int b = 0; b < MB; b++) {
        const uint32_t place = item.y + min(b * 8 + lane / 4, item.z - 1);
        const uint32_t row =
            a.by_row ? reinterpret_cast<const uint32_t*>(a.row_of)[place] : place;
        x[b] = row_at<const uint16_t>(a.x, row, a.ldx) + lane % 4 * 2;
    }
    float sum[MB][4] = {};
    const auto multiply = [&](const uint32_t (&fragment)[4], uint32_t k) {
#pragma unroll
        for (int b = 0; b < MB; b++) {
            const uint32_t at = k + lane % 4 * 2;
            const uint32_t b0 = at < a.k ? *reinterpret_cast<const uint32_t*>(x[b] + k) : 0;
            const uint32_t b1 = at + 8 < a.k ? *reinterpret_cast<const uint32_t*>(x[b] + k + 8) : 0;
            mma_bf16(sum[b], fragment, b0, b1);
        }
    };
    for (uint32_t granule = first; granule < end; granule++) {
        const Granule<W> w = ahead;
        codes += GRANULE_CODES<W>;
        scales += W::SCALES;
        if (granule + 1 < end) ahead.read(codes, scales);
        const uint32_t k = granule * GRANULE;
        uint32_t fragment[4];
        const typename W::Raw lower = w.template raw<0>();
        const typename W::Raw upper = w.template raw<STAGES<W> - 1>();
        W::template fragment<0>(lower, fragment);
        multiply(fragment, k);
        W::template fragment<1>(lower, fragment);
        multiply(fragment, k + 16);
        W::template fragment<W::BLOCKS - 2>(upper, fragment);
        multiply(fragment, k + 32);
        W::template fragment<W::BLOCKS - 1>(upper, fragment);
        multiply(fragment, k + 48);
    }
#pragma unroll
    for (int b = 0; b < MB; b++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            partial[split][b * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sum[b][i];
    }
    __syncthreads();
    const float* row_scale =
        a.row_scale ? reinterpret_cast<const float*>(a.row_scale) +
                          static_cast<uint64_t>(item.x) * a.n + blockIdx.x * TILE
                    : nullptr;
    const auto total = [&](uint32_t pair, uint32_t row) {
        float sum = 0.0f;
#pragma unroll
        for (int s = 0; s < SPLITS; s++) sum += partial[s][pair][row];
        return round_bf16(row_scale ? sum * row_scale[row] : sum);
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

// Grid (rows), 128 threads.
extern "C" __global__ void route(const __grid_constant__ ExpertArgs a) {
    __shared__ Routing routing;
    let_dependents_start();
    wait_for_inputs();
    route_row<uint16_t>(a, blockIdx.x, threadIdx.x, true, routing);
}
extern "C" __global__ void plain_route(const __grid_constant__ ExpertArgs a) {
    __shared__ Routing routing;
    let_dependents_start();
    wait_for_inputs();
    route_row<float>(a, blockIdx.x, threadIdx.x, true, routing);
}

// One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(1024)
    sort_pairs(const __grid_constant__ ExpertArgs a) {
    let_dependents_start();
    wait_for_inputs();
    sort(a);
}

// One block of 1024 threads: both of the above for at most eight rows.
extern "C" __global__ void __launch_bounds__(1024)
    route_and_sort(const __grid_constant__ ExpertArgs a) {
    __shared__ Routing routing[8];
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = threadIdx.x / 128;
    route_row<uint16_t>(a, row, threadIdx.x % 128, row < a.rows, routing[row]);
    __syncthreads();
    sort(a);
}

// Grid (tiles, items), 256 threads.
#define PRODUCT(NAME, WEIGHTS, MB)                                       \
    extern "C" __global__ void __launch_bounds__(256)                    \
        NAME(const __grid_constant__ ExpertArgs a) {                     \
        product<WEIGHTS, MB>(a);                                         \
    }
PRODUCT(experts_bf16_m8, WeightsBf16, 1)
PRODUCT(experts_bf16_m64, WeightsBf16, 8)
PRODUCT(experts_fp8_m8, WeightsFp8, 1)
PRODUCT(experts_fp8_m64, WeightsFp8, 8)
PRODUCT(experts_nvfp4_m8, WeightsNvfp4, 1)
PRODUCT(experts_nvfp4_m64, WeightsNvfp4, 8)
