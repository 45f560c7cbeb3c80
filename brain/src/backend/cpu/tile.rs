//! The inner loops of a product: a few rows against a few outputs, every lane of every chain in a
//! register.

#![allow(unsafe_code, reason = "vector kernels")]
#![allow(clippy::needless_range_loop, reason = "loops that are unrolled")]

use super::{
    form::{MOST_BYTES, Step, Stored},
    simd::Lanes,
};

/// Inputs of some rows, from the first of a stretch on.
pub(super) struct Inputs<S: Step> {
    pub(super) x: *const S::Number,
    /// Between rows.
    pub(super) stride: usize,
}

/// Weights of some outputs over the same stretch.
pub(super) struct Weights<const P: usize> {
    pub(super) rows: [*const u8; P],
    /// Bytes of each; whole units are not needed.
    pub(super) length: usize,
    /// How far ahead of what is read lies what will be read next, if anything does.
    pub(super) ahead: Option<usize>,
}

/// Scales of the groups of some outputs, from the first group of the stretch on.
pub(super) trait Scales {
    /// What multiplies the lanes of an output over a group.
    ///
    /// # Safety
    /// There are so many outputs, and groups.
    unsafe fn of<V: Lanes>(&self, output: usize, group: usize) -> V;
}

/// `sums[m][p]` goes on over the stretch.
///
/// # Safety
/// `M` rows of inputs are there, whole units of them, zeros behind the last; and the weights.
#[inline(always)]
pub(super) unsafe fn chain<V: Lanes, F: Stored, const M: usize, const P: usize>(
    x: &Inputs<F::Step>,
    w: &Weights<P>,
    sums: &mut [[V; P]; M],
) {
    let units = w.length / F::BYTES;
    let mut lanes = *sums;
    for unit in 0..units {
        // SAFETY: the caller's word.
        unsafe { add_unit::<V, F, M, P>(x, w, unit, &mut lanes) };
    }
    let rest = w.length % F::BYTES;
    if rest > 0 {
        // SAFETY: so many bytes are left of each row.
        let room = unsafe { padded(w, units * F::BYTES, rest) };
        let x = x.from(units * F::STEPS);
        // SAFETY: the room holds a unit of each.
        unsafe { add_unit::<V, F, M, P>(&x, &Weights::of(&room), 0, &mut lanes) };
    }
    *sums = lanes;
}

/// `totals[m][p]` goes on over the stretch, group by group of so many units: each is summed from
/// zero, and taken times its scale. The first of the outputs is number `first` of those that have scales.
///
/// # Safety
/// As for [`chain`].
#[inline(always)]
pub(super) unsafe fn grouped<V: Lanes, F: Stored, const M: usize, const P: usize>(
    x: &Inputs<F::Step>,
    w: &Weights<P>,
    group: usize,
    (scales, first): (&impl Scales, usize),
    totals: &mut [[V; P]; M],
) {
    let units = w.length.div_ceil(F::BYTES);
    let whole = w.length / F::BYTES;
    let mut unit = 0;
    for g in 0..units.div_ceil(group) {
        let mut sums = [[V::splat(0.0); P]; M];
        let end = whole.min((g + 1) * group);
        while unit < end {
            // SAFETY: the caller's word.
            unsafe { add_unit::<V, F, M, P>(x, w, unit, &mut sums) };
            unit += 1;
        }
        if unit == whole && whole < units && units <= (g + 1) * group {
            // SAFETY: so many bytes are left of each row.
            let room = unsafe { padded(w, whole * F::BYTES, w.length % F::BYTES) };
            let x = x.from(whole * F::STEPS);
            // SAFETY: the room holds a unit of each.
            unsafe { add_unit::<V, F, M, P>(&x, &Weights::of(&room), 0, &mut sums) };
        }
        for p in 0..P {
            // SAFETY: the caller's word.
            let scale = unsafe { scales.of::<V>(first + p, g) };
            for m in 0..M {
                totals[m][p] = totals[m][p].fma(scale, sums[m][p]);
            }
        }
    }
}

impl<S: Step> Inputs<S> {
    /// The same rows, so many steps on.
    fn from(&self, steps: usize) -> Self {
        Self {
            x: self.x.wrapping_add(steps * S::INPUTS),
            stride: self.stride,
        }
    }
}

/// # Safety
/// The unit is there, of the weights and of the inputs.
#[inline(always)]
unsafe fn add_unit<V: Lanes, F: Stored, const M: usize, const P: usize>(
    x: &Inputs<F::Step>,
    w: &Weights<P>,
    unit: usize,
    sums: &mut [[V; P]; M],
) {
    let at = unit * F::BYTES;
    // Loops over numbers, which the compiler unrolls, so that all of this is in registers. A closure
    // need not even be compiled for the vector instructions around it.
    // SAFETY: the caller's word.
    let mut units = [unsafe { F::unit::<V>(w.rows[0].add(at)) }; P];
    for p in 1..P {
        // SAFETY: the caller's word.
        units[p] = unsafe { F::unit::<V>(w.rows[p].add(at)) };
    }
    if let Some(ahead) = w.ahead {
        for p in 0..P {
            foresee(w.rows[p].wrapping_add(at + ahead));
            if F::BYTES > 64 {
                foresee(w.rows[p].wrapping_add(at + ahead + 64));
            }
        }
    }
    for step in 0..F::STEPS {
        let mut weights = [F::step::<V>(&units[0], step); P];
        for p in 1..P {
            weights[p] = F::step::<V>(&units[p], step);
        }
        let inputs = x.x.wrapping_add((unit * F::STEPS + step) * F::Step::INPUTS);
        for m in 0..M {
            // SAFETY: the caller's word.
            let x = unsafe { F::Step::take::<V>(inputs.add(m * x.stride)) };
            for p in 0..P {
                sums[m][p] = F::Step::add(sums[m][p], x, weights[p]);
            }
        }
    }
}

/// What is left of rows, with zeros behind it.
///
/// # Safety
/// `count` bytes lie behind byte `from` of each row.
#[inline(always)]
unsafe fn padded<const P: usize>(
    w: &Weights<P>,
    from: usize,
    count: usize,
) -> [[u8; MOST_BYTES]; P] {
    let mut room = [[0; MOST_BYTES]; P];
    for (room, row) in room.iter_mut().zip(w.rows) {
        // SAFETY: the caller's word.
        let rest = unsafe { std::slice::from_raw_parts(row.add(from), count) };
        room[..count].copy_from_slice(rest);
    }
    room
}

impl<const P: usize> Weights<P> {
    fn of(room: &[[u8; MOST_BYTES]; P]) -> Self {
        let mut rows = [room[0].as_ptr(); P];
        for (row, room) in rows.iter_mut().zip(room) {
            *row = room.as_ptr();
        }
        Self {
            rows,
            length: MOST_BYTES,
            ahead: None,
        }
    }
}

/// Has a cache line brought near that will be read soon.
#[inline(always)]
fn foresee(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which reads nothing and cannot fail.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(line.cast());
    };
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}
