//! `GET /api/v1/messages` and `GET /api/v1/messages/:partitionId/:transactionId` (`spec/admin.md` §5).

use std::borrow::Cow;

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Duration, DurationRound, Utc};
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;

use super::error::{ApiError, envelope};
use super::extract::Query;
use super::json::{instant, timestamp};
use super::state::AppState;
use super::status::paging;
use crate::broker::error::BrokerError;
use crate::broker::group::parse_timestamp;
use crate::broker::message_list::{ListedMessage, MessageDetail, MessageFilter, MessageStatus, PAGE_MAX, PlaceCursor};
use crate::ids::{IdSpace, QUEUE_MODE_GROUP};

const LIMIT_DEFAULT: i64 = 200;

/// A timestamp of the query; a bad one is a 400 that names it.
pub fn instant_of(query: &Query, key: &str) -> Result<Option<DateTime<Utc>>, ApiError> {
    let bad = |text: &str| ApiError::BadRequest(format!("{key} is no timestamp: {text:?}"));
    query.text(key).map(|text| parse_timestamp(text).ok_or_else(|| bad(text))).transpose()
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row<'a> {
    id: Option<String>,
    transaction_id: Option<&'a str>,
    txn_hash: String,
    partition_id: String,
    partition: &'a str,
    queue: &'a str,
    queue_path: String,
    namespace: &'a str,
    task: &'a str,
    status: &'static str,
    queue_status: &'static str,
    bus_status: BusStatus,
    trace_id: Option<&'a str>,
    producer_sub: Option<&'a str>,
    payload_available: bool,
    segment: Segment,
    created_at: String,
    lease_expires_at: Option<String>,
    data: Option<Cow<'a, RawValue>>,
    payload: Option<Cow<'a, RawValue>>,
    is_encrypted: bool,
    queue_priority: i32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BusStatus {
    consumed_by: usize,
    total_groups: usize,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Segment {
    seq: i64,
    frame_idx: i64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Mode {
    has_queue_mode: bool,
    bus_groups_count: usize,
    r#type: &'static str,
}

#[derive(Serialize)]
struct Page<'a> {
    messages: Vec<Row<'a>>,
    mode: Mode,
    total: usize,
}

impl<'a> Row<'a> {
    fn new(message: &'a ListedMessage, ids: IdSpace) -> Row<'a> {
        let (place, frame) = (&message.place, message.frame.as_ref());
        let named = message.cursors.iter().filter(|cursor| cursor.group != QUEUE_MODE_GROUP);
        let data = frame.and_then(|frame| raw_json(frame.payload.as_deref()?));
        Row {
            id: frame.map(|frame| frame.id.to_string()),
            transaction_id: frame.map(|frame| frame.transaction_id.as_str()),
            txn_hash: hex::encode(message.hash),
            partition_id: ids.partition(place.partition).to_string(),
            partition: &place.partition_name,
            queue: &place.queue_name,
            queue_path: format!("{}/{}", place.queue_name, place.partition_name),
            namespace: &place.namespace,
            task: &place.task,
            status: message.status.name(),
            queue_status: message.queue_status.name(),
            bus_status: BusStatus {
                consumed_by: named.clone().filter(|cursor| cursor.committed >= message.offset).count(),
                total_groups: named.count(),
            },
            trace_id: frame.and_then(|frame| frame.trace_id.as_deref()),
            producer_sub: frame.and_then(|frame| frame.producer_sub.as_deref()),
            payload_available: frame.is_some(),
            segment: Segment { seq: message.base.0, frame_idx: message.offset.0 - message.base.0 },
            created_at: timestamp(message.created_at),
            lease_expires_at: queue_lease(message),
            data: data.clone(),
            payload: data,
            is_encrypted: frame.is_some_and(|frame| frame.is_encrypted),
            queue_priority: place.priority,
        }
    }
}

/// The payload's own text. Pushes take only JSON, so only damage would make it something else.
fn raw_json(payload: &[u8]) -> Option<Cow<'_, RawValue>> {
    serde_json::from_slice::<&RawValue>(payload).ok().map(Cow::Borrowed)
}

fn queue_lease(message: &ListedMessage) -> Option<String> {
    let cursor = message.cursors.iter().find(|cursor| cursor.group == QUEUE_MODE_GROUP)?;
    cursor.lease_expires_at.map(instant)
}

fn mode<'a>(cursors: impl Iterator<Item = &'a PlaceCursor>) -> Mode {
    let groups: std::collections::BTreeSet<&str> = cursors.map(|cursor| cursor.group.as_str()).collect();
    let has_queue_mode = groups.contains(QUEUE_MODE_GROUP);
    let bus_groups_count = groups.len() - usize::from(has_queue_mode);
    let r#type = match (has_queue_mode, bus_groups_count) {
        (true, 0) => "queue",
        (true, _) => "hybrid",
        (false, 0) => "none",
        (false, _) => "bus",
    };
    Mode { has_queue_mode, bus_groups_count, r#type }
}

/// `GET /api/v1/messages`.
pub async fn list(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let (limit, offset) = paging(&query, LIMIT_DEFAULT, PAGE_MAX as i64)?;
    let name = |key| Ok::<_, ApiError>(query.name(key)?.map(str::to_owned));
    let now = Utc::now();
    let to = instant_of(&query, "to")?.unwrap_or(now);
    let minute = to.duration_trunc(Duration::minutes(1)).unwrap_or(to);
    let (status, knows_status) = match query.text("status") {
        None => (None, true),
        Some(text) => (MessageStatus::of_name(text), MessageStatus::of_name(text).is_some()),
    };
    let filter = MessageFilter {
        queue: name("queue")?,
        partition: name("partition")?,
        namespace: name("namespace")?.or(name("ns")?),
        task: name("task")?,
        status,
        from: instant_of(&query, "from")?.unwrap_or(now - Duration::hours(1)),
        to: minute.checked_add_signed(Duration::minutes(1)).unwrap_or(minute),
        limit: usize::try_from(limit).unwrap_or(0),
        offset: usize::try_from(offset).unwrap_or(usize::MAX),
    };
    let broker = state.broker()?;
    let messages = if knows_status { broker.list_messages(&filter).await? } else { Vec::new() };
    let ids = broker.ids();
    let rows: Vec<Row<'_>> = messages.iter().map(|message| Row::new(message, ids)).collect();
    let page = Page { total: rows.len(), messages: rows, mode: mode(messages.iter().flat_map(|m| m.cursors.iter())) };
    Ok(Json(page).into_response())
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Detail<'a> {
    #[serde(flatten)]
    row: Row<'a>,
    retry_count: i32,
    error_message: Option<&'a str>,
    queue_config: serde_json::Value,
    consumer_groups: Vec<serde_json::Value>,
    mode: Mode,
}

/// `GET /api/v1/messages/:partitionId/:transactionId`.
pub async fn detail(
    State(state): State<AppState>,
    Path((partition, transaction)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    let broker = state.broker()?;
    let found = match broker.message(&partition, &transaction).await {
        Err(BrokerError::Failed(text)) if text == "frame decode failed" => {
            return Ok(envelope(StatusCode::INTERNAL_SERVER_ERROR, &text));
        }
        other => other?,
    };
    let Some(MessageDetail { message, queue, dead }) = found else {
        return Ok(envelope(StatusCode::NOT_FOUND, "Message not found"));
    };
    let options = &queue.options;
    let groups = message.cursors.iter().map(|cursor| {
        json!({
            "name": cursor.group,
            "group": cursor.group,
            "consumed": cursor.committed >= message.offset,
            "leaseExpiresAt": cursor.lease_expires_at.map(instant),
        })
    });
    let body = Detail {
        row: Row::new(&message, broker.ids()),
        retry_count: dead.as_ref().map_or(0, |(count, _)| *count),
        error_message: dead.as_ref().map(|(_, reason)| reason.as_str()),
        queue_config: json!({
            "leaseTime": options.lease_time,
            "retryLimit": options.retry_limit,
            "retryDelay": options.retry_delay,
            "ttl": options.ttl,
            "priority": options.priority,
        }),
        consumer_groups: groups.collect(),
        mode: mode(message.cursors.iter()),
    };
    let bytes = serde_json::to_vec(&body).map_err(|error| BrokerError::Failed(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], bytes).into_response())
}
