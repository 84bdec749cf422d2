//! What a discovery pop costs follows from what it answers, not from how many queues carry its label (design §5,
//! `spec/push-pop.md` §7.4).

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{BrokerProcess, Client, PATIENCE, Pop, eventually};

/// Queues of one namespace; `REGENT_DISCOVERY_QUEUES` sets another number.
const QUEUES: usize = 2_000;
const POPS: usize = 50;

/// What a broker has done so far.
struct Done {
    statements: f64,
    cpu_seconds: f64,
    walked: f64,
}

async fn done(client: &Client) -> Done {
    let text = client.get("/metrics/prometheus").await.expect(200).text;
    let sum = |prefix: &str, skip: &[&str]| -> f64 {
        let lines = text.lines().filter(|line| line.starts_with(prefix) && !skip.iter().any(|s| line.contains(s)));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    // The background loops go on by the clock; pushes and acks are the test's own.
    let clocked = [
        "heartbeat",
        "notify",
        "switches",
        "retention",
        "statistics",
        "minutes",
        "sizes",
        "due work",
        "loop",
        "lag",
        "partitions",
        "changed",
        "push",
        "storing",
        "ack",
        "segments\"",
        "purging",
        "recent",
        "safe",
    ];
    Done {
        statements: sum("regent_db_statement_seconds_count", &clocked),
        cpu_seconds: sum("regent_process_cpu_seconds", &[]),
        walked: sum("regent_pop_claims_total", &[]),
    }
}

async fn push_to(client: &Client, queues: impl Iterator<Item = usize>, id: &str) {
    let queues: Vec<usize> = queues.collect();
    for chunk in queues.chunks(500) {
        let item =
            |n: &usize| json!({ "queue": format!("wide.q{n}"), "payload": n, "transactionId": format!("{id}-{n}") });
        let items: Vec<Value> = chunk.iter().map(item).collect();
        assert!(client.push(json!(items)).await.iter().all(|result| result.status == "queued"));
    }
}

/// Once a group has met the queues of a label, a pop asks PostgreSQL about those that have something, and about nothing
/// when none has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_warm_discovery_pop_costs_what_it_answers() {
    let queues = std::env::var("REGENT_DISCOVERY_QUEUES").ok().and_then(|n| n.parse().ok()).unwrap_or(QUEUES);
    let process = BrokerProcess::start().await;
    let client = process.client();
    push_to(&client, 0..queues, "old").await;
    let pop = || Pop::discover().set("namespace", "wide").group("g").batch(1).lease(600);
    let started = Instant::now();
    let mut first = client.try_send(reqwest::Method::GET, &pop().target(), None).await;
    for _ in 0..5 {
        if first.as_ref().is_err_and(reqwest::Error::is_timeout) {
            first = client.try_send(reqwest::Method::GET, &pop().target(), None).await;
        }
    }
    first.unwrap().expect(204);
    println!("first contact with {queues} queues: {:?}", started.elapsed());
    let (before, started) = (done(&client).await, Instant::now());
    for _ in 0..POPS {
        assert!(client.pop(&pop()).await.is_empty());
    }
    let (idle, after) = (started.elapsed() / POPS as u32, done(&client).await);
    let per_pop = |from: &Done, to: &Done| {
        let pops = POPS as f64;
        let cpu = (to.cpu_seconds - from.cpu_seconds) / pops * 1e3;
        ((to.statements - from.statements) / pops, (to.walked - from.walked) / pops, cpu)
    };
    let (statements, walked, cpu) = per_pop(&before, &after);
    println!("nothing ready: {idle:?}, {statements:.2} statements, {walked:.2} candidates, {cpu:.2} ms CPU per pop");
    let for_nothing = statements;
    let mut found = BTreeSet::new();
    let mut spent = Duration::ZERO;
    let before = done(&client).await;
    for round in 0..POPS {
        push_to(&client, std::iter::once(round * 37 % queues), &format!("fresh{round}")).await;
        let started = Instant::now();
        let popped = client.pop(&pop()).await;
        spent += started.elapsed();
        found.extend(popped.messages.into_iter().map(|m| m.transaction_id));
    }
    let after = done(&client).await;
    let (statements, walked, cpu) = per_pop(&before, &after);
    let one = spent / POPS as u32;
    println!(
        "one ready: {one:?}, {statements:.2} statements, {walked:.2} candidates, {cpu:.2} ms CPU per pop and push"
    );
    eventually(PATIENCE, async || {
        found.extend(client.pop(&pop()).await.messages.into_iter().map(|m| m.transaction_id));
        found.len() == POPS
    })
    .await;
    assert!(for_nothing < 0.5, "{for_nothing} statements per pop that finds nothing");
    // A claim, the cursor of a partition met for the first time, the claim again: no more than the one partition needs.
    assert!(statements < 6.0, "{statements} statements per pop that finds one message");
    assert!(walked < 4.0, "{walked} candidates per pop that finds one message");
}

/// An `autoAck` pop that finds nothing has learned something all the same: the next one does not look there again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_auto_ack_pop_that_finds_nothing_does_not_look_again() {
    let process = BrokerProcess::start().await;
    let client = process.client();
    let items: Vec<Value> =
        (0..40).map(|n| json!({ "queue": "wide.q", "partition": format!("p{n}"), "payload": n })).collect();
    client.push(json!(items)).await;
    for pop in [Pop::queue("wide.q").group("queue"), Pop::discover().set("namespace", "wide").group("labels")] {
        let pop = pop.auto_ack().partitions(0);
        assert!(client.pop(&pop).await.is_empty(), "new by default");
        let before = done(&client).await;
        for _ in 0..10 {
            assert!(client.pop(&pop).await.is_empty());
        }
        let candidates = done(&client).await.walked - before.walked;
        assert_eq!(candidates, 0.0, "{candidates} candidates of ten pops that had nothing to find");
    }
}
