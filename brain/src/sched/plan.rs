//! Planning a step: who gets rows, and the blocks behind them.
//!
//! Work per step is in the number of sequences and the rows planned. The one thing that grows with
//! the context is the list of block numbers of each sequence (and the token history of a request
//! with penalties, which the executor needs).

use std::time::Duration;

use super::{
    anchors::Hit,
    cost::Batch,
    scheduler::Scheduler,
    sequence::{Resident, Sequence},
    types::{DraftDepth, SampleStep, SeqId, SeqStep, Step},
};

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
        let mut picks = Vec::with_capacity(self.running.len());
        self.pick_decodes(&mut picks);
        self.admit(now);
        self.add_drafts(&mut picks);
        self.pick_prefills(&mut picks);
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
    fn pick_decodes(&mut self, picks: &mut Vec<Pick>) {
        let decoding: Vec<SeqId> = self
            .running
            .iter()
            .copied()
            .filter(|&seq| self.remaining(seq) == Some(1))
            .collect();
        for seq in decoding {
            if self.secure_row(seq, picks) {
                picks.push(Pick {
                    seq,
                    rows: 1,
                    drafts: 0,
                });
            }
        }
    }

    /// Drafts as far as the rows go, shared evenly; some rows are left for prefill.
    fn add_drafts(&mut self, picks: &mut [Pick]) {
        let prefilling = self.running.len() - picks.len();
        let reserve = if prefilling == 0 {
            0
        } else {
            prefilling.max(self.config.max_rows / 4)
        };
        let mut budget = self.config.max_rows.saturating_sub(picks.len() + reserve);
        let mut left = picks.len();
        for pick in picks {
            let share = budget.div_ceil(left);
            left -= 1;
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
            pick.drafts = self.grow(pick.seq, computed + 1, wanted);
            budget -= pick.drafts;
        }
    }

    /// Chunks of prefill, the least served run first, until the rows are used up.
    fn pick_prefills(&mut self, picks: &mut Vec<Pick>) {
        let used: usize = picks.iter().map(|pick| pick.rows + pick.drafts).sum();
        let mut budget = self.config.max_rows.saturating_sub(used);
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
            if wanted == 0 {
                continue;
            }
            let mut rows = self.grow(seq, computed, wanted);
            if rows == 0 && self.secure_row(seq, picks) {
                rows = 1;
            }
            if rows > 0 {
                picks.push(Pick {
                    seq,
                    rows,
                    drafts: 0,
                });
                budget -= rows;
            }
        }
    }

    /// Lets waiting sequences in, the least served run first, as long as all that run can finish
    /// their prefill. Who is first and does not fit is waited for: nobody overtakes it for ever.
    fn admit(&mut self, now: Duration) {
        let at_most = self.config.max_seqs.min(self.config.max_rows);
        while self.running.len() < at_most {
            let next = self
                .waiting
                .iter()
                .filter_map(|seq| self.seqs.get(seq))
                .min_by_key(|sequence| (self.shares.level(&sequence.account), sequence.id));
            let Some(sequence) = next else { break };
            let seq = sequence.id;
            let hit = self.anchors.find(&sequence.tokens);
            if !self.fits_beside_the_running(sequence, hit) {
                break;
            }
            let (table, cached) = hit
                .and_then(|hit| Some((self.anchors.take(hit)?, hit.len)))
                .unwrap_or_default();
            self.waiting.remove(&seq);
            self.running.insert(seq);
            if let Some(sequence) = self.seqs.get_mut(&seq) {
                let before = sequence.usage.cached;
                sequence.admit(now, table, cached);
                self.counters.cached_tokens += (sequence.usage.cached - before) as u64;
            }
        }
    }

    /// Whether the blocks suffice for its tokens and those of all that run, and a block more each.
    /// Alone every sequence fits: its limit is what the pools hold, anchors included.
    fn fits_beside_the_running(&self, sequence: &Sequence, hit: Option<Hit>) -> bool {
        let geometry = self.pools.geometry;
        let need = |sequence: &Sequence, held: (usize, usize)| {
            let len = sequence.tokens.len() + 1;
            let full = geometry.full_blocks(len).saturating_sub(held.0);
            (full, geometry.sliding_blocks(len, 1).saturating_sub(held.1))
        };
        let held = hit.map_or((0, 0), |hit| hit.held);
        let (mut full, mut sliding) = need(sequence, held);
        for other in self.running.iter().filter_map(|seq| self.seqs.get(seq)) {
            let held = other
                .resident
                .as_ref()
                .map_or((0, 0), |resident| resident.table.held());
            let (more_full, more_sliding) = need(other, held);
            (full, sliding) = (full + more_full + 1, sliding + more_sliding);
        }
        let kept = self.anchors.held();
        full <= self.pools.full.free() + kept.0 - held.0
            && sliding <= self.pools.sliding.free() + kept.1 - held.1
    }

    /// Blocks for the next row of a sequence, if need be from anchors and from younger sequences.
    /// False: it was the youngest itself, gave way and waits.
    fn secure_row(&mut self, seq: SeqId, picks: &mut Vec<Pick>) -> bool {
        loop {
            let Some(computed) = self.computed(seq) else {
                return false;
            };
            if self.grow(seq, computed, 1) == 1 {
                return true;
            }
            let Some(&youngest) = self.running.last() else {
                return false;
            };
            self.evict(youngest);
            self.counters.preemptions += 1;
            picks.retain(|pick| pick.seq != youngest);
        }
    }

    /// Covers as many of `rows` positions from `start` on as free blocks and anchors allow;
    /// returns how many.
    fn grow(&mut self, seq: SeqId, start: usize, rows: usize) -> usize {
        let geometry = self.pools.geometry;
        let Some(Resident { table, .. }) = self
            .seqs
            .get_mut(&seq)
            .and_then(|sequence| sequence.resident.as_mut())
        else {
            return 0;
        };
        let kept = self.anchors.held();
        let (full, sliding) = (
            self.pools.full.free() + kept.0,
            self.pools.sliding.free() + kept.1,
        );
        let rows = rows.min(table.reach(geometry, full, sliding).saturating_sub(start));
        while !table.grow(&mut self.pools, start + rows) {
            if !self.anchors.drop_oldest(&mut self.pools) {
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
        match sequence.draft {
            DraftDepth::Fixed(depth) => at_most.min(depth as usize),
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
