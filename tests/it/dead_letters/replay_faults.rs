//! A replay whose connection breaks: moved, or not, and never both; the answer is true or says that it does not know.

use serde_json::json;

use super::{give_up, listed, replay, row_id, stored};
use crate::harness::{Cut, PATIENCE, Road, TestBroker, eventually};

async fn cut(window: i32, at: Cut, bytes: &[u8]) {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.configure("q", json!({ "dedupWindowSeconds": window })).await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    let row = row_id(&broker, "m").await;
    proxy.arm(at, bytes);
    let reply = replay(&broker, &row).await;
    assert!(!proxy.is_armed(), "the replay met the cut");
    let body = reply.json();
    let letters = listed(&broker, "").await.len();
    let copies = stored(&broker, "q", "p").await.iter().filter(|(id, _)| id.starts_with("dlq:")).count();
    assert_eq!(letters + copies, 1, "neither lost nor doubled: {body}");
    match (reply.status, &body["dlqRowRemoved"]) {
        (200, removed) => assert_eq!((removed.as_bool(), copies), (Some(true), 1), "{body}"),
        (500, removed) if removed.is_null() => assert!(reply.text.contains(r#""dlqRowRemoved":null"#), "{body}"),
        (500 | 503, _) => assert_eq!(letters, 1, "{body}"),
        other => panic!("{other:?}"),
    }
    // Whatever was answered, asking again ends in one message.
    eventually(PATIENCE, async || matches!(replay(&broker, &row).await.status, 200 | 404)).await;
    assert!(listed(&broker, "").await.is_empty());
    let copies = stored(&broker, "q", "p").await.iter().filter(|(id, _)| id.starts_with("dlq:")).count();
    assert_eq!(copies, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_never_arrived_is_made_again() {
    for window in [3600, 0] {
        cut(window, Cut::Before, b"COMMIT").await;
    }
}

/// The hard one: it is moved, and the broker was not told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_was_lost_is_found_out() {
    for window in [3600, 0] {
        cut(window, Cut::After, b"COMMIT").await;
    }
}

/// The database goes in the commit and stays away: the outcome is unknown, and the answer says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_that_stays_unknown_is_reported_as_null() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    let row = row_id(&broker, "m").await;
    proxy.arm(Cut::After, b"COMMIT");
    let client = (*broker).clone();
    let asked = {
        let row = row.clone();
        tokio::spawn(async move { replay(&client, &row).await })
    };
    eventually(PATIENCE, async || !proxy.is_armed()).await;
    proxy.go_down();
    let reply = asked.await.unwrap();
    proxy.come_back();
    // The look-up may have been quicker than the outage.
    if reply.status == 500 {
        assert!(
            reply.text.contains(r#""dlqRowRemoved":null"#) && reply.text.contains("dlq move failed: "),
            "{}",
            reply.text
        );
    } else {
        assert_eq!(reply.expect(200).json()["dlqRowRemoved"], true);
    }
    eventually(PATIENCE, async || matches!(replay(&broker, &row).await.status, 200 | 404)).await;
    assert_eq!(stored(&broker, "q", "p").await.len(), 2, "one original, one replay");
}

/// No database at all: 503 with `Retry-After`, nothing happened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_database_nothing_happens() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    let row = row_id(&broker, "m").await;
    proxy.go_down();
    let reply = replay(&broker, &row).await.expect(503);
    assert!(reply.headers.contains_key("retry-after"));
    broker.get("/api/v1/dlq").await.expect(503);
    proxy.come_back();
    eventually(PATIENCE, async || replay(&broker, &row).await.status == 200).await;
    assert_eq!(broker.db.last_offset("q", "p").await, Some(1), "once");
}
