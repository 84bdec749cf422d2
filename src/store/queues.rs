//! Queue rows and their options.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::error::{During, StoreResult, Timed};
use super::{Store, StoreError};
use crate::ids::QueueId;

/// Every stored option of a queue (`spec/push-pop.md` §5.4), as the columns hold them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueOptions {
    /// Label of discovery pops.
    pub namespace: String,
    /// Second label of discovery pops.
    pub task: String,
    /// Lease length in seconds when the pop sends none; `<= 0` behaves as 60.
    pub lease_time: i32,
    /// Explicit `failed` acks that are redelivered before the next one dead-letters.
    pub retry_limit: i32,
    /// Milliseconds before a charged `failed` comes back; `<= 0` at once.
    pub retry_delay: i32,
    /// With `dlq_after_max_retries`: dead-lettering is off only when both are false.
    pub dead_letter_queue: bool,
    /// See `dead_letter_queue`.
    pub dlq_after_max_retries: bool,
    /// Seconds before a message may be delivered; `<= 0` off.
    pub delayed_processing: i32,
    /// Seconds that a partition gathers before it delivers; `<= 0` off.
    pub window_buffer: i32,
    /// Milliseconds that an under-full waiting pop waits for more, 0 to 60000.
    pub min_pop_wait_time: i32,
    /// Master switch of the two windows below.
    pub retention_enabled: bool,
    /// Seconds; deletes by age alone.
    pub retention_seconds: i32,
    /// Seconds; deletes by age up to the slowest group.
    pub completed_retention_seconds: i32,
    /// Seconds; deletes by age whatever the switch says.
    pub max_wait_time_seconds: i32,
    /// Payloads are enveloped before they are stored.
    pub encryption_enabled: bool,
    /// Seconds of deduplication, 0 = off.
    pub dedup_window_seconds: i32,
    /// Stored and echoed.
    pub retention_sink_hold: String,
    /// Stored and echoed, seconds.
    pub retention_sink_hold_max_seconds: i32,
    /// Stored and echoed.
    pub priority: i32,
    /// Stored and echoed, seconds.
    pub ttl: i32,
    /// Stored and echoed.
    pub max_size: i32,
}

impl Default for QueueOptions {
    /// What `configure` gives an option that the request leaves out.
    fn default() -> QueueOptions {
        QueueOptions {
            namespace: String::new(),
            task: String::new(),
            lease_time: 300,
            retry_limit: 3,
            retry_delay: 0,
            dead_letter_queue: true,
            dlq_after_max_retries: true,
            delayed_processing: 0,
            window_buffer: 0,
            min_pop_wait_time: 0,
            retention_enabled: false,
            retention_seconds: 0,
            completed_retention_seconds: 0,
            max_wait_time_seconds: 0,
            encryption_enabled: false,
            dedup_window_seconds: 3600,
            retention_sink_hold: String::new(),
            retention_sink_hold_max_seconds: 604_800,
            priority: 0,
            ttl: 3600,
            max_size: 0,
        }
    }
}

/// One queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRow {
    /// Key.
    pub id: QueueId,
    /// Name, unique per tenant.
    pub name: String,
    /// Options.
    pub options: QueueOptions,
    /// When the row was made.
    pub created_at: DateTime<Utc>,
}

macro_rules! select_queues {
    ($rest:literal) => {
        concat!(
            "SELECT id, name, namespace, task, lease_time, retry_limit, retry_delay, dead_letter_queue, ",
            "dlq_after_max_retries, delayed_processing, window_buffer, min_pop_wait_time, retention_enabled, ",
            "retention_seconds, completed_retention_seconds, max_wait_time_seconds, encryption_enabled, ",
            "dedup_window_seconds, retention_sink_hold, retention_sink_hold_max_seconds, priority, ttl, max_size, ",
            "created_at FROM queen.queues ",
            $rest
        )
    };
}

fn queue_of(row: &PgRow) -> Result<QueueRow, sqlx::Error> {
    Ok(QueueRow {
        id: QueueId(row.try_get("id")?),
        name: row.try_get("name")?,
        created_at: row.try_get("created_at")?,
        options: QueueOptions {
            namespace: row.try_get("namespace")?,
            task: row.try_get("task")?,
            lease_time: row.try_get("lease_time")?,
            retry_limit: row.try_get("retry_limit")?,
            retry_delay: row.try_get("retry_delay")?,
            dead_letter_queue: row.try_get("dead_letter_queue")?,
            dlq_after_max_retries: row.try_get("dlq_after_max_retries")?,
            delayed_processing: row.try_get("delayed_processing")?,
            window_buffer: row.try_get("window_buffer")?,
            min_pop_wait_time: row.try_get("min_pop_wait_time")?,
            retention_enabled: row.try_get("retention_enabled")?,
            retention_seconds: row.try_get("retention_seconds")?,
            completed_retention_seconds: row.try_get("completed_retention_seconds")?,
            max_wait_time_seconds: row.try_get("max_wait_time_seconds")?,
            encryption_enabled: row.try_get("encryption_enabled")?,
            dedup_window_seconds: row.try_get("dedup_window_seconds")?,
            retention_sink_hold: row.try_get("retention_sink_hold")?,
            retention_sink_hold_max_seconds: row.try_get("retention_sink_hold_max_seconds")?,
            priority: row.try_get("priority")?,
            ttl: row.try_get("ttl")?,
            max_size: row.try_get("max_size")?,
        },
    })
}

impl Store {
    /// The queues of these names that exist.
    pub async fn find_queues(&self, names: &[String]) -> StoreResult<Vec<QueueRow>> {
        let rows = sqlx::query(select_queues!("WHERE tenant = queen.default_tenant() AND name = ANY($1)"))
            .bind(names)
            .fetch_all(&self.pool)
            .timed("finding queues")
            .await?;
        rows.iter().map(queue_of).collect::<Result<_, _>>().during("reading queues")
    }

    /// The queue of this key.
    pub async fn find_queue_by_id(&self, id: QueueId) -> StoreResult<Option<QueueRow>> {
        let row = sqlx::query(select_queues!("WHERE id = $1"))
            .bind(id.0)
            .fetch_optional(&self.pool)
            .timed("finding queues")
            .await?;
        row.as_ref().map(queue_of).transpose().during("reading queues")
    }

    /// Makes the queues that do not exist, with column defaults and labels derived from the name
    /// (`spec/push-pop.md` §4). `names` come sorted, so that concurrent creators never wait in a circle.
    pub async fn create_queues(&self, names: &[String]) -> StoreResult<()> {
        sqlx::query(
            "INSERT INTO queen.queues (name, namespace, task) \
             SELECT name, split_part(name, '.', 1), split_part(name, '.', 2) FROM unnest($1::text[]) AS u (name) \
             ON CONFLICT (tenant, name) DO NOTHING",
        )
        .bind(names)
        .execute(&self.pool)
        .timed("creating queues")
        .await?;
        Ok(())
    }

    /// Creates the queue or overwrites its options with what `change` makes of the present ones, serialised by the
    /// row lock.
    ///
    /// An error of `change` is handed back and nothing is written.
    pub async fn configure_queue<E>(
        &self,
        name: &str,
        change: impl FnOnce(Option<QueueOptions>) -> Result<QueueOptions, E>,
    ) -> StoreResult<Result<QueueRow, E>> {
        let mut tx = self.pool.begin().timed("configure").await?;
        let present = sqlx::query(select_queues!("WHERE tenant = queen.default_tenant() AND name = $1 FOR UPDATE"))
            .bind(name)
            .fetch_optional(&mut *tx)
            .timed("configure")
            .await?;
        let present = present.as_ref().map(queue_of).transpose().during("configure")?;
        let o = match change(present.map(|row| row.options)) {
            Ok(options) => options,
            Err(refused) => return Ok(Err(refused)),
        };
        let row = sqlx::query(
            "INSERT INTO queen.queues (name, namespace, task, lease_time, retry_limit, retry_delay, \
               dead_letter_queue, dlq_after_max_retries, delayed_processing, window_buffer, min_pop_wait_time, \
               retention_enabled, retention_seconds, completed_retention_seconds, max_wait_time_seconds, \
               encryption_enabled, dedup_window_seconds, retention_sink_hold, retention_sink_hold_max_seconds, \
               priority, ttl, max_size) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, \
               $21, $22) \
             ON CONFLICT (tenant, name) DO UPDATE SET (namespace, task, lease_time, retry_limit, retry_delay, \
               dead_letter_queue, dlq_after_max_retries, delayed_processing, window_buffer, min_pop_wait_time, \
               retention_enabled, retention_seconds, completed_retention_seconds, max_wait_time_seconds, \
               encryption_enabled, dedup_window_seconds, retention_sink_hold, retention_sink_hold_max_seconds, \
               priority, ttl, max_size) = ROW (excluded.namespace, excluded.task, excluded.lease_time, \
               excluded.retry_limit, excluded.retry_delay, excluded.dead_letter_queue, \
               excluded.dlq_after_max_retries, excluded.delayed_processing, excluded.window_buffer, \
               excluded.min_pop_wait_time, excluded.retention_enabled, excluded.retention_seconds, \
               excluded.completed_retention_seconds, excluded.max_wait_time_seconds, excluded.encryption_enabled, \
               excluded.dedup_window_seconds, excluded.retention_sink_hold, \
               excluded.retention_sink_hold_max_seconds, excluded.priority, excluded.ttl, excluded.max_size), \
               labelled_by = excluded.labelled_by \
             RETURNING id, created_at",
        )
        .bind(name)
        .bind(&o.namespace)
        .bind(&o.task)
        .bind(o.lease_time)
        .bind(o.retry_limit)
        .bind(o.retry_delay)
        .bind(o.dead_letter_queue)
        .bind(o.dlq_after_max_retries)
        .bind(o.delayed_processing)
        .bind(o.window_buffer)
        .bind(o.min_pop_wait_time)
        .bind(o.retention_enabled)
        .bind(o.retention_seconds)
        .bind(o.completed_retention_seconds)
        .bind(o.max_wait_time_seconds)
        .bind(o.encryption_enabled)
        .bind(o.dedup_window_seconds)
        .bind(&o.retention_sink_hold)
        .bind(o.retention_sink_hold_max_seconds)
        .bind(o.priority)
        .bind(o.ttl)
        .bind(o.max_size)
        .fetch_one(&mut *tx)
        .timed("configure")
        .await?;
        tx.commit().timed("commit of configure").await?;
        Ok(Ok(QueueRow {
            id: QueueId(row.try_get("id").during("configure")?),
            name: name.to_owned(),
            options: o,
            created_at: row.try_get("created_at").during("configure")?,
        }))
    }

    /// Removes a queue and everything keyed to it, in one transaction (`spec/admin.md` §4.5). Answers its key, or
    /// `None` if no such queue exists.
    pub async fn delete_queue(&self, name: &str) -> StoreResult<Option<QueueId>> {
        let mut tx = self.pool.begin().timed("queue delete").await?;
        let Some(row) =
            sqlx::query("SELECT id FROM queen.queues WHERE tenant = queen.default_tenant() AND name = $1 FOR UPDATE")
                .bind(name)
                .fetch_optional(&mut *tx)
                .timed("queue delete")
                .await?
        else {
            return Ok(None);
        };
        let id: i32 = row.try_get("id").during("queue delete")?;
        let partitions: Vec<i64> =
            sqlx::query_scalar("SELECT id FROM queen.log_partitions WHERE queue_id = $1 ORDER BY id FOR UPDATE")
                .bind(id)
                .fetch_all(&mut *tx)
                .timed("queue delete")
                .await?;
        for statement in [
            "DELETE FROM queen.log_consumers WHERE partition_id = ANY($1)",
            "DELETE FROM queen.log_segments WHERE partition_id = ANY($1)",
            "DELETE FROM queen.log_txns WHERE partition_id = ANY($1)",
            "DELETE FROM queen.empty_partitions WHERE partition_id = ANY($1)",
            "DELETE FROM queen.log_partitions WHERE id = ANY($1)",
        ] {
            sqlx::query(statement).bind(&partitions).execute(&mut *tx).timed("queue delete").await?;
        }
        for statement in [
            "DELETE FROM queen.consumer_groups WHERE queue_id = $1",
            "DELETE FROM queen.dead_letters WHERE queue_id = $1",
            "DELETE FROM queen.stats WHERE queue_id = $1",
            "DELETE FROM queen.retention_queues WHERE queue_id = $1",
            "DELETE FROM queen.log_age_lists WHERE kind IN (0, 1) AND queue_id = $1",
            "DELETE FROM queen.queues WHERE id = $1",
        ] {
            sqlx::query(statement).bind(id).execute(&mut *tx).timed("queue delete").await?;
        }
        tx.commit().timed("commit of queue delete").await?;
        Ok(Some(QueueId(id)))
    }
}

/// A query result that broke an expectation of this module.
pub(crate) fn corrupt(table: &'static str, what: impl Into<String>) -> StoreError {
    let error = StoreError::Corrupt { table, what: what.into() };
    error.count();
    error
}
