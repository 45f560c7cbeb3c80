//! Products: near fp64, and one row's bits whatever stands beside it.

use marathon_kernels::{
    abi::{DevicePtr, Epilogue, LargeLinear, LinearArgs, SmallLinear, WeightForm},
    device::{Device, DeviceError, Grid},
};

use crate::{
    data::{Rng, Score, gelu, round, ulp, wide},
    report::Report,
    weights::{Matrix, Operand, pack},
};

const FORMS: [WeightForm; 3] = [WeightForm::Bf16, WeightForm::Fp8, WeightForm::Nvfp4];
/// Most rows of the small kernel.
pub(crate) const SMALL: usize = 64;

/// A product's operands on the card.
pub(crate) struct Job {
    pub(crate) form: WeightForm,
    pub(crate) matrix: Operand,
    pub(crate) x: DevicePtr,
    pub(crate) y: DevicePtr,
    pub(crate) z: DevicePtr,
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) ldy: usize,
    pub(crate) epilogue: Epilogue,
    pub(crate) softcap: f32,
}

impl Job {
    fn args(&self, chunk: u32, depth: u32) -> LinearArgs {
        LinearArgs {
            weight: self.matrix.weight,
            block_scale: self.matrix.block_scale,
            row_scale: self.matrix.row_scale,
            x: self.x,
            y: self.y,
            z: self.z,
            m: self.m as u32,
            n: self.matrix.n as u32,
            k: self.k as u32,
            ldx: self.k.next_multiple_of(8) as u32,
            ldy: self.ldy as u32,
            ldz: self.ldy as u32,
            epilogue: self.epilogue as u32,
            softcap: self.softcap,
            chunk,
            depth,
        }
    }

    pub(crate) fn small(&self, device: &Device, dependent: bool) -> Result<(), DeviceError> {
        let (clusters, shared) = (device.clusters, device.shared_per_sm);
        let plan = SmallLinear::plan(self.form, self.m, self.matrix.n, self.k, clusters, shared);
        let grid = Grid {
            blocks: [plan.grid, 1, 1],
            threads: plan.block,
            shared: plan.shared,
        };
        let args = self.args(plan.chunk, plan.depth);
        // SAFETY: the caller's buffers hold m rows of x and y and the packed matrix.
        unsafe { device.launch(&plan.kernel(self.form), grid, &args, dependent) }
    }

    pub(crate) fn large(&self, device: &Device, dependent: bool) -> Result<(), DeviceError> {
        let (sms, shared) = (device.sms, device.shared_per_sm);
        let plan = LargeLinear::plan(self.form, self.m, self.matrix.n, sms, shared);
        let grid = Grid {
            blocks: [plan.grid, 1, 1],
            threads: plan.block,
            shared: plan.shared,
        };
        // SAFETY: as above.
        unsafe {
            device.launch(
                &LargeLinear::kernel(self.form),
                grid,
                &self.args(0, plan.depth),
                dependent,
            )
        }
    }
}

pub(crate) fn check(device: &Device, report: &mut Report, small: bool) -> Result<(), DeviceError> {
    let mut rng = Rng(0x11ea);
    let shapes: &[(usize, usize)] = match small {
        true => &[(72, 200), (256, 576)],
        false => &[
            (1000, 5376),
            (352, 21504),
            (528, 2816),
            (40, 72),
            (256, 256),
            (4096, 1024),
        ],
    };
    for form in FORMS {
        for &(n, k) in shapes {
            // Scales of NVFP4 come in sixteens of a row.
            let k = if form == WeightForm::Nvfp4 {
                k.next_multiple_of(16)
            } else {
                k
            };
            plain(device, report, form, n, k, small, &mut rng)?;
        }
        epilogues(device, report, form, &mut rng)?;
    }
    Ok(())
}

/// Every number of rows from one to `SMALL`, and some of the large kernel.
fn plain(
    device: &Device,
    report: &mut Report,
    form: WeightForm,
    n: usize,
    k: usize,
    small: bool,
    rng: &mut Rng,
) -> Result<(), DeviceError> {
    let most = if small { 70 } else { 200 };
    let matrix = Matrix::random(form, n, k, rng);
    let packed = pack(device, &[&matrix], false)?;
    let ldx = k.next_multiple_of(8);
    let x: Vec<u16> = rng.normals(most * ldx, 1.0);
    let on_card = device.upload(&x)?;
    let row_bytes = (ldx * 2) as u64;
    let run = |m: usize, first: usize, large: bool| -> Result<Vec<u16>, DeviceError> {
        let y = device.upload(&vec![0x7fffu16; m * n])?;
        let job = Job {
            form,
            matrix: packed.operand(device),
            x: device.address(&on_card) + first as u64 * row_bytes,
            y: device.address(&y),
            z: 0,
            m,
            k,
            ldy: n,
            epilogue: Epilogue::Store,
            softcap: 0.0,
        };
        if large {
            job.large(device, false)?
        } else {
            job.small(device, false)?
        }
        device.download(&y)
    };
    let whole = run(most, 0, true)?;

    let mut near = Score::default();
    let rows: Vec<usize> = (0..24).map(|_| rng.below(n)).chain([0, n - 1]).collect();
    for row in rows {
        let w = matrix.row(row);
        for m in 0..most {
            let terms = || w.iter().zip(&x[m * ldx..]).map(|(w, x)| w * wide(*x));
            let reference: f64 = terms().sum();
            let size: f64 = terms().map(f64::abs).sum();
            // Half an ulp for the rounding, the rest for sums in fp32.
            let tolerance = 0.51 * ulp(reference) + 2e-6 * size;
            near.add(wide(whole[m * n + row]), reference, tolerance);
        }
    }
    let name = format!("linear {} {n}x{k}", form.name());
    report.check(
        &format!("{name} near fp64"),
        near.count,
        near.bad,
        near.worst,
    );

    let mut same = Score::default();
    let counts: Vec<usize> = match small {
        true => vec![1, 9, 17, 33],
        false => (1..=SMALL).collect(),
    };
    for m in counts {
        let first = rng.below(most - m + 1);
        same.same(&run(m, first, false)?, &whole[first * n..(first + m) * n]);
    }
    for m in [1, 65, 129].into_iter().filter(|m| *m < most) {
        let first = rng.below(most - m + 1);
        same.same(&run(m, first, true)?, &whole[first * n..(first + m) * n]);
    }
    report.check(
        &format!("{name} same bits at any number of rows"),
        same.count,
        same.bad,
        0.0,
    );
    Ok(())
}

/// What leaves the kernel other than the product itself.
fn epilogues(
    device: &Device,
    report: &mut Report,
    form: WeightForm,
    rng: &mut Rng,
) -> Result<(), DeviceError> {
    let (n, k, m) = (184, 512, 70);
    let gate = Matrix::random(form, n, k, rng);
    let up = Matrix::random(form, n, k, rng);
    let x = rng.normals(m * k, 1.0);
    let z = rng.normals(m * n, 1.0);
    let (x_card, z_card) = (device.upload(&x)?, device.upload(&z)?);
    let fused = pack(device, &[&gate, &up], true)?;
    let alone = pack(device, &[&gate], false)?;
    let product = |matrix: &Matrix, m: usize, row: usize| -> f64 {
        matrix
            .row(row)
            .iter()
            .zip(&x[m * k..])
            .map(|(w, x)| w * wide(*x))
            .sum()
    };
    for (epilogue, packed) in [
        (Epilogue::Gated, &fused),
        (Epilogue::GeluMul, &alone),
        (Epilogue::Logits, &alone),
    ] {
        let width = if epilogue == Epilogue::Logits { 2 } else { 1 };
        let run = |rows: usize, large: bool| -> Result<Vec<u16>, DeviceError> {
            let y = device.upload(&vec![0x7fffu16; rows * n * width])?;
            let job = Job {
                form,
                matrix: packed.operand(device),
                x: device.address(&x_card),
                y: device.address(&y),
                z: device.address(&z_card),
                m: rows,
                k,
                ldy: n,
                epilogue,
                softcap: 30.0,
            };
            if large {
                job.large(device, false)?
            } else {
                job.small(device, false)?
            }
            device.download(&y)
        };
        let whole = run(m, true)?;
        let mut near = Score::default();
        for row in 0..n {
            for m in [0, 7, 33, 69] {
                let g = product(&gate, m, row);
                let at = m * n + row;
                // The projections themselves may round the other way: an ulp of theirs, passed on.
                let (got, reference, tolerance) = match epilogue {
                    Epilogue::Gated => {
                        let u = round(product(&up, m, row)).0;
                        let r = gelu(round(g).0) * u;
                        let passed = 1.2 * ulp(g) * u.abs() + 1.2 * gelu(g).abs() * ulp(u);
                        (wide(whole[at]), r, 0.51 * ulp(r) + passed + 1e-6)
                    }
                    Epilogue::GeluMul => {
                        let z = wide(z[at]);
                        let r = gelu(round(g).0) * z;
                        (
                            wide(whole[at]),
                            r,
                            0.51 * ulp(r) + 1.2 * ulp(g) * z.abs() + 1e-6,
                        )
                    }
                    Epilogue::Logits | Epilogue::Store => {
                        let bits = u32::from(whole[2 * at]) | u32::from(whole[2 * at + 1]) << 16;
                        let r = 30.0 * (round(g).0 / 30.0).tanh();
                        (f64::from(f32::from_bits(bits)), r, 1.01 * ulp(g) + 1e-5)
                    }
                };
                near.add(got, reference, tolerance);
            }
        }
        let name = format!("linear {} {epilogue:?}", form.name());
        report.check(
            &format!("{name} near fp64"),
            near.count,
            near.bad,
            near.worst,
        );
        let mut same = Score::default();
        for m in [1, 5, 8, 16, 31, 64] {
            same.same(&run(m, false)?, &whole[..m * n * width]);
        }
        report.check(&format!("{name} same bits"), same.count, same.bad, 0.0);
    }
    Ok(())
}
