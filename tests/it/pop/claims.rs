//! Claiming: leases, exclusivity, `autoAck` (I2, I11, `spec/push-pop.md` §7.5, §7.6, §7.8).

use std::collections::BTreeSet;
use std::time::Instant;

use futures_util::future::join_all;
use serde_json::json;

use crate::harness::{Pop, TestBroker, assert_left, numbered};

const QUEUE_MODE: &str = "__QUEUE_MODE__";

/// §7.6: a lease is written, the cursor does not move.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_spans_what_was_delivered_and_moves_no_cursor() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..10)).await;
    let popped = broker.pop(&Pop::queue("q").batch(4)).await;
    let cursor = broker.db.cursor("q", "p", QUEUE_MODE).await;
    assert_eq!((cursor.committed, cursor.batch_end, cursor.leased), (-1, Some(3), true));
    assert_eq!(cursor.worker, Some(popped.lease_id));
    assert_eq!(cursor.batch_retry_count, 0);
}

/// §7.6: lease seconds are the request's, else the queue's, else 60.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lease_seconds_come_from_the_request_then_the_queue() {
    let broker = TestBroker::start().await;
    broker.configure("configured", json!({ "leaseTime": 120 })).await;
    broker.configure("default", json!({})).await;
    broker.configure("nonsense", json!({ "leaseTime": -7 })).await;
    let cases = [
        ("implicit", 0, 60.0),
        ("implicit", 17, 17.0),
        ("implicit", -4, 60.0),
        ("configured", 0, 120.0),
        ("configured", 5, 5.0),
        ("default", 0, 300.0),
        ("nonsense", 0, 60.0),
    ];
    for (n, (queue, sent, expected)) in cases.into_iter().enumerate() {
        let partition = format!("p{n}");
        broker.push_ids(queue, &partition, ["m"]).await;
        let asked = Instant::now();
        broker.pop(&Pop::partition(queue, &partition).lease(sent)).await;
        println!("{queue} leaseSeconds={sent}");
        assert_left(broker.db.cursor(queue, &partition, QUEUE_MODE).await.lease_left.unwrap(), expected, asked);
    }
}

/// §14 no. 14: no upper bound, but the arithmetic is guarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_huge_lease_is_capped_not_an_error() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let popped = broker.pop(&Pop::queue("q").lease(i64::from(i32::MAX))).await;
    assert_eq!(popped.ids(), ["m"]);
    let left = broker.db.cursor("q", "p", QUEUE_MODE).await.lease_left.unwrap();
    let ten_years = 10.0 * 366.0 * 86_400.0;
    assert!(left > 86_400.0 && left <= ten_years, "{left}");
}

/// I2, §7.5: a leased partition yields nothing to its group, at once, whoever asks and by whatever route.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_partition_is_closed_to_its_group_and_open_to_others() {
    let broker = TestBroker::start().await;
    broker.push_ids("ns.q", "p", numbered("m", 0..4)).await;
    assert_eq!(broker.pop(&Pop::queue("ns.q").group("g").all().batch(2)).await.ids(), ["m0", "m1"]);
    for pop in [Pop::queue("ns.q"), Pop::partition("ns.q", "p"), Pop::discover().set("namespace", "ns")] {
        assert!(broker.pop(&pop.clone().group("g").all()).await.is_empty());
        assert!(broker.pop(&pop.group("g").auto_ack()).await.is_empty(), "autoAck respects the lease (§10 no. 4)");
    }
    assert_eq!(broker.pop(&Pop::queue("ns.q").group("h").all()).await.ids(), numbered("m", 0..4));
    assert_eq!(broker.pop(&Pop::queue("ns.q")).await.ids(), numbered("m", 0..4), "queue mode is one more group");
    broker.push_ids("ns.q", "other", ["free"]).await;
    assert_eq!(broker.pop(&Pop::queue("ns.q").group("g").all()).await.ids(), ["free"]);
}

/// I2: many workers at once: every partition goes to exactly one of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_pops_claim_every_partition_once() {
    let broker = TestBroker::start().await;
    for n in 0..20 {
        broker.push_ids("q", &format!("p{n}"), ["a", "b"]).await;
    }
    let pops = (0..40).map(|n| {
        let client = broker.clone();
        async move { client.pop(&Pop::queue("q").group("g").all().partitions(1 + n % 3)).await }
    });
    let mut claimed = Vec::new();
    for popped in join_all(pops).await {
        let partitions: BTreeSet<String> = popped.messages.iter().map(|m| m.partition.clone()).collect();
        assert_eq!(popped.messages.len(), 2 * partitions.len(), "whole backlogs");
        claimed.extend(partitions);
    }
    let distinct: BTreeSet<&String> = claimed.iter().collect();
    assert_eq!(distinct.len(), claimed.len(), "no partition twice: {claimed:?}");
    let rest = broker.pop(&Pop::queue("q").group("g").all().partitions(0)).await;
    claimed.extend(rest.messages.iter().step_by(2).map(|m| m.partition.clone()));
    assert_eq!(claimed.len(), 20, "none is overlooked");
}

/// §10 no. 2: what is pushed behind a live lease waits for it, then comes in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_behind_a_lease_is_delivered_after_it_in_order() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["b"]).await;
    let popped = broker.pop(&Pop::queue("q")).await;
    broker.push_ids("q", "p", ["a"]).await;
    assert!(broker.pop(&Pop::queue("q")).await.is_empty());
    assert_eq!(broker.db.cursor("q", "p", QUEUE_MODE).await.batch_end, Some(0), "the lease does not grow");
    broker.ack("", popped.items("completed")).await;
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["a"]);
}

/// I11, §7.8: `autoAck` commits every claimed partition in the transaction that reads, and takes no lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_ack_commits_every_partition_and_nothing_comes_back() {
    let broker = TestBroker::start().await;
    for partition in ["a", "b", "c"] {
        broker.push_ids("q", partition, numbered("m", 0..5)).await;
    }
    let popped = broker.pop(&Pop::queue("q").group("g").all().partitions(3).auto_ack()).await;
    assert_eq!((popped.messages.len(), popped.partitions_claimed), (15, 3));
    for partition in ["a", "b", "c"] {
        let cursor = broker.db.cursor("q", partition, "g").await;
        assert_eq!((cursor.committed, cursor.leased), (4, false));
    }
    assert!(broker.pop(&Pop::queue("q").group("g").partitions(3)).await.is_empty());
    let pop = Pop::queue("q").group("h").all().batch(2).auto_ack();
    assert_eq!(broker.pop(&pop).await.ids(), ["m0", "m1"]);
}

/// §7.5 no. 3, §10 no. 9: a gap that retention left under a group's cursor is stepped over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gap_in_the_log_is_stepped_over() {
    let broker = TestBroker::start().await;
    for n in 0..3 {
        broker.push_ids("q", "p", numbered("m", n * 2..n * 2 + 2)).await;
    }
    let head = broker.pop(&Pop::queue("q").group("g").all().batch(1)).await;
    broker.ack("g", head.items("retry")).await;
    broker.db.execute("DELETE FROM queen.log_segments WHERE base_offset = 0").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 2").await;
    let popped = broker.pop(&Pop::queue("q").group("g")).await;
    assert_eq!(popped.ids(), ["m2", "m3", "m4", "m5"]);
    let cursor = broker.db.cursor("q", "p", "g").await;
    assert_eq!(cursor.batch_end, Some(5));
    assert!(broker.ack("g", popped.items("completed")).await.iter().all(|r| r.success && r.lease_released));
    assert!(broker.pop(&Pop::queue("q").group("g")).await.is_empty());
}

/// §7.5 no. 4: a partition emptied by retention stops looking pending.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_emptied_partition_moves_the_cursor_to_its_end() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("g").all().batch(1).auto_ack()).await.ids(), ["a"]);
    broker.db.execute("DELETE FROM queen.log_segments").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = last_offset + 1").await;
    assert!(broker.pop(&Pop::partition("q", "p").group("g")).await.is_empty());
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 1);
    broker.push_ids("q", "p", ["c"]).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("g")).await.ids(), ["c"]);
}

/// §7.5 no. 4: nothing taken leaves the row untouched.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_pop_leaves_no_lease() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.pop(&Pop::queue("q").auto_ack()).await;
    let before = broker.db.cursor("q", "p", QUEUE_MODE).await;
    for pop in [Pop::queue("q"), Pop::partition("q", "p"), Pop::queue("q").wait_ms(50)] {
        assert!(broker.pop(&pop).await.is_empty());
    }
    assert_eq!(broker.db.cursor("q", "p", QUEUE_MODE).await, before);
    assert_eq!(broker.db.live_leases().await, 0);
}

/// §7.5 no. 1: every group has its own rows: two groups progress apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_groups_progress_independently() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..6)).await;
    let fast = broker.pop(&Pop::queue("q").group("fast").all().batch(4)).await;
    broker.ack("fast", fast.items("completed")).await;
    let slow = broker.pop(&Pop::queue("q").group("slow").all().batch(2)).await;
    assert_eq!(slow.ids(), ["m0", "m1"]);
    broker.ack("slow", slow.items("retry")).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("fast")).await.ids(), ["m4", "m5"]);
    assert_eq!(broker.db.cursor("q", "p", "fast").await.committed, 3);
    assert_eq!(broker.db.cursor("q", "p", "slow").await.committed, -1);
}

/// PostgreSQL is the truth: a lease outlives the broker that granted it, and its ack is accepted afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_survives_a_restart() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    let popped = broker.pop(&Pop::queue("q").group("g").all()).await;
    let broker = broker.restart().await;
    assert!(broker.pop(&Pop::queue("q").group("g").all()).await.is_empty());
    let acks = broker.ack("g", popped.items("completed")).await;
    assert!(acks.iter().all(|r| r.success && r.lease_released), "{acks:?}");
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 1);
}
