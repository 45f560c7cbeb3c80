//! Mixture of experts: which experts a row uses depends on that row, and their results are summed
//! by expert number, so that a row's bits do not depend on who else chose the same expert.

use super::{
    arranged::Arranged,
    elementwise::{GatedRow, inverse_rms},
    matrix::Matrix,
    memory::Buf,
    pool::Pool,
    product::{Mode, product},
    simd::dispatch,
};
use crate::{
    model::{
        plan::Moe,
        weights::{ExpertWeights, MoeWeights, Weight},
    },
    sched::math::{exp, round_bf16},
};

/// Router and experts of a layer, with room to work in.
pub(super) struct Experts {
    moe: Moe,
    eps: f32,
    router: Matrix,
    /// `scale[i] / sqrt(hidden)`
    router_scale: Vec<f32>,
    expert_scale: Vec<f32>,
    gate_up: Vec<Matrix>,
    down: Vec<Matrix>,
    router_input: Buf,
    scores: Buf,
    /// Rows of each expert, with their weights.
    chosen: Vec<Vec<(usize, f32)>>,
    /// Experts of one row with their shares, the best first.
    order: Vec<(f32, usize)>,
    gathered: Buf,
    wide: Buf,
    activated: Buf,
    result: Buf,
    arranged: Arranged,
}

impl Experts {
    pub(super) fn new(weights: &MoeWeights, moe: &Moe, eps: f32, rows: usize, bf16: bool) -> Self {
        let hidden = weights.router.cols();
        let scale = weights.router_scale.to_vec();
        let mut arranged = Arranged::default();
        let mut matrix = |parts: &[&Weight]| {
            let matrix = Matrix::new(parts, bf16);
            arranged.make_room(rows, &matrix);
            matrix
        };
        let router = matrix(&[&weights.router]);
        let mut each = |parts: &dyn Fn(&ExpertWeights) -> Vec<&Weight>| {
            let experts = weights.experts.iter();
            experts.map(|e| matrix(&parts(e))).collect()
        };
        let gate_up = each(&|e| e.gate_up.iter().collect());
        let down = each(&|e| vec![&e.down]);
        Self {
            moe: *moe,
            eps,
            router,
            router_scale: scale,
            expert_scale: weights.expert_scale.to_vec(),
            gate_up,
            down,
            router_input: Buf::new(rows, hidden),
            scores: Buf::new(rows, moe.experts),
            chosen: (0..moe.experts).map(|_| Vec::with_capacity(rows)).collect(),
            order: Vec::with_capacity(moe.experts),
            gathered: Buf::new(rows, hidden),
            wide: Buf::new(rows, 2 * moe.intermediate),
            activated: Buf::new(rows, moe.intermediate),
            result: Buf::new(rows, hidden),
            arranged,
        }
    }

    /// `out` = the weighted sum of the chosen experts of `y`, chosen by the raw stream `x`.
    pub(super) fn run(
        &mut self,
        pool: &Pool,
        mode: Mode,
        rows: usize,
        x: &Buf,
        y: &Buf,
        out: &mut Buf,
    ) {
        self.route(pool, mode, rows, x);
        let hidden = self.router_scale.len();
        for i in 0..rows {
            out.row_mut(i)[..hidden].fill(0.0);
        }
        for expert in 0..self.moe.experts {
            self.compute(pool, mode, expert, y);
            for (place, (row, weight)) in self.chosen[expert].iter().enumerate() {
                let sum = out.row_mut(*row).iter_mut();
                for (sum, r) in sum.zip(&self.result.row(place)[..hidden]) {
                    *sum += weight * r;
                }
            }
        }
        if mode.round {
            for i in 0..rows {
                out.row_mut(i)[..hidden]
                    .iter_mut()
                    .for_each(|x| *x = round_bf16(*x));
            }
        }
    }

    /// One expert of the rows that chose it, in their order, into `result`.
    fn compute(&mut self, pool: &Pool, mode: Mode, expert: usize, y: &Buf) {
        let hidden = self.router_scale.len();
        let chosen = &self.chosen[expert];
        for (place, (row, _)) in chosen.iter().enumerate() {
            self.gathered.row_mut(place)[..hidden].copy_from_slice(&y.row(*row)[..hidden]);
        }
        let count = chosen.len();
        product(
            pool,
            mode,
            count,
            &self.gathered,
            &self.gate_up[expert],
            &mut self.arranged,
            &mut self.wide,
        );
        for i in 0..count {
            let (gate, up) = self.wide.row(i).split_at(self.moe.intermediate);
            let kernel = GatedRow {
                gate,
                up,
                round: mode.round,
                out: self.activated.row_mut(i),
            };
            dispatch(mode.level, kernel);
        }
        product(
            pool,
            mode,
            count,
            &self.activated,
            &self.down[expert],
            &mut self.arranged,
            &mut self.result,
        );
    }

    /// Softmax over all experts in fp32, the best `top_k` of it scaled to sum 1, times each
    /// expert's own scale.
    fn route(&mut self, pool: &Pool, mode: Mode, rows: usize, x: &Buf) {
        let hidden = self.router_scale.len();
        let root = 1.0 / (hidden as f32).sqrt();
        for i in 0..rows {
            let x = &x.row(i)[..hidden];
            let inverse = inverse_rms(x, self.eps);
            let input = self.router_input.row_mut(i).iter_mut();
            for ((to, x), scale) in input.zip(x).zip(&self.router_scale) {
                let normed = if mode.round {
                    round_bf16(x * inverse)
                } else {
                    x * inverse
                };
                let scaled = normed * scale * root;
                *to = if mode.round {
                    round_bf16(scaled)
                } else {
                    scaled
                };
            }
        }
        product(
            pool,
            mode,
            rows,
            &self.router_input,
            &self.router,
            &mut self.arranged,
            &mut self.scores,
        );
        self.chosen.iter_mut().for_each(Vec::clear);
        for i in 0..rows {
            let scores = self.scores.row(i);
            let most = scores.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
            // The common denominator of the softmax cancels when the chosen are scaled to sum 1.
            let shares = scores.iter().enumerate();
            self.order.clear();
            self.order.extend(shares.map(|(e, s)| (exp(s - most), e)));
            // No two are equal, so that one order is right; a stable sort would allocate.
            self.order
                .sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            self.order.truncate(self.moe.top_k);
            let total: f32 = self.order.iter().map(|(s, _)| s).sum();
            for &(share, expert) in &self.order {
                let weight = share / total * self.expert_scale[expert];
                self.chosen[expert].push((i, weight));
            }
        }
    }
}
