//! What is stored past the spool does not overtake what waits in it (I8, `spec/push-pop.md` §2.9 ordering).

use serde_json::{Value, json};

use super::{drained, push, push_mode, read};
use crate::harness::{Client, Pop, Reply, TestBroker};

async fn transact(client: &Client, id: &str) -> Reply {
    let push =
        json!({ "type": "push", "items": [{ "queue": "q", "partition": "p", "transactionId": id, "payload": id }] });
    client.post_json("/api/v1/transaction", &json!({ "operations": [push] })).await
}

/// A dead letter of another partition; answers its row.
async fn dead_letter(client: &Client) -> String {
    client.push_ids("q", "source", ["given-up"]).await;
    let popped = client.pop(&Pop::partition("q", "source").group("g").all()).await;
    client.ack_one("g", popped.messages[0].item("dlq")).await;
    let rows: Value = client.get("/api/v1/dlq").await.expect(200).json();
    rows["messages"][0]["id"].as_str().unwrap().to_owned()
}

async fn ids(client: &Client) -> Vec<String> {
    read(client, "p").await.into_iter().map(|(_, id)| id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_and_replays_come_behind_the_records_of_their_partition() {
    let broker = TestBroker::start().await;
    let row = dead_letter(&broker).await;
    let to = json!({ "queue": "q", "partition": "p" });
    push_mode(&broker, true).await;
    let spooled: Vec<String> = (0..400).map(|n| format!("s{n}")).collect();
    push(&broker, "p", &spooled).await;
    // Maintenance keeps the records: what would overtake them is refused whole, the rest runs as usual.
    let refused = transact(&broker, "t0").await.expect(429);
    assert_eq!(refused.json()["success"], false);
    assert!(refused.headers.contains_key("retry-after"));
    let elsewhere = json!({ "type": "push", "items": [{ "queue": "q", "partition": "free", "payload": 1 }] });
    let done = broker.post_json("/api/v1/transaction", &json!({ "operations": [elsewhere] })).await.expect(200);
    assert_eq!(done.json()["success"], true, "{}", done.text);
    push_mode(&broker, false).await;
    // Told `buffered` before: these come after, whether the drain has passed or not.
    let done = transact(&broker, "t1").await.expect(200);
    assert_eq!(done.json()["success"], true, "{}", done.text);
    push_mode(&broker, true).await;
    push(&broker, "p", ["s-late"]).await;
    push_mode(&broker, false).await;
    broker.post_json(&format!("/api/v1/dlq/{row}/replay"), &to).await.expect(200);
    drained(&broker).await;
    let mut expected = spooled;
    expected.extend(["t1".to_owned(), "s-late".to_owned(), format!("dlq:{row}")]);
    assert_eq!(ids(&broker).await, expected);
}
