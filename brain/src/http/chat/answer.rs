//! A whole chat completion, and the parts that it shares with the stream.

use futures::future::try_join_all;
use serde_json::{Map, Value, json};

use super::{
    super::{
        error::ApiError,
        finish::{Finish, call_id, fingerprint},
        generation::{Ask, Choice},
        logprobs,
        models::unix_time,
        usage::Tally,
    },
    request::ChatRequest,
};
use crate::{serving::Serving, text::turn::ParsedTurn};

/// Reads every choice to its end.
pub(super) async fn collect(
    serving: &Serving,
    request: &ChatRequest,
    ask: &Ask,
    mut choices: Vec<Choice>,
) -> Result<Value, ApiError> {
    let ended = try_join_all(choices.iter_mut().map(Choice::collect)).await?;
    let mut tally = Tally::default();
    let mut shown = Vec::with_capacity(choices.len());
    for (choice, (rounds, ending)) in choices.iter().zip(&ended) {
        tally.add(ending, choice.index == 0);
        let tokens = || rounds.iter().flat_map(|round| &round.tokens);
        let finish = Finish::of(serving, ending);
        let mut entry = json!({
            "index": choice.index,
            "message": message(request, &ask.shown_id, &ending.turn),
            "logprobs": null,
            "finish_reason": finish.reason,
            "stop_reason": finish.stop,
        });
        if request.logprobs {
            entry["logprobs"] = logprobs::chat(serving.text.tokenizer(), tokens());
        }
        if request.deliver.token_ids {
            entry["token_ids"] = tokens().map(|token| token.id).collect();
        }
        shown.push(entry);
    }
    let mut answer = json!({
        "id": ask.shown_id,
        "object": "chat.completion",
        "created": unix_time(),
        "model": serving.facts.name,
        "choices": shown,
        "usage": tally.openai(),
        "system_fingerprint": fingerprint(serving),
    });
    if request.deliver.token_ids {
        answer["prompt_token_ids"] = json!(choices.first().map(|choice| &choice.prompt[..]));
    }
    if let [(_, ending)] = &ended[..] {
        answer["metrics"] = tally.metrics(&ending.outcome.timings);
    }
    Ok(answer)
}

fn message(request: &ChatRequest, shown_id: &str, turn: &ParsedTurn) -> Value {
    let calls: Vec<Value> = turn
        .calls
        .iter()
        .enumerate()
        .map(|(index, call)| {
            json!({
                "id": call_id(shown_id, index),
                "type": "function",
                "function": { "name": call.name, "arguments": call.arguments },
            })
        })
        .collect();
    let mut message = Map::new();
    message.insert("role".into(), json!("assistant"));
    let content = (!turn.content.is_empty() || calls.is_empty()).then_some(&turn.content);
    message.insert("content".into(), json!(content));
    message.insert("refusal".into(), Value::Null);
    if request.reasoning {
        let reasoning = (!turn.reasoning.is_empty()).then_some(&turn.reasoning);
        message.insert("reasoning".into(), json!(reasoning));
        message.insert("reasoning_content".into(), json!(reasoning));
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), json!(calls));
    }
    Value::Object(message)
}
