//! The prefix cache: who finds what, what it costs, and what it may not do.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

mod simulation;

use std::time::Duration;

use brain::sched::types::{DraftDepth, TokenId};
use simulation::{Beginning, Plan, Simulation, World, plain, roomy};

const FOLLOWING: Beginning = Beginning::Ended { back: 0, share: 16 };
/// Ends a turn in the worlds of these tests.
const TURN_END: TokenId = 7;

fn run_dry(simulation: &mut Simulation) {
    while !simulation.there.is_empty() {
        simulation.run_step(None).unwrap();
        simulation.step += 1;
    }
}

/// Submits, runs to the end, returns the prompt's tokens and how many came from the cache.
fn served(simulation: &mut Simulation, plan: &Plan) -> (usize, usize) {
    simulation.submit(plan).unwrap();
    run_dry(simulation);
    let last = simulation.done.last().unwrap();
    (
        last.prompt.len(),
        last.outcome.as_ref().unwrap().usage.cached,
    )
}

fn tokens(from: u32, count: usize) -> Vec<TokenId> {
    (0..count as u32)
        .map(|at| 8 + (from + at * at) % 40)
        .collect()
}

fn with_turn_ends() -> World {
    let mut world = roomy();
    world.config.turn_ends = vec![TURN_END];
    world
}

#[test]
fn the_next_turn_of_a_run_computes_its_new_tokens_only() {
    let mut simulation = Simulation::new(&roomy());
    for length in [1, 15, 16, 17, 63, 64, 65, 700, 2000] {
        let mut plan = plain(tokens(length, length as usize), 30, 1);
        served(&mut simulation, &plan);
        plan.begins = FOLLOWING;
        plan.prompt = tokens(3, 40);
        for _ in 0..3 {
            let before = simulation.done.last().unwrap();
            let known = before.prompt.len() + before.tokens.len();
            let (_, cached) = served(&mut simulation, &plan);
            // The newest token of the one before is in no cache; all else is.
            assert_eq!(cached, known - 1, "after {length} tokens");
        }
    }
}

#[test]
fn everybody_who_goes_on_from_one_place_finds_it() {
    for length in [90, 96, 97, 600] {
        let mut simulation = Simulation::new(&roomy());
        served(&mut simulation, &plain(tokens(1, length), 30, 1));
        let known = length + 30 - 1;
        for other in 0..6 {
            let plan = Plan {
                prompt: tokens(100 + other, 40),
                begins: FOLLOWING,
                ..plain(Vec::new(), 40, 1 + other as u8)
            };
            simulation.submit(&plan).unwrap();
        }
        let cached_before = simulation.scheduler.stats().cached_tokens;
        run_dry(&mut simulation);
        let cached = simulation.scheduler.stats().cached_tokens - cached_before;
        // The first takes the last block over, the others compute that much again.
        let stride = 16;
        assert!(
            cached as usize >= known + 5 * ((known - 1) / stride * stride),
            "{cached} of six times {known}"
        );
    }
}

#[test]
fn a_second_run_with_the_same_first_turn_finds_it() {
    let mut simulation = Simulation::new(&with_turn_ends());
    let mut first_turn = tokens(5, 500);
    first_turn.push(TURN_END);
    let prompt = |task: u32| [first_turn.clone(), tokens(task, 70)].concat();
    assert_eq!(served(&mut simulation, &plain(prompt(1), 20, 1)).1, 0);
    for run in 2..6 {
        let (_, cached) = served(&mut simulation, &plain(prompt(u32::from(run) * 9), 20, run));
        assert_eq!(cached, 501 / 16 * 16, "run {run}");
    }
}

#[test]
fn where_two_prompts_part_the_third_one_finds_the_place() {
    let mut simulation = Simulation::new(&roomy());
    let prompt = |task: u32| [tokens(5, 500), vec![task; 70]].concat();
    assert_eq!(served(&mut simulation, &plain(prompt(1), 20, 1)).1, 0);
    assert_eq!(served(&mut simulation, &plain(prompt(2), 20, 2)).1, 0);
    for task in 3..6 {
        let (_, cached) = served(&mut simulation, &plain(prompt(task), 20, task as u8));
        assert_eq!(cached, 500 / 16 * 16, "task {task}");
    }
}

#[test]
fn a_client_that_writes_the_answer_anew_finds_the_end_of_its_prompt() {
    let mut simulation = Simulation::new(&roomy());
    let mut history = tokens(1, 400);
    served(&mut simulation, &plain(history.clone(), 50, 0));
    for turn in 0..5 {
        let before = history.len();
        // The answer without its thoughts, then a new question.
        history.extend(tokens(31 * turn + 2, 60));
        let (_, cached) = served(&mut simulation, &plain(history.clone(), 50, 0));
        assert!(cached >= (before - 1) / 16 * 16, "{cached} of {before}");
    }
}

#[test]
fn the_same_log_again_computes_one_token_and_the_same_prompt_less_than_a_block() {
    for length in [63, 64, 65, 81] {
        let mut simulation = Simulation::new(&roomy());
        let plan = plain(tokens(1, length), 30, 1);
        served(&mut simulation, &plan);
        // The last token of the log is not in the cache: what is asked for is all that is.
        let before = simulation.done.last().unwrap();
        let answer: Vec<_> = before.tokens[..29].iter().map(|token| token.id).collect();
        let log = [before.prompt.clone(), answer].concat();
        let (prompt, cached) = served(&mut simulation, &plain(log, 5, 2));
        assert_eq!(cached, prompt - 1);
        let (prompt, cached) = served(&mut simulation, &plan);
        assert!(cached + 16 >= prompt, "{cached} of {prompt}");
    }
}

#[test]
fn another_caller_finds_nothing() {
    let mut simulation = Simulation::new(&with_turn_ends());
    let mut plan = plain(
        [tokens(1, 300), vec![TURN_END], tokens(2, 50)].concat(),
        20,
        1,
    );
    served(&mut simulation, &plan);
    plan.owner = 6;
    assert_eq!(served(&mut simulation, &plan).1, 0);
    plan.owner = 0;
    assert!(served(&mut simulation, &plan).1 > 300);
}

#[test]
fn many_that_share_a_prefix_hold_it_once() {
    let mut world = with_turn_ends();
    world.limits.full_blocks = 100;
    world.limits.max_model_len = 1600;
    let mut simulation = Simulation::new(&world);
    let first_turn = [tokens(5, 799), vec![TURN_END]].concat();
    served(
        &mut simulation,
        &plain([first_turn.clone(), tokens(1, 9)].concat(), 9, 1),
    );
    for task in 2..10 {
        let prompt = [first_turn.clone(), tokens(task, 30)].concat();
        simulation.submit(&plain(prompt, 40, task as u8)).unwrap();
    }
    simulation.run_step(None).unwrap();
    // 50 blocks for the first turn, which eight times over would be 400 of 100.
    assert_eq!(simulation.scheduler.stats().running, 8);
    assert!(simulation.scheduler.stats().full_blocks_used <= 50 + 8 * 3);
    run_dry(&mut simulation);
    assert_eq!(simulation.scheduler.stats().preemptions, 0);
}

/// A run, then others until the cache overflows, then the run again: what it still found.
fn after_a_flood(world: &World, wait: usize) -> usize {
    let mut simulation = Simulation::new(world);
    served(&mut simulation, &plain(tokens(1, 200), 30, 1));
    simulation.step += wait;
    let ours = simulation.done.last().unwrap().prompt.clone();
    let answer = simulation.done.last().unwrap().tokens.iter();
    let answer: Vec<_> = answer.map(|token| token.id).collect();
    for other in 0..30 {
        served(
            &mut simulation,
            &plain(tokens(1000 + 77 * other, 200), 30, 0),
        );
    }
    let log = [ours, answer, vec![9; 20]].concat();
    served(&mut simulation, &plain(log, 5, 1)).1
}

#[test]
fn a_pinned_run_outlasts_a_flood_within_its_lease_and_quota() {
    let mut world = roomy();
    world.limits.full_blocks = 64;
    world.limits.max_model_len = 1024;
    world.config.cache.pin_lease = Duration::from_secs(100);
    assert_eq!(after_a_flood(&world, 0), 229);
    assert_eq!(after_a_flood(&world, 200_000), 0, "the lease was over");
    world.config.cache.pin_bytes_per_run = 1000;
    assert_eq!(after_a_flood(&world, 0), 0, "the run's quota is too small");
    world.config.cache.pin_bytes_per_run = u64::MAX;
    world.config.cache.pin_bytes = 1000;
    assert_eq!(after_a_flood(&world, 0), 0, "the quota of all is too small");
    world.config.cache.pin_bytes = u64::MAX;
    world.config.cache.pin_lease = Duration::ZERO;
    assert_eq!(after_a_flood(&world, 0), 0, "nothing was pinned");
}

#[test]
fn pins_give_way_to_what_could_not_run_otherwise() {
    let mut world = roomy();
    world.limits.full_blocks = 64;
    world.limits.max_model_len = 1024;
    let mut simulation = Simulation::new(&world);
    for run in 1..5 {
        served(
            &mut simulation,
            &plain(tokens(u32::from(run) * 50, 180), 20, run),
        );
    }
    // It needs every block there is.
    served(&mut simulation, &plain(tokens(7, 900), 123, 9));
    assert_eq!(simulation.done.last().unwrap().tokens.len(), 123);
}

#[test]
fn ten_thousand_requests_with_aborts_leave_nothing_behind() {
    let mut simulation = Simulation::new(&with_turn_ends());
    let mut chance = 1u64;
    let mut next = |below: u64| {
        chance = chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (chance >> 33) % below
    };
    let mut submitted = 0;
    while submitted < 10_000 || !simulation.there.is_empty() {
        while submitted < 10_000 && simulation.there.len() < 12 {
            let plan = Plan {
                begins: match next(3) {
                    0 => Beginning::Own,
                    1 => Beginning::Common(next(60) as usize + 1),
                    _ => Beginning::Ended {
                        back: next(3) as usize,
                        share: 4,
                    },
                },
                cancelled_after: (next(3) == 0).then(|| next(6) as usize),
                draft: DraftDepth::Fixed(next(5) as u32),
                ..plain(
                    tokens(next(1000) as u32, 1 + next(60) as usize),
                    1 + next(12) as u32,
                    0,
                )
            };
            simulation.submit(&plan).unwrap();
            submitted += 1;
        }
        simulation.cancel_due().unwrap();
        simulation.run_step(None).unwrap();
        simulation.step += 1;
        let excess = simulation.done.len().saturating_sub(8);
        simulation.done.drain(..excess);
    }
    let stats = simulation.scheduler.stats();
    assert_eq!((stats.full_blocks_used, stats.sliding_blocks_used), (0, 0));
    assert!(stats.anchors <= 256);
    assert_eq!(stats.finished, 10_000);
    simulation.scheduler.reset();
    let stats = simulation.scheduler.stats();
    assert_eq!((stats.full_blocks_kept, stats.sliding_blocks_kept), (0, 0));
}
