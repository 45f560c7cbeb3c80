//! What a request may ask for, and what it is refused for.

use super::*;
use crate::backend::fake::FakeOptions;

type Change = Box<dyn Fn(&mut SamplingParams)>;

fn small_limits() -> Limits {
    FakeOptions::default().limits
}

fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams::greedy(max_tokens)
}

fn request() -> Request {
    Request::new(vec![1, 2, 3], greedy(10))
}

#[test]
fn a_prompt_that_never_fits_is_refused_with_the_numbers() {
    let limits = small_limits();
    let long = Request::new(vec![1; 64], greedy(10));
    let reject = long.validate(&limits, 64).unwrap_err();
    assert_eq!(
        reject,
        Reject::TooLong {
            prompt: 64,
            max_len: 64
        }
    );
    assert!(
        reject
            .to_string()
            .contains("shorten the prompt to 63 tokens")
    );
    assert!(
        Request::new(vec![1; 63], greedy(10))
            .validate(&limits, 64)
            .is_ok()
    );
}

#[test]
fn every_field_that_tokens_depend_on_is_part_of_the_identity() {
    let base = request().hash();
    assert_eq!(base, request().hash());
    let changes: Vec<Change> = vec![
        Box::new(|p| p.temperature = 0.5),
        Box::new(|p| p.top_k = 3),
        Box::new(|p| p.top_p = 0.5),
        Box::new(|p| p.min_p = 0.5),
        Box::new(|p| p.seed = 9),
        Box::new(|p| p.repetition_penalty = 1.5),
        Box::new(|p| p.presence_penalty = 0.5),
        Box::new(|p| p.frequency_penalty = 0.5),
        Box::new(|p| p.logit_bias.extend([(3, 1.0)])),
        Box::new(|p| p.suppressed.push(3)),
        Box::new(|p| p.stop_tokens.push(3)),
        Box::new(|p| p.min_tokens = 2),
        Box::new(|p| p.max_tokens = 11),
        Box::new(|p| p.logprobs = 1),
    ];
    let mut seen = vec![base];
    for change in changes {
        let mut params = greedy(10);
        change(&mut params);
        seen.push(Request::new(vec![1, 2, 3], params).hash());
    }
    seen.push(Request::new(vec![1, 2], greedy(10)).hash());
    for strings in [vec!["ab"], vec!["a", "b"]] {
        let stop_strings = strings.into_iter().map(String::from).collect();
        seen.push(
            Request {
                stop_strings,
                ..request()
            }
            .hash(),
        );
    }
    let grammar = "a grammar".into();
    seen.push(
        Request {
            grammar,
            ..request()
        }
        .hash(),
    );
    let count = seen.len();
    seen.sort_by_key(|hash| hash.0);
    seen.dedup();
    assert_eq!(seen.len(), count);
}

#[test]
fn drafting_and_received_tokens_are_not() {
    let mut other = request();
    other.draft = DraftDepth::Fixed(3);
    other.received = vec![4];
    other.run_id = "run".into();
    other.priority = Priority::new(2).unwrap();
    other.owner = "key".into();
    other.cache_salt = "salt".into();
    assert_eq!(other.hash(), request().hash());
}

#[test]
fn bad_numbers_are_refused_by_name() {
    let cases: Vec<(&str, Change)> = vec![
        ("temperature", Box::new(|p| p.temperature = f32::NAN)),
        ("temperature", Box::new(|p| p.temperature = -1.0)),
        ("top_p", Box::new(|p| p.top_p = 0.0)),
        ("top_p", Box::new(|p| p.top_p = f32::NAN)),
        ("min_p", Box::new(|p| p.min_p = 1.0)),
        (
            "repetition_penalty",
            Box::new(|p| p.repetition_penalty = 0.0),
        ),
        (
            "presence_penalty",
            Box::new(|p| p.presence_penalty = f32::INFINITY),
        ),
        (
            "frequency_penalty",
            Box::new(|p| p.frequency_penalty = f32::NAN),
        ),
        (
            "logit_bias",
            Box::new(|p| p.logit_bias.extend([(1, f32::INFINITY)])),
        ),
        ("max_tokens", Box::new(|p| p.max_tokens = 0)),
    ];
    for (name, change) in cases {
        let mut params = greedy(10);
        change(&mut params);
        match Request::new(vec![1], params).validate(&small_limits(), 64) {
            Err(Reject::Sampling(field, _)) => assert_eq!(field, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    let foreign = Request::new(vec![1, 99_999], greedy(10)).validate(&small_limits(), 64);
    assert!(matches!(
        foreign,
        Err(Reject::NoSuchToken {
            index: 1,
            id: 99_999,
            ..
        })
    ));
}

#[test]
fn received_tokens_are_checked_against_the_stops() {
    let with = |received: Vec<TokenId>| {
        let mut params = greedy(3);
        params.stop_tokens = vec![7];
        let request = Request {
            received,
            ..Request::new(vec![1], params)
        };
        request
            .validate(&small_limits(), 64)
            .map(|valid| valid.finished().cloned())
    };
    assert_eq!(with(vec![2, 3]), Ok(None));
    assert_eq!(with(vec![2, 7]), Ok(Some(FinishReason::StopToken(7))));
    assert_eq!(with(vec![2, 3, 4]), Ok(Some(FinishReason::Length)));
    assert_eq!(
        with(vec![7, 2]),
        Err(Reject::ReceivedPastStop {
            index: 0,
            received: 2
        })
    );
    assert_eq!(
        with(vec![2, 3, 4, 5]),
        Err(Reject::ReceivedTooLong {
            received: 4,
            room: 3
        })
    );
}
