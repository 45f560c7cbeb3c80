//! Attention of a run: many rows of one sequence at once, with the bits that its groups would have.

#![allow(unsafe_code, reason = "kernel launches")]

use marathon_kernels::abi::{AttentionArgs, PageForm, TILE_KEYS, TilePlan};

use super::{form::Form, groups::Run, launch::CudaOps};
use crate::{backend::ops::HeadShape, model::plan::Kind};

/// A kernel that only cards with the others have.
pub(super) const MANY_ROWS: &str = "attention_tiles_d512";

/// Bytes that the tiles of one head's keys and values take, of as many positions.
pub(super) fn tiles_room(positions: usize, head_dim: usize) -> usize {
    positions.next_multiple_of(TILE_KEYS) * head_dim * 2 * 2
}

impl CudaOps {
    /// Computes a run if that pays: where its blocks leave most of the card idle, groups that share
    /// the keys of a row among many blocks are faster.
    pub(super) fn attend_run(
        &mut self,
        run: &Run,
        shape: HeadShape,
        args: &AttentionArgs,
        form: PageForm,
    ) -> bool {
        if !self.many_rows || self.form == Form::F32 {
            return false;
        }
        let window = (shape.kind == Kind::Sliding).then_some(self.sizes.window);
        let heads = [shape.heads, shape.kv_heads];
        let (keys, room) = (run.keys(window), self.partial_room);
        let Some(plan) = TilePlan::plan(shape.head_dim, heads, run.rows, keys, form, room) else {
            return false;
        };
        if plan.parallel() * 3 < self.card.shape().sms {
            return false;
        }
        let rows = [run.first_row, run.rows, run.seq];
        for (args, heads) in plan.launches(*args, self.partial.0.at, rows) {
            let (prepare, attend) = (plan.prepare_grid(heads), plan.grid(heads));
            // SAFETY: the rows' ends and tables were checked; the tiles of as many heads fit the room
            // of partial results, which no launch in between reads.
            unsafe {
                self.card.launch(
                    &plan.prepare_kernel(),
                    prepare.map(|b| b as usize),
                    TilePlan::PREPARE_THREADS,
                    0,
                    &args,
                );
                self.card.launch(
                    &plan.kernel(),
                    attend.map(|b| b as usize),
                    TilePlan::THREADS,
                    plan.shared(),
                    &args,
                );
            }
        }
        true
    }
}
