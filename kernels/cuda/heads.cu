// Norms and turns queries and keys, norms values, and writes keys and values to their pages.
//
// Floor: a launch; the bytes are tens of kilobytes a row. A warp has a head. A lane holds as many
// elements of the lower half of the head as of the upper half, the partners it turns them with, so
// nothing but the sum of squares crosses lanes. What a product before does not write is read while it
// still runs.
//
// Compiled for all targets; run on Hopper.
#include "abi.cuh"
#include "codes.cuh"
#include "math.cuh"
#include "ptx.cuh"

namespace {

// D/64 elements of each half of a head.
template <int D>
struct Part {
    static constexpr int N = D / 64;
    float low[N], high[N];
};

template <int N>
__device__ __forceinline__ void read_some(const uint16_t* p, float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = from_bf16(p[i]);
}

template <int N>
__device__ __forceinline__ void write_some(uint16_t* p, const float (&v)[N]) {
    if constexpr (N == 1) {
        p[0] = to_bf16(v[0]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            *reinterpret_cast<uint32_t*>(p + i) = pack_bf16(v[i], v[i + 1]);
    }
}

template <int D>
__device__ __forceinline__ Part<D> read_head(const uint16_t* head, uint32_t lane) {
    Part<D> p;
    read_some(head + lane * Part<D>::N, p.low);
    read_some(head + D / 2 + lane * Part<D>::N, p.high);
    return p;
}

template <int D>
__device__ __forceinline__ void write_head(uint16_t* head, uint32_t lane, const Part<D>& p) {
    write_some(head + lane * Part<D>::N, p.low);
    write_some(head + D / 2 + lane * Part<D>::N, p.high);
}

// The same in FP8; `head` is half as long.
template <int D>
__device__ __forceinline__ void write_codes(uint16_t* head, uint32_t lane, const Part<D>& p,
                                            float scale) {
    constexpr int N = Part<D>::N;
    uint32_t pairs[N];
#pragma unroll
    for (int i = 0; i < N; i++) pairs[i] = pack_codes(p.low[i], p.high[i], scale);
    uint16_t* to = head + lane * N;
    if constexpr (N == 1) {
        to[0] = static_cast<uint16_t>(pairs[0]);
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            *reinterpret_cast<uint32_t*>(to + i) = pairs[i] | pairs[i + 1] << 16;
    }
}

// A head's norm weights.
template <int D>
__device__ __forceinline__ Part<D> read_weights(dptr at, uint32_t lane) {
    constexpr int N = Part<D>::N;
    const float* weight = reinterpret_cast<const float*>(at);
    Part<D> p;
#pragma unroll
    for (int i = 0; i < N; i++) {
        p.low[i] = weight[lane * N + i];
        p.high[i] = weight[D / 2 + lane * N + i];
    }
    return p;
}

// Divided by its root mean square and multiplied by the weights, if any; rounded.
template <int D, bool WEIGHTED>
__device__ __forceinline__ void norm_head(Part<D>& p, const Part<D>& weight, float eps) {
    constexpr int N = Part<D>::N;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) sum += p.low[i] * p.low[i];
#pragma unroll
    for (int i = 0; i < N; i++) sum += p.high[i] * p.high[i];
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    const float inverse = 1.0f / sqrtf(sum / static_cast<float>(D) + eps);
#pragma unroll
    for (int i = 0; i < N; i++) {
        p.low[i] = p.low[i] * inverse;
        p.high[i] = p.high[i] * inverse;
        if (WEIGHTED) {
            p.low[i] = p.low[i] * weight.low[i];
            p.high[i] = p.high[i] * weight.high[i];
        }
        p.low[i] = round_bf16(p.low[i]);
        p.high[i] = round_bf16(p.high[i]);
    }
}

// A lane's cosines and sines, of the first `pairs` pairs.
template <int D>
struct Turns {
    float2 of[Part<D>::N];
};

template <int D>
__device__ __forceinline__ Turns<D> read_turns(const float2* turns, uint32_t pairs, uint32_t lane) {
    constexpr int N = Part<D>::N;
    Turns<D> t;
#pragma unroll
    for (int i = 0; i < N; i++)
        t.of[i] = lane * N + i < pairs ? turns[lane * N + i] : make_float2(1.0f, 0.0f);
    return t;
}

// Turns the first `pairs` pairs and rounds.
template <int D>
__device__ __forceinline__ void turn(Part<D>& p, const Turns<D>& turns, uint32_t pairs,
                                     uint32_t lane) {
    constexpr int N = Part<D>::N;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (lane * N + i < pairs) {
            const float2 t = turns.of[i];
            const float low = p.low[i], high = p.high[i];
            p.low[i] = low * t.x - high * t.y;
            p.high[i] = high * t.x + low * t.y;
        }
        p.low[i] = round_bf16(p.low[i]);
        p.high[i] = round_bf16(p.high[i]);
    }
}

template <int D>
__device__ __forceinline__ void run(const HeadsArgs& a) {
    let_dependents_start();
    const uint32_t lane = threadIdx.x % 32, row = blockIdx.y;
    uint32_t unit = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    uint16_t* x = reinterpret_cast<uint16_t*>(a.qkv) + static_cast<uint64_t>(row) * a.ld;
    const uint32_t position = reinterpret_cast<const uint32_t*>(a.positions)[row];
    const Turns<D> turns = read_turns<D>(reinterpret_cast<const float2*>(a.turns) +
                                             static_cast<uint64_t>(position) * a.pairs,
                                         a.pairs, lane);
    if (unit < a.heads) {
        const Part<D> weight = read_weights<D>(a.q_norm, lane);
        wait_for_inputs();
        Part<D> q = read_head<D>(x + unit * D, lane);
        norm_head<D, true>(q, weight, a.eps);
        turn(q, turns, a.pairs, lane);
        write_head(x + unit * D, lane, q);
        return;
    }
    unit -= a.heads;
    if (!a.k_norm || unit >= a.kv_heads) {
        wait_for_inputs();  // a kernel that ends has waited for all in front of it
        return;
    }
    const Part<D> weight = read_weights<D>(a.k_norm, lane);
    const uint32_t seq = reinterpret_cast<const uint32_t*>(a.row_seq)[row];
    const uint32_t* table =
        reinterpret_cast<const uint32_t*>(a.table) + static_cast<uint64_t>(seq) * a.table_pitch;
    const uint32_t page =
        table[position / a.page - reinterpret_cast<const uint32_t*>(a.table_first)[seq]];
    const uint64_t slot = static_cast<uint64_t>(page) * a.kv_heads + unit;
    // A slot of keys or of values; in FP8 of half as many half words.
    const bool codes = a.value_scale > 0.0f;
    const uint32_t width = codes ? D / 2 : D;
    uint16_t* pages = reinterpret_cast<uint16_t*>(a.kv);
    uint16_t* keys = pages + (slot * 2 * a.page + position % a.page) * width;
    uint16_t* values = a.from_values ? pages + (slot * a.page + position % a.page) * width
                                     : keys + static_cast<uint64_t>(a.page) * width;

    wait_for_inputs();
    const uint16_t* k_at = x + (a.heads + unit) * D;
    const uint16_t* v_at = a.from_values ? k_at : k_at + a.kv_heads * D;
    Part<D> v = read_head<D>(v_at, lane);
    norm_head<D, false>(v, weight, a.eps);
    codes ? write_codes(values, lane, v, a.value_scale) : write_head(values, lane, v);
    if (a.from_values) return;  // attention forms the keys
    Part<D> k = read_head<D>(k_at, lane);
    norm_head<D, true>(k, weight, a.eps);
    turn(k, turns, a.pairs, lane);
    codes ? write_codes(keys, lane, k, a.key_scale) : write_head(keys, lane, k);
}

}  // namespace

// Grid (blocks of warps over heads and KV heads, rows).
extern "C" __global__ void heads_d64(const __grid_constant__ HeadsArgs a) { run<64>(a); }
extern "C" __global__ void heads_d128(const __grid_constant__ HeadsArgs a) { run<128>(a); }
extern "C" __global__ void heads_d256(const __grid_constant__ HeadsArgs a) { run<256>(a); }
extern "C" __global__ void heads_d512(const __grid_constant__ HeadsArgs a) { run<512>(a); }
