//! An ack whose connection breaks (I3, `spec/ack.md` §7).

use std::time::{Duration, Instant};

use crate::harness::{AckResult, Cut, PATIENCE, Pop, Popped, Proxy, Road, TestBroker, eventually, numbered};

const FLUSH_FAILED: &str = "ack flush failed; lease will expire and redeliver";

async fn leased(broker: &TestBroker) -> Popped {
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    let popped = broker.pop(&Pop::partition("q", "p").group("g").all()).await;
    assert_eq!(popped.messages.len(), 3);
    popped
}

/// The bytes of a lease id, as they travel in a statement's parameters.
fn bytes_of(popped: &Popped) -> Vec<u8> {
    uuid::Uuid::parse_str(&popped.lease_id).unwrap().as_bytes().to_vec()
}

/// The answer is the truth: success is committed; anything else names a known failure.
async fn judge(broker: &TestBroker, results: &[AckResult], goal: i64) -> bool {
    let committed = broker.db.cursor("q", "p", "g").await.committed == goal;
    for result in results {
        assert!(!result.success || committed, "success without a commit: {results:?}");
        if !result.success {
            let error = result.error.as_deref().unwrap_or_default();
            assert!(error == FLUSH_FAILED || error == "pool" || error.contains("connection"), "{results:?}");
        }
    }
    committed
}

/// Whatever happened: the messages are finished, or they come back and can be finished.
async fn finish(broker: &TestBroker, committed: bool) {
    broker.db.expire_leases().await;
    let again = broker.pop(&Pop::partition("q", "p").group("g")).await;
    assert_eq!(again.is_empty(), committed, "{again:?}");
    let results = broker.ack("g", again.items("completed")).await;
    assert!(results.iter().all(|r| r.success), "the broker has healed: {results:?}");
    assert_eq!(broker.db.cursor("q", "p", "g").await.committed, 2);
}

/// The commit never reached the database: nothing is committed by it, and no success is told for nothing.
async fn cut_before(road: Road) {
    let (broker, proxy) = TestBroker::behind_a_proxy(road).await;
    let popped = leased(&broker).await;
    proxy.arm(Cut::Before, &bytes_of(&popped));
    let results = broker.ack("g", popped.items("completed")).await;
    assert!(!proxy.is_armed(), "the ack met the cut");
    let committed = judge(&broker, &results, 2).await;
    finish(&broker, committed).await;
}

/// The database carried it out and the answer was lost: the outcome is looked up, or told as failed.
async fn cut_after(road: Road) {
    let (broker, proxy) = TestBroker::behind_a_proxy(road).await;
    let popped = leased(&broker).await;
    proxy.arm(Cut::After, &bytes_of(&popped));
    let results = broker.ack("g", popped.items("completed")).await;
    assert!(!proxy.is_armed(), "the ack met the cut");
    let committed = judge(&broker, &results, 2).await;
    finish(&broker, committed).await;
}

/// The same around the COMMIT of a transaction, as a dead-lettering ack needs one: the row, the cursor and the release
/// are one (§5.6).
async fn cut_commit(road: Road, cut: Cut) {
    let (broker, proxy) = TestBroker::behind_a_proxy(road).await;
    let popped = leased(&broker).await;
    proxy.arm(cut, b"COMMIT");
    let results = broker.ack("g", vec![popped.messages[2].item("dlq")]).await;
    let filed = broker.db.dead_letters().await.len();
    let committed = judge(&broker, &results, 2).await;
    assert_eq!(filed == 1, committed, "one transaction: {results:?}");
    assert_eq!(results[0].dlq, results[0].success, "{results:?}");
    finish(&broker, committed).await;
    assert!(broker.db.dead_letters().await.len() <= 1);
}

/// One bad connection touches no other ack of the same moment for longer than itself.
async fn neighbours(road: Road) {
    let (broker, proxy) = TestBroker::behind_a_proxy(road).await;
    let mut batches = Vec::new();
    for n in 0..12 {
        broker.push_ids("q", &format!("n{n}"), ["x"]).await;
        batches.push(broker.pop(&Pop::partition("q", &format!("n{n}")).group("g").all()).await);
    }
    proxy.arm(Cut::Before, &bytes_of(&batches[5]));
    let acks = batches.iter().map(|popped| broker.ack("g", popped.items("completed")));
    let answers = futures_util::future::join_all(acks).await;
    for (n, results) in answers.iter().enumerate() {
        let committed = broker.db.cursor("q", &format!("n{n}"), "g").await.committed == 0;
        assert_eq!(results[0].success, committed, "n{n}: {results:?}");
    }
    // After it, everything that was not finished can be.
    broker.db.expire_leases().await;
    eventually(PATIENCE, async || {
        for n in 0..12 {
            let popped = broker.pop(&Pop::partition("q", &format!("n{n}")).group("g")).await;
            broker.ack("g", popped.items("completed")).await;
        }
        let left: i64 = sqlx::query_scalar("SELECT count(*) FROM queen.log_consumers WHERE committed < 0")
            .fetch_one(&broker.db.pool)
            .await
            .unwrap();
        left == 0
    })
    .await;
}

/// A row that somebody holds locked fails by itself, in bounded time, and the acks beside it are answered.
async fn locked_row(road: Road) {
    let broker = TestBroker::impatient(road).await;
    let mut batches = Vec::new();
    for n in 0..6 {
        broker.push_ids("q", &format!("n{n}"), ["x"]).await;
        batches.push(broker.pop(&Pop::partition("q", &format!("n{n}")).group("g").all()).await);
    }
    let mut holder = broker.db.pool.begin().await.unwrap();
    sqlx::query(
        "SELECT FROM queen.log_consumers c JOIN queen.log_partitions p ON p.id = c.partition_id
          WHERE p.name = 'n3' FOR UPDATE OF c",
    )
    .execute(&mut *holder)
    .await
    .unwrap();
    let start = Instant::now();
    let acks = batches.iter().map(|popped| broker.ack("g", popped.items("completed")));
    let answers = futures_util::future::join_all(acks).await;
    assert!(start.elapsed() < Duration::from_secs(10), "a few statement timeouts of 1.5 s: {:?}", start.elapsed());
    for (n, results) in answers.iter().enumerate() {
        assert_eq!(results[0].success, n != 3, "n{n}: {results:?}");
    }
    assert!(answers[3][0].error.is_some());
    holder.rollback().await.unwrap();
    assert_eq!(broker.db.cursor("q", "n3", "g").await.committed, -1);
    broker.db.expire_leases().await;
    let again = broker.pop(&Pop::partition("q", "n3").group("g")).await;
    assert!(broker.ack("g", again.items("completed")).await[0].success);
}

macro_rules! on_roads {
    ($($name:ident => $case:expr;)+) => {
        $(mod $name {
            use super::*;

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn registry_and_fusion() {
                ($case)(Road::Fused).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn registry_only() {
                ($case)(Road::RegistryOnly).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn resolution_only() {
                ($case)(Road::ResolutionOnly).await;
            }
        })+
    };
}

on_roads! {
    a_commit_that_never_arrived => cut_before;
    a_commit_whose_answer_was_lost => cut_after;
    a_dead_letter_before_its_commit => |road| cut_commit(road, Cut::Before);
    a_dead_letter_whose_answer_was_lost => |road| cut_commit(road, Cut::After);
    a_broken_connection_spares_the_others => neighbours;
    a_locked_row_fails_alone => locked_row;
}

/// The wire breaks again and again under acks: whatever was answered is what the rows say.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_stay_true_over_many_cuts() {
    let (broker, proxy) = TestBroker::behind_a_proxy(Road::Fused).await;
    for round in 0..12_i64 {
        broker.push_ids("q", "p", [format!("m{round}")]).await;
        let popped = broker.pop(&Pop::partition("q", "p").group("g").all()).await;
        assert_eq!(popped.ids(), [format!("m{round}")]);
        proxy.arm(if round % 2 == 0 { Cut::Before } else { Cut::After }, &bytes_of(&popped));
        let results = broker.ack("g", popped.items("completed")).await;
        if !judge(&broker, &results, round).await {
            finish_one(&broker, &proxy).await;
        }
        assert_eq!(broker.db.cursor("q", "p", "g").await.committed, round);
    }
}

async fn finish_one(broker: &TestBroker, proxy: &Proxy) {
    assert!(!proxy.is_armed());
    broker.db.expire_leases().await;
    let again = broker.pop(&Pop::partition("q", "p").group("g")).await;
    assert!(broker.ack("g", again.items("completed")).await[0].success);
}
