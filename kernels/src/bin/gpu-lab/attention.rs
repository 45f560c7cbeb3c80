//! Attention: near fp64, blind to what it must not see, and one row's bits whatever stands beside it.

use marathon_kernels::{
    abi::{AttentionArgs, AttentionPlan, PageForm, splits_of_row},
    device::{Buffer, Device, DeviceError, Grid},
};

use crate::{
    data::{Rng, Score, e4m3, e4m3_code, pack_codes, round, ulp, wide},
    report::Report,
};

/// A layer's geometry and a sequence in it.
#[derive(Clone, Copy)]
pub(crate) struct Case {
    pub(crate) head_dim: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// 0: all keys.
    pub(crate) window: usize,
    pub(crate) page: usize,
    pub(crate) rows: usize,
    /// Keys that the last row sees the end of.
    pub(crate) end: usize,
    /// What pages hold.
    pub(crate) form: PageForm,
}

/// Scales of keys and of values in FP8: no powers of two, and keys above 448 times theirs are cut.
const SCALES: [f32; 2] = [0.0071, 0.0123];

impl Case {
    /// Tiles of keys and of values that a page holds.
    fn sides(&self) -> usize {
        if self.form.values_only { 1 } else { 2 }
    }

    /// Half words that a slot of keys or of values takes.
    fn width(&self) -> usize {
        if self.form.fp8 {
            self.head_dim / 2
        } else {
            self.head_dim
        }
    }

    /// Bytes of a key or value's element.
    pub(crate) fn element(&self) -> usize {
        if self.form.fp8 { 1 } else { 2 }
    }

    /// What scores and results are times.
    fn scales(&self) -> [f32; 2] {
        match (self.form.fp8, self.form.values_only) {
            (false, _) => [1.0, 1.0],
            (true, false) => SCALES,
            (true, true) => [SCALES[1]; 2],
        }
    }

    pub(crate) fn first_key(&self, end: usize) -> usize {
        if self.window == 0 {
            0
        } else {
            end.saturating_sub(self.window)
        }
    }

    fn splits(&self, first_end: usize, last_end: usize) -> usize {
        splits_of_row(self.first_key(first_end), last_end, self.window > 0)
    }
}

/// Pairs that turn in values-only layers.
pub(crate) const PAIRS: usize = 64;

/// Buffers of one call: some rows of one sequence.
pub(crate) struct Call {
    pub(crate) args: AttentionArgs,
    pub(crate) plan: AttentionPlan,
    pub(crate) out: Buffer<u16>,
    rows: usize,
    heads: usize,
    _kept: (Buffer<u32>, Buffer<u32>, Buffer<f32>, Buffer<f32>),
}

impl Call {
    /// `ends[i]` belongs to row `i` of `q`.
    pub(crate) fn new(
        device: &Device,
        case: &Case,
        pool: &Pool,
        q: u64,
        ends: &[u32],
    ) -> Result<Self, DeviceError> {
        let splits = case.splits(ends[0] as usize, ends[ends.len() - 1] as usize);
        Self::with_splits(device, case, pool, q, ends, splits)
    }

    /// With room for partial results of `splits` splits; none if it is not launched itself.
    pub(crate) fn with_splits(
        device: &Device,
        case: &Case,
        pool: &Pool,
        q: u64,
        ends: &[u32],
        splits: usize,
    ) -> Result<Self, DeviceError> {
        let (rows, first) = (ends.len(), ends[0] as usize);
        // The rows' own keys are new, the others known.
        let spans = device.upload(&[0, rows as u32, 0, (first as u32).saturating_sub(1)])?;
        let ends = device.upload(ends)?;
        let vectors = rows * case.heads;
        let partial = device.zeros::<f32>(vectors * splits * case.head_dim)?;
        let weight = device.zeros::<f32>(vectors * splits * 2)?;
        let width = case.heads * case.head_dim;
        let out = device.upload(&vec![0x7fffu16; rows * width])?;
        let args = AttentionArgs {
            q,
            kv: device.address(&pool.kv),
            table: device.address(&pool.table),
            table_first: device.address(&pool.table_first),
            spans: device.address(&spans),
            ends: device.address(&ends),
            partial: device.address(&partial),
            weight: device.address(&weight),
            out: device.address(&out),
            k_norm: device.address(&pool.k_norm),
            turns: device.address(&pool.turns),
            heads: case.heads as u32,
            kv_heads: case.kv_heads as u32,
            page: case.page as u32,
            window: case.window as u32,
            ldq: width as u32,
            ldo: width as u32,
            splits: splits as u32,
            table_pitch: pool.pages as u32,
            pairs: PAIRS as u32,
            score_scale: case.scales()[0],
            value_scale: case.scales()[1],
            codes: 0,
        };
        let plan = AttentionPlan::plan(
            case.head_dim,
            case.heads,
            case.kv_heads,
            rows,
            1,
            splits,
            case.form,
        );
        let _kept = (spans, ends, partial, weight);
        Ok(Self {
            args,
            plan,
            out,
            rows,
            heads: case.heads,
            _kept,
        })
    }

    pub(crate) fn launch(&self, device: &Device, dependent: bool) -> Result<(), DeviceError> {
        let plan = &self.plan;
        let grid = Grid {
            blocks: plan.grid,
            threads: plan.threads,
            shared: plan.shared,
        };
        let merge = Grid {
            blocks: [self.rows as u32, self.heads as u32, 1],
            threads: plan.head_dim as u32 / 2,
            shared: 0,
        };
        // SAFETY: the buffers are this call's own, sized above; the pool holds every page of the
        // table.
        unsafe {
            device.launch(&plan.kernel(), grid, &self.args, dependent)?;
            device.launch("attention_merge", merge, &self.args, dependent)
        }
    }
}

/// One sequence's pages, scattered in the pool.
pub(crate) struct Pool {
    pub(crate) kv: Buffer<u16>,
    table: Buffer<u32>,
    table_first: Buffer<u32>,
    pages: usize,
    k_norm: Buffer<f32>,
    turns: Buffer<f32>,
}

/// Keys and values by position: `[position][kv head][element]`; in FP8 the numbers of their codes,
/// without scale.
pub(crate) struct Stored {
    keys: Vec<u16>,
    values: Vec<u16>,
    k_norm: Vec<f32>,
    turns: Vec<f32>,
}

impl Stored {
    pub(crate) fn random(case: &Case, rng: &mut Rng) -> Self {
        let dim = case.head_dim;
        let len = case.end * case.kv_heads * dim;
        let coded = |x: Vec<u16>, scale: f32| match case.form.fp8 {
            false => x,
            true => {
                let quotient = |x: &u16| f64::from(wide(*x) as f32 / scale);
                let code = |x: &u16| round(e4m3(e4m3_code(quotient(x)))).1;
                x.iter().map(code).collect()
            }
        };
        let values = coded(rng.normals(len, 1.0), SCALES[1]);
        if !case.form.values_only {
            let keys = coded(rng.normals(len, 1.0), SCALES[0]);
            return Self {
                keys,
                values,
                k_norm: vec![0.0],
                turns: vec![0.0],
            };
        }
        let k_norm = rng.norm_weights(dim);
        let turns: Vec<f32> = (0..case.end * PAIRS)
            .flat_map(|i| {
                let power = -2.0 * (i % PAIRS) as f64 / dim as f64;
                let angle = (i / PAIRS) as f64 * 1e6f64.powf(power);
                [angle.cos() as f32, angle.sin() as f32]
            })
            .collect();
        let mut keys = Vec::with_capacity(len);
        for (head, value) in values.chunks_exact(dim).enumerate() {
            let position = head / case.kv_heads;
            let mut key: Vec<f64> = value
                .iter()
                .zip(&k_norm)
                .map(|(v, w)| wide(*v) * f64::from(*w))
                .collect();
            for j in 0..PAIRS {
                let at = (position * PAIRS + j) * 2;
                let (cos, sin) = (f64::from(turns[at]), f64::from(turns[at + 1]));
                let (a, b) = (key[j], key[j + dim / 2]);
                (key[j], key[j + dim / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
            keys.extend(key.iter().map(|k| round(*k).1));
        }
        Self {
            keys,
            values,
            k_norm,
            turns,
        }
    }
}

impl Pool {
    /// Pages that cover `[first, end)`. What is stored elsewhere is NaN.
    pub(crate) fn new(
        device: &Device,
        case: &Case,
        first: usize,
        stored: &Stored,
        rng: &mut Rng,
    ) -> Result<Self, DeviceError> {
        let first_page = first / case.page;
        let pages = case.end.div_ceil(case.page) - first_page;
        let mut order: Vec<u32> = (0..pages as u32 + 3).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, rng.below(i + 1));
        }
        let (dim, width) = (case.head_dim, case.width());
        let slots = order.len() * case.kv_heads * case.sides() * case.page;
        let mut kv = vec![0x7fffu16; slots * width];
        let put = |to: &mut [u16], from: &[u16]| match case.form.fp8 {
            false => to.copy_from_slice(from),
            true => {
                let code = |x: u16| e4m3_code(wide(x));
                for (j, pair) in to.iter_mut().enumerate() {
                    *pair = pack_codes(code(from[j]), code(from[j + dim / 2]));
                }
            }
        };
        for position in first..case.end {
            let page = order[position / case.page - first_page] as usize;
            for head in 0..case.kv_heads {
                let from = (position * case.kv_heads + head) * dim;
                let slot = (page * case.kv_heads + head) * case.sides() * case.page;
                let mut base = slot + position % case.page;
                if !case.form.values_only {
                    put(
                        &mut kv[base * width..][..width],
                        &stored.keys[from..][..dim],
                    );
                    base += case.page;
                }
                put(
                    &mut kv[base * width..][..width],
                    &stored.values[from..][..dim],
                );
            }
        }
        Ok(Self {
            kv: device.upload(&kv)?,
            table: device.upload(&order[..pages])?,
            table_first: device.upload(&[first_page as u32])?,
            pages,
            k_norm: device.upload(&stored.k_norm)?,
            turns: device.upload(&stored.turns)?,
        })
    }

    /// Random contents of any size, made on the card.
    pub(crate) fn filled(
        device: &Device,
        case: &Case,
        fill: impl Fn(u64, u64) -> Result<(), DeviceError>,
    ) -> Result<Self, DeviceError> {
        // The first of the rows sees furthest back.
        let first_page = case.first_key(case.end + 1 - case.rows) / case.page;
        let pages = case.end.div_ceil(case.page) - first_page;
        let len = pages * case.kv_heads * case.sides() * case.page * case.width();
        let kv = device.zeros::<u16>(len)?;
        fill(device.address(&kv), 2 * len as u64)?;
        let order: Vec<u32> = (0..pages as u32).collect();
        Ok(Self {
            kv,
            table: device.upload(&order)?,
            table_first: device.upload(&[first_page as u32])?,
            pages,
            k_norm: device.upload(&vec![1f32; case.head_dim])?,
            turns: match case.form.values_only {
                true => device.zeros(case.end * PAIRS * 2)?,
                false => device.zeros(2)?,
            },
        })
    }
}

pub(crate) fn check(device: &Device, report: &mut Report, small: bool) -> Result<(), DeviceError> {
    let mut rng = Rng(0xa77e);
    let case = |head_dim, heads, kv_heads, window, page, rows, end| Case {
        head_dim,
        heads,
        kv_heads,
        window,
        page,
        rows,
        end,
        form: PageForm::default(),
    };
    let values = PageForm {
        values_only: true,
        fp8: false,
    };
    let mut cases = vec![
        case(64, 4, 4, 0, 32, 1, 1),
        case(64, 8, 4, 48, 32, 5, 97),
        case(128, 4, 2, 100, 64, 3, 300),
        case(256, 8, 2, 128, 32, 4, 200),
        case(512, 16, 1, 0, 32, 2, 161),
    ];
    cases.push(Case {
        form: values,
        ..case(512, 16, 1, 0, 32, 2, 161)
    });
    cases.push(Case {
        form: values,
        ..case(512, 8, 4, 0, 64, 5, 70)
    });
    if !small {
        cases.push(Case {
            form: values,
            ..case(512, 32, 4, 0, 32, 5, 4500)
        });
        cases.extend([
            case(256, 32, 16, 1024, 32, 5, 1500),
            case(256, 32, 16, 1024, 32, 1, 1024),
            case(512, 32, 4, 0, 32, 9, 4500),
            case(512, 8, 2, 0, 64, 5, 17_500),
            case(256, 8, 2, 512, 32, 9, 3000),
            case(256, 8, 1, 512, 32, 2, 513),
            case(128, 16, 2, 0, 32, 6, 129),
            case(256, 8, 4, 200, 32, 64, 700),
            case(512, 16, 2, 0, 32, 40, 700),
        ]);
    }
    for case in cases {
        one(device, report, &case, &mut rng)?;
        let form = PageForm {
            fp8: true,
            ..case.form
        };
        one(device, report, &Case { form, ..case }, &mut rng)?;
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
        head_dim: dim,
        heads,
        kv_heads,
        window,
        rows,
        end,
        ..
    } = case;
    let rows = rows.min(end);
    let ends: Vec<u32> = (0..rows).map(|r| (end - rows + 1 + r) as u32).collect();
    let first = case.first_key(ends[0] as usize);
    let stored = Stored::random(case, rng);
    let pool = Pool::new(device, case, first, &stored, rng)?;
    // Scores of deviation four: a few keys carry most of the weight.
    let q = rng.normals(rows * heads * dim, 4.0 / (dim as f64).sqrt());
    let q_card = device.upload(&q)?;
    let together = Call::new(device, case, &pool, device.address(&q_card), &ends)?;
    together.launch(device, false)?;
    let out = device.download(&together.out)?;

    let mut near = Score::default();
    for (row, end) in ends.iter().enumerate() {
        for head in 0..heads {
            let at = (row * heads + head) * dim;
            let reference = exact(case, &stored, &q[at..at + dim], head, *end as usize);
            let size = reference.iter().fold(0f64, |a, x| a.max(x.abs()));
            for (d, r) in reference.iter().enumerate() {
                near.add(wide(out[at + d]), *r, 2.0 * ulp(size));
            }
        }
    }
    let name = format!(
        "attention d{dim} {heads}/{kv_heads} window {window} rows {rows} end {end} page {} {}{}",
        case.page,
        if case.form.values_only {
            "values only"
        } else {
            "keys and values"
        },
        if case.form.fp8 { " in FP8" } else { "" }
    );
    report.check(
        &format!("{name} near fp64"),
        near.count,
        near.bad,
        near.worst,
    );

    let mut same = Score::default();
    let width = heads * dim;
    for row in 0..rows {
        let q = device.address(&q_card) + (row * width * 2) as u64;
        let alone = Call::new(device, case, &pool, q, &ends[row..row + 1])?;
        alone.launch(device, false)?;
        same.same(
            &device.download(&alone.out)?,
            &out[row * width..(row + 1) * width],
        );
    }
    report.check(
        &format!("{name} same bits alone"),
        same.count,
        same.bad,
        0.0,
    );
    Ok(())
}

fn exact(case: &Case, stored: &Stored, q: &[u16], head: usize, end: usize) -> Vec<f64> {
    let kv_head = head / (case.heads / case.kv_heads);
    let dim = case.head_dim;
    let at = |position: usize| (position * case.kv_heads + kv_head) * dim;
    let first = case.first_key(end);
    let [score_scale, value_scale] = case.scales().map(f64::from);
    let scores: Vec<f64> = (first..end)
        .map(|p| {
            let products = q.iter().zip(&stored.keys[at(p)..]);
            let sum: f64 = products.map(|(q, k)| wide(*q) * wide(*k)).sum();
            sum * score_scale
        })
        .collect();
    let most = scores.iter().fold(f64::NEG_INFINITY, |a, s| a.max(*s));
    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let mut out = vec![0.0; dim];
    for (p, w) in (first..end).zip(&weights) {
        for (o, v) in out.iter_mut().zip(&stored.values[at(p)..]) {
            *o += w * wide(*v) * value_scale / sum;
        }
    }
    out
}
