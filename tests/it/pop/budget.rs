//! `batch` and `partitions` (`spec/push-pop.md` §7.2, §7.4, §9).

use std::collections::BTreeSet;

use crate::harness::{Pop, TestBroker, numbered};

/// §7.2: the default batch is 200, and `<= 0` counts as absent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_batch_is_200_and_nothing_below_one_counts() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..450)).await;
    let plain = broker.pop(&Pop::queue("q").group("plain").all()).await;
    assert_eq!(plain.ids(), numbered("m", 0..200));
    for (group, batch) in [("zero", 0), ("negative", -5)] {
        let popped = broker.pop(&Pop::queue("q").group(group).all().batch(batch)).await;
        assert_eq!(popped.messages.len(), 200, "batch={batch}");
    }
    assert_eq!(broker.pop(&Pop::queue("q").group("one").all().batch(1)).await.ids(), ["m0"]);
    assert_eq!(broker.pop(&Pop::queue("q").group("more").all().batch(1000)).await.messages.len(), 450);
}

/// §7.2: a claim is filled across segments, and may end inside one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_filled_across_segments_and_may_split_one() {
    let broker = TestBroker::start().await;
    for n in 0..100 {
        broker.push_ids("q", "p", [format!("m{n}")]).await;
    }
    broker.push_ids("q", "p", numbered("m", 100..110)).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("a").all().batch(100)).await.ids(), numbered("m", 0..100));
    let pop = Pop::queue("q").group("b").all().batch(7).auto_ack();
    let mut seen = Vec::new();
    loop {
        let popped = broker.pop(&pop).await;
        if popped.is_empty() {
            break;
        }
        assert!(popped.messages.len() == 7 || seen.len() + popped.messages.len() == 110);
        seen.extend(popped.ids().into_iter().map(str::to_owned));
    }
    assert_eq!(seen, numbered("m", 0..110));
}

/// §7.2, §7.4: without `partitions` exactly one partition is drained, however large the batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_partition_is_claimed_by_default() {
    let broker = TestBroker::start().await;
    for n in 0..5 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..10)).await;
    }
    for pop in [Pop::queue("q").batch(500), Pop::queue("q").group("g").all().batch(500)] {
        let popped = broker.pop(&pop).await;
        assert_eq!((popped.partitions_claimed, popped.messages.len()), (1, 10));
    }
    assert_eq!(broker.db.live_leases().await, 2);
}

/// §7.4: the budget is spent partition by partition; untouched partitions are neither claimed nor leased.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_batch_caps_the_whole_claim() {
    let broker = TestBroker::start().await;
    for n in 0..5 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..100)).await;
    }
    let popped = broker.pop(&Pop::queue("q").batch(10).partitions(5)).await;
    assert_eq!((popped.partitions_claimed, popped.messages.len()), (1, 10));
    assert_eq!(broker.db.live_leases().await, 1);
    let popped = broker.pop(&Pop::queue("q").batch(250).partitions(5)).await;
    assert_eq!((popped.partitions_claimed, popped.messages.len()), (3, 250));
    assert_eq!(broker.db.live_leases().await, 4);
}

/// §7.4: several partitions in one call, under one lease id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_partition_pop_drains_as_many_as_it_may() {
    let broker = TestBroker::start().await;
    for n in 0..4 {
        broker.push_ids("q", &format!("p{n}"), ["x", "y"]).await;
    }
    let popped = broker.pop(&Pop::queue("q").batch(100).partitions(3)).await;
    assert_eq!((popped.partitions_claimed, popped.messages.len()), (3, 6));
    assert!(popped.messages.iter().all(|m| m.lease_id == popped.lease_id));
    let rest = broker.pop(&Pop::queue("q").batch(100).partitions(3)).await;
    assert_eq!((rest.partitions_claimed, rest.messages.len()), (1, 2));
    let all: BTreeSet<&str> = popped.messages.iter().chain(&rest.messages).map(|m| m.partition.as_str()).collect();
    assert_eq!(all.len(), 4);
}

/// §7.2: `partitions <= 0` is no cap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_below_one_is_no_cap() {
    let broker = TestBroker::start().await;
    for n in 0..30 {
        broker.push_ids("q", &format!("p{n}"), ["x"]).await;
    }
    for (group, cap) in [("zero", 0), ("negative", -1)] {
        let popped = broker.pop(&Pop::queue("q").group(group).all().partitions(cap)).await;
        assert_eq!((popped.partitions_claimed, popped.messages.len()), (30, 30));
    }
}

/// §7.4: a partition that yields nothing does not count against `partitions`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leased_and_empty_partitions_do_not_count() {
    let broker = TestBroker::start().await;
    for n in 0..6 {
        broker.push_ids("q", &format!("p{n}"), ["x"]).await;
    }
    broker.pop(&Pop::partition("q", "p0")).await;
    broker.pop(&Pop::partition("q", "p1").auto_ack()).await;
    let popped = broker.pop(&Pop::queue("q").partitions(4)).await;
    let partitions: BTreeSet<&str> = popped.messages.iter().map(|m| m.partition.as_str()).collect();
    assert_eq!(partitions, BTreeSet::from(["p2", "p3", "p4", "p5"]));
}

/// §9: a batch stops at 10,000 messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_stops_at_ten_thousand() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..6_000)).await;
    broker.push_ids("q", "p", numbered("m", 6_000..10_001)).await;
    let popped = broker.pop(&Pop::queue("q").batch(2_000_000_000)).await;
    assert_eq!(popped.messages.len(), 10_000);
    assert_eq!(broker.db.cursor("q", "p", "__QUEUE_MODE__").await.batch_end, Some(9_999));
}

/// §9: it also stops at 64 MiB of payload, but a message is always delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_stops_at_64_mib_of_payload() {
    let broker = TestBroker::start().await;
    for n in 0..5 {
        let payload = "z".repeat(20 << 20);
        let body = format!(r#"{{"items":[{{"queue":"q","transactionId":"m{n}","payload":"{payload}"}}]}}"#);
        broker.push_body(body).await.expect(201);
    }
    let popped = broker.pop(&Pop::queue("q").auto_ack()).await;
    let first = popped.messages.len();
    assert!(matches!(first, 3 | 4), "with or without the message that crosses the line: {first}");
    assert_eq!(broker.pop(&Pop::queue("q").auto_ack()).await.ids(), numbered("m", first..5));
}
