//! Decode, call the broker, encode. No pool, no SQL, no policy.

pub mod ack;
pub mod analytics;
pub mod changed_partitions;
pub mod dlq;
pub mod error;
pub mod extract;
pub mod group_listings;
pub mod groups;
pub mod health;
pub mod internal;
pub mod json;
pub mod lease;
pub mod maintenance;
pub mod messages;
pub mod meter;
pub mod metrics;
pub mod openapi;
pub mod pop;
pub mod push;
pub mod queue;
pub mod resources;
pub mod resting;
pub mod retention;
pub mod routes;
pub mod server;
pub mod state;
pub mod status;
pub mod system_metrics;
pub mod traced;
pub mod traces;
pub mod transaction;
pub mod window;
pub mod workload;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};

use crate::spans;
use error::{envelope, no_such_route};
use state::AppState;

/// The routes of [`routes::ROUTES`] behind what every request passes.
pub fn router(state: AppState) -> Router {
    let router = routes::built()
        .fallback(no_such_route)
        .method_not_allowed_fallback(no_such_route)
        .layer(DefaultBodyLimit::max(state.body_bytes_max))
        .layer(middleware::from_fn_with_state(state.clone(), check_request))
        .layer(middleware::from_fn(meter::measure));
    // Without traces there is no layer to pass.
    let router = if spans::is_on() { router.layer(middleware::from_fn(traced::trace)) } else { router };
    router.with_state(state)
}

/// What is refused before any handler: announced bodies over the limit (413, plain text) and broken percent escapes.
async fn check_request(State(state): State<AppState>, request: Request, next: Next) -> Response {
    let announced = request.headers().get(header::CONTENT_LENGTH);
    let announced = announced.and_then(|value| value.to_str().ok()).and_then(|text| text.parse::<u64>().ok());
    if announced.is_some_and(|bytes| bytes > state.body_bytes_max as u64) {
        return (StatusCode::PAYLOAD_TOO_LARGE, [(header::CONNECTION, "close")], "request body too large")
            .into_response();
    }
    if !extract::escapes_are_whole(request.uri().path()) {
        return envelope(StatusCode::BAD_REQUEST, "broken percent escape in the path");
    }
    next.run(request).await
}
