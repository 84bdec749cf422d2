//! Which queues carry a label, and what has changed since somebody asked (discovery; `spec/push-pop.md` §7.2).

use sqlx::Row;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::QueueId;

/// A point in the history of labels: everything that committed before it has been read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelPosition(String);

/// The labels that a queue has now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LabelChange {
    /// The queue.
    pub queue: QueueId,
    /// Its namespace.
    pub namespace: String,
    /// Its task.
    pub task: String,
}

impl Store {
    /// Where the history of labels stands.
    pub async fn label_position(&self) -> StoreResult<LabelPosition> {
        let position = sqlx::query_scalar("SELECT pg_snapshot_xmin(pg_current_snapshot())::text")
            .fetch_one(&self.pool)
            .timed("label changes")
            .await?;
        Ok(LabelPosition(position))
    }

    /// The queues that were made or configured since `since`, some of them perhaps again, and the position to ask from
    /// next. A transaction that was under way is at or above that position, so none is passed over. What a restored dump
    /// claims to be of the future is not read.
    pub async fn label_changes(&self, since: &LabelPosition) -> StoreResult<(LabelPosition, Vec<LabelChange>)> {
        let rows = sqlx::query(
            "SELECT pg_snapshot_xmin(pg_current_snapshot())::text AS position, q.id, q.namespace, q.task \
             FROM (SELECT 1) one LEFT JOIN ( \
               SELECT id, namespace, task FROM queen.queues \
               WHERE tenant = queen.default_tenant() AND labelled_by >= $1::text::xid8 \
                 AND labelled_by < pg_snapshot_xmax(pg_current_snapshot())) q ON true",
        )
        .bind(&since.0)
        .fetch_all(&self.pool)
        .timed("label changes")
        .await?;
        let mut position = since.clone();
        let mut changes = Vec::new();
        for row in &rows {
            position = LabelPosition(row.try_get("position").during("label changes")?);
            let Some(id) = row.try_get::<Option<i32>, _>("id").during("label changes")? else { continue };
            changes.push(LabelChange {
                queue: QueueId(id),
                namespace: row.try_get("namespace").during("label changes")?,
                task: row.try_get("task").during("label changes")?,
            });
        }
        Ok((position, changes))
    }

    /// Every queue whose labels match. At least one label is given.
    pub async fn find_queues_by_label(&self, namespace: Option<&str>, task: Option<&str>) -> StoreResult<Vec<QueueId>> {
        // Three statements: one that takes every case would be planned to read the whole index.
        let query = match (namespace, task) {
            (Some(namespace), None) => sqlx::query_scalar(
                "SELECT id FROM queen.queues WHERE tenant = queen.default_tenant() AND namespace = $1",
            )
            .bind(namespace),
            (Some(namespace), Some(task)) => sqlx::query_scalar(
                "SELECT id FROM queen.queues WHERE tenant = queen.default_tenant() AND namespace = $1 AND task = $2",
            )
            .bind(namespace)
            .bind(task),
            (None, task) => {
                sqlx::query_scalar("SELECT id FROM queen.queues WHERE tenant = queen.default_tenant() AND task = $1")
                    .bind(task)
            }
        };
        let ids: Vec<i32> = query.fetch_all(&self.pool).timed("finding queues by label").await?;
        Ok(ids.into_iter().map(QueueId).collect())
    }
}
