//! Work that one broker does for all: who does it now, and how far its walk is.

use std::time::Duration;

use sqlx::Row;
use uuid::Uuid;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::PartitionId;

impl Store {
    /// Takes or keeps the work `name` for `length`; `false` while another broker has it.
    pub async fn hold_loop(&self, name: &str, holder: Uuid, length: Duration) -> StoreResult<bool> {
        let done = sqlx::query(
            "INSERT INTO queen.loop_leases AS l (name, holder, held_until) \
             VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3)) \
             ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, held_until = excluded.held_until \
             WHERE l.holder = excluded.holder OR l.held_until < clock_timestamp()",
        )
        .bind(name)
        .bind(holder)
        .bind(length.as_secs_f64())
        .execute(&self.claims)
        .timed("holding a loop")
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Leaves the work to the next broker at once.
    pub async fn release_loop(&self, name: &str, holder: Uuid) -> StoreResult<()> {
        sqlx::query("UPDATE queen.loop_leases SET held_until = '-infinity' WHERE name = $1 AND holder = $2")
            .bind(name)
            .bind(holder)
            .execute(&self.claims)
            .timed("holding a loop")
            .await?;
        Ok(())
    }

    /// One page of the walk that re-derives what retention finds its work by. A walk begins if none has since `every`
    /// (`None`: only the very first). Answers the partitions looked at; 0 while no walk is due.
    ///
    /// Missing rows only: it never makes an age younger or older, so that it needs no partition lock.
    pub async fn walk_ages(&self, name: &str, every: Option<Duration>, partitions_max: i64) -> StoreResult<u64> {
        let after: Option<Option<i64>> = sqlx::query_scalar(
            "UPDATE queen.loop_leases SET \
               walked_at = CASE WHEN walk_after IS NULL THEN statement_timestamp() ELSE walked_at END, \
               walk_after = coalesce(walk_after, 0) \
             WHERE name = $1 AND (walk_after IS NOT NULL OR walked_at IS NULL \
               OR walked_at < statement_timestamp() - make_interval(secs => $2)) RETURNING walk_after",
        )
        .bind(name)
        .bind(every.map(|every| every.as_secs_f64()))
        .fetch_optional(&self.claims)
        .timed("walking partitions")
        .await?;
        let Some(after) = after else { return Ok(0) };
        let row = sqlx::query(
            "WITH page AS MATERIALIZED ( \
               SELECT p.id, p.queue_id, p.log_start, p.txns_start, p.last_offset, p.last_write_at \
               FROM queen.log_partitions p WHERE p.id > $1 ORDER BY p.id LIMIT $2), \
             ages AS (INSERT INTO queen.log_ages (partition_id, kind, queue_id, oldest_at) \
               SELECT a.id, a.kind, a.queue_id, a.created_at FROM ( \
                 SELECT p.id, 0 AS kind, p.queue_id, s.created_at FROM page p CROSS JOIN LATERAL ( \
                   SELECT created_at FROM queen.log_segments s WHERE s.partition_id = p.id \
                     AND s.base_offset >= p.log_start ORDER BY s.base_offset LIMIT 1) s \
                 UNION ALL \
                 SELECT p.id, 1, p.queue_id, t.created_at FROM page p CROSS JOIN LATERAL ( \
                   SELECT created_at FROM queen.log_txns t WHERE t.partition_id = p.id \
                     AND t.base_offset >= p.txns_start ORDER BY t.base_offset LIMIT 1) t) a \
               WHERE NOT EXISTS (SELECT 1 FROM queen.log_ages x WHERE x.partition_id = a.id AND x.kind = a.kind) \
               ORDER BY a.id, a.kind ON CONFLICT DO NOTHING RETURNING queue_id, kind), \
             checked AS (UPDATE queen.retention_queues r SET check_at = statement_timestamp() \
               FROM (SELECT DISTINCT queue_id, kind FROM ages) a \
               WHERE r.queue_id = a.queue_id AND r.kind = a.kind AND r.check_at > statement_timestamp()), \
             empty AS (INSERT INTO queen.empty_partitions (partition_id, look_at) \
               SELECT p.id, p.last_write_at + interval '1 day' FROM page p WHERE p.last_offset < p.log_start \
                 AND NOT EXISTS (SELECT 1 FROM queen.empty_partitions e WHERE e.partition_id = p.id) \
               ORDER BY p.id ON CONFLICT DO NOTHING) \
             SELECT count(*) AS walked, max(id) AS last FROM page",
        )
        .bind(after.unwrap_or(0))
        .bind(partitions_max)
        .fetch_one(&self.claims)
        .timed("walking partitions")
        .await?;
        let walked: i64 = row.try_get("walked").during("walking partitions")?;
        let last: Option<i64> = row.try_get("last").during("walking partitions")?;
        let next = last.filter(|_| walked == partitions_max).map(PartitionId);
        sqlx::query("UPDATE queen.loop_leases SET walk_after = $2 WHERE name = $1")
            .bind(name)
            .bind(next.map(|p| p.0))
            .execute(&self.claims)
            .timed("walking partitions")
            .await?;
        Ok(walked.unsigned_abs())
    }
}
