//! Mixture of experts on the card: route, sort pairs by expert, two products. What stands around
//! them, norms and sums, is one kernel in front and one behind (see `ops`).

#![allow(unsafe_code, reason = "kernel launches")]

use std::sync::Arc;

use marathon_kernels::abi::{
    ExpertArgs, ExpertNormArgs, ITEM_PAIRS, ROUTED_AT_ONCE, TILE, expert_rings, most_items,
};

use super::{
    buffers::Buf,
    card::{Card, Region},
    form::Form,
    weights::{self, Matrix, Stack},
};
use crate::model::{plan::Moe, weight::Weight, weights::MoeWeights};

/// Blocks of an expert's product that run on a multiprocessor at a time.
const BLOCKS: usize = 4;
/// Blocks of an expert at least, where many are chosen or may be.
const FEWEST: usize = 16;

/// Blocks for a matrix of `n` rows where about `at_once` run at a time: as many tiles for each.
fn blocks(n: usize, at_once: usize) -> usize {
    let tiles = n.div_ceil(TILE);
    tiles.div_ceil(tiles.div_ceil(at_once.max(1)).max(1))
}

/// Router and experts of a layer.
pub(super) struct Experts {
    moe: Moe,
    eps: f32,
    hidden: usize,
    pub(super) router: Matrix,
    router_scale: Region,
    expert_scale: Region,
    gate_up: Stack,
    down: Stack,
    room: Arc<ExpertRoom>,
}

/// What the experts of every layer work in, one layer after the other.
pub(super) struct ExpertRoom {
    router_input: Buf,
    scores: Buf,
    chosen: Region,
    share: Region,
    place: Region,
    row_of: Region,
    items: Region,
    count: Region,
    wide: Buf,
    activated: Buf,
    result: Buf,
}

impl ExpertRoom {
    pub(super) fn new(card: &mut Card, form: Form, moe: &Moe, hidden: usize, rows: usize) -> Self {
        let pairs = rows * moe.top_k;
        let items = most_items(pairs, moe.experts, ITEM_PAIRS[0]);
        // The fast product gates by itself.
        let wide = match form {
            Form::Bf16 => 8,
            Form::F32 => 2 * moe.intermediate,
        };
        Self {
            router_input: Buf::new(card, form, rows, hidden),
            scores: Buf::new(card, form, rows, moe.experts),
            chosen: card.zeros(pairs * 4),
            share: card.zeros(pairs * 4),
            place: card.zeros(pairs * 4),
            row_of: card.zeros(pairs * 4),
            items: card.zeros(items * 16),
            count: card.zeros(4),
            wide: Buf::new(card, form, pairs, wide),
            activated: Buf::new(card, form, pairs, moe.intermediate),
            result: Buf::new(card, form, pairs, hidden),
        }
    }
}

impl Experts {
    pub(super) fn new(
        card: &mut Card,
        form: Form,
        weights: &MoeWeights,
        moe: &Moe,
        eps: f32,
        room: Arc<ExpertRoom>,
    ) -> Self {
        let hidden = weights.router.cols();
        let scale = weights.router_scale.to_vec();
        let expert_scale = weights.expert_scale.to_vec();
        let gate_up: Vec<Vec<&Weight>> = weights
            .experts
            .iter()
            .map(|e| e.gate_up.iter().collect())
            .collect();
        let down: Vec<Vec<&Weight>> = weights.experts.iter().map(|e| vec![&e.down]).collect();
        Self {
            moe: *moe,
            eps,
            hidden,
            router: weights::matrix(card, form, &[&weights.router]),
            router_scale: weights::floats(card, &scale),
            expert_scale: weights::floats(card, &expert_scale),
            gate_up: weights::experts(card, form, &gate_up, form == Form::Bf16),
            down: weights::experts(card, form, &down, false),
            room,
        }
    }

    /// What the router's product reads.
    pub(super) fn router_input(&self) -> &Buf {
        &self.room.router_input
    }

    /// Where the router's product goes.
    pub(super) fn scores(&self) -> &Buf {
        &self.room.scores
    }

    fn root(&self) -> f32 {
        1.0 / (self.hidden as f32).sqrt()
    }

    fn args(&self, rows: usize) -> ExpertArgs {
        let r = &self.room;
        let many = rows * self.moe.top_k > 8 * self.moe.experts;
        ExpertArgs {
            scale: self.expert_scale.at,
            scores: r.scores.at(),
            chosen: r.chosen.at,
            share: r.share.at,
            place: r.place.at,
            row_of: r.row_of.at,
            items: r.items.at,
            count: r.count.at,
            rows: rows as u32,
            experts: self.moe.experts as u32,
            top: self.moe.top_k as u32,
            ld_scores: r.scores.pitch(),
            height: ITEM_PAIRS[usize::from(many)] as u32,
            eps: self.eps,
            root: self.root(),
            ..ExpertArgs::default()
        }
    }

    /// The router's part of the norms in front.
    pub(super) fn router_args(&self) -> ExpertNormArgs {
        ExpertNormArgs {
            router_scale: self.router_scale.at,
            router_in: self.room.router_input.at(),
            root: self.root(),
            ..ExpertNormArgs::default()
        }
    }

    /// The experts' part of the norms behind.
    pub(super) fn result_args(&self) -> ExpertNormArgs {
        ExpertNormArgs {
            result: self.room.result.at(),
            ldr: self.room.result.pitch(),
            share: self.room.share.at,
            place: self.room.place.at,
            top: self.moe.top_k as u32,
            ..ExpertNormArgs::default()
        }
    }

    /// What the router's product reads, in fp32.
    pub(super) fn plain_input(&self, card: &mut Card, rows: usize, x: &Buf) {
        let args = ExpertArgs {
            x: x.at(),
            ldx: x.pitch(),
            y: self.room.router_input.at(),
            ldy: self.room.router_input.pitch(),
            weight: self.router_scale.at,
            k: self.hidden as u32,
            ..self.args(rows)
        };
        // SAFETY: buffers of as many rows as a step can have.
        unsafe { card.launch("plain_router_input", [rows, 1, 1], 32, 0, &args) };
    }

    /// After the router's product: every row's experts, and the pairs sorted by them.
    pub(super) fn route(&self, card: &mut Card, form: Form, rows: usize) {
        let args = self.args(rows);
        // SAFETY: the room was made for the pairs of as many rows as a step can have.
        unsafe {
            if form == Form::Bf16 && rows <= ROUTED_AT_ONCE {
                card.launch("route_and_sort", [1, 1, 1], 1024, 0, &args);
                return;
            }
            card.launch(&form.kernel("route"), [rows, 1, 1], 128, 0, &args);
            card.launch("sort_pairs", [1, 1, 1], 1024, 0, &args);
        }
    }

    /// Results of the chosen experts of `y`, by place.
    pub(super) fn products(&self, card: &mut Card, rows: usize, y: &Buf) {
        let args = self.args(rows);
        let height = args.height as usize;
        let items = most_items(rows * self.moe.top_k, self.moe.experts, height);
        let r = &self.room;
        let up = ExpertArgs {
            y: r.activated.at(),
            ldy: r.activated.pitch(),
            gated: 1,
            ..self.up(y, &args)
        };
        let down = self.down(&args);
        let kernel = |stack: &Stack| format!("experts_{}_m{height}", stack.form.name());
        let at_once = (BLOCKS * card.shape().sms / items.max(1)).max(FEWEST);
        let blocks = |n: u32| [blocks(n as usize, at_once), items, 1];
        // SAFETY: as above.
        unsafe {
            let rings = expert_rings(self.gate_up.form, height);
            card.launch(&kernel(&self.gate_up), blocks(up.n), 256, rings, &up);
            let rings = expert_rings(self.down.form, height);
            card.launch(&kernel(&self.down), blocks(down.n), 256, rings, &down);
        }
    }

    /// In fp32: the weighted results of every row's experts, in `out`.
    pub(super) fn plain_products(&self, card: &mut Card, rows: usize, y: &Buf, out: &Buf) {
        let (args, r) = (self.args(rows), &self.room);
        let (pairs, inner) = (rows * self.moe.top_k, self.moe.intermediate);
        let up = ExpertArgs {
            y: r.wide.at(),
            ldy: r.wide.pitch(),
            ..self.up(y, &args)
        };
        let down = self.down(&args);
        let sum = ExpertArgs {
            x: r.result.at(),
            ldx: r.result.pitch(),
            y: out.at(),
            ldy: out.pitch(),
            n: self.hidden as u32,
            ..args
        };
        let outputs = |n: u32| [(n as usize).div_ceil(8), pairs, 1];
        let columns = [self.hidden.div_ceil(256), rows, 1];
        // SAFETY: as above.
        unsafe {
            card.launch("plain_experts", outputs(up.n), 256, 0, &up);
            r.wide.gate(card, pairs, inner, &r.activated);
            card.launch("plain_experts", outputs(down.n), 256, 0, &down);
            card.launch("plain_experts_sum", columns, 256, 0, &sum);
        }
    }

    /// The first product, but for where it goes.
    fn up(&self, y: &Buf, args: &ExpertArgs) -> ExpertArgs {
        ExpertArgs {
            x: y.at(),
            ldx: y.pitch(),
            n: 2 * self.moe.intermediate as u32,
            k: self.hidden as u32,
            by_row: 1,
            ..self.gate_up.args(args)
        }
    }

    fn down(&self, args: &ExpertArgs) -> ExpertArgs {
        let r = &self.room;
        ExpertArgs {
            x: r.activated.at(),
            ldx: r.activated.pitch(),
            y: r.result.at(),
            ldy: r.result.pitch(),
            n: self.hidden as u32,
            k: self.moe.intermediate as u32,
            ..self.down.args(args)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_every_tile_and_as_many_each() {
        for (n, at_once, expected) in [(1408, 66, 44), (2816, 66, 59), (1408, 2, 2), (40, 66, 3)] {
            let blocks = blocks(n, at_once);
            assert_eq!(blocks, expected);
            assert!(blocks <= at_once.max(1) && blocks <= n.div_ceil(TILE));
        }
        assert_eq!(super::blocks(2816, 0), 1);
    }
}
