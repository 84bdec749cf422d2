//! The connection breaks around the commit (§2.11, README ruling 7): success is never told without a commit, a rollback
//! never with one, and nothing is stored twice.

use serde_json::{Value, json};

use super::{GROUP, ack_op, ack_ops, leased, push_op, reply};
use crate::harness::{Cut, PATIENCE, Road, TestBroker, eventually};

async fn cut(cut: Cut, bytes: &[u8], window: i64, operations: impl Fn(&crate::harness::Popped) -> Vec<Value>) -> Value {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.configure("out", json!({ "dedupWindowSeconds": window })).await;
    broker.push_ids("out", "p", ["before"]).await;
    let popped = leased(&broker, &["a", "b"]).await;
    let operations = operations(&popped);
    proxy.arm(cut, bytes);
    let answer = reply(&broker, &operations).await;
    assert!(!proxy.is_armed(), "the bundle met the cut");
    assert_eq!(answer.status, 200, "{}", answer.text);
    let answer = answer.json();
    assert_eq!(answer["success"], true, "the outcome can be found out, or the bundle sent again: {answer}");
    let pushes = operations.iter().filter(|op| op["type"] == "push").count() as i64;
    let acks = operations.iter().filter(|op| op["type"] == "ack").count() as i64;
    assert_eq!(broker.db.last_offset("out", "p").await, Some(pushes), "once");
    assert_eq!(broker.db.cursor("in", "p", GROUP).await.committed, acks - 1);
    answer
}

fn both(popped: &crate::harness::Popped) -> Vec<Value> {
    let mut operations = ack_ops(popped, "completed");
    operations.push(push_op("out", "p", "m"));
    operations
}

fn acks_alone(popped: &crate::harness::Popped) -> Vec<Value> {
    ack_ops(popped, "completed")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_that_never_arrived() {
    let hash = xxhash_rust::xxh3::xxh3_128(b"m").to_be_bytes();
    cut(Cut::Before, &hash, 3600, both).await;
    cut(Cut::After, &hash, 3600, both).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived() {
    cut(Cut::Before, b"COMMIT", 3600, both).await;
    cut(Cut::Before, b"COMMIT", 0, both).await;
    cut(Cut::Before, b"COMMIT", 0, acks_alone).await;
}

/// The hard one: it is there, and the broker was not told. Sent again as if new it would be `duplicate`, stored twice,
/// or refused for a released lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_was_lost() {
    cut(Cut::After, b"COMMIT", 3600, both).await;
    cut(Cut::After, b"COMMIT", 0, both).await;
    cut(Cut::After, b"COMMIT", 0, acks_alone).await;
}

/// The database dies with the commit: then nobody can tell, and the answer is no verdict.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_that_cannot_be_found_out_is_no_verdict() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.push_ids("out", "p", ["before"]).await;
    let popped = leased(&broker, &["a"]).await;
    let operations = [ack_op(&popped.messages[0], "completed"), push_op("out", "p", "m")];
    proxy.arm(Cut::After, b"COMMIT");
    let (answer, ()) = tokio::join!(reply(&broker, &operations), async {
        eventually(PATIENCE, async || !proxy.is_armed()).await;
        proxy.go_down();
    });
    if answer.status == 200 {
        // The look-up was quicker than the wire's end.
        assert_eq!(answer.json()["success"], true, "{}", answer.text);
    } else {
        assert_eq!(answer.expect(503).json()["reason"], "db_error");
    }
    proxy.come_back();
    eventually(PATIENCE, || broker.is_healthy()).await;
    let whole = (broker.db.last_offset("out", "p").await, broker.db.cursor("in", "p", GROUP).await.committed);
    assert!(whole == (Some(1), 0) || whole == (Some(0), -1), "whole or not at all: {whole:?}");
}
