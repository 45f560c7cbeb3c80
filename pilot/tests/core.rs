//! The pure core alone, driven by chance: whatever the model and the tools do, what `decide` asks for
//! can be journaled, and any journal folds into the state it was written in.

#![allow(clippy::unwrap_used, reason = "a failure here is a failed test")]

use pilot::{
    run::{
        decide::{Effect, MAX_DROPPED, MAX_NUDGES, answer_limit, decide, results_limit},
        entry::{
            AnswerEnd, AnswerEnded, Created, Entry, Limits, ModelPin, PauseReason, ResultOrigin,
            RunId, SamplingChoice, ToolEnded, ToolIntended, Turn, Usage,
        },
        prompt::COMPACTION_NOTE,
        state::{Phase, State, Status},
    },
    tools::{Class, Facts, ToolCall, ToolOutput},
};
use proptest::prelude::*;

const LIMITS: Limits = Limits {
    steps: 0,
    tokens: 0,
    active_ms: 0,
};

fn created(context_limit: u32, answer_reserve: u32) -> Created {
    Created {
        run: RunId::new("core").unwrap(),
        goal: "goal".into(),
        system: "system".into(),
        workspace: "/w".into(),
        seed: 1,
        context_limit,
        answer_reserve,
        limits: LIMITS,
        sampling: SamplingChoice::default(),
        allow_bash: false,
        tools_hash: [0; 32],
        model: ModelPin {
            name: "m".into(),
            fingerprint: "f".into(),
            template_hash: "t".into(),
            max_model_len: context_limit,
        },
    }
}

/// Chance, as proptest shrinks it: zeros when it has run out.
struct Dice<'a>(std::slice::Iter<'a, u8>);

impl Dice<'_> {
    fn roll(&mut self, sides: u8) -> u8 {
        self.0.next().copied().unwrap_or(0) % sides
    }
}

fn ids(count: usize, of: u32) -> Vec<u32> {
    vec![of; count]
}

/// What the world answers to an effect; heads have `head` tokens, and more with a note.
fn outcome(state: &State, effect: Effect, dice: &mut Dice<'_>, head: usize) -> Vec<Entry> {
    match effect {
        Effect::StartPrompt {
            first_exchange,
            note,
        } => {
            vec![Entry::PromptStarted {
                head: ids(head + usize::from(note) * COMPACTION_NOTE.len(), 2),
                first_exchange,
            }]
        }
        Effect::Ask {
            step,
            attempt,
            seed,
            prompt_tokens,
            prompt_hash,
        } => {
            vec![Entry::AnswerAsked {
                step,
                attempt,
                seed,
                prompt_tokens,
                prompt_hash,
            }]
        }
        Effect::Stream => stream(state, dice),
        Effect::Prepare { call, request } => match dice.roll(4) {
            0 => vec![result(
                call,
                ToolOutput::error("refused"),
                ResultOrigin::Refused,
            )],
            _ => {
                let (class, facts) = (Class::Pure, Facts::None);
                vec![Entry::ToolIntended(Box::new(ToolIntended {
                    call,
                    request,
                    class,
                    facts,
                }))]
            }
        },
        Effect::Settle(intent) => {
            let mut output = ToolOutput::ok(dice.roll(4).to_string());
            output.finish = (dice.roll(60) == 59).then(|| "done".to_owned());
            let origin = [
                ResultOrigin::Executed,
                ResultOrigin::Reran,
                ResultOrigin::Unknown,
            ][dice.roll(3) as usize];
            vec![result(intent.call, output, origin)]
        }
        Effect::AppendResults(results) => {
            let count = results.len() * (1 + usize::from(dice.roll(250)));
            let count = count.min(results_limit(state));
            vec![Entry::MessagesAppended {
                ids: ids(count, 3),
                nudge: false,
            }]
        }
        Effect::Nudge => vec![Entry::MessagesAppended {
            ids: ids(9, 4),
            nudge: true,
        }],
        Effect::Finish { summary } => vec![Entry::Finished { summary }],
        Effect::Pause(reason) => vec![Entry::Paused(reason)],
        Effect::Rest => vec![],
    }
}

fn result(call: u64, output: ToolOutput, origin: ResultOrigin) -> Entry {
    Entry::ToolEnded(Box::new(ToolEnded {
        call,
        output,
        origin,
        elapsed_ms: 1,
    }))
}

fn stream(state: &State, dice: &mut Dice<'_>) -> Vec<Entry> {
    let Phase::Answering(answering) = &state.phase else {
        panic!("no answer is being made")
    };
    let index = answering.received.len() as u32;
    let room = answer_limit(state) - index;
    let more = ids(usize::from(dice.roll(250)).min(room as usize), 5);
    if dice.roll(3) == 0 {
        return vec![Entry::TokensReceived { index, ids: more }];
    }
    let call = |number: u8| ToolCall {
        id: format!("call_{number}"),
        name: "tool".into(),
        arguments: dice_name(number),
    };
    let calls = (0..dice.roll(4)).map(call).collect();
    let end = match dice.roll(8) {
        6 => AnswerEnd::Length,
        7 => AnswerEnd::Malformed,
        _ => AnswerEnd::Stop,
    };
    let turn = Turn {
        calls,
        ..Turn::default()
    };
    let usage = Usage::default();
    vec![Entry::AnswerEnded(Box::new(AnswerEnded {
        index,
        ids: more,
        end,
        turn,
        usage,
        elapsed_ms: 1,
    }))]
}

fn dice_name(number: u8) -> String {
    format!("{{\"n\":{number}}}")
}

fn check_invariants(state: &State) {
    assert!(state.nudges <= MAX_NUDGES);
    assert!(state.dropped <= MAX_DROPPED);
    if let Phase::Answering(_) = state.phase {
        let room = state.created.context_limit as usize - state.prompt.len();
        assert!(
            room >= state.created.answer_reserve as usize,
            "{room} tokens left for an answer"
        );
    }
    if let Status::Finished(summary) = &state.status {
        assert_eq!(summary, "done");
    }
}

proptest! {
    #[test]
    fn whatever_happens_the_journal_can_be_written_and_read(
        rolls in proptest::collection::vec(any::<u8>(), 0..900),
        limit in 150_u32..600,
        restart_every in 1_usize..20,
    ) {
        let mut dice = Dice(rolls.iter());
        let mut entries = vec![Entry::Created(Box::new(created(limit, 60)))];
        let mut state = State::fold(&entries).unwrap();
        for round in 1..300 {
            let effect = decide(&state);
            let mut next = outcome(&state, effect.clone(), &mut dice, 20);
            if effect == Effect::Rest {
                if matches!(state.status, Status::Finished(_)) {
                    break;
                }
                // A person lets a paused run go on.
                next = vec![Entry::Resumed { limits: LIMITS, model: None }];
            }
            for entry in &next {
                prop_assert_eq!(state.apply(entry), Ok(()), "{} after {:?}", entry.name(), effect);
            }
            entries.extend(next);
            check_invariants(&state);
            if round % restart_every == 0 {
                // A restart: the same state from the journal alone…
                let folded = State::fold(&entries).unwrap();
                prop_assert_eq!(&folded, &state);
                if state.status == Status::Running {
                    // …and taking it up again changes nothing about what comes next.
                    let entry = Entry::Resumed { limits: LIMITS, model: None };
                    let before = decide(&state);
                    state.apply(&entry).unwrap();
                    entries.push(entry);
                    prop_assert_eq!(decide(&state), before);
                }
            }
        }
    }

    /// However long its answers and their results are, and however large its head.
    #[test]
    fn a_run_with_room_for_two_answers_never_wants_context(
        rolls in proptest::collection::vec(any::<u8>(), 0..900),
        limit in 300_u32..900,
        share in 0_usize..=100,
    ) {
        let mut dice = Dice(rolls.iter());
        let reserve = 60;
        let largest = limit as usize - COMPACTION_NOTE.len() - 2 * reserve as usize - 40;
        let head = largest * share / 100;
        let mut state = State::fold(&[Entry::Created(Box::new(created(limit, reserve)))]).unwrap();
        for _ in 0..300 {
            let effect = decide(&state);
            let mut next = outcome(&state, effect.clone(), &mut dice, head);
            if effect == Effect::Rest {
                match &state.status {
                    Status::Finished(_) => break,
                    Status::Paused(reason) => prop_assert!(
                        !matches!(reason, PauseReason::ContextTooSmall { .. }),
                        "{} with a head of {} in {}", reason, head, limit
                    ),
                    Status::Running => {}
                }
                next = vec![Entry::Resumed { limits: LIMITS, model: None }];
            }
            for entry in &next {
                prop_assert_eq!(state.apply(entry), Ok(()), "{} after {:?}", entry.name(), effect);
            }
        }
    }

    #[test]
    fn a_context_too_small_pauses_instead_of_looping(limit in 60_u32..90) {
        let mut entries = vec![Entry::Created(Box::new(created(limit, 59)))];
        let mut state = State::fold(&entries).unwrap();
        for _ in 0..10 {
            let next = outcome(&state, decide(&state), &mut Dice([].iter()), 20);
            for entry in &next {
                state.apply(entry).unwrap();
            }
            entries.extend(next);
        }
        let small = matches!(state.status, Status::Paused(PauseReason::ContextTooSmall { .. }));
        prop_assert!(small == (limit < 79), "{:?} with {}", state.status, limit);
    }
}
