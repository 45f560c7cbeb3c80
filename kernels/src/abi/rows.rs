//! Norms, heads, element-wise kernels: parameter blocks.

use std::mem::{offset_of, size_of};

use super::DevicePtr;

/// Norms over whole rows; the width is a multiple of 8, at most 8192. Rows bf16, weights fp32.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NormArgs {
    /// `[rows][ldx]`; `add_norm` writes it, and in fp32 `sum_norms`.
    pub x: DevicePtr,
    /// `[rows][ldb]`.
    pub branch: DevicePtr,
    /// Of `norm_rows`, or of the norm that the branch gets.
    pub weight: DevicePtr,
    /// `add_norm`: of the next norm, or 0; `plain_sum_norms`: of the norm that x gets.
    pub other: DevicePtr,
    /// `[rows][ldo]`.
    pub out: DevicePtr,
    /// Columns.
    pub width: u32,
    /// Pitch of x.
    pub ldx: u32,
    /// Pitch of the branch.
    pub ldb: u32,
    /// Pitch of out.
    pub ldo: u32,
    /// Of `weight`.
    pub eps: f32,
    /// Of `other`.
    pub other_eps: f32,
    /// `add_norm`: of the stream after the sum.
    pub scale: f32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<NormArgs>() == 72 && offset_of!(NormArgs, width) == 40);

impl NormArgs {
    /// Threads of a block for a width: part of the numeric definition.
    pub fn threads(width: usize) -> u32 {
        (width.div_ceil(8).next_multiple_of(32)).min(1024) as u32
    }
}

/// Norms and turns heads in place, and stores keys and values.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct HeadsArgs {
    /// bf16 `[rows][ld]`: queries, then keys, then values.
    pub qkv: DevicePtr,
    /// fp32 `[head_dim]`.
    pub q_norm: DevicePtr,
    /// fp32 `[head_dim]`; 0: queries only.
    pub k_norm: DevicePtr,
    /// fp32 `[positions][pairs][2]`: cosine, sine.
    pub turns: DevicePtr,
    /// `u32 [rows]`.
    pub positions: DevicePtr,
    /// `u32 [rows]`.
    pub row_seq: DevicePtr,
    /// The layer's pages.
    pub kv: DevicePtr,
    /// As in [`super::AttentionArgs`].
    pub table: DevicePtr,
    /// As in [`super::AttentionArgs`].
    pub table_first: DevicePtr,
    /// Query heads.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Pitch of qkv.
    pub ld: u32,
    /// Pairs that turn.
    pub pairs: u32,
    /// Slots of a page.
    pub page: u32,
    /// Pitch of the table.
    pub table_pitch: u32,
    /// 1: a values-only layer: the key projection gives values, and no keys are stored.
    pub from_values: u32,
    /// Of the norms.
    pub eps: f32,
    /// What keys in FP8 are divided by.
    pub key_scale: f32,
    /// What values in FP8 are divided by; 0: keys and values are stored as they are.
    pub value_scale: f32,
}

const _: () = assert!(size_of::<HeadsArgs>() == 112 && offset_of!(HeadsArgs, heads) == 72);

/// Element by element, and reads by token; `cuda/rows.cu` says what each kernel takes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RowsArgs {
    /// First input.
    pub a: DevicePtr,
    /// Second input.
    pub b: DevicePtr,
    /// Result.
    pub out: DevicePtr,
    /// `layer_inputs`: fp32 `[width]`.
    pub weight: DevicePtr,
    /// `u32 [rows]`: tokens, or source rows.
    pub index: DevicePtr,
    /// Rows.
    pub rows: u32,
    /// Columns, even.
    pub width: u32,
    /// Pitch of a.
    pub lda: u32,
    /// Pitch of b.
    pub ldb: u32,
    /// Pitch of out.
    pub ldo: u32,
    /// `layer_inputs`: layers.
    pub count: u32,
    /// Of a.
    pub scale: f32,
    /// Of b.
    pub other_scale: f32,
    /// Of the norm.
    pub eps: f32,
    /// `embed`: 1 where the table lies in packed tiles.
    pub packed: u32,
}

const _: () = assert!(size_of::<RowsArgs>() == 80 && offset_of!(RowsArgs, rows) == 40);

/// Yardsticks and random contents (`cuda/yardstick.cu`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct YardstickArgs {
    /// What is read or filled.
    pub data: DevicePtr,
    /// A word that keeps the reads alive.
    pub out: DevicePtr,
    /// Bytes, a multiple of 16.
    pub bytes: u64,
    /// Of the contents.
    pub seed: u32,
    /// 0 bf16, 1 E4M3 codes, 2 bits, 3 block scales.
    pub kind: u32,
}

const _: () = assert!(size_of::<YardstickArgs>() == 32);
