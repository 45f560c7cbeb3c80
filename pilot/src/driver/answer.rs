//! One answer: read its tokens, journal each once, go on after any break from where the journal is.

use std::time::{Duration, Instant};

use super::{Driver, Halt, wait::Attempts};
use crate::{
    brain::{
        AnswerEvent, AnswerStream, BrainError,
        client::{AnswerSpec, Complete, NewTokens},
    },
    journal::Durability,
    run::{
        decide::{answer_limit, answering},
        entry::{AnswerEnd, AnswerEnded, Entry},
        event::RunEvent,
        prompt::hash_ids,
    },
};

/// Tokens after which those that came are journaled…
const FLUSH_TOKENS: usize = 32;

/// …and the time after which they are, few or many.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// How a stream came to its end.
enum Broke {
    /// The answer is complete.
    Ended(Box<AnswerEnded>, Option<u32>),
    /// The stream is gone; attach again.
    Lost(BrainError),
    /// The brain gave the answer up.
    Failed(String),
}

impl Driver {
    /// Reads the answer in the making to its end and commits it.
    pub(super) async fn stream(&mut self) -> Result<(), Halt> {
        // A brain that is away costs no time of the run: only open streams count.
        let mut streamed = Duration::ZERO;
        let mut attempts = Attempts::default();
        // Grows when the brain gave a generation up: the next one has another name, and by the
        // brain's promise the same tokens.
        let mut incarnation = 0;
        loop {
            let had = self.received();
            let broke = self.stream_once(incarnation, &mut streamed).await?;
            if self.received() > had {
                attempts.progress();
            }
            match broke {
                Broke::Ended(mut ended, stop_token) => {
                    ended.elapsed_ms = streamed.as_millis() as u64;
                    return self.complete(*ended, stop_token).await;
                }
                Broke::Lost(error) => self.after_failure(error, &mut attempts).await?,
                Broke::Failed(reason) => {
                    incarnation += 1;
                    self.after_fault(reason, &mut attempts).await?;
                }
            }
        }
    }

    fn received(&self) -> usize {
        answering(self.state()).map_or(0, |answering| answering.received.len())
    }

    /// Opens the stream and reads it; adds the time for which it was open to `streamed`.
    async fn stream_once(
        &mut self,
        incarnation: u32,
        streamed: &mut Duration,
    ) -> Result<Broke, Halt> {
        let cancel = self.parts.cancel.clone();
        let spec = self.spec(incarnation);
        let opened = tokio::select! {
            opened = self.parts.brain.answer(&spec) => opened,
            () = cancel.cancelled() => return Err(Halt::Stop),
        };
        let mut stream = match opened {
            Ok(stream) => stream,
            Err(error) => return Ok(Broke::Lost(error)),
        };
        self.tell(&RunEvent::AnswerStarted {
            step: self.state().step,
            prompt_tokens: spec.prompt.len() as u32,
            continued_from: spec.received.len() as u32,
        });
        let (mut pending, opened) = (Vec::new(), Instant::now());
        let read = self.read(&mut stream, &mut pending).await;
        *streamed += opened.elapsed();
        if let Ok(Broke::Ended(..)) = &read {
            return read;
        }
        // What came before the break is kept, whatever broke.
        self.keep(&mut pending).await?;
        read
    }

    /// Reads to the end of the stream. `pending` are tokens that are not journaled yet.
    async fn read(
        &mut self,
        stream: &mut AnswerStream,
        pending: &mut Vec<u32>,
    ) -> Result<Broke, Halt> {
        let cancel = self.parts.cancel.clone();
        let mut due = tokio::time::Instant::now() + FLUSH_EVERY;
        loop {
            let event = tokio::select! {
                event = stream.next() => event,
                () = cancel.cancelled() => return Err(Halt::Stop),
                () = tokio::time::sleep_until(due), if !pending.is_empty() => {
                    self.keep(pending).await?;
                    due = tokio::time::Instant::now() + FLUSH_EVERY;
                    continue;
                }
            };
            match event {
                Err(error) => return Ok(Broke::Lost(error)),
                Ok(AnswerEvent::Failed(reason)) => return Ok(Broke::Failed(reason)),
                Ok(AnswerEvent::Started) => {}
                Ok(AnswerEvent::Tokens(tokens)) => {
                    if pending.is_empty() {
                        due = tokio::time::Instant::now() + FLUSH_EVERY;
                    }
                    self.take(tokens, pending).await?;
                }
                Ok(AnswerEvent::Ended(complete)) => return Ok(self.ended(*complete, pending)),
            }
        }
    }

    /// Shows tokens that came, and journals them once there are enough.
    async fn take(&mut self, tokens: NewTokens, pending: &mut Vec<u32>) -> Result<(), Halt> {
        pending.extend_from_slice(&tokens.ids);
        let NewTokens {
            index,
            ids,
            text,
            drafted,
            accepted,
        } = tokens;
        self.tell(&RunEvent::Tokens {
            step: self.state().step,
            index,
            ids,
            text,
            drafted,
            accepted,
        });
        self.parts.fail.hit("mid-answer");
        if pending.len() >= FLUSH_TOKENS {
            self.keep(pending).await?;
        }
        Ok(())
    }

    /// The whole answer, if the run's model made it.
    fn ended(&self, complete: Complete, pending: &mut Vec<u32>) -> Broke {
        if complete.fingerprint != self.state().created.model.fingerprint {
            return Broke::Lost(BrainError::OtherModel {
                address: self.parts.brain.address().to_owned(),
                reason: complete.fingerprint,
            });
        }
        let ended = AnswerEnded {
            index: self.received() as u32,
            ids: std::mem::take(pending),
            end: complete.end,
            turn: complete.turn,
            usage: complete.usage,
            // Whoever opened the streams knows it.
            elapsed_ms: 0,
        };
        Broke::Ended(Box::new(ended), complete.stop_token)
    }

    fn spec(&self, incarnation: u32) -> AnswerSpec {
        let state = self.state();
        let (run, step, attempt) = (self.ledger.run(), state.step, state.attempt);
        let answering = answering(state);
        let (prompt, seed) = (
            state.prompt.tokens(),
            answering.map_or(0, |answering| answering.seed),
        );
        // Two runs of one name may meet at one brain. The id says what is asked, so that they share
        // a generation only where they ask the same, which gives both the same tokens.
        let asked = hash_ids(&prompt);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&asked);
        hasher.update(&seed.to_le_bytes());
        hasher.update(&answer_limit(state).to_le_bytes());
        hasher.update(format!("{:?}", state.created.sampling).as_bytes());
        let call_tools = state.calls_constrained.then(|| self.declared());
        if call_tools.is_some() {
            hasher.update(b"calls constrained");
            hasher.update(&state.created.tools_hash);
        }
        let what = hasher.finalize().to_hex();
        let mut generation = format!("{run}.{step}.{attempt}.{}", &what[..16]);
        if incarnation > 0 {
            generation.push_str(&format!(".r{incarnation}"));
        }
        AnswerSpec {
            generation,
            run: run.to_string(),
            prompt,
            received: answering
                .map(|answering| answering.received.clone())
                .unwrap_or_default(),
            seed,
            max_tokens: answer_limit(state),
            sampling: state.created.sampling.clone(),
            call_tools,
            fingerprint: state.created.model.fingerprint.clone(),
        }
    }

    async fn keep(&mut self, pending: &mut Vec<u32>) -> Result<(), Halt> {
        if pending.is_empty() {
            return Ok(());
        }
        let (index, ids) = (self.received() as u32, std::mem::take(pending));
        let received = Entry::TokensReceived { index, ids };
        Ok(self.ledger.commit(vec![received], Durability::Lazy).await?)
    }

    async fn complete(
        &mut self,
        mut ended: AnswerEnded,
        stop_token: Option<u32>,
    ) -> Result<(), Halt> {
        if ended.end == AnswerEnd::Stop && !self.can_be_followed(&ended, stop_token).await? {
            ended.end = AnswerEnd::Malformed;
        }
        let event = RunEvent::AnswerEnded {
            step: self.state().step,
            usage: ended.usage,
            content: ended.turn.content.clone(),
            calls: ended.turn.calls.len() as u32,
            elapsed_ms: ended.elapsed_ms,
        };
        let entry = Entry::AnswerEnded(Box::new(ended));
        self.ledger.commit(vec![entry], Durability::Synced).await?;
        self.tell(&event);
        self.parts.fail.hit("after-answer");
        Ok(())
    }

    /// Whether the brain can put results (or a nudge) after this answer. It must be known before a
    /// tool acts: a call whose result cannot be told should not happen. The brain is asked once for
    /// each shape of answer.
    async fn can_be_followed(
        &mut self,
        ended: &AnswerEnded,
        stop_token: Option<u32>,
    ) -> Result<bool, Halt> {
        let calls = &ended.turn.calls;
        let known = calls
            .iter()
            .all(|call| self.parts.tools.find(&call.name).is_some());
        let shape = (stop_token, !calls.is_empty());
        if known && self.followed.contains(&shape) {
            return Ok(true);
        }
        let mut answer = answering(self.state())
            .map(|a| a.received.clone())
            .unwrap_or_default();
        answer.extend_from_slice(&ended.ids);
        let follows = self.could_append(&ended.turn, &answer).await?;
        if follows && known {
            self.followed.insert(shape);
        }
        Ok(follows)
    }
}
