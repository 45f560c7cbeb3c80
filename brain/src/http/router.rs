//! The routes, and what all of them share.

use axum::{
    Router,
    http::{HeaderName, HeaderValue, Method, header},
    middleware,
    response::IntoResponse as _,
    routing::{get, post},
};
use tower_http::{
    catch_panic::CatchPanicLayer,
    cors::{AllowOrigin, CorsLayer},
};

use super::{
    app::App, auth, chat, completions, error::ApiError, health, identity, messages, metrics,
    models, responses, runs, tokenize,
};

/// Every route, ready to serve.
pub(super) fn routes(app: App) -> Router {
    let cors = cors(app.cors_origins());
    let guarded = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route(
            "/v1/responses/{id}",
            get(responses::read).delete(responses::delete),
        )
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/v1/runs", get(runs::list))
        .route("/v1/runs/{*id}", get(runs::one))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/metrics", get(metrics::show))
        .route("/version", get(health::version))
        .fallback(|| async { ApiError::not_found("nothing is served at this address") })
        .method_not_allowed_fallback(|| async { ApiError::method() })
        .layer(middleware::from_fn_with_state(
            app.clone(),
            auth::require_key,
        ));
    // A supervisor's probes carry no headers.
    let open = Router::new()
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .method_not_allowed_fallback(|| async { ApiError::method() });
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
