// Attention of a prompt's many rows: the same sums as the unit attention, bit for bit.
//
// Floor: 4 x rows x keys x heads x head_dim operations over the rate of bf16 products (some
// 790 TFLOP/s on an H200). 31B, 2,048 rows that see 50,000 keys: 6.7e12 a full layer, 8.5 ms.
//
// First every tile of keys and values that a row sees is brought into the form that the matrix unit
// reads: bf16, keys formed from values where only these are stored, chunks of 16 bytes permuted by
// the row. That is one pass over the pages for any number of rows, and what follows is the same for
// every form of pages. Then a block takes 64 query vectors of a KV head, a row's heads of the group and
// rows of the sequence, through all tiles that they see, in order:
//
//   feeder (two threads) -> tiles of keys  -> scorer (four warps): scores, maxima, weights
//                        -> tiles of values -> mixers (two times four warps): weights x values
//
// Each runs as far ahead as rings in shared memory allow. A thread of the scorer has sixteen weights of
// two vectors, and these are just what the thread of the same number in either group of mixers needs as
// its fragment: it is handed on as it is, with the maxima and sums of the tile. Mixers keep the running
// split and the splits joined so far in registers, 128 columns a group, and write the result itself:
// no partial results, no merge.
//
// Heads of 512 elements have twice the columns that a multiprocessor's registers hold, so two blocks
// of a cluster share 64 vectors: each scores every other tile, for both, and mixes half of the columns.
// The running maximum goes back and forth between the two scorers.
//
// The order of every sum is that of the unit attention: a score is eight chains from zero, chain p
// over the pairs of chunks p, p + 8, ..., added in order; sums of weights in its tree; the values in
// one chain over the keys of a split. A chain of wgmma has the bits of a chain of mma.sync (the lab
// program compares the two units).
#include "abi.cuh"
#include "codes.cuh"
#include "keys.cuh"
#include "ptx.cuh"
#include "softmax.cuh"
#include "splits.cuh"

namespace {

// A prepared tile: keys, then values, each D / 64 panels of 32 rows of 128 bytes.
constexpr uint32_t PANEL = TILE_KEYS * 128;
template <int D>
constexpr uint32_t SIDE = D / 64 * PANEL;

// Where the 16-byte chunk of a row is in its panel.
__device__ __forceinline__ uint32_t in_panel(uint32_t row, uint32_t chunk) {
    return row * 128 + (chunk ^ row % 8) * 16;
}

// Where chunk `pair` of a head's lower or upper half is among keys or queries whose panels are `panel`
// bytes: both halves' chunks side by side are the sixteen columns of a matrix instruction.
__device__ __forceinline__ uint32_t paired(uint32_t row, uint32_t pair, uint32_t half, uint32_t panel) {
    return pair / 4 * panel + in_panel(row, pair % 4 * 2 + half);
}

// Eight elements of the lower half of a head and their partners in the upper half.
struct Halves {
    uint32_t low[4], high[4];
};

template <int D, bool E>
__device__ __forceinline__ Halves load_halves(dptr kv, uint64_t row, uint32_t pair) {
    Halves h;
    if constexpr (E) {
        const uint4 codes = *(reinterpret_cast<const uint4*>(kv) + row * (D / 16) + pair);
        const uint32_t all[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            h.low[i] = first_codes(all[i]);
            h.high[i] = second_codes(all[i]);
        }
    } else {
        const uint4* from = reinterpret_cast<const uint4*>(kv) + row * (D / 8) + pair;
        const uint4 low = from[0], high = from[D / 16];
        h = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    }
    return h;
}

// Keys of a values-only layer, in place of the values that they are formed from.
template <int D>
__device__ __forceinline__ void form_keys(const AttentionArgs& a, uint32_t position, uint32_t pair,
                                          Halves& h) {
    const float* weights = reinterpret_cast<const float*>(a.k_norm);
    const float2* turns =
        reinterpret_cast<const float2*>(a.turns) + static_cast<uint64_t>(position) * a.pairs;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t element = pair * 8 + i * 2;
        const float norm[4] = {weights[element], weights[element + 1], weights[D / 2 + element],
                               weights[D / 2 + element + 1]};
        if (element < a.pairs)
            form_key<true>(h.low[i], h.high[i], norm,
                           *reinterpret_cast<const float4*>(turns + element));
        else
            form_key<false>(h.low[i], h.high[i], norm, make_float4(1.0f, 0.0f, 1.0f, 0.0f));
    }
}

__device__ __forceinline__ void store_chunk(uint8_t* at, const uint32_t (&v)[4]) {
    *reinterpret_cast<uint4*>(at) = make_uint4(v[0], v[1], v[2], v[3]);
}

// Brings one tile of one KV head into the form that attention reads: grid (tiles, heads). Keys that no
// row sees become zeros: their pages may be gone, and zeros cannot make a NaN.
template <int D, bool V, bool E>
__device__ __forceinline__ void prepare(const TileArgs& t) {
    const AttentionArgs& a = t.attention;
    let_dependents_start();
    wait_for_inputs();
    const uint32_t* ends = reinterpret_cast<const uint32_t*>(a.ends) + t.first_row;
    const uint32_t low = first_key(a, ends[0]), high = ends[t.rows - 1];
    const uint32_t* table =
        reinterpret_cast<const uint32_t*>(a.table) + static_cast<uint64_t>(t.sequence) * a.table_pitch;
    const uint32_t table_first = reinterpret_cast<const uint32_t*>(a.table_first)[t.sequence];
    const uint32_t first = (t.first_tile + blockIdx.x) * TILE_KEYS, head = t.first_head + blockIdx.y;
    uint8_t* keys = reinterpret_cast<uint8_t*>(t.tiles) +
                    static_cast<uint64_t>(blockIdx.y * t.tile_count + blockIdx.x) * 2 * SIDE<D>;
    uint8_t* values = keys + SIDE<D>;
    const uint32_t page = first < high && first + TILE_KEYS > low ? table[first / a.page - table_first] : 0;
    const uint64_t rows = static_cast<uint64_t>(page * a.kv_heads + head) * (V ? 1 : 2) * a.page +
                          first % a.page;
    constexpr uint32_t PAIRS = D / 16;
    for (uint32_t item = threadIdx.x; item < TILE_KEYS * PAIRS; item += blockDim.x) {
        const uint32_t key = item / PAIRS, pair = item % PAIRS, position = first + key;
        Halves k = {}, v = {};
        if (position >= low && position < high) {
            v = load_halves<D, E>(a.kv, rows + key + (V ? 0 : a.page), pair);
            if constexpr (V) {
                k = v;
                form_keys<D>(a, position, pair, k);
            } else {
                k = load_halves<D, E>(a.kv, rows + key, pair);
            }
        }
        store_chunk(keys + paired(key, pair, 0, PANEL), k.low);
        store_chunk(keys + paired(key, pair, 1, PANEL), k.high);
        store_chunk(values + pair / 8 * PANEL + in_panel(key, pair % 8), v.low);
        store_chunk(values + (D / 128 + pair / 8) * PANEL + in_panel(key, pair % 8), v.high);
    }
}

#ifdef WARPGROUPS

constexpr uint32_t VECTORS = 64, PARTS = 8;
constexpr uint32_t QUERY_PANEL = VECTORS * 128;
constexpr uint32_t GROUP = 128;            // threads
constexpr uint32_t MESSAGE = GROUP * 48;   // of a tile: weights, maxima, sums
constexpr uint32_t VALUES = 4 * PANEL;     // the columns that a block mixes, of a tile
constexpr uint32_t MIXED = 128;            // of these, a group of mixers

template <int D>
struct Layout {
    static constexpr uint32_t BLOCKS = D / 256;  // of a cluster
    static constexpr uint32_t KEY_SLOTS = D == 512 ? 2 : 4, VALUE_SLOTS = 4, MESSAGES = 4;
    static constexpr uint32_t KEYS = D / 64 * QUERY_PANEL;
    static constexpr uint32_t FIRST_VALUES = KEYS + KEY_SLOTS * SIDE<D>;
    static constexpr uint32_t WEIGHTS = FIRST_VALUES + VALUE_SLOTS * VALUES;
    static constexpr uint32_t BATON = WEIGHTS + MESSAGES * MESSAGE;
    static constexpr uint32_t BARRIERS = BATON + GROUP * 8;
    static constexpr uint32_t BYTES = BARRIERS + 256;  // mirrored in abi/tiles.rs
    static_assert(BYTES <= 227 * 1024, "fits a card");
};

// A slot of a ring and which time round it is.
template <uint32_t SLOTS>
struct Turn {
    uint32_t slot, parity;
    __device__ __forceinline__ explicit Turn(uint32_t use) : slot(use % SLOTS), parity(use / SLOTS % 2) {}
};

struct Barriers {
    uint32_t at;
    __device__ __forceinline__ uint32_t keys_full(uint32_t i) const { return at + i * 8; }
    __device__ __forceinline__ uint32_t keys_empty(uint32_t i) const { return at + 32 + i * 8; }
    __device__ __forceinline__ uint32_t values_full(uint32_t i) const { return at + 64 + i * 8; }
    __device__ __forceinline__ uint32_t values_empty(uint32_t i) const { return at + 96 + i * 8; }
    __device__ __forceinline__ uint32_t weights_full(uint32_t i) const { return at + 128 + i * 8; }
    __device__ __forceinline__ uint32_t weights_empty(uint32_t i) const { return at + 160 + i * 8; }
    __device__ __forceinline__ uint32_t baton() const { return at + 192; }
};

// What a block works on.
struct Work {
    uint32_t rank;            // in the cluster
    uint32_t first, vectors;  // first of its vectors; vectors of the rows and one KV head
    uint32_t head, group;
    uint32_t tile, tiles;     // first tile of 32 positions that a vector sees, and how many
    uint32_t all_from, all_to;  // keys that every vector sees
};

__device__ __forceinline__ uint32_t row_of(const Work& w, uint32_t vector) {
    return min(w.first + vector, w.vectors - 1) / w.group;
}

template <int D>
__device__ __forceinline__ Work work_of_block(const TileArgs& t) {
    constexpr uint32_t BLOCKS = Layout<D>::BLOCKS;
    const AttentionArgs& a = t.attention;
    const uint32_t* ends = reinterpret_cast<const uint32_t*>(a.ends) + t.first_row;
    Work w;
    w.rank = blockIdx.x % BLOCKS;
    w.group = a.heads / a.kv_heads;
    w.head = t.first_head + blockIdx.y;
    w.vectors = t.rows * w.group;
    // The last rows see most and come first.
    w.first = (gridDim.x / BLOCKS - 1 - blockIdx.x / BLOCKS) * VECTORS;
    const uint32_t first = ends[row_of(w, 0)], last = ends[row_of(w, VECTORS - 1)];
    w.all_from = first_key(a, last);
    w.all_to = first;
    // From where a split may begin.
    w.tile = first_key(a, first) / TILE_KEYS / 4 * 4;
    w.tiles = last ? (last - 1) / TILE_KEYS + 1 - w.tile : 0;
    return w;
}

// The block's tile number `tile` among the prepared ones.
template <int D>
__device__ __forceinline__ const uint8_t* prepared(const TileArgs& t, const Work& w, uint32_t tile) {
    const uint64_t at = static_cast<uint64_t>(blockIdx.y) * t.tile_count + w.tile - t.first_tile + tile;
    return reinterpret_cast<const uint8_t*>(t.tiles) + at * 2 * SIDE<D>;
}

// One thread brings the keys of the tiles that this block scores, another the values of all.
template <int D>
__device__ __forceinline__ void feed(const TileArgs& t, const Work& w, uint32_t base, Barriers bars) {
    using L = Layout<D>;
    if (threadIdx.x % GROUP == 0) {
        uint32_t use = 0;
        for (uint32_t tile = w.rank; tile < w.tiles; tile += L::BLOCKS, use++) {
            const Turn<L::KEY_SLOTS> turn(use);
            barrier_wait(bars.keys_empty(turn.slot), turn.parity ^ 1);
            barrier_expect(bars.keys_full(turn.slot), SIDE<D>);
            copy_bulk(base + L::KEYS + turn.slot * SIDE<D>, prepared<D>(t, w, tile), SIDE<D>,
                      bars.keys_full(turn.slot));
        }
    } else if (threadIdx.x % GROUP == 32) {
        for (uint32_t tile = 0; tile < w.tiles; tile++) {
            const Turn<L::VALUE_SLOTS> turn(tile);
            barrier_wait(bars.values_empty(turn.slot), turn.parity ^ 1);
            barrier_expect(bars.values_full(turn.slot), VALUES);
            copy_bulk(base + L::FIRST_VALUES + turn.slot * VALUES,
                      prepared<D>(t, w, tile) + SIDE<D> + w.rank * VALUES, VALUES,
                      bars.values_full(turn.slot));
        }
    }
}

// Four of the eight chains of the scores of 64 vectors and a tile's keys.
constexpr uint32_t CHAINS = 4;
template <int D>
__device__ __forceinline__ void begin_chains(uint32_t queries, uint32_t keys, uint32_t first,
                                             float (&chain)[CHAINS][4][4]) {
    matrix_begin();
#pragma unroll
    for (uint32_t c = 0; c < CHAINS; c++) {
#pragma unroll
        for (uint32_t i = 0; i < D / 16 / PARTS; i++) {
            const uint32_t pair = first + c + i * PARTS;
            const uint64_t q = matrix_rows(queries + pair / 4 * QUERY_PANEL) + pair % 4 * 2;
            const uint64_t k = matrix_rows(keys + pair / 4 * PANEL) + pair % 4 * 2;
            if (i == 0)
                matrix_shared<true>(chain[c], q, k);
            else
                matrix_shared<false>(chain[c], q, k);
        }
    }
    matrix_commit();
}

template <bool FRESH>
__device__ __forceinline__ void add_chains(float (&s)[4][4], const float (&chain)[CHAINS][4][4]) {
    matrix_wait<0>();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float& sum = s[i / 4][i % 4];
        sum = FRESH ? chain[0][i / 4][i % 4] : sum + chain[0][i / 4][i % 4];
#pragma unroll
        for (uint32_t c = 1; c < CHAINS; c++) sum += chain[c][i / 4][i % 4];
    }
}

__device__ __forceinline__ float with_lane(float mine, uint32_t mask) {
    return __shfl_xor_sync(0xffffffffu, mine, mask);
}

// Four warps, sixteen vectors each; a thread has eight keys of vector lane / 4 and of the eighth after.
// The matrix unit is always given the next tile's chains before a tile's scores become weights.
template <int D>
__device__ __forceinline__ void score(const TileArgs& t, const Work& w, uint32_t base, Barriers bars) {
    using L = Layout<D>;
    const AttentionArgs& a = t.attention;
    const uint32_t* ends = reinterpret_cast<const uint32_t*>(a.ends) + t.first_row;
    const uint32_t i = threadIdx.x % GROUP, lane = i % 32;
    const uint32_t peer = w.rank ^ 1;
    uint32_t from[2], to[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        to[h] = ends[row_of(w, i / 32 * 16 + h * 8 + lane / 4)];
        from[h] = first_key(a, to[h]);
    }
    float most[2] = {MINUS_INFINITY, MINUS_INFINITY};
    float s[4][4], chain[CHAINS][4][4];
    if (w.rank < w.tiles) {
        barrier_wait(bars.keys_full(0), 0);
        begin_chains<D>(base, base + L::KEYS, 0, chain);
        add_chains<true>(s, chain);
        begin_chains<D>(base, base + L::KEYS, CHAINS, chain);
        add_chains<false>(s, chain);
        barrier_arrive(bars.keys_empty(0));
    }
    uint32_t use = 0;
    for (uint32_t tile = w.rank; tile < w.tiles; tile += L::BLOCKS) {
        // Behind the last tile the chains are of whatever is in the slot, and nobody reads them.
        const Turn<L::KEY_SLOTS> turn(++use);
        const uint32_t keys = base + L::KEYS + turn.slot * SIDE<D>;
        const bool more = tile + L::BLOCKS < w.tiles;
        float ahead[4][4];
        if (more) barrier_wait(bars.keys_full(turn.slot), turn.parity);
        begin_chains<D>(base, keys, 0, chain);

        const uint32_t position = (w.tile + tile) * TILE_KEYS;
        if (a.score_scale != 1.0f) {
#pragma unroll
            for (int j = 0; j < 16; j++) s[j / 4][j % 4] *= a.score_scale;
        }
        if (position < w.all_from || position + TILE_KEYS > w.all_to) {
#pragma unroll
            for (int j = 0; j < 16; j++) {
                const uint32_t key = position + j / 4 * 8 + lane % 4 * 2 + j % 2, h = j / 2 % 2;
                if (key < from[h] || key >= to[h]) s[j / 4][j % 4] = MINUS_INFINITY;
            }
        }
        float here[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float m = fmaxf(s[0][2 * h], s[0][2 * h + 1]);
#pragma unroll
            for (int j = 1; j < 4; j++) m = fmaxf(m, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            m = fmaxf(m, with_lane(m, 1));
            here[h] = fmaxf(m, with_lane(m, 2));
        }
        // The largest score of the tiles before, from whoever had the last of them.
        if (L::BLOCKS == 2 && tile > 0) {
            barrier_wait_peers(bars.baton(), (tile - 1) / 2 % 2);
            if (i == 0 && tile + 2 < w.tiles) barrier_expect(bars.baton(), GROUP * 8);
            const uint2 word = load_shared8(base + L::BATON + i * 8);
            most[0] = __uint_as_float(word.x);
            most[1] = __uint_as_float(word.y);
        }
        const bool fresh = split_start(split_of(position, a.window), a.window) == position;
#pragma unroll
        for (int h = 0; h < 2; h++) most[h] = fresh ? here[h] : fmaxf(most[h], here[h]);
        if (L::BLOCKS == 2 && tile + 1 < w.tiles)
            send8(peer_address(base + L::BATON + i * 8, peer), most[0], most[1],
                  peer_address(bars.baton(), peer));

        add_chains<true>(ahead, chain);
        begin_chains<D>(base, keys, CHAINS, chain);
        float sum[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float reference = reference_of(most[h]);
            float four[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[j][2 * h] = weight_of(s[j][2 * h] - reference);
                s[j][2 * h + 1] = weight_of(s[j][2 * h + 1] - reference);
                const float two = s[j][2 * h] + s[j][2 * h + 1];
                four[j] = two + with_lane(two, 1);
            }
            const float half = (four[0] + four[2]) + (four[1] + four[3]);
            sum[h] = half + with_lane(half, 2);
        }
        uint4 weights[2];
#pragma unroll
        for (int k = 0; k < 2; k++)
            weights[k] = make_uint4(
                pack_bf16(s[2 * k][0], s[2 * k][1]), pack_bf16(s[2 * k][2], s[2 * k][3]),
                pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]), pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3]));
        const uint4 state = make_uint4(__float_as_uint(most[0]), __float_as_uint(most[1]),
                                       __float_as_uint(sum[0]), __float_as_uint(sum[1]));

        const Turn<L::MESSAGES> message(tile);
        const uint32_t at = base + L::WEIGHTS + message.slot * MESSAGE + i * 16;
        const uint32_t full = bars.weights_full(message.slot);
        barrier_wait(bars.weights_empty(message.slot), message.parity ^ 1);
        store_shared16(at, weights[0]);
        store_shared16(at + GROUP * 16, weights[1]);
        store_shared16(at + GROUP * 32, state);
        barrier_arrive(full);
        if (L::BLOCKS == 2) {
            const uint32_t there = peer_address(at, peer), bar = peer_address(full, peer);
            send16(there, weights[0], bar);
            send16(there + GROUP * 16, weights[1], bar);
            send16(there + GROUP * 32, state, bar);
        }
        add_chains<false>(ahead, chain);
        if (more) barrier_arrive(bars.keys_empty(turn.slot));
#pragma unroll
        for (int j = 0; j < 16; j++) s[j / 4][j % 4] = ahead[j / 4][j % 4];
    }
}

// A tile's largest score so far and sum of weights, of a thread's two vectors.
struct State {
    float most[2], sum[2];
};

// What a group of mixers waits for and reads, all of it at fixed distances from a slot to the next:
// rings of values and of messages have as many slots, and the tile's number modulo it is the slot.
template <int D>
struct Mixer {
    using L = Layout<D>;
    static_assert(L::MESSAGES == L::VALUE_SLOTS, "a tile has the same slot in both");
    uint32_t message, peer_empty;
    uint64_t values;
    bool arms;

    __device__ __forceinline__ Mixer(const Work& w, uint32_t base, Barriers bars, uint32_t part) {
        const uint32_t i = threadIdx.x % GROUP;
        message = base + L::WEIGHTS + i * 16;
        peer_empty = peer_address(bars.weights_empty(0), w.rank ^ (L::BLOCKS - 1));
        values = matrix_columns(base + L::FIRST_VALUES + part * (MIXED / 64) * PANEL, PANEL);
        arms = part == 0 && i == 0;
    }

    // A tile's message is there: its state. The matrix unit may still have the weights before.
    __device__ __forceinline__ State await(const Work& w, Barriers bars, uint32_t tile,
                                           uint32_t slot) const {
        const uint32_t full = bars.weights_full(slot), parity = tile / L::MESSAGES % 2;
        if (L::BLOCKS == 2 && slot % 2 != w.rank) {
            barrier_wait_peers(full, parity);
            if (arms && tile + L::MESSAGES < w.tiles) barrier_expect(full, MESSAGE);
        } else {
            barrier_wait(full, parity);
        }
        const uint4 state = load_shared16(message + slot * MESSAGE + GROUP * 32);
        return {{__uint_as_float(state.x), __uint_as_float(state.y)},
                {__uint_as_float(state.z), __uint_as_float(state.w)}};
    }

    __device__ __forceinline__ void take(const Work& w, Barriers bars, uint32_t slot,
                                         uint4 (&weights)[2]) const {
        weights[0] = load_shared16(message + slot * MESSAGE);
        weights[1] = load_shared16(message + slot * MESSAGE + GROUP * 16);
        if (L::BLOCKS == 2 && slot % 2 != w.rank) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive_peer(peer_empty + slot * 8);
        } else {
            barrier_arrive(bars.weights_empty(slot));
        }
    }
};

// 128 columns of the weighted values of 64 vectors, and what they become in the end.
template <int D>
__device__ __forceinline__ void mix(const TileArgs& t, const Work& w, uint32_t base, Barriers bars,
                                    uint32_t part) {
    using L = Layout<D>;
    constexpr uint32_t SLOTS = L::VALUE_SLOTS;
    const AttentionArgs& a = t.attention;
    const uint32_t i = threadIdx.x % GROUP, lane = i % 32;
    const Mixer<D> mixer(w, base, bars, part);
    float total[16][4] = {};
    float total_most[2] = {MINUS_INFINITY, MINUS_INFINITY}, total_sum[2] = {};
    State state = {};
    if (w.tiles) state = mixer.await(w, bars, 0, 0);
    for (uint32_t first = 0; first < w.tiles;) {
        // A split, or what is there of it; it begins with a ring's first slot.
        const uint32_t split = split_of((w.tile + first) * TILE_KEYS, a.window);
        const uint32_t end = min(w.tiles, split_start(split + 1, a.window) / TILE_KEYS - w.tile);
        float out[16][4] = {};
        float most[2] = {MINUS_INFINITY, MINUS_INFINITY}, sum[2] = {};
        for (; first < end; first += SLOTS) {
#pragma unroll
            for (uint32_t slot = 0; slot < SLOTS; slot++) {
                const uint32_t tile = first + slot;
                if (tile >= end) break;
                float rescale[2];
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    rescale[h] = weight_of(most[h] - reference_of(state.most[h]));
                    sum[h] = sum[h] * rescale[h] + state.sum[h];
                    most[h] = state.most[h];
                }
                uint4 weights[2];
                mixer.take(w, bars, slot, weights);
                // By vote, but times one changes nothing.
                if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
                    for (int n = 0; n < 64; n++) out[n / 4][n % 4] *= rescale[n / 2 % 2];
                }
                barrier_wait(bars.values_full(slot), tile / SLOTS % 2);
                matrix_begin();
                matrix_mix(out, weights[0], mixer.values + slot * (VALUES >> 4));
                matrix_mix(out, weights[1], mixer.values + slot * (VALUES >> 4) + (16 * 128 >> 4));
                matrix_commit();
                if (tile + 1 < w.tiles) state = mixer.await(w, bars, tile + 1, (slot + 1) % SLOTS);
                matrix_wait<0>();
                barrier_arrive(bars.values_empty(slot));
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (most[h] == MINUS_INFINITY) continue;  // the vector sees nothing of the split
            const Join join(total_most[h], most[h]);
            total_most[h] = join.most;
            total_sum[h] = joined(total_sum[h], join.keep, sum[h], join.take);
#pragma unroll
            for (int n = 0; n < 32; n++) {
                float& all = total[n / 2][2 * h + n % 2];
                all = joined(all, join.keep, out[n / 2][2 * h + n % 2], join.take);
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t vector = w.first + i / 32 * 16 + h * 8 + lane / 4;
        if (vector >= w.vectors) continue;
        const uint64_t row = t.first_row + vector / w.group;
        uint16_t* to = reinterpret_cast<uint16_t*>(a.out) + row * a.ldo +
                       (w.head * w.group + vector % w.group) * D + w.rank * 256 + part * MIXED +
                       lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const float x = total[n][2 * h], y = total[n][2 * h + 1];
            *reinterpret_cast<uint32_t*>(to + n * 8) =
                total_most[h] == MINUS_INFINITY
                    ? 0
                    : pack_bf16(x * a.value_scale / total_sum[h], y * a.value_scale / total_sum[h]);
        }
    }
}

template <int D>
__device__ __forceinline__ void load_queries(const TileArgs& t, const Work& w, uint8_t* to) {
    const AttentionArgs& a = t.attention;
    for (uint32_t item = threadIdx.x; item < VECTORS * D / 8; item += blockDim.x) {
        const uint32_t vector = item / (D / 8), chunk = item % (D / 8);
        const uint32_t v = w.first + vector;
        uint4 some = make_uint4(0, 0, 0, 0);
        if (v < w.vectors)
            some = *(reinterpret_cast<const uint4*>(
                         reinterpret_cast<const uint16_t*>(a.q) +
                         static_cast<uint64_t>(t.first_row + v / w.group) * a.ldq +
                         (w.head * w.group + v % w.group) * D) +
                     chunk);
        const uint32_t half = chunk / (D / 16), pair = chunk % (D / 16);
        *reinterpret_cast<uint4*>(to + paired(vector, pair, half, QUERY_PANEL)) = some;
    }
}

template <int D>
__device__ __forceinline__ void attend(const TileArgs& t) {
    using L = Layout<D>;
    extern __shared__ __align__(1024) uint8_t shared[];
    let_dependents_start();
    const uint32_t base = shared_address(shared);
    const Barriers bars = {base + L::BARRIERS};
    wait_for_inputs();
    const Work w = work_of_block<D>(t);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < L::KEY_SLOTS; i++) {
            barrier_init(bars.keys_full(i), 1);
            barrier_init(bars.keys_empty(i), GROUP);
        }
        for (uint32_t i = 0; i < L::VALUE_SLOTS; i++) {
            barrier_init(bars.values_full(i), 1);
            barrier_init(bars.values_empty(i), 2 * GROUP);
        }
        for (uint32_t i = 0; i < L::MESSAGES; i++) {
            // A message of the peer counts bytes; a block's own, arrivals.
            const bool remote = L::BLOCKS == 2 && i % 2 != w.rank;
            barrier_init(bars.weights_full(i), remote ? 1 : GROUP);
            barrier_init(bars.weights_empty(i), 2 * GROUP + (L::BLOCKS == 2 ? 8 : 0));
        }
        barrier_init(bars.baton(), 1);
        barriers_ready();
        if (L::BLOCKS == 2) {
            for (uint32_t i = w.rank ^ 1; i < L::MESSAGES; i += 2)
                barrier_expect(bars.weights_full(i), MESSAGE);
            barrier_expect(bars.baton(), GROUP * 8);
        }
    }
    load_queries<D>(t, w, shared);
    fence_for_matrix_unit();
    __syncthreads();
    if (L::BLOCKS == 2) {
        cluster_arrive();
        cluster_wait();
    }
    const uint32_t group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP, 0);  // the same in a warp
    if (group == 3) {
        fewer_registers<24>();
        feed<D>(t, w, base, bars);
    } else if (group == 0) {
        more_registers<152>();
        score<D>(t, w, base, bars);
    } else {
        more_registers<168>();
        mix<D>(t, w, base, bars, group - 1);
    }
    if (L::BLOCKS == 2) {  // a peer may still be sent to
        __syncwarp();
        cluster_arrive();
        cluster_wait();
    }
}

#endif

}  // namespace

#define PREPARE(name, dim, values_only, fp8)                                                       \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ TileArgs t) {   \
        prepare<dim, values_only, fp8>(t);                                                         \
    }

PREPARE(prepare_tiles_d256, 256, false, false)
PREPARE(prepare_tiles_fp8_d256, 256, false, true)
PREPARE(prepare_tiles_d512, 512, false, false)
PREPARE(prepare_tiles_fp8_d512, 512, false, true)
PREPARE(prepare_tiles_values_d512, 512, true, false)
PREPARE(prepare_tiles_values_fp8_d512, 512, true, true)

#ifdef WARPGROUPS
extern "C" __global__ void __launch_bounds__(512, 1)
    attention_tiles_d256(const __grid_constant__ TileArgs t) {
    attend<256>(t);
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(512, 1)
    attention_tiles_d512(const __grid_constant__ TileArgs t) {
    attend<512>(t);
}
#endif
