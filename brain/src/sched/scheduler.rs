//! The scheduler: which rows are computed next, and what their results mean.
//!
//! A request comes in by [`submit`](Scheduler::submit) and leaves by itself, by
//! [`cancel`](Scheduler::cancel) or by [`fail`](Scheduler::fail). In between
//! [`plan`](Scheduler::plan) and [`commit`](Scheduler::commit) alternate; the rest holds requests
//! back, takes saved prefixes in and answers questions. `plan` changes nothing that a
//! failed step would have to undo: it moves blocks and admits sequences, but a sequence's tokens
//! and length change in `commit` alone. So a step that failed is simply planned again.
//!
//! The order of a step: one row for every decoding sequence, then its drafts, then chunks of
//! prefill in fair order between runs. The oldest sequence can always take what it needs from
//! younger ones, so something always moves and everything ends.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use super::{
    blocks::BlockPool,
    cost::StepCost,
    depth::Acceptance,
    fair::Shares,
    image::{AnchorImage, Restored},
    ngram::LookupAcceptance,
    pace::Pace,
    pins::Place,
    prefix::{AnchorId, CacheConfig, Origin, PrefixCache},
    request::{FinishReason, ValidRequest},
    sequence::{Outcome, Sequence},
    stats::Stats,
    table::{Geometry, Pools},
    tokens::{PrefixKey, TokenList},
    types::{Emitted, SeqId, TokenId},
};
use crate::backend::Limits;

/// Settings of the scheduler. None of them can change a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SchedConfig {
    /// Rows of a step at most; never above the executor's.
    pub max_rows: usize,
    /// Sequences computed at a time at most; never above the executor's.
    pub max_seqs: usize,
    /// Rows of prefill that one sequence gets in a step at most.
    pub chunk: usize,
    /// Of the prefix cache.
    pub cache: CacheConfig,
    /// The model's fingerprint: part of every prefix's address.
    pub fingerprint: String,
    /// Tokens that end a turn: prompts that share their first turn meet there.
    pub turn_ends: Vec<TokenId>,
    /// Whether drafts are taken from a sequence's own text too.
    pub lookups: bool,
}

impl Default for SchedConfig {
    fn default() -> Self {
        Self {
            max_rows: usize::MAX,
            max_seqs: usize::MAX,
            chunk: usize::MAX,
            cache: CacheConfig::default(),
            fingerprint: String::new(),
            turn_ends: Vec::new(),
            lookups: true,
        }
    }
}

/// What happened to a sequence in a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A round emitted tokens.
    Tokens {
        /// Whose.
        seq: SeqId,
        /// At least one.
        tokens: Vec<Emitted>,
        /// Drafts checked in this round.
        drafted: usize,
        /// Drafts emitted in this round.
        accepted: usize,
    },
    /// It ended. The scheduler has forgotten it.
    Finished {
        /// Which.
        seq: SeqId,
        /// How.
        outcome: Outcome,
    },
}

/// What became of a submission.
#[derive(Clone, Debug, PartialEq)]
pub enum Submitted {
    /// It will be computed under this id.
    Queued(SeqId),
    /// The received tokens already end it: nothing is left to compute.
    Done(Outcome),
}

/// Limits under which not even one sequence can be computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A size is zero.
    #[error("the executor's limits or the scheduler's settings have a zero {0}")]
    Zero(&'static str),
    /// Too few blocks for the window.
    #[error(
        "the sliding layers need {needed} blocks for one sequence, but their KV pool has {there}: \
         give the KV cache more memory"
    )]
    Sliding {
        /// Blocks for the window of one sequence and a row.
        needed: usize,
        /// Blocks of the pool.
        there: usize,
    },
    /// More blocks than numbers.
    #[error("a KV pool of {0} blocks is more than block numbers reach")]
    TooManyBlocks(usize),
}

/// See the module's description.
pub struct Scheduler {
    pub(super) limits: Limits,
    pub(super) config: SchedConfig,
    pub(super) pools: Pools,
    pub(super) cache: PrefixCache,
    pub(super) shares: Shares,
    /// By age: ids only grow.
    pub(super) seqs: BTreeMap<SeqId, Sequence>,
    pub(super) running: BTreeSet<SeqId>,
    pub(super) waiting: BTreeSet<SeqId>,
    /// Waiting for their prefix to be read: not admitted until then.
    pub(super) held: BTreeSet<SeqId>,
    /// Acceptance over all sequences: what a new one starts from.
    pub(super) everyone: Acceptance,
    /// The same of drafts that were looked up.
    pub(super) everyones_lookups: LookupAcceptance,
    pub(super) cost: StepCost,
    pub(super) pace: Pace,
    pub(super) counters: Stats,
    next_id: u64,
}

impl Scheduler {
    /// A scheduler for an executor with these limits.
    pub fn new(limits: Limits, config: SchedConfig) -> Result<Self, LimitsError> {
        let config = SchedConfig {
            max_rows: config.max_rows.min(limits.max_rows),
            max_seqs: config.max_seqs.min(limits.max_seqs),
            ..config
        };
        for (name, size) in [
            ("vocabulary", limits.vocab_size),
            ("full block size", limits.full_block_size),
            ("sliding block size", limits.sliding_block_size),
            ("window", limits.window),
            ("number of rows", config.max_rows),
            ("number of sequences", config.max_seqs),
            ("chunk size", config.chunk),
            ("length", max_len(&limits)),
        ] {
            if size == 0 {
                return Err(LimitsError::Zero(name));
            }
        }
        let geometry = Geometry::of(&limits);
        let needed = geometry.sliding_blocks(max_len(&limits), 1);
        if needed > limits.sliding_blocks {
            return Err(LimitsError::Sliding {
                needed,
                there: limits.sliding_blocks,
            });
        }
        let count =
            |blocks: usize| u32::try_from(blocks).map_err(|_| LimitsError::TooManyBlocks(blocks));
        let pools = Pools {
            full: BlockPool::new(count(limits.full_blocks)?),
            sliding: BlockPool::new(count(limits.sliding_blocks)?),
            geometry,
        };
        Ok(Self {
            cache: PrefixCache::new(
                config.cache.clone(),
                (
                    limits.full_block_bytes as u64,
                    limits.sliding_block_bytes as u64,
                ),
            ),
            limits,
            config,
            pools,
            shares: Shares::default(),
            seqs: BTreeMap::new(),
            running: BTreeSet::new(),
            waiting: BTreeSet::new(),
            held: BTreeSet::new(),
            everyone: Acceptance::default(),
            everyones_lookups: LookupAcceptance::default(),
            cost: StepCost::default(),
            pace: Pace::default(),
            counters: Stats::default(),
            next_id: 0,
        })
    }

    /// Prompt and answer together, at most: what the model allows and the pool can hold.
    pub fn max_len(&self) -> usize {
        max_len(&self.limits)
    }

    /// The executor's limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Takes a request in. `now` is any clock that does not run backwards.
    pub fn submit(&mut self, now: Duration, request: ValidRequest) -> Submitted {
        let id = SeqId(self.next_id);
        let finished = request.finished().cloned();
        let stride = self.pools.geometry.stride();
        let sequence = Sequence::new(now, id, request, &self.config.fingerprint, stride);
        self.counters.prompt_tokens += sequence.prompt_len as u64;
        if let Some(reason) = finished {
            self.counters.finished += 1;
            return Submitted::Done(sequence.outcome(now, reason));
        }
        self.next_id += 1;
        self.shares.enter(&sequence.account, sequence.priority);
        self.seqs.insert(id, sequence);
        self.waiting.insert(id);
        Submitted::Queued(id)
    }

    /// Ends a sequence wherever it stands; its blocks become an anchor. `None`: it is not there.
    pub fn cancel(&mut self, now: Duration, seq: SeqId) -> Option<Outcome> {
        self.end(now, seq, FinishReason::Cancelled)
    }

    /// Ends a sequence that cannot be computed; what its blocks hold is not trusted.
    pub fn fail(&mut self, now: Duration, seq: SeqId, reason: String) -> Option<Outcome> {
        self.discard(seq);
        self.cache.distrust(&mut self.pools, seq);
        self.end(now, seq, FinishReason::Failed(reason))
    }

    /// Forgets everything the device holds: all sequences will be computed again from their
    /// tokens, which are the same (promise P1).
    pub fn reset(&mut self) {
        while let Some(&seq) = self.running.first() {
            self.discard(seq);
        }
        self.cache.clear(&mut self.pools);
    }

    /// Tokens of a unit of the prefix cache.
    pub fn stride(&self) -> usize {
        self.pools.geometry.stride()
    }

    /// The prefix cache, for who saves it.
    pub fn prefixes(&self) -> &PrefixCache {
        &self.cache
    }

    /// Makes room for a saved anchor in blocks that are free; `chain` are the keys of its units.
    /// What is returned has to be filled before the next step. `None`: it is there already, does
    /// not fit, or is not of this shape.
    pub fn restore(
        &mut self,
        now: Duration,
        image: &AnchorImage,
        chain: &[PrefixKey],
    ) -> Option<Restored> {
        self.cache.restore(&mut self.pools, now, image, chain)
    }

    /// Gives an anchor up.
    pub fn forget_anchor(&mut self, anchor: AnchorId) {
        self.cache.remove(&mut self.pools, anchor);
    }

    /// A waiting sequence's tokens, how many units of them the device has, and how many of the
    /// tokens it would spare; `None`: it does not wait.
    pub fn prefix_of(&self, seq: SeqId) -> Option<(&TokenList, usize, usize)> {
        let waiting = self.waiting.contains(&seq).then(|| self.seqs.get(&seq));
        let tokens = &waiting.flatten()?.tokens;
        let hit = self.cache.find(&self.pools, tokens);
        let known = self.cache.known_units(tokens);
        Some((tokens, known, hit.map_or(0, |hit| hit.len)))
    }

    /// Keeps a waiting sequence from being admitted: what it needs is being read.
    pub fn hold(&mut self, seq: SeqId) {
        if self.waiting.contains(&seq) {
            self.held.insert(seq);
        }
    }

    /// Lets a held sequence be admitted.
    pub fn release(&mut self, seq: SeqId) {
        self.held.remove(&seq);
    }

    /// Whether a sequence waits.
    pub fn is_waiting(&self, seq: SeqId) -> bool {
        self.waiting.contains(&seq)
    }

    /// Whether every sequence waits to be released.
    pub fn is_held_up(&self) -> bool {
        !self.held.is_empty() && self.held.len() == self.seqs.len()
    }

    /// Seconds that a row of prefill takes, if that was measured.
    pub fn row_seconds(&self) -> Option<f64> {
        self.pace.of_row()
    }

    /// Whether there is nothing to compute.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty()
    }

    /// Counters and what is held now.
    pub fn stats(&self) -> Stats {
        Stats {
            running: self.running.len(),
            waiting: self.waiting.len(),
            anchors: self.cache.len(),
            full_blocks_used: self.pools.full.used(),
            full_blocks_kept: self.pools.full.kept(),
            full_blocks: self.pools.full.total(),
            sliding_blocks_used: self.pools.sliding.used(),
            sliding_blocks_kept: self.pools.sliding.kept(),
            sliding_blocks: self.pools.sliding.total(),
            ..self.counters
        }
    }

    /// Checks that the books balance: every block is held as the pools say, no block that will be
    /// written is read by anyone else, every sequence is in one queue and inside its limits. For
    /// tests; costs a look at every block.
    pub fn audit(&self) -> Result<(), String> {
        let (mut full, mut sliding) = (BTreeSet::new(), BTreeSet::new());
        for (id, sequence) in &self.seqs {
            let (runs, waits) = (self.running.contains(id), self.waiting.contains(id));
            if runs == waits || runs != sequence.resident.is_some() {
                return Err(format!("{id:?}: running {runs}, waiting {waits}"));
            }
            if let Some(resident) = &sequence.resident {
                let ids = resident.table.ids();
                full.extend(ids.full);
                sliding.extend(ids.sliding);
                if resident.computed >= sequence.tokens.len() {
                    return Err(format!("{id:?} has nothing left to compute"));
                }
                if !resident
                    .table
                    .may_write_from(&self.pools, resident.computed)
                {
                    return Err(format!("{id:?} would write where others read"));
                }
            }
            if sequence.tokens.len() >= sequence.limit {
                return Err(format!("{id:?} lives on at its limit"));
            }
        }
        if self.running.len() + self.waiting.len() != self.seqs.len() {
            return Err("a queue has a sequence that is not there".into());
        }
        let used = (self.pools.full.used(), self.pools.sliding.used());
        if used != (full.len(), sliding.len()) {
            return Err(format!(
                "{used:?} blocks are used but {:?} held",
                (full.len(), sliding.len())
            ));
        }
        let (kept_full, kept_sliding) = self.cache.blocks();
        let alone = (
            kept_full.difference(&full).count(),
            kept_sliding.difference(&sliding).count(),
        );
        let kept = (self.pools.full.kept(), self.pools.sliding.kept());
        if kept != alone {
            return Err(format!(
                "{kept:?} blocks are kept but {alone:?} in the cache"
            ));
        }
        self.cache.audit()
    }

    /// Takes a sequence's blocks away, whose contents are not worth keeping; it waits to be computed
    /// again.
    pub(super) fn discard(&mut self, seq: SeqId) {
        let resident = self
            .seqs
            .get_mut(&seq)
            .and_then(|sequence| sequence.resident.take());
        if let Some(resident) = resident {
            resident.table.release(&mut self.pools);
            self.running.remove(&seq);
            self.waiting.insert(seq);
        }
    }

    /// Takes a sequence's blocks away; it waits. What it computed becomes an anchor, which goes
    /// where others go when blocks are needed: if it is still there, on the device or below, when
    /// the sequence's turn comes again, nothing is computed twice.
    pub(super) fn evict(&mut self, now: Duration, seq: SeqId) {
        let Some(sequence) = self.seqs.get_mut(&seq) else {
            return;
        };
        let Some(resident) = sequence.resident.take() else {
            return;
        };
        self.running.remove(&seq);
        self.waiting.insert(seq);
        let mut table = resident.table;
        table.trim(&mut self.pools, resident.computed);
        let mut tokens = sequence.tokens.clone();
        tokens.truncate(resident.computed);
        let origin = Origin {
            seq,
            run: None,
            place: None,
            now,
        };
        self.cache.keep_end(&mut self.pools, origin, &tokens, table);
    }

    /// Forgets a sequence. What it computed becomes an anchor.
    pub(super) fn end(
        &mut self,
        now: Duration,
        seq: SeqId,
        reason: FinishReason,
    ) -> Option<Outcome> {
        let mut sequence = self.seqs.remove(&seq)?;
        self.running.remove(&seq);
        self.waiting.remove(&seq);
        self.held.remove(&seq);
        self.shares.leave(&sequence.account);
        self.counters.finished += 1;
        let outcome = sequence.outcome(now, reason);
        if let Some(resident) = sequence.resident.take() {
            // What lies behind the computed tokens are rejected drafts: dead.
            let mut table = resident.table;
            table.trim(&mut self.pools, resident.computed);
            sequence.tokens.truncate(resident.computed);
            let origin = Origin {
                seq,
                run: sequence.run.as_deref(),
                place: Some(Place::End),
                now,
            };
            let left = self
                .cache
                .keep_end(&mut self.pools, origin, &sequence.tokens, table);
            if let (Some(older), Some(newer)) = (sequence.origin, left) {
                self.cache.supersede(older, newer);
            }
        }
        Some(outcome)
    }
}

fn max_len(limits: &Limits) -> usize {
    limits
        .max_model_len
        .min(limits.full_blocks.saturating_mul(limits.full_block_size))
}
