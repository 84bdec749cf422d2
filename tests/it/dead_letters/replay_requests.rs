//! What a replay is asked for, and what it refuses (`spec/admin.md` §6.3, §6.4).

use serde_json::json;

use super::{give_up, listed, replay, retry, row_id, stored};
use crate::harness::TestBroker;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_half_of_the_destination_defaults_to_the_source() {
    let broker = TestBroker::start().await;
    for (nth, (body, queue, partition)) in [
        ("", "q", "p"),
        ("  \n", "q", "p"),
        ("{}", "q", "p"),
        (r#"{"queue":null,"partition":null}"#, "q", "p"),
        (r#"{"queue":" new queue "}"#, "new queue", "p"),
        (r#"{"partition":" lane 2 "}"#, "q", "lane 2"),
        (r#"{"queue":"third","partition":"lane 3"}"#, "third", "lane 3"),
    ]
    .into_iter()
    .enumerate()
    {
        let id = format!("m{nth}");
        give_up(&broker, "q", "p", "g", &[&id]).await;
        let row = row_id(&broker, &id).await;
        let answer = broker.post(&format!("/api/v1/dlq/{row}/replay"), body).await.expect(200).json();
        assert_eq!((&answer["queue"], &answer["partition"]), (&json!(queue), &json!(partition)), "{body}");
        assert_eq!((&answer["result"], &answer["replayedAs"]["queueName"]), (&json!("moved"), &json!(queue)));
        let there = stored(&broker, queue, partition).await;
        assert_eq!(there.last(), Some(&(format!("dlq:{row}"), json!({ "id": id }))), "{body}");
        if (queue, partition) == ("q", "p") {
            // Out of the way of the next round.
            super::give_up_next(&broker, "q", "p", "g", 1).await;
            super::delete(&broker, "/api/v1/dlq?queue=q").await.expect(200);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_body_moves_nothing() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    let row = row_id(&broker, "m").await;
    let target = format!("/api/v1/dlq/{row}/replay");
    let before = broker.db.row_counts().await;
    for body in ["{", "nonsense", "[]", "\"q\"", "{\"queue\":\"a\"} x"] {
        broker.post(&target, body).await.expect_refusal(&["bad body: "]);
    }
    for (body, field) in [
        (json!({ "queue": " " }), "queue"),
        (json!({ "partition": "" }), "partition"),
        (json!({ "queue": 5 }), "queue"),
        (json!({ "partition": ["p"] }), "partition"),
        (json!({ "queue": "n\0l" }), "queue"),
        (json!({ "partition": "x".repeat(1025) }), "partition"),
    ] {
        broker.post_json(&target, &body).await.expect_refusal(&[field]);
    }
    assert_eq!(broker.db.row_counts().await, before);
    // The address route takes anything for a body.
    let partition = super::listing(&broker, "").await["messages"][0]["partitionId"].as_str().unwrap().to_owned();
    broker.post(&format!("{}/retry", super::address(&partition, "m")), "nonsense").await.expect(200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_row_is_gone() {
    let broker = TestBroker::start().await;
    let unknown = uuid::Uuid::new_v4().to_string();
    for id in [unknown.as_str(), "no uuid", "1/2", "'; DROP"] {
        let mut body = replay(&broker, id).await.expect(404).json();
        assert!(body.as_object_mut().unwrap().remove("message").is_some_and(|text| text.is_string()));
        assert_eq!(body, json!({"success": false, "result": "gone", "dlqId": id, "error": "Message not found"}));
    }
}

/// The window knows `dlq:<row id>` already: nothing is written and the row stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_keeps_the_row() {
    let broker = TestBroker::start().await;
    let partition = give_up(&broker, "q", "p", "g", &["m"]).await;
    let row = row_id(&broker, "m").await;
    broker.push_ids("q", "p", ["between".to_owned(), format!("dlq:{row}")]).await;
    for _ in 0..2 {
        let body = retry(&broker, &partition, "m").await.expect(200).json();
        assert_eq!(
            body,
            json!({"success": true, "result": "duplicate", "queue": "q", "partition": "p", "consumerGroup": "g",
                   "dlqId": row, "originalTransactionId": "m", "dlqRowRemoved": false,
                   "replayedAs": {"index": 0, "message_id": "00000000-0000-0000-0000-000000000000",
                                  "transaction_id": format!("dlq:{row}"), "queueName": "q", "status": "duplicate",
                                  "offset": 2}})
        );
    }
    assert_eq!(listed(&broker, "").await, ["m"]);
    assert_eq!(broker.db.last_offset("q", "p").await, Some(2));
}

/// `spec/transactions-kv-timers.md` Q12.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timers_dead_letter_is_refused() {
    let broker = TestBroker::start().await;
    let partition = give_up(&broker, "q", "p", "g", &["m"]).await;
    broker.db.execute("UPDATE queen.dead_letters SET group_name = '__timer__'").await;
    let row = row_id(&broker, "m").await;
    for reply in [replay(&broker, &row).await, retry(&broker, &partition, "m").await] {
        assert_eq!(
            reply.expect(409).json(),
            json!({"success": false, "result": "timer", "error": "timer dead letters cannot be replayed",
                   "dlqRowRemoved": false})
        );
    }
    assert_eq!(listed(&broker, "").await, ["m"]);
}

/// A destination that encrypts, and no key: refused, and nothing happened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_move_says_that_the_row_stays() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q", "p", "g", &["m"]).await;
    let row = row_id(&broker, "m").await;
    broker.configure("q", json!({ "encryptionEnabled": true })).await;
    let body = replay(&broker, &row).await.expect(500).json();
    assert_eq!((&body["success"], &body["dlqRowRemoved"]), (&json!(false), &json!(false)));
    assert!(body["error"].as_str().unwrap().contains("QUEEN_ENCRYPTION_KEY"), "{body}");
    assert_eq!(listed(&broker, "").await, ["m"]);
    assert_eq!(broker.db.last_offset("q", "p").await, Some(0));
}
