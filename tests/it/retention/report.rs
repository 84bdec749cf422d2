//! `GET /api/v1/analytics/retention` (`spec/admin.md` §10.4).

use serde_json::{Value, json};

use super::{pass, starts_at};
use crate::harness::{PATIENCE, Pop, Road, TestBroker, eventually, numbered};

async fn report(broker: &TestBroker, query: &str) -> Value {
    broker.get(&format!("/api/v1/analytics/retention{query}")).await.expect(200).json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_report_sums_deletions_by_rule_time_and_label() {
    let broker = TestBroker::sweeping(Road::Fused).await;
    let empty = report(&broker, "").await;
    assert_eq!((&empty["bucketMinutes"], &empty["series"]), (&json!(1), &json!([])));
    let nothing =
        json!({ "retentionMsgs": 0, "completedRetentionMsgs": 0, "evictionMsgs": 0, "totalMsgs": 0, "eventCount": 0 });
    assert_eq!(empty["totals"], nothing);

    broker.configure("shop.orders", json!({ "maxWaitTimeSeconds": 50, "namespace": "shop" })).await;
    broker
        .configure("q", json!({ "retentionEnabled": true, "retentionSeconds": 80, "completedRetentionSeconds": 50 }))
        .await;
    broker.push_ids("shop.orders", "p", numbered("a", 0..3)).await;
    broker.push_ids("q", "p", numbered("a", 0..2)).await;
    broker.pop(&Pop::partition("q", "p").group("g").all().auto_ack()).await;
    broker.push_ids("q", "p", numbered("b", 0..4)).await;
    pass(&broker, 100).await;
    starts_at(&broker.db, "p", 6).await;
    eventually(PATIENCE, async || report(&broker, "").await["totals"]["totalMsgs"] == 9).await;

    let all = report(&broker, "").await;
    assert_eq!(
        all["totals"],
        json!({ "retentionMsgs": 4, "completedRetentionMsgs": 2, "evictionMsgs": 3,
        "totalMsgs": 9, "eventCount": 3 })
    );
    assert!(all["series"][0]["bucket"].as_str().unwrap().ends_with(":00Z"));
    assert_eq!(all.get("rows"), None);
    assert!(all["timeRange"]["from"].is_string() && all["timeRange"]["to"].is_string());

    assert_eq!(report(&broker, "?queue=q").await["totals"]["totalMsgs"], 6);
    let by_queue = report(&broker, "?groupBy=queue").await;
    let keys: Vec<(&str, i64)> = by_queue["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| (row["key"].as_str().unwrap(), row["totalMsgs"].as_i64().unwrap()))
        .collect();
    assert_eq!(keys, [("q", 6), ("shop.orders", 3)]);
    let by_namespace = report(&broker, "?groupBy=namespace").await;
    assert_eq!(by_namespace["rows"][1]["queues"], 1);
    assert!(report(&broker, "?groupBy=task").await["rows"].is_array());

    let old = report(&broker, "?from=2020-01-01T00:00:00Z&to=2020-01-10T00:00:00Z").await;
    assert_eq!((&old["bucketMinutes"], &old["series"]), (&json!(360), &json!([])));

    // History of a deleted queue stays in the totals.
    broker.delete_queue("q").await;
    assert_eq!(report(&broker, "").await["totals"]["totalMsgs"], 9);
    assert_eq!(report(&broker, "?groupBy=queue").await["rows"].as_array().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_parameters_are_refused() {
    let broker = TestBroker::start().await;
    let reply = broker.get("/api/v1/analytics/retention?groupBy=colour").await.expect(400);
    assert_eq!(reply.json(), json!({ "error": "bad groupBy" }));
    for query in ["from=yesterday", "to=1"] {
        broker
            .get(&format!("/api/v1/analytics/retention?{query}"))
            .await
            .expect_refusal(&[&query[..query.find('=').unwrap()]]);
    }
}
