//! Maintenance modes and the disk spool (I8, `spec/admin.md` §13.3, `spec/push-pop.md` §2.9).

mod crash;
mod modes;
mod order;
mod outage;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::harness::{Client, PATIENCE, Pop, PushResult, Road, TestBroker, eventually};

/// A broker whose spool lies in a directory that the test sees.
async fn spooling(dir: &Path) -> TestBroker {
    let dir = dir.to_owned();
    TestBroker::tuned(Road::Fused, |config| config.spool.file_buffer_dir = Some(dir)).await
}

async fn push_mode(client: &Client, on: bool) -> Value {
    client.post_json("/api/v1/system/maintenance", &json!({ "enabled": on })).await.expect(200).json()
}

async fn pop_mode(client: &Client, on: bool) -> Value {
    client.post_json("/api/v1/system/maintenance/pop", &json!({ "enabled": on })).await.expect(200).json()
}

async fn modes(client: &Client) -> Value {
    client.get("/api/v1/system/maintenance").await.expect(200).json()
}

/// Pushes these ids, whatever becomes of them.
async fn push<I>(client: &Client, partition: &str, ids: I) -> Vec<PushResult>
where
    I: IntoIterator,
    I::Item: AsRef<str>,
{
    let item = |id: I::Item| json!({ "queue": "q", "partition": partition, "transactionId": id.as_ref(), "payload": id.as_ref() });
    client.push(ids.into_iter().map(item).collect()).await
}

async fn drained(client: &Client) {
    eventually(PATIENCE, async || modes(client).await["bufferedMessages"] == 0).await;
}

/// What a new group reads of a partition: (id, transaction id), in order.
async fn read(client: &Client, partition: &str) -> Vec<(String, String)> {
    let group = uuid::Uuid::new_v4().to_string();
    let popped = client.pop(&Pop::partition("q", partition).group(&group).all().batch(10_000)).await;
    popped.messages.into_iter().map(|message| (message.id, message.transaction_id)).collect()
}

/// Everything that lies in the spool's directory.
fn bytes_on_disk(dir: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut dirs: Vec<PathBuf> = vec![dir.to_owned()];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            match entry.path() {
                path if path.is_dir() => dirs.push(path),
                path => bytes.extend(std::fs::read(path).unwrap()),
            }
        }
    }
    bytes
}

fn holds(bytes: &[u8], text: &str) -> bool {
    bytes.windows(text.len()).any(|window| window == text.as_bytes())
}
