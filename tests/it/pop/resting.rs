//! Pops that wait with the bare socket (`src/http/resting.rs`): the client sees one request and one answer.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::harness::{PATIENCE, Pop, Road, TestBroker, eventually, numbered, open};

fn get(target: &str, more: &str) -> Vec<u8> {
    format!("GET {target} HTTP/1.1\r\nHost: r\r\n{more}\r\n").into_bytes()
}

async fn parked(broker: &TestBroker, count: usize) {
    eventually(PATIENCE, async || broker.parked() == count).await;
}

/// Reads until `end` has come; answers everything read.
async fn read_until(stream: &mut TcpStream, end: &str) -> String {
    let mut bytes = Vec::new();
    tokio::time::timeout(PATIENCE, async {
        while !bytes.windows(end.len()).any(|w| w == end.as_bytes()) {
            let read = stream.read_buf(&mut bytes).await.unwrap();
            assert!(read > 0, "closed after {:?}", String::from_utf8_lossy(&bytes));
        }
    })
    .await
    .unwrap_or_else(|_| panic!("no {end:?}"));
    String::from_utf8(bytes).unwrap()
}

/// The connection stays, with whatever the client sent behind its pop, in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_behind_a_resting_pop_are_answered_after_it() {
    let broker = TestBroker::start().await;
    let mut stream = open(broker.address, &get(&Pop::queue("q").auto_ack().wait_ms(30_000).target(), "")).await;
    parked(&broker, 1).await;
    stream.write_all(&get(&Pop::queue("q").auto_ack().wait_ms(30_000).target(), "")).await.unwrap();
    stream.write_all(&get("/no/such/route", "")).await.unwrap();
    broker.push_ids("q", "p", ["first"]).await;
    let first = read_until(&mut stream, "\"first\"").await;
    assert!(!first.contains("second") && first.matches("HTTP/1.1 ").count() == 1, "{first}");
    parked(&broker, 1).await;
    broker.push_ids("q", "p", ["second"]).await;
    let rest = read_until(&mut stream, "no_such_route").await;
    assert!(rest.find("second").unwrap() < rest.find("HTTP/1.1 404").unwrap(), "{rest}");
    assert_eq!(rest.matches("HTTP/1.1 ").count(), 2, "{rest}");
}

/// `Connection: close` of the request that rested is honoured.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_was_to_close_closes() {
    let broker = TestBroker::start().await;
    let target = Pop::queue("q").auto_ack().wait_ms(30_000).target();
    let mut stream = open(broker.address, &get(&target, "Connection: close\r\n")).await;
    parked(&broker, 1).await;
    broker.push_ids("q", "p", ["m"]).await;
    let mut answer = String::new();
    tokio::time::timeout(PATIENCE, stream.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"m\""), "{answer}");
    assert!(answer.to_ascii_lowercase().contains("connection: close"), "{answer}");
}

/// A deadline that comes while resting is a 204; the connection serves on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_and_a_pause_reach_a_resting_pop() {
    let broker = TestBroker::start().await;
    let mut stream = open(broker.address, &get(&Pop::queue("q").wait_ms(300).target(), "")).await;
    let answer = read_until(&mut stream, "\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
    let target = Pop::queue("q").group("g").set("conflation", "true").wait_ms(30_000).target();
    stream.write_all(&get(&target, "")).await.unwrap();
    parked(&broker, 1).await;
    broker.post_json("/api/v1/system/maintenance/pop", &serde_json::json!({ "enabled": true })).await;
    let answer = read_until(&mut stream, "}").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"paused\":true"), "{answer}");
}

/// I15: a client that goes away while its pop rests takes nothing with it, a wake-up included.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resting_client_that_leaves_costs_nobody_a_message() {
    let broker = TestBroker::start().await;
    let target = Pop::queue("q").auto_ack().batch(1).wait_ms(30_000).target();
    for round in 0..20 {
        let mut leaving = Vec::new();
        for _ in 0..5 {
            leaving.push(open(broker.address, &get(&target, "")).await);
        }
        parked(&broker, 5).await;
        let mut stays = open(broker.address, &get(&target, "")).await;
        parked(&broker, 6).await;
        drop(leaving);
        parked(&broker, 1).await;
        let id = format!("m{round}");
        broker.push_ids("q", &format!("p{round}"), [&id]).await;
        read_until(&mut stays, &format!("\"{id}\"")).await;
    }
}

/// Answers that the client has not read yet are not lost when its next pop would rest.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unread_answer_survives_the_pop_behind_it() {
    let broker = TestBroker::start().await;
    let big = "x".repeat(100_000);
    for n in 0..80 {
        let item =
            serde_json::json!({ "queue": "big", "partition": "p", "transactionId": format!("b{n}"), "payload": big });
        broker.push(serde_json::json!([item])).await;
    }
    let mut stream = open(broker.address, &get(&Pop::queue("big").auto_ack().batch(80).target(), "")).await;
    stream.write_all(&get(&Pop::queue("q").auto_ack().wait_ms(30_000).target(), "")).await.unwrap();
    broker.push_ids("q", "p", ["behind"]).await;
    let all = read_until(&mut stream, "\"behind\"").await;
    assert_eq!(all.matches("HTTP/1.1 200").count(), 2);
    assert_eq!(all.matches(&big).count(), 80);
}

/// A pop that does not rest (the broker waits longer before, or the client speaks HTTP/1.0) behaves the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pop_that_keeps_its_connection_is_woken_too() {
    let broker = TestBroker::tuned(Road::Fused, |config| config.pop.rest_after_ms = 600_000).await;
    let target = Pop::queue("q").group("g").all().batch(10).wait_ms(30_000).target();
    let mut modern = open(broker.address, &get(&target, "")).await;
    parked(&broker, 1).await;
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    read_until(&mut modern, "\"m2\"").await;

    let broker = TestBroker::start().await;
    let old = format!("GET {target} HTTP/1.0\r\n\r\n");
    let mut old = open(broker.address, old.as_bytes()).await;
    parked(&broker, 1).await;
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    assert!(read_until(&mut old, "\"m2\"").await.starts_with("HTTP/1.0 200"));
}
