//! Puts numbers into every stored form, as other programs' quantisers do, with what a reader must
//! make of them. Its own arithmetic, so that it can disagree with the one under test.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test binary uses its own part"
)]

use safetensors::Dtype;

/// A tensor as it goes into a file.
#[derive(Clone, Debug)]
pub struct Stored {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

/// A form in which a checkpoint may hold a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    Bf16,
    F16,
    F32,
    /// ModelOpt: `weight_scale_2` multiplies.
    Nvfp4,
    /// compressed-tensors: `weight_global_scale` divides.
    Nvfp4Packed,
    /// One scale, `[]`.
    Fp8Tensor,
    /// fp32 `[N]`.
    Fp8Row,
    /// bf16 `[N, 1]`.
    Fp8RowBf16,
    /// `[N / 128, K / 128]`.
    Fp8Block,
    /// `[N / 128, 1, K / 128, 1]`.
    Fp8Block4d,
    /// Named `weight_scale_inv`, and a multiplier all the same.
    Fp8BlockInv,
    /// bf16 scales per so many columns.
    Int4(usize),
}

/// All of them.
pub const ALL: [Written; 13] = [
    Written::Bf16,
    Written::F16,
    Written::F32,
    Written::Nvfp4,
    Written::Nvfp4Packed,
    Written::Fp8Tensor,
    Written::Fp8Row,
    Written::Fp8RowBf16,
    Written::Fp8Block,
    Written::Fp8Block4d,
    Written::Fp8BlockInv,
    Written::Int4(32),
    Written::Int4(128),
];

/// A matrix in a form: its tensors, and the numbers they stand for.
pub struct Matrix {
    pub tensors: Vec<Stored>,
    pub values: Vec<f32>,
}

pub fn bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}

fn e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match exponent {
        0 => mantissa / 8.0 * 2f32.powi(-6),
        e => (1.0 + mantissa / 8.0) * 2f32.powi(e - 7),
    };
    if code & 0x80 == 0 {
        magnitude
    } else {
        -magnitude
    }
}

fn nearest(x: f32, codes: std::ops::Range<u8>, value: impl Fn(u8) -> f32) -> u8 {
    let distance = |c: u8| (value(c) - x.abs()).abs();
    let best = codes.min_by(|a, b| {
        let even = |c: u8| c % 2;
        distance(*a)
            .total_cmp(&distance(*b))
            .then(even(*a).cmp(&even(*b)))
    });
    best.unwrap()
}

pub fn e4m3_code(x: f32) -> u8 {
    nearest(x, 0..0x7f, e4m3) | if x < 0.0 { 0x80 } else { 0 }
}

fn e2m1(code: u8) -> f32 {
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(code & 7)]
        * if code > 7 { -1.0 } else { 1.0 }
}

fn largest(values: impl IntoIterator<Item = f32>) -> f32 {
    values.into_iter().fold(1e-6, |a, b| a.max(b.abs()))
}

fn floats(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let bytes = |x: &f32| match dtype {
        Dtype::BF16 => half::bf16::from_f32(*x).to_le_bytes().to_vec(),
        Dtype::F16 => half::f16::from_f32(*x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

/// Two codes a byte, the first in the low half.
fn pack_nibbles(codes: &[u8]) -> Vec<u8> {
    codes
        .chunks(2)
        .map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 4))
        .collect()
}

/// Quantises `[rows, cols]` as module `base`.
pub fn quantise(base: &str, values: &[f32], rows: usize, cols: usize, form: Written) -> Matrix {
    let tensor = |what: &str, dtype, shape: &[usize], data: Vec<u8>| Stored {
        name: format!("{base}.{what}"),
        dtype,
        shape: shape.to_vec(),
        data,
    };
    let plain = |dtype, back: &dyn Fn(f32) -> f32| Matrix {
        tensors: vec![tensor(
            "weight",
            dtype,
            &[rows, cols],
            floats(dtype, values),
        )],
        values: values.iter().map(|x| back(*x)).collect(),
    };
    let at = |i: usize, k: usize| values[i * cols + k];
    match form {
        Written::Bf16 => plain(Dtype::BF16, &bf16),
        Written::F16 => plain(Dtype::F16, &|x| half::f16::from_f32(x).to_f32()),
        Written::F32 => plain(Dtype::F32, &|x| x),
        Written::Nvfp4 | Written::Nvfp4Packed => {
            let global = largest(values.iter().copied()) / (6.0 * 448.0);
            let divisor = 1.0 / global;
            let global = match form {
                Written::Nvfp4 => global,
                _ => 1.0 / divisor,
            };
            let (mut codes, mut scales, mut back) = (Vec::new(), Vec::new(), Vec::new());
            for row in values.chunks(cols) {
                let mut row_codes = Vec::new();
                for block in row.chunks(16) {
                    let scale = e4m3_code(largest(block.iter().copied()) / 6.0 / global).max(1);
                    scales.push(scale);
                    for x in block {
                        let scaled = x / (e4m3(scale) * global);
                        let sign = if scaled < 0.0 { 8 } else { 0 };
                        let code = nearest(scaled, 0..8, e2m1) | sign;
                        row_codes.push(code);
                        back.push(e2m1(code) * e4m3(scale) * global);
                    }
                }
                codes.extend(pack_nibbles(&row_codes));
            }
            let (name, second, number) = match form {
                Written::Nvfp4 => (
                    "weight",
                    "weight_scale_2",
                    tensor(
                        "weight_scale_2",
                        Dtype::F32,
                        &[],
                        floats(Dtype::F32, &[global]),
                    ),
                ),
                _ => (
                    "weight_packed",
                    "weight_global_scale",
                    tensor(
                        "weight_global_scale",
                        Dtype::F32,
                        &[1],
                        floats(Dtype::F32, &[divisor]),
                    ),
                ),
            };
            let input = match second {
                "weight_scale_2" => {
                    tensor("input_scale", Dtype::F32, &[], floats(Dtype::F32, &[0.01]))
                }
                _ => tensor(
                    "input_global_scale",
                    Dtype::F32,
                    &[1],
                    floats(Dtype::F32, &[100.0]),
                ),
            };
            Matrix {
                tensors: vec![
                    tensor(name, Dtype::U8, &[rows, cols / 2], codes),
                    tensor(
                        "weight_scale",
                        Dtype::F8_E4M3,
                        &[rows, cols.div_ceil(16)],
                        scales,
                    ),
                    number,
                    input,
                ],
                values: back,
            }
        }
        Written::Fp8Tensor
        | Written::Fp8Row
        | Written::Fp8RowBf16
        | Written::Fp8Block
        | Written::Fp8Block4d
        | Written::Fp8BlockInv => {
            let (tall, wide) = match form {
                Written::Fp8Tensor => (rows, cols),
                Written::Fp8Row | Written::Fp8RowBf16 => (1, cols),
                _ => (128, 128),
            };
            let grid = (rows.div_ceil(tall), cols.div_ceil(wide));
            let mut scales = Vec::new();
            for i in 0..grid.0 {
                for k in 0..grid.1 {
                    let inside = (i * tall..rows.min((i + 1) * tall))
                        .flat_map(|r| (k * wide..cols.min((k + 1) * wide)).map(move |c| (r, c)));
                    scales.push(bf16(largest(inside.map(|(r, c)| at(r, c))) / 448.0));
                }
            }
            let scale = |i: usize, k: usize| scales[i / tall * grid.1 + k / wide];
            let (mut codes, mut back) = (Vec::new(), Vec::new());
            for i in 0..rows {
                for k in 0..cols {
                    let code = e4m3_code(at(i, k) / scale(i, k));
                    codes.push(code);
                    back.push(e4m3(code) * scale(i, k));
                }
            }
            let (name, dtype, shape) = match form {
                Written::Fp8Tensor => ("weight_scale", Dtype::F32, vec![]),
                Written::Fp8Row => ("weight_scale", Dtype::F32, vec![rows]),
                Written::Fp8RowBf16 => ("weight_scale", Dtype::BF16, vec![rows, 1]),
                Written::Fp8Block => ("weight_scale", Dtype::F32, vec![grid.0, grid.1]),
                Written::Fp8Block4d => ("weight_scale", Dtype::F32, vec![grid.0, 1, grid.1, 1]),
                _ => ("weight_scale_inv", Dtype::BF16, vec![grid.0, grid.1]),
            };
            Matrix {
                tensors: vec![
                    tensor("weight", Dtype::F8_E4M3, &[rows, cols], codes),
                    tensor(name, dtype, &shape, floats(dtype, &scales)),
                ],
                values: back,
            }
        }
        Written::Int4(group) => {
            let groups = cols.div_ceil(group);
            let (mut words, mut scales, mut back) = (Vec::new(), Vec::new(), Vec::new());
            for row in values.chunks(cols) {
                let mut codes = Vec::new();
                for part in row.chunks(group) {
                    let scale = bf16(largest(part.iter().copied()) / 7.5);
                    scales.push(scale);
                    for x in part {
                        let code = (x / scale).round_ties_even().clamp(-8.0, 7.0);
                        codes.push((code + 8.0) as u8);
                        back.push(f32::from(code as i8) * scale);
                    }
                }
                codes.resize(cols.next_multiple_of(8), 0);
                words.extend(pack_nibbles(&codes));
            }
            let shape = [rows as i64, cols as i64]
                .iter()
                .flat_map(|n| n.to_le_bytes())
                .collect();
            Matrix {
                tensors: vec![
                    tensor(
                        "weight_packed",
                        Dtype::I32,
                        &[rows, cols.div_ceil(8)],
                        words,
                    ),
                    tensor(
                        "weight_scale",
                        Dtype::BF16,
                        &[rows, groups],
                        floats(Dtype::BF16, &scales),
                    ),
                    tensor("weight_shape", Dtype::I64, &[2], shape),
                ],
                values: back,
            }
        }
    }
}

/// A whole safetensors file.
pub fn file(tensors: &[Stored]) -> Vec<u8> {
    let views = tensors.iter().map(|t| {
        let view = safetensors::tensor::TensorView::new(t.dtype, t.shape.clone(), &t.data);
        (t.name.as_str(), view.unwrap())
    });
    safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap()
}
