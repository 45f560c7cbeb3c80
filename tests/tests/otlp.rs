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
    common::v1::any_value::Value,
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

// The test waits for processes while its collector serves: that takes two threads.
#[tokio::test(flavor = "multi_thread")]
async fn a_generation_is_a_span_in_its_caller_s_trace_without_its_prompt() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (send, mut received) = mpsc::unbounded_channel();
    let server = tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(TraceServiceServer::new(Collector(send)))
            .serve_with_incoming(TcpListenerStream::new(listener)),
    );

    let brain = Brain::start(BrainOptions::fake(&["--otlp-endpoint", &endpoint]));
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
    // What has not been exported yet is exported at the end.
    brain.program.terminate();
    let end = brain.program.finish();
    assert_eq!(end.code, Some(0), "{}", end.stderr);
    server.abort();

    let mut in_trace = Vec::new();
    while let Ok(export) = received.try_recv() {
        assert!(
            !format!("{export:?}").contains(CANARY),
            "the prompt was exported"
        );
        for resource in export.resource_spans {
            let service = resource
                .resource
                .unwrap()
                .attributes
                .into_iter()
                .find_map(|attribute| {
                    (attribute.key == "service.name")
                        .then(|| attribute.value.unwrap().value.unwrap())
                });
            assert_eq!(service, Some(Value::StringValue("brain".to_owned())));
            for span in resource
                .scope_spans
                .into_iter()
                .flat_map(|scope| scope.spans)
            {
                let trace: String = span
                    .trace_id
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect();
                if trace == TRACE {
                    in_trace.push(span.name);
                }
            }
        }
    }
    assert!(
        !in_trace.is_empty(),
        "no span of the caller's trace was exported"
    );
    assert!(!end.stderr.contains(CANARY), "the prompt was logged");
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
