//! The shape of a pop's answer (`spec/push-pop.md` §7.11).

use serde_json::json;
use serde_json::value::RawValue;

use crate::harness::{Pop, Popped, TestBroker, exchange, keys_of, member};

const TOP: [&str; 8] =
    ["success", "queue", "partition", "partitionId", "leaseId", "consumerGroup", "messages", "partitionsClaimed"];
const MESSAGE: [&str; 11] = [
    "id",
    "transactionId",
    "traceId",
    "data",
    "producerSub",
    "createdAt",
    "partitionId",
    "partition",
    "leaseId",
    "consumerGroup",
    "deliveryAttempt",
];

/// §7.11: exactly these keys, in this order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_come_in_the_documented_order() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    for pop in [Pop::queue("q"), Pop::partition("q", "p").group("g").all(), Pop::queue("q").group("h").all().auto_ack()]
    {
        let reply = broker.pop_reply(&pop).await.expect(200);
        assert_eq!(reply.headers["content-type"], "application/json");
        assert_eq!(keys_of(&reply.text), TOP);
        let messages: Vec<Box<RawValue>> = serde_json::from_str(&member(&reply.text, "messages")).unwrap();
        assert_eq!(messages.len(), 2);
        for message in messages {
            assert_eq!(keys_of(message.get()), MESSAGE);
        }
    }
}

/// §7.11: values of one leased pop.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leased_pop_names_its_lease_group_and_partition_everywhere() {
    let broker = TestBroker::start().await;
    let pushed = broker.push_ids("q", "eu", ["a", "b"]).await;
    let popped = broker.pop(&Pop::queue("q").group("billing").all()).await;
    assert_eq!((popped.queue.as_str(), popped.partition.as_str()), ("q", "eu"));
    assert_eq!((popped.consumer_group.as_str(), popped.partitions_claimed), ("billing", 1));
    let lease = uuid::Uuid::parse_str(&popped.lease_id).unwrap();
    assert_eq!((lease.get_version_num(), lease.to_string()), (7, popped.lease_id.clone()));
    uuid::Uuid::parse_str(&popped.partition_id).unwrap();
    for (message, pushed) in popped.messages.iter().zip(&pushed) {
        assert_eq!(message.id, pushed.message_id);
        assert_eq!(message.data, json!({ "id": pushed.transaction_id }));
        assert_eq!((message.trace_id.as_deref(), message.producer_sub.as_deref()), (None, None));
        assert_eq!((&message.partition_id, message.partition.as_str()), (&popped.partition_id, "eu"));
        assert_eq!((&message.lease_id, message.consumer_group.as_str()), (&popped.lease_id, "billing"));
        assert_eq!(message.delivery_attempt, 1);
    }
    let next = broker.pop(&Pop::queue("q").group("other").all()).await;
    assert_ne!(next.lease_id, popped.lease_id, "one lease id per request");
    assert_eq!(next.partition_id, popped.partition_id, "a partition keeps its id");
}

/// §7.11: without a group the answer names queue mode.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_mode_is_named() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a"]).await;
    let popped = broker.pop(&Pop::queue("q")).await;
    assert_eq!(popped.consumer_group, "__QUEUE_MODE__");
    assert_eq!(popped.messages[0].consumer_group, "__QUEUE_MODE__");
}

/// §1.1: RFC 3339, UTC, six fractional digits, literal `Z`, and it is the segment's commit time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn created_at_has_six_digits_and_is_the_segments() {
    let broker = TestBroker::forgetful().await;
    broker.push_ids("q", "p", ["a"]).await;
    // Zeros at the end must be written out.
    for stamp in ["2026-07-30 11:02:44.512873+00", "2026-07-30 11:02:44.5+00", "1999-12-31 23:59:59+00"] {
        sqlx::query("UPDATE queen.log_segments SET created_at = $1::text::timestamptz")
            .bind(stamp)
            .execute(&broker.db.pool)
            .await
            .unwrap();
        let popped = broker.pop(&Pop::queue("q").group(stamp).all()).await;
        let (date, time) = stamp.trim_end_matches("+00").split_once(' ').unwrap();
        let (time, fraction) = time.split_once('.').unwrap_or((time, ""));
        assert_eq!(popped.messages[0].created_at, format!("{date}T{time}.{fraction:0<6}Z"));
    }
}

/// §1.1, §7.11: nothing to deliver is a 204 with no body, no length, no type.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_to_deliver_is_a_bodiless_204() {
    let broker = TestBroker::start().await;
    broker.push_ids("leased", "p", ["a"]).await;
    broker.pop(&Pop::queue("leased")).await;
    for target in [
        "/api/v1/pop/queue/unknown",
        "/api/v1/pop/queue/unknown/partition/p",
        "/api/v1/pop?namespace=unknown",
        "/api/v1/pop/queue/leased",
        "/api/v1/pop/queue/leased/partition/p",
        "/api/v1/pop/queue/leased?wait=true&timeout=50",
        "/api/v1/pop/queue/leased?consumerGroup=new&subscriptionMode=new",
    ] {
        let request = format!("GET {target} HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n");
        let reply = exchange(broker.address, request.as_bytes()).await;
        assert_eq!((reply.status, reply.body.as_slice()), (204, &b""[..]), "{target}");
        assert!(reply.header("content-length").is_none_or(|length| length == "0"), "{target}: {reply:?}");
        assert_eq!(reply.header("content-type"), None, "{target}");
        assert_eq!(reply.header("transfer-encoding"), None, "{target}");
    }
}

/// §7.8: `autoAck` leaves the lease id empty, at the top and in every message.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_auto_ack_answer_has_empty_lease_ids() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["a", "b"]).await;
    let popped: Popped = broker.pop(&Pop::queue("q").auto_ack()).await;
    assert_eq!(popped.lease_id, "");
    assert!(popped.messages.iter().all(|m| m.lease_id.is_empty() && m.delivery_attempt == 1));
}

/// §7.11: messages are grouped by partition, in offset order; the top level names the first claimed partition.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_are_grouped_by_partition_in_offset_order() {
    let broker = TestBroker::start().await;
    for n in 0..4 {
        for partition in ["a", "b", "c"] {
            broker.push_ids("q", partition, [format!("{partition}{n}")]).await;
        }
    }
    let popped = broker.pop(&Pop::queue("q").partitions(3)).await;
    assert_eq!(popped.partitions_claimed, 3);
    assert_eq!(popped.partition, popped.messages[0].partition);
    assert_eq!(popped.partition_id, popped.messages[0].partition_id);
    let chunks: Vec<_> = popped.messages.chunk_by(|x, y| x.partition == y.partition).collect();
    assert_eq!(chunks.len(), 3, "each partition once");
    for chunk in chunks {
        let ids: Vec<String> = (0..4).map(|n| format!("{}{n}", chunk[0].partition)).collect();
        assert_eq!(chunk.iter().map(|m| m.transaction_id.clone()).collect::<Vec<_>>(), ids);
        assert!(chunk.iter().all(|m| m.partition_id == chunk[0].partition_id));
    }
}
