//! The time range of an analytics request and its buckets (`spec/admin.md` §10).

use chrono::{DateTime, Duration, SecondsFormat, Utc};
use serde_json::{Value, json};

use super::error::ApiError;
use super::extract::Query;
use super::json::instant;
use super::messages::instant_of;
use crate::broker::analytics::Window;

/// `from` (one hour ago) and `to` (now), with the bucket length that the span asks for.
pub fn window(query: &Query) -> Result<Window, ApiError> {
    let (from, to) = range(query, Duration::hours(1))?;
    Ok(Window { from, to, minutes: bucket_minutes(to - from) })
}

/// `from` (`back` ago) and `to` (now).
pub fn range(query: &Query, back: Duration) -> Result<(DateTime<Utc>, DateTime<Utc>), ApiError> {
    let to = instant_of(query, "to")?.unwrap_or_else(Utc::now);
    let from = instant_of(query, "from")?.unwrap_or_else(|| to.checked_sub_signed(back).unwrap_or(to));
    Ok((from, to))
}

fn bucket_minutes(span: Duration) -> i32 {
    match span.num_seconds() {
        ..=3_600 => 1,
        3_601..=21_600 => 5,
        21_601..=86_400 => 15,
        86_401..=604_800 => 60,
        _ => 360,
    }
}

/// `{from, to}`.
pub fn time_range(window: &Window) -> Value {
    json!({"from": instant(window.from), "to": instant(window.to)})
}

/// The label of a bucket.
pub fn label(bucket: DateTime<Utc>) -> String {
    bucket.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Every bucket of the window, at most so many.
pub fn buckets(window: &Window, max: usize) -> Vec<DateTime<Utc>> {
    let length = i64::from(window.minutes) * 60;
    let floor = |at: DateTime<Utc>| at.timestamp().div_euclid(length);
    let (first, last) = (floor(window.from), floor(window.to));
    let buckets = (first..=last).rev().take(max);
    let mut buckets: Vec<_> = buckets.filter_map(|nth| DateTime::from_timestamp(nth * length, 0)).collect();
    buckets.reverse();
    buckets
}

/// Two decimals.
pub fn round2(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}

/// A count per second of a bucket.
pub fn per_second(count: i64, window: &Window) -> f64 {
    round2(count as f64 / (f64::from(window.minutes) * 60.0))
}

/// The mean of lags, or nothing without a sample.
pub fn mean(sum: i64, count: i64) -> Option<i64> {
    (count > 0).then(|| (sum as f64 / count as f64).round() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bucket_follows_the_span() {
        for (minutes, bucket) in
            [(1, 1), (60, 1), (61, 5), (360, 5), (361, 15), (1440, 15), (1441, 60), (10_080, 60), (10_081, 360)]
        {
            assert_eq!(bucket_minutes(Duration::minutes(minutes)), bucket, "{minutes}");
        }
    }

    #[test]
    fn every_bucket_of_the_window_is_named() {
        let at = |seconds| DateTime::from_timestamp(seconds, 0).unwrap_or_default();
        let window = Window { from: at(59), to: at(301), minutes: 1 };
        let seconds: Vec<i64> = buckets(&window, 100).iter().map(DateTime::timestamp).collect();
        assert_eq!(seconds, [0, 60, 120, 180, 240, 300]);
        assert_eq!(buckets(&window, 2).len(), 2);
        assert_eq!((mean(10, 4), mean(0, 0)), (Some(3), None));
    }
}
