// y = x W^T for 1 to 64 rows of x: the weights stream past once, whatever the number of rows.
//
// Floor: n k bytes-per-weight / read bandwidth. x and y are thousandths of that. On an H200
// (4.51 TB/s) the gate/up product of 31B, 43008 x 5376 bf16, takes 102.5 us.
//
// A cluster of eight blocks owns tiles of 16 rows of W; block s of it walks split s of K
// (weights.cuh), so a block needs an eighth of x and keeps it in shared memory for all its tiles.
// Warps have roles, and nobody ever waits for a whole block:
//   multipliers   each has its own tiles and its own ring in shared memory. A lane copies ahead what
//                 it reads itself, so some 100 KB of weights are under way in every multiprocessor
//   x's feeders   bring x, once, or in turns of two slots where an eighth of it is too large
//   finishers     a tile's eight sums are sent to one block of the cluster (tiles take turns), whose
//                 finishers add them in order of s and store the result
// The weights do not depend on the kernel before: rings fill while it still runs.
// The rows of x ride along the 8-wide side of the mma, so one row's bits cannot depend on another
// row or on how many there are.
#include "epilogue.cuh"
#include "weights.cuh"

namespace {

// MB: rows of x in eights. GROUPS: on cards with groups of warps (wgmma), four warps give the matrix
// unit their tiles together.
template <class Weights, int ROWS, int MULTIPLIERS, bool GROUPS>
struct Shape {
    using W = Weights;
    static constexpr int MB = ROWS, WARPS = MULTIPLIERS;
#ifdef WARPGROUPS
    static constexpr bool GROUPED = GROUPS;
#else
    static constexpr bool GROUPED = false;
#endif
    // Tiles whose sums may be under way to a block: its cluster's blocks may run apart. With many rows
    // the room is worth more as stages of the rings.
    static constexpr int INBOXES = MB == 1 ? 6 : 2;
    // A warp has some microseconds for its part of a tile's results, and for its copies of x.
    static constexpr int FINISHERS = MB < 8 ? MB : 4, FEEDERS = MB <= 2 ? 1 : 2;
    static constexpr int THREADS = (WARPS + FEEDERS + FINISHERS) * 32;
    static constexpr int GRANULES = 2048 / GRANULE_CODES<W>;  // of a stage
    static constexpr int SCALES_AT = GRANULES * GRANULE_CODES<W>;
    static constexpr int STAGE = SCALES_AT + GRANULES * W::SCALES;
    // A granule of x: rows of 128 bytes whose 16-byte chunks are permuted by the row.
    static constexpr int X_GRANULE = MB * 8 * GRANULE * 2;
    static constexpr int SUMS = MB * 512;  // bytes of a tile's sums of one split
    static constexpr int INBOX = SPLITS * SUMS;
    // One warp sends all that goes to the same inbox of the same block: its turns are in order.
    static_assert(SPLITS * INBOXES % WARPS == 0, "an inbox has one sender in a block");
};

// Where a block's parts lie in shared memory, and its share of the work.
template <class S>
struct Work {
    uint32_t rank, cluster, clusters;
    uint32_t granules, first, mine;  // of K: all, and this block's
    uint32_t units;                  // tiles of W that are this cluster's
    uint32_t chunk;                  // granules of x in a slot
    bool resident;                   // x comes once and stays
    uint32_t x_full, x_empty, inbox_full, inbox_free;  // barriers
    uint32_t depth, ring_bytes;  // stages of a warp's ring; its size
    uint32_t ring, x, inbox;

    __device__ __forceinline__ Work(const LinearArgs& a, uint32_t base) {
        rank = cluster_rank();
        cluster = blockIdx.x / SPLITS;
        clusters = gridDim.x / SPLITS;
        granules = (a.k + GRANULE - 1) / GRANULE;
        first = split_first(rank, granules);
        mine = split_first(rank + 1, granules) - first;
        const uint32_t all = (a.n + TILE - 1) / TILE;
        units = cluster < all ? (all - 1 - cluster) / clusters + 1 : 0;
        chunk = a.chunk;
        resident = chunk * SPLITS >= granules;
        depth = a.depth;
        ring_bytes = depth * S::STAGE;
        x = base;
        inbox = x + (resident ? 1 : 2) * chunk * S::X_GRANULE;
        ring = inbox + S::INBOXES * S::INBOX;
        x_full = ring + S::WARPS * ring_bytes;
        x_empty = x_full + 16;
        inbox_full = x_empty + 16;
        inbox_free = inbox_full + S::INBOXES * 8;
    }

    // The tile that is this cluster's unit.
    __device__ __forceinline__ uint32_t tile(uint32_t unit) const { return unit * clusters + cluster; }
    __device__ __forceinline__ uint32_t rounds() const { return (units + S::WARPS - 1) / S::WARPS; }
};

// Fills a warp's ring, stage by stage, over all its units.
template <class S>
struct Feeder {
    using W = typename S::W;
    const uint8_t *codes, *scales;  // this lane's, of granule 0
    uint32_t at, jump;              // the next granule; from the end of a unit's part to the next one's
    uint32_t unit, left, slot;      // granules of the unit to come
    uint64_t once;                  // weights are read once: L2 keeps what is read again

    __device__ __forceinline__ Feeder(const LinearArgs& a, const Work<S>& w, uint32_t warp) {
        const uint32_t lane = threadIdx.x % 32;
        codes = reinterpret_cast<const uint8_t*>(a.weight) + lane * 16;
        scales = reinterpret_cast<const uint8_t*>(a.block_scale) + lane * 16;
        at = w.tile(warp) * w.granules + w.first;
        jump = S::WARPS * w.clusters * w.granules - w.mine;
        unit = w.mine ? warp : w.units;
        left = w.mine;
        slot = w.ring + warp * w.ring_bytes + lane * 16;
        if (!W::SCALES) once = read_once();
    }

    __device__ __forceinline__ void feed(const Work<S>& w, uint32_t warp) {
        if (unit < w.units) {
            const uint32_t lane = threadIdx.x % 32;
            const uint32_t count = min(static_cast<uint32_t>(S::GRANULES), left);
            const uint64_t granule = at;
            const uint8_t* from = codes + granule * GRANULE_CODES<W>;
#pragma unroll
            for (int i = 0; i < 2048; i += 512)
                if (i == 0 || i < count * GRANULE_CODES<W>) {
                    if (W::SCALES)
                        copy_async16(slot + i, from + i);
                    else
                        copy_async16_once(slot + i, from + i, once);
                }
            if (W::SCALES && lane * 16 < count * W::SCALES)
                copy_async16(slot + S::SCALES_AT, scales + granule * W::SCALES);
            slot += S::STAGE;
            if (slot >= w.ring + (warp + 1) * w.ring_bytes) slot -= w.ring_bytes;
            at += count;
            left -= count;
            if (left == 0) {
                left = w.mine;
                unit += S::WARPS;
                at += jump;
            }
        }
        copy_commit();
    }
};

// Until the oldest of `depth` stages is there.
__device__ __forceinline__ void await_stage(uint32_t depth) {
    if (depth == 5)
        copy_wait<4>();
    else if (depth == 4)
        copy_wait<3>();
    else if (depth == 3)
        copy_wait<2>();
    else
        copy_wait<1>();
}

// COUNT or fewer granules of a tile by all rows of x. The slot is free, and filled again, as soon
// as its bytes are in registers.
template <class S, int COUNT>
__device__ __forceinline__ void stage_step(const Work<S>& w, uint32_t warp, Feeder<S>& feeder,
                                           uint32_t stage, uint32_t x, float (&sum)[S::MB][4],
                                           uint32_t count) {
    using W = typename S::W;
    constexpr int MB = S::MB;
    const uint32_t lane = threadIdx.x % 32;
    constexpr bool LATE = MB == 8;  // the sums leave no registers for a whole stage
    typename W::Raw raw[COUNT * STAGES<W>];
    const auto read = [&](int i) {
        raw[i] = W::read(stage + i * W::CODES + lane * 16,
                         stage + S::SCALES_AT + i * W::SCALES + lane / 4 * 8);
    };
    if (!LATE) {
#pragma unroll
        for (int i = 0; i < COUNT * STAGES<W>; i++) read(i);
        if (W::SCALES) __syncwarp();  // lanes read scales that others copied
        feeder.feed(w, warp);
    }
#pragma unroll
    for (int i = 0; i < COUNT * STAGES<W>; i++) {
        if (COUNT > 1 && i >= count) break;
        if (LATE) read(i);
#pragma unroll
        for (int pair = 0; pair < W::BLOCKS / 2; pair++) {
            uint32_t even[4], odd[4];
            if (pair == 0) {
                W::template fragment<0>(raw[i], even);
                W::template fragment<1>(raw[i], odd);
            } else {
                W::template fragment<W::BLOCKS - 2>(raw[i], even);
                W::template fragment<W::BLOCKS - 1>(raw[i], odd);
            }
#pragma unroll
            for (int b = 0; b < MB; b++) {
                uint32_t v[4];
                // Every second pair of blocks is the other half of a row.
                const int half = i * W::BLOCKS / 2 + pair;
                load_matrix4(v, (x ^ half % 2 * 64) + half / 2 * S::X_GRANULE + b * 1024);
                mma_bf16(sum[b], even, v[0], v[1]);
                mma_bf16(sum[b], odd, v[2], v[3]);
            }
        }
    }
    if (LATE) {
        if (W::SCALES) __syncwarp();
        feeder.feed(w, warp);
    }
}

#ifdef WARPGROUPS
// `count` granules of a warp's tile by all rows of x, which `x` describes from the first granule on, by
// the matrix unit. While it has a granule, the next one's fragments are made.
template <class S>
__device__ __forceinline__ void chunk_grouped(const Work<S>& w, uint32_t warp, Feeder<S>& feeder,
                                              uint32_t& slot, uint64_t x, float (&sum)[S::MB][4],
                                              uint32_t count) {
    using W = typename S::W;
    constexpr int G = S::GRANULES, READS = STAGES<W>, TURN = G < 2 ? 2 : G;
    static_assert(TURN % 2 == 0, "fragments take turns");
    typename W::Raw raw[G][READS];
    uint32_t f[2][4][4];
    const auto read = [&] {
        await_stage(w.depth);
        if (W::SCALES) __syncwarp();  // lanes read scales that others copied
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t stage = w.ring + warp * w.ring_bytes + slot * S::STAGE;
#pragma unroll
        for (int i = 0; i < G * READS; i++)
            raw[i / READS][i % READS] =
                W::read(stage + i * W::CODES + lane * 16,
                        stage + S::SCALES_AT + i * W::SCALES + lane / 4 * 8);
        if (W::SCALES) __syncwarp();
        feeder.feed(w, warp);
        slot = slot + 1 == w.depth ? 0 : slot + 1;
    };
    const auto expand = [](const typename W::Raw (&r)[READS], uint32_t (&to)[4][4]) {
        W::template fragment<0>(r[0], to[0]);
        W::template fragment<1>(r[0], to[1]);
        W::template fragment<W::BLOCKS - 2>(r[READS - 1], to[2]);
        W::template fragment<W::BLOCKS - 1>(r[READS - 1], to[3]);
    };
    if (count == 0) return;
    read();
    expand(raw[0], f[0]);
#pragma unroll 1
    for (uint32_t from = 0; from < count; from += TURN) {
#pragma unroll
        for (int i = 0; i < TURN; i++) {
            if (from + i >= count) break;
            matrix_begin();
#pragma unroll
            for (int block = 0; block < 4; block++) matrix_bf16(sum, f[i % 2][block], x + block * 2);
            matrix_commit();
            x += S::X_GRANULE >> 4;
            if (from + i + 1 < count) {
                if ((i + 1) % G == 0) read();
                expand(raw[(i + 1) % G], f[(i + 1) % 2]);
            }
            matrix_wait<0>();
        }
    }
}
#endif

template <class S>
__device__ __forceinline__ void multiply(const LinearArgs& a, const Work<S>& w, uint32_t warp) {
    using W = typename S::W;
    constexpr int MB = S::MB, INBOXES = S::INBOXES;
    const uint32_t lane = threadIdx.x % 32;
    Feeder<S> feeder(a, w, warp);
#pragma unroll 1
    for (uint32_t i = 0; i < w.depth; i++) feeder.feed(w, warp);
    cluster_wait();

    // Where ldmatrix begins: row lane % 8, chunk lane / 8.
    const uint32_t x_lane = w.x + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    const uint32_t ring = w.ring + warp * w.ring_bytes;
    uint32_t slot = 0, chunks = 0;
    for (uint32_t round = 0; round < w.rounds(); round++) {
        const uint32_t unit = round * S::WARPS + warp;
        const bool busy = unit < w.units;
        // A group works while any of its warps has a tile; what the others add is never sent.
        const bool works = S::GROUPED ? unit - warp % 4 < w.units : busy;
        if (!works && w.resident) break;
        float sum[MB][4] = {};
        for (uint32_t from = 0; from < w.mine; from += w.chunk) {
            const uint32_t x_slot = w.resident ? 0 : chunks % 2;
            if (!w.resident || round == 0) {
                barrier_wait(w.x_full + x_slot * 8, chunks / 2 % 2);
                if (S::GROUPED) fence_for_matrix_unit();
            }
            const uint32_t x = x_slot * w.chunk * S::X_GRANULE;
            const uint32_t count = works ? min(w.chunk, w.mine - from) : 0;
#ifdef WARPGROUPS
            if constexpr (S::GROUPED)
                chunk_grouped(w, warp, feeder, slot, matrix_rows(w.x + x), sum, count);
            else
#endif
                for (uint32_t i = 0; i < count; i += S::GRANULES) {
                    await_stage(w.depth);
                    if (W::SCALES) __syncwarp();
                    stage_step<S, S::GRANULES>(w, warp, feeder, ring + slot * S::STAGE,
                                               x_lane + x + i * S::X_GRANULE, sum, count - i);
                    slot = slot + 1 == w.depth ? 0 : slot + 1;
                }
            if (!w.resident) {
                __syncwarp();
                if (lane == 0) barrier_arrive(w.x_empty + x_slot * 8);
                chunks++;
            }
        }
        if (!busy) continue;
        const uint32_t owner = unit % SPLITS, turn = unit / SPLITS, inbox = turn % INBOXES;
        if (turn >= INBOXES)
            barrier_wait_peers(w.inbox_free + (owner * INBOXES + inbox) * 8, (turn / INBOXES - 1) % 2);
        const uint32_t barrier = peer_address(w.inbox_full + inbox * 8, owner);
        const uint32_t to =
            peer_address(w.inbox + inbox * S::INBOX + w.rank * S::SUMS + lane * 16, owner);
#pragma unroll
        for (int b = 0; b < MB; b++) send16(to + b * 512, sum[b], barrier);
    }
}

// Brings a feeder's rows of this block's columns of x.
template <class S>
__device__ __forceinline__ void feed_x(const LinearArgs& a, const Work<S>& w, uint32_t feeder) {
    constexpr uint32_t ROWS = S::MB * 8 / S::FEEDERS;
    const uint32_t lane = threadIdx.x % 32, first = feeder * ROWS;
    const uint16_t* rows =
        reinterpret_cast<const uint16_t*>(a.x) + static_cast<uint64_t>(first) * a.ldx;
    const uint32_t count = a.m > first ? min(a.m - first, ROWS) : 0;
    wait_for_inputs();
    const uint32_t rounds = w.resident ? min(1u, w.units) : w.rounds();
    uint32_t chunks = 0;
    for (uint32_t round = 0; round < rounds; round++)
        for (uint32_t from = 0; from < w.mine; from += w.chunk) {
            const uint32_t slot = chunks % 2, barrier = w.x_full + slot * 8;
            if (chunks >= 2) barrier_wait(w.x_empty + slot * 8, (chunks / 2 - 1) % 2);
            const uint32_t pieces = min(w.chunk, w.mine - from) * GRANULE / 8;
            const uint32_t column = (w.first + from) * GRANULE;
            // Few instructions a copy: a warp must not keep the others waiting.
            for (uint32_t i = lane; i < pieces; i += 32) {
                // Past k the weights are zero, and only zero times zero is safely zero.
                const uint32_t k = column + i * 8, bytes = k < a.k ? 16 : 0;
                const uint16_t* x = rows + (bytes ? k : 0);
                const uint32_t to =
                    w.x + (slot * w.chunk + i / 8) * S::X_GRANULE + first * 128 + i % 8 * 16;
#pragma unroll
                for (uint32_t row = 0; row < ROWS; row++) {
                    if (row >= count) break;
                    copy_async16((to ^ row % 8 * 16) + row * 128, x, bytes);
                    x += a.ldx;
                }
            }
            barrier_arrive_copied(barrier);
            chunks++;
        }
    copy_wait<0>();
    cluster_wait();
}

// Adds the sums of this block's tiles and stores the results.
template <class S>
__device__ __forceinline__ void finish_tiles(const LinearArgs& a, const Work<S>& w,
                                             uint32_t finisher) {
    constexpr int INBOXES = S::INBOXES;
    const uint32_t lane = threadIdx.x % 32;
    wait_for_inputs();
    cluster_wait();
    for (uint32_t turn = 0;; turn++) {
        const uint32_t unit = turn * SPLITS + w.rank;
        if (unit >= w.units) return;
        const uint32_t row = w.tile(unit) * TILE + lane / 4;
        const float scale = row_scale(a, row), scale_below = row_scale(a, row + 8);
        const uint32_t inbox = turn % INBOXES, barrier = w.inbox_full + inbox * 8;
        if (finisher == 0 && lane == 0) barrier_expect(barrier, S::INBOX);
        barrier_wait_peers(barrier, turn / INBOXES % 2);
        constexpr int MINE = S::MB / S::FINISHERS;
        float total[MINE][4] = {};
#pragma unroll
        for (int b = 0; b < MINE; b++) {
            const uint32_t from = w.inbox + inbox * S::INBOX + (b * S::FINISHERS + finisher) * 512;
#pragma unroll
            for (int s = 0; s < SPLITS; s++) {
                const uint4 part = load_shared16(from + s * S::SUMS + lane * 16);
                total[b][0] += __uint_as_float(part.x);
                total[b][1] += __uint_as_float(part.y);
                total[b][2] += __uint_as_float(part.z);
                total[b][3] += __uint_as_float(part.w);
            }
        }
        __syncwarp();
        // Nobody waits for word of the last ones.
        if (lane < SPLITS && unit + INBOXES * SPLITS < w.units)
            barrier_arrive_peer(
                peer_address(w.inbox_free + (w.rank * INBOXES + inbox) * 8, lane));
#pragma unroll
        for (int b = 0; b < MINE; b++)
            finish_four(a, total[b], scale, scale_below,
                        (b * S::FINISHERS + finisher) * 8 + lane % 4 * 2, row);
    }
}

template <class S>
__device__ __forceinline__ void product(const LinearArgs& a) {
    constexpr uint32_t WARPS = S::WARPS, INBOXES = S::INBOXES;
    extern __shared__ __align__(1024) uint8_t shared[];
    let_dependents_start();
    const Work<S> w(a, shared_address(shared));
    const uint32_t warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < 2; i++) {
            barrier_init(w.x_full + i * 8, 32 * S::FEEDERS);
            barrier_init(w.x_empty + i * 8, WARPS);
        }
        for (uint32_t i = 0; i < INBOXES; i++) barrier_init(w.inbox_full + i * 8, 1);
        for (uint32_t i = 0; i < SPLITS * INBOXES; i++)
            barrier_init(w.inbox_free + i * 8, S::FINISHERS);
        barriers_ready();
    }
    __syncthreads();
    cluster_arrive();
    if (warp < WARPS)
        multiply<S>(a, w, warp);
    else if (warp < WARPS + S::FEEDERS)
        feed_x<S>(a, w, warp - WARPS);
    else
        finish_tiles<S>(a, w, warp - WARPS - S::FEEDERS);
    // No block leaves while another sends to it. All it was sent it has waited for: sums as it finished
    // their tiles, word of a free inbox before it sent the next.
    __syncwarp();
    cluster_arrive();
    cluster_wait();
}

}  // namespace

// Two blocks share a multiprocessor where it has the memory for them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int BESIDE = 1;
#else
constexpr int BESIDE = 2;
#endif

// Rows of x and warps are mirrored in abi/linear.rs.
#define LINEAR(name, form, blocks, warps, groups, at_least)                                    \
    extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1)                                  \
        __launch_bounds__(Shape<form, blocks, warps, groups>::THREADS, at_least)                  \
            name(const __grid_constant__ LinearArgs a) {                                       \
        product<Shape<form, blocks, warps, groups>>(a);                                 \
    }

LINEAR(linear_bf16_m8, WeightsBf16, 1, 12, false, BESIDE)
LINEAR(linear_bf16_m16, WeightsBf16, 2, 8, false, BESIDE)
LINEAR(linear_bf16_m32, WeightsBf16, 4, 8, true, 1)
LINEAR(linear_bf16_m64, WeightsBf16, 8, 8, true, 1)
LINEAR(linear_fp8_m8, WeightsFp8, 1, 12, false, BESIDE)
LINEAR(linear_fp8_m16, WeightsFp8, 2, 8, false, BESIDE)
LINEAR(linear_fp8_m32, WeightsFp8, 4, 8, true, 1)
LINEAR(linear_fp8_m64, WeightsFp8, 8, 8, true, 1)
LINEAR(linear_nvfp4_m8, WeightsNvfp4, 1, 12, false, BESIDE)
LINEAR(linear_nvfp4_m16, WeightsNvfp4, 2, 8, false, BESIDE)
LINEAR(linear_nvfp4_m32, WeightsNvfp4, 4, 8, true, 1)
LINEAR(linear_nvfp4_m64, WeightsNvfp4, 8, 8, true, 1)
