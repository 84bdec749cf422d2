//! Cursors moved by an operator (`spec/admin.md` §7.5): the only writes that may take a cursor back (I1).

use chrono::{DateTime, Utc};
use sqlx::{Postgres, Row, Transaction};

use super::Store;
use super::cursors::consumed;
use super::error::{During, StoreResult, Timed};
use crate::ids::{GroupId, PartitionId, QueueId};

/// Where a seek puts the cursors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeekTo {
    /// Behind the last message.
    End,
    /// Before the first retained segment committed at or after this instant; behind the last message if there is none.
    Timestamp(DateTime<Utc>),
}

/// What a seek moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sought {
    /// The queue.
    pub queue: QueueId,
    /// The group; it has a row now, if it had none.
    pub group: GroupId,
    /// Partitions that the seek names, whether or not their cursor was elsewhere before.
    pub partitions: i64,
    /// The one partition of a seek by partition name.
    pub partition: Option<PartitionId>,
}

/// The whole of a seek is one statement over the partitions in id order: key-share locks keep them from being cleaned up,
/// then the cursors are written in the same order (the global lock order). Nothing of a push is in its way.
///
/// Commit times are monotone along the offsets (I7), so a place is found by bisection, and most of them without: before
/// everything retained, or behind the last write. A cursor that is already there, with nothing leased or charged, is left alone.
macro_rules! seek_sql {
    ($which:literal) => {
        concat!(
            "WITH RECURSIVE lanes AS MATERIALIZED ( \
               SELECT p.id, p.log_start, p.last_offset, p.last_write_at FROM queen.log_partitions p WHERE ",
            $which,
            " ORDER BY p.id FOR KEY SHARE), \
             places AS ( \
               SELECT l.id, CASE \
                 WHEN $3::timestamptz IS NULL OR l.last_write_at < $3 THEN l.last_offset \
                 WHEN (SELECT s.created_at FROM queen.log_segments s WHERE s.partition_id = l.id \
                       AND s.base_offset >= l.log_start ORDER BY s.base_offset LIMIT 1) >= $3 THEN l.log_start - 1 \
                 ELSE ( \
                   WITH RECURSIVE search (low, high) AS ( \
                     SELECT l.log_start, l.last_offset + 1 \
                     UNION ALL \
                     SELECT CASE WHEN s.created_at >= $3 THEN low ELSE s.base_offset + s.message_count END, \
                       CASE WHEN s.created_at >= $3 THEN greatest(s.base_offset, low) ELSE high END \
                     FROM search CROSS JOIN LATERAL ( \
                       SELECT * FROM queen.log_segments s WHERE s.partition_id = l.id \
                         AND s.base_offset <= (low + high) / 2 ORDER BY s.base_offset DESC LIMIT 1) s \
                     WHERE low < high) \
                   SELECT min(high) - 1 FROM search) END AS committed \
               FROM lanes l), \
             moved AS ( \
               INSERT INTO queen.log_consumers AS c (partition_id, group_id, committed) \
               SELECT id, $2, committed FROM places ORDER BY id \
               ON CONFLICT (partition_id, group_id) DO UPDATE SET committed = excluded.committed, \
                 total_consumed = ", consumed!(), ", \
                 batch_retry_count = 0, attempts = NULL, attempt_start = NULL, attempt_end = NULL, batch_end = NULL, \
                 worker_id = NULL, lease_expires_at = NULL, lease_acquired_at = NULL, not_before = NULL \
               WHERE (c.committed, c.batch_retry_count) IS DISTINCT FROM (excluded.committed, 0) \
                 OR num_nonnulls(c.batch_end, c.worker_id, c.not_before, c.attempts, c.attempt_start, c.attempt_end) > 0) \
             SELECT count(*) AS partitions, min(id) AS first FROM lanes"
        )
    };
}

const SEEK_QUEUE: &str = seek_sql!("p.queue_id = $1 AND $4::text IS NULL");
const SEEK_PARTITION: &str = seek_sql!("p.queue_id = $1 AND p.name = $4");

impl Store {
    /// Moves the group's cursors of a queue, or of one partition of it, in one transaction, durably: what was leased is
    /// abandoned, what was charged is forgiven (I13). `None`, and nothing written, if there is no such partition.
    pub async fn seek(
        &self,
        queue: &str,
        partition: Option<&str>,
        group: &str,
        to: SeekTo,
    ) -> StoreResult<Option<Sought>> {
        let mut tx = self.pool.begin().timed("seek").await?;
        let Some(queue) = lock_queue(&mut tx, queue).await? else { return Ok(None) };
        let group = lock_or_create_group(&mut tx, queue, group).await?;
        let at = match to {
            SeekTo::End => None,
            SeekTo::Timestamp(at) => Some(at),
        };
        let row = sqlx::query(if partition.is_some() { SEEK_PARTITION } else { SEEK_QUEUE })
            .bind(queue.0)
            .bind(group.0)
            .bind(at)
            .bind(partition)
            .fetch_one(&mut *tx)
            .timed("seek")
            .await?;
        let partitions: i64 = row.try_get("partitions").during("seek")?;
        if partitions == 0 {
            tx.rollback().timed("seek").await?;
            return Ok(None);
        }
        tx.commit().timed("commit of seek").await?;
        let first: Option<i64> = row.try_get("first").during("seek")?;
        let partition = if partition.is_some() { first.map(PartitionId) } else { None };
        Ok(Some(Sought { queue, group, partitions, partition }))
    }
}

/// Finds the queue and keeps it from being deleted. An operator's statement may visit a million rows, so the transaction may
/// take longer than those of clients.
async fn lock_queue(tx: &mut Transaction<'static, Postgres>, name: &str) -> StoreResult<Option<QueueId>> {
    let id: Option<i32> = sqlx::query_scalar(
        "SELECT id FROM queen.queues CROSS JOIN (SELECT set_config('statement_timeout', '600000', true)) patience \
         WHERE tenant = queen.default_tenant() AND name = $1 FOR KEY SHARE OF queues",
    )
    .bind(name)
    .fetch_optional(&mut **tx)
    .timed("seek")
    .await?;
    Ok(id.map(QueueId))
}

/// The group's row, locked against deletion and against another seek. One that is made here is not registered: its first
/// pop does that, and the cursors written here stand (`spec/admin.md` §17 no. 7).
async fn lock_or_create_group(
    tx: &mut Transaction<'static, Postgres>,
    queue: QueueId,
    name: &str,
) -> StoreResult<GroupId> {
    let id: i32 = sqlx::query_scalar(
        "INSERT INTO queen.consumer_groups AS g (queue_id, name) VALUES ($1, $2) \
         ON CONFLICT (queue_id, name) DO UPDATE SET conflation = g.conflation RETURNING id",
    )
    .bind(queue.0)
    .bind(name)
    .fetch_one(&mut **tx)
    .timed("seek")
    .await?;
    Ok(GroupId(id))
}
