//! Mixture of experts on the card: route, sort pairs by expert, two products, sum.

#![allow(unsafe_code, reason = "kernel launches")]

use marathon_kernels::abi::{ExpertArgs, ITEM_PAIRS, most_items};

use super::{
    card::{Card, Region},
    form::Form,
    launch::Buf,
    weights::{self, Matrix},
};
use crate::model::{plan::Moe, weight::Weight, weights::MoeWeights};

/// Router and experts of a layer, with room to work in.
pub(super) struct Experts {
    moe: Moe,
    eps: f32,
    hidden: usize,
    pub(super) router: Matrix,
    router_scale: Region,
    expert_scale: Region,
    gate_up: (Region, usize),
    down: (Region, usize),
    pub(super) router_input: Buf,
    pub(super) scores: Buf,
    room: Room,
}

/// What a step's pairs are written to.
struct Room {
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

impl Experts {
    pub(super) fn new(
        card: &mut Card,
        form: Form,
        weights: &MoeWeights,
        moe: &Moe,
        eps: f32,
        rows: usize,
    ) -> Self {
        let hidden = weights.router.cols();
        let pairs = rows * moe.top_k;
        let items = most_items(pairs, moe.experts, ITEM_PAIRS[0]);
        let scale = weights.router_scale.to_vec();
        let expert_scale = weights.expert_scale.to_vec();
        let gate_up: Vec<Vec<&Weight>> = weights
            .experts
            .iter()
            .map(|e| e.gate_up.iter().collect())
            .collect();
        let down: Vec<Vec<&Weight>> = weights.experts.iter().map(|e| vec![&e.down]).collect();
        // The fast product gates by itself.
        let wide = match form {
            Form::Bf16 => 8,
            Form::F32 => 2 * moe.intermediate,
        };
        let room = Room {
            chosen: card.zeros(pairs * 4),
            share: card.zeros(pairs * 4),
            place: card.zeros(pairs * 4),
            row_of: card.zeros(pairs * 4),
            items: card.zeros(items * 16),
            count: card.zeros(4),
            wide: Buf::new(card, form, pairs, wide),
            activated: Buf::new(card, form, pairs, moe.intermediate),
            result: Buf::new(card, form, pairs, hidden),
        };
        Self {
            moe: *moe,
            eps,
            hidden,
            router: weights::matrix(card, form, &[&weights.router]),
            router_scale: weights::floats(card, &scale),
            expert_scale: weights::floats(card, &expert_scale),
            gate_up: weights::experts(card, form, &gate_up, form == Form::Bf16),
            down: weights::experts(card, form, &down, false),
            router_input: Buf::new(card, form, rows, hidden),
            scores: Buf::new(card, form, rows, moe.experts),
            room,
        }
    }

    fn args(&self, rows: usize) -> ExpertArgs {
        let r = &self.room;
        ExpertArgs {
            scale: self.expert_scale.at,
            scores: self.scores.at(),
            chosen: r.chosen.at,
            share: r.share.at,
            place: r.place.at,
            row_of: r.row_of.at,
            items: r.items.at,
            count: r.count.at,
            rows: rows as u32,
            experts: self.moe.experts as u32,
            top: self.moe.top_k as u32,
            ld_scores: self.scores.pitch(),
            eps: self.eps,
            root: 1.0 / (self.hidden as f32).sqrt(),
            ..ExpertArgs::default()
        }
    }

    /// What the router's product reads.
    pub(super) fn prepare(&self, card: &mut Card, form: Form, rows: usize, x: &Buf) {
        let args = ExpertArgs {
            x: x.at(),
            ldx: x.pitch(),
            y: self.router_input.at(),
            ldy: self.router_input.pitch(),
            weight: self.router_scale.at,
            k: self.hidden as u32,
            ..self.args(rows)
        };
        // SAFETY: buffers of as many rows as a step can have.
        unsafe { card.launch(&form.kernel("router_input"), [rows, 1, 1], 256, 0, &args) };
    }

    /// After the router's product: `out` = the weighted sum of the chosen experts of `y`.
    pub(super) fn run(&self, card: &mut Card, form: Form, rows: usize, y: &Buf, out: &Buf) {
        let pairs = rows * self.moe.top_k;
        let height = ITEM_PAIRS[usize::from(pairs > 8 * self.moe.experts)];
        let args = ExpertArgs {
            height: height as u32,
            ..self.args(rows)
        };
        let inner = self.moe.intermediate;
        let r = &self.room;
        let up = ExpertArgs {
            x: y.at(),
            ldx: y.pitch(),
            weight: self.gate_up.0.at,
            stride: self.gate_up.1 as u64,
            n: 2 * inner as u32,
            k: self.hidden as u32,
            by_row: 1,
            ..args
        };
        let down = ExpertArgs {
            x: r.activated.at(),
            ldx: r.activated.pitch(),
            y: r.result.at(),
            ldy: r.result.pitch(),
            weight: self.down.0.at,
            stride: self.down.1 as u64,
            n: self.hidden as u32,
            k: inner as u32,
            ..args
        };
        let sum = ExpertArgs {
            x: r.result.at(),
            ldx: r.result.pitch(),
            y: out.at(),
            ldy: out.pitch(),
            n: self.hidden as u32,
            ..args
        };
        // SAFETY: the room was made for the pairs of as many rows as a step can have.
        unsafe {
            card.launch(&form.kernel("route"), [rows, 1, 1], 128, 0, &args);
            card.launch("sort_pairs", [1, 1, 1], 1024, 0, &args);
            match form {
                Form::Bf16 => {
                    let items = most_items(pairs, self.moe.experts, height);
                    let kernel = format!("experts_bf16_m{height}");
                    let up = ExpertArgs {
                        y: r.activated.at(),
                        ldy: r.activated.pitch(),
                        gated: 1,
                        ..up
                    };
                    let tiles = |n: usize| [n.div_ceil(16), items, 1];
                    card.launch(&kernel, tiles(2 * inner), 256, 0, &up);
                    card.launch(&kernel, tiles(self.hidden), 256, 0, &down);
                }
                Form::F32 => {
                    let up = ExpertArgs {
                        y: r.wide.at(),
                        ldy: r.wide.pitch(),
                        ..up
                    };
                    let outputs = |n: usize| [n.div_ceil(8), pairs, 1];
                    card.launch("plain_experts", outputs(2 * inner), 256, 0, &up);
                    r.wide.gate(card, form, pairs, inner, &r.activated);
                    card.launch("plain_experts", outputs(self.hidden), 256, 0, &down);
                }
            }
            let columns = [self.hidden.div_ceil(256), rows, 1];
            card.launch(&form.kernel("experts_sum"), columns, 256, 0, &sum);
        }
    }
}
