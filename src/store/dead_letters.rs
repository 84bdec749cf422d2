//! Dead letters: snapshots of given-up messages. They outlive the log, so there is no foreign key.

use chrono::{DateTime, Utc};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{PgExecutor, Postgres, Row};
use uuid::Uuid;

use super::Store;
use super::error::{During, StoreResult, Timed};
use super::messages::AppendTx;
use crate::ids::{Offset, PartitionId, QueueId};

/// A filed dead letter. It never changes; it only goes.
#[derive(Clone, Debug)]
pub struct DeadLetter {
    /// Its id.
    pub id: Uuid,
    /// Where the message was.
    pub partition: PartitionId,
    /// Its queue.
    pub queue: QueueId,
    /// Name of the queue.
    pub queue_name: String,
    /// Name of the partition.
    pub partition_name: String,
    /// The group that gave up.
    pub group_name: String,
    /// Transaction id of the message.
    pub transaction_id: String,
    /// Payload as stored, encrypted if it was.
    pub payload: Vec<u8>,
    /// Why.
    pub reason: String,
    /// Failed acks charged when it was filed.
    pub retry_count: i32,
    /// When it was filed.
    pub failed_at: DateTime<Utc>,
}

/// Names one dead letter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LetterAddress {
    /// By its own id.
    Id(Uuid),
    /// The newest of this message, whichever group filed it.
    Message(PartitionId, String),
}

/// Which dead letters a listing wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LetterFilter {
    /// Of this queue only.
    pub queue: Option<QueueId>,
    /// Of this group only.
    pub group: Option<String>,
}

/// The segment that holds a message, with the names that a dead letter keeps.
#[derive(Clone, Debug)]
pub struct LetterSource {
    /// Offset of the segment's first message.
    pub base: Offset,
    /// The stored frames.
    pub frames: Vec<u8>,
    /// When the segment was committed.
    pub created_at: DateTime<Utc>,
    /// Tenant of the queue.
    pub tenant: Uuid,
    /// The queue.
    pub queue: QueueId,
    /// Its name.
    pub queue_name: String,
    /// Name of the partition.
    pub partition_name: String,
}

/// A dead letter to be filed. The cursor row's retry count is added by the statement that files it.
#[derive(Clone, Debug)]
pub struct NewDeadLetter {
    /// Its own id, fresh.
    pub id: Uuid,
    /// Tenant of the queue.
    pub tenant: Uuid,
    /// The queue.
    pub queue: QueueId,
    /// Its name.
    pub queue_name: String,
    /// Name of the partition.
    pub partition_name: String,
    /// The group that gave up.
    pub group_name: String,
    /// Offset of the message.
    pub offset: Offset,
    /// Id of the message.
    pub message_id: Uuid,
    /// Transaction id of the message.
    pub transaction_id: String,
    /// Payload as stored, encrypted if it was.
    pub payload: Vec<u8>,
    /// Why.
    pub reason: String,
    /// Commit time of the message.
    pub message_created_at: DateTime<Utc>,
}

macro_rules! select_letters {
    ($rest:literal) => {
        concat!(
            "SELECT d.id, d.partition_id, d.queue_id, d.queue_name, d.partition_name, d.group_name, d.transaction_id, d.payload, \
               d.reason, d.retry_count, d.failed_at FROM queen.dead_letters d ",
            $rest
        )
    };
}

/// The page is measured before a payload is fetched from its TOAST table, and each row of it is one probe.
macro_rules! list_letters {
    ($which:literal) => {
        concat!(
            "SELECT d.* FROM ( \
               SELECT l.id, l.failed_at, sum(l.bytes) OVER (ORDER BY l.failed_at DESC, l.id DESC) - l.bytes AS before \
               FROM (SELECT d.id, d.failed_at, octet_length(d.payload)::bigint AS bytes FROM queen.dead_letters d WHERE ",
            $which,
            " ORDER BY d.failed_at DESC, d.id DESC LIMIT $3 OFFSET $4) l) page CROSS JOIN LATERAL (",
            select_letters!("WHERE d.id = page.id LIMIT 1"),
            ") d WHERE page.before <= $5 ORDER BY page.failed_at DESC, page.id DESC"
        )
    };
}

macro_rules! purge_letters {
    ($which:literal) => {
        concat!(
            "WITH until AS (SELECT coalesce($3, clock_timestamp()) AS at), \
             doomed AS MATERIALIZED ( \
               SELECT ctid AS place FROM queen.dead_letters WHERE id = ANY (ARRAY( \
                 SELECT id FROM queen.dead_letters WHERE ",
            $which,
            " AND failed_at <= (SELECT at FROM until) ORDER BY failed_at, id LIMIT $4)) \
               ORDER BY id FOR UPDATE), \
             gone AS ( \
               DELETE FROM queen.dead_letters WHERE ctid = ANY (ARRAY(SELECT place FROM doomed)) RETURNING 1) \
             SELECT (SELECT count(*) FROM gone), (SELECT at FROM until)"
        )
    };
}

impl NewDeadLetter {
    /// Binds the parameters that follow those of the cursor write.
    pub(super) fn bind<'q>(&self, query: Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments> {
        query
            .bind(self.id)
            .bind(self.tenant)
            .bind(self.queue.0)
            .bind(self.offset.0)
            .bind(self.group_name.clone())
            .bind(self.queue_name.clone())
            .bind(self.partition_name.clone())
            .bind(self.message_id)
            .bind(self.transaction_id.clone())
            .bind(self.payload.clone())
            .bind(self.reason.clone())
            .bind(self.message_created_at)
    }
}

impl Store {
    /// The segment that holds `offset`, or `None` if retention has deleted it.
    pub async fn letter_source(&self, partition: PartitionId, offset: Offset) -> StoreResult<Option<LetterSource>> {
        letter_source(&self.pool, partition, offset).await
    }

    /// One page of dead letters, newest first. Stops once `bytes_max` payload bytes are covered, but always answers the
    /// first row.
    pub async fn list_dead_letters(
        &self,
        filter: &LetterFilter,
        limit: i64,
        offset: i64,
        bytes_max: i64,
    ) -> StoreResult<Vec<DeadLetter>> {
        // Each combination reads a range of its own index in its order; a generic plan cannot tell them apart.
        let sql = match (filter.queue, &filter.group) {
            (None, None) => list_letters!("d.tenant = queen.default_tenant() AND $1::int IS NULL AND $2::text IS NULL"),
            (Some(_), None) => list_letters!("d.queue_id = $1 AND $2::text IS NULL"),
            (None, Some(_)) => {
                list_letters!("d.tenant = queen.default_tenant() AND $1::int IS NULL AND d.group_name = $2")
            }
            (Some(_), Some(_)) => list_letters!("d.queue_id = $1 AND d.group_name = $2"),
        };
        let rows = sqlx::query(sql)
            .bind(filter.queue.map(|queue| queue.0))
            .bind(filter.group.as_deref())
            .bind(limit)
            .bind(offset)
            .bind(bytes_max)
            .fetch_all(&self.pool)
            .timed("listing dead letters")
            .await?;
        rows.iter().map(letter_of).collect::<Result<_, _>>().during("listing dead letters")
    }

    /// One dead letter, if it is there.
    pub async fn find_dead_letter(&self, address: &LetterAddress) -> StoreResult<Option<DeadLetter>> {
        let query = match address {
            LetterAddress::Id(id) => {
                sqlx::query(select_letters!("WHERE d.id = $1 AND d.tenant = queen.default_tenant()")).bind(*id)
            }
            LetterAddress::Message(partition, transaction) => sqlx::query(select_letters!(
                "WHERE d.partition_id = $1 AND d.transaction_id = $2 AND d.tenant = queen.default_tenant() \
                 ORDER BY d.failed_at DESC, d.id DESC LIMIT 1"
            ))
            .bind(partition.0)
            .bind(transaction),
        };
        let row = query.fetch_optional(&self.pool).timed("finding a dead letter").await?;
        row.as_ref().map(letter_of).transpose().during("finding a dead letter")
    }

    /// Deletes every dead letter of one message. Answers their queue, if there were any.
    pub async fn delete_dead_letters_of(
        &self,
        partition: PartitionId,
        transaction: &str,
    ) -> StoreResult<Option<QueueId>> {
        let queues: Vec<i32> = sqlx::query_scalar(
            "DELETE FROM queen.dead_letters WHERE id = ANY (ARRAY( \
               SELECT id FROM queen.dead_letters WHERE partition_id = $1 AND transaction_id = $2 \
                 AND tenant = queen.default_tenant() ORDER BY id FOR UPDATE)) RETURNING queue_id",
        )
        .bind(partition.0)
        .bind(transaction)
        .fetch_all(&self.pool)
        .timed("deleting dead letters")
        .await?;
        Ok(queues.first().copied().map(QueueId))
    }

    /// Deletes up to `rows_max` of the queue's dead letters, of one group or of all, that were filed at or before an
    /// instant (`None`: now), oldest first. Answers how many went and the instant.
    pub async fn purge_dead_letters(
        &self,
        queue: QueueId,
        group: Option<&str>,
        until: Option<DateTime<Utc>>,
        rows_max: i64,
    ) -> StoreResult<(i64, DateTime<Utc>)> {
        let sql = match group {
            None => purge_letters!("queue_id = $1 AND $2::text IS NULL"),
            Some(_) => purge_letters!("queue_id = $1 AND group_name = $2"),
        };
        sqlx::query_as(sql)
            .bind(queue.0)
            .bind(group)
            .bind(until)
            .bind(rows_max)
            .fetch_one(&self.pool)
            .timed("deleting dead letters")
            .await
    }
}

impl AppendTx {
    /// Locks those of these dead letters that still exist, in id order, until the flush ends. Comes after the partitions.
    pub async fn lock_dead_letters(&mut self, ids: &[Uuid]) -> StoreResult<Vec<Uuid>> {
        sqlx::query_scalar("SELECT id FROM queen.dead_letters WHERE id = ANY($1) ORDER BY id FOR UPDATE")
            .bind(ids)
            .fetch_all(&mut **self.connection())
            .timed("locking dead letters")
            .await
    }

    /// Deletes dead letters that this flush holds locked: their messages are stored by it.
    pub async fn delete_dead_letters(&mut self, ids: &[Uuid]) -> StoreResult<()> {
        sqlx::query("DELETE FROM queen.dead_letters WHERE id = ANY($1)")
            .bind(ids)
            .execute(&mut **self.connection())
            .timed("deleting dead letters")
            .await?;
        Ok(())
    }
}

fn letter_of(row: &PgRow) -> Result<DeadLetter, sqlx::Error> {
    Ok(DeadLetter {
        id: row.try_get("id")?,
        partition: PartitionId(row.try_get("partition_id")?),
        queue: QueueId(row.try_get("queue_id")?),
        queue_name: row.try_get("queue_name")?,
        partition_name: row.try_get("partition_name")?,
        group_name: row.try_get("group_name")?,
        transaction_id: row.try_get("transaction_id")?,
        payload: row.try_get("payload")?,
        reason: row.try_get("reason")?,
        retry_count: row.try_get("retry_count")?,
        failed_at: row.try_get("failed_at")?,
    })
}

/// See [`Store::letter_source`]; inside a caller's transaction if it passes one.
pub(super) async fn letter_source(
    executor: impl PgExecutor<'_>,
    partition: PartitionId,
    offset: Offset,
) -> StoreResult<Option<LetterSource>> {
    let row = sqlx::query(
            "SELECT s.base_offset, s.message_count, s.frames, s.created_at, q.tenant, q.id AS queue_id, \
               q.name AS queue_name, p.name AS partition_name \
             FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id \
             CROSS JOIN LATERAL (SELECT * FROM queen.log_segments s WHERE s.partition_id = p.id AND s.base_offset <= $2 \
               ORDER BY s.base_offset DESC LIMIT 1) s \
             WHERE p.id = $1 AND p.log_start <= $2 AND s.base_offset + s.message_count > $2",
        )
        .bind(partition.0)
        .bind(offset.0)
        .fetch_optional(executor)
        .timed("reading a message")
        .await?;
    let Some(row) = row else { return Ok(None) };
    let read = || {
        Ok(LetterSource {
            base: Offset(row.try_get("base_offset")?),
            frames: row.try_get("frames")?,
            created_at: row.try_get("created_at")?,
            tenant: row.try_get("tenant")?,
            queue: QueueId(row.try_get("queue_id")?),
            queue_name: row.try_get("queue_name")?,
            partition_name: row.try_get("partition_name")?,
        })
    };
    read().during("reading a message").map(Some)
}
