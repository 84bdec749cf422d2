//! What a push answers, and what it makes (`spec/push-pop.md` §2.2, §2.3, §4).

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::harness::{Pop, PushResult, TestBroker, keys_of, numbered};

/// §2.3: `201`, a top-level array, one element per item in request order, exactly these keys in this order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answer_has_one_result_per_item_in_order() {
    let broker = TestBroker::start().await;
    let items = json!([
        { "queue": "q", "partition": "a", "transactionId": "t0", "payload": 0 },
        { "queue": "q", "partition": "b", "transactionId": "t1", "payload": 1 },
        { "queue": "q", "partition": "a", "transactionId": "t2", "payload": 2 },
    ]);
    let reply = broker.push_body(json!({ "items": items }).to_string()).await.expect(201);
    assert_eq!(reply.headers["content-type"], "application/json");
    let texts: Vec<Box<serde_json::value::RawValue>> = reply.decode();
    for text in &texts {
        let keys = ["index", "message_id", "transaction_id", "queueName", "status", "offset"];
        assert_eq!(keys_of(text.get()), keys);
    }
    let results: Vec<PushResult> = reply.decode();
    let seen: Vec<_> = results.iter().map(|r| (r.index, r.transaction_id.as_str(), r.offset)).collect();
    assert_eq!(seen, [(0, "t0", Some(0)), (1, "t1", Some(0)), (2, "t2", Some(1))]);
    assert!(results.iter().all(|r| r.queue == "q" && r.status == "queued"));
}

/// §1.1, §2.1: ids are UUIDv7 in lower case; an absent, `null` or empty transaction id is the message id.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_absent_transaction_id_is_the_minted_message_id() {
    let broker = TestBroker::start().await;
    let items = json!([
        { "queue": "q", "payload": 0 },
        { "queue": "q", "transactionId": null, "payload": 1 },
        { "queue": "q", "transactionId": "", "payload": 2 },
        { "queue": "q", "transactionId": "", "payload": 3 },
    ]);
    let results = broker.push(items).await;
    for result in &results {
        assert_eq!(result.status, "queued");
        assert_eq!(result.transaction_id, result.message_id);
        let id = uuid::Uuid::parse_str(&result.message_id).unwrap();
        assert_eq!(id.get_version_num(), 7);
        assert_eq!(id.to_string(), result.message_id);
    }
    let popped = broker.pop(&Pop::queue("q")).await;
    let ids: Vec<&str> = popped.messages.iter().map(|m| m.id.as_str()).collect();
    assert_eq!(ids, results.iter().map(|r| r.message_id.as_str()).collect::<Vec<_>>());
    assert_eq!(popped.ids(), ids);
}

/// §2.1: absent, `null`, empty and "Default" are the same lane.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_absent_partition_is_default() {
    let broker = TestBroker::start().await;
    let items = json!([
        { "queue": "q", "payload": 0 },
        { "queue": "q", "partition": null, "payload": 1 },
        { "queue": "q", "partition": "", "payload": 2 },
        { "queue": "q", "partition": "Default", "payload": 3 },
    ]);
    let offsets: Vec<_> = broker.push(items).await.iter().map(|r| r.offset).collect();
    assert_eq!(offsets, [Some(0), Some(1), Some(2), Some(3)]);
    let popped = broker.pop(&Pop::partition("q", "Default")).await;
    assert_eq!(popped.partition, "Default");
    assert_eq!(popped.messages.len(), 4);
}

/// §2.1: no items touch nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_push_is_created_with_nothing() {
    let broker = TestBroker::start().await;
    let before = broker.db.row_counts().await;
    assert_eq!(broker.push_body(r#"{"items":[]}"#).await.expect(201).text, "[]");
    assert_eq!(broker.db.row_counts().await, before);
}

/// §2.1: the empty string is a legal queue name, and addressable nowhere but in bodies and results.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_empty_queue_name_is_legal() {
    let broker = TestBroker::start().await;
    let results = broker.push_ids("", "p", ["x"]).await;
    assert_eq!(results[0].queue, "");
    assert_eq!(broker.db.queue_names().await, [""]);
}

/// §2.1: every item uses its own address.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_body_may_hold_many_queues_and_partitions() {
    let broker = TestBroker::start().await;
    let mut items = Vec::new();
    for queue in ["q1", "q2", "q3"] {
        for partition in ["a", "b"] {
            for n in 0..3 {
                let id = format!("{queue}-{partition}-{n}");
                items.push(json!({ "queue": queue, "partition": partition, "transactionId": id, "payload": n }));
            }
        }
    }
    let mut interleaved: Vec<Value> = items.iter().step_by(2).cloned().collect();
    interleaved.extend(items.iter().skip(1).step_by(2).cloned());
    let results = broker.push(json!(interleaved)).await;
    assert!(results.iter().all(|r| r.status == "queued"));
    for queue in ["q1", "q2", "q3"] {
        for partition in ["a", "b"] {
            let popped = broker.pop(&Pop::partition(queue, partition)).await;
            let pushed: Vec<&str> = results
                .iter()
                .map(|r| r.transaction_id.as_str())
                .filter(|id| id.starts_with(&format!("{queue}-{partition}-")))
                .collect();
            assert_eq!(popped.ids(), pushed, "body order in {queue}/{partition}");
        }
    }
}

/// I7: offsets are dense from 0, per partition, over requests.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn offsets_are_dense_over_requests() {
    let broker = TestBroker::start().await;
    let mut next = 0;
    for round in 0..5 {
        let results = broker.push_ids("q", "p", numbered(&format!("r{round}-"), 0..(round + 1))).await;
        for result in results {
            assert_eq!(result.offset, Some(next));
            next += 1;
        }
        broker.push_ids("q", "other", [format!("o{round}")]).await;
    }
    assert_eq!(broker.db.last_offset("q", "p").await, Some(next - 1));
    assert_eq!(broker.db.last_offset("q", "other").await, Some(4));
}

/// I7, §1.3: concurrent pushes of one partition get dense, distinct offsets, a request's items are contiguous, and
/// pops deliver in offset order with monotone `createdAt`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_pushes_interleave_as_whole_requests() {
    let broker = TestBroker::start().await;
    let pushes = (0..24).map(|n| {
        let client = broker.clone();
        async move { client.push_ids("q", "p", numbered(&format!("{n}-"), 0..5)).await }
    });
    let mut by_offset = vec![String::new(); 120];
    for results in join_all(pushes).await {
        let first = results[0].offset.unwrap();
        for (n, result) in results.iter().enumerate() {
            assert_eq!(result.offset, Some(first + n as i64), "one request's items are contiguous");
            let slot = &mut by_offset[result.offset.unwrap() as usize];
            assert_eq!(slot, "", "one message per offset");
            slot.clone_from(&result.transaction_id);
        }
    }
    let popped = broker.pop(&Pop::queue("q").batch(1000)).await;
    assert_eq!(popped.ids(), by_offset);
    assert!(popped.messages.is_sorted_by_key(|m| m.created_at.clone()), "created_at is monotone (I7)");
}

/// §2.2 "Read your write": after `queued` the next `wait=false` pop sees the message, new partition or old.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pop_right_after_a_push_sees_it() {
    let broker = TestBroker::start().await;
    for n in 0..40 {
        let (partition, id) = (format!("p{}", n % 20), format!("m{n}"));
        broker.push_ids("q", &partition, [&id]).await;
        let popped = broker.pop(&Pop::queue("q").auto_ack()).await;
        assert_eq!(popped.ids(), [id.as_str()], "message {n}");
    }
}

/// §2.1: `traceId` is dropped, `producerSub` ignored, unknown keys ignored at every level.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trace_producer_and_unknown_keys_are_ignored() {
    let broker = TestBroker::start().await;
    let body = json!({
        "items": [{ "queue": "q", "payload": 1, "traceId": uuid::Uuid::new_v4(), "producerSub": "me", "extra": {} }],
        "also": [1, 2, 3],
    });
    broker.push_body(body.to_string()).await.expect(201);
    let popped = broker.pop(&Pop::queue("q")).await;
    assert_eq!(popped.messages[0].trace_id, None);
    assert_eq!(popped.messages[0].producer_sub, None);
}

/// §1.1: the content type is not inspected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_content_type_is_not_inspected() {
    let broker = TestBroker::start().await;
    let body = r#"{"items":[{"queue":"q","payload":1}]}"#;
    for content_type in ["Content-Type: text/plain\r\n", "Content-Type: application/xml\r\n", ""] {
        let request = format!(
            "POST /api/v1/push HTTP/1.1\r\nHost: r\r\nConnection: close\r\n{content_type}Content-Length: {}\r\n\r\n{body}",
            body.len(),
        );
        let reply = crate::harness::exchange(broker.address, request.as_bytes()).await;
        assert_eq!(reply.status, 201, "{content_type:?}");
    }
}

/// §4: the first push makes the queue with column defaults, lease time 60 and labels derived from the name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_push_makes_the_queue_with_derived_labels() {
    let broker = TestBroker::start().await;
    let cases = [("orders.created", "orders", "created"), ("a.b.c", "a", "b"), ("plain", "plain", ""), (".x", "", "x")];
    for (queue, _, _) in cases {
        broker.push_ids(queue, "p", ["1"]).await;
    }
    for (queue, namespace, task) in cases {
        let row: (String, String, i32, i32) = sqlx::query_as(
            "SELECT namespace, task, lease_time, dedup_window_seconds FROM queen.queues WHERE name = $1",
        )
        .bind(queue)
        .fetch_one(&broker.db.pool)
        .await
        .unwrap();
        assert_eq!(row, (namespace.to_owned(), task.to_owned(), 60, 3600), "{queue}");
    }
}

/// §2.2 no. 5: racing first pushes make one queue and one partition each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_first_pushes_make_each_partition_once() {
    let broker = TestBroker::start().await;
    let pushes = (0..30).map(|n| {
        let client = broker.clone();
        async move { client.push_ids("fresh", &format!("p{}", n % 3), [format!("m{n}")]).await }
    });
    join_all(pushes).await;
    let counts = broker.db.row_counts().await;
    assert_eq!((counts["queues"], counts["log_partitions"]), (1, 3));
    let popped = broker.pop(&Pop::queue("fresh").partitions(0)).await;
    let distinct: BTreeSet<&str> = popped.ids().into_iter().collect();
    assert_eq!((popped.messages.len(), distinct.len(), popped.partitions_claimed), (30, 30, 3));
}
