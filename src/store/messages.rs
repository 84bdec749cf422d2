//! Segments and their hashes: appended by pushes, read by pops.

use std::collections::{BTreeMap, HashMap};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{Postgres, Row, Transaction};

use super::Store;
use super::age_lists;
use super::error::{During, StoreResult, Timed};
use super::partitions::{self, LockedPartition, LockedRow, NewPartition, PartitionKey, made_at};
use super::queues::corrupt;
use crate::ids::{Offset, PartitionId, TransactionHash};

/// A segment about to be stored. Its offsets are allocated: the partition is locked by the same transaction.
#[derive(Clone, Debug)]
pub struct NewSegment {
    /// The partition.
    pub partition: PartitionId,
    /// Offset of its first message.
    pub base_offset: Offset,
    /// Transaction hashes in offset order; their number is the number of messages.
    pub hashes: Vec<TransactionHash>,
    /// Payload bytes before packing.
    pub payload_bytes: usize,
    /// The frames before sealing, for whoever keeps the newest segments in memory.
    pub body: Bytes,
    /// The sealed frames.
    pub frames: Vec<u8>,
}

/// A run of hashes of stored messages, in offset order.
#[derive(Clone, Debug)]
pub struct StoredHashes {
    /// The partition.
    pub partition: PartitionId,
    /// Offset of the first hash.
    pub base_offset: Offset,
    /// The hashes.
    pub hashes: Vec<TransactionHash>,
}

/// A stored segment.
#[derive(Clone, Debug)]
pub struct SegmentRow {
    /// The partition.
    pub partition: PartitionId,
    /// Offset of its first message.
    pub base_offset: Offset,
    /// Messages in it.
    pub message_count: usize,
    /// Commit time, stamped under the partition lock.
    pub created_at: DateTime<Utc>,
    /// The sealed frames.
    pub frames: Vec<u8>,
}

/// A part of one partition to read, both ends inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The partition.
    pub partition: PartitionId,
    /// First wanted offset.
    pub first: Offset,
    /// Last wanted offset.
    pub last: Offset,
}

/// The transaction of one flush that stores messages. Dropping it rolls everything back.
#[derive(Debug)]
pub struct AppendTx {
    pub(super) tx: Transaction<'static, Postgres>,
    pub(super) xid: Option<u64>,
    opening: Opening,
    /// Locked partitions that retention does not know of: they hold no segment, or no hashes.
    unlisted: Vec<i64>,
    /// The rows of the locked partitions.
    rows: HashMap<PartitionId, LockedRow>,
    /// Partitions that are made when messages are stored in them.
    new: BTreeMap<PartitionKey, PartitionId>,
}

/// How an [`AppendTx`] begins, and what its statements are called in errors and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    begin: &'static str,
    commit: &'static str,
    rollback: &'static str,
    /// Longest wait for a row lock, if shorter than the statement timeout.
    lock_timeout: Option<&'static str>,
}

impl Opening {
    /// Of a push flush.
    pub const PUSH: Opening =
        Opening { begin: "begin of push", commit: "commit of push", rollback: "rollback of push", lock_timeout: None };
    /// Of a transaction flush.
    pub const TRANSACTION: Opening = Opening {
        begin: "begin of transaction",
        commit: "commit of transaction",
        rollback: "rollback of transaction",
        lock_timeout: None,
    };
    /// The same after a timeout.
    pub const IMPATIENT_TRANSACTION: Opening = Opening { lock_timeout: Some("1s"), ..Opening::TRANSACTION };
}

impl Store {
    /// Opens the transaction of one flush.
    pub async fn begin_append(&self, opening: Opening) -> StoreResult<AppendTx> {
        let mut tx = self.pool.begin().timed(opening.begin).await?;
        if let Some(timeout) = opening.lock_timeout {
            sqlx::query("SELECT set_config('lock_timeout', $1, true)")
                .bind(timeout)
                .execute(&mut *tx)
                .timed(opening.begin)
                .await?;
        }
        Ok(AppendTx { tx, xid: None, opening, unlisted: Vec::new(), rows: HashMap::new(), new: BTreeMap::new() })
    }

    /// The segments that cover each span, by offset. Stops once `bytes_max` payload bytes of a span are covered, but
    /// always answers its first segment.
    pub async fn read_segments(&self, spans: &[Span], bytes_max: i64) -> StoreResult<Vec<Vec<SegmentRow>>> {
        read_segments(&self.pool, spans, bytes_max).await
    }
}

impl AppendTx {
    /// For what other modules of the store do in the same flush.
    pub(super) fn connection(&mut self) -> &mut Transaction<'static, Postgres> {
        &mut self.tx
    }

    /// Locks the partitions of these keys that exist, in id order.
    pub async fn lock_partitions(&mut self, keys: &[PartitionKey]) -> StoreResult<Vec<LockedPartition>> {
        let locked = partitions::lock(&mut self.tx, keys).await?;
        let keep = |(partition, row): (LockedPartition, LockedRow)| {
            self.unlisted.extend((!partition.is_listed).then_some(partition.id.0));
            self.rows.insert(partition.id, row);
            partition
        };
        Ok(locked.into_iter().map(keep).collect())
    }

    /// Allots keys to partitions that do not exist: the first messages stored in one make it. `None`: a queue is gone, or
    /// just being deleted or configured.
    pub async fn allot_partitions(&mut self, keys: &[PartitionKey]) -> StoreResult<Option<Vec<LockedPartition>>> {
        let new = partitions::allot(&mut self.tx, keys).await?;
        self.new.extend(new.iter().flatten().map(|p| (p.key.clone(), p.id)));
        Ok(new)
    }

    /// Makes the new partitions that get segments. Answers when each was written.
    async fn make_partitions(&mut self, segments: &[NewSegment]) -> StoreResult<HashMap<PartitionId, DateTime<Utc>>> {
        if self.new.is_empty() {
            return Ok(HashMap::new());
        }
        let ends = last_offsets(segments.iter());
        let rows: Vec<NewPartition> = std::mem::take(&mut self.new)
            .into_iter()
            .filter_map(|(key, id)| Some(NewPartition { id: id.0, key, last_offset: *ends.get(&id)? }))
            .collect();
        let made = partitions::make(&mut self.tx, &rows).await?;
        self.xid = made.first().and_then(|(.., xid)| xid.parse().ok());
        Ok(made.into_iter().map(|(id, at, _)| (PartitionId(id), at)).collect())
    }

    /// The hashes stored in each partition within its window (seconds) and at or above an offset, oldest first. Runs
    /// under the partition locks in a snapshot of its own, so it sees every commit before them (I9).
    pub async fn hashes_within(&mut self, probes: &[(PartitionId, Offset, i32)]) -> StoreResult<Vec<StoredHashes>> {
        let ids: Vec<i64> = probes.iter().map(|(id, ..)| id.0).collect();
        let from: Vec<i64> = probes.iter().map(|(_, from, _)| from.0).collect();
        let windows: Vec<i32> = probes.iter().map(|(.., window)| *window).collect();
        let rows = sqlx::query(
            "SELECT t.partition_id, t.base_offset, t.hashes \
             FROM unnest($1::bigint[], $2::bigint[], $3::int[]) AS u (partition_id, from_offset, window_seconds) \
             CROSS JOIN LATERAL ( \
               SELECT t.partition_id, t.base_offset, t.hashes FROM queen.log_txns t \
               WHERE t.partition_id = u.partition_id AND t.base_offset >= u.from_offset \
                 AND t.created_at >= clock_timestamp() - make_interval(secs => u.window_seconds) OFFSET 0) t \
             ORDER BY t.partition_id, t.base_offset",
        )
        .bind(ids)
        .bind(from)
        .bind(windows)
        .fetch_all(&mut *self.tx)
        .timed("deduplication probe")
        .await?;
        rows.iter().map(stored_hashes_of).collect()
    }

    /// The runs of hashes that hold these offsets and were committed within the window (seconds). Runs under the partition
    /// locks, like [`AppendTx::hashes_within`].
    pub async fn hashes_at(&mut self, places: &[(PartitionId, Offset, i32)]) -> StoreResult<Vec<StoredHashes>> {
        let ids: Vec<i64> = places.iter().map(|(id, ..)| id.0).collect();
        let offsets: Vec<i64> = places.iter().map(|(_, at, _)| at.0).collect();
        let windows: Vec<i32> = places.iter().map(|(.., window)| *window).collect();
        let rows = sqlx::query(
            "SELECT DISTINCT ON (t.partition_id, t.base_offset) t.partition_id, t.base_offset, t.hashes \
             FROM unnest($1::bigint[], $2::bigint[], $3::int[]) AS u (partition_id, at_offset, window_seconds) \
             CROSS JOIN LATERAL ( \
               SELECT * FROM queen.log_txns t \
               WHERE t.partition_id = u.partition_id AND t.base_offset <= u.at_offset \
               ORDER BY t.base_offset DESC LIMIT 1) t \
             WHERE t.created_at >= clock_timestamp() - make_interval(secs => u.window_seconds) \
             ORDER BY t.partition_id, t.base_offset",
        )
        .bind(ids)
        .bind(offsets)
        .bind(windows)
        .fetch_all(&mut *self.tx)
        .timed("deduplication probe")
        .await?;
        rows.iter().map(stored_hashes_of).collect()
    }

    /// The segment that covers an offset, if it is still stored.
    pub async fn segment_at(&mut self, partition: PartitionId, offset: Offset) -> StoreResult<Option<SegmentRow>> {
        let span = Span { partition, first: offset, last: offset };
        Ok(read_segments(&mut *self.tx, &[span], 0).await?.into_iter().flatten().next())
    }

    /// Stores the segments and their hashes and moves the allocators. All segments of one partition carry one commit
    /// time, stamped here, under the lock, and never before the partition's last one (I7): `statement_timestamp()` is one
    /// instant for the whole statement, which starts after the locks were granted. A partition that was empty is entered
    /// where retention looks for its work. A new one is made first, with its allocator where it is to be, and its segments
    /// carry its time. Answers the commit time per partition. [`StoreError::Overtaken`]: somebody else made one.
    pub async fn insert_segments(
        &mut self,
        segments: &[NewSegment],
    ) -> StoreResult<HashMap<PartitionId, DateTime<Utc>>> {
        let ids: Vec<i64> = segments.iter().map(|s| s.partition.0).collect();
        let mut stamps = self.make_partitions(segments).await?;
        self.list_for_retention(&ids).await?;
        let bases: Vec<i64> = segments.iter().map(|s| s.base_offset.0).collect();
        let counts: Vec<i32> = segments.iter().map(|s| s.hashes.len() as i32).collect();
        let bytes: Vec<i32> = segments.iter().map(|s| i32::try_from(s.payload_bytes).unwrap_or(i32::MAX)).collect();
        let hashes: Vec<Vec<u8>> = segments.iter().map(|s| pack_hashes(&s.hashes)).collect();
        let frames: Vec<&[u8]> = segments.iter().map(|s| s.frames.as_slice()).collect();
        // Of a new partition its one commit time, of another the time that this one must not precede.
        let made: Vec<bool> = segments.iter().map(|s| stamps.contains_key(&s.partition)).collect();
        let floors: Vec<Option<DateTime<Utc>>> = segments
            .iter()
            .map(|s| stamps.get(&s.partition).copied().or(self.rows.get(&s.partition).map(|row| row.last_write_at)))
            .collect();
        let ends = last_offsets(segments.iter().filter(|s| !stamps.contains_key(&s.partition)));
        let place = |id: &PartitionId| self.rows.get(id).map(|row| row.place.as_str());
        // Whole rows are found by their place: the lock statement has read them, and nobody can have moved them since.
        let moved: Vec<(i64, DateTime<Utc>, String)> = sqlx::query_as(concat!(
            "WITH segments AS ( \
               INSERT INTO queen.log_segments (partition_id, base_offset, created_at, message_count, payload_bytes, \
                 frames) \
               SELECT n.partition_id, n.base_offset, \
                 CASE WHEN n.made THEN n.floor ELSE greatest(statement_timestamp(), n.floor) END, \
                 n.message_count, n.payload_bytes, n.frames \
               FROM unnest($1::bigint[], $2::bigint[], $3::int[], $4::int[], $6::bytea[], $7::boolean[], $8::timestamptz[]) \
                 AS n (partition_id, base_offset, message_count, payload_bytes, frames, made, floor)), \
             txns AS ( \
               INSERT INTO queen.log_txns (partition_id, base_offset, created_at, hashes) \
               SELECT n.partition_id, n.base_offset, \
                 CASE WHEN n.made THEN n.floor ELSE greatest(statement_timestamp(), n.floor) END, n.hashes \
               FROM unnest($1::bigint[], $2::bigint[], $5::bytea[], $7::boolean[], $8::timestamptz[]) \
                 AS n (partition_id, base_offset, hashes, made, floor)), \
             moved AS ( \
               UPDATE queen.log_partitions p SET last_offset = n.last_offset, \
                 last_write_at = greatest(statement_timestamp(), p.last_write_at), created_at = ", made_at!(), " \
               FROM unnest($9::text[], $10::bigint[], $11::bigint[]) AS n (place, id, last_offset) \
               WHERE p.ctid = n.place::tid AND p.id = ANY (ARRAY[n.id]) AND p.last_offset < n.last_offset \
               RETURNING p.id, p.last_write_at) \
             SELECT id, last_write_at, pg_current_xact_id()::text FROM moved",
        ))
        .bind(&ids)
        .bind(bases)
        .bind(counts)
        .bind(bytes)
        .bind(hashes)
        .bind(frames)
        .bind(made)
        .bind(floors)
        .bind(ends.keys().map(place).collect::<Vec<_>>())
        .bind(ends.keys().map(|id| id.0).collect::<Vec<_>>())
        .bind(ends.values().copied().collect::<Vec<_>>())
        .fetch_all(&mut *self.tx)
        .timed("storing segments")
        .await?;
        self.xid = moved.first().and_then(|(.., xid)| xid.parse().ok()).or(self.xid);
        let mut partitions = ids;
        partitions.sort_unstable();
        partitions.dedup();
        stamps.extend(moved.into_iter().map(|(id, at, _)| (PartitionId(id), at)));
        if stamps.len() != partitions.len() {
            let counts = format!("{} of {} allocators moved", stamps.len(), partitions.len());
            return Err(corrupt("log_partitions", counts));
        }
        Ok(stamps)
    }

    /// Enters the partitions that were empty where retention looks for its work. A statement of its own: most flushes
    /// find no such partition, and pay nothing.
    async fn list_for_retention(&mut self, ids: &[i64]) -> StoreResult<()> {
        self.unlisted.retain(|id| ids.contains(id));
        if self.unlisted.is_empty() {
            return Ok(());
        }
        age_lists::list_empty(&mut self.tx, &std::mem::take(&mut self.unlisted)).await
    }

    /// Makes the flush durable.
    pub async fn commit(self) -> StoreResult<()> {
        self.tx.commit().timed(self.opening.commit).await
    }

    /// Gives the flush up.
    pub async fn rollback(self) -> StoreResult<()> {
        self.tx.rollback().timed(self.opening.rollback).await
    }
}

/// The last offset that segments take, by partition.
fn last_offsets<'a>(segments: impl Iterator<Item = &'a NewSegment>) -> BTreeMap<PartitionId, i64> {
    let mut ends: BTreeMap<PartitionId, i64> = BTreeMap::new();
    for segment in segments {
        let end = ends.entry(segment.partition).or_default();
        *end = (*end).max(segment.base_offset.0 + segment.hashes.len() as i64 - 1);
    }
    ends
}

fn stored_hashes_of(row: &PgRow) -> StoreResult<StoredHashes> {
    let packed: &[u8] = row.try_get("hashes").during("deduplication probe")?;
    let hashes = TransactionHash::unpack(packed)
        .ok_or_else(|| corrupt("log_txns", "hash column is no multiple of 16 bytes"))?
        .collect();
    Ok(StoredHashes {
        partition: PartitionId(row.try_get("partition_id").during("deduplication probe")?),
        base_offset: Offset(row.try_get("base_offset").during("deduplication probe")?),
        hashes,
    })
}

fn pack_hashes(hashes: &[TransactionHash]) -> Vec<u8> {
    hashes.iter().flat_map(|hash| hash.to_bytes()).collect()
}

/// See [`Store::read_segments`]; also run inside transactions that read what they settle.
pub(super) async fn read_segments<'e>(
    executor: impl sqlx::PgExecutor<'e>,
    spans: &[Span],
    bytes_max: i64,
) -> StoreResult<Vec<Vec<SegmentRow>>> {
    let ids: Vec<i64> = spans.iter().map(|s| s.partition.0).collect();
    let first: Vec<i64> = spans.iter().map(|s| s.first.0).collect();
    let last: Vec<i64> = spans.iter().map(|s| s.last.0).collect();
    // The window sums sizes before a frame is fetched from its TOAST table: what the budget cuts off costs nothing.
    let rows = sqlx::query(
        "SELECT u.ord, s.partition_id, s.base_offset, s.message_count, s.created_at, s.frames \
         FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) WITH ORDINALITY \
           AS u (partition_id, first_offset, last_offset, ord) \
         CROSS JOIN LATERAL ( \
           SELECT s.*, sum(s.payload_bytes) OVER (ORDER BY s.base_offset) - s.payload_bytes AS bytes_before \
           FROM queen.log_segments s \
           WHERE s.partition_id = u.partition_id AND s.base_offset <= u.last_offset \
             AND s.base_offset >= coalesce(( \
               SELECT h.base_offset FROM queen.log_segments h \
               WHERE h.partition_id = u.partition_id AND h.base_offset <= u.first_offset \
               ORDER BY h.base_offset DESC LIMIT 1), u.first_offset)) s \
         WHERE s.bytes_before <= $4 AND s.base_offset + s.message_count > u.first_offset \
         ORDER BY u.ord, s.base_offset",
    )
    .bind(ids)
    .bind(first)
    .bind(last)
    .bind(bytes_max)
    .fetch_all(executor)
    .timed("reading segments")
    .await?;
    let mut segments: Vec<Vec<SegmentRow>> = spans.iter().map(|_| Vec::new()).collect();
    for row in &rows {
        let (ord, segment) = segment_of(row).during("reading segments")?;
        if let Some(of_span) = usize::try_from(ord - 1).ok().and_then(|nth| segments.get_mut(nth)) {
            of_span.push(segment);
        }
    }
    Ok(segments)
}

fn segment_of(row: &PgRow) -> Result<(i64, SegmentRow), sqlx::Error> {
    let count: i32 = row.try_get("message_count")?;
    let segment = SegmentRow {
        partition: PartitionId(row.try_get("partition_id")?),
        base_offset: Offset(row.try_get("base_offset")?),
        message_count: usize::try_from(count).unwrap_or(0),
        created_at: row.try_get("created_at")?,
        frames: row.try_get("frames")?,
    };
    Ok((row.try_get("ord")?, segment))
}
