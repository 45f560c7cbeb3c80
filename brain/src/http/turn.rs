//! A model turn as asked for by any endpoint with messages.

use marathon_proto::{brain as pb, brain::generation_spec::Prompt};

use super::deliver::Deliver;
use crate::serving::Serving;

/// A bias that no logit outweighs.
const FORBID: f32 = -100.0;

/// Which tool calls are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Calls {
    None,
    One,
    Any,
}

/// What the model is shown and how it answers.
#[derive(Clone, Debug)]
pub(super) struct Turn {
    pub(super) conversation: pb::Conversation,
    pub(super) sampling: pb::Sampling,
    pub(super) calls: Calls,
    /// As the contract counts them: 0 none, 1 the token's own, n the n-1 best besides.
    pub(super) logprobs: u32,
}

impl Turn {
    /// The contract's form.
    pub(super) fn spec(&self, serving: &Serving, deliver: &Deliver) -> pb::GenerationSpec {
        let markers = serving.text.tokenizer().markers();
        let mut sampling = self.sampling.clone();
        let mut conversation = self.conversation.clone();
        match self.calls {
            Calls::None => {
                // A model that is shown no tools is not tempted to call them.
                conversation.tools.clear();
                sampling.logit_bias.insert(markers.call_open, FORBID);
            }
            // The turn ends with its first call.
            Calls::One => sampling.stop_token_ids.push(markers.call_close),
            Calls::Any => {}
        }
        pb::GenerationSpec {
            prompt: Some(Prompt::Conversation(conversation)),
            sampling: Some(sampling),
            run_id: deliver.run_id(),
            cache_salt: deliver.cache_salt(),
            priority: deliver.priority,
            logprobs: self.logprobs,
            ..pb::GenerationSpec::default()
        }
    }
}
