//! Four-bit integer weights of compressed-tensors: `w = (code - 8) * scale`, a scale per group.

use super::{
    check_scales,
    codes::{element, nibble},
};
use crate::model::{checkpoint::Tensor, names::NameError};

/// Weights in int4, symmetric: rounded once to fp32.
#[derive(Clone, Debug)]
pub struct Int4 {
    codes: Tensor,
    scales: Tensor,
    cols: usize,
    group: usize,
}

impl Int4 {
    /// `codes` is `[rows, ceil(cols / 8)]` words of 32 bits, `scales` `[rows, ceil(cols / group)]`.
    pub(super) fn new(codes: Tensor, scales: Tensor, cols: usize, group: usize) -> Self {
        Self {
            codes,
            scales,
            cols,
            group,
        }
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.codes.shape()[0]
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Elements of a row that share a scale.
    pub fn group(&self) -> usize {
        self.group
    }

    /// Bytes of a row's codes.
    pub fn row_bytes(&self) -> usize {
        self.cols.div_ceil(8) * 4
    }

    /// Codes, `[rows, row_bytes]`: two a byte, the low four bits first; 8 stands for zero.
    pub fn codes(&self) -> &[u8] {
        self.codes.bytes()
    }

    /// Scales, `[rows, ceil(cols / group)]`, bf16, fp16 or fp32.
    pub fn scales(&self) -> &Tensor {
        &self.scales
    }

    /// The scale of columns `group * self.group() ..` of a row.
    pub fn scale_of(&self, row: usize, group: usize) -> f32 {
        element(&self.scales, row * self.cols.div_ceil(self.group) + group)
    }

    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.codes, &self.scales]
    }

    pub(super) fn read_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.row_bytes();
        let codes = &self.codes()[row * bytes..(row + 1) * bytes];
        for (i, out) in out[..self.cols].chunks_mut(self.group).enumerate() {
            let scale = self.scale_of(row, i);
            for (k, o) in out.iter_mut().enumerate() {
                let code = nibble(codes, i * self.group + k);
                *o = (f32::from(code) - 8.0) * scale;
            }
        }
    }

    pub(super) fn codes_tensor(&self) -> &Tensor {
        &self.codes
    }

    pub(super) fn check_scales(&self) -> Result<(), NameError> {
        check_scales(&self.scales, 8.0)
    }
}
