//! What retention has deleted, over time and by label (`spec/admin.md` §10.4).

use chrono::{DateTime, Utc};

use super::Broker;
use super::error::BrokerResult;
pub use crate::store::retention_history::{HistoryKey, HistoryQuery, HistorySums};

/// What was deleted in a window of time.
#[derive(Clone, Debug)]
pub struct RetentionReport {
    /// Width of a bucket.
    pub bucket_minutes: i64,
    /// Buckets with a deletion, oldest first.
    pub buckets: Vec<(DateTime<Utc>, HistorySums)>,
    /// By key with the number of queues under it, most messages first; empty if not asked for.
    pub keys: Vec<(String, i64, HistorySums)>,
}

/// Width of the buckets of a window, in minutes (§10, bucket rule).
pub fn bucket_minutes(from: DateTime<Utc>, to: DateTime<Utc>) -> i64 {
    match (to - from).num_seconds() {
        ..=3_600 => 1,
        3_601..=21_600 => 5,
        21_601..=86_400 => 15,
        86_401..=604_800 => 60,
        _ => 360,
    }
}

impl Broker {
    /// `GET /api/v1/analytics/retention`.
    pub async fn retention_report(&self, query: &HistoryQuery, key: HistoryKey) -> BrokerResult<RetentionReport> {
        let bucket_minutes = bucket_minutes(query.from, query.to);
        let buckets = self.store.retention_buckets(query, bucket_minutes).await?;
        let keys = self.store.retention_by_key(query, key).await?;
        Ok(RetentionReport { bucket_minutes, buckets, keys })
    }
}
