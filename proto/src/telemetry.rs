//! Logs, and traces and metrics over OTLP when an endpoint is configured.
//!
//! Logs go to stderr: stdout belongs to what a program prints for its user. Prompts, tool output
//! and secrets are never logged; what is logged are ids, counts and times.

use std::{fmt, io, str::FromStr, time::Duration};

use opentelemetry::{KeyValue, global, trace::TracerProvider as _};
use opentelemetry_otlp::WithExportConfig as _;
use opentelemetry_sdk::{
    Resource, metrics::SdkMeterProvider, propagation::TraceContextPropagator,
    trace::SdkTracerProvider,
};
use serde::{Deserialize, Serialize};
use tracing_subscriber::{
    EnvFilter, Layer as _, Registry, layer::SubscriberExt as _, util::SubscriberInitExt as _,
};

/// How long the last flush may take, at most: an absent collector must not hold up an exit.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, for collectors.
    Json,
}

impl fmt::Display for LogFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

impl FromStr for LogFormat {
    type Err = TelemetryError;

    fn from_str(text: &str) -> Result<Self, TelemetryError> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err(TelemetryError::Format(text.to_owned())),
        }
    }
}

/// Why telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The log format has another name.
    #[error("log format `{0}` does not exist: write text or json")]
    Format(String),
    /// The filter does not parse.
    #[error("log filter `{filter}` is wrong: {problem}; write a level or TARGET=LEVEL,…")]
    Filter {
        /// As given.
        filter: String,
        /// What the parser said.
        problem: String,
    },
    /// The endpoint is no URL.
    #[error("OTLP endpoint `{endpoint}` is wrong: {problem}; write http://HOST:PORT")]
    Endpoint {
        /// As given.
        endpoint: String,
        /// What the exporter said.
        problem: String,
    },
    /// Telemetry was set up before in this process.
    #[error("telemetry is already set up: {0}")]
    Twice(String),
}

/// What a program wants of its telemetry.
#[derive(Clone, Debug)]
pub struct Telemetry {
    /// `service.name` of traces and metrics.
    pub service: &'static str,
    /// `service.version`.
    pub version: &'static str,
    /// How log lines look.
    pub format: LogFormat,
    /// A level (`info`), or several `TARGET=LEVEL` separated by commas.
    pub filter: String,
    /// `http://HOST:PORT` of an OTLP gRPC collector; `None`: logs alone.
    pub otlp_endpoint: Option<String>,
}

impl Telemetry {
    /// Starts logging, and exporting if configured. Call it inside the tokio runtime, once.
    ///
    /// # Errors
    /// [`TelemetryError`] when a setting is wrong or the process already has telemetry. A
    /// collector that is away is no error: what it misses is dropped.
    pub fn start(&self) -> Result<Guard, TelemetryError> {
        let export = self
            .otlp_endpoint
            .as_deref()
            .map(|url| self.export(url))
            .transpose()?;
        let traces = export.as_ref().map(|export| {
            tracing_opentelemetry::layer().with_tracer(export.tracer.tracer(self.service))
        });
        let logs = self.logs(io::stderr)?;
        Registry::default()
            .with(traces)
            .with(logs)
            .try_init()
            .map_err(|error| TelemetryError::Twice(error.to_string()))?;
        if let Some(export) = &export {
            global::set_text_map_propagator(TraceContextPropagator::new());
            global::set_meter_provider(export.meter.clone());
        }
        Ok(Guard { export })
    }

    fn logs<S, W>(
        &self,
        writer: W,
    ) -> Result<Box<dyn tracing_subscriber::Layer<S> + Send + Sync>, TelemetryError>
    where
        S: tracing::Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>,
        W: for<'w> tracing_subscriber::fmt::MakeWriter<'w> + Send + Sync + 'static,
    {
        let filter = EnvFilter::try_new(&self.filter).map_err(|error| TelemetryError::Filter {
            filter: self.filter.clone(),
            problem: error.to_string(),
        })?;
        let lines = tracing_subscriber::fmt::layer().with_writer(writer);
        Ok(match self.format {
            LogFormat::Text => lines.with_ansi(false).with_filter(filter).boxed(),
            LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
        })
    }

    fn export(&self, url: &str) -> Result<Export, TelemetryError> {
        let wrong = |problem: String| TelemetryError::Endpoint {
            endpoint: url.to_owned(),
            problem,
        };
        let parsed: http::Uri = url.parse().map_err(|error| wrong(format!("{error}")))?;
        if parsed.scheme_str() != Some("http") || parsed.port().is_none() {
            return Err(wrong("scheme or port is missing".to_owned()));
        }
        let resource = Resource::builder()
            .with_service_name(self.service)
            .with_attribute(KeyValue::new("service.version", self.version))
            .build();
        let spans = opentelemetry_otlp::SpanExporter::builder()
            .with_tonic()
            .with_endpoint(url)
            .with_timeout(FLUSH_TIMEOUT)
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        let metrics = opentelemetry_otlp::MetricExporter::builder()
            .with_tonic()
            .with_endpoint(url)
            .with_timeout(FLUSH_TIMEOUT)
            .build()
            .map_err(|error| wrong(error.to_string()))?;
        Ok(Export {
            tracer: SdkTracerProvider::builder()
                .with_resource(resource.clone())
                .with_batch_exporter(spans)
                .build(),
            meter: SdkMeterProvider::builder()
                .with_resource(resource)
                .with_periodic_exporter(metrics)
                .build(),
        })
    }
}

#[derive(Debug)]
struct Export {
    tracer: SdkTracerProvider,
    meter: SdkMeterProvider,
}

/// Flushes on drop. Hold it in `main` until everything else has ended.
#[derive(Debug)]
#[must_use = "dropping it ends the export"]
pub struct Guard {
    export: Option<Export>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(export) = self.export.take() {
            // At exit there is nobody left to tell about a collector that is away.
            let _ = export.tracer.shutdown_with_timeout(FLUSH_TIMEOUT);
            let _ = export.meter.shutdown_with_timeout(FLUSH_TIMEOUT);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    fn telemetry(format: LogFormat, filter: &str) -> Telemetry {
        Telemetry {
            service: "test",
            version: "0",
            format,
            filter: filter.to_owned(),
            otlp_endpoint: None,
        }
    }

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn lines(format: LogFormat, filter: &str) -> Vec<String> {
        let sink = Sink::default();
        let writer = sink.clone();
        let layer = telemetry(format, filter)
            .logs(move || writer.clone())
            .unwrap();
        tracing::subscriber::with_default(Registry::default().with(layer), || {
            tracing::info!(tokens = 7, "step\ndone");
            tracing::debug!("quiet");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn json_is_one_object_a_line() {
        let lines = lines(LogFormat::Json, "info");
        assert_eq!(lines.len(), 1, "{lines:?}");
        let value: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
        assert_eq!(value["tokens"], 7);
        assert_eq!(value["message"], "step\ndone");
        assert_eq!(value["level"], "INFO");
    }

    #[test]
    fn text_has_no_escape_codes() {
        let text = lines(LogFormat::Text, "info").join("\n");
        assert!(
            text.contains("tokens=7") && !text.contains('\u{1b}'),
            "{text}"
        );
    }

    #[test]
    fn the_filter_lets_pass_what_it_names() {
        assert!(lines(LogFormat::Text, "warn").is_empty());
        assert!(lines(LogFormat::Text, "debug").concat().contains("quiet"));
    }

    #[test]
    fn wrong_settings_are_named() {
        let error = "xml".parse::<LogFormat>().unwrap_err().to_string();
        assert!(error.contains("xml") && error.contains("json"), "{error}");
        let error = telemetry(LogFormat::Text, "a=b=c")
            .start()
            .unwrap_err()
            .to_string();
        assert!(error.contains("a=b=c"), "{error}");
        for url in ["", "localhost", "localhost:4317", "ftp://x:1", "http://x"] {
            let wrong = Telemetry {
                otlp_endpoint: Some(url.to_owned()),
                ..telemetry(LogFormat::Text, "info")
            };
            let error = wrong.start().unwrap_err().to_string();
            assert!(error.contains("OTLP endpoint"), "{url}: {error}");
        }
    }
}
