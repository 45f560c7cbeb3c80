// Mixture of experts: which experts a row uses depends on that row alone, and their results are
// added by expert number, so that a row's bits do not depend on who else chose the same expert.
//
// Floor: the chosen experts' bytes / read bandwidth. 26B-A4B, one row, eight experts of 704 columns:
// 8 x 3 x 704 x 2816 x 2 = 95 MB a layer, 21 us on an H200.
//
// Pairs (row, expert) are sorted by expert on the card and cut into items of at most 8 or 64 pairs;
// a block has tiles of 16 rows of one expert's matrix for one item. Its eight warps walk the eight splits of K
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
    alignas(16) float weight[MOST_EXPERTS];
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
    // Four are read at once: what is missing to fours is worse than any.
    for (uint32_t e = t; e < (a.experts + 3) / 4 * 4; e += 128)
        r.weight[e] = e < a.experts ? exp_ours(load(scores + e) - most) : -1.0f;
    __syncthreads();
    for (uint32_t e = t; e < a.experts; e += 128) {
        const float mine = r.weight[e];
        uint32_t better = 0;
        const auto compare = [&](float other, uint32_t i) {
            better += other > mine || (other == mine && i < e);
        };
#pragma unroll 4
        for (uint32_t i = 0; i < a.experts; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(r.weight + i);
            compare(four.x, i);
            compare(four.y, i + 1);
            compare(four.z, i + 2);
            compare(four.w, i + 3);
        }
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

// The pairs of one row are sorted already, and each is an item.
__device__ __forceinline__ void one_row(const ExpertArgs& a) {
    const uint32_t t = threadIdx.x;
    if (t == 0) *reinterpret_cast<uint32_t*>(a.count) = a.top;
    if (t >= a.top) return;
    const uint32_t expert = reinterpret_cast<const uint32_t*>(a.chosen)[t];
    reinterpret_cast<uint4*>(a.items)[t] = make_uint4(expert, t, 1, 0);
    reinterpret_cast<uint32_t*>(a.place)[t] = t;
    reinterpret_cast<uint32_t*>(a.row_of)[t] = 0;
}

// A warp's granules on their way: the tiles of a split, one tile after the other. A lane copies the codes
// that it reads itself.
template <class W, int DEPTH>
struct Granules {
    static constexpr uint32_t BYTES = GRANULE_CODES<W> + W::SCALES;
    const uint8_t *codes, *scales;  // this lane's, of the granule that is brought next
    uint32_t slots, slot;           // this warp's in shared memory; the one to be read, and filled, next
    uint32_t mine, jump;            // granules of a tile that are this warp's; those up to the next tile's
    uint32_t left, tiles;           // of the tile at hand; tiles to come, that one too

    __device__ __forceinline__ Granules(const ExpertArgs& a, uint32_t expert, uint32_t at) {
        const uint32_t lane = threadIdx.x % 32, split = threadIdx.x / 32;
        const uint32_t granules = (a.k + GRANULE - 1) / GRANULE, all = (a.n + TILE - 1) / TILE;
        const uint32_t first = split_first(split, granules);
        const uint64_t granule = static_cast<uint64_t>(blockIdx.x) * granules + first;
        codes = reinterpret_cast<const uint8_t*>(a.weight) + expert * a.stride +
                granule * GRANULE_CODES<W> + lane * 16;
        scales = reinterpret_cast<const uint8_t*>(a.block_scale) + expert * a.scale_stride +
                 granule * W::SCALES + lane * 16;
        slots = at;
        slot = 0;
        mine = split_first(split + 1, granules) - first;
        jump = gridDim.x * granules - mine;
        left = mine;
        tiles = mine ? (all - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    }

    __device__ __forceinline__ void bring() {
        if (tiles) {
            const uint32_t to = slots + slot * BYTES, lane = threadIdx.x % 32;
#pragma unroll
            for (int i = 0; i < GRANULE_CODES<W>; i += 512)
                copy_async16(to + lane * 16 + i, codes + i);
            if (W::SCALES && lane * 16 < W::SCALES)
                copy_async16(to + GRANULE_CODES<W> + lane * 16, scales);
            uint32_t further = 1;
            if (--left == 0) {
                left = mine;
                tiles--;
                further += jump;
            }
            codes += static_cast<uint64_t>(further) * GRANULE_CODES<W>;
            scales += static_cast<uint64_t>(further) * W::SCALES;
        }
        copy_commit();
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }

    // The oldest granule, whose slot is filled again at once.
    __device__ __forceinline__ void take(typename W::Raw (&raw)[STAGES<W>]) {
        const uint32_t lane = threadIdx.x % 32, from = slots + slot * BYTES;
        copy_wait<DEPTH - 1>();
        if (W::SCALES) __syncwarp();  // lanes read scales that others copied
#pragma unroll
        for (int i = 0; i < STAGES<W>; i++)
            raw[i] = W::read(from + i * W::CODES + lane * 16,
                             from + GRANULE_CODES<W> + i * W::SCALES + lane / 4 * 8);
        if (W::SCALES) __syncwarp();
        bring();
    }
};

// Tiles of 16 rows of an expert's matrix times up to 8 MB pairs: every gridDim.x-th tile.
template <class W, int MB>
__device__ __forceinline__ void product(const ExpertArgs& a) {
    constexpr int DEPTH = MB == 1 ? 2 : 1;  // mirrored in abi/experts.rs
    __shared__ float partial[SPLITS][MB * 8][TILE];
    extern __shared__ __align__(1024) uint8_t shared[];  // the warps' rings
    let_dependents_start();
    wait_for_inputs();
    // Both are read at once; what lies behind the last item is of an earlier step.
    const uint4 item = reinterpret_cast<const uint4*>(a.items)[blockIdx.y];
    if (blockIdx.y >= *reinterpret_cast<const uint32_t*>(a.count)) return;
    const uint32_t split = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr uint32_t RING = DEPTH * Granules<W, DEPTH>::BYTES;
    Granules<W, DEPTH> weights(a, item.x, shared_address(shared) + split * RING);
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE, tiles = (a.n + TILE - 1) / TILE;
    const uint32_t first = split_first(split, granules), end = first + weights.mine;
#pragma unroll
    for (int i = 0; i < DEPTH; i++) weights.bring();
    const uint16_t* x[MB];
#pragma unroll
    for (int b = 0; b < MB; b++) {
        const uint32_t place = item.y + min(b * 8 + lane / 4, item.z - 1);
        const uint32_t row =
            a.by_row ? reinterpret_cast<const uint32_t*>(a.row_of)[place] : place;
        x[b] = row_at<const uint16_t>(a.x, row, a.ldx) + lane % 4 * 2;
    }
    float sum[MB][4];
    const auto multiply = [&](const uint32_t (&fragment)[4], uint32_t k) {
#pragma unroll
        for (int b = 0; b < MB; b++) {
            const uint32_t at = k + lane % 4 * 2;
            const uint32_t b0 = at < a.k ? *reinterpret_cast<const uint32_t*>(x[b] + k) : 0;
            const uint32_t b1 = at + 8 < a.k ? *reinterpret_cast<const uint32_t*>(x[b] + k + 8) : 0;
            mma_bf16(sum[b], fragment, b0, b1);
        }
    };
    const uint32_t height = a.gated ? TILE / 2 : TILE;
#pragma unroll 1
    for (uint32_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
#pragma unroll
        for (int b = 0; b < MB; b++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[b][i] = 0.0f;
#pragma unroll 1
        for (uint32_t granule = first; granule < end; granule++) {
            typename W::Raw raw[STAGES<W>];
            weights.take(raw);
            const typename W::Raw &lower = raw[0], &upper = raw[STAGES<W> - 1];
            const uint32_t k = granule * GRANULE;
            uint32_t fragment[4];
            W::template fragment<0>(lower, fragment);
            multiply(fragment, k);
            W::template fragment<1>(lower, fragment);
            multiply(fragment, k + 16);
            W::template fragment<W::BLOCKS - 2>(upper, fragment);
            multiply(fragment, k + 32);
            W::template fragment<W::BLOCKS - 1>(upper, fragment);
            multiply(fragment, k + 48);
        }
        if (tile != blockIdx.x) __syncthreads();  // the sums of the tile before were read
#pragma unroll
        for (int b = 0; b < MB; b++) {
#pragma unroll
            for (int i = 0; i < 4; i++)
                partial[split][b * 8 + lane % 4 * 2 + i % 2][lane / 4 + i / 2 * 8] = sum[b][i];
        }
        __syncthreads();
        const float* row_scale =
            a.row_scale ? reinterpret_cast<const float*>(a.row_scale) +
                              static_cast<uint64_t>(item.x) * a.n + tile * TILE
                        : nullptr;
        const auto total = [&](uint32_t pair, uint32_t row) {
            float sum = 0.0f;
#pragma unroll
            for (int s = 0; s < SPLITS; s++) sum += partial[s][pair][row];
            return round_bf16(row_scale ? sum * row_scale[row] : sum);
        };
        for (uint32_t i = threadIdx.x; i < item.z * height; i += blockDim.x) {
            const uint32_t pair = i / height, row = i % height;
            const uint32_t n = tile * height + row;
            if (n >= (a.gated ? a.n / 2 : a.n)) continue;
            const float v =
                a.gated ? gelu_tanh(total(pair, row)) * total(pair, row + 8) : total(pair, row);
            row_at<uint16_t>(a.y, item.y + pair, a.ldy)[n] = to_bf16(v);
        }
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
    if (a.rows == 1)
        one_row(a);
    else
        sort(a);
}

// Grid (tiles or fewer, items), 256 threads.
#define PRODUCT(NAME, WEIGHTS, MB)                                       \
    extern "C" __global__ void __launch_bounds__(256, MB == 1 ? 4 : 2)      \
        NAME(const __grid_constant__ ExpertArgs a) {                     \
        product<WEIGHTS, MB>(a);                                         \
    }
PRODUCT(experts_bf16_m8, WeightsBf16, 1)
PRODUCT(experts_bf16_m64, WeightsBf16, 8)
PRODUCT(experts_fp8_m8, WeightsFp8, 1)
PRODUCT(experts_fp8_m64, WeightsFp8, 8)
PRODUCT(experts_nvfp4_m8, WeightsNvfp4, 1)
PRODUCT(experts_nvfp4_m64, WeightsNvfp4, 8)
