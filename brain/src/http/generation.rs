//! What a request generates: one or several choices, cancelled with the request unless it is
//! resumable.

use std::{
    future::poll_fn,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures::future::try_join_all;
use marathon_proto::brain as pb;
use tracing::{Instrument as _, Span};

use super::{
    error::ApiError,
    finish::Finish,
    identity::{RequestId, generation_id},
    span,
};
use crate::{
    callers::Owner,
    engine::Engine,
    sched::{request::FinishReason, types::TokenId},
    serving::{Ending, Read, Reader, Return, Round, Serving},
};

/// Choices of one request, at most.
pub(super) const MAX_CHOICES: usize = 16;

/// What is asked of the engine.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// The id that the client sees.
    pub(super) shown_id: String,
    /// One for each prompt.
    pub(super) specs: Vec<pb::GenerationSpec>,
    /// How many choices for each.
    pub(super) n: usize,
    /// First token wanted.
    pub(super) from: usize,
    /// Goes on when the client goes away.
    pub(super) resumable: bool,
    /// The field that describes the answer's form; empty without one.
    pub(super) form_path: String,
    /// Tokens go out as they come.
    pub(super) streams: bool,
    /// The request's.
    pub(super) span: Span,
}

impl Ask {
    /// An error at the form as the client wrote it.
    fn located(&self, error: ApiError) -> ApiError {
        let path = error.param.as_deref().and_then(|param| {
            let within = param.strip_prefix("form")?;
            if within.starts_with(".tool_calls") || self.form_path.is_empty() {
                return Some("tool_choice".to_owned());
            }
            // Behind the kind of form, which the client's own path names in its own way.
            let kind = within.strip_prefix('.').unwrap_or_default();
            let behind = kind.find(['.', '[']).map_or("", |end| &kind[end..]);
            Some(format!("{}{behind}", self.form_path))
        });
        match path {
            Some(path) => ApiError {
                param: Some(path),
                ..error
            },
            None => error,
        }
    }
}

/// One choice that is being generated.
pub(super) struct Choice {
    pub(super) index: usize,
    pub(super) prompt: Arc<[TokenId]>,
    reader: Reader,
    guard: Guard,
    streams: bool,
    /// Ends with the choice.
    span: Span,
    serving: Serving,
}

/// Cancels a generation whose reader went away before its end.
struct Guard {
    engine: Engine,
    id: String,
    armed: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.armed {
            self.engine.cancel(&self.id);
        }
    }
}

/// Starts every choice for this caller, or attaches to it.
///
/// # Errors
/// What is wrong with the request, or why the engine does not take it; then nothing is left
/// running.
pub(super) async fn start(
    serving: &Serving,
    owner: &Owner,
    ask: &Ask,
) -> Result<Vec<Choice>, ApiError> {
    let serving = &serving.owned_by(owner);
    let choices = (0..ask.specs.len() * ask.n).map(|index| async move {
        // An id that a client happens to use twice names two generations, unless it is meant to
        // find the first one again.
        let (id, come_back) = match ask.resumable {
            true => (generation_id(&ask.shown_id, index), Return::Possible),
            false => (
                generation_id(RequestId::random().text(), index),
                Return::Never,
            ),
        };
        let spec = with_seed(ask.specs[index / ask.n].clone(), index % ask.n);
        let span = span::generation(serving, ask, &spec);
        let opened = serving
            .open(&id, Some(spec), ask.from, come_back)
            .instrument(span.clone())
            .await
            .map_err(|problem| {
                span::failed(&span, problem.reason.as_str());
                let error = ApiError::from_problem(problem, serving.engine.max_len());
                ask.located(error)
            })?;
        Ok(Choice {
            index,
            prompt: opened.started.prompt.clone(),
            reader: opened.reader,
            guard: Guard {
                engine: serving.engine.clone(),
                id,
                armed: !ask.resumable,
            },
            streams: ask.streams,
            span,
            serving: serving.clone(),
        })
    });
    try_join_all(choices).await
}

/// Why a generation broke off, if it did.
pub(super) fn failure(ending: &Ending) -> Option<ApiError> {
    match &ending.outcome.reason {
        FinishReason::Failed(why) => Some(ApiError::broken_off(why)),
        _ => None,
    }
}

/// Choices of one seed differ: each has a seed made of the request's and its number.
fn with_seed(mut spec: pb::GenerationSpec, index: usize) -> pb::GenerationSpec {
    if index > 0
        && let Some(seed) = spec
            .sampling
            .as_mut()
            .and_then(|sampling| sampling.seed.as_mut())
    {
        let mut words = seed.to_le_bytes().to_vec();
        words.extend((index as u64).to_le_bytes());
        let hash = blake3::derive_key("marathon brain seed of a choice 1", &words);
        *seed = hash[..8]
            .iter()
            .rev()
            .fold(0, |word, &byte| word << 8 | u64::from(byte));
    }
    spec
}

impl Choice {
    /// What comes next; `None` behind the end.
    pub(super) fn poll_next(&mut self, context: &Context<'_>) -> Poll<Option<Read>> {
        let read = ready!(self.reader.poll_next(context));
        if let Some(Read::Finished(ending)) = &read {
            self.guard.armed = false;
            let finish = Finish::of(&self.serving, ending);
            span::finished(&self.span, self.streams, &finish, ending);
        }
        Poll::Ready(read)
    }

    /// Ends it when this is dropped, resumable or not.
    pub(super) fn give_up(&mut self) {
        self.guard.armed = true;
    }

    /// From now on reads come one token at a time, however many a round had.
    pub(super) fn one_by_one(&mut self) {
        self.reader.one_by_one();
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The generation broke off.
    pub(super) async fn collect(&mut self) -> Result<(Vec<Round>, Ending), ApiError> {
        let mut rounds = Vec::new();
        while let Some(read) = poll_fn(|context| self.poll_next(context)).await {
            match read {
                Read::Tokens(round) => rounds.push(round),
                Read::Finished(ending) => {
                    return failure(&ending).map_or(Ok((rounds, ending)), Err);
                }
            }
        }
        Err(ApiError::broken_off("the engine is gone"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_seeds_of_their_own_and_the_first_has_the_requests() {
        let spec = pb::GenerationSpec {
            sampling: Some(pb::Sampling {
                seed: Some(7),
                ..pb::Sampling::default()
            }),
            ..pb::GenerationSpec::default()
        };
        let seed = |index| {
            with_seed(spec.clone(), index)
                .sampling
                .unwrap()
                .seed
                .unwrap()
        };
        assert_eq!(seed(0), 7);
        assert_eq!(seed(1), seed(1));
        assert!(seed(1) != 7 && seed(2) != seed(1));
        let open = pb::GenerationSpec {
            sampling: Some(pb::Sampling::default()),
            ..spec.clone()
        };
        assert_eq!(with_seed(open, 3).sampling.unwrap().seed, None);
    }
}
