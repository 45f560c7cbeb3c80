//! Timings at the real shapes, beside the card's own read rate measured in the same run.
//!
//! A measurement records many launches into a graph, with dependent launch, each on weights of its
//! own so that no cache helps, and takes the median of several replays.

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use marathon_kernels::{
    abi::{
        DevicePtr, Epilogue, HeadsArgs, NormArgs, PageForm, SampleParams, WeightForm, YardstickArgs,
    },
    device::{Buffer, Device, DeviceError, Grid},
};

use crate::{
    attention::{Call, Case, Pool},
    data::Rng,
    linear::{Job, SMALL},
    report::Report,
    sample,
    tiles::{self, Tiles},
    weights::Operand,
};

const REPLAYS: usize = 7;
/// Bytes of random weights that products draw from.
const POOL: usize = 6 << 30;
/// Fewest bytes that a measurement passes over.
const SWEEP: usize = 700 << 20;

fn driver<T>(what: &str, r: Result<T, cudarc::driver::DriverError>) -> Result<T, DeviceError> {
    r.map_err(|error| DeviceError::Driver {
        doing: what.to_owned(),
        error,
    })
}

/// Microseconds of one of `count` launches.
fn median(
    device: &Device,
    count: usize,
    launch: impl Fn(usize) -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    device.wait()?;
    let stream = device.stream();
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    driver("recording", stream.begin_capture(mode))?;
    let launched = (0..count).try_for_each(&launch);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = driver("making a graph", stream.end_capture(flags))?;
    launched?;
    let Some(graph) = graph else {
        return Err(DeviceError::NoKernel("an empty graph".into()));
    };
    let event = || {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        driver("making an event", device.context().new_event(flags))
    };
    let (begin, end) = (event()?, event()?);
    let mut times = Vec::new();
    for replay in 0..REPLAYS + 2 {
        driver("recording", begin.record(stream))?;
        driver("replaying", graph.launch())?;
        driver("recording", end.record(stream))?;
        device.wait()?;
        let ms = driver("reading a time", begin.elapsed_ms(&end))?;
        if replay >= 2 {
            times.push(1e3 * f64::from(ms) / count as f64);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[REPLAYS / 2])
}

fn fill(device: &Device, data: DevicePtr, bytes: u64, kind: u32) -> Result<(), DeviceError> {
    let args = YardstickArgs {
        data,
        out: 0,
        bytes,
        seed: kind * 77,
        kind,
    };
    let grid = Grid {
        blocks: [2048, 1, 1],
        threads: 256,
        shared: 0,
    };
    // SAFETY: the caller's buffer has `bytes` bytes.
    unsafe { device.launch("fill", grid, &args, false) }
}

/// Buffers that every measurement shares.
struct Bench<'a> {
    device: &'a Device,
    weights: Buffer<u8>,
    scales: Buffer<u8>,
    row_scales: Buffer<f32>,
    /// Positions, sequences and pages of rows that are all the first.
    nought: Buffer<u32>,
    x: Buffer<u16>,
    y: Buffer<u16>,
    /// Bytes per microsecond.
    rate: f64,
}

pub(crate) fn all(device: &Device, report: &mut Report) -> Result<(), DeviceError> {
    let rows = 8192;
    let mut bench = Bench {
        device,
        weights: device.zeros(POOL)?,
        scales: device.zeros(1 << 30)?,
        row_scales: device.upload(&vec![0.01f32; 262_144])?,
        nought: device.zeros(64)?,
        x: device.zeros(rows * 21_504)?,
        y: device.zeros(rows * 43_008)?,
        rate: 1.0,
    };
    let (x, x_bytes) = (device.address(&bench.x), 2 * bench.x.len() as u64);
    fill(device, x, x_bytes, 0)?;
    fill(device, device.address(&bench.scales), 1 << 30, 3)?;
    bench.read_rate(report)?;
    for form in [WeightForm::Bf16, WeightForm::Fp8, WeightForm::Nvfp4] {
        let kind = match form {
            WeightForm::Bf16 => 0,
            WeightForm::Fp8 => 1,
            WeightForm::Nvfp4 => 2,
        };
        fill(device, device.address(&bench.weights), POOL as u64, kind)?;
        bench.products(report, form)?;
        bench.layer(report, form)?;
    }
    bench.attentions(report)?;
    bench.prompts(report)?;
    bench.between(report)
}

/// Model, product, rows of W, columns, gated.
const SHAPES: &[(&str, &str, usize, usize, bool)] = &[
    ("31B", "gate_up", 43_008, 5_376, true),
    ("31B", "down", 5_376, 21_504, false),
    ("31B", "qkv sliding", 16_384, 5_376, false),
    ("31B", "qkv full", 18_432, 5_376, false),
    ("31B", "o sliding", 5_376, 8_192, false),
    ("31B", "o full", 5_376, 16_384, false),
    ("31B", "head", 262_144, 5_376, false),
    ("26B", "qkv sliding", 8_192, 2_816, false),
    ("26B", "gate_up", 4_224, 2_816, true),
    ("26B", "down", 2_816, 2_112, false),
    ("E4B", "gate_up", 20_480, 2_560, true),
    ("E4B", "down", 2_560, 10_240, false),
    ("E4B", "qkv", 3_072, 2_560, false),
    ("E4B", "o", 2_560, 2_048, false),
];

impl Bench<'_> {
    fn read_rate(&mut self, report: &mut Report) -> Result<(), DeviceError> {
        let device = self.device;
        fill(device, device.address(&self.weights), POOL as u64, 2)?;
        for bytes in [4 << 30, 462 << 20, 231 << 20, 88 << 20, 22 << 20, 5 << 20] {
            let bytes: usize = bytes;
            let places = (POOL / bytes).max(1);
            let count = (SWEEP / bytes).clamp(4, 64);
            let micros = median(device, count, |i| {
                let args = YardstickArgs {
                    data: device.address(&self.weights) + (i % places * bytes) as u64,
                    out: device.address(&self.scales),
                    bytes: bytes as u64,
                    seed: 0,
                    kind: 0,
                };
                let blocks = [(device.sms * 8) as u32, 1, 1];
                // SAFETY: `places` pieces of `bytes` fit the pool.
                unsafe {
                    device.launch(
                        "read_all",
                        Grid {
                            blocks,
                            threads: 256,
                            shared: 0,
                        },
                        &args,
                        true,
                    )
                }
            })?;
            let rate = bytes as f64 / micros;
            if bytes == 4 << 30 {
                self.rate = rate;
            }
            let note = format!("{:.3} TB/s", rate * 1e-6);
            let floor = bytes as f64 / self.rate;
            report.timing(&format!("read {} MiB", bytes >> 20), micros, floor, &note);
        }
        Ok(())
    }

    /// Piece `i` of the weight pool that holds a matrix.
    fn operand(&self, form: WeightForm, n: usize, k: usize, i: usize) -> Operand {
        let (codes, scales) = form.packed_bytes(n, k);
        let places = (POOL / codes).min((1usize << 30).checked_div(scales).unwrap_or(usize::MAX));
        let place = i % places.max(1);
        let quantised = form != WeightForm::Bf16;
        Operand {
            weight: self.device.address(&self.weights) + (place * codes) as u64,
            block_scale: match scales {
                0 => 0,
                bytes => self.device.address(&self.scales) + (place * bytes) as u64,
            },
            row_scale: if quantised {
                self.device.address(&self.row_scales)
            } else {
                0
            },
            n,
        }
    }

    fn job(&self, form: WeightForm, n: usize, k: usize, gated: bool, m: usize, i: usize) -> Job {
        let head = n == 262_144;
        Job {
            form,
            matrix: self.operand(form, n, k, i),
            x: self.device.address(&self.x),
            y: self.device.address(&self.y),
            z: 0,
            m,
            k,
            ldy: if gated { n / 2 } else { n },
            epilogue: match (head, gated) {
                (true, _) => Epilogue::Logits,
                (_, true) => Epilogue::Gated,
                _ => Epilogue::Store,
            },
            softcap: 30.0,
        }
    }

    fn products(&self, report: &mut Report, form: WeightForm) -> Result<(), DeviceError> {
        let device = self.device;
        for &(model, name, n, k, gated) in SHAPES {
            let (codes, scales) = form.packed_bytes(n, k);
            let count = (SWEEP / codes).clamp(4, 40);
            let rows: &[usize] = match model {
                "31B" => &[1, 5, 8, 16, 32, 64],
                _ => &[1, 5, 16],
            };
            for &m in rows {
                let name = format!("{model} {name} {} m {m}", form.name());
                if !report.wants(&name) {
                    continue;
                }
                let micros = median(device, count, |i| {
                    self.job(form, n, k, gated, m, i).small(device, true)
                })?;
                let floor = (codes + scales) as f64 / self.rate;
                report.timing(&name, micros, floor, "");
            }
        }
        for &(model, name, n, k, gated) in &SHAPES[..3] {
            for m in [SMALL + 64, 2048, 8192] {
                let name = format!("{model} {name} {} m {m}", form.name());
                if (form != WeightForm::Bf16 && m == 8192) || !report.wants(&name) {
                    continue;
                }
                let micros = median(device, 4, |i| {
                    self.job(form, n, k, gated, m, i).large(device, true)
                })?;
                let operations = 2.0 * (m * n * k) as f64;
                let (codes, scales) = form.packed_bytes(n, k);
                // The rate of a large library product on this card (gpu notes: 645 to 790).
                let floor = (operations / 790e6).max((codes + scales) as f64 / self.rate);
                let note = format!("{:.0} TFLOP/s", operations / micros * 1e-6);
                report.timing(&name, micros, floor, &note);
            }
        }
        Ok(())
    }

    /// A sliding layer of 31B at 1k context, every kernel of it, layer after layer.
    fn layer(&self, report: &mut Report, form: WeightForm) -> Result<(), DeviceError> {
        let device = self.device;
        let case = Case {
            head_dim: 256,
            heads: 32,
            kv_heads: 16,
            window: 1024,
            page: 32,
            rows: 1,
            end: 1400,
            form: PageForm::default(),
        };
        let filler = |data, bytes| fill(device, data, bytes, 0);
        let pool = Pool::filled(device, &case, filler)?;
        for m in [1usize, 5] {
            let name = format!("31B sliding layer {} m {m}", form.name());
            if !report.wants(&name) {
                continue;
            }
            let x = device.address(&self.x);
            let ends: Vec<u32> = (0..m).map(|r| (case.end - m + 1 + r) as u32).collect();
            let call = Call::new(device, &case, &pool, x, &ends)?;
            let layers = 6;
            let products = [
                (16_384, 5_376, false),
                (5_376, 8_192, false),
                (43_008, 5_376, true),
                (5_376, 21_504, false),
            ];
            let micros = median(device, layers, |i| {
                let product = |p: usize| {
                    let (n, k, gated) = products[p];
                    self.job(form, n, k, gated, m, i * 4 + p)
                        .small(device, true)
                };
                product(0)?;
                self.heads(m, true)?;
                call.launch(device, true)?;
                product(1)?;
                self.add_norm(m, 5_376)?;
                product(2)?;
                product(3)?;
                self.add_norm(m, 5_376)
            })?;
            let bytes: usize = products
                .iter()
                .map(|(n, k, _)| {
                    let (codes, scales) = form.packed_bytes(*n, *k);
                    codes + scales
                })
                .sum();
            let kv = 1024 * 16 * 256 * 2 * 2;
            let floor = (bytes + kv) as f64 / self.rate;
            let note = format!("x 60 = {:.2} ms", micros * 0.06);
            report.timing(&name, micros, floor, &note);
        }
        Ok(())
    }

    fn add_norm(&self, m: usize, width: usize) -> Result<(), DeviceError> {
        let device = self.device;
        let args = NormArgs {
            x: device.address(&self.x),
            branch: device.address(&self.y),
            weight: device.address(&self.row_scales),
            other: device.address(&self.row_scales),
            out: device.address(&self.y),
            width: width as u32,
            ldx: width as u32,
            ldb: width as u32,
            ldo: width as u32,
            eps: 1e-6,
            other_eps: 1e-6,
            scale: 1.0,
            pad: 0,
        };
        let grid = Grid {
            blocks: [m as u32, 1, 1],
            threads: NormArgs::threads(width),
            shared: 0,
        };
        // SAFETY: all buffers have thousands of rows of this width.
        unsafe { device.launch("add_norm", grid, &args, true) }
    }

    /// Heads of a 31B sliding layer; position 0 of every row, page 0.
    fn heads(&self, m: usize, dependent: bool) -> Result<(), DeviceError> {
        let device = self.device;
        let zeros = device.address(&self.nought);
        let args = HeadsArgs {
            qkv: device.address(&self.y),
            q_norm: device.address(&self.row_scales),
            k_norm: device.address(&self.row_scales),
            turns: device.address(&self.row_scales),
            positions: zeros,
            row_seq: zeros,
            kv: device.address(&self.scales),
            table: zeros,
            table_first: zeros,
            heads: 32,
            kv_heads: 16,
            ld: 16_384,
            pairs: 128,
            page: 32,
            table_pitch: 0,
            from_values: 0,
            eps: 1e-6,
            key_scale: 0.0,
            value_scale: 0.0,
        };
        let grid = Grid {
            blocks: [12, m as u32, 1],
            threads: 128,
            shared: 0,
        };
        // SAFETY: position 0 and page 0 of buffers that are far larger.
        unsafe { device.launch("heads_d256", grid, &args, dependent) }
    }

    fn attentions(&self, report: &mut Report) -> Result<(), DeviceError> {
        let device = self.device;
        let layers = [
            ("31B sliding", 256, 32, 16, 1024, false),
            ("31B full", 512, 32, 4, 0, false),
            ("31B full values only", 512, 32, 4, 0, true),
            ("26B full values only", 512, 16, 2, 0, true),
            ("E4B sliding", 256, 8, 2, 512, false),
            ("E4B full", 512, 8, 2, 0, false),
        ];
        let forms = [false, true];
        let layers = layers
            .iter()
            .flat_map(|layer| forms.map(|fp8| (*layer, fp8)));
        for ((name, head_dim, heads, kv_heads, window, values_only), fp8) in layers {
            for end in [1024usize, 16_384, 50_000] {
                if window > 0 && end > 1024 {
                    continue;
                }
                for rows in [1usize, 5, 64] {
                    let stored = if fp8 { " FP8" } else { "" };
                    let name = format!("attention {name}{stored} context {end} rows {rows}");
                    if !report.wants(&name) {
                        continue;
                    }
                    let case = Case {
                        head_dim,
                        heads,
                        kv_heads,
                        window,
                        page: 32,
                        rows,
                        end,
                        form: PageForm { values_only, fp8 },
                    };
                    // Codes of any bits: no code of a half word is a NaN.
                    let kind = if fp8 { 2 } else { 0 };
                    let filler = |data, bytes| fill(device, data, bytes, kind);
                    let seen = if window == 0 { end } else { window.min(end) };
                    let sides = if values_only { 1 } else { 2 };
                    let bytes = seen * kv_heads * head_dim * case.element() * sides;
                    let copies = (200usize << 20).div_ceil(bytes).clamp(1, 24);
                    let pools = (0..copies)
                        .map(|_| Pool::filled(device, &case, filler))
                        .collect::<Result<Vec<_>, _>>()?;
                    let ends: Vec<u32> = (0..rows).map(|r| (end - rows + 1 + r) as u32).collect();
                    let calls = pools
                        .iter()
                        .map(|p| Call::new(device, &case, p, device.address(&self.x), &ends))
                        .collect::<Result<Vec<_>, _>>()?;
                    let micros = median(device, copies.max(8), |i| {
                        calls[i % copies].launch(device, true)
                    })?;
                    report.timing(&name, micros, bytes as f64 / self.rate, "with merge");
                }
            }
        }
        Ok(())
    }

    /// Attention of a prompt's rows, by tiles.
    fn prompts(&self, report: &mut Report) -> Result<(), DeviceError> {
        let device = self.device;
        let layers = [
            ("31B sliding", 256, 32, 16, 1024, false),
            ("31B full values only", 512, 32, 4, 0, true),
            ("E4B full", 512, 8, 2, 0, false),
        ];
        for (name, head_dim, heads, kv_heads, window, values_only) in layers {
            for (rows, end) in [
                (64, 8192),
                (512, 8192),
                (1024, 1024),
                (2048, 8192),
                (2048, 32_768),
                (2048, 50_000),
            ] {
                let name = format!("prompt {name} context {end} rows {rows}");
                if !tiles::there(device) || window > 0 && end > 8192 || !report.wants(&name) {
                    continue;
                }
                let case = Case {
                    head_dim,
                    heads,
                    kv_heads,
                    window,
                    page: 32,
                    rows,
                    end,
                    form: PageForm {
                        values_only,
                        fp8: false,
                    },
                };
                let pool = Pool::filled(device, &case, |data, bytes| fill(device, data, bytes, 0))?;
                let ends: Vec<u32> = (0..rows).map(|r| (end - rows + 1 + r) as u32).collect();
                let x = device.address(&self.x);
                let call = Call::with_splits(device, &case, &pool, x, &ends, 0)?;
                let Some(tiles) = Tiles::new(device, &case, &call, rows, 512 << 20)? else {
                    continue;
                };
                let micros = median(device, 2, |_| tiles.launch(device, true))?;
                let seen = |end: &u32| case.first_key(*end as usize).abs_diff(*end as usize);
                let keys: usize = ends.iter().map(seen).sum();
                let operations = 4.0 * (keys * heads * head_dim) as f64;
                let note = format!("{:.0} TFLOP/s", operations / micros * 1e-6);
                report.timing(&name, micros, operations / 790e6, &note);
            }
        }
        Ok(())
    }

    /// What stands between the products.
    fn between(&self, report: &mut Report) -> Result<(), DeviceError> {
        if !report.wants("between") {
            return Ok(());
        }
        let device = self.device;
        for m in [1, 5] {
            let micros = median(device, 32, |_| self.add_norm(m, 5_376))?;
            report.timing(
                &format!("add_norm 5376 m {m}"),
                micros,
                0.57,
                "floor: a graph node",
            );
            let micros = median(device, 32, |_| self.heads(m, true))?;
            report.timing(
                &format!("heads 31B sliding m {m}"),
                micros,
                0.57,
                "floor: a graph node",
            );
        }
        let (rows, vocab) = (5usize, 262_144usize);
        let mut rng = Rng(5);
        let mut logits: Vec<f32> = (0..rows * vocab)
            .map(|_| (3.0 * rng.normal()) as f32)
            .collect();
        // Text is surer than noise: one token stands out.
        logits.iter_mut().step_by(vocab).for_each(|l| *l = 25.0);
        let floor = (rows * vocab * 4) as f64 / self.rate;
        for (name, top_k, top_p) in [("free", 0, 1.0), ("top-k 64, top-p 0.95", 64, 0.95)] {
            let params: Vec<SampleParams> = (0..rows)
                .map(|_| SampleParams {
                    top_k,
                    top_p,
                    ..sample::free(rng.word(), 1.0)
                })
                .collect();
            let held = device.upload(&logits)?;
            let bench = sample::Bench::new(device, vocab, held, &params, &[7; 5])?;
            let micros = median(device, 16, |_| bench.run(device, true))?;
            report.timing(
                &format!("sample 262144 rows 5, {name}"),
                micros,
                floor,
                "three kernels",
            );
        }
        Ok(())
    }
}
