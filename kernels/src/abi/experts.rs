//! Mixture of experts: parameter blocks.

use std::mem::{offset_of, size_of};

use super::{DevicePtr, GRANULE, SPLITS, TILE, WeightForm};

/// Most experts of a layer.
pub const MAX_EXPERTS: usize = 512;
/// Most experts of a row.
pub const MAX_TOP_EXPERTS: usize = 32;

/// A pair is a row and one of its `top` experts; pairs are sorted by expert.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ExpertArgs {
    /// `[rows][ldx]`: the raw stream; or a product's input.
    pub x: DevicePtr,
    /// A product's or the sum's result.
    pub y: DevicePtr,
    /// Packed tiles, expert after expert; `plain_router_input`: fp32 `[width]`.
    pub weight: DevicePtr,
    /// Packed block scales, expert after expert (NVFP4).
    pub block_scale: DevicePtr,
    /// fp32 `[experts][n]` in packed order, or 0.
    pub row_scale: DevicePtr,
    /// `route`: fp32 `[experts]`.
    pub scale: DevicePtr,
    /// `[rows][ld_scores]`.
    pub scores: DevicePtr,
    /// `u32 [rows][top]`: experts, ascending.
    pub chosen: DevicePtr,
    /// fp32 `[rows][top]`: their weights.
    pub share: DevicePtr,
    /// `u32 [rows][top]`: where the pair stands among the sorted ones.
    pub place: DevicePtr,
    /// `u32 [rows * top]`: the row of a sorted pair.
    pub row_of: DevicePtr,
    /// `[u32; 4]`: expert, first pair, pairs, unused.
    pub items: DevicePtr,
    /// `u32`: items.
    pub count: DevicePtr,
    /// Bytes from an expert's weights to the next one's.
    pub stride: u64,
    /// And of its block scales.
    pub scale_stride: u64,
    /// Rows.
    pub rows: u32,
    /// Experts of the layer.
    pub experts: u32,
    /// Experts of a row.
    pub top: u32,
    /// Rows of an expert's matrix.
    pub n: u32,
    /// Columns of it.
    pub k: u32,
    /// Pitch of x.
    pub ldx: u32,
    /// Pitch of y.
    pub ldy: u32,
    /// Pitch of the scores.
    pub ld_scores: u32,
    /// 1: rows of the matrix are gate and up in turns of eight.
    pub gated: u32,
    /// 1: x is read by the pair's row, 0: by its place.
    pub by_row: u32,
    /// Pairs of an item, at most.
    pub height: u32,
    /// `plain_router_input`: of the norm.
    pub eps: f32,
    /// `plain_router_input`: `1 / sqrt(width)`.
    pub root: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<ExpertArgs>() == 176 && offset_of!(ExpertArgs, rows) == 120);

/// Norms around the experts of a layer: bf16 rows of one width, a multiple of 8, fp32 weights.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct ExpertNormArgs {
    /// `[rows][ldx]`: the stream.
    pub x: DevicePtr,
    /// `[rows][ldb]`: attention's result; behind the experts the dense block's.
    pub branch: DevicePtr,
    /// `[width]`: the norm of what is added to the stream.
    pub post: DevicePtr,
    /// `[width]`: the norm of `out`; behind the experts perhaps 0.
    pub next: DevicePtr,
    /// `[rows][ldo]`.
    pub out: DevicePtr,
    /// `[width]`: of the experts' input; behind them of their result.
    pub expert_norm: DevicePtr,
    /// `[rows][lde]`.
    pub expert_in: DevicePtr,
    /// `[width]`.
    pub router_scale: DevicePtr,
    /// `[rows][lde]`.
    pub router_in: DevicePtr,
    /// `[width]`: of the dense block's result.
    pub dense_norm: DevicePtr,
    /// `[rows * top][ldr]`: of the experts, by place.
    pub result: DevicePtr,
    /// As in [`ExpertArgs`].
    pub share: DevicePtr,
    /// As in [`ExpertArgs`].
    pub place: DevicePtr,
    /// Columns.
    pub width: u32,
    /// Experts of a row.
    pub top: u32,
    /// Pitch of x.
    pub ldx: u32,
    /// Pitch of the branch.
    pub ldb: u32,
    /// Pitch of out.
    pub ldo: u32,
    /// Pitch of the experts' and the router's input.
    pub lde: u32,
    /// Pitch of the results.
    pub ldr: u32,
    /// Of every norm.
    pub eps: f32,
    /// Of the stream behind the experts.
    pub scale: f32,
    /// `1 / sqrt(width)`.
    pub root: f32,
}

const _: () =
    assert!(size_of::<ExpertNormArgs>() == 144 && offset_of!(ExpertNormArgs, width) == 104);

/// Rows that one block routes and sorts.
pub const ROUTED_AT_ONCE: usize = 8;

/// Pairs of an item of the kernel for few rows, and of the one for many.
pub const ITEM_PAIRS: [usize; 2] = [8, 64];

/// Dynamic shared memory of a product of items of at most `height` pairs: a ring for each split's warp.
pub fn expert_rings(form: WeightForm, height: usize) -> usize {
    let depth = if height == ITEM_PAIRS[0] { 2 } else { 1 };
    let (codes, scales) = form.packed_bytes(TILE, GRANULE);
    SPLITS * depth * (codes + scales)
}

/// Most items that `pairs` pairs of `experts` experts can make.
pub fn most_items(pairs: usize, experts: usize, height: usize) -> usize {
    pairs.min(experts + pairs / height)
}
