//! Minute buckets, dead letters and partitions, as the analytics routes show them (`spec/admin.md` §9.1, §9.4, §10).

use chrono::{DateTime, Utc};

use super::error::BrokerResult;
use super::inspection::{Inspection, QueueFilter};
pub use crate::store::database_report::{DatabaseReport, LetterSample, QueueGroups, QueueLiveness};
pub use crate::store::minutes::{BrokerPoint, Operations, ParkedPoint, QueuePoint, Window};

/// Dead letters that the top reasons of `status` are taken from.
const REASONS_SAMPLE: i64 = 1_000;
const REASONS_TOP: i64 = 10;

impl Inspection {
    /// Operations per bucket and queue.
    pub async fn queue_points(&self, window: &Window, filter: &QueueFilter) -> BrokerResult<Vec<QueuePoint>> {
        let _turn = self.turn().await?;
        Ok(self.store.queue_points(window, filter).await?)
    }

    /// Parked pops per bucket, queue and broker.
    pub async fn parked_points(&self, window: &Window, queue: Option<&str>) -> BrokerResult<Vec<ParkedPoint>> {
        let _turn = self.turn().await?;
        Ok(self.store.parked_points(window, queue).await?)
    }

    /// Health and operations per bucket and broker.
    pub async fn broker_points(&self, window: &Window, broker: Option<&str>) -> BrokerResult<Vec<BrokerPoint>> {
        Ok(self.store.broker_points(window, broker).await?)
    }

    /// What all brokers have done.
    pub async fn lifetime(&self) -> BrokerResult<Operations> {
        Ok(self.store.lifetime().await?)
    }

    /// Retained messages by commit time.
    pub async fn messages_by_age(
        &self,
        filter: &QueueFilter,
        (from, to): (DateTime<Utc>, DateTime<Utc>),
        unit: &str,
    ) -> BrokerResult<Vec<(DateTime<Utc>, i64)>> {
        let _turn = self.turn().await?;
        Ok(self.store.messages_by_age(filter, from, to, unit).await?)
    }

    /// How many partitions of each queue are in use.
    pub async fn liveness(&self, filter: &QueueFilter, limit: i64) -> BrokerResult<Vec<QueueLiveness>> {
        self.statistics.freshen().await?;
        let _turn = self.turn().await?;
        Ok(self.store.queue_liveness(filter, limit).await?)
    }

    /// The newest dead letters of a queue and how many it has; `None` if it does not exist.
    pub async fn letter_samples(&self, queue: &str, limit: i64) -> BrokerResult<Option<(Vec<LetterSample>, i64)>> {
        let Some(queue) = self.find(queue).await? else { return Ok(None) };
        let (count, _) = self.store.count_dead_letters(queue.id).await?;
        Ok(Some((self.store.letter_samples(queue.id, limit).await?, count)))
    }

    /// How many groups have registered with each queue.
    pub async fn registered_groups(&self) -> BrokerResult<Vec<QueueGroups>> {
        Ok(self.store.registered_groups().await?)
    }

    /// The commonest reasons among the newest dead letters.
    pub async fn top_reasons(&self) -> BrokerResult<Vec<(String, i64)>> {
        Ok(self.store.top_reasons(REASONS_SAMPLE, REASONS_TOP).await?)
    }

    /// What PostgreSQL says about this database.
    pub async fn database_report(&self) -> BrokerResult<DatabaseReport> {
        let _turn = self.turn().await?;
        Ok(self.store.database_report().await?)
    }
}
