//! Answers of a form over real connections: every API's way of asking for one. The fake device
//! knows nothing of forms: what fits was confined.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

#[path = "http_support/mod.rs"]
mod support;

use serde_json::{Value, json};
use support::{Stream, start};

const CHAT: &str = "/v1/chat/completions";

fn with(mut body: Value, more: Value) -> Value {
    let (Value::Object(into), Value::Object(more)) = (&mut body, more) else {
        panic!("objects")
    };
    into.extend(more);
    body
}

fn chat(more: Value) -> Value {
    let body = json!({
        "model": "demo", "seed": 5, "max_tokens": 900,
        "messages": [{"role": "user", "content": "Say something."}],
    });
    with(body, more)
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["kind", "count"],
        "additionalProperties": false,
    })
}

fn is_right(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else {
        return false;
    };
    ["a", "b"].iter().any(|kind| value["kind"] == *kind)
        && value["count"].as_u64().is_some_and(|count| count < 10)
}

/// Two tools whose calls take few tokens.
fn functions() -> Value {
    let tool = |name: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "required": ["unit"],
            "properties": {"unit": {"type": "string", "enum": ["C", "F"]}}}}})
    };
    json!([tool("heat"), tool("cool")])
}

fn is_call(arguments: &str) -> bool {
    let value: Value = serde_json::from_str(arguments).unwrap();
    value == json!({"unit": "C"}) || value == json!({"unit": "F"})
}

#[tokio::test]
async fn a_chat_answer_has_the_form_that_was_asked_for() {
    let server = start(&["--draft-tokens", "4"]).await;
    let format = json!({"type": "json_schema", "json_schema": {"name": "n", "strict": true,
                        "schema": schema()}});
    for (more, fits) in [
        (
            json!({"response_format": format}),
            is_right as fn(&str) -> bool,
        ),
        (json!({"guided_json": schema(), "temperature": 0}), is_right),
        (
            json!({"structured_outputs": {"json": schema().to_string()}}),
            is_right,
        ),
        (
            json!({"structured_outputs": {"choice": ["yes", "no"]}, "n": 3}),
            |text| ["yes", "no"].contains(&text),
        ),
        (json!({"guided_regex": "[0-9]{3}x"}), |text| {
            text.len() == 4 && text.ends_with('x')
        }),
        (
            json!({"guided_grammar": "start: \"(\" start \")\" | \"x\"", "temperature": 2}),
            |text| text.contains('x'),
        ),
    ] {
        let answer = server.ask(CHAT, &chat(more.clone())).await;
        for choice in answer["choices"].as_array().unwrap() {
            assert_eq!(choice["finish_reason"], "stop", "{more}: {answer}");
            let content = choice["message"]["content"].as_str().unwrap();
            assert!(fits(content), "{more}: {content}");
        }
        let mut streamed = String::new();
        let body = with(chat(more), json!({"stream": true, "n": 1}));
        for event in Stream::open(server.post(CHAT, &body)).await.rest().await {
            if event.data != "[DONE]" {
                let delta = event.json()["choices"][0]["delta"]["content"].clone();
                streamed += delta.as_str().unwrap_or_default();
            }
        }
        assert_eq!(answer["choices"][0]["message"]["content"], streamed);
    }
    let one = server
        .ask(
            CHAT,
            &chat(json!({"response_format": {"type": "json_object"}})),
        )
        .await;
    let content = one["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(content.starts_with('{'), "{content}");
}

#[tokio::test]
async fn calls_are_forced_in_every_api() {
    let server = start(&["--draft-tokens", "4"]).await;
    let named = json!({"type": "function", "function": {"name": "cool"}});
    for (choice, names) in [
        (json!("required"), &["heat", "cool"][..]),
        (named, &["cool"]),
    ] {
        let body = chat(json!({"tools": functions(), "tool_choice": choice,
                               "parallel_tool_calls": false}));
        let answer = server.ask(CHAT, &body).await;
        assert_eq!(
            answer["choices"][0]["finish_reason"], "tool_calls",
            "{answer}"
        );
        let calls = &answer["choices"][0]["message"]["tool_calls"];
        assert_eq!(calls.as_array().unwrap().len(), 1);
        let function = &calls[0]["function"];
        assert!(
            names.contains(&function["name"].as_str().unwrap()),
            "{answer}"
        );
        assert!(is_call(function["arguments"].as_str().unwrap()), "{answer}");
    }

    let tool = |name: &str| {
        let mut tool = functions()[0]["function"].clone();
        tool["name"] = json!(name);
        tool
    };
    let mut responses_tool = tool("cool");
    responses_tool["type"] = json!("function");
    let body = json!({
        "model": "demo", "input": "Say something.", "max_output_tokens": 200, "seed": 4,
        "tools": [responses_tool], "tool_choice": {"type": "function", "name": "cool"},
    });
    let answer = server.ask("/v1/responses", &body).await;
    let call = &answer["output"][0];
    assert_eq!(
        (&call["type"], &call["name"]),
        (&json!("function_call"), &json!("cool"))
    );
    assert!(is_call(call["arguments"].as_str().unwrap()), "{answer}");

    for choice in [
        json!({"type": "any"}),
        json!({"type": "tool", "name": "cool"}),
    ] {
        let parameters = tool("cool")["parameters"].clone();
        let body = json!({
            "model": "demo", "max_tokens": 200, "seed": 4, "tool_choice":
                with(choice, json!({"disable_parallel_tool_use": true})),
            "messages": [{"role": "user", "content": "Say something."}],
            "tools": [{"name": "cool", "input_schema": parameters}],
        });
        let answer = server.ask("/v1/messages", &body).await;
        assert_eq!(answer["stop_reason"], "tool_use", "{answer}");
        assert_eq!(answer["content"][0]["name"], "cool");
        assert!(
            is_call(&answer["content"][0]["input"].to_string()),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn other_endpoints_keep_to_forms_too() {
    let server = start(&[]).await;
    let body = json!({"model": "demo", "prompt": ["Once", "Twice"], "seed": 3, "max_tokens": 20,
                      "structured_outputs": {"regex": "(ab){2}"}});
    let answer = server.ask("/v1/completions", &body).await;
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], "abab", "{answer}");
    }
    let body = json!({"model": "demo", "input": "Say something.", "max_output_tokens": 900, "seed": 4,
                      "text": {"format": {"type": "json_schema", "name": "n", "schema": schema()}}});
    let answer = server.ask("/v1/responses", &body).await;
    let text = answer["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(is_right(text), "{answer}");
}

#[tokio::test]
async fn a_form_that_cannot_be_kept_to_is_refused_where_the_client_wrote_it() {
    let server = start(&[]).await;
    let not = json!({"properties": {"a": {"items": {"not": {}}}}});
    let strict = json!([{"type": "function", "function": {"name": "f", "strict": true, "parameters":
        {"type": "object", "properties": {"x": {"type": "string", "format": "email"}}}}}]);
    for (more, param) in [
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": not}}}),
            "response_format.json_schema.schema.properties.a.items.not",
        ),
        (
            json!({"guided_json": not}),
            "guided_json.properties.a.items.not",
        ),
        (
            json!({"structured_outputs": {"regex": "("}}),
            "structured_outputs.regex",
        ),
        (json!({"guided_choice": ["a", ""]}), "guided_choice[1]"),
        (json!({"guided_grammar": "start: b"}), "guided_grammar"),
        (
            json!({"guided_regex": "a", "ignore_eos": true}),
            "ignore_eos",
        ),
        (
            json!({"tools": strict}),
            "tools[0].function.parameters.properties.x.format",
        ),
        (
            json!({"guided_regex": "a", "tools": functions()}),
            "guided_regex",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"tools": functions(), "tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice",
        ),
    ] {
        let error = server.refused(CHAT, &chat(more), 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
}
