//! The calls of `marathon.brain.v1.Brain`.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use marathon_proto::{
    brain::{self as pb, brain_server::Brain},
    status::{Problem, Reason},
    trace,
};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::info_span;

use super::{Serving, convert, events::Reader, lower, problem, sampling};
use crate::{engine::Attached, text::stream::TurnStream};

/// Serves the contract over one engine.
#[derive(Clone)]
pub struct BrainService {
    serving: Serving,
    /// As many slow pieces of work at a time as there are cores.
    slow: Arc<Semaphore>,
    /// Streams that would never end by themselves end with it.
    ending: CancellationToken,
}

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

const SHORTEST_INTERVAL: u32 = 100;

impl BrainService {
    /// A service; `ending` is cancelled when the program shuts down.
    pub fn new(serving: Serving, ending: CancellationToken) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            serving,
            slow: Arc::new(Semaphore::new(cores)),
            ending,
        }
    }

    async fn attach(
        &self,
        request: pb::GenerateRequest,
        span: tracing::Span,
    ) -> Result<Reader, Problem> {
        let from = request.from_index as usize;
        let id = request.generation_id;
        let (engine_request, prompt_ids) = match request.spec {
            None => (None, Vec::new()),
            Some(spec) => {
                let id = id.clone();
                let lowered = self
                    .blocking(move |serving| lower::lower(serving, &id, spec))
                    .await?;
                (Some(lowered.request), lowered.prompt_ids)
            }
        };
        let engine = &self.serving.engine;
        let Attached {
            started,
            mut cursor,
        } = engine
            .generate(&id, engine_request, from)
            .map_err(problem::engine)?;
        if from > 0 {
            // The text needs the tokens before; the cursor held so far keeps the generation.
            cursor = engine
                .generate(&id, None, 0)
                .map_err(problem::engine)?
                .cursor;
        }
        let facts = self.serving.facts.clone();
        let text = TurnStream::new(
            self.serving.text.tokenizer().clone(),
            lower::reading(&self.serving, &started),
        );
        let first = pb::Started {
            fingerprint: facts.fingerprint.clone(),
            sampling: Some(sampling::to_proto(
                &started.params,
                started.draft,
                &started.stop_strings,
                &facts.stop_tokens,
            )),
            prompt_tokens: started.prompt.len() as u32,
            attached: started.attached,
            request_hash: started.request_hash.to_string(),
            prompt_ids,
        };
        Ok(Reader::new(first, cursor, text, facts, from, span))
    }

    /// Runs work that takes long in proportion to its input on a thread that may block.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Serving) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let serving = self.serving.clone();
        // The semaphore is never closed; without a permit the work is only less polite.
        let _permit = self.slow.acquire().await.ok();
        match tokio::task::spawn_blocking(move || work(&serving)).await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "work on a call failed");
                Err(Problem::new(
                    Reason::Internal,
                    "the call failed; brain's log says how",
                ))
            }
        }
    }

    fn check_ids(&self, field: &str, ids: &[u32]) -> Result<(), Problem> {
        let vocab = self.serving.engine.limits().vocab_size;
        match ids.iter().position(|&id| id as usize >= vocab) {
            None => Ok(()),
            Some(index) => Err(Problem::invalid(
                field,
                format!(
                    "token {} (number {index}) is not below the vocabulary's size, {vocab}",
                    ids[index]
                ),
            )),
        }
    }
}

#[tonic::async_trait]
impl Brain for BrainService {
    type GenerateStream = EventStream<pb::GenerateEvent>;
    type StatsStream = EventStream<pb::StatsResponse>;

    async fn generate(
        &self,
        request: Request<pb::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let run_id = request
            .get_ref()
            .spec
            .as_ref()
            .map_or("", |spec| &spec.run_id);
        let span = info_span!(
            "Generate",
            generation_id = %request.get_ref().generation_id,
            run_id,
            from = request.get_ref().from_index,
        );
        trace::adopt_parent(&span, request.metadata());
        let reader = self
            .attach(request.into_inner(), span)
            .await
            .map_err(Problem::into_status)?;
        Ok(Response::new(Box::pin(reader.into_stream())))
    }

    async fn cancel(
        &self,
        request: Request<pb::CancelRequest>,
    ) -> Result<Response<pb::CancelResponse>, Status> {
        let cancelled = self.serving.engine.cancel(&request.get_ref().generation_id);
        Ok(Response::new(pb::CancelResponse { cancelled }))
    }

    async fn tokenize(
        &self,
        request: Request<pb::TokenizeRequest>,
    ) -> Result<Response<pb::TokenizeResponse>, Status> {
        let request = request.into_inner();
        let ids = self
            .blocking(move |serving| {
                let tokenizer = serving.text.tokenizer();
                let encoded = if request.allow_special {
                    tokenizer.encode_with_specials(&request.text)
                } else {
                    tokenizer.encode(&request.text)
                };
                encoded.map_err(|error| problem::tokenizer("text", &error))
            })
            .await
            .map_err(Problem::into_status)?;
        Ok(Response::new(pb::TokenizeResponse { ids }))
    }

    async fn detokenize(
        &self,
        request: Request<pb::DetokenizeRequest>,
    ) -> Result<Response<pb::DetokenizeResponse>, Status> {
        let request = request.into_inner();
        self.check_ids("ids", &request.ids)
            .map_err(Problem::into_status)?;
        let text = self
            .blocking(move |serving| {
                Ok(serving
                    .text
                    .tokenizer()
                    .decode(&request.ids, request.skip_special))
            })
            .await
            .map_err(Problem::into_status)?;
        Ok(Response::new(pb::DetokenizeResponse { text }))
    }

    async fn render(
        &self,
        request: Request<pb::RenderRequest>,
    ) -> Result<Response<pb::RenderResponse>, Status> {
        let request = request.into_inner();
        self.check_ids("append_to", &request.append_to)
            .map_err(Problem::into_status)?;
        let ids = self
            .blocking(move |serving| {
                let field = "conversation";
                let given = request.conversation.unwrap_or_default();
                let conversation = convert::conversation(given, field)?;
                if request.append_to.is_empty() {
                    return serving
                        .text
                        .render(&conversation, request.add_generation_prompt)
                        .map_err(|error| problem::template(field, &error));
                }
                serving
                    .text
                    .append(
                        &request.append_to,
                        &conversation.messages,
                        conversation.thinking,
                        request.add_generation_prompt,
                    )
                    .map_err(|error| problem::append(&error))
            })
            .await
            .map_err(Problem::into_status)?;
        Ok(Response::new(pb::RenderResponse { ids }))
    }

    async fn get_model(
        &self,
        _request: Request<pb::GetModelRequest>,
    ) -> Result<Response<pb::GetModelResponse>, Status> {
        let Serving {
            engine,
            text,
            facts,
        } = &self.serving;
        Ok(Response::new(pb::GetModelResponse {
            name: facts.name.clone(),
            fingerprint: facts.fingerprint.clone(),
            max_model_len: engine.max_len() as u32,
            vocab_size: engine.limits().vocab_size as u32,
            default_sampling: Some(sampling::defaults(facts)),
            stop_token_ids: facts.stop_tokens.clone(),
            template_hash: text.template().hash().to_hex().to_string(),
            drafter: facts.drafter.clone(),
            max_draft_tokens: engine.limits().max_drafts as u32,
            device: facts.device.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            lease_seconds: engine.config().lease.as_secs() as u32,
        }))
    }

    async fn stats(
        &self,
        request: Request<pb::StatsRequest>,
    ) -> Result<Response<Self::StatsStream>, Status> {
        let engine = self.serving.engine.clone();
        let interval = request.get_ref().interval_ms;
        if interval == 0 {
            let once = convert::stats(&engine.stats());
            return Ok(Response::new(Box::pin(stream::once(
                async move { Ok(once) },
            ))));
        }
        if interval < SHORTEST_INTERVAL {
            let message = format!(
                "interval_ms is {interval}: give 0 for one answer, or {SHORTEST_INTERVAL} and more"
            );
            return Err(Problem::invalid("interval_ms", message).into_status());
        }
        let ticks = tokio::time::interval(Duration::from_millis(interval.into()));
        let every = stream::unfold((engine, ticks), |(engine, mut ticks)| async move {
            ticks.tick().await;
            let stats = convert::stats(&engine.stats());
            Some((Ok(stats), (engine, ticks)))
        });
        let until = self.ending.clone().cancelled_owned();
        Ok(Response::new(Box::pin(every.take_until(until))))
    }
}
