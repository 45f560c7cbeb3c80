// Packed weights: how a matrix lies in device memory, and how its codes become mma fragments.
//
// W [n][k] is cut into tiles of 16 rows, and a tile into granules of 64 columns, in order of k.
// A granule holds four 16x16 blocks; a block holds, lane by lane, the A fragment of
// mma.m16n8k16: with g = lane / 4 and t = lane % 4
//   a0 = (row g, k 2t 2t+1)      a1 = (row g+8, k 2t 2t+1)
//   a2 = (row g, k 2t+8 2t+9)    a3 = (row g+8, k 2t+8 2t+9)
// so a warp reads whole 128-byte lines and no element changes lanes on its way to the tensor core.
// Rows and columns past n and k are zero.
//
//   bf16   a lane's 16 bytes are one fragment; a granule is 4 x 512 bytes
//   FP8    a lane's 16 bytes are two fragments of E4M3 codes; a granule is 2 x 512 bytes. A word is
//          two registers; in each half word (low: first of every pair, high: second) sign and
//          magnitude of the even one are bits 15 and 10..4, of the odd one 11 and 14..12, 3..0
//   NVFP4  a lane's 16 bytes are four fragments of E2M1 codes; a granule is 512 bytes. In each half
//          word (low: first of every pair, high: second) sign and magnitude of register
//          0 are bits 15 and 8..6, of 1 bits 12 and 5..3, of 2 bits 9 and 2..0, of 3 bits 11 and
//          10, 14, 13. Block scales: 64 bytes a granule, for g = 0..7 four bytes of row g, then four
//          of row g+8. A byte e5m3 is 2^(e-10) (1 + m/8): every positive E4M3 value has one, and no
//          subnormals are left to treat
// FP8 and NVFP4 values are exact in bf16 (NVFP4 times its block scale too: six significant bits,
// off by the factor 2^-8 that the row scale makes good). Only the row scale rounds, once, in fp32.
#pragma once
#include "ptx.cuh"

constexpr int GRANULE = 64;       // columns
constexpr int TILE = 16;          // rows
constexpr int SPLITS = 8;         // of K, whatever the shape: part of the numeric definition
constexpr float NVFP4_GAIN = 256.0f;  // the pack step folds it into the row scale

// Split s covers granules [first(s), first(s+1)). Chains start at zero in each; then the sums are
// added in order of s to a total that starts at zero.
__host__ __device__ __forceinline__ uint32_t split_first(uint32_t split, uint32_t granules) {
    return static_cast<uint32_t>(static_cast<uint64_t>(split) * granules / SPLITS);
}

// A read is BLOCKS fragments a lane, of CODES bytes of all lanes and (NVFP4) SCALES bytes. Every address
// below is the lane's own.
struct WeightsBf16 {
    static constexpr int BLOCKS = 2;  // k16 blocks in a read
    static constexpr int CODES = 1024;  // bytes of a read
    static constexpr int SCALES = 0;
    struct Raw {
        uint4 v[2];
    };
    static __device__ __forceinline__ Raw read(uint32_t codes, uint32_t) {
        Raw r;
        r.v[0] = load_shared16(codes);
        r.v[1] = load_shared16(codes + 512);
        return r;
    }
    template <int BLOCK>
    static __device__ __forceinline__ void fragment(const Raw& r, uint32_t (&a)[4]) {
        a[0] = r.v[BLOCK].x;
        a[1] = r.v[BLOCK].y;
        a[2] = r.v[BLOCK].z;
        a[3] = r.v[BLOCK].w;
    }
};

struct WeightsFp8 {
    static constexpr int BLOCKS = 4;
    static constexpr int CODES = 1024;
    static constexpr int SCALES = 0;
    struct Raw {
        uint4 v[2];
    };
    static __device__ __forceinline__ Raw read(uint32_t codes, uint32_t) {
        Raw r;
        r.v[0] = load_shared16(codes);
        r.v[1] = load_shared16(codes + 512);
        return r;
    }
    // A magnitude at bits 10..4 read as bf16 is its value times 2^-120, subnormals too.
    static constexpr uint32_t SEEN = 0x87f087f0u, GAIN = 0x7b807b80u;  // 2^120
    static __device__ __forceinline__ uint32_t even(uint32_t w) { return mul_bf16x2(w & SEEN, GAIN); }
    static __device__ __forceinline__ uint32_t odd(uint32_t w) {
        constexpr uint32_t FROM_BELOW = 0x80f080f0u;
        return mul_bf16x2(((w * 16 & FROM_BELOW) | (w >> 4 & ~FROM_BELOW)) & SEEN, GAIN);
    }
    template <int BLOCK>
    static __device__ __forceinline__ void fragment(const Raw& r, uint32_t (&a)[4]) {
        uint32_t low = BLOCK % 2 ? r.v[BLOCK / 2].z : r.v[BLOCK / 2].x;
        uint32_t high = BLOCK % 2 ? r.v[BLOCK / 2].w : r.v[BLOCK / 2].y;
        a[0] = even(low);
        a[1] = odd(low);
        a[2] = even(high);
        a[3] = odd(high);
    }
};

struct WeightsNvfp4 {
    static constexpr int BLOCKS = 4;
    static constexpr int CODES = 512;
    static constexpr int SCALES = 64;
    struct Raw {
        uint4 v;
        uint2 s;
    };
    static __device__ __forceinline__ Raw read(uint32_t codes, uint32_t scales) {
        Raw r;
        r.v = load_shared16(codes);
        r.s = load_shared8(scales);
        return r;
    }
#ifdef WARPGROUPS
    // Byte BLOCK of w as bf16 twice, times 2^118. The compiler makes the words once for two blocks, and
    // lets the product pick its half.
    template <int BLOCK>
    static __device__ __forceinline__ uint32_t scale(uint32_t w) {
        const uint32_t codes = BLOCK % 2 ? __byte_perm(w, 0, 0x4341) : w & 0x00ff00ffu;
        return both_halves<BLOCK / 2>(codes * 16 + 0x75807580u);
    }
#else
    // The same with nothing kept from block to block: registers are scarce there.
    template <int BLOCK>
    static __device__ __forceinline__ uint32_t scale(uint32_t w) {
        uint32_t code = __byte_perm(w, 0, BLOCK | 4 << 4 | 4 << 8 | 4 << 12);
        return code * 0x00100010u + 0x75807580u;
    }
#endif
    template <int BLOCK>
    static __device__ __forceinline__ void fragment(const Raw& r, uint32_t (&a)[4]) {
        const uint32_t w = BLOCK == 0 ? r.v.x : BLOCK == 1 ? r.v.y : BLOCK == 2 ? r.v.z : r.v.w;
        const uint32_t upper = scale<BLOCK>(r.s.x), lower = scale<BLOCK>(r.s.y);
        // A magnitude at bits 8..6 read as bf16 is its value times 2^-126. Products by powers of two
        // are shifts, and the last one three of them whose bits do not meet; multipliers are idle
        // here, and shifters are not.
        constexpr uint32_t SEEN = 0x81c081c0u;
        a[0] = mul_bf16x2(w & SEEN, upper);
        a[1] = mul_bf16x2(w * 8 & SEEN, lower);
        a[2] = mul_bf16x2(w * 64 & SEEN, upper);
        a[3] = mul_bf16x2((w >> 7 & 0x00d800d8u) * (1 + 32 + 2048) & SEEN, lower);
    }
};

// Reads a granule takes, and bytes of its codes.
template <class W>
constexpr int STAGES = GRANULE / 16 / W::BLOCKS;
template <class W>
constexpr int GRANULE_CODES = W::CODES * STAGES<W>;
