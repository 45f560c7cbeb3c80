// The grid of absolute positions on which attention is split. Part of the numeric definition:
// a split's keys are reduced tile by tile, and splits are merged in order.
#pragma once
#include <cstdint>

constexpr uint32_t TILE_KEYS = 32;

// Sliding layers: 128 keys everywhere. Full layers: 128 keys up to position 4096, so that short
// contexts fill the card, then 256, 512 and from 16384 on 1024, so that partial results stay a
// small share of the keys' bytes.
__device__ __forceinline__ uint32_t split_start(uint32_t i, bool sliding) {
    if (sliding || i < 32) return i * 128;
    if (i < 48) return 4096 + (i - 32) * 256;
    if (i < 64) return 8192 + (i - 48) * 512;
    return 16384 + (i - 64) * 1024;
}

__device__ __forceinline__ uint32_t split_of(uint32_t position, bool sliding) {
    if (sliding || position < 4096) return position / 128;
    if (position < 8192) return 32 + (position - 4096) / 256;
    if (position < 16384) return 48 + (position - 8192) / 512;
    return 64 + (position - 16384) / 1024;
}
