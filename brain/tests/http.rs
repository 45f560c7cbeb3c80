//! The HTTP front end over real connections, with a fake device behind it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test that cannot go on has failed"
)]

#[path = "http_support/mod.rs"]
mod support;

use serde_json::{Value, json};
use support::{Event, Server, Stream, start, start_loading, start_with_keys};

const CHAT: &str = "/v1/chat/completions";

fn chat(more: Value) -> Value {
    let mut body = json!({
        "model": "demo",
        "messages": [{"role": "user", "content": "Say something."}],
        "seed": 5, "max_tokens": 40, "ignore_eos": true,
    });
    let (Value::Object(body), Value::Object(more)) = (&mut body, more) else {
        panic!("objects")
    };
    body.extend(more);
    json!(body)
}

/// What a stream of chunks amounts to.
#[derive(Debug, Default, PartialEq)]
struct Heard {
    content: String,
    reasoning: String,
    calls: Vec<(String, String, String)>,
    token_ids: Vec<u64>,
    finish: Option<String>,
    usage: Value,
    done: bool,
}

fn hear(events: &[Event]) -> Heard {
    let mut heard = Heard::default();
    for event in events {
        assert!(!heard.done, "an event after the end");
        if event.data == "[DONE]" {
            heard.done = true;
            continue;
        }
        let chunk = event.json();
        assert_eq!(chunk["object"], "chat.completion.chunk", "{chunk}");
        if !chunk["usage"].is_null() {
            heard.usage = chunk["usage"].clone();
        }
        for choice in chunk["choices"].as_array().unwrap() {
            assert!(heard.finish.is_none(), "a delta after the reason");
            let delta = &choice["delta"];
            heard.content += delta["content"].as_str().unwrap_or_default();
            heard.reasoning += delta["reasoning"].as_str().unwrap_or_default();
            assert_eq!(delta["reasoning"], delta["reasoning_content"]);
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                let index = call["index"].as_u64().unwrap() as usize;
                if let Some(id) = call["id"].as_str() {
                    assert_eq!(index, heard.calls.len());
                    let name = call["function"]["name"].as_str().unwrap();
                    heard.calls.push((id.into(), name.into(), String::new()));
                }
                heard.calls[index].2 += call["function"]["arguments"].as_str().unwrap();
            }
            let ids = choice["token_ids"].as_array().into_iter().flatten();
            heard.token_ids.extend(ids.map(|id| id.as_u64().unwrap()));
            heard.finish = choice["finish_reason"].as_str().map(str::to_owned);
        }
    }
    heard
}

#[tokio::test]
async fn an_early_client_is_held_until_the_model_is_there() {
    let server = start_loading(&[]).await;
    for path in ["/health", "/ready"] {
        let response = server.get(path).send().await.unwrap();
        assert_eq!(response.status(), 503);
        assert_eq!(response.json::<Value>().await.unwrap()["status"], "loading");
    }
    // The headers are there although nothing can be computed yet.
    let mut stream = Stream::open(server.post(CHAT, &chat(json!({"stream": true})))).await;
    let plain = server.post(CHAT, &chat(json!({}))).send();
    let plain = tokio::spawn(plain);
    let late = server.post(CHAT, &chat(json!({"stream": true, "temperature": 9})));
    let late = Stream::open(late).await;
    server.load();
    assert!(stream.next().await.unwrap().data.contains("assistant"));
    assert!(hear(&stream.rest().await).done);
    assert_eq!(plain.await.unwrap().unwrap().status(), 200);
    // What can only be checked with the model is an error in the stream.
    let events = late.rest().await;
    assert_eq!(events[0].json()["error"]["param"], "temperature");
    for path in ["/health", "/ready"] {
        assert_eq!(server.get(path).send().await.unwrap().status(), 200);
    }
}

#[tokio::test]
async fn the_end_takes_no_new_work_and_says_so() {
    let server = start_loading(&[]).await;
    server.ending.cancel();
    let error = server.refused(CHAT, &chat(json!({})), 503).await;
    assert_eq!(error["code"], "shutting_down");
    assert_eq!(server.get("/ready").send().await.unwrap().status(), 503);
    assert_eq!(server.get("/health").send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn models_and_tokens_are_told() {
    let server = start(&["--max-model-len", "512"]).await;
    let list: Value = server
        .get("/v1/models")
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let card = &list["data"][0];
    assert_eq!(
        (&card["id"], &card["max_model_len"]),
        (&json!("demo"), &json!(512))
    );
    let one: Value = server
        .get("/v1/models/demo")
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(one["fingerprint"], card["fingerprint"]);
    assert_eq!(
        server
            .get("/v1/models/other")
            .send()
            .await
            .unwrap()
            .status(),
        404
    );

    let text = "<|turn>user\nHi there";
    let asked = json!({"prompt": text, "return_token_strs": true});
    let answer = server.ask("/tokenize", &asked).await;
    let tokens = answer["tokens"].as_array().unwrap();
    assert_eq!(answer["count"], tokens.len());
    assert_eq!(answer["token_strs"][0], "<bos>");
    assert_eq!(answer["token_strs"][1], "<|turn>");
    let back = server
        .ask("/detokenize", &json!({"tokens": &tokens[1..]}))
        .await;
    assert_eq!(back["prompt"], text);
    let bare = json!({"prompt": text, "add_special_tokens": false});
    assert_eq!(
        server.ask("/tokenize", &bare).await["count"],
        tokens.len() - 1
    );
    let error = server
        .refused("/detokenize", &json!({"tokens": [1, 99_999_999]}), 400)
        .await;
    assert_eq!(error["param"], "tokens");
}

#[tokio::test]
async fn bad_requests_are_answered_with_what_is_wrong_and_where() {
    let server = start(&["--max-model-len", "64"]).await;
    let long = "word ".repeat(300);
    let cases = [
        (
            json!({"messages": [{"role": "user", "content": 5}]}),
            400,
            "messages[0].content",
        ),
        (json!({"messages": [{"content": "x"}]}), 400, "messages[0]"),
        (
            json!({"messages": [{"role": "tool", "content": "x"}]}),
            400,
            "messages[0].tool_call_id",
        ),
        (json!({"messages": []}), 400, "messages"),
        (json!({"model": "gpt-9"}), 404, "model"),
        (json!({"temperature": 3}), 400, "temperature"),
        (json!({"top_p": 0}), 400, "top_p"),
        (json!({"logit_bias": {"1": 500}}), 400, "logit_bias"),
        (json!({"logit_bias": {"99999999": 1}}), 400, "logit_bias"),
        (json!({"stop": vec!["a"; 17]}), 400, "stop"),
        (json!({"n": 0}), 400, "n"),
        (json!({"n": 17}), 400, "n"),
        (json!({"top_logprobs": 3}), 400, "top_logprobs"),
        (
            json!({"logprobs": true, "top_logprobs": 21}),
            400,
            "top_logprobs",
        ),
        (json!({"tool_choice": "required"}), 400, "tool_choice"),
        (json!({"reasoning_effort": "huge"}), 400, "reasoning_effort"),
        (
            json!({"chat_template_kwargs": {"x": 1}}),
            400,
            "chat_template_kwargs.x",
        ),
        (json!({"request_id": "a b"}), 400, "request_id"),
        (json!({"max_tokens": 0}), 400, "max_tokens"),
    ];
    for (more, status, param) in cases {
        let error = server.refused(CHAT, &chat(more), status).await;
        assert_eq!(error["param"], param, "{error}");
    }
    let overflow = chat(json!({"messages": [{"role": "user", "content": long}]}));
    let error = server.refused(CHAT, &overflow, 400).await;
    assert_eq!(error["code"], "context_length_exceeded");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("maximum context length is 64 tokens"),
        "{message}"
    );

    let raw = |text: &'static str| {
        server
            .client
            .post(format!("{}{CHAT}", server.base))
            .body(text)
    };
    let broken = raw("{\"model\": \"demo\",\n \"messages\": [}")
        .send()
        .await
        .unwrap();
    assert_eq!(broken.status(), 400);
    let error: Value = broken.json().await.unwrap();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("line 2 column 15"), "{message}");
    let packed = raw("x")
        .header("content-encoding", "gzip")
        .send()
        .await
        .unwrap();
    assert_eq!(packed.status(), 415);
    let huge = raw("x").header("content-length", "99999999").send().await;
    assert!(huge.is_err() || huge.unwrap().status() == 413);
    assert_eq!(server.get("/nowhere").send().await.unwrap().status(), 404);
    assert_eq!(server.get(CHAT).send().await.unwrap().status(), 405);
}

#[tokio::test]
async fn a_body_beyond_the_limit_is_refused_without_being_read() {
    let server = start(&[]).await;
    let body = vec![b' '; (16 << 20) + 1];
    let request = server
        .client
        .post(format!("{}{CHAT}", server.base))
        .body(body);
    // The server may close the connection before all was sent.
    if let Ok(response) = request.send().await {
        assert_eq!(response.status(), 413);
    }
    server.ask(CHAT, &chat(json!({}))).await;
}

#[tokio::test]
async fn a_key_opens_every_route_and_health_needs_none() {
    const KEYS: &str = "first-key-0123456789,second-key-0123456789";
    let server = start_with_keys(&[], Some(KEYS)).await;
    server.load();
    for path in ["/v1/models", "/version", "/nowhere"] {
        let bare = server.get(path).send().await.unwrap();
        assert_eq!(bare.status(), 401, "{path}");
        assert_eq!(bare.headers()["www-authenticate"], "Bearer");
        let wrong = server.get(path).bearer_auth("first-key-012345678");
        assert_eq!(wrong.send().await.unwrap().status(), 401);
    }
    assert_eq!(server.get("/health").send().await.unwrap().status(), 200);
    let bearer = server
        .get("/v1/models")
        .bearer_auth("second-key-0123456789");
    assert_eq!(bearer.send().await.unwrap().status(), 200);
    let header = server
        .get("/v1/models")
        .header("x-api-key", "first-key-0123456789");
    assert_eq!(header.send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_resumable_answer_belongs_to_the_key_that_made_it() {
    let server = start_with_keys(&[], Some("first-key-0123456789,second-key-0123456789")).await;
    server.load();
    // The same id with another request is a conflict for its owner and nothing to anybody else.
    let body = |seed: u64| chat(json!({"resumable": true, "request_id": "mine", "seed": seed}));
    let ask = async |key: &str, seed| {
        let request = server.post(CHAT, &body(seed)).bearer_auth(key);
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(ask("first-key-0123456789", 1).await, 200);
    assert_eq!(ask("first-key-0123456789", 2).await, 409);
    assert_eq!(ask("second-key-0123456789", 2).await, 200);
}

#[tokio::test]
async fn pages_of_other_sites_are_kept_out_unless_allowed() {
    const SITE: &str = "https://example.org";
    let closed = start(&[]).await;
    let request = closed.post(CHAT, &chat(json!({}))).header("origin", SITE);
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 403);
    assert!(
        !response
            .headers()
            .contains_key("access-control-allow-origin")
    );
    let open = start(&["--cors-origins", SITE]).await;
    let request = open.post(CHAT, &chat(json!({}))).header("origin", SITE);
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert_eq!(response.headers()["access-control-allow-origin"], SITE);
    let stranger = open
        .post(CHAT, &chat(json!({})))
        .header("origin", "https://other.org");
    assert_eq!(stranger.send().await.unwrap().status(), 403);
}

#[tokio::test]
async fn a_name_that_somebody_else_answers_for_is_refused_where_there_are_no_keys() {
    const NAME: &str = "rebound.example:8000";
    let status = async |server: &Server, path: &str, host: &str| {
        let request = server.get(path).header("host", host);
        request.send().await.unwrap().status().as_u16()
    };
    let closed = start(&[]).await;
    for path in ["/v1/runs", "/metrics", "/v1/models"] {
        assert_eq!(status(&closed, path, NAME).await, 403, "{path}");
        assert_eq!(status(&closed, path, "localhost:8000").await, 200, "{path}");
    }
    assert_eq!(status(&closed, "/health", NAME).await, 200, "a probe's");
    let open = start(&["--cors-origins", "http://rebound.example"]).await;
    assert_eq!(status(&open, "/v1/runs", NAME).await, 200);
    let keyed = start_with_keys(&[], Some("first-key-0123456789")).await;
    keyed.load();
    assert_eq!(status(&keyed, "/v1/runs", NAME).await, 401);
}

#[tokio::test]
async fn a_stream_brings_what_the_whole_answer_is() {
    let server = start(&[]).await;
    let whole = server
        .ask(CHAT, &chat(json!({"return_token_ids": true})))
        .await;
    let body = chat(json!({
        "stream": true, "return_token_ids": true,
        "stream_options": {"include_usage": true},
    }));
    let events = Stream::open(server.post(CHAT, &body)).await.rest().await;
    let heard = hear(&events);
    let choice = &whole["choices"][0];
    assert_eq!(
        choice["message"]["content"].as_str().unwrap_or_default(),
        heard.content
    );
    assert_eq!(
        choice["message"]["reasoning"].as_str().unwrap_or_default(),
        heard.reasoning
    );
    let ids: Vec<u64> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
    assert_eq!(heard.token_ids, ids);
    assert_eq!(ids.len(), 40);
    assert_eq!(heard.finish.as_deref(), Some("length"));
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(heard.usage["completion_tokens"], 40);
    assert_eq!(
        heard.usage["prompt_tokens"],
        whole["usage"]["prompt_tokens"]
    );
    assert!(heard.done);

    let first = events[0].json();
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    assert!(
        !first["choices"][0]["token_ids"]
            .as_array()
            .unwrap()
            .is_empty()
    );
    assert_eq!(first["prompt_token_ids"], whole["prompt_token_ids"]);
    // Clients that take an id for data have asked for none.
    assert!(events.iter().all(|event| event.id.is_none()));
    // Usage is sent to those who ask.
    let plain = chat(json!({"stream": true}));
    let events = Stream::open(server.post(CHAT, &plain)).await.rest().await;
    assert_eq!(hear(&events).usage, Value::Null);
}

#[tokio::test]
async fn an_event_of_a_resumable_stream_has_the_index_of_its_last_token() {
    let server = start(&[]).await;
    let body = chat(json!({"stream": true, "return_token_ids": true, "resumable": true}));
    let events = Stream::open(server.post(CHAT, &body)).await.rest().await;
    let mut count = 0;
    for event in events.iter().filter(|event| event.id.is_some()) {
        let ids = event.json()["choices"][0]["token_ids"]
            .as_array()
            .map_or(0, Vec::len);
        count += ids;
        assert_eq!(event.id.as_deref(), Some(&*(count - 1).to_string()));
    }
    assert_eq!(count, 40);
}

#[tokio::test]
async fn a_resumed_stream_brings_every_token_once() {
    let server = start(&["--fake-step-time", "2ms"]).await;
    let more = json!({
        "stream": true, "return_token_ids": true, "resumable": true, "request_id": "again",
        "max_tokens": 300, "stream_options": {"include_usage": true},
    });
    let mut stream = Stream::open(server.post(CHAT, &chat(more.clone()))).await;
    let mut events = Vec::new();
    while events.len() < 5 {
        events.push(stream.next().await.unwrap());
    }
    drop(stream);
    let last = events.last().unwrap().id.clone().unwrap();
    let request = server
        .post(CHAT, &chat(more.clone()))
        .header("last-event-id", &last);
    let rest = Stream::open(request).await.rest().await;
    assert!(
        rest[0].json()["choices"][0]["delta"]["role"].is_null(),
        "begun twice"
    );
    events.extend(rest);
    let heard = hear(&events);
    assert_eq!((heard.token_ids.len(), heard.done), (300, true));
    let again = Stream::open(server.post(CHAT, &chat(more)))
        .await
        .rest()
        .await;
    let whole = hear(&again);
    assert_eq!(whole, heard);
    let stale = server.post(CHAT, &chat(json!({"stream": true, "request_id": "again2"})));
    let response = stale.header("last-event-id", "x").send().await.unwrap();
    assert_eq!(response.status(), 400);
}

#[tokio::test]
async fn a_wrong_address_is_refused_in_the_shape_of_every_error() {
    let server = start(&[]).await;
    for (path, status) in [
        ("/v1/responses/x?stream=maybe", 400),
        ("/v1/responses/x?starting_after=-1", 400),
        ("/v1/responses/%ff", 400),
        ("/v1/models/%ff", 400),
        ("/v1/models/other", 404),
        ("/nothing", 404),
        ("/tokenize", 405),
    ] {
        let response = server.get(path).send().await.unwrap();
        assert_eq!(response.status(), status, "{path}");
        let error: Value = response.json().await.unwrap();
        assert!(error["error"]["message"].is_string(), "{path}: {error}");
    }
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_generation() {
    let server = start(&["--fake-step-time", "20ms"]).await;
    let long = chat(json!({"stream": true, "max_tokens": 3000}));
    let mut stream = Stream::open(server.post(CHAT, &long)).await;
    stream.next().await.unwrap();
    let engine = server.serving().engine;
    // Figures are published after the tokens of a step.
    while engine.stats().sched.running == 0 {
        tokio::task::yield_now().await;
    }
    drop(stream);
    // 3,000 tokens would take minutes; a generation that is cancelled ends within a step.
    while engine.stats().sched.running > 0 {
        tokio::task::yield_now().await;
    }
    assert!(engine.stats().sched.generated_tokens < 2000);
}

#[tokio::test]
async fn choices_differ_and_each_can_be_asked_for_again() {
    let server = start(&[]).await;
    let body = chat(json!({"n": 3, "return_token_ids": true, "temperature": 1}));
    let (first, second) = (server.ask(CHAT, &body).await, server.ask(CHAT, &body).await);
    let ids = |answer: &Value, choice: usize| answer["choices"][choice]["token_ids"].clone();
    for choice in 0..3 {
        assert_eq!(ids(&first, choice), ids(&second, choice));
        assert_ne!(ids(&first, choice), ids(&first, (choice + 1) % 3));
    }
    assert_eq!(first["usage"]["completion_tokens"], 120);
    let streamed = chat(json!({"n": 3, "stream": true, "return_token_ids": true}));
    let events = Stream::open(server.post(CHAT, &streamed))
        .await
        .rest()
        .await;
    let of_choice = |choice: u64| -> Vec<Value> {
        let choices = events.iter().filter(|event| event.data != "[DONE]");
        choices
            .map(|event| event.json()["choices"][0].clone())
            .filter(|found| found["index"] == choice)
            .flat_map(|found| found["token_ids"].as_array().cloned().unwrap_or_default())
            .collect()
    };
    for choice in 0..3 {
        assert_eq!(json!(of_choice(choice)), ids(&first, choice as usize));
    }
}

#[tokio::test]
async fn log_probabilities_come_with_each_token() {
    let server = start(&[]).await;
    let body = chat(json!({"logprobs": true, "top_logprobs": 2, "max_tokens": 6}));
    let answer = server.ask(CHAT, &body).await;
    let content = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(content.len(), 6);
    for token in &content {
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
    }
    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = Stream::open(server.post(CHAT, &streamed))
        .await
        .rest()
        .await;
    let heard: Vec<Value> = events
        .iter()
        .filter(|event| event.data != "[DONE]")
        .flat_map(|event| {
            let found = event.json()["choices"][0]["logprobs"]["content"].clone();
            found.as_array().cloned().unwrap_or_default()
        })
        .collect();
    assert_eq!(heard, content);
}

#[tokio::test]
async fn a_request_keeps_its_id() {
    let server = start(&[]).await;
    let given = server
        .post(CHAT, &chat(json!({})))
        .header("x-request-id", "bench-1");
    let response = given.send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "bench-1");
    assert_eq!(
        response.json::<Value>().await.unwrap()["id"],
        "chatcmpl-bench-1"
    );
    // An id that is used again is no attachment unless that is asked for.
    let other = chat(json!({"seed": 77}));
    let again = server
        .post(CHAT, &other)
        .header("x-request-id", "bench-1")
        .send()
        .await
        .unwrap();
    assert_eq!(again.status(), 200);
}
