//! What groups owe, by offset arithmetic (`spec/admin.md` §3, §7.1 to §7.3): cursors against allocators, and one index
//! probe per cursor that lags. The log itself is never counted.

use chrono::{DateTime, Utc};
use sqlx::postgres::{PgArguments, PgRow};
use sqlx::query::Query;
use sqlx::{Postgres, Row};
use uuid::Uuid;

use super::Store;
use super::cursors::consumed;
use super::error::{During, StoreResult, Timed};
use crate::ids::PartitionId;

/// One group of one queue.
#[derive(Clone, Debug)]
pub struct GroupTotals {
    /// Name of the group.
    pub group: String,
    /// Name of the queue.
    pub queue: String,
    /// Cursors.
    pub cursors: i64,
    /// Cursors that owe something.
    pub lagging: i64,
    /// Messages owed.
    pub lag: i64,
    /// Age of the oldest message owed, whole seconds; 0 when nothing is.
    pub lag_seconds: i64,
    /// Whether it ever finished a message.
    pub has_consumed: bool,
    /// `all`, `new` or `timestamp`; `None` if it never registered.
    pub mode: Option<String>,
    /// The instant of its registration, as an operator may have moved it.
    pub subscribed_at: Option<DateTime<Utc>>,
    /// When it registered.
    pub registered_at: Option<DateTime<Utc>>,
    /// Its policy.
    pub conflation: bool,
}

/// One cursor.
#[derive(Clone, Debug)]
pub struct CursorLag {
    /// Name of the group.
    pub group: String,
    /// Name of the queue.
    pub queue: String,
    /// Policy of the group on this queue.
    pub conflation: bool,
    /// The partition.
    pub partition: PartitionId,
    /// Its name.
    pub partition_name: String,
    /// Last holder of a lease that was not given back.
    pub worker: Option<Uuid>,
    /// Whether that lease lives.
    pub is_leased: bool,
    /// Log positions that it has retired.
    pub consumed: i64,
    /// Messages owed.
    pub lag: i64,
    /// Age of the oldest of them, whole seconds; 0 when nothing is owed.
    pub lag_seconds: i64,
    /// Commit time of the oldest of them.
    pub oldest_at: Option<DateTime<Utc>>,
}

/// Cursor `c` on partition `p`: what it owes (`w.lag`, from `w.first` on) and since when (`s.created_at`).
macro_rules! owed {
    () => {
        " CROSS JOIN LATERAL (SELECT greatest(c.committed, p.log_start - 1) + 1 AS first, \
            greatest(p.last_offset - greatest(c.committed, p.log_start - 1), 0) AS lag) w \
          LEFT JOIN LATERAL (SELECT s.created_at FROM queen.log_segments s WHERE w.lag > 0 \
            AND s.partition_id = c.partition_id AND s.base_offset <= w.first ORDER BY s.base_offset DESC LIMIT 1) s ON true "
    };
}

/// The group of a key, with its queue, as `g`: one probe, whatever the statistics say of the tables.
macro_rules! group_of {
    ($key:literal) => {
        concat!(
            " CROSS JOIN LATERAL (SELECT g.*, q.name AS queue_name FROM queen.consumer_groups g \
                CROSS JOIN LATERAL (SELECT * FROM queen.queues WHERE id = g.queue_id OFFSET 0) q \
                WHERE g.id = ",
            $key,
            " AND q.tenant = queen.default_tenant() LIMIT 1) g "
        )
    };
}

macro_rules! cursor_columns {
    () => {
        concat!("c.partition_id, p.name AS partition_name, c.worker_id, \
         c.worker_id IS NOT NULL AND coalesce(c.lease_expires_at > statement_timestamp(), false) AS leased, \
         ", consumed!(), " AS total_consumed, w.lag, s.created_at AS oldest_at, \
         coalesce(greatest(floor(extract(epoch FROM statement_timestamp() - s.created_at)), 0), 0)::bigint AS lag_seconds ")
    };
}

const TOTALS: &str = concat!(
    "SELECT g.name AS group_name, g.queue_name, a.*, g.mode, g.subscribed_at, g.registered_at, g.conflation, \
       coalesce(greatest(floor(extract(epoch FROM statement_timestamp() - a.oldest_at)), 0), 0)::bigint AS lag_seconds \
     FROM (SELECT c.group_id, count(*) AS cursors, count(*) FILTER (WHERE w.lag > 0) AS lagging, \
             sum(w.lag)::bigint AS lag, bool_or(",
    consumed!(),
    " > 0) AS consumed, min(s.created_at) AS oldest_at \
           FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = ANY (ARRAY[c.partition_id])",
    owed!(),
    "GROUP BY c.group_id) a",
    group_of!("a.group_id"),
    "ORDER BY g.name, g.queue_name"
);

const LAGGING: &str = concat!(
    "SELECT g.name AS group_name, g.queue_name, g.conflation, ",
    cursor_columns!(),
    "FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = ANY (ARRAY[c.partition_id])",
    owed!(),
    group_of!("c.group_id"),
    "WHERE w.lag > 0 AND s.created_at <= statement_timestamp() - make_interval(secs => $1) \
     ORDER BY s.created_at, c.partition_id, c.group_id LIMIT $2"
);

const OF_GROUP: &str = concat!(
    "SELECT x.* FROM (SELECT g.*, q.name AS queue_name FROM queen.consumer_groups g \
       CROSS JOIN LATERAL (SELECT * FROM queen.queues WHERE id = g.queue_id OFFSET 0) q \
       WHERE g.name = $1 AND q.tenant = queen.default_tenant() ORDER BY q.name) g \
     CROSS JOIN LATERAL (SELECT g.name AS group_name, g.queue_name, g.conflation, ",
    cursor_columns!(),
    "FROM queen.log_partitions p CROSS JOIN LATERAL ( \
       SELECT * FROM queen.log_consumers WHERE partition_id = p.id AND group_id = g.id OFFSET 0) c",
    owed!(),
    "WHERE p.queue_id = g.queue_id ORDER BY p.name LIMIT $2) x ORDER BY x.queue_name, x.partition_name LIMIT $2"
);

impl Store {
    /// Totals of every (group, queue) that has cursors, by name. Reads every cursor once: some 2 to 5 µs each.
    pub async fn group_totals(&self) -> StoreResult<Vec<GroupTotals>> {
        let rows = self.read_at_length(sqlx::query(TOTALS), "listing groups").await?;
        let totals_of = |row: &PgRow| {
            Ok(GroupTotals {
                group: row.try_get("group_name")?,
                queue: row.try_get("queue_name")?,
                cursors: row.try_get("cursors")?,
                lagging: row.try_get("lagging")?,
                lag: row.try_get("lag")?,
                lag_seconds: row.try_get("lag_seconds")?,
                has_consumed: row.try_get("consumed")?,
                mode: row.try_get("mode")?,
                subscribed_at: row.try_get("subscribed_at")?,
                registered_at: row.try_get("registered_at")?,
                conflation: row.try_get("conflation")?,
            })
        };
        rows.iter().map(totals_of).collect::<Result<_, _>>().during("listing groups")
    }

    /// The cursors whose oldest unconsumed message is at least that old, the furthest behind first. Reads every cursor once.
    pub async fn lagging_cursors(&self, seconds_min: f64, rows_max: i64) -> StoreResult<Vec<CursorLag>> {
        let query = sqlx::query(LAGGING).bind(seconds_min).bind(rows_max);
        let rows = self.read_at_length(query, "listing lagging cursors").await?;
        rows.iter().map(cursor_of).collect::<Result<_, _>>().during("listing lagging cursors")
    }

    /// The cursors of one group, by queue and partition name. Walks the partitions of its queues until there are enough.
    pub async fn cursors_of_group(&self, group: &str, rows_max: i64) -> StoreResult<Vec<CursorLag>> {
        let query = sqlx::query(OF_GROUP).bind(group.to_owned()).bind(rows_max);
        let rows = self.read_at_length(query, "listing cursors").await?;
        rows.iter().map(cursor_of).collect::<Result<_, _>>().during("listing cursors")
    }

    /// A read that may visit a million rows, and so may take longer than a client's statement.
    async fn read_at_length(
        &self,
        query: Query<'_, Postgres, PgArguments>,
        during: &'static str,
    ) -> StoreResult<Vec<PgRow>> {
        let mut tx = self.pool.begin().timed(during).await?;
        sqlx::query("SELECT set_config('statement_timeout', '120000', true)").execute(&mut *tx).timed(during).await?;
        let rows = query.fetch_all(&mut *tx).timed(during).await?;
        tx.commit().timed(during).await?;
        Ok(rows)
    }
}

fn cursor_of(row: &PgRow) -> Result<CursorLag, sqlx::Error> {
    Ok(CursorLag {
        group: row.try_get("group_name")?,
        queue: row.try_get("queue_name")?,
        conflation: row.try_get("conflation")?,
        partition: PartitionId(row.try_get("partition_id")?),
        partition_name: row.try_get("partition_name")?,
        worker: row.try_get("worker_id")?,
        is_leased: row.try_get("leased")?,
        consumed: row.try_get("total_consumed")?,
        lag: row.try_get("lag")?,
        lag_seconds: row.try_get("lag_seconds")?,
        oldest_at: row.try_get("oldest_at")?,
    })
}
