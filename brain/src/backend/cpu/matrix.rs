//! Weights where they are: rows of a mapped file, which products read in the form they are stored
//! in. Nothing is copied, so that a cold start waits for nothing but the disk.

use super::{decode, memory::Region};
use crate::model::{
    checkpoint::Dtype,
    weight::{Form, Fp8Scale, Nvfp4, Weight},
};

/// Inputs that share a scale, at most, where a row has several.
pub(super) const MOST_OF_GROUP: usize = 512;

/// Numbers of a row, without their scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Codes {
    Bf16,
    F16,
    F32,
    E4m3,
    E2m1,
    Int4,
}

impl Codes {
    /// Bytes of so many inputs.
    pub(super) fn bytes(self, inputs: usize) -> usize {
        match self {
            Codes::F32 => 4 * inputs,
            Codes::Bf16 | Codes::F16 => 2 * inputs,
            Codes::E4m3 => inputs,
            Codes::E2m1 | Codes::Int4 => inputs.div_ceil(2),
        }
    }
}

/// The order and form in which a part wants its inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrangement {
    /// bf16, one after the other.
    Pairs,
    /// bf16, as [`decode::dealt`] deals them out.
    Dealt,
    /// fp32, one after the other.
    Singles,
}

impl Arrangement {
    /// All of them.
    pub(super) const ALL: [Self; 3] =
        [Arrangement::Pairs, Arrangement::Dealt, Arrangement::Singles];
}

/// What multiplies an output at the end.
enum Ends {
    Same(f32),
    Rows(Vec<f32>),
}

/// Where the numbers are.
enum Place {
    Mapped(Box<Weight>),
    /// fp32, made of a form that products cannot read.
    Made(Region<f32>),
}

/// Rows that are stored in one form.
pub(super) struct Part {
    /// Which output its first row is.
    pub(super) first: usize,
    pub(super) outputs: usize,
    pub(super) inputs: usize,
    pub(super) codes: Codes,
    pub(super) arrangement: Arrangement,
    /// Inputs that share a scale, where a row has several; [`Part::scale`] has the scales.
    pub(super) group: Option<usize>,
    place: Place,
    /// Which row each output is, if not its own number.
    order: Option<Vec<u32>>,
    ends: Ends,
}

/// One matrix or several stacked, `[outputs, inputs]`.
pub(super) struct Matrix {
    outputs: usize,
    inputs: usize,
    parts: Vec<Part>,
}

impl Matrix {
    /// Matrices of the same input width, stacked. `bf16`: inputs are bf16 numbers.
    pub(super) fn new(parts: &[&Weight], bf16: bool) -> Self {
        let inputs = parts.first().map_or(0, |w| w.cols());
        let mut first = 0;
        let parts = parts.iter().map(|weight| {
            let part = Part::new(weight, None, bf16, first);
            first += part.outputs;
            part
        });
        let parts: Vec<Part> = parts.collect();
        Self {
            outputs: first_after(&parts),
            inputs,
            parts,
        }
    }

    /// Some rows of a matrix, in this order.
    pub(super) fn of_rows(weight: &Weight, order: &[u32], bf16: bool) -> Self {
        Self {
            outputs: order.len(),
            inputs: weight.cols(),
            parts: vec![Part::new(weight, Some(order.to_vec()), bf16, 0)],
        }
    }

    /// Rows.
    pub(super) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns.
    pub(super) fn inputs(&self) -> usize {
        self.inputs
    }

    /// Its rows by form, in order.
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Whether a part wants its inputs so.
    pub(super) fn wants(&self, arrangement: Arrangement) -> bool {
        self.parts.iter().any(|p| p.arrangement == arrangement)
    }
}

fn first_after(parts: &[Part]) -> usize {
    parts.last().map_or(0, |p| p.first + p.outputs)
}

impl Part {
    fn new(weight: &Weight, order: Option<Vec<u32>>, bf16: bool, first: usize) -> Self {
        let (codes, group) = match weight {
            Weight::Float(_) => match weight.form() {
                Form::Bf16 => (Codes::Bf16, None),
                Form::F16 => (Codes::F16, None),
                _ => (Codes::F32, None),
            },
            Weight::Fp8(w) => (Codes::E4m3, Some(w.group())),
            Weight::Nvfp4(_) => (Codes::E2m1, Some(Nvfp4::BLOCK)),
            Weight::Int4(w) => (Codes::Int4, Some(w.group())),
        };
        let inputs = weight.cols();
        let group = group.filter(|group| *group < inputs || codes == Codes::E2m1);
        let pairs = bf16 && !matches!(codes, Codes::F16 | Codes::F32);
        let arrangement = match (pairs, codes) {
            (false, _) => Arrangement::Singles,
            (true, Codes::E2m1) => Arrangement::Dealt,
            (true, _) => Arrangement::Pairs,
        };
        let outputs = order.as_ref().map_or(weight.rows(), Vec::len);
        let step = if arrangement == Arrangement::Pairs {
            32
        } else {
            16
        };
        let readable = group.is_none_or(|g| g.is_multiple_of(step) && g <= MOST_OF_GROUP);
        if !readable {
            return Self {
                first,
                outputs,
                inputs,
                codes: Codes::F32,
                arrangement: Arrangement::Singles,
                group: None,
                place: Place::Made(made(weight)),
                order,
                ends: Ends::Same(1.0),
            };
        }
        Self {
            first,
            outputs,
            inputs,
            codes,
            arrangement,
            group,
            place: Place::Mapped(Box::new(weight.clone())),
            order,
            ends: ends(weight, group),
        }
    }

    /// Which row output `i` is.
    #[inline(always)]
    fn row(&self, i: usize) -> usize {
        match &self.order {
            None => i,
            Some(order) => order[i] as usize,
        }
    }

    /// The bytes of output `i`'s row.
    #[inline(always)]
    pub(super) fn codes(&self, i: usize) -> &[u8] {
        let row = self.row(i);
        match &self.place {
            Place::Mapped(weight) => weight.row_bytes(row),
            Place::Made(numbers) => {
                let numbers = &numbers[row * self.inputs..(row + 1) * self.inputs];
                bytes_of(numbers)
            }
        }
    }

    /// What multiplies output `i` at the end.
    #[inline(always)]
    pub(super) fn end(&self, i: usize) -> f32 {
        match &self.ends {
            Ends::Same(scale) => *scale,
            Ends::Rows(scales) => scales[self.row(i)],
        }
    }

    /// The scale of group `group` of output `i`.
    #[inline(always)]
    pub(super) fn scale(&self, i: usize, group: usize) -> f32 {
        let row = self.row(i);
        let Place::Mapped(weight) = &self.place else {
            return 1.0;
        };
        match &**weight {
            Weight::Float(_) => 1.0,
            Weight::Fp8(w) => match w.scale() {
                Fp8Scale::Block(t) => {
                    let groups = self.inputs.div_ceil(w.group());
                    number(t.dtype(), t.bytes(), row / w.group() * groups + group)
                }
                Fp8Scale::Tensor(_) | Fp8Scale::Row(_) => 1.0,
            },
            Weight::Int4(w) => {
                let groups = self.inputs.div_ceil(w.group());
                let scales = w.scales();
                number(scales.dtype(), scales.bytes(), row * groups + group)
            }
            Weight::Nvfp4(w) => decode::e4m3(w.scales()[row * w.blocks() + group] & 0x7f),
        }
    }

    /// The scales of the blocks of output `i`, which is stored as NVFP4.
    #[inline(always)]
    pub(super) fn block_scales(&self, i: usize) -> &[u8] {
        let Place::Mapped(weight) = &self.place else {
            return &[];
        };
        let Weight::Nvfp4(w) = &**weight else {
            return &[];
        };
        let row = self.row(i);
        &w.scales()[row * w.blocks()..(row + 1) * w.blocks()]
    }
}

/// A bf16, fp16 or fp32 number of a file.
#[inline(always)]
fn number(dtype: Dtype, bytes: &[u8], i: usize) -> f32 {
    let half = || u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
    match dtype {
        Dtype::BF16 => f32::from_bits(u32::from(half()) << 16),
        Dtype::F16 => decode::fp16(half()),
        _ => {
            let at = 4 * i;
            f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        }
    }
}

/// The bytes of numbers, as a file has them.
#[allow(unsafe_code, reason = "numbers seen as bytes")]
fn bytes_of(numbers: &[f32]) -> &[u8] {
    // SAFETY: a number is plain bytes.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), size_of_val(numbers)) }
}

fn ends(weight: &Weight, group: Option<usize>) -> Ends {
    match weight {
        Weight::Float(_) => Ends::Same(1.0),
        Weight::Nvfp4(w) => Ends::Same(w.global()),
        Weight::Fp8(w) => match w.scale() {
            Fp8Scale::Tensor(_) => Ends::Same(w.scale_of(0, 0)),
            Fp8Scale::Row(_) => Ends::Rows((0..w.rows()).map(|r| w.scale_of(r, 0)).collect()),
            Fp8Scale::Block(_) if group.is_some() => Ends::Same(1.0),
            Fp8Scale::Block(_) => Ends::Rows((0..w.rows()).map(|r| w.scale_of(r, 0)).collect()),
        },
        Weight::Int4(_) if group.is_some() => Ends::Same(1.0),
        Weight::Int4(w) => Ends::Rows((0..w.rows()).map(|r| w.scale_of(r, 0)).collect()),
    }
}

/// The numbers themselves, rounded to fp32 as the form defines them.
fn made(weight: &Weight) -> Region<f32> {
    let cols = weight.cols();
    let mut numbers = Region::of_weights(weight.rows() * cols);
    for (i, row) in numbers.chunks_exact_mut(cols.max(1)).enumerate() {
        weight.read_row(i, row);
    }
    numbers
}
