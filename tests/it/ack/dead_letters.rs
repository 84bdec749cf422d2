//! What a dead letter holds, and what its ack answers (`spec/ack.md` §5.4 to §5.6, §6).

use serde_json::json;

use super::{GROUP, cursor, leased, pop};
use crate::harness::{Message, TestBroker, on_every_road};

on_every_road!(
    an_explicit_dlq_files_the_message_at_once,
    completed_items_below_a_dead_letter_are_committed,
    the_row_is_a_snapshot,
    the_reason_is_the_poisons_then_the_groups_then_a_default,
    a_reason_that_is_no_unicode_fails_no_ack,
    the_retry_count_is_snapshotted,
    a_deleted_message_cannot_be_dead_lettered,
    a_dead_letter_at_the_end_of_the_batch_finishes_it,
);

fn with_reason(mut item: serde_json::Value, reason: &str) -> serde_json::Value {
    item["error"] = json!(reason);
    item
}

async fn an_explicit_dlq_files_the_message_at_once(broker: &TestBroker) {
    let popped = leased(broker, 3).await;
    let items = vec![
        popped.messages[2].item("completed"),
        with_reason(popped.messages[0].item("dlq"), "cannot parse"),
        popped.messages[1].item("dlq"),
    ];
    let results = broker.ack(GROUP, items).await;
    assert!(results.iter().all(|r| r.success && r.lease_released && r.error.is_none()), "{results:?}");
    assert_eq!(results.iter().map(|r| r.dlq).collect::<Vec<_>>(), [false, true, false], "the poison item only");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (0, false, 0));
    let filed = broker.db.dead_letters().await;
    assert_eq!(filed.len(), 1);
    assert_eq!((filed[0].transaction_id.as_str(), filed[0].reason.as_str()), ("m0", "cannot parse"));
    assert_eq!(pop(broker).await.ids(), ["m1", "m2"]);
}

async fn completed_items_below_a_dead_letter_are_committed(broker: &TestBroker) {
    let popped = leased(broker, 5).await;
    let items = vec![
        popped.messages[0].item("completed"),
        popped.messages[1].item("completed"),
        popped.messages[3].item("dlq"),
    ];
    let results = broker.ack(GROUP, items).await;
    assert_eq!(
        results.iter().map(|r| (r.success, r.dlq)).collect::<Vec<_>>(),
        [(true, false), (true, false), (true, true)]
    );
    assert_eq!(cursor(broker).await.committed, 3, "the cursor goes to s itself, over the gap at 2");
    assert_eq!(pop(broker).await.ids(), ["m4"]);
}

async fn the_row_is_a_snapshot(broker: &TestBroker) {
    let payload = r#"{"b":1, "a":  [1.50,"é"]}"#;
    let body = format!(
        r#"{{"items":[{{"queue":"q","partition":"p","transactionId":"first","payload":0}},
            {{"queue":"q","partition":"p","transactionId":"it's \"odd\"","payload":{payload}}}]}}"#
    );
    broker.push_body(body).await.expect(201);
    let popped = pop(broker).await;
    let poison: &Message = &popped.messages[1];
    let reason = "boom: \"quoted\"\nsecond line 💥";
    let result = broker.ack_one(GROUP, with_reason(poison.item("dlq"), reason)).await;
    assert!(result.success && result.dlq && result.lease_released, "{result:?}");
    let filed = broker.db.dead_letters().await.remove(0);
    assert_eq!(
        (filed.queue_name.as_str(), filed.partition_name.as_str(), filed.group_name.as_str()),
        ("q", "p", GROUP)
    );
    assert_eq!((filed.log_offset, filed.retry_count), (1, 0));
    assert_eq!((filed.message_id, filed.transaction_id.as_str()), (poison.id.clone(), "it's \"odd\""));
    assert_eq!((filed.payload.as_str(), filed.reason.as_str()), (payload, reason));
    assert_eq!(filed.message_created_at, poison.created_at);
    // No foreign key: it outlives the log.
    broker.db.execute("DELETE FROM queen.log_segments").await;
    assert_eq!(broker.db.dead_letters().await.len(), 1);
}

/// §5.5.
async fn the_reason_is_the_poisons_then_the_groups_then_a_default(broker: &TestBroker) {
    let popped = leased(broker, 6).await;
    let (m, reason) = (&popped.messages, async |n: i64| {
        broker.db.dead_letters().await.into_iter().find(|row| row.log_offset == n).unwrap().reason
    });
    broker.ack(GROUP, vec![with_reason(m[1].item("failed"), "other"), with_reason(m[0].item("dlq"), "mine")]).await;
    assert_eq!(reason(0).await, "mine");
    let m = pop(broker).await.messages;
    broker
        .ack(
            GROUP,
            vec![
                m[0].item("dlq"),
                with_reason(m[2].item("failed"), "first in order"),
                with_reason(m[1].item("failed"), "x"),
            ],
        )
        .await;
    assert_eq!(reason(1).await, "first in order");
    let m = pop(broker).await.messages;
    broker.ack(GROUP, vec![m[0].item("dlq"), m[1].item("completed")]).await;
    assert_eq!(reason(2).await, "Retries exhausted");
    broker.configure("q", json!({ "retryLimit": 0 })).await;
    let m = pop(broker).await.messages;
    broker.ack(GROUP, vec![m[0].failed("handler blew up")]).await;
    assert_eq!(reason(3).await, "handler blew up");
}

/// A payload may hold half a surrogate pair, so a handler's error may quote it. Refused for that, the ack would take its
/// whole batch along, and the message would come back for ever without being charged.
async fn a_reason_that_is_no_unicode_fails_no_ack(broker: &TestBroker) {
    let popped = leased(broker, 4).await;
    let odd =
        |message: &Message, reason| with_reason(message.item("dlq"), "REASON").to_string().replace("REASON", reason);
    let batch = format!(
        r#"{{"consumerGroup":"{GROUP}","acknowledgments":[{},{}]}}"#,
        popped.messages[0].item("completed"),
        odd(&popped.messages[1], r"cut \ud83d here\n\u00e9\ud83d\ude00"),
    );
    let results = broker.post("/api/v1/ack/batch", batch).await.expect(200).json();
    assert_eq!((&results[0]["success"], &results[1]["dlq"]), (&json!(true), &json!(true)), "{results}");
    let popped = pop(broker).await;
    let item = odd(&popped.messages[0], r"\udc00\ud800");
    let single = item.replacen('{', &format!(r#"{{"consumerGroup":"{GROUP}","#), 1);
    let results = broker.post("/api/v1/ack", single).await.expect(200).json();
    assert_eq!(results[0]["dlq"], true, "{results}");
    let reasons: Vec<String> = broker.db.dead_letters().await.into_iter().map(|row| row.reason).collect();
    assert!(reasons[0].starts_with("cut \u{fffd}") && reasons[0].ends_with(" here\né😀"), "{reasons:?}");
    assert!(!reasons[1].is_empty() && reasons[1].chars().all(|c| c == '\u{fffd}'), "{reasons:?}");
    assert_eq!(pop(broker).await.ids(), ["m3"]);
}

async fn the_retry_count_is_snapshotted(broker: &TestBroker) {
    leased(broker, 1).await;
    broker.db.expire_leases().await;
    for _ in 0..2 {
        let popped = pop(broker).await;
        broker.ack(GROUP, popped.items("failed")).await;
    }
    let popped = pop(broker).await;
    broker.ack(GROUP, popped.items("dlq")).await;
    let filed = broker.db.dead_letters().await.remove(0);
    assert_eq!(filed.retry_count, 2);
}

/// §6 `dlq rejected`: nothing filed, the cursor stays, the count is 0, the lease released; the next pop steps over.
async fn a_deleted_message_cannot_be_dead_lettered(broker: &TestBroker) {
    broker.push_ids("q", "p", ["m0"]).await;
    broker.push_ids("q", "p", ["m1"]).await;
    let popped = pop(broker).await;
    broker.ack(GROUP, vec![popped.messages[0].item("failed")]).await;
    let popped = pop(broker).await;
    broker.db.execute("DELETE FROM queen.log_segments WHERE base_offset = 0").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 1").await;
    let result = broker.ack_one(GROUP, popped.messages[0].item("dlq")).await;
    assert!(!result.success && !result.dlq && !result.noop, "{result:?}");
    assert!(result.error.as_deref().is_some_and(|e| e.starts_with("dlq rejected: ")), "{result:?}");
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased, now.batch_retry_count), (-1, false, 0));
    assert!(broker.db.dead_letters().await.is_empty());
    assert_eq!(pop(broker).await.ids(), ["m1"]);
}

async fn a_dead_letter_at_the_end_of_the_batch_finishes_it(broker: &TestBroker) {
    let popped = leased(broker, 2).await;
    let items = vec![popped.messages[0].item("completed"), popped.messages[1].item("dlq")];
    let results = broker.ack(GROUP, items).await;
    assert_eq!(results.iter().map(|r| r.dlq).collect::<Vec<_>>(), [false, true]);
    let now = cursor(broker).await;
    assert_eq!((now.committed, now.leased), (1, false));
    assert!(pop(broker).await.is_empty());
}
