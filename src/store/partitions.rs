//! Partition rows: made by the first push, locked by every push, paged through by the ready index.

use sqlx::{PgConnection, Row};

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::{GroupId, Offset, PartitionId, QueueId};

/// Names one partition before its key is known.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartitionKey {
    /// The queue.
    pub queue: QueueId,
    /// The partition's name inside the queue.
    pub name: String,
}

/// A partition whose row this transaction holds locked.
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

/// Whether group `g`, with cursor `c` if it has one, may find something in partition `p`.
macro_rules! pending {
    () => {
        "p.last_offset >= p.log_start AND CASE WHEN c.partition_id IS NOT NULL THEN c.committed < p.last_offset \
           ELSE g.mode IS DISTINCT FROM 'new' OR p.last_write_at >= g.subscribed_at - interval '1 minute' END"
    };
}

pub(super) use pending;

impl Store {
    /// Makes the partitions that do not exist, in its own short transaction: creators of one partition then never wait
    /// for each other's segments. `keys` come sorted. A queue deleted meanwhile gets none.
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

    /// One page of a queue's partitions in name order after `after`, each with whether the group may find something in
    /// it. A partition that the group never met counts as pending unless it was last written well before the group
    /// registered.
    pub async fn page_partitions(
        &self,
        queue: QueueId,
        group: GroupId,
        after: Option<&str>,
        limit: i64,
    ) -> StoreResult<Vec<PartitionCandidate>> {
        let rows = sqlx::query(
            concat!("SELECT p.id, p.name, ", pending!(), " AS pending \
             FROM (SELECT * FROM queen.log_partitions WHERE queue_id = $1 AND name >= coalesce($3, '') AND name IS DISTINCT FROM $3 \
                   ORDER BY name LIMIT $4) p \
             JOIN queen.consumer_groups g ON g.id = $2 \
             LEFT JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[p.id]) AND c.group_id = $2 \
             ORDER BY p.name"),
        )
        .bind(queue.0)
        .bind(group.0)
        .bind(after)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("paging partitions")
        .await?;
        rows.iter()
            .map(|row| {
                Ok(PartitionCandidate {
                    id: PartitionId(row.try_get("id")?),
                    name: row.try_get("name")?,
                    pending: row.try_get("pending")?,
                })
            })
            .collect::<Result<_, _>>()
            .during("paging partitions")
    }
}

/// Locks the partitions that exist, in id order (the global lock order), until the transaction ends.
pub(super) async fn lock(tx: &mut PgConnection, keys: &[PartitionKey]) -> StoreResult<Vec<LockedPartition>> {
    let (queues, names): (Vec<i32>, Vec<&str>) = keys.iter().map(|k| (k.queue.0, k.name.as_str())).unzip();
    let rows = sqlx::query(
        "SELECT p.id, p.queue_id, p.name, p.last_offset, p.last_offset >= greatest(p.log_start, p.txns_start) AS is_listed \
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
            Ok(LockedPartition {
                id: PartitionId(row.try_get("id")?),
                key: PartitionKey { queue: QueueId(row.try_get("queue_id")?), name: row.try_get("name")? },
                last_offset: Offset(row.try_get("last_offset")?),
                is_listed: row.try_get("is_listed")?,
            })
        })
        .collect::<Result<_, _>>()
        .during("locking partitions")
}
