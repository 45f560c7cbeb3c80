//! The routes, and what all of them share.

use axum::{
    Router,
    http::{HeaderName, HeaderValue, Method, header},
    middleware,
    response::IntoResponse as _,
    routing::{MethodRouter, get, post},
};
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowOrigin, CorsLayer},
};

use super::{
    app::App, auth, chat, completions, error::ApiError, health, identity, messages, metrics,
    models, openapi, responses, runs, span, tokenize,
};

type Route = (&'static str, MethodRouter<App>);

/// Routes that need a key where there are keys.
fn guarded() -> Vec<Route> {
    vec![
        ("/v1/chat/completions", post(chat::create)),
        ("/v1/completions", post(completions::create)),
        ("/v1/messages", post(messages::create)),
        ("/v1/messages/count_tokens", post(messages::count_tokens)),
        ("/v1/responses", post(responses::create)),
        (
            "/v1/responses/{id}",
            get(responses::read).delete(responses::delete),
        ),
        ("/v1/models", get(models::list)),
        ("/v1/models/{*name}", get(models::one)),
        ("/v1/runs", get(runs::list)),
        ("/v1/runs/{*id}", get(runs::one)),
        ("/tokenize", post(tokenize::tokenize)),
        ("/detokenize", post(tokenize::detokenize)),
        ("/metrics", get(metrics::show)),
        ("/openapi.json", get(openapi::show)),
        ("/version", get(health::version)),
    ]
}

/// Routes for a supervisor's probes, which carry no headers.
fn open() -> Vec<Route> {
    vec![
        ("/health", get(health::health)),
        ("/ready", get(health::ready)),
    ]
}

fn routed(routes: Vec<Route>) -> Router<App> {
    let add = |router: Router<App>, (path, methods)| router.route(path, methods);
    routes.into_iter().fold(Router::new(), add)
}

/// Every path, as the router has it.
#[cfg(test)]
pub(super) fn paths() -> Vec<&'static str> {
    let all = guarded().into_iter().chain(open());
    all.map(|(path, _)| path).collect()
}

/// Every route, ready to serve.
pub(super) fn routes(app: App) -> Router {
    let cors = cors(app.cors_origins());
    let guarded = routed(guarded())
        .fallback(|| async { ApiError::not_found("nothing is served at this address") })
        .method_not_allowed_fallback(|| async { ApiError::method() })
        .layer(middleware::from_fn_with_state(
            app.clone(),
            auth::require_key,
        ));
    let open = routed(open()).method_not_allowed_fallback(|| async { ApiError::method() });
    let mut routes = open.merge(guarded).with_state(app);
    if let Some(cors) = cors {
        routes = routes.layer(cors);
    }
    routes
        .layer(CatchPanicLayer::custom(|_| {
            ApiError::internal().into_response()
        }))
        .layer(middleware::from_fn(messages::translate))
        .layer(middleware::from_fn(identity::name_request))
        .layer(middleware::from_fn(span::trace))
}

/// Nothing is sent to pages of other sites unless it is said.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    let allowed: Vec<HeaderValue> = origins
        .iter()
        .filter_map(|origin| HeaderValue::from_str(origin).ok())
        .collect();
    if allowed.is_empty() {
        return None;
    }
    let allowed = if origins.iter().any(|origin| origin == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(allowed)
    };
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::POST, Method::DELETE])
            .allow_headers([
                header::AUTHORIZATION,
                header::CONTENT_TYPE,
                HeaderName::from_static("x-api-key"),
                HeaderName::from_static("x-request-id"),
                HeaderName::from_static("last-event-id"),
            ])
            .expose_headers([HeaderName::from_static("x-request-id")]),
    )
}
