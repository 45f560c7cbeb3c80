//! Random worlds and the requests that arrive in them, as proptest draws them.

use std::{collections::BTreeMap, time::Duration};

use brain::{
    backend::{Limits, fake::FakeOptions},
    model::kv_dtype::KvDtype,
    sched::{
        prefix::CacheConfig,
        scheduler::SchedConfig,
        types::{DraftDepth, SamplingParams, TokenId},
    },
};
use proptest::prelude::*;

use super::rules::{RULES, Rules};

#[derive(Clone, Debug)]
pub struct World {
    pub limits: Limits,
    pub config: SchedConfig,
    pub right: f64,
    pub repeats: f64,
    /// How the device stores slots.
    pub kv: KvDtype,
    /// Anchors that what lies below the device can hold; 0: nothing lies there.
    pub below: usize,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub prompt: Vec<TokenId>,
    pub begins: Beginning,
    pub owner: u8,
    pub max_tokens: u32,
    pub sampling: u64,
    pub rules: Rules,
    pub draft: DraftDepth,
    pub run: u8,
    /// Of its run.
    pub priority: i32,
    /// Share of the answer, in 16ths, that the client holds already.
    pub received: usize,
    /// Steps for which it is held before it may be admitted.
    pub held: usize,
    pub arrives: usize,
    pub cancelled_after: Option<usize>,
}

/// What a prompt begins with.
#[derive(Clone, Copy, Debug)]
pub enum Beginning {
    /// Nothing that another has.
    Own,
    /// The tokens that all such prompts begin with, as many as that.
    Common(usize),
    /// A sequence that has ended, counted from the last one back: the first 16ths of its tokens.
    Ended { back: usize, share: usize },
}

#[derive(Clone, Debug)]
pub struct Case {
    pub world: World,
    pub plans: Vec<Plan>,
    /// What happens in the middle of which steps.
    pub accidents: BTreeMap<usize, Accident>,
}

/// What may happen in the middle of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accident {
    /// Its result is lost.
    ResultLost,
    /// All that the device holds is lost too.
    DeviceLost,
    /// The engine dies. A new one finds what was saved until then and what clients received.
    Killed,
    /// The engine ends, and saves what it was at. A new one finds it.
    Ended,
}

pub fn world() -> impl Strategy<Value = World> {
    (
        1usize..7,
        1usize..7,
        1usize..14,
        0usize..9,
        (
            0.0..=1.0f64,
            prop::sample::select(vec![0.0, 0.0, 0.9, 1.0]),
            prop::sample::select(vec![KvDtype::Bf16, KvDtype::Fp8]),
        ),
        prop::sample::select(vec![0usize, 2, 30]),
    )
        .prop_flat_map(
            |(
                full_block_size,
                sliding_block_size,
                window,
                max_drafts,
                (right, repeats, kv),
                below,
            )| {
                let stride = full_block_size * sliding_block_size;
                let sliding_least = (window + stride).div_ceil(sliding_block_size) + 2;
                let sizes = (
                    1usize..40,
                    1usize..7,
                    4usize..40,
                    sliding_least..sliding_least + 30,
                );
                (sizes, 1usize..40, 0usize..6).prop_map(
                    move |((max_rows, max_seqs, full_blocks, sliding_blocks), chunk, anchors)| {
                        World {
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
                                full_block_bytes: 3,
                                sliding_block_bytes: 5,
                                window,
                                masked_rows: if window.is_multiple_of(3) {
                                    1
                                } else {
                                    usize::MAX
                                },
                            },
                            config: SchedConfig {
                                chunk,
                                cache: CacheConfig {
                                    anchors,
                                    bytes: if anchors == 5 { 100 } else { u64::MAX },
                                    pin_lease: Duration::from_millis(20),
                                    spill: below > 0,
                                    ..CacheConfig::default()
                                },
                                turn_ends: vec![7],
                                ..SchedConfig::default()
                            },
                            right,
                            repeats,
                            kv,
                            below,
                        }
                    },
                )
            },
        )
}

pub fn beginning() -> impl Strategy<Value = Beginning> {
    let ended = (0usize..3, prop_oneof![2 => Just(16usize), 1 => 1usize..16]);
    prop_oneof![
        2 => Just(Beginning::Own),
        2 => (1usize..40).prop_map(Beginning::Common),
        3 => ended.prop_map(|(back, share)| Beginning::Ended { back, share }),
    ]
}

pub fn plan() -> impl Strategy<Value = Plan> {
    let draft = prop_oneof![
        Just(DraftDepth::Auto),
        (0u32..10).prop_map(DraftDepth::Fixed)
    ];
    (
        prop::collection::vec(0u32..50, 1..40),
        beginning(),
        0u8..8,
        1u32..40,
        (0u64..6, prop::sample::select(RULES.to_vec())),
        draft,
        (0u8..3, -4i32..5),
        (
            prop_oneof![3 => Just(0usize), 1 => 0usize..17],
            prop_oneof![4 => Just(0usize), 1 => 0usize..9],
        ),
        0usize..60,
        prop::option::weighted(0.2, 0usize..40),
    )
        .prop_map(
            |(
                prompt,
                begins,
                owner,
                max_tokens,
                (sampling, rules),
                draft,
                (run, priority),
                (received, held),
                arrives,
                cancelled_after,
            )| {
                Plan {
                    prompt,
                    begins,
                    owner,
                    max_tokens,
                    sampling,
                    rules,
                    draft,
                    run,
                    priority,
                    received,
                    held,
                    arrives,
                    cancelled_after,
                }
            },
        )
}

pub fn case() -> impl Strategy<Value = Case> {
    let accidents = vec![
        Accident::ResultLost,
        Accident::DeviceLost,
        Accident::Killed,
        Accident::Ended,
    ];
    (
        world(),
        prop::collection::vec(plan(), 1..9),
        prop::collection::btree_map(0usize..150, prop::sample::select(accidents), 0..4),
    )
        .prop_map(|(world, plans, accidents)| Case {
            world,
            plans,
            accidents,
        })
}

/// Parameters of a few kinds, so that requests differ and sometimes agree.
pub fn params(kind: u64, max_tokens: u32) -> SamplingParams {
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

pub fn roomy() -> World {
    World {
        limits: FakeOptions::default().limits,
        config: SchedConfig::default(),
        right: 0.7,
        kv: KvDtype::Bf16,
        repeats: 0.0,
        below: 0,
    }
}

pub fn plain(prompt: Vec<TokenId>, max_tokens: u32, run: u8) -> Plan {
    Plan {
        prompt,
        begins: Beginning::Own,
        owner: 0,
        max_tokens,
        sampling: 1,
        rules: Rules::None,
        draft: DraftDepth::Auto,
        run,
        priority: 0,
        received: 0,
        held: 0,
        arrives: 0,
        cancelled_after: None,
    }
}
