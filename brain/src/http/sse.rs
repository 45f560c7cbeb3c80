//! Server-sent events: the headers at once, comments while nothing happens.

use std::{convert::Infallible, future::Future, pin::Pin, time::Duration};

use axum::{
    http::{HeaderName, HeaderValue},
    response::{
        IntoResponse as _, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::{Stream, StreamExt as _, stream};
use serde::Serialize;

use super::{app::App, error::ApiError};
use crate::serving::Serving;

/// The events of one response.
pub(super) type Events = Pin<Box<dyn Stream<Item = Event> + Send>>;

/// A silence that makes a proxy or a client give up is longer than this.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Answers with the events that `start` makes once the model is there.
///
/// With the model there, what is wrong with the request is an error response. While it loads the
/// headers go out at once, and an error is an event (`failed`).
pub(super) async fn respond<F>(
    app: &App,
    start: impl FnOnce(Serving) -> F + Send + 'static,
    failed: fn(&ApiError) -> Event,
) -> Result<Response, ApiError>
where
    F: Future<Output = Result<Events, ApiError>> + Send + 'static,
{
    if let Some(serving) = app.loaded() {
        return Ok(response(start(serving).await?));
    }
    let app = app.clone();
    let late = async move {
        match app.serving().await {
            Ok(serving) => start(serving).await,
            Err(error) => Err(error),
        }
    };
    let events = stream::once(late).flat_map(move |started| match started {
        Ok(events) => events,
        Err(error) => Box::pin(stream::once(std::future::ready(failed(&error)))),
    });
    Ok(response(Box::pin(events)))
}

fn response(events: Events) -> Response {
    let keep_alive = KeepAlive::new().interval(KEEP_ALIVE).text("keep-alive");
    let mut response = Sse::new(events.map(Ok::<_, Infallible>))
        .keep_alive(keep_alive)
        .into_response();
    // A proxy that collects events would undo the streaming.
    response.headers_mut().insert(
        HeaderName::from_static("x-accel-buffering"),
        HeaderValue::from_static("no"),
    );
    response
}

/// An event with JSON in it.
pub(super) fn data(value: &impl Serialize) -> Event {
    Event::default().data(serde_json::to_string(value).unwrap_or_default())
}

/// OpenAI's error inside a stream.
pub(super) fn error(error: &ApiError) -> Event {
    data(&error.body())
}

/// OpenAI's end of a stream.
pub(super) fn done() -> Event {
    Event::default().data("[DONE]")
}
