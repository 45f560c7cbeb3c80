//! A model turn as asked for by any endpoint with messages.

use marathon_proto::{brain as pb, brain::form::Answer, brain::generation_spec::Prompt};

use super::{deliver::Deliver, error::ApiError, form::Asked};
use crate::serving::Serving;

/// A bias that no logit outweighs.
const FORBID: f32 = -100.0;

/// Which tool calls are wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Calls {
    None,
    One,
    Any,
    /// At least one, or one alone, and no text.
    Required {
        single: bool,
    },
    /// One of this tool.
    Named(String),
}

/// What the model is shown and how it answers.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    pub(super) conversation: pb::Conversation,
    pub(super) sampling: pb::Sampling,
    pub(super) calls: Calls,
    /// What the answer's text must look like.
    pub(super) form: Option<Asked>,
    /// As the contract counts them: 0 none, 1 the token's own, n the n-1 best besides.
    pub(super) logprobs: u32,
}

impl Turn {
    /// The same, once it is sure that what it asks for fits together.
    ///
    /// # Errors
    /// The field that does not fit.
    pub(super) fn checked(self) -> Result<Self, ApiError> {
        let tools = &self.conversation.tools;
        let invalid = |path: &str, what: String| Err(ApiError::invalid(path, what));
        match &self.calls {
            Calls::Required { .. } if tools.is_empty() => invalid(
                "tool_choice",
                "a call is required, but there are no tools".into(),
            ),
            Calls::Named(name) if tools.iter().all(|tool| tool.name != *name) => {
                invalid("tool_choice", format!("there is no tool {name:.60?}"))
            }
            Calls::One | Calls::Any if !tools.is_empty() => match &self.form {
                Some(asked) if !matches!(asked.answer, Answer::JsonSchema(_)) => invalid(
                    &asked.path,
                    "only JSON can stand in place of calls: give no tools, or `tool_choice` none"
                        .into(),
                ),
                _ => Ok(self),
            },
            _ => Ok(self),
        }
    }

    /// What the answer must look like, of text and calls together.
    fn form(&self) -> Option<pb::Form> {
        let answer = self.form.as_ref().map(|asked| asked.answer.clone());
        let tools = &self.conversation.tools;
        let calls = |required, single, names: &[String]| {
            Some(pb::ToolCalls {
                names: names.to_vec(),
                required,
                single,
                ..pb::ToolCalls::default()
            })
        };
        let confined = answer.is_some() || tools.iter().any(|tool| tool.strict);
        let (answer, tool_calls) = match &self.calls {
            Calls::Required { single } => (None, calls(true, *single, &[])),
            Calls::Named(name) => (None, calls(true, true, std::slice::from_ref(name))),
            Calls::One | Calls::Any if confined && !tools.is_empty() => {
                (answer, calls(false, self.calls == Calls::One, &[]))
            }
            Calls::None | Calls::One | Calls::Any => (answer, None),
        };
        (answer.is_some() || tool_calls.is_some()).then_some(pb::Form { answer, tool_calls })
    }

    /// The field that describes the form.
    pub(super) fn form_path(&self) -> String {
        let asked = self.form.as_ref();
        asked.map_or_else(String::new, |asked| asked.path.clone())
    }

    /// The contract's form.
    pub(super) fn spec(&self, serving: &Serving, deliver: &Deliver) -> pb::GenerationSpec {
        let markers = serving.text.tokenizer().markers();
        let mut sampling = self.sampling.clone();
        let mut conversation = self.conversation.clone();
        let form = self.form();
        match self.calls {
            Calls::None => {
                // A model that is shown no tools is not tempted to call them.
                conversation.tools.clear();
                sampling.logit_bias.insert(markers.call_open, FORBID);
            }
            // The turn ends with its first call.
            Calls::One => sampling.stop_token_ids.push(markers.call_close),
            Calls::Any | Calls::Required { .. } | Calls::Named(_) => {}
        }
        pb::GenerationSpec {
            prompt: Some(Prompt::Conversation(conversation)),
            sampling: Some(sampling),
            run_id: deliver.run_id(),
            cache_salt: deliver.cache_salt(),
            priority: deliver.priority,
            logprobs: self.logprobs,
            form,
            ..pb::GenerationSpec::default()
        }
    }
}
