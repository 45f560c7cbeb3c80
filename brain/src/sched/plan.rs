//! Planning a step: who gets rows, and the blocks behind them.
//!
//! Work per step is in the number of sequences and the rows planned. The one thing that grows with
//! the context is the list of block numbers of each sequence (and the token history of a request
//! with penalties, which the executor needs).

use std::time::Duration;

use super::{
    below::{Below, Nothing},
    cost::Batch,
    pace::Room,
    prefix::Hit,
    scheduler::Scheduler,
    sequence::{Resident, Sequence},
    types::{DraftDepth, Group, SampleStep, SeqId, SeqStep, Step},
};

/// How long a step with prefill in it may take, in steps of those that decode: a prompt of any
/// length makes nobody wait longer for the next token.
const LONGEST_STEP: f64 = 2.2;
/// Drafts of a round, whoever makes them: more than any drafter makes, no executor checks.
pub(crate) const MOST_CHECKED: usize = 8;

/// Rows a sequence gets in the step being planned.
struct Pick {
    seq: SeqId,
    /// Tokens that are known.
    rows: usize,
    /// Drafts behind them.
    drafts: usize,
}

impl Scheduler {
    /// What to compute next; `None` when there is nothing to compute.
    pub fn plan(&mut self, now: Duration) -> Option<Step> {
        self.plan_over(now, &mut Nothing)
    }

    /// The same, with what lies below the device's memory. What the cache gives up meanwhile is
    /// kept there before this returns.
    pub fn plan_over(&mut self, now: Duration, below: &mut dyn Below) -> Option<Step> {
        let step = self.plan_step(now, below);
        self.keep_below(below);
        step
    }

    fn keep_below(&mut self, below: &mut dyn Below) {
        let dropped = self.cache.take_dropped();
        if !dropped.is_empty() {
            below.keep(dropped);
        }
    }

    fn plan_step(&mut self, now: Duration, below: &mut dyn Below) -> Option<Step> {
        let mut picks = Vec::with_capacity(self.running.len());
        self.pick_decodes(now, &mut picks);
        self.admit(now, below);
        self.add_drafts(now, &mut picks);
        self.pick_prefills(now, &mut picks);
        if picks.is_empty() {
            return None;
        }
        let batch = self.batch_of(&picks);
        let seqs = picks
            .iter()
            .filter_map(|pick| self.rows_of(pick, batch))
            .collect();
        Some(Step { seqs })
    }

    /// The sequences that emit in this step: those of the next decoding step, if all go on.
    fn batch_of(&self, picks: &[Pick]) -> Batch {
        let (mut sequences, mut tokens) = (0, 0);
        for pick in picks {
            let Some(sequence) = self.seqs.get(&pick.seq) else {
                continue;
            };
            if sequence.remaining() == pick.rows {
                sequences += 1;
                tokens += sequence.tokens.len() - 1;
            }
        }
        Batch {
            sequences,
            context: tokens / sequences.max(1),
        }
    }

    /// One row for every sequence that has one token left to compute.
    fn pick_decodes(&mut self, now: Duration, picks: &mut Vec<Pick>) {
        let decoding: Vec<SeqId> = self
            .running
            .iter()
            .copied()
            .filter(|&seq| self.remaining(seq) == Some(1))
            .collect();
        for seq in decoding {
            if self.secure_row(now, seq, picks) {
                picks.push(Pick {
                    seq,
                    rows: 1,
                    drafts: 0,
                });
            }
        }
    }

    /// Drafts as far as the rows go, shared evenly; some rows are left for prefill.
    fn add_drafts(&mut self, now: Duration, picks: &mut [Pick]) {
        let prefilling = self.running.len() - picks.len();
        let reserve = if prefilling == 0 {
            0
        } else {
            prefilling.max(self.config.max_rows / 4)
        };
        let mut budget = self.config.max_rows.saturating_sub(picks.len() + reserve);
        let mut left = picks.len();
        let batch = self.batch_of(picks);
        for pick in picks {
            let share = budget.div_ceil(left);
            left -= 1;
            self.look_up(pick.seq, share, batch);
            if let Some(sequence) = self.seqs.get_mut(&pick.seq) {
                let at_most = sequence.drafts_at(sequence.tokens.len()).min(share);
                let confined = self.limits.masked_rows.saturating_sub(1);
                sequence.constrain_drafts(at_most.min(MOST_CHECKED).min(confined));
            }
            let Some((wanted, computed)) = self.seqs.get(&pick.seq).and_then(|sequence| {
                let resident = sequence.resident.as_ref()?;
                let allowed = sequence.drafts_at(sequence.tokens.len());
                Some((
                    resident.drafts.len().min(allowed).min(share),
                    resident.computed,
                ))
            }) else {
                continue;
            };
            pick.drafts = self.grow(now, pick.seq, computed + 1, wanted);
            budget -= pick.drafts;
        }
    }

    /// Takes drafts from the sequence's own text where these are likelier to be right than those
    /// that the drafter made.
    fn look_up(&mut self, seq: SeqId, share: usize, batch: Batch) {
        if !self.config.lookups {
            return;
        }
        let Some(sequence) = self.seqs.get_mut(&seq) else {
            return;
        };
        let at_most = sequence.drafts_at(sequence.tokens.len()).min(share);
        let (most, fixed) = match sequence.draft {
            DraftDepth::Fixed(depth) => (depth as usize, true),
            DraftDepth::Auto => (usize::MAX, false),
        };
        let at_most = at_most.min(most).min(MOST_CHECKED);
        let Some(resident) = sequence.resident.as_mut() else {
            return;
        };
        if at_most == 0 || resident.looked_up.is_some() {
            return;
        }
        let found = sequence.lookups.find(
            sequence.tokens.ids(),
            &self.everyones_lookups,
            &self.cost,
            batch,
            (at_most, fixed),
        );
        let Some(found) = found else { return };
        let made = resident.drafts.len().min(at_most);
        if found.expected <= sequence.depth.expected(&self.everyone, made) {
            sequence.lookups.pass_over(found.kind);
            return;
        }
        let share = found.expected / found.drafts.len() as f64;
        resident.drafts = found.drafts;
        resident.looked_up = Some((found.kind, share));
    }

    /// Chunks of prefill, the least served run first, until the rows are used up; beside sequences
    /// that decode, no more than leave them their share.
    fn pick_prefills(&mut self, now: Duration, picks: &mut Vec<Pick>) {
        let used: usize = picks.iter().map(|pick| pick.rows + pick.drafts).sum();
        let mut budget = self.config.max_rows.saturating_sub(used);
        let mut room = match picks.is_empty() {
            true => None,
            false => Some(self.pace.room(self.batch_of(picks), LONGEST_STEP)),
        };
        if room == Some(Room::Later) {
            return;
        }
        // Something of a prompt is computed in every step.
        let mut least = 1;
        let mut prefilling: Vec<SeqId> = self
            .running
            .iter()
            .copied()
            .filter(|seq| picks.iter().all(|pick| pick.seq != *seq))
            .collect();
        prefilling.sort_by_cached_key(|seq| {
            (
                self.seqs
                    .get(seq)
                    .map(|sequence| self.shares.level(&sequence.account)),
                *seq,
            )
        });
        for seq in prefilling {
            let Some(sequence) = self.seqs.get(&seq) else {
                continue;
            };
            let Some(computed) = sequence.resident.as_ref().map(|resident| resident.computed)
            else {
                continue;
            };
            let wanted = sequence.remaining().min(self.config.chunk).min(budget);
            let fitting = room.map_or(wanted, |room| self.pace.rows(computed, room).max(least));
            let wanted = wanted.min(fitting);
            if wanted == 0 {
                continue;
            }
            let mut rows = self.grow(now, seq, computed, wanted);
            if rows == 0 && self.secure_row(now, seq, picks) {
                rows = 1;
            }
            if rows > 0 {
                picks.push(Pick {
                    seq,
                    rows,
                    drafts: 0,
                });
                budget -= rows;
                room = room.map(|room| self.pace.room_behind(room, rows, computed));
                least = 0;
            }
        }
    }

    /// Lets waiting sequences in, the least served run first, as long as all that run can finish
    /// their prefill. Who is first and does not fit is waited for: nobody overtakes it for ever.
    fn admit(&mut self, now: Duration, below: &mut dyn Below) {
        let at_most = self.config.max_seqs.min(self.config.max_rows);
        while self.running.len() < at_most {
            let next = self
                .waiting
                .difference(&self.held)
                .filter_map(|seq| self.seqs.get(seq))
                .min_by_key(|sequence| (self.shares.level(&sequence.account), sequence.id));
            let Some(sequence) = next else { break };
            let seq = sequence.id;
            let mut hit = self.cache.find(&self.pools, &sequence.tokens);
            if !self.fits_beside_the_running(sequence, hit) {
                break;
            }
            let lifted = self.lift(now, seq, hit, below);
            if let Some(sequence) = self.seqs.get(&seq).filter(|_| lifted.is_some()) {
                // Anchors went and came: look again.
                hit = self.cache.find(&self.pools, &sequence.tokens);
                if !self.fits_beside_the_running(sequence, hit) {
                    break;
                }
            }
            let taken = hit.and_then(|hit| Some((self.cache.take(&mut self.pools, hit)?, hit)));
            if let Some((_, hit)) = &taken {
                self.counters.prefix_hits += 1;
                self.counters.prefix_shared += u64::from(!hit.takes_tail);
                self.counters.lifted += u64::from(lifted == Some(true));
            }
            self.count_hit(seq, taken.as_ref().map_or(0, |(_, hit)| hit.len));
            let (table, cached, origin) = taken
                .map(|(table, hit)| (table, hit.len, Some(hit.anchor)))
                .unwrap_or_default();
            let marks = self.marks(seq, cached);
            self.waiting.remove(&seq);
            self.running.insert(seq);
            if let Some(sequence) = self.seqs.get_mut(&seq) {
                let before = sequence.usage.cached;
                sequence.admit(now, table, cached);
                (sequence.marks, sequence.origin) = (marks, origin);
                self.counters.cached_tokens += (sequence.usage.cached - before) as u64;
            }
        }
    }

    /// Brings what a sequence needs up from below, if it is there and spares more than what the
    /// device has. `None`: nothing moved; else whether it came.
    fn lift(
        &mut self,
        now: Duration,
        seq: SeqId,
        hit: Option<Hit>,
        below: &mut dyn Below,
    ) -> Option<bool> {
        let tokens = &self.seqs.get(&seq)?.tokens;
        let known = self.cache.known_units(tokens);
        let found = below.best(tokens, known, hit.map_or(0, |hit| hit.len))?;
        if let Some(hit) = hit {
            self.cache.touch(hit.anchor);
        }
        let (image, chain) = (&found.image, &found.chain);
        let restored = self
            .cache
            .restore_over_others(&mut self.pools, now, image, chain);
        self.keep_below(below);
        let Some(restored) = restored else {
            return Some(false);
        };
        let filled = below.fill(&found, &restored);
        if filled {
            self.cache.enforce(&mut self.pools, now);
        } else {
            self.cache.remove(&mut self.pools, restored.anchor);
        }
        Some(filled)
    }

    /// Counts what a sequence that is admitted found of its tokens.
    fn count_hit(&mut self, seq: SeqId, len: usize) {
        let Some(sequence) = self.seqs.get(&seq) else {
            return;
        };
        let known = self.cache.known_units(&sequence.tokens) * self.pools.geometry.stride();
        let partial = len > 0 && len + 1 < sequence.tokens.len();
        self.counters.partial_hits += u64::from(partial);
        self.counters.anchor_misses += u64::from(len < known);
    }

    /// Where a sequence leaves anchors on its way through tokens that are known already: behind
    /// the first turn, where others went another way, and at the end of the prompt.
    fn marks(&self, seq: SeqId, cached: usize) -> Vec<usize> {
        let Some(sequence) = self.seqs.get(&seq) else {
            return Vec::new();
        };
        let stride = self.pools.geometry.stride();
        let prompt = &sequence.tokens.ids()[..sequence.prompt_len];
        let first_turn = prompt
            .iter()
            .position(|token| self.config.turn_ends.contains(token))
            .map_or(0, |at| at + 1);
        let mut marks = vec![
            first_turn / stride * stride,
            self.cache.known_units(&sequence.tokens) * stride,
            self.pools.geometry.boundary(sequence.prompt_len),
        ];
        marks.retain(|&mark| mark > cached && mark < sequence.tokens.len());
        marks.sort_unstable();
        marks.dedup();
        marks
    }

    /// Whether the blocks suffice for its tokens and those of all that run, and a block more each.
    /// Alone every sequence fits: its limit is what the pools hold, the cache's blocks included.
    fn fits_beside_the_running(&self, sequence: &Sequence, hit: Option<Hit>) -> bool {
        let geometry = self.pools.geometry;
        let need = |sequence: &Sequence, held: (usize, usize)| {
            let len = sequence.tokens.len() + 1;
            let full = geometry.full_blocks(len).saturating_sub(held.0);
            (full, geometry.sliding_blocks(len, 1).saturating_sub(held.1))
        };
        // What comes with the hit is no longer free for the taking.
        let (held, idle) = hit.map_or((0, (0, 0)), |hit| (hit.full, hit.idle));
        let (mut full, mut sliding) = need(sequence, (held, idle.1));
        for other in self.running.iter().filter_map(|seq| self.seqs.get(seq)) {
            let held = other.resident.as_ref().map_or((0, 0), |resident| {
                let alone = resident.table.window_held_alone(&self.pools);
                (resident.table.held().0, alone)
            });
            let (more_full, more_sliding) = need(other, held);
            (full, sliding) = (full + more_full + 1, sliding + more_sliding);
        }
        full <= self.pools.full.free() + self.pools.full.kept() - idle.0
            && sliding <= self.pools.sliding.free() + self.pools.sliding.kept() - idle.1
    }

    /// Blocks for the next row of a sequence, if need be from the cache and from younger sequences.
    /// False: it was the youngest itself, gave way and waits.
    fn secure_row(&mut self, now: Duration, seq: SeqId, picks: &mut Vec<Pick>) -> bool {
        loop {
            let Some(computed) = self.computed(seq) else {
                return false;
            };
            if self.grow(now, seq, computed, 1) == 1 {
                return true;
            }
            let Some(&youngest) = self.running.last() else {
                return false;
            };
            self.evict(now, youngest);
            self.counters.preemptions += 1;
            picks.retain(|pick| pick.seq != youngest);
        }
    }

    /// Covers as many of `rows` positions from `start` on as free blocks and the cache allow;
    /// returns how many.
    fn grow(&mut self, now: Duration, seq: SeqId, start: usize, rows: usize) -> usize {
        let geometry = self.pools.geometry;
        let Some(Resident { table, .. }) = self
            .seqs
            .get_mut(&seq)
            .and_then(|sequence| sequence.resident.as_mut())
        else {
            return 0;
        };
        let (full, sliding) = (
            self.pools.full.free() + self.pools.full.kept(),
            self.pools.sliding.free() + self.pools.sliding.kept(),
        );
        let rows = rows.min(table.reach(geometry, full, sliding).saturating_sub(start));
        while !table.grow(&mut self.pools, start + rows) {
            let (missing, _) = table.missing(geometry, start + rows);
            let wanted = match missing > self.pools.full.free() {
                true => Group::Full,
                false => Group::Sliding,
            };
            if !self.cache.drop_one(&mut self.pools, now, wanted) {
                return 0;
            }
        }
        rows
    }

    /// The rows of a pick as an executor takes them. The sequences of `batch` emit.
    fn rows_of(&self, pick: &Pick, batch: Batch) -> Option<SeqStep> {
        let sequence = self.seqs.get(&pick.seq)?;
        let resident = sequence.resident.as_ref()?;
        let start = resident.computed;
        let end = start + pick.rows;
        let known = sequence.tokens.ids();
        let mut tokens = Vec::with_capacity(pick.rows + pick.drafts);
        tokens.extend_from_slice(&known[start..end]);
        tokens.extend_from_slice(&resident.drafts[..pick.drafts]);
        let sample = (end == known.len()).then(|| SampleStep {
            drafts: pick.drafts,
            params: sequence.params.clone(),
            generated: sequence.generated() as u32,
            history: if sequence.params.reads_history() {
                known.to_vec()
            } else {
                Vec::new()
            },
            prompt_len: sequence.prompt_len,
            next_drafts: self.next_drafts(sequence, batch),
            masks: sequence.masks(pick.drafts),
        });
        Some(SeqStep {
            seq: pick.seq,
            tokens,
            start,
            tables: resident.table.ids(),
            sample,
        })
    }

    /// Drafts asked for the round after this one, in which the sequence emits at least a token.
    fn next_drafts(&self, sequence: &Sequence, batch: Batch) -> usize {
        let share = (self.config.max_rows / batch.sequences.max(1)).saturating_sub(1);
        let at_most = sequence
            .drafts_at(sequence.tokens.len() + 1)
            .min(self.limits.max_drafts)
            .min(share);
        // What could not be checked is not drafted.
        let at_most = match sequence.is_constrained() {
            true => at_most.min(self.limits.masked_rows.saturating_sub(1)),
            false => at_most,
        };
        match sequence.draft {
            DraftDepth::Fixed(depth) => at_most.min(depth as usize),
            // The text will go on as it did: nobody needs to draft it.
            DraftDepth::Auto if sequence.repeats_itself() => 0,
            DraftDepth::Auto => sequence
                .depth
                .choose(&self.everyone, &self.cost, batch, at_most),
        }
    }

    fn remaining(&self, seq: SeqId) -> Option<usize> {
        self.seqs.get(&seq).map(Sequence::remaining)
    }

    fn computed(&self, seq: SeqId) -> Option<usize> {
        Some(self.seqs.get(&seq)?.resident.as_ref()?.computed)
    }
}
