//! What PostgreSQL says about itself, dead letters and partitions of a queue for analytics, segments by age
//! (`spec/admin.md` §9.4, §10).

use chrono::{DateTime, Utc};
use serde_json::Value;

use super::Store;
use super::error::{StoreResult, Timed};
use super::inspection::QueueFilter;
use super::partitions::made_at;
use crate::ids::QueueId;

/// Rows of each list of `postgres-stats`.
const TABLES_MAX: i64 = 200;
/// Partitions, segments of each, and segments in all that a count by age looks at.
const AGE_PARTITIONS_MAX: i64 = 100_000;
const AGE_SEGMENTS_PER_PARTITION_MAX: i64 = 50_000;
const AGE_SEGMENTS_MAX: i64 = 1_000_000;

/// How many partitions of a queue are in use.
#[derive(Clone, Debug, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct QueueLiveness {
    pub queue: String,
    pub namespace: String,
    pub task: String,
    pub partitions: i64,
    pub live_1h: i64,
    pub live_24h: i64,
    pub live_7d: i64,
    pub created_24h: i64,
    pub oldest_write_at: Option<DateTime<Utc>>,
    pub newest_write_at: Option<DateTime<Utc>>,
    pub pending: i64,
}

/// What analytics look at of one dead letter.
#[derive(Clone, Debug, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct LetterSample {
    pub reason: String,
    pub group_name: String,
    pub retry_count: i32,
    pub failed_at: DateTime<Utc>,
    pub bytes: i32,
}

/// Groups of a queue that have registered.
#[derive(Clone, Copy, Debug, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct QueueGroups {
    pub queue_id: i32,
    pub groups: i64,
}

/// The views of `spec/admin.md` §10.10, each a list of objects.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs)]
pub struct DatabaseReport {
    pub database: String,
    pub cache: Value,
    pub table_cache: Value,
    pub index_cache: Value,
    pub active_queries: Value,
    pub table_sizes: Value,
    pub dead_tuples: Value,
    pub hot_updates: Value,
    pub autovacuum: Value,
    pub buffer_config: Value,
}

impl Store {
    /// Retained messages by commit time of their segments, oldest first. Bounded: of very large queues the newest are
    /// counted.
    pub async fn messages_by_age(
        &self,
        filter: &QueueFilter,
        from: DateTime<Utc>,
        to: DateTime<Utc>,
        unit: &str,
    ) -> StoreResult<Vec<(DateTime<Utc>, i64)>> {
        sqlx::query_as(concat!(
            "SELECT date_trunc($6, s.created_at, 'UTC') AS bucket, sum(s.message_count)::bigint FROM ( \
               SELECT s.created_at, s.message_count FROM ( \
                 SELECT p.id, p.log_start FROM queen.queues q JOIN queen.log_partitions p ON p.queue_id = q.id \
                 WHERE q.tenant = queen.default_tenant() AND ($1::text IS NULL OR q.name = $1) \
                   AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3) \
                   AND p.last_offset >= p.log_start AND p.last_write_at >= $4 AND ",
            made_at!(),
            " < $5 LIMIT $7) p \
               CROSS JOIN LATERAL ( \
                 SELECT s.created_at, s.message_count FROM queen.log_segments s \
                 WHERE s.partition_id = p.id AND s.base_offset >= p.log_start ORDER BY s.base_offset DESC LIMIT $8) s \
               WHERE s.created_at >= $4 AND s.created_at < $5 LIMIT $9) s \
             GROUP BY 1 ORDER BY 1",
        ))
        .bind(&filter.queue)
        .bind(&filter.namespace)
        .bind(&filter.task)
        .bind(from)
        .bind(to)
        .bind(unit)
        .bind(AGE_PARTITIONS_MAX)
        .bind(AGE_SEGMENTS_PER_PARTITION_MAX)
        .bind(AGE_SEGMENTS_MAX)
        .fetch_all(&self.pool)
        .timed("counting messages by age")
        .await
    }

    /// The queues with the most partitions, as of their snapshots, with how many partitions are in use. Looks through the
    /// partitions of the queues that it answers.
    pub async fn queue_liveness(&self, filter: &QueueFilter, limit: i64) -> StoreResult<Vec<QueueLiveness>> {
        sqlx::query_as(
            "SELECT q.name AS queue, q.namespace, q.task, q.pending, p.* FROM ( \
               SELECT q.id, q.name, q.namespace, q.task, coalesce(s.pending, 0) AS pending, \
                 coalesce(s.partitions, 0) AS known FROM queen.queues q LEFT JOIN LATERAL (SELECT * FROM queen.stats s WHERE s.queue_id = q.id LIMIT 1) s ON true \
               WHERE q.tenant = queen.default_tenant() AND ($1::text IS NULL OR q.name = $1) \
                 AND ($2::text IS NULL OR q.namespace = $2) AND ($3::text IS NULL OR q.task = $3) \
               ORDER BY known DESC, q.name LIMIT $4) q \
             CROSS JOIN LATERAL ( \
               SELECT count(*) AS partitions, \
                 count(*) FILTER (WHERE written AND last_write_at > statement_timestamp() - interval '1 hour') AS live_1h, \
                 count(*) FILTER (WHERE written AND last_write_at > statement_timestamp() - interval '1 day') AS live_24h, \
                 count(*) FILTER (WHERE written AND last_write_at > statement_timestamp() - interval '7 days') AS live_7d, \
                 count(*) FILTER (WHERE created_at > statement_timestamp() - interval '1 day') AS created_24h, \
                 min(last_write_at) FILTER (WHERE written) AS oldest_write_at, \
                 max(last_write_at) FILTER (WHERE written) AS newest_write_at \
               FROM (SELECT *, last_offset >= 0 AS written FROM queen.log_partitions WHERE queue_id = q.id) p) p \
             ORDER BY p.partitions DESC, q.name",
        )
        .bind(&filter.queue)
        .bind(&filter.namespace)
        .bind(&filter.task)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("partition liveness")
        .await
    }

    /// The newest dead letters of a queue.
    pub async fn letter_samples(&self, queue: QueueId, limit: i64) -> StoreResult<Vec<LetterSample>> {
        sqlx::query_as(
            "SELECT left(reason, 4096) AS reason, group_name, retry_count, failed_at, octet_length(payload) AS bytes \
             FROM queen.dead_letters WHERE queue_id = $1 ORDER BY failed_at DESC, id DESC LIMIT $2",
        )
        .bind(queue.0)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("sampling dead letters")
        .await
    }

    /// How many groups have registered with each queue.
    pub async fn registered_groups(&self) -> StoreResult<Vec<QueueGroups>> {
        sqlx::query_as(
            "SELECT queue_id, count(*) AS groups FROM queen.consumer_groups WHERE mode IS NOT NULL GROUP BY queue_id",
        )
        .fetch_all(&self.pool)
        .timed("counting groups")
        .await
    }

    /// The newest reasons of dead letters over all queues, with how often each occurs among them.
    pub async fn top_reasons(&self, sample: i64, limit: i64) -> StoreResult<Vec<(String, i64)>> {
        sqlx::query_as(
            "SELECT d.reason, count(*) FROM (SELECT left(reason, 200) AS reason FROM queen.dead_letters \
               WHERE tenant = queen.default_tenant() ORDER BY failed_at DESC, id DESC LIMIT $1) d \
             GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT $2",
        )
        .bind(sample)
        .bind(limit)
        .fetch_all(&self.pool)
        .timed("sampling dead letters")
        .await
    }

    /// What PostgreSQL says about this database.
    pub async fn database_report(&self) -> StoreResult<DatabaseReport> {
        let list = async |sql: &'static str| -> StoreResult<Value> {
            sqlx::query_scalar(sql).bind(TABLES_MAX).fetch_one(&self.pool).timed("database report").await
        };
        macro_rules! rows {
            ($($part:literal),+) => {
                concat!("SELECT coalesce(jsonb_agg(to_jsonb(r)), '[]') FROM (", $($part,)+ " LIMIT $1) r")
            };
        }
        let database = sqlx::query_scalar("SELECT current_database()::text");
        Ok(DatabaseReport {
            database: database.fetch_one(&self.pool).timed("database report").await?,
            cache: list(rows!(
                "SELECT blks_read AS \"blocksRead\", blks_hit AS \"blocksHit\", \
                   round(blks_hit / nullif(blks_hit + blks_read, 0)::numeric, 4)::float8 AS \"hitRatio\", \
                   xact_commit AS commits, xact_rollback AS rollbacks, deadlocks, temp_bytes AS \"tempBytes\", \
                   numbackends AS connections FROM pg_stat_database WHERE datname = current_database()"
            ))
            .await?,
            table_cache: list(rows!(
                "SELECT relname AS \"table\", heap_blks_read AS \"blocksRead\", heap_blks_hit AS \"blocksHit\", \
                   round(heap_blks_hit / nullif(heap_blks_hit + heap_blks_read, 0)::numeric, 4)::float8 AS \"hitRatio\" \
                 FROM pg_statio_user_tables WHERE schemaname = 'queen' ORDER BY heap_blks_hit + heap_blks_read DESC"
            ))
            .await?,
            index_cache: list(rows!(
                "SELECT relname AS \"table\", indexrelname AS \"index\", idx_blks_read AS \"blocksRead\", \
                   idx_blks_hit AS \"blocksHit\", \
                   round(idx_blks_hit / nullif(idx_blks_hit + idx_blks_read, 0)::numeric, 4)::float8 AS \"hitRatio\" \
                 FROM pg_statio_user_indexes WHERE schemaname = 'queen' ORDER BY idx_blks_hit + idx_blks_read DESC"
            ))
            .await?,
            active_queries: list(rows!(
                "SELECT pid, state, round(extract(epoch FROM clock_timestamp() - query_start)::numeric, 3)::float8 \
                   AS \"durationSeconds\", wait_event_type AS \"waitEventType\", wait_event AS \"waitEvent\", \
                   left(query, 1000) AS query FROM pg_stat_activity \
                 WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid() \
                   AND query_start < clock_timestamp() - interval '1 second' ORDER BY query_start"
            ))
            .await?,
            table_sizes: list(rows!(
                "SELECT c.relname AS \"table\", pg_total_relation_size(c.oid) AS \"totalBytes\", \
                   pg_relation_size(c.oid) AS \"tableBytes\", pg_indexes_size(c.oid) AS \"indexBytes\", \
                   c.reltuples::bigint AS \"estimatedRows\" \
                 FROM pg_class c WHERE c.relnamespace = 'queen'::regnamespace AND c.relkind = 'r' ORDER BY 2 DESC"
            ))
            .await?,
            dead_tuples: list(rows!(
                "SELECT relname AS \"table\", n_live_tup AS \"live\", n_dead_tup AS \"dead\" FROM pg_stat_user_tables \
                 WHERE schemaname = 'queen' ORDER BY n_dead_tup DESC"
            ))
            .await?,
            hot_updates: list(rows!(
                "SELECT relname AS \"table\", n_tup_upd AS \"updates\", n_tup_hot_upd AS \"hotUpdates\", \
                   round(n_tup_hot_upd / nullif(n_tup_upd, 0)::numeric, 4)::float8 AS \"hotRatio\" \
                 FROM pg_stat_user_tables WHERE schemaname = 'queen' ORDER BY n_tup_upd DESC"
            ))
            .await?,
            autovacuum: list(rows!(
                "SELECT relname AS \"table\", last_vacuum AS \"lastVacuum\", last_autovacuum AS \"lastAutovacuum\", \
                   last_autoanalyze AS \"lastAutoanalyze\", autovacuum_count AS \"autovacuumCount\" \
                 FROM pg_stat_user_tables WHERE schemaname = 'queen' ORDER BY relname"
            ))
            .await?,
            buffer_config: list(rows!(
                "SELECT name, setting, unit FROM pg_settings WHERE name IN ('shared_buffers', 'effective_cache_size', \
                   'work_mem', 'maintenance_work_mem', 'wal_buffers', 'max_wal_size') ORDER BY name"
            ))
            .await?,
        })
    }
}
