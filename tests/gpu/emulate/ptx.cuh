// The kernels' ptx.cuh, in software. An asynchronous copy happens as late as it may: when its
// thread waits for it. A wait that is missing is a wrong result here.
#pragma once
#include "cuda.h"

uint32_t shared_address(const void* p);
void copy_async16(uint32_t to, const void* from, uint32_t bytes = 16);
inline uint64_t read_once() { return 0; }
inline void copy_async16_once(uint32_t to, const void* from, uint64_t) { copy_async16(to, from); }
void copy_commit();
void copy_wait_for(uint32_t pending);
template <int N>
void copy_wait() {
    copy_wait_for(N);
}

template <class T>
T load_shared(uint32_t at) {
    T v;
    memcpy(&v, block_memory() + at, sizeof(T));
    return v;
}
template <class T>
void store_shared(uint32_t at, T v) {
    memcpy(block_memory() + at, &v, sizeof(T));
}
inline uint4 load_shared16(uint32_t at) { return load_shared<uint4>(at); }
inline uint2 load_shared8(uint32_t at) { return load_shared<uint2>(at); }
inline void store_shared16(uint32_t at, uint4 v) { store_shared(at, v); }
inline void store_shared4(uint32_t at, float v) { store_shared(at, v); }
inline void store_shared8(uint32_t at, float a, float b) { store_shared(at, float2{a, b}); }

void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void load_matrix4(uint32_t (&r)[4], uint32_t at);
void load_matrix4_transposed(uint32_t (&r)[4], uint32_t at);
uint32_t mul_bf16x2(uint32_t a, uint32_t b);

inline uint32_t thread_number() { return threadIdx.x; }

uint32_t cluster_rank();
void cluster_arrive();
void cluster_wait();

inline void fence_for_matrix_unit() {}

inline void let_dependents_start() {}
inline void wait_for_inputs() {}
inline void prefetch(const void*) {}

// Barriers that count arrivals and bytes.
void barrier_init(uint32_t at, uint32_t arrivals);
inline void barriers_ready() {}
void barrier_arrive(uint32_t at);
void barrier_expect(uint32_t at, uint32_t bytes);
void barrier_wait(uint32_t at, uint32_t parity);
inline void barrier_wait_peers(uint32_t at, uint32_t parity) { barrier_wait(at, parity); }
void barrier_arrive_copied(uint32_t at);
uint32_t peer_address(uint32_t at, uint32_t rank);
void barrier_arrive_peer(uint32_t peer);
void send16(uint32_t peer, const float (&v)[4], uint32_t peer_barrier);
