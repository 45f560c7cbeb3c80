//! W3C trace context in gRPC metadata: what a client traces and the generation it asked for become one
//! trace. Without a context nothing is added; pilot, which exports no traces, has none of its own.

use opentelemetry::{
    Context,
    propagation::{Extractor, Injector, TextMapPropagator as _},
};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use tonic::metadata::{KeyRef, MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

/// Client side: writes the current span's context into `metadata`.
pub fn inject_current(metadata: &mut MetadataMap) {
    inject(&Span::current().context(), metadata);
}

/// Server side: makes the caller's span the parent of `span`. A malformed or absent context
/// leaves `span` a root.
pub fn adopt_parent(span: &Span, metadata: &MetadataMap) {
    // Fails only for a span that was already entered or that nothing records.
    let _ = span.set_parent(extract(metadata));
}

fn inject(context: &Context, metadata: &mut MetadataMap) {
    TraceContextPropagator::new().inject_context(context, &mut Writer(metadata));
}

fn extract(metadata: &MetadataMap) -> Context {
    TraceContextPropagator::new().extract(&Reader(metadata))
}

struct Writer<'a>(&'a mut MetadataMap);

impl Injector for Writer<'_> {
    fn set(&mut self, key: &str, value: String) {
        let key = MetadataKey::from_bytes(key.as_bytes());
        if let (Ok(key), Ok(value)) = (key, MetadataValue::try_from(value)) {
            self.0.insert(key, value);
        }
    }
}

struct Reader<'a>(&'a MetadataMap);

impl Extractor for Reader<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0
            .keys()
            .filter_map(|key| match key {
                KeyRef::Ascii(key) => Some(key.as_str()),
                KeyRef::Binary(_) => None,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::trace::{
        SpanContext, SpanId, TraceContextExt as _, TraceFlags, TraceId, TraceState,
    };

    use super::*;

    fn remote(trace: u128, span: u64) -> SpanContext {
        SpanContext::new(
            TraceId::from(trace),
            SpanId::from(span),
            TraceFlags::SAMPLED,
            true,
            TraceState::default(),
        )
    }

    #[test]
    fn a_context_survives_the_metadata() {
        let sent = remote(7 << 100 | 5, 9);
        let mut metadata = MetadataMap::new();
        inject(
            &Context::new().with_remote_span_context(sent.clone()),
            &mut metadata,
        );
        assert_eq!(*extract(&metadata).span().span_context(), sent);
    }

    #[test]
    fn hostile_headers_give_no_parent() {
        for value in ["", "00", "zz-00-00-00", "00-0-0-01", &"f".repeat(5000)] {
            let mut metadata = MetadataMap::new();
            metadata.insert("traceparent", value.parse().unwrap());
            assert!(
                !extract(&metadata).span().span_context().is_valid(),
                "{value:.20}"
            );
        }
    }

    #[test]
    fn without_a_span_nothing_is_sent() {
        let mut metadata = MetadataMap::new();
        inject_current(&mut metadata);
        assert!(metadata.is_empty());
    }
}
