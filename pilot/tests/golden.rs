//! Journals of earlier versions must be read for ever: their bytes, and what they fold into.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

use std::fmt::Write as _;

use pilot::{
    journal::{
        Head,
        codec::{Stamp, decode, encode},
    },
    run::{
        decide::{Effect, decide},
        entry::{
            AnswerEnd, AnswerEnded, Created, Entry, Limits, ModelPin, PauseReason, ResultOrigin,
            RunId, SamplingChoice, ToolEnded, ToolIntended, Turn, Usage,
        },
        seed::answer_seed,
        state::{State, Status},
    },
    tools::{Class, Facts, FileFacts, FileImage, ToolCall, ToolOutput},
};

/// One line a record, hexadecimal.
const VERSION_1: &str = include_str!("golden/journal-1.hex");

fn run() -> RunId {
    RunId::new("golden-1").unwrap()
}

fn model(fingerprint: &str) -> ModelPin {
    ModelPin {
        name: "tiny".into(),
        fingerprint: fingerprint.into(),
        template_hash: "t1".into(),
        max_model_len: 4096,
    }
}

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: "call_0".into(),
        name: name.into(),
        arguments: arguments.into(),
    }
}

fn ended(ids: Vec<u32>, index: u32, end: AnswerEnd, calls: Vec<ToolCall>) -> Entry {
    let turn = Turn {
        content: "Well.".into(),
        reasoning: "hm".into(),
        calls,
    };
    let usage = Usage {
        prompt: 4,
        cached: 3,
        generated: 5,
        drafted: 4,
        accepted: 2,
        rounds: 3,
    };
    Entry::AnswerEnded(Box::new(AnswerEnded {
        index,
        ids,
        end,
        turn,
        usage,
        elapsed_ms: 17,
    }))
}

fn asked(step: u64, attempt: u32, prompt_tokens: u32) -> Entry {
    let seed = answer_seed(99, step, attempt);
    Entry::AnswerAsked {
        step,
        attempt,
        seed,
        prompt_tokens,
        prompt_hash: [7; 32],
    }
}

/// A history with every kind of entry.
fn history() -> Vec<Entry> {
    let limits = Limits {
        steps: 100,
        tokens: 0,
        active_ms: 5000,
    };
    let append = call("append", r#"{"path":"a","content":"b"}"#);
    let facts = FileFacts {
        path: "a".into(),
        before: None,
        after: FileImage {
            len: 2,
            hash: [9; 32],
        },
    };
    vec![
        Entry::Created(Box::new(Created {
            run: run(),
            goal: "Do it – well.".into(),
            system: "Be careful.".into(),
            workspace: "/srv/work".into(),
            seed: 99,
            context_limit: 4096,
            answer_reserve: 256,
            limits: limits.clone(),
            sampling: SamplingChoice {
                temperature: Some(1.0),
                top_k: Some(64),
                top_p: None,
            },
            allow_bash: true,
            tools_hash: [5; 32],
            model: model("f1"),
        })),
        Entry::PromptStarted {
            head: vec![2, 105, 1023, 262_143],
            first_exchange: 0,
        },
        asked(0, 0, 4),
        ended(vec![1; 5], 0, AnswerEnd::Length, vec![]),
        asked(0, 1, 4),
        Entry::TokensReceived {
            index: 0,
            ids: vec![300, 301],
        },
        ended(vec![302, 50], 2, AnswerEnd::Stop, vec![append.clone()]),
        Entry::ToolIntended(Box::new(ToolIntended {
            call: 0,
            request: append,
            class: Class::Verifiable,
            facts: Facts::File(facts),
        })),
        Entry::Paused(PauseReason::Stopped),
        Entry::Resumed {
            limits: limits.clone(),
            model: Some(model("f2")),
        },
        Entry::ToolEnded(Box::new(ToolEnded {
            call: 0,
            output: ToolOutput::ok("appended to a"),
            origin: ResultOrigin::VerifiedDone,
            elapsed_ms: 3,
        })),
        Entry::MessagesAppended {
            ids: vec![51, 52],
            nudge: false,
        },
        asked(1, 0, 10),
        ended(vec![400, 106], 0, AnswerEnd::Stop, vec![]),
        Entry::MessagesAppended {
            ids: vec![105, 53],
            nudge: true,
        },
        Entry::PromptStarted {
            head: vec![2, 105],
            first_exchange: 1,
        },
        asked(2, 0, 6),
        ended(
            vec![401, 50],
            0,
            AnswerEnd::Stop,
            vec![call("bash", "{}"), call("finish", "{}")],
        ),
        Entry::ToolEnded(Box::new(ToolEnded {
            call: 1,
            output: ToolOutput::error("no tool bash"),
            origin: ResultOrigin::Refused,
            elapsed_ms: 0,
        })),
        Entry::ToolIntended(Box::new(ToolIntended {
            call: 2,
            request: call("finish", "{}"),
            class: Class::Pure,
            facts: Facts::Spool {
                name: "000002".into(),
            },
        })),
        Entry::ToolEnded(Box::new(ToolEnded {
            call: 2,
            output: ToolOutput {
                finish: Some("done".into()),
                ..ToolOutput::ok("done")
            },
            origin: ResultOrigin::Executed,
            elapsed_ms: 1,
        })),
        Entry::Finished {
            summary: "done".into(),
        },
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    digits
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// The history, encoded as today.
fn encoded() -> String {
    let mut head = Head::EMPTY;
    let mut lines = String::new();
    for entry in history() {
        let stamp = Stamp {
            epoch: 1,
            wall_ms: 1_767_225_600_000,
        };
        let (bytes, next) = encode(&run(), head, stamp, &entry).unwrap();
        lines.push_str(&hex(&bytes));
        lines.push('\n');
        head = next;
    }
    lines
}

#[test]
fn version_1_is_written_and_read_as_it_always_was() {
    assert_eq!(
        encoded(),
        VERSION_1,
        "the encoding changed: add a version instead"
    );
    let mut head = Head::EMPTY;
    let mut read = Vec::new();
    for line in VERSION_1.lines() {
        let (record, next) = decode(&run(), head, &unhex(line)).unwrap();
        read.push(record.entry);
        head = next;
    }
    assert_eq!(read, history());
}

/// Kinds of entries that came later say so in their record: who knows version 1 only is told that a
/// newer pilot wrote them.
#[test]
fn version_2_adds_how_answers_are_asked_for() {
    let stamp = Stamp {
        epoch: 1,
        wall_ms: 1_767_225_600_000,
    };
    let entry = Entry::CallsConstrained;
    let (bytes, _) = encode(&run(), Head::EMPTY, stamp, &entry).unwrap();
    assert_eq!((bytes[5], hex(&bytes[84..85])), (2, "0b".into()));
    let (record, _) = decode(&run(), Head::EMPTY, &bytes).unwrap();
    assert_eq!(record.entry, entry);
    let mut state = State::fold(&history()[..1]).unwrap();
    assert!(!state.calls_constrained, "old journals ask as they did");
    state.apply(&entry).unwrap();
    assert!(state.calls_constrained);
    state.clone().apply(&entry).unwrap_err();
    let mut begun = State::fold(&history()[..2]).unwrap();
    begun.apply(&entry).unwrap_err();
}

#[test]
fn version_3_adds_another_context_limit() {
    let entry = Entry::ContextChanged { limit: 300 };
    let stamp = Stamp {
        epoch: 1,
        wall_ms: 1_767_225_600_000,
    };
    let (bytes, _) = encode(&run(), Head::EMPTY, stamp, &entry).unwrap();
    assert_eq!((bytes[5], hex(&bytes[84..87])), (3, "0cac02".into()));
    let (record, _) = decode(&run(), Head::EMPTY, &bytes).unwrap();
    assert_eq!(record.entry, entry);
    let mut state = State::fold(&history()[..2]).unwrap();
    assert_eq!(state.context_limit(), 4096);
    state.apply(&entry).unwrap();
    assert_eq!(state.context_limit(), 300);
    // The model takes no more than it takes.
    state.apply(&Entry::ContextChanged { limit: 9000 }).unwrap();
    assert_eq!(state.context_limit(), 4096);
}

#[test]
fn the_history_folds_into_the_state_it_always_did() {
    let history = history();
    let state = State::fold(&history).unwrap();
    assert_eq!(state.status, Status::Finished("done".into()));
    assert_eq!(state.created.model.fingerprint, "f2");
    assert_eq!((state.step, state.attempt, state.nudges), (3, 0, 0));
    assert_eq!(state.prompt.first, 1);
    assert_eq!(state.prompt.tokens(), [2, 105, 400, 106, 105, 53]);
    let totals = state.totals;
    assert_eq!((totals.answers, totals.calls, totals.errors), (3, 3, 1));
    assert_eq!(
        (totals.recovered, totals.unknown, totals.resumes),
        (1, 0, 1)
    );
    assert_eq!((totals.generated, totals.prompts), (13, 2));
    assert_eq!(
        (totals.drafted, totals.accepted, totals.rounds),
        (16, 8, 12)
    );
    assert_eq!(totals.active_ms, 4 * 17 + 4);
    assert_eq!(hex(&state.token_chain[..8]), TOKEN_CHAIN);
    assert_eq!(decide(&state), Effect::Rest);
}

/// First bytes of the chain over every answer's tokens.
const TOKEN_CHAIN: &str = "02c2f3dfae5d9e6b";

#[test]
fn seeds_of_answers_are_those_that_old_journals_hold() {
    assert_eq!(answer_seed(99, 0, 0), SEED_99_0_0);
}

const SEED_99_0_0: u64 = 5_918_732_559_836_887_407;

/// What comes next after each entry, in the order of the history.
#[test]
fn decisions_follow_the_history() {
    let history = history();
    let names: Vec<&str> = (1..=history.len())
        .map(
            |count| match decide(&State::fold(&history[..count]).unwrap()) {
                Effect::StartPrompt { .. } => "prompt",
                Effect::Ask { .. } => "ask",
                Effect::Stream => "stream",
                Effect::Prepare { .. } => "prepare",
                Effect::Settle(_) => "settle",
                Effect::AppendResults(_) => "append",
                Effect::Nudge => "nudge",
                Effect::Finish { .. } => "finish",
                Effect::Pause(_) => "pause",
                Effect::Rest => "rest",
            },
        )
        .collect();
    assert_eq!(
        names,
        [
            "prompt", "ask", "stream", "ask", "stream", "stream", "prepare", "settle", "rest",
            "settle", "append", "ask", "stream", "nudge", "ask", "ask", "stream", "prepare",
            "prepare", "settle", "finish", "rest"
        ]
    );
}

#[test]
fn entries_out_of_place_are_errors_wherever_they_come() {
    let history = history();
    let mut refused = 0;
    for at in 1..history.len() {
        let state = State::fold(&history[..at]).unwrap();
        for entry in &history {
            // Whatever it is, it is taken or refused; nothing panics.
            let mut next = state.clone();
            refused += usize::from(next.apply(entry).is_err());
        }
    }
    assert!(refused > 300, "only {refused} were refused");
}
