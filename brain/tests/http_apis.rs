//! Completions, Anthropic's messages and OpenAI's responses over real connections, with a fake
//! device behind them.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

#[path = "http_support/mod.rs"]
mod support;

use brain::callers::Owner;
use serde_json::{Value, json};
use support::{Event, Stream, start, start_with_keys};

fn with(mut body: Value, more: Value) -> Value {
    let (Value::Object(into), Value::Object(more)) = (&mut body, more) else {
        panic!("objects")
    };
    into.extend(more);
    body
}

fn completion(more: Value) -> Value {
    with(
        json!({"model": "demo", "prompt": "Once upon", "seed": 3, "max_tokens": 20, "ignore_eos": true}),
        more,
    )
}

fn message(more: Value) -> Value {
    with(
        json!({
            "model": "demo", "max_tokens": 30, "seed": 4, "ignore_eos": true,
            "messages": [{"role": "user", "content": "Say something."}],
        }),
        more,
    )
}

fn response(more: Value) -> Value {
    with(
        json!({
            "model": "demo", "input": "Say something.", "max_output_tokens": 30, "seed": 4,
            "ignore_eos": true,
        }),
        more,
    )
}

#[tokio::test]
async fn a_completion_continues_texts_and_tokens_alike() {
    let server = start(&[]).await;
    let path = "/v1/completions";
    let ids = server
        .ask("/tokenize", &json!({"prompt": "Once upon"}))
        .await["tokens"]
        .clone();
    let text = server
        .ask(path, &completion(json!({"return_token_ids": true})))
        .await;
    let tokens = server
        .ask(
            path,
            &completion(json!({"prompt": ids, "return_token_ids": true})),
        )
        .await;
    assert_eq!(text["choices"], tokens["choices"]);
    assert_eq!(text["usage"]["completion_tokens"], 20);
    assert_eq!(text["object"], "text_completion");

    let echoed = server.ask(path, &completion(json!({"echo": true}))).await;
    let whole = echoed["choices"][0]["text"].as_str().unwrap();
    let bare = text["choices"][0]["text"].as_str().unwrap();
    assert_eq!(whole, format!("Once upon{bare}"));

    let body = completion(json!({
        "stream": true, "echo": true, "return_token_ids": true,
        "stream_options": {"include_usage": true},
    }));
    let events = Stream::open(server.post(path, &body)).await.rest().await;
    let (mut heard, mut usage) = (String::new(), Value::Null);
    for event in events.iter().filter(|event| event.data != "[DONE]") {
        let chunk = event.json();
        heard += chunk["choices"][0]["text"].as_str().unwrap_or_default();
        usage = chunk["usage"].clone();
    }
    assert_eq!(heard, whole);
    for field in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(usage[field], text["usage"][field], "{field}");
    }
    assert_eq!(events.last().unwrap().data, "[DONE]");
    // OpenAI's default length.
    let mut short = completion(json!({}));
    short.as_object_mut().unwrap().remove("max_tokens");
    assert_eq!(
        server.ask(path, &short).await["usage"]["completion_tokens"],
        16
    );
}

#[tokio::test]
async fn a_batch_of_prompts_is_answered_in_order() {
    let server = start(&[]).await;
    let path = "/v1/completions";
    let more = json!({"prompt": ["Once upon", "The end"], "n": 2, "logprobs": 1});
    let batch = server.ask(path, &completion(more)).await;
    let choices = batch["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 20);
    }
    let alone = completion(json!({"prompt": "The end", "n": 2, "logprobs": 1}));
    let alone = server.ask(path, &alone).await;
    assert_eq!(alone["choices"][0]["text"], choices[2]["text"]);
    assert_eq!(alone["choices"][1]["text"], choices[3]["text"]);
    for (more, param) in [
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (json!({"prompt": [99_999_999]}), "prompt"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"echo": true, "logprobs": 1}), "echo"),
        (json!({"logprobs": 21}), "logprobs"),
        (json!({"best_of": 3}), "best_of"),
    ] {
        let error = server.refused(path, &completion(more), 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
}

#[tokio::test]
async fn a_message_streams_what_the_whole_one_says() {
    let server = start(&[]).await;
    let path = "/v1/messages";
    let whole = server.ask(path, &message(json!({}))).await;
    assert_eq!(
        (&whole["type"], &whole["role"]),
        (&json!("message"), &json!("assistant"))
    );
    assert_eq!(whole["stop_reason"], "max_tokens");
    assert_eq!(whole["usage"]["output_tokens"], 30);
    let count = server
        .ask("/v1/messages/count_tokens", &message(json!({})))
        .await;
    assert_eq!(count["input_tokens"], whole["usage"]["input_tokens"]);

    let body = message(json!({"stream": true}));
    let events = Stream::open(server.post(path, &body)).await.rest().await;
    assert_eq!(events[0].name, "message_start");
    assert_eq!(events.last().unwrap().name, "message_stop");
    let mut blocks: Vec<(Value, String)> = Vec::new();
    let mut open = None;
    for event in &events {
        let data = event.json();
        assert_eq!(data["type"], event.name.as_str());
        match event.name.as_str() {
            "content_block_start" => {
                assert_eq!(open, None);
                assert_eq!(data["index"], blocks.len());
                open = Some(blocks.len());
                blocks.push((data["content_block"]["type"].clone(), String::new()));
            }
            "content_block_delta" => {
                let delta = &data["delta"];
                let text = ["text", "thinking", "partial_json"]
                    .iter()
                    .find_map(|field| delta[field].as_str())
                    .unwrap();
                blocks[open.unwrap()].1 += text;
            }
            "content_block_stop" => assert_eq!(data["index"], open.take().unwrap()),
            "message_delta" => assert_eq!(data["delta"]["stop_reason"], "max_tokens"),
            _ => {}
        }
    }
    let texts = |kind: &str| -> String {
        let of_kind = blocks.iter().filter(|(found, _)| found == kind);
        of_kind.map(|(_, text)| text.as_str()).collect()
    };
    let said = |kind: &str| -> String {
        let blocks = whole["content"].as_array().unwrap().iter();
        let of_kind = blocks.filter(|block| block["type"] == kind);
        of_kind
            .map(|block| block[kind].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(texts("text"), said("text"));
    assert_eq!(texts("thinking"), said("thinking"));
}

#[tokio::test]
async fn errors_of_anthropics_routes_have_anthropics_shape() {
    let server = start_with_keys(&["--max-model-len", "64"], Some("a-key-0123456789012")).await;
    server.load();
    let path = "/v1/messages";
    let error = async |body: &Value, key: &str| {
        let request = server.post(path, body).header("x-api-key", key);
        let response = request.send().await.unwrap();
        let status = response.status().as_u16();
        let body: Value = response.json().await.unwrap();
        assert_eq!(body["type"], "error", "{body}");
        (
            status,
            body["error"]["type"].clone(),
            body["error"]["message"].to_string(),
        )
    };
    const KEY: &str = "a-key-0123456789012";
    let (status, kind, _) = error(&message(json!({})), "wrong").await;
    assert_eq!((status, kind), (401, json!("authentication_error")));
    let (status, kind, _) = error(&message(json!({"model": "claude"})), KEY).await;
    assert_eq!((status, kind), (404, json!("not_found_error")));
    for (more, place) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            "messages[0].content",
        ),
        (
            json!({"tool_choice": {"type": "any"}}),
            "there are no tools",
        ),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"thinking": {"type": "loud"}}), "thinking.type"),
        (
            json!({"tools": [{"type": "web_search_1", "name": "x"}]}),
            "tools[0].type",
        ),
        (
            json!({"messages": [{"role": "user", "content": "word ".repeat(200)}]}),
            "maximum context length",
        ),
    ] {
        let (status, kind, text) = error(&message(more), KEY).await;
        assert_eq!((status, kind), (400, json!("invalid_request_error")));
        assert!(text.contains(place), "{text}");
    }
}

#[tokio::test]
async fn metrics_count_under_vllms_names() {
    let server = start(&["--draft-tokens", "4"]).await;
    let value = async |name: &str| -> f64 {
        let text = server
            .get("/metrics")
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        assert!(text.ends_with("# EOF\n"));
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("{name}{{")));
        let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
        assert!(line.contains("model_name=\"demo\""), "{line}");
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("vllm:generation_tokens_total").await, 0.0);
    server
        .ask("/v1/completions", &completion(json!({"max_tokens": 50})))
        .await;
    // The engine's own counters follow its answer.
    while value("vllm:generation_tokens_total").await != 50.0 {
        tokio::task::yield_now().await;
    }
    while value("vllm:num_requests_running").await != 0.0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(value("vllm:request_success_total").await, 1.0);
    assert_eq!(value("vllm:time_to_first_token_seconds_count").await, 1.0);
    let accepted = value("vllm:spec_decode_num_accepted_tokens_total").await;
    let drafts = value("vllm:spec_decode_num_drafts_total").await;
    assert!(accepted > 0.0 && drafts > 0.0);
    let text = server
        .get("/metrics")
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    let by_position: f64 = text
        .lines()
        .filter(|line| line.starts_with("vllm:spec_decode_num_accepted_tokens_per_pos_total{"))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum();
    assert_eq!(by_position, accepted);
}

/// What a response's events amount to.
fn whole_of(events: &[Event]) -> Value {
    for (index, event) in events.iter().enumerate() {
        let data = event.json();
        assert_eq!(data["sequence_number"], index, "{data}");
        assert_eq!(data["type"], event.name.as_str());
    }
    let last = events.last().unwrap().json();
    let response = last["response"].clone();
    let mut said = String::new();
    for event in events
        .iter()
        .filter(|event| event.name == "response.output_text.delta")
    {
        said += event.json()["delta"].as_str().unwrap();
    }
    let output = response["output"].as_array().unwrap().iter();
    let messages = output.filter(|item| item["type"] == "message");
    let text: String = messages
        .map(|item| item["content"][0]["text"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(said, text);
    response
}

/// A response without what differs between two answers to the same request.
fn essence(response: &Value) -> Value {
    let output = response["output"].as_array().unwrap().iter();
    let said: Vec<Value> = output
        .map(|item| {
            json!([
                item["type"],
                item["content"],
                item["name"],
                item["arguments"]
            ])
        })
        .collect();
    json!([said, response["status"], response["usage"]["output_tokens"]])
}

#[tokio::test]
async fn a_response_streams_what_the_whole_one_says() {
    let server = start(&[]).await;
    let path = "/v1/responses";
    let whole = server.ask(path, &response(json!({}))).await;
    assert_eq!(whole["object"], "response");
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    assert_eq!(whole["usage"]["output_tokens"], 30);
    // Nothing is stored without a folder.
    assert_eq!(whole["store"], false);
    let id = whole["id"].as_str().unwrap();
    assert_eq!(
        server
            .get(&format!("{path}/{id}"))
            .send()
            .await
            .unwrap()
            .status(),
        404
    );

    let body = response(json!({"stream": true, "tools": [{"type": "web_search"}]}));
    let events = Stream::open(server.post(path, &body)).await.rest().await;
    assert_eq!(events[0].name, "response.created");
    assert_eq!(essence(&whole_of(&events)), essence(&whole));
    for (more, param) in [
        (
            json!({"previous_response_id": "resp_x"}),
            "previous_response_id",
        ),
        (json!({"background": true}), "background"),
        (
            json!({"text": {"format": {"type": "json_schema"}}}),
            "text.format.schema",
        ),
        (json!({"input": 5}), "input"),
        (
            json!({"input": [{"role": "user", "content": 5}]}),
            "input[0].content",
        ),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"tool_choice": "required"}), "tool_choice"),
    ] {
        let error = server.refused(path, &response(more), 400).await;
        assert_eq!(error["param"], param, "{error}");
    }
}

#[tokio::test]
async fn a_message_that_was_cancelled_is_not_told_as_whole() {
    let server = start(&["--fake-step-time", "5ms"]).await;
    let body = message(
        json!({"stream": true, "max_tokens": 2000, "resumable": true,
                              "request_id": "m"}),
    );
    let mut stream = Stream::open(server.post("/v1/messages", &body)).await;
    assert_eq!(stream.next().await.unwrap().name, "message_start");
    let engine = server.serving().owned_by(&Owner::anyone()).engine;
    assert!(engine.cancel("msg_m"));
    let events = stream.rest().await;
    let last = events.last().unwrap();
    assert_eq!(last.name, "error");
    let message = last.json()["error"]["message"].clone();
    assert!(message.as_str().unwrap().contains("cancelled"), "{message}");
    assert!(events.iter().all(|event| event.name != "message_delta"));
}

#[tokio::test]
async fn a_deleted_response_does_not_come_back_when_its_stream_ends() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().to_str().unwrap();
    let server = start(&["--response-dir", folder, "--fake-step-time", "5ms"]).await;
    let path = "/v1/responses";
    let body = response(json!({"stream": true, "max_output_tokens": 2000}));
    let mut stream = Stream::open(server.post(path, &body)).await;
    let id = stream.next().await.unwrap().json()["response"]["id"].clone();
    let stored = format!("{path}/{}", id.as_str().unwrap());
    let status = async |request: reqwest::RequestBuilder| request.send().await.unwrap().status();
    assert_eq!(status(server.get(&stored)).await, 200);
    let delete = server.client.delete(format!("{}{stored}", server.base));
    assert_eq!(status(delete).await, 200);
    let last = stream.rest().await.pop().unwrap();
    assert_eq!(last.json()["response"]["status"], "cancelled");
    assert_eq!(status(server.get(&stored)).await, 404);
}

#[tokio::test]
async fn a_response_asked_for_again_is_the_stored_one_and_a_refused_one_is_not_stored() {
    let dir = tempfile::tempdir().unwrap();
    let server = start(&["--response-dir", dir.path().to_str().unwrap()]).await;
    let path = "/v1/responses";
    let ask = |more: Value| {
        with(
            response(json!({"request_id": "r", "resumable": true})),
            more,
        )
    };
    let first = server.ask(path, &ask(json!({}))).await;
    let again = server.ask(path, &ask(json!({}))).await;
    assert_eq!(again, first);
    server.refused(path, &ask(json!({"seed": 99})), 409).await;
    let read = server.get(&format!("{path}/resp_r")).send().await.unwrap();
    assert_eq!(read.json::<Value>().await.unwrap(), first);
    // The engine does not take it: its text is longer than the context.
    let long = json!({"request_id": "long", "input": "word ".repeat(200_000)});
    server.refused(path, &ask(long), 400).await;
    let read = server.get(&format!("{path}/resp_long"));
    assert_eq!(read.send().await.unwrap().status(), 404);
}

#[tokio::test]
async fn a_stored_response_outlives_its_client_and_its_server() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("responses");
    let flags = [
        "--response-dir",
        folder.to_str().unwrap(),
        "--fake-step-time",
        "1ms",
    ];
    let path = "/v1/responses";
    let first = start(&flags).await;
    let body = response(json!({"stream": true, "max_output_tokens": 200}));
    let mut stream = Stream::open(first.post(path, &body)).await;
    let mut events = Vec::new();
    while events.len() < 8 {
        events.push(stream.next().await.unwrap());
    }
    let id = events[0].json()["response"]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    // The client goes, then the server with all that it has computed.
    drop(stream);
    drop(first);
    let second = start(&flags).await;
    let last = events.len() - 1;
    let rest = second.get(&format!("{path}/{id}?stream=true&starting_after={last}"));
    let rest = Stream::open(rest).await.rest().await;
    // An event source of a browser says the same with a header.
    let again = second
        .get(&format!("{path}/{id}?stream=true"))
        .header("last-event-id", last.to_string());
    let again = Stream::open(again).await.rest().await;
    let json = |events: &[Event]| events.iter().map(Event::json).collect::<Vec<_>>();
    assert_eq!(json(&again), json(&rest));
    events.extend(rest);
    let response = whole_of(&events);
    assert_eq!(response["usage"]["output_tokens"], 200);
    // What is whole needs no computing.
    let read = second.get(&format!("{path}/{id}")).send().await.unwrap();
    assert_eq!(read.json::<Value>().await.unwrap(), response);

    let next = with(
        body,
        json!({"stream": false, "previous_response_id": id, "max_output_tokens": 5}),
    );
    let follow = second.ask(path, &next).await;
    assert_eq!(follow["previous_response_id"], id);
    let alone = with(next, json!({"previous_response_id": null}));
    let alone = second.ask(path, &alone).await;
    let input = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
    // The conversation before it, the answer of 200 tokens included, is its prompt.
    assert!(input(&follow) > input(&alone) + 100);

    let gone = second.client.delete(format!("{}{path}/{id}", second.base));
    assert_eq!(gone.send().await.unwrap().status(), 200);
    assert_eq!(
        second
            .get(&format!("{path}/{id}"))
            .send()
            .await
            .unwrap()
            .status(),
        404
    );
}
