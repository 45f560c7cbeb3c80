//! Matrix products: `y = x * w^T`, any number of rows.
//!
//! Weights are packed in panels of 32 outputs, input element by input element (bf16: pair by
//! pair). An output is one chain of fused multiply-adds over its inputs, first to last, however
//! many rows are computed together and whoever computes them; lanes run over outputs. So there is
//! nothing to reduce, and a row has the same bits alone and among thousands.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    memory::Buf,
    panel::{Form, Matrix, PANEL, Packed, Words, pack_words},
    pool::{Pool, Shards},
    simd::{Kernel, Lanes, Level, dispatch},
};
use crate::sched::math::round_bf16;

/// Multiply-adds below which a product is not worth sharing among threads.
const SMALL: usize = 48 * 1024;
/// Rows of one piece of work.
const ROWS_OF_CHUNK: usize = 96;

/// How a product is computed; none of it changes a bit but `round`.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    pub(super) level: Level,
    /// Activations are bf16: round results.
    pub(super) round: bool,
}

/// Packs one row.
struct PackRow<'a> {
    x: &'a [f32],
    words: &'a mut [u32],
}

impl Kernel for PackRow<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        pack_words(self.x, self.words);
    }
}

/// `out[i] = x[i] * matrix^T` for rows `0..rows`, shared among the pool's threads.
pub(super) fn product(
    pool: &Pool,
    mode: Mode,
    rows: usize,
    x: &Buf,
    matrix: &Matrix,
    words: &mut Words,
    out: &mut Buf,
) {
    assert!(matrix.inputs() <= x.width() && matrix.outputs() <= out.width());
    assert!(rows * x.stride() <= x.data().len() && rows * out.stride() <= out.data().len());
    if rows == 0 {
        return;
    }
    match matrix.packed() {
        Packed::F32(data) => {
            let input = Input {
                x: x.data(),
                stride: x.stride(),
            };
            share(pool, mode, rows, input, matrix, data, out);
        }
        Packed::Bf16(data) => {
            assert!(words.fit(rows, matrix.inputs()));
            let stride = words.stride();
            let shards = Shards::new(words.data_mut());
            let pack = |i: usize| {
                // SAFETY: rows are disjoint, and each is packed by one call.
                let words = unsafe { shards.slice(i * stride, stride) };
                dispatch(
                    mode.level,
                    PackRow {
                        x: &x.row(i)[..matrix.inputs()],
                        words,
                    },
                );
            };
            let per_chunk = (SMALL / matrix.inputs().max(1)).max(1);
            pool.run(rows.div_ceil(per_chunk), &|chunk, _| {
                (chunk * per_chunk..rows.min((chunk + 1) * per_chunk)).for_each(pack);
            });
            let input = Input {
                x: words.data_mut(),
                stride,
            };
            share(pool, mode, rows, input, matrix, data, out);
        }
    }
}

/// Rows of a product in the form that its matrix wants.
#[derive(Clone, Copy)]
struct Input<'a, X> {
    x: &'a [X],
    stride: usize,
}

fn share<F: Form>(
    pool: &Pool,
    mode: Mode,
    rows: usize,
    input: Input<'_, F::Input>,
    matrix: &Matrix,
    data: &[F],
    out: &mut Buf,
) {
    let panels = matrix.panels();
    let small = rows * matrix.outputs() * matrix.inputs() <= SMALL;
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
            x: &input.x[start * input.stride..],
            x_stride: input.stride,
            rows: end - start,
            data,
            steps: matrix.inputs().div_ceil(F::STEP),
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
pub(super) fn row_product(
    mode: Mode,
    x: &[f32],
    matrix: &Matrix,
    first: usize,
    words: &mut [u32],
    out: &mut [f32],
) {
    let count = out.len() / PANEL;
    assert!(matrix.inputs() <= x.len() && first + count <= matrix.panels());
    let x = &x[..matrix.inputs()];
    match matrix.packed() {
        Packed::F32(data) => row_piece(mode, x, matrix, data, first, out),
        Packed::Bf16(data) => {
            pack_words(x, words);
            row_piece(mode, words, matrix, data, first, out);
        }
    }
}

fn row_piece<F: Form>(
    mode: Mode,
    x: &[F::Input],
    matrix: &Matrix,
    data: &[F],
    first: usize,
    out: &mut [f32],
) {
    let steps = matrix.inputs().div_ceil(F::STEP);
    assert!(steps <= x.len());
    let piece = Piece {
        x,
        x_stride: 0,
        rows: 1,
        data,
        steps,
        first,
        count: out.len() / PANEL,
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
struct Piece<'a, F: Form> {
    x: &'a [F::Input],
    x_stride: usize,
    rows: usize,
    data: &'a [F],
    /// Steps of a chain.
    steps: usize,
    first: usize,
    count: usize,
    /// First output of the first row: whole panels of every row are written.
    out: *mut f32,
    out_stride: usize,
    round: bool,
}

impl<F: Form> Kernel for Piece<'_, F> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let most = if V::WIDE { 12 } else { 3 };
        let step = self.steps * PANEL * F::STEP;
        let mut row = 0;
        while row < self.rows {
            let left = (self.rows - row).min(most);
            let x = self.x[row * self.x_stride..].as_ptr();
            let mut panel = 0;
            while panel < self.count {
                let w = self.data[(self.first + panel) * step..].as_ptr();
                let out = self.out.wrapping_add(row * self.out_stride + panel * PANEL);
                let panels = self.count - panel;
                // SAFETY: `share` and `row_piece` checked that the rows of `x`, the panels and
                // the rows of `out` are all there.
                panel += unsafe { self.block_of_rows::<V>(left, panels, x, w, out) };
            }
            row += left;
        }
    }
}

impl<F: Form> Piece<'_, F> {
    /// Picks the register block; returns how many panels it did.
    #[inline(always)]
    unsafe fn block_of_rows<V: Lanes>(
        &self,
        rows: usize,
        panels: usize,
        x: *const F::Input,
        w: *const F,
        out: *mut f32,
    ) -> usize {
        macro_rules! block {
            ($m:literal, $p:literal) => {{
                // SAFETY: the caller's word.
                unsafe { self.block::<V, $m, $p>(x, w, out) };
                $p
            }};
        }
        if V::WIDE {
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
    unsafe fn block<V: Lanes, const M: usize, const P: usize>(
        &self,
        x: *const F::Input,
        w: *const F,
        out: *mut f32,
    ) {
        let panel = self.steps * PANEL * F::STEP;
        let mut acc = [[(V::splat(0.0), V::splat(0.0)); P]; M];
        for k in 0..self.steps {
            // SAFETY: panel `p` holds 32 elements for each input.
            let weights: [_; P] = std::array::from_fn(|p| unsafe {
                F::weights::<V>(w.add(p * panel + k * PANEL * F::STEP))
            });
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: row `m` of `x` holds all inputs.
                let value = unsafe { F::spread::<V>(x.add(m * self.x_stride + k)) };
                for (a, weight) in acc.iter_mut().zip(&weights) {
                    a.0 = F::step(a.0, value, weight.0);
                    a.1 = F::step(a.1, value, weight.1);
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
