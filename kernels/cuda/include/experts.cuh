// Parameter blocks of the mixture of experts (experts.cu, expert_norms.cu, plain.cu).
#pragma once
#include "abi.cuh"

// A pair is a row and one of its `top` experts; pairs are sorted by expert.
struct ExpertArgs {
    dptr x;        // [rows][ldx]: the raw stream; or a product's input
    dptr y;        // a product's or the sum's result
    dptr weight;   // packed tiles, expert after expert; plain_router_input: fp32 [width]
    dptr block_scale;  // packed block scales, expert after expert (NVFP4)
    dptr row_scale;    // fp32 [experts][n] in packed order, or 0
    dptr scale;    // route: fp32 [experts]
    dptr scores;   // [rows][ld_scores]: route's input
    dptr chosen;   // uint32 [rows][top]: experts, ascending
    dptr share;    // fp32 [rows][top]: their weights
    dptr place;    // uint32 [rows][top]: where the pair stands among the sorted ones
    dptr row_of;   // uint32 [rows * top]: the row of a sorted pair
    dptr items;    // uint32 x 4: expert, first pair, pairs, unused
    dptr count;    // uint32: items
    uint64_t stride;        // bytes from an expert's weights to the next one's
    uint64_t scale_stride;  // and of its block scales
    uint32_t rows, experts, top;
    uint32_t n, k;     // of an expert's matrix
    uint32_t ldx, ldy, ld_scores;
    uint32_t gated;    // 1: rows of the matrix are gate and up in turns of eight
    uint32_t by_row;   // 1: x is read by the pair's row, 0: by its place
    uint32_t height;   // pairs of an item, at most
    float eps, root;   // plain_router_input
    uint32_t pad;
};
static_assert(sizeof(ExpertArgs) == 176, "mirrored in abi/experts.rs");
static_assert(offsetof(ExpertArgs, rows) == 120, "mirrored in abi/experts.rs");

// What stands between a layer's attention and its experts, and behind them: bf16 rows of one width,
// a multiple of 8, fp32 weights.
struct ExpertNormArgs {
    dptr x;        // [rows][ldx]: the stream
    dptr branch;   // [rows][ldb]: attention's result; behind the experts the dense block's
    dptr post;     // [width]: the norm of what is added to the stream
    dptr next;     // [width]: the norm of `out`; behind the experts perhaps 0
    dptr out;      // [rows][ldo]
    dptr expert_norm;   // [width]: of the experts' input; behind them of their result
    dptr expert_in;     // [rows][lde]
    dptr router_scale;  // [width]
    dptr router_in;     // [rows][lde]
    dptr dense_norm;    // [width]: of the dense block's result
    dptr result;        // [rows * top][ldr]: of the experts, by place
    dptr share;         // as in ExpertArgs
    dptr place;
    uint32_t width, top;
    uint32_t ldx, ldb, ldo, lde, ldr;
    float eps;     // of every norm
    float scale;   // of the stream behind the experts
    float root;    // 1 / sqrt(width)
};
static_assert(sizeof(ExpertNormArgs) == 144, "mirrored in abi/experts.rs");
static_assert(offsetof(ExpertNormArgs, width) == 104, "mirrored in abi/experts.rs");
