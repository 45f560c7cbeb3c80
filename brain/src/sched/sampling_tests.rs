use proptest::prelude::*;

use super::*;

fn params() -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        seed: 1,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Default::default(),
        suppressed: Vec::new(),
        stop_tokens: Vec::new(),
        min_tokens: 0,
        max_tokens: 100,
        logprobs: 0,
    }
}

fn at(params: &SamplingParams, position: u64) -> Context<'_> {
    Context {
        params,
        position,
        generated: 0,
        history: &[],
        prompt_len: 0,
        mask: None,
    }
}

/// Every token that comes out over many positions.
fn support(logits: &[f32], params: &SamplingParams) -> Vec<TokenId> {
    let mut scratch = Scratch::default();
    let mut seen: Vec<TokenId> = (0..4000)
        .map(|t| choose(logits, &at(params, t), &mut scratch))
        .collect();
    seen.sort_unstable();
    seen.dedup();
    seen
}

/// Logits whose probabilities are these.
fn logits_of(probabilities: &[f64]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln() as f32).collect()
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    let p = SamplingParams {
        temperature: 0.0,
        ..params()
    };
    let mut scratch = Scratch::default();
    assert_eq!(choose(&[1.0, 3.0, 3.0, 2.0], &at(&p, 0), &mut scratch), 1);
    assert_eq!(choose(&[-0.0, 0.0], &at(&p, 0), &mut scratch), 0);
    assert_eq!(
        choose(&[f32::NAN, -5.0, f32::NAN], &at(&p, 0), &mut scratch),
        1
    );
    assert_eq!(choose(&[f32::NEG_INFINITY; 3], &at(&p, 0), &mut scratch), 0);
}

#[test]
fn samples_have_the_softmax_distribution() {
    let probabilities = [0.4, 0.25, 0.15, 0.1, 0.06, 0.03, 0.01];
    let logits = logits_of(&probabilities);
    for p in [
        params(),
        SamplingParams {
            top_k: 7,
            seed: 3,
            ..params()
        },
    ] {
        let mut counts = [0u32; 7];
        let mut scratch = Scratch::default();
        let n = 50_000;
        for t in 0..n {
            counts[choose(&logits, &at(&p, t), &mut scratch) as usize] += 1;
        }
        let chi: f64 = probabilities
            .iter()
            .zip(counts)
            .map(|(p, c)| (f64::from(c) - p * n as f64).powi(2) / (p * n as f64))
            .sum();
        // 6 degrees of freedom: 22.5 is passed once in a thousand.
        assert!(chi < 22.5, "{chi} {counts:?}");
    }
}

#[test]
fn temperature_reshapes_the_distribution() {
    let logits = logits_of(&[0.8, 0.2]);
    let p = SamplingParams {
        temperature: 0.5,
        ..params()
    };
    let mut scratch = Scratch::default();
    let ones = (0..40_000)
        .filter(|t| choose(&logits, &at(&p, *t), &mut scratch) == 1)
        .count();
    // (0.2 / 0.8)^2 : 1 = 1 / 17
    assert!(
        (ones as f64 / 40_000.0 - 1.0 / 17.0).abs() < 0.005,
        "{ones}"
    );
}

#[test]
fn top_p_keeps_the_token_that_crosses() {
    let logits = logits_of(&[0.5, 0.3, 0.15, 0.05]);
    for (top_p, kept) in [
        (0.0, 1),
        (0.49, 1),
        (0.51, 2),
        (0.79, 2),
        (0.81, 3),
        (0.96, 4),
        (1.0, 4),
    ] {
        let p = SamplingParams { top_p, ..params() };
        assert_eq!(support(&logits, &p).len(), kept, "top_p {top_p}");
    }
}

#[test]
fn top_k_breaks_ties_by_id_and_min_p_is_relative() {
    let logits = [1.0, 2.0, 2.0, 2.0, 0.0];
    assert_eq!(
        support(
            &logits,
            &SamplingParams {
                top_k: 2,
                ..params()
            }
        ),
        [1, 2]
    );
    let logits = logits_of(&[0.5, 0.26, 0.24, 1e-9]);
    assert_eq!(
        support(
            &logits,
            &SamplingParams {
                min_p: 0.5,
                ..params()
            }
        ),
        [0, 1]
    );
    // top-p is taken of what top-k left.
    let p = SamplingParams {
        top_k: 2,
        top_p: 0.6,
        ..params()
    };
    assert_eq!(support(&logits_of(&[0.4, 0.3, 0.3]), &p), [0, 1]);
}

#[test]
fn penalties_count_prompt_and_answer_apart() {
    let p = SamplingParams {
        temperature: 0.0,
        presence_penalty: 1.0,
        frequency_penalty: 0.5,
        ..params()
    };
    let mut scratch = Scratch::default();
    let mut pick = |p: &SamplingParams, history: &[TokenId], prompt_len: usize| {
        let context = Context {
            history,
            prompt_len,
            ..at(p, 9)
        };
        choose(&[4.0, 3.4, 0.1, -1.0], &context, &mut scratch)
    };
    assert_eq!(pick(&p, &[0, 0, 0], 3), 0, "prompt tokens are free");
    assert_eq!(pick(&p, &[1, 0], 1), 1, "once: 4 - 1 - 0.5");
    assert_eq!(
        pick(&p, &[0, 0, 1, 1, 1, 1, 1], 0),
        0,
        "4 - 2 against 3.4 - 3.5"
    );
    let repeat = SamplingParams {
        temperature: 0.0,
        repetition_penalty: 2.0,
        ..params()
    };
    assert_eq!(pick(&repeat, &[0], 1), 1, "prompt tokens too");
    assert_eq!(pick(&repeat, &[0, 1, 2], 3), 0, "2, 1.7, 0.05, -1");
    let only_negative = SamplingParams {
        repetition_penalty: 2.0,
        ..repeat
    };
    let context = Context {
        history: &[1],
        ..at(&only_negative, 0)
    };
    let mut scratch = Scratch::default();
    assert_eq!(
        choose(&[-1.5, -1.0], &context, &mut scratch),
        0,
        "negative logits are multiplied"
    );
}

#[test]
fn suppressed_biased_and_early_stop_tokens() {
    let base = SamplingParams {
        temperature: 0.0,
        ..params()
    };
    let mut scratch = Scratch::default();
    let logits = [5.0, 4.0, 3.0];
    let p = SamplingParams {
        suppressed: vec![0, 99],
        ..base.clone()
    };
    assert_eq!(choose(&logits, &at(&p, 0), &mut scratch), 1);
    let p = SamplingParams {
        logit_bias: [(2, 3.0), (1 << 30, 1.0)].into(),
        ..base.clone()
    };
    assert_eq!(choose(&logits, &at(&p, 0), &mut scratch), 2);
    let p = SamplingParams {
        stop_tokens: vec![0],
        min_tokens: 2,
        ..base
    };
    let generated = |n| Context {
        generated: n,
        ..at(&p, 0)
    };
    assert_eq!(choose(&logits, &generated(1), &mut scratch), 1);
    assert_eq!(choose(&logits, &generated(2), &mut scratch), 0);
}

#[test]
fn a_mask_confines_the_choice_and_replaces_what_is_forbidden() {
    let base = SamplingParams {
        temperature: 0.0,
        suppressed: vec![2],
        stop_tokens: vec![0],
        min_tokens: 9,
        ..params()
    };
    let of = |ids: &[TokenId]| {
        let mut mask = Mask::none(4);
        ids.iter().for_each(|&id| mask.insert(id));
        mask
    };
    let mut scratch = Scratch::default();
    let mut pick = |logits: &[f32], p: &SamplingParams, mask: &Mask| {
        let context = Context {
            mask: Some(mask),
            ..at(p, 5)
        };
        choose(logits, &context, &mut scratch)
    };
    let logits = [5.0, 4.0, 3.0, 2.0];
    assert_eq!(pick(&logits, &base, &of(&[1, 3])), 1);
    assert_eq!(pick(&logits, &base, &of(&[0, 3])), 0, "it says so itself");
    for temperature in [0.0, 1e-5, 0.7, 2.0] {
        let p = SamplingParams {
            temperature,
            logit_bias: [(3, -100.0)].into(),
            ..base.clone()
        };
        for hopeless in [f32::NEG_INFINITY, f32::NAN, f32::MIN] {
            let logits = [5.0, hopeless, 3.0, hopeless];
            let token = pick(&logits, &p, &of(&[1, 3]));
            assert!([1, 3].contains(&token), "{temperature} {hopeless}: {token}");
        }
    }
    assert_eq!(
        pick(&[1.0; 6], &base, &of(&[3])),
        3,
        "more logits than bits"
    );
}

#[test]
fn logprobs_are_of_the_raw_distribution() {
    let probabilities = [0.1, 0.6, 0.05, 0.25];
    let logits: Vec<f32> = logits_of(&probabilities).iter().map(|l| l + 3.0).collect();
    let l = logprobs(&logits, 3, 3, &mut Scratch::default());
    assert!((f64::from(l.chosen) - 0.25f64.ln()).abs() < 1e-6);
    assert_eq!(l.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3]);
    assert!((f64::from(l.top[0].1) - 0.6f64.ln()).abs() < 1e-6);
    assert!(
        logprobs(&logits, 3, 1, &mut Scratch::default())
            .top
            .is_empty()
    );
    assert_eq!(
        logprobs(&logits, 0, 100, &mut Scratch::default()).top.len(),
        4
    );
}

/// The definition written down plainly: sort everything, sum everything, try everything.
fn plain(logits: &[f32], p: &SamplingParams, position: u64) -> TokenId {
    let scaled: Vec<f32> = logits.iter().map(|l| l / p.temperature).collect();
    let mut order: Vec<usize> = (0..scaled.len()).collect();
    order.sort_by(|a, b| scaled[*b].partial_cmp(&scaled[*a]).unwrap().then(a.cmp(b)));
    if p.top_k > 0 {
        order.truncate(p.top_k as usize);
    }
    let best = scaled[order[0]];
    if p.top_p < 1.0 {
        let weights: Vec<f64> = order
            .iter()
            .map(|i| f64::from(exp(scaled[*i] - best)))
            .collect();
        let goal = f64::from(p.top_p) * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let cut = weights.iter().position(|w| {
            sum += w;
            sum >= goal
        });
        order.truncate(cut.unwrap_or(order.len() - 1) + 1);
    }
    order.retain(|i| exp(scaled[*i] - best) >= p.min_p);
    let noise = Noise::new(p.seed, position);
    let value = |i: &usize| scaled[*i] + noise.gumbel(*i as u32);
    let most = order.iter().map(value).fold(f32::NEG_INFINITY, f32::max);
    *order.iter().filter(|i| value(i) == most).min().unwrap() as TokenId
}

proptest! {
    #[test]
    fn fast_and_plain_agree(
        logits in proptest::collection::vec(-30.0f32..30.0, 1..300),
        temperature in 0.05f32..3.0,
        top_k in 0u32..80,
        top_p in prop_oneof![Just(1.0f32), 0.0f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.5],
        seed: u64,
        position in 0u64..1_000_000,
    ) {
        let p = SamplingParams { temperature, top_k, top_p, min_p, seed, ..params() };
        let mut scratch = Scratch::default();
        let fast = choose(&logits, &at(&p, position), &mut scratch);
        prop_assert_eq!(fast, plain(&logits, &p, position));
        // The same tokens in another order, as a drafter's head lists them.
        let ids: Vec<TokenId> = (0..logits.len() as TokenId).rev().collect();
        let turned: Vec<f32> = logits.iter().rev().copied().collect();
        let among = choose_among(&turned, &ids, &at(&p, position), &mut scratch);
        prop_assert_eq!(among, fast);
    }

    #[test]
    fn nothing_panics(
        bits in proptest::collection::vec(any::<u32>(), 0..40),
        temperature: f32,
        top_k: u32,
        top_p: f32,
        min_p: f32,
        penalty: f32,
        history in proptest::collection::vec(any::<u32>(), 0..10),
        prompt_len in 0usize..20,
    ) {
        let logits: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
        let p = SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty: penalty,
            presence_penalty: penalty,
            logit_bias: history.iter().map(|h| (*h % 50, penalty)).collect(),
            suppressed: history.clone(),
            ..params()
        };
        let context = Context { params: &p, position: 3, generated: 0, history: &history, prompt_len, mask: None };
        let mut scratch = Scratch::default();
        let token = choose(&logits, &context, &mut scratch);
        prop_assert!((token as usize) < logits.len().max(1));
        logprobs(&logits, token, 5, &mut scratch);
    }
}

#[test]
fn a_temperature_too_small_to_divide_by_is_greedy() {
    let logits = [1.0f32, 3.0, 29.5, 29.25, -4.0];
    let mut scratch = Scratch::default();
    for temperature in [f32::from_bits(1), 1e-38, 1e-12, 1e-6, 1e-4] {
        let p = SamplingParams {
            temperature,
            ..params()
        };
        for position in 0..200 {
            let token = choose(&logits, &at(&p, position), &mut scratch);
            assert_eq!(token, 2, "{temperature} {position}");
        }
    }
}
