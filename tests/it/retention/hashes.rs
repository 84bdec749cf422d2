//! The sidecar purge (`spec/admin.md` §8.2) and what must stay exact under it (I9).

use serde_json::{Value, json};

use super::{pass, starts_at};
use crate::harness::{PATIENCE, Road, TestBroker, eventually, numbered};

async fn purged_to(broker: &TestBroker, offset: i64) {
    eventually(PATIENCE, async || broker.db.log_bounds("q", "p").await.is_some_and(|(_, hashes, _)| hashes == offset))
        .await;
}

async fn verdict(broker: &TestBroker, id: &str) -> (String, Option<i64>) {
    let item: Value = json!([{ "queue": "q", "partition": "p", "transactionId": id, "payload": 0 }]);
    let result = broker.push(item).await.remove(0);
    (result.status, result.offset)
}

/// Every queue, with or without retention: the longest of the two windows and 900 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hashes_go_after_the_longest_of_their_windows() {
    for (options, window) in [
        (json!({ "dedupWindowSeconds": 10 }), 900),
        (json!({ "dedupWindowSeconds": 2000 }), 2000),
        (json!({ "dedupWindowSeconds": 10, "completedRetentionSeconds": 1500 }), 1500),
    ] {
        let broker = TestBroker::sweeping(Road::Fused).await;
        broker.configure("q", options.clone()).await;
        broker.push_ids("q", "p", numbered("a", 0..3)).await;
        pass(&broker, window - 30).await;
        assert_eq!(broker.db.log_bounds("q", "p").await, Some((0, 0, 2)), "{options}");
        broker.push_ids("q", "p", ["b"]).await;
        pass(&broker, 60).await;
        purged_to(&broker, 3).await;
        let rows: Vec<i64> =
            sqlx::query_scalar("SELECT base_offset FROM queen.log_txns").fetch_all(&broker.db.pool).await.unwrap();
        assert_eq!(rows, [3], "{options}");
        assert_eq!(broker.db.log_bounds("q", "p").await, Some((0, 3, 3)), "segments stay");
    }
}

/// I9: the memory of a broker never finds what was purged, and never forgets what was not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deduplication_stays_exact_while_hashes_go() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "dedupWindowSeconds": 900 })).await;
    broker.push_ids("q", "p", ["old"]).await;
    pass(&broker, 600).await;
    broker.push_ids("q", "p", ["young"]).await;
    assert_eq!(verdict(&broker, "old").await, ("duplicate".into(), Some(0)));
    pass(&broker, 310).await;
    purged_to(&broker, 1).await;
    assert_eq!(verdict(&broker, "young").await, ("duplicate".into(), Some(1)));
    assert_eq!(verdict(&broker, "old").await, ("queued".into(), Some(2)));
    assert_eq!(verdict(&broker, "old").await, ("duplicate".into(), Some(2)));
    let broker = broker.restart().await;
    assert_eq!(verdict(&broker, "young").await, ("duplicate".into(), Some(1)));
    assert_eq!(verdict(&broker, "old").await, ("duplicate".into(), Some(2)));
}

/// A hash newer than its message is harmless: the duplicate carries the zero id and the offset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_of_a_deleted_message_carries_the_zero_id() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    broker.configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 50 })).await;
    broker.push_ids("q", "p", ["t"]).await;
    pass(&broker, 100).await;
    starts_at(&broker.db, "p", 1).await;
    let item = json!([{ "queue": "q", "partition": "p", "transactionId": "t", "payload": 0 }]);
    let again = broker.push(item).await.remove(0);
    assert_eq!((again.status.as_str(), again.offset), ("duplicate", Some(0)));
    assert_eq!(again.message_id, uuid::Uuid::nil().to_string());
    // The partition is empty and its hashes are not: a new push is on the list again.
    broker.push_ids("q", "p", ["u"]).await;
    pass(&broker, 100).await;
    starts_at(&broker.db, "p", 2).await;
}
