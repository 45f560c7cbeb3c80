//! Finds the tensors of a matrix and tells by what the file holds which form they are.

use super::{Fp8, Fp8Scale, Int4, Nvfp4, Weight, fp8::BLOCK, nvfp4::Global};
use crate::model::{
    checkpoint::{Dtype, Tensor},
    names::{NameError, Unused},
    plan::Moe,
    weights::ExpertWeights,
};

/// Group sizes of four-bit integers, likeliest first.
const GROUPS: [usize; 4] = [32, 128, 64, 16];

/// A tensor of plain numbers of this very shape.
pub(crate) fn plain(unused: &mut Unused, name: &str, shape: &[usize]) -> Result<Weight, NameError> {
    let tensor = unused.take(name, shape)?;
    if !is_plain(tensor.dtype()) {
        return Err(NameError::dtype(&tensor, "bf16, fp16 or fp32"));
    }
    Ok(Weight::Float(tensor))
}

/// The matrix `[rows, cols]` of module `base`, in whatever form it is stored.
pub(crate) fn linear(
    unused: &mut Unused,
    base: &str,
    [rows, cols]: [usize; 2],
) -> Result<Weight, NameError> {
    Parts::take(unused, Spelling::Module(base))?.assemble(rows, cols)
}

/// All experts of a layer, stored one by one (`base.7.gate_proj.weight`) or as stacks
/// (`base.gate_up_proj`).
pub(crate) fn experts(
    unused: &mut Unused,
    base: &str,
    moe: &Moe,
    hidden: usize,
) -> Result<Vec<ExpertWeights>, NameError> {
    let wide = moe.intermediate;
    if unused.has_prefix(&format!("{base}.0.")) {
        return (0..moe.experts)
            .map(|e| {
                let mut part =
                    |name: &str, shape| linear(unused, &format!("{base}.{e}.{name}"), shape);
                let gate = part("gate_proj", [wide, hidden])?;
                let up = part("up_proj", [wide, hidden])?;
                let down = part("down_proj", [hidden, wide])?;
                Ok(ExpertWeights {
                    gate_up: vec![gate, up],
                    down,
                })
            })
            .collect();
    }
    let mut stack = |name: &str, rows, cols| {
        Parts::take(unused, Spelling::Stack(&format!("{base}.{name}")))?
            .split(moe.experts)?
            .into_iter()
            .map(|parts| parts.assemble(rows, cols))
            .collect::<Result<Vec<_>, _>>()
    };
    let gate_up = stack("gate_up_proj", 2 * wide, hidden)?;
    let down = stack("down_proj", hidden, wide)?;
    Ok(gate_up
        .into_iter()
        .zip(down)
        .map(|(gate_up, down)| ExpertWeights {
            gate_up: vec![gate_up],
            down,
        })
        .collect())
}

fn is_plain(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32)
}

/// How a matrix' tensors are called.
#[derive(Clone, Copy)]
enum Spelling<'a> {
    /// `base.weight`, `base.weight_scale` …
    Module(&'a str),
    /// A parameter of its own name: `base`, or `base.weight`; scales `base_scale`,
    /// `base_weight_scale` or `base.weight_scale` …
    Stack(&'a str),
}

impl Spelling<'_> {
    fn take(self, unused: &mut Unused, what: &str) -> Option<Tensor> {
        let names = match self {
            Spelling::Module(base) => vec![format!("{base}.{what}")],
            Spelling::Stack(base) => {
                let short = what.strip_prefix("weight").unwrap_or(what);
                let separator = if short.is_empty() || short.starts_with('_') {
                    ""
                } else {
                    "_"
                };
                vec![
                    format!("{base}.{what}"),
                    format!("{base}_{what}"),
                    format!("{base}{separator}{short}"),
                ]
            }
        };
        names.iter().find_map(|name| unused.take_any(name))
    }

    /// What an error calls the matrix.
    fn name(self) -> String {
        match self {
            Spelling::Module(base) => format!("{base}.weight"),
            Spelling::Stack(base) => base.to_owned(),
        }
    }
}

/// The tensors of one matrix, or of a stack of them, before their shapes are checked.
struct Parts {
    weight: Tensor,
    scale: Option<Tensor>,
    global: Option<Global>,
    shape: Option<Tensor>,
}

impl Parts {
    fn take(unused: &mut Unused, spelling: Spelling<'_>) -> Result<Self, NameError> {
        let mut find = |what| spelling.take(unused, what);
        let weight = find("weight")
            .or_else(|| find("weight_packed"))
            .ok_or_else(|| NameError::Missing(spelling.name()))?;
        if is_plain(weight.dtype()) {
            return Ok(Self {
                weight,
                scale: None,
                global: None,
                shape: None,
            });
        }
        let scale = find("weight_scale").or_else(|| find("weight_scale_inv"));
        let global = find("weight_scale_2")
            .map(Global::Multiplier)
            .or_else(|| find("weight_global_scale").map(Global::Divisor));
        let shape = find("weight_shape");
        // Scales of activations: used up, and of no use, as activations are not quantised.
        let _ = (find("input_scale"), find("input_global_scale"));
        Ok(Self {
            weight,
            scale,
            global,
            shape,
        })
    }

    /// The matrices of a stack `[count, …]`. A scale may be one for all of them.
    fn split(self, count: usize) -> Result<Vec<Self>, NameError> {
        let leading = |t: &Tensor| t.shape().first() == Some(&count);
        if !leading(&self.weight) {
            let mut expected = self.weight.shape().to_vec();
            expected.splice(..expected.len().min(1), [count]);
            return Err(NameError::shape(&self.weight, expected));
        }
        let part = |t: &Tensor, e: usize| match leading(t) {
            true => t.part(e),
            false => t.clone(),
        };
        Ok((0..count)
            .map(|e| Self {
                weight: self.weight.part(e),
                scale: self.scale.as_ref().map(|t| part(t, e)),
                global: self.global.as_ref().map(|g| match g {
                    Global::Multiplier(t) => Global::Multiplier(part(t, e)),
                    Global::Divisor(t) => Global::Divisor(part(t, e)),
                }),
                shape: self.shape.clone(),
            })
            .collect())
    }

    fn assemble(self, rows: usize, cols: usize) -> Result<Weight, NameError> {
        match self.weight.dtype() {
            dtype if is_plain(dtype) => {
                expect(&self.weight, &[rows, cols])?;
                Ok(Weight::Float(self.weight))
            }
            Dtype::F8_E4M3 => self.fp8(rows, cols),
            Dtype::U8 => self.nvfp4(rows, cols),
            Dtype::I32 => self.int4(rows, cols),
            _ => Err(NameError::dtype(
                &self.weight,
                "bf16, fp16, fp32, E4M3, NVFP4 or packed int4",
            )),
        }
    }

    fn scale(&mut self) -> Result<Tensor, NameError> {
        self.scale.take().ok_or_else(|| {
            NameError::value(&self.weight, "it is quantised and has no weight_scale")
        })
    }

    fn fp8(mut self, rows: usize, cols: usize) -> Result<Weight, NameError> {
        expect(&self.weight, &[rows, cols])?;
        let scale = self.scale()?;
        if let Some(global) = &self.global {
            return Err(NameError::value(
                global.tensor(),
                "FP8 weights have no second scale",
            ));
        }
        plain_scale(&scale)?;
        let (tall, wide) = (rows.div_ceil(BLOCK), cols.div_ceil(BLOCK));
        let shape = scale.shape();
        let scale = if shape.iter().all(|n| *n == 1) {
            Fp8Scale::Tensor(scale)
        } else if shape == [rows] || shape == [rows, 1] {
            Fp8Scale::Row(scale)
        } else if shape == [tall, wide] || shape == [tall, 1, wide, 1] {
            Fp8Scale::Block(scale)
        } else {
            return Err(NameError::value(
                &scale,
                format!(
                    "its shape {shape:?} is neither one scale, nor [{rows}] or [{rows}, 1] \
                     for rows, nor [{tall}, {wide}] for blocks of {BLOCK}"
                ),
            ));
        };
        Ok(Weight::Fp8(Fp8::new(self.weight, scale)))
    }

    fn nvfp4(mut self, rows: usize, cols: usize) -> Result<Weight, NameError> {
        if !cols.is_multiple_of(2) {
            return Err(NameError::value(
                &self.weight,
                format!("{cols} columns cannot be two to a byte"),
            ));
        }
        expect(&self.weight, &[rows, cols / 2])?;
        let scale = self.scale()?;
        if scale.dtype() != Dtype::F8_E4M3 {
            return Err(NameError::dtype(
                &scale,
                "E4M3 scales per 16 weights (NVFP4)",
            ));
        }
        expect(&scale, &[rows, cols.div_ceil(Nvfp4::BLOCK)])?;
        let Some(global) = self.global else {
            return Err(NameError::value(
                &self.weight,
                "NVFP4 needs weight_scale_2 or weight_global_scale",
            ));
        };
        let tensor = global.tensor();
        if tensor.dtype() != Dtype::F32 {
            return Err(NameError::dtype(tensor, "one fp32 number"));
        }
        if tensor.shape().iter().any(|n| *n != 1) {
            return Err(NameError::shape(tensor, vec![1]));
        }
        Ok(Weight::Nvfp4(Nvfp4::new(self.weight, scale, global, cols)))
    }

    fn int4(mut self, rows: usize, cols: usize) -> Result<Weight, NameError> {
        expect(&self.weight, &[rows, cols.div_ceil(8)])?;
        if let Some(shape) = &self.shape {
            stated_shape(shape, [rows, cols])?;
        }
        let scale = self.scale()?;
        plain_scale(&scale)?;
        let groups = match *scale.shape() {
            [n] if n == rows => 1,
            [n, groups] if n == rows && groups > 0 => groups,
            _ => {
                return Err(NameError::shape(
                    &scale,
                    vec![rows, cols.div_ceil(GROUPS[0])],
                ));
            }
        };
        let whole = cols / groups;
        let group = GROUPS
            .into_iter()
            .find(|size| cols.div_ceil(*size) == groups)
            .or_else(|| (whole * groups == cols && whole.is_multiple_of(2)).then_some(whole))
            // One scale a row, whose length may be odd.
            .or_else(|| (groups == 1).then_some(cols.next_multiple_of(2)));
        match group {
            Some(group) => Ok(Weight::Int4(Int4::new(self.weight, scale, cols, group))),
            None => Err(NameError::value(
                &scale,
                format!("{groups} scales do not divide {cols} columns into groups"),
            )),
        }
    }
}

fn expect(tensor: &Tensor, shape: &[usize]) -> Result<(), NameError> {
    if tensor.shape() == shape {
        return Ok(());
    }
    Err(NameError::shape(tensor, shape.to_vec()))
}

fn plain_scale(scale: &Tensor) -> Result<(), NameError> {
    if is_plain(scale.dtype()) {
        return Ok(());
    }
    Err(NameError::dtype(scale, "scales in fp32, bf16 or fp16"))
}

/// Checks the `[rows, cols]` that packed integers carry beside them.
fn stated_shape(tensor: &Tensor, expected: [usize; 2]) -> Result<(), NameError> {
    let size = match tensor.dtype() {
        Dtype::I64 => 8,
        Dtype::I32 => 4,
        _ => return Err(NameError::dtype(tensor, "int64 or int32")),
    };
    expect(tensor, &[2])?;
    let stated: Vec<u64> = tensor
        .bytes()
        .chunks_exact(size)
        .map(|b| b.iter().rev().fold(0, |n, byte| n << 8 | u64::from(*byte)))
        .collect();
    if stated == expected.map(|n| n as u64) {
        return Ok(());
    }
    Err(NameError::value(
        tensor,
        format!("it says {stated:?} where config.json asks for {expected:?}"),
    ))
}
