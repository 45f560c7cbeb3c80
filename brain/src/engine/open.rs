//! Starting a generation, or finding the one of an id.
//!
//! What takes time in proportion to a request is done first, by whoever asks and under no lock
//! ([`Engine::prepare`]); what is left is quick ([`Engine::begin`]).

use std::sync::{Arc, atomic::Ordering};

use super::{
    error::{EngineError, Health},
    generation::{Cursor, Generation, Started},
    handle::Engine,
    registry::Registry,
    thread::Command,
};
use crate::sched::{
    request::{FinishReason, Request, RequestHash, ValidRequest},
    sequence::{Outcome, Timings, Usage},
    types::Emitted,
};

/// A stream's beginning.
#[derive(Debug)]
pub struct Attached {
    /// What is generated.
    pub started: Started,
    /// The reader.
    pub cursor: Cursor,
}

/// A request that was looked at. Dropping it leaves nothing behind.
#[derive(Debug)]
pub struct Prepared(Found);

#[derive(Debug)]
enum Found {
    /// The generation is there, and read.
    There(Box<Attached>),
    /// It is to be made.
    New(Box<New>),
}

/// A generation that may begin.
#[derive(Debug)]
struct New {
    generation: Generation,
    valid: ValidRequest,
    from: usize,
}

impl Engine {
    /// Starts a generation, or attaches to the one of that id, and reads it from index `from`.
    ///
    /// With a request that is the same as the known one's this attaches; with another it is a
    /// [`EngineError::Conflict`]. A generation that failed is continued from where it stopped.
    ///
    /// Takes time in proportion to the request: see [`Engine::prepare`].
    pub fn generate(
        &self,
        id: &str,
        request: Option<Request>,
        from: usize,
    ) -> Result<Attached, EngineError> {
        self.begin(self.prepare(id, request, from)?)
    }

    /// Attaches, or does of [`Engine::generate`] what takes long where a request is long: for a
    /// thread that may block.
    pub fn prepare(
        &self,
        id: &str,
        request: Option<Request>,
        from: usize,
    ) -> Result<Prepared, EngineError> {
        check_id(id)?;
        let request = request.map(|mut request| {
            request.owner = (*self.owner).to_owned();
            (request.hash(), request)
        });
        let registry = self.shared.registry();
        let known = registry.get(&self.owner, id).cloned();
        let (hash, request) = match (&known, request) {
            (None, None) => return Err(EngineError::NotFound { id: id.into() }),
            (Some(known), None) => return self.attach(known, true, from).map(there),
            (Some(known), Some((hash, request))) => match self.find(known, hash, from)? {
                Some(attached) => return Ok(there(attached)),
                None => (hash, request),
            },
            (None, Some(request)) => request,
        };
        // Nobody looks at a request that is not taken on whatever it is.
        self.check_room(&registry)?;
        drop(registry);
        let (computed, attempts) = match known {
            Some(failed) => (failed.tokens(), failed.attempts_so_far()),
            None => (Vec::new(), 0),
        };
        let (generation, valid) = self.new_generation(id, hash, request, computed)?;
        Ok(Prepared(Found::New(Box::new(New {
            generation: generation.tried(attempts + 1),
            valid,
            from,
        }))))
    }

    /// Does the rest of [`Engine::generate`], which is quick.
    pub fn begin(&self, prepared: Prepared) -> Result<Attached, EngineError> {
        let New {
            generation,
            valid,
            from,
        } = match prepared.0 {
            Found::There(attached) => return Ok(*attached),
            Found::New(new) => *new,
        };
        let mut registry = self.shared.registry();
        let known = registry.get(&self.owner, &generation.id).cloned();
        // Somebody may have been quicker.
        if let Some(known) = &known
            && let Some(attached) = self.find(known, generation.started.request_hash, from)?
        {
            return Ok(attached);
        }
        let generation = self.submit(&mut registry, generation, valid)?;
        self.attach(&generation, known.is_some(), from)
    }

    /// Attaches to a generation that is known, if the request is its own; `None` when it failed and
    /// is to be continued. The caller holds the registry.
    fn find(
        &self,
        known: &Arc<Generation>,
        hash: RequestHash,
        from: usize,
    ) -> Result<Option<Attached>, EngineError> {
        if known.started.request_hash != hash {
            return Err(EngineError::Conflict {
                id: known.id.clone(),
            });
        }
        match known.outcome().map(|outcome| outcome.reason) {
            Some(FinishReason::Failed(_)) => Ok(None),
            _ => self.attach(known, true, from).map(Some),
        }
    }

    fn attach(
        &self,
        generation: &Arc<Generation>,
        attached: bool,
        from: usize,
    ) -> Result<Attached, EngineError> {
        let cursor = generation
            .read_from(from, &self.shared.clock)
            .map_err(|len| EngineError::OutOfRange {
                id: generation.id.clone(),
                from,
                len,
            })?;
        Ok(Attached {
            started: Started {
                attached,
                ..generation.started.clone()
            },
            cursor,
        })
    }

    /// Checks a request against what the engine can hold. `computed` are tokens of it that are known
    /// here.
    pub(super) fn new_generation(
        &self,
        id: &str,
        hash: RequestHash,
        mut request: Request,
        computed: Vec<Emitted>,
    ) -> Result<(Generation, ValidRequest), EngineError> {
        let received = with_computed(&mut request, computed);
        let started = Started::of(&request, hash);
        let valid = request.validate(self.limits(), self.max_len())?;
        let now = self.shared.clock.now();
        let generation = Generation::new(id.into(), valid.request(), started, received, now);
        Ok((generation, valid))
    }

    /// Whether another generation is taken on at all.
    fn check_room(&self, registry: &Registry) -> Result<(), EngineError> {
        if self.shared.draining.load(Ordering::SeqCst) {
            return Err(EngineError::Draining);
        }
        if let Health::Stopped(reason) = self.health() {
            return Err(EngineError::Unhealthy(reason));
        }
        let config = &self.shared.config;
        if registry.live() >= config.live {
            let (there, what) = (config.live, "generations at work");
            return Err(EngineError::Busy { there, what });
        }
        Ok(())
    }

    /// Makes a generation known and hands it to the thread. The caller's lock on the registry makes
    /// sure that the thread is there: it closes the registry before it ends.
    pub(super) fn submit(
        &self,
        registry: &mut Registry,
        generation: Generation,
        valid: ValidRequest,
    ) -> Result<Arc<Generation>, EngineError> {
        self.check_room(registry)?;
        let config = &self.shared.config;
        while registry.len() >= config.known {
            if !registry.forget_one() {
                let (there, what) = (config.known, "generations known");
                return Err(EngineError::Busy { there, what });
            }
        }
        let generation = Arc::new(generation);
        if let Some(reason) = valid.finished().cloned() {
            let request = valid.request();
            let usage = Usage {
                prompt: request.prompt.len(),
                generated: request.received.len(),
                ..Usage::default()
            };
            generation.finish(
                self.shared.clock.now(),
                Outcome {
                    reason,
                    usage,
                    timings: Timings::default(),
                },
            );
        } else if self
            .commands
            .send(Command::Submit(generation.clone(), Box::new(valid)))
            .is_err()
        {
            return Err(EngineError::Unhealthy("its thread is gone".into()));
        }
        registry.insert(generation.clone());
        Ok(generation)
    }
}

fn there(attached: Attached) -> Prepared {
    Prepared(Found::There(Box::new(attached)))
}

/// The log's first tokens: what the client received, or what was computed before a failure if
/// that is more. Both are tokens of the same function, so the longer one contains the shorter.
fn with_computed(request: &mut Request, computed: Vec<Emitted>) -> Vec<Emitted> {
    if computed.len() > request.received.len() {
        request.received = computed.iter().map(|token| token.id).collect();
        return computed;
    }
    request
        .received
        .iter()
        .map(|&id| Emitted { id, logprobs: None })
        .collect()
}

fn check_id(id: &str) -> Result<(), EngineError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._:-".contains(&byte);
    if (1..=128).contains(&id.len()) && id.bytes().all(allowed) {
        return Ok(());
    }
    Err(EngineError::BadId(id.chars().take(128).collect()))
}
