//! `kill -9` of the broker while it replays: message or row, one of them and never both (I3, I8).

use std::collections::{BTreeMap, BTreeSet};

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;

use crate::harness::{BrokerProcess, Client, PATIENCE, Pop, eventually, numbered};

const LETTERS: usize = 240;
const ROUNDS: usize = 4;

/// Replays each of `rows`, a few at a time; answers those that were told `moved`.
async fn replay_all(client: Client, rows: Vec<String>) -> Vec<String> {
    let mut moved = Vec::new();
    for row in rows {
        let reply = client.try_send(Method::POST, &format!("/api/v1/dlq/{row}/replay"), None).await;
        match reply {
            Ok(reply) if reply.status == 200 => moved.push(row),
            Ok(reply) => assert_ne!(reply.status, 404, "nobody else moves it: {}", reply.text),
            Err(_) => return moved, // killed
        }
    }
    moved
}

async fn rows(client: &Client) -> BTreeSet<String> {
    let body = client.get("/api/v1/dlq?limit=1000").await.expect(200).json();
    body["messages"].as_array().unwrap().iter().map(|row| row["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_the_broker_neither_loses_nor_doubles_a_replay() {
    let mut broker = BrokerProcess::start().await;
    let client = broker.client();
    client.configure("q", json!({ "retryLimit": 0 })).await;
    for lane in 0..8 {
        let partition = format!("p{lane}");
        client.push_ids("q", &partition, numbered("m", 0..LETTERS / 8)).await;
        for _ in 0..LETTERS / 8 {
            let popped = client.pop(&Pop::partition("q", &partition).group("g").all()).await;
            client.ack("g", popped.items("dlq")).await;
        }
    }
    let all = rows(&client).await;
    assert_eq!(all.len(), LETTERS);
    let mut moved: BTreeSet<String> = BTreeSet::new();
    for _ in 0..ROUNDS {
        let left: Vec<String> = rows(&client).await.into_iter().collect();
        let workers: Vec<_> = left
            .chunks(left.len().div_ceil(6).max(1))
            .map(|part| tokio::spawn(replay_all(client.clone(), part.to_vec())))
            .collect();
        let target = left.len() - left.len() / (ROUNDS + 1);
        eventually(PATIENCE, async || rows(&client).await.len() <= target).await;
        broker.kill();
        for told in join_all(workers).await {
            moved.extend(told.unwrap());
        }
        broker.restart().await;
        let left = rows(&client).await;
        assert!(moved.is_disjoint(&left), "told moved, and still a dead letter");
    }
    let left: Vec<String> = rows(&client).await.into_iter().collect();
    replay_all(client.clone(), left).await;
    assert!(rows(&client).await.is_empty());
    let mut copies: BTreeMap<String, usize> = BTreeMap::new();
    for lane in 0..8 {
        let pop = Pop::partition("q", &format!("p{lane}")).group("reader").all().batch(10_000);
        for message in client.pop(&pop).await.messages {
            if let Some(row) = message.transaction_id.strip_prefix("dlq:") {
                *copies.entry(row.to_owned()).or_default() += 1;
            }
        }
    }
    assert_eq!(copies.keys().cloned().collect::<BTreeSet<_>>(), all, "every row became a message");
    assert!(copies.values().all(|count| *count == 1), "once: {copies:?}");
    broker.terminate();
}
