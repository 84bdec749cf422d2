//! From a row per partition and kind to lists (migration 0009), beside brokers of before.

use std::path::Path;

use serde_json::json;
use sqlx::migrate::Migrator;

use super::starts_at;
use crate::harness::{Broker, Database, empty_database};

/// A database as brokers of before left it: 1,000 partitions of `q` in three ages, one of `r`.
async fn before_the_lists() -> Database {
    let db = empty_database().await;
    let migrations = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations"));
    let all = Migrator::new(migrations).await.unwrap();
    let before = Migrator::with_migrations(all.iter().filter(|m| m.version <= 8).cloned().collect());
    before.run(&db.pool).await.unwrap();
    for sql in [
        "INSERT INTO queen.queues (name, retention_enabled, retention_seconds) VALUES ('q', true, 1000), ('r', false, 0)",
        "INSERT INTO queen.log_partitions (queue_id, name, last_offset, last_write_at)
         SELECT q.id, 'p' || n, 0, now() - make_interval(secs => (n % 3) * 700)
           FROM queen.queues q CROSS JOIN generate_series(0, 999) AS n WHERE q.name = 'q' OR n = 0",
        "INSERT INTO queen.log_segments (partition_id, base_offset, created_at, message_count, payload_bytes, frames)
         SELECT id, 0, last_write_at, 1, 0, '' FROM queen.log_partitions",
        "INSERT INTO queen.log_txns (partition_id, base_offset, created_at, hashes)
         SELECT id, 0, last_write_at, decode(repeat('00', 16), 'hex') FROM queen.log_partitions",
        "INSERT INTO queen.log_ages (partition_id, kind, queue_id, oldest_at)
         SELECT id, k, queue_id, last_write_at FROM queen.log_partitions CROSS JOIN generate_series(0, 1) AS k",
        "INSERT INTO queen.loop_leases (name, holder, held_until, walk_after)
         VALUES ('retention', gen_random_uuid(), now() + interval '15 seconds', 7)",
    ] {
        db.execute(sql).await;
    }
    db
}

async fn count(db: &Database, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(&db.pool).await.unwrap()
}

/// Every row is an entry of a list, no more and no less; nothing is deleted early, and what is due goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_before_become_lists() {
    let db = before_the_lists().await;
    // So that nothing is deleted before it was looked at.
    db.execute("UPDATE queen.queues SET retention_enabled = false").await;
    let broker = Broker::tuned(&db.url, |_| {}).await;
    let entries = "SELECT count(*) FROM queen.log_age_lists l, unnest(l.partition_ids) AS i (id)";
    assert_eq!(count(&db, entries).await, 2 * 1_001);
    let exact = "SELECT count(*) FROM queen.log_partitions p CROSS JOIN generate_series(0, 1) AS k
        WHERE EXISTS (SELECT 1 FROM queen.log_age_lists l WHERE l.kind = k AND l.queue_id = p.queue_id
          AND p.id = ANY (l.partition_ids) AND l.oldest_at <= p.last_write_at)";
    assert_eq!(count(&db, exact).await, 2 * 1_001);
    assert_eq!(count(&db, "SELECT count(*) FROM queen.log_age_lists").await, 2 * 33);
    assert_eq!(count(&db, "SELECT pg_total_relation_size('queen.log_ages')").await, 8_192, "an empty index is left");

    db.execute("UPDATE queen.queues SET retention_enabled = true WHERE name = 'q'").await;
    starts_at(&db, "p2", 1).await;
    starts_at(&db, "p998", 1).await;
    assert_eq!(db.log_bounds("q", "p0").await, Some((0, 0, 0)));
    assert_eq!(db.log_bounds("q", "p1").await, Some((0, 0, 0)), "700 of 1000 seconds");
    assert_eq!(db.log_bounds("r", "p0").await, Some((0, 0, 0)));
    broker.stop().await;
}

/// A rolling upgrade: pushes of a broker of before still enter what they find empty, and its retention stays away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn brokers_of_before_list_what_they_push_and_leave_retention_alone() {
    let db = before_the_lists().await;
    let broker = Broker::tuned(&db.url, |_| {}).await;
    broker.configure("q", json!({})).await;
    db.walked().await;
    db.execute("DELETE FROM queen.log_age_lists").await;
    // What 0008's brokers run.
    db.execute(
        "INSERT INTO queen.log_ages (partition_id, kind, queue_id, oldest_at)
         SELECT p.id, k.kind, p.queue_id, greatest(statement_timestamp(), p.last_write_at)
         FROM queen.log_partitions p JOIN (VALUES (0), (1)) AS k (kind) ON true
         WHERE p.name = 'p5' ORDER BY p.id, k.kind ON CONFLICT DO NOTHING",
    )
    .await;
    let listed = "SELECT count(*) FROM queen.log_age_lists l JOIN queen.log_partitions p ON p.id = l.partition_ids[1]
                   WHERE p.name = 'p5' AND cardinality(l.partition_ids) = 1 AND l.queue_id = p.queue_id";
    assert_eq!(count(&db, listed).await, 2);
    assert_eq!(count(&db, "SELECT count(*) FROM queen.log_ages").await, 0);
    let taken = sqlx::query(
        "INSERT INTO queen.loop_leases AS l (name, holder, held_until)
         VALUES ('retention', gen_random_uuid(), clock_timestamp() + make_interval(secs => 15))
         ON CONFLICT (name) DO UPDATE SET holder = excluded.holder, held_until = excluded.held_until
         WHERE l.holder = excluded.holder OR l.held_until < clock_timestamp()",
    )
    .execute(&db.pool)
    .await
    .unwrap();
    assert_eq!(taken.rows_affected(), 0);
    assert_eq!(broker.push_ids("q", "p5", ["n"]).await[0].offset, Some(1));
    broker.stop().await;
}
