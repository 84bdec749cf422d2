//! `POST /api/v1/configure` (`spec/push-pop.md` §5) and `DELETE /api/v1/resources/queues/:queue` (`spec/admin.md` §4.5).

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::extract::check_name;
use super::state::AppState;
use crate::broker::configure::{self, ConfigureError, ConfigureRequest};

/// Creates a queue or rewrites its options; answers what is stored now.
pub async fn configure(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    let body: Map<String, Value> = serde_json::from_slice(&body).map_err(ApiError::bad_body)?;
    let request = match ConfigureRequest::parse(body) {
        Ok(request) => request,
        Err(error) => {
            let mut body = json!({"error": error.to_string()});
            if let ConfigureError::Option { name, .. } = error {
                body["invalid"] = name.into();
            }
            return Ok((StatusCode::BAD_REQUEST, Json(body)).into_response());
        }
    };
    check_name("queue", &request.queue)?;
    let queue = state.broker()?.configure(&request).await?;
    Ok(Json(json!({
        "configured": true,
        "queueId": state.broker()?.ids().queue(queue.id),
        "partitionId": null,
        "queue": queue.name,
        "namespace": queue.options.namespace,
        "task": queue.options.task,
        "storage": "segments",
        "options": configure::echo(&queue),
    }))
    .into_response())
}

/// Removes a queue and everything keyed to it. An unknown queue is no error: clients delete before they create.
pub async fn delete(State(state): State<AppState>, Path(queue): Path<String>) -> Result<Response, ApiError> {
    check_name("queue", &queue)?;
    let body = if state.broker()?.delete_queue(&queue).await? {
        json!({"deleted": true, "queue": queue, "existed": true})
    } else {
        json!({"deleted": false, "queue": queue, "existed": false,
               "message": "Queue not found, nothing was deleted"})
    };
    Ok(Json(body).into_response())
}
