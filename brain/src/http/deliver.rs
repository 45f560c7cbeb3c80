//! How an answer is delivered: fields and headers that several endpoints share.

use axum::http::HeaderMap;
use serde::Deserialize;
use tracing::Span;

use super::{body::Body, error::ApiError, identity::RequestId};
use crate::serving::LONGEST_RUN_ID;

/// Fields of delivery, alike on several endpoints.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Delivery {
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    return_token_ids: Option<bool>,
    request_id: Option<String>,
    resumable: Option<bool>,
    prompt_cache_key: Option<String>,
    cache_salt: Option<String>,
    priority: Option<i32>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// How an answer is delivered.
#[derive(Clone, Debug)]
pub(super) struct Deliver {
    pub(super) id: RequestId,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) running_usage: bool,
    pub(super) token_ids: bool,
    pub(super) resumable: bool,
    /// The request's, below which its generations are traced.
    pub(super) span: Span,
    /// First token wanted.
    pub(super) from: usize,
    /// Requests of one session belong to one run.
    session: Option<String>,
    cache_salt: String,
    /// As the contract has it.
    pub(super) priority: i32,
}

impl Deliver {
    /// Reads the fields and headers; `given` is the request's id unless the body has one.
    pub(super) fn parse(
        body: &Body,
        headers: &HeaderMap,
        given: RequestId,
        n: usize,
    ) -> Result<Self, ApiError> {
        let fields: Delivery = body.view()?;
        let id = match fields.request_id {
            None => given,
            Some(text) => RequestId::parse(&text).ok_or_else(|| {
                let what = "`request_id` is 1 to 80 characters of letters, digits and . _ -";
                ApiError::invalid("request_id", what)
            })?,
        };
        let stream = fields.stream.unwrap_or(false);
        let options = fields.stream_options.unwrap_or_default();
        let after = last_event(headers)?;
        let resumable = fields.resumable.unwrap_or(false) || after.is_some();
        if resumable && n > 1 {
            return Err(ApiError::unsupported("resumable", "only with one choice"));
        }
        Ok(Self {
            id,
            stream,
            include_usage: options.include_usage.unwrap_or(false),
            running_usage: options.continuous_usage_stats.unwrap_or(false),
            token_ids: fields.return_token_ids.unwrap_or(false),
            resumable,
            span: Span::current(),
            from: after.map_or(0, |last| last + 1),
            cache_salt: fields.cache_salt.unwrap_or_default(),
            // As in vLLM: less is sooner.
            priority: fields.priority.unwrap_or(0).saturating_neg().clamp(-4, 4),
            session: fields.prompt_cache_key.or_else(|| session(headers)),
        })
    }

    /// Separates the cached prompts of one caller.
    pub(super) fn cache_salt(&self) -> String {
        match self.cache_salt.as_str() {
            "" => String::new(),
            // Of any length.
            salt => blake3::hash(salt.as_bytes()).to_hex().to_string(),
        }
    }

    /// Names the run that the request belongs to, for fairness, the cache and the ledger; may be
    /// empty.
    pub(super) fn run_id(&self) -> String {
        match &self.session {
            None => String::new(),
            Some(session) if session.len() <= LONGEST_RUN_ID => session.clone(),
            Some(session) => blake3::hash(session.as_bytes()).to_hex().to_string(),
        }
    }
}

/// Number of the last event that the client has, from `Last-Event-ID`: the index of its last token,
/// but for responses, which number their events.
pub(super) fn last_event(headers: &HeaderMap) -> Result<Option<usize>, ApiError> {
    let Some(value) = headers.get("last-event-id") else {
        return Ok(None);
    };
    let index = value
        .to_str()
        .ok()
        .and_then(|text| text.parse::<u32>().ok());
    index.map(|index| Some(index as usize)).ok_or_else(|| {
        let what = "the header is the `id:` of the last event received";
        ApiError::invalid("Last-Event-ID", what)
    })
}

fn session(headers: &HeaderMap) -> Option<String> {
    [
        "x-session-id",
        "x-session-affinity",
        "session-id",
        "session_id",
    ]
    .into_iter()
    .find_map(|name| Some(headers.get(name)?.to_str().ok()?.to_owned()))
}
