//! `brain generate`: one answer, printed as it comes. No server; a request goes the way of every
//! other.

use std::{io::Write as _, time::Instant};

use marathon_proto::{
    brain::{self as pb, generation_spec::Prompt},
    status::Problem,
};

use crate::{
    bringup,
    cli::GenerateArgs,
    config::Config,
    error::Error,
    sched::{request::FinishReason, sequence::Outcome},
    serving::{Read, Return, Serving},
    text::turn::{TurnEvent, call_id},
};

/// Generates one answer and prints it.
pub fn generate(args: &GenerateArgs, config: &Config) -> Result<(), Error> {
    bringup::check(config)?;
    let serving = bringup::bring_up(&config.apart())?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .map_err(|error| Error::Serving(format!("no runtime: {error}")))?;
    runtime.block_on(run(args, &serving))
}

async fn run(args: &GenerateArgs, serving: &Serving) -> Result<(), Error> {
    let spec = pb::GenerationSpec {
        prompt: Some(prompt(args, serving)?),
        sampling: Some(pb::Sampling {
            temperature: args.temperature,
            seed: Some(args.seed),
            max_tokens: args.max_tokens,
            ..pb::Sampling::default()
        }),
        ..pb::GenerationSpec::default()
    };
    let started = Instant::now();
    let opened = serving.open("generate", Some(spec), 0, Return::Never).await;
    let mut reader = opened.map_err(|problem| refused(&problem))?.reader;
    while let Some(read) = reader.next().await {
        match read {
            Read::Tokens(round) => print(&round.delta.turn)?,
            Read::Finished(ending) => {
                print(&[TurnEvent::Content("\n".to_owned())])?;
                return report(&ending.outcome, started);
            }
        }
    }
    Err(Error::Serving("the engine ended before the answer".into()))
}

fn refused(problem: &Problem) -> Error {
    Error::Usage(match &problem.field {
        Some(field) => format!("{field}: {}", problem.message),
        None => problem.message.clone(),
    })
}

fn prompt(args: &GenerateArgs, serving: &Serving) -> Result<Prompt, Error> {
    if args.raw {
        let tokens = serving.text.tokenizer().encode_with_specials(&args.prompt);
        let ids = tokens.map_err(|error| Error::Usage(error.to_string()))?;
        return Ok(Prompt::PromptTokens(pb::TokenIds { ids }));
    }
    let message = |role: &str, content: &str| pb::Message {
        role: role.to_owned(),
        content: content.to_owned(),
        ..pb::Message::default()
    };
    let system = args.system.iter().map(|text| message("system", text));
    let user = message("user", &args.prompt);
    Ok(Prompt::Conversation(pb::Conversation {
        messages: system.chain([user]).collect(),
        enable_thinking: args.thinking,
        ..pb::Conversation::default()
    }))
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
