//! The lists by which retention finds its work: partitions of a queue whose oldest segments (or hashes) are of about the
//! same age (`docs/adr/2026-11-30-retention.md`).
//!
//! A partition that holds something is in at least one list; pushes and retention see to that under its lock. After its
//! insertion a list only loses members. Nobody waits for the row of a list while holding one: lists are taken by
//! `SKIP LOCKED`, so they have no place in the lock order.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::Store;
use super::error::{During, StoreResult, Timed};
use super::retention::{Aged, DueQueue};
use super::windows::window_seconds;
use crate::ids::QueueId;

/// Partitions of one list. Longer ones would hardly be smaller per partition, and every step that takes some of the partitions
/// writes the rest again.
pub const LIST_MAX: usize = 128;

/// One list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AgeList {
    /// The queue of its partitions.
    pub queue: QueueId,
    /// Not younger than the oldest thing in any of them.
    pub oldest_at: DateTime<Utc>,
    /// Unique.
    pub id: i64,
    /// Partitions in it when it was read.
    pub partitions: usize,
}

impl AgeList {
    pub(super) fn of(row: &PgRow) -> Result<AgeList, sqlx::Error> {
        let partitions: i32 = row.try_get("partitions")?;
        Ok(AgeList {
            queue: QueueId(row.try_get("queue_id")?),
            oldest_at: row.try_get("oldest_at")?,
            id: row.try_get("id")?,
            partitions: usize::try_from(partitions).unwrap_or(0),
        })
    }
}

/// The keys of lists, by column.
#[derive(Debug, Default)]
pub(super) struct Keys {
    pub queues: Vec<i32>,
    pub oldest_at: Vec<DateTime<Utc>>,
    pub ids: Vec<i64>,
}

impl<'a> FromIterator<&'a AgeList> for Keys {
    fn from_iter<I: IntoIterator<Item = &'a AgeList>>(lists: I) -> Keys {
        let mut keys = Keys::default();
        for list in lists {
            keys.queues.push(list.queue.0);
            keys.oldest_at.push(list.oldest_at);
            keys.ids.push(list.id);
        }
        keys
    }
}

/// A list whose row this transaction holds locked.
#[derive(Clone, Debug)]
pub(super) struct TakenList {
    pub list: AgeList,
    pub partitions: Vec<i64>,
}

/// Which of several partitions that are listed anew share a list: those whose next look is due at about the same time.
/// `$left` is how many seconds that is away. One that is looked at too early waits for a sixteenth of that time at most
/// then, so there are few such looks, however long the window is.
macro_rules! share_of {
    ($left:literal) => {
        concat!("floor(16 * ln(greatest(", $left, ", 5)))")
    };
}
pub(super) use share_of;

/// Lists of each queue whose time has come, oldest first, as many as hold `$3` partitions.
const DUE_LISTS: &str = concat!(
    "SELECT l.queue_id, l.oldest_at, l.id, l.partitions FROM unnest($2::int[]) AS u (queue_id) \
     JOIN queen.queues q ON q.id = ANY (ARRAY[u.queue_id]) \
     CROSS JOIN LATERAL (SELECT l.*, sum(l.partitions) OVER (ORDER BY l.oldest_at, l.id) - l.partitions AS before \
       FROM (SELECT l.queue_id, l.oldest_at, l.id, cardinality(l.partition_ids) AS partitions \
         FROM queen.log_age_lists l WHERE l.kind = $1 AND l.queue_id = q.id \
           AND l.oldest_at < statement_timestamp() - make_interval(secs => ",
    window_seconds!("$1"),
    ") ORDER BY l.oldest_at, l.id LIMIT $3) l) l WHERE l.before < $3 ORDER BY l.oldest_at, l.id LIMIT $4"
);

impl Store {
    /// Lists of these queues with something past its queue's window, oldest first.
    pub async fn due_lists(&self, what: Aged, queues: &[DueQueue], partitions_max: usize) -> StoreResult<Vec<AgeList>> {
        let ids: Vec<i32> = queues.iter().map(|due| due.queue.0).collect();
        // Every queue gets a share, so that one cannot starve the others.
        let share = (partitions_max / ids.len().max(1)).max(64);
        let rows = sqlx::query(DUE_LISTS)
            .bind(what.kind())
            .bind(ids)
            .bind(share as i64)
            .bind(partitions_max as i64)
            .fetch_all(&self.claims)
            .timed("finding due work")
            .await?;
        let mut left = partitions_max;
        let mut lists = Vec::with_capacity(rows.len());
        for row in &rows {
            let list = AgeList::of(row).during("finding due work")?;
            if left == 0 {
                break;
            }
            left = left.saturating_sub(list.partitions);
            lists.push(list);
        }
        Ok(lists)
    }
}

/// Locks the lists that exist and that nobody else has, oldest first.
pub(super) async fn take(tx: &mut PgConnection, what: Aged, lists: &[AgeList]) -> StoreResult<Vec<TakenList>> {
    let keys: Keys = lists.iter().collect();
    let rows = sqlx::query(
        "SELECT l.queue_id, l.oldest_at, l.id, l.partition_ids, cardinality(l.partition_ids) AS partitions \
         FROM (SELECT *, $1::smallint AS kind FROM unnest($2::int[], $3::timestamptz[], $4::bigint[]) \
           AS u (queue_id, oldest_at, id) OFFSET 0) u \
         JOIN queen.log_age_lists l ON l.kind = ANY (ARRAY[u.kind]) AND l.queue_id = ANY (ARRAY[u.queue_id]) \
           AND l.oldest_at = u.oldest_at AND l.id = u.id FOR UPDATE OF l SKIP LOCKED",
    )
    .bind(what.kind())
    .bind(keys.queues)
    .bind(keys.oldest_at)
    .bind(keys.ids)
    .fetch_all(tx)
    .timed("taking lists")
    .await?;
    let taken = |row: &PgRow| Ok(TakenList { list: AgeList::of(row)?, partitions: row.try_get("partition_ids")? });
    rows.iter().map(taken).collect::<Result<_, _>>().during("taking lists")
}

/// Takes the partitions of `gone` off lists that are locked and keep others.
pub(super) async fn shorten(tx: &mut PgConnection, what: Aged, lists: &[AgeList], gone: &[i64]) -> StoreResult<()> {
    let keys: Keys = lists.iter().collect();
    sqlx::query(
        "UPDATE queen.log_age_lists l \
         SET partition_ids = ARRAY(SELECT i.id FROM unnest(l.partition_ids) AS i (id) WHERE i.id <> ALL ($5)) \
         FROM (SELECT *, $1::smallint AS kind FROM unnest($2::int[], $3::timestamptz[], $4::bigint[]) \
           AS u (queue_id, oldest_at, id) OFFSET 0) u \
         WHERE l.kind = ANY (ARRAY[u.kind]) AND l.queue_id = ANY (ARRAY[u.queue_id]) AND l.oldest_at = u.oldest_at AND l.id = u.id",
    )
    .bind(what.kind())
    .bind(keys.queues)
    .bind(keys.oldest_at)
    .bind(keys.ids)
    .bind(gone)
    .execute(tx)
    .timed("taking lists")
    .await?;
    Ok(())
}

/// Which kinds of a partition `p` have nothing stored, with the queue and the age that its list gets.
macro_rules! of_empty {
    ($columns:literal) => {
        concat!(
            "SELECT k.kind, p.queue_id, greatest(statement_timestamp(), p.last_write_at) AS at, ",
            $columns,
            " FROM queen.log_partitions p JOIN (VALUES (0), (1)) AS k (kind) \
               ON p.last_offset < CASE k.kind WHEN 0 THEN p.log_start ELSE p.txns_start END"
        )
    };
}

/// Lists partitions that hold nothing yet and are about to: those that have no segments, no hashes, or neither. They are
/// locked by this transaction.
pub(super) async fn list_empty(tx: &mut PgConnection, partitions: &[i64]) -> StoreResult<()> {
    // Grouping costs a lone partition more than the rows that it saves.
    let query = match partitions {
        [partition] => sqlx::query(concat!(
            "INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) ",
            of_empty!("ARRAY[p.id]"),
            " WHERE p.id = $1"
        ))
        .bind(*partition),
        _ => sqlx::query(concat!(
            "INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) \
             SELECT e.kind, e.queue_id, min(e.at), array_agg(e.id) FROM (",
            of_empty!("p.id, (row_number() OVER (PARTITION BY k.kind, p.queue_id ORDER BY p.id) - 1) / $2 AS nth"),
            " WHERE p.id = ANY($1)) e GROUP BY e.kind, e.queue_id, e.nth"
        ))
        .bind(partitions)
        .bind(LIST_MAX as i64),
    };
    query.execute(tx).timed("listing for retention").await?;
    Ok(())
}
