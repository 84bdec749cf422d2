//! Brokers that die, or stop for a while, beside others that go on.
//!
//! `REGENT_IT_SEED=<seed>` repeats a run, `REGENT_KILL_ROUNDS=<n>` makes it longer.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::{BOUND, metric, park, settle};
use crate::harness::{
    Broker, BrokerProcess, Crew, Cut, Database, Load, PATIENCE, Pop, Proxy, Road, comes_true, eventually, number,
};

const CREW: Crew = Crew { partitions: 8, workers: 4, groups: &["g", "h"], wait_ms: 12_000, rests: 3 };
/// From an answered push to its delivery while brokers die: the notice of a silence, leases of two seconds that died with
/// them on the way, and a machine that starts processes meanwhile.
const BOUND_UNDER_KILLS: Duration = Duration::from_secs(20);

/// Random `kill -9` of two and of three brokers whose notifications are lost now and then: nothing acknowledged is lost or
/// comes back, every group gets everything in order, and nothing waits for longer than it must.
async fn random_kills(brokers: usize) {
    let seed = number("REGENT_IT_SEED").unwrap_or_else(|| rand::random_range(0..1_000_000_000));
    println!("REGENT_IT_SEED={seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let db = Database::migrated().await;
    let (mut wires, mut processes) = (Vec::new(), Vec::new());
    for _ in 0..brokers {
        let wire = Proxy::to(&db).await;
        processes.push(BrokerProcess::on(&wire.url).await);
        wires.push(wire);
    }
    let clients: Vec<_> = processes.iter().map(BrokerProcess::client).collect();
    let load = Load::start(&clients, CREW);
    for round in 0..number("REGENT_KILL_ROUNDS").unwrap_or(3) {
        let lossy = rng.random_range(0..60);
        wires.iter().for_each(|wire| wire.swallow(lossy));
        load.runs_for(rng.random_range(40..200)).await;
        let victim = rng.random_range(0..brokers);
        println!("round {round}: {lossy} % lost, broker {victim} dies");
        processes[victim].kill();
        if rng.random_bool(0.7) {
            load.runs_for(rng.random_range(20..80)).await;
        }
        processes[victim].restart().await;
    }
    wires.iter().for_each(|wire| wire.swallow(0));
    load.runs_for(60).await;
    let longest = load.settles().await;
    assert!(longest < BOUND_UNDER_KILLS, "{longest:?}");
    assert_eq!(db.deadlocks().await, 0);
    processes.iter_mut().for_each(BrokerProcess::terminate);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_kills_of_two_brokers_lose_nothing_and_bring_nothing_back() {
    random_kills(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_kills_of_three_brokers_lose_nothing_and_bring_nothing_back() {
    random_kills(3).await;
}

/// A broker that dies between its answer and its notification: the others notice its silence and look.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_push_of_a_killed_broker_is_delivered_by_the_others() {
    let db = Database::migrated().await;
    let wire = Proxy::to(&db).await;
    let mut a = BrokerProcess::on(&wire.url).await;
    let b = Broker::start(&db.url, Road::Fused).await;
    eventually(PATIENCE, async || metric(&a.client(), "regent_peers").await == 1.0).await;
    a.client().push_ids("q", "p", ["warm"]).await;
    eventually(PATIENCE, async || !b.pop(&Pop::queue("q").auto_ack()).await.is_empty()).await;
    let parked = [park(&b, Pop::queue("q").auto_ack()), park(&b, Pop::partition("r", "p").auto_ack())];
    settle(&b).await;
    for (queue, parked) in ["q", "r"].into_iter().zip(parked) {
        wire.arm(Cut::Before, b"Landed");
        a.client().push_ids(queue, "p", ["last words"]).await;
        let answered = Instant::now();
        eventually(PATIENCE, async || !wire.is_armed()).await;
        if queue == "r" {
            a.kill();
        }
        let (popped, at) = parked.await.unwrap();
        assert_eq!(popped.ids(), ["last words"]);
        assert!(at.saturating_duration_since(answered) < BOUND, "{:?}", at - answered);
    }
}

/// A broker that stands still long enough to be taken for dead hears nothing of what the others commit meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_taken_for_dead_misses_nothing() {
    let db = Database::migrated().await;
    let (a, b) = (BrokerProcess::on(&db.url).await, BrokerProcess::on(&db.url).await);
    let (a_client, b_client) = (a.client(), b.client());
    a_client.push_ids("q", "p", ["warm"]).await;
    eventually(PATIENCE, async || !b_client.pop(&Pop::queue("q").auto_ack()).await.is_empty()).await;
    let parked = park(&b_client, Pop::queue("q").auto_ack());
    settle(&b_client).await;
    b.signal(Signal::SIGSTOP);
    let alone = comes_true(PATIENCE, async || {
        db.execute("UPDATE queen.brokers SET last_seen = last_seen - interval '10 seconds'").await;
        metric(&a_client, "regent_peers").await == 0.0
    })
    .await;
    assert!(alone, "the first believes that it is alone");
    a_client.push_ids("q", "p", ["unsaid"]).await;
    b.signal(Signal::SIGCONT);
    let risen = Instant::now();
    let (popped, at) = parked.await.unwrap();
    assert_eq!(popped.ids(), ["unsaid"]);
    assert!(at.saturating_duration_since(risen) < BOUND, "{:?}", at - risen);
}
