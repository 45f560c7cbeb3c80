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

    /// Bytes of a stage of the small-M kernel's rings.
    const fn small_stage(self) -> usize {
        match self {
            Self::Bf16 | Self::Fp8 => 2048,
            Self::Nvfp4 => 4 * (512 + 64),
        }
    }

    /// Bytes of a stage of the large-M kernel: 128 rows of x, and eight tiles of a granule.
    const fn large_stage(self) -> usize {
        let weights = match self {
            Self::Bf16 => 2048,
            Self::Fp8 => 1024,
            Self::Nvfp4 => 512 + 64,
        };
        128 * GRANULE * 2 + (8usize * weights).next_multiple_of(1024)
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
    /// Small-M kernel: granules of x in a slot of shared memory ([`SmallLinear::chunk`]).
    pub chunk: u32,
    /// Stages of a ring ([`SmallLinear::depth`], [`LargeLinear::depth`]).
    pub depth: u32,
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
    /// Granules of x in a slot. Where a slot holds a block's whole share, there is one slot and x
    /// stays in it; else there are two, and x passes again for every turn of tiles.
    pub chunk: u32,
    /// Stages of a warp's ring ([`LinearArgs::depth`]).
    pub depth: u32,
}

/// What an instance of the small-M kernel is built with.
struct Instance {
    /// Warps that multiply.
    warps: usize,
    /// Stages of a warp's ring, at most.
    depth: usize,
    /// Blocks of it that registers allow on a multiprocessor.
    beside: usize,
    /// Tiles whose sums may be under way to a block.
    inboxes: usize,
    /// Warps that bring x, and that finish tiles.
    others: usize,
}

impl Instance {
    /// The kernels for `rows` rows of x: those of linear.cu.
    const fn of(rows: usize) -> Self {
        let (warps, depth, beside, inboxes, others) = match rows {
            8 => (12, 5, 2, 6, 2),
            16 => (8, 4, 2, 2, 3),
            32 => (8, 4, 1, 2, 6),
            _ => (8, 3, 1, 2, 6),
        };
        Self {
            warps,
            depth,
            beside,
            inboxes,
            others,
        }
    }
}

/// Shared memory for the barriers of a small-M block.
const BARRIERS: usize = 512;
/// Fewest stages of a small-M warp's ring.
const LEAST_DEPTH: usize = 2;
/// Shared memory of a multiprocessor that is enough for any number of rows of the small-M kernel.
const ROOM_FOR_MANY: usize = 192 * 1024;
/// What the system keeps of each block's share.
const RESERVED: usize = 1024;

impl SmallLinear {
    /// Rows that these kernels take on a card with so many bytes of shared memory in a multiprocessor:
    /// 64, or 16 where the rings of more do not fit. [`LargeLinear`] takes any number, with the same bits.
    pub fn most_rows(shared_per_sm: usize) -> usize {
        match shared_per_sm >= ROOM_FOR_MANY {
            true => 64,
            false => 16,
        }
    }

    /// A launch for `m` (1 to 64) rows on a card that runs `clusters` clusters of eight blocks at a
    /// time, a block a multiprocessor, and has `shared_per_sm` bytes of shared memory in each. `k` is
    /// a multiple of 8.
    pub fn plan(
        form: WeightForm,
        m: usize,
        n: usize,
        k: usize,
        clusters: usize,
        shared_per_sm: usize,
    ) -> Self {
        let rows = m.next_power_of_two().clamp(8, 64);
        let instance = Instance::of(rows);
        let units = n.div_ceil(TILE);
        let inboxes = instance.inboxes * SPLITS * rows * 64;
        let stage = instance.warps * form.small_stage();
        let fixed = |depth: usize| BARRIERS + inboxes + depth * stage;
        let x = |chunk: usize, slots: usize| slots * rows * chunk * GRANULE * 2;
        let share = k.div_ceil(GRANULE).div_ceil(SPLITS).max(1);
        let passing = if matches!(rows, 16 | 64) { 4 } else { 8 };
        // Rings as deep as leave room for so many blocks.
        let fit = |beside: usize, chunk: usize, slots: usize| {
            let shared = |depth: usize| fixed(depth) + x(chunk, slots);
            let depth = (LEAST_DEPTH..=instance.depth)
                .rev()
                .find(|d| beside * (shared(*d) + RESERVED) <= shared_per_sm)?;
            Some((chunk, depth, shared(depth)))
        };
        // Two blocks a multiprocessor are better than one, and where all warps have one turn x passes
        // once whether it stays or not.
        let one_turn = units <= clusters * instance.beside * instance.warps;
        let (chunk, depth, shared) = fit(instance.beside, share, 1)
            .or_else(|| fit(instance.beside, passing, 2).filter(|_| one_turn))
            .or_else(|| fit(1, share, 1))
            .or_else(|| fit(1, passing, 2))
            .unwrap_or_else(|| {
                let shared = fixed(LEAST_DEPTH) + x(passing, 2);
                (passing, LEAST_DEPTH, shared)
            });
        let beside = (shared_per_sm / (shared + RESERVED)).clamp(1, instance.beside);
        Self {
            rows,
            grid: ((clusters * beside).clamp(1, units) * SPLITS) as u32,
            block: ((instance.warps + instance.others) * 32) as u32,
            shared,
            chunk: chunk as u32,
            depth: depth as u32,
        }
    }

    /// Name of the kernel in the unit `linear`.
    pub fn kernel(&self, form: WeightForm) -> String {
        format!("linear_{}_m{}", form.name(), self.rows)
    }
}

/// How a large-M product is launched. Nothing here changes a bit of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LargeLinear {
    /// Blocks, each of which has tiles of 128 rows of W by 128 rows of x in turn.
    pub grid: u32,
    /// Threads of a block.
    pub block: u32,
    /// Dynamic shared memory, bytes.
    pub shared: usize,
    /// Stages of the ring ([`LinearArgs::depth`]).
    pub depth: u32,
}

impl LargeLinear {
    /// A launch for any number of rows on a card with `sms` multiprocessors of `shared_per_sm`
    /// bytes of shared memory.
    pub fn plan(form: WeightForm, m: usize, n: usize, sms: usize, shared_per_sm: usize) -> Self {
        let stage = form.large_stage();
        // Barriers, and results on their way out: two groups' 128 lines of 144 bytes. The kernel
        // without groups of warps has neither, and three stages.
        let fixed = 1024 + 2 * 128 * 144;
        let depth = (shared_per_sm.saturating_sub(RESERVED + fixed) / stage).min(8);
        let (depth, fixed) = if depth < 4 { (3, 0) } else { (depth, fixed) };
        Self {
            grid: (m.div_ceil(128) * n.div_ceil(8 * TILE)).min(sms) as u32,
            block: 384,
            shared: fixed + depth * stage,
            depth: depth as u32,
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

    /// Clusters at a time, bytes of shared memory of a multiprocessor.
    const H200: (usize, usize) = (15, 228 * 1024);

    #[test]
    fn every_plan_fits_and_covers() {
        for form in [WeightForm::Bf16, WeightForm::Fp8, WeightForm::Nvfp4] {
            for m in 1..=64 {
                for shared in [100 * 1024, ROOM_FOR_MANY] {
                    let rows = m.min(SmallLinear::most_rows(shared));
                    let small = SmallLinear::plan(form, rows, 5376, 21504, 10, shared);
                    assert!(small.shared + RESERVED <= shared, "{small:?}");
                }
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
                    // A chunk that is passed on holds whole stages of every form.
                    let share = k.div_ceil(GRANULE).div_ceil(SPLITS);
                    assert!(
                        p.chunk as usize >= share || p.chunk.is_multiple_of(4),
                        "{p:?}"
                    );
                    assert!(
                        p.grid > 0 && (p.grid as usize).is_multiple_of(SPLITS),
                        "{p:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn two_blocks_share_a_multiprocessor_at_few_rows() {
        for form in [WeightForm::Bf16, WeightForm::Fp8, WeightForm::Nvfp4] {
            let p = SmallLinear::plan(form, 5, 43008, 5376, H200.0, H200.1);
            assert!(2 * (p.shared + RESERVED) <= H200.1, "{p:?}");
            assert_eq!((p.grid, p.chunk), (2 * 15 * 8, 11), "{p:?}");
            // An eighth of 21,504 columns leaves no room for a second block, but x passes only once.
            let p = SmallLinear::plan(form, 5, 5376, 21504, H200.0, H200.1);
            assert_eq!((p.grid, p.chunk), (2 * 15 * 8, 8), "{p:?}");
        }
    }

    #[test]
    fn x_passes_in_turns_where_a_share_of_it_is_too_large() {
        let p = SmallLinear::plan(WeightForm::Bf16, 64, 5376, 21504, H200.0, H200.1);
        assert_eq!(p.chunk, 4, "{p:?}");
        let p = SmallLinear::plan(WeightForm::Bf16, 16, 5376, 21504, H200.0, H200.1);
        assert_eq!(p.chunk, 42, "{p:?}");
    }

    #[test]
    fn the_ring_of_many_rows_fits_every_card() {
        for form in [WeightForm::Bf16, WeightForm::Fp8, WeightForm::Nvfp4] {
            for shared in [H200.1, 100 * 1024] {
                let p = LargeLinear::plan(form, 4096, 5376, 132, shared);
                assert!(p.depth >= 3 && p.shared + RESERVED <= shared, "{p:?}");
            }
        }
    }

    #[test]
    fn packed_sizes_round_up() {
        assert_eq!(WeightForm::Bf16.packed_bytes(17, 65), (2 * 2 * 2048, 0));
        assert_eq!(WeightForm::Nvfp4.packed_bytes(16, 64), (512, 64));
    }
}
