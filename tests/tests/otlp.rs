//! What brain exports over OTLP, received by a collector of this test's own.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use marathon_proto::brain::GenerateRequest;
use marathon_tests::{Brain, BrainOptions, fake_spec};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use tokio::{net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

const CANARY: &str = "canary-prompt-that-no-telemetry-may-hold";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

struct Collector(mpsc::UnboundedSender<ExportTraceServiceRequest>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector, where it listens, and what it receives.
struct Collecting {
    endpoint: String,
    received: mpsc::UnboundedReceiver<ExportTraceServiceRequest>,
    server: tokio::task::JoinHandle<Result<(), tonic::transport::Error>>,
}

impl Collecting {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (send, received) = mpsc::unbounded_channel();
        let server = tokio::spawn(
            tonic::transport::Server::builder()
                .add_service(TraceServiceServer::new(Collector(send)))
                .serve_with_incoming(TcpListenerStream::new(listener)),
        );
        Self {
            endpoint,
            received,
            server,
        }
    }

    /// Ends brain, which exports what it has not exported yet: the spans of the caller's trace.
    fn end(mut self, brain: Brain) -> Vec<Span> {
        brain.program.terminate();
        let end = brain.program.finish();
        assert_eq!(end.code, Some(0), "{}", end.stderr);
        assert!(!end.stderr.contains(CANARY), "the prompt was logged");
        self.server.abort();
        let mut in_trace = Vec::new();
        while let Ok(export) = self.received.try_recv() {
            assert!(
                !format!("{export:?}").contains(CANARY),
                "the prompt was exported"
            );
            for resource in export.resource_spans {
                let attributes = resource.resource.unwrap().attributes;
                assert_eq!(
                    value(&attributes, "service.name"),
                    Some(Value::StringValue("brain".to_owned()))
                );
                let spans = resource
                    .scope_spans
                    .into_iter()
                    .flat_map(|scope| scope.spans);
                in_trace.extend(spans.filter(|span| hex(&span.trace_id) == TRACE));
            }
        }
        in_trace
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn value(attributes: &[KeyValue], key: &str) -> Option<Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.clone()?.value
}

// The tests wait for processes while their collectors serve: that takes two threads.
#[tokio::test(flavor = "multi_thread")]
async fn a_generation_is_a_span_in_its_caller_s_trace_without_its_prompt() {
    let collecting = Collecting::start().await;
    let brain = Brain::start(BrainOptions::fake(&[
        "--otlp-endpoint",
        &collecting.endpoint,
    ]));
    let mut spec = fake_spec(1, 20);
    spec.prompt = Some(marathon_proto::brain::generation_spec::Prompt::PromptText(
        CANARY.to_owned(),
    ));
    let mut request = Request::new(GenerateRequest {
        generation_id: "traced".to_owned(),
        spec: Some(spec),
        from_index: 0,
    });
    let parent = format!("00-{TRACE}-b7ad6b7169203331-01").parse().unwrap();
    request.metadata_mut().insert("traceparent", parent);
    let mut stream = brain.client().generate(request).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
    let spans = collecting.end(brain);
    assert!(
        !spans.is_empty(),
        "no span of the caller's trace was exported"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_over_http_has_the_conventions_attributes_in_its_caller_s_trace() {
    let collecting = Collecting::start().await;
    let brain = Brain::start(BrainOptions {
        http: true,
        ..BrainOptions::fake(&["--otlp-endpoint", &collecting.endpoint])
    });
    let _ = rustls::crypto::ring::default_provider().install_default();
    let probe = reqwest::Client::new()
        .get(format!("{}/health", brain.http))
        .header("traceparent", format!("00-{TRACE}-b7ad6b7169203331-01"));
    assert_eq!(probe.send().await.unwrap().status(), 200);
    for stream in [false, true] {
        let body = serde_json::json!({
            "messages": [{"role": "user", "content": CANARY}], "max_tokens": 20, "ignore_eos": true,
            "seed": 5, "temperature": 0.5, "stream": stream,
        });
        assert_eq!(post(&brain, &body).await, 200);
    }
    let wrong = serde_json::json!({
        "messages": [{"role": "user", "content": CANARY}], "top_p": 7,
    });
    assert_eq!(post(&brain, &wrong).await, 400);
    let spans = collecting.end(brain);
    let named = |name: &str| -> Vec<&Span> {
        spans
            .iter()
            .filter(|span| span.name.starts_with(name))
            .collect()
    };
    let requests = named("POST /v1/chat/completions");
    let generations = named("chat ");
    assert_eq!((requests.len(), generations.len()), (3, 3), "{spans:?}");
    assert!(named("GET /health").is_empty(), "{spans:?}");
    let statuses: Vec<_> = requests
        .iter()
        .map(|span| value(&span.attributes, "http.response.status_code"))
        .collect();
    for status in [200, 400] {
        assert!(
            statuses.contains(&Some(Value::IntValue(status))),
            "{statuses:?}"
        );
    }
    let failed = |span: &&Span| value(&span.attributes, "error.type").is_some();
    let (refused, answered): (Vec<_>, Vec<_>) = generations.into_iter().partition(failed);
    assert_eq!(refused.len(), 1, "{refused:?}");
    let streamed = |span: &&&Span| {
        value(&span.attributes, "gen_ai.request.stream") == Some(Value::BoolValue(true))
            && value(&span.attributes, "gen_ai.response.time_to_first_chunk").is_some()
    };
    assert_eq!(answered.iter().filter(streamed).count(), 1, "{answered:?}");
    for span in answered {
        assert!(
            requests
                .iter()
                .any(|request| request.span_id == span.parent_span_id),
            "{span:?}"
        );
        for (key, expected) in [
            ("gen_ai.operation.name", Value::StringValue("chat".into())),
            (
                "gen_ai.provider.name",
                Value::StringValue("marathon".into()),
            ),
            ("gen_ai.request.seed", Value::IntValue(5)),
            ("gen_ai.request.temperature", Value::DoubleValue(0.5)),
            ("gen_ai.request.max_tokens", Value::IntValue(20)),
            ("gen_ai.usage.output_tokens", Value::IntValue(20)),
        ] {
            assert_eq!(value(&span.attributes, key), Some(expected), "{key}");
        }
        let reasons = value(&span.attributes, "gen_ai.response.finish_reasons");
        assert!(format!("{reasons:?}").contains("length"), "{reasons:?}");
    }
}

/// Asks within the caller's trace, reads the answer, and says its status.
async fn post(brain: &Brain, body: &serde_json::Value) -> u16 {
    let request = reqwest::Client::new()
        .post(format!("{}/v1/chat/completions", brain.http))
        .header("traceparent", format!("00-{TRACE}-b7ad6b7169203331-01"))
        .json(body);
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    response.bytes().await.unwrap();
    status
}

#[tokio::test]
async fn a_collector_that_is_away_is_no_error() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let brain = Brain::start(BrainOptions::fake(&["--otlp-endpoint", &endpoint]));
    marathon_tests::generate(&mut brain.client(), "untraced", Some(fake_spec(1, 20)), 0)
        .await
        .unwrap();
    brain.program.terminate();
    let end = brain.program.finish();
    assert_eq!(end.code, Some(0), "{}", end.stderr);
}
