//! What retention has deleted, for the analytics (`spec/admin.md` §10.4).

use chrono::{DateTime, Utc};
use sqlx::Row;

use super::Store;
use super::error::{During, StoreResult, Timed};

/// What the history is grouped by besides time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HistoryKey {
    /// Nothing: also what was deleted of queues that are gone.
    All,
    /// The queue's name.
    Queue,
    /// The queue's namespace.
    Namespace,
    /// The queue's task.
    Task,
}

/// Which part of the history is wanted.
#[derive(Clone, Debug)]
pub struct HistoryQuery {
    /// Start, inclusive.
    pub from: DateTime<Utc>,
    /// End, exclusive.
    pub to: DateTime<Utc>,
    /// Minutes per bucket.
    pub minutes: i32,
    /// One queue only.
    pub queue: Option<String>,
}

/// Sums of one bucket or key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistorySums {
    /// Messages deleted by rule, in the order of [`super::retention::RULES`].
    pub messages: [i64; 3],
    /// Deletions: one for each step and partition.
    pub events: i64,
}

/// What every select of this file sums up.
macro_rules! sums {
    () => {
        "coalesce(sum(h.messages) FILTER (WHERE h.kind = 'completed_retention'), 0)::bigint AS completed, \
         coalesce(sum(h.messages) FILTER (WHERE h.kind = 'retention'), 0)::bigint AS aged, \
         coalesce(sum(h.messages) FILTER (WHERE h.kind = 'max_wait_time_eviction'), 0)::bigint AS evicted, \
         coalesce(sum(h.partitions), 0)::bigint AS events"
    };
}

/// Reserved kinds start with two underscores.
macro_rules! asked_for {
    () => {
        " WHERE h.at >= $1 AND h.at < $2 AND h.tenant = queen.default_tenant() AND left(h.kind, 2) <> '__' \
         AND ($3::text IS NULL OR q.name = $3) "
    };
}

const BUCKETS: &str = concat!(
    "SELECT to_timestamp(floor(extract(epoch FROM h.at) / ($4 * 60)) * ($4 * 60)) AS bucket, ",
    sums!(),
    " FROM queen.retention_history h LEFT JOIN queen.queues q ON q.id = h.queue_id",
    asked_for!(),
    "GROUP BY bucket ORDER BY bucket"
);
const KEYS: &str = concat!(
    "SELECT CASE $4 WHEN 'queue' THEN q.name WHEN 'namespace' THEN q.namespace ELSE q.task END AS key, \
       count(DISTINCT q.id) AS queues, ",
    sums!(),
    " FROM queen.retention_history h JOIN queen.queues q ON q.id = h.queue_id",
    asked_for!(),
    "GROUP BY key ORDER BY sum(h.messages) DESC, key"
);

impl Store {
    /// The history in buckets of some minutes, oldest first; buckets without a deletion are left out.
    pub async fn retention_buckets(&self, query: &HistoryQuery) -> StoreResult<Vec<(DateTime<Utc>, HistorySums)>> {
        let rows = sqlx::query(BUCKETS)
            .bind(query.from)
            .bind(query.to)
            .bind(&query.queue)
            .bind(query.minutes)
            .fetch_all(&self.pool)
            .timed("deletion history")
            .await?;
        let read = |row: &sqlx::postgres::PgRow| Ok((row.try_get("bucket")?, sums_of(row)?));
        rows.iter().map(read).collect::<Result<_, _>>().during("deletion history")
    }

    /// The history by key with the number of queues under it, most messages first. Queues that are gone have none.
    pub async fn retention_by_key(
        &self,
        query: &HistoryQuery,
        key: HistoryKey,
    ) -> StoreResult<Vec<(String, i64, HistorySums)>> {
        let key = match key {
            HistoryKey::All => return Ok(Vec::new()),
            HistoryKey::Queue => "queue",
            HistoryKey::Namespace => "namespace",
            HistoryKey::Task => "task",
        };
        let rows = sqlx::query(KEYS)
            .bind(query.from)
            .bind(query.to)
            .bind(&query.queue)
            .bind(key)
            .fetch_all(&self.pool)
            .timed("deletion history")
            .await?;
        let read = |row: &sqlx::postgres::PgRow| Ok((row.try_get("key")?, row.try_get("queues")?, sums_of(row)?));
        rows.iter().map(read).collect::<Result<_, _>>().during("deletion history")
    }

    /// Drops history older than `days`, at most `rows_max` rows. Answers how many went.
    pub async fn purge_retention_history(&self, days: u32, rows_max: i64) -> StoreResult<u64> {
        let done = sqlx::query(
            "DELETE FROM queen.retention_history h USING ( \
               SELECT ctid AS row FROM queen.retention_history WHERE at < statement_timestamp() - make_interval(days => $1) LIMIT $2) old WHERE h.ctid = old.row",
        )
        .bind(i32::try_from(days).unwrap_or(i32::MAX))
        .bind(rows_max)
        .execute(&self.claims)
        .timed("deletion history")
        .await?;
        Ok(done.rows_affected())
    }
}

fn sums_of(row: &sqlx::postgres::PgRow) -> Result<HistorySums, sqlx::Error> {
    Ok(HistorySums {
        messages: [row.try_get("completed")?, row.try_get("aged")?, row.try_get("evicted")?],
        events: row.try_get("events")?,
    })
}
