//! Dead letters (`spec/admin.md` §5.3, §6): list, delete, replay, purge.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::error::ApiError;
use super::extract::{Query, check_name, object};
use super::json;
use super::maintenance;
use super::state::AppState;
use super::status::paging;
use crate::broker::Broker;
use crate::broker::dead_letters::{
    Destination, LIST_ROWS_MAX, ListRequest, ListedLetter, ReplayError, Replayed, Wanted,
};

const LIST_ROWS_DEFAULT: i64 = 100;
const ONLY_DEAD_LETTERS: &str = "no dead letter at this address; only dead letters can be deleted or replayed";

/// `GET /api/v1/dlq`.
pub async fn list(State(state): State<AppState>, RawQuery(query): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let (limit, offset) = paging(&query, LIST_ROWS_DEFAULT, LIST_ROWS_MAX)?;
    let request = ListRequest {
        queue: query.name("queue")?.map(str::to_owned),
        group: query.name("consumerGroup")?.map(str::to_owned),
        limit,
        offset,
    };
    let broker = state.broker()?;
    let rows = broker.dead_letters().list(&request).await?;
    let mut out = Vec::with_capacity(256 + rows.iter().map(|row| row.data.len() + 512).sum::<usize>());
    out.extend_from_slice(b"{\"messages\":[");
    for (nth, row) in rows.iter().enumerate() {
        if nth > 0 {
            out.push(b',');
        }
        render_row(&mut out, broker, row);
    }
    out.extend_from_slice(b"],\"pagination\":{\"limit\":");
    json::integer(&mut out, request.limit);
    out.extend_from_slice(b",\"offset\":");
    json::integer(&mut out, request.offset);
    out.extend_from_slice(b"},\"total\":");
    json::integer(&mut out, rows.len() as i64);
    out.push(b'}');
    Ok(([(header::CONTENT_TYPE, "application/json")], out).into_response())
}

fn render_row(out: &mut Vec<u8>, broker: &Broker, row: &ListedLetter) {
    let mut text = |key: &str, value: &str| {
        out.extend_from_slice(key.as_bytes());
        json::string(out, value);
    };
    let filed = json::instant(row.failed_at);
    text("{\"id\":", &row.id.to_string());
    text(",\"transactionId\":", &row.transaction_id);
    text(",\"partitionId\":", &broker.ids().partition(row.partition).to_string());
    text(",\"queue\":", &row.queue_name);
    text(",\"partition\":", &row.partition_name);
    text(",\"consumerGroup\":", &row.group_name);
    text(",\"errorMessage\":", &row.reason);
    text(",\"createdAt\":", &filed);
    text(",\"failedAt\":", &filed);
    out.extend_from_slice(b",\"retryCount\":");
    json::integer(out, i64::from(row.retry_count));
    out.extend_from_slice(b",\"producerSub\":null,\"data\":");
    out.extend_from_slice(if row.data.is_empty() { b"null" } else { &row.data });
    if row.was_encrypted {
        out.extend_from_slice(b",\"isEncrypted\":true");
    }
    out.push(b'}');
}

/// `DELETE /api/v1/dlq`.
pub async fn purge(State(state): State<AppState>, RawQuery(query): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let queue = query.name("queue")?.ok_or_else(|| ApiError::BadRequest("queue is required".to_owned()))?;
    let group = query.name("consumerGroup")?;
    let deleted = state.broker()?.dead_letters().purge(queue, group).await?;
    Ok(Json(json!({"success": true, "deleted": deleted, "queue": queue, "consumerGroup": group})).into_response())
}

/// `DELETE /api/v1/messages/:partitionId/:transactionId`: its dead letters, never the live message.
pub async fn delete(
    State(state): State<AppState>,
    Path((partition, transaction)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    if !state.broker()?.dead_letters().delete(&partition, &transaction).await? {
        return Ok(not_at_address(&partition, &transaction));
    }
    let body = json!({"success": true, "partitionId": partition, "transactionId": transaction,
                      "message": "Message deleted successfully"});
    Ok(Json(body).into_response())
}

/// `POST /api/v1/messages/:partitionId/:transactionId/retry`. The body counts for nothing.
pub async fn retry(
    State(state): State<AppState>,
    Path((partition, transaction)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    if state.spool.maintenance() {
        return Ok(maintenance::no_replay());
    }
    let wanted = Wanted::Message(partition.clone(), transaction.clone());
    match state.broker()?.dead_letters().replay(&wanted, &Destination::default()).await {
        Err(ReplayError::Gone) => Ok(not_at_address(&partition, &transaction)),
        Err(error @ ReplayError::Lookup(_)) => {
            Ok((StatusCode::INTERNAL_SERVER_ERROR, Json(json!({"error": error.to_string()}))).into_response())
        }
        other => answer(other),
    }
}

/// `POST /api/v1/dlq/:id/replay`.
pub async fn replay(State(state): State<AppState>, Path(id): Path<String>, body: Bytes) -> Result<Response, ApiError> {
    let to = destination_of(&body)?;
    if state.spool.maintenance() {
        return Ok(maintenance::no_replay());
    }
    let answered = match state.broker()?.dead_letters().replay(&Wanted::Id(id.clone()), &to).await {
        Err(error @ ReplayError::Gone) => {
            let body = json!({"success": false, "result": "gone", "dlqId": id, "error": error.to_string(),
                              "message": "no dead letter with this id; it may have been replayed or deleted"});
            return Ok((StatusCode::NOT_FOUND, Json(body)).into_response());
        }
        other => answer(other)?,
    };
    Ok(answered)
}

fn destination_of(body: &[u8]) -> Result<Destination, ApiError> {
    let body = object(body)?;
    Ok(Destination { queue: name_of(&body, "queue")?, partition: name_of(&body, "partition")? })
}

fn name_of(body: &Map<String, Value>, key: &str) -> Result<Option<String>, ApiError> {
    let name = match body.get(key) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(name)) => name.trim(),
        Some(_) => return Err(ApiError::BadRequest(format!("{key} must be a string"))),
    };
    if name.is_empty() {
        return Err(ApiError::BadRequest(format!("{key} must not be blank")));
    }
    check_name(key, name)?;
    Ok(Some(name.to_owned()))
}

fn answer(replayed: Result<Replayed, ReplayError>) -> Result<Response, ApiError> {
    let replayed = match replayed {
        Ok(replayed) => replayed,
        Err(ReplayError::Broker(error)) => return Err(error.into()),
        Err(error) => return Ok(refusal(&error)),
    };
    let moved = replayed.message_id.is_some();
    let status = if moved { "queued" } else { "duplicate" };
    Ok(Json(json!({
        "success": true,
        "result": if moved { "moved" } else { "duplicate" },
        "queue": replayed.queue,
        "partition": replayed.partition,
        "consumerGroup": replayed.group_name,
        "dlqId": replayed.letter,
        "originalTransactionId": replayed.original_transaction_id,
        "replayedAs": {
            "index": 0,
            "message_id": replayed.message_id.unwrap_or_else(Uuid::nil),
            "transaction_id": replayed.transaction_id,
            "queueName": replayed.queue,
            "status": status,
            "offset": replayed.offset.0,
        },
        "dlqRowRemoved": moved,
    }))
    .into_response())
}

/// `dlqRowRemoved` is null when nobody knows: clients warn on exactly that.
fn refusal(error: &ReplayError) -> Response {
    let mut body = json!({"success": false, "dlqRowRemoved": false, "error": error.to_string()});
    let status = match error {
        ReplayError::Timer => {
            body["result"] = "timer".into();
            StatusCode::CONFLICT
        }
        ReplayError::Unknown(_) => {
            body["dlqRowRemoved"] = Value::Null;
            StatusCode::INTERNAL_SERVER_ERROR
        }
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    tracing::warn!(%error, "a dead letter was not replayed");
    (status, Json(body)).into_response()
}

fn not_at_address(partition: &str, transaction: &str) -> Response {
    let body = json!({"success": false, "partitionId": partition, "transactionId": transaction,
                      "error": "Message not found", "message": ONLY_DEAD_LETTERS});
    (StatusCode::NOT_FOUND, Json(body)).into_response()
}
