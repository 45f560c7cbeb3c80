//! The document says what the program does.

use std::collections::BTreeSet;

use axum::{
    body::Body as HttpBody,
    http::{Method, Request, StatusCode},
};
use serde::{
    Deserialize, Deserializer,
    de::{Visitor, value::Error},
    forward_to_deserialize_any,
};
use tower::ServiceExt as _;

use super::*;
use crate::callers::Keys;
use crate::http::{
    chat, completions, content, deliver, fields, messages, responses, router, tokenize,
};

/// Fields of a type that derives `Deserialize`, as it asks for them.
fn read_by<T: for<'de> Deserialize<'de>>() -> BTreeSet<&'static str> {
    struct Asked<'a>(&'a mut BTreeSet<&'static str>);

    impl<'de> Deserializer<'de> for Asked<'_> {
        type Error = Error;

        fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
            Err(serde::de::Error::custom("no struct"))
        }

        fn deserialize_struct<V: Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Error> {
            self.0.extend(fields);
            Err(serde::de::Error::custom("nothing is read"))
        }

        forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf
            option unit unit_struct newtype_struct seq tuple tuple_struct map enum identifier
            ignored_any
        }
    }

    let mut fields = BTreeSet::new();
    assert!(T::deserialize(Asked(&mut fields)).is_err());
    assert!(!fields.is_empty(), "no struct");
    fields
}

fn resolved<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    match schema["$ref"].as_str() {
        Some(path) => resolved(document, document.pointer(&path[1..]).unwrap()),
        None => schema,
    }
}

/// Properties of a schema and of those that it is made of.
fn properties(document: &Value, schema: &Value) -> BTreeSet<String> {
    let schema = resolved(document, schema);
    let parts = schema["allOf"].as_array().into_iter().flatten();
    let own = schema["properties"].as_object().into_iter().flatten();
    parts
        .flat_map(|part| properties(document, part))
        .chain(own.map(|(name, _)| name.clone()))
        .collect()
}

fn named(fields: impl IntoIterator<Item = &'static str>) -> BTreeSet<String> {
    fields.into_iter().map(str::to_owned).collect()
}

/// The fields that ask for a form, which are read by hand.
const FORM: [&str; 9] = [
    "response_format",
    "output_format",
    "structured_outputs",
    "guided_json",
    "json_schema",
    "guided_regex",
    "regex",
    "guided_choice",
    "guided_grammar",
];

#[test]
fn requests_have_the_fields_that_are_read() {
    let document = document();
    let delivered = || {
        let mut fields = read_by::<fields::SamplingFields>();
        fields.extend(read_by::<deliver::Delivery>());
        fields
    };
    let schemas: [(&str, BTreeSet<&str>, &[&str]); 10] = [
        (
            "ChatRequest",
            &delivered() | &read_by::<chat::request::Fields>(),
            &["tool_choice"],
        ),
        (
            "CompletionRequest",
            &delivered() | &read_by::<completions::Fields>(),
            &[],
        ),
        (
            "ResponseRequest",
            &delivered() | &read_by::<responses::request::Fields>(),
            &["input", "tool_choice", "include", "text"],
        ),
        (
            "MessagesRequest",
            &delivered() | &read_by::<messages::request::Fields>(),
            &[],
        ),
        ("TokenizeRequest", read_by::<tokenize::Tokenize>(), &[]),
        ("DetokenizeRequest", read_by::<tokenize::Detokenize>(), &[]),
        ("ChatMessage", read_by::<chat::messages::ChatMessage>(), &[]),
        ("Function", read_by::<chat::tools::Function>(), &[]),
        ("TextPart", read_by::<content::Part>(), &[]),
        ("Block", read_by::<messages::blocks::Block>(), &[]),
    ];
    let forms = [
        "ChatRequest",
        "CompletionRequest",
        "ResponseRequest",
        "MessagesRequest",
    ];
    for (schema, read, by_hand) in schemas {
        let form = FORM.iter().filter(|_| forms.contains(&schema));
        let read = read
            .into_iter()
            .chain(form.copied())
            .collect::<BTreeSet<_>>();
        let written = properties(&document, &document["components"]["schemas"][schema]);
        let read = named(read.into_iter().chain(by_hand.iter().copied()));
        assert_eq!(written, read, "{schema}");
    }
}

#[test]
fn no_request_has_a_field_that_is_refused() {
    let document = document();
    let refused: BTreeSet<String> = refused().map(|(field, _)| field.to_owned()).collect();
    let listed = document["info"]["x-refused"].as_object().unwrap();
    assert_eq!(refused, listed.keys().cloned().collect());
    for schema in [
        "ChatRequest",
        "CompletionRequest",
        "ResponseRequest",
        "MessagesRequest",
    ] {
        let written = properties(&document, &document["components"]["schemas"][schema]);
        assert!(written.is_disjoint(&refused), "{schema}: {written:?}");
    }
}

#[test]
fn every_reference_leads_somewhere() {
    fn check(document: &Value, part: &Value, seen: &mut usize) {
        match part {
            Value::Object(map) => {
                if let Some(path) = map.get("$ref").and_then(Value::as_str) {
                    assert!(document.pointer(&path[1..]).is_some(), "{path}");
                    *seen += 1;
                }
                map.values().for_each(|part| check(document, part, seen));
            }
            Value::Array(list) => list.iter().for_each(|part| check(document, part, seen)),
            _ => {}
        }
    }
    let document = document();
    let mut seen = 0;
    check(&document, &document, &mut seen);
    assert!(seen > 50, "only {seen} references");
}

/// A path as a request has it.
fn concrete(path: &str) -> String {
    path.replace("{*name}", "a/b")
        .replace("{name}", "a")
        .replace("{id}", "resp_x")
}

#[tokio::test]
async fn the_routes_are_those_of_the_document() {
    let document = document();
    let written = document["paths"].as_object().unwrap();
    let routed: BTreeSet<String> = router::paths()
        .iter()
        .map(|path| path.replace("{*", "{"))
        .collect();
    assert_eq!(routed, written.keys().cloned().collect());

    let (_model, loaded) = tokio::sync::watch::channel(None);
    let ending = tokio_util::sync::CancellationToken::new();
    // Nothing waits for a model then.
    ending.cancel();
    let app = crate::http::app::App::new(
        loaded,
        Keys::default(),
        Vec::new(),
        true,
        "demo".into(),
        None,
        ending,
    );
    let routes = router::routes(app);
    for (path, methods) in written {
        for method in [Method::GET, Method::POST, Method::DELETE, Method::PUT] {
            let request = Request::builder()
                .method(&method)
                .uri(concrete(path))
                .body(HttpBody::from("{}"))
                .unwrap();
            let response = routes.clone().oneshot(request).await.unwrap();
            let taken = response.status() != StatusCode::METHOD_NOT_ALLOWED;
            let said = methods.get(method.as_str().to_lowercase()).is_some();
            assert_eq!(taken, said, "{method} {path}: {}", response.status());
        }
    }
}

#[tokio::test]
async fn it_is_served_with_its_version() {
    let response = show().await;
    assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
    let body = axum::body::to_bytes(response.into_body(), usize::MAX)
        .await
        .unwrap();
    let served: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(served["info"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(served["openapi"], "3.1.0");
}
