//! One generation while it is being computed.

use std::{sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};

use super::{
    constraint::{Broken, Checked, Constrained},
    depth::Depth,
    fair::{Account, Priority},
    mask::Mask,
    ngram::{Kind, Lookups},
    prefix::AnchorId,
    request::{FinishReason, Request, StopCheck, ValidRequest, end_after},
    table::Table,
    tokens::{PrefixKey, TokenList},
    types::{DraftDepth, Emitted, SamplingParams, SeqId, TokenId},
};

/// Tokens counted for a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of those, taken from the cache.
    pub cached: usize,
    /// Tokens of the answer, received ones included.
    pub generated: usize,
    /// Drafts checked.
    pub drafted: usize,
    /// Drafts emitted.
    pub accepted: usize,
    /// Rounds that emitted.
    pub rounds: usize,
}

/// Where a generation's time went. Preemption counts where it happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// From submission until blocks and rows were given.
    pub queue: Duration,
    /// From then until the first new token.
    pub prefill: Duration,
    /// From the first new token until the end.
    pub decode: Duration,
    /// From submission until the first new token; until the end when there is none.
    pub ttft: Duration,
}

/// How a generation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Why.
    pub reason: FinishReason,
    /// What it took.
    pub usage: Usage,
    /// How long it took.
    pub timings: Timings,
}

/// What a sequence has while it is being computed: blocks with keys and values in them.
#[derive(Debug)]
pub(super) struct Resident {
    pub(super) table: Table,
    /// Keys and values of tokens `0..computed` are in the cache. Less than the tokens: the
    /// newest token is always an input of the next step.
    pub(super) computed: usize,
    /// Proposals for the tokens that come next.
    pub(super) drafts: Vec<TokenId>,
    /// They were looked up, and are likely to be right to this share.
    pub(super) looked_up: Option<(Kind, f64)>,
    /// How many of the drafts come last and are the only tokens that the constraint allows.
    pub(super) forced: usize,
    /// A draft was cut for breaking the constraint.
    pub(super) cut: bool,
}

pub(super) struct Sequence {
    pub(super) id: SeqId,
    pub(super) account: Account,
    pub(super) priority: Priority,
    /// The run's name, together with its caller's.
    pub(super) run: Option<String>,
    /// Where it leaves anchors while it computes its prompt, in order.
    pub(super) marks: Vec<usize>,
    /// The anchor that it went on from.
    pub(super) origin: Option<AnchorId>,
    pub(super) params: Arc<SamplingParams>,
    pub(super) draft: DraftDepth,
    stop_check: Option<Box<dyn StopCheck>>,
    /// What the answer must keep to.
    constrained: Option<Constrained>,
    /// Prompt and answer.
    pub(super) tokens: TokenList,
    pub(super) prompt_len: usize,
    /// Prompt and answer together, at most.
    pub(super) limit: usize,
    /// `None` while it waits for blocks.
    pub(super) resident: Option<Resident>,
    pub(super) depth: Depth,
    /// Drafts asked for last.
    pub(super) asked: usize,
    pub(super) lookups: Lookups,
    pub(super) usage: Usage,
    submitted: Duration,
    admitted: Option<Duration>,
    first_token: Option<Duration>,
}

impl Sequence {
    /// `fingerprint` is the model's; prefixes are addressed at multiples of `stride`.
    pub(super) fn new(
        now: Duration,
        id: SeqId,
        valid: ValidRequest,
        fingerprint: &str,
        stride: usize,
    ) -> Self {
        let ValidRequest {
            request,
            limit,
            constrained,
            ..
        } = valid;
        let Request {
            prompt,
            params,
            draft,
            run_id,
            priority,
            owner,
            cache_salt,
            received,
            stop_check,
            ..
        } = request;
        let root = PrefixKey::root(fingerprint, &owner, &cache_salt);
        let known = prompt.iter().chain(&received).copied();
        let tokens = TokenList::new(root, stride, known);
        let run = (!run_id.is_empty()).then(|| format!("{owner}\n{run_id}"));
        Self {
            id,
            account: Account::of(run.as_deref().unwrap_or_default(), id.0),
            run,
            priority,
            marks: Vec::new(),
            origin: None,
            params,
            draft,
            stop_check,
            constrained,
            tokens,
            prompt_len: prompt.len(),
            limit,
            resident: None,
            depth: Depth::default(),
            asked: 0,
            lookups: Lookups::default(),
            usage: Usage {
                prompt: prompt.len(),
                generated: received.len(),
                ..Usage::default()
            },
            submitted: now,
            admitted: None,
            first_token: None,
        }
    }

    /// Tokens generated so far.
    pub(super) fn generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens that are not in the cache yet; at least one.
    pub(super) fn remaining(&self) -> usize {
        self.tokens.len()
            - self
                .resident
                .as_ref()
                .map_or(0, |resident| resident.computed)
    }

    /// Whether what is checked now was looked up, and is nearly always right.
    pub(super) fn repeats_itself(&self) -> bool {
        let looked_up = self
            .resident
            .as_ref()
            .and_then(|resident| resident.looked_up);
        looked_up.is_some_and(|(_, share)| share > 0.9)
    }

    /// Drafts that a round may check when `len` tokens are known: a round emits one token more
    /// than its drafts, and not past the limit.
    pub(super) fn drafts_at(&self, len: usize) -> usize {
        self.limit.saturating_sub(len + 1)
    }

    /// Gives it blocks, those of an anchor that holds its first `cached` tokens.
    pub(super) fn admit(&mut self, now: Duration, table: Table, cached: usize) {
        // The newest token's output is in no cache: at least one token is computed again.
        let computed = cached.min(self.tokens.len() - 1);
        if self.admitted.is_none() {
            self.admitted = Some(now);
            self.usage.cached = computed.min(self.prompt_len);
        }
        self.resident = Some(Resident {
            table,
            computed,
            drafts: Vec::new(),
            looked_up: None,
            forced: 0,
            cut: false,
        });
    }

    /// Appends emitted tokens up to the one that ends the generation, that one included.
    ///
    /// Returns how many were appended, and why it ended if it did.
    pub(super) fn append(
        &mut self,
        now: Duration,
        emitted: &[Emitted],
    ) -> (usize, Option<FinishReason>) {
        let room = self.limit - self.prompt_len;
        self.first_token.get_or_insert(now);
        for (index, token) in emitted.iter().enumerate() {
            self.tokens.push(token.id);
            let generated = self.generated();
            let end = end_after(
                &self.params,
                &mut self.stop_check,
                token.id,
                generated,
                room,
            );
            if end.is_some() {
                return (index + 1, end);
            }
        }
        let generated = self.generated();
        let ids = emitted.iter().map(|token| token.id);
        let kept_to = match &mut self.constrained {
            Some(constrained) => constrained.advance(&self.params, ids, generated),
            None => Ok(()),
        };
        let end = kept_to.err().map(|Broken(why)| FinishReason::Failed(why));
        (emitted.len(), end)
    }

    /// Cuts the drafts that the constraint forbids, and adds those that must come, `at_most` in all.
    pub(super) fn constrain_drafts(&mut self, at_most: usize) {
        let generated = self.generated();
        let forced_to = match self.draft {
            DraftDepth::Fixed(depth) => at_most.min(depth as usize),
            DraftDepth::Auto => at_most,
        };
        let (Some(constrained), Some(resident)) = (&mut self.constrained, &mut self.resident)
        else {
            return;
        };
        let made = &resident.drafts[..resident.drafts.len().min(at_most)];
        let Checked {
            drafts,
            forced,
            cut,
        } = constrained.check(&self.params, made, forced_to, generated);
        (resident.drafts, resident.forced, resident.cut) = (drafts, forced, cut);
    }

    /// Whether the answer must keep to something.
    pub(super) fn is_constrained(&self) -> bool {
        self.constrained.is_some()
    }

    /// What the rows of a round with so many drafts may emit.
    pub(super) fn masks(&self, drafts: usize) -> Vec<Arc<Mask>> {
        let constrained = self.constrained.as_ref();
        constrained.map_or_else(Vec::new, |constrained| constrained.masks(drafts))
    }

    /// What is reported when it ends now.
    pub(super) fn outcome(&self, now: Duration, reason: FinishReason) -> Outcome {
        let admitted = self.admitted.unwrap_or(now);
        let first_token = self.first_token.unwrap_or(now);
        Outcome {
            reason,
            usage: Usage {
                generated: self.generated(),
                ..self.usage
            },
            timings: Timings {
                queue: admitted.saturating_sub(self.submitted),
                prefill: first_token.saturating_sub(admitted),
                decode: now.saturating_sub(first_token),
                ttft: first_token.saturating_sub(self.submitted),
            },
        }
    }
}
