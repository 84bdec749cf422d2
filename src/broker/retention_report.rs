//! What retention has deleted, over time and by label (`spec/admin.md` §10.4).

use chrono::{DateTime, Utc};

use super::Broker;
use super::error::BrokerResult;
pub use crate::store::retention_history::{HistoryKey, HistoryQuery, HistorySums};

/// What was deleted in a window of time.
#[derive(Clone, Debug)]
pub struct RetentionReport {
    /// Buckets with a deletion, oldest first.
    pub buckets: Vec<(DateTime<Utc>, HistorySums)>,
    /// By key with the number of queues under it, most messages first; empty if not asked for.
    pub keys: Vec<(String, i64, HistorySums)>,
}

impl Broker {
    /// `GET /api/v1/analytics/retention`.
    pub async fn retention_report(&self, query: &HistoryQuery, key: HistoryKey) -> BrokerResult<RetentionReport> {
        let buckets = self.store.retention_buckets(query).await?;
        let keys = self.store.retention_by_key(query, key).await?;
        Ok(RetentionReport { buckets, keys })
    }
}
