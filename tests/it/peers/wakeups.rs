//! The traps of `lessons.md` §2 "lost wakeups", each on the broker of the push and on another one.
//!
//! Those that need a lost notification are in `notifications.rs`; seeks and deletions in `groups/`, spool drains in
//! `maintenance/`, replays in `dead_letters/`, hang-ups in `pop/hang_up.rs`.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use uuid::Uuid;

use super::{park, settle};
use crate::harness::{Broker, Client, PATIENCE, Pop, Road, TestBroker, eventually, numbered};

/// The median of waits that may hit a busy machine now and then.
fn median(mut waits: Vec<Duration>) -> Duration {
    waits.sort_unstable();
    waits[waits.len() / 2]
}

/// "Mark lost at partition creation": the first message of a brand-new partition reaches a parked consumer in under 100 ms.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_message_of_a_new_partition_comes_at_once() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    settle(&b).await;
    for (reader, name) in [(&*a, "same"), (&*b, "other")] {
        // From now on: each group has its own rounds.
        reader.pop(&Pop::queue("q").group(name)).await;
        let mut waits = Vec::new();
        for round in 0..15 {
            let parked = park(reader, Pop::queue("q").group(name).batch(1));
            crate::harness::between_attempts().await;
            a.push_ids("q", &format!("{name}{round}"), ["m"]).await;
            let pushed = Instant::now();
            let (popped, at) = parked.await.unwrap();
            assert_eq!(popped.partition, format!("{name}{round}"));
            waits.push(at.saturating_duration_since(pushed));
            reader.ack(name, popped.items("completed")).await;
        }
        assert!(median(waits.clone()) < Duration::from_millis(100), "{name}: {waits:?}");
        assert!(waits.iter().max() < Some(&Duration::from_secs(2)), "{name}: {waits:?}");
    }
}

/// "Push commits between check-out and an empty verdict": a push races the claim that is about to find nothing, over and
/// over; no message stays dark.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_races_an_empty_claim_is_never_lost() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    settle(&b).await;
    for reader in [&*a, &*b] {
        let group = Uuid::new_v4().to_string();
        reader.pop(&Pop::queue("q").group(&group)).await;
        let pop = Pop::queue("q").group(&group).batch(1).lease(300);
        let mut parked = park(reader, pop.clone());
        for round in 0..60 {
            // Claims of others, most of which find nothing, run before, during and after the commit.
            let others: Vec<_> = (0..3)
                .map(|_| {
                    let (client, pop) = (reader.clone(), Pop::partition("q", "p").group(&group).batch(1));
                    tokio::spawn(async move { client.pop(&pop.lease(300)).await })
                })
                .collect();
            a.push_ids("q", "p", [format!("{group}{round}")]).await;
            let pushed = Instant::now();
            let others = join_all(others).await.into_iter().map(Result::unwrap).find(|popped| !popped.is_empty());
            let popped = match others {
                Some(popped) => popped,
                None => {
                    let (popped, at) = (&mut parked).await.unwrap();
                    parked = park(reader, pop.clone());
                    let late = at.saturating_duration_since(pushed);
                    assert!(late < Duration::from_secs(2), "round {round}: {late:?}");
                    popped
                }
            };
            assert_eq!(popped.ids(), [format!("{group}{round}")]);
            assert!(reader.ack(&group, popped.items("completed")).await[0].success);
        }
    }
}

/// "Pop sees a live lease while its releasing ack has already run": two workers take turns on one partition with leases of
/// five minutes; neither ever waits for one.
async fn turns(worker: &Client, other: &Client, pusher: &Client) {
    let queue = Uuid::new_v4().to_string();
    let rounds = 40;
    pusher.push_ids(&queue, "p", numbered("m", 0..rounds)).await;
    let take = async |client: &Client, mine: bool| {
        let mut taken = 0;
        loop {
            let popped = client.pop(&Pop::queue(&queue).group("g").all().batch(1).lease(300).wait_ms(4_000)).await;
            if popped.is_empty() {
                return taken;
            }
            taken += 1;
            // An ack here or elsewhere ends the lease.
            let acker = if mine { client } else { pusher };
            assert!(acker.ack("g", popped.items("completed")).await[0].success);
            if popped.ids() == [format!("m{}", rounds - 1)] {
                return taken;
            }
        }
    };
    let start = Instant::now();
    let (one, two) = tokio::join!(take(worker, true), take(other, false));
    assert_eq!(one + two, rounds);
    // An ack on another broker is noticed within a second; there is at most one for each message.
    println!("{rounds} turns in {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(40), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_its_ack_has_ended_holds_nobody_up() {
    let a = TestBroker::start().await;
    let start = Instant::now();
    turns(&a, &a, &a).await;
    assert!(
        start.elapsed() < Duration::from_secs(12),
        "on one broker nothing waits for a second: {:?}",
        start.elapsed()
    );
    let b = a.another().await;
    settle(&b).await;
    turns(&a, &b, &a).await;
}

/// The same where the broker of the lease was alone when it granted it, and the ack came to one that joined later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_granted_alone_may_be_ended_by_a_newcomer() {
    let a = TestBroker::start().await;
    a.push_ids("q", "p", ["m0", "m1"]).await;
    let first = a.pop(&Pop::queue("q").group("g").all().batch(1).lease(300)).await;
    let parked = park(&a, Pop::queue("q").group("g").batch(1));
    settle(&a).await;
    let b = a.another().await;
    assert!(b.ack("g", first.items("completed")).await[0].success);
    let acked = Instant::now();
    let (popped, at) = parked.await.unwrap();
    assert_eq!(popped.ids(), ["m1"]);
    assert!(at.saturating_duration_since(acked) < Duration::from_secs(5), "{:?}", at - acked);
}

/// "Batch smaller than the backlog acked, no new marks": the rest is delivered though nobody pushes any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backlog_is_drained_in_small_batches_without_another_push() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.push_ids("q", "p", numbered("m", 0..1000)).await;
    for (reader, group) in [(&*a, "ga"), (&*b, "gb")] {
        let mut seen = 0;
        while seen < 1000 {
            let start = Instant::now();
            let popped = reader.pop(&Pop::queue("q").group(group).all().batch(100).wait_ms(20_000)).await;
            assert_eq!(popped.messages.len(), 100, "after {seen}");
            assert!(start.elapsed() < Duration::from_secs(3), "after {seen}: {:?}", start.elapsed());
            seen += popped.messages.len();
            assert!(reader.ack(group, popped.items("completed")).await.iter().all(|r| r.success));
        }
    }
}

/// "Ring key and wake-gate key differ by a byte": awkward names, every route, here and on the other broker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn awkward_names_are_woken_like_others() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for reader in [&*a, &*b] {
        for (nth, name) in ["Größe/ä%2F", "a b+c", "UPPER", "upper", "😀.ta:sk", " ", "\u{1f}x"].into_iter().enumerate()
        {
            for (kind, pop) in [
                Pop::queue(name),
                Pop::partition(name, name),
                Pop::queue(name).group(name).all(),
                Pop::partition(name, name).group(name).all(),
            ]
            .into_iter()
            .enumerate()
            {
                let parked = park(reader, pop.partitions(0).auto_ack());
                if nth + kind == 0 {
                    settle(reader).await;
                }
                crate::harness::between_attempts().await;
                let id = Uuid::new_v4().to_string();
                a.push_ids(name, name, [&id]).await;
                let pushed = Instant::now();
                let (popped, at) = parked.await.unwrap();
                assert!(popped.ids().contains(&id.as_str()) || kind > 1, "{name:?}, {kind}: {popped:?}");
                assert!(!popped.is_empty(), "{name:?}, {kind}");
                let late = at.saturating_duration_since(pushed);
                assert!(late < Duration::from_secs(2), "{name:?}, {kind}: {late:?}");
                // What is left of earlier kinds goes before the next.
                while !reader.pop(&Pop::queue(name).partitions(0).auto_ack()).await.is_empty() {}
                while !reader.pop(&Pop::queue(name).group(name).partitions(0).auto_ack()).await.is_empty() {}
            }
        }
    }
}

/// A transaction's pushes announce themselves like any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_wakes_pops_on_every_broker() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    settle(&b).await;
    for reader in [&*a, &*b] {
        for pop in [Pop::queue("q"), Pop::partition("q", "p")] {
            let parked = park(reader, pop.auto_ack());
            settle(reader).await;
            let item = json!({ "queue": "q", "partition": "p", "payload": 1 });
            let body = json!({ "operations": [{ "type": "push", "items": [item] }] });
            assert_eq!(a.post_json("/api/v1/transaction", &body).await.expect(200).json()["success"], true);
            let pushed = Instant::now();
            let (popped, at) = parked.await.unwrap();
            assert_eq!(popped.messages.len(), 1);
            assert!(at.saturating_duration_since(pushed) < Duration::from_secs(2));
        }
    }
}

/// "Deferred-visibility queue: an entry that is never idle again": once all is delivered, a waiting pop costs no claims.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_queue_comes_to_rest() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    a.configure("q", json!({ "delayedProcessing": 1, "windowBuffer": 1 })).await;
    for client in [&*a, &*b] {
        client.pop(&Pop::queue("q").group("g").all()).await;
    }
    a.push_ids("q", "p", ["m"]).await;
    let popped = a.pop(&Pop::queue("q").group("g").wait_ms(10_000)).await;
    assert_eq!(popped.ids(), ["m"]);
    a.ack("g", popped.items("completed")).await;
    let parked = [park(&a, Pop::queue("q").group("g")), park(&b, Pop::queue("q").group("g"))];
    let scans = async || -> i64 {
        let sql = "SELECT coalesce(sum(idx_scan), 0)::bigint FROM pg_stat_user_indexes WHERE relname = 'log_consumers'";
        sqlx::query_scalar(sql).fetch_one(&a.db.pool).await.unwrap()
    };
    // What is held on the other broker is looked at once more, and let go; and backends tell late of what they read.
    let mut first = scans().await;
    eventually(PATIENCE * 2, async || {
        for _ in 0..5 {
            settle(&a).await;
        }
        let more = scans().await - std::mem::replace(&mut first, scans().await);
        more <= 6
    })
    .await;
    a.push_ids("q", "p", ["last"]).await;
    let served = join_all(parked.into_iter().map(|parked| async { tokio::time::timeout(PATIENCE, parked).await }));
    assert!(served.await.into_iter().flatten().any(|answer| answer.unwrap().0.ids() == ["last"]));
}

/// "Empty-scan watermark advanced while another worker holds leases": empty polls of others never hide what is only leased.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_polls_never_hide_a_leased_backlog() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    settle(&b).await;
    for n in 0..6 {
        a.push_ids("q", &format!("p{n}"), ["m"]).await;
    }
    let held = a.pop(&Pop::queue("q").group("g").all().partitions(0).lease(2)).await;
    assert_eq!(held.messages.len(), 6);
    let parked =
        [park(&a, Pop::queue("q").group("g").partitions(3)), park(&b, Pop::queue("q").group("g").partitions(3))];
    for _ in 0..30 {
        for client in [&*a, &*b] {
            client.pop(&Pop::queue("q").group("g").partitions(0).lease(2)).await;
        }
    }
    let mut seen = BTreeSet::new();
    for parked in parked {
        let (popped, _) = tokio::time::timeout(PATIENCE, parked).await.expect("in time").unwrap();
        seen.extend(popped.messages.into_iter().map(|m| m.partition));
    }
    eventually(PATIENCE, async || {
        let popped = b.pop(&Pop::queue("q").group("g").partitions(0).lease(2)).await;
        seen.extend(popped.messages.into_iter().map(|m| m.partition));
        seen.len() == 6
    })
    .await;
}

/// More partitions at once than a broker names: the whole queue is announced, and walked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_over_very_many_partitions_reaches_the_other_broker() {
    const LANES: usize = 25_000;
    let a = TestBroker::start().await;
    let b = Broker::start(&a.db.url, Road::Fused).await;
    b.pop(&Pop::queue("q").group("g").all()).await;
    settle(&b).await;
    let items: Vec<_> =
        (0..LANES).map(|lane| json!({ "queue": "q", "partition": format!("p{lane}"), "payload": lane })).collect();
    a.push(json!(items)).await;
    let pushed = Instant::now();
    let mut found = 0;
    eventually(Duration::from_secs(30), async || {
        let pop = Pop::queue("q").group("g").batch(5_000).partitions(0).auto_ack();
        found += b.pop(&pop.wait_ms(1_000)).await.messages.len();
        found == LANES
    })
    .await;
    println!("{LANES} partitions in {:?}", pushed.elapsed());
}
