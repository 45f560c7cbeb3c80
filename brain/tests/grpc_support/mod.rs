//! A gRPC front end of a test's own over a fake device, and what its streams bring.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "every test binary uses its own part; a test that cannot go on has failed"
)]

use std::net::SocketAddr;

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
        self as pb, brain_client::BrainClient, brain_server::BrainServer, generate_event::Event,
        generation_spec::Prompt, turn_delta::Delta,
    },
    net::{self, ListenAddr, MAX_MESSAGE_BYTES},
    status::Problem,
};
use tokio_stream::StreamExt as _;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Code, Status, transport::Channel};

/// A server of this test's own; it ends when this is dropped.
pub struct Server {
    pub serving: Serving,
    pub client: BrainClient<Channel>,
    pub end: DropGuard,
}

pub async fn start(flags: &[&str]) -> Server {
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
    tokio::spawn(router.serve_with_incoming_shutdown(listener.incoming(None), until));
    let client = BrainClient::connect(format!("http://{addr}"))
        .await
        .unwrap();
    Server {
        serving,
        client,
        end: end.drop_guard(),
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    pub started: pb::Started,
    pub ids: Vec<u32>,
    pub text: String,
    pub turn: pb::AssistantTurn,
    pub rounds: Vec<(u32, u32, usize)>,
    pub finished: pb::Finished,
}

impl Server {
    pub async fn read(
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

    pub async fn refused(
        &mut self,
        id: &str,
        spec: Option<pb::GenerationSpec>,
        from: u32,
    ) -> (Code, Problem) {
        let status = self.read(id, spec, from).await.unwrap_err();
        let problem = Problem::from_status(&status).expect("a problem inside the status");
        (status.code(), problem)
    }

    pub async fn detokenize(&mut self, ids: &[u32]) -> String {
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

pub fn apply(turn: &mut pb::AssistantTurn, delta: pb::TurnDelta) {
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

pub fn sampling(max_tokens: u32) -> pb::Sampling {
    pb::Sampling {
        max_tokens: Some(max_tokens),
        ignore_eos: Some(true),
        seed: Some(7),
        ..pb::Sampling::default()
    }
}

pub fn spec(prompt: &[u32], sampling: pb::Sampling) -> pb::GenerationSpec {
    pb::GenerationSpec {
        prompt: Some(Prompt::PromptTokens(pb::TokenIds {
            ids: prompt.to_vec(),
        })),
        sampling: Some(sampling),
        ..pb::GenerationSpec::default()
    }
}

pub fn user(text: &str) -> pb::Conversation {
    pb::Conversation {
        messages: vec![pb::Message {
            role: "user".into(),
            content: text.into(),
            ..pb::Message::default()
        }],
        ..pb::Conversation::default()
    }
}
