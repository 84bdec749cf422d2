//! Moving a subscription (`spec/admin.md` §7.4): no cursor moves, no lease is taken, only partitions not yet met follow.

use serde_json::{Value, json};

use super::{GROUP, drain, group_path, seek};
use crate::harness::{Client, Pop, TestBroker};

async fn subscribe(client: &Client, group: &str, at: &str) -> i64 {
    let target = format!("{}/subscription", group_path(group));
    let answer = client.post_json(&target, &json!({ "subscriptionTimestamp": at })).await.expect(200).json();
    assert_eq!((&answer["success"], &answer["consumerGroup"]), (&json!(true), &json!(group)));
    assert_eq!(answer["newTimestamp"], at, "exactly what was sent");
    answer["rowsUpdated"].as_i64().expect("an integer")
}

fn new(queue: &str) -> Pop {
    Pop::queue(queue).group(GROUP).set("subscriptionMode", "new").batch(100).partitions(100)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_registration_of_the_group_is_counted() {
    let broker = TestBroker::start().await;
    assert_eq!(subscribe(&broker, GROUP, "2026-08-04T10:00:00Z").await, 0, "none, and none is made");
    for queue in ["q1", "q2"] {
        broker.push_ids(queue, "p", ["m"]).await;
        drain(&broker, queue, GROUP).await;
    }
    broker.push_ids("q3", "p", ["m"]).await;
    seek(&broker, GROUP, "q3", super::end()).await;
    drain(&broker, "q1", "other").await;
    assert_eq!(subscribe(&broker, GROUP, "2026-08-04 10:00:00+02").await, 2, "a seek registers nothing");
    let rows: Vec<(String, Option<String>)> = sqlx::query_as(
        "SELECT q.name, to_char(g.subscribed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS') \
         FROM queen.consumer_groups g JOIN queen.queues q ON q.id = g.queue_id WHERE g.name = 'g' ORDER BY 1",
    )
    .fetch_all(&broker.db.pool)
    .await
    .unwrap();
    let at = Some("2026-08-04T08:00:00".to_owned());
    assert_eq!(rows, [("q1".to_owned(), at.clone()), ("q2".to_owned(), at), ("q3".to_owned(), None)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_instant_is_named() {
    let broker = TestBroker::start().await;
    let target = format!("{}/subscription", group_path(GROUP));
    for body in ["", "{}", r#"{"subscriptionTimestamp":""}"#, r#"{"subscriptionTimestamp":null}"#] {
        let reply = broker.post(&target, body).await.expect(400).json();
        assert_eq!(reply, json!({"error": "subscriptionTimestamp is required"}), "{body}");
    }
    for body in [r#"{"subscriptionTimestamp":"soon"}"#, r#"{"subscriptionTimestamp":1}"#] {
        broker.post(&target, body).await.expect_refusal(&["subscriptionTimestamp"]);
    }
    broker.post(&target, "{").await.expect_refusal(&["bad body: "]);
}

/// A partition that existed at the registration has its place, met or not; one that is born later starts at the new instant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_partitions_born_later_start_at_the_new_instant() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "met", ["old1"]).await;
    broker.push_ids("q", "unmet", ["old2"]).await;
    assert!(broker.pop(&new("q")).await.is_empty(), "registered at the tail");
    broker.push_ids("q", "met", ["m1"]).await;
    assert_eq!(broker.pop(&new("q")).await.ids(), ["m1"]);
    assert_eq!(subscribe(&broker, GROUP, "2000-01-01T00:00:00Z").await, 1);
    let cursor = broker.db.cursor("q", "met", GROUP).await;
    assert!(cursor.leased, "the lease stays");
    assert_eq!(cursor.committed, 0, "the cursor stays");
    broker.push_ids("q", "unmet", ["m2"]).await;
    assert_eq!(broker.pop(&new("q")).await.ids(), ["m2"], "nothing from before the registration");
    broker.push_ids("q", "born", ["b1"]).await;
    assert_eq!(broker.pop(&new("q")).await.ids(), ["b1"]);
    // Into the future: what is pushed to a partition that nobody has met is older than that, and skipped.
    assert_eq!(subscribe(&broker, GROUP, "2090-01-01T00:00:00Z").await, 1);
    broker.push_ids("q", "future", ["f1"]).await;
    assert!(broker.pop(&new("q")).await.is_empty());
    broker.push_ids("q", "future", ["f2"]).await;
    assert!(broker.pop(&new("q")).await.is_empty(), "met now, at its end");
    broker.push_ids("q", "future", ["f3"]).await;
    assert_eq!(broker.pop(&new("q")).await.ids(), ["f3"], "whatever comes after that is delivered");
}

/// The lease of a group whose subscription moved is still good.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_after_it_lands() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m0", "m1"]).await;
    let popped = broker.pop(&Pop::queue("q").group(GROUP).all().batch(10)).await;
    subscribe(&broker, GROUP, "2026-01-01").await;
    let results = broker.ack(GROUP, popped.items("completed")).await;
    assert!(results.iter().all(|r| r.success && r.lease_released), "{results:?}");
    let mode: Value = sqlx::query_scalar("SELECT to_jsonb(mode) FROM queen.consumer_groups")
        .fetch_one(&broker.db.pool)
        .await
        .unwrap();
    assert_eq!(mode, "all");
}
