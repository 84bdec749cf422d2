//! The metrics of this process: as JSON (`spec/admin.md` §13.2) and as Prometheus exposition (§14).

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::meter;
use super::state::AppState;
use crate::broker::Figures;
use crate::metrics as names;
use crate::process::{self, Usage};

/// `GET /metrics`.
pub async fn json(State(state): State<AppState>) -> Response {
    let figures = state.broker.get().map(crate::broker::Broker::figures).unwrap_or_default();
    Json(summary(process::uptime(), meter::requests().0, &figures, &process::usage())).into_response()
}

/// The keys are the documented ones; those that only Node.js could fill stay 0. Rates are means since the start.
fn summary(uptime: Duration, requests: u64, figures: &Figures, usage: &Usage) -> Value {
    let seconds = uptime.as_secs_f64().max(0.001);
    let rate = |total: u64| (total as f64 / seconds * 100.0).round() / 100.0;
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    json!({
        "uptime": uptime.as_secs(),
        "requests": {"total": requests, "rate": rate(requests)},
        "messages": {"total": figures.pushed, "rate": rate(figures.pushed)},
        "database": {
            "poolSize": figures.connections,
            "idleConnections": figures.connections_idle,
            "waitingRequests": figures.pops_waiting,
        },
        "memory": {"rss": usage.resident_bytes, "heapTotal": 0, "heapUsed": 0, "external": 0, "arrayBuffers": 0},
        "cpu": {"user": micros(usage.cpu_user), "system": micros(usage.cpu_system)},
    })
}

/// `GET /metrics/prometheus`. Gauges are sampled here, so they cannot drift.
pub async fn prometheus(State(state): State<AppState>) -> Response {
    process::sample();
    metrics::gauge!(names::HTTP_INFLIGHT).set(meter::requests().1 as f64);
    let mut per_queue = String::new();
    if let Some(broker) = state.broker.get() {
        broker.figures().show();
        per_queue = broker.watched_queues_exposition();
    }
    let headers =
        [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    (headers, state.metrics.render() + &per_queue).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_keys_are_there() {
        let figures = Figures { pushed: 50, connections: 3, connections_idle: 2, ..Figures::default() };
        let usage = Usage { cpu_user: Duration::from_millis(7), resident_bytes: 4096, ..Usage::default() };
        let told = summary(Duration::from_secs(20), 10, &figures, &usage);
        assert_eq!(
            told,
            json!({
                "uptime": 20,
                "requests": {"total": 10, "rate": 0.5},
                "messages": {"total": 50, "rate": 2.5},
                "database": {"poolSize": 3, "idleConnections": 2, "waitingRequests": 0},
                "memory": {"rss": 4096, "heapTotal": 0, "heapUsed": 0, "external": 0, "arrayBuffers": 0},
                "cpu": {"user": 7000, "system": 0},
            })
        );
    }
}
