//! How fast tokens become text and a parsed turn, and what it takes to keep them to a grammar.
//!
//!     cargo bench -p brain --bench text
//!
//! Throughput is counted in bytes of the text that the tokens make.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    missing_docs,
    reason = "a benchmark fails by panicking; criterion makes undocumented functions"
)]

use std::{hint::black_box, sync::Arc};

use brain::{
    constrain::{CallTool, Calls, Form, Grammars},
    demo,
    sched::{constraint::Constraint as _, mask::Mask, types::TokenId},
    text::{
        stream::{StreamOptions, TurnStream},
        tokenizer::{TokenText, Tokenizer},
        turn::{Start, TurnParser},
        visible::Piece,
    },
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use serde_json::{Map, Value, json};

/// A turn of about a megabyte: a thought, prose, and calls that write files.
fn turn() -> String {
    let mut turn = String::from("<|channel>thought\n");
    for line in 0..2_000 {
        turn.push_str(&format!(
            "Step {line}: look at the file first, then change it.\n"
        ));
    }
    turn.push_str("<channel|>");
    for call in 0..400 {
        turn.push_str("Now the next file, as the task says; a few words of prose.\n");
        turn.push_str(&format!(
            "<|tool_call>call:write{{mode:384,path:<|\"|>src/part_{call}.rs<|\"|>,tags:[<|\"|>a<|\"|>,<|\"|>b<|\"|>],text:<|\"|>"
        ));
        for line in 0..40 {
            turn.push_str(&format!(
                "    let value_{line} = compute(\"{call}\", {line});\n"
            ));
        }
        turn.push_str("<|\"|>}<tool_call|>");
    }
    turn
}

fn text(c: &mut Criterion) {
    let tokenizer = Arc::new(Tokenizer::from_bytes(demo::TOKENIZER, "demo").unwrap());
    let turn = turn();
    let ids: Vec<TokenId> = tokenizer.encode_with_specials(&turn).unwrap();
    let mut group = c.benchmark_group("text");
    group.throughput(Throughput::Bytes(turn.len() as u64));
    group.sample_size(20);

    group.bench_function("turn parser, a token at a time", |bench| {
        let pieces: Vec<Piece<'_>> = ids
            .iter()
            .map(|&id| match tokenizer.token(id) {
                TokenText::Bytes(bytes) => Piece::Text(std::str::from_utf8(bytes).unwrap()),
                _ => Piece::Special(id),
            })
            .collect();
        bench.iter(|| {
            let mut parser = TurnParser::new(*tokenizer.markers(), Start::Fresh, Arc::default());
            let mut events = Vec::new();
            for piece in &pieces {
                parser.push(*piece, &mut events);
            }
            parser.finish(&mut events);
            black_box(events)
        });
    });
    group.bench_function("detokeniser", |bench| {
        bench.iter(|| black_box(tokenizer.decode(&ids, false)));
    });
    group.bench_function("tokens to text and turn, four at a time", |bench| {
        bench.iter(|| {
            let mut stream = TurnStream::new(
                tokenizer.clone(),
                StreamOptions {
                    start: Start::Fresh,
                    schemas: Arc::default(),
                    stop_strings: Vec::new(),
                    stop_tokens: Vec::new(),
                    min_tokens: 0,
                },
            );
            for group in ids.chunks(4) {
                black_box(stream.push(group));
            }
            black_box(stream.finish())
        });
    });
    group.finish();
}

/// Tools like those of an agent that works on files.
fn tools() -> Calls {
    let text = json!({"type": "string"});
    let tool = |name: &str, properties: &[(&str, Value)]| {
        let names: Vec<&str> = properties.iter().map(|(name, _)| *name).collect();
        let properties: Map<String, Value> = properties
            .iter()
            .map(|(name, schema)| ((*name).to_owned(), schema.clone()))
            .collect();
        CallTool {
            name: name.into(),
            parameters: Some(json!({
                "type": "object", "properties": properties, "required": names,
            })),
            strict: false,
            path: String::new(),
        }
    };
    let whole = json!({"type": "integer"});
    Calls {
        tools: vec![
            tool("read", &[("path", text.clone()), ("from", whole.clone())]),
            tool("ls", &[("path", text.clone())]),
            tool(
                "write",
                &[("content", text.clone()), ("path", text.clone())],
            ),
            tool("bash", &[("command", text.clone()), ("timeout", whole)]),
            tool("finish", &[("summary", text)]),
        ],
        required: false,
        single: false,
    }
}

/// Tokens of a vocabulary of Gemma's size.
const WIDE: usize = 262_144;

/// The demo's tokenizer with as many words more as make it as large as Gemma's: two fifths begin with a
/// space, a fifth are of other scripts, some are punctuation and code. No merge leads to them; answers
/// are cut into the longest there are.
fn wide_tokenizer() -> Tokenizer {
    let mut table: Value = serde_json::from_slice(demo::TOKENIZER).unwrap();
    let vocab = table["model"]["vocab"].as_object_mut().unwrap();
    let mut state = 1u64;
    let mut below = |end: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 33) as usize % end
    };
    let syllables: Vec<String> = (0..400)
        .map(|_| {
            let of = |letters: &str, at: usize| letters[at..=at].to_owned();
            let (first, middle) = (of("bcdfghjklmnprstvwz", below(18)), of("aeiou", below(5)));
            let last = if below(2) == 0 {
                String::new()
            } else {
                of("nrstlmd", below(7))
            };
            first + &middle + &last
        })
        .collect();
    let known = "Now the next file as task says few words of text that is to have name path count \
                 items note state open done";
    let mut words: Vec<String> = known
        .split(' ')
        .flat_map(|word| [word.to_owned(), format!("▁{word}")])
        .collect();
    let marks: Vec<char> = "(){}[]>\"',.;:=+-*/&|!?#_\\▁\n\t".chars().collect();
    while vocab.len() + words.len() < 2 * WIDE {
        let syllables = |count: usize, below: &mut dyn FnMut(usize) -> usize| -> String {
            (0..count).map(|_| syllables[below(400)].as_str()).collect()
        };
        let count = 1 + below(4);
        words.push(match below(20) {
            0..8 => format!("▁{}", syllables(count, &mut below)),
            8..14 => syllables(count, &mut below),
            14..18 => (0..=count)
                .map(|_| char::from_u32(0x4e00 + below(9000) as u32).unwrap())
                .collect(),
            18 => (0..=count).map(|_| marks[below(marks.len())]).collect(),
            _ => format!(
                "{}{}",
                marks[below(marks.len())],
                syllables(count, &mut below)
            ),
        });
    }
    for word in words {
        let next = vocab.len();
        if next == WIDE {
            break;
        }
        vocab.entry(word).or_insert(next.into());
    }
    assert_eq!(vocab.len(), WIDE);
    Tokenizer::from_bytes(table.to_string().as_bytes(), "wide").unwrap()
}

/// Cuts a text into the longest tokens; specials are written as they are spelled.
fn cut(tokenizer: &Tokenizer, text: &str) -> Vec<TokenId> {
    let mut table = std::collections::HashMap::new();
    for id in 0..tokenizer.vocab_size() as TokenId {
        match tokenizer.token(id) {
            TokenText::Bytes(bytes) => table.entry(bytes.to_vec()).or_insert(id),
            TokenText::Special(spelling) => table.entry(spelling.as_bytes().to_vec()).or_insert(id),
            TokenText::Unknown => continue,
        };
    }
    let (mut at, mut ids) = (0, Vec::new());
    while at < text.len() {
        let end = (at + 1..=text.len().min(at + 40)).rev();
        let mut found = end.filter_map(|end| Some((end, *table.get(&text.as_bytes()[at..end])?)));
        let (end, id) = found.next().unwrap();
        ids.push(id);
        at = end;
    }
    ids
}

/// Forms, and an answer of each.
fn forms() -> Vec<(&'static str, Form, String)> {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "state": {"enum": ["open", "done"]},
            "items": {"type": "array", "items": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "note": {"type": "string", "maxLength": 200}},
                "required": ["path", "note"], "additionalProperties": false,
            }},
        },
        "required": ["name", "count", "state", "items"], "additionalProperties": false,
    });
    let item = "{\"path\": \"src/part_7.rs\", \"note\": \"a few words of the text that the file is to have\"}";
    let json = format!(
        "{{\"name\": \"the next file\", \"count\": 128, \"state\": \"open\", \"items\": [{item}, {item}]}}"
    );
    let quote = "<|\"|>";
    let call = format!(
        "Now the next file, as the task says.<|tool_call>call:write{{content:{quote}a few words \
         of the text that the file is to have{quote},path:{quote}src/part_7.rs{quote}}}<tool_call|>"
    );
    let regex = "(step [0-9]{1,3}: [a-z ]{1,60}(\\.|;)\n){1,20}".to_owned();
    let lines = "step 12: look at the file that the task names.\nstep 13: say few words of text;\n"
        .to_owned();
    vec![
        ("JSON schema", Form::JsonSchema(schema), json),
        ("regular expression", Form::Regex(regex), lines),
        ("calls", Form::Calls(tools()), call),
    ]
}

/// What a constraint takes for a token: taking it in, and the mask of the next one. Masks by themselves
/// are told as they are, since the longest is what a step waits for.
fn masks(c: &mut Criterion) {
    let demo = Tokenizer::from_bytes(demo::TOKENIZER, "demo").unwrap();
    let mut group = c.benchmark_group("masks");
    for tokenizer in [demo, wide_tokenizer()] {
        let tokenizer = Arc::new(tokenizer);
        let vocab = tokenizer.vocab_size();
        let grammars = Grammars::new(tokenizer.clone());
        for (name, form, answer) in forms() {
            let grammar = grammars.compile(&form).unwrap();
            let ids = cut(&tokenizer, &answer);
            let mut each: Vec<f64> = Vec::new();
            let answer = |each: &mut Vec<f64>| {
                let mut matcher = grammar.matcher(&[], &[]);
                for &id in &ids {
                    let begun = std::time::Instant::now();
                    let mut mask = Mask::none(vocab);
                    matcher.allowed(&mut mask).unwrap();
                    each.push(begun.elapsed().as_secs_f64() * 1e6);
                    assert!(mask.allows(id));
                    matcher.advance(id).unwrap();
                }
            };
            answer(&mut each);
            let first = each.iter().copied().fold(0.0, f64::max);
            each.clear();
            (0..20).for_each(|_| answer(&mut each));
            each.sort_unstable_by(f64::total_cmp);
            println!(
                "{name}, {vocab} tokens: {} masks; microseconds: median {:.1}, 99 % below {:.1}, longest \
                 {:.1}, longest of the first answer {first:.1}",
                ids.len(),
                each[each.len() / 2],
                each[each.len() * 99 / 100],
                each[each.len() - 1],
            );
            group.throughput(Throughput::Elements(ids.len() as u64));
            group.bench_function(format!("{name}, {vocab} tokens"), |bench| {
                bench.iter(|| {
                    let mut each = Vec::new();
                    answer(&mut each);
                    black_box(each)
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, text, masks);
criterion_main!(benches);
