//! Stored messages by address and by age, for people (`spec/admin.md` §5). Nothing here is on a hot path, and nothing here
//! has an index of its own: every read is a bounded walk of a primary key.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::{Offset, PartitionId, TransactionHash};

/// A partition that may hold recent messages, with what its messages show.
#[derive(Clone, Debug)]
pub struct MessagePlace {
    /// The partition.
    pub partition: PartitionId,
    /// Its name.
    pub partition_name: String,
    /// Its queue.
    pub queue_name: String,
    /// Namespace of the queue.
    pub namespace: String,
    /// Task of the queue.
    pub task: String,
    /// Priority of the queue.
    pub priority: i32,
    /// Last push.
    pub last_write_at: DateTime<Utc>,
}

/// One stored row of hashes, without them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashRun {
    /// The partition.
    pub partition: PartitionId,
    /// Offset of the first message.
    pub base: Offset,
    /// Messages.
    pub count: i64,
    /// Commit time.
    pub created_at: DateTime<Utc>,
}

/// A group's cursor on one partition.
#[derive(Clone, Debug)]
pub struct PlaceCursor {
    /// The partition.
    pub partition: PartitionId,
    /// Name of the group.
    pub group: String,
    /// Last finished offset.
    pub committed: Offset,
    /// End of the span under a live lease.
    pub leased_to: Option<Offset>,
    /// End of that lease.
    pub lease_expires_at: Option<DateTime<Utc>>,
}

/// Where candidates of a listing come from.
#[derive(Clone, Debug, Default)]
pub struct PlaceFilter {
    /// Queues, by exact name, namespace, task.
    pub queue: Option<String>,
    /// See `queue`.
    pub namespace: Option<String>,
    /// See `queue`.
    pub task: Option<String>,
    /// Partition name.
    pub partition: Option<String>,
    /// Partitions known to have been written lately.
    pub recent: Vec<PartitionId>,
    /// Only those written at or after this instant.
    pub from: DateTime<Utc>,
    /// Queues that are looked through, and partitions of each, in name order.
    pub queues_max: i64,
    /// See `queues_max`.
    pub partitions_max: i64,
    /// Partitions found that way, in all.
    pub candidates_max: i64,
    /// Most places answered, those written last.
    pub places_max: i64,
}

/// What is kept of a message that a group gave up.
#[derive(Clone, Debug, sqlx::FromRow)]
pub struct LetterSnapshot {
    /// Offset of the message.
    pub log_offset: i64,
    /// Its id.
    pub message_id: uuid::Uuid,
    /// Its commit time.
    pub message_created_at: DateTime<Utc>,
    /// Its payload, as stored.
    pub payload: Vec<u8>,
    /// Why it was given up.
    pub reason: String,
    /// Failed acks charged when it was.
    pub retry_count: i32,
}

impl Store {
    /// The newest dead letter of one message, whichever group filed it.
    pub async fn letter_snapshot(
        &self,
        partition: PartitionId,
        transaction: &str,
    ) -> StoreResult<Option<LetterSnapshot>> {
        sqlx::query_as(
            "SELECT log_offset, message_id, message_created_at, payload, reason, retry_count FROM queen.dead_letters \
             WHERE partition_id = $1 AND transaction_id = $2 AND tenant = queen.default_tenant() \
             ORDER BY failed_at DESC, id DESC LIMIT 1",
        )
        .bind(partition.0)
        .bind(transaction)
        .fetch_optional(&self.pool)
        .timed("finding a dead letter")
        .await
    }

    /// Partitions that were written in the window, the last written first.
    pub async fn message_places(&self, filter: &PlaceFilter) -> StoreResult<Vec<MessagePlace>> {
        let recent: Vec<i64> = filter.recent.iter().map(|id| id.0).collect();
        let rows = sqlx::query(
            "WITH wanted AS MATERIALIZED ( \
               SELECT q.id FROM queen.queues q LEFT JOIN LATERAL (SELECT * FROM queen.stats s WHERE s.queue_id = q.id LIMIT 1) s ON true \
               WHERE q.tenant = queen.default_tenant() AND ($1::text IS NULL OR q.name = $1) \
                 AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3) \
               ORDER BY s.last_write_at DESC NULLS LAST, q.id DESC LIMIT $7), \
             candidates AS MATERIALIZED ( \
               (SELECT p.id FROM wanted w CROSS JOIN LATERAL ( \
                 SELECT id FROM queen.log_partitions p WHERE p.queue_id = w.id AND ($4::text IS NULL OR p.name = $4) \
                   AND p.last_write_at >= $6 ORDER BY p.name LIMIT $8) p LIMIT $10) \
               UNION SELECT unnest($5::bigint[])) \
             SELECT p.id, p.name, q.name AS queue_name, q.namespace, q.task, q.priority, p.last_write_at \
             FROM candidates c CROSS JOIN LATERAL (SELECT * FROM queen.log_partitions p WHERE p.id = c.id LIMIT 1) p \
             CROSS JOIN LATERAL (SELECT * FROM queen.queues q WHERE q.id = p.queue_id LIMIT 1) q \
             WHERE q.tenant = queen.default_tenant() AND p.last_offset >= 0 AND p.last_write_at >= $6 \
               AND ($1::text IS NULL OR q.name = $1) AND ($2::text IS NULL OR q.namespace = $2) \
               AND ($3::text IS NULL OR q.task = $3) AND ($4::text IS NULL OR p.name = $4) \
             ORDER BY p.last_write_at DESC, p.id DESC LIMIT $9",
        )
        .bind(&filter.queue)
        .bind(&filter.namespace)
        .bind(&filter.task)
        .bind(&filter.partition)
        .bind(recent)
        .bind(filter.from)
        .bind(filter.queues_max)
        .bind(filter.partitions_max)
        .bind(filter.places_max)
        .bind(filter.candidates_max)
        .fetch_all(&self.pool)
        .timed("finding recent partitions")
        .await?;
        rows.iter().map(place_of).collect::<Result<_, _>>().during("finding recent partitions")
    }

    /// The newest hash rows of each partition inside a window, newest first, out of the newest `rows_max` of each.
    pub async fn newest_runs(
        &self,
        partitions: &[PartitionId],
        from: DateTime<Utc>,
        to: DateTime<Utc>,
        rows_max: i64,
    ) -> StoreResult<Vec<HashRun>> {
        let ids: Vec<i64> = partitions.iter().map(|id| id.0).collect();
        let rows = sqlx::query(
            "SELECT t.partition_id, t.base_offset, t.created_at, t.count FROM unnest($1::bigint[]) AS u (id) \
             CROSS JOIN LATERAL ( \
               SELECT t.partition_id, t.base_offset, t.created_at, octet_length(t.hashes) / 16 AS count \
               FROM queen.log_txns t WHERE t.partition_id = u.id ORDER BY t.base_offset DESC LIMIT $4) t \
             WHERE t.created_at >= $2 AND t.created_at < $3",
        )
        .bind(ids)
        .bind(from)
        .bind(to)
        .bind(rows_max)
        .fetch_all(&self.pool)
        .timed("listing messages")
        .await?;
        rows.iter()
            .map(|row| {
                Ok(HashRun {
                    partition: PartitionId(row.try_get("partition_id")?),
                    base: Offset(row.try_get("base_offset")?),
                    created_at: row.try_get("created_at")?,
                    count: i64::from(row.try_get::<i32, _>("count")?),
                })
            })
            .collect::<Result<_, _>>()
            .during("listing messages")
    }

    /// Every group's cursor on these partitions.
    pub async fn place_cursors(&self, partitions: &[PartitionId]) -> StoreResult<Vec<PlaceCursor>> {
        let ids: Vec<i64> = partitions.iter().map(|id| id.0).collect();
        let rows = sqlx::query(
            "SELECT c.partition_id, g.name, c.committed, \
               CASE WHEN c.worker_id IS NOT NULL AND c.lease_expires_at > statement_timestamp() THEN c.batch_end END \
                 AS leased_to, \
               CASE WHEN c.worker_id IS NOT NULL AND c.lease_expires_at > statement_timestamp() THEN c.lease_expires_at END \
                 AS lease_expires_at \
             FROM unnest($1::bigint[]) AS u (id) \
             CROSS JOIN LATERAL (SELECT * FROM queen.log_consumers c WHERE c.partition_id = u.id OFFSET 0) c \
             CROSS JOIN LATERAL (SELECT * FROM queen.consumer_groups g WHERE g.id = c.group_id LIMIT 1) g ORDER BY c.partition_id, g.name",
        )
        .bind(ids)
        .fetch_all(&self.pool)
        .timed("reading cursors")
        .await?;
        rows.iter()
            .map(|row| {
                Ok(PlaceCursor {
                    partition: PartitionId(row.try_get("partition_id")?),
                    group: row.try_get("name")?,
                    committed: Offset(row.try_get("committed")?),
                    leased_to: row.try_get::<Option<i64>, _>("leased_to")?.map(Offset),
                    lease_expires_at: row.try_get("lease_expires_at")?,
                })
            })
            .collect::<Result<_, _>>()
            .during("reading cursors")
    }

    /// Which offsets of these spans of partitions are dead for some group.
    pub async fn dead_offsets(
        &self,
        spans: &[(PartitionId, Offset, Offset)],
    ) -> StoreResult<Vec<(PartitionId, Offset)>> {
        let rows: Vec<(i64, i64)> = sqlx::query_as(
            "SELECT DISTINCT d.partition_id, d.log_offset \
             FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS u (id, first_offset, last_offset) \
             CROSS JOIN LATERAL (SELECT * FROM queen.dead_letters d WHERE d.partition_id = u.id \
               AND d.log_offset BETWEEN u.first_offset AND u.last_offset OFFSET 0) d",
        )
        .bind(spans.iter().map(|(id, ..)| id.0).collect::<Vec<_>>())
        .bind(spans.iter().map(|(_, first, _)| first.0).collect::<Vec<_>>())
        .bind(spans.iter().map(|(.., last)| last.0).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .timed("finding dead offsets")
        .await?;
        Ok(rows.into_iter().map(|(partition, offset)| (PartitionId(partition), Offset(offset))).collect())
    }

    /// The hashes of whole rows, by their base offsets.
    pub async fn hashes_of_runs(
        &self,
        runs: &[(PartitionId, Offset)],
    ) -> StoreResult<Vec<(PartitionId, Offset, Vec<u8>)>> {
        let rows: Vec<(i64, i64, Vec<u8>)> = sqlx::query_as(
            "SELECT t.partition_id, t.base_offset, t.hashes FROM unnest($1::bigint[], $2::bigint[]) AS u (id, base) \
             CROSS JOIN LATERAL (SELECT * FROM queen.log_txns t WHERE t.partition_id = u.id AND t.base_offset = u.base LIMIT 1) t",
        )
        .bind(runs.iter().map(|(id, _)| id.0).collect::<Vec<_>>())
        .bind(runs.iter().map(|(_, base)| base.0).collect::<Vec<_>>())
        .fetch_all(&self.pool)
        .timed("reading transaction ids")
        .await?;
        Ok(rows.into_iter().map(|(id, base, hashes)| (PartitionId(id), Offset(base), hashes)).collect())
    }

    /// One page of a partition's hash rows below `below`, newest first, those that may hold `hash` with their hashes; and
    /// the base offset where the page ended (`None` past the oldest row).
    pub async fn find_hash(
        &self,
        partition: PartitionId,
        hash: TransactionHash,
        below: i64,
        rows_max: i64,
    ) -> StoreResult<(Vec<(Offset, Vec<u8>)>, Option<i64>)> {
        let rows: Vec<(i64, Option<Vec<u8>>)> = sqlx::query_as(
            "SELECT t.base_offset, CASE WHEN position($2 IN t.hashes) > 0 THEN t.hashes END \
             FROM (SELECT base_offset, hashes FROM queen.log_txns WHERE partition_id = $1 AND base_offset < $3 \
                   ORDER BY base_offset DESC LIMIT $4) t ORDER BY t.base_offset DESC",
        )
        .bind(partition.0)
        .bind(hash.to_bytes().to_vec())
        .bind(below)
        .bind(rows_max)
        .fetch_all(&self.pool)
        .timed("finding a message")
        .await?;
        let end = rows.last().map(|(base, _)| *base);
        let hits = rows.into_iter().filter_map(|(base, hashes)| Some((Offset(base), hashes?))).collect();
        Ok((hits, end))
    }

    /// One page of a partition's segments below `below`, newest first.
    pub async fn segments_below(
        &self,
        partition: PartitionId,
        below: i64,
        limit: i64,
    ) -> StoreResult<Vec<(Offset, Vec<u8>, DateTime<Utc>)>> {
        let rows: Vec<(i64, Vec<u8>, DateTime<Utc>)> = sqlx::query_as(
            "SELECT base_offset, frames, created_at FROM queen.log_segments WHERE partition_id = $1 AND base_offset < $2 \
             ORDER BY base_offset DESC LIMIT $3",
        )
        .bind(partition.0)
        .bind(below)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("finding a message")
        .await?;
        Ok(rows.into_iter().map(|(base, frames, at)| (Offset(base), frames, at)).collect())
    }

    /// Where a partition's messages are shown as; `None` if it does not exist.
    pub async fn message_place(&self, partition: PartitionId) -> StoreResult<Option<MessagePlace>> {
        let row = sqlx::query(
            "SELECT p.id, p.name, q.name AS queue_name, q.namespace, q.task, q.priority, p.last_write_at \
             FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id \
             WHERE p.id = $1 AND q.tenant = queen.default_tenant()",
        )
        .bind(partition.0)
        .fetch_optional(&self.pool)
        .timed("finding a message")
        .await?;
        row.as_ref().map(place_of).transpose().during("finding a message")
    }
}

fn place_of(row: &PgRow) -> Result<MessagePlace, sqlx::Error> {
    Ok(MessagePlace {
        partition: PartitionId(row.try_get("id")?),
        partition_name: row.try_get("name")?,
        queue_name: row.try_get("queue_name")?,
        namespace: row.try_get("namespace")?,
        task: row.try_get("task")?,
        priority: row.try_get("priority")?,
        last_write_at: row.try_get("last_write_at")?,
    })
}
