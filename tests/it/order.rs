//! Order and fairness under concurrency (I7, `spec/push-pop.md` §3, §7.4).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::sync::Mutex;

use crate::harness::{Client, Pop, TestBroker, eventually, numbered};

/// What a group was given, per partition, in the order of claims.
type Seen = Arc<Mutex<BTreeMap<String, Vec<String>>>>;

/// Pops and acks until `total` messages have been finished by the group's workers together.
///
/// A worker notes a batch before it acks it: the lease orders the notes of one partition.
async fn drain(client: Client, pop: Pop, seen: Seen, finished: Arc<AtomicUsize>, total: usize) {
    while finished.load(Ordering::SeqCst) < total {
        let popped = client.pop(&pop).await;
        if popped.is_empty() {
            continue;
        }
        {
            let mut seen = seen.lock().await;
            for message in &popped.messages {
                assert_eq!(message.delivery_attempt, 1, "nothing is delivered twice");
                seen.entry(message.partition.clone()).or_default().push(message.transaction_id.clone());
            }
        }
        let acks = client.ack(&popped.consumer_group, popped.items("completed")).await;
        assert!(acks.iter().all(|r| r.success && !r.noop), "{acks:?}");
        finished.fetch_add(popped.messages.len(), Ordering::SeqCst);
    }
}

async fn run(broker: &TestBroker, group: &str, workers: usize, partitions: usize, each: usize, pop: Pop) {
    let (seen, finished) = (Seen::default(), Arc::new(AtomicUsize::new(0)));
    let total = partitions * each;
    let drains = (0..workers).map(|_| {
        let pop = pop.clone().group(group).all().lease(60).wait_ms(500);
        tokio::spawn(drain((**broker).clone(), pop, Arc::clone(&seen), Arc::clone(&finished), total))
    });
    for drained in join_all(drains).await {
        drained.unwrap();
    }
    let seen = seen.lock().await;
    assert_eq!(seen.len(), partitions);
    for (partition, ids) in seen.iter() {
        assert_eq!(*ids, numbered("m", 0..each), "{group} on {partition}");
    }
}

/// Many workers, few partitions, small batches: each partition in order, nothing twice, nothing lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_stay_ordered_under_concurrent_consumers() {
    let broker = TestBroker::start().await;
    for n in 0..4 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..60)).await;
    }
    run(&broker, "small", 8, 4, 60, Pop::queue("q").batch(7)).await;
    run(&broker, "wide", 3, 4, 60, Pop::queue("q").batch(50).partitions(3)).await;
}

/// The same while the producers are still pushing, one message per request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitions_stay_ordered_while_producers_push() {
    let broker = TestBroker::start().await;
    let producers = (0..4).map(|n| {
        let client = broker.clone();
        tokio::spawn(async move {
            for id in numbered("m", 0..40) {
                client.push_ids("q", &format!("p{n}"), [id]).await;
            }
        })
    });
    let producers: Vec<_> = producers.collect();
    tokio::join!(
        run(&broker, "one", 3, 4, 40, Pop::queue("q").batch(5)),
        run(&broker, "two", 3, 4, 40, Pop::queue("q").batch(50).partitions(2)),
    );
    for producer in producers {
        producer.await.unwrap();
    }
}

/// `autoAck` workers: at most once, in order per partition, and complete when nobody fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auto_ack_workers_get_each_message_once() {
    let broker = TestBroker::start().await;
    for n in 0..3 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..50)).await;
    }
    let seen = Seen::default();
    let workers = (0..6).map(|_| {
        let (client, seen) = (broker.clone(), Arc::clone(&seen));
        tokio::spawn(async move {
            loop {
                let popped = client.pop(&Pop::queue("q").batch(9).auto_ack().wait_ms(800)).await;
                if popped.is_empty() {
                    break;
                }
                let mut seen = seen.lock().await;
                for message in popped.messages {
                    seen.entry(message.partition).or_default().push(message.transaction_id);
                }
            }
        })
    });
    for worker in join_all(workers).await {
        worker.unwrap();
    }
    for (partition, ids) in seen.lock().await.iter() {
        let distinct: BTreeSet<&String> = ids.iter().collect();
        assert_eq!((ids.len(), distinct.len()), (50, 50), "{partition}");
    }
}

/// Nacks and expiries in between: whatever was acknowledged never comes back, and each partition's finished prefix
/// only grows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finished_prefix_only_grows_under_nacks() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "retryLimit": 1000 })).await;
    for n in 0..3 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..30)).await;
    }
    let finished: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
    let workers = (0..5_usize).map(|worker| {
        let (client, finished) = (broker.clone(), Arc::clone(&finished));
        tokio::spawn(async move {
            for round in 0.. {
                if finished.lock().await.values().sum::<usize>() == 90 {
                    break;
                }
                let popped = client.pop(&Pop::queue("q").group("g").all().batch(6).wait_ms(300)).await;
                let Some(first) = popped.messages.first() else { continue };
                let start = finished.lock().await.get(&first.partition).copied().unwrap_or(0);
                let expected = numbered("m", start..start + popped.messages.len());
                assert_eq!(popped.ids(), expected, "delivery starts at the finished prefix of {}", first.partition);
                let cut = (worker + round) % (popped.messages.len() + 1);
                let mut items: Vec<Value> = popped.messages[..cut].iter().map(|m| m.item("completed")).collect();
                if let Some(poison) = popped.messages.get(cut) {
                    items.push(poison.item(if round % 2 == 0 { "retry" } else { "failed" }));
                }
                // Before the ack is sent: from its commit on, another worker may be given the next message.
                *finished.lock().await.entry(first.partition.clone()).or_default() += cut;
                let acks = client.ack("g", items).await;
                assert!(acks.iter().all(|r| r.success && r.lease_released), "{acks:?}");
            }
        })
    });
    for worker in join_all(workers).await {
        worker.unwrap();
    }
}

/// §7.4: no ready partition starves behind a hot one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_partition_starves_nobody() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "hot", numbered("m", 0..2000)).await;
    for n in 0..10 {
        broker.push_ids("q", &format!("quiet{n}"), ["m"]).await;
    }
    let mut served = BTreeSet::new();
    let mut pops = 0;
    eventually(Duration::from_secs(20), async || {
        let popped = broker.pop(&Pop::queue("q").batch(1)).await;
        pops += 1;
        served.extend(popped.messages.iter().map(|m| m.partition.clone()));
        broker.ack("", popped.items("completed")).await;
        served.len() == 11
    })
    .await;
    assert!(pops <= 200, "{pops} pops to serve 11 partitions");
}

/// §7.4: concurrent workers spread out over the partitions instead of queueing at one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_workers_spread_out() {
    let broker = TestBroker::start().await;
    for n in 0..8 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..5)).await;
    }
    let pops = (0..8).map(|_| {
        let client = broker.clone();
        async move { client.pop(&Pop::queue("q").group("g").all().wait_ms(5000)).await.partition }
    });
    let partitions: BTreeSet<String> = join_all(pops).await.into_iter().collect();
    assert_eq!(partitions.len(), 8, "one partition for each worker: {partitions:?}");
}

/// §7.4: across queues as across partitions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn discovery_starves_no_queue() {
    let broker = TestBroker::start().await;
    broker.push_ids("ns.hot", "p", numbered("m", 0..500)).await;
    for n in 0..5 {
        broker.push_ids(&format!("ns.quiet{n}"), "p", [format!("quiet{n}")]).await;
    }
    let mut quiet = BTreeSet::new();
    let mut pops = 0;
    eventually(Duration::from_secs(20), async || {
        let popped = broker.pop(&Pop::discover().set("namespace", "ns").batch(1)).await;
        pops += 1;
        quiet.extend(popped.messages.iter().map(|m| m.transaction_id.clone()).filter(|id| id.starts_with("quiet")));
        broker.ack("", popped.items("completed")).await;
        quiet.len() == 5
    })
    .await;
    assert!(pops <= 150, "{pops} pops to serve 6 queues");
}
