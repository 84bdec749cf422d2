//! Bundles that meet: shared flushes, opposite orders, several brokers (I2, I7, I10).

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{GROUP, ack_op, ack_ops, leased, leaseless_op, push_op, reply, stored};
use crate::harness::{Client, Pop, TestBroker, eventually};

/// A transaction of a bystander that holds the partition rows of a queue, so that bundles gather behind the first.
async fn hold<'a>(broker: &'a TestBroker, queue: &str) -> sqlx::Transaction<'a, sqlx::Postgres> {
    let mut holder = broker.db.pool.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM queen.log_partitions p JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1 FOR UPDATE OF p")
        .bind(queue)
        .execute(&mut *holder)
        .await
        .unwrap();
    holder
}

/// Sends bundles that share one flush: the first is stuck behind a held row until all others wait for it.
async fn fused(broker: &TestBroker, bundles: Vec<Vec<Value>>) -> Vec<Value> {
    broker.push_ids("gate", "p", [uuid::Uuid::new_v4().to_string()]).await;
    let holder = hold(broker, "gate").await;
    let mut sent = JoinSet::new();
    let client: Client = (**broker).clone();
    sent.spawn({
        let client = client.clone();
        async move { (usize::MAX, reply(&client, &[push_op("gate", "p", &uuid::Uuid::new_v4().to_string())]).await.json()) }
    });
    eventually(Duration::from_secs(10), async || broker.db.lock_waits("%").await > 0).await;
    let waiting = async || {
        let text = client.get("/metrics/prometheus").await.text;
        let line = text.lines().find_map(|line| line.strip_prefix("regent_transactions_waiting ")).map(str::to_owned);
        line.unwrap().parse::<f64>().unwrap() as usize
    };
    let count = bundles.len();
    for (nth, operations) in bundles.into_iter().enumerate() {
        let client = client.clone();
        sent.spawn(async move { (nth, reply(&client, &operations).await.expect(200).json()) });
        // The gauge is of the process, and tests share it: the last scrape of this broker has set it.
        eventually(Duration::from_secs(10), async || waiting().await > nth).await;
    }
    holder.rollback().await.unwrap();
    let mut answers = vec![Value::Null; count];
    while let Some(done) = sent.join_next().await {
        let (nth, answer) = done.unwrap();
        match answers.get_mut(nth) {
            Some(slot) => *slot = answer,
            None => assert_eq!(answer["success"], true, "{answer}"),
        }
    }
    answers
}

async fn writers(broker: &TestBroker, queue: &str) -> i64 {
    let sql = "SELECT count(DISTINCT s.writer) FROM queen.log_segments s JOIN queen.log_partitions p ON p.id = s.partition_id \
               JOIN queen.queues q ON q.id = p.queue_id WHERE q.name = $1";
    sqlx::query_scalar(sql).bind(queue).fetch_one(&broker.db.pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_bundle_does_not_disturb_those_that_share_its_commit() {
    let broker = TestBroker::start().await;
    broker.push_ids("out", "p", ["stored"]).await;
    let popped = leased(&broker, &["a", "b", "c"]).await;
    let mut stale = ack_op(&popped.messages[0], "completed");
    stale["leaseId"] = json!("stale");
    let mut bogus = ack_op(&popped.messages[0], "failed");
    bogus["transactionId"] = json!("bogus");
    let bundles = vec![
        vec![push_op("out", "p", "m0"), push_op("out", "r", "n0")],
        vec![push_op("out", "p", "m1"), push_op("out", "p", "stored")],
        vec![push_op("out", "p", "m2"), stale],
        vec![push_op("out", "p", "m3"), ack_op(&popped.messages[0], "completed")],
        vec![push_op("out", "p", "m4"), bogus],
        vec![push_op("out", "p", "m0"), push_op("out", "q", "n5")],
        vec![push_op("out", "p", "m1"), ack_op(&popped.messages[2], "completed")],
        vec![push_op("out", "p", "m7"), ack_op(&popped.messages[2], "completed")],
    ];
    let before = writers(&broker, "out").await;
    let answers = fused(&broker, bundles).await;
    let told: Vec<&str> = answers.iter().map(|a| a["reason"].as_str().unwrap_or("committed")).collect();
    let expected = [
        "committed",
        "duplicate",
        "ack_rejected",
        "committed",
        // The bogus id is searched for outside, and refused in a flush of its own.
        "ack_rejected",
        // Each sees those before it: of one partition, and of one cursor.
        "duplicate",
        "committed",
        "ack_rejected",
    ];
    assert_eq!(told, expected, "{answers:?}");
    assert_eq!(stored(&broker, "out", "p").await, ["stored", "m0", "m3", "m1"]);
    assert_eq!(stored(&broker, "out", "r").await, ["n0"]);
    assert_eq!(broker.db.last_offset("out", "q").await, None, "the refused bundle makes no partition");
    assert_eq!(broker.db.cursor("in", "p", GROUP).await.committed, 2);
    assert_eq!(writers(&broker, "out").await, before + 1, "they shared one commit");
}

/// Nacks, dead letters and acks of several bundles on one cursor, one after the other in one flush.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_of_one_flush_see_each_other_on_a_cursor() {
    let broker = TestBroker::start().await;
    broker.configure("in", json!({ "retryLimit": 1 })).await;
    let popped = leased(&broker, &["a", "b", "c", "d", "e"]).await;
    let m = &popped.messages;
    let bundles = vec![
        vec![ack_op(&m[0], "completed")],
        // Below the cursor by now: legal, and moves nothing.
        vec![ack_op(&m[0], "completed"), push_op("out", "p", "x")],
        vec![ack_op(&m[1], "dlq")],
        // The lease is gone with the dead letter.
        vec![ack_op(&m[2], "completed")],
        vec![leaseless_op(&m[2], "failed")],
        vec![leaseless_op(&m[2], "failed")],
        vec![leaseless_op(&m[3], "completed")],
    ];
    let answers = fused(&broker, bundles).await;
    let told: Vec<bool> = answers.iter().map(|a| a["success"] == true).collect();
    assert_eq!(told, [true, true, true, false, true, true, true], "{answers:?}");
    let letters = broker.db.dead_letters().await;
    let filed: Vec<_> = letters.iter().map(|l| (l.transaction_id.as_str(), l.retry_count)).collect();
    assert_eq!(filed, [("b", 0), ("c", 1)]);
    let now = broker.db.cursor("in", "p", GROUP).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (3, false, 0));
    assert_eq!(super::pop(&broker, "in", "p").await.ids(), ["e"]);
}

/// Two bundles with the same new id: exactly one commits (I9, I10), whichever broker they go to.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_two_bundles_with_one_id_one_commits() {
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    for round in 0..20 {
        let mut sent = JoinSet::new();
        for n in 0..6 {
            let client = if n % 2 == 0 { (*broker).clone() } else { (*other).clone() };
            let operations =
                [push_op("own", &format!("p{n}"), &format!("r{round}")), push_op("q", "p", &format!("m{round}"))];
            sent.spawn(async move { reply(&client, &operations).await.expect(200).json() });
        }
        let answers: Vec<Value> = sent.join_all().await;
        assert_eq!(answers.iter().filter(|a| a["success"] == true).count(), 1, "{answers:?}");
        assert!(answers.iter().all(|a| a["success"] == true || a["reason"] == "duplicate"), "{answers:?}");
    }
    let expected: Vec<String> = (0..20).map(|n| format!("m{n}")).collect();
    assert_eq!(stored(&broker, "q", "p").await, expected);
    let own: usize = {
        let mut count = 0;
        for n in 0..6 {
            count += stored(&broker, "own", &format!("p{n}")).await.len();
        }
        count
    };
    assert_eq!(own, 20, "the refused bundles left nothing elsewhere");
}

/// A cheap shuffle: the order of hashes.
fn shuffled<T>(mut of: Vec<T>, seed: u64) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for at in (1..of.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        of.swap(at, (state >> 33) as usize % (at + 1));
    }
    of
}

/// Lock order (§2.6): pushes and acks over the same partitions in any order, beside plain pushes and acks, on two brokers.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn bundles_in_opposite_orders_never_deadlock_and_all_commit() {
    const WORKERS: u64 = 8;
    const ROUNDS: u64 = 12;
    const LANES: usize = 6;
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    let lanes: Vec<String> = (0..LANES).map(|n| format!("p{n}")).collect();
    for lane in &lanes {
        broker.push_ids("in", lane, ["seed"]).await;
    }
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let client: Client = if worker % 2 == 0 { (*broker).clone() } else { (*other).clone() };
        let lanes = lanes.clone();
        workers.spawn(async move {
            let group = format!("g{worker}");
            let pop = Pop::queue("in").group(&group).all().batch(1000).partitions(LANES as i64);
            let mut acked = 0;
            for round in 0..ROUNDS {
                let popped = client.pop(&pop).await;
                acked += popped.messages.len();
                let mut operations = ack_ops(&popped, "completed");
                operations.extend(lanes.iter().map(|lane| push_op("in", lane, &format!("{worker}-{round}-{lane}"))));
                let answer = reply(&client, &shuffled(operations, worker * 1000 + round)).await.expect(200).json();
                assert_eq!(answer["success"], true, "{answer}");
                client.push_ids("in", &lanes[round as usize % LANES], [format!("plain-{worker}-{round}")]).await;
                let popped = client.pop(&pop.clone().batch(3)).await;
                acked += popped.messages.len();
                let results = client.ack(&group, shuffled(popped.items("completed"), round)).await;
                assert!(results.iter().all(|r| r.success), "{results:?}");
            }
            loop {
                let popped = client.pop(&pop).await;
                if popped.is_empty() && acked > 0 {
                    return acked;
                }
                acked += popped.messages.len();
                let answer = reply(&client, &shuffled(ack_ops(&popped, "completed"), acked as u64)).await.json();
                assert_eq!(answer["success"], true, "{answer}");
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.unwrap();
    }
    assert_eq!(broker.db.deadlocks().await, 0);
    let mut all = 0;
    for lane in &lanes {
        let ids = stored(&broker, "in", lane).await;
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len(), "nothing twice");
        assert_eq!(broker.db.last_offset("in", lane).await, Some(ids.len() as i64 - 1), "dense");
        for worker in 0..WORKERS {
            let own: Vec<u64> = ids
                .iter()
                .filter_map(|id| id.strip_prefix(&format!("{worker}-"))?.split('-').next()?.parse().ok())
                .collect();
            assert_eq!(own, (0..ROUNDS).collect::<Vec<_>>(), "all, in order");
        }
        all += ids.len();
    }
    assert_eq!(all as u64, LANES as u64 + WORKERS * ROUNDS * (LANES as u64 + 1));
}

/// A row that somebody else holds delays the bundles that need it, and no others for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_locked_row_fails_its_own_bundle_only() {
    let broker = TestBroker::impatient(crate::harness::Road::Fused).await;
    for queue in ["held", "free"] {
        broker.push_ids(queue, "p", ["first"]).await;
    }
    let holder = hold(&broker, "held").await;
    let mut sent = JoinSet::new();
    for n in 0..8 {
        let client: Client = (*broker).clone();
        let queue = if n % 4 == 0 { "held" } else { "free" };
        sent.spawn(async move {
            (queue, reply(&client, &[push_op(queue, "p", &format!("m{n}"))]).await.expect(200).json())
        });
    }
    for (queue, answer) in sent.join_all().await {
        assert_eq!(answer["success"], queue == "free", "{answer}");
    }
    holder.rollback().await.unwrap();
    super::commits(&broker, &[push_op("held", "p", "m0")]).await;
    assert_eq!(stored(&broker, "held", "p").await, ["first", "m0"]);
}
