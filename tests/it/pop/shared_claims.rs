//! Claims that share statements, and deliveries from memory, under what disturbs them (`docs/adr/2026-11-30-claims-and-reads.md`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::harness::{Broker, Client, PATIENCE, Pop, TestBroker, empty_database, eventually, hang_up, numbered};

async fn parked(client: &Client) -> f64 {
    let text = client.get("/metrics/prometheus").await.expect(200).text;
    let line = text.lines().find(|line| line.starts_with("queen_parked_long_polls ")).expect("the gauge");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Of many pops on one named partition one gets the lease; the others wait and hold nobody else up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_on_one_partition_holds_no_other_pop_up() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "crowded", ["m"]).await;
    broker.push_ids("free", "p", numbered("f", 0..40)).await;
    let crowd = (0..600).map(|_| {
        let client = (*broker).clone();
        tokio::spawn(async move { client.pop(&Pop::partition("q", "crowded").group("g").all().wait_ms(4_000)).await })
    });
    let crowd: Vec<_> = crowd.collect();
    let mut slowest = Duration::ZERO;
    for _ in 0..40 {
        let started = Instant::now();
        let popped = broker.pop(&Pop::queue("free").group("g").all().batch(1).auto_ack()).await;
        slowest = slowest.max(started.elapsed());
        assert_eq!(popped.messages.len(), 1);
        let named = broker.pop(&Pop::partition("free", "p").group("h").all().batch(1)).await;
        broker.ack("h", named.items("completed")).await;
    }
    let answers: Vec<usize> = join_all(crowd).await.into_iter().map(|popped| popped.unwrap().messages.len()).collect();
    assert_eq!(answers.iter().sum::<usize>(), 1, "one lease");
    assert!(slowest < Duration::from_secs(3), "{slowest:?}");
    eventually(PATIENCE, async || parked(&broker).await == 0.0).await;
}

/// I15: clients that hang up anywhere between claim and answer leave a lease at most for its time, and nothing parked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hang_ups_in_a_fused_claim_leak_nothing() {
    let broker = TestBroker::start().await;
    for n in 0..30 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..3)).await;
    }
    for round in 0..6 {
        let named = Pop::partition("q", &format!("p{round}")).group("g").all().lease(1).batch(2);
        let wide = Pop::queue("q").group("g").all().lease(1).batch(4).partitions(4).wait_ms(20_000);
        let idle = Pop::queue("empty").group("g").wait_ms(20_000);
        let targets = [named.target(), wide.target(), idle.target()];
        join_all((0..45).map(|n| hang_up(broker.address, &targets[n % 3]))).await;
    }
    eventually(PATIENCE, async || parked(&broker).await == 0.0).await;
    let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
    eventually(PATIENCE, async || {
        let popped = broker.pop(&Pop::queue("q").group("g").all().batch(50).partitions(30)).await;
        for message in &popped.messages {
            seen.entry(message.partition.clone()).or_default().push(message.transaction_id.clone());
        }
        broker.ack("g", popped.items("completed")).await;
        seen.values().map(Vec::len).sum::<usize>() >= 90
    })
    .await;
    assert!(seen.values().all(|ids| *ids == ["m0", "m1", "m2"]), "in order, each once: {seen:?}");
    assert_eq!(broker.db.live_leases().await, 0);
}

/// I1, I4: what is in memory, what is not, and what another broker stored, in one batch and in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn batches_across_cached_and_uncached_segments_are_whole() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    let mut expected = Vec::new();
    for round in 0..12 {
        let ids = numbered(&format!("r{round}-"), 0..3);
        if round % 3 == 0 {
            b.push_ids("q", "p", &ids).await
        } else {
            a.push_ids("q", "p", &ids).await
        };
        expected.extend(ids);
    }
    for (reader, batch) in [(&*a, 1), (&*a, 4), (&*a, 7), (&*b, 5), (&*b, 100)] {
        let group = format!("g{batch}");
        let mut seen = Vec::new();
        while seen.len() < expected.len() {
            let popped = reader.pop(&Pop::queue("q").group(&group).all().batch(batch)).await;
            assert!(popped.messages.len() as i64 <= batch && !popped.is_empty());
            seen.extend(popped.messages.iter().map(|message| message.transaction_id.clone()));
            assert!(reader.ack(&group, popped.items("completed")).await.iter().all(|result| result.success));
        }
        assert_eq!(seen, expected, "batch {batch}");
    }
    // Back to the beginning: memory and database say the same.
    let seek = json!({ "timestamp": "1970-01-01T00:00:00Z" });
    a.post_json("/api/v1/consumer-groups/g7/queues/q/seek", &seek).await.expect(200);
    let again = a.pop(&Pop::queue("q").group("g7").all().batch(100)).await;
    assert_eq!(again.ids(), expected);
}

/// A queue that was deleted and made again delivers nothing of the old one, whoever remembers it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_a_deleted_queue_is_never_served() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for round in 0..8 {
        let (pusher, deleter): (&Client, &Client) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let ids = numbered(&format!("r{round}-"), 0..3);
        pusher.push_ids("q", "p", &ids).await;
        for client in [pusher, deleter] {
            let group = uuid::Uuid::new_v4().to_string();
            let popped = client.pop(&Pop::queue("q").group(&group).all().batch(10).wait_ms(5_000)).await;
            assert_eq!(popped.ids(), ids, "round {round}");
        }
        let target = "/api/v1/resources/queues/q";
        deleter.try_send(reqwest::Method::DELETE, target, None).await.unwrap().expect(200);
    }
}

/// Payloads of an encrypted queue are opened whether they come from memory or from PostgreSQL.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encrypted_queue_reads_the_same_from_memory() {
    let db = empty_database().await;
    let key = "0123456789abcdef".repeat(4);
    let environment = [("DATABASE_URL", db.url.as_str()), ("QUEEN_ENCRYPTION_KEY", key.as_str())];
    let a = Broker::from_environment(environment).await.unwrap();
    let b = Broker::from_environment(environment).await.unwrap();
    eventually(PATIENCE, || a.is_healthy()).await;
    a.configure("q", json!({ "encryptionEnabled": true })).await;
    a.push_ids("q", "p", numbered("m", 0..5)).await;
    for client in [&*a, &*b] {
        let group = uuid::Uuid::new_v4().to_string();
        let popped = client.pop(&Pop::queue("q").group(&group).all().batch(10)).await;
        let data: Vec<Value> = popped.messages.iter().map(|message| message.data["id"].clone()).collect();
        assert_eq!(json!(data), json!(numbered("m", 0..5)));
    }
}

/// Held back partitions (`delayedProcessing`, `windowBuffer`) share statements with ready ones and delay none of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn held_back_queues_delay_no_other() {
    let broker = TestBroker::start().await;
    broker.configure("late", json!({ "delayedProcessing": 3600 })).await;
    broker.configure("window", json!({ "windowBuffer": 3600 })).await;
    for n in 0..20 {
        let partition = format!("p{n}");
        for queue in ["late", "window", "now"] {
            broker.push_ids(queue, &partition, numbered("m", 0..5)).await;
        }
    }
    let waiting: Vec<_> = (0..60)
        .map(|n| {
            let (client, queue) = ((*broker).clone(), if n % 2 == 0 { "late" } else { "window" });
            tokio::spawn(async move { client.pop(&Pop::queue(queue).group("g").all().batch(50).wait_ms(3_000)).await })
        })
        .collect();
    let started = Instant::now();
    let mut seen = 0;
    while seen < 100 {
        let popped = broker.pop(&Pop::queue("now").group("g").all().batch(5)).await;
        assert!(!popped.is_empty());
        seen += popped.messages.len();
        broker.ack("g", popped.items("completed")).await;
    }
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
    assert!(join_all(waiting).await.into_iter().all(|popped| popped.unwrap().is_empty()));
}
