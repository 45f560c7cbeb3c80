// Kernels that go wrong on purpose: what the back end does about a broken card can only be shown
// with one.
//
// Floor: none.
#include "abi.cuh"

// An illegal instruction: the context is lost.
extern "C" __global__ void fault_trap(const __grid_constant__ YardstickArgs) {
#ifdef __CUDA_ARCH__
    __trap();
#endif
}

// Keeps the card busy for `bytes` of its clock's ticks.
extern "C" __global__ void fault_spin(const __grid_constant__ YardstickArgs a) {
#ifdef __CUDA_ARCH__
    const long long begin = clock64();
    while (static_cast<uint64_t>(clock64() - begin) < a.bytes) {
    }
#endif
}
