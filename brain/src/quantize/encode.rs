//! Encodes the matrices of one unit, a few rows at a time, and hands the bytes on.

use super::{
    error::ErrorSum,
    fp8, grid,
    journal::Record,
    layout::{Format, Matrix, Output},
    nvfp4,
};
use crate::model::{
    checkpoint::{Dtype, Tensor},
    shown::shown,
    weight::codes::expand,
};

/// Weights that are in memory at a time.
const CHUNK: usize = 1 << 18;
/// One block in so many is held against the grid of Q4_0.
const SAMPLE: usize = 61;

/// A weight that no model has.
#[derive(Debug, thiserror::Error)]
#[error("{} holds a weight that is not a finite number: fetch the checkpoint again", shown(.tensor))]
pub struct NotFinite {
    /// The tensor.
    pub tensor: String,
}

/// Where bytes go: the place in the file, and the bytes.
pub type Sink<'a, E> = dyn FnMut(u64, &[u8]) -> Result<(), E> + 'a;

/// The weights of a matrix as the file has them.
struct Rows<'a> {
    matrix: &'a Matrix,
    tensor: &'a Tensor,
    bytes: &'a [u8],
    width: usize,
}

impl<'a> Rows<'a> {
    fn new(matrix: &'a Matrix, sources: &'a [Tensor]) -> Self {
        let tensor = &sources[matrix.source];
        let width = tensor.dtype().bitsize() / 8;
        let row = matrix.cols * width;
        let first = matrix.first_row * row;
        Self {
            matrix,
            tensor,
            bytes: &tensor.bytes()[first..first + matrix.rows * row],
            width,
        }
    }

    fn dtype(&self) -> Dtype {
        self.tensor.dtype()
    }

    /// Whole rows or, of longer ones, whole blocks, as fp32; with their place among the weights.
    fn chunks(&self, size: usize) -> impl Iterator<Item = (usize, &'a [u8])> {
        let step = size * self.width;
        let chunks = self.bytes.chunks(step).enumerate();
        chunks.map(move |(i, bytes)| (i * size, bytes))
    }

    /// The largest weight, and how many of the looked-at blocks lie on the grid of Q4_0.
    fn look(&self, buffer: &mut Vec<f32>) -> Result<(f32, f64), NotFinite> {
        let (mut largest, mut on_grid, mut seen) = (0u32, 0u32, 0u32);
        let mut block = 0;
        for (_, bytes) in self.chunks(CHUNK) {
            let weights = read(self.dtype(), bytes, self.width, buffer);
            largest = weights
                .iter()
                .fold(largest, |m, x| m.max(x.to_bits() & 0x7fff_ffff));
            for weights in weights.chunks_exact(grid::BLOCK) {
                if block % SAMPLE == 0 {
                    seen += 1;
                    on_grid += u32::from(grid::on_grid(weights));
                }
                block += 1;
            }
        }
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            return Err(NotFinite {
                tensor: self.tensor.name().to_owned(),
            });
        }
        let share = f64::from(on_grid) / f64::from(seen.max(1));
        Ok((largest, share))
    }
}

fn read<'b>(dtype: Dtype, bytes: &[u8], width: usize, buffer: &'b mut Vec<f32>) -> &'b [f32] {
    buffer.resize(bytes.len() / width, 0.0);
    expand(dtype, bytes, buffer);
    buffer
}

/// Encodes matrices that belong together. `outputs` are the tensors they make, in their order.
/// `read` hears how many bytes of the source were done with.
pub fn encode<E: From<NotFinite>>(
    matrices: &[Matrix],
    outputs: &[Output],
    sources: &[Tensor],
    format: Format,
    sink: &mut Sink<'_, E>,
    read: &dyn Fn(u64),
) -> Result<Vec<Record>, E> {
    let rows: Vec<Rows<'_>> = matrices.iter().map(|m| Rows::new(m, sources)).collect();
    let mut buffer = Vec::new();
    let looks = rows
        .iter()
        .map(|r| r.look(&mut buffer))
        .collect::<Result<Vec<_>, _>>()?;
    let largest = looks
        .iter()
        .fold(0.0, |m: f32, (largest, _)| m.max(*largest));
    let each = outputs.len() / matrices.len();
    let mut records = Vec::new();
    for ((rows, outputs), (_, grid)) in rows.iter().zip(outputs.chunks_exact(each)).zip(&looks) {
        let sum = match (format, outputs) {
            (Format::Nvfp4, [codes, scales, factor]) => {
                let value = nvfp4::factor(largest);
                sink(factor.offset, &value.to_le_bytes())?;
                blocks(rows, value, [codes, scales], &mut buffer, sink, read)?
            }
            (_, [codes, scales, ..]) => by_row(rows, [codes, scales], &mut buffer, sink, read)?,
            _ => ErrorSum::default(),
        };
        records.push(Record {
            module: rows.matrix.module.clone(),
            sum,
            grid: *grid,
        });
    }
    Ok(records)
}

fn blocks<E>(
    rows: &Rows<'_>,
    factor: f32,
    [codes, scales]: [&Output; 2],
    buffer: &mut Vec<f32>,
    sink: &mut Sink<'_, E>,
    done: &dyn Fn(u64),
) -> Result<ErrorSum, E> {
    let (mut code_bytes, mut scale_bytes) = (Vec::new(), Vec::new());
    let mut sum = ErrorSum::default();
    for (at, bytes) in rows.chunks(CHUNK) {
        let weights = read(rows.dtype(), bytes, rows.width, buffer);
        code_bytes.resize(weights.len() / 2, 0);
        scale_bytes.resize(weights.len() / nvfp4::BLOCK, 0);
        sum.add(&nvfp4::encode(
            weights,
            factor,
            &mut code_bytes,
            &mut scale_bytes,
        ));
        sink(codes.offset + at as u64 / 2, &code_bytes)?;
        sink(scales.offset + (at / nvfp4::BLOCK) as u64, &scale_bytes)?;
        done(bytes.len() as u64);
    }
    Ok(sum)
}

fn by_row<E>(
    rows: &Rows<'_>,
    [codes, scales]: [&Output; 2],
    buffer: &mut Vec<f32>,
    sink: &mut Sink<'_, E>,
    done: &dyn Fn(u64),
) -> Result<ErrorSum, E> {
    let cols = rows.matrix.cols;
    let whole = (CHUNK / cols).max(1) * cols;
    let (mut code_bytes, mut scale_bytes) = (Vec::new(), Vec::new());
    let mut sum = ErrorSum::default();
    for (at, bytes) in rows.chunks(whole) {
        let weights = read(rows.dtype(), bytes, rows.width, buffer);
        code_bytes.resize(weights.len(), 0);
        scale_bytes.clear();
        for (row, codes) in weights.chunks(cols).zip(code_bytes.chunks_mut(cols)) {
            let scale = fp8::encode(row, codes, &mut sum);
            scale_bytes.extend(scale.to_le_bytes());
        }
        sink(codes.offset + at as u64, &code_bytes)?;
        sink(scales.offset + (at / cols * 4) as u64, &scale_bytes)?;
        done(bytes.len() as u64);
    }
    Ok(sum)
}

const _: () = assert!(CHUNK.is_multiple_of(nvfp4::BLOCK) && CHUNK.is_multiple_of(grid::BLOCK));
