//! Retention: which partitions are due, and the bounded steps that delete from them (`spec/admin.md` §8).
//!
//! Work is found in lists of partitions by the age of their oldest segments (or hashes), per queue, and queues are looked at
//! only when something in them can have become due (`docs/adr/2026-11-30-retention.md`). A step holds the locks of its
//! partitions for one statement and an asynchronous commit: a deletion lost in a crash of the database is done again.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use sqlx::{PgConnection, Row};

use super::Store;
use super::age_lists::{self, AgeList, Keys, TakenList, share_of};
use super::error::{During, StoreResult, Timed};
use super::windows::{completed_seconds, max_wait_seconds, retention_seconds, window_seconds};
use crate::ids::{PartitionId, QueueId};

/// What is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aged {
    /// Segments, by the three rules of §8.2.
    Segments,
    /// Transaction hashes: the sidecar purge.
    Hashes,
}

impl Aged {
    pub(super) fn kind(self) -> i16 {
        match self {
            Aged::Segments => 0,
            Aged::Hashes => 1,
        }
    }
}

/// A queue in which something may be due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DueQueue {
    /// The queue.
    pub queue: QueueId,
    /// For how long.
    pub overdue: Duration,
    /// Guards against options that change meanwhile.
    token: i64,
}

/// What one step deleted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deleted {
    /// Segments by rule: `completed_retention`, `retention`, `max_wait_time_eviction`.
    pub segments: [u64; 3],
    /// Messages in them.
    pub messages: [u64; 3],
    /// Rows of the hash index.
    pub hash_rows: u64,
}

impl Deleted {
    /// Adds what another step deleted.
    pub fn add(&mut self, other: Deleted) {
        for rule in 0..3 {
            self.segments[rule] += other.segments[rule];
            self.messages[rule] += other.messages[rule];
        }
        self.hash_rows += other.hash_rows;
    }
}

/// Bounds of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepBounds {
    /// Partitions whose locks are held together.
    pub partitions_max: usize,
    /// Rows that are deleted at most; every partition has its share, and one row at least.
    pub rows_max: i64,
    /// Bytes past which no further row goes, shared likewise: big values live in many pieces.
    pub bytes_max: i64,
}

/// What one step did and left.
#[derive(Clone, Debug, Default)]
pub struct Step {
    /// What it deleted.
    pub deleted: Deleted,
    /// How long it held the locks of its partitions.
    pub held: Duration,
    /// Partitions that somebody else held locked, and the lists that they are in still.
    pub busy: Vec<(AgeList, PartitionId)>,
    /// Lists with partitions beyond the bound.
    pub unfinished: Vec<AgeList>,
}

/// The history types of §8.2, in the order of [`Deleted`].
pub const RULES: [&str; 3] = ["completed_retention", "retention", "max_wait_time_eviction"];

/// The token is `check_at` in microseconds: a time stamp must come back exactly as it was read.
const DUE_QUEUES: &str = "SELECT queue_id, (extract(epoch FROM check_at) * 1000000)::bigint AS token, \
      extract(epoch FROM statement_timestamp() - check_at)::float8 AS overdue \
    FROM queen.retention_queues WHERE kind = $1 AND check_at <= statement_timestamp() ORDER BY check_at LIMIT $2";

/// A queue is looked at again when its oldest entry can be due; one whose entries are due still is left as it is, one
/// without a window or a queue row not before its options change.
const RESCHEDULE: &str = concat!(
    "WITH seen AS MATERIALIZED (SELECT *, $1::smallint AS kind FROM unnest($2::int[], $3::bigint[]) AS u (queue_id, token)), \
     gone AS (DELETE FROM queen.retention_queues r USING seen s WHERE r.queue_id = ANY (ARRAY[s.queue_id]) AND r.kind = ANY (ARRAY[s.kind]) \
       AND NOT EXISTS (SELECT 1 FROM queen.queues q WHERE q.id = s.queue_id)) \
     UPDATE queen.retention_queues r SET check_at = coalesce(n.at, 'infinity') FROM ( \
       SELECT s.queue_id, s.kind, s.token, CASE WHEN w.seconds IS NOT NULL THEN greatest( \
           least(f.oldest_at, statement_timestamp()) + make_interval(secs => w.seconds), \
           CASE WHEN f.oldest_at IS NULL OR f.oldest_at + make_interval(secs => w.seconds) > statement_timestamp() \
             THEN statement_timestamp() + make_interval(secs => \
               CASE WHEN q.max_wait_time_seconds > 0 THEN least($4, 2) ELSE $4 END) END) END AS at \
       FROM seen s JOIN queen.queues q ON q.id = ANY (ARRAY[s.queue_id]) \
       CROSS JOIN LATERAL (SELECT ",
    window_seconds!("$1"),
    " AS seconds) w \
       LEFT JOIN LATERAL (SELECT a.oldest_at FROM queen.log_age_lists a WHERE a.kind = $1 AND a.queue_id = q.id \
         ORDER BY a.oldest_at LIMIT 1) f ON true) n \
     WHERE r.queue_id = ANY (ARRAY[n.queue_id]) AND r.kind = ANY (ARRAY[n.kind]) \
       AND n.token = CASE WHEN isfinite(r.check_at) THEN (extract(epoch FROM r.check_at) * 1000000)::bigint END"
);

/// One step over segments of locked partitions. `rule` is the rule that lets a segment go, by its own merit; from the
/// first segment that no rule lets go, nothing does. A partition that is due by age but waits for a cursor is looked at
/// again later the longer it waits, and in time for the rules that wait for nobody.
const DELETE_SEGMENTS: &str = concat!(
    "WITH p AS MATERIALIZED ( \
       SELECT p.id, p.queue_id, p.log_start, q.tenant, now.at, w.*, \
         now.at - make_interval(secs => w.completed) AS completed_before, \
         now.at - make_interval(secs => w.aged) AS aged_before, \
         now.at - make_interval(secs => w.waited) AS waited_before, \
         (SELECT min(c.committed) FROM queen.log_consumers c WHERE c.partition_id = p.id) AS slowest \
       FROM queen.log_partitions p JOIN queen.queues q ON q.id = ANY (ARRAY[p.queue_id]) \
       CROSS JOIN (SELECT clock_timestamp() AS at) now \
       CROSS JOIN LATERAL (SELECT ",
    completed_seconds!(),
    " AS completed, ",
    retention_seconds!(),
    " AS aged, ",
    max_wait_seconds!(),
    " AS waited) w WHERE p.id = ANY($1)), \
     walked AS MATERIALIZED ( \
       SELECT p.id, s.base_offset, s.base_offset + s.message_count - 1 AS last, s.message_count, \
         sum(s.payload_bytes::bigint) OVER (PARTITION BY p.id ORDER BY s.base_offset) - s.payload_bytes AS bytes_before, \
         CASE WHEN s.created_at < p.completed_before AND s.base_offset + s.message_count - 1 <= p.slowest THEN 1 \
              WHEN s.created_at < p.aged_before THEN 2 WHEN s.created_at < p.waited_before THEN 3 END AS rule \
       FROM p CROSS JOIN LATERAL ( \
         SELECT s.base_offset, s.message_count, s.payload_bytes, s.created_at FROM queen.log_segments s \
         WHERE s.partition_id = p.id AND s.base_offset >= p.log_start ORDER BY s.base_offset LIMIT $2) s), \
     kept AS (SELECT id, min(base_offset) AS first FROM walked WHERE rule IS NULL OR bytes_before > $3 GROUP BY id), \
     doomed AS MATERIALIZED (SELECT w.* FROM walked w LEFT JOIN kept k USING (id) \
       WHERE k.first IS NULL OR w.base_offset < k.first), \
     deleted AS (DELETE FROM queen.log_segments s USING doomed d \
       WHERE s.partition_id = ANY (ARRAY[d.id]) AND s.base_offset = d.base_offset), \
     started AS (SELECT p.id, coalesce(max(d.last) + 1, p.log_start) AS log_start FROM p LEFT JOIN doomed d USING (id) \
       GROUP BY p.id, p.log_start), \
     moved AS (UPDATE queen.log_partitions l SET log_start = s.log_start FROM started s \
       WHERE l.id = ANY (ARRAY[s.id]) AND l.log_start < s.log_start), \
     history AS (INSERT INTO queen.retention_history (tenant, queue_id, partition_id, partitions, kind, messages) \
       SELECT p.tenant, p.queue_id, CASE WHEN count(DISTINCT p.id) = 1 THEN min(p.id) END, count(DISTINCT p.id), \
         ($4::text[])[d.rule], sum(d.message_count) \
       FROM doomed d JOIN p USING (id) GROUP BY p.tenant, p.queue_id, d.rule), \
     next AS MATERIALIZED ( \
       SELECT s.id, p.queue_id, p.at, least(p.completed, p.aged, p.waited) AS least_window, f.created_at, \
         CASE WHEN w.id IS NOT NULL AND w.rule IS NULL AND f.created_at < p.completed_before \
         THEN least(p.at + least(greatest((p.at - f.created_at - make_interval(secs => p.completed)) / 2, \
               interval '10 seconds'), interval '1 hour'), \
             f.created_at + make_interval(secs => p.aged), f.created_at + make_interval(secs => p.waited)) \
           - make_interval(secs => least(p.completed, p.aged, p.waited)) \
         ELSE f.created_at END AS oldest_at \
       FROM started s JOIN p USING (id) LEFT JOIN LATERAL ( \
         SELECT f.base_offset, f.created_at FROM queen.log_segments f \
         WHERE f.partition_id = s.id AND f.base_offset >= s.log_start ORDER BY f.base_offset LIMIT 1) f ON true \
       LEFT JOIN walked w ON w.id = s.id AND w.base_offset = f.base_offset), \
     finished AS (DELETE FROM queen.log_age_lists l \
       USING (SELECT *, 0::smallint AS kind FROM unnest($5::int[], $6::timestamptz[], $7::bigint[]) \
         AS u (queue_id, oldest_at, id) OFFSET 0) u \
       WHERE l.kind = ANY (ARRAY[u.kind]) AND l.queue_id = ANY (ARRAY[u.queue_id]) AND l.oldest_at = u.oldest_at AND l.id = u.id), \
     listed AS (INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) \
       SELECT 0, n.queue_id, min(n.oldest_at), array_agg(n.id ORDER BY n.id) FROM next n \
       WHERE n.created_at IS NOT NULL GROUP BY n.queue_id, ",
    share_of!("extract(epoch FROM n.oldest_at - n.at)::float8 + n.least_window"),
    "), \
     noted AS (INSERT INTO queen.empty_partitions (partition_id, look_at) \
       SELECT n.id, clock_timestamp() + interval '1 day' FROM next n WHERE n.created_at IS NULL ORDER BY n.id \
       ON CONFLICT (partition_id) DO NOTHING) \
     SELECT rule::bigint, count(*) AS segments, sum(message_count)::bigint AS messages FROM doomed GROUP BY rule"
);

const DELETE_HASHES: &str = concat!(
    "WITH p AS MATERIALIZED ( \
       SELECT p.id, p.queue_id, p.txns_start, now.at, w.seconds, now.at - make_interval(secs => w.seconds) AS purged_before \
       FROM queen.log_partitions p JOIN queen.queues q ON q.id = ANY (ARRAY[p.queue_id]) \
       CROSS JOIN (SELECT clock_timestamp() AS at) now CROSS JOIN LATERAL (SELECT ",
    window_seconds!("1"),
    " AS seconds) w WHERE p.id = ANY($1)), \
     doomed AS MATERIALIZED ( \
       SELECT p.id, t.base_offset, t.base_offset + octet_length(t.hashes) / 16 AS after \
       FROM p CROSS JOIN LATERAL ( \
         SELECT t.*, sum(octet_length(t.hashes)) OVER (ORDER BY t.base_offset) - octet_length(t.hashes) AS bytes_before \
         FROM (SELECT base_offset, hashes, created_at FROM queen.log_txns t \
           WHERE t.partition_id = p.id AND t.base_offset >= p.txns_start ORDER BY t.base_offset LIMIT $2) t) t \
       WHERE t.created_at < p.purged_before AND t.bytes_before <= $3), \
     deleted AS (DELETE FROM queen.log_txns t USING doomed d \
       WHERE t.partition_id = ANY (ARRAY[d.id]) AND t.base_offset = d.base_offset), \
     started AS (SELECT p.id, coalesce(max(d.after), p.txns_start) AS txns_start FROM p LEFT JOIN doomed d USING (id) \
       GROUP BY p.id, p.txns_start), \
     moved AS (UPDATE queen.log_partitions l SET txns_start = s.txns_start FROM started s \
       WHERE l.id = ANY (ARRAY[s.id]) AND l.txns_start < s.txns_start), \
     next AS MATERIALIZED (SELECT s.id, f.created_at FROM started s CROSS JOIN LATERAL ( \
         SELECT f.created_at FROM queen.log_txns f WHERE f.partition_id = s.id AND f.base_offset >= s.txns_start \
         ORDER BY f.base_offset LIMIT 1) f), \
     finished AS (DELETE FROM queen.log_age_lists l \
       USING (SELECT *, 1::smallint AS kind FROM unnest($4::int[], $5::timestamptz[], $6::bigint[]) \
         AS u (queue_id, oldest_at, id) OFFSET 0) u \
       WHERE l.kind = ANY (ARRAY[u.kind]) AND l.queue_id = ANY (ARRAY[u.queue_id]) AND l.oldest_at = u.oldest_at AND l.id = u.id), \
     listed AS (INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) \
       SELECT 1, p.queue_id, min(n.created_at), array_agg(n.id ORDER BY n.id) FROM next n JOIN p USING (id) \
       GROUP BY p.queue_id, ",
    share_of!("extract(epoch FROM n.created_at - p.at)::float8 + p.seconds"),
    ") \
     SELECT count(*) FROM doomed"
);

impl Store {
    /// Queues in which something of this kind may be due, longest overdue first.
    pub async fn due_queues(&self, what: Aged, queues_max: i64) -> StoreResult<Vec<DueQueue>> {
        let rows = sqlx::query(DUE_QUEUES)
            .bind(what.kind())
            .bind(queues_max)
            .fetch_all(&self.claims)
            .timed("finding due work")
            .await?;
        let due = |row: &sqlx::postgres::PgRow| {
            let overdue: Option<f64> = row.try_get("overdue")?;
            let overdue = Duration::try_from_secs_f64(overdue.unwrap_or(0.0)).unwrap_or_default();
            Ok(DueQueue { queue: QueueId(row.try_get("queue_id")?), overdue, token: row.try_get("token")? })
        };
        rows.iter().map(due).collect::<Result<_, _>>().during("finding due work")
    }

    /// Says when each queue is to be looked at again, unless its options changed since it was read: not earlier than after
    /// `pause`, or after 2 s where `maxWaitTimeSeconds` is set (§8.6).
    pub async fn reschedule_queues(&self, what: Aged, queues: &[DueQueue], pause: Duration) -> StoreResult<()> {
        let (ids, tokens): (Vec<i32>, Vec<i64>) = queues.iter().map(|due| (due.queue.0, due.token)).unzip();
        sqlx::query(RESCHEDULE)
            .bind(what.kind())
            .bind(ids)
            .bind(tokens)
            .bind(pause.as_secs_f64())
            .execute(&self.claims)
            .timed("rescheduling queues")
            .await?;
        Ok(())
    }

    /// One step over as many partitions of these lists as `bounds` say, those in `skipped` aside. What somebody else holds
    /// locked, list or partition, is left out and stays listed: a step that waits must hold nothing.
    pub async fn delete_aged(
        &self,
        what: Aged,
        lists: &[AgeList],
        skipped: &HashSet<PartitionId>,
        bounds: StepBounds,
    ) -> StoreResult<Step> {
        let mut tx = self.claims.begin().timed("begin of retention").await?;
        let taken = age_lists::take(&mut tx, what, lists).await?;
        let mut seen = HashSet::new();
        let mut wanted: Vec<i64> = taken
            .iter()
            .flat_map(|taken| &taken.partitions)
            .copied()
            .filter(|id| !skipped.contains(&PartitionId(*id)) && seen.insert(*id))
            .collect();
        let later: HashSet<i64> =
            wanted.split_off(bounds.partitions_max.max(1).min(wanted.len())).into_iter().collect();
        if wanted.is_empty() {
            return Ok(Step::default());
        }
        let locked = lock(&mut tx, &wanted, true).await?;
        let started = Instant::now();
        let mut busy: HashSet<i64> = HashSet::new();
        if locked.len() < wanted.len() {
            let unlocked: Vec<i64> = wanted.iter().filter(|id| !locked.contains(id)).copied().collect();
            busy.extend(existing(&mut tx, &unlocked).await?);
        }
        let done: Vec<i64> = wanted.into_iter().filter(|id| !busy.contains(id)).collect();
        let mut step = Step::default();
        for taken in &taken {
            let of_list = |ids: &HashSet<i64>| taken.partitions.iter().any(|id| ids.contains(id));
            step.unfinished.extend(of_list(&later).then_some(taken.list));
            step.busy.extend(
                taken.partitions.iter().filter(|id| busy.contains(id)).map(|id| (taken.list, PartitionId(*id))),
            );
        }
        if done.is_empty() {
            return Ok(step);
        }
        step.deleted = delete(&mut tx, what, &taken, &locked, &done, bounds).await?;
        tx.commit().timed("commit of retention").await?;
        step.held = started.elapsed();
        Ok(step)
    }

    /// One step over one partition of a list, which waits for its lock. Nothing to do if the list has lost it meanwhile.
    pub async fn delete_aged_alone(
        &self,
        what: Aged,
        list: AgeList,
        partition: PartitionId,
        bounds: StepBounds,
    ) -> StoreResult<Deleted> {
        let mut tx = self.claims.begin().timed("begin of retention").await?;
        let locked = lock(&mut tx, &[partition.0], false).await?;
        let taken = age_lists::take(&mut tx, what, &[list]).await?;
        if !taken.iter().any(|taken| taken.partitions.contains(&partition.0)) {
            return Ok(Deleted::default());
        }
        let deleted = delete(&mut tx, what, &taken, &locked, &[partition.0], bounds).await?;
        tx.commit().timed("commit of retention").await?;
        Ok(deleted)
    }
}

/// Deletes from locked partitions, and lists them anew instead of in the lists that were taken. `done` are those and
/// the ones that do not exist.
async fn delete(
    tx: &mut PgConnection,
    what: Aged,
    taken: &[TakenList],
    locked: &[i64],
    done: &[i64],
    bounds: StepBounds,
) -> StoreResult<Deleted> {
    let touched = taken.iter().filter(|taken| taken.partitions.iter().any(|id| done.contains(id)));
    let (finished, shortened): (Vec<&TakenList>, Vec<&TakenList>) =
        touched.partition(|taken| taken.partitions.iter().all(|id| done.contains(id)));
    let finished: Keys = finished.into_iter().map(|taken| &taken.list).collect();
    if !shortened.is_empty() {
        let lists: Vec<AgeList> = shortened.into_iter().map(|taken| taken.list).collect();
        age_lists::shorten(tx, what, &lists, done).await?;
    }
    let partitions = locked.len().max(1) as i64;
    let rows_max = (bounds.rows_max / partitions).max(1);
    let bytes_max = bounds.bytes_max / partitions;
    let mut deleted = Deleted::default();
    match what {
        Aged::Segments => {
            let rows: Vec<(i64, i64, i64)> = sqlx::query_as(DELETE_SEGMENTS)
                .bind(locked)
                .bind(rows_max)
                .bind(bytes_max)
                .bind(RULES.as_slice())
                .bind(finished.queues)
                .bind(finished.oldest_at)
                .bind(finished.ids)
                .fetch_all(tx)
                .timed("deleting segments")
                .await?;
            for (rule, segments, messages) in rows {
                let Some(at) = usize::try_from(rule - 1).ok().filter(|at| *at < RULES.len()) else { continue };
                deleted.segments[at] = segments.unsigned_abs();
                deleted.messages[at] = messages.unsigned_abs();
            }
        }
        Aged::Hashes => {
            let rows: i64 = sqlx::query_scalar(DELETE_HASHES)
                .bind(locked)
                .bind(rows_max)
                .bind(bytes_max)
                .bind(finished.queues)
                .bind(finished.oldest_at)
                .bind(finished.ids)
                .fetch_one(tx)
                .timed("purging hashes")
                .await?;
            deleted.hash_rows = rows.unsigned_abs();
        }
    }
    Ok(deleted)
}

/// Locks the partitions that exist, in id order, the lock that pushes take.
async fn lock(tx: &mut PgConnection, ids: &[i64], skip_locked: bool) -> StoreResult<Vec<i64>> {
    let sql = if skip_locked {
        "SELECT id FROM queen.log_partitions WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED"
    } else {
        "SELECT id FROM queen.log_partitions WHERE id = ANY($1) ORDER BY id FOR NO KEY UPDATE"
    };
    sqlx::query_scalar(sql).bind(ids).fetch_all(tx).timed("locking partitions").await
}

/// Those of the partitions that exist.
async fn existing(tx: &mut PgConnection, ids: &[i64]) -> StoreResult<Vec<i64>> {
    let sql = "SELECT id FROM queen.log_partitions WHERE id = ANY($1)";
    sqlx::query_scalar(sql).bind(ids).fetch_all(tx).timed("locking partitions").await
}
