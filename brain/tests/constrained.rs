//! Answers of a form on the built-in checkpoint: whatever drafts, whoever is in the batch, and
//! however often brain starts anew, the tokens and the bits of their log-probabilities are those of
//! a lone, undrafted run, and every answer that ends fits its form.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::sync::Arc;

use brain::{
    backend::cpu::{CpuExecutor, CpuOptions},
    constrain::{CallTool, Calls, Form},
    demo,
    engine::{Cursor, Engine, EngineConfig, LogEvent, clock::SystemClock},
    model::load_embedded,
    sched::{
        request::{FinishReason, Request},
        sequence::Outcome,
        types::{DraftDepth, Emitted, SamplingParams, TokenId},
    },
    text::{
        conversation::{Conversation, Message, Role, Tool},
        model::TextModel,
        template::Template,
        tokenizer::Tokenizer,
    },
};
use serde_json::{Value, json};

const STOPS: [TokenId; 3] = [1, 50, 106];
const MOST: u32 = 120;

fn text_model() -> TextModel {
    let tokenizer = Tokenizer::from_bytes(demo::TOKENIZER, "demo").unwrap();
    TextModel::new(Arc::new(tokenizer), Template::new(demo::TEMPLATE).unwrap()).unwrap()
}

fn listed() -> Vec<Tool> {
    let listed: Value =
        serde_json::from_str(include_str!("../assets/demo/train/tools.json")).unwrap();
    let tools = listed.as_array().unwrap().iter().map(|tool| Tool {
        name: tool["function"]["name"].as_str().unwrap().into(),
        description: tool["function"]["description"].as_str().unwrap().into(),
        parameters: tool["function"]["parameters"].as_object().cloned(),
    });
    tools.collect()
}

fn prompt(text: &TextModel) -> Vec<TokenId> {
    let goal = "Work through the records in the folder inbox. Start the file report.txt with \
                the line \"Records of Mira\".";
    let conversation = Conversation {
        messages: vec![
            Message::new(Role::System, "You are a careful agent."),
            Message::new(Role::User, goal),
        ],
        tools: listed(),
        thinking: false,
    };
    text.render(&conversation, true).unwrap()
}

fn calls(required: bool) -> Form {
    let tools = listed().into_iter().map(|tool| CallTool {
        name: tool.name,
        parameters: tool.parameters.map(Value::Object),
        strict: false,
        path: String::new(),
    });
    Form::Calls(Calls {
        tools: tools.collect(),
        required,
        single: required,
    })
}

/// Forms that the demo's model was never trained on, and its own calls.
fn forms() -> Vec<Form> {
    vec![
        Form::JsonSchema(json!({
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "count": {"type": "integer", "minimum": 0, "maximum": 999},
                "kind": {"enum": ["file", "folder"]},
            },
            "required": ["name", "count", "kind"],
            "additionalProperties": false,
        })),
        Form::Regex("[a-z]{3,6}\\.txt( \\| [A-Z][a-z]{2,5}){2}".into()),
        Form::Choice(vec![
            "a folder".into(),
            "a file".into(),
            "nothing at all".into(),
        ]),
        calls(true),
    ]
}

/// Whether a finished answer fits the form of this number.
fn fits(form: usize, answer: &str) -> bool {
    match form {
        0 => serde_json::from_str::<Value>(answer).is_ok_and(|value| {
            let kind = &value["kind"];
            value.as_object().is_some_and(|object| object.len() == 3)
                && value["name"]
                    .as_str()
                    .is_some_and(|name| name.chars().count() <= 12)
                && value["count"].as_u64().is_some_and(|count| count < 1000)
                && (kind == "file" || kind == "folder")
        }),
        1 => {
            let whole = "^[a-z]{3,6}\\.txt( \\| [A-Z][a-z]{2,5}){2}$";
            regex::Regex::new(whole).unwrap().is_match(answer)
        }
        2 => ["a folder", "a file", "nothing at all"].contains(&answer),
        _ => answer.starts_with("<|tool_call>call:") && answer.ends_with("}<tool_call|>"),
    }
}

fn params(kind: u64) -> SamplingParams {
    SamplingParams {
        temperature: [0.0, 1.0, 1.5][kind as usize % 3],
        top_k: if kind == 1 { 40 } else { 0 },
        seed: kind,
        repetition_penalty: if kind == 2 { 1.2 } else { 1.0 },
        stop_tokens: STOPS.to_vec(),
        min_tokens: if kind == 2 { 4 } else { 0 },
        logprobs: 3,
        ..SamplingParams::greedy(MOST)
    }
}

fn request(text: &TextModel, form: Option<&Form>, kind: u64, draft: DraftDepth) -> Request {
    let mut request = Request {
        draft,
        ..Request::new(prompt(text), params(kind))
    };
    if let Some(form) = form {
        let grammar = text.grammars().compile(form).unwrap();
        request.constraint = Some(Box::new(grammar.matcher(&request.prompt, &STOPS)));
        request.grammar = form.to_text();
    }
    request
}

fn engine(drafter: bool) -> Engine {
    let model = load_embedded(&demo::CHECKPOINT, drafter).unwrap();
    let executor = CpuExecutor::new(model, &CpuOptions::default()).unwrap();
    let clock = Arc::new(SystemClock::start());
    Engine::start(Box::new(executor), EngineConfig::default(), clock).unwrap()
}

async fn read(mut cursor: Cursor) -> (Vec<Emitted>, Outcome) {
    let mut tokens = Vec::new();
    while let Some(event) = cursor.next().await {
        match event {
            LogEvent::Tokens { tokens: round, .. } => tokens.extend(round),
            LogEvent::Finished(outcome) => return (tokens, outcome),
        }
    }
    panic!("a log without an end");
}

fn bits(tokens: &[Emitted]) -> Vec<(TokenId, Vec<u32>)> {
    let of = |token: &Emitted| {
        let logprobs = token.logprobs.as_ref().unwrap();
        let top = logprobs.top.iter().map(|(_, value)| value.to_bits());
        (
            token.id,
            [logprobs.chosen.to_bits()].into_iter().chain(top).collect(),
        )
    };
    tokens.iter().map(of).collect()
}

#[tokio::test]
async fn a_form_holds_and_nothing_else_changes_a_bit() {
    let text = text_model();
    let lone = engine(false);
    let mut cases = Vec::new();
    let mut ended = 0;
    for (number, form) in forms().into_iter().enumerate() {
        for kind in 0..3 {
            let asked = request(&text, Some(&form), kind, DraftDepth::Fixed(0));
            let id = format!("{number}.{kind}");
            let cursor = lone.generate(&id, Some(asked), 0).unwrap().cursor;
            let (tokens, outcome) = read(cursor).await;
            let ids: Vec<TokenId> = tokens.iter().map(|token| token.id).collect();
            if let FinishReason::StopToken(_) = outcome.reason {
                let answer = text.tokenizer().decode(&ids[..ids.len() - 1], false);
                assert!(fits(number, &answer), "{form:?}: {answer:?}");
                ended += 1;
            } else {
                assert_eq!(outcome.reason, FinishReason::Length);
            }
            cases.push((form.clone(), kind, id, tokens));
        }
    }
    assert!(ended > cases.len() / 2, "{ended} of {} ended", cases.len());

    let engine = engine(true);
    for draft in [DraftDepth::Auto, DraftDepth::Fixed(3), DraftDepth::Fixed(8)] {
        let company: Vec<_> = cases
            .iter()
            .map(|(form, kind, id, _)| {
                let id = format!("{id}.{draft:?}").replace(['(', ')'], ".");
                let asked = request(&text, Some(form), *kind, draft);
                engine.generate(&id, Some(asked), 0).unwrap().cursor
            })
            .collect();
        for (cursor, (form, kind, _, expected)) in company.into_iter().zip(&cases) {
            let (tokens, _) = read(cursor).await;
            assert_eq!(bits(&tokens), bits(expected), "{form:?}, {kind}, {draft:?}");
        }
    }
    // Another brain goes on from what a client holds.
    for (form, kind, id, expected) in &cases {
        let held = expected.len() / 2;
        let mut asked = request(&text, Some(form), *kind, DraftDepth::Auto);
        asked.received = expected[..held].iter().map(|token| token.id).collect();
        let id = format!("{id}.again");
        let cursor = engine.generate(&id, Some(asked), held).unwrap().cursor;
        let (tokens, _) = read(cursor).await;
        assert_eq!(
            bits(&tokens),
            bits(&expected[held..]),
            "{form:?}, {kind}, from {held}"
        );
    }
    let stats = engine.stats().sched;
    println!(
        "{} tokens by a grammar, {} drafts checked and {} right, {} of them the only ones allowed, \
         {} cut",
        stats.constrained_tokens,
        stats.drafted_tokens,
        stats.accepted_tokens,
        stats.forced_tokens,
        stats.cut_drafts
    );
    assert_eq!(stats.constrained_tokens, stats.generated_tokens);
    assert!(stats.accepted_tokens > 0 && stats.forced_tokens > 0 && stats.cut_drafts > 0);
}

#[tokio::test]
async fn a_form_that_the_model_keeps_to_by_itself_changes_nothing() {
    let text = text_model();
    let engine = engine(true);
    for kind in 0..2 {
        let free = request(&text, None, kind, DraftDepth::Auto);
        let free = engine
            .generate(&format!("free{kind}"), Some(free), 0)
            .unwrap();
        let expected = read(free.cursor).await.0;
        for form in [calls(true), calls(false)] {
            let asked = request(&text, Some(&form), kind, DraftDepth::Auto);
            let id = format!(
                "formed{kind}.{}",
                matches!(&form, Form::Calls(c) if c.required)
            );
            let formed = engine.generate(&id, Some(asked), 0).unwrap();
            assert_eq!(
                bits(&read(formed.cursor).await.0),
                bits(&expected),
                "{kind}"
            );
        }
    }
}

#[tokio::test]
async fn tokens_that_break_the_form_are_no_tokens_of_the_request() {
    let text = text_model();
    let engine = engine(false);
    let form = Form::Choice(vec!["yes".into()]);
    let mut asked = request(&text, Some(&form), 0, DraftDepth::Auto);
    asked.received = text.tokenizer().encode("no").unwrap();
    let error = engine.generate("g", Some(asked), 0).unwrap_err();
    assert!(error.to_string().contains("breaks the grammar"), "{error}");
    // A grammar is never passed over.
    let mut asked = request(&text, Some(&form), 0, DraftDepth::Auto);
    asked.constraint = None;
    engine.generate("h", Some(asked), 0).unwrap_err();
}
