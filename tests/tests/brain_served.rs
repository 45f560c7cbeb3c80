//! What a brain does as a server: health, reflection, the token, errors, the end.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf};

use marathon_proto::{
    brain::{
        CancelRequest, DetokenizeRequest, FinishReason, GenerateRequest, GetModelRequest,
        GetUsageRequest, RenderRequest, Sampling, StatsRequest, TokenizeRequest,
    },
    net::BrainChannel,
    status::{Problem, Reason},
};
use marathon_tests::{
    Brain, BrainOptions, Program, command, fake_spec, generate, read_tokens, spec,
};
use tempfile::TempDir;
use tonic::{Code, Status};
use tonic_health::pb::{
    HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient,
};

use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
};

const SERVICE: &str = "marathon.brain.v1.Brain";

fn token_file(dir: &TempDir, name: &str, token: &str) -> PathBuf {
    let path = dir.path().join(name);
    fs::write(&path, token).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

#[tokio::test]
async fn health_says_serving_for_the_server_and_the_service() {
    let brain = Brain::start(BrainOptions::fake(&[]));
    for service in ["", SERVICE] {
        let request = HealthCheckRequest {
            service: service.to_owned(),
        };
        let answer = HealthClient::new(brain.channel())
            .check(request)
            .await
            .unwrap()
            .into_inner();
        assert_eq!(
            answer.status(),
            ServingStatus::Serving,
            "service `{service}`"
        );
    }
}

/// Names of the services that reflection tells of.
async fn reflect(channel: BrainChannel) -> Result<Vec<String>, Status> {
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers = ServerReflectionClient::new(channel)
        .server_reflection_info(tokio_stream::once(ask))
        .await?
        .into_inner();
    let answer = answers.message().await?.and_then(|a| a.message_response);
    let Some(MessageResponse::ListServicesResponse(list)) = answer else {
        panic!("{answer:?}")
    };
    Ok(list
        .service
        .into_iter()
        .map(|service| service.name)
        .collect())
}

#[tokio::test]
async fn reflection_names_the_services() {
    let brain = Brain::start(BrainOptions::fake(&[]));
    let names = reflect(brain.channel()).await.unwrap();
    for service in [SERVICE, "grpc.health.v1.Health"] {
        assert!(names.iter().any(|name| name == service), "{names:?}");
    }
}

#[tokio::test]
async fn every_call_but_health_needs_the_token() {
    let dir = TempDir::new().unwrap();
    let right = token_file(&dir, "right", "the-right-token-of-this-test");
    let wrong = token_file(&dir, "wrong", "a-wrong-token-of-this-very-test");
    let brain = Brain::start(BrainOptions {
        token_file: Some(right),
        ..BrainOptions::fake(&[])
    });
    let wrong = marathon_proto::auth::Token::from_file(&wrong).unwrap();
    for token in [None, Some(wrong)] {
        use marathon_proto::brain::brain_client::BrainClient;
        let channel = brain.channel_with(token);
        let mut client = BrainClient::new(channel.clone());
        let generate = GenerateRequest {
            generation_id: "x".to_owned(),
            spec: Some(fake_spec(1, 1)),
            from_index: 0,
        };
        let refusals: Vec<Status> = vec![
            client.generate(generate).await.unwrap_err(),
            client.cancel(CancelRequest::default()).await.unwrap_err(),
            client
                .tokenize(TokenizeRequest::default())
                .await
                .unwrap_err(),
            client
                .detokenize(DetokenizeRequest::default())
                .await
                .unwrap_err(),
            client.render(RenderRequest::default()).await.unwrap_err(),
            client
                .get_model(GetModelRequest::default())
                .await
                .unwrap_err(),
            client.stats(StatsRequest::default()).await.unwrap_err(),
            client
                .get_usage(GetUsageRequest::default())
                .await
                .unwrap_err(),
            reflect(channel.clone()).await.unwrap_err(),
        ];
        for status in refusals {
            assert_eq!(status.code(), Code::Unauthenticated, "{status}");
        }
        HealthClient::new(channel)
            .check(HealthCheckRequest::default())
            .await
            .unwrap();
    }
    generate(&mut brain.client(), "x", Some(fake_spec(1, 8)), 0)
        .await
        .unwrap();
}

/// The reason in the details of a refused call.
fn reason(result: Result<impl std::fmt::Debug, Status>) -> Reason {
    let status = result.expect_err("the call is refused");
    Problem::from_status(&status)
        .unwrap_or_else(|| panic!("no details in {status:?}"))
        .reason
}

#[tokio::test]
async fn a_refused_call_says_why_and_hurts_nobody() {
    let brain = Brain::start(BrainOptions::fake(&["--max-model-len", "512"]));
    let mut client = brain.client();
    let (_, witness) = read_tokens(&mut brain.client(), "witness", fake_spec(1, 400), 1)
        .await
        .unwrap();

    let sampling = |change: fn(&mut Sampling)| {
        let mut wanted = fake_spec(2, 8);
        change(wanted.sampling.as_mut().unwrap());
        Some(wanted)
    };
    let bad_sampling: [fn(&mut Sampling); 8] = [
        |s| s.temperature = Some(-1.0),
        |s| s.temperature = Some(f32::NAN),
        |s| s.top_p = Some(1.5),
        |s| s.top_p = Some(f32::INFINITY),
        |s| s.min_p = Some(1.0),
        |s| s.repetition_penalty = Some(0.0),
        |s| s.presence_penalty = Some(9.0),
        |s| s.logit_bias = [(1, f32::NAN)].into(),
    ];
    for (number, change) in bad_sampling.into_iter().enumerate() {
        let call = generate(&mut client, &format!("bad-{number}"), sampling(change), 0).await;
        assert_eq!(reason(call), Reason::InvalidField, "case {number}");
    }
    for id in ["", "a b", "ä", &"x".repeat(129)] {
        let call = generate(&mut client, id, Some(fake_spec(1, 1)), 0).await;
        assert_eq!(reason(call), Reason::InvalidField, "id `{id}`");
    }
    let long = spec(&vec![5; 4000], Sampling::default());
    assert_eq!(
        reason(generate(&mut client, "long", Some(long), 0).await),
        Reason::PromptTooLong
    );
    let foreign = spec(&[u32::MAX], Sampling::default());
    assert_eq!(
        reason(generate(&mut client, "vocab", Some(foreign), 0).await),
        Reason::InvalidField
    );
    let empty = spec(&[], Sampling::default());
    assert_eq!(
        reason(generate(&mut client, "empty", Some(empty), 0).await),
        Reason::InvalidField
    );
    assert_eq!(
        reason(generate(&mut client, "absent", None, 0).await),
        Reason::UnknownGeneration
    );
    let mut pinned = fake_spec(1, 1);
    pinned.expected_fingerprint = "another".to_owned();
    let call = generate(&mut client, "pinned", Some(pinned), 0).await;
    assert_eq!(reason(call), Reason::FingerprintMismatch);

    let done = generate(&mut client, "done", Some(fake_spec(3, 8)), 0)
        .await
        .unwrap();
    assert_eq!(done.ids.len(), 8);
    let other = generate(&mut client, "done", Some(fake_spec(4, 8)), 0).await;
    assert_eq!(reason(other), Reason::GenerationConflict);
    let beyond = generate(&mut client, "done", None, 99).await;
    assert_eq!(reason(beyond), Reason::IndexOutOfRange);

    drop(witness);
    let witness = generate(&mut client, "witness", None, 0).await.unwrap();
    assert_eq!(
        witness.reason(),
        FinishReason::Length,
        "the one before is as it was"
    );
}

#[tokio::test]
async fn cancel_ends_a_generation_and_leaves_its_tokens_readable() {
    // Slow enough that it cannot be done before the cancel comes.
    let brain = Brain::start(BrainOptions::fake(&["--fake-step-time", "5ms"]));
    let mut client = brain.client();
    let (before, mut stream) = read_tokens(&mut brain.client(), "long", fake_spec(5, 4000), 10)
        .await
        .unwrap();
    let cancel = CancelRequest {
        generation_id: "long".to_owned(),
    };
    let told = client.cancel(cancel.clone()).await.unwrap().into_inner();
    assert!(told.cancelled);
    let mut generation = before;
    while let Some(event) = stream.message().await.unwrap() {
        generation.take(event);
    }
    // The fake is fast: it may have been done before the cancel came.
    assert_eq!(generation.reason(), FinishReason::Cancelled);
    assert!(generation.ids.len() < 4000);
    let again = generate(&mut client, "long", None, 0).await.unwrap();
    assert_eq!(again.ids, generation.ids);
    assert!(
        !client.cancel(cancel).await.unwrap().into_inner().cancelled,
        "it is idempotent"
    );
}

#[tokio::test]
async fn sigterm_lets_a_stream_finish_and_exits_with_success() {
    let brain = Brain::start(BrainOptions::fake(&[]));
    let (mut generation, mut stream) =
        read_tokens(&mut brain.client(), "last", fake_spec(6, 2000), 5)
            .await
            .unwrap();
    brain.program.terminate();
    while let Some(event) = stream.message().await.unwrap() {
        generation.take(event);
    }
    assert_eq!(generation.ids.len(), 2000);
    drop(stream);
    let end = brain.program.finish();
    assert_eq!(end.code, Some(0), "{}", end.stderr);
}

#[tokio::test]
async fn a_port_is_free_again_after_the_end() {
    let mut brain = Brain::start(BrainOptions::fake(&[]));
    let addr = brain.addr.clone();
    brain.program.terminate();
    assert!(brain.program.wait().success());
    std::net::TcpListener::bind(&addr).unwrap();
}

#[test]
fn a_service_manager_is_told_that_it_is_ready_alive_and_stopping() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("notify");
    let manager = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    manager
        .set_read_timeout(Some(std::time::Duration::from_secs(60)))
        .unwrap();
    let mut command = command("brain");
    command.args(["serve", "--device", "fake", "--grpc-addr", "127.0.0.1:0"]);
    command
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "30000000");
    let mut brain = Program::start(&mut command);
    let wait_for = |wanted: &str| {
        let mut bytes = [0; 4096];
        loop {
            let length = manager
                .recv(&mut bytes)
                .unwrap_or_else(|error| panic!("{wanted}: {error}"));
            let told = String::from_utf8_lossy(&bytes[..length]);
            if told.lines().any(|line| line == wanted) {
                return;
            }
        }
    };
    wait_for("READY=1");
    wait_for("WATCHDOG=1");
    brain.terminate();
    wait_for("STOPPING=1");
    assert!(brain.wait().success());
}
