//! `brain generate`: one answer, printed as it comes. No server, the same path of tokens.

use std::{io::Write as _, sync::Arc, time::Instant};

use crate::{
    bringup,
    cli::GenerateArgs,
    config::Config,
    engine::LogEvent,
    error::Error,
    sched::{
        request::{FinishReason, Request},
        sequence::Outcome,
        types::{SamplingParams, TokenId},
    },
    serving::Serving,
    text::{
        conversation::{Conversation, Message, Role},
        stream::{StreamOptions, TurnStream},
        turn::{Start, TurnEvent, call_id},
    },
};

/// Generates one answer and prints it.
pub fn generate(args: &GenerateArgs, config: &Config) -> Result<(), Error> {
    bringup::check(config)?;
    let serving = bringup::bring_up(config)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|error| Error::Serving(format!("no runtime: {error}")))?;
    runtime.block_on(run(args, &serving))
}

async fn run(args: &GenerateArgs, serving: &Serving) -> Result<(), Error> {
    let prompt = prompt(args, serving)?;
    let room = serving.engine.max_len().saturating_sub(prompt.len());
    let facts = &serving.facts;
    let params = SamplingParams {
        temperature: args.temperature.unwrap_or(facts.defaults.temperature),
        top_k: facts.defaults.top_k,
        top_p: facts.defaults.top_p,
        min_p: 0.0,
        seed: args.seed,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Default::default(),
        suppressed: facts.suppressed.clone(),
        stop_tokens: facts.stop_tokens.clone(),
        min_tokens: 0,
        max_tokens: args.max_tokens.unwrap_or(room as u32).max(1),
        logprobs: 0,
    };
    let tokenizer = serving.text.tokenizer().clone();
    let mut text = TurnStream::new(
        tokenizer.clone(),
        StreamOptions {
            start: Start::after(&prompt, tokenizer.markers()),
            schemas: Arc::default(),
            stop_strings: Vec::new(),
            stop_tokens: params.stop_tokens.clone(),
            min_tokens: 0,
        },
    );
    let request = Request {
        draft: facts.draft,
        ..Request::new(prompt, params)
    };
    let started = Instant::now();
    let mut cursor = serving
        .engine
        .generate("generate", Some(request), 0)
        .map_err(|error| Error::Usage(error.to_string()))?
        .cursor;
    while let Some(event) = cursor.next().await {
        match event {
            LogEvent::Tokens { tokens, .. } => {
                let ids: Vec<TokenId> = tokens.iter().map(|token| token.id).collect();
                print(&text.push(&ids).turn)?;
            }
            LogEvent::Finished(outcome) => {
                print(&text.finish().turn)?;
                print(&[TurnEvent::Content("\n".to_owned())])?;
                return report(&outcome, started);
            }
        }
    }
    Err(Error::Serving("the engine ended before the answer".into()))
}

fn prompt(args: &GenerateArgs, serving: &Serving) -> Result<Vec<TokenId>, Error> {
    if args.raw {
        let tokens = serving.text.tokenizer().encode_with_specials(&args.prompt);
        return tokens.map_err(|error| Error::Usage(error.to_string()));
    }
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(Message::new(Role::System, system));
    }
    messages.push(Message::new(Role::User, &args.prompt));
    let conversation = Conversation {
        messages,
        tools: Vec::new(),
        thinking: args.thinking,
    };
    serving
        .text
        .render(&conversation, true)
        .map_err(|error| Error::Usage(error.to_string()))
}

fn print(events: &[TurnEvent]) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    let mut written = Ok(());
    for event in events {
        written = written.and_then(|()| match event {
            TurnEvent::Content(text) | TurnEvent::Reasoning(text) => write!(out, "{text}"),
            TurnEvent::CallStart { index, name } => write!(out, "\n[{}] {name} ", call_id(*index)),
            TurnEvent::CallArguments { json, .. } => write!(out, "{json}"),
        });
    }
    written
        .and_then(|()| out.flush())
        .map_err(|error| Error::Serving(format!("cannot print: {error}")))
}

fn report(outcome: &Outcome, started: Instant) -> Result<(), Error> {
    let usage = &outcome.usage;
    let decode = outcome.timings.decode.as_secs_f64().max(1e-9);
    let rounds = usage.rounds.max(1) as f64;
    let line = format!(
        "\n{} prompt tokens in {:.2} s; {} tokens, {:.0} a second, {:.2} a round; {:.2} s in all",
        usage.prompt,
        outcome.timings.ttft.as_secs_f64(),
        usage.generated,
        usage.generated.saturating_sub(1) as f64 / decode,
        usage.generated as f64 / rounds,
        started.elapsed().as_secs_f64(),
    );
    // proof: the answer is out; a closed standard error takes only the figures.
    let _ = writeln!(std::io::stderr(), "{line}");
    match &outcome.reason {
        FinishReason::Failed(reason) => Err(Error::Serving(reason.clone())),
        _ => Ok(()),
    }
}
