//! Consumer groups, the operator's side (`spec/admin.md` §7.4 to §7.6): subscription, seek, delete.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::extract::{Query, check_name, object};
use super::json::instant;
use super::state::AppState;
use crate::broker::group_admin::SeekTo;

/// `POST /api/v1/consumer-groups/:group/subscription`.
pub async fn subscription(
    State(state): State<AppState>,
    Path(group): Path<String>,
    body: Bytes,
) -> Result<Response, ApiError> {
    check_name("group", &group)?;
    let body = object(&body)?;
    let missing = || ApiError::BadRequest("subscriptionTimestamp is required".to_owned());
    let text = text_of(&body, "subscriptionTimestamp")?.ok_or_else(missing)?;
    let admin = state.broker()?.group_admin();
    let at = admin.timestamp("subscriptionTimestamp", text).await?;
    let rows = admin.move_subscription(&group, at).await?;
    Ok(Json(json!({"success": true, "consumerGroup": group, "newTimestamp": text, "rowsUpdated": rows}))
        .into_response())
}

/// `POST /api/v1/consumer-groups/:group/queues/:queue/seek`.
pub async fn seek_queue(
    State(state): State<AppState>,
    Path((group, queue)): Path<(String, String)>,
    body: Bytes,
) -> Result<Response, ApiError> {
    check_name("group", &group)?;
    check_name("queue", &queue)?;
    let nowhere = || ApiError::BadRequest("Must specify toEnd=true or a timestamp".to_owned());
    let to = destination(&state, &body).await?.ok_or_else(nowhere)?;
    let Some(partitions) = state.broker()?.group_admin().seek(&group, &queue, None, to).await? else {
        let body = json!({"success": false, "error": "Queue not found or has no partitions", "consumerGroup": group,
                          "queueName": queue, "partitionsUpdated": 0});
        return Ok((StatusCode::NOT_FOUND, Json(body)).into_response());
    };
    let (to_end, target) = echo(to);
    Ok(Json(json!({"success": true, "consumerGroup": group, "queueName": queue, "seekToEnd": to_end,
                   "targetTimestamp": target, "partitionsUpdated": partitions}))
    .into_response())
}

/// `POST /api/v1/consumer-groups/:group/queues/:queue/partitions/:partition/seek`. No destination means the end: the Go
/// client sends `{}` for it.
pub async fn seek_partition(
    State(state): State<AppState>,
    Path((group, queue, partition)): Path<(String, String, String)>,
    body: Bytes,
) -> Result<Response, ApiError> {
    check_name("group", &group)?;
    check_name("queue", &queue)?;
    check_name("partition", &partition)?;
    let to = destination(&state, &body).await?.unwrap_or(SeekTo::End);
    let sought = state.broker()?.group_admin().seek(&group, &queue, Some(&partition), to).await?;
    if sought.is_none() {
        let body = json!({"success": false, "error": "Partition not found"});
        return Ok((StatusCode::NOT_FOUND, Json(body)).into_response());
    }
    let (to_end, target) = echo(to);
    Ok(Json(json!({"success": true, "consumerGroup": group, "queueName": queue, "partitionName": partition,
                   "seekToEnd": to_end, "targetTimestamp": target, "updated": true}))
    .into_response())
}

/// `DELETE /api/v1/consumer-groups/:group`.
pub async fn delete(
    State(state): State<AppState>,
    Path(group): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    delete_of(&state, &group, None, query.as_deref()).await
}

/// `DELETE /api/v1/consumer-groups/:group/queues/:queue`.
pub async fn delete_of_queue(
    State(state): State<AppState>,
    Path((group, queue)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    delete_of(&state, &group, Some(&queue), query.as_deref()).await
}

async fn delete_of(
    state: &AppState,
    group: &str,
    queue: Option<&str>,
    query: Option<&str>,
) -> Result<Response, ApiError> {
    check_name("group", group)?;
    if let Some(queue) = queue {
        check_name("queue", queue)?;
    }
    let registration = Query::parse(query)?.boolean("deleteMetadata")?.unwrap_or(true);
    let deleted = state.broker()?.group_admin().delete(group, queue, registration).await?;
    let mut body = json!({"success": true, "consumerGroup": group, "deletedPartitions": deleted,
                          "metadataDeleted": registration});
    if let Some(queue) = queue {
        body["queueName"] = queue.into();
    }
    Ok(Json(body).into_response())
}

/// Where a seek goes; `None` if the body names nothing. `toEnd: true` beats a timestamp.
async fn destination(state: &AppState, body: &[u8]) -> Result<Option<SeekTo>, ApiError> {
    let body = object(body)?;
    let to_end = match body.get("toEnd") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(to_end)) => *to_end,
        Some(_) => return Err(ApiError::BadRequest("toEnd must be a boolean".to_owned())),
    };
    match text_of(&body, "timestamp")? {
        _ if to_end => Ok(Some(SeekTo::End)),
        None => Ok(None),
        Some(text) => Ok(Some(SeekTo::Timestamp(state.broker()?.group_admin().timestamp("timestamp", text).await?))),
    }
}

/// `seekToEnd` and `targetTimestamp`.
fn echo(to: SeekTo) -> (bool, Option<String>) {
    match to {
        SeekTo::End => (true, None),
        SeekTo::Timestamp(at) => (false, Some(instant(at))),
    }
}

/// A text; the empty one counts as absent.
fn text_of<'a>(body: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>, ApiError> {
    match body.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.trim().is_empty())),
        Some(_) => Err(ApiError::BadRequest(format!("{key} must be a string"))),
    }
}
