//! Dead letters: snapshots of given-up messages. They outlive the log, so there is no foreign key.

use chrono::{DateTime, Utc};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{Postgres, Row};
use uuid::Uuid;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::{Offset, PartitionId, QueueId};

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
        .fetch_optional(&self.pool)
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
}
