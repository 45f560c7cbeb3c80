// Attention over paged keys and values: of the few rows of a step, or of a prompt's many.
//
// Floor: bytes of keys and values seen / read bandwidth. 31B at 50k tokens: a full layer reads
// 4 heads x 50,000 x 2 KiB = 410 MB, 91 us on an H200; partial results add 4 KiB per row, head and
// split, five per cent of that for five rows.
//
// A block takes one split (splits.cuh) of one KV head and all query vectors that read it, up to
// 16 Q of them: a row's heads of the group, and the rows of the sequence, so keys and values pass
// once. It walks the split in tiles of 32 keys, which come through a ring of shared memory, keys and
// values each by themselves, so that most of the ring is always under way. Scores: chunk i of 8
// elements of a head's lower half and chunk i of its upper half are the sixteen columns of a matrix
// instruction; warp p takes the chunks i = p, p + 8, ... in one chain (heads of 64 elements: four
// warps, p + 4), and the warps' sums are added in order of p. Then maximum, weights and their sum in
// one fixed tree, then the weighted values in one chain over the keys. What was summed so far is
// rescaled at every tile, never by vote. Keys that a row does not see weigh exactly zero and leave
// its sums as they are, so a row's bits do not depend on the rows beside it. A second kernel merges
// a row's own splits in order.
//
// Pages: [page][kv head][keys, then values][slot][element], bf16 or FP8; a page is a multiple of 32
// slots. Half the bytes in FP8: elements j and j + D/2 are a half word (codes.cuh), so that a register
// of codes is both halves of a chunk's fragment, of keys and of values alike. Sums are over the codes'
// numbers; the scale of what keys are made of multiplies a score, the scale of values the result.
// In a values-only layer (one projection for both) a page holds values alone, half the bytes, and
// keys are formed in registers: key = turn(norm weight x value), rounded once. An element and the
// partner it is turned with are in one lane, and every warp has as many elements that turn. The sines
// add 512 bytes a key, shared by all heads.
//
// Rows, tables and the keys of earlier steps do not depend on the kernels before: they are read while
// these still run.
#include "abi.cuh"
#include "codes.cuh"
#include "keys.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "splits.cuh"

namespace {

// D elements of a head, 16 Q vectors a block; V: values alone are stored; E: in FP8.
template <int D, int Q, bool V, bool E>
struct Layout {
    static constexpr int PITCH = E ? D : D * 2;
    static constexpr int TILE = TILE_KEYS * PITCH;  // keys or values
    // Mirrored in abi/attention.rs. In FP8 nearly as many bytes are under way.
    static constexpr int SLOTS = E          ? (D == 512 ? (Q == 1 ? 4 : 8) : D == 256 && Q == 3 ? 16 : 8)
                                 : D == 512 ? (Q == 1 ? 2 : 5)
                                 : D == 256 ? (Q == 1 ? 5 : 8)
                                            : 6;
    // Many vectors leave room for one block: it has twice the warps, where these have the registers.
    static constexpr bool TWICE = Q == 3 && (D == 256 || (D == 512 && !V && !E));
    static constexpr int WARPS = TWICE ? 16 : 8, THREADS = WARPS * 32;
    static constexpr int COLUMNS = D / WARPS;         // of the values, a warp
    static constexpr int VECTORS = 16 * Q;
    static constexpr int PARTS = D == 64 ? 4 : 8;     // warps that share a score
    static constexpr int HALVES = WARPS / PARTS;      // of a tile's keys: 1 if a warp takes both
    static constexpr int MINE = D / 16 / PARTS;       // pairs of chunks a warp has
    static constexpr int SCORE_PITCH = TILE_KEYS + 8;        // floats: four rows meet no bank twice
    static constexpr int WEIGHT_PITCH = TILE_KEYS * 2 + 16;  // bytes
    static constexpr int PART = VECTORS * SCORE_PITCH * 4;
    static constexpr int SCORES = SLOTS * TILE;
    static constexpr int WEIGHTS = SCORES + PARTS * PART;
    static constexpr int RESCALE = WEIGHTS + VECTORS * WEIGHT_PITCH;
    static constexpr int RANGES = RESCALE + VECTORS * 4;
    static constexpr int PAGES = RANGES + VECTORS * 8;
    static constexpr int WORK = PAGES + 1024 / TILE_KEYS * 4;
    static constexpr int BYTES = WORK + 48;
};

// What a block works on.
struct Work {
    uint32_t row, vectors, first;  // first row of the span; query vectors of it; this block's first
    uint32_t seq, head, group;
    uint32_t split;
    uint32_t low, high;  // keys that any of its vectors sees, inside the split; none: low >= high
};
static_assert(sizeof(Work) <= 48, "has room in shared memory");

// Rows of shared memory whose 16-byte chunks are permuted by the row.
template <int PITCH>
__device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
    return row * PITCH + (chunk ^ (PITCH < 128 ? row / 2 % 4 : row % 8)) * 16;
}

// The vector's row and its query head.
__device__ __forceinline__ uint2 place(const Work& w, uint32_t vector) {
    return make_uint2(w.row + vector / w.group, w.head * w.group + vector % w.group);
}

// Keys or values of a tile to a slot; `row` of the pages is the first.
template <int PITCH, int THREADS>
__device__ __forceinline__ void fetch_side(const AttentionArgs& a, const Work& w, uint32_t position,
                                           uint32_t row, uint32_t slot) {
    constexpr uint32_t CHUNKS = PITCH / 16, ALL = TILE_KEYS * CHUNKS;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(a.kv) +
                          static_cast<uint64_t>(row) * PITCH + threadIdx.x * 16;
    const uint32_t first = position - w.low, count = w.high - w.low;
#pragma unroll
    for (uint32_t j = 0; j < (ALL + THREADS - 1) / THREADS; j++) {
        const uint32_t i = j * THREADS + threadIdx.x, key = i / CHUNKS, chunk = i % CHUNKS;
        if (ALL < THREADS && i >= ALL) return;
        // Slots nobody sees may hold anything; as zeros they cannot make a NaN.
        copy_async16(slot + chunk_at<PITCH>(key, chunk), from + j * THREADS * 16,
                     first + key < count ? 16 : 0);
    }
}

// What a warp keeps in registers for its part of the scores.
template <int D, int Q, bool V, bool E>
struct Part {
    using L = Layout<D, Q, V, E>;
    uint32_t q[Q][L::MINE][4];             // fragments of the query vectors
    float norm[V ? L::MINE : 1][4];        // weights of the lower pair, of the upper pair
    float4 turn[V ? 4 / L::HALVES : 1];    // cosines and sines of the first chunk, per 8 keys
};

template <int D, int Q, bool V, bool E>
__device__ __forceinline__ void load_part(const AttentionArgs& a, const Work& w,
                                          Part<D, Q, V, E>& part) {
    using L = Layout<D, Q, V, E>;
    const uint32_t warp = threadIdx.x / 32 % L::PARTS, lane = threadIdx.x % 32;
    const uint16_t* q = reinterpret_cast<const uint16_t*>(a.q);
#pragma unroll
    for (int b = 0; b < Q; b++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t v = w.first + b * 16 + half * 8 + lane / 4;
            const bool there = v < w.vectors;
            const uint2 at = place(w, there ? v : w.first);
            const uint16_t* from = q + static_cast<uint64_t>(at.x) * a.ldq + at.y * D + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < L::MINE; i++) {
                const uint32_t chunk = (warp + i * L::PARTS) * 8;
                part.q[b][i][half] = there ? *reinterpret_cast<const uint32_t*>(from + chunk) : 0;
                part.q[b][i][half + 2] =
                    there ? *reinterpret_cast<const uint32_t*>(from + D / 2 + chunk) : 0;
            }
        }
    if constexpr (V) {
#pragma unroll
        for (int i = 0; i < L::MINE; i++) {
            const float* norm = reinterpret_cast<const float*>(a.k_norm) +
                                (warp + i * L::PARTS) * 8 + lane % 4 * 2;
            part.norm[i][0] = norm[0];
            part.norm[i][1] = norm[1];
            part.norm[i][2] = norm[D / 2];
            part.norm[i][3] = norm[D / 2 + 1];
        }
    }
}

// Cosines and sines for a lane's pair of elements and one key; 1 and 0 where nothing turns.
__device__ __forceinline__ float4 turn_of(const AttentionArgs& a, const Work& w, uint32_t position,
                                          uint32_t element) {
    if (element >= a.pairs || position - w.low >= w.high - w.low)
        return make_float4(1.0f, 0.0f, 1.0f, 0.0f);
    return *reinterpret_cast<const float4*>(reinterpret_cast<const float2*>(a.turns) +
                                            static_cast<uint64_t>(position) * a.pairs + element);
}

template <int D, int Q, bool V, bool E>
__device__ __forceinline__ void load_turns(const AttentionArgs& a, const Work& w, uint32_t position,
                                           Part<D, Q, V, E>& part) {
    using L = Layout<D, Q, V, E>;
    if constexpr (V) {
        const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const uint32_t first = L::HALVES == 1 ? 0 : warp / L::PARTS * 16;
#pragma unroll
        for (int n = 0; n < 4 / L::HALVES; n++)
            part.turn[n] = turn_of(a, w, position + first + n * 8 + lane / 4,
                                   warp % L::PARTS * 8 + lane % 4 * 2);
    }
}

// A key's two halves of sixteen elements, formed from values where only these are stored.
template <int D, int Q, bool V, bool E>
__device__ __forceinline__ void form(const AttentionArgs& a, const Work& w, uint32_t position,
                                     const Part<D, Q, V, E>& part, int i, int group, uint32_t& low,
                                     uint32_t& high) {
    if constexpr (V) {
        using L = Layout<D, Q, V, E>;
        const uint32_t warp = threadIdx.x / 32 % L::PARTS, lane = threadIdx.x % 32;
        const uint32_t element = (warp + i * L::PARTS) * 8;
        if (i == 0)
            form_key<true>(low, high, part.norm[i], part.turn[group]);
        else if (element < a.pairs)  // in no public model: half of a head turns
            form_key<true>(low, high, part.norm[i],
                           turn_of(a, w, position + lane / 4, element + lane % 4 * 2));
        else
            form_key<false>(low, high, part.norm[i], make_float4(1.0f, 0.0f, 1.0f, 0.0f));
    }
}

// This warp's part of the scores of all vectors, eight keys after the other.
template <int D, int Q, bool V, bool E>
__device__ __forceinline__ void scores(const AttentionArgs& a, const Work& w, uint32_t base,
                                       uint32_t keys, uint32_t position,
                                       const Part<D, Q, V, E>& part) {
    using L = Layout<D, Q, V, E>;
    // Pairs of chunks that one ldmatrix brings: a matrix has both of a pair in FP8, one in bf16.
    constexpr int MOST = E ? 4 : 2;
    constexpr int AT_ONCE = L::MINE < MOST ? L::MINE : MOST;
    const uint32_t warp = threadIdx.x / 32 % L::PARTS, lane = threadIdx.x % 32;
    const uint32_t first = L::HALVES == 1 ? 0 : threadIdx.x / 32 / L::PARTS * 2;
#pragma unroll(V ? 4 : 1)
    for (int n = 0; n < 4 / L::HALVES; n++) {
        float s[Q][4] = {};
        const uint32_t key = (first + n) * 8;
#pragma unroll
        for (int i = 0; i < L::MINE; i += AT_ONCE) {
            uint32_t k[4];
            if constexpr (E) {
                const uint32_t chunk = warp + (i + lane / 8 % AT_ONCE) * L::PARTS;
                load_matrix4(k, keys + chunk_at<L::PITCH>(key + lane % 8, chunk));
            } else {
                const uint32_t chunk = warp + (i + lane / 16 % AT_ONCE) * L::PARTS;
                load_matrix4(k, keys + chunk_at<L::PITCH>(key + lane % 8,
                                                          chunk + lane / 8 % 2 * (D / 16)));
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                uint32_t low = E ? first_codes(k[j]) : k[2 * j % 4];
                uint32_t high = E ? second_codes(k[j]) : k[(2 * j + 1) % 4];
                form<D, Q, V, E>(a, w, position + key, part, i + j, n, low, high);
#pragma unroll
                for (int q = 0; q < Q; q++) mma_bf16(s[q], part.q[q][i + j], low, high);
            }
        }
#pragma unroll
        for (int q = 0; q < Q; q++) {
            const uint32_t at = base + L::SCORES + warp * L::PART +
                                ((q * 16 + lane / 4) * L::SCORE_PITCH + key + lane % 4 * 2) * 4;
            store_shared8(at, s[q][0], s[q][1]);
            store_shared8(at + 8 * L::SCORE_PITCH * 4, s[q][2], s[q][3]);
        }
    }
}

// One vector's softmax state, held by the eight lanes that own it.
struct State {
    float most, sum;
};

template <int D, int Q, bool V, bool E>
__device__ __forceinline__ void soften(uint8_t* shared, uint32_t vector, uint32_t position,
                                       float scale, State& state) {
    using L = Layout<D, Q, V, E>;
    const uint32_t part = threadIdx.x % 8;
    const uint2 range = *reinterpret_cast<const uint2*>(shared + L::RANGES + vector * 8);
    float s[4] = {};
#pragma unroll
    for (int p = 0; p < L::PARTS; p++) {
        const float4 some = *reinterpret_cast<const float4*>(
            shared + L::SCORES + p * L::PART + (vector * L::SCORE_PITCH + part * 4) * 4);
        s[0] += some.x;
        s[1] += some.y;
        s[2] += some.z;
        s[3] += some.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (E) s[i] *= scale;
        uint32_t key = position + part * 4 + i;
        if (key < range.x || key >= range.y) s[i] = MINUS_INFINITY;
    }
    float most = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
#pragma unroll
    for (int width = 4; width; width /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, width));
    most = fmaxf(most, state.most);
    const float reference = reference_of(most);
    const float rescale = weight_of(state.most - reference);
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; i++) weight[i] = weight_of(s[i] - reference);
    float sum = (weight[0] + weight[1]) + (weight[2] + weight[3]);
#pragma unroll
    for (int width = 4; width; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    state.sum = state.sum * rescale + sum;
    state.most = most;
    *reinterpret_cast<uint2*>(shared + L::WEIGHTS + vector * L::WEIGHT_PITCH + part * 8) =
        make_uint2(pack_bf16(weight[0], weight[1]), pack_bf16(weight[2], weight[3]));
    if (part == 0) *reinterpret_cast<float*>(shared + L::RESCALE + vector * 4) = rescale;
}

// out = out * rescale + weights x values.
template <int D, int Q, bool V, bool E>
__device__ __forceinline__ void mix(uint8_t* shared, uint32_t base, uint32_t values,
                                    float (&out)[Q][Layout<D, Q, V, E>::COLUMNS / 8][4]) {
    using L = Layout<D, Q, V, E>;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < Q; q++) {
        const float* rescale =
            reinterpret_cast<const float*>(shared + L::RESCALE) + q * 16 + lane / 4;
        float upper = rescale[0], lower = rescale[8];
#pragma unroll
        for (int n = 0; n < L::COLUMNS / 8; n++) {
            out[q][n][0] *= upper;
            out[q][n][1] *= upper;
            out[q][n][2] *= lower;
            out[q][n][3] *= lower;
        }
    }
#pragma unroll 1  // registers are scarce
    for (int step = 0; step < 2; step++) {
        uint32_t w[Q][4];
#pragma unroll
        for (int q = 0; q < Q; q++)
            load_matrix4(w[q], base + L::WEIGHTS + (q * 16 + lane % 16) * L::WEIGHT_PITCH +
                                   (step * 2 + lane / 16) * 16);
        const uint32_t key = step * 16 + lane % 16;
        // Lanes 16..31 point at the next chunk, or at the same one where their matrices go unused.
        if constexpr (E) {
            // A chunk of codes is eight columns of either half; heads of 64 give a warp one of both.
            constexpr int CHUNKS = L::COLUMNS < 16 ? 1 : L::COLUMNS / 16;
#pragma unroll
            for (int n = 0; n < CHUNKS; n += 2) {
                uint32_t v[4];
                const uint32_t chunk = L::COLUMNS < 16 ? warp / 2
                                                       : warp * CHUNKS + n + (CHUNKS > 1) * (lane / 16);
                load_matrix4_transposed(v, values + chunk_at<L::PITCH>(key, chunk));
#pragma unroll
                for (int c = 0; c < 2 && n + c < CHUNKS; c++) {
                    const uint32_t upper = v[2 * c], lower = v[2 * c + 1];
                    if (L::COLUMNS == 8) {
                        const uint32_t u = warp % 2 ? second_codes(upper) : first_codes(upper);
                        const uint32_t l = warp % 2 ? second_codes(lower) : first_codes(lower);
#pragma unroll
                        for (int q = 0; q < Q; q++) mma_bf16(out[q][0], w[q], u, l);
                        continue;
                    }
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const uint32_t u = half ? second_codes(upper) : first_codes(upper);
                        const uint32_t l = half ? second_codes(lower) : first_codes(lower);
#pragma unroll
                        for (int q = 0; q < Q; q++)
                            mma_bf16(out[q][(2 * (n + c) + half) % (L::COLUMNS / 8)], w[q], u, l);
                    }
                }
            }
        } else if (L::COLUMNS == 8) {
            uint32_t v[4];
            load_matrix4_transposed(v, values + chunk_at<L::PITCH>(key, warp));
#pragma unroll
            for (int q = 0; q < Q; q++) mma_bf16(out[q][0], w[q], v[0], v[1]);
        } else {
#pragma unroll
            for (int n = 0; n < L::COLUMNS / 16; n++) {
                uint32_t v[4];
                uint32_t chunk = warp * (L::COLUMNS / 8) + n * 2 + lane / 16;
                load_matrix4_transposed(v, values + chunk_at<L::PITCH>(key, chunk));
#pragma unroll
                for (int q = 0; q < Q; q++) {
                    mma_bf16(out[q][2 * n], w[q], v[0], v[1]);
                    mma_bf16(out[q][2 * n + 1], w[q], v[2], v[3]);
                }
            }
        }
    }
}

// The first of a warp's eight columns number n.
template <int D, int Q, bool V, bool E>
__device__ __forceinline__ uint32_t column(uint32_t warp, uint32_t n) {
    constexpr uint32_t COLUMNS = Layout<D, Q, V, E>::COLUMNS;
    if (!E) return warp * COLUMNS + n * 8;
    if (COLUMNS == 8) return warp % 2 * (D / 2) + warp / 2 * 8;
    return n % 2 * (D / 2) + (warp * (COLUMNS / 16) + n / 2) * 8;
}

template <int VECTORS>
__device__ __forceinline__ Work work_of_block(const AttentionArgs& a) {
    const uint4 span = reinterpret_cast<const uint4*>(a.spans)[blockIdx.y];
    const uint32_t* ends = reinterpret_cast<const uint32_t*>(a.ends);
    Work w = {};
    w.group = a.heads / a.kv_heads;
    w.head = blockIdx.x % a.kv_heads;
    w.row = span.x;
    w.vectors = span.y * w.group;
    w.seq = span.z;
    w.first = blockIdx.x / a.kv_heads * VECTORS;
    if (w.first >= w.vectors) return w;

    uint32_t low = 0xffffffffu, high = 0;
    const uint32_t last_vector = min(w.first + VECTORS, w.vectors) - 1;
    for (uint32_t r = w.first / w.group; r <= last_vector / w.group; r++) {
        uint32_t end = ends[w.row + r];
        high = max(high, end);
        low = min(low, first_key(a, end));
    }
    // The latest, largest splits of all heads and spans come first: small ones fill what they leave,
    // and spans of one sequence read a split while the L2 cache holds it.
    w.split = split_of(low, a.window) + gridDim.z - 1 - blockIdx.z;
    w.low = max(low, split_start(w.split, a.window));
    w.high = min(high, split_start(w.split + 1, a.window));
    return w;
}

template <int D, int Q, bool V, bool E>
__device__ __forceinline__ void attend(const AttentionArgs& a) {
    using L = Layout<D, Q, V, E>;
    extern __shared__ __align__(128) uint8_t shared[];
    let_dependents_start();
    const uint32_t base = shared_address(shared);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t* ends = reinterpret_cast<const uint32_t*>(a.ends);
    Work w = work_of_block<L::VECTORS>(a);
    if (w.low >= w.high) {
        wait_for_inputs();  // a kernel that ends has waited for all in front of it
        return;
    }

    const uint32_t* table = reinterpret_cast<const uint32_t*>(a.table) +
                            static_cast<uint64_t>(w.seq) * a.table_pitch;
    const uint32_t table_first = reinterpret_cast<const uint32_t*>(a.table_first)[w.seq];
    const uint32_t first_tile = w.low / TILE_KEYS;
    const uint32_t tiles = (w.high - 1) / TILE_KEYS + 1 - first_tile;
    // The first row of each tile in the pages.
    uint32_t* rows = reinterpret_cast<uint32_t*>(shared + L::PAGES);
    // What the loop seldom needs waits in shared memory: registers are scarce.
    Work& kept = *reinterpret_cast<Work*>(shared + L::WORK);
    if (threadIdx.x == 0) kept = w;
    if (threadIdx.x < tiles) {
        const uint32_t position = (first_tile + threadIdx.x) * TILE_KEYS;
        const uint32_t page = table[position / a.page - table_first];
        rows[threadIdx.x] =
            (page * a.kv_heads + w.head) * (V ? 1 : 2) * a.page + position % a.page;
    }
    for (uint32_t v = threadIdx.x; v < L::VECTORS; v += L::THREADS) {
        uint2 range = make_uint2(0, 0);
        if (w.first + v < w.vectors) {
            uint32_t end = ends[place(w, w.first + v).x];
            range = make_uint2(first_key(a, end), end);
        }
        reinterpret_cast<uint2*>(shared + L::RANGES)[v] = range;
    }
    __syncthreads();

    // Keys of a tile, then its values, then the next tile's; or values alone.
    constexpr uint32_t SIDES = V ? 1 : 2, SLOTS = L::SLOTS;
    const auto bring = [&](uint32_t side) {
        const uint32_t t = side / SIDES;
        if (t < tiles)
            fetch_side<L::PITCH, L::THREADS>(a, kept, (kept.low / TILE_KEYS + t) * TILE_KEYS,
                                      rows[t] + side % SIDES * a.page,
                                      base + side % SLOTS * L::TILE);
        copy_commit();
    };
    // Tiles that hold nothing new come before the rows' own keys are there.
    const uint32_t known = reinterpret_cast<const uint4*>(a.spans)[blockIdx.y].w;
#pragma unroll 1
    for (uint32_t i = 0; i < SLOTS - 1; i++) {
        if (min((first_tile + i / SIDES + 1) * TILE_KEYS, kept.high) > known) wait_for_inputs();
        bring(i);
    }
    wait_for_inputs();
    Part<D, Q, V, E> part;
    load_part<D, Q, V, E>(a, w, part);
    load_turns<D, Q, V, E>(a, w, first_tile * TILE_KEYS, part);

    float out[Q][L::COLUMNS / 8][4] = {};
    constexpr int PASSES = (L::VECTORS * 8 + L::THREADS - 1) / L::THREADS;
    State state[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; p++) state[p] = {MINUS_INFINITY, 0.0f};

    for (uint32_t t = 0; t < tiles; t++) {
        const uint32_t position = (kept.low / TILE_KEYS + t) * TILE_KEYS;
        copy_wait<SLOTS - 2>();
        __syncthreads();  // keys are there; all have left the values before
        bring(t * SIDES + SLOTS - 1);
        const uint32_t values = base + (t * SIDES + SIDES - 1) % SLOTS * L::TILE;
        scores<D, Q, V, E>(a, w, base, base + t * SIDES % SLOTS * L::TILE, position, part);
        __syncthreads();
        if (!V) bring(t * SIDES + SLOTS);
        load_turns<D, Q, V, E>(a, w, position + TILE_KEYS, part);
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
            // The thread's number is asked for again: registers are scarce.
            uint32_t vector = p * (L::THREADS / 8) + thread_number() / 8;
            if (vector < L::VECTORS)
                soften<D, Q, V, E>(shared, vector, position, a.score_scale, state[p]);
        }
        if (!V) copy_wait<SLOTS - 1>();
        __syncthreads();  // weights and values are there
        mix<D, Q, V, E>(shared, base, values, out);
    }
    copy_wait<0>();

    w = kept;
    // Partial results go to the row's own numbering of splits.
    float* partial = reinterpret_cast<float*>(a.partial);
    float2* weight = reinterpret_cast<float2*>(a.weight);
    const auto slot = [&](uint32_t vector) {
        uint2 at = place(w, vector);
        uint32_t mine = split_of(first_key(a, ends[at.x]), a.window);
        return (static_cast<uint64_t>(at.x) * a.heads + at.y) * a.splits + w.split - mine;
    };
    const auto sees = [&](uint32_t vector) {
        if (vector >= w.vectors) return false;
        uint32_t end = ends[place(w, vector).x];
        return first_key(a, end) < w.high && end > w.low;
    };
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        uint32_t v = p * (L::THREADS / 8) + threadIdx.x / 8;
        if (v < L::VECTORS && threadIdx.x % 8 == 0 && sees(w.first + v))
            weight[slot(w.first + v)] = make_float2(state[p].most, state[p].sum);
    }
#pragma unroll
    for (int i = 0; i < Q; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t v = w.first + i * 16 + half * 8 + lane / 4;
            if (!sees(v)) continue;
            float* to = partial + slot(v) * D + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < L::COLUMNS / 8; n++)
                *reinterpret_cast<float2*>(to + column<D, Q, V, E>(warp, n)) =
                    make_float2(out[i][n][half * 2], out[i][n][half * 2 + 1]);
        }
    }
}

}  // namespace

// Joins a row's splits in order: grid (rows, heads), a thread per two elements of the head.
extern "C" __global__ void attention_merge(const __grid_constant__ AttentionArgs a) {
    constexpr uint32_t AT_ONCE = 256;
    __shared__ float keep[AT_ONCE], take[AT_ONCE], sums[AT_ONCE], warp_most[AT_ONCE / 32];
    let_dependents_start();
    const uint32_t row = blockIdx.x, head = blockIdx.y, dim = blockDim.x * 2;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t end = reinterpret_cast<const uint32_t*>(a.ends)[row];
    wait_for_inputs();
    uint16_t* out = reinterpret_cast<uint16_t*>(a.out) + static_cast<uint64_t>(row) * a.ldo +
                    head * dim + threadIdx.x * 2;
    if (end == 0) {  // nothing to see
        *reinterpret_cast<uint32_t*>(out) = 0;
        return;
    }
    const uint32_t count = split_of(end - 1, a.window) - split_of(first_key(a, end), a.window) + 1;
    const uint64_t slot = (static_cast<uint64_t>(row) * a.heads + head) * a.splits;
    const float2* weight = reinterpret_cast<const float2*>(a.weight) + slot;
    const float* partial = reinterpret_cast<const float*>(a.partial) + slot * dim + threadIdx.x * 2;
    float most = MINUS_INFINITY, sum = 0.0f, first = 0.0f, second = 0.0f;
    for (uint32_t from = 0; from < count; from += blockDim.x) {
        const uint32_t here = min(blockDim.x, count - from);
        float2 part = {MINUS_INFINITY, 0.0f};
        if (threadIdx.x < here) part = weight[from + threadIdx.x];
        // The largest of the splits before this thread's. A maximum is the same in any order.
        float before = most, all = part.x;
#pragma unroll
        for (uint32_t step = 1; step < 32; step *= 2) {
            const float others = __shfl_xor_sync(0xffffffffu, all, step);
            if (lane & step) before = fmaxf(before, others);
            all = fmaxf(all, others);
        }
        __syncthreads();  // the splits before are joined
        if (lane == 0) warp_most[warp] = all;
        __syncthreads();
        for (uint32_t i = 0; i < blockDim.x / 32; i++) {
            if (i < warp) before = fmaxf(before, warp_most[i]);
            most = fmaxf(most, warp_most[i]);
        }
        const Join join(before, part.x);
        keep[threadIdx.x] = join.keep;
        take[threadIdx.x] = join.take;
        sums[threadIdx.x] = part.y;
        __syncthreads();
#pragma unroll 8
        for (uint32_t s = 0; s < here; s++) {
            const float2 value =
                *reinterpret_cast<const float2*>(partial + static_cast<uint64_t>(from + s) * dim);
            sum = joined(sum, keep[s], sums[s], take[s]);
            first = joined(first, keep[s], value.x, take[s]);
            second = joined(second, keep[s], value.y, take[s]);
        }
    }
    *reinterpret_cast<uint32_t*>(out) =
        pack_bf16(first * a.value_scale / sum, second * a.value_scale / sum);
}

#define ATTENTION(name, dim, blocks, values_only, fp8, at_least)                                 \
    extern "C" __global__ void                                                                   \
    __launch_bounds__(Layout<dim, blocks, values_only, fp8>::THREADS, at_least)                  \
        name(const __grid_constant__ AttentionArgs a) {                                          \
        attend<dim, blocks, values_only, fp8>(a);                                                \
    }                                                                                            \
    static_assert(Layout<dim, blocks, values_only, fp8>::BYTES <= 227 * 1024 / at_least - 1024,  \
                  "fits a card");

ATTENTION(attention_d64_q1, 64, 1, false, false, 2)
ATTENTION(attention_d64_q3, 64, 3, false, false, 2)
ATTENTION(attention_d128_q1, 128, 1, false, false, 2)
ATTENTION(attention_d128_q3, 128, 3, false, false, 2)
ATTENTION(attention_d256_q1, 256, 1, false, false, 2)
ATTENTION(attention_d256_q3, 256, 3, false, false, 1)
ATTENTION(attention_d512_q1, 512, 1, false, false, 2)
ATTENTION(attention_d512_q3, 512, 3, false, false, 1)
// The only head that real values-only layers have.
ATTENTION(attention_values_d512_q1, 512, 1, true, false, 2)
ATTENTION(attention_values_d512_q3, 512, 3, true, false, 1)

ATTENTION(attention_fp8_d64_q1, 64, 1, false, true, 2)
ATTENTION(attention_fp8_d64_q3, 64, 3, false, true, 2)
ATTENTION(attention_fp8_d128_q1, 128, 1, false, true, 2)
ATTENTION(attention_fp8_d128_q3, 128, 3, false, true, 2)
ATTENTION(attention_fp8_d256_q1, 256, 1, false, true, 2)
ATTENTION(attention_fp8_d256_q3, 256, 3, false, true, 1)
ATTENTION(attention_fp8_d512_q1, 512, 1, false, true, 2)
ATTENTION(attention_fp8_d512_q3, 512, 3, false, true, 1)
ATTENTION(attention_values_fp8_d512_q1, 512, 1, true, true, 2)
ATTENTION(attention_values_fp8_d512_q3, 512, 3, true, true, 1)
