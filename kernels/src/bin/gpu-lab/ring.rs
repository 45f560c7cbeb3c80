//! The smallest ring between barriers, released in three ways: what racecheck says of each tells how
//! far its word goes (`cuda/ring.cu`).

use marathon_kernels::{
    abi::YardstickArgs,
    device::{Device, DeviceError, Grid},
};

use crate::{data::Rng, report::Report};

const SLOT: usize = 512;
const TURNS: usize = 64;

pub(crate) fn check(device: &Device, report: &mut Report) -> Result<(), DeviceError> {
    let mut rng = Rng(0x51a7);
    let words: Vec<u32> = (0..TURNS * SLOT / 4).map(|_| rng.word() as u32).collect();
    let expected: Vec<u32> = (0..32usize)
        .map(|lane| {
            words.chunks_exact(SLOT / 4).fold(0u32, |sum, turn| {
                let word = turn[(lane ^ 1) * 4..][..4].iter().fold(0, |a, w| a ^ w);
                sum.wrapping_mul(31).wrapping_add(word)
            })
        })
        .collect();
    let data = device.upload(&words)?;
    for kernel in ["ring_every", "ring_elected", "ring_early"] {
        if !report.wants(kernel) {
            continue;
        }
        let out = device.zeros::<u32>(32)?;
        let args = YardstickArgs {
            data: device.address(&data),
            out: device.address(&out),
            bytes: (TURNS * SLOT) as u64,
            seed: 0,
            kind: 0,
        };
        let grid = Grid {
            blocks: [1, 1, 1],
            threads: 64,
            shared: 128 + 2 * SLOT,
        };
        // SAFETY: the data has TURNS slots, the result a word a lane.
        unsafe { device.launch(kernel, grid, &args, false)? };
        let found = device.download(&out)?;
        let bad = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
        // The one that is wrong on purpose is run for the checker's sake alone.
        if kernel != "ring_early" {
            report.check(kernel, expected.len(), bad, 0.0);
        }
    }
    Ok(())
}
