//! The inner loop of a product: rows against panels, every output one chain in a register.

#![allow(unsafe_code, reason = "vector kernels")]

use super::{
    panel::{Form, PANEL},
    simd::Lanes,
};
use crate::sched::math::round_bf16;

/// Some rows against some panels, over a stretch of the inputs.
pub(super) struct Tile<F: Form> {
    /// The rows' inputs, from the first of the stretch on.
    pub(super) x: *const F::Input,
    /// Between rows of `x`.
    pub(super) x_stride: usize,
    pub(super) rows: usize,
    /// The first panel's weights, from the first input of the stretch on.
    pub(super) w: *const F,
    /// Between panels.
    pub(super) w_stride: usize,
    pub(super) panels: usize,
    /// Steps of the stretch.
    pub(super) steps: usize,
    /// Whole panels of every row are written.
    pub(super) out: *mut f32,
    /// Between rows of `out`.
    pub(super) out_stride: usize,
    /// The chains begin with what `out` holds, else with zero.
    pub(super) carry: bool,
    /// Results are rounded to bf16.
    pub(super) round: bool,
}

impl<F: Form> Tile<F> {
    /// Computes it.
    ///
    /// # Safety
    /// The rows of `x`, the panels of `w` and the rows of `out` are all there, and nobody else
    /// uses the latter.
    #[inline(always)]
    pub(super) unsafe fn run<V: Lanes>(&self) {
        let most = if V::WIDE { 12 } else { 3 };
        let mut row = 0;
        while row < self.rows {
            let left = (self.rows - row).min(most);
            let mut panel = 0;
            while panel < self.panels {
                // SAFETY: the caller's word.
                panel += unsafe { self.some::<V>(row, left, panel) };
            }
            row += left;
        }
    }

    /// Picks the register block; returns how many panels it did.
    #[inline(always)]
    unsafe fn some<V: Lanes>(&self, row: usize, rows: usize, panel: usize) -> usize {
        macro_rules! block {
            ($m:literal, $p:literal) => {{
                // SAFETY: the caller's word.
                unsafe { self.block::<V, $m, $p>(row, panel) };
                $p
            }};
        }
        let panels = self.panels - panel;
        if V::WIDE {
            match (rows, panels) {
                (1, 4..) => block!(1, 4),
                (1, 2..) => block!(1, 2),
                (1, _) => block!(1, 1),
                (2, 4..) => block!(2, 4),
                (2, 2..) => block!(2, 2),
                (2, _) => block!(2, 1),
                (3, 4..) => block!(3, 4),
                (3, 2..) => block!(3, 2),
                (3, _) => block!(3, 1),
                (4, 2..) => block!(4, 2),
                (4, _) => block!(4, 1),
                (5, 2..) => block!(5, 2),
                (5, _) => block!(5, 1),
                (6, 2..) => block!(6, 2),
                (6, _) => block!(6, 1),
                (7, _) => block!(7, 1),
                (8, _) => block!(8, 1),
                (9, _) => block!(9, 1),
                (10, _) => block!(10, 1),
                (11, _) => block!(11, 1),
                _ => block!(12, 1),
            }
        } else {
            match (rows, panels) {
                (1, 2..) => block!(1, 2),
                (1, _) => block!(1, 1),
                (2, _) => block!(2, 1),
                _ => block!(3, 1),
            }
        }
    }

    /// `M` rows against `P` panels, every output in registers.
    #[inline(always)]
    unsafe fn block<V: Lanes, const M: usize, const P: usize>(&self, row: usize, panel: usize) {
        // SAFETY: the caller's word: rows `row..row + M`, panels `panel..panel + P`.
        let (x, w, out) = unsafe {
            (
                self.x.add(row * self.x_stride),
                self.w.add(panel * self.w_stride),
                self.out.add(row * self.out_stride + panel * PANEL),
            )
        };
        let mut acc = [[(V::splat(0.0), V::splat(0.0)); P]; M];
        if self.carry {
            for (m, acc) in acc.iter_mut().enumerate() {
                for (p, a) in acc.iter_mut().enumerate() {
                    // SAFETY: as above.
                    unsafe {
                        let at = out.add(m * self.out_stride + p * PANEL);
                        *a = (V::load(at), V::load(at.add(16)));
                    }
                }
            }
        }
        for k in 0..self.steps {
            // SAFETY: panel `p` holds 32 elements for each input.
            let weights: [_; P] = std::array::from_fn(|p| unsafe {
                F::weights::<V>(w.add(p * self.w_stride + k * PANEL * F::STEP))
            });
            for (m, acc) in acc.iter_mut().enumerate() {
                // SAFETY: row `m` of `x` holds all inputs.
                let value = unsafe { F::spread::<V>(x.add(m * self.x_stride + k)) };
                for (a, weight) in acc.iter_mut().zip(&weights) {
                    a.0 = F::step(a.0, value, weight.0);
                    a.1 = F::step(a.1, value, weight.1);
                }
            }
        }
        for (m, acc) in acc.iter().enumerate() {
            for (p, a) in acc.iter().enumerate() {
                // SAFETY: row `m` of `out` has room for whole panels, and only this piece
                // writes these.
                unsafe {
                    let at = out.add(m * self.out_stride + p * PANEL);
                    store(a.0, at, self.round);
                    store(a.1, at.add(16), self.round);
                }
            }
        }
    }
}

/// # Safety
/// There is room for 16 elements.
#[inline(always)]
unsafe fn store<V: Lanes>(v: V, at: *mut f32, round: bool) {
    // SAFETY: the caller's word.
    unsafe {
        if round {
            at.cast::<[f32; 16]>()
                .write_unaligned(v.to_array().map(round_bf16));
        } else {
            v.store(at);
        }
    }
}
