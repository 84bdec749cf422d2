//! A push whose connection breaks (I8, README ruling 7).

use serde_json::{Value, json};

use crate::harness::{Cut, PATIENCE, Pop, PushResult, Road, TestBroker, eventually, eventually_some};

fn item(id: &str) -> Value {
    json!([{ "queue": "q", "partition": "p", "transactionId": id, "payload": id }])
}

/// What travels in the parameters of the storing statement: the packed hash of the transaction id.
fn bytes_of(id: &str) -> [u8; 16] {
    xxhash_rust::xxh3::xxh3_128(id.as_bytes()).to_be_bytes()
}

/// How often the log holds this id.
async fn stored(broker: &TestBroker, id: &str) -> usize {
    let popped =
        broker.pop(&Pop::partition("q", "p").group(&uuid::Uuid::new_v4().to_string()).all().batch(10_000)).await;
    popped.ids().iter().filter(|stored| **stored == id).count()
}

/// Judges one answer against the log, then lets the producer retry until it is stored, and counts again.
async fn judge(broker: &TestBroker, told: &PushResult, id: &str) {
    match told.status.as_str() {
        "queued" => assert_eq!(stored(broker, id).await, 1, "{told:?}"),
        "failed" => {
            assert!(told.error.is_some() && told.offset.is_none(), "{told:?}");
            assert_eq!(stored(broker, id).await, 0, "failed means stored nowhere: {told:?}");
        }
        "buffered" => {
            assert_eq!(told.offset, None);
            eventually(PATIENCE, async || stored(broker, id).await == 1).await;
        }
        other => panic!("{other} for a new key: {told:?}"),
    }
    eventually_some(PATIENCE, async || {
        let again = broker.push(item(id)).await.remove(0);
        matches!(again.status.as_str(), "queued" | "duplicate").then_some(again)
    })
    .await;
    assert_eq!(stored(broker, id).await, 1, "a retry stores nothing twice");
}

async fn cut(cut: Cut, bytes: &[u8], id: &str) {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    broker.push_ids("q", "p", ["before"]).await;
    proxy.arm(cut, bytes);
    let told = broker.push(item(id)).await.remove(0);
    assert!(!proxy.is_armed(), "the push met the cut");
    judge(&broker, &told, id).await;
    assert_eq!(stored(&broker, "before").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_statement_that_never_arrived() {
    cut(Cut::Before, &bytes_of("m"), "m").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_statement_whose_answer_was_lost() {
    cut(Cut::After, &bytes_of("m"), "m").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commit_that_never_arrived() {
    cut(Cut::Before, b"COMMIT", "m").await;
}

/// The hard one: it is stored, and the broker was not told. It must find out: `failed` would be a lie.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commit_whose_answer_was_lost() {
    cut(Cut::After, b"COMMIT", "m").await;
}

/// The same with deduplication off, where a blind retry would store twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_answer_stores_once_also_at_window_zero() {
    for cut in [Cut::Before, Cut::After] {
        let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
        broker.configure("q", json!({ "dedupWindowSeconds": 0 })).await;
        broker.push_ids("q", "p", ["before"]).await;
        proxy.arm(cut, b"COMMIT");
        let told = broker.push(item("m")).await.remove(0);
        assert!(!proxy.is_armed(), "the push met the cut");
        let expected = usize::from(told.status != "failed");
        eventually(PATIENCE, async || stored(&broker, "m").await == expected).await;
    }
}
