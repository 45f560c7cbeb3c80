//! Errors in Anthropic's shape.

use axum::{extract::Request, http::StatusCode, middleware::Next, response::Response};
use serde_json::{Value, json};

use super::super::{error::ApiError, sse::Outgoing};

/// Status of an overloaded server in Anthropic's API.
const OVERLOADED: u16 = 529;

fn body(error: &ApiError) -> Value {
    let kind = match error.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        _ if error.code == "overloaded" => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    };
    let message = match &error.param {
        Some(param) if !error.message.contains(param.as_str()) => {
            format!("{param}: {}", error.message)
        }
        _ => error.message.clone(),
    };
    json!({ "type": "error", "error": { "type": kind, "message": message } })
}

/// An error inside a stream.
pub(super) fn event(error: &ApiError, out: &mut Outgoing) {
    out.event(Some("error"), None, &body(error));
}

/// Gives the errors of Anthropic's routes, those of the layers around them too, their shape.
pub(in super::super) async fn translate(request: Request, next: Next) -> Response {
    let theirs = request.uri().path().starts_with("/v1/messages");
    let response = next.run(request).await;
    let Some(error) = response.extensions().get::<ApiError>().filter(|_| theirs) else {
        return response;
    };
    let mut translated = error.respond_with(body(error));
    if error.code == "overloaded"
        && let Ok(status) = StatusCode::from_u16(OVERLOADED)
    {
        *translated.status_mut() = status;
    }
    translated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_anthropics_and_the_field_is_in_the_message() {
        let error = ApiError::invalid("messages[0].role", "it is \"king\"");
        let body = body(&error);
        assert_eq!(body["type"], "error");
        assert_eq!(body["error"]["type"], "invalid_request_error");
        assert_eq!(body["error"]["message"], "messages[0].role: it is \"king\"");
        let loading = super::body(&ApiError::loading());
        assert_eq!(loading["error"]["type"], "api_error");
    }
}
