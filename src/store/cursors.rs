//! Leases on the cursors of (partition, group) after their claim: extended, shrunk, listed; and the transaction of `autoAck`.

use chrono::{DateTime, Utc};
use sqlx::{Postgres, Row, Transaction};

use super::Store;
use super::claims::{self, ClaimOutcome, ClaimRequest};
use super::error::{During, StoreResult, Timed};
use super::messages::{self, SegmentRow, Span};
use crate::ids::{GroupId, LeaseId, LeaseScope, Offset, PartitionId};

/// Longest lease in seconds (`spec/push-pop.md` §14 no. 14): guards the date arithmetic.
pub const LEASE_SECONDS_MAX: i64 = 10 * 365 * 86_400;

/// Messages that the group of cursor `c` has consumed: all below it, unless the row says a number.
macro_rules! consumed {
    () => {
        "coalesce(c.total_consumed, c.committed + 1)"
    };
}
pub(super) use consumed;

/// The transaction of an `autoAck` pop: what it reads is committed with the cursor, or not at all (I11).
#[derive(Debug)]
pub struct AutoAckTx {
    tx: Transaction<'static, Postgres>,
}

/// Expiries after an extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extended {
    /// Partitions of the lease, whether or not they were still held.
    pub partitions: Vec<PartitionId>,
    /// Rows extended.
    pub renewed: i64,
    /// The earliest expiry among them.
    pub expires_at: Option<DateTime<Utc>>,
}

impl Store {
    /// Opens the transaction of an `autoAck` pop.
    pub async fn begin_auto_ack(&self) -> StoreResult<AutoAckTx> {
        Ok(AutoAckTx { tx: self.pool.begin().timed("begin of pop").await? })
    }

    /// Lists the partitions of a lease that spans several, so that it can be extended from any broker.
    pub async fn record_lease(&self, worker: LeaseId, partitions: &[PartitionId], seconds: i64) -> StoreResult<()> {
        let ids: Vec<i64> = partitions.iter().map(|p| p.0).collect();
        sqlx::query(
            "INSERT INTO queen.leases (id, partition_ids, expires_at) \
             VALUES ($1, $2, clock_timestamp() + make_interval(secs => $3))",
        )
        .bind(worker.0)
        .bind(ids)
        .bind(seconds as f64)
        .execute(&self.claims)
        .timed("recording a lease")
        .await?;
        Ok(())
    }

    /// Forgets up to `rows_max` lists of leases that ended more than an hour ago. Answers how many went.
    pub async fn purge_leases(&self, rows_max: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM queen.leases WHERE id IN ( \
               SELECT id FROM queen.leases WHERE expires_at < clock_timestamp() - interval '1 hour' \
               ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED)",
        )
        .bind(rows_max)
        .execute(&self.pool)
        .timed("purging leases")
        .await?;
        Ok(done.rows_affected())
    }

    /// Extends every live row of the lease to at least `now + seconds`; never shortens, never revives
    /// (`spec/push-pop.md` §8).
    pub async fn extend_lease(&self, worker: LeaseId, seconds: i64) -> StoreResult<Extended> {
        let one = match self.ids().scope_of(worker) {
            LeaseScope::One(partition) => vec![partition.0],
            LeaseScope::Many => sqlx::query_scalar::<_, Vec<i64>>(
                "UPDATE queen.leases SET expires_at = greatest(expires_at, \
                   clock_timestamp() + make_interval(secs => $2)) WHERE id = $1 RETURNING partition_ids",
            )
            .bind(worker.0)
            .bind(seconds as f64)
            .fetch_optional(&self.pool)
            .timed("extending a lease")
            .await?
            .unwrap_or_default(),
        };
        let row = sqlx::query(
            "WITH held AS MATERIALIZED ( \
               SELECT partition_id, group_id FROM queen.log_consumers \
               WHERE partition_id = ANY($1) AND worker_id = $2 AND lease_expires_at > clock_timestamp() \
               ORDER BY partition_id, group_id FOR NO KEY UPDATE), \
             extended AS ( \
               UPDATE queen.log_consumers c SET lease_expires_at = greatest(c.lease_expires_at, \
                 clock_timestamp() + make_interval(secs => $3)) \
               FROM held h WHERE c.partition_id = ANY (ARRAY[h.partition_id]) AND c.group_id = h.group_id \
               RETURNING c.lease_expires_at) \
             SELECT count(*) AS renewed, min(lease_expires_at) AS expires_at FROM extended",
        )
        .bind(&one)
        .bind(worker.0)
        .bind(seconds as f64)
        .fetch_one(&self.pool)
        .timed("extending a lease")
        .await?;
        Ok(Extended {
            partitions: one.into_iter().map(PartitionId).collect(),
            renewed: row.try_get("renewed").during("extending a lease")?,
            expires_at: row.try_get("expires_at").during("extending a lease")?,
        })
    }

    /// Makes leases end where their delivery really ended (`Some`), or gives them up when nothing could be delivered
    /// (`None`): retention or the size limit of an answer took the rest.
    pub async fn shrink_leases(
        &self,
        group: GroupId,
        worker: LeaseId,
        ends: &[(PartitionId, Option<Offset>)],
    ) -> StoreResult<()> {
        let ids: Vec<i64> = ends.iter().map(|(p, _)| p.0).collect();
        let ends: Vec<Option<i64>> = ends.iter().map(|(_, end)| end.map(|o| o.0)).collect();
        sqlx::query(
            "WITH u AS MATERIALIZED ( \
               SELECT partition_id, batch_end, $1::int AS group_id \
               FROM unnest($3::bigint[], $4::bigint[]) AS u (partition_id, batch_end)), \
             held AS MATERIALIZED ( \
               SELECT u.* FROM u JOIN queen.log_consumers c \
                 ON c.partition_id = ANY (ARRAY[u.partition_id]) AND c.group_id = u.group_id \
               WHERE c.worker_id = $2 ORDER BY u.partition_id FOR NO KEY UPDATE OF c) \
             UPDATE queen.log_consumers c SET batch_end = h.batch_end, \
               worker_id = CASE WHEN h.batch_end IS NULL THEN NULL ELSE c.worker_id END, \
               lease_expires_at = CASE WHEN h.batch_end IS NULL THEN NULL ELSE c.lease_expires_at END \
             FROM held h WHERE c.partition_id = ANY (ARRAY[h.partition_id]) AND c.group_id = h.group_id",
        )
        .bind(group.0)
        .bind(worker.0)
        .bind(ids)
        .bind(ends)
        .execute(&self.pool)
        .timed("shrinking a lease")
        .await?;
        Ok(())
    }

    /// Messages that a claim would find now in these partitions, without taking anything (`minPopWaitTime`).
    pub async fn count_deliverable(&self, group: GroupId, partitions: &[PartitionId]) -> StoreResult<i64> {
        let ids: Vec<i64> = partitions.iter().map(|p| p.0).collect();
        sqlx::query_scalar(
            "SELECT coalesce(sum(p.last_offset - greatest(c.committed, p.log_start - 1)), 0)::bigint \
             FROM (SELECT id, $2::int AS group_id FROM unnest($1::bigint[]) AS u (id) OFFSET 0) u \
             JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.id]) \
             LEFT JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[u.id]) AND c.group_id = u.group_id \
             WHERE c.worker_id IS NULL OR c.lease_expires_at <= clock_timestamp()",
        )
        .bind(ids)
        .bind(group.0)
        .fetch_one(&self.pool)
        .timed("counting deliverable messages")
        .await
    }
}

impl AutoAckTx {
    /// Moves the cursors of what can be claimed; nothing is leased.
    pub async fn claim(&mut self, request: &ClaimRequest<'_>) -> StoreResult<Vec<(PartitionId, ClaimOutcome)>> {
        Ok(claims::commit_at_once(&mut *self.tx, request).await?.pop().unwrap_or_default())
    }

    /// Reads what was claimed.
    pub async fn read_segments(&mut self, spans: &[Span], bytes_max: i64) -> StoreResult<Vec<Vec<SegmentRow>>> {
        messages::read_segments(&mut *self.tx, spans, bytes_max).await
    }

    /// Puts a cursor back to where the delivery really ended: the size limit of an answer took the rest.
    pub async fn shrink(&mut self, group: GroupId, ends: &[(PartitionId, Offset)]) -> StoreResult<()> {
        let (ids, ends): (Vec<i64>, Vec<i64>) = ends.iter().map(|(p, end)| (p.0, end.0)).unzip();
        sqlx::query(
            "WITH u AS MATERIALIZED ( \
               SELECT partition_id, committed, $1::int AS group_id \
               FROM unnest($2::bigint[], $3::bigint[]) AS u (partition_id, committed)) \
             UPDATE queen.log_consumers c SET total_consumed = c.total_consumed - (c.committed - u.committed), \
               committed = u.committed FROM u \
             WHERE c.partition_id = ANY (ARRAY[u.partition_id]) AND c.group_id = u.group_id AND u.committed < c.committed",
        )
        .bind(group.0)
        .bind(ids)
        .bind(ends)
        .execute(&mut *self.tx)
        .timed("shrinking an automatic ack")
        .await?;
        Ok(())
    }

    /// Commits cursor and reading together.
    pub async fn commit(self) -> StoreResult<()> {
        self.tx.commit().timed("commit of pop").await
    }
}
