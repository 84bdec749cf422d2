//! Groups over very many partitions (design §5): a seek is one statement, listings are bounded and their totals true.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::{GROUP, beginning, delete_group, end, group_path, seek};
use crate::harness::{PATIENCE, Pop, TestBroker, eventually};

const PARTITIONS: i64 = 12_000;

/// A queue with so many partitions of two messages each, made behind the broker's back from one that it made itself.
async fn wide() -> TestBroker {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p00000", ["m0", "m1"]).await;
    for sql in [
        "INSERT INTO queen.log_partitions (queue_id, name, last_offset, last_write_at) \
           SELECT queue_id, 'p' || lpad(n::text, 5, '0'), last_offset, last_write_at \
           FROM queen.log_partitions, generate_series(1, 11999) n",
        "INSERT INTO queen.log_segments SELECT p.id, s.base_offset, s.created_at, s.writer, s.message_count, s.payload_bytes, \
           s.frames FROM queen.log_partitions p, queen.log_segments s WHERE p.name <> 'p00000'",
        "INSERT INTO queen.log_txns SELECT p.id, t.base_offset, t.created_at, t.hashes \
           FROM queen.log_partitions p, queen.log_txns t WHERE p.name <> 'p00000'",
        "ANALYZE",
    ] {
        broker.db.execute(sql).await;
    }
    broker
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_covers_them_all_and_blocks_no_push() {
    let broker = wide().await;
    assert_eq!(seek(&broker, GROUP, "q", end()).await, PARTITIONS);
    assert!(broker.pop(&Pop::queue("q").group(GROUP)).await.is_empty());
    let moving = {
        let client = (*broker).clone();
        tokio::spawn(async move { seek(&client, GROUP, "q", beginning()).await })
    };
    let mut pushed = 0;
    while !moving.is_finished() || pushed < 3 {
        let start = Instant::now();
        broker.push_ids("q", &format!("p0000{}", pushed % 10), [format!("new{pushed}")]).await;
        assert!(start.elapsed() < Duration::from_secs(5), "a push waited for the seek");
        pushed += 1;
    }
    assert_eq!(moving.await.unwrap(), PARTITIONS);
    let mut seen = 0;
    eventually(PATIENCE, async || {
        seen += broker.pop(&Pop::queue("q").group(GROUP).batch(100).partitions(50)).await.messages.len();
        seen >= 100
    })
    .await;
    assert_eq!(delete_group(&broker, GROUP, None, "").await, PARTITIONS);
    assert_eq!(broker.db.deadlocks().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listings_are_bounded_and_their_totals_are_true() {
    let broker = wide().await;
    seek(&broker, GROUP, "q", beginning()).await;
    let all: Vec<Value> = broker.get("/api/v1/consumer-groups").await.expect(200).decode();
    assert_eq!((all[0]["members"].as_i64(), all[0]["totalLag"].as_i64()), (Some(PARTITIONS), Some(2 * PARTITIONS)));
    assert_eq!(all[0]["partitionsWithLag"].as_i64(), Some(PARTITIONS));
    let lagging: Vec<Value> = broker.get("/api/v1/consumer-groups/lagging?minLagSeconds=0").await.expect(200).decode();
    assert_eq!(lagging.len(), 10_000);
    let detail = broker.get(&group_path(GROUP)).await.expect(200).json();
    let partitions = detail["q"]["partitions"].as_array().unwrap();
    assert_eq!((partitions.len(), &detail["q"]["truncated"]), (10_000, &Value::Bool(true)));
    assert_eq!((&partitions[0]["partition"], &partitions[9_999]["partition"]), (&"p00000".into(), &"p09999".into()));
    // While it is quick nothing of this is kept: what any broker does is seen.
    seek(&broker, GROUP, "q", end()).await;
    eventually(PATIENCE, async || {
        let all: Vec<Value> = broker.get("/api/v1/consumer-groups").await.expect(200).decode();
        all[0]["totalLag"] == 0
    })
    .await;
}
