//! `retryDelay`: a charged failure comes back after it (`spec/ack.md` §5, README ruling 1).

use std::time::Instant;

use serde_json::json;

use super::{GROUP, cursor, done, pop};
use crate::harness::{PATIENCE, Pop, TestBroker, assert_left, eventually, on_every_road};

on_every_road!(
    a_charged_failure_waits,
    retry_dlq_and_expiry_do_not_wait,
    the_default_is_at_once,
    a_dropped_message_holds_nothing_back,
    other_groups_and_partitions_do_not_wait,
);

/// Pushes two messages to a queue whose failures wait for a minute.
async fn lane(broker: &TestBroker) {
    broker.configure("q", json!({ "retryDelay": 60_000 })).await;
    broker.push_ids("q", "p", ["m0", "m1"]).await;
}

async fn a_charged_failure_waits(broker: &TestBroker) {
    lane(broker).await;
    let popped = pop(broker).await;
    let items = vec![popped.messages[0].item("completed"), popped.messages[1].item("failed")];
    let asked = Instant::now();
    assert!(broker.ack(GROUP, items).await.iter().all(|r| done(r, true)));
    assert_left(cursor(broker).await.held_for.unwrap(), 60.0, asked);
    for route in [Pop::queue("q"), Pop::partition("q", "p")] {
        assert!(broker.pop(&route.clone().group(GROUP)).await.is_empty());
        assert!(broker.pop(&route.group(GROUP).auto_ack()).await.is_empty());
    }
    broker.db.execute("UPDATE queen.log_consumers SET not_before = now() - interval '1 second'").await;
    let again = pop(broker).await;
    assert_eq!(again.ids(), ["m1"]);
    assert!(done(&broker.ack_one(GROUP, again.messages[0].item("completed")).await, true));
    broker.push_ids("q", "p", ["m2"]).await;
    assert_eq!(pop(broker).await.ids(), ["m2"], "a completed batch clears it");
}

async fn retry_dlq_and_expiry_do_not_wait(broker: &TestBroker) {
    lane(broker).await;
    let popped = pop(broker).await;
    broker.ack_one(GROUP, popped.messages[0].item("retry")).await;
    let popped = pop(broker).await;
    assert_eq!(popped.ids(), ["m0", "m1"]);
    broker.db.expire_leases().await;
    let popped = pop(broker).await;
    assert_eq!(popped.ids(), ["m0", "m1"]);
    broker.ack_one(GROUP, popped.messages[0].item("dlq")).await;
    assert_eq!(pop(broker).await.ids(), ["m1"]);
}

async fn the_default_is_at_once(broker: &TestBroker) {
    for options in [json!({}), json!({ "retryDelay": 0 }), json!({ "retryDelay": -5 })] {
        broker.configure("q", options).await;
        broker.push_ids("q", "p", [uuid::Uuid::new_v4().to_string()]).await;
        let popped = pop(broker).await;
        broker.ack(GROUP, popped.items("failed")).await;
        let again = pop(broker).await;
        assert_eq!(again.ids(), popped.ids());
        broker.ack(GROUP, again.items("completed")).await;
    }
}

/// Only a failure that is redelivered waits: an exhausted one is out of the way, and the lane goes on.
async fn a_dropped_message_holds_nothing_back(broker: &TestBroker) {
    broker.configure("q", json!({ "retryDelay": 60_000, "retryLimit": 0 })).await;
    broker.push_ids("q", "p", ["m0", "m1"]).await;
    let popped = pop(broker).await;
    assert!(broker.ack_one(GROUP, popped.messages[0].item("failed")).await.dlq);
    assert_eq!(pop(broker).await.ids(), ["m1"]);
}

async fn other_groups_and_partitions_do_not_wait(broker: &TestBroker) {
    lane(broker).await;
    broker.push_ids("q", "other", ["o"]).await;
    let popped = pop(broker).await;
    broker.ack(GROUP, popped.items("failed")).await;
    assert_eq!(broker.pop(&Pop::partition("q", "p").group("h").all()).await.ids(), ["m0", "m1"]);
    eventually(PATIENCE, async || broker.pop(&Pop::queue("q").group(GROUP).all()).await.ids() == ["o"]).await;
}
