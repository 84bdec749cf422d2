//! Positional advances: the one write of the fast path, for one fully covered batch or many (`spec/ack.md` §7).
//!
//! An advance names everything that must be unchanged, so it lands at most once however often it is sent.

use sqlx::Connection;

use super::Store;
use super::acks::attempt_behind;
use super::error::{StoreError, StoreResult, Timed};
use crate::ids::{GroupId, LeaseId, Offset, PartitionId};

/// One fully covered batch: the cursor goes to the end of the leased span, if the lease is what it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PositionalAdvance {
    /// Partition.
    pub partition: PartitionId,
    /// Group.
    pub group: GroupId,
    /// Lease holder.
    pub worker: LeaseId,
    /// Cursor at the claim; must be unchanged.
    pub committed: Offset,
    /// End of the leased span; must be unchanged.
    pub batch_end: Offset,
}

/// The hashes must not have been purged under the lease: resolution would answer *unresolvable* then (I6).
macro_rules! unpurged {
    () => {
        "EXISTS (SELECT 1 FROM queen.log_partitions p WHERE p.id = ANY (ARRAY[c.partition_id]) AND p.txns_start <= c.committed + 1)"
    };
}
/// Nothing that the one advance names has changed.
macro_rules! one_lease {
    () => {
        concat!(
            "c.partition_id = $1 AND c.group_id = $2 AND c.worker_id = $3 AND c.committed = $4 AND c.batch_end = $5 AND ",
            unpurged!()
        )
    };
}
macro_rules! advance_set {
    ($end:literal) => {
        concat!(
            "UPDATE queen.log_consumers c SET committed = ",
            $end,
            ", total_consumed = c.total_consumed + (",
            $end,
            " - c.committed), batch_retry_count = 0, batch_end = NULL, worker_id = NULL, lease_expires_at = NULL, \
             lease_acquired_at = NULL, not_before = NULL, ",
            attempt_behind!($end),
            " "
        )
    };
}

const ADVANCE_ONE: &str =
    concat!(advance_set!("$5"), "WHERE c.lease_expires_at > clock_timestamp() AND ", one_lease!());

/// The same for a row that may be locked.
const ADVANCE_ONE_UNLOCKED: &str = concat!(
    "WITH locked AS MATERIALIZED ( SELECT c.ctid AS place FROM queen.log_consumers c WHERE ",
    one_lease!(),
    " FOR NO KEY UPDATE OF c SKIP LOCKED) ",
    advance_set!("$5"),
    "FROM locked l WHERE c.ctid = l.place AND c.lease_expires_at > clock_timestamp()"
);

/// A locked row is found again by its place, not by a second descent of the index. One that changed while its lock was waited for
/// (an extended lease) has a place that this statement cannot see yet: it counts as refused, and resolution takes it.
macro_rules! advance_many {
    ($lock:literal) => {
        concat!(
            "WITH locked AS MATERIALIZED ( \
               SELECT c.ctid AS place, c.batch_end, c.lease_expires_at, u.ord \
               FROM unnest($1::bigint[], $2::int[], $3::uuid[], $4::bigint[], $5::bigint[]) WITH ORDINALITY \
                 AS u (partition_id, group_id, worker_id, committed, batch_end, ord) \
               JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[u.partition_id]) AND c.group_id = u.group_id \
               WHERE c.worker_id = u.worker_id AND c.committed = u.committed AND c.batch_end = u.batch_end AND ",
            unpurged!(),
            " ORDER BY u.partition_id, u.group_id ",
            $lock,
            "), advanced AS (",
            advance_set!("l.batch_end"),
            "FROM locked l WHERE c.ctid = l.place AND l.lease_expires_at > clock_timestamp() RETURNING l.ord) \
             SELECT array_agg(ord) FROM advanced"
        )
    };
}

const ADVANCE_MANY: &str = advance_many!("FOR NO KEY UPDATE OF c");
const ADVANCE_UNLOCKED: &str = advance_many!("FOR NO KEY UPDATE OF c SKIP LOCKED");

/// What an advance does about a row that somebody else has locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnLocked {
    /// Waits, up to the server's lock and statement timeouts.
    Wait,
    /// Leaves it out, as if refused.
    Skip,
}

impl Store {
    /// Advances every row whose lease is still what it was, durably, in one statement that locks in (partition, group)
    /// order. One flag per row, in order: advanced, or refused and untouched.
    pub async fn advance(&self, rows: &[PositionalAdvance], on_locked: OnLocked) -> StoreResult<Vec<bool>> {
        let mut advanced = vec![false; rows.len()];
        if let [one] = rows {
            let sql = match on_locked {
                OnLocked::Wait => ADVANCE_ONE,
                OnLocked::Skip => ADVANCE_ONE_UNLOCKED,
            };
            let done = sqlx::query(sql)
                .bind(one.partition.0)
                .bind(one.group.0)
                .bind(one.worker.0)
                .bind(one.committed.0)
                .bind(one.batch_end.0)
                .execute(&self.pool)
                .timed("ack flush")
                .await?;
            advanced[0] = done.rows_affected() == 1;
            return Ok(advanced);
        }
        let sql = match on_locked {
            OnLocked::Wait => ADVANCE_MANY,
            OnLocked::Skip => ADVANCE_UNLOCKED,
        };
        let mut connection = self.pool.acquire().timed("ack flush").await?;
        let ordinals: Result<Option<Vec<i64>>, _> = sqlx::query_scalar(sql)
            .bind(rows.iter().map(|r| r.partition.0).collect::<Vec<_>>())
            .bind(rows.iter().map(|r| r.group.0).collect::<Vec<_>>())
            .bind(rows.iter().map(|r| r.worker.0).collect::<Vec<_>>())
            .bind(rows.iter().map(|r| r.committed.0).collect::<Vec<_>>())
            .bind(rows.iter().map(|r| r.batch_end.0).collect::<Vec<_>>())
            .fetch_one(&mut *connection)
            .timed("ack flush")
            .await;
        if matches!(ordinals, Err(StoreError::Refused { .. })) {
            // The server reports an error before it rolls back. Once it answers again the locks are gone: a caller that tries
            // parts of these rows finds them free. A broken connection is met there, too.
            let _ = connection.ping().await;
        }
        for ordinal in ordinals?.unwrap_or_default() {
            if let Some(flag) = usize::try_from(ordinal - 1).ok().and_then(|nth| advanced.get_mut(nth)) {
                *flag = true;
            }
        }
        Ok(advanced)
    }
}
