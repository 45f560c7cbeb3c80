//! Request bodies: JSON within limits, and the place of what is wrong in it.

use std::time::Duration;

use axum::{
    body::to_bytes,
    extract::{FromRequest, Request},
    http::header,
};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tracing::Span;

use super::{blocking::blocking, error::ApiError};

/// Largest body, as over gRPC.
pub(super) const MAX_BODY: usize = marathon_proto::net::MAX_MESSAGE_BYTES;
/// Longest wait for a body.
const PATIENCE: Duration = Duration::from_secs(60);
/// Larger bodies are parsed and read on a thread that may block.
const SMALL: usize = 128 << 10;

/// A JSON object as it was sent.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) fields: Map<String, Value>,
    large: bool,
}

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, ApiError> {
        if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING)
            && encoding != "identity"
        {
            return Err(ApiError::media_type(
                "the body has a content-encoding: send it as it is",
            ));
        }
        let announced = request
            .headers()
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        if announced.is_some_and(|length| length > MAX_BODY) {
            return Err(ApiError::too_large(MAX_BODY));
        }
        let bytes = tokio::time::timeout(PATIENCE, to_bytes(request.into_body(), MAX_BODY))
            .await
            .map_err(|_| ApiError::too_slow(PATIENCE))?
            .map_err(|error| body_error(&error))?;
        if bytes.len() <= SMALL {
            return parse(&bytes);
        }
        blocking(move || parse(&bytes)).await?
    }
}

fn body_error(error: &axum::Error) -> ApiError {
    use std::error::Error as _;
    let mut source = error.source();
    while let Some(inner) = source {
        // The limit's own error is in another crate's private module; its text is stable.
        if inner.to_string() == "length limit exceeded" {
            return ApiError::too_large(MAX_BODY);
        }
        source = inner.source();
    }
    ApiError::malformed(format!("the body could not be read: {error}"))
}

pub(super) fn parse(bytes: &[u8]) -> Result<Body, ApiError> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(fields)) => Ok(Body {
            fields,
            large: bytes.len() > SMALL,
        }),
        Ok(_) => Err(ApiError::malformed("the body must be a JSON object")),
        Err(error) => Err(ApiError::malformed(format!(
            "the body is not valid JSON: {error}"
        ))),
    }
}

impl From<Map<String, Value>> for Body {
    /// A body that was read before.
    fn from(fields: Map<String, Value>) -> Self {
        Self {
            fields,
            large: false,
        }
    }
}

impl Body {
    /// What `read` makes of it. It may take as long as the body is large.
    ///
    /// # Errors
    /// Those of `read`.
    pub(super) async fn read<T: Send + 'static>(
        self,
        read: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if !self.large {
            return read(&self);
        }
        let span = Span::current();
        // Forgetting a large one takes long too: it goes there.
        blocking(move || span.in_scope(|| read(&self))).await?
    }

    /// A view of the body with types; fields that the type does not have are passed over.
    ///
    /// # Errors
    /// The path of the first value of another type.
    pub(super) fn view<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        serde_path_to_error::deserialize(&self.fields).map_err(|error| {
            let path = error.path().to_string();
            let what = error.inner().to_string();
            match path.as_str() {
                "." => ApiError::malformed(format!("the request is not right: {what}")),
                _ => ApiError {
                    code: "invalid_type",
                    ..ApiError::invalid(path.clone(), format!("`{path}`: {what}"))
                },
            }
        })
    }

    /// A field; `None` when it is absent or null.
    pub(super) fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    struct View {
        #[serde(default)]
        messages: Vec<Message>,
        top_k: Option<u32>,
    }

    #[derive(Debug, Deserialize)]
    struct Message {
        #[serde(rename = "content")]
        _content: String,
    }

    #[test]
    fn a_wrong_type_is_named_by_its_path() {
        let body = parse(br#"{"messages":[{"content":"a"},{"content":5}],"extra":1}"#).unwrap();
        let error = body.view::<View>().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[1].content"));
        assert!(
            error.message.contains("expected a string"),
            "{}",
            error.message
        );
    }

    #[test]
    fn unknown_fields_and_nulls_are_accepted() {
        let body = parse(br#"{"top_k":null,"whatever":{"x":[]}}"#).unwrap();
        let view: View = body.view().unwrap();
        assert_eq!((view.top_k, view.messages.len()), (None, 0));
        assert_eq!(body.get("top_k"), None);
        assert!(body.get("whatever").is_some());
    }

    #[test]
    fn broken_json_is_answered_with_its_place() {
        let deep = "[".repeat(100_000);
        for (text, phrase) in [
            ("{\n \"a\": }", "line 2 column 7"),
            ("", "line 1 column 0"),
            ("[]", "JSON object"),
            ("{\"a\":1e999}", "out of range"),
            ("{\"a\":NaN}", "line 1"),
            (&format!("{{\"a\":{deep}"), "recursion limit"),
        ] {
            let error = parse(text.as_bytes()).unwrap_err();
            assert!(error.message.contains(phrase), "{}", error.message);
        }
        let error = parse(b"{\"a\":\"\xff\"}").unwrap_err();
        assert!(error.message.contains("line 1"), "{}", error.message);
    }
}
