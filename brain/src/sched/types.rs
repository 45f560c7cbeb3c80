//! What the scheduler and an executor say to each other.

use std::{collections::BTreeMap, sync::Arc};

use serde::{Deserialize, Serialize};

use super::mask::Mask;

/// A token of the vocabulary.
pub type TokenId = u32;

/// A sequence (one generation being computed), unique while the engine lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// Layers whose keys and values share a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// The full-attention layers.
    Full,
    /// The sliding-window layers.
    Sliding,
}

/// A KV page: an index into the pool of its layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// Where a sequence's keys and values lie, per layer group.
///
/// Position `p` lies in slot `p % block_size` of block `p / block_size` of its group's table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockTables {
    /// Full-attention group: a block for every position from 0.
    pub full: Vec<BlockId>,
    /// Sliding group: blocks from `sliding_first` on; earlier ones were given back.
    pub sliding: Vec<BlockId>,
    /// Number of the block that `sliding[0]` is.
    pub sliding_first: usize,
}

/// How tokens are chosen, every field resolved. Equal parameters, prompt and model give equal tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set that reaches this probability, the token that crosses included.
    pub top_p: f32,
    /// Drop tokens below this share of the likeliest token's probability.
    pub min_p: f32,
    /// Key of the position-keyed noise.
    pub seed: u64,
    /// Divides (positive) or multiplies (negative) logits of tokens seen in prompt or answer; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once for a token already generated.
    pub presence_penalty: f32,
    /// Subtracted per occurrence of a token already generated.
    pub frequency_penalty: f32,
    /// Added to the logit of a token.
    pub logit_bias: BTreeMap<TokenId, f32>,
    /// Never emitted (the checkpoint's `suppress_tokens`).
    pub suppressed: Vec<TokenId>,
    /// Tokens that end the generation, the model's own included unless ignored.
    pub stop_tokens: Vec<TokenId>,
    /// Stop tokens are not emitted before this many generated tokens.
    pub min_tokens: u32,
    /// Generated tokens at most.
    pub max_tokens: u32,
    /// 0: no log-probabilities; 1: the token's own; n: the n-1 likeliest besides.
    pub logprobs: u32,
}

impl SamplingParams {
    /// The likeliest token always, nothing forbidden, no stops.
    pub fn greedy(max_tokens: u32) -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            suppressed: Vec::new(),
            stop_tokens: Vec::new(),
            min_tokens: 0,
            max_tokens,
            logprobs: 0,
        }
    }

    /// Whether choosing a token needs the tokens before it.
    pub fn reads_history(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// Drafts per round, as asked for. It cannot change a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DraftDepth {
    /// The scheduler chooses from what drafting costs and what gets accepted.
    Auto,
    /// Always this many (0: none), less where limits end the generation.
    Fixed(u32),
}

/// One pass over the model: for each sequence some rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// Every sequence at most once.
    pub seqs: Vec<SeqStep>,
}

impl Step {
    /// Rows (input tokens) in all.
    pub fn rows(&self) -> usize {
        self.seqs.iter().map(|s| s.tokens.len()).sum()
    }
}

/// A sequence's rows in a step: a chunk of prefill, or a token with its drafts to verify.
#[derive(Clone, Debug, PartialEq)]
pub struct SeqStep {
    /// Whose rows.
    pub seq: SeqId,
    /// Inputs at positions `start ..`; their keys and values are written.
    pub tokens: Vec<TokenId>,
    /// Position of `tokens[0]`; keys of all earlier positions are in the cache.
    pub start: usize,
    /// Blocks for every position up to the last of `tokens`.
    pub tables: BlockTables,
    /// What to emit; `None` for a chunk of prefill that is not the last.
    pub sample: Option<SampleStep>,
}

/// The last `1 + drafts` rows of a [`SeqStep`] are sampled and verified by equality.
///
/// Row `j` emits the token at position `start + tokens.len() - drafts + j`. A draft is accepted
/// while it equals what the row before it emits; the first differing row ends the round.
#[derive(Clone, Debug, PartialEq)]
pub struct SampleStep {
    /// How many of the last input tokens are drafts.
    pub drafts: usize,
    /// The request's parameters.
    pub params: Arc<SamplingParams>,
    /// Tokens already generated before the first emitted one.
    pub generated: u32,
    /// Prompt and generated tokens up to the first sampled row's input, that one included; empty
    /// unless [`SamplingParams::reads_history`].
    pub history: Vec<TokenId>,
    /// How many of `history` are prompt.
    pub prompt_len: usize,
    /// Drafts wanted for the next round.
    pub next_drafts: usize,
    /// What the answer must keep to: the tokens that each of the `1 + drafts` rows may emit, those
    /// that are suppressed or stop too early left out already. Empty: any token.
    pub masks: Vec<Arc<Mask>>,
}

/// What a step computed, in the order of [`Step::seqs`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One entry per sequence of the step.
    pub seqs: Vec<SeqOutput>,
}

/// A sequence's result: empty for a chunk of prefill.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SeqOutput {
    /// Accepted drafts and one token more, in order. Stops are the scheduler's business.
    pub tokens: Vec<Emitted>,
    /// At most `next_drafts` proposals for the tokens after these.
    pub drafts: Vec<TokenId>,
}

/// A token and, when asked for, its log-probability.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Emitted {
    /// The token.
    pub id: TokenId,
    /// Raw log-probabilities: after the soft cap, before penalties and filters.
    pub logprobs: Option<Logprobs>,
}

/// Raw log-probabilities at one position.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// Of the emitted token.
    pub chosen: f32,
    /// The likeliest tokens, by probability descending, then id ascending.
    pub top: Vec<(TokenId, f32)>,
}
