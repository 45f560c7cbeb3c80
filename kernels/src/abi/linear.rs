//! Products over packed weights: parameter blocks and launch plans.

use std::mem::{offset_of, size_of};

use super::DevicePtr;

/// Columns of a granule of packed weights.
pub const GRANULE: usize = 64;
/// Rows of a tile of packed weights, and what [`LinearArgs::n`] is rounded up to in memory.
pub const TILE: usize = 16;
/// Parts K is cut into, whatever the shape: part of the numeric definition.
pub const SPLITS: usize = 8;
/// What the row scale of a packed NVFP4 matrix is multiplied by.
pub const NVFP4_GAIN: f32 = 256.0;

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightForm {
    /// Two bytes a weight.
    Bf16,
    /// E4M3 codes with a scale per row.
    Fp8,
    /// E2M1 codes with an E4M3 scale per 16 of a row and a scale per row.
    Nvfp4,
}

impl WeightForm {
    /// Bytes of a packed matrix: codes, then block scales.
    pub fn packed_bytes(self, n: usize, k: usize) -> (usize, usize) {
        let granules = n.div_ceil(TILE) * k.div_ceil(GRANULE);
        let (codes, scales) = match self {
            Self::Bf16 => (2048, 0),
            Self::Fp8 => (1024, 0),
            Self::Nvfp4 => (512, 64),
        };
        (granules * codes, granules * scales)
    }

    /// Bytes of a warp's ring in the small-M kernel.
    const fn ring(self) -> usize {
        match self {
            Self::Bf16 | Self::Fp8 => 4 * 1024,
            Self::Nvfp4 => 5 * 1024,
        }
    }

    /// Bytes of a stage of the large-M kernel: eight tiles of a granule, and 128 rows of x.
    const fn large_stage(self) -> usize {
        let weights = match self {
            Self::Bf16 => 2048,
            Self::Fp8 => 1024,
            Self::Nvfp4 => 512 + 64,
        };
        8 * weights + 128 * GRANULE * 2
    }

    /// The name of the form in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::Nvfp4 => "nvfp4",
        }
    }
}

/// How a product's result leaves the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Epilogue {
    /// `y = bf16(t)`.
    Store = 0,
    /// Rows are gate and up in turns of eight: `y = bf16(gelu(bf16 gate) * bf16 up)`.
    Gated = 1,
    /// `y = bf16(gelu(bf16 t) * z)`.
    GeluMul = 2,
    /// `y = softcap(bf16 t)` in fp32; `bf16 t` itself where the cap is 0.
    Logits = 3,
}

/// `y[m][n] = x[m][k] W[n][k]^T`. Widths in elements; `ldx`, `ldy`, `ldz` multiples of 8.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LinearArgs {
    /// Packed tiles.
    pub weight: DevicePtr,
    /// Packed block scales (NVFP4).
    pub block_scale: DevicePtr,
    /// fp32 `[n]`, or 0.
    pub row_scale: DevicePtr,
    /// bf16 `[m][ldx]`, 16-byte aligned.
    pub x: DevicePtr,
    /// bf16 `[m][ldy]`; fp32 for logits.
    pub y: DevicePtr,
    /// bf16 `[m][ldz]` ([`Epilogue::GeluMul`]).
    pub z: DevicePtr,
    /// Rows of x.
    pub m: u32,
    /// Rows of the packed matrix.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// Pitch of x.
    pub ldx: u32,
    /// Pitch of y.
    pub ldy: u32,
    /// Pitch of z.
    pub ldz: u32,
    /// An [`Epilogue`].
    pub epilogue: u32,
    /// Logits: the cap, or 0.
    pub softcap: f32,
    /// Small-M kernel: granules of x in shared memory at a time ([`SmallLinear::chunk`]).
    pub chunk: u32,
    /// Zero.
    pub pad: u32,
}

const _: () = assert!(size_of::<LinearArgs>() == 88 && offset_of!(LinearArgs, m) == 48);

/// Brings a matrix, or a part of a fused one, from checkpoint order into zeroed packed tiles.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PackArgs {
    /// Row-major `[n][k]`: bf16, E4M3 codes, or E2M1 nibbles `[n][k/2]`, low nibble first.
    pub source: DevicePtr,
    /// NVFP4: E4M3 `[n][k/16]`.
    pub scales: DevicePtr,
    /// Packed tiles of the whole matrix.
    pub weight: DevicePtr,
    /// NVFP4: packed block scales of the whole matrix.
    pub block_scale: DevicePtr,
    /// `u32` that counts codes no valid checkpoint holds.
    pub errors: DevicePtr,
    /// Rows of this part.
    pub n: u32,
    /// Columns.
    pub k: u32,
    /// First row of this part in the whole matrix.
    pub first: u32,
    /// 0: rows follow each other; 1: gate part, 2: up part, in turns of eight.
    pub interleave: u32,
}

const _: () = assert!(size_of::<PackArgs>() == 56 && offset_of!(PackArgs, n) == 40);

/// How a small-M product is launched. Nothing here changes a bit of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallLinear {
    /// Rows of x the kernel is built for: 8, 16, 32 or 64.
    pub rows: usize,
    /// Blocks; clusters of eight.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory, bytes.
    pub shared: usize,
    /// Granules of x in shared memory at a time.
    pub chunk: u32,
}

impl SmallLinear {
    /// A launch for `m` (1 to 64) rows on a card with `sms` multiprocessors that lend a block
    /// `shared_per_sm` bytes of shared memory all told.
    pub fn plan(
        form: WeightForm,
        m: usize,
        n: usize,
        k: usize,
        sms: usize,
        shared_per_sm: usize,
    ) -> Self {
        let rows = m.next_power_of_two().clamp(8, 64);
        let resident = if rows <= 16 { 3 } else { 2 };
        let tiles = n.div_ceil(TILE);
        let slots = (sms * resident / SPLITS).max(1);
        // Fewer warps where eight would leave blocks without work.
        let warps = [8usize, 4, 2, 1]
            .into_iter()
            .find(|w| tiles.div_ceil(*w) * 2 > slots)
            .unwrap_or(1);
        let groups = tiles.div_ceil(warps);
        let turns = groups.div_ceil(slots);
        let clusters = groups.div_ceil(turns).max(1);
        let partial = rows * (warps * TILE + 4) * 4;
        let fixed = warps * form.ring() + partial;
        let per_granule = 2 * (rows / 8) * 512;
        // The system keeps 1 KiB of each block's share.
        let budget = (shared_per_sm / resident).saturating_sub(1024 + fixed);
        let most = k.div_ceil(GRANULE).div_ceil(SPLITS).max(1);
        let chunk = (budget / per_granule).clamp(1, most);
        Self {
            rows,
            grid: (clusters * SPLITS) as u32,
            block: (warps * 32) as u32,
            shared: fixed + chunk * per_granule,
            chunk: chunk as u32,
        }
    }

    /// Name of the kernel in the unit `linear`.
    pub fn kernel(&self, form: WeightForm) -> String {
        format!("linear_{}_m{}", form.name(), self.rows)
    }
}

/// How a large-M product is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LargeLinear {
    /// Blocks.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory, bytes.
    pub shared: usize,
}

impl LargeLinear {
    /// A launch for any number of rows.
    pub fn plan(form: WeightForm, m: usize, n: usize) -> Self {
        Self {
            grid: (m.div_ceil(128) * n.div_ceil(8 * TILE)) as u32,
            block: 256,
            shared: 4 * form.large_stage(),
        }
    }

    /// Name of the kernel in the unit `linear_large`.
    pub fn kernel(form: WeightForm) -> String {
        format!("linear_large_{}", form.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: (usize, usize) = (132, 228 * 1024);

    #[test]
    fn every_plan_fits_and_covers() {
        for form in [WeightForm::Bf16, WeightForm::Fp8, WeightForm::Nvfp4] {
            for m in 1..=64 {
                for (n, k) in [
                    (43008, 5376),
                    (5376, 21504),
                    (16384, 5376),
                    (2560, 256),
                    (24, 40),
                ] {
                    let p = SmallLinear::plan(form, m, n, k, H200.0, H200.1);
                    assert!(p.rows >= m && p.rows <= 64);
                    assert!(p.shared <= 227 * 1024, "{p:?}");
                    let clusters = p.grid as usize / SPLITS;
                    let warps = p.block as usize / 32;
                    // A cluster without a tile would wait for a barrier nobody reaches.
                    assert!((clusters - 1) * warps < n.div_ceil(TILE), "{p:?}");
                    assert!(p.chunk >= 1);
                }
            }
        }
    }

    #[test]
    fn three_blocks_share_a_multiprocessor_at_few_rows() {
        let p = SmallLinear::plan(WeightForm::Bf16, 5, 43008, 5376, H200.0, H200.1);
        assert!(3 * (p.shared + 1024) <= H200.1, "{p:?}");
        assert_eq!((p.grid, p.block, p.chunk), (48 * 8, 256, 11));
    }

    #[test]
    fn packed_sizes_round_up() {
        assert_eq!(WeightForm::Bf16.packed_bytes(17, 65), (2 * 2 * 2048, 0));
        assert_eq!(WeightForm::Nvfp4.packed_bytes(16, 64), (512, 64));
    }
}
