//! A request's body, read and checked as its endpoint does, with no model behind it: what a hostile
//! body meets first. For programs that try such bodies.

use axum::http::HeaderMap;
use serde_json::Value;

use super::{
    body::{self, Body},
    chat::request::ChatRequest,
    completions::CompletionRequest,
    error::ApiError,
    identity::RequestId,
    messages::request::MessagesRequest,
    responses::request::{self as responses, ResponseRequest},
    tokenize::{Detokenize, Tokenize},
};

/// An endpoint that takes a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/messages/count_tokens`
    CountTokens,
    /// `/tokenize`
    Tokenize,
    /// `/detokenize`
    Detokenize,
}

impl Endpoint {
    /// Every one.
    pub const ALL: [Self; 7] = [
        Self::Chat,
        Self::Completions,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
        Self::Tokenize,
        Self::Detokenize,
    ];

    /// Reads a body.
    ///
    /// # Errors
    /// The body of the answer that a client would get, in OpenAI's shape.
    pub fn read(self, body: &[u8]) -> Result<(), Value> {
        self.check(body).map_err(|error| error.body())
    }

    fn check(self, bytes: &[u8]) -> Result<(), ApiError> {
        let body: Body = body::parse(bytes)?;
        let (headers, id) = (HeaderMap::new(), RequestId::random());
        match self {
            Self::Chat => ChatRequest::parse(&body, &headers, id).map(drop),
            Self::Completions => CompletionRequest::parse(&body, &headers, id).map(drop),
            Self::Responses => {
                responses::previous_id(&body)?;
                ResponseRequest::parse(&body, &headers, id, Vec::new()).map(drop)
            }
            Self::Messages => MessagesRequest::parse(&body, &headers, id).map(drop),
            Self::CountTokens => MessagesRequest::parse_to_count(&body, &headers, id).map(drop),
            Self::Tokenize => body.view::<Tokenize>().map(drop),
            Self::Detokenize => body.view::<Detokenize>().map(drop),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_bodies_are_refused_with_a_reason() {
        let deep = format!("{{\"messages\":{}1{}}}", "[".repeat(5000), "]".repeat(5000));
        let wide = format!("{{\"messages\":[{}0]}}", "0,".repeat(100_000));
        for body in [
            "",
            "null",
            "[]",
            "{",
            "{}",
            "{\"messages\":{}}",
            "{\"messages\":[],\"input\":[],\"prompt\":[],\"tokens\":[{}],\"max_tokens\":1}",
            "{\"model\":1}",
            "{\"prompt\":[[1],\"a\"],\"tokens\":[1.5],\"input\":5,\"messages\":[{\"role\":7}]}",
            "\u{feff}{}",
            &deep,
            &wide,
        ] {
            for endpoint in Endpoint::ALL {
                let Err(error) = endpoint.read(body.as_bytes()) else {
                    // A text that is missing is told when there is a model.
                    assert_eq!(endpoint, Endpoint::Tokenize, "{body:.60}");
                    continue;
                };
                let message = error["error"]["message"].as_str().unwrap();
                assert!(
                    !message.is_empty() && message.len() < 1000,
                    "{message:.1200}"
                );
            }
        }
    }

    #[test]
    fn right_bodies_are_read() {
        for endpoint in Endpoint::ALL {
            // Responses know stored prompts under the name of what completions go on from.
            let body = match endpoint {
                Endpoint::Responses => r#"{"input":"x"}"#,
                _ => {
                    r#"{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"prompt":"x",
                    "tokens":[1]}"#
                }
            };
            endpoint.read(body.as_bytes()).unwrap();
        }
    }
}
