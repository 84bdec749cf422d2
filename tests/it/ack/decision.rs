//! The decision for one group of items (I1, I4, `spec/ack.md` §5.1 to §5.4).

use super::{GROUP, cursor, done, leased, pop};
use crate::harness::{TestBroker, on_every_road};

on_every_road!(
    completed_commits_the_highest_and_keeps_the_lease,
    reaching_the_end_releases_and_clears_the_budget,
    unmentioned_offsets_below_are_completed_silently,
    the_cursor_never_moves_back,
    a_signal_clamps_the_cursor_below_itself,
    gaps_below_a_signal_are_not_completed,
    the_lowest_signal_wins,
    at_one_offset_dlq_beats_failed_beats_retry,
    a_signal_beats_a_completed_of_the_same_id,
    items_above_a_signal_answer_success_and_redeliver,
    a_signal_on_the_first_message_moves_nothing,
    a_whole_batch_may_be_nacked,
    the_lease_flag_is_one_per_group,
    an_ack_above_and_below_the_cursor_in_one_call,
);

async fn completed_commits_the_highest_and_keeps_the_lease(broker: &TestBroker) {
    let popped = leased(broker, 5).await;
    let results =
        broker.ack(GROUP, vec![popped.messages[2].item("completed"), popped.messages[0].item("completed")]).await;
    assert!(results.iter().all(|r| done(r, false)), "{results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_end, now.leased), (2, Some(4), true));
    assert!(pop(broker).await.is_empty(), "the lease is kept");
}

async fn reaching_the_end_releases_and_clears_the_budget(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    broker.ack(GROUP, vec![popped.messages[0].item("failed")]).await;
    assert_eq!(cursor(broker).await.batch_retry_count, 1);
    let again = pop(broker).await;
    for (n, message) in again.messages.iter().enumerate() {
        let result = broker.ack_one(GROUP, message.item("completed")).await;
        assert!(done(&result, n == 2), "{result:?}");
    }
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (2, false, 0));
}

async fn unmentioned_offsets_below_are_completed_silently(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    assert!(done(&broker.ack_one(GROUP, popped.messages[3].item("completed")).await, true));
    assert_eq!(cursor(broker).await.committed, 3);
    assert!(pop(broker).await.is_empty());
}

/// I1.
async fn the_cursor_never_moves_back(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    broker.ack_one(GROUP, popped.messages[2].item("completed")).await;
    for n in [0, 1, 2] {
        for status in ["completed", "failed", "retry", "dlq"] {
            broker.ack_one(GROUP, popped.messages[n].item(status)).await;
            broker.ack_one(GROUP, popped.messages[n].leaseless(status)).await;
            assert_eq!(cursor(broker).await.committed, 2);
        }
    }
}

/// I4.
async fn a_signal_clamps_the_cursor_below_itself(broker: &TestBroker) {
    let popped = leased(broker, 5).await;
    let items = vec![
        popped.messages[4].item("completed"),
        popped.messages[0].item("completed"),
        popped.messages[2].item("retry"),
        popped.messages[1].item("completed"),
        popped.messages[3].item("completed"),
    ];
    let results = broker.ack(GROUP, items).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased), (1, false));
    assert_eq!(pop(broker).await.ids(), ["m2", "m3", "m4"]);
}

/// §5.4: silent gaps below the highest completed below the signal only.
async fn gaps_below_a_signal_are_not_completed(broker: &TestBroker) {
    let popped = leased(broker, 6).await;
    let items = vec![popped.messages[1].item("completed"), popped.messages[4].item("failed")];
    assert!(broker.ack(GROUP, items).await.iter().all(|r| done(r, true)));
    assert_eq!(cursor(broker).await.committed, 1, "0 is completed silently, 2 and 3 are not");
    assert_eq!(pop(broker).await.ids(), ["m2", "m3", "m4", "m5"]);
}

async fn the_lowest_signal_wins(broker: &TestBroker) {
    let popped = leased(broker, 5).await;
    let items = vec![
        popped.messages[4].item("dlq"),
        popped.messages[3].item("failed"),
        popped.messages[1].item("retry"),
        popped.messages[0].item("completed"),
    ];
    let results = broker.ack(GROUP, items).await;
    assert!(results.iter().all(|r| done(r, true)), "only the lowest acts: {results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count), (0, 0), "a retry charges nothing");
    assert!(broker.db.dead_letters().await.is_empty());
}

/// I4.
async fn at_one_offset_dlq_beats_failed_beats_retry(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    let first = &popped.messages[0];
    let results = broker.ack(GROUP, vec![first.item("retry"), first.item("failed")]).await;
    assert!(results.iter().all(|r| r.success && r.lease_released && !r.dlq), "{results:?}");
    assert_eq!(cursor(broker).await.batch_retry_count, 1, "failed beats retry");
    let popped = pop(broker).await;
    let first = &popped.messages[0];
    let results = broker.ack(GROUP, vec![first.item("failed"), first.item("dlq"), first.item("retry")]).await;
    assert!(results.iter().all(|r| r.success && r.lease_released && r.dlq), "dlq beats both: {results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count), (0, 0));
    assert_eq!(broker.db.dead_letters().await.len(), 1);
}

async fn a_signal_beats_a_completed_of_the_same_id(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    for items in [vec![
        popped.messages[0].item("completed"),
        popped.messages[0].item("retry"),
        popped.messages[1].item("completed"),
    ]] {
        let results = broker.ack(GROUP, items).await;
        assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");
    }
    assert_eq!(cursor(broker).await.committed, -1);
    assert_eq!(pop(broker).await.ids(), ["m0", "m1"]);
}

async fn items_above_a_signal_answer_success_and_redeliver(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    let items = vec![
        popped.messages[1].item("failed"),
        popped.messages[2].item("completed"),
        popped.messages[3].item("failed"),
    ];
    let results = broker.ack(GROUP, items).await;
    assert!(results.iter().all(|r| done(r, true)), "{results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.batch_retry_count), (-1, 1), "nothing completed below, charged once");
    assert_eq!(pop(broker).await.ids(), ["m0", "m1", "m2", "m3"]);
}

async fn a_signal_on_the_first_message_moves_nothing(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    let mut items = popped.items("completed");
    items[0] = popped.messages[0].item("failed");
    assert!(broker.ack(GROUP, items).await.iter().all(|r| done(r, true)));
    assert_eq!(cursor(broker).await.committed, -1);
    let again = pop(broker).await;
    assert_eq!(again.ids(), ["m0", "m1", "m2"]);
    assert!(again.messages.iter().all(|m| m.delivery_attempt == 2));
}

async fn a_whole_batch_may_be_nacked(broker: &TestBroker) {
    for (status, retries) in [("retry", 0), ("failed", 1), ("failed", 2)] {
        if broker.db.queue_names().await.is_empty() {
            broker.push_ids("q", "p", ["m0", "m1", "m2"]).await;
        }
        let popped = pop(broker).await;
        let results = broker.ack(GROUP, popped.items(status)).await;
        assert!(results.iter().all(|r| done(r, true)), "{status}: {results:?}");
        let now = cursor(broker).await;
        assert_eq!((now.committed, now.batch_retry_count), (-1, retries), "the call charges once");
    }
}

/// §2: `leaseReleased` has the same value on every resolved item of the group.
async fn the_lease_flag_is_one_per_group(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    broker.ack_one(GROUP, popped.messages[0].item("completed")).await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");
    assert_eq!(results.iter().map(|r| r.noop).collect::<Vec<_>>(), [true, false, false, false]);
}

async fn an_ack_above_and_below_the_cursor_in_one_call(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    broker.ack_one(GROUP, popped.messages[1].item("completed")).await;
    let items = vec![
        popped.messages[0].item("completed"),
        popped.messages[1].item("failed"),
        popped.messages[2].item("completed"),
    ];
    let results = broker.ack(GROUP, items).await;
    assert!(results[0].success && results[0].noop, "{results:?}");
    assert_eq!((results[1].success, results[1].error.as_deref()), (false, Some(super::PASSED)));
    assert!(done(&results[2], false), "a signal below the cursor clamps nothing: {results:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (2, true, 0));
}
