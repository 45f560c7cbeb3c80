// Parameter block of the mixture of experts (experts.cu, plain.cu).
#pragma once
#include "abi.cuh"

// A pair is a row and one of its `top` experts; pairs are sorted by expert.
struct ExpertArgs {
    dptr x;        // [rows][ldx]: the raw stream; or a product's input
    dptr y;        // a product's or the sum's result
    dptr weight;   // packed tiles, expert after expert; router_input: fp32 [width]
    dptr scale;    // route: fp32 [experts]
    dptr scores;   // [rows][ld_scores]: route's input
    dptr chosen;   // uint32 [rows][top]: experts, ascending
    dptr share;    // fp32 [rows][top]: their weights
    dptr place;    // uint32 [rows][top]: where the pair stands among the sorted ones
    dptr row_of;   // uint32 [rows * top]: the row of a sorted pair
    dptr items;    // uint32 x 4: expert, first pair, pairs, unused
    dptr count;    // uint32: items
    uint64_t stride;  // bytes from an expert's weights to the next one's
    uint32_t rows, experts, top;
    uint32_t n, k;     // of an expert's matrix
    uint32_t ldx, ldy, ld_scores;
    uint32_t gated;    // 1: rows of the matrix are gate and up in turns of eight
    uint32_t by_row;   // 1: x is read by the pair's row, 0: by its place
    uint32_t height;   // pairs of an item, at most
    float eps, root;   // router_input
    uint32_t pad;
};
static_assert(sizeof(ExpertArgs) == 152, "mirrored in abi/experts.rs");
static_assert(offsetof(ExpertArgs, rows) == 96, "mirrored in abi/experts.rs");
