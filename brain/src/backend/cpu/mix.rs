//! Attention's second half: values summed by weight, in the order of their positions.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    attend::{GROUP, Query},
    kv::{BLOCK, Stored, value_width},
    pool::Shards,
    simd::Lanes,
};
use crate::sched::math::round_bf16;

/// Some queries of one sequence and one KV head, with their weights.
///
/// Values come in units of one step (bf16: two slots). A query whose range begins or ends within
/// a unit takes its own half alone.
pub(super) struct Mix<'a, F: Stored> {
    pub(super) queries: &'a [Query],
    /// Weights from position `first` on, unit by unit.
    pub(super) weights: [&'a [F::Input]; GROUP],
    /// A multiple of the page size.
    pub(super) first: usize,
    pub(super) dim: usize,
    /// One over the sum of each query's weights, times the scale of the values.
    pub(super) inverse: [f32; GROUP],
    pub(super) out: &'a Shards<f32>,
    pub(super) stride: usize,
    pub(super) round: bool,
}

impl<F: Stored> Mix<'_, F> {
    /// Computes all columns; `page` finds the value tile of a page.
    #[inline(always)]
    pub(super) fn run<V: Lanes>(&self, page: &impl Fn(usize) -> *const F) {
        for (q, weights) in self.queries.iter().zip(&self.weights) {
            assert!((q.end - self.first).div_ceil(F::STEP) <= weights.len());
        }
        let width = value_width(self.dim);
        let mut d = 0;
        while d < width {
            // SAFETY: pages hold whole tiles, weights reach to every query's end, and the outputs
            // of these queries are written here alone.
            d += 16 * unsafe { self.columns::<V>(page, d, (width - d) / 16) };
        }
    }

    /// Some vectors of columns from `d` on; returns how many.
    #[inline(always)]
    unsafe fn columns<V: Lanes>(
        &self,
        page: &impl Fn(usize) -> *const F,
        d: usize,
        vectors: usize,
    ) -> usize {
        macro_rules! mix {
            ($n:literal, $c:literal) => {{
                let mut i = 0;
                while self.queries.len() - i >= $n {
                    // SAFETY: the caller's word.
                    unsafe { self.some::<V, $n, $c>(page, d, i) };
                    i += $n;
                }
                while i < self.queries.len() {
                    // SAFETY: the caller's word.
                    unsafe { self.some::<V, 1, $c>(page, d, i) };
                    i += 1;
                }
                $c
            }};
        }
        match (self.queries.len(), vectors) {
            (4, 4..) if V::WIDE => mix!(4, 4),
            (_, 8..) if V::WIDE => mix!(2, 8),
            (_, 4..) if V::WIDE => mix!(2, 4),
            (_, 2..) => mix!(1, 2),
            _ => mix!(1, 1),
        }
    }

    /// `N` queries from number `i` on, `C` vectors of columns from `d` on.
    #[inline(always)]
    unsafe fn some<V: Lanes, const N: usize, const C: usize>(
        &self,
        page: &impl Fn(usize) -> *const F,
        d: usize,
        i: usize,
    ) {
        let queries: [Query; N] = std::array::from_fn(|n| self.queries[i + n]);
        let weights: [*const F::Input; N] = std::array::from_fn(|n| self.weights[i + n].as_ptr());
        let units = queries.map(|q| (q.start.div_ceil(F::STEP), q.end / F::STEP));
        let start = units.iter().map(|u| u.0).max().unwrap_or(0);
        let end = units.iter().map(|u| u.1).min().unwrap_or(0);
        // Where the ranges do not meet, every query goes alone.
        let (start, end) = if start < end {
            (start, end)
        } else {
            (usize::MAX, 0)
        };
        let mut acc = [[V::splat(0.0); C]; N];
        // SAFETY (all below): the caller's word; units lie within the queries' ranges.
        for n in 0..N {
            let (q, acc) = (&queries[n], &mut acc[n]);
            if q.start % F::STEP != 0 {
                unsafe { self.part::<V, C>(acc, weights[n], page, d, q.start / F::STEP, true) };
            }
            let (from, to) = (units[n].0, units[n].1.min(start));
            let one = std::array::from_mut(acc);
            unsafe { self.units::<V, 1, C>(one, [weights[n]], page, d, from, to) };
        }
        unsafe { self.units::<V, N, C>(&mut acc, weights, page, d, start, end) };
        for n in 0..N {
            let (q, acc) = (&queries[n], &mut acc[n]);
            let from = units[n].0.max(end);
            if start != usize::MAX {
                let one = std::array::from_mut(acc);
                unsafe { self.units::<V, 1, C>(one, [weights[n]], page, d, from, units[n].1) };
            }
            if q.end % F::STEP != 0 {
                unsafe { self.part::<V, C>(acc, weights[n], page, d, q.end / F::STEP, false) };
            }
            unsafe { self.write(acc, q, i + n, d) };
        }
    }

    /// The whole units `from .. to`, for all of `acc`.
    #[inline(always)]
    unsafe fn units<V: Lanes, const N: usize, const C: usize>(
        &self,
        acc: &mut [[V; C]; N],
        weights: [*const F::Input; N],
        page: &impl Fn(usize) -> *const F,
        d: usize,
        from: usize,
        to: usize,
    ) {
        let per_page = BLOCK / F::STEP;
        let step = value_width(self.dim) * F::STEP;
        let mut sums = *acc;
        let mut unit = from;
        while unit < to {
            let number = unit / per_page;
            let mut at = page(number).wrapping_add(unit % per_page * step + d * F::STEP);
            let stop = to.min((number + 1) * per_page);
            while unit < stop {
                // SAFETY: the unit is in the page, the vectors in its rows.
                let values: [_; C] =
                    std::array::from_fn(|c| unsafe { F::half::<V>(at.add(16 * c * F::STEP)) });
                for (sums, weights) in sums.iter_mut().zip(&weights) {
                    // SAFETY: weights reach to the query's end.
                    let x = unsafe { F::spread::<V>(weights.add(unit - self.first / F::STEP)) };
                    for (sum, value) in sums.iter_mut().zip(&values) {
                        *sum = F::step(*sum, x, *value);
                    }
                }
                at = at.wrapping_add(step);
                unit += 1;
            }
        }
        *acc = sums;
    }

    /// One half of a unit.
    #[inline(always)]
    unsafe fn part<V: Lanes, const C: usize>(
        &self,
        acc: &mut [V; C],
        weights: *const F::Input,
        page: &impl Fn(usize) -> *const F,
        d: usize,
        unit: usize,
        second: bool,
    ) {
        let per_page = BLOCK / F::STEP;
        let step = value_width(self.dim) * F::STEP;
        let at = page(unit / per_page).wrapping_add(unit % per_page * step + d * F::STEP);
        // SAFETY: weights reach to the query's end, the unit is in the page.
        unsafe {
            let x = F::spread::<V>(weights.add(unit - self.first / F::STEP));
            for (c, acc) in acc.iter_mut().enumerate() {
                *acc = F::part(*acc, second, x, F::half::<V>(at.add(16 * c * F::STEP)));
            }
        }
    }

    #[inline(always)]
    unsafe fn write<V: Lanes, const C: usize>(&self, acc: &[V; C], q: &Query, i: usize, d: usize) {
        let scale = V::splat(self.inverse[i]);
        for (c, a) in acc.iter().enumerate() {
            let numbers = a.mul(scale).to_array();
            let column = d + 16 * c;
            let count = 16.min(self.dim - column.min(self.dim));
            // SAFETY: the row and its columns are in the buffer, and ours.
            let to = unsafe {
                self.out
                    .slice(q.row * self.stride + q.column + column, count)
            };
            for (to, x) in to.iter_mut().zip(numbers) {
                *to = if self.round { round_bf16(x) } else { x };
            }
        }
    }
}
