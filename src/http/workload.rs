//! `GET /api/v1/analytics/workload` (`spec/admin.md` §10.5): traffic and backlog by namespace, task or queue.

use std::collections::{BTreeMap, HashMap};

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::Query;
use super::state::AppState;
use super::status::filter;
use super::window::{buckets, label, mean, round2, time_range, window};
use crate::broker::analytics::{QueuePoint, Window};
use crate::broker::inspection::{QueueFilter, QueueSummary};

/// Buckets of one answer: fifteen days of six hours and far more than any shorter window has.
const BUCKETS_MAX: usize = 2_000;
/// Rows of one answer, those with the most traffic.
const ROWS_MAX: usize = 1_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum GroupBy {
    Namespace,
    Task,
    Queue,
}

impl GroupBy {
    fn key<'a>(self, namespace: &'a str, task: &'a str, queue: &'a str) -> &'a str {
        match self {
            GroupBy::Namespace => namespace,
            GroupBy::Task => task,
            GroupBy::Queue => queue,
        }
    }
}

/// Everything that belongs to one row.
#[derive(Default)]
struct Block<'a> {
    queues: Vec<&'a QueueSummary>,
    points: Vec<&'a QueuePoint>,
}

/// `GET /api/v1/analytics/workload`.
pub async fn workload(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let window = window(&query)?;
    let (by, by_name) = match query.text("groupBy") {
        None | Some("namespace") => (GroupBy::Namespace, "namespace"),
        Some("task") => (GroupBy::Task, "task"),
        Some("queue") => (GroupBy::Queue, "queue"),
        Some(_) => return Err(ApiError::BadRequest("bad groupBy".into())),
    };
    let filter = filter(&query)?;
    let inspection = state.broker()?.inspection();
    let points = inspection.queue_points(&window, &QueueFilter::default()).await?;
    let queues = inspection.queues(&QueueFilter::default(), false, i64::MAX, 0).await?;
    let groups: HashMap<i32, i64> =
        inspection.registered_groups().await?.into_iter().map(|row| (row.queue_id, row.groups)).collect();

    let wanted = |namespace: &str, task: &str, queue: &str| {
        let fits = |want: &Option<String>, have: &str| want.as_deref().is_none_or(|want| want == have);
        fits(&filter.namespace, namespace) && fits(&filter.task, task) && fits(&filter.queue, queue)
    };
    let mut blocks: BTreeMap<&str, Block<'_>> = BTreeMap::new();
    for queue in queues.iter().filter(|q| wanted(&q.namespace, &q.task, &q.name)) {
        blocks.entry(by.key(&queue.namespace, &queue.task, &queue.name)).or_default().queues.push(queue);
    }
    for point in points.iter().filter(|p| wanted(&p.namespace, &p.task, &p.queue_name)) {
        let key = by.key(&point.namespace, &point.task, &point.queue_name);
        if let Some(block) = blocks.get_mut(key) {
            block.points.push(point);
        }
    }
    let traffic = |block: &Block<'_>| block.points.iter().map(|p| p.push_messages + p.pop_messages).sum::<i64>();
    let mut blocks: Vec<(&str, Block<'_>)> = blocks.into_iter().collect();
    blocks.sort_by_cached_key(|(key, block)| (std::cmp::Reverse(traffic(block)), key.to_string()));
    blocks.truncate(ROWS_MAX);

    let labels = buckets(&window, BUCKETS_MAX);
    let rows: Vec<Value> = blocks
        .iter()
        .map(|(key, block)| {
            let mut row = render(block, &window, &labels, &groups);
            row["key"] = (*key).into();
            if let (GroupBy::Queue, Some(queue)) = (by, block.queues.first()) {
                row["namespace"] = queue.namespace.as_str().into();
                row["task"] = queue.task.as_str().into();
            }
            row
        })
        .collect();
    let all = Block { queues: queues.iter().collect(), points: points.iter().collect() };
    Ok(Json(json!({
        "timeRange": time_range(&window),
        "bucketMinutes": window.minutes,
        "groupBy": by_name,
        "buckets": labels.iter().map(|at| label(*at)).collect::<Vec<_>>(),
        "rows": rows,
        "tenant": render(&all, &window, &labels, &groups),
    }))
    .into_response())
}

fn render(block: &Block<'_>, window: &Window, labels: &[DateTime<Utc>], groups: &HashMap<i32, i64>) -> Value {
    let sum = |value: fn(&QueuePoint) -> i64| block.points.iter().map(|p| value(p)).sum::<i64>();
    let (lag_sum, lag_count) = (sum(|p| p.lag_ms_sum), sum(|p| p.lag_count));
    let lag_max = block.points.iter().filter(|p| p.lag_count > 0).map(|p| p.lag_ms_max).max();
    // Averaged per queue over the buckets in which it has a row, then summed.
    let mut parked: HashMap<i32, (f64, i64)> = HashMap::new();
    for point in &block.points {
        let (sum, count) = parked.entry(point.queue_id).or_default();
        *sum += point.parked;
        *count += 1;
    }
    let parked_avg: f64 = parked.values().map(|(sum, count)| sum / *count as f64).sum();
    let active = |p: &&&QueuePoint| p.push_messages + p.pop_messages + p.ack_requests > 0;
    let active: std::collections::HashSet<i32> = block.points.iter().filter(active).map(|p| p.queue_id).collect();
    let now = |value: fn(&QueueSummary) -> i64| block.queues.iter().map(|q| value(q)).sum::<i64>();
    let groups_of = |queue: &QueueSummary| groups.get(&queue.id.0).copied().unwrap_or(0);
    let ungrouped = || block.queues.iter().filter(|queue| groups_of(queue) == 0);
    json!({
        "queues": block.queues.len(),
        "window": {
            "pushMessages": sum(|p| p.push_messages),
            "pushRequests": sum(|p| p.push_requests),
            "popMessages": sum(|p| p.pop_messages),
            "popEmpty": sum(|p| p.pop_empty),
            "ackRequests": sum(|p| p.ack_requests),
            "ackSuccess": sum(|p| p.ack_success),
            "ackFailed": sum(|p| p.ack_failed),
            "transactions": sum(|p| p.transactions),
            "conflated": sum(|p| p.conflated),
            "partitionsCreated": sum(|p| p.partitions_created),
            "partitionsDeleted": sum(|p| p.partitions_deleted),
            "parkedAvg": round2(parked_avg),
            "avgLagMs": mean(lag_sum, lag_count),
            "maxLagMs": lag_max,
        },
        "series": series(block, window, labels),
        "now": {
            "pending": now(|q| q.pending),
            "processing": now(|q| q.processing),
            "deadLetter": now(|q| q.dead_letters),
            "retainedBytes": now(|q| q.retained_bytes),
            "partitions": now(|q| q.partitions),
            "groups": block.queues.iter().map(|queue| groups_of(queue)).sum::<i64>(),
            "queuesWithoutGroup": ungrouped().count(),
            "pendingWithoutGroup": ungrouped().map(|queue| queue.pending).sum::<i64>(),
            "queuesTouched": parked.len(),
            "queuesActive": active.len(),
        },
    })
}

/// Arrays parallel to the buckets; null in all where there is no row.
fn series(block: &Block<'_>, window: &Window, labels: &[DateTime<Utc>]) -> Value {
    let mut by_bucket: HashMap<DateTime<Utc>, Vec<&QueuePoint>> = HashMap::new();
    for point in &block.points {
        by_bucket.entry(point.bucket).or_default().push(point);
    }
    debug_assert!(window.minutes > 0);
    let array = |value: &dyn Fn(&[&QueuePoint]) -> Value| -> Vec<Value> {
        labels.iter().map(|at| by_bucket.get(at).map_or(Value::Null, |points| value(points))).collect()
    };
    let sum = |points: &[&QueuePoint], value: fn(&QueuePoint) -> i64| points.iter().map(|p| value(p)).sum::<i64>();
    json!({
        "push": array(&|p| sum(p, |p| p.push_messages).into()),
        "pop": array(&|p| sum(p, |p| p.pop_messages).into()),
        "popEmpty": array(&|p| sum(p, |p| p.pop_empty).into()),
        "ackFailed": array(&|p| sum(p, |p| p.ack_failed).into()),
        "parked": array(&|p| round2(p.iter().map(|p| p.parked).sum()).into()),
        "avgLagMs": array(&|p| mean(sum(p, |p| p.lag_ms_sum), sum(p, |p| p.lag_count)).into()),
        "maxLagMs": array(&|p| p.iter().filter(|p| p.lag_count > 0).map(|p| p.lag_ms_max).max().into()),
    })
}
