//! The KV pools: pages of 32 slots in the checkpoint's own element type, or in FP8.
//!
//! A page holds, per head, a tile of keys `[head_dim][32 slots]` (laid out like a panel of
//! weights, so that 32 scores are one chain each) and a tile of values `[32 slots][head_dim]`,
//! in bf16 with two slots to a word. Layers whose keys come from their values hold the values
//! alone. Codes of FP8 lie where the numbers would lie that they are expanded to.

#![allow(unsafe_code, reason = "rows are stored by several threads")]

use std::sync::Arc;

use super::{
    codes::{SingleCode, WordCode},
    memory::Region,
    panel::{Form, PANEL, narrow, pack_words, word_place},
    pool::Shards,
    rope::RopeTable,
};
use crate::{
    backend::ops::HeadShape,
    model::{
        kv_dtype::KvDtype,
        kv_scales::KvScales,
        plan::{Kind, KvSource, Plan},
    },
};

/// Slots of a page, in both groups. Attention works on whole pages, at absolute positions.
pub(super) const BLOCK: usize = PANEL;

/// Makes keys from values.
pub(super) struct KeyMaker {
    pub(super) weight: Vec<f32>,
    pub(super) rope: Arc<RopeTable>,
}

pub(super) enum Pages {
    Bf16(Region<u16>),
    F32(Region<f32>),
    /// FP8 for activations in bf16.
    Fp8Words(Region<WordCode>),
    /// FP8 for activations in fp32.
    Fp8Singles(Region<SingleCode>),
}

/// One layer's keys and values.
pub(super) struct CacheLayer {
    pub(super) shape: HeadShape,
    pub(super) key_maker: Option<KeyMaker>,
    /// What stored numbers are times, to be keys and values: 1 unless they are codes.
    pub(super) scales: KvScales,
    pub(super) pages: Pages,
}

/// Elements of a value row: whole vectors.
pub(super) fn value_width(head_dim: usize) -> usize {
    head_dim.next_multiple_of(16)
}

fn head_len(head_dim: usize, values_only: bool) -> usize {
    let keys = if values_only { 0 } else { head_dim * BLOCK };
    keys + BLOCK * value_width(head_dim)
}

/// Elements of a page of one layer.
fn block_len(shape: &HeadShape, values_only: bool) -> usize {
    shape.kv_heads * head_len(shape.head_dim, values_only)
}

/// Bytes of a page of a group: all its layers together.
pub(super) fn block_bytes(plan: &Plan, kind: Kind, element: usize) -> usize {
    let of = |l: &crate::model::plan::LayerPlan| match l.kv {
        KvSource::Own { values_only } if l.kind == kind => {
            l.kv_heads * head_len(l.head_dim, values_only) * element
        }
        _ => 0,
    };
    plan.layers.iter().map(of).sum()
}

/// Where a head's tiles start in a page: keys, then values.
#[inline(always)]
fn tiles(shape: &HeadShape, values_only: bool, block: usize, head: usize) -> (usize, usize) {
    let start = (block * shape.kv_heads + head) * head_len(shape.head_dim, values_only);
    (
        start,
        if values_only {
            start
        } else {
            start + shape.head_dim * BLOCK
        },
    )
}

impl CacheLayer {
    pub(super) fn new(
        shape: HeadShape,
        key_maker: Option<KeyMaker>,
        blocks: usize,
        (dtype, scales): (KvDtype, KvScales),
        bf16: bool,
    ) -> Self {
        let len = blocks * block_len(&shape, key_maker.is_some());
        let pages = match dtype {
            KvDtype::Bf16 => Pages::Bf16(Region::new(len)),
            KvDtype::F32 => Pages::F32(Region::new(len)),
            KvDtype::Fp8 if bf16 => Pages::Fp8Words(Region::new(len)),
            KvDtype::Fp8 => Pages::Fp8Singles(Region::new(len)),
        };
        let scales = match dtype {
            KvDtype::Fp8 => scales,
            KvDtype::Bf16 | KvDtype::F32 => KvScales::default(),
        };
        Self {
            shape,
            key_maker,
            scales,
            pages,
        }
    }

    /// What a score is times: the scale of what the keys are made of.
    pub(super) fn score_scale(&self) -> f32 {
        match self.key_maker {
            None => self.scales.key,
            Some(_) => self.scales.value,
        }
    }

    /// Fills every page with what nobody may see.
    pub(super) fn poison(&mut self) {
        match &mut self.pages {
            Pages::Bf16(data) => data.fill(0x7fc0),
            Pages::F32(data) => data.fill(f32::NAN),
            Pages::Fp8Words(data) => data.fill(WordCode::POISON),
            Pages::Fp8Singles(data) => data.fill(SingleCode::POISON),
        }
    }

    /// Where a head's tiles start in a page: keys, then values.
    #[inline(always)]
    pub(super) fn tiles(&self, block: usize, head: usize) -> (usize, usize) {
        tiles(&self.shape, self.key_maker.is_some(), block, head)
    }

    /// The bytes of a page, as they lie in memory.
    pub(super) fn page(&self, block: usize) -> Option<&[u8]> {
        let len = block_len(&self.shape, self.key_maker.is_some());
        let range = block * len..(block + 1) * len;
        Some(match &self.pages {
            Pages::Bf16(data) => bytemuck::cast_slice(data.get(range)?),
            Pages::F32(data) => bytemuck::cast_slice(data.get(range)?),
            Pages::Fp8Words(data) => bytemuck::cast_slice(data.get(range)?),
            Pages::Fp8Singles(data) => bytemuck::cast_slice(data.get(range)?),
        })
    }

    /// The same, to be filled.
    pub(super) fn page_mut(&mut self, block: usize) -> Option<&mut [u8]> {
        let len = block_len(&self.shape, self.key_maker.is_some());
        let range = block * len..(block + 1) * len;
        Some(match &mut self.pages {
            Pages::Bf16(data) => bytemuck::cast_slice_mut(data.get_mut(range)?),
            Pages::F32(data) => bytemuck::cast_slice_mut(data.get_mut(range)?),
            Pages::Fp8Words(data) => bytemuck::cast_slice_mut(data.get_mut(range)?),
            Pages::Fp8Singles(data) => bytemuck::cast_slice_mut(data.get_mut(range)?),
        })
    }

    /// Lets several rows be stored at once.
    pub(super) fn writer(&mut self) -> Writer {
        let (shape, values_only) = (self.shape, self.key_maker.is_some());
        let pages = match &mut self.pages {
            Pages::Bf16(data) => Shared::Bf16(Shards::new(data)),
            Pages::F32(data) => Shared::F32(Shards::new(data)),
            Pages::Fp8Words(data) => Shared::Fp8Words(Shards::new(data)),
            Pages::Fp8Singles(data) => Shared::Fp8Singles(Shards::new(data)),
        };
        Writer {
            shape,
            values_only,
            scales: self.scales,
            pages,
        }
    }
}

enum Shared {
    Bf16(Shards<u16>),
    F32(Shards<f32>),
    Fp8Words(Shards<WordCode>),
    Fp8Singles(Shards<SingleCode>),
}

/// Writes slots of a layer. Rows of a step have slots of their own.
pub(super) struct Writer {
    pub(super) shape: HeadShape,
    pub(super) values_only: bool,
    scales: KvScales,
    pages: Shared,
}

impl Writer {
    /// Stores one head of one position; `key` is left out where keys come from values.
    ///
    /// # Safety
    /// The block is in the pool, and nobody else writes this slot of it.
    pub(super) unsafe fn store(
        &self,
        block: usize,
        slot: usize,
        head: usize,
        key: Option<&[f32]>,
        value: &[f32],
    ) {
        let dim = self.shape.head_dim;
        let (keys, values) = tiles(&self.shape, self.values_only, block, head);
        let key = Side {
            start: keys,
            numbers: key.unwrap_or_default(),
            scale: self.scales.key,
        };
        let value = Side {
            start: values,
            numbers: value,
            scale: self.scales.value,
        };
        // SAFETY: the block is in the pool, `slot` and `head` in the block; the slot is ours.
        unsafe {
            match &self.pages {
                Shared::Bf16(data) => put(data, dim, slot, &key, &value),
                Shared::F32(data) => put(data, dim, slot, &key, &value),
                Shared::Fp8Words(data) => put(data, dim, slot, &key, &value),
                Shared::Fp8Singles(data) => put(data, dim, slot, &key, &value),
            }
        }
    }
}

/// A key or a value on its way to its tile, which begins at `start`.
struct Side<'a> {
    start: usize,
    numbers: &'a [f32],
    scale: f32,
}

/// # Safety
/// As [`Writer::store`] says.
unsafe fn put<F: Stored>(
    data: &Shards<F>,
    dim: usize,
    slot: usize,
    key: &Side<'_>,
    value: &Side<'_>,
) {
    let width = value_width(dim);
    // SAFETY: the caller's word.
    unsafe {
        for (d, x) in key.numbers.iter().enumerate() {
            *data.at(key.start + F::key_place(d, slot)) = F::stored(*x, key.scale);
        }
        for (d, x) in value.numbers.iter().enumerate() {
            *data.at(value.start + F::value_place(slot, d, width)) = F::stored(*x, value.scale);
        }
    }
}

/// A form of stored keys and values.
pub(super) trait Stored: Form {
    /// Keys that were formed from values of this form.
    type Formed: Stored<Input = Self::Input>;
    /// As fp32, without its scale.
    fn wide(self) -> f32;
    /// From fp32, of which `scale` is a factor. Forms without scales get 1.
    fn stored(x: f32, scale: f32) -> Self;
    /// Where element `d` of a slot lies in a key tile.
    fn key_place(d: usize, slot: usize) -> usize;
    /// Where element `d` of a slot lies in a value tile.
    fn value_place(slot: usize, d: usize, width: usize) -> usize;
    /// Numbers in the form that steps take, made in `words` if need be.
    fn inputs<'a>(x: &'a [f32], words: &'a mut [u32]) -> &'a [Self::Input];
    /// The one of two rooms that is for formed keys.
    fn keys<'a>(bf16: &'a mut [u16], f32: &'a mut [f32]) -> &'a mut [Self::Formed];
}

impl Stored for u16 {
    type Formed = Self;
    #[inline(always)]
    fn wide(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
    #[inline(always)]
    fn stored(x: f32, _: f32) -> Self {
        narrow(x)
    }
    #[inline(always)]
    fn key_place(d: usize, slot: usize) -> usize {
        word_place(d, slot)
    }
    #[inline(always)]
    fn value_place(slot: usize, d: usize, width: usize) -> usize {
        (slot / 2 * width + d) * 2 + 1 - slot % 2
    }
    #[inline(always)]
    fn inputs<'a>(x: &'a [f32], words: &'a mut [u32]) -> &'a [u32] {
        pack_words(x, words);
        words
    }
    #[inline(always)]
    fn keys<'a>(bf16: &'a mut [u16], _: &'a mut [f32]) -> &'a mut [u16] {
        bf16
    }
}

impl Stored for f32 {
    type Formed = Self;
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    fn stored(x: f32, _: f32) -> Self {
        x
    }
    #[inline(always)]
    fn key_place(d: usize, slot: usize) -> usize {
        d * BLOCK + slot
    }
    #[inline(always)]
    fn value_place(slot: usize, d: usize, width: usize) -> usize {
        slot * width + d
    }
    #[inline(always)]
    fn inputs<'a>(x: &'a [f32], _: &'a mut [u32]) -> &'a [f32] {
        x
    }
    #[inline(always)]
    fn keys<'a>(_: &'a mut [u16], f32: &'a mut [f32]) -> &'a mut [f32] {
        f32
    }
}
