//! Cost follows the work at hand (design §5), also with plans that were made while the tables were empty.

mod chosen;

use serde_json::{Value, json};

use crate::harness::{Pop, Road, TestBroker};

const PARTITIONS: usize = 3_000;

/// A broker whose figures are not brought up to date meanwhile: that reads the tables too, the more often the longer a
/// test takes.
async fn quiet(set: impl FnOnce(&mut regent::config::Config)) -> TestBroker {
    TestBroker::tuned(Road::Fused, |config| {
        config.statistics.stats_interval_ms = 3_600_000;
        config.statistics.retained_bytes_interval_ms = 3_600_000;
        set(config);
    })
    .await
}

/// PostgreSQL plans once per connection, and statistics that say "empty" live until the next automatic analyze. A plan
/// that reads a table whole was then right; it must not be one that any hot statement can choose.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_of_empty_tables_stay_linear_when_the_tables_have_grown() {
    let broker = quiet(|_| {}).await;
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

/// `spec/push-pop.md` §6.1: where the young tail of a partition begins is found without walking it, nor what lies before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_claim_walks_neither_backlog_nor_young_tail() {
    const HALF: usize = 200;
    const GROUPS: usize = 40;
    let broker = quiet(|config| config.pop.segment_cache_mib_max = 0).await;
    broker.configure("q", json!({ "delayedProcessing": 3_600 })).await;
    let push = async |name: &str| {
        for n in 0..HALF {
            broker.push_ids("q", "p", [format!("{name}{n}")]).await;
        }
    };
    push("old").await;
    broker.db.age(7_200).await;
    push("young").await;
    sqlx::query("SELECT pg_stat_reset()").execute(&broker.db.pool).await.unwrap();
    for n in 0..GROUPS {
        let pop = Pop::queue("q").group(&format!("g{n}")).all().batch(1);
        assert_eq!(broker.pop(&pop).await.ids(), ["old0"]);
        let all = Pop::queue("q").group(&format!("all{n}")).all().batch(1_000);
        if n == 0 {
            assert_eq!(broker.pop(&all).await.messages.len(), HALF, "exactly what is old enough");
        }
    }
    let db = broker.stop_keeping_the_database().await;
    db.disconnect_all().await;
    let read: i64 =
        sqlx::query_scalar("SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'log_segments_pkey'")
            .fetch_one(&db.pool)
            .await
            .unwrap();
    // Either walk alone would read a half for every claim. The one large pop reads its segments, too.
    assert!(read > 0 && read < (GROUPS * HALF / 4 + 3 * HALF) as i64, "{read} index entries read by {GROUPS} claims");
}
