//! `GET /api/v1/pop` by namespace and task (`spec/push-pop.md` §7.1, §7.4, §7.10).

use std::collections::BTreeSet;

use serde_json::json;

use crate::harness::{PATIENCE, Pop, TestBroker, eventually};

fn by(namespace: &str, task: &str) -> Pop {
    Pop::discover().set("namespace", namespace).set("task", task).all().partitions(0)
}

/// Labels match exactly; with both, both must match.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_match_exactly() {
    let broker = TestBroker::start().await;
    for queue in ["orders.created", "orders.paid", "bills.created", "ordersx.created", "plain"] {
        broker.push_ids(queue, "p", [queue]).await;
    }
    for (namespace, task, expected) in [
        ("orders", "", vec!["orders.created", "orders.paid"]),
        ("", "created", vec!["bills.created", "orders.created", "ordersx.created"]),
        ("orders", "created", vec!["orders.created"]),
        ("plain", "", vec!["plain"]),
        ("Orders", "", vec![]),
        ("orders", "missing", vec![]),
    ] {
        let group = format!("{namespace}/{task}");
        let popped = broker.pop(&by(namespace, task).group(&group)).await;
        let seen: BTreeSet<&str> = popped.ids().into_iter().collect();
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), expected, "{group}");
        if !popped.is_empty() {
            assert_eq!(popped.queue, "", "the queue of a discovery answer is empty");
            assert!(popped.messages.iter().all(|m| m.lease_id == popped.lease_id), "one lease across queues");
            assert_eq!(popped.partitions_claimed, expected.len() as i64);
        }
    }
}

/// §4, §5.2: labels come from configure, and a full replace wipes derived ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configured_labels_rule() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "namespace": "billing", "task": "invoice" })).await;
    broker.push_ids("q", "p", ["m"]).await;
    assert_eq!(broker.pop(&by("billing", "invoice").group("a")).await.ids(), ["m"]);
    broker.push_ids("derived.label", "p", ["d"]).await;
    broker.configure("derived.label", json!({})).await;
    assert!(broker.pop(&by("derived", "").group("b")).await.is_empty());
    broker.configure("dotted.name", json!({})).await;
    broker.push_ids("dotted.name", "p", ["x"]).await;
    assert!(broker.pop(&by("dotted", "").group("c")).await.is_empty(), "nothing is derived after creation");
}

/// §7.10: a discovery pop registers the group on each matched queue at that queue's first contact.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discovery_registers_the_group_on_each_queue() {
    let broker = TestBroker::start().await;
    broker.push_ids("ns.a", "p", ["old"]).await;
    let pop = Pop::discover().set("namespace", "ns").group("g").partitions(0).auto_ack();
    assert!(broker.pop(&pop).await.is_empty(), "new by default");
    broker.push_ids("ns.a", "p", ["fresh"]).await;
    assert_eq!(broker.pop(&pop).await.ids(), ["fresh"]);
    assert!(broker.pop(&Pop::queue("ns.a").group("g").all()).await.is_empty(), "registered as new");
    broker.push_ids("ns.b", "p", ["born before the next contact"]).await;
    let popped = broker.pop(&pop).await;
    assert!(popped.is_empty(), "first contact with ns.b happens now, in new mode: {popped:?}");
    broker.push_ids("ns.b", "p", ["after it"]).await;
    eventually(PATIENCE, async || broker.pop(&pop).await.ids() == ["after it"]).await;
}

/// §7.2: budget and cap hold across queues.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn budget_and_cap_hold_across_queues() {
    let broker = TestBroker::start().await;
    for queue in ["ns.a", "ns.b", "ns.c"] {
        for partition in ["x", "y"] {
            broker.push_ids(queue, partition, ["1", "2"]).await;
        }
    }
    let one = broker.pop(&Pop::discover().set("namespace", "ns").group("one").all()).await;
    assert_eq!((one.partitions_claimed, one.messages.len()), (1, 2));
    let capped = broker.pop(&Pop::discover().set("namespace", "ns").group("four").all().partitions(4)).await;
    assert_eq!((capped.partitions_claimed, capped.messages.len()), (4, 8));
    let budget = broker.pop(&Pop::discover().set("namespace", "ns").group("five").all().partitions(0).batch(5)).await;
    assert_eq!((budget.partitions_claimed, budget.messages.len()), (3, 5));
}

/// §14 no. 22: labels on a queue route are ignored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn labels_on_a_queue_route_are_ignored() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let popped = broker.pop(&Pop::queue("q").set("namespace", "other").set("task", "other")).await;
    assert_eq!(popped.ids(), ["m"]);
}

/// Discovery in queue mode, acked by partition id alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_discovery_pop_is_acked_by_partition_id() {
    let broker = TestBroker::start().await;
    for queue in ["ns.a", "ns.b"] {
        broker.push_ids(queue, "p", [queue]).await;
    }
    let popped = broker.pop(&Pop::discover().set("namespace", "ns").partitions(0)).await;
    assert_eq!(popped.messages.len(), 2);
    let acks = broker.ack("", popped.items("completed")).await;
    assert!(acks.iter().all(|r| r.success && r.lease_released), "{acks:?}");
    assert!(broker.pop(&Pop::discover().set("namespace", "ns").partitions(0)).await.is_empty());
}
