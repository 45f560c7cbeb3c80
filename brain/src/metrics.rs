//! The engine's counters as OpenTelemetry metrics. Without a collector nothing is read.

use opentelemetry::{KeyValue, global, metrics::Meter};

use crate::{engine::Engine, sched::stats::Stats};

/// Name, what it counts, and where it is.
type Counter = (&'static str, &'static str, fn(&Stats) -> u64);
type Gauge = (&'static str, &'static str, fn(&Stats) -> usize);

const COUNTERS: [Counter; 8] = [
    ("brain.prompt.tokens", "Prompt tokens submitted", |s| {
        s.prompt_tokens
    }),
    (
        "brain.prompt.cached",
        "Prompt tokens taken from the cache",
        |s| s.cached_tokens,
    ),
    ("brain.generated.tokens", "Tokens emitted", |s| {
        s.generated_tokens
    }),
    ("brain.draft.tokens", "Drafts checked", |s| s.drafted_tokens),
    ("brain.draft.accepted", "Drafts emitted", |s| {
        s.accepted_tokens
    }),
    ("brain.rounds", "Times that a sequence emitted", |s| {
        s.rounds
    }),
    ("brain.steps", "Steps computed", |s| s.steps),
    (
        "brain.preemptions",
        "Times that a sequence lost its blocks",
        |s| s.preemptions,
    ),
];

const GAUGES: [Gauge; 2] = [
    ("brain.running", "Generations being computed", |s| s.running),
    ("brain.waiting", "Generations waiting", |s| s.waiting),
];

/// Registers the engine's counters with the process's meter.
pub(crate) fn export(engine: Engine) {
    let meter = global::meter("brain");
    for (name, what, read) in COUNTERS {
        let engine = engine.clone();
        meter
            .u64_observable_counter(name)
            .with_description(what)
            .with_callback(move |observer| observer.observe(read(&engine.stats().sched), &[]))
            .build();
    }
    for (name, what, read) in GAUGES {
        let engine = engine.clone();
        meter
            .u64_observable_gauge(name)
            .with_description(what)
            .with_callback(move |observer| {
                observer.observe(read(&engine.stats().sched) as u64, &[])
            })
            .build();
    }
    blocks(&meter, engine);
}

/// KV blocks by layer group and by who has them.
fn blocks(meter: &Meter, engine: Engine) {
    meter
        .u64_observable_gauge("brain.kv.blocks")
        .with_description("KV blocks: used by sequences, kept for reuse, and in all")
        .with_callback(move |observer| {
            let stats = engine.stats().sched;
            for (group, state, blocks) in [
                ("full", "used", stats.full_blocks_used),
                ("full", "kept", stats.full_blocks_kept),
                ("full", "all", stats.full_blocks),
                ("sliding", "used", stats.sliding_blocks_used),
                ("sliding", "kept", stats.sliding_blocks_kept),
                ("sliding", "all", stats.sliding_blocks),
            ] {
                let labels = [KeyValue::new("group", group), KeyValue::new("state", state)];
                observer.observe(blocks as u64, &labels);
            }
        })
        .build();
}
