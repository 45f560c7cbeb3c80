use proptest::prelude::*;

use super::*;
use crate::text::testing::{assert_linear, tokenizer};

/// Special tokens spelled in the text become markers.
fn pieces(text: &str) -> Vec<Result<String, TokenId>> {
    let tokenizer = tokenizer();
    let mut out = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let marker = Markers::SPELLINGS
            .iter()
            .filter_map(|s| rest.find(s).map(|at| (at, *s)))
            .min();
        let (at, spelling) = marker.unwrap_or((rest.len(), ""));
        if at > 0 {
            out.push(Ok(rest[..at].to_owned()));
        }
        if !spelling.is_empty() {
            out.push(Err(tokenizer.encode_with_specials(spelling).unwrap()[0]));
        }
        rest = &rest[at + spelling.len()..];
    }
    out
}

fn feed(start: Start, pieces: &[Result<String, TokenId>]) -> (ParsedTurn, Vec<TurnEvent>) {
    let mut parser = TurnParser::new(*tokenizer().markers(), start, Arc::default());
    let mut events = Vec::new();
    for piece in pieces {
        let mut out = Vec::new();
        match piece {
            Ok(text) => parser.push(Piece::Text(text), &mut out),
            Err(id) => parser.push(Piece::Special(*id), &mut out),
        }
        events.extend(out);
    }
    let mut out = Vec::new();
    parser.finish(&mut out);
    events.extend(out);
    let mut turn = ParsedTurn::default();
    events.iter().for_each(|event| turn.apply(event));
    (turn, events)
}

fn parse(start: Start, text: &str) -> ParsedTurn {
    feed(start, &pieces(text)).0
}

#[track_caller]
fn check(text: &str, content: &str, reasoning: &str, calls: &[(&str, &str)]) {
    let expected = ParsedTurn {
        content: content.to_owned(),
        reasoning: reasoning.to_owned(),
        calls: calls
            .iter()
            .map(|(name, arguments)| ParsedCall {
                name: (*name).to_owned(),
                arguments: (*arguments).to_owned(),
            })
            .collect(),
    };
    assert_eq!(parse(Start::Fresh, text), expected, "{text}");
}

#[test]
fn well_formed_turns() {
    check("Hello!<turn|>", "Hello!", "", &[]);
    check(
        "<|channel>thought\nhm\n<channel|>Yes<turn|>",
        "Yes",
        "hm",
        &[],
    );
    check("<|channel>thought\n<channel|>Yes<turn|>", "Yes", "", &[]);
    check("<|channel>thought<channel|>Yes", "Yes", "", &[]);
    check("<|channel>thought\ncut", "", "cut", &[]);
    check(
        "<|channel>thought\nneed tool\n<channel|><|tool_call>call:get_weather{city:<|\"|>Paris<|\"|>,days:2}<tool_call|><|tool_response>",
        "",
        "need tool",
        &[("get_weather", r#"{"city":"Paris","days":2}"#)],
    );
    check(
        "Two at once.<|tool_call>call:f{}<tool_call|><|tool_call>call:g{x:1.5}<tool_call|><|tool_response>",
        "Two at once.",
        "",
        &[("f", "{}"), ("g", r#"{"x":1.5}"#)],
    );
}

#[test]
fn malformed_calls_are_recovered_or_handed_back() {
    let f = &[("f", r#"{"a":"x"}"#)];
    // Recovered.
    check("<|tool_call>call:f{a:x<|\"|>}<tool_call|>", "", "", f);
    check("<|tool_call>call:f{a:<|\"|>x<|\"|><tool_call|>", "", "", f);
    check("<|tool_call>call:f{a:<|\"|>x}<tool_call|>", "", "", f);
    check("<|tool_call>call:f(a='x')<tool_call|>", "", "", f);
    check("<|tool_call>call:f{\"a\":\"x\"}<tool_call|>", "", "", f);
    check("<|tool_call>call:f{'a':'x'}<tool_call|>", "", "", f);
    check("<|tool_call>call:f{a=x}<tool_call|>", "", "", f);
    check("<|tool_call>:f{a:x}<tool_call|>", "", "", f);
    check("<|tool_call><call>f{a:x}<tool_call|>", "", "", f);
    check("<|tool_call>f{a:x}<tool_call|>", "", "", f);
    check("<|tool_call> call: f {a:x}<tool_call|>", "", "", f);
    check("<|tool_call>call:f{a:x}<turn|>", "", "", f);
    check("<|tool_call>call:f{a:x}<eos>", "", "", f);
    check("<|tool_call>call:f{a:x}", "", "", f);
    check(
        "<|tool_call>call:f{a:<|\"|>x<|\"|>]}<tool_call|>",
        "",
        "",
        f,
    );
    check(
        "<|tool_call>call:ns:create{a:1}<tool_call|>",
        "",
        "",
        &[("ns:create", r#"{"a":1}"#)],
    );
    check(
        "<|tool_call>call:call{}<tool_call|>",
        "",
        "",
        &[("call", "{}")],
    );
    check("<|tool_call>call:f<tool_call|>", "", "", &[("f", "{}")]);
    check(
        "<|tool_call>call:f{a:x}<|tool_call>call:g{}<tool_call|>",
        "",
        "",
        &[("f", r#"{"a":"x"}"#), ("g", "{}")],
    );
    check(
        "<|channel>thought\nhm<|tool_call>call:f{a:x}<tool_call|>",
        "",
        "hm",
        f,
    );
    // Handed back.
    check(
        "<|tool_call>call:{a:1}<tool_call|>",
        "<|tool_call>call:{a:1}<tool_call|>",
        "",
        &[],
    );
    check(
        "<|tool_call>do it {a:1}<tool_call|>x",
        "<|tool_call>do it {a:1}<tool_call|>x",
        "",
        &[],
    );
    check(
        "<|tool_call>call:f{@@}<tool_call|>",
        "<|tool_call>call:f{@@}<tool_call|>",
        "",
        &[],
    );
    check("<|tool_call>nothing", "<|tool_call>nothing", "", &[]);
    check("call:f{a:<|\"|>x<|\"|>}", "call:f{a:x}", "", &[]);
    // Nothing there.
    check("<|tool_call><tool_call|>ok", "ok", "", &[]);
    check("a<tool_call|>b<channel|>c<|\"|>d", "abcd", "", &[]);
}

#[test]
fn the_label_without_its_marker() {
    check("thought\nhm<channel|>Yes", "Yes", "hm", &[]);
    check("thoughtful", "thoughtful", "", &[]);
    check("thought", "thought", "", &[]);
    let after_thought = parse(Start::Content, "thought\nYes");
    assert_eq!(
        (
            after_thought.content.as_str(),
            after_thought.reasoning.as_str()
        ),
        ("Yes", "")
    );
    let open = Start::Thought { labelled: true };
    assert_eq!(parse(open, "hm\n\n<channel|>Yes").reasoning, "hm\n");
    let unlabelled = Start::Thought { labelled: false };
    assert_eq!(
        parse(unlabelled, "thought\nhm<channel|>Yes").reasoning,
        "hm"
    );
    check(
        "<|channel>thought\na<|channel>b\n<channel|>c",
        "c",
        "ab",
        &[],
    );
}

#[test]
fn the_prompt_says_where_the_turn_starts() {
    let tokenizer = tokenizer();
    let start = |text: &str| {
        let ids = tokenizer.encode_with_specials(text).unwrap();
        Start::after(&ids, tokenizer.markers())
    };
    assert_eq!(
        start("<bos><|turn>user\nHi<turn|>\n<|turn>model\n"),
        Start::Fresh
    );
    assert_eq!(
        start("<|turn>model\n<|channel>thought\n<channel|>"),
        Start::Content
    );
    assert_eq!(
        start("x<tool_response|><|channel>thought\n"),
        Start::Thought { labelled: true }
    );
    assert_eq!(
        start("<|turn>model\n<|channel>"),
        Start::Thought { labelled: false }
    );
    assert_eq!(
        start("<|tool_response>response:f{}<tool_response|>"),
        Start::Content
    );
    assert_eq!(start("plain text"), Start::Fresh);
}

const TRANSCRIPT: &str = "<|channel>thought\nLet me see.\nTwo calls.\n<channel|>I will: é😊<|tool_call>call:read{path:<|\"|>a/b.txt<|\"|>,n:10.25,ok:tr}<tool_call|><|tool_call>call:write(content='x}\n', list=[1, \"two\", {a:b}]<tool_call|><|tool_call>bad head {<tool_call|> done<turn|>";

#[test]
fn every_split_gives_the_same_turn() {
    let whole = parse(Start::Fresh, TRANSCRIPT);
    assert_eq!(whole.calls.len(), 2, "{whole:?}");
    assert_eq!(whole.reasoning, "Let me see.\nTwo calls.");
    let single: Vec<_> = pieces(TRANSCRIPT)
        .into_iter()
        .flat_map(|piece| match piece {
            Ok(text) => text.chars().map(|c| Ok(c.to_string())).collect(),
            marker => vec![marker],
        })
        .collect();
    assert_eq!(feed(Start::Fresh, &single).0, whole);
    for cut in 1..single.len() {
        let mut two: Vec<Result<String, TokenId>> = Vec::new();
        for (index, piece) in single.iter().enumerate() {
            match (two.last_mut(), piece) {
                (Some(Ok(text)), Ok(c)) if index != cut => text.push_str(c),
                _ => two.push(piece.clone()),
            }
        }
        assert_eq!(feed(Start::Fresh, &two).0, whole, "cut at {cut}");
    }
}

#[test]
fn a_long_turn_takes_linear_time() {
    let units = [
        "<|tool_call>",
        "<|channel>thought\n",
        "thought\n<channel|>",
        "<|tool_call>call:f{a:1}",
        "x\n",
        "<|tool_call>x{",
    ];
    for unit in units {
        let pieces = pieces(unit);
        assert_linear(unit, 2_000, |n| {
            let input: Vec<_> = std::iter::repeat_n(pieces.clone(), n).flatten().collect();
            feed(Start::Fresh, &input);
        });
    }
}

fn noise() -> impl Strategy<Value = Vec<Result<String, TokenId>>> {
    let piece = prop_oneof![
        (0..Markers::SPELLINGS.len()).prop_map(|i| Err(tokenizer()
            .encode_with_specials(Markers::SPELLINGS[i])
            .unwrap()[0])),
        "[a-c{}():,\"'\n ]{1,4}".prop_map(Ok),
        Just(Ok("call:f{".to_owned())),
        Just(Ok("thought\n".to_owned())),
    ];
    proptest::collection::vec(piece, 0..40)
}

proptest! {
    #[test]
    fn anything_parses_and_arguments_are_json(input in noise()) {
        let (turn, events) = feed(Start::Fresh, &input);
        for call in &turn.calls {
            let arguments = serde_json::from_str::<serde_json::Value>(&call.arguments);
            prop_assert!(matches!(arguments, Ok(serde_json::Value::Object(_))), "{}", call.arguments);
        }
        let starts = events.iter().filter(|e| matches!(e, TurnEvent::CallStart { .. })).count();
        prop_assert_eq!(starts, turn.calls.len());
    }

    #[test]
    fn splitting_noise_changes_nothing(input in noise()) {
        let single: Vec<_> = input.iter().flat_map(|piece| match piece {
            Ok(text) => text.chars().map(|c| Ok(c.to_string())).collect(),
            Err(id) => vec![Err(*id)],
        }).collect();
        prop_assert_eq!(feed(Start::Fresh, &single).0, feed(Start::Fresh, &input).0);
    }
}
