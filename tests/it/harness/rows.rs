//! The rows behind the answers, and the few that a test may move.

use std::collections::BTreeMap;
use std::time::Instant;

use sqlx::AssertSqlSafe;

use super::Database;

/// One row of `queen.log_consumers`.
#[derive(Clone, Debug, PartialEq, sqlx::FromRow)]
pub struct Cursor {
    pub committed: i64,
    pub batch_end: Option<i64>,
    pub worker: Option<String>,
    pub leased: bool,
    pub batch_retry_count: i32,
    /// Seconds until the lease expires.
    pub lease_left: Option<f64>,
    /// Seconds until `retryDelay` is over.
    pub held_for: Option<f64>,
    /// Messages consumed so far, stored or derived from `committed`.
    pub consumed: i64,
    /// Claims of the batch that begins at `attempt_start`.
    pub attempts: Option<i32>,
    pub attempt_start: Option<i64>,
    pub attempt_end: Option<i64>,
}

/// Checks that what counts down has `left` seconds of the `seconds` that it got at some moment since `asked`.
#[track_caller]
pub fn assert_left(left: f64, seconds: f64, asked: Instant) {
    // The clock of the database may be set meanwhile, by a little.
    let least = seconds - asked.elapsed().as_secs_f64() - 0.1;
    assert!((least..=seconds).contains(&left), "{left} s left of {seconds} s, at least {least} s expected");
}

/// One row of `queen.dead_letters`.
#[derive(Clone, Debug, PartialEq, sqlx::FromRow)]
pub struct DeadLetter {
    pub queue_name: String,
    pub partition_name: String,
    pub group_name: String,
    pub log_offset: i64,
    pub message_id: String,
    pub transaction_id: String,
    pub payload: String,
    pub reason: String,
    pub retry_count: i32,
    pub message_created_at: String,
}

/// What retention deletes by its age.
#[derive(Clone, Copy, Debug)]
pub enum Aged {
    Segments,
    Hashes,
}

/// Waits until nobody works on the lists of ages, and keeps others from it. After the partitions are locked: pushes lock
/// them first, and retention waits for none while it has a list.
const STILL: &str = "LOCK TABLE queen.log_age_lists IN EXCLUSIVE MODE";

impl Database {
    /// The cursor of a group on a partition, if it has one.
    pub async fn find_cursor(&self, queue: &str, partition: &str, group: &str) -> Option<Cursor> {
        sqlx::query_as(
            "SELECT c.committed, c.batch_end, c.worker_id::text AS worker, c.batch_retry_count,
                    c.worker_id IS NOT NULL AND coalesce(c.lease_expires_at > now(), false) AS leased,
                    extract(epoch FROM c.lease_expires_at - now())::float8 AS lease_left,
                    extract(epoch FROM c.not_before - now())::float8 AS held_for,
                    coalesce(c.total_consumed, c.committed + 1) AS consumed, c.attempts, c.attempt_start, c.attempt_end
               FROM queen.log_consumers c
               JOIN queen.log_partitions p ON p.id = c.partition_id
               JOIN queen.queues q ON q.id = p.queue_id
               JOIN queen.consumer_groups g ON g.id = c.group_id
              WHERE q.name = $1 AND p.name = $2 AND g.name = $3",
        )
        .bind(queue)
        .bind(partition)
        .bind(group)
        .fetch_optional(&self.pool)
        .await
        .unwrap()
    }

    /// The cursor that must be there.
    pub async fn cursor(&self, queue: &str, partition: &str, group: &str) -> Cursor {
        let found = self.find_cursor(queue, partition, group).await;
        found.unwrap_or_else(|| panic!("no cursor of {group} on {queue}/{partition}"))
    }

    /// Last offset of a partition.
    pub async fn last_offset(&self, queue: &str, partition: &str) -> Option<i64> {
        sqlx::query_scalar(
            "SELECT p.last_offset FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
              WHERE q.name = $1 AND p.name = $2",
        )
        .bind(queue)
        .bind(partition)
        .fetch_optional(&self.pool)
        .await
        .unwrap()
    }

    /// All dead letters, by offset, then oldest first.
    pub async fn dead_letters(&self) -> Vec<DeadLetter> {
        sqlx::query_as(
            "SELECT queue_name, partition_name, group_name, log_offset, message_id::text AS message_id, transaction_id,
                    convert_from(payload, 'UTF8') AS payload, reason, retry_count,
                    to_char(message_created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"')
                        AS message_created_at
               FROM queen.dead_letters ORDER BY partition_id, log_offset, failed_at, id",
        )
        .fetch_all(&self.pool)
        .await
        .unwrap()
    }

    /// Live leases of the whole database.
    pub async fn live_leases(&self) -> i64 {
        let sql = "SELECT count(*) FROM queen.log_consumers WHERE worker_id IS NOT NULL AND lease_expires_at > now()";
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// Queues by name.
    pub async fn queue_names(&self) -> Vec<String> {
        sqlx::query_scalar("SELECT name FROM queen.queues ORDER BY name").fetch_all(&self.pool).await.unwrap()
    }

    /// Rows per table of the schema: equal before and after means that nothing was written. Without what
    /// brokers write by themselves: heartbeats, statistics, leases of background work.
    pub async fn row_counts(&self) -> BTreeMap<String, i64> {
        let tables: Vec<String> = sqlx::query_scalar(
            "SELECT tablename::text FROM pg_tables WHERE schemaname = 'queen' AND tablename <> ALL
                ('{brokers,stats,turns,queue_minutes,broker_minutes,lifetime,loop_leases,retention_queues,empty_partitions}')",
        )
        .fetch_all(&self.pool)
        .await
        .unwrap();
        let mut counts = BTreeMap::new();
        for table in tables {
            let sql = AssertSqlSafe(format!("SELECT count(*) FROM queen.{table}"));
            counts.insert(table, sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap());
        }
        counts
    }

    /// Lets every live lease expire, by moving its expiry into the past.
    pub async fn expire_leases(&self) {
        self.execute(
            "UPDATE queen.log_consumers SET lease_expires_at = now() - interval '1 minute' WHERE worker_id IS NOT NULL",
        )
        .await;
    }

    /// Makes everything pushed so far `seconds` older.
    pub async fn age(&self, seconds: i32) {
        let mut tx = self.pool.begin().await.unwrap();
        // In the order of everybody else.
        let lock = "SELECT id FROM queen.log_partitions ORDER BY id FOR NO KEY UPDATE";
        sqlx::query(lock).execute(&mut *tx).await.unwrap();
        sqlx::query(STILL).execute(&mut *tx).await.unwrap();
        for sql in [
            "UPDATE queen.log_segments SET created_at = created_at - make_interval(secs => $1)",
            "UPDATE queen.log_txns SET created_at = created_at - make_interval(secs => $1)",
            "UPDATE queen.log_age_lists SET oldest_at = oldest_at - make_interval(secs => $1)",
        ] {
            sqlx::query(sql).bind(f64::from(seconds)).execute(&mut *tx).await.unwrap();
        }
        tx.commit().await.unwrap();
        // What was found not to be due yet may be due now.
        self.execute("UPDATE queen.retention_queues SET check_at = clock_timestamp()").await;
    }

    /// The same for one queue, in one transaction.
    pub async fn age_queue(&self, queue: &str, seconds: i32) {
        let mut tx = self.pool.begin().await.unwrap();
        let lock = "SELECT p.id FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1
                     ORDER BY p.id FOR NO KEY UPDATE OF p";
        sqlx::query(lock).bind(queue).execute(&mut *tx).await.unwrap();
        sqlx::query(STILL).execute(&mut *tx).await.unwrap();
        for sql in [
            "UPDATE queen.log_segments x SET created_at = x.created_at - make_interval(secs => $2)
               FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
              WHERE q.name = $1 AND x.partition_id = p.id",
            "UPDATE queen.log_txns x SET created_at = x.created_at - make_interval(secs => $2)
               FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
              WHERE q.name = $1 AND x.partition_id = p.id",
            "UPDATE queen.log_age_lists x SET oldest_at = x.oldest_at - make_interval(secs => $2)
               FROM queen.queues q WHERE q.name = $1 AND x.queue_id = q.id",
        ] {
            sqlx::query(sql).bind(queue).bind(f64::from(seconds)).execute(&mut *tx).await.unwrap();
        }
        let due = "UPDATE queen.retention_queues r SET check_at = clock_timestamp() FROM queen.queues q
                    WHERE q.id = r.queue_id AND q.name = $1";
        sqlx::query(due).bind(queue).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Makes what a partition stores of a kind below an offset `seconds` older; what is above stays, so commit times stay in
    /// the order of the offsets.
    pub async fn age_front(&self, queue: &str, partition: &str, what: Aged, below: i64, seconds: i32) {
        let (table, kind) = match what {
            Aged::Segments => ("log_segments", 0i16),
            Aged::Hashes => ("log_txns", 1),
        };
        let mut tx = self.pool.begin().await.unwrap();
        let lock = "SELECT p.id, p.queue_id FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id
                     WHERE q.name = $1 AND p.name = $2 FOR NO KEY UPDATE OF p";
        let found: Option<(i64, i32)> =
            sqlx::query_as(lock).bind(queue).bind(partition).fetch_optional(&mut *tx).await.unwrap();
        let Some((id, queue)) = found else { return };
        sqlx::query(STILL).execute(&mut *tx).await.unwrap();
        let age = format!(
            "WITH aged AS (UPDATE queen.{table} SET created_at = created_at - make_interval(secs => $4)
                 WHERE partition_id = $1 AND base_offset < $3 RETURNING created_at)
             UPDATE queen.log_age_lists a SET oldest_at = oldest_at - make_interval(secs => $4)
              WHERE a.kind = $2 AND a.queue_id = $5 AND $1 = ANY (a.partition_ids) AND EXISTS (SELECT FROM aged)"
        );
        let age = sqlx::query(AssertSqlSafe(age)).bind(id).bind(kind).bind(below).bind(f64::from(seconds)).bind(queue);
        age.execute(&mut *tx).await.unwrap();
        let due = "UPDATE queen.retention_queues SET check_at = clock_timestamp() WHERE queue_id = $1 AND kind = $2";
        sqlx::query(due).bind(queue).bind(kind).execute(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
    }

    /// Makes segments `seconds` older without the locks of [`Database::age`]: beside a transaction that holds partitions.
    pub async fn age_beside_locks(&self, seconds: i32) {
        for sql in [
            "UPDATE queen.log_segments SET created_at = created_at - make_interval(secs => $1)",
            "UPDATE queen.log_age_lists SET oldest_at = oldest_at - make_interval(secs => $1)",
        ] {
            sqlx::query(sql).bind(f64::from(seconds)).execute(&self.pool).await.unwrap();
        }
        self.execute("UPDATE queen.retention_queues SET check_at = clock_timestamp()").await;
    }

    /// Adds lists of ages by hand: what `query` answers of (kind, queue, age, partitions).
    pub async fn add_age_lists(&self, query: &str) {
        let sql = format!("INSERT INTO queen.log_age_lists (kind, queue_id, oldest_at, partition_ids) {query}");
        sqlx::query(AssertSqlSafe(sql)).execute(&self.pool).await.unwrap();
    }

    /// The same in the place of all lists of segments: `query` answers (queue, age, partitions).
    pub async fn list_segments_by_hand(&self, query: &str) {
        self.execute("DELETE FROM queen.log_age_lists WHERE kind = 0").await;
        self.add_age_lists(&format!("SELECT 0, l.* FROM ({query}) l")).await;
    }

    /// Whether retention has looked at a queue since the last change of its options or ages.
    pub async fn is_queue_swept(&self, queue: &str) -> bool {
        let sql = "SELECT count(*) FROM queen.retention_queues r JOIN queen.queues q ON q.id = r.queue_id
                    WHERE q.name = $1 AND r.check_at <= clock_timestamp()";
        sqlx::query_scalar::<_, i64>(sql).bind(queue).fetch_one(&self.pool).await.unwrap() == 0
    }

    /// Whether retention has looked at every queue since the last change of options or ages.
    pub async fn is_swept(&self) -> bool {
        let sql = "SELECT count(*) FROM queen.retention_queues WHERE check_at <= clock_timestamp()";
        sqlx::query_scalar::<_, i64>(sql).fetch_one(&self.pool).await.unwrap() == 0
    }

    /// Statements like this one that wait for a lock.
    pub async fn lock_waits(&self, like: &str) -> i64 {
        let sql = "SELECT count(*) FROM pg_stat_activity
                    WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE $1";
        sqlx::query_scalar(sql).bind(like).fetch_one(&self.pool).await.unwrap()
    }

    /// Waits until retention has made its first walk: beside one, what a test changes by hand may be listed twice.
    pub async fn walked(&self) {
        let sql = "SELECT EXISTS (SELECT FROM queen.loop_leases
                    WHERE name = 'age_lists' AND walked_at IS NOT NULL AND walk_after IS NULL)";
        super::eventually(super::PATIENCE, async || sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()).await;
    }

    /// Where the log of a partition starts, where its hashes start, and its last offset.
    pub async fn log_bounds(&self, queue: &str, partition: &str) -> Option<(i64, i64, i64)> {
        sqlx::query_as(
            "SELECT p.log_start, p.txns_start, p.last_offset
               FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1 AND p.name = $2",
        )
        .bind(queue)
        .bind(partition)
        .fetch_optional(&self.pool)
        .await
        .unwrap()
    }

    /// Waits until a broker listens: what it cached before, it reads again then.
    pub async fn listened_to(&self) {
        let sql = "SELECT EXISTS (SELECT 1 FROM pg_stat_activity \
                   WHERE datname = current_database() AND state = 'idle' AND query ILIKE 'LISTEN%')";
        super::eventually(super::PATIENCE, async || sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()).await;
    }

    /// Deadlocks of this database since the server started.
    pub async fn deadlocks(&self) -> i64 {
        let sql = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
        sqlx::query_scalar(sql).fetch_one(&self.pool).await.unwrap()
    }

    /// A seek by hand: the cursor goes to `committed`, the lease is gone, the budget full.
    pub async fn seek(&self, committed: i64) {
        sqlx::query(
            "UPDATE queen.log_consumers SET committed = $1, worker_id = NULL, batch_end = NULL,
                    lease_expires_at = NULL, batch_retry_count = 0, not_before = NULL",
        )
        .bind(committed)
        .execute(&self.pool)
        .await
        .unwrap();
    }
}
