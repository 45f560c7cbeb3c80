// Every operation in fp32, for any shape, one simple way: what small checkpoints in fp32 and heads
// of unusual sizes run on, and what the fast units are held against. No tiles, no tensor cores.
//
// Floor: none is aimed at; a product reads its weights once per row.
//
// A row's sums have one order that depends on the width alone.
#include "abi.cuh"
#include "codes.cuh"
#include "experts.cuh"
#include "math.cuh"
#include "ptx.cuh"
#include "splits.cuh"

namespace {

__device__ __forceinline__ float* row_at(dptr base, uint64_t row, uint32_t pitch) {
    return reinterpret_cast<float*>(base) + row * pitch;
}

__device__ __forceinline__ float warp_sum(float sum) {
#pragma unroll
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    return sum;
}

__device__ __forceinline__ float dot(const float* x, const float* w, uint32_t k) {
    float sum = 0.0f;
    for (uint32_t i = threadIdx.x % 32; i < k; i += 32) sum += x[i] * w[i];
    return warp_sum(sum);
}

// 1 / sqrt(mean square + eps) of `width` numbers, by a warp.
__device__ __forceinline__ float inverse_rms(const float* x, uint32_t width, float eps) {
    return 1.0f / sqrtf(dot(x, x, width) / static_cast<float>(width) + eps);
}

// A number of the cache: fp32, or a code of FP8.
__device__ __forceinline__ float cached(dptr kv, uint64_t at, bool codes) {
    return codes ? e4m3_value(reinterpret_cast<const uint8_t*>(kv)[at])
                 : reinterpret_cast<const float*>(kv)[at];
}

__device__ __forceinline__ void cache(dptr kv, uint64_t at, float x, float scale) {
    if (scale > 0.0f)
        reinterpret_cast<uint8_t*>(kv)[at] = static_cast<uint8_t>(e4m3_code(x / scale));
    else
        reinterpret_cast<float*>(kv)[at] = x;
}

// Norms a head and turns its first pairs, in place, by a warp.
__device__ __forceinline__ void norm_head(float* head, uint32_t dim, const float* weight, float eps,
                                          const float2* turns, uint32_t pairs) {
    const float inverse = inverse_rms(head, dim, eps);
    for (uint32_t i = threadIdx.x % 32; i < dim / 2; i += 32) {
        const float low = head[i] * inverse * weight[i];
        const float high = head[i + dim / 2] * inverse * weight[i + dim / 2];
        const float2 t = i < pairs ? turns[i] : make_float2(1.0f, 0.0f);
        head[i] = low * t.x - high * t.y;
        head[i + dim / 2] = high * t.x + low * t.y;
    }
}

template <int D>
__device__ __forceinline__ void heads(const HeadsArgs& a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.y, lane = threadIdx.x;
    uint32_t unit = blockIdx.x;
    float* x = row_at(a.qkv, row, a.ld);
    const uint32_t position = reinterpret_cast<const uint32_t*>(a.positions)[row];
    const float2* turns = reinterpret_cast<const float2*>(a.turns) +
                          static_cast<uint64_t>(position) * a.pairs;
    if (unit < a.heads) {
        norm_head(x + unit * D, D, reinterpret_cast<const float*>(a.q_norm), a.eps, turns, a.pairs);
        return;
    }
    unit -= a.heads;
    if (!a.k_norm || unit >= a.kv_heads) return;
    const uint32_t seq = reinterpret_cast<const uint32_t*>(a.row_seq)[row];
    const uint32_t* table =
        reinterpret_cast<const uint32_t*>(a.table) + static_cast<uint64_t>(seq) * a.table_pitch;
    const uint32_t page =
        table[position / a.page - reinterpret_cast<const uint32_t*>(a.table_first)[seq]];
    const uint64_t slot = static_cast<uint64_t>(page) * a.kv_heads + unit;
    const uint64_t keys = (slot * 2 * a.page + position % a.page) * D;
    const uint64_t values = a.from_values ? (slot * a.page + position % a.page) * D
                                          : keys + static_cast<uint64_t>(a.page) * D;
    float* k = x + (a.heads + unit) * D;
    const float* v = a.from_values ? k : k + a.kv_heads * D;
    const float inverse = inverse_rms(v, D, a.eps);
    for (uint32_t i = lane; i < D; i += 32) cache(a.kv, values + i, v[i] * inverse, a.value_scale);
    if (a.from_values) return;  // attention forms the keys
    norm_head(k, D, reinterpret_cast<const float*>(a.k_norm), a.eps, turns, a.pairs);
    for (uint32_t i = lane; i < D / 2; i += 32) {  // the halves that this lane has turned itself
        cache(a.kv, keys + i, k[i], a.key_scale);
        cache(a.kv, keys + i + D / 2, k[i + D / 2], a.key_scale);
    }
}

// One warp has one query vector and walks its keys in tiles of 32 on absolute positions: a lane
// scores a key, then every lane adds up its elements of the values.
template <int D, bool V>
__device__ __forceinline__ void attend(const AttentionArgs& a) {
    __shared__ float weights[TILE_KEYS];
    __shared__ uint64_t slots[TILE_KEYS];
    let_dependents_start();
    wait_for_inputs();
    const uint4 span = reinterpret_cast<const uint4*>(a.spans)[blockIdx.z];
    if (blockIdx.y >= span.y) return;
    const uint32_t row = span.x + blockIdx.y, head = blockIdx.x, lane = threadIdx.x;
    const uint32_t kv_head = head / (a.heads / a.kv_heads);
    const uint32_t end = reinterpret_cast<const uint32_t*>(a.ends)[row];
    const uint32_t low = a.window && end > a.window ? end - a.window : 0;
    const float* q = row_at(a.q, row, a.ldq) + head * D;
    const uint32_t* table = reinterpret_cast<const uint32_t*>(a.table) +
                            static_cast<uint64_t>(span.z) * a.table_pitch;
    const uint32_t table_first = reinterpret_cast<const uint32_t*>(a.table_first)[span.z];
    const float* norm = reinterpret_cast<const float*>(a.k_norm);
    constexpr int PART = (D + 31) / 32;
    constexpr uint64_t NOWHERE = ~0ull;
    float out[PART] = {};
    float most = MINUS_INFINITY, sum = 0.0f;
    for (uint32_t tile = low / TILE_KEYS * TILE_KEYS; tile < end; tile += TILE_KEYS) {
        const uint32_t key = tile + lane;
        const bool seen = key >= low && key < end;
        float score = MINUS_INFINITY;
        uint64_t values = NOWHERE;
        if (seen) {
            const uint64_t page = table[key / a.page - table_first];
            const uint64_t at =
                ((page * a.kv_heads + kv_head) * (V ? 1 : 2) * a.page + key % a.page) * D;
            values = V ? at : at + static_cast<uint64_t>(a.page) * D;
            score = 0.0f;
            if (V) {
                const float2* turns = reinterpret_cast<const float2*>(a.turns) +
                                      static_cast<uint64_t>(key) * a.pairs;
                for (uint32_t i = 0; i < D / 2; i++) {
                    const float x = cached(a.kv, at + i, a.codes) * norm[i];
                    const float y = cached(a.kv, at + i + D / 2, a.codes) * norm[i + D / 2];
                    const float2 t = i < a.pairs ? turns[i] : make_float2(1.0f, 0.0f);
                    score += q[i] * (x * t.x - y * t.y);
                    score += q[i + D / 2] * (y * t.x + x * t.y);
                }
            } else {
                for (uint32_t i = 0; i < D; i++) score += q[i] * cached(a.kv, at + i, a.codes);
            }
            score *= a.score_scale;
        }
        float highest = score;
#pragma unroll
        for (int step = 16; step; step /= 2)
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, step));
        highest = fmaxf(highest, most);
        const float rescale = exp_ours(most - highest), weight = exp_ours(score - highest);
        most = highest;
        sum = sum * rescale + warp_sum(weight);
        __syncthreads();  // all have read the tile before
        weights[lane] = weight;
        slots[lane] = values;
        __syncthreads();
#pragma unroll
        for (int p = 0; p < PART; p++) out[p] *= rescale;
        for (uint32_t i = 0; i < TILE_KEYS; i++) {
            if (slots[i] == NOWHERE) continue;
#pragma unroll
            for (int p = 0; p < PART; p++)
                if (p * 32 + lane < D)
                    out[p] += weights[i] * cached(a.kv, slots[i] + p * 32 + lane, a.codes);
        }
    }
    float* to = row_at(a.out, row, a.ldo) + head * D;
#pragma unroll
    for (int p = 0; p < PART; p++)
        if (p * 32 + lane < D)
            to[p * 32 + lane] = sum > 0.0f ? out[p] * a.value_scale / sum : 0.0f;
}

}  // namespace

// y = x W^T, W [n][k] as stored. Grid (blocks of eight n, rows), a warp an output.
extern "C" __global__ void __launch_bounds__(256) plain_linear(const __grid_constant__ LinearArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t n = blockIdx.x * 8 + threadIdx.x / 32, m = blockIdx.y;
    if (n >= a.n) return;
    float v = dot(row_at(a.x, m, a.ldx), row_at(a.weight, n, a.k), a.k);
    if (a.epilogue == EPILOGUE_LOGITS && a.softcap > 0.0f) v = a.softcap * tanh_ours(v / a.softcap);
    if (threadIdx.x % 32 == 0) row_at(a.y, m, a.ldy)[n] = v;
}

// The product of every pair with its expert's matrix. Grid (blocks of eight n, pairs).
extern "C" __global__ void __launch_bounds__(256)
    plain_experts(const __grid_constant__ ExpertArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t n = blockIdx.x * 8 + threadIdx.x / 32, pair = blockIdx.y;
    if (n >= a.n) return;
    const uint32_t row = a.by_row ? pair / a.top : reinterpret_cast<const uint32_t*>(a.place)[pair];
    const uint64_t expert = reinterpret_cast<const uint32_t*>(a.chosen)[pair];
    const float* matrix = reinterpret_cast<const float*>(a.weight) + expert * (a.stride / 4);
    const float v = dot(row_at(a.x, row, a.ldx), matrix + static_cast<uint64_t>(n) * a.k, a.k);
    const uint32_t to = reinterpret_cast<const uint32_t*>(a.place)[pair];
    if (threadIdx.x % 32 == 0) row_at(a.y, to, a.ldy)[n] = v;
}

// Norms: grid (rows), one warp.
extern "C" __global__ void plain_norm_rows(const __grid_constant__ NormArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const float* x = row_at(a.x, blockIdx.x, a.ldx);
    float* out = row_at(a.out, blockIdx.x, a.ldo);
    const float* weight = reinterpret_cast<const float*>(a.weight);
    const float inverse = inverse_rms(x, a.width, a.eps);
    for (uint32_t i = threadIdx.x; i < a.width; i += 32) out[i] = x[i] * inverse * weight[i];
}

extern "C" __global__ void plain_add_norm(const __grid_constant__ NormArgs a) {
    let_dependents_start();
    wait_for_inputs();
    float* x = row_at(a.x, blockIdx.x, a.ldx);
    const float* branch = row_at(a.branch, blockIdx.x, a.ldb);
    const float* weight = reinterpret_cast<const float*>(a.weight);
    const float inverse = inverse_rms(branch, a.width, a.eps);
    for (uint32_t i = threadIdx.x; i < a.width; i += 32)
        x[i] = (x[i] + branch[i] * inverse * weight[i]) * a.scale;
    if (!a.other) return;
    // A lane reads what it wrote itself.
    const float* next = reinterpret_cast<const float*>(a.other);
    float* out = row_at(a.out, blockIdx.x, a.ldo);
    const float again = inverse_rms(x, a.width, a.other_eps);
    for (uint32_t i = threadIdx.x; i < a.width; i += 32) out[i] = x[i] * again * next[i];
}

extern "C" __global__ void plain_sum_norms(const __grid_constant__ NormArgs a) {
    let_dependents_start();
    wait_for_inputs();
    float* x = row_at(a.x, blockIdx.x, a.ldx);
    const float* branch = row_at(a.branch, blockIdx.x, a.ldb);
    const float* weight = reinterpret_cast<const float*>(a.weight);
    const float* other = reinterpret_cast<const float*>(a.other);
    const float of_x = inverse_rms(x, a.width, a.other_eps);
    const float of_branch = inverse_rms(branch, a.width, a.eps);
    for (uint32_t i = threadIdx.x; i < a.width; i += 32)
        x[i] = x[i] * of_x * other[i] + branch[i] * of_branch * weight[i];
}

// What the router reads: x / rms * scale * root. Grid (rows), one warp.
extern "C" __global__ void plain_router_input(const __grid_constant__ ExpertArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const float* x = row_at(a.x, blockIdx.x, a.ldx);
    const float* scale = reinterpret_cast<const float*>(a.weight);
    float* y = row_at(a.y, blockIdx.x, a.ldy);
    const float inverse = inverse_rms(x, a.k, a.eps);
    for (uint32_t i = threadIdx.x; i < a.k; i += 32) y[i] = x[i] * inverse * scale[i] * a.root;
}

// y = the weighted results of a row's experts, by expert number. Grid (blocks of columns, rows).
extern "C" __global__ void plain_experts_sum(const __grid_constant__ ExpertArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t row = blockIdx.y, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= a.n) return;
    float sum = 0.0f;
    for (uint32_t s = 0; s < a.top; s++) {
        const uint32_t pair = row * a.top + s;
        const uint32_t place = reinterpret_cast<const uint32_t*>(a.place)[pair];
        sum += reinterpret_cast<const float*>(a.share)[pair] * row_at(a.x, place, a.ldx)[i];
    }
    row_at(a.y, row, a.ldy)[i] = sum;
}

// Element by element: as the unit rows has them. Grid (blocks of columns, rows).
extern "C" __global__ void plain_embed(const __grid_constant__ RowsArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t token = reinterpret_cast<const uint32_t*>(a.index)[blockIdx.y];
    if (k < a.width) row_at(a.out, blockIdx.y, a.ldo)[k] = row_at(a.a, token, a.lda)[k] * a.scale;
}

extern "C" __global__ void plain_gather(const __grid_constant__ RowsArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32_t row = reinterpret_cast<const uint32_t*>(a.index)[blockIdx.y];
    if (k < a.width) row_at(a.out, blockIdx.y, a.ldo)[k] = row_at(a.a, row, a.lda)[k];
}

extern "C" __global__ void plain_gelu_mul(const __grid_constant__ RowsArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t k = blockIdx.x * blockDim.x + threadIdx.x;
    if (k < a.width)
        row_at(a.out, blockIdx.y, a.ldo)[k] =
            gelu_tanh(row_at(a.a, blockIdx.y, a.lda)[k]) * row_at(a.b, blockIdx.y, a.ldb)[k];
}

// Grid (layers, rows), one warp.
extern "C" __global__ void plain_layer_inputs(const __grid_constant__ RowsArgs a) {
    let_dependents_start();
    wait_for_inputs();
    const uint32_t first = blockIdx.x * a.width;
    const float* context = row_at(a.b, blockIdx.y, a.ldb) + first;
    const uint32_t token = reinterpret_cast<const uint32_t*>(a.index)[blockIdx.y];
    const float* identity = row_at(a.a, token, a.lda) + first;
    const float* weight = reinterpret_cast<const float*>(a.weight);
    float* out = row_at(a.out, blockIdx.y, a.ldo) + first;
    float sum = 0.0f;
    for (uint32_t k = threadIdx.x; k < a.width; k += 32) {
        const float scaled = context[k] * a.other_scale;
        sum += scaled * scaled;
    }
    const float inverse = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(a.width) + a.eps);
    for (uint32_t k = threadIdx.x; k < a.width; k += 32)
        out[k] = (context[k] * a.other_scale * inverse * weight[k] + identity[k] * a.scale) * 0.70710678f;
}

// Heads: grid (heads and KV heads, rows), one warp. Attention: grid (heads, rows of a span, spans),
// one warp.
#define PLAIN_HEADS(dim)                                                                          \
    extern "C" __global__ void plain_heads_d##dim(const __grid_constant__ HeadsArgs a) {          \
        heads<dim>(a);                                                                            \
    }                                                                                             \
    extern "C" __global__ void plain_attention_d##dim(const __grid_constant__ AttentionArgs a) {  \
        attend<dim, false>(a);                                                                    \
    }                                                                                             \
    extern "C" __global__ void plain_attention_values_d##dim(                                     \
        const __grid_constant__ AttentionArgs a) {                                                \
        attend<dim, true>(a);                                                                     \
    }

PLAIN_HEADS(8)
PLAIN_HEADS(16)
PLAIN_HEADS(32)
PLAIN_HEADS(64)
PLAIN_HEADS(128)
PLAIN_HEADS(256)
PLAIN_HEADS(512)
