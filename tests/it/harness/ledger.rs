//! Producers and consumers that keep a ledger of what they were told, for tests that kill what they talk to.
//!
//! Everything answered `queued` must be delivered to every group, again and again until an ack of it was sent that nobody
//! refused; nothing whose ack was answered `success` may come back in a pop that was sent afterwards; a batch of a
//! partition starts no further than behind what its group has seen. An ack whose answer was lost is in doubt: it may have
//! been committed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use reqwest::Method;
use serde_json::json;
use tokio::task::JoinHandle;

use super::{AckResult, Client, Pop, Popped, PushResult, between_attempts, comes_true, eventually};

const LEASE_SECONDS: i64 = 2;

/// Who works.
#[derive(Clone, Copy, Debug)]
pub struct Crew {
    /// Partitions, each with a producer of its own.
    pub partitions: usize,
    /// Consumers of each group.
    pub workers: usize,
    /// The groups.
    pub groups: &'static [&'static str],
    /// Milliseconds of a long poll.
    pub wait_ms: i64,
    /// Moments that a producer rests between two messages.
    pub rests: usize,
}

/// A message for a group.
type Key = (&'static str, String);

/// What the clients were told, on one clock of events.
#[derive(Default)]
struct Ledger {
    clock: AtomicU64,
    producing: AtomicBool,
    consuming: AtomicBool,
    /// Since when; `None` while it waits in a spool.
    stored: Mutex<BTreeMap<String, Option<Instant>>>,
    acked: Mutex<BTreeMap<Key, u64>>,
    in_doubt: Mutex<BTreeSet<Key>>,
    delivered: Mutex<BTreeMap<Key, Instant>>,
    /// How far each group has seen each partition.
    seen: Mutex<BTreeMap<Key, u64>>,
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
    fn delivered(&self, group: &'static str, popped: &Popped, sent: u64) {
        let now = Instant::now();
        let acked = self.acked.lock().unwrap();
        let mut broken = self.broken.lock().unwrap();
        for message in &popped.messages {
            let key = (group, message.transaction_id.clone());
            if acked.get(&key).is_some_and(|at| *at < sent) {
                broken.push(format!("{key:?} was acknowledged and came back"));
            }
            self.delivered.lock().unwrap().entry(key).or_insert(now);
        }
        let mut seen = self.seen.lock().unwrap();
        for lane in popped.messages.chunk_by(|a, b| a.partition == b.partition) {
            let numbers: Vec<u64> = lane.iter().filter_map(|m| m.data["n"].as_u64()).collect();
            if !numbers.is_sorted() {
                broken.push(format!("{} out of order: {:?}", lane[0].partition, popped.ids()));
            }
            let next = seen.entry((group, lane[0].partition.clone())).or_default();
            if numbers.first().is_some_and(|first| first > next) {
                broken.push(format!("{group}: {} skips from {next} to {numbers:?}", lane[0].partition));
            }
            *next = numbers.last().map_or(*next, |last| (*next).max(last + 1));
        }
    }
}

/// Pushes `0`, `1`, … into one partition, one at a time, each again and again until it is answered.
async fn produce(clients: Vec<Client>, ledger: Arc<Ledger>, partition: String, rests: usize) {
    let mut n = 0;
    let mut client = clients.iter().cycle();
    while ledger.producing.load(Ordering::SeqCst) {
        let id = format!("{partition}-{n}");
        let item = json!({ "queue": "q", "partition": partition, "transactionId": id, "payload": { "n": n } });
        let body = json!({ "items": [item] }).to_string();
        let Some(client) = client.next() else { return };
        let reply = client.try_send(Method::POST, "/api/v1/push", Some(body.into())).await;
        let told = reply.ok().filter(|reply| reply.status == 201).map(|r| r.decode::<Vec<PushResult>>().remove(0));
        match told.as_ref().map(|told| told.status.as_str()) {
            Some("queued" | "duplicate") => ledger.stored.lock().unwrap().insert(id, Some(Instant::now())),
            Some("buffered") => ledger.stored.lock().unwrap().insert(id, None),
            _ => {
                between_attempts().await;
                continue;
            }
        };
        n += 1;
        for _ in 0..rests {
            between_attempts().await;
        }
    }
}

/// Pops and acks, ignoring every failure: the ledger judges only what was answered.
async fn consume(clients: Vec<Client>, ledger: Arc<Ledger>, group: &'static str, wait_ms: i64) {
    let pop = Pop::queue("q").group(group).all().batch(20).partitions(2).lease(LEASE_SECONDS).wait_ms(wait_ms);
    let mut client = clients.iter().cycle();
    while let Some(asked) = client.next().filter(|_| ledger.consuming.load(Ordering::SeqCst)) {
        let sent = ledger.tick();
        let reply = asked.try_send(Method::GET, &pop.target(), None).await;
        let Some(reply) = reply.ok().filter(|reply| reply.status == 200) else {
            between_attempts().await;
            continue;
        };
        let popped: Popped = reply.decode();
        ledger.delivered(group, &popped, sent);
        let body = json!({ "consumerGroup": group, "acknowledgments": popped.items("completed") }).to_string();
        // Where the lease was granted, or elsewhere.
        let acked_at = if popped.messages.len().is_multiple_of(3) { clients.last() } else { Some(asked) };
        let reply = acked_at.unwrap_or(asked).try_send(Method::POST, "/api/v1/ack/batch", Some(body.into())).await;
        let Some(reply) = reply.ok().filter(|reply| reply.status == 200) else {
            let lost = popped.messages.into_iter().map(|m| (group, m.transaction_id));
            ledger.in_doubt.lock().unwrap().extend(lost);
            continue;
        };
        let now = ledger.tick();
        for result in reply.decode::<Vec<AckResult>>() {
            let key = (group, result.transaction_id);
            if result.success {
                ledger.acked.lock().unwrap().entry(key).or_insert(now);
            } else if result.error.is_some_and(|error| error.starts_with("ack flush failed")) {
                ledger.in_doubt.lock().unwrap().insert(key);
            }
        }
    }
}

/// Producers and consumers at work.
pub struct Load {
    ledger: Arc<Ledger>,
    crew: Crew,
    producers: Vec<JoinHandle<()>>,
    consumers: Vec<JoinHandle<()>>,
}

impl Load {
    /// Everybody talks to these brokers in turn, each starting at another.
    pub fn start(clients: &[Client], crew: Crew) -> Load {
        let ledger = Arc::new(Ledger::default());
        ledger.producing.store(true, Ordering::SeqCst);
        ledger.consuming.store(true, Ordering::SeqCst);
        let from = |nth: usize| {
            let mut clients = clients.to_vec();
            let start = nth % clients.len();
            clients.rotate_left(start);
            (clients, Arc::clone(&ledger))
        };
        let producers = (0..crew.partitions).map(|n| {
            let (clients, ledger) = from(n);
            tokio::spawn(produce(clients, ledger, format!("p{n}"), crew.rests))
        });
        let producers = producers.collect();
        let consumers = (0..crew.workers * crew.groups.len()).map(|n| {
            let (clients, ledger) = from(n / crew.groups.len());
            tokio::spawn(consume(clients, ledger, crew.groups[n % crew.groups.len()], crew.wait_ms))
        });
        let consumers = consumers.collect();
        Load { ledger, crew, producers, consumers }
    }

    /// Waits until `count` more messages have been acknowledged.
    pub async fn runs_for(&self, count: usize) {
        let target = self.ledger.acked_count() + count;
        eventually(Duration::from_secs(30), async || self.ledger.acked_count() >= target).await;
    }

    /// Stops producing, lets the consumers finish everything, and judges. Answers the longest way of a message from its
    /// answered push to the last group that got it.
    pub async fn settles(self) -> Duration {
        self.ledger.producing.store(false, Ordering::SeqCst);
        for producer in join_all(self.producers).await {
            producer.unwrap();
        }
        let stored = self.ledger.stored.lock().unwrap().clone();
        let all: Vec<Key> =
            stored.keys().flat_map(|id| self.crew.groups.iter().map(move |group| (*group, id.clone()))).collect();
        let unfinished = || -> Vec<Key> {
            let (acked, in_doubt) = (self.ledger.acked.lock().unwrap(), self.ledger.in_doubt.lock().unwrap());
            all.iter().filter(|key| !acked.contains_key(*key) && !in_doubt.contains(*key)).cloned().collect()
        };
        comes_true(Duration::from_secs(30), async || unfinished().is_empty()).await;
        self.ledger.consuming.store(false, Ordering::SeqCst);
        for consumer in join_all(self.consumers).await {
            consumer.unwrap();
        }
        assert_eq!(unfinished(), Vec::<Key>::new(), "stored and never finished");
        let broken = self.ledger.broken.lock().unwrap();
        assert!(broken.is_empty(), "{broken:#?}");
        let delivered = self.ledger.delivered.lock().unwrap();
        let ways = all.iter().filter_map(|key| {
            let since = stored[&key.1]?;
            Some((delivered.get(key)?.saturating_duration_since(since), key))
        });
        let slowest = ways.max();
        let in_doubt = self.ledger.in_doubt.lock().unwrap().len();
        println!(
            "{} stored, {} acknowledged, {in_doubt} acks in doubt, the longest way {slowest:?}",
            stored.len(),
            self.ledger.acked_count()
        );
        slowest.map(|(way, _)| way).unwrap_or_default()
    }
}
