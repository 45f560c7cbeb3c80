//! Refuses what could not fit the context whatever its tokens are, before any work is done on it.
//!
//! Rendering and tokenising take memory many times the text's size. A text of `n` bytes has at
//! least `n` over the longest token's bytes tokens, and a message takes some of its own, so a
//! request that fails here could never have been served.

use marathon_proto::{
    brain as pb,
    status::{Problem, Reason},
};

use super::Serving;

/// The shortest message that says anything: two turn markers, a role, two newlines, a word.
const TOKENS_PER_MESSAGE: usize = 6;
/// Messages of the largest context, and tools of any agent.
const MAX_MESSAGES: usize = 1 << 15;
const MAX_TOOLS: usize = 4096;
/// Longest name of a run, in bytes.
pub(crate) const LONGEST_RUN_ID: usize = 256;

impl Serving {
    /// Refuses a text of so many bytes that its tokens cannot fit.
    ///
    /// # Errors
    /// [`Reason::PromptTooLong`] with the numbers.
    pub fn check_text(&self, bytes: usize) -> Result<(), Problem> {
        let room = self.engine.max_len();
        let least = self.text.tokenizer().at_least(bytes);
        if least <= room {
            return Ok(());
        }
        Err(Problem::new(
            Reason::PromptTooLong,
            format!(
                "the text has {bytes} bytes, which are at least {least} tokens; prompt and answer \
                 may have {room} together: shorten it"
            ),
        ))
    }

    /// Refuses a conversation that cannot fit; `field` is its path in the request.
    ///
    /// # Errors
    /// [`Reason::PromptTooLong`] with the numbers.
    pub fn check_conversation(&self, field: &str, given: &pb::Conversation) -> Result<(), Problem> {
        let room = self.engine.max_len();
        let messages = given.messages.len();
        let most = (room / TOKENS_PER_MESSAGE).min(MAX_MESSAGES);
        if messages > most {
            return Err(Problem::new(
                Reason::PromptTooLong,
                format!(
                    "{field} has {messages} messages; with {room} tokens for prompt and answer it \
                     can have {most}: drop old ones"
                ),
            ));
        }
        if given.tools.len() > MAX_TOOLS {
            return Err(Problem::invalid(
                format!("{field}.tools"),
                format!(
                    "{} tools are declared, and {MAX_TOOLS} can be: leave some out",
                    given.tools.len()
                ),
            ));
        }
        // What a template may leave out does not count: reasoning, thoughts sent back raw, space
        // around a text, schemas.
        let shown = given
            .messages
            .iter()
            .filter(|message| !message.content.contains("<|channel>"))
            .map(|message| message.content.trim().len());
        self.check_text(shown.sum())
    }
}

/// Refuses a run's name that is too long to be kept with every block of its cache.
pub(super) fn check_run_id(run_id: &str) -> Result<(), Problem> {
    if run_id.len() <= LONGEST_RUN_ID {
        return Ok(());
    }
    Err(Problem::invalid(
        "spec.run_id",
        format!(
            "it has {} bytes, and {LONGEST_RUN_ID} can be kept: use a shorter name or its hash",
            run_id.len()
        ),
    ))
}
