//! OpenAI's `POST /v1/responses`, and stored responses.
//!
//! A stored response is a record of its request. Reading it again attaches to its generation or,
//! after a restart, computes the same tokens again; events come one token at a time, so their
//! numbers are the same too.

mod items;
mod object;
pub(super) mod request;
mod store;

use std::sync::Arc;

use axum::{
    Extension, Json,
    extract::{
        Path, Query, State,
        rejection::{PathRejection, QueryRejection},
    },
    http::HeaderMap,
    response::{IntoResponse as _, Response},
};
use futures::FutureExt as _;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    app::App,
    body::Body,
    deliver::last_event,
    error::ApiError,
    generation::{self, Choice},
    identity::{RequestId, generation_id},
    pump::{self, Script},
    sse::{self, Events, Outgoing},
};
use crate::callers::Owner;
use crate::serving::{Ending, Round, Serving};
use object::{Growing, Named};
use request::ResponseRequest;
use store::Record;
pub(super) use store::Store;

/// Answers a conversation.
pub(super) async fn create(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let previous = match request::previous_id(&body)? {
        None => Vec::new(),
        Some(id) => history(&app, &owner, &id).await?,
    };
    let before = previous.len();
    let request = ResponseRequest::parse(&body, &headers, request_id, previous)?;
    app.check_model(request.model.as_deref())?;
    let id = format!("resp_{}", request.deliver.id.text());
    let stream = request.deliver.stream;
    let store = app.store().filter(|_| request.store);
    let start = move |serving: Serving| async move {
        let keep = match store {
            None => None,
            Some(store) => {
                let fingerprint = &serving.facts.fingerprint;
                let (sent, items) = (request.sent.clone(), request.items.clone());
                if store
                    .load(&owner, &id)
                    .is_some_and(|there| there.request != sent)
                {
                    return Err(ApiError::conflict(&id));
                }
                let record = store.record(&id, fingerprint, sent, items, before);
                store
                    .save(&owner, &record)
                    .map_err(|error| not_stored(&error))?;
                Some(Keep {
                    store,
                    owner: owner.clone(),
                    record,
                })
            }
        };
        open(serving, &owner, &request, id, keep, None).await
    };
    if stream {
        let start = move |serving| start(serving).map(|opened| opened.map(Opened::events));
        return sse::respond(&app, start, sse::error).await;
    }
    let serving = app.serving().await?;
    let response = start(serving).await?.collect().await?;
    Ok(Json(response).into_response())
}

fn not_stored(error: &std::io::Error) -> ApiError {
    tracing::error!(%error, "a response cannot be stored");
    ApiError::storage()
}

/// A response that is being generated.
struct Opened {
    choices: Vec<Choice>,
    script: Writer,
}

async fn open(
    serving: Serving,
    owner: &Owner,
    request: &ResponseRequest,
    id: String,
    keep: Option<Keep>,
    after: Option<u64>,
) -> Result<Opened, ApiError> {
    let ask = request.ask(&serving, &id, keep.is_some());
    let mut choices = generation::start(&serving, owner, &ask).await?;
    choices.iter_mut().for_each(Choice::one_by_one);
    let mut growing = Growing::new(&id, &serving.facts.name, &request.sent, keep.is_some());
    if let Some(keep) = &keep {
        growing.created_at(keep.record.created_at);
    }
    Ok(Opened {
        choices,
        script: Writer {
            growing,
            begun: false,
            next: 0,
            after,
            keep,
        },
    })
}

impl Opened {
    fn events(self) -> Events {
        pump::events(self.choices, self.script)
    }

    /// Reads to the end: the whole response.
    async fn collect(mut self) -> Result<Value, ApiError> {
        let mut unused = Outgoing::default();
        for choice in &mut self.choices {
            let (rounds, ending) = choice.collect().await?;
            for round in &rounds {
                self.script.tokens(0, round, &mut unused);
            }
            self.script.finished(0, &ending, &mut unused);
        }
        Ok(self.script.growing.response().clone())
    }
}

/// Where the whole response goes.
struct Keep {
    store: Arc<Store>,
    owner: Owner,
    record: Record,
}

/// Makes numbered events of what is read.
struct Writer {
    growing: Growing,
    begun: bool,
    /// Number of the next event.
    next: u64,
    /// The last event that the client has.
    after: Option<u64>,
    keep: Option<Keep>,
}

impl Script for Writer {
    fn tokens(&mut self, _choice: usize, round: &Round, out: &mut Outgoing) {
        let mut events = self.begin();
        for event in &round.delta.turn {
            self.growing.take(event, &mut events);
        }
        self.send(events, out);
    }

    fn finished(&mut self, _choice: usize, ending: &Ending, out: &mut Outgoing) {
        let mut events = self.begin();
        self.growing.finish(ending, &mut events);
        if let Some(keep) = &mut self.keep {
            keep.record.response = Some(self.growing.response().clone());
            // Nothing is lost when it fails: the answer can be computed again.
            if let Err(error) = keep.store.save(&keep.owner, &keep.record) {
                tracing::warn!(%error, "a response was not stored whole");
            }
        }
        self.send(events, out);
    }

    fn broken(&mut self, error: &ApiError, out: &mut Outgoing) {
        let mut events = self.begin();
        self.growing.fail(error, &mut events);
        self.send(events, out);
    }

    fn end(&mut self, _out: &mut Outgoing) {}
}

impl Writer {
    fn begin(&mut self) -> Vec<Named> {
        if std::mem::replace(&mut self.begun, true) {
            return Vec::new();
        }
        self.growing.begin()
    }

    fn send(&mut self, events: Vec<Named>, out: &mut Outgoing) {
        for (name, mut body) in events {
            let number = self.next;
            self.next += 1;
            if self.after.is_some_and(|after| number <= after) {
                continue;
            }
            body["type"] = json!(name);
            body["sequence_number"] = json!(number);
            out.event(Some(name), Some(number), &body);
        }
    }
}

/// The items of a stored response and of those before it, its own answer included.
async fn history(app: &App, owner: &Owner, id: &str) -> Result<Vec<Value>, ApiError> {
    let Some(store) = app.store() else {
        let why = "responses are not stored: serve with --response-dir";
        return Err(ApiError::unsupported("previous_response_id", why));
    };
    let record = store.load(owner, id).ok_or_else(|| {
        let what = format!("there is no stored response `{id:.100}`");
        ApiError {
            param: Some("previous_response_id".into()),
            ..ApiError::not_found(what)
        }
    })?;
    let mut items = record.items.clone();
    let response = match record.response {
        Some(response) => response,
        None => {
            reopen(app, owner, store, record, None)
                .await?
                .collect()
                .await?
        }
    };
    items.extend(response["output"].as_array().cloned().unwrap_or_default());
    Ok(items)
}

/// Attaches to a stored response's generation, or starts it again.
async fn reopen(
    app: &App,
    owner: &Owner,
    store: Arc<Store>,
    record: Record,
    after: Option<u64>,
) -> Result<Opened, ApiError> {
    let serving = app.serving().await?;
    if record.fingerprint != serving.facts.fingerprint {
        return Err(ApiError::another_model(&record.id));
    }
    let suffix = record.id.strip_prefix("resp_").unwrap_or_default();
    let request_id = RequestId::parse(suffix).unwrap_or_else(RequestId::random);
    let mut body = Body(record.request.clone());
    // The record has its items.
    body.0
        .insert("input".into(), json!(record.items[record.before..]));
    let previous = record.items[..record.before].to_vec();
    let request = ResponseRequest::parse(&body, &HeaderMap::new(), request_id, previous)?;
    let id = record.id.clone();
    let keep = Some(Keep {
        store,
        owner: owner.clone(),
        record,
    });
    open(serving, owner, &request, id, keep, after).await
}

/// How a stored response is read again.
#[derive(Debug, Deserialize)]
pub(super) struct Reading {
    stream: Option<bool>,
    starting_after: Option<u64>,
}

fn stored(app: &App, owner: &Owner, id: &str) -> Result<(Arc<Store>, Record), ApiError> {
    let found = app
        .store()
        .and_then(|store| Some((store.clone(), store.load(owner, id)?)));
    found.ok_or_else(|| ApiError::not_found(format!("there is no stored response `{id:.100}`")))
}

/// Reads a stored response again, whole or as a stream.
pub(super) async fn read(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    headers: HeaderMap,
    id: Result<Path<String>, PathRejection>,
    reading: Result<Query<Reading>, QueryRejection>,
) -> Result<Response, ApiError> {
    let (Path(id), Query(reading)) = (id?, reading?);
    let (store, record) = stored(&app, &owner, &id)?;
    if reading.stream == Some(true) {
        // A browser's event source says by itself how far it came, and goes on with the same address.
        let came = last_event(&headers)?.map(|number| number as u64);
        let after = came.or(reading.starting_after);
        let opened = reopen(&app, &owner, store, record, after).await?;
        let start = move |_| std::future::ready(Ok(opened.events()));
        return sse::respond(&app, start, sse::error).await;
    }
    if let Some(response) = record.response {
        return Ok(Json(response).into_response());
    }
    let opened = reopen(&app, &owner, store, record, None).await?;
    let unfinished = opened.script.growing.response().clone();
    // What has ended is there at once; what has not goes on.
    let response = opened.collect().now_or_never().unwrap_or(Ok(unfinished))?;
    Ok(Json(response).into_response())
}

/// Forgets a stored response.
pub(super) async fn delete(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id?;
    let (store, record) = stored(&app, &owner, &id)?;
    if let Some(serving) = app.loaded() {
        let own = serving.owned_by(&owner);
        own.engine.cancel(&generation_id(&record.id, 0));
    }
    store.delete(&owner, &record.id);
    Ok(Json(
        json!({ "id": record.id, "object": "response", "deleted": true }),
    ))
}
