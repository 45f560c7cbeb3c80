// Norms over whole rows, alone and with the residual sums around them.
//
// Floor: the rows' bytes are nothing (5376 x 2 bytes); a launch is 0.57 us in a graph with dependent
// launch, and two reductions in a block about a microsecond. So everything between two products is
// one kernel. A block has a row, a thread eight elements: the tree of the sum of squares
// depends on the width alone.
//
// Compiled for all targets; run on Hopper.
#include "norm.cuh"

// out = norm(x)
extern "C" __global__ void __launch_bounds__(1024) norm_rows(const __grid_constant__ NormArgs a) {
    __shared__ float warp_sums[32];
    let_dependents_start();
    const uint32_t at = threadIdx.x * 8;
    const bool mine = at < a.width;
    Eight weight = {};
    if (mine) weight = read_weights(a.weight, at);
    wait_for_inputs();
    Eight x = {};
    if (mine) x = read_row(a.x, a.ldx, at);
    const float inverse = inverse_rms(x, a.width, a.eps, warp_sums);
    if (mine) write_row(a.out, a.ldo, at, normed(x, inverse, weight));
}

// x = (x + norm(branch)) * scale, each of the three rounded; out = norm(x) by the next norm
extern "C" __global__ void __launch_bounds__(1024) add_norm(const __grid_constant__ NormArgs a) {
    __shared__ float warp_sums[32];
    let_dependents_start();
    const uint32_t at = threadIdx.x * 8;
    const bool mine = at < a.width;
    Eight weight = {}, next = {};
    if (mine) {
        weight = read_weights(a.weight, at);
        if (a.other) next = read_weights(a.other, at);
    }
    wait_for_inputs();
    Eight branch = {}, x = {};
    if (mine) {
        branch = read_row(a.branch, a.ldb, at);
        x = read_row(a.x, a.ldx, at);
    }
    x = added(x, normed(branch, inverse_rms(branch, a.width, a.eps, warp_sums), weight), a.scale);
    if (mine) write_row(a.x, a.ldx, at, x);
    if (!a.other) return;
    const float inverse = inverse_rms(x, a.width, a.other_eps, warp_sums);
    if (mine) write_row(a.out, a.ldo, at, normed(x, inverse, next));
}
