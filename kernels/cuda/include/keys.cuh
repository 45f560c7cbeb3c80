// Keys of values-only layers: turn(norm weight x value), rounded once.
#pragma once
#include "math.cuh"

// A key's pair of lower elements and their partners, from its values. `turn` is cosine, sine of the
// first element, then of the second.
template <bool TURNS>
__device__ __forceinline__ void form_key(uint32_t& low, uint32_t& high, const float (&norm)[4],
                                         float4 turn) {
    float l[2] = {low_bf16(low) * norm[0], high_bf16(low) * norm[1]};
    float h[2] = {low_bf16(high) * norm[2], high_bf16(high) * norm[3]};
    if (TURNS) {
        const float cosine[2] = {turn.x, turn.z}, sine[2] = {turn.y, turn.w};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float x = l[i], y = h[i];
            l[i] = x * cosine[i] - y * sine[i];
            h[i] = y * cosine[i] + x * sine[i];
        }
    }
    low = pack_bf16(l[0], l[1]);
    high = pack_bf16(h[0], h[1]);
}
