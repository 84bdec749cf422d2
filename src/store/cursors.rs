//! Claims on the cursors of (partition, group): take a lease, extend it, shrink it, or commit at once (`autoAck`).

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgExecutor, Postgres, Row, Transaction};
use uuid::Uuid;

use super::Store;
use super::error::{During, StoreResult, Timed};
use super::messages::{self, SegmentRow, Span};
use crate::ids::{GroupId, LeaseId, LeaseScope, Offset, PartitionId};

/// Longest lease in seconds (`spec/push-pop.md` §14 no. 14): guards the date arithmetic.
pub const LEASE_SECONDS_MAX: i64 = 10 * 365 * 86_400;

/// What one claim call asks for.
#[derive(Clone, Copy, Debug)]
pub struct ClaimRequest<'a> {
    /// The group, and through it the queue.
    pub group: GroupId,
    /// Partitions to try, in this order, each with the worker that its lease would get.
    pub candidates: &'a [(PartitionId, LeaseId)],
    /// Most messages over all partitions.
    pub messages_max: i64,
    /// Most partitions to claim.
    pub partitions_max: i64,
    /// Lease length in seconds, 1 to [`LEASE_SECONDS_MAX`].
    pub lease_seconds: i64,
    /// `delayedProcessing` in seconds, `<= 0` off.
    pub delay_seconds: i32,
    /// `windowBuffer` in seconds, `<= 0` off.
    pub window_seconds: i32,
    /// Messages that release a `windowBuffer` partition early.
    pub window_messages: i64,
}

/// A span that this call owns now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    /// The partition.
    pub partition: PartitionId,
    /// Its name.
    pub name: String,
    /// Cursor at the claim.
    pub committed: Offset,
    /// First offset to deliver.
    pub first: Offset,
    /// Last offset to deliver.
    pub last: Offset,
    /// The worker, as asked for.
    pub worker: LeaseId,
    /// `deliveryAttempt` of every message of the span.
    pub attempt: i32,
    /// Whether it is leased (else committed at once).
    pub is_leased: bool,
}

/// What became of one candidate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimOutcome {
    /// Claimed; `more` says whether messages above the span were waiting.
    Claimed(Claimed, bool),
    /// Nothing above the cursor.
    Empty,
    /// Retention took everything above the cursor: it is to be moved to the end ([`Store::seal_cursors`]).
    Emptied,
    /// Leased, held back (`retryDelay`, `delayedProcessing`, `windowBuffer`) or locked by another claim: worth another
    /// look after this time.
    NotYet(Duration),
    /// The group has no cursor here yet.
    Unmet,
    /// Eligible, but the budget was used up by the candidates before it.
    LeftOver,
    /// No such partition any more.
    Gone,
}

macro_rules! claim_sql {
    ($set:literal) => {
        concat!(
            "WITH u AS ( \
               SELECT * FROM unnest($1::bigint[], $2::uuid[]) WITH ORDINALITY AS u (partition_id, worker_id, ord)), \
             seen AS MATERIALIZED ( \
               SELECT u.*, p.id IS NOT NULL AS exists, c.partition_id IS NOT NULL AS met, \
                 p.name, p.last_offset, v.visible_end, v.next_visible_at, \
                 greatest(c.committed, p.log_start - 1) + 1 AS first, \
                 p.log_start > p.last_offset AND c.committed < p.last_offset AS emptied, \
                 CASE WHEN c.worker_id IS NOT NULL AND c.lease_expires_at > clock_timestamp() \
                   THEN c.lease_expires_at END AS leased_until, \
                 CASE WHEN c.not_before > clock_timestamp() THEN c.not_before END AS not_before, \
                 CASE WHEN $8 > 0 AND greatest(c.committed, p.log_start - 1) >= coalesce(c.attempt_end, -1) \
                      AND v.visible_end - greatest(c.committed, p.log_start - 1) < $9 THEN ( \
                   SELECT s.created_at + make_interval(secs => $8) FROM queen.log_segments s \
                   WHERE s.partition_id = u.partition_id AND s.base_offset <= greatest(c.committed, p.log_start - 1) + 1 \
                   ORDER BY s.base_offset DESC LIMIT 1) END AS window_end \
               FROM u \
               LEFT JOIN queen.log_partitions p ON p.id = u.partition_id \
               LEFT JOIN queen.log_consumers c ON c.partition_id = u.partition_id AND c.group_id = $3 \
               LEFT JOIN LATERAL ( \
                 SELECT CASE WHEN $7 <= 0 THEN p.last_offset ELSE coalesce(( \
                     SELECT s.base_offset + s.message_count - 1 FROM queen.log_segments s \
                     WHERE s.partition_id = u.partition_id \
                       AND s.created_at <= clock_timestamp() - make_interval(secs => $7) \
                     ORDER BY s.base_offset DESC LIMIT 1), p.log_start - 1) END AS visible_end, \
                   CASE WHEN $7 > 0 THEN ( \
                     SELECT s.created_at + make_interval(secs => $7) FROM queen.log_segments s \
                     WHERE s.partition_id = u.partition_id AND s.base_offset > c.committed \
                       AND s.created_at > clock_timestamp() - make_interval(secs => $7) \
                     ORDER BY s.base_offset LIMIT 1) END AS next_visible_at \
               ) v ON true), \
             locked AS MATERIALIZED ( \
               SELECT c.partition_id, c.committed, s.worker_id, s.ord, \
                 greatest(c.committed + 1, s.first) AS first, s.visible_end \
               FROM seen s JOIN queen.log_consumers c ON c.partition_id = s.partition_id AND c.group_id = $3 \
               WHERE s.leased_until IS NULL AND s.not_before IS NULL \
                 AND (s.window_end IS NULL OR s.window_end <= clock_timestamp()) \
                 AND (c.worker_id IS NULL OR c.lease_expires_at <= clock_timestamp()) \
                 AND (c.not_before IS NULL OR c.not_before <= clock_timestamp()) \
                 AND s.visible_end >= greatest(c.committed + 1, s.first) \
               ORDER BY c.partition_id FOR NO KEY UPDATE OF c SKIP LOCKED), \
             sized AS ( \
               SELECT *, visible_end - first + 1 AS available, row_number() OVER (ORDER BY ord) AS rank, \
                 sum(visible_end - first + 1) OVER (ORDER BY ord) - (visible_end - first + 1) AS before \
               FROM locked), \
             taken AS ( \
               SELECT partition_id, worker_id, first, first + least(available, $4 - before)::bigint - 1 AS last \
               FROM sized WHERE before < $4 AND rank <= $5), \
             claimed AS ( \
               UPDATE queen.log_consumers c SET ",
            $set,
            " FROM taken t, (SELECT committed AS was, partition_id AS of FROM locked) o \
               WHERE c.partition_id = t.partition_id AND c.group_id = $3 AND o.of = c.partition_id \
               RETURNING c.partition_id, o.was AS committed, t.first, t.last, t.worker_id, c.attempts, c.worker_id IS NOT NULL AS leased) \
             SELECT s.partition_id, s.name, s.exists, s.met, s.emptied, s.first IS NOT NULL AND s.last_offset >= s.first AS pending, \
               s.last_offset, l.partition_id IS NOT NULL AS locked, \
               k.committed, k.first, k.last, k.worker_id, k.attempts, k.leased, \
               extract(epoch FROM coalesce(s.leased_until, s.not_before, \
                 CASE WHEN s.window_end > clock_timestamp() THEN s.window_end END, s.next_visible_at) \
                 - clock_timestamp())::float8 AS wait_seconds \
             FROM seen s LEFT JOIN locked l USING (partition_id) LEFT JOIN claimed k USING (partition_id) \
             ORDER BY s.ord"
        )
    };
}

const CLAIM_LEASED: &str = claim_sql!(
    "worker_id = t.worker_id, batch_end = t.last, lease_acquired_at = clock_timestamp(), \
     lease_expires_at = clock_timestamp() + make_interval(secs => $6), not_before = NULL, \
     attempts = CASE WHEN c.attempt_start = t.first THEN c.attempts + 1 ELSE 1 END, attempt_start = t.first, attempt_end = t.last"
);
const CLAIM_AUTO_ACK: &str = claim_sql!(
    "committed = t.last, total_consumed = c.total_consumed + (t.last - c.committed), batch_retry_count = 0, \
     worker_id = NULL, batch_end = NULL, lease_expires_at = NULL, not_before = NULL, attempts = 1, \
     lease_acquired_at = clock_timestamp() - make_interval(secs => 0 * $6), attempt_start = NULL, attempt_end = NULL"
);

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
    /// Claims what can be claimed among the candidates and leases it, in one statement that commits asynchronously.
    /// Never waits for another claim: a locked row is skipped.
    pub async fn claim(&self, request: &ClaimRequest<'_>) -> StoreResult<Vec<(PartitionId, ClaimOutcome)>> {
        run_claim(&self.claims, CLAIM_LEASED, request).await
    }

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
               FROM held h WHERE c.partition_id = h.partition_id AND c.group_id = h.group_id \
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
            "WITH held AS MATERIALIZED ( \
               SELECT c.partition_id, u.batch_end FROM unnest($3::bigint[], $4::bigint[]) AS u (partition_id, batch_end) \
               JOIN queen.log_consumers c ON c.partition_id = u.partition_id AND c.group_id = $1 \
               WHERE c.worker_id = $2 ORDER BY c.partition_id FOR NO KEY UPDATE OF c) \
             UPDATE queen.log_consumers c SET batch_end = h.batch_end, \
               worker_id = CASE WHEN h.batch_end IS NULL THEN NULL ELSE c.worker_id END, \
               lease_expires_at = CASE WHEN h.batch_end IS NULL THEN NULL ELSE c.lease_expires_at END \
             FROM held h WHERE c.partition_id = h.partition_id AND c.group_id = $1",
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

    /// Moves the group's cursors of partitions that retention has emptied to their ends, so that they stop looking pending
    /// (`spec/push-pop.md` §7.5 no. 4). A live lease keeps its cursor.
    pub async fn seal_cursors(&self, group: GroupId, partitions: &[PartitionId]) -> StoreResult<()> {
        let ids: Vec<i64> = partitions.iter().map(|p| p.0).collect();
        sqlx::query(
            "WITH emptied AS MATERIALIZED ( \
               SELECT c.partition_id, p.last_offset FROM queen.log_consumers c \
               JOIN queen.log_partitions p ON p.id = c.partition_id \
               WHERE c.partition_id = ANY($2) AND c.group_id = $1 AND p.log_start > p.last_offset \
                 AND c.committed < p.last_offset \
                 AND (c.worker_id IS NULL OR c.lease_expires_at <= clock_timestamp()) \
               ORDER BY c.partition_id FOR NO KEY UPDATE OF c SKIP LOCKED) \
             UPDATE queen.log_consumers c SET committed = e.last_offset, worker_id = NULL, batch_end = NULL, \
               lease_expires_at = NULL \
             FROM emptied e WHERE c.partition_id = e.partition_id AND c.group_id = $1",
        )
        .bind(group.0)
        .bind(ids)
        .execute(&self.pool)
        .timed("sealing cursors")
        .await?;
        Ok(())
    }

    /// Messages that a claim would find now in these partitions, without taking anything (`minPopWaitTime`).
    pub async fn count_deliverable(&self, group: GroupId, partitions: &[PartitionId]) -> StoreResult<i64> {
        let ids: Vec<i64> = partitions.iter().map(|p| p.0).collect();
        sqlx::query_scalar(
            "SELECT coalesce(sum(p.last_offset - greatest(c.committed, p.log_start - 1)), 0)::bigint \
             FROM unnest($1::bigint[]) AS u (id) JOIN queen.log_partitions p ON p.id = u.id \
             LEFT JOIN queen.log_consumers c ON c.partition_id = p.id AND c.group_id = $2 \
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
        run_claim(&mut *self.tx, CLAIM_AUTO_ACK, request).await
    }

    /// Reads what was claimed.
    pub async fn read_segments(&mut self, spans: &[Span], bytes_max: i64) -> StoreResult<Vec<SegmentRow>> {
        messages::read_segments(&mut *self.tx, spans, bytes_max).await
    }

    /// Puts a cursor back to where the delivery really ended: the size limit of an answer took the rest.
    pub async fn shrink(&mut self, group: GroupId, ends: &[(PartitionId, Offset)]) -> StoreResult<()> {
        let (ids, ends): (Vec<i64>, Vec<i64>) = ends.iter().map(|(p, end)| (p.0, end.0)).unzip();
        sqlx::query(
            "UPDATE queen.log_consumers c SET total_consumed = c.total_consumed - (c.committed - u.committed), \
               committed = u.committed \
             FROM unnest($2::bigint[], $3::bigint[]) AS u (partition_id, committed) \
             WHERE c.partition_id = u.partition_id AND c.group_id = $1 AND u.committed < c.committed",
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

async fn run_claim<'e>(
    executor: impl PgExecutor<'e>,
    sql: &'static str,
    request: &ClaimRequest<'_>,
) -> StoreResult<Vec<(PartitionId, ClaimOutcome)>> {
    let (ids, workers): (Vec<i64>, Vec<Uuid>) = request.candidates.iter().map(|(p, w)| (p.0, w.0)).unzip();
    let rows = sqlx::query(sql)
        .bind(ids)
        .bind(workers)
        .bind(request.group.0)
        .bind(request.messages_max)
        .bind(request.partitions_max)
        .bind(request.lease_seconds as f64)
        .bind(f64::from(request.delay_seconds))
        .bind(f64::from(request.window_seconds))
        .bind(request.window_messages)
        .fetch_all(executor)
        .timed("claiming")
        .await?;
    rows.iter().map(outcome_of).collect::<Result<_, _>>().during("claiming")
}

/// How long to leave a row alone that another claim holds locked: the length of a claim.
const LOCKED_RETRY: Duration = Duration::from_millis(20);

fn outcome_of(row: &PgRow) -> Result<(PartitionId, ClaimOutcome), sqlx::Error> {
    let partition = PartitionId(row.try_get("partition_id")?);
    let outcome = if let Some(worker) = row.try_get::<Option<Uuid>, _>("worker_id")? {
        let last: i64 = row.try_get("last")?;
        let claimed = Claimed {
            partition,
            name: row.try_get("name")?,
            committed: Offset(row.try_get("committed")?),
            first: Offset(row.try_get("first")?),
            last: Offset(last),
            worker: LeaseId(worker),
            attempt: row.try_get("attempts")?,
            is_leased: row.try_get("leased")?,
        };
        ClaimOutcome::Claimed(claimed, row.try_get::<i64, _>("last_offset")? > last)
    } else if !row.try_get::<bool, _>("exists")? {
        ClaimOutcome::Gone
    } else if !row.try_get::<bool, _>("met")? {
        ClaimOutcome::Unmet
    } else if !row.try_get::<bool, _>("pending")? {
        if row.try_get::<bool, _>("emptied")? { ClaimOutcome::Emptied } else { ClaimOutcome::Empty }
    } else if row.try_get::<bool, _>("locked")? {
        ClaimOutcome::LeftOver
    } else {
        let seconds: Option<f64> = row.try_get("wait_seconds")?;
        let wait = seconds.filter(|s| *s > 0.0).and_then(|s| Duration::try_from_secs_f64(s).ok());
        ClaimOutcome::NotYet(wait.unwrap_or(LOCKED_RETRY))
    };
    Ok((partition, outcome))
}
