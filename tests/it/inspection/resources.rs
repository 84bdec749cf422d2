//! `/api/v1/resources/…` (`spec/admin.md` §4): keys, exact counts (§3), what is live.

use std::time::Duration;

use serde_json::{Value, json};

use super::{are_integers, half_consumed, has_keys};
use crate::harness::{PATIENCE, Pop, TestBroker, encode, eventually};

async fn get(broker: &TestBroker, target: &str) -> Value {
    broker.get(target).await.expect(200).json()
}

/// The row of one queue in the whole list.
async fn listed(broker: &TestBroker, queue: &str) -> Option<Value> {
    let list = get(broker, "/api/v1/resources/queues").await;
    has_keys(&list, &["queues"]);
    list["queues"].as_array().unwrap().iter().find(|row| row["name"] == queue).cloned()
}

/// §4.1, §3: every key, and exact counts once the snapshot has caught up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_overview_counts_exactly() {
    let broker = TestBroker::start().await;
    let empty = get(&broker, "/api/v1/resources/overview").await;
    assert_eq!(empty["statsAge"], -1, "never written");
    assert_eq!(empty["queues"], 0);
    half_consumed(&broker, "ns.job").await;
    eventually(PATIENCE, async || get(&broker, "/api/v1/resources/overview").await["messages"]["processing"] == 1)
        .await;
    let overview = get(&broker, "/api/v1/resources/overview").await;
    has_keys(
        &overview,
        &["queues", "partitions", "namespaces", "tasks", "messages", "lag", "throughput", "timestamp", "statsAge"],
    );
    are_integers(&overview, &["queues", "partitions", "namespaces", "tasks", "statsAge"]);
    assert_eq!((&overview["queues"], &overview["partitions"]), (&json!(1), &json!(2)));
    assert_eq!((&overview["namespaces"], &overview["tasks"]), (&json!(1), &json!(1)));
    // a: 6 retained, 3 retired of which 1 dead, 1 leased; b: 1 pending.
    assert_eq!(
        overview["messages"],
        json!({ "total": 7, "pending": 4, "processing": 1, "completed": 2, "failed": null, "deadLetter": 1 })
    );
    for lag in ["time", "offset"] {
        has_keys(&overview["lag"][lag], &["avg", "median", "min", "max"]);
        are_integers(&overview["lag"][lag], &["avg", "median", "min", "max"]);
    }
    assert_eq!(overview["lag"]["offset"]["max"], 4);
    has_keys(&overview["throughput"], &["ingestedPerSecond", "processedPerSecond"]);
}

/// §4.2: the row of a queue that exists only through a push, within 4 s, with labels from its name **[T]**.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_made_by_a_push_is_listed_with_its_labels() {
    let broker = TestBroker::start().await;
    broker.push_ids("a.b.c", "p", ["m0", "m1"]).await;
    eventually(Duration::from_secs(4), async || {
        listed(&broker, "a.b.c").await.is_some_and(|row| row["messages"]["total"] == 2)
    })
    .await;
    let row = listed(&broker, "a.b.c").await.unwrap();
    has_keys(
        &row,
        &["id", "name", "namespace", "task", "createdAt", "partitions", "messages", "segments", "retainedBytes"],
    );
    assert_eq!((&row["namespace"], &row["task"]), (&json!("a"), &json!("b")));
    has_keys(&row["messages"], &["total", "pending", "processing"]);
    assert_eq!(row["messages"], json!({ "total": 2, "pending": 2, "processing": 0 }));
    are_integers(&row, &["partitions", "retainedBytes"]);
    are_integers(&row["segments"], &["segments", "messages"]);
    assert!(row["createdAt"].as_str().unwrap().ends_with('Z'));
}

/// §4.2: a configured queue is there at once; the list is whole whatever is asked for; it is in name order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_list_is_whole_and_ignores_paging() {
    let broker = TestBroker::start().await;
    for queue in ["c", "a", "b", "plain"] {
        broker.configure(queue, json!({})).await;
    }
    for query in ["", "?limit=1&offset=2", "?search=nothing", "?namespace=none&task=none", "?stats=cached", "?limit=x"]
    {
        let list = get(&broker, &format!("/api/v1/resources/queues{query}")).await;
        let names: Vec<&str> = list["queues"].as_array().unwrap().iter().map(|q| q["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["a", "b", "c", "plain"], "{query}");
        assert!(list["queues"][0]["task"].as_str().is_some_and(str::is_empty), "no task is the empty string");
    }
}

/// §4.3: every key **[T]**, exact and live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_in_detail_is_live_and_exact() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "q").await;
    let queue = get(&broker, "/api/v1/resources/queues/q").await;
    has_keys(
        &queue,
        &[
            "id",
            "name",
            "namespace",
            "task",
            "createdAt",
            "options",
            "partitions",
            "totals",
            "retainedBytes",
            "segments",
        ],
    );
    assert_eq!(queue["segments"], json!({ "segments": 2, "messages": 7 }));
    assert_eq!(
        queue["totals"],
        json!({ "total": 7, "pending": 4, "processing": 1, "completed": 2, "failed": null, "deadLetter": 1 })
    );
    let partitions = queue["partitions"].as_array().unwrap();
    assert_eq!(partitions.len(), 2);
    has_keys(&partitions[0], &["id", "name", "createdAt", "stats", "oldestMessage", "newestMessage"]);
    assert_eq!((&partitions[0]["name"], &partitions[1]["name"]), (&json!("a"), &json!("b")));
    assert_eq!(
        partitions[0]["stats"],
        json!({ "total": 6, "pending": 3, "processing": 1, "completed": 2, "failed": null, "deadLetter": 1 })
    );
    assert_eq!(partitions[0]["oldestMessage"], partitions[0]["newestMessage"], "one segment");
    assert!(partitions[0]["oldestMessage"].is_string());
    let popped = broker.pop(&Pop::partition("q", "b").group("g").all()).await;
    assert_eq!(partitions[1]["id"], popped.partition_id.as_str(), "the id that pops show");
}

/// §4.3: the 21 option keys, spelled as configure takes them, so that what is read can be written back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_options_of_a_queue_round_trip() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "namespace": "n", "task": "t", "retryDelay": 7, "ttl": 11, "priority": 3 })).await;
    let read = get(&broker, "/api/v1/resources/queues/q").await;
    assert_eq!(read["options"].as_object().unwrap().len(), 21);
    assert_eq!(read["partitions"], json!([]), "no push yet");
    broker.configure("q", read["options"].clone()).await;
    assert_eq!(get(&broker, "/api/v1/resources/queues/q").await, read);
}

/// §4.3, §1.1: unknown is 404; names are decoded segment by segment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_decoded_and_unknown_ones_are_not_found() {
    let broker = TestBroker::start().await;
    for name in ["a/b", "depth", "with space", "ümläut:💥", "per%2Fcent", &"n".repeat(200)] {
        broker.push_ids(name, "p/q", ["m"]).await;
        for route in ["resources/queues", "status/queues"] {
            let queue = get(&broker, &format!("/api/v1/{route}/{}", encode(name))).await;
            let found = if route == "resources/queues" { &queue["name"] } else { &queue["queue"]["name"] };
            assert_eq!(found, name);
            assert_eq!(queue["partitions"][0]["name"], "p/q");
        }
        assert_eq!(get(&broker, &format!("/api/v1/resources/queues/{}/depth", encode(name))).await["queue"], name);
    }
    for target in ["resources/queues/none", "resources/queues/none/depth", "status/queues/none", "resources/queues/a"] {
        let reply = broker.get(&format!("/api/v1/{target}")).await.expect(404);
        assert_eq!(reply.json(), json!({ "error": "Queue not found" }), "{target}");
    }
    broker.delete_queue("a/b").await;
    broker.get("/api/v1/resources/queues/a%2Fb").await.expect(404);
    assert!(listed(&broker, "a/b").await.is_none());
}

/// §4.4, §3: the slowest group decides for the queue; a group that is not there owes everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn depth_is_of_the_slowest_group_or_of_one() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "q").await;
    let depth = get(&broker, "/api/v1/resources/queues/q/depth").await;
    assert_eq!(
        depth,
        json!({
            "queue": "q", "group": null, "pending": 4, "processing": 1, "ready": 3, "partitionsPending": 2,
            "partitionsReady": 2, "conflation": false, "effectivePending": 4, "effectiveReady": 3,
            "partitions": [
                { "partition": "a", "pending": 3, "processing": 1, "ready": 2 },
                { "partition": "b", "pending": 1, "processing": 0, "ready": 1 },
            ],
        })
    );
    let popped = broker.pop(&Pop::partition("q", "a").group("slow").all().batch(1)).await;
    assert_eq!(popped.ids(), ["a0"]);
    for (group, pending, processing) in [("g", 4, 1), ("slow", 7, 1), ("never%20seen", 7, 0)] {
        let depth = get(&broker, &format!("/api/v1/resources/queues/q/depth?group={group}")).await;
        assert_eq!((&depth["pending"], &depth["processing"]), (&json!(pending), &json!(processing)), "{group}");
    }
    let depth = get(&broker, "/api/v1/resources/queues/q/depth").await;
    // Both leases are live and inside what is pending: one message each.
    assert_eq!((&depth["pending"], &depth["processing"]), (&json!(7), &json!(2)));
}

/// §3: a lease that has run out is no longer processing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_lease_is_pending_again() {
    let broker = TestBroker::start().await;
    half_consumed(&broker, "q").await;
    broker.db.expire_leases().await;
    let totals = get(&broker, "/api/v1/resources/queues/q").await["totals"].clone();
    assert_eq!((&totals["pending"], &totals["processing"]), (&json!(4), &json!(0)));
}

/// §4.6: labels given only through configure appear within 5 s without a refresh **[T]**; none is `""` (§17.16).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configured_labels_are_listed() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "namespace": "only-here", "task": "this" })).await;
    broker.configure("r", json!({})).await;
    broker.push_ids("q", "p", ["m0", "m1", "m2"]).await;
    for (list, key, label) in [("namespaces", "namespace", "only-here"), ("tasks", "task", "this")] {
        let target = format!("/api/v1/resources/{list}");
        let row = async |label: &str| {
            let body = get(&broker, &target).await;
            has_keys(&body, &[list]);
            body[list].as_array().unwrap().iter().find(|row| row[key] == label).cloned()
        };
        eventually(Duration::from_secs(5), async || row(label).await.is_some_and(|row| row["messages"]["total"] == 3))
            .await;
        let row_of = row(label).await.unwrap();
        has_keys(&row_of, &[key, "queues", "partitions", "messages"]);
        assert_eq!((&row_of["queues"], &row_of["partitions"]), (&json!(1), &json!(1)));
        assert_eq!(row_of["messages"], json!({ "total": 3, "pending": 3 }));
        assert_eq!(row("").await.unwrap()["queues"], 1);
    }
}
