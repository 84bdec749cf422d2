//! `kill -9` of the broker, and of its PostgreSQL, under load (I3, I8, `design.md` §6).
//!
//! Producers and consumers keep a ledger of what they were told. Everything answered `queued` must be delivered, again
//! and again until an ack of it was sent that nobody refused; nothing whose ack was answered `success` may come back in
//! a pop that was sent afterwards. An ack whose answer was lost is in doubt: it may have been committed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::harness::{
    AckResult, BrokerProcess, Client, Pop, Popped, PushResult, between_attempts, comes_true, eventually,
};

const PARTITIONS: usize = 6;
const WORKERS: usize = 4;
const GROUP: &str = "g";
const LEASE_SECONDS: i64 = 2;

/// What the clients were told, on one clock of events.
#[derive(Default)]
struct Ledger {
    clock: AtomicU64,
    producing: AtomicBool,
    consuming: AtomicBool,
    stored: Mutex<BTreeSet<String>>,
    acked: Mutex<BTreeMap<String, u64>>,
    in_doubt: Mutex<BTreeSet<String>>,
    broken: Mutex<Vec<String>>,
}

impl Ledger {
    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    fn acked_count(&self) -> usize {
        self.acked.lock().unwrap().len()
    }

    /// Notes one delivery of a pop that was sent at `sent`.
    fn delivered(&self, popped: &Popped, sent: u64) {
        let acked = self.acked.lock().unwrap();
        let mut broken = self.broken.lock().unwrap();
        for message in &popped.messages {
            if acked.get(&message.transaction_id).is_some_and(|at| *at < sent) {
                broken.push(format!("{} was acknowledged and came back", message.transaction_id));
            }
        }
        for lane in popped.messages.chunk_by(|a, b| a.partition == b.partition) {
            if !lane.is_sorted_by_key(|m| m.data["n"].as_u64()) {
                broken.push(format!("{} out of order: {:?}", lane[0].partition, popped.ids()));
            }
        }
    }
}

/// Pushes `0`, `1`, … into one partition, one at a time, each again and again until it is answered.
async fn produce(client: Client, ledger: Arc<Ledger>, partition: String) {
    let mut n = 0;
    while ledger.producing.load(Ordering::SeqCst) {
        let id = format!("{partition}-{n}");
        let item = json!({ "queue": "q", "partition": partition, "transactionId": id, "payload": { "n": n } });
        let body = json!({ "items": [item] }).to_string();
        let reply = client.try_send(Method::POST, "/api/v1/push", Some(body.into())).await;
        let told = reply.ok().filter(|reply| reply.status == 201).map(|r| r.decode::<Vec<PushResult>>().remove(0));
        if told.is_some_and(|told| matches!(told.status.as_str(), "queued" | "duplicate" | "buffered")) {
            ledger.stored.lock().unwrap().insert(id);
            n += 1;
        } else {
            between_attempts().await;
        }
    }
}

/// Pops and acks, ignoring every failure: the ledger judges only what was answered.
async fn consume(client: Client, ledger: Arc<Ledger>) {
    let pop = Pop::queue("q").group(GROUP).all().batch(20).partitions(2).lease(LEASE_SECONDS).wait_ms(400);
    while ledger.consuming.load(Ordering::SeqCst) {
        let sent = ledger.tick();
        let reply = client.try_send(Method::GET, &pop.target(), None).await;
        let Some(reply) = reply.ok().filter(|reply| reply.status == 200) else {
            between_attempts().await;
            continue;
        };
        let popped: Popped = reply.decode();
        ledger.delivered(&popped, sent);
        let body = json!({ "consumerGroup": GROUP, "acknowledgments": popped.items("completed") }).to_string();
        let reply = client.try_send(Method::POST, "/api/v1/ack/batch", Some(body.into())).await;
        let Some(reply) = reply.ok().filter(|reply| reply.status == 200) else {
            ledger.in_doubt.lock().unwrap().extend(popped.messages.into_iter().map(|m| m.transaction_id));
            continue;
        };
        let now = ledger.tick();
        for result in reply.decode::<Vec<AckResult>>() {
            if result.success {
                ledger.acked.lock().unwrap().entry(result.transaction_id).or_insert(now);
            } else if result.error.is_some_and(|error| error.starts_with("ack flush failed")) {
                ledger.in_doubt.lock().unwrap().insert(result.transaction_id);
            }
        }
    }
}

/// Producers and consumers at work.
struct Load {
    ledger: Arc<Ledger>,
    producers: Vec<JoinHandle<()>>,
    consumers: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(broker: &BrokerProcess) -> Load {
        let ledger = Arc::new(Ledger::default());
        ledger.producing.store(true, Ordering::SeqCst);
        ledger.consuming.store(true, Ordering::SeqCst);
        let producers = (0..PARTITIONS)
            .map(|n| tokio::spawn(produce(broker.client(), Arc::clone(&ledger), format!("p{n}"))))
            .collect();
        let consumers = (0..WORKERS).map(|_| tokio::spawn(consume(broker.client(), Arc::clone(&ledger)))).collect();
        Load { ledger, producers, consumers }
    }

    /// Waits until `count` more messages have been acknowledged.
    async fn runs_for(&self, count: usize) {
        let target = self.ledger.acked_count() + count;
        eventually(Duration::from_secs(30), async || self.ledger.acked_count() >= target).await;
    }

    /// Stops producing, lets the consumers finish everything, and judges.
    async fn settles(self) {
        self.ledger.producing.store(false, Ordering::SeqCst);
        for producer in join_all(self.producers).await {
            producer.unwrap();
        }
        let stored = self.ledger.stored.lock().unwrap().clone();
        let unfinished = || -> Vec<String> {
            let (acked, in_doubt) = (self.ledger.acked.lock().unwrap(), self.ledger.in_doubt.lock().unwrap());
            stored.iter().filter(|id| !acked.contains_key(*id) && !in_doubt.contains(*id)).cloned().collect()
        };
        comes_true(Duration::from_secs(30), async || unfinished().is_empty()).await;
        self.ledger.consuming.store(false, Ordering::SeqCst);
        for consumer in join_all(self.consumers).await {
            consumer.unwrap();
        }
        assert_eq!(unfinished(), Vec::<String>::new(), "stored and never finished");
        let broken = self.ledger.broken.lock().unwrap();
        assert!(broken.is_empty(), "{broken:#?}");
        let in_doubt = self.ledger.in_doubt.lock().unwrap().len();
        println!("{} stored, {} acknowledged, {in_doubt} acks in doubt", stored.len(), self.ledger.acked_count());
    }
}

/// The broker dies twice under load and starts again on the same data directory, finding its PostgreSQL still up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_the_broker_loses_nothing_and_brings_nothing_back() {
    let mut broker = BrokerProcess::start().await;
    let load = Load::start(&broker);
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
    let load = Load::start(&broker);
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
    let load = Load::start(&broker);
    load.runs_for(150).await;
    broker.kill_postgres();
    broker.kill();
    broker.restart().await;
    load.runs_for(100).await;
    load.settles().await;
    broker.terminate();
}
