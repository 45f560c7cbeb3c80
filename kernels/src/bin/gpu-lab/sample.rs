//! Choosing tokens: against a direct reading of the definition in fp64, and timed.

use marathon_kernels::{
    abi::{RECENT, SAMPLE_THREADS, SampleArgs, SampleParams, sample_chunks, sample_room},
    device::{Buffer, Device, DeviceError, Grid},
};

use crate::{
    data::{Rng, Score},
    report::Report,
};

/// Everything a row of sampling reads and writes, a sequence a row.
pub(crate) struct Bench {
    rows: usize,
    held: Held,
    args: SampleArgs,
}

struct Held {
    _words: Vec<Buffer<u32>>,
    _room: Buffer<u64>,
    _floats: Vec<Buffer<f32>>,
    _params: Buffer<u8>,
    token: Buffer<u32>,
}

impl Bench {
    pub(crate) fn new(
        device: &Device,
        width: usize,
        logits: Buffer<f32>,
        params: &[SampleParams],
        positions: &[u32],
    ) -> Result<Self, DeviceError> {
        let (rows, chunks) = (params.len(), sample_chunks(width));
        let numbers: Vec<u32> = (0..rows as u32).collect();
        let bytes: Vec<u8> = params.iter().flat_map(bytes).collect();
        let words = vec![
            device.upload(&numbers)?,
            device.upload(positions)?,
            device.zeros::<u32>(rows)?,
            device.zeros::<u32>(rows * RECENT)?,
            device.zeros::<u32>(rows)?,
        ];
        let floats = vec![logits, device.zeros::<f32>(rows * width)?];
        let room = device.zeros::<u64>(rows * sample_room(width, chunks))?;
        let held_params = device.upload(&bytes)?;
        let token = device.zeros::<u32>(rows)?;
        let args = SampleArgs {
            logits: device.address(&floats[0]),
            work: device.address(&floats[1]),
            ids: 0,
            params: device.address(&held_params),
            row_seq: device.address(&words[0]),
            positions: device.address(&words[1]),
            before: device.address(&words[2]),
            recent: device.address(&words[3]),
            recent_at: device.address(&words[4]),
            lists: device.address(&words[3]),
            room: device.address(&room),
            token: device.address(&token),
            drafts: 0,
            logprobs: 0,
            width: width as u32,
            ld: width as u32,
            offset: 0,
            chunks: chunks as u32,
            logprob_pitch: 0,
            pad: 0,
        };
        let held = Held {
            _words: words,
            _room: room,
            _floats: floats,
            _params: held_params,
            token,
        };
        Ok(Self { rows, held, args })
    }

    pub(crate) fn run(&self, device: &Device, dependent: bool) -> Result<(), DeviceError> {
        let rows = self.rows as u32;
        let shared = |threads| Grid {
            blocks: [self.args.chunks, rows, 1],
            threads,
            shared: 0,
        };
        let one = Grid {
            blocks: [rows, 1, 1],
            threads: SAMPLE_THREADS.pick,
            shared: 0,
        };
        let scan = SAMPLE_THREADS.scan;
        // SAFETY: the buffers were made for these rows.
        unsafe {
            device.launch("sample_scan", shared(scan), &self.args, dependent)?;
            device.launch("sample_gather", shared(scan), &self.args, dependent)?;
            device.launch("sample_pick", one, &self.args, dependent)
        }
    }
}

/// The parameter block as the card reads it.
fn bytes(p: &SampleParams) -> Vec<u8> {
    p.words().iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Nothing filtered, nothing penalised.
pub(crate) fn free(seed: u64, temperature: f32) -> SampleParams {
    SampleParams {
        seed,
        temperature,
        top_p: 1.0,
        repetition: 1.0,
        ..SampleParams::default()
    }
}

fn philox(mut c: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xd251_1f53;
        let b = u64::from(c[2]) * 0xcd9e_8d57;
        c = [
            (b >> 32) as u32 ^ c[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ c[3] ^ key[1],
            a as u32,
        ];
        key = [
            key[0].wrapping_add(0x9e37_79b9),
            key[1].wrapping_add(0xbb67_ae85),
        ];
    }
    c
}

/// The tokens that filters leave, likeliest first, with their values before noise.
fn kept(logits: &[f32], p: &SampleParams) -> Vec<(usize, f64)> {
    let clean = |l: f32| {
        if l.is_nan() {
            f32::NEG_INFINITY
        } else {
            l.min(f32::MAX)
        }
    };
    let mut order: Vec<(usize, f64)> = logits
        .iter()
        .enumerate()
        .map(|(i, l)| (i, f64::from(clean(*l)) / f64::from(p.temperature.max(1e-6))))
        .collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if p.temperature < 1e-6 {
        order.truncate(1);
    }
    if p.top_k > 0 {
        order.truncate(p.top_k as usize);
    }
    let best = order[0].1;
    if best == f64::NEG_INFINITY {
        order.truncate(1);
        return order;
    }
    let total: f64 = order.iter().map(|(_, l)| (l - best).exp()).sum();
    let (goal, mut sum) = (f64::from(p.top_p) * total, 0.0);
    let count = order.iter().position(|(_, l)| {
        sum += (l - best).exp();
        sum >= goal
    });
    if p.top_p < 1.0 {
        order.truncate(count.map_or(order.len(), |n| n + 1));
    }
    order.retain(|(_, l)| p.min_p <= 0.0 || (l - best).exp() >= f64::from(p.min_p));
    order
}

pub(crate) fn check(device: &Device, report: &mut Report, small: bool) -> Result<(), DeviceError> {
    let mut rng = Rng(0x5a);
    let (rows, width) = if small { (8, 1003) } else { (64, 50_003) };
    let mut logits: Vec<f32> = (0..rows * width)
        .map(|_| (3.0 * rng.normal()) as f32)
        .collect();
    // Ties, a NaN and infinities in the first rows.
    logits[100] = 50.0;
    logits[77] = 50.0;
    logits[5] = f32::NAN;
    logits[width + 9] = f32::INFINITY;
    logits[2 * width..3 * width].fill(f32::NEG_INFINITY);
    let params: Vec<SampleParams> = (0..rows)
        .map(|r| SampleParams {
            top_k: [0, 1, 20, 64, 0, 700][r % 6],
            top_p: [1.0, 0.95, 0.3][r % 3],
            min_p: [0.0, 0.0, 0.02, 0.0][r % 4],
            ..free(rng.word(), [0.0, 0.7, 1.0, 2.0][r % 4])
        })
        .collect();
    let positions: Vec<u32> = (0..rows as u32).map(|r| r * 1_000_003).collect();
    let bench = Bench::new(device, width, device.upload(&logits)?, &params, &positions)?;
    bench.run(device, false)?;
    let got = device.download(&bench.held.token)?;
    let mut right = Score::default();
    for row in 0..rows {
        let p = &params[row];
        let key = [p.seed as u32, (p.seed >> 32) as u32];
        let position = u64::from(positions[row]) + 1;
        let value = |id: usize, logit: f64| -> f64 {
            if p.temperature < 1e-6 {
                return logit;
            }
            let counter = [(id / 4) as u32, position as u32, (position >> 32) as u32, 0];
            let u = (f64::from(philox(counter, key)[id % 4]) + 0.5) / 4_294_967_296.0;
            logit - (-(-u).ln_1p()).ln()
        };
        let left = kept(&logits[row * width..(row + 1) * width], p);
        let values = left.iter().map(|(id, l)| (*id, value(*id, *l)));
        let best = values
            .clone()
            .fold((0, f64::NEG_INFINITY), |a, b| if b.1 > a.1 { b } else { a });
        // A token whose value is the best to within the noise's own rounding counts as right.
        let mine = values
            .clone()
            .find(|(id, _)| *id == got[row] as usize)
            .map_or(
                f64::INFINITY,
                |(_, v)| {
                    if v == best.1 { 0.0 } else { best.1 - v }
                },
            );
        right.add(mine, 0.0, 1e-5);
    }
    report.check("sample", right.count, right.bad, right.worst);
    Ok(())
}
