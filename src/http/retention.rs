//! `GET /api/v1/analytics/retention` (`spec/admin.md` §10.4).

use axum::Json;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, SecondsFormat, TimeDelta, Utc};
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::Query;
use super::state::AppState;
use crate::broker::group::parse_timestamp;
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
    let to = instant(&query, "to")?.unwrap_or_else(Utc::now);
    let from = instant(&query, "from")?.unwrap_or_else(|| to - TimeDelta::hours(1));
    let asked = HistoryQuery { from, to, queue: query.name("queue")?.map(str::to_owned) };
    let report = state.broker()?.retention_report(&asked, key).await?;
    let mut totals = HistorySums { messages: [0; 3], events: 0 };
    for (_, sums) in &report.buckets {
        totals.events += sums.events;
        totals.messages.iter_mut().zip(sums.messages).for_each(|(total, messages)| *total += messages);
    }
    let series: Vec<Value> = report
        .buckets
        .iter()
        .map(|(at, sums)| with(json!({ "bucket": at.to_rfc3339_opts(SecondsFormat::Secs, true) }), sums))
        .collect();
    let mut body = json!({
        "timeRange": { "from": milliseconds(from), "to": milliseconds(to) },
        "bucketMinutes": report.bucket_minutes,
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

fn milliseconds(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Millis, true)
}

fn instant(query: &Query, key: &str) -> Result<Option<DateTime<Utc>>, ApiError> {
    let Some(text) = query.text(key) else { return Ok(None) };
    let wrong = || ApiError::BadRequest(format!("{key} must be a timestamp, got {text:?}"));
    parse_timestamp(text).map(Some).ok_or_else(wrong)
}
