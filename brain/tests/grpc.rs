//! The gRPC front end over a real connection, with a fake device behind it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

mod grpc_support;

use std::sync::Arc;

use grpc_support::{Server, sampling, spec, start};
use marathon_proto::{
    brain::{self as pb, FinishReason, generate_event::Event},
    status::Reason,
};
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::Code;

#[tokio::test]
async fn a_stream_is_the_tokens_their_text_and_the_parsed_turn() {
    let mut server = start(&[]).await;
    let seen = server
        .read("a", Some(spec(&[2, 300, 400], sampling(400))), 0)
        .await
        .unwrap();
    assert_eq!(seen.ids.len(), 400);
    assert_eq!(seen.text, server.detokenize(&seen.ids).await);
    assert_eq!(seen.turn, seen.finished.turn.clone().unwrap());
    assert_eq!(seen.finished.reason(), FinishReason::Length);
    let usage = seen.finished.usage.unwrap();
    let sum = |of: fn(&(u32, u32, usize)) -> u32| seen.rounds.iter().map(of).sum::<u32>();
    assert_eq!((usage.prompt_tokens, usage.generated_tokens), (3, 400));
    assert_eq!(usage.drafted_tokens, sum(|round| round.0));
    assert_eq!(usage.accepted_tokens, sum(|round| round.1));
    assert_eq!(usage.rounds as usize, seen.rounds.len());
    assert_eq!(
        (seen.started.prompt_tokens, seen.started.attached),
        (3, false)
    );
    assert!(seen.started.prompt_ids.is_empty());
    assert_eq!(seen.started.fingerprint, seen.finished.fingerprint);
    let resolved = seen.started.sampling.clone().unwrap();
    assert_eq!(
        (resolved.temperature, resolved.top_k, resolved.top_p),
        (Some(1.0), Some(64), Some(0.95))
    );
    // What came back as resolved is the same request.
    let again = server
        .read("a", Some(spec(&[2, 300, 400], resolved)), 0)
        .await
        .unwrap();
    assert!(again.started.attached);
    assert_eq!(again.ids, seen.ids);
}

#[tokio::test]
async fn attaching_at_any_index_gives_the_rest() {
    let mut server = start(&[]).await;
    let whole = server
        .read("a", Some(spec(&[2], sampling(120))), 0)
        .await
        .unwrap();
    let mut before = String::new();
    for from in 0..=120u32 {
        let rest = server.read("a", None, from).await.unwrap();
        assert_eq!(rest.ids, whole.ids[from as usize..], "from {from}");
        assert!(rest.started.attached);
        assert!(whole.text.ends_with(&rest.text), "from {from}");
        let said = whole.text.len() - rest.text.len();
        assert!(said >= before.len(), "from {from}");
        before = whole.text[..said].to_owned();
        assert_eq!(rest.finished, whole.finished);
    }
    let (code, problem) = server.refused("a", None, 121).await;
    assert_eq!(
        (code, problem.reason),
        (Code::OutOfRange, Reason::IndexOutOfRange)
    );
}

#[tokio::test]
async fn received_tokens_continue_a_generation_that_was_lost() {
    let asked = || {
        spec(
            &[2, 5, 6],
            pb::Sampling {
                stop: vec!["never there".into()],
                ..sampling(100)
            },
        )
    };
    let mut first = start(&[]).await;
    let whole = first.read("a", Some(asked()), 0).await.unwrap();
    let mut second = start(&["--drafter", "none"]).await;
    let received = pb::GenerationSpec {
        received_tokens: whole.ids[..37].to_vec(),
        ..asked()
    };
    let rest = second.read("a", Some(received), 37).await.unwrap();
    assert_eq!(rest.ids, whole.ids[37..]);
    assert!(whole.text.ends_with(&rest.text));
    assert_eq!(rest.finished.turn, whole.finished.turn);
    assert_eq!(rest.finished.usage.unwrap().generated_tokens, 100);
    assert_eq!(rest.started.request_hash, whole.started.request_hash);
}

#[tokio::test]
async fn an_answer_of_a_form_goes_on_in_its_form() {
    let asked = |form: pb::form::Answer| pb::GenerationSpec {
        form: Some(pb::Form {
            answer: Some(form),
            tool_calls: None,
        }),
        ..spec(
            &[2, 5, 6],
            pb::Sampling {
                ignore_eos: None,
                ..sampling(100)
            },
        )
    };
    let letters = || pb::form::Answer::Regex("[ab]{24}".into());
    let mut first = start(&["--draft-tokens", "4"]).await;
    let whole = first.read("a", Some(asked(letters())), 0).await.unwrap();
    assert_eq!(whole.finished.reason(), FinishReason::Stop);
    let right = |c: char| c == 'a' || c == 'b';
    assert!(whole.text.len() == 24 && whole.text.chars().all(right));
    let mut second = start(&["--drafter", "none"]).await;
    let received = pb::GenerationSpec {
        received_tokens: whole.ids[..5].to_vec(),
        ..asked(letters())
    };
    let rest = second.read("a", Some(received), 5).await.unwrap();
    assert_eq!(rest.ids, whole.ids[5..]);
    assert_eq!(rest.started.request_hash, whole.started.request_hash);
    // The form is part of what a generation is.
    let other = pb::form::Answer::Regex("[ab]{25}".into());
    let (code, problem) = first.refused("a", Some(asked(other)), 0).await;
    assert_eq!(
        (code, problem.reason),
        (Code::AlreadyExists, Reason::GenerationConflict)
    );
}

#[tokio::test]
async fn a_stop_string_ends_tokens_text_and_turn_at_one_place() {
    let mut server = start(&[]).await;
    let whole = server
        .read("a", Some(spec(&[2, 9], sampling(300))), 0)
        .await
        .unwrap();
    // Two characters that were made by ordinary tokens next to each other.
    let chars: Vec<char> = whole.text.chars().collect();
    let stop: String = chars[120..122].iter().collect();
    let asked = pb::Sampling {
        stop: vec![stop.clone()],
        ..sampling(300)
    };
    let stopped = server
        .read("b", Some(spec(&[2, 9], asked)), 0)
        .await
        .unwrap();
    let shown = if stopped.finished.reason() == FinishReason::Stop {
        assert!(!stopped.text.contains(&stop));
        whole.text.starts_with(&stopped.text)
    } else {
        // The two stood on both sides of a special token.
        stopped.text == whole.text
    };
    assert!(shown);
    assert_eq!(stopped.ids, whole.ids[..stopped.ids.len()]);
    assert_eq!(stopped.turn, stopped.finished.turn.clone().unwrap());
    assert_eq!(stopped.finished.stop_token, None);
    let token = whole.ids[40];
    let asked = pb::Sampling {
        stop_token_ids: vec![token],
        ..sampling(300)
    };
    let at = whole.ids.iter().position(|id| *id == token).unwrap();
    let ended = server
        .read("c", Some(spec(&[2, 9], asked)), 0)
        .await
        .unwrap();
    assert_eq!(ended.ids, whole.ids[..=at]);
    assert_eq!(ended.finished.stop_token, Some(token));
    assert_eq!(ended.text, server.detokenize(&whole.ids[..at]).await);
}

#[tokio::test]
async fn logprobs_come_one_per_token() {
    let mut server = start(&[]).await;
    let asked = pb::GenerationSpec {
        logprobs: 3,
        ..spec(&[2], sampling(20))
    };
    let request = pb::GenerateRequest {
        generation_id: "a".into(),
        spec: Some(asked),
        from_index: 4,
    };
    let mut stream = server.client.generate(request).await.unwrap().into_inner();
    let mut tokens = 0;
    while let Some(event) = stream.next().await {
        if let Some(Event::Tokens(event)) = event.unwrap().event {
            assert_eq!(event.logprobs.len(), event.ids.len());
            assert!(event.logprobs.iter().all(|logprob| logprob.top.len() == 2));
            tokens += event.ids.len();
        }
    }
    assert_eq!(tokens, 16);
}

#[tokio::test]
async fn a_cancelled_generation_says_so_and_stays_readable() {
    let mut server = start(&["--fake-step-time", "5ms"]).await;
    let request = pb::GenerateRequest {
        generation_id: "a".into(),
        spec: Some(spec(&[2], sampling(4000))),
        from_index: 0,
    };
    let mut stream = server.client.generate(request).await.unwrap().into_inner();
    let mut ids = Vec::new();
    while ids.len() < 3 {
        if let Some(Event::Tokens(tokens)) = stream.next().await.unwrap().unwrap().event {
            ids.extend(tokens.ids);
        }
    }
    let cancel = pb::CancelRequest {
        generation_id: "a".into(),
    };
    assert!(
        server
            .client
            .cancel(cancel.clone())
            .await
            .unwrap()
            .into_inner()
            .cancelled
    );
    let all = server.read("a", None, 0).await.unwrap();
    assert_eq!(all.finished.reason(), FinishReason::Cancelled);
    assert!(all.ids.starts_with(&ids));
    assert!(
        !server
            .client
            .cancel(cancel)
            .await
            .unwrap()
            .into_inner()
            .cancelled
    );
}

#[tokio::test]
async fn a_reader_waits_for_an_index_that_is_to_come() {
    let mut server = start(&["--fake-step-time", "2ms"]).await;
    let late = server
        .read("a", Some(spec(&[2], sampling(60))), 50)
        .await
        .unwrap();
    assert_eq!(late.ids.len(), 10);
    let whole = server.read("a", None, 0).await.unwrap();
    assert_eq!(late.ids, whole.ids[50..]);
}

#[tokio::test]
async fn the_model_and_the_counters_are_described() {
    let mut server = start(&["--max-model-len", "512", "--lease", "60s"]).await;
    let model = server
        .client
        .get_model(pb::GetModelRequest {})
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        (model.name.as_str(), model.device.as_str()),
        ("demo", "fake")
    );
    assert_eq!(
        (model.max_model_len, model.vocab_size, model.lease_seconds),
        (512, 1024, 60)
    );
    assert_eq!(model.stop_token_ids, [1, 106, 50]);
    assert_eq!(model.template_hash.len(), 64);
    assert_eq!(model.default_sampling.unwrap().top_k, Some(64));
    server
        .read("a", Some(spec(&[2, 3], sampling(50))), 0)
        .await
        .unwrap();
    let stats = |interval_ms| pb::StatsRequest { interval_ms };
    let mut once = server.client.stats(stats(0)).await.unwrap().into_inner();
    let counted = once.next().await.unwrap().unwrap();
    assert_eq!(
        (
            counted.generated_tokens,
            counted.prompt_tokens,
            counted.running
        ),
        (50, 2, 0)
    );
    assert!(once.next().await.is_none());
    let mut often = server.client.stats(stats(100)).await.unwrap().into_inner();
    for _ in 0..2 {
        assert_eq!(often.next().await.unwrap().unwrap().generated_tokens, 50);
    }
    assert_eq!(
        server.client.stats(stats(5)).await.unwrap_err().code(),
        Code::InvalidArgument
    );
}

#[tokio::test]
async fn many_streams_at_once_are_each_whole() {
    let server = start(&[]).await;
    let tasks: Vec<_> = (0..24u32)
        .map(|n| {
            let mut own = Server {
                serving: server.serving.clone(),
                client: server.client.clone(),
                end: CancellationToken::new().drop_guard(),
            };
            tokio::spawn(async move {
                let asked = spec(&[2, n + 300], sampling(100 + n));
                own.read(&format!("g{n}"), Some(asked), 0).await.unwrap()
            })
        })
        .collect();
    let mut tokens = Vec::new();
    for (n, task) in tasks.into_iter().enumerate() {
        let seen = task.await.unwrap();
        assert_eq!(seen.ids.len(), 100 + n);
        tokens.push(seen.ids);
    }
    tokens.dedup();
    assert_eq!(tokens.len(), 24);
    assert_eq!(Arc::strong_count(&server.serving.facts), 2);
}
