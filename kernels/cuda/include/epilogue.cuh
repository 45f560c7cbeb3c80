// What happens to the fp32 total of a product before it leaves the kernel.
#pragma once
#include "abi.cuh"
#include "math.cuh"

// What a row's sum is multiplied by; times 1 is exact.
__device__ __forceinline__ float row_scale(const LinearArgs& a, uint32_t row) {
    return a.row_scale && row < a.n ? reinterpret_cast<const float*>(a.row_scale)[row] : 1.0f;
}

// The projection's output as every later step sees it: scaled once in fp32, rounded once.
__device__ __forceinline__ float projected(float total, float scale) {
    return round_bf16(total * scale);
}

// Of a plain row.
__device__ __forceinline__ void finish(const LinearArgs& a, float total, float scale, uint32_t m,
                                       uint32_t row) {
    float v = projected(total, scale);
    uint64_t at = static_cast<uint64_t>(m) * a.ldy + row;
    if (a.epilogue == EPILOGUE_LOGITS) {
        if (a.softcap > 0.0f) v = a.softcap * tanh_ours(v / a.softcap);
        reinterpret_cast<float*>(a.y)[at] = v;
        return;
    }
    if (a.epilogue == EPILOGUE_GELU_MUL) {
        const uint16_t* z = reinterpret_cast<const uint16_t*>(a.z);
        v = gelu_tanh(v) * from_bf16(z[static_cast<uint64_t>(m) * a.ldz + row]);
    }
    reinterpret_cast<uint16_t*>(a.y)[at] = to_bf16(v);
}

// Of gate row 16 j + g (g < 8) and its up row (8 further): column 8 j + g.
__device__ __forceinline__ void finish_gated(const LinearArgs& a, float gate, float gate_scale,
                                             float up, float up_scale, uint32_t m, uint32_t row) {
    float v = gelu_tanh(projected(gate, gate_scale)) * projected(up, up_scale);
    uint64_t column = row / 16 * 8 + row % 16;
    reinterpret_cast<uint16_t*>(a.y)[static_cast<uint64_t>(m) * a.ldy + column] = to_bf16(v);
}

// Of a thread's part of an mma result: rows `row` and `row` + 8, columns m and m + 1.
__device__ __forceinline__ void finish_four(const LinearArgs& a, const float (&total)[4],
                                            float scale, float scale_below, uint32_t m,
                                            uint32_t row) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
        if (m + c >= a.m) continue;
        if (a.epilogue == EPILOGUE_GATED) {
            if (row + 8 < a.n)
                finish_gated(a, total[c], scale, total[c + 2], scale_below, m + c, row);
        } else {
            if (row < a.n) finish(a, total[c], scale, m + c, row);
            if (row + 8 < a.n) finish(a, total[c + 2], scale_below, m + c, row + 8);
        }
    }
}

// Of eight rows from `row` on, multiples of 8, as `projected` left them.
__device__ __forceinline__ void finish_eight(const LinearArgs& a, uint4 words, uint32_t m,
                                             uint32_t row) {
    const uint32_t w[4] = {words.x, words.y, words.z, words.w};
    const uint64_t at = static_cast<uint64_t>(m) * a.ldy + row;
    if (a.epilogue == EPILOGUE_STORE && row + 8 <= a.n) {
        *reinterpret_cast<uint4*>(reinterpret_cast<uint16_t*>(a.y) + at) = words;
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (row + i < a.n)
            finish(a, i % 2 ? high_bf16(w[i / 2]) : low_bf16(w[i / 2]), 1.0f, m, row + i);
}

// Of eight gate rows (packed rows 16 j + 0..7) and their up rows.
__device__ __forceinline__ void finish_eight_gated(const LinearArgs& a, uint4 gates, uint4 ups,
                                                   uint32_t m, uint32_t row) {
    if (row + 16 > a.n) {
        const uint32_t g[4] = {gates.x, gates.y, gates.z, gates.w};
        const uint32_t u[4] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (row + i + 8 < a.n)
                finish_gated(a, i % 2 ? high_bf16(g[i / 2]) : low_bf16(g[i / 2]), 1.0f,
                             i % 2 ? high_bf16(u[i / 2]) : low_bf16(u[i / 2]), 1.0f, m, row + i);
        return;
    }
    const auto both = [](uint32_t gate, uint32_t up) {
        return pack_bf16(gelu_tanh(low_bf16(gate)) * low_bf16(up),
                         gelu_tanh(high_bf16(gate)) * high_bf16(up));
    };
    uint16_t* y = reinterpret_cast<uint16_t*>(a.y) + static_cast<uint64_t>(m) * a.ldy + row / 2;
    *reinterpret_cast<uint4*>(y) = make_uint4(both(gates.x, ups.x), both(gates.y, ups.y),
                                              both(gates.z, ups.z), both(gates.w, ups.w));
}
