//! How ack bodies are read (`spec/ack.md` §1) and what an answer looks like (§2).

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::{GROUP, UNRESOLVABLE, cursor, done, leased, pop, refused};
use crate::harness::{AckResult, Pop, TestBroker, keys_of};

/// §2: both routes answer a top-level array of elements with exactly these keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_routes_answer_an_array_with_the_documented_keys() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, 3).await;
    let mut single = popped.messages[0].item("completed");
    single["consumerGroup"] = json!(GROUP);
    let single = broker.post_json("/api/v1/ack", &single).await.expect(200);
    let batch = json!({
        "consumerGroup": GROUP,
        "acknowledgments": [popped.messages[1].item("completed"), popped.messages[0].item("failed")],
    });
    let batch = broker.ack_reply(&batch).await.expect(200);
    for reply in [&single, &batch] {
        assert_eq!(reply.headers["content-type"], "application/json");
        for element in reply.decode::<Vec<Box<RawValue>>>() {
            let keys = ["index", "transactionId", "success", "error", "leaseReleased", "dlq", "noop"];
            assert_eq!(keys_of(element.get()), keys, "{}", reply.text);
        }
    }
    let results: Vec<AckResult> = batch.decode();
    assert_eq!(
        results.iter().map(|r| (r.index, r.transaction_id.as_str())).collect::<Vec<_>>(),
        [(0, "m1"), (1, "m0")]
    );
}

/// §1: no acknowledgments answer an empty array.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_batch_answers_an_empty_array() {
    let broker = TestBroker::start().await;
    assert_eq!(broker.ack_reply(&json!({ "acknowledgments": [] })).await.expect(200).text, "[]");
    assert_eq!(broker.ack_reply(&json!({ "acknowledgments": [], "consumerGroup": null })).await.expect(200).text, "[]");
}

/// §1, the status table: these mean completed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_words_for_completed() {
    let broker = TestBroker::start().await;
    let words = [json!("completed"), json!("success"), json!("acked"), json!("ok"), json!(null), json!(true)];
    for (n, word) in words.iter().enumerate() {
        let queue = format!("q{n}");
        broker.push_ids(&queue, "p", ["m"]).await;
        let popped = broker.pop(&Pop::queue(&queue)).await;
        let mut item = popped.messages[0].item("");
        item["status"] = word.clone();
        let result = broker.ack_one("", item).await;
        assert!(done(&result, true), "{word}: {result:?}");
        assert_eq!(broker.db.cursor(&queue, "p", "__QUEUE_MODE__").await.committed, 0, "{word}");
    }
    broker.push_ids("absent", "p", ["m"]).await;
    let popped = broker.pop(&Pop::queue("absent")).await;
    let mut item = popped.messages[0].item("");
    item.as_object_mut().unwrap().remove("status");
    assert!(done(&broker.ack_one("", item).await, true));
}

/// §1: every other word is a charged failure, and the words are case-sensitive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_other_word_is_a_failure() {
    let broker = TestBroker::start().await;
    let words = ["failed", "", "Completed", "COMPLETED", "nack", "Retry", "DLQ", " completed", "error"];
    let words = words.iter().map(|word| json!(word)).chain([json!(false)]);
    for (n, word) in words.enumerate() {
        let queue = format!("q{n}");
        broker.push_ids(&queue, "p", ["m"]).await;
        let popped = broker.pop(&Pop::queue(&queue)).await;
        let mut item = popped.messages[0].item("");
        item["status"] = word.clone();
        let result = broker.ack_one("", item).await;
        assert!(done(&result, true), "{word}: {result:?}");
        let cursor = broker.db.cursor(&queue, "p", "__QUEUE_MODE__").await;
        assert_eq!((cursor.committed, cursor.batch_retry_count), (-1, 1), "{word}");
    }
}

/// §1: in a batch only the top-level group counts; in a single ack it stands with the item. Empty is queue mode.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_group_stands_at_the_top() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, 1).await;
    let mut item = popped.messages[0].item("completed");
    item["consumerGroup"] = json!(GROUP);
    for group in [json!(null), json!("")] {
        let reply = broker.ack_reply(&json!({ "consumerGroup": group, "acknowledgments": [item] })).await.expect(200);
        let results: Vec<AckResult> = reply.decode();
        assert!(refused(&results[0], "consumer not found"), "the item's own group is ignored: {results:?}");
    }
    let result = broker.ack_one(GROUP, popped.messages[0].item("completed")).await;
    assert!(done(&result, true), "{result:?}");
}

/// §1: `null` is absent in every optional field.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn null_is_absent() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    let popped = broker.pop(&Pop::queue("q")).await;
    let mut item = popped.messages[0].item("completed");
    item["error"] = Value::Null;
    item["consumerGroup"] = Value::Null;
    assert!(done(&broker.ack_one("", item).await, false));
    let mut item = popped.messages[1].item("completed");
    item["leaseId"] = Value::Null;
    item["error"] = Value::Null;
    item["status"] = Value::Null;
    let body = json!({ "consumerGroup": null, "acknowledgments": [item] });
    let results: Vec<AckResult> = broker.ack_reply(&body).await.expect(200).decode();
    assert!(done(&results[0], true), "a lease-less ack to the end of the batch: {results:?}");
}

/// §1: bodies without an array of objects are refused whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_without_an_array_of_objects_are_refused() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, 2).await;
    let good = popped.messages[0].item("completed");
    for body in [
        "".to_owned(),
        "{".to_owned(),
        "not json".to_owned(),
        "[]".to_owned(),
        "null".to_owned(),
        "{}".to_owned(),
        r#"{"acknowledgments":null}"#.to_owned(),
        r#"{"acknowledgments":{}}"#.to_owned(),
        r#"{"acknowledgments":"x"}"#.to_owned(),
        format!(r#"{{"consumerGroup":"g","acknowledgments":[{good},7]}}"#),
        format!(r#"{{"consumerGroup":"g","acknowledgments":[{good},null]}}"#),
        format!(r#"{{"consumerGroup":"g","acknowledgments":[{good},[]]}}"#),
    ] {
        println!("{body}");
        broker.post("/api/v1/ack/batch", body).await.expect_refusal(&["bad body: "]);
    }
    for body in ["", "{", "[]", "null", "7", "\"x\""] {
        broker.post("/api/v1/ack", body).await.expect_refusal(&["bad body: "]);
    }
    assert_eq!(cursor(&broker).await.committed, -1, "nothing applied");
}

/// §1 [R]: a field of a wrong type names item and field, and nothing is applied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mistyped_field_is_named_and_nothing_is_applied() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, 2).await;
    let good = popped.messages[0].item("completed");
    for (field, value) in [
        ("transactionId", json!(7)),
        ("transactionId", json!({})),
        ("partitionId", json!(1)),
        ("partitionId", json!([])),
        ("status", json!(1)),
        ("status", json!({})),
        ("leaseId", json!(5)),
        ("leaseId", json!(false)),
        ("error", json!(3)),
        ("error", json!(["why"])),
    ] {
        let mut bad = popped.messages[1].item("completed");
        bad[field] = value;
        println!("{bad}");
        let body = json!({ "consumerGroup": GROUP, "acknowledgments": [good, bad] });
        broker.ack_reply(&body).await.expect_refusal(&["1", field]);
        bad["consumerGroup"] = json!(GROUP);
        broker.post_json("/api/v1/ack", &bad).await.expect_refusal(&[field]);
    }
    let body = json!({ "consumerGroup": 5, "acknowledgments": [good] });
    broker.ack_reply(&body).await.expect_refusal(&["consumerGroup"]);
    let now = cursor(&broker).await;
    assert_eq!((now.committed, now.leased), (-1, true), "nothing applied");
}

/// §1, §6: addresses that name nothing are per-item errors, and the good items around them are carried out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_that_name_nothing_are_per_item_errors() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, 2).await;
    let at = |partition: Value, transaction: Value| {
        let mut item = popped.messages[0].leaseless("completed");
        item["partitionId"] = partition;
        item["transactionId"] = transaction;
        item
    };
    let good = popped.messages[0].item("completed");
    let here = json!(popped.partition_id);
    let mut nowhere = at(here.clone(), json!("m0"));
    nowhere.as_object_mut().unwrap().remove("partitionId");
    let items = vec![
        at(json!("not-a-uuid"), json!("m0")),
        at(json!(""), json!("m0")),
        nowhere,
        at(Value::Null, json!("m0")),
        at(json!(uuid::Uuid::new_v4()), json!("m0")),
        good,
        at(here.clone(), json!("")),
        at(here, json!("never pushed")),
    ];
    let results = broker.ack(GROUP, items).await;
    assert!(refused(&results[0], r#"invalid input syntax for type uuid: "not-a-uuid""#), "{results:?}");
    for result in &results[1..4] {
        assert!(refused(result, r#"invalid input syntax for type uuid: """#), "{result:?}");
    }
    assert!(refused(&results[4], "consumer not found"), "{results:?}");
    assert!(done(&results[5], false), "{results:?}");
    assert!(!results[6].success && results[6].error.as_deref() == Some(UNRESOLVABLE), "{results:?}");
    assert!(!results[7].success && results[7].error.as_deref() == Some(UNRESOLVABLE), "{results:?}");
    assert_eq!(results.iter().map(|r| r.index).collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
    assert_eq!(cursor(&broker).await.committed, 0);
}

/// §1, §3: awkward transaction ids are addressed exactly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn awkward_transaction_ids_are_addressed_exactly() {
    let broker = TestBroker::start().await;
    let ids = ["a/b", "a%2Fb", " spaced ", "na\u{ef}ve", "nai\u{308}ve", "😀", "\"quoted\"", "line\nbreak", "A", "a"];
    broker.push_ids("q", "p", ids).await;
    let popped = pop(&broker).await;
    assert_eq!(popped.ids(), ids);
    for (n, message) in popped.messages.iter().enumerate() {
        let result = broker.ack_one(GROUP, message.item("completed")).await;
        assert!(done(&result, n + 1 == ids.len()), "{result:?}");
        assert_eq!(result.transaction_id, ids[n]);
        assert_eq!(cursor(&broker).await.committed, n as i64);
    }
}
