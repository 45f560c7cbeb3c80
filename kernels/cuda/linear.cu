// y = x W^T for 1 to 64 rows of x: the weights stream past once, whatever the number of rows.
//
// Floor: n k bytes-per-weight / read bandwidth. x and y are thousandths of that. On an H200
// (4.51 TB/s) the gate/up product of 31B, 43008 x 5376 bf16, takes 102.5 us; up to 16 rows the
// tensor cores need under a tenth of that, at 64 rows a half, so they never set the time.
//
// A cluster of eight blocks owns 16 rows of W per warp; block s of it walks split s of K
// (weights.cuh), so x need not be read once per tile: a block keeps its eighth of x in shared
// memory for all its tiles. Every lane copies its own fragments ahead through a ring in shared
// memory and is the only one to read them: the k loop has no barrier. The eight sums of an output
// meet through distributed shared memory and are added in order of s. The rows of x ride along the
// 8-wide side of the mma, so one row's bits cannot depend on another row or on how many there are.
//
// Compiled for all targets; not yet run.
#include "epilogue.cuh"
#include "weights.cuh"

namespace {

constexpr int BLOCK_X = 512;  // bytes of x for 32 columns and 8 rows, in fragment order

// Shared memory: rings of all warps, then x, then one partial sum per output.
template <class W>
struct Layout {
    static constexpr int RING = W::DEPTH * W::SLOT;
    static __device__ __forceinline__ uint32_t x(uint32_t warps) { return warps * RING; }
    static __device__ __forceinline__ uint32_t partial(uint32_t warps, uint32_t chunk,
                                                       uint32_t blocks) {
        return x(warps) + chunk * 2 * blocks * BLOCK_X;
    }
};

// Where a ring is read or written next.
template <class W>
struct Cursor {
    uint32_t at, end;
    __device__ __forceinline__ void advance() {
        at += W::SLOT;
        if (at == end) at -= W::DEPTH * W::SLOT;
    }
};

// Copies this lane's share of W ahead, stage by stage, over all tiles of its warp.
template <class W>
struct Feeder {
    const uint8_t* codes;   // of the next stage
    const uint8_t* scales;
    uint64_t jump;          // granules from the end of a tile's split to the start of the next one's
    uint32_t left, stages;  // of the tile, of every tile
    uint32_t tiles;         // to do, this one included
    Cursor<W> slot;

    __device__ __forceinline__ void feed() {
        if (tiles) {
            copy_stage<W>(slot.at, codes, scales);
            slot.advance();
            codes += W::CODES;
            scales += W::SCALES;
            if (--left == 0) {
                left = stages;
                tiles--;
                codes += jump * GRANULE_CODES<W>;
                scales += jump * W::SCALES;
            }
        }
        copy_commit();
    }
};

// x columns of granules [from, from + count) into B-fragment order: for 32 columns and 8 rows, a
// lane's 16 bytes are (k 2t 2t+1, 2t+8 2t+9) of the even block, then of the odd one.
__device__ __forceinline__ void stage_x(const LinearArgs& a, uint32_t to, uint32_t from,
                                        uint32_t count, uint32_t blocks) {
    const uint16_t* x = reinterpret_cast<const uint16_t*>(a.x);
    for (uint32_t item = threadIdx.x; item < count * 2 * blocks * 32; item += blockDim.x) {
        uint32_t lane = item % 32, block = item / 32 % blocks, pair = item / 32 / blocks;
        uint32_t row = block * 8 + lane / 4;
        uint32_t column = from * GRANULE + pair * 32 + lane % 4 * 2;
        uint32_t v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t k = column + i * 8;
            v[i] = 0;
            if (row < a.m && k < a.k)  // widths are even
                v[i] = *reinterpret_cast<const uint32_t*>(x + static_cast<uint64_t>(row) * a.ldx + k);
        }
        store_shared16(to + item * 16, make_uint4(v[0], v[1], v[2], v[3]));
    }
}

template <class W, int MB, int BLOCK>
__device__ __forceinline__ void step(const typename W::Raw& raw, uint32_t x,
                                     float (&sum)[MB][4]) {
    uint32_t even[4], odd[4];
    W::template fragment<BLOCK>(raw, even);
    W::template fragment<BLOCK + 1>(raw, odd);
#pragma unroll
    for (int b = 0; b < MB; b++) {
        uint4 v = load_shared16(x + (BLOCK / 2 * MB + b) * BLOCK_X);
        mma_bf16(sum[b], even, v.x, v.y);
        mma_bf16(sum[b], odd, v.z, v.w);
    }
}

// The sums of all eight blocks, in order.
__device__ __forceinline__ float total(uint32_t at) {
    float part[SPLITS];
#pragma unroll
    for (int s = 0; s < SPLITS; s++) part[s] = load_peer(at, s);
    float sum = 0.0f;
#pragma unroll
    for (int s = 0; s < SPLITS; s++) sum += part[s];
    return sum;
}

template <class W, int MB>
__device__ __forceinline__ void product(const LinearArgs& a) {
    extern __shared__ __align__(16) uint8_t shared[];
    let_dependents_start();
    const uint32_t base = shared_address(shared);
    const uint32_t warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t split = cluster_rank();
    const uint32_t cluster = blockIdx.x / SPLITS, clusters = gridDim.x / SPLITS;
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
    const uint32_t first = split_first(split, granules);
    const uint32_t mine = split_first(split + 1, granules) - first;
    const uint32_t tiles = (a.n + TILE - 1) / TILE;
    const uint32_t at_x = base + Layout<W>::x(warps);
    const uint32_t at_partial = base + Layout<W>::partial(warps, a.chunk, MB);
    const uint32_t height = warps * TILE, pitch = height + 4;

    const uint32_t ring = base + warp * Layout<W>::RING + lane * 16;
    const uint32_t top_tile = cluster * warps + warp, stride = clusters * warps;
    const uint64_t start = static_cast<uint64_t>(top_tile) * granules + first;
    Feeder<W> feeder;
    feeder.codes = reinterpret_cast<const uint8_t*>(a.weight) + start * GRANULE_CODES<W> + lane * 16;
    feeder.scales = reinterpret_cast<const uint8_t*>(a.block_scale) + start * W::SCALES + lane / 4 * 8;
    feeder.jump = static_cast<uint64_t>(stride) * granules - mine;
    feeder.left = feeder.stages = mine * STAGES<W>;
    feeder.tiles = mine && top_tile < tiles ? (tiles - 1 - top_tile) / stride + 1 : 0;
    feeder.slot = {ring, ring + Layout<W>::RING};
    Cursor<W> slot = feeder.slot;
#pragma unroll
    for (int i = 0; i < W::DEPTH - 1; i++) feeder.feed();

    wait_for_inputs();
    const bool whole = mine <= a.chunk;  // x stays for all tiles
    if (whole) {
        stage_x(a, at_x, first, mine, MB);
        __syncthreads();
    }

    for (uint32_t group = cluster; group * warps < tiles; group += clusters) {
        const uint32_t tile = group * warps + warp;
        float sum[MB][4] = {};
        for (uint32_t from = 0; from < mine; from += a.chunk) {
            const uint32_t count = min(a.chunk, mine - from);
            if (!whole) {
                __syncthreads();
                stage_x(a, at_x, first + from, count, MB);
                __syncthreads();
            }
            if (tile >= tiles) continue;
            uint32_t x = at_x + lane * 16;
            for (uint32_t i = 0; i < count * STAGES<W>; i++) {
                copy_wait<W::DEPTH - 2>();
                const typename W::Raw raw = W::read(slot.at, slot.at + W::CODES);
                slot.advance();
                feeder.feed();  // into the slot read one turn ago
                step<W, MB, 0>(raw, x, sum);
                if (W::BLOCKS == 4) step<W, MB, W::BLOCKS - 2>(raw, x, sum);
                x += W::BLOCKS / 2 * MB * BLOCK_X;
            }
        }

        if (group != cluster) cluster_wait();  // all have read the last group's sums
#pragma unroll
        for (int b = 0; b < MB; b++) {
            uint32_t row = warp * TILE + lane / 4, m = b * 8 + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t at = at_partial + ((m + i % 2) * pitch + row + i / 2 * 8) * 4;
                store_shared4(at, sum[b][i]);
            }
        }
        cluster_arrive();
        cluster_wait();
        // Each block finishes an eighth.
        const uint32_t top = group * height;
        if (a.epilogue == EPILOGUE_GATED) {
            for (uint32_t i = split * blockDim.x + threadIdx.x; i < height / 2 * a.m;
                 i += SPLITS * blockDim.x) {
                uint32_t m = i / (height / 2), j = i % (height / 2);
                uint32_t row = j / 8 * 16 + j % 8;
                if (top + row + 8 >= a.n) continue;
                uint32_t at = at_partial + (m * pitch + row) * 4;
                finish_gated(a, total(at), total(at + 32), m, top + row);
            }
        } else {
            for (uint32_t i = split * blockDim.x + threadIdx.x; i < height * a.m;
                 i += SPLITS * blockDim.x) {
                uint32_t m = i / height, row = i % height;
                if (top + row >= a.n) continue;
                finish(a, total(at_partial + (m * pitch + row) * 4), m, top + row);
            }
        }
        cluster_arrive();
    }
    copy_wait<0>();
    // No block leaves while another reads its sums. Clusters without a group never arrived.
    if (cluster * warps < tiles) cluster_wait();
}

}  // namespace

#define LINEAR(name, form, blocks, at_least)                                     \
    extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1)                    \
        __launch_bounds__(256, at_least) name(const __grid_constant__ LinearArgs a) { \
        product<form, blocks>(a);                                                \
    }

LINEAR(linear_bf16_m8, WeightsBf16, 1, 3)
LINEAR(linear_bf16_m16, WeightsBf16, 2, 3)
LINEAR(linear_bf16_m32, WeightsBf16, 4, 2)
LINEAR(linear_bf16_m64, WeightsBf16, 8, 2)
LINEAR(linear_fp8_m8, WeightsFp8, 1, 3)
LINEAR(linear_fp8_m16, WeightsFp8, 2, 3)
LINEAR(linear_fp8_m32, WeightsFp8, 4, 2)
LINEAR(linear_fp8_m64, WeightsFp8, 8, 2)
LINEAR(linear_nvfp4_m8, WeightsNvfp4, 1, 3)
LINEAR(linear_nvfp4_m16, WeightsNvfp4, 2, 3)
LINEAR(linear_nvfp4_m32, WeightsNvfp4, 4, 2)
LINEAR(linear_nvfp4_m64, WeightsNvfp4, 8, 2)
