//! What a request took, in OpenAI's shapes.

use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    sched::sequence::{Timings, Usage},
    serving::Ending,
};

/// Counts over all choices of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) prompt: usize,
    pub(super) cached: usize,
    pub(super) generated: usize,
    pub(super) reasoning: usize,
    pub(super) drafted: usize,
    pub(super) accepted: usize,
    pub(super) rounds: usize,
}

#[derive(Serialize)]
struct OpenAiUsage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: usize,
}

#[derive(Serialize)]
struct CompletionDetails {
    reasoning_tokens: usize,
    accepted_prediction_tokens: usize,
    rejected_prediction_tokens: usize,
}

impl Tally {
    /// Adds an ended choice; `first`: of its prompt, which counts once however many answers it has.
    pub(super) fn add(&mut self, ending: &Ending, first: bool) {
        let Usage {
            prompt,
            cached,
            generated,
            drafted,
            accepted,
            rounds,
        } = ending.outcome.usage;
        if first {
            self.prompt += prompt;
            self.cached += cached;
        }
        self.generated += generated;
        self.reasoning += ending.reasoning_tokens;
        self.drafted += drafted;
        self.accepted += accepted;
        self.rounds += rounds;
    }

    /// OpenAI's `usage` of chat completions and completions.
    pub(super) fn openai(&self) -> Value {
        let usage = OpenAiUsage {
            prompt_tokens: self.prompt,
            completion_tokens: self.generated,
            total_tokens: self.prompt + self.generated,
            prompt_tokens_details: PromptDetails {
                cached_tokens: self.cached,
            },
            completion_tokens_details: CompletionDetails {
                reasoning_tokens: self.reasoning,
                accepted_prediction_tokens: self.accepted,
                rejected_prediction_tokens: self.drafted.saturating_sub(self.accepted),
            },
        };
        json!(usage)
    }

    /// Times and drafting of a request with one choice, under vLLM's names.
    pub(super) fn metrics(&self, timings: &Timings) -> Value {
        let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
        let decode = timings.decode.as_secs_f64();
        let after_first = self.generated.saturating_sub(1) as f64;
        json!({
            "time_to_first_token_ms": ms(timings.ttft),
            "queue_time_ms": ms(timings.queue),
            "prefill_time_ms": ms(timings.prefill),
            "decode_time_ms": ms(timings.decode),
            "tokens_per_second": (decode > 0.0).then(|| after_first / decode),
            "speculative_decoding": {
                "num_rounds": self.rounds,
                "num_draft_tokens": self.drafted,
                "num_accepted_tokens": self.accepted,
            },
        })
    }
}
