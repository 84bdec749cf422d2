//! Minute buckets: what each broker did to each queue, and how each broker fared (`spec/admin.md` §10). Written by each
//! broker once a minute, read by people, purged in small batches.

use chrono::{DateTime, Utc};

use super::Store;
use super::error::{StoreResult, Timed};
use super::inspection::QueueFilter;

/// Most points of one answer.
const POINTS_MAX: i64 = 50_000;
/// Rows that one purge statement deletes.
pub const PURGE_ROWS: i64 = 5_000;

/// What one broker did to one queue within one minute; queue 0 gathers those without a row of their own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct QueueMinute {
    pub queue: i32,
    pub push_requests: i64,
    pub push_messages: i64,
    pub pop_messages: i64,
    pub pop_empty: i64,
    pub ack_requests: i64,
    pub ack_success: i64,
    pub ack_failed: i64,
    pub transactions: i64,
    pub conflated: i64,
    pub partitions_created: i64,
    pub partitions_deleted: i64,
    pub lag_count: i64,
    pub lag_ms_sum: i64,
    pub lag_ms_max: i64,
    pub parked_sum: i64,
    pub parked_samples: i64,
}

impl QueueMinute {
    /// Adds what happened to other queues, or more of what happened to this one.
    pub fn add(&mut self, other: &QueueMinute) {
        self.push_requests += other.push_requests;
        self.push_messages += other.push_messages;
        self.pop_messages += other.pop_messages;
        self.pop_empty += other.pop_empty;
        self.ack_requests += other.ack_requests;
        self.ack_success += other.ack_success;
        self.ack_failed += other.ack_failed;
        self.transactions += other.transactions;
        self.conflated += other.conflated;
        self.partitions_created += other.partitions_created;
        self.partitions_deleted += other.partitions_deleted;
        self.lag_count += other.lag_count;
        self.lag_ms_sum += other.lag_ms_sum;
        self.lag_ms_max = self.lag_ms_max.max(other.lag_ms_max);
        self.parked_sum += other.parked_sum;
        self.parked_samples = self.parked_samples.max(other.parked_samples);
    }
}

/// How one broker fared within one minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct BrokerMinute {
    pub pid: i32,
    pub cpu_user: i64,
    pub cpu_system: i64,
    pub rss_bytes: i64,
    pub pool_size: i64,
    pub pool_idle: i64,
    pub pool_active: i64,
    pub uptime_seconds: i64,
    pub loop_lag_count: i64,
    pub loop_lag_us_sum: i64,
    pub loop_lag_us_max: i64,
    pub waiting_max: i64,
    pub totals: Operations,
    pub lag_count: i64,
    pub lag_ms_sum: i64,
    pub lag_ms_max: i64,
}

/// Operations of a broker, or of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct Operations {
    pub push_requests: i64,
    pub push_messages: i64,
    pub pop_requests: i64,
    pub pop_messages: i64,
    pub ack_requests: i64,
    pub ack_success: i64,
    pub ack_failed: i64,
    pub transactions: i64,
    pub dead_letters: i64,
    pub db_errors: i64,
}

impl Operations {
    /// Adds those of other brokers or buckets.
    pub fn add(&mut self, other: &Operations) {
        self.push_requests += other.push_requests;
        self.push_messages += other.push_messages;
        self.pop_requests += other.pop_requests;
        self.pop_messages += other.pop_messages;
        self.ack_requests += other.ack_requests;
        self.ack_success += other.ack_success;
        self.ack_failed += other.ack_failed;
        self.transactions += other.transactions;
        self.dead_letters += other.dead_letters;
        self.db_errors += other.db_errors;
    }

    /// Items of acks, whatever came of them.
    pub fn acks(&self) -> i64 {
        self.ack_success + self.ack_failed
    }
}

/// A time range and the length of its buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// From, inclusive.
    pub from: DateTime<Utc>,
    /// To, inclusive.
    pub to: DateTime<Utc>,
    /// Minutes per bucket.
    pub minutes: i32,
}

/// Operations on one queue within one bucket, by all brokers.
#[derive(Clone, Debug, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct QueuePoint {
    pub bucket: DateTime<Utc>,
    pub queue_id: i32,
    pub queue_name: String,
    pub namespace: String,
    pub task: String,
    pub push_requests: i64,
    pub push_messages: i64,
    pub pop_messages: i64,
    pub pop_empty: i64,
    pub ack_requests: i64,
    pub ack_success: i64,
    pub ack_failed: i64,
    pub transactions: i64,
    pub conflated: i64,
    pub partitions_created: i64,
    pub partitions_deleted: i64,
    pub lag_count: i64,
    pub lag_ms_sum: i64,
    pub lag_ms_max: i64,
    pub parked: f64,
}

/// Parked pops of one queue on one broker within one bucket.
#[derive(Clone, Debug, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct ParkedPoint {
    pub bucket: DateTime<Utc>,
    pub queue_name: String,
    pub broker: String,
    pub parked: f64,
}

/// One broker within one bucket.
#[derive(Clone, Debug, sqlx::FromRow)]
#[allow(missing_docs)]
pub struct BrokerPoint {
    pub bucket: DateTime<Utc>,
    pub broker: String,
    pub pid: i32,
    pub last_seen: DateTime<Utc>,
    /// Average, least, most and last of: CPU of the user and the system (percent × 100), resident bytes, open, idle and used
    /// connections, uptime.
    pub cpu_user: Vec<f64>,
    pub cpu_system: Vec<f64>,
    pub rss_bytes: Vec<f64>,
    pub pool_size: Vec<f64>,
    pub pool_idle: Vec<f64>,
    pub pool_active: Vec<f64>,
    pub uptime_seconds: Vec<f64>,
    pub loop_lag_count: i64,
    pub loop_lag_us_sum: i64,
    pub loop_lag_us_max: i64,
    pub waiting_max: i64,
    #[sqlx(flatten)]
    pub totals: Operations,
    pub lag_count: i64,
    pub lag_ms_sum: i64,
    pub lag_ms_max: i64,
}

impl Store {
    /// Adds one minute of one broker to the buckets and to the lifetime counters, in one transaction.
    pub async fn save_minute(
        &self,
        bucket: DateTime<Utc>,
        broker: &str,
        own: &BrokerMinute,
        queues: &[QueueMinute],
    ) -> StoreResult<()> {
        let mut tx = self.pool.begin().timed("saving minutes").await?;
        let column = |value: fn(&QueueMinute) -> i64| queues.iter().map(value).collect::<Vec<i64>>();
        sqlx::query(
            "INSERT INTO queen.queue_minutes AS m (bucket, broker, queue_id, push_requests, push_messages, pop_messages, \
               pop_empty, ack_requests, ack_success, ack_failed, transactions, lag_count, lag_ms_sum, lag_ms_max, \
               parked_sum, parked_samples, conflated, partitions_created, partitions_deleted) \
             SELECT $1, $2, * FROM unnest($3::int[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[], \
               $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bigint[], $14::bigint[], $15::bigint[], \
               $16::bigint[], $17::bigint[], $18::bigint[], $19::bigint[]) \
             ON CONFLICT (bucket, queue_id, broker) DO UPDATE SET push_requests = m.push_requests + excluded.push_requests, \
               push_messages = m.push_messages + excluded.push_messages, \
               pop_messages = m.pop_messages + excluded.pop_messages, pop_empty = m.pop_empty + excluded.pop_empty, \
               ack_requests = m.ack_requests + excluded.ack_requests, ack_success = m.ack_success + excluded.ack_success, \
               ack_failed = m.ack_failed + excluded.ack_failed, transactions = m.transactions + excluded.transactions, \
               lag_count = m.lag_count + excluded.lag_count, lag_ms_sum = m.lag_ms_sum + excluded.lag_ms_sum, \
               lag_ms_max = greatest(m.lag_ms_max, excluded.lag_ms_max), \
               parked_sum = m.parked_sum + excluded.parked_sum, parked_samples = m.parked_samples + excluded.parked_samples, \
               conflated = m.conflated + excluded.conflated, \
               partitions_created = m.partitions_created + excluded.partitions_created, \
               partitions_deleted = m.partitions_deleted + excluded.partitions_deleted",
        )
        .bind(bucket)
        .bind(broker)
        .bind(queues.iter().map(|q| q.queue).collect::<Vec<_>>())
        .bind(column(|q| q.push_requests))
        .bind(column(|q| q.push_messages))
        .bind(column(|q| q.pop_messages))
        .bind(column(|q| q.pop_empty))
        .bind(column(|q| q.ack_requests))
        .bind(column(|q| q.ack_success))
        .bind(column(|q| q.ack_failed))
        .bind(column(|q| q.transactions))
        .bind(column(|q| q.lag_count))
        .bind(column(|q| q.lag_ms_sum))
        .bind(column(|q| q.lag_ms_max))
        .bind(column(|q| q.parked_sum))
        .bind(column(|q| q.parked_samples))
        .bind(column(|q| q.conflated))
        .bind(column(|q| q.partitions_created))
        .bind(column(|q| q.partitions_deleted))
        .execute(&mut *tx)
        .timed("saving minutes")
        .await?;
        let t = &own.totals;
        sqlx::query(
            "WITH life AS ( \
               INSERT INTO queen.lifetime AS l (push_requests, push_messages, pop_requests, pop_messages, ack_requests, \
                 ack_success, ack_failed, transactions, dead_letters, db_errors) \
               VALUES ($3, $4, $5, $6, $7, $8, $9, $10, $11, $12) \
               ON CONFLICT (one) DO UPDATE SET push_requests = l.push_requests + excluded.push_requests, \
                 push_messages = l.push_messages + excluded.push_messages, \
                 pop_requests = l.pop_requests + excluded.pop_requests, \
                 pop_messages = l.pop_messages + excluded.pop_messages, \
                 ack_requests = l.ack_requests + excluded.ack_requests, ack_success = l.ack_success + excluded.ack_success, \
                 ack_failed = l.ack_failed + excluded.ack_failed, transactions = l.transactions + excluded.transactions, \
                 dead_letters = l.dead_letters + excluded.dead_letters, db_errors = l.db_errors + excluded.db_errors) \
             INSERT INTO queen.broker_minutes AS m (bucket, broker, push_requests, push_messages, pop_requests, \
               pop_messages, ack_requests, ack_success, ack_failed, transactions, dead_letters, db_errors, pid, cpu_user, \
               cpu_system, rss_bytes, pool_size, pool_idle, pool_active, uptime_seconds, loop_lag_count, loop_lag_us_sum, \
               loop_lag_us_max, waiting_max, lag_count, lag_ms_sum, lag_ms_max) \
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, \
               $23, $24, $25, $26, $27) \
             ON CONFLICT (bucket, broker) DO UPDATE SET push_requests = m.push_requests + excluded.push_requests, \
               push_messages = m.push_messages + excluded.push_messages, \
               pop_requests = m.pop_requests + excluded.pop_requests, pop_messages = m.pop_messages + excluded.pop_messages, \
               ack_requests = m.ack_requests + excluded.ack_requests, ack_success = m.ack_success + excluded.ack_success, \
               ack_failed = m.ack_failed + excluded.ack_failed, transactions = m.transactions + excluded.transactions, \
               dead_letters = m.dead_letters + excluded.dead_letters, db_errors = m.db_errors + excluded.db_errors, \
               pid = excluded.pid, cpu_user = excluded.cpu_user, cpu_system = excluded.cpu_system, \
               rss_bytes = excluded.rss_bytes, pool_size = excluded.pool_size, pool_idle = excluded.pool_idle, \
               pool_active = excluded.pool_active, uptime_seconds = excluded.uptime_seconds, \
               loop_lag_count = m.loop_lag_count + excluded.loop_lag_count, \
               loop_lag_us_sum = m.loop_lag_us_sum + excluded.loop_lag_us_sum, \
               loop_lag_us_max = greatest(m.loop_lag_us_max, excluded.loop_lag_us_max), \
               waiting_max = greatest(m.waiting_max, excluded.waiting_max), lag_count = m.lag_count + excluded.lag_count, \
               lag_ms_sum = m.lag_ms_sum + excluded.lag_ms_sum, lag_ms_max = greatest(m.lag_ms_max, excluded.lag_ms_max)",
        )
        .bind(bucket)
        .bind(broker)
        .bind(t.push_requests)
        .bind(t.push_messages)
        .bind(t.pop_requests)
        .bind(t.pop_messages)
        .bind(t.ack_requests)
        .bind(t.ack_success)
        .bind(t.ack_failed)
        .bind(t.transactions)
        .bind(t.dead_letters)
        .bind(t.db_errors)
        .bind(own.pid)
        .bind(own.cpu_user)
        .bind(own.cpu_system)
        .bind(own.rss_bytes)
        .bind(own.pool_size)
        .bind(own.pool_idle)
        .bind(own.pool_active)
        .bind(own.uptime_seconds)
        .bind(own.loop_lag_count)
        .bind(own.loop_lag_us_sum)
        .bind(own.loop_lag_us_max)
        .bind(own.waiting_max)
        .bind(own.lag_count)
        .bind(own.lag_ms_sum)
        .bind(own.lag_ms_max)
        .execute(&mut *tx)
        .timed("saving minutes")
        .await?;
        tx.commit().timed("saving minutes").await
    }

    /// Which queue each of these groups belongs to.
    pub async fn group_queues(&self, groups: &[i32]) -> StoreResult<Vec<(i32, i32)>> {
        sqlx::query_as("SELECT id, queue_id FROM queen.consumer_groups WHERE id = ANY($1)")
            .bind(groups)
            .fetch_all(&self.pool)
            .timed("finding queues of groups")
            .await
    }

    /// Deletes one batch of buckets older than `seconds`; whether there may be more.
    pub async fn purge_minutes(&self, seconds: f64) -> StoreResult<bool> {
        let mut more = false;
        for statement in [
            "DELETE FROM queen.queue_minutes WHERE ctid = ANY(ARRAY(SELECT ctid FROM queen.queue_minutes \
               WHERE bucket < statement_timestamp() - make_interval(secs => $1) ORDER BY bucket LIMIT $2))",
            "DELETE FROM queen.broker_minutes WHERE ctid = ANY(ARRAY(SELECT ctid FROM queen.broker_minutes \
               WHERE bucket < statement_timestamp() - make_interval(secs => $1) ORDER BY bucket LIMIT $2))",
        ] {
            let done = sqlx::query(statement)
                .bind(seconds)
                .bind(PURGE_ROWS)
                .execute(&self.pool)
                .timed("purging minutes")
                .await?;
            more |= done.rows_affected() >= PURGE_ROWS as u64;
        }
        Ok(more)
    }

    /// Operations per bucket and queue, oldest first. Queues that are gone are not among them.
    pub async fn queue_points(&self, window: &Window, filter: &QueueFilter) -> StoreResult<Vec<QueuePoint>> {
        sqlx::query_as(
            "SELECT date_bin(make_interval(mins => $3), m.bucket, 'epoch') AS bucket, q.id AS queue_id, \
               q.name AS queue_name, q.namespace, q.task, \
               sum(m.push_requests)::bigint AS push_requests, sum(m.push_messages)::bigint AS push_messages, \
               sum(m.pop_messages)::bigint AS pop_messages, sum(m.pop_empty)::bigint AS pop_empty, \
               sum(m.ack_requests)::bigint AS ack_requests, sum(m.ack_success)::bigint AS ack_success, \
               sum(m.ack_failed)::bigint AS ack_failed, sum(m.transactions)::bigint AS transactions, \
               sum(m.conflated)::bigint AS conflated, sum(m.partitions_created)::bigint AS partitions_created, \
               sum(m.partitions_deleted)::bigint AS partitions_deleted, sum(m.lag_count)::bigint AS lag_count, \
               sum(m.lag_ms_sum)::bigint AS lag_ms_sum, max(m.lag_ms_max) AS lag_ms_max, \
               sum(m.parked_sum::float8 / greatest(m.parked_samples, 1)) / count(DISTINCT m.bucket) AS parked \
             FROM queen.queue_minutes m CROSS JOIN LATERAL (SELECT * FROM queen.queues q WHERE q.id = m.queue_id LIMIT 1) q \
             WHERE m.bucket >= date_bin(make_interval(mins => $3), $1, 'epoch') AND m.bucket <= $2 \
               AND q.tenant = queen.default_tenant() AND ($4::text IS NULL OR q.name = $4) \
               AND ($5::text IS NULL OR q.namespace = $5) AND ($6::text IS NULL OR q.task = $6) \
             GROUP BY 1, q.id, q.name, q.namespace, q.task ORDER BY 1, q.name LIMIT $7",
        )
        .bind(window.from)
        .bind(window.to)
        .bind(window.minutes)
        .bind(&filter.queue)
        .bind(&filter.namespace)
        .bind(&filter.task)
        .bind(POINTS_MAX)
        .fetch_all(&self.pool)
        .timed("reading minutes")
        .await
    }

    /// Parked pops per bucket, queue and broker, oldest first; only where there were any.
    pub async fn parked_points(&self, window: &Window, queue: Option<&str>) -> StoreResult<Vec<ParkedPoint>> {
        sqlx::query_as(
            "SELECT date_bin(make_interval(mins => $3), m.bucket, 'epoch') AS bucket, q.name AS queue_name, m.broker, \
               sum(m.parked_sum::float8 / greatest(m.parked_samples, 1)) / count(DISTINCT m.bucket) AS parked \
             FROM queen.queue_minutes m CROSS JOIN LATERAL (SELECT * FROM queen.queues q WHERE q.id = m.queue_id LIMIT 1) q \
             WHERE m.bucket >= date_bin(make_interval(mins => $3), $1, 'epoch') AND m.bucket <= $2 AND m.parked_sum > 0 \
               AND q.tenant = queen.default_tenant() AND ($4::text IS NULL OR q.name = $4) \
             GROUP BY 1, q.name, m.broker ORDER BY 1, 2, 3 LIMIT $5",
        )
        .bind(window.from)
        .bind(window.to)
        .bind(window.minutes)
        .bind(queue)
        .bind(POINTS_MAX)
        .fetch_all(&self.pool)
        .timed("reading minutes")
        .await
    }

    /// Every broker's buckets, oldest first.
    pub async fn broker_points(&self, window: &Window, broker: Option<&str>) -> StoreResult<Vec<BrokerPoint>> {
        macro_rules! gauge {
            ($($name:literal),+) => {
                concat!($("ARRAY[avg(m.", $name, "), min(m.", $name, "), max(m.", $name,
                    "), (array_agg(m.", $name, " ORDER BY m.bucket DESC))[1]]::float8[] AS ", $name, ", "),+)
            };
        }
        sqlx::query_as(concat!(
            "SELECT date_bin(make_interval(mins => $3), m.bucket, 'epoch') AS bucket, m.broker, \
               max(m.bucket) AS last_seen, (array_agg(m.pid ORDER BY m.bucket DESC))[1] AS pid, ",
            gauge!("cpu_user", "cpu_system", "rss_bytes", "pool_size", "pool_idle", "pool_active", "uptime_seconds"),
            "sum(m.loop_lag_count)::bigint AS loop_lag_count, sum(m.loop_lag_us_sum)::bigint AS loop_lag_us_sum, \
               max(m.loop_lag_us_max) AS loop_lag_us_max, max(m.waiting_max) AS waiting_max, \
               sum(m.push_requests)::bigint AS push_requests, sum(m.push_messages)::bigint AS push_messages, \
               sum(m.pop_requests)::bigint AS pop_requests, sum(m.pop_messages)::bigint AS pop_messages, \
               sum(m.ack_requests)::bigint AS ack_requests, sum(m.ack_success)::bigint AS ack_success, \
               sum(m.ack_failed)::bigint AS ack_failed, sum(m.transactions)::bigint AS transactions, \
               sum(m.dead_letters)::bigint AS dead_letters, sum(m.db_errors)::bigint AS db_errors, \
               sum(m.lag_count)::bigint AS lag_count, sum(m.lag_ms_sum)::bigint AS lag_ms_sum, \
               max(m.lag_ms_max) AS lag_ms_max \
             FROM queen.broker_minutes m \
             WHERE m.bucket >= date_bin(make_interval(mins => $3), $1, 'epoch') AND m.bucket <= $2 \
               AND ($4::text IS NULL OR m.broker = $4) \
             GROUP BY 1, m.broker ORDER BY 1, 2 LIMIT $5"
        ))
        .bind(window.from)
        .bind(window.to)
        .bind(window.minutes)
        .bind(broker)
        .bind(POINTS_MAX)
        .fetch_all(&self.pool)
        .timed("reading minutes")
        .await
    }

    /// What all brokers have done since the table was made, as far as it is written down.
    pub async fn lifetime(&self) -> StoreResult<Operations> {
        let row = sqlx::query_as("SELECT * FROM queen.lifetime").fetch_optional(&self.pool).timed("lifetime").await?;
        Ok(row.unwrap_or_default())
    }

    /// Messages pushed and acknowledged within the last `seconds`, as far as they are written down.
    pub async fn recent_operations(&self, seconds: i32) -> StoreResult<(i64, i64)> {
        sqlx::query_as(
            "SELECT coalesce(sum(push_messages), 0)::bigint, coalesce(sum(ack_success), 0)::bigint \
             FROM queen.broker_minutes WHERE bucket > statement_timestamp() - make_interval(secs => $1)",
        )
        .bind(f64::from(seconds))
        .fetch_one(&self.pool)
        .timed("recent operations")
        .await
    }
}
