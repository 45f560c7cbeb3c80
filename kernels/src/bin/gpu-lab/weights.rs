//! Matrices in checkpoint form, their values, and packing on the card.

use marathon_kernels::{
    abi::{DevicePtr, NVFP4_GAIN, PackArgs, WeightForm},
    device::{Buffer, Device, DeviceError, Grid},
};

use crate::data::{Rng, e2m1, e4m3, wide};

/// A matrix as a checkpoint stores it.
pub(crate) struct Matrix {
    pub(crate) form: WeightForm,
    pub(crate) n: usize,
    pub(crate) k: usize,
    codes: Vec<u8>,
    block_scales: Vec<u8>,
    row_scales: Vec<f32>,
}

impl Matrix {
    pub(crate) fn random(form: WeightForm, n: usize, k: usize, rng: &mut Rng) -> Self {
        let mut codes = Vec::new();
        let mut block_scales = Vec::new();
        match form {
            WeightForm::Bf16 => {
                codes = rng
                    .normals(n * k, 0.02)
                    .iter()
                    .flat_map(|x| x.to_le_bytes())
                    .collect();
            }
            WeightForm::Fp8 => {
                // Every code but the two NaNs, subnormals included.
                codes.extend((0..n * k).map(|_| {
                    loop {
                        let code = rng.word() as u8;
                        if code & 0x7f != 0x7f {
                            break code;
                        }
                    }
                }));
            }
            WeightForm::Nvfp4 => {
                codes.extend((0..n * k / 2).map(|_| rng.word() as u8));
                // Every positive scale, subnormals and zero included.
                block_scales.extend((0..n * k / 16).map(|_| rng.below(0x7f) as u8));
            }
        }
        let row_scales = match form {
            WeightForm::Bf16 => Vec::new(),
            WeightForm::Fp8 => (0..n).map(|_| (2e-4 * (0.5 + rng.unit())) as f32).collect(),
            WeightForm::Nvfp4 => (0..n).map(|_| (1e-4 * (0.5 + rng.unit())) as f32).collect(),
        };
        Self {
            form,
            n,
            k,
            codes,
            block_scales,
            row_scales,
        }
    }

    /// The values of a row, the row's own scale included.
    pub(crate) fn row(&self, n: usize) -> Vec<f64> {
        let scale = self.row_scales.get(n).map_or(1.0, |s| f64::from(*s));
        (0..self.k)
            .map(|k| {
                let at = n * self.k + k;
                scale
                    * match self.form {
                        WeightForm::Bf16 => wide(u16::from_le_bytes([
                            self.codes[2 * at],
                            self.codes[2 * at + 1],
                        ])),
                        WeightForm::Fp8 => e4m3(self.codes[at]),
                        WeightForm::Nvfp4 => {
                            let byte = self.codes[at / 2];
                            let code = if at.is_multiple_of(2) {
                                byte & 15
                            } else {
                                byte >> 4
                            };
                            e2m1(code) * e4m3(self.block_scales[at / 16])
                        }
                    }
            })
            .collect()
    }
}

/// A matrix on the card, packed.
pub(crate) struct Packed {
    pub(crate) weight: Buffer<u8>,
    block_scale: Option<Buffer<u8>>,
    row_scale: Option<Buffer<f32>>,
    n: usize,
}

/// Where a packed matrix lies.
#[derive(Clone, Copy)]
pub(crate) struct Operand {
    pub(crate) weight: DevicePtr,
    pub(crate) block_scale: DevicePtr,
    pub(crate) row_scale: DevicePtr,
    pub(crate) n: usize,
}

impl Packed {
    pub(crate) fn operand(&self, device: &Device) -> Operand {
        Operand {
            weight: device.address(&self.weight),
            block_scale: self.block_scale.as_ref().map_or(0, |b| device.address(b)),
            row_scale: self.row_scale.as_ref().map_or(0, |b| device.address(b)),
            n: self.n,
        }
    }
}

/// Packs matrices one below the other, or a gate and an up in turns of eight rows.
pub(crate) fn pack(
    device: &Device,
    parts: &[&Matrix],
    interleave: bool,
) -> Result<Packed, DeviceError> {
    let (form, k) = (parts[0].form, parts[0].k);
    let n: usize = parts.iter().map(|p| p.n).sum();
    let (codes, scales) = form.packed_bytes(n, k);
    let weight = device.zeros::<u8>(codes)?;
    let block_scale = match scales {
        0 => None,
        bytes => Some(device.zeros::<u8>(bytes)?),
    };
    let errors = device.zeros::<u32>(1)?;
    let mut row_scales = vec![0f32; n];
    let mut first = 0;
    for (i, part) in parts.iter().enumerate() {
        let source = device.upload(&part.codes)?;
        let source_scales = if part.block_scales.is_empty() {
            None
        } else {
            Some(device.upload(&part.block_scales)?)
        };
        let args = PackArgs {
            source: device.address(&source),
            scales: source_scales.as_ref().map_or(0, |s| device.address(s)),
            weight: device.address(&weight),
            block_scale: block_scale.as_ref().map_or(0, |s| device.address(s)),
            errors: device.address(&errors),
            n: part.n as u32,
            k: k as u32,
            first: if interleave { 0 } else { first as u32 },
            interleave: if interleave { i as u32 + 1 } else { 0 },
        };
        let grid = Grid {
            blocks: [1024, 1, 1],
            threads: 256,
            shared: 0,
        };
        // SAFETY: all buffers live until the wait below and have the sizes of `packed_bytes`.
        unsafe {
            device.launch(&format!("pack_{}", form.name()), grid, &args, false)?;
            if block_scale.is_some() {
                device.launch("pack_nvfp4_scales", grid, &args, false)?;
            }
        }
        device.wait()?;
        let gain = if form == WeightForm::Nvfp4 {
            NVFP4_GAIN
        } else {
            1.0
        };
        for (row, scale) in part.row_scales.iter().enumerate() {
            let to = if interleave {
                row / 8 * 16 + row % 8 + i * 8
            } else {
                first + row
            };
            row_scales[to] = scale * gain;
        }
        first += part.n;
    }
    let bad = device.download(&errors)?[0];
    assert_eq!(bad, 0, "valid codes were reported");
    let row_scale = if form == WeightForm::Bf16 {
        None
    } else {
        Some(device.upload(&row_scales)?)
    };
    Ok(Packed {
        weight,
        block_scale,
        row_scale,
        n,
    })
}
