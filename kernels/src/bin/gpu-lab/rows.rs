//! Norms over rows, element-wise kernels, reads by token.

use marathon_kernels::{
    abi::{NormArgs, RowsArgs, WeightForm},
    device::{Device, DeviceError, Grid},
};

use crate::{
    data::{Rng, Score, round, ulp, wide},
    report::Report,
    weights::{Matrix, pack},
};

const EPS: f64 = 1e-6;
const ROWS: usize = 6;

pub(crate) fn check(device: &Device, report: &mut Report) -> Result<(), DeviceError> {
    let mut rng = Rng(0x20e5);
    for width in [64, 256, 2816, 5376] {
        norms(device, report, width, &mut rng)?;
    }
    by_token(device, report, &mut rng)
}

fn normed(x: &[f64], weight: &[f32]) -> Vec<f64> {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let scale = 1.0 / (mean + EPS).sqrt();
    x.iter()
        .zip(weight)
        .map(|(x, w)| round(x * scale * f64::from(*w)).0)
        .collect()
}

fn widened(x: &[u16]) -> Vec<f64> {
    x.iter().map(|x| wide(*x)).collect()
}

fn norms(
    device: &Device,
    report: &mut Report,
    width: usize,
    rng: &mut Rng,
) -> Result<(), DeviceError> {
    let x = rng.normals(ROWS * width, 3.0);
    let branch = rng.normals(ROWS * width, 2.0);
    let (first, second) = (rng.norm_weights(width), rng.norm_weights(width));
    let (first_card, second_card) = (device.upload(&first)?, device.upload(&second)?);
    let branch_card = device.upload(&branch)?;
    let scale = 0.625;
    for kernel in ["norm_rows", "add_norm"] {
        let x_card = device.upload(&x)?;
        let out = device.upload(&vec![0x7fffu16; ROWS * width])?;
        let args = NormArgs {
            x: device.address(&x_card),
            branch: device.address(&branch_card),
            weight: device.address(&first_card),
            other: device.address(&second_card),
            out: device.address(&out),
            width: width as u32,
            ldx: width as u32,
            ldb: width as u32,
            ldo: width as u32,
            eps: EPS as f32,
            other_eps: EPS as f32,
            scale: scale as f32,
            pad: 0,
        };
        let grid = Grid {
            blocks: [ROWS as u32, 1, 1],
            threads: NormArgs::threads(width),
            shared: 0,
        };
        // SAFETY: buffers of ROWS rows of `width`, alive until the downloads below.
        unsafe { device.launch(kernel, grid, &args, false)? };
        let (x_after, out) = (device.download(&x_card)?, device.download(&out)?);
        let mut near = Score::default();
        // Wherever a step before rounds the other way, the result is off by that step's ulp.
        let mut compare = |got: &[u16], reference: &[f64], step: f64| {
            for (g, r) in got.iter().zip(reference) {
                near.add(wide(*g), *r, 1.01 * ulp(*r) + step);
            }
        };
        for row in 0..ROWS {
            let at = row * width..(row + 1) * width;
            let (x, b) = (widened(&x[at.clone()]), widened(&branch[at.clone()]));
            match kernel {
                "norm_rows" => compare(&out[at], &normed(&x, &first), 0.0),
                _ => {
                    let added = normed(&b, &first);
                    let sum: Vec<f64> = x
                        .iter()
                        .zip(&added)
                        .map(|(x, a)| round(round(x + a).0 * scale).0)
                        .collect();
                    compare(&x_after[at.clone()], &sum, ulp(4.0));
                    // Against the sum that the card has, so that only the norm is judged.
                    let theirs = widened(&x_after[at.clone()]);
                    compare(&out[at], &normed(&theirs, &second), 0.0);
                }
            }
        }
        report.check(
            &format!("{kernel} {width}"),
            near.count,
            near.bad,
            near.worst,
        );
    }
    Ok(())
}

fn rows_args(rows: usize, width: usize) -> RowsArgs {
    RowsArgs {
        a: 0,
        b: 0,
        out: 0,
        weight: 0,
        index: 0,
        rows: rows as u32,
        width: width as u32,
        lda: width as u32,
        ldb: width as u32,
        ldo: width as u32,
        count: 0,
        scale: 1.0,
        other_scale: 1.0,
        eps: EPS as f32,
        packed: 0,
    }
}

fn pairs_grid(width: usize) -> Grid {
    let blocks = [(width / 2).div_ceil(128) as u32, ROWS as u32, 1];
    Grid {
        blocks,
        threads: 128,
        shared: 0,
    }
}

fn by_token(device: &Device, report: &mut Report, rng: &mut Rng) -> Result<(), DeviceError> {
    let (vocab, width, layers, per_layer) = (100, 392, 3, 96);
    let matrix = Matrix::random(WeightForm::Bf16, vocab, width, rng);
    let packed = pack(device, &[&matrix], false)?;
    let tokens: Vec<u32> = [0, 7, 8, 99, 50, 7].to_vec();
    let index = device.upload(&tokens)?;
    let out = device.zeros::<u16>(ROWS * width)?;
    let args = RowsArgs {
        a: device.address(&packed.weight),
        out: device.address(&out),
        index: device.address(&index),
        scale: 53.0,
        packed: 1,
        ..rows_args(ROWS, width)
    };
    // SAFETY: the packed table has all tokens, `out` ROWS rows.
    unsafe { device.launch("embed", pairs_grid(width), &args, false)? };
    let got = device.download(&out)?;
    let mut exact = Score::default();
    for (row, token) in tokens.iter().enumerate() {
        let reference: Vec<u16> = matrix
            .row(*token as usize)
            .iter()
            .map(|x| round(x * 53.0).1)
            .collect();
        exact.same(&got[row * width..(row + 1) * width], &reference);
    }
    report.check("embed from packed tiles", exact.count, exact.bad, 0.0);

    let width = layers * per_layer;
    let table = rng.normals(vocab * width, 0.05);
    let context = rng.normals(ROWS * width, 20.0);
    let weight = rng.norm_weights(per_layer);
    let held = (
        device.upload(&table)?,
        device.upload(&context)?,
        device.upload(&weight)?,
    );
    let out = device.zeros::<u16>(ROWS * width)?;
    let args = RowsArgs {
        a: device.address(&held.0),
        b: device.address(&held.1),
        weight: device.address(&held.2),
        out: device.address(&out),
        index: device.address(&index),
        lda: width as u32,
        ldb: width as u32,
        ldo: width as u32,
        count: layers as u32,
        scale: 16.0,
        other_scale: 0.0625,
        ..rows_args(ROWS, per_layer)
    };
    let grid = Grid {
        blocks: [layers as u32, ROWS as u32, 1],
        threads: 32,
        shared: 0,
    };
    // SAFETY: as above.
    unsafe { device.launch("layer_inputs", grid, &args, false)? };
    let got = device.download(&out)?;
    let mut near = Score::default();
    for (row, token) in tokens.iter().enumerate() {
        for layer in 0..layers {
            let at = row * width + layer * per_layer;
            let scaled: Vec<f64> = context[at..at + per_layer]
                .iter()
                .map(|c| round(wide(*c) * 0.0625).0)
                .collect();
            let from = *token as usize * width + layer * per_layer;
            for (i, n) in normed(&scaled, &weight).iter().enumerate() {
                let identity = round(wide(table[from + i]) * 16.0).0;
                let r = round(n + identity).0 * std::f64::consts::FRAC_1_SQRT_2;
                near.add(wide(got[at + i]), r, 1.01 * ulp(r) + ulp(2.0));
            }
        }
    }
    report.check("layer_inputs", near.count, near.bad, near.worst);

    let picked = device.upload(&[2u32, 0, 5, 5, 1, 3])?;
    let out = device.zeros::<u16>(ROWS * width)?;
    let args = RowsArgs {
        a: device.address(&held.1),
        out: device.address(&out),
        index: device.address(&picked),
        ..rows_args(ROWS, width)
    };
    // SAFETY: as above.
    unsafe { device.launch("gather", pairs_grid(width), &args, false)? };
    let got = device.download(&out)?;
    let mut exact = Score::default();
    for (row, from) in [2usize, 0, 5, 5, 1, 3].into_iter().enumerate() {
        exact.same(
            &got[row * width..(row + 1) * width],
            &context[from * width..(from + 1) * width],
        );
    }
    report.check("gather", exact.count, exact.bad, 0.0);
    Ok(())
}
