//! Spans: one of a request, in its caller's trace, and below it one of each generation, with the
//! attributes of OpenTelemetry's conventions for generative AI. No prompt and no answer is in them.

use axum::{
    extract::{MatchedPath, Request},
    http::{HeaderMap, HeaderName},
    middleware::Next,
    response::Response,
};
use marathon_proto::{
    brain::{GenerationSpec, generation_spec::Prompt},
    trace::adopt_parent,
};
use opentelemetry::{Array, StringValue, Value, trace::Status};
use tonic::metadata::MetadataMap;
use tracing::{Instrument as _, Span, info_span};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use super::{finish::Finish, generation::Ask};
use crate::serving::{Ending, Serving};

const CONTEXT: [HeaderName; 2] = [
    HeaderName::from_static("traceparent"),
    HeaderName::from_static("tracestate"),
];

/// What probes and scrapers ask for, over and over.
const UNTRACED: [&str; 3] = ["/health", "/ready", "/metrics"];

/// Answers within the request's span.
pub(super) async fn trace(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>();
    let route = route.map(|route| route.as_str().to_owned());
    if route
        .as_deref()
        .is_some_and(|route| UNTRACED.contains(&route))
    {
        return next.run(request).await;
    }
    // Of any name: a name that is not HTTP's own would make as many kinds of spans.
    let method = match request.method().as_str() {
        known @ ("GET" | "POST" | "DELETE" | "HEAD" | "OPTIONS" | "PUT" | "PATCH") => known,
        _ => "_OTHER",
    };
    let method = method.to_owned();
    let name = match (&route, method.as_str()) {
        (_, "_OTHER") => "HTTP".to_owned(),
        (None, _) => method.clone(),
        (Some(route), _) => format!("{method} {route}"),
    };
    let span = info_span!("http", otel.name = name, otel.kind = "server");
    adopt_parent(&span, &context(request.headers()));
    span.set_attribute("http.request.method", method);
    span.set_attribute("url.path", request.uri().path().to_owned());
    if let Some(route) = route {
        span.set_attribute("http.route", route);
    }
    let response = next.run(request).instrument(span.clone()).await;
    let status = response.status();
    span.set_attribute("http.response.status_code", i64::from(status.as_u16()));
    if status.is_server_error() {
        failed(&span, status.as_str());
    }
    response
}

/// Notes that what the span covers failed, and how.
pub(super) fn failed(span: &Span, kind: &str) {
    span.set_attribute("error.type", kind.to_owned());
    span.set_status(Status::error(""));
}

/// The caller's trace context, as gRPC's metadata hold it.
fn context(headers: &HeaderMap) -> MetadataMap {
    let given = CONTEXT.into_iter().filter_map(|name| {
        let value = headers.get(&name)?.clone();
        Some((name, value))
    });
    MetadataMap::from_headers(given.collect())
}

/// The span of one generation, below its request's.
pub(super) fn generation(serving: &Serving, ask: &Ask, spec: &GenerationSpec) -> Span {
    let operation = match spec.prompt {
        Some(Prompt::PromptTokens(_) | Prompt::PromptText(_)) => "text_completion",
        _ => "chat",
    };
    let model = &serving.facts.name;
    let span = info_span!(
        parent: &ask.span,
        "generation",
        otel.name = %format!("{operation} {model}"),
        otel.kind = "internal",
        response_id = ask.shown_id,
    );
    let sampling = spec.sampling.clone().unwrap_or_default();
    let set = |name: &'static str, value: Option<Value>| {
        if let Some(value) = value {
            span.set_attribute(name, value);
        }
    };
    let float = |value: Option<f32>| value.map(|value| Value::F64(value.into()));
    let integer = |value: Option<u32>| value.map(|value| Value::I64(value.into()));
    set("gen_ai.operation.name", Some(operation.into()));
    set("gen_ai.provider.name", Some("marathon".into()));
    set("gen_ai.request.model", Some(model.clone().into()));
    set("gen_ai.response.model", Some(model.clone().into()));
    set("gen_ai.response.id", Some(ask.shown_id.clone().into()));
    let several = (ask.n > 1).then_some(Value::I64(ask.n as i64));
    set("gen_ai.request.choice.count", several);
    let run = Some(&spec.run_id).filter(|run| !run.is_empty());
    set("gen_ai.conversation.id", run.map(|run| run.clone().into()));
    set("gen_ai.request.stream", ask.streams.then_some(true.into()));
    set("gen_ai.request.temperature", float(sampling.temperature));
    set("gen_ai.request.top_p", float(sampling.top_p));
    set("gen_ai.request.top_k", integer(sampling.top_k));
    set("gen_ai.request.max_tokens", integer(sampling.max_tokens));
    set(
        "gen_ai.request.seed",
        sampling.seed.map(|seed| Value::I64(seed as i64)),
    );
    set(
        "gen_ai.request.presence_penalty",
        float(sampling.presence_penalty),
    );
    set(
        "gen_ai.request.frequency_penalty",
        float(sampling.frequency_penalty),
    );
    span
}

/// Notes how a generation ended that `streams` to its client.
pub(super) fn finished(span: &Span, streams: bool, finish: &Finish, ending: &Ending) {
    let usage = &ending.outcome.usage;
    let reasons = vec![StringValue::from(finish.reason)];
    span.set_attribute(
        "gen_ai.response.finish_reasons",
        Value::Array(Array::String(reasons)),
    );
    for (name, count) in [
        ("gen_ai.usage.input_tokens", usage.prompt),
        ("gen_ai.usage.cache_read.input_tokens", usage.cached),
        ("gen_ai.usage.output_tokens", usage.generated),
        (
            "gen_ai.usage.reasoning.output_tokens",
            ending.reasoning_tokens,
        ),
        ("marathon.usage.drafted_tokens", usage.drafted),
        ("marathon.usage.accepted_tokens", usage.accepted),
    ] {
        span.set_attribute(name, count as i64);
    }
    if streams {
        let first = ending.outcome.timings.ttft.as_secs_f64();
        span.set_attribute("gen_ai.response.time_to_first_chunk", first);
    }
    if finish.reason == "error" {
        failed(span, "generation_failed");
    }
}
