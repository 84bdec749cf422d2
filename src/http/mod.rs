//! Decode, call the broker, encode. No pool, no SQL, no policy.

pub mod ack;
pub mod analytics;
pub mod changed_partitions;
pub mod dlq;
pub mod entry;
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
pub mod parameters;
pub mod pop;
pub mod push;
pub mod queue;
pub mod resources;
pub mod resting;
pub mod retention;
pub mod routes;
pub mod server;
pub mod shapes;
pub mod state;
pub mod status;
pub mod system_metrics;
pub mod traced;
pub mod traces;
pub mod transaction;
pub mod window;
pub mod workload;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use tower::ServiceBuilder;

use crate::spans;
use entry::Entry;
use error::no_such_route;
use state::AppState;

/// The routes of [`routes::ROUTES`] behind what every request passes.
pub fn router(state: AppState) -> Router {
    let body_bytes_max = state.body_bytes_max;
    let entry = ServiceBuilder::new().layer(Entry { body_bytes_max }).layer(DefaultBodyLimit::max(body_bytes_max));
    let router = routes::built().fallback(no_such_route).method_not_allowed_fallback(no_such_route).layer(entry);
    // Without traces there is no layer to pass.
    let router = if spans::is_on() { router.layer(middleware::from_fn(traced::trace)) } else { router };
    router.with_state(state)
}
