//! Attention by tiles: the bits of the unit `attention`, for every form of pages and number of rows.

use marathon_kernels::{
    abi::{AttentionArgs, PageForm, TilePlan},
    device::{Buffer, Device, DeviceError, Grid},
};

use crate::{
    attention::{Call, Case, Pool, Stored},
    data::{Rng, Score},
    report::Report,
};

/// Tiles of some rows, and where the result goes.
pub(crate) struct Tiles {
    plan: TilePlan,
    args: AttentionArgs,
    rows: usize,
    room: Buffer<u8>,
}

impl Tiles {
    /// The rows of `call`, whose result is overwritten; at most `room` bytes of tiles at a time.
    pub(crate) fn new(
        device: &Device,
        case: &Case,
        call: &Call,
        rows: usize,
        room: usize,
    ) -> Result<Option<Self>, DeviceError> {
        let keys = case.first_key(case.end + 1 - rows)..case.end;
        let heads = [case.heads, case.kv_heads];
        let Some(plan) = TilePlan::plan(case.head_dim, heads, rows, keys, case.form, room) else {
            return Ok(None);
        };
        Ok(Some(Self {
            plan,
            args: call.args,
            rows,
            room: device.zeros(plan.room())?,
        }))
    }

    pub(crate) fn launch(&self, device: &Device, dependent: bool) -> Result<(), DeviceError> {
        let room = device.address(&self.room);
        for (args, heads) in self.plan.launches(self.args, room, [0, self.rows, 0]) {
            let prepare = Grid {
                blocks: self.plan.prepare_grid(heads),
                threads: TilePlan::PREPARE_THREADS,
                shared: 0,
            };
            let attend = Grid {
                blocks: self.plan.grid(heads),
                threads: TilePlan::THREADS,
                shared: self.plan.shared(),
            };
            // SAFETY: the call's buffers hold its rows, the pool every page of the table, the room
            // the tiles of as many heads as a launch takes.
            unsafe {
                device.launch(&self.plan.prepare_kernel(), prepare, &args, dependent)?;
                device.launch(&self.plan.kernel(), attend, &args, dependent)?;
            }
        }
        Ok(())
    }
}

/// Whether this card has the kernels.
pub(crate) fn there(device: &Device) -> bool {
    device.kernels().any(|name| name == "attention_tiles_d512")
}

pub(crate) fn check(device: &Device, report: &mut Report, small: bool) -> Result<(), DeviceError> {
    if !there(device) {
        return Ok(());
    }
    let mut rng = Rng(0x711e5);
    let case = |head_dim, [heads, kv_heads]: [usize; 2], window, page, rows, end| Case {
        head_dim,
        heads,
        kv_heads,
        window,
        page,
        rows,
        end,
        form: PageForm::default(),
    };
    let mut cases = vec![
        case(256, [4, 2], 48, 32, 40, 150),
        case(512, [8, 1], 0, 64, 9, 300),
    ];
    if !small {
        cases.extend([
            case(256, [8, 8], 0, 32, 1, 1),
            case(256, [8, 4], 0, 96, 64, 64),
            case(256, [32, 16], 1024, 32, 300, 1500),
            case(256, [8, 2], 512, 96, 512, 3000),
            case(256, [16, 1], 200, 32, 65, 700),
            case(512, [8, 1], 0, 32, 1, 1),
            case(512, [16, 2], 0, 96, 130, 130),
            case(512, [32, 4], 0, 32, 37, 4500),
            case(512, [8, 2], 0, 64, 100, 17_500),
            case(512, [16, 1], 0, 32, 512, 700),
        ]);
    }
    for case in cases {
        for (values_only, fp8) in [(false, false), (false, true), (true, false), (true, true)] {
            if values_only && case.head_dim != 512 {
                continue;
            }
            let form = PageForm { values_only, fp8 };
            one(device, report, &Case { form, ..case }, &mut rng)?;
        }
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
        rows,
        end,
        ..
    } = case;
    let ends: Vec<u32> = (0..rows).map(|r| (end - rows + 1 + r) as u32).collect();
    let stored = Stored::random(case, rng);
    let first = case.first_key(ends[0] as usize);
    let pool = Pool::new(device, case, first, &stored, rng)?;
    let q = rng.normals(rows * heads * dim, 4.0 / (dim as f64).sqrt());
    let q = device.upload(&q)?;
    let call = Call::new(device, case, &pool, device.address(&q), &ends)?;
    call.launch(device, false)?;
    let expected = device.download(&call.out)?;

    // All heads at once, and one by one.
    let one_head = end.div_ceil(32) * 32 * dim * 4;
    let mut same = Score::default();
    for room in [1 << 30, one_head] {
        // The rows are written over what is no result.
        let to = Call::new(device, case, &pool, device.address(&q), &ends)?;
        let Some(tiles) = Tiles::new(device, case, &to, rows, room)? else {
            same.add(1.0, 0.0, 0.5);
            continue;
        };
        tiles.launch(device, false)?;
        same.same(&device.download(&to.out)?, &expected);
    }
    let name = format!(
        "attention tiles {}d{dim} {heads}/{} window {} rows {rows} end {end} page {} same bits",
        case.form.name(),
        case.kv_heads,
        case.window,
        case.page
    );
    report.check(&name, same.count, same.bad, 0.0);
    Ok(())
}
