//! `GET /openapi.json`: the API as a document that tools read.
//!
//! The document is written by hand, beside this file. Tests hold it against the routes, the fields
//! that are read and those that are refused.

use std::sync::LazyLock;

use axum::{
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

use super::fields::refused;

const WRITTEN: &str = include_str!("openapi/document.json");

/// As it is served.
static SERVED: LazyLock<String> = LazyLock::new(|| document().to_string());

/// `GET /openapi.json`
pub(super) async fn show() -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, json)], SERVED.as_str()).into_response()
}

/// What was written, and what the program knows better.
#[allow(clippy::expect_used, reason = "it is part of the program, and tested")]
fn document() -> Value {
    // proof: a test parses it.
    let mut document: Value = serde_json::from_str(WRITTEN).expect("the document is JSON");
    document["info"]["version"] = json!(env!("CARGO_PKG_VERSION"));
    let refused: serde_json::Map<String, Value> = refused()
        .map(|(field, why)| (field.to_owned(), json!(why)))
        .collect();
    document["info"]["x-refused"] = Value::Object(refused);
    document
}

#[cfg(test)]
#[path = "openapi/tests.rs"]
mod tests;
