//! `kill -9` of the broker, and of its PostgreSQL, in the middle of bundles: each is whole or not at all, and what was
//! answered as committed is there (I3, I10).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::{leaseless_op, push_op};
use crate::harness::{BrokerProcess, Client, Message, Pop, comes_true, eventually};

const SOURCES: usize = 6;
const PER_SOURCE: usize = 250;
const OUTS: [&str; 3] = ["x", "y", "z"];

fn source_pop() -> Pop {
    Pop::queue("src").group("g").all().batch((SOURCES * PER_SOURCE) as i64).partitions(SOURCES as i64)
}

/// Moves the messages of one source on, one bundle each, until the broker is gone.
async fn forward(client: Client, messages: Vec<Message>, told: Arc<Mutex<BTreeSet<String>>>) {
    for (nth, message) in messages.into_iter().enumerate() {
        let id = message.transaction_id.clone();
        let mut operations: Vec<Value> = OUTS.iter().map(|out| push_op("out", out, &id)).collect();
        operations.insert(nth % 4, leaseless_op(&message, "completed"));
        let body = json!({ "operations": operations }).to_string();
        let Ok(reply) = client.try_send(Method::POST, "/api/v1/transaction", Some(body.into())).await else { return };
        if reply.status == 200 && reply.json()["success"] == true {
            told.lock().unwrap().insert(id);
        } else {
            return;
        }
    }
}

async fn read_all(client: &Client, queue: &str, partition: &str, group: &str) -> Vec<String> {
    let pop = Pop::partition(queue, partition).group(group).all().batch(10_000).auto_ack();
    let mut ids = Vec::new();
    loop {
        let popped = client.pop(&pop).await;
        if popped.is_empty() {
            return ids;
        }
        ids.extend(popped.messages.into_iter().map(|m| m.transaction_id));
    }
}

async fn killed_in_the_middle(kill: impl AsyncFnOnce(&mut BrokerProcess)) {
    let mut process = BrokerProcess::start().await;
    let client = process.client();
    for source in 0..SOURCES {
        let ids: Vec<String> = (0..PER_SOURCE).map(|n| format!("{source}-{n:03}")).collect();
        client.push_ids("src", &format!("s{source}"), ids).await;
    }
    let popped = client.pop(&source_pop().lease(1)).await;
    assert_eq!(popped.messages.len(), SOURCES * PER_SOURCE);
    let mut by_source: BTreeMap<String, Vec<Message>> = BTreeMap::new();
    for message in popped.messages {
        by_source.entry(message.partition.clone()).or_default().push(message);
    }
    let told = Arc::new(Mutex::new(BTreeSet::new()));
    let mut workers = JoinSet::new();
    for messages in by_source.into_values() {
        workers.spawn(forward(client.clone(), messages, told.clone()));
    }
    eventually(Duration::from_secs(30), async || told.lock().unwrap().len() > 60).await;
    assert!(told.lock().unwrap().len() < SOURCES * PER_SOURCE, "killed in the middle");
    kill(&mut process).await;
    while workers.join_next().await.is_some() {}
    let told = told.lock().unwrap().clone();

    let mut landed: Vec<BTreeSet<String>> = Vec::new();
    for out in OUTS {
        let ids = read_all(&client, "out", out, "check").await;
        let set: BTreeSet<String> = ids.iter().cloned().collect();
        assert_eq!(set.len(), ids.len(), "{out}: nothing twice");
        landed.push(set);
    }
    assert!(landed.iter().all(|set| *set == landed[0]), "a bundle landed in part");
    assert!(told.is_subset(&landed[0]), "a committed bundle is gone");
    // The sources: exactly what did not land comes back.
    let mut back = BTreeSet::new();
    let all = SOURCES * PER_SOURCE;
    let came_back = comes_true(Duration::from_secs(20), async || {
        back.extend(client.pop(&source_pop().lease(600)).await.messages.into_iter().map(|m| m.transaction_id));
        back.len() >= all - landed[0].len()
    })
    .await;
    assert!(came_back, "{} of {} came back", back.len(), all - landed[0].len());
    assert!(back.is_disjoint(&landed[0]), "acknowledged in a bundle, and came back");
    process.terminate();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_broker_leaves_whole_bundles() {
    killed_in_the_middle(async |process| {
        process.kill();
        process.restart().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_database_leaves_whole_bundles() {
    killed_in_the_middle(async |process| {
        process.kill_postgres();
        let client = process.client();
        eventually(Duration::from_secs(40), || client.is_healthy()).await;
    })
    .await;
}
