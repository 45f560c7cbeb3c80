// y = x W^T for many rows of x: the same sums as the unit linear, bit for bit.
//
// Floor: 2 m n k operations over the rate of bf16 mma.sync (about six tenths of wgmma's on Hopper);
// below some 200 rows a card, the weights' bytes over the read bandwidth.
//
// A block computes 128 rows of W by 128 rows of x, a warp 32 by 64. Both come through a ring in
// shared memory, one granule of 64 columns a stage. The order of K is that of weights.cuh: within
// a split one mma chain that starts at zero, after it the chain is added to the total. The operands
// keep their sides (W is A, x is B), so every multiply-add is the one that the small kernel does.
//
// Compiled for all targets; not yet run.
#include "epilogue.cuh"
#include "weights.cuh"

namespace {

constexpr int BLOCK_M = 128, BLOCK_TILES = 8, RING = 4;
constexpr int X_STAGE = BLOCK_M * GRANULE * 2;
constexpr int PANEL = 16;  // blocks of m that share the sweep over n: their x stays in L2

template <class W>
constexpr int W_STAGE = BLOCK_TILES * (GRANULE_CODES<W> + W::SCALES);

struct Place {
    uint32_t m, tile;  // first row of x; first tile of W
};

__device__ __forceinline__ Place place(const LinearArgs& a) {
    uint32_t m_blocks = (a.m + BLOCK_M - 1) / BLOCK_M;
    uint32_t n_blocks = (a.n + BLOCK_TILES * TILE - 1) / (BLOCK_TILES * TILE);
    uint32_t panel = blockIdx.x / (PANEL * n_blocks), r = blockIdx.x % (PANEL * n_blocks);
    uint32_t height = min(PANEL, m_blocks - panel * PANEL);
    return {(panel * PANEL + r % height) * BLOCK_M, r / height * BLOCK_TILES};
}

// One granule of W and x into a stage of the ring. Rows of x lie 128 bytes apart, their 16-byte
// chunks permuted by the row, so that ldmatrix meets no bank twice.
template <class W>
__device__ __forceinline__ void fetch(const LinearArgs& a, Place at, uint32_t granule,
                                      uint32_t granules, uint32_t stage) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(a.weight);
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(a.block_scale);
    const uint32_t tiles = (a.n + TILE - 1) / TILE;
    constexpr int LINES = GRANULE_CODES<W> / 16;
    for (uint32_t i = threadIdx.x; i < BLOCK_TILES * LINES; i += 256) {
        uint32_t tile = at.tile + i / LINES;
        uint64_t from = static_cast<uint64_t>(min(tile, tiles - 1)) * granules + granule;
        copy_async16(stage + i * 16, codes + from * GRANULE_CODES<W> + i % LINES * 16,
                     tile < tiles ? 16 : 0);
    }
    if (W::SCALES && threadIdx.x < BLOCK_TILES * W::SCALES / 16) {
        uint32_t tile = at.tile + threadIdx.x / 4;
        uint64_t from = static_cast<uint64_t>(min(tile, tiles - 1)) * granules + granule;
        copy_async16(stage + BLOCK_TILES * GRANULE_CODES<W> + threadIdx.x * 16,
                     scales + from * W::SCALES + threadIdx.x % 4 * 16, tile < tiles ? 16 : 0);
    }
    const uint16_t* x = reinterpret_cast<const uint16_t*>(a.x);
#pragma unroll
    for (int j = 0; j < X_STAGE / 16 / 256; j++) {
        uint32_t i = j * 256 + threadIdx.x, row = i / 8, chunk = i % 8;
        uint32_t k = granule * GRANULE + chunk * 8, m = at.m + row;
        uint32_t bytes = m < a.m && k < a.k ? min(16u, (a.k - k) * 2) : 0;
        copy_async16(stage + W_STAGE<W> + row * 128 + (chunk ^ row % 8) * 16,
                     x + (bytes ? static_cast<uint64_t>(m) * a.ldx + k : 0), bytes);
    }
}

template <class W, int BLOCK>
__device__ __forceinline__ void step(const typename W::Raw (&raw)[2], uint32_t kb, uint32_t x_rows,
                                     float (&sum)[2][8][4]) {
    const uint32_t lane = threadIdx.x % 32;
    uint32_t w[2][4];
    W::template fragment<BLOCK>(raw[0], w[0]);
    W::template fragment<BLOCK>(raw[1], w[1]);
#pragma unroll
    for (int j = 0; j < 4; j++) {
        uint32_t row = j * 16 + lane / 16 * 8 + lane % 8;
        uint32_t chunk = kb * 2 + lane / 8 % 2;
        uint32_t x[4];
        load_matrix4(x, x_rows + row * 128 + (chunk ^ lane % 8) * 16);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            mma_bf16(sum[i][2 * j], w[i], x[0], x[1]);
            mma_bf16(sum[i][2 * j + 1], w[i], x[2], x[3]);
        }
    }
}

template <class W>
__device__ __forceinline__ void granule_step(uint32_t stage, uint32_t warp_n, uint32_t warp_m,
                                             float (&sum)[2][8][4]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t codes = stage + warp_n * 2 * GRANULE_CODES<W> + lane * 16;
    const uint32_t scales =
        stage + BLOCK_TILES * GRANULE_CODES<W> + warp_n * 2 * W::SCALES + lane / 4 * 8;
    const uint32_t x_rows = stage + W_STAGE<W> + warp_m * 64 * 128;
#pragma unroll
    for (int s = 0; s < STAGES<W>; s++) {
        typename W::Raw raw[2];
        raw[0] = W::read(codes + s * W::CODES, scales);
        raw[1] = W::read(codes + GRANULE_CODES<W> + s * W::CODES, scales + W::SCALES);
        step<W, 0>(raw, s * W::BLOCKS, x_rows, sum);
        step<W, 1>(raw, s * W::BLOCKS + 1, x_rows, sum);
        if (W::BLOCKS == 4) {
            step<W, W::BLOCKS - 2>(raw, 2, x_rows, sum);
            step<W, W::BLOCKS - 1>(raw, 3, x_rows, sum);
        }
    }
}

template <class W>
__device__ __forceinline__ void product(const LinearArgs& a) {
    extern __shared__ __align__(128) uint8_t shared[];
    let_dependents_start();
    wait_for_inputs();
    const uint32_t base = shared_address(shared);
    constexpr int STAGE = W_STAGE<W> + X_STAGE;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t warp_n = warp % 4, warp_m = warp / 4;
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
    const Place at = place(a);

#pragma unroll
    for (int i = 0; i < RING - 1; i++) {
        if (i < granules) fetch<W>(a, at, i, granules, base + i * STAGE);
        copy_commit();
    }
    float total[2][8][4] = {};
    float sum[2][8][4] = {};
    uint32_t split = 0, end = split_first(1, granules);
    for (uint32_t granule = 0; granule < granules; granule++) {
        while (granule == end) {  // empty splits add nothing
#pragma unroll
            for (int i = 0; i < 64; i++) {
                (&total[0][0][0])[i] += (&sum[0][0][0])[i];
                (&sum[0][0][0])[i] = 0.0f;
            }
            split++;
            end = split_first(split + 1, granules);
        }
        copy_wait<RING - 2>();
        __syncthreads();  // this stage is whole, and all have left the one before
        uint32_t next = granule + RING - 1;
        if (next < granules) fetch<W>(a, at, next, granules, base + next % RING * STAGE);
        copy_commit();
        granule_step<W>(base + granule % RING * STAGE, warp_n, warp_m, sum);
    }
    copy_wait<0>();

#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t row = (at.tile + warp_n * 2 + i) * TILE + lane / 4;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint32_t m = at.m + warp_m * 64 + j * 8 + lane % 4 * 2;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float upper = total[i][j][c] + sum[i][j][c];
                float lower = total[i][j][c + 2] + sum[i][j][c + 2];
                if (m + c >= a.m) continue;
                if (a.epilogue == EPILOGUE_GATED) {
                    if (row + 8 < a.n) finish_gated(a, upper, lower, m + c, row);
                } else {
                    if (row < a.n) finish(a, upper, m + c, row);
                    if (row + 8 < a.n) finish(a, lower, m + c, row + 8);
                }
            }
        }
    }
}

}  // namespace

#define LINEAR_LARGE(name, form)                                            \
    extern "C" __global__ void __launch_bounds__(256, 1)                    \
        name(const __grid_constant__ LinearArgs a) {                        \
        product<form>(a);                                                   \
    }

LINEAR_LARGE(linear_large_bf16, WeightsBf16)
LINEAR_LARGE(linear_large_fp8, WeightsFp8)
LINEAR_LARGE(linear_large_nvfp4, WeightsNvfp4)
