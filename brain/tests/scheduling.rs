//! Properties of the scheduler over the fake executor, which turns every wrong block table,
//! stale slot and lost or doubled block into a wrong token or an error.
//!
//! Whatever the mix of requests, arrivals, limits, chunk sizes, draft depths, cancels, failed
//! steps and block pressure: every sequence gets the tokens that it gets alone and undrafted, the
//! books of blocks balance after every step, and everything ends. `PROPTEST_CASES` scales it.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use brain::{
    backend::{
        Executor, Limits,
        fake::{FakeExecutor, FakeOptions},
    },
    sched::{
        request::{FinishReason, Request},
        scheduler::{Event, SchedConfig, Scheduler, Submitted},
        sequence::Outcome,
        types::{DraftDepth, Emitted, SamplingParams, SeqId, Step, TokenId},
    },
};
use proptest::{
    prelude::*,
    test_runner::{Config, FileFailurePersistence, TestRunner},
};

#[derive(Clone, Debug)]
struct World {
    limits: Limits,
    config: SchedConfig,
    right: f64,
}

#[derive(Clone, Debug)]
struct Plan {
    prompt: Vec<TokenId>,
    /// Goes on from the whole log of the sequence before it, if that has ended.
    follows: bool,
    max_tokens: u32,
    sampling: u64,
    draft: DraftDepth,
    run: u8,
    /// Share of the answer, in 16ths, that the client holds already.
    received: usize,
    arrives: usize,
    cancelled_after: Option<usize>,
}

#[derive(Clone, Debug)]
struct Case {
    world: World,
    plans: Vec<Plan>,
    /// Steps whose results are lost, and whether all the device holds is lost with them.
    losses: BTreeMap<usize, bool>,
}

fn world() -> impl Strategy<Value = World> {
    (1usize..7, 1usize..7, 1usize..14, 0usize..9, 0.0..=1.0f64).prop_flat_map(
        |(full_block_size, sliding_block_size, window, max_drafts, right)| {
            let sliding_least = window.div_ceil(sliding_block_size) + 2;
            let sizes = (
                1usize..40,
                1usize..7,
                4usize..40,
                sliding_least..sliding_least + 30,
            );
            (sizes, 1usize..40, 0usize..6).prop_map(
                move |((max_rows, max_seqs, full_blocks, sliding_blocks), chunk, anchors)| World {
                    limits: Limits {
                        vocab_size: 50,
                        max_model_len: 100,
                        max_rows,
                        max_seqs,
                        max_drafts,
                        full_block_size,
                        full_blocks,
                        sliding_block_size,
                        sliding_blocks,
                        window,
                    },
                    config: SchedConfig {
                        chunk,
                        anchors,
                        ..SchedConfig::default()
                    },
                    right,
                },
            )
        },
    )
}

fn plan() -> impl Strategy<Value = Plan> {
    let draft = prop_oneof![
        Just(DraftDepth::Auto),
        (0u32..10).prop_map(DraftDepth::Fixed)
    ];
    (
        prop::collection::vec(0u32..50, 1..40),
        prop::bool::weighted(0.4),
        1u32..40,
        0u64..6,
        draft,
        0u8..3,
        prop_oneof![3 => Just(0usize), 1 => 0usize..17],
        0usize..60,
        prop::option::weighted(0.2, 0usize..40),
    )
        .prop_map(
            |(
                prompt,
                follows,
                max_tokens,
                sampling,
                draft,
                run,
                received,
                arrives,
                cancelled_after,
            )| {
                Plan {
                    prompt,
                    follows,
                    max_tokens,
                    sampling,
                    draft,
                    run,
                    received,
                    arrives,
                    cancelled_after,
                }
            },
        )
}

fn case() -> impl Strategy<Value = Case> {
    (
        world(),
        prop::collection::vec(plan(), 1..9),
        prop::collection::btree_map(0usize..150, any::<bool>(), 0..4),
    )
        .prop_map(|(world, plans, losses)| Case {
            world,
            plans,
            losses,
        })
}

/// Parameters of a few kinds, so that requests differ and sometimes agree.
fn params(kind: u64, max_tokens: u32) -> SamplingParams {
    SamplingParams {
        temperature: if kind.is_multiple_of(2) { 0.0 } else { 1.0 },
        seed: kind,
        frequency_penalty: if kind == 3 { 0.5 } else { 0.0 },
        stop_tokens: if kind >= 2 { vec![1, 2] } else { Vec::new() },
        min_tokens: if kind == 4 { 3 } else { 0 },
        logprobs: (kind % 3) as u32,
        ..SamplingParams::greedy(max_tokens)
    }
}

#[derive(Debug)]
struct Running {
    prompt: Vec<TokenId>,
    expected: Vec<Emitted>,
    /// Received, then emitted.
    tokens: Vec<Emitted>,
    received: usize,
    since: usize,
    cancelled_after: Option<usize>,
    outcome: Option<Outcome>,
}

impl Running {
    fn check(&self) -> Result<(), TestCaseError> {
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

#[derive(Default)]
struct Totals {
    cases: AtomicU64,
    steps: AtomicU64,
    sequences: AtomicU64,
    tokens: AtomicU64,
    accepted: AtomicU64,
    preemptions: AtomicU64,
    cached: AtomicU64,
    cancelled: AtomicU64,
}

struct Simulation {
    scheduler: Scheduler,
    fake: FakeExecutor,
    there: BTreeMap<SeqId, Running>,
    done: Vec<Running>,
    step: usize,
}

impl Simulation {
    fn new(world: &World) -> Self {
        let options = FakeOptions {
            limits: world.limits.clone(),
            right: world.right,
            ..FakeOptions::default()
        };
        Self {
            scheduler: Scheduler::new(world.limits.clone(), world.config.clone()).unwrap(),
            fake: FakeExecutor::new(options),
            there: BTreeMap::new(),
            done: Vec::new(),
            step: 0,
        }
    }

    fn now(&self) -> Duration {
        Duration::from_millis(self.step as u64)
    }

    fn submit(&mut self, plan: &Plan) -> Result<(), TestCaseError> {
        let mut prompt = plan.prompt.clone();
        if let (true, Some(before)) = (plan.follows, self.done.last()) {
            prompt = before.prompt.clone();
            prompt.extend(before.tokens.iter().map(|token| token.id));
            prompt.extend(&plan.prompt[..plan.prompt.len() / 4]);
        }
        let max_len = self.scheduler.max_len();
        if prompt.len() >= max_len {
            let request = Request::new(prompt, params(0, 1));
            prop_assert!(request.validate(self.scheduler.limits(), max_len).is_err());
            return Ok(());
        }
        let room = plan.max_tokens.min((max_len - prompt.len()) as u32);
        let expected = self.fake.expected(&prompt, &params(plan.sampling, room));
        let received = plan.received * expected.len() / 16;
        let request = Request {
            draft: plan.draft,
            run_id: if plan.run == 0 {
                String::new()
            } else {
                format!("run{}", plan.run)
            },
            received: expected[..received].iter().map(|token| token.id).collect(),
            ..Request::new(prompt.clone(), params(plan.sampling, plan.max_tokens))
        };
        let valid = request.validate(self.scheduler.limits(), max_len).unwrap();
        let mut running = Running {
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
            }
            Submitted::Done(outcome) => {
                running.outcome = Some(outcome);
                running.check()?;
                self.done.push(running);
            }
        }
        Ok(())
    }

    fn finish(&mut self, seq: SeqId, outcome: Outcome) -> Result<(), TestCaseError> {
        let mut running = self.there.remove(&seq).unwrap();
        running.outcome = Some(outcome);
        running.check()?;
        self.done.push(running);
        Ok(())
    }

    fn cancel_due(&mut self) -> Result<(), TestCaseError> {
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

    /// Plans, runs and commits. `lost`: the result is lost, and if so the device's memory too.
    fn run_step(&mut self, lost: Option<bool>) -> Result<Option<Step>, TestCaseError> {
        let Some(step) = self.scheduler.plan(self.now()) else {
            prop_assert!(
                self.there.is_empty(),
                "sequences wait and nothing is planned"
            );
            return Ok(None);
        };
        self.scheduler.audit().map_err(TestCaseError::fail)?;
        let output = self
            .fake
            .run(&step)
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        match lost {
            Some(true) => self.scheduler.reset(),
            Some(false) => {}
            None => {
                // Time is a number like any other; this one makes depths vary.
                let elapsed = Duration::from_micros(100 + 7 * step.rows() as u64);
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

fn simulate(case: Case, totals: &Totals) -> Result<(), TestCaseError> {
    let mut simulation = Simulation::new(&case.world);
    let mut plans = case.plans.clone();
    plans.sort_by_key(|plan| plan.arrives);
    let mut plans = plans.into_iter().peekable();
    // Alone, a sequence needs a step per row; what is lost is computed again.
    let work: usize = case
        .plans
        .iter()
        .map(|plan| 240 + plan.prompt.len() + plan.max_tokens as usize)
        .sum();
    let bound = 100 + 8 * work;
    loop {
        while let Some(plan) = plans.next_if(|plan| plan.arrives <= simulation.step) {
            simulation.submit(&plan)?;
        }
        simulation.cancel_due()?;
        let lost = case.losses.get(&simulation.step).copied();
        simulation.run_step(lost)?;
        simulation.step += 1;
        if simulation.there.is_empty() && plans.peek().is_none() {
            break;
        }
        prop_assert!(simulation.step < bound, "no end after {} steps", bound);
    }
    let stats = simulation.scheduler.stats();
    prop_assert_eq!((stats.running, stats.waiting), (0, 0));
    prop_assert_eq!((stats.full_blocks_used, stats.sliding_blocks_used), (0, 0));
    prop_assert!(stats.anchors <= case.world.config.anchors);
    simulation.scheduler.reset();
    let stats = simulation.scheduler.stats();
    prop_assert_eq!((stats.full_blocks_kept, stats.sliding_blocks_kept), (0, 0));

    let cancelled = |running: &&Running| {
        running
            .outcome
            .as_ref()
            .is_some_and(|end| end.reason == FinishReason::Cancelled)
    };
    totals.cases.fetch_add(1, Relaxed);
    totals.steps.fetch_add(stats.steps, Relaxed);
    totals.sequences.fetch_add(stats.finished, Relaxed);
    totals.tokens.fetch_add(stats.generated_tokens, Relaxed);
    totals.accepted.fetch_add(stats.accepted_tokens, Relaxed);
    totals.preemptions.fetch_add(stats.preemptions, Relaxed);
    totals.cached.fetch_add(stats.cached_tokens, Relaxed);
    totals.cancelled.fetch_add(
        simulation.done.iter().filter(cancelled).count() as u64,
        Relaxed,
    );
    Ok(())
}

#[test]
fn tokens_are_those_of_a_lone_undrafted_run_whatever_happens() {
    let totals = Totals::default();
    let default = Config::default();
    let beside = FileFailurePersistence::Direct(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/scheduling.regressions"
    ));
    let config = Config {
        cases: default.cases * 40,
        source_file: Some(file!()),
        failure_persistence: Some(Box::new(beside)),
        ..default
    };
    let outcome = TestRunner::new(config).run(&case(), |case| simulate(case, &totals));
    let of = |counter: &AtomicU64| counter.load(Relaxed);
    println!(
        "{} cases, {} sequences ({} cancelled), {} steps, {} tokens, {} drafts accepted, \
         {} preemptions, {} prompt tokens from anchors",
        of(&totals.cases),
        of(&totals.sequences),
        of(&totals.cancelled),
        of(&totals.steps),
        of(&totals.tokens),
        of(&totals.accepted),
        of(&totals.preemptions),
        of(&totals.cached),
    );
    if let Err(error) = outcome {
        panic!("{error}");
    }
    // The cases are worth nothing if they do not meet what they are about.
    for seen in [
        &totals.cancelled,
        &totals.accepted,
        &totals.preemptions,
        &totals.cached,
    ] {
        assert!(of(seen) > of(&totals.cases) / 100);
    }
}

fn roomy() -> World {
    World {
        limits: FakeOptions::default().limits,
        config: SchedConfig::default(),
        right: 0.7,
    }
}

fn plain(prompt: Vec<TokenId>, max_tokens: u32, run: u8) -> Plan {
    Plan {
        prompt,
        follows: false,
        max_tokens,
        sampling: 1,
        draft: DraftDepth::Auto,
        run,
        received: 0,
        arrives: 0,
        cancelled_after: None,
    }
}

/// Steps until the sequence that was there first has ended, while `newcomer` sends a request
/// whenever it pleases.
fn steps_of_the_first(
    simulation: &mut Simulation,
    mut newcomer: impl FnMut(usize) -> Option<Plan>,
) -> usize {
    let first = *simulation.there.keys().next().unwrap();
    while simulation.there.contains_key(&first) {
        if let Some(plan) = newcomer(simulation.step) {
            simulation.submit(&plan).unwrap();
        }
        simulation.run_step(None).unwrap();
        simulation.step += 1;
        assert!(simulation.step < 50_000, "the first sequence starves");
    }
    simulation.step
}

#[test]
fn an_endless_stream_of_newcomers_starves_nobody() {
    // Room for two: the stream alone is more than can be served.
    let mut world = roomy();
    world.limits.max_seqs = 2;
    world.limits.max_rows = 16;
    let mut simulation = Simulation::new(&world);
    for n in 0..3 {
        simulation.submit(&plain(vec![9; 8], 30, n)).unwrap();
    }
    let big = plain(vec![3; 600], 60, 0);
    simulation.submit(&big).unwrap();
    let target = *simulation.there.keys().last().unwrap();
    while simulation.there.contains_key(&target) {
        simulation
            .submit(&plain(vec![simulation.step as u32 % 50; 8], 8, 0))
            .unwrap();
        simulation.run_step(None).unwrap();
        simulation.step += 1;
        assert!(simulation.step < 2_000, "the big request starves");
    }
}

#[test]
fn a_request_that_needs_every_block_gets_them() {
    let mut world = roomy();
    world.limits.full_blocks = 40;
    world.limits.max_model_len = 640;
    let mut simulation = Simulation::new(&world);
    simulation.submit(&plain(vec![7; 500], 140, 1)).unwrap();
    let steps = steps_of_the_first(&mut simulation, |step| {
        (step % 2 == 0).then(|| plain(vec![step as u32 % 50; 40], 40, 2))
    });
    assert!(steps < 2_000, "{steps}");
    assert!(
        simulation.scheduler.stats().preemptions > 0,
        "it was never short of blocks"
    );
}

#[test]
fn a_long_prefill_does_not_stop_the_decoding() {
    let mut world = roomy();
    world.limits.max_rows = 32;
    let mut simulation = Simulation::new(&world);
    simulation.submit(&plain(vec![5; 4], 200, 1)).unwrap();
    simulation.run_step(None).unwrap();
    let decoding = *simulation.there.keys().next().unwrap();
    simulation.submit(&plain(vec![6; 1500], 10, 2)).unwrap();
    let mut steps_with_prefill = 0;
    while simulation.there.contains_key(&decoding) && simulation.there.len() == 2 {
        let step = simulation.run_step(None).unwrap().unwrap();
        let mine = step.seqs.iter().find(|rows| rows.seq == decoding);
        assert!(
            mine.is_some_and(|rows| rows.sample.is_some()),
            "a step without its token"
        );
        let prefill = step.seqs.iter().any(|rows| rows.sample.is_none());
        assert!(!prefill || step.rows() == 32, "rows are left unused");
        steps_with_prefill += usize::from(prefill);
    }
    assert!(steps_with_prefill > 20);
}

#[test]
fn runs_share_the_rows_of_prefill_evenly() {
    let mut world = roomy();
    world.limits.max_rows = 32;
    world.config.chunk = 16;
    let mut simulation = Simulation::new(&world);
    // Five prompts of one run were there first, one of another comes last.
    for _ in 0..5 {
        simulation.submit(&plain(vec![5; 640], 1, 1)).unwrap();
    }
    simulation.submit(&plain(vec![6; 640], 1, 2)).unwrap();
    let last = *simulation.there.keys().last().unwrap();
    while simulation.there.contains_key(&last) {
        simulation.run_step(None).unwrap();
        simulation.step += 1;
    }
    // 640 rows at half of 32 rows a step.
    assert!(simulation.step <= 42, "{} steps", simulation.step);
    assert!(
        simulation.there.len() >= 4,
        "the others did not wait for it"
    );
}

#[test]
fn the_next_prompt_of_a_run_takes_its_anchor_over() {
    let mut simulation = Simulation::new(&roomy());
    let mut plan = plain(vec![4; 50], 30, 1);
    simulation.submit(&plan).unwrap();
    while !simulation.there.is_empty() {
        simulation.run_step(None).unwrap();
    }
    plan.follows = true;
    for _ in 0..5 {
        simulation.submit(&plan).unwrap();
        while !simulation.there.is_empty() {
            simulation.run_step(None).unwrap();
        }
        let [.., before, last] = &simulation.done[..] else {
            panic!("two are done")
        };
        let known = before.prompt.len() + before.tokens.len();
        let cached = last.outcome.as_ref().unwrap().usage.cached;
        // The newest token of the one before is in no cache; all else is.
        assert_eq!(cached, known - 1);
        assert_eq!(
            simulation.scheduler.stats().anchors,
            1,
            "the newest of the run"
        );
    }
}

#[test]
fn drafts_make_fewer_steps_and_automatic_depth_finds_that_out() {
    let steps = |right: f64, draft: DraftDepth| {
        let mut simulation = Simulation::new(&World { right, ..roomy() });
        simulation
            .submit(&Plan {
                draft,
                ..plain(vec![4; 20], 600, 1)
            })
            .unwrap();
        steps_of_the_first(&mut simulation, |_| None)
    };
    assert_eq!(steps(1.0, DraftDepth::Fixed(0)), 600);
    assert!(steps(1.0, DraftDepth::Fixed(4)) <= 121);
    assert!(steps(0.9, DraftDepth::Auto) <= 250);
}
