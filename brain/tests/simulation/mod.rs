//! A simulation of a scheduler over a fake device, in which accidents happen and every token is checked.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    reason = "helpers of tests, of which every test binary uses its own part"
)]

mod below;
mod cases;
mod rules;

use std::{collections::BTreeMap, time::Duration};

use brain::{
    backend::{
        Executor,
        fake::{FakeExecutor, FakeOptions},
    },
    sched::{
        fair::Priority,
        image::AnchorImage,
        request::{FinishReason, Request},
        scheduler::{Event, Scheduler, Submitted},
        sequence::Outcome,
        stats::Stats,
        tokens::PrefixKey,
        types::{BlockId, Emitted, Group, SeqId, SeqStep, Step, TokenId},
    },
};
use proptest::prelude::*;

pub use cases::*;
pub use rules::{Ruled, Rules};

#[derive(Debug)]
pub struct Running {
    /// As it was asked for, apart from its prompt.
    pub plan: Plan,
    pub prompt: Vec<TokenId>,
    pub expected: Vec<Emitted>,
    /// Received, then emitted.
    pub tokens: Vec<Emitted>,
    pub received: usize,
    pub since: usize,
    pub cancelled_after: Option<usize>,
    pub outcome: Option<Outcome>,
}

impl Running {
    pub fn check(&self) -> Result<(), TestCaseError> {
        let tokens = &self.tokens;
        prop_assert!(tokens.len() <= self.expected.len());
        for (index, (token, expected)) in tokens.iter().zip(&self.expected).enumerate() {
            prop_assert_eq!(token.id, expected.id, "token {}", index);
            if index >= self.received {
                prop_assert_eq!(
                    &token.logprobs,
                    &expected.logprobs,
                    "log-probability {}",
                    index
                );
            }
        }
        let Some(outcome) = &self.outcome else {
            return Ok(());
        };
        prop_assert_eq!(outcome.usage.generated, tokens.len());
        prop_assert_eq!(outcome.usage.prompt, self.prompt.len());
        prop_assert!(outcome.usage.cached <= self.prompt.len());
        prop_assert!(outcome.usage.accepted <= outcome.usage.drafted);
        match outcome.reason {
            FinishReason::Cancelled => {}
            FinishReason::Failed(_) | FinishReason::StopString => prop_assert!(false),
            FinishReason::StopToken(stop) => {
                prop_assert_eq!(tokens.last().map(|token| token.id), Some(stop));
                prop_assert_eq!(tokens.len(), self.expected.len());
            }
            FinishReason::Length => prop_assert_eq!(tokens.len(), self.expected.len()),
        }
        Ok(())
    }
}

pub struct Simulation {
    pub scheduler: Scheduler,
    pub fake: FakeExecutor,
    pub there: BTreeMap<SeqId, Running>,
    pub done: Vec<Running>,
    pub step: usize,
    /// Microseconds that a row takes.
    pub row_time: u64,
    /// Nanoseconds that a row takes for every token before it.
    pub token_time: u64,
    /// How long the last step took.
    pub elapsed: Duration,
    /// What it is made from.
    world: World,
    /// What engines counted that are gone.
    pub gone: Vec<Stats>,
    /// Anchors that were taken in from a snapshot.
    pub restored: u64,
    heap: below::Heap,
    /// When those that are held may be admitted.
    held: BTreeMap<SeqId, usize>,
}

impl Simulation {
    pub fn new(world: &World) -> Self {
        Self {
            scheduler: Scheduler::new(world.limits.clone(), world.config.clone()).unwrap(),
            fake: device(world),
            there: BTreeMap::new(),
            done: Vec::new(),
            step: 0,
            row_time: 7,
            token_time: 0,
            elapsed: Duration::ZERO,
            world: world.clone(),
            gone: Vec::new(),
            restored: 0,
            heap: below::Heap::new(world.below),
            held: BTreeMap::new(),
        }
    }

    pub fn now(&self) -> Duration {
        Duration::from_millis(self.step as u64)
    }

    pub fn submit(&mut self, plan: &Plan) -> Result<(), TestCaseError> {
        let mut prompt = plan.prompt.clone();
        match plan.begins {
            Beginning::Own => {}
            Beginning::Common(len) => {
                prompt = (0..len as u32).map(|at| at * at % 50).collect();
                prompt.extend(&plan.prompt[..plan.prompt.len().div_ceil(4)]);
            }
            Beginning::Ended { back, share } => {
                if let Some(before) = self.done.iter().rev().nth(back) {
                    let mut known = before.prompt.clone();
                    known.extend(before.tokens.iter().map(|token| token.id));
                    known.truncate((known.len() * share).div_ceil(16));
                    known.extend(&plan.prompt[..plan.prompt.len() / 4]);
                    prompt = known;
                }
            }
        }
        let max_len = self.scheduler.max_len();
        if prompt.len() >= max_len {
            let request = Request::new(prompt, params(0, 1));
            prop_assert!(request.validate(self.scheduler.limits(), max_len).is_err());
            return Ok(());
        }
        let room = plan.max_tokens.min((max_len - prompt.len()) as u32);
        let params = params(plan.sampling, room);
        let masks = |generated: &[Emitted]| plan.rules.mask(&params, generated);
        let expected = self.fake.expected_within(&prompt, &params, masks);
        let received = plan.received * expected.len() / 16;
        let request = request(plan, &prompt, &expected[..received]);
        let valid = request.validate(self.scheduler.limits(), max_len).unwrap();
        let mut running = Running {
            plan: plan.clone(),
            prompt,
            tokens: expected[..received].to_vec(),
            expected,
            received,
            since: self.step,
            cancelled_after: plan.cancelled_after,
            outcome: None,
        };
        match self.scheduler.submit(self.now(), valid) {
            Submitted::Queued(seq) => {
                self.there.insert(seq, running);
                if plan.held > 0 {
                    self.scheduler.hold(seq);
                    self.held.insert(seq, self.step + plan.held);
                }
            }
            Submitted::Done(outcome) => {
                running.outcome = Some(outcome);
                running.check()?;
                self.done.push(running);
            }
        }
        Ok(())
    }

    pub fn finish(&mut self, seq: SeqId, outcome: Outcome) -> Result<(), TestCaseError> {
        let mut running = self.there.remove(&seq).unwrap();
        running.outcome = Some(outcome);
        running.check()?;
        self.done.push(running);
        Ok(())
    }

    pub fn cancel_due(&mut self) -> Result<(), TestCaseError> {
        let due: Vec<SeqId> = self
            .there
            .iter()
            .filter(|(_, running)| {
                running
                    .cancelled_after
                    .is_some_and(|after| self.step >= running.since + after)
            })
            .map(|(&seq, _)| seq)
            .collect();
        for seq in due {
            let outcome = self.scheduler.cancel(self.now(), seq).unwrap();
            prop_assert_eq!(self.scheduler.cancel(self.now(), seq), None);
            self.finish(seq, outcome)?;
        }
        Ok(())
    }

    /// Everything that is worth saving, as a snapshot would have it.
    fn saved(&mut self) -> Vec<SavedAnchor> {
        let prefixes = self.scheduler.prefixes();
        let fake = &mut self.fake;
        let mut bytes = |group, blocks: &[BlockId]| {
            let mut bytes = Vec::new();
            fake.save_blocks(group, blocks, &mut bytes).unwrap();
            bytes
        };
        let all = prefixes.worth_saving().into_iter().map(|id| {
            let chain = prefixes.chain(id);
            let blocks = prefixes.anchor_blocks(id).unwrap();
            let unit = |key| bytes(Group::Full, &prefixes.unit_blocks(key).unwrap());
            SavedAnchor {
                image: prefixes.image(id).unwrap(),
                units: chain.iter().map(unit).collect(),
                chain,
                tail: bytes(Group::Full, &blocks.tail),
                window: bytes(Group::Sliding, &blocks.window),
            }
        });
        all.collect()
    }

    /// A new engine on a new device takes over: from what was saved, and from what clients have.
    fn restart(&mut self, orderly: bool) -> Result<(), TestCaseError> {
        if orderly {
            for seq in self.there.keys().copied().collect::<Vec<_>>() {
                self.scheduler.cancel(self.now(), seq).unwrap();
            }
        }
        let saved = self.saved();
        self.gone.push(self.scheduler.stats());
        let world = &self.world;
        self.scheduler = Scheduler::new(world.limits.clone(), world.config.clone()).unwrap();
        self.fake = device(world);
        self.held.clear();
        // Memory does not outlive the process.
        self.heap = below::Heap::new(world.below);
        for anchor in saved {
            let now = self.now();
            let restored = self.scheduler.restore(now, &anchor.image, &anchor.chain);
            let Some(restored) = restored else { continue };
            let load = |(group, blocks, bytes): (_, &[BlockId], &[u8])| {
                self.fake.load_blocks(group, blocks, bytes).unwrap();
            };
            let units = restored.units.iter();
            let units =
                units.map(|(at, blocks)| (Group::Full, &blocks[..], &anchor.units[*at][..]));
            let own = [
                (Group::Full, &restored.blocks.tail[..], &anchor.tail[..]),
                (
                    Group::Sliding,
                    &restored.blocks.window[..],
                    &anchor.window[..],
                ),
            ];
            units.chain(own).for_each(load);
            self.restored += 1;
            self.scheduler.audit().map_err(TestCaseError::fail)?;
        }
        for (_, running) in std::mem::take(&mut self.there) {
            let request = request(&running.plan, &running.prompt, &running.tokens);
            let max_len = self.scheduler.max_len();
            let valid = request.validate(self.scheduler.limits(), max_len).unwrap();
            match self.scheduler.submit(self.now(), valid) {
                Submitted::Queued(seq) => self.there.insert(seq, running),
                Submitted::Done(_) => return Err(TestCaseError::fail("it had not ended")),
            };
        }
        Ok(())
    }

    /// Plans, runs and commits, unless there is an accident.
    pub fn run_step(&mut self, accident: Option<Accident>) -> Result<Option<Step>, TestCaseError> {
        self.held.retain(|seq, due| {
            let waits = *due > self.step;
            if !waits {
                self.scheduler.release(*seq);
            }
            waits
        });
        let now = self.now();
        let stride = self.scheduler.stride();
        let mut below = below::AtHand {
            heap: &mut self.heap,
            device: &mut self.fake,
            kv: self.world.kv,
            stride,
        };
        let Some(step) = self.scheduler.plan_over(now, &mut below) else {
            prop_assert!(
                self.there.is_empty() || self.scheduler.is_held_up(),
                "sequences wait and nothing is planned"
            );
            return Ok(None);
        };
        self.scheduler.audit().map_err(TestCaseError::fail)?;
        let output = self
            .fake
            .run(&step)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        match accident {
            Some(Accident::ResultLost) => {}
            Some(Accident::DeviceLost) => self.scheduler.reset(),
            Some(Accident::Killed) => self.restart(false)?,
            Some(Accident::Ended) => self.restart(true)?,
            None => {
                // Time is a number like any other; this one makes depths vary.
                let behind = |rows: &SeqStep| (rows.tokens.len() * rows.start) as u64;
                let behind: u64 = step.seqs.iter().map(behind).sum();
                let elapsed = Duration::from_micros(100 + self.row_time * step.rows() as u64)
                    + Duration::from_nanos(self.token_time * behind);
                self.elapsed = elapsed;
                let events = self.scheduler.commit(self.now(), &step, output, elapsed);
                for event in events.map_err(|error| TestCaseError::fail(error.to_string()))? {
                    match event {
                        Event::Tokens {
                            seq,
                            tokens,
                            drafted,
                            accepted,
                        } => {
                            prop_assert!(accepted <= drafted && accepted <= tokens.len());
                            let running = self.there.get_mut(&seq).unwrap();
                            running.tokens.extend(tokens);
                            running.check()?;
                        }
                        Event::Finished { seq, outcome } => self.finish(seq, outcome)?,
                    }
                }
            }
        }
        self.scheduler.audit().map_err(TestCaseError::fail)?;
        Ok(Some(step))
    }
}

/// What is asked for when so many tokens are there already.
fn request(plan: &Plan, prompt: &[TokenId], received: &[Emitted]) -> Request {
    let run_id = match plan.run {
        0 => String::new(),
        run => format!("run{run}"),
    };
    let ruled = || Ruled {
        rules: plan.rules,
        generated: Vec::new(),
    };
    let constraint = (plan.rules != Rules::None).then(|| Box::new(ruled()) as _);
    Request {
        draft: plan.draft,
        grammar: match plan.rules {
            Rules::None => String::new(),
            rules => format!("{rules:?}"),
        }
        .into(),
        constraint,
        run_id,
        priority: Priority::new(plan.priority).unwrap(),
        owner: format!("{}", plan.owner / 6),
        received: received.iter().map(|token| token.id).collect(),
        ..Request::new(prompt.to_vec(), params(plan.sampling, plan.max_tokens))
    }
}

fn device(world: &World) -> FakeExecutor {
    FakeExecutor::new(FakeOptions {
        limits: world.limits.clone(),
        right: world.right,
        repeats: world.repeats,
        kv: world.kv,
        ..FakeOptions::default()
    })
}

/// A saved anchor: what it is, the keys of its units, their bytes and its own.
struct SavedAnchor {
    image: AnchorImage,
    chain: Vec<PrefixKey>,
    units: Vec<Vec<u8>>,
    tail: Vec<u8>,
    window: Vec<u8>,
}
