//! Cost follows the work at hand (design §5), also with plans that were made while the tables were empty.

use serde_json::{Value, json};

use crate::harness::{Pop, TestBroker};

const PARTITIONS: usize = 3_000;

/// PostgreSQL plans once per connection, and statistics that say "empty" live until the next automatic analyze. A plan
/// that reads a table whole was then right; it must not be one that any hot statement can choose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_of_empty_tables_stay_linear_when_the_tables_have_grown() {
    let broker = TestBroker::start().await;
    let tables = ["log_partitions", "log_consumers", "log_segments", "log_txns", "consumer_groups", "queues"];
    for table in tables {
        let quiet = format!("ALTER TABLE queen.{table} SET (autovacuum_enabled = off)");
        sqlx::query(sqlx::AssertSqlSafe(quiet)).execute(&broker.db.pool).await.unwrap();
        sqlx::query(sqlx::AssertSqlSafe(format!("VACUUM ANALYZE queen.{table}")))
            .execute(&broker.db.pool)
            .await
            .unwrap();
    }
    let ids: Vec<usize> = (0..PARTITIONS).collect();
    for chunk in ids.chunks(500) {
        let item = |n: &usize| json!({ "queue": "q", "partition": format!("p{n}"), "payload": n });
        let items: Vec<Value> = chunk.iter().map(item).collect();
        assert!(broker.push(json!(items)).await.iter().all(|result| result.status == "queued"));
    }
    let mut seen = 0;
    while seen < PARTITIONS {
        let popped = broker.pop(&Pop::queue("q").group("g").all().partitions(100).batch(1000)).await;
        assert!(!popped.is_empty(), "{seen} seen");
        seen += popped.messages.len();
        let acks = broker.ack("g", popped.items("completed")).await;
        assert!(acks.iter().all(|result| result.success), "{acks:?}");
    }
    let db = broker.stop_keeping_the_database().await;
    db.disconnect_all().await;
    let read: Vec<(String, i64)> = sqlx::query_as(
        "SELECT indexrelname::text, idx_tup_read FROM pg_stat_user_indexes \
         WHERE schemaname = 'queen' AND relname = ANY ($1) ORDER BY 2 DESC",
    )
    .bind(tables.map(str::to_owned).to_vec())
    .fetch_all(&db.pool)
    .await
    .unwrap();
    // Quadratic is thousands per partition.
    let most = 100 * PARTITIONS as i64;
    assert!(read.iter().all(|(_, rows)| *rows < most), "{read:?}");
    assert!(read.iter().any(|(_, rows)| *rows > PARTITIONS as i64), "nothing was reported: {read:?}");
}
