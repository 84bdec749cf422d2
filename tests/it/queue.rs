//! `DELETE /api/v1/resources/queues/:queue` (`spec/admin.md` §4.5) and a queue's second life.

use serde_json::json;

use crate::harness::{Pop, TestBroker, on_every_road};

const GROUP: &str = "g";

on_every_road!(an_ack_after_the_delete_resolves_to_nothing, an_old_ack_cannot_touch_the_recreated_queue);

/// §4.5: existed, and then unknown: both 200, with their bodies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delete_says_whether_the_queue_existed() {
    let broker = TestBroker::start().await;
    broker.push_ids("a/b c", "p", ["m"]).await;
    assert_eq!(broker.delete_queue("a/b c").await, json!({ "deleted": true, "queue": "a/b c", "existed": true }));
    for queue in ["a/b c", "never"] {
        assert_eq!(
            broker.delete_queue(queue).await,
            json!({
                "deleted": false, "queue": queue, "existed": false,
                "message": "Queue not found, nothing was deleted",
            })
        );
    }
}

/// §4.5: everything keyed to the queue goes, dead letters included, and nothing of any other queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delete_removes_every_row_of_the_queue_and_no_other() {
    let broker = TestBroker::start().await;
    let empty = broker.db.row_counts().await;
    let fill = async |queue: &str| {
        for partition in ["p", "r"] {
            broker.push_ids(queue, partition, ["m0", "m1"]).await;
        }
        broker.pop(&Pop::queue(queue).group("idle").all()).await;
        let popped = broker.pop(&Pop::queue(queue).group(GROUP).all()).await;
        assert!(broker.ack(GROUP, vec![popped.messages[0].item("dlq")]).await[0].dlq);
    };
    fill("keep").await;
    let one = broker.db.row_counts().await;
    fill("drop").await;
    assert_ne!(broker.db.row_counts().await, one);
    assert_eq!(broker.delete_queue("drop").await["deleted"], true);
    assert_eq!(broker.db.row_counts().await, one);
    assert_eq!(broker.delete_queue("keep").await["deleted"], true);
    assert_eq!(broker.db.row_counts().await, empty);
}

/// §4.5, `push-pop.md` §11: a pop right after finds nothing; a push recreates it with defaults, under a new id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recreated_queue_starts_from_nothing() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "leaseTime": 99, "dedupWindowSeconds": 0 })).await;
    broker.push_ids("q", "p", ["a", "b", "c"]).await;
    let old = broker.pop(&Pop::queue("q").group(GROUP).all().batch(2)).await;
    broker.ack(GROUP, old.items("completed")).await;
    broker.delete_queue("q").await;
    assert!(broker.pop(&Pop::queue("q").group(GROUP).all()).await.is_empty());
    assert!(broker.pop(&Pop::partition("q", "p").group(GROUP).all()).await.is_empty());
    let pushed = broker.push_ids("q", "p", ["a"]).await;
    assert_eq!(pushed[0].offset, Some(0), "offsets start again, and no id is remembered");
    let popped = broker.pop(&Pop::queue("q").group("fresh").all()).await;
    assert_eq!(popped.ids(), ["a"]);
    assert_ne!(popped.partition_id, old.partition_id);
    let left = broker.db.cursor("q", "p", "fresh").await.lease_left.unwrap();
    assert!(left <= 60.0, "column defaults: {left}");
}

/// `push-pop.md` §11: suites delete and reuse one name at once, many times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_can_be_reused_again_and_again() {
    let broker = TestBroker::start().await;
    for round in 0..10 {
        let id = format!("r{round}");
        broker.push_ids("q", "p", ["always", &id]).await;
        let popped = broker.pop(&Pop::queue("q").group(GROUP).all()).await;
        assert_eq!(popped.ids(), ["always", id.as_str()], "round {round}");
        assert_eq!(popped.messages[0].delivery_attempt, 1);
        if round % 2 == 0 {
            assert!(broker.ack(GROUP, popped.items("completed")).await.iter().all(|r| r.success));
        }
        assert_eq!(broker.delete_queue("q").await["deleted"], true);
    }
}

async fn an_ack_after_the_delete_resolves_to_nothing(broker: &TestBroker) {
    broker.push_ids("q", "p", ["a", "b"]).await;
    let popped = broker.pop(&Pop::queue("q").group(GROUP).all()).await;
    broker.delete_queue("q").await;
    let before = broker.db.row_counts().await;
    for status in ["completed", "failed", "retry", "dlq"] {
        for result in broker.ack(GROUP, popped.items(status)).await {
            assert!(!result.success, "{status}: {result:?}");
            assert_eq!(result.error.as_deref(), Some("consumer not found"), "{status}");
        }
    }
    assert_eq!(broker.db.row_counts().await, before);
    assert_eq!(broker.extend(&popped.lease_id, 60).await["success"], false);
}

async fn an_old_ack_cannot_touch_the_recreated_queue(broker: &TestBroker) {
    broker.push_ids("q", "p", ["a", "b"]).await;
    let old = broker.pop(&Pop::queue("q").group(GROUP).all()).await;
    broker.delete_queue("q").await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    let new = broker.pop(&Pop::queue("q").group(GROUP).all()).await;
    assert_eq!(new.ids(), ["a", "b"]);
    for items in [old.items("completed"), old.messages.iter().map(|m| m.leaseless("completed")).collect()] {
        let results = broker.ack(GROUP, items).await;
        assert!(results.iter().all(|r| !r.success), "{results:?}");
    }
    assert_eq!(broker.db.cursor("q", "p", GROUP).await.committed, -1);
    let results = broker.ack(GROUP, new.items("completed")).await;
    assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");
}

/// A push that races a delete is either gone with the old queue or whole in the new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_racing_a_delete_is_never_half_there() {
    let broker = TestBroker::start().await;
    for round in 0..15 {
        broker.push_ids("q", "p", ["old"]).await;
        let push = broker
            .push(json!([{ "queue": "q", "partition": "p", "transactionId": format!("r{round}"), "payload": 1 }]));
        let (result, deleted) = futures_util::future::join(push, broker.delete_queue("q")).await;
        assert_eq!((result[0].status.as_str(), &deleted["deleted"]), ("queued", &true.into()), "{result:?}");
        let popped = broker.pop(&Pop::queue("q").auto_ack()).await;
        let id = format!("r{round}");
        assert!(popped.is_empty() || popped.ids() == [id.as_str()], "{:?}", popped.ids());
        let orphans: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM queen.log_segments s WHERE NOT EXISTS
                (SELECT FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE p.id = s.partition_id)",
        )
        .fetch_one(&broker.db.pool)
        .await
        .unwrap();
        assert_eq!(orphans, 0, "no segment without its partition");
        broker.delete_queue("q").await;
    }
}
