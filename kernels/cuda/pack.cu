// Checkpoint order to packed tiles (weights.cuh), once at load.
//
// Floor: every byte read once and written once. Where a word of the packed form mixes rows 8 apart,
// which may come from different tensors, its parts are joined by atomics: half the floor's speed at
// best, and still far above the disk's. Destinations are zeroed by the caller.
//
// Compiled for all targets; run on Hopper.
#include "abi.cuh"
#include "weights.cuh"

namespace {

struct Element {
    uint64_t granule;  // index of the granule
    uint32_t block;    // k16 block in it
    uint32_t lane;
    uint32_t reg;  // 0..3
};

__device__ __forceinline__ Element element(const PackArgs& a, uint32_t n, uint32_t k) {
    uint32_t row = a.interleave ? n / 8 * 16 + n % 8 + (a.interleave - 1) * 8 : n;
    row += a.first;
    uint32_t granules = (a.k + GRANULE - 1) / GRANULE;
    Element e;
    e.granule = static_cast<uint64_t>(row / TILE) * granules + k / GRANULE;
    e.block = k % GRANULE / 16;
    e.lane = row % 8 * 4 + k % 8 / 2;
    e.reg = row % 16 / 8 + k % 16 / 8 * 2;
    return e;
}

__device__ __forceinline__ uint64_t thread_index() {
    return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ uint64_t threads() {
    return static_cast<uint64_t>(gridDim.x) * blockDim.x;
}

__device__ __forceinline__ void report(const PackArgs& a) {
    atomicAdd(reinterpret_cast<unsigned int*>(a.errors), 1u);
}

}  // namespace

// A thread takes the pair (k, k+1).
extern "C" __global__ void pack_bf16(const __grid_constant__ PackArgs a) {
    const uint32_t* source = reinterpret_cast<const uint32_t*>(a.source);
    uint32_t* weight = reinterpret_cast<uint32_t*>(a.weight);
    const uint64_t pairs = static_cast<uint64_t>(a.n) * (a.k / 2);
    for (uint64_t i = thread_index(); i < pairs; i += threads()) {
        Element e = element(a, i / (a.k / 2), i % (a.k / 2) * 2);
        weight[((e.granule * 4 + e.block) * 32 + e.lane) * 4 + e.reg] = source[i];
    }
}

// A code's bits where an even or odd register has them in a half word (weights.cuh).
__device__ __forceinline__ uint32_t placed_fp8(uint32_t code, uint32_t reg) {
    if (reg % 2 == 0) return (code & 0x7f) << 4 | (code >> 7) << 15;
    return (code & 0xf) | (code >> 4 & 7) << 12 | (code >> 7) << 11;
}

extern "C" __global__ void pack_fp8(const __grid_constant__ PackArgs a) {
    const uint16_t* source = reinterpret_cast<const uint16_t*>(a.source);
    unsigned int* weight = reinterpret_cast<unsigned int*>(a.weight);
    const uint64_t pairs = static_cast<uint64_t>(a.n) * (a.k / 2);
    for (uint64_t i = thread_index(); i < pairs; i += threads()) {
        Element e = element(a, i / (a.k / 2), i % (a.k / 2) * 2);
        uint32_t pair = source[i];
        if ((pair & 0x7f) == 0x7f || (pair & 0x7f00) == 0x7f00) report(a);
        // 16 bytes a lane: block 0 words 0 and 1, block 1 words 2 and 3.
        uint64_t word = ((e.granule * 2 + e.block / 2) * 32 + e.lane) * 4 + e.block % 2 * 2 + e.reg / 2;
        atomicOr(&weight[word], placed_fp8(pair & 0xff, e.reg) | placed_fp8(pair >> 8, e.reg) << 16);
    }
}

// A code's bits where register `reg` has them in a half word (weights.cuh).
__device__ __forceinline__ uint32_t placed_nvfp4(uint32_t code, uint32_t reg) {
    const uint32_t magnitude = code & 7, sign = code >> 3;
    if (reg == 3) return (magnitude >> 2) << 10 | (magnitude & 3) << 13 | sign << 11;
    return magnitude << (6 - 3 * reg) | sign << (15 - 3 * reg);
}

// A thread takes the bytes of (k, k+1) and (k+8, k+9): two registers of one word.
extern "C" __global__ void pack_nvfp4(const __grid_constant__ PackArgs a) {
    const uint8_t* source = reinterpret_cast<const uint8_t*>(a.source);
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(a.scales);
    unsigned int* weight = reinterpret_cast<unsigned int*>(a.weight);
    const uint32_t per_row = a.k / 4;
    const uint64_t items = static_cast<uint64_t>(a.n) * per_row;
    for (uint64_t i = thread_index(); i < items; i += threads()) {
        uint32_t n = i / per_row, r = i % per_row;
        uint32_t k = r / 4 * 16 + r % 4 * 2;
        // A block of scale zero holds zeros, whatever its codes say.
        if ((scales[static_cast<uint64_t>(n) * (a.k / 16) + k / 16] & 0x7f) == 0) continue;
        Element e = element(a, n, k);
        uint32_t word = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32_t byte = source[(static_cast<uint64_t>(n) * a.k + k) / 2 + half * 4];
            uint32_t reg = e.reg + half * 2;
            word |= placed_nvfp4(byte & 15, reg) | placed_nvfp4(byte >> 4, reg) << 16;
        }
        atomicOr(&weight[(e.granule * 32 + e.lane) * 4 + e.block], word);
    }
}

// A thread takes one E4M3 block scale and writes its e5m3 form.
extern "C" __global__ void pack_nvfp4_scales(const __grid_constant__ PackArgs a) {
    const uint8_t* scales = reinterpret_cast<const uint8_t*>(a.scales);
    uint8_t* packed = reinterpret_cast<uint8_t*>(a.block_scale);
    const uint32_t per_row = a.k / 16;
    const uint64_t items = static_cast<uint64_t>(a.n) * per_row;
    for (uint64_t i = thread_index(); i < items; i += threads()) {
        Element e = element(a, i / per_row, i % per_row * 16);
        uint32_t code = scales[i];
        if (code & 0x80 || code == 0x7f) report(a);
        uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
        uint32_t wide = exponent ? (exponent + 3) << 3 | mantissa : 0;
        if (!exponent && mantissa) {
            uint32_t top = 31 - __clz(mantissa);  // 0..2
            wide = (top + 1) << 3 | (mantissa << (3 - top) & 7);
        }
        packed[e.granule * 64 + e.lane / 4 * 8 + e.reg % 2 * 4 + e.block] = wide;
    }
}
