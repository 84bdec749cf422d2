//! What the metrics of watched queues are made of: a few index probes per watched queue, whatever else there is.

use super::Store;
use super::error::{StoreResult, Timed};
use crate::ids::{GroupId, QueueId};

/// Minutes after which a bucket is too old to be shown (`spec/admin.md` §14).
pub const MINUTES_MAX: i32 = 5;
/// Groups of one queue whose acks are told apart from those of other queues.
const GROUPS_MAX: i64 = 1_000;

/// The snapshot of one queue; zeros before the first one. Times are seconds, by the database's clock.
#[derive(Clone, Debug, Default, PartialEq, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct WatchedSnapshot {
    pub queue_id: i32,
    pub name: String,
    pub retained: i64,
    pub pending: i64,
    pub leased: i64,
    pub dead_letters: i64,
    pub oldest_pending_age: f64,
    /// `None` before the first snapshot.
    pub age: Option<f64>,
}

/// What all brokers did to one queue within its newest minute bucket.
#[derive(Clone, Debug, Default, PartialEq, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct WatchedMinute {
    pub queue_id: i32,
    /// Seconds since the bucket began.
    pub age: f64,
    pub push_requests: i64,
    pub push_messages: i64,
    pub pop_messages: i64,
    pub pop_empty: i64,
    pub ack_success: i64,
    pub ack_failed: i64,
    pub transactions: i64,
    pub conflated: i64,
    pub lag_ms_avg: f64,
    pub lag_ms_max: i64,
    pub parked: f64,
}

impl Store {
    /// The snapshots of the queues with these names that exist.
    pub async fn watched_snapshots(&self, names: &[String]) -> StoreResult<Vec<WatchedSnapshot>> {
        sqlx::query_as(
            "SELECT q.id AS queue_id, u.name, coalesce(s.appended - s.evicted, 0) AS retained, \
               coalesce(s.pending, 0) AS pending, coalesce(s.processing, 0) AS leased, \
               coalesce(s.dead_letters, 0) AS dead_letters, \
               coalesce(greatest(extract(epoch FROM clock_timestamp() - s.oldest_pending_at), 0), 0)::float8 \
                 AS oldest_pending_age, \
               extract(epoch FROM clock_timestamp() - s.computed_at)::float8 AS age \
             FROM unnest($1::text[]) AS u (name) \
             CROSS JOIN LATERAL (SELECT q.id FROM queen.queues q \
               WHERE q.tenant = queen.default_tenant() AND q.name = ANY (ARRAY[u.name]) LIMIT 1) q \
             LEFT JOIN LATERAL (SELECT * FROM queen.stats s WHERE s.queue_id = ANY (ARRAY[q.id]) LIMIT 1) s ON true",
        )
        .bind(names)
        .fetch_all(&self.pool)
        .timed("watched queues")
        .await
    }

    /// The newest minute bucket of each of these queues, if it has one that is not too old.
    pub async fn watched_minutes(&self, queues: &[QueueId]) -> StoreResult<Vec<WatchedMinute>> {
        sqlx::query_as(
            "SELECT u.queue_id, extract(epoch FROM clock_timestamp() - m.bucket)::float8 AS age, m.push_requests, \
               m.push_messages, m.pop_messages, m.pop_empty, m.ack_success, m.ack_failed, m.transactions, m.conflated, \
               m.lag_ms_avg, m.lag_ms_max, m.parked \
             FROM unnest($1::int[]) AS u (queue_id) \
             CROSS JOIN LATERAL (SELECT b.bucket, m.* FROM generate_series(0, $2) AS minutes (ago) \
               CROSS JOIN LATERAL (SELECT date_trunc('minute', clock_timestamp()) - make_interval(mins => minutes.ago) \
                 AS bucket) b \
               CROSS JOIN LATERAL (SELECT count(*) AS brokers, sum(m.push_requests)::bigint AS push_requests, \
                   sum(m.push_messages)::bigint AS push_messages, sum(m.pop_messages)::bigint AS pop_messages, \
                   sum(m.pop_empty)::bigint AS pop_empty, sum(m.ack_success)::bigint AS ack_success, \
                   sum(m.ack_failed)::bigint AS ack_failed, sum(m.transactions)::bigint AS transactions, \
                   sum(m.conflated)::bigint AS conflated, \
                   (sum(m.lag_ms_sum) / greatest(sum(m.lag_count), 1))::float8 AS lag_ms_avg, \
                   max(m.lag_ms_max) AS lag_ms_max, \
                   sum(m.parked_sum::float8 / greatest(m.parked_samples, 1)) AS parked \
                 FROM queen.queue_minutes m \
                 WHERE m.bucket = ANY (ARRAY[b.bucket]) AND m.queue_id = ANY (ARRAY[u.queue_id])) m \
               WHERE m.brokers > 0 ORDER BY minutes.ago LIMIT 1) m",
        )
        .bind(queues.iter().map(|queue| queue.0).collect::<Vec<_>>())
        .bind(MINUTES_MAX - 1)
        .fetch_all(&self.pool)
        .timed("watched queues")
        .await
    }

    /// The groups of these queues.
    pub async fn watched_groups(&self, queues: &[QueueId]) -> StoreResult<Vec<(GroupId, QueueId)>> {
        let rows: Vec<(i32, i32)> = sqlx::query_as(
            "SELECT g.id, u.queue_id FROM unnest($1::int[]) AS u (queue_id) \
             CROSS JOIN LATERAL (SELECT g.id FROM queen.consumer_groups g WHERE g.queue_id = ANY (ARRAY[u.queue_id]) \
               LIMIT $2) g",
        )
        .bind(queues.iter().map(|queue| queue.0).collect::<Vec<_>>())
        .bind(GROUPS_MAX)
        .fetch_all(&self.pool)
        .timed("watched queues")
        .await?;
        Ok(rows.into_iter().map(|(group, queue)| (GroupId(group), QueueId(queue))).collect())
    }

    /// The names of these queues.
    pub async fn queue_names(&self, queues: &[QueueId]) -> StoreResult<Vec<String>> {
        sqlx::query_scalar("SELECT name FROM queen.queues WHERE id = ANY($1) AND tenant = queen.default_tenant()")
            .bind(queues.iter().map(|queue| queue.0).collect::<Vec<_>>())
            .fetch_all(&self.pool)
            .timed("watched queues")
            .await
    }

    /// Dead letters of all queues, as of their snapshots. Reads only the snapshots of queues that have some.
    pub async fn dead_letter_depth(&self) -> StoreResult<i64> {
        sqlx::query_scalar("SELECT coalesce(sum(dead_letters), 0)::bigint FROM queen.stats WHERE dead_letters > 0")
            .fetch_one(&self.pool)
            .timed("watched queues")
            .await
    }
}
