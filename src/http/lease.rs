//! `POST /api/v1/lease/:leaseId/extend` (`spec/push-pop.md` §8).

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::ApiError;
use super::json::timestamp;
use super::state::AppState;

const SECONDS_DEFAULT: i64 = 60;

/// Extends every live row of the lease. Any body is accepted; only an integer `seconds` counts.
pub async fn extend(
    State(state): State<AppState>,
    Path(lease): Path<String>,
    body: Bytes,
) -> Result<Response, ApiError> {
    let seconds = serde_json::from_slice::<Value>(&body)
        .ok()
        .and_then(|body| body.get("seconds").and_then(Value::as_i64))
        .unwrap_or(SECONDS_DEFAULT);
    let extension = state.broker()?.extend_lease(&lease, seconds).await?;
    let expires_at = extension.expires_at.map(timestamp);
    Ok(Json(json!({
        "leaseId": lease,
        "success": extension.renewed > 0,
        "renewed": extension.renewed,
        "newExpiresAt": expires_at,
        "expiresAt": expires_at,
        "lease_expires_at": expires_at,
    }))
    .into_response())
}
