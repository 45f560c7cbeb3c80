//! A brain that plays a script instead of a model, to try pilot and its demo without one:
//! `scripted_brain SCRIPT serve --grpc-addr HOST:PORT`, other flags of `brain serve` being ignored.
//! SCRIPT is JSON: a list of turns, each `{"content": TEXT, "calls": [[TOOL, ARGUMENTS], …]}`.

use std::{env, error::Error, fs, io::Write, thread, time::Duration};

#[path = "../tests/support/scripted.rs"]
mod scripted;

use scripted::{Script, ScriptedBrain, ScriptedOptions, ScriptedTurn};
use serde_json::Value;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().collect();
    let script = arguments.get(1).ok_or("which script?")?;
    let turns: Vec<Value> = serde_json::from_str(&fs::read_to_string(script)?)?;
    let turns = turns.iter().map(|turn| ScriptedTurn {
        content: turn["content"].as_str().unwrap_or_default().to_owned(),
        calls: calls(&turn["calls"]),
        ..ScriptedTurn::default()
    });
    let place = arguments
        .iter()
        .position(|a| a == "--grpc-addr")
        .ok_or("no --grpc-addr")?;
    let address = arguments
        .get(place + 1)
        .ok_or("--grpc-addr needs a value")?;
    let options = ScriptedOptions {
        // As slow as a small model on a small machine, so that there are middles to be killed in.
        pace: Duration::from_millis(3),
        // A context that a marathon fills several times.
        max_model_len: 16_384,
        ..ScriptedOptions::default()
    };
    let brain = ScriptedBrain::start_on(
        address,
        Script {
            turns: turns.collect(),
        },
        options,
    )?;
    writeln!(
        std::io::stdout(),
        "ready addr={} model=scripted fingerprint=scripted-1",
        brain.address()
    )?;
    loop {
        thread::park();
    }
}

fn calls(value: &Value) -> Vec<(String, String)> {
    let call = |call: &Value| Some((call[0].as_str()?.to_owned(), call[1].to_string()));
    value
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(call)
        .collect()
}
