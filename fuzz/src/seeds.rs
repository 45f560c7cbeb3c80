//! What a target begins with: small inputs, well formed, one of each kind. It writes them into its
//! folder of `corpus/` as it starts, and the fuzzer does the rest.

use std::{fs, io, path::Path};

use crate::{checkpoint, turn};

const TURNS: &[&str] = &[
    "Hello!<turn|>",
    "<|channel>thought\nhm\n<channel|>Yes<turn|>",
    "thought\nhm<channel|>Yes<eos>",
    "<|tool_call>call:f{}<tool_call|><|tool_response>",
    "<|tool_call>call:f{a:<|\"|>x<|\"|>,n:1.5,ok:true,z:null}<tool_call|><|tool_response>",
    "<|tool_call>call:f{list:[1,<|\"|>two<|\"|>,{k:v}],o:{p:{q:1}}}<tool_call|>",
    "<|tool_call>call:f(a='x', b=\"y\")<tool_call|>",
    "<|tool_call>call:f{\"a\":\"x\\\"y\",\"n\":[1,2]}<tool_call|>",
    "<|tool_call>call:f{a:x<|\"|>}<tool_call|>",
    "<|tool_call>call:ns:create{a=1}<turn|>",
    "<|tool_call>:f{a:1}<|tool_call><call>g{b:2}",
    "<|tool_call>no name {a:1}<tool_call|> after",
    "<|tool_call>call:f{n:12,s:text, with commas,ok:tru}<tool_call|>",
];

const FORMS: &[(u8, &str)] = &[
    (
        0,
        r#"{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}"#,
    ),
    (
        0,
        r##"{"$ref":"#/$defs/t","$defs":{"t":{"items":{"$ref":"#/$defs/t"}}}}"##,
    ),
    (
        0,
        r#"{"anyOf":[{"enum":["x",1]},{"type":"string","pattern":"^a+$","maxLength":5}]}"#,
    ),
    (1, "[a-z]{2,5}( [0-9]+)?"),
    (2, "start: \"(\" start \")\" | WORD\nWORD: /[a-z]+/"),
    (3, "yes\nno"),
    (
        4,
        r#"{"type":"object","properties":{"s":{"type":"string"},"n":{"type":["number","null"]}}}"#,
    ),
    (
        228,
        r#"{"type":"object","properties":{"l":{"type":"array","items":{"type":"boolean"}}}}"#,
    ),
];

const GOLDENS: &[&str] = &["e2b", "e4b", "12b", "26b", "all"];

fn write(target: &str, inputs: &[Vec<u8>]) -> io::Result<()> {
    let folder = here().join("corpus").join(target);
    fs::create_dir_all(&folder)?;
    for (number, bytes) in inputs.iter().enumerate() {
        fs::write(folder.join(format!("seed-{number:02}")), bytes)?;
    }
    Ok(())
}

fn here() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The seeds of the target `turn`.
pub fn turns() -> io::Result<()> {
    let inputs: Vec<Vec<u8>> = TURNS.iter().map(|text| turn::write(text)).collect();
    write("turn", &inputs)
}

/// The seeds of the target `form`: a kind, a text, a zero, and which tokens to take.
pub fn forms() -> io::Result<()> {
    let inputs: Vec<Vec<u8>> = FORMS
        .iter()
        .map(|(kind, text)| [&[*kind], text.as_bytes(), &[0, 7, 1, 200, 255, 3, 9]].concat())
        .collect();
    write("form", &inputs)
}

/// The seeds of the target `loader`.
pub fn checkpoints() -> io::Result<()> {
    let mut inputs = Vec::new();
    for golden in GOLDENS {
        for (folder, assistant) in [("", false), ("assistant", true)] {
            let folder = here().join("../tests/goldens").join(golden).join(folder);
            let config = fs::read(folder.join("config.json"))?;
            let weights = fs::read(folder.join("model.safetensors"))?;
            inputs.push(checkpoint::write(assistant, &config, &weights));
        }
    }
    write("loader", &inputs)
}
