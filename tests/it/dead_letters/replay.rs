//! Replay is a move (`spec/admin.md` §6.3, §6.4): the message is stored and the row goes, in one transaction.

use std::time::{Duration, Instant};

use futures_util::future::join_all;
use serde_json::{Value, json};

use super::{NOT_FOUND, give_up, give_up_next, listed, replay, retry, row_id, stored};
use crate::harness::{Broker, Client, Pop, TestBroker, empty_database};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_moves_the_message_to_the_tail_of_its_partition() {
    let broker = TestBroker::start().await;
    let partition = give_up(&broker, "q", "p", "g", &["a"]).await;
    broker.push_ids("q", "p", ["b"]).await;
    let row = row_id(&broker, "a").await;
    let mut body = retry(&broker, &partition, "a").await.expect(200).json();
    let message_id = body["replayedAs"]["message_id"].take();
    assert!(uuid::Uuid::try_parse(message_id.as_str().unwrap()).is_ok_and(|id| !id.is_nil()));
    assert_eq!(
        body,
        json!({"success": true, "result": "moved", "queue": "q", "partition": "p", "consumerGroup": "g",
               "dlqId": row, "originalTransactionId": "a", "dlqRowRemoved": true,
               "replayedAs": {"index": 0, "message_id": null, "transaction_id": format!("dlq:{row}"),
                              "queueName": "q", "status": "queued", "offset": 2}})
    );
    assert!(listed(&broker, "").await.is_empty());
    // Every group gets it, not only the one that failed it, and with the same payload.
    for group in ["g", "other"] {
        let popped = broker.pop(&Pop::partition("q", "p").group(group).all().batch(10)).await;
        let last = popped.messages.last().unwrap();
        assert_eq!((&last.transaction_id, &last.data), (&format!("dlq:{row}"), &json!({"id": "a"})), "{group}");
        assert_eq!(last.id, message_id.as_str().unwrap());
        assert_eq!(popped.ids().iter().filter(|id| id.starts_with("dlq:")).count(), 1);
    }
    let again = retry(&broker, &partition, "a").await.expect(404).json();
    assert_eq!(again["error"], NOT_FOUND);
}

/// §6.3: the address's newest row; the other groups' rows stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_takes_the_newest_row_of_the_address() {
    let broker = TestBroker::start().await;
    let partition = give_up(&broker, "q", "p", "first", &["a"]).await;
    give_up_next(&broker, "q", "p", "second", 1).await;
    let body = retry(&broker, &partition, "a").await.expect(200).json();
    assert_eq!(body["consumerGroup"], "second");
    let left = broker.db.dead_letters().await;
    assert_eq!(left.iter().map(|row| row.group_name.as_str()).collect::<Vec<_>>(), ["first"]);
    assert_eq!(retry(&broker, &partition, "a").await.expect(200).json()["consumerGroup"], "first");
    assert_eq!(stored(&broker, "q", "p").await.len(), 3, "each row is a message of its own");
}

/// The snapshot is all that a replay needs: the segment may be gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_whose_segment_was_deleted_is_replayed() {
    let broker = TestBroker::start().await;
    let partition = give_up(&broker, "q", "p", "g", &["a"]).await;
    broker.db.execute("DELETE FROM queen.log_segments").await;
    broker.db.execute("DELETE FROM queen.log_txns").await;
    broker.db.execute("UPDATE queen.log_partitions SET log_start = 1, txns_start = 1").await;
    retry(&broker, &partition, "a").await.expect(200);
    assert_eq!(
        stored(&broker, "q", "p").await.into_iter().map(|(_, data)| data).collect::<Vec<_>>(),
        [json!({"id": "a"})]
    );
}

/// A replayed message that fails again is filed again, under its new identity, and can be replayed again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replayed_message_can_be_given_up_and_replayed_again() {
    let broker = TestBroker::start().await;
    give_up(&broker, "q", "p", "g", &["a"]).await;
    let mut before = "a".to_owned();
    for _ in 0..3 {
        let row = row_id(&broker, &before).await;
        replay(&broker, &row).await.expect(200);
        give_up_next(&broker, "q", "p", "g", 1).await;
        before = format!("dlq:{row}");
        assert_eq!(listed(&broker, "").await, [before.clone()]);
    }
}

/// §6.3: two callers at once, by whichever route, to whichever place, through whichever broker: one moves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_replays_at_once_one_moves() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for window in [3600, 0] {
        let queue = format!("q{window}");
        a.configure(&queue, json!({ "dedupWindowSeconds": window })).await;
        for round in 0..6 {
            let id = format!("m{round}");
            let partition = give_up(&a, &queue, &format!("p{round}"), "g", &[&id]).await;
            let row = row_id(&a, &id).await;
            let before: usize = stored_everywhere(&a, &queue).await;
            let calls = (0..12).map(|n| {
                let client: Client = if n % 2 == 0 { (*a).clone() } else { (*b).clone() };
                let (partition, row, id, queue) = (partition.clone(), row.clone(), id.clone(), queue.clone());
                async move {
                    match n % 3 {
                        0 => retry(&client, &partition, &id).await,
                        1 => replay(&client, &row).await,
                        _ => {
                            let to = json!({ "queue": format!("{queue}-elsewhere"), "partition": format!("lane{n}") });
                            client.post_json(&format!("/api/v1/dlq/{row}/replay"), &to).await
                        }
                    }
                }
            });
            let replies = join_all(calls).await;
            let moved = replies.iter().filter(|reply| reply.status == 200).count();
            let gone = replies.iter().filter(|reply| reply.status == 404).count();
            assert_eq!((moved, gone), (1, 11), "{:?}", replies.iter().map(|r| &r.text).collect::<Vec<_>>());
            assert_eq!(stored_everywhere(&a, &queue).await, before + 1, "stored once");
        }
    }
    assert!(listed(&a, "").await.is_empty());
    assert_eq!(a.db.deadlocks().await, 0);
}

/// Messages stored in this queue and in the one beside it.
async fn stored_everywhere(broker: &TestBroker, queue: &str) -> usize {
    let sql = "SELECT coalesce(sum(p.last_offset + 1), 0)::bigint FROM queen.log_partitions p \
               JOIN queen.queues q ON q.id = p.queue_id WHERE q.name IN ($1, $1 || '-elsewhere')";
    let count: i64 = sqlx::query_scalar(sql).bind(queue).fetch_one(&broker.db.pool).await.unwrap();
    count as usize
}

/// §6.3: waiting pops are woken after the commit, here and on other brokers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_wakes_waiting_pops_on_every_broker() {
    let a = TestBroker::start().await;
    let b = a.another().await;
    for (nth, client) in [(*a).clone(), (*b).clone()].into_iter().enumerate() {
        let queue = format!("q{nth}");
        give_up(&a, &queue, "p", "g", &["m"]).await;
        let row = row_id(&a, "m").await;
        let waiting = {
            let (client, queue) = (client.clone(), queue.clone());
            tokio::spawn(
                async move { (client.pop(&Pop::queue(&queue).group("g").wait_ms(20_000)).await, Instant::now()) },
            )
        };
        assert!(client.pop(&Pop::queue("quiet").wait_ms(400)).await.is_empty(), "the pop parks meanwhile");
        let sent = Instant::now();
        replay(&a, &row).await.expect(200);
        let (popped, at) = waiting.await.unwrap();
        assert_eq!(popped.ids(), [format!("dlq:{row}")]);
        assert!(at.saturating_duration_since(sent) < Duration::from_millis(1500), "broker {nth}");
    }
}

/// §6.3: the snapshot is opened, and sealed again only if the destination asks for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encryption_follows_the_destination() {
    let db = empty_database().await;
    let key = "0123456789abcdef".repeat(4);
    let broker =
        Broker::from_environment([("DATABASE_URL", db.url.as_str()), ("QUEEN_ENCRYPTION_KEY", &key)]).await.unwrap();
    broker.configure("sealed", json!({ "encryptionEnabled": true })).await;
    broker.configure("plain", json!({})).await;
    let is_sealed = async |queue: &str| -> Vec<bool> {
        let group = format!("g{}", uuid::Uuid::new_v4());
        give_up_next(&broker, queue, "p", &group, stored(&broker, queue, "p").await.len()).await;
        let rows = db.dead_letters().await;
        rows.into_iter().filter(|row| row.group_name == group).map(|row| row.payload.contains("authTag")).collect()
    };
    give_up(&broker, "sealed", "p", "g", &["s1", "s2"]).await;
    give_up(&broker, "plain", "p", "g", &["p1"]).await;
    let listing: Value = broker.get("/api/v1/dlq?consumerGroup=g").await.expect(200).json();
    for row in listing["messages"].as_array().unwrap() {
        let id = row["transactionId"].as_str().unwrap();
        assert_eq!(row["data"], json!({ "id": id }), "decrypted for the listing");
        let expected = if id.starts_with('s') { json!(true) } else { Value::Null };
        assert_eq!(row["isEncrypted"], expected);
        let to = match id {
            "s1" => json!({ "queue": "plain" }),
            "p1" => json!({ "queue": "sealed" }),
            _ => json!({}),
        };
        let target = format!("/api/v1/dlq/{}/replay", row["id"].as_str().unwrap());
        broker.post_json(&target, &to).await.expect(200);
    }
    let ids = |rows: Vec<(String, Value)>| rows.into_iter().map(|(_, data)| data["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(stored(&broker, "plain", "p").await), ["p1", "s1"]);
    assert_eq!(is_sealed("plain").await, [false, false]);
    assert_eq!(is_sealed("sealed").await, [true, true, true, true]);
    broker.stop().await;
}
