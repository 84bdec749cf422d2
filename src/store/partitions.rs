//! Partition rows: made with their first messages, locked by every push, paged through by the ready index.

use chrono::{DateTime, Utc};
use sqlx::{PgConnection, Row};

use super::Store;
use super::age_lists::LIST_MAX;
use super::error::{During, StoreError, StoreResult, Timed};
use crate::ids::{GroupId, Offset, PartitionId, QueueId};

/// Names one partition before its key is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionKey {
    /// The queue.
    pub queue: QueueId,
    /// The partition's name inside the queue.
    pub name: String,
}

/// A partition whose row this transaction holds locked, or is about to make.
#[derive(Clone, Debug)]
pub struct LockedPartition {
    /// Key of the row.
    pub id: PartitionId,
    /// What it was asked for as.
    pub key: PartitionKey,
    /// Last allocated offset, [`Offset::NONE`] before the first message.
    pub last_offset: Offset,
    /// Whether retention knows of its segments and of its hashes.
    pub is_listed: bool,
    /// Whether it does not exist until this transaction stores messages in it.
    pub is_new: bool,
}

/// Where the locked row of a partition is, and when it was last written. While its lock is held, nobody moves it.
#[derive(Clone, Debug)]
pub(super) struct LockedRow {
    /// `ctid`, as text.
    pub place: String,
    pub last_write_at: DateTime<Utc>,
}

/// One partition as the ready index sees it.
#[derive(Clone, Debug)]
pub struct PartitionCandidate {
    /// Key of the row.
    pub id: PartitionId,
    /// Name, the page's ordering.
    pub name: String,
    /// Whether the group may find something in it.
    pub pending: bool,
}

/// A page of a walk through the partitions of a queue.
#[derive(Clone, Debug, Default)]
pub struct PartitionPage {
    /// Partitions that were looked at.
    pub walked: u64,
    /// Name of the last of them, where the next page goes on.
    pub last: Option<String>,
    /// Those in which the group may find something, in name order.
    pub pending: Vec<PartitionId>,
}

/// Whether group `g`, with cursor `c` if it has one, may find something in partition `p`.
macro_rules! pending {
    () => {
        "p.last_offset >= p.log_start AND CASE WHEN c.partition_id IS NOT NULL THEN c.committed < p.last_offset \
           ELSE g.mode IS DISTINCT FROM 'new' OR p.last_write_at >= g.subscribed_at - interval '1 minute' END"
    };
}

pub(super) use pending;

impl Store {
    /// Makes the partitions that do not exist, in its own short transaction: for those who were overtaken too often while
    /// they made them with their messages. `keys` come sorted. A queue deleted meanwhile gets none.
    pub async fn create_partitions(&self, keys: &[PartitionKey]) -> StoreResult<()> {
        let (queues, names): (Vec<i32>, Vec<&str>) = keys.iter().map(|k| (k.queue.0, k.name.as_str())).unzip();
        sqlx::query(
            "INSERT INTO queen.log_partitions (queue_id, name) \
             SELECT u.queue_id, u.name FROM unnest($1::int[], $2::text[]) WITH ORDINALITY AS u (queue_id, name, ord) \
             JOIN (SELECT id FROM queen.queues WHERE id = ANY($1) ORDER BY id FOR KEY SHARE) q ON q.id = u.queue_id \
             ORDER BY u.ord \
             ON CONFLICT (queue_id, name) DO NOTHING",
        )
        .bind(queues)
        .bind(names)
        .execute(&self.pool)
        .timed("creating partitions")
        .await?;
        Ok(())
    }

    /// The partition of this name, if it exists.
    pub async fn find_partition(&self, queue: QueueId, name: &str) -> StoreResult<Option<PartitionId>> {
        let id: Option<i64> =
            sqlx::query_scalar("SELECT id FROM queen.log_partitions WHERE queue_id = $1 AND name = $2")
                .bind(queue.0)
                .bind(name)
                .fetch_optional(&self.pool)
                .timed("finding a partition")
                .await?;
        Ok(id.map(PartitionId))
    }

    /// One page of a queue's partitions in name order after `after`: which of them the group may find something in. A partition
    /// that the group never met counts as pending unless it was last written well before the group registered. What has
    /// nothing is counted and not answered: after a restart that may be a million rows.
    pub async fn page_partitions(
        &self,
        queue: QueueId,
        group: GroupId,
        after: Option<&str>,
        limit: i64,
    ) -> StoreResult<PartitionPage> {
        let (walked, last, pending): (i64, Option<String>, Option<Vec<i64>>) = sqlx::query_as(
            concat!("SELECT count(*), max(p.name), array_agg(p.id ORDER BY p.name) FILTER (WHERE ", pending!(), ") \
             FROM (SELECT *, $2::int AS group_id FROM queen.log_partitions \
                   WHERE queue_id = $1 AND name >= coalesce($3, '') AND name IS DISTINCT FROM $3 ORDER BY name LIMIT $4) p \
             JOIN queen.consumer_groups g ON g.id = $2 \
             LEFT JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[p.id]) AND c.group_id = p.group_id"),
        )
        .bind(queue.0)
        .bind(group.0)
        .bind(after)
        .bind(limit)
        .fetch_one(&self.pool)
        .timed("paging partitions")
        .await?;
        let pending = pending.unwrap_or_default().into_iter().map(PartitionId).collect();
        Ok(PartitionPage { walked: walked.unsigned_abs(), last, pending })
    }
}

/// Locks the partitions that exist, in id order (the global lock order), until the transaction ends.
pub(super) async fn lock(
    tx: &mut PgConnection,
    keys: &[PartitionKey],
) -> StoreResult<Vec<(LockedPartition, LockedRow)>> {
    let (queues, names): (Vec<i32>, Vec<&str>) = keys.iter().map(|k| (k.queue.0, k.name.as_str())).unzip();
    let rows = sqlx::query(
        "SELECT p.id, p.queue_id, p.name, p.last_offset, p.last_offset >= greatest(p.log_start, p.txns_start) AS is_listed, \
           p.ctid::text AS place, p.last_write_at \
         FROM unnest($1::int[], $2::text[]) AS u (queue_id, name) \
         JOIN queen.log_partitions p ON p.queue_id = ANY (ARRAY[u.queue_id]) AND p.name = u.name \
         ORDER BY p.id + 0 FOR NO KEY UPDATE OF p",
    )
    .bind(queues)
    .bind(names)
    .fetch_all(tx)
    .timed("locking partitions")
    .await?;
    rows.iter()
        .map(|row| {
            let partition = LockedPartition {
                id: PartitionId(row.try_get("id")?),
                key: PartitionKey { queue: QueueId(row.try_get("queue_id")?), name: row.try_get("name")? },
                last_offset: Offset(row.try_get("last_offset")?),
                is_listed: row.try_get("is_listed")?,
                is_new: false,
            };
            Ok((partition, LockedRow { place: row.try_get("place")?, last_write_at: row.try_get("last_write_at")? }))
        })
        .collect::<Result<_, _>>()
        .during("locking partitions")
}

/// Keys for partitions that are to be made by this transaction, and their queues kept from being deleted. `None`: a queue
/// is gone or somebody is at its row; no waiting for that here, since whoever deletes a queue waits for its partitions.
pub(super) async fn allot(tx: &mut PgConnection, keys: &[PartitionKey]) -> StoreResult<Option<Vec<LockedPartition>>> {
    let mut queues: Vec<i32> = keys.iter().map(|key| key.queue.0).collect();
    queues.sort_unstable();
    queues.dedup();
    let rows: Vec<(Option<i32>, Option<i64>)> = sqlx::query_as(
        "WITH kept AS MATERIALIZED ( \
           SELECT id FROM queen.queues WHERE id = ANY($1) ORDER BY id FOR KEY SHARE SKIP LOCKED) \
         SELECT id, NULL::bigint FROM kept \
         UNION ALL SELECT NULL, nextval('queen.log_partitions_id_seq') FROM generate_series(1, $2)",
    )
    .bind(&queues)
    .bind(keys.len() as i64)
    .fetch_all(tx)
    .timed("creating partitions")
    .await?;
    if rows.iter().filter(|(queue, _)| queue.is_some()).count() < queues.len() {
        return Ok(None);
    }
    let ids = rows.into_iter().filter_map(|(_, id)| id.map(PartitionId));
    let new = |(id, key): (PartitionId, &PartitionKey)| LockedPartition {
        id,
        key: key.clone(),
        last_offset: Offset::NONE,
        is_listed: true,
        is_new: true,
    };
    Ok(Some(ids.zip(keys).map(new).collect()))
}

/// A row made with the messages of its partition.
#[derive(Clone, Debug)]
pub(super) struct NewPartition {
    pub id: i64,
    pub key: PartitionKey,
    /// Offset of the last message that this transaction stores in it.
    pub last_offset: i64,
}

/// When partition `p` was made: when it was last written, unless the row says.
macro_rules! made_at {
    () => {
        "coalesce(p.created_at, p.last_write_at)"
    };
}
pub(super) use made_at;

/// Makes rows, and lists for retention by the statement `$listed` over what was made.
macro_rules! make {
    ($listed:literal) => {
        concat!(
            "WITH made AS ( \
               INSERT INTO queen.log_partitions (id, queue_id, name, last_offset, last_write_at, created_at) \
                 OVERRIDING SYSTEM VALUE \
               SELECT n.id, n.queue_id, n.name, n.last_offset, statement_timestamp(), NULL \
               FROM unnest($1::bigint[], $2::int[], $3::text[], $4::bigint[]) WITH ORDINALITY \
                 AS n (id, queue_id, name, last_offset, ord) ORDER BY n.ord \
               ON CONFLICT (queue_id, name) DO NOTHING RETURNING id, queue_id, last_write_at), \
             listed AS ( \
               INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) ",
            $listed,
            ") SELECT id, last_write_at, pg_current_xact_id()::text FROM made"
        )
    };
}

/// Makes the rows as they are to stay: no update follows. Retention learns of them in the same statement. `rows` come sorted
/// by key: whoever waits for another maker waits for a name behind all that it has made itself. Answers the time at which each
/// was last written, and the transaction.
pub(super) async fn make(
    tx: &mut PgConnection,
    rows: &[NewPartition],
) -> StoreResult<Vec<(i64, DateTime<Utc>, String)>> {
    // Grouping costs a lone partition more than the rows that it saves. Several were allotted one after the other: by their
    // ids they fall into full lists.
    let sql = if rows.len() == 1 {
        make!(
            "SELECT k.kind, m.queue_id, m.last_write_at, ARRAY[m.id] FROM made m CROSS JOIN (VALUES (0), (1)) AS k (kind) \
           WHERE $5::bigint > 0"
        )
    } else {
        make!(
            "SELECT k.kind, m.queue_id, min(m.last_write_at), array_agg(m.id) \
           FROM made m CROSS JOIN (VALUES (0), (1)) AS k (kind) GROUP BY k.kind, m.queue_id, m.id / $5"
        )
    };
    let made: Vec<(i64, DateTime<Utc>, String)> = sqlx::query_as(sql)
        .bind(rows.iter().map(|row| row.id).collect::<Vec<_>>())
        .bind(rows.iter().map(|row| row.key.queue.0).collect::<Vec<_>>())
        .bind(rows.iter().map(|row| row.key.name.as_str()).collect::<Vec<_>>())
        .bind(rows.iter().map(|row| row.last_offset).collect::<Vec<_>>())
        .bind(LIST_MAX as i64)
        .fetch_all(tx)
        .timed("creating partitions")
        .await?;
    if made.len() < rows.len() { Err(StoreError::Overtaken) } else { Ok(made) }
}
