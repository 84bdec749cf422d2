//! Consumer groups as an operator sees them (`spec/admin.md` §7).

mod brokers;
mod delete;
mod leases;
mod listings;
mod many_partitions;
mod seek;
mod subscription;

use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::{Client, Pop, Reply, encode};

const GROUP: &str = "g";
const STALE: &str = "invalid or expired lease";

fn group_path(group: &str) -> String {
    format!("/api/v1/consumer-groups/{}", encode(group))
}

async fn seek_reply(client: &Client, group: &str, queue: &str, body: &Value) -> Reply {
    client.post_json(&format!("{}/queues/{}/seek", group_path(group), encode(queue)), body).await
}

/// Seeks a whole queue; answers how many partitions it names.
async fn seek(client: &Client, group: &str, queue: &str, body: Value) -> i64 {
    let answer = seek_reply(client, group, queue, &body).await.expect(200).json();
    assert_eq!(answer["success"], true);
    answer["partitionsUpdated"].as_i64().expect("an integer")
}

async fn seek_partition_reply(client: &Client, group: &str, queue: &str, partition: &str, body: &str) -> Reply {
    let target = format!("{}/queues/{}/partitions/{}/seek", group_path(group), encode(queue), encode(partition));
    client.post(&target, body.to_owned()).await
}

async fn seek_partition(client: &Client, group: &str, queue: &str, partition: &str, body: Value) {
    let answer = seek_partition_reply(client, group, queue, partition, &body.to_string()).await.expect(200).json();
    assert_eq!((&answer["success"], &answer["updated"]), (&json!(true), &json!(true)));
}

/// "The beginning" is spelled as an early timestamp.
fn beginning() -> Value {
    json!({ "timestamp": "1970-01-01T00:00:00Z" })
}

fn end() -> Value {
    json!({ "toEnd": true })
}

async fn delete_reply(client: &Client, target: &str) -> Reply {
    client.try_send(Method::DELETE, target, None).await.unwrap()
}

/// Deletes a group everywhere, or of one queue; answers how many cursors it had.
async fn delete_group(client: &Client, group: &str, queue: Option<&str>, query: &str) -> i64 {
    let mut target = group_path(group);
    if let Some(queue) = queue {
        target.push_str(&format!("/queues/{}", encode(queue)));
    }
    let answer = delete_reply(client, &format!("{target}{query}")).await.expect(200).json();
    assert_eq!((&answer["success"], &answer["consumerGroup"]), (&json!(true), &json!(group)));
    assert_eq!(answer.get("queueName").and_then(Value::as_str), queue);
    answer["deletedPartitions"].as_i64().expect("an integer")
}

/// Pops everything that a group may have now, and completes it; the ids in order of delivery.
async fn drain(client: &Client, queue: &str, group: &str) -> Vec<String> {
    let mut ids = Vec::new();
    loop {
        let popped = client.pop(&Pop::queue(queue).group(group).all().batch(10_000).partitions(1000)).await;
        if popped.is_empty() {
            return ids;
        }
        ids.extend(popped.ids().iter().map(|id| (*id).to_owned()));
        let results = client.ack(group, popped.items("completed")).await;
        assert!(results.iter().all(|r| r.success), "{results:?}");
    }
}
