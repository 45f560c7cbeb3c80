//! Norms and turns of heads, and where keys and values end up.

use marathon_kernels::{
    abi::HeadsArgs,
    device::{Device, DeviceError, Grid},
};

use crate::{
    data::{Rng, Score, e4m3, round, ulp, unpack_codes, wide},
    report::Report,
};

struct Case {
    dim: usize,
    heads: usize,
    kv_heads: usize,
    pairs: usize,
    from_values: bool,
    fp8: bool,
}

/// Scales of keys and of values in FP8.
const SCALES: [f32; 2] = [0.0071, 0.0123];
const EPS: f64 = 1e-6;
const PAGE: usize = 32;
const ROWS: usize = 5;

pub(crate) fn check(device: &Device, report: &mut Report) -> Result<(), DeviceError> {
    let mut rng = Rng(0x4ead);
    for case in [
        Case {
            dim: 64,
            heads: 4,
            kv_heads: 2,
            pairs: 32,
            from_values: false,
            fp8: false,
        },
        Case {
            dim: 128,
            heads: 3,
            kv_heads: 3,
            pairs: 64,
            from_values: false,
            fp8: false,
        },
        Case {
            dim: 256,
            heads: 32,
            kv_heads: 16,
            pairs: 128,
            from_values: false,
            fp8: false,
        },
        Case {
            dim: 512,
            heads: 8,
            kv_heads: 1,
            pairs: 64,
            from_values: true,
            fp8: false,
        },
    ] {
        one(device, report, &case, &mut rng)?;
        one(device, report, &Case { fp8: true, ..case }, &mut rng)?;
    }
    Ok(())
}

fn one(
    device: &Device,
    report: &mut Report,
    case: &Case,
    rng: &mut Rng,
) -> Result<(), DeviceError> {
    let &Case {
        dim,
        heads,
        kv_heads,
        pairs,
        from_values,
        fp8,
    } = case;
    let parts = if from_values {
        heads + kv_heads
    } else {
        heads + 2 * kv_heads
    };
    let ld = parts * dim;
    let input = rng.normals(ROWS * ld, 0.7);
    let positions: Vec<u32> = (0..ROWS as u32).map(|r| 61 + r).collect();
    let turns: Vec<f32> = (0..70 * pairs)
        .flat_map(|i| {
            let angle = (i / pairs) as f64 * 10_000f64.powf(-2.0 * (i % pairs) as f64 / dim as f64);
            [angle.cos() as f32, angle.sin() as f32]
        })
        .collect();
    let (q_norm, k_norm) = (rng.norm_weights(dim), rng.norm_weights(dim));
    let table = [7u32, 2, 4];
    let kv = device.upload(&vec![0x7fffu16; 8 * kv_heads * 2 * PAGE * dim])?;
    let qkv = device.upload(&input)?;
    let held = (
        device.upload(&q_norm)?,
        device.upload(&k_norm)?,
        device.upload(&turns)?,
        device.upload(&positions)?,
        device.upload(&[0u32; ROWS])?,
        device.upload(&table)?,
        device.upload(&[1u32])?,
    );
    let args = HeadsArgs {
        qkv: device.address(&qkv),
        q_norm: device.address(&held.0),
        k_norm: device.address(&held.1),
        turns: device.address(&held.2),
        positions: device.address(&held.3),
        row_seq: device.address(&held.4),
        kv: device.address(&kv),
        table: device.address(&held.5),
        table_first: device.address(&held.6),
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        ld: ld as u32,
        pairs: pairs as u32,
        page: PAGE as u32,
        table_pitch: table.len() as u32,
        from_values: u32::from(from_values),
        eps: EPS as f32,
        key_scale: if fp8 { SCALES[0] } else { 0.0 },
        value_scale: if fp8 { SCALES[1] } else { 0.0 },
    };
    let units = (heads + kv_heads).div_ceil(4) as u32;
    let grid = Grid {
        blocks: [units, ROWS as u32, 1],
        threads: 128,
        shared: 0,
    };
    // SAFETY: every buffer lives to the end of this function and covers all rows and positions.
    unsafe { device.launch(&format!("heads_d{dim}"), grid, &args, false)? };
    let turned = device.download(&qkv)?;
    let pages = device.download(&kv)?;

    let normed = |x: &[u16], weight: Option<&[f32]>| -> Vec<f64> {
        let mean = x.iter().map(|x| wide(*x).powi(2)).sum::<f64>() / dim as f64;
        let scale = 1.0 / (mean + EPS).sqrt();
        let w = |i: usize| weight.map_or(1.0, |w| f64::from(w[i]));
        x.iter()
            .enumerate()
            .map(|(i, x)| round(wide(*x) * scale * w(i)).0)
            .collect()
    };
    let turn = |x: &mut [f64], position: u32| {
        for j in 0..pairs {
            let at = (position as usize * pairs + j) * 2;
            let (cos, sin) = (f64::from(turns[at]), f64::from(turns[at + 1]));
            let (a, b) = (x[j], x[j + dim / 2]);
            (x[j], x[j + dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
        }
    };
    let near = std::cell::RefCell::new(Score::default());
    let compare = |got: &[u16], reference: &[f64]| {
        for (g, r) in got.iter().zip(reference) {
            // A norm that rounds the other way moves the result by an ulp of its own.
            near.borrow_mut()
                .add(wide(*g), *r, 2.0 * ulp(r.abs().max(0.5)));
        }
    };
    // A slot of keys (0) or values (1).
    let width = if fp8 { dim / 2 } else { dim };
    let compare_slot = |side: usize, at: usize, reference: &[f64]| {
        let got = &pages[at * width..][..width];
        if !fp8 {
            return compare(got, reference);
        }
        let scale = f64::from(SCALES[side]);
        for (j, pair) in got.iter().enumerate() {
            for (code, r) in unpack_codes(*pair)
                .into_iter()
                .zip([reference[j], reference[j + dim / 2]])
            {
                // Half a step of a code, and what the number before it may be off.
                let limit = r.abs().min(448.0 * scale);
                let step = 2f64.powi(((limit / scale).max(1.0 / 64.0).log2().floor()) as i32 - 3);
                let off = 0.51 * step * scale + 2.0 * ulp(r.abs().max(0.5));
                near.borrow_mut()
                    .add(e4m3(code) * scale, limit.copysign(r), off);
            }
        }
    };
    for row in 0..ROWS {
        let x = &input[row * ld..(row + 1) * ld];
        for head in 0..heads {
            let mut q = normed(&x[head * dim..][..dim], Some(&q_norm));
            turn(&mut q, positions[row]);
            compare(&turned[row * ld + head * dim..][..dim], &q);
        }
        for head in 0..kv_heads {
            let position = positions[row] as usize;
            let page = table[position / PAGE - 1] as usize;
            let slot = page * kv_heads + head;
            let key_at = slot * 2 * PAGE + position % PAGE;
            let value_at = if from_values {
                slot * PAGE + position % PAGE
            } else {
                key_at + PAGE
            };
            let raw = &x[(heads + head) * dim..][..dim];
            let raw_value = if from_values {
                raw
            } else {
                &x[(heads + kv_heads + head) * dim..][..dim]
            };
            let value = normed(raw_value, None);
            compare_slot(1, value_at, &value);
            if from_values {
                continue;
            }
            let mut key = normed(raw, Some(&k_norm));
            turn(&mut key, positions[row]);
            compare_slot(0, key_at, &key);
        }
    }
    let near = near.into_inner();
    let name = format!("heads d{dim} {heads}/{kv_heads} values only {from_values} FP8 {fp8}");
    report.check(&name, near.count, near.bad, near.worst);
    Ok(())
}
