//! Weights on the card: packed tiles for the fast products, rows as stored for tables, fp32 for
//! the simple kernels.

#![allow(unsafe_code, reason = "kernel launches")]

use std::{borrow::Cow, sync::Arc};

use marathon_kernels::abi::{DevicePtr, ExpertArgs, NVFP4_GAIN, PackArgs, WeightForm};

use super::{
    card::{Card, PIECE, Region},
    form::Form,
};
use crate::model::weight::{Form as Stored, Weight};

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
    let per_piece = (PIECE / (2 * k)).max(8) / 8 * 8;
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
        let args = PackArgs {
            source: card.land(0, &codes),
            scales: card.land(PIECE, scales),
            weight: to.tiles,
            block_scale: to.block_scales,
            errors,
            n: count as u32,
            k: k as u32,
            first: (to.first + turned) as u32,
            interleave: to.interleave,
        };
        let kernel = format!("pack_{}", to.form.name());
        // SAFETY: the landing holds `count` rows and a scale per 16 of each, the tiles all of the
        // matrix.
        unsafe {
            card.launch(&kernel, [1024, 1, 1], 256, 0, &args);
            if !scales.is_empty() {
                card.launch("pack_nvfp4_scales", [1024, 1, 1], 256, 0, &args);
            }
        }
    }
}

/// Prepares matrices of one input width, stacked in order.
pub(super) fn matrix(card: &mut Card, form: Form, parts: &[&Weight]) -> Matrix {
    packed(card, form, parts, false)
}

/// Prepares gate and up: for the fast products in turns of eight rows, else stacked.
pub(super) fn gated_matrix(card: &mut Card, form: Form, gate: &Weight, up: &Weight) -> Matrix {
    packed(card, form, &[gate, up], form == Form::Bf16)
}

fn packed(card: &mut Card, form: Form, parts: &[&Weight], gated: bool) -> Matrix {
    let stack = experts(card, form, &[parts.to_vec()], gated);
    Matrix {
        form: stack.form,
        tiles: Arc::new(stack.tiles),
        block_scales: stack.block_scales.map(Arc::new),
        row_scales: stack.row_scales.map(Arc::new),
        n: parts.iter().map(|w| w.rows()).sum(),
        k: parts.first().map_or(0, |w| w.cols()),
    }
}

/// Matrices of one shape, one behind the other.
pub(super) struct Stack {
    /// How they are packed.
    pub(super) form: WeightForm,
    tiles: Region,
    block_scales: Option<Region>,
    /// A scale per row of all matrices, in packed order.
    row_scales: Option<Region>,
    /// Bytes from one to the next: tiles, block scales.
    strides: (usize, usize),
}

impl Stack {
    /// The weights of a product.
    pub(super) fn args(&self, args: &ExpertArgs) -> ExpertArgs {
        let at = |region: &Option<Region>| region.as_ref().map_or(0, |r| r.at);
        ExpertArgs {
            weight: self.tiles.at,
            block_scale: at(&self.block_scales),
            row_scale: at(&self.row_scales),
            stride: self.strides.0 as u64,
            scale_stride: self.strides.1 as u64,
            ..*args
        }
    }
}

/// Prepares matrices of one shape. Each is given by its parts, stacked by rows; where `gated`, the
/// first half of its rows is gate, the second up, and they lie in turns of eight.
pub(super) fn experts(
    card: &mut Card,
    form: Form,
    matrices: &[Vec<&Weight>],
    gated: bool,
) -> Stack {
    let rows = |parts: &Vec<&Weight>| parts.iter().map(|w| w.rows()).sum::<usize>();
    let first = matrices.first();
    let n = first.map_or(0, rows);
    let k = first.and_then(|m| m.first()).map_or(0, |w| w.cols());
    if form == Form::F32 {
        let tiles = card.upload(matrices.len() * n * k * 4, || {
            let parts = matrices.iter().flatten();
            parts
                .flat_map(|w| rows_as(form, w, 0, w.rows()).into_owned())
                .collect()
        });
        return Stack {
            form: WeightForm::Bf16,
            tiles,
            block_scales: None,
            row_scales: None,
            strides: (n * k * 4, 0),
        };
    }
    let all: Vec<&Weight> = matrices.iter().flatten().copied().collect();
    let form = packed_form(&all);
    let strides = form.packed_bytes(n, k);
    let tiles = card.zeros(matrices.len() * strides.0);
    let block_scales = (strides.1 > 0).then(|| card.zeros(matrices.len() * strides.1));
    if card.random {
        card.randomize(&tiles, matrices.len() * strides.0);
    }
    let mut scales = Vec::new();
    for (number, parts) in matrices.iter().enumerate() {
        let mut place = Place {
            form,
            tiles: tiles.at + (number * strides.0) as u64,
            block_scales: block_scales
                .as_ref()
                .map_or(0, |s| s.at + (number * strides.1) as u64),
            first: 0,
            interleave: 0,
        };
        let own: Vec<f32> = parts.iter().flat_map(|w| row_scales(form, w)).collect();
        scales.extend(if gated { in_turns(&own) } else { own });
        if !gated {
            for weight in parts {
                pack(card, weight, 0, weight.rows(), &place);
                place.first += weight.rows();
            }
            continue;
        }
        let halves = match parts.as_slice() {
            [gate, up] => [(*gate, 0), (*up, 0)],
            [both, ..] => [(*both, 0), (*both, n / 2)],
            [] => continue,
        };
        for ((weight, from), interleave) in halves.into_iter().zip([1, 2]) {
            pack(
                card,
                weight,
                from,
                n / 2,
                &Place {
                    interleave,
                    ..place
                },
            );
        }
    }
    Stack {
        form,
        tiles,
        block_scales,
        row_scales: (!scales.is_empty()).then(|| floats(card, &scales)),
        strides,
    }
}

/// Numbers of gate rows and of up rows behind them, in turns of eight.
fn in_turns(numbers: &[f32]) -> Vec<f32> {
    let (gate, up) = numbers.split_at(numbers.len() / 2);
    let turns = gate.chunks(8).zip(up.chunks(8));
    turns.flat_map(|(gate, up)| [gate, up].concat()).collect()
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
    let row = width * form.size();
    let memory = card.zeros(rows * row);
    if card.device().is_some() {
        let per_piece = (PIECE / row.max(1)).max(1);
        for begin in (0..rows).step_by(per_piece) {
            let count = per_piece.min(rows - begin);
            let bytes = rows_as(form, weight, begin, count);
            card.fill(memory.at + (begin * row) as u64, &bytes);
        }
    }
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

#[cfg(test)]
mod tests {
    use super::in_turns;

    #[test]
    fn gate_and_up_take_turns_of_eight() {
        let numbers: Vec<f32> = (0..32).map(|i| i as f32).collect();
        let turned = in_turns(&numbers);
        let expected = [0..8, 16..24, 8..16, 24..32].into_iter().flatten();
        assert!(turned.iter().zip(expected).all(|(a, b)| *a == b as f32));
        assert_eq!(turned.len(), 32);
    }
}
