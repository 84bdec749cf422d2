//! `POST /api/v1/partitions/changed` (`spec/admin.md` §4.7).

use serde_json::{Value, json};

use super::has_keys;
use crate::harness::TestBroker;

async fn ask(broker: &TestBroker, entries: Value) -> Value {
    broker.post_json("/api/v1/partitions/changed", &json!({ "entries": entries })).await.expect(200).json()
}

fn names(entry: &Value) -> Vec<&str> {
    entry["partitions"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

/// By name, page by page, without `since`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_are_enumerated_by_name() {
    let broker = TestBroker::start().await;
    for partition in ["c", "a", "e", "b", "d"] {
        broker.push_ids("q", partition, ["m"]).await;
    }
    let body = ask(&broker, json!([{ "queue": "q", "limit": 2 }, { "queue": "none" }])).await;
    has_keys(&body, &["safeTime", "safeTimeDegraded", "entries"]);
    assert_eq!(body["safeTimeDegraded"], false);
    let first = &body["entries"][0];
    has_keys(first, &["queue", "partitions", "next"]);
    has_keys(&first["partitions"][0], &["name", "lastOffset", "logStart", "lastWriteAt"]);
    assert_eq!((&first["partitions"][0]["lastOffset"], &first["partitions"][0]["logStart"]), (&json!(0), &json!(0)));
    assert_eq!(body["entries"][1], json!({ "queue": "none", "error": "UNKNOWN_TOPIC_OR_PARTITION" }));
    let (mut seen, mut next) = (Vec::new(), Value::Null);
    loop {
        let body = ask(&broker, json!([{ "queue": "q", "limit": 2, "after": next }])).await;
        seen.extend(names(&body["entries"][0]).into_iter().map(str::to_owned));
        next = body["entries"][0]["next"].clone();
        if next.is_null() {
            break;
        }
    }
    assert_eq!(seen, ["a", "b", "c", "d", "e"]);
}

/// With `since`: only what was written since, oldest write first; a cursor of the other ordering is refused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_are_enumerated_by_their_last_write() {
    let broker = TestBroker::start().await;
    for partition in ["c", "a", "b"] {
        broker.push_ids("q", partition, ["m"]).await;
    }
    let all = ask(&broker, json!([{ "queue": "q", "since": "1970-01-01T00:00:00Z", "limit": 1 }])).await;
    assert_eq!(names(&all["entries"][0]), ["c"]);
    let next = all["entries"][0]["next"].clone();
    let rest = ask(&broker, json!([{ "queue": "q", "since": "1970-01-01T00:00:00Z", "after": next }])).await;
    assert_eq!(names(&rest["entries"][0]), ["a", "b"]);
    assert!(rest["entries"][0]["next"].is_null());
    let since = rest["entries"][0]["partitions"][1]["lastWriteAt"].clone();
    let last = ask(&broker, json!([{ "queue": "q", "since": since }])).await;
    assert_eq!(names(&last["entries"][0]), ["b"]);
    for after in [next, json!("nonsense")] {
        let body = ask(&broker, json!([{ "queue": "q", "after": after }])).await;
        assert_eq!(body["entries"][0], json!({ "queue": "q", "error": "BAD_CURSOR" }));
    }
}

/// Bad requests are refused as a whole; nothing is asked for: only the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_entries_are_refused() {
    let broker = TestBroker::start().await;
    for body in [json!({}), json!({ "entries": [] })] {
        let body = broker.post_json("/api/v1/partitions/changed", &body).await.expect(200).json();
        assert_eq!(body["entries"], json!([]));
    }
    let refused = async |entries: Value, word: &str| {
        let reply = broker.post_json("/api/v1/partitions/changed", &json!({ "entries": entries })).await;
        reply.expect_refusal(&[word]);
    };
    refused(json!([{ "queue": "" }]), "queue").await;
    refused(json!([{ "since": "2020-01-01" }]), "queue").await;
    refused(json!([{ "queue": "q", "since": "yesterday-ish" }]), "yesterday-ish").await;
    refused(json!(vec![json!({ "queue": "q" }); 65]), "64").await;
    broker.post("/api/v1/partitions/changed", "{").await.expect_refusal(&["bad body"]);
}
