//! Errors as clients of OpenAI's API expect them.
//!
//! The phrasings matter: agents recognise an overflowing context, an overloaded server and a
//! failure that may be retried by the words of the message.

use std::time::Duration;

use axum::{
    Json,
    extract::rejection::{PathRejection, QueryRejection},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use marathon_proto::status::{Problem, Reason};
use serde_json::{Value, json};

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApiError {
    pub(super) status: StatusCode,
    /// OpenAI's `type`.
    pub(super) kind: &'static str,
    /// OpenAI's `code`.
    pub(super) code: &'static str,
    pub(super) message: String,
    /// The field at fault, as a path in the request.
    pub(super) param: Option<String>,
    pub(super) retry_after: Option<Duration>,
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";
const SOON: Duration = Duration::from_secs(1);

impl ApiError {
    fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        message: impl Into<String>,
    ) -> Self {
        Self {
            status,
            kind,
            code,
            message: message.into(),
            param: None,
            retry_after: None,
        }
    }

    /// A value that is wrong, at a path in the request.
    pub(super) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(StatusCode::BAD_REQUEST, INVALID, "invalid_value", message)
        }
    }

    /// A field that asks for something that is not offered.
    pub(super) fn unsupported(param: impl Into<String>, why: &str) -> Self {
        let param = param.into();
        let message = format!("`{param}` is not supported here: {why}");
        Self {
            code: "unsupported_parameter",
            ..Self::invalid(param, message)
        }
    }

    /// A body that is no JSON, or of another shape.
    pub(super) fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, INVALID, "invalid_json", message)
    }

    /// A body beyond the limit.
    pub(super) fn too_large(limit: usize) -> Self {
        Self::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            INVALID,
            "request_too_large",
            format!("the request's body is larger than {limit} bytes: send less"),
        )
    }

    /// A body that does not come.
    pub(super) fn too_slow(limit: Duration) -> Self {
        Self::new(
            StatusCode::REQUEST_TIMEOUT,
            INVALID,
            "request_timeout",
            format!("the request's body did not arrive within {limit:?}: timed out"),
        )
    }

    /// A body in a form that is not read.
    pub(super) fn media_type(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            INVALID,
            "unsupported_media_type",
            message,
        )
    }

    /// No key, or a wrong one.
    pub(super) fn unauthenticated(message: impl Into<String>) -> Self {
        Self::new(
            StatusCode::UNAUTHORIZED,
            INVALID,
            "invalid_api_key",
            message,
        )
    }

    /// A page of an origin that is not allowed.
    pub(super) fn forbidden_origin(origin: &str) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            INVALID,
            "origin_not_allowed",
            format!(
                "pages of {origin:.100} may not call this server: allow it with --cors-origins"
            ),
        )
    }

    /// A name of this server that somebody else may answer for.
    pub(super) fn forbidden_host(host: &str) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            INVALID,
            "host_not_allowed",
            format!(
                "this server is not {host:.100}: call it as localhost or by its address, or serve \
                 with keys, or allow http://{host:.100} with --cors-origins"
            ),
        )
    }

    /// Nothing under that name.
    pub(super) fn not_found(what: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, INVALID, "not_found", what)
    }

    /// A model that is not served.
    pub(super) fn no_such_model(asked: &str, served: &str) -> Self {
        Self {
            param: Some("model".into()),
            ..Self::new(
                StatusCode::NOT_FOUND,
                INVALID,
                "model_not_found",
                format!("the model `{asked:.200}` does not exist here: this server has `{served}`"),
            )
        }
    }

    /// Another method than the route's.
    pub(super) fn method() -> Self {
        Self::new(
            StatusCode::METHOD_NOT_ALLOWED,
            INVALID,
            "method_not_allowed",
            "this address does not take that method",
        )
    }

    /// The model is not there yet.
    pub(super) fn loading() -> Self {
        Self {
            retry_after: Some(SOON),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                "model_loading",
                "service unavailable: the model is still loading, retry your request",
            )
        }
    }

    /// The program is about to end.
    pub(super) fn ending() -> Self {
        Self {
            retry_after: Some(SOON),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                "shutting_down",
                "service unavailable: brain is shutting down, retry your request",
            )
        }
    }

    /// A generation that broke off; the status may already be sent.
    pub(super) fn broken_off(why: &str) -> Self {
        Self {
            retry_after: Some(SOON),
            ..Self::new(
                StatusCode::SERVICE_UNAVAILABLE,
                SERVER,
                "generation_failed",
                format!("server error (503): {why}; retry your request"),
            )
        }
    }

    /// A generation that somebody ended, where the API has no word for that.
    pub(super) fn cancelled() -> Self {
        Self::new(
            StatusCode::GONE,
            SERVER,
            "generation_cancelled",
            "the generation was cancelled before its end",
        )
    }

    /// The disk does not take a response.
    pub(super) fn storage() -> Self {
        Self::new(
            StatusCode::INSUFFICIENT_STORAGE,
            SERVER,
            "not_stored",
            "server error (507): the response cannot be stored; brain's log says why, \
             or send `store: false`",
        )
    }

    /// The id is taken by another request.
    pub(super) fn conflict(id: &str) -> Self {
        Self::new(
            StatusCode::CONFLICT,
            INVALID,
            "conflict",
            format!("`{id:.100}` exists with another request: choose another id"),
        )
    }

    /// A stored response of a model that is served no more.
    pub(super) fn another_model(id: &str) -> Self {
        Self::new(
            StatusCode::CONFLICT,
            INVALID,
            "fingerprint_mismatch",
            format!("response `{id:.100}` was made by another model: its tokens would differ"),
        )
    }

    /// A bug.
    pub(super) fn internal() -> Self {
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            SERVER,
            "internal_error",
            "internal error: brain's log says how",
        )
    }

    /// A problem of the layers below; `max_len` is the most that prompt and answer may have.
    pub(super) fn from_problem(problem: Problem, max_len: usize) -> Self {
        let Problem {
            reason,
            message,
            field,
            retry_after,
        } = problem;
        let message = match reason {
            Reason::PromptTooLong => format!(
                "the request exceeds the available context size: this model's maximum context \
                 length is {max_len} tokens; {message}"
            ),
            Reason::Overloaded => format!("the server is overloaded: {message}"),
            Reason::EngineFailed => format!("server error (503): {message}"),
            Reason::ShuttingDown => {
                return Self {
                    retry_after: retry_after.or(Some(SOON)),
                    ..Self::ending()
                };
            }
            Reason::Internal => return Self::internal(),
            _ => message,
        };
        let (status, kind, code) = classified(reason);
        Self {
            param: field.map(|field| http_path(&field)),
            retry_after,
            ..Self::new(status, kind, code, message)
        }
    }

    /// The body, also sent inside a stream.
    pub(super) fn body(&self) -> Value {
        json!({ "error": {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }})
    }

    /// The response with another body than OpenAI's.
    pub(super) fn respond_with(&self, body: Value) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        // For layers that write errors in another shape.
        response.extensions_mut().insert(self.clone());
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            headers.insert(
                header::RETRY_AFTER,
                HeaderValue::from(after.as_secs().max(1)),
            );
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<QueryRejection> for ApiError {
    fn from(rejection: QueryRejection) -> Self {
        let what = format!("the query is not right: {}", rejection.body_text());
        Self::new(StatusCode::BAD_REQUEST, INVALID, "invalid_value", what)
    }
}

impl From<PathRejection> for ApiError {
    fn from(rejection: PathRejection) -> Self {
        let what = format!("the address is not right: {}", rejection.body_text());
        Self::new(StatusCode::BAD_REQUEST, INVALID, "invalid_value", what)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond_with(self.body())
    }
}

/// Status, `type` and `code` of a problem of this kind.
fn classified(reason: Reason) -> (StatusCode, &'static str, &'static str) {
    let wrong = |code| (StatusCode::BAD_REQUEST, INVALID, code);
    let conflict = |code| (StatusCode::CONFLICT, INVALID, code);
    let unavailable = |code| (StatusCode::SERVICE_UNAVAILABLE, SERVER, code);
    match reason {
        Reason::InvalidField => wrong("invalid_value"),
        Reason::PromptTooLong => wrong("context_length_exceeded"),
        Reason::IndexOutOfRange => wrong("index_out_of_range"),
        Reason::UnknownGeneration => (StatusCode::NOT_FOUND, INVALID, "not_found"),
        Reason::GenerationConflict => conflict("conflict"),
        Reason::FingerprintMismatch => conflict("fingerprint_mismatch"),
        Reason::Unauthenticated => (StatusCode::UNAUTHORIZED, INVALID, "invalid_api_key"),
        Reason::Overloaded => unavailable("overloaded"),
        Reason::ShuttingDown => unavailable("shutting_down"),
        Reason::EngineFailed => unavailable("engine_failed"),
        Reason::Internal => (StatusCode::INTERNAL_SERVER_ERROR, SERVER, "internal_error"),
    }
}

/// A path of the contract as it is called over HTTP.
fn http_path(field: &str) -> String {
    let field = field.strip_prefix("spec.").unwrap_or(field);
    let field = field.strip_prefix("sampling.").unwrap_or(field);
    let field = field.strip_prefix("conversation.").unwrap_or(field);
    match field {
        "conversation" => "messages".into(),
        "logprobs" => "top_logprobs".into(),
        "prompt_text" | "prompt_tokens" => "prompt".into(),
        other => other
            .replace(".arguments_json", ".function.arguments")
            .replace(".parameters_json", ".function.parameters"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overflow_says_what_agents_look_for() {
        let problem = Problem::new(Reason::PromptTooLong, "the prompt has 9000 tokens");
        let error = ApiError::from_problem(problem, 4096);
        assert_eq!(
            (error.status, error.code),
            (StatusCode::BAD_REQUEST, "context_length_exceeded")
        );
        for phrase in [
            "exceeds the available context size",
            "maximum context length is 4096 tokens",
            "9000",
        ] {
            assert!(error.message.contains(phrase), "{}", error.message);
        }
        // Words that make agents take it for something to wait out.
        for phrase in ["rate limit", "too many requests", "overloaded"] {
            assert!(!error.message.contains(phrase), "{}", error.message);
        }
    }

    #[test]
    fn what_may_be_retried_says_so_in_words_and_headers() {
        let busy = Problem::new(Reason::Overloaded, "256 generations").retry_after(SOON);
        for (error, phrase) in [
            (ApiError::from_problem(busy, 1), "overloaded"),
            (ApiError::loading(), "service unavailable"),
            (ApiError::ending(), "service unavailable"),
            (
                ApiError::broken_off("the device is gone"),
                "server error (503)",
            ),
        ] {
            assert!(error.message.contains(phrase), "{}", error.message);
            let response = error.into_response();
            assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        }
    }

    #[test]
    fn paths_of_the_contract_become_paths_of_the_request() {
        for (path, shown) in [
            ("spec.sampling.top_p", "top_p"),
            ("spec.prompt_text", "prompt"),
            ("spec.conversation", "messages"),
            (
                "spec.conversation.messages[2].tool_calls[0].arguments_json",
                "messages[2].tool_calls[0].function.arguments",
            ),
            (
                "spec.conversation.tools[1].parameters_json",
                "tools[1].function.parameters",
            ),
        ] {
            assert_eq!(http_path(path), shown);
        }
    }
}
