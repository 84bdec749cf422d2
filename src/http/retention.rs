//! `GET /api/v1/analytics/retention` (`spec/admin.md` §10.4).

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::Query;
use super::state::AppState;
use super::window::{label, time_range, window};
use crate::broker::retention_report::{HistoryKey, HistoryQuery, HistorySums};

/// What was deleted by which rule, in buckets of time and by label.
pub async fn report(State(state): State<AppState>, RawQuery(raw): RawQuery) -> Result<Response, ApiError> {
    let query = Query::parse(raw.as_deref())?;
    let key = match query.text("groupBy") {
        None => HistoryKey::All,
        Some("queue") => HistoryKey::Queue,
        Some("namespace") => HistoryKey::Namespace,
        Some("task") => HistoryKey::Task,
        Some(_) => return Err(ApiError::BadRequest("bad groupBy".into())),
    };
    let window = window(&query)?;
    let queue = query.name("queue")?.map(str::to_owned);
    let asked = HistoryQuery { from: window.from, to: window.to, minutes: window.minutes, queue };
    let report = state.broker()?.retention_report(&asked, key).await?;
    let mut totals = HistorySums { messages: [0; 3], events: 0 };
    for (_, sums) in &report.buckets {
        totals.events += sums.events;
        totals.messages.iter_mut().zip(sums.messages).for_each(|(total, messages)| *total += messages);
    }
    let series: Vec<Value> =
        report.buckets.iter().map(|(at, sums)| with(json!({ "bucket": label(*at) }), sums)).collect();
    let mut body = json!({
        "timeRange": time_range(&window),
        "bucketMinutes": window.minutes,
        "series": series,
        "totals": with(json!({}), &totals),
    });
    if key != HistoryKey::All {
        let row =
            |(key, queues, sums): &(String, i64, HistorySums)| with(json!({ "key": key, "queues": queues }), sums);
        body["rows"] = report.keys.iter().map(row).collect();
    }
    Ok(Json(body).into_response())
}

fn with(mut row: Value, sums: &HistorySums) -> Value {
    let [completed, aged, evicted] = sums.messages;
    row["retentionMsgs"] = aged.into();
    row["completedRetentionMsgs"] = completed.into();
    row["evictionMsgs"] = evicted.into();
    row["totalMsgs"] = (completed + aged + evicted).into();
    row["eventCount"] = sums.events.into();
    row
}
