//! Products with quantised weights: codes are expanded a few inputs at a time, never as a whole.
//!
//! The definition, of one output: its inputs fall into groups that share a scale (all of them, or
//! 128, or 32 …). The sum of a group is a chain of fused multiply-adds over `input * code`, first
//! to last, from zero, where `code` is the stored number without its scale (NVFP4: times the E4M3
//! scale of its 16, a product that is exact in bf16). The result is the chain of
//! `total = fma(scale, sum of group, total)` over the groups, first to last, from zero. Rows,
//! threads and vector instructions have no part in it.

#![allow(unsafe_code, reason = "vector kernels")]

use std::mem::MaybeUninit;

use super::{
    expand::{Code, Sheet},
    memory::Region,
    panel::{Form, PANEL},
    simd::{Kernel, Lanes},
    tile::Tile,
};
use crate::sched::math::round_bf16;

/// Inputs that are expanded at a time: whole blocks of NVFP4.
pub(super) const STRETCH: usize = 64;
/// Panels that are expanded side by side for one to three rows.
const MOST_PANELS: usize = 4;
/// Rows that share one expansion.
pub(super) const MOST_ROWS: usize = 96;
/// Outputs whose sums are kept: `3 * 4`, `6 * 2` or `96` panels.
const SUMS: usize = MOST_ROWS * PANEL;

/// What multiplies the groups, `[panels, groups, 32]`, as narrow as the file had it.
pub(super) enum Scales {
    Bf16(Region<u16>),
    F32(Region<f32>),
}

/// Quantised rows, in panels of 32 outputs.
pub(super) struct Coded {
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    /// Inputs of a group; even, unless it is the only one.
    pub(super) group: usize,
    pub(super) code: Code,
    pub(super) scales: Scales,
}

impl Coded {
    fn groups(&self) -> usize {
        self.inputs.div_ceil(self.group).max(1)
    }

    /// Scales of a panel's outputs for a group.
    #[inline(always)]
    fn scales(&self, panel: usize, group: usize) -> [f32; PANEL] {
        let start = (panel * self.groups() + group) * PANEL;
        match &self.scales {
            Scales::F32(all) => {
                let scales = &all[start..start + PANEL];
                std::array::from_fn(|j| scales[j])
            }
            Scales::Bf16(all) => {
                let scales = &all[start..start + PANEL];
                std::array::from_fn(|j| f32::from_bits(u32::from(scales[j]) << 16))
            }
        }
    }
}

/// Some rows against some panels of a quantised matrix.
pub(super) struct CodedPiece<'a, F: Form> {
    pub(super) x: &'a [F::Input],
    pub(super) x_stride: usize,
    pub(super) rows: usize,
    pub(super) coded: &'a Coded,
    pub(super) first: usize,
    pub(super) count: usize,
    /// First output of the first row. Only outputs that there are are written.
    pub(super) out: *mut f32,
    pub(super) out_stride: usize,
    pub(super) round: bool,
}

/// Room on the stack of the computing thread.
#[repr(align(64))]
struct Room<T, const N: usize>(MaybeUninit<[T; N]>);

impl<T, const N: usize> Room<T, N> {
    #[inline(always)]
    fn new() -> Self {
        Self(MaybeUninit::uninit())
    }
    #[inline(always)]
    fn start(&mut self) -> *mut T {
        self.0.as_mut_ptr().cast()
    }
}

const SHEET: usize = MOST_PANELS * STRETCH * PANEL;

impl<F: Sheet> Kernel for CodedPiece<'_, F> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let mut sheet = Room::<F, SHEET>::new();
        let mut sums = Room::<f32, SUMS>::new();
        let mut totals = Room::<f32, SUMS>::new();
        let (sheet, sums, totals) = (sheet.start(), sums.start(), totals.start());
        let mut row = 0;
        while row < self.rows {
            let rows = (self.rows - row).min(MOST_ROWS);
            let most = match rows {
                0..=3 => MOST_PANELS,
                4..=6 => 2,
                _ => 1,
            };
            let mut panel = 0;
            while panel < self.count {
                let panels = (self.count - panel).min(most);
                let block = Block {
                    row,
                    rows,
                    panel: self.first + panel,
                    panels,
                    sheet,
                    sums,
                    totals,
                };
                // SAFETY: the rooms hold `SHEET` and `SUMS` elements, which so many rows and
                // panels fit; `product` checked the rows of `x` and of `out`.
                unsafe { self.block::<V>(&block) };
                panel += panels;
            }
            row += rows;
        }
    }
}

/// Rows and panels that are computed together, and the room for it.
struct Block<F> {
    row: usize,
    rows: usize,
    panel: usize,
    panels: usize,
    sheet: *mut F,
    sums: *mut f32,
    totals: *mut f32,
}

impl<F: Sheet> CodedPiece<'_, F> {
    #[inline(always)]
    unsafe fn block<V: Lanes>(&self, b: &Block<F>) {
        let (coded, width) = (self.coded, b.panels * PANEL);
        let stretch = STRETCH * PANEL;
        for group in 0..coded.groups() {
            let begin = group * coded.group;
            let end = coded.inputs.min(begin + coded.group);
            let mut k = begin;
            while k < end {
                let next = end.min(k + STRETCH);
                for p in 0..b.panels {
                    // SAFETY: each of the panels has room for a stretch in the sheet.
                    unsafe {
                        let to = b.sheet.add(p * stretch);
                        coded
                            .code
                            .expand::<F, V>(b.panel + p, coded.inputs, k..next, to);
                    }
                }
                // SAFETY: the caller's word for rows; the sheet holds the panels' stretch.
                unsafe {
                    let tile = Tile::<F> {
                        x: self.x.as_ptr().add(b.row * self.x_stride + k / F::STEP),
                        x_stride: self.x_stride,
                        rows: b.rows,
                        w: b.sheet,
                        w_stride: stretch,
                        panels: b.panels,
                        steps: (next - k).div_ceil(F::STEP),
                        out: b.sums,
                        out_stride: width,
                        carry: k > begin,
                        round: false,
                    };
                    tile.run::<V>();
                }
                k = next;
            }
            for p in 0..b.panels {
                let scales = coded.scales(b.panel + p, group);
                for row in 0..b.rows {
                    let at = row * width + p * PANEL;
                    // SAFETY: sums and totals hold every row's panels.
                    unsafe {
                        add_group::<V>(b.totals.add(at), b.sums.add(at), &scales, group == 0)
                    };
                }
            }
        }
        // SAFETY: the caller's word: the rows of `out` have all outputs.
        unsafe { self.write(b, width) };
    }

    /// Outputs beside the last panel's belong to somebody else.
    #[inline(always)]
    unsafe fn write(&self, b: &Block<F>, width: usize) {
        for row in 0..b.rows {
            for p in 0..b.panels {
                let column = (b.panel + p) * PANEL;
                let count = PANEL.min(self.coded.outputs - column);
                for j in 0..count {
                    // SAFETY: the caller's word.
                    unsafe {
                        let total = *b.totals.add(row * width + p * PANEL + j);
                        let out = self.out.add((b.row + row) * self.out_stride);
                        let first = self.first * PANEL;
                        *out.add(column - first + j) = match self.round {
                            true => round_bf16(total),
                            false => total,
                        };
                    }
                }
            }
        }
    }
}

/// `total = fma(scale, sum, total)` for the outputs of a panel.
///
/// # Safety
/// 32 elements lie behind both pointers.
#[inline(always)]
unsafe fn add_group<V: Lanes>(
    total: *mut f32,
    sum: *const f32,
    scales: &[f32; PANEL],
    first: bool,
) {
    for half in [0, 16] {
        // SAFETY: the caller's word.
        unsafe {
            let before = match first {
                true => V::splat(0.0),
                false => V::load(total.add(half)),
            };
            let scale = V::load(scales.as_ptr().add(half));
            before
                .fma(scale, V::load(sum.add(half)))
                .store(total.add(half));
        }
    }
}
