//! Push operations (§2.2).

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{commits, push_op, reply, rolls_back, stored};
use crate::harness::{Broker, Database, Pop, TestBroker};

async fn read(broker: &TestBroker, queue: &str) -> Vec<crate::harness::Message> {
    broker.pop(&Pop::queue(queue).group("r").all().batch(100).partitions(10).auto_ack()).await.messages
}

#[tokio::test(flavor = "multi_thread")]
async fn an_item_is_nested_or_flat_and_its_fields_have_defaults() {
    let broker = TestBroker::start().await;
    let trace = "0198f0aa-4000-7000-8000-00000000aaaa";
    let operations = [
        json!({ "type": "push", "queue": "q", "payload": { "flat": true }, "transactionId": "t1" }),
        json!({ "type": "push", "items": [
            { "queue": "q", "partition": 5, "payload": null, "data": 1, "transactionId": "t2" },
            { "queue": "q", "data": [1, 2], "transactionId": "t3", "traceId": trace.to_uppercase() },
            { "queue": "q", "transactionId": "t4", "traceId": "no uuid" },
            { "queue": "q", "transactionId": "" }] }),
    ];
    let results = commits(&broker, &operations).await;
    let messages = read(&broker, "q").await;
    let data: Vec<&Value> = messages.iter().map(|m| &m.data).collect();
    assert_eq!(data, [&json!({ "flat": true }), &Value::Null, &json!([1, 2]), &json!({}), &json!({})]);
    assert!(messages.iter().all(|m| m.partition == "Default"));
    let traces: Vec<Option<&str>> = messages.iter().map(|m| m.trace_id.as_deref()).collect();
    assert_eq!(traces, [None, None, Some(trace), None, None]);
    for (message, result) in messages.iter().zip(&results) {
        assert_eq!(result["messageId"], json!(message.id));
        assert_eq!(result["transactionId"], json!(message.transaction_id));
    }
    assert_eq!(messages[4].id, messages[4].transaction_id);
    let ids: BTreeSet<&str> = messages.iter().map(|m| m.id.as_str()).collect();
    assert_eq!(ids.len(), 5);
}

/// An explicit empty partition names the lane `""`.
#[tokio::test(flavor = "multi_thread")]
async fn an_empty_partition_name_is_a_name() {
    let broker = TestBroker::start().await;
    commits(&broker, &[json!({ "type": "push", "queue": "q", "partition": "", "payload": 1 })]).await;
    assert_eq!(broker.db.last_offset("q", "").await, Some(0));
    assert_eq!(broker.db.last_offset("q", "Default").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_bundle_pushes_to_several_queues_and_partitions_in_order() {
    let broker = TestBroker::start().await;
    let operations: Vec<Value> =
        (0..60).map(|n| push_op(["a", "b", "c"][n % 3], ["x", "y"][n / 3 % 2], &format!("m{n:02}"))).collect();
    commits(&broker, &operations).await;
    for (q, queue) in ["a", "b", "c"].into_iter().enumerate() {
        for (p, partition) in ["x", "y"].into_iter().enumerate() {
            let expected: Vec<String> =
                (0..60).filter(|n| n % 3 == q && n / 3 % 2 == p).map(|n| format!("m{n:02}")).collect();
            assert_eq!(stored(&broker, queue, partition).await, expected, "{queue}/{partition}");
        }
    }
}

/// First wins, whatever the queue's window (§11 Q22): not an error, resolved before the database.
#[tokio::test(flavor = "multi_thread")]
async fn an_id_twice_in_one_bundle_writes_once_and_says_so() {
    let broker = TestBroker::start().await;
    broker.configure("off", json!({ "dedupWindowSeconds": 0 })).await;
    for queue in ["on", "off"] {
        let results = commits(
            &broker,
            &[
                push_op(queue, "p", "k"),
                push_op(queue, "other", "k"),
                push_op(queue, "p", "k"),
                push_op(queue, "p", "l"),
            ],
        )
        .await;
        assert_eq!(results[2]["duplicate"], true);
        assert_eq!(results[2]["messageId"], results[0]["messageId"]);
        assert_eq!(results[2]["success"], true);
        for nth in [0, 1, 3] {
            assert!(results[nth].get("duplicate").is_none(), "{}", results[nth]);
        }
        assert_ne!(results[1]["messageId"], results[0]["messageId"]);
        assert_eq!(stored(&broker, queue, "p").await, ["k", "l"]);
    }
}

/// I9 inside bundles: a stored id rolls the whole call back, by plain push or by another bundle.
#[tokio::test(flavor = "multi_thread")]
async fn a_stored_id_inside_the_window_rolls_the_bundle_back() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p\"1", ["plain"]).await;
    commits(&broker, &[push_op("q", "p\"1", "bundle")]).await;
    for id in ["plain", "bundle"] {
        let body = json!({ "operations": [push_op("new", "p", "x"), push_op("q", "p\"1", "fresh"), push_op("q", "p\"1", id)] });
        broker.push_ids("new", "p", [format!("exists-{id}")]).await;
        let words = "QDUP duplicate messages in queue \"q\" partition \"p\"1\"; transaction rolled back";
        rolls_back(&broker, &broker.db, body, "duplicate", words).await;
    }
    assert_eq!(stored(&broker, "q", "p\"1").await, ["plain", "bundle"]);
    // Another partition is another scope, and so is the time after the window.
    commits(&broker, &[push_op("q", "p2", "plain")]).await;
    broker.db.age(3601).await;
    let broker = broker.restart().await;
    commits(&broker, &[push_op("q", "p\"1", "plain")]).await;
    // And a plain push sees what the bundle stored.
    let result =
        broker.push(json!([{ "queue": "q", "partition": "p\"1", "transactionId": "plain", "payload": 1 }])).await;
    assert_eq!(result[0].status, "duplicate");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_window_a_stored_id_is_stored_again() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    for _ in 0..2 {
        commits(&broker, &[push_op("q", "p", "a")]).await;
    }
    assert_eq!(stored(&broker, "q", "p").await, ["a", "a"]);
}

/// After the commit parked pops hear of it, here and on another broker.
#[tokio::test(flavor = "multi_thread")]
async fn a_parked_pop_wakes_for_a_bundle() {
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    broker.push_ids("q", "p", ["before"]).await;
    for client in [(*broker).clone(), (*other).clone()] {
        let wait = Pop::queue("q").group("w").all().auto_ack();
        while !client.pop(&wait).await.is_empty() {}
        let waiting = tokio::spawn({
            let client = client.clone();
            async move { client.pop(&Pop::queue("q").group("w").all().auto_ack().wait_ms(30_000)).await }
        });
        let id = uuid::Uuid::new_v4().to_string();
        commits(&broker, &[push_op("q", "p", &id)]).await;
        let woken = tokio::time::timeout(std::time::Duration::from_secs(10), waiting).await.expect("woken").unwrap();
        assert_eq!(woken.ids(), [id.as_str()]);
    }
}

/// `spec/security-operations.md` §4: as in a push, sealed with a key and refused without.
#[tokio::test(flavor = "multi_thread")]
async fn an_encrypting_queue_seals_the_payloads_of_bundles() {
    let broker = TestBroker::start().await;
    broker.configure("secret", json!({ "encryptionEnabled": true })).await;
    let answer = reply(&broker, &[push_op("plain", "p", "a"), push_op("secret", "p", "b")]).await.expect(200).json();
    assert_eq!((&answer["success"], &answer["reason"]), (&json!(false), &json!("db_error")), "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("QUEEN_ENCRYPTION_KEY"));
    assert_eq!(broker.db.last_offset("plain", "p").await, None);

    let db = Database::migrated().await;
    let key = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
    let with_key = Broker::from_environment([("DATABASE_URL", &db.url), ("QUEEN_ENCRYPTION_KEY", key)]).await.unwrap();
    with_key.configure("secret", json!({ "encryptionEnabled": true, "retryLimit": 0 })).await;
    let text = "nobody may read this";
    commits(&with_key, &[json!({ "type": "push", "queue": "secret", "partition": "p", "payload": text })]).await;
    let popped = with_key.pop(&Pop::queue("secret").group("g").all()).await;
    assert_eq!(popped.messages[0].data, json!(text));
    commits(&with_key, &[super::ack_op(&popped.messages[0], "failed")]).await;
    let letters = db.dead_letters().await;
    assert!(letters[0].payload.contains("authTag") && !letters[0].payload.contains(text), "as stored: {letters:?}");
}
