//! What a claim and its end write into the cursor row: no more than must outlive them.

use std::collections::BTreeSet;

use serde_json::Value;
use sqlx::Row;

use crate::harness::{PATIENCE, Pop, TestBroker, eventually, numbered, on_every_road};

on_every_road!(a_finished_claim_leaves_nothing_in_its_cursor);

const GROUP: &str = "g";

/// Columns of the only cursor that speak of a claim, and how many of them are set.
async fn set(broker: &TestBroker) -> (i32, i32) {
    let row = sqlx::query(
        "SELECT num_nonnulls(attempts, attempt_start, attempt_end) AS attempt,
                num_nonnulls(batch_end, worker_id, lease_expires_at, lease_acquired_at, not_before) AS lease
           FROM queen.log_consumers",
    )
    .fetch_one(&broker.db.pool)
    .await
    .unwrap();
    (row.get("attempt"), row.get("lease"))
}

/// I6: on every road alike. What was not finished keeps its attempt (`spec/push-pop.md` §7.7).
async fn a_finished_claim_leaves_nothing_in_its_cursor(broker: &TestBroker) {
    broker.push_ids("q", "p", numbered("a", 0..5)).await;
    let pop = Pop::queue("q").group(GROUP).all();
    let popped = broker.pop(&pop).await;
    assert_eq!(set(broker).await, (3, 4));
    broker.ack(GROUP, popped.items("completed")).await;
    assert_eq!(set(broker).await, (0, 0), "the whole claim");

    broker.push_ids("q", "p", numbered("b", 0..5)).await;
    let popped = broker.pop(&pop).await;
    broker.ack(GROUP, vec![popped.messages[2].item("completed")]).await;
    assert_eq!(set(broker).await, (3, 4), "a part of it");
    broker.ack(GROUP, popped.items("completed").split_off(3)).await;
    assert_eq!(set(broker).await, (0, 0), "the rest");

    broker.push_ids("q", "p", numbered("c", 0..2)).await;
    let popped = broker.pop(&pop).await;
    broker.ack(GROUP, popped.items("retry")).await;
    assert_eq!(set(broker).await, (3, 0), "given back");
    let again = broker.pop(&pop).await;
    assert_eq!((again.ids(), again.messages[0].delivery_attempt), (popped.ids(), 2));
    let last: Vec<Value> = again.items("dlq");
    broker.ack(GROUP, last[..1].to_vec()).await;
    assert_eq!(set(broker).await, (3, 0), "a dead letter before its end");
    let rest = broker.pop(&pop).await;
    assert_eq!(rest.messages[0].delivery_attempt, 1);
    broker.ack(GROUP, rest.items("dlq")).await;
    assert_eq!(set(broker).await, (0, 0), "a dead letter at its end");

    broker.push_ids("q", "p", ["d"]).await;
    assert_eq!(broker.pop(&Pop::queue("q").group(GROUP).auto_ack()).await.ids(), ["d"]);
    assert_eq!(set(broker).await.0, 0);
}

/// The first claim of a group on a partition makes the cursor with its lease: one row version, within the pop's budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_claim_makes_leased_cursors_within_its_budget() {
    const PARTITIONS: usize = 40;
    let broker = TestBroker::start().await;
    for n in 0..PARTITIONS {
        broker.push_ids("q", &format!("p{n}"), numbered(&format!("p{n}-"), 0..3)).await;
    }
    let popped = broker.pop(&Pop::queue("q").group(GROUP).all().batch(1_000).partitions(20)).await;
    assert_eq!(popped.messages.len(), 60);
    eventually(PATIENCE, async || {
        let row = sqlx::query(
            "SELECT n_tup_ins, n_tup_upd FROM pg_stat_user_tables
              WHERE schemaname = 'queen' AND relname = 'log_consumers'",
        )
        .fetch_one(&broker.db.pool)
        .await
        .unwrap();
        assert_eq!(row.get::<i64, _>("n_tup_upd"), 0);
        row.get::<i64, _>("n_tup_ins") >= 20
    })
    .await;
    assert_eq!(broker.db.live_leases().await, 20);

    let popped = broker.pop(&Pop::queue("q").group("h").all().batch(4).partitions(10)).await;
    assert_eq!(popped.messages.len(), 4);
    assert_eq!(broker.db.live_leases().await, 22, "three messages of one, one of another");
    let spans: i64 = sqlx::query_scalar(
        "SELECT sum(batch_end - committed)::bigint FROM queen.log_consumers c
           JOIN queen.consumer_groups g ON g.id = c.group_id WHERE g.name = 'h' AND worker_id IS NOT NULL",
    )
    .fetch_one(&broker.db.pool)
    .await
    .unwrap();
    assert_eq!(spans, 4);
    let narrow = broker.pop(&Pop::queue("q").group("i").all().batch(100).partitions(2)).await;
    assert_eq!((narrow.messages.len(), broker.db.live_leases().await), (6, 24));

    let mut seen: BTreeSet<String> = BTreeSet::new();
    let mut answer = popped;
    while seen.len() < 3 * PARTITIONS {
        assert!(!answer.is_empty(), "{} seen", seen.len());
        for message in &answer.messages {
            assert!(seen.insert(message.transaction_id.clone()), "twice: {message:?}");
            assert_eq!(message.delivery_attempt, 1);
        }
        let acks = broker.ack("h", answer.items("completed")).await;
        assert!(acks.iter().all(|ack| ack.success && !ack.noop), "{acks:?}");
        answer = broker.pop(&Pop::queue("q").group("h").all().batch(7).partitions(3)).await;
    }
}
