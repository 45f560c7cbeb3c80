//! A piece of a product: some rows against some outputs of a part.

#![allow(unsafe_code, reason = "vector kernels")]

use std::mem::MaybeUninit;

use super::{
    decode::DEAL,
    form::{Bf16, E2m1, F32, Fp8, Step, Stored},
    matrix::{Arrangement, Codes, Part},
    scales::{BlockScales, GroupScales, Table},
    sheet::Stretch,
    simd::{Kernel, Lanes, Level, dispatch},
    tile::{Inputs, Scales, Weights, chain, grouped},
};
use crate::{model::weight::Nvfp4, sched::math::round_bf16};

/// Rows against which weights are expanded in registers, and not put down.
pub(super) const FEW: usize = 6;
/// Rows that share one expansion.
pub(super) const MOST_ROWS: usize = 48;
/// Outputs that are expanded together.
pub(super) const STRIP: usize = 16;
/// Inputs of a stretch of bf16 numbers: six rows of them stay in the nearest cache.
const WORDS: usize = 1024;
/// And of fp32 numbers. A group has at least 16 inputs of these, and 32 of those.
const SINGLES: usize = WORDS / 2;

/// Rows of inputs and the distance between them.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    Words(&'a [u16], usize),
    Singles(&'a [f32], usize),
}

/// Some rows against some outputs.
pub(super) struct Claim<'a> {
    pub(super) part: &'a Part,
    pub(super) first: usize,
    pub(super) outputs: usize,
    pub(super) x: Rows<'a>,
    /// At most [`MOST_ROWS`].
    pub(super) rows: usize,
    /// The first output of the first row. These outputs are written, and nothing else.
    pub(super) out: *mut f32,
    /// Between rows of `out`.
    pub(super) stride: usize,
    pub(super) round: bool,
}

/// Room on the stack of the computing thread.
#[repr(align(64))]
struct Rooms {
    /// Lanes of every row and output, `[MOST_ROWS, STRIP, 16]`.
    lanes: MaybeUninit<[f32; MOST_ROWS * STRIP * 16]>,
    /// Numbers of a stretch, `[STRIP, WORDS]` or `[STRIP, SINGLES]`.
    sheet: MaybeUninit<[f32; STRIP * SINGLES]>,
    /// Lanes of scales, `[STRIP, groups, 16]`.
    scales: MaybeUninit<[f32; STRIP * SINGLES]>,
}

impl Rooms {
    #[inline(always)]
    fn new() -> Self {
        Self {
            lanes: MaybeUninit::uninit(),
            sheet: MaybeUninit::uninit(),
            scales: MaybeUninit::uninit(),
        }
    }
}

impl Claim<'_> {
    /// Computes it, at a level that there is.
    pub(super) fn run(self, level: Level) {
        let direct = matches!(
            (self.x, self.part.codes),
            (Rows::Words(..), Codes::Bf16 | Codes::E2m1 | Codes::E4m3)
                | (Rows::Singles(..), Codes::F32)
        );
        match direct && self.rows <= FEW {
            true => dispatch(level, Few(self)),
            false => dispatch(level, Many(self)),
        }
    }
}

/// A few rows, and weights that are expanded in registers.
struct Few<'a>(Claim<'a>);

impl Kernel for Few<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let claim = self.0;
        // SAFETY: `product` and `row_product` checked that rows of inputs and outputs are there; rows
        // of weights are as long as the part says; a row of inputs goes on with zeros.
        unsafe {
            match (claim.x, claim.part.codes) {
                (Rows::Words(x, stride), Codes::E4m3) => match claim.part.group {
                    None => claim.whole_rows::<V, Fp8>(x.as_ptr(), stride),
                    Some(group) => claim.grouped_rows::<V, Fp8>(x.as_ptr(), stride, group / 32),
                },
                (Rows::Words(x, stride), Codes::E2m1) => claim.blocks::<V>(x.as_ptr(), stride),
                (Rows::Words(x, stride), _) => claim.whole_rows::<V, Bf16>(x.as_ptr(), stride),
                (Rows::Singles(x, stride), _) => claim.whole_rows::<V, F32>(x.as_ptr(), stride),
            }
        }
    }
}

/// Any rows, and weights that are expanded on the stack, or plain.
struct Many<'a>(Claim<'a>);

impl Kernel for Many<'_> {
    #[inline(always)]
    fn run<V: Lanes>(self) {
        let claim = self.0;
        let mut rooms = Rooms::new();
        // SAFETY: as for `Few`.
        unsafe {
            match (claim.x, claim.part.codes) {
                (Rows::Words(x, stride), Codes::Bf16) => {
                    claim.stretches::<V, Bf16>(x.as_ptr(), stride, &mut rooms);
                }
                (Rows::Words(x, stride), _) => {
                    claim.expanded_words::<V>(x.as_ptr(), stride, &mut rooms);
                }
                (Rows::Singles(x, stride), Codes::F32) => {
                    claim.stretches::<V, F32>(x.as_ptr(), stride, &mut rooms);
                }
                (Rows::Singles(x, stride), _) => {
                    claim.expanded_singles::<V>(x.as_ptr(), stride, &mut rooms);
                }
            }
        }
    }
}

/// Rows of weights of a few outputs, over a stretch. Behind the last output stands it again.
struct Strip {
    starts: [*const u8; STRIP],
    outputs: usize,
    /// Of the claim's outputs, the first.
    first: usize,
    /// Bytes of a row.
    length: usize,
    /// See [`Weights`].
    ahead: Ahead,
}

/// Lanes that are kept from stretch to stretch, `[rows, STRIP, 16]`.
struct Kept {
    room: *mut f32,
    first: bool,
    last: bool,
}

/// What is fetched while a strip is read.
#[derive(Clone, Copy)]
enum Ahead {
    Nothing,
    /// The rows that come next.
    Rows,
    /// What comes next of the same rows.
    Bytes(usize),
}

/// Longest row whose successor is fetched while it is read: farther ahead than that, what was fetched
/// would be gone before it is used.
const LONG: usize = 8 << 10;
/// How far ahead a longer row is fetched that several rows of inputs share. For one, a processor
/// foresees it as well.
const SOON: usize = 1 << 10;

impl Claim<'_> {
    /// Weights that steps take as they are stored, whole rows of them.
    #[inline(always)]
    unsafe fn whole_rows<V: Lanes, F: Stored>(
        &self,
        x: *const <F::Step as Step>::Number,
        stride: usize,
    ) {
        let bytes = self.part.codes.bytes(self.part.inputs);
        let x = Inputs { x, stride };
        for first in (0..self.outputs).step_by(STRIP) {
            let strip = self.strip(first, 0, bytes);
            // SAFETY: the caller's word.
            unsafe { self.chains::<V, F>(&x, &strip, &Kept::NOTHING) };
        }
    }

    /// Whole rows with a scale for so many units.
    #[inline(always)]
    unsafe fn grouped_rows<V: Lanes, F: Stored>(
        &self,
        x: *const <F::Step as Step>::Number,
        stride: usize,
        group: usize,
    ) {
        let bytes = self.part.codes.bytes(self.part.inputs);
        let x = Inputs { x, stride };
        for first in (0..self.outputs).step_by(STRIP) {
            let strip = self.strip(first, 0, bytes);
            let scales = GroupScales {
                part: self.part,
                first: self.first + first,
                outputs: strip.outputs,
            };
            // SAFETY: the caller's word.
            unsafe { self.groups::<V, F>(&x, &strip, &Kept::NOTHING, group, &scales) };
        }
    }

    /// Whole rows, a stretch at a time.
    #[inline(always)]
    unsafe fn stretches<V: Lanes, F: Stored>(
        &self,
        x: *const <F::Step as Step>::Number,
        stride: usize,
        rooms: &mut Rooms,
    ) {
        let bytes = self.part.codes.bytes(self.part.inputs);
        let length = WORDS / 32 * 64;
        for first in (0..self.outputs).step_by(STRIP) {
            for from in (0..bytes).step_by(length) {
                let to = bytes.min(from + length);
                let strip = self.strip(first, from, to);
                let kept = Kept {
                    room: rooms.lanes.as_mut_ptr().cast(),
                    first: from == 0,
                    last: to == bytes,
                };
                let x = Inputs {
                    x: x.wrapping_add(from / F::BYTES * F::Step::INPUTS),
                    stride,
                };
                // SAFETY: the caller's word.
                unsafe { self.chains::<V, F>(&x, &strip, &kept) };
            }
        }
    }

    /// NVFP4, expanded on the way.
    #[inline(always)]
    unsafe fn blocks<V: Lanes>(&self, x: *const u16, stride: usize) {
        let bytes = self.part.codes.bytes(self.part.inputs);
        let blocks = self.part.inputs.div_ceil(Nvfp4::BLOCK);
        for first in (0..self.outputs).step_by(STRIP) {
            let strip = self.strip(first, 0, bytes);
            let mut scales = BlockScales {
                starts: [[].as_ptr(); STRIP],
                blocks,
            };
            for (i, start) in scales.starts.iter_mut().enumerate() {
                let output = self.first + first + i.min(strip.outputs - 1);
                *start = self.part.block_scales(output).as_ptr();
            }
            let x = Inputs { x, stride };
            // SAFETY: the caller's word.
            unsafe { self.groups::<V, E2m1>(&x, &strip, &Kept::NOTHING, 1, &scales) };
        }
    }

    /// Weights that are expanded to bf16 a stretch at a time.
    #[inline(always)]
    unsafe fn expanded_words<V: Lanes>(&self, x: *const u16, stride: usize, rooms: &mut Rooms) {
        let sheet: *mut u16 = rooms.sheet.as_mut_ptr().cast();
        let scales: *mut f32 = rooms.scales.as_mut_ptr().cast();
        // A group of dealt inputs is all that are dealt out together.
        let group = match self.part.arrangement {
            Arrangement::Dealt => Some(DEAL),
            _ => self.part.group,
        };
        let stretch = group.map_or(WORDS, |group| WORDS / group * group);
        for first in (0..self.outputs).step_by(STRIP) {
            for from in (0..self.part.inputs).step_by(stretch) {
                let inputs = from..self.part.inputs.min(from + stretch);
                let numbers = match self.part.arrangement {
                    // Of the last, fewer are dealt to all places.
                    Arrangement::Dealt => inputs.len().next_multiple_of(DEAL),
                    _ => inputs.len(),
                };
                let strip = self.strip_of(first, sheet.cast(), 2 * WORDS, 2 * numbers);
                for i in 0..strip.outputs {
                    let stretch = self.stretch(first + i, &inputs);
                    // SAFETY: the sheet has room for a stretch of each.
                    unsafe { stretch.put_words::<V>(sheet.add(i * WORDS)) };
                }
                let kept = Kept {
                    room: rooms.lanes.as_mut_ptr().cast(),
                    first: from == 0,
                    last: inputs.end == self.part.inputs,
                };
                let x = Inputs {
                    x: x.wrapping_add(from),
                    stride,
                };
                let Some(group) = group else {
                    // SAFETY: the caller's word.
                    unsafe { self.chains::<V, Bf16>(&x, &strip, &kept) };
                    continue;
                };
                let groups = inputs.len().div_ceil(group);
                for i in 0..STRIP {
                    let output = first + i.min(strip.outputs - 1);
                    for g in 0..groups {
                        // SAFETY: there are that many scales, and room for them.
                        unsafe {
                            let scale = self.scale::<V>(output, from / group + g);
                            scale.store(scales.add((i * groups + g) * 16));
                        }
                    }
                }
                let table = Table { scales, groups };
                // SAFETY: the caller's word.
                unsafe { self.groups::<V, Bf16>(&x, &strip, &kept, group / 32, &table) };
            }
        }
    }

    /// Weights that are expanded to fp32 a stretch at a time.
    #[inline(always)]
    unsafe fn expanded_singles<V: Lanes>(&self, x: *const f32, stride: usize, rooms: &mut Rooms) {
        let sheet: *mut f32 = rooms.sheet.as_mut_ptr().cast();
        let scales: *mut f32 = rooms.scales.as_mut_ptr().cast();
        let group = self.part.group;
        let stretch = group.map_or(SINGLES, |group| SINGLES / group * group);
        for first in (0..self.outputs).step_by(STRIP) {
            for from in (0..self.part.inputs).step_by(stretch) {
                let inputs = from..self.part.inputs.min(from + stretch);
                let strip = self.strip_of(first, sheet.cast(), 4 * SINGLES, 4 * inputs.len());
                for i in 0..strip.outputs {
                    let stretch = self.stretch(first + i, &inputs);
                    // SAFETY: the sheet has room for a stretch of each.
                    unsafe { stretch.put_singles(sheet.add(i * SINGLES)) };
                }
                let kept = Kept {
                    room: rooms.lanes.as_mut_ptr().cast(),
                    first: from == 0,
                    last: inputs.end == self.part.inputs,
                };
                let x = Inputs {
                    x: x.wrapping_add(from),
                    stride,
                };
                let Some(group) = group else {
                    // SAFETY: the caller's word.
                    unsafe { self.chains::<V, F32>(&x, &strip, &kept) };
                    continue;
                };
                let groups = inputs.len().div_ceil(group);
                for i in 0..STRIP {
                    let output = self.first + first + i.min(strip.outputs - 1);
                    for g in 0..groups {
                        let scale = self.part.scale(output, from / group + g);
                        // SAFETY: there is room for so many scales.
                        unsafe { V::splat(scale).store(scales.add((i * groups + g) * 16)) };
                    }
                }
                let table = Table { scales, groups };
                // SAFETY: the caller's word.
                unsafe { self.groups::<V, F32>(&x, &strip, &kept, group / 16, &table) };
            }
        }
    }

    /// What multiplies the lanes of an output over a group, dealt or not.
    #[inline(always)]
    unsafe fn scale<V: Lanes>(&self, output: usize, group: usize) -> V {
        let output = self.first + output;
        if self.part.arrangement != Arrangement::Dealt {
            return V::splat(self.part.scale(output, group));
        }
        let scales = &self.part.block_scales(output)[16 * group..];
        let mut sixteen = [0; 16];
        let count = scales.len().min(16);
        sixteen[..count].copy_from_slice(&scales[..count]);
        // SAFETY: these are sixteen.
        unsafe { V::scales(sixteen.as_ptr()) }
    }

    /// Bytes of some inputs of an output.
    fn stretch(&self, output: usize, inputs: &std::ops::Range<usize>) -> Stretch<'_> {
        let codes = self.part.codes;
        let row = self.part.codes(self.first + output);
        Stretch {
            codes,
            bytes: &row[codes.bytes(inputs.start)..codes.bytes(inputs.end)],
        }
    }

    /// A strip of rows as they are stored, some of their bytes.
    #[inline(always)]
    fn strip(&self, first: usize, from: usize, to: usize) -> Strip {
        let outputs = STRIP.min(self.outputs - first);
        let mut starts = [std::ptr::null(); STRIP];
        for (i, start) in starts.iter_mut().enumerate() {
            let row = self.part.codes(self.first + first + i.min(outputs - 1));
            *start = row[from..to].as_ptr();
        }
        Strip {
            starts,
            outputs,
            first,
            length: to - from,
            ahead: match (self.rows, to - from) {
                (0..=FEW, 0..=LONG) => Ahead::Rows,
                (2..=FEW, _) => Ahead::Bytes(SOON),
                _ => Ahead::Nothing,
            },
        }
    }

    /// A strip of rows that were put down.
    #[inline(always)]
    fn strip_of(&self, first: usize, sheet: *const u8, stride: usize, length: usize) -> Strip {
        let outputs = STRIP.min(self.outputs - first);
        let mut starts = [sheet; STRIP];
        for (i, start) in starts.iter_mut().enumerate() {
            *start = sheet.wrapping_add(i.min(outputs - 1) * stride);
        }
        Strip {
            starts,
            outputs,
            first,
            length,
            ahead: Ahead::Nothing,
        }
    }

    #[inline(always)]
    unsafe fn chains<V: Lanes, F: Stored>(&self, x: &Inputs<F::Step>, strip: &Strip, kept: &Kept) {
        macro_rules! rows {
            ($row:expr, $m:literal, $p:literal) => {
                // SAFETY: the caller's word.
                unsafe { self.chain_rows::<V, F, $m, $p>(x, strip, kept, $row) }
            };
        }
        let most = if V::WIDE { 6 } else { 2 };
        for row in (0..self.rows).step_by(most) {
            match (self.rows - row, V::WIDE) {
                (1, true) => rows!(row, 1, 4),
                (2, true) => rows!(row, 2, 4),
                (3, true) => rows!(row, 3, 4),
                (4, true) => rows!(row, 4, 4),
                (5, true) => rows!(row, 5, 4),
                (_, true) => rows!(row, 6, 4),
                (1, false) => rows!(row, 1, 2),
                (_, false) => rows!(row, 2, 2),
            }
        }
    }

    #[inline(always)]
    unsafe fn chain_rows<V: Lanes, F: Stored, const M: usize, const P: usize>(
        &self,
        x: &Inputs<F::Step>,
        strip: &Strip,
        kept: &Kept,
        row: usize,
    ) {
        let x = Inputs {
            x: x.x.wrapping_add(row * x.stride),
            stride: x.stride,
        };
        for output in (0..strip.outputs).step_by(P) {
            // SAFETY: the caller's word.
            unsafe {
                let mut sums = kept.get::<V, M, P>(row, output);
                chain::<V, F, M, P>(&x, &strip.weights(output), &mut sums);
                self.keep(strip, kept, row, output, &sums);
            }
        }
    }

    #[inline(always)]
    unsafe fn groups<V: Lanes, F: Stored>(
        &self,
        x: &Inputs<F::Step>,
        strip: &Strip,
        kept: &Kept,
        group: usize,
        scales: &impl Scales,
    ) {
        macro_rules! rows {
            ($row:expr, $m:literal, $p:literal) => {
                // SAFETY: the caller's word.
                unsafe {
                    self.group_rows::<V, F, $m, $p>(x, strip, kept, (group, scales), $row);
                }
            };
        }
        let most = if V::WIDE { 6 } else { 2 };
        for row in (0..self.rows).step_by(most) {
            match (self.rows - row, V::WIDE) {
                (1, true) => rows!(row, 1, 4),
                (2, true) => rows!(row, 2, 4),
                (3, true) => rows!(row, 3, 4),
                (4, true) => rows!(row, 4, 2),
                (5, true) => rows!(row, 5, 2),
                (_, true) => rows!(row, 6, 2),
                (1, false) => rows!(row, 1, 2),
                (_, false) => rows!(row, 2, 2),
            }
        }
    }

    #[inline(always)]
    unsafe fn group_rows<V: Lanes, F: Stored, const M: usize, const P: usize>(
        &self,
        x: &Inputs<F::Step>,
        strip: &Strip,
        kept: &Kept,
        (group, scales): (usize, &impl Scales),
        row: usize,
    ) {
        let x = Inputs {
            x: x.x.wrapping_add(row * x.stride),
            stride: x.stride,
        };
        for output in (0..strip.outputs).step_by(P) {
            let weights = strip.weights::<P>(output);
            // SAFETY: the caller's word.
            unsafe {
                let mut totals = kept.get::<V, M, P>(row, output);
                grouped::<V, F, M, P>(&x, &weights, group, (scales, output), &mut totals);
                self.keep(strip, kept, row, output, &totals);
            }
        }
    }

    /// Keeps the lanes, or adds them up and writes the outputs.
    #[inline(always)]
    unsafe fn keep<V: Lanes, const M: usize, const P: usize>(
        &self,
        strip: &Strip,
        kept: &Kept,
        row: usize,
        output: usize,
        lanes: &[[V; P]; M],
    ) {
        if !kept.last {
            // SAFETY: the room holds every row's lanes.
            return unsafe { kept.put(row, output, lanes) };
        }
        for (m, lanes) in lanes.iter().enumerate() {
            let mut four = [V::splat(0.0); 4];
            four[..P].copy_from_slice(lanes);
            let sums = V::sums(four);
            let count = P.min(strip.outputs - output);
            for (p, sum) in sums.iter().enumerate().take(count) {
                let output = strip.first + output + p;
                let sum = sum * self.part.end(self.first + output);
                let sum = if self.round { round_bf16(sum) } else { sum };
                // SAFETY: the caller's word for rows and outputs.
                unsafe { *self.out.add((row + m) * self.stride + output) = sum };
            }
        }
    }
}

impl Strip {
    #[inline(always)]
    fn weights<const P: usize>(&self, output: usize) -> Weights<P> {
        let mut rows = [self.starts[output]; P];
        rows.copy_from_slice(&self.starts[output..output + P]);
        Weights {
            rows,
            length: self.length,
            ahead: match self.ahead {
                Ahead::Nothing => None,
                Ahead::Rows => Some(P * self.length),
                Ahead::Bytes(bytes) => Some(bytes),
            },
        }
    }
}

impl Kept {
    /// Of chains that begin and end with the stretch.
    const NOTHING: Self = Self {
        room: std::ptr::null_mut(),
        first: true,
        last: true,
    };

    /// The lanes of some rows and outputs so far.
    #[inline(always)]
    unsafe fn get<V: Lanes, const M: usize, const P: usize>(
        &self,
        row: usize,
        output: usize,
    ) -> [[V; P]; M] {
        let mut lanes = [[V::splat(0.0); P]; M];
        if !self.first {
            for (m, lanes) in lanes.iter_mut().enumerate() {
                for (p, lanes) in lanes.iter_mut().enumerate() {
                    let place = ((row + m) * STRIP + output + p) * 16;
                    // SAFETY: they were put there.
                    *lanes = unsafe { V::load(self.room.add(place)) };
                }
            }
        }
        lanes
    }

    #[inline(always)]
    unsafe fn put<V: Lanes, const M: usize, const P: usize>(
        &self,
        row: usize,
        output: usize,
        lanes: &[[V; P]; M],
    ) {
        for (m, lanes) in lanes.iter().enumerate() {
            for (p, lanes) in lanes.iter().enumerate() {
                let place = ((row + m) * STRIP + output + p) * 16;
                // SAFETY: the caller's word.
                unsafe { lanes.store(self.room.add(place)) };
            }
        }
    }
}
