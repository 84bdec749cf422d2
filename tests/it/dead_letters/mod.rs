//! Dead letters as an operator sees them (`spec/admin.md` §5.3, §6).

mod crash;
mod deleting;
mod listing;
mod replay;
mod replay_faults;
mod replay_requests;

use reqwest::Method;
use serde_json::{Value, json};

use crate::harness::Reply;
use crate::harness::{Client, Pop, encode};

/// The not-found sentence of §5.3.
const NOT_FOUND: &str = "Message not found";

/// Pushes `ids` into a partition and has a group give up on each of them, in order; answers the partition's id.
async fn give_up(client: &Client, queue: &str, partition: &str, group: &str, ids: &[&str]) -> String {
    client.push_ids(queue, partition, ids).await;
    give_up_next(client, queue, partition, group, ids.len()).await
}

/// Has a group give up on the next `count` messages of a partition, one after the other.
async fn give_up_next(client: &Client, queue: &str, partition: &str, group: &str, count: usize) -> String {
    let mut partition_id = String::new();
    for _ in 0..count {
        let pop = Pop::partition(queue, partition).all();
        let popped = client.pop(&if group.is_empty() { pop } else { pop.group(group) }).await;
        let message = &popped.messages[0];
        let mut item = message.item("dlq");
        item["error"] = json!(format!("no use for {}", message.transaction_id));
        let result = client.ack_one(group, item).await;
        assert!(result.success && result.dlq, "{result:?}");
        partition_id.clone_from(&message.partition_id);
    }
    partition_id
}

/// The whole answer of a listing.
async fn listing(client: &Client, query: &str) -> Value {
    client.get(&format!("/api/v1/dlq{query}")).await.expect(200).json()
}

/// The transaction ids that a listing answers, in its order.
async fn listed(client: &Client, query: &str) -> Vec<String> {
    let body = listing(client, query).await;
    let rows = body["messages"].as_array().unwrap();
    assert_eq!(body["total"].as_u64(), Some(rows.len() as u64), "total is the length of the page");
    rows.iter().map(|row| row["transactionId"].as_str().unwrap().to_owned()).collect()
}

/// The id of the one row that a listing answers for this transaction id.
async fn row_id(client: &Client, transaction: &str) -> String {
    let body = listing(client, "").await;
    let found = body["messages"].as_array().unwrap().iter().find(|row| row["transactionId"] == transaction).cloned();
    found.unwrap_or_else(|| panic!("no row of {transaction}"))["id"].as_str().unwrap().to_owned()
}

fn address(partition_id: &str, transaction: &str) -> String {
    format!("/api/v1/messages/{}/{}", encode(partition_id), encode(transaction))
}

async fn delete(client: &Client, target: &str) -> Reply {
    client.try_send(Method::DELETE, target, None).await.unwrap()
}

async fn replay(client: &Client, row: &str) -> Reply {
    client.post(&format!("/api/v1/dlq/{}/replay", encode(row)), "").await
}

async fn retry(client: &Client, partition_id: &str, transaction: &str) -> Reply {
    client.post(&format!("{}/retry", address(partition_id, transaction)), "{}").await
}

/// Everything stored in a partition, read by a group that nobody used before: transaction id and payload.
async fn stored(client: &Client, queue: &str, partition: &str) -> Vec<(String, Value)> {
    let group = format!("reader-{}", uuid::Uuid::new_v4());
    let popped = client.pop(&Pop::partition(queue, partition).group(&group).all().batch(10_000)).await;
    popped.messages.into_iter().map(|m| (m.transaction_id, m.data)).collect()
}
