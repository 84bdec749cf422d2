//! `POST /api/v1/partitions/changed` (`spec/admin.md` §4.7).

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::check_name;
use super::json::timestamp;
use super::state::AppState;
use crate::broker::group::parse_timestamp;
use crate::broker::inspection::{After, ChangedPartition, Inspection};

const ENTRIES_MAX: usize = 64;
const LIMIT_MAX: i64 = 1000;

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    entries: Option<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    queue: String,
    #[serde(default)]
    since: Option<String>,
    #[serde(default)]
    after: Option<String>,
    #[serde(default)]
    limit: Option<i64>,
}

/// Enumerates partitions by name, or those written since an instant.
pub async fn changed(State(state): State<AppState>, body: Bytes) -> Result<Response, ApiError> {
    let body: Body = serde_json::from_slice(&body).map_err(ApiError::bad_body)?;
    let entries = body.entries.unwrap_or_default();
    if entries.len() > ENTRIES_MAX {
        return Err(ApiError::BadRequest(format!("entries: at most {ENTRIES_MAX}, got {}", entries.len())));
    }
    let mut asked = Vec::with_capacity(entries.len());
    for entry in entries {
        if entry.queue.is_empty() {
            return Err(ApiError::BadRequest("queue is required in every entry".into()));
        }
        check_name("queue", &entry.queue)?;
        let since = match entry.since.as_deref().filter(|text| !text.is_empty()) {
            Some(text) => Some(
                parse_timestamp(text)
                    .ok_or_else(|| ApiError::BadRequest(format!("since is no timestamp: {text:?}")))?,
            ),
            None => None,
        };
        asked.push((entry, since));
    }
    let inspection = state.broker()?.inspection();
    let safe = inspection.safe_time().await?;
    let mut answers = Vec::with_capacity(asked.len());
    for (entry, since) in asked {
        answers.push(answer(inspection, entry, since).await?);
    }
    Ok(Json(json!({
        "safeTime": timestamp(safe.at),
        "safeTimeDegraded": safe.is_degraded,
        "entries": answers,
    }))
    .into_response())
}

async fn answer(inspection: &Inspection, entry: Entry, since: Option<DateTime<Utc>>) -> Result<Value, ApiError> {
    let failed = |error: &str| json!({"queue": entry.queue, "error": error});
    let limit = entry.limit.unwrap_or(LIMIT_MAX).clamp(1, LIMIT_MAX);
    let after = match entry.after.as_deref().filter(|text| !text.is_empty()) {
        Some(text) => match read_cursor(text).filter(|after| matches!(after, After::Write(..)) == since.is_some()) {
            Some(after) => Some(after),
            None => return Ok(failed("BAD_CURSOR")),
        },
        None => None,
    };
    let Some(page) = inspection.changed(&entry.queue, since, after.as_ref(), limit).await? else {
        return Ok(failed("UNKNOWN_TOPIC_OR_PARTITION"));
    };
    let is_full = page.len() as i64 == limit;
    let next = page.last().filter(|_| is_full).map(|last| write_cursor(last, since.is_some()));
    let row = |p: &ChangedPartition| json!({"name": p.name, "lastOffset": p.last_offset, "logStart": p.log_start, "lastWriteAt": timestamp(p.last_write_at)});
    let partitions: Vec<Value> = page.iter().map(row).collect();
    Ok(json!({"queue": entry.queue, "partitions": partitions, "next": next}))
}

/// The ordering, where it stopped, the name it stopped at.
type Cursor = (char, i64, String);

fn write_cursor(last: &ChangedPartition, by_write: bool) -> String {
    let cursor: Cursor = if by_write {
        ('w', last.last_write_at.timestamp_micros(), last.name.clone())
    } else {
        ('n', 0, last.name.clone())
    };
    URL_SAFE_NO_PAD.encode(json!(cursor).to_string())
}

fn read_cursor(text: &str) -> Option<After> {
    let (order, at, name): Cursor = serde_json::from_slice(&URL_SAFE_NO_PAD.decode(text).ok()?).ok()?;
    match order {
        'n' => Some(After::Name(name)),
        'w' => Some(After::Write(DateTime::from_timestamp_micros(at)?, name)),
        _ => None,
    }
    .filter(|after| match after {
        After::Name(name) | After::Write(_, name) => !name.contains('\0'),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_keeps_its_ordering_and_refuses_nonsense() {
        let at = DateTime::from_timestamp_micros(1_790_000_000_123_456).unwrap_or_default();
        let last = ChangedPartition { name: "a/\"b".into(), last_offset: 1, log_start: 0, last_write_at: at };
        assert_eq!(read_cursor(&write_cursor(&last, false)), Some(After::Name("a/\"b".into())));
        assert_eq!(read_cursor(&write_cursor(&last, true)), Some(After::Write(at, "a/\"b".into())));
        for text in ["x", "bm9uc2Vuc2U", &URL_SAFE_NO_PAD.encode("[\"z\",0,\"n\"]")] {
            assert_eq!(read_cursor(text), None, "{text}");
        }
    }
}
