//! Errors of the layers below as the contract's problems.

use std::time::Duration;

use marathon_proto::status::{Problem, Reason};

use crate::{
    engine::EngineError,
    sched::request::Reject,
    text::{append::AppendError, template::TemplateError, tokenizer::TokenizerError},
};

/// How long a client should wait before it asks a busy brain again.
const BUSY: Duration = Duration::from_secs(1);

pub(crate) fn engine(error: EngineError) -> Problem {
    let message = error.to_string();
    match error {
        EngineError::BadId(_) => Problem::invalid("generation_id", message),
        EngineError::Conflict { .. } => Problem::new(Reason::GenerationConflict, message),
        EngineError::NotFound { .. } => Problem::new(Reason::UnknownGeneration, message),
        EngineError::OutOfRange { .. } => Problem::new(Reason::IndexOutOfRange, message),
        EngineError::Busy { .. } => Problem::new(Reason::Overloaded, message).retry_after(BUSY),
        EngineError::Draining => Problem::new(Reason::ShuttingDown, message),
        EngineError::Unhealthy(_) => Problem::new(Reason::EngineFailed, message),
        EngineError::Refused(reject) => refused(&reject),
    }
}

fn refused(reject: &Reject) -> Problem {
    let message = reject.to_string();
    match reject {
        Reject::TooLong { .. } => Problem::new(Reason::PromptTooLong, message),
        Reject::EmptyPrompt => Problem::invalid("spec.prompt", message),
        Reject::NoSuchToken { list, .. } => {
            let field = match *list {
                "the received tokens" => "spec.received_tokens",
                "the stop tokens" => "spec.sampling.stop_token_ids",
                "the logit bias" => "spec.sampling.logit_bias",
                _ => "spec.prompt",
            };
            Problem::invalid(field, message)
        }
        Reject::Sampling("logprobs", _) => Problem::invalid("spec.logprobs", message),
        Reject::Sampling(field, _) => Problem::invalid(format!("spec.sampling.{field}"), message),
        Reject::StopCheck => Problem::invalid("spec.sampling.stop", message),
        Reject::NoMasks | Reject::Grammar(_) => Problem::invalid("spec.form", message),
        Reject::ReceivedTooLong { .. }
        | Reject::ReceivedPastStop { .. }
        | Reject::ReceivedOffGrammar { .. } => Problem::invalid("spec.received_tokens", message),
    }
}

pub(crate) fn template(field: &str, error: &TemplateError) -> Problem {
    match error {
        TemplateError::Tokenizer(error) => tokenizer(field, error),
        error => Problem::invalid(field, error.to_string()),
    }
}

pub(crate) fn append(error: &AppendError) -> Problem {
    match error {
        AppendError::Template(error) => template("conversation", error),
        error => Problem::invalid("append_to", error.to_string()),
    }
}

pub(crate) fn tokenizer(field: &str, error: &TokenizerError) -> Problem {
    Problem::invalid(field, error.to_string())
}
