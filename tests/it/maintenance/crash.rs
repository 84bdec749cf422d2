//! `kill -9` of a broker with spooled records (I8).

use std::collections::BTreeMap;

use serde_json::json;

use super::{drained, modes, push, push_mode, read};
use crate::harness::{BrokerProcess, PATIENCE, eventually, numbered};

/// Killed with records on disk, and again and again while they are drained: each arrives once, in order, under the id
/// that was answered, with deduplication off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spooled_records_survive_kills_and_arrive_once() {
    let mut broker = BrokerProcess::start().await;
    let client = broker.client();
    client.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    push_mode(&client, true).await;
    let mut told: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for round in 0..60 {
        let partition = format!("p{}", round % 3);
        for result in push(&client, &partition, numbered(&format!("r{round}-"), 0..20)).await {
            assert_eq!(result.status, "buffered");
            told.entry(partition.clone()).or_default().push((result.message_id, result.transaction_id));
        }
    }
    broker.kill();
    broker.restart().await;
    let client = broker.client();
    assert_eq!(modes(&client).await["bufferedMessages"], 1200, "everything answered is there");
    push_mode(&client, false).await;
    // Somewhere in the middle of the drain, three times.
    for _ in 0..3 {
        let before = modes(&client).await["bufferedMessages"].as_u64().unwrap_or(0);
        if before == 0 {
            break;
        }
        let _ = crate::harness::comes_true(PATIENCE, async || {
            modes(&client).await["bufferedMessages"].as_u64().is_some_and(|left| left < before)
        })
        .await;
        broker.kill();
        broker.restart().await;
    }
    eventually(PATIENCE, || client.is_healthy()).await;
    drained(&client).await;
    for (partition, told) in told {
        assert_eq!(read(&client, &partition).await, told, "{partition}");
    }
}
