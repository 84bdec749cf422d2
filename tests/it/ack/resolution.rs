//! From transaction id to offset (`spec/ack.md` §3).

use serde_json::json;

use super::{GROUP, PASSED, UNRESOLVABLE, cursor, done, leased, pop, refused};
use crate::harness::{Pop, TestBroker, numbered, on_every_road};

on_every_road!(
    an_id_never_pushed_is_unresolvable,
    an_id_above_the_batch_is_unresolvable_under_a_lease,
    without_a_lease_the_span_is_open_above,
    below_the_cursor_is_a_noop_or_passed,
    an_id_of_another_partition_is_unresolvable,
    an_id_stored_twice_means_both,
    an_id_stored_twice_and_nacked_means_the_lowest,
    a_second_copy_above_the_batch_does_not_count,
    a_purged_hash_is_unresolvable,
    an_unresolvable_item_stops_no_other,
    duplicates_in_one_request_collapse,
);

async fn an_id_never_pushed_is_unresolvable(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    let mut item = popped.messages[0].item("completed");
    item["transactionId"] = json!("never pushed");
    for status in ["completed", "failed", "retry", "dlq"] {
        item["status"] = json!(status);
        let result = broker.ack_one(GROUP, item.clone()).await;
        assert!(refused(&result, UNRESOLVABLE), "{status}: {result:?}");
    }
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (-1, true, 0));
}

async fn an_id_above_the_batch_is_unresolvable_under_a_lease(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("m", 0..6)).await;
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP).all().batch(3)).await;
    for lease in [true, false] {
        let mut item = popped.messages[0].item("completed");
        item["transactionId"] = json!("m4");
        if !lease {
            item["leaseId"] = json!("");
        }
        let result = broker.ack_one(GROUP, item).await;
        assert!(refused(&result, UNRESOLVABLE), "lease sent: {lease}: {result:?}");
    }
    assert_eq!(cursor(broker).await.committed, -1);
}

async fn without_a_lease_the_span_is_open_above(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("m", 0..6)).await;
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP).all().batch(3)).await;
    broker.ack(GROUP, popped.items("retry")).await;
    let mut item = popped.messages[0].leaseless("completed");
    item["transactionId"] = json!("m4");
    let result = broker.ack_one(GROUP, item).await;
    assert!(result.success && !result.noop, "{result:?}");
    assert_eq!(cursor(broker).await.committed, 4);
    assert_eq!(pop(broker).await.ids(), ["m5"]);
}

async fn below_the_cursor_is_a_noop_or_passed(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    assert!(done(&broker.ack_one(GROUP, popped.messages[1].item("completed")).await, false));
    let again =
        broker.ack(GROUP, vec![popped.messages[0].item("completed"), popped.messages[1].item("completed")]).await;
    assert!(again.iter().all(|r| r.success && r.noop && r.error.is_none()), "{again:?}");
    for status in ["failed", "retry", "dlq"] {
        let result = broker.ack_one(GROUP, popped.messages[0].item(status)).await;
        assert!(refused(&result, PASSED), "{status}: {result:?}");
    }
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (1, true, 0), "neither moves anything");
    assert!(broker.db.dead_letters().await.is_empty());
}

async fn an_id_of_another_partition_is_unresolvable(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    broker.push_ids("q", "other", ["theirs"]).await;
    let mut item = popped.messages[0].item("completed");
    item["transactionId"] = json!("theirs");
    let result = broker.ack_one(GROUP, item).await;
    assert!(refused(&result, UNRESOLVABLE), "{result:?}");
    assert_eq!(cursor(broker).await.committed, -1);
}

async fn an_id_stored_twice_means_both(broker: &TestBroker) {
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    for id in ["a", "twin", "b", "twin", "c"] {
        broker.push_ids("q", "p", [id]).await;
    }
    let popped = pop(broker).await;
    let result = broker.ack_one(GROUP, popped.messages[1].item("completed")).await;
    assert!(done(&result, false), "{result:?}");
    assert_eq!(cursor(broker).await.committed, 3, "completed takes the highest");
}

async fn an_id_stored_twice_and_nacked_means_the_lowest(broker: &TestBroker) {
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    for id in ["a", "twin", "b", "twin", "c"] {
        broker.push_ids("q", "p", [id]).await;
    }
    let popped = pop(broker).await;
    let items = vec![popped.messages[0].item("completed"), popped.messages[3].item("retry")];
    assert!(broker.ack(GROUP, items).await.iter().all(|r| done(r, true)));
    assert_eq!(cursor(broker).await.committed, 0, "a signal takes the lowest");
    assert_eq!(pop(broker).await.ids(), ["twin", "b", "twin", "c"]);
}

async fn a_second_copy_above_the_batch_does_not_count(broker: &TestBroker) {
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    for id in ["twin", "b", "twin"] {
        broker.push_ids("q", "p", [id]).await;
    }
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP).all().batch(2)).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    assert_eq!(cursor(broker).await.committed, 1);
    assert_eq!(pop(broker).await.ids(), ["twin"]);
}

/// §3 no. 3: below `txns_start` nothing resolves.
async fn a_purged_hash_is_unresolvable(broker: &TestBroker) {
    broker.push_ids("q", "p", ["m0", "m1"]).await;
    broker.push_ids("q", "p", ["m2"]).await;
    let popped = pop(broker).await;
    broker.db.execute("DELETE FROM queen.log_txns WHERE base_offset = 0").await;
    broker.db.execute("UPDATE queen.log_partitions SET txns_start = 2").await;
    for status in ["completed", "failed"] {
        let result = broker.ack_one(GROUP, popped.messages[0].item(status)).await;
        assert!(refused(&result, UNRESOLVABLE), "{status}: {result:?}");
    }
    assert!(done(&broker.ack_one(GROUP, popped.messages[2].item("completed")).await, true));
    assert_eq!(cursor(broker).await.committed, 2);
}

async fn an_unresolvable_item_stops_no_other(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    let mut ghost = popped.messages[0].item("dlq");
    ghost["transactionId"] = json!("ghost");
    let mut items = popped.items("completed");
    items.insert(1, ghost);
    let results = broker.ack(GROUP, items).await;
    assert!(!results[1].success && results[1].error.as_deref() == Some(UNRESOLVABLE), "{results:?}");
    for n in [0, 2, 3] {
        assert!(done(&results[n], true), "{results:?}");
    }
    assert_eq!(cursor(broker).await.committed, 2);
}

async fn duplicates_in_one_request_collapse(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    let mut items = popped.items("completed");
    items.extend(popped.items("completed"));
    let results = broker.ack(GROUP, items).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    assert_eq!(results.len(), 4);
}
