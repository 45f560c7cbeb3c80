//! FP8 weights: E4M3 codes times a scale of the tensor, of the row, or of a block of 128 by 128.

use super::{
    check_scales,
    codes::{E4M3, E4M3_MAX, element},
};
use crate::model::{checkpoint::Tensor, names::NameError};

/// Rows and columns of a block.
pub(super) const BLOCK: usize = 128;

/// What multiplies the codes; fp32, bf16 or fp16 in the file.
#[derive(Clone, Debug)]
pub enum Fp8Scale {
    /// One number.
    Tensor(Tensor),
    /// One per row.
    Row(Tensor),
    /// One per block of 128 rows and 128 columns, row-major, the last ones perhaps short.
    Block(Tensor),
}

/// Weights in FP8: `w = code * scale`, rounded once to fp32.
#[derive(Clone, Debug)]
pub struct Fp8 {
    codes: Tensor,
    scale: Fp8Scale,
}

impl Fp8 {
    /// `codes` is `[rows, cols]`; the scale's shape has been checked against it.
    pub(in crate::model) fn new(codes: Tensor, scale: Fp8Scale) -> Self {
        Self { codes, scale }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.codes.shape()[0]
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.codes.shape()[1]
    }

    /// E4M3 codes, `[rows, cols]`.
    pub fn codes(&self) -> &[u8] {
        self.codes.bytes()
    }

    /// What multiplies them.
    pub fn scale(&self) -> &Fp8Scale {
        &self.scale
    }

    /// Columns that share a scale within a row.
    pub fn group(&self) -> usize {
        match self.scale {
            Fp8Scale::Block(_) => BLOCK,
            _ => self.cols(),
        }
    }

    /// The scale of columns `group * self.group() ..` of a row.
    pub fn scale_of(&self, row: usize, group: usize) -> f32 {
        match &self.scale {
            Fp8Scale::Tensor(t) => element(t, 0),
            Fp8Scale::Row(t) => element(t, row),
            Fp8Scale::Block(t) => element(t, row / BLOCK * self.cols().div_ceil(BLOCK) + group),
        }
    }

    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.codes, self.scale_tensor()]
    }

    fn scale_tensor(&self) -> &Tensor {
        match &self.scale {
            Fp8Scale::Tensor(t) | Fp8Scale::Row(t) | Fp8Scale::Block(t) => t,
        }
    }

    pub(super) fn read_row(&self, row: usize, out: &mut [f32]) {
        let (cols, group) = (self.cols(), self.group());
        let codes = &self.codes()[row * cols..(row + 1) * cols];
        let groups = codes.chunks(group).zip(out.chunks_mut(group));
        for (i, (codes, out)) in groups.enumerate() {
            let scale = self.scale_of(row, i);
            for (o, code) in out.iter_mut().zip(codes) {
                *o = E4M3[usize::from(*code)] * scale;
            }
        }
    }

    pub(super) fn codes_tensor(&self) -> &Tensor {
        &self.codes
    }

    pub(super) fn check_scales(&self) -> Result<(), NameError> {
        check_scales(self.scale_tensor(), E4M3_MAX)
    }
}
