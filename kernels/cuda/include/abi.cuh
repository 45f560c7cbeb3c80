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
    uint32_t chunk;  // small-M kernel: granules of x in shared memory at a time
    uint32_t pad;
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
