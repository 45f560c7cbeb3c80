// Enough of CUDA C++ for the kernels to compile as plain C++: keywords, vector types, intrinsics.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

struct uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct Index {
    uint32_t x, y, z;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

extern thread_local Index threadIdx, blockIdx, blockDim, gridDim;
uint8_t* block_memory();  // of the running thread's block
void __syncthreads();
void __syncwarp();
uint64_t exchange_xor(uint64_t mine, uint32_t mask);  // among the lanes of a warp

template <class T>
T __shfl_xor_sync(uint32_t, T mine, int mask) {
    uint64_t word = 0;
    memcpy(&word, &mine, sizeof(T));
    word = exchange_xor(word, mask);
    memcpy(&mine, &word, sizeof(T));
    return mine;
}

inline uint32_t __float_as_uint(float v) {
    uint32_t r;
    memcpy(&r, &v, 4);
    return r;
}
inline float __uint_as_float(uint32_t v) {
    float r;
    memcpy(&r, &v, 4);
    return r;
}
inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return static_cast<uint64_t>(a) * b >> 32;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= (bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return r;
}
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline uint4 __ldcs(const uint4* p) { return *p; }
inline uint2 __ldcs(const uint2* p) { return *p; }
inline unsigned atomicAdd(unsigned* p, unsigned v) {
    const unsigned old = *p;
    *p += v;
    return old;
}
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long v) {
    const unsigned long long old = *p;
    *p += v;
    return old;
}
inline unsigned atomicOr(unsigned* p, unsigned v) {
    const unsigned old = *p;
    *p |= v;
    return old;
}
inline uint32_t min(uint32_t a, uint32_t b) { return std::min(a, b); }
inline uint32_t max(uint32_t a, uint32_t b) { return std::max(a, b); }

struct __nv_bfloat16 {
    uint16_t bits;
};
inline __nv_bfloat16 __float2bfloat16_rn(float v) {
    const uint32_t bits = __float_as_uint(v);
    if (v != v) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
