//! Two and three brokers on one database while notifications are lost and brokers die (`spec/push-pop.md` §7.9).
//!
//! A notification is a hint. Without it a message comes late, by a stated bound: a second for a lost one, five for what a
//! broker that ended did not say any more or a connection that went deaf, and the time of a walk.

mod dedup_model;
mod fairness;
mod kills;
mod notifications;
mod wakeups;

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use crate::harness::{Broker, Client, Pop, Popped, Proxy, Road, TestBroker};

/// Within this a message arrives whatever is lost: five seconds of silence, a second to look, a walk, and slack for a
/// loaded machine.
const BOUND: Duration = Duration::from_secs(9);

/// A broker, and a second one whose wire to the database may lose notifications.
async fn pair() -> (TestBroker, Broker, Proxy) {
    let a = TestBroker::start().await;
    let proxy = Proxy::to(&a.db).await;
    let b = Broker::start(&proxy.url, Road::Fused).await;
    (a, b, proxy)
}

/// A long poll and the moment of its answer.
fn park(client: &Client, pop: Pop) -> JoinHandle<(Popped, Instant)> {
    let (client, pop) = (client.clone(), pop.wait_ms(25_000));
    tokio::spawn(async move {
        let popped = client.pop(&pop).await;
        (popped, Instant::now())
    })
}

/// Lets parked pops settle.
async fn settle(client: &Client) {
    assert!(client.pop(&Pop::queue("a quiet queue").wait_ms(400)).await.is_empty());
}

/// A metric of the process without labels.
async fn metric(client: &Client, name: &str) -> f64 {
    let text = client.get("/metrics/prometheus").await.expect(200).text;
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0.0, |value| value.parse().unwrap())
}
