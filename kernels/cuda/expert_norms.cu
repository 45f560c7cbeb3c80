// Norms around the experts of a layer: everything between attention's product and theirs is one
// kernel, everything between theirs and the next layer's first product another.
//
// Floor: a launch each; the rows' bytes are nothing. A block has a row, a thread eight elements. The
// three inputs that are made of the stream share one root mean square.
//
// Compiled for all targets.
#include "experts.cuh"
#include "norm.cuh"

// x = x + norm(branch), both rounded; out = norm(x) for the dense block, expert_in = norm(x) by the
// experts' own weights, router_in = x / rms, rounded, times router_scale times root.
extern "C" __global__ void __launch_bounds__(1024)
    add_norm_for_experts(const __grid_constant__ ExpertNormArgs a) {
    __shared__ float warp_sums[32];
    let_dependents_start();
    const uint32_t at = threadIdx.x * 8;
    const bool mine = at < a.width;
    Eight post = {}, next = {}, expert = {}, router = {};
    if (mine) {
        post = read_weights(a.post, at);
        next = read_weights(a.next, at);
        expert = read_weights(a.expert_norm, at);
        router = read_weights(a.router_scale, at);
    }
    wait_for_inputs();
    Eight branch = {}, x = {};
    if (mine) {
        branch = read_row(a.branch, a.ldb, at);
        x = read_row(a.x, a.ldx, at);
    }
    x = added(x, normed(branch, inverse_rms(branch, a.width, a.eps, warp_sums), post), 1.0f);
    const float inverse = inverse_rms(x, a.width, a.eps, warp_sums);
    if (!mine) return;
    write_row(a.x, a.ldx, at, x);
    write_row(a.out, a.ldo, at, normed(x, inverse, next));
    write_row(a.expert_in, a.lde, at, normed(x, inverse, expert));
    Eight chooses;
#pragma unroll
    for (int i = 0; i < 8; i++)
        chooses.v[i] = round_bf16(x.v[i] * inverse) * router.v[i] * a.root;
    write_row(a.router_in, a.lde, at, chooses);
}

// branch = norm(branch) + norm(the experts' weighted sum, by expert number), each rounded before the
// sum and the sum itself; x = (x + norm(branch)) * scale, each of the three rounded; out = norm(x), if there is a next norm.
extern "C" __global__ void __launch_bounds__(1024)
    join_experts(const __grid_constant__ ExpertNormArgs a) {
    __shared__ float warp_sums[32];
    let_dependents_start();
    const uint32_t at = threadIdx.x * 8;
    const bool mine = at < a.width;
    // More weights than registers hold: brought near, and read where they are used.
    if (mine) {
        for (const dptr weights : {a.dense_norm, a.expert_norm, a.post, a.next})
            if (weights) prefetch(reinterpret_cast<const float*>(weights) + at);
    }
    wait_for_inputs();
    Eight dense = {}, x = {}, experts = {};
    if (mine) {
        dense = read_row(a.branch, a.ldb, at);
        x = read_row(a.x, a.ldx, at);
        const uint64_t pairs = static_cast<uint64_t>(blockIdx.x) * a.top;
        const uint32_t* place = reinterpret_cast<const uint32_t*>(a.place) + pairs;
        const float* share = reinterpret_cast<const float*>(a.share) + pairs;
#pragma unroll 4
        for (uint32_t s = 0; s < a.top; s++) {
            const Eight result = read_row(a.result, a.ldr, at, place[s]);
#pragma unroll
            for (int i = 0; i < 8; i++) experts.v[i] += share[s] * result.v[i];
        }
#pragma unroll
        for (int i = 0; i < 8; i++) experts.v[i] = round_bf16(experts.v[i]);
    }
    const auto weights = [&](dptr base) { return mine ? read_weights(base, at) : Eight{}; };
    const Eight one =
        normed(dense, inverse_rms(dense, a.width, a.eps, warp_sums), weights(a.dense_norm));
    const Eight other =
        normed(experts, inverse_rms(experts, a.width, a.eps, warp_sums), weights(a.expert_norm));
    const Eight branch = added(one, other, 1.0f);
    const float of_branch = inverse_rms(branch, a.width, a.eps, warp_sums);
    x = added(x, normed(branch, of_branch, weights(a.post)), a.scale);
    if (mine) write_row(a.x, a.ldx, at, x);
    if (!a.next) return;
    const float inverse = inverse_rms(x, a.width, a.eps, warp_sums);
    if (mine) write_row(a.out, a.ldo, at, normed(x, inverse, weights(a.next)));
}
