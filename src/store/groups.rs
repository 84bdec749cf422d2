//! Consumer groups of a queue and where they start (`spec/push-pop.md` §7.10).

use chrono::{DateTime, Utc};
use sqlx::Row;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::{GroupId, PartitionId, QueueId};

/// Where a group's cursor of a partition begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartAt {
    /// The oldest retained message.
    Beginning,
    /// What is pushed from now on.
    End,
    /// The first segment committed at or after an instant.
    Timestamp(DateTime<Utc>),
}

/// A group row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRow {
    /// Key.
    pub id: GroupId,
    /// Whether a wildcard or discovery pop has fixed where it starts.
    pub registered: bool,
}

impl Store {
    /// The group, if it exists.
    pub async fn find_group(&self, queue: QueueId, name: &str) -> StoreResult<Option<GroupRow>> {
        let row = sqlx::query(
            "SELECT id, mode IS NOT NULL AS registered FROM queen.consumer_groups WHERE queue_id = $1 AND name = $2",
        )
        .bind(queue.0)
        .bind(name)
        .fetch_optional(&self.pool)
        .timed("finding a group")
        .await?;
        row.map(|row| Ok(GroupRow { id: GroupId(row.try_get("id")?), registered: row.try_get("registered")? }))
            .transpose()
            .during("finding a group")
    }

    /// Fixes where the group starts, once: the first caller's word stands. The boundary of [`StartAt::End`] is exact
    /// and lazy: the row keeps the registering snapshot, and a partition met later skips exactly what that snapshot
    /// could see. `None` if the queue is gone.
    pub async fn register_group(&self, queue: QueueId, name: &str, start: StartAt) -> StoreResult<Option<GroupRow>> {
        let (mode, at) = match start {
            StartAt::Beginning => ("all", None),
            StartAt::End => ("new", None),
            StartAt::Timestamp(at) => ("timestamp", Some(at)),
        };
        let id: Option<i32> = sqlx::query_scalar(
            "INSERT INTO queen.consumer_groups AS g (queue_id, name, mode, subscribed_at, snapshot) \
             SELECT q.id, $2, $3, coalesce($4, clock_timestamp()), pg_current_snapshot() \
             FROM (SELECT id FROM queen.queues WHERE id = $1 FOR KEY SHARE) q \
             ON CONFLICT (queue_id, name) DO UPDATE SET mode = coalesce(g.mode, excluded.mode), \
               subscribed_at = CASE WHEN g.mode IS NULL THEN excluded.subscribed_at ELSE g.subscribed_at END, \
               snapshot = CASE WHEN g.mode IS NULL THEN excluded.snapshot ELSE g.snapshot END \
             RETURNING id",
        )
        .bind(queue.0)
        .bind(name)
        .bind(mode)
        .bind(at)
        .fetch_optional(&self.pool)
        .timed("registering a group")
        .await?;
        Ok(id.map(|id| GroupRow { id: GroupId(id), registered: true }))
    }

    /// Gives an unregistered group a row to hang cursors on (targeted pops). `None` if the queue is gone.
    pub async fn create_group(&self, queue: QueueId, name: &str) -> StoreResult<Option<GroupRow>> {
        sqlx::query(
            "INSERT INTO queen.consumer_groups (queue_id, name) \
             SELECT q.id, $2 FROM (SELECT id FROM queen.queues WHERE id = $1 FOR KEY SHARE) q \
             ON CONFLICT (queue_id, name) DO NOTHING",
        )
        .bind(queue.0)
        .bind(name)
        .execute(&self.pool)
        .timed("creating a group")
        .await?;
        self.find_group(queue, name).await
    }

    /// Makes the cursors that the group lacks on these partitions (sorted), placed by its registration or, for a group
    /// that has none, by `fallback`. Existing cursors stay. Commits asynchronously: a push answered later flushes it too, so a
    /// cursor lost in a crash had nothing above it.
    pub async fn seed_cursors(&self, group: GroupId, partitions: &[PartitionId], fallback: StartAt) -> StoreResult<()> {
        let ids: Vec<i64> = partitions.iter().map(|p| p.0).collect();
        let (mode, at) = match fallback {
            StartAt::Beginning => ("all", None),
            StartAt::End => ("end", None),
            StartAt::Timestamp(at) => ("timestamp", Some(at)),
        };
        // Within the minute before a registration its snapshot decides; older segments were committed for certain
        // (no push transaction lives that long), and the age test keeps a restored dump from comparing foreign xids.
        sqlx::query(
            "INSERT INTO queen.log_consumers (partition_id, group_id, committed) \
             SELECT p.id, g.id, CASE coalesce(g.mode, $3) \
               WHEN 'all' THEN p.log_start - 1 \
               WHEN 'end' THEN p.last_offset \
               ELSE coalesce(( \
                 SELECT s.base_offset + s.message_count - 1 FROM queen.log_segments s \
                 WHERE s.partition_id = p.id AND CASE WHEN g.mode IS DISTINCT FROM 'new' \
                   THEN s.created_at < coalesce(g.subscribed_at, $4) \
                   ELSE s.created_at < g.subscribed_at AND (s.created_at < g.subscribed_at - interval '1 minute' \
                     OR g.snapshot IS NULL OR pg_visible_in_snapshot(s.writer, g.snapshot)) END \
                 ORDER BY s.base_offset DESC LIMIT 1), p.log_start - 1) END \
             FROM (SELECT * FROM queen.log_partitions WHERE id = ANY($2) ORDER BY id FOR KEY SHARE) p \
             JOIN queen.consumer_groups g ON g.id = $1 \
             ORDER BY p.id \
             ON CONFLICT (partition_id, group_id) DO NOTHING",
        )
        .bind(group.0)
        .bind(ids)
        .bind(mode)
        .bind(at)
        .execute(&self.claims)
        .timed("seeding cursors")
        .await?;
        Ok(())
    }
}
