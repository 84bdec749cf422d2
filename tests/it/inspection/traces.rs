//! `/api/v1/traces…` (`spec/admin.md` §12).

use serde_json::{Value, json};

use super::has_keys;
use crate::harness::{Pop, TestBroker, encode};

async fn record(broker: &TestBroker, body: Value) -> String {
    let answer = broker.post_json("/api/v1/traces", &body).await.expect(201).json();
    has_keys(&answer, &["success", "traceId"]);
    assert_eq!(answer["success"], true);
    answer["traceId"].as_str().unwrap().to_owned()
}

async fn get(broker: &TestBroker, target: &str) -> Value {
    broker.get(target).await.expect(200).json()
}

/// Written in camelCase, read in snake_case **[T]**; defaults; order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_recorded_comes_back() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["t/1"]).await;
    let partition = broker.pop(&Pop::queue("q")).await.partition_id;
    let address = json!({ "transactionId": "t/1", "partitionId": partition });
    let with = |extra: Value| {
        let mut body = address.clone();
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let data = json!({ "step": "started", "n": 1.50 });
    let first = record(&broker, with(json!({ "data": data }))).await;
    record(
        &broker,
        with(json!({ "data": "x", "traceNames": ["one", "two", "one"], "eventType": "step", "consumerGroup": "g" })),
    )
    .await;
    record(&broker, with(json!({ "data": 3, "traceNames": "one", "consumerGroup": null }))).await;
    record(&broker, json!({ "transactionId": "u", "partitionId": partition, "data": [], "traceNames": ["one"] })).await;
    let traces = get(&broker, &format!("/api/v1/traces/{partition}/{}", encode("t/1"))).await["traces"].clone();
    assert_eq!(traces.as_array().unwrap().len(), 3);
    has_keys(&traces[0], &["id", "event_type", "data", "consumer_group", "worker_id", "created_at", "trace_names"]);
    assert_eq!((&traces[0]["id"], &traces[0]["data"]), (&json!(first), &data));
    assert_eq!((&traces[0]["event_type"], &traces[0]["consumer_group"]), (&json!("info"), &json!("__QUEUE_MODE__")));
    assert_eq!(traces[1]["trace_names"], json!(["one", "two"]));

    let named = get(&broker, "/api/v1/traces/by-name/one?limit=2&offset=1").await;
    has_keys(&named, &["traces", "total", "pagination"]);
    assert_eq!((&named["total"], &named["pagination"]), (&json!(3), &json!({ "limit": 2, "offset": 1 })));
    let row = &named["traces"][0];
    has_keys(
        row,
        &[
            "id",
            "transaction_id",
            "partition_id",
            "queue_name",
            "partition_name",
            "event_type",
            "data",
            "consumer_group",
            "worker_id",
            "created_at",
            "trace_names",
            "message_payload",
        ],
    );
    assert_eq!((&row["transaction_id"], &row["partition_id"]), (&json!("t/1"), &json!(partition)));
    assert_eq!((&row["queue_name"], &row["partition_name"], &row["data"]), (&json!("q"), &json!("p"), &json!(3)));

    let names = get(&broker, "/api/v1/traces/names?limit=200").await;
    has_keys(&names, &["trace_names", "total", "pagination"]);
    let one = &names["trace_names"][0];
    has_keys(one, &["trace_name", "trace_count", "message_count", "last_seen"]);
    assert_eq!((&one["trace_name"], &one["trace_count"], &one["message_count"]), (&json!("one"), &json!(3), &json!(2)));
    assert_eq!((&names["total"], &names["trace_names"][1]["trace_name"]), (&json!(2), &json!("two")));

    // A queue delete keeps its traces; by name they are hidden with their partition.
    broker.delete_queue("q").await;
    assert_eq!(get(&broker, "/api/v1/traces/by-name/one").await["total"], 0);
    let kept = get(&broker, &format!("/api/v1/traces/{partition}/{}", encode("t/1"))).await;
    assert_eq!(kept["traces"].as_array().unwrap().len(), 3);
}

/// A message is never asked for; what is missing is named.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_traces_are_refused() {
    let broker = TestBroker::start().await;
    let partition = uuid::Uuid::new_v4().to_string();
    record(&broker, json!({ "transactionId": "t", "partitionId": partition, "data": {}, "traceNames": 7 })).await;
    assert_eq!(get(&broker, &format!("/api/v1/traces/{partition}/t")).await["traces"].as_array().unwrap().len(), 1);
    for target in [format!("/api/v1/traces/{partition}/u"), "/api/v1/traces/no-uuid/t".into()] {
        assert_eq!(get(&broker, &target).await, json!({ "traces": [] }));
    }
    for (body, words) in [
        (json!({ "partitionId": partition, "data": 1 }), "transactionId and partitionId are required"),
        (
            json!({ "transactionId": "", "partitionId": partition, "data": 1 }),
            "transactionId and partitionId are required",
        ),
        (json!({ "transactionId": "t", "partitionId": partition }), "data is required"),
        (json!({ "transactionId": "t", "partitionId": "x", "data": 1 }), "partitionId"),
        (json!({ "transactionId": "t\0", "partitionId": partition, "data": 1 }), "transactionId"),
        (
            json!({ "transactionId": "t", "partitionId": partition, "data": 1, "traceNames": vec!["n"; 65] }),
            "traceNames",
        ),
    ] {
        broker.post_json("/api/v1/traces", &body).await.expect_refusal(&[words]);
    }
    broker.post("/api/v1/traces", "{").await.expect_refusal(&["bad body"]);
}
