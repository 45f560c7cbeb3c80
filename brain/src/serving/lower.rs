//! A generation as asked for, lowered to the engine's request.

use std::{collections::HashMap, sync::Arc};

use marathon_proto::{
    brain::{self as pb, generation_spec::Prompt},
    status::{Problem, Reason},
};
use serde_json::{Map, Value};

use super::{Serving, conversation, form, problem, sampling, size};
use crate::{
    engine::{Revival, Started},
    sched::{fair::Priority, request::Request, types::TokenId},
    text::{
        conversation::Tool,
        model::TextModel,
        schema::Schema,
        stream::{StreamOptions, schemas},
        turn::Start,
        visible::StopStrings,
    },
};

/// Schemas of the prompt's tools, kept with the generation for its readers.
type Schemas = HashMap<String, Arc<Schema>>;

/// A lowered request.
pub(super) struct Lowered {
    pub(super) request: Request,
    /// The prompt's tokens, when the client does not have them.
    pub(super) prompt_ids: Vec<TokenId>,
}

/// Lowers a specification. Slow in proportion to the prompt: call it on a blocking thread.
pub(super) fn lower(
    serving: &Serving,
    generation_id: &str,
    spec: pb::GenerationSpec,
) -> Result<Lowered, Problem> {
    let facts = &serving.facts;
    if !spec.expected_fingerprint.is_empty() && spec.expected_fingerprint != facts.fingerprint {
        return Err(Problem::new(
            Reason::FingerprintMismatch,
            format!(
                "this brain serves {} with the fingerprint {}, not {}: its tokens would differ",
                facts.name, facts.fingerprint, spec.expected_fingerprint
            ),
        ));
    }
    size::check_run_id(&spec.run_id)?;
    let known = match &spec.prompt {
        Some(Prompt::Conversation(conversation)) => &conversation.tools[..],
        _ => &[],
    };
    let form = form::form(spec.form, known)?;
    let (prompt, tools, given_as_ids) = prompt(serving, spec.prompt)?;
    let scope = sampling::Scope {
        facts,
        generation_id,
        room: serving.engine.max_len().saturating_sub(prompt.len()),
        logprobs: spec.logprobs,
    };
    let resolved = sampling::resolve(spec.sampling.unwrap_or_default(), &scope)?;
    let mut request = Request {
        draft: resolved.draft,
        run_id: spec.run_id,
        priority: priority(spec.priority)?,
        cache_salt: cache_salt(spec.cache_salt)?,
        received: spec.received_tokens,
        stop_strings: resolved.stops,
        note: note_of(&tools),
        ..Request::new(prompt.clone(), resolved.params)
    };
    give_text(&serving.text, &mut request);
    if let Some(form) = form {
        form::apply(&serving.text, &form, &mut request)?;
    }
    let prompt_ids = if given_as_ids { Vec::new() } else { prompt };
    Ok(Lowered {
        request,
        prompt_ids,
    })
}

/// What a note says of a tool: its name and its parameters.
type NotedTool = (String, Option<Map<String, Value>>);

/// Everything that makes a generation readable again after a restart, besides the request itself.
fn note_of(tools: &[Tool]) -> Arc<[u8]> {
    if tools.is_empty() {
        return Arc::default();
    }
    let noted: Vec<NotedTool> = tools
        .iter()
        .map(|tool| (tool.name.clone(), tool.parameters.clone()))
        .collect();
    serde_json::to_vec(&noted).unwrap_or_default().into()
}

/// Makes a request of a generation's log again: what a reader needs, and the grammar where it goes on.
pub(crate) fn revive(text: &TextModel, request: &mut Request, revival: Revival) {
    give_text(text, request);
    if revival == Revival::ToGoOn {
        form::revive(text, request);
    }
}

/// Gives a request what is made from its stop strings and its note: the check for stops, and what
/// readers need.
fn give_text(text: &TextModel, request: &mut Request) {
    request.stop_check = (!request.stop_strings.is_empty()).then(|| {
        Box::new(StopStrings::new(
            text.tokenizer().clone(),
            &request.stop_strings,
            request.params.min_tokens,
        )) as _
    });
    let noted: Vec<NotedTool> = serde_json::from_slice(&request.note).unwrap_or_default();
    let tools = noted.into_iter().map(|(name, parameters)| Tool {
        name,
        description: String::new(),
        parameters,
    });
    let schemas: Arc<Schemas> = schemas(&tools.collect::<Vec<_>>());
    request.reading = Some(schemas);
}

fn priority(level: i32) -> Result<Priority, Problem> {
    let (least, most) = (Priority::RANGE.start(), Priority::RANGE.end());
    Priority::new(level).ok_or_else(|| {
        let message = format!("priority is {level}: give {least} to {most}");
        Problem::invalid("spec.priority", message)
    })
}

/// Bytes of a salt, at most.
const MAX_SALT: usize = 128;

fn cache_salt(salt: String) -> Result<String, Problem> {
    if salt.len() <= MAX_SALT {
        return Ok(salt);
    }
    let message = format!(
        "cache_salt has {} bytes, at most {MAX_SALT} fit",
        salt.len()
    );
    Err(Problem::invalid("spec.cache_salt", message))
}

/// The prompt's tokens, its tools, and whether it was given as tokens.
fn prompt(
    serving: &Serving,
    given: Option<Prompt>,
) -> Result<(Vec<TokenId>, Vec<Tool>, bool), Problem> {
    match given {
        None => Err(Problem::invalid(
            "spec.prompt",
            "the specification has no prompt: give prompt_tokens, prompt_text or conversation",
        )),
        Some(Prompt::PromptTokens(tokens)) => Ok((tokens.ids, Vec::new(), true)),
        Some(Prompt::PromptText(text)) => {
            serving.check_text(text.len())?;
            let tokens = serving
                .text
                .tokenizer()
                .encode(&text)
                .map_err(|error| problem::tokenizer("spec.prompt_text", &error))?;
            Ok((tokens, Vec::new(), false))
        }
        Some(Prompt::Conversation(given)) => {
            let field = "spec.conversation";
            serving.check_conversation(field, &given)?;
            let conversation = conversation::conversation(given, field)?;
            let tokens = serving
                .text
                .render(&conversation, true)
                .map_err(|error| problem::template(field, &error))?;
            Ok((tokens, conversation.tools, false))
        }
    }
}

/// How to make text of a generation's log.
pub(super) fn reading(serving: &Serving, started: &Started) -> StreamOptions {
    let schemas = started
        .reading
        .clone()
        .and_then(|reading| reading.downcast::<Schemas>().ok())
        .unwrap_or_default();
    StreamOptions {
        start: Start::after(&started.prompt, serving.text.tokenizer().markers()),
        schemas,
        stop_strings: started.stop_strings.to_vec(),
        stop_tokens: started.params.stop_tokens.clone(),
        min_tokens: started.params.min_tokens,
    }
}
