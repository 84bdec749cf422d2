//! Notifications that are lost, one or all, for a while or for ever.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;

use super::{BOUND, metric, pair, park, settle};
use crate::harness::{Broker, PATIENCE, Pop, Road, TestBroker, comes_true, eventually, numbered};

/// Lessons "mesh hint dropped": every kind of parked pop gets its message all the same, soon, and a counter shows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_lost_notification_said_is_found_within_seconds() {
    let (a, b, proxy) = pair().await;
    a.push_ids("ns.known", "p", ["old"]).await;
    b.pop(&Pop::queue("ns.known").partitions(0).auto_ack()).await;
    let missed = metric(&b, "regent_peer_notifications_missed_total").await;
    for (pop, queue, partition) in [
        (Pop::queue("ns.known"), "ns.known", "p"),
        (Pop::queue("ns.known"), "ns.known", "a new one"),
        (Pop::queue("ns.unknown"), "ns.unknown", "p"),
        (Pop::partition("ns.known", "p"), "ns.known", "p"),
        (Pop::partition("ns.later", "p"), "ns.later", "p"),
        (Pop::discover().set("task", "seen-later"), "x.seen-later", "p"),
    ] {
        let parked = park(&b, pop.clone().auto_ack());
        settle(&b).await;
        let before = proxy.swallowed();
        proxy.swallow(100);
        let id = uuid::Uuid::new_v4().to_string();
        a.push_ids(queue, partition, [&id]).await;
        let pushed = Instant::now();
        eventually(PATIENCE, async || proxy.swallowed() > before).await;
        proxy.swallow(0);
        let (popped, answered) = parked.await.unwrap();
        assert_eq!(popped.ids(), [id.as_str()], "{}", pop.target());
        let late = answered.saturating_duration_since(pushed);
        assert!(late < Duration::from_secs(4), "{}: {late:?}", pop.target());
    }
    assert!(metric(&b, "regent_peer_notifications_missed_total").await > missed);
}

/// A broker that hears nothing at all, not even itself, walks by itself until it can hear again, and then hears.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deaf_broker_still_delivers_and_recovers() {
    let (a, b, proxy) = pair().await;
    a.push_ids("q", "p0", ["warm"]).await;
    eventually(PATIENCE, async || !b.pop(&Pop::queue("q").auto_ack()).await.is_empty()).await;
    proxy.swallow(100);
    let mut last = Duration::ZERO;
    for round in 0..4 {
        let parked = park(&b, Pop::queue("q").auto_ack());
        settle(&b).await;
        a.push_ids("q", &format!("p{round}"), [format!("m{round}")]).await;
        let pushed = Instant::now();
        let (popped, answered) = parked.await.unwrap();
        assert_eq!(popped.ids(), [format!("m{round}")]);
        last = answered.saturating_duration_since(pushed);
        assert!(last < BOUND, "round {round}: {last:?}");
    }
    assert!(last < Duration::from_secs(4), "once it knows that it is deaf, it walks every second: {last:?}");
    proxy.swallow(0);
    // Tries to listen again grow rarer; until one succeeds the walks go on.
    let heard = comes_true(Duration::from_secs(10), async || {
        let parked = park(&b, Pop::queue("q").auto_ack());
        settle(&b).await;
        a.push_ids("q", "p0", [uuid::Uuid::new_v4().to_string()]).await;
        let pushed = Instant::now();
        let (popped, answered) = parked.await.unwrap();
        assert_eq!(popped.messages.len(), 1);
        answered.saturating_duration_since(pushed) < Duration::from_millis(150)
    })
    .await;
    assert!(heard, "it hears again");
}

/// What else a notification says: a seek, a deleted group, a deleted queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_a_deletion_and_a_rebirth_that_nobody_was_told_of_are_found() {
    let (a, b, proxy) = pair().await;
    let lossy = async || {
        let before = proxy.swallowed();
        proxy.swallow(100);
        before
    };
    let whole = async |before: usize| {
        eventually(PATIENCE, async || proxy.swallowed() > before).await;
        proxy.swallow(0);
    };
    a.push_ids("q", "p", ["m"]).await;
    let popped = b.pop(&Pop::queue("q").group("g").all()).await;
    b.ack("g", popped.items("completed")).await;

    for by_partition in ["", "/partitions/p"] {
        let parked = park(&b, Pop::queue("q").group("g"));
        settle(&b).await;
        let before = lossy().await;
        let target = format!("/api/v1/consumer-groups/g/queues/q{by_partition}/seek");
        a.post_json(&target, &json!({ "timestamp": "1970-01-01T00:00:00Z" })).await.expect(200);
        whole(before).await;
        let (popped, _) = tokio::time::timeout(BOUND, parked).await.expect("in time").unwrap();
        assert_eq!(popped.ids(), ["m"], "replayed after a seek of {by_partition:?}");
        b.ack("g", popped.items("completed")).await;
    }

    let parked = park(&b, Pop::queue("q").group("g").all());
    settle(&b).await;
    let before = lossy().await;
    let gone = "/api/v1/consumer-groups/g/queues/q?deleteMetadata=true";
    a.try_send(reqwest::Method::DELETE, gone, None).await.unwrap().expect(200);
    whole(before).await;
    let (popped, _) = tokio::time::timeout(BOUND, parked).await.expect("in time").unwrap();
    assert_eq!(popped.ids(), ["m"], "a first contact again");

    // Registered anew on the queue of that name.
    b.pop(&Pop::queue("q").group("h").all().auto_ack()).await;
    let parked = park(&b, Pop::queue("q").group("h").all());
    settle(&b).await;
    let before = lossy().await;
    a.delete_queue("q").await;
    a.push_ids("q", "p", ["reborn"]).await;
    whole(before).await;
    let (popped, _) = tokio::time::timeout(BOUND, parked).await.expect("in time").unwrap();
    assert_eq!(popped.ids(), ["reborn"]);
}

/// A lone broker tells nobody. One that joins while it pushes must not miss what was committed before it was known of.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_pushed_while_nobody_listened_is_found_by_the_newcomer() {
    for round in 0..3 {
        let a = TestBroker::start().await;
        a.push_ids("q", "p", ["first"]).await;
        let pushes = async {
            for n in 0..60 {
                a.push_ids("q", &format!("p{n}"), [format!("m{n}")]).await;
                crate::harness::between_attempts().await;
            }
            Instant::now()
        };
        let pops = async {
            let b = a.another().await;
            let mut seen = BTreeSet::new();
            while seen.len() < 61 {
                let popped = b.pop(&Pop::queue("q").partitions(0).auto_ack().wait_ms(25_000)).await;
                assert!(!popped.is_empty(), "round {round}: {} of 61 found", seen.len());
                seen.extend(popped.messages.into_iter().map(|m| m.transaction_id));
            }
            (Instant::now(), b)
        };
        let (pushed, (found, b)) = tokio::join!(pushes, pops);
        assert!(found.saturating_duration_since(pushed) < BOUND, "{:?}", found - pushed);
        b.stop().await;
    }
}

/// Lessons "repair walk fails": a walk that the database interrupts is made again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_walk_that_fails_is_made_again() {
    let a = TestBroker::start().await;
    let proxy = crate::harness::Proxy::to(&a.db).await;
    let b = Broker::start_impatient(&proxy.url, Road::Fused).await;
    a.push_ids("q", "p", ["old"]).await;
    eventually(PATIENCE, async || !b.pop(&Pop::queue("q").auto_ack()).await.is_empty()).await;
    let parked = park(&b, Pop::queue("q").auto_ack());
    settle(&b).await;
    let before = proxy.swallowed();
    proxy.swallow(100);
    a.push_ids("q", "p", ["new"]).await;
    eventually(PATIENCE, async || proxy.swallowed() > before).await;
    // Every statement of the walk meets this lock and runs into its timeout.
    let mut holder = a.db.pool.begin().await.unwrap();
    sqlx::query("LOCK TABLE queen.log_partitions IN ACCESS EXCLUSIVE MODE").execute(&mut *holder).await.unwrap();
    proxy.swallow(0);
    let answered = comes_true(Duration::from_secs(4), async || parked.is_finished()).await;
    assert!(!answered, "longer than the timeout, and nothing can be known yet");
    holder.rollback().await.unwrap();
    let (popped, _) = tokio::time::timeout(BOUND, parked).await.expect("in time").unwrap();
    assert_eq!(popped.ids(), ["new"]);
}

/// Lessons "paged walk": what lands on a page that a walk has passed, or commits late, is found all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deaf_broker_finds_what_lands_behind_its_walk() {
    const LANES: usize = 2_500;
    let (a, b, proxy) = pair().await;
    let item = |lane: usize, id: String| json!({ "queue": "q", "partition": format!("p{lane:05}"), "transactionId": id, "payload": 1 });
    let first: Vec<_> = (0..LANES).map(|lane| item(lane, format!("first{lane}"))).collect();
    a.push(json!(first)).await;
    proxy.swallow(100);
    let reader = async |seen: &mut BTreeSet<String>, wanted: usize| {
        let end = Instant::now() + Duration::from_secs(40);
        while seen.len() < wanted && Instant::now() < end {
            let pop = Pop::queue("q").group("g").all().batch(2_000).partitions(0).auto_ack();
            let popped = b.pop(&pop.wait_ms(10_000)).await;
            seen.extend(popped.messages.into_iter().map(|m| m.transaction_id));
        }
        assert_eq!(seen.len(), wanted);
    };
    let mut seen = BTreeSet::new();
    reader(&mut seen, LANES).await;
    let writers = async {
        join_all((0..30).map(|n| {
            let (client, lane) = ((*a).clone(), (n * 83 + 2) % LANES);
            async move { client.push_ids("q", &format!("p{lane:05}"), [format!("second{n}")]).await }
        }))
        .await;
        // One commit is held up by a lock while walks go by.
        let mut holder = a.db.pool.begin().await.unwrap();
        let lock = "SELECT 1 FROM queen.log_partitions WHERE name = 'p00001' FOR NO KEY UPDATE";
        sqlx::query(lock).execute(&mut *holder).await.unwrap();
        let late = {
            let client = (*a).clone();
            tokio::spawn(async move { client.push_ids("q", "p00001", ["late"]).await })
        };
        assert!(!comes_true(Duration::from_secs(3), async || late.is_finished()).await);
        holder.rollback().await.unwrap();
        late.await.unwrap();
    };
    tokio::join!(reader(&mut seen, LANES + 31), writers);
    assert!(seen.contains("late"));
}

/// Lessons "group forgotten and recreated during a walk": the new one is walked for itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_recreated_during_its_walk_finds_everything() {
    const LANES: usize = 3_000;
    let a = TestBroker::start().await;
    let b = a.another().await;
    let items: Vec<_> =
        (0..LANES).map(|lane| json!({ "queue": "q", "partition": format!("p{lane}"), "payload": 1 })).collect();
    a.push(json!(items)).await;
    for round in 0..4 {
        let first = b.pop(&Pop::queue("q").group("g").all().batch(5).partitions(5)).await;
        assert!(!first.is_empty(), "round {round}: walked no further than needed");
        let gone = "/api/v1/consumer-groups/g/queues/q?deleteMetadata=true";
        let from = if round % 2 == 0 { &*a } else { &*b };
        from.try_send(reqwest::Method::DELETE, gone, None).await.unwrap().expect(200);
    }
    let mut found = 0;
    eventually(Duration::from_secs(30), async || {
        let popped = b.pop(&Pop::queue("q").group("g").all().batch(2_000).partitions(0).auto_ack()).await;
        found += popped.messages.len();
        found >= LANES
    })
    .await;
    assert_eq!(found, LANES);
}

/// Three brokers whose wires lose half of what is said: every message reaches every group once, in order, within the bound.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_brokers_on_lossy_wires_deliver_everything_in_time() {
    let a = TestBroker::start().await;
    let (mut brokers, mut wires) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let proxy = crate::harness::Proxy::to(&a.db).await;
        brokers.push(Broker::start(&proxy.url, Road::Fused).await);
        wires.push(proxy);
    }
    wires.iter().for_each(|wire| wire.swallow(50));
    let messages = 60;
    let consumers = (0..2).flat_map(|group| (0..3).map(move |at| (group, at)));
    let consumers: Vec<_> = consumers
        .map(|(group, at)| {
            let client = (*brokers[at]).clone();
            tokio::spawn(async move {
                let mut seen = Vec::new();
                loop {
                    // Nothing but a wake-up ends these in time.
                    let pop = Pop::queue("q").group(&format!("g{group}")).all().batch(20).partitions(3).wait_ms(15_000);
                    let popped = client.pop(&pop).await;
                    let now = Instant::now();
                    for ack in client.ack(&format!("g{group}"), popped.items("completed")).await {
                        assert!(ack.success && !ack.noop, "{ack:?}");
                    }
                    let (end, rest): (Vec<_>, Vec<_>) =
                        popped.messages.into_iter().map(|m| m.transaction_id).partition(|id| id.starts_with("end"));
                    if rest.is_empty() {
                        return (group, seen);
                    }
                    seen.extend(rest.into_iter().map(|id| (id, now)));
                    if !end.is_empty() {
                        return (group, seen);
                    }
                }
            })
        })
        .collect();
    let mut pushed = std::collections::BTreeMap::new();
    for n in 0..messages {
        let id = format!("m{n}");
        brokers[n % 3].push_ids("q", &format!("p{}", n % 7), [&id]).await;
        pushed.insert(id, Instant::now());
        for _ in 0..5 {
            crate::harness::between_attempts().await;
        }
    }
    settle(&a).await;
    let mut seen = [BTreeSet::new(), BTreeSet::new()];
    let mut slowest = Duration::ZERO;
    wires.iter().for_each(|wire| wire.swallow(0));
    // Nine per group: each consumer takes its end sooner or later, or its poll runs out.
    let ends: Vec<String> = numbered("end", 0..9);
    for (n, id) in ends.iter().enumerate() {
        brokers[0].push_ids("q", &format!("end{n}"), [id]).await;
    }
    for consumer in join_all(consumers).await {
        let (group, got) = consumer.unwrap();
        for (id, at) in got {
            slowest = slowest.max(at.saturating_duration_since(pushed[&id]));
            assert!(seen[group].insert(id.clone()), "{id} came twice to group {group}");
        }
    }
    for (group, seen) in seen.iter().enumerate() {
        assert_eq!(seen.len(), messages, "group {group}");
    }
    println!("the slowest of {} deliveries took {slowest:?}", messages * 2);
    assert!(slowest < BOUND, "{slowest:?}");
    assert!(wires.iter().any(|wire| wire.swallowed() > 0));
}
