//! Maintenance modes and the state of the disk spool (`spec/admin.md` §9.5, §13.3).

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::ApiError;
use super::state::AppState;
use crate::broker::maintenance::Mode;

/// `GET /api/v1/system/maintenance`: never an error; without a database the flags of this process.
pub async fn state(State(state): State<AppState>) -> Response {
    let (mut push, mut pop) = (state.spool.maintenance(), false);
    if let Some(broker) = state.broker.get() {
        if let Err(error) = broker.maintenance().refresh().await {
            tracing::debug!(%error, "maintenance modes could not be read");
        }
        (push, pop) = (broker.maintenance().is_on(Mode::Push), broker.maintenance().is_on(Mode::Pop));
    }
    let figures = state.spool.figures();
    Json(json!({
        "maintenanceMode": push,
        "popMaintenanceMode": pop,
        "bufferedMessages": figures.pending,
        "bufferHealthy": figures.db_healthy,
        "bufferStats": {
            "pendingCount": figures.pending,
            "failedCount": figures.failed,
            "dbHealthy": figures.db_healthy,
            "failedFiles": {
                "count": figures.failed_files,
                "totalBytes": figures.failed_bytes,
                "totalMB": (figures.failed_bytes as f64 / 1_048_576.0 * 100.0).round() / 100.0,
                "failoverCount": figures.failed_files,
                "qos0Count": 0,
            },
        },
    }))
    .into_response()
}

/// `POST /api/v1/system/maintenance`.
pub async fn switch(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    let on = enabled(&body)?;
    state.broker()?.maintenance().switch(Mode::Push, on).await;
    let figures = state.spool.figures();
    let message = if on {
        "Maintenance mode ENABLED. All PUSHes routing to file buffer."
    } else {
        "Maintenance mode DISABLED. Background processor will drain buffer to DB."
    };
    Ok(Json(json!({
        "maintenanceMode": on,
        "bufferedMessages": figures.pending,
        "bufferHealthy": figures.db_healthy,
        "message": message,
    }))
    .into_response())
}

/// `GET /api/v1/system/maintenance/pop`.
pub async fn pop_state(State(state): State<AppState>) -> Response {
    let on = state.broker.get().is_some_and(|broker| broker.maintenance().is_on(Mode::Pop));
    let message = if on {
        "Pop maintenance mode is ON. All POP operations return empty arrays."
    } else {
        "Pop maintenance mode is OFF. Normal operation."
    };
    Json(json!({ "popMaintenanceMode": on, "message": message })).into_response()
}

/// `POST /api/v1/system/maintenance/pop`.
pub async fn switch_pop(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    let on = enabled(&body)?;
    state.broker()?.maintenance().switch(Mode::Pop, on).await;
    let message = if on {
        "Pop maintenance mode ENABLED. All POP operations will return empty arrays."
    } else {
        "Pop maintenance mode DISABLED. Normal operation resumed."
    };
    Ok(Json(json!({ "popMaintenanceMode": on, "message": message })).into_response())
}

/// `GET /api/v1/status/buffers`.
pub async fn buffers(State(state): State<AppState>) -> Response {
    let figures = state.spool.figures();
    let reached = match state.broker.get() {
        Some(broker) => broker.ping().await.is_ok(),
        None => false,
    };
    Json(json!({
        "pending": figures.pending,
        "failed": figures.failed,
        "dbHealthy": figures.db_healthy && reached,
        "worker": 0,
    }))
    .into_response()
}

/// The answer of a replay under push maintenance: a move cannot be spooled (`spec/admin.md` §6.4).
pub fn no_replay() -> Response {
    let body = json!({"success": false, "result": "maintenance", "dlqRowRemoved": false,
                      "error": "push maintenance is on; a replay cannot be buffered"});
    (axum::http::StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
}

fn enabled(body: &[u8]) -> Result<bool, ApiError> {
    let wrong = || ApiError::BadRequest("enabled (boolean) is required".into());
    serde_json::from_slice::<Value>(body)
        .map_err(|_| wrong())?
        .get("enabled")
        .and_then(Value::as_bool)
        .ok_or_else(wrong)
}
