//! Lease fencing (§2.4, §11 Q4 and Q24).

use serde_json::{Value, json};

use super::{GROUP, ack_op, ack_ops, commits, leased, leaseless_op, pop, push_op, rolls_back, sent_commits};
use crate::harness::{PATIENCE, Pop, TestBroker, eventually_some, on_every_road};

on_every_road!(
    a_bundle_without_lease_information_is_not_checked,
    a_hint_alone_admits_its_lease,
    an_expired_lease_rolls_back,
    a_foreign_lease_rolls_back,
    a_released_lease_rolls_back,
    a_hint_does_not_pass_under_the_next_holder,
    a_hint_that_matches_nothing_is_not_checked,
    every_lease_of_a_cursor_must_be_the_live_one,
    an_id_above_the_leased_batch_rolls_back,
    a_rollback_leaves_the_lease_to_its_worker,
    another_broker_acks_what_this_one_leased,
);

fn with_hints(operations: Vec<Value>, hints: Value) -> Value {
    json!({ "operations": operations, "requiredLeases": hints })
}

fn leaseless(popped: &crate::harness::Popped) -> Vec<Value> {
    popped.messages.iter().map(|m| leaseless_op(m, "completed")).collect()
}

async fn a_bundle_without_lease_information_is_not_checked(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b"]).await;
    broker.db.expire_leases().await;
    commits(broker, &[leaseless_op(&popped.messages[0], "completed")]).await;
    assert_eq!(broker.db.cursor("in", "p", GROUP).await.committed, 0);
    // Also while another holds it, and empty strings are no information.
    let again = pop(broker, "in", "p").await;
    let mut op = leaseless_op(&again.messages[0], "completed");
    op["leaseId"] = json!("");
    sent_commits(broker, with_hints(vec![op], json!(["", 3, null]))).await;
    let now = broker.db.cursor("in", "p", GROUP).await;
    assert_eq!((now.committed, now.leased), (1, false));
}

/// JavaScript and Python send leases in `requiredLeases` only.
async fn a_hint_alone_admits_its_lease(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b"]).await;
    let hints = json!([popped.lease_id, popped.lease_id, 7, ""]);
    sent_commits(broker, with_hints(leaseless(&popped), hints)).await;
    let now = broker.db.cursor("in", "p", GROUP).await;
    assert_eq!((now.committed, now.leased), (1, false));
}

/// T8.
async fn an_expired_lease_rolls_back(broker: &TestBroker) {
    let popped = leased(broker, &["a"]).await;
    broker.push_ids("out", "p", ["there"]).await;
    broker.db.expire_leases().await;
    for body in [
        json!({ "operations": [ack_op(&popped.messages[0], "completed"), push_op("out", "p", "b")] }),
        with_hints(
            vec![leaseless_op(&popped.messages[0], "completed"), push_op("out", "p", "b")],
            json!([popped.lease_id]),
        ),
    ] {
        rolls_back(broker, &broker.db, body, "ack_rejected", "QTXN invalid or expired lease; transaction rolled back")
            .await;
    }
    assert_eq!(super::stored(broker, "out", "p").await, ["there"]);
}

async fn a_foreign_lease_rolls_back(broker: &TestBroker) {
    let popped = leased(broker, &["a"]).await;
    for lease in ["nonsense", "0198f0aa-4000-7000-8000-00000000aaaa", &popped.lease_id.to_uppercase()] {
        let mut op = ack_op(&popped.messages[0], "completed");
        op["leaseId"] = json!(lease);
        rolls_back(broker, &broker.db, json!({ "operations": [op] }), "ack_rejected", "QTXN").await;
        let hinted = with_hints(leaseless(&popped), json!([lease]));
        rolls_back(broker, &broker.db, hinted, "ack_rejected", "lease").await;
    }
}

async fn a_released_lease_rolls_back(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b"]).await;
    broker.ack(GROUP, popped.items("completed")).await;
    let body = json!({ "operations": ack_ops(&popped, "completed") });
    rolls_back(broker, &broker.db, body, "ack_rejected", "lease").await;
}

/// Q4: the zombie's bundle is refused although somebody holds a live lease.
async fn a_hint_does_not_pass_under_the_next_holder(broker: &TestBroker) {
    let zombie = leased(broker, &["a", "b"]).await;
    broker.db.expire_leases().await;
    let next = eventually_some(PATIENCE, || async {
        let popped = pop(broker, "in", "p").await;
        (!popped.is_empty()).then_some(popped)
    })
    .await;
    assert_ne!(zombie.lease_id, next.lease_id);
    let body = with_hints(leaseless(&zombie), json!([zombie.lease_id]));
    rolls_back(broker, &broker.db, body, "ack_rejected", "lease").await;
    sent_commits(broker, with_hints(leaseless(&zombie), json!([zombie.lease_id, next.lease_id]))).await;
}

async fn a_hint_that_matches_nothing_is_not_checked(broker: &TestBroker) {
    let popped = leased(broker, &["a"]).await;
    let body = with_hints(vec![ack_op(&popped.messages[0], "completed")], json!(["nobody's"]));
    sent_commits(broker, body).await;
    sent_commits(broker, with_hints(vec![push_op("out", "p", "x")], json!(["nobody's"]))).await;
}

async fn every_lease_of_a_cursor_must_be_the_live_one(broker: &TestBroker) {
    let popped = leased(broker, &["a", "b"]).await;
    let mut stale = ack_op(&popped.messages[1], "completed");
    stale["leaseId"] = json!("stale");
    let operations = json!([ack_op(&popped.messages[0], "completed"), stale]);
    rolls_back(broker, &broker.db, json!({ "operations": operations }), "ack_rejected", "lease").await;
    let without = leaseless_op(&popped.messages[1], "completed");
    commits(broker, &[ack_op(&popped.messages[0], "completed"), without]).await;
}

async fn an_id_above_the_leased_batch_rolls_back(broker: &TestBroker) {
    broker.push_ids("in", "p", ["a", "b", "c"]).await;
    let popped = broker.pop(&Pop::partition("in", "p").group(GROUP).all().batch(2)).await;
    let mut above = ack_op(&popped.messages[1], "completed");
    above["transactionId"] = json!("c");
    let body = json!({ "operations": [ack_op(&popped.messages[0], "completed"), above] });
    rolls_back(broker, &broker.db, body, "ack_rejected", "QTXN ack references unknown transactionId").await;
}

/// T6: it redelivers only when the lease expires.
async fn a_rollback_leaves_the_lease_to_its_worker(broker: &TestBroker) {
    let popped = leased(broker, &["a"]).await;
    broker.push_ids("out", "p", ["there"]).await;
    let mut bogus = ack_op(&popped.messages[0], "completed");
    bogus["transactionId"] = json!("never pushed");
    let body = json!({ "operations": [ack_op(&popped.messages[0], "completed"), bogus, push_op("out", "p", "x")] });
    rolls_back(broker, &broker.db, body, "ack_rejected", "QTXN").await;
    assert!(pop(broker, "in", "p").await.is_empty(), "still leased");
    broker.db.expire_leases().await;
    let again = eventually_some(PATIENCE, || async {
        let popped = pop(broker, "in", "p").await;
        (!popped.is_empty()).then_some(popped)
    })
    .await;
    assert_eq!(again.ids(), ["a"]);
    commits(broker, &ack_ops(&again, "completed")).await;
}

async fn another_broker_acks_what_this_one_leased(broker: &TestBroker) {
    let other = broker.another().await;
    let popped = leased(broker, &["a", "b"]).await;
    commits(&other, &[ack_op(&popped.messages[0], "completed"), push_op("out", "p", "x")]).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert_eq!(results.iter().map(|r| (r.success, r.noop)).collect::<Vec<_>>(), [(true, true), (true, false)]);
    let popped = leased(broker, &["c"]).await;
    commits(&other, &ack_ops(&popped, "completed")).await;
    assert_eq!(broker.db.cursor("in", "p", GROUP).await.committed, 2);
    assert!(pop(broker, "in", "p").await.is_empty());
    other.stop().await;
}
