//! `kill -9` of the broker, and of its PostgreSQL, under load (I3, I8, `design.md` §6), judged by a ledger of what clients
//! were told (`harness/ledger.rs`).

use std::time::Duration;

use sqlx::PgPool;

use crate::harness::{BrokerProcess, Crew, Load, PATIENCE, Pop, Popped, comes_true, eventually, eventually_some};

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
    comes_back(&mut broker, before).await;
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

/// I3: PostgreSQL dies with one ack flush in flight for certain, and more acks gathered behind it. What is answered with
/// success is durable; anything else comes back, or is said to have failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_postgres_under_a_flush_loses_no_ack_that_was_answered() {
    const PARTITIONS: usize = 12;
    let mut broker = BrokerProcess::start_with(&[("QUEEN_ACK_FUSION_SHARDS", "1")]).await;
    let client = broker.client();
    let name = |partition: usize| format!("p{partition}");
    let pop = Pop::queue("q").group("g").all().batch(PARTITIONS as i64).partitions(PARTITIONS as i64).lease(600);
    for partition in 0..PARTITIONS {
        client.push_ids("q", &name(partition), [name(partition)]).await;
    }
    let popped = client.pop(&pop).await;
    assert_eq!(popped.messages.len(), PARTITIONS);
    let items = popped.items("completed");
    let ack = |range: std::ops::Range<usize>| {
        let (client, items) = (client.clone(), items[range].to_vec());
        tokio::spawn(async move { client.ack("g", items).await })
    };
    // Its commit makes the leases durable too, which are written asynchronously.
    let mut results = ack(0..4).await.unwrap();
    assert!(results.iter().all(|result| result.success), "{results:?}");

    let database = PgPool::connect(&broker.embedded_url()).await.unwrap();
    let mut lock = database.begin().await.unwrap();
    sqlx::query("LOCK TABLE queen.log_consumers IN EXCLUSIVE MODE").execute(&mut *lock).await.unwrap();
    let in_flight = ack(4..5);
    let waits =
        "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE 'WITH locked AS %'";
    eventually(PATIENCE, async || sqlx::query_scalar::<_, i64>(waits).fetch_one(&database).await.unwrap() == 1).await;
    let gathered = ack(5..PARTITIONS);
    let waiting = (PARTITIONS - 5) as f64;
    eventually(PATIENCE, async || client.metric("regent_ack_queue_depth").await == waiting).await;
    let before = broker.postmaster().unwrap();
    broker.kill_postgres();
    results.extend(in_flight.await.unwrap());
    results.extend(gathered.await.unwrap());
    comes_back(&mut broker, before).await;

    let database = PgPool::connect(&broker.embedded_url()).await.unwrap();
    let expire =
        "UPDATE queen.log_consumers SET lease_expires_at = now() - interval '1 minute' WHERE worker_id IS NOT NULL";
    let mut again = Vec::new();
    for partition in 0..PARTITIONS {
        let pop = Pop::partition("q", &name(partition)).group("g").all();
        // The pool may still hold connections to the server that died: such a pop is answered 503.
        let reply = eventually_some(PATIENCE, async || {
            sqlx::query(expire).execute(&database).await.unwrap();
            Some(client.pop_reply(&pop).await).filter(|reply| reply.status != 503)
        })
        .await;
        match reply.status {
            204 => {}
            _ => {
                again.extend(reply.expect(200).decode::<Popped>().messages.into_iter().map(|message| message.partition))
            }
        }
    }
    for (message, result) in popped.messages.iter().zip(&results) {
        let came_back = again.contains(&message.partition);
        let failed = result.error.as_deref() == Some("ack flush failed; lease will expire and redeliver");
        let fair = if result.success { !came_back } else { came_back || failed };
        assert!(fair, "{} came back: {came_back}, and was answered {result:?}", message.partition);
    }
    broker.terminate();
}

/// Waits until the broker has brought its PostgreSQL back, or starts both again.
async fn comes_back(broker: &mut BrokerProcess, before: nix::unistd::Pid) {
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
}
