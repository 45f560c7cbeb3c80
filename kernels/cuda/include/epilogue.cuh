// What happens to the fp32 total of a product before it leaves the kernel.
#pragma once
#include "abi.cuh"
#include "math.cuh"

// The projection's output as every later step sees it: scaled once in fp32, rounded once.
__device__ __forceinline__ float projected(const LinearArgs& a, float total, uint32_t row) {
    const float* scale = reinterpret_cast<const float*>(a.row_scale);
    return round_bf16(scale ? total * scale[row] : total);
}

// Of a plain row.
__device__ __forceinline__ void finish(const LinearArgs& a, float total, uint32_t m, uint32_t row) {
    float v = projected(a, total, row);
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

// Of a gate row (packed row 16 j + g, g < 8) and its up row (8 further): column 8 j + g.
__device__ __forceinline__ void finish_gated(const LinearArgs& a, float gate, float up, uint32_t m,
                                             uint32_t row) {
    float v = gelu_tanh(projected(a, gate, row)) * projected(a, up, row + 8);
    uint64_t column = row / 16 * 8 + row % 16;
    reinterpret_cast<uint16_t*>(a.y)[static_cast<uint64_t>(m) * a.ldy + column] = to_bf16(v);
}
