//! The gRPC front end over a real connection, with a fake device behind it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

use std::{net::SocketAddr, sync::Arc};

use brain::{
    bringup,
    cli::{Cli, Command},
    config::Loaded,
    grpc::BrainService,
    serving::Serving,
};
use clap::Parser as _;
use marathon_proto::{
    brain::{
        self as pb, FinishReason, brain_client::BrainClient, brain_server::BrainServer,
        generate_event::Event, generation_spec::Prompt, turn_delta::Delta,
    },
    net::{self, ListenAddr, MAX_MESSAGE_BYTES},
    status::{Problem, Reason},
};
use tokio_stream::StreamExt as _;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Code, Status, transport::Channel};

/// A server of this test's own; it ends when this is dropped.
struct Server {
    serving: Serving,
    client: BrainClient<Channel>,
    _end: DropGuard,
}

async fn start(flags: &[&str]) -> Server {
    let args = ["brain", "serve", "--device", "fake"].iter().chain(flags);
    let Command::Serve(args) = Cli::parse_from(args).command else {
        panic!("not serve")
    };
    let config = Loaded::new(None, &args.settings).unwrap().check().unwrap();
    let serving = bringup::bring_up(&config).unwrap();
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listener = ListenAddr::Tcp(any).bind().await.unwrap();
    let addr = listener.local_addr().unwrap();
    let end = CancellationToken::new();
    let service = BrainServer::new(BrainService::new(serving.clone(), end.clone()))
        .max_decoding_message_size(MAX_MESSAGE_BYTES);
    let router = net::server().add_service(service);
    let until = end.clone().cancelled_owned();
    tokio::spawn(router.serve_with_incoming_shutdown(listener.incoming(), until));
    let client = BrainClient::connect(format!("http://{addr}"))
        .await
        .unwrap();
    Server {
        serving,
        client,
        _end: end.drop_guard(),
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    started: pb::Started,
    ids: Vec<u32>,
    text: String,
    turn: pb::AssistantTurn,
    rounds: Vec<(u32, u32, usize)>,
    finished: pb::Finished,
}

impl Server {
    async fn read(
        &mut self,
        id: &str,
        spec: Option<pb::GenerationSpec>,
        from_index: u32,
    ) -> Result<Seen, Status> {
        let request = pb::GenerateRequest {
            generation_id: id.into(),
            spec,
            from_index,
        };
        let mut stream = self.client.generate(request).await?.into_inner();
        let mut seen = Seen::default();
        while let Some(event) = stream.next().await {
            match event?.event.unwrap() {
                Event::Started(started) => seen.started = started,
                Event::Tokens(tokens) => {
                    assert_eq!(tokens.index as usize, from_index as usize + seen.ids.len());
                    if !tokens.ids.is_empty() {
                        seen.rounds
                            .push((tokens.drafted, tokens.accepted, tokens.ids.len()));
                    }
                    seen.ids.extend(tokens.ids);
                    seen.text.push_str(&tokens.text);
                    tokens
                        .turn
                        .into_iter()
                        .for_each(|delta| apply(&mut seen.turn, delta));
                }
                Event::Finished(finished) => seen.finished = finished,
            }
        }
        Ok(seen)
    }

    async fn refused(
        &mut self,
        id: &str,
        spec: Option<pb::GenerationSpec>,
        from: u32,
    ) -> (Code, Problem) {
        let status = self.read(id, spec, from).await.unwrap_err();
        let problem = Problem::from_status(&status).expect("a problem inside the status");
        (status.code(), problem)
    }

    async fn detokenize(&mut self, ids: &[u32]) -> String {
        let request = pb::DetokenizeRequest {
            ids: ids.to_vec(),
            skip_special: true,
        };
        self.client
            .detokenize(request)
            .await
            .unwrap()
            .into_inner()
            .text
    }
}

fn apply(turn: &mut pb::AssistantTurn, delta: pb::TurnDelta) {
    match delta.delta.unwrap() {
        Delta::Content(text) => turn.content.push_str(&text),
        Delta::Reasoning(text) => turn.reasoning.push_str(&text),
        Delta::ToolCall(call) => {
            if !call.id.is_empty() {
                assert_eq!(call.index as usize, turn.tool_calls.len());
                turn.tool_calls.push(pb::ToolCall {
                    id: call.id,
                    name: call.name,
                    arguments_json: String::new(),
                });
            }
            turn.tool_calls[call.index as usize]
                .arguments_json
                .push_str(&call.arguments_json);
        }
    }
}

fn sampling(max_tokens: u32) -> pb::Sampling {
    pb::Sampling {
        max_tokens: Some(max_tokens),
        ignore_eos: Some(true),
        seed: Some(7),
        ..pb::Sampling::default()
    }
}

fn spec(prompt: &[u32], sampling: pb::Sampling) -> pb::GenerationSpec {
    pb::GenerationSpec {
        prompt: Some(Prompt::PromptTokens(pb::TokenIds {
            ids: prompt.to_vec(),
        })),
        sampling: Some(sampling),
        ..pb::GenerationSpec::default()
    }
}

fn user(text: &str) -> pb::Conversation {
    pb::Conversation {
        messages: vec![pb::Message {
            role: "user".into(),
            content: text.into(),
            ..pb::Message::default()
        }],
        ..pb::Conversation::default()
    }
}

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
async fn bad_requests_get_a_code_a_reason_and_a_field() {
    let mut server = start(&["--max-model-len", "64"]).await;
    let good = || spec(&[2, 3], sampling(8));
    let first = server.read("known", Some(good()), 0).await.unwrap();
    let other = |change: fn(&mut pb::GenerationSpec)| {
        let mut spec = good();
        change(&mut spec);
        Some(spec)
    };
    let long = || spec(&[5; 64], sampling(8));
    let cases = [
        (
            "bad id",
            Some(good()),
            Code::InvalidArgument,
            Reason::InvalidField,
            "generation_id",
        ),
        ("new", None, Code::NotFound, Reason::UnknownGeneration, ""),
        (
            "known",
            other(|s| s.sampling = Some(sampling(9))),
            Code::AlreadyExists,
            Reason::GenerationConflict,
            "",
        ),
        (
            "new",
            other(|s| s.expected_fingerprint = "x".into()),
            Code::FailedPrecondition,
            Reason::FingerprintMismatch,
            "",
        ),
        (
            "new",
            other(|s| s.prompt = None),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.prompt",
        ),
        (
            "new",
            Some(spec(&[], sampling(1))),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.prompt",
        ),
        (
            "new",
            Some(spec(&[9999], sampling(1))),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.prompt",
        ),
        (
            "new",
            Some(long()),
            Code::InvalidArgument,
            Reason::PromptTooLong,
            "",
        ),
        (
            "new",
            other(|s| s.logprobs = 22),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.logprobs",
        ),
        (
            "new",
            other(|s| s.received_tokens = vec![3; 9]),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.received_tokens",
        ),
        (
            "new",
            other(|s| s.prompt = Some(Prompt::Conversation(pb::Conversation::default()))),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.conversation",
        ),
        (
            "new",
            other(|s| {
                let mut bad = user("x");
                bad.messages[0].role = "boss".into();
                s.prompt = Some(Prompt::Conversation(bad));
            }),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.conversation.messages[0].role",
        ),
        (
            "new",
            other(|s| {
                let mut bad = user("x");
                bad.tools = vec![pb::Tool {
                    name: "t".into(),
                    parameters_json: "[1]".into(),
                    ..pb::Tool::default()
                }];
                s.prompt = Some(Prompt::Conversation(bad));
            }),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.conversation.tools[0].parameters_json",
        ),
    ];
    for (id, spec, code, reason, field) in cases {
        let (got, problem) = server.refused(id, spec, 0).await;
        assert_eq!((got, problem.reason), (code, reason), "{problem}");
        assert_eq!(
            problem.field.as_deref().unwrap_or_default(),
            field,
            "{problem}"
        );
    }
    // Nothing else suffered.
    assert_eq!(
        server.read("known", Some(good()), 0).await.unwrap().ids,
        first.ids
    );
}

#[tokio::test]
async fn conversations_are_rendered_and_their_tokens_given_back() {
    let mut server = start(&[]).await;
    let render = pb::RenderRequest {
        conversation: Some(user("Hi <turn|> there")),
        add_generation_prompt: true,
        ..pb::RenderRequest::default()
    };
    let ids = server.client.render(render).await.unwrap().into_inner().ids;
    let asked = pb::GenerationSpec {
        prompt: Some(Prompt::Conversation(user("Hi <turn|> there"))),
        sampling: Some(sampling(5)),
        ..pb::GenerationSpec::default()
    };
    let seen = server.read("a", Some(asked), 0).await.unwrap();
    assert_eq!(seen.started.prompt_ids, ids);
    let by_ids = server
        .read("b", Some(spec(&ids, sampling(5))), 0)
        .await
        .unwrap();
    assert_eq!(by_ids.ids, seen.ids);
    assert_eq!(by_ids.started.request_hash, seen.started.request_hash);

    let tokenize = |text: &str, allow_special| pb::TokenizeRequest {
        text: text.into(),
        allow_special,
    };
    let special = server
        .client
        .tokenize(tokenize("<turn|>", true))
        .await
        .unwrap()
        .into_inner()
        .ids;
    assert_eq!(special, [106]);
    let plain = server
        .client
        .tokenize(tokenize("<turn|>", false))
        .await
        .unwrap()
        .into_inner()
        .ids;
    assert!(!plain.contains(&106));
    assert_eq!(server.detokenize(&plain).await, "<turn|>");

    let mut next = user("More");
    let append = pb::RenderRequest {
        conversation: Some(next.clone()),
        append_to: [&ids[..], &[300, 106]].concat(),
        add_generation_prompt: true,
    };
    let added = server
        .client
        .render(append.clone())
        .await
        .unwrap()
        .into_inner()
        .ids;
    let text = server.client.detokenize(pb::DetokenizeRequest {
        ids: added,
        skip_special: false,
    });
    assert_eq!(
        text.await.unwrap().into_inner().text,
        "\n<|turn>user\nMore<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"
    );
    next.messages[0].role = "tool".into();
    let misplaced = pb::RenderRequest {
        conversation: Some(next),
        ..append
    };
    let status = server.client.render(misplaced).await.unwrap_err();
    assert_eq!(
        Problem::from_status(&status).unwrap().field.as_deref(),
        Some("append_to")
    );
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
                _end: CancellationToken::new().drop_guard(),
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

#[tokio::test]
async fn what_cannot_fit_is_refused_before_it_is_rendered() {
    let mut server = start(&["--max-model-len", "512"]).await;
    let message = |content: &str| pb::Message {
        role: "user".into(),
        content: content.into(),
        ..pb::Message::default()
    };
    let conversation = |messages: Vec<pb::Message>| pb::Conversation {
        messages,
        ..pb::Conversation::default()
    };
    let huge = "x".repeat(4 << 20);
    for (given, expected) in [
        (
            conversation(vec![message(&huge)]),
            "the text has 4194304 bytes",
        ),
        (
            conversation(vec![message("x"); 100_000]),
            "has 100000 messages",
        ),
    ] {
        let request = pb::RenderRequest {
            conversation: Some(given.clone()),
            ..pb::RenderRequest::default()
        };
        let status = server.client.render(request).await.unwrap_err();
        assert!(status.message().contains(expected), "{status}");
        let spec = pb::GenerationSpec {
            prompt: Some(Prompt::Conversation(given)),
            ..pb::GenerationSpec::default()
        };
        let (_, problem) = server.refused("g", Some(spec), 0).await;
        assert_eq!(problem.reason, Reason::PromptTooLong, "{problem:?}");
    }
    let text = pb::TokenizeRequest {
        text: huge,
        ..pb::TokenizeRequest::default()
    };
    assert!(server.client.tokenize(text).await.is_err());

    let spec = pb::GenerationSpec {
        prompt: Some(Prompt::PromptText("x".into())),
        run_id: "r".repeat(257),
        ..pb::GenerationSpec::default()
    };
    let (code, problem) = server.refused("g", Some(spec), 0).await;
    assert_eq!(code, Code::InvalidArgument);
    assert!(
        problem.message.contains("use a shorter name or its hash"),
        "{problem:?}"
    );
}

#[tokio::test]
async fn special_tokens_in_messages_are_text_unless_they_are_trusted() {
    let turn_close = 106;
    for (flags, closes) in [(&[][..], 1), (&["--trust-special-tokens"][..], 2)] {
        let mut server = start(flags).await;
        let request = pb::RenderRequest {
            conversation: Some(pb::Conversation {
                messages: vec![pb::Message {
                    role: "user".into(),
                    content: "a<turn|>b".into(),
                    ..pb::Message::default()
                }],
                ..pb::Conversation::default()
            }),
            ..pb::RenderRequest::default()
        };
        let ids = server
            .client
            .render(request)
            .await
            .unwrap()
            .into_inner()
            .ids;
        assert_eq!(ids.iter().filter(|id| **id == turn_close).count(), closes);
    }
}
