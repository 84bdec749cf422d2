//! The request and its answer: shape, index space, status codes (§2.1, §2.8, §2.10, §2.11).

use serde_json::{Value, json};

use super::{GROUP, ack_op, commits, dump, leased, leaseless_op, push_op, reply};
use crate::harness::{Broker, Database, PATIENCE, Pop, Road, TestBroker, eventually, keys_of, member};

fn keys(value: &str) -> Vec<String> {
    keys_of(value)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_lists_operations_in_request_order_with_the_keys_of_the_specification() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, &["a", "b"]).await;
    let items = json!([{ "queue": "out", "payload": 1 }, { "queue": "out", "transactionId": "o2", "data": 2 }]);
    let operations = [
        ack_op(&popped.messages[0], "completed"),
        json!({ "type": "push", "items": items }),
        json!({ "type": "push", "items": [] }),
        ack_op(&popped.messages[1], "completed"),
        push_op("out", "x", "o3"),
    ];
    let answer = reply(&broker, &operations).await.expect(200);
    assert_eq!(answer.headers["content-type"], "application/json");
    assert_eq!(keys(&answer.text), ["transactionId", "success", "results"]);
    let body = answer.json();
    let results = body["results"].as_array().unwrap();
    let shape: Vec<_> = results.iter().map(|r| (r["index"].as_i64().unwrap(), r["type"].as_str().unwrap())).collect();
    assert_eq!(shape, [(0, "ack"), (1, "push"), (2, "push"), (3, "ack"), (4, "push")]);
    let raw: Vec<Box<serde_json::value::RawValue>> = serde_json::from_str(&member(&answer.text, "results")).unwrap();
    assert_eq!(keys(raw[0].get()), ["index", "type", "success", "transactionId", "error", "dlq"]);
    assert_eq!(keys(raw[1].get()), ["index", "type", "success", "transactionId", "messageId", "queueName"]);
    assert_eq!(
        results[0],
        json!({"index": 0, "type": "ack", "success": true, "transactionId": "a", "error": null, "dlq": false})
    );
    assert_eq!((&results[2]["transactionId"], &results[2]["queueName"]), (&json!("o2"), &json!("out")));
    assert_eq!(results[1]["transactionId"], results[1]["messageId"], "an id that was left out is the message's");
    for id in [&body["transactionId"], &results[1]["messageId"], &results[2]["messageId"]] {
        let id: uuid::Uuid = id.as_str().unwrap().parse().unwrap();
        assert_eq!(id.get_version_num(), 7);
    }
    assert!(results.iter().all(|r| r.get("messageId") != Some(&body["transactionId"])), "it is no message's id");
}

/// Taken for absent, a name that is no Unicode would put the message into another partition or past its deduplication.
#[tokio::test(flavor = "multi_thread")]
async fn a_pushed_name_that_is_no_unicode_is_refused_and_not_replaced_by_a_default() {
    let broker = TestBroker::start().await;
    for field in ["queue", "partition", "transactionId"] {
        for flat in [true, false] {
            let mut item = json!({ "queue": "out", "partition": "p", "transactionId": "x", "payload": 1 });
            item[field] = json!("ODD");
            let operation = if flat {
                item["type"] = json!("push");
                item
            } else {
                json!({ "type": "push", "items": [item] })
            };
            let body = json!({ "operations": [push_op("out", "p", "y"), operation] });
            let body = body.to_string().replace("ODD", r"id-\ud83d");
            let answer = broker.post("/api/v1/transaction", body).await.expect(400).json();
            assert_eq!((&answer["success"], &answer["reason"]), (&json!(false), &json!("bad_request")), "{answer}");
            assert!(answer["error"].as_str().unwrap().contains(&format!("{field} must be")), "{answer}");
        }
    }
    assert!(broker.db.queue_names().await.is_empty(), "nothing has happened");
}

/// §11 Q1.
#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_of_nothing_commits() {
    let broker = TestBroker::start().await;
    for body in [
        json!({ "operations": [] }),
        json!({ "operations": [{ "type": "push", "items": [] }], "kv": null, "timers": [], "requiredLeases": null }),
    ] {
        let answer = broker.post_json("/api/v1/transaction", &body).await.expect(200).json();
        assert_eq!((&answer["success"], &answer["results"]), (&json!(true), &json!([])), "{answer}");
    }
}

/// §2.10: a shape error is a 400 in the envelope of §2.8, and nothing has happened, valid operations before it included.
#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_bundle_is_refused_whole() {
    let broker = TestBroker::start().await;
    let before = dump(&broker.db).await;
    let good = push_op("q", "p", "a").to_string();
    for (body, words) in [
        ("{".to_owned(), "bad body:"),
        ("[]".to_owned(), "bad body:"),
        ("{}".to_owned(), "operations"),
        (r#"{"operations":{}}"#.to_owned(), "operations"),
        (
            format!(r#"{{"operations":[{good},{{"queue":"q"}}]}}"#),
            "segments transaction supports only push and ack operations",
        ),
        (
            format!(r#"{{"operations":[{good},{{"type":"kv"}}]}}"#),
            "segments transaction supports only push and ack operations",
        ),
        (format!(r#"{{"operations":[{good},{{"type":"push"}}]}}"#), "operations[1].queue"),
        (
            format!(r#"{{"operations":[{good},{{"type":"push","items":[{{"queue":7}}]}}]}}"#),
            "operations[1].items[0].queue",
        ),
        (format!(r#"{{"operations":[{good}],"kv":{{}}}}"#), "kv"),
        (format!(r#"{{"operations":[{good}],"timers":1}}"#), "timers"),
        (format!(r#"{{"operations":[{good}],"kv":[{{"op":"get","ns":"n","key":"k"}}]}}"#), "nothing was written"),
        (format!(r#"{{"operations":[{good}],"timers":[{{"op":"cancel"}}]}}"#), "nothing was written"),
    ] {
        let answer = broker.post("/api/v1/transaction", body.clone()).await.expect(400);
        assert_eq!(keys(&answer.text).len(), 5, "{}", answer.text);
        let answer = answer.json();
        let expected: (Value, Value, Value) = (json!(false), json!("bad_request"), json!([]));
        assert_eq!(
            (&answer["success"], &answer["reason"], &answer["results"]),
            (&expected.0, &expected.1, &expected.2)
        );
        assert!(answer["error"].as_str().unwrap().contains(words), "{body}: {answer}");
        assert!(answer["transactionId"].is_string());
    }
    assert_eq!(dump(&broker.db).await, before);
    let too_long = "x".repeat(1025);
    for field in ["queue", "partition", "transactionId"] {
        let mut item = json!({ "type": "push", "queue": "q" });
        item[field] = json!(too_long);
        let answer = reply(&broker, &[item]).await.expect(400).json();
        assert!(answer["error"].as_str().unwrap().contains(field), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_methods_are_no_such_route() {
    let broker = TestBroker::start().await;
    let answer = broker.get("/api/v1/transaction").await.expect(404).json();
    assert_eq!(answer["code"], "no_such_route");
}

/// §11 Q7, and never spooled: nothing is there when the database is back.
#[tokio::test(flavor = "multi_thread")]
async fn without_a_database_a_bundle_is_answered_503_in_the_envelope() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.push_ids("q", "p", ["a"]).await;
    proxy.go_down();
    let answer = reply(&broker, &[push_op("q", "p", "b")]).await.expect(503);
    assert!(answer.headers.contains_key("retry-after"));
    let answer = answer.json();
    assert_eq!(
        (&answer["success"], &answer["reason"], &answer["results"]),
        (&json!(false), &json!("db_error"), &json!([]))
    );
    proxy.come_back();
    eventually(PATIENCE, || broker.is_healthy()).await;
    assert_eq!(broker.db.last_offset("q", "p").await, Some(0));
}

/// §2.10, README ruling 5: past the bound, 429 and nothing done; below it, bundles wait.
#[tokio::test(flavor = "multi_thread")]
async fn an_overloaded_broker_refuses_bundles_with_429() {
    let db = Database::migrated().await;
    let variables = [("DATABASE_URL", db.url.as_str()), ("REGENT_REQUESTS_WAITING_MAX", "2")];
    let broker = Broker::from_environment(variables).await.unwrap();
    broker.push_ids("q", "p", ["first"]).await;
    let mut holder = db.pool.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM queen.log_partitions FOR UPDATE").execute(&mut *holder).await.unwrap();
    let mut sent = tokio::task::JoinSet::new();
    for n in 0..12 {
        let client = (*broker).clone();
        sent.spawn(async move { (n, reply(&client, &[push_op("q", "p", &format!("m{n}"))]).await) });
    }
    // One to four are under way or wait; the others are refused at once.
    let mut refused = Vec::new();
    while refused.len() < 8 {
        let (n, answer) = sent.join_next().await.unwrap().unwrap();
        assert_eq!(answer.status, 429, "{}", answer.text);
        assert!(answer.headers.contains_key("retry-after"));
        assert_eq!(answer.json()["success"], false);
        refused.push(format!("m{n}"));
    }
    holder.rollback().await.unwrap();
    while let Some(done) = sent.join_next().await {
        let (n, answer) = done.unwrap();
        match answer.status {
            200 => assert_eq!(answer.json()["success"], true, "{}", answer.text),
            other => assert_eq!(other, 429),
        }
        if answer.status == 429 {
            refused.push(format!("m{n}"));
        }
    }
    let stored = super::stored(&broker, "q", "p").await;
    assert_eq!(stored.len(), 1 + 12 - refused.len());
    assert!(refused.iter().all(|id| !stored.contains(id)), "refused, and stored: {stored:?}");
}

/// §2.11: a retry of a committed bundle says so; one that only acks, without a lease, succeeds.
#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_sent_again_writes_nothing_twice() {
    let broker = TestBroker::start().await;
    let popped = leased(&broker, &["a", "b"]).await;
    let push = [push_op("out", "p", "o")];
    commits(&broker, &push).await;
    super::rolls_back(&broker, &broker.db, json!({ "operations": push }), "duplicate", "QDUP").await;
    let acks: Vec<Value> = popped.messages.iter().map(|m| leaseless_op(m, "completed")).collect();
    commits(&broker, &acks).await;
    let before = dump(&broker.db).await;
    commits(&broker, &acks).await;
    assert_eq!(dump(&broker.db).await, before);
    // Q24: the first attempt released the lease; the check comes first.
    let with_lease: Vec<Value> = popped.messages.iter().map(|m| ack_op(m, "completed")).collect();
    super::rolls_back(&broker, &broker.db, json!({ "operations": with_lease }), "ack_rejected", "lease").await;
    assert!(broker.pop(&Pop::queue("in").group(GROUP)).await.is_empty());
}
