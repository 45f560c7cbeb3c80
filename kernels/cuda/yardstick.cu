// What the card can do, to measure the other kernels against: reading at full rate, and random
// contents for buffers (on zeros a card is faster than on data).
//
// Compiled for all targets; run on Hopper.
#include "abi.cuh"
#include "math.cuh"
#include "ptx.cuh"

// Sums 16-byte words, eight in flight a thread; the sum keeps the loads alive.
extern "C" __global__ void __launch_bounds__(256) read_all(const __grid_constant__ YardstickArgs a) {
    let_dependents_start();
    const uint4* data = reinterpret_cast<const uint4*>(a.data);
    const uint64_t words = a.bytes / 16, stride = static_cast<uint64_t>(gridDim.x) * blockDim.x;
    uint32_t sum = 0;
    uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (; i + 7 * stride < words; i += 8 * stride) {
        uint4 v[8];
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = __ldcs(data + i + j * stride);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
    }
    for (; i < words; i += stride) {
        const uint4 v = __ldcs(data + i);
        sum += v.x ^ v.y ^ v.z ^ v.w;
    }
    wait_for_inputs();
    if (sum == 0x12345678u) *reinterpret_cast<uint32_t*>(a.out) = sum;
}

// Random contents: 0 bf16 of standard deviation 0.02, 1 E4M3 codes, 2 bits, 3 e5m3 block scales.
extern "C" __global__ void fill(const __grid_constant__ YardstickArgs a) {
    uint32_t* data = reinterpret_cast<uint32_t*>(a.data);
    for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.bytes / 4;
         i += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
        uint64_t x = (i + a.seed) * 0x9e3779b97f4a7c15ull;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ x >> 27) * 0x94d049bb133111ebull;
        const uint32_t bits = static_cast<uint32_t>(x ^ x >> 31);
        uint32_t word = bits;
        if (a.kind == 0) {
            // Uniform in +-0.0346.
            const float low = (static_cast<float>(bits & 0xffff) / 32768.0f - 1.0f) * 0.0346f;
            const float high = (static_cast<float>(bits >> 16) / 32768.0f - 1.0f) * 0.0346f;
            word = pack_bf16(low, high);
        } else if (a.kind == 1) {
            word = bits & 0xbfbfbfbfu;  // magnitudes below 2
        } else if (a.kind == 3) {
            word = (bits & 0x1f1f1f1fu) + 0x50505050u;
        }
        data[i] = word;
    }
}
