//! What the admin routes read: snapshots of all queues, live rows of one.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::Store;
use super::backlog::{owed_by_partition, page_of_partitions};
use super::cursors::consumed;
use super::error::{During, StoreResult, Timed};
use super::partitions::made_at;
use crate::ids::{PartitionId, QueueId};

/// Which queues; every given value must match exactly.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueueFilter {
    /// Name.
    pub queue: Option<String>,
    /// Namespace.
    pub namespace: Option<String>,
    /// Task.
    pub task: Option<String>,
}

/// A queue with its snapshot; zeros before the first one.
#[derive(Clone, Debug)]
pub struct QueueSummary {
    /// Key.
    pub id: QueueId,
    /// Name.
    pub name: String,
    /// Namespace, `""` for none.
    pub namespace: String,
    /// Task, `""` for none.
    pub task: String,
    /// When the queue was made.
    pub created_at: DateTime<Utc>,
    /// Partitions.
    pub partitions: i64,
    /// Retained messages.
    pub total: i64,
    /// Messages above the slowest cursor.
    pub pending: i64,
    /// Of those, under a live lease.
    pub processing: i64,
    /// Log positions retired by cursors.
    pub consumed: i64,
    /// Dead letters.
    pub dead_letters: i64,
    /// Segments, as of the last pass over sizes.
    pub segments: i64,
    /// Messages in them.
    pub segment_messages: i64,
    /// Stored payload bytes in them.
    pub retained_bytes: i64,
}

/// A namespace or task with its sums.
#[derive(Clone, Debug)]
pub struct LabelSummary {
    /// The label, `""` for queues without one.
    pub label: String,
    /// Queues.
    pub queues: i64,
    /// Partitions.
    pub partitions: i64,
    /// Retained messages.
    pub total: i64,
    /// Messages above the slowest cursors.
    pub pending: i64,
}

/// Which label of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    /// Namespace.
    Namespace,
    /// Task.
    Task,
}

/// Average, median, least and most of something over the queues that have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// Mean.
    pub avg: i64,
    /// Median.
    pub median: i64,
    /// Least.
    pub min: i64,
    /// Most.
    pub max: i64,
}

/// Totals over queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overview {
    /// Queues.
    pub queues: i64,
    /// Partitions.
    pub partitions: i64,
    /// Distinct namespaces.
    pub namespaces: i64,
    /// Distinct tasks.
    pub tasks: i64,
    /// Retained messages.
    pub total: i64,
    /// Messages above the slowest cursors.
    pub pending: i64,
    /// Of those, under a live lease.
    pub processing: i64,
    /// Messages that are neither pending nor dead.
    pub completed: i64,
    /// Dead letters.
    pub dead_letters: i64,
    /// Live leases.
    pub leases: i64,
    /// Partitions with a live lease.
    pub leased_partitions: i64,
    /// Queues with dead letters.
    pub dead_letter_queues: i64,
    /// Age in seconds of the oldest pending message, over queues with one.
    pub time_lag: Spread,
    /// Pending messages, over queues with some.
    pub offset_lag: Spread,
    /// Seconds since a snapshot was last written, -1 = never.
    pub stats_age: i64,
}

/// One partition, live.
#[derive(Clone, Debug)]
pub struct PartitionDetail {
    /// Key.
    pub id: PartitionId,
    /// Name.
    pub name: String,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// Retained messages.
    pub total: i64,
    /// Messages above the slowest cursor.
    pub pending: i64,
    /// Of those, under a live lease.
    pub processing: i64,
    /// Dead letters.
    pub dead_letters: i64,
    /// Log positions retired by cursors.
    pub consumed: i64,
    /// Last claim of any group.
    pub last_lease_at: Option<DateTime<Utc>>,
    /// Commit time of the first retained segment.
    pub oldest_at: Option<DateTime<Utc>>,
    /// Commit time of the last retained segment.
    pub newest_at: Option<DateTime<Utc>>,
}

/// What one partition owes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionDepth {
    /// Name.
    pub name: String,
    /// Messages above the cursor.
    pub pending: i64,
    /// Of those, under a live lease.
    pub processing: i64,
}

impl Store {
    /// Queues in name order, with their snapshots.
    pub async fn queue_summaries(
        &self,
        filter: &QueueFilter,
        limit: i64,
        offset: i64,
    ) -> StoreResult<Vec<QueueSummary>> {
        let rows = sqlx::query(
            "SELECT q.id, q.name, q.namespace, q.task, q.created_at, coalesce(s.partitions, 0) AS partitions, \
               coalesce(s.appended - s.evicted, 0) AS total, coalesce(s.pending, 0) AS pending, \
               coalesce(s.processing, 0) AS processing, coalesce(s.consumed, 0) AS consumed, \
               coalesce(s.dead_letters, 0) AS dead_letters, coalesce(s.segments, 0) AS segments, \
               coalesce(s.segment_messages, 0) AS segment_messages, coalesce(s.retained_bytes, 0) AS retained_bytes \
             FROM (SELECT id, name, namespace, task, created_at FROM queen.queues \
                   WHERE tenant = queen.default_tenant() AND ($1::text IS NULL OR name = $1) \
                     AND ($2::text IS NULL OR namespace = $2) AND ($3::text IS NULL OR task = $3) \
                   ORDER BY name LIMIT $4 OFFSET $5) q \
             LEFT JOIN LATERAL (SELECT * FROM queen.stats s WHERE s.queue_id = q.id LIMIT 1) s ON true ORDER BY q.name",
        )
        .bind(&filter.queue)
        .bind(&filter.namespace)
        .bind(&filter.task)
        .bind(limit)
        .bind(offset)
        .fetch_all(&self.pool)
        .timed("listing queues")
        .await?;
        rows.iter().map(summary_of).collect::<Result<_, _>>().during("listing queues")
    }

    /// Namespaces or tasks of all queues, in order.
    pub async fn label_summaries(&self, label: Label) -> StoreResult<Vec<LabelSummary>> {
        let rows = sqlx::query(
            "SELECT CASE WHEN $1 THEN q.namespace ELSE q.task END AS label, count(*) AS queues, \
               coalesce(sum(s.partitions), 0)::bigint AS partitions, \
               coalesce(sum(s.appended - s.evicted), 0)::bigint AS total, coalesce(sum(s.pending), 0)::bigint AS pending \
             FROM queen.queues q LEFT JOIN LATERAL (SELECT * FROM queen.stats s WHERE s.queue_id = q.id LIMIT 1) s ON true \
             WHERE q.tenant = queen.default_tenant() GROUP BY 1 ORDER BY 1",
        )
        .bind(label == Label::Namespace)
        .fetch_all(&self.pool)
        .timed("listing labels")
        .await?;
        rows.iter()
            .map(|row| {
                Ok(LabelSummary {
                    label: row.try_get("label")?,
                    queues: row.try_get("queues")?,
                    partitions: row.try_get("partitions")?,
                    total: row.try_get("total")?,
                    pending: row.try_get("pending")?,
                })
            })
            .collect::<Result<_, _>>()
            .during("listing labels")
    }

    /// Totals over the snapshots of these queues. Costs as much as there are queues.
    pub async fn overview(&self, filter: &QueueFilter) -> StoreResult<Overview> {
        let row = sqlx::query(
            "SELECT count(*) AS queues, coalesce(sum(s.partitions), 0)::bigint AS partitions, \
               count(DISTINCT q.namespace) AS namespaces, count(DISTINCT q.task) AS tasks, \
               coalesce(sum(s.appended - s.evicted), 0)::bigint AS total, \
               coalesce(sum(s.pending), 0)::bigint AS pending, coalesce(sum(s.processing), 0)::bigint AS processing, \
               coalesce(sum(greatest(s.appended - s.evicted - s.pending - s.dead_letters, 0)), 0)::bigint AS completed, \
               coalesce(sum(s.dead_letters), 0)::bigint AS dead_letters, coalesce(sum(s.leases), 0)::bigint AS leases, \
               coalesce(sum(s.leased_partitions), 0)::bigint AS leased_partitions, \
               count(*) FILTER (WHERE s.dead_letters > 0) AS dead_letter_queues, \
               coalesce(avg(l.age), 0)::bigint AS time_avg, \
               coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY l.age), 0)::bigint AS time_median, \
               coalesce(min(l.age), 0)::bigint AS time_min, coalesce(max(l.age), 0)::bigint AS time_max, \
               coalesce(avg(s.pending) FILTER (WHERE s.pending > 0), 0)::bigint AS offset_avg, \
               coalesce(percentile_cont(0.5) WITHIN GROUP (ORDER BY s.pending) FILTER (WHERE s.pending > 0), 0)::bigint \
                 AS offset_median, \
               coalesce(min(s.pending) FILTER (WHERE s.pending > 0), 0)::bigint AS offset_min, \
               coalesce(max(s.pending), 0)::bigint AS offset_max, \
               coalesce(floor(extract(epoch FROM statement_timestamp() - max(s.computed_at))), -1)::bigint AS stats_age \
             FROM queen.queues q LEFT JOIN LATERAL (SELECT * FROM queen.stats s WHERE s.queue_id = q.id LIMIT 1) s ON true \
             LEFT JOIN LATERAL (SELECT greatest(extract(epoch FROM statement_timestamp() - s.oldest_pending_at), 0)::float8 \
               AS age WHERE s.oldest_pending_at IS NOT NULL) l ON true \
             WHERE q.tenant = queen.default_tenant() AND ($1::text IS NULL OR q.name = $1) \
               AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3)",
        )
        .bind(&filter.queue)
        .bind(&filter.namespace)
        .bind(&filter.task)
        .fetch_one(&self.pool)
        .timed("overview")
        .await?;
        overview_of(&row).during("overview")
    }

    /// One page of a queue's partitions in name order after `after`, live.
    pub async fn partition_details(
        &self,
        queue: QueueId,
        after: Option<&str>,
        limit: i64,
    ) -> StoreResult<Vec<PartitionDetail>> {
        let rows = sqlx::query(concat!(
            "SELECT p.id, p.name, ", made_at!(), " AS created_at, p.last_offset - p.log_start + 1 AS total, w.pending, \
               least(c.leased, w.pending)::bigint AS processing, c.consumed, c.last_lease_at, \
               (SELECT count(*) FROM queen.dead_letters d WHERE d.partition_id = p.id) AS dead_letters, \
               (SELECT s.created_at FROM queen.log_segments s WHERE s.partition_id = p.id AND s.base_offset >= p.log_start \
                ORDER BY s.base_offset LIMIT 1) AS oldest_at, \
               (SELECT s.created_at FROM queen.log_segments s WHERE s.partition_id = p.id AND s.base_offset >= p.log_start \
                ORDER BY s.base_offset DESC LIMIT 1) AS newest_at \
             FROM ",
            page_of_partitions!(),
            owed_by_partition!(
                concat!(
                    ", max(c.lease_acquired_at) AS last_lease_at, coalesce(sum(",
                    consumed!(),
                    "), 0)::bigint AS consumed"
                ),
                ""
            ),
            "ORDER BY p.name",
        ))
        .bind(queue.0)
        .bind(after)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("listing partitions")
        .await?;
        rows.iter().map(detail_of).collect::<Result<_, _>>().during("listing partitions")
    }

    /// Segments of a queue, counted up to `limit`.
    pub async fn count_segments(&self, queue: QueueId, limit: i64) -> StoreResult<i64> {
        sqlx::query_scalar(
            "SELECT count(*) FROM (SELECT 1 FROM queen.log_partitions p CROSS JOIN LATERAL (SELECT 1 FROM queen.log_segments s \
               WHERE s.partition_id = p.id AND s.base_offset >= p.log_start OFFSET 0) s \
               WHERE p.queue_id = $1 LIMIT $2) s",
        )
        .bind(queue.0)
        .bind(limit)
        .fetch_one(&self.pool)
        .timed("counting segments")
        .await
    }

    /// What one page of a queue's partitions owes: to the slowest of all groups, or to one group (`Some(None)`: a group
    /// that the queue does not know owes everything).
    pub async fn partition_depths(
        &self,
        queue: QueueId,
        group: Option<Option<i32>>,
        after: Option<&str>,
        limit: i64,
    ) -> StoreResult<Vec<PartitionDepth>> {
        let rows = sqlx::query(concat!(
            "SELECT p.name, w.pending, least(c.leased, w.pending)::bigint AS processing FROM ",
            page_of_partitions!(),
            owed_by_partition!("", " AND ($4 OR c.group_id = $5)"),
            "ORDER BY p.name",
        ))
        .bind(queue.0)
        .bind(after)
        .bind(limit)
        .bind(group.is_none())
        .bind(group.flatten())
        .fetch_all(&self.pool)
        .timed("depth")
        .await?;
        rows.iter()
            .map(|row| {
                Ok(PartitionDepth {
                    name: row.try_get("name")?,
                    pending: row.try_get("pending")?,
                    processing: row.try_get("processing")?,
                })
            })
            .collect::<Result<_, _>>()
            .during("depth")
    }

    /// Key and delivery policy of a group of a queue.
    pub async fn group_policy(&self, queue: QueueId, name: &str) -> StoreResult<Option<(i32, bool)>> {
        sqlx::query_as("SELECT id, conflation FROM queen.consumer_groups WHERE queue_id = $1 AND name = $2")
            .bind(queue.0)
            .bind(name)
            .fetch_optional(&self.pool)
            .timed("finding a group")
            .await
    }
}

fn summary_of(row: &PgRow) -> Result<QueueSummary, sqlx::Error> {
    Ok(QueueSummary {
        id: QueueId(row.try_get("id")?),
        name: row.try_get("name")?,
        namespace: row.try_get("namespace")?,
        task: row.try_get("task")?,
        created_at: row.try_get("created_at")?,
        partitions: row.try_get("partitions")?,
        total: row.try_get("total")?,
        pending: row.try_get("pending")?,
        processing: row.try_get("processing")?,
        consumed: row.try_get("consumed")?,
        dead_letters: row.try_get("dead_letters")?,
        segments: row.try_get("segments")?,
        segment_messages: row.try_get("segment_messages")?,
        retained_bytes: row.try_get("retained_bytes")?,
    })
}

fn overview_of(row: &PgRow) -> Result<Overview, sqlx::Error> {
    let spread = |names: [&str; 4]| {
        let [avg, median, min, max] = names.map(|name| row.try_get::<i64, _>(name));
        Ok::<_, sqlx::Error>(Spread { avg: avg?, median: median?, min: min?, max: max? })
    };
    Ok(Overview {
        queues: row.try_get("queues")?,
        partitions: row.try_get("partitions")?,
        namespaces: row.try_get("namespaces")?,
        tasks: row.try_get("tasks")?,
        total: row.try_get("total")?,
        pending: row.try_get("pending")?,
        processing: row.try_get("processing")?,
        completed: row.try_get("completed")?,
        dead_letters: row.try_get("dead_letters")?,
        leases: row.try_get("leases")?,
        leased_partitions: row.try_get("leased_partitions")?,
        dead_letter_queues: row.try_get("dead_letter_queues")?,
        time_lag: spread(["time_avg", "time_median", "time_min", "time_max"])?,
        offset_lag: spread(["offset_avg", "offset_median", "offset_min", "offset_max"])?,
        stats_age: row.try_get("stats_age")?,
    })
}

fn detail_of(row: &PgRow) -> Result<PartitionDetail, sqlx::Error> {
    Ok(PartitionDetail {
        id: PartitionId(row.try_get("id")?),
        name: row.try_get("name")?,
        created_at: row.try_get("created_at")?,
        total: row.try_get("total")?,
        pending: row.try_get("pending")?,
        processing: row.try_get("processing")?,
        dead_letters: row.try_get("dead_letters")?,
        consumed: row.try_get("consumed")?,
        last_lease_at: row.try_get("last_lease_at")?,
        oldest_at: row.try_get("oldest_at")?,
        newest_at: row.try_get("newest_at")?,
    })
}
