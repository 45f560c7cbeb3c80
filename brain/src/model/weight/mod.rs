//! A matrix or vector in the form it is stored in: the one place where formats meet.
//!
//! Every form defines its numbers exactly ([`Weight::read_row`]) and hands out what it is made of
//! (codes, scales, a global factor), so that a back end packs it without a detour through fp32.
//! Scales of activations, which some files carry, are not part of a weight: activations are never
//! quantised here, whatever recipe the file was made for.

pub mod codes;
mod find;
mod fp8;
mod int4;
mod nvfp4;

use std::fmt;

pub use fp8::{Fp8, Fp8Scale};
pub use int4::Int4;
pub use nvfp4::Nvfp4;

pub(crate) use find::{experts, linear, plain};

use super::{
    checkpoint::{Dtype, Tensor},
    names::NameError,
};

/// A matrix `[rows, cols]`, or a vector of `rows` elements.
#[derive(Clone, Debug)]
pub enum Weight {
    /// Plain numbers: bf16, fp16 or fp32.
    Float(Tensor),
    /// E4M3 codes with scales per tensor, row or block.
    Fp8(Fp8),
    /// E2M1 codes with an E4M3 scale per 16 and one factor.
    Nvfp4(Nvfp4),
    /// Four-bit integers with a scale per group.
    Int4(Int4),
}

/// How the numbers of a weight are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Form {
    /// bfloat16
    Bf16,
    /// IEEE half precision
    F16,
    /// IEEE single precision
    F32,
    /// E4M3, one scale
    Fp8Tensor,
    /// E4M3, a scale per row
    Fp8Row,
    /// E4M3, a scale per block of 128 by 128
    Fp8Block,
    /// E2M1, an E4M3 scale per 16, one factor
    Nvfp4,
    /// Four-bit integers, a scale per so many of a row
    Int4 {
        /// Elements that share a scale.
        group: usize,
    },
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Form::Bf16 => f.write_str("bf16"),
            Form::F16 => f.write_str("fp16"),
            Form::F32 => f.write_str("fp32"),
            Form::Fp8Tensor => f.write_str("fp8-tensor"),
            Form::Fp8Row => f.write_str("fp8-row"),
            Form::Fp8Block => f.write_str("fp8-block"),
            Form::Nvfp4 => f.write_str("nvfp4"),
            Form::Int4 { group } => write!(f, "int4-g{group}"),
        }
    }
}

impl Weight {
    /// Rows (outputs) of a matrix; the length of a vector.
    pub fn rows(&self) -> usize {
        match self {
            Weight::Float(t) => t.shape()[0],
            Weight::Fp8(w) => w.rows(),
            Weight::Nvfp4(w) => w.rows(),
            Weight::Int4(w) => w.rows(),
        }
    }

    /// Elements of a row; 1 for a vector.
    pub fn cols(&self) -> usize {
        match self {
            Weight::Float(t) => t.shape()[1..].iter().product(),
            Weight::Fp8(w) => w.cols(),
            Weight::Nvfp4(w) => w.cols(),
            Weight::Int4(w) => w.cols(),
        }
    }

    /// How it is stored.
    pub fn form(&self) -> Form {
        match self {
            Weight::Float(t) => match t.dtype() {
                Dtype::BF16 => Form::Bf16,
                Dtype::F16 => Form::F16,
                _ => Form::F32,
            },
            Weight::Fp8(w) => match w.scale() {
                Fp8Scale::Tensor(_) => Form::Fp8Tensor,
                Fp8Scale::Row(_) => Form::Fp8Row,
                Fp8Scale::Block(_) => Form::Fp8Block,
            },
            Weight::Nvfp4(_) => Form::Nvfp4,
            Weight::Int4(w) => Form::Int4 { group: w.group() },
        }
    }

    /// The precision a model with such a table computes in: the stored one of plain numbers, bf16
    /// of quantised ones.
    pub fn dtype(&self) -> Dtype {
        match self {
            Weight::Float(t) => t.dtype(),
            _ => Dtype::BF16,
        }
    }

    /// The tensors behind it.
    pub fn tensors(&self) -> Vec<&Tensor> {
        match self {
            Weight::Float(t) => vec![t],
            Weight::Fp8(w) => w.tensors(),
            Weight::Nvfp4(w) => w.tensors(),
            Weight::Int4(w) => w.tensors(),
        }
    }

    /// Bytes that it takes in its file.
    pub fn stored_bytes(&self) -> usize {
        self.tensors().iter().map(|t| t.bytes().len()).sum()
    }

    /// Writes row `row` as fp32, as the form defines it.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        match self {
            Weight::Float(t) => {
                let size = self.cols() * t.dtype().bitsize() / 8;
                codes::expand(t.dtype(), &t.bytes()[row * size..(row + 1) * size], out);
            }
            Weight::Fp8(w) => w.read_row(row, out),
            Weight::Nvfp4(w) => w.read_row(row, out),
            Weight::Int4(w) => w.read_row(row, out),
        }
    }

    /// Every element as fp32.
    pub fn to_vec(&self) -> Vec<f32> {
        let cols = self.cols();
        let mut out = vec![0.0; self.rows() * cols];
        for (i, row) in out.chunks_exact_mut(cols.max(1)).enumerate() {
            self.read_row(i, row);
        }
        out
    }

    /// Reads every scale: an error where one is not a positive finite number.
    pub fn check_scales(&self) -> Result<(), NameError> {
        match self {
            Weight::Float(_) => Ok(()),
            Weight::Fp8(w) => w.check_scales(),
            Weight::Nvfp4(w) => w.check_scales(),
            Weight::Int4(w) => w.check_scales(),
        }
    }

    /// The numbers or codes of a form that can say what is no finite number: there must be none
    /// of those.
    pub fn fallible(&self) -> Option<&Tensor> {
        match self {
            Weight::Float(t) => Some(t),
            Weight::Fp8(w) => Some(w.codes_tensor()),
            Weight::Nvfp4(_) | Weight::Int4(_) => None,
        }
    }

    /// Reads every scale, and every number or code that could be wrong.
    pub fn check_values(&self) -> Result<(), NameError> {
        self.check_scales()?;
        self.fallible().map_or(Ok(()), check_finite)
    }

    /// Numbers or codes, without scales, row by row.
    fn codes_tensor(&self) -> &Tensor {
        match self {
            Weight::Float(t) => t,
            Weight::Fp8(w) => w.codes_tensor(),
            Weight::Nvfp4(w) => w.codes_tensor(),
            Weight::Int4(w) => w.codes_tensor(),
        }
    }

    /// Bytes of the numbers or codes of a row.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let bytes = self.codes_tensor().bytes();
        let length = bytes.len() / self.rows().max(1);
        &bytes[row * length..(row + 1) * length]
    }

    /// Gives the memory of its mapped files back to the system: a later read fetches it again.
    pub fn release(&self) {
        self.tensors().into_iter().for_each(Tensor::release);
    }
}

/// A scale that no quantiser writes.
fn bad_scale(tensor: &Tensor, i: usize, value: f32) -> NameError {
    NameError::value(
        tensor,
        format!("scale {i} is {value}, not a positive finite number; fetch the file again"),
    )
}

/// An error unless a scale is a positive number and times the largest code a finite one.
fn check_scale(tensor: &Tensor, i: usize, value: f32, largest: f32) -> Result<(), NameError> {
    if !(value > 0.0 && value.is_finite()) {
        return Err(bad_scale(tensor, i, value));
    }
    if !(value * largest).is_finite() {
        let problem = format!(
            "scale {i} is {value}, with which large codes are no finite numbers; fetch the file again"
        );
        return Err(NameError::value(tensor, problem));
    }
    Ok(())
}

/// Looks at every plain number or E4M3 code.
fn check_finite(tensor: &Tensor) -> Result<(), NameError> {
    match codes::first_not_finite(tensor.dtype(), tensor.bytes()) {
        None => Ok(()),
        Some(i) => Err(not_finite(tensor, i)),
    }
}

/// An element that no training ends in and no quantiser writes.
pub(super) fn not_finite(tensor: &Tensor, element: usize) -> NameError {
    let value = codes::element(tensor, element);
    let problem =
        format!("element {element} is {value}, not a finite number; fetch the file again");
    NameError::value(tensor, problem)
}

/// Checks a tensor of bf16, fp16 or fp32 scales of codes up to `largest`.
fn check_scales(tensor: &Tensor, largest: f32) -> Result<(), NameError> {
    let size = tensor.dtype().bitsize() / 8;
    (0..tensor.bytes().len() / size)
        .try_for_each(|i| check_scale(tensor, i, codes::element(tensor, i), largest))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
