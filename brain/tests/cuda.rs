//! The CUDA back end against the reference, against the processor, and against itself.
//!
//! These tests need a card, real or emulated: `tests/gpu/brain.sh` and `tests/gpu/emulate.sh` run
//! them.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]
#![allow(clippy::print_stdout, reason = "figures for the report")]

mod support;

#[path = "cuda/fp8.rs"]
mod fp8;
#[path = "cuda/runs.rs"]
mod runs;

use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use brain::{
    backend::{
        Executor, Lost,
        cpu::{CpuExecutor, CpuOptions},
        cuda::{CudaExecutor, CudaOptions, Fault},
    },
    demo,
    model::{self, LoadedModel, kv_dtype::KvChoice},
    quantize::{
        self,
        layout::{Format, Recipe},
        run::{Task, Watch},
    },
    sched::{
        mask::Mask,
        types::{BlockId, Emitted, Group, SamplingParams, Step, TokenId},
    },
};
use support::{
    Round, Sequence,
    bits::{COUNT, bits, company, foreign_drafts, lone, own_drafts, pieces, prompt, requests},
    golden::{Golden, VARIANTS, golden},
    grown::grown,
    options, params,
};

const WINDOW: usize = 6;

fn small() -> CudaOptions {
    CudaOptions {
        max_seqs: 8,
        max_rows: 128,
        kv_memory: Some(1 << 30),
        ..CudaOptions::default()
    }
}

fn loaded(folder: &Path) -> LoadedModel {
    let drafter = model::drafter_of(folder);
    model::load(folder, &model::LoadOptions { drafter }).unwrap()
}

fn card(folder: &Path, options: &CudaOptions) -> CudaExecutor {
    CudaExecutor::new(Arc::new(loaded(folder)), options).unwrap()
}

/// How many times as wide as the golden a checkpoint must be for the fast kernels.
fn factor(name: &str) -> usize {
    match name {
        "e2b" | "e4b" => 8,
        // Layers that store values only have heads of 512.
        _ => 32,
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

/// Largest difference to the reference's logits after tokens fed in the given pieces.
fn difference(golden: &Golden, executor: &mut CudaExecutor, pieces: &[usize]) -> f32 {
    let mut sequence = Sequence::new(executor, 0, params(0.0));
    let mut fed = 0;
    for (i, piece) in pieces.iter().enumerate() {
        let last = i + 1 == pieces.len();
        sequence.feed(executor, &golden.tokens[fed..fed + piece], last);
        fed += piece;
    }
    let logits = executor.last_logits().unwrap();
    largest_difference(logits.last().unwrap(), &golden.logits[fed - 1])
}

fn reference(name: &str) {
    let golden = golden(name);
    let mut executor = card(&golden.folder, &small());
    let whole = golden.tokens.len();
    let sevens = [vec![7; whole / 7], vec![whole % 7]].concat();
    let mut cuts = vec![vec![1; 4 * WINDOW], sevens, vec![9, 1, whole - 10]];
    let lengths = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 4 * WINDOW, 33, whole];
    cuts.extend(lengths.map(|length| vec![length]));
    let worst = cuts
        .iter()
        .map(|cut| difference(&golden, &mut executor, cut))
        .fold(0.0, f32::max);
    println!("{name}: logits within {worst:.1e} of the reference");
    assert!(worst < 1e-4, "{name}: {worst}");

    let (prompt, expected) = golden.tokens.split_at(golden.prompt);
    let mut sequence = Sequence::new(&executor, 0, params(0.0));
    let tokens = sequence.generate(&mut executor, prompt, expected.len(), 0);
    assert_eq!(tokens, expected, "{name}");

    let mut sequence = Sequence::new(&executor, 0, params(0.0));
    let width = golden.rounds[0].len() - 2;
    sequence.generate(&mut executor, prompt, 24, width);
    let rounds: Vec<Vec<usize>> = sequence
        .rounds
        .iter()
        .take(golden.rounds.len())
        .map(|r| {
            let drafts = r.drafts.iter().map(|d| *d as usize);
            [r.committed, r.accepted]
                .into_iter()
                .chain(drafts)
                .collect()
        })
        .collect();
    assert_eq!(rounds, golden.rounds, "{name}: drafts and accept counts");
}

/// Tokens of whole requests, filters and penalties and all, as the processor has them.
fn same_tokens_in_fp32(name: &str) {
    let folder = support::golden_folder(name);
    let mut here = CpuExecutor::new(loaded(&folder), &options()).unwrap();
    let mut there = card(&folder, &small());
    for request in requests() {
        let ids = |executor: &mut dyn Executor| -> Vec<TokenId> {
            lone(executor, &request).iter().map(|e| e.id).collect()
        };
        assert_eq!(ids(&mut there), ids(&mut here), "{name}");
    }
}

/// Logits of a bf16 checkpoint along one path, card against processor.
fn near_the_processor(name: &str, model: &dyn Fn() -> LoadedModel, tokens: &[TokenId], most: f32) {
    near_with(KvChoice::Auto, name, model, tokens, most);
}

/// The same with a cache of some form on both.
fn near_with(
    kv_dtype: KvChoice,
    name: &str,
    model: &dyn Fn() -> LoadedModel,
    tokens: &[TokenId],
    most: f32,
) {
    // The widest of them has pages of a megabyte.
    let here = CpuOptions {
        kv_memory: 512 << 20,
        kv_dtype,
        ..options()
    };
    let there = CudaOptions {
        kv_dtype,
        ..small()
    };
    let mut here = CpuExecutor::new(model(), &here).unwrap();
    let mut there = CudaExecutor::new(Arc::new(model()), &there).unwrap();
    let (mut worst, mut sum, mut count) = (0.0f32, 0.0f64, 0usize);
    let (mut same, mut near) = (0usize, 0usize);
    let mut a = Sequence::new(&here, 0, params(0.0));
    let mut b = Sequence::new(&there, 0, params(0.0));
    let cuts = tokens.chunks(5);
    let pieces = cuts.len();
    for piece in cuts {
        a.feed(&mut here, piece, true);
        b.feed(&mut there, piece, true);
        // The token that was emitted is dropped: the path is given.
        for s in [&mut a, &mut b] {
            s.tokens.truncate(s.cached);
        }
        let left = here.last_logits().last().unwrap().to_vec();
        let right = there.last_logits().unwrap().pop().unwrap();
        let off = largest_difference(&left, &right);
        worst = worst.max(off);
        near += usize::from(off < most);
        sum += left
            .iter()
            .zip(&right)
            .map(|(a, b)| f64::from((a - b).abs()))
            .sum::<f64>();
        count += left.len();
        let best = |l: &[f32]| {
            l.iter()
                .enumerate()
                .max_by(|a, b| a.1.total_cmp(b.1))
                .map(|(i, _)| i)
        };
        same += usize::from(best(&left) == best(&right));
    }
    println!(
        "{name}: logits within {worst:.3} of the processor's, {:.4} on average; within {most} at \
         {near}, the same best token at {same} of {pieces} positions",
        sum / count as f64
    );
    // A rounding that decides between two experts changes everything behind it; one that decides
    // between two codes of a cache moves a number by up to an eighth.
    let enough = match (model().plan.moe.is_some(), kv_dtype) {
        (true, _) => pieces * 7 / 10,
        (false, KvChoice::Fp8) => pieces * 9 / 10,
        (false, _) => pieces,
    };
    assert!(near >= enough, "{name}: {near} of {pieces}, worst {worst}");
    assert!(same * 10 >= pieces * 9, "{name}: {same} of {pieces}");
}

fn demo_model() -> LoadedModel {
    model::load_embedded(&demo::CHECKPOINT, true).unwrap()
}

fn every_invariance(name: &str, executor: &mut CudaExecutor, sizes: &[usize]) -> usize {
    own_drafts(name, executor)
        + foreign_drafts(name, executor)
        + pieces(name, executor, sizes)
        + company(name, executor, 8)
}

#[test]
#[ignore = "needs a card"]
fn goldens_agree_with_the_reference() {
    VARIANTS.into_iter().for_each(reference);
}

#[test]
#[ignore = "needs a card"]
fn fp32_models_choose_the_tokens_that_the_processor_chooses() {
    VARIANTS.into_iter().for_each(same_tokens_in_fp32);
}

#[test]
#[ignore = "needs a card"]
fn bf16_models_are_near_the_processor() {
    for name in VARIANTS {
        let folder = grown(name, factor(name));
        near_the_processor(name, &|| loaded(folder.path()), &prompt(4), 0.5);
    }
    let tokens: Vec<TokenId> = (0..90).map(|i| 5 + (i * i * 7 + i) % 900).collect();
    near_the_processor("demo", &demo_model, &tokens, 0.75);
}

struct Silent;

impl Watch for Silent {
    fn made(&self, _: &Path) {}
    fn look(&self, _: u64) {}
    fn begin(&self, _: u64, _: u64) {}
    fn advance(&self, _: u64) {}
    fn again(&self, _: &str) {}
    fn shard(&self, _: &str, _: usize, _: usize) {}
}

/// Dense blocks and experts in eight and four bits: near the processor, and the same bits in pieces
/// and with drafts from elsewhere.
#[test]
#[ignore = "needs a card"]
fn fewer_bits_are_near_the_processor() {
    let mut compared = 0;
    for name in ["26b", "e4b"] {
        let plain = grown(name, 32);
        for format in [Format::Fp8, Format::Nvfp4] {
            let folder = tempfile::tempdir().unwrap();
            let target = folder.path().join("quantised");
            let task = Task {
                source: plain.path().to_owned(),
                target: target.clone(),
                recipe: Recipe {
                    format,
                    attention: true,
                    shard_size: 1 << 30,
                },
                threads: 4,
            };
            quantize::run::run(&task, &Silent).unwrap();
            let label = format!("{name} in {format:?}");
            near_the_processor(&label, &|| loaded(&target), &prompt(4), 0.5);
            let mut executor = card(&target, &small());
            compared += foreign_drafts(&label, &mut executor);
            compared += pieces(&label, &mut executor, &[1, 7, 31]);
        }
    }
    println!("{compared} generations compared");
}

#[test]
#[ignore = "needs a card"]
fn drafts_pieces_and_company_change_no_bit() {
    let sizes: Vec<usize> = (1..=36).collect();
    let mut compared = 0;
    for name in VARIANTS {
        for graphs in [true, false] {
            let options = CudaOptions { graphs, ..small() };
            let mut plain = card(&support::golden_folder(name), &options);
            compared += every_invariance(name, &mut plain, &sizes);
            let folder = grown(name, factor(name));
            let mut fast = card(folder.path(), &options);
            compared += every_invariance(name, &mut fast, &sizes);
        }
    }
    println!("{compared} generations compared");
}

/// What two sequences draft in common rounds of few drafts and then of many.
fn drafts_of_two(executor: &mut dyn Executor) -> Vec<Round> {
    let mut sequences: Vec<Sequence> = (0..2)
        .map(|n| Sequence::new(executor, n, params(0.0)).with_prompt(&prompt(n)))
        .collect();
    for depths in [[2, 2], [2, 1], [8, 3], [8, 8], [8, 8], [4, 8]] {
        let rounds = sequences.iter_mut().zip(depths);
        let (seqs, drafts): (Vec<_>, Vec<_>) = rounds.map(|(s, d)| s.round(d, COUNT)).unzip();
        let inputs: Vec<usize> = seqs.iter().map(|s| s.tokens.len()).collect();
        let output = executor.run(&Step { seqs }).unwrap();
        for (n, output) in output.seqs.into_iter().enumerate() {
            sequences[n].commit(inputs[n], &drafts[n], output);
        }
    }
    sequences.into_iter().flat_map(|s| s.rounds).collect()
}

/// A recorded pass depends on nothing that another round of the same rows has otherwise.
#[test]
#[ignore = "needs a card"]
fn recorded_rounds_draft_what_single_launches_draft() {
    for name in VARIANTS {
        let wide = grown(name, factor(name));
        for folder in [&support::golden_folder(name), wide.path()] {
            let [recorded, single] = [true, false].map(|graphs| {
                let options = CudaOptions { graphs, ..small() };
                drafts_of_two(&mut card(folder, &options))
            });
            assert!(single.iter().any(|round| round.drafts.len() == 8), "{name}");
            assert_eq!(recorded, single, "{name}");
        }
    }
}

/// A second executor, without drafter and with other sizes, knows nothing of the first.
#[test]
#[ignore = "needs a card"]
fn restarts_and_sizes_change_no_bit() {
    let mut compared = 0;
    for name in VARIANTS {
        let folder = grown(name, factor(name));
        let mut first = card(folder.path(), &small());
        let without = model::LoadOptions::default();
        let other = CudaOptions {
            max_seqs: 3,
            max_rows: 57,
            max_model_len: 100,
            graphs: false,
            ..small()
        };
        let model = model::load(folder.path(), &without).unwrap();
        let mut second = CudaExecutor::new(Arc::new(model), &other).unwrap();
        assert_eq!(first.fingerprint(), second.fingerprint());
        for request in requests() {
            let expected = bits(&lone(&mut first, &request));
            assert_eq!(bits(&lone(&mut second, &request)), expected, "{name}");
            compared += 1;
        }
    }
    println!("{compared} generations compared");
}

/// More rows than the small products take: the large ones have the same bits.
#[test]
#[ignore = "needs a card"]
fn long_prompts_in_any_pieces_have_the_same_bits() {
    let mut compared = 0;
    let tokens: Vec<TokenId> = (0..600).map(|i| 5 + (i * i * 7 + i) % 900).collect();
    let options = CudaOptions {
        max_rows: 1024,
        ..small()
    };
    let mut executor = CudaExecutor::new(Arc::new(demo_model()), &options).unwrap();
    let request = SamplingParams {
        logprobs: 4,
        ..params(0.8)
    };
    let mut run = |piece: usize, depth: usize| {
        let mut s = Sequence::new(&executor, 0, request.clone());
        for part in tokens[..599].chunks(piece) {
            s.feed(&mut executor, part, false);
        }
        s.tokens = tokens.clone();
        s.go_on(&mut executor, tokens.len(), COUNT, depth);
        bits(&s.emitted)
    };
    let expected = run(600, 0);
    for (piece, depth) in [
        (1, 0),
        (7, 3),
        (33, 8),
        (64, 1),
        (65, 4),
        (128, 8),
        (300, 2),
    ] {
        assert_eq!(
            run(piece, depth),
            expected,
            "pieces of {piece}, {depth} drafts"
        );
        compared += 1;
    }
    println!("{compared} generations compared");
}

/// Tokens and log-probabilities of whole requests of which each may be one of every third token
/// only, a third that moves with the token's number. Drafts outside of it are cut, as a scheduler
/// does; how many were right comes with them.
fn within_masks(
    executor: &mut dyn Executor,
    request: &SamplingParams,
    depth: usize,
) -> (Vec<Emitted>, usize) {
    let vocab = executor.limits().vocab_size;
    let mask = |number: usize| {
        let mut mask = Mask::none(vocab);
        let allowed = (0..vocab as TokenId).filter(|id| (*id as usize + number).is_multiple_of(3));
        allowed.for_each(|id| mask.insert(id));
        Arc::new(mask)
    };
    let mut s = Sequence::new(executor, 0, request.clone()).with_prompt(&prompt(0));
    while s.emitted.len() < COUNT {
        let first = s.emitted.len();
        let fits = |(at, id): (usize, &TokenId)| mask(first + at).allows(*id);
        let fitting = s
            .pending
            .iter()
            .enumerate()
            .take_while(|&draft| fits(draft))
            .count();
        s.pending.truncate(fitting);
        let (mut step, drafts) = s.round(depth, COUNT - first);
        let inputs = step.tokens.len();
        let sample = step.sample.as_mut().unwrap();
        sample.masks = (first..=first + drafts.len()).map(mask).collect();
        let output = executor.run(&Step { seqs: vec![step] }).unwrap();
        let output = output.seqs.into_iter().next().unwrap();
        for (at, emitted) in output.tokens.iter().enumerate() {
            assert!(mask(first + at).allows(emitted.id), "token {}", first + at);
        }
        s.commit(inputs, &drafts, output);
    }
    let right = s.rounds.iter().map(|r| r.accepted).sum();
    (s.emitted, right)
}

#[test]
#[ignore = "needs a card"]
fn masks_confine_the_card_as_they_confine_the_processor() {
    for name in ["e2b", "31b"] {
        let folder = support::golden_folder(name);
        let mut here = CpuExecutor::new(loaded(&folder), &options()).unwrap();
        let mut there = card(&folder, &small());
        let mut right = 0;
        for request in requests() {
            let (processor, _) = within_masks(&mut here, &request, 0);
            let (alone, _) = within_masks(&mut there, &request, 0);
            let tokens = |of: &[Emitted]| of.iter().map(|e| e.id).collect::<Vec<_>>();
            assert_eq!(tokens(&alone), tokens(&processor), "{name}");
            for depth in [1, 4, 8] {
                let (drafted, accepted) = within_masks(&mut there, &request, depth);
                assert_eq!(bits(&drafted), bits(&alone), "{name}, {depth} drafts");
                right += accepted;
            }
        }
        println!("{name}: {right} drafts right within masks");
    }
}

/// A card that traps or hangs is given up at once and for good; what serves ends then, and its
/// successor goes on (`tests/tests/brain_killed.rs`). One fault a process: the driver gives no
/// second context after a trap.
fn gives_up(fault: Fault, words: &str) {
    let options = CudaOptions {
        step_limit: Duration::from_millis(300),
        ..small()
    };
    let folder = grown("e4b", 8);
    let mut executor = card(folder.path(), &options);
    let request = requests().swap_remove(1);
    assert_eq!(lone(&mut executor, &request).len(), COUNT);
    executor.break_card(fault).unwrap();
    let mut s = Sequence::new(&executor, 0, request).with_prompt(&prompt(0));
    for _ in 0..2 {
        let (step, _) = s.round(0, COUNT);
        let error = executor.run(&Step { seqs: vec![step] }).unwrap_err();
        println!("{fault:?}: {error}");
        assert_eq!(error.lost, Lost::Device, "{error}");
        assert!(error.reason.contains(words), "{error}");
    }
    let mut bytes = Vec::new();
    let saved = executor.save_blocks(Group::Full, &[BlockId(0)], &mut bytes);
    assert_eq!(saved.unwrap_err().lost, Lost::Device);
}

#[test]
#[ignore = "needs a card"]
fn a_card_that_traps_is_given_up() {
    gives_up(Fault::Trap, "");
}

#[test]
#[ignore = "needs a card"]
fn a_card_that_hangs_is_given_up() {
    gives_up(Fault::Spin(2_000_000_000), "a kernel hangs");
}

/// What blocks hold goes to the host, to the pools of another executor, and on with the same bits.
#[test]
#[ignore = "needs a card"]
fn saved_blocks_go_on_in_another_executor() {
    let mut compared = 0;
    for name in VARIANTS {
        let folder = grown(name, factor(name));
        compared += goes_on_elsewhere(name, folder.path(), &small());
    }
    println!("{compared} generations compared");
}

fn goes_on_elsewhere(name: &str, folder: &Path, options: &CudaOptions) -> usize {
    let options = CudaOptions {
        kv_memory: Some(96 << 20),
        ..options.clone()
    };
    let mut first = card(folder, &options);
    let mut second = card(folder, &options);
    let limits = first.limits().clone();
    let mut compared = 0;
    for request in requests() {
        let expected = bits(&lone(&mut first, &request));
        let mut s = Sequence::new(&first, 0, request);
        s.generate(&mut first, &prompt(0), COUNT / 2, 3);
        for (group, count, size) in [
            (Group::Full, limits.full_blocks, limits.full_block_bytes),
            (
                Group::Sliding,
                limits.sliding_blocks,
                limits.sliding_block_bytes,
            ),
        ] {
            let blocks: Vec<BlockId> = (0..count as u32).map(BlockId).collect();
            let mut bytes = Vec::new();
            first.save_blocks(group, &blocks, &mut bytes).unwrap();
            assert_eq!(bytes.len(), count * size, "{name}");
            second.load_blocks(group, &blocks, &bytes).unwrap();
            let short = second.load_blocks(group, &blocks, &bytes[4..]).unwrap_err();
            let beyond = [BlockId(count as u32)];
            let outside = second.save_blocks(group, &beyond, &mut bytes).unwrap_err();
            assert_eq!([short.lost, outside.lost], [Lost::Nothing; 2]);
        }
        s.go_on(&mut second, prompt(0).len(), COUNT, 3);
        assert_eq!(bits(&s.emitted), expected, "{name}");
        compared += 1;
    }
    compared
}

/// Steps of the released sizes with random weights: the time of a token, and of a round of
/// verification and drafts.
#[test]
#[ignore = "needs a card and measures"]
fn step_times_of_released_sizes() {
    for name in ["e4b", "26b", "31b"] {
        step_times(name, KvChoice::Auto, &[1024, 16_384, 50_000]);
    }
}

fn step_times(name: &str, kv_dtype: KvChoice, contexts: &[usize]) {
    let options = CudaOptions {
        max_seqs: 1,
        max_rows: 64,
        max_model_len: 65_536,
        random_weights: true,
        kv_dtype,
        ..CudaOptions::default()
    };
    let begin = Instant::now();
    let model = Arc::new(support::sparse::model(name, demo_model()));
    let mut executor = CudaExecutor::new(model, &options).unwrap();
    println!(
        "{name}, cache {kv_dtype:?}: {} in {:.1} s: {}",
        executor.name(),
        begin.elapsed().as_secs_f32(),
        executor.memory()
    );
    for &context in contexts {
        let mut times = Vec::new();
        for (rows, drafts) in [(1, 0), (5, 4), (9, 8)] {
            let mut s = Sequence::new(&executor, 0, params(0.0));
            s.cached = context;
            let mut steps = Vec::new();
            for _ in 0..12 {
                let sample = s.sample(rows - 1, drafts);
                let step = s.step(&vec![7; rows], Some(sample));
                let begin = Instant::now();
                executor.run(&Step { seqs: vec![step] }).unwrap();
                steps.push(begin.elapsed().as_secs_f64() * 1e3);
            }
            // The first ones record and warm up.
            let mut steady = steps.split_off(4);
            steady.sort_by(f64::total_cmp);
            times.push(format!(
                "{rows} rows + {drafts} drafts {:.3} ms (recorded in {:.0} ms)",
                steady[steady.len() / 2],
                steps[0]
            ));
        }
        println!(
            "{name}, cache {kv_dtype:?}, at {context} within one stream: {}",
            times.join("; ")
        );
    }
}

/// From weights in memory to the first token: how long the card takes to get them, with the rounds
/// recorded. The weights are zeros that no disk holds, so this is what is added to reading a file.
#[test]
#[ignore = "needs a card and measures"]
fn weights_reach_the_card() {
    for name in ["e4b", "26b"] {
        let model = Arc::new(support::sparse::model(name, demo_model()));
        let options = CudaOptions {
            max_seqs: 1,
            max_rows: 64,
            max_model_len: 32_768,
            ..CudaOptions::default()
        };
        let begin = Instant::now();
        let mut executor = CudaExecutor::new(model, &options).unwrap();
        let there = begin.elapsed().as_secs_f64();
        let mut s = Sequence::new(&executor, 0, params(0.0));
        s.generate(&mut executor, &[7; 40], 1, 0);
        let gib = executor.memory().model as f64 / f64::from(1 << 30);
        println!(
            "{name}: {gib:.1} GiB in {there:.2} s, first token after {:.2} s",
            begin.elapsed().as_secs_f64()
        );
    }
}

/// The parts that an emulated card gets through in minutes.
#[test]
#[ignore = "needs a card"]
fn small_parts_of_everything() {
    reference("e2b");
    same_tokens_in_fp32("all");
    let folder = grown("e4b", 8);
    near_the_processor("e4b", &|| loaded(folder.path()), &prompt(0)[..20], 0.5);
    let options = CudaOptions {
        graphs: false,
        ..small()
    };
    let mut fast = card(folder.path(), &options);
    let request = requests().swap_remove(1);
    let mut s = Sequence::new(&fast, 0, request.clone());
    s.generate(&mut fast, &prompt(0)[..12], 8, 0);
    let mut t = Sequence::new(&fast, 1, request);
    t.generate(&mut fast, &prompt(0)[..12], 8, 3);
    assert_eq!(s.emitted[..8], t.emitted[..8]);
    fp8::small_parts();
}
