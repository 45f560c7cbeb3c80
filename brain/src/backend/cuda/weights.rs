//! Weights on the card: packed tiles for the fast products, rows as stored for tables, fp32 for
//! the simple kernels.

#![allow(unsafe_code, reason = "kernel launches")]

use std::{borrow::Cow, sync::Arc};

use marathon_kernels::abi::{DevicePtr, NVFP4_GAIN, PackArgs, WeightForm};

use super::{
    card::{Card, Region},
    form::Form,
};
use crate::model::weight::{Form as Stored, Weight};

/// Bytes of a matrix that are on their way at a time.
const PIECE: usize = 256 << 20;

/// A matrix ready for products, or several stacked by rows.
#[derive(Clone)]
pub(super) struct Matrix {
    /// How it is packed.
    pub(super) form: WeightForm,
    tiles: Arc<Region>,
    block_scales: Option<Arc<Region>>,
    row_scales: Option<Arc<Region>>,
    /// Rows: outputs.
    pub(super) n: usize,
    /// Columns: inputs.
    pub(super) k: usize,
}

impl Matrix {
    /// Addresses of the tiles, the block scales and the row scales; 0 where there are none.
    pub(super) fn at(&self) -> [DevicePtr; 3] {
        let at = |region: &Option<Arc<Region>>| region.as_ref().map_or(0, |r| r.at);
        [self.tiles.at, at(&self.block_scales), at(&self.row_scales)]
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
            Self::Packed(matrix) => (matrix.at()[0], matrix.k, true),
            Self::Rows { memory, width } => (memory.at, *width, false),
        }
    }
}

/// Where a weight's bytes begin: what tells that a head is the embedding itself.
pub(super) fn identity(weight: &Weight) -> Option<*const u8> {
    weight.tensors().first().map(|t| t.bytes().as_ptr())
}

/// Rows `from .. from + count` as bf16, or as fp32, little-endian.
fn rows_as(form: Form, weight: &Weight, from: usize, count: usize) -> Cow<'_, [u8]> {
    let width = weight.cols();
    let stored = match weight.form() {
        Stored::Bf16 => Some(Form::Bf16),
        Stored::F32 => Some(Form::F32),
        _ => None,
    };
    if let Weight::Float(tensor) = weight
        && stored == Some(form)
    {
        let bytes = width * form.size();
        return Cow::Borrowed(&tensor.bytes()[from * bytes..(from + count) * bytes]);
    }
    let mut row = vec![0.0; width];
    let mut out = Vec::with_capacity(count * width * form.size());
    for i in from..from + count {
        weight.read_row(i, &mut row);
        match form {
            Form::F32 => out.extend(row.iter().flat_map(|x| x.to_le_bytes())),
            Form::Bf16 => {
                let halves = row.iter().map(|x| half::bf16::from_f32(*x));
                out.extend(halves.flat_map(half::bf16::to_le_bytes));
            }
        }
    }
    Cow::Owned(out)
}

/// The form in which stacked matrices are multiplied: their own where the products have it and it
/// is the same for all, else bf16.
fn packed_form(parts: &[&Weight]) -> WeightForm {
    let form = |w: &&Weight| match w.form() {
        Stored::Fp8Tensor | Stored::Fp8Row => WeightForm::Fp8,
        Stored::Nvfp4 if w.cols().is_multiple_of(16) => WeightForm::Nvfp4,
        _ => WeightForm::Bf16,
    };
    let first = parts.first().map_or(WeightForm::Bf16, form);
    match parts.iter().all(|w| form(w) == first) {
        true => first,
        false => WeightForm::Bf16,
    }
}

/// What multiplies a row's fp32 sum.
fn row_scales(form: WeightForm, weight: &Weight) -> Vec<f32> {
    match weight {
        Weight::Fp8(w) if form == WeightForm::Fp8 => {
            (0..w.rows()).map(|row| w.scale_of(row, 0)).collect()
        }
        Weight::Nvfp4(w) if form == WeightForm::Nvfp4 => {
            vec![w.global() * NVFP4_GAIN; w.rows()]
        }
        _ => Vec::new(),
    }
}

/// Where a weight's rows go in a packed matrix.
#[derive(Clone, Copy)]
struct Place {
    form: WeightForm,
    tiles: DevicePtr,
    block_scales: DevicePtr,
    /// First row of this part.
    first: usize,
    /// 0: rows follow each other; 1 and 2: gate and up in turns of eight.
    interleave: u32,
}

/// Brings rows `from .. from + rows` to their place, a piece at a time.
fn pack(card: &mut Card, weight: &Weight, from: usize, rows: usize, to: &Place) {
    if card.device().is_none() || card.random {
        return;
    }
    let k = weight.cols();
    let errors = card.errors();
    let per_piece = (PIECE / (2 * k)).max(1).next_multiple_of(8);
    for begin in (0..rows).step_by(per_piece) {
        let count = per_piece.min(rows - begin);
        let start = from + begin;
        let (codes, scales): (Cow<'_, [u8]>, &[u8]) = match (to.form, weight) {
            (WeightForm::Fp8, Weight::Fp8(w)) => {
                (w.codes()[start * k..(start + count) * k].into(), &[])
            }
            (WeightForm::Nvfp4, Weight::Nvfp4(w)) => (
                w.codes()[start * k / 2..(start + count) * k / 2].into(),
                &w.scales()[start * k / 16..(start + count) * k / 16],
            ),
            _ => (rows_as(Form::Bf16, weight, start, count), &[]),
        };
        let turned = if to.interleave > 0 { 2 * begin } else { begin };
        let mut args = PackArgs {
            source: 0,
            scales: 0,
            weight: to.tiles,
            block_scale: to.block_scales,
            errors,
            n: count as u32,
            k: k as u32,
            first: (to.first + turned) as u32,
            interleave: to.interleave,
        };
        let kernel = format!("pack_{}", to.form.name());
        card.lend(&codes, |card, source| {
            args.source = source;
            if scales.is_empty() {
                // SAFETY: the source holds `count` rows, the tiles all of the matrix.
                unsafe { card.launch(&kernel, [1024, 1, 1], 256, 0, &args) };
                return;
            }
            card.lend(scales, |card, scales| {
                args.scales = scales;
                // SAFETY: as above, and a scale per 16 of a row.
                unsafe {
                    card.launch(&kernel, [1024, 1, 1], 256, 0, &args);
                    card.launch("pack_nvfp4_scales", [1024, 1, 1], 256, 0, &args);
                }
            });
        });
    }
}

/// Prepares matrices of one input width, stacked in order.
pub(super) fn matrix(card: &mut Card, form: Form, parts: &[&Weight]) -> Matrix {
    let n = parts.iter().map(|w| w.rows()).sum();
    let k = parts.first().map_or(0, |w| w.cols());
    if form == Form::F32 {
        let tiles = card.upload(n * k * 4, || {
            let rows = |w: &&Weight| rows_as(form, w, 0, w.rows()).into_owned();
            parts.iter().flat_map(rows).collect()
        });
        return Matrix {
            form: WeightForm::Bf16,
            tiles: Arc::new(tiles),
            block_scales: None,
            row_scales: None,
            n,
            k,
        };
    }
    let form = packed_form(parts);
    let (codes, scales) = form.packed_bytes(n, k);
    let tiles = card.zeros(codes);
    let block_scales = (scales > 0).then(|| card.zeros(scales));
    let mut place = Place {
        form,
        tiles: tiles.at,
        block_scales: block_scales.as_ref().map_or(0, |s| s.at),
        first: 0,
        interleave: 0,
    };
    if card.random {
        card.randomize(&tiles, codes);
    }
    for weight in parts {
        pack(card, weight, 0, weight.rows(), &place);
        place.first += weight.rows();
    }
    let rows: Vec<f32> = parts.iter().flat_map(|w| row_scales(form, w)).collect();
    let row_scales = (!rows.is_empty()).then(|| Arc::new(floats(card, &rows)));
    Matrix {
        form,
        tiles: Arc::new(tiles),
        block_scales: block_scales.map(Arc::new),
        row_scales,
        n,
        k,
    }
}

/// Matrices of experts, one behind the other, and the bytes from one to the next.
///
/// Each is given by its parts; where there are two, or `gated`, the first half of its rows is gate,
/// the second up, and they lie in turns of eight.
pub(super) fn experts(
    card: &mut Card,
    form: Form,
    matrices: &[Vec<&Weight>],
    gated: bool,
) -> (Region, usize) {
    let rows = |parts: &Vec<&Weight>| parts.iter().map(|w| w.rows()).sum::<usize>();
    let n = matrices.first().map_or(0, rows);
    let k = matrices
        .first()
        .and_then(|m| m.first())
        .map_or(0, |w| w.cols());
    if form == Form::F32 {
        let memory = card.upload(matrices.len() * n * k * 4, || {
            let parts = matrices.iter().flatten();
            parts
                .flat_map(|w| rows_as(form, w, 0, w.rows()).into_owned())
                .collect()
        });
        return (memory, n * k * 4);
    }
    let stride = WeightForm::Bf16.packed_bytes(n, k).0;
    let memory = card.zeros(matrices.len() * stride);
    if card.random {
        card.randomize(&memory, matrices.len() * stride);
    }
    for (expert, parts) in matrices.iter().enumerate() {
        let place = |interleave| Place {
            form: WeightForm::Bf16,
            tiles: memory.at + (expert * stride) as u64,
            block_scales: 0,
            first: 0,
            interleave,
        };
        match (parts.as_slice(), gated) {
            ([gate, up], true) => {
                pack(card, gate, 0, n / 2, &place(1));
                pack(card, up, 0, n / 2, &place(2));
            }
            ([both], true) => {
                pack(card, both, 0, n / 2, &place(1));
                pack(card, both, n / 2, n / 2, &place(2));
            }
            (parts, _) => parts.iter().for_each(|w| pack(card, w, 0, n, &place(0))),
        }
    }
    (memory, stride)
}

fn random(card: &mut Card, bytes: usize) -> Region {
    let region = card.zeros(bytes);
    card.randomize(&region, bytes);
    region
}

/// A table whose rows lie one behind the other.
pub(super) fn table(card: &mut Card, form: Form, weight: &Weight) -> Table {
    let (rows, width) = (weight.rows(), weight.cols());
    if card.random {
        let memory = random(card, rows * width * form.size());
        return Table::Rows { memory, width };
    }
    let memory = card.upload(rows * width * form.size(), || {
        rows_as(form, weight, 0, rows).into_owned()
    });
    Table::Rows { memory, width }
}

/// Rows of a table in another order.
pub(super) fn reordered(card: &mut Card, form: Form, weight: &Weight, order: &[u32]) -> Region {
    let width = weight.cols();
    if card.random {
        return random(card, order.len() * width * form.size());
    }
    card.upload(order.len() * width * form.size(), || {
        let row = |i: &u32| rows_as(form, weight, *i as usize, 1).into_owned();
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
