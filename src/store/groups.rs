//! Consumer groups of a queue and where they start (`spec/push-pop.md` §7.10).

use chrono::{DateTime, Utc};
use sqlx::{Postgres, Row, Transaction};

use super::acks::attempt_behind;
use super::cursors::consumed;
use super::error::{During, StoreResult, Timed};
use super::partitions::made_at;
use super::{Store, StoreError};
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

impl StartAt {
    /// Mode and instant of a registration.
    pub(super) fn registration(self) -> (&'static str, Option<DateTime<Utc>>) {
        match self {
            StartAt::Beginning => ("all", None),
            StartAt::End => ("new", None),
            StartAt::Timestamp(at) => ("timestamp", Some(at)),
        }
    }
}

/// A group row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupRow {
    /// Key.
    pub id: GroupId,
    /// Whether a wildcard or discovery pop has fixed where it starts.
    pub registered: bool,
    /// Whether it reads only the newest message of each partition (`spec/push-pop.md` §7.12).
    pub conflation: bool,
}

/// Where the cursor of group `g` on partition `p` begins, given its mode and its instant.
///
/// Within the minute before a registration its snapshot decides; older segments were committed for certain (no push
/// transaction lives that long), and the age test keeps a restored dump from comparing foreign xids.
macro_rules! start_of {
    ($mode:literal, $at:literal) => {
        concat!(
            "CASE ",
            $mode,
            " WHEN 'all' THEN p.log_start - 1 \
               WHEN 'end' THEN p.last_offset \
               ELSE coalesce(( \
                 SELECT s.base_offset + s.message_count - 1 FROM queen.log_segments s \
                 WHERE s.partition_id = p.id AND CASE WHEN g.mode IS DISTINCT FROM 'new' THEN s.created_at < ",
            $at,
            " ELSE s.created_at < g.subscribed_at AND (s.created_at < g.subscribed_at - interval '1 minute' \
                     OR g.snapshot IS NULL OR pg_visible_in_snapshot(s.writer, g.snapshot)) END \
                 ORDER BY s.base_offset DESC LIMIT 1), p.log_start - 1) END"
        )
    };
}

pub(super) use start_of;

impl StartAt {
    /// As the statements that place a cursor take it.
    pub(super) fn fallback(&self) -> (&'static str, Option<DateTime<Utc>>) {
        match self {
            StartAt::Beginning => ("all", None),
            StartAt::End => ("end", None),
            StartAt::Timestamp(at) => ("timestamp", Some(*at)),
        }
    }
}

impl Store {
    /// The group, if it exists.
    pub async fn find_group(&self, queue: QueueId, name: &str) -> StoreResult<Option<GroupRow>> {
        let row = sqlx::query(
            "SELECT id, mode IS NOT NULL AS registered, conflation FROM queen.consumer_groups \
             WHERE queue_id = $1 AND name = $2",
        )
        .bind(queue.0)
        .bind(name)
        .fetch_optional(&self.pool)
        .timed("finding a group")
        .await?;
        row.map(|row| {
            let conflation = row.try_get("conflation")?;
            Ok(GroupRow { id: GroupId(row.try_get("id")?), registered: row.try_get("registered")?, conflation })
        })
        .transpose()
        .during("finding a group")
    }

    /// Makes the cursors that groups lack on partitions, each placed by the group's registration or, for a group that
    /// has none, by the given fallback. Existing cursors stay. Commits asynchronously: a push answered later flushes it
    /// too, so a cursor lost in a crash had nothing above it. A group that has been deleted gets none: its row is locked,
    /// after the partitions, so that no cursor outlives it.
    pub async fn seed_cursors(&self, unmet: &[(GroupId, PartitionId, StartAt)]) -> StoreResult<()> {
        let groups: Vec<i32> = unmet.iter().map(|(group, ..)| group.0).collect();
        let partitions: Vec<i64> = unmet.iter().map(|(_, partition, _)| partition.0).collect();
        let (modes, instants): (Vec<&str>, Vec<Option<DateTime<Utc>>>) =
            unmet.iter().map(|(.., start)| start.fallback()).unzip();
        sqlx::query(concat!(
            "WITH p AS MATERIALIZED ( \
               SELECT u.group_id, u.mode, u.instant, p.id, p.log_start, p.last_offset \
               FROM unnest($1::int[], $2::bigint[], $3::text[], $4::timestamptz[]) \
                 AS u (group_id, partition_id, mode, instant) \
               JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.partition_id]) \
               ORDER BY u.partition_id FOR KEY SHARE OF p), \
             kept AS MATERIALIZED ( \
               SELECT id FROM queen.consumer_groups \
               WHERE id = ANY (ARRAY (SELECT DISTINCT group_id FROM p)) ORDER BY id FOR KEY SHARE) \
             INSERT INTO queen.log_consumers (partition_id, group_id, committed) \
             SELECT p.id, g.id, ",
            start_of!("coalesce(g.mode, p.mode)", "coalesce(g.subscribed_at, p.instant)"),
            " FROM p CROSS JOIN LATERAL (SELECT * FROM queen.consumer_groups WHERE id = p.group_id OFFSET 0) g \
             WHERE g.id = ANY (ARRAY (SELECT id FROM kept)) \
             ORDER BY p.id, g.id ON CONFLICT (partition_id, group_id) DO NOTHING"
        ))
        .bind(groups)
        .bind(partitions)
        .bind(modes)
        .bind(instants)
        .execute(&self.claims)
        .timed("seeding cursors")
        .await?;
        Ok(())
    }

    /// Moves cursors of partitions that retention has emptied to their ends, so that they stop looking pending
    /// (`spec/push-pop.md` §7.5 no. 4). A live lease keeps its cursor.
    pub async fn seal_cursors(&self, emptied: &[(GroupId, PartitionId)]) -> StoreResult<()> {
        let (groups, partitions): (Vec<i32>, Vec<i64>) = emptied.iter().map(|(g, p)| (g.0, p.0)).unzip();
        sqlx::query(concat!(
            "WITH emptied AS MATERIALIZED ( \
               SELECT c.partition_id, c.group_id, p.last_offset \
               FROM unnest($1::int[], $2::bigint[]) AS u (group_id, partition_id) \
               JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.partition_id]) \
               JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[u.partition_id]) AND c.group_id = u.group_id \
               WHERE p.log_start > p.last_offset AND c.committed < p.last_offset \
                 AND (c.worker_id IS NULL OR c.lease_expires_at <= clock_timestamp()) \
               ORDER BY u.partition_id, u.group_id FOR NO KEY UPDATE OF c SKIP LOCKED) \
             UPDATE queen.log_consumers c SET committed = e.last_offset, \
               total_consumed = ",
            consumed!(),
            ", worker_id = NULL, batch_end = NULL, \
               lease_expires_at = NULL, ",
            attempt_behind!("e.last_offset"),
            " FROM emptied e WHERE c.partition_id = ANY (ARRAY[e.partition_id]) AND c.group_id = e.group_id",
        ))
        .bind(groups)
        .bind(partitions)
        .execute(&self.pool)
        .timed("sealing cursors")
        .await?;
        Ok(())
    }

    /// Whether a group of this key exists.
    pub async fn group_exists(&self, group: GroupId) -> StoreResult<bool> {
        sqlx::query_scalar("SELECT EXISTS (SELECT 1 FROM queen.consumer_groups WHERE id = $1)")
            .bind(group.0)
            .fetch_one(&self.pool)
            .timed("finding a group")
            .await
    }

    /// Removes a group's cursors, of one queue or of all, and with `registration` its rows, in one transaction
    /// (`spec/admin.md` §7.6). Answers the groups concerned, with their queues, and how many cursors went.
    pub async fn delete_group(
        &self,
        name: &str,
        queue: Option<&str>,
        registration: bool,
    ) -> StoreResult<(Vec<(GroupId, QueueId)>, i64)> {
        let mut tx = self.pool.begin().timed("group delete").await?;
        let queues = lock_queues_of(&mut tx, name, queue).await?;
        // Seeding takes this lock after the partitions, and nothing here locks a partition: no cursor can come in between.
        let groups: Vec<(i32, i32)> = sqlx::query_as(
            "SELECT id, queue_id FROM queen.consumer_groups WHERE name = $1 AND queue_id = ANY($2) ORDER BY id FOR UPDATE",
        )
        .bind(name)
        .bind(&queues)
        .fetch_all(&mut *tx)
        .timed("group delete")
        .await?;
        let (ids, queues): (Vec<i32>, Vec<i32>) = groups.into_iter().unzip();
        // By key, not by place: a cursor that an ack moved while its lock was waited for has a place that this statement cannot see.
        let deleted: i64 = sqlx::query_scalar(
            "WITH lanes AS MATERIALIZED ( \
               SELECT p.id, u.group_id FROM unnest($1::int[], $2::int[]) AS u (group_id, queue_id) \
               JOIN queen.log_partitions p ON p.queue_id = ANY (ARRAY[u.queue_id]) ORDER BY p.id + 0, u.group_id), \
             doomed AS MATERIALIZED ( \
               SELECT c.partition_id, c.group_id FROM lanes l CROSS JOIN LATERAL ( \
                 SELECT partition_id, group_id FROM queen.log_consumers \
                 WHERE partition_id = l.id AND group_id = l.group_id FOR UPDATE) c), \
             gone AS ( \
               DELETE FROM queen.log_consumers c USING doomed d \
               WHERE c.partition_id = ANY (ARRAY[d.partition_id]) AND c.group_id = ANY (ARRAY[d.group_id]) RETURNING 1) \
             SELECT count(*) FROM gone",
        )
        .bind(&ids)
        .bind(&queues)
        .fetch_one(&mut *tx)
        .timed("group delete")
        .await?;
        if registration {
            sqlx::query("DELETE FROM queen.consumer_groups WHERE id = ANY($1)")
                .bind(&ids)
                .execute(&mut *tx)
                .timed("group delete")
                .await?;
        }
        tx.commit().timed("commit of group delete").await?;
        let groups = ids.into_iter().map(GroupId).zip(queues.into_iter().map(QueueId)).collect();
        Ok((groups, deleted))
    }

    /// Moves the instant of a group's registrations on every queue (`spec/admin.md` §7.4). Partitions that were there when
    /// the group registered get their cursor first, where they always stood: only what was born later is placed anew.
    /// Answers the groups concerned.
    pub async fn move_subscriptions(&self, name: &str, at: DateTime<Utc>) -> StoreResult<Vec<GroupId>> {
        let mut tx = self.pool.begin().timed("moving a subscription").await?;
        let queues = lock_queues_of(&mut tx, name, None).await?;
        let ids: Vec<i32> = sqlx::query_scalar(
            "SELECT id FROM queen.consumer_groups WHERE name = $1 AND queue_id = ANY($2) AND mode IS NOT NULL \
             ORDER BY id FOR NO KEY UPDATE",
        )
        .bind(name)
        .bind(&queues)
        .fetch_all(&mut *tx)
        .timed("moving a subscription")
        .await?;
        sqlx::query(concat!(
            "WITH unmet AS MATERIALIZED ( \
               SELECT p.id, g.id AS group_id FROM queen.consumer_groups g \
               JOIN queen.log_partitions p ON p.queue_id = ANY (ARRAY[g.queue_id]) AND ",
            made_at!(),
            " <= g.registered_at \
               WHERE g.id = ANY($1) AND g.mode <> 'all' AND ( \
                 SELECT 1 FROM queen.log_consumers c WHERE c.partition_id = p.id AND c.group_id = g.id) IS NULL \
               ORDER BY p.id + 0, g.id + 0 FOR KEY SHARE OF p) \
             INSERT INTO queen.log_consumers (partition_id, group_id, committed) \
             SELECT p.id, g.id, ",
            start_of!("g.mode", "g.subscribed_at"),
            " FROM unmet u JOIN queen.log_partitions p ON p.id = ANY (ARRAY[u.id]) \
              JOIN queen.consumer_groups g ON g.id = ANY (ARRAY[u.group_id]) \
              ORDER BY u.id, u.group_id ON CONFLICT (partition_id, group_id) DO NOTHING"
        ))
        .bind(&ids)
        .execute(&mut *tx)
        .timed("moving a subscription")
        .await?;
        sqlx::query("UPDATE queen.consumer_groups SET subscribed_at = $2, snapshot = NULL WHERE id = ANY($1)")
            .bind(&ids)
            .bind(at)
            .execute(&mut *tx)
            .timed("moving a subscription")
            .await?;
        tx.commit().timed("moving a subscription").await?;
        Ok(ids.into_iter().map(GroupId).collect())
    }

    /// The instant that a text names, as `timestamptz` input reads it (no zone = UTC; `spec/admin.md` §1.1). `None`: not one.
    pub async fn read_timestamp(&self, text: &str) -> StoreResult<Option<DateTime<Utc>>> {
        let read = sqlx::query_scalar(
            "SELECT CASE WHEN t.at BETWEEN '0001-01-01Z' AND '9999-12-31Z' THEN t.at END \
             FROM (SELECT $1::text::timestamptz AS at) t",
        )
        .bind(text)
        .fetch_one(&self.pool)
        .timed("reading a timestamp")
        .await;
        match read {
            // Class 22: not in the language of timestamps.
            Err(StoreError::Refused { sqlstate, .. }) if sqlstate.starts_with("22") => Ok(None),
            other => other,
        }
    }
}

/// Keeps the queues that have this group, or the one of this name, from being deleted: deletion of a queue comes first to its
/// own row, then to partitions, cursors and groups, so whoever holds this is never in a circle with it.
async fn lock_queues_of(
    tx: &mut Transaction<'static, Postgres>,
    group: &str,
    queue: Option<&str>,
) -> StoreResult<Vec<i32>> {
    sqlx::query_scalar(
        "SELECT q.id FROM queen.queues q CROSS JOIN (SELECT set_config('statement_timeout', '600000', true)) patience \
         WHERE q.tenant = queen.default_tenant() AND ($2::text IS NULL OR q.name = $2) \
           AND q.id = ANY (ARRAY (SELECT queue_id FROM queen.consumer_groups WHERE name = $1)) ORDER BY q.id FOR KEY SHARE OF q",
    )
    .bind(group)
    .bind(queue)
    .fetch_all(&mut **tx)
    .timed("finding queues")
    .await
}
