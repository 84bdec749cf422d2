//! The retry budget and its end (`spec/ack.md` §5.4).

use serde_json::json;

use super::{GROUP, cursor, done, leased, pop};
use crate::harness::{Pop, TestBroker, on_every_road};

on_every_road!(
    the_default_budget_is_three_redeliveries,
    a_limit_of_zero_exhausts_on_the_first,
    retry_and_dlq_leave_the_budget_alone,
    an_exhausted_message_is_dropped_without_dead_lettering,
    either_flag_keeps_dead_lettering_on,
    one_call_charges_once,
    a_finished_batch_refills_the_budget,
    a_partial_ack_keeps_the_count,
    dead_lettering_refills_the_budget,
    the_budget_belongs_to_one_group_and_partition,
    a_changed_limit_judges_existing_counts,
);

/// Fails the head of the lane once; answers whether that dead-lettered it.
async fn fail_head(broker: &TestBroker) -> bool {
    let popped = pop(broker).await;
    let result = broker.ack_one(GROUP, popped.messages[0].item("failed")).await;
    assert!(result.success && result.lease_released && result.error.is_none(), "{result:?}");
    result.dlq
}

async fn the_default_budget_is_three_redeliveries(broker: &TestBroker) {
    broker.push_ids("q", "p", ["poison", "next"]).await;
    for count in 1..=3 {
        assert!(!fail_head(broker).await);
        let now = cursor(broker).await;
        assert_eq!((now.committed, now.batch_retry_count, now.leased), (-1, count, false));
    }
    assert!(fail_head(broker).await, "the fourth finds it exhausted");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count, now.leased), (0, 0, false));
    assert_eq!(broker.db.dead_letters().await.len(), 1);
    assert_eq!(pop(broker).await.ids(), ["next"]);
}

async fn a_limit_of_zero_exhausts_on_the_first(broker: &TestBroker) {
    broker.configure("q", json!({ "retryLimit": 0 })).await;
    broker.push_ids("q", "p", ["poison", "next"]).await;
    assert!(fail_head(broker).await);
    assert_eq!(pop(broker).await.ids(), ["next"]);
}

async fn retry_and_dlq_leave_the_budget_alone(broker: &TestBroker) {
    leased(broker, 3).await;
    broker.db.expire_leases().await;
    assert!(!fail_head(broker).await);
    for _ in 0..5 {
        let popped = pop(broker).await;
        assert!(done(&broker.ack_one(GROUP, popped.messages[0].item("retry")).await, true));
        assert_eq!(cursor(broker).await.batch_retry_count, 1, "untouched");
    }
    assert!(broker.db.dead_letters().await.is_empty());
}

async fn an_exhausted_message_is_dropped_without_dead_lettering(broker: &TestBroker) {
    broker.configure("q", json!({ "retryLimit": 1, "deadLetterQueue": false, "dlqAfterMaxRetries": false })).await;
    broker.push_ids("q", "p", ["poison", "next"]).await;
    assert!(!fail_head(broker).await);
    assert!(!fail_head(broker).await, "dropped, not dead-lettered");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count, now.leased), (0, 0, false));
    assert!(broker.db.dead_letters().await.is_empty());
    let popped = pop(broker).await;
    assert_eq!(popped.ids(), ["next"]);
    let result = broker.ack_one(GROUP, popped.messages[0].item("dlq")).await;
    assert!(result.success && result.dlq, "an explicit dlq is filed all the same: {result:?}");
    assert_eq!(broker.db.dead_letters().await.len(), 1);
}

async fn either_flag_keeps_dead_lettering_on(broker: &TestBroker) {
    for (n, (first, second)) in [(true, false), (false, true)].into_iter().enumerate() {
        let queue = format!("q{n}");
        let options = json!({ "retryLimit": 0, "deadLetterQueue": first, "dlqAfterMaxRetries": second });
        broker.configure(&queue, options).await;
        broker.push_ids(&queue, "p", ["poison"]).await;
        let popped = broker.pop(&Pop::queue(&queue).group(GROUP).all()).await;
        let result = broker.ack_one(GROUP, popped.messages[0].item("failed")).await;
        assert!(result.success && result.dlq, "{result:?}");
    }
    assert_eq!(broker.db.dead_letters().await.len(), 2);
}

async fn one_call_charges_once(broker: &TestBroker) {
    let popped = leased(broker, 5).await;
    assert!(broker.ack(GROUP, popped.items("failed")).await.iter().all(|r| done(r, true)));
    assert_eq!(cursor(broker).await.batch_retry_count, 1);
    for _ in 0..2 {
        let popped = pop(broker).await;
        broker.ack(GROUP, popped.items("failed")).await;
    }
    let popped = pop(broker).await;
    let results = broker.ack(GROUP, popped.items("failed")).await;
    assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");
    assert_eq!(results.iter().map(|r| r.dlq).collect::<Vec<_>>(), [true, false, false, false, false]);
    assert_eq!(cursor(broker).await.committed, 0);
    assert_eq!(pop(broker).await.ids(), ["m1", "m2", "m3", "m4"]);
}

async fn a_finished_batch_refills_the_budget(broker: &TestBroker) {
    broker.push_ids("q", "p", ["m0", "m1"]).await;
    assert!(!fail_head(broker).await);
    assert!(!fail_head(broker).await);
    let popped = pop(broker).await;
    assert!(broker.ack(GROUP, popped.items("completed")).await.iter().all(|r| done(r, true)));
    assert_eq!(cursor(broker).await.batch_retry_count, 0);
    broker.push_ids("q", "p", ["m2"]).await;
    for _ in 0..3 {
        assert!(!fail_head(broker).await, "three more");
    }
    assert!(fail_head(broker).await);
}

/// §5.4: reset when a batch completes, not when part of it does.
async fn a_partial_ack_keeps_the_count(broker: &TestBroker) {
    broker.push_ids("q", "p", ["m0", "m1", "m2"]).await;
    assert!(!fail_head(broker).await);
    let popped = pop(broker).await;
    assert!(done(&broker.ack_one(GROUP, popped.messages[0].item("completed")).await, false));
    assert_eq!(cursor(broker).await.batch_retry_count, 1);
    assert!(done(&broker.ack_one(GROUP, popped.messages[1].item("failed")).await, true));
    assert_eq!(cursor(broker).await.batch_retry_count, 2);
}

async fn dead_lettering_refills_the_budget(broker: &TestBroker) {
    broker.push_ids("q", "p", ["m0", "m1"]).await;
    assert!(!fail_head(broker).await);
    assert!(!fail_head(broker).await);
    let popped = pop(broker).await;
    let result = broker.ack_one(GROUP, popped.messages[0].item("dlq")).await;
    assert!(result.dlq, "{result:?}");
    assert_eq!(cursor(broker).await.batch_retry_count, 0);
    for _ in 0..3 {
        assert!(!fail_head(broker).await);
    }
    assert!(fail_head(broker).await);
}

async fn the_budget_belongs_to_one_group_and_partition(broker: &TestBroker) {
    broker.push_ids("q", "p", ["m"]).await;
    broker.push_ids("q", "other", ["m"]).await;
    assert!(!fail_head(broker).await);
    for (partition, group) in [("other", GROUP), ("p", "h")] {
        let popped = broker.pop(&Pop::partition("q", partition).group(group).all()).await;
        broker.ack(group, popped.items("retry")).await;
        assert_eq!(broker.db.cursor("q", partition, group).await.batch_retry_count, 0);
    }
    assert_eq!(cursor(broker).await.batch_retry_count, 1);
}

/// `push-pop.md` §5.4: existing counters are not reset by a change.
async fn a_changed_limit_judges_existing_counts(broker: &TestBroker) {
    broker.push_ids("q", "p", ["m"]).await;
    assert!(!fail_head(broker).await);
    assert!(!fail_head(broker).await);
    broker.configure("q", json!({ "retryLimit": 1 })).await;
    assert!(fail_head(broker).await, "two charged, one allowed");
}
