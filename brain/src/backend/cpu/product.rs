//! Matrix products: `y = x * w^T`, any number of rows.
//!
//! The definition, of one output. Its inputs go to sixteen lanes, 32 bf16 or 16 fp32 ones in a step:
//! of bf16 lane `i` takes the second and then the first of pair `i`, of fp32 input `i`. A lane is a
//! chain of fused multiply-adds over its inputs, first to last, from zero. Where a row has several
//! scales (FP8 by blocks, four-bit integers by groups), each group's inputs are such a chain by
//! themselves, and the lane is the chain of `total = fma(scale, sum of group, total)`. NVFP4 in bf16 is
//! dealt out so that a lane's share of a step of 256 inputs is one block with its scale
//! ([`super::decode::dealt`]). Then the lanes are added in a fixed order
//! ([`Lanes::sums`](super::simd::Lanes::sums)), and one scale of the row, if there is one, multiplies
//! the sum. How many rows are computed together, by whom, and by which instructions has no part in it.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    arranged::Arranged,
    claim::{Claim, FEW, MOST_ROWS, Rows, STRIP},
    matrix::{Arrangement, Matrix, Part},
    memory::Buf,
    pool::{Pool, Shards},
    simd::Level,
};

/// Multiply-adds below which a product is not worth sharing among threads.
const SMALL: usize = 48 * 1024;
/// Rows of one piece of work.
const ROWS_OF_CHUNK: usize = MOST_ROWS;
/// Bytes of weights of a piece of work: enough to make finding it cheap.
const BYTES_OF_CHUNK: usize = 64 << 10;
/// Outputs of a piece of work are a multiple of this.
const OUTPUTS: usize = 4;

/// How a product is computed; none of it changes a bit but `round`.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    pub(super) level: Level,
    /// Activations are bf16: round results.
    pub(super) round: bool,
}

/// `out[i] = x[i] * matrix^T` for rows `0..rows`, shared among the pool's threads.
pub(super) fn product(
    pool: &Pool,
    mode: Mode,
    rows: usize,
    x: &Buf,
    matrix: &Matrix,
    arranged: &mut Arranged,
    out: &mut Buf,
) {
    assert!(matrix.inputs() <= x.width() && matrix.outputs() <= out.width());
    assert!(rows * x.stride() <= x.data().len() && rows * out.stride() <= out.data().len());
    if rows == 0 {
        return;
    }
    arrange(pool, mode.level, rows, x, matrix, arranged);
    let stride = out.stride();
    let share = Share {
        mode,
        rows,
        arranged,
        out: Shards::new(out.data_mut()),
        stride,
    };
    if rows * matrix.outputs() * matrix.inputs() <= SMALL {
        matrix.parts().iter().for_each(|part| share.whole(part));
        return;
    }
    let cut = |part| Cut::new(part, rows, pool.threads());
    let chunks = matrix.parts().iter().map(|part| cut(part).chunks()).sum();
    pool.run(chunks, &|mut chunk, _| {
        for part in matrix.parts() {
            let cut = cut(part);
            if chunk < cut.chunks() {
                return share.chunk(part, &cut, chunk);
            }
            chunk -= cut.chunks();
        }
    });
}

/// Puts the rows in the orders that the matrix wants.
fn arrange(
    pool: &Pool,
    level: Level,
    rows: usize,
    x: &Buf,
    matrix: &Matrix,
    arranged: &mut Arranged,
) {
    let writer = arranged.writer(level, rows, matrix);
    let per_chunk = (SMALL / matrix.inputs().max(1)).max(1);
    pool.run(rows.div_ceil(per_chunk), &|chunk, _| {
        for i in chunk * per_chunk..rows.min((chunk + 1) * per_chunk) {
            // SAFETY: the writer has room for so many rows, and each is in one chunk.
            unsafe { writer.put(i, x.row(i)) };
        }
    });
}

/// How the work on a part is cut into pieces.
struct Cut {
    outputs: usize,
    row_chunks: usize,
    groups: usize,
}

impl Cut {
    /// Few enough outputs that every thread gets some, many enough that a piece is worth it.
    fn new(part: &Part, rows: usize, threads: usize) -> Self {
        let bytes = part.codes.bytes(part.inputs).max(1) * rows.min(ROWS_OF_CHUNK);
        let worth = BYTES_OF_CHUNK.div_ceil(bytes);
        let fair = part.outputs / (4 * threads);
        let outputs = worth.min(fair).next_multiple_of(OUTPUTS).max(OUTPUTS);
        let outputs = match rows {
            0..=FEW => outputs,
            // What is expanded together is used by all rows.
            _ => outputs.max(STRIP.min(fair.next_multiple_of(OUTPUTS))),
        };
        Self {
            outputs,
            row_chunks: rows.div_ceil(ROWS_OF_CHUNK),
            groups: part.outputs.div_ceil(outputs),
        }
    }

    fn chunks(&self) -> usize {
        self.groups * self.row_chunks
    }
}

/// A product, to be shared among threads.
struct Share<'a> {
    mode: Mode,
    rows: usize,
    arranged: &'a Arranged,
    out: Shards<f32>,
    stride: usize,
}

impl Share<'_> {
    fn whole(&self, part: &Part) {
        for start in (0..self.rows).step_by(ROWS_OF_CHUNK) {
            let rows = ROWS_OF_CHUNK.min(self.rows - start);
            self.piece(part, (start, rows), (0, part.outputs));
        }
    }

    fn chunk(&self, part: &Part, cut: &Cut, chunk: usize) {
        let (group, row_chunk) = (chunk / cut.row_chunks, chunk % cut.row_chunks);
        let (start, first) = (row_chunk * ROWS_OF_CHUNK, group * cut.outputs);
        let rows = ROWS_OF_CHUNK.min(self.rows - start);
        let outputs = cut.outputs.min(part.outputs - first);
        self.piece(part, (start, rows), (first, outputs));
    }

    fn piece(&self, part: &Part, (start, rows): (usize, usize), (first, outputs): (usize, usize)) {
        let claim = Claim {
            part,
            first,
            outputs,
            x: rows_from(self.arranged, part.arrangement, start),
            rows,
            out: self.out.at(start * self.stride + part.first + first),
            stride: self.stride,
            round: self.mode.round,
        };
        claim.run(self.mode.level);
    }
}

fn rows_from(arranged: &Arranged, arrangement: Arrangement, start: usize) -> Rows<'_> {
    match arrangement {
        Arrangement::Singles => {
            let (x, stride) = arranged.singles();
            Rows::Singles(&x[start * stride..], stride)
        }
        Arrangement::Pairs | Arrangement::Dealt => {
            let (x, stride) = arranged.words(arrangement);
            Rows::Words(&x[start * stride..], stride)
        }
    }
}

/// One row against outputs `first ..` of a matrix of one part, in the calling thread.
pub(super) fn row_product(
    mode: Mode,
    x: &[f32],
    matrix: &Matrix,
    first: usize,
    arranged: &mut Arranged,
    out: &mut [f32],
) {
    let [part] = matrix.parts() else {
        // proof: callers take rows of one weight, whose form is one.
        unreachable!("a matrix of several forms has no row product");
    };
    assert!(part.inputs <= x.len() && first + out.len() <= part.outputs);
    let writer = arranged.writer(mode.level, 1, matrix);
    // SAFETY: the writer has room for a row, and is used by nobody else.
    unsafe { writer.put(0, x) };
    let claim = Claim {
        part,
        first,
        outputs: out.len(),
        x: rows_from(arranged, part.arrangement, 0),
        rows: 1,
        out: out.as_mut_ptr(),
        stride: 0,
        round: mode.round,
    };
    claim.run(mode.level);
}
