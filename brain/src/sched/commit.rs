//! Committing a step: what its results mean for the sequences.

use std::time::Duration;

use super::{
    cost::{Batch, Drafted},
    pins::Place,
    prefix::{Origin, PrefixCache},
    scheduler::{Event, Scheduler},
    sequence::Sequence,
    table::Pools,
    types::{SeqOutput, SeqStep, Step, StepOutput, TokenId},
};

/// An executor's answer that does not answer the step. Nothing of it was taken in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the executor's answer does not fit the step: {0}")]
pub struct BadOutput(String);

impl Scheduler {
    /// Takes a step's results in; `elapsed` is how long the executor took.
    ///
    /// All of the answer is checked before any of it counts. Sequences that ended since the step
    /// was planned are passed over.
    pub fn commit(
        &mut self,
        now: Duration,
        step: &Step,
        output: StepOutput,
        elapsed: Duration,
    ) -> Result<Vec<Event>, BadOutput> {
        self.check(step, &output)?;
        self.learn_cost(step, &output, elapsed);
        self.counters.steps += 1;
        self.counters.rows += step.rows() as u64;
        let mut events = Vec::new();
        for (rows, result) in step.seqs.iter().zip(output.seqs) {
            self.commit_sequence(now, rows, result, &mut events);
        }
        Ok(events)
    }

    fn check(&self, step: &Step, output: &StepOutput) -> Result<(), BadOutput> {
        let bad = |what: String| Err(BadOutput(what));
        if step.seqs.len() != output.seqs.len() {
            return bad(format!(
                "{} sequences of {}",
                output.seqs.len(),
                step.seqs.len()
            ));
        }
        for (rows, result) in step.seqs.iter().zip(&output.seqs) {
            let emitted = result.tokens.len();
            let Some(sample) = &rows.sample else {
                if emitted + result.drafts.len() > 0 {
                    return bad("tokens for a chunk of prefill".into());
                }
                continue;
            };
            if emitted == 0 || emitted > sample.drafts + 1 {
                return bad(format!("{emitted} tokens for {} drafts", sample.drafts));
            }
            if result.drafts.len() > sample.next_drafts {
                return bad(format!(
                    "{} drafts where {} were asked for",
                    result.drafts.len(),
                    sample.next_drafts
                ));
            }
            let drafts = &rows.tokens[rows.tokens.len() - sample.drafts..];
            let accepted = result.tokens[..emitted - 1].iter().map(|token| token.id);
            if !accepted.eq(drafts[..emitted - 1].iter().copied()) {
                return bad("an accepted token is not the draft".into());
            }
            let in_vocabulary = |id: TokenId| (id as usize) < self.limits.vocab_size;
            let masks = sample.masks.iter().zip(&result.tokens);
            if let Some((_, token)) = masks
                .into_iter()
                .find(|(mask, token)| !mask.allows(token.id))
            {
                return bad(format!("token {} breaks its row's mask", token.id));
            }
            if !result.tokens.iter().all(|token| in_vocabulary(token.id))
                || !result.drafts.iter().all(|&id| in_vocabulary(id))
            {
                return bad("a token outside the vocabulary".into());
            }
        }
        Ok(())
    }

    /// Steps that only decode teach what is usual and what a draft costs, others what rows of
    /// prefill do.
    fn learn_cost(&mut self, step: &Step, output: &StepOutput, elapsed: Duration) {
        let (mut drafted, mut sequences, mut context) = (Drafted::default(), 0, 0);
        let (mut prefill, mut before) = (0, 0);
        for (rows, result) in step.seqs.iter().zip(&output.seqs) {
            match &rows.sample {
                Some(sample) if rows.tokens.len() == sample.drafts + 1 => {
                    drafted.made += sample.next_drafts;
                    drafted.checked += sample.drafts;
                    drafted.accepted += result.tokens.len() - 1;
                    sequences += 1;
                    context += rows.start;
                }
                _ => {
                    prefill += rows.tokens.len();
                    before += rows.tokens.len() * rows.start;
                }
            }
        }
        let context = context / sequences.max(1);
        let batch = Batch { sequences, context };
        if prefill > 0 {
            let rows = (prefill, before / prefill);
            self.pace.observe_prefill(batch, rows, elapsed);
            return;
        }
        self.pace.observe_decode(batch, elapsed);
        self.cost.observe(batch, drafted, elapsed);
    }

    fn commit_sequence(
        &mut self,
        now: Duration,
        rows: &SeqStep,
        result: SeqOutput,
        events: &mut Vec<Event>,
    ) {
        let Some(sequence) = self.seqs.get_mut(&rows.seq) else {
            return;
        };
        let Some(resident) = sequence.resident.as_mut() else {
            return;
        };
        if resident.computed != rows.start {
            return;
        }
        self.shares.charge(&sequence.account, rows.tokens.len());
        let Some(sample) = &rows.sample else {
            resident.computed += rows.tokens.len();
            leave_anchors(&mut self.cache, &mut self.pools, now, sequence);
            let Some(resident) = sequence.resident.as_mut() else {
                return;
            };
            resident.table.slide(&mut self.pools, resident.computed);
            return;
        };
        let mut tokens = result.tokens;
        let right = tokens.len() - 1;
        // Inputs whose keys and values stand: all that were known, and the drafts that were right.
        let written = rows.start + rows.tokens.len() - sample.drafts + right;
        let asked = std::mem::replace(&mut sequence.asked, sample.next_drafts);
        self.counters.depth_changes += u64::from(asked != sample.next_drafts);
        let looked_up = resident.looked_up.take();
        // What had to come says nothing about who drafts; what could not come does.
        let own = resident
            .drafts
            .len()
            .saturating_sub(std::mem::take(&mut resident.forced));
        let cut = std::mem::take(&mut resident.cut) && sample.drafts >= own;
        let own = own.min(sample.drafts);
        self.counters.forced_tokens += (sample.drafts - own) as u64;
        self.counters.cut_drafts += u64::from(cut);
        resident.drafts = result.drafts;

        let (kept, end) = sequence.append(now, &tokens);
        tokens.truncate(kept);
        let accepted = right.min(kept);
        // Behind a stop, inputs were computed that are no tokens of the sequence.
        let computed = written.min(sequence.tokens.len());
        if let Some(resident) = sequence.resident.as_mut() {
            resident.computed = computed;
        }
        leave_anchors(&mut self.cache, &mut self.pools, now, sequence);
        if let Some(resident) = sequence.resident.as_mut() {
            resident.table.slide(&mut self.pools, computed);
        }
        // Drafts behind a stop say nothing about the drafter.
        let judged = match kept <= right {
            true => kept.min(own),
            false => own + usize::from(cut),
        };
        let right_of_own = accepted.min(own);
        match looked_up {
            Some((kind, _)) => {
                let everyone = &mut self.everyones_lookups;
                sequence
                    .lookups
                    .observe(everyone, kind, judged, right_of_own);
                self.counters.looked_up_tokens += sample.drafts as u64;
                self.counters.looked_up_accepted += accepted as u64;
            }
            None => {
                sequence.depth.observe(judged, right_of_own);
                self.everyone.observe(judged, right_of_own);
            }
        }
        sequence.usage.drafted += sample.drafts;
        sequence.usage.accepted += accepted;
        sequence.usage.rounds += 1;
        self.counters.drafted_tokens += sample.drafts as u64;
        self.counters.accepted_tokens += accepted as u64;
        self.counters.generated_tokens += kept as u64;
        if !sample.masks.is_empty() {
            self.counters.constrained_tokens += kept as u64;
        }
        self.counters.rounds += 1;
        events.push(Event::Tokens {
            seq: rows.seq,
            tokens,
            drafted: sample.drafts,
            accepted,
        });
        if let Some(reason) = end
            && let Some(outcome) = self.end(now, rows.seq, reason)
        {
            events.push(Event::Finished {
                seq: rows.seq,
                outcome,
            });
        }
    }
}

/// Leaves the anchors whose places were computed in this step: the windows before them are still
/// there.
fn leave_anchors(
    cache: &mut PrefixCache,
    pools: &mut Pools,
    now: Duration,
    sequence: &mut Sequence,
) {
    let Some(resident) = &sequence.resident else {
        return;
    };
    let prompt_end = pools.geometry.boundary(sequence.prompt_len);
    while let Some(&mark) = sequence
        .marks
        .first()
        .filter(|&&at| at <= resident.computed)
    {
        sequence.marks.remove(0);
        let origin = Origin {
            seq: sequence.id,
            run: sequence.run.as_deref(),
            place: (mark == prompt_end).then_some(Place::Prompt),
            now,
        };
        cache.keep_at(pools, origin, &sequence.tokens, mark, &resident.table);
    }
}
