//! Events that applications record on message addresses (`spec/admin.md` §12).

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::Store;
use super::error::{During, StoreResult, Timed};
use crate::ids::PartitionId;

/// A trace to be recorded.
#[derive(Clone, Debug)]
pub struct NewTrace {
    /// Its id, fresh.
    pub id: Uuid,
    /// The partition as the client names it.
    pub partition: Uuid,
    /// The partition, if this database ever minted that id.
    pub partition_id: Option<PartitionId>,
    /// Transaction id of the message.
    pub transaction_id: String,
    /// Consumer group.
    pub group: String,
    /// Free text.
    pub event_type: String,
    /// Who recorded it.
    pub worker: &'static str,
    /// JSON text.
    pub data: String,
    /// Names that it is found by, without repetitions, sorted.
    pub names: Vec<String>,
}

/// A recorded trace.
#[derive(Clone, Debug)]
pub struct TraceRow {
    /// Its id.
    pub id: Uuid,
    /// The partition as the client named it.
    pub partition: Uuid,
    /// Transaction id of the message.
    pub transaction_id: String,
    /// Consumer group.
    pub group: String,
    /// Free text.
    pub event_type: String,
    /// Who recorded it.
    pub worker: String,
    /// JSON text.
    pub data: String,
    /// When it was recorded.
    pub created_at: DateTime<Utc>,
    /// Names that it is found by.
    pub names: Vec<String>,
    /// Queue and partition, where they still exist and were asked for.
    pub place: Option<(String, String)>,
}

/// A name with its traces.
#[derive(Clone, Debug)]
pub struct TraceName {
    /// The name.
    pub name: String,
    /// Traces.
    pub traces: i64,
    /// Distinct transaction ids among them.
    pub messages: i64,
    /// The newest of them.
    pub last_seen: DateTime<Utc>,
}

impl Store {
    /// Records a trace. The counts per name are kept here, so that no listing counts all traces.
    pub async fn record_trace(&self, trace: &NewTrace) -> StoreResult<()> {
        sqlx::query(
            "WITH trace AS ( \
               INSERT INTO queen.traces (id, partition, partition_id, transaction_id, group_name, event_type, worker_id, \
                 data, names) \
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8::json, $9) RETURNING id, tenant, transaction_id, created_at), \
             counted AS ( \
               INSERT INTO queen.trace_totals AS t (tenant, name, trace_count, message_count, last_seen) \
               SELECT trace.tenant, u.name, 1, 1, trace.created_at FROM trace, unnest($9) WITH ORDINALITY AS u (name, ord) \
               ORDER BY u.ord \
               ON CONFLICT (tenant, name) DO UPDATE SET trace_count = t.trace_count + 1, \
                 message_count = t.message_count + CASE WHEN EXISTS ( \
                   SELECT 1 FROM queen.trace_names n WHERE n.tenant = t.tenant AND md5(n.name) = md5(t.name) \
                     AND md5(n.transaction_id) = md5($4)) THEN 0 ELSE 1 END, \
                 last_seen = greatest(t.last_seen, excluded.last_seen)) \
             INSERT INTO queen.trace_names (tenant, name, created_at, trace_id, transaction_id) \
             SELECT trace.tenant, u.name, trace.created_at, trace.id, trace.transaction_id FROM trace, unnest($9) AS u (name)",
        )
        .bind(trace.id)
        .bind(trace.partition)
        .bind(trace.partition_id.map(|id| id.0))
        .bind(&trace.transaction_id)
        .bind(&trace.group)
        .bind(&trace.event_type)
        .bind(trace.worker)
        .bind(&trace.data)
        .bind(&trace.names)
        .execute(&self.pool)
        .timed("recording a trace")
        .await?;
        Ok(())
    }

    /// The traces of one message, oldest first.
    pub async fn traces_of(&self, partition: Uuid, transaction: &str, limit: i64) -> StoreResult<Vec<TraceRow>> {
        let rows = sqlx::query(
            "SELECT id, partition, transaction_id, group_name, event_type, worker_id, data::text AS data, created_at, names, \
               NULL AS queue_name, NULL AS partition_name FROM queen.traces \
             WHERE partition = $1 AND transaction_id = $2 AND tenant = queen.default_tenant() \
             ORDER BY created_at, id LIMIT $3",
        )
        .bind(partition)
        .bind(transaction)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("listing traces")
        .await?;
        rows.iter().map(trace_of).collect::<Result<_, _>>().during("listing traces")
    }

    /// The traces of one name whose partitions still exist, oldest first, and how many there are.
    pub async fn traces_named(&self, name: &str, limit: i64, offset: i64) -> StoreResult<(Vec<TraceRow>, i64)> {
        let rows = sqlx::query(
            "SELECT t.id, t.partition, t.transaction_id, t.group_name, t.event_type, t.worker_id, t.data::text AS data, \
               t.created_at, t.names, q.name AS queue_name, p.name AS partition_name \
             FROM queen.trace_names n JOIN queen.traces t ON t.id = n.trace_id \
             JOIN queen.log_partitions p ON p.id = t.partition_id JOIN queen.queues q ON q.id = p.queue_id \
             WHERE n.tenant = queen.default_tenant() AND n.name = $1 ORDER BY n.created_at, n.trace_id LIMIT $2 OFFSET $3",
        )
        .bind(name)
        .bind(limit)
        .bind(offset)
        .fetch_all(&self.pool)
        .timed("listing traces")
        .await?;
        let total = sqlx::query_scalar(
            "SELECT count(*) FROM queen.trace_names n JOIN queen.traces t ON t.id = n.trace_id \
             JOIN queen.log_partitions p ON p.id = t.partition_id \
             WHERE n.tenant = queen.default_tenant() AND n.name = $1",
        )
        .bind(name)
        .fetch_one(&self.pool)
        .timed("counting traces")
        .await?;
        let rows = rows.iter().map(trace_of).collect::<Result<_, _>>().during("listing traces")?;
        Ok((rows, total))
    }

    /// Names of traces, the last used first, and how many there are.
    pub async fn trace_names(&self, limit: i64, offset: i64) -> StoreResult<(Vec<TraceName>, i64)> {
        let rows: Vec<(String, i64, i64, DateTime<Utc>)> = sqlx::query_as(
            "SELECT name, trace_count, message_count, last_seen FROM queen.trace_totals \
             WHERE tenant = queen.default_tenant() ORDER BY last_seen DESC, name LIMIT $1 OFFSET $2",
        )
        .bind(limit)
        .bind(offset)
        .fetch_all(&self.pool)
        .timed("listing trace names")
        .await?;
        let total = sqlx::query_scalar("SELECT count(*) FROM queen.trace_totals WHERE tenant = queen.default_tenant()")
            .fetch_one(&self.pool)
            .timed("counting traces")
            .await?;
        let name = |(name, traces, messages, last_seen)| TraceName { name, traces, messages, last_seen };
        Ok((rows.into_iter().map(name).collect(), total))
    }
}

fn trace_of(row: &PgRow) -> Result<TraceRow, sqlx::Error> {
    let queue: Option<String> = row.try_get("queue_name")?;
    let partition: Option<String> = row.try_get("partition_name")?;
    Ok(TraceRow {
        id: row.try_get("id")?,
        partition: row.try_get("partition")?,
        transaction_id: row.try_get("transaction_id")?,
        group: row.try_get("group_name")?,
        event_type: row.try_get("event_type")?,
        worker: row.try_get("worker_id")?,
        data: row.try_get("data")?,
        created_at: row.try_get("created_at")?,
        names: row.try_get("names")?,
        place: queue.zip(partition),
    })
}
