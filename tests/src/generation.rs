//! Generations as a client sees them, checked while they come.

use marathon_proto::{
    brain::{
        Finished, GenerateEvent, GenerateRequest, GenerationSpec, Sampling, Started, TokenIds,
        TokenLogprob, brain_client::BrainClient, generate_event::Event, generation_spec::Prompt,
    },
    net::BrainChannel,
};
use tonic::{Status, Streaming};

/// What one stream brought.
#[derive(Clone, Debug, Default)]
pub struct Generation {
    /// Its first event.
    pub started: Started,
    /// Index of the first token in `ids`.
    pub from: u32,
    /// The tokens, in order, none twice and none missing.
    pub ids: Vec<u32>,
    /// One for each token when asked for.
    pub logprobs: Vec<TokenLogprob>,
    /// The text they make.
    pub text: String,
    /// Its last event, if the stream got that far.
    pub finished: Option<Finished>,
}

/// A specification: these prompt tokens, this sampling.
pub fn spec(prompt: &[u32], sampling: Sampling) -> GenerationSpec {
    GenerationSpec {
        prompt: Some(Prompt::PromptTokens(TokenIds {
            ids: prompt.to_vec(),
        })),
        sampling: Some(sampling),
        ..GenerationSpec::default()
    }
}

/// A specification that any brain with a fake device serves the same way.
pub fn fake_spec(seed: u64, max_tokens: u32) -> GenerationSpec {
    let sampling = Sampling {
        temperature: Some(1.0),
        seed: Some(seed),
        max_tokens: Some(max_tokens),
        ignore_eos: Some(true),
        ..Sampling::default()
    };
    spec(&(10..60).collect::<Vec<_>>(), sampling)
}

/// Opens a stream over a generation and reads it to its end.
pub async fn generate(
    client: &mut BrainClient<BrainChannel>,
    id: &str,
    spec: Option<GenerationSpec>,
    from_index: u32,
) -> Result<Generation, Status> {
    let mut stream = open(client, id, spec, from_index).await?;
    let mut generation = Generation {
        from: from_index,
        ..Generation::default()
    };
    while let Some(event) = stream.message().await? {
        generation.take(event);
    }
    assert!(
        generation.finished.is_some(),
        "the stream of {id} ended without a last event"
    );
    Ok(generation)
}

/// Opens a stream and reads until it has brought at least `count` tokens. Returns the stream too:
/// dropping it is how a client goes away.
pub async fn read_tokens(
    client: &mut BrainClient<BrainChannel>,
    id: &str,
    spec: GenerationSpec,
    count: usize,
) -> Result<(Generation, Streaming<GenerateEvent>), Status> {
    let mut stream = open(client, id, Some(spec), 0).await?;
    let mut generation = Generation::default();
    while generation.ids.len() < count {
        let event = stream.message().await?.expect("more tokens");
        generation.take(event);
    }
    Ok((generation, stream))
}

async fn open(
    client: &mut BrainClient<BrainChannel>,
    id: &str,
    spec: Option<GenerationSpec>,
    from_index: u32,
) -> Result<Streaming<GenerateEvent>, Status> {
    let request = GenerateRequest {
        generation_id: id.to_owned(),
        spec,
        from_index,
    };
    Ok(client.generate(request).await?.into_inner())
}

impl Generation {
    /// Appends what an event brings, and checks that it continues what came before.
    pub fn take(&mut self, event: GenerateEvent) {
        assert!(self.finished.is_none(), "an event after the last one");
        match event.event.expect("an event that is set") {
            Event::Started(started) => {
                assert!(self.started.fingerprint.is_empty(), "started twice");
                self.started = started;
            }
            Event::Tokens(tokens) => {
                assert!(
                    !self.started.fingerprint.is_empty(),
                    "tokens before the first event"
                );
                let next = self.from + self.ids.len() as u32;
                assert_eq!(tokens.index, next, "a token twice or missing");
                self.ids.extend(&tokens.ids);
                self.logprobs.extend(tokens.logprobs);
                self.text.push_str(&tokens.text);
            }
            Event::Finished(finished) => self.finished = Some(finished),
        }
    }

    /// The last event's reason.
    pub fn reason(&self) -> marathon_proto::brain::FinishReason {
        self.finished
            .as_ref()
            .expect("a finished generation")
            .reason()
    }
}
