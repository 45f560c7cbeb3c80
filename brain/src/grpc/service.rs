//! The calls of `marathon.brain.v1.Brain`.

use std::{pin::Pin, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use marathon_proto::{
    brain::{self as pb, brain_server::Brain},
    status::Problem,
    trace,
};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::info_span;

use super::{convert, events};
use crate::{
    callers::Owner,
    serving::{Opened, Return, Serving, conversation, problem, sampling},
};

/// Serves the contract over one engine.
#[derive(Clone)]
pub struct BrainService {
    serving: Serving,
    /// Streams that would never end by themselves end with it.
    ending: CancellationToken,
}

type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

const SHORTEST_INTERVAL: u32 = 100;

impl BrainService {
    /// A service; `ending` is cancelled when the program shuts down.
    pub fn new(serving: Serving, ending: CancellationToken) -> Self {
        Self { serving, ending }
    }

    /// What is served, for whoever calls.
    fn serving_for<T>(&self, request: &Request<T>) -> Serving {
        match request.extensions().get::<Owner>() {
            Some(owner) => self.serving.owned_by(owner),
            // No guard stands before this service: everybody is let in.
            None => self.serving.owned_by(&Owner::anyone()),
        }
    }

    async fn attach(
        serving: Serving,
        request: pb::GenerateRequest,
        span: tracing::Span,
    ) -> Result<EventStream<pb::GenerateEvent>, Problem> {
        let Opened {
            started,
            prompt_ids,
            reader,
        } = serving
            .open(
                &request.generation_id,
                request.spec,
                request.from_index as usize,
                Return::Possible,
            )
            .await?;
        let facts = serving.facts.clone();
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
        Ok(Box::pin(events::stream(first, reader, facts, span)))
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
        let serving = self.serving_for(&request);
        let stream = Self::attach(serving, request.into_inner(), span)
            .await
            .map_err(Problem::into_status)?;
        Ok(Response::new(stream))
    }

    async fn cancel(
        &self,
        request: Request<pb::CancelRequest>,
    ) -> Result<Response<pb::CancelResponse>, Status> {
        let engine = self.serving_for(&request).engine;
        let cancelled = engine.cancel(&request.get_ref().generation_id);
        Ok(Response::new(pb::CancelResponse { cancelled }))
    }

    async fn tokenize(
        &self,
        request: Request<pb::TokenizeRequest>,
    ) -> Result<Response<pb::TokenizeResponse>, Status> {
        let request = request.into_inner();
        let ids = self
            .serving
            .blocking(move |serving| {
                serving.check_text(request.text.len())?;
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
        self.serving
            .check_ids("ids", &request.ids)
            .map_err(Problem::into_status)?;
        let text = self
            .serving
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
        self.serving
            .check_ids("append_to", &request.append_to)
            .map_err(Problem::into_status)?;
        let ids = self
            .serving
            .blocking(move |serving| {
                let field = "conversation";
                let given = request.conversation.unwrap_or_default();
                serving.check_conversation(field, &given)?;
                let conversation = conversation::conversation(given, field)?;
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
            ..
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

    async fn get_usage(
        &self,
        request: Request<pb::GetUsageRequest>,
    ) -> Result<Response<pb::GetUsageResponse>, Status> {
        let engine = self.serving_for(&request).engine;
        let runs = match &request.get_ref().run_id {
            Some(run) => {
                let usage = engine.usage_of(run);
                usage
                    .map(|usage| convert::run_usage(run, &usage))
                    .into_iter()
                    .collect()
            }
            None => {
                let runs = engine.usage();
                let runs = runs
                    .iter()
                    .map(|(run, usage)| convert::run_usage(run, usage));
                runs.collect()
            }
        };
        Ok(Response::new(pb::GetUsageResponse { runs }))
    }
}
