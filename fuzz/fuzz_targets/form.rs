//! Whatever form a client asks for: it is refused, or an answer of it can be written token by token,
//! and going back in it is never having gone.

#![no_main]

use std::sync::{Arc, LazyLock};

use brain::{
    constrain::{CallTool, Calls, Form, Grammars},
    demo,
    sched::{constraint::Constraint as _, mask::Mask},
    text::tokenizer::Tokenizer,
};
use libfuzzer_sys::fuzz_target;
use marathon_fuzz::seeds;

const STOPS: [u32; 3] = [1, 50, 106];

static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_bytes(demo::TOKENIZER, "demo").expect("the demo's")));
static GRAMMARS: LazyLock<Grammars> = LazyLock::new(|| Grammars::new(TOKENIZER.clone()));

/// The first byte says which kind of form the text is.
fn form(kind: u8, text: &str) -> Option<Form> {
    Some(match kind % 5 {
        0 => Form::JsonSchema(serde_json::from_str(text).ok()?),
        1 => Form::Regex(text.to_owned()),
        2 => Form::Lark(text.to_owned()),
        3 => Form::Choice(text.lines().map(str::to_owned).collect()),
        _ => Form::Calls(Calls {
            tools: vec![CallTool {
                name: "f".to_owned(),
                parameters: Some(serde_json::from_str(text).ok()?),
                strict: kind & 64 != 0,
                path: "parameters".to_owned(),
            }],
            required: kind & 128 != 0,
            single: kind & 32 != 0,
        }),
    })
}

fuzz_target!(init: seeds::forms().expect("seeds"), |input: &[u8]| {
    let Some((kind, rest)) = input.split_first() else { return };
    let end = rest.iter().position(|byte| *byte == 0).unwrap_or(rest.len());
    let (text, choices) = rest.split_at(end);
    let Ok(text) = std::str::from_utf8(text) else { return };
    let Some(form) = form(*kind, text) else { return };
    let Ok(grammar) = GRAMMARS.compile(&form) else { return };
    let vocab = TOKENIZER.vocab_size();
    let mut matcher = grammar.matcher(&[], &STOPS);
    let mut path: Vec<u32> = Vec::new();
    for choice in choices.iter().take(64) {
        let mut mask = Mask::none(vocab);
        // Too complex a state ends an answer; it may not do more.
        if matcher.allowed(&mut mask).is_err() {
            return;
        }
        let open: Vec<u32> = mask.iter().filter(|id| !STOPS.contains(id)).collect();
        let back = usize::from(*choice == 255) * path.len().min(3);
        if back > 0 || open.is_empty() {
            matcher.rewind(back).expect("there are so many tokens");
            path.truncate(path.len() - back);
        } else {
            let token = open[usize::from(*choice) * 31 % open.len()];
            if matcher.advance(token).is_err() {
                return;
            }
            path.push(token);
        }
    }
    let mut straight = grammar.matcher(&[], &STOPS);
    if path.iter().any(|&token| straight.advance(token).is_err()) {
        return;
    }
    let masks = [&mut matcher, &mut straight].map(|matcher| {
        let mut mask = Mask::none(vocab);
        matcher.allowed(&mut mask).is_ok().then_some(mask)
    });
    if let [Some(here), Some(there)] = masks {
        assert_eq!(here, there, "after {path:?}");
    }
});
