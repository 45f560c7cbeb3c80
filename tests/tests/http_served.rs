//! brain over HTTP as a whole process: the demo model as an agent, and a stream that outlives the
//! process that began it.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test fails by panicking"
)]

use marathon_tests::{Brain, BrainOptions, repository_root};
use reqwest::{Client, RequestBuilder, Response};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn with_http(options: BrainOptions) -> Brain {
    Brain::start(BrainOptions {
        http: true,
        ..options
    })
}

fn post(brain: &Brain, path: &str, body: &Value) -> RequestBuilder {
    // The client wants one, although these tests speak without TLS.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Client::new()
        .post(format!("{}{path}", brain.http))
        .json(body)
}

/// What a tool of the demo's task answers.
fn answer(name: &str, arguments: &Value) -> String {
    let path = arguments["path"].as_str().unwrap_or_default();
    match name {
        "ls" => "bado.txt\nfelu.txt\ngimora.txt".into(),
        "read" => "place: harbor\nowner: Tolini\nstate: open\ncode: 4711".into(),
        "append" => format!("appended to {path}"),
        "write" => format!("wrote {path}"),
        "edit" => format!("edited {path}"),
        _ => "(no output)".into(),
    }
}

#[tokio::test]
async fn the_demo_model_works_as_an_agent_over_chat_completions() {
    let tools = repository_root().join("brain/assets/demo/train/tools.json");
    let tools: Value = serde_json::from_slice(&std::fs::read(tools).unwrap()).unwrap();
    let brain = with_http(BrainOptions::default());
    let mut messages = vec![
        json!({"role": "system", "content": "You are a careful agent. Do the task with the \
            tools, one call at a time. When everything is done, call finish."}),
        json!({"role": "user", "content": "Work through the records in the folder inbox. Start \
            the file report.txt with the line \"Records of Mira\". For every record, in the order \
            of the listing: read it, append the line \"NAME | OWNER | CODE\" to report.txt, then \
            edit \"state: open\" to \"state: done\" in the record. If a record cannot be read, \
            append \"NAME | unreadable\" and go on. At the end look at report.txt, then finish."}),
    ];
    let mut called = Vec::new();
    for _turn in 0..5 {
        let body = json!({
            "model": "demo", "messages": messages, "tools": tools, "temperature": 0,
            "max_tokens": 200, "parallel_tool_calls": false, "prompt_cache_key": "run",
        });
        let response = post(&brain, CHAT, &body).send().await.unwrap();
        let whole: Value = response.json().await.unwrap();
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{whole}");
        let call = &choice["message"]["tool_calls"][0];
        // A stream of the same request brings the same call in pieces.
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let text = post(&brain, CHAT, &streamed)
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap();
        let mut arguments = String::new();
        let mut name = Value::Null;
        for chunk in text.lines().filter_map(|line| line.strip_prefix("data: {")) {
            let chunk: Value = serde_json::from_str(&format!("{{{chunk}")).unwrap();
            for piece in chunk["choices"][0]["delta"]["tool_calls"]
                .as_array()
                .into_iter()
                .flatten()
            {
                let function = &piece["function"];
                if function["name"].is_string() {
                    name = function["name"].clone();
                }
                arguments += function["arguments"].as_str().unwrap();
            }
        }
        assert_eq!(name, call["function"]["name"]);
        assert_eq!(arguments, call["function"]["arguments"].as_str().unwrap());

        let given: Value = serde_json::from_str(&arguments).unwrap();
        let name = name.as_str().unwrap().to_owned();
        messages.push(choice["message"].clone());
        messages.push(json!({
            "role": "tool", "tool_call_id": call["id"], "content": answer(&name, &given),
        }));
        called.push((name, given));
    }
    let names: Vec<&str> = called.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["write", "ls", "read", "append", "edit"]);
    assert_eq!(called[2].1["path"], "inbox/bado.txt");
    assert_eq!(called[3].1["content"], "bado | Tolini | 4711");
}

/// One chunk of a stream and its event's id.
struct Chunk {
    id: Option<String>,
    json: Value,
}

/// Reads events until there are `count`, or to the end.
async fn read(response: &mut Response, count: usize) -> Vec<Chunk> {
    let (mut text, mut chunks) = (String::new(), Vec::new());
    while chunks.len() < count {
        let Some(bytes) = response.chunk().await.unwrap() else {
            break;
        };
        text.push_str(std::str::from_utf8(&bytes).unwrap());
        while let Some(end) = text.find("\n\n") {
            let event: String = text.drain(..end + 2).collect();
            let field = |name: &str| event.lines().find_map(|line| line.strip_prefix(name));
            if let Some(json) = field("data: ").filter(|data| *data != "[DONE]") {
                chunks.push(Chunk {
                    id: field("id: ").map(str::to_owned),
                    json: serde_json::from_str(json).unwrap(),
                });
            }
        }
    }
    chunks
}

fn ids(chunks: &[Chunk]) -> Vec<u64> {
    let of_chunk = |chunk: &Chunk| chunk.json["choices"][0]["token_ids"].as_array().cloned();
    chunks
        .iter()
        .flat_map(|chunk| of_chunk(chunk).unwrap_or_default())
        .map(|id| id.as_u64().unwrap())
        .collect()
}

#[tokio::test]
async fn a_stream_goes_on_after_the_process_that_began_it_was_killed() {
    let body = json!({
        "model": "demo", "messages": [{"role": "user", "content": "Tell me."}],
        "stream": true, "return_token_ids": true, "resumable": true, "request_id": "long",
        "max_tokens": 400, "ignore_eos": true,
    });
    let mut first = with_http(BrainOptions::fake(&["--fake-step-time", "5ms"]));
    let mut response = post(&first, CHAT, &body).send().await.unwrap();
    let mut chunks = read(&mut response, 5).await;
    first.program.kill();
    let last = chunks
        .iter()
        .rev()
        .find_map(|chunk| chunk.id.clone())
        .unwrap();

    // Another process, and one that drafts otherwise.
    let second = with_http(BrainOptions::fake(&["--draft-tokens", "off"]));
    let again = post(&second, CHAT, &body).header("last-event-id", last);
    let mut response = again.send().await.unwrap();
    chunks.extend(read(&mut response, usize::MAX).await);
    let mut undisturbed = post(&second, CHAT, &body).send().await.unwrap();
    let undisturbed = read(&mut undisturbed, usize::MAX).await;
    assert_eq!(ids(&chunks).len(), 400);
    assert_eq!(ids(&chunks), ids(&undisturbed));
}
