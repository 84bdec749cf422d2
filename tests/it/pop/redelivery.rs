//! Expiry, nacks and what comes back (`spec/push-pop.md` §7.6, §7.7).

use serde_json::json;

use crate::harness::{PATIENCE, Pop, Popped, TestBroker, eventually_some, numbered};

/// Pops until something comes.
async fn pop_until_some(broker: &TestBroker, pop: &Pop) -> Popped {
    eventually_some(PATIENCE, async || Some(broker.pop(pop).await).filter(|popped| !popped.is_empty())).await
}

/// §7.6 "expiry", §7.7: the same messages come again, unchanged, counted, and free of charge.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_lease_redelivers_the_same_messages() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    let pop = Pop::partition("q", "p").group("g").all();
    let first = broker.pop(&pop).await;
    for attempt in 2..=5 {
        broker.db.expire_leases().await;
        let again = broker.pop(&pop).await;
        assert_ne!(again.lease_id, first.lease_id);
        assert_eq!(again.messages.len(), 3);
        for (before, now) in first.messages.iter().zip(&again.messages) {
            assert_eq!(now.delivery_attempt, attempt);
            assert_eq!((&now.id, &now.transaction_id), (&before.id, &before.transaction_id));
            assert_eq!((&now.data, &now.created_at), (&before.data, &before.created_at));
        }
    }
    assert_eq!(broker.db.cursor("q", "p", "g").await.batch_retry_count, 0, "expiry charges nothing");
    assert!(broker.db.dead_letters().await.is_empty());
}

/// §7.6: expiry dead-letters nothing, any number of times, and leaves the budget whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expiries_cost_no_retry_budget() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "retryLimit": 1 })).await;
    broker.push_ids("q", "p", ["m"]).await;
    let pop = Pop::partition("q", "p").group("g").all();
    for _ in 0..4 {
        assert_eq!(broker.pop(&pop).await.ids(), ["m"]);
        broker.db.expire_leases().await;
    }
    let popped = broker.pop(&pop).await;
    let acks = broker.ack("g", popped.items("failed")).await;
    assert!(acks[0].success && !acks[0].dlq, "the first charge is redelivered: {acks:?}");
    assert_eq!(broker.pop(&pop).await.ids(), ["m"]);
}

/// §7.4, §7.6: a real lease lapses by itself, and pollers that found nothing meanwhile find it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_backlog_comes_back_without_a_new_push() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("g").all().lease(5)).await.messages.len(), 2);
    for _ in 0..5 {
        assert!(broker.pop(&Pop::queue("q").group("g").all()).await.is_empty(), "leased");
    }
    let again = pop_until_some(&broker, &Pop::queue("q").group("g").all()).await;
    assert_eq!(again.ids(), ["a", "b"]);
    assert_eq!(again.messages[0].delivery_attempt, 2);
}

/// §10 no. 3: after a partial ack the remainder starts elsewhere and counts from 1 again; it may be larger.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partial_ack_then_expiry_redelivers_the_rest_from_attempt_one() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..10)).await;
    let popped = broker.pop(&Pop::partition("q", "p").batch(5)).await;
    let acks = broker.ack("", vec![popped.messages[2].item("completed")]).await;
    assert_eq!((acks[0].success, acks[0].lease_released), (true, false));
    let cursor = broker.db.cursor("q", "p", "__QUEUE_MODE__").await;
    assert_eq!((cursor.committed, cursor.batch_end, cursor.leased), (2, Some(4), true));
    assert!(broker.pop(&Pop::partition("q", "p")).await.is_empty(), "the lease stays");
    broker.db.expire_leases().await;
    let again = broker.pop(&Pop::partition("q", "p")).await;
    assert_eq!(again.ids(), numbered("m", 3..10));
    assert!(again.messages.iter().all(|m| m.delivery_attempt == 1));
}

/// §7.7: the count belongs to the partition's claim; partitions of one answer differ, finished work resets it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delivery_attempts_count_per_partition_and_start_again() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "old", ["o"]).await;
    for _ in 0..3 {
        let popped = broker.pop(&Pop::partition("q", "old").group("g").all()).await;
        broker.ack("g", popped.items("retry")).await;
    }
    broker.push_ids("q", "new", ["n"]).await;
    let popped = broker.pop(&Pop::queue("q").group("g").all().partitions(2)).await;
    let mut attempts: Vec<_> = popped.messages.iter().map(|m| (m.partition.as_str(), m.delivery_attempt)).collect();
    attempts.sort_unstable();
    assert_eq!(attempts, [("new", 1), ("old", 4)]);
    broker.ack("g", popped.items("completed")).await;
    broker.push_ids("q", "old", ["o2"]).await;
    assert_eq!(broker.pop(&Pop::queue("q").group("g")).await.messages[0].delivery_attempt, 1, "fresh work");
}

/// §7.6 "after a nack": at once, for `retry` and for a charged `failed` without `retryDelay`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nacked_batch_is_claimable_at_once() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    for (status, attempt) in [("retry", 1), ("failed", 2)] {
        let popped = broker.pop(&Pop::queue("q").group("g").all()).await;
        assert_eq!(popped.ids(), ["a", "b"]);
        assert_eq!(popped.messages[0].delivery_attempt, attempt);
        let acks = broker.ack("g", vec![popped.messages[0].item(status)]).await;
        assert!(acks[0].success && acks[0].lease_released, "{acks:?}");
    }
    assert_eq!(broker.pop(&Pop::queue("q").group("g")).await.ids(), ["a", "b"]);
}

/// §7.6: one id per pop, but acks and expiry act per partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_multi_partition_lease_ends_partition_by_partition() {
    let broker = TestBroker::start().await;
    for partition in ["a", "b"] {
        broker.push_ids("q", partition, [partition]).await;
    }
    let popped = broker.pop(&Pop::queue("q").group("g").all().partitions(2)).await;
    let item = popped.messages.iter().find(|m| m.partition == "a").unwrap().item("completed");
    let acks = broker.ack("g", vec![item]).await;
    assert!(acks[0].lease_released);
    let (a, b) = (broker.db.cursor("q", "a", "g").await, broker.db.cursor("q", "b", "g").await);
    assert_eq!((a.leased, a.committed), (false, 0));
    assert_eq!((b.leased, b.committed, b.worker), (true, -1, Some(popped.lease_id)));
}

/// §7.6: a redelivery may be cut differently, in the same order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redelivery_may_have_another_size() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..8)).await;
    for (batch, attempt) in [(5, 1), (2, 2), (8, 3)] {
        let popped = broker.pop(&Pop::partition("q", "p").batch(batch)).await;
        assert_eq!(popped.ids(), numbered("m", 0..batch as usize));
        assert_eq!(popped.messages[0].delivery_attempt, attempt);
        broker.db.expire_leases().await;
    }
}
