//! A round in parts: the target with sampling and verification, then a pass of the drafter for every
//! draft. Parts of few rows are recorded once and replayed: what a round costs the host does not
//! depend on how many kernels it has. Parts, not rounds, are recorded, so that any number of rows
//! goes with any number of drafts.

use std::{collections::HashSet, sync::Arc};

use marathon_kernels::{device::DeviceError, graph::Graph};

use super::{
    groups::{bucket, splits},
    held::{Failed, Held},
    step::Shape,
};
use crate::{
    backend::{
        Limits,
        arena::Arena,
        ops::{Ops as _, Rows},
    },
    sched::types::{
        BlockId, BlockTables, SampleStep, SamplingParams, SeqId, SeqStep, Step, TokenId,
    },
};

/// Rows up to which a part is recorded: launches of larger ones hide behind their work.
const GRAPH_ROWS: usize = 64;
/// Recorded parts at most; then all are forgotten and recorded anew.
const MOST_GRAPHS: usize = 1024;
/// Of these, recorded before the first request at most.
const FIRST_GRAPHS: usize = 640;

/// What the card does in one go, with all that its launches depend on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Part {
    /// Target, sampling, verification, and the state that drafting starts from.
    Verify(Shape),
    /// A pass of the drafter.
    Draft {
        /// Which, from 0.
        pass: usize,
        rows: usize,
        splits: [usize; 2],
        edits: bool,
    },
}

impl Part {
    /// The parts of a step, in order.
    fn all(shape: &Shape) -> Vec<Self> {
        let drafting = shape.draft_rows.first().into_iter().copied().collect();
        let verify = Self::Verify(Shape {
            draft_rows: drafting,
            draft_splits: [0; 2],
            ..shape.clone()
        });
        let passes = shape.draft_rows.iter().enumerate();
        let drafts = passes.map(|(pass, &rows)| Self::Draft {
            pass,
            rows,
            splits: shape.draft_splits,
            edits: shape.edits,
        });
        std::iter::once(verify).chain(drafts).collect()
    }
}

impl Held {
    /// Runs the step in the arena on the card, behind all earlier work.
    pub(super) fn compute(&mut self, graphs: bool) -> Result<(), DeviceError> {
        let shape = self.ops.step.shape.clone();
        let recorded = graphs && shape.rows <= GRAPH_ROWS;
        for part in Part::all(&shape) {
            if !recorded {
                self.launch(&part)?;
                continue;
            }
            if self.graphs.len() >= MOST_GRAPHS {
                self.graphs.clear();
            }
            if let Err(error) = self.record(&part) {
                // Graphs take memory of the card. Without any, the same work is launched singly, which
                // also shows whether the card is still there.
                tracing::warn!(%error, "a part of a round is not recorded");
                self.graphs.clear();
                self.launch(&part)?;
                continue;
            }
            self.graphs.get(&part).map_or(Ok(()), Graph::launch)?;
        }
        Ok(())
    }

    fn launch(&mut self, part: &Part) -> Result<(), DeviceError> {
        let Self {
            ops,
            gemma,
            drafter,
            ..
        } = self;
        ops.card.begin();
        match (part, drafter) {
            (Part::Verify(_), drafter) => {
                ops.step.drafted = 0;
                gemma.forward(ops);
                if ops.count(Rows::Out) > 0 {
                    ops.sample_and_verify(gemma.logits());
                }
                if let Some(drafter) = drafter
                    && ops.count(Rows::Draft) > 0
                {
                    drafter.begin(ops, gemma);
                }
            }
            (Part::Draft { pass, .. }, Some(drafter)) => {
                ops.step.drafted = *pass;
                drafter.step(ops, gemma, *pass);
            }
            (Part::Draft { .. }, None) => {}
        }
        ops.card.take_failure().map_or(Ok(()), Err)
    }

    /// Records a part of the step in the arena, unless it is recorded.
    fn record(&mut self, part: &Part) -> Result<(), DeviceError> {
        if self.graphs.contains_key(part) {
            return Ok(());
        }
        let device = self.device.clone();
        if let Some(graph) = Graph::record(&device, || self.launch(part))? {
            self.graphs.insert(part.clone(), graph);
        }
        Ok(())
    }

    /// Records what one stream meets, at every length up to the longest: a token alone, the first
    /// drafts, and every number of drafts checked with as many made. `suppressed` are the tokens that
    /// requests ban unless they say otherwise. Returns how many parts there are now.
    pub(super) fn record_rounds(
        &mut self,
        limits: &Limits,
        suppressed: &[TokenId],
    ) -> Result<usize, Failed> {
        let mut arena = Arena::default();
        let params = Arc::new(SamplingParams {
            suppressed: suppressed.to_vec(),
            ..SamplingParams::greedy(1)
        });
        let most = limits.max_drafts;
        let alone = [(0, 0), (0, most)].into_iter();
        let rounds: Vec<_> = alone.chain((1..=most).map(|d| (d, d))).collect();
        let contexts = contexts(limits);
        for (number, &context) in contexts.iter().enumerate() {
            if number % 8 == 0 {
                let (of, parts) = (contexts.len(), self.graphs.len());
                tracing::info!(number, of, parts, "recording rounds, a length at a time");
            }
            for &(drafts, next) in &rounds {
                let seq = lone(context, drafts, next, &params, limits);
                let step = Step { seqs: vec![seq] };
                if self.graphs.len() >= FIRST_GRAPHS || arena.load(&step, limits).is_err() {
                    return Ok(self.graphs.len());
                }
                self.send(&arena)?;
                let shape = self.ops.step.shape.clone();
                for part in Part::all(&shape) {
                    self.record(&part)?;
                }
                // The page-locked copy is filled anew for the next one.
                self.device.wait()?;
            }
        }
        Ok(self.graphs.len())
    }
}

/// Lengths of which no two need the same launches, ascending.
fn contexts(limits: &Limits) -> Vec<usize> {
    let last = limits.max_model_len.saturating_sub(limits.max_drafts + 1);
    let mut seen = HashSet::new();
    let ends = (0..last).step_by(32);
    ends.filter(|&end| seen.insert(splits(end + 1, end + 1, limits.window).map(bucket)))
        .collect()
}

/// A lone sequence that checks `drafts` drafts and makes the `next`.
fn lone(
    context: usize,
    drafts: usize,
    next: usize,
    params: &Arc<SamplingParams>,
    limits: &Limits,
) -> SeqStep {
    let rows = drafts + 1;
    let end = context + rows;
    let first = (context + 1).saturating_sub(limits.window) / limits.sliding_block_size;
    let blocks = |count: usize| vec![BlockId(0); count];
    SeqStep {
        seq: SeqId(0),
        tokens: vec![0; rows],
        start: context,
        tables: BlockTables {
            full: blocks(end.div_ceil(limits.full_block_size)),
            sliding_first: first,
            sliding: blocks(end.div_ceil(limits.sliding_block_size) - first),
        },
        sample: Some(SampleStep {
            drafts,
            params: params.clone(),
            generated: 0,
            history: Vec::new(),
            prompt_len: context,
            next_drafts: next,
            masks: Vec::new(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(window: usize, max_model_len: usize) -> Limits {
        Limits {
            vocab_size: 100,
            max_model_len,
            max_rows: 64,
            max_seqs: 1,
            max_drafts: 8,
            full_block_size: 32,
            full_blocks: max_model_len.div_ceil(32),
            full_block_bytes: 1,
            sliding_block_size: 32,
            sliding_blocks: 64,
            sliding_block_bytes: 1,
            window,
            masked_rows: usize::MAX,
        }
    }

    #[test]
    fn every_length_has_the_launches_of_a_recorded_one() {
        for (window, longest) in [(1024, 50_000), (6, 128), (512, 131_072)] {
            let limits = limits(window, longest);
            let key = |end: usize| splits(end, end, window).map(bucket);
            let recorded: HashSet<_> = contexts(&limits).iter().map(|c| key(c + 1)).collect();
            assert!(recorded.len() < 60, "{} lengths", recorded.len());
            let last = longest - limits.max_drafts - 1;
            assert!((1..=last / 32 * 32).all(|end| recorded.contains(&key(end))));
        }
    }

    #[test]
    fn lone_sequences_are_steps_that_the_arena_takes() {
        let limits = limits(512, 131_072);
        let params = Arc::new(SamplingParams::greedy(1));
        let mut arena = Arena::default();
        for context in contexts(&limits) {
            for (drafts, next) in [(0, 0), (0, 8), (8, 8)] {
                let seqs = vec![lone(context, drafts, next, &params, &limits)];
                arena.load(&Step { seqs }, &limits).unwrap();
                assert_eq!(arena.all.rows.len(), drafts + 1);
            }
        }
    }

    #[test]
    fn parts_are_shared_between_rounds() {
        let round = |rows, drafts: usize| {
            Part::all(&Shape {
                rows,
                draft_rows: vec![1; drafts],
                draft_splits: [3, 4],
                ..Shape::default()
            })
        };
        let (four, eight) = (round(5, 4), round(5, 8));
        assert_eq!(four[..], eight[..5]);
        assert_ne!(round(5, 0)[0], four[0]);
        assert_ne!(round(4, 4)[0], four[0]);
        assert_eq!(round(4, 4)[1..], four[1..]);
    }
}
