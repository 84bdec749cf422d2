//! Removal of partitions that have been empty and unused for long (`spec/admin.md` §8.5).

use std::time::Duration;

use super::Store;
use super::error::{StoreResult, Timed};
use crate::ids::QueueId;

/// Seconds that a partition which must stay is left alone.
const LOOK_AGAIN_SECONDS: f64 = 3600.0;

/// Name of a removal in the deletion history; names like this one are left out of the analytics.
pub const PARTITION_DELETED: &str = "__partition_deleted__";

impl Store {
    /// Removes up to `partitions_max` partitions, with cursors and hashes, that were made and last written more than `age`
    /// ago, hold no segment, and that nothing speaks for. Answers how many were looked at, and the
    /// queue of each that went.
    ///
    /// The partition rows are locked first (a push that was faster is seen, a later one makes the partition anew), then
    /// the cursor rows, in the global order; what is locked by others stays.
    pub async fn remove_empty_partitions(
        &self,
        age: Duration,
        partitions_max: i64,
    ) -> StoreResult<(u64, Vec<QueueId>)> {
        let candidates: Vec<i64> = sqlx::query_scalar(
            "SELECT partition_id FROM queen.empty_partitions WHERE look_at <= statement_timestamp() \
             ORDER BY look_at LIMIT $1",
        )
        .bind(partitions_max)
        .fetch_all(&self.claims)
        .timed("finding due work")
        .await?;
        if candidates.is_empty() {
            return Ok((0, Vec::new()));
        }
        let mut tx = self.pool.begin().timed("begin of retention").await?;
        let locked: Vec<i64> = sqlx::query_scalar(
            "SELECT id FROM queen.log_partitions WHERE id = ANY($1) ORDER BY id FOR UPDATE SKIP LOCKED",
        )
        .bind(&candidates)
        .fetch_all(&mut *tx)
        .timed("locking partitions")
        .await?;
        sqlx::query(
            "SELECT 1 FROM queen.log_consumers WHERE partition_id = ANY($1) ORDER BY partition_id, group_id FOR UPDATE",
        )
        .bind(&locked)
        .execute(&mut *tx)
        .timed("locking partitions")
        .await?;
        // Only now, in a snapshot younger than the locks.
        let gone: Vec<(i64, i32)> = sqlx::query_as(
            "SELECT p.id, p.queue_id FROM queen.log_partitions p \
             CROSS JOIN (SELECT clock_timestamp() - make_interval(secs => $2) AS at) cutoff \
             WHERE p.id = ANY($1) AND p.last_offset < p.log_start \
               AND greatest(p.created_at, p.last_write_at) < cutoff.at \
               AND (SELECT 1 FROM queen.log_segments s WHERE s.partition_id = p.id LIMIT 1) IS NULL \
               AND (SELECT 1 FROM queen.dead_letters d WHERE d.partition_id = p.id LIMIT 1) IS NULL \
               AND (SELECT 1 FROM queen.log_consumers c JOIN queen.consumer_groups g ON g.id = ANY (ARRAY[c.group_id]) \
                 WHERE c.partition_id = p.id AND (g.created_at >= cutoff.at OR c.lease_acquired_at >= cutoff.at \
                   OR c.lease_expires_at >= cutoff.at) LIMIT 1) IS NULL \
             ORDER BY p.id",
        )
        .bind(&locked)
        .bind(age.as_secs_f64())
        .fetch_all(&mut *tx)
        .timed("removing partitions")
        .await?;
        let (gone, queues): (Vec<i64>, Vec<i32>) = gone.into_iter().unzip();
        sqlx::query(
            "INSERT INTO queen.retention_history (tenant, queue_id, partition_id, partitions, kind, messages) \
             SELECT q.tenant, q.id, p.id, 1, $2, 0 FROM queen.log_partitions p JOIN queen.queues q ON q.id = ANY (ARRAY[p.queue_id]) \
             WHERE p.id = ANY($1)",
        )
        .bind(&gone)
        .bind(PARTITION_DELETED)
        .execute(&mut *tx)
        .timed("removing partitions")
        .await?;
        for statement in [
            "DELETE FROM queen.log_consumers WHERE partition_id = ANY($1)",
            "DELETE FROM queen.log_txns WHERE partition_id = ANY($1)",
            "DELETE FROM queen.empty_partitions WHERE partition_id = ANY($1)",
            "DELETE FROM queen.log_partitions WHERE id = ANY($1)",
        ] {
            sqlx::query(statement).bind(&gone).execute(&mut *tx).timed("removing partitions").await?;
        }
        // One that holds segments again is entered anew when they are gone; one that must stay is looked at later.
        sqlx::query(
            "WITH stays AS MATERIALIZED ( \
               SELECT u.id, p.id IS NULL OR p.last_offset >= p.log_start AS forget, \
                 greatest(statement_timestamp() + make_interval(secs => $2), \
                   greatest(p.created_at, p.last_write_at) + make_interval(secs => $3)) AS look_at \
               FROM unnest($1::bigint[]) AS u (id) LEFT JOIN queen.log_partitions p \
                 ON p.id = ANY (ARRAY[u.id])), \
             forgotten AS (DELETE FROM queen.empty_partitions e USING stays s \
               WHERE e.partition_id = ANY (ARRAY[s.id]) AND s.forget) \
             UPDATE queen.empty_partitions e SET look_at = s.look_at FROM stays s \
             WHERE e.partition_id = ANY (ARRAY[s.id]) AND NOT s.forget",
        )
        .bind(candidates.iter().filter(|id| !gone.contains(id)).copied().collect::<Vec<_>>())
        .bind(LOOK_AGAIN_SECONDS)
        .bind(age.as_secs_f64())
        .execute(&mut *tx)
        .timed("removing partitions")
        .await?;
        tx.commit().timed("commit of retention").await?;
        Ok((candidates.len() as u64, queues.into_iter().map(QueueId).collect()))
    }
}
