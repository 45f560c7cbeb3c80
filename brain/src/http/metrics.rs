//! `GET /metrics`: counters and times for Prometheus.
//!
//! What means the same as in vLLM has vLLM's name, so that its dashboards and its benchmark read
//! it; what is ours begins with `brain:`.

use std::sync::Arc;

use axum::{
    extract::State,
    http::{HeaderName, header},
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text},
    metrics::{
        MetricType,
        counter::{ConstCounter, Counter},
        family::Family,
        gauge::ConstGauge,
        histogram::Histogram,
    },
    registry::Registry,
};

use super::{app::App, error::ApiError};
use crate::{
    engine::{Engine, EngineStats, Observer, TierStats},
    sched::{request::FinishReason, sequence::Outcome, stats::Stats},
    serving::Serving,
};

/// Seconds, from a step to a working day.
const SECONDS: [f64; 16] = [
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0, 1800.0, 7200.0,
    28800.0,
];
/// Tokens of a request.
const TOKENS: [f64; 12] = [
    1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0,
];
/// Positions of drafts that are told apart.
const POSITIONS: usize = 16;

/// The metrics of one engine.
#[derive(Debug)]
pub(super) struct Metrics {
    registry: Registry,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PositionLabel {
    position: usize,
}

/// What is measured while the engine works.
#[derive(Debug)]
struct Measured {
    drafts: Counter,
    by_position: Vec<Counter>,
    finished: Family<ReasonLabel, Counter>,
    ttft: Histogram,
    queue: Histogram,
    prefill: Histogram,
    decode: Histogram,
    inference: Histogram,
    whole: Histogram,
    per_token: Histogram,
    prompt: Histogram,
    generated: Histogram,
}

impl Metrics {
    /// Metrics that follow this engine from now on.
    pub(super) fn of(serving: &Serving) -> Self {
        let labels = [
            ("model_name".into(), serving.facts.name.clone().into()),
            ("engine".into(), "0".into()),
        ];
        let mut registry = Registry::with_labels(labels.into_iter());
        let measured = Measured::register(&mut registry);
        serving.engine.observe(Arc::new(measured));
        registry.register_collector(Box::new(Counted(serving.engine.clone())));
        Self { registry }
    }

    fn text(&self) -> Result<String, std::fmt::Error> {
        let mut out = String::new();
        text::encode(&mut out, &self.registry)?;
        Ok(out)
    }
}

impl Measured {
    fn register(registry: &mut Registry) -> Self {
        let drafts = Counter::default();
        registry.register(
            "vllm:spec_decode_num_drafts",
            "Rounds that checked drafts",
            drafts.clone(),
        );
        let positions = Family::<PositionLabel, Counter>::default();
        registry.register(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by their place in the round",
            positions.clone(),
        );
        let by_position = (0..POSITIONS)
            .map(|position| positions.get_or_create_owned(&PositionLabel { position }))
            .collect();
        let finished = Family::<ReasonLabel, Counter>::default();
        registry.register(
            "vllm:request_success",
            "Generations that ended, by reason",
            finished.clone(),
        );
        let mut histogram = |name: &str, help: &str, buckets: &[f64]| {
            let histogram = Histogram::new(buckets.iter().copied());
            registry.register(name, help, histogram.clone());
            histogram
        };
        let mut seconds = |name: &str, help: &str| histogram(name, help, &SECONDS);
        Self {
            drafts,
            by_position,
            finished,
            ttft: seconds(
                "vllm:time_to_first_token_seconds",
                "From submission to the first token",
            ),
            queue: seconds("vllm:request_queue_time_seconds", "Waiting for blocks"),
            prefill: seconds("vllm:request_prefill_time_seconds", "Computing the prompt"),
            decode: seconds("vllm:request_decode_time_seconds", "Computing the answer"),
            inference: seconds(
                "vllm:request_inference_time_seconds",
                "Computing prompt and answer",
            ),
            whole: seconds(
                "vllm:e2e_request_latency_seconds",
                "From submission to the end",
            ),
            per_token: seconds(
                "vllm:request_time_per_output_token_seconds",
                "Time of a token after the first",
            ),
            prompt: histogram(
                "vllm:request_prompt_tokens",
                "Tokens of the prompt",
                &TOKENS,
            ),
            generated: histogram(
                "vllm:request_generation_tokens",
                "Tokens of the answer",
                &TOKENS,
            ),
        }
    }
}

impl Observer for Measured {
    fn round(&self, _emitted: usize, drafted: usize, accepted: usize) {
        if drafted > 0 {
            self.drafts.inc();
        }
        self.by_position.iter().take(accepted).for_each(|position| {
            position.inc();
        });
    }

    fn finished(&self, outcome: &Outcome) {
        let reason = match outcome.reason {
            FinishReason::StopToken(_) | FinishReason::StopString => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "abort",
            FinishReason::Failed(_) => "error",
        };
        self.finished
            .get_or_create_owned(&ReasonLabel {
                finished_reason: reason,
            })
            .inc();
        let times = &outcome.timings;
        let inference = times.prefill + times.decode;
        for (histogram, time) in [
            (&self.ttft, times.ttft),
            (&self.queue, times.queue),
            (&self.prefill, times.prefill),
            (&self.decode, times.decode),
            (&self.inference, inference),
            (&self.whole, times.queue + inference),
        ] {
            histogram.observe(time.as_secs_f64());
        }
        let usage = &outcome.usage;
        if usage.generated > 1 {
            let after_first = (usage.generated - 1) as f64;
            self.per_token
                .observe(times.decode.as_secs_f64() / after_first);
        }
        self.prompt.observe(usage.prompt as f64);
        self.generated.observe(usage.generated as f64);
    }
}

/// What the engine counts itself, read when it is asked for.
#[derive(Debug)]
struct Counted(Engine);

type Count = (&'static str, &'static str, fn(&Stats) -> u64);
type Level = (&'static str, &'static str, fn(&Stats) -> f64);

const COUNTS: [Count; 10] = [
    ("vllm:prompt_tokens", "Prompt tokens", |s| s.prompt_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Prompt tokens taken from the cache",
        |s| s.cached_tokens,
    ),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the cache",
        |s| s.prompt_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the cache",
        |s| s.cached_tokens,
    ),
    ("vllm:generation_tokens", "Tokens generated", |s| {
        s.generated_tokens
    }),
    ("vllm:spec_decode_num_draft_tokens", "Drafts checked", |s| {
        s.drafted_tokens
    }),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Drafts accepted",
        |s| s.accepted_tokens,
    ),
    (
        "vllm:num_preemptions",
        "Times that a sequence lost its blocks",
        |s| s.preemptions,
    ),
    ("brain:rounds", "Times that a sequence emitted", |s| {
        s.rounds
    }),
    ("brain:steps", "Steps of the device", |s| s.steps),
];

const LEVELS: [Level; 4] = [
    (
        "vllm:num_requests_running",
        "Generations being computed",
        |s| s.running as f64,
    ),
    ("vllm:num_requests_waiting", "Generations waiting", |s| {
        s.waiting as f64
    }),
    (
        "vllm:kv_cache_usage_perc",
        "Share of the KV blocks of full attention that sequences hold, from 0 to 1",
        |s| s.full_blocks_used as f64 / s.full_blocks.max(1) as f64,
    ),
    (
        "brain:sliding_cache_usage",
        "Share of the KV blocks of sliding attention that sequences hold, from 0 to 1",
        |s| s.sliding_blocks_used as f64 / s.sliding_blocks.max(1) as f64,
    ),
];

type TierCount = (&'static str, &'static str, fn(&TierStats) -> u64);

const TIER_COUNTS: [TierCount; 3] = [
    (
        "brain:spilled_bytes",
        "Bytes copied from the device, their blocks being needed",
        |t| t.spilled_bytes,
    ),
    (
        "brain:loaded_bytes",
        "Bytes of cached prompts that came back to the device",
        |t| t.loaded_bytes,
    ),
    (
        "brain:fetched_bytes",
        "Bytes of cached prompts read from disk for requests",
        |t| t.fetched_bytes,
    ),
];

type TierLevel = (&'static str, &'static str, fn(&TierStats) -> f64);

const TIER_LEVELS: [TierLevel; 2] = [
    (
        "brain:host_cache_bytes",
        "Bytes of cached prompts in this machine's memory",
        |t| t.host_bytes as f64,
    ),
    (
        "brain:snapshot_pieces_waiting",
        "Pieces of snapshots that wait to be written",
        |t| t.saving as f64,
    ),
];

impl Collector for Counted {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let EngineStats {
            sched,
            tiers,
            uptime,
            ..
        } = self.0.stats();
        let counts = COUNTS.map(|(name, help, read)| (name, help, read(&sched)));
        let tier_counts = TIER_COUNTS.map(|(name, help, read)| (name, help, read(&tiers)));
        for (name, help, count) in counts.into_iter().chain(tier_counts) {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(count).encode(metric)?;
        }
        let levels = LEVELS.map(|(name, help, read)| (name, help, read(&sched)));
        let tier_levels = TIER_LEVELS.map(|(name, help, read)| (name, help, read(&tiers)));
        let up = (
            "brain:uptime_seconds",
            "Since brain started",
            uptime.as_secs_f64(),
        );
        for (name, help, level) in levels.into_iter().chain(tier_levels).chain([up]) {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(level).encode(metric)?;
        }
        Ok(())
    }
}

/// `GET /metrics`
pub(super) async fn show(
    State(app): State<App>,
) -> Result<([(HeaderName, &'static str); 1], String), ApiError> {
    const FORM: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    let text = match app.metrics() {
        // Nothing is counted before there is a model.
        None => "# EOF\n".to_owned(),
        Some(metrics) => metrics.text().map_err(|_| ApiError::internal())?,
    };
    Ok(([(header::CONTENT_TYPE, FORM)], text))
}
