//! Who may call: a key where there are keys, and no page of a stranger's site where there are none.

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::Response,
};

use super::{app::App, error::ApiError};

/// Lets a request pass with its owner attached.
pub(super) async fn require_key(
    State(app): State<App>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    if app.keys().is_empty() {
        check_origin(&app, request.headers())?;
    }
    let key = key_of(request.headers());
    let owner = app.keys().caller(key).ok_or_else(|| {
        ApiError::unauthenticated(match key {
            Some(_) => "the key is not one of this server's",
            None => "this server needs a key: send `Authorization: Bearer KEY`",
        })
    })?;
    request.extensions_mut().insert(owner);
    Ok(next.run(request).await)
}

/// `Authorization: Bearer KEY`, or Anthropic's `x-api-key`.
fn key_of(headers: &HeaderMap) -> Option<&[u8]> {
    const SCHEME: &[u8] = b"bearer ";
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(SCHEME.len())?;
        scheme.eq_ignore_ascii_case(SCHEME).then_some(key)
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))
}

/// Without keys, what stands between a page of any site and this server is the browser's `Origin`.
fn check_origin(app: &App, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(origin) = headers.get(header::ORIGIN) else {
        return Ok(());
    };
    let allowed = app
        .cors_origins()
        .iter()
        .any(|allowed| allowed == "*" || allowed.as_bytes() == origin.as_bytes());
    if allowed {
        return Ok(());
    }
    Err(ApiError::forbidden_origin(&String::from_utf8_lossy(
        origin.as_bytes(),
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_in_either_header() {
        let headers = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(
                header::HeaderName::from_static(name),
                header::HeaderValue::from_static(value),
            )])
        };
        for (name, value, key) in [
            ("authorization", "Bearer abc", Some("abc")),
            ("authorization", "bearer abc", Some("abc")),
            ("x-api-key", "abc", Some("abc")),
            ("authorization", "Basic abc", None),
            ("authorization", "Bearer", None),
            ("cookie", "abc", None),
        ] {
            let found = headers(name, value);
            assert_eq!(key_of(&found), key.map(str::as_bytes), "{name}: {value}");
        }
    }
}
