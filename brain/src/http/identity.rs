//! Ids: of requests, and of what they make.

use axum::{
    extract::Request,
    http::{HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};

/// Names a request in logs, responses and errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RequestId(String);

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id that a client may choose: with its kind and its number it is a generation's id.
const LONGEST: usize = 80;

impl RequestId {
    /// A new one: 128 random bits.
    pub(super) fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// The client's own, if it may be one.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        ((1..=LONGEST).contains(&text.len()) && text.bytes().all(fits))
            .then(|| Self(text.to_owned()))
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

/// The engine's id of what a request generates.
pub(super) fn generation_id(shown: &str, choice: usize) -> String {
    match choice {
        0 => shown.to_owned(),
        other => format!("{shown}.{other}"),
    }
}

/// Gives every request an id, the client's own if it has one, and answers with it.
pub(super) async fn name_request(mut request: Request, next: Next) -> Response {
    let id = request
        .headers()
        .get(&HEADER)
        .and_then(|value| RequestId::parse(value.to_str().ok()?))
        .unwrap_or_else(RequestId::random);
    request.extensions_mut().insert(id.clone());
    let mut response = next.run(request).await;
    if let Ok(value) = HeaderValue::from_str(id.text()) {
        response.headers_mut().insert(HEADER, value);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_could_be_another_generations_is_none() {
        assert_eq!(
            RequestId::parse("bench-1.a_B").unwrap().text(),
            "bench-1.a_B"
        );
        for bad in ["", "a b", "a:b", "ä", &"x".repeat(LONGEST + 1)] {
            assert_eq!(RequestId::parse(bad), None, "{bad}");
        }
        assert_ne!(RequestId::random(), RequestId::random());
        let id = generation_id(&format!("chatcmpl-{}", "x".repeat(LONGEST)), 15);
        assert!(id.len() <= 128, "{id}");
    }
}
