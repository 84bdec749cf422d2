//! State among brokers, and the wake-up from outside (`spec/admin.md` §13.5, §13.6).

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::check_name;
use super::state::AppState;
use crate::broker::maintenance::Mode;

#[derive(Deserialize)]
struct Notification {
    #[serde(default)]
    queue: String,
    #[serde(default)]
    partition: Option<String>,
}

/// `POST /internal/api/notify`.
pub async fn notify(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    let body: Notification = serde_json::from_slice(&body).map_err(ApiError::bad_body)?;
    if body.queue.is_empty() {
        return Err(ApiError::BadRequest("queue is required".into()));
    }
    let partition = body.partition.as_deref().filter(|name| !name.is_empty());
    check_name("queue", &body.queue)?;
    partition.map_or(Ok(()), |name| check_name("partition", name))?;
    state.broker()?.notify(&body.queue, partition).await?;
    Ok(Json(json!({"status": "ok"})).into_response())
}

/// `GET /api/v1/system/shared-state`.
pub async fn shared_state(State(state): State<AppState>) -> Response {
    Json(with_modes(&state, json!({"enabled": false, "reason": "single_node_segments_broker"}))).into_response()
}

/// `GET /internal/api/shared-state/stats` and its alias.
pub async fn peers(State(state): State<AppState>) -> Result<Response, ApiError> {
    let broker = state.broker()?;
    let rows = broker.peer_rows().await?;
    let alive = rows.iter().filter(|row| row.is_alive).count();
    if alive == 0 {
        return Ok(Json(with_modes(&state, json!({"enabled": false, "reason": "no_peers"}))).into_response());
    }
    let peers: Vec<Value> = rows
        .iter()
        .map(|row| json!({"host": row.name, "port": 0, "connected": row.is_alive, "resolved": true, "resolved_ip": null}))
        .collect();
    Ok(Json(with_modes(
        &state,
        json!({
            "enabled": true,
            "running": true,
            "server_id": broker.name(),
            "transport": "postgres",
            "port": 0,
            "peer_count": rows.len(),
            "peers": peers,
            "servers_alive": alive,
            "servers_dead": rows.len() - alive,
            "eph_members": 0,
            "signature_failures": 0,
            "handshake_failures": 0,
            "sequence_rejections": 0,
        }),
    ))
    .into_response())
}

fn with_modes(state: &AppState, mut body: Value) -> Value {
    body["maintenance_mode"] = state.spool.maintenance().into();
    let pops = state.broker.get().is_some_and(|broker| broker.maintenance().is_on(Mode::Pop));
    body["pop_maintenance_mode"] = pops.into();
    body
}
