//! `/api/v1/traces…` (`spec/admin.md` §12). Written in camelCase, read in snake_case.

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use uuid::Uuid;

use super::error::ApiError;
use super::extract::{Query, check_name};
use super::json::instant;
use super::state::AppState;
use super::status::paging;
use crate::broker::traces::{TraceEvent, TraceRow};
use crate::ids::QUEUE_MODE_GROUP;

const LIMIT_DEFAULT: i64 = 100;
const NAMES_LIMIT_DEFAULT: i64 = 50;
const LIMIT_MAX: i64 = 1_000;
/// Names of one trace.
const NAMES_MAX: usize = 64;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    #[serde(default)]
    transaction_id: Option<String>,
    #[serde(default)]
    partition_id: Option<String>,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
    #[serde(default)]
    consumer_group: Option<String>,
    #[serde(default)]
    event_type: Option<String>,
    #[serde(default)]
    trace_names: Value,
}

/// `POST /api/v1/traces`.
pub async fn record(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    let body: Body<'_> = serde_json::from_slice(&body).map_err(ApiError::bad_body)?;
    let refuse = |text: &str| ApiError::BadRequest(text.to_owned());
    let given = |text: Option<String>| text.filter(|text| !text.is_empty());
    let (Some(transaction_id), Some(partition)) = (given(body.transaction_id), given(body.partition_id)) else {
        return Err(refuse("transactionId and partitionId are required"));
    };
    let data = body.data.ok_or_else(|| refuse("data is required"))?;
    let partition: Uuid =
        partition.parse().map_err(|_| ApiError::BadRequest(format!("partitionId is no UUID: {partition:?}")))?;
    check_name("transactionId", &transaction_id)?;
    let group = body.consumer_group.unwrap_or_else(|| QUEUE_MODE_GROUP.to_owned());
    let event_type = body.event_type.unwrap_or_else(|| "info".to_owned());
    check_name("consumerGroup", &group)?;
    check_name("eventType", &event_type)?;
    let names = match body.trace_names {
        Value::String(name) => vec![name],
        Value::Array(names) => names.into_iter().filter_map(|n| n.as_str().map(str::to_owned)).collect(),
        _ => Vec::new(),
    };
    if names.len() > NAMES_MAX {
        return Err(ApiError::BadRequest(format!("traceNames: at most {NAMES_MAX}, got {}", names.len())));
    }
    names.iter().try_for_each(|name| check_name("traceNames", name))?;
    let event = TraceEvent { partition, transaction_id, group, event_type, data: data.get().to_owned(), names };
    let id = state.broker()?.record_trace(event).await?;
    Ok((StatusCode::CREATED, Json(json!({"success": true, "traceId": id}))).into_response())
}

#[derive(Serialize)]
struct Row<'a> {
    id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    transaction_id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition_id: Option<Uuid>,
    #[serde(skip_serializing_if = "Option::is_none")]
    queue_name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    partition_name: Option<&'a str>,
    event_type: &'a str,
    data: Option<&'a RawValue>,
    consumer_group: &'a str,
    worker_id: &'a str,
    created_at: String,
    trace_names: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    message_payload: Option<()>,
}

impl<'a> Row<'a> {
    fn new(trace: &'a TraceRow) -> Row<'a> {
        Row {
            id: trace.id,
            transaction_id: None,
            partition_id: None,
            queue_name: None,
            partition_name: None,
            event_type: &trace.event_type,
            data: serde_json::from_str(&trace.data).ok(),
            consumer_group: &trace.group,
            worker_id: &trace.worker,
            created_at: instant(trace.created_at),
            trace_names: &trace.names,
            message_payload: None,
        }
    }

    /// With the address: a listing by name crosses messages.
    fn addressed(trace: &'a TraceRow) -> Row<'a> {
        let place = trace.place.as_ref();
        Row {
            transaction_id: Some(&trace.transaction_id),
            partition_id: Some(trace.partition),
            queue_name: place.map(|(queue, _)| queue.as_str()),
            partition_name: place.map(|(_, partition)| partition.as_str()),
            message_payload: Some(()),
            ..Row::new(trace)
        }
    }
}

/// `GET /api/v1/traces/:partitionId/:transactionId`.
pub async fn of_message(
    State(state): State<AppState>,
    Path((partition, transaction)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let traces = match partition.parse() {
        Ok(partition) if !transaction.contains('\0') => state.broker()?.traces_of(partition, &transaction).await?,
        _ => Vec::new(),
    };
    let rows: Vec<Row<'_>> = traces.iter().map(Row::new).collect();
    Ok(Json(Traces { traces: rows }).into_response())
}

#[derive(Serialize)]
struct Traces<'a> {
    traces: Vec<Row<'a>>,
}

#[derive(Serialize)]
struct TracePage<'a> {
    traces: Vec<Row<'a>>,
    total: i64,
    pagination: Pagination,
}

#[derive(Serialize)]
struct Pagination {
    limit: i64,
    offset: i64,
}

/// `GET /api/v1/traces/by-name/:traceName`.
pub async fn by_name(
    State(state): State<AppState>,
    Path(name): Path<String>,
    RawQuery(raw): RawQuery,
) -> Result<Response, ApiError> {
    check_name("traceName", &name)?;
    let (limit, offset) = paging(&Query::parse(raw.as_deref())?, LIMIT_DEFAULT, LIMIT_MAX)?;
    let (traces, total) = state.broker()?.traces_named(&name, limit, offset).await?;
    let rows = traces.iter().map(Row::addressed).collect();
    Ok(Json(TracePage { traces: rows, total, pagination: Pagination { limit, offset } }).into_response())
}

/// `GET /api/v1/traces/names`.
pub async fn names(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let (limit, offset) = paging(&Query::parse(raw.as_deref())?, NAMES_LIMIT_DEFAULT, LIMIT_MAX)?;
    let (names, total) = state.broker()?.trace_names(limit, offset).await?;
    let rows: Vec<Value> = names
        .into_iter()
        .map(|name| {
            json!({
                "trace_name": name.name,
                "trace_count": name.traces,
                "message_count": name.messages,
                "last_seen": instant(name.last_seen),
            })
        })
        .collect();
    Ok(Json(json!({"trace_names": rows, "total": total, "pagination": {"limit": limit, "offset": offset}}))
        .into_response())
}
