// What racecheck makes of a ring between barriers in shared memory: the smallest one there is.
//
// Floor: none. A warp feeds two slots by asynchronous copies, a warp reads them. A reader's lane reads
// what another lane copied. The three kernels differ in how the readers say that a slot is free:
//   ring_every     every lane arrives after its own read
//   ring_elected   lane 0 arrives for the warp, after __syncwarp has ordered all lanes' reads before it.
//                  Just as right: order by a barrier of threads is transitive
//   ring_early     lane 0 arrives before anyone has read: wrong, and racecheck must say so
// The order of the wrong one is the program's; that its values are wrong too is likely, not certain.
#include "abi.cuh"
#include "ptx.cuh"

namespace {

enum Release { EVERY, ELECTED, EARLY };

template <Release RELEASE>
__device__ __forceinline__ void ring(const YardstickArgs& a) {
    constexpr uint32_t SLOT = 32 * 16, SLOTS = 2;
    extern __shared__ __align__(128) uint8_t shared[];
    const uint32_t base = shared_address(shared), full = base, empty = base + SLOTS * 8;
    const uint32_t slots = base + 128, lane = threadIdx.x % 32;
    const uint32_t turns = static_cast<uint32_t>(a.bytes / SLOT);
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            barrier_init(full + i * 8, 32);
            barrier_init(empty + i * 8, RELEASE == EVERY ? 32 : 1);
        }
        barriers_ready();
    }
    __syncthreads();
    uint32_t sum = 0;
    for (uint32_t turn = 0; turn < turns; turn++) {
        const uint32_t slot = turn % SLOTS, parity = turn / SLOTS % 2;
        if (threadIdx.x >= 32) {
            barrier_wait(empty + slot * 8, parity ^ 1);
            copy_async16(slots + slot * SLOT + lane * 16,
                         reinterpret_cast<const uint8_t*>(a.data) + turn * SLOT + lane * 16);
            copy_commit();
            copy_wait<0>();
            barrier_arrive(full + slot * 8);
        } else {
            barrier_wait(full + slot * 8, parity);
            if (RELEASE == EARLY && lane == 0) barrier_arrive(empty + slot * 8);
            const uint4 words = load_shared16(slots + slot * SLOT + (lane ^ 1) * 16);
            sum = sum * 31 + (words.x ^ words.y ^ words.z ^ words.w);
            if (RELEASE == ELECTED) __syncwarp();
            if (RELEASE == EVERY || (RELEASE == ELECTED && lane == 0))
                barrier_arrive(empty + slot * 8);
        }
    }
    if (threadIdx.x < 32) reinterpret_cast<uint32_t*>(a.out)[lane] = sum;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(64) ring_every(const __grid_constant__ YardstickArgs a) {
    ring<EVERY>(a);
}
extern "C" __global__ void __launch_bounds__(64) ring_elected(
    const __grid_constant__ YardstickArgs a) {
    ring<ELECTED>(a);
}
extern "C" __global__ void __launch_bounds__(64) ring_early(const __grid_constant__ YardstickArgs a) {
    ring<EARLY>(a);
}
