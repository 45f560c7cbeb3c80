//! Gates and sums that stand between products: parts of the fused operations.

use super::{
    elementwise::{GateRow, GatedRow, Norm, SumNormsRow},
    memory::Buf,
    ops::CpuOps,
    simd::dispatch,
};
use crate::backend::ops::Rows;

impl CpuOps {
    /// `out = gelu(gate) * up` of columns `[gate | up]`, `width` each.
    pub(super) fn gated_act(&mut self, rows: Rows, gate_up: &Buf, width: usize, out: &mut Buf) {
        let mode = self.mode;
        self.each_row(self.count(rows), 8 * width, [out], |i, [out]| {
            let (gate, up) = gate_up.row(i)[..2 * width].split_at(width);
            let out = &mut out[..width];
            dispatch(
                mode.level,
                GatedRow {
                    gate,
                    up,
                    round: mode.round,
                    out,
                },
            );
        });
    }

    /// `gate = gelu(gate) * inputs[layer]`, in place, `width` columns.
    pub(super) fn layer_gate(
        &mut self,
        rows: Rows,
        gate: &mut Buf,
        inputs: &Buf,
        layer: usize,
        width: usize,
    ) {
        let mode = self.mode;
        self.each_row(self.count(rows), 8 * width, [gate], |i, [gate]| {
            let gate = &mut gate[..width];
            let input = &inputs.row(i)[layer * width..(layer + 1) * width];
            dispatch(
                mode.level,
                GateRow {
                    gate,
                    input,
                    round: mode.round,
                },
            );
        });
    }

    /// `a = norm_a(a) + norm_b(b)`, each rounded before the sum.
    pub(super) fn sum_norms(
        &mut self,
        rows: Rows,
        a: &mut Buf,
        norm_a: &Norm,
        b: &Buf,
        norm_b: &Norm,
    ) {
        let width = norm_a.weight.len();
        let mode = self.mode;
        self.each_row(self.count(rows), 2 * width, [a], |i, [a]| {
            let (a, b) = (&mut a[..width], &b.row(i)[..width]);
            dispatch(
                mode.level,
                SumNormsRow {
                    a,
                    norm_a,
                    b,
                    norm_b,
                    round: mode.round,
                },
            );
        });
    }
}
