//! `/api/v1/status/…` and `POST /api/v1/stats/refresh` (`spec/admin.md` §9, §11).

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::{Query, check_name};
use super::json::instant;
use super::resources::{counts, queue_not_found};
use super::state::AppState;
use super::window::{label, range};
use crate::broker::inspection::{PartitionDetail, QueueDetail, QueueFilter, QueueSummary, Totals};
use crate::ids::IdSpace;

const LIMIT_DEFAULT: i64 = 100;
/// Most queues of one page.
const LIMIT_MAX: i64 = 10_000;

/// The exact filters that several routes share.
pub fn filter(query: &Query) -> Result<QueueFilter, ApiError> {
    let name = |key| Ok::<_, ApiError>(query.name(key)?.map(str::to_owned));
    Ok(QueueFilter { queue: name("queue")?, namespace: name("namespace")?, task: name("task")? })
}

/// `limit` and `offset`.
pub fn paging(query: &Query, default: i64, max: i64) -> Result<(i64, i64), ApiError> {
    let number = |key: &str, default: i64, max: i64| match query.text(key) {
        None => Ok(default),
        Some(_) => match query.integer(key)? {
            Some(n) if n < 0 => Err(ApiError::BadRequest(format!("{key} must not be negative, got {n}"))),
            Some(n) => Ok(n.min(max)),
            None => Ok(default),
        },
    };
    Ok((number("limit", default, max)?, number("offset", 0, i64::MAX)?))
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct QueueRow {
    id: String,
    name: String,
    namespace: String,
    task: String,
    created_at: String,
    partitions: i64,
    messages: Counts,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Counts {
    total: i64,
    pending: i64,
    processing: i64,
    completed: i64,
    dead_letter: i64,
}

impl QueueRow {
    fn new(queue: QueueSummary, ids: IdSpace) -> QueueRow {
        let totals = Totals::from(&queue);
        QueueRow {
            id: ids.queue(queue.id).to_string(),
            name: queue.name,
            namespace: queue.namespace,
            task: queue.task,
            created_at: instant(queue.created_at),
            partitions: queue.partitions,
            messages: Counts {
                total: totals.total,
                pending: totals.pending,
                processing: totals.processing,
                completed: totals.completed,
                dead_letter: totals.dead_letters,
            },
        }
    }
}

/// `GET /api/v1/status/queues`.
pub async fn queues(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let (limit, offset) = paging(&query, LIMIT_DEFAULT, LIMIT_MAX)?;
    let inspection = state.broker()?.inspection();
    let queues = inspection.queues(&filter(&query)?, false, limit, offset).await?;
    let ids = inspection.ids();
    let queues: Vec<QueueRow> = queues.into_iter().map(|queue| QueueRow::new(queue, ids)).collect();
    Ok(Json(json!({"queues": queues, "pagination": {"limit": limit, "offset": offset}})).into_response())
}

/// `GET /api/v1/status/queues/:queue`.
pub async fn queue(State(state): State<AppState>, Path(name): Path<String>) -> Result<Response, ApiError> {
    check_name("queue", &name)?;
    let inspection = state.broker()?.inspection();
    let Some(detail) = inspection.queue(&name).await? else { return Ok(queue_not_found()) };
    let QueueDetail { queue, partitions, totals, .. } = detail;
    let ids = inspection.ids();
    let options = &queue.options;
    let partitions: Vec<Value> = partitions.iter().map(|partition| partition_row(partition, ids)).collect();
    Ok(Json(json!({
        "queue": {
            "id": ids.queue(queue.id),
            "name": queue.name,
            "namespace": options.namespace,
            "task": options.task,
            "priority": options.priority,
            "createdAt": instant(queue.created_at),
            "config": {
                "leaseTime": options.lease_time,
                "retryLimit": options.retry_limit,
                "retryDelay": options.retry_delay,
                "ttl": options.ttl,
                "priority": options.priority,
                "maxSize": options.max_size,
                "maxQueueSize": options.max_size,
            },
        },
        "partitions": partitions,
        "totals": counts(totals),
    }))
    .into_response())
}

fn partition_row(partition: &PartitionDetail, ids: IdSpace) -> Value {
    let stats = counts(partition.into());
    let mut messages = stats.clone();
    if let Some(messages) = messages.as_object_mut() {
        messages.remove("deadLetter");
    }
    json!({
        "id": ids.partition(partition.id),
        "name": partition.name,
        "createdAt": instant(partition.created_at),
        "messages": messages,
        "stats": stats,
        "cursor": {"totalConsumed": partition.consumed, "batchesConsumed": 0},
        "lastActivity": partition.last_lease_at.map(instant),
        "oldestMessage": partition.oldest_at.map(instant),
        "newestMessage": partition.newest_at.map(instant),
    })
}

/// `POST /api/v1/stats/refresh`. Any body, or none.
pub async fn refresh(State(state): State<AppState>) -> Result<Response, ApiError> {
    let (done, overview) = state.broker()?.inspection().refresh().await?;
    Ok(Json(json!({
        "engine": "segments",
        "segPartitions": overview.partitions,
        "queuesUpdated": done.queues,
        "namespaces": overview.namespaces,
        "tasks": overview.tasks,
        "elapsedMs": done.elapsed_ms,
    }))
    .into_response())
}

/// `GET /api/v1/status/analytics`.
pub async fn analytics(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let (from, to) = range(&query, chrono::Duration::hours(24))?;
    let asked = query.text("interval");
    let interval = ["minute", "day"].into_iter().find(|known| asked == Some(known)).unwrap_or("hour");
    let points = state.broker()?.inspection().messages_by_age(&filter(&query)?, (from, to), interval).await?;
    let points: Vec<Value> =
        points.into_iter().map(|(at, messages)| json!({"timestamp": label(at), "messages": messages})).collect();
    Ok(Json(json!({"dataPoints": points, "interval": interval, "from": instant(from), "to": instant(to)}))
        .into_response())
}
