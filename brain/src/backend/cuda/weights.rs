//! Weights on the card: packed tiles for the fast products, rows as stored for tables, fp32 for
//! the simple kernels.

#![allow(unsafe_code, reason = "kernel launches")]

use std::{borrow::Cow, sync::Arc};

use marathon_kernels::abi::{DevicePtr, PackArgs, WeightForm};

use super::{
    card::{Card, Region},
    form::Form,
};
use crate::model::{checkpoint::Dtype, weights::Weight};

/// Bytes of a matrix that are on their way at a time.
const PIECE: usize = 256 << 20;

/// A matrix ready for products, or several stacked by rows.
#[derive(Clone)]
pub(super) struct Matrix {
    memory: Arc<Region>,
    /// Rows: outputs.
    pub(super) n: usize,
    /// Columns: inputs.
    pub(super) k: usize,
}

impl Matrix {
    pub(super) fn at(&self) -> DevicePtr {
        self.memory.at
    }
}

/// A table read by token.
pub(super) enum Table {
    /// A tied head's own tiles.
    Packed(Matrix),
    /// Rows one behind the other.
    Rows {
        /// Where.
        memory: Region,
        /// Elements of a row.
        width: usize,
    },
}

impl Table {
    /// Address, elements of a row, and whether it lies in tiles.
    pub(super) fn place(&self) -> (DevicePtr, usize, bool) {
        match self {
            Self::Packed(matrix) => (matrix.at(), matrix.k, true),
            Self::Rows { memory, width } => (memory.at, *width, false),
        }
    }
}

/// Where a weight's bytes begin: what tells that a head is the embedding itself.
pub(super) fn identity(weight: &Weight) -> Option<*const u8> {
    weight.tensors().next().map(|t| t.bytes().as_ptr())
}

/// Rows `from .. from + count` as bf16, or as fp32, little-endian. `split` sees every row as that
/// many shorter ones.
fn rows_as(form: Form, weight: &Weight, split: usize, from: usize, count: usize) -> Cow<'_, [u8]> {
    let width = weight.cols() / split;
    let Weight::Float(tensor) = weight;
    let stored = match tensor.dtype() {
        Dtype::BF16 => Some(Form::Bf16),
        Dtype::F32 => Some(Form::F32),
        _ => None,
    };
    if stored == Some(form) {
        let bytes = width * form.size();
        return Cow::Borrowed(&tensor.bytes()[from * bytes..(from + count) * bytes]);
    }
    let mut row = vec![0.0; width];
    let mut out = Vec::with_capacity(count * width * form.size());
    for i in from..from + count {
        weight.read_part(i, split, &mut row);
        match form {
            Form::F32 => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
            Form::Bf16 => {
                out.extend(
                    row.iter()
                        .flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()),
                );
            }
        }
    }
    Cow::Owned(out)
}

/// Part of a packed matrix: rows of a weight, where they begin in it, and how they lie.
struct Part<'a> {
    weight: &'a Weight,
    split: usize,
    from: usize,
    rows: usize,
    /// First row in the packed matrix.
    first: usize,
    /// 0: rows follow each other; 1 and 2: gate and up in turns of eight.
    interleave: u32,
}

fn pack(card: &mut Card, to: DevicePtr, k: usize, errors: DevicePtr, part: &Part<'_>) {
    let per_piece = (PIECE / (2 * k)).max(1).next_multiple_of(8);
    for begin in (0..part.rows).step_by(per_piece) {
        if card.device().is_none() {
            return;
        }
        let count = per_piece.min(part.rows - begin);
        let data = rows_as(
            Form::Bf16,
            part.weight,
            part.split,
            part.from + begin,
            count,
        );
        card.lend(&data, |card, source| {
            let turned = if part.interleave > 0 {
                2 * begin
            } else {
                begin
            };
            let args = PackArgs {
                source,
                scales: 0,
                weight: to,
                block_scale: 0,
                errors,
                n: count as u32,
                k: k as u32,
                first: (part.first + turned) as u32,
                interleave: part.interleave,
            };
            // SAFETY: the source holds `count` rows, the tiles all of the matrix.
            unsafe { card.launch("pack_bf16", [1024, 1, 1], 256, 0, &args) };
        });
    }
}

fn whole<'a>(weight: &'a Weight, first: usize) -> Part<'a> {
    Part {
        weight,
        split: 1,
        from: 0,
        rows: weight.rows(),
        first,
        interleave: 0,
    }
}

/// Prepares matrices of one input width, stacked in order.
pub(super) fn matrix(card: &mut Card, form: Form, parts: &[&Weight]) -> Matrix {
    let n = parts.iter().map(|w| w.rows()).sum();
    let k = parts.first().map_or(0, |w| w.cols());
    let memory = match form {
        Form::F32 => card.upload(n * k * 4, || {
            let rows = |w: &&Weight| rows_as(form, w, 1, 0, w.rows()).into_owned();
            parts.iter().flat_map(rows).collect()
        }),
        Form::Bf16 => {
            let memory = card.zeros(WeightForm::Bf16.packed_bytes(n, k).0);
            let mut first = 0;
            for weight in parts {
                pack(card, memory.at, k, 0, &whole(weight, first));
                first += weight.rows();
            }
            memory
        }
    };
    Matrix {
        memory: Arc::new(memory),
        n,
        k,
    }
}

/// Matrices of experts, one behind the other, and the bytes from one to the next.
///
/// `weight` is `[experts, n, k]`; where `gated`, the first half of `n` is gate, the second up, and
/// they lie in turns of eight.
pub(super) fn experts(
    card: &mut Card,
    form: Form,
    weight: &Weight,
    n: usize,
    gated: bool,
) -> (Region, usize) {
    let (count, k) = (weight.rows(), weight.cols() / n);
    if form == Form::F32 {
        let memory = card.upload(count * n * k * 4, || {
            rows_as(form, weight, 1, 0, count).into_owned()
        });
        return (memory, n * k * 4);
    }
    let stride = WeightForm::Bf16.packed_bytes(n, k).0;
    let memory = card.zeros(count * stride);
    let halves: &[(usize, usize, u32)] = match gated {
        false => &[(0, n, 0)],
        true => &[(0, n / 2, 1), (n / 2, n / 2, 2)],
    };
    for expert in 0..count {
        for &(from, rows, interleave) in halves {
            let part = Part {
                weight,
                split: n,
                from: expert * n + from,
                rows,
                first: 0,
                interleave,
            };
            let to = memory.at + (expert * stride) as u64;
            pack(card, to, k, 0, &part);
        }
    }
    (memory, stride)
}

/// A table whose rows lie one behind the other.
pub(super) fn table(card: &mut Card, form: Form, weight: &Weight) -> Table {
    let (rows, width) = (weight.rows(), weight.cols());
    let memory = card.upload(rows * width * form.size(), || {
        rows_as(form, weight, 1, 0, rows).into_owned()
    });
    Table::Rows { memory, width }
}

/// Rows of a table in another order.
pub(super) fn reordered(card: &mut Card, form: Form, weight: &Weight, order: &[u32]) -> Region {
    let width = weight.cols();
    card.upload(order.len() * width * form.size(), || {
        let row = |i: &u32| rows_as(form, weight, 1, *i as usize, 1).into_owned();
        order.iter().flat_map(row).collect()
    })
}

/// Numbers in fp32.
pub(super) fn floats(card: &mut Card, numbers: &[f32]) -> Region {
    card.upload(numbers.len() * 4, || {
        numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
    })
}

/// Words.
pub(super) fn words(card: &mut Card, words: &[u32]) -> Region {
    card.upload(words.len() * 4, || {
        words.iter().flat_map(|x| x.to_le_bytes()).collect()
    })
}

/// A norm's weights, with its epsilon.
pub(super) struct Norm {
    pub(super) memory: Region,
    pub(super) width: usize,
    pub(super) eps: f32,
}
