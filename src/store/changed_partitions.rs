//! Partitions by name and by their last write (`spec/admin.md` §4.7).

use chrono::{DateTime, Utc};
use sqlx::Row;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::QueueId;

/// One partition.
#[derive(Clone, Debug)]
pub struct ChangedPartition {
    /// Name.
    pub name: String,
    /// Last offset, -1 before the first message.
    pub last_offset: i64,
    /// Oldest retained offset.
    pub log_start: i64,
    /// Last push.
    pub last_write_at: DateTime<Utc>,
}

/// An instant before which nothing can become visible any more.
#[derive(Clone, Copy, Debug)]
pub struct SafeTime {
    /// The instant.
    pub at: DateTime<Utc>,
    /// Whether other sessions could not be seen, so that a fixed distance was used.
    pub is_degraded: bool,
}

impl Store {
    /// Read it before any partition row.
    pub async fn safe_time(&self, floor_ms: u64) -> StoreResult<SafeTime> {
        let (at, is_degraded) = sqlx::query_as(
            "SELECT CASE WHEN a.masked THEN statement_timestamp() - make_interval(secs => $1 / 1000.0) \
               ELSE coalesce(a.oldest, statement_timestamp()) - interval '5 seconds' END, a.masked \
             FROM (SELECT min(xact_start) AS oldest, coalesce(bool_or(query = '<insufficient privilege>'), false) AS masked \
                   FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()) a",
        )
        .bind(floor_ms as f64)
        .fetch_one(&self.pool)
        .timed("safe time")
        .await?;
        Ok(SafeTime { at, is_degraded })
    }

    /// One page in name order.
    pub async fn partitions_by_name(
        &self,
        queue: QueueId,
        after: Option<&str>,
        limit: i64,
    ) -> StoreResult<Vec<ChangedPartition>> {
        let rows = sqlx::query(
            "SELECT name, last_offset, log_start, last_write_at FROM queen.log_partitions \
             WHERE queue_id = $1 AND name >= coalesce($2, '') AND name IS DISTINCT FROM $2 ORDER BY name LIMIT $3",
        )
        .bind(queue.0)
        .bind(after)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("changed partitions")
        .await?;
        read(&rows)
    }

    /// One page in the order of last writes, from `since` on and after (`last write`, name). No index serves it, because
    /// every push would pay for one: the queue's partitions are looked through.
    pub async fn partitions_by_write(
        &self,
        queue: QueueId,
        since: DateTime<Utc>,
        after: Option<(DateTime<Utc>, &str)>,
        limit: i64,
    ) -> StoreResult<Vec<ChangedPartition>> {
        let rows = sqlx::query(
            "SELECT name, last_offset, log_start, last_write_at FROM queen.log_partitions \
             WHERE queue_id = $1 AND last_write_at >= $2 \
               AND ($3::timestamptz IS NULL OR (last_write_at, name) > ($3, $4)) \
             ORDER BY last_write_at, name LIMIT $5",
        )
        .bind(queue.0)
        .bind(since)
        .bind(after.map(|(at, _)| at))
        .bind(after.map(|(_, name)| name))
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("changed partitions")
        .await?;
        read(&rows)
    }
}

fn read(rows: &[sqlx::postgres::PgRow]) -> StoreResult<Vec<ChangedPartition>> {
    rows.iter()
        .map(|row| {
            Ok(ChangedPartition {
                name: row.try_get("name")?,
                last_offset: row.try_get("last_offset")?,
                log_start: row.try_get("log_start")?,
                last_write_at: row.try_get("last_write_at")?,
            })
        })
        .collect::<Result<_, _>>()
        .during("changed partitions")
}
