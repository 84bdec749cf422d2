//! First contact of a group with many queues at once (discovery; `spec/push-pop.md` §7.10).

use sqlx::Row;

use super::Store;
use super::error::{During, StoreResult, Timed};
use super::groups::{GroupRow, StartAt};
use super::partitions::PartitionCandidate;
use crate::ids::{GroupId, PartitionId, QueueId};

// Groups are found by (queue, name) as a row: there is an index by name alone, too, and while statistics call the table small
// the planner would read every queue's group of the name for each queue.
impl Store {
    /// The groups of this name on those of the queues that have one.
    pub async fn find_groups(&self, queues: &[QueueId], name: &str) -> StoreResult<Vec<(QueueId, GroupRow)>> {
        let rows = sqlx::query(
            "SELECT g.queue_id, g.id, g.mode IS NOT NULL AS registered, g.conflation FROM unnest($1::int[]) AS u (id) \
             JOIN queen.consumer_groups g ON (g.queue_id, g.name) >= (u.id, $2) AND (g.queue_id, g.name) <= (u.id, $2)",
        )
        .bind(ids(queues))
        .bind(name)
        .fetch_all(&self.pool)
        .timed("finding groups")
        .await?;
        rows.iter().map(contact_of).collect::<Result<_, _>>().during("finding groups")
    }

    /// Fixes where the groups of this name on many queues start, once: the first caller's word stands. The boundary of
    /// [`StartAt::End`] is exact and lazy: the row keeps the registering snapshot, and a partition met later skips exactly
    /// what that snapshot could see. An instant in the future means from now on (`spec/push-pop.md` §7.10). `conflation`
    /// is fixed with it. Queues that are gone have no answer. `queues` come sorted: whoever registers several locks them
    /// in the same order, and groups that are there already after them, by id, as their deletion does.
    pub async fn register_groups(
        &self,
        queues: &[QueueId],
        name: &str,
        start: StartAt,
        conflation: bool,
    ) -> StoreResult<Vec<(QueueId, GroupRow)>> {
        let (mode, at) = start.registration();
        let rows = sqlx::query(
            "WITH kept AS MATERIALIZED ( \
               SELECT id, $2::text AS name FROM queen.queues WHERE id = ANY($1) ORDER BY id FOR KEY SHARE), \
             unregistered AS MATERIALIZED ( \
               SELECT g.id FROM kept k JOIN queen.consumer_groups g \
                 ON g.queue_id = ANY (ARRAY[k.id]) AND g.name = ANY (ARRAY[k.name]) \
               ORDER BY g.id + 0 FOR NO KEY UPDATE OF g) \
             INSERT INTO queen.consumer_groups AS g \
               (queue_id, name, mode, subscribed_at, snapshot, registered_at, conflation) \
             SELECT id, $2, $3, least($4, clock_timestamp()), pg_current_snapshot(), clock_timestamp(), $5 \
             FROM kept WHERE (SELECT count(*) FROM unregistered) >= 0 ORDER BY id \
             ON CONFLICT (queue_id, name) DO UPDATE SET mode = coalesce(g.mode, excluded.mode), \
               subscribed_at = CASE WHEN g.mode IS NULL THEN excluded.subscribed_at ELSE g.subscribed_at END, \
               snapshot = CASE WHEN g.mode IS NULL THEN excluded.snapshot ELSE g.snapshot END, \
               registered_at = CASE WHEN g.mode IS NULL THEN excluded.registered_at ELSE g.registered_at END, \
               conflation = CASE WHEN g.mode IS NULL THEN excluded.conflation ELSE g.conflation END \
             RETURNING queue_id, id, true AS registered, conflation",
        )
        .bind(ids(queues))
        .bind(name)
        .bind(mode)
        .bind(at)
        .bind(conflation)
        .fetch_all(&self.pool)
        .timed("registering groups")
        .await?;
        rows.iter().map(contact_of).collect::<Result<_, _>>().during("registering groups")
    }

    /// Gives unregistered groups of this name rows to hang cursors on (targeted pops). Queues that are gone have no answer.
    pub async fn create_groups(&self, queues: &[QueueId], name: &str) -> StoreResult<Vec<(QueueId, GroupRow)>> {
        sqlx::query(
            "INSERT INTO queen.consumer_groups (queue_id, name) \
             SELECT q.id, $2 FROM (SELECT id FROM queen.queues WHERE id = ANY($1) ORDER BY id FOR KEY SHARE) q \
             ORDER BY q.id ON CONFLICT (queue_id, name) DO NOTHING",
        )
        .bind(ids(queues))
        .bind(name)
        .execute(&self.pool)
        .timed("creating groups")
        .await?;
        self.find_groups(queues, name).await
    }

    /// The first `each` partitions of many queues, in name order, each with whether the group may find something in it,
    /// as [`Store::page_partitions`] says of one queue.
    pub async fn first_partitions(
        &self,
        groups: &[(QueueId, GroupId)],
        each: i64,
    ) -> StoreResult<Vec<(GroupId, PartitionCandidate)>> {
        let (queues, groups): (Vec<i32>, Vec<i32>) = groups.iter().map(|(queue, group)| (queue.0, group.0)).unzip();
        let rows = sqlx::query(concat!(
            "SELECT u.group_id, p.id, p.name, ",
            super::partitions::pending!(),
            " AS pending \
             FROM unnest($1::int[], $2::int[]) AS u (queue_id, group_id) \
             CROSS JOIN LATERAL ( \
               SELECT *, u.group_id FROM queen.log_partitions WHERE queue_id = u.queue_id ORDER BY name LIMIT $3) p \
             JOIN queen.consumer_groups g ON g.id = ANY (ARRAY[u.group_id]) \
             LEFT JOIN queen.log_consumers c ON c.partition_id = ANY (ARRAY[p.id]) AND c.group_id = p.group_id"
        ))
        .bind(queues)
        .bind(groups)
        .bind(each)
        .fetch_all(&self.pool)
        .timed("paging partitions")
        .await?;
        rows.iter()
            .map(|row| {
                let candidate = PartitionCandidate {
                    id: PartitionId(row.try_get("id")?),
                    name: row.try_get("name")?,
                    pending: row.try_get("pending")?,
                };
                Ok((GroupId(row.try_get("group_id")?), candidate))
            })
            .collect::<Result<_, _>>()
            .during("paging partitions")
    }
}

fn ids(queues: &[QueueId]) -> Vec<i32> {
    queues.iter().map(|queue| queue.0).collect()
}

fn contact_of(row: &sqlx::postgres::PgRow) -> Result<(QueueId, GroupRow), sqlx::Error> {
    let group = GroupRow {
        id: GroupId(row.try_get("id")?),
        registered: row.try_get("registered")?,
        conflation: row.try_get("conflation")?,
    };
    Ok((QueueId(row.try_get("queue_id")?), group))
}
