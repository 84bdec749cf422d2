//! Seek: where the cursors go (`spec/admin.md` §7.5).

use serde_json::{Value, json};

use super::{GROUP, beginning, drain, end, seek, seek_partition, seek_partition_reply, seek_reply};
use crate::harness::{Pop, TestBroker, numbered};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_answers_are_those_of_the_table() {
    let broker = TestBroker::start().await;
    broker.push_ids("a queue", "p/1", ["m0"]).await;
    broker.push_ids("a queue", "p2", ["m1"]).await;
    let answer = |to_end: bool, target: Value| {
        json!({"success": true, "consumerGroup": "a group", "queueName": "a queue", "seekToEnd": to_end,
               "targetTimestamp": target, "partitionsUpdated": 2})
    };
    for (body, to_end, target) in [
        (json!({ "toEnd": true }), true, Value::Null),
        (json!({ "timestamp": "2026-07-30T12:42:44+02:00" }), false, json!("2026-07-30T10:42:44.000Z")),
        (json!({ "timestamp": "2026-07-30 10:42:44.1239" }), false, json!("2026-07-30T10:42:44.123Z")),
        (json!({ "timestamp": "Jul 30 2026 10:42" }), false, json!("2026-07-30T10:42:00.000Z")),
        (json!({ "toEnd": true, "timestamp": "1970-01-01T00:00:00Z" }), true, Value::Null),
        (json!({ "toEnd": false, "timestamp": "1970-01-01" }), false, json!("1970-01-01T00:00:00.000Z")),
        (
            json!({ "toEnd": null, "timestamp": "1970-01-01T00:00:00Z", "position": "latest" }),
            false,
            json!("1970-01-01T00:00:00.000Z"),
        ),
    ] {
        assert_eq!(
            seek_reply(&broker, "a group", "a queue", &body).await.expect(200).json(),
            answer(to_end, target),
            "{body}"
        );
    }
    for body in ["", "{}", r#"{"toEnd":true}"#, r#"{"timestamp":""}"#, r#"{"toEnd":false}"#] {
        let reply = seek_partition_reply(&broker, "a group", "a queue", "p/1", body).await.expect(200).json();
        assert_eq!(
            reply,
            json!({"success": true, "consumerGroup": "a group", "queueName": "a queue", "partitionName": "p/1",
                   "seekToEnd": true, "targetTimestamp": null, "updated": true}),
            "{body}"
        );
    }
    let reply =
        seek_partition_reply(&broker, "a group", "a queue", "p2", &beginning().to_string()).await.expect(200).json();
    assert_eq!((&reply["seekToEnd"], &reply["targetTimestamp"]), (&json!(false), &json!("1970-01-01T00:00:00.000Z")));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_names_no_destination_is_refused_and_changes_nothing() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m0"]).await;
    let before = broker.db.row_counts().await;
    let target = "/api/v1/consumer-groups/g/queues/q/seek";
    for body in
        ["", "{}", r#"{"position":"earliest"}"#, r#"{"toEnd":false}"#, r#"{"timestamp":""}"#, r#"{"timestamp":null}"#]
    {
        let reply = broker.post(target, body).await.expect(400).json();
        assert_eq!(reply, json!({"error": "Must specify toEnd=true or a timestamp"}), "{body}");
    }
    for target in [target, "/api/v1/consumer-groups/g/queues/q/partitions/p/seek"] {
        for body in ["{", "[]", "true", "\"end\""] {
            broker.post(target, body).await.expect_refusal(&["bad body: "]);
        }
        for (body, field) in [
            (json!({ "timestamp": "yesterday at noon or so" }), "timestamp"),
            (json!({ "timestamp": "2026-13-45T00:00:00Z" }), "timestamp"),
            (json!({ "timestamp": "infinity" }), "timestamp"),
            (json!({ "timestamp": "nul\0" }), "timestamp"),
            (json!({ "timestamp": "2".repeat(10_000) }), "timestamp"),
            (json!({ "timestamp": 5 }), "timestamp"),
            (json!({ "toEnd": "yes" }), "toEnd"),
        ] {
            broker.post_json(target, &body).await.expect_refusal(&[field]);
        }
    }
    broker
        .post_json(&format!("/api/v1/consumer-groups/{}/queues/q/seek", "x".repeat(1025)), &end())
        .await
        .expect_refusal(&["group"]);
    assert_eq!(broker.db.row_counts().await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_does_not_exist_is_not_found_and_is_not_made() {
    let broker = TestBroker::start().await;
    broker.configure("empty", json!({})).await;
    broker.push_ids("q", "p", ["m0"]).await;
    let before = broker.db.row_counts().await;
    for queue in ["none", "empty"] {
        assert_eq!(
            seek_reply(&broker, GROUP, queue, &end()).await.expect(404).json(),
            json!({"success": false, "error": "Queue not found or has no partitions", "consumerGroup": GROUP,
                   "queueName": queue, "partitionsUpdated": 0})
        );
    }
    for (queue, partition) in [("none", "p"), ("q", "none")] {
        let reply = seek_partition_reply(&broker, GROUP, queue, partition, "{}").await.expect(404).json();
        assert_eq!(reply, json!({"success": false, "error": "Partition not found"}));
    }
    assert_eq!(broker.db.row_counts().await, before);
}

/// The segment is the grain, the walk starts at what is retained, and whatever is younger than all data is the end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timestamp_lands_before_the_first_segment_that_is_not_older() {
    let broker = TestBroker::start().await;
    // One segment a minute, of three messages each: m0..m2 at 00:00, m3..m5 at 00:01, …
    for minute in 0..9 {
        broker.push_ids("q", "p", numbered("m", minute * 3..minute * 3 + 3)).await;
    }
    broker
        .db
        .execute("UPDATE queen.log_segments SET created_at = '2026-01-01T00:00:00Z'::timestamptz + base_offset / 3 * interval '1 minute'")
        .await;
    broker.db.execute("UPDATE queen.log_partitions SET last_write_at = '2026-01-01T00:08:00Z'").await;
    let committed = async |at: &str| {
        seek(&broker, GROUP, "q", json!({ "timestamp": at })).await;
        broker.db.cursor("q", "p", GROUP).await.committed
    };
    for (at, expected) in [
        ("1970-01-01T00:00:00Z", -1),
        ("2026-01-01T00:00:00Z", -1),
        ("2026-01-01T00:00:00.000001Z", 2),
        ("2026-01-01T00:03:00Z", 8),
        ("2026-01-01T00:03:30Z", 11),
        ("2026-01-01T00:07:59Z", 23),
        ("2026-01-01T00:08:00Z", 23),
        ("2026-01-01T00:08:01Z", 26),
        ("2099-01-01T00:00:00Z", 26),
    ] {
        assert_eq!(committed(at).await, expected, "{at}");
    }
    // Retention took the first four segments.
    broker.db.execute("DELETE FROM queen.log_segments WHERE base_offset < 12").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 12").await;
    for (at, expected) in [("1970-01-01", 11), ("2026-01-01T00:03:00Z", 11), ("2026-01-01T00:04:30Z", 14)] {
        assert_eq!(committed(at).await, expected, "{at}, retained from 12");
    }
    // And then all of them.
    broker.db.execute("DELETE FROM queen.log_segments").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 27").await;
    for at in ["1970-01-01", "2026-01-01T00:03:00Z", "2099-01-01"] {
        assert_eq!(committed(at).await, 26, "{at}, nothing retained");
    }
}

/// I13, and step 3 of §7.5: budget, redelivery counters and `retryDelay` of this group, and of no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_forgives_what_was_charged_to_its_group_only() {
    let broker = TestBroker::start().await;
    broker.configure("q", json!({ "retryDelay": 3_600_000, "retryLimit": 5 })).await;
    broker.push_ids("q", "p", numbered("m", 0..3)).await;
    for group in [GROUP, "h"] {
        let popped = broker.pop(&Pop::queue("q").group(group).all().batch(2)).await;
        broker.ack(group, vec![popped.messages[0].item("failed")]).await;
        assert_eq!(broker.db.cursor("q", "p", group).await.batch_retry_count, 1);
        assert!(broker.pop(&Pop::queue("q").group(group)).await.is_empty(), "held back");
    }
    let other = broker.db.cursor("q", "p", "h").await;
    seek(&broker, GROUP, "q", beginning()).await;
    let now = broker.db.cursor("q", "p", GROUP).await;
    assert_eq!((now.committed, now.batch_retry_count, now.held_for), (-1, 0, None));
    let popped = broker.pop(&Pop::queue("q").group(GROUP).batch(10)).await;
    assert_eq!(popped.ids(), ["m0", "m1", "m2"]);
    assert!(popped.messages.iter().all(|m| m.delivery_attempt == 1), "redelivery counters start again");
    let still = broker.db.cursor("q", "p", "h").await;
    assert_eq!((still.committed, still.batch_retry_count), (other.committed, other.batch_retry_count));
    assert!(still.held_for.is_some_and(|seconds| seconds > 3000.0));
}

/// `total_consumed` keeps its value.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_consumed_stays_counted() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", numbered("m", 0..4)).await;
    drain(&broker, "q", GROUP).await;
    let consumed = async || {
        let status = broker.get("/api/v1/status/queues/q").await.expect(200).json();
        let group = broker.get("/api/v1/consumer-groups/g").await.expect(200).json();
        let told = status["partitions"][0]["cursor"]["totalConsumed"].as_i64();
        assert_eq!(told, group["q"]["partitions"][0]["totalConsumed"].as_i64(), "{status} {group}");
        told.unwrap()
    };
    // At the beginning the row need not say: what is below the cursor was consumed.
    assert_eq!(consumed().await, 4);
    seek(&broker, GROUP, "q", beginning()).await;
    assert_eq!(consumed().await, 4);
    drain(&broker, "q", GROUP).await;
    assert_eq!(consumed().await, 8);
    seek(&broker, GROUP, "q", end()).await;
    assert_eq!(consumed().await, 8);
}

/// Every partition of the queue counts, moved or not; a partition seek touches its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_seek_covers_exactly_what_it_names() {
    let broker = TestBroker::start().await;
    for queue in ["q", "other"] {
        for partition in ["a", "b", "c"] {
            broker.push_ids(queue, partition, [format!("{partition}0"), format!("{partition}1")]).await;
        }
        assert_eq!(drain(&broker, queue, GROUP).await.len(), 6);
    }
    assert_eq!(seek(&broker, GROUP, "q", end()).await, 3, "none of them moved");
    seek_partition(&broker, GROUP, "q", "b", beginning()).await;
    assert_eq!(drain(&broker, "q", GROUP).await, ["b0", "b1"]);
    assert_eq!(seek(&broker, GROUP, "q", beginning()).await, 3);
    let mut again = drain(&broker, "q", GROUP).await;
    again.sort();
    assert_eq!(again, ["a0", "a1", "b0", "b1", "c0", "c1"]);
    assert!(drain(&broker, "other", GROUP).await.is_empty());
    seek_partition(&broker, GROUP, "q", "b", beginning()).await;
    seek_partition(&broker, GROUP, "q", "b", end()).await;
    assert!(drain(&broker, "q", GROUP).await.is_empty());
}

/// §17 no. 7: a seek writes cursors for a group that never popped, and its first pop finds them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_that_never_popped_starts_where_the_seek_put_it() {
    let broker = TestBroker::start().await;
    for partition in ["a", "b"] {
        broker.push_ids("q", partition, [format!("{partition}0")]).await;
    }
    assert_eq!(seek(&broker, "early", "q", end()).await, 2);
    assert_eq!(seek(&broker, "late", "q", beginning()).await, 2);
    seek_partition(&broker, "one", "q", "a", end()).await;
    let modes: Vec<Option<String>> =
        sqlx::query_scalar("SELECT mode FROM queen.consumer_groups").fetch_all(&broker.db.pool).await.unwrap();
    assert_eq!(modes, [None, None, None], "not registered");
    assert!(broker.pop(&Pop::queue("q").group("early").all().batch(10)).await.is_empty(), "mode all does not move it");
    let mut ids = broker.pop(&Pop::queue("q").group("late").batch(10).partitions(10)).await.ids().join(" ");
    if ids == "b0 a0" {
        ids = "a0 b0".to_owned();
    }
    assert_eq!(ids, "a0 b0", "the default mode, new, does not either");
    assert_eq!(drain(&broker, "q", "one").await, ["b0"], "the other partition follows its registration");
    broker.push_ids("q", "c", ["c0"]).await;
    assert_eq!(drain(&broker, "q", "early").await, ["c0"]);
}

/// Queue mode is a group like any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queue_mode_can_be_sought() {
    let broker = TestBroker::start().await;
    broker.push_ids("q", "p", ["m0", "m1"]).await;
    assert_eq!(broker.pop(&Pop::queue("q").batch(10).auto_ack()).await.ids(), ["m0", "m1"]);
    assert_eq!(seek(&broker, "__QUEUE_MODE__", "q", beginning()).await, 1);
    assert_eq!(broker.pop(&Pop::queue("q").batch(10).auto_ack()).await.ids(), ["m0", "m1"]);
}
