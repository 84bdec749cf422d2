//! Listings of groups (`spec/admin.md` §7.1 to §7.3, arithmetic of §3).

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{GROUP, beginning, drain, end, group_path, seek};
use crate::harness::{Client, Pop, TestBroker, numbered};

/// The listing, and nothing kept of it for the next one: an answer that took long (on a busy machine) is kept for four times
/// as long as it took.
async fn groups(client: &Client) -> Vec<Value> {
    let mut kept_until = Instant::now();
    loop {
        let asked = Instant::now();
        let rows = client.get("/api/v1/consumer-groups").await.expect(200).decode();
        let answered = Instant::now();
        if answered - asked > Duration::from_millis(200) {
            kept_until = answered + 4 * (answered - asked);
        }
        if answered >= kept_until {
            return rows;
        }
    }
}

async fn group_on(client: &Client, group: &str, queue: &str) -> Value {
    let all = groups(client).await;
    let found = all.iter().find(|row| row["name"] == group && row["queueName"] == queue);
    found.cloned().unwrap_or_else(|| panic!("{group} on {queue} is not in {all:?}"))
}

async fn lagging(client: &Client, query: &str) -> Vec<Value> {
    client.get(&format!("/api/v1/consumer-groups/lagging{query}")).await.expect(200).decode()
}

async fn detail(client: &Client, group: &str) -> Value {
    client.get(&group_path(group)).await.expect(200).json()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_has_the_keys_of_the_table() {
    let broker = TestBroker::start().await;
    assert!(groups(&broker).await.is_empty());
    broker.push_ids("q 1", "a", numbered("m", 0..3)).await;
    broker.push_ids("q 1", "b", ["n"]).await;
    let popped = broker.pop(&Pop::queue("q 1").group("g 1").all().batch(10).partitions(10)).await;
    let of_a: Vec<Value> = popped.messages.iter().filter(|m| m.partition == "a").map(|m| m.item("completed")).collect();
    broker.ack("g 1", of_a).await;
    let mut row = group_on(&broker, "g 1", "q 1").await;
    for key in ["subscriptionTimestamp", "subscriptionCreatedAt"] {
        let at = row.as_object_mut().unwrap().remove(key).unwrap();
        assert!(at.as_str().is_some_and(|at| at.len() == 24 && at.ends_with('Z')), "{key}: {at}");
    }
    assert!(row["maxTimeLag"].take().as_i64().is_some_and(|seconds| (0..60).contains(&seconds)));
    assert_eq!(
        row,
        json!({"name": "g 1", "topics": ["q 1"], "queueName": "q 1", "members": 2, "partitionCursors": 2,
               "partitionsWithLag": 1, "totalLag": 1, "maxTimeLag": null, "state": "Stable", "storage": "segments",
               "subscriptionMode": "all", "conflation": false})
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_state_follows_lag_and_consumption() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..4)).await;
    // A cursor that was sought and never consumed; registered by nobody.
    seek(&broker, "dead", "q", beginning()).await;
    let row = group_on(&broker, "dead", "q").await;
    assert_eq!((&row["state"], &row["totalLag"]), (&json!("Dead"), &json!(4)));
    assert_eq!(
        (&row["subscriptionMode"], &row["subscriptionTimestamp"], &row["subscriptionCreatedAt"]),
        (&Value::Null, &Value::Null, &Value::Null)
    );
    drain(&broker, "q", "stable").await;
    assert_eq!(group_on(&broker, "stable", "q").await["state"], "Stable");
    broker.db.age(301).await;
    for (group, state, lag) in [("dead", "Lagging", 301), ("stable", "Stable", 0)] {
        let row = group_on(&broker, group, "q").await;
        assert_eq!(row["state"], state);
        let seconds = row["maxTimeLag"].as_i64().unwrap();
        assert!((lag..lag + 60).contains(&seconds), "{group}: {seconds}");
    }
    seek(&broker, "dead", "q", end()).await;
    let row = group_on(&broker, "dead", "q").await;
    assert_eq!((&row["state"], &row["totalLag"], &row["maxTimeLag"]), (&json!("Dead"), &json!(0), &json!(0)));
}

/// Rows by group, then queue; queue mode shows up; a group that is registered and has no cursor does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_group_of_every_queue_with_cursors_is_listed_in_order() {
    let broker = TestBroker::start().await;
    for queue in ["b", "a"] {
        broker.push_ids(queue, "p", ["m"]).await;
        for group in ["x", "w"] {
            drain(&broker, queue, group).await;
        }
    }
    broker.pop(&Pop::queue("a").auto_ack()).await;
    assert!(broker.pop(&Pop::queue("empty").group("early").all()).await.is_empty());
    let names: Vec<String> = groups(&broker)
        .await
        .iter()
        .map(|row| format!("{}/{}", row["name"].as_str().unwrap(), row["queueName"].as_str().unwrap()))
        .collect();
    assert_eq!(names, ["__QUEUE_MODE__/a", "w/a", "w/b", "x/a", "x/b"]);
}

/// §3: what retention took is owed by nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_messages_are_not_owed() {
    let broker = TestBroker::start().await;
    for segment in 0..4 {
        broker.push_ids("q", "p", numbered("m", segment * 5..segment * 5 + 5)).await;
    }
    seek(&broker, GROUP, "q", beginning()).await;
    for (from, owed) in [(0, 20), (10, 10), (20, 0)] {
        sqlx::query("DELETE FROM queen.log_segments WHERE base_offset < $1")
            .bind(from)
            .execute(&broker.db.pool)
            .await
            .unwrap();
        sqlx::query("UPDATE queen.log_partitions SET log_start = $1")
            .bind(from)
            .execute(&broker.db.pool)
            .await
            .unwrap();
        let row = group_on(&broker, GROUP, "q").await;
        assert_eq!(
            (row["totalLag"].as_i64(), row["partitionsWithLag"].as_i64()),
            (Some(owed), Some(i64::from(owed > 0)))
        );
        assert_eq!(lagging(&broker, "?minLagSeconds=0").await.len(), usize::from(owed > 0));
        assert_eq!(detail(&broker, GROUP).await["q"]["partitions"][0]["offsetLag"], owed);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lagging_lists_what_owes_for_long_enough_the_furthest_behind_first() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "old", ["m0", "m1"]).await;
    broker.db.age(7200).await;
    broker.push_ids("q", "recent", ["m2"]).await;
    broker.db.age(100).await;
    broker.push_ids("q", "now", ["m3"]).await;
    broker.push_ids("q", "done", ["m4"]).await;
    seek(&broker, GROUP, "q", beginning()).await;
    super::seek_partition(&broker, GROUP, "q", "done", end()).await;
    let popped = broker.pop(&Pop::partition("q", "old").group(GROUP).batch(10)).await;
    let names = async |query: &str| -> Vec<String> {
        lagging(&broker, query).await.iter().map(|row| row["partition_name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names("?minLagSeconds=0").await, ["old", "recent", "now"]);
    assert_eq!(names("?minLagSeconds=60").await, ["old", "recent"]);
    assert_eq!(names("").await, ["old"], "an hour by default");
    assert_eq!(names("?minLagSeconds=").await, ["old"]);
    assert!(names("?minLagSeconds=86400").await.is_empty());
    for bad in ["x", "-1", "1e99", "NaN"] {
        broker
            .get(&format!("/api/v1/consumer-groups/lagging?minLagSeconds={bad}"))
            .await
            .expect_refusal(&["minLagSeconds"]);
    }
    let mut row = lagging(&broker, "").await.remove(0);
    let seconds = row["time_lag_seconds"].as_i64().unwrap();
    assert!((7300..7400).contains(&seconds), "{seconds}");
    assert!(row["oldest_unconsumed_at"].as_str().is_some_and(|at| at.ends_with('Z')));
    for key in ["time_lag_seconds", "oldest_unconsumed_at"] {
        row.as_object_mut().unwrap().remove(key);
    }
    assert_eq!(
        row,
        json!({"consumer_group": GROUP, "queue_name": "q", "partition_name": "old", "partition_id": popped.partition_id,
               "worker_id": popped.lease_id, "offset_lag": 2, "lag_hours": 2.03, "last_consumed_at": null})
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_groups_detail_is_keyed_by_queue() {
    let broker = TestBroker::start().await;
    assert_eq!(detail(&broker, "unknown").await, json!({}));
    for queue in ["q1", "q2"] {
        broker.push_ids(queue, "p", numbered("m", 0..3)).await;
    }
    broker.push_ids("q2", "unmet", ["m"]).await;
    drain(&broker, "q1", GROUP).await;
    let popped = broker.pop(&Pop::partition("q2", "p").group(GROUP).all().batch(2)).await;
    broker.ack(GROUP, vec![popped.messages[0].item("completed")]).await;
    let mut body = detail(&broker, GROUP).await;
    let lag = body["q2"]["partitions"][0]["timeLagSeconds"].take();
    assert!(lag.is_i64());
    assert_eq!(
        body,
        json!({
            "q1": {"conflation": false, "partitions": [{"partition": "p", "workerId": null, "lastConsumedAt": null,
                "totalConsumed": 3, "offsetLag": 0, "timeLagSeconds": 0, "leaseActive": false}]},
            "q2": {"conflation": false, "partitions": [{"partition": "p", "workerId": popped.lease_id,
                "lastConsumedAt": null, "totalConsumed": 1, "offsetLag": 2, "timeLagSeconds": null, "leaseActive": true}]},
        })
    );
    broker.db.expire_leases().await;
    assert_eq!(detail(&broker, GROUP).await["q2"]["partitions"][0]["leaseActive"], false);
}
