//! Retention beside everything else: pushes, pops and acks on the same partitions, other brokers, a broker that dies.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use serde_json::json;

use super::starts_at;
use crate::harness::{Database, PATIENCE, Pop, Road, TestBroker, eventually, eventually_some, numbered};

const LANES: usize = 6;
const ROUNDS: usize = 25;

/// I12, I2, I7: under constant deletion by max-wait and completed retention, offsets stay dense, what is delivered is in
/// order, nothing deadlocks, and in the end the partitions are empty with their cursors at their ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deletion_beside_pushes_pops_and_acks() {
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 20;
        config.retention.batch_size = 5;
        config.retention.parallelism = 4;
    })
    .await;
    let second = broker.another_tuned(|config| config.retention.interval_ms = 20).await;
    broker
        .configure("q", json!({ "retentionEnabled": true, "completedRetentionSeconds": 30, "maxWaitTimeSeconds": 100 }))
        .await;
    let pushes = async {
        for round in 0..ROUNDS {
            let all = (0..LANES).map(|lane| {
                let client = if round % 2 == 0 { (*broker).clone() } else { (*second).clone() };
                async move { client.push_ids("q", &format!("p{lane}"), numbered(&format!("r{round}-"), 0..4)).await }
            });
            for results in join_all(all).await {
                let offsets: Vec<Option<i64>> = results.iter().map(|r| r.offset).collect();
                let first = round as i64 * 4;
                assert_eq!(offsets, (first..first + 4).map(Some).collect::<Vec<_>>(), "dense, whatever was deleted");
            }
            broker.db.age(20).await;
        }
    };
    let reads = join_all((0..4).map(|n| {
        let client = if n % 2 == 0 { (*broker).clone() } else { (*second).clone() };
        async move {
            let mut seen = 0;
            for _ in 0..ROUNDS * 2 {
                let popped = client.pop(&Pop::queue("q").group("g").all().batch(7).partitions(2).wait_ms(50)).await;
                let mut last: BTreeMap<String, i64> = BTreeMap::new();
                for message in &popped.messages {
                    let (round, n) = message.transaction_id[1..].split_once('-').unwrap();
                    let at = round.parse::<i64>().unwrap() * 4 + n.parse::<i64>().unwrap();
                    if let Some(before) = last.insert(message.partition.clone(), at) {
                        assert!(before < at, "in order");
                    }
                }
                seen += popped.messages.len();
                if !popped.is_empty() {
                    for ack in client.ack("g", popped.items("completed")).await {
                        assert!(ack.success, "{ack:?}");
                    }
                }
            }
            seen
        }
    }));
    let ((), seen) = join(pushes, reads).await;
    assert!(seen.iter().sum::<usize>() > 0);
    broker.db.age(200).await;
    for lane in 0..LANES {
        starts_at(&broker.db, &format!("p{lane}"), ROUNDS as i64 * 4).await;
    }
    assert_eq!(broker.db.deadlocks().await, 0);
    assert_eq!(broker.db.row_counts().await["log_segments"], 0);
    eventually(Duration::from_secs(10), async || {
        broker.pop(&Pop::queue("q").group("g").partitions(0)).await.is_empty() && broker.db.live_leases().await == 0
    })
    .await;
    second.stop().await;
}

/// The broker that does the deleting now.
async fn holder(db: &Database) -> Option<uuid::Uuid> {
    let sql = "SELECT holder FROM queen.loop_leases WHERE name = 'age_lists' AND held_until > clock_timestamp()";
    sqlx::query_scalar(sql).fetch_optional(&db.pool).await.unwrap()
}

/// One broker works, and the other takes over when it ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_broker_takes_over() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    // Or the second might be quicker, and the one that ends below would not be the one that works.
    let first = eventually_some(PATIENCE, async || holder(&broker.db).await).await;
    let second = broker.another_tuned(|config| config.retention.interval_ms = 40).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.db.age(60).await;
    starts_at(&broker.db, "p", 1).await;
    second.push_ids("q", "p", ["b"]).await;
    let db = broker.stop_keeping_the_database().await;
    eventually_some(Duration::from_secs(20), async || holder(&db).await.filter(|next| *next != first)).await;
    db.age(60).await;
    starts_at(&db, "p", 2).await;
    second.stop().await;
}

/// What was deleted before the end is deleted, the rest goes after the restart, and offsets go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_survives_a_restart_in_the_middle() {
    let broker = TestBroker::tuned(Road::Fused, |config| {
        config.retention.interval_ms = 5_000;
        config.retention.batch_size = 1;
        config.retention.due_max = 1;
    })
    .await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    for n in 0..6 {
        broker.push_ids("q", "p", [format!("m{n}")]).await;
    }
    broker.db.age(60).await;
    eventually(Duration::from_secs(10), async || {
        broker.db.log_bounds("q", "p").await.is_some_and(|(start, ..)| start > 0)
    })
    .await;
    let broker = broker.restart().await;
    starts_at(&broker.db, "p", 6).await;
    assert_eq!(broker.push_ids("q", "p", ["n"]).await[0].offset, Some(6));
    let by_step: i64 = sqlx::query_scalar("SELECT sum(messages)::bigint FROM queen.retention_history")
        .fetch_one(&broker.db.pool)
        .await
        .unwrap();
    assert_eq!(by_step, 6, "each message was counted once");
}

/// A push that holds the partition's lock is waited for, and the wait holds up nobody else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_partition_holds_up_no_other() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    for lane in ["p", "free"] {
        broker.push_ids("q", lane, ["a"]).await;
    }
    let mut holder = broker.db.pool.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM queen.log_partitions WHERE name = 'p' FOR NO KEY UPDATE")
        .execute(&mut *holder)
        .await
        .unwrap();
    // Without the locks that ageing takes elsewhere.
    broker.db.age_beside_locks(60).await;
    starts_at(&broker.db, "free", 1).await;
    let start = Instant::now();
    broker.push_ids("q", "free", ["b"]).await;
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(broker.db.log_bounds("q", "p").await, Some((0, 0, 0)));
    holder.rollback().await.unwrap();
    starts_at(&broker.db, "p", 1).await;
    let lanes: BTreeSet<String> =
        broker.pop(&Pop::queue("q").partitions(0)).await.messages.into_iter().map(|m| m.partition).collect();
    assert_eq!(lanes, BTreeSet::from(["free".to_owned()]));
}
