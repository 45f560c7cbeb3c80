//! How fast tokens become text and a parsed turn, and what it takes to keep them to a grammar.
//!
//!     cargo bench -p brain --bench text
//!
//! Throughput is counted in bytes of the text that the tokens make.

#![allow(
    clippy::unwrap_used,
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

/// What a constraint takes for a token: taking it in, and the mask of the next one.
fn masks(c: &mut Criterion) {
    let tokenizer = Arc::new(Tokenizer::from_bytes(demo::TOKENIZER, "demo").unwrap());
    let grammars = Grammars::new(tokenizer.clone());
    let grammar = grammars.compile(&Form::Calls(tools())).unwrap();
    let quote = "<|\"|>";
    let call = format!(
        "Now the next file, as the task says.<|tool_call>call:write{{content:{quote}a few words \
         of the text that the file is to have{quote},path:{quote}src/part_7.rs{quote}}}<tool_call|>"
    );
    let ids = tokenizer.encode_with_specials(&call).unwrap();
    let vocab = tokenizer.vocab_size();
    let mut group = c.benchmark_group("masks");
    group.throughput(Throughput::Elements(ids.len() as u64));
    group.bench_function("of an answer with a call", |bench| {
        bench.iter(|| {
            let mut matcher = grammar.matcher(&[], &[]);
            for &id in &ids {
                let mut mask = Mask::none(vocab);
                matcher.allowed(&mut mask).unwrap();
                assert!(mask.allows(id));
                matcher.advance(id).unwrap();
            }
        });
    });
    group.finish();
}

criterion_group!(benches, text, masks);
criterion_main!(benches);
