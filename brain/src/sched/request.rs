//! What a client asks for, and the checks it passes before anything is computed.

use std::{
    any::Any,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use serde::{Deserialize, Serialize};

use super::{
    constraint::{Broken, Constrained, Constraint, Misfit},
    fair::Priority,
    types::{DraftDepth, SamplingParams, TokenId},
};
use crate::backend::Limits;

/// Finds stop strings in the text of the generated tokens.
///
/// Pure: what it answers depends on the tokens it was given, nothing else.
pub trait StopCheck: Send {
    /// Takes the next generated token; true when the text so far contains a stop.
    fn push(&mut self, token: TokenId) -> bool;
}

/// A generation as asked for.
pub struct Request {
    /// Input tokens; at least one.
    pub prompt: Arc<[TokenId]>,
    /// How tokens are chosen, every field resolved.
    pub params: Arc<SamplingParams>,
    /// Drafts per round. Cannot change a token, and so is no part of the request's identity.
    pub draft: DraftDepth,
    /// The marathon this belongs to: fairness between runs, and the newest anchor of each is kept.
    /// Empty: none.
    pub run_id: String,
    /// Its run's share of what is computed, compared with others.
    pub priority: Priority,
    /// The caller: who it is, as far as the program knows. Runs, generations and cached prefixes of
    /// one caller are out of reach of every other.
    pub owner: String,
    /// Separates the cached prefixes of one caller further.
    pub cache_salt: String,
    /// Tokens of this very generation that the client holds already. They count as generated.
    pub received: Vec<TokenId>,
    /// Texts that end the generation, for front ends and for the request's identity.
    pub stop_strings: Vec<String>,
    /// Finds `stop_strings`; `None` without any.
    pub stop_check: Option<Box<dyn StopCheck>>,
    /// The form that the answer must have, as the front end wrote it, for the request's identity.
    /// Empty: any.
    pub grammar: Arc<str>,
    /// Keeps the answer to `grammar`; `None` without one.
    pub constraint: Option<Box<dyn Constraint>>,
    /// What a front end needs to make text of the log; kept with it and given back to every
    /// reader. A function of the prompt, so no part of the request's identity.
    pub reading: Option<Arc<dyn Any + Send + Sync>>,
    /// From which the front end can make `stop_check` and `reading` again after a restart; the
    /// constraint is made from `grammar` and the prompt.
    pub note: Arc<[u8]>,
    /// Whether somebody may come back for it after a restart: only then is its log kept.
    pub kept: bool,
}

impl Request {
    /// A request with automatic drafting and nothing else.
    pub fn new(prompt: impl Into<Arc<[TokenId]>>, params: impl Into<Arc<SamplingParams>>) -> Self {
        Self {
            prompt: prompt.into(),
            params: params.into(),
            draft: DraftDepth::Auto,
            run_id: String::new(),
            priority: Priority::default(),
            owner: String::new(),
            cache_salt: String::new(),
            received: Vec::new(),
            stop_strings: Vec::new(),
            stop_check: None,
            grammar: Arc::default(),
            constraint: None,
            reading: None,
            note: Arc::default(),
            kept: true,
        }
    }

    /// The identity of the request: everything that a token or a log-probability depends on.
    pub fn hash(&self) -> RequestHash {
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            suppressed,
            stop_tokens,
            min_tokens,
            max_tokens,
            logprobs,
        } = &*self.params;
        let mut hasher = blake3::Hasher::new_derive_key("marathon brain request 1");
        let mut list = |name: &str, words: &mut dyn ExactSizeIterator<Item = u64>| {
            hasher.update(name.as_bytes());
            hasher.update(&(words.len() as u64).to_le_bytes());
            for word in words {
                hasher.update(&word.to_le_bytes());
            }
        };
        let float = |x: &f32| u64::from(x.to_bits());
        list("prompt", &mut self.prompt.iter().map(|&t| u64::from(t)));
        list(
            "floats",
            &mut [
                temperature,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
            ]
            .into_iter()
            .map(float),
        );
        list("seed", &mut [*seed].into_iter());
        list(
            "counts",
            &mut [top_k, min_tokens, max_tokens, logprobs]
                .into_iter()
                .map(|&n| u64::from(n)),
        );
        list("biased", &mut logit_bias.keys().map(|&t| u64::from(t)));
        list("biases", &mut logit_bias.values().map(float));
        list("suppressed", &mut suppressed.iter().map(|&t| u64::from(t)));
        list("stops", &mut stop_tokens.iter().map(|&t| u64::from(t)));
        for stop in &self.stop_strings {
            list("stop", &mut stop.bytes().map(u64::from));
        }
        if !self.grammar.is_empty() {
            list("grammar", &mut self.grammar.bytes().map(u64::from));
        }
        RequestHash(*hasher.finalize().as_bytes())
    }

    /// Checks the request against what an executor can hold.
    ///
    /// `max_len` is prompt and answer together, at most (see
    /// [`Scheduler::max_len`](super::scheduler::Scheduler::max_len)).
    pub fn validate(mut self, limits: &Limits, max_len: usize) -> Result<ValidRequest, Reject> {
        if self.prompt.is_empty() {
            return Err(Reject::EmptyPrompt);
        }
        let prompt = self.prompt.len();
        if prompt >= max_len {
            return Err(Reject::TooLong { prompt, max_len });
        }
        check_params(&self.params)?;
        let vocab = limits.vocab_size;
        let params = &self.params;
        for (list, ids) in [
            ("the prompt", &self.prompt[..]),
            ("the received tokens", &self.received),
            ("the stop tokens", &params.stop_tokens),
            ("the suppressed tokens", &params.suppressed),
        ] {
            if let Some(index) = ids.iter().position(|&id| id as usize >= vocab) {
                return Err(Reject::NoSuchToken {
                    list,
                    index,
                    id: ids[index],
                    vocab,
                });
            }
        }
        if let Some((index, (&id, _))) = params
            .logit_bias
            .iter()
            .enumerate()
            .find(|&(_, (&id, _))| id as usize >= vocab)
        {
            return Err(Reject::NoSuchToken {
                list: "the logit bias",
                index,
                id,
                vocab,
            });
        }
        if params.logprobs as usize > vocab {
            return Err(Reject::Sampling(
                "logprobs",
                "at most the size of the vocabulary",
            ));
        }
        let limit = max_len.min(prompt.saturating_add(params.max_tokens as usize));
        let finished = self.replay_received(limit - prompt)?;
        let constrained = match finished {
            Some(_) => None,
            None => self.constrained(limits)?,
        };
        Ok(ValidRequest {
            request: self,
            limit,
            finished,
            constrained,
        })
    }

    /// The constraint behind the received tokens. A grammar without one is never passed over.
    fn constrained(&mut self, limits: &Limits) -> Result<Option<Constrained>, Reject> {
        let constraint = match self.constraint.take() {
            Some(constraint) if limits.masked_rows > 0 => constraint,
            Some(_) => return Err(Reject::NoMasks),
            None if self.grammar.is_empty() => return Ok(None),
            None => {
                let why = "its grammar was not compiled: this is a bug";
                return Err(Reject::Grammar(Broken(why.into())));
            }
        };
        let (vocab, received) = (limits.vocab_size, &self.received);
        Constrained::new(constraint, &self.params, vocab, received)
            .map(Some)
            .map_err(|misfit| match misfit {
                Misfit::Received(index) => Reject::ReceivedOffGrammar { index },
                Misfit::Start(broken) => Reject::Grammar(broken),
            })
    }

    /// Feeds the received tokens to the stops; says how they end the generation if they do.
    fn replay_received(&mut self, room: usize) -> Result<Option<FinishReason>, Reject> {
        let received = self.received.len();
        if received > room {
            return Err(Reject::ReceivedTooLong { received, room });
        }
        for index in 0..received {
            let token = self.received[index];
            let end = end_after(&self.params, &mut self.stop_check, token, index + 1, room);
            if let Some(FinishReason::Failed(_)) = end {
                return Err(Reject::StopCheck);
            }
            if let Some(reason) = end {
                if index + 1 == received {
                    return Ok(Some(reason));
                }
                return Err(Reject::ReceivedPastStop { index, received });
            }
        }
        Ok(None)
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("prompt", &self.prompt.len())
            .field("params", &self.params)
            .field("draft", &self.draft)
            .field("run_id", &self.run_id)
            .field("received", &self.received.len())
            .field("stop_strings", &self.stop_strings)
            .field("grammar", &self.grammar)
            .finish_non_exhaustive()
    }
}

/// Why a generation ends whose check for stop strings does.
const STOP_CHECK_PANICKED: &str = "the check for stop strings panicked";

/// Whether the generation ends with this token, the `generated`-th of at most `room`.
pub(super) fn end_after(
    params: &SamplingParams,
    stop_check: &mut Option<Box<dyn StopCheck>>,
    token: TokenId,
    generated: usize,
    room: usize,
) -> Option<FinishReason> {
    // The check sees every token, whatever else ends the generation: its state is the text. It is a
    // front end's code and fed by its client: should it panic, that is this request's end alone.
    let asked = catch_unwind(AssertUnwindSafe(|| {
        stop_check.as_mut().is_some_and(|check| check.push(token))
    }));
    let Ok(text_stops) = asked else {
        *stop_check = None;
        return Some(FinishReason::Failed(STOP_CHECK_PANICKED.into()));
    };
    if params.stop_tokens.contains(&token) {
        Some(FinishReason::StopToken(token))
    } else if text_stops && generated >= params.min_tokens as usize {
        Some(FinishReason::StopString)
    } else if generated >= room {
        Some(FinishReason::Length)
    } else {
        None
    }
}

fn check_params(params: &SamplingParams) -> Result<(), Reject> {
    let bad = |field, must| Err(Reject::Sampling(field, must));
    if !(params.temperature.is_finite() && params.temperature >= 0.0) {
        return bad("temperature", "0 or more");
    }
    if !(params.top_p > 0.0 && params.top_p <= 1.0) {
        return bad("top_p", "above 0 and at most 1");
    }
    if !(params.min_p >= 0.0 && params.min_p < 1.0) {
        return bad("min_p", "at least 0 and below 1");
    }
    if !(params.repetition_penalty.is_finite() && params.repetition_penalty > 0.0) {
        return bad("repetition_penalty", "above 0");
    }
    if !params.presence_penalty.is_finite() {
        return bad("presence_penalty", "a finite number");
    }
    if !params.frequency_penalty.is_finite() {
        return bad("frequency_penalty", "a finite number");
    }
    if !params.logit_bias.values().all(|bias| bias.is_finite()) {
        return bad("logit_bias", "finite numbers");
    }
    if params.max_tokens == 0 {
        return bad("max_tokens", "at least 1");
    }
    Ok(())
}

/// A request that passed [`Request::validate`].
#[derive(Debug)]
pub struct ValidRequest {
    pub(super) request: Request,
    /// Prompt and answer together, at most.
    pub(super) limit: usize,
    pub(super) finished: Option<FinishReason>,
    pub(super) constrained: Option<Constrained>,
}

impl ValidRequest {
    /// How the received tokens end the generation, if they do: nothing is left to compute.
    pub fn finished(&self) -> Option<&FinishReason> {
        self.finished.as_ref()
    }

    /// The request.
    pub fn request(&self) -> &Request {
        &self.request
    }
}

/// Identity of a request; equal requests have equal hashes. Shown as hex.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestHash(pub [u8; 32]);

impl fmt::Display for RequestHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for RequestHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestHash({self})")
    }
}

/// Why a generation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// A stop token, the last of the log.
    StopToken(TokenId),
    /// The text contains a stop string.
    StopString,
    /// `max_tokens`, or the context is full.
    Length,
    /// A client cancelled it.
    Cancelled,
    /// It could not be computed on; asking again with the same request continues it.
    Failed(String),
}

/// Why a request is refused before anything is computed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reject {
    /// No input.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// It can never fit.
    #[error(
        "the prompt has {prompt} tokens, but prompt and answer together may have {max_len}: \
         shorten the prompt to {} tokens or fewer, or serve with more context or KV memory",
        max_len - 1
    )]
    TooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Prompt and answer together, at most.
        max_len: usize,
    },
    /// A token outside the vocabulary.
    #[error("token {id} (number {index} of {list}) is not below the vocabulary's size, {vocab}")]
    NoSuchToken {
        /// Where it stands.
        list: &'static str,
        /// Its place there.
        index: usize,
        /// The token.
        id: TokenId,
        /// Tokens of the vocabulary.
        vocab: usize,
    },
    /// A sampling parameter outside its range.
    #[error("{0} must be {1}")]
    Sampling(&'static str, &'static str),
    /// More tokens received than the request allows.
    #[error("{received} tokens were received, but this request generates at most {room}")]
    ReceivedTooLong {
        /// Tokens received.
        received: usize,
        /// Tokens the request may generate.
        room: usize,
    },
    /// The check for stop strings cannot be used.
    #[error("{STOP_CHECK_PANICKED}: this is a bug; ask without stop strings")]
    StopCheck,
    /// A grammar, on a device that cannot keep to one.
    #[error(
        "this device cannot keep an answer to a grammar: leave the grammar out, or serve the model \
         with --device cpu"
    )]
    NoMasks,
    /// Nothing can be generated by the grammar.
    #[error("nothing can be generated by this grammar: {0}")]
    Grammar(Broken),
    /// A received token breaks the grammar.
    #[error("the received token number {index} breaks the grammar: it is no token of this request")]
    ReceivedOffGrammar {
        /// Its place.
        index: usize,
    },
    /// The received tokens go on behind one that ends the generation.
    #[error(
        "the received token number {index} ends the generation, but {received} were received: \
         they are not tokens of this request"
    )]
    ReceivedPastStop {
        /// Place of the token that ends the generation.
        index: usize,
        /// Tokens received.
        received: usize,
    },
}

#[cfg(test)]
#[path = "request_tests.rs"]
mod tests;
