//! Several brokers on one database: PostgreSQL is the truth (I2, I9, `spec/push-pop.md` §10 no. 11).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures_util::future::{join, join_all};
use serde_json::{Value, json};

use crate::harness::{
    Broker, PATIENCE, Pop, Road, TestBroker, assert_left, empty_database, eventually, numbered, on_every_road,
};

const GROUP: &str = "g";

on_every_road!(a_lease_of_one_is_acked_on_the_other, a_partial_ack_elsewhere_is_seen_here);

/// `security-operations.md` §13.2: brokers that boot at once on an empty database all come up, on one schema.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_brokers_boot_at_once_on_an_empty_database() {
    let db = empty_database().await;
    let brokers = join_all((0..3).map(|_| Broker::start(&db.url, Road::Fused))).await;
    for (n, broker) in brokers.iter().enumerate() {
        assert!(broker.is_healthy().await);
        broker.push_ids("q", "p", [format!("m{n}")]).await;
    }
    let popped = brokers[2].pop(&Pop::queue("q")).await;
    assert_eq!(popped.ids(), ["m0", "m1", "m2"]);
    assert_eq!(brokers[0].pop(&Pop::queue("q").group("look").all()).await.partition_id, popped.partition_id);
    for broker in brokers {
        broker.stop().await;
    }
}

/// I2: never two live leases on one (partition, group), whichever brokers race for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_pops_on_two_brokers_never_share_a_partition() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for n in 0..16 {
        a.push_ids("q", &format!("p{n}"), ["x"]).await;
    }
    let pops = (0..32).map(|n| {
        let client = if n % 2 == 0 { (*a).clone() } else { (*b).clone() };
        async move { client.pop(&Pop::queue("q").group(GROUP).all().partitions(1 + n % 2)).await }
    });
    let mut claimed: Vec<String> = Vec::new();
    for popped in join_all(pops).await {
        claimed.extend(popped.messages.into_iter().map(|m| m.partition));
    }
    let distinct: BTreeSet<&String> = claimed.iter().collect();
    assert_eq!(distinct.len(), claimed.len(), "{claimed:?}");
    eventually(PATIENCE, async || {
        claimed.extend(
            b.pop(&Pop::queue("q").group(GROUP).all().partitions(0)).await.messages.into_iter().map(|m| m.partition),
        );
        claimed.len() == 16
    })
    .await;
    assert_eq!(a.db.live_leases().await, 16);
}

/// The registry of the granting broker is a hint: any broker settles the ack, by resolution, with the same answer.
async fn a_lease_of_one_is_acked_on_the_other(a: &TestBroker) {
    let b = a.another().await;
    for status in ["completed", "failed", "retry", "dlq"] {
        a.push_ids(status, "p", numbered("m", 0..3)).await;
        let popped = a.pop(&Pop::queue(status).group(GROUP).all()).await;
        let results = b.ack(GROUP, popped.items(status)).await;
        assert!(results.iter().all(|r| r.success && r.lease_released && r.error.is_none()), "{results:?}");
        assert_eq!(results[0].dlq, status == "dlq");
        // The first broker's memory of that lease must not resurrect it.
        let late = a.ack(GROUP, popped.items("completed")).await;
        assert!(late.iter().all(|r| r.error.as_deref() == Some("invalid or expired lease")), "{late:?}");
        let expected = match status {
            "completed" => vec![],
            "dlq" => vec!["m1", "m2"],
            _ => vec!["m0", "m1", "m2"],
        };
        assert_eq!(b.pop(&Pop::partition(status, "p").group(GROUP)).await.ids(), expected);
    }
}

/// `spec/ack.md` §7: after a partial ack by another broker the full ack must answer `noop` for what was committed.
async fn a_partial_ack_elsewhere_is_seen_here(a: &TestBroker) {
    let b = a.another().await;
    a.push_ids("q", "p", numbered("m", 0..4)).await;
    let popped = a.pop(&Pop::queue("q").group(GROUP).all()).await;
    assert!(b.ack_one(GROUP, popped.messages[1].item("completed")).await.success);
    let results = a.ack(GROUP, popped.items("completed")).await;
    assert_eq!(results.iter().map(|r| r.noop).collect::<Vec<_>>(), [true, true, false, false], "{results:?}");
    assert!(results.iter().all(|r| r.success));
    assert_eq!(a.db.cursor("q", "p", GROUP).await.committed, 3);
}

/// An extension answered by one broker is honoured by a pop on the other, and the ack is accepted by both.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extension_on_one_is_honoured_by_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("q", "p", ["m"]).await;
    let popped = a.pop(&Pop::queue("q").group(GROUP).all().lease(5)).await;
    assert_eq!(b.extend(&popped.lease_id, 600).await["renewed"], 1);
    let past_the_first_expiry = Pop::queue("q").group(GROUP).wait_ms(5300);
    let (here, there) = join(a.pop(&past_the_first_expiry), b.pop(&past_the_first_expiry)).await;
    assert!(here.is_empty() && there.is_empty(), "still held");
    let results = a.ack(GROUP, popped.items("completed")).await;
    assert!(results[0].success && results[0].lease_released, "{results:?}");
}

/// `push-pop.md` §7.4, §7.9: a push on one broker is found on the other: by a parked pop, and by polling.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_on_one_wakes_a_pop_on_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for (round, partition) in ["first", "second", "first", "first"].into_iter().enumerate() {
        let id = format!("m{round}");
        let client = (*b).clone();
        let parked = tokio::spawn(async move {
            let popped = client.pop(&Pop::queue("q").wait_ms(20_000).auto_ack()).await;
            (popped, Instant::now())
        });
        assert!(b.pop(&Pop::queue("quiet").wait_ms(400)).await.is_empty());
        a.push_ids("q", partition, [&id]).await;
        let pushed = Instant::now();
        let (popped, answered) = parked.await.unwrap();
        assert_eq!(popped.ids(), [id.as_str()]);
        assert!(answered.saturating_duration_since(pushed) < Duration::from_millis(1500));
    }
    a.push_ids("q", "third", ["polled"]).await;
    eventually(Duration::from_secs(3), async || b.pop(&Pop::queue("q").auto_ack()).await.ids() == ["polled"]).await;
}

/// An ack on one broker frees the partition for a worker parked on the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_on_one_frees_the_partition_on_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("q", "p", ["m0", "m1"]).await;
    let first = a.pop(&Pop::queue("q").group(GROUP).all().batch(1)).await;
    let client = (*b).clone();
    let parked = tokio::spawn(async move { client.pop(&Pop::queue("q").group(GROUP).wait_ms(20_000)).await });
    assert!(b.pop(&Pop::queue("quiet").wait_ms(300)).await.is_empty());
    let start = Instant::now();
    a.ack(GROUP, first.items("completed")).await;
    assert_eq!(parked.await.unwrap().ids(), ["m1"]);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

/// I9: racing pushes of one key over two brokers queue it once, and every answer names the same original.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deduplication_is_exact_over_two_brokers() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for round in 0..8 {
        let items: Vec<Value> = (0..5)
            .map(|n| json!({ "queue": "q", "partition": "p", "transactionId": format!("r{round}-{n}"), "payload": n }))
            .collect();
        let pushes = (0..6).map(|n| {
            let client = if n % 2 == 0 { (*a).clone() } else { (*b).clone() };
            let items = items.clone();
            async move { client.push(json!(items)).await }
        });
        let answers = join_all(pushes).await;
        for n in 0..5 {
            let of_key: Vec<_> = answers.iter().map(|results| &results[n]).collect();
            assert_eq!(of_key.iter().filter(|r| r.status == "queued").count(), 1, "{of_key:?}");
            assert_eq!(of_key.iter().filter(|r| r.status == "duplicate").count(), 5, "{of_key:?}");
            let originals: BTreeSet<_> = of_key.iter().map(|r| (&r.message_id, r.offset)).collect();
            assert_eq!(originals.len(), 1);
        }
    }
    assert_eq!(a.pop(&Pop::queue("q").batch(100)).await.messages.len(), 40);
}

/// I7 over two brokers: offsets dense, requests contiguous, and both deliver the same order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_brokers_share_one_log() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    let push = async |client: &crate::harness::Client, name: &str| {
        for round in 0..15 {
            let results = client.push_ids("q", "p", numbered(&format!("{name}{round}-"), 0..3)).await;
            let first = results[0].offset.unwrap();
            assert_eq!(results.iter().map(|r| r.offset.unwrap()).collect::<Vec<_>>(), [first, first + 1, first + 2]);
        }
    };
    join(push(&a, "a"), push(&b, "b")).await;
    assert_eq!(a.db.last_offset("q", "p").await, Some(89));
    let seen_a = a.pop(&Pop::partition("q", "p").group("ga").all()).await;
    let seen_b = b.pop(&Pop::partition("q", "p").group("gb").all()).await;
    assert_eq!(seen_a.ids(), seen_b.ids());
    assert_eq!(seen_a.messages.len(), 90);
    assert!(seen_a.messages.is_sorted_by_key(|m| m.created_at.clone()));
}

/// `push-pop.md` §5.3, §4: options, deletes and rebirths are seen by the peer, which never uses the old queue's ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_deleted_on_one_is_gone_on_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for round in 0..5 {
        for (n, broker) in [&*a, &*b].into_iter().enumerate() {
            broker.push_ids("q", "p", [format!("r{round}-{n}")]).await;
        }
        let popped = b.pop(&Pop::partition("q", "p").group(GROUP).all()).await;
        assert_eq!(popped.ids(), [format!("r{round}-0"), format!("r{round}-1")]);
        assert_eq!(a.delete_queue("q").await["deleted"], true);
        let results = b.push(json!([{ "queue": "q", "partition": "p", "transactionId": "again", "payload": 1 }])).await;
        assert_eq!((results[0].status.as_str(), results[0].offset), ("queued", Some(0)), "round {round}");
        assert_eq!(a.pop(&Pop::partition("q", "p").group(GROUP).all()).await.ids(), ["again"]);
        b.delete_queue("q").await;
    }
    let counts = a.db.row_counts().await;
    assert_eq!((counts["log_segments"], counts["log_consumers"], counts["log_txns"]), (0, 0, 0), "no orphans");
}

/// A peer takes new options within about a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_reach_the_other_broker() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    b.push_ids("q", "p", ["m"]).await;
    b.pop(&Pop::queue("q").auto_ack()).await;
    a.configure("q", json!({ "dedupWindowSeconds": 0, "leaseTime": 33 })).await;
    eventually(Duration::from_secs(3), async || {
        let item = json!([{ "queue": "q", "partition": "p", "transactionId": "m", "payload": 1 }]);
        b.push(item).await[0].status == "queued"
    })
    .await;
    let asked = Instant::now();
    b.pop(&Pop::partition("q", "p")).await;
    assert_left(a.db.cursor("q", "p", "__QUEUE_MODE__").await.lease_left.unwrap(), 33.0, asked);
}

/// Losing one broker loses nothing: its leases run out and the other one serves on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_brokers_leases_run_out_on_the_other() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    b.push_ids("q", "p", ["m"]).await;
    assert_eq!(b.pop(&Pop::queue("q").group(GROUP).all().lease(1)).await.ids(), ["m"]);
    b.stop().await;
    let again = a.pop(&Pop::queue("q").group(GROUP).wait_ms(20_000)).await;
    assert_eq!((again.ids(), again.messages[0].delivery_attempt), (vec!["m"], 2));
}

/// The lock order holds: a mix of everything on two brokers never deadlocks (`design.md` §4).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mix_on_two_brokers_never_deadlocks() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    let before = a.db.deadlocks().await;
    let work = (0..12).map(|worker: usize| {
        let client = if worker.is_multiple_of(2) { (*a).clone() } else { (*b).clone() };
        async move {
            for round in 0..8 {
                let mut items: Vec<Value> = (0..12)
                    .map(|n| {
                        let id = format!("{worker}-{round}-{n}");
                        json!({ "queue": "q", "partition": format!("p{}", (n * 7 + worker) % 12), "transactionId": id, "payload": n })
                    })
                    .collect();
                if worker.is_multiple_of(3) {
                    items.reverse();
                }
                assert!(client.push(json!(items)).await.iter().all(|r| r.status == "queued"));
                let group = format!("g{}", worker % 2);
                let popped = client.pop(&Pop::queue("q").group(&group).all().partitions(5)).await;
                let mut acks = popped.items("completed");
                if round % 2 == 1 {
                    acks.reverse();
                }
                for result in client.ack(&group, acks).await {
                    assert!(result.success, "{result:?}");
                }
            }
        }
    });
    join_all(work).await;
    assert_eq!(a.db.deadlocks().await, before);
}
