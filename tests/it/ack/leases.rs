//! The lease check (`spec/ack.md` §4), and what releases a lease.

use serde_json::json;

use super::{GROUP, PASSED, STALE, cursor, done, leased, pop, refused};
use crate::harness::{Pop, TestBroker, on_every_road};

on_every_road!(
    a_live_lease_goes_on,
    an_expired_lease_is_refused,
    an_expired_lease_that_nobody_reclaimed_lands_without_its_id,
    a_released_lease_is_refused,
    another_workers_lease_is_refused,
    a_late_ack_of_an_old_worker_leaves_the_present_one_alone,
    a_made_up_lease_is_refused,
    no_lease_goes_on_while_another_worker_holds_the_batch,
    a_leaseless_ack_inside_the_batch_keeps_the_lease,
    a_group_without_a_cursor_is_not_found,
    an_ack_of_one_group_leaves_the_other_alone,
    an_extended_lease_is_accepted_past_its_first_expiry,
    each_lease_of_a_call_is_judged_alone,
);

async fn a_live_lease_goes_on(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (2, false, 0));
}

async fn an_expired_lease_is_refused(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    broker.db.expire_leases().await;
    for status in ["completed", "failed", "retry", "dlq"] {
        let results = broker.ack(GROUP, popped.items(status)).await;
        assert!(results.iter().all(|r| refused(r, STALE)), "{status}: {results:?}");
    }
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count), (-1, 0));
    assert!(broker.db.dead_letters().await.is_empty());
    assert_eq!(pop(broker).await.ids(), ["m0", "m1", "m2"]);
}

async fn an_expired_lease_that_nobody_reclaimed_lands_without_its_id(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    broker.db.expire_leases().await;
    let results = broker.ack(GROUP, popped.messages.iter().map(|m| m.leaseless("completed")).collect()).await;
    assert!(results.iter().all(|r| r.success && r.error.is_none() && !r.noop), "{results:?}");
    assert_eq!(cursor(broker).await.committed, 2);
    assert!(pop(broker).await.is_empty());
}

async fn a_released_lease_is_refused(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    assert!(done(&broker.ack_one(GROUP, popped.messages[0].item("retry")).await, true));
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| refused(r, STALE)), "{results:?}");
    assert_eq!(cursor(broker).await.committed, -1);
}

async fn another_workers_lease_is_refused(broker: &TestBroker) {
    let first = leased(broker, 2).await;
    broker.db.expire_leases().await;
    let second = pop(broker).await;
    let results = broker.ack(GROUP, first.items("completed")).await;
    assert!(results.iter().all(|r| refused(r, STALE)), "{results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.worker), (-1, true, Some(second.lease_id.clone())));
    let results = broker.ack(GROUP, second.items("completed")).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
}

/// §7: a late ack of an old worker must not cost the present one anything.
async fn a_late_ack_of_an_old_worker_leaves_the_present_one_alone(broker: &TestBroker) {
    let first = leased(broker, 4).await;
    broker.db.expire_leases().await;
    let second = pop(broker).await;
    for status in ["completed", "failed", "retry", "dlq"] {
        let results = broker.ack(GROUP, first.items(status)).await;
        assert!(results.iter().all(|r| refused(r, STALE)), "{status}: {results:?}");
    }
    assert!(pop(broker).await.is_empty(), "the present lease holds");
    let results = broker.ack(GROUP, second.items("completed")).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    assert_eq!(cursor(broker).await.committed, 3);
}

async fn a_made_up_lease_is_refused(broker: &TestBroker) {
    let popped = leased(broker, 1).await;
    let upper = popped.lease_id.to_uppercase();
    for lease in ["not a uuid", "00000000-0000-7000-8000-000000000000", &upper, "💥"] {
        let mut item = popped.messages[0].item("completed");
        item["leaseId"] = json!(lease);
        let result = broker.ack_one(GROUP, item).await;
        assert!(refused(&result, STALE), "{lease}: {result:?}");
    }
    assert_eq!(cursor(broker).await.committed, -1);
}

async fn no_lease_goes_on_while_another_worker_holds_the_batch(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    let results = broker.ack(GROUP, popped.messages.iter().map(|m| m.leaseless("completed")).collect()).await;
    assert!(results.iter().all(|r| done(r, true)), "reaching batch_end releases it: {results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased), (2, false));
    let late = broker.ack(GROUP, popped.items("completed")).await;
    assert!(late.iter().all(|r| refused(r, STALE)), "{late:?}");
}

async fn a_leaseless_ack_inside_the_batch_keeps_the_lease(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    assert!(done(&broker.ack_one(GROUP, popped.messages[1].leaseless("completed")).await, false));
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_end, now.leased), (1, Some(3), true));
    // I6: the fast path would have called these four new; two of them are below the cursor by now.
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results[..2].iter().all(|r| r.success && r.noop), "{results:?}");
    assert!(results[2..].iter().all(|r| done(r, true)), "{results:?}");
    assert_eq!(cursor(broker).await.committed, 3);
}

async fn a_group_without_a_cursor_is_not_found(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    for items in [popped.items("completed"), popped.messages.iter().map(|m| m.leaseless("failed")).collect()] {
        for group in ["stranger", ""] {
            let results = broker.ack(group, items.clone()).await;
            assert!(results.iter().all(|r| refused(r, "consumer not found")), "{results:?}");
        }
    }
    assert_eq!(broker.db.find_cursor("q", "p", "stranger").await, None, "an ack makes no group");
}

async fn an_ack_of_one_group_leaves_the_other_alone(broker: &TestBroker) {
    let mine = leased(broker, 2).await;
    let theirs = broker.pop(&Pop::partition("q", "p").group("h").all()).await;
    let crossed = broker.ack("h", mine.items("completed")).await;
    assert!(crossed.iter().all(|r| refused(r, STALE)), "another group's lease: {crossed:?}");
    assert!(broker.ack("h", theirs.items("completed")).await.iter().all(|r| done(r, true)));
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased), (-1, true));
    assert!(broker.ack(GROUP, mine.items("retry")).await.iter().all(|r| done(r, true)));
    assert_eq!(broker.db.cursor("q", "p", "h").await.committed, 1);
}

async fn an_extended_lease_is_accepted_past_its_first_expiry(broker: &TestBroker) {
    broker.push_ids("q", "p", ["a"]).await;
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP).all().lease(5)).await;
    assert_eq!(broker.extend(&popped.lease_id, 600).await["success"], true);
    // Past the first expiry: a long poll of its own length lets it go by.
    assert!(broker.pop(&Pop::queue("q").group(GROUP).wait_ms(5300)).await.is_empty());
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
}

/// §3 no. 2: groups of one call by (partition, lease) are decided alone; one's failure touches no other.
async fn each_lease_of_a_call_is_judged_alone(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    broker.push_ids("q", "other", ["o0", "o1"]).await;
    let other = broker.pop(&Pop::partition("q", "other").group(GROUP).all()).await;
    let mut stale = popped.messages[1].item("failed");
    stale["leaseId"] = json!(uuid::Uuid::now_v7());
    let items = vec![
        popped.messages[0].item("completed"),
        stale,
        other.messages[1].item("completed"),
        popped.messages[1].item("completed"),
        other.messages[0].item("completed"),
        popped.messages[0].leaseless("failed"),
    ];
    let results = broker.ack(GROUP, items).await;
    assert!(done(&results[0], true) && done(&results[3], true), "{results:?}");
    assert!(refused(&results[1], STALE), "{results:?}");
    assert!(done(&results[2], true) && done(&results[4], true), "{results:?}");
    assert!(refused(&results[5], PASSED), "two groups of one partition keep request order: {results:?}");
    assert_eq!(cursor(broker).await.committed, 1);
    assert_eq!(broker.db.cursor("q", "other", GROUP).await.committed, 1);
}
