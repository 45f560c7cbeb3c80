//! OpenAI's `POST /v1/responses`, and stored responses.
//!
//! A stored response is a record of its request. Reading it again attaches to its generation or,
//! after a restart, computes the same tokens again; events come one token at a time, so their
//! numbers are the same too.

mod items;
mod object;
pub(super) mod request;
mod store;

use std::{sync::Arc, time::Duration};

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
use tokio::time::timeout;

use super::{
    app::App,
    blocking::blocking,
    body::Body,
    deliver::last_event,
    error::ApiError,
    generation::{self, Choice},
    identity::{RequestId, generation_id},
    pump::{self, Script},
    sse::{self, Events, Outgoing},
};
use crate::{
    callers::Owner,
    sched::request::FinishReason,
    serving::{Ending, Round, Serving},
};
use object::{Growing, Named};
use request::ResponseRequest;
pub(super) use store::Store;
use store::{Kept, Record};

/// How long reading a response that may have ended is waited for.
const GLANCE: Duration = Duration::from_millis(200);

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
    let request = body
        .read(move |body| ResponseRequest::parse(body, &headers, request_id, previous))
        .await?;
    app.check_model(request.model.as_deref())?;
    let store = app.store().filter(|_| request.store);
    let stream = request.deliver.stream;
    let start = move |serving| begin(serving, owner, request, before, store);
    if stream {
        let start = move |serving| start(serving).map(|opened| opened.map(Opened::events));
        return sse::respond(&app, start, sse::error).await;
    }
    let serving = app.serving().await?;
    let response = start(serving).await?.collect().await?;
    Ok(Json(response).into_response())
}

/// Starts a response, and stores what is needed to go on with it once the engine has taken it on.
/// The same request under the same id finds what is stored.
async fn begin(
    serving: Serving,
    owner: Owner,
    request: ResponseRequest,
    before: usize,
    store: Option<Arc<Store>>,
) -> Result<Opened, ApiError> {
    let id = format!("resp_{}", request.deliver.id.text());
    let Some(store) = store else {
        return open(serving, &owner, &request, id, None, None).await;
    };
    let (sent, items) = (request.sent.clone(), request.items.clone());
    let record = store.record(&id, &serving.facts.fingerprint, sent, items, before);
    let keep = Keep {
        store: store.clone(),
        owner: owner.clone(),
    };
    let mut opened = open(serving, &owner, &request, id, Some(keep), None).await?;
    let refused = match blocking(move || store.keep(&owner, record)).await {
        Ok(Ok(Kept::As(record))) => {
            opened.script.growing.created_at(record.created_at);
            return Ok(opened);
        }
        Ok(Ok(Kept::Taken)) => ApiError::conflict(&opened.script.id),
        Ok(Err(error)) => not_stored(&error),
        Err(error) => error,
    };
    // Nobody could come back for it.
    opened.choices.iter_mut().for_each(Choice::give_up);
    Err(refused)
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
    Ok(Opened {
        choices,
        script: Writer {
            growing: Growing::new(&id, &serving.facts.name, &request.sent, keep.is_some()),
            id,
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
}

impl Keep {
    /// Adds the answer to the record in a while. Nothing is lost when that fails: the answer can
    /// be computed again.
    fn complete(self, id: String, response: Value) {
        tokio::task::spawn_blocking(move || {
            if let Err(error) = self.store.complete(&self.owner, &id, response) {
                tracing::warn!(id, %error, "a response was not stored whole");
            }
        });
    }
}

/// Makes numbered events of what is read.
struct Writer {
    id: String,
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
        let whole = ending.outcome.reason != FinishReason::Cancelled;
        if let Some(keep) = self.keep.take().filter(|_| whole) {
            keep.complete(self.id.clone(), self.growing.response().clone());
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
    let record = load(&store, owner, id).await.map_err(|error| ApiError {
        param: Some("previous_response_id".into()),
        ..error
    })?;
    let mut items = record.items.clone();
    let response = match record.response {
        Some(response) => response,
        None => {
            let opened = reopen(app, owner, store, record, None).await?;
            opened.collect().await?
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
    let (mut sent, mut previous) = (record.request, record.items);
    // The record has its items.
    sent.insert("input".into(), previous.split_off(record.before).into());
    let request = blocking(move || {
        ResponseRequest::parse(&sent.into(), &HeaderMap::new(), request_id, previous)
    });
    let request = request.await??;
    let keep = Keep {
        store,
        owner: owner.clone(),
    };
    let mut opened = open(serving, owner, &request, record.id, Some(keep), after).await?;
    opened.script.growing.created_at(record.created_at);
    Ok(opened)
}

/// How a stored response is read again.
#[derive(Debug, Deserialize)]
pub(super) struct Reading {
    stream: Option<bool>,
    starting_after: Option<u64>,
}

async fn load(store: &Arc<Store>, owner: &Owner, id: &str) -> Result<Record, ApiError> {
    let (store, owner, wanted) = (store.clone(), owner.clone(), id.to_owned());
    let found = blocking(move || store.load(&owner, &wanted)).await?;
    found.ok_or_else(|| no_such(id))
}

async fn stored(app: &App, owner: &Owner, id: &str) -> Result<(Arc<Store>, Record), ApiError> {
    let store = app.store().ok_or_else(|| no_such(id))?;
    let record = load(&store, owner, id).await?;
    Ok((store, record))
}

fn no_such(id: &str) -> ApiError {
    ApiError::not_found(format!("there is no stored response `{id:.100}`"))
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
    let (store, record) = stored(&app, &owner, &id).await?;
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
    // What has ended is there almost at once; what has not goes on.
    let whole = timeout(GLANCE, opened.collect()).await;
    Ok(Json(whole.unwrap_or(Ok(unfinished))?).into_response())
}

/// Forgets a stored response.
pub(super) async fn delete(
    State(app): State<App>,
    Extension(owner): Extension<Owner>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id?;
    let (store, record) = stored(&app, &owner, &id).await?;
    if let Some(serving) = app.loaded() {
        let own = serving.owned_by(&owner);
        own.engine.cancel(&generation_id(&record.id, 0));
    }
    let id = record.id.clone();
    blocking(move || store.delete(&owner, &record.id)).await?;
    Ok(Json(
        json!({ "id": id, "object": "response", "deleted": true }),
    ))
}
