//! `GET /api/v1/messages…` (`spec/admin.md` §5.1, §5.2, §5.4).

use serde_json::{Value, json};

use super::{half_consumed, has_keys};
use crate::harness::{Pop, TestBroker, encode};

const ROW: [&str; 22] = [
    "id",
    "transactionId",
    "txnHash",
    "partitionId",
    "partition",
    "queue",
    "queuePath",
    "namespace",
    "task",
    "status",
    "queueStatus",
    "busStatus",
    "traceId",
    "producerSub",
    "payloadAvailable",
    "segment",
    "createdAt",
    "leaseExpiresAt",
    "data",
    "payload",
    "isEncrypted",
    "queuePriority",
];

async fn list(broker: &TestBroker, query: &str) -> Value {
    broker.get(&format!("/api/v1/messages?{query}")).await.expect(200).json()
}

fn ids(body: &Value) -> Vec<&str> {
    body["messages"].as_array().unwrap().iter().map(|row| row["transactionId"].as_str().unwrap()).collect()
}

/// §5.1: every key, newest first, `total` is the page's length **[T]**.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_listed_newest_first() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "ns.job").await;
    let body = list(&broker, "queue=ns.job&limit=50").await;
    has_keys(&body, &["messages", "mode", "total"]);
    assert_eq!(body["total"], 7);
    assert_eq!(ids(&body), ["b0", "a5", "a4", "a3", "a2", "a1", "a0"]);
    assert_eq!(body["mode"], json!({ "hasQueueMode": false, "busGroupsCount": 1, "type": "bus" }));
    let rows = body["messages"].as_array().unwrap();
    rows.iter().for_each(|row| has_keys(row, &ROW));
    let statuses: Vec<&str> = rows.iter().map(|row| row["status"].as_str().unwrap()).collect();
    assert_eq!(statuses, ["pending", "pending", "pending", "processing", "dead_letter", "completed", "completed"]);
    let a4 = &rows[2];
    assert_eq!(a4["segment"], json!({ "seq": 0, "frameIdx": 4 }));
    assert_eq!((&a4["data"], &a4["payload"]), (&json!({ "id": "a4" }), &json!({ "id": "a4" })));
    assert_eq!((&a4["queuePath"], &a4["namespace"], &a4["task"]), (&json!("ns.job/a"), &json!("ns"), &json!("job")));
    assert_eq!(a4["busStatus"], json!({ "consumedBy": 0, "totalGroups": 1 }));
    assert_eq!(rows[6]["busStatus"], json!({ "consumedBy": 1, "totalGroups": 1 }));
    assert_eq!(a4["txnHash"].as_str().unwrap(), hex::encode(xxhash_rust::xxh3::xxh3_128(b"a4").to_be_bytes()));
    assert_eq!(a4["payloadAvailable"], true);
}

/// §5.1: filters, paging, the window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_listing_filters_and_pages() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "ns.job").await;
    broker.push_ids("other.thing", "a", ["x0"]).await;
    for (query, wanted) in [
        ("", vec!["x0", "b0", "a5", "a4", "a3", "a2", "a1", "a0"]),
        ("limit=2&offset=1", vec!["b0", "a5"]),
        ("queue=ns.job&limit=3&offset=5", vec!["a1", "a0"]),
        ("partition=a&limit=2", vec!["x0", "a5"]),
        ("queue=ns.job&partition=b", vec!["b0"]),
        ("namespace=other", vec!["x0"]),
        ("ns=other&consumerGroup=ignored", vec!["x0"]),
        ("namespace=ns&ns=other", vec!["b0", "a5", "a4", "a3", "a2", "a1", "a0"]),
        ("task=thing", vec!["x0"]),
        ("queue=ns.job&status=completed", vec!["a1", "a0"]),
        ("queue=ns.job&status=processing", vec!["a3"]),
        ("queue=ns.job&status=dead_letter", vec!["a2"]),
        ("queue=ns.job&status=pending&limit=2&offset=1", vec!["a5", "a4"]),
        ("status=nonsense", vec![]),
        ("queue=none", vec![]),
        ("limit=0", vec![]),
        ("from=2020-01-01T00:00:00Z&to=2020-01-02", vec![]),
        ("from=2020-01-01&limit=1", vec!["x0"]),
    ] {
        let body = list(&broker, query).await;
        assert_eq!(ids(&body), wanted, "{query}");
        assert_eq!(body["total"], wanted.len(), "{query}");
    }
    for (query, word) in [("limit=x", "limit"), ("offset=-1", "offset"), ("from=soon", "from"), ("to=later", "to")] {
        broker.get(&format!("/api/v1/messages?{query}")).await.expect_refusal(&[word]);
    }
}

/// §5.1: the default window is one hour; a segment that is gone leaves its hashes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_messages_need_a_window_and_lost_ones_have_no_payload() {
    let broker = TestBroker::start().await;
    // Longer than the message gets old: its hash would go otherwise.
    broker.configure("q", json!({ "dedupWindowSeconds": 86_400 })).await;
    broker.push_ids("q", "p", ["m"]).await;
    broker.db.execute("DELETE FROM queen.log_segments").await;
    let body = list(&broker, "queue=q").await;
    let row = &body["messages"][0];
    assert_eq!(row["payloadAvailable"], false);
    for key in ["id", "transactionId", "data", "payload", "traceId", "producerSub"] {
        assert!(row[key].is_null(), "{key}");
    }
    assert_eq!(row["txnHash"].as_str().unwrap().len(), 32);
    broker.db.age(7_200).await;
    assert_eq!(list(&broker, "queue=q").await["total"], 0);
    assert_eq!(list(&broker, "queue=q&from=2020-01-01").await["total"], 1);
}

/// A page is merged from many partitions in the order of their messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_merges_many_partitions() {
    let broker = TestBroker::start().await;
    for round in 0..3 {
        for n in 0..40 {
            broker.push_ids("q", &format!("p{n}"), [format!("{round}-{n}")]).await;
        }
    }
    let body = list(&broker, "queue=q&limit=100").await;
    let wanted: Vec<String> =
        (0..3).rev().flat_map(|round| (0..40).rev().map(move |n| format!("{round}-{n}"))).take(100).collect();
    assert_eq!(ids(&body), wanted);
}

/// §5.2: every key **[T]**; a message that a named group holds is processing **[T]**.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_message_in_detail() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "leaseTime": 42, "retryLimit": 7, "namespace": "n" })).await;
    let payload = json!({ "a": [1, 2.50, "x"], "big": 12345678901234567890_u64 });
    let item = json!({ "queue": "q", "partition": "p", "transactionId": "t/1 ü", "payload": payload });
    broker.push(json!([item])).await;
    let popped = broker.pop(&Pop::queue("q").group("g").all()).await;
    let target = format!("/api/v1/messages/{}/{}", popped.partition_id, encode("t/1 ü"));
    let body = broker.get(&target).await.expect(200).json();
    let mut keys = ROW.to_vec();
    keys.extend(["retryCount", "errorMessage", "queueConfig", "consumerGroups", "mode"]);
    has_keys(&body, &keys);
    assert_eq!((&body["transactionId"], &body["id"]), (&json!("t/1 ü"), &json!(popped.messages[0].id)));
    assert_eq!((&body["data"], &body["payload"]), (&payload, &payload));
    assert_eq!((&body["queue"], &body["partition"], &body["queuePath"]), (&json!("q"), &json!("p"), &json!("q/p")));
    assert_eq!(
        (&body["status"], &body["retryCount"], &body["errorMessage"]),
        (&json!("processing"), &json!(0), &Value::Null)
    );
    assert_eq!(body["queueConfig"]["leaseTime"], 42);
    let groups = body["consumerGroups"].as_array().unwrap();
    assert_eq!(
        (&groups[0]["name"], &groups[0]["group"], &groups[0]["consumed"]),
        (&json!("g"), &json!("g"), &json!(false))
    );
    broker.ack("g", popped.items("completed")).await;
    let body = broker.get(&target).await.expect(200).json();
    assert_eq!((&body["status"], &body["queueStatus"]), (&json!("completed"), &json!("pending")), "§17.10");
    assert_eq!(body["consumerGroups"][0]["consumed"], true);
}

/// §5.2: whatever is not there is one and the same 404.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_is_not_there_is_not_found() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let partition = broker.pop(&Pop::queue("q")).await.partition_id;
    let foreign = uuid::Uuid::new_v4();
    for address in
        [format!("{partition}/none"), format!("{foreign}/m"), "not-a-uuid/m".into(), format!("{partition}/a%00b")]
    {
        let reply = broker.get(&format!("/api/v1/messages/{address}")).await.expect(404);
        assert_eq!(reply.json(), json!({ "error": "Message not found" }), "{address}");
    }
    broker.db.execute("DELETE FROM queen.log_segments").await;
    broker.get(&format!("/api/v1/messages/{partition}/m")).await.expect(404);
}

/// §5.2: a purged hash is found by reading segments; §17.31: the newest of two; §17.11: a dead letter outlives its segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_is_found_without_its_hash_and_a_dead_letter_without_its_segment() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "dedupWindowSeconds": 0, "leaseTime": 60 })).await;
    for n in 0..3 {
        let item = json!({ "queue": "q", "partition": "p", "transactionId": "same", "payload": n });
        broker.push(json!([item])).await;
    }
    broker.push_ids("q", "p", ["dead"]).await;
    let popped = broker.pop(&Pop::queue("q").group("g").all()).await;
    let target = |id: &str| format!("/api/v1/messages/{}/{id}", popped.partition_id);
    assert_eq!(broker.get(&target("same")).await.expect(200).json()["data"], 2);
    let mut items = popped.items("completed");
    items[3] = popped.messages[3].item("dlq");
    items[3]["error"] = json!("broken");
    broker.ack("g", items).await;
    broker.db.execute("DELETE FROM queen.log_txns").await;
    assert_eq!(broker.get(&target("same")).await.expect(200).json()["data"], 2);
    let whole = broker.get(&target("dead")).await.expect(200).json();
    assert_eq!((&whole["status"], &whole["errorMessage"]), (&json!("dead_letter"), &json!("broken")));
    broker.db.execute("DELETE FROM queen.log_segments").await;
    let kept = broker.get(&target("dead")).await.expect(200).json();
    for key in
        ["status", "data", "transactionId", "id", "queue", "partition", "errorMessage", "retryCount", "createdAt"]
    {
        assert_eq!(kept[key], whole[key], "{key}");
    }
}
