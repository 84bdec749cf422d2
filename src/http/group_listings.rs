//! Listings of consumer groups (`spec/admin.md` §7.1 to §7.3).

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::error::ApiError;
use super::extract::{Query, check_name};
use super::json::instant;
use super::state::AppState;
use crate::broker::group_list::{CursorLag, GroupTotals};
use crate::ids::IdSpace;

const LAG_SECONDS_DEFAULT: f64 = 3600.0;
/// Past it a group counts as lagging.
const LAGGING_SECONDS: i64 = 300;

/// `GET /api/v1/consumer-groups`.
pub async fn all(State(state): State<AppState>) -> Result<Response, ApiError> {
    let totals = state.broker()?.group_list().totals().await?;
    Ok(Json(totals.iter().map(row_of).collect::<Vec<Value>>()).into_response())
}

fn row_of(totals: &GroupTotals) -> Value {
    let state = match totals {
        GroupTotals { lag_seconds, .. } if *lag_seconds > LAGGING_SECONDS => "Lagging",
        GroupTotals { has_consumed: true, .. } => "Stable",
        _ => "Dead",
    };
    json!({
        "name": totals.group,
        "topics": [totals.queue],
        "queueName": totals.queue,
        "members": totals.cursors,
        "partitionCursors": totals.cursors,
        "partitionsWithLag": totals.lagging,
        "totalLag": totals.lag,
        "maxTimeLag": totals.lag_seconds,
        "state": state,
        "storage": "segments",
        "subscriptionMode": totals.mode,
        "subscriptionTimestamp": totals.subscribed_at.map(instant),
        "subscriptionCreatedAt": totals.registered_at.map(instant),
        "conflation": totals.conflation,
    })
}

/// `GET /api/v1/consumer-groups/lagging`.
pub async fn lagging(State(state): State<AppState>, RawQuery(query): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(query.as_deref())?;
    let seconds = match query.text("minLagSeconds") {
        None => LAG_SECONDS_DEFAULT,
        Some(text) => text
            .trim()
            .parse::<f64>()
            .ok()
            // A century bounds the date arithmetic.
            .filter(|seconds| (0.0..=3.2e9).contains(seconds))
            .ok_or_else(|| ApiError::BadRequest(format!("minLagSeconds must be a number of seconds, got {text:?}")))?,
    };
    let broker = state.broker()?;
    let cursors = broker.group_list().lagging(seconds).await?;
    let ids = broker.ids();
    Ok(Json(cursors.iter().map(|cursor| lagging_row(cursor, ids)).collect::<Vec<Value>>()).into_response())
}

fn lagging_row(cursor: &CursorLag, ids: IdSpace) -> Value {
    json!({
        "consumer_group": cursor.group,
        "queue_name": cursor.queue,
        "partition_name": cursor.partition_name,
        "partition_id": ids.partition(cursor.partition),
        "worker_id": cursor.worker,
        "offset_lag": cursor.lag,
        "time_lag_seconds": cursor.lag_seconds,
        "lag_hours": (cursor.lag_seconds as f64 / 36.0).round() / 100.0,
        "oldest_unconsumed_at": cursor.oldest_at.map(instant),
        "last_consumed_at": null,
    })
}

/// `GET /api/v1/consumer-groups/:group`. `truncated` says that the last queue, or some after it, are not whole.
pub async fn one(State(state): State<AppState>, Path(group): Path<String>) -> Result<Response, ApiError> {
    check_name("group", &group)?;
    let (cursors, more) = state.broker()?.group_list().cursors(&group).await?;
    let mut queues = Map::new();
    for queue in cursors.chunk_by(|a, b| a.queue == b.queue) {
        let Some(first) = queue.first() else { continue };
        let partitions: Vec<Value> = queue.iter().map(partition_row).collect();
        queues.insert(first.queue.clone(), json!({"conflation": first.conflation, "partitions": partitions}));
    }
    let last = cursors.last().filter(|_| more).and_then(|last| queues.get_mut(&last.queue));
    if let Some(Value::Object(last)) = last {
        last.insert("truncated".to_owned(), true.into());
    }
    Ok(Json(queues).into_response())
}

fn partition_row(cursor: &CursorLag) -> Value {
    json!({
        "partition": cursor.partition_name,
        "workerId": cursor.worker,
        "lastConsumedAt": null,
        "totalConsumed": cursor.consumed,
        "offsetLag": cursor.lag,
        "timeLagSeconds": cursor.lag_seconds,
        "leaseActive": cursor.is_leased,
    })
}
