//! Committed but held back (`spec/push-pop.md` §6). Time passes by making the rows older.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::harness::{PATIENCE, Pop, TestBroker, eventually, numbered};

fn every_route(group: &str) -> [Pop; 3] {
    [Pop::queue("ns.q"), Pop::partition("ns.q", "p"), Pop::discover().set("namespace", "ns")]
        .map(|pop| pop.group(group).all())
}

/// §6.1: hidden on all three routes until D has passed, then delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delayed_processing_hides_young_segments() {
    let broker = TestBroker::start().await;
    broker.configure("ns.q", json!({ "namespace": "ns", "delayedProcessing": 300 })).await;
    broker.push_ids("ns.q", "p", ["a", "b"]).await;
    broker.db.age(150).await;
    broker.push_ids("ns.q", "p", ["c"]).await;
    for pop in every_route("g") {
        assert!(broker.pop(&pop).await.is_empty());
        assert!(broker.pop(&pop.auto_ack()).await.is_empty());
    }
    broker.db.age(200).await;
    for (n, pop) in every_route("unused").into_iter().enumerate() {
        let popped = broker.pop(&pop.group(&format!("g{n}"))).await;
        assert_eq!(popped.ids(), ["a", "b"], "a contiguous head; the young tail stays hidden");
    }
    let cursor = broker.db.cursor("ns.q", "p", "g").await;
    assert_eq!((cursor.committed, cursor.leased), (-1, false), "§7.5 no. 4: hidden is not empty");
}

/// §6.1: raising D hides what was visible, lowering it shows it, at the next pop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_delay_takes_effect_at_once() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.configure("q", json!({ "delayedProcessing": 100 })).await;
    assert!(broker.pop(&Pop::queue("q")).await.is_empty());
    broker.configure("q", json!({ "delayedProcessing": 0 })).await;
    assert_eq!(broker.pop(&Pop::queue("q").auto_ack()).await.ids(), ["a"]);
    broker.configure("q", json!({ "delayedProcessing": -3 })).await;
    broker.push_ids("q", "p", ["b"]).await;
    assert_eq!(broker.pop(&Pop::queue("q")).await.ids(), ["b"], "<= 0 is off");
}

/// §6.2: held until W after the first undelivered arrival, then all of it at once, the young part included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn window_buffer_holds_the_partition_until_the_oldest_is_old_enough() {
    let broker = TestBroker::start().await;
    broker.configure("ns.q", json!({ "namespace": "ns", "windowBuffer": 300 })).await;
    broker.push_ids("ns.q", "p", ["a"]).await;
    broker.push_ids("ns.q", "p", ["b"]).await;
    for pop in every_route("g") {
        assert!(broker.pop(&pop).await.is_empty());
    }
    broker.db.age(301).await;
    broker.push_ids("ns.q", "p", ["c"]).await;
    for (n, pop) in every_route("unused").into_iter().enumerate() {
        assert_eq!(broker.pop(&pop.group(&format!("g{n}"))).await.ids(), ["a", "b", "c"]);
    }
}

/// §6.2: or until 100 messages wait above the cursor.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn window_buffer_opens_at_a_hundred_messages() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "windowBuffer": 600 })).await;
    broker.push_ids("q", "p", numbered("m", 0..60)).await;
    broker.push_ids("q", "p", numbered("m", 60..99)).await;
    assert!(broker.pop(&Pop::queue("q")).await.is_empty(), "99 wait");
    broker.push_ids("q", "p", ["m99"]).await;
    let popped = broker.pop(&Pop::queue("q").batch(500)).await;
    assert_eq!(popped.ids(), numbered("m", 0..100));
    broker.ack("", popped.items("completed")).await;
    broker.push_ids("q", "p", numbered("n", 0..5)).await;
    assert!(broker.pop(&Pop::queue("q")).await.is_empty(), "counted above the cursor");
}

/// §6.2 [R]: a redelivery is not held again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redelivery_is_not_held_again() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "windowBuffer": 600 })).await;
    broker.push_ids("q", "p", numbered("m", 0..100)).await;
    let popped = broker.pop(&Pop::queue("q").batch(100)).await;
    assert_eq!(popped.messages.len(), 100);
    let acks = broker.ack("", vec![popped.messages[49].item("completed"), popped.messages[50].item("retry")]).await;
    assert!(acks.iter().all(|r| r.success), "{acks:?}");
    let again = broker.pop(&Pop::queue("q").batch(100)).await;
    assert_eq!(again.ids(), numbered("m", 50..100), "50 wait, but they have been delivered once");
}

/// §6: with both set, both must allow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delay_and_window_must_both_allow() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "delayedProcessing": 300, "windowBuffer": 100 })).await;
    broker.push_ids("q", "p", ["a"]).await;
    broker.db.age(150).await;
    assert!(broker.pop(&Pop::partition("q", "p")).await.is_empty(), "the window is over, the delay is not");
    broker.db.age(200).await;
    assert_eq!(broker.pop(&Pop::partition("q", "p")).await.ids(), ["a"]);
}

/// §6.2: a parked pop is woken when the window ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_window_wakes_a_parked_pop() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "windowBuffer": 1 })).await;
    let start = Instant::now();
    broker.push_ids("q", "p", ["a", "b"]).await;
    let popped = broker.pop(&Pop::queue("q").wait_ms(20_000)).await;
    assert_eq!(popped.ids(), ["a", "b"]);
    let took = start.elapsed();
    assert!((Duration::from_millis(950)..Duration::from_millis(3000)).contains(&took), "{took:?}");
}

/// §6.3: an under-full claim waits up to M for more, takes no lease meanwhile, and ends when the batch is full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn min_pop_wait_gathers_an_under_full_batch() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "minPopWaitTime": 20_000 })).await;
    broker.push_ids("q", "p", ["a"]).await;
    let client = broker.clone();
    let start = Instant::now();
    let parked = tokio::spawn(async move { client.pop(&Pop::queue("q").batch(3).wait_ms(30_000)).await });
    assert!(broker.pop(&Pop::queue("quiet").wait_ms(500)).await.is_empty());
    assert!(!parked.is_finished());
    assert_eq!(broker.db.live_leases().await, 0, "no lease while it gathers");
    broker.push_ids("q", "p", ["b"]).await;
    broker.push_ids("q", "p", ["c"]).await;
    assert_eq!(parked.await.unwrap().ids(), ["a", "b", "c"]);
    assert!(start.elapsed() < Duration::from_secs(15), "a full batch ends the wait");
}

/// §6.3: M elapsed, or the pop's own deadline, ends the gathering with what is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn min_pop_wait_ends_after_m_or_at_the_deadline() {
    let broker = TestBroker::start().await;
    for (queue, wait, timeout) in [("m", 800, 20_000), ("deadline", 20_000, 800)] {
        broker.configure(queue, json!({ "minPopWaitTime": wait })).await;
        broker.push_ids(queue, "p", ["a"]).await;
        let start = Instant::now();
        assert_eq!(broker.pop(&Pop::queue(queue).batch(10).wait_ms(timeout)).await.ids(), ["a"], "{queue}");
        let took = start.elapsed();
        assert!((Duration::from_millis(500)..Duration::from_secs(4)).contains(&took), "{queue}: {took:?}");
    }
}

/// §6.3: it applies to waiting wildcard pops with a batch above one only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn min_pop_wait_spares_every_other_pop() {
    let broker = TestBroker::start().await;
    broker.configure("ns.q", json!({ "namespace": "ns", "minPopWaitTime": 20_000 })).await;
    for (n, pop) in [
        Pop::queue("ns.q").batch(10),
        Pop::queue("ns.q").batch(1).wait_ms(30_000),
        Pop::partition("ns.q", "p").batch(10).wait_ms(30_000),
        Pop::discover().set("namespace", "ns").batch(10).wait_ms(30_000),
    ]
    .into_iter()
    .enumerate()
    {
        broker.push_ids("ns.q", "p", [format!("m{n}")]).await;
        let start = Instant::now();
        assert_eq!(broker.pop(&pop.auto_ack()).await.ids(), [format!("m{n}")]);
        assert!(start.elapsed() < Duration::from_secs(5), "{n}: {:?}", start.elapsed());
    }
}

/// A hidden message is found by plain polling once its time has come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delayed_message_is_found_by_polling() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "delayedProcessing": 1 })).await;
    let start = Instant::now();
    broker.push_ids("q", "p", ["m"]).await;
    eventually(PATIENCE, async || broker.pop(&Pop::queue("q")).await.ids() == ["m"]).await;
    assert!(start.elapsed() >= Duration::from_millis(950), "{:?}", start.elapsed());
}
