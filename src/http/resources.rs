//! `/api/v1/resources/…` (`spec/admin.md` §4.1 to §4.6).

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use super::error::{ApiError, envelope};
use super::extract::{Query, check_name};
use super::json::instant;
use super::state::AppState;
use crate::broker::configure;
use crate::broker::error::BrokerError;
use crate::broker::inspection::{
    Depth, Label, PartitionDetail, QueueDetail, QueueFilter, QueueSummary, Spread, Totals,
};
use crate::ids::IdSpace;

/// More than any installation has: these listings are whole by rule (§4.2).
const EVERYTHING: i64 = i64::MAX;

/// `GET /api/v1/resources/overview`.
pub async fn overview(State(state): State<AppState>) -> Result<Response, ApiError> {
    let broker = state.broker()?;
    let overview = broker.inspection().overview(&QueueFilter::default()).await?;
    let (ingested, processed) = broker.inspection().recent_rates().await?;
    let spread = |s: &Spread| json!({"avg": s.avg, "median": s.median, "min": s.min, "max": s.max});
    Ok(Json(json!({
        "queues": overview.queues,
        "partitions": overview.partitions,
        "namespaces": overview.namespaces,
        "tasks": overview.tasks,
        "messages": counts((&overview).into()),
        "lag": {"time": spread(&overview.time_lag), "offset": spread(&overview.offset_lag)},
        "throughput": {"ingestedPerSecond": ingested, "processedPerSecond": processed},
        "timestamp": instant(chrono::Utc::now()),
        "statsAge": overview.stats_age,
    }))
    .into_response())
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
    messages: Backlog,
    segments: Segments,
    retained_bytes: i64,
}

#[derive(Serialize)]
struct Backlog {
    total: i64,
    pending: i64,
    processing: i64,
}

#[derive(Serialize)]
struct Segments {
    segments: i64,
    messages: i64,
}

impl QueueRow {
    fn new(queue: QueueSummary, ids: IdSpace) -> QueueRow {
        QueueRow {
            id: ids.queue(queue.id).to_string(),
            name: queue.name,
            namespace: queue.namespace,
            task: queue.task,
            created_at: instant(queue.created_at),
            partitions: queue.partitions,
            messages: Backlog { total: queue.total, pending: queue.pending, processing: queue.processing },
            segments: Segments { segments: queue.segments, messages: queue.segment_messages },
            retained_bytes: queue.retained_bytes,
        }
    }
}

#[derive(Serialize)]
struct QueueRows {
    queues: Vec<QueueRow>,
}

/// `GET /api/v1/resources/queues`: all of them; of the query only `stats=cached` counts.
pub async fn queues(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let is_cached = Query::parse(raw.as_deref())?.text("stats") == Some("cached");
    let inspection = state.broker()?.inspection();
    let (filter, ids) = (QueueFilter::default(), inspection.ids());
    let queues = inspection.queues(&filter, is_cached, EVERYTHING, 0).await?;
    // A list of a hundred thousand rows takes its time: not on a thread that serves others.
    let render = move || {
        let queues = queues.into_iter().map(|queue| QueueRow::new(queue, ids)).collect();
        serde_json::to_vec(&QueueRows { queues })
    };
    let body = tokio::task::spawn_blocking(render).await.map_err(|error| BrokerError::Failed(error.to_string()))?;
    let body = body.map_err(|error| BrokerError::Failed(error.to_string()))?;
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// `GET /api/v1/resources/queues/:queue`.
pub async fn queue(State(state): State<AppState>, Path(name): Path<String>) -> Result<Response, ApiError> {
    check_name("queue", &name)?;
    let inspection = state.broker()?.inspection();
    let Some(detail) = inspection.queue(&name).await? else { return Ok(queue_not_found()) };
    let QueueDetail { queue, partitions, totals, segments, retained_bytes } = detail;
    let ids = inspection.ids();
    let mut options = configure::echo(&queue);
    options.insert("namespace".into(), queue.options.namespace.clone().into());
    options.insert("task".into(), queue.options.task.clone().into());
    let partitions: Vec<Value> = partitions.iter().map(|partition| partition_row(partition, ids)).collect();
    Ok(Json(json!({
        "id": ids.queue(queue.id),
        "name": queue.name,
        "namespace": queue.options.namespace,
        "task": queue.options.task,
        "createdAt": instant(queue.created_at),
        "options": options,
        "partitions": partitions,
        "totals": counts(totals),
        "retainedBytes": retained_bytes,
        "segments": {"segments": segments, "messages": totals.total},
    }))
    .into_response())
}

fn partition_row(partition: &PartitionDetail, ids: IdSpace) -> Value {
    json!({
        "id": ids.partition(partition.id),
        "name": partition.name,
        "createdAt": instant(partition.created_at),
        "stats": counts(partition.into()),
        "oldestMessage": partition.oldest_at.map(instant),
        "newestMessage": partition.newest_at.map(instant),
    })
}

/// The six counts of §3.
pub fn counts(totals: Totals) -> Value {
    json!({
        "total": totals.total,
        "pending": totals.pending,
        "processing": totals.processing,
        "completed": totals.completed,
        "failed": null,
        "deadLetter": totals.dead_letters,
    })
}

/// The 404 of an unknown queue.
pub fn queue_not_found() -> Response {
    envelope(StatusCode::NOT_FOUND, "Queue not found")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DepthRow {
    partition: String,
    pending: i64,
    processing: i64,
    ready: i64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DepthBody {
    queue: String,
    group: Option<String>,
    pending: i64,
    processing: i64,
    ready: i64,
    partitions_pending: i64,
    partitions_ready: i64,
    conflation: bool,
    effective_pending: i64,
    effective_ready: i64,
    partitions: Vec<DepthRow>,
}

/// `GET /api/v1/resources/queues/:queue/depth`.
pub async fn depth(
    State(state): State<AppState>,
    Path(name): Path<String>,
    RawQuery(raw): RawQuery,
) -> Result<Response, ApiError> {
    check_name("queue", &name)?;
    let query = Query::parse(raw.as_deref())?;
    let group = query.name("group")?;
    let Some(depth) = state.broker()?.inspection().depth(&name, group).await? else { return Ok(queue_not_found()) };
    let Depth { pending, processing, partitions_pending, partitions_ready, conflation, partitions } = depth;
    let ready = pending - processing;
    let rows = partitions.into_iter().map(|partition| DepthRow {
        ready: partition.pending - partition.processing,
        partition: partition.name,
        pending: partition.pending,
        processing: partition.processing,
    });
    Ok(Json(DepthBody {
        queue: name,
        group: group.map(str::to_owned),
        pending,
        processing,
        ready,
        partitions_pending,
        partitions_ready,
        conflation,
        effective_pending: if conflation { partitions_pending } else { pending },
        effective_ready: if conflation { partitions_ready } else { ready },
        partitions: rows.collect(),
    })
    .into_response())
}

/// `GET /api/v1/resources/namespaces`.
pub async fn namespaces(State(state): State<AppState>) -> Result<Response, ApiError> {
    labels(&state, Label::Namespace, "namespaces", "namespace").await
}

/// `GET /api/v1/resources/tasks`.
pub async fn tasks(State(state): State<AppState>) -> Result<Response, ApiError> {
    labels(&state, Label::Task, "tasks", "task").await
}

async fn labels(state: &AppState, label: Label, list: &str, key: &str) -> Result<Response, ApiError> {
    let rows = state.broker()?.inspection().labels(label).await?;
    let row = |row: crate::broker::inspection::LabelSummary| {
        json!({
            key: row.label,
            "queues": row.queues,
            "partitions": row.partitions,
            "messages": {"total": row.total, "pending": row.pending},
        })
    };
    let rows: Vec<Value> = rows.into_iter().map(row).collect();
    Ok(Json(json!({ list: rows })).into_response())
}
