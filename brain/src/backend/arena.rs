//! What changes from step to step: rows, positions, block tables, parameters, and the results.
//!
//! An executor fills it from a [`Step`] after checking every number in it, so that the operations
//! below can index without fear.

use std::{ops::Range, sync::Arc};

use super::{Limits, ops::Rows};
use crate::{
    model::plan::Kind,
    sched::{
        MOST_CHECKED,
        mask::Mask,
        types::{BlockTables, Emitted, SampleStep, SamplingParams, SeqStep, Step, TokenId},
    },
};

/// One row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its input token.
    pub token: TokenId,
    /// Its absolute position.
    pub position: usize,
    /// Keys before this position are seen (the row's own included, where it has one).
    pub end: usize,
    /// Index of its sequence in the step.
    pub seq: usize,
}

/// Rows that follow each other in one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Index of the sequence in the step.
    pub seq: usize,
    /// First row.
    pub start: usize,
    /// How many.
    pub count: usize,
}

/// Rows with their spans.
#[derive(Clone, Debug, Default)]
pub struct RowSet {
    /// The rows.
    pub rows: Vec<Row>,
    /// Every row is in one span; spans are in order.
    pub spans: Vec<Span>,
}

impl RowSet {
    fn clear(&mut self) {
        self.rows.clear();
        self.spans.clear();
    }

    fn push(&mut self, row: Row) {
        match self.spans.last_mut() {
            Some(span) if span.seq == row.seq => span.count += 1,
            _ => self.spans.push(Span {
                seq: row.seq,
                start: self.rows.len(),
                count: 1,
            }),
        }
        self.rows.push(row);
    }
}

/// A sequence of the step.
#[derive(Clone, Debug)]
pub struct Seq {
    full: Range<usize>,
    sliding: Range<usize>,
    sliding_first: usize,
    /// Its emitting rows in [`Arena::out`].
    pub out: Range<usize>,
    /// Parameters; `None` for a chunk of prefill.
    pub params: Option<Arc<SamplingParams>>,
    /// Tokens generated before the first emitted one.
    pub generated: u32,
    /// How much of `history` is prompt.
    pub prompt_len: usize,
    /// Tokens before the first emitted one, if penalties read them; grows as tokens are chosen.
    pub history: Vec<TokenId>,
    /// Drafts wanted for the next round.
    pub next_drafts: usize,
    /// What each of its emitting rows may emit; empty: any token.
    pub masks: Vec<Arc<Mask>>,
    /// What it emits.
    pub emitted: Vec<Emitted>,
    /// What it drafts.
    pub drafts: Vec<TokenId>,
}

/// A sequence that is drafting.
#[derive(Clone, Copy, Debug)]
pub struct Drafting {
    /// Index of the sequence in the step.
    pub seq: usize,
    /// Emitting row whose hidden state starts the round.
    pub hidden: usize,
    /// Drafts wanted.
    pub wanted: usize,
}

/// The values of one step.
#[derive(Debug, Default)]
pub struct Arena {
    /// Every input row.
    pub all: RowSet,
    /// The emitting rows.
    pub out: RowSet,
    /// The row of `all` that each emitting row is.
    pub out_source: Vec<usize>,
    /// The drafting rows that still want a draft.
    pub draft: RowSet,
    /// What each drafting row is, by falling number of drafts wanted.
    pub drafting: Vec<Drafting>,
    /// The sequences.
    pub seqs: Vec<Seq>,
    full_blocks: Vec<u32>,
    sliding_blocks: Vec<u32>,
}

impl Arena {
    /// Takes a step in, or says what is wrong with it.
    pub fn load(&mut self, step: &Step, limits: &Limits) -> Result<(), String> {
        self.all.clear();
        self.out.clear();
        self.out_source.clear();
        self.draft.clear();
        self.drafting.clear();
        self.seqs.clear();
        self.full_blocks.clear();
        self.sliding_blocks.clear();
        if step.seqs.len() > limits.max_seqs {
            return Err(format!(
                "{} sequences; {} fit",
                step.seqs.len(),
                limits.max_seqs
            ));
        }
        if step.rows() > limits.max_rows {
            return Err(format!("{} rows; {} fit", step.rows(), limits.max_rows));
        }
        for (i, seq) in step.seqs.iter().enumerate() {
            check(seq, limits).map_err(|e| format!("sequence {}: {e}", seq.seq.0))?;
            self.push(i, seq);
        }
        Ok(())
    }

    fn push(&mut self, index: usize, s: &SeqStep) {
        let full_start = self.full_blocks.len();
        self.full_blocks.extend(s.tables.full.iter().map(|b| b.0));
        let sliding_start = self.sliding_blocks.len();
        self.sliding_blocks
            .extend(s.tables.sliding.iter().map(|b| b.0));
        let emitting = s.sample.as_ref().map_or(0, |sample| sample.drafts + 1);
        let out_start = self.out.rows.len();
        for (j, &token) in s.tokens.iter().enumerate() {
            let position = s.start + j;
            let row = Row {
                token,
                position,
                end: position + 1,
                seq: index,
            };
            if j + emitting >= s.tokens.len() {
                self.out_source.push(self.all.rows.len());
                self.out.push(row);
            }
            self.all.push(row);
        }
        let sample = s.sample.as_ref();
        self.seqs.push(Seq {
            full: full_start..self.full_blocks.len(),
            sliding: sliding_start..self.sliding_blocks.len(),
            sliding_first: s.tables.sliding_first,
            out: out_start..self.out.rows.len(),
            params: sample.map(|s| s.params.clone()),
            generated: sample.map_or(0, |s| s.generated),
            prompt_len: sample.map_or(0, |s| s.prompt_len),
            history: sample.map_or_else(Vec::new, |s| s.history.clone()),
            next_drafts: sample.map_or(0, |s| s.next_drafts),
            masks: sample.map_or_else(Vec::new, |s| s.masks.clone()),
            emitted: Vec::new(),
            drafts: Vec::new(),
        });
    }

    /// The rows of a kind.
    pub fn set(&self, rows: Rows) -> &RowSet {
        match rows {
            Rows::All => &self.all,
            Rows::Out => &self.out,
            Rows::Draft => &self.draft,
        }
    }

    /// The block that holds a number of a sequence's table.
    pub fn block(&self, kind: Kind, seq: usize, number: usize) -> usize {
        let s = &self.seqs[seq];
        let block = match kind {
            Kind::Full => self.full_blocks[s.full.start + number],
            Kind::Sliding => self.sliding_blocks[s.sliding.start + number - s.sliding_first],
        };
        block as usize
    }

    /// A sequence's tables: the number of its first sliding block, sliding and full blocks.
    pub fn tables(&self, seq: usize) -> (usize, &[u32], &[u32]) {
        let s = &self.seqs[seq];
        let sliding = &self.sliding_blocks[s.sliding.clone()];
        (s.sliding_first, sliding, &self.full_blocks[s.full.clone()])
    }

    /// Sequences that want drafts and how many, by falling number; equal ones in the order of the
    /// step.
    pub fn wanting_drafts(&self) -> Vec<(usize, usize)> {
        let all = self.seqs.iter().enumerate();
        let mut wanting: Vec<(usize, usize)> = all
            .filter(|(_, s)| s.params.is_some() && s.next_drafts > 0)
            .map(|(i, s)| (i, s.next_drafts))
            .collect();
        wanting.sort_by_key(|(_, wanted)| std::cmp::Reverse(*wanted));
        wanting
    }

    /// Starts drafting: a row for each sequence that wants drafts and has emitted.
    ///
    /// A round that ended in a stop token drafts nothing.
    pub fn begin_drafts(&mut self) {
        self.drafting.clear();
        for (seq, s) in self.seqs.iter().enumerate() {
            let Some(last) = s.emitted.last() else {
                continue;
            };
            let stopped = s
                .params
                .as_ref()
                .is_some_and(|p| p.stop_tokens.contains(&last.id));
            if s.next_drafts == 0 || stopped {
                continue;
            }
            let hidden = s.out.start + s.emitted.len() - 1;
            self.drafting.push(Drafting {
                seq,
                hidden,
                wanted: s.next_drafts,
            });
        }
        // Stable: sequences that want as many stay in the order of the step.
        self.drafting.sort_by_key(|d| std::cmp::Reverse(d.wanted));
        self.draft.clear();
        for d in &self.drafting {
            let row = self.out.rows[d.hidden];
            let last = &self.seqs[d.seq].emitted;
            let token = last.last().map_or(row.token, |e| e.id);
            // The last emitted token is not cached: its position is the number of keys.
            let position = row.position + 1;
            self.draft.push(Row {
                token,
                position,
                end: position,
                seq: d.seq,
            });
        }
    }

    /// Takes the drafts of a pass in; rows that have enough leave.
    pub fn drafted(&mut self, tokens: &[TokenId]) {
        for ((row, d), &token) in self.draft.rows.iter_mut().zip(&self.drafting).zip(tokens) {
            row.token = token;
            self.seqs[d.seq].drafts.push(token);
        }
        let seqs = &self.seqs;
        let going = self
            .drafting
            .iter()
            .filter(|d| seqs[d.seq].drafts.len() < d.wanted)
            .count();
        self.draft.rows.truncate(going);
        self.draft.spans.truncate(going);
    }
}

fn check(s: &SeqStep, limits: &Limits) -> Result<(), String> {
    if s.tokens.is_empty() {
        return Err("no rows".into());
    }
    if let Some(t) = s.tokens.iter().find(|t| **t as usize >= limits.vocab_size) {
        return Err(format!(
            "token {t} is outside the vocabulary of {}",
            limits.vocab_size
        ));
    }
    let end = s.start.saturating_add(s.tokens.len());
    if end > limits.max_model_len {
        return Err(format!(
            "reaches position {end} of {}",
            limits.max_model_len
        ));
    }
    if let Some(sample) = &s.sample {
        if sample.drafts >= s.tokens.len() || sample.drafts > limits.max_drafts.max(MOST_CHECKED) {
            return Err(format!(
                "{} drafts in {} rows",
                sample.drafts,
                s.tokens.len()
            ));
        }
        if sample.next_drafts > limits.max_drafts {
            return Err(format!(
                "{} drafts wanted of {}",
                sample.next_drafts, limits.max_drafts
            ));
        }
    }
    if let Some(sample) = &s.sample {
        check_masks(sample, limits)?;
    }
    check_tables(&s.tables, s.start, end, limits)
}

fn check_masks(sample: &SampleStep, limits: &Limits) -> Result<(), String> {
    if sample.masks.is_empty() {
        return Ok(());
    }
    let (rows, at_most) = (sample.drafts + 1, limits.masked_rows);
    if rows > at_most {
        return Err(format!(
            "{rows} rows with masks; this device takes {at_most}"
        ));
    }
    if sample.masks.len() != rows {
        return Err(format!("{} masks for {rows} rows", sample.masks.len()));
    }
    let vocab = limits.vocab_size;
    match sample
        .masks
        .iter()
        .find(|mask| mask.vocab() != vocab || mask.is_empty())
    {
        Some(mask) => Err(format!("{mask:?} for a vocabulary of {vocab}")),
        None => Ok(()),
    }
}

fn check_tables(t: &BlockTables, start: usize, end: usize, limits: &Limits) -> Result<(), String> {
    let needed = end.div_ceil(limits.full_block_size);
    if t.full.len() < needed {
        return Err(format!(
            "{} full blocks where {needed} are needed",
            t.full.len()
        ));
    }
    // A draft row stands one position on and sees one key less than an input row would.
    let oldest = (start + 1).saturating_sub(limits.window) / limits.sliding_block_size;
    let newest = end.div_ceil(limits.sliding_block_size);
    if t.sliding_first > oldest || t.sliding_first + t.sliding.len() < newest {
        return Err(format!(
            "sliding blocks {}..{} where {oldest}..{newest} are needed",
            t.sliding_first,
            t.sliding_first + t.sliding.len()
        ));
    }
    if let Some(b) = t.full.iter().find(|b| b.0 as usize >= limits.full_blocks) {
        return Err(format!("full block {} of {}", b.0, limits.full_blocks));
    }
    if let Some(b) = t
        .sliding
        .iter()
        .find(|b| b.0 as usize >= limits.sliding_blocks)
    {
        return Err(format!(
            "sliding block {} of {}",
            b.0, limits.sliding_blocks
        ));
    }
    Ok(())
}
