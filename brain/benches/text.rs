//! How fast tokens become text and a parsed turn.
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
    demo,
    sched::types::TokenId,
    text::{
        stream::{StreamOptions, TurnStream},
        tokenizer::{TokenText, Tokenizer},
        turn::{Start, TurnParser},
        visible::Piece,
    },
};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

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

criterion_group!(benches, text);
criterion_main!(benches);
