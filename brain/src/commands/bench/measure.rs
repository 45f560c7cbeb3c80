//! The measurements.

use std::{path::Path, sync::Arc, time::Duration};

use super::{
    report::{BatchRow, ContextRow, DepthRow, RestartRow, Results, ReuseRow},
    stall::stall,
};
use crate::{
    bringup::{self, Trial},
    cli::{BenchArgs, BenchPart},
    config::Config,
    engine::{Cursor, Engine, LogEvent},
    error::Error,
    sched::{
        request::{FinishReason, Request},
        sequence::Outcome,
        types::{DraftDepth, SamplingParams, TokenId},
    },
    serving::{ModelFacts, Serving},
};

/// Tokens of a turn's question and of the prompts of a batch.
const QUESTION: usize = 16;
const BATCH_PROMPT: usize = 128;
/// Time that an engine gets to save what the next one takes in.
const SAVING: Duration = Duration::from_secs(600);

/// What is to be measured.
pub(super) struct Bench<'a> {
    pub(super) args: &'a BenchArgs,
    pub(super) config: &'a Config,
    /// What the model is made to do.
    pub(super) trial: Trial,
    /// A folder of its own for snapshots.
    pub(super) snapshots: &'a Path,
    /// Told what is being measured.
    pub(super) progress: &'a dyn Fn(&str),
}

/// An engine, and how it is asked.
pub(super) struct Device {
    /// Begins the ids of its generations: a successor knows those of its predecessor.
    name: &'static str,
    pub(super) engine: Engine,
    facts: Arc<ModelFacts>,
    asked: u64,
}

/// A generation's tokens, prompt included, and how it went.
pub(super) struct Done {
    log: Vec<TokenId>,
    pub(super) outcome: Outcome,
}

impl Bench<'_> {
    /// Measures everything.
    pub(super) async fn run(&self) -> Result<Results, Error> {
        (self.progress)("loading");
        let mut device = Device::new("bench", self.bring_up(self.config)?);
        let facts = device.facts.clone();
        let mut results = Results {
            version: env!("CARGO_PKG_VERSION").into(),
            model: facts.name.clone(),
            fingerprint: facts.fingerprint.clone(),
            device: facts.device.into(),
            drafter: facts.drafter.clone(),
            threads: self.config.threads,
            tokens: self.args.tokens,
            repeats: self.args.repeats,
            synthetic_acceptance: self.trial.acceptance.clone(),
            stretched_to: self.trial.stretch,
            ..Results::default()
        };
        let contexts = self.contexts(device.engine.max_len())?;
        let warm_up = device.prompt(64);
        device
            .ask(warm_up, self.args.tokens, DraftDepth::Auto)
            .await?;
        let asked = |part| self.args.parts.contains(&part);
        for &context in contexts.iter().filter(|_| asked(BenchPart::Contexts)) {
            (self.progress)(&format!("context of {context} tokens"));
            let (row, depths) = self.context(&mut device, context).await?;
            results.contexts.push(row);
            results.depths.extend(depths);
        }
        let batches = self.args.batches.iter();
        for &sequences in batches.filter(|_| asked(BenchPart::Batches)) {
            (self.progress)(&format!("batch of {sequences}"));
            results
                .batches
                .push(self.batch(&mut device, sequences).await?);
        }
        let behind = |context: &&usize| **context > 0 && asked(BenchPart::Reuse);
        for &context in contexts.iter().filter(behind) {
            (self.progress)(&format!("next turn after {context} tokens"));
            results.reuse.push(self.reuse(&mut device, context).await?);
        }
        let longest = contexts.last().filter(|&&context| context > 0);
        if let Some(&context) = longest.filter(|_| asked(BenchPart::Stall)) {
            (self.progress)(&format!("decoding while {context} tokens are computed"));
            let (row, gaps) = stall(&mut device, context).await?;
            results.stall.push(row);
            results.gaps = gaps;
        }
        device.end().await;
        if let Some(&context) = longest.filter(|_| asked(BenchPart::Restart)) {
            (self.progress)(&format!("restart after {context} tokens"));
            results.restart.push(self.restart(context).await?);
        }
        Ok(results)
    }

    /// On a thread of its own: whatever has to be fetched is waited for, and here one must not wait.
    fn bring_up(&self, config: &Config) -> Result<Serving, Error> {
        let trial = &self.trial;
        std::thread::scope(|scope| {
            let loading = scope.spawn(|| bringup::bring_up_for(config, trial));
            let loaded = loading.join();
            loaded.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// The contexts asked for, as far as the model goes.
    fn contexts(&self, max_len: usize) -> Result<Vec<usize>, Error> {
        let room = 2 * (self.args.tokens as usize + QUESTION) + 1;
        let most = max_len.saturating_sub(room);
        let mut contexts: Vec<usize> = self.args.contexts.clone();
        contexts.retain(|&context| context <= most);
        contexts.sort_unstable();
        contexts.dedup();
        match contexts.is_empty() {
            false => Ok(contexts),
            true => Err(Error::Usage(format!(
                "--contexts: none of them leaves {room} of the {max_len} tokens that this model \
                 and its KV memory hold for the answers"
            ))),
        }
    }

    /// Prefill, then decoding without drafts, with as many as brain chooses, and at the fixed depths
    /// asked for, in turns.
    async fn context(
        &self,
        device: &mut Device,
        context: usize,
    ) -> Result<(ContextRow, Vec<DepthRow>), Error> {
        let prompt = device.prompt(context.max(1));
        let cold = device.ask(prompt.clone(), 1, DraftDepth::Fixed(0)).await?;
        let mut row = ContextRow {
            context,
            prefill_per_second: rate(prompt.len(), cold.outcome.timings.prefill),
            ..ContextRow::default()
        };
        let (mut plain, mut drafted, mut gains) = (Vec::new(), Vec::new(), Vec::new());
        let mut fixed = vec![Vec::new(); self.args.depths.len()];
        for _ in 0..self.args.repeats.max(1) {
            let tokens = self.args.tokens;
            let without = device
                .ask(prompt.clone(), tokens, DraftDepth::Fixed(0))
                .await?;
            let with = device.ask(prompt.clone(), tokens, DraftDepth::Auto).await?;
            if with.log != without.log {
                return Err(Error::Serving(
                    "drafting changed a token: this must not happen; please report it".into(),
                ));
            }
            plain.push(decode_rate(&without.outcome));
            drafted.push(decode_rate(&with.outcome));
            gains.push(decode_rate(&with.outcome) / decode_rate(&without.outcome));
            let usage = with.outcome.usage;
            row.drafted += usage.drafted;
            row.accepted += usage.accepted;
            row.rounds += usage.rounds;
            for (&depth, rates) in self.args.depths.iter().zip(&mut fixed) {
                let depth = DraftDepth::Fixed(depth);
                let at_it = device.ask(prompt.clone(), tokens, depth).await?;
                rates.push(decode_rate(&at_it.outcome));
            }
        }
        row.decode_per_second = median(plain);
        row.drafted_per_second = median(drafted);
        row.gain = median(gains);
        let depths = self.args.depths.iter().zip(fixed);
        let depths = depths.map(|(&depth, rates)| DepthRow {
            context,
            depth,
            tokens_per_second: median(rates),
        });
        Ok((row, depths.collect()))
    }

    /// Many at a time: their prompts are computed before the clock starts.
    async fn batch(&self, device: &mut Device, sequences: usize) -> Result<BatchRow, Error> {
        let prompts: Vec<_> = (0..sequences)
            .map(|_| device.prompt(BATCH_PROMPT))
            .collect();
        // Which drafts are right can be set where the answer is known.
        let known = match self.trial.acceptance.is_empty() {
            true => 1,
            false => self.args.tokens,
        };
        for prompt in &prompts {
            let prompt = prompt.clone();
            device.ask(prompt, known, DraftDepth::Fixed(0)).await?;
        }
        let mut rates = Vec::new();
        for _ in 0..self.args.repeats.max(1) {
            let started = std::time::Instant::now();
            let mut open = Vec::new();
            for prompt in &prompts {
                let depth = device.facts.draft;
                open.push(device.open(prompt.clone(), self.args.tokens, depth)?);
            }
            let mut tokens = 0;
            for cursor in open {
                tokens += read(cursor).await?.1.usage.generated;
            }
            rates.push(rate(tokens, started.elapsed()));
        }
        Ok(BatchRow {
            sequences,
            tokens_per_second: median(rates),
        })
    }

    /// A turn, then the next one, which goes on from it.
    async fn reuse(&self, device: &mut Device, context: usize) -> Result<ReuseRow, Error> {
        let prompt = device.prompt(context);
        let first = device
            .ask(prompt, self.args.tokens, DraftDepth::Auto)
            .await?;
        let next = [first.log, device.prompt(QUESTION)].concat();
        let known = next.len() - QUESTION;
        let second = device.ask(next, 1, DraftDepth::Fixed(0)).await?;
        Ok(ReuseRow {
            context,
            first_ms: millis(first.outcome.timings.ttft),
            next_ms: millis(second.outcome.timings.ttft),
            cached_share: second.outcome.usage.cached as f64 / known as f64,
        })
    }

    /// A turn, then another brain, and the next turn there: from the snapshot, and computed.
    async fn restart(&self, context: usize) -> Result<RestartRow, Error> {
        let config = Config {
            snapshot_dir: Some(self.snapshots.to_owned()),
            snapshot_quota: u64::MAX,
            ..self.config.clone()
        };
        let mut device = Device::new("before", self.bring_up(&config)?);
        let prompt = device.prompt(context);
        let first = device
            .ask(prompt, self.args.tokens, DraftDepth::Auto)
            .await?;
        device.end().await;
        let mut device = Device::new("after", self.bring_up(&config)?);
        let next = [first.log, device.prompt(QUESTION)].concat();
        let known = next.len() - QUESTION;
        let restored = device.ask(next.clone(), 1, DraftDepth::Fixed(0)).await?;
        // Nothing that another caller computed is found.
        device.engine = device.engine.owned_by("bench");
        let computed = device.ask(next, 1, DraftDepth::Fixed(0)).await?;
        device.end().await;
        Ok(RestartRow {
            context,
            computed_ms: millis(computed.outcome.timings.ttft),
            restored_ms: millis(restored.outcome.timings.ttft),
            cached_share: restored.outcome.usage.cached as f64 / known as f64,
        })
    }
}

impl Device {
    fn new(name: &'static str, serving: Serving) -> Self {
        Self {
            name,
            engine: serving.engine.clone(),
            facts: serving.facts.clone(),
            asked: 0,
        }
    }

    /// Tokens that no prompt before began with.
    pub(super) fn prompt(&mut self, len: usize) -> Vec<TokenId> {
        self.asked += 1;
        let vocab = self.engine.limits().vocab_size as u64;
        let mut state = self.asked;
        let scattered = |_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (vocab / 4 + (state >> 33) % (vocab / 2).max(1)) as TokenId
        };
        (0..len).map(scattered).collect()
    }

    pub(super) fn open(
        &mut self,
        prompt: Vec<TokenId>,
        tokens: u32,
        draft: DraftDepth,
    ) -> Result<Cursor, Error> {
        self.asked += 1;
        let params = SamplingParams {
            suppressed: self.facts.suppressed.clone(),
            ..SamplingParams::greedy(tokens)
        };
        let request = Request {
            draft,
            ..Request::new(prompt, params)
        };
        let id = format!("{}-{}", self.name, self.asked);
        let attached = self.engine.generate(&id, Some(request), 0);
        let attached = attached.map_err(|error| Error::Serving(error.to_string()))?;
        Ok(attached.cursor)
    }

    pub(super) async fn ask(
        &mut self,
        prompt: Vec<TokenId>,
        tokens: u32,
        draft: DraftDepth,
    ) -> Result<Done, Error> {
        let mut log = prompt.clone();
        let (answer, outcome) = read(self.open(prompt, tokens, draft)?).await?;
        log.extend(answer);
        Ok(Done { log, outcome })
    }

    async fn end(self) {
        self.engine.drain(SAVING).await;
    }
}

async fn read(mut cursor: Cursor) -> Result<(Vec<TokenId>, Outcome), Error> {
    let mut answer = Vec::new();
    while let Some(event) = cursor.next().await {
        match event {
            LogEvent::Tokens { tokens, .. } => answer.extend(tokens.iter().map(|token| token.id)),
            LogEvent::Finished(outcome) if outcome.reason == FinishReason::Length => {
                return Ok((answer, outcome));
            }
            LogEvent::Finished(outcome) => {
                let reason = format!("a generation ended early: {:?}", outcome.reason);
                return Err(Error::Serving(reason));
            }
        }
    }
    Err(Error::Serving("the engine has stopped".into()))
}

/// Tokens behind the first, a second.
fn decode_rate(outcome: &Outcome) -> f64 {
    rate(
        outcome.usage.generated.saturating_sub(1),
        outcome.timings.decode,
    )
}

fn rate(tokens: usize, time: Duration) -> f64 {
    tokens as f64 / time.as_secs_f64().max(1e-9)
}

pub(super) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
