//! Whatever a model says: no panic, every call's arguments are a JSON object, and the events do not
//! depend on how the text was cut.

#![no_main]

use std::{collections::HashMap, sync::Arc};

use brain::text::{
    markers::Markers,
    schema::{Room, Schema},
    turn::{ParsedTurn, Start, TurnEvent, TurnParser},
    visible::Piece,
};
use libfuzzer_sys::fuzz_target;
use marathon_fuzz::{seeds, turn};
use serde_json::{Value, json};

fn markers() -> Markers {
    let number = |spelling: &str| Markers::SPELLINGS.iter().position(|s| *s == spelling);
    Markers::find(|spelling| number(spelling).map(|n| n as u32)).expect("all of them are there")
}

/// `f` declares a property of every type, other tools none.
fn schemas() -> Arc<HashMap<String, Arc<Schema>>> {
    let declared = json!({"type": "object", "properties": {
        "a": {"type": "string"}, "n": {"type": "number"}, "i": {"type": ["integer", "null"]},
        "ok": {"type": "boolean"}, "list": {"type": "array", "items": {"type": "string"}},
        "o": {"type": "object", "properties": {"p": {"type": "object"}}}}});
    let Value::Object(declared) = declared else {
        unreachable!("written above")
    };
    let schema = Schema::parse(&declared, &mut Room::default()).expect("a schema");
    Arc::new(HashMap::from([("f".to_owned(), Arc::new(schema))]))
}

fn parse(start: Start, pieces: &[turn::Piece], cut: bool) -> ParsedTurn {
    let mut parser = TurnParser::new(markers(), start, schemas());
    let mut events: Vec<TurnEvent> = Vec::new();
    for piece in pieces {
        match piece {
            turn::Piece::Special(number) => {
                parser.push(Piece::Special(*number as u32), &mut events);
            }
            turn::Piece::Text(text) if cut => {
                let mut buffer = [0; 4];
                for c in text.chars() {
                    parser.push(Piece::Text(c.encode_utf8(&mut buffer)), &mut events);
                }
            }
            turn::Piece::Text(text) => parser.push(Piece::Text(text), &mut events),
        }
    }
    parser.finish(&mut events);
    let mut parsed = ParsedTurn::default();
    events.iter().for_each(|event| parsed.apply(event));
    parsed
}

fuzz_target!(init: seeds::turns().expect("seeds"), |input: &[u8]| {
    let pieces = turn::read(input);
    for start in [
        Start::Fresh,
        Start::Content,
        Start::Thought { labelled: false },
    ] {
        let whole = parse(start, &pieces, false);
        for call in &whole.calls {
            let arguments: Value =
                serde_json::from_str(&call.arguments).expect("arguments are JSON");
            assert!(arguments.is_object(), "{}", call.arguments);
        }
        assert_eq!(parse(start, &pieces, true), whole);
    }
});
