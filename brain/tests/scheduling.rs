//! Properties of the scheduler over the fake executor, which turns every wrong block table,
//! stale slot and lost or doubled block into a wrong token or an error.
//!
//! Whatever the mix of requests, arrivals, limits, chunk sizes, draft depths, cancels, failed
//! steps, restarts with and without a goodbye, shared prefixes, grammars and block pressure: every
//! sequence gets the tokens that it gets alone and undrafted, the
//! books of blocks balance after every step, and everything ends. `PROPTEST_CASES` scales it.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

mod simulation;

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use brain::{
    model::kv_dtype::KvDtype,
    sched::{request::FinishReason, types::DraftDepth},
};
use proptest::{
    prelude::*,
    test_runner::{Config, FileFailurePersistence, TestRunner},
};
use simulation::{Case, Plan, Running, Simulation, World, case, params, plain, roomy};

#[derive(Default)]
struct Totals {
    cases: AtomicU64,
    fp8: AtomicU64,
    steps: AtomicU64,
    sequences: AtomicU64,
    tokens: AtomicU64,
    accepted: AtomicU64,
    preemptions: AtomicU64,
    cached: AtomicU64,
    hits: AtomicU64,
    looked_up: AtomicU64,
    restarts: AtomicU64,
    restored: AtomicU64,
    shared: AtomicU64,
    cancelled: AtomicU64,
    lifted: AtomicU64,
    partial: AtomicU64,
    missed: AtomicU64,
    penalised: AtomicU64,
    depths: AtomicU64,
    constrained: AtomicU64,
    forced: AtomicU64,
    cut: AtomicU64,
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
        let accident = case.accidents.get(&simulation.step).copied();
        simulation.run_step(accident)?;
        simulation.step += 1;
        if simulation.there.is_empty() && plans.peek().is_none() {
            break;
        }
        prop_assert!(simulation.step < bound, "no end after {} steps", bound);
    }
    let stats = simulation.scheduler.stats();
    prop_assert_eq!((stats.running, stats.waiting), (0, 0));
    prop_assert_eq!((stats.full_blocks_used, stats.sliding_blocks_used), (0, 0));
    prop_assert!(stats.anchors <= case.world.config.cache.anchors);
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
    let fp8 = case.world.kv == KvDtype::Fp8;
    totals.fp8.fetch_add(u64::from(fp8), Relaxed);
    totals
        .restarts
        .fetch_add(simulation.gone.len() as u64, Relaxed);
    totals.restored.fetch_add(simulation.restored, Relaxed);
    for stats in simulation.gone.iter().chain([&stats]) {
        for (total, more) in [
            (&totals.steps, stats.steps),
            (&totals.sequences, stats.finished),
            (&totals.tokens, stats.generated_tokens),
            (&totals.accepted, stats.accepted_tokens),
            (&totals.looked_up, stats.looked_up_accepted),
            (&totals.preemptions, stats.preemptions),
            (&totals.cached, stats.cached_tokens),
            (&totals.hits, stats.prefix_hits),
            (&totals.shared, stats.prefix_shared),
            (&totals.lifted, stats.lifted),
            (&totals.partial, stats.partial_hits),
            (&totals.missed, stats.anchor_misses),
            (&totals.depths, stats.depth_changes),
            (&totals.constrained, stats.constrained_tokens),
            (&totals.forced, stats.forced_tokens),
            (&totals.cut, stats.cut_drafts),
        ] {
            total.fetch_add(more, Relaxed);
        }
    }
    let penalised = |running: &&Running| params(running.plan.sampling, 1).reads_history();
    totals.penalised.fetch_add(
        simulation.done.iter().filter(penalised).count() as u64,
        Relaxed,
    );
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
        "{} cases ({} with slots in FP8), {} sequences ({} cancelled), {} steps, {} tokens, {} drafts accepted, {} of them \
         looked up, {} preemptions, {} prompt tokens from {} anchors, {} of them shared, {} of a part \
         of the prompt, {} where more was known but no anchor lay, {} from below, {} restarts with {} \
         anchors taken in, {} sequences with penalties, {} changes of depth; {} \
         tokens by a grammar, {} of them the only ones allowed, {} drafts cut",
        of(&totals.cases),
        of(&totals.fp8),
        of(&totals.sequences),
        of(&totals.cancelled),
        of(&totals.steps),
        of(&totals.tokens),
        of(&totals.accepted),
        of(&totals.looked_up),
        of(&totals.preemptions),
        of(&totals.cached),
        of(&totals.hits),
        of(&totals.shared),
        of(&totals.partial),
        of(&totals.missed),
        of(&totals.lifted),
        of(&totals.restarts),
        of(&totals.restored),
        of(&totals.penalised),
        of(&totals.depths),
        of(&totals.constrained),
        of(&totals.forced),
        of(&totals.cut),
    );
    if let Err(error) = outcome {
        panic!("{error}");
    }
    // The cases are worth nothing if they do not meet what they are about.
    for seen in [
        &totals.fp8,
        &totals.cancelled,
        &totals.accepted,
        &totals.preemptions,
        &totals.looked_up,
        &totals.restarts,
        &totals.restored,
        &totals.hits,
        &totals.shared,
        &totals.partial,
        &totals.missed,
        &totals.lifted,
        &totals.penalised,
        &totals.depths,
        &totals.forced,
        &totals.cut,
    ] {
        assert!(of(seen) >= (of(&totals.cases) / 20).min(200));
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
fn a_long_prefill_makes_no_token_wait_longer_than_three_steps() {
    // Rows that cost much and little, and more the more lies before them, beside one sequence and
    // several.
    for (per_row, per_token, decoding, prompt) in [
        (3, 0, 1, 50_000),
        (3, 1, 1, 16_000),
        (20, 0, 1, 3000),
        (20, 4, 3, 6000),
        (50, 0, 4, 3000),
        (200, 0, 2, 1500),
    ] {
        let mut world = roomy();
        world.limits.max_model_len = 60_000;
        world.limits.full_blocks = 4096;
        let mut simulation = Simulation::new(&world);
        (simulation.row_time, simulation.token_time) = (per_row, per_token);
        for run in 0..decoding {
            let plan = Plan {
                draft: DraftDepth::Fixed(0),
                ..plain(vec![5 + u32::from(run); 4], 4000, run)
            };
            simulation.submit(&plan).unwrap();
        }
        let mut usual = Duration::ZERO;
        for _ in 0..20 {
            simulation.run_step(None).unwrap();
            usual = simulation.elapsed;
        }
        simulation.submit(&plain(vec![6; prompt], 1, 9)).unwrap();
        let last = *simulation.there.keys().last().unwrap();
        let (mut steps, mut worst) = (0, Duration::ZERO);
        while simulation.there.contains_key(&last) {
            let step = simulation.run_step(None).unwrap().unwrap();
            let emitting = step.seqs.iter().filter(|rows| rows.sample.is_some());
            assert!(
                emitting.count() >= usize::from(decoding),
                "a step without their tokens"
            );
            worst = worst.max(simulation.elapsed);
            steps += 1;
            assert!(steps < 4000, "the prompt gets nowhere");
        }
        println!(
            "{decoding} decode beside a prompt of {prompt} tokens: {worst:?} at most between tokens, \
             {usual:?} usually, {steps} steps"
        );
        assert!(worst <= usual * 3, "{worst:?} where {usual:?} is usual");
    }
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
fn a_step_of_priority_doubles_a_runs_rows_of_prefill() {
    let mut world = roomy();
    world.limits.max_rows = 32;
    world.config.chunk = 16;
    let mut simulation = Simulation::new(&world);
    for run in [1, 2] {
        let plan = Plan {
            priority: i32::from(run == 2),
            ..plain(vec![5 + u32::from(run); 1600], 1, run)
        };
        // Two prompts each: neither run could use all rows alone.
        simulation.submit(&plan).unwrap();
        simulation.submit(&plan).unwrap();
    }
    let mut rows = [0; 2];
    for _ in 0..60 {
        let step = simulation.run_step(None).unwrap().unwrap();
        for seq in &step.seqs {
            rows[(seq.tokens[0] - 6) as usize] += seq.tokens.len();
        }
        simulation.step += 1;
    }
    let ratio = rows[1] as f64 / rows[0] as f64;
    assert!((1.8..2.2).contains(&ratio), "{rows:?}");
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
