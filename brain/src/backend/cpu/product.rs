//! Matrix products: `y = x * w^T`, any number of rows.
//!
//! Weights are packed in panels of 32 outputs, input element by input element. An output is one
//! chain of fused multiply-adds over its inputs, first to last, however many rows are computed
//! together and whoever computes them; lanes run over outputs. So there is nothing to reduce, no
//! tail of K, and a row has the same bits alone and among thousands.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    memory::{Buf, Region},
    pool::{Pool, Shards},
    simd::{Kernel, Lanes, Level, dispatch},
};
use crate::{
    model::{checkpoint::Dtype, weights::Weight},
    sched::math::round_bf16,
};

/// Outputs of a panel.
pub(super) const PANEL: usize = 32;
/// Multiply-adds below which a product is not worth sharing among threads.
const SMALL: usize = 48 * 1024;
/// Rows of one piece of work.
const ROWS_OF_CHUNK: usize = 96;

enum Packed {
    /// Pairs of columns `j` and `j + 16`.
    Bf16(Region<u16>),
    F32(Region<f32>),
}

/// One matrix or several stacked, `[outputs, inputs]`.
pub(super) struct Matrix {
    outputs: usize,
    inputs: usize,
    packed: Packed,
}

/// Where column `j` of a panel lies among its 32.
#[inline(always)]
pub(super) fn pair_place(j: usize) -> usize {
    (j % 16) * 2 + j / 16
}

impl Matrix {
    /// Packs matrices of the same input width. bf16 stays bf16; other forms become fp32.
    pub(super) fn pack(parts: &[&Weight]) -> Self {
        let rows: Vec<(&Weight, usize)> = parts
            .iter()
            .flat_map(|w| (0..w.rows()).map(move |r| (*w, r)))
            .collect();
        Self::pack_rows(&rows)
    }

    /// Packs chosen rows of matrices.
    pub(super) fn pack_rows(rows: &[(&Weight, usize)]) -> Self {
        Self::pack_part(rows, rows.first().map_or(0, |(w, _)| w.cols()), 1)
    }

    /// Packs matrix `expert` of a stack `[experts, rows, cols]`.
    pub(super) fn pack_expert(stack: &Weight, expert: usize, rows: usize) -> Self {
        let stacked: Vec<_> = (0..rows).map(|r| (stack, expert * rows + r)).collect();
        Self::pack_part(&stacked, stack.cols() / rows, rows)
    }

    /// Row `r` of a weight whose rows hold `split` matrix rows each.
    fn pack_part(rows: &[(&Weight, usize)], inputs: usize, split: usize) -> Self {
        let outputs = rows.len();
        let len = outputs.div_ceil(PANEL) * PANEL * inputs;
        let bf16 = rows.iter().all(|(w, _)| w.dtype() == Dtype::BF16);
        let mut row = vec![0.0; inputs];
        let packed = if bf16 {
            let mut data = Region::<u16>::new(len);
            for (i, (w, r)) in rows.iter().enumerate() {
                w.read_part(*r, split, &mut row);
                let base = i / PANEL * PANEL * inputs + pair_place(i % PANEL);
                for (k, x) in row.iter().enumerate() {
                    data[base + k * PANEL] = (x.to_bits() >> 16) as u16;
                }
            }
            Packed::Bf16(data)
        } else {
            let mut data = Region::<f32>::new(len);
            for (i, (w, r)) in rows.iter().enumerate() {
                w.read_part(*r, split, &mut row);
                let base = i / PANEL * PANEL * inputs + i % PANEL;
                for (k, x) in row.iter().enumerate() {
                    data[base + k * PANEL] = *x;
                }
            }
            Packed::F32(data)
        };
        Self {
            outputs,
            inputs,
            packed,
        }
    }

    /// Rows.
    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }
}

/// How a product is computed; none of it changes a bit but `round`.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    pub(super) level: Level,
    /// Round results to bf16.
    pub(super) round: bool,
}

/// `out[i] = x[i] * matrix^T` for rows `0..rows`, shared among the pool's threads.
pub(super) fn product(
    pool: &Pool,
    mode: Mode,
    rows: usize,
    x: &Buf,
    matrix: &Matrix,
    out: &mut Buf,
) {
    assert!(matrix.inputs <= x.width() && matrix.outputs <= out.width());
    assert!(rows * x.stride() <= x.data().len() && rows * out.stride() <= out.data().len());
    if rows == 0 {
        return;
    }
    let panels = matrix.panels();
    let small = rows * matrix.outputs * matrix.inputs <= SMALL;
    let group = if small {
        panels
    } else {
        group_size(rows, panels, pool.threads())
    };
    let row_chunks = if small {
        1
    } else {
        rows.div_ceil(ROWS_OF_CHUNK)
    };
    let stride = out.stride();
    let shards = Shards::new(out.data_mut());
    let chunks = panels.div_ceil(group);
    let work = |chunk: usize, _: usize| {
        let first = chunk / row_chunks * group;
        let count = group.min(panels - first);
        let (start, end) = if row_chunks == 1 {
            (0, rows)
        } else {
            let start = chunk % row_chunks * ROWS_OF_CHUNK;
            (start, rows.min(start + ROWS_OF_CHUNK))
        };
        let piece = Piece {
            x: &x.data()[start * x.stride()..],
            x_stride: x.stride(),
            rows: end - start,
            matrix,
            first,
            count,
            out: shards.at(start * stride + first * PANEL),
            out_stride: stride,
            round: mode.round,
        };
        dispatch(mode.level, piece);
    };
    pool.run(chunks * row_chunks, &work);
}

/// One row against panels `first ..`, in the calling thread; `out` holds whole panels.
pub(super) fn row_product(mode: Mode, x: &[f32], matrix: &Matrix, first: usize, out: &mut [f32]) {
    let count = out.len() / PANEL;
    assert!(matrix.inputs <= x.len() && first + count <= matrix.panels());
    let piece = Piece {
        x,
        x_stride: 0,
        rows: 1,
        matrix,
        first,
        count,
        out: out.as_mut_ptr(),
        out_stride: 0,
        round: mode.round,
    };
    dispatch(mode.level, piece);
}

/// Panels of one piece of work: few enough that every thread gets some, many enough that a
/// single row keeps several chains going.
fn group_size(rows: usize, panels: usize, threads: usize) -> usize {
    let most = match rows {
        0..=3 => 4,
        4..=6 => 2,
        _ => 1,
    };
    let fair = panels / (2 * threads);
    if fair >= most {
        most
    } else if fair >= 2 {
        2.min(most)
    } else {
        1
    }
}

/// Some rows against some panels.
struct Piece<'a> {
    x: &'a [f32],
    x_stride: usize,
    rows: usize,
    matrix: &'a Matrix,
    first: usize,
    count: usize,
    /// First output of the first row: whole panels of every row are written.
    out: *mut f32,
    out_stride: usize,
    round: bool,
}

impl Kernel for Piece<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        match &self.matrix.packed {
            Packed::Bf16(data) => self.run_form::<V, u16>(data),
            Packed::F32(data) => self.run_form::<V, f32>(data),
        }
    }
}

/// A stored form of 32 numbers.
pub(super) trait Form: Copy {
    /// Numbers 0 to 15 and 16 to 31.
    ///
    /// # Safety
    /// 32 elements lie behind `p`.
    unsafe fn load<V: Lanes>(p: *const Self) -> (V, V);
}

impl Form for u16 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const Self) -> (V, V) {
        // SAFETY: the caller's word.
        unsafe { V::load_pairs(p) }
    }
}

impl Form for f32 {
    #[inline(always)]
    unsafe fn load<V: Lanes>(p: *const Self) -> (V, V) {
        // SAFETY: the caller's word.
        unsafe { (V::load(p), V::load(p.add(16))) }
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn run_form<V: Lanes, F: Form>(&self, data: &[F]) {
        let step = self.matrix.inputs * PANEL;
        let mut row = 0;
        while row < self.rows {
            let left = (self.rows - row).min(V::MAX_ROWS);
            let x = self.x[row * self.x_stride..].as_ptr();
            let mut panel = 0;
            while panel < self.count {
                let w = data[(self.first + panel) * step..].as_ptr();
                let out = self.out.wrapping_add(row * self.out_stride + panel * PANEL);
                let panels = self.count - panel;
                // SAFETY: `product` and `row_product` checked that the rows of `x`, the panels
                // and the rows of `out` are all there.
                panel += unsafe { self.block_of_rows::<V, F>(left, panels, x, w, out) };
            }
            row += left;
        }
    }

    /// Picks the register block; returns how many panels it did.
    #[inline(always)]
    unsafe fn block_of_rows<V: Lanes, F: Form>(
        &self,
        rows: usize,
        panels: usize,
        x: *const f32,
        w: *const F,
        out: *mut f32,
    ) -> usize {
        macro_rules! block {
            ($m:literal, $p:literal) => {{
                // SAFETY: the caller's word.
                unsafe { self.block::<V, F, $m, $p>(x, w, out) };
                $p
            }};
        }
        if V::MAX_ROWS >= 12 {
            match (rows, panels) {
                (1, 4..) => block!(1, 4),
                (1, 2..) => block!(1, 2),
                (1, _) => block!(1, 1),
                (2, 4..) => block!(2, 4),
                (2, 2..) => block!(2, 2),
                (2, _) => block!(2, 1),
                (3, 4..) => block!(3, 4),
                (3, 2..) => block!(3, 2),
                (3, _) => block!(3, 1),
                (4, 2..) => block!(4, 2),
                (4, _) => block!(4, 1),
                (5, 2..) => block!(5, 2),
                (5, _) => block!(5, 1),
                (6, 2..) => block!(6, 2),
                (6, _) => block!(6, 1),
                (7, _) => block!(7, 1),
                (8, _) => block!(8, 1),
                (9, _) => block!(9, 1),
                (10, _) => block!(10, 1),
                (11, _) => block!(11, 1),
                _ => block!(12, 1),
            }
        } else {
            match (rows, panels) {
                (1, 2..) => block!(1, 2),
                (1, _) => block!(1, 1),
                (2, _) => block!(2, 1),
                _ => block!(3, 1),
            }
        }
    }

    /// `M` rows against `P` panels, every output in registers.
    #[inline(always)]
    unsafe fn block<V: Lanes, F: Form, const M: usize, const P: usize>(
        &self,
        x: *const f32,
        w: *const F,
        out: *mut f32,
    ) {
        let inputs = self.matrix.inputs;
        let step = inputs * PANEL;
        let mut acc = [[(V::splat(0.0), V::splat(0.0)); P]; M];
        for k in 0..inputs {
            let mut weights = [(V::splat(0.0), V::splat(0.0)); P];
            for (p, weight) in weights.iter_mut().enumerate() {
                // SAFETY: panel `p` holds 32 elements for each input.
                *weight = unsafe { F::load(w.add(p * step + k * PANEL)) };
            }
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: row `m` of `x` holds `inputs` elements.
                let value = V::splat(unsafe { *x.add(m * self.x_stride + k) });
                for (a, weight) in acc.iter_mut().zip(&weights) {
                    a.0 = a.0.fma(value, weight.0);
                    a.1 = a.1.fma(value, weight.1);
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (p, a) in acc.iter().enumerate() {
                // SAFETY: row `m` of `out` has room for whole panels, and only this piece
                // writes these.
                unsafe {
                    let at = out.add(m * self.out_stride + p * PANEL);
                    store(a.0, at, self.round);
                    store(a.1, at.add(16), self.round);
                }
            }
        }
    }
}

/// # Safety
/// There is room for 16 elements.
#[inline(always)]
unsafe fn store<V: Lanes>(v: V, at: *mut f32, round: bool) {
    // SAFETY: the caller's word.
    unsafe {
        if round {
            at.cast::<[f32; 16]>()
                .write_unaligned(v.to_array().map(round_bf16));
        } else {
            v.store(at);
        }
    }
}
