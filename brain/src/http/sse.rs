//! Server-sent events: the headers at once, comments while nothing happens.
//!
//! An event is written once, straight to the bytes that go out. Every streamed token of every
//! reader passes here, so nothing is built that is not sent.

use std::{
    convert::Infallible,
    future::Future,
    io::Write as _,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, HeaderValue, header},
    response::Response,
};
use futures::{FutureExt as _, Stream, StreamExt as _, stream};
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};

use super::{app::App, error::ApiError};
use crate::serving::Serving;

/// The bytes of one response, an event or several at a time.
pub(super) type Events = Pin<Box<dyn Stream<Item = Bytes> + Send>>;

/// A proxy or a client that gives up waits longer than twice this.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// Bytes by which an event may be longer than the one before without being moved.
const SPARE: usize = 64;
/// What is sent into a silence.
const COMMENT: &[u8] = b": keep-alive\n\n";

/// Answers with the events that `start` makes once the model is there.
///
/// With the model there, what is wrong with the request is an error response. While it loads the
/// headers go out at once, and an error is an event (`failed`).
pub(super) async fn respond<F>(
    app: &App,
    start: impl FnOnce(Serving) -> F + Send + 'static,
    failed: fn(&ApiError, &mut Outgoing),
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
        Err(error) => {
            let mut out = Outgoing::default();
            failed(&error, &mut out);
            Box::pin(stream::once(std::future::ready(out.take())))
        }
    });
    Ok(response(Box::pin(events)))
}

fn response(events: Events) -> Response {
    let mut response = Response::new(Body::from_stream(KeptAlive::new(events, KEEP_ALIVE)));
    *response.headers_mut() = HeaderMap::from_iter([
        (
            header::CONTENT_TYPE,
            HeaderValue::from_static("text/event-stream"),
        ),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // A proxy that collects events would undo the streaming.
        (
            header::HeaderName::from_static("x-accel-buffering"),
            HeaderValue::from_static("no"),
        ),
    ]);
    response
}

/// Events that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    bytes: Vec<u8>,
    /// As much room as what was sent last took: events of a stream are much alike.
    room: usize,
}

impl Outgoing {
    /// An event with JSON in it.
    pub(super) fn data(&mut self, value: &impl Serialize) {
        self.event(None, None, value);
    }

    /// The same with a name, an id, or both. Neither has a line break in it.
    pub(super) fn event(&mut self, name: Option<&str>, id: Option<u64>, value: &impl Serialize) {
        let before = self.bytes.len();
        self.bytes.reserve(self.room.saturating_sub(before));
        if let Some(name) = name {
            self.bytes.extend_from_slice(b"event: ");
            self.bytes.extend_from_slice(name.as_bytes());
            self.bytes.push(b'\n');
        }
        if let Some(id) = id {
            // Memory takes all that is written to it.
            let _ = writeln!(self.bytes, "id: {id}");
        }
        self.bytes.extend_from_slice(b"data: ");
        match serde_json::to_writer(&mut self.bytes, value) {
            // JSON in one line: its strings have their line breaks escaped.
            Ok(()) => self.bytes.extend_from_slice(b"\n\n"),
            Err(error) => {
                tracing::error!(%error, "an event is left out");
                self.bytes.truncate(before);
            }
        }
    }

    /// OpenAI's end of a stream.
    pub(super) fn done(&mut self) {
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What waits, which then waits no more.
    pub(super) fn take(&mut self) -> Bytes {
        self.room = self.bytes.len() + SPARE;
        std::mem::take(&mut self.bytes).into()
    }
}

/// OpenAI's error inside a stream.
pub(super) fn error(error: &ApiError, out: &mut Outgoing) {
    out.data(&error.body());
}

/// Events, and comments in the silences between them.
///
/// The timer is not set anew for every event: it fires at its own pace, and an event since the last
/// time makes it pass.
struct KeptAlive {
    events: Events,
    timer: Pin<Box<Sleep>>,
    pace: Duration,
    /// An event has gone out since the timer was set.
    spoke: bool,
}

impl KeptAlive {
    fn new(events: Events, pace: Duration) -> Self {
        Self {
            events,
            timer: Box::pin(sleep(pace)),
            pace,
            spoke: false,
        }
    }
}

impl Stream for KeptAlive {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Poll::Ready(bytes) = self.events.poll_next_unpin(context) {
            self.spoke = true;
            return Poll::Ready(bytes.map(Ok));
        }
        while self.timer.poll_unpin(context).is_ready() {
            let next = Instant::now() + self.pace;
            self.timer.as_mut().reset(next);
            if !std::mem::take(&mut self.spoke) {
                return Poll::Ready(Some(Ok(Bytes::from_static(COMMENT))));
            }
        }
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn text(out: &mut Outgoing) -> String {
        String::from_utf8(out.take().to_vec()).unwrap()
    }

    #[test]
    fn an_event_is_lines_with_a_line_of_data() {
        let mut out = Outgoing::default();
        out.data(&json!({ "text": "a\nb\r\n\u{2028}" }));
        out.event(Some("named"), Some(7), &json!(1));
        out.done();
        assert_eq!(
            text(&mut out),
            "data: {\"text\":\"a\\nb\\r\\n\u{2028}\"}\n\nevent: named\nid: 7\ndata: 1\n\ndata: [DONE]\n\n"
        );
        assert!(out.is_empty());
    }

    #[test]
    fn what_is_no_json_leaves_nothing_behind() {
        let mut out = Outgoing::default();
        let odd = std::collections::BTreeMap::from([(vec![1], 1)]);
        out.event(Some("named"), Some(7), &odd);
        assert!(out.is_empty());
    }

    #[tokio::test]
    async fn a_silence_is_broken_by_comments() {
        let events = stream::iter(vec![Bytes::from_static(b"event"); 2]).chain(stream::pending());
        let mut stream = KeptAlive::new(Box::pin(events), Duration::from_millis(1));
        let mut heard = Vec::new();
        while heard.len() < 4 {
            heard.push(stream.next().await.unwrap().unwrap());
        }
        assert_eq!(heard, [&b"event"[..], b"event", COMMENT, COMMENT]);
    }
}
