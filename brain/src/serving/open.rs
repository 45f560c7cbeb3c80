//! Opening a generation: create it or attach to it, and read it from an index on.

use marathon_proto::{brain as pb, status::Problem};

use super::{Reader, Serving, lower, problem};
use crate::{
    engine::{Attached, Started},
    sched::types::TokenId,
    text::stream::TurnStream,
};

/// A generation that is being read.
pub struct Opened {
    /// What is generated.
    pub started: Started,
    /// The prompt's tokens, when this call gave it as text or messages.
    pub prompt_ids: Vec<TokenId>,
    /// Reads it.
    pub reader: Reader,
}

impl Serving {
    /// Starts the generation of this id, or attaches to it; without a specification it only
    /// attaches. What the reader shows begins with token `from`.
    ///
    /// # Errors
    /// What is wrong with the request, or why the engine does not take it.
    pub async fn open(
        &self,
        id: &str,
        spec: Option<pb::GenerationSpec>,
        from: usize,
    ) -> Result<Opened, Problem> {
        let (request, prompt_ids) = match spec {
            None => (None, Vec::new()),
            Some(spec) => {
                let id = id.to_owned();
                let lowered = self
                    .blocking(move |serving| lower::lower(serving, &id, spec))
                    .await?;
                (Some(lowered.request), lowered.prompt_ids)
            }
        };
        let Attached {
            started,
            mut cursor,
        } = self
            .engine
            .generate(id, request, from)
            .map_err(problem::engine)?;
        if from > 0 {
            // The text needs the tokens before; the cursor held so far keeps the generation.
            cursor = self
                .engine
                .generate(id, None, 0)
                .map_err(problem::engine)?
                .cursor;
        }
        let text = TurnStream::new(
            self.text.tokenizer().clone(),
            lower::reading(self, &started),
        );
        Ok(Opened {
            started,
            prompt_ids,
            reader: Reader::new(cursor, text, from),
        })
    }
}
