//! One sequence's tokens and log-probabilities under everything that must not change them, on any
//! executor. Every function compares with a lone run and returns how many runs it compared.

use brain::{
    backend::Executor,
    sched::types::{Emitted, SamplingParams, Step, TokenId},
};

use super::{Sequence, params};

/// Tokens of an answer.
pub const COUNT: usize = 40;

/// A prompt of its own for every sequence; with an answer behind it, within the 128 positions that
/// the goldens know.
pub fn prompt(number: usize) -> Vec<TokenId> {
    let mut x = 12345 + number as u64;
    let mut next = || {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) as TokenId % 90 + 3
    };
    (0..37 + 11 * (number % 5)).map(|_| next()).collect()
}

/// Requests that use the whole pipeline.
pub fn requests() -> Vec<SamplingParams> {
    let sampled = SamplingParams {
        top_k: 20,
        top_p: 0.95,
        logprobs: 4,
        ..params(1.0)
    };
    vec![
        SamplingParams {
            logprobs: 2,
            ..params(0.0)
        },
        sampled.clone(),
        SamplingParams {
            seed: 9,
            min_p: 0.02,
            repetition_penalty: 1.2,
            presence_penalty: 0.3,
            frequency_penalty: 0.1,
            logit_bias: [(5, 2.0), (7, -1.0)].into(),
            suppressed: vec![11, 12],
            stop_tokens: vec![40],
            min_tokens: 1000,
            ..sampled
        },
    ]
}

/// A token, the bits of its log-probability, and those of the likeliest tokens.
pub type Bits = (TokenId, u32, Vec<(TokenId, u32)>);

/// Ids and the bits of every log-probability.
pub fn bits(emitted: &[Emitted]) -> Vec<Bits> {
    let one = |e: &Emitted| {
        let l = e.logprobs.as_ref().unwrap();
        let top = l.top.iter().map(|(id, p)| (*id, p.to_bits())).collect();
        (e.id, l.chosen.to_bits(), top)
    };
    emitted.iter().take(COUNT).map(one).collect()
}

/// Alone: prompt in one piece, no drafts.
pub fn lone(executor: &mut dyn Executor, params: &SamplingParams) -> Vec<Emitted> {
    drafted(executor, params, 0)
}

/// Alone, with the executor's own drafts.
pub fn drafted(executor: &mut dyn Executor, params: &SamplingParams, depth: usize) -> Vec<Emitted> {
    let mut s = Sequence::new(executor, 0, params.clone());
    s.generate(executor, &prompt(0), COUNT, depth);
    s.emitted
}

/// Drafts of the executor's own, one to eight.
pub fn own_drafts(name: &str, executor: &mut dyn Executor) -> usize {
    let mut compared = 0;
    for request in requests() {
        let expected = bits(&lone(executor, &request));
        for depth in 1..=8 {
            let got = bits(&drafted(executor, &request, depth));
            assert_eq!(got, expected, "{name}, {depth} drafts");
            compared += 1;
        }
    }
    compared
}

/// Drafts from elsewhere, all of them right, or right up to some place.
pub fn foreign_drafts(name: &str, executor: &mut dyn Executor) -> usize {
    let mut compared = 0;
    for request in requests() {
        let plain = lone(executor, &request);
        for wrong_every in [3, 5, usize::MAX] {
            let mut s = Sequence::new(executor, 0, request.clone());
            s.generate(executor, &prompt(0), 1, 0);
            while s.emitted.len() < COUNT {
                let known = s.emitted.len();
                let truth = plain.iter().skip(known).take(7.min(COUNT - 1 - known));
                s.pending = truth
                    .enumerate()
                    .map(|(i, e)| match (known + i) % wrong_every {
                        1 => 3,
                        _ => e.id,
                    })
                    .collect();
                let (step, drafts) = s.round(8, COUNT - known);
                let inputs = step.tokens.len();
                let output = executor.run(&Step { seqs: vec![step] }).unwrap();
                s.commit(inputs, &drafts, output.seqs.into_iter().next().unwrap());
            }
            assert_eq!(
                bits(&s.emitted),
                bits(&plain),
                "{name}, wrong every {wrong_every}"
            );
            let accepted: usize = s.rounds.iter().map(|r| r.accepted).sum();
            assert!(accepted > COUNT / 3, "{name}: right drafts were refused");
            compared += 1;
        }
    }
    compared
}

/// The prompt in pieces of these sizes.
pub fn pieces(name: &str, executor: &mut dyn Executor, sizes: &[usize]) -> usize {
    let mut compared = 0;
    for request in requests() {
        let expected = bits(&lone(executor, &request));
        for &chunk in sizes {
            let mut s = Sequence::new(executor, 0, request.clone());
            let tokens = prompt(0);
            for piece in tokens.chunks(chunk) {
                let step = s.step(piece, None);
                executor.run(&Step { seqs: vec![step] }).unwrap();
                s.cached += piece.len();
                if s.cached + chunk >= tokens.len() {
                    break;
                }
            }
            s.generate(executor, &tokens, COUNT, 3);
            assert_eq!(bits(&s.emitted), expected, "{name}, pieces of {chunk}");
            compared += 1;
        }
    }
    compared
}

/// Sequences of different lengths in common steps: chunks of prefill beside rounds.
pub fn company(name: &str, executor: &mut dyn Executor, size: usize) -> usize {
    let requests = requests();
    let request = |n: usize| requests[n % requests.len()].clone();
    let expected: Vec<_> = (0..size)
        .map(|n| {
            let mut s = Sequence::new(executor, n, request(n));
            s.generate(executor, &prompt(n), COUNT, 0);
            bits(&s.emitted)
        })
        .collect();
    let mut sequences: Vec<Sequence> = (0..size)
        .map(|n| Sequence::new(executor, n, request(n)).with_prompt(&prompt(n)))
        .collect();
    while sequences.iter().any(|s| s.emitted.len() < COUNT) {
        let mut seqs = Vec::new();
        let mut parts = Vec::new();
        for (n, s) in sequences.iter_mut().enumerate() {
            let missing = s.tokens.len() - s.cached;
            if s.emitted.len() >= COUNT {
                continue;
            }
            if missing > 9 + n {
                let piece = s.tokens[s.cached..s.cached + 9 + n].to_vec();
                seqs.push(s.step(&piece, None));
                parts.push((n, piece.len(), Vec::new()));
            } else {
                let (step, drafts) = s.round(n + 1, COUNT - s.emitted.len());
                parts.push((n, step.tokens.len(), drafts));
                seqs.push(step);
            }
        }
        let output = executor.run(&Step { seqs }).unwrap();
        for ((n, inputs, drafts), output) in parts.into_iter().zip(output.seqs) {
            sequences[n].commit(inputs, &drafts, output);
        }
    }
    for (n, s) in sequences.iter().enumerate() {
        assert_eq!(bits(&s.emitted), expected[n], "{name}, sequence {n}");
    }
    size
}
