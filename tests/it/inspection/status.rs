//! `/api/v1/status/queues…` and `POST /api/v1/stats/refresh` (`spec/admin.md` §9.2, §9.3, §11).

use serde_json::{Value, json};

use super::{are_integers, half_consumed, has_keys};
use crate::harness::{PATIENCE, TestBroker, eventually};

async fn get(broker: &TestBroker, target: &str) -> Value {
    broker.get(target).await.expect(200).json()
}

fn names(body: &Value) -> Vec<&str> {
    body["queues"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap()).collect()
}

/// §9.2: exact filters, paging, name order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queues_are_filtered_and_paged() {
    let broker = TestBroker::start().await;
    for (queue, namespace, task) in [("d", "n1", "t1"), ("a", "n1", "t2"), ("c", "n2", "t1"), ("b", "n2", "t2")] {
        broker.configure(queue, json!({ "namespace": namespace, "task": task })).await;
    }
    for (query, wanted) in [
        ("", vec!["a", "b", "c", "d"]),
        ("?limit=2", vec!["a", "b"]),
        ("?limit=2&offset=3", vec!["d"]),
        ("?limit=0", vec![]),
        ("?namespace=n1", vec!["a", "d"]),
        ("?task=t1", vec!["c", "d"]),
        ("?namespace=n2&task=t2", vec!["b"]),
        ("?queue=c", vec!["c"]),
        ("?queue=", vec!["a", "b", "c", "d"]),
        ("?queue=nothing", vec![]),
    ] {
        let body = get(&broker, &format!("/api/v1/status/queues{query}")).await;
        assert_eq!(names(&body), wanted, "{query}");
    }
    let body = get(&broker, "/api/v1/status/queues?limit=7&offset=1").await;
    assert_eq!(body["pagination"], json!({ "limit": 7, "offset": 1 }));
    for (query, word) in [("limit=x", "limit"), ("offset=-1", "offset"), ("limit=1.5", "limit")] {
        broker.get(&format!("/api/v1/status/queues?{query}")).await.expect_refusal(&[word]);
    }
}

/// §9.2, §11: after a refresh the counts are exact; the row has its keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refresh_makes_the_counts_exact() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "q").await;
    for body in ["", "{}", "null", "nonsense"] {
        let done = broker.post("/api/v1/stats/refresh", body).await.expect(200).json();
        assert_eq!((&done["engine"], &done["segPartitions"]), (&json!("segments"), &json!(2)), "{body}");
        are_integers(&done, &["segPartitions", "queuesUpdated", "namespaces", "tasks", "elapsedMs"]);
    }
    let rows = get(&broker, "/api/v1/status/queues?limit=500").await;
    let row = &rows["queues"][0];
    has_keys(row, &["id", "name", "namespace", "task", "createdAt", "partitions", "messages"]);
    assert_eq!(row["messages"], json!({ "total": 7, "pending": 4, "processing": 1, "completed": 2, "deadLetter": 1 }));
}

/// §11: what no push, pop or ack of this broker changed is found by a refresh, and by the sweep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refresh_finds_what_happened_behind_the_brokers_back() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "q").await;
    broker.post("/api/v1/stats/refresh", "").await.expect(200);
    broker.db.expire_leases().await;
    broker.db.execute("DELETE FROM queen.dead_letters").await;
    broker.post("/api/v1/stats/refresh", "").await.expect(200);
    let messages = get(&broker, "/api/v1/status/queues").await["queues"][0]["messages"].clone();
    assert_eq!(
        (&messages["processing"], &messages["deadLetter"], &messages["completed"]),
        (&json!(0), &json!(0), &json!(3))
    );
}

/// §11: callers at once do not corrupt the snapshot, and no counter is ever blank meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refreshes_at_once_never_blank_a_counter() {
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    for n in 0..30 {
        broker.push_ids(&format!("q{n}"), "p", ["m0", "m1"]).await;
    }
    broker.post("/api/v1/stats/refresh", "").await.expect(200);
    let refresh = async |client: &crate::harness::Client| {
        for _ in 0..5 {
            client.post("/api/v1/stats/refresh", "{}").await.expect(200);
        }
    };
    let watch = async {
        for _ in 0..30 {
            let overview = get(&broker, "/api/v1/resources/overview").await;
            assert_eq!((&overview["messages"]["total"], &overview["partitions"]), (&json!(60), &json!(30)));
            let rows = get(&broker, "/api/v1/status/queues?limit=500").await;
            assert!(rows["queues"].as_array().unwrap().iter().all(|row| row["messages"]["pending"] == 2), "{rows}");
        }
    };
    futures_util::join!(refresh(&broker), refresh(&broker), refresh(&other), watch);
}

/// §9.3: config follows configure **[T]**; cursor and activity per partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_of_a_queue_shows_config_cursors_and_activity() {
    let broker = TestBroker::start().await;
    broker
        .configure("q", json!({ "retryDelay": 1234, "ttl": 77, "leaseTime": 45, "retryLimit": 9, "priority": 2 }))
        .await;
    half_consumed(&broker, "q").await;
    let body = get(&broker, "/api/v1/status/queues/q?includePartitions=false&from=x").await;
    has_keys(&body, &["queue", "partitions", "totals"]);
    has_keys(&body["queue"], &["id", "name", "namespace", "task", "priority", "createdAt", "config"]);
    let config = &body["queue"]["config"];
    for (key, value) in [("retryDelay", 1234), ("ttl", 77), ("leaseTime", 45), ("retryLimit", 9), ("priority", 2)] {
        assert_eq!(config[key], value, "{key}");
    }
    let [a, b] = &body["partitions"].as_array().unwrap()[..] else { panic!("{body}") };
    has_keys(
        a,
        &["id", "name", "createdAt", "messages", "stats", "cursor", "lastActivity", "oldestMessage", "newestMessage"],
    );
    assert_eq!(a["messages"], json!({ "total": 6, "pending": 3, "processing": 1, "completed": 2, "failed": null }));
    assert_eq!(a["stats"]["deadLetter"], 1);
    assert_eq!(a["cursor"], json!({ "totalConsumed": 3, "batchesConsumed": 0 }));
    assert!(a["lastActivity"].is_string() && b["lastActivity"].is_null(), "{body}");
    assert_eq!(body["totals"]["pending"], 4);
}

/// The sweep finds what another broker did, without a refresh and without a word from it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_background_cycle_finds_every_change() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "q").await;
    broker.db.expire_leases().await;
    eventually(PATIENCE * 3, async || {
        let rows = get(&broker, "/api/v1/resources/queues?stats=cached").await;
        rows["queues"][0]["messages"] == json!({ "total": 7, "pending": 4, "processing": 0 })
    })
    .await;
}
