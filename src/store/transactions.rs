//! What a transaction flush does beside storing messages: locks cursors, reads what their acks are judged by, moves
//! them, files dead letters, and finds out afterwards whether a commit landed.

use std::time::Duration;

use sqlx::Row;

use super::Store;
use super::acks::{CursorWrite, NotBefore, SpanRead, attempt_behind, span_columns, span_of, span_pages};
use super::dead_letters::{LetterSource, NewDeadLetter, letter_source};
use super::error::{During, StoreResult, Timed};
use super::messages::AppendTx;
use super::queues::corrupt;
use crate::ids::{GroupId, Offset, PartitionId};

/// A cursor by the names of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CursorName<'a> {
    /// Its partition.
    pub partition: PartitionId,
    /// Name of its group.
    pub group: &'a str,
}

/// What there is of a cursor.
#[derive(Clone, Debug)]
pub enum CursorRead {
    /// The partition does not exist.
    NoPartition,
    /// The group has no cursor there.
    NoConsumer,
    /// The row, with the first page of its ackable span.
    Found(Box<SpanRead>),
}

/// The new values of a cursor that this transaction has locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CursorMove {
    /// Its partition.
    pub partition: PartitionId,
    /// Its group.
    pub group: GroupId,
    /// The values.
    pub write: CursorWrite,
}

/// A dead letter with its place and the retry count that it keeps.
#[derive(Clone, Debug)]
pub struct FiledLetter {
    /// Its partition.
    pub partition: PartitionId,
    /// Failed acks charged before it was given up.
    pub retry_count: i32,
    /// The letter.
    pub letter: NewDeadLetter,
}

/// What became of a commit whose answer was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Durable.
    Committed,
    /// Rolled back.
    Aborted,
    /// The server is still at it.
    InProgress,
}

/// Something that a transaction wrote, by which it is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Witness {
    /// A segment, by its first offset.
    Segment(PartitionId, Offset),
    /// A cursor that it moved this far. Weaker: another may have moved it there; then its messages are finished all the
    /// same.
    Cursor(PartitionId, GroupId, Offset),
}

const LOCK_CURSORS: &str = "WITH k AS MATERIALIZED ( \
      SELECT u.partition_id, g.id AS group_id FROM unnest($1::bigint[], $2::text[]) AS u (partition_id, name) \
      JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.partition_id]) \
      CROSS JOIN LATERAL (SELECT id FROM queen.consumer_groups WHERE queue_id = p.queue_id AND name = u.name OFFSET 0) g) \
    SELECT c.partition_id FROM k \
    JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[k.partition_id]) AND c.group_id = k.group_id \
    ORDER BY k.partition_id, k.group_id FOR NO KEY UPDATE OF c";

/// `statement_timestamp()` is one instant for all rows, after the locks were granted.
const READ_CURSORS: &str = concat!(
    "SELECT u.ord, p.id IS NOT NULL AS has_partition, c.partition_id IS NOT NULL AS has_consumer, ",
    span_columns!("statement_timestamp()"),
    "FROM unnest($1::bigint[], $2::text[]) WITH ORDINALITY AS u (partition_id, name, ord) \
     LEFT JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.partition_id]) \
     LEFT JOIN queen.queues q ON q.id = ANY (ARRAY[p.queue_id]) \
     LEFT JOIN LATERAL (SELECT * FROM queen.consumer_groups WHERE queue_id = p.queue_id AND name = u.name OFFSET 0) g ON true \
     LEFT JOIN LATERAL (SELECT * FROM queen.log_consumers WHERE partition_id = p.id AND group_id = g.id OFFSET 0) c ON true ",
    span_pages!("statement_timestamp()", "c.partition_id IS NOT NULL "),
    "ORDER BY u.ord"
);

impl AppendTx {
    /// Locks the cursors that exist, by (partition, group): after every partition lock of this transaction.
    pub async fn lock_cursors(&mut self, names: &[CursorName<'_>]) -> StoreResult<()> {
        let (partitions, groups): (Vec<i64>, Vec<&str>) = names.iter().map(|n| (n.partition.0, n.group)).unzip();
        sqlx::query(LOCK_CURSORS)
            .bind(partitions)
            .bind(groups)
            .execute(&mut *self.tx)
            .timed("locking cursors")
            .await
            .map(|_| ())
    }

    /// Reads locked cursors, each with the first page of its ackable span; one result per name, in order.
    pub async fn read_cursors(&mut self, names: &[CursorName<'_>]) -> StoreResult<Vec<CursorRead>> {
        let (partitions, groups): (Vec<i64>, Vec<&str>) = names.iter().map(|n| (n.partition.0, n.group)).unzip();
        let rows = sqlx::query(READ_CURSORS)
            .bind(partitions)
            .bind(groups)
            .fetch_all(&mut *self.tx)
            .timed("reading cursors")
            .await?;
        if rows.len() != names.len() {
            return Err(corrupt("log_consumers", format!("{} rows for {} cursors", rows.len(), names.len())));
        }
        rows.iter()
            .map(|row| {
                Ok(if !row.try_get("has_partition")? {
                    CursorRead::NoPartition
                } else if !row.try_get("has_consumer")? {
                    CursorRead::NoConsumer
                } else {
                    CursorRead::Found(Box::new(span_of(row)?))
                })
            })
            .collect::<Result<_, _>>()
            .during("reading cursors")
    }

    /// The segment that holds a message about to be filed as a dead letter; `None` if retention has deleted it.
    pub async fn letter_source(&mut self, partition: PartitionId, offset: Offset) -> StoreResult<Option<LetterSource>> {
        letter_source(&mut *self.tx, partition, offset).await
    }

    /// Moves locked cursors.
    pub async fn move_cursors(&mut self, moves: &[CursorMove]) -> StoreResult<()> {
        let not_before = |m: &CursorMove| match m.write.not_before {
            NotBefore::Keep => None,
            NotBefore::Clear => Some(0.0),
            NotBefore::After(delay) => Some(delay.as_secs_f64()),
        };
        let (moved, xid): (i64, String) = sqlx::query_as(concat!(
            "WITH moved AS ( \
               UPDATE queen.log_consumers c SET committed = n.committed, \
                 total_consumed = c.total_consumed + (n.committed - c.committed), batch_retry_count = n.retries, ",
            attempt_behind!("n.committed"),
            ", batch_end = CASE WHEN n.release THEN NULL ELSE c.batch_end END, \
                 worker_id = CASE WHEN n.release THEN NULL ELSE c.worker_id END, \
                 lease_expires_at = CASE WHEN n.release THEN NULL ELSE c.lease_expires_at END, \
                 lease_acquired_at = CASE WHEN n.release THEN NULL ELSE c.lease_acquired_at END, \
                 not_before = CASE WHEN n.held IS NULL THEN c.not_before \
                   WHEN n.held > 0 THEN statement_timestamp() + make_interval(secs => n.held) END \
               FROM unnest($1::bigint[], $2::int[], $3::bigint[], $4::int[], $5::boolean[], $6::float8[]) \
                 AS n (partition_id, group_id, committed, retries, release, held) \
               WHERE c.partition_id = ANY (ARRAY[n.partition_id]) AND c.group_id = n.group_id RETURNING 1) \
             SELECT count(*), pg_current_xact_id()::text FROM moved",
        ))
        .bind(moves.iter().map(|m| m.partition.0).collect::<Vec<_>>())
        .bind(moves.iter().map(|m| m.group.0).collect::<Vec<_>>())
        .bind(moves.iter().map(|m| m.write.committed.0).collect::<Vec<_>>())
        .bind(moves.iter().map(|m| m.write.retry_count).collect::<Vec<_>>())
        .bind(moves.iter().map(|m| m.write.release).collect::<Vec<_>>())
        .bind(moves.iter().map(not_before).collect::<Vec<_>>())
        .fetch_one(&mut *self.tx)
        .timed("moving cursors")
        .await?;
        self.xid = xid.parse().ok();
        if moved != moves.len() as i64 {
            return Err(corrupt("log_consumers", format!("{moved} of {} cursors moved", moves.len())));
        }
        Ok(())
    }

    /// Files dead letters.
    pub async fn file_letters(&mut self, letters: &[FiledLetter]) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO queen.dead_letters (id, tenant, queue_id, partition_id, log_offset, group_name, queue_name, \
               partition_name, message_id, transaction_id, payload, reason, retry_count, message_created_at) \
             SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::int[], $4::bigint[], $5::bigint[], $6::text[], $7::text[], \
               $8::text[], $9::uuid[], $10::text[], $11::bytea[], $12::text[], $13::int[], $14::timestamptz[])",
        )
        .bind(letters.iter().map(|l| l.letter.id).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.tenant).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.queue.0).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.partition.0).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.offset.0).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.group_name.as_str()).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.queue_name.as_str()).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.partition_name.as_str()).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.message_id).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.transaction_id.as_str()).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.payload.as_slice()).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.reason.as_str()).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.retry_count).collect::<Vec<_>>())
        .bind(letters.iter().map(|l| l.letter.message_created_at).collect::<Vec<_>>())
        .execute(&mut *self.tx)
        .timed("filing dead letters")
        .await
        .map(|_| ())
    }

    /// The transaction's id, once it has written something: what [`Store::fate_of`] asks for.
    pub fn xid(&self) -> Option<u64> {
        self.xid
    }
}

impl Store {
    /// What became of a transaction. `None`: the server does not know any more, or knows another transaction by that
    /// id: after a crash, ids that never reached the disk are given out again, so `witness` must be there too.
    pub async fn fate_of(&self, xid: u64, witness: Witness) -> StoreResult<Option<Fate>> {
        let (partition, segment, group, committed) = match witness {
            Witness::Segment(partition, base) => (partition, Some(base.0), None, None),
            Witness::Cursor(partition, group, committed) => (partition, None, Some(group.0), Some(committed.0)),
        };
        let (word, seen): (Option<String>, bool) = sqlx::query_as(
            "SELECT pg_xact_status($1::text::xid8), CASE WHEN $3::bigint IS NOT NULL \
               THEN EXISTS (SELECT 1 FROM queen.log_segments s \
                 WHERE s.partition_id = $2 AND s.base_offset = $3 AND s.writer = $1::text::xid8) \
               ELSE EXISTS (SELECT 1 FROM queen.log_consumers c \
                 WHERE c.partition_id = $2 AND c.group_id = $4 AND c.committed >= $5) END",
        )
        .bind(xid.to_string())
        .bind(partition.0)
        .bind(segment)
        .bind(group)
        .bind(committed)
        .fetch_one(&self.pool)
        .timed("looking up a commit")
        .await?;
        Ok(match word.as_deref() {
            Some("committed") => seen.then_some(Fate::Committed),
            Some("aborted") => Some(Fate::Aborted),
            Some(_) => Some(Fate::InProgress),
            None => None,
        })
    }

    /// Looks a lost commit up until its outcome is known, at most that long. `None`: it stays unknown.
    pub async fn await_fate_of(&self, xid: u64, witness: Witness, wait_max: Duration) -> Option<Fate> {
        let look = async {
            let mut pause = Duration::from_millis(20);
            loop {
                match self.fate_of(xid, witness).await {
                    Ok(Some(Fate::InProgress)) => {}
                    Ok(fate) => return fate,
                    Err(error) if error.is_connection() || error.is_transient() => {}
                    Err(error) => {
                        tracing::warn!(%error, xid, "the outcome of a commit cannot be looked up");
                        return None;
                    }
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(Duration::from_millis(500));
            }
        };
        tokio::time::timeout(wait_max, look).await.ok().flatten()
    }
}
