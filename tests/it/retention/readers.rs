//! What deletion does to readers (`spec/admin.md` §8.4): identical on the three roads of an ack.

use serde_json::json;

use super::{pass, starts_at};
use crate::harness::{PATIENCE, Pop, Road, TestBroker, eventually, numbered};

const ROADS: [Road; 3] = [Road::Fused, Road::RegistryOnly, Road::ResolutionOnly];

/// A queue that evicts after 50 s, with three segments of two messages.
async fn evicting(road: Road) -> TestBroker {
    let broker = TestBroker::sweeping(road).await;
    broker.configure("q", json!({ "maxWaitTimeSeconds": 50, "retryLimit": 0 })).await;
    for chunk in ["a", "b", "c"] {
        broker.push_ids("q", "p", numbered(chunk, 0..2)).await;
    }
    broker
}

/// A cursor below the log start stays; the next pop goes on at the first existing offset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cursor_below_the_log_start_steps_over_the_gap() {
    let broker = evicting(Road::Fused).await;
    broker.pop(&Pop::partition("q", "p").group("g").all().batch(1).auto_ack()).await;
    broker.db.age(60).await;
    broker.push_ids("q", "p", numbered("d", 0..2)).await;
    starts_at(&broker.db, "p", 6).await;
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 0);
    let popped = broker.pop(&Pop::queue("q").group("g").lease(600)).await;
    assert_eq!(popped.ids(), ["d0", "d1"]);
    let acks = broker.ack("g", popped.items("completed")).await;
    assert!(acks.iter().all(|ack| ack.success && ack.lease_released), "{acks:?}");
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 7);
}

/// A group that comes later starts at what is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_group_starts_at_the_first_retained_offset() {
    let broker = evicting(Road::Fused).await;
    broker.db.age(60).await;
    broker.push_ids("q", "p", ["d"]).await;
    starts_at(&broker.db, "p", 6).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("late").all()).await.ids(), ["d"]);
}

/// The lease row outlives its segments, and an ack inside it still commits: on every road.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_inside_a_lease_over_deleted_segments_commits() {
    for road in ROADS {
        let broker = evicting(road).await;
        let popped = broker.pop(&Pop::queue("q").group("g").all().lease(600)).await;
        assert_eq!(popped.messages.len(), 6);
        pass(&broker, 60).await;
        starts_at(&broker.db, "p", 6).await;
        let acks = broker.ack("g", popped.items("completed")).await;
        assert!(acks.iter().all(|ack| ack.success && ack.lease_released), "{road:?}: {acks:?}");
        let cursor = broker.db.cursor("q", "p", "g").await;
        assert_eq!((cursor.committed, cursor.leased), (5, false), "{road:?}");
    }
}

/// The nack that exhausts the budget on a deleted message files nothing and says so; the next pop steps over the gap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_letter_of_a_deleted_message_is_rejected() {
    for road in ROADS {
        let broker = evicting(road).await;
        let popped = broker.pop(&Pop::queue("q").group("g").all().lease(600)).await;
        pass(&broker, 60).await;
        starts_at(&broker.db, "p", 6).await;
        let acks = broker.ack("g", vec![popped.messages[0].item("failed")]).await;
        assert!(!acks[0].success && !acks[0].dlq, "{road:?}: {acks:?}");
        assert!(acks[0].error.as_deref().unwrap().starts_with("dlq rejected"), "{road:?}: {acks:?}");
        assert_eq!(broker.db.dead_letters().await, []);
        let cursor = broker.db.cursor("q", "p", "g").await;
        assert_eq!((cursor.committed, cursor.leased, cursor.batch_retry_count), (-1, false, 0), "{road:?}");
        broker.push_ids("q", "p", ["d"]).await;
        assert_eq!(broker.pop(&Pop::queue("q").group("g")).await.ids(), ["d"], "{road:?}");
    }
}

/// Hashes of a leased span that were purged: every road answers `unresolvable`, and the messages redeliver.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_after_its_hashes_were_purged_is_unresolvable_on_every_road() {
    for road in ROADS {
        let broker = TestBroker::sweeping(road).await;
        broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
        broker.push_ids("q", "p", numbered("a", 0..2)).await;
        let popped = broker.pop(&Pop::queue("q").group("g").all().lease(600)).await;
        pass(&broker, 1000).await;
        eventually(PATIENCE, async || broker.db.log_bounds("q", "p").await == Some((0, 2, 1))).await;
        let acks = broker.ack("g", popped.items("completed")).await;
        for ack in &acks {
            assert!(!ack.success, "{road:?}: {acks:?}");
            assert!(ack.error.as_deref().unwrap().starts_with("unresolvable"), "{road:?}: {acks:?}");
        }
        assert_eq!(broker.db.cursor("q", "p", "g").await.committed, -1);
        broker.db.expire_leases().await;
        assert_eq!(broker.pop(&Pop::partition("q", "p").group("g")).await.ids(), ["a0", "a1"]);
    }
}

/// An emptied partition leaves the ready index: a pop finds nothing, the cursor is sealed, and the next push is delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_evicted_partition_does_not_spin_and_wakes_for_the_next_push() {
    let broker = evicting(Road::Fused).await;
    // The group has met the partition and leaves everything unread.
    let popped = broker.pop(&Pop::queue("q").group("g").all().batch(1).lease(600)).await;
    broker.ack("g", vec![popped.messages[0].item("retry")]).await;
    pass(&broker, 60).await;
    starts_at(&broker.db, "p", 6).await;
    assert!(broker.pop(&Pop::queue("q").group("g")).await.is_empty());
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 5, "sealed: nothing looks pending");
    let client = broker.clone();
    let parked = tokio::spawn(async move { client.pop(&Pop::queue("q").group("g").wait_ms(20_000)).await });
    broker.push_ids("q", "p", ["d"]).await;
    assert_eq!(parked.await.unwrap().ids(), ["d"]);
}
