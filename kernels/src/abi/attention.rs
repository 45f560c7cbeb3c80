//! Attention over pages: parameter block, split grid and launch plan.

use std::mem::{offset_of, size_of};

use super::DevicePtr;

/// Keys of a tile; pages hold a multiple of it.
pub const TILE_KEYS: usize = 32;

/// Attention over pages, and the merge of its splits.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct AttentionArgs {
    /// bf16 `[rows][ldq]`, heads one behind the other.
    pub q: DevicePtr,
    /// The layer's pages: `[page][kv head][keys, then values][slot][element]`, bf16, or FP8 with
    /// elements `j` and `j + head_dim / 2` in a half word (`cuda/include/codes.cuh`);
    /// `[page][kv head][slot][element]` in values-only layers.
    pub kv: DevicePtr,
    /// `u32 [seqs][table_pitch]`: pages.
    pub table: DevicePtr,
    /// `u32 [seqs]`: which page of the sequence `table[seq][0]` is.
    pub table_first: DevicePtr,
    /// `[u32; 4]` per span: first row, rows, sequence, and the first position whose keys and values
    /// this step writes: those in front of it are read before the launches in front are done.
    pub spans: DevicePtr,
    /// `u32 [rows]`: keys before this position are seen.
    pub ends: DevicePtr,
    /// fp32 `[rows][heads][splits][head_dim]`.
    pub partial: DevicePtr,
    /// fp32 `[rows][heads][splits][2]`.
    pub weight: DevicePtr,
    /// bf16 `[rows][ldo]`.
    pub out: DevicePtr,
    /// Values-only layers: fp32 `[head_dim]`, the key norm's weights.
    pub k_norm: DevicePtr,
    /// Values-only layers: fp32 `[positions][pairs][2]`: cosine, sine.
    pub turns: DevicePtr,
    /// Query heads.
    pub heads: u32,
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Slots of a page.
    pub page: u32,
    /// Keys a row sees at most; 0: all.
    pub window: u32,
    /// Pitch of q.
    pub ldq: u32,
    /// Pitch of out.
    pub ldo: u32,
    /// Pitch of the partial results: [`splits_of_row`] of the longest row, or more.
    pub splits: u32,
    /// Pitch of the table.
    pub table_pitch: u32,
    /// Values-only layers: pairs that turn, an even number.
    pub pairs: u32,
    /// FP8: scale of what keys are made of; else 1.
    pub score_scale: f32,
    /// FP8: scale of values; else 1.
    pub value_scale: f32,
    /// Unit `plain`: 1 where keys and values are in FP8, a byte an element in order.
    pub codes: u32,
}

const _: () = assert!(size_of::<AttentionArgs>() == 136 && offset_of!(AttentionArgs, heads) == 88);

/// The split that a position falls into (`cuda/include/splits.cuh`).
pub fn split_of(position: usize, sliding: bool) -> usize {
    match position {
        p if sliding || p < 4096 => p / 128,
        p if p < 8192 => 32 + (p - 4096) / 256,
        p if p < 16384 => 48 + (p - 8192) / 512,
        p => 64 + (p - 16384) / 1024,
    }
}

/// Splits that hold the keys `[first, end)`.
pub fn splits_of_row(first: usize, end: usize, sliding: bool) -> usize {
    if first >= end {
        0
    } else {
        split_of(end - 1, sliding) + 1 - split_of(first, sliding)
    }
}

/// What pages hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageForm {
    /// Only values are stored, keys are formed from them (head_dim 512 alone).
    pub values_only: bool,
    /// In FP8, half the bytes.
    pub fp8: bool,
}

impl PageForm {
    /// What it adds to the name of a kernel.
    pub fn name(self) -> &'static str {
        match (self.values_only, self.fp8) {
            (false, false) => "",
            (false, true) => "fp8_",
            (true, false) => "values_",
            (true, true) => "values_fp8_",
        }
    }
}

/// How attention is launched. Nothing here changes a bit of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionPlan {
    /// Elements of a head: 64, 128, 256 or 512.
    pub head_dim: usize,
    /// What pages hold.
    pub form: PageForm,
    /// Query vectors of a block, in sixteens: 1 or 3.
    pub blocks: usize,
    /// Grid: KV heads times blocks of vectors, spans, splits.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory, bytes.
    pub shared: usize,
}

impl AttentionPlan {
    /// A launch for `spans` sequences of up to `rows` rows, whose keys fall into up to `splits`
    /// splits.
    pub fn plan(
        head_dim: usize,
        heads: usize,
        kv_heads: usize,
        rows: usize,
        spans: usize,
        splits: usize,
        form: PageForm,
    ) -> Self {
        let vectors = rows * heads / kv_heads;
        let blocks = if vectors <= 16 { 1 } else { 3 };
        let per_block = 16 * blocks;
        // Mirrors the layout in attention.cu.
        let slots = match (form.fp8, head_dim, blocks) {
            (false, 512, 1) => 2,
            (false, 64 | 128, _) => 6,
            (false, 256, 3) => 8,
            (false, ..) => 5,
            (true, 512, 1) => 4,
            (true, 256, 3) => 16,
            (true, ..) => 8,
        };
        let element = if form.fp8 { 1 } else { 2 };
        let parts = if head_dim == 64 { 4 } else { 8 };
        let shared = slots * TILE_KEYS * head_dim * element
            + parts * per_block * (TILE_KEYS + 8) * 4
            + per_block * (TILE_KEYS * 2 + 16)
            + per_block * 12
            + 1024 / TILE_KEYS * 4
            + 48;
        let height = kv_heads * vectors.div_ceil(per_block);
        Self {
            head_dim,
            form,
            blocks,
            grid: [height as u32, spans as u32, splits as u32],
            threads: match (blocks, head_dim) {
                (3, 256) => 512,
                (3, 512) if form == PageForm::default() => 512,
                _ => 256,
            },
            shared,
        }
    }

    /// Name of the kernel in the unit `attention`.
    pub fn kernel(&self) -> String {
        let form = self.form.name();
        format!("attention_{form}d{}_q{}", self.head_dim, self.blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_follow_each_other_without_gap() {
        let mut split = 0;
        for position in 0..300_000 {
            let here = split_of(position, false);
            assert!(here == split || here == split + 1, "{position}");
            assert!(here == split || position % TILE_KEYS == 0);
            split = here;
        }
        assert_eq!(splits_of_row(1000, 2024, true), 9);
        assert_eq!(splits_of_row(0, 1, false), 1);
        assert_eq!(splits_of_row(5, 5, false), 0);
    }

    #[test]
    fn plans_fit_shared_memory() {
        for head_dim in [64, 128, 256, 512] {
            for rows in 1..=9 {
                for (heads, kv_heads) in [(8, 8), (8, 1), (16, 1), (32, 4)] {
                    for fp8 in [false, true] {
                        let form = PageForm {
                            values_only: false,
                            fp8,
                        };
                        let plan = AttentionPlan::plan(head_dim, heads, kv_heads, rows, 1, 1, form);
                        assert!(plan.shared <= 227 * 1024, "{plan:?}");
                        let vectors = rows * heads / kv_heads;
                        let covered = plan.grid[0] as usize / kv_heads * 16 * plan.blocks;
                        assert!(covered >= vectors, "{plan:?}");
                    }
                }
            }
        }
    }
}
