//! Acks on the cursors: what an ack is judged by, the guarded write that carries it out, and the positional advances
//! of the fast path.
//!
//! **No lock is held across a round trip.** An ack reads row, policy and hashes in one statement, is decided in Rust, and
//! is written by one statement that locks the row and changes it only if everything the decision rested on still holds
//! ([`Guard`]: cursor, lease holder, span, retry count, and whether the lease is live by the database clock). If not, the
//! caller reads again. A write that lands therefore equals one decided under the row lock; a write whose answer was lost
//! may be sent again, because it cannot land twice.

use std::time::Duration;

use sqlx::postgres::PgRow;
use sqlx::{PgExecutor, Row};
use uuid::Uuid;

use super::Store;
use super::dead_letters::NewDeadLetter;
use super::error::{During, StoreError, StoreResult, Timed};
use crate::ids::{GroupId, LeaseId, Offset, PartitionId, TransactionHash};

/// One row of the hash index: the hashes of consecutive messages, packed in offset order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashRow {
    /// Offset of the first hash.
    pub base: Offset,
    /// 16 bytes per message.
    pub packed: Vec<u8>,
}

impl HashRow {
    /// The last offset of the row.
    pub fn last(&self) -> Offset {
        Offset(self.base.0 + (self.packed.len() / TransactionHash::BYTES) as i64 - 1)
    }
}

/// The lease id that came with an ack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseClaim {
    /// None: no check.
    Absent,
    /// One that this protocol could have handed out.
    Id(LeaseId),
    /// Any other text: nobody's lease.
    Foreign,
}

/// The lease columns of a cursor row, live or lapsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLease {
    /// Holder.
    pub worker: LeaseId,
    /// Whether it had not expired by the database clock.
    pub live: bool,
}

/// What an ack is judged by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CursorRow {
    /// The cursor's group.
    pub group: GroupId,
    /// Last finished offset.
    pub committed: Offset,
    /// End of the span of `lease`.
    pub batch_end: Option<Offset>,
    /// Who leased the span, if the row still names anyone.
    pub lease: Option<RowLease>,
    /// Failed acks charged.
    pub retry_count: i32,
    /// Hashes below this offset were purged.
    pub txns_start: Offset,
    /// Last offset of the partition.
    pub last_offset: Offset,
    /// Queue option.
    pub retry_limit: i32,
    /// Queue option, ms.
    pub retry_delay_ms: i32,
    /// Whether exhausted messages are filed.
    pub dead_letters: bool,
    /// Whether the group conflates.
    pub conflation: bool,
}

impl CursorRow {
    /// Whether a live lease is on the row, whoever holds it.
    pub fn leased(&self) -> bool {
        self.lease.is_some_and(|lease| lease.live)
    }

    /// Whether that lease is the one that came with the ack (`spec/ack.md` §4).
    pub fn admits(&self, claim: LeaseClaim) -> bool {
        match claim {
            LeaseClaim::Absent => true,
            LeaseClaim::Id(worker) => self.lease == Some(RowLease { worker, live: true }),
            LeaseClaim::Foreign => false,
        }
    }

    /// What must still hold when the decision is written.
    pub fn guard(&self, partition: PartitionId) -> Guard {
        Guard {
            partition,
            group: self.group,
            committed: self.committed,
            batch_end: self.batch_end,
            lease: self.lease,
            retry_count: self.retry_count,
        }
    }
}

/// A cursor row with the first page of its hash rows.
#[derive(Clone, Debug)]
pub struct SpanRead {
    /// The row.
    pub row: CursorRow,
    /// Hash rows of the span; empty when the lease did not match.
    pub hashes: Vec<HashRow>,
    /// First offset that an ack can move the cursor to.
    pub from: Offset,
    /// The last offset that `hashes` covers.
    pub read_to: Offset,
}

/// Identity of a cursor and the values that a decision was made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// Its partition.
    pub partition: PartitionId,
    /// Its group.
    pub group: GroupId,
    /// Cursor.
    pub committed: Offset,
    /// End of the leased span.
    pub batch_end: Option<Offset>,
    /// Lease columns.
    pub lease: Option<RowLease>,
    /// Failed acks charged.
    pub retry_count: i32,
}

/// What happens to the `retryDelay` instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotBefore {
    /// Stays.
    Keep,
    /// Gone.
    Clear,
    /// That long after now.
    After(Duration),
}

/// The new values of a cursor row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CursorWrite {
    /// Cursor.
    pub committed: Offset,
    /// Failed acks charged.
    pub retry_count: i32,
    /// Whether the lease columns are cleared.
    pub release: bool,
    /// `retryDelay`.
    pub not_before: NotBefore,
}

/// Offsets that the first page of a search covers at most when nothing is leased.
pub const OPEN_PAGE_OFFSETS: i64 = 1024;
/// Offsets that any page of a search covers at most. A page also holds the rest of the row that it ends in.
pub const PAGE_OFFSETS_MAX: i64 = 16_384;

/// Columns of [`span_of`].
macro_rules! span_columns {
    ($now:literal) => {
        concat!(
            "c.group_id, c.committed, c.batch_end, c.worker_id, coalesce(c.lease_expires_at > ",
            $now,
            ", false) AS live, c.batch_retry_count, p.txns_start, p.last_offset, q.retry_limit, q.retry_delay, \
             q.dead_letter_queue OR q.dlq_after_max_retries AS dead_letters, g.conflation, low.lo, span.hi, \
             pages.bases, pages.hashes "
        )
    };
}
/// `lo` is the ackable span's start. A conflating lease delivered its last message only: nothing else is ackable.
/// A lapsed lease still bounds the first page, so that an id stored twice in the batch counts as it did in the lease.
macro_rules! span_pages {
    ($now:literal, $wanted:literal) => {
        concat!(
            "CROSS JOIN LATERAL (SELECT greatest(c.committed + 1, p.txns_start, \
               CASE WHEN g.conflation AND c.lease_expires_at > ",
            $now,
            " THEN c.batch_end END) AS lo) low \
             CROSS JOIN LATERAL (SELECT CASE WHEN c.batch_end >= low.lo OR c.lease_expires_at > ",
            $now,
            " THEN least(c.batch_end, low.lo + 16383) ELSE low.lo + 1023 END AS hi) span \
             LEFT JOIN LATERAL (SELECT array_agg(t.base_offset) AS bases, array_agg(t.hashes) AS hashes \
               FROM queen.log_txns t \
               WHERE t.partition_id = p.id AND t.base_offset <= span.hi AND t.base_offset >= coalesce( \
                 (SELECT max(f.base_offset) FROM queen.log_txns f \
                  WHERE f.partition_id = p.id AND f.base_offset <= low.lo), low.lo)) pages ON ",
            $wanted
        )
    };
}
pub(super) use {span_columns, span_pages};

const READ_SPAN: &str = concat!(
    "SELECT ",
    span_columns!("now.at"),
    "FROM (SELECT clock_timestamp() AS at) now CROSS JOIN queen.log_partitions p \
     JOIN queen.queues q ON q.id = ANY (ARRAY[p.queue_id]) \
     CROSS JOIN LATERAL (SELECT * FROM queen.consumer_groups WHERE queue_id = p.queue_id AND name = $2 OFFSET 0) g \
     CROSS JOIN LATERAL (SELECT * FROM queen.log_consumers WHERE partition_id = p.id AND group_id = g.id OFFSET 0) c ",
    span_pages!("now.at", "$3::uuid IS NULL OR (c.worker_id = $3 AND c.lease_expires_at > now.at) "),
    "WHERE p.id = $1"
);

const READ_PAGE: &str = "SELECT t.base_offset, t.hashes FROM queen.log_txns t \
    WHERE t.partition_id = $1 AND t.base_offset <= $3 AND t.base_offset >= coalesce( \
      (SELECT max(f.base_offset) FROM queen.log_txns f WHERE f.partition_id = $1 AND f.base_offset <= $2), $2) \
    ORDER BY t.base_offset";

/// The columns of the last claim, for a cursor that goes to `$to`: they say nothing any more about what lies behind the last
/// offset that was claimed, and a row without them is half as long.
macro_rules! attempt_behind {
    ($to:literal) => {
        concat!(
            "attempts = CASE WHEN c.attempt_end > ",
            $to,
            " THEN c.attempts END, attempt_start = CASE WHEN c.attempt_end > ",
            $to,
            " THEN c.attempt_start END, attempt_end = CASE WHEN c.attempt_end > ",
            $to,
            " THEN c.attempt_end END"
        )
    };
}
pub(super) use attempt_behind;

macro_rules! settle_sql {
    () => {
        concat!(
            "UPDATE queen.log_consumers c SET committed = $8, total_consumed = c.total_consumed + ($8 - c.committed), \
           batch_retry_count = $9, ",
            attempt_behind!("$8"),
            ", \
           batch_end = CASE WHEN $10 THEN NULL ELSE c.batch_end END, \
           worker_id = CASE WHEN $10 THEN NULL ELSE c.worker_id END, \
           lease_expires_at = CASE WHEN $10 THEN NULL ELSE c.lease_expires_at END, \
           lease_acquired_at = CASE WHEN $10 THEN NULL ELSE c.lease_acquired_at END, \
           not_before = CASE WHEN $11::float8 IS NULL THEN c.not_before \
             WHEN $11 > 0 THEN clock_timestamp() + make_interval(secs => $11) END \
         WHERE c.partition_id = $1 AND c.group_id = $2 AND c.committed = $3 AND c.batch_retry_count = $4 \
           AND c.batch_end IS NOT DISTINCT FROM $5 AND c.worker_id IS NOT DISTINCT FROM $6 \
           AND coalesce(c.lease_expires_at > clock_timestamp(), false) = $7"
        )
    };
}

const SETTLE: &str = settle_sql!();
const SETTLE_AND_FILE: &str = concat!(
    "WITH settled AS (",
    settle_sql!(),
    " RETURNING 1) INSERT INTO queen.dead_letters (id, tenant, queue_id, partition_id, log_offset, group_name, queue_name, \
        partition_name, message_id, transaction_id, payload, reason, retry_count, message_created_at) \
      SELECT $12, $13, $14, $1, $15, $16, $17, $18, $19, $20, $21, $22, $4, $23 FROM settled"
);

impl Store {
    /// Reads the cursor of a named group with the first page of its ackable span (`spec/ack.md` §3.3).
    /// `None`: the group has no cursor on that partition.
    pub async fn read_span(
        &self,
        partition: PartitionId,
        group: &str,
        lease: LeaseClaim,
    ) -> StoreResult<Option<SpanRead>> {
        read_span(&self.pool, partition, group, lease).await
    }

    /// The hash rows that hold the offsets `from..=to`, lowest first.
    pub async fn read_hashes(&self, partition: PartitionId, from: Offset, to: Offset) -> StoreResult<Vec<HashRow>> {
        read_hashes(&self.pool, partition, from, to).await
    }

    /// Writes a decision, with its dead letter, durably, if `guard` still holds. `false`: it does not, nothing happened.
    pub async fn settle(
        &self,
        guard: &Guard,
        write: &CursorWrite,
        dead_letter: Option<&NewDeadLetter>,
    ) -> StoreResult<bool> {
        settle(&self.pool, guard, write, dead_letter).await
    }
}

/// See [`Store::read_span`]; inside a caller's transaction if it passes one.
pub async fn read_span(
    executor: impl PgExecutor<'_>,
    partition: PartitionId,
    group: &str,
    lease: LeaseClaim,
) -> StoreResult<Option<SpanRead>> {
    let worker = match lease {
        LeaseClaim::Absent => None,
        LeaseClaim::Id(id) => Some(id.0),
        LeaseClaim::Foreign => Some(Uuid::nil()),
    };
    let row = sqlx::query(READ_SPAN)
        .bind(partition.0)
        .bind(group)
        .bind(worker)
        .fetch_optional(executor)
        .timed("reading a cursor")
        .await?;
    row.map(|row| span_of(&row)).transpose().during("reading a cursor")
}

/// A row of `span_columns`.
pub(super) fn span_of(row: &PgRow) -> Result<SpanRead, sqlx::Error> {
    let worker: Option<Uuid> = row.try_get("worker_id")?;
    let live = row.try_get("live")?;
    let bases: Option<Vec<i64>> = row.try_get("bases")?;
    let hashes: Option<Vec<Vec<u8>>> = row.try_get("hashes")?;
    Ok(SpanRead {
        row: CursorRow {
            group: GroupId(row.try_get("group_id")?),
            committed: Offset(row.try_get("committed")?),
            batch_end: row.try_get::<Option<i64>, _>("batch_end")?.map(Offset),
            lease: worker.map(|worker| RowLease { worker: LeaseId(worker), live }),
            retry_count: row.try_get("batch_retry_count")?,
            txns_start: Offset(row.try_get("txns_start")?),
            last_offset: Offset(row.try_get("last_offset")?),
            retry_limit: row.try_get("retry_limit")?,
            retry_delay_ms: row.try_get("retry_delay")?,
            dead_letters: row.try_get("dead_letters")?,
            conflation: row.try_get("conflation")?,
        },
        hashes: bases
            .unwrap_or_default()
            .into_iter()
            .zip(hashes.unwrap_or_default())
            .map(|(base, packed)| HashRow { base: Offset(base), packed })
            .collect(),
        from: Offset(row.try_get("lo")?),
        read_to: Offset(row.try_get("hi")?),
    })
}

/// See [`Store::read_hashes`]; inside a caller's transaction if it passes one.
pub async fn read_hashes(
    executor: impl PgExecutor<'_>,
    partition: PartitionId,
    from: Offset,
    to: Offset,
) -> StoreResult<Vec<HashRow>> {
    let rows: Vec<(i64, Vec<u8>)> = sqlx::query_as(READ_PAGE)
        .bind(partition.0)
        .bind(from.0)
        .bind(to.0)
        .fetch_all(executor)
        .timed("reading transaction ids")
        .await?;
    Ok(rows.into_iter().map(|(base, packed)| HashRow { base: Offset(base), packed }).collect())
}

/// See [`Store::settle`]; inside a caller's transaction if it passes one.
pub async fn settle(
    executor: impl PgExecutor<'_>,
    guard: &Guard,
    write: &CursorWrite,
    dead_letter: Option<&NewDeadLetter>,
) -> StoreResult<bool> {
    let not_before = match write.not_before {
        NotBefore::Keep => None,
        NotBefore::Clear => Some(0.0),
        NotBefore::After(delay) => Some(delay.as_secs_f64()),
    };
    let query = sqlx::query(if dead_letter.is_some() { SETTLE_AND_FILE } else { SETTLE })
        .bind(guard.partition.0)
        .bind(guard.group.0)
        .bind(guard.committed.0)
        .bind(guard.retry_count)
        .bind(guard.batch_end.map(|end| end.0))
        .bind(guard.lease.map(|lease| lease.worker.0))
        .bind(guard.lease.is_some_and(|lease| lease.live))
        .bind(write.committed.0)
        .bind(write.retry_count)
        .bind(write.release)
        .bind(not_before);
    let query = match dead_letter {
        Some(letter) => letter.bind(query),
        None => query,
    };
    let written = query.execute(executor).timed("ack").await?.rows_affected() == 1;
    if written && dead_letter.is_some() {
        metrics::counter!(crate::metrics::DEAD_LETTERS).increment(1);
    }
    Ok(written)
}

/// A hash row that breaks its own rule.
pub fn torn_hashes(partition: PartitionId, base: Offset) -> StoreError {
    super::queues::corrupt("log_txns", format!("length of the row {partition}/{base}"))
}
