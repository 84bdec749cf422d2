//! `POST /api/v1/lease/:leaseId/extend` (`spec/push-pop.md` §8).

use std::time::Instant;

use serde_json::Value;

use crate::harness::{Pop, TestBroker, assert_left, encode, exchange, keys_of};

const GROUP: &str = "g";

async fn lease_left(broker: &TestBroker, partition: &str) -> f64 {
    broker.db.cursor("q", partition, GROUP).await.lease_left.unwrap()
}

/// A lease of 10 s on one message of `q`/`p`; answers its id.
async fn lease(broker: &TestBroker) -> String {
    broker.push_ids("q", "p", ["m"]).await;
    broker.pop(&Pop::queue("q").group(GROUP).all().lease(10)).await.lease_id
}

/// The keys, in order, and the three names of one instant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answer_names_the_lease_and_its_new_expiry_three_times() {
    let broker = TestBroker::start().await;
    let id = lease(&broker).await;
    let asked = Instant::now();
    let reply = broker.post(&format!("/api/v1/lease/{id}/extend"), r#"{"seconds":120}"#).await.expect(200);
    let keys = ["leaseId", "success", "renewed", "newExpiresAt", "expiresAt", "lease_expires_at"];
    assert_eq!(keys_of(&reply.text), keys);
    let body = reply.json();
    assert_eq!((&body["leaseId"], &body["success"], &body["renewed"]), (&Value::from(id), &true.into(), &1.into()));
    assert_eq!(body["newExpiresAt"], body["expiresAt"]);
    assert_eq!(body["newExpiresAt"], body["lease_expires_at"]);
    let stamp: String = sqlx::query_scalar(
        "SELECT to_char(lease_expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"Z\"') FROM queen.log_consumers",
    )
    .fetch_one(&broker.db.pool)
    .await
    .unwrap();
    assert_eq!(body["newExpiresAt"], stamp.as_str());
    assert_left(lease_left(&broker, "p").await, 120.0, asked);
}

/// 60 s for every body that says nothing usable, and never a `400`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_unusable_body_means_sixty_seconds() {
    let broker = TestBroker::start().await;
    let bodies = [
        "",
        "{}",
        "null",
        "not json",
        "{",
        "[]",
        "7",
        r#"{"seconds":null}"#,
        r#"{"seconds":"30"}"#,
        r#"{"seconds":1.5}"#,
        r#"{"seconds":true}"#,
        r#"{"other":5}"#,
    ];
    for (n, body) in bodies.into_iter().enumerate() {
        let partition = format!("p{n}");
        broker.push_ids("q", &partition, ["m"]).await;
        let popped = broker.pop(&Pop::queue("q").group(GROUP).all().lease(10)).await;
        let asked = Instant::now();
        let reply = broker.post(&format!("/api/v1/lease/{}/extend", popped.lease_id), body).await.expect(200);
        assert_eq!(reply.json()["renewed"], 1, "{body}");
        assert_left(lease_left(&broker, &partition).await, 60.0, asked);
    }
}

/// No body, no `Content-Type`, no `Content-Length`: what Python really sends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_a_body_extends_by_sixty() {
    let broker = TestBroker::start().await;
    let id = lease(&broker).await;
    let request = format!("POST /api/v1/lease/{id}/extend HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n");
    let asked = Instant::now();
    let reply = exchange(broker.address, request.as_bytes()).await;
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    assert_left(lease_left(&broker, "p").await, 60.0, asked);
}

/// Values below 1 count as 1; an extension never shortens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extension_never_shortens() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let asked = Instant::now();
    let id = broker.pop(&Pop::queue("q").group(GROUP).all().lease(100)).await.lease_id;
    for seconds in [1, 0, -100, i64::from(i32::MIN), 5] {
        let answer = broker.extend(&id, seconds).await;
        assert_eq!((&answer["success"], &answer["renewed"]), (&true.into(), &1.into()), "{seconds}");
        assert_left(lease_left(&broker, "p").await, 100.0, asked);
    }
    let asked = Instant::now();
    broker.extend(&id, 400).await;
    broker.extend(&id, 200).await;
    assert_left(lease_left(&broker, "p").await, 400.0, asked);
}

/// An enormous extension is an extension.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_huge_extension_is_no_error() {
    let broker = TestBroker::start().await;
    let id = lease(&broker).await;
    for seconds in [i64::from(i32::MAX), i64::MAX] {
        let answer = broker.extend(&id, seconds).await;
        assert_eq!(answer["success"], true, "{seconds}: {answer}");
    }
    assert!(lease_left(&broker, "p").await > 86_400.0);
}

/// Unknown, malformed, expired and released ids are the same answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_and_unknown_leases_look_alike() {
    let broker = TestBroker::start().await;
    let expired = lease(&broker).await;
    broker.db.expire_leases().await;
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP)).await;
    let nacked = popped.lease_id.clone();
    broker.ack(GROUP, popped.items("retry")).await;
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP)).await;
    let finished = popped.lease_id.clone();
    broker.ack(GROUP, popped.items("completed")).await;
    let before = broker.db.cursor("q", "p", GROUP).await;
    let unknown = uuid::Uuid::now_v7().to_string();
    for id in [expired.as_str(), &nacked, &finished, &unknown, "any string", "a/b%?", "💥", &"x".repeat(900)] {
        let reply = broker.post(&format!("/api/v1/lease/{}/extend", encode(id)), r#"{"seconds":60}"#).await.expect(200);
        let body = reply.json();
        assert_eq!(
            (&body["leaseId"], &body["success"], &body["renewed"]),
            (&Value::from(id), &false.into(), &0.into())
        );
        for key in ["newExpiresAt", "expiresAt", "lease_expires_at"] {
            assert_eq!(body[key], Value::Null, "{id}");
        }
        assert!(body.as_object().unwrap().contains_key("expiresAt"));
    }
    let after = broker.db.cursor("q", "p", GROUP).await;
    assert_eq!((after.committed, after.leased), (before.committed, false), "never revived");
}

/// One call covers all partitions of the pop, and answers the earliest expiry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_call_extends_every_partition_still_held() {
    let broker = TestBroker::start().await;
    for partition in ["a", "b", "c"] {
        broker.push_ids("q", partition, ["m"]).await;
    }
    let popped = broker.pop(&Pop::queue("q").group(GROUP).all().partitions(3).lease(10)).await;
    let finished = popped.messages.iter().find(|m| m.partition == "b").unwrap();
    broker.ack(GROUP, vec![finished.item("completed")]).await;
    broker
        .db
        .execute("UPDATE queen.log_consumers SET lease_expires_at = lease_expires_at + interval '200 s' WHERE worker_id IS NOT NULL AND partition_id = (SELECT id FROM queen.log_partitions WHERE name = 'a')")
        .await;
    let asked = Instant::now();
    let answer = broker.extend(&popped.lease_id, 30).await;
    assert_eq!((&answer["success"], &answer["renewed"]), (&true.into(), &2.into()));
    let (a, c) = (lease_left(&broker, "a").await, lease_left(&broker, "c").await);
    assert!(a > 100.0, "{a}");
    assert_left(c, 30.0, asked);
    let earliest: bool = sqlx::query_scalar(
        "SELECT min(lease_expires_at) = $1::text::timestamptz FROM queen.log_consumers WHERE worker_id IS NOT NULL",
    )
    .bind(answer["expiresAt"].as_str().unwrap())
    .fetch_one(&broker.db.pool)
    .await
    .unwrap();
    assert!(earliest, "{answer}");
}

/// It touches neither the cursor, the retry budget nor `deliveryAttempt`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_extension_touches_nothing_else() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m0", "m1"]).await;
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP).all()).await;
    broker.ack(GROUP, popped.items("failed")).await;
    let popped = broker.pop(&Pop::partition("q", "p").group(GROUP).lease(10)).await;
    let before = broker.db.cursor("q", "p", GROUP).await;
    broker.extend(&popped.lease_id, 100).await;
    let after = broker.db.cursor("q", "p", GROUP).await;
    assert_eq!((after.committed, after.batch_end, after.worker), (before.committed, before.batch_end, before.worker));
    assert_eq!(after.batch_retry_count, 1);
    broker.db.expire_leases().await;
    assert_eq!(broker.pop(&Pop::partition("q", "p").group(GROUP)).await.messages[0].delivery_attempt, 3);
}

/// A short lease renewed in time stays exclusive well past its first length, and its ack is accepted **[T]**.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewed_lease_stays_exclusive() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m"]).await;
    let popped = broker.pop(&Pop::queue("q").group(GROUP).all().lease(4)).await;
    for _ in 0..4 {
        assert_eq!(broker.extend(&popped.lease_id, 6).await["success"], true);
        // A parked pop of the same group lets 1.5 s go by, and must stay empty.
        assert!(broker.pop(&Pop::queue("q").group(GROUP).wait_ms(1500)).await.is_empty());
    }
    let acks = broker.ack(GROUP, popped.items("completed")).await;
    assert!(acks[0].success && acks[0].lease_released, "{acks:?}");
}
