// y = x W^T for many rows of x: the same sums as the unit linear, bit for bit.
//
// Floor: 2 m n k operations over the rate of bf16 products (some 790 TFLOP/s on an H200); below some
// 200 rows a card, the weights' bytes over the read bandwidth.
//
// A block computes 128 rows of W by 128 rows of x, tile after tile. Both come through a ring in
// shared memory, one granule of 64 columns a stage. The order of K is that of weights.cuh: within a
// split one chain of matrix instructions that starts at zero, after it the chain is added to the
// total. The operands keep their sides (W is A, x is B), so every multiply-add is the one that the
// small kernel does.
//
// On Hopper (wgmma) two groups of four warps multiply, 64 rows of W each; a third group feeds the
// ring, also with the next tile's granules while results are stored. W goes through registers, where
// quantised weights become bf16, and x stays in shared memory. A chain of wgmma.m64n128k16 has the
// bits of a chain of mma.m16n8k16 (the lab program checks it). Elsewhere eight warps use mma.sync.
#include "epilogue.cuh"
#include "weights.cuh"

namespace {

constexpr int BLOCK_M = 128, BLOCK_TILES = 8;
constexpr int X_STAGE = BLOCK_M * GRANULE * 2;
constexpr int PANEL = 16;  // blocks of m that share the sweep over n: their x stays in L2
constexpr uint32_t MULTIPLIERS = 256, FEEDERS = 128;  // threads

template <class W>
constexpr int W_STAGE = BLOCK_TILES * (GRANULE_CODES<W> + W::SCALES);
// Stages start where the permutation of x's chunks does.
template <class W>
constexpr int STAGE = X_STAGE + (W_STAGE<W> + 1023) / 1024 * 1024;

struct Place {
    uint32_t m, tile;  // first row of x; first tile of W
};

__device__ __forceinline__ uint32_t m_blocks(const LinearArgs& a) {
    return (a.m + BLOCK_M - 1) / BLOCK_M;
}
__device__ __forceinline__ uint32_t n_blocks(const LinearArgs& a) {
    return (a.n + BLOCK_TILES * TILE - 1) / (BLOCK_TILES * TILE);
}

__device__ __forceinline__ Place place(const LinearArgs& a, uint32_t number) {
    const uint32_t wide = PANEL * n_blocks(a);
    uint32_t panel = number / wide, r = number % wide;
    uint32_t height = min(static_cast<uint32_t>(PANEL), m_blocks(a) - panel * PANEL);
    return {(panel * PANEL + r % height) * BLOCK_M, r / height * BLOCK_TILES};
}

#ifdef WARPGROUPS

struct Ring {
    uint32_t full, empty, stages, depth;  // barriers, first stage, how many
    uint32_t slot = 0, parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == depth) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// A feeding thread's share of a tile: of x a piece of 16 bytes in every sixteenth row, of W pieces
// 2 KiB apart in a stage. Few instructions a copy: four warps must keep up with the matrix unit.
template <class W>
struct Share {
    static constexpr uint32_t LINES = GRANULE_CODES<W> / 16;       // pieces of a tile's granule
    static constexpr uint32_t STEP = FEEDERS / LINES;              // tiles from a piece to the next
    static constexpr uint32_t COPIES = BLOCK_TILES * LINES / FEEDERS;
    const uint8_t *x, *codes, *scales;
    uint64_t x_step, code_step;
    uint32_t rows, tiles, column;  // rows and tiles from this thread's first on; its column of x
    uint32_t to_x, to_codes;

    __device__ __forceinline__ Share(const LinearArgs& a, Place at, uint32_t granules, uint32_t i) {
        const uint32_t row = i / 8, tile = at.tile + i / LINES, all = (a.n + TILE - 1) / TILE;
        column = i % 8 * 8;
        x = reinterpret_cast<const uint8_t*>(a.x) +
            (static_cast<uint64_t>(at.m + row) * a.ldx + column) * 2;
        x_step = static_cast<uint64_t>(a.ldx) * 16 * 2;
        rows = at.m + row < a.m ? a.m - at.m - row : 0;
        tiles = tile < all ? all - tile : 0;
        codes = reinterpret_cast<const uint8_t*>(a.weight) +
                static_cast<uint64_t>(tile) * granules * GRANULE_CODES<W> + i % LINES * 16;
        code_step = static_cast<uint64_t>(STEP) * granules * GRANULE_CODES<W>;
        to_x = row * 128 + (i % 8 ^ row % 8) * 16;
        to_codes = X_STAGE + i * 16;
        scales = nullptr;
        if (W::SCALES && at.tile + i / 4 < all && i < BLOCK_TILES * 4)
            scales = reinterpret_cast<const uint8_t*>(a.block_scale) +
                     static_cast<uint64_t>(at.tile + i / 4) * granules * W::SCALES + i % 4 * 16;
    }

    // The next granule.
    __device__ __forceinline__ void copy(const LinearArgs& a, uint32_t stage, uint32_t i) {
        const uint32_t there = column < a.k ? rows : 0;
        const uint8_t* from = x;
#pragma unroll
        for (uint32_t j = 0; j < BLOCK_M / 16; j++) {
            copy_async16(stage + to_x + j * 2048, from, there > j * 16 ? 16 : 0);
            from += x_step;
        }
        from = codes;
#pragma unroll
        for (uint32_t q = 0; q < COPIES; q++) {
            copy_async16(stage + to_codes + q * 2048, from, tiles > q * STEP ? 16 : 0);
            from += code_step;
        }
        if (W::SCALES && scales) {
            copy_async16(stage + X_STAGE + BLOCK_TILES * GRANULE_CODES<W> + i * 16, scales);
            scales += W::SCALES;
        }
        x += GRANULE * 2;
        codes += GRANULE_CODES<W>;
        column += GRANULE;
    }
};

// Brings granules of all tiles of this block, up to the ring's depth ahead. Each thread waits for
// its own copies, three stages late, and then tells the matrix unit.
template <class W>
__device__ __forceinline__ void feed(const LinearArgs& a, Ring ring) {
    const uint32_t i = threadIdx.x - MULTIPLIERS;
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
    constexpr uint32_t LATE = 3;
    uint32_t under_way = 0, late_slot = 0;
    const auto tell = [&] {
        fence_for_matrix_unit();
        barrier_arrive(ring.full + late_slot * 8);
        late_slot = late_slot + 1 == ring.depth ? 0 : late_slot + 1;
        under_way--;
    };
    for (uint32_t number = blockIdx.x; number < m_blocks(a) * n_blocks(a); number += gridDim.x) {
        Share<W> share(a, place(a, number), granules, i);
        for (uint32_t granule = 0; granule < granules; granule++) {
            barrier_wait(ring.empty + ring.slot * 8, ring.parity ^ 1);
            share.copy(a, ring.stages + ring.slot * STAGE<W>, i);
            copy_commit();
            ring.advance();
            if (++under_way > LATE) {
                copy_wait<LATE>();
                tell();
            }
        }
    }
    copy_wait<0>();
    while (under_way) tell();
}

// A warp's fragments of one granule.
template <class W>
__device__ __forceinline__ void read_fragments(uint32_t stage, uint32_t tile,
                                               uint32_t (&f)[4][4]) {
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t codes = stage + X_STAGE + tile * GRANULE_CODES<W> + lane * 16;
    const uint32_t scales = stage + X_STAGE + BLOCK_TILES * GRANULE_CODES<W> + tile * W::SCALES +
                            lane / 4 * 8;
#pragma unroll
    for (int s = 0; s < STAGES<W>; s++) {
        const typename W::Raw raw = W::read(codes + s * W::CODES, scales);
        W::template fragment<0>(raw, f[s * W::BLOCKS]);
        W::template fragment<1>(raw, f[s * W::BLOCKS + 1]);
        if (W::BLOCKS == 4) {
            W::template fragment<W::BLOCKS - 2>(raw, f[2]);
            W::template fragment<W::BLOCKS - 1>(raw, f[3]);
        }
    }
}

// One granule: the matrix unit is given `now`; while it works, the next granule's fragments are made.
// Where the unit then waits for this group of warps, the other one keeps it busy.
template <class W>
__device__ __forceinline__ void granule_step(Ring& ring, uint32_t (&now)[4][4],
                                             uint32_t (&next)[4][4], bool more,
                                             float (&sum)[16][4]) {
    const uint32_t empty = ring.empty + ring.slot * 8;
    const uint64_t rows = matrix_rows(ring.stages + ring.slot * STAGE<W>);
    matrix_begin();
#pragma unroll
    for (int block = 0; block < 4; block++) matrix_bf16(sum, now[block], rows + block * 2);
    matrix_commit();
    ring.advance();
    if (more) {
        barrier_wait(ring.full + ring.slot * 8, ring.parity);
        read_fragments<W>(ring.stages + ring.slot * STAGE<W>, threadIdx.x / 32, next);
    }
    matrix_wait<0>();
    // Every lane for its own reads: as fast as one lane for the warp, and racecheck can follow it. All at
    // once: without the barrier the products of bf16 took seven per cent longer.
    __syncwarp();
    barrier_arrive(empty);
}

constexpr uint32_t LINE = 64 * 2 + 16;  // bytes of a row of x's results, of one group
constexpr uint32_t RESULTS = BLOCK_M * LINE;

// A group's 64 by 128 results go through shared memory, so that whole lines leave.
__device__ __forceinline__ void store_results(const LinearArgs& a, Place at, uint32_t results,
                                              const float (&total)[16][4]) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    const uint32_t group = threadIdx.x / 128, i = threadIdx.x % 128;
    const uint32_t row = (at.tile + group * 4 + warp) * TILE + lane / 4;
    const float scale = row_scale(a, row), scale_below = row_scale(a, row + 8);
    const uint32_t to =
        results + (lane / 16 * 8 + lane % 8) * LINE + warp * 32 + lane / 8 % 2 * 16;
    group_barrier(group);  // the results before are gone
#pragma unroll
    for (int j = 0; j < 16; j += 2) {
        const uint32_t r[4] = {
            pack_bf16(total[j][0] * scale, total[j][1] * scale),
            pack_bf16(total[j][2] * scale_below, total[j][3] * scale_below),
            pack_bf16(total[j + 1][0] * scale, total[j + 1][1] * scale),
            pack_bf16(total[j + 1][2] * scale_below, total[j + 1][3] * scale_below)};
        store_matrix4_transposed(to + j * 8 * LINE, r);
    }
    group_barrier(group);
    const uint32_t top = (at.tile + group * 4) * TILE;
    if (a.epilogue == EPILOGUE_GATED) {
        for (uint32_t item = i; item < BLOCK_M * 4; item += 128) {
            const uint32_t m = item / 4, from = results + m * LINE + item % 4 * 32;
            if (at.m + m < a.m && top + item % 4 * 16 < a.n)
                finish_eight_gated(a, load_shared16(from), load_shared16(from + 16), at.m + m,
                                   top + item % 4 * 16);
        }
    } else {
        for (uint32_t item = i; item < BLOCK_M * 8; item += 128) {
            const uint32_t m = item / 8;
            if (at.m + m < a.m && top + item % 8 * 8 < a.n)
                finish_eight(a, load_shared16(results + m * LINE + item % 8 * 16), at.m + m,
                             top + item % 8 * 8);
        }
    }
}

// Sixteen rows of W a warp by all 128 rows of x.
template <class W>
__device__ __forceinline__ void multiply(const LinearArgs& a, Ring ring, uint32_t results) {
    const uint32_t warp = threadIdx.x / 32;
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
    for (uint32_t number = blockIdx.x; number < m_blocks(a) * n_blocks(a); number += gridDim.x) {
        const Place at = place(a, number);
        float total[16][4] = {}, sum[16][4] = {};
        uint32_t split = 0, end = split_first(1, granules);
        const auto close = [&](uint32_t done) {
            if (done != end) return;
#pragma unroll
            for (int i = 0; i < 64; i++) {
                total[i / 4][i % 4] += sum[i / 4][i % 4];
                sum[i / 4][i % 4] = 0.0f;
            }
            while (done == end && split < SPLITS - 1)  // empty splits add nothing
                end = split_first(++split + 1, granules);
        };
        while (end == 0) end = split_first(++split + 1, granules);
        uint32_t even[4][4], odd[4][4];
        barrier_wait(ring.full + ring.slot * 8, ring.parity);
        read_fragments<W>(ring.stages + ring.slot * STAGE<W>, warp, even);
        for (uint32_t granule = 0; granule < granules; granule += 2) {
            granule_step<W>(ring, even, odd, granule + 1 < granules, sum);
            close(granule + 1);
            if (granule + 1 == granules) break;
            granule_step<W>(ring, odd, even, granule + 2 < granules, sum);
            close(granule + 2);
        }
        store_results(a, at, results, total);
    }
}

template <class W>
__device__ __forceinline__ void product(const LinearArgs& a) {
    extern __shared__ __align__(1024) uint8_t shared[];
    let_dependents_start();
    const uint32_t base = shared_address(shared);
    const Ring ring = {base, base + 512, base + 1024, a.depth};
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < a.depth; i++) {
            barrier_init(ring.full + i * 8, FEEDERS);
            barrier_init(ring.empty + i * 8, MULTIPLIERS);
        }
        barriers_ready();
    }
    __syncthreads();
    wait_for_inputs();
    if (threadIdx.x >= MULTIPLIERS) {
        fewer_registers<56>();
        feed<W>(a, ring);
    } else {
        more_registers<224>();
        multiply<W>(a, ring, ring.stages + a.depth * STAGE<W> + threadIdx.x / 128 * RESULTS);
    }
}

#else

constexpr int RING = 3;

// A granule of x into a stage: rows 128 bytes apart, their 16-byte chunks permuted by the row, so
// that readers meet no bank twice.
__device__ __forceinline__ void fetch_x(const LinearArgs& a, Place at, uint32_t granule,
                                        uint32_t stage) {
    const uint32_t i = threadIdx.x, chunk = i % 8, k = granule * GRANULE + chunk * 8;
    const uint32_t bytes = k < a.k ? min(16u, (a.k - k) * 2) : 0;
    const uint16_t* x = reinterpret_cast<const uint16_t*>(a.x);
#pragma unroll 1
    for (uint32_t row = 0; row < BLOCK_M; row += MULTIPLIERS / 8) {
        const uint32_t r = row + i / 8, m = at.m + r;
        const uint32_t some = m < a.m ? bytes : 0;
        copy_async16(stage + r * 128 + (chunk ^ r % 8) * 16,
                     x + (some ? static_cast<uint64_t>(m) * a.ldx + k : 0), some);
    }
}

// A granule of W and x into a stage.
template <class W>
__device__ __forceinline__ void fetch(const LinearArgs& a, Place at, uint32_t granule,
                                      uint32_t granules, uint32_t stage) {
    const uint32_t i = threadIdx.x;
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(a.weight);
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(a.block_scale);
    const uint32_t tiles = (a.n + TILE - 1) / TILE;
    const uint32_t to = stage + X_STAGE;
    constexpr int LINES = GRANULE_CODES<W> / 16;
#pragma unroll 1  // registers are scarce
    for (uint32_t line = i; line < BLOCK_TILES * LINES; line += MULTIPLIERS) {
        const uint32_t tile = at.tile + line / LINES;
        const uint64_t from = static_cast<uint64_t>(min(tile, tiles - 1)) * granules + granule;
        copy_async16(to + line * 16, codes + from * GRANULE_CODES<W> + line % LINES * 16,
                     tile < tiles ? 16 : 0);
    }
    if (W::SCALES && i < BLOCK_TILES * W::SCALES / 16) {
        const uint32_t tile = at.tile + i / 4;
        const uint64_t from = static_cast<uint64_t>(min(tile, tiles - 1)) * granules + granule;
        copy_async16(to + BLOCK_TILES * GRANULE_CODES<W> + i * 16,
                     scales + from * W::SCALES + i % 4 * 16, tile < tiles ? 16 : 0);
    }
    fetch_x(a, at, granule, stage);
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

// The thread's number is asked for again: registers are scarce.
template <class W>
__device__ __forceinline__ void granule_step(uint32_t stage, float (&sum)[2][8][4]) {
    const uint32_t thread = thread_number(), lane = thread % 32;
    const uint32_t warp_n = thread / 32 % 4, warp_m = thread / 128;
    const uint32_t codes = stage + X_STAGE + warp_n * 2 * GRANULE_CODES<W> + lane * 16;
    const uint32_t scales = stage + X_STAGE + BLOCK_TILES * GRANULE_CODES<W> +
                            warp_n * 2 * W::SCALES + lane / 4 * 8;
    const uint32_t x_rows = stage + warp_m * 64 * 128;
#pragma unroll 1
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
__device__ __forceinline__ void one_tile(const LinearArgs& a, uint32_t number, uint32_t base) {
    const Place at = place(a, number);
    const uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
#pragma unroll
    for (int i = 0; i < RING - 1; i++) {
        if (i < granules) fetch<W>(a, at, i, granules, base + i * STAGE<W>);
        copy_commit();
    }
    float total[2][8][4] = {};
    float sum[2][8][4] = {};
    uint32_t split = 1;
    for (uint32_t granule = 0; granule < granules; granule++) {
        while (granule == split_first(split, granules)) {  // empty splits add nothing
#pragma unroll
            for (int i = 0; i < 64; i++) {
                (&total[0][0][0])[i] += (&sum[0][0][0])[i];
                (&sum[0][0][0])[i] = 0.0f;
            }
            split++;
        }
        copy_wait<RING - 2>();
        __syncthreads();  // this stage is whole, and all have left the one before
        uint32_t next = granule + RING - 1;
        if (next < granules)
            fetch<W>(a, at, next, granules, base + next % RING * STAGE<W>);
        copy_commit();
        granule_step<W>(base + granule % RING * STAGE<W>, sum);
    }
    copy_wait<0>();
    __syncthreads();  // the next tile fills the ring
    const Place to = place(a, number);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t warp_n = warp % 4, warp_m = warp / 4;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t row = (to.tile + warp_n * 2 + i) * TILE + lane / 4;
        const float scale = row_scale(a, row), scale_below = row_scale(a, row + 8);
#pragma unroll
        for (int j = 0; j < 8; j++) {
#pragma unroll
            for (int c = 0; c < 4; c++) total[i][j][c] += sum[i][j][c];
            finish_four(a, total[i][j], scale, scale_below,
                        to.m + warp_m * 64 + j * 8 + lane % 4 * 2, row);
        }
    }
}

template <class W>
__device__ __forceinline__ void product(const LinearArgs& a) {
    extern __shared__ __align__(128) uint8_t shared[];
    let_dependents_start();
    wait_for_inputs();
    if (threadIdx.x >= MULTIPLIERS) return;
    for (uint32_t number = blockIdx.x; number < m_blocks(a) * n_blocks(a); number += gridDim.x)
        one_tile<W>(a, number, shared_address(shared));
}

#endif

}  // namespace

#define LINEAR_LARGE(name, form)                                            \
    extern "C" __global__ void __launch_bounds__(MULTIPLIERS + FEEDERS, 1)  \
        name(const __grid_constant__ LinearArgs a) {                        \
        product<form>(a);                                                   \
    }

LINEAR_LARGE(linear_large_bf16, WeightsBf16)
LINEAR_LARGE(linear_large_fp8, WeightsFp8)
LINEAR_LARGE(linear_large_nvfp4, WeightsNvfp4)
