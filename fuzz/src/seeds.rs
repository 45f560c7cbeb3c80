//! Writes the seeds of every target into `corpus/`: small, well formed, and one of each kind. The
//! fuzzer does the rest.

use std::{fs, path::Path};

use marathon_fuzz::{checkpoint, turn};

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

const GOLDENS: &[&str] = &["e2b", "e4b", "12b", "26b", "all"];

fn main() -> std::io::Result<()> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let put = |target: &str, number: usize, bytes: &[u8]| {
        let folder = here.join("corpus").join(target);
        fs::create_dir_all(&folder)?;
        fs::write(folder.join(format!("seed-{number:02}")), bytes)
    };
    for (number, text) in TURNS.iter().enumerate() {
        put("turn", number, &turn::write(text))?;
    }
    let mut number = 0;
    for golden in GOLDENS {
        for (folder, assistant) in [("", false), ("assistant", true)] {
            let folder = here.join("../tests/goldens").join(golden).join(folder);
            let config = fs::read(folder.join("config.json"))?;
            let weights = fs::read(folder.join("model.safetensors"))?;
            put(
                "loader",
                number,
                &checkpoint::write(assistant, &config, &weights),
            )?;
            number += 1;
        }
    }
    Ok(())
}
