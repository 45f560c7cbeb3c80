//! Turns, ends and counters as the contract shows them.

use marathon_proto::brain as pb;

use crate::{
    engine::{EngineStats, RunUsage},
    sched::{
        request::FinishReason,
        sequence::{Outcome, Timings, Usage},
        types::Logprobs,
    },
    text::turn::{ParsedTurn, TurnEvent, call_id},
};

pub(super) fn turn_delta(event: TurnEvent) -> pb::TurnDelta {
    use pb::turn_delta::Delta;
    let delta = match event {
        TurnEvent::Content(text) => Delta::Content(text),
        TurnEvent::Reasoning(text) => Delta::Reasoning(text),
        TurnEvent::CallStart { index, name } => Delta::ToolCall(pb::ToolCallDelta {
            index: index as u32,
            id: call_id(index),
            name,
            arguments_json: String::new(),
        }),
        TurnEvent::CallArguments { index, json } => Delta::ToolCall(pb::ToolCallDelta {
            index: index as u32,
            arguments_json: json,
            ..pb::ToolCallDelta::default()
        }),
    };
    pb::TurnDelta { delta: Some(delta) }
}

pub(super) fn assistant_turn(turn: &ParsedTurn) -> pb::AssistantTurn {
    pb::AssistantTurn {
        content: turn.content.clone(),
        reasoning: turn.reasoning.clone(),
        tool_calls: turn
            .calls
            .iter()
            .enumerate()
            .map(|(index, call)| pb::ToolCall {
                id: call_id(index),
                name: call.name.clone(),
                arguments_json: call.arguments.clone(),
            })
            .collect(),
    }
}

pub(super) fn logprob(logprobs: &Logprobs) -> pb::TokenLogprob {
    pb::TokenLogprob {
        logprob: logprobs.chosen,
        top: logprobs
            .top
            .iter()
            .map(|&(id, logprob)| pb::TopLogprob { id, logprob })
            .collect(),
    }
}

/// The last event, without the turn.
pub(super) fn finished(outcome: &Outcome, fingerprint: &str) -> pb::Finished {
    let (reason, stop_token, error) = match &outcome.reason {
        FinishReason::StopToken(token) => (pb::FinishReason::Stop, Some(*token), String::new()),
        FinishReason::StopString => (pb::FinishReason::Stop, None, String::new()),
        FinishReason::Length => (pb::FinishReason::Length, None, String::new()),
        FinishReason::Cancelled => (pb::FinishReason::Cancelled, None, String::new()),
        FinishReason::Failed(why) => (pb::FinishReason::Error, None, why.clone()),
    };
    pb::Finished {
        reason: reason.into(),
        stop_token,
        error,
        usage: Some(usage(&outcome.usage)),
        timings: Some(timings(&outcome.timings)),
        fingerprint: fingerprint.to_owned(),
        turn: None,
    }
}

fn usage(usage: &Usage) -> pb::Usage {
    pb::Usage {
        prompt_tokens: usage.prompt as u32,
        cached_tokens: usage.cached as u32,
        generated_tokens: usage.generated as u32,
        drafted_tokens: usage.drafted as u32,
        accepted_tokens: usage.accepted as u32,
        rounds: usage.rounds as u32,
    }
}

fn timings(timings: &Timings) -> pb::Timings {
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    pb::Timings {
        queue_ms: ms(timings.queue),
        prefill_ms: ms(timings.prefill),
        decode_ms: ms(timings.decode),
        ttft_ms: ms(timings.ttft),
    }
}

pub(super) fn stats(stats: &EngineStats) -> pb::StatsResponse {
    let sched = &stats.sched;
    pb::StatsResponse {
        running: sched.running as u32,
        waiting: sched.waiting as u32,
        generations: stats.generations as u32,
        prompt_tokens: sched.prompt_tokens,
        cached_tokens: sched.cached_tokens,
        generated_tokens: sched.generated_tokens,
        drafted_tokens: sched.drafted_tokens,
        accepted_tokens: sched.accepted_tokens,
        rounds: sched.rounds,
        steps: sched.steps,
        full_blocks_used: sched.full_blocks_used as u32,
        full_blocks: sched.full_blocks as u32,
        sliding_blocks_used: sched.sliding_blocks_used as u32,
        sliding_blocks: sched.sliding_blocks as u32,
        uptime_seconds: stats.uptime.as_secs_f64(),
    }
}

pub(super) fn run_usage(run: &str, usage: &RunUsage) -> pb::RunUsage {
    pb::RunUsage {
        run_id: run.to_owned(),
        generations: usage.generations,
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        generated_tokens: usage.generated_tokens,
        drafted_tokens: usage.drafted_tokens,
        accepted_tokens: usage.accepted_tokens,
        device_seconds: usage.device_micros as f64 / 1e6,
    }
}
