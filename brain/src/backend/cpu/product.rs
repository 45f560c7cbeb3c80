//! Matrix products: `y = x * w^T`, any number of rows.
//!
//! Weights are packed in panels of 32 outputs, input element by input element (bf16: pair by
//! pair). An output is one chain of fused multiply-adds over its inputs, first to last, however
//! many rows are computed together and whoever computes them; lanes run over outputs. So there is
//! nothing to reduce, and a row has the same bits alone and among thousands.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    coded::{Coded, CodedPiece, MOST_ROWS},
    expand::Sheet,
    memory::Buf,
    panel::{Form, Matrix, PANEL, Packed, Part, Words, pack_words},
    pool::{Pool, Shards},
    simd::{Kernel, Lanes, Level, dispatch},
    tile::Tile,
};

/// Multiply-adds below which a product is not worth sharing among threads.
const SMALL: usize = 48 * 1024;
/// Rows of one piece of work.
const ROWS_OF_CHUNK: usize = MOST_ROWS;

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
    let single = Input {
        x: x.data(),
        stride: x.stride(),
    };
    if matrix.takes_words() {
        assert!(words.fit(rows, matrix.inputs()));
        pack_rows(pool, mode, rows, x, matrix.inputs(), words);
    }
    let stride = words.stride();
    let pair = Input {
        x: &*words.data_mut(),
        stride,
    };
    for part in matrix.parts() {
        let columns = Columns {
            out: Shards::new(&mut out.data_mut()[part.first..]),
            stride: out.stride(),
        };
        let share = Share {
            pool,
            mode,
            rows,
            part,
            columns,
        };
        match &part.packed {
            Packed::F32(data) => share.plain(single, data),
            Packed::Bf16(data) => share.plain(pair, data),
            Packed::Coded(coded) if part.words => share.coded::<u16>(pair, coded),
            Packed::Coded(coded) => share.coded::<f32>(single, coded),
        }
    }
}

/// Puts the rows into words of two bf16 numbers.
fn pack_rows(pool: &Pool, mode: Mode, rows: usize, x: &Buf, inputs: usize, words: &mut Words) {
    let stride = words.stride();
    let shards = Shards::new(words.data_mut());
    let pack = |i: usize| {
        // SAFETY: rows are disjoint, and each is packed by one call.
        let words = unsafe { shards.slice(i * stride, stride) };
        let x = &x.row(i)[..inputs];
        dispatch(mode.level, PackRow { x, words });
    };
    let per_chunk = (SMALL / inputs.max(1)).max(1);
    pool.run(rows.div_ceil(per_chunk), &|chunk, _| {
        (chunk * per_chunk..rows.min((chunk + 1) * per_chunk)).for_each(pack);
    });
}

/// Rows of a product in the form that its matrix wants.
#[derive(Clone, Copy)]
struct Input<'a, X> {
    x: &'a [X],
    stride: usize,
}

/// Where the outputs of a part go.
struct Columns {
    out: Shards<f32>,
    stride: usize,
}

/// A product with one part of a matrix, to be shared among the pool's threads.
struct Share<'a> {
    pool: &'a Pool,
    mode: Mode,
    rows: usize,
    part: &'a Part,
    columns: Columns,
}

/// Rows and panels of a piece of work.
struct Claim {
    start: usize,
    rows: usize,
    first: usize,
    count: usize,
    out: *mut f32,
}

impl Share<'_> {
    fn plain<F: Form>(&self, input: Input<'_, F::Input>, data: &[F]) {
        self.run(|claim| {
            let piece = Piece {
                x: &input.x[claim.start * input.stride..],
                x_stride: input.stride,
                rows: claim.rows,
                data,
                steps: self.part.inputs.div_ceil(F::STEP),
                first: claim.first,
                count: claim.count,
                out: claim.out,
                out_stride: self.columns.stride,
                round: self.mode.round,
            };
            dispatch(self.mode.level, piece);
        });
    }

    fn coded<F: Sheet>(&self, input: Input<'_, F::Input>, coded: &Coded) {
        self.run(|claim| {
            let piece = CodedPiece::<F> {
                x: &input.x[claim.start * input.stride..],
                x_stride: input.stride,
                rows: claim.rows,
                coded,
                first: claim.first,
                count: claim.count,
                out: claim.out,
                out_stride: self.columns.stride,
                round: self.mode.round,
            };
            dispatch(self.mode.level, piece);
        });
    }

    fn run(&self, work: impl Fn(Claim) + Sync) {
        let (rows, panels) = (self.rows, self.part.panels());
        let small = rows * self.part.outputs * self.part.inputs <= SMALL;
        let (group, row_chunks) = match small {
            true => (panels, 1),
            false => (
                group_size(rows, panels, self.pool.threads()),
                rows.div_ceil(ROWS_OF_CHUNK),
            ),
        };
        self.pool
            .run(panels.div_ceil(group) * row_chunks, &|chunk, _| {
                let first = chunk / row_chunks * group;
                let (start, end) = match row_chunks {
                    1 => (0, rows),
                    _ => {
                        let start = chunk % row_chunks * ROWS_OF_CHUNK;
                        (start, rows.min(start + ROWS_OF_CHUNK))
                    }
                };
                work(Claim {
                    start,
                    rows: end - start,
                    first,
                    count: group.min(panels - first),
                    out: self
                        .columns
                        .out
                        .at(start * self.columns.stride + first * PANEL),
                });
            });
    }
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
    let [part] = matrix.parts() else {
        // proof: callers pack rows of one weight, whose form is one.
        unreachable!("a matrix of several forms has no row product");
    };
    assert!(part.inputs <= x.len() && first + count <= part.panels());
    let x = &x[..part.inputs];
    if part.words {
        pack_words(x, words);
    }
    match &part.packed {
        Packed::F32(data) => row_piece(mode, x, part, data, first, out),
        Packed::Bf16(data) => row_piece(mode, words, part, data, first, out),
        Packed::Coded(coded) if part.words => {
            row_coded::<u16>(mode, words, coded, first, out);
        }
        Packed::Coded(coded) => row_coded::<f32>(mode, x, coded, first, out),
    }
}

fn row_piece<F: Form>(
    mode: Mode,
    x: &[F::Input],
    part: &Part,
    data: &[F],
    first: usize,
    out: &mut [f32],
) {
    let steps = part.inputs.div_ceil(F::STEP);
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

fn row_coded<F: Sheet>(mode: Mode, x: &[F::Input], coded: &Coded, first: usize, out: &mut [f32]) {
    assert!(coded.inputs.div_ceil(F::STEP) <= x.len());
    let piece = CodedPiece::<F> {
        x,
        x_stride: 0,
        rows: 1,
        coded,
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

/// Some rows against some panels of a plain matrix.
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
        let step = self.steps * PANEL * F::STEP;
        let tile = Tile::<F> {
            x: self.x.as_ptr(),
            x_stride: self.x_stride,
            rows: self.rows,
            w: self.data[self.first * step..].as_ptr(),
            w_stride: step,
            panels: self.count,
            steps: self.steps,
            out: self.out,
            out_stride: self.out_stride,
            carry: false,
            round: self.round,
        };
        // SAFETY: `share` and `row_piece` checked that the rows of `x`, the panels and the rows of
        // `out` are all there.
        unsafe { tile.run::<V>() };
    }
}
