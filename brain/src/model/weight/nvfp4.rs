//! NVFP4 weights: E2M1 codes, an E4M3 scale per 16 of a row, one fp32 factor for the matrix.

use super::{
    bad_scale, check_scale,
    codes::{E2M1, E4M3, E4M3_MAX, element, nibble},
};
use crate::model::{checkpoint::Tensor, names::NameError};

/// The largest code.
const E2M1_MAX: f32 = 6.0;

/// Weights in NVFP4: `w = (code * scale) * global`. The product of code and scale is exact in bf16
/// already; the one with the global factor is rounded once to fp32.
#[derive(Clone, Debug)]
pub struct Nvfp4 {
    codes: Tensor,
    scales: Tensor,
    global: Global,
    cols: usize,
}

/// The factor of a matrix, as the file has it.
#[derive(Clone, Debug)]
pub(super) enum Global {
    /// ModelOpt's `weight_scale_2`.
    Multiplier(Tensor),
    /// compressed-tensors' `weight_global_scale`: its reciprocal multiplies.
    Divisor(Tensor),
}

impl Global {
    pub(super) fn tensor(&self) -> &Tensor {
        match self {
            Global::Multiplier(t) | Global::Divisor(t) => t,
        }
    }
}

impl Nvfp4 {
    /// Elements that share a scale.
    pub const BLOCK: usize = 16;

    /// `codes` is `[rows, cols / 2]`, `scales` `[rows, cols / 16]`, the last block perhaps short.
    pub(super) fn new(codes: Tensor, scales: Tensor, global: Global, cols: usize) -> Self {
        Self {
            codes,
            scales,
            global,
            cols,
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

    /// E2M1 codes, `[rows, cols / 2]` bytes of two, the low four bits first.
    pub fn codes(&self) -> &[u8] {
        self.codes.bytes()
    }

    /// E4M3 scales, `[rows, blocks of 16]`.
    pub fn scales(&self) -> &[u8] {
        self.scales.bytes()
    }

    /// Blocks of a row.
    pub fn blocks(&self) -> usize {
        self.cols.div_ceil(Self::BLOCK)
    }

    /// What multiplies the whole matrix.
    pub fn global(&self) -> f32 {
        match &self.global {
            Global::Multiplier(t) => element(t, 0),
            Global::Divisor(t) => 1.0 / element(t, 0),
        }
    }

    pub(super) fn tensors(&self) -> Vec<&Tensor> {
        vec![&self.codes, &self.scales, self.global.tensor()]
    }

    pub(super) fn read_row(&self, row: usize, out: &mut [f32]) {
        let (bytes, blocks) = (self.cols / 2, self.blocks());
        let codes = &self.codes()[row * bytes..(row + 1) * bytes];
        let scales = &self.scales()[row * blocks..(row + 1) * blocks];
        let global = self.global();
        for (k, o) in out.iter_mut().take(self.cols).enumerate() {
            let scale = E4M3[usize::from(scales[k / Self::BLOCK])];
            *o = E2M1[usize::from(nibble(codes, k))] * scale * global;
        }
    }

    pub(super) fn codes_tensor(&self) -> &Tensor {
        &self.codes
    }

    pub(super) fn check_scales(&self) -> Result<(), NameError> {
        let global = self.global.tensor();
        // Its reciprocal has to be finite too.
        let value = element(global, 0);
        if !(value > 0.0 && value.is_finite() && (1.0 / value).is_finite()) {
            return Err(bad_scale(global, 0, value));
        }
        let factor = match self.global {
            Global::Multiplier(_) => value,
            Global::Divisor(_) => 1.0 / value,
        };
        check_scale(global, 0, factor, E4M3_MAX * E2M1_MAX)?;
        // A block too small for E4M3 has the scale 0; a file full of them is a hole.
        let bad = |code: &u8| *code & 0x80 != 0 && *code != 0x80 || *code & 0x7f == 0x7f;
        if let Some(i) = self.scales().iter().position(bad) {
            let value = E4M3[usize::from(self.scales()[i])];
            return Err(bad_scale(&self.scales, i, value));
        }
        if self.scales().iter().all(|code| code & 0x7f == 0) {
            return Err(bad_scale(&self.scales, 0, 0.0));
        }
        Ok(())
    }
}
