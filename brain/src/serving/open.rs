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

/// Whether its caller may come back for a generation after brain was restarted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Return {
    /// By its id.
    Possible,
    /// It goes with its reader.
    Never,
}

impl Serving {
    /// Starts the generation of this id, or attaches to it; without a specification it only
    /// attaches. What the reader shows begins with token `from`. A successor knows it if its caller
    /// may `come_back`.
    ///
    /// Until this is ready nothing has begun: who drops it leaves nothing running.
    ///
    /// # Errors
    /// What is wrong with the request, or why the engine does not take it.
    pub async fn open(
        &self,
        id: &str,
        spec: Option<pb::GenerationSpec>,
        from: usize,
        come_back: Return,
    ) -> Result<Opened, Problem> {
        let (attached, prompt_ids) = match spec {
            None => (self.engine.generate(id, None, from), Vec::new()),
            Some(spec) => {
                let id = id.to_owned();
                // A long prompt and many received tokens take long to look at.
                let prepare = move |serving: &Self| {
                    let lower::Lowered {
                        mut request,
                        prompt_ids,
                    } = lower::lower(serving, &id, spec)?;
                    request.kept = come_back == Return::Possible;
                    let prepared = serving.engine.prepare(&id, Some(request), from);
                    Ok((prepared.map_err(problem::engine)?, prompt_ids))
                };
                let (prepared, prompt_ids) = self.blocking(prepare).await?;
                (self.engine.begin(prepared), prompt_ids)
            }
        };
        let Attached {
            started,
            mut cursor,
        } = attached.map_err(problem::engine)?;
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
