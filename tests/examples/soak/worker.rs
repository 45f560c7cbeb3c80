//! A client: takes up a run, asks its turns one after the other, and compares every token. It goes
//! away in the middle and comes back, gives answers up, and asks again whenever brain is gone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use marathon_proto::brain::{
    CancelRequest, FinishReason, GenerateRequest, GenerationSpec, generate_event::Event,
};
use tonic::Code;

use crate::{
    life::Address,
    runs::{Chance, Run, Turn},
};

/// What all clients did.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Turns read to their end.
    pub(crate) turns: AtomicU64,
    /// Tokens received and found right.
    pub(crate) tokens: AtomicU64,
    /// Answers given up in the middle.
    pub(crate) aborts: AtomicU64,
    /// Streams left in the middle and read on.
    pub(crate) returns: AtomicU64,
    /// Calls turned away by a busy or ending brain.
    pub(crate) refusals: AtomicU64,
    /// Prompt tokens of the turns.
    pub(crate) prompt: AtomicU64,
    /// Of these, from the cache.
    pub(crate) cached: AtomicU64,
}

/// See the module's description.
pub(crate) struct Worker {
    /// Which.
    pub(crate) number: u64,
    /// What it takes up.
    pub(crate) runs: Arc<Vec<Run>>,
    /// Where brain is.
    pub(crate) brain: Address,
    /// What it did.
    pub(crate) counts: Arc<Counts>,
    /// When it takes up nothing more.
    pub(crate) until: Instant,
    /// Its random numbers.
    pub(crate) chance: Chance,
}

/// How a stream ended.
enum End {
    /// With the last token.
    Whole,
    /// It broke off, or was left: read on from there.
    Broken,
    /// It was given up.
    Aborted,
}

/// What a client is going to do to a stream after so many tokens.
#[derive(Clone, Copy)]
enum Whim {
    Stay,
    Leave(usize),
    Abort(usize),
}

impl Worker {
    /// Works until it is time.
    pub(crate) async fn work(mut self) {
        let mut taken_up = 0;
        while Instant::now() < self.until {
            taken_up += 1;
            let runs = self.runs.clone();
            let run = &runs[self.chance.below(runs.len() as u64) as usize];
            for (number, turn) in run.turns.iter().enumerate() {
                let mut attempt = 0;
                loop {
                    let id = format!("c{}-{taken_up}-{number}-{attempt}", self.number);
                    if self.answer(&id, turn).await {
                        break;
                    }
                    attempt += 1;
                }
                if Instant::now() >= self.until {
                    return;
                }
            }
        }
    }

    /// Reads a turn's answer to its end, whatever happens; false when it was given up.
    async fn answer(&mut self, id: &str, turn: &Turn) -> bool {
        let mut have = 0;
        loop {
            let left = turn.answer.len() - have;
            let whim = match self.chance.below(8) {
                0 => Whim::Abort(have + self.chance.below(left as u64) as usize),
                1 | 2 => Whim::Leave(have + self.chance.below(left as u64) as usize),
                _ => Whim::Stay,
            };
            match self.read(id, turn, &mut have, whim).await {
                End::Whole => {
                    self.counts.turns.fetch_add(1, Relaxed);
                    return true;
                }
                End::Broken => {}
                End::Aborted => {
                    self.counts.aborts.fetch_add(1, Relaxed);
                    return false;
                }
            }
        }
    }

    async fn read(&mut self, id: &str, turn: &Turn, have: &mut usize, whim: Whim) -> End {
        let there = self.brain.wait_for(Option::is_some).await;
        let there = there.expect("the lives go on").clone();
        let mut client = there.expect("it is there");
        let request = GenerateRequest {
            generation_id: id.to_owned(),
            spec: Some(GenerationSpec {
                // A brain that lost the log need not compute these again; it may.
                received_tokens: match self.chance.once_in(2) {
                    true => turn.answer[..*have].to_vec(),
                    false => Vec::new(),
                },
                ..turn.spec.clone()
            }),
            from_index: *have as u32,
        };
        let mut stream = match client.generate(request).await {
            Ok(stream) => stream.into_inner(),
            Err(status) => {
                // Whatever a link that breaks makes of it; nothing that is this client's fault.
                let known = [
                    Code::Unavailable,
                    Code::ResourceExhausted,
                    Code::Unknown,
                    Code::Internal,
                    Code::Cancelled,
                ];
                assert!(known.contains(&status.code()), "{id}: {status}");
                self.counts.refusals.fetch_add(1, Relaxed);
                // Asking again at once would only be turned away again.
                tokio::time::sleep(Duration::from_millis(50)).await;
                return End::Broken;
            }
        };
        loop {
            match whim {
                Whim::Leave(at) if *have >= at => {
                    self.counts.returns.fetch_add(1, Relaxed);
                    return End::Broken;
                }
                Whim::Abort(at) if *have >= at => {
                    let request = CancelRequest {
                        generation_id: id.to_owned(),
                    };
                    // Who is gone need not be told.
                    let _ = client.cancel(request).await;
                    return End::Aborted;
                }
                _ => {}
            }
            let event = match stream.message().await {
                Ok(Some(event)) => event.event.expect("an event that is set"),
                Ok(None) | Err(_) => return End::Broken,
            };
            match event {
                Event::Started(_) => {}
                Event::Tokens(tokens) => {
                    assert_eq!(
                        tokens.index as usize, *have,
                        "{id}: a token twice or missing"
                    );
                    let expected = turn.answer.get(*have..*have + tokens.ids.len());
                    assert_eq!(
                        Some(&tokens.ids[..]),
                        expected,
                        "{id}: other tokens from {have} on"
                    );
                    *have += tokens.ids.len();
                    self.counts
                        .tokens
                        .fetch_add(tokens.ids.len() as u64, Relaxed);
                }
                Event::Finished(end) => match end.reason() {
                    FinishReason::Length => {
                        assert_eq!(*have, turn.answer.len(), "{id}: too few tokens");
                        let usage = end.usage.unwrap_or_default();
                        assert_eq!(usage.prompt_tokens as usize, turn.prompt);
                        self.counts.prompt.fetch_add(turn.prompt as u64, Relaxed);
                        let cached = u64::from(usage.cached_tokens);
                        self.counts.cached.fetch_add(cached, Relaxed);
                        return End::Whole;
                    }
                    FinishReason::Error => return End::Broken,
                    other => panic!("{id} ended with {other:?}: {}", end.error),
                },
            }
        }
    }
}
