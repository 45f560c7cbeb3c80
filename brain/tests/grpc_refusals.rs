//! What the gRPC front end refuses, and what it takes only as text.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

mod grpc_support;

use grpc_support::{sampling, spec, start, user};
use marathon_proto::{
    brain::{self as pb, generation_spec::Prompt},
    status::{Problem, Reason},
};
use tonic::Code;

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
            other(|s| s.form = Some(pb::Form::default())),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.form",
        ),
        (
            "new",
            other(|s| {
                let schema = r#"{"properties":{"a":{"not":{}}}}"#.into();
                s.form = Some(pb::Form {
                    answer: Some(pb::form::Answer::JsonSchema(schema)),
                    tool_calls: None,
                });
            }),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.form.json_schema.properties.a.not",
        ),
        (
            "new",
            other(|s| {
                s.form = Some(pb::Form {
                    answer: None,
                    tool_calls: Some(pb::ToolCalls::default()),
                });
            }),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.form.tool_calls",
        ),
        (
            "new",
            other(|s| {
                s.received_tokens = vec![3];
                s.sampling = Some(pb::Sampling {
                    ignore_eos: None,
                    ..sampling(9)
                });
                s.form = Some(pb::Form {
                    answer: Some(pb::form::Answer::Regex("a".into())),
                    tool_calls: None,
                });
            }),
            Code::InvalidArgument,
            Reason::InvalidField,
            "spec.received_tokens",
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
