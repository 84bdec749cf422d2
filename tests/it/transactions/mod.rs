//! `POST /api/v1/transaction` (`spec/transactions-kv-timers.md` §2).

mod acks;
mod concurrent;
mod crash;
mod faults;
mod fencing;
mod history;
mod pushes;
mod requests;
mod rollback;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

use crate::harness::{Client, Database, Message, Pop, Popped, Reply};

/// The group of most cases.
const GROUP: &str = "g";

fn push_op(queue: &str, partition: &str, id: &str) -> Value {
    json!({ "type": "push", "items": [{ "queue": queue, "partition": partition, "transactionId": id, "payload": id }] })
}

/// The ack operation of a delivered message, with its lease.
fn ack_op(message: &Message, status: &str) -> Value {
    let mut op = leaseless_op(message, status);
    op["leaseId"] = json!(message.lease_id);
    op
}

fn leaseless_op(message: &Message, status: &str) -> Value {
    json!({ "type": "ack", "transactionId": message.transaction_id, "partitionId": message.partition_id,
            "consumerGroup": message.consumer_group, "status": status })
}

fn ack_ops(popped: &Popped, status: &str) -> Vec<Value> {
    popped.messages.iter().map(|message| ack_op(message, status)).collect()
}

async fn reply(client: &Client, operations: &[Value]) -> Reply {
    client.post_json("/api/v1/transaction", &json!({ "operations": operations })).await
}

/// Sends a bundle that must commit; answers its results.
#[track_caller]
fn commits(client: &Client, operations: &[Value]) -> impl Future<Output = Vec<Value>> {
    sent_commits(client, json!({ "operations": operations }))
}

#[track_caller]
fn sent_commits(client: &Client, body: Value) -> impl Future<Output = Vec<Value>> {
    let place = std::panic::Location::caller();
    let client = client.clone();
    async move {
        let answer = client.post_json("/api/v1/transaction", &body).await.expect(200).json();
        assert_eq!(answer["success"], true, "at {place}: {answer}");
        answer["results"].as_array().unwrap().clone()
    }
}

/// Sends a bundle that must be rolled back for this reason, with these words in its text, and leave every row as it was.
async fn rolls_back(client: &Client, db: &Database, body: Value, reason: &str, words: &str) {
    let before = dump(db).await;
    let answer = client.post_json("/api/v1/transaction", &body).await.expect(200).json();
    assert_eq!((&answer["success"], &answer["reason"]), (&json!(false), &json!(reason)), "{answer}");
    assert!(answer["error"].as_str().unwrap().contains(words), "{answer}");
    assert_eq!(answer["results"], json!([]));
    let after = dump(db).await;
    for (table, rows) in &before {
        assert_eq!(rows, &after[table], "{table} after {answer}");
    }
}

/// Every row of the schema as text, without the brokers' own heartbeats. Of retention's lists what is in them: retention
/// packs them when it will, at the latest in the walk of every hour.
async fn dump(db: &Database) -> BTreeMap<String, String> {
    let mut tables = BTreeMap::new();
    for table in db.row_counts().await.into_keys() {
        let rows = match table.as_str() {
            "log_age_lists" => {
                "(SELECT DISTINCT kind, queue_id, unnest(partition_ids) FROM queen.log_age_lists)".into()
            }
            table => format!("queen.{table}"),
        };
        let sql = format!("SELECT coalesce(string_agg(t::text, E'\\n' ORDER BY t::text), '') FROM {rows} t");
        let rows: String = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&db.pool).await.unwrap();
        tables.insert(table, rows);
    }
    tables
}

/// Pops everything of a partition for a group, from its start.
async fn pop(client: &Client, queue: &str, partition: &str) -> Popped {
    client.pop(&Pop::partition(queue, partition).group(GROUP).all().batch(1000)).await
}

/// Pushes these ids into `in/p` and leases them.
async fn leased(client: &Client, ids: &[&str]) -> Popped {
    client.push_ids("in", "p", ids).await;
    let popped = pop(client, "in", "p").await;
    assert_eq!(popped.ids(), ids);
    popped
}

/// What a partition holds, in order, whatever was consumed.
async fn stored(client: &Client, queue: &str, partition: &str) -> Vec<String> {
    static READERS: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let reader = format!("reader{}", READERS.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let read = Pop::partition(queue, partition).group(&reader).all().batch(10_000).auto_ack();
    client.pop(&read).await.ids().into_iter().map(str::to_owned).collect()
}
