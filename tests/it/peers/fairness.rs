//! Nobody starves: no partition, no queue, no parked consumer, while others are served by several brokers
//! (`spec/push-pop.md` §7.4).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use tokio::sync::Mutex;

use super::settle;
use crate::harness::{Client, Pop, TestBroker, between_attempts, numbered};

/// A quiet partition's message may wait this long behind hot ones. Every pop takes one message of one partition.
const PATIENCE: Duration = Duration::from_secs(3);

/// Two brokers, consumers that take one message at a time, hot partitions with an endless backlog: a message of a quiet
/// partition, and one of a quiet queue under the same label, comes out soon all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hot_partitions_and_queues_starve_no_quiet_ones() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    settle(&b).await;
    let stop = Arc::new(AtomicBool::new(false));
    let seen: Arc<Mutex<BTreeMap<String, Instant>>> = Arc::default();
    for n in 0..3 {
        a.push_ids("ns.hot", &format!("hot{n}"), numbered("h", 0..3_000)).await;
    }
    let consumers: Vec<_> = (0..6)
        .map(|n| {
            let client: Client = if n % 2 == 0 { (*a).clone() } else { (*b).clone() };
            let (stop, seen) = (stop.clone(), seen.clone());
            let pop = if n < 4 { Pop::queue("ns.hot") } else { Pop::discover().set("namespace", "ns") };
            let pop = pop.group("g").all().batch(1).wait_ms(1_000);
            tokio::spawn(async move {
                let mut count = 0;
                while !stop.load(Ordering::SeqCst) {
                    let popped = client.pop(&pop).await;
                    let now = Instant::now();
                    for message in popped.messages.iter().filter(|m| m.transaction_id.starts_with("quiet")) {
                        seen.lock().await.insert(message.transaction_id.clone(), now);
                    }
                    count += popped.messages.len();
                    client.ack("g", popped.items("completed")).await;
                }
                count
            })
        })
        .collect();
    let mut pushed = BTreeMap::new();
    for round in 0..20 {
        for (queue, partition) in [("ns.hot", format!("lane{}", round % 5)), ("ns.quiet", "p".to_owned())] {
            let id = format!("quiet-{queue}-{round}");
            let client: &Client = if round % 2 == 0 { &a } else { &b };
            client.push_ids(queue, &partition, [&id]).await;
            pushed.insert(id, Instant::now());
        }
        for _ in 0..5 {
            between_attempts().await;
        }
    }
    crate::harness::eventually(Duration::from_secs(10), async || seen.lock().await.len() == pushed.len()).await;
    stop.store(true, Ordering::SeqCst);
    let counts: Vec<usize> = join_all(consumers).await.into_iter().map(Result::unwrap).collect();
    let seen = seen.lock().await;
    let slowest = pushed.iter().map(|(id, at)| (seen[id].saturating_duration_since(*at), id)).max().unwrap();
    println!("served {counts:?}, slowest {slowest:?}");
    assert!(slowest.0 < PATIENCE, "{slowest:?}");
    assert!(counts.iter().sum::<usize>() > pushed.len() * 2, "the hot ones were served meanwhile: {counts:?}");
}

/// Consumers parked on one queue on two brokers, pushes on both: each gets its share.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parked_consumers_are_served_in_turn_on_both_brokers() {
    const MESSAGES: usize = 240;
    let a = TestBroker::start().await;
    let b = a.another().await;
    settle(&b).await;
    let stop = Arc::new(AtomicBool::new(false));
    let consumers: Vec<_> = (0..8)
        .map(|n| {
            let client: Client = if n % 2 == 0 { (*a).clone() } else { (*b).clone() };
            let stop = stop.clone();
            tokio::spawn(async move {
                let mut count = 0;
                while !stop.load(Ordering::SeqCst) {
                    count += client.pop(&Pop::queue("q").batch(1).auto_ack().wait_ms(1_000)).await.messages.len();
                }
                count
            })
        })
        .collect();
    settle(&a).await;
    for n in 0..MESSAGES / 2 {
        let item = |client: &str| json!([{ "queue": "q", "partition": format!("{client}{}", n % 10), "payload": n }]);
        tokio::join!(a.push(item("a")), b.push(item("b")));
        between_attempts().await;
    }
    settle(&a).await;
    stop.store(true, Ordering::SeqCst);
    let counts: Vec<usize> = join_all(consumers).await.into_iter().map(Result::unwrap).collect();
    println!("served {counts:?}");
    assert_eq!(counts.iter().sum::<usize>(), MESSAGES);
    let share = MESSAGES / 8;
    assert!(counts.iter().all(|count| *count >= share / 3), "each at least a third of an equal share: {counts:?}");
}
