//! Whatever a client sends: every endpoint reads it or refuses it with a reason that is short, without
//! a panic. The first byte chooses the endpoint, the others are the body.

#![no_main]

use std::{fs, io, path::Path};

use brain::http::reading::Endpoint;
use libfuzzer_sys::fuzz_target;

/// Longest reason: names and values from the request are cut in it, paths are not.
const LONGEST: usize = 4096;

/// One of each kind, well formed.
const SEEDS: &[&str] = &[
    r#"{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"x"}]}],
        "tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}],
        "tool_choice":"auto","n":2,"logprobs":true,"top_logprobs":3,"stop":["a"],"logit_bias":{"5":-1.5},"seed":-1}"#,
    r#"{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":null,"reasoning_content":"r",
        "tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"a\":[1,null]}"}}]},
        {"role":"tool","tool_call_id":"a","content":"y"}],"stream":true,"stream_options":{"include_usage":true}}"#,
    r#"{"prompt":[[1,2],[3]],"max_tokens":1,"echo":true,"suffix":"","temperature":0.5,"top_k":-1}"#,
    r#"{"prompt":["a","b"],"logprobs":2,"stop_token_ids":[1],"min_p":0.1,"ignore_eos":true}"#,
    r#"{"input":[{"role":"developer","content":[{"type":"input_text","text":"d"}]},{"type":"reasoning","content":[]},
        {"type":"function_call","call_id":"c","name":"f","arguments":"{}"},
        {"type":"function_call_output","call_id":"c","output":"o"}],"instructions":"i","store":false,
        "reasoning":{"effort":"low"},"text":{"format":{"type":"text"}},"tools":[{"type":"web_search"}]}"#,
    r#"{"max_tokens":5,"system":[{"type":"text","text":"s"}],"messages":[{"role":"user","content":"x"},
        {"role":"assistant","content":[{"type":"thinking","thinking":"t"},{"type":"tool_use","id":"a","name":"f","input":{}}]},
        {"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":[{"type":"text","text":"r"}]}]}],
        "tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"auto"},"thinking":{"type":"enabled"}}"#,
    r#"{"prompt":"x","add_special_tokens":false,"return_token_strs":true}"#,
    r#"{"tokens":[1,2,3]}"#,
];

/// Every seed for every endpoint.
fn plant() -> io::Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/requests");
    fs::create_dir_all(&folder)?;
    for (number, seed) in SEEDS.iter().enumerate() {
        for endpoint in 0..Endpoint::ALL.len() {
            let input = [&[endpoint as u8], seed.as_bytes()].concat();
            fs::write(folder.join(format!("seed-{number}-{endpoint}")), input)?;
        }
    }
    Ok(())
}

fuzz_target!(init: plant().expect("room for the seeds"), |input: &[u8]| {
    let Some((&first, body)) = input.split_first() else {
        return;
    };
    let endpoint = Endpoint::ALL[usize::from(first) % Endpoint::ALL.len()];
    if let Err(error) = endpoint.read(body) {
        let message = error["error"]["message"].as_str().expect("a reason");
        assert!(!message.is_empty());
        assert!(message.len() <= LONGEST + body.len(), "{}", message.len());
    }
});
