//! Analytics of queues (`spec/admin.md` §10.1 to §10.3, §10.6, §10.7; §10.5 is in `workload.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use regex::Regex;
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::Query;
use super::json::instant;
use super::resources::queue_not_found;
use super::state::AppState;
use super::status::paging;
use super::window::{label, mean, per_second, round2, time_range, window};
use crate::broker::analytics::{QueuePoint, Window};
use crate::broker::inspection::QueueFilter;

const SIGNATURES_TOP: usize = 8;
const SIGNATURE_CHARS: usize = 120;

fn queue_filter(query: &Query) -> Result<QueueFilter, ApiError> {
    Ok(QueueFilter { queue: query.name("queue")?.map(str::to_owned), ..QueueFilter::default() })
}

/// `GET /api/v1/analytics/queue-lag`: a bare array, newest bucket first, then by name.
pub async fn queue_lag(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let window = window(&query)?;
    let mut points = state.broker()?.inspection().queue_points(&window, &queue_filter(&query)?).await?;
    points.sort_by(|a, b| b.bucket.cmp(&a.bucket).then_with(|| a.queue_name.cmp(&b.queue_name)));
    let row = |p: &QueuePoint| {
        json!({
            "queueName": p.queue_name,
            "popCount": p.pop_messages,
            "avgLagMs": mean(p.lag_ms_sum, p.lag_count),
            "maxLagMs": (p.lag_count > 0).then_some(p.lag_ms_max),
            "bucketMinutes": window.minutes,
            "bucketTime": label(p.bucket),
        })
    };
    Ok(Json(points.iter().map(row).collect::<Vec<Value>>()).into_response())
}

/// `GET /api/v1/analytics/queue-ops`.
pub async fn queue_ops(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let window = window(&query)?;
    let inspection = state.broker()?.inspection();
    let points = inspection.queue_points(&window, &queue_filter(&query)?).await?;
    let counts: BTreeMap<String, i64> = if points.is_empty() {
        BTreeMap::new()
    } else {
        let queues = inspection.queues(&queue_filter(&query)?, true, i64::MAX, 0).await?;
        queues.into_iter().map(|queue| (queue.name, queue.partitions)).collect()
    };
    let names: BTreeSet<&str> = points.iter().map(|p| p.queue_name.as_str()).collect();
    let series: Vec<Value> = points
        .iter()
        .map(|p| {
            let mut point = operations(p, &window);
            point["partitionCount"] = counts.get(&p.queue_name).copied().into();
            point
        })
        .collect();
    Ok(Json(json!({
        "timeRange": time_range(&window), "bucketMinutes": window.minutes, "series": series, "queues": names,
    }))
    .into_response())
}

fn operations(p: &QueuePoint, window: &Window) -> Value {
    json!({
        "bucket": label(p.bucket),
        "queueName": p.queue_name,
        "pushRequests": p.push_requests,
        "pushMessages": p.push_messages,
        "popMessages": p.pop_messages,
        "popEmpty": p.pop_empty,
        "ackRequests": p.ack_requests,
        "ackSuccess": p.ack_success,
        "ackFailed": p.ack_failed,
        "transactions": p.transactions,
        "partitionsCreated": p.partitions_created,
        "partitionsDeleted": p.partitions_deleted,
        "partitionCount": null,
        "avgLagMs": mean(p.lag_ms_sum, p.lag_count),
        "maxLagMs": (p.lag_count > 0).then_some(p.lag_ms_max),
        "pushPerSecond": per_second(p.push_messages, window),
        "popPerSecond": per_second(p.pop_messages, window),
        "ackPerSecond": per_second(p.ack_success + p.ack_failed, window),
        "emptyPerSecond": per_second(p.pop_empty, window),
        "parkedCount": round2(p.parked),
    })
}

/// `GET /api/v1/analytics/queue-parked-replicas`.
pub async fn parked_replicas(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let window = window(&query)?;
    let points = state.broker()?.inspection().parked_points(&window, query.name("queue")?).await?;
    let replicas: BTreeSet<&str> = points.iter().map(|p| p.broker.as_str()).collect();
    let replicas: Vec<Value> = replicas.into_iter().map(|name| json!({"hostname": name, "workerId": 0})).collect();
    let series: Vec<Value> = points
        .iter()
        .map(|p| {
            json!({
                "bucket": label(p.bucket),
                "queueName": p.queue_name,
                "hostname": p.broker,
                "workerId": 0,
                "parkedCount": round2(p.parked),
            })
        })
        .collect();
    Ok(Json(json!({
        "timeRange": time_range(&window), "bucketMinutes": window.minutes, "series": series, "replicas": replicas,
    }))
    .into_response())
}

/// `GET /api/v1/analytics/dlq-signatures`.
pub async fn dlq_signatures(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let (limit, _) = paging(&query, 200, 1_000)?;
    let Some(queue) = query.name("queue")? else { return Err(ApiError::BadRequest("queue required".into())) };
    let found = state.broker()?.inspection().letter_samples(queue, limit).await?;
    let Some((samples, rows_now)) = found else { return Ok(queue_not_found()) };
    let (mut texts, mut days) = (BTreeMap::<String, usize>::new(), BTreeMap::<String, usize>::new());
    for sample in &samples {
        *texts.entry(signature(&sample.reason)).or_default() += 1;
        *days.entry(sample.failed_at.format("%Y-%m-%d").to_string()).or_default() += 1;
    }
    let mut signatures: Vec<(String, usize)> = texts.into_iter().collect();
    signatures.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    signatures.truncate(SIGNATURES_TOP);
    let share = |n: usize| round2(n as f64 / samples.len().max(1) as f64);
    let bytes: i64 = samples.iter().map(|sample| i64::from(sample.bytes)).sum();
    let retries: BTreeSet<i32> = samples.iter().map(|sample| sample.retry_count).collect();
    let groups: BTreeSet<&str> = samples.iter().map(|sample| sample.group_name.as_str()).collect();
    let signatures: Vec<Value> =
        signatures.into_iter().map(|(text, n)| json!({"text": text, "n": n, "share": share(n)})).collect();
    let by_day: Vec<Value> = days.into_iter().map(|(day, n)| json!({"day": day, "n": n})).collect();
    Ok(Json(json!({
        "queue": queue,
        "rowsNow": rows_now,
        "sample": samples.len(),
        "retryCounts": retries,
        "groups": groups,
        "oldest": samples.last().map(|sample| instant(sample.failed_at)),
        "newest": samples.first().map(|sample| instant(sample.failed_at)),
        "avgBytes": bytes.checked_div(samples.len() as i64).unwrap_or(0),
        "signatures": signatures,
        "byDay": by_day,
    }))
    .into_response())
}

/// What several reasons have in common: ids, dates and numbers folded, white space collapsed, the first 120 characters.
fn signature(reason: &str) -> String {
    static FOLDS: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
        let folds = [
            (r"(?i)\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", "<id>"),
            (r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?\b?", "<date>"),
            (r"(?i)\b(?:0x)?[0-9a-f]*(?:[0-9][a-f]|[a-f][0-9])[0-9a-f]{7,}\b", "<id>"),
            (r"\b\d+\b", "<n>"),
            (r"\s+", " "),
        ];
        folds.into_iter().filter_map(|(pattern, with)| Some((Regex::new(pattern).ok()?, with))).collect()
    });
    let start: String = reason.chars().take(SIGNATURE_CHARS * 8).collect();
    let folded = FOLDS.iter().fold(start, |text, (pattern, with)| pattern.replace_all(&text, *with).into_owned());
    folded.trim().chars().take(SIGNATURE_CHARS).collect()
}

/// `GET /api/v1/analytics/partition-liveness`. An explicit empty label selects queues that have none.
pub async fn partition_liveness(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let (limit, _) = paging(&query, 20, 200)?;
    let label =
        |key: &str| Ok::<_, ApiError>(query.name(key)?.map(str::to_owned).or(query.given(key).then(String::new)));
    let filter = QueueFilter { namespace: label("namespace")?, task: label("task")?, ..queue_filter(&query)? };
    let rows = state.broker()?.inspection().liveness(&filter, limit).await?;
    let rows: Vec<Value> = rows
        .into_iter()
        .map(|row| {
            json!({
                "queue": row.queue,
                "namespace": row.namespace,
                "task": row.task,
                "partitions": row.partitions,
                "live1h": row.live_1h,
                "live24h": row.live_24h,
                "live7d": row.live_7d,
                "created24h": row.created_24h,
                "oldestWriteAt": row.oldest_write_at.map(instant),
                "newestWriteAt": row.newest_write_at.map(instant),
                "pending": row.pending,
            })
        })
        .collect();
    Ok(Json(json!({"capturedAt": instant(chrono::Utc::now()), "rows": rows})).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_that_differ_in_ids_dates_and_numbers_have_one_signature() {
        for (reason, folded) in [
            ("order 17 failed  after 3\n tries", "order <n> failed after <n> tries"),
            ("user 0198c7a4-0000-7000-8000-00000000e1ab is gone", "user <id> is gone"),
            ("blob deadbeef0123456789 missing", "blob <id> missing"),
            ("since 2026-11-30 not seen", "since <date> not seen"),
            ("at 2026-11-30T01:02:03.456Z: timeout", "at <date>: timeout"),
            ("v2 of x1 stays", "v2 of x1 stays"),
        ] {
            assert_eq!(signature(reason), folded);
        }
        assert_eq!(signature(&"ü".repeat(500)).chars().count(), SIGNATURE_CHARS);
    }
}
