//! Spans of requests on the message path (`spans.rs`).

use axum::extract::{MatchedPath, Request};
use axum::middleware::Next;
use axum::response::Response;
use opentelemetry_http::HeaderExtractor;

use crate::metrics::{OTHER, TIMED_ROUTES};
use crate::spans;

/// A layer of the router while traces are on.
pub async fn trace(request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let Some(route) = route.as_ref().map(MatchedPath::as_str).filter(|route| is_traced(route)) else {
        return next.run(request).await;
    };
    let span = spans::request(request.method().as_str(), route, &HeaderExtractor(request.headers()));
    let Some(span) = span else { return next.run(request).await };
    let response = span.around(next.run(request)).await;
    span.answered(response.status().as_u16());
    response
}

fn is_traced(route: &str) -> bool {
    route != OTHER && TIMED_ROUTES.contains(&route)
}
