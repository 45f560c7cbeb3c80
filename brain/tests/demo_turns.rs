//! Turns of an agent on the built-in checkpoint: each prompt goes on from the tokens of the last
//! turn. Whatever drafts, the tokens and the bits of their log-probabilities are the same, drafts
//! save rounds, and every prompt but the first is taken from the anchor of the turn before it.

#![allow(
    clippy::unwrap_used,
    reason = "helpers of tests; a failure is a failed test"
)]

use std::{sync::Arc, time::Duration};

use brain::{
    backend::cpu::{CpuExecutor, CpuOptions},
    demo,
    engine::{Engine, EngineConfig, LogEvent, clock::SystemClock},
    model::load_embedded,
    sched::{
        request::Request,
        types::{DraftDepth, SamplingParams, TokenId},
    },
    text::{
        conversation::{Conversation, Message, Role, Tool},
        model::TextModel,
        template::Template,
        tokenizer::Tokenizer,
    },
};

const TURNS: u64 = 10;
const GOAL: &str = "Work through the records in the folder inbox. Start the file report.txt with \
    the line \"Records of Mira\". For every record, in the order of the listing: read it, append \
    the line \"NAME | OWNER | CODE\" to report.txt, then edit \"state: open\" to \"state: done\" in \
    the record. If a record cannot be read, append \"NAME | unreadable\" and go on. At the end \
    look at report.txt, then finish.";
const SYSTEM: &str = "You are a careful agent. Do the task with the tools, one call at a time. \
    When everything is done, call finish.";

fn text_model() -> TextModel {
    let tokenizer = Tokenizer::from_bytes(demo::TOKENIZER, "demo").unwrap();
    TextModel::new(Arc::new(tokenizer), Template::new(demo::TEMPLATE).unwrap()).unwrap()
}

fn first_prompt(text: &TextModel) -> Vec<TokenId> {
    let listed: serde_json::Value =
        serde_json::from_str(include_str!("../assets/demo/train/tools.json")).unwrap();
    let tools = listed.as_array().unwrap().iter().map(|tool| Tool {
        name: tool["function"]["name"].as_str().unwrap().into(),
        description: tool["function"]["description"].as_str().unwrap().into(),
        parameters: tool["function"]["parameters"].as_object().cloned(),
    });
    let conversation = Conversation {
        messages: vec![
            Message::new(Role::System, SYSTEM),
            Message::new(Role::User, GOAL),
        ],
        tools: tools.collect(),
        thinking: false,
    };
    text.render(&conversation, true).unwrap()
}

/// What the tools answer to the call in a turn's text.
fn answer(turn: &str) -> Message {
    let between = |from: &str, to: &str| {
        turn.split_once(from)
            .and_then(|(_, rest)| rest.split_once(to))
            .map_or("", |(it, _)| it)
    };
    let (name, path) = (between("call:", "{"), between("path:<|\"|>", "<|\"|>"));
    let content = match name {
        "ls" => "bado.txt\nfelu.txt\ngimora.txt\nhuse.txt\nkavi.txt".into(),
        "read" => {
            let place = path.len() + path.bytes().map(usize::from).sum::<usize>();
            let code = 1000 + place * 7919 % 9000;
            format!("place: harbor\nowner: Tolini\nstate: open\ncode: {code}")
        }
        "append" => format!("appended to {path}"),
        "write" => format!("wrote {path}"),
        "edit" => format!("edited {path}"),
        _ => "(no output)".into(),
    };
    Message {
        name: name.into(),
        ..Message::new(Role::Tool, content)
    }
}

#[derive(Debug, Default)]
struct Done {
    /// Ids and bits of the log-probabilities of all turns.
    tokens: Vec<(TokenId, u32)>,
    rounds: usize,
    drafted: usize,
    accepted: usize,
    prompt: usize,
    cached: usize,
    decode: Duration,
}

async fn turns(text: &TextModel, drafter: bool, draft: DraftDepth) -> Done {
    let model = load_embedded(&demo::CHECKPOINT, drafter).unwrap();
    let stops = model.defaults.eos.clone();
    let executor = CpuExecutor::new(model, &CpuOptions::default()).unwrap();
    let clock = Arc::new(SystemClock::start());
    let engine = Engine::start(Box::new(executor), EngineConfig::default(), clock).unwrap();
    let mut prompt = first_prompt(text);
    let mut done = Done::default();
    for turn in 0..TURNS {
        let params = SamplingParams {
            temperature: 1.0,
            top_k: 64,
            top_p: 0.95,
            seed: turn,
            stop_tokens: stops.clone(),
            logprobs: 1,
            ..SamplingParams::greedy(200)
        };
        let request = Request {
            draft,
            run_id: "run".into(),
            ..Request::new(prompt.clone(), params)
        };
        let id = format!("turn{turn}");
        let mut cursor = engine.generate(&id, Some(request), 0).unwrap().cursor;
        let mut ids = Vec::new();
        while let Some(event) = cursor.next().await {
            match event {
                LogEvent::Tokens { tokens, .. } => {
                    for token in tokens {
                        ids.push(token.id);
                        done.tokens
                            .push((token.id, token.logprobs.unwrap().chosen.to_bits()));
                    }
                }
                LogEvent::Finished(outcome) => {
                    done.rounds += outcome.usage.rounds;
                    done.drafted += outcome.usage.drafted;
                    done.accepted += outcome.usage.accepted;
                    done.prompt += outcome.usage.prompt;
                    done.cached += outcome.usage.cached;
                    done.decode += outcome.timings.decode;
                    if turn > 0 {
                        assert!(outcome.usage.cached > 0, "turn {turn} was prefilled anew");
                    }
                }
            }
        }
        prompt.extend(&ids);
        let tool = answer(&text.tokenizer().decode(&ids, false));
        match text.append(&prompt, &[tool], false, true) {
            Ok(more) => prompt.extend(more),
            Err(_) => break,
        }
    }
    done
}

#[tokio::test]
async fn drafts_change_no_bit_and_save_rounds() {
    let text = text_model();
    let plain = turns(&text, false, DraftDepth::Fixed(0)).await;
    assert_eq!(plain.rounds, plain.tokens.len());
    for draft in [DraftDepth::Auto, DraftDepth::Fixed(2), DraftDepth::Fixed(8)] {
        let done = turns(&text, true, draft).await;
        let per_round = done.tokens.len() as f64 / done.rounds as f64;
        println!(
            "{draft:?}: {} tokens, {per_round:.2} a round, {} of {} drafts right, {} of {} prompt \
             tokens from anchors, {:.0} tokens/s decoding, {:.0} without a drafter",
            done.tokens.len(),
            done.accepted,
            done.drafted,
            done.cached,
            done.prompt,
            done.tokens.len() as f64 / done.decode.as_secs_f64(),
            plain.tokens.len() as f64 / plain.decode.as_secs_f64(),
        );
        assert_eq!(done.tokens, plain.tokens, "{draft:?}");
        // What `Auto` chooses depends on how busy the machine is.
        if let DraftDepth::Fixed(_) = draft {
            assert!(per_round > 2.0, "{draft:?}: {per_round} tokens a round");
        }
    }
}
