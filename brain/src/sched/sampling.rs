//! The definition of sampling: from logits to the token, as every executor must do it.
//!
//! Order: penalties, bias, suppressed tokens, stop tokens before `min_tokens`, the grammar's mask
//! (which has both of these left out already), division by the temperature, top-k, top-p, min-p, Gumbel noise keyed by (seed, position, token), argmax with
//! ties to the lowest id. Temperature 0 stops after the suppressions and takes the argmax.
//! Candidates are ordered by (logit descending, id ascending) and summed in that order.

use super::{
    mask::Mask,
    math::{exp, ln},
    philox::Noise,
    types::{Logprobs, SamplingParams, TokenId},
};

/// What the choice of one token depends on besides its logits.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The request's parameters.
    pub params: &'a SamplingParams,
    /// Absolute position of the token.
    pub position: u64,
    /// Tokens generated before it.
    pub generated: u32,
    /// Prompt and generated tokens before it; read only for penalties.
    pub history: &'a [TokenId],
    /// How many of `history` are prompt.
    pub prompt_len: usize,
    /// The tokens to choose among: what a grammar allows, less what the parameters forbid. `None`:
    /// the parameters decide alone.
    pub mask: Option<&'a Mask>,
}

/// Room to work in, kept between calls.
#[derive(Default)]
pub struct Scratch {
    logits: Vec<f32>,
    order: Vec<u64>,
    weights: Vec<f32>,
    seen: Vec<TokenId>,
}

/// A candidate as a number that sorts by (logit descending, id ascending).
#[inline(always)]
fn rank(logit: f32, index: usize) -> u64 {
    // Adding zero makes the two zeros one.
    let bits = (logit + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 0x8000_0000
    };
    (u64::from(!ascending) << 32) | index as u64
}

/// Chooses a token among all of the vocabulary, `logits[id]`.
pub fn choose(logits: &[f32], context: &Context<'_>, scratch: &mut Scratch) -> TokenId {
    scratch.logits.clear();
    scratch.logits.extend_from_slice(logits);
    adjust(&mut scratch.logits, context, &mut scratch.seen, |id| {
        Some(id as usize)
    });
    if let Some(mask) = context.mask {
        apply_mask(&mut scratch.logits, mask);
    }
    pick(context, scratch, |i| i as TokenId)
}

/// Chooses among some tokens: `logits[i]` belongs to `ids[i]`, all others are masked. Equal
/// candidates are ordered by their place in `ids`. For drafts: a mask of the context is not read.
pub fn choose_among(
    logits: &[f32],
    ids: &[TokenId],
    context: &Context<'_>,
    scratch: &mut Scratch,
) -> TokenId {
    scratch.logits.clear();
    scratch.logits.extend_from_slice(logits);
    let find = |id: TokenId| ids.iter().position(|i| *i == id);
    adjust(&mut scratch.logits, context, &mut scratch.seen, find);
    pick(context, scratch, |i| ids[i])
}

/// Penalties, bias and suppressions, in place.
fn adjust(
    logits: &mut [f32],
    context: &Context<'_>,
    seen: &mut Vec<TokenId>,
    find: impl Fn(TokenId) -> Option<usize>,
) {
    let p = context.params;
    for l in logits.iter_mut() {
        // A NaN must not win, and infinities must not breed new ones.
        *l = if l.is_nan() {
            f32::NEG_INFINITY
        } else {
            l.min(f32::MAX)
        };
    }
    let slot = |id: TokenId| find(id).filter(|i| *i < logits.len());
    if p.reads_history() {
        let mut edits: Vec<(usize, f32)> = Vec::new();
        let prompt_len = context.prompt_len.min(context.history.len());
        let generated = &context.history[prompt_len..];
        seen.clear();
        seen.extend_from_slice(context.history);
        seen.sort_unstable();
        seen.dedup();
        let mut counts: Vec<TokenId> = generated.to_vec();
        counts.sort_unstable();
        for &id in seen.iter() {
            let Some(i) = slot(id) else { continue };
            let mut l = logits[i];
            if p.repetition_penalty != 1.0 {
                let penalty = p.repetition_penalty;
                l = if l > 0.0 { l / penalty } else { l * penalty };
            }
            let first = counts.partition_point(|t| *t < id);
            let count = counts[first..].partition_point(|t| *t == id);
            if count > 0 {
                l -= p.frequency_penalty * count as f32;
                l -= p.presence_penalty;
            }
            edits.push((i, l));
        }
        for (i, l) in edits {
            logits[i] = if l.is_nan() {
                f32::NEG_INFINITY
            } else {
                l.min(f32::MAX)
            };
        }
    }
    for (&id, &bias) in &p.logit_bias {
        if let Some(l) = find(id).and_then(|i| logits.get_mut(i)) {
            let biased = *l + bias;
            *l = if biased.is_nan() {
                f32::NEG_INFINITY
            } else {
                biased.min(f32::MAX)
            };
        }
    }
    let early = if context.generated < p.min_tokens {
        p.stop_tokens.as_slice()
    } else {
        &[]
    };
    let forbidden = p.suppressed.iter().chain(early);
    for &id in forbidden.filter(|_| context.mask.is_none()) {
        if let Some(l) = find(id).and_then(|i| logits.get_mut(i)) {
            *l = f32::NEG_INFINITY;
        }
    }
}

/// What is left of a token's logit when it is allowed: never so little that another wins.
const LEAST_ALLOWED: f32 = -1e30;

/// Leaves the tokens of the mask alone; `logits[id]`.
fn apply_mask(logits: &mut [f32], mask: &Mask) {
    let known = mask.vocab().min(logits.len());
    logits[known..].fill(f32::NEG_INFINITY);
    for (bits, logits) in mask.words().iter().zip(logits.chunks_mut(32)) {
        for (bit, l) in logits.iter_mut().enumerate() {
            *l = match bits >> bit & 1 {
                1 => l.max(LEAST_ALLOWED),
                _ => f32::NEG_INFINITY,
            };
        }
    }
}

/// The index with the largest value, the lowest among equals.
fn argmax(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, v) in values.iter().enumerate() {
        if *v > values[best] {
            best = i;
        }
    }
    best
}

/// Temperatures below this are greedy: dividing by them would overflow and make ties of different
/// logits, and noise could only choose among logits within 3e-5 of the best.
const GREEDY_BELOW: f32 = 1e-6;

/// Noise lies in [-3.14, 22.88]: a logit this far below the best cannot win.
const NOISE_SPAN: f32 = 27.0;

fn pick(context: &Context<'_>, scratch: &mut Scratch, id: impl Fn(usize) -> TokenId) -> TokenId {
    let p = context.params;
    let logits = &mut scratch.logits;
    if logits.is_empty() {
        return 0;
    }
    // A NaN is refused where requests come in; here it is greedy.
    if p.temperature < GREEDY_BELOW || p.temperature.is_nan() {
        return id(argmax(logits));
    }
    for l in logits.iter_mut() {
        *l = (*l / p.temperature).min(f32::MAX);
    }
    let top = argmax(logits);
    let best = logits[top];
    if best == f32::NEG_INFINITY {
        return id(top);
    }
    let noise = Noise::new(p.seed, context.position);
    let ordered = (p.top_k > 0 && (p.top_k as usize) < logits.len()) || p.top_p < 1.0;
    let mut winner: Option<(f32, TokenId)> = None;
    let mut offer = |logit: f32, token: TokenId| {
        let value = logit + noise.gumbel(token);
        let wins = match winner {
            None => true,
            Some((most, holder)) => value > most || (value == most && token < holder),
        };
        if wins {
            winner = Some((value, token));
        }
    };
    let likely = |l: f32| l > best - NOISE_SPAN && (p.min_p <= 0.0 || exp(l - best) >= p.min_p);
    if ordered {
        let kept = keep(p, logits, best, &mut scratch.order, &mut scratch.weights);
        for &key in kept {
            let i = key as u32 as usize;
            if likely(logits[i]) {
                offer(logits[i], id(i));
            }
        }
    } else {
        for (i, &l) in logits.iter().enumerate() {
            if likely(l) {
                offer(l, id(i));
            }
        }
    }
    winner.map_or_else(|| id(top), |(_, token)| token)
}

/// The candidates that top-k and top-p leave, likeliest first.
fn keep<'a>(
    p: &SamplingParams,
    logits: &[f32],
    best: f32,
    order: &'a mut Vec<u64>,
    weights: &mut Vec<f32>,
) -> &'a [u64] {
    order.clear();
    let finite = logits
        .iter()
        .enumerate()
        .filter(|(_, l)| **l > f32::NEG_INFINITY);
    order.extend(finite.map(|(i, l)| rank(*l, i)));
    let k = p.top_k as usize;
    if k > 0 && k < order.len() {
        order.select_nth_unstable(k - 1);
        order.truncate(k);
    }
    order.sort_unstable();
    if p.top_p >= 1.0 {
        return order;
    }
    weights.clear();
    weights.extend(
        order
            .iter()
            .map(|key| exp(logits[*key as u32 as usize] - best)),
    );
    let total: f64 = weights.iter().map(|w| f64::from(*w)).sum();
    let goal = f64::from(p.top_p) * total;
    let mut sum = 0.0;
    let mut kept = 0;
    for w in weights.iter() {
        sum += f64::from(*w);
        kept += 1;
        if sum >= goal {
            break;
        }
    }
    &order[..kept.max(1)]
}

/// Raw log-probabilities of `token` and of the `wanted - 1` likeliest tokens.
pub fn logprobs(logits: &[f32], token: TokenId, wanted: u32, scratch: &mut Scratch) -> Logprobs {
    let clean = |l: f32| if l.is_nan() { f32::NEG_INFINITY } else { l };
    let best = logits
        .iter()
        .fold(f32::NEG_INFINITY, |m, l| m.max(clean(*l)));
    // Sixteen sums by id, added in order: fixed, and fast enough for large vocabularies.
    let mut lanes = [0.0f32; 16];
    for chunk in logits.chunks(16) {
        for (lane, l) in lanes.iter_mut().zip(chunk) {
            *lane += exp(clean(*l) - best);
        }
    }
    let total = ln(lanes.iter().sum::<f32>());
    let of = |l: f32| (clean(l) - best) - total;
    let order = &mut scratch.order;
    order.clear();
    let count = (wanted.saturating_sub(1) as usize).min(logits.len());
    if count > 0 {
        order.extend(logits.iter().enumerate().map(|(i, l)| rank(clean(*l), i)));
        order.select_nth_unstable(count - 1);
        order.truncate(count);
        order.sort_unstable();
    }
    let chosen = logits
        .get(token as usize)
        .map_or(f32::NEG_INFINITY, |l| of(*l));
    let top = order
        .iter()
        .map(|key| (*key as u32, of(logits[*key as u32 as usize])))
        .collect();
    Logprobs { chosen, top }
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
