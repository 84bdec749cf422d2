//! Every pattern that clients use (`spec/ack.md` §8), under load and on every road.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::{GROUP, PASSED, STALE, cursor, done, leased, pop, refused};
use crate::harness::{AckResult, Pop, TestBroker, numbered, on_every_road};

on_every_road!(
    every_message_in_order_one_call_each,
    one_batch_call_with_mixed_statuses,
    only_the_last_message_of_a_batch,
    acking_twice,
    two_partitions_of_one_lease_in_one_call,
    after_a_seek,
    from_two_groups,
    ten_thousand_items_in_one_call,
    items_of_several_leases_interleaved,
    concurrent_acks_of_one_lease,
    concurrent_partial_acks_of_one_lease,
    many_lanes_acked_at_once,
    the_answer_comes_after_the_commit,
);

async fn every_message_in_order_one_call_each(broker: &TestBroker) {
    let popped = leased(broker, 10).await;
    for (n, message) in popped.messages.iter().enumerate() {
        let result = broker.ack_one(GROUP, message.item("completed")).await;
        assert!(done(&result, n == 9), "{result:?}");
        assert_eq!(cursor(broker).await.committed, n as i64);
    }
    assert!(pop(broker).await.is_empty());
}

async fn one_batch_call_with_mixed_statuses(broker: &TestBroker) {
    let popped = leased(broker, 6).await;
    let statuses = ["completed", "completed", "completed", "failed", "completed", "dlq"];
    let items = popped.messages.iter().zip(statuses).map(|(m, status)| m.item(status)).collect();
    let results = broker.ack(GROUP, items).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count), (2, 1));
    assert!(broker.db.dead_letters().await.is_empty(), "nothing commits past the lowest signal");
    assert_eq!(pop(broker).await.ids(), ["m3", "m4", "m5"]);
}

async fn only_the_last_message_of_a_batch(broker: &TestBroker) {
    for round in 0..3 {
        broker.push_ids("q", "p", numbered(&format!("r{round}-"), 0..20)).await;
        let popped = pop(broker).await;
        let result = broker.ack_one(GROUP, popped.messages[19].item("completed")).await;
        assert!(done(&result, true), "{result:?}");
        assert_eq!(cursor(broker).await.committed, round * 20 + 19);
    }
}

async fn acking_twice(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    assert!(broker.ack(GROUP, popped.items("completed")).await.iter().all(|r| done(r, true)));
    let with_lease = broker.ack(GROUP, popped.items("completed")).await;
    assert!(with_lease.iter().all(|r| refused(r, STALE)), "{with_lease:?}");
    let without = broker.ack(GROUP, popped.messages.iter().map(|m| m.leaseless("completed")).collect()).await;
    assert!(without.iter().all(|r| r.success && r.noop && !r.lease_released), "{without:?}");
    let nacked = broker.ack(GROUP, popped.messages.iter().map(|m| m.leaseless("failed")).collect()).await;
    assert!(nacked.iter().all(|r| refused(r, PASSED)), "{nacked:?}");
    assert_eq!(cursor(broker).await.committed, 2);
}

async fn two_partitions_of_one_lease_in_one_call(broker: &TestBroker) {
    for partition in ["p1", "p2", "p3"] {
        broker.push_ids("q", partition, ["same", "ids"]).await;
    }
    let popped = broker.pop(&Pop::queue("q").group(GROUP).all().partitions(3)).await;
    assert_eq!(popped.messages.len(), 6);
    let items = popped.messages.iter().map(|m| m.item(if m.partition == "p2" { "retry" } else { "completed" }));
    let results = broker.ack(GROUP, items.collect()).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    for (partition, committed) in [("p1", 1), ("p2", -1), ("p3", 1)] {
        let now = broker.db.cursor("q", partition, GROUP).await;
        assert_eq!((now.committed, now.leased), (committed, false), "{partition}");
    }
    assert_eq!(broker.pop(&Pop::queue("q").group(GROUP).partitions(0)).await.ids(), ["same", "ids"]);
}

/// I13: a seek releases the lease, so its id is stale; the same message popped again is acked anew.
async fn after_a_seek(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    broker.ack(GROUP, vec![popped.messages[1].item("completed")]).await;
    broker.db.seek(-1).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| refused(r, STALE)), "{results:?}");
    assert_eq!(cursor(broker).await.committed, -1);
    let again = pop(broker).await;
    assert_eq!(again.ids(), numbered("m", 0..4));
    assert!(broker.ack(GROUP, again.items("completed")).await.iter().all(|r| done(r, true)));
    broker.db.seek(0).await;
    let leaseless = broker.ack_one(GROUP, again.messages[2].leaseless("completed")).await;
    assert!(leaseless.success && !leaseless.noop, "above the cursor again: {leaseless:?}");
    assert_eq!(cursor(broker).await.committed, 2);
}

async fn from_two_groups(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("m", 0..5)).await;
    let pops = ["g", "h"].map(|group| Pop::partition("q", "p").group(group).all());
    let (g, h) = (broker.pop(&pops[0]).await, broker.pop(&pops[1]).await);
    let acks = join_all([broker.ack("g", g.items("completed")), broker.ack("h", h.items("completed"))]).await;
    assert!(acks.iter().flatten().all(|r| done(r, true)), "{acks:?}");
    for group in ["g", "h"] {
        assert_eq!(broker.db.cursor("q", "p", group).await.committed, 4);
    }
}

async fn ten_thousand_items_in_one_call(broker: &TestBroker) {
    let popped = leased(broker, 10_000).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert_eq!(results.len(), 10_000);
    assert!(results.iter().enumerate().all(|(n, r)| r.index == n as i64 && done(r, true)));
    assert_eq!(cursor(broker).await.committed, 9_999);
    broker.db.seek(-1).await;
    let popped = pop(broker).await;
    let mut items = popped.items("completed");
    items[7_000] = popped.messages[7_000].item("retry");
    items.reverse();
    assert!(broker.ack(GROUP, items).await.iter().all(|r| done(r, true)));
    assert_eq!(cursor(broker).await.committed, 6_999);
}

async fn items_of_several_leases_interleaved(broker: &TestBroker) {
    for n in 0..5 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..4)).await;
    }
    let mut items: Vec<Value> = Vec::new();
    let mut popped = Vec::new();
    for _ in 0..5 {
        popped.push(broker.pop(&Pop::queue("q").group(GROUP).all()).await);
    }
    let leases: BTreeSet<&str> = popped.iter().map(|p| p.lease_id.as_str()).collect();
    assert_eq!(leases.len(), 5);
    for n in 0..4 {
        items.extend(popped.iter().map(|p| p.messages[n].item("completed")));
    }
    let results = broker.ack(GROUP, items.clone()).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    let sent: Vec<&str> = items.iter().map(|item| item["transactionId"].as_str().unwrap()).collect();
    assert_eq!(results.iter().map(|r| r.transaction_id.as_str()).collect::<Vec<_>>(), sent, "request order");
    for n in 0..5 {
        assert_eq!(broker.db.cursor("q", &format!("p{n}"), GROUP).await.committed, 3);
    }
}

/// Two connections ack one lease at once: one call ends it, the other finds it released.
async fn concurrent_acks_of_one_lease(broker: &TestBroker) {
    for round in 0..10 {
        broker.push_ids("q", "p", numbered(&format!("r{round}-"), 0..5)).await;
        let popped = pop(broker).await;
        let calls = (0..4).map(|_| broker.ack(GROUP, popped.items("completed")));
        let answers: Vec<Vec<AckResult>> = join_all(calls).await;
        let ended = answers.iter().filter(|results| results.iter().all(|r| done(r, true))).count();
        let stale = answers.iter().filter(|results| results.iter().all(|r| refused(r, STALE))).count();
        assert_eq!((ended, stale), (1, 3), "{answers:?}");
        assert_eq!(cursor(broker).await.committed, round * 5 + 4);
    }
}

/// Each message acked by its own connection, all at once: whatever the order, the batch ends finished or leased, no
/// answer lies, and nothing acknowledged comes back.
async fn concurrent_partial_acks_of_one_lease(broker: &TestBroker) {
    let popped = leased(broker, 20).await;
    let calls = popped.messages.iter().map(|m| broker.ack_one(GROUP, m.item("completed")));
    let results = join_all(calls).await;
    for result in &results {
        let late = refused(result, STALE);
        assert!(result.success || late, "{result:?}");
    }
    assert!(results[19].success && results[19].lease_released, "the last message ends it: {results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased), (19, false));
}

/// Many lanes at once: every ack lands on its own cursor.
async fn many_lanes_acked_at_once(broker: &TestBroker) {
    let items: Vec<Value> = (0..120)
        .map(|n| json!({ "queue": "q", "partition": format!("p{}", n % 40), "transactionId": format!("m{n}"), "payload": n }))
        .collect();
    broker.push(json!(items)).await;
    let popped = join_all((0..40).map(|n| {
        let pop = Pop::partition("q", &format!("p{n}")).group(GROUP).all();
        async move { broker.pop(&pop).await }
    }))
    .await;
    let results = join_all(popped.iter().map(|p| broker.ack(GROUP, p.items("completed")))).await;
    assert!(results.iter().flatten().all(|r| done(r, true)), "{results:?}");
    for n in 0..40 {
        let now = broker.db.cursor("q", &format!("p{n}"), GROUP).await;
        assert_eq!((now.committed, now.leased), (2, false));
    }
    assert!(broker.pop(&Pop::queue("q").group(GROUP).partitions(0)).await.is_empty());
}

/// I3: `success` is answered after the commit: another session sees it at once.
async fn the_answer_comes_after_the_commit(broker: &TestBroker) {
    for round in 0..30 {
        broker.push_ids("q", "p", [format!("m{round}")]).await;
        let popped = pop(broker).await;
        assert!(done(&broker.ack(GROUP, popped.items("completed")).await[0], true));
        let now = cursor(broker).await;
        assert_eq!((now.committed, now.leased), (round, false));
    }
}
