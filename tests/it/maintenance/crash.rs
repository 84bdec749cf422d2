//! `kill -9` of a broker with spooled records (I8).

use std::collections::{BTreeMap, BTreeSet};

use reqwest::Method;
use serde_json::json;

use super::{drained, modes, push, push_mode, read};
use crate::harness::{BrokerProcess, PATIENCE, comes_true, eventually, numbered};

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
        let _ = comes_true(PATIENCE, async || {
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

/// I8, I10: killed while the drain and transactions into the same partitions run. Every spooled record is there once and
/// in order, every bundle that was told `success` once, any other at most once, and none before what was spooled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_and_a_drain_survive_kills_together() {
    const PARTITIONS: usize = 3;
    let mut broker = BrokerProcess::start().await;
    let client = broker.client();
    client.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
    let (mut spooled, mut committed, mut sent) = (vec![Vec::new(); PARTITIONS], BTreeSet::new(), BTreeSet::new());
    for round in 0..3 {
        push_mode(&client, true).await;
        for batch in 0..30 {
            let ids = numbered(&format!("s{round}-{batch}-"), 0..20);
            let partition = batch % PARTITIONS;
            assert!(push(&client, &format!("p{partition}"), &ids).await.iter().all(|r| r.status == "buffered"));
            spooled[partition].extend(ids);
        }
        push_mode(&client, false).await;
        let bundles = (0..12).map(|n| {
            let (client, id) = (client.clone(), format!("t{round}-{n}"));
            let item = |partition: usize| json!({ "queue": "q", "partition": format!("p{partition}"), "transactionId": id, "payload": n });
            let body = json!({ "operations": [{ "type": "push", "items": [item(n % PARTITIONS), item((n + 1) % PARTITIONS)] }] });
            tokio::spawn(async move {
                let reply = client.try_send(Method::POST, "/api/v1/transaction", Some(body.to_string().into())).await;
                (id, reply.is_ok_and(|reply| reply.status == 200 && reply.json()["success"] == true))
            })
        });
        let bundles: Vec<_> = bundles.collect();
        let before = modes(&client).await["bufferedMessages"].as_u64().unwrap_or(0);
        let _ = comes_true(PATIENCE, async || {
            modes(&client).await["bufferedMessages"].as_u64().is_some_and(|left| left == 0 || left + 200 < before)
        })
        .await;
        broker.kill();
        for bundle in bundles {
            let (id, success) = bundle.await.unwrap();
            sent.insert(id.clone());
            committed.extend(success.then_some(id));
        }
        broker.restart().await;
        eventually(PATIENCE, || client.is_healthy()).await;
        drained(&client).await;
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for (partition, spooled) in spooled.iter().enumerate() {
        let ids: Vec<String> = read(&client, &format!("p{partition}")).await.into_iter().map(|(_, id)| id).collect();
        let (bundles, records): (Vec<String>, Vec<String>) = ids.iter().cloned().partition(|id| id.starts_with('t'));
        assert_eq!(&records, spooled, "p{partition}");
        for id in &bundles {
            let (round, own) = (&id[1..2], ids.iter().position(|other| other == id).unwrap());
            let later = ids[own..].iter().filter(|other| other.starts_with(&format!("s{round}-"))).count();
            assert_eq!(later, 0, "{id} overtook {later} records of its round");
            *counts.entry(id.clone()).or_default() += 1;
        }
    }
    assert!(counts.iter().all(|(id, count)| *count == 2 && sent.contains(id)), "half a bundle: {counts:?}");
    assert!(committed.iter().all(|id| counts.contains_key(id)), "lost: {committed:?} {counts:?}");
}
