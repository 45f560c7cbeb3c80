//! Who may call: a key where there are keys, and no page of a stranger's site where there are none.
//!
//! A browser names the site of a page that calls another site (`Origin`). It does not when it
//! believes the page's own site to be here: somebody who answers for a name, first with their own
//! address and then with this machine's, makes it believe so. Such a call carries that name
//! (`Host`), which no honest one does: without keys only this machine can call.

use std::net::IpAddr;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header, uri::Authority},
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
        check_host(&app, &request)?;
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

fn check_host(app: &App, request: &Request) -> Result<(), ApiError> {
    let given = request.headers().get(header::HOST);
    let authority = request.uri().authority();
    let host = match (authority, given) {
        (Some(authority), _) => authority.host().to_owned(),
        // Browsers always send one.
        (None, None) => return Ok(()),
        (None, Some(host)) => Authority::try_from(host.as_bytes())
            .map(|authority| authority.host().to_owned())
            .map_err(|_| ApiError::forbidden_host(&String::from_utf8_lossy(host.as_bytes())))?,
    };
    if is_local(&host) || app.is_reached_as(&host) {
        return Ok(());
    }
    Err(ApiError::forbidden_host(&host))
}

/// A name that nobody else can answer for: an address, or this machine's own.
fn is_local(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let name = host.trim_end_matches('.').to_ascii_lowercase();
    bare.parse::<IpAddr>().is_ok() || name == "localhost" || name.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_others_answer_for_are_not_this_machines() {
        for host in [
            "127.0.0.1",
            "[::1]",
            "192.168.1.7",
            "localhost",
            "Api.LocalHost.",
        ] {
            assert!(is_local(host), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "notlocalhost",
            "",
            "127.0.0.1.nip.io",
        ] {
            assert!(!is_local(host), "{host}");
        }
    }

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
