//! Liveness and readiness (`spec/admin.md` §13.1).

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::error::ApiError;
use super::state::AppState;

/// What clients of this protocol know the engine as.
const ENGINE: &str = "segments-rust";

/// `GET /health`: a real database round trip. For readiness; without a database the process still lives.
pub async fn health(State(state): State<AppState>) -> Response {
    let (status, word, database) = match ping(&state).await {
        Ok(()) => (StatusCode::OK, "healthy", "connected"),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, "unhealthy", "disconnected"),
    };
    let body = json!({"status": word, "database": database, "engine": ENGINE, "version": env!("CARGO_PKG_VERSION")});
    (status, Json(body)).into_response()
}

async fn ping(state: &AppState) -> Result<(), ApiError> {
    Ok(state.broker()?.ping().await?)
}

/// `GET /status`: the process lives; no database.
pub async fn status() -> Response {
    Json(json!({"status": "ok", "engine": ENGINE})).into_response()
}
