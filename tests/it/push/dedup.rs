//! Exact deduplication inside its window (I9, `spec/push-pop.md` §2.5, §2.6).

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::harness::{Pop, PushResult, TestBroker, numbered};

fn item(partition: &str, id: &str, payload: i64) -> Value {
    json!({ "queue": "q", "partition": partition, "transactionId": id, "payload": payload })
}

fn statuses(results: &[PushResult]) -> Vec<(&str, Option<i64>)> {
    results.iter().map(|r| (r.status.as_str(), r.offset)).collect()
}

/// §2.3, §2.6: the duplicate carries the original's id and offset, and writes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_transaction_id_is_a_duplicate_of_the_original() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["before"]).await;
    let original = broker.push(json!([item("p", "same", 1)])).await.remove(0);
    let before = broker.db.row_counts().await;
    let again = broker.push(json!([item("p", "same", 2)])).await.remove(0);
    assert_eq!((again.status.as_str(), again.offset), ("duplicate", Some(1)));
    assert_eq!(again.message_id, original.message_id);
    assert_eq!(again.transaction_id, "same");
    assert_eq!(broker.db.row_counts().await, before, "a duplicate writes nothing");
    let popped = broker.pop(&Pop::queue("q")).await;
    assert_eq!(popped.ids(), ["before", "same"]);
    assert_eq!(popped.messages[1].data, json!(1));
}

/// §2.6: the scope is one partition of one queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_partition_or_queue_is_another_scope() {
    let broker = TestBroker::start().await;
    for (queue, partition) in [("q", "p"), ("q", "p2"), ("q2", "p")] {
        broker.push_ids(queue, partition, ["same"]).await;
    }
    let in_one_body = broker.push(json!([item("x", "t", 0), item("y", "t", 0), item("x", "t", 1)])).await;
    assert_eq!(statuses(&in_one_body), [("queued", Some(0)), ("queued", Some(0)), ("duplicate", Some(0))]);
}

/// §2.5: followers inside one request copy their leader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_inside_one_request_follow_the_first() {
    let broker = TestBroker::start().await;
    let results = broker
        .push(json!([item("p", "a", 0), item("p", "b", 1), item("p", "a", 2), item("p", "a", 3), item("p", "c", 4)]))
        .await;
    assert_eq!(
        statuses(&results),
        [("queued", Some(0)), ("queued", Some(1)), ("duplicate", Some(0)), ("duplicate", Some(0)), ("queued", Some(2))]
    );
    assert_eq!(results[2].message_id, results[0].message_id);
    assert_eq!(results[3].message_id, results[0].message_id);
    let popped = broker.pop(&Pop::queue("q")).await;
    assert_eq!(popped.messages.iter().map(|m| m.data.as_i64().unwrap()).collect::<Vec<_>>(), [0, 1, 4]);
}

/// §2.5: a leader that is itself a duplicate hands on the stored original.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_of_a_duplicate_carry_the_stored_id() {
    let broker = TestBroker::start().await;
    let original = broker.push_ids("q", "p", ["a"]).await.remove(0);
    let results = broker.push(json!([item("p", "a", 1), item("p", "a", 2)])).await;
    assert_eq!(statuses(&results), [("duplicate", Some(0)), ("duplicate", Some(0))]);
    assert!(results.iter().all(|r| r.message_id == original.message_id));
}

/// §2.6: a duplicate does not stop its neighbours; offsets stay dense (I7).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_neighbours_of_duplicates_are_stored_densely() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "c", "e"]).await;
    let items: Vec<Value> = ["a", "b", "c", "d", "e", "f"].iter().map(|id| item("p", id, 9)).collect();
    let results = broker.push(json!(items)).await;
    assert_eq!(
        statuses(&results),
        [
            ("duplicate", Some(0)),
            ("queued", Some(3)),
            ("duplicate", Some(1)),
            ("queued", Some(4)),
            ("duplicate", Some(2)),
            ("queued", Some(5)),
        ]
    );
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["a", "c", "e", "b", "d", "f"]);
}

/// §2.6: with window 0 two requests store twice, but one request still collapses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn window_zero_stores_again_but_collapses_inside_one_request() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    broker.push_ids("q", "p", ["t"]).await;
    broker.push_ids("q", "p", ["t"]).await;
    let results = broker.push(json!([item("p", "t", 1), item("p", "t", 2)])).await;
    assert_eq!(statuses(&results), [("queued", Some(2)), ("duplicate", Some(2))]);
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["t", "t", "t"]);
}

/// §2.6: racing requests at window 0 are never collapsed, whatever flush they share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn window_zero_never_collapses_across_racing_requests() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    let pushes = (0..8).map(|_| {
        let client = broker.clone();
        async move { client.push_ids("q", "p", ["t"]).await }
    });
    let offsets: BTreeSet<_> = join_all(pushes).await.iter().map(|r| r[0].offset).collect();
    assert_eq!(offsets.len(), 8);
}

/// §2.6: hashes are stored at window 0 too, and the earliest occurrence inside the window is the original.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_later_window_sees_what_was_pushed_without_one() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    let first = broker.push_ids("q", "p", ["t"]).await.remove(0);
    broker.push_ids("q", "p", ["t"]).await;
    broker.configure("q", json!({ "dedupWindowSeconds": 60 })).await;
    let again = broker.push(json!([item("p", "t", 1)])).await.remove(0);
    assert_eq!((again.status.as_str(), again.offset), ("duplicate", Some(0)));
    assert_eq!(again.message_id, first.message_id);
}

/// §2.6 "window test": measured from the original's commit, and a duplicate does not renew it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_window_runs_from_the_original_and_is_not_renewed() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 100 })).await;
    broker.push_ids("q", "p", ["t"]).await;
    broker.db.age(90).await;
    assert_eq!(statuses(&broker.push(json!([item("p", "t", 1)])).await), [("duplicate", Some(0))]);
    broker.db.age(20).await;
    assert_eq!(statuses(&broker.push(json!([item("p", "t", 2)])).await), [("queued", Some(1))]);
    assert_eq!(statuses(&broker.push(json!([item("p", "t", 3)])).await), [("duplicate", Some(1))]);
}

/// §2.6: several matches: the earliest *inside the window* is the original.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_occurrence_outside_the_window_is_not_the_original() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    broker.push_ids("q", "p", ["t"]).await;
    broker.db.age(500).await;
    let second = broker.push_ids("q", "p", ["t"]).await.remove(0);
    broker.push_ids("q", "p", ["t"]).await;
    broker.configure("q", json!({ "dedupWindowSeconds": 100 })).await;
    let again = broker.push(json!([item("p", "t", 1)])).await.remove(0);
    assert_eq!((again.status.as_str(), again.offset), ("duplicate", Some(1)));
    assert_eq!(again.message_id, second.message_id);
}

/// §5.3, §2.6: a changed window holds for the next push.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_window_takes_effect_at_once() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["t"]).await;
    broker.db.age(200).await;
    broker.configure("q", json!({ "dedupWindowSeconds": 100 })).await;
    assert_eq!(statuses(&broker.push(json!([item("p", "t", 1)])).await), [("queued", Some(1))]);
    broker.configure("q", json!({ "dedupWindowSeconds": 300 })).await;
    assert_eq!(statuses(&broker.push(json!([item("p", "t", 2)])).await), [("duplicate", Some(0))]);
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    assert_eq!(statuses(&broker.push(json!([item("p", "t", 3)])).await), [("queued", Some(2))]);
}

/// §10 no. 1: consumption is irrelevant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acked_original_still_matches() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["t"]).await;
    let popped = broker.pop(&Pop::queue("q")).await;
    assert!(broker.ack("", popped.items("completed")).await[0].success);
    assert_eq!(statuses(&broker.push(json!([item("p", "t", 1)])).await), [("duplicate", Some(0))]);
    assert!(broker.pop(&Pop::queue("q")).await.is_empty());
}

/// §2.6: an original whose segment is gone still matches, with the zero id and its offset.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_original_without_its_segment_matches_with_the_zero_id() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["t"]).await;
    broker.push_ids("q", "p", ["u"]).await;
    broker.db.execute("DELETE FROM queen.log_segments WHERE base_offset = 0").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 1").await;
    let again = broker.push(json!([item("p", "t", 1)])).await.remove(0);
    assert_eq!((again.status.as_str(), again.offset), ("duplicate", Some(0)));
    assert_eq!(again.message_id, uuid::Uuid::nil().to_string());
}

/// §2.6 "concurrency": exactly one of N racing pushes of one key is queued, and all carry one id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_pushes_of_one_key_queue_it_once() {
    let broker = TestBroker::start().await;
    for round in 0..10 {
        let id = format!("r{round}");
        let pushes = (0..8).map(|n| {
            let (client, body) = (broker.clone(), json!([item("p", &id, n)]));
            async move { client.push(body).await.remove(0) }
        });
        let results = join_all(pushes).await;
        let queued = results.iter().filter(|r| r.status == "queued").count();
        let duplicate = results.iter().filter(|r| r.status == "duplicate").count();
        assert_eq!((queued, duplicate), (1, 7), "{results:?}");
        let ids: BTreeSet<&str> = results.iter().map(|r| r.message_id.as_str()).collect();
        assert_eq!(ids.len(), 1);
        assert!(results.iter().all(|r| r.offset == Some(round)));
    }
}

/// I9, I7: overlapping batches in different orders store each key once, densely, and agree on every id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_overlapping_batches_store_each_key_once() {
    let broker = TestBroker::start().await;
    let ids = numbered("m", 0..60);
    let pushes = (0..8).map(|n| {
        let mut mine: Vec<Value> = ids.iter().skip(n * 3).take(30).map(|id| item("p", id, 0)).collect();
        if n % 2 == 1 {
            mine.reverse();
        }
        let client = broker.clone();
        async move { client.push(json!(mine)).await }
    });
    let mut by_key: BTreeMap<String, BTreeSet<(String, i64)>> = BTreeMap::new();
    let mut queued = 0;
    for result in join_all(pushes).await.into_iter().flatten() {
        queued += usize::from(result.status == "queued");
        by_key.entry(result.transaction_id).or_default().insert((result.message_id, result.offset.unwrap()));
    }
    assert_eq!((queued, by_key.len()), (51, 51));
    assert!(by_key.values().all(|originals| originals.len() == 1), "one original per key");
    let offsets: BTreeSet<i64> = by_key.values().flatten().map(|(_, offset)| *offset).collect();
    assert_eq!(offsets, (0..51).collect());
    assert_eq!(broker.pop(&Pop::queue("q").batch(1000)).await.messages.len(), 51);
}

/// §2.6: deleting a queue forgets its history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recreated_queue_has_no_history() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["t", "u"]).await;
    broker.delete_queue("q").await;
    let results = broker.push_ids("q", "p", ["t", "u"]).await;
    assert_eq!(results.iter().map(|r| r.offset).collect::<Vec<_>>(), [Some(0), Some(1)]);
}

/// §2.6: the verdict needs no memory: a restarted broker knows all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_broker_still_finds_duplicates() {
    let broker = TestBroker::start().await;
    let original = broker.push_ids("q", "p", ["t"]).await.remove(0);
    let broker = broker.restart().await;
    let again = broker.push(json!([item("p", "t", 1)])).await.remove(0);
    assert_eq!((again.status.as_str(), again.message_id), ("duplicate", original.message_id));
}

/// §2.6: a big batch of duplicates among a long history stays exact.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_are_found_across_many_segments() {
    let broker = TestBroker::start().await;
    for chunk in 0..20 {
        broker.push_ids("q", "p", numbered(&format!("c{chunk}-"), 0..50)).await;
    }
    let items: Vec<Value> = (0..20)
        .flat_map(|chunk| [item("p", &format!("c{chunk}-49"), 0), item("p", &format!("new{chunk}"), 0)])
        .collect();
    for (n, pair) in broker.push(json!(items)).await.chunks(2).enumerate() {
        assert_eq!((pair[0].status.as_str(), pair[0].offset), ("duplicate", Some(n as i64 * 50 + 49)));
        assert_eq!((pair[1].status.as_str(), pair[1].offset), ("queued", Some(1000 + n as i64)));
    }
}
