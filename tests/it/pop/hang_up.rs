//! Clients that go away in the middle of a pop (I15, `spec/push-pop.md` §7.9 "resources").

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::future::join_all;

use crate::harness::{Pop, TestBroker, eventually, hang_up, numbered, open};

/// A parked pop whose client has gone claims nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_parked_pop_claims_nothing() {
    let broker = TestBroker::start().await;
    let target = Pop::queue("q").wait_ms(30_000).target();
    let request = format!("GET {target} HTTP/1.1\r\nHost: r\r\n\r\n");
    let mut parked = Vec::new();
    for _ in 0..10 {
        parked.push(open(broker.address, request.as_bytes()).await);
    }
    assert!(broker.pop(&Pop::queue("quiet").wait_ms(500)).await.is_empty());
    drop(parked);
    assert!(broker.pop(&Pop::queue("quiet").wait_ms(500)).await.is_empty());
    broker.push_ids("q", "p", ["m"]).await;
    let popped = broker.pop(&Pop::queue("q").wait_ms(1000)).await;
    assert_eq!((popped.ids(), popped.messages[0].delivery_attempt), (vec!["m"], 1));
}

/// I15: however many clients hang up at whatever moment, no lease outlives its lease time, and all is delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_hang_ups_leaves_no_lease_beyond_its_time() {
    let broker = TestBroker::start().await;
    for n in 0..10 {
        broker.push_ids("q", &format!("p{n}"), numbered("m", 0..5)).await;
    }
    let target = Pop::queue("q").group("g").all().partitions(2).batch(7).lease(1).wait_ms(20_000).target();
    join_all((0..60).map(|_| hang_up(broker.address, &target))).await;
    let mut seen = BTreeSet::new();
    eventually(Duration::from_secs(20), async || {
        let popped = broker.pop(&Pop::queue("q").group("g").all().partitions(3)).await;
        for message in &popped.messages {
            let fresh = seen.insert((message.partition.clone(), message.transaction_id.clone()));
            assert!(fresh, "acked messages do not come back: {message:?}");
        }
        let acks = broker.ack("g", popped.items("completed")).await;
        assert!(acks.iter().all(|r| r.success), "{acks:?}");
        seen.len() == 50
    })
    .await;
    assert_eq!(broker.db.live_leases().await, 0);
    assert!(broker.is_healthy().await);
}

/// The same with `autoAck`: at most once, and the broker goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn abandoned_auto_ack_pops_lose_at_most_their_own_batch() {
    let broker = TestBroker::start().await;
    let target = Pop::queue("q").auto_ack().batch(1).wait_ms(20_000).target();
    join_all((0..30).map(|_| hang_up(broker.address, &target))).await;
    broker.push_ids("q", "p", numbered("m", 0..100)).await;
    let mut left = Vec::new();
    loop {
        let popped = broker.pop(&Pop::queue("q").auto_ack().batch(10)).await;
        if popped.is_empty() {
            break;
        }
        left.extend(popped.ids().into_iter().map(str::to_owned));
    }
    assert!(left.len() >= 70, "30 pops of one message each cannot take more: {}", left.len());
    assert!(left.contains(&"m99".to_owned()));
    assert!(broker.is_healthy().await);
}

/// Clients that hang up in the middle of a push or an ack leave a broker that works.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_requests_leave_a_working_broker() {
    let broker = TestBroker::start().await;
    let body = r#"{"items":[{"queue":"q","partition":"p","transactionId":"half","payload":1}]}"#;
    for (path, sent) in [("/api/v1/push", body.len()), ("/api/v1/push", 20), ("/api/v1/ack/batch", 0)] {
        let head = format!("POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {}\r\n\r\n", body.len());
        join_all((0..10).map(|_| async {
            let request = format!("{head}{}", &body[..sent]);
            drop(open(broker.address, request.as_bytes()).await);
        }))
        .await;
    }
    broker.push_ids("q", "p", ["whole"]).await;
    let popped = broker.pop(&Pop::queue("q")).await;
    assert!(matches!(popped.ids()[..], ["whole"] | ["half", "whole"] | ["whole", "half"]), "{:?}", popped.ids());
    assert!(broker.is_healthy().await);
}
