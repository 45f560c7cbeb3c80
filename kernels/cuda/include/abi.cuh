// Parameter blocks of the kernels. src/abi.rs mirrors every field; both sides assert sizes.
#pragma once
#include <cstddef>
#include <cstdint>

// Device addresses travel as 64-bit words, so that the layout is the same on both sides.
typedef uint64_t dptr;

// How a product's result leaves the kernel.
enum Epilogue : uint32_t {
    EPILOGUE_STORE = 0,     // y = bf16(t)
    EPILOGUE_GATED = 1,     // rows are gate/up in turns of 8: y = bf16(gelu(bf16 gate) * bf16 up)
    EPILOGUE_GELU_MUL = 2,  // y = bf16(gelu(bf16 t) * z)
    EPILOGUE_LOGITS = 3,    // y (fp32) = softcap(bf16 t), or bf16 t itself when softcap is 0
};

// y[m][n] = x[m][k] W[n][k]^T, W packed by the pack unit.
struct LinearArgs {
    dptr weight;       // packed tiles (weights.cuh)
    dptr block_scale;  // NVFP4: packed block scales, else 0
    dptr row_scale;    // fp32 [n], or 0: multiplies the fp32 sum of a row
    dptr x;            // bf16 [m][ldx]
    dptr y;            // bf16 [m][ldy]; fp32 for logits
    dptr z;            // EPILOGUE_GELU_MUL: bf16 [m][ldz]
    uint32_t m, n, k;
    uint32_t ldx, ldy, ldz;
    uint32_t epilogue;
    float softcap;
    uint32_t chunk;  // small-M kernel: granules of x in a slot of shared memory
    uint32_t depth;  // stages of a ring
};
static_assert(sizeof(LinearArgs) == 88, "mirrored in abi.rs");
static_assert(offsetof(LinearArgs, m) == 48, "mirrored in abi.rs");

// Brings one matrix, or one part of a fused one, from checkpoint order into packed tiles.
struct PackArgs {
    dptr source;        // row-major [n][k]: bf16, E4M3 codes, or E2M1 nibbles [n][k/2]
    dptr scales;        // NVFP4: E4M3 [n][k/16], else 0
    dptr weight;        // packed tiles of the whole fused matrix
    dptr block_scale;   // NVFP4: packed block scales, else 0
    dptr errors;        // uint32: counts codes that no valid checkpoint holds
    uint32_t n, k;      // of this part
    uint32_t first;     // its first row in the fused matrix
    uint32_t interleave;  // 0: rows follow each other; 1: gate part, 2: up part (turns of 8)
};
static_assert(sizeof(PackArgs) == 56, "mirrored in abi.rs");
static_assert(offsetof(PackArgs, n) == 40, "mirrored in abi.rs");

// Attention over pages, and the merge of its splits.
struct AttentionArgs {
    dptr q;            // bf16 [rows][ldq], heads one behind the other
    dptr kv;           // the layer's pages
    dptr table;        // uint32 [seqs][table_pitch]: pages
    dptr table_first;  // uint32 [seqs]: which page of the sequence table[seq][0] is
    dptr spans;        // uint32 x 4 [spans]: first row, rows, sequence, first position that this step writes
    dptr ends;         // uint32 [rows]: keys before this position are seen
    dptr partial;      // fp32 [rows][heads][splits][head_dim]
    dptr weight;       // fp32 [rows][heads][splits][2]: maximum, sum
    dptr out;          // bf16 [rows][ldo]
    dptr k_norm;       // values-only layers: fp32 [head_dim], the key norm's weights
    dptr turns;        // values-only layers: fp32 x 2 [positions][pairs]: cosine, sine
    uint32_t heads, kv_heads;
    uint32_t page;     // slots of a page
    uint32_t window;   // keys a row sees at most; 0: all
    uint32_t ldq, ldo;
    uint32_t splits, table_pitch;
    uint32_t pairs;    // values-only layers: pairs that turn
    float score_scale;  // FP8: of what keys are made of
    float value_scale;  // of values; 1 unless they are in FP8
    uint32_t codes;     // unit plain: keys and values are in FP8
};
static_assert(sizeof(AttentionArgs) == 136, "mirrored in abi.rs");
static_assert(offsetof(AttentionArgs, heads) == 88, "mirrored in abi.rs");

// Attention of many rows of one sequence, by the unit attention_tiles.
struct TileArgs {
    AttentionArgs attention;  // spans, partial and weight are not read
    dptr tiles;               // bf16 [heads of this launch][tile_count][2][32 keys x head_dim]: keys, values
    uint32_t first_row, rows, sequence;
    uint32_t first_head;              // of keys and values, in this launch
    uint32_t first_tile, tile_count;  // tiles that any of the rows sees, from a multiple of four on
};
static_assert(sizeof(TileArgs) == 168, "mirrored in abi.rs");
static_assert(offsetof(TileArgs, tiles) == 136, "mirrored in abi.rs");

// Norms over whole rows, width a multiple of 8 up to 8192; bf16 rows, fp32 weights.
struct NormArgs {
    dptr x;       // [rows][ldx]; add_norm writes it, and plain_sum_norms
    dptr branch;  // [rows][ldb]
    dptr weight;  // of norm, or of the norm that branch gets
    dptr other;   // add_norm: weights of the next norm, or 0; plain_sum_norms: of x's norm
    dptr out;     // [rows][ldo]
    uint32_t width;
    uint32_t ldx, ldb, ldo;
    float eps;    // of weight
    float other_eps;
    float scale;  // add_norm: of the stream after the sum
    uint32_t pad;
};
static_assert(sizeof(NormArgs) == 72, "mirrored in abi.rs");
static_assert(offsetof(NormArgs, width) == 40, "mirrored in abi.rs");

// Norms and turns heads in place, and stores keys and values.
struct HeadsArgs {
    dptr qkv;          // bf16 [rows][ld]: queries, then keys, then values
    dptr q_norm;       // fp32 [head_dim]
    dptr k_norm;       // fp32 [head_dim]; 0: queries only
    dptr turns;        // fp32 x 2 [positions][pairs]: cosine, sine
    dptr positions;    // uint32 [rows]
    dptr row_seq;      // uint32 [rows]
    dptr kv;           // the layer's pages (attention.cu)
    dptr table;        // as in AttentionArgs
    dptr table_first;
    uint32_t heads, kv_heads;
    uint32_t ld, pairs;
    uint32_t page, table_pitch;
    uint32_t from_values;  // 1: a values-only layer: the key projection gives values, no keys
    float eps;
    float key_scale;    // of keys in FP8
    float value_scale;  // of values in FP8; 0: keys and values are stored as they are
};
static_assert(sizeof(HeadsArgs) == 112, "mirrored in abi.rs");
static_assert(offsetof(HeadsArgs, heads) == 72, "mirrored in abi.rs");

// Element by element, and reads by token.
struct RowsArgs {
    dptr a;        // the kernel's comment says what
    dptr b;
    dptr out;
    dptr weight;   // layer_inputs: fp32 [width]
    dptr index;    // uint32 [rows]: tokens, or source rows
    uint32_t rows, width;
    uint32_t lda, ldb, ldo;
    uint32_t count;   // layer_inputs: layers
    float scale, other_scale, eps;
    uint32_t packed;  // embed: the table lies in packed tiles
};
static_assert(sizeof(RowsArgs) == 80, "mirrored in abi.rs");
static_assert(offsetof(RowsArgs, rows) == 40, "mirrored in abi.rs");

// Yardsticks and random contents.
struct YardstickArgs {
    dptr data;
    dptr out;
    uint64_t bytes;
    uint32_t seed, kind;
};
static_assert(sizeof(YardstickArgs) == 32, "mirrored in abi.rs");
