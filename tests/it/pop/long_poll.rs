//! `wait=true`: what ends it, and when (`spec/push-pop.md` §7.9).
//!
//! A pop on a quiet queue with a short timeout serves as the clock: it lets time pass while another pop is parked.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::json;
use tokio::task::JoinHandle;

use crate::harness::{Client, PATIENCE, Pop, Popped, TestBroker, eventually, eventually_some};

/// A parked pop and the moment of its answer.
fn park(client: &Client, pop: Pop) -> JoinHandle<(Popped, Instant)> {
    let client = client.clone();
    tokio::spawn(async move {
        let popped = client.pop(&pop).await;
        (popped, Instant::now())
    })
}

/// Lets the parked pops settle: longer than the first fallback intervals.
async fn settle(client: &Client) {
    assert!(client.pop(&Pop::queue("a quiet queue").wait_ms(700)).await.is_empty());
}

/// The deadline: not before it, and not long after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quiet_queue_answers_204_at_the_deadline() {
    let broker = TestBroker::start().await;
    broker.push_ids("leased", "p", ["m"]).await;
    broker.pop(&Pop::queue("leased")).await;
    for pop in
        [Pop::queue("unknown"), Pop::queue("leased"), Pop::partition("leased", "p"), Pop::discover().set("task", "t")]
    {
        let start = Instant::now();
        assert!(broker.pop(&pop.wait_ms(600)).await.is_empty());
        let took = start.elapsed();
        assert!((Duration::from_millis(590)..Duration::from_millis(1600)).contains(&took), "{took:?}");
    }
}

/// §7.2: `timeout <= 0` does not park, and `timeout` without `wait` means nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_time_left_nothing_parks() {
    let broker = TestBroker::start().await;
    for pop in [Pop::queue("q").wait_ms(0), Pop::queue("q").wait_ms(-5), Pop::queue("q").set("timeout", 20_000)] {
        let start = Instant::now();
        assert!(broker.pop(&pop).await.is_empty());
        assert!(start.elapsed() < Duration::from_secs(3), "{pop:?}");
    }
}

/// What is there is answered at once, without waiting for a full batch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_there_is_answered_at_once() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let start = Instant::now();
    assert_eq!(broker.pop(&Pop::queue("q").batch(100).wait_ms(20_000)).await.ids(), ["m"]);
    assert!(start.elapsed() < Duration::from_secs(3));
}

/// A push wakes a parked pop on every route: unknown queue, known partition, new partition, by label.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_wakes_every_kind_of_pop() {
    let broker = TestBroker::start().await;
    broker.push_ids("ns.known", "p", ["old"]).await;
    broker.pop(&Pop::queue("ns.known").partitions(0).auto_ack()).await;
    for (pop, queue, partition) in [
        (Pop::queue("ns.unknown"), "ns.unknown", "p"),
        (Pop::queue("ns.known"), "ns.known", "p"),
        (Pop::queue("ns.known"), "ns.known", "a new one"),
        (Pop::partition("ns.known", "p"), "ns.known", "p"),
        (Pop::partition("ns.known", "not yet"), "ns.known", "not yet"),
        (Pop::partition("ns.later", "p"), "ns.later", "p"),
        (Pop::discover().set("namespace", "ns"), "ns.known", "p"),
        (Pop::discover().set("task", "never-seen"), "x.never-seen", "p"),
    ] {
        println!("{}", pop.target());
        let parked = park(&broker, pop.wait_ms(20_000).auto_ack());
        settle(&broker).await;
        let id = uuid::Uuid::new_v4().to_string();
        broker.push_ids(queue, partition, [&id]).await;
        let pushed = Instant::now();
        let (popped, answered) = parked.await.unwrap();
        assert_eq!(popped.ids(), [id.as_str()]);
        let latency = answered.saturating_duration_since(pushed);
        assert!(latency < Duration::from_millis(900), "woken, not found by the fallback: {latency:?}");
    }
}

/// The wake-up is prompt: over many rounds it beats what polling could do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waking_takes_milliseconds() {
    let broker = TestBroker::start().await;
    let mut latencies = Vec::new();
    for round in 0..5 {
        let parked = park(&broker, Pop::queue("q").wait_ms(20_000).auto_ack());
        settle(&broker).await;
        broker.push_ids("q", "p", [format!("m{round}")]).await;
        let pushed = Instant::now();
        let (popped, answered) = parked.await.unwrap();
        assert_eq!(popped.messages.len(), 1);
        latencies.push(answered.saturating_duration_since(pushed));
    }
    latencies.sort_unstable();
    assert!(latencies[2] < Duration::from_millis(100), "median of {latencies:?}");
}

/// An ack that frees a partition with backlog wakes the next worker; so does a nack of every kind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ack_or_nack_wakes_the_next_worker() {
    let broker = TestBroker::start().await;
    for (status, expected) in [("completed", "b"), ("retry", "a"), ("failed", "a"), ("dlq", "b")] {
        broker.push_ids(status, "p", ["a", "b"]).await;
        let first = broker.pop(&Pop::queue(status).group("g").all().batch(1)).await;
        assert_eq!(first.ids(), ["a"]);
        let parked = park(&broker, Pop::queue(status).group("g").batch(1).wait_ms(20_000));
        settle(&broker).await;
        assert!(!parked.is_finished(), "{status}: the lease holds");
        broker.ack("g", first.items(status)).await;
        let acked = Instant::now();
        let (popped, answered) = parked.await.unwrap();
        assert_eq!(popped.ids(), [expected], "{status}");
        let latency = answered.saturating_duration_since(acked);
        assert!(latency < Duration::from_millis(900), "{status}: {latency:?}");
    }
}

/// A lease that expires wakes a parked pop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expiring_lease_wakes_a_parked_pop() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let start = Instant::now();
    broker.pop(&Pop::queue("q").lease(1)).await;
    let again = broker.pop(&Pop::queue("q").wait_ms(20_000)).await;
    assert_eq!((again.ids(), again.messages[0].delivery_attempt), (vec!["m"], 2));
    let took = start.elapsed();
    assert!((Duration::from_millis(950)..Duration::from_millis(3500)).contains(&took), "{took:?}");
}

/// §6.1, §10 no. 8: a parked pop is woken at the visibility deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_visibility_deadline_wakes_a_parked_pop() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "delayedProcessing": 1 })).await;
    let parked = park(&broker, Pop::queue("q").wait_ms(20_000));
    let start = Instant::now();
    broker.push_ids("q", "p", ["m"]).await;
    let (popped, answered) = parked.await.unwrap();
    assert_eq!(popped.ids(), ["m"]);
    let took = answered.duration_since(start);
    assert!((Duration::from_millis(950)..Duration::from_millis(3000)).contains(&took), "{took:?}");
}

/// `ack.md` §5: the end of a `retryDelay` wakes a parked pop, at most 100 ms late on an idle machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_retry_delay_wakes_a_parked_pop() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "retryDelay": 1000 })).await;
    broker.push_ids("q", "p", ["m"]).await;
    let popped = broker.pop(&Pop::queue("q").group("g").all()).await;
    broker.ack("g", popped.items("failed")).await;
    let start = Instant::now();
    let again = broker.pop(&Pop::queue("q").group("g").wait_ms(20_000)).await;
    assert_eq!(again.ids(), ["m"]);
    let took = start.elapsed();
    assert!((Duration::from_millis(900)..Duration::from_millis(2500)).contains(&took), "{took:?}");
}

/// Losing the race: one message, many parked workers: one answer, the others park on and end at their deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_message_wakes_many_and_serves_one() {
    let broker = TestBroker::start().await;
    let asked = Instant::now();
    let parked: Vec<_> = (0..20).map(|_| park(&broker, Pop::queue("q").wait_ms(5000))).collect();
    settle(&broker).await;
    broker.push_ids("q", "p", ["m"]).await;
    let answers: Vec<_> = join_all(parked).await.into_iter().map(Result::unwrap).collect();
    let served: Vec<_> = answers.iter().filter(|(popped, _)| !popped.is_empty()).collect();
    assert_eq!(served.len(), 1);
    for (popped, answered) in &answers {
        if popped.is_empty() {
            assert!(answered.duration_since(asked) >= Duration::from_millis(5000), "it parked again");
        }
    }
}

/// Many partitions pushed at once serve many parked workers at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_push_serves_as_many_workers_as_partitions() {
    let broker = TestBroker::start().await;
    let parked: Vec<_> = (0..8).map(|_| park(&broker, Pop::queue("q").wait_ms(20_000))).collect();
    settle(&broker).await;
    let items: Vec<_> = (0..8).map(|n| json!({ "queue": "q", "partition": format!("p{n}"), "payload": n })).collect();
    broker.push(json!(items)).await;
    let mut seen: Vec<String> = join_all(parked).await.into_iter().map(|answer| answer.unwrap().0.partition).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..8).map(|n| format!("p{n}")).collect::<Vec<_>>());
}

/// "Resources": parked pops hold no connection, so everything else goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parked_pops_hold_no_connection() {
    let broker = TestBroker::start().await;
    let parked: Vec<_> = (0..200)
        .map(|n| park(&broker, Pop::queue(&format!("idle{}", n % 10)).group(&format!("g{n}")).wait_ms(10_000)))
        .collect();
    settle(&broker).await;
    for n in 0..20 {
        broker.push_ids("busy", "p", [format!("m{n}")]).await;
        assert_eq!(broker.pop(&Pop::queue("busy").auto_ack()).await.messages.len(), 1);
    }
    assert!(parked.iter().all(|pop| !pop.is_finished()), "all that went on beside them");
    for answer in join_all(parked).await {
        assert!(answer.unwrap().0.is_empty());
    }
}

/// §14 no. 25: pops parked on a deleted queue stay parked, and the push that recreates it wakes them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pop_parked_on_a_deleted_queue_sees_the_new_one() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["old"]).await;
    broker.pop(&Pop::queue("q").auto_ack()).await;
    let parked = park(&broker, Pop::queue("q").wait_ms(20_000));
    settle(&broker).await;
    broker.delete_queue("q").await;
    settle(&broker).await;
    assert!(!parked.is_finished());
    broker.push_ids("q", "p", ["new"]).await;
    let (popped, _) = tokio::time::timeout(PATIENCE, parked).await.unwrap().unwrap();
    assert_eq!(popped.ids(), ["new"]);
    assert_eq!(broker.db.cursor("q", "p", "__QUEUE_MODE__").await.batch_end, Some(0));
}

/// §7.9: a first contact may park: a *new* group registers when it parks, not when it is woken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_group_registers_before_it_parks() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["old"]).await;
    let parked = park(&broker, Pop::queue("q").group("g").wait_ms(20_000));
    eventually(PATIENCE, async || broker.db.row_counts().await["consumer_groups"] == 1).await;
    broker.push_ids("q", "p", ["new"]).await;
    assert_eq!(parked.await.unwrap().0.ids(), ["new"]);
}

/// Shutdown answers the parked pops instead of cutting them off (`design.md` §6).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_stop_answers_parked_pops() {
    let broker = TestBroker::start().await;
    let other = broker.another().await;
    let client = (*other).clone();
    let parked = tokio::spawn(async move {
        client.try_send(reqwest::Method::GET, &Pop::queue("q").wait_ms(30_000).target(), None).await
    });
    eventually_some(PATIENCE, async || broker.db.queue_names().await.pop()).await;
    settle(&broker).await;
    let start = Instant::now();
    other.stop().await;
    let reply = parked.await.unwrap().expect("an answer, not a broken connection");
    assert!(matches!(reply.status, 204 | 503), "{}", reply.status);
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}
