//! Mixture of experts: parameter block.

use std::mem::{offset_of, size_of};

use super::DevicePtr;

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
    /// Packed tiles, expert after expert; `router_input`: fp32 `[width]`.
    pub weight: DevicePtr,
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
    /// `router_input`: of the norm.
    pub eps: f32,
    /// `router_input`: `1 / sqrt(width)`.
    pub root: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<ExpertArgs>() == 152 && offset_of!(ExpertArgs, rows) == 96);

/// Pairs of an item of the kernel for few rows, and of the one for many.
pub const ITEM_PAIRS: [usize; 2] = [8, 64];

/// Most items that `pairs` pairs of `experts` experts can make.
pub fn most_items(pairs: usize, experts: usize, height: usize) -> usize {
    pairs.min(experts + pairs / height)
}
