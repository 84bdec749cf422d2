//! `kill -9` of the broker, and of its PostgreSQL, under load (I3, I8, `design.md` §6), judged by a ledger of what clients
//! were told (`harness/ledger.rs`).

use std::time::Duration;

use crate::harness::{BrokerProcess, Crew, Load, comes_true};

const CREW: Crew = Crew { partitions: 6, workers: 4, groups: &["g"], wait_ms: 400, rests: 0 };

fn load(broker: &BrokerProcess) -> Load {
    Load::start(&[broker.client()], CREW)
}

/// The broker dies twice under load and starts again on the same data directory, finding its PostgreSQL still up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_the_broker_loses_nothing_and_brings_nothing_back() {
    let mut broker = BrokerProcess::start().await;
    let load = load(&broker);
    for _ in 0..2 {
        load.runs_for(150).await;
        broker.kill();
        broker.restart().await;
    }
    load.runs_for(100).await;
    load.settles().await;
    broker.terminate();
    assert_eq!(broker.postmaster(), None, "the embedded PostgreSQL stops with the broker");
}

/// PostgreSQL dies under load; the broker brings it back, or at least comes up again itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_postgres_loses_nothing_and_brings_nothing_back() {
    let mut broker = BrokerProcess::start().await;
    let load = load(&broker);
    load.runs_for(150).await;
    let before = broker.postmaster().unwrap();
    broker.kill_postgres();
    let client = broker.client();
    let healed = comes_true(Duration::from_secs(10), async || {
        broker.postmaster().is_some_and(|now| now != before) && client.is_healthy().await
    })
    .await;
    println!("the broker healed by itself: {healed}");
    if !healed {
        broker.terminate();
        broker.restart().await;
    }
    load.runs_for(100).await;
    load.settles().await;
    broker.terminate();
}

/// Both at once: a machine that lost power.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_both_loses_nothing_and_brings_nothing_back() {
    let mut broker = BrokerProcess::start().await;
    let load = load(&broker);
    load.runs_for(150).await;
    broker.kill_postgres();
    broker.kill();
    broker.restart().await;
    load.runs_for(100).await;
    load.settles().await;
    broker.terminate();
}
