// Attention of one to nine query rows per sequence over paged keys and values.
//
// Floor: bytes of keys and values seen / read bandwidth. 31B at 50k tokens: a full layer reads
// 4 heads x 50,000 x 2 KiB = 410 MB, 91 us on an H200; partial results add 4 KiB per row, head and
// split, five per cent of that for five rows.
//
// A block takes one split (splits.cuh) of one KV head and all query vectors that read it, up to
// 16 Q of them: a row's heads of the group, and the rows of the sequence, so keys and values pass
// once. It walks the split in tiles of 32 keys: scores by mma in one chain over the head's
// elements, then maximum, weights and their sum in one fixed tree, then the weighted values in one
// chain over the keys. The rescaling of what was summed so far happens at every tile, never by
// vote. Keys that a row does not see weigh exactly zero and leave its sums as they are, so a row's
// bits do not depend on the rows beside it. A second kernel merges a row's own splits in order.
//
// Pages: [page][kv head][keys, then values][slot][element], bf16; a page is a multiple of 32 slots.
// In a values-only layer (one projection for both) a page holds values alone, half the bytes, and a
// tile's keys are formed in shared memory: key = turn(norm weight x value), rounded once. The sines
// add 512 bytes a key, shared by all heads.
//
// Compiled for all targets; not yet run.
#include "abi.cuh"
#include "math.cuh"
#include "ptx.cuh"
#include "splits.cuh"

namespace {

constexpr int THREADS = 256;

template <int D, int Q, bool V>
struct Layout {
    static constexpr int PITCH = D * 2;
    static constexpr int TILE = TILE_KEYS * PITCH;
    static constexpr int STAGES = !V && D == 512 ? 2 : 3;
    static constexpr int STAGE = V ? TILE : 2 * TILE;
    static constexpr int VECTORS = 16 * Q;
    static constexpr int SCORE_PITCH = TILE_KEYS + 4;   // floats
    static constexpr int WEIGHT_PITCH = TILE_KEYS * 2 + 16;  // bytes
    static constexpr int RING = VECTORS * PITCH;
    static constexpr int KEYS = RING + STAGES * STAGE;  // formed keys, values-only layers
    static constexpr int SCORES = KEYS + (V ? TILE : 0);
    static constexpr int WEIGHTS = SCORES + VECTORS * SCORE_PITCH * 4;
    static constexpr int RESCALE = WEIGHTS + VECTORS * WEIGHT_PITCH;
    static constexpr int RANGES = RESCALE + VECTORS * 4;
    static constexpr int PAGES = RANGES + VECTORS * 8;
    static constexpr int BYTES = PAGES + 1024 / TILE_KEYS * 4;
};

// What a block works on.
struct Work {
    uint32_t row, vectors, first;  // first row of the span; query vectors of it; this block's first
    uint32_t seq, head, group;
    uint32_t low, high;  // keys that any of its vectors sees, inside the split
};

// Rows of shared memory whose 16-byte chunks are permuted by the row.
template <int PITCH>
__device__ __forceinline__ uint32_t chunk_at(uint32_t row, uint32_t chunk) {
    return row * PITCH + (chunk ^ row % 8) * 16;
}

template <int D, int Q, bool V>
__device__ __forceinline__ void fetch_tile(const AttentionArgs& a, const Work& w, uint32_t position,
                                           uint32_t page, uint32_t stage) {
    using L = Layout<D, Q, V>;
    const uint64_t head = static_cast<uint64_t>(page) * a.kv_heads + w.head;
    const uint16_t* keys =
        reinterpret_cast<const uint16_t*>(a.kv) + (head * (V ? 1 : 2) * a.page + position % a.page) * D;
    constexpr int CHUNKS = D / 8;
#pragma unroll
    for (int j = 0; j < static_cast<int>((V ? 1 : 2) * TILE_KEYS * CHUNKS / THREADS); j++) {
        uint32_t i = j * THREADS + threadIdx.x;
        uint32_t which = i / (TILE_KEYS * CHUNKS), key = i / CHUNKS % TILE_KEYS, chunk = i % CHUNKS;
        // Slots nobody sees may hold anything; as zeros they cannot make a NaN.
        bool seen = position + key >= w.low && position + key < w.high;
        const uint16_t* from = keys + (static_cast<uint64_t>(which) * a.page + key) * D + chunk * 8;
        copy_async16(stage + which * L::TILE + chunk_at<L::PITCH>(key, chunk), from,
                     seen ? 16 : 0);
    }
}

// The keys of a tile of values. A thread has eight elements of the lower half of a key and their
// partners in the upper half.
template <int D, int Q, bool V>
__device__ __forceinline__ void form_keys(const AttentionArgs& a, const Work& w, uint32_t position,
                                          uint32_t values, uint32_t keys) {
    using L = Layout<D, Q, V>;
    constexpr uint32_t CHUNKS = D / 16;
    const float* norm = reinterpret_cast<const float*>(a.k_norm);
    for (uint32_t i = threadIdx.x; i < TILE_KEYS * CHUNKS; i += THREADS) {
        const uint32_t key = i / CHUNKS, chunk = i % CHUNKS;
        const uint32_t low_at = chunk_at<L::PITCH>(key, chunk);
        const uint32_t high_at = chunk_at<L::PITCH>(key, chunk + CHUNKS);
        uint4 low = load_shared16(values + low_at), high = load_shared16(values + high_at);
        uint32_t* low_words = &low.x;
        uint32_t* high_words = &high.x;
        const bool seen = position + key >= w.low && position + key < w.high;
        const float2* turns = reinterpret_cast<const float2*>(a.turns) +
                              static_cast<uint64_t>(position + key) * a.pairs;
#pragma unroll
        for (int word = 0; word < 4; word++) {
            float l[2] = {low_bf16(low_words[word]), high_bf16(low_words[word])};
            float h[2] = {low_bf16(high_words[word]), high_bf16(high_words[word])};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint32_t j = chunk * 8 + word * 2 + half;
                const float x = l[half] * norm[j], y = h[half] * norm[j + D / 2];
                l[half] = x;
                h[half] = y;
                if (seen && j < a.pairs) {
                    const float2 t = turns[j];
                    l[half] = x * t.x - y * t.y;
                    h[half] = y * t.x + x * t.y;
                }
            }
            low_words[word] = pack_bf16(l[0], l[1]);
            high_words[word] = pack_bf16(h[0], h[1]);
        }
        store_shared16(keys + low_at, low);
        store_shared16(keys + high_at, high);
    }
}

// Scores of 16 vectors by 8 keys, for the blocks (q, n) that fall to this warp.
template <int D, int Q, bool V>
__device__ __forceinline__ void scores(uint32_t base, uint32_t keys) {
    using L = Layout<D, Q, V>;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (uint32_t block = warp; block < 4 * Q; block += THREADS / 32) {
        uint32_t q = block / 4, n = block % 4;
        float s[4] = {};
        uint32_t q_row = q * 16 + lane % 16, k_row = n * 8 + lane % 8;
#pragma unroll 4
        for (uint32_t d = 0; d < D / 32; d++) {
            uint32_t even[4], odd[4], k[4];
            load_matrix4(even, base + chunk_at<L::PITCH>(q_row, d * 4 + lane / 16));
            load_matrix4(odd, base + chunk_at<L::PITCH>(q_row, d * 4 + 2 + lane / 16));
            load_matrix4(k, keys + chunk_at<L::PITCH>(k_row, d * 4 + lane / 8));
            mma_bf16(s, even, k[0], k[1]);
            mma_bf16(s, odd, k[2], k[3]);
        }
        uint32_t at = base + L::SCORES +
                      ((q * 16 + lane / 4) * L::SCORE_PITCH + n * 8 + lane % 4 * 2) * 4;
        store_shared8(at, s[0], s[1]);
        store_shared8(at + 8 * L::SCORE_PITCH * 4, s[2], s[3]);
    }
}

// One vector's softmax state, held by the eight lanes that own it.
struct State {
    float most, sum;
};

template <int D, int Q, bool V>
__device__ __forceinline__ void soften(uint8_t* shared, uint32_t vector, uint32_t position,
                                       State& state) {
    using L = Layout<D, Q, V>;
    const uint32_t part = threadIdx.x % 8;
    const uint2 range = *reinterpret_cast<const uint2*>(shared + L::RANGES + vector * 8);
    const float4 scored = *reinterpret_cast<const float4*>(
        shared + L::SCORES + (vector * L::SCORE_PITCH + part * 4) * 4);
    float s[4] = {scored.x, scored.y, scored.z, scored.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t key = position + part * 4 + i;
        if (key < range.x || key >= range.y) s[i] = MINUS_INFINITY;
    }
    float most = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3]));
#pragma unroll
    for (int width = 4; width; width /= 2)
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, width));
    most = fmaxf(most, state.most);
    // No key seen yet: any finite reference will do.
    const float reference = most == MINUS_INFINITY ? 0.0f : most;
    const float rescale = exp_ours(state.most - reference);
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; i++) weight[i] = exp_ours(s[i] - reference);
    float sum = (weight[0] + weight[1]) + (weight[2] + weight[3]);
#pragma unroll
    for (int width = 4; width; width /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, width);
    state.sum = state.sum * rescale + sum;
    state.most = most;
    *reinterpret_cast<uint2*>(shared + L::WEIGHTS + vector * L::WEIGHT_PITCH + part * 8) =
        make_uint2(pack_bf16(weight[0], weight[1]), pack_bf16(weight[2], weight[3]));
    if (part == 0) *reinterpret_cast<float*>(shared + L::RESCALE + vector * 4) = rescale;
}

// out = out * rescale + weights x values, D/8 columns a warp.
template <int D, int Q, bool V>
__device__ __forceinline__ void mix(uint8_t* shared, uint32_t base, uint32_t values,
                                    float (&out)[Q][D / 64][4]) {
    using L = Layout<D, Q, V>;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < Q; q++) {
        const float* rescale =
            reinterpret_cast<const float*>(shared + L::RESCALE) + q * 16 + lane / 4;
        float upper = rescale[0], lower = rescale[8];
#pragma unroll
        for (int n = 0; n < D / 64; n++) {
            out[q][n][0] *= upper;
            out[q][n][1] *= upper;
            out[q][n][2] *= lower;
            out[q][n][3] *= lower;
        }
    }
#pragma unroll
    for (int step = 0; step < 2; step++) {
        uint32_t w[Q][4];
#pragma unroll
        for (int q = 0; q < Q; q++)
            load_matrix4(w[q], base + L::WEIGHTS + (q * 16 + lane % 16) * L::WEIGHT_PITCH +
                                   (step * 2 + lane / 16) * 16);
        const uint32_t key = step * 16 + lane % 16;
        if (D == 64) {
            uint32_t v[4];
            // Lanes 16..31 point at the same chunk; their matrices go unused.
            load_matrix4_transposed(v, values + chunk_at<L::PITCH>(key, warp));
#pragma unroll
            for (int q = 0; q < Q; q++) mma_bf16(out[q][0], w[q], v[0], v[1]);
        } else {
#pragma unroll
            for (int n = 0; n < D / 128; n++) {
                uint32_t v[4];
                uint32_t chunk = warp * (D / 64) + n * 2 + lane / 16;
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

__device__ __forceinline__ uint32_t first_key(const AttentionArgs& a, uint32_t end) {
    return a.window && end > a.window ? end - a.window : 0;
}

// The vector's row and its query head.
__device__ __forceinline__ uint2 place(const Work& w, uint32_t vector) {
    return make_uint2(w.row + vector / w.group, w.head * w.group + vector % w.group);
}

template <int D, int Q, bool V>
__device__ __forceinline__ void attend(const AttentionArgs& a) {
    using L = Layout<D, Q, V>;
    extern __shared__ __align__(128) uint8_t shared[];
    let_dependents_start();
    wait_for_inputs();
    const uint32_t base = shared_address(shared);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint4 span = reinterpret_cast<const uint4*>(a.spans)[blockIdx.z];
    const uint32_t* ends = reinterpret_cast<const uint32_t*>(a.ends);
    Work w;
    w.group = a.heads / a.kv_heads;
    w.head = blockIdx.y % a.kv_heads;
    w.row = span.x;
    w.vectors = span.y * w.group;
    w.seq = span.z;
    w.first = blockIdx.y / a.kv_heads * L::VECTORS;
    if (w.first >= w.vectors) return;

    uint32_t low = 0xffffffffu, high = 0;
    const uint32_t last_vector = min(w.first + L::VECTORS, w.vectors) - 1;
    for (uint32_t r = w.first / w.group; r <= last_vector / w.group; r++) {
        uint32_t end = ends[w.row + r];
        high = max(high, end);
        low = min(low, first_key(a, end));
    }
    // The latest, largest splits come first.
    const uint32_t split = split_of(low, a.window) + gridDim.x - 1 - blockIdx.x;
    w.low = max(low, split_start(split, a.window));
    w.high = min(high, split_start(split + 1, a.window));
    if (w.low >= w.high) return;

    const uint32_t* table = reinterpret_cast<const uint32_t*>(a.table) +
                            static_cast<uint64_t>(w.seq) * a.table_pitch;
    const uint32_t table_first = reinterpret_cast<const uint32_t*>(a.table_first)[w.seq];
    const uint32_t first_tile = w.low / TILE_KEYS;
    const uint32_t tiles = (w.high - 1) / TILE_KEYS + 1 - first_tile;
    uint32_t* pages = reinterpret_cast<uint32_t*>(shared + L::PAGES);
    if (threadIdx.x < tiles)
        pages[threadIdx.x] =
            table[(first_tile + threadIdx.x) * TILE_KEYS / a.page - table_first];
    for (uint32_t v = threadIdx.x; v < L::VECTORS; v += THREADS) {
        uint2 range = make_uint2(0, 0);
        if (w.first + v < w.vectors) {
            uint32_t end = ends[place(w, w.first + v).x];
            range = make_uint2(first_key(a, end), end);
        }
        reinterpret_cast<uint2*>(shared + L::RANGES)[v] = range;
    }
    __syncthreads();

    const uint16_t* q = reinterpret_cast<const uint16_t*>(a.q);
    for (uint32_t i = threadIdx.x; i < L::VECTORS * (D / 8); i += THREADS) {
        uint32_t v = i / (D / 8), chunk = i % (D / 8);
        bool there = w.first + v < w.vectors;
        uint2 at = place(w, there ? w.first + v : w.first);
        copy_async16(base + chunk_at<L::PITCH>(v, chunk),
                     q + static_cast<uint64_t>(at.x) * a.ldq + at.y * D + chunk * 8,
                     there ? 16 : 0);
    }
#pragma unroll
    for (int i = 0; i < L::STAGES - 1; i++) {
        if (i < tiles)
            fetch_tile<D, Q, V>(a, w, (first_tile + i) * TILE_KEYS, pages[i],
                             base + L::RING + i * L::STAGE);
        copy_commit();
    }

    float out[Q][D / 64][4] = {};
    constexpr int PASSES = (L::VECTORS * 8 + THREADS - 1) / THREADS;
    State state[PASSES];
#pragma unroll
    for (int p = 0; p < PASSES; p++) state[p] = {MINUS_INFINITY, 0.0f};

    for (uint32_t t = 0; t < tiles; t++) {
        const uint32_t position = (first_tile + t) * TILE_KEYS;
        const uint32_t stage = base + L::RING + t % L::STAGES * L::STAGE;
        copy_wait<L::STAGES - 2>();
        __syncthreads();
        const uint32_t next = t + L::STAGES - 1;
        if (next < tiles)
            fetch_tile<D, Q, V>(a, w, (first_tile + next) * TILE_KEYS, pages[next],
                             base + L::RING + next % L::STAGES * L::STAGE);
        copy_commit();
        const uint32_t keys = V ? base + L::KEYS : stage;
        const uint32_t values = V ? stage : stage + L::TILE;
        if (V) {
            form_keys<D, Q, V>(a, w, position, values, keys);
            __syncthreads();
        }
        scores<D, Q, V>(base, keys);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < PASSES; p++) {
            uint32_t vector = p * (THREADS / 8) + threadIdx.x / 8;
            if (vector < L::VECTORS) soften<D, Q, V>(shared, vector, position, state[p]);
        }
        __syncthreads();
        mix<D, Q, V>(shared, base, values, out);
    }
    copy_wait<0>();

    // Partial results go to the row's own numbering of splits.
    float* partial = reinterpret_cast<float*>(a.partial);
    float2* weight = reinterpret_cast<float2*>(a.weight);
    const auto slot = [&](uint32_t vector) {
        uint2 at = place(w, vector);
        uint32_t mine = split_of(first_key(a, ends[at.x]), a.window);
        return (static_cast<uint64_t>(at.x) * a.heads + at.y) * a.splits + split - mine;
    };
    const auto sees = [&](uint32_t vector) {
        if (vector >= w.vectors) return false;
        uint32_t end = ends[place(w, vector).x];
        return first_key(a, end) < w.high && end > w.low;
    };
#pragma unroll
    for (int p = 0; p < PASSES; p++) {
        uint32_t v = p * (THREADS / 8) + threadIdx.x / 8;
        if (v < L::VECTORS && threadIdx.x % 8 == 0 && sees(w.first + v))
            weight[slot(w.first + v)] = make_float2(state[p].most, state[p].sum);
    }
#pragma unroll
    for (int i = 0; i < Q; i++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t v = w.first + i * 16 + half * 8 + lane / 4;
            if (!sees(v)) continue;
            float* to = partial + slot(v) * D + warp * (D / 8) + lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < D / 64; n++)
                *reinterpret_cast<float2*>(to + n * 8) =
                    make_float2(out[i][n][half * 2], out[i][n][half * 2 + 1]);
        }
    }
}

}  // namespace

// Merges a row's splits in order: grid (rows, heads), a thread per two elements of the head.
extern "C" __global__ void attention_merge(const __grid_constant__ AttentionArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.x, head = blockIdx.y, dim = blockDim.x * 2;
    const uint32_t end = reinterpret_cast<const uint32_t*>(a.ends)[row];
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
    float most = MINUS_INFINITY;
    for (uint32_t s = 0; s < count; s++) most = fmaxf(most, weight[s].x);
    float sum = 0.0f, first = 0.0f, second = 0.0f;
#pragma unroll 4
    for (uint32_t s = 0; s < count; s++) {
        const float2 part = weight[s];
        const float2 value =
            *reinterpret_cast<const float2*>(partial + static_cast<uint64_t>(s) * dim);
        const float scale = exp_ours(part.x - most);
        sum += part.y * scale;
        first += value.x * scale;
        second += value.y * scale;
    }
    *reinterpret_cast<uint32_t*>(out) = pack_bf16(first / sum, second / sum);
}

#define ATTENTION(name, dim, blocks, values_only, at_least)                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, at_least)                         \
        name(const __grid_constant__ AttentionArgs a) {                                     \
        attend<dim, blocks, values_only>(a);                                                \
    }                                                                                       \
    static_assert(Layout<dim, blocks, values_only>::BYTES <= 227 * 1024 / at_least - 1024,  \
                  "fits a card");

ATTENTION(attention_d64_q1, 64, 1, false, 2)
ATTENTION(attention_d64_q3, 64, 3, false, 2)
ATTENTION(attention_d128_q1, 128, 1, false, 2)
ATTENTION(attention_d128_q3, 128, 3, false, 2)
ATTENTION(attention_d256_q1, 256, 1, false, 2)
ATTENTION(attention_d256_q3, 256, 3, false, 1)
ATTENTION(attention_d512_q1, 512, 1, false, 1)
ATTENTION(attention_d512_q3, 512, 3, false, 1)
// The only head that real values-only layers have.
ATTENTION(attention_values_d512_q1, 512, 1, true, 1)
ATTENTION(attention_values_d512_q3, 512, 3, true, 1)
