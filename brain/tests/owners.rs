//! What a caller makes belongs to its key, over gRPC and HTTP alike, over a fake device.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::net::SocketAddr;

use brain::{
    bringup,
    callers::{Keys, Owner},
    cli::{Cli, Command},
    config::Loaded,
    grpc::BrainService,
    http::{HttpServer, Setup},
};
use clap::Parser as _;
use marathon_proto::{
    auth::Guard,
    brain::{
        self as pb, brain_client::BrainClient, brain_server::BrainServer, generate_event::Event,
        generation_spec::Prompt,
    },
    net::{self, ListenAddr},
};
use serde_json::{Value, json};
use tokio_stream::StreamExt as _;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{
    Code, Request, Status,
    service::interceptor::InterceptedService,
    transport::{Channel, Endpoint},
};

const ALICE: &str = "key-of-alice-0123456789";
const BOB: &str = "key-of-bob-0123456789";

/// Both front ends over one engine; they end when it is dropped.
struct Server {
    channel: Channel,
    http: String,
    _end: DropGuard,
}

async fn start() -> Server {
    let keys = Keys::gather(None, None, Some(&format!("{ALICE},{BOB}"))).unwrap();
    let flags = ["brain", "serve", "--device", "fake"];
    let Command::Serve(args) =
        Cli::parse_from(flags.iter().chain(&["--http-addr", "127.0.0.1:0"])).command
    else {
        panic!("not serve")
    };
    let config = Loaded::new(None, &args.settings).unwrap().check().unwrap();
    let serving = bringup::bring_up(&config).unwrap();
    let end = CancellationToken::new();

    let setup = Setup {
        keys: keys.clone(),
        tls: None,
        model_name: config.name.clone(),
        ending: end.clone(),
    };
    // The client wants one, although this test speaks without TLS.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let server = HttpServer::bind(&config.http, setup)
        .await
        .unwrap()
        .unwrap();
    let http = format!("http://{}", server.local_addr().unwrap());
    server.model().send_replace(Some(serving.clone()));
    tokio::spawn(server.serve(end.clone()));

    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let listener = ListenAddr::Tcp(any).bind().await.unwrap();
    let addr = format!("http://{}", listener.local_addr().unwrap());
    let guard: Guard<Owner> = Guard::new(move |key| keys.caller(key));
    let service = BrainServer::new(BrainService::new(serving, end.clone()));
    let router = net::server().add_service(InterceptedService::new(service, guard));
    let until = end.clone().cancelled_owned();
    tokio::spawn(router.serve_with_incoming_shutdown(listener.incoming(None), until));
    Server {
        channel: Endpoint::from_shared(addr)
            .unwrap()
            .connect()
            .await
            .unwrap(),
        http,
        _end: end.drop_guard(),
    }
}

fn call<T>(key: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    let value = format!("Bearer {key}").parse().unwrap();
    request.metadata_mut().insert("authorization", value);
    request
}

fn spec(tokens: u32, max_tokens: u32) -> pb::GenerationSpec {
    let ids = (0..tokens).map(|at| 100 + at % 50).collect();
    pb::GenerationSpec {
        prompt: Some(Prompt::PromptTokens(pb::TokenIds { ids })),
        sampling: Some(pb::Sampling {
            max_tokens: Some(max_tokens),
            ignore_eos: Some(true),
            ..pb::Sampling::default()
        }),
        ..pb::GenerationSpec::default()
    }
}

impl Server {
    /// Reads a generation to its end: its tokens, and what it took.
    async fn read(
        &self,
        key: &str,
        id: &str,
        spec: Option<pb::GenerationSpec>,
    ) -> Result<(Vec<u32>, pb::Usage), Status> {
        let request = pb::GenerateRequest {
            generation_id: id.into(),
            spec,
            from_index: 0,
        };
        let mut client = BrainClient::new(self.channel.clone());
        let mut stream = client.generate(call(key, request)).await?.into_inner();
        let (mut ids, mut usage) = (Vec::new(), pb::Usage::default());
        while let Some(event) = stream.next().await {
            match event?.event.unwrap() {
                Event::Started(_) => {}
                Event::Tokens(tokens) => ids.extend(tokens.ids),
                Event::Finished(finished) => usage = finished.usage.unwrap(),
            }
        }
        Ok((ids, usage))
    }

    async fn cancel(&self, key: &str, id: &str) -> bool {
        let request = pb::CancelRequest {
            generation_id: id.into(),
        };
        let mut client = BrainClient::new(self.channel.clone());
        let answer = client.cancel(call(key, request)).await.unwrap();
        answer.into_inner().cancelled
    }
}

#[tokio::test]
async fn a_generation_is_there_for_its_key_and_for_no_other() {
    let server = start().await;
    let (mine, _) = server.read(ALICE, "one", Some(spec(40, 20))).await.unwrap();
    assert_eq!(server.read(ALICE, "one", None).await.unwrap().0, mine);
    let stranger = server.read(BOB, "one", None).await.unwrap_err();
    assert_eq!(stranger.code(), Code::NotFound, "{stranger}");
    let nobody = server.read("key-of-nobody-0123456789", "one", None).await;
    assert_eq!(nobody.unwrap_err().code(), Code::Unauthenticated);

    // The id is free for every other key, and what it names there is something else.
    let (theirs, _) = server.read(BOB, "one", Some(spec(30, 10))).await.unwrap();
    assert_eq!(theirs.len(), 10);
    assert_eq!(server.read(ALICE, "one", None).await.unwrap().0, mine);
}

#[tokio::test]
async fn a_cancel_reaches_the_callers_own_alone() {
    let server = start().await;
    let mut client = BrainClient::new(server.channel.clone());
    let request = pb::GenerateRequest {
        generation_id: "long".into(),
        spec: Some(spec(20, 4000)),
        from_index: 0,
    };
    let mut stream = client
        .generate(call(ALICE, request))
        .await
        .unwrap()
        .into_inner();
    stream.next().await.unwrap().unwrap();
    assert!(!server.cancel(BOB, "long").await);
    assert!(server.cancel(ALICE, "long").await);
}

#[tokio::test]
async fn a_cached_prompt_is_found_by_the_key_that_computed_it() {
    let server = start().await;
    let cached = async |key: &str, id: &str| {
        let read = server.read(key, id, Some(spec(600, 4))).await;
        read.unwrap().1.cached_tokens
    };
    assert_eq!(cached(ALICE, "first").await, 0);
    assert!(cached(ALICE, "second").await >= 590);
    assert_eq!(cached(BOB, "first").await, 0);
}

#[tokio::test]
async fn a_key_is_the_same_caller_over_grpc_and_http() {
    let server = start().await;
    let body = json!({
        "model": "demo", "prompt": [101, 102, 103, 104], "max_tokens": 12,
        "resumable": true, "request_id": "shared", "return_token_ids": true,
    });
    let client = reqwest::Client::new();
    let response = client
        .post(format!("{}/v1/completions", server.http))
        .bearer_auth(ALICE)
        .json(&body)
        .send()
        .await
        .unwrap();
    let status = response.status();
    let answer: Value = response.json().await.unwrap();
    assert!(status.is_success(), "{answer}");
    let ids: Vec<u32> = serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap();
    assert!(!ids.is_empty());
    let read = server.read(ALICE, "cmpl-shared", None).await.unwrap();
    assert_eq!(read.0, ids);
    let stranger = server.read(BOB, "cmpl-shared", None).await.unwrap_err();
    assert_eq!(stranger.code(), Code::NotFound);
}

#[tokio::test]
async fn what_a_run_took_is_told_to_its_caller_over_grpc_and_http() {
    let server = start().await;
    let in_run = |tokens, max_tokens| pb::GenerationSpec {
        run_id: "marathon 7".into(),
        ..spec(tokens, max_tokens)
    };
    let (_, first) = server
        .read(ALICE, "one", Some(in_run(300, 20)))
        .await
        .unwrap();
    let (_, second) = server
        .read(ALICE, "two", Some(in_run(300, 5)))
        .await
        .unwrap();
    server.read(BOB, "one", Some(in_run(100, 7))).await.unwrap();
    let mut client = BrainClient::new(server.channel.clone());
    let request = pb::GetUsageRequest::default();
    let usage = client.get_usage(call(ALICE, request)).await.unwrap();
    let runs = usage.into_inner().runs;
    assert_eq!(runs.len(), 1);
    let run = &runs[0];
    assert_eq!((&*run.run_id, run.generations), ("marathon 7", 2));
    assert_eq!((run.prompt_tokens, run.generated_tokens), (600, 25));
    let sum = |of: fn(&pb::Usage) -> u32| u64::from(of(&first) + of(&second));
    assert_eq!(run.cached_tokens, sum(|usage| usage.cached_tokens));
    assert!(run.cached_tokens > 200);
    assert_eq!(run.drafted_tokens, sum(|usage| usage.drafted_tokens));
    assert_eq!(run.accepted_tokens, sum(|usage| usage.accepted_tokens));
    assert!(run.device_seconds > 0.0);

    let shown = async |key: &str, path: &str| {
        let request = reqwest::Client::new().get(format!("{}{path}", server.http));
        let response = request.bearer_auth(key).send().await.unwrap();
        (
            response.status().as_u16(),
            response.json::<Value>().await.unwrap(),
        )
    };
    let (status, mine) = shown(ALICE, "/v1/runs/marathon%207").await;
    assert_eq!((status, &mine["generated_tokens"]), (200, &json!(25)));
    let (_, all) = shown(BOB, "/v1/runs").await;
    assert_eq!(all["data"].as_array().unwrap().len(), 1);
    assert_eq!(all["data"][0]["generated_tokens"], json!(7));
    assert_eq!(shown(BOB, "/v1/runs/another").await.0, 404);
}
