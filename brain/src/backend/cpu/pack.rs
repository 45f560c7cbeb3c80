//! Weights to panels, in the form they are stored in: as fast as memory allows, since a cold start
//! should wait for nothing but the disk.

#![allow(
    unsafe_code,
    reason = "panels of one region are filled by several threads"
)]

use super::{
    coded::{Coded, Scales},
    decode,
    expand::Code,
    memory::{Plain, Region},
    panel::{Form, Matrix, PANEL, Packed, Part, flushed},
    pool::{Pool, Shards},
};
use crate::model::{
    checkpoint::Dtype,
    weight::{Form as Stored, Fp8Scale, Nvfp4, Weight},
};

/// Row `.1` of a weight.
type Row<'a> = (&'a Weight, usize);

impl Matrix {
    /// Packs matrices of the same input width, stacked. `bf16`: inputs are bf16 numbers.
    ///
    /// The parts' memory goes back to the system.
    pub(super) fn pack(pool: &Pool, parts: &[&Weight], bf16: bool) -> Self {
        let rows: Vec<Row<'_>> = parts
            .iter()
            .flat_map(|w| (0..w.rows()).map(move |r| (*w, r)))
            .collect();
        let matrix = Self::pack_rows(pool, &rows, bf16);
        parts.iter().for_each(|w| w.release());
        matrix
    }

    /// Packs chosen rows of matrices.
    pub(super) fn pack_rows(pool: &Pool, rows: &[Row<'_>], bf16: bool) -> Self {
        let inputs = rows.first().map_or(0, |(w, _)| w.cols());
        let runs: Vec<&[Row<'_>]> = rows
            .chunk_by(|a, b| Kind::of(a.0, bf16) == Kind::of(b.0, bf16))
            .collect();
        let alone = runs.len() == 1;
        let mut first = 0;
        let parts = runs.into_iter().map(|run| {
            let kind = Kind::of(run[0].0, bf16);
            let part = Part {
                first,
                outputs: run.len(),
                inputs,
                packed: Run {
                    pool,
                    rows: run,
                    inputs,
                }
                .pack(kind, alone),
                words: bf16 && kind.in_bf16(),
            };
            first += run.len();
            part
        });
        let parts = parts.collect();
        Self {
            outputs: rows.len(),
            inputs,
            parts,
        }
    }
}

/// Rows of one kind are packed together.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Words,
    Singles,
    Halves { fp16: bool },
    Fp8 { group: usize, narrow: bool },
    Nvfp4,
    Int4 { group: usize, narrow: bool },
}

impl Kind {
    fn of(weight: &Weight, bf16: bool) -> Self {
        match weight {
            Weight::Float(_) => match weight.form() {
                Stored::Bf16 if bf16 => Kind::Words,
                Stored::Bf16 => Kind::Halves { fp16: false },
                Stored::F16 => Kind::Halves { fp16: true },
                _ => Kind::Singles,
            },
            Weight::Fp8(w) => Kind::Fp8 {
                group: w.group(),
                narrow: matches!(w.scale(), Fp8Scale::Block(t) if t.dtype() == Dtype::BF16),
            },
            Weight::Nvfp4(_) => Kind::Nvfp4,
            Weight::Int4(w) => Kind::Int4 {
                group: w.group(),
                narrow: w.scales().dtype() == Dtype::BF16,
            },
        }
    }

    /// Whether every number without its scale is a bf16 one.
    fn in_bf16(self) -> bool {
        !matches!(self, Kind::Singles | Kind::Halves { .. })
    }
}

/// Rows of one kind, to be packed by the pool's threads.
struct Run<'a> {
    pool: &'a Pool,
    rows: &'a [Row<'a>],
    inputs: usize,
}

/// Bytes of weights that a thread packs at a time.
const CHUNK: usize = 4 << 20;

impl Run<'_> {
    /// As plain numbers, if that is what they are and the matrix has no others.
    fn pack(&self, kind: Kind, alone: bool) -> Packed {
        let inputs = self.inputs;
        let code = match kind {
            Kind::Words => Code::Words(self.words()),
            Kind::Singles => Code::Singles(self.turned(inputs, f32::from_le_bytes)),
            Kind::Halves { fp16 } => Code::Halves {
                codes: self.turned(inputs, u16::from_le_bytes),
                fp16,
            },
            Kind::Fp8 { .. } => Code::Fp8(self.fp8()),
            Kind::Nvfp4 => Code::Nvfp4 {
                codes: self.turned(inputs.div_ceil(8), decode::eight),
                scales: self.block_scales(),
            },
            Kind::Int4 { .. } => Code::Int4(self.turned(inputs.div_ceil(2), u8::from_le_bytes)),
        };
        let code = match code {
            Code::Words(data) if alone => return Packed::Bf16(data),
            Code::Singles(data) if alone => return Packed::F32(data),
            code => code,
        };
        let (group, narrow) = match kind {
            Kind::Fp8 { group, narrow } | Kind::Int4 { group, narrow } => (group, narrow),
            _ => (inputs, false),
        };
        // An odd group would share a word with the next; only one that is a whole row may be odd.
        let group = group.min(inputs).max(1);
        Packed::Coded(Coded {
            outputs: self.rows.len(),
            inputs,
            group,
            code,
            scales: self.scales(inputs.div_ceil(group).max(1), narrow),
        })
    }

    /// Panels of `step` elements, each filled from its rows, on all threads.
    fn filled<T: Plain>(
        &self,
        step: usize,
        fill: impl Fn(&[Row<'_>], &mut [T]) + Sync,
    ) -> Region<T> {
        let panels = self.rows.len().div_ceil(PANEL);
        let mut data = Region::of_weights(panels * step);
        let shards = Shards::new(&mut data);
        let bytes = (step * size_of::<T>()).max(1);
        let group = (CHUNK / bytes).clamp(1, panels.div_ceil(2 * self.pool.threads()).max(1));
        self.pool.run(panels.div_ceil(group), &|chunk, _| {
            let first = chunk * group;
            let rows = &self.rows[first * PANEL..self.rows.len().min((first + group) * PANEL)];
            for (i, rows) in rows.chunks(PANEL).enumerate() {
                // SAFETY: the region holds all panels, and each is in one chunk.
                fill(rows, unsafe { shards.slice((first + i) * step, step) });
            }
            release(rows);
        });
        data
    }

    /// Element `k` of row `j` of a panel to place `k * 32 + j`; `count` elements of `N` bytes a row.
    fn turned<const N: usize, T: Plain>(
        &self,
        count: usize,
        element: impl Fn([u8; N]) -> T + Sync,
    ) -> Region<T> {
        self.filled(count * PANEL, |rows, out| turn(rows, out, &element))
    }

    /// bf16 numbers by pairs, as [`word_place`] has them.
    ///
    /// [`word_place`]: super::panel::word_place
    fn words(&self) -> Region<u16> {
        let pairs = self.inputs.div_ceil(2);
        self.filled(pairs * PANEL * u16::STEP, |rows, out| {
            let (places, _) = out.as_chunks_mut::<2>();
            turn(rows, places, &|[a, b, c, d]: [u8; 4]| {
                [u16::from_le_bytes([c, d]), u16::from_le_bytes([a, b])]
            });
            out.iter_mut().for_each(|word| *word = flushed(*word));
        })
    }

    /// E4M3 codes by pairs, in the places of the words that they will be.
    fn fp8(&self) -> Region<u8> {
        let pairs = self.inputs.div_ceil(2);
        self.filled(pairs * PANEL * 2, |rows, out| {
            let (places, _) = out.as_chunks_mut::<2>();
            turn(rows, places, &|[a, b]: [u8; 2]| [b, a]);
        })
    }

    /// E4M3 scales of NVFP4, `[panel, block, 32]`.
    fn block_scales(&self) -> Region<u8> {
        let blocks = self.inputs.div_ceil(Nvfp4::BLOCK);
        self.filled(blocks * PANEL, |rows, out| {
            for (j, (w, r)) in rows.iter().enumerate() {
                let Weight::Nvfp4(w) = w else {
                    continue;
                };
                let scales = &w.scales()[r * blocks..(r + 1) * blocks];
                for (place, scale) in out.chunks_exact_mut(PANEL).zip(scales) {
                    place[j] = *scale;
                }
            }
        })
    }

    /// What multiplies the sums of groups, `[panel, group, 32]`.
    fn scales(&self, groups: usize, narrow: bool) -> Scales {
        let step = groups * PANEL;
        if narrow {
            // They were bf16 in the file: nothing is lost.
            let bf16 = |scale: f32| (scale.to_bits() >> 16) as u16;
            return Scales::Bf16(self.filled(step, |rows, out| put_scales(rows, out, bf16)));
        }
        Scales::F32(self.filled(step, |rows, out| put_scales(rows, out, |scale| scale)))
    }
}

fn put_scales<T>(rows: &[Row<'_>], out: &mut [T], form: impl Fn(f32) -> T) {
    for (group, places) in out.chunks_exact_mut(PANEL).enumerate() {
        for (place, (w, r)) in places.iter_mut().zip(rows) {
            *place = form(scale_of(w, *r, group));
        }
    }
}

/// What multiplies the sum of a group of a row.
fn scale_of(weight: &Weight, row: usize, group: usize) -> f32 {
    match weight {
        Weight::Float(_) => 1.0,
        Weight::Fp8(w) => w.scale_of(row, group),
        Weight::Nvfp4(w) => w.global(),
        Weight::Int4(w) => w.scale_of(row, group),
    }
}

/// Writes element `k` of row `j` to place `k * 32 + j`. Zeros complete the last element of a row.
///
/// A stretch of all rows comes after the other, so that what is written stays in the nearest cache
/// until its lines are full. Rows are too far from each other for a processor to foresee the next
/// one's: so it is told.
fn turn<const N: usize, T>(rows: &[Row<'_>], out: &mut [T], element: &impl Fn([u8; N]) -> T) {
    /// Bytes of a row's stretch.
    const STRETCH: usize = 256;
    let mut sources: [&[u8]; PANEL] = [&[]; PANEL];
    for (source, (w, r)) in sources.iter_mut().zip(rows) {
        *source = w.row_bytes(*r);
    }
    for (i, out) in out.chunks_mut(STRETCH / N * PANEL).enumerate() {
        let (places, _) = out.as_chunks_mut::<PANEL>();
        for (j, source) in sources.iter().enumerate() {
            let (bytes, next) = stretch(source, i * STRETCH, STRETCH);
            foresee(next);
            let (elements, rest) = bytes.as_chunks::<N>();
            for (place, x) in places.iter_mut().zip(elements) {
                place[j] = element(*x);
            }
            if let (false, Some(place)) = (rest.is_empty(), places.get_mut(elements.len())) {
                let mut bytes = [0; N];
                bytes[..rest.len()].copy_from_slice(rest);
                place[j] = element(bytes);
            }
        }
    }
}

/// So many bytes of a row, and as many that follow; fewer where it ends.
fn stretch(row: &[u8], start: usize, length: usize) -> (&[u8], &[u8]) {
    let rest = row.get(start..).unwrap_or_default();
    let (now, rest) = rest.split_at(rest.len().min(length));
    (now, &rest[..rest.len().min(length)])
}

/// Has bytes brought near that will be read soon.
#[inline(always)]
fn foresee(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which reads nothing and cannot fail.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

/// Gives rows back that lie side by side in their file: what is packed is not held twice.
fn release(rows: &[Row<'_>]) {
    for run in rows.chunk_by(|a, b| std::ptr::eq(a.0, b.0) && a.1 + 1 == b.1) {
        let (weight, first) = run[0];
        weight.release_rows(first..first + run.len());
    }
}
